"""Tracebacks -> exceptions with their frames, and frames -> what the server was doing.

``FRAMES`` maps functions and files to a *stage* (what the server did: profiling, a serving
step, …) or an *operation* (what it computed: the MLP, attention, the sampler, …). The
outermost decisive stage counts, because V0 profiling calls ``execute_model`` too, and the
innermost decisive operation, because that is what allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..records import Frame

# File "/usr/…/vllm/v1/worker/gpu_worker.py", line 813, in execute_model
_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,15}(?!\d))(?:, in ([\w<>.]+))?')
# notebook: File /opt/app/x.py:116, in f(…)      retyped: … deepseek_v4/attention.py:541, in wq_b
_LOOSE_FRAME = re.compile(r"(?:^|[\s(])([\w./-]+\.py)(?::|, line )(\d{1,15}(?!\d)),? in ([\w<>.]+)")
_TRACEBACK = "Traceback (most recent call last):"
# EngineCore hit an exception: Traceback (most recent call last):      (0.7.0..0.8.4)
# Processed prompts:   0%|    | 0/112 [00:00<?, ?it/s][rank0]: Traceback (most recent call last):
_OPENS = re.compile(
    r"(?:EngineCore hit an exception: |Exception in \w+ process: |.{0,200}(?:it/s|s/it|toks/s)\](?:\[rank\d+\]: )?|\[rank\d+\]: )?"
    r"Traceback \(most recent call last\):"
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# torch.OutOfMemoryError: CUDA out…   RuntimeError: …   TimeoutError   ray.exceptions.RayTaskError(ValueError): …
_EXCEPTION = re.compile(
    r"(?P<cls>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|OutOfResources|Warning|Failure|bad_alloc)"
    r"(?:\(\w+\))?)(?::\s?(?P<msg>.*))?$",
    re.DOTALL,
)
# ERROR engine.py:135] OutOfMemoryError('Error in model execution (input dumped to …): CUDA out…
_REPR = re.compile(r"(?P<cls>\w*(?:Error|Exception))\((?P<quote>['\"])(?P<msg>.*)", re.DOTALL)
_PACKAGES = (
    "vllm", "torch", "aiter", "flashinfer", "triton", "ray", "flash_attn", "multiprocessing", "concurrent",
    "sglang", "tensorrt_llm", "text_generation_server", "lmdeploy", "transformers", "diffusers",
)  # fmt: skip
OTHER_ENGINES = (
    "sglang/",
    "tensorrt_llm/",
    "text_generation_server/",
    "lmdeploy/",
    "transformers/",
    "diffusers/",
)
"""Paths of programs that run out of memory in the same words."""


@dataclass(slots=True)
class Raised:
    """One exception: its class, message, frames (outermost first) and where it stands.

    ``index`` is the line of the record that names the class; ``chained`` says that a
    separator of the interpreter introduced its traceback.
    """

    cls: str
    message: str
    frames: tuple[Frame, ...]
    index: int
    chained: bool
    block: int


@dataclass(slots=True)
class _Block:
    """One traceback while it is read."""

    frames: list[Frame] = field(default_factory=list)
    chained: bool = False
    opened: bool = False
    indent: int = 0  # of the whole traceback: pasted ones are often shifted


@lru_cache(4096)
def frame_of(text: str) -> Frame | None:
    """The frame that a line of a traceback names, or None."""
    stripped = text.lstrip()
    if stripped.startswith("File "):
        match = _FRAME.match(stripped)
        if match is not None:
            return Frame(_package_path(match[1]), int(match[2]), match[3] or "")
    if ".py" in text and (match := _LOOSE_FRAME.search(text)) is not None:
        return Frame(_package_path(match[1]), int(match[2]), match[3])
    return None


def _package_path(path: str) -> str:
    """``path`` from the package on; other people's folders are no business of ours."""
    parts = path.replace("\\", "/").split("/")
    # before the packages: ~/.cache/vllm/torch_compile_cache/…
    if "inductor_cache" in parts or "torch_compile_cache" in parts:
        return "inductor_cache/" + parts[-1]
    for package in _PACKAGES:
        if package in parts[:-1]:
            last = len(parts) - 1 - parts[::-1].index(package) if package != "vllm" else parts.index(package)
            # a virtual environment may be called vllm too: the package is what follows *-packages
            for i in range(len(parts) - 1):
                if parts[i].endswith("-packages"):
                    last = i + 1
            return "/".join(parts[last:])
    return "/".join(parts[-2:]) if len(parts) > 1 and not path.startswith("/") else parts[-1]


def exceptions(lines: Sequence[str]) -> Iterator[Raised]:
    """Every exception that a record shows, in order.

    What follows the line of an exception is its message until a line opens another traceback.
    So a fake exception inside a message (the name of an adapter, say) is text: it does not come
    out here. ``RayTaskError`` is the exception to that, its message is the remote traceback.
    """
    block = _Block()
    pending: Raised | None = None
    message: list[str] = []
    number = 0
    after_separator = False
    for index, text in enumerate(lines):
        stripped = text.strip()
        if stripped in _CHAINED:
            after_separator = True
            continue
        if stripped.endswith(_TRACEBACK) and _OPENS.fullmatch(stripped):
            if pending is not None:
                yield _finished(pending, message)
            block = _Block(chained=after_separator, opened=True, indent=_indent(text))
            pending, number = None, number + 1
            after_separator = False
            continue
        if pending is not None and not pending.cls.startswith("ray.exceptions"):
            if len(message) < 12 and stripped:
                message.append(stripped)
            continue
        frame = frame_of(text)
        if frame is not None:
            if not block.opened and not block.frames:
                block.indent = _indent(text) - 2
            if len(block.frames) < 256:
                block.frames.append(frame)
            continue
        if block.frames and _indent(text) >= block.indent + 4:
            continue  # a line of source
        found = exception_of(text)
        if found is None or not (block.opened or block.frames or pending or _follows_nothing(lines, index)):
            continue
        if pending is not None:
            yield _finished(pending, message)
        pending = Raised(found[0], "", tuple(block.frames), index, block.chained, number)
        message = [found[1]] if found[1] else []
    if pending is not None:
        yield _finished(pending, message)


def _finished(raised: Raised, message: list[str]) -> Raised:
    raised.message = "\n".join(message)
    return raised


def _follows_nothing(lines: Sequence[str], index: int) -> bool:
    """Whether only titles stand before an exception without frames: ``WorkerProc hit an exception.``"""
    return all(
        not one.strip() or _TITLE.match(one.strip()) is not None or frame_of(one) is not None
        for one in lines[:index]
    )


_TITLE = re.compile(
    r"(?:-> )?(?:WorkerProc (?:hit an exception|failed to start|failed)|EngineCore (?:encountered a fatal error|failed to start)"
    r"|AsyncLLM output_handler failed|Engine background task failed|Exception in worker \w+ while processing method \w+"
    r"|Error executing method '?\w+'?|Process [\w-]+:)|\.\.\.$"
)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def exception_of(text: str) -> tuple[str, str] | None:
    """Class and first message line where ``text`` is the last line of a traceback, or None."""
    stripped = text.strip()
    for lead in ("[ERROR] ", "-> "):
        stripped = stripped.removeprefix(lead)
    match = _EXCEPTION.match(stripped)
    if match is not None:
        return match["cls"], match["msg"] or ""
    match = _REPR.match(stripped)
    if match is not None:
        return match["cls"], match["msg"]
    return None


# --- what frames mean ---------------------------------------------------------------------------

STAGES = (
    "device_init", "weights", "profile", "kv_allocation", "warmup", "capture",
    "wake", "utility", "sampling", "step",
)  # fmt: skip
OPERATIONS = (
    "mlp", "attention", "context_attention", "linear_attention", "moe", "compiled", "forward",
    "embedding", "logits", "prompt_logprobs", "sampler", "encoder", "lora", "spec_decode",
    "kv_transfer", "nccl", "sleep_wake", "kv_tensors", "weights", "capture", "pooling",
    "input_prep",
)  # fmt: skip

# function -> stage; versions are those in which vLLM defines it
_STAGE_FUNCTIONS = {
    "init_device": "device_init",
    "request_memory": "device_init",
    "init_worker_distributed_environment": "device_init",
    "load_model": "weights",
    "load_weights": "weights",
    "process_weights_after_loading": "weights",
    "create_weights": "weights",
    "initialize_model": "weights",
    "_initialize_model": "weights",
    "get_model": "weights",
    "make_layers": "weights",
    "determine_available_memory": "profile",  # 0.7.0+
    "determine_num_available_blocks": "profile",  # V0 ..0.11.0
    "profile_num_available_blocks": "profile",  # the oldest
    "profile_run": "profile",
    "profile_cudagraph_memory": "capture",  # 0.18+
    "profile_encoder_cache": "profile",
    "initialize_from_config": "kv_allocation",
    "initialize_kv_cache": "kv_allocation",
    "initialize_kv_cache_tensors": "kv_allocation",
    "initialize_cache": "kv_allocation",
    "_init_cache_engine": "kv_allocation",
    "_allocate_kv_cache_tensors": "kv_allocation",
    "_allocate_kv_cache": "kv_allocation",
    "_check_enough_kv_cache_memory": "kv_allocation",
    "check_enough_kv_cache_memory": "kv_allocation",
    "get_kv_cache_configs": "kv_allocation",
    "get_kv_cache_config": "kv_allocation",
    "compile_or_warm_up_model": "warmup",
    "_compile_or_warm_up_model": "warmup",
    "kernel_warmup": "warmup",
    "warmup_kernels": "warmup",
    "warm_up_model": "warmup",
    "_dummy_sampler_run": "warmup",
    "_dummy_pooler_run": "warmup",
    "_dummy_run": "profile",
    "capture_model": "capture",
    "_capture_cudagraphs": "capture",
    "_warmup_and_capture": "capture",
    "capture": "capture",
    "capture_end": "capture",
    "wake_up": "wake",
    "add_lora": "utility",
    "_invoke_utility_method": "utility",
    "process_input_sockets": "utility",
    "execute_model": "step",
    "_process_engine_step": "step",
    "step_with_batch_queue": "step",
    "engine_step": "step",
    "run_busy_loop": "step",
    "_model_forward": "step",
    "sample_tokens": "sampling",  # 0.11.1+
}
# The outermost of these decides; "step" and "sampling" only where none of the others is named.
_STARTUP_FIRST = ("device_init", "weights", "profile", "kv_allocation", "capture", "warmup")

_OPERATION_FUNCTIONS = {
    "_get_prompt_logprobs_dict": "prompt_logprobs",
    "compute_prompt_logprobs": "prompt_logprobs",
    "_dummy_sampler_run": "sampler",
    "_sample": "sampler",
    "apply_top_k_top_p": "sampler",
    "apply_top_k_top_p_pytorch": "sampler",
    "compute_logits": "logits",
    "_get_logits": "logits",
    "embed_multimodal": "encoder",
    "get_multimodal_embeddings": "encoder",
    "_execute_mm_encoder": "encoder",
    "_execute_encoder": "encoder",
    "profile_encoder_cache": "encoder",
    "_process_image_input": "encoder",
    "_process_video_input": "encoder",
    "_process_audio_input": "encoder",
    "set_active_loras": "lora",
    "add_lora": "lora",
    "add_adapter": "lora",
    "activate_adapter": "lora",
    "propose": "spec_decode",
    "propose_draft_token_ids": "spec_decode",
    "start_load_kv": "kv_transfer",
    "save_kv_layer": "kv_transfer",
    "_continuation_prefill": "context_attention",
    "_compute_prefill_context": "context_attention",
    "_context_parallel_compute_prefill_context": "context_attention",
    "create_and_map": "sleep_wake",
    "_allocate_kv_cache_tensors": "kv_tensors",
    "_allocate_kv_cache": "kv_tensors",
    "initialize_kv_cache_tensors": "kv_tensors",
    "create_weights": "weights",
    "process_weights_after_loading": "weights",
    "capture_end": "capture",
    "capture_model": "capture",
    "_pool": "pooling",
    "_dummy_pooler_run": "pooling",
    "_prepare_inputs": "input_prep",
    "_update_states": "input_prep",
}

# part of "path:function" -> operation; the first that fits counts
_OPERATION_PATHS = tuple(
    (re.compile(pattern), operation)
    for pattern, operation in (
        (r"/lora/|punica", "lora"),
        (r"kv_transfer/|kv_connector|nixl|mooncake|lmcache", "kv_transfer"),
        (r"pynccl|custom_all_reduce|device_communicators/(?!shm)|parallel_state\.py:.*(?:all_|gather|broadcast)|distributed_c10d", "nccl"),
        (r"fused_moe|/moe_|/moe/|all2all|deep_ep|deepep|grouped_gemm|pplx", "moe"),
        # V0 runs the target model through SpecDecodeWorker too
        (
            r"spec_decode/(?!spec_decode_worker|target_model_runner|mqa_scorer|batch_expansion|smaller_tp|proposer_worker)"
            r"|rejection_sampl|eagle\.py|medusa\.py|speculator", "spec_decode"),
        (r"indexer|mqa_logits|sparse_attn_index|_chunk_gather|gather_and_maybe_dequant", "context_attention"),
        (r"v1/sample/|/sample/|sampler\.py", "sampler"),
        (r"logits_processor\.py|:compute_logprobs|:gather_logprobs", "logits"),
        (r"/fla/|mamba|gdn|gated_delta|kda|lightning_attn|linear_attn|short_conv", "linear_attention"),
        (r"vision|visual|_vit|vit\.py|siglip|clip\.py|whisper|audio_tower|encoder_runner|mm_encoder|internvit|patch_embed", "encoder"),
        (r"device_allocator/cumem", "sleep_wake"),
        (r"model_loader/|weight_utils", "weights"),
        (r"cuda/graphs\.py|cuda_graph\.py:capture", "capture"),
        (r"attention/|attn|flashinfer|attention\.py", "attention"),
        (r"inductor_cache|torch/_inductor|<eval_with_key>|compilation/|torch/_dynamo|piecewise_backend", "compiled"),
        (r"layers/activation\.py|layers/linear\.py|layers/fusion/|quantization/|:mlp\b|mlp\.py|silu_and_mul", "mlp"),
        (r"vocab_parallel_embedding|embedding\.py", "embedding"),
        (r"layernorm|rotary|/mhc/|kernels/|models/|/layers/", "forward"),
        (r"pool", "pooling"),
    )
)  # fmt: skip
# Frames that only pass a call on say nothing about what it computed.
_PASSING = re.compile(
    r"^(?:torch/nn/modules/module|torch/utils/_contextlib|torch/_ops|torch/utils/_device|contextlib|vllm/utils/"
    r"|vllm/v1/executor/|vllm/executor/|vllm/v1/engine/|vllm/engine/|vllm/entrypoints/|vllm/tracing/"
    r"|vllm/v1/serial_utils|vllm/v1/worker/worker_base|vllm/worker/worker_base|concurrent/|multiprocessing/"
    r"|vllm/model_executor/custom_op|vllm/_custom_ops|torch/_tensor|torch/functional|torch/nn/functional)"
)
_MODEL_RUNNER = re.compile(r"(?:v1/)?worker/")


def passes_on(frame: Frame) -> bool:
    """Whether ``frame`` only passes a call on."""
    return _PASSING.match(frame.path) is not None


@lru_cache(4096)
def operation_of(frame: Frame) -> str | None:
    """What ``frame`` computes, or None where it only passes a call on."""
    if frame.function in _OPERATION_FUNCTIONS:
        return _OPERATION_FUNCTIONS[frame.function]
    if passes_on(frame):
        return None
    where = f"{frame.path}:{frame.function}"
    if _MODEL_RUNNER.search(frame.path) and "lora" not in frame.path and "connector" not in frame.path:
        return None
    for pattern, operation in _OPERATION_PATHS:
        if pattern.search(where):
            return operation
    return None


# Inner helpers whose meaning is what called them: compute_logprobs for prompt logprobs, the
# linear layer of an encoder or an adapter, a kernel of an attention backend.
_OUTRANKS = (
    "prompt_logprobs", "encoder", "lora", "moe", "spec_decode", "kv_transfer", "context_attention",
    "linear_attention", "sampler", "logits",
)  # fmt: skip
_GENERIC = frozenset(
    {"mlp", "forward", "compiled", "attention", "logits", "sampler", "embedding", "nccl", "pooling", "moe"}
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a traceback says: ``stage``, ``operation``, every kind named, and the frame shown."""

    stage: str | None
    operation: str | None
    kinds: frozenset[str]
    frame: str | None


def _stage_of(frame: Frame) -> str | None:
    if frame.function == "__init__" and frame.path.startswith(_MODEL_PATHS):
        return "weights"  # the model is being built
    return _STAGE_FUNCTIONS.get(frame.function)


_MODEL_PATHS = ("vllm/model_executor/models/", "vllm/model_executor/layers/", "vllm/models/")


def read(frames: Sequence[Frame]) -> Reading:
    """Stage and operation of a traceback, outermost frame first."""
    stages = [stage for f in frames if (stage := _stage_of(f)) is not None]
    named = [(f, operation) for f in frames if (operation := operation_of(f)) is not None]
    stage = next((s for s in stages if s in _STARTUP_FIRST), None)
    if stage in ("profile", "warmup") and "capture" in stages:
        stage = "capture"
    if stage is None and stages:
        stage = next((s for s in ("wake", "utility", "sampling", "step") if s in stages), None)
    operation = named[-1][1] if named else None
    if operation in _GENERIC:
        callers = [kind for _, kind in named]
        operation = next((kind for kind in _OUTRANKS if kind in callers), operation)
    shown = named[-1][0] if named else (frames[-1] if frames else None)
    kinds = frozenset(stages) | frozenset(kind for _, kind in named)
    return Reading(stage, operation, kinds, _frame_name(shown) if shown else None)


def _frame_name(frame: Frame) -> str:
    """The function, or its file where the function's name says nothing."""
    if frame.function in (
        "",
        "forward",
        "__call__",
        "call",
        "<module>",
        "<lambda>",
        "apply",
        "wrapper",
        "execution_fn",
    ):
        return f"{frame.path.rpartition('/')[2]} {frame.function}".strip()
    return frame.function
