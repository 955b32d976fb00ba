"""Which requests fill an engine step, and what they cost: pure arithmetic on the server's limits.

vLLM schedules first come, first served, and puts prompt tokens into a step until its limit is
reached. So a prompt of as many tokens as the limit, on a server that does nothing else, is a full
step; one of several times the limit is that many full steps, each with a longer context. What
several prompts make of a step also depends on when they arrive, so they are sent in one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..diagnosis.confirm import FULL

SHAPES = {
    "long": "one prompt that fills a step alone",
    "several": "several prompts that share a step",
    "mixed": "long prompts beside many short answers",
    "late": "a very long prompt, whose last chunk sees the longest context",
    "steady": "full steps in a row",
}
DEFAULT_REPEAT = 1
DEFAULT_STEPS = 50  # as many as the risk of a budget wants to see: diagnosis/risk.py
DEFAULT_TOKENS = 2_000_000

DEFAULT_TIMEOUT = 120.0
DEFAULT_SPEND = 20.0
"""Seconds after which nothing more is begun, once a step is sure to have been full."""

_SHARING = 8  # prompts that share a step
_BESIDE = 4  # those beside short answers are longer
_EXTRA = 1.5  # so many tokens for one full step: some of them arrive when the next one has begun
_DECODES = 32
_DECODE_PROMPT = 16
_DECODE_TOKENS = 64
_SEQS = 64  # where max_num_seqs is not known; no default of vLLM is lower
_BLOCK = 16  # tokens; the KV pool keeps one back


class PlanError(ValueError):
    """What was asked for can't be done at these limits; one line that says what to give instead."""


class Request(NamedTuple):
    """One completion to ask for, in tokens."""

    prompt: int
    answer: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine of the server takes, in tokens; ``max_num_seqs`` in requests.

    ``step``: what a step may hold (``max_num_scheduled_tokens`` where set, else the prefill budget).
    ``kv_cache``: what the KV pool holds, None where it is not known.
    """

    step: int
    max_model_len: int
    max_num_seqs: int = _SEQS
    kv_cache: int | None = None

    @property
    def longest(self) -> int:
        """The longest prompt that leaves room for a token of an answer, and fits into the pool."""
        pool = self.max_model_len if self.kv_cache is None else self.kv_cache - _BLOCK
        return min(self.max_model_len, pool) - 1

    @property
    def reach(self) -> int:
        """The most tokens that prompts can put into a step, whatever its limit."""
        pool = self.step if self.kv_cache is None else self.kv_cache - _BLOCK
        return max(0, min(self.step, self.longest * self.max_num_seqs, pool))


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests of one shape. ``first`` are under way before ``then`` are sent.

    ``together``: ``then`` is one HTTP request. ``at_once``: of ``then`` in flight, None for all. ``full_steps``: how many full steps must have
    been scheduled if all of it finishes on a server without other work. ``optional``: begun only
    while there is time. ``endless``: to be ended where time runs out.
    """

    shape: str
    then: tuple[Request, ...]
    first: tuple[Request, ...] = ()
    together: bool = False
    at_once: int | None = None
    full_steps: int = 0
    optional: bool = False
    endless: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the engine has to compute, answers included."""
        return sum(prompt + answer for prompt, answer in (*self.first, *self.then))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send, in this order. ``left_out``: shapes that make no sense here, with the reason."""

    limits: Limits
    stages: tuple[Stage, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> int:
        """The cost."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def full_steps(self) -> int:
        """Full steps that must have been scheduled when all of it has finished."""
        return sum(stage.full_steps for stage in self.stages)


def plan(
    limits: Limits,
    shapes: Sequence[str] = (),
    repeat: int = DEFAULT_REPEAT,
    full_steps: int = DEFAULT_STEPS,
    max_tokens: int = DEFAULT_TOKENS,
) -> Plan:
    """The plan for ``shapes``, or for every one that makes sense at these limits.

    ``full_steps``: how many ``steady`` brings the whole up to. Raises ``PlanError`` where a shape that
    was asked for is impossible, or the cheapest plan costs more than ``max_tokens``.
    """
    if limits.reach < 1:
        raise PlanError("a prompt of one token does not fit these limits; check --max-model-len")
    stages: list[Stage] = []
    left_out: list[tuple[str, str]] = []
    spent = done = 0
    for shape in shapes or SHAPES:
        made = (
            _steady(limits, full_steps - done, max_tokens - spent)
            if shape == "steady"
            else _MAKERS[shape](limits)
        )
        if isinstance(made, str):
            if shapes:
                raise PlanError(f"--shape {shape}: {made}")
            left_out.append((shape, made))
            continue
        if shapes:
            made = replace(made, optional=False, endless=False)
        times = 1 if shape == "steady" else repeat
        cost = made.tokens * times
        if spent + cost > max_tokens:
            why = f"would cost {cost} tokens, more than the {max_tokens - spent} that are left"
            if shapes or not stages:
                raise PlanError(f"{shape} {why}; raise --max-tokens-total, or choose with --shape")
            left_out.append((shape, why))
            continue
        spent += cost
        done += made.full_steps * times
        stages += [made] * times
    return Plan(limits, tuple(stages), tuple(left_out))


def _long(limits: Limits) -> Stage | str:
    length = min(limits.step, limits.longest)
    return Stage("long", (Request(length),), full_steps=int(_fills(limits)))


def _fills(limits: Limits) -> bool:
    """Whether one prompt fills a step alone."""
    return limits.longest >= FULL * limits.step


def _several(limits: Limits) -> Stage | str:
    if limits.max_num_seqs < 2:
        return "max_num_seqs is 1, so no two prompts share a step"
    number = min(_SHARING, limits.max_num_seqs)
    # where one prompt fills no step, this is what does
    return Stage("several", _sharing(limits, number), together=True, optional=_fills(limits))


def _mixed(limits: Limits) -> Stage | str:
    # a prompt and its answer have to fit, and so has the step
    decodes = min(_DECODES, limits.max_num_seqs // 2, limits.step // _BESIDE)
    prompt = max(1, min(_DECODE_PROMPT, limits.longest // 4))
    answer = min(_DECODE_TOKENS, limits.max_model_len - prompt)
    if decodes < 1 or answer < 2:
        return "these limits leave no room for short answers beside long prompts"
    room = min(_BESIDE, limits.max_num_seqs - decodes)
    short = (Request(prompt, answer),) * decodes
    return Stage("mixed", _sharing(limits, room), first=short, together=True, optional=True)


def _late(limits: Limits) -> Stage | str:
    chunks = limits.longest // limits.step
    if limits.longest <= limits.step:
        return "the longest prompt fits into one step, so there is no later chunk"
    length = chunks * limits.step if chunks >= 2 else limits.longest
    return Stage("late", (Request(length),), full_steps=chunks, optional=True)


def _steady(limits: Limits, steps: int, tokens: int) -> Stage | str:
    """Prompts one behind the other, each as long as a step: wherever they meet, a step holds one of them."""
    if steps < 1:
        return "the other shapes fill enough steps"
    if limits.reach < FULL * limits.step:
        return "prompts can't fill a step at these limits"
    length = min(limits.step, limits.longest)
    a_step = -(-limits.step // length)
    number = min(steps * a_step, tokens // (length + 1))
    if number < 1:
        return f"the {max(0, tokens)} tokens that are left do not fill a step"
    return Stage(
        "steady",
        (Request(length),) * number,
        at_once=2 * a_step,  # the engine never waits for us
        full_steps=sure_of(number, length, limits),
        optional=True,
        endless=True,
    )


def sure_of(prompts: int, length: int, limits: Limits) -> int:
    """Full steps that so many prompts of ``steady`` must have filled: none, where each is but a part of one."""
    return prompts if length >= FULL * limits.step else 0


def _sharing(limits: Limits, number: int) -> tuple[Request, ...]:
    """Prompts of which ``number`` fill a step, more where they can't be as long; and some to spare."""
    length = min(-(-limits.reach // number), limits.longest)
    return (Request(length),) * math.ceil(_EXTRA * limits.reach / length)


_MAKERS = {"long": _long, "several": _several, "mixed": _mixed, "late": _late}
