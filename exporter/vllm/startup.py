"""Start-up lines -> settings, memory accounting and marks in the life of a server.

Wordings and levels by version are in the comments; ``RULES`` is what a new release is added
to. A rule matches at the start of a record's text and names the files it may come from, so
that the same words inside a prompt mean nothing.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..records import LifeMark, MemoryParts, Record, Settings, Signal
from .memory_error import to_bytes

GIB = 1 << 30

# Settings kept, with the names vLLM has given them. All are effective values once resolved.
SETTINGS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_scheduled_tokens": "max_num_scheduled_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enable_expert_parallel": "enable_expert_parallel",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "dtype": "dtype",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "cpu_offload_gb": "cpu_offload_gb",
    "swap_space": "swap_space",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "async_scheduling": "async_scheduling",
    "enable_sleep_mode": "enable_sleep_mode",
}
# Settings whose value is a structure that may hold paths or addresses: only that they are set.
FLAGS = {
    "speculative_config": "speculative_decoding",
    "kv_transfer_config": "kv_connector",
    "limit_mm_per_prompt": "multimodal_limits",
}
_WORD = re.compile(r"[\w./:+-]{1,64}")
_CONFIG_FIELD = re.compile(
    r"\b(" + "|".join([*SETTINGS, *FLAGS]) + r")=('[^']{0,200}'|\"[^\"]{0,200}\"|[^,()\s]{1,64})"
)
_VERSION_IN_CONFIG = re.compile(r"LLM engine \(v([\w.+!-]{1,64})\)")
_MODEL_IN_CONFIG = re.compile(r"with config: model='([^']{1,400})'")
_MODEL = re.compile(r"[\w./:@+ -]{1,120}")
_DRAFT_TOKENS = re.compile(
    r"\bspeculative_config=SpeculativeConfig\([^()]{0,400}\bnum_spec_tokens=(\d{1,4})(?!\d)"
)


def safe_model(name: object) -> str | None:
    """A model name fit to be shown and to be a label, or None. Paths lose their folders."""
    if not isinstance(name, str) or not _MODEL.fullmatch(name):
        return None
    return name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name


def setting(name: str, raw: object) -> tuple[str, object] | None:
    """The canonical name and typed value of one setting, or None where it is not kept."""
    if name in FLAGS:
        return FLAGS[name], raw not in (None, "None", "null", "{}", {})
    known = SETTINGS.get(name)
    if known is None:
        return None
    value = _typed(raw)
    if value is None or (isinstance(value, str) and not _WORD.fullmatch(value)):
        return None
    return known, value


def _typed(raw: object) -> object:
    if not isinstance(raw, str):
        return raw if isinstance(raw, bool | int | float) else None
    text = raw.strip("'\"")
    if text in ("True", "true"):
        return True
    if text in ("False", "false"):
        return False
    if text in ("None", "null", ""):
        return None
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else None
    return text


# --- readers of one wording each -----------------------------------------------------------


def _dict_args(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """``non-default args: {'model': …, 'max_num_batched_tokens': 16384}``, 0.9.0..0.33.0."""
    values: dict[str, object] = {}
    text = record.head[match.end() :]
    try:
        raw = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        # objects that are no literals (CompilationConfig(…)), or a cut line: take key by key
        raw = dict(re.findall(r"'(\w+)': ('[^']{0,200}'|[\w.+-]+)", text))
    if isinstance(raw, dict):
        for name, value in raw.items():
            if (kept := setting(str(name), value)) is not None:
                values[kept[0]] = kept[1]
        model = raw.get("served_model_name") or raw.get("model")
        if isinstance(model, list):
            model = model[0] if model else None
        model = safe_model(model.strip("'\"") if isinstance(model, str) else model)
        if model:
            values["model"] = model
        drafts = raw.get("speculative_config")
        if isinstance(drafts, dict) and isinstance(number := drafts.get("num_speculative_tokens"), int):
            values["num_speculative_tokens"] = number
    yield LifeMark("start", record)
    if values:
        yield Settings(values, record)


def _namespace(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """``args: Namespace(…)``, 0.4.2..0.8.5: every argument, defaults too."""
    yield LifeMark("start", record)
    values = dict(_fields(record.head[match.end() :]))
    # None means "decided later" here, and an int that was not given stays out
    model = re.search(r"\bmodel(?:_tag)?='([^']{1,400})'", record.head)
    if model and (name := safe_model(model[1])):
        values["model"] = name
    if values:
        yield Settings(values, record)


def _fields(text: str) -> Iterator[tuple[str, object]]:
    for name, raw in _CONFIG_FIELD.findall(text):
        if (kept := setting(name, raw)) is not None:
            yield kept


def _engine(record: Record, _: re.Match[str]) -> Iterator[Signal]:
    """``Initializing a V1 LLM engine (v0.32.0) with config: model='…', …``.

    Neither max_num_batched_tokens nor gpu_memory_utilization is in it, in any version.
    """
    yield LifeMark("engine", record)
    values = dict(_fields(record.head))
    if (drafts := _DRAFT_TOKENS.search(record.head)) is not None:
        values["num_speculative_tokens"] = int(drafts[1])
    if (version := _VERSION_IN_CONFIG.search(record.head)) is not None:
        values["vllm_version"] = version[1]
    if (model := _MODEL_IN_CONFIG.search(record.head)) and (name := safe_model(model[1])):
        values.setdefault("model", name)
    yield Settings(values, record)


def _one_setting(name: str) -> Callable[[Record, re.Match[str]], Iterator[Signal]]:
    def reader(record: Record, match: re.Match[str]) -> Iterator[Signal]:
        yield Settings({name: int(match[1].replace(",", ""))}, record)

    return reader


def _chunked(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """``Chunked prefill is enabled with max_num_batched_tokens=16384.``, 0.5.3..0.33.0."""
    yield LifeMark("budget", record)
    values: dict[str, object] = {"enable_chunked_prefill": True}
    if match[1]:
        values["max_num_batched_tokens"] = int(match[1])
    yield Settings(values, record)


def _version(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    yield LifeMark("start", record)
    yield Settings({"vllm_version": match[1]}, record)


def _banner(record: Record, _: re.Match[str]) -> Iterator[Signal]:
    """The ASCII-art banner of 0.14+: its third line ends in ``version 0.32.0``."""
    for text in record.lines:
        if (found := re.search(r"\bversion (\d[\w.+!-]{1,63})\s*$", text)) is not None:
            yield LifeMark("start", record)
            yield Settings({"vllm_version": found[1]}, record)
            return


def _part(name: str, unit: int = GIB) -> Callable[[Record, re.Match[str]], Iterator[Signal]]:
    def reader(record: Record, match: re.Match[str]) -> Iterator[Signal]:
        yield MemoryParts({name: round(float(match[1].replace(",", "")) * unit)}, record)

    return reader


def _tokens(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    yield MemoryParts({"kv_cache_tokens": int(match[1].replace(",", ""))}, record)


def _mark(kind: str) -> Callable[[Record, re.Match[str]], Iterator[Signal]]:
    def reader(record: Record, _: re.Match[str]) -> Iterator[Signal]:
        yield LifeMark(kind, record)

    return reader


def _blocks(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    yield MemoryParts({"num_gpu_blocks": int(match[1].replace(",", ""))}, record)


_DECOMPOSITION = re.compile(
    r"Actual usage is (?P<base>\d{1,15}(?:\.\d{1,15})?) GiB for (?P<what>consumed memory[^,]*|weight),\s*"
    r"(?P<peak>\d{1,15}(?:\.\d{1,15})?) GiB for peak activation,(?:\s*(?P<nontorch>\d{1,15}(?:\.\d{1,15})?) GiB for non-torch memory,)?"
    r"\s*and (?P<graph>\d{1,15}(?:\.\d{1,15})?) GiB for CUDAGraph memory"
)


def _decomposition(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """``Free memory on device (F/T GiB) on startup. Desired GPU memory utilization is (u, R GiB). …``

    0.10.2..0.33.0; DEBUG in 0.11..0.25. Two wordings: "GiB for weight" and, from 0.27,
    "GiB for consumed memory (weights + non-torch)". From 0.30 "peak activation" includes the
    CUDA graph estimate: diagnosis/engine.py takes it off again.
    """
    values = {"total_bytes": round(float(match[2]) * GIB), "startup_free_bytes": round(float(match[1]) * GIB)}
    text = record.head
    if (parts := _DECOMPOSITION.search(text)) is not None:
        base = round(float(parts["base"]) * GIB)
        if parts["what"] == "weight":
            values["weights_bytes"] = base
        else:
            values["consumed_bytes"] = base
        values["logged_peak_activation_bytes"] = round(float(parts["peak"]) * GIB)
        values["cuda_graph_bytes"] = round(float(parts["graph"]) * GIB)
        if parts["nontorch"]:
            values["non_torch_bytes"] = round(float(parts["nontorch"]) * GIB)
    if (
        kv := re.search(r"Current kv cache memory in use is (\d{1,15}(?:\.\d{1,15})?) (GiB|bytes)", text)
    ) is not None:
        values["kv_cache_bytes"] = to_bytes(kv[1], kv[2])
    if (
        fit := re.search(
            r"`--kv-cache-memory(?:-bytes)?=(\d{1,15}(?!\d))`[^`]{0,40}to fit into requested", text
        )
    ) is not None:
        values["kv_cache_fit_bytes"] = int(fit[1])
    yield MemoryParts(values, record)
    if (desired := re.search(r"utilization is \((\d{1,15}(?:\.\d{1,15})?), ", text)) is not None:
        yield Settings({"gpu_memory_utilization": float(desired[1])}, record)


def _reserved_by_hand(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """A pool sized by hand, 0.10.2..0.33.0.

    ``Initial free memory F GiB, reserved K GiB memory for KV Cache as specified by
    kv_cache_memory_bytes config and skipped memory profiling.``
    """
    size = round(float(match[1]) * GIB)
    yield MemoryParts({"kv_cache_bytes": size}, record)
    yield Settings({"kv_cache_memory_bytes": size}, record)


def _v0_profile(record: Record, _: re.Match[str]) -> Iterator[Signal]:
    """V0 0.6.5..0.10.2, one record of three lines (two of which may have lost the first)."""
    text = " ".join(record.lines)
    values = {
        name: round(float(found[1]) * GIB)
        for name, pattern in (
            ("total_bytes", r"total_gpu_memory \((\d{1,15}(?:\.\d{1,15})?)GiB\)"),
            ("weights_bytes", r"model weights take (\d{1,15}(?:\.\d{1,15})?)GiB"),
            ("non_torch_bytes", r"non_torch_memory takes (\d{1,15}(?:\.\d{1,15})?)GiB"),
            ("peak_activation_bytes", r"PyTorch activation peak memory takes (\d{1,15}(?:\.\d{1,15})?)GiB"),
            ("kv_cache_bytes", r"reserved for KV Cache is (-?\d{1,15}(?:\.\d{1,15})?)GiB"),
        )
        if (found := re.search(pattern, text)) is not None
    }
    if values:
        yield MemoryParts(values, record)
    if (used := re.search(r"gpu_memory_utilization \((\d{1,15}(?:\.\d{1,15})?)\)", text)) is not None:
        yield Settings({"gpu_memory_utilization": float(used[1])}, record)


def _device(record: Record, match: re.Match[str]) -> Iterator[Signal]:
    """``Using default MoE config. … device_name=NVIDIA_GB10.json``: the only line that names the device."""
    yield Settings({"device_name": match[1]}, record)


def _graph_warning(record: Record, _: re.Match[str]) -> Iterator[Signal]:
    """The early WARNING that mentions out of memory; it is about CUDA graphs."""
    if record.level == "WARNING":
        yield LifeMark("memory_warning", record)


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern`` at the start of a text from one of ``files`` (empty: any) means ``reader``."""

    pattern: re.Pattern[str]
    reader: Callable[[Record, re.Match[str]], Iterator[Signal]]
    files: frozenset[str] = frozenset()


def _rule(pattern: str, reader: Callable[[Record, re.Match[str]], Iterator[Signal]], files: str = "") -> Rule:
    return Rule(re.compile(pattern), reader, frozenset(files.split()))


RULES = (
    _rule(r"non-default args: ", _dict_args),
    _rule(r"args: Namespace\(", _namespace),
    _rule(r"vLLM API server version (\d[\w.+!-]{1,63})", _version),
    _rule(r"(?=[ \t]*$|[ \t]*[█▄▀])", _banner, "api_utils.py utils.py cli_args.py startup.py"),
    _rule(r"Initializing an? (?:V1 )?LLM engine", _engine),
    _rule(r"Chunked prefill is enabled(?: with max_num_batched_tokens=(\d{1,15}(?!\d)))?", _chunked),
    _rule(r"Setting max_num_batched_tokens to (\d{1,15}(?!\d)) for ", _one_setting("max_num_batched_tokens")),
    _rule(r"max_num_scheduled_tokens is set to (\d{1,15}(?!\d))", _one_setting("max_num_scheduled_tokens")),
    _rule(r"Using max model len (\d{1,15}(?!\d))", _one_setting("max_model_len")),
    _rule(r"Auto-fit max_model_len: reduced from \d+ to (\d{1,15}(?!\d))", _one_setting("max_model_len")),
    _rule(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d{1,15}(?!\d))", _one_setting("num_gpu_blocks_override")),
    _rule(r"(?:Loading model weights|Model loading) took (\d{1,15}(?:\.\d{1,15})?) G(?:i)?B", _part("weights_bytes")),
    _rule(r"Available KV cache memory: (-?\d{1,15}(?:\.\d{1,15})?) GiB", _part("kv_cache_bytes")),
    _rule(r"(?:.{0,24}) ?KV cache size: (\d[\d,]{0,20}) tokens", _tokens),
    _rule(r"# (?:\w+ )?blocks: (\d[\d,]{0,20})(?:, # CPU blocks|\s*$)", _blocks),
    _rule(r"Free memory on device (?:[\w:]+ )?\((\d{1,15}(?:\.\d{1,15})?)/(\d{1,15}(?:\.\d{1,15})?) GiB\) on startup\. ", _decomposition),
    _rule(r"Initial free memory [\d.]+ GiB, reserved (\d{1,15}(?:\.\d{1,15})?) GiB memory for KV Cache", _reserved_by_hand),
    _rule(r"Memory profiling takes [\d.]+ seconds\s*$", _v0_profile),
    _rule(r"the current vLLM instance can use total_gpu_memory|model weights take [\d.]+GiB", _v0_profile),
    _rule(r"Memory profiling takes .*torch peak memory increase: (\d{1,15}(?:\.\d{1,15})?)GiB", _part("peak_activation_bytes")),
    _rule(r"Estimated CUDA graph memory: (\d{1,15}(?:\.\d{1,15})?) GiB total", _part("cuda_graph_estimate_bytes")),
    _rule(r"Graph capturing finished in \d+ secs\.?,? took (-?\d{1,15}(?:\.\d{1,15})?) GiB", _part("cuda_graph_bytes")),
    _rule(r"CUDA graph memory profiling is (?:dis|en)abled", _graph_warning),
    _rule(r"CUDA graphs can take additional|Capturing (?:cuda|CUDA ?)graphs? for decoding|Capturing the model for CUDA graphs", _mark("capturing")),
    _rule(r"Starting to load model ", _mark("loading")),
    _rule(r"init engine \(profile, create kv cache, warmup model\) took", _mark("initialised")),
    _rule(r"Starting vLLM (?:API )?server", _mark("listening")),
    _rule(r"Application startup complete\.", _mark("ready"), "uvicorn"),
    _rule(r"Using default (?:MoE|W8A8) .{0,400}?device_name=([\w-]{1,64})", _device),
    _rule(r"Sleep mode freed |CuMemAllocator: sleep freed ", _mark("sleep")),
    _rule(r"It took [\d.]+ seconds to wake up", _mark("awake")),
    _rule(r"\[shutdown\] API server: shutdown triggered", _mark("stop")),
    _rule(r"Shutting down(?:$| FastAPI)", _mark("stopping"), "uvicorn launcher.py"),
)  # fmt: skip


def signals(record: Record) -> Iterator[Signal]:
    """What a record below ERROR says about the life of the server."""
    text = record.head
    for rule in RULES:
        if rule.files and record.file not in rule.files:
            continue
        match = rule.pattern.match(text)
        if match is not None:
            yield from rule.reader(record, match)
            return
