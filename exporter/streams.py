"""What is being read: streams, and the text that one or several of them make.

A source gives chunks of streams, of which each is one generation of a log file, or one run of a
container. A rotation may fall between any two lines, so the text goes on over several of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .records import numbered
from .sources.framing import Framing
from .sources.scan import Scanner
from .vllm.log import LogParser

ASIDE_TICKS = 100
"""Lines kept aside may be the first of a life; what says so follows in seconds."""

FAILURE_LEVELS = frozenset(("", "ERROR", "CRITICAL"))
"""Of records that may report a failure; what no logger wrote has none."""

_KEPT_TURNS = 1000  # of files that are written by turns


@dataclass(slots=True)
class StreamState:
    """How far one stream was read: where to go on (``token`` …), and what was counted."""

    source: str
    token: str = ""
    lines: int = 0
    parser: Mapping[str, Any] | None = None
    counted_lines: int = 0
    errors: set[int] = field(default_factory=set)  # lines behind the checkpoint that were counted


class Text:
    """One text: of one stream, or of several where one goes on with what another began.

    A rotation may fall between any two lines, so what is open, what the scan kept aside and what
    the parser knows outlives the file it came from. A line is known by a number that holds its
    stream, since a record may have lines of two.
    """

    def __init__(self, latest: datetime, parser: Mapping[str, Any] | None) -> None:
        self.scanner = Scanner()
        self.framing = Framing()
        self.parser = LogParser(latest)
        if parser is not None:
            self.parser.restore(parser)
        self.writing: Stream | None = None
        """The stream that brought the last lines."""
        self._turns: list[tuple[int, int]] = []  # first line of a turn as the scan counts, what to add
        self.quiet = 0  # ticks without a line worth parsing
        self.silent = 0  # ticks without any line
        self.given = False  # lines since the last look at open records
        self.live = False  # what comes now was written now
        self.aside = ASIDE_TICKS  # ticks since the scanner kept lines aside

    @property
    def open(self) -> bool:
        """Whether anything is held back."""
        return self.parser.open or self.framing.waiting

    @property
    def may_fail(self) -> bool:
        """Whether what is held back may be a failure, or a line is known in part only."""
        return self.framing.waiting or any(one.level in FAILURE_LEVELS for one in self.parser.peek())

    def told(self, number: int) -> bool:
        """Whether everything up to that line was handed on: what is open, if anything, came later."""
        since = (self.framing.waiting_since, self.parser.open_since)
        return all(one is None or one > number for one in since)

    @property
    def truncated(self) -> int:
        """Lines that were too long to be kept whole."""
        return self.scanner.truncated + self.framing.truncated

    def turn_to(self, stream: Stream) -> None:
        """The next lines are of ``stream``."""
        self.writing = stream
        seen = self.scanner.lines
        self._turns.append((seen + 1, numbered(stream.number, stream.lines) - seen))
        del self._turns[:-_KEPT_TURNS]

    def number(self, line: int) -> int:
        """The number of a line that the scan counts as ``line``: it may be of an earlier turn."""
        at = bisect_right(self._turns, line, key=lambda turn: turn[0]) - 1
        return line + self._turns[max(at, 0)][1]


class Stream:
    """One stream being read. ``number`` counts the streams of this process."""

    def __init__(self, name: str, number: int, source: str, before: StreamState, text: Text) -> None:
        self.name = name
        self.number = number
        self.source = source
        self.before = before
        """Where a restart goes on as long as no checkpoint knows the stream."""
        self.text = text
        self.follows = ""
        self.lines = before.lines
        self.token = before.token
        self.counted_lines = before.counted_lines
        self.errors = set(before.errors)
        self.ended = False

    @property
    def parser(self) -> LogParser:
        """Of its text."""
        return self.text.parser

    def state(self) -> StreamState:
        """Where it is now, for a checkpoint."""
        return StreamState(self.source, self.token, self.lines, self.parser.snapshot(), self.counted_lines)


def in_parts(data: bytes, lines: int) -> Iterable[bytes]:
    """``data`` cut behind its first ``lines`` lines, where that falls inside it."""
    if not 0 < lines < data.count(b"\n"):
        return (data,)
    at = -1
    for _ in range(lines):
        at = data.find(b"\n", at + 1)
    return (data[: at + 1], data[at + 1 :])
