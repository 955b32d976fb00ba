"""The wordings of a memory failure -> its kind and the numbers in it.

Every pattern stands for a text of torch, CUDA, NCCL, the kernel or vLLM, by version; the
table ``WORDINGS`` is what a new release is added to. ``match`` looks at the message of one
exception (or a line known to be written by the runtime), never at arbitrary text: where a
message may stand is decided by ``traceback.py`` and ``signals.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_UNITS = {
    "bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "G": 1 << 30, "M": 1 << 20, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30,
}  # fmt: skip
_SIZE = r"(~?-?\d[\d,]{0,20}(?:\.\d{1,15})?) ?(bytes|[KMGT]i?B|B)\b"


@dataclass(frozen=True, slots=True)
class Recognised:
    """A recognised message: its ``kind``, the numbers, and the text rebuilt from them."""

    kind: str
    facts: Mapping[str, object]
    shown: str


def to_bytes(number: str, unit: str) -> int:
    """``3.83``, ``GiB`` -> bytes, rounded."""
    return round(float(number.lstrip("~").replace(",", "")) * _UNITS[unit])


# torch >= 2.1: "CUDA out of memory. Tried to allocate 3.83 GiB. GPU 0 has a total capacity of
# 79.15 GiB of which 2.11 GiB is free. Process 4242 has 77.03 GiB memory in use. Of the allocated
# memory 75.50 GiB is allocated by PyTorch, with 1.20 GiB allocated in private pools (e.g., CUDA
# Graphs), and 512.00 MiB is reserved by PyTorch but unallocated." (2.1: "total capacty")
# torch <= 2.0, NPU: "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total
# capacity; 55.66 GiB already allocated; 55.66 GiB current active; 18.46 MiB free; 56.00 GiB
# reserved in total by PyTorch)"
_OOM = re.compile(r"(CUDA|HIP|XPU|NPU|MPS|HPU)(?: backend)? out of(?: memory\b|\s*$)")
_TRIED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_REQUESTED = re.compile(rf"[Rr]equested size:? {_SIZE}")
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU|Tile|device) (\d{1,15}(?!\d))\b")
_TOTAL = re.compile(rf"(?:total capaci?ty of |GPU \d+ has |has ){_SIZE}(?: total)?|{_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} (?:is )?free\b")
_PROCESS = re.compile(rf"(?:Process (\d{{1,15}}(?!\d)) has|this process has) {_SIZE} memory in use")
_ALLOCATED = re.compile(
    rf"Of the allocated memory {_SIZE}|\(?{_SIZE} (?:is )?allocated by PyTorch|{_SIZE} already allocated"
)
_PRIVATE = re.compile(rf"with {_SIZE} allocated in private pools")
_UNALLOCATED = re.compile(rf"{_SIZE}(?: is)? reserved (?:by PyTorch )?but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    groups = [group for group in match.groups() if group is not None]
    return to_bytes(groups[-2], groups[-1])


def allocator_facts(text: str) -> dict[str, object]:
    """The numbers of a torch allocator message; what is cut off or missing is left out.

    Sizes are in bytes. ``processes`` lists ``(pid or None, bytes)`` as printed: in a container
    the own process often shows as ``Process N`` too.
    """
    facts: dict[str, object] = {}
    values = {
        "tried_bytes": _first(_TRIED, text) or _first(_REQUESTED, text),
        "total_bytes": _first(_TOTAL, text),
        "free_bytes": _first(_FREE, text),
        "allocated_bytes": _first(_ALLOCATED, text),
        "private_pool_bytes": _first(_PRIVATE, text),
        "reserved_unallocated_bytes": _first(_UNALLOCATED, text),
    }
    facts.update({name: value for name, value in values.items() if value is not None})
    reserved, allocated = _first(_RESERVED, text), facts.get("allocated_bytes")
    if reserved is not None and isinstance(allocated, int):
        facts["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    if (device := _DEVICE.search(text)) is not None:
        facts["gpu_index"] = int(device[1])
    own = [m for m in _PROCESS.finditer(text) if m[1] is None]
    listed = [(int(m[1]) if m[1] else None, to_bytes(m[2], m[3])) for m in _PROCESS.finditer(text)]
    if listed:
        facts["processes"] = tuple(listed)
    if own:
        facts["process_bytes"] = to_bytes(own[-1][2], own[-1][3])
    elif len(listed) == 1:
        facts["process_bytes"] = listed[0][1]
    return facts


def _show_allocator(device: str, facts: Mapping[str, object]) -> str:
    parts = [f"{device} {'is ' if ' ' in device else ''}out of memory."]
    if "tried_bytes" in facts:
        parts.append(f"Tried to allocate {human(facts['tried_bytes'])}.")
    if "total_bytes" in facts:
        gpu = f"GPU {facts['gpu_index']}" if "gpu_index" in facts else "The device"
        parts.append(f"{gpu} has a total capacity of {human(facts['total_bytes'])}")
        parts[-1] += f" of which {human(facts['free_bytes'])} is free." if "free_bytes" in facts else "."
    if "process_bytes" in facts:
        parts.append(f"The process has {human(facts['process_bytes'])} in use.")
    if "allocated_bytes" in facts:
        parts.append(f"{human(facts['allocated_bytes'])} is allocated by PyTorch.")
    if "private_pool_bytes" in facts:
        parts.append(f"{human(facts['private_pool_bytes'])} of it is in private pools.")
    if "reserved_unallocated_bytes" in facts:
        parts.append(f"{human(facts['reserved_unallocated_bytes'])} is reserved but unallocated.")
    return " ".join(parts)


def human(size: object) -> str:
    """Bytes as torch prints them: ``3.83 GiB``."""
    if not isinstance(size, int | float):
        return str(size)
    for unit in ("GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit}"
    return f"{size:.0f} bytes"


def _number(group: int, name: str) -> Callable[[str, re.Match[str]], dict[str, object]]:
    return lambda _, match: {name: int(match[group].replace(",", ""))} if match[group] else {}


def _below_max_len(text: str, match: re.Match[str]) -> dict[str, object]:
    facts: dict[str, object] = {"max_model_len": int(match[1].replace(",", ""))}
    if (need := re.search(rf"\({_SIZE} KV cache is needed", text)) is not None:
        facts["required_bytes"] = to_bytes(need[1], need[2])
    if (have := re.search(rf"available KV cache memory \({_SIZE}\)", text)) is not None:
        facts["available_bytes"] = to_bytes(have[1], have[2])
    if (length := re.search(r"estimated maximum model length is (\d{1,15}(?!\d))", text)) is not None:
        facts["estimated_max_model_len"] = int(length[1])
    return facts


_PLAIN = re.compile(r"\d{1,15}(?:\.\d{1,15})?")


def _startup_free(text: str, match: re.Match[str]) -> dict[str, object]:
    facts: dict[str, object] = {
        name: round(float(number) * (1 << 30))
        for name, number in (("free_bytes", match[1]), ("total_bytes", match[2]))
        if _PLAIN.fullmatch(number)
    }
    if (need := re.search(r"utilization \([\d.]+, (\d{1,15}(?:\.\d{1,15})?) GiB\)", text)) is not None:
        facts["required_bytes"] = round(float(need[1]) * (1 << 30))
    return facts


def _host_kv(text: str, match: re.Match[str]) -> dict[str, object]:
    facts = _startup_free(text, match)
    if (need := re.search(rf"requested memory for kv \({_SIZE}\)", text)) is not None:
        facts["required_bytes"] = to_bytes(need[1], need[2])
    return facts


def _workspace(text: str, _: re.Match[str]) -> dict[str, object]:
    found = re.search(
        r"requires (\d{1,15}(?:\.\d{1,15})?) MB, current size is (\d{1,15}(?:\.\d{1,15})?) MB", text
    )
    if found is None:
        return {}
    return {
        "required_bytes": round(float(found[1]) * (1 << 20)),
        "workspace_bytes": round(float(found[2]) * (1 << 20)),
    }


@dataclass(frozen=True, slots=True)
class Wording:
    """``kind``, the pattern that recognises it, how to read its numbers, and how to show it."""

    kind: str
    pattern: re.Pattern[str]
    facts: Callable[[str, re.Match[str]], dict[str, object]]
    show: str


def _no_facts(_: str, __: re.Match[str]) -> dict[str, object]:
    return {}


# Order matters: the special texts contain the general ones.
WORDINGS = (
    # v1/worker/gpu_model_runner.py, 0.8.0..0.33.0
    Wording(
        "sampler_warmup",
        re.compile(
            r"\w+ out of memory occurred when warming up sampler with (?:(\d{1,15})|\d+) dummy requests"
        ),
        _number(1, "dummy_requests"),
        "CUDA out of memory occurred when warming up sampler with {dummy_requests} dummy requests.",
    ),
    # 0.9.2..0.33.0
    Wording(
        "pooler_warmup",
        re.compile(
            r"\w+ out of memory occurred when warming up pooler .{0,80}?with (?:(\d{1,15})|\d+) dummy requests"
        ),
        _number(1, "dummy_requests"),
        "CUDA out of memory occurred when warming up pooler with {dummy_requests} dummy requests.",
    ),
    # gpu_model_runner.load_model, 0.13.0..0.33.0; the torch text follows in parentheses
    Wording(
        "load_failed",
        re.compile(r"Failed to load model - not enough GPU memory"),
        lambda text, _: allocator_facts(text),
        "Failed to load model - not enough GPU memory.",
    ),
    # v1/core/kv_cache_utils.py, engine/llm_engine.py, 0.2.7..0.33.0
    Wording(
        "kv_no_room",
        re.compile(r"No available memory for the cache blocks"),
        _no_facts,
        "No available memory for the cache blocks.",
    ),
    # V1 0.7.0..0.33.0 ("models's" in 0.8..0.11)
    Wording(
        "kv_below_max_len",
        re.compile(r"To serve at least one request with the model\w*'?s max seq len \((\d[\d,]{0,20})\)"),
        _below_max_len,
        "To serve at least one request with the model's max seq len ({max_model_len}), more KV "
        "cache is needed than there is.",
    ),
    # V0 0.2.7..0.10.2
    Wording(
        "kv_below_max_len",
        re.compile(
            r"The model's max seq len \((\d[\d,]{0,20})\) is larger than the maximum number of tokens "
            r"that can be stored in KV cache"
        ),
        _below_max_len,
        "The model's max seq len ({max_model_len}) is larger than the KV cache.",
    ),
    # v1/worker/utils.py::request_memory, 0.9.1..0.33.0; 0.32+ also "less than the engine's budget".
    # Its first words are those of the healthy decomposition line ("on startup. Desired …").
    Wording(
        "startup_free",
        re.compile(
            r"[Ff]ree memory on device (?:[\w:]+ )?\(([\d.]{1,40})/([\d.]{1,40}) GiB\) on startup is less than"
        ),
        _startup_free,
        "Free memory on device ({free_bytes} of {total_bytes}) on startup is less than desired.",
    ),
    # v1/worker/cpu_worker.py, 0.32
    Wording(
        "host_kv",
        re.compile(
            r"Available memory on node \d+ \(([\d.]{1,40})/([\d.]{1,40}) GiB\) on kv cache allocation is "
            r"less than requested memory for kv"
        ),
        _host_kv,
        "Available memory on the node ({free_bytes} of {total_bytes}) is less than requested memory for kv.",
    ),
    # worker/worker.py, v1/worker/gpu_worker.py, 0.4.1..0.33.0: others released memory meanwhile
    Wording(
        "profiling_error",
        re.compile(r"Error in memory profiling\. "),
        _no_facts,
        "Error in memory profiling.",
    ),
    Wording(
        "workspace_locked",
        re.compile(r"Workspace is locked but allocation"),
        _workspace,
        "Workspace is locked but a larger allocation is required.",
    ),
    # csrc/cumem_allocator.cpp, 0.7..0.33: sleep mode; also inside an API error of another program
    Wording(
        "cumem",
        re.compile(r"CUDA Error: out of memory at \S+?(?:cumem_allocator\.cpp)?:\d+"),
        _no_facts,
        "CUDA Error: out of memory at cumem_allocator.cpp.",
    ),
    Wording(
        "nccl",
        re.compile(
            r"(?:NCCL error|ncclUnhandledCudaError)(?s:.*)(?:out of memory|Failed to CUDA (?:malloc|calloc))"
            r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:malloc|calloc)"
        ),
        _no_facts,
        "NCCL error: Cuda failure 'out of memory'.",
    ),
    # c10/core/impl/alloc_cpu.cpp: "you tried to allocate 2359033856 bytes. Error code 12 (Cannot…"
    Wording(
        "host_allocator",
        re.compile(
            r"(?:\[enforce fail at [^\]]{1,60}\][^\n]{0,40}? )?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
            r"(?:: you tried to allocate (\d{1,15}(?!\d)) bytes)?"
        ),
        _number(1, "tried_bytes"),
        "DefaultCPUAllocator: can't allocate memory.",
    ),
    # the interpreter, numpy, safetensors ("… Cannot allocate memory (os error 12)"), C++
    Wording(
        "host_allocator",
        re.compile(
            r"\[Errno 12\] Cannot allocate memory|std::bad_alloc|Unable to allocate [\d.]+ .iB for an array"
            r"|[^\n]{0,160}Cannot allocate memory \(os error 12\)"
            r"|unable to mmap \d+ bytes from file <[^>\n]{1,400}>: Cannot allocate memory"
        ),
        _no_facts,
        "Cannot allocate memory.",
    ),
    # ray.exceptions.OutOfMemoryError, Ray 2.2+
    Wording(
        "ray_memory_pressure",
        re.compile(r"Task was killed due to the node running low on memory"),
        _no_facts,
        "Task was killed due to the node running low on memory.",
    ),
    Wording(
        "killed_by_signal",
        re.compile(r"process \d+ terminated with signal SIGKILL"),
        lambda _, __: {"exit_code": -9},
        "process terminated with signal SIGKILL",
    ),
    Wording(
        "fraction",
        re.compile(r"(CUDA|HIP|XPU) out of memory\. Allocation was preemptively rejected"),
        lambda text, _: allocator_facts(text),
        "CUDA out of memory. The allocation would exceed per_process_memory_fraction.",
    ),
    # Gaudi: RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::402653184 (384)MB
    Wording(
        "allocator",
        re.compile(
            r"(?:\[Rank:\d+\] )?FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::(?:(\d{1,15}) \()?"
        ),
        _number(1, "tried_bytes"),
        "",
    ),
    # TPU: XlaRuntimeError: RESOURCE_EXHAUSTED: … Ran out of memory in memory space hbm.
    Wording(
        "allocator",
        re.compile(r"RESOURCE_EXHAUSTED: [^\n]{0,200}?(?:[Oo]ut of memory|exceeds the memory)"),
        _no_facts,
        "",
    ),
    Wording("allocator", _OOM, lambda text, _: allocator_facts(text), ""),
    Wording(
        "cublas",
        re.compile(
            r"(?:CUDA error: |HIP error: |cuDNN error: )?(?:CUBLAS|HIPBLAS|CUDNN)_STATUS_ALLOC_FAILED"
        ),
        _no_facts,
        "CUBLAS_STATUS_ALLOC_FAILED.",
    ),
    Wording(
        "driver",
        re.compile(
            r"(?:CUDA|HIP|CUDART) (?:driver )?error: out of memory|cudaErrorMemoryAllocation"
            r"|[^\n]{0,60}\(?UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY"
        ),
        _no_facts,
        "CUDA error: out of memory.",
    ),
    Wording(
        "device_resources",
        re.compile(r"[^\n]{0,60}\(?UR_RESULT_ERROR_OUT_OF_RESOURCES"),
        _no_facts,
        "UR_RESULT_ERROR_OUT_OF_RESOURCES.",
    ),
    # torch's stable ABI hides the message of the allocator (#51743)
    Wording(
        "masked",
        re.compile(
            r'torch_call_dispatcher\(\s*"aten::(?:new_empty|empty|new_zeros|zeros|empty_strided|new_full)'
        ),
        _no_facts,
        "torch_call_dispatcher(aten::new_empty) API call failed.",
    ),
    # Written by hand in reports, or cut: "torch.OutOfMemoryError: Tried to allocate 112.00 MiB."
    Wording(
        "allocator",
        re.compile(rf"Tried to allocate {_SIZE}"),
        lambda text, _: allocator_facts(text),
        "",
    ),
)

# "CUDA out of memory. Tried to allocate more than 1EB memory.": a wrong shape, not capacity
_NONSENSE = re.compile(r"Tried to allocate more than 1EB memory")


# What vLLM puts around the message of another exception:
# RuntimeError: Worker failed with error 'CUDA out of memory. …', please check the stack trace
# OutOfMemoryError('Error in model execution (input dumped to /tmp/err….pkl): CUDA out of memory. …
_AROUND = re.compile(
    r"(?:Worker failed with error ['\"]|Error in model execution \(input dumped to [^)]{1,200}\): "
    r"|Engine loop is not running\. Inspect the stacktrace to find the original error: OutOfMemoryError\(['\"]"
    r"|Error in model execution: |(?:torch\.)?(?:cuda\.)?OutOfMemoryError: |Value error, |\d+ validation error for \w+\s+)*"
)


MAX_MESSAGE = 1 << 14
"""Characters of a message that are read; torch's longest has 2,000."""


def match(message: str) -> Recognised | None:
    """The memory failure that ``message`` reports, or None.

    ``message`` is the text of an exception, its class taken off, lines joined by newlines. It
    must begin with the wording: a path, a name or a request that quotes one further on, as in
    ``FileNotFoundError: … '/nope/torch.OutOfMemoryError: CUDA out of memory…'``, is no failure.
    """
    start = _AROUND.match(message)
    assert start is not None
    message = message[start.end() : start.end() + MAX_MESSAGE]
    if _NONSENSE.search(message):
        return None
    first, newline, _ = message.partition("\n")
    # the first line names the failure; what follows may only add numbers to it
    for text in (first, message) if newline else (first,):
        if (found := _match(text, message)) is not None:
            return found
    return None


def _match(text: str, message: str) -> Recognised | None:
    for wording in WORDINGS:
        if wording.pattern.match(text) is None:
            continue
        # a first line cut behind "CUDA out of" fits by its end, which is not that of the message
        found = wording.pattern.match(message) or wording.pattern.match(text)
        assert found is not None
        facts = wording.facts(message, found)
        if wording.kind == "allocator":
            shown = _show_allocator(found[1] if _OOM.match(found[0]) else "The device", facts)
        else:
            shown = _fill(wording.show, facts)
        return Recognised(wording.kind, facts, shown)
    return None


def _fill(template: str, facts: Mapping[str, object]) -> str:
    values = {k: human(v) if k.endswith("_bytes") else str(v) for k, v in facts.items()}
    for name in re.findall(r"\{(\w+)\}", template):
        values.setdefault(name, "?")
    return template.format_map(values)
