"""How many tokens a step may hold: the sum behind a recommended ``max_num_batched_tokens``.

Three forms, best first. From the failing tensor: ``tokens * free / tried`` would have fitted, if
nothing else shrinks. From the accounting of the start, where it is in the log: how far the process
went beyond its reservation, shared out over the tokens of the step; an upper bound. Without usable
sizes: what served before, else half. All are starting values to test, and are called that.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Facts, Life
from ..vllm.memory_error import human
from .engine import budget, memory_of, step_limit, version_number
from .incident import Case

_BY_TOKENS = frozenset(
    {"prefill_budget", "context_workspace", "moe_workspace", "prompt_logprobs", "profile_run"}
)
"""Classes whose failing tensor has a row for each token of the step."""
_BUDGET_CLASSES = _BY_TOKENS | {"lora", "multimodal_encoder", "fragmentation"}
_SEGMENT = 2 << 20  # torch rounds large requests up to this: less free than it counts as nothing
_MOST = 1 << 60  # no size that a server can have
_MOST_TOKENS = 1 << 31  # and no budget


@dataclass(frozen=True, slots=True)
class StepSize:
    """``tokens`` to begin with, and one sentence without its full stop that says why."""

    tokens: int
    because: str


@dataclass(frozen=True, slots=True)
class _Fit:
    """``tokens`` that would have fitted, by the more careful of the sums in ``says``."""

    tokens: int
    says: str


def whole(value: object) -> int | None:
    """``value`` where it is a count or a size that can be real, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None


def utilization(life: Life) -> float | None:
    """``gpu_memory_utilization`` in force; vLLM's default where the version is known and nothing was set."""
    if "gpu_memory_utilization" not in life.settings:
        version = version_number(life.vllm_version)
        return None if version is None else 0.92 if version >= 20 else 0.9
    value = life.settings["gpu_memory_utilization"]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= 1 else None


def limit_of(life: Life) -> int | None:
    """Tokens that bound a step of this life, or None where the budget is not known."""
    now, limit = whole(budget(life.settings)), whole(step_limit(life.settings))
    return min(now, limit) if now and limit and now < _MOST_TOKENS else None


def good_before(case: Case, good_budget: int | None = None) -> int | None:
    """A smaller budget that served: ``good_budget`` where the caller knows, else that of the life before.

    A life that never served proves nothing, and neither does one that died.
    """
    now = limit_of(case.life)
    good = whole(good_budget)
    if good is None and case.previous is not None and case.previous.state in ("serving", "stopped"):
        good = whole(budget(case.previous.settings))
    return good if good and now and good < now else None


def step_size(
    case: Case, facts: Facts, features: Facts, class_id: str, good_budget: int | None = None
) -> StepSize | None:
    """A step to begin testing with; None where a smaller one is no remedy or the budget is not known.

    Never above half of what the failing life had, and never below ``max(512, 2 * max_num_seqs *
    (1 + draft tokens))``, below which generation itself would not fit a step.
    """
    limit = limit_of(case.life)
    if limit is None or class_id not in _BUDGET_CLASSES:
        return None
    seqs = whole(case.life.settings.get("max_num_seqs")) or 0
    drafts = whole(case.life.settings.get("num_speculative_tokens")) or 0
    floor, ceiling = max(512, 2 * seqs * (1 + drafts)), limit // 2
    if ceiling < floor:
        return None
    good = good_before(case, good_budget)
    # a tensor of attention over cached tokens is as wide as the context is long
    by_context = class_id == "context_workspace" or features.get("operation") == "context_attention"
    fit = _fit(case, facts, features, limit, by_context) if class_id in _BY_TOKENS else None
    tokens, why = (
        _without_sizes(good, floor, ceiling, limit)
        if fit is None
        else _with_sizes(fit, good, floor, ceiling, limit)
    )
    return StepSize(tokens, f"{tokens} is a starting value to test: {why}")


def _with_sizes(fit: _Fit, good: int | None, floor: int, ceiling: int, limit: int) -> tuple[int, str]:
    # the fifth is for later tensors of the step, rounding to 2 MiB, fragmentation, other ranks
    safe = fit.tokens * 4 // 5
    result = 1 << safe.bit_length() - 1 if safe else 0
    if good is not None and max(result, floor - 1) < good <= min(fit.tokens, ceiling):
        return good, f"{fit.says}, and {good} served before"
    if result < floor:
        return floor, f"{fit.says}, but generation needs up to {floor}; it may not be enough alone"
    if result > ceiling:
        return ceiling, f"{fit.says}, and half of {limit} is below that"
    return result, f"{fit.says}; 0.8 of that, rounded down to a power of two, is {result}"


def _without_sizes(good: int | None, floor: int, ceiling: int, limit: int) -> tuple[int, str]:
    unknown = "the log does not say how much would have fitted"
    if good is None:
        return ceiling, f"it is half of {limit}, as {unknown}"
    if good > ceiling:
        return ceiling, f"it is half of {limit}, below the {good} that served before, as {unknown}"
    if good < floor:
        return floor, f"{good} served before, but generation needs up to {floor}; {unknown}"
    return good, f"it served before; {unknown}"


def _fit(case: Case, facts: Facts, features: Facts, limit: int, by_context: bool) -> _Fit | None:
    tried, free = whole(facts.get("tried_bytes")), whole(facts.get("free_bytes"))
    if tried is None or free is None or not _SEGMENT <= free < tried:
        return None
    step = whole(facts.get("step_tokens"))
    tokens = step or limit
    held = f"{tokens} tokens" if step else f"a full step of {tokens} tokens"
    low = tokens * free // tried
    high = _by_accounting(case.life, facts, features, tokens, tried - free)
    if high is not None and high != low:
        low, high = sorted((low, high))
        fitting = f"between {low} and {high}"
    else:
        fitting = f"about {low}"
    says = f"{held} needed {human(tried)} where {human(free)} was free, so {fitting} would have fitted"
    if by_context:
        computed = whole(facts.get("max_computed_tokens"))
        longest = whole(case.life.settings.get("max_model_len")) or whole(facts.get("max_model_len"))
        if not computed or not longest:
            return None
        if computed < longest:
            low = low * computed // longest
            says += f" after {computed} tokens of context, and {low} after the {longest} that are allowed"
    return _Fit(low, says)


def _by_accounting(life: Life, facts: Facts, features: Facts, tokens: int, missing: int) -> int | None:
    """Tokens that would have fitted if all that was beyond the reservation shrinks with the step.

    0.9 of it. None where the start-up lines do not give the accounting, or where the KV pool was
    sized by hand and so the utilisation reserved nothing.
    """
    total, peak = whole(facts.get("total_bytes")), memory_of(life).get("peak_activation_bytes")
    used = utilization(life)
    if not total or used is None or not whole(peak) or features.get("kv_pinned"):
        return None
    slack = round(total * (1 - used)) - (whole(features.get("foreign_bytes")) or 0)
    return tokens * slack * 9 // (10 * (slack + missing)) if slack > 0 else None
