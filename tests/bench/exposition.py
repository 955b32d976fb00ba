"""Compares how fast vLLM's ``/metrics`` is read: ours beside prometheus_client's own parser.

Why: the exporter reads the whole exposition of its server every two seconds and wants some sixty
lines for each engine. prometheus_client's parser is what one would use otherwise; it reads every
line of it.

The expositions are made from a real one (vLLM 0.32.0): its series repeated for several engines,
then series of the HTTP server for many handlers, until the wanted length. Both parsers read the
same bytes in the same process; CPU seconds are compared, the median of several runs counts, and
the sums of all wanted families have to agree. Nothing is asserted on time.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exporter.vllm.exposition import Histogram, Snapshot, parse

REAL = Path(__file__).parent.parent / "expositions" / "real_base_eager_after.prom.gz"
CASES = ((1_600, 1), (1_600, 3), (20_000, 1), (20_000, 48))


def exposition(lines: int, engines: int) -> bytes:
    """About ``lines`` lines, with the series of ``engines`` engines."""
    text: list[str] = []
    for line in gzip.decompress(REAL.read_bytes()).decode().splitlines():
        if 'engine="0"' in line:
            text += [line.replace('engine="0"', f'engine="{number}"') for number in range(engines)]
        else:
            text.append(line)
    handler = 0
    while len(text) < lines:
        name, handler = f"http_route_{handler:04}_duration_seconds", handler + 1
        labels = f'handler="/v1/route/{handler}",method="POST",status="2xx"'
        text += [f"# HELP {name} Latency of requests to the route.", f"# TYPE {name} histogram"]
        text += [f'{name}_bucket{{{labels},le="{2.0**n}"}} {n * handler}.0' for n in range(-4, 12)]
        text += [f'{name}_bucket{{{labels},le="+Inf"}} {12 * handler}.0']
        text += [f"{name}_count{{{labels}}} {12 * handler}.0", f"{name}_sum{{{labels}}} {handler * 0.37}"]
    return ("\n".join(text[:lines]) + "\n").encode()


def ours(body: bytes) -> Snapshot:
    """What the exporter does."""
    return parse(body)


def theirs(body: bytes) -> dict[str, list[float]]:
    """What one would do with prometheus_client: every value, by the name of its sample."""
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def agree(snapshot: Snapshot, values: dict[str, list[float]]) -> bool:
    """Whether both parsers found the same in the wanted families."""
    sums: Counter[str] = Counter()

    def add(name: str, value: float | None) -> None:
        sums[name] += value if value is not None else math.nan  # type: ignore[assignment]

    def add_histogram(name: str, histogram: Histogram | None) -> None:
        assert histogram is not None
        add(f"{name}_bucket", math.fsum(histogram.counts))
        add(f"{name}_count", histogram.count)
        add(f"{name}_sum", histogram.sum)

    for engine in snapshot.engines:
        add("vllm:num_requests_running", engine.running)
        add("vllm:num_requests_waiting", engine.waiting)
        add("vllm:kv_cache_usage_perc", engine.kv_cache_usage)
        add("vllm:num_preemptions_total", engine.preemptions)
        add("vllm:prompt_tokens_total", engine.prompt_tokens)
        add("vllm:generation_tokens_total", engine.generation_tokens)
        add("vllm:request_success_total", math.fsum((engine.finished or {}).values()))
        add("vllm:engine_sleep_state", math.fsum((engine.sleep or {}).values()))
        add("vllm:cache_config_info", 1.0 if engine.cache else 0.0)
        add_histogram("vllm:request_prompt_tokens", engine.request_prompt_tokens)
        add_histogram("vllm:iteration_tokens_total", engine.iteration_tokens)
    add("process_start_time_seconds", snapshot.process_start)
    return all(math.isclose(total, math.fsum(values.get(name, ()))) for name, total in sums.items())


def cpu_seconds(call: Callable[[bytes], object], body: bytes, runs: int, repeats: int) -> float:
    """The median CPU seconds of one call, after one to warm up."""
    call(body)
    taken = []
    for _ in range(runs):
        started = time.process_time()
        for _ in range(repeats):
            call(body)
        taken.append((time.process_time() - started) / repeats)
    return statistics.median(taken)


def main() -> int:
    """``exposition.py``: measure and print. Exit code 1 if the parsers disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7, help="runs of each parser; default: 7")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error("runs begin at 1")
    print(f"- machine: {platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    version = importlib.metadata.version("prometheus_client")
    print(
        f"- Python {platform.python_version()}, prometheus_client {version}; CPU time, median of {runs} runs\n"
    )
    print("| lines | engines | KB | ours, ms | prometheus_client, ms | ratio | same values |")
    print("|---:|---:|---:|---:|---:|---:|---|")
    right = True
    for lines, engines in CASES:
        body = exposition(lines, engines)
        same = agree(ours(body), theirs(body))
        right &= same
        our_time = cpu_seconds(ours, body, runs, max(1, 100_000 // lines))
        their_time = cpu_seconds(theirs, body, runs, max(1, 2_000 // lines))
        print(
            f"| {body.count(10):,} | {engines} | {len(body) / 1e3:,.0f} | {our_time * 1e3:.2f} "
            f"| {their_time * 1e3:,.1f} | {their_time / our_time:.0f} × | {'yes' if same else 'NO'} |"
        )
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
