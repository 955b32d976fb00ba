"""A real death, line by line as it arrived: the sidecar says in the end what ``analyze`` says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
from replay import EXPORTER, Replay

SPEED = 6.0
NAMES = ("mlp_eager_16384", "lora_survive", "profile_uni", "preproc_survive", "v0271_mlp_mp", "sampler_uni")


async def played(name: str, folder: Path) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Incidents and ``/metrics`` of a sidecar beside a replay, and the document of ``analyze``."""
    replay, log = Replay(name, SPEED), folder / f"{name}.log"
    async with replay.server() as url, aiohttp.ClientSession() as session:
        sidecar = await asyncio.create_subprocess_exec(
            EXPORTER, "run", "--log", log, "--vllm-url", url, "--listen", "127.0.0.1:0",
            "--scrape-interval", "200ms", "--log-format", "json",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert sidecar.stderr is not None
            async with asyncio.timeout(60):
                base = ""
                while not base:
                    said = json.loads(await sidecar.stderr.readline())
                    base = f"http://{said['address']}" if said["event"] == "listening" else ""
                draining = asyncio.create_task(sidecar.stderr.read())
                await replay.write(log)
                lines = len(replay.lines)
                found: list[dict[str, Any]] = []
                metrics = ""
                while not found or f"lines_total {lines}" not in metrics:
                    async with session.get(f"{base}/api/v1/incidents") as response:
                        found = json.loads(await response.read())["incidents"]
                    async with session.get(f"{base}/metrics") as response:
                        metrics = await response.text()
                    metrics += f"\nlines_total {read_lines(metrics)}"
                    await asyncio.sleep(0.05)
        finally:
            if sidecar.returncode is None:
                sidecar.terminate()
            await sidecar.wait()
            await draining
    analyze = await asyncio.create_subprocess_exec(
        EXPORTER, "analyze", "--format", "json", log, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await analyze.communicate()
    return found, metrics, json.loads(out)


def read_lines(metrics: str) -> int:
    """Lines of the log that were read."""
    return sum(int(float(n)) for n in re.findall(r"^vllm_oom_log_lines_total\{.*\} (\S+)$", metrics, re.M))


def plain(incident: dict[str, Any]) -> dict[str, Any]:
    """An incident without what only the sidecar knows."""
    return {key: value for key, value in incident.items() if key not in ("target", "metrics_before")}


async def test_a_replay_ends_as_analyze_says(tmp_path: Path) -> None:
    """Incidents with their evidence and advice, counters and settings are those of the log as a whole."""
    results = await asyncio.gather(*(played(name, tmp_path) for name in NAMES))
    for name, (found, metrics, document) in zip(NAMES, results, strict=True):
        assert [plain(one) for one in reversed(found)] == document["incidents"], name
        one = document["incidents"][0]
        assert f'vllm_oom_incidents_total{{class="{one["class"]}",phase="{one["phase"]}"}} 1.0' in metrics
        assert f'vllm_oom_fatal_incidents_total{{class="{one["class"]}"}} {float(one["fatal"])}' in metrics
        assert f"vllm_oom_engine_starts_total {float(len(document['engines']))}" in metrics
        settings = document["engines"][-1]["settings"]
        assert f"vllm_oom_max_num_seqs {float(settings['max_num_seqs'])}" in metrics


async def test_the_minutes_before(tmp_path: Path) -> None:
    """What ``/metrics`` said before the death is part of the incident, since it is gone right after."""
    found, _, _ = await played("mlp_eager_16384", tmp_path)
    before = found[0]["metrics_before"]
    assert before[-1]["seconds_before"] >= -1
    assert set(before[-1]) == {"seconds_before", "running_requests", "waiting_requests", "kv_cache_usage"}
