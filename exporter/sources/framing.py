"""Takes a line out of what a container runtime, service manager or launcher wrapped around it.

The wrapper is recognised per line and never configured. Wrappers nest (stern around CRI),
so the first match is taken off and the rest is looked at again.

A runtime cuts long lines: CRI marks the pieces ``P`` and the last ``F``; docker's json-file
leaves the newline out of ``log``. ``Framing`` joins them again, one pending line per stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..records import Line, Traffic
from .pasted import Pasted

MAX_LINE = 1 << 20
"""Bytes kept of one line: its head and its tail. A scheduler dump ends with the totals."""

_HEAD = MAX_LINE - (MAX_LINE >> 2)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|#033\[[0-9;]*m")

# 2026-07-03T13:21:34.123456789Z stdout F text
_CRI = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([PF])(?::\w+)* ?")
# 2026-02-06T12:11:00Z text   [2026-02-06T12:11:00Z] text   (docker logs -t, buildkite, kubectl --timestamps)
_STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))\]? +")
# INFO 2025-11-19T20:16:36.096625454Z [resource.labels.containerName: vllm] text     (Google Cloud Logging)
_GOOGLE = re.compile(
    r"(?:[A-Z]{4,9} )?(\d{4}-\d\d-\d\dT[\d:.]+Z) \[resource\.labels\.containerName: ([\w.-]{1,80})\] "
)
# Nov 30 16:26:46 host vllm[812]: text
_JOURNAL = re.compile(r"([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) [\w.-]+ ([\w.@/-]+?)(?:\[\d+\])?: ")
# 2026-11-30T16:26:46+0000 host vllm[812]: text
_JOURNAL_ISO = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?[+-]\d\d:?\d\d) [\w.-]+ ([\w.@/-]+?)(?:\[\d+\])?: "
)
# vllm-1  | text
_COMPOSE = re.compile(r"([a-zA-Z0-9][\w.-]{0,80}?) +\| ")
# (RayWorkerWrapper pid=3012, ip=192.0.2.10) text [repeated 7x across cluster]
_RAY = re.compile(r"\((\w+) pid=(\d+), ip=([\da-fA-F.:]+)\) ")
_RAY_REPEAT = re.compile(r" ?\[repeated \d+x across cluster\](?: \(Ray deduplicates logs[^)]*\))?")
# model-prefill-0-2 vllm (Worker pid=302) ERROR …      pod and container by stern; two words could be
# anything, so they are only taken for that where a line of a server follows once
_STERN = re.compile(
    r"([a-z0-9](?:[a-z0-9.-]{0,120}[a-z0-9])?)[ /](?:› )?([a-z0-9][a-z0-9-]{0,60}) "
    r"(?=\(\w[\w.-]* pid=|[A-Z]+ \d\d-\d\d |[A-Z]+: {2,}|\d{4}-\d\d-\d\dT|Traceback|  File \")"
)
# [pod/model-prefill-0-2/vllm] (Worker pid=302) ERROR …      by kubectl logs --prefix
_KUBECTL = re.compile(r"\[pod/([a-z0-9][a-z0-9.-]{0,252})/([a-z0-9][a-z0-9-]{0,62})\] ?")
_KEPT_CONTAINERS = 4096
FIRST_YEAR, LAST_YEAR = 2000, 9000
"""No vLLM ran before, and near the ends of the calendar a zone can't be subtracted any more."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How one runtime wraps lines. ``fast`` is a bytes pattern for the scan's skip list."""

    name: str
    fast: bytes


CRI = Wrapper("cri", rb"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) F ")
DOCKER = Wrapper("docker", rb'\{"log": ?"')
COMPOSE = Wrapper("compose", rb"[\w.-]+ +\| ")
JOURNAL = Wrapper("journald", rb"[A-Z][a-z]{2} [ \d]\d [\d:]{8} [\w.-]+ [\w.@/-]+(?:\[\d+\])?: ")
STAMP = Wrapper("timestamp", rb"\[?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)\]? +")
RAW = Wrapper("raw", rb"")


def wrapper_of(line: bytes) -> Wrapper:
    """The outermost wrapper of ``line``, for the scan's skip list."""
    for wrapper in (CRI, DOCKER, JOURNAL, COMPOSE, STAMP):
        if re.match(wrapper.fast, line):
            return wrapper
    return RAW


def clean(text: str) -> str:
    """``text`` without terminal colours (``\\x1b[36m``, or ``#033[36m`` as syslog writes it)."""
    if "\x1b" in text or "#033" in text:
        text = _ANSI.sub("", text)
    return text


class Framing:
    """Unwraps and rejoins the lines of one input, in order.

    ``feed`` takes raw lines without their newline and yields finished ``Line``s; ``flush``
    yields what is still pending. Memory is bounded: at most ``MAX_LINE`` per stream and
    64 streams; older pending pieces are given out as they are.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Line] = {}
        self._containers: set[str] = set()
        self._pasted = Pasted()
        self.truncated = 0

    def feed(self, number: int, raw: bytes, traffic: Traffic | None = None) -> Iterator[Line]:
        """The complete lines that ``raw`` ends, usually one."""
        if len(raw) > MAX_LINE:
            raw = raw[:_HEAD] + raw[-(MAX_LINE - _HEAD) :]
            self.truncated += 1
        text, returns = _ended(raw.decode("utf-8", "replace"))
        text = self._pasted.take_off(text)
        line = self._unwrap(Line(number, text, carriage_returns=returns))
        if line is not None:
            yield line if traffic is None else line._replace(traffic=traffic)
        while len(self._pending) > 64:
            yield from self._give_up()

    def flush(self) -> Iterator[Line]:
        """The pieces whose end never came."""
        while self._pending:
            yield from self._give_up()

    @property
    def waiting(self) -> bool:
        """Whether a cut line still waits for its end."""
        return bool(self._pending)

    @property
    def waiting_since(self) -> int | None:
        """Number of the first line whose end has not come."""
        return min((line.number for line in self._pending.values()), default=None)

    def _give_up(self) -> Iterator[Line]:
        """The oldest line that waits, as far as it came."""
        line = self._unwrap(self._pending.pop(next(iter(self._pending))))
        if line is not None:
            yield line

    def _join(self, stream: str, piece: Line, last: bool) -> Line | None:
        """The line that ``piece`` is the last of, or None where its end is to come."""
        before = self._pending.pop(stream, None)
        if before is not None:
            joined = before.text + piece.text
            if len(joined) > MAX_LINE:
                joined = joined[:_HEAD] + joined[-(MAX_LINE - _HEAD) :]
                self.truncated += 1
            piece = piece._replace(number=before.number, text=joined, time=before.time)
        if last:
            return piece
        self._pending[stream] = piece
        return None

    def _unwrap(self, line: Line) -> Line | None:
        """``line`` without its wrappers, or None where the runtime cut it and its end is to come.

        What stands inside a runtime's wrapper is looked at once it is whole: the rest of a cut
        line is text, whatever it begins with.
        """
        number, text, time, origin, returns, _ = line
        if text[:1] in _BARE and "\x1b" not in text and ", ip=" not in text[:80]:
            return line
        text = clean(text)
        for _ in range(4):
            first = text[:1]
            if first == "{" and (inner := _docker(text)) is not None:
                text, stream, when = inner
                time, last = when or time, text.endswith("\n")
                if self._pending or not last:
                    piece = Line(number, text, time, origin)
                    if (whole := self._join(origin + stream, piece, last)) is None:
                        return None
                    number, text, time, origin, _, _ = whole
                text, returns = _ended(text.rstrip("\n"))
                text = clean(text)
            elif first.isdigit() and (match := _CRI.match(text)):
                time = parse_stamp(match[1]) or time
                text = text[match.end() :]
                if self._pending or match[3] == "P":
                    piece = Line(number, text, time, origin, returns)
                    if (whole := self._join(origin + match[2], piece, match[3] == "F")) is None:
                        return None
                    number, text, time, origin, returns, _ = whole
                    text = clean(text)
            elif "[resource.labels." in text[:120] and (match := _GOOGLE.match(text)):
                time = parse_stamp(match[1]) or time
                origin = match[2]
                text = text[match.end() :]
            elif first.isdigit() and (match := _JOURNAL_ISO.match(text)):
                time = parse_stamp(match[1]) or time
                origin = origin or match[2]
                text = text[match.end() :]
            elif (first.isdigit() or first == "[") and (match := _STAMP.match(text)):
                time = parse_stamp(match[1]) or time
                text = text[match.end() :]
            elif first.isupper() and (match := _JOURNAL.match(text)):
                origin = origin or match[2]
                text = text[match.end() :]
            elif first == "(" and (match := _RAY.match(text)):
                origin = match[3]
                text = f"({match[1]} pid={match[2]}) " + _RAY_REPEAT.sub("", text[match.end() :])
            elif first == "[" and (match := _KUBECTL.match(text)):
                origin = f"{match[1]}/{match[2]}"
                text = text[match.end() :]
            elif first.isalnum() and (match := _COMPOSE.match(text)):
                origin = match[1]
                text = text[match.end() :]
            elif first.islower() and (found := self._container(text)) is not None:
                origin, text = found
            else:
                break
        return Line(number, text, time, origin, returns)

    def _container(self, text: str) -> tuple[str, str] | None:
        """Pod and container that stern put before ``text``, and the rest; None where it did not.

        Once known they are recognised before any line: the last one of a traceback
        (``llama-70b-0 vllm torch.OutOfMemoryError: CUDA out of memory. …``) looks like nothing.
        """
        pod, _, rest = text.partition(" ")
        container, _, rest = rest.partition(" ")
        if (name := f"{pod}/{container}") in self._containers:
            return name, rest
        if (match := _STERN.match(text)) is None:
            return None
        name = f"{match[1]}/{match[2]}"
        if len(self._containers) >= _KEPT_CONTAINERS:
            self._containers.clear()
        self._containers.add(name)
        return name, text[match.end() :]


_BARE = frozenset(("(", " ", ""))  # no wrapper but Ray's begins so


def _ended(text: str) -> tuple[str, int]:
    """``text`` without the carriage returns at its end, and how many they were."""
    stripped = text.rstrip("\r")
    return stripped, len(text) - len(stripped)


def _docker(text: str) -> tuple[str, str, datetime | None] | None:
    """``log``, stream and time of a docker json-file line, or None if it is something else."""
    if '"log"' not in text[:200]:
        return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):  # [[[[… 100,000 deep
        return None
    log = raw.get("log") if isinstance(raw, dict) else None
    if not isinstance(log, str):
        return None
    stamp = raw.get("time")
    return log, str(raw.get("stream", "")), parse_stamp(stamp) if isinstance(stamp, str) else None


def parse_stamp(text: str) -> datetime | None:
    """An RFC 3339 time with its zone, in UTC, cut to microseconds; None if it is none, or no server's."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)", text)
    if match is None:
        return None
    try:
        time = datetime.fromisoformat(match[1])
        zone = match[3]
        if zone != "Z":
            sign = -1 if zone[0] == "-" else 1
            offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
            time -= sign * offset
    except (ValueError, OverflowError):
        return None
    if not FIRST_YEAR <= time.year <= LAST_YEAR:
        return None
    micros = int((match[2] or "0").ljust(9, "0")[:6])
    return time.replace(microsecond=micros, tzinfo=UTC)
