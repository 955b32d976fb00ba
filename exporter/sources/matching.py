"""Which files a path or a glob means, looked up within bounds."""

# Paths are compared as text and looked at by the thousand, so they stay strings here.
# ruff: noqa: PTH112, PTH115, PTH116, PTH118, PTH120

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_FOUND = 4096  # files one look takes into account, the newest
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# app.log.1  app.log-20260730  0.log.20241010-132438  app.log.old
ROTATED = re.compile(r"[._-](?:\d[\dT:._+-]*Z?|old|prev|bak)")
_OF_LOG = re.compile(rf"(.*\.(?:log|out|err|txt)){ROTATED.pattern}")  # server-1 is another log than server
_ENTRIES = 20_000  # directory entries one look may visit
_DEPTH = 64  # directories that ** may go down


@dataclass(slots=True)
class Found:
    """What a look at the file system found; ``directories`` with their modification times."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    directories: dict[str, int] = field(default_factory=dict)
    errors: dict[str, OSError] = field(default_factory=dict)
    packed: str = ""  # one that matches, of those that are no logs as they are
    entries: int = 0

    def add_directory(self, path: str) -> None:
        """Watch ``path``, or the nearest directory above it that exists."""
        while path not in self.directories:
            try:
                self.directories[path] = os.stat(path).st_mtime_ns
            except OSError:
                path = os.path.dirname(path)
            else:
                return

    def add_file(self, path: str) -> None:
        """Take ``path`` if it leads to a regular file, and watch all directories on the way."""
        self.add_directory(os.path.dirname(path))
        try:
            status = os.stat(path)
        except FileNotFoundError:
            status = None
        except OSError as error:
            self.errors[path] = error
            return
        step = path
        for _ in range(8):  # /var/log/containers -> /var/log/pods -> /var/lib/docker
            try:
                step = os.path.join(os.path.dirname(step), os.readlink(step))
            except OSError:
                break
            self.add_directory(os.path.dirname(os.path.normpath(step)))
        if status is not None and stat.S_ISREG(status.st_mode):
            self.files[path] = status

    def list(self, path: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a directory, hidden ones too."""
        self.add_directory(path)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    self.entries += 1
                    if self.entries > _ENTRIES:
                        return
                    yield entry
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.errors[path] = error


def expand(pattern: str) -> Found:
    """The files that match. ``**`` does not go through links, so it can't go in circles."""
    found = Found()
    if is_plain(pattern):
        found.add_file(pattern)
    else:
        _walk("/", pattern.strip("/").split("/"), found, _DEPTH)
    return found


def is_plain(pattern: str) -> bool:
    """Whether ``pattern`` is one path, also where its name looks like a glob and exists."""
    return not glob.has_magic(pattern) or os.path.lexists(pattern)


def matches(pattern: str, path: str) -> bool:
    """Whether ``expand`` would find a file at ``path``."""
    if is_plain(pattern):
        return path == pattern
    return _fits(path.strip("/").split("/"), pattern.strip("/").split("/"))


def log_of(path: str) -> str | None:
    """The path that the file was at before a rotation, by its name; None if that does not tell."""
    directory, name = os.path.split(path)
    named = _OF_LOG.fullmatch(name)
    return os.path.join(directory, named[1]) if named else None


def _fits(names: list[str], parts: list[str]) -> bool:
    if not parts or not names:
        return not parts and not names
    name, part = names[0], parts[0]
    if part == "**":
        rest = parts[1:] or ["*"]
        return _fits(names, rest) or (not name.startswith(".") and _fits(names[1:], parts))
    if name.startswith(".") and not part.startswith("."):
        return False
    return fnmatch.fnmatchcase(name, part) and _fits(names[1:], parts[1:])


def _walk(directory: str, parts: list[str], found: Found, depth: int) -> None:
    part, rest = parts[0], parts[1:]
    if part == "**":
        rest = rest or ["*"]
        _walk(directory, rest, found, depth)
        if depth:
            for entry in found.list(directory):
                if not entry.name.startswith(".") and _is_directory(entry, links=False):
                    _walk(entry.path, ["**", *rest], found, depth - 1)
    elif glob.has_magic(part):
        fits = re.compile(fnmatch.translate(part)).match
        for entry in found.list(directory):
            if not fits(entry.name) or (entry.name.startswith(".") and not part.startswith(".")):
                continue
            if not rest:
                if entry.name.endswith(PACKED):
                    found.packed = entry.path
                else:
                    found.add_file(entry.path)
            elif _is_directory(entry, links=True):
                _walk(entry.path, rest, found, depth)
    elif rest:
        path = os.path.join(directory, part)
        if os.path.isdir(path):
            _walk(path, rest, found, depth)
        else:
            found.add_directory(path)
    else:
        found.add_file(os.path.join(directory, part))


def _is_directory(entry: os.DirEntry[str], *, links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False
