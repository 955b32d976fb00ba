from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.records import Frame
from exporter.vllm.traceback import (
    _OPERATION_FUNCTIONS,
    _OPERATION_PATHS,
    _STAGE_FUNCTIONS,
    OPERATIONS,
    STAGES,
    exception_of,
    exceptions,
    frame_of,
    operation_of,
    passes_on,
    read,
)

SITE = "/usr/local/lib/python3.12/dist-packages"
OPEN = "Traceback (most recent call last):"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def at(path: str, function: str, line: int = 10) -> str:
    """A line of a traceback."""
    return f'  File "{SITE}/{path}", line {line}, in {function}'


def summary(*lines: str) -> list[tuple[str, str, list[str]]]:
    """Class, message and functions of every exception."""
    return [(r.cls, r.message, [f.function for f in r.frames]) for r in exceptions(lines)]


class TestFrames:
    """Single lines of a traceback."""

    @pytest.mark.parametrize(
        ("text", "frame"),
        [
            (
                at("vllm/v1/engine/core.py", "run_busy_loop", 1170),
                Frame("vllm/v1/engine/core.py", 1170, "run_busy_loop"),
            ),
            (
                'File "/opt/vllm/vllm/v1/engine/core.py", line 7, in step',
                Frame("vllm/vllm/v1/engine/core.py", 7, "step"),
            ),
            (
                '  File "/home/u/vllm/.venv/lib/python3.12/site-packages/vllm/engine/x.py", line 7, in f',
                Frame("vllm/engine/x.py", 7, "f"),
            ),
            (
                '  File "/home/u/vllm/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 7, in f',
                Frame("torch/nn/modules/module.py", 7, "f"),
            ),
            (
                '  File "/usr/lib/python3.12/multiprocessing/process.py", line 314, in _bootstrap',
                Frame("multiprocessing/process.py", 314, "_bootstrap"),
            ),
            (
                '  File "/root/.cache/vllm/torch_compile_cache/ab12/rank_0_0/inductor_cache/xy/cxyz.py", line 88, in call',
                Frame("inductor_cache/cxyz.py", 88, "call"),
            ),
            (
                '  File "/tmp/torchinductor_root/inductor_cache/xy/cxyz.py", line 88, in call',
                Frame("inductor_cache/cxyz.py", 88, "call"),
            ),
            ('  File "<eval_with_key>.34", line 5, in forward', Frame("<eval_with_key>.34", 5, "forward")),
            ('  File "/srv/secret/customer/app.py", line 3, in <module>', Frame("app.py", 3, "<module>")),
            ('  File "csrc/x.py", line 3', Frame("csrc/x.py", 3, "")),
            ("deepseek_v4/attention.py:541, in wq_b", Frame("deepseek_v4/attention.py", 541, "wq_b")),
            ("File /opt/app/vllm/worker.py:116, in Worker.load", Frame("vllm/worker.py", 116, "Worker.load")),
            ("    return self.fn(x)", None),
            ("    ^^^^^^^^^^^^^^^^", None),
            (OPEN, None),
            ("", None),
        ],
        ids=[
            "package",
            "checkout",
            "venv-named-vllm",
            "torch-in-venv",
            "stdlib",
            "inductor-of-vllm",
            "inductor",
            "generated",
            "stranger",
            "no-function",
            "retyped",
            "notebook",
            "source",
            "carets",
            "title",
            "empty",
        ],
    )
    def test_a_frame(self, text: str, frame: Frame | None) -> None:
        """Path, line and function are read; folders of the user are left out."""
        assert frame_of(text) == frame


class TestExceptions:
    """What a record says was raised."""

    def test_one(self) -> None:
        """A traceback gives class, message, frames outermost first, and the line of the class."""
        (raised,) = exceptions(
            [
                "EngineCore encountered a fatal error.",
                OPEN,
                at("vllm/a.py", "outer"),
                "    inner()",
                at("vllm/b.py", "inner"),
                OOM,
            ]
        )
        assert (raised.cls, raised.message) == (
            "torch.OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
        )
        assert [frame.path for frame in raised.frames] == ["vllm/a.py", "vllm/b.py"]
        assert (raised.index, raised.chained, raised.block) == (5, False, 1)

    @pytest.mark.parametrize(
        "separator",
        [
            "The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:",
        ],
        ids=["raise-from", "while-handling"],
    )
    def test_chained(self, separator: str) -> None:
        """Chained exceptions come out in order, each with its own frames."""
        first, second = exceptions(
            [
                OPEN,
                at("vllm/a.py", "a"),
                OOM,
                "",
                separator,
                "",
                OPEN,
                at("vllm/b.py", "b"),
                "RuntimeError: Engine core initialization failed.",
            ]
        )
        assert [f.function for f in first.frames] == ["a"]
        assert first.message == "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert [f.function for f in second.frames] == ["b"]
        assert (first.chained, second.chained, second.cls) == (False, True, "RuntimeError")

    def test_a_message_of_several_lines(self) -> None:
        """What follows the class is its message, at most a dozen lines of it."""
        ((_, message, _),) = summary(
            OPEN, at("vllm/a.py", "a"), "RuntimeError: NCCL error", *[f"line {n}" for n in range(40)]
        )
        assert message.split("\n") == ["NCCL error", *[f"line {n}" for n in range(11)]]

    def test_a_fake_exception_in_a_message_is_text(self) -> None:
        """An exception that a message quotes on a line of its own is no exception."""
        assert summary(
            OPEN,
            at("vllm/lora/utils.py", "get"),
            "ValueError: No adapter found for x",
            OOM,
            at("vllm/v1/worker/gpu_worker.py", "execute_model"),
            OOM,
        ) == [
            (
                "ValueError",
                f"No adapter found for x\n{OOM}\n{at('vllm/v1/worker/gpu_worker.py', 'execute_model').strip()}\n{OOM}",
                ["get"],
            )
        ]

    def test_a_remote_traceback_of_ray(self) -> None:
        """The message of RayTaskError is the traceback of another process."""
        found = summary(
            OPEN,
            at("vllm/executor/ray_gpu_executor.py", "_run_workers"),
            "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method() (pid=99, ip=192.0.2.4)",
            at("vllm/worker/worker.py", "load_model"),
            OOM,
        )
        assert [(cls, frames) for cls, _, frames in found] == [
            ("ray.exceptions.RayTaskError(OutOfMemoryError)", ["_run_workers"]),
            ("torch.OutOfMemoryError", ["_run_workers", "load_model"]),
        ]

    @pytest.mark.parametrize(
        "title",
        [
            OPEN,
            f"EngineCore hit an exception: {OPEN}",
            f"Exception in worker process: {OPEN}",
            f"[rank0]: {OPEN}",
            f"Processed prompts:   0%|    | 0/112 [00:00<?, ?it/s][rank0]: {OPEN}",
        ],
        ids=["plain", "0.7-engine", "worker", "rank", "progress-bar"],
    )
    def test_titles(self, title: str) -> None:
        """A traceback begins where the interpreter or an old vLLM begins it."""
        assert summary("noise", title, at("vllm/a.py", "a"), OOM) == [
            ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", ["a"])
        ]

    @pytest.mark.parametrize(
        ("head", "cls"),
        [
            ("WorkerProc hit an exception.", "torch.OutOfMemoryError"),
            ("AsyncLLM output_handler failed.", "torch.OutOfMemoryError"),
            ("Process EngineCore_DP0:", "torch.OutOfMemoryError"),
            ("somebody said:", None),
        ],
        ids=["worker", "output-handler", "process", "free-text"],
    )
    def test_an_exception_without_frames(self, head: str, cls: str | None) -> None:
        """Without frames an exception counts only below titles, not behind free text."""
        assert [raised[0] for raised in summary(head, OOM)] == ([cls] if cls else [])

    def test_frames_are_bounded(self) -> None:
        """Of a deep recursion a bounded number of frames is kept."""
        ((_, _, frames),) = summary(
            OPEN, *[at("vllm/a.py", "f")] * 3000, "RecursionError: maximum recursion depth exceeded"
        )
        assert len(frames) == 256

    @settings(deadline=None, max_examples=150)
    @given(
        st.lists(
            st.one_of(
                st.sampled_from([OPEN, OOM, at("vllm/a.py", "f"), "RuntimeError", "", "    x"]),
                st.text(max_size=30),
            ),
            max_size=12,
        )
    )
    def test_any_lines(self, lines: list[str]) -> None:
        """Whatever the lines, nothing is raised and each exception stands on a line that names it."""
        for raised in exceptions(lines):
            found = exception_of(lines[raised.index])
            assert found is not None
            assert found[0] == raised.cls


class TestExceptionOf:
    """The last line of a traceback."""

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (OOM, ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")),
            ("torch.cuda.OutOfMemoryError: x", ("torch.cuda.OutOfMemoryError", "x")),
            (
                "torch.AcceleratorError: CUDA error: out of memory",
                ("torch.AcceleratorError", "CUDA error: out of memory"),
            ),
            ("TimeoutError", ("TimeoutError", "")),
            ("KeyboardInterrupt", ("KeyboardInterrupt", "")),
            (
                "triton.runtime.errors.OutOfResources: out of resource",
                ("triton.runtime.errors.OutOfResources", "out of resource"),
            ),
            (
                "OutOfMemoryError('Error in model execution: CUDA out of memory.')",
                ("OutOfMemoryError", "Error in model execution: CUDA out of memory.')"),
            ),
            ("[ERROR] RuntimeError: x", ("RuntimeError", "x")),
            ("std::bad_alloc", None),
            ("AsyncLLM output_handler failed.", None),
            ("see RuntimeError: x", None),
        ],
        ids=[
            "torch",
            "torch-2.4",
            "accelerator",
            "no-message",
            "interrupt",
            "triton",
            "repr",
            "lead",
            "not-python",
            "sentence",
            "quoted",
        ],
    )
    def test_class_and_message(self, text: str, found: tuple[str, str] | None) -> None:
        """Class and message are taken apart; a line that only mentions a class is none."""
        assert exception_of(text) == found

    @pytest.mark.parametrize(
        "shift", ["", "    ", "\t"], ids=["plain", "pasted-with-spaces", "pasted-with-a-tab"]
    )
    def test_source_is_no_exception(self, shift: str) -> None:
        """A line of source that looks like an exception is source, also where a traceback is shifted."""
        lines = [OPEN, at("vllm/a.py", "a"), "    ValueError: not", at("vllm/b.py", "b"), OOM]
        assert summary(*[shift + line for line in lines]) == [
            ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", ["a", "b"])
        ]


CORE = ("vllm/v1/engine/core.py", "run_engine_core")
STEP = ("vllm/v1/worker/gpu_worker.py", "execute_model")
MODEL = ("vllm/model_executor/models/llama.py", "forward")
READINGS: dict[str, tuple[list[tuple[str, str]], str | None, str | None]] = {
    "mlp-in-serving": (
        [CORE, STEP, MODEL, ("vllm/model_executor/layers/activation.py", "forward_cuda")],
        "step",
        "mlp",
    ),
    "compiled": ([CORE, STEP, MODEL, ("inductor_cache/cx.py", "call")], "step", "compiled"),
    "attention": (
        [STEP, MODEL, ("vllm/v1/attention/backends/flash_attn.py", "forward")],
        "step",
        "attention",
    ),
    "mla-context": (
        [STEP, MODEL, ("vllm/v1/attention/backends/mla/common.py", "_compute_prefill_context")],
        "step",
        "context_attention",
    ),
    "continuation": (
        [
            STEP,
            ("vllm/v1/attention/backends/turboquant.py", "_continuation_prefill"),
            ("vllm/v1/attention/ops/x.py", "cat"),
        ],
        "step",
        "context_attention",
    ),
    "sparse-indexer": (
        [STEP, ("vllm/v1/attention/ops/mqa_logits.py", "fp8_mqa_logits")],
        "step",
        "context_attention",
    ),
    "moe": (
        [STEP, MODEL, ("vllm/model_executor/layers/fused_moe/fused_moe.py", "fused_experts_impl")],
        "step",
        "moe",
    ),
    "mlp-inside-moe": (
        [
            STEP,
            ("vllm/model_executor/layers/fused_moe/layer.py", "forward"),
            ("vllm/model_executor/layers/activation.py", "forward_cuda"),
        ],
        "step",
        "moe",
    ),
    "linear-attention": (
        [STEP, MODEL, ("vllm/model_executor/layers/fla/ops/chunk.py", "chunk_fwd")],
        "step",
        "linear_attention",
    ),
    "prompt-logprobs": (
        [
            STEP,
            ("vllm/v1/worker/gpu_model_runner.py", "_get_prompt_logprobs_dict"),
            ("vllm/v1/sample/sampler.py", "compute_logprobs"),
        ],
        "step",
        "prompt_logprobs",
    ),
    "logits": ([STEP, ("vllm/model_executor/layers/logits_processor.py", "_get_logits")], "step", "logits"),
    "sampler": (
        [
            CORE,
            ("vllm/v1/worker/gpu_worker.py", "sample_tokens"),
            ("vllm/v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p"),
        ],
        "sampling",
        "sampler",
    ),
    "encoder": (
        [
            STEP,
            ("vllm/v1/worker/gpu_model_runner.py", "_execute_mm_encoder"),
            ("vllm/model_executor/layers/linear.py", "forward"),
        ],
        "step",
        "encoder",
    ),
    "lora-forward": ([STEP, MODEL, ("vllm/lora/layers/base_linear.py", "apply")], "step", "lora"),
    "lora-load": (
        [
            ("vllm/v1/engine/core.py", "_handle_client_request"),
            ("vllm/v1/engine/core.py", "_invoke_utility_method"),
            ("vllm/v1/worker/gpu_worker.py", "add_lora"),
        ],
        "utility",
        "lora",
    ),
    "wake-up": (
        [("vllm/v1/worker/gpu_worker.py", "wake_up"), ("vllm/device_allocator/cumem.py", "create_and_map")],
        "wake",
        "sleep_wake",
    ),
    "spec-decode": (
        [
            STEP,
            ("vllm/v1/worker/gpu_model_runner.py", "propose_draft_token_ids"),
            ("vllm/v1/spec_decode/eagle.py", "propose"),
        ],
        "step",
        "spec_decode",
    ),
    "nccl": ([STEP, ("vllm/distributed/device_communicators/pynccl.py", "all_reduce")], "step", "nccl"),
    "kv-connector": (
        [STEP, ("vllm/distributed/kv_transfer/kv_connector/v1/p2p.py", "start_load_kv")],
        "step",
        "kv_transfer",
    ),
    "pooling": ([STEP, ("vllm/v1/worker/gpu_model_runner.py", "_pool")], "step", "pooling"),
    "input-prep": ([STEP, ("vllm/v1/worker/gpu_model_runner.py", "_prepare_inputs")], "step", "input_prep"),
    "embedding": (
        [STEP, ("vllm/model_executor/layers/vocab_parallel_embedding.py", "embedding")],
        "step",
        "embedding",
    ),
    "weights": (
        [
            ("vllm/v1/worker/gpu_worker.py", "load_model"),
            ("vllm/model_executor/layers/linear.py", "create_weights"),
        ],
        "weights",
        "weights",
    ),
    "profile-v1": (
        [
            ("vllm/v1/worker/gpu_worker.py", "determine_available_memory"),
            ("vllm/v1/worker/gpu_model_runner.py", "profile_run"),
            MODEL,
        ],
        "profile",
        "forward",
    ),
    "profile-v0-calls-execute-model": (
        [
            ("vllm/worker/worker.py", "determine_num_available_blocks"),
            ("vllm/worker/model_runner.py", "profile_run"),
            ("vllm/worker/model_runner.py", "execute_model"),
            MODEL,
        ],
        "profile",
        "forward",
    ),
    "sampler-in-profile": (
        [
            ("vllm/v1/worker/gpu_worker.py", "determine_available_memory"),
            ("vllm/v1/worker/gpu_model_runner.py", "_dummy_sampler_run"),
        ],
        "profile",
        "sampler",
    ),
    "warmup-calls-execute-model": (
        [("vllm/v1/worker/gpu_worker.py", "compile_or_warm_up_model"), STEP, MODEL],
        "warmup",
        "forward",
    ),
    "capture-in-warmup": (
        [
            ("vllm/v1/worker/gpu_worker.py", "compile_or_warm_up_model"),
            ("vllm/v1/worker/gpu_model_runner.py", "capture_model"),
            ("torch/cuda/graphs.py", "capture_end"),
        ],
        "capture",
        "capture",
    ),
    "graph-estimate-in-profile": (
        [
            ("vllm/v1/worker/gpu_worker.py", "determine_available_memory"),
            ("vllm/v1/worker/gpu_model_runner.py", "profile_cudagraph_memory"),
        ],
        "capture",
        None,
    ),
    "kv-tensors": (
        [
            ("vllm/v1/worker/gpu_worker.py", "initialize_from_config"),
            ("vllm/v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors"),
        ],
        "kv_allocation",
        "kv_tensors",
    ),
    "kv-check": (
        [("vllm/v1/core/kv_cache_utils.py", "_check_enough_kv_cache_memory")],
        "kv_allocation",
        None,
    ),
    "device-init": (
        [("vllm/v1/worker/gpu_worker.py", "init_device"), ("vllm/v1/worker/utils.py", "request_memory")],
        "device_init",
        None,
    ),
    "nothing-known": ([("app.py", "main")], None, None),
    "no-frames": ([], None, None),
}


class TestReading:
    """What a traceback means."""

    @pytest.mark.parametrize("name", READINGS)
    def test_stage_and_operation(self, name: str) -> None:
        """The outermost decisive stage and the innermost decisive operation are found."""
        pairs, stage, operation = READINGS[name]
        reading = read([Frame(path, 1, function) for path, function in pairs])
        assert (reading.stage, reading.operation) == (stage, operation)

    @pytest.mark.parametrize(
        ("pairs", "shown"),
        [
            (
                [
                    STEP,
                    ("vllm/model_executor/layers/activation.py", "forward_cuda"),
                    ("torch/_ops.py", "__call__"),
                ],
                "forward_cuda",
            ),
            ([STEP, ("vllm/model_executor/layers/activation.py", "forward")], "activation.py forward"),
            ([("app.py", "main")], "main"),
            ([], None),
        ],
        ids=["innermost-that-computes", "file-where-the-name-says-nothing", "unknown", "none"],
    )
    def test_the_frame_shown(self, pairs: list[tuple[str, str]], shown: str | None) -> None:
        """The frame that is shown is the innermost that computes something."""
        assert read([Frame(path, 1, function) for path, function in pairs]).frame == shown

    def test_kinds(self) -> None:
        """Every stage and operation that the frames name is kept."""
        pairs = READINGS["mlp-inside-moe"][0]
        assert read([Frame(path, 1, function) for path, function in pairs]).kinds == {"step", "moe", "mlp"}

    @pytest.mark.parametrize(
        "path", ["torch/nn/modules/module.py", "vllm/v1/executor/uniproc_executor.py", "vllm/_custom_ops.py"]
    )
    def test_frames_that_pass_on(self, path: str) -> None:
        """Frames that only hand a call on compute nothing."""
        frame = Frame(path, 1, "__call__")
        assert passes_on(frame)
        assert operation_of(frame) is None

    def test_the_model_runner_computes_nothing(self) -> None:
        """The model runner's own frames say nothing unless the function does."""
        assert operation_of(Frame("vllm/v1/worker/gpu_model_runner.py", 1, "execute_model")) is None
        assert operation_of(Frame("vllm/v1/worker/gpu_model_runner.py", 1, "_update_states")) == "input_prep"

    def test_the_tables_use_known_names(self) -> None:
        """Every stage and operation in the tables is one of the documented ones."""
        assert set(_STAGE_FUNCTIONS.values()) <= set(STAGES)
        assert set(_OPERATION_FUNCTIONS.values()) | {operation for _, operation in _OPERATION_PATHS} <= set(
            OPERATIONS
        )


def test_a_frame_with_a_huge_number() -> None:
    """A line number of thousands of digits is no frame, and stops nothing."""
    assert frame_of(f'  File "a.py", line {"9" * 5000}, in f') is None
