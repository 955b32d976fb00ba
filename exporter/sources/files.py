"""Log files of a path or glob, followed for as long as they live, over every kind of rotation.

A path is not a file: rotation renames it, truncates it under a copy, deletes and recreates it,
or points a link elsewhere. What is followed here is therefore a *generation*: an open file,
known by device, inode and its first bytes. Its name is only where it was found.

Nothing that is reported by the kernel or the file system is trusted alone. A wake-up is a hint
that shortens the wait for the next look; the size of a file may have regrown past the old
position. ``generation.py`` reads one file, ``matching.py`` finds them, ``waker.py`` waits, and
``FileSource`` decides which file follows which.

Files are opened for reading only, never locked, and kept open until they are done.
"""

# Paths are compared as text and looked at by the thousand, so they stay strings here.
# ruff: noqa: PTH100, PTH114, PTH116, PTH118, PTH119, PTH120

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

import structlog

from .generation import (
    HEAD,
    LAST,
    Generation,
    Key,
    Mark,
    ReplacedError,
    begins_with,
    digest,
    key_at,
    open_generation,
)
from .matching import MAX_FOUND, PACKED, ROTATED, Found, expand, is_plain, log_of, matches
from .packed import find_packed
from .stream import Chunk, SourceStats
from .waker import DirectoryWaker, Waker

MAX_FILES = 512
"""Files open at a time; beyond it the one that has been quiet longest makes room."""

CHECK_SECONDS = 1.0
SCAN_SECONDS = 2.0
DRAIN_SECONDS = 5.0
"""How long a file that was rotated away must be quiet, once the next one has data, to be done."""

DAMAGE_SECONDS = 60.0
"""How long it is told that a packed log is broken. It can't be mended, and the others are read."""

_LOOKS = 20  # at files that are renamed meanwhile
_MARKS = 2 * MAX_FOUND  # positions of files that are not open, kept so that none is read twice
_MARKS_OF_INODE = 256  # every generation of a log that is copied and truncated has the same
_RACY = 20_000_000  # ns; a directory may change again within one tick of its time stamp

log = structlog.get_logger(__name__)


class FileSource:
    """The log files of one path or glob, as a ``Source``.

    ``waker`` is for tests and for systems with a better hint; ``clock`` gives seconds that only
    grow. Who knows better where the files are than a walk along ``pattern`` finds them with ``find``;
    ``name`` is then what was configured. With ``history`` what was rotated away before the first look
    is read too. One read error is counted for a file however often it is tried again, until it works.
    """

    def __init__(
        self,
        pattern: str,
        *,
        waker: Waker | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_files: int = MAX_FILES,
        drain_seconds: float = DRAIN_SECONDS,
        find: Callable[[str], Found] = expand,
        name: str | None = None,
        history: bool = False,
    ) -> None:
        self.stats = SourceStats(name or pattern)
        self._find_files = find
        self._history = history
        self._pattern = os.path.abspath(pattern)
        self._waker = waker
        self._clock = clock
        self._max_files = max_files
        self._drain_seconds = drain_seconds
        self._open: dict[Key, Generation] = {}
        self._at: dict[str, Generation] = {}  # the newest generation of every path
        self._past: dict[int, dict[str, Mark]] = {}  # by inode and stream: files that are not open
        self._left: dict[str, list[Mark]] = {}  # by path: what was known when the exporter stopped
        self._searched = False
        self._rotated: dict[str, dict[str, os.stat_result]] = {}  # by path of their log: what matches too
        self._packed = ""
        self._judged: dict[Key, tuple[int, int]] = {}  # size and time of files with nothing for us
        self._names: dict[str, None] = {}  # every stream, so that no two share a name
        self._failing: dict[str, str] = {}
        self._ready: deque[Chunk] = deque()
        self._directories: dict[str, int] = {}
        self._crowded = False
        self._damage = "", 0.0  # a packed log that is broken, and until when that is told
        self._scanned_at = 0  # ns since the epoch
        self._next_scan = self._next_check = self._not_before = self._now = clock()

    async def chunks(self, resume: Mapping[str, str]) -> AsyncIterator[Chunk]:
        """Every generation of every matching file, from its token in ``resume`` on, until cancelled."""
        self._remember(resume)
        waker = self._waker or DirectoryWaker(lambda: self._directories)
        try:
            while True:
                await self._look()
                for generation in (None, *self._open.values()):
                    if generation is not None:
                        self._step(generation)
                    while self._ready:
                        yield self._ready.popleft()
                        await asyncio.sleep(0)  # a consumer that never waits would stop everyone else
                self._tell()
                if any(one.copied or (one.more and not one.waits()) for one in self._open.values()):
                    await asyncio.sleep(0)
                else:
                    due = min(self._next_scan, self._next_check) - self._clock()
                    await waker.wait(min(max(due, 0.001), CHECK_SECONDS))
        finally:
            if isinstance(waker, DirectoryWaker):
                waker.close()
            for generation in self._open.values():
                generation.close()
            self._open.clear()

    # --- reading

    def _step(self, generation: Generation) -> None:
        """Read one block of one file, or find that it is done."""
        if generation.fd < 0 or generation.waits():
            return
        scanned, promise = generation.scanned, generation.promise
        try:
            data = generation.read()
        except ReplacedError:
            self._replaced(generation)
            return
        except OSError as error:
            self._fail(generation.path, error)
            self._put_away(generation)
            return
        if self._failing:
            self._failing.pop(generation.path, None)
        if generation.scanned != scanned or data:
            generation.changed_at = self._now
        if data and promise is not None and (copy := self._older(generation, promise)):
            generation.go_to(promise)
            self._replaced(generation, copy)
            return
        if not generation.stream and self._was_truncated(generation, data):
            generation.rewind()  # what was in it comes first
        elif data:
            self._say(generation, data)
        if not generation.more and self._is_done(generation):
            self._end(generation)

    def _say(self, generation: Generation, data: bytes) -> None:
        begin = ""
        if not generation.stream:
            generation.know_predecessor()
            generation.stream = self._name(generation.key, data[:HEAD])
            # without it a file that is rotated away before the first save would not be looked for
            first = replace(generation.mark(), offset=generation.start, last_length=0, last=digest(b""))
            begin = first.token()
        token = generation.mark().token()
        self._ready.append(Chunk(generation.stream, data, token, generation.ended, begin, generation.follows))

    def _name(self, key: Key, head: bytes) -> str:
        """An identity that no other generation has, even one with the same inode and first bytes."""
        base = f"{key[0]}:{key[1]}:{digest(head)}"
        for number in itertools.count():
            name = blake2b(f"{base}:{number}".encode(), digest_size=8).hexdigest()
            if name not in self._names:
                break
        self._take_name(name)
        return name

    def _take_name(self, name: str) -> None:
        self._names[name] = None
        while len(self._names) > 2 * _MARKS:
            del self._names[next(iter(self._names))]

    def _is_done(self, generation: Generation) -> bool:
        """Whether nothing can come any more: the writer has moved on, or the file is gone.

        As long as the next file is empty the writer may still hold this one: logrotate creates
        the new file before it tells the writer, and some writers never listen.
        """
        successor = self._at.get(generation.path)
        moved = successor is not None and successor is not generation
        if generation.copied:
            return True
        if generation.links and not (moved and successor is not None and successor.size > 0):
            return False
        return self._now - generation.changed_at >= self._drain_seconds

    def _end(self, generation: Generation) -> None:
        data = generation.finish()
        if data or generation.stream:
            self._say(generation, data)
        self._put_away(generation)

    def _put_away(self, generation: Generation) -> None:
        """Close a file but know it again."""
        if self._open.get(generation.key) is generation:
            del self._open[generation.key]
        generation.close()
        if generation.stream:
            self._keep(generation.mark())

    def _was_truncated(self, one: Generation, data: bytes) -> bool:
        """Whether something came and went in a file since the last look, before a line of it was given out."""
        # filled again, or emptied again
        again = data or (not one.size and one.searched != one.modified)
        one.searched = one.modified
        return bool(again and one.born and self._link(None, one))

    def _older(self, one: Generation, mark: Mark) -> Generation | None:
        """A copy that ``mark`` was taken in rather than in ``one``, which only begins the same."""
        if one.copied or key_at(one.real) != one.key:
            return None

        def other(copy: Generation) -> bool:
            return self._mark_of(copy) is None and not begins_with(one, copy)

        return self._find_copy(mark, other)

    def _replaced(self, old: Generation, copy: Generation | None = None) -> None:
        """The file was truncated and perhaps written again: a new generation in the same inode."""
        self.stats.rotations["truncate"] += 1
        new = Generation(old.fd, old.path, old.real, old.key, changed_at=self._now)
        with suppress(OSError):
            new.size = os.fstat(new.fd).st_size
        self._open[old.key] = new
        if self._at.get(old.path) is old:
            self._at[old.path] = new
        old.fd = -1
        copy = copy or self._find_copy(old.mark())
        new.born = old.born if copy is None else copy.modified_now()
        new.before, new.follows = (old, "") if old.stream else (old.before, old.follows)
        linked = self._link(copy, new)
        if copy is None and (old.stream or not linked):
            self._end(old)

    def _link(self, copy: Generation | None, new: Generation) -> bool:
        """Let copies of truncated generations be read before ``new``; false if there are none."""
        chain = [] if copy is None else [copy]
        for one in self._between(new.path, new.born, new) if new.born else ():
            one.copied = True
            self.stats.rotations["truncate"] += 1
            new.born = max(new.born, one.modified)
            chain.append(one)
        _succeed([*chain, new])
        return bool(chain)

    # --- which file follows which

    def _remember(self, resume: Mapping[str, str]) -> None:
        for stream, token in resume.items():
            self._take_name(stream)
            mark = Mark.parse(stream, token)
            if mark is not None:
                if (path := self._log_of(mark.path)) is not None:  # it was taken for a log of its own once
                    mark = replace(mark, path=path, real=os.path.realpath(path))
                self._keep(mark)
                self._left.setdefault(mark.path, []).append(mark)

    def _keep(self, mark: Mark) -> None:
        if mark.gone:
            return
        marks = self._past.pop(mark.inode, {})
        marks.pop(mark.stream, None)
        marks[mark.stream] = mark
        while len(marks) > _MARKS_OF_INODE:
            del marks[next(iter(marks))]
        self._past[mark.inode] = marks
        while len(self._past) > _MARKS:
            del self._past[next(iter(self._past))]

    async def _look(self) -> None:
        """Find out what the paths lead to, if that may have changed."""
        self._now = self._clock()
        plain = is_plain(self._pattern)
        due = plain or self._now >= self._next_scan
        if not due and self._now >= self._not_before:
            due = self._directories_changed()
        if not due and self._now >= self._next_check:
            due = any(key_at(path) != one.key for path, one in self._at.items() if one.fd >= 0)
        if self._now >= self._next_check:
            self._next_check = self._now + CHECK_SECONDS
        if not due:
            return
        began, self._scanned_at = self._now, time.time_ns()
        # A tree may be large or on a slow file system; a single path is not worth a thread.
        find = self._find_files
        found = find(self._pattern) if plain else await asyncio.to_thread(find, self._pattern)
        self._now = self._clock()
        self._next_scan = self._now + SCAN_SECONDS
        self._not_before = self._now + 10 * (self._now - began)  # a large tree is not walked for every hint
        self._directories = found.directories
        self._settle(found)

    def _directories_changed(self) -> bool:
        for path, known in self._directories.items():
            modified = _modified(path)
            if modified != known or modified > self._scanned_at - _RACY:
                return True
        return False

    def _settle(self, found: Found) -> None:
        """Bring what is open in line with what was found."""
        for path in [one for one in self._failing if one not in found.files and one not in found.errors]:
            del self._failing[path]
        for path, error in found.errors.items():
            self._fail(path, error)
        self._crowded = False
        if found.packed and not self._packed:
            self._packed = found.packed
            log.info("packed files that match are not read", source=self.stats.name, for_example=self._packed)
        before, self._rotated = self._rotated, self._take_rotated(found)
        families: dict[str, Generation] = {}
        # A known path finds what was renamed or copied from it, so it comes before its siblings, whose
        # names are longer. What is new comes older before younger, so that history is in order.
        order = sorted(found.files.items(), key=lambda f: (f[1].st_mtime_ns, f[0]))[-MAX_FOUND:]
        order.sort(key=lambda f: len(f[0]) if f[0] in self._at or f[0] in self._left else sys.maxsize)
        for path, status in order:
            new = self._visit(path, status)
            if new is not None:
                family = _family(path)
                first = families.get(family)
                if first is not None and first is not new.after and new.after in (None, first.after):
                    new.follow(first)
                families[family] = new
        if not self._searched:
            self._searched = True
            for path in [one for one in self._left if one not in found.files and one not in self._at]:
                self._find_left(path)
        for path, files in self._rotated.items():
            if path not in found.files and _versions(files) != _versions(before.get(path, {})):
                self._visit_rotated(path, files)
            for rotated, status in files.items():
                self._visit_late(rotated, status)
        closed = [path for path, one in self._at.items() if one.fd < 0]
        for path in closed[: -MAX_FOUND // 2]:
            del self._at[path]
        while len(self._judged) > _MARKS:
            del self._judged[next(iter(self._judged))]

    def _log_of(self, path: str) -> str | None:
        """Path of the log that a file was rotated away from, if that is read here as well."""
        log_path = log_of(path)
        return log_path if log_path is not None and matches(self._pattern, log_path) else None

    def _take_rotated(self, found: Found) -> dict[str, dict[str, os.stat_result]]:
        """Take files that were rotated away out of ``found``.

        They are no logs of their own, though they match: they are found from the log that they were, as they
        are where they don't match, and all files of a log are one text.
        """
        rotated: dict[str, dict[str, os.stat_result]] = {}
        for path in tuple(found.files):
            if (log_path := self._log_of(path)) is not None:
                rotated.setdefault(log_path, {})[path] = found.files.pop(path)
        return rotated

    def _visit_rotated(self, path: str, files: dict[str, os.stat_result]) -> None:
        """Look at what is left of a log that has no file at its path now."""
        current = self._at.get(path)
        if current is None and path not in self._left:
            newest = max(files, key=lambda one: (files[one].st_mtime_ns, one))
            new = self._admit(newest, (files[newest].st_dev, files[newest].st_ino))
            if new is not None:
                new.path, new.real = path, os.path.realpath(path)
                self._take_over(path, new)
        elif current is not None and current.fd >= 0:
            missed = self._between(path, current.modified_now(), current, newest=True)
            if missed:
                self.stats.rotations["rename"] += len(missed)
                current.changed_at = self._now
                self._at[path] = missed[-1]
                _succeed([current, *missed])

    def _visit_late(self, path: str, status: os.stat_result) -> None:
        """Go on in a file that was rotated away and read, and has grown since."""
        marks = self._past.get(status.st_ino, {}).values()
        if (status.st_dev, status.st_ino) in self._open or not any(
            mark.offset < status.st_size for mark in marks
        ):
            return
        with suppress(OSError):
            one = open_generation(path)
            if one is not None:
                known = self._mark_of(one)
                one.close()
                if known is not None and known.offset < one.size:
                    self._visit(path, status)

    def _visit(self, path: str, status: os.stat_result) -> Generation | None:
        """Look at what ``path`` leads to; the generation if it was opened now."""
        key = (status.st_dev, status.st_ino)
        current, known = self._at.get(path), self._open.get(key)
        if known is not None:
            if current is not None and current.key != key and os.path.islink(path):  # pointed back
                self.stats.rotations["reopen"] += 1
                current.changed_at = self._now
                self._at[path], known.path, known.real = known, path, os.path.realpath(path)
            return None
        if self._judged.get(key) == (status.st_size, status.st_mtime_ns):
            return None
        new = self._admit(path, key)
        if new is None:
            return None
        self._take_over(path, new)
        return new

    def _admit(self, path: str, key: Key) -> Generation | None:
        """Open a file that is not open, and find out how far it was read before."""
        if len(self._open) >= self._max_files and not self._make_room():
            self._crowded = True
            return None
        try:
            new = open_generation(path)
            if new is None:
                return None
            try:
                taken = new.key not in self._open and self._recognise(path, new)
            except OSError:
                new.close()
                raise
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(path, error)
            return None
        self.stats.opened = True
        if not taken or new.path != path:
            self._failing.pop(path, None)
        if not taken:
            new.close()
            return None
        self._judged.pop(key, None)
        new.changed_at = self._now
        self._open[new.key] = new
        return new

    def _recognise(self, path: str, new: Generation) -> bool:
        """Set where to go on; false if there is nothing to read. Raises ``OSError``."""
        mark = self._mark_of(new)
        if mark is not None:
            if mark.ended and new.size == mark.offset:
                self._judge(new)
                return False
            # Written to after it was done: a stream that has ended stays so, this is another.
            new.go_to(replace(mark, stream="", follows=mark.stream) if mark.ended else mark)
            if os.path.dirname(mark.path) == os.path.dirname(path):
                # renamed meanwhile; whatever is there now comes after it
                new.path, new.real = mark.path, mark.real
            return True
        return not self._is_copy(path, new)

    def _mark_of(self, one: Generation) -> Mark | None:
        """How far an open file was read before, if it was. Raises ``OSError``."""
        marks = [
            mark
            for mark in self._past.get(one.key[1], {}).values()
            # a device may have another number after a reboot; then the content must say enough
            if (mark.device == one.key[0] or mark.offset >= LAST) and mark.fits(one.fd, one.size)
        ]
        return max(marks, key=lambda mark: (mark.offset, not mark.ended), default=None)

    def _judge(self, one: Generation) -> None:
        status = os.fstat(one.fd)
        self._judged[one.key] = (status.st_size, status.st_mtime_ns)

    def _is_copy(self, path: str, new: Generation) -> bool:
        """Whether ``new`` is being copied from a file that is open here, to be truncated next."""
        for one in tuple(self._open.values()):
            if not _is_sibling(path, one.path) or self._at.get(one.path) is not one:
                continue
            if new.size == 0:
                return True  # not yet to be told; there is nothing to read in it either
            try:
                one.look()
            except ReplacedError:
                self._replaced(one)  # which takes the copy, if this is one
                return new.key in self._open
            except OSError:
                continue
            if begins_with(one, new):
                self._judge(new)
                return True
        return False

    def _take_over(self, path: str, new: Generation) -> None:
        """``new`` was found at ``path``: what was there before is read first."""
        before = self._at.get(new.path)
        if new.path != path:  # it was renamed while it was closed; what lies at its old path follows it
            if before is None or before.fd < 0:
                self._at[new.path] = new
            elif before.key != new.key:
                before.succeed(new)
            return
        self._at[path] = new
        if before is not None and before.key == new.key and before.stream == new.stream:
            return  # it could not be read for a while, or had to make room
        busy = {one.stream for one in self._open.values()}
        left = self._left.pop(path, [])
        marks = [mark for mark in left if not mark.ended and mark.stream not in busy]
        if before is not None and before.fd < 0 and not before.ended and before.stream:
            marks.append(before.mark())
        chain = [one for mark in sorted(marks, key=lambda m: m.modified) if (one := self._find(mark))]
        if before is not None and before.fd >= 0:
            before.changed_at = self._now
            chain.append(before)
        if not new.stream:  # else all this was done when it was new
            kind = _kind(before, new, chain, marks)
            if marks or before is not None:
                self.stats.rotations[kind] += 1
            since = chain[-1].modified_now() if chain else max((mark.modified for mark in left), default=0)
            wanted = since or self._history or path in self._rotated
            missed = self._between(path, since, new) if wanted else []
            self.stats.rotations[kind] += len(missed) if since else 0
            chain += missed
            for one in missed:
                one.copied = kind == "truncate"
            new.born = max([since, *(one.modified for one in missed)])
            known = max(left, key=lambda mark: mark.modified, default=None)
            new.before, new.follows = before, known.stream if known and before is None else ""
        _succeed([*chain, new])

    def _find_left(self, path: str) -> None:
        """A log that was renamed while nobody looked, and nothing is in its place yet."""
        marks = [mark for mark in self._left[path] if not mark.ended]
        if not marks or not matches(self._pattern, path):
            return
        chain = [one for mark in sorted(marks, key=lambda m: m.modified) if (one := self._find(mark))]
        if not chain:
            return  # what takes its place may help to find it
        del self._left[path]
        chain += self._between(path, chain[-1].modified_now(), chain[-1], newest=True)
        self.stats.opened = True
        self.stats.rotations["rename"] += len(chain) - 1  # the last one when it has a successor
        self._at[path] = chain[-1]
        chain[-1].real = chain[0].real
        _succeed(chain)

    def _find(self, mark: Mark) -> Generation | None:
        """The file of ``mark`` under another name in the same directory, opened; or its copy, packed perhaps."""
        moved = self._open_siblings(mark, lambda entry: entry.inode() == mark.inode)
        return self._choose(moved, mark) or self._find_copy(mark) or self._find_packed(mark)

    def _find_packed(self, mark: Mark) -> Generation | None:
        packed = find_packed(mark, self._damaged)
        if packed is None or packed.key in self._open:
            return None
        packed.changed_at = self._now
        self._open[packed.key] = packed
        return packed

    def _find_copy(
        self, mark: Mark, other: Callable[[Generation], bool] = lambda _: True
    ) -> Generation | None:
        """A file that holds what was truncated, opened. Only what was written since can be it."""
        copies = self._open_siblings(
            mark, lambda entry: _is_sibling(entry.path, mark.real) and entry.inode() != mark.inode
        )
        copy = self._choose(copies, mark, other)
        if copy is not None:
            copy.copied = True
        return copy

    def _choose(
        self, opened: list[Generation], mark: Mark, other: Callable[[Generation], bool] = lambda _: True
    ) -> Generation | None:
        """The one that holds what was read up to ``mark``, set to go on there; the others are closed."""
        chosen = None
        # little was read of it perhaps, and others begin the same: those came later
        for one in sorted(opened, key=lambda one: one.modified):
            with suppress(OSError):
                known = self._mark_of(one)
                same = one.key[1] == mark.inode or (
                    one.modified >= mark.modified and (known is None or known.stream == mark.stream)
                )
                if chosen is None and same and mark.fits(one.fd, one.size) and other(one):
                    one.go_to(mark)
                    one.path, one.real, one.changed_at = mark.path, mark.real, self._now
                    self._open[one.key] = chosen = one
            if one is not chosen:
                one.close()
        return chosen

    def _between(self, path: str, since: int, new: Generation, *, newest: bool = False) -> list[Generation]:
        """Files that came and went at ``path`` before ``new`` while nobody looked, opened, oldest first.

        ``since`` is the modification time of the last one that is known, in ns. With ``newest`` there
        is none behind ``new`` that they could be before: they came after it.
        """
        name = os.path.basename(new.real)
        near = replace(new.mark(), path=path)
        opened = self._open_siblings(
            near, lambda e: e.name.startswith(name) and bool(ROTATED.fullmatch(e.name[len(name) :]))
        )
        # Once new has been rotated away itself, what is younger than new comes after it.
        until = None
        if key_at(path) != new.key and not newest:
            with suppress(OSError):
                until = os.fstat(new.fd).st_mtime_ns
        chain = []
        for one in sorted(opened, key=lambda one: one.modified):
            wanted = since <= one.modified and one.size > 0 and (until is None or one.modified <= until)
            try:
                wanted = wanted and self._mark_of(one) is None and not begins_with(new, one)
            except OSError:
                wanted = False
            if wanted and (len(self._open) < self._max_files or self._make_room()):
                chain.append(one)
                self._open[one.key] = one
                one.path, one.changed_at = path, self._now
            else:
                one.close()
        return chain

    def _open_siblings(self, mark: Mark, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Generation]:
        """Files in the directory of ``mark`` that are wanted and not open yet.

        A rotation may rename them while they are listed or before they are opened: then those that
        are still missing are looked for again, until a look found nothing that moved.
        """
        directories = {os.path.dirname(mark.real), os.path.dirname(os.path.realpath(mark.path))}
        opened: dict[Key, Generation] = {}
        for _ in range(_LOOKS):
            found = Found()
            raced = False
            inodes = {inode for _, inode in opened}
            for directory in sorted(directories):
                for entry in found.list(directory):
                    if entry.name.endswith(PACKED) or not wanted(entry):
                        continue
                    if not entry.is_symlink() and entry.inode() in inodes:
                        continue
                    try:
                        one = open_generation(entry.path)
                    except OSError as error:
                        raced = raced or error.errno == errno.ENOENT
                        continue
                    if one is None:
                        continue
                    other = not entry.is_symlink() and one.key[1] != entry.inode()
                    raced = raced or other
                    if other or one.key in self._open or one.key in opened:
                        one.close()
                    else:
                        opened[one.key] = one
            if not raced and all(_modified(d) == at for d, at in found.directories.items()):
                break
        return list(opened.values())

    def _make_room(self) -> bool:
        """Close the file that has been quiet longest, one that was rotated away before others."""
        quiet = [one for one in self._open.values() if not one.more and not one.waits()]
        if not quiet:
            return False
        oldest = min(quiet, key=lambda one: (self._at.get(one.path) is one, one.changed_at))
        self._judged[oldest.key] = (oldest.scanned, oldest.complete)  # as it was read, not as it is
        self._put_away(oldest)
        return True

    # --- telling

    def _fail(self, path: str, error: OSError) -> None:
        if path not in self._failing:
            self.stats.read_errors += 1
        if path in self._failing or len(self._failing) < MAX_FILES:
            self._failing[path] = _explain(path, error)

    def _damaged(self, path: str, problem: str) -> None:
        self.stats.read_errors += 1
        self._damage = f"{path}: {problem}", self._now + DAMAGE_SECONDS

    def _tell(self) -> None:
        self.stats.lag_bytes = sum(max(one.size - one.offset, 0) for one in self._open.values())
        if self._failing:
            others = len(self._failing) - 1
            problem = next(iter(self._failing.values()))
            self.stats.problem = f"{problem} (and {others} more)" if others else problem
        elif self._crowded:
            self.stats.problem = (
                f"{self.stats.name}: more than {self._max_files} files are being written; narrow the pattern"
            )
        elif self._now < self._damage[1]:
            self.stats.problem = self._damage[0]
        elif not self.stats.opened:
            self.stats.problem = f"{self.stats.name}: no such file yet; check the path if it should exist"
        else:
            self.stats.problem = None


def _succeed(chain: list[Generation]) -> None:
    """Each goes on where the one before it ends; the first where the last was to go on."""
    first, last = chain[0], chain[-1]
    if first is not last and not last.stream:
        if not (first.stream or first.follows or first.before) and last.before not in chain:
            first.before, first.follows = last.before, last.follows
        last.before, last.follows = None, ""
    for one, following in itertools.pairwise(chain):
        following.succeed(one)


def _versions(files: Mapping[str, os.stat_result]) -> dict[str, tuple[int, int, int]]:
    """What changes when one of the files does, or who may read it."""
    return {path: (one.st_dev, one.st_ino, one.st_ctime_ns) for path, one in files.items()}


def _modified(path: str) -> int:
    """Modification time in ns, -1 if there is nothing."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def _kind(before: Generation | None, new: Generation, found: list[Generation], marks: list[Mark]) -> str:
    """How the file that was at a path lost it to ``new``."""
    if before is not None and before.fd >= 0:
        links = 0
        with suppress(OSError):
            links = os.fstat(before.fd).st_nlink
        stays = before.real != before.path and key_at(before.real) == before.key  # a link was swapped
        return "reopen" if links == 0 or stays else "rename"
    if found and found[-1].copied and not found[-1].links:
        return "rename"  # and packed, which freed its inode for the new file perhaps
    if any(mark.inode == new.key[1] for mark in marks) or (before is not None and before.key == new.key):
        return "truncate"
    if found:
        return "truncate" if found[-1].copied else "rename"
    return "reopen"


def _family(path: str) -> str:
    """What generations of one log share: ``0.log.20241010-132438``, ``0.log`` and ``1.log`` are one."""
    directory, name = os.path.split(path)
    return os.path.join(directory, re.sub(r"\d+", "0", name.partition(".log")[0]))


def _is_sibling(path: str, base: str) -> bool:
    """Whether ``path`` is named as what a rotation makes of ``base``."""
    return path != base and path.startswith(base)


def _explain(path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: permission denied; let the exporter's user or group read it"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{path}: too many open files; raise the limit (ulimit -n) or narrow the pattern"
    return f"{path}: {error.strerror or error}; it is tried again every {SCAN_SECONDS:.0f} s"
