"""A case -> the facts that are shown and the features that evidence asks about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from ..records import Facts, Life, NearMiss
from ..vllm.scheduler_dump import merge
from .arithmetic import step_row, vocabulary_rows
from .engine import budget, step_limit, version_number
from .incident import Case

_SHOWN = (
    "tried_bytes", "free_bytes", "total_bytes", "allocated_bytes", "reserved_unallocated_bytes",
    "private_pool_bytes", "process_bytes", "gpu_index", "required_bytes", "available_bytes",
    "workspace_bytes", "max_model_len", "estimated_max_model_len", "exit_code", "dummy_requests",
)  # fmt: skip
_DUMPED = (
    "step_tokens", "prefill_tokens", "decode_tokens", "max_prompt_tokens", "max_computed_tokens",
    "running_requests", "waiting_requests", "kv_cache_usage",
)  # fmt: skip


def facts(case: Case) -> Facts:
    """Numbers of the incident, those of the rank with the least free memory. Unknown ones are left out."""
    result: Facts = {}
    for failure in case.failures:  # what the first report lacks, a later one may say
        for name in _SHOWN:
            if name in failure.facts:
                result.setdefault(name, failure.facts[name])
    worst = case.worst().facts
    result.update({name: worst[name] for name in _SHOWN if name in worst})
    dumped = merge({part: case.dump[part].facts for part in ("output", "stats") if part in case.dump})
    result.update({name: dumped[name] for name in _DUMPED if name in dumped})
    version = case.life.vllm_version
    if version is None and "config" in case.dump:
        named = case.dump["config"].facts.get("vllm_version")
        version = str(named) if named else None
    optional: Facts = {
        "vllm_version": version,
        "budget_tokens": budget(case.life.settings),
        "step_limit_tokens": step_limit(case.life.settings),
        "frame": case.reading.frame,
        "ranks": case.ranks or None,
    }
    result.update({name: value for name, value in optional.items() if value is not None})
    return result


def features(case: Case, shown: Facts) -> Facts:
    """What ``knowledge.FEATURES`` names, as far as the case shows it."""
    reading = case.reading
    settings = case.life.settings
    dumped = case.dump["output"].facts if "output" in case.dump else {}
    result: Facts = {
        "phase": case.phase,
        "message": case.kinds,
        "stage": case.stage,
        "operation": reading.operation,
        "frames": reading.kinds or None,
        "encoder_inputs": dumped.get("encoder_inputs"),
        "prompt_logprobs_requested": dumped.get("prompt_logprobs_requested"),
        "spec_tokens": dumped.get("spec_tokens"),
        "lora_requested": dumped.get("lora_requested"),
        "gpu_memory_utilization": settings.get("gpu_memory_utilization"),
        "kv_pinned": _pinned(case.life),
        "chunked_prefill": settings.get("enable_chunked_prefill"),
        "cgroup_named": any(f.facts.get("cgroup_named") for f in case.failures) or None,
        "kv_connector": settings.get("kv_connector"),
        "unified_device": _unified(settings, shown) or None,
        "vllm_at_least": version_number(shown.get("vllm_version")),
        "asleep": case.asleep_before or None,
        "near_misses": len(case.history) or None,
        "free_memory_falling": _falling(case.history) or None,
    }
    result.update(
        {
            n: shown[n]
            for n in ("step_tokens", "budget_tokens", "running_requests", "kv_cache_usage")
            if n in shown
        }
    )
    result |= _step(case, shown) | _sizes(shown) | _outside(case, shown)
    before = budget(case.previous.settings) if case.previous else None
    now = budget(case.life.settings)
    if before is not None and now is not None:
        result["budget_raised"] = now > before
    return {name: value for name, value in result.items() if value is not None}


def _number(facts: Facts, name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_UNIFIED_NAME = re.compile(r"GB10|Orin|Thor|Jetson", re.IGNORECASE)


def _unified(settings: Facts, shown: Facts) -> bool:
    """GB10 and Jetson Thor show 119 to 123 GiB, which no card with memory of its own does."""
    total = _number(shown, "total_bytes")
    by_size = total is not None and 115 << 30 <= total <= 125 << 30
    return by_size or _UNIFIED_NAME.search(str(settings.get("device_name", ""))) is not None


def _pinned(life: Life) -> bool | None:
    names = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
    return True if any(life.settings.get(name) for name in names) else None


def _step(case: Case, shown: Facts) -> Facts:
    step, limit = _number(shown, "step_tokens"), _number(shown, "step_limit_tokens")
    prefill, computed = _number(shown, "prefill_tokens"), _number(shown, "max_computed_tokens")
    result: Facts = {}
    if step:
        if limit:
            result["step_fill"] = step / limit
        if prefill is not None:
            result["prefill_share"] = prefill / step
        if case.largest_step_before:
            result["larger_step_survived"] = case.largest_step_before >= step
    if computed is not None and limit:
        result["context_ratio"] = computed / limit
    return result


def _sizes(shown: Facts) -> Facts:
    tried, free, total = (_number(shown, n) for n in ("tried_bytes", "free_bytes", "total_bytes"))
    result: Facts = {}
    if tried is None:
        return result
    if total:
        result["tried_over_total"] = tried / total
    if free is not None and tried > free:
        for name, fact in (
            ("reserved_over_shortage", "reserved_unallocated_bytes"),
            ("private_over_shortage", "private_pool_bytes"),
        ):
            if (part := _number(shown, fact)) is not None:
                result[name] = part / (tried - free)
    step = _number(shown, "step_tokens")
    if step and (row := step_row(tried, step)) is not None:
        result["size_fits_step"] = True
        shown["row_width"] = row
    rows = [n for n in (step, _number(shown, "running_requests"), _number(shown, "dummy_requests")) if n]
    if (fit := vocabulary_rows(tried, rows)) is not None:
        result["size_fits_vocabulary"] = True
        shown["vocabulary_rows"], shown["vocabulary"] = fit[0], fit[1]
    return result


def _outside(case: Case, shown: Facts) -> Facts:
    """Memory that neither this process nor the free rest explains.

    In a container the own process shows as ``Process N``, so one such clause proves nothing; and
    a process that "has 0 bytes in use" can't see itself.
    """
    listed = case.worst().facts.get("processes", ())
    total, free = _number(shown, "total_bytes"), _number(shown, "free_bytes")
    own = [size for pid, size in listed if pid is None] if isinstance(listed, tuple) else []
    others = [size for pid, size in listed if pid is not None] if isinstance(listed, tuple) else []
    if own and others:
        return {"foreign_bytes": sum(others)}
    if len(others) > 1:
        return {"foreign_bytes": sum(others) - max(others)}
    if own and own[0] > 0 and total is not None and free is not None:
        rest = total - free - own[0]
        if rest >= 1 << 30:
            return {"foreign_bytes": rest}
    return {}


def _falling(warnings: Sequence[NearMiss]) -> bool:
    """Whether requests of about one size found less free memory each time, three times or more."""
    usable = [w for w in warnings if w.tried_bytes and w.free_bytes is not None]
    if len(usable) < 3:
        return False
    sizes = [w.tried_bytes or 0 for w in usable]
    frees = [w.free_bytes or 0 for w in usable]
    alike = max(sizes) <= 1.25 * min(sizes)
    return alike and all(a > b for a, b in pairwise(frees))
