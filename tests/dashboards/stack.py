"""Prometheus servers with something to show: a real sidecar beside a replay that dies, and the hour of ``story``.

Both stay as they are once they are there: whoever asks gives the time at which it all was.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pager import free_port
from replay import EXPORTER, Replay

from . import story
from .panels import Prometheus

CAPTURE = "mlp_eager_16384"
HOST = "gpu-host-2"
PACE = (("startup complete", 2.0), ("POST /v1", 6.0), ("OutOfMemoryError", 12.0), ("", 14.0))
"""When what is logged first, in seconds. The capture starts in 16 s and dies 2 s later, too fast for a scrape a second."""

PATIENCE = 120.0
"""Seconds until what should come is given up; a machine under load is slow, not broken."""

_CLOCK = re.compile(rb"\b\d\d-\d\d \d\d:\d\d:\d\d\b")


@dataclass(frozen=True, slots=True)
class Shown:
    """A Prometheus, the time from which on and until which there is something in it, and its scrape interval; seconds."""

    prometheus: Prometheus
    start: float
    end: float
    scrape: int


@contextmanager
def shown(folder: Path) -> Iterator[dict[str, Shown]]:
    """Both, made side by side: ``live`` and ``story``."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        making = {
            name: pool.submit(make, folder, stack) for name, make in (("live", _live), ("story", _story))
        }
        yield {name: made.result() for name, made in making.items()}


def _live(folder: Path, stack: ExitStack) -> Shown:
    return asyncio.run(_replayed(folder, stack))


async def _replayed(folder: Path, stack: ExitStack) -> Shown:
    """A real vLLM that dies, played again, with the sidecar and a Prometheus that scrapes both every second.

    Nothing names a pod here: it is the case of plain processes on one host.
    """
    port, log, replay = free_port(), folder / "vllm.log", Replay(CAPTURE)
    async with replay.server() as url:
        prometheus = _prometheus(
            folder / "live", stack, [("vllm-oom-exporter", port, 10977), ("vllm", _port(url), 8000)]
        )
        sidecar = subprocess.Popen(
            [
                EXPORTER, "run", "--log", log, "--vllm-url", url, "--listen", f"127.0.0.1:{port}", "--log-level", "error",
                "--scrape-interval", "500ms", "--alertmanager-url", f"http://127.0.0.1:{free_port()}",
            ]
        )  # fmt: skip
        stack.callback(_stop, sidecar)
        await asyncio.to_thread(
            _until, lambda: prometheus.value("sum(vllm_oom_incidents_total)") == 0, sidecar
        )
        start = time.time()
        replay.arrivals = _paced(replay)
        replay.lines = [
            _restamped(line, start + at) for line, at in zip(replay.lines, replay.arrivals, strict=True)
        ]
        await replay.write(log)
        for query, value in (
            ("sum(vllm_oom_incidents_total)", 1),
            ('vllm_oom_engine_state{state="dead"}', 1),
            ("vllm_oom_target_up", 0),
            ("count_over_time(vllm_oom_last_incident_timestamp_seconds[1m]) >= bool 4", 1),
            ('sum(increase(vllm_oom_notifications_total{result=~"failed|dropped"}[1m])) > bool 0', 1),
        ):
            await asyncio.to_thread(_until, partial(_equals, prometheus, query, value), sidecar)
    # Twice the real interval, as for a data source that is set with care: a failure is in the log's whole seconds, and settles in one.
    return Shown(prometheus, start - 2, time.time(), 2)


def _paced(replay: Replay) -> list[float]:
    """Arrivals, stretched and squeezed between the lines of ``PACE``."""
    found: list[float] = []
    before, begin = 0.0, 0.0
    for text, end in PACE:
        matching = (
            at for line, at in zip(replay.lines, replay.arrivals, strict=True) if text.encode() in line
        )
        after = next(matching) if text else replay.arrivals[-1]
        part = [at for at in replay.arrivals[len(found) :] if at <= after]
        found += [begin + (end - begin) * (at - before) / (after - before) for at in part]
        before, begin = after, end
    return found


def _equals(prometheus: Prometheus, query: str, value: float) -> bool:
    return prometheus.value(query) == value


def _restamped(line: bytes, at: float) -> bytes:
    """``line`` as if it were written at ``at``: incidents are where the log says."""
    now = datetime.fromtimestamp(at)
    return _CLOCK.sub(f"{now:%m-%d %H:%M:%S}".encode(), line)


def _story(folder: Path, stack: ExitStack) -> Shown:
    end = datetime.now().replace(second=0, microsecond=0)
    begin = end - timedelta(seconds=story.LENGTH)
    text = folder / "story.txt"
    with text.open("w", encoding="utf-8") as out:
        out.writelines(story.openmetrics(begin.timestamp() + 1))  # scrapes do not fall on whole minutes
    data = folder / "story" / "data"
    data.mkdir(parents=True)
    subprocess.run(
        [_needed("promtool"), "tsdb", "create-blocks-from", "openmetrics", text, data],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # Imported series have no markers of their end: each sample holds until the next one is due, and no longer.
    prometheus = _prometheus(folder / "story", stack, [], "--query.lookback-delta=14500ms")
    _until(lambda: bool(prometheus.ask("query", query="up", time=end.timestamp())["result"]))
    return Shown(prometheus, begin.timestamp(), end.timestamp(), story.STEP)


def _prometheus(
    folder: Path, stack: ExitStack, scraped: list[tuple[str, int, int]], *flags: str
) -> Prometheus:
    """Start one. ``scraped``: job, the port it answers at, and the port it shall seem to."""
    folder.mkdir(exist_ok=True)
    jobs: list[dict[str, Any]] = [
        {
            "job_name": job,
            "honor_labels": True,
            "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": f"{HOST}:{usual}"}}],
        }
        for job, port, usual in scraped
    ]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    with (folder / "prometheus.log").open("wb") as out:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [
                _needed("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", *flags,
            ],
            stdout=out, stderr=out,
        )  # fmt: skip
    stack.callback(_stop, process)
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    _until(lambda: prometheus.value("vector(1)") == 1, process)
    return prometheus


def _until(holds: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Ask until it holds; a server that does not answer yet is one more reason to wait, ``process`` that ended is none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with suppress(OSError, ValueError):
            if holds():
                return
        assert process is None or process.poll() is None, f"{process.args!r} ended"
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.1)


def _needed(program: str) -> str:
    found = shutil.which(program)
    assert found is not None, f"{program} is missing; 'apt-get install prometheus' brings it"
    return found


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
