"""The minutes before a failure as lines to draw, and as the table that says the same.

A drawing holds shapes only, in a box of 1000 by 100 that is stretched to its place; words and
numbers stand beside it as text, so that they keep their size on a phone and can be read aloud.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .visible import count, mappings, number, percent

WIDTH, HEIGHT = 1000, 100
_EDGE = 4  # room for half a stroke
_GAP = 3.0  # as many usual intervals without a scrape are a gap, which no line crosses
_LONGEST = 86_400.0  # seconds; what is further away belongs to something else
_SERIES = (
    ("running_requests", "Requests running"),
    ("waiting_requests", "Requests waiting"),
    ("kv_cache_usage", "KV cache used"),
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line. ``path``: SVG path data in the box; ``last``: as scraped last before the failure."""

    name: str
    path: str
    last: str
    most: str
    top: str  # what the upper edge of the box stands for


@dataclass(frozen=True, slots=True)
class Row:
    """One scrape: seconds before the failure, then one value a series, empty where there is none."""

    before: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ``/metrics`` said. ``failure``: where on the horizontal axis of the box the engine failed."""

    series: tuple[Series, ...]
    begin: str
    failure: str
    rows: tuple[Row, ...]


def timeline(before: object) -> Timeline | None:
    """The drawing of ``metrics_before`` of an incident; None where nothing was scraped."""
    samples = [
        (seconds, one)
        for one in mappings(before)
        if (seconds := number(one.get("seconds_before"))) is not None and abs(seconds) <= _LONGEST
    ]
    samples.sort(key=lambda sample: -sample[0])
    shown = [
        (key, name) for key, name in _SERIES if any(number(one.get(key)) is not None for _, one in samples)
    ]
    if not shown:
        return None
    begin, end = max(samples[0][0], 0.0), min(samples[-1][0], 0.0)
    span = begin - end or 1.0
    gap = _GAP * _usual([seconds for seconds, _ in samples])
    series = []
    for key, name in shown:
        points = [(s, value) for s, one in samples if (value := number(one.get(key))) is not None]
        ratio = key == "kv_cache_usage"
        top = 1.0 if ratio else max([1.0, *(value for _, value in points)])
        placed = [((begin - s) / span * WIDTH, s, min(value / top, 1.0)) for s, value in points]
        until = [value for s, value in points if s >= 0] or [points[0][1]]
        series.append(
            Series(
                name,
                _path(placed, gap),
                _shown(until[-1], ratio),
                _shown(max(value for _, value in points), ratio),
                _shown(top, ratio),
            )
        )
    rows = tuple(
        Row(f"{s:,.1f}", tuple(_shown(number(one.get(key)), key == "kv_cache_usage") for key, _ in shown))
        for s, one in samples
    )
    return Timeline(tuple(series), _ago(begin), f"{begin / span * WIDTH:.1f}", rows)


def _usual(times: Sequence[float]) -> float:
    """The usual time between two scrapes, in seconds."""
    between = [earlier - later for earlier, later in pairwise(times)]
    return statistics.median(between) if between else 1.0


def _path(points: Sequence[tuple[float, float, float]], gap: float) -> str:
    """Path data through ``(x, seconds before, height 0 to 1)``; a point alone is drawn as a dot."""
    pieces: list[str] = []
    last: float | None = None
    for x, seconds, height in points:
        y = HEIGHT - _EDGE - max(height, 0.0) * (HEIGHT - 2 * _EDGE)
        joined = last is not None and last - seconds <= gap
        pieces.append(f"{'L' if joined else 'M'}{x:.1f} {y:.1f}" + ("" if joined else "h0"))
        last = seconds
    return "".join(pieces)


def _shown(value: float | None, ratio: bool) -> str:
    return (percent(value) if ratio else count(value)) or ""


def _ago(seconds: float) -> str:
    return f"{seconds / 60:.0f} min before" if seconds >= 120 else f"{seconds:.0f} s before"
