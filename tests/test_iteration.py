from __future__ import annotations

from datetime import datetime

import pytest

from exporter.records import Line, Record, TrafficSeen
from exporter.vllm.iteration import iterations
from exporter.vllm.log import LogParser
from exporter.vllm.signals import signals


def record(text: str) -> Record:
    """An INFO record with ``text``."""
    return Record("EngineCore", 104, "INFO", None, "loggers.py", (text,), (1,))


STEP = "Iteration(812): 3 context requests, 8100 context tokens, 41 generation requests, 92 generation tokens"


@pytest.mark.parametrize(
    "text",
    [
        f"{STEP}, iteration elapsed time: 310.55 ms",
        f"Engine 000: {STEP}, iteration elapsed time: 310.55 ms, GPU KV cache usage: 12.3%",
        f"Engine 011: {STEP}, iteration elapsed time: 9.1 ms, GPU KV cache usage: 0.1%, encoder inputs: 2, "
        "encoder output embeddings: 512",
    ],
    ids=["0.14", "0.26", "encoder"],
)
def test_a_step(text: str) -> None:
    """The true tokens of a step are read in the wording of every version."""
    (step,) = iterations(record(text))
    assert (step.context_requests, step.context_tokens) == (3, 8100)
    assert (step.generation_requests, step.generation_tokens) == (41, 92)
    assert step.tokens == 8192


@pytest.mark.parametrize(
    "text",
    [
        f"Engine 001: {STEP}, iteration elapsed time: 1.00 ms (dummy), GPU KV cache usage: 0.0%",
        f"he sent: {STEP}",
        "Iteration(812): 3 context requests, 8100 context tok",
        "Engine 000: Avg prompt throughput: 0.0 tokens/s",
        "",
    ],
    ids=["dummy", "quoted", "cut", "statistics", "empty"],
)
def test_what_is_no_step(text: str) -> None:
    """Dummy steps of data parallel, quotes and cut lines are no steps."""
    assert iterations(record(text)) == ()


def test_a_huge_step() -> None:
    """A step of thousands of digits is no step, and stops nothing."""
    assert iterations(record(STEP.replace("8100", "9" * 5000))) == ()


def test_the_steps_of_one_second() -> None:
    """A server makes many steps a second, from one place in the code: each of them counts."""
    parser = LogParser(datetime(2026, 11, 30))
    prefix = "(APIServer pid=1) INFO 11-02 10:00:00 [loggers.py:199] Engine 000: "
    records = [
        record
        for number, tokens in enumerate((100, 8190, 200), 1)
        for record in parser.feed(Line(number, prefix + STEP.replace("8100", str(tokens))))
    ]
    records += parser.flush()
    assert [step.context_tokens for record in records for step in iterations(record)] == [100, 8190, 200]
    found = [signal for record in records for signal in signals(record)]
    steps = [step for one in found if isinstance(one, TrafficSeen) for step in one.traffic.steps]
    assert [step.context_tokens for step in steps] == [100, 8190, 200]


def test_a_step_behind_something_else_is_none() -> None:
    """A record that does not begin with a step may quote one in a later line."""
    several = Record("APIServer", 1, "INFO", None, "x.py", ("he sent", STEP), (1, 2))
    assert iterations(several) == ()
