from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from conftest import capture
from pager import Notification, Pager, free_port, needs_alertmanager, needs_prometheus, prometheus
from test_app import NOBODY, Sidecar, log, until
from test_incident import MLP, STEP, at, dead, dump, fatal, frames, later, oom, start, warning

from exporter.cli import main
from exporter.notify.alertmanager import Alertmanager
from exporter.notify.alerts import incident_alert
from exporter.notify.receiver import Receiver
from exporter.scrape import open_session

pytestmark = needs_alertmanager

WAITS = {"group_wait": "0s", "group_interval": "1s"}
Start = Callable[..., Awaitable[Sidecar]]


def ranks(seconds: float, count: int) -> list[str]:
    """Every worker of a tensor-parallel group fails the same step, each with its own words."""
    lines: list[str] = []
    for rank in range(count):
        text = f"WorkerProc hit an exception.\n{frames(STEP, MLP)}{oom(gpu=rank)}"
        lines += at(seconds, f"Worker_TP{rank} pid={200 + rank}", "ERROR", "multiproc_executor.py:957", text)
    return lines


CRASH = log(ranks(100, 8), dump(100), fatal(100), dead(100))


@pytest.fixture
async def pager(tmp_path: Path) -> AsyncIterator[Pager]:
    """A real Alertmanager that does not wait."""
    folder = tmp_path / "pager"
    folder.mkdir()
    async with Pager(folder, WAITS).running() as one:
        yield one


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts sidecars on ``vllm.log`` that keep their state and end with the test."""
    started: list[Sidecar] = []
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def begin(*arguments: str | Path, **more: str) -> Sidecar:
            path = tmp_path / "vllm.log"
            source = () if "--config" in arguments else ("--log", path)
            one = Sidecar(session, tmp_path, *source, "--state-dir", "state", *arguments)
            started.append(one)
            await one.begin(**more)
            await one.listening()
            if path.exists():
                await one.reaches("vllm_oom_log_lines_total", path.read_bytes().count(b"\n"))
            return one

        yield begin
        for one in started:
            if one.process.returncode is None:
                one.process.kill()
            await one.ended()


def append(folder: Path, data: bytes) -> None:
    """What vLLM writes now."""
    with (folder / "vllm.log").open("ab") as out:
        out.write(data)


def now(data: bytes) -> bytes:
    """The lines as if written this second, in local time as vLLM writes it."""
    return re.sub(rb"11-02 \d\d:\d\d:\d\d", time.strftime("%m-%d %H:%M:%S").encode(), data)


async def paged(pager: Pager, times: int = 1) -> list[Notification]:
    """Pages, as soon as there are so many."""

    async def there() -> list[Notification]:
        return pager.of("pager") if len(pager.of("pager")) >= times else []

    return await until(there)


async def settled(pager: Pager) -> None:
    """Everything sent before has been told when this arrives, as nothing waits."""
    before = len(pager.of("pager"))
    assert await asyncio.to_thread(main, ["test-page", "--alertmanager-url", pager.url]) == 0
    await paged(pager, before + 1)


def names(notified: list[Notification]) -> list[str]:
    """Which alerts were in it."""
    return [alert["labels"]["alertname"] for one in notified for alert in one.alerts]


async def test_one_page(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """A death that eight ranks report is one page, within seconds, with the evidence in it."""
    append(tmp_path, log(start()))
    one = await sidecar("--alertmanager-url", pager.url)
    append(tmp_path, CRASH)
    begun = time.time()
    ((page,),) = [one.alerts for one in await paged(pager)]
    assert pager.of("pager")[0].time - begun < 5
    labels = page["labels"]
    assert labels.pop("incident")
    assert labels.pop("instance")
    assert labels == {
        "alertname": "VLLMOutOfMemory", "severity": "page", "class": "prefill_budget", "phase": "serving",
        "model_name": "acme/a", "source": "vllm-oom-exporter",
    }  # fmt: skip
    text = page["annotations"]["description"]
    assert "the failing step held 8192 of 8192 tokens" in text
    assert "asked for 460.00 MiB, 231.06 MiB was free" in text
    assert "Do: --max-num-batched-tokens " in text
    metrics = await one.reaches("vllm_oom_incidents_total", 1)
    receiver = f'receiver="{pager.address}"'
    assert metrics[f'vllm_oom_notifications_total{{{receiver},result="failed"}}'] == 0
    assert metrics[f'vllm_oom_notifications_total{{{receiver},result="delivered"}}'] >= 1
    await settled(pager)
    assert names(pager.of("pager")) == ["VLLMOutOfMemory", "VLLMOutOfMemoryTest"]
    assert "VLLMOutOfMemory" not in names(pager.of("tickets"))


async def test_nothing_else_pages(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """Deaths of the past, healthy and hostile logs, near misses and survived failures wake nobody."""
    append(tmp_path, capture("mlp_eager_16384"))
    one = await sidecar("--alertmanager-url", pager.url)
    await one.reaches("vllm_oom_incidents_total", 1)
    for name in ("clean_eager_16384", "hostile_color", "hostile_debug_uni_iter", "hostile_info_mp"):
        append(tmp_path, capture(name))
    append(tmp_path, log(start(), warning(100), at(130, "APIServer pid=1", "INFO", "x.py:1", "all is well")))
    append(tmp_path, capture("lora_survive"))
    await one.reaches("vllm_oom_incidents_total", 2)

    async def ticket() -> list[Notification]:
        return pager.of("tickets")

    assert names(await until(ticket))[:1] == ["VLLMOutOfMemory"]
    await settled(pager)
    assert names(pager.of("pager")) == ["VLLMOutOfMemoryTest"]


@needs_prometheus
@pytest.mark.parametrize("pushes", [True, False])
async def test_beside_the_rules(sidecar: Start, tmp_path: Path, pushes: bool) -> None:
    """With rules, routes and waits as shipped a death is one page: the pushed one, else that of the rule.

    Logs of healthy and attacked servers, near misses and survived failures are none.
    """
    config: dict[str, object] = {
        "targets": [
            {
                "name": "llama", "log": ["vllm.log"], "vllm_url": NOBODY,
                "labels": {"namespace": "models", "pod": "llama-0", "container": "vllm"},
            }
        ]
    }  # fmt: skip
    folder = tmp_path / "pager"
    folder.mkdir()
    async with Pager(folder, {}).running() as pager:
        config |= {"alertmanager_url": [pager.url] if pushes else []}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        append(tmp_path, log(start()))
        port = free_port()
        one = await sidecar("--config", "config.yaml", listen=f"127.0.0.1:{port}")
        async with prometheus(folder, pager, [port]):
            for name in ("clean_eager_16384", "hostile_info_mp", "lora_survive"):
                append(tmp_path, capture(name))
            append(tmp_path, log(start(), warning(100), later(130)))
            await one.reaches("vllm_oom_near_misses_total", 1)
            append(tmp_path, now(log(start(200)) + CRASH))

            async def ruled() -> bool:
                found = {
                    alert["labels"]["alertname"]: alert["status"]["state"] for alert in await pager.alerts()
                }
                return found.get("VLLMPrefillBudgetOOM") == ("suppressed" if pushes else "active")

            await until(ruled)
            waited = time.monotonic() + 12  # the shipped group_wait of a rule's page, and a little more
            while time.monotonic() < waited:
                await asyncio.sleep(0.2)
        assert names(pager.of("pager")) == ["VLLMOutOfMemory" if pushes else "VLLMPrefillBudgetOOM"]


async def test_alertmanager_away(
    pager: Pager, sidecar: Start, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """A crash while Alertmanager is away is paged once when it is back; being away is said once."""
    append(tmp_path, log(start()))
    one = await sidecar("--alertmanager-url", pager.url)
    await pager.stop()
    append(tmp_path, CRASH)
    begun = time.monotonic()
    metrics = await one.reaches("vllm_oom_fatal_incidents_total", 1)
    await one.event("Alertmanager does not take alerts: trying again")
    away = float(pytestconfig.getoption("--outage"))
    while time.monotonic() - begun < away:  # the time is what is tried
        await asyncio.sleep(0.2)
        assert await one.get("/-/healthy")
    await pager.start()
    pages = await paged(pager) if away < 10 else await _patient(pager)
    assert names(pages) == ["VLLMOutOfMemory"]
    await one.event("Alertmanager takes alerts again")
    await settled(pager)
    assert names(pager.of("pager")) == ["VLLMOutOfMemory", "VLLMOutOfMemoryTest"]
    assert len(one.events("Alertmanager does not take alerts: trying again")) == 1
    metrics = await one.metrics()
    receiver = f'receiver="{pager.address}"'
    assert metrics[f'vllm_oom_notifications_total{{{receiver},result="failed"}}'] >= 1
    assert metrics[f'vllm_oom_notifications_total{{{receiver},result="dropped"}}'] == 0


async def _patient(pager: Pager) -> list[Notification]:
    """The longest wait between two attempts is half a minute."""

    async def there() -> list[Notification]:
        return pager.of("pager")

    return await until(there, 45)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_restart(pager: Pager, sidecar: Start, tmp_path: Path, how: signal.Signals) -> None:
    """A restarted exporter goes on with the same alert, and pages nobody for what was paged."""
    append(tmp_path, log(start()))
    one = await sidecar("--alertmanager-url", pager.url)
    append(tmp_path, CRASH)
    await paged(pager)
    (before,) = await pager.alerts()
    await asyncio.to_thread(time.sleep, 0.01)
    await one.stop(how)
    await sidecar("--alertmanager-url", pager.url)

    async def again() -> bool:
        alerts = await pager.alerts()
        assert [alert["fingerprint"] for alert in alerts] == [before["fingerprint"]]
        return bool(alerts[0]["updatedAt"] > before["updatedAt"])

    await until(again)
    (after,) = await pager.alerts()
    assert after["startsAt"] == before["startsAt"]
    await settled(pager)
    assert names(pager.of("pager")) == ["VLLMOutOfMemory", "VLLMOutOfMemoryTest"]


async def test_reload(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """A receiver that a reload adds learns what fires; one that was there before pages nobody again."""
    config = {"log": ["vllm.log"], "vllm_url": NOBODY, "alertmanager_url": [NOBODY]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    append(tmp_path, log(start()))
    one = await sidecar("--config", "config.yaml")
    append(tmp_path, CRASH)
    await one.event("Alertmanager does not take alerts: trying again")
    for wait in ("2s", "3s"):  # the second time every target is built anew
        config |= {"alertmanager_url": [pager.url], "scrape_interval": wait}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        one.process.send_signal(signal.SIGHUP)
        await one.event("configuration reloaded", 1 if wait == "2s" else 2)
        assert names(await paged(pager)) == ["VLLMOutOfMemory"]
    await settled(pager)
    assert names(pager.of("pager")) == ["VLLMOutOfMemory", "VLLMOutOfMemoryTest"]


async def test_not_delivered_before_a_restart(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """What could not be delivered before the exporter was killed is delivered after its restart."""
    append(tmp_path, log(start()))
    await pager.stop()
    one = await sidecar("--alertmanager-url", pager.url)
    append(tmp_path, CRASH)
    await one.event("Alertmanager does not take alerts: trying again")
    await one.stop(signal.SIGKILL)
    await pager.start()
    await sidecar("--alertmanager-url", pager.url)
    assert names(await paged(pager)) == ["VLLMOutOfMemory"]


async def test_died_while_nobody_watched(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """A death while the exporter was down is paged after its restart, though its log names no zone."""
    append(tmp_path, log(start()))
    one = await sidecar("--alertmanager-url", pager.url)
    await one.stop()
    append(tmp_path, now(CRASH))
    await sidecar("--alertmanager-url", pager.url)
    assert names(await paged(pager)) == ["VLLMOutOfMemory"]


@asynccontextmanager
async def bad(*answers: bytes | None) -> AsyncIterator[list[str]]:
    """Servers that answer whatever comes with these bytes; None never answers. Gives their URLs."""
    async with AsyncExitStack() as stack:
        urls = []
        hanging: list[asyncio.StreamWriter] = []
        for answer in answers:

            async def handle(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes | None = answer
            ) -> None:
                if answer is None:
                    hanging.append(writer)
                    return
                await reader.read(1)
                writer.write(answer)
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://user:hunter2@127.0.0.1:{server.sockets[0].getsockname()[1]}/x")
        yield urls
        for writer in hanging:
            writer.close()


async def test_bad_receivers(pager: Pager, sidecar: Start, tmp_path: Path) -> None:
    """Receivers that refuse, hang, redirect, fail or talk nonsense hold up nobody; each is said, and counted."""
    append(tmp_path, log(start()))
    redirect = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    failing = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    async with bad(None, redirect, failing, b"\x00garbage\r\n\r\n") as urls:
        every = [NOBODY, *urls, pager.url]
        one = await sidecar(*(part for url in every for part in ("--alertmanager-url", url)))
        append(tmp_path, CRASH)
        begun = time.time()
        assert names(await paged(pager)) == ["VLLMOutOfMemory"]
        assert pager.of("pager")[0].time - begun < 5
        await one.event("Alertmanager does not take alerts: trying again", 4)
        problems = {
            event["problem"] for event in one.events("Alertmanager does not take alerts: trying again")
        }
        assert problems >= {
            "cannot connect: Connection refused",
            "it redirects (HTTP 302); give the URL it leads to",
            "it answers HTTP 500",
        }
        metrics = await one.metrics()
        # of more than four receivers those behind the third are one series
        assert metrics.sum("vllm_oom_notifications_total") > 4
        assert await one.get("/-/healthy")
        begun = time.monotonic()
        assert await one.stop() == 0
        assert time.monotonic() - begun < 5
    assert not any("hunter2" in line for line in one.said)
    assert [line for line in one.said if not line.startswith("{")] == []


async def test_resolved(pager: Pager) -> None:
    """An alert that is over is told as resolved, by Alertmanager's own reckoning."""
    document = {"id": "a1", "class": "sampler", "phase": "serving", "fatal": True}
    one = incident_alert(document, {"instance": "gpu-1"}, time.time())
    async with open_session() as session:
        receiver = Receiver(Alertmanager(pager.url, session), lambda *_: None)
        receiver.put(one)
        await receiver.attempt()
        await paged(pager)
        receiver.end(one)
        await receiver.attempt()

        async def resolved() -> list[Notification]:
            return pager.of("pager", "resolved")

        ((alert,),) = [notified.alerts for notified in await until(resolved)]
    assert alert["labels"]["incident"] == "a1"
