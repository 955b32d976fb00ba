"""The verdict as text: what happened first, then numbers, reasons, and what to type next."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..analyze import Analysis
from ..diagnosis.engine import budget, changed
from ..diagnosis.knowledge import FailureClass, builtin_classes
from ..document import outlook, time_text
from ..records import Confidence, Incident, Life
from ..vllm.memory_error import human

WIDTH = 100

_CONFIDENCE = {
    Confidence.CONFIRMED: "confirmed",
    Confidence.PROBABLE: "probable",
    Confidence.POSSIBLE: "possible; other causes remain",
    Confidence.INSUFFICIENT: "the lines do not decide it",
}


def report(analysis: Analysis) -> str:
    """The whole report. Plain text, at most ``WIDTH`` columns but for flags."""
    return "\n".join(_report(analysis)) + "\n"


def _report(analysis: Analysis) -> Iterator[str]:
    history = analysis.history
    incidents = history.incidents()
    lives = history.lives.all
    if not incidents:
        yield _nothing(analysis)
    for number, incident in enumerate(incidents, 1):
        if number > 1:
            yield ""
        title = f"Incident {number} of {len(incidents)}" if len(incidents) > 1 else "Incident"
        yield from _incident(title, incident, lives)
    if lives and (len(lives) > 1 or not incidents):
        yield ""
        yield from _lives(lives, incidents)
    yield from _outlook(outlook(history))
    if history.near_misses:
        yield ""
        yield from _wrap(
            f"Near misses: {history.near_misses}. torch could not allocate, flushed its cache and went on. "
            "Nothing failed, but the next larger step may.",
            "",
        )
    if analysis.truncated:
        yield ""
        yield f"{analysis.truncated} lines were longer than 1 MiB; their middle was not read."
    yield ""
    yield f"Read {analysis.lines:,} lines, {human(analysis.bytes)}."


def _outlook(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Whether failures follow prompt length, whether a lower budget cured them, what may come."""
    items = []
    if (trigger := found.get("trigger")) and trigger["events"]:
        items.append(f"What triggers it ({trigger['verdict']}): {trigger['says']}")
    if (confirmation := found.get("confirmation")) and confirmation["state"] != "none":
        items.append(f"Whether a smaller step cured it ({confirmation['state']}): {confirmation['says']}")
    if (risk := found.get("risk")) and risk["state"] != "unknown":
        items.append(f"Risk of the budget now ({risk['state']}): {' '.join(risk['reasons'])}")
    if items:
        yield ""
        yield "Outlook"
    for item in items:
        yield from _wrap(item, "  - ", "    ")


def _nothing(analysis: Analysis) -> str:
    if analysis.lines == 0:
        return "The input is empty: there is nothing to say about it."
    if not analysis.history.lives.all:
        return "No memory failure, and no vLLM start-up line. Is this the log of a vLLM server?"
    return "No memory failure in this log."


def _incident(title: str, incident: Incident, lives: list[Life]) -> Iterator[str]:
    one = builtin_classes()[incident.class_id]
    fatal = "the engine died" if incident.fatal else "the engine survived"
    if incident.phase == "startup" and incident.fatal:
        fatal = "the server did not start"
    when = time_text(incident.time)
    yield f"{title}: {incident.class_id} ({incident.phase}, {fatal})"
    yield from _wrap(f"{one.name}.", "  ")
    yield f"  Confidence: {_CONFIDENCE[incident.confidence]}.{f'  Time: {when}.' if when else ''}"
    life = lives[incident.engine]
    yield from _section("Numbers", [*numbers(incident.facts), *_server(life)])
    yield from _section("What changed", _changes(life, lives))
    favour = [e for e in incident.evidence if e.favours == incident.class_id]
    yield from _section("For it", [_reason(e.says, e.weight, e.line) for e in favour if e.weight > 0])
    against = [_reason(e.says, e.weight, e.line) for e in favour if e.weight < 0]
    others = [
        f"{e.says} (speaks for {e.favours})"
        for e in incident.evidence
        if e.favours != incident.class_id and e.weight > 0
    ]
    yield from _section("Against it", against + others)
    yield from _section("Do", _remedies(incident))
    if incident.advice.because:
        yield ""
        yield from _wrap(f"{incident.advice.because}.", "    ")
    yield from _section("Do not bother", [f"{d.text}: {d.why}" for d in incident.advice.dead_ends])
    yield from _section("Confirm", [incident.advice.confirm])
    if incident.excerpt:
        yield ""
        yield "  The lines it stands on (rebuilt; nothing of a request is in them)"
        yield from (f"    {text}" for text in incident.excerpt)
    yield ""
    yield f"  More: vllm-oom-exporter explain {incident.class_id}"


def numbers(facts: Mapping[str, object]) -> Iterator[str]:
    """The facts of an incident in human units, one clause each."""
    if "tried_bytes" in facts:
        free = f", {human(facts['free_bytes'])} was free" if "free_bytes" in facts else ""
        total = f" of {human(facts['total_bytes'])}" if "total_bytes" in facts else ""
        gpu = f" on GPU {facts['gpu_index']}" if "gpu_index" in facts else ""
        yield f"asked for {human(facts['tried_bytes'])}{free}{total}{gpu}"
    elif "required_bytes" in facts and "available_bytes" in facts:
        yield f"{human(facts['required_bytes'])} of KV cache is needed, {human(facts['available_bytes'])} is there"
    elif "free_bytes" in facts and "total_bytes" in facts:
        yield f"{human(facts['free_bytes'])} of {human(facts['total_bytes'])} was free"
    if "reserved_unallocated_bytes" in facts:
        yield f"{human(facts['reserved_unallocated_bytes'])} was reserved by PyTorch but unallocated"
    if "step_tokens" in facts:
        of = f" of {facts['step_limit_tokens']}" if "step_limit_tokens" in facts else ""
        split = (
            f", {facts['prefill_tokens']} prefill and {facts['decode_tokens']} decode"
            if "prefill_tokens" in facts
            else ""
        )
        yield f"the failing step held {facts['step_tokens']}{of} tokens{split}"
    elif "budget_tokens" in facts:
        yield f"max_num_batched_tokens is {facts['budget_tokens']}; the log does not show the failing step"
    if "max_prompt_tokens" in facts:
        yield f"longest prompt beginning in that step: {facts['max_prompt_tokens']} tokens"
    if facts.get("max_computed_tokens"):
        yield f"deepest cached context of a prefill in it: {facts['max_computed_tokens']} tokens"
    if "running_requests" in facts:
        usage = facts.get("kv_cache_usage")
        kv = f", KV cache {float(str(usage)):.1%} full" if usage is not None else ""
        yield f"requests running: {facts['running_requests']}, waiting: {facts.get('waiting_requests', 0)}{kv}"
    ranks = facts.get("ranks")
    if isinstance(ranks, list) and len(ranks) > 1:
        yield f"ranks {', '.join(map(str, ranks))} failed; the numbers are of the one with the least free memory"


def _server(life: Life) -> Iterator[str]:
    version = f"vLLM {life.vllm_version}" if life.vllm_version else None
    settings = [
        f"{name}={life.settings[name]}"
        for name in ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "tensor_parallel_size")
        if name in life.settings
    ]
    shown = ", ".join([*([version] if version else []), *([life.model] if life.model else []), *settings])
    if shown:
        yield shown


def _changes(life: Life, lives: list[Life]) -> Iterator[str]:
    if life.index == 0:
        return
    before = lives[life.index - 1]
    for name, old, new in changed(before, life):
        yield f"{name}: {old} in the life before, {new} now"


def _reason(says: str, weight: float, line: int | None) -> str:
    where = f", line {line}" if line is not None else ""
    return f"{says} ({weight:+.1f}{where})"


def _remedies(incident: Incident) -> Iterator[str]:
    for remedy in incident.advice.do:
        yield remedy.text
        if remedy.flags:
            yield f"\0{remedy.flags}"
        if remedy.cost:
            yield f"\1cost: {remedy.cost}"


def _section(title: str, items: Iterable[str]) -> Iterator[str]:
    items = list(items)
    if not items:
        return
    yield ""
    yield f"  {title}"
    for item in items:
        if item.startswith("\0"):
            yield f"        {item[1:]}"
        elif item.startswith("\1"):
            yield from _wrap(item[1:], "      ")
        else:
            yield from _wrap(item, "    - ", "      ")


def _wrap(text: str, indent: str, rest: str | None = None) -> Iterator[str]:
    yield from textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=indent,
        subsequent_indent=indent if rest is None else rest, break_on_hyphens=False,
    )  # fmt: skip


def _lives(lives: list[Life], incidents: list[Incident]) -> Iterator[str]:
    yield "Lives of the server"
    for life in lives:
        failed = sum(incident.engine == life.index for incident in incidents)
        what = f"{failed} memory incident{'s' if failed != 1 else ''}" if failed else "no memory incident"
        tokens = budget(life.settings)
        yield (
            f"  {life.index}  {time_text(life.started) or 'start not in the log':<20}  "
            f"max_num_batched_tokens {tokens if tokens is not None else 'unknown':<8} {life.state:<9} {what}"
        )


# --- explain ----------------------------------------------------------------------------------------


def explain(class_id: str) -> str:
    """What a class is, its evidence, remedies, dead ends, how to confirm, and sources."""
    return "\n".join(_explain(builtin_classes()[class_id])) + "\n"


def _explain(one: FailureClass) -> Iterator[str]:
    yield f"{one.id}: {one.name}"
    seen = f"vLLM {one.first_vllm} to {one.last_vllm or 'today'}"
    yield f"  {' or '.join(one.phases)}; {seen}; {one.status}"
    yield ""
    yield from _wrap(one.summary, "  ")
    yield from _section("Why it happens", [one.mechanism])
    yield from _section("Grows with", [one.scales_with])
    yield from _section(
        "Evidence (natural log of a likelihood ratio; what depends on each other shares a group)",
        [f"{rule.weight:+.1f}  {_plain(rule.says)}  [{rule.group}]" for rule in one.evidence],
    )
    lines: list[str] = []
    for remedy in one.remedies:
        lines.append(f"{_plain(remedy.do)} ({remedy.effect})")
        if remedy.flags:
            lines.append(f"\0{_plain(remedy.flags)}")
        if remedy.cost:
            lines.append(f"\1cost: {remedy.cost}")
    yield from _section("Do", lines)
    yield from _section("Do not bother", [f"{end.do}: {end.why}" for end in one.dead_ends])
    yield from _section("Confirm", [one.confirm])
    yield from _section("Easily confused with", [f"{other}: {tell}" for other, tell in one.confused_with])
    yield from _section("Sources", one.sources)


_PAIRING = {
    "{pairing}": "Pin the KV pool at its size in the same change (--kv-cache-memory-bytes from vLLM 0.10.2, "
    "--num-gpu-blocks-override before): else the pool takes most of what a smaller step frees.",
    "{pairing_flags}": "--kv-cache-memory-bytes {pin_kv_cache_bytes}",
}


def _plain(template: str) -> str:
    """A template as it reads without an incident: its names in angle brackets."""
    for name, text in _PAIRING.items():
        template = template.replace(name, text)
    return template.replace("{", "<").replace("}", ">")


def class_list() -> str:
    """One line a class."""
    width = max(len(class_id) for class_id in builtin_classes())
    lines = [f"{one.id:<{width}}  {one.name}" for one in builtin_classes().values()]
    lines += ["", "vllm-oom-exporter explain CLASS tells more about one."]
    return "\n".join(lines) + "\n"
