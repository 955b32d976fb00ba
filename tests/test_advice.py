from __future__ import annotations

import re
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.diagnosis.advice import advise, numbers, recommended_budget
from exporter.diagnosis.incident import Case
from exporter.diagnosis.knowledge import builtin_classes
from exporter.records import Facts, Failure, Life, Record

MIB, GIB = 1 << 20, 1 << 30
RECORD = Record("EngineCore", 104, "ERROR", datetime(2026, 11, 2, 10), "core.py", ("x",), (1,))
LIMITS = (
    "prefill_budget",
    "context_workspace",
    "moe_workspace",
    "prompt_logprobs",
    "profile_run",
    "lora",
    "multimodal_encoder",
    "fragmentation",
)


def case_of(
    budget: int | None = 8192,
    *,
    before: int | None = None,
    state: str = "dead",
    version: str | None = "0.32.0",
    kv: int | None = 40 * GIB,
    **values: object,
) -> Case:
    """An incident in a life with ``budget``, after one with ``before``."""
    life = Life(1, vllm_version=version, settings=dict(values))
    if budget is not None:
        life.settings["max_num_batched_tokens"] = budget
    if kv is not None:
        life.memory["kv_cache_bytes"] = kv
    previous = Life(0, settings={"max_num_batched_tokens": before}, state=state) if before else None
    return Case(life, previous, failures=[Failure("allocator", {}, (), "x", 1, RECORD)])


def sizes(tried: float, free: float, **more: object) -> Facts:
    """Facts with sizes in MiB."""
    return {"tried_bytes": round(tried * MIB), "free_bytes": round(free * MIB), **more}


class TestRecommendedBudget:
    """A smaller step to test from."""

    @pytest.mark.parametrize(
        ("case", "facts", "class_id", "expected"),
        [
            (case_of(16384), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384), sizes(896, 800, step_tokens=16384), "prefill_budget", 8192),
            (case_of(16384), sizes(896, 890, step_tokens=8000), "prefill_budget", 4096),
            (case_of(16384), sizes(896, 60, step_tokens=16384), "prefill_budget", 512),
            (case_of(16384), sizes(896, 20, step_tokens=16384), "prefill_budget", 512),
            (case_of(16384), sizes(896, 448), "prefill_budget", 4096),
            (case_of(16384, max_num_seqs=1000), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384, max_num_seqs=3000), sizes(896, 448, step_tokens=16384), "prefill_budget", 6000),
            (case_of(16384, before=6000), sizes(896, 448, step_tokens=16384), "prefill_budget", 6000),
            (case_of(16384, before=9000), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384, before=32768), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (
                case_of(16384, before=6000, state="starting"),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                4096,
            ),
            (case_of(16384), {}, "prefill_budget", 8192),
            (case_of(12000), {}, "prefill_budget", 4096),
            (case_of(16384, before=2048), {}, "prefill_budget", 2048),
            (case_of(16384), sizes(448, 896, step_tokens=16384), "prefill_budget", 8192),
            (case_of(16384), sizes(896, 448, step_tokens=16384), "context_workspace", 8192),
            (case_of(1000), {}, "prefill_budget", None),
            (case_of(8192, max_num_seqs=4096), {}, "prefill_budget", None),
            (case_of(None), {}, "prefill_budget", None),
            (case_of(16384), sizes(896, 448, step_tokens=16384), "weights_load", None),
        ],
        ids=[
            "half-fits",
            "almost-all-fits",
            "the-step-counts",
            "little-fits",
            "less-than-the-floor-fits",
            "step-unknown",
            "sequences-below",
            "sequences-set-the-floor",
            "the-life-before-ran",
            "the-life-before-was-larger",
            "lowered-before",
            "the-life-before-never-served",
            "no-sizes",
            "no-power-of-two",
            "no-sizes-but-a-life-before",
            "more-free-than-asked",
            "grows-with-context",
            "small-already",
            "no-room-below",
            "budget-unknown",
            "other-class",
        ],
    )
    def test_value(self, case: Case, facts: Facts, class_id: str, expected: int | None) -> None:
        """The value follows from what would have fitted, between the floor and half the budget."""
        assert recommended_budget(case, facts, class_id)[0] == expected

    def test_the_sum_is_shown(self) -> None:
        """The reason names the numbers it is made of."""
        _, because = recommended_budget(case_of(16384), sizes(896, 448, step_tokens=16384), "prefill_budget")
        assert because == (
            "16384 tokens needed 896.00 MiB where 448.00 MiB was free, so about 8192 would have fitted; "
            "0.8 of that, rounded down, is 4096"
        )

    @pytest.mark.parametrize(
        "case",
        [case_of(16384, before=6000), case_of(16384, max_num_seqs=3000)],
        ids=["life-before", "sequences"],
    )
    def test_the_sum_is_shown_only_where_it_decided(self, case: Case) -> None:
        """Where something else decided, the reason does not say that 0.8 of 8192 is 6000."""
        value, because = recommended_budget(case, sizes(896, 448, step_tokens=16384), "prefill_budget")
        assert value == 6000
        assert because is not None
        assert "is 6000" not in because

    @settings(deadline=None, max_examples=200)
    @given(
        now=st.integers(1, 70_000),
        before=st.one_of(st.none(), st.integers(1, 70_000)),
        seqs=st.integers(1, 3000),
        tried=st.integers(1, 9 * GIB),
        free=st.integers(0, 9 * GIB),
        step=st.one_of(st.none(), st.integers(1, 70_000)),
        class_id=st.sampled_from(LIMITS),
    )
    def test_bounds(
        self, now: int, before: int | None, seqs: int, tried: int, free: int, step: int | None, class_id: str
    ) -> None:
        """Whatever the numbers, the value is at least 512 and twice the sequences, and at most half the budget."""
        facts: Facts = {"tried_bytes": tried, "free_bytes": free}
        if step is not None:
            facts["step_tokens"] = step
        value, because = recommended_budget(case_of(now, before=before, max_num_seqs=seqs), facts, class_id)
        assert (value is None) == (because is None)
        if value is not None:
            assert max(512, 2 * seqs) <= value <= now // 2


class TestNumbers:
    """Other numbers that remedies name."""

    @pytest.mark.parametrize(
        ("case", "facts", "features", "name", "expected"),
        [
            (case_of(), {}, {}, "pin_kv_cache_bytes", 40 * GIB),
            (case_of(), {}, {"unified_device": True}, "pin_kv_cache_bytes", None),
            (case_of(kv=-GIB), {}, {}, "pin_kv_cache_bytes", None),
            (case_of(kv=None), {}, {}, "pin_kv_cache_bytes", None),
            (case_of(before=2048), {}, {}, "previous_budget_tokens", 2048),
            (case_of(before=8192), {}, {}, "previous_budget_tokens", None),
            (case_of(), sizes(896, 448), {}, "shortage_bytes", 448 * MIB),
            (case_of(), sizes(448, 896), {}, "shortage_bytes", None),
            (
                case_of(gpu_memory_utilization=0.95),
                sizes(2048, 1024, total_bytes=80 * GIB),
                {},
                "lower_utilization",
                0.92,
            ),
            (case_of(), sizes(2048, 1024, total_bytes=80 * GIB), {}, "lower_utilization", 0.89),
            (
                case_of(version="0.19.0"),
                sizes(2048, 1024, total_bytes=80 * GIB),
                {},
                "lower_utilization",
                0.87,
            ),
            (
                case_of(),
                sizes(2048, 1024, total_bytes=80 * GIB),
                {"kv_pinned": True},
                "lower_utilization",
                None,
            ),
            (
                case_of(gpu_memory_utilization=0.95),
                sizes(90_000, 1024, total_bytes=80 * GIB),
                {},
                "lower_utilization",
                None,
            ),
            (case_of(max_num_seqs=64), {}, {}, "lower_max_num_seqs", 32),
            (case_of(max_num_seqs=8), {}, {}, "lower_max_num_seqs", None),
        ],
        ids=[
            "pool",
            "pool-of-a-unified-device",
            "no-pool",
            "pool-unknown",
            "budget-before",
            "budget-unchanged",
            "shortage",
            "no-shortage",
            "utilisation",
            "default-utilisation",
            "old-default-utilisation",
            "pool-by-hand",
            "hopeless",
            "sequences",
            "few-sequences",
        ],
    )
    def test_one(self, case: Case, facts: Facts, features: Facts, name: str, expected: float | None) -> None:
        """A number is given where it can be known, and left out where not."""
        assert numbers(case, facts, features, "prefill_budget")[0].get(name) == expected

    @pytest.mark.parametrize(
        ("case", "expected"),
        [(case_of(), 16384), (case_of(before=32768), 32768), (case_of(before=2048), 16384)],
        ids=["twice", "before", "lower-before"],
    )
    def test_a_larger_budget(self, case: Case, expected: int) -> None:
        """A locked workspace needs a larger budget: that of the life before, or twice."""
        assert numbers(case, {}, {}, "workspace_locked")[0]["raised_budget_tokens"] == expected


class TestAdvice:
    """What is offered."""

    @pytest.mark.parametrize("class_id", sorted(builtin_classes()))
    def test_without_any_number(self, class_id: str) -> None:
        """Where nothing is known, no remedy shows a gap and no number is made up."""
        advice = advise(case_of(None, kv=None, version=None), {}, {}, builtin_classes()[class_id])
        assert advice.confirm
        assert advice.numbers == {}
        shown = [f"{remedy.text} {remedy.flags or ''} {remedy.cost or ''}" for remedy in advice.do]
        assert [text for text in shown if set("{}?") & set(text)] == []

    @pytest.mark.parametrize("class_id", sorted(builtin_classes()))
    def test_with_every_number(self, class_id: str) -> None:
        """Where much is known, flags are typed as they stand: names with plain numbers."""
        case = case_of(16384, before=2048, max_num_seqs=64, gpu_memory_utilization=0.95)
        facts = sizes(
            896, 448, total_bytes=80 * GIB, step_tokens=16384, budget_tokens=16384, vllm_version="0.32.0"
        )
        features: Facts = {**facts, "phase": "serving", "vllm_at_least": 32.0, "budget_raised": True}
        for remedy in advise(case, facts, features, builtin_classes()[class_id]).do:
            for flag in (remedy.flags or "").split():
                assert re.fullmatch(r"--?[a-z][a-z0-9-]*|[A-Z_]+=\S+|[\w.:,=\"{}-]+", flag), flag

    def test_a_smaller_step_goes_with_a_pinned_pool(self) -> None:
        """A smaller budget is never advised without keeping the pool, which would eat what is freed."""
        case = case_of(16384)
        facts = sizes(896, 448, total_bytes=80 * GIB, step_tokens=16384)
        advice = advise(
            case,
            facts,
            {**facts, "phase": "serving", "vllm_at_least": 32.0},
            builtin_classes()["prefill_budget"],
        )
        assert advice.numbers == {"recommended_max_num_batched_tokens": 4096, "pin_kv_cache_bytes": 40 * GIB}
        flags = [
            remedy.flags
            for remedy in advice.do
            if remedy.flags and "--max-num-batched-tokens 4096" in remedy.flags
        ]
        assert flags == [f"--max-num-batched-tokens 4096 --kv-cache-memory-bytes {40 * GIB}"]
        assert advice.because is not None

    @pytest.mark.parametrize("class_id", sorted(builtin_classes()))
    def test_a_connector_forbids_expandable_segments(self, class_id: str) -> None:
        """With a KV connector no class advises expandable segments."""
        case = case_of(16384)
        facts = sizes(896, 448, total_bytes=80 * GIB, reserved_unallocated_bytes=GIB)
        features: Facts = {
            **facts,
            "phase": "serving",
            "vllm_at_least": 32.0,
            "kv_connector": True,
            "reserved_over_shortage": 2.0,
        }
        flags = [
            remedy.flags or "" for remedy in advise(case, facts, features, builtin_classes()[class_id]).do
        ]
        assert [flag for flag in flags if "expandable_segments" in flag] == []

    def test_a_unified_device_pins_nothing(self) -> None:
        """A device that shares its memory with the host is not told to pin its pool."""
        advice = advise(
            case_of(16384),
            {},
            {"unified_device": True, "phase": "serving"},
            builtin_classes()["unified_memory"],
        )
        assert "pin_kv_cache_bytes" not in advice.numbers
        assert [remedy for remedy in advice.do if "--kv-cache-memory" in (remedy.flags or "")] == []
