"""One failure = one incident, over ranks, processes, re-raises and requests.

``Incidents`` takes signals in log order and decides what belongs together; ``Case`` is one
incident while its lines still come in. A case settles on the log's own clock, one second after
its last line: then its class freezes. Later lines may complete its facts and make it fatal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from ..records import Dump, Failure, Life, NearMiss, Record, Signal, Terminal, line_number
from ..vllm.log import seconds_between
from ..vllm.traceback import Reading, read

SETTLE_SECONDS = 1.0
_SAME_TEXT_SECONDS = 10.0  # 0.13 repeats a failure up to 5 s after it
_DUMP_SECONDS = 5.0
_KEPT_WARNINGS = 256
_KEPT_FAILURES = 1000
_HANG_SECONDS = 900.0  # one rank fails, the others notice after execute_model's timeout (300 s)

# Wordings that explain another one of the same failure, whichever comes first.
_EXPLAINING = ("sampler_warmup", "pooler_warmup", "load_failed", "oom_killer", "ray_memory_pressure")
_STARTUP_KINDS = frozenset(
    [
        "kv_no_room",
        "kv_below_max_len",
        "startup_free",
        "host_kv",
        "load_failed",
        "sampler_warmup",
        "pooler_warmup",
        "profiling_error",
    ]
)
_DEVICE_KINDS = frozenset(["allocator", "driver", "cublas", "fraction", "masked", "warning_then_failure"])
_SERVING_KINDS = frozenset({"workspace_locked", "cumem"})
_STARTUP_STAGES = frozenset({"device_init", "weights", "profile", "kv_allocation", "warmup", "capture"})
_STARTUP_OPERATIONS = frozenset({"weights", "kv_tensors", "capture"})
_SERVING_STAGES = frozenset({"step", "sampling", "utility", "wake"})
_RANK = re.compile(r"(?:TP|rank|rank=|VllmWorker_|Worker_)(\d{1,15}(?!\d))")


@dataclass(slots=True)
class Case:
    """An incident that is being put together."""

    life: Life
    previous: Life | None
    failures: list[Failure] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)
    dump: dict[str, Dump] = field(default_factory=dict)
    warnings: list[NearMiss] = field(default_factory=list)
    history: tuple[NearMiss, ...] = ()
    progress: tuple[str, Record] | None = None
    state_before: str = "starting"
    asleep_before: bool = False
    largest_step_before: int = 0
    last_time: datetime | None = None
    settled: bool = False
    presumed_fatal: bool = False
    over: bool = False  # of a former process: settled, and the end of its engine
    reports: set[tuple[str, int]] = field(default_factory=set)  # stream and line

    @property
    def time(self) -> datetime | None:
        """When the first line of the failure was logged."""
        return next((f.record.time for f in self.failures if f.record.time is not None), None)

    @property
    def first(self) -> Failure:
        """The failure that came first."""
        return self.failures[0]

    @property
    def kinds(self) -> frozenset[str]:
        """The wording of the first failure, and wordings that explain it."""
        explaining = {f.kind for f in self.failures if f.kind in _EXPLAINING}
        return frozenset({self.first.kind} | explaining)

    @property
    def reading(self) -> Reading:
        """Stage and operation, from the report that names an operation."""
        kinds = self.kinds
        readings = [read(f.frames) for f in self.failures if f.frames and f.kind in kinds]
        if not readings:
            return Reading(None, None, frozenset(), None)
        return next((r for r in readings if r.operation), next((r for r in readings if r.stage), readings[0]))

    @property
    def survived(self) -> bool:
        """Whether the engine said that it goes on."""
        return any(t.kind.startswith("survived") for t in self.terminals)

    @property
    def ended(self) -> bool:
        """Whether a line said that the engine is gone, or never came up."""
        return self.over or any(not t.kind.startswith("survived") for t in self.terminals)

    @property
    def fatal(self) -> bool:
        """Whether the failure killed the engine, as far as is known."""
        if self.ended or self.phase == "startup" or self.first.kind in ("killed_by_signal", "oom_killer"):
            return True
        return self.presumed_fatal and not self.survived and self.reading.stage not in ("utility", "wake")

    @property
    def phase(self) -> str | None:
        """``startup`` or ``serving``; None where the lines do not show it."""
        kinds = self.kinds
        if kinds & _STARTUP_KINDS:
            return "startup"
        if kinds & _SERVING_KINDS:
            return "serving"
        stage = self.reading.stage
        if stage in _STARTUP_STAGES or (stage is None and self.reading.operation in _STARTUP_OPERATIONS):
            return "startup"
        ends = {t.kind for t in self.terminals}
        if "start_failed" in ends:
            return "startup"
        if stage in _SERVING_STAGES or self.dump:
            return "serving"
        if self.survived:
            return "serving"
        if self.state_before in ("serving", "dead", "stopped"):
            return "serving"
        if self.stage is not None or self.life.started is not None:
            return "startup"
        if "fatal" in ends and any(_says_fatal(t) for t in self.terminals):
            return "serving"
        if "dead" in ends:
            return "serving"
        return None

    @property
    def stage(self) -> str | None:
        """What the server was doing: from the frames, else from the last start-up line."""
        found = self.reading.stage
        if found is not None or self.state_before != "starting" or self.progress is None:
            return found
        mark, record = self.progress
        gap = seconds_between(record.time, self.time)
        if gap is None or not 0 <= gap <= 300 or self.first.kind not in _DEVICE_KINDS:
            return None
        return {"loading": "weights", "capturing": "capture"}.get(mark)

    @property
    def ranks(self) -> list[int]:
        """Ranks (else device indices) that reported the failure."""
        kinds = self.kinds
        named, devices = set(), set()
        for failure in self.failures:
            if failure.kind not in kinds:
                continue
            if (match := _RANK.search(failure.record.process)) is not None:
                named.add(int(match[1]))
            if isinstance(index := failure.facts.get("gpu_index"), int):
                devices.add(index)
        return sorted(named or devices)

    def worst(self) -> Failure:
        """The report with the least free memory; where none has numbers, the first."""
        kinds = self.kinds | {"allocator"}
        sized = [f for f in self.failures if f.kind in kinds and isinstance(f.facts.get("free_bytes"), int)]
        if not sized:
            tried = [f for f in self.failures if f.kind in kinds and "tried_bytes" in f.facts]
            return tried[0] if tried else self.first
        # the cause first: a later, unrelated report must not replace its numbers
        same = [f for f in sized if f.facts.get("tried_bytes") == sized[0].facts.get("tried_bytes")]
        return min(same, key=lambda f: int(str(f.facts["free_bytes"])))

    def lines(self) -> tuple[int, int]:
        """First and last line number that belong to it."""
        numbers = [f.record.numbers[0] for f in self.failures] + [f.line for f in self.failures]
        numbers += [n for d in self.dump.values() for n in (d.record.numbers[0], d.record.numbers[-1])]
        numbers += [t.record.numbers[0] for t in self.terminals]
        return min(numbers), max(numbers)


def _says_fatal(terminal: Terminal) -> bool:
    # "EngineCore hit an exception" (0.7.0..0.8.4) is printed at start and in serving alike
    return not terminal.record.head.startswith("EngineCore hit an exception")


def _gap(case: Case, record: Record) -> float | None:
    """Seconds since the last line of ``case``; None where they are not known.

    A record that borrowed its time from the line before is not older: then it is at least as many.
    """
    gap = seconds_between(case.last_time, record.time)
    return gap if record.timed or (gap or 0) > 0 else None


class Incidents:
    """Puts signals together into cases. ``near_misses`` counts retries that were survived."""

    def __init__(self, stream_of: Callable[[int], str] = lambda _: "") -> None:
        self._stream_of = stream_of
        self.cases: list[Case] = []
        self._warnings: list[NearMiss] = []
        self._dump: dict[str, Dump] = {}
        self._records_since_warning = 0
        self._other_death = False
        self._forgotten = 0

    @property
    def near_misses(self) -> int:
        """Allocator warnings that no failure of the same size and device followed."""
        return self._forgotten + len(self._warnings)

    def survived_warnings(self, now: datetime | None) -> list[NearMiss]:
        """Those that no failure can claim any more at ``now``, the latest of them at most 256."""
        return [
            w
            for w in self._warnings
            if now is None or (seconds_between(w.record.time, now) or 0) > _DUMP_SECONDS
        ]

    def unclaimed(self, now: datetime | None) -> bool:
        """Whether a dump or a warning still waits for the failure it may belong to."""
        dumped = next(iter(self._dump.values())).record.time if self._dump else None
        waiting = bool(self._dump) and not (seconds_between(dumped, now) or 0) > _DUMP_SECONDS
        return waiting or len(self.survived_warnings(now)) < len(self._warnings)

    def done(self, now: datetime | None) -> bool:
        """Whether nothing of what was seen can still be added to at ``now`` (None: unknown)."""
        if self.unclaimed(now):
            return False
        case = self.cases[-1] if self.cases else None
        if case is None:
            return True
        if self.over:
            return True
        gap = seconds_between(case.last_time, now) if now is not None else None
        if not case.settled or gap is None:
            return False
        return gap > (_SAME_TEXT_SECONDS if case.survived else _HANG_SECONDS)

    @property
    def over(self) -> bool:
        """Whether the last case was the end of its engine: what follows in that life only repeats it."""
        case = self.cases[-1] if self.cases else None
        return case is not None and case.settled and case.ended and not case.survived

    def restore(self, life: Life) -> None:
        """Go on behind a case of ``life`` that is ``over``, of which nothing else is known any more."""
        self.cases.append(Case(life, None, settled=True, over=True))

    def forget(self) -> None:
        """Drop the cases that nothing can be added to: all but the last."""
        del self.cases[:-1]

    def tick(self, time: datetime | None) -> Iterator[Case]:
        """The case that settles because the log's clock went on, if any."""
        case = self._open()
        if case is None:
            return
        if case.last_time is None:
            case.last_time = time  # only lines without a clock so far: this is the next one seen
        gap = seconds_between(case.last_time, time)
        if gap is not None and gap > SETTLE_SECONDS:
            case.settled = True
            yield case

    def apply(
        self, signal: Signal, life: Life, previous: Life | None, progress: tuple[str, Record] | None
    ) -> None:
        """Take in one signal of ``life``."""
        match signal:
            case Failure():
                self._failure(signal, life, previous, progress)
            case Dump():
                self._dumped(signal, life)
            case NearMiss():
                self._warnings.append(signal)
                if len(self._warnings) > _KEPT_WARNINGS:
                    del self._warnings[0]
                    self._forgotten += 1
                life.near_misses += 1
                self._records_since_warning = 0
            case Terminal(kind="cut"):
                self._cut(signal, life, previous, progress)
            case Terminal():
                self._ended(signal, life)
            case _:
                pass

    def seen_record(self) -> None:
        """One more record went by."""
        self._records_since_warning += 1

    def new_life(self) -> None:
        """A new life began: nothing of the old one belongs to it, and its last failure ended it."""
        for case in self.cases[-1:]:
            case.presumed_fatal = True
        self._dump.clear()
        self._other_death = False

    def settle(self) -> Iterator[Case]:
        """What is open settles: nothing came for a second, whatever the log's clock says."""
        case = self._open()
        if case is not None:
            case.settled = True
            yield case

    def finish(self) -> Iterator[Case]:
        """The input ended: what is open settles; a failed step that nobody outlived was fatal."""
        yield from self.settle()
        for one in self.cases:
            one.presumed_fatal = True

    # --- what belongs together ------------------------------------------------------------------

    def _open(self) -> Case | None:
        case = self.cases[-1] if self.cases else None
        return case if case is not None and not case.settled else None

    def _failure(
        self, failure: Failure, life: Life, previous: Life | None, progress: tuple[str, Record] | None
    ) -> None:
        case = self._case_of(failure, life)
        if (
            case is None
            and failure.kind == "killed_by_signal"
            and (self._other_death or life.state == "stopped")
        ):
            return  # vLLM kills its own processes on the way down
        if case is None:
            case = Case(
                life,
                previous,
                history=tuple(self._warnings),
                progress=progress,
                state_before=life.state,
                asleep_before=life.asleep,
                largest_step_before=life.largest_step,
            )
            if self._dump and self._close(
                next(iter(self._dump.values())).record, failure.record, _DUMP_SECONDS
            ):
                case.dump.update(self._dump)
            self._dump = {}
            self.cases.append(case)
        case.reports.add((self._stream_of(failure.line), line_number(failure.line)))
        if len(case.failures) < _KEPT_FAILURES:
            case.failures.append(failure)
        self._touch(case, failure.record)
        self._claim_warning(case, failure)
        if failure.kind in _DEVICE_KINDS:
            life.fingerprint["error"] = True

    def _case_of(self, failure: Failure, life: Life) -> Case | None:
        """The case that this report repeats or continues, or None."""
        case = self.cases[-1] if self.cases else None
        if case is None or case.life is not life:
            return None
        gap = _gap(case, failure.record)
        if not case.settled and (gap is None or gap <= SETTLE_SECONDS):
            return case
        if case.ended:
            return case  # nothing of a dead engine fails again
        if case.survived:
            known = gap is not None and failure.record.timed
            same_call = known and self._same_text(case, failure) and (gap or 0) <= SETTLE_SECONDS
            return case if same_call else None
        if gap is None or gap <= _SAME_TEXT_SECONDS:
            others = failure.record.process not in {f.record.process for f in case.failures}
            if self._same_text(case, failure) or others:
                return case
        if failure.kind in ("killed_by_signal", "nccl") and (gap is None or gap <= _HANG_SECONDS):
            return case
        return None

    @staticmethod
    def _same_text(case: Case, failure: Failure) -> bool:
        return any(f.shown == failure.shown for f in case.failures)

    def _claim_warning(self, case: Case, failure: Failure) -> None:
        """Torch warns, flushes its cache, tries again and then raises: that warning is no near miss."""
        tried, device = failure.facts.get("tried_bytes"), failure.facts.get("gpu_index")
        if not isinstance(tried, int):
            return
        for warning in reversed(self._warnings):
            if (
                warning.tried_bytes is not None
                and abs(warning.tried_bytes - tried) <= max(tried // 100, 6 << 20)
                and warning.device in (device, None)
                and self._close(warning.record, failure.record, _DUMP_SECONDS)
            ):
                self._warnings.remove(warning)
                case.life.near_misses -= 1
                case.warnings.append(warning)
                return

    def _cut(
        self, terminal: Terminal, life: Life, previous: Life | None, progress: tuple[str, Record] | None
    ) -> None:
        """A worker failed and the log ends before it says of what; a warning stands right before."""
        if not self._warnings or self._records_since_warning > 3:
            return
        warning = self._warnings[-1]
        facts = {
            name: value
            for name, value in (
                ("tried_bytes", warning.tried_bytes),
                ("free_bytes", warning.free_bytes),
                ("total_bytes", warning.total_bytes),
                ("gpu_index", warning.device),
            )
            if value is not None
        }
        shown = "a worker failed right after torch warned of a failed allocation"
        self._warnings.remove(warning)
        life.near_misses -= 1
        self._failure(
            Failure("warning_then_failure", facts, (), shown, terminal.record.numbers[0], terminal.record),
            life, previous, progress,
        )  # fmt: skip

    def _dumped(self, dump: Dump, life: Life) -> None:
        case = self.cases[-1] if self.cases else None
        if case is not None and case.life is life and dump.part not in case.dump and not case.survived:
            gap = _gap(case, dump.record)
            if not case.settled or gap is None or gap <= _HANG_SECONDS:
                case.dump[dump.part] = dump
                self._touch(case, dump.record)
                return
        if dump.part == "config":
            self._dump = {}
        self._dump[dump.part] = dump

    def _ended(self, terminal: Terminal, life: Life) -> None:
        case = self.cases[-1] if self.cases else None
        if case is not None and case.life is life:
            gap = _gap(case, terminal.record)
            outlived = case.survived and (terminal.kind == "dead" or (gap or 0) > SETTLE_SECONDS)
            if not outlived and (case.ended or gap is None or gap <= _HANG_SECONDS):
                case.terminals.append(terminal)
                if not case.settled:
                    self._touch(case, terminal.record)
                return
        if not terminal.kind.startswith("survived"):
            self._other_death = True

    @staticmethod
    def _touch(case: Case, record: Record) -> None:
        if (
            record.timed
            and record.time is not None
            and (case.last_time is None or (seconds_between(case.last_time, record.time) or 0) > 0)
        ):
            case.last_time = record.time

    @staticmethod
    def _close(earlier: Record, later: Record, seconds: float) -> bool:
        gap = seconds_between(earlier.time, later.time) if earlier.timed else None
        if gap is not None and not later.timed:
            return gap <= seconds  # it is not older than the time it borrowed
        return gap is None or abs(gap) <= seconds
