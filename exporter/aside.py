"""Targets that the exporter failed at while it follows others: set aside, and begun anew.

A single target takes the process down with it: a restart is seen by everyone, frozen numbers by
nobody. With several that would blind all of them for the sake of one, in a crash loop even, as
the line that it failed at is read again after the restart. So one is set aside alone. Nothing of
it is shown meanwhile but that it is not followed, and what it was before.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import TargetConfig
from .sources.stream import SourceStats
from .status import TargetStatus

PAUSES = (1.0, 5.0, 15.0, 60.0, 3600.0)
"""Seconds until a target is begun anew, by how often it failed in a row: what does not pass within a
minute and a half needs a person, or a new log. Each attempt may read 64 MiB again, so then it is hourly."""

PROVEN = 600.0
"""Seconds that a target has to run until its next failure is a first one."""


@dataclass(slots=True)
class SetAside:
    """One target: what is shown of it, and when it is due."""

    config: TargetConfig
    status: TargetStatus
    due: float


class Aside:
    """All that are set aside, by name. Times are seconds of one clock that only grows."""

    def __init__(self) -> None:
        self.targets: dict[str, SetAside] = {}
        self._begun: dict[str, float] = {}
        self._in_a_row: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def put(self, config: TargetConfig, before: TargetStatus | None, why: str, now: float) -> float:
        """Set one aside that showed ``before``; seconds until it is due. ``why`` is shown to everyone."""
        name = config.name
        proven = name in self._begun and now - self._begun[name] >= PROVEN
        times = self._in_a_row[name] = 1 if proven else self._in_a_row.get(name, 0) + 1
        self._failures[name] = self._failures.get(name, 0) + 1
        pause = PAUSES[min(times, len(PAUSES)) - 1]
        problem = f"the exporter failed at it ({why}) and starts over in {pause:g} s; its own log says more"
        status = TargetStatus(
            name,
            dict(config.labels),
            sources=[SourceStats(one, problem=problem) for one in config.log],
            # they are facts of the past, and remain true
            incidents=[] if before is None else list(before.incidents),
            followed=False,
            exporter_failures=self._failures[name],
        )
        self.targets[name] = SetAside(config, status, now + pause)
        return pause

    def begun(self, status: TargetStatus, now: float) -> None:
        """One was begun, for the first time or anew."""
        self.targets.pop(status.name, None)
        self._begun[status.name] = now
        status.exporter_failures = self._failures.get(status.name, 0)

    def due(self, now: float) -> list[TargetConfig]:
        """Those to begin anew."""
        return [one.config for one in self.targets.values() if one.due <= now]

    def forget(self, name: str) -> None:
        """Whatever comes under this name is another one."""
        for known in (self.targets, self._begun, self._in_a_row, self._failures):
            known.pop(name, None)
