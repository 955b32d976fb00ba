"""The fast path: blocks of bytes -> the few lines worth parsing, and what the others add up to.

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

Of the lines that are skipped, those on steps and requests are summed up: one line for each second
of the log's clock is given out without its text, with the ``Traffic`` of all.

``tests/test_scan.py`` holds the result against parsing every line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, groupby, repeat
from operator import itemgetter

from ..records import Step, Traffic
from .framing import CRI, DOCKER, MAX_LINE, Wrapper, wrapper_of
from .request_lines import Requests

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
_PIECE = 32 << 10

_COLOURED = rb"(?:\x1b\[[\d;]*+m|\\u001b\[[\d;]*+m)*+"
# …" 200 OK(EngineCore pid=104) ERROR 06-27 …: a record that lost its newline behind a skipped line
_GLUE = b") ERROR "
_GLUED_TO = re.compile(
    rb"(?:.{0,80}\) )?INFO(?:: {2,}[^\n]*?\" \d{3}[ \w-]*+|.{14,60}?(?:loggers|metrics)\.py:\d+\] [^(\n]*+)\([\w.-]+ pid=\d+\) ERROR \d\d-"
)
# the dummy steps of data parallel, which count as none, go on with a bracket
_STEP = (
    rb"\d*+\): (\d{1,18}) context requests, (\d{1,18}) context tokens, "
    rb"(\d{1,18}) generation requests, (\d{1,18}) generation tokens[^\n(]*+(?=\n)"
)

_CLOCK_OF_STEP = itemgetter(1, 2)
_STEP_WORDS = b" context requests, "
_REQUEST_MODULES = b"logger.py:", b"async_llm_engine.py:"
_ENDS, _ENDS_IN_JSON = re.compile(rb"\n(?<![\r\n]\n)"), re.compile(rb'\\n"(?<!\\r\\n")')
# {"asctime": "2026-11-30 17:18:52,772", "levelname": "INFO", "name": "uvicorn.access", …
_SKIP_JSON = (
    rb'\{"asctime": "[^"\n]*+", "levelname": "(?:INFO|DEBUG)", "name": "'
    rb'(?:uvicorn\.access|vllm\.(?:\w++\.)*+(?:request_logger|logger|async_llm)"'
    rb'|vllm\.v1\.metrics\.loggers", "processName": "[^"\n]*+", "process": \d++, "message": "Engine \d++: Avg )'
)
_STEP_JSON = (
    rb'\{"asctime": "%b[^"\n]*+", "levelname": "INFO", "name": "vllm\.(?:\w++\.)*+(?:loggers|core)", '
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
    """For one shape: lines to look at, with or without the iteration lines, and lines to sum up.

    All but the last match from the newline before the line. The first two also match request
    lines of the releases that log prompts, and these alone have a group then.

    ``requests``: up to the text; the groups are the prefix without its wrapper, and its clock.
    ``iterations``: the groups are the line up to the text, the clock (in the second or the third),
    and the four numbers of the step.
    ``clocked``: the beginning, up to the text, of lines not to look at that have a clock.
    """

    looked_at: re.Pattern[bytes]
    but_iterations: re.Pattern[bytes]
    requests: re.Pattern[bytes]
    iterations: re.Pattern[bytes]
    clocked: re.Pattern[bytes]


@cache
def _patterns(shape: Shape) -> _Patterns:
    colour = _COLOURED if shape.coloured else b""
    folders = rb"(?:[\w.]++/)*+" if shape.folders else b""
    start = shape.wrapper.fast + colour
    process = rb"\([\w.-]++ pid=\d++\)" + colour + rb" " + colour
    before, behind = colour + rb" " + colour, colour + rb" " + colour + rb"\[?" + folders
    clock = before + rb"[ \d:-]{14}" + behind
    captured = before + rb"([ \d:-]{14})" + behind
    lineno = rb"\.py:\d++\]" + colour + rb" "
    quiet = (
        rb"(?:request_logger\.py:|async_llm\.py:"
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
    info = rb"(?:" + process + rb")?+INFO"
    iteration = rb"(?:Engine \d++: )?+Iteration\(\d"
    steps = rb"(?:loggers|core)" + lineno
    json = shape.wrapper.fast + _STEP_JSON
    step = rb"(?:" + start + info + clock + steps + rb"|" + json % b"" + rb")" + iteration
    counted = (
        rb"((?:"
        + start
        + info
        + captured
        + steps
        + rb"|"
        + json % rb'([^",\n]*+)'
        + rb"))"
        + iteration
        + _STEP
    )
    module = rb"(?:logger|async_llm_engine)" + lineno
    request = start + rb"(" + info + captured + module + rb")"
    return _Patterns(
        re.compile(rb"\n(?!" + skip + rb")(?:" + request + rb")?+"),
        re.compile(rb"\n(?!" + skip + rb"|" + step + rb")(?:" + request + rb")?+"),
        re.compile(rb"\n" + request),
        re.compile(rb"\n" + counted),
        re.compile(
            start + info + clock
            + rb"(?=" + quiet + rb"|" + steps + iteration + rb"|" + module + rb")\w++" + lineno
        ),
    )  # fmt: skip


_Run = tuple[int, int, int]
"""A stretch of lines: begin, end, and which of the sums begins there, or one of these."""
_TO_SEARCH, _TO_GIVE = -2, -1

_Sum = tuple[int, int, Traffic]
"""Beginning of a line, up to its text, and what it and others of its second say."""

Given = tuple[int, bytes, Traffic | None]
"""Number and bytes of a line; with traffic, the line stands for others too, and is without its text."""


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
        self._requests = Requests()
        self._returns = 1  # at the end of a line that is all of its log call: with a terminal one
        self._clock: tuple[int, bytes] | None = None  # the last skipped line with one, and no run since

    def feed(self, block: bytes) -> Iterator[Given]:
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

    def finish(self) -> Iterator[Given]:
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

    def _scan(self, text: bytes) -> Iterator[Given]:
        """``text`` begins with a newline that is not of the log, so that every line follows one."""
        shape = Shape.of(text)
        patterns = _patterns(shape)
        sums: list[_Sum] = []
        if self._in_pieces(shape.wrapper, text):
            # the end of a cut line may look like anything; only joining the pieces tells
            runs = [(1, len(text), _TO_GIVE)]
            if _WAKE.search(text) is not None:
                for number, run in self._remembered():
                    yield from self._give(number, run)
            self._forget()
        elif self._noisy and self._hot <= 0 and not any(word in text for word in WAKE):
            # most lines would be looked at, and none can matter but for what it adds up to
            if self._clock is not None:
                self._set_aside(*self._clock)
                self._clock = None
            self._set_aside(self.lines + 1, text[1:], patterns)
            runs = []
            if _STEP_WORDS in text:
                sums = _steps(text, patterns)
            if any(module in text for module in _REQUEST_MODULES):
                sums += self._received(text, patterns.requests.finditer(text), shape.wrapper)
            if not sums:
                self.lines += newlines(text) - 1
                return
        else:
            runs, requests = self._runs(text, patterns)
            if self._iterating:
                sums = _steps(text, patterns)
                self._iterating = bool(sums)
            if requests:
                sums += self._received(text, requests, shape.wrapper)
        self._see_returns(text, shape.wrapper)
        if runs or sums:
            yield from self._wake(text, runs, sums, shape.wrapper, patterns)
        else:
            self.lines += newlines(text) - 1
            self._keep_clock(text, 1, shape.wrapper, patterns)

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

    def _runs(self, text: bytes, patterns: _Patterns) -> tuple[list[_Run], list[re.Match[bytes]]]:
        """Stretches of lines to look at, and the request lines among the others."""
        runs, requests = _stretches(text, patterns.but_iterations if self._iterating else patterns.looked_at)
        if not self._iterating and any(text.find(b"Iteration(", begin, end) >= 0 for begin, end, _ in runs):
            self._iterating = True
            runs, requests = _stretches(text, patterns.but_iterations)
        self._noisy = sum(end - begin for begin, end, _ in runs) * 2 > len(text)
        # A record goes on in lines of its own, so where none are looked at, only the end of the
        # block can hold the first line of one: searching all blocks would cost a sixth of the speed.
        glued = _glued(text, 0 if runs else len(text) - _SMALL)
        return sorted(runs + glued) if glued else runs, requests

    def _received(self, text: bytes, requests: Iterable[re.Match[bytes]], wrapper: Wrapper) -> list[_Sum]:
        """What request lines add up to, for each second."""
        if self._returns and _whole_line(wrapper).search(text, 1) is not None:
            self._returns = 0
        found: list[_Sum] = []
        clock, begin, end = b"", 0, 0
        for match in requests:
            if match[match.re.groups] != clock:
                if (traffic := self._requests.take()) is not None:
                    found.append((begin, end, traffic))
                clock, begin, end = match[match.re.groups], match.start() + 1, match.end()
            line, returns = _content(text, match.end(), wrapper)
            self._requests.add(match[1], line, returns > self._returns)
        if (traffic := self._requests.take()) is not None:
            found.append((begin, end, traffic))
        return found

    def _see_returns(self, text: bytes, wrapper: Wrapper) -> None:
        """Learn from the first line whether a terminal adds a carriage return to every line."""
        if self._returns and _content(text, 1, wrapper)[1] == 0:
            self._returns = 0

    def _wake(
        self, text: bytes, runs: list[_Run], sums: list[_Sum], wrapper: Wrapper, patterns: _Patterns
    ) -> Iterator[Given]:
        """Give out lines around words that matter, and sums; keep the others aside."""
        quiet = self._hot <= 0 and not _has_word(text, runs)
        if sums:
            runs = sorted(runs + [(begin, end, which) for which, (begin, end, _) in enumerate(sums)])
        at, number, last = 1, self.lines + 1, 1
        for begin, end, kind in runs:
            number += text.count(b"\n", at, begin)
            at = begin
            if kind >= 0:
                yield number, _without_text(text, begin, end, wrapper), sums[kind][2]
                continue
            clock, self._clock = self._clock, None
            if kind == _TO_SEARCH and not _has_clock(text, begin):
                found, until = _last_clock(text, last, begin, patterns)
                if found >= 0:
                    line = _without_text(text, found, until, wrapper)
                    clock = number - text.count(b"\n", found, begin), line
                if clock is not None and self._hot > 0:
                    yield from self._give(*clock)
                elif clock is not None:
                    self._set_aside(*clock)
            last = end
            if kind != _TO_SEARCH:
                yield from self._give(number, text[begin:end])
            elif quiet:
                self._set_aside(number, text[begin:end])
            else:
                for start, run in self._awake(text[begin:end], number):
                    yield from self._give(start, run)
        self.lines = number - 1 + text.count(b"\n", at)
        self._keep_clock(text, last, wrapper, patterns)

    def _keep_clock(self, text: bytes, last: int, wrapper: Wrapper, patterns: _Patterns) -> None:
        """Remember the time of the lines that were skipped behind ``last``, where the last run ended.

        ``[Mon Nov  2 10:04:11 2026] Memory cgroup out of memory: Killed process …`` has the time of
        the line before it, and is no part of what stood an hour before.
        """
        found, until = _last_clock(text, last, len(text), patterns)
        if found >= 0:
            line = _without_text(text, found, until, wrapper)
            self._clock = self.lines + 1 - text.count(b"\n", found), line

    def _awake(self, run: bytes, number: int) -> Iterator[tuple[int, bytes]]:
        """The parts of one run to give out, with the context before them."""
        at = 0
        while at < len(run):
            if self._hot > 0:
                cut = run.find(b"\n", min(len(run) - 1, at + self._hot)) + 1 or len(run)
                self._hot -= cut - at
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
            wrapper = Shape.of(text).wrapper
            for begin, end, _ in _stretches(text, patterns.but_iterations)[0]:
                if not _has_clock(text, begin):
                    found, until = _last_clock(text, last, begin, patterns)
                    if found >= 0:
                        line = _without_text(text, found, until, wrapper)
                        yield first + text.count(b"\n", 1, found), line
                yield first + text.count(b"\n", 1, begin), text[begin:end]
                last = end

    def _forget(self) -> None:
        self._context.clear()
        self._context_bytes = 0

    @staticmethod
    def _give(number: int, run: bytes) -> Iterator[Given]:
        lines = run.split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield from zip(count(number), lines, repeat(None), strict=False)


def _stretches(text: bytes, looked_at: re.Pattern[bytes]) -> tuple[list[_Run], list[re.Match[bytes]]]:
    """Where lines to look at stand together, and the request lines that are not looked at."""
    runs: list[_Run] = []
    requests: list[re.Match[bytes]] = []
    begin = end = -1
    for match in looked_at.finditer(text):
        if match.lastindex:
            requests.append(match)
            continue
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
    return runs, requests


def _steps(text: bytes, patterns: _Patterns) -> list[_Sum]:
    """The steps of iteration lines, for each second."""
    found: list[_Sum] = []
    new, begin = tuple.__new__, 0  # a third of the time of Step(…)
    for _, lines in groupby(patterns.iterations.findall(text), _CLOCK_OF_STEP):
        head, *first = next(lines)
        begin = text.index(b"\n" + head, begin) + 1
        steps = [new(Step, map(int, first[2:]))]
        steps += [new(Step, (int(a), int(b), int(c), int(d))) for _, _, _, a, b, c, d in lines]  # noqa: B031
        found.append((begin, begin + len(head), Traffic(tuple(steps))))
    return found


def newlines(text: bytes) -> int:
    """How many there are: ``count`` looks at every byte, ``replace`` finds the next in larger steps.

    A piece at a time, since memory for a whole block is asked of the system anew each time.
    """
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return len(text) - sum(len(piece.replace(b"\n", b"")) for piece in pieces)


def _whole_line(wrapper: Wrapper) -> re.Pattern[bytes]:
    """The end of a line that no carriage return ended."""
    return _ENDS_IN_JSON if wrapper is DOCKER else _ENDS


def _content(text: bytes, begin: int, wrapper: Wrapper) -> tuple[bytes, int]:
    """The line from ``begin`` on without its end, and how many carriage returns that had."""
    end = text.find(b"\n", begin)
    back = b"\r"
    if wrapper is DOCKER:
        end, back = text.rfind(b'\\n"', begin, end), b"\\r"
    line = text[begin : max(begin, end)]
    returns = 0
    while line.endswith(back):
        line, returns = line[: -len(back)], returns + 1
    return line, returns


def _without_text(text: bytes, begin: int, end: int, wrapper: Wrapper) -> bytes:
    """The line at ``begin`` up to ``end``, where its text begins, as one that is complete."""
    head = text[begin:end]
    if wrapper is DOCKER:
        until = text.find(b"\n", end)
        return head + text[text.rfind(b'\\n"', end, until) : until]
    return head + b'"}' if head.endswith(b'"message": "') else head


def _has_clock(text: bytes, begin: int) -> bool:
    """Whether the line at ``begin`` looks as if vLLM's logger wrote it."""
    return text.find(b".py:", begin, text.find(b"\n", begin)) >= 0


def _last_clock(text: bytes, begin: int, end: int, patterns: _Patterns) -> tuple[int, int]:
    """Where the last skipped line with a clock stands between ``begin`` and ``end``, and its text; or -1."""
    begin = max(begin, end - _CLOCK_BYTES)
    for _ in range(8):  # a client may write .py: too
        if (at := text.rfind(b".py:", begin, end)) < 0:
            break
        end = text.rfind(b"\n", 0, at) + 1
        if (clocked := patterns.clocked.match(text, end)) is not None:
            return clocked.span()
    return -1, -1


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
