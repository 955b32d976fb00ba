"""Targets that come and go with their pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from podlogs import PodLog

from exporter import logs
from exporter.config import TargetConfig
from exporter.node.addresses import CHECK_SECONDS, SEARCH_SECONDS, Addresses
from exporter.node.agent import GRACE, NodeAgent
from exporter.node.wakeups import Wakeup, Wakeups
from exporter.scrape import Scraper, open_session
from exporter.sources.kube_client import KubeClient, LoopClock

SERVER = b"(EngineCore pid=104) INFO 11-02 10:00:00 [core.py:58] Initializing a V1 LLM engine\n"


class Watched:
    """An agent on a tree, with the clock in the hands of the test."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.now = 1000.0
        self.agent = NodeAgent(root, clock=lambda: self.now, **options)

    async def look(self, seconds: float = 2.0) -> tuple[list[str], list[str]]:
        """Names of those that appeared and of those that ended, some time later."""
        self.now += seconds
        changes = await self.agent.look()
        return [one.name for one in changes.appeared], changes.ended


def server(root: Path, pod: str) -> PodLog:
    """A server that has said so."""
    one = PodLog(root, "prod", pod)
    one.write(SERVER)
    return one


class TestTargets:
    """When they begin and end."""

    async def test_a_target(self, tmp_path: Path) -> None:
        """It is called and labelled after its container."""
        server(tmp_path, "llama-0")
        agent = NodeAgent(tmp_path)
        appeared = (await agent.look()).appeared
        assert appeared == [
            TargetConfig(
                "prod/llama-0/vllm",
                (f"{tmp_path}/prod_llama-0_*/vllm/*.log",),
                "",
                {"namespace": "prod", "pod": "llama-0", "container": "vllm"},
            )
        ]
        assert agent.source(appeared[0]).stats.name == str(tmp_path)
        agent.close()

    async def test_it_outlives_its_pod(self, tmp_path: Path) -> None:
        """For a quarter of an hour; then it ends, once."""
        one = server(tmp_path, "llama-0")
        watched = Watched(tmp_path)
        assert await watched.look() == (["prod/llama-0/vllm"], [])
        assert await watched.look() == ([], [])
        one.delete()
        assert await watched.look() == ([], [])
        assert watched.agent.is_gone("prod/llama-0/vllm")
        assert await watched.look(GRACE - 1) == ([], [])
        assert await watched.look(1) == ([], ["prod/llama-0/vllm"])
        assert await watched.look(GRACE) == ([], [])

    async def test_a_pod_of_its_name_takes_its_place(self, tmp_path: Path) -> None:
        """A StatefulSet creates the pod again: it is the same target, and does not end."""
        one = server(tmp_path, "llama-0")
        watched = Watched(tmp_path)
        await watched.look()
        one.delete()
        await watched.look(GRACE / 2)
        one.recreate()
        assert await watched.look() == ([], [])
        assert not watched.agent.is_gone("prod/llama-0/vllm")
        assert await watched.look(GRACE) == ([], [])

    async def test_a_restart_keeps_the_grace(self, tmp_path: Path) -> None:
        """What was read a moment before the exporter ended is shown for the rest of its time; older is not."""
        server(tmp_path, "llama-0")
        saved = {"prod/llama-1/vllm": 300.0, "prod/llama-2/vllm": GRACE, "vllm": 1.0, "a/../c": 1.0}
        watched = Watched(tmp_path, saved=saved)
        assert await watched.look() == (["prod/llama-1/vllm", "prod/llama-0/vllm"], [])
        assert await watched.look(GRACE - 303) == ([], [])
        assert await watched.look(5) == ([], ["prod/llama-1/vllm"])

    async def test_no_more_than_a_limit(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Beyond it nothing is followed, which is said once; what is gone makes room for what is there."""
        logs.configure("info", "json")
        pods = [server(tmp_path, f"llama-{number}") for number in range(4)]
        watched = Watched(tmp_path, limit=3)
        appeared, _ = await watched.look()
        assert len(appeared) == 3
        assert watched.agent.counts == {"vllm": 3, "other": 0, "undecided": 0, "unreadable": 0, "left_out": 1}
        await watched.look()
        said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [one["event"] for one in said] == ["more vLLM containers than are followed"]
        assert (said[0]["followed"], said[0]["left_out"]) == (3, 1)
        followed = next(one for one in pods if one.name in appeared)
        last = next(one for one in pods if one.name not in appeared)
        followed.delete()
        assert await watched.look() == ([last.name], [followed.name])
        assert watched.agent.counts["left_out"] == 0


class TestWakeups:
    """One inotify instance for all: who is woken is the one whose log has grown."""

    async def test_only_its_own(self, tmp_path: Path) -> None:
        """A line in one directory wakes one of two."""
        for name in "ab":
            (tmp_path / name).mkdir()
        everyone = Wakeups()
        first, second = Wakeup(everyone), Wakeup(everyone)
        first.directories, second.directories = [str(tmp_path / "a")], [str(tmp_path / "b")]
        for one in (first, second):
            await one.wait(60.0)  # the first comes back at once, for what happened before
        waiting = [asyncio.create_task(one.wait(60.0)) for one in (first, second)]
        await asyncio.sleep(0)
        (tmp_path / "b" / "0.log").write_bytes(b"x\n")
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        assert done == {waiting[1]}
        waiting[0].cancel()
        everyone.close()

    async def test_a_directory_that_comes_back(self, tmp_path: Path) -> None:
        """A pod that was deleted and is there again wakes as before."""
        folder = tmp_path / "a"
        folder.mkdir()
        everyone = Wakeups()
        one = Wakeup(everyone)
        one.directories = [str(folder)]
        await one.wait(60.0)
        folder.rmdir()
        await asyncio.wait_for(one.wait(60.0), 20)  # that it is gone
        one.directories = []
        await one.wait(0.01)
        folder.mkdir()
        one.directories = [str(folder)]
        await asyncio.wait_for(one.wait(60.0), 20)
        waiting = asyncio.create_task(one.wait(60.0))
        await asyncio.sleep(0)
        (folder / "0.log").write_bytes(b"x\n")
        await asyncio.wait_for(waiting, 20)
        everyone.close()

    async def test_shared_and_left(self, tmp_path: Path) -> None:
        """Two that watch one directory are both woken; when one leaves, the other still is."""
        everyone = Wakeups()
        first, second = Wakeup(everyone), Wakeup(everyone)
        first.directories = second.directories = [str(tmp_path)]
        for one in (first, second):
            await one.wait(60.0)
        first.close()
        waiting = asyncio.create_task(second.wait(60.0))
        await asyncio.sleep(0)
        (tmp_path / "0.log").write_bytes(b"x\n")
        await asyncio.wait_for(waiting, 20)
        assert not first.event.is_set()
        everyone.close()


# --- where servers answer -------------------------------------------------------------------


def pod(name: str, ip: str | None, container: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pod as the API lists it."""
    return {
        "metadata": {"namespace": "prod", "name": name, **more.get("metadata", {})},
        "spec": {"containers": [{"name": "vllm", **container}]},
        "status": {"podIP": ip, "phase": more.get("phase", "Running")},
    }


PODS = [
    pod("default", "10.0.0.1", {}),
    pod("option", "10.0.0.2", {"args": ["--model", "m", "--port", "8081"], "ports": [{"containerPort": 1}]}),
    pod("script", "10.0.0.3", {"command": ["sh", "-c", "exec vllm serve m --port=8082 2>&1"]}),
    pod(
        "named",
        "10.0.0.4",
        {"ports": [{"containerPort": 9, "name": "grpc"}, {"containerPort": 8083, "name": "http"}]},
    ),
    pod("only", "fd00::5", {"ports": [{"containerPort": 8084}]}),
    pod("annotated", "10.0.0.6", {}, metadata={"annotations": {"prometheus.io/port": "8085"}}),
    pod("odd-port", "10.0.0.7", {}, metadata={"annotations": {"prometheus.io/port": "http@evil"}}),
    pod("pending", None, {}),
    pod("odd-address", "10.0.0.8/../x", {}),
    pod("over", "10.0.0.9", {}, phase="Succeeded"),
]
URLS = {
    "prod/default/vllm": "http://10.0.0.1:8000",
    "prod/option/vllm": "http://10.0.0.2:8081",
    "prod/script/vllm": "http://10.0.0.3:8082",
    "prod/named/vllm": "http://10.0.0.4:8083",
    "prod/only/vllm": "http://[fd00::5]:8084",
    "prod/annotated/vllm": "http://10.0.0.6:8085",
    "prod/odd-port/vllm": "http://10.0.0.7:8000",
}


class Api:
    """An API server that lists pods."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: object = {"items": PODS}
        self.asked: list[dict[str, str]] = []
        app = web.Application()
        app.router.add_get("/api/v1/pods", self._pods)
        self.server = TestServer(app)

    async def _pods(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, Addresses]]:
    """An API server, and who asks it."""
    one = Api()
    await one.server.start_server()
    client = KubeClient(str(one.server.make_url("")).rstrip("/"), None, None, LoopClock())
    addresses = Addresses(client, "gpu-7")
    yield one, addresses
    await addresses.close()
    await one.server.close()


class TestAddresses:
    """Where servers answer, by what the API says of their pods."""

    async def test_urls(self, api: tuple[Api, Addresses]) -> None:
        """By option, annotation, port that is declared, or the default; nothing of a pod gets into a URL unchecked."""
        one, addresses = api
        assert await addresses.look({"prod/default/vllm"}) == CHECK_SECONDS
        assert addresses.found == URLS
        assert one.asked == [{"fieldSelector": "spec.nodeName=gpu-7", "resourceVersion": "0"}]

    async def test_searching_gets_slower(self, api: tuple[Api, Addresses]) -> None:
        """A server that is not found is looked for less and less, a new one at once again."""
        _, addresses = api
        waits = [await addresses.look({"prod/missing/vllm"}) for _ in range(6)]
        assert waits == [SEARCH_SECONDS, 10.0, 20.0, 40.0, CHECK_SECONDS, CHECK_SECONDS]
        assert await addresses.look({"prod/missing/vllm", "prod/other/vllm"}) == SEARCH_SECONDS

    async def test_refused(self, api: tuple[Api, Addresses], capsys: pytest.CaptureFixture[str]) -> None:
        """Which right is missing is said once; what was known stays."""
        one, addresses = api
        logs.configure("info", "json")
        await addresses.look(set())
        one.status = 403
        for _ in range(2):
            assert await addresses.look(set()) == 300.0
        said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [one["problem"] for one in said] == [
            "may not list the pods of node gpu-7 (403); grant the service account the verb list on pods"
        ]
        assert addresses.found == URLS
        one.status = 200
        await addresses.look(set())

    @pytest.mark.parametrize("answer", [[], {"items": [1, None, {"metadata": 5}]}, {"items": "x"}, {}])
    async def test_odd_answers(self, api: tuple[Api, Addresses], answer: object) -> None:
        """What is no list of pods has no addresses in it, and ends nothing."""
        one, addresses = api
        one.answer = answer
        await addresses.look(set())
        assert addresses.found == {}

    async def test_a_server_that_is_found_later(self) -> None:
        """It is scraped from then on; when its pod is gone nothing is said of it, rather than that it is down."""

        async def answer(_: web.Request) -> web.Response:
            return web.Response(text='vllm:num_requests_running{engine="0",model_name="m"} 1.0\n')

        app = web.Application()
        app.router.add_get("/metrics", answer)
        server = TestServer(app)
        await server.start_server()
        async with open_session() as session:
            scraper = Scraper(None, 2.0, lambda: 1000.0, session)
            seen = []
            for url in (None, str(server.make_url("")), None):
                scraper.point_to(url)
                await scraper.poll()
                seen.append((scraper.up, scraper.problem))
        await server.close()
        assert seen == [(None, None), (True, None), (None, None)]

    def test_without_the_name_of_the_node(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Outside a cluster nothing is asked, which is said with what is missing."""
        logs.configure("info", "json")
        assert Addresses.in_cluster({}) is None
        assert "KUBERNETES_SERVICE_HOST" in json.loads(capsys.readouterr().err)["problem"]
