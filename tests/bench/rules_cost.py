"""Measures what the rules cost a Prometheus, and what 10,000 engines would cost.

Why: a rule file that is pleasant with ten engines may not be with ten thousand. A real Prometheus scrapes ``--engines`` simulated
exporters: the exposition of the golden file, so what a filled exporter really serves, with a model of its own for every 20, and a few series
of vLLM and of kube-state-metrics. One engine of a hundred fails on the way, so that alerts fire and their texts are
expanded. Rules are evaluated every 15 s as scrapes are, which is more often than most do.

Durations of rule groups are Prometheus' own (``prometheus_rule_group_last_duration_seconds``), the median of all evaluations
after the 5-minute windows are full. Windows of an hour are not full by then; their group is extrapolated by the
samples it would read. Memory is the resident set of a Prometheus that holds nothing but this.
Nothing is asserted on time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "metrics.txt"
RULES = [ROOT / "rules" / "vllm-oom-alerts.yaml", ROOT / "rules" / "vllm-oom-recording.yaml"]
INTERVAL = 15
WINDOW = 300
WANTED = 10_000
REPLICAS = 20

_VLLM = """vllm:kv_cache_usage_perc{{model_name="{model}",engine="0"}} 0.4
vllm:num_preemptions_total{{model_name="{model}",engine="0"}} 3
vllm:num_requests_running{{model_name="{model}",engine="0"}} 2
"""


class Fleet:
    """Expositions of ``engines`` exporters; one in a hundred has failed from ``fails_at`` on (monotonic time)."""

    def __init__(self, engines: int, fails_at: float) -> None:
        golden = GOLDEN.read_text(encoding="utf-8")
        self.engines, self.fails_at = engines, fails_at
        self.healthy = re.sub(
            r"^(vllm_oom_(?:incidents|fatal_incidents|log_read_errors)_total\{.*\}|vllm_oom_(?:near_misses|state_write_failures)_total) .*$",
            r"\1 0.0", golden, flags=re.MULTILINE,
        )  # fmt: skip
        now = f"{time.time():.0f}"
        self.healthy = re.sub(
            r"^(vllm_oom_log_last_line_timestamp_seconds\S*|vllm_oom_last_incident_timestamp_seconds\S*) .*$",
            rf"\1 {now}", self.healthy, flags=re.MULTILINE,
        )  # fmt: skip
        # the golden file shows a server in trouble
        for name, state in {
            "engine_state": "serving",
            "budget_risk": "comfortable",
            "confirmation": "none",
        }.items():
            series = rf"^(vllm_oom_{name}\{{state=\"%s\"\}}) .*$"
            cleared = re.sub(series % r"\w+", r"\1 0.0", self.healthy, flags=re.MULTILINE)
            self.healthy = re.sub(series % state, r"\1 1.0", cleared, flags=re.MULTILINE)
        for name in ("target_up", "config_last_reload_successful"):
            self.healthy = re.sub(rf"^(vllm_oom_{name}) .*$", r"\1 1.0", self.healthy, flags=re.MULTILINE)
        failed = re.sub(
            r'^(vllm_oom_incidents_total\{class="prefill_budget",phase="serving"\}) .*$',
            r"\1 1.0", self.healthy, flags=re.MULTILINE,
        )  # fmt: skip
        self.failed = re.sub(
            r'^(vllm_oom_fatal_incidents_total\{class="prefill_budget"\}) .*$',
            r"\1 1.0",
            failed,
            flags=re.MULTILINE,
        )
        assert self.failed != self.healthy
        self.series = sum(not line.startswith("#") for line in self.healthy.splitlines())

    def page(self, path: str) -> str:
        """What is served at ``path``: ``/NUMBER`` for an engine, ``/ksm`` for kube-state-metrics."""
        if path == "/ksm":
            return "".join(
                f'kube_pod_container_info{{namespace="llm",pod="pod-{at}",container="vllm",image="vllm/vllm-openai:v0.32.0"}} 1\n'
                f'kube_pod_container_status_running{{namespace="llm",pod="pod-{at}",container="vllm"}} 1\n'
                for at in range(self.engines)
            )
        at = int(path[1:])
        failed = at % 100 == 0 and time.monotonic() >= self.fails_at
        model = f"example-org/model-{at // REPLICAS}"
        text = (self.failed if failed else self.healthy).replace("example-org/dense-14b", model)
        return text + _VLLM.format(model=model)


def serve(fleet: Fleet) -> ThreadingHTTPServer:
    """A server of the fleet on a free port, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = fleet.page(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configure(folder: Path, fleet: Fleet, port: int, rules: bool) -> Path:
    """Prometheus' configuration for the fleet at ``port``."""
    groups = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "__metrics_path__": f"/{at}", "instance": f"10.0.{at // 250}.{at % 250}:10977",
                "namespace": "llm", "pod": f"pod-{at}",
            },
        }
        for at in range(fleet.engines)
    ]  # fmt: skip
    (folder / "targets.json").write_text(json.dumps(groups), encoding="utf-8")
    config = folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump({
            "global": {"scrape_interval": f"{INTERVAL}s", "evaluation_interval": f"{INTERVAL}s"},
            "rule_files": [str(path) for path in RULES] if rules else [],
            "scrape_configs": [
                {"job_name": "vllm-oom", "file_sd_configs": [{"files": [str(folder / "targets.json")]}]},
                {
                    "job_name": "ksm", "metrics_path": "/ksm", "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                },
            ],
        }),
        encoding="utf-8",
    )  # fmt: skip
    return config


def own_metrics(port: int) -> dict[str, float]:
    """Prometheus' metrics of itself, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if one[:1] != "#")}


def asked(port: int, query: str) -> float:
    """The value of an instant query, 0 for none."""
    from urllib.parse import quote

    url = f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found = json.loads(answer.read())["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def measure(engines: int, seconds: int) -> dict[str, object]:
    """One Prometheus over ``engines`` exporters for ``seconds``; what it says of itself at the end."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        sys.exit("prometheus is missing; 'apt-get install prometheus' brings it")
    fleet = Fleet(engines, time.monotonic() + seconds - 120)
    server, port = serve(fleet), free_port()
    durations: dict[str, list[float]] = {}
    seen: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configure(folder, fleet, server.server_address[1], rules=True)
        process = subprocess.Popen(
            [
                prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            begun = time.monotonic()
            while (past := time.monotonic() - begun) < seconds:
                time.sleep(5)
                if past < WINDOW + 10:
                    continue
                told = own_metrics(port)
                for key, value in told.items():
                    if group := re.fullmatch(
                        r'prometheus_rule_group_last_duration_seconds\{rule_group=".*;(.+)"\}', key
                    ):
                        stamp = told[key.replace("duration_seconds", "evaluation_timestamp_seconds")]
                        if seen.get(group[1]) != stamp:
                            seen[group[1]] = stamp
                            durations.setdefault(group[1], []).append(value)
            told = own_metrics(port)

            def total(metric: str) -> float:
                return sum(value for key, value in told.items() if key.partition("{")[0] == metric)

            result: dict[str, object] = {
                "engines": engines,
                "series": fleet.series,
                "head": told["prometheus_tsdb_head_series"],
                "samples": total("prometheus_tsdb_head_samples_appended_total") / seconds,
                "memory": told["process_resident_memory_bytes"],
                "cpu": told["process_cpu_seconds_total"] / seconds,
                "durations": {group: statistics.median(values) for group, values in durations.items()},
                "recorded": asked(port, 'count({__name__=~".+:.+:.+",__name__!~"vllm:.*"})'),
                "firing": asked(port, 'count(ALERTS{alertstate="firing"})'),
                "failures": total("prometheus_rule_evaluation_failures_total"),
                "hour": min(1.0, seconds / 3600),
                "version": version(prometheus),
            }
        finally:
            process.terminate()
            process.wait(timeout=60)
            server.shutdown()
            server.server_close()
    return result


def version(prometheus: str) -> str:
    """The version of a Prometheus."""
    told = subprocess.run([prometheus, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\S+)", told.stdout + told.stderr)
    return found[1] if found else "unknown"


def intervals() -> dict[str, int]:
    """How often each group is evaluated, in seconds."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return {
        group["name"]: int(group["interval"][:-1]) * 60 if "interval" in group else INTERVAL
        for group in groups
    }


def report(results: list[dict[str, object]]) -> str:
    """The tables of RULES.md."""
    every = intervals()
    largest = results[-1]
    engines = [float(str(one["engines"])) for one in results]
    head = " | ".join(f"{one:,.0f} engines" for one in engines)
    text = [
        "# What the rules cost a Prometheus",
        "",
        f"Load average of the machine at the end: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores; above 1 a core, durations are longer than they would be, CPU is not.",
        "",
        f"Prometheus {largest['version']}, {os.cpu_count()} cores, {platform.machine()}; written by `tests/bench/rules_cost.py`, whose head says how.",
        "Scrapes and evaluations every 15 s. The last column is the line through the measured ones.",
        "",
        f"| | {head} | {WANTED:,} engines |",
        "| --- |" + " ---: |" * (len(results) + 1),
    ]

    def at_wanted(values: list[float]) -> float:
        """The line through the first and the last value, at ``WANTED`` engines."""
        if len(values) < 2:
            return values[-1] * WANTED / engines[-1]
        slope = (values[-1] - values[0]) / (engines[-1] - engines[0])
        return values[-1] + slope * (WANTED - engines[-1])

    def row(what: str, values: list[float], form: str, whole: str | None = None) -> None:
        told = [format(value, form) for value in values] or [""] * len(results)
        last = format(at_wanted(values), form) if whole is None else whole
        text.append(f"| {what} | {' | '.join(told)} | {last} |")

    def of(key: str, unit: float = 1.0) -> list[float]:
        return [float(str(one[key])) / unit for one in results]

    row("series of an engine (at most 400)", of("series"), ".0f", f"{of('series')[-1]:.0f}")
    row("series in the head", of("head"), ",.0f")
    row("of them written by rules, alerts apart", of("recorded"), ",.0f")
    row("samples a second", of("samples"), ",.0f")
    row("resident memory, MB", of("memory", 1e6), ",.0f")
    row("CPU of all of Prometheus, cores", of("cpu"), ".3f")
    row("alerts firing at the end", of("firing"), ".0f", "")
    row("failed evaluations", of("failures"), ".0f", "")
    total = 0.0
    for group, seconds in every.items():
        took = [float(dict(one["durations"]).get(group, 0.0)) for one in results]  # type: ignore[call-overload]
        whole, note = at_wanted(took), ""
        if group == "vllm-oom-fleet-incidents":
            whole /= float(str(largest["hour"]))
            note = " with an hour of samples"
        total += whole / seconds
        row(f"`{group}`, every {seconds} s: seconds an evaluation", took, ".3f", f"{whole:.1f}{note}")
    row("share of one core that evaluating takes", [], "", f"{total:.0%}")
    return "\n".join(text) + "\n"


def main() -> None:
    """Measure, print the table, and write it beside this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--seconds", type=int, default=420, help="how long each Prometheus runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "RULES.md")
    options = parser.parse_args()
    text = report([measure(engines, options.seconds) for engines in options.engines])
    print(text)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
