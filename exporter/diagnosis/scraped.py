"""Windows of exposure between scrapes of vLLM's ``/metrics``.

Every window, that before a failure included, ends at a scrape that succeeded: what vLLM counted
after it is lost with the process. Requests are counted as they arrive, as running and waiting
ones are in the gauges before they are in a counter; their lengths only when they have finished.
"""

from __future__ import annotations

import math
from collections import deque

from ..vllm.exposition import Histogram, Snapshot, increase
from .exposure import WINDOW_SECONDS
from .ledger import WARM_UP_SECONDS, Ledger

_LATE = 1.5 * WINDOW_SECONDS  # longer ago than this, a window is no window of that length
_KEPT_SECONDS = 120.0


class ScrapedWindows:
    """Turns snapshots of one server into windows of its ledger. Feed every snapshot once, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._before: tuple[float, Snapshot] | None = None
        self._life: int | None = None
        self._begun = 0.0  # the first scrape of this life
        self._anchor = 0.0  # where the window began
        self._arrived: float | None = 0.0
        self._longest: int | None = None
        # from, to, requests that arrived, longest bucket
        self._recent: deque[tuple[float, float, float, float]] = deque()

    def take(self, at: float, snapshot: Snapshot, life: int) -> None:
        """One successful scrape at ``at``, seconds since the epoch, of the life with that index."""
        before, self._before = self._before, (at, snapshot)
        rise = None if before is None or life != self._life else increase(before[1], snapshot)
        if before is None or rise is None:
            if before is not None and life == self._life:
                self._ledger.lose_window(life)
            if life != self._life:
                self._begun = at
            self._life = life
            self._recent.clear()
            self._restart(at)
            self._settings(snapshot, life)
            return
        longest = 0
        if (lengths := _lengths(rise.request_prompt_tokens)) is not None:
            self._ledger.finished(life, lengths)
            longest = max((length for length, count in lengths.items() if count > 0), default=0)
            self._longest = max(longest, self._longest or 0)
        arrived = _arrived(before[1], snapshot, sum(rise.finished.values()) if rise.finished else None)
        if arrived is None or self._arrived is None:
            self._arrived = None
        else:
            self._arrived += arrived
            self._recent.append((before[0], at, arrived, longest))
            while self._recent[0][1] < at - _KEPT_SECONDS:
                self._recent.popleft()
        spent = at - self._anchor
        if spent >= WINDOW_SECONDS or spent < 0:
            if 0 < spent <= _LATE and self._anchor >= self._begun + WARM_UP_SECONDS:
                rate = None if self._arrived is None else self._arrived * WINDOW_SECONDS / spent
                self._ledger.window(life, at, self._longest, rate)
            else:
                self._ledger.lose_window(life)
            self._restart(at)
            self._settings(snapshot, life)

    def window_before(self, when: float) -> tuple[float | None, float | None]:
        """Longest bucket and arrivals of the window that ended with the last scrape before ``when``.

        None where no scrape was near, or vLLM was too young to have a whole window behind it.
        """
        recent = [one for one in self._recent if one[1] <= when]
        if not recent or when - recent[-1][1] > _LATE:
            return None, None
        arrived, longest, end = 0.0, 0.0, recent[-1][1]
        for begin, _, requests, length in reversed(recent):
            arrived, longest = arrived + requests, max(longest, length)
            if (span := end - begin) >= WINDOW_SECONDS:
                return (longest, arrived * WINDOW_SECONDS / span) if span <= _LATE else (None, None)
        return None, None

    def _restart(self, at: float) -> None:
        self._anchor, self._arrived, self._longest = at, 0.0, None

    def _settings(self, snapshot: Snapshot, life: int) -> None:
        """``vllm:cache_config_info`` names a few settings that a log may not."""
        cache = next((one.cache for one in snapshot.engines if one.cache is not None), None)
        if cache is None:
            return
        values: dict[str, object] = {
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "kv_cache_dtype": cache.cache_dtype,
            "num_gpu_blocks_override": cache.num_gpu_blocks_override,
            "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
            "enable_prefix_caching": cache.enable_prefix_caching,
        }
        self._ledger.settings_of(life, {name: one for name, one in values.items() if one is not None})


def _arrived(before: Snapshot, after: Snapshot, finished: float | None) -> float | None:
    then, now = (_in_flight(one) for one in (before, after))
    if then is None or now is None or finished is None:
        return None
    return max(0.0, finished + now - then)


def _in_flight(snapshot: Snapshot) -> float | None:
    running, waiting = snapshot.running, snapshot.waiting
    return None if running is None or waiting is None else running + waiting


def _lengths(rise: Histogram | None) -> dict[int, float] | None:
    """Requests by the smallest length of their bucket; a bucket is ``(bound before, bound]``."""
    if rise is None or not rise.bounds or any(math.isnan(b) or b < 0 for b in rise.bounds):
        return None
    found: dict[int, float] = {}
    below, bound_before = 0.0, -1.0
    for bound, count in zip(rise.bounds, rise.counts, strict=True):
        found[math.floor(bound_before) + 1] = max(0.0, count - below)
        below, bound_before = count, bound
    if math.isfinite(bound_before) and rise.total is not None:
        found[math.floor(bound_before) + 1] = max(0.0, rise.total - below)
    return found
