"""What a server went through: how long its prompts were, how large its steps, and how each life ended.

These are the numbers that the trigger test, the confirmation and the risk are computed from. A
*window* is a stretch of ``WINDOW_SECONDS`` of one life; a ``LifeExposure`` sums up a whole one.

A prompt that killed the engine is in no histogram: vLLM observes a request when it has finished.
So what a failing step held comes from its dump, never from a histogram; see ``trigger.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

WINDOW_SECONDS = 15.0

PROMPT_SOURCES = ("requests", "metrics", "iteration")
"""Where lengths of prompts come from, best first: request lines of the log, ``vllm:request_prompt_tokens``,
and what the per-step lines let one put together."""


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of ``WINDOW_SECONDS`` of one life.

    ``end``: seconds since the epoch. ``length``: tokens, of the largest step where steps are known,
    else of the longest prompt. ``rate``: requests, running at once where steps are known, else
    that arrived. Windows are only compared with windows of the same kind. None: not known.
    """

    end: float
    life: int
    length: float | None
    rate: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """One memory incident, as far as statistics need it.

    ``prompts``: lengths of the prompts in the failing step, longest first, from the dump; empty
    without one. ``step_tokens``: tokens of that step.
    """

    incident: str
    time: datetime | None
    class_id: str
    phase: str
    fatal: bool
    step_tokens: int | None = None
    longest_prompt: int | None = None
    prompts: tuple[int, ...] = ()


@dataclass(slots=True)
class LifeExposure:
    """What one life of the server was exposed to.

    ``settings`` are those of the log, with ``model`` and ``vllm_version`` where known. ``prompts``
    holds, for each of ``PROMPT_SOURCES`` that said anything, how many prompts were at least so many
    tokens long and shorter than the next key: exact lengths from the log; ``bound + 1`` of every
    bucket (also of empty ones) from a histogram, whose bucket is ``(bound, next bound]``.
    ``full_steps`` are steps of at least 0.9 of the step limit that succeeded; ``probed_steps`` are those
    that a probe must have filled by what it sent, whether or not the log names them. ``lost_windows`` could
    not be compared: of the first minute, cut by a restart, or with a scrape missing. A setting that
    is None was left at vLLM's default. ``kv_cache_bytes``: size of the KV pool, as logged.
    """

    index: int
    started: datetime | None = None
    settings: dict[str, object] = field(default_factory=dict)
    served: bool = False
    prompts: dict[str, dict[int, float]] = field(default_factory=dict)
    steps: int = 0
    full_steps: int = 0
    probed_steps: int = 0
    largest_step: int = 0
    near_misses: int = 0
    lost_windows: int = 0
    kv_cache_bytes: int | None = None
    failures: list[Failed] = field(default_factory=list)

    def at_least(self, source: str, tokens: int) -> float:
        """Prompts of at least ``tokens`` that ``source`` is sure of."""
        return sum(count for length, count in self.prompts.get(source, {}).items() if length >= tokens)
