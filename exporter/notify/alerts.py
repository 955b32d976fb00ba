"""Alerts made from documents: what whoever is woken gets to read, and under which labels.

A rule sees numbers; here is the whole verdict, so annotations carry the evidence. Labels decide
who is woken and what is the same alert: they hold closed sets, checked names and an identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..diagnosis.knowledge import builtin_classes
from ..plain import items, mapping, mappings
from ..report.text import numbers
from ..status import OpenAlert
from ..vllm.startup import safe_model

OUT_OF_MEMORY = "VLLMOutOfMemory"
BUDGET_RISK = "VLLMBudgetRisk"
FIX_CONFIRMED = "VLLMFixConfirmed"
FIX_REFUTED = "VLLMFixRefuted"
TEST = "VLLMOutOfMemoryTest"

PAGE, TICKET, INFO = "page", "ticket", "info"
RISKS = ("tight", "unexercised", "exceeded")
SOURCE = "vllm-oom-exporter"

MAX_SUMMARY = 200
MAX_LINE = 600
MAX_DESCRIPTION = 4000
_VERDICTS = ("supports", "contradicts", "mixed")
_FOR, _AGAINST, _REMEDIES, _DEAD_ENDS = 4, 2, 2, 8

Document = Mapping[str, object]

_RISK_SAYS = {
    "tight": "the memory that is left is less than an unprofiled step may need",
    "unexercised": "the prefill budget is larger than any step that has run",
    "exceeded": "a step at this prefill budget has already failed, or nearly",
}


@dataclass(frozen=True, slots=True)
class Links:
    """Where people read on. ``pages``: this exporter's; ``runbooks``: one page for each alert of the rules."""

    pages: str | None = None
    runbooks: str | None = None

    def added(self, alert: OpenAlert) -> OpenAlert:
        """The alert with what it links to."""
        if self.pages:
            incident = alert.labels.get("incident")
            alert.url = f"{self.pages}/incidents/{incident}" if incident else f"{self.pages}/"
        if self.runbooks:
            alert.annotations["runbook_url"] = f"{self.runbooks}/{runbook(alert.labels)}.md"
        return alert


def runbook(labels: Mapping[str, str]) -> str:
    """The alert of the rules that tells the same: what is to be done does not depend on who tells it."""
    match labels:
        case {"alertname": "VLLMBudgetRisk", "state": "tight"}:
            return "VLLMHeadroomTight"
        case {"alertname": "VLLMBudgetRisk", "state": "unexercised"}:
            return "VLLMBudgetUnexercised"
        case {"alertname": "VLLMBudgetRisk"} | {"phase": "serving", "class": "prefill_budget"}:
            return "VLLMPrefillBudgetOOM"
        case {"phase": "startup"}:
            return "VLLMStartupOOM"
        case {"class": "unknown"}:
            return "VLLMOOMUnclassified"
        case {"phase": "serving", "severity": "page"}:
            return "VLLMFatalOOM"
        case {"phase": "serving"}:
            return "VLLMOOMSurvived"
        case _:
            return labels["alertname"]


def incident_alert(
    document: Document, labels: Mapping[str, str], starts: float, trigger: Document | None = None
) -> OpenAlert:
    """The alert of one incident. ``labels``: of its target; ``starts``: seconds since the epoch.

    ``trigger``: what the failures of the target follow, as far as that is known.
    """
    page = document.get("phase") == "serving" and document.get("fatal") is True
    return OpenAlert(
        {
            **labels,
            "alertname": OUT_OF_MEMORY,
            "severity": PAGE if page else TICKET,
            "class": _text(document.get("class")),
            "phase": _text(document.get("phase")),
            "incident": _text(document.get("id")),
            "source": SOURCE,
        },
        {"summary": _summary(document, labels), "description": _description(document, trigger)},
        starts,
    )


def risk_alert(risk: Document | None, labels: Mapping[str, str], starts: float) -> OpenAlert | None:
    """The alert of a prefill budget that may not fit, or None where nothing speaks against it."""
    state = _text(risk.get("state")) if risk else ""
    if risk is None or state not in RISKS:
        return None
    return OpenAlert(
        {**labels, "alertname": BUDGET_RISK, "severity": TICKET, "state": state, "source": SOURCE},
        {
            "summary": _cut(f"vLLM{_where(labels)}: {_RISK_SAYS[state]}", MAX_SUMMARY),
            "description": _lines(_texts(risk.get("reasons"))),
        },
        starts,
    )


def fix_alert(fix: Document | None, labels: Mapping[str, str], starts: float) -> OpenAlert | None:
    """The alert of a lower budget that was put to the test, or None while nothing is decided."""
    state = fix.get("state") if fix else None
    if fix is None or state not in ("confirmed", "refuted"):
        return None
    good = state == "confirmed"
    says = "the lower prefill budget holds" if good else "the failure came back at the lower prefill budget"
    return OpenAlert(
        {
            **labels,
            "alertname": FIX_CONFIRMED if good else FIX_REFUTED,
            "severity": INFO if good else TICKET,
            "source": SOURCE,
        },
        {
            "summary": _cut(f"vLLM{_where(labels)}: {says}", MAX_SUMMARY),
            "description": _lines([_text(fix.get("says")), _budgets(fix)]),
        },
        starts,
    )


def test_alert(identity: str, labels: Mapping[str, str], now: float) -> OpenAlert:
    """An alert that takes the way of a page and says that it is none."""
    return OpenAlert(
        {
            **labels, "alertname": TEST, "severity": PAGE, "test": "true",
            "incident": f"test-{identity}", "source": SOURCE,
        },
        {
            "summary": "TEST: vllm-oom-exporter can reach you. Nothing is broken.",
            "description": "Sent by hand with 'vllm-oom-exporter test-page'. It ends by itself after five minutes.",
        },
        now,
    )  # fmt: skip


def target_labels(labels: Mapping[str, str], model: object) -> dict[str, str]:
    """Labels of a target with the model it serves, where that name is fit to be one."""
    name = safe_model(model)
    return {**labels, **({"model_name": name} if name else {})}


# --- the text -----------------------------------------------------------------------------


def _summary(document: Document, labels: Mapping[str, str]) -> str:
    ended = document.get("fatal") is True
    if document.get("phase") == "startup":
        what = "did not start for lack of memory" if ended else "ran out of memory while starting and went on"
    else:
        what = "ran out of memory and died" if ended else "ran out of memory and lives on"
    return _cut(f"vLLM{_where(labels)} {what}: {_text(document.get('class'))}", MAX_SUMMARY)


def _where(labels: Mapping[str, str]) -> str:
    """`` tiny (models/llama-0)``: as much of it as is known."""
    at = "/".join(labels[one] for one in ("namespace", "pod", "target", "instance") if one in labels)
    model = f" {labels['model_name']}" if "model_name" in labels else ""
    return _text(f"{model} ({at})" if at else model, strip=False)


def _description(document: Document, trigger: Document | None) -> str:
    class_id = _text(document.get("class"))
    known = builtin_classes().get(class_id)
    name = f"{known.name}. " if known else ""
    return _lines(
        [
            f"{name}Confidence that it is {class_id}: {_text(document.get('confidence'))}.",
            *numbers(mapping(document.get("facts"))),
            *_evidence(class_id, mappings(document.get("evidence"))),
            *([_text(trigger.get("says"))] if trigger and trigger.get("verdict") in _VERDICTS else []),
            *_advice(mapping(document.get("advice"))),
        ]
    )


def _evidence(class_id: str, evidence: list[Document]) -> Iterator[str]:
    """The strongest reasons for the class, and those against it or for another one."""
    weighed = sorted(((_weight(one), one) for one in evidence), key=lambda pair: -abs(pair[0]))
    favour = [one for weight, one in weighed if one.get("favours") == class_id and weight > 0]
    against = [
        one for weight, one in weighed if (one.get("favours") == class_id) == (weight < 0) and weight != 0
    ]
    yield from (f"For: {_text(one.get('says'))}" for one in favour[:_FOR])
    yield from (f"Against: {_text(one.get('says'))}" for one in against[:_AGAINST])


def _weight(evidence: Document) -> float:
    weight = evidence.get("weight")
    return float(weight) if isinstance(weight, int | float) else 0.0


def _advice(advice: Document) -> Iterator[str]:
    for remedy in mappings(advice.get("do"))[:_REMEDIES]:
        flags, cost = _text(remedy.get("flags")), _text(remedy.get("cost"))
        yield f"Do: {flags}{': ' if flags else ''}{_text(remedy.get('text'))}{f' Cost: {cost}.' if cost else ''}"
    ends = [_text(one.get("text")) for one in mappings(advice.get("dead_ends"))]
    if ends:
        yield f"Do not bother: {'; '.join(ends[:_DEAD_ENDS])}"
    if confirm := _text(advice.get("confirm")):
        yield f"Confirm: {confirm}"


def _budgets(fix: Document) -> str:
    old, new = fix.get("old_budget"), fix.get("new_budget")
    if not isinstance(old, int) or not isinstance(new, int):
        return ""
    seen = [fix.get(one) for one in ("exposures", "exposures_needed")]
    after = f", after {seen[0]} of {seen[1]} exposures" if all(isinstance(one, int) for one in seen) else ""
    return f"max_num_batched_tokens went from {old} to {new}{after}"


def _lines(lines: Iterable[str]) -> str:
    """Lines of an annotation, each capped, and whole ones only."""
    kept: list[str] = []
    room = MAX_DESCRIPTION
    for line in lines:
        text = _cut(_text(line), MAX_LINE)
        room -= len(text) + 1
        if text and room >= 0:
            kept.append(text)
    return "\n".join(kept)


def _text(value: object, *, strip: bool = True) -> str:
    """On one line, printable, and without the ``<`` that chat programs take for a mention or a link."""
    text = "" if value is None else str(value)[: 4 * MAX_LINE].replace("<", "‹")
    text = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(text.split()) if strip else text


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _texts(value: object) -> list[str]:
    return [str(one) for one in items(value)]
