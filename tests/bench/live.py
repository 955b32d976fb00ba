"""Measures the running sidecar as users meet it: how soon it tells, what it costs, what it survives.

The real command runs as a process of its own on a temporary file; figures come from its
``/metrics`` and from ``/proc``. Four parts, the last only where it is asked for:

``latency``    captures are played again with the pace they arrived in around their failure; the
               time counts from the moment a line was written to the first answer that shows it
``footprint``  start, idle cost beside a served ``/metrics``, memory and speed over long logs and
               many incidents
``hostile``    logs and a ``/metrics`` made to exhaust the reader; ``/metrics`` of the sidecar has
               to answer all the time
``long``       memory over 10 GB and over 100,000 deaths, in a log that is rotated as it is written

Nothing is asserted: figures depend on the machine, which is printed with them. Where there is a
target, the row says whether it was met.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import aiohttp
from aiohttp import web

sys.path.append(str(Path(__file__).parents[1]))

from fault import Sidecar, metrics, pieces
from generate import chunks, write
from replay import Replay

NAMES = (
    "mlp_eager_16384", "mlp_uni_16384", "sampler_uni", "load_uni",
    "profile_uni", "lora_survive", "preproc_survive", "v0271_mlp_mp",
)  # fmt: skip
PARTS = ("latency", "footprint", "hostile")
LONG = "long"
_MB = 1e6
_TICKS = os.sysconf("SC_CLK_TCK")
_LAST_WORDS = re.compile(rb"Failed core proc|EngineDeadError|died unexpectedly|Worker failed with error")
_OOM = re.compile(rb"OutOfMemoryError|out of memory")


@dataclass(slots=True)
class Row:
    """One figure. ``met`` is None where there is no target."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Report:
    """Rows as they come."""

    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, value: str, target: str = "", met: bool | None = None) -> None:
        """Keep a row, and show it at once: a run takes minutes."""
        self.rows.append(Row(what, value, target, met))
        print(f"{what}: {value}" + (f" (target {target}: {_met(met)})" if target else ""), file=sys.stderr)

    def table(self) -> str:
        """The rows as Markdown."""
        lines = ["| what | measured | target | met |", "|---|---:|---:|---|"]
        lines += [
            f"| {one.what} | {one.value} | {one.target or '–'} | {_met(one.met)} |" for one in self.rows
        ]
        return "\n".join(lines)


def _met(met: bool | None) -> str:
    return "–" if met is None else "yes" if met else "NO"


# --- a process under measurement ------------------------------------------------------------


def rss(pid: int, which: str = "VmRSS") -> float:
    """Resident memory in MB (10^6 bytes), now or (``VmHWM``) at its peak."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(rf"^{which}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / _MB


def cpu(pid: int) -> float:
    """CPU seconds so far, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass(slots=True)
class Running:
    """A sidecar that is ready, on ``log``; ``took`` seconds from its start to ``/-/ready``."""

    sidecar: Sidecar
    base: str
    log: Path
    took: float
    session: aiohttp.ClientSession

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.sidecar.process.pid

    async def metrics(self) -> dict[str, float]:
        """The samples of its ``/metrics``."""
        return await metrics(self.session, self.base)

    async def read_all(self, size: int, limit: float, each: Callable[[], None] = lambda: None) -> float:
        """Seconds until ``size`` bytes were read. Raises ``TimeoutError`` after ``limit`` seconds."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit:
            samples = await self.metrics()
            done = sum(n for name, n in samples.items() if name.startswith("vllm_oom_log_read_bytes_total"))
            each()
            if done >= size:
                return time.monotonic() - begin
            await asyncio.sleep(0.2)
        raise TimeoutError(f"{done:.0f} of {size} bytes read in {limit:.0f} s")


@asynccontextmanager
async def running(
    *arguments: str | Path, url: str = "http://127.0.0.1:9", state: bool = True
) -> AsyncIterator[Running]:
    """Start a sidecar on a new empty log and stop it afterwards."""
    with tempfile.TemporaryDirectory(prefix="live-") as name:
        folder = Path(name)
        log = folder / "vllm.log"
        log.touch()
        saved = ("--state-dir", folder / "state") if state else ()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            begin = time.monotonic()
            sidecar = await Sidecar.start("--log", log, "--vllm-url", url, *saved, *arguments)
            try:
                base = await sidecar.ready(session)
                yield Running(sidecar, base, log, time.monotonic() - begin, session)
            finally:
                await sidecar.kill(signal.SIGTERM)


# --- latency --------------------------------------------------------------------------------


class Paced(Replay):
    """A replay whose quiet start-up is quick: only from 2 s before the failure time is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.first = next(i for i, line in enumerate(self.lines) if _OOM.search(line))
        self.last = max(
            i for i, line in enumerate(self.lines) if _OOM.search(line) or _LAST_WORDS.search(line)
        )
        start = self.arrivals[self.first] - 2.0
        self.arrivals = [min(at, start) / 20 if at < start else at - start * 0.95 for at in self.arrivals]


@dataclass(slots=True)
class Latency:
    """Seconds from a line to the first answer that shows it."""

    to_line: list[float] = field(default_factory=list)
    to_incident: list[float] = field(default_factory=list)
    after_last: list[float] = field(default_factory=list)


async def replay_once(name: str, found: Latency) -> None:
    """Play one capture beside a new sidecar and poll its ``/metrics`` every 4 ms from 0.5 s before."""
    replay = Paced(name)
    fast = replay.arrivals[replay.first] - replay.arrivals[0] - 0.5
    async with replay.server() as url, running(url=url) as one:
        writing = asyncio.create_task(replay.write(one.log))
        line_at = incident_at = None
        begin = time.monotonic()
        deadline = begin + 60
        while incident_at is None and time.monotonic() < deadline:
            samples = await one.metrics()
            now = time.monotonic()
            if line_at is None and samples["vllm_oom_error_lines_total"] > 0:
                line_at = now
            if any(n for key, n in samples.items() if key.startswith("vllm_oom_incidents_total")):
                incident_at = now
            # by the clock: the lines of a failure come at once, so those before it say too late that it comes
            await asyncio.sleep(0.004 if now - begin >= fast else 0.05)
        assert line_at is not None, f"{name}: no error line within 60 s"
        assert incident_at is not None, f"{name}: no incident within 60 s"
        await writing
    first, last = replay.written[replay.first], replay.written[replay.last]
    found.to_line.append(line_at - first)
    found.to_incident.append(incident_at - first)
    found.after_last.append(incident_at - last)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


async def latency(report: Report, args: argparse.Namespace) -> None:
    """Part a."""
    found = Latency()
    by_name: dict[str, float] = {}
    for number in range(args.replays):
        name = NAMES[number % len(NAMES)]
        await replay_once(name, found)
        by_name[name] = max(by_name.get(name, 0.0), found.after_last[-1])
    middle, tail = statistics.median(found.to_line), quantile(found.to_line, 0.99)
    report.add(
        f"first OOM line to counter, median of {args.replays} replays", _ms(middle), "20 ms", middle <= 0.02
    )
    report.add("first OOM line to counter, 99th percentile", _ms(tail), "150 ms", tail <= 0.15)
    middle = statistics.median(found.to_incident)
    report.add("first OOM line to incident with class, median", f"{middle:.2f} s", "0.7 s", middle <= 0.7)
    report.add("first OOM line to incident with class, longest", f"{max(found.to_incident):.2f} s")
    worst = max(by_name, key=lambda name: by_name[name])
    longest = max(found.after_last)
    report.add(
        f"last line of the failure to incident, longest ({worst})",
        f"{longest:.2f} s",
        "1.5 s",
        longest <= 1.5,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


# --- footprint ------------------------------------------------------------------------------


async def footprint(report: Report, args: argparse.Namespace) -> None:
    """Part b."""
    starts = []
    for _ in range(5):
        async with running() as one:
            starts.append(one.took)
    middle = statistics.median(starts)
    report.add("start to /-/ready, median of 5", f"{middle:.2f} s", "1 s", middle <= 1)
    await _idle(report, args.idle)
    for kind in ("mixed", "crashloop"):
        await _long_log(report, kind, args.gigabytes)
    await _incidents(report, args.incidents)


async def _idle(report: Report, seconds: float) -> None:
    replay = Replay("mlp_eager_16384")
    replay._meet(b"Application startup complete")
    async with replay.server() as url, running(url=url) as one:
        with one.log.open("ab") as out:
            out.writelines(line for line in replay.lines[:110])
        await asyncio.sleep(5)
        used, begin = cpu(one.pid), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu(one.pid) - used) / (time.monotonic() - begin)
        report.add("RSS after start, scraping", f"{rss(one.pid):.0f} MB", "64 MB", rss(one.pid) <= 64)
        report.add(
            f"idle CPU over {seconds:.0f} s, scraping every 2 s", f"{share:.2%}", "0.50%", share <= 0.005
        )
    async with running() as one:
        with one.log.open("ab") as out:
            out.writelines(line for line in replay.lines[:110])
        await asyncio.sleep(15)
        used, begin = cpu(one.pid), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu(one.pid) - used) / (time.monotonic() - begin)
        report.add(f"idle CPU over {seconds:.0f} s, vLLM down", f"{share:.2%}")


async def _long_log(report: Report, kind: str, gigabytes: float) -> None:
    async with running() as one:
        with one.log.open("wb") as out:
            write(kind, int(gigabytes * 1e9), out)
        # what was read while it was written is nothing to measure by: begin anew, in a new process
        size = one.log.stat().st_size
        async with aiohttp.ClientSession() as session:
            sidecar = await Sidecar.start("--log", one.log, "--vllm-url", "http://127.0.0.1:9")
            try:
                other = Running(sidecar, await sidecar.ready(session), one.log, 0.0, session)
                begin, used = time.monotonic(), cpu(other.pid)
                early: list[float] = []

                def sample() -> None:
                    early.append(rss(other.pid))

                slow = await _slowest(other, other.read_all(size, 3600, sample))
                seconds, spent = time.monotonic() - begin, cpu(other.pid) - used
                first = early[min(len(early) // 10, len(early) - 1)]
                name = f"{kind}, {size / 1e9:.1f} GB at once"
                report.add(
                    f"{name}: speed",
                    f"{size / _MB / seconds:.0f} MB/s ({size / _MB / spent:.0f} a CPU-second)",
                )
                report.add(
                    f"{name}: RSS at a tenth, end, peak",
                    f"{first:.0f}, {early[-1]:.0f}, {rss(other.pid, 'VmHWM'):.0f} MB",
                    "flat",
                    early[-1] <= first * 1.1,
                )
                report.add(f"{name}: slowest answer of /metrics", f"{slow:.2f} s", "1 s", slow <= 1)
            finally:
                await sidecar.kill(signal.SIGTERM)


async def _incidents(report: Report, count: int) -> None:
    """Many deaths with little between them."""
    async with running() as one:
        made = written = 0
        memory: list[tuple[int, float]] = []
        begin = time.monotonic()
        with one.log.open("ab") as out:
            for piece in pieces(1, ("mlp_uni_16384", "sampler_uni", "load_uni"), traffic=False):
                out.write(piece.data)
                made, written = made + 1, written + len(piece.data)
                if made % 500 == 0 or made == count:
                    out.flush()
                    await one.read_all(written, 600)
                    memory.append((made, rss(one.pid)))
                if made == count:
                    break
        await asyncio.sleep(2)
        samples = await one.metrics()
        seen = sum(n for name, n in samples.items() if name.startswith("vllm_oom_incidents_total"))
        seconds = time.monotonic() - begin
        half = memory[len(memory) // 2 - 1][1] if len(memory) > 1 else memory[0][1]
        report.add(
            f"{count} incidents ({written / _MB:.0f} MB): counted", f"{seen:.0f}", str(count), seen == count
        )
        report.add(f"{count} incidents: time", f"{seconds:.0f} s ({count / seconds:.0f} a second)")
        report.add(
            f"{count} incidents: RSS after the first 500, half, all",
            f"{memory[0][1]:.0f}, {half:.0f}, {rss(one.pid):.0f} MB",
            "flat",
            rss(one.pid) <= half * 1.1,
        )
        size = sum(path.stat().st_size for path in (one.log.parent / "state").iterdir())
        report.add(f"{count} incidents: state on disk", f"{size / _MB:.1f} MB")


# --- long -----------------------------------------------------------------------------------


class Rotating:
    """A log that is renamed and begun anew every 200 MB, so that any amount of it fits on the disk."""

    LIMIT = 200_000_000

    def __init__(self, one: Running) -> None:
        self.one = one
        self.written = 0
        self._size = 0
        self._out = one.log.open("ab")

    async def write(self, data: bytes) -> None:
        """Append, and rotate where it is time; never ahead of the reader by more than a file."""
        self._out.write(data)
        self.written += len(data)
        self._size += len(data)
        if self._size >= self.LIMIT:
            await self.read()
            self._out.close()
            self.one.log.replace(self.one.log.with_suffix(".log.1"))
            self._out = self.one.log.open("ab")
            self._size = 0

    async def read(self) -> None:
        """Wait until all of it was read. Raises ``TimeoutError`` after 20 minutes."""
        self._out.flush()
        await self.one.read_all(self.written, 1200)


async def long(report: Report, args: argparse.Namespace) -> None:
    """Part d."""
    await _long_traffic(report, args.long_gigabytes)
    await _long_deaths(report, args.long_incidents)


async def _long_traffic(report: Report, gigabytes: float) -> None:
    block = b"".join(chunks("mixed", 64 << 20))
    async with running() as one:
        log, memory, used = Rotating(one), [], cpu(one.pid)
        for tenth in range(1, 11):
            while log.written < gigabytes * 1e9 * tenth / 10:
                await log.write(block)
            await log.read()
            memory.append(rss(one.pid))
            report.add(f"{log.written / 1e9:.1f} GB, rotated every 0.2 GB: RSS", f"{memory[-1]:.1f} MB")
        spent = cpu(one.pid) - used
        report.add(f"{gigabytes:g} GB: a CPU-second", f"{log.written / _MB / spent:.0f} MB")
        _say_flat(report, f"{gigabytes:g} GB", memory)


async def _long_deaths(report: Report, count: int) -> None:
    async with running() as one:
        log, memory, begin, used = Rotating(one), [], time.monotonic(), cpu(one.pid)
        names = ("mlp_uni_16384", "sampler_uni", "load_uni")
        # all of them in the past: a time without a year that is days ahead is taken for last year's
        first = datetime.now().replace(microsecond=0) - timedelta(days=330)
        for number, piece in enumerate(islice(pieces(1, names, traffic=False, begin=first), count), 1):
            await log.write(piece.data)
            if number % max(count // 10, 1) == 0:
                await log.read()
                memory.append(rss(one.pid))
                report.add(f"{number} deaths, {log.written / 1e9:.1f} GB: RSS", f"{memory[-1]:.1f} MB")
        await asyncio.sleep(3)
        samples = await one.metrics()
        seen = sum(n for name, n in samples.items() if name.startswith("vllm_oom_incidents_total"))
        spent, seconds = cpu(one.pid) - used, time.monotonic() - begin
        report.add(f"{count} deaths: counted", f"{seen:.0f}", str(count), seen == count)
        report.add(
            f"{count} deaths: speed", f"{count / seconds:.0f} a second ({count / spent:.0f} a CPU-second)"
        )
        _say_flat(report, f"{count} deaths", memory)
        size = sum(path.stat().st_size for path in (one.log.parent / "state").iterdir())
        report.add(f"{count} deaths: state on disk", f"{size / _MB:.1f} MB")


def _say_flat(report: Report, name: str, memory: list[float]) -> None:
    """The first tenth is warming up: what it ends with is the measure."""
    growth = max(memory) / memory[0] - 1
    report.add(f"{name}: RSS above that of the first tenth, at most", f"{growth:.1%}", "5%", growth <= 0.05)


# --- hostile --------------------------------------------------------------------------------


async def _slowest(one: Running, job: Awaitable[object], every: float = 0.1) -> float:
    """Seconds of the slowest answer of ``/metrics`` while ``job`` runs."""
    slowest = 0.0

    async def poll() -> None:
        nonlocal slowest
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while True:
                begin = time.monotonic()
                await metrics(session, one.base)
                slowest = max(slowest, time.monotonic() - begin)
                await asyncio.sleep(every)

    polling = asyncio.create_task(poll())
    try:
        await job
    finally:
        if polling.done():
            polling.result()
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling
    return slowest


async def _feed(one: Running, data: bytes, times: int) -> None:
    size = 0
    loop = asyncio.get_running_loop()
    with one.log.open("ab", buffering=0) as out:
        for _ in range(times):
            await loop.run_in_executor(None, out.write, data)
            size += len(data)
    with suppress(TimeoutError):
        await one.read_all(size, 120)
    await asyncio.sleep(2)


async def hostile(report: Report, args: argparse.Namespace) -> None:
    """Part c: every case with a fresh sidecar, which afterwards has to count one real death."""
    million = 1 << 20
    oom = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.83 GiB. "
    head = b"2026-11-30T16:26:46.000000000Z stderr P "
    line = b"(EngineCore pid=%d) ERROR 11-29 16:26:46 [core.py:1] " + oom + b"\n"
    times = max(int(args.gigabytes * 1000), 1)
    cases: dict[str, tuple[bytes, int]] = {
        "30 lines of 10 MB": (b"x" * (10 * million) + b"\n", 30),
        "30 lines of 10 MB of out-of-memory wordings": (oom * (10 * million // len(oom)) + b"\n", 30),
        "200 MB of NUL": (b"\0" * million, 200),
        "NUL and newlines in turn, 50 MB": (b"\0\n" * (million // 2), 50),
        f"{times / 1000:g} GB without a newline": (b"ERROR " * (million // 6), times),
        "CRI partial lines without an end, 200 MB": ((head + b"y" * 16_000 + b"\n") * 64, 200),
        "tracebacks without an end, 100 MB": (
            (b"(EngineCore pid=7) ERROR 11-29 16:26:46 [core.py:1] Traceback (most recent call last):\n"
             + b"(EngineCore pid=7) ERROR 11-29 16:26:46 [core.py:1]   File \"/x/vllm/a.py\", line 1, in f\n" * 8000), 125,
        ),
        "one OOM line a process, 100,000 processes": (b"".join(line % n for n in range(100_000)), 1),
    }  # fmt: skip
    for name, (data, repeat) in cases.items():
        async with running() as one:
            slow = await _slowest(one, _feed(one, data, repeat))
            await _say_hostile(report, one, name, slow)
    for name, handler in (("100 MB", _huge), ("a byte a second", _drip)):
        async with _server(handler) as url, running(url=url) as one:
            slow = await _slowest(one, asyncio.sleep(args.hostile_seconds))
            await _say_hostile(report, one, f"vLLM's /metrics: {name}", slow)


async def _say_hostile(report: Report, one: Running, name: str, slow: float) -> None:
    before = await one.metrics()
    with one.log.open("ab", buffering=0) as out:
        out.write(b"\n" + b"".join(Replay("mlp_eager_16384").lines))
    await asyncio.sleep(3)
    after = await one.metrics()
    key = 'vllm_oom_fatal_incidents_total{class="prefill_budget"}'
    told = after[key] - before[key] == 1
    report.add(f"{name}: RSS peak", f"{rss(one.pid, 'VmHWM'):.0f} MB")
    report.add(f"{name}: slowest answer", f"{slow:.2f} s", "1 s", slow <= 1)
    report.add(f"{name}: a death afterwards is counted", "yes" if told else "no", "yes", told)


async def _huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    block = b"".join(b'vllm:num_requests_running{engine="%d"} 1.0\n' % n for n in range(25_000))
    with suppress(ConnectionError):
        for _ in range(100_000_000 // len(block)):
            await response.write(block)
    return response


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for _ in range(600):
            await response.write(b"#")
            await asyncio.sleep(1)
    return response


@asynccontextmanager
async def _server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/metrics", handler), web.get("/health", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# --- the report -----------------------------------------------------------------------------


def page(report: Report, command: str) -> str:
    """The whole of ``LIVE.md``."""
    model = re.search(
        r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    short = [f"- {one.what}: {one.value}, target {one.target}" for one in report.rows if one.met is False]
    facts = [
        f"- CPU: {model[1] if model else platform.machine()}, {os.cpu_count()} cores",
        f"- system: {platform.platform()}",
        f"- Python: {platform.python_version()}",
        f"- load of the machine at the end: {os.getloadavg()[0]:.1f}; the measuring itself takes part of it",
    ]
    return "\n".join(
        [
            "# The running sidecar: results", "",
            f"{datetime.now(UTC):%Y-%m-%d}, one run of", "", f"    {command}", "",
            *facts, "", report.table(), "",
            "What falls short:", "", *(short or ["- nothing that has a target"]), "",
        ]
    )  # fmt: skip


async def measure(args: argparse.Namespace) -> Report:
    """Run the chosen parts one after the other."""
    report = Report()
    for name, part in (("latency", latency), ("footprint", footprint), ("hostile", hostile), (LONG, long)):
        if name in args.parts:
            await part(report, args)
    return report


def main() -> int:
    """``live.py``: measure and print; ``--write`` also renews a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, LONG), default=list(PARTS))
    parser.add_argument("--replays", type=int, default=32)
    parser.add_argument("--idle", type=float, default=30, help="seconds of the idle measurement")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the long logs")
    parser.add_argument("--incidents", type=int, default=5000)
    parser.add_argument("--long-gigabytes", type=float, default=10.0)
    parser.add_argument("--long-incidents", type=int, default=100_000)
    parser.add_argument("--hostile-seconds", type=float, default=30, help="for each hostile /metrics")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page, as LIVE.md")
    args = parser.parse_args()
    report = asyncio.run(measure(args))
    text = page(report, " ".join([".venv/bin/python tests/bench/live.py", *sys.argv[1:]]))
    print(text)
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
