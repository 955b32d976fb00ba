"""Shows what the trigger test can and can't tell, on synthetic traffic whose truth is known.

Why: a p-value is worth what its false positives are. Each run makes ten hours of traffic (windows
of 15 s, a log-rate that wanders, log-normal prompts), lets failures happen in it by one of three
truths, and hands to ``event`` and ``judge`` what they would have seen:

``length``    every prompt of more than 8,000 tokens kills with the same probability
``rate``      windows above the busiest tenth kill, the busier the more
``neither``   any window kills

and by what is known of the failing window:

``dump``      its longest prompt, the failing step included, as ``event`` asks for
``step``      the failing step alone against whole windows: the mistake that ``event`` warns of
``censored``  what a histogram of finished requests holds, passed off as a dump: no power
``metrics``   the same, called what it is: ``event`` refuses the length, only the rate takes part

Failures are independent and more than ``REPEAT_SECONDS`` apart, so k is k_eff; each sees only
windows before it. The same traffic serves all rows, so rows are not independent of each other. What shows
mistakes, all but ``dump``, is run a quarter as often.
Nothing is asserted here; ``tests/test_trigger.py`` runs a small version with wide bounds.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist

from exporter.diagnosis.exposure import WINDOW_SECONDS, Failed, Window
from exporter.diagnosis.trigger import (
    CONTROLS,
    ENOUGH_CONTROLS,
    REPEAT_SECONDS,
    Comparison,
    Event,
    Trigger,
    event,
    exact_pvalue,
    judge,
)

TRUTHS = ("length", "rate", "neither")
KNOWN = ("dump", "step", "censored", "metrics")
SIZES = (1, 2, 3, 8)
WINDOWS = 2400
BEFORE_FIRST = 600  # windows that ran well before the first failure
WARM_UP = 4
LONG = 8000  # tokens
VERDICTS = ("insufficient", "descriptive", "mixed", "supports", "contradicts")

_PROMPT = NormalDist(math.log(900), 0.9)  # of the logarithm of tokens
_SHORT = _PROMPT.cdf(math.log(LONG))
_APART = math.ceil(REPEAT_SECONDS / WINDOW_SECONDS) + 1


@dataclass(slots=True)
class Traffic:
    """Of every window: requests, longest prompt, and the prompts beyond ``LONG``, longest first."""

    requests: list[int]
    longest: list[float]
    long: list[list[float]]


def traffic(rng: random.Random, windows: int = WINDOWS) -> Traffic:
    """A log-rate that follows an AR(1), some 12 requests a window, log-normal prompts."""
    made = Traffic([], [], [])
    wander = 0.0
    for _ in range(windows):
        wander = 0.97 * wander + 0.24 * rng.gauss(0, 1)
        requests = _poisson(rng, 12 * math.exp(0.5 * wander))
        # the largest of n draws is the quantile of the n-th root of one
        share = rng.random() ** (1 / requests) if requests else 0.0
        longest, long = (_quantile(share) if requests else 0.0), []
        if share > _SHORT:
            others = (rng.random() * share for _ in range(requests - 1))
            long = [longest, *sorted((_quantile(one) for one in others if one > _SHORT), reverse=True)]
        made.requests.append(requests)
        made.longest.append(longest)
        made.long.append(long)
    return made


def _quantile(share: float) -> float:
    return float(round(math.exp(_PROMPT.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))))


def _poisson(rng: random.Random, mean: float) -> int:
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def hazard(made: Traffic, truth: str) -> list[float]:
    """How likely every window is to fail, up to a factor."""
    if truth == "length":
        return [float(len(one)) for one in made.long]
    if truth == "rate":
        busy = sorted(made.requests)[int(0.9 * len(made.requests))]
        return [float(max(0, one - busy)) for one in made.requests]
    return [1.0 for _ in made.requests]


def failures(rng: random.Random, weights: Sequence[float], most: int) -> list[int]:
    """Windows that fail, as drawn, none so soon after another that it would be a repeat."""
    sums = list(accumulate(weights[BEFORE_FIRST:]))
    chosen: list[int] = []
    for _ in range(1000):
        if len(chosen) == most or not sums[-1]:
            break
        at = BEFORE_FIRST + bisect_left(sums, rng.random() * sums[-1], hi=len(sums) - 1)
        if weights[at] and all(abs(at - one) > _APART for one in chosen):
            chosen.append(at)
    return chosen  # the first k of them are a draw of k


def observed(rng: random.Random, made: Traffic, truth: str, known: str, fails: Sequence[int]) -> list[Event]:
    """What ``event`` makes of the failures, in the order they were drawn."""
    pool: list[Window] = []
    events: dict[int, Event] = {}
    last = 0
    for life, at in enumerate(sorted(fails)):
        pool += [
            Window((one + 1) * WINDOW_SECONDS, life, made.longest[one], made.requests[one])
            for one in range(last and last + 1 + WARM_UP, at)
        ]
        last = at
        longest, rate = made.longest[at], made.requests[at]
        killer = rng.choice(made.long[at]) if truth == "length" else longest
        length = longest
        if known == "step":
            length = killer if truth == "length" else _prompt_below(rng, longest)
        elif known in ("censored", "metrics") and truth == "length":
            length = max((one for one in made.long[at] if one != killer), default=_rest(rng, rate - 1))
        source = "metrics" if known == "metrics" else "dump"
        failed = Failed(f"{life}", None, "prefill_budget", "serving", True)
        when = at * WINDOW_SECONDS + WINDOW_SECONDS / 2
        events[at] = event(failed, life, when, length, rate, source, pool, life * (WARM_UP + 1))
    return [events[at] for at in fails]


def _prompt_below(rng: random.Random, longest: float) -> float:
    """Any prompt of a window with this longest one."""
    return _quantile(rng.random() * _PROMPT.cdf(math.log(longest))) if longest else 0.0


def _rest(rng: random.Random, requests: int) -> float:
    """The longest of some prompts of which none is beyond ``LONG``."""
    return _quantile(rng.random() ** (1 / requests) * _SHORT) if requests > 0 else 0.0


@dataclass(slots=True)
class Cell:
    """What came of the runs of one row."""

    runs: int = 0
    length: int = 0
    rate: int = 0
    compared: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)

    def add(self, events: Sequence[Event], trigger: Trigger) -> None:
        """One run. The tests are asked directly, whether or not the verdict may use them."""
        self.runs += 1
        lengths = [one.length for one in events if one.length and len(one.length.controls) >= ENOUGH_CONTROLS]
        rates = [one.rate for one in events if one.rate and len(one.rate.controls) >= ENOUGH_CONTROLS]
        self.length += bool(lengths) and exact_pvalue(lengths) < 0.05
        self.rate += bool(rates) and exact_pvalue(rates) < 0.05
        self.compared += len(lengths) == len(rates) == len(events)
        self.verdicts[trigger.verdict] += 1

    def merge(self, other: Cell) -> None:
        """Add the runs of ``other``."""
        self.runs += other.runs
        self.length += other.length
        self.rate += other.rate
        self.compared += other.compared
        self.verdicts += other.verdicts


Key = tuple[str, str, int]


def rows() -> Iterator[Key]:
    """Truth, what is known, k: the rows of the table."""
    for known in KNOWN:
        for truth in TRUTHS:
            if known != "censored" or truth == "length":
                for size in SIZES:
                    yield truth, known, size


def simulate(seed: int, runs: int, wanted: Sequence[Key]) -> dict[Key, Cell]:
    """``runs`` runs of every row in ``wanted``."""
    rng = random.Random(seed)  # noqa: S311 - a simulation
    cells = {key: Cell() for key in wanted}
    for run in range(runs):
        made = traffic(rng)
        for truth in dict.fromkeys(key[0] for key in wanted):
            fails = failures(rng, hazard(made, truth), max(SIZES))
            for known in dict.fromkeys(key[1] for key in wanted if key[0] == truth):
                if known != "dump" and run % 4:
                    continue
                events = observed(rng, made, truth, known, fails)
                for size in (one for one in SIZES if (truth, known, one) in cells and one <= len(events)):
                    cells[truth, known, size].add(events[:size], judge(events[:size]))
    return cells


def _table(cells: dict[Key, Cell]) -> Iterator[str]:
    yield (
        "| truth | known | k | runs | p(length) < .05 | p(rate) < .05 | all compared | "
        + " | ".join(VERDICTS)
        + " |"
    )
    yield "|---|---|---:|" + "---:|" * (4 + len(VERDICTS))
    for (truth, known, size), cell in cells.items():
        shares = [cell.length, cell.rate, cell.compared, *(cell.verdicts[one] for one in VERDICTS)]
        shown = " | ".join(f"{share / cell.runs:.3f}" if cell.runs else "–" for share in shares)
        yield f"| {truth} | {known} | {size} | {cell.runs} | {shown} |"


def _cost(rng: random.Random) -> Iterator[str]:
    """CPU time of one p-value, and of a whole verdict on as many failures."""
    yield "| k | p-value | verdict |"
    yield "|---:|---:|---:|"
    for size in (1, 2, 3, 8, 10, 20, 50, 100):
        sets = [Comparison(rng.random(), tuple(rng.random() for _ in range(CONTROLS))) for _ in range(size)]
        events = [Event(f"{n}", n, n * 3600.0, "dump", one, one, (), 0) for n, one in enumerate(sets)]
        took = []
        for work in (lambda s=sets: exact_pvalue(s), lambda e=events: judge(e)):
            times = []
            for _ in range(20):
                began = time.process_time()
                work()
                times.append(time.process_time() - began)
            took.append(f"{min(times) * 1e3:.2f} ms")
        yield f"| {size} | {' | '.join(took)} |"


def main() -> None:
    """Print the table, then what a test costs."""
    parser = argparse.ArgumentParser(description="Operating characteristics of the trigger test.")
    parser.add_argument("--runs", type=int, default=2000, help="runs a row (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--known", nargs="+", choices=KNOWN, default=KNOWN, help="only these rows")
    args = parser.parse_args()
    wanted = [key for key in rows() if key[1] in args.known]
    batches = [min(20, args.runs - at) for at in range(0, args.runs, 20)]
    cells = {key: Cell() for key in wanted}
    began = time.monotonic()
    with ProcessPoolExecutor(args.processes) as executor:
        seeds = range(args.seed * 1_000_000, args.seed * 1_000_000 + len(batches))
        for done, part in enumerate(executor.map(simulate, seeds, batches, [wanted] * len(batches)), 1):
            for key, cell in part.items():
                cells[key].merge(cell)
            print(f"\r{done}/{len(batches)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"Python {platform.python_version()}, seed {args.seed}, {time.monotonic() - began:.0f} s.\n")
    print("\n".join([*_table(cells), "", *_cost(random.Random(args.seed))]))  # noqa: S311 - as above


if __name__ == "__main__":
    main()
