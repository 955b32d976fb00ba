"""What to do about an incident, with numbers: which knob, how far, paired with what, at what cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..records import Advice, DeadEnd, Facts, Remedy
from ..vllm.memory_error import human
from .classify import complete, fill
from .engine import budget, memory_of
from .incident import Case
from .knowledge import FailureClass, holds
from .rules import RemedyRule
from .step_size import good_before, limit_of, step_size, utilization, whole

_SMALLER = ("recommended_max_num_batched_tokens", "previous_budget_tokens")
"""Numbers that, named in the flags of a remedy, make the steps of the server smaller."""
_SHOWN = ("recommended_max_num_batched_tokens", "pin_kv_cache_bytes")
_MARGIN = 1 << 30  # beyond what was missing: the next prompt may need a little more
_LOWEST_UTILIZATION = 0.3  # below it no server starts, so it is no advice


def advise(
    case: Case, facts: Facts, features: Facts, one: FailureClass, good_budget: int | None = None
) -> Advice:
    """Remedies that apply, dead ends, and how to confirm, with the numbers filled in.

    ``good_budget``: the last ``max_num_batched_tokens`` that is known to serve without this failure.
    """
    found, because = numbers(case, facts, features, one.id, good_budget)
    values: dict[str, object] = {**features, **facts, **found}
    values["pairing_flags"], values["pairing"] = pairing(case, features, found)
    remedies: dict[str, Remedy] = {}
    for rule in one.remedies:
        flags = rule.flags or ""
        if not (holds(rule.when, values) and complete(rule.do, values) and complete(flags, values)):
            continue
        text, typed = " ".join(fill(rule.do, values).split()), _flags(flags, values) or None
        # going back to a budget and lowering it may end at one value: say it once
        remedies.setdefault(typed or text, Remedy(text, typed, _cost(rule, values, case)))
    dead_ends = tuple(DeadEnd(rule.do, rule.why) for rule in one.dead_ends if holds(rule.when, values))
    kept = {name: int(found[name]) for name in _SHOWN if name in found}
    return Advice(tuple(remedies.values()), dead_ends, one.confirm, kept, because if remedies else None)


def numbers(
    case: Case, facts: Facts, features: Facts, class_id: str, good_budget: int | None = None
) -> tuple[dict[str, int | float], str | None]:
    """Every number that remedies may name, as far as it can be known, and why the budget is what it is."""
    result: dict[str, int | float] = {}
    size = step_size(case, facts, features, class_id, good_budget)
    if size is not None:
        result["recommended_max_num_batched_tokens"] = size.tokens
    good = good_before(case, good_budget)
    if good is not None:
        result["previous_budget_tokens"] = good
    pool = _pool_bytes(case, features)
    if pool is not None:
        result["pin_kv_cache_bytes"] = pool
    tried, free = whole(facts.get("tried_bytes")), whole(facts.get("free_bytes"))
    if tried is not None and free is not None and tried > free:
        result["shortage_bytes"] = tried - free
        lowered = _lower_utilization(case, facts, features, tried - free)
        if lowered is not None:
            result["lower_utilization"] = lowered
    seqs = whole(case.life.settings.get("max_num_seqs"))
    if seqs is not None and seqs >= 16:
        result["lower_max_num_seqs"] = seqs // 2
    now = whole(budget(case.life.settings))
    if now is not None and class_id == "workspace_locked":
        before = whole(budget(case.previous.settings)) if case.previous else None
        result["raised_budget_tokens"] = before if before is not None and before > now else now * 2
    return result, size.because if size is not None else None


def pairing(case: Case, features: Facts, found: Mapping[str, int | float]) -> tuple[str, str]:
    """``(flags, sentences)`` that must go with a smaller budget in one change.

    At a fixed utilisation vLLM gives the KV pool what a smaller step frees, so the pool is kept at
    its size. ``--kv-cache-memory-bytes`` is there from 0.10.2, ``--num-gpu-blocks-override`` from
    0.4.2. A device that shares its memory with the host gets a lower utilisation instead: there a
    pinned pool starved the host.
    """
    flags, says = _keep_pool(case, features, found)
    if features.get("chunked_prefill") is False:
        flags = f"--enable-chunked-prefill {flags}".strip()
        says += " Chunked prefill must be on: without it a budget below max_model_len is refused."
    return flags, says


def _keep_pool(case: Case, features: Facts, found: Mapping[str, int | float]) -> tuple[str, str]:
    if features.get("unified_device"):
        lowered = found.get("lower_utilization")
        return (
            f"--gpu-memory-utilization {lowered:g}" if lowered is not None else "",
            "Lower --gpu-memory-utilization with it and do not pin the KV pool: this device shares its "
            "memory with the host.",
        )
    in_one = "in the same change: else the pool takes most of what a smaller step frees."
    by_hand = whole(case.life.settings.get("num_gpu_blocks_override"))
    if by_hand:
        return f"--num-gpu-blocks-override {by_hand}", f"Leave the KV pool at its {by_hand} blocks."
    # the older start-up line: "# GPU blocks: 27919, # CPU blocks: 2048"
    pool, blocks = found.get("pin_kv_cache_bytes"), whole(case.life.memory.get("num_gpu_blocks"))
    version = features.get("vllm_at_least")
    if blocks and (version is None or pool is None) and not _older(features, 4.02):
        return f"--num-gpu-blocks-override {blocks}", f"Pin the KV pool at its {blocks} blocks {in_one}"
    if pool is not None and features.get("kv_pinned"):
        return f"--kv-cache-memory-bytes {pool}", f"Leave the KV pool at its {human(pool)}."
    if pool is not None:
        doubt = "" if version is not None else " The flag needs vLLM 0.10.2 or newer."
        return (
            f"--kv-cache-memory-bytes {pool}",
            f"Pin the KV pool at its present {human(pool)} {in_one}{doubt}",
        )
    if features.get("phase") == "startup":
        return "", ""  # no pool was sized yet
    how = (
        "--num-gpu-blocks-override takes num_gpu_blocks of the metric vllm:cache_config_info"
        if _older(features, 10.02)
        else '--kv-cache-memory-bytes takes the "Available KV cache memory" of the start-up lines'
    )
    return "", f"Pin the KV pool {in_one} This log does not give its size: {how}."


def _pool_bytes(case: Case, features: Facts) -> int | None:
    """Size of the KV pool of one GPU, where it can be pinned by bytes."""
    life = case.life
    if (
        features.get("unified_device")
        or _older(features, 10.02)
        or life.settings.get("num_gpu_blocks_override")
    ):
        return None
    by_hand = whole(life.settings.get("kv_cache_memory_bytes"))
    return by_hand or whole(memory_of(life).get("kv_cache_bytes")) or None


def _older(features: Facts, version: float) -> bool:
    """Whether vLLM is known to be older than ``version`` in the numbers of ``version_number``."""
    here = features.get("vllm_at_least")
    return isinstance(here, int | float) and here < version


def _lower_utilization(case: Case, facts: Facts, features: Facts, missing: int) -> float | None:
    """The utilisation that leaves what was missing and 1 GiB more; None where it would do nothing."""
    total = whole(facts.get("total_bytes"))
    used = utilization(case.life)
    if used is None and "gpu_memory_utilization" not in case.life.settings:
        used = 0.9
    if not total or used is None or features.get("kv_pinned"):
        return None
    lowered = math.floor((used - (missing + _MARGIN) / total) * 100) / 100
    return lowered if lowered >= _LOWEST_UTILIZATION else None


def _cost(rule: RemedyRule, values: Mapping[str, object], case: Case) -> str | None:
    """The cost of a remedy, and for a smaller step how many more steps a prompt takes."""
    smaller = next((n for n in _SMALLER if f"{{{n}}}" in (rule.flags or "")), None)
    limit, new = limit_of(case.life), whole(values.get(smaller)) if smaller else None
    if not limit or not new:
        return rule.cost
    # a prompt whose later chunk failed is at least as long as what was computed of it
    length = max(whole(values.get(n)) or 0 for n in ("max_prompt_tokens", "max_computed_tokens"))
    prompt = f"a {length:,}-token prompt" if length else f"a prompt that fills a step of {limit:,} tokens"
    before = 1 if values.get("chunked_prefill") is False else -(-(length or limit) // limit)
    after = -(-(length or limit) // new)
    steps = f"{after:,} step{'s' if after != 1 else ''}"
    more = (
        f"{prompt} takes {steps} instead of {before:,}" if after > before else f"{prompt} still takes {steps}"
    )
    return f"{rule.cost}; {more}" if rule.cost else more


def _flags(template: str, values: Mapping[str, object]) -> str:
    """Flags are typed, so numbers stay plain: bytes as bytes."""
    typed = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in values.items()}
    return " ".join(template.format_map(typed).split())
