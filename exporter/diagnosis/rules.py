"""The vocabulary of the knowledge base: what a class of failure is, and when a rule of it applies.

``classes/*.yaml`` are written in these words; ``class_file.py`` checks that they are.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

CLASS_IDS = (
    "prefill_budget",
    "context_workspace",
    "moe_workspace",
    "prompt_logprobs",
    "sampler",
    "multimodal_encoder",
    "lora",
    "spec_decode",
    "fragmentation",
    "static_overcommit",
    "foreign_process",
    "memory_growth",
    "workspace_locked",
    "weights_load",
    "profile_run",
    "kv_cache_no_room",
    "kv_cache_below_max_len",
    "startup_free_memory",
    "cudagraph_capture",
    "communication",
    "sleep_wake",
    "host_memory",
    "unified_memory",
    "unknown",
)
"""The closed set, in the order of the contract; label ``class`` of the metrics."""

# What a condition may ask about. Filled by diagnosis/features.py; the text is documentation.
FEATURES: Mapping[str, str] = {
    "phase": "startup or serving",
    "message": "wording of the failure: a kind of vllm/memory_error.py",
    "stage": "what the server was doing, from the frames: weights, profile, kv_allocation, "
    "warmup, capture, step, sampling, utility, device_init",
    "operation": "the innermost operation the frames name, see vllm/traceback.py",
    "frames": "set of every operation and stage the frames name",
    "step_fill": "scheduled tokens of the failing step / the limit of a step, 0 to 1",
    "prefill_share": "prefill tokens / all tokens of the failing step, 0 to 1",
    "step_tokens": "scheduled tokens of the failing step",
    "budget_tokens": "max_num_batched_tokens in force",
    "running_requests": "running requests at the failing step",
    "context_ratio": "largest num_computed_tokens of a prefilling request / the budget",
    "kv_cache_usage": "fraction of KV blocks in use, 0 to 1",
    "encoder_inputs": "the failing step scheduled encoder inputs",
    "prompt_logprobs_requested": "a request of the failing step asks for prompt_logprobs",
    "spec_tokens": "the failing step scheduled speculative tokens",
    "lora_requested": "a request of the failing step uses an adapter",
    "reserved_over_shortage": "reserved but unallocated bytes / (tried - free)",
    "private_over_shortage": "bytes in private pools / (tried - free)",
    "foreign_bytes": "device bytes that neither this process nor free memory explains",
    "tried_over_total": "tried bytes / capacity of the device",
    "size_fits_step": "tried bytes are step tokens x a plausible row, rounded to 2 MiB",
    "size_fits_vocabulary": "tried bytes are rows x a common vocabulary, rounded to 2 MiB",
    "gpu_memory_utilization": "setting of this life, 0 to 1",
    "kv_pinned": "the KV pool was sized by hand (kv_cache_memory_bytes, num_gpu_blocks_override)",
    "budget_raised": "the budget is above that of the previous life in this history",
    "larger_step_survived": "a step at least as large succeeded earlier in this life",
    "free_memory_falling": "near misses of about the same size found less free memory each time",
    "near_misses": "near misses of this life before the failure",
    "asleep": "sleep mode was entered and not left in this life",
    "unified_device": "the device shares its memory with the host (GB10, Jetson)",
    "kv_connector": "a KV transfer connector is configured",
    "chunked_prefill": "enable_chunked_prefill of this life",
    "vllm_at_least": "version of vLLM as major.minor, a number",
    "cgroup_named": "the kernel or the runtime named the memory limit that killed a process",
}

FACTS = [
    "tried_bytes",
    "free_bytes",
    "total_bytes",
    "allocated_bytes",
    "reserved_unallocated_bytes",
    "private_pool_bytes",
    "process_bytes",
    "gpu_index",
    "vllm_version",
    "budget_tokens",
    "step_limit_tokens",
    "step_tokens",
    "prefill_tokens",
    "decode_tokens",
    "max_prompt_tokens",
    "max_computed_tokens",
    "running_requests",
    "waiting_requests",
    "kv_cache_usage",
    "frame",
    "ranks",
    "required_bytes",
    "available_bytes",
    "workspace_bytes",
    "max_model_len",
    "estimated_max_model_len",
    "exit_code",
    "dummy_requests",
    "row_width",
    "vocabulary_rows",
    "vocabulary",
]
"""Facts an incident may carry; templates may name them, and features, and ADVICE_NUMBERS."""

ADVICE_NUMBERS = (
    "recommended_max_num_batched_tokens",
    "pin_kv_cache_bytes",
    "shortage_bytes",
    "lower_utilization",
    "previous_budget_tokens",
    "lower_max_num_seqs",
    "raised_budget_tokens",
    "pairing_flags",
    "pairing",
)
"""Numbers, and the words that go with a smaller step, which diagnosis/advice.py finds for remedies."""

EFFECTS = ("fixes", "helps", "depends")
STATUSES = ("stable", "experimental")
BASES = ("src", "doc", "maint", "rep", "arith", "inf", "measured")


@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """``weight`` (natural log of a likelihood ratio) counts where all of ``when`` holds."""

    id: str
    group: str
    when: Mapping[str, object]
    weight: float
    says: str


@dataclass(frozen=True, slots=True)
class RemedyRule:
    """A remedy, offered where ``when`` holds and every number its text names is known."""

    do: str
    effect: str
    flags: str | None
    cost: str | None
    when: Mapping[str, object]
    basis: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadEndRule:
    """Common advice that does not help, offered where ``when`` holds."""

    do: str
    why: str
    when: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Example:
    """A log and what must be said of it. ``expect`` is a class id, or ``none``."""

    name: str
    log: str
    expect: str
    phase: str | None


@dataclass(frozen=True, slots=True)
class FailureClass:
    """One class of memory failure."""

    id: str
    name: str
    phases: tuple[str, ...]
    status: str
    first_vllm: str
    last_vllm: str | None
    summary: str
    mechanism: str
    scales_with: str
    evidence: tuple[EvidenceRule, ...]
    remedies: tuple[RemedyRule, ...]
    dead_ends: tuple[DeadEndRule, ...]
    confirm: str
    confused_with: tuple[tuple[str, str], ...]
    sources: tuple[str, ...]
    examples: tuple[Example, ...]


def holds(when: Mapping[str, object], features: Mapping[str, object]) -> bool:
    """Whether every condition of ``when`` is true of ``features``.

    A test is ``">= 0.9"`` (also ``<= < >``) for numbers, ``null`` for "not known", a list for
    "any of these", anything else for equality. A feature that is not known fails every test
    but ``null``. Set-valued features pass when one member does.
    """
    return all(_passes(test, features.get(name)) for name, test in when.items())


def _passes(test: object, value: object) -> bool:
    if test is None:
        return value is None
    if value is None:
        return False
    if isinstance(value, frozenset):
        return any(_passes(test, member) for member in value)
    if isinstance(test, list):
        return any(_passes(one, value) for one in test)
    if isinstance(test, str) and test[:1] in "<>":
        return isinstance(value, int | float) and compare(test, value)
    return value == test


def compare(test: str, value: float) -> bool:
    """Whether ``value`` passes a test such as ``>= 0.9``. Raises ``ValueError`` for what is no test."""
    operator, _, bound = test.partition(" ")
    limit = float(bound)
    match operator:
        case ">=":
            return value >= limit
        case "<=":
            return value <= limit
        case ">":
            return value > limit
        case "<":
            return value < limit
    raise ValueError(f"unknown comparison {test!r}")


def fields_of(template: str) -> list[str]:
    """Names in braces in ``template``."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]
