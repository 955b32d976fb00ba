"""Running without Kubernetes: the compose file and the units of systemd, as far as they can be tried here."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import capture, load_yaml
from test_deploy_policy import check_options

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deploy/compose"
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
EXPORTER = Path(sys.executable).with_name("vllm-oom-exporter")
INSTALLED = "/opt/vllm-oom-exporter/bin/vllm-oom-exporter"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


async def _metrics(port: int, wanted: str) -> None:
    """Until ``/metrics`` has a line."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    if wanted in (await answer.text()).splitlines():
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


def _services() -> Mapping[str, Any]:
    services = load_yaml(COMPOSE / "compose.yaml")["services"]
    assert isinstance(services, dict)
    return services


def test_what_compose_mounts_is_there() -> None:
    """Every file or folder that is mounted exists, and every named volume is declared."""
    declared = load_yaml(COMPOSE / "compose.yaml")["volumes"]
    for service in _services().values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in declared if source[0] != "." else (COMPOSE / source).exists(), mount


def test_compose_gives_the_exporter_options_that_exist() -> None:
    """Its command passes ``check``, and it runs as unprivileged as in a cluster."""
    exporter = _services()["exporter"]
    check_options({"args": exporter["command"]})
    assert exporter["read_only"] is True
    assert exporter["cap_drop"] == ["ALL"]
    assert exporter["security_opt"] == ["no-new-privileges:true"]


def test_nothing_listens_beyond_this_host() -> None:
    """Published ports are those of the loopback: nothing here asks for a password."""
    ports = [port for service in _services().values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """Promtool accepts prometheus.yml with the rules at their place."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing; 'apt-get install prometheus' brings it"
    text = (COMPOSE / "prometheus.yml").read_text()
    mounts = [mount.split(":") for mount in _services()["prometheus"]["volumes"]]
    (rules,) = [COMPOSE / source for source, target, *_ in mounts if target == "/etc/prometheus/rules"]
    assert "/etc/prometheus/rules" in text
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace("/etc/prometheus/rules", str(rules.resolve())))
    done = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


async def test_the_replay_stands_in_for_vllm(tmp_path: Path) -> None:
    """What stands in for vLLM writes the log and serves /metrics: the exporter sees it live, and die."""
    port, listen = _free_port(), _free_port()
    log = tmp_path / "vllm.log"
    replay = await asyncio.create_subprocess_exec(
        sys.executable, COMPOSE / "replay_server.py", log,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PORT": str(port), "SPEED": "4"},
    )  # fmt: skip
    exporter = await asyncio.create_subprocess_exec(
        EXPORTER, "run", "--log", log, "--vllm-url", f"http://127.0.0.1:{port}", "--listen", f"127.0.0.1:{listen}",
        "--scrape-interval", "300ms", "--log-level", "error",
    )  # fmt: skip
    try:
        await _metrics(listen, "vllm_oom_target_up 1.0")
        await _metrics(listen, 'vllm_oom_fatal_incidents_total{class="prefill_budget"} 1.0')
    finally:
        for process in (replay, exporter):
            process.terminate()
            await process.wait()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    """``systemd-analyze verify`` knows every setting, and ``security`` calls the exposure low."""
    analyze = shutil.which("systemd-analyze")
    assert analyze is not None, "systemd-analyze is missing; 'make test' installs it"
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(INSTALLED, str(EXPORTER)))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=20", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:]


def test_a_mistake_does_not_restart_for_ever() -> None:
    """Exit code 2 is a mistake in the configuration: the unit then stays down."""
    assert len(UNITS) == 2
    for unit in UNITS:
        assert "\nRestartPreventExitStatus=2\n" in unit.read_text()


async def test_the_journal_is_read(tmp_path: Path) -> None:
    """The command of the unit follows what journalctl prints for the unit of vLLM, and prints nothing of it itself."""
    lines = capture("mlp_eager_16384").decode().splitlines()
    (tmp_path / "lines").write_text(
        "".join(f"2026-11-30T16:26:46+0000 gpu-1 vllm[4242]: {one}\n" for one in lines)
    )
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(
        f'#!/bin/bash\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/lines\nexec tail --pid=$PPID -f /dev/null\n'
    )
    journalctl.chmod(0o755)
    (unit,) = [one.read_text() for one in UNITS if "journal" in one.name]
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    port = _free_port()
    options = f"run --listen 127.0.0.1:{port} --log-level error"
    arguments = shlex.split(command.replace(f"{INSTALLED} run", f"{EXPORTER} {options}"))
    process = await asyncio.create_subprocess_exec(
        *arguments, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM_UNIT": "chat.service"},
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _metrics(port, 'vllm_oom_fatal_incidents_total{class="prefill_budget"} 1.0')
    finally:
        process.terminate()
        await process.wait()
    assert "--unit=chat.service" in (tmp_path / "asked").read_text()
    assert "\nStandardOutput=null\n" in unit
