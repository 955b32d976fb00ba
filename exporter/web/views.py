"""What the pages say, in plain words and without markup: one object a page, made from documents.

Templates only put these in place. All of it is text that ``visible`` has made fit to be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

from ..diagnosis.engine import budget, changed
from ..diagnosis.knowledge import FailureClass
from ..plain import mapping
from ..records import Life
from ..status import TargetStatus
from .timeline import Timeline, timeline
from .visible import (
    Document,
    Time,
    count,
    items,
    mappings,
    name,
    number,
    percent,
    plain,
    size,
    text,
    time,
    utc,
)

Classes = Mapping[str, FailureClass]

_CONFIDENCE = {
    "confirmed": "the evidence is decisive",
    "probable": "the evidence clearly favours it; confirm it before you rely on it",
    "possible": "it leads, but other causes remain",
    "insufficient": "the lines at hand do not decide it",
}
_STATES = {
    "starting": ("plain", "loading, does not answer yet"),
    "serving": ("good", "answers requests"),
    "hung": ("bad", "lives and answers /health, but produces nothing since it ran out of memory"),
    "dead": ("bad", "ended by a failure"),
    "stopped": ("plain", "was told to stop"),
    "unknown": ("plain", "neither its log nor /metrics tells"),
}
_TONES = {
    **{"exceeded": "bad", "tight": "warn", "unexercised": "warn", "comfortable": "good"},
    **{"confirmed": "good", "refuted": "bad", "confounded": "warn"},
    **{"survived": "good", "failed": "bad", "unfinished": "bad", "skipped": "warn"},
}
_CONFIRMATIONS = {
    "none": "no smaller budget is being tried",
    "accruing": "a smaller budget is being tried",
    "confirmed": "the smaller budget cured it",
    "refuted": "it failed at the smaller budget too",
    "confounded": "something else changed as well",
}
_TRIGGERS = {
    "insufficient": "not enough evidence yet",
    "descriptive": "too few failures for a test, only a description",
    "supports": "failures follow prompt length, not request rate",
    "contradicts": "failures do not follow prompt length",
    "mixed": "the evidence points both ways",
}
_PROBES = {
    "running": "steps are being filled on purpose",
    "survived": "steps were filled on purpose, and it lived",
    "failed": "it failed when steps were filled on purpose",
    "unfinished": "time ran out before its steps were filled",
    "skipped": "its steps could not be filled on purpose",
}
_RISKS = {
    "unknown": "not known yet",
    "comfortable": "this budget has room",
    "tight": "less room than an unprofiled step may need",
    "unexercised": "no step of that size has run yet",
    "exceeded": "a step at this budget has failed, or nearly",
}


# --- incidents ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with what it is called."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Group:
    """Numbers about one thing."""

    title: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """One incident in a line: what happened, how sure that is, the numbers that matter."""

    id: str
    path: str  # the last part of its addresses
    target: str
    time: Time | None
    class_id: str
    verdict: str
    phase: str
    ended: str
    fatal: bool
    confidence: str
    confidence_says: str
    numbers: tuple[str, ...]
    memory: str
    step: str
    flags: str | None


@dataclass(frozen=True, slots=True)
class Reason:
    """One piece of evidence; ``other`` names the class it speaks for, where that is another one."""

    says: str
    weight: str
    line: str | None
    other: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do."""

    text: str
    flags: str | None
    cost: str | None


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """Something not worth doing, and why."""

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """A state of the contract in words. ``done`` of ``needed`` prompts, where it is under way."""

    state: str
    tone: str
    means: str
    says: tuple[str, ...]
    done: int | None = None
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class LifeView:
    """One life of the server. ``changes``: against the life before, as name, old and new."""

    index: str
    started: Time | None
    version: str
    model: str
    budget: str
    state: str
    tone: str
    changes: tuple[tuple[str, str, str], ...]
    first: bool  # the life before is not known
    settings: tuple[Figure, ...]
    memory: tuple[Figure, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class IncidentView:
    """The page of one incident. ``excerpt`` is None where it is not to be shown."""

    summary: Summary
    figures: tuple[Group, ...]
    timeline: Timeline | None
    evidence_for: tuple[Reason, ...]
    evidence_against: tuple[Reason, ...]
    ranking: tuple[Figure, ...]
    do: tuple[Step, ...]
    because: str | None
    dead_ends: tuple[DeadEnd, ...]
    confirm: str
    confirmation: Judgement | None
    trigger: Judgement | None
    life: LifeView | None
    mechanism: str
    excerpt: tuple[str, ...] | None


def summary(document: Document, target: TargetStatus, classes: Classes) -> Summary:
    """One incident in a line."""
    facts, advice = mapping(document.get("facts")), mapping(document.get("advice"))
    class_id, confidence = name(document.get("class")) or "?", name(document.get("confidence")) or "?"
    known = classes.get(class_id)
    flags = (text(one["flags"]) for one in mappings(advice.get("do")) if one.get("flags"))
    memory, step = _memory(facts), _step(facts, document.get("phase") == "serving")
    usage = percent(facts.get("kv_cache_usage"))
    return Summary(
        id=name(document.get("id")),
        path=quote(str(document.get("id")), safe="", errors="replace"),
        target=title(target),
        time=time(document.get("time")),
        class_id=class_id,
        verdict=text(known.name) if known else class_id,
        phase=name(document.get("phase")),
        ended=_ended(document),
        fatal=document.get("fatal") is True,
        confidence=confidence,
        confidence_says=_CONFIDENCE.get(confidence, "not judged"),
        numbers=tuple(one for one in (memory, step, usage and f"KV cache {usage} full") if one),
        memory=memory,
        step=step,
        flags=next(flags, None),
    )


def _ended(document: Document) -> str:
    if document.get("fatal") is not True:
        return "the engine survived"
    return "the server did not start" if document.get("phase") == "startup" else "the engine died"


def _memory(facts: Document) -> str:
    tried, free = size(facts.get("tried_bytes")), size(facts.get("free_bytes"))
    if tried:
        return f"asked for {tried}" + (f", {free} was free" if free else "")
    needed, there = size(facts.get("required_bytes")), size(facts.get("available_bytes"))
    if needed and there:
        return f"{needed} of KV cache is needed, {there} is there"
    total = size(facts.get("total_bytes"))
    return f"{free}{f' of {total}' if total else ''} was free" if free else ""


def _step(facts: Document, serving: bool) -> str:
    tokens = count(facts.get("step_tokens"))
    limit = count(facts.get("step_limit_tokens", facts.get("budget_tokens")))
    if tokens:
        return f"step of {tokens}" + (f" of at most {limit} tokens" if limit else " tokens")
    return f"at most {limit} tokens a step" if limit and serving else ""


def incident(document: Document, target: TargetStatus, classes: Classes, hide_excerpts: bool) -> IncidentView:
    """The page of one incident."""
    head = summary(document, target, classes)
    advice = mapping(document.get("advice"))
    reasons = mappings(document.get("evidence"))
    known = classes.get(head.class_id)
    lives = lives_of(target)
    own = next(
        (
            life
            for life, raw in zip(lives, target.engines, strict=True)
            if raw.get("index") == document.get("engine")
        ),
        None,
    )
    return IncidentView(
        summary=head,
        figures=tuple(_groups(mapping(document.get("facts")))),
        timeline=timeline(document.get("metrics_before")),
        evidence_for=tuple(_reason(one, head.class_id) for one in reasons if _speaks_for(one, head.class_id)),
        evidence_against=tuple(
            _reason(one, head.class_id) for one in reasons if not _speaks_for(one, head.class_id)
        ),
        ranking=tuple(
            Figure(name(one.get("class")), f"{score:.1f}")
            for one in mappings(document.get("ranking"))
            if (score := number(one.get("score"))) is not None
        ),
        do=tuple(
            Step(text(one.get("text")), text(one.get("flags")) or None, text(one.get("cost")) or None)
            for one in mappings(advice.get("do"))
        ),
        because=text(advice.get("because")) or None,
        dead_ends=tuple(
            DeadEnd(text(one.get("text")), text(one.get("why"))) for one in mappings(advice.get("dead_ends"))
        ),
        confirm=text(advice.get("confirm")),
        confirmation=confirmation(target),
        trigger=trigger(target),
        life=own,
        mechanism=text(known.summary) if known else "",
        excerpt=None if hide_excerpts else tuple(text(one) for one in items(document.get("excerpt"))),
    )


def _speaks_for(reason: Document, class_id: str) -> bool:
    return (reason.get("favours") == class_id) == ((number(reason.get("weight")) or 0.0) > 0)


def _reason(reason: Document, class_id: str) -> Reason:
    weight, favours = number(reason.get("weight")), name(reason.get("favours"))
    return Reason(
        text(reason.get("says")),
        "" if weight is None else f"{weight:+.1f}",
        count(reason.get("line")),
        None if favours == class_id else favours,
    )


_LABELS = {
    "Memory": {
        "tried_bytes": "Asked for",
        "free_bytes": "Free on the device",
        "missing_bytes": "Missing",
        "total_bytes": "All of the device",
        "process_bytes": "Used by the process",
        "allocated_bytes": "Allocated by PyTorch",
        "reserved_unallocated_bytes": "Reserved, unallocated",
        "private_pool_bytes": "In private pools (CUDA graphs)",
        "required_bytes": "KV cache needed",
        "available_bytes": "Room for the KV cache",
    },
    "The failing step": {
        "step_tokens": "Tokens",
        "step_limit_tokens": "Tokens it may hold",
        "budget_tokens": "max_num_batched_tokens",
        "prefill_tokens": "Of them prefill",
        "decode_tokens": "Of them decode",
        "max_prompt_tokens": "Longest prompt",
        "max_computed_tokens": "Deepest cached context",
        "frame": "Failed in",
    },
    "The server": {
        "running_requests": "Requests running",
        "waiting_requests": "Requests waiting",
        "kv_cache_usage": "KV cache used",
        "gpu_index": "GPU",
        "ranks": "Ranks that failed",
        "vllm_version": "vLLM",
    },
}


def _groups(facts: Document) -> Iterator[Group]:
    """Every fact, put with those it is read with; facts without a label come last."""
    tried, free = number(facts.get("tried_bytes")), number(facts.get("free_bytes"))
    if tried is not None and free is not None and tried > free:
        facts = {**facts, "missing_bytes": tried - free}
    labelled = {key for labels in _LABELS.values() for key in labels}
    rest = {key: name(key) for key in facts if key not in labelled}
    for heading, labels in {**_LABELS, "Other": rest}.items():
        shown = ((label, _fact(key, facts[key])) for key, label in labels.items() if key in facts)
        figures = tuple(Figure(label, value) for label, value in shown if value)
        if figures:
            yield Group(heading, figures)


def _fact(key: str, value: object) -> str | None:
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_tokens"):
        return count(value)
    if key == "kv_cache_usage":
        return percent(value)
    if isinstance(value, list | tuple):
        return ", ".join(plain(one) for one in items(value))
    return plain(value)


# --- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceView:
    """One log as configured. ``problem`` where it cannot be read."""

    name: str
    says: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the incidents of a target, newest first. ``number`` counts from 1."""

    rows: tuple[Summary, ...]
    number: int
    pages: int
    total: int


@dataclass(frozen=True, slots=True)
class TargetView:
    """One server. ``newest`` is its last incident."""

    title: str
    query: str  # chooses it on the overview
    state: str
    tone: str
    means: str
    scrape: str
    sources: tuple[SourceView, ...]
    problems: tuple[SourceView, ...]
    lines: str
    life: LifeView | None
    budget: str
    previous_budget: str | None
    risk: Judgement | None
    probe: Judgement | None
    trigger: Judgement | None
    confirmation: Judgement | None
    near_misses: int
    newest: Summary | None
    incidents: Page
    lives: tuple[LifeView, ...]  # newest first


@dataclass(frozen=True, slots=True)
class Overview:
    """The first page. ``one``: a single target is configured, or was chosen."""

    targets: tuple[TargetView, ...]
    one: bool
    chosen: bool
    now: Time
    version: str


def title(target: TargetStatus) -> str:
    """``namespace/pod/container`` or the name of the target."""
    labels = [target.labels[key] for key in ("namespace", "pod", "container") if target.labels.get(key)]
    return text("/".join(labels) or target.name)


def overview(targets: Iterable[TargetView], chosen: bool, now: datetime, version: str) -> Overview:
    """The first page."""
    shown = tuple(targets)
    return Overview(shown, chosen or len(shown) == 1, chosen, utc(now), version)


def target_view(target: TargetStatus, incidents: Page, newest: Summary | None) -> TargetView:
    """One server as it is now."""
    tone, means = _STATES.get(target.engine_state, ("plain", ""))
    lives = lives_of(target)
    sources = tuple(_source(target, index) for index in range(len(target.sources)))
    return TargetView(
        title=title(target),
        query=quote(target.name, safe="", errors="replace"),
        state=name(target.engine_state),
        tone=tone,
        means=means,
        scrape={None: "is not scraped", True: "answers", False: "does not answer"}[target.scrape_up],
        sources=sources,
        problems=tuple(one for one in sources if one.problem),
        lines=count(target.counts.lines.total()) or "0",
        life=lives[-1] if lives else None,
        budget=lives[-1].budget if lives else "",
        previous_budget=lives[-2].budget if len(lives) > 1 and lives[-2].budget else None,
        risk=risk(target),
        probe=_judgement(target.probe, "state", _PROBES, "says"),
        trigger=trigger(target),
        confirmation=confirmation(target),
        near_misses=target.counts.near_misses,
        newest=newest,
        incidents=incidents,
        lives=tuple(reversed(lives)),
    )


def _source(target: TargetStatus, index: int) -> SourceView:
    stats = target.sources[index]
    says = "open" if stats.opened else "not there yet"
    if stats.lag_bytes:
        says += f", {size(stats.lag_bytes)} behind"
    shown = "standard input" if stats.name == "-" else text(stats.name)
    return SourceView(shown, says, text(stats.problem) if stats.problem else None)


def risk(target: TargetStatus) -> Judgement | None:
    """What may come of the budget in force."""
    return _judgement(target.risk, "state", _RISKS, "reasons")


def trigger(target: TargetStatus) -> Judgement | None:
    """Whether failures follow prompt length; None before there was one."""
    found = _judgement(target.trigger, "verdict", _TRIGGERS, "says")
    return found if found and number(mapping(target.trigger).get("events")) else None


def confirmation(target: TargetStatus) -> Judgement | None:
    """How far the experiment with a smaller budget is; None where there is nothing to cure."""
    found = _judgement(target.confirmation, "state", _CONFIRMATIONS, "says")
    return found if found and number(mapping(target.confirmation).get("failures")) else None


def _judgement(document: Document | None, key: str, words: Mapping[str, str], says: str) -> Judgement | None:
    if not document:
        return None
    state, said = name(document.get(key)), document.get(says)
    done, needed = number(document.get("exposures")), number(document.get("exposures_needed"))
    progress = done is not None and needed is not None and needed > 0
    return Judgement(
        state,
        _TONES.get(state, "plain"),
        words.get(state, ""),
        tuple(text(one) for one in (items(said) if isinstance(said, list | tuple) else [said]) if one),
        int(done) if progress and done is not None else None,
        int(needed) if progress and needed is not None else None,
    )


def lives_of(target: TargetStatus) -> list[LifeView]:
    """The lives of a server, oldest first."""
    found: list[LifeView] = []
    before: Life | None = None
    for document in target.engines:
        life = _life(document)
        found.append(_life_view(document, life, before))
        before = life
    return found


def _life(document: Document) -> Life:
    version = document.get("vllm_version")
    return Life(
        0, settings=dict(mapping(document.get("settings"))), vllm_version=name(version) if version else None
    )


def _life_view(document: Document, life: Life, before: Life | None) -> LifeView:
    index, state, tokens = number(document.get("index")), name(document.get("state")), budget(life.settings)
    marks = mapping(document.get("fingerprint"))
    trail = (
        ("info", "INFO of the chunked prefill budget"),
        ("warn", "early WARN on memory"),
        ("error", "ERROR out of memory"),
    )
    return LifeView(
        index="" if index is None else f"{index + 1:.0f}",
        started=time(document.get("started")),
        version=life.vllm_version or "",
        model=name(document.get("model")),
        budget=count(tokens) or "",
        state=state,
        tone=_STATES.get(state, ("plain", ""))[0],
        changes=tuple((name(key), plain(old), plain(new)) for key, old, new in changed(before, life))
        if before
        else (),
        first=before is None,
        settings=tuple(Figure(name(key), plain(value)) for key, value in sorted(life.settings.items())),
        memory=tuple(_parts(mapping(document.get("memory")))),
        fingerprint=", ".join(
            f"{what}: {'seen' if marks.get(key) is True else 'not seen'}" for key, what in trail
        ),
    )


_PARTS = {
    "weights_bytes": "Weights",
    "peak_activation_bytes": "Peak activation as profiled",
    "non_torch_bytes": "Outside PyTorch",
    "cuda_graph_bytes": "CUDA graphs",
    "kv_cache_bytes": "KV cache",
    "kv_cache_tokens": "KV cache, tokens",
    "total_bytes": "All of the device",
}


def _parts(memory: Document) -> Iterator[Figure]:
    for key, label in _PARTS.items():
        shown = count(memory.get(key)) if key.endswith("_tokens") else size(memory.get(key))
        if shown:
            yield Figure(label, shown)
