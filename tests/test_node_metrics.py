"""One answer of ``/metrics`` for many servers: the same text as for few, and nobody waits for it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.exposition import choose_encoder
from test_metrics import filled_target

from exporter.metrics import TABLE, Family, Reading, Single, make_registry
from exporter.status import Status
from exporter.web import app as web_app
from exporter.web.app import FEW, make_app

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def servers(count: int) -> Status:
    """That many servers of a node; some have the labels of another, one is not followed."""
    status = Status()
    for number in range(count):
        one = filled_target()
        one.name = f"prod/llama-{number}/vllm"
        one.labels = {"namespace": "prod", "pod": f"llama-{number % (count - 1)}", "container": "v\x1bllm"}
        one.counts.error_lines += number
        one.followed = number != 2
        status.targets.append(one)
    return status


Client = Callable[[Status], Any]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Serves a status."""
    started: list[TestClient[Any, Any]] = []

    async def start(status: Status) -> TestClient[Any, Any]:
        app = make_app(status, classes={}, reload=None, enable_lifecycle=False, hide_excerpts=False)
        one = TestClient(TestServer(app), auto_decompress=False)
        await one.start_server()
        started.append(one)
        return one

    yield start
    for one in started:
        await one.close()


def without_process(text: bytes) -> bytes:
    """What does not change between two answers."""
    return b"".join(line for line in text.splitlines(keepends=True) if b"process_" not in line)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("accept", ["", OPENMETRICS, "text/plain;version=1.0.0;escaping=allow-utf-8"])
@pytest.mark.parametrize("count", [FEW, FEW + 1, 32])
async def test_it_is_what_the_library_writes(count: int, accept: str, packed: bool, client: Client) -> None:
    """Byte for byte, in every format."""
    status = servers(count)
    headers = {"Accept": accept, "Accept-Encoding": "gzip" if packed else "identity"}
    response = await (await client(status)).get("/metrics", headers=headers)
    body = await response.read()
    encode, content_type = choose_encoder(accept)
    assert response.headers["Content-Type"] == content_type
    text = gzip.decompress(body) if packed else body
    assert b"process_cpu_seconds" in text
    assert without_process(text) == without_process(encode(make_registry(status)))


@pytest.mark.parametrize(("piece", "each"), [(0.0, True), (1000.0, False)])
async def test_others_have_their_turn(
    piece: float, each: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Between servers that are read and families that are encoded, once that took long enough; not more often.

    They may have a lot to do, and a scrape that gave way a hundred times would wait a hundred times for it.
    """
    monkeypatch.setattr(web_app, "PIECE_SECONDS", piece)
    one, turns, read, encoded = await client(servers(32)), [0], list[int](), list[int]()
    reading, collect = Family.read, Single.collect

    def reads(family: Family[Any], *given: Any) -> None:
        if family is TABLE[0]:
            read.append(turns[0])
        reading(family, *given)

    def collects(single: Single) -> Any:
        encoded.append(turns[0])
        return collect(single)

    monkeypatch.setattr(Family, "read", reads)
    monkeypatch.setattr(Single, "collect", collects)

    async def other() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    response = await one.get("/metrics")
    task.cancel()
    assert response.status == 200
    assert len(read) == 31  # one is not followed
    assert len(encoded) > 40
    assert (len(set(read)), len(set(encoded))) == ((31, len(encoded)) if each else (1, 1))


async def test_one_answer_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many that ask at once get theirs one after the other, from fresh values."""
    status = servers(FEW + 1)
    one, begun = await client(status), list[int]()
    families = Reading.families

    def counted(reading: Reading) -> Any:
        begun.append(0)
        for metric in families(reading):
            begun[-1] += 1
            yield metric

    monkeypatch.setattr(Reading, "families", counted)
    answers = await asyncio.gather(*(one.get("/metrics") for _ in range(8)))
    assert [answer.status for answer in answers] == [200] * 8
    assert len(begun) == 8
    assert len(set(begun)) == 1  # what is begun is brought to its end before the next
