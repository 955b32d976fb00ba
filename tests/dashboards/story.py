"""An hour in the life of five vLLM servers, as Prometheus would have scraped it: what dashboards are shown with.

The logs are those of real captures with other times and numbers, the sidecar reads them as it does in
production, only its clock is set. ``openmetrics`` is the history in the form of ``promtool tsdb
create-blocks-from openmetrics``: what takes an hour is there in seconds, and looks the same each time.

====== ============================ ========================================================================
chat-0 budget 8192, then 16384      dies twice of long prompts, and goes on with 4096: a fix on trial
chat-1 budget 16384                 dies once, and is started again as it was: exceeded
embed  the default                  nothing happens
code   budget 32768                 no step has filled it: unexercised
old    vLLM 0.9, no Kubernetes      does not start at first (no room for a KV cache), two near misses later
====== ============================ ========================================================================
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from prometheus_client import generate_latest
from simulator import Server, Window

from exporter.diagnosis.knowledge import builtin_classes
from exporter.diagnosis.scraped import ScrapedWindows
from exporter.engine_state import Signs, engine_state
from exporter.follow import Follower
from exporter.metrics import make_registry
from exporter.sources.stream import Chunk, SourceStats
from exporter.status import Status, TargetStatus
from exporter.vllm.exposition import parse

STEP = 15
MINUTE = 60
LENGTH = 60 * MINUTE
_CAPTURES = Path(__file__).parents[1] / "captures"
_CLOCK = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")
_MEMORY = (
    "(EngineCore pid=6232) INFO {at} [gpu_worker.py:641] Available KV cache memory: {kv} GiB\n"
    "(EngineCore pid=6232) INFO {at} [gpu_worker.py:867] Free memory on device (78.58/79.2 GiB) on startup. "
    "Desired GPU memory utilization is (0.9, 71.28 GiB). Actual usage is {weights} GiB for weight, {peak} GiB for peak "
    "activation, 0.42 GiB for non-torch memory, and 1.14 GiB for CUDAGraph memory. Current kv cache memory in use is {kv} GiB.\n"
)
_NEAR_MISS = (
    "[rank0]:[W{at:%m%d %H:%M:%S}.034032955 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 "
    "while trying to allocate 2147483648 bytes (free: 1811939328, total: 85041086464).\n"
)


@dataclass(frozen=True, slots=True)
class Act:
    """What happens from minute ``begin`` on: a start with ``settings``, and traffic until the next one.

    ``rate`` is in prompts a minute, ``long`` the share of prompts above 9000 tokens. ``ends``: how,
    a minute before the next act. ``near_misses``: minutes.
    """

    begin: float
    settings: Mapping[str, object]
    rate: float = 40
    long: float = 0.0
    ends: str = ""
    near_misses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """One server: how Prometheus labels it, and its acts. ``memory``: GiB of weights, profiled peak and KV pool."""

    name: str
    model: str
    acts: tuple[Act, ...]
    labels: dict[str, str] = field(default_factory=dict)
    host: str = "10.0.0.1"
    memory: tuple[float, float, float] = (15.0, 5.6, 49.1)
    version: str = "0.32.0"
    usage: str = "vllm:kv_cache_usage_perc"


def _pod(name: str, namespace: str = "models") -> dict[str, str]:
    return {"namespace": namespace, "pod": name}


BUDGET = "max_num_batched_tokens"
_16K = {BUDGET: 16384, "gpu_memory_utilization": 0.9, "max_num_seqs": 64}
FLEET = (
    Engine(
        "chat-0", "example-org/chat-8b",
        (
            Act(0, {**_16K, BUDGET: 8192}, long=0.02),
            Act(8, _16K, long=0.03, ends="step"),
            Act(33, _16K, rate=46, long=0.05, ends="step"),
            Act(42, {**_16K, BUDGET: 4096}, long=0.12),
        ),
        _pod("chat-0"), "10.0.0.1",
    ),
    Engine(
        "chat-1", "example-org/chat-8b",
        (Act(0, _16K, long=0.02, ends="step"), Act(38, _16K, long=0.01)),
        _pod("chat-1"), "10.0.0.2",
    ),
    Engine(
        "embed", "example-org/embed-1b", (Act(0, {BUDGET: 2048}, rate=90),),
        _pod("embed-7d9c-x2x4k"), "10.0.0.3", (2.3, 0.8, 66.2),
    ),
    Engine(
        "code", "example-org/code-34b", (Act(0, {BUDGET: 32768}, rate=20, long=0.1),),
        _pod("code-0", "research"), "10.0.0.4", (63.9, 3.1, 2.4),
    ),
    Engine(
        "old", "example-org/dense-7b",
        (Act(4, {}, ends="start"), Act(9, {"max_num_seqs": 32}, rate=30, long=0.01, near_misses=(25, 47))),
        {}, "gpu-host", version="0.9.1", usage="vllm:gpu_cache_usage_perc",
    ),
)  # fmt: skip


def openmetrics(begin: float, engines: Sequence[Engine] = FLEET) -> Iterator[str]:
    """Every sample from ``begin`` (seconds since the epoch) for ``LENGTH`` seconds, one a line, and ``# EOF``."""
    for engine in engines:
        yield from Beside(engine, begin).lines()
    yield "# EOF\n"


class Beside:
    """One server with the sidecar beside it, and Prometheus that scrapes both."""

    def __init__(self, engine: Engine, begin: float) -> None:
        self._engine, self._begin, self._at = engine, begin, begin
        self._rng = random.Random(engine.name)  # noqa: S311 - repeatable, not secret
        self._server = Server()
        self._up = False
        self._status = TargetStatus("vllm", sources=[SourceStats("/var/log/vllm.log")], scrape_up=False)
        self._follower = Follower(
            self._status,
            builtin_classes(),
            lambda: datetime.fromtimestamp(self._at),
        )
        self._windows = ScrapedWindows(self._follower.ledger)
        self._registry = make_registry(Status(targets=[self._status]))
        self._chunks = 0
        self._usage, self._waiting = 0.02, 0

    def lines(self) -> Iterator[str]:
        """The whole story of the engine, as samples."""
        acts = self._engine.acts
        while self._at < self._begin + acts[0].begin * MINUTE:
            yield from self._scraped()
            self._at += STEP
        for number, act in enumerate(acts):
            until = acts[number + 1].begin * MINUTE if number + 1 < len(acts) else LENGTH
            yield from self._act(act, self._begin + until)

    def _act(self, act: Act, until: float) -> Iterator[str]:
        """Start, serve, and end a minute before ``until`` if it ends at all."""
        self._log(self._start(act))
        self._up = act.ends != "start"
        last = until - MINUTE if act.ends else until
        near = [self._begin + minute * MINUTE for minute in act.near_misses]
        while self._at < until:
            if self._up and act.ends and self._at >= last:
                self._up = False
                self._log(self._server.die(self._rng.randrange(18_000, 30_000), self._server.running))
            elif self._up:
                self._log(self._serve(act))
            while near and self._at >= near[0]:
                self._log(_NEAR_MISS.format(at=self._now()))
                near.pop(0)
            yield from self._scraped()
            self._at += STEP

    def _start(self, act: Act) -> str:
        engine, server = self._engine, self._server
        server.now = self._now()
        if act.ends == "start":
            text = gzip.decompress((_CAPTURES / "kv_none_mp.log.gz").read_bytes()).decode()
            text = _CLOCK.sub(f"{server.now:%m-%d %H:%M:%S}", text)
        else:
            weights, peak, kv = engine.memory
            text = server.start(**act.settings)
            head, ready, rest = text.partition("INFO:     Application startup complete.")
            head, process, _ = head.rpartition("(")
            memory = _MEMORY.format(at=f"{server.now:%m-%d %H:%M:%S}", weights=weights, peak=peak, kv=kv)
            text = f"{head}{memory}{process}APIServer pid=6122) {ready}{rest}"
        text = text.replace("['tiny']", f"['{engine.model}']").replace("/models/tiny", engine.model)
        return text.replace("0.32.0", engine.version)

    def _serve(self, act: Act) -> str:
        rng, server = self._rng, self._server
        arrivals = max(0, round(rng.gauss(act.rate / 4, act.rate / 12)))
        prompts = tuple(
            rng.randrange(9000, 22_000)
            if rng.random() < act.long
            else min(8000, 1 + int(rng.lognormvariate(6.6, 0.9)))
            for _ in range(arrivals)
        )
        server.now = self._now()
        server.running = max(1, round(arrivals * rng.uniform(0.5, 0.9)))
        self._waiting = max(0, arrivals - 11)
        self._usage = min(0.95, 0.004 * server.running + sum(prompts) / 900_000 + 0.6 * self._usage)
        return server.serve(Window(prompts))

    def _log(self, text: str) -> None:
        self._chunks += 1
        chunk = Chunk("one", text.encode(), f'{{"at": {self._chunks}}}')
        self._follower.take("/var/log/vllm.log", chunk, self._at)

    def _scraped(self) -> Iterator[str]:
        """What Prometheus keeps of one scrape of the sidecar and of vLLM."""
        status, follower = self._status, self._follower
        for _ in range(25):
            follower.tick()
        follower.saved()
        exposition = self._exposition() if self._up else None
        status.scrape_up, status.scrape_seconds = self._up, 0.004 if self._up else None
        if exposition is not None and status.life is not None:
            self._windows.take(self._at, parse(exposition.encode()), status.life.index)
        logged = status.life.state if status.life else None
        status.engine_state = engine_state(Signs(logged, up=self._up, healthy=self._up))
        yield from self._stamped(generate_latest(self._registry).decode(), "vllm-oom-exporter", 10977)
        yield from self._sample("up", {"job": "vllm-oom-exporter"}, 10977, 1)
        if exposition is not None:
            yield from self._stamped(exposition, "vllm", 8000)
        yield from self._sample("up", {"job": "vllm"}, 8000, int(self._up))

    def _exposition(self) -> str:
        labels = f'model_name="{self._engine.model}",engine="0"'
        text = self._server.exposition().replace('model_name="tiny",engine="0"', labels)
        text = re.sub(r"(vllm:num_requests_waiting\{[^}]*\}) 0", rf"\1 {self._waiting}", text)
        return (
            f"{text}# TYPE {self._engine.usage} gauge\n{self._engine.usage}{{{labels}}} {self._usage:.4f}\n"
            f"# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{{{labels}}} 0\n"
        )

    def _stamped(self, exposition: str, job: str, port: int) -> Iterator[str]:
        own = self._labels(job, port)
        for line in exposition.splitlines():
            if line and not line.startswith(("#", "process_")):
                name, _, value = line.rpartition(" ")
                name = f"{name[:-1]},{own}}}" if name.endswith("}") else f"{name}{{{own}}}"
                yield f"{name} {value} {self._at:.3f}\n"

    def _sample(self, name: str, labels: dict[str, str], port: int, value: float) -> Iterator[str]:
        yield f"{name}{{{self._labels(labels['job'], port)}}} {value} {self._at:.3f}\n"

    def _labels(self, job: str, port: int) -> str:
        labels = {"job": job, "instance": f"{self._engine.host}:{port}", **self._engine.labels}
        return ",".join(f'{name}="{value}"' for name, value in labels.items())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._at)
