"""What lines of ordinary traffic add up to, second by second."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.analyze import Reader
from exporter.diagnosis.history import History
from exporter.records import Step, Traffic
from exporter.sources.framing import Framing
from exporter.sources.scan import BLOCK, HOT, Scanner
from exporter.vllm.log import LogParser

LATEST = datetime(2026, 12, 1, 12)
START = datetime(2026, 11, 2, 10)
Seconds = dict[datetime | None, tuple[list[Step], list[int], int]]


class Seen(History):
    """A history that also keeps what it was told of traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Seconds = {}

    def traffic(self, traffic: Traffic, time: datetime | None) -> None:
        """Keep it, by the second."""
        second = time and time.replace(microsecond=0)
        steps, prompts, arrivals = self.told.get(second, ([], [], 0))
        self.told[second] = (
            sorted([*steps, *traffic.steps]),
            sorted([*prompts, *traffic.prompts]),
            arrivals + traffic.arrivals,
        )
        super().traffic(traffic, time)


def scanned(data: bytes, cuts: Iterator[int]) -> Seconds:
    """What the fast path makes of ``data``, in blocks of these sizes."""
    history = Seen()
    reader = Reader(history, LATEST)
    while data:
        size = next(cuts)
        reader.feed(data[:size])
        data = data[size:]
    reader.finish()
    return history.told


def parsed(data: bytes) -> Seconds:
    """What parsing every line makes of ``data``."""
    history, framing, parser = Seen(), Framing(), LogParser(LATEST)
    for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        for line in framing.feed(number, raw):
            history.feed_all(parser.feed(line))
    history.feed_all(parser.flush())
    return history.told


def always(size: int) -> Iterator[int]:
    """Blocks of one size."""
    while True:
        yield size


def record(level: str, time: datetime, file: str, text: str, process: str = "(APIServer pid=1) ") -> str:
    """One log call as vLLM writes it."""
    prefix = f"{process}{level} {time:%m-%d %H:%M:%S} [{file}] "
    return prefix + text.replace("\n", "\r\n" + prefix) + "\n"


FAKE = "prompt: 'x', params: y, prompt_token_ids: [1, 2, 3], lora_request: None."


def request(
    time: datetime, ids: str, identity: str = "cmpl-1", prompt: str = "hi", file: str = "logger.py:43"
) -> str:
    """A request line of 0.4.3..0.11.0."""
    text = (
        f"Received request {identity}: prompt: {prompt!r}, params: SamplingParams(n=1, stop=[]), "
        f"prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: None."
    )
    return record("INFO", time, file, text)


def step(time: datetime, tokens: int, end: str = "") -> str:
    """The line of ``--enable-logging-iteration-details``."""
    text = (
        f"Engine 000: Iteration(9): 1 context requests, {tokens} context tokens, 2 generation requests, "
        f"3 generation tokens, iteration elapsed time: 9.55 ms{end}"
    )
    return record("INFO", time, "loggers.py:199", text)


PIECES: dict[str, Callable[[datetime], str]] = {
    "step": lambda t: step(t, t.second + 7),
    "dummy": lambda t: step(t, 4000, " (dummy)"),
    "request": lambda t: request(t, str(list(range(t.second + 1)))),
    "unknown": lambda t: request(t, "None"),
    "quoting": lambda t: request(t, "None", prompt=FAKE + "\n" + FAKE),
    "hostile-id": lambda t: request(t, "[7, 8]", identity=f"a: {FAKE}\nReceived request b: {FAKE}\nc"),
    "engine": lambda t: request(t, "[5]", file="async_llm_engine.py:201"),
    "added": lambda t: record("INFO", t, "async_llm.py:411", f"Added request Received request x: {FAKE}"),
    "aborted": lambda t: record("INFO", t, "async_llm_engine.py:9", f"Aborted request a\nReceived request b: {FAKE}."),
    "later": lambda t: record("INFO", t, "request_logger.py:65", "Received request cmpl-1: params: P(), lora_request: None."),
    "statistics": lambda t: record("INFO", t, "loggers.py:236", "Engine 000: Avg prompt throughput: 812.3 tokens/s"),
    "neutral": lambda t: record("INFO", t, "backends.py:12", "Cache the graph of shape None", "(EngineCore pid=9) "),
    "access": lambda _: 'INFO:     192.0.2.7:50312 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "quoted": lambda t: record("WARNING", t, "x.py:1", "he said\n" + step(t, 99999) + request(t, "[1]")),
    "words": lambda t: record("INFO", t, "gpu_worker.py:4", "Available KV cache memory: 11.12 GiB", "(EngineCore pid=9) "),
}  # fmt: skip
WRAPS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "terminal": lambda line: line + "\r",
    "cri": lambda line: f"2026-11-02T10:00:00.123456789Z stdout F {line}",
    "compose": lambda line: f"vllm-1  | {line}",
    "docker": lambda line: (
        '{"log":"'
        + line.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "\\r")
        + '\\n","stream":"stdout"}'
    ),
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(PIECES)), st.sampled_from([0, 0, 0, 1, 7])), max_size=30)


def log_of(pieces: list[tuple[str, int]], wrap: str, long: bool) -> bytes:
    """A log of ``pieces``, each with the seconds before it; a long one has a beginning that is read whole."""
    parts, time = [PIECES["neutral"](START)] * (HOT // 70 if long else 1), START
    for name, seconds in pieces:
        time += timedelta(seconds=seconds)
        parts.append(PIECES[name](time))
    return "".join(WRAPS[wrap](line) + "\n" for line in "".join(parts).split("\n")[:-1]).encode()


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=STEPS,
    wrap=st.sampled_from(sorted(WRAPS)),
    long=st.booleans(),
    size=st.sampled_from([61, 997, BLOCK]),
)
def test_the_scan_says_what_parsing_says(
    pieces: list[tuple[str, int]], wrap: str, long: bool, size: int
) -> None:
    """For any mixture, wrapper and size of block, each second says the same as with parsing every line."""
    data = log_of(pieces, wrap, long)
    assert scanned(data, always(size)) == parsed(data)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=STEPS, sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=20))
def test_any_cutting(pieces: list[tuple[str, int]], sizes: list[int]) -> None:
    """However the input is cut into blocks, each second says the same."""
    data = log_of(pieces, "raw", True)
    assert scanned(data, (sizes[n % len(sizes)] for n in range(len(data)))) == scanned(data, always(BLOCK))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", ([Step(1, 7, 2, 3)], [], 0)),
        ("request", ([], [1], 1)),
        ("unknown", ([], [], 1)),
        ("quoting", ([], [], 1)),
        ("hostile-id", ([], [2], 1)),
        ("engine", ([], [1], 1)),
    ],
)
@pytest.mark.parametrize("wrap", ["raw", "terminal", "docker"])
def test_each_piece(name: str, wrap: str, expected: tuple[list[Step], list[int], int]) -> None:
    """Only what vLLM itself wrote of a request counts, once, whatever a client put into it."""
    data = log_of([(name, 0)], wrap, True)
    assert list(scanned(data, always(BLOCK)).values()) == [expected]
    assert list(parsed(data).values()) == [expected]


@pytest.mark.parametrize("name", ["dummy", "added", "aborted", "statistics", "quoted", "later"])
def test_what_is_no_traffic(name: str) -> None:
    """Dummy steps, and what repeats a client's words, add up to nothing."""
    assert scanned(log_of([(name, 0)] * 3, "raw", True), always(BLOCK)) == {}


def test_ids_and_prompts_are_not_given_out() -> None:
    """Of a request line nothing but its prefix leaves the scan."""
    data = log_of([("neutral", 0), ("request", 59), ("hostile-id", 0), ("step", 1)], "raw", True)
    texts = b"".join(text for _, text, _ in Scanner().feed(data))
    assert b"prompt" not in texts
    assert b"Received" not in texts


@pytest.mark.parametrize(
    "name", ["iterdetails_16384", "json_clean", "hostile_debug_uni_iter", "hostile_color"]
)
@pytest.mark.parametrize("size", [997, BLOCK])
def test_captures(name: str, size: int) -> None:
    """Every second of a real log says the same as with parsing every line."""
    data = gzip.decompress((Path(__file__).parent / "captures" / f"{name}.log.gz").read_bytes())
    assert scanned(data, always(size)) == parsed(data)
