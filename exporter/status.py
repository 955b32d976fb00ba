"""What is known of a target at one moment: the only thing that metrics, API and pages read.

``app.py`` keeps one ``TargetStatus`` a target up to date; whoever serves it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .records import Life
from .sources.stream import SourceStats

ENGINE_STATES = ("starting", "serving", "hung", "dead", "stopped", "unknown")


@dataclass(slots=True)
class Counts:
    """Counters of the contract. They only grow, also over restarts of the exporter."""

    incidents: Counter[tuple[str, str]] = field(default_factory=Counter)  # (class, phase)
    fatal: Counter[str] = field(default_factory=Counter)  # class
    error_lines: int = 0
    near_misses: int = 0
    long_prompts: int = 0
    engine_starts: int = 0
    fingerprints: Counter[str] = field(default_factory=Counter)  # full, without_warn
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)  # (source, parsed | unparsed)
    read_bytes: Counter[str] = field(default_factory=Counter)  # source
    truncated: Counter[str] = field(default_factory=Counter)  # source


@dataclass(frozen=True, slots=True)
class LastIncident:
    """Facts of the newest incident of one class; None where the log does not say."""

    timestamp: float  # seconds since the epoch
    requested_bytes: int | None = None
    free_bytes: int | None = None
    step_tokens: int | None = None
    longest_prompt_tokens: int | None = None
    kv_cache_usage_ratio: float | None = None
    confidence_ratio: float | None = None


@dataclass(slots=True)
class OpenAlert:
    """An alert that was pushed and fires, as plain data: it is saved, to go on as the same alert.

    ``starts`` is in seconds since the epoch; ``sent`` says when each receiver last took it.
    ``ended``: it no longer fires, and is kept to be remembered.
    """

    labels: dict[str, str]
    annotations: dict[str, str]
    starts: float
    url: str = ""
    sent: dict[str, float] = field(default_factory=dict)
    ended: bool = False


@dataclass(slots=True)
class TargetStatus:
    """One vLLM server.

    ``labels`` are empty for a single target (they then come from the scrape configuration), else
    ``target``, or ``namespace``, ``pod`` and ``container``.
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    last: dict[str, LastIncident] = field(default_factory=dict)  # by class
    life: Life | None = None
    previous: Life | None = None
    engine_state: str = "unknown"
    engine_start_timestamp: float | None = None
    setting_changed: dict[str, float] = field(default_factory=dict)  # setting -> seconds since the epoch
    sources: list[SourceStats] = field(default_factory=list)
    last_line_timestamp: dict[str, float] = field(default_factory=dict)  # source
    scrape_up: bool | None = None  # None: no URL is scraped
    scrape_seconds: float | None = None
    largest_step_tokens: int | None = None
    recommended_budget: int | None = None
    trigger: dict[str, object] | None = None  # documents of the contract, None before anything is known
    confirmation: dict[str, object] | None = None
    risk: dict[str, object] | None = None
    incidents: list[dict[str, object]] = field(default_factory=list)  # documents, newest first
    engines: list[dict[str, object]] = field(default_factory=list)  # documents of lives, oldest first
    alerts: dict[str, OpenAlert] = field(default_factory=dict)  # direct pushes that fire, oldest first


@dataclass(slots=True)
class Status:
    """The exporter: its targets and its own health."""

    targets: list[TargetStatus] = field(default_factory=list)
    state_write_failures: int = 0
    config_reload_successful: bool = True
    notifications: Counter[tuple[str, str]] = field(default_factory=Counter)  # (receiver, result)
    ready: bool = False
    alive: float = 0.0  # loop time of the last sign of life
