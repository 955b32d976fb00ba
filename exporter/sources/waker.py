"""Waiting for a log to grow: a wake-up is a hint that shortens the wait, never trusted alone.

Whether by inotify or by watchfiles is decided here and nowhere else. watchfiles is portable but
does not block until something happens: it sleeps in steps and looks after each, so what is saved
in steps is lost in time. Linux itself wakes at once and costs nothing while nothing happens: with
inotify an idle sidecar takes 0.15 % of a core instead of 0.35 %, and a line is on ``/metrics``
after 3 ms instead of 10 ms (``tests/bench/LIVE.md``).
"""

# Paths are compared as text and looked at by the thousand, so they stay strings here.

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Protocol


class Waker(Protocol):
    """Something that may know earlier than a timer that there is something to look at."""

    async def wait(self, timeout: float) -> None:
        """Return when a look is worth while, and at the latest after ``timeout`` seconds."""
        ...


class Watch(Protocol):
    """Calls ``changed`` after changes in directories, ``lost`` once it can't; both in the event loop."""

    def __init__(
        self, directories: list[str], changed: Callable[[], None], lost: Callable[[], None]
    ) -> None: ...

    def close(self) -> None:
        """Stop watching."""
        ...


class DirectoryWaker:
    """Wakes when something changes in one of the directories that ``directories`` names.

    Directories are watched, not files: a watch on a file ends with the file. Where watching fails
    (no inotify instances left, a directory that went away) ``wait`` comes back every 0.25 s
    instead, and watching is tried again after 5 s. The first ``wait`` after a watch began returns
    at once, for what happened before.
    """

    BLIND_SECONDS, RETRY_SECONDS = 0.25, 5.0

    def __init__(
        self, directories: Callable[[], Iterable[str]], watch: Callable[..., Watch] | None = None
    ) -> None:
        self._directories = directories
        self._begin = watch or (InotifyWatch if sys.platform == "linux" else StepWatch)
        self._watch: Watch | None = None
        self._watched: frozenset[str] = frozenset()
        self._blind = True
        self._retry_at = 0.0
        self._event = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Return on a change, and at the latest after ``timeout`` seconds."""
        wanted = frozenset(self._directories())
        if wanted != self._watched or (self._blind and time.monotonic() >= self._retry_at):
            self.close()
            self._watched, self._blind = wanted, False
            self._retry_at = time.monotonic() + self.RETRY_SECONDS
            # what may not be listed can't be watched, now or later: that is not worth a retry
            allowed = sorted(
                path for path in wanted if os.access(path, os.R_OK) or not os.access(path, os.F_OK)
            )
            try:
                self._watch = self._begin(allowed, self._event.set, self._lost_sight)
            except OSError:
                self._lost_sight()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, self.BLIND_SECONDS) if self._blind else timeout):
                await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _lost_sight(self) -> None:
        self._blind = True
        self._event.set()


# --- Linux ----------------------------------------------------------------------------------

_MODIFY, _ATTRIB, _MOVED, _CREATE, _DELETE, _MOVE_SELF = 0x2, 0x4, 0xC0, 0x100, 0x200, 0x800
_IGNORED, _ONLYDIR = 0x8000, 0x1000000  # IGNORED: the directory was deleted or unmounted
GONE = _IGNORED | _MOVE_SELF
"""What happened to a directory that is no longer watched under its name."""
OVERFLOW = 0x4000
"""More happened than the kernel remembers; it has no watch."""
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it


class Inotify:
    """A file descriptor of the event loop; ``told`` gets what happened as (number of a watch, mask).

    Not one instruction while nothing happens, and after something did a pause of ``pause`` seconds:
    a busy log is not looked at for each of its lines. Raises ``OSError`` where the kernel has no
    instance left.
    """

    def __init__(self, told: Callable[[list[tuple[int, int]]], None], pause: float) -> None:
        self._told, self._pause_seconds = told, pause
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._fd = _checked(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._listen()

    def add(self, directory: str) -> int:
        """Watch what happens to files in a directory; the number of the watch. Raises ``OSError``."""
        mask = _MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _MOVE_SELF | _ONLYDIR
        return _checked(_libc().inotify_add_watch(self._fd, os.fsencode(directory), mask))

    def remove(self, number: int) -> None:
        """Stop a watch; the kernel may have ended it before."""
        _libc().inotify_rm_watch(self._fd, number)

    def close(self) -> None:
        """Stop all watches."""
        if self._pause is not None:
            self._pause.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _listen(self) -> None:
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)  # what does not fit wakes again
        self._loop.remove_reader(self._fd)
        self._pause = self._loop.call_later(self._pause_seconds, self._listen)
        happened, at = [], 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            happened.append((number, mask))
            at += _EVENT.size + length
        self._told(happened)


class InotifyWatch:
    """Directories watched by inotify. Raises ``OSError`` where one can't be. A busy log is looked at every 5 ms."""

    PAUSE_SECONDS = 0.005

    def __init__(self, directories: list[str], changed: Callable[[], None], lost: Callable[[], None]) -> None:
        self._changed, self._lost = changed, lost
        self._inotify = Inotify(self._told, self.PAUSE_SECONDS)
        try:
            for one in directories:
                self._inotify.add(one)
        except OSError:
            self.close()
            raise
        changed()

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def _told(self, happened: list[tuple[int, int]]) -> None:
        self._changed()
        if any(mask & GONE for _, mask in happened):
            self._lost()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# --- elsewhere ------------------------------------------------------------------------------


class StepWatch:
    """watchfiles, whose step decides: each costs a thread switch, and a change is told one step late.

    So the step is 3 ms while a log is busy and 20 ms after 10 s without a change.
    """

    BUSY_MS, IDLE_MS, IDLE_SECONDS = 3, 20, 10.0

    def __init__(self, directories: list[str], changed: Callable[[], None], lost: Callable[[], None]) -> None:
        self._changed, self._lost = changed, lost
        self._stop = threading.Event()
        arguments = (directories, asyncio.get_running_loop())
        threading.Thread(target=self._run, args=arguments, name="log-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching; the thread ends within 20 ms."""
        self._stop.set()

    def _run(self, directories: list[str], loop: asyncio.AbstractEventLoop) -> None:
        from watchfiles._rust_notify import RustNotify  # the step can change from call to call only here

        with suppress(RuntimeError):  # the loop is closed: nobody is left to wake
            try:
                # Ignoring denied permissions would also ignore directories that are missing.
                notify = RustNotify(
                    directories, False, False, 300, recursive=False, ignore_permission_denied=False
                )
                changed = time.monotonic()
                loop.call_soon_threadsafe(self._changed)  # what happened before the watch began
                while True:
                    busy = time.monotonic() - changed < self.IDLE_SECONDS
                    step = self.BUSY_MS if busy else self.IDLE_MS
                    result = notify.watch(step, step, 1000, self._stop)
                    if isinstance(result, set):
                        changed = time.monotonic()
                        loop.call_soon_threadsafe(self._changed)
                    elif result != "timeout":
                        return
            except (OSError, RuntimeError):
                if not self._stop.is_set():
                    loop.call_soon_threadsafe(self._lost)
