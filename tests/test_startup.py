from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.records import LifeMark, MemoryParts, Record, Settings, Signal
from exporter.vllm.startup import FLAGS, RULES, SETTINGS, safe_model, setting, signals

GIB = 1 << 30


def gib(value: float) -> int:
    """GiB in bytes."""
    return round(value * GIB)


def told(text: str, file: str = "core.py", level: str = "INFO") -> list[Signal]:
    """What a record with ``text`` says."""
    lines = tuple(text.split("\n"))
    return list(signals(Record("EngineCore", 104, level, None, file, lines, tuple(range(1, len(lines) + 1)))))


def marks(found: list[Signal]) -> list[str]:
    """Kinds of the life marks."""
    return [one.kind for one in found if isinstance(one, LifeMark)]


def values(found: list[Signal]) -> dict[str, object]:
    """Settings, all together."""
    return {name: v for one in found if isinstance(one, Settings) for name, v in one.values.items()}


def memory(found: list[Signal]) -> dict[str, int]:
    """Parts of the memory, all together."""
    return {name: v for one in found if isinstance(one, MemoryParts) for name, v in one.values.items()}


ENGINE_032 = (
    "Initializing a V1 LLM engine (v0.32.0) with config: model='/models/acme-9b/', speculative_config=None, "
    "tokenizer='/models/acme-9b', trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=24576, "
    "download_dir='/srv/private', load_format=auto, tensor_parallel_size=2, pipeline_parallel_size=1, "
    "data_parallel_size=4, quantization=fp8, enforce_eager=True, kv_cache_dtype=fp8_e4m3, "
    "device_config=cuda, seed=0, served_model_name=acme, enable_prefix_caching=True, enable_chunked_prefill=True, "
    "pooler_config=None, compilation_config={'level': 3}"
)
ENGINE_V0 = (
    "Initializing an LLM engine (v0.6.6) with config: model='acme/acme-9b', "
    "speculative_config=SpeculativeConfig(draft_model='acme/draft'), dtype=torch.float16, max_seq_len=8192, "
    "tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
    "chunked_prefill_enabled=False"
)
ARGS = (
    "non-default args: {'model_tag': 'acme/acme-9b', 'host': '10.1.2.3', 'api_key': ['sk-secret'], 'model': 'acme/acme-9b', "
    "'max_model_len': 24576, 'max_num_batched_tokens': 12288, 'gpu_memory_utilization': 0.93, 'max_num_seqs': 48, "
    "'enable_lora': True, 'kv_cache_dtype': 'fp8', 'speculative_config': {'model': '/srv/private/draft'}, "
    "'kv_transfer_config': None, 'chat_template': 'secret words', 'served_model_name': ['acme-chat']}"
)
NAMESPACE = (
    "args: Namespace(subparser='serve', model_tag='acme/acme-9b', host='10.1.2.3', api_key='sk-secret', "
    "model='acme/acme-9b', max_model_len=None, max_num_batched_tokens=6144, gpu_memory_utilization=0.85, "
    "max_num_seqs=96, enforce_eager=True, enable_chunked_prefill=None, kv_transfer_config=None, swap_space=4)"
)

MARKS: dict[str, tuple[str, str, str, list[str]]] = {
    "arguments-0.9": (ARGS, "utils.py", "INFO", ["start"]),
    "namespace-0.4": (NAMESPACE, "api_server.py", "INFO", ["start"]),
    "version-line": ("vLLM API server version 0.11.0", "api_server.py", "INFO", ["start"]),
    "banner-0.14": (
        "\n       █     █\n ▄▄ ▄█ █     █  version 0.32.0\n  █▄█▀ █  model   x\n",
        "api_utils.py",
        "INFO",
        ["start"],
    ),
    "engine-v1": (ENGINE_032, "core.py", "INFO", ["engine"]),
    "engine-v0": (ENGINE_V0, "llm_engine.py", "INFO", ["engine"]),
    "budget": (
        "Chunked prefill is enabled with max_num_batched_tokens=12288.",
        "scheduler.py",
        "INFO",
        ["budget"],
    ),
    "graph-warning": (
        "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Out of memory may follow",
        "gpu_worker.py",
        "WARNING",
        ["memory_warning"],
    ),
    "graph-info": (
        "CUDA graph memory profiling is enabled (default since v0.21.0).",
        "gpu_worker.py",
        "INFO",
        [],
    ),
    "capture-v0": (
        "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider",
        "model_runner.py",
        "INFO",
        ["capturing"],
    ),
    "capture-0.6.4": (
        "Capturing cudagraphs for decoding. If out-of-memory error occurs during cudagraph capture, consider",
        "model_runner.py",
        "INFO",
        ["capturing"],
    ),
    "capture-old": (
        "Capturing the model for CUDA graphs. This may lead to unexpected consequences",
        "model_runner.py",
        "INFO",
        ["capturing"],
    ),
    "loading": ("Starting to load model acme/acme-9b...", "gpu_model_runner.py", "INFO", ["loading"]),
    "initialised": (
        "init engine (profile, create kv cache, warmup model) took 23.45 seconds",
        "core.py",
        "INFO",
        ["initialised"],
    ),
    "listening-0.7": (
        "Starting vLLM API server on http://0.0.0.0:8000",
        "api_server.py",
        "INFO",
        ["listening"],
    ),
    "listening-0.8": (
        "Starting vLLM API server 0 on http://0.0.0.0:8000",
        "api_server.py",
        "INFO",
        ["listening"],
    ),
    "listening-0.18": ("Starting vLLM server on http://0.0.0.0:8000", "entry.py", "INFO", ["listening"]),
    "ready": ("Application startup complete.", "uvicorn", "INFO", ["ready"]),
    "sleep": (
        "Sleep mode freed 61.20 GiB memory, 2.10 GiB memory is still in use.",
        "gpu_worker.py",
        "INFO",
        ["sleep"],
    ),
    "sleep-cumem": ("CuMemAllocator: sleep freed 61.20 GiB memory in total", "cumem.py", "INFO", ["sleep"]),
    "awake": (
        "It took 1.234567 seconds to wake up tags {'weights', 'kv_cache'}.",
        "abstract.py",
        "INFO",
        ["awake"],
    ),
    "stop": ("[shutdown] API server: shutdown triggered", "launcher.py", "INFO", ["stop"]),
    "stopping-uvicorn": ("Shutting down", "uvicorn", "INFO", ["stopping"]),
    "stopping-fastapi": ("Shutting down FastAPI HTTP server.", "launcher.py", "INFO", ["stopping"]),
}

PARTS: dict[str, tuple[str, dict[str, int]]] = {
    "weights-v0": ("Loading model weights took 15.1234 GB", {"weights_bytes": gib(15.1234)}),
    "weights-0.8": ("Model loading took 15.2500 GiB and 21.345678 seconds", {"weights_bytes": gib(15.25)}),
    "weights-0.8.0-unit": (
        "Model loading took 15.2500 GB and 21.345678 seconds",
        {"weights_bytes": gib(15.25)},
    ),
    "weights-0.11": (
        "Model loading took 58.2 GiB memory and 21.613420 seconds",
        {"weights_bytes": gib(58.2)},
    ),
    "kv-available": ("Available KV cache memory: 33.18 GiB", {"kv_cache_bytes": gib(33.18)}),
    "kv-negative": ("Available KV cache memory: -1.25 GiB", {"kv_cache_bytes": -gib(1.25)}),
    "kv-tokens-0.8": ("GPU KV cache size: 272,384 tokens", {"kv_cache_tokens": 272384}),
    "kv-tokens-0.28": (
        "GPU KV cache size: 548,864 tokens, Maximum concurrency for 262,144 tokens per request: 2.09x",
        {"kv_cache_tokens": 548864},
    ),
    "kv-tokens-0.30": ("GPU + host KV cache size: 1,024 tokens", {"kv_cache_tokens": 1024}),
    "blocks-v0": ("# GPU blocks: 27919, # CPU blocks: 2048", {"num_gpu_blocks": 27919}),
    "blocks-0.7": ("# cuda blocks: 1,911, # CPU blocks: 2048", {"num_gpu_blocks": 1911}),
    "blocks-v1-0.7": ("# GPU blocks: 512", {"num_gpu_blocks": 512}),
    "decomposition-0.10.2": (
        "Free memory on device (78.01/79.15 GiB) on startup. Desired GPU memory utilization is (0.92, 72.82 GiB). Actual "
        "usage is 15.27 GiB for weight, 5.71 GiB for peak activation, 0.33 GiB for non-torch memory, and 0.62 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=54000000000` to fit into requested "
        "memory, or `--kv-cache-memory=60000000000` to fully utilize gpu memory. Current kv cache memory in use is 55310876672 bytes.",
        {
            "total_bytes": gib(79.15),
            "startup_free_bytes": gib(78.01),
            "weights_bytes": gib(15.27),
            "logged_peak_activation_bytes": gib(5.71),
            "non_torch_bytes": gib(0.33),
            "cuda_graph_bytes": gib(0.62),
            "kv_cache_bytes": 55310876672,
            "kv_cache_fit_bytes": 54000000000,
        },
    ),
    "decomposition-0.28": (
        "Free memory on device cuda:0 (78.01/79.15 GiB) on startup. Desired GPU memory utilization is (0.9, 71.24 GiB). Actual "
        "usage is 16.5 GiB for consumed memory (weights + non-torch), 5.71 GiB for peak activation, and 0.62 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=52000000000` (48.43 GiB) to fit into "
        "requested memory, or `--kv-cache-memory=60000000000` (55.88 GiB) to fully utilize gpu memory. Current kv cache memory "
        "in use is 49.03 GiB.",
        {
            "total_bytes": gib(79.15),
            "startup_free_bytes": gib(78.01),
            "consumed_bytes": gib(16.5),
            "logged_peak_activation_bytes": gib(5.71),
            "cuda_graph_bytes": gib(0.62),
            "kv_cache_bytes": gib(49.03),
            "kv_cache_fit_bytes": 52000000000,
        },
    ),
    "by-hand": (
        "Initial free memory 78.01 GiB, reserved 40.00 GiB memory for KV Cache as specified by kv_cache_memory_bytes config "
        "and skipped memory profiling. This does not respect the gpu_memory_utilization config.",
        {"kv_cache_bytes": 40 * GIB},
    ),
    "profile-v0": (
        "Memory profiling takes 6.78 seconds\nthe current vLLM instance can use total_gpu_memory (23.64GiB) x "
        "gpu_memory_utilization (0.95) = 22.46GiB\nmodel weights take 14.99GiB; non_torch_memory takes 0.06GiB; PyTorch "
        "activation peak memory takes 1.26GiB; the rest of the memory reserved for KV Cache is 6.15GiB.",
        {
            "total_bytes": gib(23.64),
            "weights_bytes": gib(14.99),
            "non_torch_bytes": gib(0.06),
            "peak_activation_bytes": gib(1.26),
            "kv_cache_bytes": gib(6.15),
        },
    ),
    "profile-v0-without-its-first-line": (
        "model weights take 14.99GiB; non_torch_memory takes 0.06GiB; PyTorch activation peak memory takes 1.26GiB; the rest "
        "of the memory reserved for KV Cache is -0.75GiB.",
        {
            "weights_bytes": gib(14.99),
            "non_torch_bytes": gib(0.06),
            "peak_activation_bytes": gib(1.26),
            "kv_cache_bytes": -gib(0.75),
        },
    ),
    "profile-debug-v1": (
        "Memory profiling takes 3.21 seconds. Total non KV cache memory: 21.30GiB; torch peak memory increase: 5.42GiB; "
        "non-torch forward increase memory: 0.51GiB; weights memory: 15.27GiB.",
        {"peak_activation_bytes": gib(5.42)},
    ),
    "graph-estimate": (
        "Estimated CUDA graph memory: 1.37 GiB total",
        {"cuda_graph_estimate_bytes": gib(1.37)},
    ),
    "graph-taken": ("Graph capturing finished in 17 secs, took 0.62 GiB", {"cuda_graph_bytes": gib(0.62)}),
    "graph-taken-0.7": (
        "Graph capturing finished in 17 secs., took 0.62 GiB",
        {"cuda_graph_bytes": gib(0.62)},
    ),
}

VALUES: dict[str, tuple[str, dict[str, object]]] = {
    "arguments": (
        ARGS,
        {
            "model": "acme-chat",
            "max_model_len": 24576,
            "max_num_batched_tokens": 12288,
            "gpu_memory_utilization": 0.93,
            "max_num_seqs": 48,
            "enable_lora": True,
            "kv_cache_dtype": "fp8",
            "speculative_decoding": True,
            "kv_connector": False,
        },
    ),
    "arguments-with-drafts": (
        "non-default args: {'chat_template': 'num_speculative_tokens: 9', 'max_num_seqs': 8, "
        "'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 5}}",
        {"max_num_seqs": 8, "speculative_decoding": True, "num_speculative_tokens": 5},
    ),
    "engine-with-drafts": (
        "Initializing a V1 LLM engine (v0.32.0) with config: model='acme/acme-9b', "
        "speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=5), max_seq_len=8192",
        {
            "vllm_version": "0.32.0",
            "model": "acme/acme-9b",
            "max_model_len": 8192,
            "speculative_decoding": True,
            "num_speculative_tokens": 5,
        },
    ),
    "arguments-with-objects": (
        "non-default args: {'model': 'acme/acme-9b', 'compilation_config': CompilationConfig(level=3), "
        "'max_num_batched_tokens': 12288, 'enforce_eager': True}",
        {"model": "acme/acme-9b", "max_num_batched_tokens": 12288, "enforce_eager": True},
    ),
    "arguments-cut": (
        "non-default args: {'model': 'acme/acme-9b', 'max_num_batched_tokens': 12288, 'gpu_memory_ut",
        {"model": "acme/acme-9b", "max_num_batched_tokens": 12288},
    ),
    "namespace": (
        NAMESPACE,
        {
            "model": "acme/acme-9b",
            "max_num_batched_tokens": 6144,
            "gpu_memory_utilization": 0.85,
            "max_num_seqs": 96,
            "enforce_eager": True,
            "kv_connector": False,
            "swap_space": 4,
        },
    ),
    "version": ("vLLM API server version 0.11.0", {"vllm_version": "0.11.0"}),
    "engine-v1": (
        ENGINE_032,
        {
            "vllm_version": "0.32.0",
            "model": "acme-9b",
            "max_model_len": 24576,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 4,
            "quantization": "fp8",
            "enforce_eager": True,
            "kv_cache_dtype": "fp8_e4m3",
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "dtype": "torch.bfloat16",
            "speculative_decoding": False,
        },
    ),
    "engine-v0": (
        ENGINE_V0,
        {
            "vllm_version": "0.6.6",
            "model": "acme/acme-9b",
            "max_model_len": 8192,
            "tensor_parallel_size": 1,
            "enforce_eager": False,
            "kv_cache_dtype": "auto",
            "enable_chunked_prefill": False,
            "dtype": "torch.float16",
            "speculative_decoding": True,
        },
    ),
    "budget": (
        "Chunked prefill is enabled with max_num_batched_tokens=12288.",
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 12288},
    ),
    "budget-without-a-number": (
        "Chunked prefill is enabled (EXPERIMENTAL).",
        {"enable_chunked_prefill": True},
    ),
    "budget-0.6.5": (
        "Setting max_num_batched_tokens to 8192 for OPENAI_API_SERVER usage context.",
        {"max_num_batched_tokens": 8192},
    ),
    "scheduled": (
        "max_num_scheduled_tokens is set to 8000 based on the speculative decoding settings.",
        {"max_num_scheduled_tokens": 8000},
    ),
    "model-len": ("Using max model len 24576", {"max_model_len": 24576}),
    "auto-fit": ("Auto-fit max_model_len: reduced from 131072 to 90112 to fit", {"max_model_len": 90112}),
    "blocks-override": (
        "Overriding num_gpu_blocks=1911 with num_gpu_blocks_override=3000",
        {"num_gpu_blocks_override": 3000},
    ),
    "utilisation": (PARTS["decomposition-0.10.2"][0], {"gpu_memory_utilization": 0.92}),
    "utilisation-v0": (PARTS["profile-v0"][0], {"gpu_memory_utilization": 0.95}),
    "pool-by-hand": (PARTS["by-hand"][0], {"kv_cache_memory_bytes": 40 * GIB}),
    "device": (
        "Using default MoE config. Performance might be sub-optimal! Config file not found at "
        "/x/configs/E=8,N=14336,device_name=NVIDIA_GB10.json",
        {"device_name": "NVIDIA_GB10"},
    ),
}


class TestRules:
    """Every wording that a start prints."""

    @pytest.mark.parametrize("name", MARKS)
    def test_marks(self, name: str) -> None:
        """A line that marks a point in the life of a server is that mark."""
        text, file, level, expected = MARKS[name]
        assert marks(told(text, file, level)) == expected

    @pytest.mark.parametrize("name", PARTS)
    def test_parts_of_the_memory(self, name: str) -> None:
        """The parts of the memory are read in bytes, exactly."""
        text, expected = PARTS[name]
        assert memory(told(text, "gpu_worker.py")) == expected

    @pytest.mark.parametrize("name", VALUES)
    def test_settings(self, name: str) -> None:
        """Settings are read with their types and canonical names, and nothing else."""
        text, expected = VALUES[name]
        assert values(told(text)) == expected

    def test_the_banner_names_the_version(self) -> None:
        """The version of the banner is a setting."""
        assert values(told(MARKS["banner-0.14"][0], "api_utils.py")) == {"vllm_version": "0.32.0"}

    def test_every_rule_is_tested(self) -> None:
        """Every rule is the first to match one of the texts above."""
        texts = [(text, file) for text, file, *_ in MARKS.values()]
        texts += [(text, "core.py") for text, _ in (*PARTS.values(), *VALUES.values())]
        hit = set()
        for text, file in texts:
            for rule in RULES:
                if (not rule.files or file in rule.files) and rule.pattern.match(text.split("\n")[0]):
                    hit.add(rule.pattern.pattern)
                    break
        assert {rule.pattern.pattern for rule in RULES} - hit == set()

    @pytest.mark.parametrize("name", sorted({*MARKS, *PARTS, *VALUES}))
    def test_words_inside_a_text_mean_nothing(self, name: str) -> None:
        """The same words behind others say nothing, so a prompt says nothing."""
        text = next(table[name][0] for table in (MARKS, PARTS, VALUES) if name in table)
        first = text.strip().split("\n")[0]
        assert told(f"Received request cmpl-1: prompt: '{first}'", "other.py") == []

    @pytest.mark.parametrize(
        ("text", "file"),
        [
            ("Application startup complete.", "core.py"),
            ("Shutting down", "core.py"),
            ("\n ▄▄ ▄█ █     █  version 0.32.0", "core.py"),
        ],
        ids=["ready", "stop", "banner"],
    )
    def test_common_words_only_from_their_file(self, text: str, file: str) -> None:
        """Words that anybody may print count only from the file that prints them."""
        assert told(text, file) == []

    @pytest.mark.parametrize(
        "text",
        [
            "Free memory on device (11.5/79.18 GiB) on startup is less than desired GPU memory utilization (0.92, 72.85 GiB).",
            "Engine 000: Avg prompt throughput: 12.0 tokens/s, GPU KV cache usage: 3.0%",
            "Maximum concurrency for 32,768 tokens per request: 8.31x",
            "",
        ],
        ids=["failure", "statistics", "concurrency", "empty"],
    )
    def test_other_lines_say_nothing(self, text: str) -> None:
        """Lines that no rule knows are silent."""
        assert told(text, "gpu_worker.py") == []


class TestSettings:
    """Which settings are kept, and as what."""

    @pytest.mark.parametrize(
        ("name", "raw", "kept"),
        [
            ("max_num_batched_tokens", 8192, ("max_num_batched_tokens", 8192)),
            ("max_seq_len", "8192", ("max_model_len", 8192)),
            ("gpu_memory_utilization", "0.9", ("gpu_memory_utilization", 0.9)),
            ("chunked_prefill_enabled", "True", ("enable_chunked_prefill", True)),
            ("enforce_eager", "false", ("enforce_eager", False)),
            ("kv_cache_dtype", "'fp8'", ("kv_cache_dtype", "fp8")),
            ("kv_cache_memory", 5, ("kv_cache_memory_bytes", 5)),
            ("quantization", "None", None),
            ("quantization", "two words", None),
            ("quantization", "x" * 65, None),
            ("dtype", ["a"], None),
            ("max_model_len", None, None),
            ("kv_transfer_config", {"kv_connector": "P"}, ("kv_connector", True)),
            ("kv_transfer_config", "None", ("kv_connector", False)),
            ("speculative_config", "{}", ("speculative_decoding", False)),
            ("limit_mm_per_prompt", {"image": 2}, ("multimodal_limits", True)),
            ("api_key", "sk-secret", None),
            ("chat_template", "words", None),
        ],
        ids=lambda value: str(value)[:28],
    )
    def test_one(self, name: str, raw: object, kept: tuple[str, object] | None) -> None:
        """A setting has its canonical name and type; of structures only that they are set is kept."""
        assert setting(name, raw) == kept

    @settings(deadline=None, max_examples=150)
    @given(st.sampled_from([*SETTINGS, *FLAGS, "api_key"]), st.text(max_size=80))
    def test_free_text_is_never_kept(self, name: str, raw: str) -> None:
        """Whatever a setting holds, what is kept is a number, a truth value or one short plain word."""
        kept = setting(name, raw)
        if kept is not None and isinstance(kept[1], str):
            assert len(kept[1]) <= 64
            assert not set(kept[1]) & set(" \n\t'\"<>{}()[],;$`\\")

    @settings(deadline=None, max_examples=100)
    @given(
        st.dictionaries(
            st.sampled_from(["max_model_len", "dtype", "chat_template", "speculative_config", "model"]),
            st.one_of(st.text(max_size=40), st.integers(), st.none(), st.lists(st.text(max_size=5))),
            max_size=5,
        )
    )
    def test_arguments_keep_no_free_text(self, raw: dict[str, object]) -> None:
        """Whatever the arguments hold, only known settings and a plain model name are kept."""
        kept = values(told(f"non-default args: {raw!r}", "utils.py"))
        assert set(kept) <= {"max_model_len", "dtype", "speculative_decoding", "model"}
        assert not set("".join(str(value) for value in kept.values())) & set("\n\t'\"<>{}()[],;$`\\")

    @settings(deadline=None, max_examples=100)
    @given(st.text(max_size=120))
    def test_any_text(self, text: str) -> None:
        """No text makes a rule fail, alone or behind its words."""
        for lead in (
            "",
            "non-default args: ",
            "args: Namespace(",
            "Initializing a V1 LLM engine ",
            "Free memory on device (1/2 GiB) on startup. ",
        ):
            told(lead + text, "api_utils.py")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("acme/acme-9b", "acme/acme-9b"),
        ("/models/secret-customer/acme-9b", "acme-9b"),
        ("/models/acme-9b/", "acme-9b"),
        ("acme 9b", "acme 9b"),
        ("a\nb", None),
        ("<b>x</b>", None),
        ("x" * 121, None),
        ("", None),
        (None, None),
        (["a"], None),
    ],
    ids=["public", "path", "slash", "space", "newline", "html", "long", "empty", "none", "list"],
)
def test_model_names(name: object, shown: str | None) -> None:
    """A model name is shown where it is plain; a path loses its folders."""
    assert safe_model(name) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Available KV cache memory: 1.2.3 GiB",
        "Model loading took . GiB",
        "GPU KV cache size: , tokens",
        f"Chunked prefill is enabled with max_num_batched_tokens={'9' * 5000}.",
    ],
    ids=["two-points", "only-a-point", "only-a-comma", "thousands-of-digits"],
)
def test_damaged_numbers(text: str) -> None:
    """A number that is none is left out and stops nothing."""
    found = told(text)
    assert memory(found) == {}
    assert "max_num_batched_tokens" not in values(found)


@pytest.mark.parametrize("raw", ["nan", "inf", "-Infinity"])
def test_numbers_without_a_value(raw: str) -> None:
    """A setting that is not a finite number is not kept, as JSON has no word for it."""
    assert setting("gpu_memory_utilization", raw) is None
