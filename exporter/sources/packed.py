"""Logs that were packed since they were last read: ``0.log.20261130-162646.gz``, ``x.log.1.gz``.

A kubelet packs what it rotated away at the next rotation, logrotate at once or a day later. Who
reads a log has it open by then. After a restart it may be there under no other name, with lines
that nobody has read. It has another inode then, so only its bytes tell that it is the one: those
it begins with, and those in front of the position. It is unpacked block by block as it is read.
"""

# Paths are compared as text and looked at by the thousand, so they stay strings here.
# ruff: noqa: PTH120

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from .framing import MAX_LINE
from .generation import Generation, Mark, digest, open_generation
from .logfile import InputError, blocks
from .matching import Found

SUFFIX = ".gz"

Damaged = Callable[[str, str], None]
"""Told the path of a packed log, and in a few words what is wrong with it. What came before was read."""


@dataclass(slots=True, eq=False)
class PackedGeneration(Generation):
    """A generation that is unpacked as it is read. It never grows, so it is ``copied``.

    ``key`` is of the packed file. How much there is shows only at the end: until then there is more.
    """

    unpacked: Iterator[bytes] = field(default_factory=lambda: iter(()))
    rest: bytes = b""

    def look(self) -> bool:
        """Whether there may be something new; nobody writes to it."""
        return self.more

    def read(self) -> bytes:
        """The next whole lines, from one block."""
        block = next(self.unpacked, b"")
        if not block:
            self.size = self.scanned
            return b""
        whole = self.rest + block
        cut = whole.rfind(b"\n") + 1 or (MAX_LINE if len(whole) > MAX_LINE else 0)
        self.rest = whole[cut:]
        data = self._give(whole[:cut], self.rest)
        self.size = self.scanned + 1
        return data

    def partial(self) -> bytes:
        """The unfinished line."""
        return self.rest

    def modified_now(self) -> int:
        """When the log was last known to be written, in ns: the packed file is younger than what came next."""
        return self.modified

    def close(self) -> None:
        """Close the file; what is known of it stays."""
        self.unpacked = iter(())
        Generation.close(self)


def find_packed(mark: Mark, damaged: Damaged) -> PackedGeneration | None:
    """The packed log that ``mark`` was taken in, opened to go on there; None where there is none."""
    folders = {os.path.dirname(mark.real), os.path.dirname(os.path.realpath(mark.path))}
    found = Found()
    named = [
        entry
        for folder in sorted(folders)
        for entry in found.list(folder)
        if entry.name.endswith(SUFFIX) and entry.path.startswith(mark.real) and entry.path != mark.real
    ]
    candidates: list[tuple[int, str]] = []
    for entry in named:
        with suppress(OSError):
            if entry.is_file() and (modified := entry.stat().st_mtime_ns) >= mark.modified:
                candidates.append((modified, entry.path))
    # others may begin the same, where little was read: those came later
    for _, path in sorted(candidates):
        if (one := _open(path, mark, damaged)) is not None:
            return one
    return None


def _open(path: str, mark: Mark, damaged: Damaged) -> PackedGeneration | None:
    unpacked = _blocks(path, damaged)
    begun = _skip(unpacked, mark)
    try:
        opened = None if begun is None else open_generation(path)
    except OSError:
        opened = None
    if begun is None or opened is None:
        return None
    head, last, block = begun
    one = PackedGeneration(opened.fd, mark.path, mark.real, opened.key, copied=True, links=0)
    one.stream, one.start, one.follows, one.modified = mark.stream, mark.start, mark.follows, mark.modified
    one.offset = one.scanned = mark.offset
    # a mark at the beginning is recognised by bytes that are still to be given out
    one.head, one.behind = head[: mark.offset - mark.start], last
    one.size = mark.offset + 1
    one.unpacked = _after(block, unpacked)
    return one


def _skip(unpacked: Iterator[bytes], mark: Mark) -> tuple[bytes, bytes, bytes] | None:
    """Unpack to behind the mark: what the log begins with, what is in front of it, and the rest of the block.

    None if the log does not hold what was read. Of one that begins with something else little is unpacked.
    """
    head_end, last_at = mark.start + mark.fingerprint_length, mark.offset - mark.last_length
    data, at, head = b"", 0, None  # data begins at ``at``
    for block in unpacked:
        data += block
        if head is None and at + len(data) >= head_end:
            head = data[mark.start - at : head_end - at]
            if digest(head) != mark.fingerprint:
                return None
        if head is not None and at + len(data) >= mark.offset:
            last = data[last_at - at : mark.offset - at]
            return (head, last, data[mark.offset - at :]) if digest(last) == mark.last else None
        passed = min(mark.start, last_at) if head is None else last_at
        data, at = data[max(passed - at, 0) :], max(min(passed, at + len(data)), at)
    return None


def _blocks(path: str, damaged: Damaged) -> Iterator[bytes]:
    """What can be unpacked."""
    try:
        yield from blocks(path)
    except InputError as error:
        damaged(path, str(error).removeprefix(f"{path}: "))


def _after(block: bytes, unpacked: Iterator[bytes]) -> Iterator[bytes]:
    if block:
        yield block
    yield from unpacked
