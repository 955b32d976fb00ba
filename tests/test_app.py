from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web
from conftest import Run, capture
from replay import EXPORTER
from test_incident import WORKER0, at, dead, fatal, later, oom, start

from exporter import app as app_module
from exporter import logs
from exporter.app import EXIT_CONFIG, EXIT_CRASHED, EXIT_OK, App, StartError
from exporter.config import Config, ConfigError, TargetConfig, load
from exporter.diagnosis.knowledge import builtin_classes
from exporter.scrape import open_session
from exporter.sources.stream import Chunk, SourceStats
from exporter.state import FILE, StateError, Store
from exporter.status import TargetStatus
from exporter.target import Clocks, Target

NOBODY = "http://127.0.0.1:9"  # refuses at once
DEADLINE = 20.0  # seconds, for a machine under load; nothing waits that long

T = TypeVar("T")


def log(*parts: list[str]) -> bytes:
    """Lines of a log."""
    return "".join(line + "\n" for part in parts for line in part).encode()


async def until(ask: Callable[[], Awaitable[T]], deadline: float = DEADLINE) -> T:
    """The first true answer; fails after the deadline."""
    end = time.monotonic() + deadline
    while True:
        answer = await ask()
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {deadline:g} s; last answer: {answer!r}"
        await asyncio.sleep(0.02)


class Metrics(dict[str, float]):
    """Samples by their name with labels; those that are not there are 0."""

    def __init__(self, text: str) -> None:
        super().__init__(
            (name, float(value))
            for name, value in re.findall(r"^(vllm_oom_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        )

    def sum(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self.items() if key.partition("{")[0] == name)

    @property
    def counters(self) -> dict[str, float]:
        """What may not go down; of bytes and lines too."""
        return {key: value for key, value in self.items() if key.partition("{")[0].endswith("_total")}


class Peer:
    """Whoever listens at ``base``."""

    base = ""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str) -> str:
        """The body; empty without an answer, or one that is not 200."""
        with suppress(aiohttp.ClientError):
            async with self.session.get(self.base + path) as response:
                return await response.text() if response.status == 200 else ""
        return ""

    async def metrics(self) -> Metrics:
        """What a scrape gives."""
        return Metrics(await self.get("/metrics"))

    async def incidents(self) -> list[dict[str, Any]]:
        """Oldest first, as ``analyze`` has them."""
        found: list[dict[str, Any]] = json.loads(await self.get("/api/v1/incidents"))["incidents"]
        return found[::-1]

    async def reaches(self, name: str, value: float) -> Metrics:
        """Metrics, as soon as a counter has its value."""

        async def there() -> Metrics | None:
            found = await self.metrics()
            assert found.sum(name) <= value, f"{name} is {found.sum(name):g}"
            return found if found.sum(name) == value else None

        found = await until(there)
        assert found is not None
        return found


class Sidecar(Peer):
    """The command ``run``, as a user starts it."""

    process: asyncio.subprocess.Process

    def __init__(self, session: aiohttp.ClientSession, folder: Path, *arguments: str | Path) -> None:
        super().__init__(session)
        self.folder = folder
        self.arguments = [*map(str, arguments)]
        self.said: list[str] = []
        """Lines of its standard error."""
        self._reading: asyncio.Task[None]

    async def begin(self, listen: str = "127.0.0.1:0", **pipes: Any) -> None:
        """Start the process."""
        if "--config" not in self.arguments:
            self.arguments = ["--vllm-url", NOBODY, *self.arguments]
        self.process = await asyncio.create_subprocess_exec(
            EXPORTER, "run", "--listen", listen, "--log-format", "json", *self.arguments,
            cwd=self.folder, stderr=asyncio.subprocess.PIPE,
            **{"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.DEVNULL, **pipes},
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said.append(line.decode().rstrip("\n"))

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What it logged."""
        every = [json.loads(line) for line in self.said if line.startswith("{")]
        return [one for one in every if event in (None, one["event"])]

    async def event(self, event: str, times: int = 1) -> dict[str, Any]:
        """The event, as soon as it was logged that often."""

        async def there() -> list[dict[str, Any]]:
            assert self.process.returncode is None or not self._reading.done(), self.said
            return self.events(event)[times - 1 : times]

        return (await until(there))[0]

    async def listening(self) -> None:
        """It answers."""
        self.base = f"http://{(await self.event('listening'))['address']}"

    async def ended(self) -> int:
        """Its exit code; everything it said has been read by then."""
        async with asyncio.timeout(DEADLINE):
            code = await self.process.wait()
            await self._reading
        return code

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end."""
        self.process.send_signal(number)
        return await self.ended()


Start = Callable[..., Awaitable[Sidecar]]


@asynccontextmanager
async def strangers() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that is not vLLM: its URL, and the paths it was asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session for all requests of a test."""
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest.fixture
async def sidecar(session: aiohttp.ClientSession, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts sidecars that end with the test."""
    started: list[Sidecar] = []

    async def begin(*arguments: str | Path, listening: bool = True, **more: Any) -> Sidecar:
        one = Sidecar(session, tmp_path, *arguments)
        await one.begin(**more)
        started.append(one)
        if listening:
            await one.listening()
        return one

    yield begin
    for one in started:
        if one.process.returncode is None:
            one.process.kill()
        await one.ended()


class TestCommand:
    """The real command on the log of a real server."""

    async def test_as_analyze(self, sidecar: Start, run: Run, tmp_path: Path) -> None:
        """Incidents are those of ``analyze`` on the same log: identities, classes, facts and evidence."""
        (tmp_path / "vllm.log").write_bytes(capture("lifecycle_iter_mp") + capture("mlp_uni_16384_rep2"))
        done = run("analyze", "vllm.log", "--format", "json")
        document = json.loads(done.stdout)
        assert (done.returncode, len(document["incidents"])) == (1, 4)
        one = await sidecar("--log", "*.log", "--state-dir", "state")
        metrics = await one.reaches("vllm_oom_incidents_total", 4)
        found = await one.incidents()
        assert [incident.pop("target") for incident in found] == ["vllm"] * 4
        assert sorted(found, key=str) == sorted(document["incidents"], key=str)
        shown = json.loads(await one.get("/api/v1/targets/vllm"))
        assert (shown["lines"], shown["bytes"]) == (document["lines"], document["bytes"])
        assert [{**life, "index": None} for life in shown["engines"]] == [
            {**life, "index": None} for life in document["engines"]
        ]
        assert metrics.sum("vllm_oom_engine_starts_total") == len(document["engines"])
        assert metrics.sum("vllm_oom_fatal_incidents_total") == sum(i["fatal"] for i in document["incidents"])
        assert metrics['vllm_oom_engine_state{state="dead"}'] == 1
        assert await one.get("/-/ready")
        begun = time.monotonic()
        assert await one.stop() == EXIT_OK
        assert time.monotonic() - begun < 5
        assert [line for line in one.said if not line.startswith("{")] == []
        assert [event for event in one.events() if event["level"] == "error"] == []

    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
    async def test_restart(self, sidecar: Start, tmp_path: Path, how: signal.Signals) -> None:
        """A restart goes on with every counter; what was logged meanwhile is found, and nothing counts twice."""
        path = tmp_path / "vllm.log"
        path.write_bytes(capture("mlp_eager_16384"))
        first = await sidecar("--log", path, "--state-dir", "state")
        before = await first.reaches("vllm_oom_incidents_total", 1)
        known = await first.incidents()
        begun = time.monotonic()
        assert await first.stop(how) == (EXIT_OK if how != signal.SIGKILL else -signal.SIGKILL)
        assert time.monotonic() - begun < 5
        with path.open("ab") as out:
            out.write(capture("mlp_uni_16384_rep2"))
        second = await sidecar("--log", path, "--state-dir", "state")
        after = await second.reaches("vllm_oom_incidents_total", 2)
        assert {name: value for name, value in before.counters.items() if after[name] < value} == {}
        assert after.sum("vllm_oom_fatal_incidents_total") == 2
        assert after.sum("vllm_oom_engine_starts_total") == 2
        assert after.sum("vllm_oom_log_lines_total") == path.read_bytes().count(b"\n")
        assert after.sum("vllm_oom_log_read_bytes_total") == path.stat().st_size
        assert known[0] in await second.incidents()

    async def test_port_taken(self, sidecar: Start, tmp_path: Path) -> None:
        """A port that somebody else has is one line that names it, and exit code 2."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            one = await sidecar(
                "--log", "vllm.log", "--state-dir", tmp_path / "state", listen=address, listening=False
            )
            assert await one.ended() == EXIT_CONFIG
        assert one.said == [
            f"vllm-oom-exporter: --listen {address}: Address already in use; choose another address or stop what"
            " listens there"
        ]

    async def test_a_state_in_use(self, sidecar: Start, tmp_path: Path) -> None:
        """Two exporters never share a state: the second ends, and the first does not notice. Then it may begin."""
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        first = await sidecar("--log", "vllm.log", "--state-dir", "state")
        second = await sidecar("--log", "vllm.log", "--state-dir", "state", listening=False)
        assert await second.ended() == EXIT_CONFIG
        assert second.said == [
            "vllm-oom-exporter: --state-dir state: another vllm-oom-exporter uses it; stop that one, or give each a"
            " directory"
        ]
        await first.reaches("vllm_oom_incidents_total", 1)
        first.process.kill()
        await first.process.wait()
        third = await sidecar("--log", "vllm.log", "--state-dir", "state")
        assert (await third.metrics()).sum("vllm_oom_incidents_total") == 1

    async def test_degraded(self, sidecar: Start, tmp_path: Path) -> None:
        """What can't be read, scraped or saved is said once and seen in a metric; the rest works."""
        (tmp_path / "loop.log").symlink_to("loop.log")
        (tmp_path / "state").write_text("in the way")
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with strangers() as (url, asked):
            one = await sidecar(
                "--log", "loop.log", "--log", "vllm.log", "--state-dir", "state", "--scrape-interval", "500ms",
                "--vllm-url", url,
            )  # fmt: skip
            await one.reaches("vllm_oom_incidents_total", 1)
            unread = await one.event("the log can't be read")
            unscraped = await one.event("vLLM's metrics are not read")

            async def often() -> bool:  # the log that can't be read is tried again within that time
                return len(asked) > 8

            await until(often)
        metrics = await one.metrics()
        assert metrics["vllm_oom_target_up"] == 0
        assert metrics["vllm_oom_state_write_failures_total"] >= 1
        assert metrics['vllm_oom_log_read_errors_total{source="loop.log"}'] >= 1
        assert await one.get("/-/healthy")
        assert await one.get("/-/ready")
        assert await one.stop() == EXIT_OK
        assert (unread["source"], "symbolic links" in unread["problem"]) == ("loop.log", True)
        assert unscraped["problem"] == "there is no /metrics (HTTP 404): is this vLLM's address?"
        (unsaved,) = one.events("the state can't be read or saved: going on in memory")
        assert unsaved["problem"] == "state: File exists"
        assert len(one.events("the log can't be read")) == 1
        assert (tmp_path / "state").read_text() == "in the way"

    async def test_standard_input(self, sidecar: Start) -> None:
        """What comes in goes out byte for byte; at its end it settles, waits for a last scrape and exits 0."""
        data = (
            capture("base_tty") + bytes(range(256)) + b"\xff\xfe" * 40_000 + capture("mlp_eager_16384")[:-1]
        )
        one = await sidecar(
            "--log", "-", "--linger", "1s", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert one.process.stdin is not None
        assert one.process.stdout is not None
        copying = asyncio.create_task(one.process.stdout.read())
        one.process.stdin.write(data)
        one.process.stdin.close()
        await one.event("the input ended")
        metrics = await one.metrics()
        assert metrics['vllm_oom_incidents_total{class="prefill_budget",phase="serving"}'] == 1
        assert metrics.sum("vllm_oom_log_read_bytes_total") == len(data)
        assert await one.ended() == EXIT_OK
        assert await copying == data
        assert one.events()[-1]["event"] == "stopped"

    async def test_reload(self, sidecar: Start, tmp_path: Path) -> None:
        """SIGHUP takes over a good configuration, and refuses a bad one as a whole, without losing a count."""
        for name in "abc":
            (tmp_path / f"{name}.log").write_bytes(log(start(), fatal(100), dead(100)))
        target = "- {{name: {0}, log: [{0}.log], vllm_url: 'http://127.0.0.1:9'}}\n"
        path = tmp_path / "config.yaml"
        path.write_text("state_dir: state\ntargets:\n" + target.format("a") + target.format("b"))
        one = await sidecar("--config", path)
        before = await one.reaches("vllm_oom_incidents_total", 2)
        path.write_text("state_dir: state\ntarget:\n" + target.format("c"))
        one.process.send_signal(signal.SIGHUP)
        refused = await one.event("configuration not reloaded")
        assert "target" in refused["problem"]
        metrics = await one.metrics()
        assert metrics["vllm_oom_config_last_reload_successful"] == 0
        assert {name: metrics[name] for name in before.counters} == before.counters
        path.write_text("state_dir: elsewhere\ntargets:\n" + target.format("a"))
        one.process.send_signal(signal.SIGHUP)
        refused = await one.event("configuration not reloaded", 2)
        assert refused["problem"] == "state_dir can't change while running; restart to change it"
        path.write_text(
            "state_dir: state\ntargets:\n" + target.format("a") + target.format("b") + target.format("c")
        )
        one.process.send_signal(signal.SIGHUP)
        assert (await one.event("configuration reloaded"))["targets"] == 3
        metrics = await one.reaches("vllm_oom_incidents_total", 3)
        assert metrics["vllm_oom_config_last_reload_successful"] == 1
        assert {name: metrics[name] for name in before.counters} == before.counters
        assert await one.stop() == EXIT_OK


async def _at_least(peer: Peer, name: str, value: float) -> bool:
    return (await peer.metrics()).sum(name) >= value


# --- in this process ----------------------------------------------------------------------


class Inside(Peer):
    """The application in this process, so that what can't be provoked from outside can be tested."""

    def __init__(self, session: aiohttp.ClientSession, app: App, task: asyncio.Task[int]) -> None:
        super().__init__(session)
        self.app = app
        self.task = task

    def target(self) -> Target:
        """The only one."""
        (target,) = self.app._targets.values()
        return target

    async def ended(self) -> int:
        """The exit code."""
        async with asyncio.timeout(DEADLINE):
            return await self.task


def config_of(folder: Path, **options: object) -> Config:
    """A configuration as if given by flags."""
    source = [str(folder / "vllm.log")]
    flags: dict[str, object] = {
        "log": source,
        "vllm_url": NOBODY,
        "listen": "127.0.0.1:0",
        "scrape_interval": "200ms",
    }
    return load(None, {}, {**flags, **options})


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What is logged, as events."""
    monkeypatch.setattr(logs, "_standing", {})
    stream = StringIO()
    logs.configure("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logs.configure("info", "json")


@asynccontextmanager
async def inside(
    session: aiohttp.ClientSession, config: Config, new: Callable[[], Config] | None = None
) -> AsyncIterator[Inside]:
    """Run the application; it is stopped at the end if it still runs."""
    app = App(config, builtin_classes(), new or (lambda: config))
    one = Inside(session, app, asyncio.create_task(app.run()))
    try:
        waiting: list[asyncio.Future[Any]] = [one.task, app.bound]
        await asyncio.wait(waiting, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        if app.bound.done():
            host, port = app.bound.result()
            one.base = f"http://{host}:{port}"
        yield one
    finally:
        app._stop.set()
        with suppress(StartError):
            await one.ended()


Events = Callable[[], list[dict[str, Any]]]


class TestSupervision:
    """A task that fails takes the process down, with everything saved."""

    @pytest.mark.parametrize("where", ["tick", "take", "scrape", "reload"])
    async def test_crash(
        self, where: str, session: aiohttp.ClientSession, tmp_path: Path, logged: Events,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """An exception in any task ends the run with exit code 1, names it, and saves what was counted."""

        def fail(*_: object) -> None:
            raise RuntimeError("of our own making")

        path = tmp_path / "vllm.log"
        path.write_bytes(log(start(), fatal(100), dead(100)))
        config = config_of(tmp_path, state_dir=str(tmp_path / "state"))
        async with inside(session, config, fail) as one:  # type: ignore[arg-type]
            await one.reaches("vllm_oom_incidents_total", 1)
            target = one.target()
            if where == "scrape":
                monkeypatch.setattr(target._scraper, "_tell", fail)
            elif where == "reload":
                os.kill(os.getpid(), signal.SIGHUP)
            else:
                monkeypatch.setattr(target.follower, where, fail)
            with path.open("ab") as out:
                out.write(log(later(200)))
            assert await one.ended() == EXIT_CRASHED
        assert [event["event"] for event in logged()][-2:] == ["a task crashed", "stopping after a crash"]
        assert logged()[-1]["error"] == "RuntimeError: of our own making"
        assert "RuntimeError" in logged()[-2]["exception"]
        store = Store(tmp_path / "state")
        store.open()
        assert store.incident("vllm", next(iter(target.follower.known))) is not None
        store.close()

    async def test_sigterm(self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events) -> None:
        """SIGTERM ends a run that is busy, with exit code 0, and closes the port."""
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with inside(session, config_of(tmp_path)) as one:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await one.ended() == EXIT_OK
            assert await one.get("/-/healthy") == ""
        assert logged()[-1]["event"] == "stopped"


class TestStored:
    """What is no longer in memory."""

    async def test_an_old_incident(self, session: aiohttp.ClientSession, tmp_path: Path) -> None:
        """An incident that newer ones pushed out of memory still has its address, with a state file."""
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with inside(session, config_of(tmp_path, state_dir=str(tmp_path / "state"))) as one:
            await one.reaches("vllm_oom_incidents_total", 1)
            (known,) = await one.incidents()
            assert not one.target().follower.dirty  # what was counted is saved
            one.target().status.incidents.clear()
            assert json.loads(await one.get(f"/api/v1/incidents/{known['id']}")) == known
            assert await one.get("/api/v1/incidents/nope") == ""


class TestStart:
    """What keeps it from starting."""

    async def test_port_taken(self, tmp_path: Path, logged: Events) -> None:
        """A taken port is an error that names it, and nothing was begun that stays."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            app = App(config_of(tmp_path, listen=address), builtin_classes(), lambda: config_of(tmp_path))
            with pytest.raises(StartError, match=re.escape(f"--listen {address}: Address already in use")):
                await app.run()
        assert {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} == set()
        assert [event["event"] for event in logged()][1:] == []

    async def test_web_configuration(self, tmp_path: Path, logged: Events) -> None:
        """A web configuration that is wrong is an error with its place, and nothing is said beside it."""
        path = tmp_path / "web.yaml"
        path.write_text("tls_server_config: {cert_file: none.pem}\n")
        config = config_of(tmp_path, web_config_file=str(path))
        with pytest.raises(StartError, match=r"web\.yaml"):
            await App(config, builtin_classes(), lambda: config).run()
        assert logged() == []

    def test_exit_code(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Such an error is printed and ends with exit code 2."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            config = config_of(
                tmp_path, listen=f"127.0.0.1:{other.getsockname()[1]}", state_dir=str(tmp_path / "state")
            )
            assert app_module.run(config, builtin_classes(), lambda: config) == EXIT_CONFIG
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert said.err.startswith("vllm-oom-exporter: --listen 127.0.0.1:")


class TestReload:
    """A configuration is taken over whole, or not at all."""

    @staticmethod
    def several(folder: Path, *names: str, **more: object) -> Config:
        """A configuration of several targets."""
        text = json.dumps(
            {"targets": [{"name": n, "log": [f"{folder}/{n}.log"], "vllm_url": NOBODY} for n in names]}
        )
        path = folder / "config.yaml"
        path.write_text(text)
        return load(path, {}, {"listen": "127.0.0.1:0", "state_dir": str(folder / "state"), **more})

    @staticmethod
    def written(folder: Path, *names: str) -> None:
        """One failure in the log of each."""
        for name in names:
            (folder / f"{name}.log").write_bytes(log(start(), fatal(100), dead(100)))

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("listen", "127.0.0.1:1"), ("state_dir", "/nowhere"), ("web_enable_lifecycle", True),
            ("web_hide_excerpts", True),
        ],
    )  # fmt: skip
    async def test_fixed(
        self, option: str, value: object, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:
        """What can't change while running is refused by its name."""
        before = config_of(tmp_path)
        async with inside(session, before, lambda: config_of(tmp_path, **{option: value})) as one:
            target = one.target()
            assert await one.app.reload() == f"{option} can't change while running; restart to change it"
            assert not one.app.status.config_reload_successful
            assert one.target() is target
        assert logged()[-2]["event"] == "configuration not reloaded"

    async def test_invalid(self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events) -> None:
        """Every problem of a bad configuration is told, and the old one stays."""

        def bad() -> Config:
            raise ConfigError(["one", "two"])

        async with inside(session, config_of(tmp_path), bad) as one:
            assert await one.app.reload() == "one\ntwo"
            assert one.target().config == config_of(tmp_path).targets[0]
        assert logged()

    async def test_changed_target(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:
        """A target whose address changes goes on with its counters; one that does not is left alone."""
        self.written(tmp_path, "a", "b")
        config = self.several(tmp_path, "a", "b")
        a, b = config.targets
        changed = TargetConfig(b.name, b.log, "http://127.0.0.1:10", b.labels)
        new = self.several(tmp_path, "a", "b")
        object.__setattr__(new, "targets", (a, changed))
        async with inside(session, config, lambda: new) as one:
            before = await one.reaches("vllm_oom_incidents_total", 2)
            kept = one.app._targets["a"]
            replaced = one.app._targets["b"]
            assert await one.app.reload() is None
            assert one.app._targets["a"] is kept
            assert one.app._targets["b"] is not replaced
            after = await one.metrics()
            assert {name: after[name] for name in before.counters} == before.counters
            await until(lambda: _opened(one, "b"))
            assert (await one.metrics()).sum("vllm_oom_incidents_total") == 2
        assert logged()

    async def test_removed_target(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:
        """A target that is no longer configured is no longer served."""
        self.written(tmp_path, "a", "b")
        config = self.several(tmp_path, "a", "b")
        new = self.several(tmp_path, "a")
        async with inside(session, config, lambda: new) as one:
            await one.reaches("vllm_oom_incidents_total", 2)
            assert await one.app.reload() is None
            assert list(one.app._targets) == ["a"]
            assert [target.name for target in one.app.status.targets] == ["a"]
            assert (await one.metrics()).sum("vllm_oom_incidents_total") == 1
        assert logged()

    async def test_standard_input(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:
        """Standard input can't be added while running."""
        new = config_of(tmp_path, log=["-"])
        async with inside(session, config_of(tmp_path), lambda: new) as one:
            assert await one.app.reload() == "standard input can't be added while running; restart to add it"
        assert logged()


async def _opened(one: Inside, name: str) -> bool:
    return one.app._targets[name].opened


class TestState:
    """A state that is not there, is broken, or can't be written."""

    async def test_none(self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events) -> None:
        """Without a folder for it, that nothing will outlive the process is said once."""
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with inside(session, config_of(tmp_path)) as one:
            metrics = await one.reaches("vllm_oom_incidents_total", 1)
            assert metrics["vllm_oom_state_write_failures_total"] == 0
            follower = one.target().follower
            assert (follower.dirty, follower.urgent) == ({}, False)
        said = [event["event"] for event in logged()]
        assert said.count("no --state-dir: counters and positions are lost with this process") == 1

    async def test_broken(self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events) -> None:
        """A broken state is moved aside, said and counted, and the log is read from its beginning."""
        (tmp_path / FILE).write_bytes(b"broken" * 1000)
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with inside(session, config_of(tmp_path, state_dir=str(tmp_path))) as one:
            metrics = await one.reaches("vllm_oom_incidents_total", 1)
            assert metrics["vllm_oom_state_write_failures_total"] == 1
        (moved,) = [
            event for event in logged() if event["event"].startswith("the state file was moved aside")
        ]
        assert Path(moved["moved_to"]).read_bytes() == b"broken" * 1000
        assert moved["why"] == "it is corrupt"

    async def test_rows_of_another_kind(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:
        """A sound file with rows that can't be used does not end the exporter, neither now nor later."""
        (tmp_path / "vllm.log").write_bytes(log(start(), fatal(100), dead(100)))
        config = config_of(tmp_path, state_dir=str(tmp_path))
        async with inside(session, config) as one:
            await one.reaches("vllm_oom_incidents_total", 1)
        with closing(sqlite3.connect(tmp_path / FILE)) as db:
            db.execute("UPDATE stream SET parser = '{}'")
            db.execute("UPDATE target SET counts = json_remove(counts, '$.lines')")
            db.commit()
        async with inside(session, config) as one:
            await one.reaches("vllm_oom_incidents_total", 1)
        assert [event["level"] for event in logged()].count("error") == 0

    async def test_recovers(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the disk is full everything goes on in memory; afterwards all of it is saved, and that is said."""
        monkeypatch.setattr(app_module, "_RETRY_SECONDS", 0.05)
        path = tmp_path / "vllm.log"
        path.write_bytes(log(start()))
        full = True
        save = Store.save

        def saves(store: Store, follower: Any) -> None:
            if full:
                raise StateError("database or disk is full")
            save(store, follower)

        monkeypatch.setattr(Store, "save", saves)
        async with inside(session, config_of(tmp_path, state_dir=str(tmp_path / "state"))) as one:
            await one.reaches("vllm_oom_engine_starts_total", 1)
            with path.open("ab") as out:
                out.write(log(fatal(100), dead(100)))
            await one.reaches("vllm_oom_incidents_total", 1)
            await until(lambda: _at_least(one, "vllm_oom_state_write_failures_total", 3))
            assert await one.get("/-/healthy")
            full = False

            async def saved() -> bool:
                return any(event["event"] == "the state is saved again" for event in logged())

            await until(saved)
            (identity,) = one.target().follower.known
            assert one.app._store is not None
            assert one.app._store.incident("vllm", identity) is not None
        said = [event["event"] for event in logged()]
        assert said.count("the state can't be read or saved: going on in memory") == 1
        assert said.count("the state is saved again") == 1


# --- one target -----------------------------------------------------------------------------


class Silent:
    """A source that says nothing; tests hand chunks to the follower."""

    def __init__(self) -> None:
        self.stats = SourceStats("x", opened=True)

    async def chunks(self, resume: Mapping[str, str]) -> AsyncIterator[Chunk]:  # noqa: ARG002
        """Nothing."""
        await asyncio.Event().wait()
        yield Chunk("s", b"", "")


class Watched:
    """A target with a clock and a scraper in the hands of the test."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.now = 1_000_000.0
        config = TargetConfig("vllm", ("x",), NOBODY, {})
        clocks = Clocks(lambda: self.now, lambda: datetime(2026, 11, 30))
        self.target = Target(
            config, TargetStatus("vllm"), [Silent()], builtin_classes(), session, 2.0, clocks
        )
        self.scraper = self.target._scraper
        self.position = 0

    def give(self, *parts: list[str]) -> None:
        """Lines of the log, and a moment."""
        self.position += 1
        self.target.follower.take("x", Chunk("s", log(*parts), str(self.position)), self.now)
        self.wait(2.0)

    def answer(self, *, progress: bool = False) -> None:
        """The server answers."""
        self.scraper.up, self.scraper.health, self.scraper.problem = True, 200, None
        if progress:
            self.scraper.last_progress = self.now

    def refuse(self, problem: str = "cannot connect: Connection refused") -> None:
        """The server does not answer."""
        self.scraper.up, self.scraper.health, self.scraper.problem = False, None, problem

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.target.tick()

    @property
    def state(self) -> str:
        """Of the engine."""
        return self.target.status.engine_state


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """A target that is not running."""
    session = open_session()
    yield Watched(session)
    await session.close()


class TestEngineState:
    """The state of the engine over time, from log, ``/metrics`` and silence."""

    def test_a_life(self, watched: Watched) -> None:
        """Unknown, starting, serving, dead."""
        watched.wait(0.1)
        seen = [watched.state]
        watched.refuse()
        watched.give(start()[:3])
        seen.append(watched.state)
        watched.answer(progress=True)
        watched.give(start()[3:])
        seen.append(watched.state)
        watched.give(fatal(100), dead(100))
        watched.refuse()
        watched.wait(60)
        assert [*seen, watched.state] == ["unknown", "starting", "serving", "dead"]

    def test_killed(self, watched: Watched) -> None:
        """A server that refuses connections is dead after ten seconds, and lives again when it answers."""
        watched.answer(progress=True)
        watched.give(start())
        watched.refuse()
        watched.wait(9.5)
        assert watched.state == "serving"
        watched.wait(1)
        assert watched.state == "dead"
        watched.answer()
        watched.wait(0.1)
        assert watched.state == "serving"

    def test_slow_is_not_gone(self, watched: Watched) -> None:
        """A server that takes too long to answer is not dead."""
        watched.answer(progress=True)
        watched.give(start())
        watched.refuse("no complete answer within 2 s")
        watched.wait(60)
        assert watched.state == "serving"

    def test_not_yet_there(self, watched: Watched) -> None:
        """A server that starts refuses connections for as long as it needs."""
        watched.refuse()
        watched.give(start()[:3])
        watched.wait(600)
        assert watched.state == "starting"

    def test_hung(self, watched: Watched) -> None:
        """One rank of several fails and the process lives on: hung after thirty seconds, until it dies."""
        watched.answer(progress=True)
        watched.give(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()))
        watched.wait(27)
        assert watched.state == "serving"
        watched.wait(2)
        assert watched.state == "hung"
        watched.give(dead(400))
        assert watched.state == "dead"

    def test_hung_and_left(self, watched: Watched) -> None:
        """It is left when tokens flow again."""
        watched.answer(progress=True)
        watched.give(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()))
        watched.wait(40)
        assert watched.state == "hung"
        watched.answer(progress=True)
        watched.wait(1)
        assert watched.state == "serving"

    def test_idle_afterwards(self, watched: Watched) -> None:
        """A server that went on after the failure and has nothing to do is idle, not hung."""
        watched.answer(progress=True)
        watched.give(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()))
        for _ in range(10):
            watched.answer(progress=True)
            watched.wait(2)
        watched.wait(60)
        assert watched.state == "serving"
