"""One inotify instance for the logs of all containers.

Linux gives a user 128 instances by default, and the kubelet itself needs some of them: one for
every log would use them up. And whoever is woken must be the one whose log has grown, else each of
many servers would pay for the lines of all others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import suppress

from ..sources.waker import GONE, OVERFLOW, Inotify

PAUSE = 0.1
"""Seconds after a change in which no other is told: what 32 busy logs cost depends on it."""

BLIND = 0.25
"""Seconds between looks where changes can't be told, or not all of them."""


class Wakeup:
    """Wakes one source; a ``Waker``. Whoever finds its files says in ``directories`` where they are."""

    def __init__(self, all_of_them: Wakeups) -> None:
        self.directories: Iterable[str] = ()
        self.event = asyncio.Event()
        self.watched: frozenset[str] = frozenset()
        self.blind = False
        self._all = all_of_them

    async def wait(self, timeout: float) -> None:
        """Return on a change, and at the latest after ``timeout`` seconds."""
        wanted = frozenset(self.directories)
        if wanted != self.watched:
            self._all.watch(self, wanted)
            self.event.set()  # for what happened before
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, BLIND) if self.blind else timeout):
                await self.event.wait()
        self.event.clear()

    def close(self) -> None:
        """Watch nothing any more."""
        self._all.watch(self, frozenset())


class Wakeups:
    """All that are to be woken, and what they watch."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # no instance left: everybody looks for himself
                self._inotify = Inotify(self._told, PAUSE)
        self._numbers: dict[str, int] = {}
        self._watching: dict[int, set[Wakeup]] = {}

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.close()

    def watch(self, one: Wakeup, wanted: frozenset[str]) -> None:
        """From now on ``one`` is woken by changes in these directories, and no others."""
        added, left, one.watched = wanted - one.watched, one.watched - wanted, wanted
        if self._inotify is None:
            one.blind = bool(wanted)
            return
        one.blind = False
        for path in left:
            self._leave(self._inotify, one, path)
        for path in added:
            try:
                number = self._inotify.add(path)  # the same one for the same directory
            except OSError:
                one.blind = True
                continue
            self._numbers[path] = number
            self._watching.setdefault(number, set()).add(one)

    def _leave(self, inotify: Inotify, one: Wakeup, path: str) -> None:
        number = self._numbers.get(path)
        if number is None:
            return
        watching = self._watching.get(number, set())
        watching.discard(one)
        if not watching:
            self._watching.pop(number, None)
            del self._numbers[path]
            inotify.remove(number)

    def _told(self, happened: list[tuple[int, int]]) -> None:
        for number, mask in happened:
            if mask & OVERFLOW:
                for one in {one for watching in self._watching.values() for one in watching}:
                    one.event.set()
            for one in self._watching.get(number, ()):
                one.event.set()
            if mask & GONE:
                self._lost(number)

    def _lost(self, number: int) -> None:
        """The directory is gone; something else may come in its place."""
        for one in self._watching.pop(number, ()):
            one.watched = frozenset(path for path in one.watched if self._numbers.get(path) != number)
        for path in [path for path, known in self._numbers.items() if known == number]:
            del self._numbers[path]
