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
from .device import Devices
from .diagnosis.knowledge import FailureClass
from .diagnosis.scraped import ScrapedWindows
from .engine_state import Signs, engine_state
from .follow import Follower
from .notify.alerts import Links
from .notify.open_alerts import OpenAlerts
from .notify.receiver import Outlet
from .probe.on_start import OnStart, Wanted
from .scrape import Scraper
from .sources.scan import BLOCK
from .sources.stream import Source
from .status import TargetStatus

_SAMPLES = 60
_MINUTES_BEFORE = 300.0
_DEVICE_TICKS = 100
_BACKLOG_SECONDS = 5.0  # from then on a source that lags no bytes has been read to its end


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
        *,
        outlets: Mapping[str, Outlet] | None = None,
        labels: Mapping[str, str] | None = None,
        links: Links | None = None,
        devices: Devices | None = None,
        probe: Wanted | None = None,
    ) -> None:
        self.config = config
        self.status = status
        self._clocks = clocks or Clocks()
        self.follower = Follower(status, classes, self._clocks.now, self._before)
        self._windows = ScrapedWindows(self.follower.ledger)
        self.follower.window_before = self._windows.window_before
        self._sampled: object = None
        self._devices = devices
        self._until_device = 0
        whose, into = labels or config.labels, {} if outlets is None else outlets
        self.alerts = OpenAlerts(status, whose, self._clocks.wall, into, links or Links())
        self._caught_up: set[str] = set()  # streams and sources of which what comes now was written now
        self._read_live: float | None = None  # when the last line of a failure was read, if so
        self._begun: float | None = None
        self._sources = sources
        self._scraper = Scraper(config.vllm_url or None, interval, self._clocks.wall, session)
        self._url = config.vllm_url or None
        self._on_start = None if probe is None else OnStart(probe, self.follower, lambda: self._url, session)
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
        probe = [] if self._on_start is None else [self._on_start.run()]
        return [self._read(source, saved) for source in self._sources] + [self._scraper.run(), *probe]

    async def _read(self, source: Source, saved: Callable[[], None]) -> None:
        follower, name = self.follower, source.stats.name
        async for chunk in source.chunks(follower.tokens()):
            failures, live = follower.failures, bool(self._caught_up & {chunk.stream, name})
            follower.take(name, chunk, self._clocks.wall())
            if follower.failures != failures:
                self._read_live = self._clocks.wall() if live else None
            if chunk.ended:
                self._caught_up.discard(chunk.stream)
            elif len(chunk.data) < BLOCK // 2:
                self._caught_up.add(chunk.stream)
            self._report()
            self.awake.set()
            if follower.urgent:
                saved()
        self._running -= 1
        if self._running == 0:
            follower.finish()
            self._report()
            saved()
            self.ended.set()

    def point_to(self, url: str | None) -> None:
        """The server answers there from now on, or nobody knows where. Raises ValueError for a bad URL."""
        self._scraper.point_to(url)
        self._url = url

    @property
    def opened(self) -> bool:
        """Whether every source was opened, or cannot be for a reason that it tells."""
        return all(one.opened or one.problem is not None for one in self.status.sources)

    def tick(self) -> None:
        """A tenth of a second went by."""
        self._sample()
        self._ask_device()
        self.follower.tick()
        self._report()
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
        if self.alerts.tick():
            self.follower.stale = True
        self._begun = self._begun or now
        if now - self._begun > _BACKLOG_SECONDS:
            self._caught_up |= {one.name for one in status.sources if one.opened and not one.lag_bytes}

    def _sample(self) -> None:
        """Put what was scraped last into windows, once."""
        latest = self._scraper.ring[-1] if self._scraper.ring else None
        if latest is not None and latest is not self._sampled and self.status.life is not None:
            self._windows.take(latest.time, latest.snapshot, self.status.life.index)
        self._sampled = latest

    def _report(self) -> None:
        """Hand on incidents before they are saved, so that one save holds both."""
        news = self.follower.news
        while news:
            self.alerts.incident(news.popleft(), self._read_live)

    def _ask_device(self) -> None:
        """The risk depends on free memory; a change that matters is one of a percent."""
        self._until_device -= 1
        if self._devices is None or self._until_device > 0:
            return
        self._until_device = _DEVICE_TICKS
        free, known = self._devices.free_bytes(), self.follower.free_bytes
        if free is None or known is None or abs(free - known) > known // 100:
            self.follower.ledger.changed += free != known
            self.follower.free_bytes = free

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
