"""The example of a configuration for Alertmanager: routes by amtool, inhibitions by a running Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import load_yaml
from test_rules import ALERTS, RULES

CONFIG = RULES / "alertmanager.yaml"
PUSHED = {"alertname": "VLLMOutOfMemory", "source": "vllm-oom-exporter", "class": "prefill_budget"}
OTHERS = {
    "VLLMOutOfMemory",
    "VLLMBudgetRisk",
    "KubePodCrashLooping",
    "KubePodNotReady",
    "KubeContainerWaiting",
}
"""Alerts that the configuration names and the rules do not define."""


def installed(name: str) -> str:
    """A tool of Debian's prometheus-alertmanager; its absence is a failure, not a reason to skip."""
    found = shutil.which(name)
    assert found is not None, f"{name} is missing; 'apt-get install prometheus-alertmanager' brings it"
    return found


def test_amtool_accepts_the_configuration() -> None:
    """'amtool check-config' finds nothing."""
    told = subprocess.run(
        [installed("amtool"), "check-config", str(CONFIG)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


ROUTES = [
    ("pager", {"alertname": "VLLMPrefillBudgetOOM", "severity": "page"}),
    ("pager", {"alertname": "VLLMOutOfMemory", "severity": "page", "source": "vllm-oom-exporter"}),
    ("pager", {"alertname": "VLLMOutOfMemoryTest", "severity": "page", "source": "vllm-oom-exporter"}),
    ("tickets", {"alertname": "VLLMOutOfMemory", "severity": "ticket", "source": "vllm-oom-exporter"}),
    ("tickets", {"alertname": "VLLMStartupOOM", "severity": "ticket"}),
    ("feed", {"alertname": "VLLMFixConfirmed", "severity": "info"}),
    ("tickets", {"alertname": "SomebodyElse"}),
]


@pytest.mark.parametrize(("receiver", "labels"), ROUTES)
def test_severity_decides_who_is_told(receiver: str, labels: dict[str, str]) -> None:
    """Pages go to the pager, tickets to the queue, good news to the feed, whoever sent them."""
    told = subprocess.run(
        [
            *(installed("amtool"), "config", "routes", "test", f"--config.file={CONFIG}"),
            *(f"{name}={value}" for name, value in labels.items()),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout.split()) == (0, [receiver])


def test_every_alert_that_is_named_exists() -> None:
    """Inhibitions name alerts of the rules, of the exporter, or of kube-prometheus."""
    named = set()
    for rule in load_yaml(CONFIG)["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            if (found := re.fullmatch(r'alertname=~?"(.+)"', matcher)) is not None:
                named |= set(found[1].split("|"))
    assert named - set(ALERTS) == OTHERS


def test_no_inhibition_rests_on_labels_that_are_missing() -> None:
    """Missing on both sides counts as equal, so each rule demands a label that tells engines or workloads apart."""
    for rule in load_yaml(CONFIG)["inhibit_rules"]:
        demanded = [
            {matcher.split("=~")[0] for matcher in rule[side] if matcher.endswith('=~".+"')}
            for side in ("source_matchers", "target_matchers")
        ]
        assert demanded[0] == demanded[1]
        assert demanded[0] & set(rule["equal"])


class Alertmanager:
    """A running Alertmanager with the example's configuration."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def post(self, *alerts: dict[str, str]) -> None:
        """Let the alerts fire from now on."""
        now = datetime.now(UTC).isoformat()
        body = json.dumps([{"labels": labels, "startsAt": now} for labels in alerts]).encode()
        urllib.request.urlopen(  # noqa: S310 - a server this test started
            urllib.request.Request(  # noqa: S310
                f"{self.url}/api/v2/alerts", body, {"Content-Type": "application/json"}
            ),
            timeout=5,
        ).close()

    def get(self, path: str) -> Any:
        """What the API answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:  # noqa: S310
            return json.loads(answer.read())

    def inhibited(self, world: str) -> dict[str, bool]:
        """Alerts of one case by the label ``case``, and whether each is held back."""
        alerts = self.get(f"/api/v2/alerts?filter=world%3D{world}")
        return {one["labels"]["case"]: bool(one["status"]["inhibitedBy"]) for one in alerts}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    """Alertmanager on a free port, with its data in a temporary folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("alertmanager")
    process = subprocess.Popen(
        [
            installed("prometheus-alertmanager"),
            f"--config.file={CONFIG}",
            f"--storage.path={folder}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    running = Alertmanager(port)
    until = time.monotonic() + 20
    try:
        while True:
            try:
                running.get("/api/v2/status")
                break
            except OSError:
                assert process.poll() is None, "Alertmanager ended"
                assert time.monotonic() < until, "Alertmanager does not answer"
                time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(timeout=10)


POD = {"namespace": "llm", "pod": "chat-0"}
BY_RULE = {**POD, "job": "oom", "instance": "10.0.0.1:10977"}
PREFILL = {"class": "prefill_budget", "model_name": "tiny"}

INHIBITIONS: dict[str, list[tuple[bool, dict[str, str]]]] = {
    "push-in-kubernetes": [
        (False, {**PUSHED, "severity": "page", **POD}),
        (True, {"alertname": "VLLMPrefillBudgetOOM", "severity": "page", **BY_RULE, **PREFILL}),
        (False, {"alertname": "VLLMPrefillBudgetOOM", "severity": "page", **BY_RULE, **PREFILL, "pod": "chat-1"}),
        (False, {"alertname": "VLLMFatalOOM", "severity": "page", **BY_RULE, "class": "sampler"}),
        (False, {"alertname": "VLLMEngineHung", "severity": "page", "pod": "chat-2", "namespace": "llm"}),
    ],
    "push-elsewhere": [
        (False, {**PUSHED, "severity": "page", "target": "chat"}),
        (True, {"alertname": "VLLMPrefillBudgetOOM", "instance": "gpu7:1", "target": "chat", **PREFILL}),
        (False, {"alertname": "VLLMPrefillBudgetOOM", "instance": "gpu7:1", "target": "embed", **PREFILL}),
        (False, {"alertname": "VLLMPrefillBudgetOOM", "instance": "gpu8:1", **PREFILL}),
    ],
    "push-without-a-place": [
        (False, {**PUSHED, "severity": "page"}),
        (False, {"alertname": "VLLMPrefillBudgetOOM", "instance": "gpu8:1", **PREFILL}),
    ],
    "push-of-a-survived-failure-holds-back-no-page": [
        (False, {**PUSHED, "severity": "ticket", **POD, "class": "lora"}),
        (False, {"alertname": "VLLMFatalOOM", "severity": "page", **BY_RULE, "class": "lora"}),
        (True, {"alertname": "VLLMOOMSurvived", "severity": "ticket", **BY_RULE, "class": "lora"}),
    ],
    "risk-and-fix": [
        (False, {"alertname": "VLLMBudgetRisk", "state": "tight", **POD}),
        (True, {"alertname": "VLLMHeadroomTight", "state": "tight", **BY_RULE}),
        (False, {"alertname": "VLLMFixRefuted", "source": "vllm-oom-exporter", **POD}),
        (True, {"alertname": "VLLMFixRefuted", "state": "refuted", **BY_RULE}),
        (False, {"alertname": "VLLMFixConfirmed", "state": "confirmed", **BY_RULE}),
    ],
    "noise-of-kubernetes": [
        (False, {"alertname": "VLLMPrefillBudgetOOM", **BY_RULE, **PREFILL}),
        (True, {"alertname": "KubePodCrashLooping", **POD, "container": "vllm"}),
        (True, {"alertname": "KubePodNotReady", **POD}),
        (False, {"alertname": "KubePodCrashLooping", "namespace": "llm", "pod": "web-0"}),
        (False, {"alertname": "KubePodCrashLooping", "namespace": "other", "pod": "chat-0"}),
        (False, {"alertname": "KubeDeploymentReplicasMismatch", "namespace": "llm", "deployment": "chat"}),
    ],
    "a-hang-and-a-series": [
        (False, {"alertname": "VLLMEngineHung", **BY_RULE}),
        (True, {"alertname": "VLLMPrefillBudgetOOM", **BY_RULE, **PREFILL}),
        (False, {"alertname": "VLLMOOMRecurring", "job": "oom", "instance": "gpu7:1"}),
        (True, {"alertname": "VLLMFatalOOM", "job": "oom", "instance": "gpu7:1", "class": "unknown"}),
        (True, {"alertname": "VLLMOOMUnclassified", "job": "oom", "instance": "gpu7:1", "class": "unknown"}),
        (False, {"alertname": "VLLMFatalOOM", "job": "oom", "instance": "gpu8:1", "class": "sampler"}),
    ],
    "forty-replicas": [
        (False, {"alertname": "VLLMOOMSpreading", "namespace": "llm", "job": "oom", **PREFILL}),
        *[
            (True, {"alertname": "VLLMPrefillBudgetOOM", **BY_RULE, **PREFILL, "pod": f"chat-{at}"})
            for at in range(40)
        ],
        (True, {**PUSHED, "severity": "page", **POD, **PREFILL}),
        (False, {**PUSHED, "severity": "page", "namespace": "llm", "pod": "code-0", "class": "sampler", "model_name": "tiny"}),
        (False, {"alertname": "VLLMPrefillBudgetOOM", **BY_RULE, "pod": "code-0", "class": "prefill_budget", "model_name": "coder"}),
    ],
    "an-exporter-that-is-down": [
        (False, {"alertname": "VLLMOOMExporterDown", **BY_RULE}),
        (True, {"alertname": "VLLMOOMExporterMissing", **POD}),
        (False, {"alertname": "VLLMOOMExporterMissing", "namespace": "llm", "pod": "bare-0"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("world", INHIBITIONS)
def test_what_is_told_once_is_not_told_again(world: str, alertmanager: Alertmanager) -> None:
    """Held back is what another alert of the same incident says better; its neighbours are not."""
    # each case in namespaces and hosts of its own, for all fire at once
    apart = ("namespace", "instance", "target")
    alerts = [
        {name: f"{value}-{world}" if name in apart else value for name, value in labels.items()}
        | {"world": world, "case": str(at)}
        for at, (_, labels) in enumerate(INHIBITIONS[world])
    ]
    alertmanager.post(*alerts)
    until = time.monotonic() + 10
    wanted = {str(at): held for at, (held, _) in enumerate(INHIBITIONS[world])}
    while alertmanager.inhibited(world) != wanted and time.monotonic() < until:
        time.sleep(0.05)  # what was posted is taken over by the inhibitor in a moment
    assert alertmanager.inhibited(world) == wanted
