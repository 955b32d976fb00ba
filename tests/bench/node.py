"""Measures what one node agent costs for 1, 8 and 32 servers, beside 200 containers that are none.

The real command runs on a simulated ``/var/log/pods``. For each number of servers: CPU of the process
while all of them are silent, and while each writes 100 lines a second; its memory; how long one
scrape of ``/metrics`` takes, and how long another request waits meanwhile; and how long after the first line of a failure, under that load, the
counter of its pod has moved. Nothing is asserted: figures depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

sys.path.append(str(Path(__file__).parents[1]))

from fault import Sidecar
from generate import KINDS, death
from live import cpu, quantile, rss

ENGINES = (1, 8, 32)
OTHERS = 200
LINES_PER_SECOND = 100


class Engine:
    """One server: its start-up stands in its log, then it writes what it is told to."""

    def __init__(self, root: Path, number: int) -> None:
        self.pod = f"llama-{number}"
        self.rng = random.Random(number)  # noqa: S311 - repeatable, not secret
        folder = root / f"prod_{self.pod}_00000000-0000-4000-8000-{number:012d}" / "vllm"
        folder.mkdir(parents=True)
        lines = death().splitlines()
        self.failure = next(at for at, line in enumerate(lines) if b"OutOfMemoryError" in line)
        self.lines = lines
        self.out = (folder / "0.log").open("ab", buffering=0)
        self.at = 0
        self.write(lines[:110])

    def write(self, lines: list[bytes]) -> None:
        """Append lines as the runtime does."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
        self.out.write(b"".join(b"%b stderr F %b\n" % (stamp, line) for line in lines))

    def traffic(self) -> None:
        """One line of ordinary serving."""
        self.at += 1
        self.write([KINDS["mixed"][0](self.rng, self.at).rstrip(b"\n")])

    def fail(self) -> None:
        """It runs out of memory, dies and starts again."""
        self.write(self.lines[self.failure :])
        self.write(self.lines[:110])


async def busy(engines: list[Engine], seconds: float) -> None:
    """Every server writes its lines, one at a time."""
    begin = time.monotonic()
    written = 0
    while (now := time.monotonic() - begin) < seconds:
        while written < now * LINES_PER_SECOND:
            for one in engines:
                one.traffic()
            written += 1
        await asyncio.sleep(0.005)


async def latency(
    base: str, session: aiohttp.ClientSession, engines: list[Engine], times: int
) -> list[float]:
    """Seconds from the first line of a failure to the ``/metrics`` that shows it; asked every 50 ms."""
    found = []
    for number in range(times):
        one = engines[number % len(engines)]
        name = f'vllm_oom_error_lines_total{{container="vllm",namespace="prod",pod="{one.pod}"}} '

        async def value(name: str = name) -> float:
            async with session.get(f"{base}/metrics") as response:
                return float((await response.text()).partition(name)[2].partition("\n")[0])

        before, begin = await value(), time.monotonic()
        one.fail()
        while await value() == before:
            await asyncio.sleep(0.05)
        found.append(time.monotonic() - begin)
        await asyncio.sleep(0.5)
    return found


async def scrape(base: str, session: aiohttp.ClientSession) -> tuple[float, float, int]:
    """Seconds of one scrape, the longest answer to another request meanwhile, and the size of the scrape."""
    waited = [0.0]

    async def others() -> None:
        while True:
            begin = time.monotonic()
            async with session.get(f"{base}/-/healthy") as response:
                await response.read()
            waited.append(time.monotonic() - begin)

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(others())
        await asyncio.sleep(0.1)
        del waited[1:]
        begin = time.monotonic()
        async with session.get(f"{base}/metrics") as response:
            size = len(await response.read())
        took = time.monotonic() - begin
        await asyncio.sleep(0.1)  # an answer that was waited for comes
        asking.cancel()
    return took, max(waited), size


async def measure(count: int, seconds: float, failures: int) -> list[str]:
    """One column of the table."""
    with tempfile.TemporaryDirectory(prefix="node-") as name:
        root = Path(name) / "pods"
        root.mkdir()
        for number in range(OTHERS):
            folder = root / f"apps_web-{number}_{number:08x}" / "web"
            folder.mkdir(parents=True)
            (folder / "0.log").write_bytes(
                b"2026-11-30T10:00:00.000000000Z stdout F GET /healthz 200\n" * 6000
            )
        engines = [Engine(root, number) for number in range(count)]
        async with aiohttp.ClientSession() as session:
            begin = time.monotonic()
            sidecar = await Sidecar.start("--node", root, "--state-dir", Path(name) / "state")
            try:
                base = await sidecar.ready(session)
                started = time.monotonic() - begin
                pid = sidecar.process.pid
                await asyncio.sleep(10)
                idle = await _share(pid, asyncio.sleep(seconds))
                memory = rss(pid)
                load = await _share(pid, busy(engines, seconds))
                writing = asyncio.create_task(busy(engines, 3600))
                late = await latency(base, session, engines, failures)
                writing.cancel()
                scrapes = [await scrape(base, session) for _ in range(5)]
                peak = rss(pid, "VmHWM")
            finally:
                await sidecar.kill(signal.SIGTERM)
    return [
        f"{started:.2f} s", f"{idle:.2%}", f"{load:.1%}", f"{memory:.0f} MB", f"{peak:.0f} MB",
        f"{statistics.median(late) * 1e3:.0f} ms", f"{quantile(late, 1.0) * 1e3:.0f} ms",
        f"{statistics.median(one[0] for one in scrapes) * 1e3:.0f} ms",
        f"{statistics.median(one[1] for one in scrapes) * 1e3:.0f} ms", f"{scrapes[-1][2] / 1e3:.0f} kB",
    ]  # fmt: skip


async def _share(pid: int, work: Awaitable[None]) -> float:
    used, begin = cpu(pid), time.monotonic()
    await work
    return (cpu(pid) - used) / (time.monotonic() - begin)


ROWS = (
    "start to /-/ready",
    "CPU, all silent (share of a core)",
    f"CPU, each {LINES_PER_SECOND} lines/s",
    "RSS, silent",
    "RSS, highest",
    "first line of a failure to counter, median",
    "first line of a failure to counter, longest",
    "one scrape of /metrics",
    "another request meanwhile, longest wait",
    "its size",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--failures", type=int, default=12)
    args = parser.parse_args()
    columns = [asyncio.run(measure(count, args.seconds, args.failures)) for count in args.engines]
    print(f"{platform.platform()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}\n")
    print("| servers | " + " | ".join(map(str, args.engines)) + " |")
    print("|---|" + "---:|" * len(columns))
    for row, values in zip(ROWS, zip(*columns, strict=True), strict=True):
        print(f"| {row} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    main()
