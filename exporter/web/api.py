"""The JSON of ``/api/v1``: plain data made from a ``Status``, without knowing of HTTP.

Documents come from ``document.py`` as ``analyze --format json`` prints them. Here they only gain
the name of their target, lose what must not be shown, and are made safe to write as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping

from ..diagnosis.knowledge import FailureClass
from ..document import SCHEMA_VERSION
from ..status import Status, TargetStatus

Document = dict[str, object]
Stored = Callable[[str, str], Document | None]
"""Finds the document of an incident, by target and id, that is no longer among those of a status."""


def incidents(status: Status, hide_excerpts: bool) -> Iterator[Document]:
    """Every incident of every target, each with its ``target``; newest first within a target."""
    for target in status.targets:
        for one in target.incidents:
            yield _shown(one, target, hide_excerpts)


def incident(status: Status, incident_id: str, stored: Stored, hide_excerpts: bool) -> Document | None:
    """The incident of that id, or None."""
    for target in status.targets:
        newest = (one for one in target.incidents if one.get("id") == incident_id)
        if (one := next(newest, None)) is not None:
            return _shown(one, target, hide_excerpts)
    for target in status.targets:
        if (one := stored(target.name, incident_id)) is not None:
            return _shown(one, target, hide_excerpts)
    return None


def _shown(one: Document, target: TargetStatus, hide_excerpts: bool) -> Document:
    shown = {**one, "target": target.name}
    if hide_excerpts:
        shown.pop("excerpt", None)
    return shown


def target_document(target: TargetStatus) -> Document:
    """What is known of one server, save its incidents."""
    up = {} if target.scrape_up is None else {"up": target.scrape_up}
    return {
        "schema_version": SCHEMA_VERSION,
        "target": target.name,
        "labels": target.labels,
        "lines": target.counts.lines.total(),
        "bytes": target.counts.read_bytes.total(),
        "engine_state": target.engine_state,
        **up,
        "engines": target.engines,
        "near_misses": target.counts.near_misses,
        **{
            name: found
            for name, found in (
                ("trigger", target.trigger),
                ("confirmation", target.confirmation),
                ("risk", target.risk),
                ("steps", target.steps),
                ("probe", target.probe),
            )
            if found is not None
        },
        "sources": [
            {
                "source": one.name,
                "opened": one.opened,
                "lag_bytes": one.lag_bytes,
                **({} if one.problem is None else {"problem": one.problem}),
            }
            for one in target.sources
        ],
    }


def class_document(known: FailureClass) -> Document:
    """What the knowledge base says of one class; texts may name facts in braces, as in its file."""
    return {
        "id": known.id,
        "name": known.name,
        "phases": known.phases,
        "status": known.status,
        "vllm": {"first": known.first_vllm, "last": known.last_vllm},
        "summary": known.summary,
        "mechanism": known.mechanism,
        "scales_with": known.scales_with,
        "evidence": [
            {"id": one.id, "weight": one.weight, "when": one.when, "says": one.says} for one in known.evidence
        ],
        "remedies": [
            {"text": one.do, "effect": one.effect, "flags": one.flags, "cost": one.cost}
            for one in known.remedies
        ],
        "dead_ends": [{"text": one.do, "why": one.why} for one in known.dead_ends],
        "confirm": known.confirm,
        "confused_with": [{"class": one, "how_to_tell": how} for one, how in known.confused_with],
        "sources": known.sources,
    }


def to_json(data: object) -> bytes:
    """``data`` as JSON. Numbers that JSON lacks are left out of objects, and null in arrays."""
    return json.dumps(_plain(data), allow_nan=False).encode("ascii") + b"\n"


def _plain(data: object) -> object:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {
            str(key): _plain(value)
            for key, value in data.items()
            if not isinstance(value, float) or math.isfinite(value)
        }
    if isinstance(data, list | tuple | set | frozenset):
        return [_plain(one) for one in data]
    return data if data is None or isinstance(data, bool | int | str) else str(data)
