"""Waiting for a log to grow: a wake-up is a hint that shortens the wait, never trusted alone."""

# Paths are compared as text and looked at by the thousand, so they stay strings here.

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol


class Waker(Protocol):
    """Something that may know earlier than a timer that there is something to look at."""

    async def wait(self, timeout: float) -> None:
        """Return when a look is worth while, and at the latest after ``timeout`` seconds."""
        ...


class DirectoryWaker:
    """Wakes when something changes in one of the directories that ``directories`` names.

    Directories are watched, not files: a watch on a file ends with the file. watchfiles does not
    block until something happens but looks in steps, and tells of a change one step after it saw
    it. Each look costs a thread switch, so the step is 3 ms while a log is busy and 20 ms after
    10 s without a change. Where watching fails (no inotify instances left, a directory that went
    away) ``wait`` comes back every 0.25 s instead.
    """

    BUSY_MS, IDLE_MS, IDLE_SECONDS = 3, 20, 10.0
    BLIND_SECONDS, RETRY_SECONDS = 0.25, 5.0

    def __init__(self, directories: Callable[[], Iterable[str]]) -> None:
        self._directories = directories
        self._watched: frozenset[str] = frozenset()
        self._blind = True
        self._retry_at = 0.0
        self._event = asyncio.Event()
        self._stop = threading.Event()

    async def wait(self, timeout: float) -> None:
        """Return on a change, and at the latest after ``timeout`` seconds."""
        wanted = frozenset(self._directories())
        if wanted != self._watched or (self._blind and time.monotonic() >= self._retry_at):
            self.close()
            self._watched, self._stop, self._blind = wanted, threading.Event(), False
            self._retry_at = time.monotonic() + self.RETRY_SECONDS
            allowed = sorted(
                path for path in wanted if os.access(path, os.R_OK) or not os.access(path, os.F_OK)
            )
            arguments = (allowed, self._stop, asyncio.get_running_loop())
            threading.Thread(target=self._watch, args=arguments, name="log-watch", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, self.BLIND_SECONDS) if self._blind else timeout):
                await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Stop watching; the thread ends within 20 ms."""
        self._stop.set()

    def _watch(self, directories: list[str], stop: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        from watchfiles._rust_notify import RustNotify  # the step can change from call to call only here

        with suppress(RuntimeError):  # the loop is closed: nobody is left to wake
            try:
                # Ignoring denied permissions would also ignore directories that are missing.
                notify = RustNotify(
                    directories, False, False, 300, recursive=False, ignore_permission_denied=False
                )
                changed = time.monotonic()
                loop.call_soon_threadsafe(self._event.set)  # what happened before the watch began
                while True:
                    busy = time.monotonic() - changed < self.IDLE_SECONDS
                    step = self.BUSY_MS if busy else self.IDLE_MS
                    result = notify.watch(step, step, 1000, stop)
                    if isinstance(result, set):
                        changed = time.monotonic()
                        loop.call_soon_threadsafe(self._event.set)
                    elif result != "timeout":
                        return
            except (OSError, RuntimeError):
                if not stop.is_set():
                    loop.call_soon_threadsafe(self._lost_sight)

    def _lost_sight(self) -> None:
        self._blind = True
        self._event.set()
