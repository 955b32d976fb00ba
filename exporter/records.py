"""The vocabulary every other module speaks: ``Line`` -> ``Record`` -> signals -> ``Incident``.

Nothing here reads, parses or decides. All types are frozen, so that a signal handed on
cannot change behind the back of whoever kept it; only ``Life`` grows, because a server does.
``Line`` and ``Frame`` are tuples: they are made by the million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

Facts = dict[str, object]

_LINE_BITS = 40


def numbered(stream: int, line: int) -> int:
    """A number for a line that is unique over streams and sorts by them: a record may have lines of two."""
    return stream << _LINE_BITS | line


def line_number(number: int) -> int:
    """The line in its own stream, from 1."""
    return number & (1 << _LINE_BITS) - 1


def stream_number(number: int) -> int:
    """Which stream the line is of, from 0."""
    return number >> _LINE_BITS


class Phase(StrEnum):
    """When a failure happened; label ``phase`` of the metrics."""

    STARTUP = "startup"
    SERVING = "serving"


class Confidence(StrEnum):
    """How far the evidence carries a verdict, weakest first."""

    INSUFFICIENT = "insufficient"
    POSSIBLE = "possible"
    PROBABLE = "probable"
    CONFIRMED = "confirmed"


class Line(NamedTuple):
    """One physical line, taken out of its container's wrapper.

    ``number`` counts from 1 in its input (see ``numbered`` where there are several). ``time`` is set only where the wrapper carries one
    (then it has a zone). ``origin`` names the container or unit where several share an input.
    ``carriage_returns`` is how many ``\\r`` stood before the newline: vLLM ends all but the
    last line of a record with one more than the terminal adds. ``traffic`` is set where the scan
    made one line of many and left their text out.
    """

    number: int
    text: str
    time: datetime | None = None
    origin: str = ""
    carriage_returns: int = 0
    traffic: Traffic | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One log call of one process: its prefix once, and the text of its lines.

    ``level`` is empty for lines that no logger wrote (interpreter tracebacks, C++ warnings).
    ``file`` is the base name as logged (``core.py``); ``numbers`` parallels ``lines``. ``timed``
    is false where ``time`` is borrowed from an earlier line, so the record is not older than it.
    ``returns`` parallels ``lines`` too, where it is needed: how many ``\\r`` ended each.
    """

    process: str
    pid: int | None
    level: str
    time: datetime | None
    file: str
    lines: tuple[str, ...]
    numbers: tuple[int, ...]
    origin: str = ""
    timed: bool = True
    traffic: Traffic | None = None
    returns: tuple[int, ...] = ()

    @property
    def head(self) -> str:
        """The first line of the text."""
        return self.lines[0]


# --- signals: what one record tells -------------------------------------------------------


class Frame(NamedTuple):
    """One line of a traceback. ``path`` starts at the package (``vllm/…``) where it can."""

    path: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class LifeMark:
    """A point in the life of a server: ``start``, ``engine``, ``ready``, ``stop``…"""

    kind: str
    record: Record


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings one record names; later ones override earlier ones of the same life."""

    values: Mapping[str, object]
    record: Record


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of the start-up memory accounting one record names, in bytes (tokens where named)."""

    values: Mapping[str, int]
    record: Record


class Step(NamedTuple):
    """One successful engine step, from ``--enable-logging-iteration-details``."""

    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int

    @property
    def tokens(self) -> int:
        """True tokens of the step."""
        return self.context_tokens + self.generation_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """What lines of ordinary traffic said, of one second of the log's clock.

    ``steps`` are in log order. ``prompts``: lengths in tokens of the requests received, where known;
    ``arrivals``: all requests received.
    """

    steps: tuple[Step, ...] = ()
    prompts: tuple[int, ...] = ()
    arrivals: int = 0


@dataclass(frozen=True, slots=True)
class TrafficSeen:
    """Steps and requests that one record reports, or that the scan summed up in one."""

    traffic: Traffic
    record: Record


@dataclass(frozen=True, slots=True)
class NearMiss:
    """torch's warning that an allocation failed once and is tried again after a cache flush."""

    device: int | None
    tried_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    record: Record


@dataclass(frozen=True, slots=True)
class Dump:
    """One part of the scheduler dump: ``config``, ``output`` or ``stats``, reduced to numbers."""

    part: str
    facts: Mapping[str, object]
    record: Record


@dataclass(frozen=True, slots=True)
class Failure:
    """A memory failure as one process reported it, once.

    ``kind`` is the wording (``allocator``, ``kv_no_room``, …: see ``vllm/memory_error.py``),
    ``facts`` the numbers in it, ``frames`` the traceback, outermost first. ``shown`` is the
    message rebuilt from the recognised parts alone, so it holds nothing of a user.
    """

    kind: str
    facts: Mapping[str, object]
    frames: tuple[Frame, ...]
    shown: str
    line: int
    record: Record


@dataclass(frozen=True, slots=True)
class Terminal:
    """A line that ends an engine or a start, or says that it lives on.

    ``kind``: ``fatal``, ``start_failed``, ``dead`` (others notice), ``killed`` (signal 9),
    ``survived`` (a utility call or one request failed, the engine goes on).
    """

    kind: str
    record: Record
    detail: str = ""


Signal = LifeMark | Settings | MemoryParts | TrafficSeen | NearMiss | Dump | Failure | Terminal


# --- results ------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """One life of a vLLM server, from its first start-up line to its end."""

    index: int
    started: datetime | None = None
    settings: dict[str, object] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    vllm_version: str | None = None
    model: str | None = None
    state: str = "starting"
    fingerprint: dict[str, bool] = field(
        default_factory=lambda: {"info": False, "warn": False, "error": False}
    )
    largest_step: int = 0
    near_misses: int = 0
    asleep: bool = False
    line: int = 0  # where it was first seen
    args_seen: bool = False  # "non-default args: {…}": what is not in it was left at its default


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason for or against a class. ``weight`` is a natural log likelihood ratio."""

    id: str
    favours: str
    weight: float
    says: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do, with the flags to type and what it costs."""

    text: str
    flags: str | None = None
    cost: str | None = None


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """Advice commonly given that does not help here, and why."""

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, what not to bother with, and how to know."""

    do: tuple[Remedy, ...]
    dead_ends: tuple[DeadEnd, ...]
    confirm: str
    numbers: Mapping[str, int]
    because: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ranked classes with the evidence for and against."""

    class_id: str
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    ranking: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure of one engine, however many ranks, processes and requests repeat it."""

    id: str
    time: datetime | None
    engine: int
    class_id: str
    phase: Phase
    fatal: bool
    confidence: Confidence
    facts: Mapping[str, object]
    evidence: tuple[Evidence, ...]
    ranking: tuple[tuple[str, float], ...]
    advice: Advice
    excerpt: tuple[str, ...]
    lines: tuple[int, int]
    reports: frozenset[tuple[str, int]] = frozenset()  # stream and line of what reported the failure
