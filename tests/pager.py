"""A real Alertmanager with the configuration that ships, and whoever is notified by it.

Only addresses are put in, and waits are shortened where a test says so; routes, groups and
inhibitions are those of ``rules/alertmanager.yaml``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

BINARY = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
PROMETHEUS = shutil.which("prometheus")
CONFIG = Path(__file__).parent.parent / "rules" / "alertmanager.yaml"
MISSING = "Alertmanager is missing; 'apt-get install prometheus-alertmanager' brings it"
DEADLINE = 20.0

needs_alertmanager = pytest.mark.skipif(BINARY is None and not os.environ.get("CI"), reason=MISSING)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None and not os.environ.get("CI"), reason="Prometheus is missing"
)


@dataclass(frozen=True, slots=True)
class Notification:
    """One call of the webhook: when (``time.time``), for which receiver, and its alerts."""

    time: float
    receiver: str
    alerts: list[dict[str, Any]]


class Pager:
    """Alertmanager and its webhook; both stop with ``running``."""

    def __init__(self, folder: Path, waits: Mapping[str, str], *, inhibits: bool = True) -> None:
        self.folder = folder
        self.waits = waits
        self.inhibits = inhibits
        self.notified: list[Notification] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.address}"
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pager]:
        """Start both."""
        assert BINARY is not None, MISSING
        app = web.Application()
        app.router.add_post("/{receiver}", self._called)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        for receiver in config["receivers"]:
            for hook in receiver["webhook_configs"]:
                hook["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}/{receiver['name']}"
                hook["send_resolved"] = True
        for route in (config["route"], *config["route"]["routes"]):
            route.update(self.waits)
        if not self.inhibits:
            del config["inhibit_rules"]
        (self.folder / "alertmanager.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        try:
            await self.start()
            yield self
        finally:
            await self.stop()
            await runner.cleanup()

    async def start(self) -> None:
        """Start Alertmanager, with what it kept, and wait until it is ready."""
        assert BINARY is not None, MISSING
        with (self.folder / "alertmanager.log").open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                BINARY, f"--config.file={self.folder / 'alertmanager.yaml'}",
                f"--storage.path={self.folder / 'alertmanager'}", f"--web.listen-address={self.address}",
                "--cluster.listen-address=", stdout=out, stderr=out,
            )  # fmt: skip
        end = time.monotonic() + DEADLINE
        async with aiohttp.ClientSession() as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/-/ready") as response:
                        if response.status == 200:
                            return
                log = (self.folder / "alertmanager.log").read_text(encoding="utf-8")
                assert self._process.returncode is None, log
                assert time.monotonic() < end, log
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop Alertmanager as a shutdown does: it keeps what it has notified."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def alerts(self) -> list[dict[str, Any]]:
        """What Alertmanager holds."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/api/v2/alerts") as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    def of(self, receiver: str, status: str = "firing") -> list[Notification]:
        """What one receiver was notified of."""
        return [
            one
            for one in self.notified
            if one.receiver == receiver and any(alert["status"] == status for alert in one.alerts)
        ]

    async def _called(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.notified.append(Notification(time.time(), request.match_info["receiver"], body["alerts"]))
        return web.Response()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@asynccontextmanager
async def prometheus(folder: Path, pager: Pager, ports: list[int]) -> AsyncIterator[None]:
    """Prometheus with the rules that ship, scraping exporters on these ports every second."""
    assert PROMETHEUS is not None, "Prometheus is missing; 'apt-get install prometheus' brings it"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(one) for one in sorted(CONFIG.parent.glob("vllm-oom-*.yaml"))],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [pager.address]}]}]},
        "scrape_configs": [
            {
                "job_name": "vllm-oom-exporter",
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{free_port()}", stdout=out, stderr=out,
        )  # fmt: skip
    try:
        await asyncio.sleep(2)
        assert process.returncode is None, (folder / "prometheus.log").read_text(encoding="utf-8")
        yield
    finally:
        process.terminate()
        await process.wait()
