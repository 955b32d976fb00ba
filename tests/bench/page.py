"""Measures how soon a death becomes a page: pushed by the exporter, and by way of Prometheus' rules.

Everything is real: the command ``run`` on a log that is played again with the pace it arrived in
around its failure, Prometheus with the rules that ship, Alertmanager with the configuration that
ships, and a webhook. The time counts from the moment the first out-of-memory line was written.

Prometheus scrapes and evaluates every second here, and Alertmanager's inhibitions and waits are
off, so that both pages can be seen in one run; what the waits of a real installation add is
computed, and said to be. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[1]))

from pager import CONFIG, Pager, free_port, prometheus
from replay import EXPORTER, Replay

NAMES = ("mlp_eager_16384", "mlp_uni_16384", "sampler_uni", "v0271_mlp_mp")
BY_RULE = {"VLLMPrefillBudgetOOM", "VLLMFatalOOM"}
PUSHED = "VLLMOutOfMemory"
TARGET = 1.5
_OOM = re.compile(rb"OutOfMemoryError|out of memory")
_BEFORE = 4.0  # seconds of the log before the failure that keep their pace; what is older comes at once
_LONGEST = 30.0
_SETTINGS = (("60s, the default", 60.0), ("30s, as kube-prometheus sets it", 30.0), ("15s", 15.0))


@dataclass(frozen=True, slots=True)
class Run:
    """One death: seconds from its first out-of-memory line to each page; None: none came."""

    name: str
    pushed: float | None
    by_rule: float | None


async def play(folder: Path, pager: Pager, name: str, number: int, port: int) -> Run:
    """One death in a namespace of its own, so that nothing is grouped with the one before."""
    replay = Replay(name)
    first = next(at for at, line in enumerate(replay.lines) if _OOM.search(line))
    start = replay.arrivals[first] - _BEFORE
    replay.arrivals = [max(one, start) for one in replay.arrivals]
    namespace, log = f"run-{number}", folder / f"{number}.log"
    log.touch()
    async with replay.server() as url:
        target = {
            "name": namespace, "log": [str(log)], "vllm_url": url,
            "labels": {"namespace": namespace, "pod": "llama-0", "container": "vllm"},
        }  # fmt: skip
        config = folder / f"{number}.yaml"
        config.write_text(yaml.safe_dump({"targets": [target]}), encoding="utf-8")
        sidecar = await asyncio.create_subprocess_exec(
            EXPORTER, "run", "--config", config, "--listen", f"127.0.0.1:{port}", "--log-level", "error",
            "--state-dir", folder / f"{number}.state", "--alertmanager-url", pager.url,
        )  # fmt: skip
        try:
            await asyncio.sleep(3)
            await replay.write(log)
            began = replay.written[first] - time.monotonic() + time.time()
            end = time.monotonic() + _LONGEST
            while time.monotonic() < end:
                found = _pages(pager, namespace)
                if PUSHED in found and found.keys() & BY_RULE:
                    break
                await asyncio.sleep(0.05)
        finally:
            sidecar.terminate()
            await sidecar.wait()
    found = _pages(pager, namespace)
    by_rule = [found[one] for one in found.keys() & BY_RULE]
    return Run(
        name,
        found[PUSHED] - began if PUSHED in found else None,
        min(by_rule) - began if by_rule else None,
    )


def _pages(pager: Pager, namespace: str) -> dict[str, float]:
    """When each alert first paged, by its name."""
    found: dict[str, float] = {}
    for one in pager.of("pager"):
        for alert in one.alerts:
            if alert["labels"].get("namespace") == namespace:
                found.setdefault(alert["labels"]["alertname"], one.time)
    return found


def shipped_wait() -> float:
    """Seconds that the shipped configuration holds a page of a rule back, to inhibit it where it must."""
    routes = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["route"]["routes"]
    (wait,) = [one["group_wait"] for one in routes if one["matchers"] == ['severity="page"']]
    return float(str(wait).removesuffix("s"))


def table(runs: list[Run]) -> str:
    """The result as Markdown."""
    pushed = [one.pushed for one in runs if one.pushed is not None]
    by_rule = [one.by_rule for one in runs if one.by_rule is not None]
    lines = [
        f"- CPU cores: {os.cpu_count()}; load of the machine at the end: {os.getloadavg()[0]:.1f}",
        f"- system: {platform.platform()}; Python {platform.python_version()}",
        f"- {len(runs)} deaths of the captures {', '.join(NAMES)}",
        "",
        "| first out-of-memory line to the webhook | median | longest | pages |",
        "|---|---:|---:|---:|",
    ]
    for what, seconds in (
        ("pushed by the exporter", pushed),
        ("by rule, scraped and evaluated every second", by_rule),
    ):
        if seconds:
            lines.append(
                f"| {what} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {len(seconds)} of {len(runs)} |"
            )
        else:
            lines.append(f"| {what} | – | – | 0 of {len(runs)} |")
    if by_rule:
        # what is left when the two waits at one second are taken away: half a second each, on average
        rest = statistics.median(by_rule) - 1.0
        for what, interval in _SETTINGS:
            lines.append(
                f"| by rule, computed for scrape and evaluation every {what}, and {shipped_wait():g} s of group_wait "
                f"| {rest + interval + shipped_wait():.0f} s | {rest + 2 * interval + shipped_wait():.0f} s | |"
            )
    if pushed:
        met = "yes" if statistics.median(pushed) <= TARGET else "NO"
        lines += ["", f"Target: pushed within {TARGET:g} s, median: {met}."]
    return "\n".join(lines) + "\n"


async def measure(replays: int) -> list[Run]:
    """Play deaths one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        waits = {"group_wait": "0s", "group_interval": "1s"}
        ports = [free_port() for _ in range(replays)]
        runs: list[Run] = []
        async with Pager(folder, waits, inhibits=False).running() as pager, prometheus(folder, pager, ports):
            for number, port in enumerate(ports):
                runs.append(await play(folder, pager, NAMES[number % len(NAMES)], number, port))
                print(runs[-1], file=sys.stderr)
        return runs


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replays", type=int, default=12)
    print(table(asyncio.run(measure(parser.parse_args().replays))))


if __name__ == "__main__":
    main()
