"""What is known of a target at one moment: the only thing that metrics, API and pages read.

``app.py`` keeps one ``TargetStatus`` a target up to date; whoever serves it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .records import Life
from .sources.stream import SourceStats

NOTIFICATION_RESULTS = ("delivered", "failed", "dropped")
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
    read_errors: Counter[str] = field(default_factory=Counter)  # source
    rotations: Counter[tuple[str, str]] = field(default_factory=Counter)  # (source, kind)


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
    steps: dict[str, int] | None = None  # of this life, by its per-step lines: seen, full, largest_tokens
    probe: dict[str, object] | None = None  # document of the last probe, with the index of its life
    probe_asked: bool = False  # whether each life is probed
    recommended_budget: int | None = None
    trigger: dict[str, object] | None = None  # documents of the contract, None before anything is known
    confirmation: dict[str, object] | None = None
    risk: dict[str, object] | None = None
    incidents: list[dict[str, object]] = field(default_factory=list)  # documents, newest first
    engines: list[dict[str, object]] = field(default_factory=list)  # documents of lives, oldest first
    alerts: dict[str, OpenAlert] = field(default_factory=dict)  # direct pushes that fire, oldest first
    followed: bool = True  # False: set aside after a failure of the exporter; nothing else is of now
    exporter_failures: int = 0


@dataclass(slots=True)
class Status:
    """The exporter: its targets and its own health."""

    targets: list[TargetStatus] = field(default_factory=list)
    state_write_failures: int = 0
    config_reload_successful: bool = True
    notifications: Counter[tuple[str, str]] = field(default_factory=Counter)  # (receiver, result)
    node_containers: dict[str, int] | None = None  # by state; None: the exporter follows no node
    ready: bool = False
    alive: float = 0.0  # loop time of the last sign of life


def unready(target: TargetStatus) -> str | None:
    """Why the budget of this engine life can't be relied on yet, in one line; None where it can.

    It was exercised if a probe survived, or if a full step is in the log. Where each life is probed,
    its probe has to have ended first.
    """
    if not target.followed:
        return "the exporter failed at it, and does not follow it now"
    if target.life is None:
        return "no start of the server was read yet"
    probe = target.probe or {}
    state = probe.get("state") if probe.get("life") == target.life.index else None
    full = (target.steps or {}).get("full", 0)
    if target.engine_state in ("dead", "stopped", "hung"):
        return f"the engine is {target.engine_state}"
    if state == "survived":
        return None
    if state in ("running", "failed", "unfinished"):
        return {
            "running": "the budget probe is running",
            "failed": "the server failed under the budget probe",
            "unfinished": "the budget probe was not finished in time",
        }[str(state)]
    if full and (state == "skipped" or not target.probe_asked):
        return None
    if state == "skipped":
        return f"the budget probe could not run: {probe.get('reason', 'for an unknown reason')}"
    if target.probe_asked:
        return "the budget probe has not run"
    return "no full step is in the log; start with --probe.on-start, or run vllm with --enable-logging-iteration-details"
