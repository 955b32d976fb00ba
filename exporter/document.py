"""The JSON document of one target: ``analyze --format json``, and later the API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from .diagnosis import confirm, risk, trigger
from .diagnosis.engine import memory_of
from .diagnosis.history import History
from .records import Evidence, Incident, Life, line_number

SCHEMA_VERSION = 1


def time_text(time: datetime | None) -> str | None:
    """``2026-11-30T16:26:46Z`` in UTC where the zone is known; local and without ``Z`` where not."""
    if time is None:
        return None
    if time.tzinfo is None:
        return time.isoformat(timespec="seconds")
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def outlook(history: History, free_bytes: int | None = None) -> dict[str, dict[str, object]]:
    """Why it happens, whether it is fixed, and what may come: empty for a log without a server.

    ``free_bytes``: free memory of the device now, where something could be asked for it.
    """
    ledger, lives = history.ledger, history.lives
    if not lives.all:
        return {}
    history.sync()
    return {
        "trigger": trigger.document(ledger.trigger()),
        "confirmation": confirm.document(confirm.confirm(ledger.lives)),
        "risk": risk.document(risk.risk(ledger.lives, lives.current, lives.current.near_misses, free_bytes)),
    }


def document(history: History, lines: int, size: int) -> dict[str, object]:
    """Everything known of one server, as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "lines": lines,
        "bytes": size,
        "engines": [life_document(life) for life in history.lives.all],
        "near_misses": history.near_misses,
        **outlook(history),
        "incidents": [incident_document(one) for one in history.incidents()],
    }


def life_document(life: Life) -> dict[str, object]:
    """One life of the server."""
    return _known(
        {
            "started": time_text(life.started),
            "vllm_version": life.vllm_version,
            "model": life.model,
            "settings": dict(sorted(life.settings.items())),
            "memory": memory_of(life),
            "state": life.state,
            "fingerprint": dict(life.fingerprint),
        }
    )


def _line(evidence: Evidence) -> int | None:
    return None if evidence.line is None else line_number(evidence.line)


def incident_document(incident: Incident) -> dict[str, object]:
    """One incident with its evidence and advice."""
    advice = incident.advice
    return _known(
        {
            "id": incident.id,
            "time": time_text(incident.time),
            "engine": incident.engine,
            "class": incident.class_id,
            "phase": str(incident.phase),
            "fatal": incident.fatal,
            "confidence": str(incident.confidence),
            "facts": dict(incident.facts),
            "evidence": [
                _known(
                    {"id": e.id, "favours": e.favours, "weight": e.weight, "says": e.says, "line": _line(e)}
                )
                for e in incident.evidence
            ],
            "ranking": [{"class": one, "score": score} for one, score in incident.ranking],
            "advice": {
                "do": [_known({"text": r.text, "flags": r.flags, "cost": r.cost}) for r in advice.do],
                "dead_ends": [{"text": d.text, "why": d.why} for d in advice.dead_ends],
                "confirm": advice.confirm,
                **_known({"because": advice.because}),
                **advice.numbers,
            },
            "excerpt": list(incident.excerpt),
        }
    )


def _known(values: Mapping[str, object]) -> dict[str, object]:
    """Facts that are not known are left out, never zero."""
    return {name: value for name, value in values.items() if value is not None}
