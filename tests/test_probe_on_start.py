"""The sidecar that probes each start: its readiness, its metrics, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_vllm import FakeVllm
from test_app import Inside, Sidecar, Start, config_of, inside, session, sidecar, until

from exporter.cli import main
from exporter.diagnosis.exposure import LifeExposure
from exporter.diagnosis.ledger import Ledger
from exporter.probe import on_start
from exporter.probe.server import Server
from exporter.records import Life
from exporter.status import TargetStatus, unready

__all__ = ["session", "sidecar"]  # fixtures

READY = "/-/budget-ready"


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start a server whose log is ``vllm.log``."""
    async with AsyncExitStack() as opened:

        async def begin(**what: Any) -> FakeVllm:
            return await opened.enter_async_context(FakeVllm(tmp_path / "vllm.log", **what).running())

        yield begin


async def answer(peer: Sidecar | Inside) -> tuple[int, str]:
    """Status and text of the readiness of the budget."""
    async with peer.session.get(peer.base + READY) as response:
        return response.status, await response.text()


async def says(peer: Sidecar | Inside, status: int, text: str) -> None:
    """Wait until it answers so."""

    async def there() -> bool:
        return await answer(peer) == (status, text)

    await until(there, 60)


async def target(peer: Sidecar | Inside) -> dict[str, Any]:
    """What the API says of the only target."""
    found: dict[str, Any] = json.loads(await peer.get("/api/v1/targets"))["targets"][0]
    return found


SURVIVED = (200, "the budget was exercised\n")


async def test_it_waits_for_the_server_and_its_probe(fake: Callable[..., Any], sidecar: Start) -> None:
    """Not ready before the server is healthy, nor while it is probed; then ready, with all of it told."""
    vllm = await fake(healthy=False)
    one = await sidecar(
        "--log", "vllm.log", "--vllm-url", vllm.url, "--probe.on-start", "--scrape-interval", "200ms"
    )
    await says(one, 503, "503: the budget probe has not run\n")
    assert vllm.prompts == []
    vllm.healthy = True
    await says(one, *SURVIVED)
    found = await target(one)
    assert found["probe"]["state"] == "survived"
    assert found["probe"]["steps"]["source"] == "iteration"
    assert found["probe"]["steps"]["largest_tokens"] == 2048
    # the last lines may come after the verdict, which then claims less than was
    assert found["steps"]["full"] >= found["probe"]["steps"]["full"] > 20
    metrics = await one.metrics()
    assert metrics['vllm_oom_probe_state{state="survived"}'] == 1
    assert metrics["vllm_oom_probe_largest_step_tokens"] == 2048
    assert metrics["vllm_oom_probe_full_steps"] == found["probe"]["steps"]["full"]
    assert metrics["vllm_oom_budget_ready"] == 1
    prompts = len(vllm.prompts)
    await asyncio.sleep(1.2)  # two more looks: a life is probed once
    assert len(vllm.prompts) == prompts


async def test_a_budget_that_kills(fake: Callable[..., Any], sidecar: Start) -> None:
    """The server dies before it is ready, with its incident; the next life has to pass a probe of its own."""
    vllm = await fake(limit=4096, dies_above=3000)
    one = await sidecar(
        "--log", "vllm.log", "--vllm-url", vllm.url, "--probe.on-start", "--scrape-interval", "200ms"
    )
    await says(one, 503, "503: the engine is dead\n")
    await one.event("the budget probe ended")
    (incident,) = await one.incidents()
    assert (incident["class"], incident["facts"]["step_tokens"]) == ("prefill_budget", 4096)
    found = (await target(one))["probe"]
    assert (found["state"], found["incident"]["id"]) == ("failed", incident["id"])
    assert "The step that failed held 4096 of 4096 tokens (100%)." in found["says"]
    page = await one.get("/")
    assert "it failed when steps were filled on purpose" in page
    assert "The step that failed held 4096 of 4096 tokens (100%)." in page
    metrics = await one.metrics()
    assert metrics['vllm_oom_probe_state{state="failed"}'] == 1
    assert metrics["vllm_oom_budget_ready"] == 0
    vllm.limit = 2048
    vllm.begin()
    await says(one, *SURVIVED)
    assert (await one.metrics()).sum("vllm_oom_incidents_total") == 1


async def test_a_restarted_sidecar_remembers(fake: Callable[..., Any], sidecar: Start) -> None:
    """With state, a life that was probed is not probed again, and is ready at once."""
    vllm = await fake()
    given = (
        "--log", "vllm.log", "--vllm-url", vllm.url, "--probe.on-start", "--state-dir", "state",
        "--scrape-interval", "200ms",
    )  # fmt: skip
    first = await sidecar(*given)
    await says(first, *SURVIVED)
    await first.event("the budget probe ended")
    await first.stop()
    prompts = len(vllm.prompts)
    second = await sidecar(*given)
    await says(second, *SURVIVED)
    assert len(vllm.prompts) == prompts
    assert (await target(second))["probe"]["reason"] == "as the sidecar knows from before its restart"


async def test_a_restarted_sidecar_without_memory(fake: Callable[..., Any], sidecar: Start) -> None:
    """A server that has served is past its start, and not probed; the full steps in its log make it ready."""
    vllm = await fake(iteration_lines=False)
    vllm.prompt_tokens = 5000
    given = ("--log", "vllm.log", "--vllm-url", vllm.url, "--probe.on-start", "--scrape-interval", "200ms")
    one = await sidecar(*given)
    await says(
        one, 503,
        "503: the budget probe could not run: the server has served 5000 prompt tokens, so its start is over; restart it, "
        "or run 'vllm-oom-exporter probe'\n",
    )  # fmt: skip
    assert vllm.prompts == []
    vllm.iteration_lines = True
    async with aiohttp.ClientSession() as session:
        await Server(vllm.url, session).complete(vllm.model, [[7] * 2048], 1)
    await says(one, *SURVIVED)


async def test_it_does_not_disturb_traffic(
    fake: Callable[..., Any], session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with traffic is left alone, which is said; when the traffic has gone, it is probed."""
    monkeypatch.setattr(on_start, "_RETRY_SECONDS", 0.1)
    vllm = await fake(busy=2)
    config = config_of(tmp_path, vllm_url=vllm.url, probe_on_start=True)
    async with inside(session, config) as one:
        await says(
            one, 503,
            "503: the budget probe could not run: the server has live traffic (2 requests now); probe a replica without "
            "any, or accept the risk with --while-serving\n",
        )  # fmt: skip
        assert vllm.prompts == []
        assert (await one.metrics())['vllm_oom_probe_state{state="skipped"}'] == 1
        vllm.busy = 0
        await says(one, *SURVIVED)


async def test_a_server_that_wants_a_key(
    fake: Callable[..., Any], session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key comes from its file, also where that appears later."""
    monkeypatch.setattr(on_start, "_RETRY_SECONDS", 0.1)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    vllm, key = await fake(key="sk-right"), tmp_path / "key"
    config = config_of(tmp_path, vllm_url=vllm.url, probe_on_start=True, probe_api_key_file=str(key))
    async with inside(session, config) as one:
        await says(
            one, 503,
            f"503: the budget probe could not run: --api-key-file {key}: No such file or directory\n",
        )  # fmt: skip
        key.write_text("sk-right\n")
        await says(one, *SURVIVED)


async def test_without_step_lines(fake: Callable[..., Any], sidecar: Start) -> None:
    """What must have been scheduled takes the budget from unexercised to comfortable, and says whence it is known."""
    vllm = await fake(limit=32768, max_model_len=65536, iteration_lines=False, busy=1)
    one = await sidecar("--log", "vllm.log", "--vllm-url", vllm.url, "--scrape-interval", "200ms")

    async def judged() -> bool:
        return bool((await target(one)).get("risk", {}).get("state") == "unexercised")

    await until(judged)
    await says(
        one, 503,
        "503: no full step is in the log; start with --probe.on-start, or run vllm with --enable-logging-iteration-details\n",
    )  # fmt: skip
    await one.stop()
    vllm.busy = 0
    two = await sidecar(
        "--log", "vllm.log", "--vllm-url", vllm.url, "--probe.on-start", "--scrape-interval", "200ms"
    )
    await says(two, *SURVIVED)

    async def comfortable() -> bool:
        risk = (await target(two))["risk"]
        return bool(risk["state"] == "comfortable" and "a probe must have filled them" in risk["reasons"][0])

    await until(comfortable)
    assert (await target(two))["probe"]["steps"] == {
        "source": "scheduled",
        "largest_tokens": 32768,
        "full": 50,
    }


async def test_the_command_asks_the_sidecar(
    fake: Callable[..., Any], sidecar: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the log, the sidecar tells the budget, counts the steps and names the cause; then its budget is ready."""
    vllm = await fake()
    one = await sidecar("--log", "vllm.log", "--vllm-url", vllm.url, "--scrape-interval", "200ms")
    await one.reaches("vllm_oom_engine_starts_total", 1)
    given = ["probe", "--vllm-url", vllm.url, "--exporter", one.base, "--shape", "long", "--format", "json"]
    assert await asyncio.to_thread(main, given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == {"source": "iteration", "largest_tokens": 2048, "full": 1}
    await says(one, *SURVIVED)
    vllm.dies_above = 1000
    assert await asyncio.to_thread(main, given) == 1
    assert json.loads(capsys.readouterr().out)["incident"]["class"] == "prefill_budget"
    assert await asyncio.to_thread(main, [*given, "--target", "other"]) == 2
    assert capsys.readouterr().err == (
        "vllm-oom-exporter: probe: --exporter: it follows vllm; choose one with --target\n"
    )


# --- by themselves --------------------------------------------------------------------------------

FULL = {"seen": 9, "full": 1, "largest_tokens": 2048}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"life": None}, "no start of the server was read yet"),
        ({}, "no full step is in the log; start with --probe.on-start, or run vllm with --enable-logging-iteration-details"),
        ({"steps": FULL}, None),
        ({"steps": FULL, "engine_state": "dead"}, "the engine is dead"),
        ({"steps": FULL, "engine_state": "hung"}, "the engine is hung"),
        ({"steps": FULL, "probe_asked": True}, "the budget probe has not run"),
        ({"steps": FULL, "probe_asked": True, "probe": {"state": "running", "life": 1}}, "the budget probe is running"),
        ({"steps": FULL, "probe_asked": True, "probe": {"state": "failed", "life": 1}}, "the server failed under the budget probe"),
        ({"probe_asked": True, "probe": {"state": "unfinished", "life": 1}}, "the budget probe was not finished in time"),
        ({"probe_asked": True, "probe": {"state": "survived", "life": 1}}, None),
        ({"probe_asked": True, "probe": {"state": "survived", "life": 0}}, "the budget probe has not run"),
        ({"probe_asked": True, "probe": {"state": "skipped", "life": 1, "reason": "x"}}, "the budget probe could not run: x"),
        ({"steps": FULL, "probe_asked": True, "probe": {"state": "skipped", "life": 1, "reason": "x"}}, None),
    ],
)  # fmt: skip
def test_what_ready_means(what: dict[str, Any], why: str | None) -> None:
    """Only a probe that this life survived, or a full step that nothing contradicts."""
    status = TargetStatus("vllm", life=Life(1), engine_state="serving")
    for name, value in what.items():
        setattr(status, name, value)
    assert unready(status) == why


def test_probed_steps_outlive_a_restart() -> None:
    """They are saved beside what was scraped, and come back whatever is restored first."""
    ledger = Ledger()
    ledger.life(Life(3))
    ledger.probed(3, 50)
    saved = json.loads(json.dumps(ledger.scraped()))
    again = Ledger()
    again.restore_scraped(saved)
    assert again.lives == [LifeExposure(3, probed_steps=50)]
    again.restore(json.loads(json.dumps(Ledger().snapshot() | {"lives": ledger.snapshot()["lives"]})))
    assert again.lives[0].probed_steps == 50
    ledger.probed(9, 50)
    assert len(ledger.lives) == 1
