"""The fast path: blocks of bytes -> the few lines worth parsing.

A busy server logs access lines, request lines and statistics; a failure is a few hundred lines
among millions. Parsing costs microseconds a line, so most lines must not be looked at one by
one. Three passes over a block, each in C:

1. *skip*: one regular expression, anchored at line starts, passes over lines whose prefix
   says that nothing in them can matter: access lines, statistics, and everything that repeats
   what a client sent. What is skipped here is also what must never count.
2. *wake*: what is left is searched for a handful of words without which no rule of the parser
   can match. Where there is none, the lines are kept aside, as the context of what may come.
3. around a word, lines are given out: the context before it (a traceback ends with its
   message) and some of what follows.

``tests/test_scan.py`` holds the result against parsing every line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import cache

from .framing import CRI, DOCKER, MAX_LINE, Wrapper, wrapper_of

BLOCK = 256 << 10
"""Bytes that a reader should hand over at a time."""

CONTEXT = 192 << 10  # tracebacks of eight ranks, interleaved, before the first message
HOT = 64 << 10

# Every signal of the parser needs one of these in its record, or near it.
WAKE = (
    b"emory", b"OutOfMem", b"OOM", b"llocate", b"ALLOC_FAILED", b"NO_MEMORY", b"OUT_OF_RES",
    b"bad_alloc", b"max_num_batched_tokens", b"Initializing a", b"args: ", b"server version",
    b"  version ", b"startup complete", b"Starting vLLM", b"to load model", b"fatal error",
    b"EngineDead", b"failed to start", b"initialization failed", b"unexpectedly", b"died, exit",
    b"already dead", b"errored already", b"task failed", b"hit an exception", b"while running API",
    b"method failed", b"processing request", b"Dumping ", b"SchedulerOutput(", b"SchedulerStats(",
    b"Workspace is locked", b"aten::", b"cache size", b" blocks: ", b"apturing", b"shutdown trigger",
    b"Shutting down", b"wake up tags", b"max model len", b"CUDA out of",
)  # fmt: skip
_WAKE = re.compile(b"|".join(re.escape(word) for word in WAKE))
_SMALL = 4096

_COLOURED = rb"(?:\x1b\[[\d;]*+m|\\u001b\[[\d;]*+m)*+"
# …" 200 OK(EngineCore pid=104) ERROR 06-27 …: a record that lost its newline behind a skipped line
_GLUE = b") ERROR "
_GLUED_TO = re.compile(
    rb"(?:.{0,80}\) )?INFO(?:: {2,}[^\n]*?\" \d{3}[ \w-]*+|.{14,60}?(?:loggers|metrics)\.py:\d+\] [^(\n]*+)\([\w.-]+ pid=\d+\) ERROR \d\d-"
)
_STEP = (
    rb"Iteration\(\d++\): \d++ context requests, (\d++) context tokens, "
    rb"\d++ generation requests, (\d++) generation tokens[^\n]*+\n"
)
# {"asctime": "2026-11-30 17:18:52,772", "levelname": "INFO", "name": "uvicorn.access", …
_SKIP_JSON = (
    rb'\{"asctime": "[^"\n]*+", "levelname": "(?:INFO|DEBUG)", "name": "'
    rb"(?:uvicorn\.access|vllm\.(?:\w++\.)*+(?:request_logger|logger|async_llm)"
    rb'|vllm\.v1\.metrics\.loggers", "processName": "[^"\n]*+", "process": \d++, "message": "Engine \d++: Avg )'
)


@cache
def _patterns(wrapper: Wrapper, coloured: bool) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Lines to look at (the match ends where one begins), and iteration lines, in ``wrapper``."""
    colour = _COLOURED if coloured else b""
    process = rb"\([\w.-]++ pid=\d++\)" + colour + rb" " + colour
    clock = colour + rb" " + colour + rb"[ \d:-]{14}" + colour + rb" " + colour + rb"\[?(?:[\w.]++/)*+"
    lineno = rb"\.py:\d++\]" + colour + rb" "
    engine = rb"(?:Engine \d++|\d++ Engines Aggregated): "
    step = rb"INFO" + clock + rb"(?:loggers|core)" + lineno + rb"(?:Engine \d++: )?+" + _STEP
    quiet = (
        rb"(?:request_logger\.py:|async_llm\.py:|logger\.py:|async_llm_engine\.py:"
        + rb"|loggers" + lineno + engine + rb"(?:Avg |Iteration\(\d)|metrics" + lineno + rb"Avg "
        + rb"|core" + lineno + rb"Iteration\(\d|launcher" + lineno + rb"Route: )"
    )  # fmt: skip
    logged = (
        rb"(?:INFO" + clock + quiet
        + rb"|DEBUG" + clock + rb"(?!(?:gpu_worker|worker|mem_utils|utils|arg_utils)\.py:)[\w.]++:\d++\])"
    )  # fmt: skip
    access = rb"INFO: {2,}[\da-fA-F.:\[\]]++ - \\?\""
    skip = wrapper.fast + colour + rb"(?:" + access + rb"|" + process + rb"(?:" + logged + rb"|" + access + rb")|" + logged + rb")"
    skip += rb"|" + wrapper.fast + _SKIP_JSON
    step = wrapper.fast + colour + rb"(?:" + process + rb")?+" + step
    return re.compile(rb"\n(?!" + skip + rb")"), re.compile(rb"\n(" + step + rb")")


class Scanner:
    """Finds the lines worth parsing in one input. Feed blocks in order, then ``finish``.

    ``lines`` and ``bytes`` count what went by. Memory is bounded: one block, the context, and
    one line of at most ``MAX_LINE`` (of a longer one the head and the tail are kept).
    """

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self.truncated = 0
        self._carry = b""
        self._cut: bytes | None = None
        self._context: deque[tuple[int, bytes, re.Pattern[bytes] | None]] = deque()
        self._context_bytes = 0
        self._hot = 0
        self._pieces = False
        self._largest = 0
        self._noisy = False

    def feed(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Lines (their number and their bytes without newline) that ``block`` completes."""
        self.bytes += len(block)
        end = block.rfind(b"\n") + 1
        if end == 0:
            self._keep(block)
            return
        data = self._start(block[:end])
        self._carry = block[end:]
        yield from self._scan(data)

    def finish(self) -> Iterator[tuple[int, bytes]]:
        """What remains when the input has ended: a last line without a newline."""
        if self._carry or self._cut is not None:
            data = self._start(b"\n")
            self._carry = b""
            yield from self._scan(data)

    def _keep(self, block: bytes) -> None:
        """A line that does not end yet: of an endless one only head and tail stay."""
        self._carry += block
        if len(self._carry) > 2 * MAX_LINE:
            if self._cut is None:
                self._cut = self._carry[: MAX_LINE // 2]
                self.truncated += 1
            self._carry = self._carry[-(MAX_LINE // 4) :]

    def _start(self, data: bytes) -> bytes:
        if self._cut is not None:
            data, self._cut = self._cut + self._carry + data, None
        elif self._carry:
            data = self._carry + data
        return data

    def _scan(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        wrapper = wrapper_of(data[:400])
        if self._in_pieces(wrapper, data):
            # the end of a cut line may look like anything; only joining the pieces tells
            yield from self._give(self.lines + 1, data)
            self.lines += data.count(b"\n")
            self._hot = 0
            return
        looked_at, iterations = _patterns(wrapper, b"\x1b[" in data[:4096] or b"u001b[" in data[:4096])
        if self._noisy and not any(word in data for word in WAKE):
            # most lines would be looked at, and none can matter
            self._hot = 0
            self._set_aside(self.lines + 1, data, looked_at)
            self.lines += data.count(b"\n")
            return
        runs = self._runs(b"\n" + data, looked_at)
        self._noisy = sum(end - begin for begin, end, _ in runs) * 2 > len(data)
        if b"Iteration(" in data:
            runs = sorted(runs + self._iterations(b"\n" + data, iterations))
        if not self._noisy and _GLUE in data:
            runs = sorted(runs + _glued(data))
        if not runs:
            self.lines += data.count(b"\n")
            return
        yield from self._wake(data, runs)

    def _in_pieces(self, wrapper: Wrapper, data: bytes) -> bool:
        """Whether a runtime cut a line of this block, or of the last one without its end."""
        was = self._pieces
        if wrapper is CRI:
            found = b" stdout P" in data or b" stderr P" in data
            if found or was:
                last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :][:80]
                self._pieces = b" stdout P" in last or b" stderr P" in last
            return found or was
        if wrapper is DOCKER:
            ended = data.count(b'\\n","') + data.count(b'\\n", "') + data.count(b'\\n"}')
            found = ended < data.count(b"\n")
            self._pieces = found
            return found or was
        self._pieces = False
        return was

    @staticmethod
    def _runs(data: bytes, looked_at: re.Pattern[bytes]) -> list[tuple[int, int, bool]]:
        """Stretches of lines to look at, as offsets into ``data`` without its first byte."""
        runs: list[tuple[int, int, bool]] = []
        size = len(data)
        begin = end = -1
        for match in looked_at.finditer(data):
            start = match.end()
            if start >= size:
                break
            if start != end:
                if begin >= 0:
                    runs.append((begin - 1, end - 1, False))
                begin = start
            end = data.find(b"\n", start) + 1
        if begin >= 0:
            runs.append((begin - 1, end - 1, False))
        return runs

    def _iterations(self, data: bytes, pattern: re.Pattern[bytes]) -> list[tuple[int, int, bool]]:
        """Iteration lines that set a record. Only the largest step of a life is asked for."""
        runs = []
        for match in pattern.finditer(data):
            tokens = int(match[2]) + int(match[3])
            if tokens > self._largest:
                self._largest = tokens
                runs.append((match.start(1) - 1, match.end(1) - 1, True))
        return runs

    def _wake(self, data: bytes, runs: list[tuple[int, int, bool]]) -> Iterator[tuple[int, bytes]]:
        """Give out lines around words that matter; keep the others aside."""
        quiet = self._hot <= 0 and not any(given for _, _, given in runs) and not _has_word(data, runs)
        at, number = 0, self.lines + 1
        for begin, end, given in runs:
            number += data.count(b"\n", at, begin)
            at = begin
            if given:
                yield from self._give(number, data[begin:end])
                continue
            if quiet:
                self._set_aside(number, data[begin:end])
                continue
            for start, run in self._awake(data[begin:end], number):
                yield from self._give(start, run)
        self.lines = number - 1 + data.count(b"\n", at)

    def _awake(self, run: bytes, number: int) -> Iterator[tuple[int, bytes]]:
        """The parts of one run to give out, with the context before them."""
        at = 0
        while at < len(run):
            if self._hot > 0:
                cut = run.find(b"\n", min(len(run) - 1, at + self._hot)) + 1 or len(run)
                self._hot -= cut - at
                if _WAKE.search(run, at, cut) is not None:
                    self._hot, self._largest = HOT, 0
                yield number, run[at:cut]
                number += run.count(b"\n", at, cut)
                at = cut
                continue
            found = _WAKE.search(run, at)
            if found is None:
                self._set_aside(number, run[at:])
                return
            begin = run.rfind(b"\n", at, max(at, found.start() - CONTEXT)) + 1 or at
            if begin > at:
                self._forget()
            else:
                yield from self._remembered()
                self._forget()
            number += run.count(b"\n", at, begin)
            at, self._hot = begin, found.end() - begin + HOT

    def _set_aside(self, number: int, run: bytes, looked_at: re.Pattern[bytes] | None = None) -> None:
        """Keep ``run`` as context; with ``looked_at`` it still holds lines to skip."""
        if len(run) > CONTEXT:
            cut = run.find(b"\n", len(run) - CONTEXT) + 1
            number += run.count(b"\n", 0, cut)
            run = run[cut:]
            self._forget()
        self._context.append((number, run, looked_at))
        self._context_bytes += len(run)
        while self._context_bytes > CONTEXT and len(self._context) > 1:
            self._context_bytes -= len(self._context.popleft()[1])

    def _remembered(self) -> Iterator[tuple[int, bytes]]:
        for number, run, looked_at in self._context:
            if looked_at is None:
                yield number, run
                continue
            at = 0
            for begin, end, _ in self._runs(b"\n" + run, looked_at):
                number += run.count(b"\n", at, begin)
                at = begin
                yield number, run[begin:end]

    def _forget(self) -> None:
        self._context.clear()
        self._context_bytes = 0

    @staticmethod
    def _give(number: int, run: bytes) -> Iterator[tuple[int, bytes]]:
        lines = run.split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield from enumerate(lines, number)


def _glued(data: bytes) -> list[tuple[int, int, bool]]:
    """Skipped lines behind which an ERROR record lost its newline."""
    found = []
    at = data.find(_GLUE)
    while at >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at) + 1
        if at - begin > 80 and _GLUED_TO.match(data, begin, end) is not None:
            found.append((begin, end, True))
        at = data.find(_GLUE, end)
    return found


def _has_word(data: bytes, runs: list[tuple[int, int, bool]]) -> bool:
    """Whether any run holds a word of ``WAKE``. Long needles are found at gigabytes a second."""
    joined = data if len(runs) == 1 and runs[0][1] - runs[0][0] > len(data) // 2 else b"".join(data[a:b] for a, b, _ in runs)
    if len(joined) < _SMALL:
        return _WAKE.search(joined) is not None
    return any(word in joined for word in WAKE)
