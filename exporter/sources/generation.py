"""A generation: one open file, known by device, inode and its first bytes, whatever its name is now.

The size of a file may have regrown past the old position, so what stands in front of the position
is read again with every block and must be what it was.
"""

# Paths are compared as text and looked at by the thousand, so they stay strings here.
# ruff: noqa: PTH116

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b

from .framing import MAX_LINE
from .scan import BLOCK

HEAD = 1024  # bytes at the beginning that a generation is recognised by
LAST = 256  # bytes before a position that must still be there
HELD = 16 << 10  # a longer unfinished line is read again when its end comes, not kept

Key = tuple[int, int]  # device, inode


def digest(data: bytes) -> str:
    """What bytes are recognised by."""
    return blake2b(data, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in one generation, with what is needed to recognise the generation again.

    ``fingerprint`` is over ``fingerprint_length`` bytes from ``start`` on (not 0 only where the
    file begins with a hole), ``last`` over the ``last_length`` bytes before ``offset``: logs that
    begin with the same banner differ there. ``modified`` is the modification time, in ns, when
    the file was last found to be that generation. ``ended``: everything was given out; ``gone``:
    and the file was deleted, so that whatever has its inode now is another one. ``follows`` is the
    stream that was at this path before. ``copied``: the file is a copy of what was truncated, and
    will not grow.
    """

    stream: str
    path: str
    real: str
    device: int
    inode: int
    offset: int
    start: int
    fingerprint_length: int
    fingerprint: str
    last_length: int
    last: str
    modified: int
    ended: bool = False
    gone: bool = False
    follows: str = ""
    copied: bool = False

    def token(self) -> str:
        """The mark as JSON; the stream is the key it is kept under."""
        values = asdict(self)
        del values["stream"]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def parse(cls, stream: str, token: str) -> Mark | None:
        """The mark in ``token``, or None if it is none of a file."""
        try:
            mark = cls(stream=stream, **json.loads(token))
        except (ValueError, TypeError):
            return None
        numbers = (mark.device, mark.inode, mark.offset, mark.start, mark.modified)
        lengths = (mark.fingerprint_length, mark.last_length)
        if not all(type(n) is int and n >= 0 for n in numbers + lengths):
            return None
        texts = (mark.path, mark.real, mark.fingerprint, mark.last, mark.follows)
        if not all(type(t) is str for t in texts) or "\0" in mark.path + mark.real:
            return None
        sane = mark.fingerprint_length <= HEAD and mark.last_length <= min(LAST, mark.offset)
        flags = mark.ended, mark.gone, mark.copied
        return mark if sane and all(type(f) is bool for f in flags) else None

    def fits(self, fd: int, size: int) -> bool:
        """Whether the open file holds what was read up to this mark. Raises ``OSError``."""
        if size < self.offset:
            return False
        head = os.pread(fd, self.fingerprint_length, self.start)
        last = os.pread(fd, self.last_length, self.offset - self.last_length)
        return digest(head) == self.fingerprint and digest(last) == self.last


class ReplacedError(Exception):
    """The file no longer holds what was read from it."""


@dataclass(slots=True, eq=False)
class Generation:
    """One generation of a file, read block by block.

    ``offset`` is behind the last byte given out, ``scanned`` behind the last byte looked at:
    between them lies an unfinished line. It is kept in ``held`` while it is short.
    """

    fd: int
    path: str
    real: str
    key: Key
    stream: str = ""  # named when it first says something: an empty file has nothing to be known by
    offset: int = 0
    scanned: int = 0
    start: int = 0
    head: bytes = b""
    behind: bytes = b""  # before offset
    last: bytes = b""  # before scanned
    held: bytes | None = b""
    size: int = 0
    links: int = 1
    complete: int = -1  # modification time at which everything was read
    modified: int = 0
    stalled: bool = False
    changed_at: float = 0.0  # when it last grew, or lost its path
    copied: bool = False  # a copy takes the place of what was truncated; it will not grow
    ended: bool = False
    after: Generation | None = None
    barrier: int = 0
    before: Generation | None = None  # what was at this path, as long as it may still get a name
    follows: str = ""  # the stream that was
    born: int = 0  # when the one before it was written last, in ns; 0 if none is known
    searched: int = -1  # its modification time, in ns, when copies of what was in it were looked for
    promise: Mark | None = None  # what it must hold, as long as nothing behind it was read

    @property
    def more(self) -> bool:
        """Whether there is something to read now."""
        return self.fd >= 0 and self.scanned < self.size and not self.stalled

    def waits(self) -> bool:
        """Whether what came before it at this path is still to be read."""
        first = self.after
        if first is None:
            return False
        # A copy ends where it ends; a file that was renamed may still get lines, which can't be waited for.
        # What was truncated meanwhile may never be that long again.
        read = not first.copied and first.scanned >= min(self.barrier, first.size) and not first.waits()
        if first.fd < 0 or first.stalled or read:
            self.after = None
        return self.after is not None

    def follow(self, first: Generation) -> None:
        """Wait until ``first`` was read to where it ends now, unless it waits for this one."""
        one: Generation | None = first
        while one is not None:
            if one is self:
                return
            one = one.after
        if first.fd >= 0 and not first.copied:
            # who waits itself is not looked at: it may have been empty when it was opened
            with suppress(OSError):
                first.size = os.fstat(first.fd).st_size
        self.after, self.barrier = first, first.size

    def succeed(self, first: Generation) -> None:
        """Follow ``first``, which was at this path before: one text goes on from there."""
        self.follow(first)
        if not self.stream:
            self.before = first

    def know_predecessor(self) -> None:
        """Settle what this one follows, now that it is about to say something."""
        one, follows = self, self.follows
        while not follows and one.before is not None:
            one = one.before  # it may never have had a line
            follows = one.stream or one.follows
        self.follows, self.before = follows, None

    def modified_now(self) -> int:
        """When the file was last written, in ns."""
        with suppress(OSError):
            return os.fstat(self.fd).st_mtime_ns
        return self.modified

    def mark(self) -> Mark:
        """Where reading goes on."""
        head = len(self.head), digest(self.head)
        if self.promise is not None:
            head = self.promise.fingerprint_length, self.promise.fingerprint
        return Mark(
            self.stream, self.path, self.real, *self.key, self.offset, self.start,
            *head, len(self.behind), digest(self.behind),
            self.modified, self.ended, self.ended and not self.links, self.follows, self.copied,
        )  # fmt: skip

    def look(self) -> bool:
        """Take size and links; true if there may be something new. Raises ``ReplacedError``, ``OSError``."""
        status = os.fstat(self.fd)
        if status.st_size < self.size:
            self.searched = -1
        self.size, self.links = status.st_size, status.st_nlink
        if self.size == self.scanned and status.st_mtime_ns == self.complete:
            return False
        if self.size < self.scanned or os.pread(self.fd, len(self.head), self.start) != self.head:
            raise ReplacedError
        if self.promise is not None and not self.promise.fits(self.fd, self.size):
            raise ReplacedError
        if os.pread(self.fd, len(self.last), self.scanned - len(self.last)) != self.last:
            raise ReplacedError  # written again, to the same length or more
        if self.size == self.scanned:
            self.complete = status.st_mtime_ns
        self.modified = status.st_mtime_ns
        return self.size > self.scanned

    def read(self) -> bytes:
        """The next whole lines, from at most one block. Raises ``ReplacedError``, ``OSError``."""
        self.stalled = False
        if not self.look():
            return b""
        # One read takes what must still be there and what is new: nothing fits in between.
        keep = len(self.last)
        data = os.pread(self.fd, BLOCK, self.scanned - keep)
        block = data[keep:]
        if data[:keep] != self.last or not self._keeps_promise(block):
            raise ReplacedError
        if not block:
            self.stalled = True  # a size that is not true; ask again after the next wake-up
            return b""
        if block[0] == 0 and self.scanned == self.start:
            self._skip_hole(block)
            return b""
        self.last, self.promise = data[-LAST:], None
        cut = block.rfind(b"\n") + 1
        if cut:
            return self._give(self.partial() + block[:cut], block[cut:])
        if self.scanned + len(block) - self.offset <= MAX_LINE:
            self._hold(None if self.held is None else self.held + block, self.scanned + len(block))
            return b""
        whole = self.partial() + block
        return self._give(whole[:MAX_LINE], whole[MAX_LINE:])

    def partial(self) -> bytes:
        """The unfinished line. Raises ``ReplacedError``, ``OSError``."""
        if self.held is not None:
            return self.held
        data = os.pread(self.fd, self.scanned - self.offset, self.offset)
        if len(data) != self.scanned - self.offset:
            raise ReplacedError
        return data

    def finish(self) -> bytes:
        """Give up the file, and the unfinished line with it."""
        try:
            rest = self.partial()
        except (ReplacedError, OSError):
            rest = b""
        self.ended = True
        return self._give(rest, b"")

    def go_to(self, mark: Mark) -> None:
        """Go on from ``mark``, which fits. Raises ``OSError``."""
        self.stream, self.start, self.offset = mark.stream, mark.start, mark.offset
        self.follows, self.copied = mark.follows, mark.copied and mark.inode == self.key[1]
        # a mark at the beginning is recognised by bytes that are still to be given out
        known = min(mark.fingerprint_length, mark.offset - mark.start)
        self.head = os.pread(self.fd, known, mark.start)
        self.behind = self.last = os.pread(self.fd, mark.last_length, mark.offset - mark.last_length)
        self.modified, self.complete = mark.modified, -1
        # else what was truncated while it waits to be read would be taken for what was there before
        self.promise = mark
        self._hold(b"", mark.offset)

    def rewind(self) -> None:
        """Forget what was read, as long as nothing was given out."""
        self.offset = self.scanned = self.start = 0
        self.head = self.behind = self.last = self.held = b""
        self.complete = -1

    def close(self) -> None:
        """Close the file; what is known of it stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _keeps_promise(self, block: bytes) -> bool:
        mark = self.promise
        if mark is None or self.scanned != mark.start:
            return True
        return digest(block[: mark.fingerprint_length]) == mark.fingerprint

    def _give(self, data: bytes, rest: bytes) -> bytes:
        self.offset += len(data)
        if len(self.head) < HEAD:
            self.head = (self.head + data[:HEAD])[:HEAD]
        self.behind = (self.behind + data[-LAST:])[-LAST:]
        self._hold(rest, self.offset + len(rest))
        return data

    def _hold(self, rest: bytes | None, scanned: int) -> None:
        self.held = rest if rest is not None and len(rest) <= HELD else None
        self.scanned = scanned

    def _skip_hole(self, block: bytes) -> None:
        """A writer without O_APPEND goes on at its old position after a truncation; NULs lead there."""
        zeros = len(block) - len(block.lstrip(b"\0"))
        at = self.scanned + zeros
        if zeros == len(block):
            with suppress(OSError):  # not every file system knows its holes
                at = max(at, os.lseek(self.fd, self.scanned, os.SEEK_DATA))
        self.start = self.offset = self.scanned = at


def open_generation(path: str) -> Generation | None:
    """``path`` opened for reading, None if it is no regular file. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
    except OSError:
        os.close(fd)
        raise
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return None
    one = Generation(fd, path, os.path.realpath(path), (status.st_dev, status.st_ino))
    one.size, one.links, one.modified = status.st_size, status.st_nlink, status.st_mtime_ns
    return one


def key_at(path: str) -> Key | None:
    """Device and inode of what stands at ``path``, None where there is nothing to see."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def begins_with(one: Generation, copy: Generation) -> bool:
    """Whether ``copy`` holds what ``one`` begins with. Raises ``OSError``."""
    head, near = min(HEAD, copy.size), max(copy.size - LAST, 0)
    return os.pread(one.fd, head, 0) == os.pread(copy.fd, head, 0) and (
        os.pread(one.fd, copy.size - near, near) == os.pread(copy.fd, copy.size - near, near)
    )
