"""The risk before the first crash: one state, with the numbers that decide it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_confirm import LIVES, failure

from exporter.diagnosis.exposure import Failed, LifeExposure
from exporter.diagnosis.risk import Risk, default_budget, document, risk
from exporter.records import Life

GIB = 1 << 30
H100, A100, GB10 = "NVIDIA_H100_80GB_HBM3", "NVIDIA_A100-SXM4-80GB", "NVIDIA_GB10"


def server(
    budget: int | None = 16384, version: str | None = "0.32.0", total: float | None = None, **memory: int
) -> Life:
    """A life with a budget, on a device of ``total`` GiB; more of its memory in bytes."""
    life = Life(7, vllm_version=version, model="tiny", state="serving")
    if budget is not None:
        life.settings["max_num_batched_tokens"] = budget
    if total is not None:
        life.memory["total_bytes"] = int(total * GIB)
    life.memory |= memory
    return life


def lived(life: Life, index: int = 7, **more: Any) -> LifeExposure:
    """What a life with the settings of ``life`` was exposed to."""
    named = {} if life.vllm_version is None else {"vllm_version": life.vllm_version}
    return LifeExposure(index, settings={**life.settings, **named}, **more)


def judged(life: Life, *before: LifeExposure, free_bytes: int | None = None, **more: Any) -> Risk:
    """The risk of ``life`` after the lives ``before``, itself exposed to ``more``."""
    return risk([*before, lived(life, **more)], life, 0, free_bytes)


class TestExceeded:
    """It failed already, or nearly."""

    def test_a_failure(self) -> None:
        """A prefill-budget failure in any life of these settings, also before a restart."""
        life = server()
        before = lived(life, 6, failures=[failure(), failure()])
        assert judged(life, before) == Risk(
            "exceeded", ("2 prefill_budget failures at 16384 tokens a step.",)
        )

    @pytest.mark.parametrize(("known", "own"), [(1, 0), (0, 1), (1, 1)])
    def test_a_near_miss(self, known: int, own: int) -> None:
        """A near miss of this life counts once, whoever has heard of it."""
        life = server()
        found = risk([lived(life, near_misses=own)], life, known)
        assert found.state == "exceeded"
        assert found.reasons == (
            "1 allocation at 16384 tokens a step worked only after the cache had been flushed.",
        )

    def test_a_near_miss_before(self) -> None:
        """Near misses of lives with the same settings add up."""
        life = server()
        found = judged(life, lived(life, 6, near_misses=2), near_misses=1)
        assert found.reasons[0].startswith("3 allocations at 16384 tokens a step")

    @pytest.mark.parametrize(
        "one", [failure("sampler"), failure("context_workspace"), failure(phase="startup")]
    )
    def test_other_failures(self, one: Failed) -> None:
        """Other failures say nothing of the budget."""
        assert judged(server(2048), failures=[one]).state == "comfortable"

    def test_another_budget(self) -> None:
        """What happened at another budget, or with other settings, does not count."""
        life = server(2048)
        other = server(2048)
        other.settings["gpu_memory_utilization"] = 0.97
        life.settings["gpu_memory_utilization"] = 0.9
        found = judged(life, lived(server(), 5, failures=[failure()]), lived(other, 6, near_misses=3))
        assert found.state == "comfortable"

    def test_before_everything(self) -> None:
        """It comes first: a small budget with many full steps is exceeded too, and so is an unknown one."""
        assert judged(server(512), full_steps=900, near_misses=1).state == "exceeded"
        unknown = judged(server(None), near_misses=1)
        assert unknown.reasons == (
            "1 allocation with these settings worked only after the cache had been flushed.",
        )


class TestTight:
    """There is less outside the reservation than profiling leaves out."""

    def test_dense(self) -> None:
        """A tenth of the activation peak, against what utilisation 0.98 of 24 GiB leaves."""
        life = server(2048, total=24, logged_peak_activation_bytes=6 * GIB)
        life.settings["gpu_memory_utilization"] = 0.98
        found = judged(life)
        assert found == Risk(
            "tight",
            (
                "By estimate at most 491.52 MiB is outside vLLM's reservation, and a full step may need 614.40 MiB "
                "that profiling does not see (10% of the activation peak).",
            ),
            515396076,
        )

    @pytest.mark.parametrize(
        ("model", "expert", "state"),
        [
            ("tiny", False, "comfortable"),
            ("tiny", True, "tight"),
            ("Qwen3-30B-A3B-Instruct", False, "tight"),
            ("DeepSeek-V3", False, "tight"),
            ("Mixtral-8x7B", False, "tight"),
            ("Llama-3.1-8B", False, "comfortable"),
        ],
    )
    def test_models_with_experts(self, model: str, expert: bool, state: str) -> None:
        """Half of the peak where the name or a setting tells of experts or linear attention."""
        life = server(2048, total=80, logged_peak_activation_bytes=4 * GIB)
        life.settings |= {"gpu_memory_utilization": 0.98, "enable_expert_parallel": expert}
        life.model = model
        assert judged(life).state == state

    @pytest.mark.parametrize(
        ("version", "warned", "headroom"),
        [
            ("0.32.0", False, 8.0),
            ("0.32.0", True, 5.0),
            ("0.20.0", False, 5.0),
            ("0.19.0", False, 5.0),
            (None, False, 5.0),
        ],
    )
    def test_graphs_outside_the_accounting(self, version: str | None, warned: bool, headroom: float) -> None:
        """Up to 0.20, and after the early warning, CUDA graphs come out of the headroom."""
        life = server(2048, version, 80, peak_activation_bytes=GIB, cuda_graph_bytes=3 * GIB)
        life.settings["gpu_memory_utilization"] = 0.9
        life.fingerprint["warn"] = warned
        assert judged(life).headroom_bytes == round(headroom * GIB)

    def test_neighbours(self) -> None:
        """What was taken before the start comes out of the headroom, which can become negative."""
        life = server(2048, total=80, peak_activation_bytes=GIB, startup_free_bytes=70 * GIB)
        life.settings["gpu_memory_utilization"] = 0.9
        found = judged(life)
        assert (found.state, found.headroom_bytes) == ("tight", -2 * GIB)

    @pytest.mark.parametrize("pinned", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
    def test_a_pinned_pool(self, pinned: str) -> None:
        """A pool sized by hand does not follow the utilisation: the headroom is not known."""
        life = server(2048, total=24, peak_activation_bytes=20 * GIB)
        life.settings |= {"gpu_memory_utilization": 0.98, pinned: 1000}
        assert judged(life).headroom_bytes is None

    def test_fewer_scheduled_tokens(self) -> None:
        """What was profiled for more tokens than a step may hold is room."""
        life = server(16384, total=80, peak_activation_bytes=16 * GIB)
        life.settings |= {"gpu_memory_utilization": 0.99, "max_num_scheduled_tokens": 2048}
        found = judged(life)
        assert (found.state, found.headroom_bytes) == ("comfortable", round(0.8 * GIB) + 14 * GIB)

    @pytest.mark.parametrize(
        ("free", "largest", "state", "headroom"),
        [
            (3 * GIB, 8192, "tight", -GIB),
            (5 * GIB, 8192, "unexercised", GIB),
            (GIB // 8, 16384, "unknown", GIB // 8),
        ],
        ids=["less-than-reserved", "enough", "exercised"],
    )
    def test_free_now(self, free: int, largest: int, state: str, headroom: int) -> None:
        """What is free now has to hold what the largest step so far did not take."""
        life = server(16384, total=80, peak_activation_bytes=8 * GIB)
        before = lived(server(8192), 6)
        found = judged(life, before, free_bytes=free, largest_step=largest)
        assert (found.state, found.headroom_bytes) == (state, headroom)

    def test_free_before_any_step(self) -> None:
        """Without a known step free memory says nothing: what start-up left is taken instead."""
        life = server(2048, total=80, peak_activation_bytes=8 * GIB)
        life.settings["gpu_memory_utilization"] = 0.9
        assert judged(life, free_bytes=GIB).headroom_bytes == 8 * GIB

    def test_in_spite_of_full_steps(self) -> None:
        """It stays tight, but tells what has gone well."""
        life = server(2048, total=24, logged_peak_activation_bytes=6 * GIB)
        life.settings["gpu_memory_utilization"] = 0.98
        found = judged(life, full_steps=300)
        assert (found.state, found.reasons[1:]) == (
            "tight",
            ("300 full steps survived, so at most 1 in 100 fails (95 %).",),
        )


class TestUnexercised:
    """The budget was raised and no step has filled it."""

    def test_above_the_life_before(self) -> None:
        """Larger than before, and the largest step is below 0.9 of it."""
        found = judged(server(16384), lived(server(8192), 6), largest_step=14745)
        assert found == Risk(
            "unexercised",
            (
                "No step has filled the limit of 16384 tokens yet: the largest had 14745.",
                "The runs before had 8192.",
            ),
        )

    def test_above_the_default(self) -> None:
        """Larger than vLLM would choose for this device."""
        found = judged(server(16384, total=24), largest_step=900)
        assert (found.state, found.reasons[1:]) == (
            "unexercised",
            ("It is above vLLM's default for this device (2048).",),
        )

    def test_a_restart_exercises_nothing(self) -> None:
        """The budget before the raise counts, not that of the last life."""
        assert (
            judged(server(), lived(server(2048), 5), lived(server(), 6), largest_step=900).state
            == "unexercised"
        )

    def test_an_earlier_life_filled_it(self) -> None:
        """A full step in an earlier life of the same settings will do."""
        found = judged(
            server(), lived(server(2048), 5), lived(server(), 6, largest_step=16384), largest_step=900
        )
        assert found.state == "unknown"

    def test_filled(self) -> None:
        """From 0.9 of the limit on it has been exercised, but not often enough to be comfortable."""
        found = judged(server(16384), lived(server(8192), 6), largest_step=14746, full_steps=3)
        assert (found.state, found.reasons[0]) == (
            "unknown",
            "3 full steps of 16384 tokens survived so far; 50 would tell.",
        )

    def test_lowered(self) -> None:
        """A budget below that of before is not raised."""
        assert judged(server(8192), lived(server(16384), 6), largest_step=9).state == "unknown"

    def test_without_step_sizes(self) -> None:
        """Where the log has no step sizes, nothing shows that a full step was ever run."""
        found = judged(server(), lived(server(2048), 6), prompts={"metrics": {5001: 30.0, 20001: 0.0}})
        assert (found.state, found.reasons[0]) == (
            "unexercised",
            "Nothing shows that a step of 16384 tokens was ever run: no step sizes are in the log.",
        )

    def test_long_prompts_without_step_sizes(self) -> None:
        """Prompts that would fill a step finished: it may have been run, which nobody can tell."""
        found = judged(server(), lived(server(2048), 6), prompts={"metrics": {5001: 30.0, 20001: 4.0}})
        assert (found.state, found.reasons) == (
            "unknown",
            (
                "4 prompts of 16384 tokens or more finished, but no step sizes are in the log "
                "(--enable-logging-iteration-details).",
                "It may be above vLLM's default (2048 to 16384, as the log does not tell the device).",
                "The runs before had 2048.",
            ),
        )


class TestComfortable:
    """Exercised often, or not above what vLLM chooses."""

    def test_full_steps(self) -> None:
        """Fifty full steps, of all lives with these settings; the rule of three says what is left."""
        life = server()
        found = judged(
            life, lived(server(2048), 5), lived(life, 6, full_steps=40), full_steps=20, largest_step=16000
        )
        assert found == Risk("comfortable", ("60 full steps survived, so at most 1 in 20 fails (95 %).",))

    @pytest.mark.parametrize(("full", "state"), [(49, "unknown"), (50, "comfortable")])
    def test_where_it_turns(self, full: int, state: str) -> None:
        """At the fiftieth."""
        assert judged(server(), full_steps=full, largest_step=16384).state == state

    def test_the_default(self) -> None:
        """At or below the default of the device."""
        found = judged(server(8192, total=141))
        assert found == Risk(
            "comfortable", ("8192 tokens a step is not above vLLM's default for this device (8192).",)
        )


class TestUnknown:
    """The log does not say enough."""

    def test_no_budget(self) -> None:
        """Without a budget nothing can be said of it."""
        assert judged(server(None)) == Risk(
            "unknown", ("The log does not say how many tokens a step may hold.",)
        )

    def test_no_device(self) -> None:
        """Between the smallest and the largest default it depends on the device."""
        assert judged(server(8192)) == Risk(
            "unknown",
            (
                "0 full steps of 8192 tokens survived so far; 50 would tell.",
                "It may be above vLLM's default (2048 to 16384, as the log does not tell the device).",
            ),
        )

    def test_no_default(self) -> None:
        """Where the default follows from the length of the model."""
        assert judged(server(2048, "0.6.6")).reasons[1] == (
            "vLLM's default is not known for this version and these settings."
        )

    def test_no_lives(self) -> None:
        """The life alone is enough to ask."""
        assert risk([], server(2048), 0).state == "comfortable"


class TestDefaults:
    """What vLLM chooses by itself, by version and device."""

    @pytest.mark.parametrize(
        ("version", "total", "device", "expected"),
        [
            ("0.33.0", 178, None, (16384, 16384)),
            ("0.28.0", 191.7, None, (16384, 16384)),
            ("0.27.0", 178, None, (8192, 8192)),
            (None, 178, None, (8192, 16384)),
            ("0.32.0", 139.8, None, (8192, 8192)),
            ("0.32.0", 79.1, H100, (8192, 8192)),
            ("0.32.0", 79.1, A100, (2048, 2048)),
            ("0.10.2", 79.1, A100, (2048, 2048)),
            ("0.8.5", 79.1, A100, (2048, 8192)),
            (None, 79.1, A100, (2048, 8192)),
            ("0.32.0", 79.1, None, (2048, 8192)),
            ("0.32.0", 119.6, GB10, (2048, 2048)),
            ("0.27.0", 119.6, GB10, (8192, 8192)),
            (None, 119.6, GB10, (2048, 8192)),
            ("0.32.0", 119.6, None, (2048, 8192)),
            ("0.32.0", 44.4, None, (2048, 2048)),
            (None, 23.6, None, (2048, 2048)),
            ("0.32.0", None, None, (2048, 16384)),
            ("0.20.0", None, None, (2048, 8192)),
            (None, None, None, (2048, 16384)),
            ("0.7.3", 79.1, H100, None),
            ("0.6.6", 79.1, None, None),
        ],
    )
    def test_one(
        self, version: str | None, total: float | None, device: str | None, expected: tuple[int, int] | None
    ) -> None:
        """Bounds, equal where the log tells version and device well enough."""
        life = server(16384, version, total)
        if device is not None:
            life.settings["device_name"] = device
        assert default_budget(life) == expected

    def test_without_chunked_prefill(self) -> None:
        """Then the budget follows from ``max_model_len``."""
        life = server()
        life.settings["enable_chunked_prefill"] = False
        assert default_budget(life) is None


def test_document() -> None:
    """State and reasons, and the headroom where it is known."""
    assert document(Risk("unknown", ("a", "b"))) == {"state": "unknown", "reasons": ["a", "b"]}
    assert document(Risk("tight", ("a",), -5)) == {"state": "tight", "reasons": ["a"], "headroom_bytes": -5}


_BYTES = st.one_of(st.integers(-(1 << 40), 1 << 40), st.just(10**24))
_MEMORY = st.dictionaries(
    st.sampled_from(
        [
            "total_bytes",
            "logged_peak_activation_bytes",
            "cuda_graph_bytes",
            "startup_free_bytes",
            "kv_cache_bytes",
        ]
    ),
    _BYTES,
)


@given(
    lives=LIVES,
    memory=_MEMORY,
    free=st.one_of(st.none(), _BYTES),
    version=st.sampled_from([None, "0.32.0", "0.6.6", "dev", "0.9.0"]),
)
@settings(max_examples=100, deadline=None)
def test_whatever_comes(
    lives: list[LifeExposure], memory: dict[str, int], free: int | None, version: str | None
) -> None:
    """Nothing raises, there is always a reason, and the document is JSON."""
    own = lives[-1] if lives else LifeExposure(0)
    life = Life(own.index, settings=dict(own.settings), memory=memory, vllm_version=version)
    found = risk(lives, life, 0, free)
    assert found.state in ("exceeded", "tight", "unexercised", "comfortable", "unknown")
    assert all(found.reasons)
    assert found.reasons
    json.dumps(document(found), allow_nan=False)
