"""What came of a probe: as data, and as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..config.values import printable
from ..diagnosis.confirm import FULL
from .look import Look
from .plan import Plan, Stage, sure_of

EXIT_SURVIVED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
_EXITS = {"survived": EXIT_SURVIVED, "failed": EXIT_FAILED, "unfinished": EXIT_FAILED, "skipped": EXIT_USAGE}


@dataclass(slots=True)
class Ran:
    """A stage that was begun. ``finished``: requests that came to their end, ``longest`` the longest of their prompts."""

    stage: Stage
    finished: int = 0
    finished_tokens: int = 0
    longest: int = 0
    seconds: float = 0.0
    done: bool = False

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return len(self.stage.first) + len(self.stage.then)


@dataclass(slots=True)
class Outcome:
    """What came of a probe, and how many ``seconds`` it took.

    ``state``: survived; failed; unfinished, as time ran out; skipped, as it had to stop for what is no failure.
    ``cached``: prompt tokens that the prefix cache answered, None where ``/metrics`` does not say. ``largest`` and ``full``: true steps, where per-step lines are logged; else what must have been
    scheduled, and ``true_steps`` is false. ``incident``: the document of what the server died of.
    """

    state: str
    plan: Plan
    reason: str = ""
    ran: list[Ran] = field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    cached: float | None = None
    true_steps: bool = False
    largest: int = 0
    full: int = 0
    incident: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return _EXITS[self.state]

    @property
    def filled(self) -> bool:
        """Whether a step was full, or as full as these limits allow."""
        return self.largest >= FULL * min(self.plan.limits.step, self.plan.limits.reach)


def count_steps(outcome: Outcome, before: Look | None, after: Look | None) -> None:
    """Fill in the steps: true ones where the log has any, else those that must have been scheduled."""
    if before is not None and after is not None and after.steps > before.steps:
        outcome.true_steps = True
        outcome.full = after.full - before.full
        outcome.largest = after.largest
        return
    limits = outcome.plan.limits
    for ran in outcome.ran:
        # a prompt that was answered was computed; how it was cut is certain for finished stages only
        if ran.done:
            outcome.full += ran.stage.full_steps
        elif ran.stage.endless:
            outcome.full += sure_of(ran.finished, ran.longest, limits)
        if ran.finished:
            outcome.largest = max(outcome.largest, min(limits.step, ran.longest))
    if outcome.cached:
        outcome.full = max(0, outcome.full - -(-int(outcome.cached) // limits.step))


def document(outcome: Outcome) -> dict[str, object]:
    """The result as plain data."""
    found: dict[str, object] = {
        "state": outcome.state,
        "step_limit_tokens": outcome.plan.limits.step,
        "max_model_len": outcome.plan.limits.max_model_len,
        "started": outcome.started or None,
        "seconds": round(outcome.seconds, 1),
        "prompt_tokens": sum(one.finished_tokens for one in outcome.ran),
        "cached_tokens": None if outcome.cached is None else int(outcome.cached),
        "steps": {
            "source": "iteration" if outcome.true_steps else "scheduled",
            "largest_tokens": outcome.largest,
            "full": outcome.full,
        },
        "shapes": [
            {
                "shape": one.stage.shape, "requests": one.requests, "finished": one.finished,
                "prompt_tokens": one.finished_tokens, "seconds": round(one.seconds, 1), "done": one.done,
            }
            for one in outcome.ran
        ],
        "left_out": [{"shape": shape, "why": why} for shape, why in outcome.plan.left_out],
        "reason": outcome.reason or None,
        "incident": _incident(outcome.incident),
        "says": list(says(outcome)),
        "do": list(advice(outcome)),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _incident(incident: dict[str, Any] | None) -> dict[str, object] | None:
    if incident is None:
        return None
    facts = incident.get("facts") or {}
    names = ("step_tokens", "step_limit_tokens", "tried_bytes", "free_bytes")
    return {
        **{name: incident[name] for name in ("id", "class", "confidence", "fatal") if name in incident},
        **{name: facts[name] for name in names if name in facts},
        **({"flags": flags} if (flags := _flags(incident)) else {}),
    }


def _flags(incident: dict[str, Any] | None) -> str | None:
    do = ((incident or {}).get("advice") or {}).get("do") or []
    return next((one["flags"] for one in do if one.get("flags")), None)


def says(outcome: Outcome) -> Iterator[str]:
    """Sentences: what was exercised, how close to the budget it came, and on what evidence."""
    limit = outcome.plan.limits.step
    if outcome.ran:
        yield f"Exercised: {_shapes(outcome.ran)}."
    if outcome.largest and outcome.true_steps:
        share = outcome.largest / limit
        yield (
            f"The largest step held {outcome.largest} of {limit} tokens ({share:.0%}), and {outcome.full} steps were "
            "full, by the per-step lines of the log."
        )
    elif outcome.largest:
        yield (
            f"A step of {outcome.largest} of {limit} tokens must have been scheduled, {outcome.full} full ones in all. "
            "No step sizes are in the log (--enable-logging-iteration-details) to prove it."
        )
    step = ((outcome.incident or {}).get("facts") or {}).get("step_tokens")
    if isinstance(step, int):
        yield f"The step that failed held {step} of {limit} tokens ({step / limit:.0%})."
    if outcome.cached:
        yield f"The prefix cache answered {int(outcome.cached)} tokens; those were not computed."
    reach = outcome.plan.limits.reach
    if reach < FULL * limit:
        yield f"Prompts can put at most {reach} tokens into a step here, so its limit of {limit} can't be reached."
    if outcome.reason:
        yield f"{outcome.reason[:1].upper()}{outcome.reason[1:]}."


def advice(outcome: Outcome) -> Iterator[str]:
    """What to do now."""
    limit = outcome.plan.limits.step
    if outcome.state == "survived":
        if outcome.filled:
            yield "Let traffic come. Images, LoRA adapters and logprobs are other shapes: this says nothing of them."
        else:
            yield "No step was full, so the budget is still untested: run it with every shape."
    elif outcome.state == "failed":
        if outcome.incident is not None and (flags := _flags(outcome.incident)):
            yield f"Restart with {flags}, then probe again."
        elif outcome.incident is not None:
            yield f"Read what to do: vllm-oom-exporter explain {outcome.incident.get('class', 'unknown')}."
        else:
            yield (
                f"Read the server's log: vllm-oom-exporter analyze LOG. If memory ran out, start with a lower "
                f"--max-num-batched-tokens than {limit} and probe again."
            )
    elif outcome.state == "unfinished":
        yield "Look whether the server still answers; give more time with --timeout, or less to do with --shape."


def _shapes(ran: list[Ran]) -> str:
    """Their names, each once, and which did not come to their end."""
    found: dict[str, bool] = {}
    for one in ran:
        found[one.stage.shape] = found.get(one.stage.shape, True) and (one.done or one.stage.endless)
    return ", ".join(shape if done else f"{shape} (not to its end)" for shape, done in found.items())


_HEADLINES = {
    "survived": "survived",
    "failed": "the server failed",
    "unfinished": "not finished",
    "skipped": "stopped",
}


def text(outcome: Outcome) -> str:
    """For a person: the verdict first."""
    lines = [
        f"probe: {_HEADLINES[outcome.state]} ({outcome.plan.limits.step} tokens a step, {outcome.seconds:.1f} s)"
    ]
    if (found := outcome.incident) is not None:
        lines.append(f"  cause: {found.get('class', 'unknown')} ({found.get('confidence', 'insufficient')})")
    lines += [f"  {one}" for one in says(outcome)]
    lines += ["", f"  {'shape':<9} {'requests':>8} {'tokens':>9} {'seconds':>8}"]
    lines += [
        f"  {one.stage.shape:<9} {f'{one.finished}/{one.requests}':>8} {one.finished_tokens:>9} {one.seconds:>8.1f}"
        for one in outcome.ran
    ]
    lines += [f"  {shape:<9} left out: {why}" for shape, why in outcome.plan.left_out]
    todo = list(advice(outcome))
    return "".join(
        f"{printable(one)}\n" for one in [*lines, *(["", *(f"  {one}" for one in todo)] if todo else [])]
    )


def plan_text(plan: Plan) -> str:
    """For ``--dry-run``."""
    limits = plan.limits
    pool = "" if limits.kv_cache is None else f", KV cache {limits.kv_cache}"
    lines = [
        f"plan: {limits.step} tokens a step, max_model_len {limits.max_model_len}, "
        f"max_num_seqs {limits.max_num_seqs}{pool}",
        f"  {'shape':<9} {'requests':>8} {'longest':>8} {'tokens':>9} {'full steps':>11}",
    ]
    for stage in plan.stages:
        every = (*stage.first, *stage.then)
        lines.append(
            f"  {stage.shape:<9} {len(every):>8} {max(r.prompt for r in every):>8} {stage.tokens:>9} "
            f"{stage.full_steps:>11}"
        )
    lines += [f"  {shape:<9} left out: {why}" for shape, why in plan.left_out]
    lines.append(
        f"  cost: {plan.tokens} tokens to compute, at least {plan.full_steps} full steps; nothing was sent"
    )
    return "\n".join(lines) + "\n"


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as plain data."""
    return {
        "step_limit_tokens": plan.limits.step,
        "max_model_len": plan.limits.max_model_len,
        "max_num_seqs": plan.limits.max_num_seqs,
        "tokens": plan.tokens,
        "full_steps": plan.full_steps,
        "shapes": [
            {
                "shape": one.shape, "requests": len(one.first) + len(one.then), "tokens": one.tokens,
                "full_steps": one.full_steps,
            }
            for one in plan.stages
        ],
        "left_out": [{"shape": shape, "why": why} for shape, why in plan.left_out],
    }  # fmt: skip
