from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exporter.analyze import Reader
from exporter.diagnosis.history import History
from exporter.sources.framing import CRI, MAX_LINE, RAW, Framing
from exporter.sources.scan import BLOCK, CONTEXT, HOT, WAKE, Scanner, Shape
from exporter.vllm.log import LogParser

CAPTURES = {
    path.name.removesuffix(".log.gz"): path
    for path in sorted((Path(__file__).parent / "captures").glob("*.log.gz"))
}
LATEST = datetime(2026, 12, 1, 12)
START = datetime(2026, 11, 2, 10)
SITE = "/usr/local/lib/python3.12/dist-packages"


def blocks_of(data: bytes, size: int) -> Iterable[bytes]:
    """``data`` in blocks of ``size``."""
    return (data[at : at + size] for at in range(0, len(data), size))


def scanned(data: bytes, size: int) -> tuple[History, Reader]:
    """What the fast path makes of ``data``."""
    history = History()
    reader = Reader(history, LATEST)
    for block in blocks_of(data, size):
        reader.feed(block)
    reader.finish()
    history.finish()
    return history, reader


def parsed(data: bytes) -> History:
    """What parsing every line makes of ``data``."""
    history, framing, parser = History(), Framing(), LogParser(LATEST)
    raw = data.split(b"\n")
    if not raw[-1]:
        raw.pop()
    for number, one in enumerate(raw, 1):
        for line in framing.feed(number, one):
            history.feed_all(parser.feed(line))
    for line in framing.flush():
        history.feed_all(parser.feed(line))
    history.feed_all(parser.flush())
    history.finish()
    return history


def told(history: History, steps: bool = True) -> list[object]:
    """What a history says, to be compared; without ``steps`` not what the largest step was."""
    incidents: list[object] = [
        (one.class_id, one.phase, one.fatal, one.engine, dict(one.facts), one.lines)
        for one in history.incidents()
    ]
    lives: list[object] = [
        (
            life.vllm_version,
            life.model,
            life.settings,
            life.memory,
            life.state,
            life.fingerprint,
            life.largest_step * steps,
        )
        for life in history.lives.all
        if life.started is not None or any(one.engine == life.index for one in history.incidents())
    ]
    return [incidents, lives, history.near_misses]


def same(data: bytes, size: int, steps: bool = True) -> None:
    """The fast path and parsing every line say the same, and the lines are counted."""
    history, reader = scanned(data, size)
    assert told(history, steps) == told(parsed(data), steps)
    assert reader.lines == data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert reader.bytes == len(data)


# --- what a log is made of --------------------------------------------------------------------


def record(process: str, level: str, time: datetime, file: str, text: str) -> str:
    """One log call as vLLM writes it."""
    lines = text.split("\n")
    prefix = f"({process}) {level} {time:%m-%d %H:%M:%S} [{file}] "
    return ("\r\n" + prefix).join([prefix + lines[0], *lines[1:]]) + "\n"


HOSTILE = (
    "hello\nTraceback (most recent call last):\n"
    f'  File "{SITE}/vllm/v1/worker/gpu_worker.py", line 813, in execute_model\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 66.00 GiB. GPU 6 has a total capacity of 80.00 GiB\n"
    "(EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1138] EngineCore encountered a fatal error."
)
API, ENGINE = "APIServer pid=1", "EngineCore pid=104"
FRAMES = (
    "Traceback (most recent call last):\n"
    f'  File "{SITE}/vllm/v1/engine/core.py", line 1170, in run_busy_loop\n'
    f'  File "{SITE}/vllm/v1/worker/gpu_worker.py", line 813, in execute_model\n'
    f'  File "{SITE}/vllm/model_executor/layers/activation.py", line 143, in forward_cuda\n'
    "    return self.op(x)\n"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 460.00 MiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 231.06 MiB is free. Of the allocated memory 77.60 GiB is allocated by PyTorch, and 102.00 MiB is reserved "
    "by PyTorch but unallocated."
)
DUMP = (
    "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id=cmpl-1,"
    "prompt_token_ids_len=21000,prefill_token_ids_len=None,mm_features=[],num_computed_tokens=0,lora_request=None)], "
    "scheduled_cached_reqs=CachedRequestData(req_ids=['d'],resumed_req_ids=set(),new_token_ids_lens=[],"
    "all_token_ids_lens={},new_block_ids=[None],num_computed_tokens=[9],num_output_tokens=[4]), "
    "num_scheduled_tokens={d: 1, cmpl-1: 8191}, total_num_scheduled_tokens=8192, scheduled_spec_decode_tokens={}, "
    "scheduled_encoder_inputs={}, num_common_prefix_blocks=[0])"
)

QUIET: dict[str, Callable[[datetime], str]] = {
    "access": lambda _: 'INFO:     192.0.2.7:50312 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "access-of-a-process": lambda _: f'({API}) INFO:     192.0.2.7:50312 - "GET /health HTTP/1.1" 200 OK\n',
    "request": lambda t: record(
        API, "INFO", t, "logger.py:39", f"Received request cmpl-1: prompt: '{HOSTILE}', params: x"
    ),
    "request-id": lambda t: record(API, "INFO", t, "async_llm.py:411", f"Added request {HOSTILE}."),
    "statistics": lambda t: record(
        API, "INFO", t, "loggers.py:236", "Engine 000: Avg prompt throughput: 812.3 tokens/s, Running: 3 reqs"
    ),
    "debug": lambda t: record(
        ENGINE, "DEBUG", t, "core.py:77", "EngineCore waiting. CUDA out of memory? No."
    ),
    "debug-path": lambda t: record(
        API, "DEBUG", t, "entrypoints/openai/api_server.py:77", f"JSON body: {HOSTILE}"
    ),
    "neutral": lambda t: record(ENGINE, "INFO", t, "backends.py:12", "Cache the graph of shape None"),
    "neutral-warning": lambda t: record(
        ENGINE, "WARNING", t, "vllm.py:12", "inductor was disabled\nby user settings"
    ),
    "raw": lambda _: "Triton is installed, but doesn't include CPU backend.\n",
    "progress": lambda _: (
        "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 3.20it/s]\n"
    ),
    "empty": lambda _: "\n",
}
LOUD: dict[str, Callable[[datetime], str]] = {
    "start": lambda t: (
        record(
            API,
            "INFO",
            t,
            "utils.py:233",
            "non-default args: {'model': 'acme/a', 'max_num_batched_tokens': 8192, 'gpu_memory_utilization': 0.93}",
        )
        + record(
            API, "INFO", t, "scheduler.py:240", "Chunked prefill is enabled with max_num_batched_tokens=8192."
        )
        + record(
            ENGINE,
            "INFO",
            t,
            "core.py:110",
            "Initializing a V1 LLM engine (v0.32.0) with config: model='acme/a', max_seq_len=65536, enforce_eager=False",
        )
    ),
    "sizes": lambda t: (
        record(
            ENGINE,
            "INFO",
            t,
            "gpu_model_runner.py:4880",
            "Model loading took 58.2 GiB memory and 21.613420 seconds",
        )
        + record(ENGINE, "INFO", t, "gpu_worker.py:441", "Available KV cache memory: 11.12 GiB")
    ),
    "ready": lambda _: "INFO:     Application startup complete.\n",
    "dump": lambda t: (
        record(ENGINE, "ERROR", t, "dump_input.py:79", DUMP)
        + record(
            ENGINE,
            "ERROR",
            t,
            "dump_input.py:81",
            "Dumping scheduler stats: SchedulerStats(num_running_reqs=2, num_waiting_reqs=5, kv_cache_usage=0.118)",
        )
    ),
    "fatal": lambda t: record(
        ENGINE, "ERROR", t, "core.py:1138", f"EngineCore encountered a fatal error.\n{FRAMES}{OOM}"
    ),
    "dead": lambda t: record(
        API,
        "ERROR",
        t,
        "async_llm.py:699",
        "AsyncLLM output_handler failed.\nTraceback (most recent call last):\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ),
    "worker": lambda t: record(
        "Worker_TP1 pid=116",
        "ERROR",
        t,
        "multiproc_executor.py:957",
        f"WorkerProc hit an exception.\n{FRAMES}{OOM.replace('GPU 0', 'GPU 1')}",
    ),
    "near-miss": lambda t: (
        f"[rank0]:[W{t.month}{t:%d %H:%M:%S}.034032955 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 while trying to allocate 230686720 bytes (free: 92274688, total: 85094825984).\n"
    ),
    "survived": lambda t: record(
        ENGINE,
        "ERROR",
        t,
        "core.py:900",
        f"Invocation of add_lora method failed\n{FRAMES.replace('execute_model', 'add_lora')}{OOM}",
    ),
    "startup-failure": lambda t: record(
        ENGINE,
        "ERROR",
        t,
        "core.py:1130",
        "EngineCore failed to start.\nTraceback (most recent call last):\n"
        f'  File "{SITE}/vllm/v1/core/kv_cache_utils.py", line 9, in check_enough_kv_cache_memory\nValueError: No available memory for the cache blocks. Try increasing',
    ),
    "sleep": lambda t: record(
        ENGINE,
        "INFO",
        t,
        "gpu_worker.py:88",
        "Sleep mode freed 61.20 GiB memory, 2.10 GiB memory is still in use.",
    ),
    "stop": lambda t: (
        record(API, "INFO", t, "launcher.py:99", "[shutdown] API server: shutdown triggered")
        + "INFO:     Shutting down\n"
    ),
    "killed": lambda _: (
        "[Mon Nov  2 10:04:11 2026] Memory cgroup out of memory: Killed process 30412 (VLLM::EngineCor) total-vm:9kB\n"
    ),
}


def step(time: datetime, tokens: int) -> str:
    """The line of ``--enable-logging-iteration-details`` on a step that succeeded."""
    text = (
        f"Engine 000: Iteration(9): 1 context requests, {tokens - 2} context tokens, 2 generation requests, "
        "2 generation tokens, iteration elapsed time: 9.55 ms, GPU KV cache usage: 1.3%"
    )
    return record(API, "INFO", time, "loggers.py:199", text)


def glued(time: datetime) -> str:
    """A failure that lost the newline behind an access line."""
    access = 'INFO:     192.0.2.1:57224 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    return access + LOUD["fatal"](time)


RAW_TRACEBACK = FRAMES + OOM + "\n"


def log_of(steps: list[tuple[str, int]], lead: str, wrap: Callable[[str], str] = str) -> bytes:
    """A log of ``steps``: a name of a piece and the seconds before it. ``lead`` fills the part that is read whole."""
    time, parts = START, []
    fill = {"neutral": "neutral", "quiet": "statistics"}.get(lead)
    if fill is not None:
        parts = [QUIET[fill](time)] * (HOT // 70)
    for name, seconds in steps:
        time += timedelta(seconds=seconds + 5 * (name == "start"))
        parts.append((QUIET | LOUD)[name](time))
    lines = "".join(parts).split("\n")
    return "\n".join([*(wrap(line) for line in lines[:-1]), lines[-1]]).encode()


MATTERS = sorted(LOUD.keys() - {"killed"})  # a line without a clock: see test_a_line_without_a_clock
STEPS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(sorted(QUIET)), st.sampled_from([*QUIET, *MATTERS]), st.sampled_from(MATTERS)
        ),
        st.sampled_from([0, 0, 1, 7, 400]),
    ),
    max_size=25,
)
WRAPS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "cri": lambda line: f"2026-11-02T10:00:00.123456789Z stdout F {line}",
    "compose": lambda line: f"vllm-1  | {line}",
    "journald": lambda line: f"Nov  2 10:00:00 node-7 vllm[812]: {line}",
    "coloured": lambda line: line.replace("(APIServer pid=1)", "\x1b[0;36m(APIServer pid=1)\x1b[0;0m"),
}


WORDINGS = [
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("RuntimeError", "NPU out of memory. Tried to allocate 208.00 MiB (NPU 6; 61.27 GiB total capacity;"),
    ("RuntimeError", "CUDA error: out of memory"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    ("RuntimeError", "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    (
        "RuntimeError",
        'torch_call_dispatcher( "aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed',
    ),
    (
        "RuntimeError",
        "[Rank:3] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::419430400 (400)MB",
    ),
    ("RuntimeError", "Workspace is locked but allocation requires 772.50 MB, current size is 394.25 MB."),
    ("RuntimeError", "NCCL error: unhandled cuda error\nLast error:\nCuda failure 'out of memory'"),
    (
        "torch.distributed.DistBackendError",
        "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes",
    ),
    ("RuntimeError", "std::bad_alloc"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("MemoryError", ""),
    ("torch.multiprocessing.spawn.ProcessExitedException", "process 1 terminated with signal SIGKILL"),
]


class TestEquivalence:
    """The fast path says what parsing every line says."""

    @settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
    @given(steps=STEPS, lead=st.sampled_from(["none", "neutral", "quiet"]))
    def test_any_mixture(self, steps: list[tuple[str, int]], lead: str) -> None:
        """For any mixture of lines both say the same."""
        same(log_of(steps, lead), BLOCK)

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(
        steps=STEPS, size=st.sampled_from([61, 997, 8191]), lead=st.sampled_from(["none", "neutral", "quiet"])
    )
    @example(steps=[("fatal", 0), ("dump", 0)], size=61, lead="none")
    def test_any_block(self, steps: list[tuple[str, int]], size: int, lead: str) -> None:
        """For any size of block both say the same."""
        same(log_of(steps, lead), size)

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(steps=STEPS, name=st.sampled_from(sorted(WRAPS)))
    def test_any_wrapper(self, steps: list[tuple[str, int]], name: str) -> None:
        """Inside any wrapper both say the same."""
        same(log_of(steps, "neutral", WRAPS[name]), BLOCK)

    @pytest.mark.parametrize("name", sorted(LOUD))
    @pytest.mark.parametrize("size", [61, BLOCK])
    def test_each_piece_behind_a_long_quiet_log(self, name: str, size: int) -> None:
        """Each kind of line that matters is found behind many that do not."""
        steps = [
            ("start", 0),
            ("ready", 9),
            *[("access", 0), ("neutral", 1)] * 900,
            (name, 5),
            *[("statistics", 10)] * 300,
        ]
        same(log_of(steps, "neutral"), size)

    def test_a_line_without_a_clock(self) -> None:
        """A line without a clock has the time of the line before it, also where that one is skipped."""
        data = log_of([("start", 0), ("ready", 9), *[("statistics", 10)] * 360, ("killed", 0)], "neutral")
        (incident,) = scanned(data, BLOCK)[0].incidents()
        assert incident.time == START + timedelta(seconds=3614)

    def test_lines_far_apart(self) -> None:
        """A line that no logger wrote, hours before the failure, is no part of it."""
        data = log_of(
            [("start", 0), ("neutral", 5), ("raw", 9), *[("statistics", 10)] * 360, ("killed", 0)], "neutral"
        )
        same(data, BLOCK)

    @pytest.mark.parametrize("lead", ["neutral", "quiet"])
    def test_a_raw_traceback_behind_a_long_quiet_log(self, lead: str) -> None:
        """A traceback that no logger wrote is found whole though its word stands last."""
        data = log_of([("start", 0), ("ready", 9), *[("neutral", 1)] * 1500], lead)
        data += RAW_TRACEBACK.encode() + log_of([("access", 0)] * 50, "none")
        same(data, BLOCK)
        (incident,) = scanned(data, BLOCK)[0].incidents()
        assert incident.facts["frame"] == "forward_cuda"

    def test_a_last_line_without_a_newline(self) -> None:
        """A last line that does not end is read and counted."""
        same(log_of([("start", 0), ("fatal", 9)], "neutral").rstrip(b"\n"), 997)

    DENSE = tuple(100 + n * 37 % 4001 for n in range(3000))

    def dense(self) -> bytes:
        """A log that is full of step lines, one a second."""
        steps = "".join(
            step(START + timedelta(seconds=n + 20), tokens) for n, tokens in enumerate(self.DENSE)
        )
        return log_of([("start", 0), ("neutral", 5), ("ready", 9)], "neutral") + steps.encode()

    @pytest.mark.parametrize("size", [61, BLOCK])
    def test_dense_steps(self, size: int) -> None:
        """Where a log is full of step lines, the largest step is known."""
        assert parsed(self.dense()).lives.current.largest_step == max(self.DENSE)
        assert scanned(self.dense(), size)[0].lives.current.largest_step == max(self.DENSE)

    def test_dense_steps_are_not_parsed(self) -> None:
        """Step lines are summed up, and only their clocks are given out."""
        scanner = Scanner()
        head = log_of([("neutral", 0)] * 10, "neutral")
        list(scanner.feed(head))
        steps = [line for line in self.dense().splitlines(keepends=True) if b": Iteration(" in line]
        out = list(scanner.feed(b"".join(steps[:1000] * 3)))
        assert sum(len(traffic.steps) for *_, traffic in out if traffic) == 3000
        assert not any(b"Iteration(" in text for _, text, _ in out)

    def test_the_steps_of_two_lives_in_one_block(self) -> None:
        """A smaller step of a later life is known though a larger one of the life before stands near."""
        data = (
            log_of([("start", 0), ("ready", 9)], "neutral")
            + "".join(step(START + timedelta(seconds=20 + n), 8000 - n) for n in range(200)).encode()
            + log_of([("fatal", 300), ("start", 9), ("ready", 9)], "none")
            + "".join(step(START + timedelta(seconds=400 + n), 300 + n) for n in range(50)).encode()
        )
        same(data, BLOCK)
        assert [life.largest_step for life in scanned(data, BLOCK)[0].lives.all] == [8000, 349]

    def test_sparse_steps(self) -> None:
        """Where step lines are few among access lines, the largest step is known too."""
        data = log_of([("start", 0), ("ready", 9), *[("neutral", 1)] * 1500], "neutral")
        data += (
            log_of([("access", 0)] * 9000, "none")
            + step(START + timedelta(seconds=3000), 4000).encode()
            + log_of([("access", 0)] * 9000, "none")
        )
        assert parsed(data).lives.current.largest_step == 4000
        assert scanned(data, BLOCK)[0].lives.current.largest_step == 4000

    @pytest.mark.parametrize(
        "size",
        [
            61,
            BLOCK,
        ],
    )
    def test_glued_behind_a_quiet_log(self, size: int) -> None:
        """A failure that lost its newline behind an access line is found from its first line on."""
        data = log_of([("start", 0), ("neutral", 5), ("ready", 9)], "neutral") + log_of(
            [("access", 0)] * 3000, "none"
        )
        same(data + glued(START).encode() + log_of([("access", 0)] * 100, "none"), size)

    def test_glued_in_a_noisy_log(self) -> None:
        """The same holds where most lines are neutral."""
        data = log_of([("start", 0), ("ready", 9), *[("neutral", 0)] * 3000], "neutral")
        same(data + glued(START).encode() + log_of([("neutral", 0)] * 100, "none"), BLOCK)

    @pytest.mark.parametrize(("cls", "text"), WORDINGS, ids=lambda value: value[:40])
    def test_every_wording_is_found(self, cls: str, text: str) -> None:
        """A traceback that no logger wrote is found by its message alone, behind a long quiet log."""
        data = log_of([("start", 0), ("ready", 9), *[("neutral", 1)] * 4000], "neutral")
        data += f"{FRAMES}{cls}: {text}\n".encode()
        history = scanned(data, BLOCK)[0]
        assert len(history.incidents()) == 1
        assert told(history) == told(parsed(data))

    @pytest.mark.parametrize("name", CAPTURES)
    def test_captures(self, name: str) -> None:
        """On every real log, alone in small blocks or behind a long one in odd ones, both say the same."""
        data = gzip.decompress(CAPTURES[name].read_bytes())
        same(data, 997, steps=False)
        same(log_of([], "neutral") + data, 65_521, steps=False)

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            ("iterdetails_16384", BLOCK),
            ("mlp_iterdetails_16384", BLOCK),
            ("hostile_debug_uni_iter", BLOCK),
            ("lifecycle_iter_mp", BLOCK),
            ("lifecycle_iter_mp", 65_521),
            ("json_clean", BLOCK),
        ],
    )
    def test_steps_of_captures(self, name: str, size: int) -> None:
        """The largest step of every life of a real log is known behind a long log."""
        same(log_of([], "neutral") + gzip.decompress(CAPTURES[name].read_bytes()), size)


class TestHostile:
    """What is skipped never counts, and costs nothing."""

    @pytest.mark.parametrize("name", sorted(QUIET))
    def test_quiet_lines_give_no_incident(self, name: str) -> None:
        """Lines that matter to nobody give nothing, wherever they stand."""
        data = log_of([(name, 1)] * 40, "none") + log_of([(name, 1)] * 40, "neutral")
        assert scanned(data, BLOCK)[0].incidents() == []

    @pytest.mark.parametrize(
        "name",
        ["access", "access-of-a-process", "request", "request-id", "statistics", "debug", "debug-path"],
    )
    def test_skipped_lines_are_not_given_out(self, name: str) -> None:
        """Access lines, statistics and what repeats a client's text are not even parsed."""
        scanner = Scanner()
        data = log_of([(name, 1)] * 500, "none")
        assert list(scanner.feed(data)) + list(scanner.finish()) == []
        assert scanner.lines == data.count(b"\n")

    def test_neutral_lines_are_kept_aside(self) -> None:
        """Behind the beginning of a log, lines without a word that matters are not given out."""
        scanner = Scanner()
        list(scanner.feed(log_of([], "neutral") * 2))
        assert list(scanner.feed(log_of([("neutral", 1)] * 500, "none"))) == []

    def test_a_word_brings_its_context(self) -> None:
        """Around a word that matters the lines before and behind are given out, with their numbers."""
        scanner = Scanner()
        quiet = log_of([], "neutral") * 2
        list(scanner.feed(quiet))
        before = quiet.count(b"\n")
        out = list(scanner.feed(RAW_TRACEBACK.encode() + b"after\n"))
        assert out[-1] == (before + 7, b"after", None)
        assert [one[:2] for one in out[-7:]] == list(
            enumerate([*RAW_TRACEBACK.encode().split(b"\n")[:-1], b"after"], before + 1)
        )
        assert [number for number, *_ in out] == sorted({number for number, *_ in out})
        assert sum(len(line) + 1 for _, line, _ in out) <= CONTEXT + len(RAW_TRACEBACK) + 200


class TestBounds:
    """Memory and lines."""

    @pytest.mark.parametrize("size", [1 << 16, BLOCK])
    def test_a_line_without_an_end(self, size: int) -> None:
        """Ten megabytes without a newline hold a few, and head and tail come out at the end."""
        scanner = Scanner()
        data = b"<head>" + b"x" * (10 << 20) + b"<tail>"
        tracemalloc.start()
        try:
            for block in blocks_of(data, size):
                assert list(scanner.feed(block)) == []
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 6 * MAX_LINE
        ((number, line, _),) = scanner.finish()
        assert number == 1
        assert line.startswith(b"<head>x")
        assert line.endswith(b"x<tail>")
        assert len(line) <= 3 * MAX_LINE
        assert (scanner.lines, scanner.bytes, scanner.truncated) == (1, len(data), 1)

    def test_endless_pieces(self) -> None:
        """Fifty megabytes of pieces of one line never hold more than a few."""
        history = History()
        reader = Reader(history, LATEST)
        block = (b"2026-11-02T10:00:00.1Z stdout P " + b"memory " * 2338 + b"\n") * 16
        tracemalloc.start()
        try:
            for _ in range((50 << 20) // len(block) + 1):
                reader.feed(block)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        reader.finish()
        history.finish()
        assert reader.bytes > 50 << 20
        assert peak < 16 * MAX_LINE
        assert reader.truncated > 0
        assert history.incidents() == []

    @settings(deadline=None, max_examples=80)
    @given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 64))
    def test_any_bytes(self, lines: list[bytes], size: int) -> None:
        """Whatever the bytes, nothing is raised, lines and bytes are counted, numbers rise."""
        data = b"\n".join(lines)
        scanner = Scanner()
        out = [one for block in blocks_of(data, size) for one in scanner.feed(block)] + list(scanner.finish())
        numbers = [number for number, *_ in out]
        assert numbers == sorted(set(numbers))
        assert all(data.split(b"\n")[number - 1] == line for number, line, _ in out)
        assert scanner.lines == data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        assert scanner.bytes == len(data)

    def test_lines_are_counted_in_a_noisy_log(self) -> None:
        """Where most lines are neutral they are counted all the same."""
        scanner = Scanner()
        data = b"one neutral line of a library\n" * 100_000
        for block in blocks_of(data, BLOCK):
            list(scanner.feed(block))
        list(scanner.finish())
        assert scanner.lines == 100_000


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (b"(EngineCore pid=4) INFO 11-02 10:00:00 [core.py:1] x\n", Shape(RAW, False, False)),
        (
            b"\x1b[0;36m(EngineCore pid=4)\x1b[0;0m INFO 11-02 10:00:00 [core.py:1] x\n",
            Shape(RAW, True, False),
        ),
        (b"(EngineCore pid=4) DEBUG 11-02 10:00:00 [v1/engine/core.py:1] x\n", Shape(RAW, False, True)),
        (b"2026-11-02T10:00:00.1Z stdout F INFO 11-02 10:00:00 [core.py:1] x\n", Shape(CRI, False, False)),
    ],
    ids=["plain", "coloured", "debug", "cri"],
)
def test_the_shape_of_a_block(data: bytes, shape: Shape) -> None:
    """Wrapper, colours and folders of a block are seen in its first lines."""
    assert Shape.of(b"\n" + data) == shape


def test_words_are_no_parts_of_one_another() -> None:
    """No word that wakes the parser contains another one, which would be a slower scan for nothing."""
    assert [(a, b) for a in WAKE for b in WAKE if a != b and a in b] == []
