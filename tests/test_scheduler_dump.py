from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.vllm.scheduler_dump import config_version, merge, output_facts, part_of, stats_facts

TAIL = ", num_common_prefix_blocks=[0], finished_req_ids=[], free_encoder_mm_hashes=[], kv_connector_metadata=null)"


def new_request(
    name: str,
    length: int,
    computed: int = 0,
    *,
    lora: str = "None",
    logprobs: str = "None",
    generation: int = 3,
) -> str:
    """A request that begins in the step, as the generations print it."""
    between = {
        1: "mm_inputs=[],mm_hashes=[],mm_positions=[]",
        2: "mm_kwargs=[],mm_hashes=[],mm_positions=[]",
        3: "prefill_token_ids_len=None,mm_features=[]",
    }[generation]
    return (
        f"NewRequestData(req_id={name},prompt_token_ids_len={length},{between},sampling_params=SamplingParams(n=1, "
        f"temperature=0.7, stop=[], logprobs=None, prompt_logprobs={logprobs}, extra_args=None),"
        f"block_ids=([1, 2],),num_computed_tokens={computed},lora_request={lora},prompt_embeds_shape=None)"
    )


def cached_g1(*requests: tuple[str, int]) -> str:
    """0.9.0 and 0.9.1: a list of objects."""
    return (
        "["
        + ", ".join(
            f"CachedRequestData(req_id='{name}', resumed_from_preemption=false, new_token_ids=[11], new_block_ids=[[]], "
            f"num_computed_tokens={computed})"
            for name, computed in requests
        )
        + "]"
    )


def cached_g2(*requests: tuple[str, int]) -> str:
    """0.9.2 to 0.11.0: arrays, without output tokens."""
    names = ", ".join(f"'{name}'" for name, _ in requests)
    flags = ", ".join("false" for _ in requests)
    return (
        f"CachedRequestData(req_ids=[{names}], resumed_from_preemption=[{flags}], new_token_ids=[], "
        f"new_block_ids=[{', '.join('null' for _ in requests)}], num_computed_tokens={[c for _, c in requests]})"
    )


def cached_g3(*requests: tuple[str, int, int]) -> str:
    """0.14.0 and later: arrays, with output tokens."""
    names = ", ".join(f"'{name}'" for name, *_ in requests)
    return (
        f"CachedRequestData(req_ids=[{names}],resumed_req_ids=set(),new_token_ids_lens=[],all_token_ids_lens={{}},"
        f"new_block_ids={[None for _ in requests]},num_computed_tokens={[c for _, c, _ in requests]},"
        f"num_output_tokens={[o for *_, o in requests]})"
    )


def output(
    new: list[str],
    cached: str,
    scheduled: dict[str, int],
    *,
    spec: str = "",
    encoder: str = "",
    total: int | None = None,
) -> str:
    """A whole ``SchedulerOutput``."""
    items = ", ".join(f"{name}: {count}" for name, count in scheduled.items())
    return (
        f"SchedulerOutput(scheduled_new_reqs=[{', '.join(new)}], scheduled_cached_reqs={cached}, "
        f"num_scheduled_tokens={{{items}}}, total_num_scheduled_tokens={sum(scheduled.values()) if total is None else total}, "
        f"scheduled_spec_decode_tokens={{{spec}}}, scheduled_encoder_inputs={{{encoder}}}{TAIL}"
    )


class TestGenerations:
    """The three layouts of the dump."""

    @pytest.mark.parametrize("generation", [1, 2, 3])
    def test_a_new_prompt_beside_a_decode(self, generation: int) -> None:
        """Prefill and decode tokens are told apart in every generation."""
        cached = {1: cached_g1(("b2", 512)), 2: cached_g2(("b2", 512)), 3: cached_g3(("b2", 512, 9))}[
            generation
        ]
        text = output([new_request("a1", 29000, generation=generation)], cached, {"b2": 1, "a1": 8191})
        assert output_facts(text) == {
            "step_tokens": 8192, "prefill_tokens": 8191, "decode_tokens": 1, "max_prompt_tokens": 29000,
            "max_computed_tokens": 0, "spec_tokens": False, "encoder_inputs": False, "lora_requested": False,
            "prompt_logprobs_requested": False, "prompt_lengths": (29000,),
        }  # fmt: skip

    @pytest.mark.parametrize("generation", [1, 2, 3])
    def test_a_chunk_that_goes_on(self, generation: int) -> None:
        """A cached request that still prefills counts as prefill, and its context is the deepest."""
        cached = {
            1: cached_g1(("a1", 16384), ("b2", 90000)),
            2: cached_g2(("a1", 16384), ("b2", 90000)),
            3: cached_g3(("a1", 16384, 0), ("b2", 90000, 37)),
        }[generation]
        assert output_facts(output([], cached, {"a1": 4095, "b2": 1})) == {
            "step_tokens": 4096, "prefill_tokens": 4095, "decode_tokens": 1, "max_computed_tokens": 16384,
            "spec_tokens": False, "encoder_inputs": False,
        }  # fmt: skip

    @pytest.mark.parametrize("generation", [1, 2, 3])
    def test_only_decodes(self, generation: int) -> None:
        """A step of decodes has no prefill and no context of a prefill."""
        cached = {
            1: cached_g1(("a", 700), ("b", 800)),
            2: cached_g2(("a", 700), ("b", 800)),
            3: cached_g3(("a", 700, 1), ("b", 800, 20)),
        }[generation]
        assert output_facts(output([], cached, {"a": 1, "b": 1})) == {
            "step_tokens": 2,
            "prefill_tokens": 0,
            "decode_tokens": 2,
            "spec_tokens": False,
            "encoder_inputs": False,
        }

    def test_the_last_token_of_a_prompt(self) -> None:
        """From 0.11.1 a chunk of one token is prefill where no token was put out yet."""
        facts = output_facts(output([], cached_g3(("a", 8191, 0), ("b", 5, 1)), {"a": 1, "b": 1}))
        assert (facts["prefill_tokens"], facts["decode_tokens"]) == (1, 1)

    def test_only_new_prompts(self) -> None:
        """Without cached requests every token is prefill; the longest prompt counts."""
        text = output(
            [new_request("a", 100), new_request("b", 7000, 3000)], cached_g3(), {"a": 100, "b": 4000}
        )
        facts = output_facts(text)
        assert (facts["prefill_tokens"], facts["decode_tokens"]) == (4100, 0)
        assert (facts["max_prompt_tokens"], facts["max_computed_tokens"]) == (7000, 3000)

    def test_speculative_tokens(self) -> None:
        """Speculative tokens of a decode are no prefill."""
        text = output(
            [],
            cached_g3(("a", 90, 10), ("b", 40, 4)),
            {"a": 5, "b": 5},
            spec="a: [1, 2, 3, 4], b: [5, 6, 7, 8]",
        )
        facts = output_facts(text)
        assert facts == {
            "step_tokens": 10,
            "prefill_tokens": 0,
            "decode_tokens": 10,
            "spec_tokens": True,
            "encoder_inputs": False,
        }

    def test_encoder_inputs(self) -> None:
        """Encoder inputs of the step are seen."""
        text = output([new_request("a", 900)], cached_g3(), {"a": 900}, encoder="a: [0, 1]")
        assert output_facts(text)["encoder_inputs"] is True

    @pytest.mark.parametrize(
        ("value", "asked"), [("None", False), ("null", False), ("0", True), ("5", True), ("-1", True)]
    )
    def test_prompt_logprobs(self, value: str, asked: bool) -> None:
        """A request for log probabilities of the prompt is seen, zero of them too."""
        text = output(
            [new_request("a", 10), new_request("b", 20, logprobs=value)], cached_g3(), {"a": 10, "b": 20}
        )
        assert output_facts(text)["prompt_logprobs_requested"] is asked

    @pytest.mark.parametrize(
        ("value", "asked"), [("None", False), ("null", False), ("LoRARequest(lora_name='x')", True)]
    )
    def test_lora(self, value: str, asked: bool) -> None:
        """A request that uses an adapter is seen."""
        text = output([new_request("a", 10, lora=value)], cached_g3(), {"a": 10})
        assert output_facts(text)["lora_requested"] is asked

    def test_the_token_ids_of_0_11_1_are_not_kept(self) -> None:
        """0.11.1 to 0.13 print raw token ids: none of them is in the result."""
        cached = (
            "CachedRequestData(req_ids=['a', 'b'], resumed_req_ids=[], new_token_ids=[[771177], []], "
            "all_token_ids={'a': [771177, 771178, 771179]}, new_block_ids=[null, null], "
            "num_computed_tokens=[2048, 64], num_output_tokens=[0, 3])"
        )
        facts = output_facts(output([], cached, {"a": 2047, "b": 1}))
        assert facts == {
            "step_tokens": 2048, "prefill_tokens": 2047, "decode_tokens": 1, "max_computed_tokens": 2048,
            "spec_tokens": False, "encoder_inputs": False,
        }  # fmt: skip
        assert "7711" not in repr(facts)


FAKE = (
    "x}, total_num_scheduled_tokens=99999, scheduled_spec_decode_tokens={z: [1]}, scheduled_encoder_inputs={z: [0]}, "
    "finished_req_ids=[]) num_computed_tokens=[7],num_output_tokens=[0],prompt_token_ids_len=88888,"
)


class TestIds:
    """Request ids are the client's and may hold anything."""

    @pytest.mark.parametrize(
        "name",
        [
            "chatcmpl-9f",
            "cmpl-x-0",
            "a, b",
            "tenant:7: 9",
            "a\nb\nc",
            "it's",
            'say "x"',
            "a]b",
            "a}, b",
            "{",
            " ",
            "7",
            "prompt_logprobs=5",
            FAKE,
        ],
        ids=[
            "plain",
            "dashes",
            "comma",
            "colons",
            "newlines",
            "apostrophe",
            "quotes",
            "bracket",
            "brace",
            "open-brace",
            "space",
            "number",
            "field",
            "whole-fake-dump",
        ],
    )
    def test_whatever_the_id_the_totals_hold(self, name: str) -> None:
        """An id that fakes the fields of the dump does not change the totals of the step."""
        facts = output_facts(output([new_request(name, 5000)], cached_g3(("d", 70, 3)), {name: 4095, "d": 1}))
        assert facts["step_tokens"] == 4096
        assert facts["spec_tokens"] is False
        assert facts["encoder_inputs"] is False

    @pytest.mark.parametrize(
        "name",
        ["chatcmpl-9f", "a, b", "tenant:7: 9", "a\nb", "7"],
        ids=["plain", "comma", "colons", "newline", "number"],
    )
    def test_a_strange_id_of_a_cached_request(self, name: str) -> None:
        """Commas, colons and newlines in an id do not move tokens between prefill and decode."""
        facts = output_facts(output([], cached_g3((name, 512, 0), ("d", 70, 3)), {name: 4095, "d": 1}))
        assert (facts["prefill_tokens"], facts["decode_tokens"], facts["max_computed_tokens"]) == (
            4095,
            1,
            512,
        )

    def test_an_id_that_ends_like_another(self) -> None:
        """An id that is the end of another one, as with eleven choices of one request, has its own tokens."""
        cached = cached_g3(("0_cmpl-a", 512, 3), ("10_cmpl-a", 70, 0))
        facts = output_facts(output([], cached, {"10_cmpl-a": 300, "0_cmpl-a": 1}))
        assert (facts["prefill_tokens"], facts["decode_tokens"]) == (300, 1)

    def test_an_id_that_fakes_a_prompt(self) -> None:
        """An id that holds the length of a prompt does not make the longest prompt longer."""
        name = "x,prompt_token_ids_len=88888,mm_features=[]"
        facts = output_facts(output([new_request(name, 5000)], cached_g3(), {name: 4096}))
        assert facts["max_prompt_tokens"] == 5000

    def test_a_cached_id_that_fakes_a_dump(self) -> None:
        """A whole fake dump in the id of a cached request does not change the totals."""
        facts = output_facts(output([], cached_g3((FAKE, 512, 0), ("d", 70, 3)), {FAKE: 4095, "d": 1}))
        assert (facts["step_tokens"], facts["spec_tokens"], facts["encoder_inputs"]) == (4096, False, False)

    @settings(deadline=None, max_examples=100)
    @given(name=st.text(max_size=40), prefix=st.sampled_from(["", FAKE, "total_num_scheduled_tokens=1"]))
    def test_ids_never_come_out(self, name: str, prefix: str) -> None:
        """No id makes the reader fail, changes the total or reaches the result."""
        name = f"{prefix}{name}~"
        facts = output_facts(output([new_request(name, 5000)], cached_g3(("d", 70, 3)), {name: 4095, "d": 1}))
        assert facts["step_tokens"] == 4096
        assert facts.pop("prompt_lengths") == (5000,)
        assert all(isinstance(value, bool | int) for value in facts.values())


class TestCuts:
    """Dumps that are not whole."""

    def test_the_head_is_missing(self) -> None:
        """Of a dump whose head was cut away the totals are read, and the split from the sizes."""
        text = output([new_request("a", 5000)], cached_g3(("d", 70, 3)), {"a": 4095, "d": 1})
        facts = output_facts(text[text.index("num_scheduled_tokens=") :])
        assert (facts["step_tokens"], facts["spec_tokens"], facts["encoder_inputs"]) == (4096, False, False)

    def test_the_tail_is_missing(self) -> None:
        """Of a dump cut behind the total the total is read."""
        text = output([new_request("a", 5000)], cached_g3(), {"a": 4096})
        facts = output_facts(text[: text.index(", scheduled_spec")])
        assert facts == {"step_tokens": 4096}

    @pytest.mark.parametrize(
        "text", ["", "SchedulerOutput(", "Error preparing object to dump"], ids=["empty", "cut", "error"]
    )
    def test_nothing_is_there(self, text: str) -> None:
        """Without a total nothing is known."""
        assert output_facts(text) == {}

    @settings(deadline=None, max_examples=80)
    @given(st.integers(0, 900))
    def test_any_cut(self, at: int) -> None:
        """A dump cut anywhere gives the total or nothing, and never another one."""
        text = output([new_request("a", 5000)], cached_g3(("d", 70, 3)), {"a": 4095, "d": 1})
        facts = output_facts(text[:at])
        if "step_tokens" in facts:
            shown = re.search(r"total_num_scheduled_tokens=(\d+)", text[:at])
            assert shown is not None
            assert facts["step_tokens"] == int(shown[1])
        else:
            assert facts == {}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "SchedulerStats(num_running_reqs=2, num_waiting_reqs=0, gpu_cache_usage=0.12, prefix_cache_stats=None)",
            {"running_requests": 2, "waiting_requests": 0, "kv_cache_usage": 0.12},
        ),
        (
            "Dumping scheduler stats: SchedulerStats(num_running_reqs=31, num_waiting_reqs=7, step_counter=0, "
            "current_wave=0, kv_cache_usage=0.8765432109, prefix_cache_stats=None)",
            {"running_requests": 31, "waiting_requests": 7, "kv_cache_usage": 0.8765},
        ),
        (
            "SchedulerStats(num_running_reqs=1, num_waiting_reqs=0, num_skipped_waiting_reqs=4, kv_cache_usage=6.1e-05)",
            {"running_requests": 1, "waiting_requests": 0, "kv_cache_usage": 0.0001},
        ),
        ("SchedulerStats(num_running_reqs=1, num_wai", {}),
    ],
    ids=["0.9.0", "0.10.2", "0.20-tiny-usage", "cut"],
)
def test_stats(text: str, facts: dict[str, object]) -> None:
    """Running and waiting requests and the KV usage are read under the names of every version."""
    assert stats_facts(text) == facts


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("Dumping input data", "config"),
        ("V1 LLM engine (v0.9.0) with config: model='m', ", "config"),
        ("Dumping input data for V1 LLM engine (v0.20.2) with config: model='m', ", "config"),
        ("Dumping scheduler output for model execution:", "output"),
        ("Dumping scheduler output for model execution: SchedulerOutput(", "output"),
        ("SchedulerOutput(scheduled_new_reqs=[])", "output"),
        ("SchedulerStats(num_running_reqs=2", "stats"),
        ("Dumping scheduler stats: SchedulerStats(", "stats"),
        ("EngineCore encountered a fatal error.", None),
        ("he said: Dumping scheduler stats", None),
    ],
    ids=[
        "g1-title",
        "g1-config",
        "g2-config",
        "g1-output-title",
        "g2-output",
        "g1-output",
        "g1-stats",
        "g2-stats",
        "other",
        "quoted",
    ],
)
def test_parts(head: str, part: str | None) -> None:
    """The first line of a record says which part of a dump it is."""
    assert part_of(head) == part


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Dumping input data for V1 LLM engine (v0.20.2) with config: model='m'", "0.20.2"),
        ("V1 LLM engine (v0.9.1rc2.dev3+gabc123) with config: x", "0.9.1rc2.dev3+gabc123"),
        ("Dumping input data", None),
    ],
    ids=["release", "build", "title"],
)
def test_version(text: str, version: str | None) -> None:
    """The version stands in the configuration part."""
    assert config_version(text) == version


def test_parts_merge() -> None:
    """The facts of all parts are put together."""
    assert merge({"output": {"step_tokens": 1}, "stats": {"running_requests": 2}}) == {
        "step_tokens": 1,
        "running_requests": 2,
    }


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "name",
    [
        f"x,prompt_token_ids_len={HUGE},mm_features=[]",
        f"x: {HUGE}, y",
        f"x num_computed_tokens={HUGE},lora_request=None",
    ],
    ids=["length", "tokens", "context"],
)
def test_an_id_with_a_huge_number(name: str) -> None:
    """An id that holds thousands of digits does not stop the reading."""
    assert output_facts(output([new_request(name, 5000)], cached_g3(), {name: 4096}))["step_tokens"] == 4096


def test_a_damaged_usage() -> None:
    """A usage that is no number is left out."""
    facts = stats_facts("SchedulerStats(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.1.2)")
    assert facts == {"running_requests": 1, "waiting_requests": 0}
