"""Keeps one Alertmanager told: what fires, again and again while it does, and that it ended.

Each receiver has its own queue and task, so that one that hangs holds up nobody. Alertmanager
forgets what is not sent again, also by its own restart; therefore alerts are resent, always with
the same labels and start, by which it knows that they are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from .. import logs
from ..status import OpenAlert
from .alertmanager import Api, PushError, as_json

QUEUE = 1000
"""Alerts one receiver may hold; the oldest is dropped for a newer one."""

RESEND = 60.0
EXPIRY = 1800.0
"""Seconds after which an alert ends that nobody sends any more; a restart must not take longer.

A pod that is deleted after its crash takes the exporter along: until then it inhibits the rule's alert.
"""

SHOWN = 300.0
"""Seconds that an alert fires at least once it was delivered, where it ended before that."""

GIVE_UP = 86_400.0
_BATCH = 64
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
_LEAST_WAIT = 1.0  # between two attempts, also for something new

log = structlog.get_logger(__name__)


class Outlet(Protocol):
    """Where alerts go. ``put`` and ``end`` return at once; ``run`` runs until cancelled."""

    name: str

    def put(self, alert: OpenAlert) -> None:
        """The alert fires, or says something else than before."""
        ...

    def end(self, alert: OpenAlert, *, replaced: bool = False) -> None:
        """It is over. ``replaced``: another one tells the same, so nobody need see this one."""
        ...

    def forget(self, alert: OpenAlert) -> None:
        """It is nobody's any more; it ends by itself."""
        ...

    async def run(self) -> None:
        """Deliver."""
        ...

    async def flush(self) -> None:
        """One last attempt for what was not delivered."""
        ...


@dataclass(slots=True)
class Clock:
    """Where time and chance come from; tests bring their own."""

    wall: Callable[[], float] = time.time
    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


@dataclass(slots=True)
class _Entry:
    """One alert in the queue; times are of the monotonic clock."""

    alert: OpenAlert
    since: float
    due: float
    told: bool = False  # accepted at least once
    changed: bool = True  # says something that was not accepted yet
    ends: float = math.inf
    refusals: int = 0  # by an Alertmanager that took others

    def over(self, now: float) -> bool:
        return self.told and self.ends <= now


class Receiver:
    """One Alertmanager. ``count`` is told how each push of an alert went: delivered, failed, dropped."""

    def __init__(self, api: Api, count: Callable[[str, str], None], clock: Clock | None = None) -> None:
        self.name = api.name
        self._api = api
        self._count = count
        self._clock = clock or Clock()
        self._entries: dict[frozenset[tuple[str, str]], _Entry] = {}
        self._blocked_until = -math.inf
        self._last = -math.inf
        self._failures = 0
        self._wake = asyncio.Event()

    # --- what is to be told ---------------------------------------------------------------------

    def put(self, alert: OpenAlert) -> None:
        """The alert fires, or says something else than before. One that was sent long ago is not sent again."""
        now, key = self._clock.now(), _key(alert)
        entry = self._entries.get(key)
        if entry is not None:
            entry.changed = entry.changed or entry.alert.annotations != alert.annotations
            entry.alert, entry.ends = alert, math.inf
            if entry.changed:
                entry.due = now
        else:
            sent = alert.sent.get(self.name)
            if sent is not None and self._clock.wall() - sent >= EXPIRY:
                return  # it has ended there: to fire again would be a second page
            while len(self._entries) >= QUEUE:
                del self._entries[next(iter(self._entries))]
                self._count(self.name, "dropped")
                logs.once(
                    log,
                    ("dropped", self.name),
                    "too many alerts wait: the oldest are dropped",
                    receiver=self.name,
                )
            self._entries[key] = _Entry(alert, now, now, told=sent is not None, changed=sent is None)
        self._blocked_until = min(self._blocked_until, self._last + _LEAST_WAIT)
        self._wake.set()

    def end(self, alert: OpenAlert, *, replaced: bool = False) -> None:
        """It is over. What was never delivered is delivered first, and ends after a while."""
        entry = self._entries.get(_key(alert))
        if entry is None:
            return
        if replaced and not entry.told:
            del self._entries[_key(alert)]
            return
        entry.ends = self._clock.now()
        if entry.told:
            entry.due = entry.ends
        self._wake.set()

    def forget(self, alert: OpenAlert) -> None:
        """Send it no more, unless it was never delivered."""
        entry = self._entries.get(_key(alert))
        if entry is not None and entry.told:
            del self._entries[_key(alert)]
        elif entry is not None:
            entry.ends = self._clock.now()

    # --- telling it -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver, for ever."""
        while True:
            self._wake.clear()
            wait = self.due - self._clock.now()
            if wait <= 0:
                await self.attempt()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if math.isfinite(wait) else None):
                    await self._wake.wait()

    async def flush(self) -> None:
        """One last attempt for what was not delivered."""
        self._blocked_until = -math.inf
        if any(not one.told for one in self._entries.values()):
            await self.attempt()

    @property
    def due(self) -> float:
        """When the next attempt is due, on the monotonic clock; infinite without anything to tell."""
        first = min((min(one.due, one.ends if one.told else math.inf) for one in self._entries.values()), default=math.inf)  # fmt: skip
        return max(first, self._blocked_until)

    async def attempt(self) -> None:
        """Push once whatever is due."""
        now, wall = self._clock.now(), self._clock.wall()
        self._last = now
        self._give_up(now)
        batch = self._batch(now)
        if not batch:
            return
        items = [as_json(one.alert, wall, wall if one.over(now) else wall + EXPIRY) for one in batch]
        sent = [(one, one.alert.annotations, one.over(now)) for one in batch]
        try:
            await self._api.push(items)
        except PushError as error:
            self._failed(batch, error)
        else:
            self._delivered(sent)

    def _batch(self, now: float) -> list[_Entry]:
        due = [one for one in self._entries.values() if one.due <= now or one.over(now)]
        refused = [one for one in due if one.refusals]
        # of several alerts one may be wrong: which is found out one by one, the sound ones first
        return [one for one in due if not one.refusals][:_BATCH] or refused[:1]

    def _delivered(self, sent: list[tuple[_Entry, dict[str, str], bool]]) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        for entry, said, over in sent:
            if over and entry.ends <= now:
                self._entries.pop(_key(entry.alert), None)
            elif not entry.told:
                entry.told = True
                entry.ends = max(entry.ends, now + SHOWN) if math.isfinite(entry.ends) else math.inf
            if over or entry.changed:
                self._count(self.name, "delivered")
            entry.changed = entry.alert.annotations != said
            entry.due = now if entry.changed else now + RESEND
            entry.alert.sent[self.name] = wall
            if entry.refusals > 1:
                logs.clear(log, ("refused", self.name), "Alertmanager takes the alert", receiver=self.name)
            entry.refusals = 0
        self._failures = 0
        self._blocked_until = -math.inf
        logs.clear(log, ("receiver", self.name), "Alertmanager takes alerts again", receiver=self.name)

    def _failed(self, batch: list[_Entry], error: PushError) -> None:
        for _ in batch:
            self._count(self.name, "failed")
        now = self._clock.now()
        if error.rejected and len(batch) > 1:
            for entry in batch:
                entry.refusals = 1
            return
        if error.rejected:
            batch[0].refusals += 1
            batch[0].due = now + self._wait(batch[0].refusals)
        else:
            self._failures += 1
            self._blocked_until = now + self._wait(self._failures)
        logs.once(
            log,
            ("refused" if error.rejected else "receiver", self.name),
            "Alertmanager does not take alerts: trying again",
            receiver=self.name,
            problem=str(error),
        )

    def _wait(self, failures: int) -> float:
        """Longer each time, and not the same for everybody who lost the same Alertmanager."""
        longest = min(_FIRST_WAIT * 2.0 ** min(failures - 1, 16), _LONGEST_WAIT)
        return longest * (0.5 + self._clock.chance() / 2)

    def _give_up(self, now: float) -> None:
        for key, entry in list(self._entries.items()):
            if not entry.told and now - entry.since > GIVE_UP:
                del self._entries[key]
                self._count(self.name, "dropped")


def _key(alert: OpenAlert) -> frozenset[tuple[str, str]]:
    """Alertmanager knows an alert by its labels, and so do we."""
    return frozenset(alert.labels.items())
