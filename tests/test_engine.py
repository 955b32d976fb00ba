from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from exporter.diagnosis.engine import Lives, budget, changed, memory_of, step_limit, version_number
from exporter.records import Dump, Failure, Life, LifeMark, MemoryParts, Record, Settings, Traffic
from exporter.records import Step as EngineStep

START = datetime(2026, 11, 2, 10)
GIB = 1 << 30


def record(process: str = "EngineCore", seconds: int = 0, file: str = "core.py") -> Record:
    """A record of ``process``."""
    return Record(process, 104, "INFO", START + timedelta(seconds=seconds), file, ("x",), (seconds + 1,))


Step = str | tuple[str, str] | dict[str, object]


def lives_of(*steps: Step) -> Lives:
    """Lives after marks (a kind, or a kind and a process) and settings, a second apart."""
    lives = Lives()
    for seconds, one in enumerate(steps):
        if isinstance(one, dict):
            lives.apply(Settings(one, record(seconds=seconds)))
        elif one == "failure":
            found = record(seconds=seconds)
            lives.apply(Failure("allocator", {}, (), "CUDA out of memory.", found.numbers[0], found))
        elif isinstance(one, str):
            lives.apply(LifeMark(one, record("APIServer" if one != "engine" else "EngineCore", seconds)))
        else:
            lives.apply(LifeMark(one[0], record(one[1], seconds)))
    return lives


START_UP: tuple[Step, ...] = (
    "start",
    {"max_num_batched_tokens": 8192},
    "budget",
    "engine",
    "loading",
    "initialised",
    "listening",
    "ready",
)


class TestWhereALifeBegins:
    """Marks that begin another life, and those that do not."""

    @pytest.mark.parametrize(
        ("steps", "count"),
        [
            (START_UP, 1),
            ((*START_UP, *START_UP), 2),
            ((*START_UP, "stop", *START_UP), 2),
            (("start", "budget", "start", "budget"), 1),
            (("budget", "engine", "budget", "ready"), 1),
            ((*START_UP[:4], *START_UP), 2),
            (("engine", "ready", "engine", "ready"), 2),
            (("start", ("engine", "EngineCore_DP0"), ("engine", "EngineCore_DP1"), "ready"), 1),
            ((*START_UP, ("engine", "EngineCore_DP1")), 1),
            (("ready", "budget"), 2),
            (("ready",), 1),
            ((*START_UP, "sleep", "awake"), 1),
            (("failure", *START_UP), 2),
            (("failure", *START_UP[2:]), 2),
            (("start", "budget", "failure", "start", "budget"), 2),
            (("start", ("engine", "EngineCore_DP0"), "failure", ("engine", "EngineCore_DP1")), 1),
            (("loading", "failure", "budget"), 1),
        ],
        ids=[
            "one-start",
            "restart-without-a-word",
            "stop-and-start",
            "arguments-printed-twice",
            "budget-of-two-processes",
            "died-while-starting",
            "no-arguments-in-the-log",
            "data-parallel",
            "rank-added-later",
            "start-after-the-middle",
            "log-from-the-middle",
            "sleep",
            "failure-of-another-server",
            "failure-of-another-server-and-no-arguments",
            "failed-while-starting",
            "failure-of-one-rank",
            "failure-of-one-worker",
        ],
    )
    def test_count(self, steps: tuple[Step, ...], count: int) -> None:
        """A life begins where only a new server can have written the line."""
        assert len(lives_of(*steps).all) == count

    def test_started(self) -> None:
        """A life has the time of its first line."""
        lives = lives_of("start", "engine")
        assert lives.current.started == START

    def test_a_log_from_the_middle_has_no_start(self) -> None:
        """Where the log begins in the middle the start is not known."""
        lives = lives_of("ready")
        assert (lives.current.started, lives.current.state) == (None, "serving")

    def test_the_index_counts(self) -> None:
        """Lives are counted from zero, and the one before is at hand."""
        lives = lives_of(*START_UP, "stop", *START_UP)
        assert [life.index for life in lives.all] == [0, 1]
        assert lives.previous is lives.all[0]
        assert lives_of(*START_UP).previous is None

    @pytest.mark.parametrize(
        ("file", "count"), [("scheduler.py", 2), ("core_client.py", 1)], ids=["engine", "client"]
    )
    def test_a_budget_while_serving(self, file: str, count: int) -> None:
        """The budget is printed at a start, but for a client that only connects."""
        lives = lives_of(*START_UP)
        lives.apply(LifeMark("budget", record("APIServer", 99, file)))
        assert len(lives.all) == count


class TestState:
    """What a life is doing."""

    @pytest.mark.parametrize(
        ("steps", "state"),
        [
            (("start",), "starting"),
            (("start", "engine", "initialised"), "starting"),
            (("start", "listening"), "serving"),
            (("start", "ready"), "serving"),
            ((*START_UP, "stop"), "stopped"),
            ((*START_UP, "stopping"), "stopped"),
            ((*START_UP, "stop", "ready"), "stopped"),
        ],
        ids=[
            "arguments",
            "initialised",
            "listening",
            "ready",
            "asked-to-stop",
            "uvicorn-stops",
            "late-ready",
        ],
    )
    def test_marks(self, steps: tuple[Step, ...], state: str) -> None:
        """The state follows the marks."""
        assert lives_of(*steps).current.state == state

    def test_a_death(self) -> None:
        """A death ends a life, also while the server shuts down because of it."""
        lives = lives_of(*START_UP, "stopping")
        lives.died()
        assert lives.current.state == "dead"

    def test_a_stop_that_was_asked_for_stays_one(self) -> None:
        """Errors on the way down from a stop that was asked for are no death."""
        lives = lives_of(*START_UP, "stop")
        lives.died()
        assert lives.current.state == "stopped"

    def test_a_step_is_serving(self) -> None:
        """A step that succeeded shows that the server serves, and how large its steps get."""
        lives = lives_of("start")
        for tokens in (500, 8000, 700):
            lives.traffic(Traffic((EngineStep(1, tokens, 2, 2),)))
        assert (lives.current.state, lives.current.largest_step) == ("serving", 8002)

    def test_fingerprint(self) -> None:
        """The three signs of a raised budget are kept apart."""
        lives = lives_of("start", "budget")
        assert lives.current.fingerprint == {"info": True, "warn": False, "error": False}
        lives.apply(LifeMark("memory_warning", record()))
        assert lives.current.fingerprint == {"info": True, "warn": True, "error": False}

    def test_sleep(self) -> None:
        """Sleep mode is entered and left."""
        assert lives_of(*START_UP, "sleep").current.asleep
        assert not lives_of(*START_UP, "sleep", "awake").current.asleep

    def test_progress(self) -> None:
        """The latest step of the start is known, and forgotten with the life."""
        lives = lives_of("start", "loading")
        assert lives.last_progress() == ("loading", record("APIServer", 1))
        lives.apply(MemoryParts({"weights_bytes": 5}, record()))
        assert lives.last_progress() == ("loaded", record())
        lives.apply(MemoryParts({"kv_cache_bytes": 5}, record()))
        assert lives.last_progress() == ("sized", record())
        assert lives_of("start", "loading", "ready", "start").last_progress() is None


class TestSettings:
    """What a life was started with."""

    def test_later_settings_override(self) -> None:
        """Of two values of one life the later counts; version and first model stand apart."""
        lives = lives_of(
            "start",
            {"max_num_batched_tokens": 2048, "model": "acme-chat", "vllm_version": "0.31.0"},
            {"max_num_batched_tokens": 8192, "model": "/models/acme", "vllm_version": "0.32.0"},
        )
        assert lives.current.settings == {"max_num_batched_tokens": 8192}
        assert (lives.current.model, lives.current.vllm_version) == ("acme-chat", "0.32.0")

    def test_settings_belong_to_one_life(self) -> None:
        """A new life begins without the settings of the one before."""
        lives = lives_of(*START_UP, "start", {"max_num_seqs": 8})
        assert [life.settings for life in lives.all] == [
            {"max_num_batched_tokens": 8192},
            {"max_num_seqs": 8},
        ]

    def test_the_dump_names_the_version(self) -> None:
        """Where no start-up line named it, the dump names the version; it overrides nothing."""
        lives = lives_of("ready")
        lives.apply(Dump("config", {"vllm_version": "0.20.2"}, record()))
        lives.apply(Dump("config", {"vllm_version": "0.99.0"}, record()))
        assert lives.current.vllm_version == "0.20.2"

    @pytest.mark.parametrize(
        ("values", "tokens", "limit"),
        [
            ({"max_num_batched_tokens": 8192}, 8192, 8192),
            ({"max_num_batched_tokens": 8192, "max_num_scheduled_tokens": 8000}, 8192, 8000),
            ({"max_num_scheduled_tokens": 8000}, None, 8000),
            ({"max_num_batched_tokens": 0}, None, None),
            ({"max_num_batched_tokens": "auto"}, None, None),
            ({"max_num_batched_tokens": True}, None, None),
            ({}, None, None),
        ],
        ids=["budget", "scheduled", "scheduled-only", "zero", "text", "truth", "none"],
    )
    def test_budget_and_limit(self, values: dict[str, object], tokens: int | None, limit: int | None) -> None:
        """The budget is a positive number or not known; the limit of a step is the tighter of two."""
        life = Life(0, settings=values)
        assert (budget(life.settings), step_limit(life.settings)) == (tokens, limit)

    def test_changes(self) -> None:
        """What both lives know and differ in has changed, the version too."""
        before = Life(0, settings={"a": 1, "b": 2, "c": 3}, vllm_version="0.31.0")
        after = Life(1, settings={"b": 2, "c": 4, "d": 5}, vllm_version="0.32.0")
        assert list(changed(before, after)) == [("c", 3, 4), ("vllm_version", "0.31.0", "0.32.0")]
        assert list(changed(before, Life(1))) == []


class TestMemory:
    """The accounting of a start."""

    @pytest.mark.parametrize(
        ("version", "peak"),
        [
            ("0.11.0", 5 * GIB),
            ("0.29.0", 5 * GIB),
            ("0.30.0", 4 * GIB),
            ("0.33.0", 4 * GIB),
            ("1.0.0", 4 * GIB),
            (None, 5 * GIB),
        ],
        ids=["old", "just-before", "0.30", "0.33", "1.0", "unknown"],
    )
    def test_the_peak_of_0_30_includes_the_graphs(self, version: str | None, peak: int) -> None:
        """From 0.30 the logged peak includes the estimate of the CUDA graphs, which is taken off."""
        life = Life(
            0,
            vllm_version=version,
            memory={"logged_peak_activation_bytes": 5 * GIB, "cuda_graph_estimate_bytes": GIB},
        )
        assert memory_of(life) == {"peak_activation_bytes": peak}

    def test_the_peak_without_an_estimate(self) -> None:
        """Without an estimate nothing is taken off, and never below zero."""
        assert memory_of(Life(0, vllm_version="0.32.0", memory={"logged_peak_activation_bytes": 5})) == {
            "peak_activation_bytes": 5
        }
        life = Life(
            0,
            vllm_version="0.32.0",
            memory={"logged_peak_activation_bytes": 5, "cuda_graph_estimate_bytes": 9},
        )
        assert memory_of(life) == {"peak_activation_bytes": 0}

    def test_consumed_memory(self) -> None:
        """Weights follow from the consumed memory of 0.27 only where the rest of it is known."""
        assert memory_of(Life(0, memory={"consumed_bytes": 9, "non_torch_bytes": 2})) == {
            "non_torch_bytes": 2,
            "weights_bytes": 7,
        }
        assert memory_of(Life(0, memory={"consumed_bytes": 9})) == {}
        assert memory_of(Life(0, memory={"consumed_bytes": 9, "non_torch_bytes": 2, "weights_bytes": 6})) == {
            "weights_bytes": 6,
            "non_torch_bytes": 2,
        }

    def test_names_of_the_contract(self) -> None:
        """Only the parts that the contract names come out."""
        parts = {
            "weights_bytes": 1,
            "peak_activation_bytes": 2,
            "non_torch_bytes": 3,
            "cuda_graph_bytes": 4,
            "kv_cache_bytes": 5,
            "kv_cache_tokens": 6,
            "total_bytes": 7,
        }
        extra = {"startup_free_bytes": 8, "num_gpu_blocks": 9, "kv_cache_fit_bytes": 10}
        assert memory_of(Life(0, memory={**parts, **extra})) == parts


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.32.0", 32.0),
        ("0.10.2", 10.02),
        ("v0.9.1", 9.01),
        ("0.9.1rc2.dev3+gabc", 9.01),
        ("0.9", 9.0),
        ("1.2.0", 102.0),
        ("0.1.dev1+g1234", None),
        ("0.0.0.dev", None),
        ("dev", None),
        (None, None),
    ],
    ids=["release", "patch", "v", "candidate", "two-parts", "major", "development", "zero", "words", "none"],
)
def test_versions_compare(version: object, number: float | None) -> None:
    """A version becomes a number that compares; a development build has none."""
    assert version_number(version) == number
