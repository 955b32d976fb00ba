from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar

import pytest

from exporter.diagnosis.history import History
from exporter.records import Incident, Line
from exporter.vllm.log import LogParser

START = datetime(2026, 11, 2, 10)
LATEST = datetime(2026, 11, 30)
SITE = "/usr/local/lib/python3.12/dist-packages"
ENGINE, API, WORKER0, WORKER1 = (
    "EngineCore pid=104",
    "APIServer pid=1",
    "Worker_TP0 pid=115",
    "Worker_TP1 pid=116",
)


def at(seconds: float, process: str, level: str, file: str, text: str) -> list[str]:
    """One log call, ``seconds`` after the start of the log."""
    prefix = f"({process}) {level} {START + timedelta(seconds=seconds):%m-%d %H:%M:%S} [{file}] "
    lines = text.split("\n")
    return [prefix + line + "\r" for line in lines[:-1]] + [prefix + lines[-1]]


def frames(*pairs: tuple[str, str]) -> str:
    """A traceback up to its last frame."""
    return "Traceback (most recent call last):\n" + "".join(
        f'  File "{SITE}/{path}", line 10, in {function}\n' for path, function in pairs
    )


STEP = ("vllm/v1/worker/gpu_worker.py", "execute_model")
MLP = ("vllm/model_executor/layers/activation.py", "forward_cuda")
LORA = ("vllm/v1/worker/gpu_worker.py", "add_lora")


def oom(tried: str = "460.00 MiB", free: str = "231.06 MiB", gpu: int = 0) -> str:
    """Torch's message."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity of 79.15 GiB "
        f"of which {free} is free. Of the allocated memory 77.60 GiB is allocated by PyTorch, and 102.00 MiB is reserved by "
        "PyTorch but unallocated."
    )


def start(seconds: float = 0, tokens: int = 8192) -> list[str]:
    """A healthy start."""
    return [
        *at(
            seconds,
            API,
            "INFO",
            "utils.py:233",
            f"non-default args: {{'model': 'acme/a', 'max_num_batched_tokens': {tokens}}}",
        ),
        *at(
            seconds,
            API,
            "INFO",
            "scheduler.py:240",
            f"Chunked prefill is enabled with max_num_batched_tokens={tokens}.",
        ),
        *at(
            seconds + 5,
            ENGINE,
            "INFO",
            "core.py:110",
            "Initializing a V1 LLM engine (v0.32.0) with config: model='acme/a', max_seq_len=65536",
        ),
        *at(seconds + 30, ENGINE, "INFO", "gpu_worker.py:441", "Available KV cache memory: 11.12 GiB"),
        *at(seconds + 40, API, "INFO", "entry.py:140", "Starting vLLM server on http://0.0.0.0:8000"),
    ]


def worker(
    seconds: float,
    process: str = WORKER0,
    message: str = "",
    *,
    pairs: tuple[tuple[str, str], ...] = (STEP, MLP),
) -> list[str]:
    """A worker's report of a failed step."""
    return at(
        seconds,
        process,
        "ERROR",
        "multiproc_executor.py:957",
        f"WorkerProc hit an exception.\n{frames(*pairs)}{message or oom()}",
    )


def fatal(
    seconds: float, message: str = "", *, head: str = "EngineCore encountered a fatal error."
) -> list[str]:
    """The engine's last words."""
    return at(seconds, ENGINE, "ERROR", "core.py:1138", f"{head}\n{frames(STEP, MLP)}{message or oom()}")


def dead(seconds: float, process: str = API) -> list[str]:
    """The API server notices."""
    return at(
        seconds,
        process,
        "ERROR",
        "async_llm.py:699",
        "AsyncLLM output_handler failed.\nTraceback (most recent call last):\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
    )


def dump(seconds: float, scheduled: int = 8192) -> list[str]:
    """The scheduler dump of a step of one new prompt."""
    return [
        *at(
            seconds,
            ENGINE,
            "ERROR",
            "dump_input.py:72",
            "Dumping input data for V1 LLM engine (v0.32.0) with config: model='acme/a', ",
        ),
        *at(
            seconds,
            ENGINE,
            "ERROR",
            "dump_input.py:79",
            "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id=cmpl-1,"
            "prompt_token_ids_len=21000,prefill_token_ids_len=None,mm_features=[],num_computed_tokens=0,lora_request=None)], "
            "scheduled_cached_reqs=CachedRequestData(req_ids=[],resumed_req_ids=set(),new_token_ids_lens=[],all_token_ids_lens={},"
            f"new_block_ids=[],num_computed_tokens=[],num_output_tokens=[]), num_scheduled_tokens={{cmpl-1: {scheduled}}}, "
            f"total_num_scheduled_tokens={scheduled}, scheduled_spec_decode_tokens={{}}, scheduled_encoder_inputs={{}})",
        ),
        *at(
            seconds,
            ENGINE,
            "ERROR",
            "dump_input.py:81",
            "Dumping scheduler stats: SchedulerStats(num_running_reqs=1, num_waiting_reqs=6, kv_cache_usage=0.07)",
        ),
    ]


def survived(seconds: float) -> list[str]:
    """A LoRA adapter that did not fit; the engine goes on."""
    return at(
        seconds,
        ENGINE,
        "ERROR",
        "core.py:900",
        f"Invocation of add_lora method failed\n{frames(LORA)}{oom('96.00 MiB', '11.00 MiB')}",
    )


def warning(seconds: float, tried: int = 460 << 20, device: int = 0) -> list[str]:
    """Torch's warning that it tries again."""
    time = START + timedelta(seconds=seconds)
    return [
        f"[rank{device}]:[W{time:%m%d %H:%M:%S}.034032955 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on "
        f"device {device} while trying to allocate {tried} bytes (free: 92274688, total: 85094825984)."
    ]


def later(seconds: float) -> list[str]:
    """A harmless line, so that the clock goes on."""
    return at(seconds, API, "INFO", "x.py:1", "all is well")


def run(*parts: list[str]) -> History:
    """The history of a log."""
    history, parser = History(), LogParser(LATEST)
    for number, text in enumerate([line for part in parts for line in part], 1):
        stripped = text.rstrip("\r")
        history.feed_all(parser.feed(Line(number, stripped, None, "", len(text) - len(stripped))))
    history.feed_all(parser.flush())
    history.finish()
    return history


def only(*parts: list[str]) -> Incident:
    """The one incident of a log."""
    (incident,) = run(*parts).incidents()
    return incident


class TestOneFailureIsOneIncident:
    """However many ranks, processes and requests repeat it."""

    REPEATS: ClassVar = {
        "engine-alone": [fatal(100)],
        "engine-and-server": [fatal(100), dead(100)],
        "dump-first": [dump(100), fatal(100), dead(100)],
        "two-ranks": [
            worker(100),
            worker(100, WORKER1, oom(gpu=1)),
            dump(100),
            fatal(
                100,
                "RuntimeError: Worker failed with error 'CUDA out of memory.', please check the stack trace above",
            ),
            dead(100),
        ],
        "ranks-a-second-apart": [worker(100), worker(101, WORKER1, oom(gpu=1)), fatal(102), dead(103)],
        "another-rank-seconds-later": [
            worker(100),
            later(104),
            worker(105, WORKER1, oom("500.00 MiB", gpu=1)),
            fatal(106),
        ],
        "repeated-within-ten-seconds": [worker(100), later(103), fatal(105), dead(106)],
        "several-servers": [
            fatal(100),
            dead(100, "ApiServer_0 pid=1"),
            dead(100, "ApiServer_1 pid=2"),
            dead(130, "ApiServer_2 pid=3"),
        ],
        "chained": [
            fatal(
                100,
                f"{oom()}\n\nThe above exception was the direct cause of the following exception:\n\n{frames(STEP)}RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 460.00 MiB.'",
            )
        ],
        "printed-again-by-the-interpreter": [
            fatal(100),
            ["Process EngineCore:", *frames(STEP, MLP).splitlines(), oom()],
            dead(101),
        ],
        "hang-of-one-rank": [
            worker(100),
            later(160),
            dump(400),
            fatal(400, "TimeoutError: RPC call to execute_model timed out."),
            dead(400),
        ],
        "the-killer-and-the-death": [
            [
                "[Mon Nov  2 10:01:40 2026] Memory cgroup out of memory: Killed process 30412 (VLLM::EngineCor)"
            ],
            at(
                100,
                API,
                "ERROR",
                "core_client.py:7",
                "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
            ),
            dead(101),
        ],
    }

    @pytest.mark.parametrize("name", REPEATS)
    def test_one(self, name: str) -> None:
        """All reports of one failure are one fatal incident of the serving engine."""
        history = run(start(), later(90), *self.REPEATS[name])
        (incident,) = history.incidents()
        assert (incident.phase, incident.fatal, incident.engine) == ("serving", True, 0)
        assert history.lives.current.state == "dead"

    def test_ranks(self) -> None:
        """All ranks are named; the numbers are those of the rank with the least free memory."""
        incident = only(
            start(),
            worker(100, WORKER0, oom(free="231.06 MiB")),
            worker(100, WORKER1, oom(free="77.50 MiB", gpu=1)),
            fatal(100),
        )
        assert incident.facts["ranks"] == [0, 1]
        assert incident.facts["free_bytes"] == round(77.5 * (1 << 20))
        assert incident.facts["gpu_index"] == 1

    def test_a_later_report_of_another_size_changes_no_number(self) -> None:
        """A report of another allocation does not replace the numbers of the first."""
        incident = only(
            start(), worker(100), worker(100, WORKER1, oom("2.00 MiB", "1.00 MiB", 1)), fatal(100)
        )
        assert incident.facts["tried_bytes"] == 460 << 20

    def test_lines(self) -> None:
        """An incident runs from its first line to its last."""
        begin = start()
        incident = only(begin, worker(100), dump(100), fatal(100), later(110))
        # of the engine's last words the line that names the exception, which is its last
        total = sum(map(len, (begin, worker(100), dump(100), fatal(100))))
        assert incident.lines == (len(begin) + 1, total)

    def test_the_identity_is_of_the_log_alone(self) -> None:
        """The same log gives the same identity, another failure another one."""
        assert only(start(), fatal(100)).id == only(start(), fatal(100)).id
        assert only(start(), fatal(100)).id != only(start(), fatal(101)).id


class TestTwoFailuresAreTwo:
    """What must not be put together."""

    def test_two_lives(self) -> None:
        """The same failure in two lives is two incidents, each of its life."""
        history = run(start(), fatal(100), dead(100), start(200), fatal(300), dead(300))
        assert [incident.engine for incident in history.incidents()] == [0, 1]
        assert [life.state for life in history.lives.all] == ["dead", "dead"]

    @pytest.mark.parametrize("seconds", [8, 45, 3600])
    def test_a_failure_before_the_first_start(self, seconds: float) -> None:
        """A failure without a time, left by a server of which nothing else is in the log, is of no later one."""
        history = run([oom("1.00 GiB")], start(), fatal(seconds), dead(seconds))
        first, second = history.incidents()
        assert (first.engine, second.engine, len(history.lives.all)) == (0, 1, 2)
        assert (first.facts["tried_bytes"], second.facts["tried_bytes"]) == (1 << 30, 460 << 20)
        assert (first.fatal, second.fatal, second.class_id) == (True, True, "prefill_budget")

    def test_a_late_failure_without_a_time(self) -> None:
        """What has no time of its own is not older than the line before it: hours later it is another failure."""
        history = run(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()), later(9000), [oom()], later(9010))
        assert len(history.incidents()) == 2
        history = run(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()), later(102), [oom()], later(110))
        assert len(history.incidents()) == 1

    def test_two_survived_calls(self) -> None:
        """Two adapters that do not fit are two incidents that the engine survived."""
        history = run(start(), survived(100), later(103), survived(110), later(130))
        assert [(one.class_id, one.fatal) for one in history.incidents()] == [
            ("lora", False),
            ("lora", False),
        ]
        assert history.lives.current.state == "serving"

    def test_a_survived_call_and_a_death(self) -> None:
        """A call that was survived and a death afterwards are two incidents."""
        history = run(start(), survived(100), later(103), dump(200), fatal(200), dead(200))
        assert [(one.class_id, one.fatal) for one in history.incidents()] == [
            ("lora", False),
            ("prefill_budget", True),
        ]

    def test_a_dump_stays_with_its_failure(self) -> None:
        """The dump of a death says nothing of a call that was survived before."""
        first, second = run(start(), survived(100), later(103), dump(200), fatal(200), dead(200)).incidents()
        assert "step_tokens" not in first.facts
        assert second.facts["step_tokens"] == 8192


class TestSurvived:
    """Failures that the engine says it goes on after."""

    @pytest.mark.parametrize("process", [API, ENGINE], ids=["server", "engine"])
    def test_a_request_that_failed(self, process: str) -> None:
        """One request whose image did not fit did not kill the engine."""
        text = (
            "Unexpected error pre-processing request cmpl-1\n"
            + frames(("vllm/model_executor/models/clip.py", "forward"))
            + oom()
        )
        incident = only(start(), at(100, process, "ERROR", "core.py:9", text), later(130))
        assert (incident.class_id, incident.fatal) == ("multimodal_encoder", False)

    def test_a_worker_reports_first(self) -> None:
        """A worker's report of the same call belongs to it, and the engine goes on."""
        history = run(
            start(),
            worker(100, pairs=(LORA,), message=oom("96.00 MiB", "11.00 MiB")),
            survived(100),
            later(130),
        )
        (incident,) = history.incidents()
        assert (incident.class_id, incident.fatal) == ("lora", False)
        assert history.lives.current.state == "serving"

    def test_a_later_dump_of_another_failure(self) -> None:
        """A dump does not go to a call that the engine outlived."""
        call = worker(100, pairs=(LORA,), message=oom("96.00 MiB", "11.00 MiB"))
        first, second = run(
            start(), call, survived(100), later(103), dump(200), fatal(200), dead(200)
        ).incidents()
        assert "step_tokens" not in first.facts
        assert second.facts["step_tokens"] == 8192


class TestNoIncident:
    """What is none."""

    QUIET: ClassVar = {
        "a-healthy-start": [start()],
        "a-death-without-memory": [
            start(),
            fatal(100, "RuntimeError: CUDA error: an illegal memory access was encountered"),
            dead(100),
        ],
        "a-stop": [
            start(),
            at(100, API, "INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered"),
            dead(100),
        ],
        "a-kill-on-the-way-down": [
            start(),
            at(100, API, "INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered"),
            at(
                101,
                API,
                "ERROR",
                "x.py:1",
                "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            ),
        ],
        "a-kill-after-another-death": [
            start(),
            fatal(100, "AssertionError: x"),
            at(
                101,
                API,
                "ERROR",
                "x.py:1",
                "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            ),
        ],
        "no-exit-code": [
            start(),
            at(
                100,
                API,
                "ERROR",
                "x.py:1",
                "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.",
            ),
            dead(101),
        ],
        "a-crash": [
            start(),
            at(
                100,
                API,
                "ERROR",
                "x.py:1",
                "Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.",
            ),
            dead(101),
        ],
        "a-dump-alone": [start(), dump(100), fatal(100, "ValueError: bad shape")],
        "an-error-of-the-front-end": [
            start(),
            at(100, API, "ERROR", "serving_chat.py:9", f"Error in preprocessing\n{frames(STEP)}{oom()}"),
        ],
    }

    @pytest.mark.parametrize("name", QUIET)
    def test_none(self, name: str) -> None:
        """Starts, stops and deaths for other reasons are no incidents."""
        assert run(*self.QUIET[name]).incidents() == []


class TestKilled:
    """Deaths that are no exception."""

    @pytest.mark.parametrize(
        ("lines", "phase"),
        [
            (
                [
                    start(),
                    at(
                        100,
                        ENGINE,
                        "ERROR",
                        "x.py:1",
                        "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
                    ),
                ],
                "serving",
            ),
            (
                [
                    start()[:-1],
                    at(41, ENGINE, "ERROR", "x.py:1", "Worker VllmWorkerProcess pid 88 died, exit code: -9"),
                ],
                "startup",
            ),
            (
                [
                    start()[:-1],
                    at(
                        41,
                        API,
                        "ERROR",
                        "x.py:1",
                        f"EngineCore failed to start\n{frames(STEP)}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore_DP0': -9}}",
                    ),
                ],
                "startup",
            ),
            ([start(), ["run.sh: line 3:  4242 Killed                  vllm serve acme/a"]], "serving"),
            ([start(), ["    Reason:       OOMKilled"]], "serving"),
        ],
        ids=["worker", "v0-worker", "engine-at-start", "shell", "kubernetes"],
    )
    def test_signal_nine_is_host_memory(self, lines: list[list[str]], phase: str) -> None:
        """A process that was killed by signal 9 ran out of host memory, for all that is known."""
        incident = only(*lines)
        assert (incident.class_id, incident.phase, incident.fatal) == ("host_memory", phase, True)


class TestSettling:
    """When a verdict freezes."""

    def test_a_late_dump_completes_the_facts_not_the_class(self) -> None:
        """What comes after a second completes the facts; the class stays as it was decided."""
        pairs = (("vllm/v1/worker/gpu_model_runner.py", "execute_model"),)
        early = only(start(), worker(100, pairs=pairs), dump(100), fatal(101, "RuntimeError: x"))
        late = only(
            start(),
            worker(100, pairs=pairs),
            later(110),
            dump(400),
            fatal(400, "TimeoutError: RPC call timed out"),
        )
        assert (early.class_id, early.facts["step_tokens"]) == ("prefill_budget", 8192)
        assert (late.class_id, late.facts["step_tokens"]) == ("unknown", 8192)

    def test_a_late_death_makes_it_fatal(self) -> None:
        """A death within fifteen minutes of a failed rank is its death."""
        history = run(start(), worker(100), later(110), dead(400))
        assert [one.fatal for one in history.incidents()] == [True]

    def test_a_settled_case_is_open_no_more(self) -> None:
        """An incident counts as open until the clock of the log has gone on by more than a second."""
        history, parser = History(), LogParser(LATEST)
        lines = [*start(), *worker(100), *later(102), *later(104), *later(106)]
        states = []
        for number, text in enumerate(lines, 1):
            history.feed_all(parser.feed(Line(number, text.rstrip("\r"), None, "", text.count("\r"))))
            states.append((len(history.incidents()), history.open))
        assert states[-1] == (1, False)
        assert (1, True) in states

    def test_an_input_that_goes_silent_settles(self) -> None:
        """Where no more lines come, what is open settles by the reader's clock."""
        history, parser = History(), LogParser(LATEST)
        for number, text in enumerate([*start(), *fatal(100)], 1):
            history.feed_all(parser.feed(Line(number, text.rstrip("\r"), None, "", text.count("\r"))))
        history.feed_all(parser.flush())
        assert history.settled() == []
        history.settle()
        assert [one.class_id for one in history.settled()] == [one.class_id for one in history.incidents()]
        assert not history.open


class TestPhase:
    """Startup or serving."""

    @pytest.mark.parametrize(
        ("lines", "class_id", "phase", "is_fatal"),
        [
            (
                [
                    start()[:-1],
                    at(
                        41,
                        ENGINE,
                        "ERROR",
                        "core.py:9",
                        "EngineCore failed to start.\n"
                        + frames(("vllm/v1/core/kv_cache_utils.py", "check_enough_kv_cache_memory"))
                        + "ValueError: No available memory for the cache blocks. Try increasing",
                    ),
                ],
                "kv_cache_no_room",
                "startup",
                True,
            ),
            (
                [
                    start()[:-1],
                    at(
                        41,
                        ENGINE,
                        "ERROR",
                        "core.py:9",
                        "EngineCore failed to start.\n"
                        + frames(
                            ("vllm/v1/worker/gpu_worker.py", "determine_available_memory"),
                            ("vllm/v1/worker/gpu_model_runner.py", "profile_run"),
                            MLP,
                        )
                        + oom(),
                    ),
                ],
                "profile_run",
                "startup",
                True,
            ),
            ([start(), fatal(100), dead(100)], "prefill_budget", "serving", True),
            ([start(), survived(100), later(120)], "lora", "serving", False),
            ([fatal(100), dead(100)], "prefill_budget", "serving", True),
        ],
        ids=["no-room", "profiling", "serving", "survived", "log-from-the-middle"],
    )
    def test_phase(self, lines: list[list[str]], class_id: str, phase: str, is_fatal: bool) -> None:
        """Frames, wordings and the state of the life decide the phase; a failed start is fatal."""
        incident = only(*lines)
        assert (incident.class_id, incident.phase, incident.fatal) == (class_id, phase, is_fatal)


class TestNearMisses:
    """Warnings that torch survives."""

    @pytest.mark.parametrize(
        ("lines", "count", "incidents"),
        [
            ([warning(100), later(110)], 1, 0),
            ([warning(100), warning(200), warning(300), later(310)], 3, 0),
            ([warning(100), fatal(100)], 0, 1),
            ([warning(99, (460 << 20) - (1 << 20)), fatal(100)], 0, 1),
            ([warning(100), warning(100), fatal(100)], 1, 1),
            ([warning(100, 2 << 30), fatal(100)], 1, 1),
            ([warning(100, device=3), fatal(100)], 1, 1),
            ([warning(80), later(95), fatal(100)], 1, 1),
        ],
        ids=[
            "survived", "three", "claimed", "claimed-with-rounding", "one-of-two", "other-size", "other-device", "too-early",
        ],
    )  # fmt: skip
    def test_count(self, lines: list[list[str]], count: int, incidents: int) -> None:
        """A warning counts unless an error of the same size and device follows within seconds."""
        history = run(start(), *lines)
        assert (history.near_misses, history.lives.current.near_misses) == (count, count)
        assert len(history.incidents()) == incidents

    def test_a_log_that_ends_at_the_failure(self) -> None:
        """A worker that fails right behind a warning, where the log ends, failed for memory."""
        history = run(
            start(),
            warning(100),
            at(100, WORKER0, "ERROR", "multiproc_executor.py:957", "WorkerProc hit an exception."),
        )
        (incident,) = history.incidents()
        assert (incident.facts["tried_bytes"], incident.facts["free_bytes"]) == (460 << 20, 92274688)
        assert history.near_misses == 0

    @pytest.mark.parametrize("rank", ["", "[rank2]:"], ids=["one-process", "several-ranks"])
    @pytest.mark.parametrize(
        "text",
        [
            "memory allocation failed with OOM on device 2 while trying to allocate 2097152 bytes (free: 7, total: 9).",
            "expandable_segments: memory mapping failed with OOM on device 2 while trying to allocate 2097152 bytes",
        ],
        ids=["allocation", "mapping"],
    )
    def test_wordings(self, rank: str, text: str) -> None:
        """Both warnings of torch 2.14 are near misses, with and without a rank before them."""
        history = run(
            start(), [f"{rank}[W1102 10:01:40.034032955 CUDACachingAllocator.cpp:3933] {text}"], later(120)
        )
        assert (history.near_misses, history.incidents()) == (1, [])

    def test_warnings_are_bounded(self) -> None:
        """Thousands of warnings are all counted."""
        assert run(start(), *[warning(100 + n * 7) for n in range(1500)]).near_misses == 1500


def test_fingerprint_of_a_raised_budget() -> None:
    """The info line and the error are both seen in the life that failed; no warning is needed."""
    history = run(start(), fatal(100), dead(100), start(200, 4096))
    assert [life.fingerprint for life in history.lives.all] == [
        {"info": True, "warn": False, "error": True},
        {"info": True, "warn": False, "error": False},
    ]
