"""A stand-in for API server and kubelet, with their habits and their faults.

It follows the kubelet where that matters to a reader: an answer begins with its first line, time
filters count whole seconds, ``previous`` gives the run before, following ends with the container,
and a request means whichever run is there when it arrives. Faults happen when a test asks for them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

BIRTH = 1_796_056_006 * 10**9  # 2026-11-30T16:26:46Z
SECOND = 10**9


def stamp(ns: int) -> str:
    """A time as the kubelet writes it in front of a line."""
    whole = datetime.fromtimestamp(ns // SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{ns % SECOND:09d}Z"


@dataclass
class Run:
    """One run of the container: its log, and how it ended."""

    id: str
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    first: int = 0  # older lines were rotated away
    generation: int = 0
    followed_to: list[int] = field(default_factory=list)  # by generation: where following stopped
    ended: dict[str, Any] | None = None

    @property
    def text(self) -> bytes:
        """The whole log, as a reader should get it."""
        return b"".join(line for _, line in self.lines)


class Kubelet:
    """Serves pod ``ns/pod`` with container ``vllm``. Use as an async context manager."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.runs: list[Run] = []
        self.waiting = False  # the container waits for its next run
        self.gone = False  # there is no such pod
        self.tokens: set[str] = set()  # that are accepted; any where there is none
        self.time: Callable[[], float] = lambda: 0.0
        self.lag = 0.0  # seconds of ``time`` until a change shows in the pod's status
        self.ids = True  # whether the status names containers by id
        self.piece = 1 << 20  # bytes sent at once
        self.rewrite: Callable[[dict[str, Any]], None] = lambda _: None  # changes a pod's status
        self.refusals: dict[str, deque[tuple[int, dict[str, str]]]] = {"pod": deque(), "log": deque()}
        self.cuts: deque[tuple[int, bool]] = deque()  # (bytes, whether it ends properly), one an answer
        self.before_log: Callable[[], Awaitable[None]] | None = None  # happens once, as a log is asked for
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.credentials: list[str] = []
        self.now = 0  # requests being answered
        self.most = 0
        self.sent = 0
        self._history: list[tuple[float, dict[str, Any]]] = []  # statuses before a change, and when it was
        self._changed = asyncio.Event()
        self._requested = asyncio.Event()
        self._ns = BIRTH
        self._tls = tls
        app = web.Application(middlewares=[self._counting])
        app.router.add_get("/api/v1/namespaces/ns/pods/pod", self._pod)
        app.router.add_get("/api/v1/namespaces/ns/pods/pod/log", self._log)
        self._server = TestServer(app, scheme="https" if tls else "http")

    async def __aenter__(self) -> Kubelet:
        await self._server.start_server(ssl=self._tls, shutdown_timeout=0.1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self._server.make_url("")).rstrip("/")

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server.port is not None
        return self._server.port

    # --- what happens to the container

    def start(self) -> Run:
        """The container runs, for the first time or again."""
        self._keep_status()
        self.waiting = False
        self.runs.append(Run(f"containerd://{len(self.runs):064x}"))
        self._wake()
        return self.runs[-1]

    def write(self, *texts: str | bytes, step: int = 1000, end: bytes = b"\n") -> None:
        """The container writes lines, ``step`` nanoseconds apart."""
        for text in texts:
            self._ns += step
            body = text if isinstance(text, bytes) else text.encode()
            self.write_at(self._ns, body, end)
        self._wake()

    def write_at(self, ns: int, text: bytes, end: bytes = b"\n") -> None:
        """The container writes a line at a time that need not be later than the one before."""
        self.runs[-1].lines.append((ns, stamp(ns).encode() + b" " + text + end))
        self._wake()

    def end(self, reason: str = "Error", code: int = 1, *, waiting: bool = False) -> None:
        """The container ends, and with ``waiting`` is about to run again."""
        self._keep_status()
        self.runs[-1].ended = {
            "reason": reason,
            "exitCode": code,
            "finishedAt": stamp(self._ns)[:19] + "Z",
            "containerID": self.runs[-1].id,
        }
        self.waiting = waiting
        self._wake()

    def rotate(self, *, keep: bool = False) -> None:
        """Rotate the log: who follows now gets nothing more. ``keep``: the old lines stay readable."""
        run = self.runs[-1]
        run.followed_to.append(len(run.lines))
        run.generation += 1
        if not keep:
            run.first = len(run.lines)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _keep_status(self) -> None:
        if self.lag:
            self._history.append((self.time(), self.status()))

    # --- what a test waits for

    def asked(self, kind: str) -> list[dict[str, str]]:
        """The queries of all requests for ``pod`` or ``log`` so far."""
        return [query for one, query in self.requests if one == kind]

    async def until_asked(self, kind: str, count: int) -> None:
        """Return once there were ``count`` requests of a kind."""
        async with asyncio.timeout(5):
            while len(self.asked(kind)) < count:
                await self._requested.wait()

    # --- how it answers

    def status(self) -> dict[str, Any]:
        """The pod, as its JSON says."""
        states: list[dict[str, Any]] = [self._state(run) for run in self.runs]
        one: dict[str, Any] = {"name": "vllm", "restartCount": max(0, len(self.runs) - 1), "state": {}}
        if self.waiting or not self.runs:
            one["state"] = {"waiting": {"reason": "CrashLoopBackOff" if self.runs else "ContainerCreating"}}
            one["lastState"] = states[-1] if states else {}
        else:
            one["state"] = states[-1]
            one["lastState"] = states[-2] if len(states) > 1 else {}
        if self.runs and self.ids:
            one["containerID"] = self.runs[-1].id
        pod = {
            "metadata": {"name": "pod", "namespace": "ns", "uid": "u-1"},
            "spec": {
                "containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}],
                "initContainers": [
                    {"name": "oom", "image": "x/vllm-oom-exporter", "restartPolicy": "Always"}
                ],
            },
            "status": {"containerStatuses": [{"name": "oom"}, one]},
        }
        self.rewrite(pod)
        return pod

    def _state(self, run: Run) -> dict[str, Any]:
        if run.ended is None:
            return {"running": {"startedAt": stamp(BIRTH)[:19] + "Z"}}
        return {"terminated": run.ended if self.ids else {**run.ended, "containerID": ""}}

    @web.middleware
    async def _counting(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        kind = "log" if request.path.endswith("/log") else "pod"
        self.requests.append((kind, dict(request.query)))
        self.credentials.append(request.headers.get("Authorization", ""))
        self._requested.set()
        self._requested = asyncio.Event()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.tokens and self.credentials[-1].removeprefix("Bearer ") not in self.tokens:
                return web.Response(status=401)
            if self.refusals[kind]:
                status, headers = self.refusals[kind].popleft()
                return web.Response(status=status, headers=headers, text="the reason, with\nnewlines")
            if self.gone:
                return web.Response(status=404)
            return await self._answer(request, handler)
        finally:
            self.now -= 1

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        try:
            answer: web.StreamResponse = await handler(request)
        except ConnectionResetError:
            return web.Response()  # the reader went away
        return answer

    async def _pod(self, _: web.Request) -> web.Response:
        self._history = [one for one in self._history if one[0] + self.lag > self.time()]
        return web.json_response(self._history[0][1] if self._history else self.status())

    def _chosen(self, query: Mapping[str, str]) -> Run | None:
        before = "previous" in query and not self.waiting
        runs = self.runs[:-1] if before else self.runs
        return runs[-1] if runs else None

    async def _log(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        if self.before_log is not None:
            happens, self.before_log = self.before_log, None
            await happens()
        assert query["container"] == "vllm"
        assert query["timestamps"] == "true"
        run = self._chosen(query)
        if run is None:
            return web.Response(status=400, text="no such run")
        since = 0
        if "sinceTime" in query:
            since = int(datetime.fromisoformat(query["sinceTime"]).timestamp()) * SECOND
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        left, proper = self.cuts.popleft() if self.cuts else (1 << 60, True)
        async for data in self._lines(run, since, follow="follow" in query):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data[:left])
            self.sent += len(data[:left])
            left -= len(data)
            if left <= 0:
                if not proper:
                    assert request.transport is not None
                    request.transport.close()
                return response
        if not response.prepared:
            await response.prepare(request)
        return response

    async def _lines(self, run: Run, since: int, *, follow: bool) -> AsyncIterator[bytes]:
        at, generation = run.first, run.generation
        while True:
            changed = self._changed
            end = len(run.lines) if generation == run.generation else run.followed_to[generation]
            block = bytearray()
            while at < end:
                ns, line = run.lines[at]
                at += 1
                if ns >= since:
                    block += line
                while len(block) >= self.piece or (block and at == end):
                    yield bytes(block[: self.piece])
                    del block[: self.piece]
                    await asyncio.sleep(0)
            if not follow or run.ended is not None:
                if at >= len(run.lines) or generation != run.generation:
                    return
            else:
                await changed.wait()
