from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from conftest import analyzed
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st
from test_incident import dead, fatal

from exporter.cli import main
from exporter.probe import command
from exporter.probe.look import log_look
from exporter.probe.plan import SHAPES, Limits, Plan, PlanError, Request, plan
from exporter.probe.prompts import HIGHEST, LOWEST, Prompts
from exporter.probe.run import Terms, run
from exporter.probe.server import FailedError, RefusedError, Server
from exporter.probe.verdict import Outcome, document, text

BIG = Limits(step=16384, max_model_len=131_072, max_num_seqs=64)
SMALL = Limits(step=2048, max_model_len=8192, max_num_seqs=64)


class TestPlan:
    """What is sent at which limits."""

    def test_every_shape(self) -> None:
        """The whole plan at usual limits: what each shape sends, and the full steps that are certain."""
        made = plan(BIG)
        assert [
            (one.shape, len(one.first), len(one.then), one.tokens, one.full_steps) for one in made.stages
        ] == [
            ("long", 0, 1, 16385, 1),
            ("several", 0, 12, 24588, 0),
            ("mixed", 32, 6, 27142, 0),
            ("late", 0, 1, 114689, 7),
            ("steady", 0, 42, 688170, 42),
        ]
        assert (made.full_steps, made.left_out) == (50, ())

    def test_a_late_chunk_is_a_whole_one(self) -> None:
        """The prompt of many steps is a multiple of the limit, so that its last chunk is full too."""
        assert plan(BIG, ["late"]).stages[0].then == (Request(7 * 16384),)
        assert plan(Limits(16384, 20_000), ["late"]).stages[0].then == (Request(19_999),)

    @pytest.mark.parametrize(
        ("limits", "shape", "why"),
        [
            (Limits(8192, 8192), "late", "the longest prompt fits into one step, so there is no later chunk"),
            (Limits(2048, 8192, 1), "several", "max_num_seqs is 1, so no two prompts share a step"),
            (
                Limits(2048, 8192, 1),
                "mixed",
                "these limits leave no room for short answers beside long prompts",
            ),
            (Limits(16384, 1024, 4), "steady", "prompts can't fill a step at these limits"),
        ],
    )
    def test_a_shape_that_makes_no_sense(self, limits: Limits, shape: str, why: str) -> None:
        """It is left out of the whole with the reason, and refused where it was asked for."""
        assert (shape, why) in plan(limits).left_out
        with pytest.raises(PlanError) as caught:
            plan(limits, [shape])
        assert str(caught.value) == f"--shape {shape}: {why}"

    def test_prompts_shorter_than_a_step(self) -> None:
        """Where no prompt fills a step alone, several do, and nothing is certain of one alone."""
        made = plan(Limits(16384, 4096, 64))
        assert {one.shape: one.full_steps for one in made.stages} == {
            "long": 0, "several": 0, "mixed": 0, "steady": 0
        }  # fmt: skip
        assert made.stages[0].then == (Request(4095),)
        assert sum(one.prompt for one in made.stages[1].then) >= 1.5 * 16384

    def test_a_small_kv_pool(self) -> None:
        """No prompt is longer than the KV cache holds."""
        made = plan(Limits(2048, 131_072, 64, kv_cache=10_000))
        assert max(one.prompt for stage in made.stages for one in stage.then) == 4 * 2048

    def test_the_cost_is_bounded(self) -> None:
        """What goes beyond the total is left out, steady made shorter, and no plan at all refused."""
        made = plan(BIG, max_tokens=100_000)
        assert [one.shape for one in made.stages] == ["long", "several", "mixed", "steady"]
        assert made.left_out == (("late", "would cost 114689 tokens, more than the 31885 that are left"),)
        assert made.tokens <= 100_000
        with pytest.raises(
            PlanError, match=r"^long would cost 16385 tokens, more than the 100 that are left; "
        ):
            plan(BIG, max_tokens=100)
        with pytest.raises(PlanError, match=r"^late would cost .* raise --max-tokens-total"):
            plan(BIG, ["late"], max_tokens=100_000)

    def test_repeats(self) -> None:
        """Each shape that often; steady only fills up what is missing."""
        made = plan(BIG, repeat=3, full_steps=60)
        assert [one.shape for one in made.stages] == [
            *["long"] * 3, *["several"] * 3, *["mixed"] * 3, *["late"] * 3, "steady"
        ]  # fmt: skip
        assert made.full_steps == 60

    @given(
        step=st.integers(1, 200_000),
        longest=st.integers(1, 300_000),
        seqs=st.integers(1, 2000),
        pool=st.none() | st.integers(1, 3_000_000),
        shapes=st.lists(st.sampled_from(list(SHAPES)), unique=True),
        repeat=st.integers(1, 3),
    )
    def test_whatever_the_limits(
        self, step: int, longest: int, seqs: int, pool: int | None, shapes: list[str], repeat: int
    ) -> None:
        """No request is larger than the server takes, no plan dearer than allowed, and no promise larger than what is sent."""
        limits = Limits(step, longest, seqs, pool)
        try:
            made = plan(limits, shapes, repeat)
        except PlanError:
            return
        assert 0 < made.tokens <= 2_000_000
        for stage in made.stages:
            assert len(stage.first) <= seqs
            assert stage.full_steps * 0.9 * step <= stage.tokens
            for one in (*stage.first, *stage.then):
                assert one.prompt >= 1
                assert one.answer >= 1
                assert one.prompt + one.answer <= longest
                assert pool is None or one.prompt < pool


def test_prompts_begin_differently() -> None:
    """No two share their first block, and ids stay where vocabularies have text."""
    prompts = Prompts(seed=1)
    made = [prompts.prompt(20) for _ in range(5000)]
    assert len({tuple(one[:16]) for one in made}) == 5000
    ids = {token for one in made for token in one}
    assert (min(ids), max(ids)) == (LOWEST, HIGHEST - 1)
    assert prompts.highest(3)[-1] == HIGHEST - 1
    assert Prompts(seed=1).prompt(20) == made[0] != Prompts().prompt(20)


# --- against a server -----------------------------------------------------------------------------


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """What is open until the test ends."""
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
def fake(stack: AsyncExitStack, tmp_path: Path) -> Callable[..., Any]:
    """Start a server; it listens as soon as this is awaited."""

    async def begin(ssl: ssl.SSLContext | None = None, **what: Any) -> FakeVllm:
        return await stack.enter_async_context(FakeVllm(tmp_path / "vllm.log", **what).running(ssl))

    return begin


async def probed(vllm: FakeVllm, made: Plan, logged: bool = True, **terms: Any) -> Outcome:
    """Run a plan in this process, with quick looks."""
    async with aiohttp.ClientSession() as session:
        server = Server(vllm.url, session, key=vllm.key)
        looker = log_look((str(vllm.log),)) if logged else None
        return await run(made, server, Terms(vllm.model, watch=0.05, **terms), looker)


def held(vllm: FakeVllm) -> dict[str, bool]:
    """Which kinds of full steps the scheduler really made."""
    full = [one for one in vllm.steps if one.tokens >= 0.9 * vllm.limit]
    return {
        "one prompt": any(one.prefills == 1 and not one.decodes for one in full),
        "several prompts": any(one.prefills > 1 for one in full),
        "beside answers": any(one.prefills and one.decodes >= 8 for one in full),
    }


class TestShapes:
    """Each shape fills the steps it is meant to."""

    async def test_long(self, fake: Callable[..., Any]) -> None:
        """One prompt is one step of exactly the limit."""
        vllm = await fake()
        outcome = await probed(vllm, plan(SMALL, ["long"]))
        assert [one.tokens for one in vllm.steps] == [
            16,
            2048,
            16,
        ]  # the first and last only ask whether it is well
        assert (outcome.state, outcome.true_steps, outcome.largest, outcome.full) == (
            "survived",
            True,
            2048,
            1,
        )

    async def test_several(self, fake: Callable[..., Any]) -> None:
        """Several prompts share a full step."""
        vllm = await fake(step_seconds=0.1)
        outcome = await probed(vllm, plan(SMALL, ["several"]))
        assert held(vllm)["several prompts"]
        assert outcome.largest == 2048

    async def test_mixed(self, fake: Callable[..., Any]) -> None:
        """Long prompts fill steps in which short answers go on."""
        vllm = await fake(step_seconds=0.05)
        outcome = await probed(vllm, plan(SMALL, ["mixed"]))
        assert held(vllm)["beside answers"]
        assert outcome.state == "survived"

    async def test_late(self, fake: Callable[..., Any]) -> None:
        """A very long prompt is full steps to its end."""
        vllm = await fake()
        await probed(vllm, plan(SMALL, ["late"]))
        assert [one.tokens for one in vllm.steps[1:-1]] == [2048] * 3

    async def test_steady(self, fake: Callable[..., Any]) -> None:
        """Full steps in a row, never more than two prompts in the engine."""
        vllm = await fake()
        outcome = await probed(vllm, plan(SMALL, ["steady"], full_steps=10))
        assert [one.tokens for one in vllm.steps[1:-1]] == [2048] * 10
        assert (outcome.full, vllm.most_at_once) == (10, 2)

    async def test_all_of_them(self, fake: Callable[..., Any]) -> None:
        """The whole plan, and how it is told."""
        vllm = await fake()
        outcome = await probed(vllm, plan(SMALL))
        assert [one.stage.shape for one in outcome.ran] == list(SHAPES)
        assert all(one.done for one in outcome.ran)
        assert outcome.full >= 50
        said = text(outcome)
        assert said.startswith("probe: survived (2048 tokens a step, ")
        assert "The largest step held 2048 of 2048 tokens (100%)" in said
        assert "Images, LoRA adapters and logprobs are other shapes" in said

    async def test_without_step_lines(self, fake: Callable[..., Any]) -> None:
        """What must have been scheduled is told as such, and is never more than what was."""
        vllm = await fake(iteration_lines=False)
        outcome = await probed(vllm, plan(SMALL))
        true = sum(one.tokens >= 0.9 * 2048 for one in vllm.steps)
        assert (outcome.true_steps, outcome.largest) == (False, 2048)
        assert 50 == outcome.full <= true
        assert "must have been scheduled" in text(outcome)
        assert document(outcome)["steps"] == {"source": "scheduled", "largest_tokens": 2048, "full": 50}

    async def test_without_a_log(self, fake: Callable[..., Any]) -> None:
        """No log at all: the same, as long as the requests come to their end."""
        vllm = await fake()
        outcome = await probed(vllm, plan(SMALL, ["long"]), logged=False)
        assert (outcome.state, outcome.true_steps, outcome.full) == ("survived", False, 1)

    async def test_the_log_of_a_former_life(self, fake: Callable[..., Any]) -> None:
        """A log that ends with a death does not make a server that answers a dead one."""
        vllm = await fake(step_seconds=0.1)
        vllm._write(fatal(200), dead(200))
        outcome = await probed(vllm, plan(SMALL, ["late"]))
        assert (outcome.state, outcome.incident) == ("survived", None)

    async def test_the_prefix_cache_can_not_answer(self, fake: Callable[..., Any]) -> None:
        """With prefix caching a second run fills steps like the first, and no token was cached."""
        vllm = await fake(prefix_cache=True)
        for _ in range(2):
            del vllm.steps[:]
            outcome = await probed(vllm, plan(SMALL, ["long", "late"]))
            assert [one.tokens for one in vllm.steps[1:-1]] == [2048] * 4
            assert (outcome.cached, vllm.hits) == (0.0, 0)
            assert document(outcome)["cached_tokens"] == 0

    async def test_a_cache_that_answers_all_the_same_is_told(self, fake: Callable[..., Any]) -> None:
        """Tokens that were not computed don't count as exercised."""
        vllm = await fake(iteration_lines=False)

        async def cached_meanwhile() -> None:
            while not vllm.steps:
                await asyncio.sleep(0.001)
            vllm.hits = 3000

        meanwhile = asyncio.create_task(cached_meanwhile())
        made = plan(SMALL, ["late"])
        async with aiohttp.ClientSession() as session:
            vllm.step_seconds = 0.05
            outcome = await run(
                made, Server(vllm.url, session), Terms(vllm.model, watch=0.05, while_serving=True)
            )
        await meanwhile
        assert outcome.cached in (0.0, 3000.0)  # whether the first step came before the first look
        assert outcome.full == (3 if not outcome.cached else 1)

    async def test_a_small_vocabulary(self, fake: Callable[..., Any]) -> None:
        """Ids above the vocabulary are found out by the first small prompt, and not used."""
        vllm = await fake(vocabulary=2000)
        assert (await probed(vllm, plan(SMALL, ["long"]))).state == "survived"
        assert max(map(max, vllm.prompts[1:])) < 2000

    async def test_what_time_is_for(self, fake: Callable[..., Any]) -> None:
        """After its time nothing is begun that can wait, and steady ends; that is no failure."""
        vllm = await fake(step_seconds=0.05)
        outcome = await probed(vllm, plan(SMALL, full_steps=10_000, max_tokens=50_000_000), spend=2.0)
        assert outcome.state == "survived"
        assert [one.stage.shape for one in outcome.ran][:3] == ["long", "several", "mixed"]
        assert not outcome.ran[-1].done or outcome.plan.left_out
        assert outcome.seconds < 10


class TestTrouble:
    """What ends a probe."""

    async def test_death(self, fake: Callable[..., Any]) -> None:
        """A full step kills it: failed, by its log also of what, and nothing more is sent."""
        vllm = await fake(dies_above=1500)
        outcome = await probed(vllm, plan(SMALL))
        assert (outcome.state, outcome.exit_code) == ("failed", 1)
        assert [one.stage.shape for one in outcome.ran] == ["long"]
        assert outcome.incident is not None
        assert outcome.incident["class"] == "prefill_budget"
        assert [len(one) for one in vllm.prompts] == [16, 2048]
        said = text(outcome)
        assert "cause: prefill_budget (probable)" in said
        assert "Restart with --max-num-batched-tokens " in said

    async def test_death_in_the_middle(self, fake: Callable[..., Any]) -> None:
        """What was survived before stays told."""
        vllm = await fake(step_seconds=0.05)

        async def worse_with_time() -> None:
            while len(vllm.steps) < 4:
                await asyncio.sleep(0.001)
            vllm.dies_above = 1500

        turn = asyncio.create_task(worse_with_time())
        outcome = await probed(vllm, plan(SMALL))
        await turn
        assert outcome.state == "failed"
        assert outcome.ran[0].done
        assert not outcome.ran[-1].done
        assert outcome.full >= 1
        assert vllm.in_flight == 0

    async def test_death_without_a_log(self, fake: Callable[..., Any]) -> None:
        """Without a log the answer alone tells; the advice says where to look."""
        outcome = await probed(await fake(dies_above=1500), plan(SMALL, ["long"]), logged=False)
        assert (outcome.state, outcome.reason) == ("failed", "the server answered a request with HTTP 500")
        assert "vllm-oom-exporter analyze LOG" in text(outcome)

    async def test_hanging(self, fake: Callable[..., Any]) -> None:
        """A step that never ends runs out of time, and its request is taken back."""
        vllm = await fake(hangs_above=1500)
        outcome = await probed(vllm, plan(SMALL), timeout=0.5)
        assert (outcome.state, outcome.exit_code) == ("unfinished", 1)
        assert outcome.reason == "time ran out after 0 s, in shape long" or "after 1 s" in outcome.reason
        await asyncio.sleep(0.1)
        assert vllm.in_flight == 0

    async def test_others_come_meanwhile(self, fake: Callable[..., Any]) -> None:
        """Requests of others end it at once: neither survived nor failed."""
        vllm = await fake(hangs_above=1500)

        async def come() -> None:
            while vllm.in_flight == 0 or not vllm.steps:
                await asyncio.sleep(0.001)
            vllm.busy = 2

        others = asyncio.create_task(come())
        outcome = await probed(vllm, plan(SMALL))
        await others
        assert (outcome.state, outcome.exit_code) == ("skipped", 2)
        assert outcome.reason == "requests of others came meanwhile; probe a replica without traffic"

    async def test_a_step_that_metrics_do_not_show_yet(self, fake: Callable[..., Any]) -> None:
        """A prompt of somebody else that is in its first step is traffic, though no request is shown."""
        vllm = await fake(step_seconds=0.5)
        async with aiohttp.ClientSession() as session:
            other = asyncio.create_task(Server(vllm.url, session).complete(vllm.model, [[7] * 2048], 1))
            while not vllm.in_flight:
                await asyncio.sleep(0.001)
            with pytest.raises(RefusedError, match=r"^the server has live traffic; "):
                await probed(vllm, plan(SMALL))
            await other
        assert [one.tokens for one in vllm.steps] == [2048, 16]

    async def test_429(self, fake: Callable[..., Any]) -> None:
        """It comes again later and later, and longer if it is told to."""
        vllm = await fake(refusals=4)
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        async with aiohttp.ClientSession() as session:
            server = Server(vllm.url, session, sleep=sleep)
            await server.complete(vllm.model, [[1] * 16], 1)
            assert slept == [1.0, 2.0, 4.0, 8.0]
            vllm.refusals, vllm.retry_after = 2, "20"
            await server.complete(vllm.model, [[2] * 16], 1)
            assert slept[4:] == [20.0, 20.0]
            vllm.refusals, vllm.retry_after = 1, "99999"
            await server.complete(vllm.model, [[3] * 16], 1)
            assert slept[6:] == [30.0]

    async def test_429_for_ever(self, fake: Callable[..., Any]) -> None:
        """A server that never takes a prompt was not probed, which is told within the time."""
        vllm = await fake(refusals=10_000)
        with pytest.raises(RefusedError, match=r"^a first prompt of 16 tokens was not answered within 0.3 s"):
            await probed(vllm, plan(SMALL), timeout=0.3)

    @pytest.mark.parametrize(
        ("answer", "error", "says"),
        [
            (web.json_response({"choices": [{"finish_reason": "abort"}]}), FailedError, "the server gave up a request"),
            (web.Response(text="<html>"), FailedError, "a request was answered with something that is no completion"),
            (web.json_response({"choices": [{}], "usage": {"prompt_tokens": 3}}), RefusedError, "the server counts other tokens"),
            (web.Response(status=302, headers={"Location": "/x"}), RefusedError, "/v1/completions answers with a redirect"),
            (web.Response(status=413), RefusedError, "a prompt of 16 tokens is longer than the server takes"),
            (web.Response(status=418, text="secret"), RefusedError, "/v1/completions answers HTTP 418"),
            (web.Response(body=b"x" * (5 << 20)), FailedError, "an answer was too large to be vLLM's"),
        ],
    )  # fmt: skip
    async def test_odd_answers(
        self, answer: web.Response, error: type[Exception], says: str, stack: AsyncExitStack
    ) -> None:
        """Whatever answers, it is one line without anything of the answer."""
        app = web.Application()

        async def handle(_: web.Request) -> web.Response:
            return answer

        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
        with pytest.raises(error) as caught:
            await server.complete("m", [[1] * 16], 1)
        assert str(caught.value).startswith(says)
        assert "secret" not in str(caught.value)


# --- the command ----------------------------------------------------------------------------------

Said = tuple[int, str, str]
Command = Callable[..., Any]


@pytest.fixture
def probe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run the command in a thread, with quick looks; exit code, standard output and error."""
    monkeypatch.setattr(command, "WATCH_SECONDS", 0.05)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def call(*arguments: str | Path) -> Said:
        code = await asyncio.to_thread(main, ["probe", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call  # type: ignore[return-value]


class TestCommand:
    """As a user starts it."""

    async def test_survived(self, fake: Command, probe: Command) -> None:
        """Exit code 0 and a document that tells all of it."""
        vllm = await fake()
        code, out, err = await probe(
            "--vllm-url", vllm.url, "--log", vllm.log, "--format", "json", "--shape", "long"
        )
        found = json.loads(out)
        assert (code, err, found["state"]) == (0, "", "survived")
        assert found["steps"] == {"source": "iteration", "largest_tokens": 2048, "full": 1}
        assert found["step_limit_tokens"] == 2048

    async def test_failed(self, fake: Command, probe: Command) -> None:
        """Exit code 1, the cause and what to do."""
        vllm = await fake(dies_above=1500)
        code, out, _ = await probe("--vllm-url", vllm.url, "--log", vllm.log)
        assert code == 1
        assert out.startswith("probe: the server failed (2048 tokens a step, ")

    async def test_limits_by_flags(self, fake: Command, probe: Command) -> None:
        """Without a log the budget has to be given, and is enough."""
        vllm = await fake()
        given = ("--vllm-url", vllm.url, "--shape", "long")
        assert await probe(*given) == (
            2, "",
            "vllm-oom-exporter: probe: the budget is not known: give --exporter URL, --log FILE or --max-num-batched-tokens N\n",
        )  # fmt: skip
        assert (await probe(*given, "--max-num-batched-tokens", "1024"))[0] == 0
        assert [one.tokens for one in vllm.steps] == [16, 1024, 16]

    async def test_dry_run(self, fake: Command, probe: Command) -> None:
        """The plan and its cost; no prompt is sent, and with all limits given nobody is asked."""
        vllm = await fake()
        code, out, _ = await probe("--vllm-url", vllm.url, "--log", vllm.log, "--dry-run")
        assert (code, vllm.prompts) == (0, [])
        assert out.splitlines()[0] == "plan: 2048 tokens a step, max_model_len 8192, max_num_seqs 64"
        assert "nothing was sent" in out
        code, out, _ = await probe(
            "--vllm-url", "http://127.0.0.1:9", "--max-num-batched-tokens", "16384", "--max-model-len", "131072",
            "--dry-run", "--format", "json",
        )  # fmt: skip
        assert (code, json.loads(out)["full_steps"], json.loads(out)["tokens"]) == (0, 50, plan(BIG).tokens)

    @pytest.mark.parametrize(
        ("server", "arguments", "says"),
        [
            ({"key": "k"}, [], "the server wants an API key (HTTP 401); set VLLM_API_KEY or give --api-key-file FILE"),
            ({"healthy": False}, [], "the server is not ready: /health answers HTTP 503; wait until it answers 200"),
            ({"busy": 3}, [], "the server has live traffic (3 requests now); probe a replica without any, or accept the risk with --while-serving"),
            ({"metrics": False}, [], "whether the server has traffic is not known, as its /metrics does not tell; --while-serving probes all the same"),
            ({}, ["--model", "other"], "--model 'other': the server has 'acme/a'"),
            ({}, ["--shape", "long", "--max-tokens-total", "99"], "long would cost 2049 tokens, more than the 99 that are left; raise --max-tokens-total, or choose with --shape"),
            ({"max_model_len": 2048}, ["--max-model-len", "8192"], "a prompt of 2048 tokens is longer than the server takes; give --max-model-len"),
            ({"vocabulary": 1200}, [], "the vocabulary of the model is too small for the prompts"),
            ({}, ["--ca-file", "/nowhere"], "--ca-file /nowhere: No such file or directory; give certificates in PEM format"),
            ({}, ["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file or directory"),
            ({}, ["--replay", "/nowhere"], "--replay /nowhere: No such file or directory; give a file or '-'"),
            ({}, ["--exporter", "http://127.0.0.1:9"], "--exporter: cannot connect: Connection refused"),
        ],
    )  # fmt: skip
    async def test_refusals(
        self, server: dict[str, Any], arguments: list[str], says: str, fake: Command, probe: Command
    ) -> None:
        """Each is one line and exit code 2, before a step was put at risk, and nothing is left running."""
        vllm = await fake(**server)
        code, out, err = await probe("--vllm-url", vllm.url, "--log", vllm.log, *arguments)
        if "longer than the server takes" in says:  # found out by the server, when the probe had begun
            assert out.startswith("probe: stopped (2048 tokens a step, ")
            assert (code, err) == (2, f"vllm-oom-exporter: probe: {says}\n")
        else:
            assert (code, out, err) == (2, "", f"vllm-oom-exporter: probe: {says}\n")
            assert max((one.tokens for one in vllm.steps), default=0) <= 16
        assert vllm.in_flight == 0

    async def test_no_server(self, probe: Command, tmp_path: Path) -> None:
        """Nobody listens, the log is not there, or it is not vLLM that answers."""
        here = ("--vllm-url", "http://127.0.0.1:9", "--max-num-batched-tokens", "2048")
        assert await probe(*here) == (2, "", "vllm-oom-exporter: probe: cannot connect: Connection refused\n")
        code, _, err = await probe("--log", tmp_path / "no.log")
        assert (code, err) == (
            2,
            f"vllm-oom-exporter: probe: {tmp_path}/no.log: no such file; check the path\n",
        )
        assert (await probe("--log", "kubernetes:"))[2] == (
            "vllm-oom-exporter: probe: --log: a probe reads files only; ask the sidecar that reads this log with "
            "--exporter URL\n"
        )

    async def test_while_serving(self, fake: Command, probe: Command) -> None:
        """Told to, it probes beside traffic."""
        vllm = await fake(busy=3)
        code, *_ = await probe(
            "--vllm-url", vllm.url, "--log", vllm.log, "--shape", "long", "--while-serving"
        )
        assert (code, vllm.steps[1].tokens) == (0, 2048)

    async def test_api_key(
        self, fake: Command, probe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From a file or the variable; in no output, also where it is wrong."""
        vllm = await fake(key="sk-right")
        file = tmp_path / "key"
        given = ("--vllm-url", vllm.url, "--log", vllm.log, "--shape", "long")
        file.write_text("sk-right\n")
        assert (await probe(*given, "--api-key-file", file))[0] == 0
        monkeypatch.setenv("VLLM_API_KEY", "sk-right")
        assert (await probe(*given))[0] == 0
        monkeypatch.setenv("VLLM_API_KEY", "sk-wrong")
        code, out, err = await probe(*given)
        assert (code, out) == (2, "")
        assert err == (
            "vllm-oom-exporter: probe: the server does not take this API key (HTTP 401); set VLLM_API_KEY or give "
            "--api-key-file FILE\n"
        )
        file.write_bytes(b"\xff")
        assert "sk-" not in (await probe(*given, "--api-key-file", file))[2]

    async def test_tls_and_base_path(self, fake: Command, probe: Command, tmp_path: Path) -> None:
        """Behind a base path, with a certificate of an authority that is given; without it, refused."""
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        vllm = await fake(context, base="/llama")
        given = ("--vllm-url", vllm.url, "--log", vllm.log, "--shape", "long")
        assert vllm.url.startswith("https://")
        assert (await probe(*given, "--ca-file", tmp_path / "ca.pem"))[0] == 0
        code, _, err = await probe(*given)
        assert code == 2
        assert err.startswith("vllm-oom-exporter: probe: its TLS certificate is not accepted: ")

    @pytest.mark.parametrize(
        "arguments",
        [["--repeat", "0"], ["--timeout", "soon"], ["--shape", "square"], ["--full-steps", "1e9"]],
    )
    async def test_usage(self, arguments: list[str], probe: Command) -> None:
        """What argparse refuses is exit code 2 too."""
        with pytest.raises(SystemExit) as caught:
            await probe(*arguments)
        assert caught.value.code == 2


# --- replays --------------------------------------------------------------------------------------


def incident(vllm: FakeVllm) -> dict[str, Any]:
    """What ``analyze --format json`` says of its log."""
    return analyzed(vllm.log.read_bytes())


class TestReplay:
    """Lengths of an incident, again."""

    async def test_old_and_new_budget(self, fake: Command, probe: Command, tmp_path: Path) -> None:
        """The lengths of an incident kill again at the old budget, and three times not at the lower one."""
        old = await fake(limit=8192, max_model_len=65536, dies_above=4000)
        given = ("--vllm-url", old.url, "--log", old.log)
        assert (await probe(*given, "--shape", "long"))[0] == 1
        path = tmp_path / "incident.json"
        path.write_text(json.dumps(incident(old)))
        old.begin()
        code, out, _ = await probe(*given, "--replay", path)
        assert code == 1
        assert "replay: reproduced. The failure is reproduced at 8192 tokens a step." in out
        old.limit = 2048
        old.begin()
        steps = len(old.steps)
        code, out, _ = await probe(*given, "--replay", path, "--failed-before", "3")
        assert code == 0
        assert (
            "replay: confirmed. The lower budget is the cure: 3 of 3 failed at 8192, 0 of 3 at 2048 (Fisher, p = 0.05)."
            in out
        )
        prompts = [len(one) for one in old.prompts[-4:-1]]
        assert prompts == [21000] * 3  # as the dump has it
        assert len({tuple(one[:16]) for one in old.prompts}) == len(old.prompts)
        assert max(one.tokens for one in old.steps[steps:]) == 2048
        code, out, _ = await probe(*given, "--replay", path, "--format", "json", "--repeat", "1")
        assert json.loads(out)["replay"] == {
            "state": "accruing",
            "pvalue": 0.5,
            "says": "1 of 1 failed at 8192, 0 of 1 at 2048 (Fisher, p = 0.5): not enough. --repeat 19 would do; so would "
            "19 failed replays at the old budget (--failed-before 19).",
        }

    async def test_refuted(self, fake: Command, probe: Command, tmp_path: Path) -> None:
        """A failure at the lower budget refutes it."""
        vllm = await fake(limit=2048, max_model_len=65536, dies_above=1000)
        path = tmp_path / "incident.json"
        path.write_text(json.dumps({"phase": "serving", "class": "prefill_budget", "facts": {
            "step_tokens": 8192, "max_prompt_tokens": 21000, "decode_tokens": 2, "step_limit_tokens": 8192}}))  # fmt: skip
        code, out, _ = await probe("--vllm-url", vllm.url, "--log", vllm.log, "--replay", path)
        assert code == 1
        assert "replay: refuted. It fails at 2048 tokens a step too: the lower budget is no cure." in out

    async def test_a_step_of_several_prompts(self, fake: Command, probe: Command, tmp_path: Path) -> None:
        """Its prompts and its answers come again, as many as the step held."""
        vllm = await fake(limit=4096)
        path = tmp_path / "incident.json"
        path.write_text(
            json.dumps(
                {
                    "facts": {
                        "step_tokens": 4096,
                        "prefill_tokens": 4092,
                        "max_prompt_tokens": 1364,
                        "decode_tokens": 4,
                    }
                }
            )
        )
        assert (await probe("--vllm-url", vllm.url, "--log", vllm.log, "--replay", path, "--repeat", "1"))[
            0
        ] == 0
        assert sorted(len(one) for one in vllm.prompts[1:-1]) == [16] * 4 + [1364] * 3

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ("no", "--replay: this is not JSON; give what 'analyze --format json' prints"),
            ("[]", "--replay: no incident in it names the prompts or the size of its step (no scheduler dump)"),
            ('{"incidents": [{"facts": {"step_tokens": true}}, 3, {"facts": 1}]}', "--replay: no incident in it names the prompts or the size of its step (no scheduler dump)"),
            ('{"phase": "startup", "facts": {"step_tokens": 5}}', "--replay: no incident in it names the prompts or the size of its step (no scheduler dump)"),
            ('{"facts": {"max_prompt_tokens": 9000}}', "--replay: its prompt of 9000 tokens is longer than the server takes (8191); replay it where max_model_len is larger"),
            ('{"facts": {"max_prompt_tokens": 8000, "step_tokens": 999999999}}', "--replay: 3 times 2048256 tokens; raise --max-tokens-total to 6144768"),
        ],
    )  # fmt: skip
    async def test_what_can_not_be_replayed(
        self, given: str, says: str, fake: Command, probe: Command, tmp_path: Path
    ) -> None:
        """Each is one line and exit code 2, and no prompt is sent."""
        vllm = await fake()
        path = tmp_path / "incident.json"
        path.write_text(given)
        assert await probe("--vllm-url", vllm.url, "--log", vllm.log, "--replay", path) == (
            2, "", f"vllm-oom-exporter: probe: {says}\n"
        )  # fmt: skip
        assert vllm.prompts == []
