"""Does a smaller step cure it: the exact test, epochs, and every state with its numbers."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.diagnosis.confirm import Confirmation, confirm, document, epochs, exact_pvalue, needed
from exporter.diagnosis.exposure import Failed, LifeExposure

BASE: dict[str, Any] = {
    "gpu_memory_utilization": 0.9,
    "max_model_len": 32768,
    "enforce_eager": False,
    "model": "tiny",
    "vllm_version": "0.32.0",
}
GIB = 1 << 30


def failure(class_id: str = "prefill_budget", **more: Any) -> Failed:
    """One failure of a full step of 16384 tokens with a prompt of 30000."""
    facts: dict[str, Any] = {
        "incident": "a",
        "time": None,
        "phase": "serving",
        "fatal": True,
        "step_tokens": 16384,
        "longest_prompt": 30000,
        "prompts": (30000, 12),
    }
    return Failed(class_id=class_id, **(facts | more))


class Server:
    """A history that is written down life by life."""

    def __init__(self) -> None:
        self.lives: list[LifeExposure] = []

    def run(
        self,
        budget: int | None,
        long: int | dict[int, float] | None = None,
        *failures: Failed,
        source: str = "metrics",
        pool: int | None = None,
        **changed: Any,
    ) -> Server:
        """One life. ``long``: prompts of 5000 tokens and more that finished, or counts by length."""
        counts = {1: 40.0, 5001: float(long), 20001: 0.0} if isinstance(long, int) else long
        named = {} if budget is None else {"max_num_batched_tokens": budget}
        self.lives.append(
            LifeExposure(
                len(self.lives),
                settings={**BASE, **named, **changed},
                served=True,
                prompts={} if counts is None else {source: counts},
                kv_cache_bytes=pool,
                failures=list(failures),
            )
        )
        return self

    def verdict(self) -> Confirmation:
        """How it stands."""
        return confirm(self.lives)


def failed_twice() -> Server:
    """Healthy at 8192, then two failures in ten long prompts at 16384."""
    return (
        Server()
        .run(8192, 50)
        .run(16384, 5, failure())
        .run(16384, 3, failure(longest_prompt=28000, prompts=()))
    )


class TestExactTest:
    """The p-value and the number it asks for."""

    @pytest.mark.parametrize(
        ("failures", "old", "total"),
        [(1, 1, 19), (1, 10, 190), (2, 10, 35), (3, 10, 18), (4, 100, 112), (5, 100, 83), (10, 100, 35)],
    )
    def test_needed(self, failures: int, old: int, total: int) -> None:
        """19, 3.5, 1.7, 1.1, 0.82 and 0.35 times the old exposures, rounded up."""
        assert needed(failures, old) == total

    @given(failures=st.integers(1, 10_000), more=st.integers(0, 10**12))
    @settings(max_examples=300)
    def test_needed_is_the_fewest(self, failures: int, more: int) -> None:
        """With as many the p-value is small enough, with one less it is not."""
        old = failures + more
        total = needed(failures, old)
        assert exact_pvalue(failures, old, total) <= 0.05 < exact_pvalue(failures, old, total - 1)

    @given(failures=st.integers(1, 40), more=st.integers(0, 2000))
    def test_needed_in_whole_numbers(self, failures: int, more: int) -> None:
        """The same by fractions, which do not round."""
        old = failures + more
        total = needed(failures, old)
        ps = [Fraction(old, old + new) ** failures for new in (total, total - 1)]
        assert ps[0] <= Fraction(1, 20) < ps[1]

    @pytest.mark.parametrize("failures", [1, 2, 3])
    def test_a_change_that_does_nothing(self, failures: int) -> None:
        """Watched prompt by prompt, at most one useless change in twenty is confirmed."""
        rng = random.Random(failures)  # noqa: S311

        def survived() -> int:
            return int(math.log(1 - rng.random()) / math.log1p(-0.02))

        runs = 2000
        confirmed = 0
        for _ in range(runs):
            server = Server()
            for _ in range(failures):
                server.run(16384, survived(), failure())
            confirmed += server.run(2048, survived()).verdict().state == "confirmed"
        assert 0.02 <= confirmed / runs <= 0.062


class TestStates:
    """What is said, of servers that failed at 16384."""

    def test_too_few_prompts(self) -> None:
        """Accruing, with the total that is needed."""
        assert document(failed_twice().run(2048, 12).verdict()) == {
            "state": "accruing",
            "old_budget": 16384,
            "new_budget": 2048,
            "failures": 2,
            "old_exposures": 10,
            "exposures": 12,
            "exposures_needed": 35,
            "pvalue": 0.207,
            "also_changed": [],
            "threshold_tokens": 5001,
            "says": "At 16384 tokens a step 2 of 10 prompts of 5001 tokens or more failed, at 2048 none of 12 so "
            "far; 23 more without a failure are needed (35 in all).",
        }

    @pytest.mark.parametrize(("long", "state"), [(0, "accruing"), (34, "accruing"), (35, "confirmed")])
    def test_where_it_turns(self, long: int, state: str) -> None:
        """The prompt that is needed confirms, the one before does not."""
        verdict = failed_twice().run(2048, long).verdict()
        assert (verdict.state, verdict.exposures, verdict.exposures_needed) == (state, long, 35)

    def test_confirmed(self) -> None:
        """Says what may still be: at most one in a third of the prompts."""
        verdict = failed_twice().run(2048, 36).verdict()
        assert verdict.pvalue == (10 / 46) ** 2
        assert verdict.says == (
            "At 16384 tokens a step 2 of 10 prompts of 5001 tokens or more failed, at 2048 none of 36 (p=0.047): the "
            "smaller step cures it. At most 1 in 12 long prompts can still fail (95 %)."
        )

    def test_several_lives_accrue(self) -> None:
        """Restarts with equal settings go on counting."""
        verdict = failed_twice().run(2048, 20).run(2048, 15).verdict()
        assert (verdict.state, verdict.exposures) == ("confirmed", 35)

    def test_one_failure(self) -> None:
        """One failure asks for 19 times as many prompts, and says what is quicker."""
        verdict = Server().run(16384, 9, failure()).run(2048, 100).verdict()
        assert (verdict.state, verdict.old_exposures, verdict.exposures_needed) == ("accruing", 10, 190)
        assert "19 times" in verdict.says
        assert "replaying" in verdict.says

    def test_no_exposure_but_the_failures(self) -> None:
        """Died of the first long prompt, twice: the killed ones are all there is."""
        verdict = Server().run(16384, 0, failure()).run(16384, 0, failure()).run(2048, 6).verdict()
        assert (verdict.old_exposures, verdict.exposures, verdict.exposures_needed) == (2, 6, 7)

    @pytest.mark.parametrize(
        "class_id",
        [
            "prefill_budget",
            "context_workspace",
            "moe_workspace",
            "fragmentation",
            "static_overcommit",
            "unknown",
        ],
    )
    def test_a_failure_at_the_lower_budget(self, class_id: str) -> None:
        """Refutes at once, whatever its step was, and however many prompts went well."""
        verdict = failed_twice().run(2048, 500, failure(class_id, step_tokens=700)).verdict()
        assert verdict.state == "refuted"
        assert (verdict.pvalue, verdict.exposures_needed) == (None, None)
        assert verdict.says == (
            f"2 failures at 16384 tokens a step, and 1 at 2048 too ({class_id}): a smaller step alone does not cure it."
        )

    def test_refuted_stays(self) -> None:
        """A restart with the same settings does not wash a failure away."""
        assert failed_twice().run(2048, 5, failure()).run(2048, 900).verdict().state == "refuted"

    def test_refuted_in_spite_of_help(self) -> None:
        """Lowering the utilisation too could only help: the failure refutes all the more."""
        verdict = failed_twice().run(2048, 5, failure(), gpu_memory_utilization=0.8).verdict()
        assert (verdict.state, verdict.also_changed) == ("refuted", ("gpu_memory_utilization",))
        assert verdict.says.endswith("Nor did the change of gpu_memory_utilization.")

    @pytest.mark.parametrize("changed", [{"gpu_memory_utilization": 0.97}, {"model": "large"}])
    def test_a_failure_after_another_change(self, changed: dict[str, Any]) -> None:
        """Where what changed too may have caused the failure, nothing is refuted."""
        verdict = failed_twice().run(2048, 5, failure(), **changed).verdict()
        assert (verdict.state, verdict.also_changed) == ("confounded", tuple(changed))
        assert verdict.says.endswith("changed too, but failures went on.")

    @pytest.mark.parametrize(
        ("class_id", "phase"),
        [("workspace_locked", "serving"), ("kv_cache_no_room", "startup"), ("unknown", "startup")],
    )
    def test_another_death(self, class_id: str, phase: str) -> None:
        """A new way to die at the lower budget never confirms, and is named."""
        verdict = failed_twice().run(2048, 500, failure(class_id, phase=phase)).verdict()
        assert (verdict.state, verdict.exposures) == ("accruing", 500)
        assert verdict.says.endswith(
            f"But at 2048 the server now dies of {class_id}, so this is no cure yet."
        )

    @pytest.mark.parametrize("fatal", [True, False])
    def test_a_death_known_from_before(self, fatal: bool) -> None:
        """What killed at the old budget too, or did not kill, is no reason to doubt."""
        server = Server().run(16384, 3, failure(), failure(), failure("host_memory"))
        assert server.run(2048, 500, failure("host_memory", fatal=fatal)).verdict().state == "confirmed"

    def test_a_survived_failure_of_another_kind(self) -> None:
        """A failure that the engine survived is no death."""
        assert failed_twice().run(2048, 500, failure("sampler", fatal=False)).verdict().state == "confirmed"

    def test_a_fresh_process_is_no_cure(self) -> None:
        """One process has to take what the failing one had taken, however many there were in all."""
        server = Server().run(16384, 40, failure()).run(16384, 0, failure()).run(16384, 0, failure())
        for _ in range(5):
            server.run(2048, 40)
        verdict = server.verdict()
        assert (verdict.state, verdict.exposures, verdict.exposures_needed) == ("accruing", 200, 74)
        assert "a process that failed had taken 41, and none has taken more than 40" in verdict.says
        assert server.run(2048, 41).verdict().state == "confirmed"

    def test_repeats_of_one_prompt(self) -> None:
        """Failures of the same prompts are told as what they may be."""
        server = Server().run(16384, 5, failure()).run(16384, 3, failure())
        assert (
            server.run(2048, 12)
            .verdict()
            .says.endswith("All failures had the same prompts, so they may be one that was sent again.")
        )


class TestEpochs:
    """What is compared with what."""

    def test_there_and_back(self) -> None:
        """A, B, A, B: equal settings are one epoch, and the failure at A's return is evidence."""
        server = Server().run(16384, 4, failure()).run(2048, 20).run(16384, 4, failure(prompts=(29000,)))
        verdict = server.run(2048, 20).verdict()
        assert (verdict.failures, verdict.old_exposures, verdict.exposures) == (2, 10, 40)
        assert verdict.state == "confirmed"
        assert verdict.says.endswith("It had failed again when 16384 came back.")

    def test_back_at_the_old_budget(self) -> None:
        """While the larger budget is in force, there is no experiment."""
        verdict = Server().run(16384, 4, failure()).run(2048, 20).run(16384, 4).verdict()
        assert (verdict.state, verdict.old_budget, verdict.new_budget) == ("none", 16384, 16384)
        assert verdict.threshold_tokens == 16384

    def test_a_larger_one(self) -> None:
        """A budget above the failing one proves nothing."""
        assert Server().run(16384, 4, failure()).run(32768, 900).verdict().state == "none"

    def test_no_failure(self) -> None:
        """Without a failure there is nothing to cure; the threshold is what fills a step."""
        verdict = Server().run(16384, 10).run(2048, 10).verdict()
        assert document(verdict) == {
            "state": "none",
            "new_budget": 2048,
            "failures": 0,
            "also_changed": [],
            "threshold_tokens": 2048,
            "says": "There was no failure that a smaller step might cure.",
        }

    def test_changed_utilisation(self) -> None:
        """More than the budget changed and nothing else to lean on: confounded, with what changed."""
        verdict = (
            Server().run(16384, 4, failure(), failure()).run(2048, 900, gpu_memory_utilization=0.8).verdict()
        )
        assert verdict.state == "confounded"
        assert verdict.also_changed == ("gpu_memory_utilization",)
        assert (verdict.pvalue, verdict.exposures_needed) == (None, None)
        assert verdict.says == (
            "2 failures at 16384 tokens a step; since then the limit was lowered to 2048 and gpu_memory_utilization "
            "changed too, so nobody can tell which of them matters."
        )

    def test_an_earlier_run_to_lean_on(self) -> None:
        """Enough long prompts at 4096 before the failures, and no other difference."""
        server = Server().run(4096, 60).run(16384, 4, failure(), failure())
        verdict = server.run(2048, 3, gpu_memory_utilization=0.8, max_num_seqs=8).verdict()
        assert (verdict.state, verdict.new_budget, verdict.exposures) == ("confirmed", 4096, 60)
        assert verdict.also_changed == ("gpu_memory_utilization",)
        assert verdict.says.endswith(
            "The current run, at 2048, does not count for this: gpu_memory_utilization changed too."
        )

    def test_a_later_run_to_lean_on(self) -> None:
        """A quiet run after the failures counts too, also when the settings have moved on."""
        server = Server().run(16384, 4, failure(), failure()).run(4096, 60).run(2048, 3, max_model_len=4096)
        assert (server.verdict().state, server.verdict().new_budget) == ("confirmed", 4096)

    def test_too_little_to_lean_on(self) -> None:
        """An earlier run that took too few prompts will not take more: it does not accrue."""
        server = Server().run(4096, 5).run(16384, 4, failure(), failure())
        verdict = server.run(2048, 900, gpu_memory_utilization=0.8).verdict()
        assert verdict.state == "confounded"
        assert verdict.says.endswith(
            "Runs at 4096 differ in the limit alone, but their 5 long prompts are too few or too new (21 are needed)."
        )

    def test_a_failing_run_is_nothing_to_lean_on(self) -> None:
        """A lower budget that failed as well carries no verdict."""
        server = Server().run(4096, 900, failure()).run(16384, 4, failure(), failure())
        assert server.run(2048, 9, gpu_memory_utilization=0.8).verdict().state == "confounded"

    def test_a_larger_budget_is_nothing_to_lean_on(self) -> None:
        """That a larger step went well says nothing for a smaller one."""
        server = Server().run(65536, {40000: 900.0}, source="iteration")
        server.run(16384, {40000: 4.0}, failure(), failure(), source="iteration")
        server.run(2048, {40000: 9.0}, source="iteration", gpu_memory_utilization=0.8)
        assert server.verdict().state == "confounded"

    def test_most_evidence(self) -> None:
        """Of two failing budgets the one that says more is compared, not the one that failed more often."""
        server = Server().run(32768, 900, failure(), failure(), failure()).run(16384, 2, failure(), failure())
        verdict = server.run(2048, 30).verdict()
        assert (verdict.old_budget, verdict.failures, verdict.state) == (16384, 2, "confirmed")

    def test_what_an_epoch_knows(self) -> None:
        """A life that lacks a setting joins; from then on the epoch knows what its lives know together."""
        server = Server().run(2048, 1).run(2048, 1).run(2048, 1, gpu_memory_utilization=0.8)
        del server.lives[0].settings["gpu_memory_utilization"]
        assert [[life.index for life in epoch.lives] for epoch in epochs(server.lives)] == [[0, 1], [2]]

    def test_fewer_scheduled_tokens(self) -> None:
        """The limit that binds counts: fewer scheduled tokens at the same budget are a smaller step."""
        server = Server().run(16384, 4, failure(), failure()).run(16384, 60, max_num_scheduled_tokens=2048)
        verdict = server.verdict()
        assert (verdict.state, verdict.old_budget, verdict.new_budget) == ("confirmed", 16384, 2048)

    def test_two_ways_to_one_limit(self) -> None:
        """Equal limits with different reservations are two epochs."""
        server = Server().run(2048, 1).run(16384, 1, max_num_scheduled_tokens=2048).run(2048, 1)
        assert [[life.index for life in epoch.lives] for epoch in epochs(server.lives)] == [[0, 2], [1]]

    @pytest.mark.parametrize("changed", [{"port": 9000}, {"swap_space": 8}, {"enable_lora": None}])
    def test_settings_that_do_not_matter(self, changed: dict[str, Any]) -> None:
        """What can't matter for memory, or says the default once more, confounds nothing."""
        server = Server().run(16384, 4, failure(), failure(), port=8000, swap_space=4, enable_lora=False)
        assert (
            server.run(2048, 60, **({"port": 8000, "swap_space": 4} | changed)).verdict().state == "confirmed"
        )

    @pytest.mark.parametrize(
        "changed",
        [
            {"vllm_version": "0.33.0"},
            {"model": "other"},
            {"tensor_parallel_size": 2},
            {"enable_chunked_prefill": False},
            {"multimodal_limits": True},
            {"device_name": "NVIDIA_A100-SXM4-80GB"},
        ],
    )
    def test_settings_that_matter(self, changed: dict[str, Any]) -> None:
        """What can matter for memory confounds."""
        before: dict[str, Any] = {
            "tensor_parallel_size": 1,
            "enable_chunked_prefill": True,
            "multimodal_limits": False,
            "device_name": "NVIDIA_H100_80GB_HBM3",
        }
        server = Server().run(16384, 4, failure(), failure(), **before)
        verdict = server.run(2048, 60, **(before | changed)).verdict()
        assert (verdict.state, verdict.also_changed) == ("confounded", tuple(changed))

    @pytest.mark.parametrize(
        ("before", "after", "state"),
        [
            (40 * GIB, 40 * GIB, "confirmed"),
            (40 * GIB, 40 * GIB - (5 << 20), "confirmed"),
            (40 * GIB, 44 * GIB, "confirmed"),
            (40 * GIB, 39 * GIB, "confounded"),
            (None, 40 * GIB, "confounded"),
            (40 * GIB, None, "confounded"),
        ],
        ids=["same", "rounded", "larger", "smaller", "before-unknown", "after-unknown"],
    )
    def test_a_pinned_pool(self, before: int | None, after: int | None, state: str) -> None:
        """The pool pinned at its old size, as is advised with a smaller budget, is no other change."""
        server = Server().run(16384, 4, failure(), failure(), pool=before, kv_cache_memory_bytes=None)
        verdict = server.run(2048, 60, pool=after, kv_cache_memory_bytes=after or 1).verdict()
        assert verdict.state == state

    def test_a_start_under_way(self) -> None:
        """A start that has not named its budget yet leaves the verdict where it was."""
        server = failed_twice().run(2048, 40)
        server.lives.append(LifeExposure(9))
        assert server.verdict().state == "confirmed"

    def test_unknown_limit(self) -> None:
        """A server that serves without its budget in the log can't be compared."""
        verdict = failed_twice().run(None, 900).verdict()
        assert (verdict.state, verdict.new_budget, verdict.threshold_tokens) == ("none", None, None)
        assert (
            verdict.says == "2 failures before, but the step limit of the running server is not in its log."
        )

    def test_unknown_settings(self) -> None:
        """A setting that only one side knows is no change, but is told."""
        server = failed_twice().run(2048, 40)
        del server.lives[-1].settings["gpu_memory_utilization"]
        verdict = server.verdict()
        assert verdict.state == "confirmed"
        assert verdict.says.endswith("Whether gpu_memory_utilization changed is not in the log.")

    def test_nothing(self) -> None:
        """No life at all."""
        assert confirm([]).state == "none"
        assert confirm([LifeExposure(0)]).state == "none"


class TestFailuresThatCount:
    """Which failures a smaller step might cure."""

    @pytest.mark.parametrize(
        ("class_id", "step", "counts"),
        [
            ("prefill_budget", 16384, True),
            ("prefill_budget", None, True),
            ("prefill_budget", 4000, True),
            ("moe_workspace", 16000, True),
            ("context_workspace", 16384, True),
            ("fragmentation", 14746, True),
            ("fragmentation", 14745, False),
            ("unknown", 16384, True),
            ("unknown", None, False),
            ("prompt_logprobs", 16384, False),
            ("sampler", 16384, False),
            ("static_overcommit", 16384, False),
        ],
    )
    def test_one(self, class_id: str, step: int | None, counts: bool) -> None:
        """The class itself always; neighbours where the step was full; others never."""
        server = Server().run(16384, 4, failure(class_id, step_tokens=step)).run(2048, 60)
        assert (server.verdict().state != "none") == counts

    def test_not_at_start(self) -> None:
        """A failure of a start is another matter."""
        assert Server().run(16384, 4, failure(phase="startup")).run(2048, 60).verdict().state == "none"


class TestExposures:
    """Where prompts are counted from, and with which source."""

    @pytest.mark.parametrize(
        ("failed", "threshold"),
        [
            ({}, 2048),
            ({"longest_prompt": 1500, "prompts": (1500,)}, 1500),
            ({"longest_prompt": None, "prompts": (1800, 9)}, 1800),
            ({"longest_prompt": None, "prompts": (), "step_tokens": 900}, 900),
            ({"longest_prompt": None, "prompts": (), "step_tokens": None}, 2048),
            ({"longest_prompt": -5, "prompts": (), "step_tokens": 10**30}, 2048),
        ],
        ids=["dump", "shorter", "prompts", "step", "nothing", "nonsense"],
    )
    def test_threshold(self, failed: dict[str, Any], threshold: int) -> None:
        """As long as the shortest that failed, or as fills the smaller step; the same on both sides."""
        counts = dict.fromkeys((100, 899, 900, 1499, 1500, 1799, 1800, 2047, 2048, 20000), 1.0)
        server = Server().run(16384, counts, failure(**failed), source="iteration")
        verdict = server.run(2048, counts, source="iteration").verdict()
        assert verdict.threshold_tokens == threshold
        long = sum(length >= threshold for length in counts)
        assert (verdict.exposures, verdict.old_exposures) == (long, long + 1)

    def test_a_bucket_that_straddles(self) -> None:
        """A histogram counts from its next bound on: prompts of 2048 to 5000 are not told apart."""
        before, after = {1001: 30.0, 2001: 70.0, 5001: 4.0}, {1001: 30.0, 2001: 70.0, 5001: 9.0}
        verdict = Server().run(16384, before, failure()).run(2048, after).verdict()
        assert (verdict.threshold_tokens, verdict.old_exposures, verdict.exposures) == (5001, 5, 9)

    def test_buckets_that_changed(self) -> None:
        """Of two sets of buckets only a bound that both have will do."""
        before, after = {2048: 70.0, 5001: 4.0, 10001: 2.0}, {3001: 70.0, 10001: 9.0}
        verdict = Server().run(16384, before, failure()).run(2048, after).verdict()
        assert (verdict.threshold_tokens, verdict.old_exposures, verdict.exposures) == (10001, 3, 9)

    def test_buckets_that_end_too_soon(self) -> None:
        """Where no common bound is high enough the histogram is of no use, and that is said."""
        verdict = Server().run(16384, {1001: 30.0}, failure()).run(2048, {1001: 90.0}).verdict()
        assert (verdict.state, verdict.exposures, verdict.exposures_needed) == ("accruing", None, None)
        assert verdict.says == (
            "One failure at 16384 tokens a step and none at 2048, but the buckets of vllm:request_prompt_tokens do "
            "not tell prompts of 2048 tokens or more on both sides, so they can't be compared."
        )

    def test_a_failure_below_the_bucket(self) -> None:
        """A failing prompt shorter than the bound that is counted from belongs to other exposures."""
        short = failure(longest_prompt=3000, prompts=(3000,))
        verdict = Server().run(16384, 5, failure(), short).run(4096, 90).verdict()
        assert (verdict.threshold_tokens, verdict.failures, verdict.old_exposures) == (5001, 1, 6)

    def test_the_killed_prompt_in_the_log(self) -> None:
        """A line of the log said that it came: it is not counted twice."""
        server = Server().run(16384, {30000: 5.0}, failure(), source="requests")
        verdict = server.run(2048, {30000: 5.0}, source="requests").verdict()
        assert (verdict.old_exposures, verdict.exposures, verdict.threshold_tokens) == (5, 5, 2048)

    def test_no_source_on_both_sides(self) -> None:
        """What one side counted in the log and the other in /metrics is not compared."""
        server = Server().run(16384, {30000: 5.0}, failure(), source="requests")
        verdict = server.run(2048, 900).verdict()
        assert (verdict.state, verdict.exposures, verdict.failures) == ("accruing", None, 1)
        assert "long prompts were not counted by one source on both sides" in verdict.says

    def test_the_best_source_of_both(self) -> None:
        """Lines of requests before histograms before steps, where both sides have them."""
        server = Server().run(16384, 5, failure()).run(2048, 7)
        for life, count in zip(server.lives, (3.0, 4.0), strict=True):
            life.prompts |= {"iteration": {30000: 90.0}, "requests": {30000: count}}
        assert server.verdict().exposures == 4

    def test_the_source_that_covers_most_failures(self) -> None:
        """A better source that was there for one failure only gives way to one that saw both."""
        server = Server().run(16384, 5, failure()).run(16384, 5, failure()).run(2048, 7)
        for life in server.lives[1:]:
            life.prompts["requests"] = {30000: 5.0}
        verdict = server.verdict()
        assert (verdict.failures, verdict.old_exposures, verdict.exposures) == (2, 12, 7)

    def test_a_log_that_counted_nothing(self) -> None:
        """A failure is an exposure even if no line told of its prompt."""
        server = Server().run(16384, {}, failure(), source="requests")
        verdict = server.run(2048, {30000: 3.0}, source="requests").verdict()
        assert (verdict.old_exposures, verdict.exposures_needed) == (1, 19)

    def test_a_life_that_nobody_counted(self) -> None:
        """A failure in a life without counts is left out: what it had survived is not known."""
        server = Server().run(16384, None, failure()).run(16384, 4, failure()).run(2048, 12)
        verdict = server.verdict()
        assert (verdict.failures, verdict.old_exposures, verdict.exposures_needed) == (1, 5, 95)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2048, 8192, 16384, 10**400, -1, 0, 1 << 62]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
_NAMES = st.sampled_from(
    ["max_num_batched_tokens", "max_num_scheduled_tokens", "gpu_memory_utilization", "model", "port", "enforce_eager",
     "kv_cache_memory_bytes", "vllm_version"]
)  # fmt: skip
_TOKENS = st.one_of(st.none(), st.integers(-5, 40_000), st.just(10**400))
_FAILED = st.builds(
    Failed,
    incident=st.just("a"),
    time=st.none(),
    class_id=st.sampled_from(["prefill_budget", "unknown", "static_overcommit", "kv_cache_no_room", "<b>"]),
    phase=st.sampled_from(["serving", "startup", ""]),
    fatal=st.booleans(),
    step_tokens=_TOKENS,
    longest_prompt=_TOKENS,
    prompts=st.lists(st.integers(-5, 40_000), max_size=3).map(tuple),
)
LIVES = st.lists(
    st.builds(
        LifeExposure,
        index=st.integers(0, 5),
        settings=st.dictionaries(_NAMES, _VALUES, max_size=5).flatmap(
            lambda some: st.sampled_from([some, {**some, "max_num_batched_tokens": 2048},
                                          {**some, "max_num_batched_tokens": 16384}])
        ),
        served=st.booleans(),
        prompts=st.dictionaries(
            st.sampled_from(["requests", "metrics", "iteration", "other"]),
            st.dictionaries(st.integers(-2, 40_000), st.one_of(st.floats(), st.floats(0, 500)), max_size=4),
            max_size=3,
        ),
        steps=st.integers(0, 90),
        full_steps=st.integers(-5, 90),
        largest_step=st.integers(-5, 40_000),
        near_misses=st.integers(0, 2),
        kv_cache_bytes=_TOKENS,
        failures=st.lists(_FAILED, max_size=3),
    ),
    max_size=6,
)  # fmt: skip


@given(lives=LIVES)
@settings(max_examples=100, deadline=None)
def test_whatever_comes(lives: list[LifeExposure]) -> None:
    """Nothing raises, the document is JSON, and its numbers agree with its state."""
    verdict = confirm(lives)
    json.dumps(document(verdict), allow_nan=False)
    assert verdict.says
    if verdict.state in ("accruing", "confirmed", "refuted", "confounded"):
        assert verdict.old_budget is not None
        assert verdict.new_budget is not None
        assert verdict.new_budget < verdict.old_budget
        assert verdict.failures >= 1
    else:
        assert verdict.state == "none"
    if verdict.old_exposures is not None:
        assert verdict.old_exposures >= verdict.failures
    if verdict.state == "confirmed":
        assert verdict.pvalue is not None
        assert verdict.pvalue <= 0.05
        assert (verdict.exposures or 0) >= (verdict.exposures_needed or 0) >= 3
    assert (verdict.state == "confounded") <= bool(verdict.also_changed)
