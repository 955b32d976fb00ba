"""Replays what a failing step held, and says what the outcome proves: lengths only, never content.

``r`` replays that all fail at the old budget and none at the new one have, if the budget makes no
difference, the probability ``1 / C(2r, r)`` (Fisher's exact test): .05 for three, .014 for four. In general
``f`` that failed there and ``r`` that survived here: ``1 / C(f + r, r)``. The prompts differ each time, or
the prefix cache would answer them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diagnosis.confirm import LEVEL
from .look import positive
from .plan import Limits, Plan, PlanError, Request, Stage

DEFAULT_REPEAT = 3
_DECODE_PROMPT = 16
_DECODE_TOKENS = 64
_MOST_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Failing:
    """What the failing step of an incident held. ``limit``: of a step then, where it is known."""

    prompt: int
    prefill: int
    decodes: int
    limit: int | None
    class_id: str


def read_incident(text: str) -> Failing:
    """The failing step of an incident: of the document ``analyze --format json`` prints, or of one incident.

    Of several the newest that names its step. Raises ``PlanError`` where there is none.
    """
    try:
        document = json.loads(text)
    except ValueError:
        raise PlanError("--replay: this is not JSON; give what 'analyze --format json' prints") from None
    every = document.get("incidents", [document]) if isinstance(document, Mapping) else []
    # the API lists the newest first, analyze last; each has its time
    known = [one for one in every if isinstance(one, Mapping) and isinstance(one.get("facts"), Mapping)]
    for one in sorted(known, key=lambda found: str(found.get("time", "")), reverse=True):
        if (found := _failing(one)) is not None:
            return found
    raise PlanError(
        "--replay: no incident in it names the prompts or the size of its step (no scheduler dump)"
    )


def _failing(incident: Mapping[str, Any]) -> Failing | None:
    facts: Mapping[str, Any] = incident["facts"]
    step, longest = positive(facts.get("step_tokens")), positive(facts.get("max_prompt_tokens"))
    decodes = positive(facts.get("decode_tokens")) or 0
    prompt = longest or (step - decodes if step else None)
    if incident.get("phase") == "startup" or prompt is None or prompt < 1:
        return None
    prefill = positive(facts.get("prefill_tokens")) or (step - decodes if step else prompt)
    limit = positive(facts.get("step_limit_tokens")) or positive(facts.get("budget_tokens"))
    return Failing(prompt, max(1, prefill), decodes, limit, str(incident.get("class", "unknown"))[:40])


def replay_plan(failing: Failing, limits: Limits, repeat: int, max_tokens: int) -> Plan:
    """The same lengths, ``repeat`` times. Raises ``PlanError`` where the server does not take them."""
    if failing.prompt > limits.longest:
        raise PlanError(
            f"--replay: its prompt of {failing.prompt} tokens is longer than the server takes "
            f"({limits.longest}); replay it where max_model_len is larger"
        )
    number = min(_MOST_PROMPTS, max(1, -(-failing.prefill // failing.prompt)))
    decodes = min(failing.decodes, limits.max_num_seqs - number)
    prompt = min(_DECODE_PROMPT, limits.longest)
    short = Request(prompt, max(1, min(_DECODE_TOKENS, limits.max_model_len - prompt)))
    stage = Stage(
        "replay",
        (Request(failing.prompt),) * number,
        first=(short,) * max(0, decodes),
        together=number > 1,
        full_steps=failing.prompt // limits.step if number == 1 else 0,
    )
    cost = stage.tokens * repeat
    if cost > max_tokens:
        raise PlanError(f"--replay: {repeat} times {stage.tokens} tokens; raise --max-tokens-total to {cost}")
    return Plan(limits, (stage,) * repeat)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What replays prove. ``state``: confirmed, refuted, reproduced, accruing or none."""

    state: str
    says: str
    pvalue: float | None = None


def judge(failing: Failing, limits: Limits, survived: int, failed: bool, failed_before: int) -> Verdict:
    """The verdict after ``survived`` replays at these limits, and whether the next one ``failed``.

    ``failed_before``: replays at the old budget that all failed, the incident itself for the least.
    """
    new, old = limits.step, failing.limit
    if failed:
        if old is not None and new < old:
            return Verdict("refuted", f"It fails at {new} tokens a step too: the lower budget is no cure.")
        return Verdict(
            "reproduced",
            f"The failure is reproduced at {new} tokens a step. Now replay it at a lower budget.",
        )
    if not survived:
        return Verdict("none", "No replay came to its end.")
    if old is not None and new >= old:
        return Verdict(
            "none",
            f"{survived} replays survived at {new} tokens a step, where it had failed at {old}: lengths alone do not "
            "reproduce it.",
        )
    chance = 1 / math.comb(survived + failed_before, survived)
    counts = (
        f"{failed_before} of {failed_before} failed at {old or 'the old budget'}, 0 of {survived} at {new}"
    )
    if chance <= LEVEL:
        return Verdict(
            "confirmed", f"The lower budget is the cure: {counts} (Fisher, p = {chance:.2g}).", chance
        )
    return Verdict(
        "accruing",
        f"{counts} (Fisher, p = {chance:.2g}): not enough. {_more(survived, failed_before)}",
        chance,
    )


def _more(survived: int, failed_before: int) -> str:
    here = next(r for r in range(survived, 1000) if 1 / math.comb(r + failed_before, r) <= LEVEL)
    there = next(f for f in range(failed_before, 1000) if 1 / math.comb(survived + f, survived) <= LEVEL)
    return f"--repeat {here} would do; so would {there} failed replays at the old budget (--failed-before {there})."
