"""Post-mortem of log files: source, scan and the pure core put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from .diagnosis.history import History
from .diagnosis.knowledge import FailureClass
from .sources.framing import Framing
from .sources.logfile import STDIN, InputError, blocks, latest_time
from .sources.scan import Given, Scanner
from .vllm.log import LogParser


@dataclass(slots=True)
class Analysis:
    """What came out: the history of the server, what was read, and what could not be."""

    history: History
    lines: int = 0
    bytes: int = 0
    truncated: int = 0
    problems: list[str] = field(default_factory=list)


class Reader:
    """Drives one input through framing and parsing into a history. Feed blocks, then ``finish``."""

    def __init__(self, history: History, latest: datetime) -> None:
        self._history = history
        self._scanner = Scanner()
        self._framing = Framing()
        self._parser = LogParser(latest)

    def feed(self, block: bytes) -> None:
        """Take in the next bytes of the input."""
        self._lines(self._scanner.feed(block))

    def finish(self) -> None:
        """The input ended."""
        self._lines(self._scanner.finish())
        for line in self._framing.flush():
            self._history.feed_all(self._parser.feed(line))
        self._history.feed_all(self._parser.flush())

    def _lines(self, lines: Iterable[Given]) -> None:
        for number, raw, traffic in lines:
            for line in self._framing.feed(number, raw, traffic):
                self._history.feed_all(self._parser.feed(line))

    @property
    def lines(self) -> int:
        """Lines that went by."""
        return self._scanner.lines

    @property
    def bytes(self) -> int:
        """Bytes that went by, unpacked."""
        return self._scanner.bytes

    @property
    def truncated(self) -> int:
        """Lines of which only head and tail were kept."""
        return self._scanner.truncated + self._framing.truncated


def analyze(
    inputs: Iterable[str],
    classes: Mapping[str, FailureClass] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Analysis:
    """Read ``inputs`` (paths or ``-``) as one history of one server, oldest first."""
    history = History(classes)
    result = Analysis(history)
    for source in in_time_order(list(inputs)):
        reader = Reader(history, latest_time(source))
        try:
            for block in blocks(source, progress):
                reader.feed(block)
        except InputError as problem:
            result.problems.append(str(problem))
        reader.finish()
        result.lines += reader.lines
        result.bytes += reader.bytes
        result.truncated += reader.truncated
    history.finish()
    return result


def in_time_order(inputs: list[str]) -> list[str]:
    """Several files are one history: ordered by the first time in each, else by last change."""
    return sorted(inputs, key=_first_time) if len(inputs) > 1 else inputs


def _first_time(source: str) -> datetime:
    latest = latest_time(source)
    if source == STDIN:
        return latest  # reading it here would lose it
    framing, parser = Framing(), LogParser(latest)
    try:
        head = next(blocks(source), b"")
    except InputError:
        return latest
    for number, raw in enumerate(head.split(b"\n", 2000)[:2000], 1):
        for line in framing.feed(number, raw):
            for record in parser.feed(line):
                if record.time is not None:
                    return record.time.replace(tzinfo=None)
    return latest
