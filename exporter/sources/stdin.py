"""Standard input as a log, copied through to standard output as if the exporter were not there.

``vllm serve … > >(vllm-oom-exporter run --log -) 2>&1`` puts this process between the server and
whoever collects its output. Two things follow. The copy comes first: every block is written
before it is looked at. And the server must never be stopped by its monitor: if nobody takes the
lines, at most ``BUFFER`` bytes are kept, and after ``PATIENCE`` seconds lines are dropped and
that is said, because a full pipe would block the server in the middle of a step.

Reading and writing may block, so a thread of its own does both, whatever the two ends are:
pipes, files, terminals or sockets, blocking or not.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import select
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

from .framing import MAX_LINE
from .scan import BLOCK
from .stream import Chunk, SourceStats

BUFFER = 8 << 20
PATIENCE = 5.0

_BLOCK = 64 << 10  # what a pipe holds
_CLOSED = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ECONNRESET, errno.ENXIO)


class StdinSource:
    """Standard input, as a ``Source`` that ends. Run it once: what was read can't be read again.

    ``source`` and ``sink`` are file descriptors; they stay open. The stream gets a new identity
    in every run, since nothing of an earlier run can be read again, and ``resume`` is ignored.
    """

    def __init__(
        self,
        name: str = "-",
        *,
        source: int = 0,
        sink: int = 1,
        buffer: int = BUFFER,
        patience: float = PATIENCE,
    ) -> None:
        self.stats = SourceStats(name)
        self._stream = f"stdin-{secrets.token_hex(6)}"
        self._queue = _Queue(buffer, patience)
        self._pump = _Pump(source, sink, self._queue)

    async def chunks(self, resume: Mapping[str, str]) -> AsyncIterator[Chunk]:  # noqa: ARG002 - nothing to resume
        """Chunks of whole lines until the end of the input; the last one has ``ended``."""
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to wake
                loop.call_soon_threadsafe(ready.set)

        self._queue.wake = wake
        threading.Thread(target=self._pump.run, name="stdin", daemon=True).start()
        self.stats.opened = True
        rest, offset, ended = b"", 0, False
        try:
            while not ended:
                block, ended = self._queue.take()
                if not block and not ended:
                    await ready.wait()
                    ready.clear()
                data, rest = _whole_lines(rest + block)
                self._tell(len(rest))
                if data:
                    offset += len(data)
                    yield self._chunk(data, offset)
                    await asyncio.sleep(0)
            self._tell(0)
            yield self._chunk(rest, offset + len(rest), ended=True)
        finally:
            self._pump.stop()

    def _chunk(self, data: bytes, offset: int, *, ended: bool = False) -> Chunk:
        return Chunk(self._stream, data, json.dumps({"offset": offset}), ended)

    def _tell(self, rest: int) -> None:
        self.stats.lag_bytes = self._queue.size + rest
        self.stats.read_errors = self._pump.read_errors + self._queue.drops
        self.stats.problem = self._queue.problem or self._pump.problem


def _whole_lines(data: bytes) -> tuple[bytes, bytes]:
    """``data`` up to its last newline, and the rest; a line beyond ``MAX_LINE`` comes in pieces."""
    cut = data.rfind(b"\n") + 1
    if not cut and len(data) > MAX_LINE:
        cut = MAX_LINE
    return data[:cut], data[cut:]


class _Queue:
    """Blocks on their way from the thread to the event loop, bounded in bytes.

    ``drops`` counts the times that blocks had to be left out, not the blocks.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self.size = 0
        self.drops = 0
        self.problem: str | None = None
        self.wake: Callable[[], None] = lambda: None
        self._limit = limit
        self._patience = patience
        self._blocks: deque[bytes] = deque()
        self._ended = False
        self._gap = False
        self._room = threading.Condition()

    def put(self, block: bytes) -> None:
        """Add a block, or drop it if there is no room for longer than the patience lasts."""
        with self._room:
            patience = 0.0 if self._gap else self._patience
            if not self._room.wait_for(lambda: self.size < self._limit, patience):
                if not self._gap:
                    self._gap = True
                    self.drops += 1
                    self.problem = "standard input comes faster than it is read; lines were dropped"
                return
            if self._gap:
                self._gap = False
                block = b"\n" + block  # the line before the gap must not run on behind it
            self._blocks.append(block)
            self.size += len(block)
        self.wake()

    def end(self) -> None:
        """No more blocks will come."""
        with self._room:
            self._ended = True
        self.wake()

    def take(self) -> tuple[bytes, bool]:
        """What came so far, one block of the scan at most, and whether that is all there will be."""
        with self._room:
            blocks: list[bytes] = []
            size = 0
            while self._blocks and size < BLOCK:
                blocks.append(self._blocks.popleft())
                size += len(blocks[-1])
            self.size -= size
            self._room.notify()
            return b"".join(blocks), self._ended and not self._blocks


class _Pump:
    """The thread: reads, copies, hands over."""

    def __init__(self, source: int, sink: int, queue: _Queue) -> None:
        self.read_errors = 0
        self.problem: str | None = None
        self._source = source
        self._sink: int | None = sink
        self._queue = queue
        self._stopped, self._stopper = os.pipe()

    def stop(self) -> None:
        """Let the thread end before it reads more."""
        os.write(self._stopper, b"x")

    def run(self) -> None:
        """Read to the end, or until stopped."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        try:
            while True:
                # Also for a source in non-blocking mode, which the other end may set at any time.
                if any(fd == self._stopped for fd, _ in poll.poll()):
                    return
                try:
                    block = os.read(self._source, _BLOCK)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self.read_errors += 1
                    self.problem = f"standard input: {error.strerror or error}; taken as its end"
                    return
                if not block:
                    return
                self._copy(block)
                self._queue.put(block)
        finally:
            self._queue.end()

    def _copy(self, block: bytes) -> None:
        """Write all of ``block``, however little is taken at a time."""
        rest = memoryview(block)
        while rest and self._sink is not None:
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._sink, select.POLLOUT)
                poll.register(self._stopped, select.POLLIN)
                if any(fd == self._stopped for fd, _ in poll.poll()):
                    return
            except OSError as error:
                reason = error.strerror or error
                if error.errno in _CLOSED:
                    self._sink = None
                    self.problem = f"standard output: {reason}; the log is read on but no longer copied"
                else:  # a full disk may have room again
                    self.problem = f"standard output: {reason}; a part of the log was not copied"
                return
