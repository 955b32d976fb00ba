"""The alerts of one target: which of them fire, since when, and when they are over.

An alert of an incident tells of an event. It goes out once and then stays quiet: it fires for at
least half an hour, and ends when the engine has served again for five minutes, or after an hour.
Half an hour, because it inhibits the alert of a rule for the same incident, which fires for twenty
minutes: when that came out at last, it would be a second page. As an alert never ends before it is
too old to be pushed anew, a restart can't page twice either. What fires is part of the status, and
saved with the incident in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from ..status import OpenAlert, TargetStatus
from .alerts import Document, Links, fix_alert, incident_alert, risk_alert, target_labels
from .receiver import Outlet

FRESH = 600.0
"""Seconds within which an incident is pushed. An older one is history: nobody is woken for it."""

SHORTEST = 1800.0  # longer than keep_firing_for and the window of the rules together
LONGEST = 3600.0
SERVING = 300.0
"""Seconds that the engine serves again before its last failure is over."""

ENTER = 30.0  # a state of the budget holds so long before it is told
LEAVE = 300.0  # and is gone so long before its alert ends; a restart takes less
MAX_OPEN = 50  # incidents of one target

_INCIDENT = "incident:"
_RISK, _FIX = "risk", "fix"
_EVERY = 1.0  # seconds between two looks at what changes slowly


class OpenAlerts:
    """Alerts of one target; call ``tick`` often. ``labels`` say whose they are on every alert."""

    def __init__(
        self,
        status: TargetStatus,
        labels: Mapping[str, str],
        wall: Callable[[], float],
        outlets: Mapping[str, Outlet],
        links: Links,
    ) -> None:
        self._status = status
        self._labels = labels
        self._wall = wall
        self._outlets = outlets
        self._links = links
        self.resumed = False
        """Whether the log was read before, so that lines not read yet were written since."""
        self._serving_since: float | None = None
        self._look_at = 0.0
        self._differs: dict[str, tuple[object, float]] = {}
        self._sent: list[float] = []

    # --- what happens ---------------------------------------------------------------------------

    def incident(self, document: Document, read_live: float | None) -> None:
        """An incident is new, or is known better. ``read_live``: when, if its lines came as they were written."""
        if not self._outlets:
            return
        alerts, key = self._status.alerts, f"{_INCIDENT}{document.get('id')}"
        have = alerts.get(key)
        starts = have.starts if have else self._fresh(document, read_live)
        if starts is None:
            return
        # who it is about was said with the first alert: a name learnt later would make it another alert
        labels = have.labels if have else target_labels(self._labels, self._model(document))
        alert = self._links.added(incident_alert(document, labels, starts, self._status.trigger))
        if have and have.labels == alert.labels:
            have.annotations = alert.annotations
            self._put(have)
            return
        if have:
            self._end(key, replaced=True)
        firing = [one for one in alerts if one.startswith(_INCIDENT)]
        for oldest in firing[: max(len(firing) - MAX_OPEN + 1, 0)]:
            self._end(oldest)
        alerts[key] = alert
        self._put(alert)

    def _fresh(self, document: Document, read_live: float | None) -> float | None:
        """When the incident began, seconds since the epoch; None where that is too long ago, or may be."""
        now = self._wall()
        text = document.get("time")
        zoned = isinstance(text, str) and text.endswith("Z")
        began = _seconds(text)
        if read_live is not None and not zoned:
            began = read_live
        elif not zoned and not self.resumed:
            return None  # without a zone it may be any age; what is new in a log read before is new
        if began is None or began > now + FRESH:
            return None
        return min(began, now) if now - began < FRESH else None

    def _model(self, document: Document) -> object:
        lives = (one for one in self._status.engines if one.get("index") == document.get("engine"))
        return next(lives, {}).get("model")

    # --- what lasts -----------------------------------------------------------------------------

    def tick(self) -> bool:
        """Look at the status. True: something changed that is to be saved."""
        now = self._wall()
        serving = self._status.engine_state == "serving"
        self._serving_since = (self._serving_since or now) if serving else None
        if now < self._look_at <= now + _EVERY:
            return False
        self._look_at = now + _EVERY
        alerts = self._status.alerts
        before = list(alerts)
        for key in before:
            if key.startswith(_INCIDENT) and self._over(alerts[key], now):
                self._end(key)
        if self._outlets:
            life = self._status.life
            labels = target_labels(self._labels, life.model if life else None)
            self._condition(_RISK, risk_alert(self._status.risk, labels, now), now)
            self._condition(_FIX, fix_alert(self._status.confirmation, labels, now), now)
        sent = [when for alert in alerts.values() for when in alert.sent.values()]
        changed = sent != self._sent or list(alerts) != before
        self._sent = sent
        return changed

    def _over(self, alert: OpenAlert, now: float) -> bool:
        age = now - alert.starts
        served = self._serving_since is not None and now - self._serving_since >= SERVING
        return age >= LONGEST or (age >= SHORTEST and served)

    def _condition(self, key: str, want: OpenAlert | None, now: float) -> None:
        """Follow a state; not at once, because it may come and go."""
        alerts = self._status.alerts
        have = alerts.get(key)
        if have is not None and want is not None and have.labels == want.labels:
            self._differs.pop(key, None)
            have.annotations = self._links.added(want).annotations  # told with the next resend
            if key == _FIX and not have.ended and now - have.starts >= LONGEST:
                have.ended = True  # kept, so that it is not told again as long as the state lasts
                self._tell_end(have)
            return
        if have is None and want is None:
            self._differs.pop(key, None)
            return
        state = want.labels if want else None
        since = self._differs.get(key)
        if since is None or since[0] != state:
            self._differs[key] = since = (state, now)
        if now - since[1] < (ENTER if want else LEAVE):
            return
        del self._differs[key]
        if have is not None:
            self._end(key, replaced=want is not None)
        if want is not None:
            alerts[key] = self._links.added(want)
            self._put(want)

    # --- after a start, and before an end ---------------------------------------------------------

    def adopt(self) -> None:
        """Go on with what fired in a former process, or tell a receiver that is new."""
        now = self._wall()
        for key, alert in self._status.alerts.items():
            for outlet in self._outlets.values():
                late = key.startswith(_INCIDENT) and now - alert.starts >= FRESH
                if not alert.ended and not (late and outlet.name not in alert.sent):
                    outlet.put(alert)

    def release(self) -> None:
        """The target is no longer watched."""
        for alert in self._status.alerts.values():
            for outlet in self._outlets.values():
                outlet.forget(alert)

    # --- telling it -----------------------------------------------------------------------------

    def _put(self, alert: OpenAlert) -> None:
        for outlet in self._outlets.values():
            outlet.put(alert)

    def _end(self, key: str, *, replaced: bool = False) -> None:
        alert = self._status.alerts.pop(key)
        if not alert.ended:
            self._tell_end(alert, replaced=replaced)

    def _tell_end(self, alert: OpenAlert, *, replaced: bool = False) -> None:
        for outlet in self._outlets.values():
            outlet.end(alert, replaced=replaced)


def _seconds(text: object) -> float | None:
    """Seconds since the epoch; local where no zone is given."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None  # of the year 1
