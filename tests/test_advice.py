from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.diagnosis.advice import advise, numbers, pairing
from exporter.diagnosis.incident import Case
from exporter.diagnosis.knowledge import builtin_classes
from exporter.diagnosis.rules import CLASS_IDS
from exporter.diagnosis.step_size import StepSize, step_size
from exporter.records import Advice, Facts, Failure, Life, Record

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
    budget: object = 8192,
    *,
    before: object = None,
    state: str = "stopped",
    version: str | None = "0.32.0",
    kv: object = 40 * GIB,
    peak: object = None,
    blocks: object = None,
    **values: object,
) -> Case:
    """An incident in a life with ``budget``, after one with ``before`` that served and was stopped."""
    memory = {"kv_cache_bytes": kv, "logged_peak_activation_bytes": peak, "num_gpu_blocks": blocks}
    known: dict[str, Any] = {name: value for name, value in memory.items() if value is not None}
    life = Life(1, vllm_version=version, settings=dict(values), memory=known)
    if budget is not None:
        life.settings["max_num_batched_tokens"] = budget
    previous = Life(0, settings={"max_num_batched_tokens": before}, state=state) if before else None
    return Case(life, previous, failures=[Failure("allocator", {}, (), "x", 1, RECORD)])


def sizes(tried: float, free: float, **more: object) -> Facts:
    """Facts with sizes in MiB."""
    return {"tried_bytes": round(tried * MIB), "free_bytes": round(free * MIB), **more}


def tokens(found: StepSize | None) -> int | None:
    """The number of a recommendation."""
    return found.tokens if found is not None else None


def said(advice: Advice) -> str:
    """All that is offered to do, as one text."""
    return "\n".join(f"{one.text} {one.flags or ''} {one.cost or ''}" for one in advice.do)


class TestStepSize:
    """A smaller step to test from."""

    @pytest.mark.parametrize(
        ("case", "facts", "class_id", "expected"),
        [
            (case_of(16384), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384), sizes(896, 800, step_tokens=16384), "prefill_budget", 8192),
            (case_of(16384), sizes(896, 890, step_tokens=8000), "prefill_budget", 4096),
            (case_of(16384), sizes(896, 60, step_tokens=16384), "prefill_budget", 512),
            (case_of(16384), sizes(896, 20, step_tokens=16384), "prefill_budget", 512),
            (case_of(16384), sizes(896, 1, step_tokens=16384), "prefill_budget", 8192),
            (case_of(16384), sizes(896, 448), "prefill_budget", 4096),
            (case_of(6000), sizes(896, 890, step_tokens=6000), "prefill_budget", 3000),
            (case_of(16384, max_num_seqs=1000), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384, max_num_seqs=3000), sizes(896, 448, step_tokens=16384), "prefill_budget", 6000),
            (
                case_of(16384, max_num_seqs=1000, num_speculative_tokens=2),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                6000,
            ),
            (
                case_of(16384, max_num_scheduled_tokens=8192),
                sizes(896, 880, step_tokens=8192),
                "prefill_budget",
                4096,
            ),
            (case_of(16384, before=6000), sizes(896, 448, step_tokens=16384), "prefill_budget", 6000),
            (case_of(16384, before=9000), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (case_of(16384, before=32768), sizes(896, 448, step_tokens=16384), "prefill_budget", 4096),
            (
                case_of(16384, before=6000, state="starting"),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                4096,
            ),
            (
                case_of(16384, before=6000, state="dead"),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                4096,
            ),
            (case_of(16384), {}, "prefill_budget", 8192),
            (case_of(24576), {}, "prefill_budget", 12288),
            (case_of(16384, before=2048), {}, "prefill_budget", 2048),
            (case_of(16384, before=12000), {}, "prefill_budget", 8192),
            (case_of(16384, before=256), {}, "prefill_budget", 512),
            (case_of(16384), sizes(448, 896, step_tokens=16384), "prefill_budget", 8192),
            (case_of(16384), sizes(896, 448, step_tokens=16384), "context_workspace", 8192),
            (
                case_of(16384, max_model_len=200_000),
                sizes(896, 448, step_tokens=16384, max_computed_tokens=100_000),
                "context_workspace",
                2048,
            ),
            (
                case_of(16384, max_model_len=200_000),
                sizes(896, 448, step_tokens=16384, max_computed_tokens=300_000),
                "context_workspace",
                4096,
            ),
            (case_of(16384), sizes(896, 448, step_tokens=16384), "fragmentation", 8192),
            (case_of(1000), {}, "prefill_budget", None),
            (case_of(8192, max_num_seqs=4096), {}, "prefill_budget", None),
            (case_of(None), {}, "prefill_budget", None),
            (case_of(1 << 31), {}, "prefill_budget", None),
            (case_of(16384), sizes(896, 448, step_tokens=16384), "weights_load", None),
        ],
        ids=[
            "half-fits",
            "almost-all-fits",
            "the-step-counts",
            "little-fits",
            "less-than-the-floor-fits",
            "next-to-nothing-free",
            "step-unknown",
            "half-of-no-power-of-two",
            "sequences-below",
            "sequences-set-the-floor",
            "draft-tokens-raise-the-floor",
            "the-cap-of-a-step-binds",
            "the-life-before-served",
            "the-life-before-was-larger-than-fits",
            "lowered-before",
            "the-life-before-never-served",
            "the-life-before-died",
            "no-sizes",
            "no-power-of-two",
            "no-sizes-but-a-life-before",
            "a-life-before-above-half",
            "a-life-before-below-the-floor",
            "more-free-than-asked",
            "context-not-known",
            "half-of-the-context",
            "more-context-than-allowed",
            "not-by-tokens",
            "small-already",
            "no-room-below",
            "budget-unknown",
            "budget-absurd",
            "other-class",
        ],
    )
    def test_value(self, case: Case, facts: Facts, class_id: str, expected: int | None) -> None:
        """The value follows from what would have fitted, between the floor and half the budget."""
        assert tokens(step_size(case, facts, {}, class_id)) == expected

    def test_context_counts_in_any_class(self) -> None:
        """Where attention over cached tokens failed, the context counts, whatever the class is."""
        facts = sizes(896, 448, step_tokens=16384, max_computed_tokens=50_000)
        case = case_of(16384, max_model_len=200_000)
        plain = step_size(case, facts, {}, "prefill_budget")
        deep = step_size(case, facts, {"operation": "context_attention"}, "prefill_budget")
        assert (tokens(plain), tokens(deep)) == (4096, 1024)

    @pytest.mark.parametrize(
        ("good", "expected"),
        [(3000, 3000), (None, 6000), (40_000, 8192), (0, 8192), (True, 6000)],
        ids=["known", "unknown", "above", "zero", "no-number"],
    )
    def test_a_good_budget_may_be_told(self, good: int | None, expected: int) -> None:
        """A caller who knows what served is believed over the life before; nonsense is not."""
        assert tokens(step_size(case_of(16384, before=6000), {}, {}, "prefill_budget", good)) == expected

    @pytest.mark.parametrize(
        ("case", "facts", "class_id", "expected"),
        [
            (
                case_of(16384),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                "4096 is a starting value to test: 16384 tokens needed 896.00 MiB where 448.00 MiB was free, so "
                "about 8192 would have fitted; 0.8 of that, rounded down to a power of two, is 4096",
            ),
            (
                case_of(16384),
                sizes(896, 448),
                "prefill_budget",
                "4096 is a starting value to test: a full step of 16384 tokens needed 896.00 MiB where 448.00 MiB "
                "was free, so about 8192 would have fitted; 0.8 of that, rounded down to a power of two, is 4096",
            ),
            (
                case_of(16384, before=6000),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                "6000 is a starting value to test: 16384 tokens needed 896.00 MiB where 448.00 MiB was free, so "
                "about 8192 would have fitted, and 6000 served before",
            ),
            (
                case_of(16384, max_num_seqs=3000),
                sizes(896, 448, step_tokens=16384),
                "prefill_budget",
                "6000 is a starting value to test: 16384 tokens needed 896.00 MiB where 448.00 MiB was free, so "
                "about 8192 would have fitted, but generation needs up to 6000; it may not be enough alone",
            ),
            (
                case_of(6000),
                sizes(896, 890, step_tokens=6000),
                "prefill_budget",
                "3000 is a starting value to test: 6000 tokens needed 896.00 MiB where 890.00 MiB was free, so "
                "about 5959 would have fitted, and half of 6000 is below that",
            ),
            (
                case_of(16384, max_model_len=200_000),
                sizes(896, 448, step_tokens=16384, max_computed_tokens=100_000),
                "context_workspace",
                "2048 is a starting value to test: 16384 tokens needed 896.00 MiB where 448.00 MiB was free, so "
                "about 8192 would have fitted after 100000 tokens of context, and 4096 after the 200000 that are "
                "allowed; 0.8 of that, rounded down to a power of two, is 2048",
            ),
            (
                case_of(16384),
                {},
                "prefill_budget",
                "8192 is a starting value to test: it is half of 16384, as the log does not say how much would "
                "have fitted",
            ),
            (
                case_of(16384, before=2048),
                {},
                "prefill_budget",
                "2048 is a starting value to test: it served before; the log does not say how much would have "
                "fitted",
            ),
            (
                case_of(16384, before=12000),
                {},
                "prefill_budget",
                "8192 is a starting value to test: it is half of 16384, below the 12000 that served before, as "
                "the log does not say how much would have fitted",
            ),
        ],
        ids=[
            "sizes",
            "full-step",
            "before",
            "floor",
            "half",
            "context",
            "no-sizes",
            "good",
            "good-above-half",
        ],
    )
    def test_it_explains_itself(self, case: Case, facts: Facts, class_id: str, expected: str) -> None:
        """One sentence names the numbers that decided, and no others, and calls the value what it is."""
        found = step_size(case, facts, {}, class_id)
        assert found is not None
        assert found.because == expected

    @pytest.mark.parametrize(
        ("case", "features", "expected"),
        [
            (case_of(16384, peak=2 * GIB, gpu_memory_utilization=0.9), {}, "between 9026 and 12113 would"),
            (case_of(16384, peak=2 * GIB, version="0.19.0"), {}, "between 9026 and 12113 would"),
            (case_of(16384, peak=2 * GIB, gpu_memory_utilization=0.98), {}, "between 7066 and 9026 would"),
            (
                case_of(16384, peak=2 * GIB, gpu_memory_utilization=0.9),
                {"foreign_bytes": 4 * GIB},
                "between 9026 and 10244 would",
            ),
            (case_of(16384, gpu_memory_utilization=0.9), {}, "about 9026 would"),
            (case_of(16384, peak=2 * GIB, version=None), {}, "about 9026 would"),
            (case_of(16384, peak=2 * GIB, gpu_memory_utilization=1.0), {}, "about 9026 would"),
            (
                case_of(16384, peak=2 * GIB, gpu_memory_utilization=0.9),
                {"kv_pinned": True},
                "about 9026 would",
            ),
        ],
        ids=["known", "default", "lower", "foreign", "no-peak", "no-utilisation", "no-slack", "pool-by-hand"],
    )
    def test_the_accounting_of_the_start(self, case: Case, features: Facts, expected: str) -> None:
        """Where peak and utilisation are known, the interval of both sums is shown."""
        facts = sizes(3.83 * 1024, 2.11 * 1024, total_bytes=round(79.15 * GIB), step_tokens=16384)
        found = step_size(case, facts, features, "prefill_budget")
        assert found is not None
        assert expected in found.because
        assert found.tokens == 4096

    def test_the_lower_end_of_the_interval_counts(self) -> None:
        """Where the accounting of the start allows less than the failing tensor does, it decides."""
        case = case_of(16384, peak=2 * GIB, gpu_memory_utilization=0.99)
        facts = sizes(3.83 * 1024, 2.5 * 1024, total_bytes=round(79.15 * GIB), step_tokens=16384)
        found = step_size(case, facts, {}, "prefill_budget")
        assert found is not None
        assert "between 5501 and 10694 would" in found.because
        assert found.tokens == 4096


# Public reports: what failed, what was reported to work, and what the error said.
REPORTS: dict[str, tuple[Case, Facts, str, int | None, int]] = {
    "vllm-52871": (case_of(8192), sizes(96, 41.56, step_tokens=6144), "prefill_budget", None, 4000),
    "vllm-backport-94": (case_of(16384), sizes(640, 490, step_tokens=16384), "prefill_budget", None, 8192),
    "sglang-33246": (
        case_of(32768, max_model_len=300_000),
        sizes(9 * 1024, 8.7 * 1024, step_tokens=32768, max_computed_tokens=150_000),
        "context_workspace",
        None,
        8192,
    ),
    "qwen36-27b-single-3090-1": (
        case_of(4128),
        sizes(138, 110.5, step_tokens=4128),
        "prefill_budget",
        None,
        4128,
    ),
    "vllm-54775-81920": (case_of(81_920), sizes(1280, 0), "prefill_budget", None, 65_536),
    "vllm-54775-131072": (case_of(131_072), {}, "prefill_budget", None, 65_536),
    "vllm-51743-24576": (case_of(24_576), {}, "prefill_budget", None, 16_384),
    "vllm-51743-32768": (case_of(32_768), {}, "prefill_budget", None, 16_384),
    "vllm-51743-after-8192": (case_of(32_768), {}, "prefill_budget", 8192, 16_384),
    "sglang-36941-after-2048": (case_of(8192), {}, "prefill_budget", 2048, 2048),
}


class TestPublicReports:
    """Reports that say both what failed and what worked."""

    @pytest.mark.parametrize("name", REPORTS)
    def test_never_above_what_worked(self, name: str) -> None:
        """The value is not above one that was reported to work, and not needlessly far below."""
        case, facts, class_id, good, worked = REPORTS[name]
        found = tokens(step_size(case, facts, {}, class_id, good))
        assert found is not None
        assert worked / 2.1 <= found <= worked

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("vllm-52871", 2048),
            ("vllm-backport-94", 8192),
            ("sglang-33246", 8192),
            ("qwen36-27b-single-3090-1", 2048),
            ("vllm-54775-81920", 40_960),
            ("vllm-51743-24576", 12_288),
            ("vllm-51743-after-8192", 8192),
            ("sglang-36941-after-2048", 2048),
        ],
    )
    def test_value(self, name: str, expected: int) -> None:
        """The value by hand: the sizes where they are given, else what served before, else half."""
        case, facts, class_id, good, _ = REPORTS[name]
        assert tokens(step_size(case, facts, {}, class_id, good)) == expected


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.sampled_from(["", "16384", "nan", 1 << 59, (1 << 60) - 1, 1 << 60]),
)
NAMES = (
    "tried_bytes",
    "free_bytes",
    "total_bytes",
    "step_tokens",
    "max_computed_tokens",
    "max_prompt_tokens",
    "max_model_len",
    "reserved_unallocated_bytes",
)


class TestOddNumbers:
    """A log can hold any number, and none."""

    @settings(deadline=None, max_examples=300)
    @given(
        now=st.integers(1, 70_000),
        before=st.one_of(st.none(), st.integers(1, 70_000)),
        good=st.one_of(st.none(), st.integers(-5, 70_000)),
        seqs=st.integers(1, 3000),
        tried=st.integers(1, 9 * GIB),
        free=st.integers(0, 9 * GIB),
        step=st.one_of(st.none(), st.integers(1, 70_000)),
        computed=st.one_of(st.none(), st.integers(0, 200_000)),
        class_id=st.sampled_from(LIMITS),
    )
    def test_bounds(
        self,
        now: int,
        before: int | None,
        good: int | None,
        seqs: int,
        tried: int,
        free: int,
        step: int | None,
        computed: int | None,
        class_id: str,
    ) -> None:
        """Whatever the numbers, the value is at least 512 and twice the sequences, and at most half the budget."""
        facts: Facts = {"tried_bytes": tried, "free_bytes": free, "total_bytes": 80 * GIB}
        facts |= {"step_tokens": step} if step is not None else {}
        facts |= {"max_computed_tokens": computed} if computed is not None else {}
        case = case_of(now, before=before, max_num_seqs=seqs, max_model_len=131_072, peak=GIB)
        found = step_size(case, facts, {}, class_id, good)
        assert (found is None) == (now // 2 < max(512, 2 * seqs))
        if found is not None:
            assert max(512, 2 * seqs) <= found.tokens <= now // 2
            assert found.because.startswith(f"{found.tokens} is a starting value to test: ")

    @settings(deadline=None, max_examples=400)
    @given(
        now=ODD,
        before=ODD,
        values=st.dictionaries(
            st.sampled_from(
                [
                    "max_num_seqs",
                    "num_speculative_tokens",
                    "max_num_scheduled_tokens",
                    "max_model_len",
                    "gpu_memory_utilization",
                    "kv_cache_memory_bytes",
                    "num_gpu_blocks_override",
                ]
            ),
            ODD,
        ),
        memory=st.tuples(*(st.one_of(st.none(), st.integers(-5, 10**30)) for _ in range(3))),
        facts=st.dictionaries(st.sampled_from(NAMES), ODD),
        good=ODD,
        class_id=st.sampled_from(CLASS_IDS),
        unified=st.sampled_from([None, True]),
        chunked=st.sampled_from([None, True, False]),
        odd=st.dictionaries(
            st.sampled_from(["foreign_bytes", "vllm_at_least", "reserved_over_shortage"]), ODD
        ),
    )
    def test_nothing_breaks_it(
        self,
        now: object,
        before: object,
        values: dict[str, Any],
        memory: tuple[int | None, int | None, int | None],
        facts: Facts,
        good: Any,
        class_id: str,
        unified: bool | None,
        chunked: bool | None,
        odd: Facts,
    ) -> None:
        """No number, however odd, breaks the advice or makes it name a budget that is not below the present one."""
        kv, peak, blocks = memory
        case = case_of(now, before=before, kv=kv, peak=peak, blocks=blocks, **values)
        features = {"phase": "serving", "unified_device": unified, "chunked_prefill": chunked, **odd}
        features["budget_tokens"] = now
        known: Facts = {name: value for name, value in features.items() if value is not None}
        advice = advise(case, facts, known, builtin_classes()[class_id], good)
        recommended = advice.numbers.get("recommended_max_num_batched_tokens")
        if recommended is not None:
            assert isinstance(now, int)
            assert 512 <= recommended <= now // 2
        for size in re.findall(r"--max-num-batched-tokens (-?\d+)", said(advice)):
            assert isinstance(now, int)
            assert 0 < int(size) < now or class_id == "workspace_locked"
        assert all(number > 0 for number in advice.numbers.values())


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
            (case_of(before=9000), {}, {}, "previous_budget_tokens", None),
            (case_of(before=2048, state="dead"), {}, {}, "previous_budget_tokens", None),
            (case_of(kv_cache_memory_bytes=GIB), {}, {}, "pin_kv_cache_bytes", GIB),
            (case_of(num_gpu_blocks_override=100), {}, {}, "pin_kv_cache_bytes", None),
            (case_of(), {}, {"vllm_at_least": 10.01}, "pin_kv_cache_bytes", None),
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
            "budget-lowered",
            "budget-of-a-life-that-died",
            "pool-in-bytes-by-hand",
            "pool-in-blocks-by-hand",
            "pool-of-an-old-version",
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
        advice = advise(
            case_of(16384),
            sizes(896, 448, total_bytes=80 * GIB, step_tokens=16384),
            {"phase": "serving", "vllm_at_least": 32.0},
            builtin_classes()["prefill_budget"],
        )
        assert advice.numbers == {"recommended_max_num_batched_tokens": 4096, "pin_kv_cache_bytes": 40 * GIB}
        first = advice.do[0]
        assert first.flags == f"--max-num-batched-tokens 4096 --kv-cache-memory-bytes {40 * GIB}"
        assert "Pin the KV pool at its present 40.00 GiB in the same change" in first.text
        assert advice.because is not None

    @pytest.mark.parametrize("class_id", LIMITS)
    def test_every_smaller_budget_is_paired(self, class_id: str) -> None:
        """No class advises a smaller budget without what must go with it."""
        features: Facts = {"phase": "serving", "vllm_at_least": 32.0}
        case = case_of(16384, before=2048)
        advice = advise(case, sizes(896, 448, step_tokens=16384), features, builtin_classes()[class_id])
        flags = [one.flags for one in advice.do if "--max-num-batched-tokens" in (one.flags or "")]
        assert flags
        assert [one for one in flags if f"--kv-cache-memory-bytes {40 * GIB}" not in str(one)] == []

    @pytest.mark.parametrize("class_id", LIMITS)
    def test_going_back_comes_first(self, class_id: str) -> None:
        """Where the budget was raised from one that served, the first advice is to undo that."""
        facts = sizes(896, 448, step_tokens=16384)
        one = builtin_classes()[class_id]
        raised = advise(case_of(16384, before=3000), facts, {"phase": "serving"}, one).do[0]
        told = advise(case_of(16384), facts, {"phase": "serving"}, one, 3000).do[0]
        assert raised == told
        assert raised.text.startswith("Go back to a budget of 3000 tokens, the last that served")
        assert str(raised.flags).startswith("--max-num-batched-tokens 3000")
        for other in (advise(case_of(16384, before=b), facts, {}, one) for b in (None, 16384, 32768)):
            assert "Go back" not in said(other)

    def test_one_value_is_offered_once(self) -> None:
        """Where going back and lowering end at the same value, it is said once."""
        facts = sizes(896, 448, step_tokens=16384)
        advice = advise(case_of(16384, before=4096), facts, {}, builtin_classes()["prefill_budget"])
        assert said(advice).count("--max-num-batched-tokens 4096") == 1

    @pytest.mark.parametrize("class_id", CLASS_IDS)
    def test_what_can_be_undone_comes_first(self, class_id: str) -> None:
        """Another release of the software comes after every flag that is known to help."""
        rules = builtin_classes()[class_id].remedies
        releases = [
            n
            for n, r in enumerate(rules)
            if re.match(r"Upgrade|Follow|Look for a release|Use a kernel", r.do)
        ]
        assert [n for n in releases if any(r.flags for r in rules[n:])] == []

    @pytest.mark.parametrize(
        ("facts", "features", "expected"),
        [
            ({"max_prompt_tokens": 16_380}, {}, "; a 16,380-token prompt takes 4 steps instead of 1"),
            ({"max_prompt_tokens": 41_000}, {}, "; a 41,000-token prompt takes 11 steps instead of 3"),
            (
                {"max_prompt_tokens": 41_000},
                {"chunked_prefill": False},
                "; a 41,000-token prompt takes 11 steps instead of 1",
            ),
            (
                {"max_prompt_tokens": 900, "max_computed_tokens": 41_000},
                {},
                "; a 41,000-token prompt takes 11 steps instead of 3",
            ),
            ({"max_prompt_tokens": 900}, {}, "; a 900-token prompt still takes 1 step"),
            ({}, {}, "; a prompt that fills a step of 16,384 tokens takes 4 steps instead of 1"),
        ],
        ids=["one-step", "several", "whole-prompts-before", "a-later-chunk", "short", "unknown"],
    )
    def test_the_cost_is_in_steps(self, facts: Facts, features: Facts, expected: str) -> None:
        """A smaller step costs more steps for a prompt like the one that failed."""
        all_facts = sizes(896, 448, step_tokens=16384, **facts)
        advice = advise(
            case_of(16384), all_facts, {**features, **all_facts}, builtin_classes()["prefill_budget"]
        )
        assert str(advice.do[0].cost).endswith(expected)

    def test_nothing_is_lowered_that_is_small_already(self) -> None:
        """A budget whose half serves nobody well is left where it is."""
        features: Facts = {"budget_tokens": 1000, "phase": "serving"}
        advice = advise(case_of(1000), sizes(896, 448), features, builtin_classes()["prefill_budget"])
        assert advice.do[0].text.startswith("Leave the budget of 1000 tokens")
        assert "--max-num-batched-tokens" not in said(advice)

    def test_a_capped_step_is_marked_untested(self) -> None:
        """From 0.26 the scheduler may be capped instead, with the budget unchanged, which nobody has tested."""
        one = builtin_classes()["prefill_budget"]
        for version, there in ((25.0, False), (26.0, True)):
            advice = advise(case_of(16384), {}, {"vllm_at_least": version}, one)
            capped = [r for r in advice.do if r.flags == "--max-num-scheduled-tokens 8192"]
            assert bool(capped) is there
            assert all(r.text.startswith("Untested: leave max_num_batched_tokens as it is") for r in capped)

    @pytest.mark.parametrize(
        "less", ["spec_decode", "workspace_locked", "kv_cache_no_room", "static_overcommit"]
    )
    def test_no_smaller_budget_where_it_does_not_help(self, less: str) -> None:
        """Classes that a smaller budget does not cure name none; a locked workspace needs a larger one."""
        advice = advise(case_of(16384), sizes(896, 448, step_tokens=16384), {}, builtin_classes()[less])
        assert "recommended_max_num_batched_tokens" not in advice.numbers
        found = re.findall(r"--max-num-batched-tokens (\d+)", said(advice))
        assert found == (["32768"] if less == "workspace_locked" else [])

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

    @pytest.mark.parametrize("class_id", CLASS_IDS)
    def test_a_unified_device_pins_nothing(self, class_id: str) -> None:
        """A device that shares its memory with the host is not told to pin its pool, nor to cap only the step."""
        facts = sizes(896, 448, total_bytes=120 * GIB, step_tokens=16384)
        features: Facts = {"unified_device": True, "phase": "serving", "vllm_at_least": 32.0}
        case = case_of(16384, before=2048, blocks=100)
        advice = advise(case, facts, features, builtin_classes()[class_id])
        assert "pin_kv_cache_bytes" not in advice.numbers
        flags = [remedy.flags or "" for remedy in advice.do]
        wrong = ("--kv-cache-memory", "--num-gpu-blocks", "--max-num-scheduled")
        assert [flag for flag in flags if any(one in flag for one in wrong)] == []
        if class_id == "prefill_budget":
            assert flags[0] == "--max-num-batched-tokens 2048 --gpu-memory-utilization 0.9"


class TestPairing:
    """What must go with a smaller budget."""

    @pytest.mark.parametrize(
        ("case", "features", "flags", "says"),
        [
            (
                case_of(),
                {"vllm_at_least": 10.02},
                f"--kv-cache-memory-bytes {40 * GIB}",
                "at its present 40.00 GiB",
            ),
            (case_of(), {}, f"--kv-cache-memory-bytes {40 * GIB}", "The flag needs vLLM 0.10.2 or newer."),
            (
                case_of(blocks=27919),
                {"vllm_at_least": 6.02},
                "--num-gpu-blocks-override 27919",
                "at its 27919 blocks",
            ),
            (case_of(blocks=27919), {}, "--num-gpu-blocks-override 27919", "at its 27919 blocks"),
            (
                case_of(blocks=27919),
                {"vllm_at_least": 11.0},
                f"--kv-cache-memory-bytes {40 * GIB}",
                "at its present 40.00 GiB",
            ),
            (
                case_of(blocks=27919, kv=None),
                {"vllm_at_least": 4.0},
                "",
                "num_gpu_blocks of the metric vllm:cache_config_info",
            ),
            (case_of(), {"vllm_at_least": 9.0}, "", "num_gpu_blocks of the metric vllm:cache_config_info"),
            (case_of(kv=None), {"vllm_at_least": 32.0}, "", '"Available KV cache memory"'),
            (case_of(kv=None), {"phase": "startup"}, "", ""),
            (
                case_of(num_gpu_blocks_override=500),
                {"vllm_at_least": 32.0},
                "--num-gpu-blocks-override 500",
                "Leave the KV pool at its 500 blocks.",
            ),
            (
                case_of(kv_cache_memory_bytes=GIB),
                {"kv_pinned": True},
                f"--kv-cache-memory-bytes {GIB}",
                "Leave the KV pool at its 1.00 GiB.",
            ),
            (case_of(), {"unified_device": True}, "", "do not pin the KV pool"),
            (
                case_of(),
                {"chunked_prefill": False, "vllm_at_least": 11.0},
                f"--enable-chunked-prefill --kv-cache-memory-bytes {40 * GIB}",
                "without it a budget below max_model_len is refused",
            ),
        ],
        ids=[
            "bytes",
            "bytes-version-unknown",
            "blocks",
            "blocks-version-unknown",
            "bytes-rather-than-blocks",
            "blocks-too-old",
            "old-and-unknown",
            "unknown",
            "not-sized-yet",
            "blocks-by-hand",
            "bytes-by-hand",
            "unified",
            "chunked-prefill-off",
        ],
    )
    def test_one(self, case: Case, features: Facts, flags: str, says: str) -> None:
        """The pool is kept in the way that the version has, and what is not in the log is asked for."""
        found, _ = numbers(case, {}, features, "prefill_budget")
        typed, sentence = pairing(case, features, found)
        assert typed == flags
        assert says in sentence
