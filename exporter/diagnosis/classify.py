"""A case -> a class, with the evidence for and against, a ranking and a band.

Evidence adds up as log likelihood ratios inside groups of dependent items; a group is capped,
so that one fact told in three ways does not count three times. The weights are judgements of
the knowledge base, not calibrated probabilities.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Mapping

from ..records import Confidence, Evidence, Facts, Verdict
from ..vllm.memory_error import human
from .incident import Case
from .knowledge import EvidenceRule, FailureClass, fields_of, holds

GROUP_CAP = 3.9  # ln 50
MESSAGE_CAP = 7.0
ENOUGH = 1.5
LEAD = 0.7
_EXACT = 6.0


def classify(case: Case, features: Facts, facts: Facts, classes: Mapping[str, FailureClass]) -> Verdict:
    """The verdict on ``case``. ``unknown`` where the evidence does not carry a class."""
    phase = features.get("phase")
    scores: dict[str, float] = {}
    groups_of: dict[str, set[str]] = {}
    evidence: list[Evidence] = []
    for one in classes.values():
        if one.id == "unknown" or (phase is not None and phase not in one.phases):
            continue
        met = [rule for rule in one.evidence if holds(rule.when, features)]
        if not met:
            continue
        by_group: dict[str, float] = defaultdict(float)
        for rule in met:
            by_group[rule.group] += rule.weight
        capped = {g: _cap(g, weight) for g, weight in by_group.items()}
        scores[one.id] = sum(capped.values())
        groups_of[one.id] = {g for g, weight in capped.items() if weight > 0}
        evidence += [
            Evidence(
                rule.id, one.id, rule.weight, fill(rule.says, {**features, **facts}), _line_of(rule, case)
            )
            for rule in met
        ]
    # a message that names its cause decides; where the failing call stood is then beside the point
    exact = {e.favours for e in evidence if e.weight >= _EXACT}
    ranking = sorted(scores.items(), key=lambda item: (item[0] not in exact, -item[1]))
    best, confidence = _decide(ranking, groups_of, exact)
    positive = [(one, round(score, 2)) for one, score in ranking if score > 0]
    shown = {one for one, _ in positive[:3]} | {best}
    kept = sorted(
        (item for item in evidence if item.favours in shown),
        key=lambda item: (item.favours != best, -abs(item.weight)),
    )
    return Verdict(best, confidence, tuple(kept), tuple(positive))


def _decide(
    ranking: list[tuple[str, float]], groups_of: Mapping[str, set[str]], exact: set[str]
) -> tuple[str, Confidence]:
    if exact:
        ranking = [item for item in ranking if item[0] in exact]
    if not ranking or ranking[0][1] < ENOUGH:
        return "unknown", Confidence.INSUFFICIENT
    best, score = ranking[0]
    if len(ranking) > 1 and score - ranking[1][1] < LEAD:
        return "unknown", Confidence.INSUFFICIENT
    if score >= _EXACT:
        return best, Confidence.CONFIRMED
    if score >= 3.5 or (score >= 3.0 and len(groups_of[best]) >= 2):
        return best, Confidence.PROBABLE
    return best, Confidence.POSSIBLE


def _cap(group: str, weight: float) -> float:
    limit = MESSAGE_CAP if group == "message" else GROUP_CAP
    return max(-limit, min(limit, weight))


def _line_of(rule: EvidenceRule, case: Case) -> int | None:
    """The line of the log that shows it."""
    if rule.group in ("step",) and "output" in case.dump:
        return case.dump["output"].record.numbers[0]
    if rule.group in ("message", "allocator", "size", "traceback", "outside"):
        return case.worst().line
    return None


_PERCENT = frozenset({"kv_cache_usage", "step_fill", "prefill_share"})


class _Formatter(string.Formatter):
    """Sizes as ``3.83 GiB``, ratios with two digits, what is not known as ``?``."""

    def get_value(self, key: int | str, args: object, kwargs: Mapping[str, object]) -> str:  # noqa: ARG002 - by name only
        value = kwargs.get(str(key))
        if value is None:
            return "?"
        if isinstance(value, frozenset):
            return ", ".join(sorted(str(one) for one in value))
        if str(key).endswith("_bytes"):
            return human(value)
        if str(key) in _PERCENT and isinstance(value, int | float):
            return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
        if isinstance(value, float):
            return f"{value:.2f}".rstrip("0").rstrip(".")
        return str(value)


def fill(template: str, values: Mapping[str, object]) -> str:
    """``template`` with its names replaced for a person to read."""
    return _Formatter().vformat(template, (), values)


def complete(template: str, values: Mapping[str, object]) -> bool:
    """Whether every name in ``template`` is known."""
    return all(values.get(name) is not None for name in fields_of(template))
