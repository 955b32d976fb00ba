"""What the budget risks before the first crash: a state with its reasons.

No signal comes seconds ahead: the allocation that fails and the crash are one event. What can be known
is whether the budget has been exercised and whether there is room for what vLLM's profiling leaves out,
so there is no countdown here and no probability.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..records import Life
from ..vllm.memory_error import human
from .confirm import FULL, Epoch, epochs, limit_of
from .engine import budget, memory_of, version_number
from .exposure import PROMPT_SOURCES, LifeExposure
from .step_size import utilization, whole

ENOUGH_STEPS = 50
"""Full steps after which a budget counts as exercised."""

_GIB = 1 << 30

# Share of the profiled activation peak that serving needs on top, because profiling skips it: attention
# workspaces and fragmentation in dense models; buffers of linear attention, latent attention and experts
# in others (vllm-project/vllm issues 52872 and 54775, pull request 55149). Kernels that allocate by
# themselves were seen at 1.8 (pull request 53222), which no log line announces.
_UNPROFILED = 0.1
_UNPROFILED_MIXED = 0.5
# What publishers put into the names of models with experts, latent or linear attention.
_MIXED = re.compile(r"moe|mixtral|deepseek|qwen3-next|jamba|mamba|-a\d+(?:\.\d+)?b\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Risk:
    """A state and why.

    ``state``: unknown, comfortable, tight, unexercised or exceeded. ``reasons``: sentences, the
    deciding one first. ``headroom_bytes``: memory outside what vLLM has reserved, an estimate that
    can be negative; None where it is not known.
    """

    state: str
    reasons: tuple[str, ...]
    headroom_bytes: int | None = None


def document(risk: Risk) -> dict[str, object]:
    """The contract's ``risk``; what is not known is left out."""
    result: dict[str, object] = {"state": risk.state, "reasons": list(risk.reasons)}
    if risk.headroom_bytes is not None:
        result["headroom_bytes"] = risk.headroom_bytes
    return result


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes outside the reservation, what a step beyond the largest so far needs of them, and the sum in words."""

    headroom: int
    need: int
    says: str


def risk(lives: Sequence[LifeExposure], life: Life, near_misses: int, free_bytes: int | None = None) -> Risk:
    """The risk of the running server: the first state that holds.

    ``lives``: oldest first, the last is the one of ``life``. ``near_misses``: of this life.
    ``free_bytes``: free on the device now, of the GPU that has least.
    """
    known = lives or [LifeExposure(life.index, settings=dict(life.settings))]
    own = known[-1]
    epoch = next(one for one in epochs(known) if any(member is own for member in one.lives))
    limit = epoch.limit
    largest = max([whole(life.largest_step) or 0, *(whole(one.largest_step) or 0 for one in epoch.lives)])
    room = _room(life, limit, largest, whole(free_bytes))
    headroom = room.headroom if room else None
    if exceeded := [*_exceeded(epoch, own, near_misses)]:
        return Risk("exceeded", tuple(exceeded), headroom)
    if room and room.headroom < room.need:
        return Risk("tight", (room.says, *_survived(epoch)), headroom)
    if limit is None:
        return Risk("unknown", ("The log does not say how many tokens a step may hold.",), headroom)
    defaults = default_budget(life)
    raised = [*_raised(limit, known, defaults)]
    if raised and (unexercised := _unexercised(epoch, limit, largest)):
        return Risk("unexercised", (unexercised, *raised), headroom)
    comfortable = [*_survived(epoch)]
    if defaults and limit <= defaults[0]:
        comfortable.append(f"{limit} tokens a step is not above vLLM's default {_where(defaults)}.")
    if comfortable:
        return Risk("comfortable", tuple(comfortable), headroom)
    return Risk("unknown", (*_undecided(epoch, limit, defaults), *raised), headroom)


def default_budget(life: Life) -> tuple[int, int] | None:
    """The least and the most that vLLM's API server chooses for ``max_num_batched_tokens`` by itself.

    They differ where the log does not tell version or device well enough: an A100 of 80 GB is counted as
    small from 0.9.2 on, a GB10 from 0.28 on. None where the default follows from ``max_model_len``.
    """
    version = version_number(life.vllm_version)
    if (version is not None and version < 8) or life.settings.get("enable_chunked_prefill") is False:
        return None
    by_size = version is None or version >= 28
    size = whole(memory_of(life).get("total_bytes"))
    if not size:
        return 2048, 16384 if by_size else 8192
    if size < 70 * _GIB:
        return 2048, 2048
    if size >= 160 * _GIB and by_size:
        return (16384 if version is not None else 8192), 16384
    small = _counted_small(str(life.settings.get("device_name", "")).lower(), size, version)
    return (8192 if small is False else 2048), (2048 if small else 8192)


def _counted_small(name: str, size: int, version: float | None) -> bool | None:
    """Whether vLLM treats a device of at least 70 GiB like one of less; None where that can't be told."""
    if version is not None and version < 9.02:  # 0.8.5 did not, later ones were not looked at
        return None
    if name:
        by_name = "a100" in name or "gb10" in name
        return None if by_name and version is None else "a100" in name or (by_name and (version or 0) >= 28)
    may_be_a100 = size <= 81 * _GIB
    may_be_gb10 = 115 * _GIB <= size <= 125 * _GIB and (version is None or version >= 28)
    return None if may_be_a100 or may_be_gb10 else False


# --- the states -----------------------------------------------------------------------------------


def _exceeded(epoch: Epoch, own: LifeExposure, near_misses: int) -> Iterator[str]:
    failures = sum(
        f.class_id == "prefill_budget" and f.phase == "serving" for one in epoch.lives for f in one.failures
    )
    at = f"at {epoch.limit} tokens a step" if epoch.limit else "with these settings"
    if failures:
        yield f"{_count(failures, 'prefill_budget failure')} {at}."
    misses = max(near_misses, own.near_misses) + sum(one.near_misses for one in epoch.lives if one is not own)
    if misses > 0:
        yield f"{_count(misses, 'allocation')} {at} worked only after the cache had been flushed."


def _room(life: Life, limit: int | None, largest: int, free: int | None) -> _Room | None:
    """What start-up left free, or what is free now where it is known how much has been used of a step.

    vLLM profiles a step of ``max_num_batched_tokens``; where fewer may be scheduled, the rest of that
    reservation is room. What is not in the log (neighbours, graphs) only makes the room smaller.
    """
    memory = memory_of(life)
    peak, total = whole(memory.get("peak_activation_bytes")), whole(memory.get("total_bytes"))
    profiled = whole(budget(life.settings))
    if not peak:
        return None
    used = min(1.0, limit / profiled) if limit and profiled else 1.0
    share = _share(life)
    if free is not None and limit and largest:
        # torch keeps what the largest step took, so only what goes beyond it comes out of what is free
        left = used * max(0.0, 1 - largest / limit)
        headroom, need = free - math.ceil(peak * left), math.ceil(share * peak * left)
        origin = f"{human(free)} is free now after steps of up to {largest} tokens, {human(headroom)} beyond the reservation"
    else:
        utilized = utilization(life)
        pinned = any(life.settings.get(n) for n in ("kv_cache_memory_bytes", "num_gpu_blocks_override"))
        if not total or utilized is None or pinned:
            return None
        outside = round(total * (1 - utilized)) - _taken(life, total)
        headroom, need = outside + round(peak * (1 - used)), math.ceil(share * peak * used)
        origin = f"at most {human(headroom)} is outside vLLM's reservation"
    return _Room(
        headroom,
        need,
        f"By estimate {origin}, and a full step may need {human(need)} that profiling does not see "
        f"({share:.0%} of the activation peak).",
    )


def _share(life: Life) -> float:
    mixed = life.settings.get("enable_expert_parallel") is True or _MIXED.search(life.model or "")
    return _UNPROFILED_MIXED if mixed else _UNPROFILED


def _taken(life: Life, total: int) -> int:
    """Bytes outside the accounting: what was used before the start, and CUDA graphs where they do not count."""
    free = whole(life.memory.get("startup_free_bytes"))
    before = max(0, total - free) if free is not None else 0
    version = version_number(life.vllm_version)
    # "CUDA graph memory profiling is enabled (default since v0.21.0)"; its opposite is the early warning
    counted = version is not None and version >= 21 and not life.fingerprint.get("warn")
    graphs = 0 if counted else whole(memory_of(life).get("cuda_graph_bytes")) or 0
    return before + graphs


def _raised(limit: int, lives: Sequence[LifeExposure], defaults: tuple[int, int] | None) -> Iterator[str]:
    before = next((b for one in reversed(lives) if (b := limit_of(one.settings)) not in (None, limit)), None)
    if before is not None and before < limit:
        yield f"The runs before had {before}."
    if defaults and limit > defaults[1]:
        yield f"It is above vLLM's default {_where(defaults)}."


def _unexercised(epoch: Epoch, limit: int, largest: int) -> str | None:
    """Why nobody knows whether a full step works, or None where one was seen or may have been."""
    if largest:
        below = f"No step has filled the limit of {limit} tokens yet: the largest had {largest}."
        return below if largest < FULL * limit else None
    if _finished(epoch, limit) or _full(epoch):
        return None
    return f"Nothing shows that a step of {limit} tokens was ever run: no step sizes are in the log."


def _undecided(epoch: Epoch, limit: int, defaults: tuple[int, int] | None) -> Iterator[str]:
    full, finished = _full(epoch), _finished(epoch, limit)
    if full or not finished:
        survived = f"{_count(full, 'full step')} of {limit} tokens survived so far{_by_probe(epoch)}"
        yield f"{survived}; {ENOUGH_STEPS} would tell."
    else:
        yield (
            f"{_count(finished, 'prompt')} of {limit} tokens or more finished, but no step sizes are in the log "
            "(--enable-logging-iteration-details)."
        )
    if defaults is None:
        yield "vLLM's default is not known for this version and these settings."
    elif defaults[0] < limit <= defaults[1]:
        yield f"It may be above vLLM's default {_where(defaults)}."


def _survived(epoch: Epoch) -> Iterator[str]:
    """The rule of three: no failure in n trials leaves at most 3 / n, with 95 % confidence."""
    full = _full(epoch)
    if full >= ENOUGH_STEPS:
        yield f"{full} full steps survived{_by_probe(epoch)}, so at most 1 in {full // 3} fails (95 %)."


def _full(epoch: Epoch) -> int:
    return sum(max(whole(one.full_steps) or 0, whole(one.probed_steps) or 0) for one in epoch.lives)


def _by_probe(epoch: Epoch) -> str:
    known = sum(whole(one.full_steps) or 0 for one in epoch.lives)
    return "" if known >= _full(epoch) else " (a probe must have filled them; the log has no step sizes)"


def _finished(epoch: Epoch, limit: int) -> int:
    """Prompts that fill a step by themselves, unless they were cached, by the source that saw most."""
    counts = [sum(one.at_least(s, limit) for one in epoch.lives) for s in PROMPT_SOURCES]
    return int(max((c for c in counts if math.isfinite(c)), default=0))


def _where(defaults: tuple[int, int]) -> str:
    least, most = defaults
    if least == most:
        return f"for this device ({least})"
    return f"({least} to {most}, as the log does not tell the device)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
