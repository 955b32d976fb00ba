"""The pure core: records of one server in, lives and incidents out.

``analyze``, the tests and the sidecar drive this same object; only source and clock differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..records import Incident, LifeMark, Phase, Record
from ..vllm.signals import signals
from .advice import advise
from .classify import classify
from .engine import Lives
from .excerpt import excerpt
from .features import facts, features
from .incident import Case, Incidents
from .knowledge import FailureClass, builtin_classes


@dataclass(frozen=True, slots=True)
class _Frozen:
    """What was decided when the case settled."""

    class_id: str
    phase: str


class History:
    """Everything known of one server. Feed records in order, then ``finish``."""

    def __init__(self, classes: Mapping[str, FailureClass] | None = None) -> None:
        self._classes = classes if classes is not None else builtin_classes()
        self.lives = Lives()
        self._incidents = Incidents()
        self._frozen: dict[int, _Frozen] = {}

    @property
    def near_misses(self) -> int:
        """Allocator retries that were survived."""
        return self._incidents.near_misses

    def feed(self, record: Record) -> None:
        """Take in one record."""
        if record.timed:
            for case in self._incidents.tick(record.time):
                self._freeze(case)
        self._incidents.seen_record()
        for signal in signals(record):
            before = len(self.lives.all)
            if isinstance(signal, LifeMark) or not self.lives.all:
                self.lives.apply(signal)
                if len(self.lives.all) > before:
                    self._incidents.new_life()
                if isinstance(signal, LifeMark):
                    continue
            else:
                self.lives.apply(signal)
            life = self.lives.current
            self._incidents.apply(signal, life, self.lives.previous, self.lives.last_progress())
            if getattr(signal, "kind", "") in ("fatal", "start_failed", "dead"):
                self.lives.died()

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

    def incidents(self) -> list[Incident]:
        """Every incident so far, oldest first."""
        return [self._incident(case) for case in self._incidents.cases]

    def _freeze(self, case: Case) -> None:
        shown = facts(case)
        verdict = classify(case, features(case, shown), shown, self._classes)
        self._frozen[id(case)] = _Frozen(verdict.class_id, _phase(case, verdict.class_id, self._classes))

    def _incident(self, case: Case) -> Incident:
        shown = facts(case)
        found = features(case, shown)
        verdict = classify(case, found, shown, self._classes)
        frozen = self._frozen.get(id(case))
        class_id = frozen.class_id if frozen else verdict.class_id
        phase = frozen.phase if frozen else _phase(case, class_id, self._classes)
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
            advice=advise(case, shown, found, one),
            excerpt=excerpt(case),
            lines=case.lines(),
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
    parts = (str(record.time), record.process, str(record.pid), first.kind, first.shown, str(first.line))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
