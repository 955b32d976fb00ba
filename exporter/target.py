"""One target at work: its sources read, its server scraped, its status kept up to date.

Everything of a target is in here and nothing is shared with another, so that the second vLLM
server is no other program than the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp

from .config import TargetConfig
from .diagnosis.knowledge import FailureClass
from .engine_state import Signs, engine_state
from .follow import Follower
from .scrape import Scraper
from .sources.stream import Source
from .status import TargetStatus

_SAMPLES = 60
_MINUTES_BEFORE = 300.0


@dataclass(slots=True)
class Clocks:
    """Where time comes from; tests bring their own."""

    wall: Callable[[], float] = time.time
    now: Callable[[], datetime] = datetime.now


class Target:
    """Reads and scrapes one vLLM server. ``jobs`` run until cancelled; call ``tick`` beside them."""

    def __init__(
        self,
        config: TargetConfig,
        status: TargetStatus,
        sources: list[Source],
        classes: Mapping[str, FailureClass],
        session: aiohttp.ClientSession,
        interval: float,
        clocks: Clocks | None = None,
    ) -> None:
        self.config = config
        self.status = status
        self._clocks = clocks or Clocks()
        self.follower = Follower(status, classes, self._clocks.now, self._before)
        self._sources = sources
        self._scraper = Scraper(config.vllm_url, interval, self._clocks.wall, session)
        self._running = len(sources)
        self._fed = 0
        self._last_fed: float | None = None
        self._was_up = False
        self._life: object = None
        self._gone_since: float | None = None
        self._failures = 0
        self._failed_at = 0.0
        self.awake = asyncio.Event()
        """Something was read; whoever waits for it clears it."""
        self.ended = asyncio.Event()
        """Every source came to its end: only of standard input."""
        status.sources = [source.stats for source in sources]

    def jobs(self, saved: Callable[[], None]) -> list[Coroutine[Any, Any, None]]:
        """What is to run. ``saved`` is called when something was counted that may not be lost."""
        return [self._read(source, saved) for source in self._sources] + [self._scraper.run()]

    async def _read(self, source: Source, saved: Callable[[], None]) -> None:
        follower, name = self.follower, source.stats.name
        async for chunk in source.chunks(follower.tokens(name)):
            follower.take(name, chunk, self._clocks.wall())
            self.awake.set()
            if follower.urgent:
                saved()
        self._running -= 1
        if self._running == 0:
            follower.finish()
            saved()
            self.ended.set()

    @property
    def opened(self) -> bool:
        """Whether every source was opened, or cannot be for a reason that it tells."""
        return all(one.opened or one.problem is not None for one in self.status.sources)

    def tick(self) -> None:
        """A tenth of a second went by."""
        self.follower.tick()
        status, scraper, now = self.status, self._scraper, self._clocks.wall()
        status.scrape_up, status.scrape_seconds = scraper.up, scraper.seconds
        if self.follower.fed != self._fed:
            self._fed, self._last_fed = self.follower.fed, now
        if self.follower.failures != self._failures:
            self._failures, self._failed_at = self.follower.failures, now
        progress = scraper.last_progress
        if status.life is not self._life:
            self._life, self._was_up, self._gone_since = status.life, bool(scraper.up), None
        if scraper.up:
            self._was_up, self._gone_since = True, None
        elif (scraper.problem or "").startswith("cannot connect") and self._was_up:
            self._gone_since = self._gone_since or now
        status.engine_state = engine_state(
            Signs(
                logged=status.life.state if status.life else None,
                up=scraper.up,
                healthy=scraper.health == 200,
                gone=None if self._gone_since is None else now - self._gone_since,
                # a token after the failure: whatever it was, the engine went on
                unresolved=self.follower.unresolved and (progress is None or progress <= self._failed_at),
                line=None if self._last_fed is None else now - self._last_fed,
                token=None if progress is None else now - progress,
            )
        )

    def _before(self, when: float) -> list[dict[str, float]]:
        """What ``/metrics`` said in the minutes before a failure; it is gone right after."""
        found: list[dict[str, float]] = []
        ring = [one for one in self._scraper.ring if when - _MINUTES_BEFORE <= one.time <= when + 1]
        for sample in ring[:: max(1, len(ring) // _SAMPLES)]:
            known = {
                "running_requests": sample.snapshot.running,
                "waiting_requests": sample.snapshot.waiting,
                "kv_cache_usage": sample.snapshot.kv_cache_usage,
            }
            found.append(
                {"seconds_before": round(when - sample.time, 1)}
                | {name: value for name, value in known.items() if value is not None}
            )
        return found
