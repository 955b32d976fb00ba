"""Lines of a vLLM log -> records: one log call of one process, however many lines it takes.

Formats by version are listed in the functions that read them. Two facts shape this module:

* vLLM repeats its prefix on every line of a record and ends all lines but the last with an
  extra ``\\r``. So text of a user, however many newlines it holds, stays behind the prefix of
  the record that printed it and never starts a line of its own.
* Processes write to one stream. Records are kept apart by the process prefix
  ``(Worker_TP1 pid=115)``; lines that no logger wrote are gathered per process.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ..records import Line, Record
from ..sources.framing import FIRST_YEAR, LAST_YEAR
from .requests import REQUEST_FILES

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MAX_RECORD_LINES = 2000
MAX_RECORD_CHARS = 1 << 21
_KEPT_PREFIXES = 6  # lines of a record repeat its prefix, and a few processes interleave
_KEPT_PIDS = 1024
_OPEN_BARE = 4  # records of a process without a prefix that may interleave
_KEPT_DONE = 256  # access lines of one second that wait for a record begun before them

# (EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1586] msg     INFO 06-01 12:00:00 llm_engine.py:161] msg
_PREFIX = re.compile(
    r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d)(?::(\d\d))?(?:[.,]\d+)? "
    r"\[?((?:[\w.-]+/)*[\w.-]+):(\d+)\] ?"
)
# (Worker_TP0 pid=12)  (VllmWorker rank=3 pid=12)  (VllmWorker TP0 pid=12)
_PROCESS = re.compile(r"\(([A-Za-z_][\w.-]*)(?: (?:rank=)?(\w+))? pid=(\d{1,18})\) ?")
# INFO:     192.0.2.10:57224 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error
_UVICORN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,}")
# [rank5]:[W920 12:00:00.000000000 CUDACachingAllocator.cpp:3933] msg
_CPP = re.compile(
    r"(?:\[rank(\d+)\]:)?\[([IWEF])(\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.\d+ (?:\d+ )?([\w.]+):\d+\] ?"
)
_RANK = re.compile(r"\[rank(\d+)\]: ?")
# 2025-11-02 12:00:04,315 - vllm.v1.engine.core_client - ERROR - msg   (a logging config of the user's)
_DASHED = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? - vllm[\w.]*?\.?(\w+) - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
)
# multiprocessing prints it above the traceback that ended a process: "Process EngineCore_DP0:"
_PROCESS_TITLE = re.compile(r"Process [A-Za-z][\w-]{0,40}:")
_PROCESS_AT_END = re.compile(r" ?\([A-Za-z_][\w.-]*(?: (?:rank=)?\w+)? pid=\d+\) $")
_PROGRESS = re.compile(r"(?:it/s|s/it|B/s)\]|\d+%\|")
_GLUED = re.compile(
    r"\(([A-Za-z_][\w.-]*)(?: (?:rank=)?\w+)? pid=(\d+)\) "
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./-]+:\d+\] "
)
_ACCESS_GLUED = re.compile(r'" \d{3}(?: [A-Z][A-Za-z-]*)*(?=\()')

# Modules whose records repeat what a client sent: request ids, prompts, model and LoRA names.
# Nothing in them is evidence, and a prefix inside their text is not a prefix.
USER_TEXT_FILES = frozenset(
    [
        "logger.py",
        "request_logger.py",
        "async_llm.py",
        "async_llm_engine.py",
        "serving.py",
        "serving_chat.py",
        "serving_completion.py",
        "serving_engine.py",
        "serving_models.py",
        "serving_embedding.py",
        "serving_responses.py",
        "serving_tokenization.py",
        "protocol.py",
        "chat_utils.py",
        "launcher.py",
        "api_router.py",
        "tool_parser.py",
        "preprocess.py",
        "input_processor.py",
        "processor.py",
    ]
)


@dataclass(slots=True)
class Clock:
    """Gives ``MM-DD HH:MM:SS`` its year: the latest one not after ``latest``.

    The log has neither year nor zone, so results are naive local times. ``latest`` is the
    modification time of the file, or now. A day is allowed for a zone behind ours.
    """

    latest: datetime
    _cache: dict[tuple[str, ...], datetime | None] = field(default_factory=dict)

    def at(self, month: str, day: str, hour: str, minute: str, second: str | None) -> datetime | None:
        """The time, or None where the numbers are no date."""
        key = (month, day, hour, minute, second or "00")
        if key not in self._cache:
            if len(self._cache) > 256:
                self._cache.clear()
            self._cache[key] = self._resolve(*(int(part) for part in key))
        return self._cache[key]

    def _resolve(self, month: int, day: int, hour: int, minute: int, second: int) -> datetime | None:
        day_before_last = datetime.max - timedelta(days=1)  # a file may be dated 9999-12-31
        bound = min(self.latest, day_before_last) + timedelta(days=1)
        for year in range(bound.year, bound.year - 9, -1):  # 9: back over a leap day
            try:
                time = datetime(year, month, day, hour, minute, second)
            except ValueError:
                continue
            if time <= bound:
                return time
        return None


_Done = tuple[int, int, Record]
"""A complete record behind its place: its first line, and when it began among those of that line."""


@dataclass(slots=True, eq=False)
class _Open:
    """A record that may still grow."""

    order: int
    process: str
    pid: int | None
    level: str
    time: datetime | None
    file: str
    origin: str
    key: tuple[object, ...]
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    chars: int = 0
    first_returns: int = 0
    last_returns: int = 0
    closed: bool = False
    timed: bool = True
    returns: list[int] = field(default_factory=list)

    def add(self, line: Line, text: str) -> None:
        if not self.lines:
            self.first_returns = line.carriage_returns
        elif line.carriage_returns < self.first_returns:
            self.closed = True  # the last line of a record has one \r less than the others
        self.last_returns = line.carriage_returns
        if len(self.lines) < MAX_RECORD_LINES and self.chars < MAX_RECORD_CHARS:
            self.lines.append(text)
            self.numbers.append(line.number)
            self.chars += len(text)
            if self.file in REQUEST_FILES:
                self.returns.append(line.carriage_returns)

    @property
    def place(self) -> tuple[int, int]:
        return self.numbers[0], self.order

    @property
    def announces_more(self) -> bool:
        """All lines of a record but the last end with an extra ``\\r``."""
        return self.first_returns > 0 and self.last_returns >= self.first_returns

    def done(self) -> _Done:
        return *self.place, self.record()

    def record(self) -> Record:
        return Record(
            self.process,
            self.pid,
            self.level,
            self.time,
            self.file,
            tuple(self.lines),
            tuple(self.numbers),
            self.origin,
            self.timed,
            returns=tuple(self.returns),
        )


class LogParser:
    """Assembles records from the lines of one input, in order. Bounded in memory."""

    def __init__(self, latest: datetime) -> None:
        self._clock = Clock(latest)
        self._open: dict[tuple[str, str], list[_Open]] = {}
        self._pids: dict[tuple[str, str], None] = {}  # in the order in which they were seen first
        self._leads: set[str] = set()
        self._prefixes: dict[str, tuple[tuple[str, ...], datetime | None, str, int | None]] = {}
        self._logged = 0
        self._now: datetime | None = None
        self._after_asgi_error = False
        self._done: list[_Done] = []
        self._begun = 0
        self.unparsed = 0

    def feed(self, line: Line) -> Iterator[Record]:
        """The records that are complete with ``line``, in the order of their first lines."""
        closed = False
        for done in self._feed(line):
            closed = True
            heapq.heappush(self._done, done)
        if closed:  # only then can the oldest open record be another one
            yield from self._release()

    def flush(self) -> Iterator[Record]:
        """The records still open, as at the end of the input or after a silence."""
        for done in self._close_all():
            heapq.heappush(self._done, done)
        yield from self._release()

    # --- for an input that does not end ----------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether a record may still grow."""
        return bool(self._open or self._done)

    @property
    def open_since(self) -> int | None:
        """Number of the first line that is held back, alone or in a record that may still grow."""
        numbers = [first.place[0]] if (first := self._first()) is not None else []
        return min(numbers + [line for line, _, _ in self._done[:1]], default=None)

    def peek(self) -> Iterator[Record]:
        """What ``flush`` would give, left open: an error is counted before its record is complete."""
        yield from (record for _, _, record in self._done)
        for opened in self._open.values():
            for one in opened:
                yield one.record()

    def rest(self) -> Iterator[Record]:
        """A short silence: the records that do not announce another line.

        What a client wrote in the middle of a record must not become the beginning of one because
        a writer was slow.
        """
        for slot, opened in list(self._open.items()):
            if not any(one.announces_more for one in opened):
                for done in self._close(self._open.pop(slot)):
                    heapq.heappush(self._done, done)
        yield from self._release()

    def until(self, latest: datetime) -> None:
        """Times may now be as late as ``latest``."""
        self._clock = Clock(latest)

    def snapshot(self) -> dict[str, object]:
        """What ``restore`` needs to go on, as plain JSON data. Only when nothing is open."""
        return {
            "pids": list(self._pids),
            "leads": sorted(self._leads),
            "logged": self._logged,
            "now": self._now.isoformat() if self._now else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``snapshot`` was taken."""
        self._pids = dict.fromkeys((process, pid) for process, pid in saved["pids"])
        self._leads = set(saved["leads"])
        self._logged = saved["logged"]
        self._now = datetime.fromisoformat(saved["now"]) if saved["now"] else None

    def _release(self) -> Iterator[Record]:
        """What no open record began before.

        Where much waits for one, it is closed, unless its next line would then pass for a first one.
        """
        first = self._first()
        while self._done:
            if first is None or self._done[0][:2] < first.place:
                yield heapq.heappop(self._done)[2]
            elif len(self._done) <= _KEPT_DONE:
                return
            elif first.announces_more:
                yield heapq.heappop(self._done)[2]
            else:
                for opened in self._open.values():
                    if first in opened:
                        opened.remove(first)
                heapq.heappush(self._done, first.done())
                first = self._first()

    def _first(self) -> _Open | None:
        return min(
            (one for opened in self._open.values() for one in opened), key=lambda one: one.place, default=None
        )

    def _alone(self, record: Record) -> _Done:
        """The place of a record that is complete with its first line."""
        return record.numbers[0], self._order(), record

    def _order(self) -> int:
        self._begun += 1
        return self._begun

    def _feed(self, line: Line) -> Iterator[_Done]:
        text = line.text
        if text[:1] == "{" and (record := self._json(line)) is not None:
            yield self._alone(record)
            return
        for prefix, parsed in self._prefixes.items():
            if text.startswith(prefix):
                yield from self._logged_line(line, len(prefix), *parsed)
                return
        match = _PREFIX.search(text)
        if match is not None and (found := self._lead(text, match.start())) is not None:
            level, month, day, hour, minute, second, path, lineno = match.groups()
            # vLLM's own clock, not the wrapper's, which differs from line to line of one record
            key = (level, month, day, hour, minute, second, path.rpartition("/")[2], lineno)
            parsed = (key, self._clock.at(month, day, hour, minute, second), *found)
            if len(self._prefixes) >= _KEPT_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
            self._prefixes[text[: match.end()]] = parsed
            yield from self._logged_line(line, match.end(), *parsed)
            return
        if (match := _CPP.match(text)) is not None:
            yield self._alone(self._cpp(line, match))
            return
        if (match := _DASHED.match(text)) is not None:
            yield self._alone(self._dashed(line, match))
            return
        yield from self._raw_line(line)

    # --- lines a logger wrote ------------------------------------------------------------------

    def _lead(self, text: str, end: int) -> tuple[str, int | None] | None:
        """Process and pid before the level at ``end``, or None if this is no prefix.

        0.27 writes ``(APIServer pid=1) (Worker pid=2) INFO``: the last one is right.
        ``VLLM_LOGGING_PREFIX`` stands before (0.32) or after (0.27) the process; it is only
        trusted when it was there before any request could be. What else may precede is a
        progress bar that had no newline.
        """
        if end == 0:
            return "", None
        lead = text[:end]
        process, pid = "", None
        if "pid=" in lead:
            for match in _PROCESS.finditer(lead):
                process = match[1] if match[2] is None else f"{match[1]}_{match[2]}"
                pid = int(match[3])
            lead = _PROCESS.sub("", lead)
        if not lead or lead.isspace() or lead in self._leads:
            return process, pid
        if len(lead) <= 64 and self._logged < 200 and not self._quotes_client(lead):
            self._leads.add(lead)
            return process, pid
        if _PROGRESS.search(lead) and '"' not in lead:
            return process, pid
        return None

    def _quotes_client(self, lead: str) -> bool:
        """Whether a client may have written what follows ``lead``: a URL, or the text of an exception.

        ``(APIServer pid=1) INFO:     192.0.2.1:50 - "GET /?q=ERROR 11-02 10:00:00 [core.py:1] …``
        """
        return self._after_asgi_error or '"' in lead or _UVICORN.search(lead) is not None

    def _logged_line(
        self,
        line: Line,
        end: int,
        key: tuple[str, ...],
        clock: datetime | None,
        process: str,
        pid: int | None,
    ) -> Iterator[_Done]:
        """A line whose prefix, of ``end`` characters, was read before."""
        self._logged += 1
        self._after_asgi_error = False
        time = line.time or clock
        file = key[-2]
        text = line.text[end:]
        if pid is not None:
            self._pids[process, str(pid)] = None
            if len(self._pids) > _KEPT_PIDS:
                del self._pids[next(iter(self._pids))]  # of an engine long gone
        if line.traffic is not None:  # complete, whatever stands in the lines around it
            yield self._alone(Record(
                process, pid, key[0], time, file, (text,), (line.number,), line.origin, traffic=line.traffic
            ))  # fmt: skip
            yield from self._passed(time)
            return
        # Pasted logs lose newlines: ERROR 11-07 12:01:00 [x.py:5] a ERROR 11-07 12:01:00 [x.py:5] b
        own = line.text[line.text.rfind(key[0], 0, end) : end]
        if own in text and file not in USER_TEXT_FILES:
            for piece in text.split(own):
                own_text = _PROCESS_AT_END.sub("", piece)
                yield from self._append(line, own_text, key, time, process, pid)
            return
        # The process name is trusted only where it stands in front, so glue is split off here.
        if "pid=" in text and file not in USER_TEXT_FILES and (cut := self._glue(text)) is not None:
            yield from self._append(line, text[:cut], key, time, process, pid)
            yield from self._feed(
                Line(line.number, text[cut:], line.time, line.origin, line.carriage_returns)
            )
            return
        yield from self._append(line, text, key, time, process, pid)

    def _glue(self, text: str) -> int | None:
        """Where a second record begins that lost its newline, or None.

        ``…alloc-conf)(APIServer pid=1) ERROR 06-27 09:01:24 [async_llm.py:699] …``: only a
        process that has written before counts, and never at the start of the text, where the
        continuation line of a request id would put it.
        """
        for match in _GLUED.finditer(text):
            before = text[: match.start()]
            if (
                before.rstrip()
                and (match[1], match[2]) in self._pids
                and before.count('"') % 2 == 0
                and not before.endswith("\\n")
            ):
                return match.start()
        return None

    def _append(
        self,
        line: Line,
        text: str,
        key: tuple[str, ...],
        time: datetime | None,
        process: str,
        pid: int | None,
    ) -> Iterator[_Done]:
        level, file = key[0], key[-2]
        slot = (line.origin, f"{process}:{pid}")
        opened = self._open.setdefault(slot, [])
        for one in opened:
            if one.key == key and not one.closed:
                one.add(line, text)
                break
        else:
            if pid is not None or (opened and opened[0].key[1:6] != key[1:6]):
                yield from self._close(opened)
            elif len(opened) >= _OPEN_BARE:
                yield opened.pop(0).done()
            fresh = _Open(self._order(), process, pid, level, time, file, line.origin, key)
            fresh.add(line, text)
            opened.append(fresh)
        yield from self._passed(time)
        if len(self._open) > 512:
            yield from self._close_all()

    def _passed(self, time: datetime | None) -> Iterator[_Done]:
        """The log's own clock says ``time``."""
        if time is not None and time != self._now:
            self._now = time
            yield from self._close_older(time)

    # --- other lines ---------------------------------------------------------------------------

    def _json(self, line: Line) -> Record | None:
        """VLLM 0.32+ ``--logging-config.formatter json``, or a python-json-logger config before."""
        head = line.text[:400]
        if '"message"' not in line.text or ('"levelname"' not in head and '"level"' not in head):
            return None
        try:
            raw = json.loads(line.text)
        except (ValueError, RecursionError):  # [[[[… 100,000 deep
            return None
        if not isinstance(raw, dict) or not isinstance(raw.get("message"), str):
            return None
        level = str(raw.get("levelname") or raw.get("level") or "").upper()
        if level not in LEVELS:
            return None
        name = str(raw.get("name", ""))
        text = raw["message"]
        for extra in ("exc_info", "stack_info"):
            if isinstance(raw.get(extra), str):
                text += "\n" + raw[extra]
        file = "uvicorn" if name.startswith("uvicorn") else f"{name.rpartition('.')[2]}.py"
        process = raw.get("vllm_process_name") or raw.get("processName") or ""
        pid = raw.get("process")
        lines = tuple(text.split("\n"))[:MAX_RECORD_LINES]
        return Record(
            str(process)[:80],
            pid if isinstance(pid, int) else None,
            level,
            line.time or _asctime(raw.get("asctime")),
            file,
            lines,
            (line.number,) * len(lines),
            line.origin,
            traffic=line.traffic,
        )

    def _cpp(self, line: Line, match: re.Match[str]) -> Record:
        rank, letter, month, day, hour, minute, second, file = match.groups()
        time = line.time or self._clock.at(month, day, hour, minute, second)
        level = {"I": "INFO", "W": "WARNING"}.get(letter, "ERROR")
        return Record(
            f"rank{rank}" if rank else "",
            None,
            level,
            time,
            file,
            (line.text[match.end() :],),
            (line.number,),
            line.origin,
        )

    def _dashed(self, line: Line, match: re.Match[str]) -> Record:
        text = line.text[match.end() :]
        return Record(
            "",
            None,
            match[3],
            line.time or _asctime(match[1]),
            f"{match[2]}.py",
            (text,),
            (line.number,),
            line.origin,
        )

    def _raw_line(self, line: Line) -> Iterator[_Done]:
        """A line without a level: uvicorn, interpreter tracebacks, C++ and kernel messages."""
        text, process, pid = line.text, "", None
        if text[:1] == "(":
            while (match := _PROCESS.match(text)) is not None:
                process = match[1] if match[2] is None else f"{match[1]}_{match[2]}"
                pid, text = int(match[3]), text[match.end() :]
        if (match := _UVICORN.match(text)) is not None:
            text = text[match.end() :]
            self._after_asgi_error = text.startswith("Exception in ASGI")
            cut = _ACCESS_GLUED.search(text)
            shown = text if cut is None else text[: cut.end()]
            yield self._alone(Record(
                process or "APIServer", pid, match[1], line.time or self._now, "uvicorn",
                (shown,), (line.number,), line.origin, line.time is not None,
            ))  # fmt: skip
            if cut is not None:
                yield from self._feed(
                    Line(line.number, text[cut.end() :], line.time, line.origin, line.carriage_returns)
                )
            return
        if (match := _RANK.match(text)) is not None:
            process, text = process or f"rank{match[1]}", text[match.end() :]
        if not process and self._after_asgi_error:
            process = "APIServer"  # uvicorn prints the exception of a handler below its own line
        self.unparsed += 1
        slot = (line.origin, f"{process}:{pid}:raw")
        opened = self._open.setdefault(slot, [])
        if opened and (
            len(opened[0].lines) >= 400
            or opened[0].chars > MAX_RECORD_CHARS // 2
            or _PROCESS_TITLE.fullmatch(text)
        ):
            yield from self._close(opened)
        if not opened:
            opened.append(
                _Open(
                    self._order(),
                    process,
                    pid,
                    "",
                    line.time or self._now,
                    "",
                    line.origin,
                    key=("raw",),
                    timed=line.time is not None,
                )
            )
        opened[0].lines.append(text)
        opened[0].numbers.append(line.number)
        opened[0].chars += len(text)

    # --- closing ---------------------------------------------------------------------------------

    def _close(self, opened: list[_Open]) -> Iterator[_Done]:
        for one in opened:
            yield one.done()
        opened.clear()

    def _close_older(self, time: datetime) -> Iterator[_Done]:
        """Close what has been silent while the log's own clock went on."""
        for slot, opened in list(self._open.items()):
            seconds = seconds_between(opened[-1].time, time) if opened else None
            if opened and (opened[-1].time is None or (seconds is not None and seconds > 1)):
                yield from self._close(opened)
            if not opened:
                del self._open[slot]

    def _close_all(self) -> Iterator[_Done]:
        for opened in self._open.values():
            yield from self._close(opened)
        self._open.clear()


def seconds_between(earlier: datetime | None, later: datetime | None) -> float | None:
    """Seconds from ``earlier`` to ``later``; None where one is missing or only one has a zone."""
    if earlier is None or later is None or (earlier.tzinfo is None) != (later.tzinfo is None):
        return None
    return (later - earlier).total_seconds()


def _asctime(text: object) -> datetime | None:
    """``2026-11-01 00:20:00,417``: no zone, so a local time."""
    try:
        time = datetime.fromisoformat(str(text).replace(",", "."))
    except ValueError:
        return None
    # "0001-01-01 00:00:00" has no seconds since the epoch where clocks are behind UTC
    return time if FIRST_YEAR <= time.year <= LAST_YEAR else None
