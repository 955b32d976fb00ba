"""The pure core: records of one server in, lives and incidents out.

``analyze``, the tests and the sidecar drive this same object; only source and clock differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..plain import whole
from ..records import (
    Dump,
    Facts,
    Failure,
    Incident,
    LifeMark,
    NearMiss,
    Phase,
    Record,
    Terminal,
    Traffic,
    TrafficSeen,
    line_number,
)
from ..vllm.signals import signals
from .advice import advise
from .classify import classify
from .engine import Lives
from .excerpt import excerpt
from .exposure import Failed
from .features import facts, features
from .incident import Case, Incidents
from .knowledge import FailureClass, builtin_classes
from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class _Frozen:
    """What was decided when the case settled."""

    class_id: str
    phase: str


class History:
    """Everything known of one server. Feed records in order, then ``finish``."""

    def __init__(
        self,
        classes: Mapping[str, FailureClass] | None = None,
        stream_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        """``stream_of`` names the stream of a line by its number; of a single one nobody needs a name."""
        self._classes = classes if classes is not None else builtin_classes()
        self.lives = Lives()
        self.ledger = Ledger()
        self._incidents = Incidents(stream_of)
        self._frozen: dict[int, _Frozen] = {}
        self._now: datetime | None = None
        self.error_lines: list[int] = []
        """Lines that reported a failure, before anything is put together; the caller empties it."""
        self.activity = 0
        """Grows with every line that an incident may need."""

    @property
    def near_misses(self) -> int:
        """Allocator retries that were survived."""
        return self._incidents.near_misses

    def feed(self, record: Record) -> None:
        """Take in one record."""
        self.lives.line = line_number(record.numbers[0])
        if record.timed:
            self._now = record.time
            for case in self._incidents.tick(record.time):
                self._freeze(case)
        self._incidents.seen_record()
        for signal in signals(record):
            if isinstance(signal, TrafficSeen):
                self.traffic(signal.traffic, record.time)
                continue
            before = len(self.lives.all)
            if isinstance(signal, LifeMark) or not self.lives.all:
                self.lives.apply(signal)
                if len(self.lives.all) > before:
                    self._incidents.new_life()
                    self.sync()
                if isinstance(signal, LifeMark):
                    continue
            else:
                self.lives.apply(signal)
            if isinstance(signal, Failure):
                self.error_lines.append(signal.line)
            if isinstance(signal, (Failure, Terminal, Dump, NearMiss)):
                self.activity += 1
            life = self.lives.current
            self._incidents.apply(signal, life, self.lives.previous, self.lives.last_progress())
            if getattr(signal, "kind", "") in ("fatal", "start_failed", "dead"):
                self.lives.died()

    def traffic(self, traffic: Traffic, time: datetime | None) -> None:
        """Take in what lines of ordinary traffic said, of one second."""
        before = len(self.lives.all)
        self.lives.traffic(traffic)
        if len(self.lives.all) > before:
            self._incidents.new_life()
            self.sync()
        self.ledger.traffic(self.lives.current, traffic, time)

    def sync(self) -> None:
        """Bring the ledger up to date with what the log has said of the newest lives."""
        for life in self.lives.all[-2:]:
            self.ledger.life(life)

    def feed_all(self, records: Iterable[Record]) -> None:
        """Take in many records."""
        for record in records:
            self.feed(record)

    def finish(self) -> None:
        """The log ended."""
        for case in self._incidents.finish():
            self._freeze(case)
        for case in self._incidents.cases:
            if case.fatal and case.life is self.lives.current:
                self.lives.died()
        self.sync()

    def incidents(self) -> list[Incident]:
        """Every incident so far, oldest first."""
        return [self._incident(case) for case in self._incidents.cases if not case.over]

    # --- for an input that does not end -----------------------------------------------------------

    def settle(self) -> None:
        """Nothing came for a second: what is open settles, as by the log's own clock."""
        for case in self._incidents.settle():
            self._freeze(case)

    def settled(self) -> list[Incident]:
        """The settled incidents that are not forgotten yet, oldest first."""
        return [self._incident(case) for case in self._incidents.cases if case.settled and not case.over]

    def survived_warnings(self, quiet: bool = False) -> list[NearMiss]:
        """Near misses that no failure can claim any more; ``quiet``: nothing came for five seconds."""
        return self._incidents.survived_warnings(None if quiet else self._now)

    @property
    def open(self) -> bool:
        """Whether an incident is being put together."""
        return any(not case.settled for case in self._incidents.cases[-1:])

    @property
    def terminated(self) -> bool:
        """Whether a line said how the newest incident ended."""
        return any(case.ended or case.survived for case in self._incidents.cases[-1:])

    @property
    def unresolved(self) -> bool:
        """Whether a failure while serving was neither survived nor the end, as far as lines say."""
        last = self._incidents.cases[-1:]
        return any(
            case.life is self.lives.current
            and not (case.ended or case.survived or case.fatal)
            and case.phase == "serving"
            for case in last
        )

    @property
    def done(self) -> bool:
        """Whether reading may go on from here, with a snapshot, as if from the beginning."""
        starting = self.lives.all and self.lives.current.state == "starting" and self.lives.current.started
        before = self._incidents.cases[-1:]
        if starting or self._now is None:
            return False
        if before and before[0].settled and before[0].life is not self.lives.current:
            return not self._incidents.unclaimed(self._now)
        return self._incidents.done(self._now)

    @property
    def _over(self) -> bool:
        """Whether the current life ended with a failure that is counted."""
        return self._incidents.over and self._incidents.cases[-1].life is self.lives.current

    def forget(self) -> None:
        """Drop what only the end of a finite input would ask for."""
        self._incidents.forget()
        self.lives.forget(2)
        last = {id(case) for case in self._incidents.cases}
        self._frozen = {key: value for key, value in self._frozen.items() if key in last}

    def snapshot(self) -> dict[str, object]:
        """What ``restore`` needs to go on from here, as plain JSON data. Only when ``done``."""
        self.sync()
        return {**self.lives.snapshot(), "over": self._over, "ledger": self.ledger.snapshot()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``snapshot`` was taken."""
        self.lives.restore(saved)
        if saved.get("over"):
            self._incidents.restore(self.lives.current)
        if "ledger" in saved:  # not before exposures were kept
            self.ledger.restore(saved["ledger"])

    def _freeze(self, case: Case) -> None:
        shown = facts(case)
        verdict = classify(case, features(case, shown), shown, self._classes)
        frozen = _Frozen(verdict.class_id, _phase(case, verdict.class_id, self._classes))
        self._frozen[id(case)] = frozen
        self._note(case, frozen, shown)

    def _note(self, case: Case, frozen: _Frozen, shown: Facts) -> None:
        """Tell the ledger what failed, or what more is known of it."""
        dumped = case.dump["output"].facts if "output" in case.dump else {}
        lengths = dumped.get("prompt_lengths", ())
        # where only later chunks of a prompt were scheduled, its length is not in the dump, but is more than this
        longest = max(whole(shown.get(name)) or 0 for name in ("max_prompt_tokens", "max_computed_tokens"))
        failed = Failed(
            _identity(case), case.time, frozen.class_id, frozen.phase, case.fatal,
            whole(shown.get("step_tokens")), longest or None,
            lengths if isinstance(lengths, tuple) else (),
        )  # fmt: skip
        self.ledger.failed(case.life, failed, whole(shown.get("running_requests")))

    def _incident(self, case: Case) -> Incident:
        shown = facts(case)
        found = features(case, shown)
        verdict = classify(case, found, shown, self._classes)
        frozen = self._frozen.get(id(case))
        class_id = frozen.class_id if frozen else verdict.class_id
        phase = frozen.phase if frozen else _phase(case, class_id, self._classes)
        self._note(case, _Frozen(class_id, phase), shown)
        one = self._classes[class_id]
        return Incident(
            id=_identity(case),
            time=case.time,
            engine=case.life.index,
            class_id=class_id,
            phase=Phase(phase),
            fatal=case.fatal,
            confidence=verdict.confidence,
            facts=shown,
            evidence=verdict.evidence,
            ranking=verdict.ranking,
            advice=advise(case, shown, found, one, self.ledger.good_budget(case.life)),
            excerpt=excerpt(case),
            lines=case.lines(),
            reports=frozenset(case.reports),
        )


def _phase(case: Case, class_id: str, classes: Mapping[str, FailureClass]) -> str:
    """The phase to report: what the lines show, else what the class allows, else serving."""
    allowed = classes[class_id].phases
    if case.phase in allowed:
        return str(case.phase)
    return "serving" if "serving" in allowed else "startup"


def _identity(case: Case) -> str:
    """Stable over restarts of the exporter: from the log alone.

    The line number tells equal failures of a log without times apart.
    """
    first = case.first
    record = first.record
    return short_hash(
        record.time, record.process, record.pid, first.kind, first.shown, line_number(first.line)
    )


def short_hash(*parts: object) -> str:
    """Twelve hexadecimal digits that stand for ``parts``, the same in every process."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]
