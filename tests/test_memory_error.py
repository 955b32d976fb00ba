from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.vllm.memory_error import WORDINGS, human, match, to_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HINT = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def gib(value: float) -> int:
    """GiB in bytes, rounded as the reader does."""
    return round(value * GIB)


def mib(value: float) -> int:
    """MiB in bytes, rounded as the reader does."""
    return round(value * MIB)


ALLOCATOR: dict[str, tuple[str, dict[str, object]]] = {
    "torch-2.0-parenthesis": (
        "CUDA out of memory. Tried to allocate 1.25 GiB (GPU 3; 39.39 GiB total capacity; 35.50 GiB already "
        "allocated; 812.56 MiB free; 37.75 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
        "memory try setting max_split_size_mb to avoid fragmentation.",
        {
            "tried_bytes": gib(1.25),
            "gpu_index": 3,
            "total_bytes": gib(39.39),
            "allocated_bytes": gib(35.5),
            "free_bytes": mib(812.56),
            "reserved_unallocated_bytes": gib(37.75) - gib(35.5),
        },
    ),
    "torch-2.1-capacty": (
        "CUDA out of memory. Tried to allocate 470.00 MiB. GPU 1 has a total capacty of 23.69 GiB of which 301.31 "
        "MiB is free. Including non-PyTorch memory, this process has 23.38 GiB memory in use. Of the allocated "
        "memory 21.77 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
        {
            "tried_bytes": mib(470),
            "gpu_index": 1,
            "total_bytes": gib(23.69),
            "free_bytes": mib(301.31),
            "process_bytes": gib(23.38),
            "processes": ((None, gib(23.38)),),
            "allocated_bytes": gib(21.77),
            "reserved_unallocated_bytes": gib(1.02),
        },
    ),
    "torch-2.3-process-in-container": (
        "CUDA out of memory. Tried to allocate 3.83 GiB. GPU 0 has a total capacity of 79.15 GiB of which 2.11 GiB "
        "is free. Process 88321 has 77.03 GiB memory in use. Of the allocated memory 75.50 GiB is allocated by "
        f"PyTorch, and 512.06 MiB is reserved by PyTorch but unallocated. {HINT}",
        {
            "tried_bytes": gib(3.83),
            "gpu_index": 0,
            "total_bytes": gib(79.15),
            "free_bytes": gib(2.11),
            "process_bytes": gib(77.03),
            "processes": ((88321, gib(77.03)),),
            "allocated_bytes": gib(75.5),
            "reserved_unallocated_bytes": mib(512.06),
        },
    ),
    "torch-2.4-private-pools": (
        "CUDA out of memory. Tried to allocate 898.00 MiB. GPU 5 has a total capacity of 94.99 GiB of which 610.88 "
        "MiB is free. Process 41 has 2.52 GiB memory in use. Including non-PyTorch memory, this process has 91.86 "
        "GiB memory in use. Of the allocated memory 88.13 GiB is allocated by PyTorch, with 1.76 GiB allocated in "
        f"private pools (e.g., CUDA Graphs), and 233.37 MiB is reserved by PyTorch but unallocated. {HINT}",
        {
            "tried_bytes": mib(898),
            "gpu_index": 5,
            "total_bytes": gib(94.99),
            "free_bytes": mib(610.88),
            "process_bytes": gib(91.86),
            "processes": ((41, gib(2.52)), (None, gib(91.86))),
            "allocated_bytes": gib(88.13),
            "private_pool_bytes": gib(1.76),
            "reserved_unallocated_bytes": mib(233.37),
        },
    ),
    "small-units": (
        "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 15.89 GiB of which 0 bytes "
        "is free. Of the allocated memory 15.01 GiB is allocated by PyTorch, and 768.50 KiB is reserved by PyTorch "
        "but unallocated.",
        {
            "tried_bytes": 512,
            "gpu_index": 0,
            "total_bytes": gib(15.89),
            "free_bytes": 0,
            "allocated_bytes": gib(15.01),
            "reserved_unallocated_bytes": round(768.5 * KIB),
        },
    ),
    "hip": (
        "HIP out of memory. Tried to allocate 13.50 GiB. GPU 2 has a total capacity of 191.98 GiB of which 4.77 GiB "
        "is free. Of the allocated memory 180.40 GiB is allocated by PyTorch, and 2.66 GiB is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        {
            "tried_bytes": gib(13.5),
            "gpu_index": 2,
            "total_bytes": gib(191.98),
            "free_bytes": gib(4.77),
            "allocated_bytes": gib(180.4),
            "reserved_unallocated_bytes": gib(2.66),
        },
    ),
    "xpu": (
        "XPU out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 47.95 GiB. Of the allocated "
        "memory 45.90 GiB is allocated by PyTorch, and 306.61 MiB is reserved by PyTorch but unallocated. "
        "Please use `empty_cache` to release all unoccupied cached memory.",
        {
            "tried_bytes": gib(1.5),
            "gpu_index": 0,
            "total_bytes": gib(47.95),
            "allocated_bytes": gib(45.9),
            "reserved_unallocated_bytes": mib(306.61),
        },
    ),
    "npu": (
        "NPU out of memory. Tried to allocate 208.00 MiB (NPU 6; 61.27 GiB total capacity; 57.33 GiB already "
        "allocated; 57.33 GiB current active; 94.32 MiB free; 58.01 GiB reserved in total by PyTorch) If reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        {
            "tried_bytes": mib(208),
            "gpu_index": 6,
            "total_bytes": gib(61.27),
            "allocated_bytes": gib(57.33),
            "free_bytes": mib(94.32),
            "reserved_unallocated_bytes": gib(58.01) - gib(57.33),
        },
    ),
    "retyped": (
        "CUDA out of memory: tried to allocate 2,048 MiB, GPU 1 has 47.53 GiB total, 1.02 GiB free",
        {"tried_bytes": 2 * GIB, "gpu_index": 1, "total_bytes": gib(47.53), "free_bytes": gib(1.02)},
    ),
    "without-its-first-words": (
        "Tried to allocate 114.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which 60.19 MiB is free.",
        {"tried_bytes": mib(114), "gpu_index": 0, "total_bytes": gib(31.36), "free_bytes": mib(60.19)},
    ),
    "cut-in-the-middle": (
        "CUDA out of memory. Tried to allocate 114.00 MiB. GPU 0 has a total capacity of 31.36 GiB of wh",
        {"tried_bytes": mib(114), "gpu_index": 0, "total_bytes": gib(31.36)},
    ),
    "cut-in-a-number": ("CUDA out of memory. Tried to allocate 3.8", {}),
    "cut-at-once": ("CUDA out of", {}),
    "broken-over-lines": (
        "CUDA out of memory.\nTried to allocate 640.00 MiB.\nGPU 0 has a total capacity of 22.05 GiB of which "
        "101.44 MiB is free.",
        {"tried_bytes": mib(640), "gpu_index": 0, "total_bytes": gib(22.05), "free_bytes": mib(101.44)},
    ),
    "gaudi": (
        "[Rank:3] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::419430400 (400)MB",
        {"tried_bytes": 419430400},
    ),
    "tpu": (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.15G of "
        "15.75G hbm.",
        {},
    ),
}


class TestAllocator:
    """What the allocators of torch write, by version and device."""

    @pytest.mark.parametrize("name", ALLOCATOR)
    def test_every_number_is_read(self, name: str) -> None:
        """The numbers are read exactly, and what is cut off or missing is left out."""
        text, facts = ALLOCATOR[name]
        found = match(text)
        assert found is not None
        assert found.kind == "allocator"
        assert found.facts == facts

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            (
                "torch-2.4-private-pools",
                "CUDA out of memory. Tried to allocate 898.00 MiB. GPU 5 has a total capacity of 94.99 GiB of which "
                "610.88 MiB is free. The process has 91.86 GiB in use. 88.13 GiB is allocated by PyTorch. 1.76 GiB of "
                "it is in private pools. 233.37 MiB is reserved but unallocated.",
            ),
            (
                "hip",
                "HIP out of memory. Tried to allocate 13.50 GiB. GPU 2 has a total capacity of 191.98 GiB of which "
                "4.77 GiB is free. 180.40 GiB is allocated by PyTorch. 2.66 GiB is reserved but unallocated.",
            ),
            (
                "xpu",
                "XPU out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 47.95 GiB. "
                "45.90 GiB is allocated by PyTorch. 306.61 MiB is reserved but unallocated.",
            ),
            ("gaudi", "The device is out of memory. Tried to allocate 400.00 MiB."),
            ("cut-at-once", "CUDA out of memory."),
        ],
        ids=["private-pools", "hip", "no-free", "gaudi", "cut"],
    )
    def test_the_shown_text_is_rebuilt(self, name: str, shown: str) -> None:
        """What is shown is built from the numbers, not copied."""
        found = match(ALLOCATOR[name][0])
        assert found is not None
        assert found.shown == shown

    def test_fraction(self) -> None:
        """Torch 2.12 says where a limit of its own was the reason, and how much was asked for."""
        found = match(
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 2.50 GiB. GPU 0 has a total capacity of 44.40 GiB."
        )
        assert found is not None
        assert found.kind == "fraction"
        assert found.facts == {"tried_bytes": gib(2.5), "gpu_index": 0, "total_bytes": gib(44.4)}

    @settings(deadline=None, max_examples=80)
    @given(cut=st.integers(0, 700), name=st.sampled_from(sorted(ALLOCATOR.keys() - {"gaudi"})))
    def test_any_cut_reads_a_part(self, cut: int, name: str) -> None:
        """A text cut anywhere gives no number that the whole one does not have."""
        text, facts = ALLOCATOR[name]
        found = match(text[:cut])
        if found is not None:
            exact = {
                n: v for n, v in found.facts.items() if n in facts and n not in ("processes", "process_bytes")
            }
            assert exact == {n: facts[n] for n in exact}
            assert found.facts.keys() <= facts.keys() | {"process_bytes"}

    def test_a_cut_inside_the_size_of_gaudi(self) -> None:
        """A size that was cut in the middle of its digits is left out."""
        text, _ = ALLOCATOR["gaudi"]
        found = match(text[: text.index("419430400") + 2])
        assert found is not None
        assert found.facts == {}


OTHER: dict[str, tuple[str, str, dict[str, object]]] = {
    "sampler": (
        "CUDA out of memory occurred when warming up sampler with 512 dummy requests. Please try lowering "
        "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        "sampler_warmup",
        {"dummy_requests": 512},
    ),
    "pooler": (
        "CUDA out of memory occurred when warming up pooler (task='embed') with 96 dummy requests. Please try lowering",
        "pooler_warmup",
        {"dummy_requests": 96},
    ),
    "load-failed": (
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
        "weights. (original error: CUDA out of memory. Tried to allocate 230.00 MiB. GPU 0 has a total capacity of "
        "11.99 GiB of which 77.62 MiB is free.)",
        "load_failed",
        {"tried_bytes": mib(230), "gpu_index": 0, "total_bytes": gib(11.99), "free_bytes": mib(77.62)},
    ),
    "kv-no-room": (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "kv_no_room",
        {},
    ),
    "below-max-len-v1": (
        "To serve at least one request with the models's max seq len (163840), (20.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (8.25 GiB). Based on the available memory, the estimated maximum "
        "model length is 67584. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        "kv_below_max_len",
        {
            "max_model_len": 163840,
            "required_bytes": gib(20),
            "available_bytes": gib(8.25),
            "estimated_max_model_len": 67584,
        },
    ),
    "below-max-len-no-estimate": (
        "To serve at least one request with the model's max seq len (40960), (5.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (3.11 GiB).",
        "kv_below_max_len",
        {"max_model_len": 40960, "required_bytes": gib(5), "available_bytes": gib(3.11)},
    ),
    "below-max-len-v0": (
        "The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache "
        "(39872). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
        "kv_below_max_len",
        {"max_model_len": 131072},
    ),
    "startup-free": (
        "Free memory on device (20.87/23.56 GiB) on startup is less than desired GPU memory utilization (0.9, 21.2 "
        "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "startup_free",
        {"free_bytes": gib(20.87), "total_bytes": gib(23.56), "required_bytes": gib(21.2)},
    ),
    "startup-free-0.16": (
        "Free memory on device cuda:1 (11.5/79.18 GiB) on startup is less than desired GPU memory utilization (0.92, "
        "72.85 GiB).",
        "startup_free",
        {"free_bytes": gib(11.5), "total_bytes": gib(79.18), "required_bytes": gib(72.85)},
    ),
    "host-kv": (
        "Available memory on node 1 (12.5/31.25 GiB) on kv cache allocation is less than requested memory for kv "
        "(16.0 GiB).",
        "host_kv",
        {"free_bytes": gib(12.5), "total_bytes": gib(31.25), "required_bytes": gib(16)},
    ),
    "profiling": (
        "Error in memory profiling. Initial free memory 70.11 GiB, current free memory 71.99 GiB. This happens when "
        "other processes sharing the same container release GPU memory while vLLM is profiling.",
        "profiling_error",
        {},
    ),
    "workspace": (
        "Workspace is locked but allocation from 'fused_moe.py:99:apply' requires 772.50 MB, current size is 394.25 MB. "
        "Workspace growth is not allowed after locking.",
        "workspace_locked",
        {"required_bytes": mib(772.5), "workspace_bytes": mib(394.25)},
    ),
    "cumem": ("CUDA Error: out of memory at /src/csrc/cumem_allocator.cpp:139", "cumem", {}),
    "nccl-c10d": (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version "
        "2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "nccl",
        {},
    ),
    "nccl-malloc": ("Failed to CUDA calloc async 608 bytes", "nccl", {}),
    "nccl-cuda-failure": ("Cuda failure 'out of memory'", "nccl", {}),
    "cpu-allocator": (
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1342177280 bytes. Error code 12 (Cannot allocate memory)",
        "host_allocator",
        {"tried_bytes": 1342177280},
    ),
    "cpu-allocator-windows-words": (
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
        "host_allocator",
        {"tried_bytes": 4096},
    ),
    "errno-12": ("[Errno 12] Cannot allocate memory", "host_allocator", {}),
    "bad-alloc": ("std::bad_alloc", "host_allocator", {}),
    "numpy": ("Unable to allocate 6.15 GiB for an array with shape (152064, 5426)", "host_allocator", {}),
    "os-error-12": (
        "Error while deserializing header: Cannot allocate memory (os error 12)",
        "host_allocator",
        {},
    ),
    "ray": ("Task was killed due to the node running low on memory.", "ray_memory_pressure", {}),
    "sigkill": ("process 1 terminated with signal SIGKILL", "killed_by_signal", {"exit_code": -9}),
    "cublas": ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cublas", {}),
    "hipblas": ("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", "cublas", {}),
    "cudnn": ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cublas", {}),
    "driver": (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "driver",
        {},
    ),
    "driver-cumem": ("CUDA driver error: out of memory", "driver", {}),
    "driver-hip": ("HIP error: out of memory", "driver", {}),
    "driver-enum": ("cudaErrorMemoryAllocation", "driver", {}),
    "level-zero": (
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "driver",
        {},
    ),
    "level-zero-resources": (
        "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        "device_resources",
        {},
    ),
    "masked": (
        'torch_call_dispatcher( "aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed at x',
        "masked",
        {},
    ),
    "fraction": (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed",
        "fraction",
        {},
    ),
    "allocator": ("MPS backend out of memory (MPS allocated: 17.50 GB)", "allocator", {}),
}


class TestWordings:
    """Every other wording."""

    @pytest.mark.parametrize("name", OTHER)
    def test_a_wording_is_recognised(self, name: str) -> None:
        """Each text has its kind and its numbers."""
        text, kind, facts = OTHER[name]
        found = match(text)
        assert found is not None
        assert (found.kind, found.facts) == (kind, facts)

    def test_every_kind_is_tested(self) -> None:
        """The table above has every kind that the reader knows."""
        assert {kind for _, kind, _ in OTHER.values()} == {wording.kind for wording in WORDINGS}

    @pytest.mark.parametrize("name", OTHER)
    def test_the_shown_text_has_no_gap(self, name: str) -> None:
        """The rebuilt text names every number: no question mark, no brace."""
        found = match(OTHER[name][0])
        assert found is not None
        assert found.shown
        assert not set("?{}") & set(found.shown)

    @pytest.mark.parametrize(
        "around",
        [
            "Worker failed with error '{}', please check the stack trace above for the root cause",
            "Error in model execution (input dumped to /tmp/err_execute_model_input_20250104-101112.pkl): {}",
            "Error in model execution: {}",
            "torch.OutOfMemoryError: {}",
            "Worker failed with error 'torch.cuda.OutOfMemoryError: {}'",
            "1 validation error for VllmConfig\n  Value error, {}",
        ],
        ids=["worker", "v0-dump", "v0", "class", "worker-class", "pydantic"],
    )
    def test_what_vllm_puts_around(self, around: str) -> None:
        """A message inside one of vLLM's own is the same failure with the same numbers."""
        text, facts = ALLOCATOR["torch-2.3-process-in-container"]
        found = match(around.format(text))
        assert found is not None
        assert (found.kind, found.facts) == ("allocator", facts)

    @pytest.mark.parametrize(
        "text",
        [
            "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes may help.",
            "[Errno 28] No space left on device",
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "[Errno 2] No such file or directory: '/x/torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB'",
            "The adapter 'CUDA out of memory. Tried to allocate 2.00 GiB' does not exist.",
            "Free memory on device (70.1/79.2 GiB) on startup. Desired GPU memory utilization is (0.9, 71.2 GiB).",
            "CUDA error: an illegal memory access was encountered",
            "max_num_batched_tokens (2048) is smaller than max_model_len (4096).",
            "This model's maximum context length is 4096 tokens.",
            "process 7 terminated with signal SIGTERM",
            "",
        ],
        ids=[
            "shared-memory",
            "disk",
            "one-exabyte",
            "quoted-path",
            "quoted-name",
            "decomposition",
            "illegal-access",
            "config",
            "too-long",
            "sigterm",
            "empty",
        ],
    )
    def test_what_is_no_memory_failure(self, text: str) -> None:
        """Other errors, and messages that only quote a memory failure, are none."""
        assert match(text) is None

    def test_nothing_of_the_message_is_copied(self) -> None:
        """Words behind the recognised parts never reach what is shown or kept."""
        texts = [text for text, _ in ALLOCATOR.values()] + [text for text, *_ in OTHER.values()]
        for text in texts:
            found = match(text + (" SECRET prompt" if text != "CUDA out of" else ""))
            assert found is not None
            assert "SECRET" not in found.shown + repr(found.facts)

    def test_a_first_line_that_was_cut(self) -> None:
        """A message whose first line was cut after ``out of`` is read with what follows."""
        found = match("CUDA out of\nGPU 0 has a total capacity of 22.05 GiB of which 101.44 MiB is free.")
        assert found is not None
        assert found.facts["free_bytes"] == mib(101.44)

    @pytest.mark.parametrize(
        "text",
        [
            "CUDA out of memory. Tried to allocate , MiB.",
            f"CUDA out of memory. Tried to allocate {'9' * 400} MiB.",
            f"CUDA out of memory. Tried to allocate 1.00 MiB. GPU {'9' * 5000} has",
            "Free memory on device (1.2.3/79.18 GiB) on startup is less than desired",
            "Workspace is locked but allocation requires 1.2.3 MB, current size is 3 MB",
            f"CUDA out of memory occurred when warming up sampler with {'9' * 5000} dummy requests.",
        ],
        ids=["comma", "huge-size", "huge-index", "two-points", "workspace", "dummy-requests"],
    )
    def test_damaged_numbers(self, text: str) -> None:
        """A damaged number stops nothing: the failure is recognised without it."""
        found = match(text)
        assert found is not None
        assert found.facts.keys() <= {"tried_bytes", "total_bytes", "workspace_bytes"}

    @settings(deadline=None, max_examples=150)
    @given(st.text(max_size=80))
    def test_any_text_is_read(self, text: str) -> None:
        """No text makes the reader fail, in front of or behind a wording."""
        assert match("CUDA out of memory. " + text.replace("1EB", "")) is not None
        match(text)


@pytest.mark.parametrize(
    ("number", "unit", "size"),
    [
        ("3.83", "GiB", 4112431186), ("512", "bytes", 512), ("1,024", "MiB", GIB), ("~2", "G", 2 * GIB),
        ("0.5", "TiB", 1 << 39), ("768.50", "KiB", 786944), ("-1.5", "GiB", -1610612736),
    ],
    ids=["gib", "bytes", "comma", "about", "tib", "kib", "negative"],
)  # fmt: skip
def test_sizes_become_bytes(number: str, unit: str, size: int) -> None:
    """A printed size becomes bytes, rounded."""
    assert to_bytes(number, unit) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (4112431186, "3.83 GiB"), (GIB, "1.00 GiB"), (GIB - 1, "1024.00 MiB"), (2 * MIB, "2.00 MiB"),
        (1536, "1.50 KiB"), (512, "512 bytes"), (0, "0 bytes"), (-2 * GIB, "-2.00 GiB"), (None, "None"),
    ],
    ids=["two-decimals", "one-gib", "just-below", "mib", "kib", "bytes", "zero", "negative", "unknown"],
)  # fmt: skip
def test_bytes_become_text(size: object, text: str) -> None:
    """Bytes are shown as torch prints them."""
    assert human(size) == text
