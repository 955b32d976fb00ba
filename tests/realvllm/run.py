"""The probe against a real vLLM, on CPU, that runs out of memory on request: ``make realvllm``.

Prints what was checked and measured as a table, and ends with 1 if anything is not as it should be.
The sizes in vLLM's message are made up and the failure comes at a number of tokens; the scheduler, the
log, ``/metrics`` and how it dies are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from install import VERSION, home, install, model

HERE = Path(__file__).parent
EXPORTER = Path(sys.executable).with_name("vllm-oom-exporter")
ABOVE = 12_000  # tokens of a step that does not fit
START_SECONDS = 300.0
NAME = "tiny"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Table:
    """What was checked."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, bool]] = []

    def check(self, what: str, measured: object, good: object) -> None:
        """One row, shown at once."""
        self.rows.append((what, str(measured), bool(good)))
        print(f"{'ok  ' if good else 'FAIL'} {what}: {measured}", flush=True)

    @property
    def good(self) -> bool:
        """Whether every row is."""
        return all(row[2] for row in self.rows)

    def markdown(self) -> str:
        """For RESULTS.md."""
        rows = [
            f"| {what} | {measured} | {'yes' if good else '**no**'} |" for what, measured, good in self.rows
        ]
        return "\n".join(["| What | Measured | As it should be |", "| --- | --- | --- |", *rows]) + "\n"


class Bench:
    """The parts: a port for vLLM, its log, a session, a table."""

    def __init__(self, folder: Path, python: Path, tiny: Path, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.python = python
        self.tiny = tiny
        self.session = session
        self.table = Table()
        self.url = f"http://127.0.0.1:{free_port()}"
        self.sidecar = f"http://127.0.0.1:{free_port()}"
        self.pushed: list[dict[str, Any]] = []

    async def get(self, url: str) -> tuple[int | None, str]:
        """Status and body; None without an answer."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(5)) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError):
            return None, ""

    async def until(
        self, url: str, status: int | None, seconds: float, alive: asyncio.subprocess.Process
    ) -> float:
        """Seconds until ``url`` answers with ``status``. Raises TimeoutError, or where ``alive`` ended before."""
        began = time.monotonic()
        async with asyncio.timeout(seconds):
            while (await self.get(url))[0] != status:
                if alive.returncode is not None:
                    raise TimeoutError("the process ended")
                await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def metric(self, name: str) -> float | None:
        """One series of the sidecar."""
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", (await self.get(f"{self.sidecar}/metrics"))[1], re.MULTILINE
        )
        return None if found is None else float(found[1])

    async def target(self) -> dict[str, Any]:
        """What the sidecar knows."""
        found: dict[str, Any] = json.loads((await self.get(f"{self.sidecar}/api/v1/targets"))[1])["targets"][
            0
        ]
        return found

    async def probe(self, *arguments: str) -> tuple[int, dict[str, Any], float]:
        """The command: its exit code, its document, and the seconds it took."""
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            EXPORTER, "probe", "--vllm-url", self.url, "--format", "json", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        took = time.monotonic() - began
        assert process.returncode is not None
        if not out:
            print(err.decode(), flush=True)
        return process.returncode, json.loads(out or b"{}"), took

    @asynccontextmanager
    async def vllm(
        self, log: Path, budget: int, *more: str, phase: str = "", steps: bool = True
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A server that writes to the end of ``log``; whatever is left of it is ended."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OOM_", "VLLM_"))},
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if phase:
            environment |= {
                "OOM_PHASE": phase,
                "OOM_ABOVE_TOKENS": str(ABOVE),
                "PYTHONPATH": str(HERE / "inject"),
            }
        arguments = [
            "serve", str(self.tiny), "--served-model-name", NAME, "--host", "127.0.0.1", "--port",
            self.url.rpartition(":")[2], "--max-model-len", "32768", "--max-num-batched-tokens", str(budget),
            "--max-num-seqs", "64", "--enforce-eager", "--enable-chunked-prefill",
            "--disable-access-log-for-endpoints", "/health,/metrics",
            *(["--enable-logging-iteration-details"] if steps else []),
            *(more or ["--no-enable-prefix-caching"]),
        ]  # fmt: skip
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                self.python.with_name("vllm"), *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(60):
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # our own session
            await process.wait()

    @asynccontextmanager
    async def following(self, log: Path, state: str, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """A sidecar that probes every start, and a receiver that takes what it pushes."""
        self.pushed.clear()

        async def take(request: web.Request) -> web.Response:
            self.pushed += await request.json()
            return web.Response()

        app = web.Application()
        app.router.add_post("/api/v2/alerts", take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        process = await asyncio.create_subprocess_exec(
            EXPORTER, "run", "--log", log, "--vllm-url", self.url, "--listen", self.sidecar.removeprefix("http://"),
            "--state-dir", self.folder / state, "--probe.on-start", "--scrape-interval", "1s",
            "--alertmanager-url", f"http://127.0.0.1:{runner.addresses[0][1]}", "--log-format", "json", *more,
            stderr=(self.folder / "sidecar.log").open("ab"),
        )  # fmt: skip
        try:
            await self.until(f"{self.sidecar}/-/healthy", 200, 30, process)
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await runner.cleanup()


async def gate(bench: Bench) -> dict[str, Any]:
    """The sidecar's probe before readiness: passes at 2048, kills at 16384. The incident it made of it."""
    table, log = bench.table, bench.folder / "followed.log"
    log.touch()
    ready = f"{bench.sidecar}/-/budget-ready"
    async with bench.following(log, "gate") as sidecar:
        async with bench.vllm(log, 2048, phase="mlp") as server:
            await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
            before = (await bench.get(ready))[0]
            took = await bench.until(ready, 200, 150, sidecar)
            probe = (await bench.target())["probe"]
            table.check("2048: /-/budget-ready when vLLM became healthy", before, before == 503)
            table.check("2048: healthy to /-/budget-ready 200", f"{took:.0f} s", took < 150)
            table.check("2048: the probe of the start", probe["state"], probe["state"] == "survived")
            table.check("2048: its largest step", probe["steps"], probe["steps"]["largest_tokens"] == 2048)
            risk = (await bench.target())["risk"]
            table.check("2048: risk", risk["state"], risk["state"] == "comfortable")
        async with bench.vllm(log, 16384, phase="mlp") as server:
            await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
            answers: set[int | None] = set()
            async with asyncio.timeout(150):
                while server.returncode is None:
                    answers.add((await bench.get(ready))[0])
                    await asyncio.sleep(0.2)
            await asyncio.sleep(8)
            answers.add((await bench.get(ready))[0])
            found = await bench.target()
            incidents = json.loads((await bench.get(f"{bench.sidecar}/api/v1/incidents"))[1])["incidents"]
            incident: dict[str, Any] = incidents[0]
            facts = incident["facts"]
            page = (await bench.get(f"{bench.sidecar}/incidents/{incident['id']}"))[1]
            class_id, steps = incident["class"], (facts.get("step_tokens"), facts.get("step_limit_tokens"))
            table.check("16384: /-/budget-ready until and after the end", answers, answers == {503})
            table.check("16384: state of the engine", found["engine_state"], found["engine_state"] == "dead")
            table.check(
                "16384: the probe of the start", found["probe"]["state"], found["probe"]["state"] == "failed"
            )
            table.check("16384: incidents", len(incidents), len(incidents) == 1)
            table.check("16384: class", class_id, class_id == "prefill_budget")
            table.check("16384: fatal, phase", (incident["fatal"], incident["phase"]), incident["fatal"])
            table.check("16384: failing step, limit", steps, steps == (16384, 16384))
            series = 'vllm_oom_incidents_total{class="prefill_budget",phase="serving"}'
            table.check(f"16384: {series}", counted := await bench.metric(series), counted == 1)
            series = 'vllm_oom_probe_state{state="failed"}'
            table.check(f"16384: {series}", state := await bench.metric(series), state == 1)
            table.check(
                "16384: the page names class and step",
                len(page),
                class_id in page and "16384" in page.replace(",", ""),
            )
            names = sorted({one["labels"]["alertname"] for one in bench.pushed})
            table.check("16384: alerts pushed", ", ".join(names), names)
    return incident


async def replays(bench: Bench, incident: dict[str, Any]) -> None:
    """The lengths of the incident kill again at the old budget, and not at the lower one."""
    table, path = bench.table, bench.folder / "incident.json"
    path.write_text(json.dumps(incident))
    log = bench.folder / "replay-16384.log"
    async with bench.vllm(log, 16384, phase="mlp") as server:
        await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
        code, found, _ = await bench.probe("--replay", str(path), "--repeat", "1", "--log", str(log))
        table.check(
            "replay at 16384",
            found.get("replay", {}).get("state"),
            (code, found["replay"]["state"]) == (1, "reproduced"),
        )
        table.check(
            "replay at 16384: cause",
            found.get("incident", {}).get("class"),
            found["incident"]["class"] == "prefill_budget",
        )
    log = bench.folder / "replay-2048.log"
    async with bench.vllm(log, 2048, phase="mlp", steps=False) as server:
        await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
        code, found, took = await bench.probe(
            "--replay",
            str(path),
            "--repeat",
            "5",
            "--failed-before",
            "2",
            "--log",
            str(log),
            "--timeout",
            "10m",
        )
        says = found["replay"]
        table.check(
            "5 replays at 2048",
            f"{says['state']}, p = {says.get('pvalue')}, {took:.0f} s",
            (code, says["state"]) == (0, "confirmed"),
        )
        source = found["steps"]["source"]
        table.check(
            "5 replays at 2048, without per-step lines", f"{source}: {found['steps']}", source == "scheduled"
        )


async def healthy(bench: Bench) -> None:
    """A server that bears its budget: how long a probe takes, and what its steps were."""
    table = bench.table
    for title, more in (("16384", ()), ("16384 with prefix caching", ("--enable-prefix-caching",))):
        log = bench.folder / f"healthy{len(more)}.log"
        async with bench.vllm(log, 16384, *more) as server:
            started = await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
            table.check(f"{title}: start to healthy", f"{started:.0f} s", True)
            for turn in ("first", "second")[: 1 + len(more)]:
                code, found, took = await bench.probe("--log", str(log))
                steps = found["steps"]
                table.check(
                    f"{title}: {turn} probe",
                    f"{found['state']} in {took:.1f} s, load average {os.getloadavg()[0]:.1f}",
                    code == 0 and took < 30,
                )
                true = (
                    steps["source"] == "iteration" and steps["largest_tokens"] == 16384 and steps["full"] >= 1
                )
                table.check(
                    f"{title}: {turn} probe, true steps",
                    f"largest {steps['largest_tokens']}, full {steps['full']}",
                    true,
                )
                table.check(
                    f"{title}: {turn} probe, cached tokens",
                    found.get("cached_tokens"),
                    not found.get("cached_tokens"),
                )
                shapes = ", ".join(f"{one['shape']} {one['seconds']} s" for one in found["shapes"])
                table.check(f"{title}: {turn} probe, shapes", shapes, shapes)
            if not more:
                busy = asyncio.create_task(bench.probe("--log", str(log), "--shape", "long"))
                await asyncio.sleep(4)
                code, _, _ = await bench.probe("--log", str(log))
                table.check("16384: a second probe meanwhile is refused", code, code == 2)
                await busy
            left = await bench.get(f"{bench.url}/metrics")
            running = re.search(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", left[1], re.MULTILINE)
            table.check(
                f"{title}: requests left running", running and running[1], running and float(running[1]) == 0
            )


async def risk(bench: Bench) -> None:
    """A raised budget that was never filled, and what fifty full steps make of it."""
    table, log = bench.table, bench.folder / "raised.log"
    log.touch()
    async with bench.following(log, "risk", "--probe.spend", "5m", "--probe.timeout", "10m") as sidecar:
        for budget in (2048, 4096):
            async with bench.vllm(log, budget) as server:
                await bench.until(f"{bench.url}/health", 200, START_SECONDS, server)
                before = (await bench.target())["risk"]["state"]
                await bench.until(f"{bench.sidecar}/-/budget-ready", 200, 600, sidecar)
                await asyncio.sleep(3)
                found = await bench.target()
        steps, after = found["probe"]["steps"], found["risk"]
        table.check("2048, then 4096: risk before the probe", before, before == "unexercised")
        table.check(
            "2048, then 4096: full steps, largest",
            (steps["full"], steps["largest_tokens"]),
            steps["full"] >= 50,
        )
        table.check(
            "2048, then 4096: risk after the probe",
            f"{after['state']}: {after['reasons'][0]}",
            after["state"] == "comfortable",
        )


async def starts(bench: Bench) -> None:
    """A start that fails never gets to a probe, and is told apart."""
    for phase, expected in (("load", "weights_load"), ("kvcache", "kv_cache_no_room")):
        log = bench.folder / f"{phase}.log"
        log.touch()
        async with bench.following(log, phase), bench.vllm(log, 16384, phase=phase) as server:
            async with asyncio.timeout(START_SECONDS):
                await server.wait()
            await asyncio.sleep(5)
            incidents = json.loads((await bench.get(f"{bench.sidecar}/api/v1/incidents"))[1])["incidents"]
            classes = [one["class"] for one in incidents]
            bench.table.check(f"start fails at {phase}: incidents", classes, classes == [expected])
            series = f'vllm_oom_incidents_total{{class="{expected}",phase="startup"}}'
            counted = await bench.metric(series)
            status = (await bench.get(f"{bench.sidecar}/-/budget-ready"))[0]
            bench.table.check(
                f"start fails at {phase}: counted, /-/budget-ready",
                (counted, status),
                (counted, status) == (1, 503),
            )
            names = sorted({one["labels"]["alertname"] for one in bench.pushed})
            bench.table.check(f"start fails at {phase}: alerts pushed", ", ".join(names), names)


async def check(parts: Sequence[str]) -> Table:
    """All of it, or the parts that were asked for."""
    into = home()
    python = install(into)
    tiny = model(into, python)
    with tempfile.TemporaryDirectory(prefix="realvllm-") as folder:
        async with aiohttp.ClientSession() as session:
            bench = Bench(Path(folder), python, tiny, session)
            if {"gate", "replays"} & {*parts}:
                incident = await gate(bench)
                if "replays" in parts:
                    await replays(bench, incident)
            if "healthy" in parts:
                await healthy(bench)
            if "risk" in parts:
                await risk(bench)
            if "starts" in parts:
                await starts(bench)
    return bench.table


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["gate", "replays", "healthy", "risk", "starts"])
    began = time.monotonic()
    table = asyncio.run(check(parser.parse_args().parts))
    print(
        f"\nvLLM {VERSION} on {os.cpu_count()} cores, {time.monotonic() - began:.0f} s\n\n{table.markdown()}"
    )
    return 0 if table.good else 1


if __name__ == "__main__":
    sys.exit(main())
