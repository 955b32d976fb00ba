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
from dataclasses import dataclass
from functools import cache

from .framing import CRI, DOCKER, MAX_LINE, Wrapper, wrapper_of

BLOCK = 256 << 10
"""Bytes that a reader should hand over at a time."""

CONTEXT = 192 << 10  # tracebacks of eight ranks, interleaved, before the first message
HOT = 64 << 10
_CLOCK_BYTES = 32 << 10  # how far back a skipped line with a clock is looked for

# Every failure, and the start of every life, has one of these in its lines; what always stands
# near one of them needs no word of its own. Fewer and longer words make a faster scan.
WAKE = (
    b"emory",  # out of memory, OutOfMemoryError, KV cache memory, gpu_memory_utilization, …
    b"max_num_batched_tokens", b"Initializing a", b"startup complete", b"Shutting down", b"wake up tags",
    b"fatal error", b"EngineDead", b"failed to start", b"core proc", b"died unexpectedly", b"died, exit",
    b"CUDA out of", b"Workspace is locked", b"dispatcher( \"aten::", b"dispatcher(\"aten::",
    b"_ALLOC_FAILED", b"NV_ERR_NO_MEMORY", b"ERROR_OUT_OF_", b"std::bad_alloc", b"PT_DEVMEM",
    b"Failed to CUDA ", b"NvMapMemAlloc", b"signal SIGKILL", b"Killed",
)  # fmt: skip
_WAKE = re.compile(b"|".join(re.escape(word) for word in WAKE))
_SMALL = 4096

_COLOURED = rb"(?:\x1b\[[\d;]*+m|\\u001b\[[\d;]*+m)*+"
# …" 200 OK(EngineCore pid=104) ERROR 06-27 …: a record that lost its newline behind a skipped line
_GLUE = b") ERROR "
_GLUED_TO = re.compile(
    rb"(?:.{0,80}\) )?INFO(?:: {2,}[^\n]*?\" \d{3}[ \w-]*+|.{14,60}?(?:loggers|metrics)\.py:\d+\] [^(\n]*+)\([\w.-]+ pid=\d+\) ERROR \d\d-"
)
# the dummy steps of data parallel, which count as none, go on with a bracket
_STEP = (
    rb"\d*+\): \d++ context requests, (\d{1,18}) context tokens, "
    rb"\d++ generation requests, (\d{1,18}) generation tokens[^\n(]*+(?=\n)"
)
# the same without its prefix: a client may have written it, so it only tells where it can not matter
_STEP_TOKENS = re.compile(
    rb"\): \d++ context requests, (\d{1,18}) context tokens, "
    rb"\d++ generation requests, (\d{1,18}) generation tokens"
)
# {"asctime": "2026-11-30 17:18:52,772", "levelname": "INFO", "name": "uvicorn.access", …
_SKIP_JSON = (
    rb'\{"asctime": "[^"\n]*+", "levelname": "(?:INFO|DEBUG)", "name": "'
    rb'(?:uvicorn\.access|vllm\.(?:\w++\.)*+(?:request_logger|logger|async_llm)"'
    rb'|vllm\.v1\.metrics\.loggers", "processName": "[^"\n]*+", "process": \d++, "message": "Engine \d++: Avg )'
)
_STEP_JSON = (
    rb'\{"asctime": "[^"\n]*+", "levelname": "INFO", "name": "vllm\.(?:\w++\.)*+(?:loggers|core)", '
    rb'"processName": "[^"\n]*+", "process": \d++, "message": "'
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the prefixes of a block look like; it makes the skip list exact and so quick."""

    wrapper: Wrapper
    coloured: bool
    folders: bool  # VLLM_LOGGING_LEVEL=DEBUG writes [v1/engine/core.py:280]

    @classmethod
    def of(cls, data: bytes) -> Shape:
        """The shape of the first lines of ``data``."""
        head = data[:4096].lstrip(b"\n")
        return cls(wrapper_of(head), b"\x1b[" in head or b"u001b[" in head, _FOLDERS.search(head) is not None)


_FOLDERS = re.compile(rb"\[(?:[\w.]+/)+\w+\.py:\d+\]")


@dataclass(frozen=True, slots=True)
class _Patterns:
    """For one shape: lines to look at, with or without the iteration lines, and those alone.

    The first two match the newline before such a line; the third has the line and its tokens.
    ``clocked`` matches lines not to look at that have a clock and are harmless to parse.
    """

    looked_at: re.Pattern[bytes]
    but_iterations: re.Pattern[bytes]
    iterations: re.Pattern[bytes]
    clocked: re.Pattern[bytes]


@cache
def _patterns(shape: Shape) -> _Patterns:
    colour = _COLOURED if shape.coloured else b""
    folders = rb"(?:[\w.]++/)*+" if shape.folders else b""
    start = shape.wrapper.fast + colour
    process = rb"\([\w.-]++ pid=\d++\)" + colour + rb" " + colour
    clock = colour + rb" " + colour + rb"[ \d:-]{14}" + colour + rb" " + colour + rb"\[?" + folders
    lineno = rb"\.py:\d++\]" + colour + rb" "
    quiet = (
        rb"(?:request_logger\.py:|async_llm\.py:|logger\.py:|async_llm_engine\.py:"
        + rb"|loggers" + lineno + rb"(?:Engine \d++|\d++ Engines Aggregated): Avg |metrics" + lineno + rb"Avg "
        + rb"|launcher" + lineno + rb"Route: )"
    )  # fmt: skip
    logged = (
        rb"(?:INFO" + clock + quiet
        + rb"|DEBUG" + clock + rb"(?!(?:gpu_worker|worker|mem_utils|utils|arg_utils)\.py:)[\w.]++:\d++\])"
    )  # fmt: skip
    access = rb"INFO: {5}[\d\[]"  # then the client's address
    skip = (
        start
        + rb"(?:"
        + access
        + rb"|"
        + process
        + rb"(?:"
        + logged
        + rb"|"
        + access
        + rb")|"
        + logged
        + rb")"
    )
    skip += rb"|" + shape.wrapper.fast + _SKIP_JSON
    info = start + rb"(?:" + process + rb")?+INFO" + clock
    iteration = rb"(?:Engine \d++: )?+Iteration\(\d"
    step = (
        rb"(?:" + info + rb"(?:loggers|core)" + lineno
        + rb"|" + shape.wrapper.fast + _STEP_JSON + rb")" + iteration
    )  # fmt: skip
    return _Patterns(
        re.compile(rb"\n(?!" + skip + rb")"),
        re.compile(rb"\n(?!" + skip + rb"|" + step + rb")"),
        re.compile(rb"\n(" + step + _STEP + rb")"),
        re.compile(info + rb"(?:" + quiet + rb"|(?:loggers|core)" + lineno + iteration + rb")"),
    )


_Run = tuple[int, int, int]
"""A stretch of lines: begin, end, and what it is: the tokens of an iteration line, or one of these."""
_TO_SEARCH, _TO_GIVE = -2, -1


class Scanner:
    """Finds the lines worth parsing in one input. Feed blocks in order, then ``finish``.

    ``lines`` and ``bytes`` count what went by. Memory is bounded: one block, the context, and
    one line of at most ``MAX_LINE`` (of a longer one the head and the tail are kept).
    """

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self.truncated = 0
        self.kept_aside = 0
        """Grows with what is not given out, and may be, as the context of what follows."""
        self._carry = b""
        self._cut = b""
        self._context: deque[tuple[int, bytes, _Patterns | None]] = deque()
        self._context_bytes = 0
        self._hot = HOT  # the beginning of a log is read whole: excerpts are short
        self._pieces = False
        self._noisy = False
        self._iterating = False
        self._largest = -1
        self._clock: tuple[int, bytes] | None = None  # the last skipped line with one, and no run since

    def feed(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Lines (their number and their bytes without newline) that ``block`` completes."""
        self.bytes += len(block)
        end = block.rfind(b"\n") + 1
        if end == 0:
            self._keep(block)
            return
        # one copy a block: passes over memory are what the time goes into
        text = b"".join((b"\n", self._cut, self._carry, memoryview(block)[:end]))
        self._carry, self._cut = block[end:], b""
        yield from self._scan(text)

    def finish(self) -> Iterator[tuple[int, bytes]]:
        """What remains when the input has ended: a last line without a newline."""
        if self._carry or self._cut:
            yield from self.feed(b"\n")
            self.bytes -= 1

    def _keep(self, block: bytes) -> None:
        """A line that does not end yet: of an endless one only head and tail stay."""
        self._carry += block
        if len(self._carry) > 2 * MAX_LINE:
            if not self._cut:
                self._cut = self._carry[: MAX_LINE // 2]
                self.truncated += 1
            self._carry = self._carry[-(MAX_LINE // 4) :]

    def _scan(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """``text`` begins with a newline that is not of the log, so that every line follows one."""
        shape = Shape.of(text)
        patterns = _patterns(shape)
        if self._in_pieces(shape.wrapper, text):
            # the end of a cut line may look like anything; only joining the pieces tells
            runs, step = [(1, len(text), _TO_GIVE)], -1
            if _WAKE.search(text) is not None:
                for number, run in self._remembered():
                    yield from self._give(number, run)
            self._forget()
        elif self._noisy and self._hot <= 0 and not any(word in text for word in WAKE):
            # most lines would be looked at, and none can matter but as the largest step
            if self._clock is not None:
                self._set_aside(*self._clock)
                self._clock = None
            self._set_aside(self.lines + 1, text[1:], patterns)
            runs, step = [], _largest_step(text) if b" context requests, " in text else -1
            if step <= self._largest:
                self.lines += text.count(b"\n") - 1
                return
        else:
            runs, step = self._runs(text, patterns)
        if runs or step > self._largest:
            yield from self._wake(text, runs, step, patterns)
        else:
            self.lines += text.count(b"\n") - 1
            self._keep_clock(text, 1, patterns)

    def _in_pieces(self, wrapper: Wrapper, text: bytes) -> bool:
        """Whether a runtime cut a line of this block, or of the last one without its end."""
        was = self._pieces
        if wrapper is CRI:
            found = b" stdout P" in text or b" stderr P" in text
            if found or was:
                last = text[text.rfind(b"\n", 0, len(text) - 1) + 1 :][:80]
                self._pieces = b" stdout P" in last or b" stderr P" in last
            return found or was
        if wrapper is DOCKER:
            ended = text.count(b'\\n","') + text.count(b'\\n", "') + text.count(b'\\n"}')
            self._pieces = ended < text.count(b"\n") - 1
            return self._pieces or was
        self._pieces = False
        return was

    def _runs(self, text: bytes, patterns: _Patterns) -> tuple[list[_Run], int]:
        """Stretches of lines to look at, and the tokens of the largest step among the others."""
        runs = _stretches(text, patterns.but_iterations if self._iterating else patterns.looked_at)
        if not self._iterating and any(text.find(b"Iteration(", begin, end) >= 0 for begin, end, _ in runs):
            self._iterating = True
            runs = _stretches(text, patterns.but_iterations)
        self._noisy = sum(end - begin for begin, end, _ in runs) * 2 > len(text)
        step = _largest_step(text) if self._iterating else -1
        self._iterating = step >= 0
        # A record goes on in lines of its own, so where none are looked at, only the end of the
        # block can hold the first line of one: searching all blocks would cost a sixth of the speed.
        glued = _glued(text, 0 if runs else len(text) - _SMALL)
        return sorted(runs + glued) if glued else runs, step

    def _rising(self, steps: list[_Run]) -> list[_Run]:
        """Iteration lines that set a record: only the largest step of a life is asked for."""
        largest, rising = self._largest, []
        for step in steps:
            if step[2] > largest:
                largest = step[2]
                rising.append(step)
        return rising

    def _wake(
        self, text: bytes, runs: list[_Run], step: int, patterns: _Patterns
    ) -> Iterator[tuple[int, bytes]]:
        """Give out lines around words that matter; keep the others aside."""
        quiet = self._hot <= 0 and not _has_word(text, runs)
        if step > (self._largest if quiet else -1):
            steps = _steps(text, patterns)
            # where lives may end, what sets a record is only known on the way
            runs = sorted(runs + (self._rising(steps) if quiet else steps))
        at, number, last = 1, self.lines + 1, 1
        for begin, end, kind in runs:
            number += text.count(b"\n", at, begin)
            at = begin
            if kind >= 0 and kind <= self._largest:
                continue
            clock, self._clock = self._clock, None
            if kind == _TO_SEARCH and not _has_clock(text, begin):
                found = _last_clock(text, last, begin, patterns)
                if found >= 0:
                    clock = number - text.count(b"\n", found, begin), _line(text, found)
                if clock is not None and self._hot > 0:
                    yield from self._give(*clock)
                elif clock is not None:
                    self._set_aside(*clock)
            last = end
            if kind != _TO_SEARCH:
                self._largest = max(self._largest, kind)
                yield from self._give(number, text[begin:end])
            elif quiet:
                self._set_aside(number, text[begin:end])
            else:
                for start, run in self._awake(text[begin:end], number):
                    yield from self._give(start, run)
        self.lines = number - 1 + text.count(b"\n", at)
        self._keep_clock(text, last, patterns)

    def _keep_clock(self, text: bytes, last: int, patterns: _Patterns) -> None:
        """Remember the time of the lines that were skipped behind ``last``, where the last run ended.

        ``[Mon Nov  2 10:04:11 2026] Memory cgroup out of memory: Killed process …`` has the time of
        the line before it, and is no part of what stood an hour before.
        """
        if (found := _last_clock(text, last, len(text), patterns)) >= 0:
            self._clock = self.lines + 1 - text.count(b"\n", found), _line(text, found)

    def _awake(self, run: bytes, number: int) -> Iterator[tuple[int, bytes]]:
        """The parts of one run to give out, with the context before them."""
        at = 0
        while at < len(run):
            if self._hot > 0:
                cut = run.find(b"\n", min(len(run) - 1, at + self._hot)) + 1 or len(run)
                self._hot -= cut - at
                self._largest = -1  # a new life may begin here
                if self._hot < HOT // 2 and _WAKE.search(run, at, cut) is not None:
                    self._hot = HOT
                yield number, run[at:cut]
                number += run.count(b"\n", at, cut)
                at = cut
                continue
            found = _WAKE.search(run, at)
            if found is None:
                self._set_aside(number, run[at:])
                return
            begin = run.rfind(b"\n", at, max(at, found.start() - CONTEXT)) + 1 or at
            if begin == at:
                yield from self._remembered()
            self._forget()
            number += run.count(b"\n", at, begin)
            at, self._hot = begin, found.end() - begin + HOT

    def _set_aside(self, number: int, run: bytes, patterns: _Patterns | None = None) -> None:
        """Keep ``run`` as context; with ``patterns`` it still holds lines to skip."""
        self.kept_aside += 1
        if len(run) > CONTEXT:
            cut = run.find(b"\n", len(run) - CONTEXT) + 1
            number += run.count(b"\n", 0, cut)
            run = run[cut:]
            self._forget()
        self._context.append((number, run, patterns))
        self._context_bytes += len(run)
        while self._context_bytes > CONTEXT and len(self._context) > 1:
            self._context_bytes -= len(self._context.popleft()[1])

    def _remembered(self) -> Iterator[tuple[int, bytes]]:
        for first, run, patterns in self._context:
            if patterns is None:
                yield first, run
                continue
            text, last = b"\n" + run, 1
            for begin, end, _ in _stretches(text, patterns.but_iterations):
                if not _has_clock(text, begin) and (found := _last_clock(text, last, begin, patterns)) >= 0:
                    yield first + text.count(b"\n", 1, found), _line(text, found)
                yield first + text.count(b"\n", 1, begin), text[begin:end]
                last = end

    def _forget(self) -> None:
        self._context.clear()
        self._context_bytes = 0

    @staticmethod
    def _give(number: int, run: bytes) -> Iterator[tuple[int, bytes]]:
        lines = run.split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield from enumerate(lines, number)


def _stretches(text: bytes, looked_at: re.Pattern[bytes]) -> list[_Run]:
    """Where lines to look at stand together."""
    runs: list[_Run] = []
    begin = end = -1
    for match in looked_at.finditer(text):
        start = match.end()
        if start >= len(text):
            break
        if start != end:
            if begin >= 0:
                runs.append((begin, end, _TO_SEARCH))
            begin = start
        end = text.find(b"\n", start) + 1
    if begin >= 0:
        runs.append((begin, end, _TO_SEARCH))
    return runs


def _steps(text: bytes, patterns: _Patterns) -> list[_Run]:
    """The iteration lines and their tokens."""
    return [(m.start(1), m.end(1) + 1, int(m[2]) + int(m[3])) for m in patterns.iterations.finditer(text)]


def _largest_step(text: bytes) -> int:
    """At least the tokens of the largest step in ``text``, or -1."""
    return max((int(a) + int(b) for a, b in _STEP_TOKENS.findall(text)), default=-1)


def _has_clock(text: bytes, begin: int) -> bool:
    """Whether the line at ``begin`` looks as if vLLM's logger wrote it."""
    return text.find(b".py:", begin, text.find(b"\n", begin)) >= 0


def _last_clock(text: bytes, begin: int, end: int, patterns: _Patterns) -> int:
    """Where the last skipped line with a clock stands between ``begin`` and ``end``, or -1."""
    begin = max(begin, end - _CLOCK_BYTES)
    for _ in range(8):  # a client may write .py: too
        if (at := text.rfind(b".py:", begin, end)) < 0:
            return -1
        end = text.rfind(b"\n", 0, at) + 1
        if patterns.clocked.match(text, end) is not None:
            return end
    return -1


def _line(text: bytes, begin: int) -> bytes:
    """The line at ``begin``, as one that is complete: its record may have had others."""
    return text[begin : text.find(b"\n", begin)].rstrip(b"\r")


def _glued(text: bytes, begin: int) -> list[_Run]:
    """Skipped lines from ``begin`` on behind which an ERROR record lost its newline."""
    found: list[_Run] = []
    at = text.find(_GLUE, max(0, begin))
    while at >= 0:
        begin = text.rfind(b"\n", 0, at) + 1
        end = text.find(b"\n", at) + 1
        if at - begin > 80 and _GLUED_TO.match(text, begin, end) is not None:
            found.append((begin, end, _TO_SEARCH))
        at = text.find(_GLUE, end)
    return found


def _has_word(text: bytes, runs: list[_Run]) -> bool:
    """Whether any run holds a word of ``WAKE``. Long needles are found at gigabytes a second."""
    joined = b"".join(text[begin:end] for begin, end, _ in runs)
    if len(joined) < _SMALL:
        return _WAKE.search(joined) is not None
    return any(word in joined for word in WAKE)
