from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from exporter.sources.framing import MAX_LINE
from exporter.sources.scan import BLOCK
from exporter.sources.stdin import StdinSource
from exporter.sources.stream import Chunk

pytestmark = pytest.mark.asyncio

LONG = bool(os.environ.get("VLLM_OOM_LONG_TESTS"))
LINES = 2_000_000 if LONG else 50_000


class Ends:
    """Two pipes: the server writes into ``server``, who collects the copy reads ``collector``."""

    def __init__(self) -> None:
        self.source, self.server = os.pipe()
        self.collector, self.sink = os.pipe()
        self._open = {self.source, self.server, self.collector, self.sink}

    def close(self, *fds: int) -> None:
        """Close some ends, all that are left if none is named."""
        for fd in fds or tuple(self._open):
            self._open.discard(fd)
            os.close(fd)

    def collect(self) -> Callable[[], bytes]:
        """Read the copy in a thread; the result waits for its end."""
        got: list[bytes] = []

        def read() -> None:
            while block := os.read(self.collector, 1 << 16):
                got.append(block)

        thread = threading.Thread(target=read)
        thread.start()

        def result() -> bytes:
            self.close(self.sink)
            thread.join(20)
            return b"".join(got)

        return result

    def serve(self, data: bytes) -> None:
        """Write all of ``data`` in a thread, then close."""

        def write() -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.server, rest) :]
            self.close(self.server)

        threading.Thread(target=write).start()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """Fresh pipes, closed afterwards."""
    made = Ends()
    yield made
    made.close()


async def everything(source: StdinSource) -> list[Chunk]:
    """All chunks of a finite input."""
    async with asyncio.timeout(60):
        return [chunk async for chunk in source.chunks({"other": "{}"})]


async def test_lines_are_given_out_once_and_copied_unchanged(ends: Ends) -> None:
    """Under load every line is given out once, in order, and the copy equals the input to the byte."""
    data = b"".join(b"INFO 11-30 16:26:46 [core.py:%d] step \x1b[36m\xff\r\n" % n for n in range(LINES))
    copy = ends.collect()
    ends.serve(data)
    chunks = await everything(StdinSource(source=ends.source, sink=ends.sink))
    got = b"".join(chunk.data for chunk in chunks)
    written, read = data.splitlines(), got.splitlines()
    lost, doubled = len(set(written) - set(read)), len(read) - len(set(read))
    print(f"{len(written)} written, {len(read)} read, {lost} lost, {doubled} doubled")
    assert got == data
    assert await asyncio.to_thread(copy) == data
    assert all(chunk.data.endswith(b"\n") for chunk in chunks[:-1])
    assert [chunk.ended for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len({chunk.stream for chunk in chunks}) == 1


async def test_an_unfinished_line_waits_for_its_end(ends: Ends) -> None:
    """What has no newline yet is held back and comes with the rest of its line."""
    source = StdinSource(source=ends.source, sink=ends.sink)
    chunks = source.chunks({})
    os.write(ends.server, b"one\ntw")
    async with asyncio.timeout(20):
        first = await anext(chunks)
        assert first.data == b"one\n"
        assert os.read(ends.collector, 100) == b"one\ntw"  # the copy does not wait for lines
        os.write(ends.server, b"o\n")
        second = await anext(chunks)
        assert second.data == b"two\n"
        assert json.loads(second.token) == {"offset": 8}
        os.write(ends.server, b"three")
        ends.close(ends.server)
        last = await anext(chunks)
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
    assert (last.data, last.ended) == (b"three", True)
    assert source.stats.opened
    assert source.stats.problem is None
    assert source.stats.lag_bytes == 0


async def test_an_empty_input_ends_with_an_empty_chunk(ends: Ends) -> None:
    """The end is told even where there was nothing to read."""
    ends.close(ends.server)
    chunks = await everything(StdinSource(source=ends.source, sink=ends.sink))
    assert [(chunk.data, chunk.ended) for chunk in chunks] == [(b"", True)]


async def test_a_line_that_is_too_long_comes_in_pieces(ends: Ends) -> None:
    """A line beyond the limit is given out in pieces of the limit, and nothing of it is lost."""
    data = b"x" * (3 * MAX_LINE + 17) + b"\nshort\n"
    copy = ends.collect()
    ends.serve(data)
    chunks = await everything(StdinSource(source=ends.source, sink=ends.sink))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [len(chunk.data) for chunk in chunks[:2]] == [MAX_LINE] * 2
    assert all(len(chunk.data) <= MAX_LINE + BLOCK for chunk in chunks)
    assert await asyncio.to_thread(copy) == data


async def test_a_closed_standard_output_is_said_once_and_reading_goes_on(ends: Ends) -> None:
    """When nobody takes the copy any more, the log is still read to its end."""
    ends.close(ends.collector)
    source = StdinSource(source=ends.source, sink=ends.sink)
    ends.serve(b"line\n" * 50_000)
    chunks = await everything(source)
    assert sum(chunk.data.count(b"\n") for chunk in chunks) == 50_000
    assert source.stats.problem == ("standard output: Broken pipe; the log is read on but no longer copied")


async def test_partial_writes_and_full_pipes_lose_nothing(ends: Ends) -> None:
    """A standard output in non-blocking mode that takes little at a time still gets every byte."""
    os.set_blocking(ends.sink, False)
    os.set_blocking(ends.source, False)
    data = bytes(range(256)) * 4096 + b"\n"
    ends.serve(data)
    got: list[bytes] = []

    def read_slowly() -> None:
        while sum(map(len, got)) < len(data) and (block := os.read(ends.collector, 777)):
            got.append(block)

    slow = threading.Thread(target=read_slowly)
    slow.start()
    chunks = await everything(StdinSource(source=ends.source, sink=ends.sink))
    await asyncio.to_thread(slow.join, 20)
    assert b"".join(got) == data
    assert b"".join(chunk.data for chunk in chunks) == data


async def test_short_writes_are_completed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only a few bytes is gone on with, and one that fails for a while is said."""
    real, calls = os.write, 0

    def three_bytes(fd: int, data: bytes) -> int:
        nonlocal calls
        if fd != ends.sink:
            return real(fd, data)
        calls += 1
        if calls == 2:
            raise BlockingIOError(errno.EAGAIN, "try again")
        return real(fd, bytes(data[:3]))

    os.write(ends.server, b"twelve bytes")
    ends.close(ends.server)
    monkeypatch.setattr(os, "write", three_bytes)
    await everything(StdinSource(source=ends.source, sink=ends.sink))
    assert os.read(ends.collector, 100) == b"twelve bytes"
    assert calls == 5


async def test_a_full_disk_does_not_end_the_copy(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that can't be written is said and left out; later ones are copied again."""
    real, failed = os.write, False

    def full_once(fd: int, data: bytes) -> int:
        nonlocal failed
        if fd == ends.sink and not failed:
            failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full_once)
    source = StdinSource(source=ends.source, sink=ends.sink)
    chunks = source.chunks({})
    async with asyncio.timeout(20):
        real(ends.server, b"lost\n")
        assert (await anext(chunks)).data == b"lost\n"
        real(ends.server, b"kept\n")
        assert (await anext(chunks)).data == b"kept\n"
    assert os.read(ends.collector, 100) == b"kept\n"
    assert source.stats.problem == (
        "standard output: No space left on device; a part of the log was not copied"
    )
    await chunks.aclose()  # type: ignore[attr-defined]


async def test_a_consumer_that_stops_does_not_block_the_server(ends: Ends) -> None:
    """When nobody takes the lines, memory stays bounded, lines are dropped and that is said once."""
    source = StdinSource(source=ends.source, sink=ends.sink, buffer=1 << 16, patience=0.0)
    chunks = source.chunks({})
    copy = ends.collect()
    os.write(ends.server, b"first\n")
    async with asyncio.timeout(20):
        assert (await anext(chunks)).data == b"first\n"
        line = b"y" * 1023 + b"\n"

        def flood() -> None:
            for _ in range(2000):
                os.write(ends.server, line)
            ends.close(ends.server)

        await asyncio.to_thread(flood)  # returns: the server is never blocked for good
        # all of it has come in, so that nothing is dropped behind the first that is taken
        for thread in threading.enumerate():
            if thread.name == "stdin":
                await asyncio.to_thread(thread.join)
        rest = [chunk async for chunk in chunks]
    assert rest[-1].ended
    assert sum(len(chunk.data) for chunk in rest) <= 4 << 16
    assert source.stats.read_errors == 1
    assert source.stats.problem == "standard input comes faster than it is read; lines were dropped"
    assert await asyncio.to_thread(copy) == b"first\n" + line * 2000


async def test_stopping_leaves_unread_input_alone(ends: Ends) -> None:
    """After the source was stopped, its thread takes nothing more from standard input."""
    source = StdinSource(source=ends.source, sink=ends.sink)
    chunks = source.chunks({})
    os.write(ends.server, b"one\n")
    async with asyncio.timeout(20):
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        for thread in threading.enumerate():
            if thread.name == "stdin":
                await asyncio.to_thread(thread.join, 10)
    os.write(ends.server, b"two\n")
    assert os.read(ends.source, 100) == b"two\n"


async def test_a_broken_standard_input_is_its_end(ends: Ends) -> None:
    """Standard input that can't be read at all ends the stream, with the reason."""
    unused = 1023  # no descriptor has this number: those in use are the lowest
    chunks = await everything(source := StdinSource(source=unused, sink=ends.sink))
    assert [(chunk.data, chunk.ended) for chunk in chunks] == [(b"", True)]
    assert source.stats.read_errors == 1
    assert source.stats.problem == "standard input: Bad file descriptor; taken as its end"


async def test_a_regular_file_as_standard_input(ends: Ends, tmp_path: Path) -> None:
    """``run --log - < file`` reads the file to its end, and two runs are two streams."""
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    streams = set()
    for _ in range(2):
        fd = os.open(path, os.O_RDONLY)
        chunks = await everything(StdinSource(source=fd, sink=ends.sink))
        os.close(fd)
        assert b"".join(chunk.data for chunk in chunks) == b"one\ntwo\n"
        streams.add(chunks[0].stream)
    assert len(streams) == 2
