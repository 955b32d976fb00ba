"""What to do about an incident, with numbers: which knob, how far, paired with what."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..records import Advice, DeadEnd, Facts, Life, Remedy
from ..vllm.memory_error import human
from .classify import complete, fill
from .engine import budget, memory_of
from .incident import Case
from .knowledge import FailureClass, holds

_BUDGET_CLASSES = frozenset(
    {
        "prefill_budget",
        "context_workspace",
        "moe_workspace",
        "prompt_logprobs",
        "profile_run",
        "lora",
        "multimodal_encoder",
        "fragmentation",
    }
)
_SAFETY = 0.8  # later tensors of the step, 2 MiB rounding, fragmentation, rank differences


def recommended_budget(case: Case, facts: Facts, class_id: str) -> tuple[int | None, str | None]:
    """A smaller ``max_num_batched_tokens`` to start testing from, and the sum behind it.

    ``T_fit = T_failed * free / tried``: only the failing tensor has to fit, everything else
    stays as it was, which holds where the KV pool is pinned. 0.8 of it, down to a power of two,
    between ``max(512, 2 * max_num_seqs)`` and half the budget. Without usable sizes, or where
    the failing tensor also grows with context, half the budget or the budget of the life before.
    """
    now = budget(case.life)
    if now is None or class_id not in _BUDGET_CLASSES:
        return None, None
    seqs = case.life.settings.get("max_num_seqs")
    floor = max(512, 2 * seqs if isinstance(seqs, int) else 512)
    ceiling = now // 2
    if ceiling < floor:
        return None, None
    before = budget(case.previous) if case.previous else None
    good = (
        before
        if before is not None
        and before < now
        and case.previous is not None
        and case.previous.state != "starting"
        else None
    )
    step = facts.get("step_tokens")
    tokens = step if isinstance(step, int) else now
    tried, free = facts.get("tried_bytes"), facts.get("free_bytes")
    if (
        class_id in ("prefill_budget", "moe_workspace", "prompt_logprobs", "profile_run")
        and isinstance(tried, int)
        and isinstance(free, int)
        and 0 < free < tried
    ):
        fits = int(tokens * free / tried)
        fitting = f"{tokens} tokens needed {human(tried)} where {human(free)} was free, so about {fits} would have fitted"
        result = min(_power_of_two(int(fits * _SAFETY)), ceiling)
        if good is not None and max(result, floor - 1) < good <= fits and result < ceiling:
            return min(good, ceiling), f"{fitting}; the life before ran with {good}"
        if result < floor:
            return floor, f"{fitting}; less than {floor} does not serve {seqs or 'many'} sequences"
        return result, f"{fitting}; 0.8 of that, rounded down, is {result}"
    if good is not None:
        return min(max(floor, good), ceiling), f"the life before ran with {good}"
    result = max(floor, _power_of_two(ceiling))
    return result, f"half of {now}, as the sizes in the log do not say how much would fit"


def _power_of_two(value: int) -> int:
    return 1 << max(0, value.bit_length() - 1)


def numbers(
    case: Case, facts: Facts, features: Facts, class_id: str
) -> tuple[dict[str, int | float], str | None]:
    """Every number that remedies may name, as far as it can be computed, and why the budget is what it is."""
    result: dict[str, int | float] = {}
    recommended, because = recommended_budget(case, facts, class_id)
    if recommended is not None:
        result["recommended_max_num_batched_tokens"] = recommended
    pool = memory_of(case.life).get("kv_cache_bytes")
    # on a device that shares its memory with the host, a pinned pool starves the host (MiaAI #10)
    if pool is not None and pool > 0 and not features.get("unified_device"):
        result["pin_kv_cache_bytes"] = pool
    before = budget(case.previous) if case.previous else None
    if before is not None and before != budget(case.life):
        result["previous_budget_tokens"] = before
    tried, free, total = (facts.get(n) for n in ("tried_bytes", "free_bytes", "total_bytes"))
    if isinstance(tried, int) and isinstance(free, int) and tried > free:
        result["shortage_bytes"] = tried - free
        used = case.life.settings.get("gpu_memory_utilization", _default_utilization(case.life))
        if (
            isinstance(total, int)
            and isinstance(used, int | float)
            and 0 < used <= 1
            and not features.get("kv_pinned")
        ):
            margin = (tried - free + (1 << 30)) / total
            lowered = math.floor((used - margin) * 100) / 100
            if lowered >= 0.3:
                result["lower_utilization"] = lowered
    seqs = case.life.settings.get("max_num_seqs")
    if isinstance(seqs, int) and seqs >= 16:
        result["lower_max_num_seqs"] = seqs // 2
    now = budget(case.life)
    if now is not None and class_id == "workspace_locked":
        result["raised_budget_tokens"] = before if before is not None and before > now else now * 2
    return result, because


def _default_utilization(life: Life) -> float:
    from .engine import version_number

    version = version_number(life.vllm_version)
    return 0.92 if version is not None and version >= 20 else 0.9


def advise(case: Case, facts: Facts, features: Facts, one: FailureClass) -> Advice:
    """Remedies that apply, dead ends, and how to confirm, with the numbers filled in."""
    found, because = numbers(case, facts, features, one.id)
    values: dict[str, object] = {**features, **facts, **found}
    remedies = tuple(
        Remedy(
            fill(rule.do, values),
            _flags(rule.flags, values) if rule.flags and complete(rule.flags, values) else None,
            rule.cost,
        )
        for rule in one.remedies
        if holds(rule.when, values)
        and complete(rule.do, values)
        and (not rule.flags or complete(rule.flags, values))
    )
    dead_ends = tuple(DeadEnd(rule.do, rule.why) for rule in one.dead_ends if holds(rule.when, values))
    kept: dict[str, int] = {
        n: int(found[n]) for n in ("recommended_max_num_batched_tokens", "pin_kv_cache_bytes") if n in found
    }
    return Advice(remedies, dead_ends, one.confirm, kept, because if remedies else None)


def _flags(template: str, values: Mapping[str, object]) -> str:
    """Flags are typed, so numbers stay plain: bytes as bytes."""
    return template.format_map(
        {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in values.items()}
    )
