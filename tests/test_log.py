from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.records import Line, Record
from exporter.sources.framing import Framing
from exporter.vllm.log import MAX_RECORD_LINES, USER_TEXT_FILES, Clock, LogParser, seconds_between

LATEST = datetime(2026, 11, 30, 19, 0)
NOV = datetime(2026, 11, 2, 10, 0, 0)
CORE = "(EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1586] "


def parsed(*raw: str | bytes, latest: datetime = LATEST) -> list[Record]:
    """The records of ``raw`` lines, through framing as in a real input."""
    framing, parser = Framing(), LogParser(latest)
    out: list[Record] = []
    for number, one in enumerate(raw, 1):
        for line in framing.feed(number, one.encode() if isinstance(one, str) else one):
            out += parser.feed(line)
    for line in framing.flush():
        out += parser.feed(line)
    return out + list(parser.flush())


def texts(*raw: str) -> list[tuple[str, tuple[str, ...]]]:
    """Process and lines of every record."""
    return [(record.process, record.lines) for record in parsed(*raw)]


PREFIXES = {
    "0.2.7-closing-bracket-only": (
        "INFO 06-01 12:00:00 llm_engine.py:161] ",
        "",
        None,
        "INFO",
        "llm_engine.py",
    ),
    "0.8-brackets": (
        "ERROR 05-04 12:38:38 [multiproc_executor.py:380] ",
        "",
        None,
        "ERROR",
        "multiproc_executor.py",
    ),
    "v0-worker": (
        "(VllmWorkerProcess pid=77) WARNING 06-01 12:00:00 utils.py:9] ",
        "VllmWorkerProcess",
        77,
        "WARNING",
        "utils.py",
    ),
    "0.8-worker-rank": (
        "(VllmWorker rank=3 pid=12) ERROR 05-04 12:38:38 [a.py:3] ",
        "VllmWorker_3",
        12,
        "ERROR",
        "a.py",
    ),
    "0.10.1-worker": (
        "(VllmWorker TP0 pid=12) ERROR 09-04 12:38:38 [a.py:3] ",
        "VllmWorker_TP0",
        12,
        "ERROR",
        "a.py",
    ),
    "0.10.2-engine": (
        "(EngineCore_DP0 pid=309) INFO 09-20 08:04:02 [core.py:69] ",
        "EngineCore_DP0",
        309,
        "INFO",
        "core.py",
    ),
    "0.18-worker": (
        "(Worker_DP0_PP1_TP1_EP3 pid=115) INFO 04-01 08:00:00 [gpu_worker.py:1] ",
        "Worker_DP0_PP1_TP1_EP3",
        115,
        "INFO",
        "gpu_worker.py",
    ),
    "0.27-two-processes": (
        "(APIServer pid=1) (Worker pid=2) INFO 07-01 08:00:00 [x.py:1] ",
        "Worker",
        2,
        "INFO",
        "x.py",
    ),
    "0.31-record-prefix": (
        "(ApiServer_1 pid=31) CRITICAL 10-01 08:00:00 [x.py:1] ",
        "ApiServer_1",
        31,
        "CRITICAL",
        "x.py",
    ),
    "0.13-colours": (
        "\x1b[0;36m(EngineCore_DP0 pid=4)\x1b[0;0m INFO 11-02 10:00:00 [core.py:1] ",
        "EngineCore_DP0",
        4,
        "INFO",
        "core.py",
    ),
    "force-color": (
        "\x1b[0;36m(APIServer pid=9)\x1b[0;0m \x1b[33mWARNING\x1b[0m \x1b[90m11-02 10:00:00\x1b[0m \x1b[90m[core.py:1]\x1b[0m ",
        "APIServer",
        9,
        "WARNING",
        "core.py",
    ),
    "debug-path": (
        "(EngineCore pid=4) DEBUG 11-02 10:00:00 [v1/worker/gpu_worker.py:280] ",
        "EngineCore",
        4,
        "DEBUG",
        "gpu_worker.py",
    ),
    "debug-short-path": (
        "DEBUG 11-02 10:00:00 [model_executor/.../utils/fp8_utils.py:9] ",
        "",
        None,
        "DEBUG",
        "fp8_utils.py",
    ),
    "without-seconds": ("INFO 11-02 10:00 [core.py:1] ", "", None, "INFO", "core.py"),
    "with-milliseconds": ("INFO 11-02 10:00:00.123 [core.py:1] ", "", None, "INFO", "core.py"),
    "prefix-before-the-process": (
        "[gpu-7] (EngineCore pid=4) INFO 11-02 10:00:00 [core.py:1] ",
        "EngineCore",
        4,
        "INFO",
        "core.py",
    ),
    "prefix-after-the-process": (
        "(EngineCore pid=4) replica=2 INFO 11-02 10:00:00 [core.py:1] ",
        "EngineCore",
        4,
        "INFO",
        "core.py",
    ),
    "prefix-without-a-process": ("prod/llama INFO 11-02 10:00:00 [core.py:1] ", "", None, "INFO", "core.py"),
    "behind-a-progress-bar": (
        "Loading shards:  50%|█████     | 1/2 [00:01<00:01,  1.25s/it](Worker pid=2) INFO 11-02 10:00:00 [core.py:1] ",
        "Worker",
        2,
        "INFO",
        "core.py",
    ),
}


class TestPrefixes:
    """vLLM's own text formats, by version."""

    @pytest.mark.parametrize("name", PREFIXES)
    def test_a_prefix_is_read(self, name: str) -> None:
        """Process, pid, level, file and text are taken out of the prefix of every version."""
        raw, process, pid, level, file = PREFIXES[name]
        (record,) = parsed(f"{raw}Chunked prefill is on")
        assert (record.process, record.pid, record.level, record.file) == (process, pid, level, file)
        assert record.lines == ("Chunked prefill is on",)
        assert record.numbers == (1,)
        assert record.timed

    @pytest.mark.parametrize("name", PREFIXES)
    def test_a_prefix_stands_on_every_line(self, name: str) -> None:
        """All lines of a record carry its prefix and end in a carriage return but the last."""
        raw = PREFIXES[name][0]
        (record,) = parsed(f"{raw}one\r", f"{raw}\r", f"{raw}  three")
        assert record.lines == ("one", "", "  three")
        assert record.numbers == (1, 2, 3)

    def test_the_time_is_local_and_without_a_zone(self) -> None:
        """The log's own clock gives a naive time of the latest possible year."""
        (record,) = parsed(f"{CORE}x")
        assert record.time == NOV

    def test_missing_seconds_are_zero(self) -> None:
        """A clock without seconds counts from the full minute."""
        (record,) = parsed("INFO 11-02 10:07 [core.py:1] x")
        assert record.time == datetime(2026, 11, 2, 10, 7)

    def test_the_time_of_the_wrapper_goes_first(self) -> None:
        """Where the runtime gives a time with a zone, it replaces the log's own."""
        (record,) = parsed(f"2026-11-02T09:00:01.5Z stdout F {CORE}x")
        assert record.time == datetime(2026, 11, 2, 9, 0, 1, 500000, tzinfo=UTC)

    def test_a_date_that_is_none_keeps_the_record(self) -> None:
        """A prefix with an impossible date is a record without a time."""
        (record,) = parsed("ERROR 02-30 10:00:00 [core.py:1] x")
        assert (record.time, record.lines) == (None, ("x",))

    def test_a_late_unknown_lead_is_no_prefix(self) -> None:
        """What stands before a level is only trusted where it was there from the beginning."""
        raw = [f"(EngineCore pid=104) INFO 11-02 10:00:{n % 60:02} [a.py:{n}] x" for n in range(201)]
        record = parsed(
            *raw, "GET /?q= ERROR 11-02 10:00:00 [core.py:1] EngineCore encountered a fatal error."
        )[-1]
        assert (record.level, record.file) == ("", "")

    def test_a_known_lead_stays_known(self) -> None:
        """A prefix of the user's that was there from the beginning is a prefix for ever."""
        raw = [f"gpu7: (EngineCore pid=104) INFO 11-02 10:00:{n % 60:02} [a.py:{n}] x" for n in range(300)]
        assert {(record.process, record.level) for record in parsed(*raw)} == {("EngineCore", "INFO")}

    @pytest.mark.parametrize(
        "lead",
        [
            'INFO:     192.0.2.1:50 - "GET /?q=',
            '(APIServer pid=1) INFO:     192.0.2.1:50 - "GET /?q=',
        ],
        ids=["bare", "behind-a-process"],
    )
    def test_a_level_inside_an_access_line_is_text(self, lead: str) -> None:
        """A perfect prefix inside the URL of an access line does not make a record."""
        (record,) = parsed(
            f'{lead}ERROR 11-02 10:00:00 [core.py:1] EngineCore encountered a fatal error." 404 Not Found'
        )
        assert (record.level, record.file) == ("INFO", "uvicorn")

    def test_a_level_inside_an_access_line_of_an_unknown_launcher_is_text(self) -> None:
        """The same holds where something unknown stands before the access line."""
        (record,) = parsed(
            '[gpu-7] INFO:     192.0.2.1:50 - "GET /?q=ERROR 11-02 10:00:00 [core.py:1] EngineCore encountered a '
            'fatal error." 404 Not Found'
        )
        assert (record.level, record.file) == ("", "")

    def test_a_level_in_the_exception_of_a_handler_is_text(self) -> None:
        """A perfect prefix in the message of an exception that a request raised makes no record."""
        fake = "ERROR 11-02 10:00:00 [core.py:1] EngineCore encountered a fatal error."
        records = parsed("ERROR:    Exception in ASGI application", f"ValueError: {fake}")
        assert [(record.level, record.file) for record in records] == [("ERROR", "uvicorn"), ("", "")]


class TestRecords:
    """Which lines make one record."""

    def test_carriage_returns_bound_records(self) -> None:
        """Two calls of one second from one place are two records: the first one's last line has no return."""
        assert texts(f"{CORE}a\r", f"{CORE}b", f"{CORE}c\r", f"{CORE}d") == [
            ("EngineCore", ("a", "b")),
            ("EngineCore", ("c", "d")),
        ]

    def test_a_terminal_adds_a_return_everywhere(self) -> None:
        """On a terminal every line has one return more, and the boundary is still where one is missing."""
        assert texts(f"{CORE}a\r\r", f"{CORE}b\r", f"{CORE}c\r\r", f"{CORE}d\r") == [
            ("EngineCore", ("a", "b")),
            ("EngineCore", ("c", "d")),
        ]

    def test_without_returns_one_prefix_is_one_record(self) -> None:
        """Where a collector took the returns off, lines of one prefix belong together."""
        assert texts(f"{CORE}a", f"{CORE}b") == [("EngineCore", ("a", "b"))]

    @pytest.mark.parametrize(
        "other",
        [
            "(EngineCore pid=104) ERROR 11-02 10:00:01 [core.py:1586] ",
            "(EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1587] ",
            "(EngineCore pid=104) ERROR 11-02 10:00:00 [cora.py:1586] ",
            "(EngineCore pid=104) WARNING 11-02 10:00:00 [core.py:1586] ",
            "(EngineCore pid=105) ERROR 11-02 10:00:00 [core.py:1586] ",
            "(EngineCare pid=104) ERROR 11-02 10:00:00 [core.py:1586] ",
        ],
        ids=["clock", "line", "file", "level", "pid", "name"],
    )
    def test_another_prefix_is_another_record(self, other: str) -> None:
        """Any part of the prefix that differs begins another record."""
        assert [record.lines for record in parsed(f"{CORE}a", f"{other}b")] == [("a",), ("b",)]

    def test_processes_interleave(self) -> None:
        """Lines of two processes that mix are two records, in the order of their first lines."""
        one = "(Worker_TP0 pid=1) ERROR 11-02 10:00:00 [w.py:1] "
        two = "(Worker_TP1 pid=2) ERROR 11-02 10:00:00 [w.py:1] "
        records = parsed(f"{one}a\r", f"{two}A\r", f"{one}b\r", f"{two}B\r", f"{two}C", f"{one}c")
        assert [(r.process, r.lines, r.numbers) for r in records] == [
            ("Worker_TP0", ("a", "b", "c"), (1, 3, 6)),
            ("Worker_TP1", ("A", "B", "C"), (2, 4, 5)),
        ]

    def test_processes_without_a_prefix_interleave(self) -> None:
        """Where no process is named, up to four places that write in one second are kept apart."""
        a, b = "ERROR 06-02 10:11:12 [dump_input.py:68] ", "ERROR 06-02 10:11:12 [core.py:400] "
        records = parsed(f"{a}1\r", f"{b}x\r", f"{a}2", f"{b}y")
        assert [record.lines for record in records] == [("1", "2"), ("x", "y")]

    def test_containers_of_one_input_are_kept_apart(self) -> None:
        """The same prefix from two containers is two records."""
        records = parsed(f"vllm-1  | {CORE}a\r", f"vllm-2  | {CORE}b\r", f"vllm-1  | {CORE}c")
        assert [(r.origin, r.lines) for r in records] == [("vllm-1", ("a", "c")), ("vllm-2", ("b",))]

    def test_wrapper_times_may_differ_within_a_record(self) -> None:
        """The clock of the runtime goes on within a record; the record has the time of its first line."""
        records = parsed(
            f"2026-11-02T10:00:00.1Z stdout F {CORE}a\r", f"2026-11-02T10:00:00.9Z stdout F {CORE}b"
        )
        assert [(r.time, r.lines) for r in records] == [
            (datetime(2026, 11, 2, 10, 0, 0, 100000, UTC), ("a", "b"))
        ]

    def test_a_record_closes_when_the_clock_goes_on(self) -> None:
        """A record that was silent for more than a second is given out while others go on."""
        parser = LogParser(LATEST)
        out: list[Record] = []
        for number, text in enumerate(
            [f"{CORE}a", "INFO 11-02 10:00:02 [b.py:1] b", "INFO 11-02 10:00:02 [c.py:1] c"], 1
        ):
            out += parser.feed(Line(number, text))
        assert [record.lines for record in out] == [("a",)]

    def test_a_record_is_bounded(self) -> None:
        """A record without an end keeps a bounded number of lines."""
        (record,) = parsed(*[f"{CORE}x\r"] * (MAX_RECORD_LINES + 50))
        assert len(record.lines) == MAX_RECORD_LINES

    def test_a_multi_line_record_is_bounded_in_size(self) -> None:
        """Sixty megabytes in one record keep a few."""
        parser = LogParser(LATEST)
        for number in range(1, 61):
            assert list(parser.feed(Line(number, CORE + "z" * (1 << 20), None, "", 1))) == []
        (record,) = parser.flush()
        assert sum(map(len, record.lines)) <= 4 << 20

    def test_order_holds_behind_many_access_lines(self) -> None:
        """Hundreds of access lines in one second of the log's clock do not change the order of records."""
        records = parsed(f"{CORE}a", *['INFO:     192.0.2.7:50312 - "GET /v1/models HTTP/1.1" 200 OK'] * 300)
        assert [record.numbers[0] for record in records] == list(range(1, 302))

    def test_a_record_that_goes_on_is_never_cut(self) -> None:
        """A record that announces another line stays open however much is complete meanwhile."""
        access = 'INFO:     192.0.2.7:50312 - "GET /v1/models HTTP/1.1" 200 OK'
        records = parsed(f"{CORE}a\r", *[access] * 300, f"{CORE}b")
        assert ("a", "b") in [record.lines for record in records]


class TestRawLines:
    """Lines that no logger wrote."""

    def test_a_traceback_is_one_record(self) -> None:
        """Lines without a prefix in a row are one record without a level, with a borrowed time."""
        info, raw = parsed(
            f"{CORE.replace('ERROR', 'INFO')}x",
            "Traceback (most recent call last):",
            '  File "a.py", line 1, in f',
            "E: x",
        )
        assert info.level == "INFO"
        assert raw.lines == ("Traceback (most recent call last):", '  File "a.py", line 1, in f', "E: x")
        assert (raw.level, raw.file, raw.process, raw.numbers) == ("", "", "", (2, 3, 4))
        assert (raw.time, raw.timed) == (NOV, False)

    def test_the_process_prefix_keeps_tracebacks_apart(self) -> None:
        """Before 0.31 raw lines carry the process, so two tracebacks that mix come out whole."""
        records = texts(
            "(Worker_TP0 pid=1) Traceback (most recent call last):",
            "(Worker_TP1 pid=2) Traceback (most recent call last):",
            "(Worker_TP0 pid=1) torch.OutOfMemoryError: zero",
            "(Worker_TP1 pid=2) torch.OutOfMemoryError: one",
        )
        assert records == [
            ("Worker_TP0", ("Traceback (most recent call last):", "torch.OutOfMemoryError: zero")),
            ("Worker_TP1", ("Traceback (most recent call last):", "torch.OutOfMemoryError: one")),
        ]

    def test_torch_ranks_name_the_process(self) -> None:
        """Torch puts the rank before every line of a traceback, and it tells two apart."""
        records = texts(
            "[rank0]: Traceback", "[rank1]: Traceback", "[rank0]: RuntimeError: x", "[rank1]: RuntimeError: y"
        )
        assert records == [
            ("rank0", ("Traceback", "RuntimeError: x")),
            ("rank1", ("Traceback", "RuntimeError: y")),
        ]

    def test_the_title_of_a_process_begins_another_record(self) -> None:
        """The traceback under ``Process EngineCore:`` does not continue what stands above."""
        assert texts("library says hello", "Process EngineCore_DP0:", "Traceback") == [
            ("", ("library says hello",)),
            ("", ("Process EngineCore_DP0:", "Traceback")),
        ]

    def test_raw_lines_are_counted(self) -> None:
        """Lines that no format explains are counted."""
        parser = LogParser(LATEST)
        for number, text in enumerate(["a", "b", f"{CORE}c"], 1):
            list(parser.feed(Line(number, text)))
        assert parser.unparsed == 2


class TestUvicorn:
    """Lines of the web server."""

    @pytest.mark.parametrize(
        ("raw", "process", "pid"),
        [
            ("INFO:     Application startup complete.", "APIServer", None),
            ("(APIServer pid=1) INFO:     Application startup complete.", "APIServer", 1),
            ("(ApiServer_1 pid=7) INFO:     Application startup complete.", "ApiServer_1", 7),
        ],
        ids=["bare", "process", "two-servers"],
    )
    def test_uvicorn_lines(self, raw: str, process: str, pid: int | None) -> None:
        """A line of uvicorn is a record of its own, of the API server."""
        (record,) = parsed(raw)
        assert (record.process, record.pid, record.level, record.file) == (process, pid, "INFO", "uvicorn")
        assert record.lines == ("Application startup complete.",)

    def test_the_exception_of_a_handler(self) -> None:
        """The traceback below uvicorn's line on an exception belongs to the API server."""
        records = parsed(
            "ERROR:    Exception in ASGI application", "Traceback (most recent call last):", "ValueError: x"
        )
        assert [(r.process, r.level, r.lines[0]) for r in records] == [
            ("APIServer", "ERROR", "Exception in ASGI application"),
            ("APIServer", "", "Traceback (most recent call last):"),
        ]

    def test_a_record_behind_an_access_line(self) -> None:
        """A record that lost its newline behind an access line is a record all the same."""
        records = parsed(
            f'INFO:     192.0.2.1:57224 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error{CORE}x'
        )
        assert [(r.level, r.file, r.lines, r.numbers) for r in records] == [
            (
                "INFO",
                "uvicorn",
                ('192.0.2.1:57224 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',),
                (1,),
            ),
            ("ERROR", "core.py", ("x",), (1,)),
        ]


class TestGlue:
    """Records that lost the newline between them."""

    API = "(APIServer pid=1) ERROR 11-02 10:00:00 [async_llm.py:699] AsyncLLM output_handler failed."

    SPLIT = (
        ("APIServer", ("up",), (1,)),
        ("EngineCore", ("see conf",), (2,)),
        ("APIServer", ("AsyncLLM output_handler failed.",), (2,)),
    )

    def test_a_record_of_a_known_process_is_split_off(self) -> None:
        """Behind the text of one process, a prefix of another known one begins a record."""
        records = parsed("(APIServer pid=1) INFO 11-02 09:59:59 [a.py:1] up", f"{CORE}see conf{self.API}")
        assert {(r.process, r.lines, r.numbers) for r in records} == set(self.SPLIT)

    def test_what_is_split_off_comes_second(self) -> None:
        """Of two records in one line the one that stands first comes first."""
        records = parsed("(APIServer pid=1) INFO 11-02 09:59:59 [a.py:1] up", f"{CORE}see conf{self.API}")
        assert [(r.process, r.lines, r.numbers) for r in records] == list(self.SPLIT)

    @pytest.mark.parametrize(
        "text",
        [
            "see conf(Nobody pid=7) ERROR 11-02 10:00:00 [core.py:1] EngineCore encountered a fatal error.",
            f"{API}",
            f"   {API}",
            f'no adapter named "x{API}"',
            f"name 'a\\n{API}'",
        ],
        ids=["unknown-process", "continuation-line", "indented", "inside-quotes", "escaped-newline"],
    )
    def test_hostile_glue_is_refused(self, text: str) -> None:
        """A prefix that a client may have put there stays part of the text."""
        records = parsed("(APIServer pid=1) INFO 11-02 09:59:59 [a.py:1] up", f"{CORE}{text}")
        assert [record.lines for record in records] == [("up",), (text,)]

    @pytest.mark.parametrize("file", sorted(USER_TEXT_FILES))
    def test_glue_in_client_text_is_refused(self, file: str) -> None:
        """In records that repeat what a client sent a prefix is never one."""
        text = f"Received request cmpl-1: prompt: hi{self.API}"
        records = parsed(
            "(APIServer pid=1) INFO 11-02 09:59:59 [a.py:1] up",
            f"(APIServer pid=1) INFO 11-02 10:00:00 [{file}:1] {text}",
        )
        assert [record.lines for record in records] == [("up",), (text,)]


class TestCpp:
    """Warnings that C++ code of torch writes."""

    @pytest.mark.parametrize(
        ("raw", "process", "level", "time"),
        [
            (
                "[W1020 01:01:34.032955245 CUDACachingAllocator.cpp:3933] ",
                "",
                "WARNING",
                datetime(2026, 10, 20, 1, 1, 34),
            ),
            (
                "[W920 12:00:00.000000000 CUDACachingAllocator.cpp:3933] ",
                "",
                "WARNING",
                datetime(2026, 9, 20, 12),
            ),
            (
                "[rank5]:[W920 12:00:00.000000000 CUDACachingAllocator.cpp:3933] ",
                "rank5",
                "WARNING",
                datetime(2026, 9, 20, 12),
            ),
            (
                "[rank0]:[E920 12:00:00.000000000 CUDACachingAllocator.cpp:7] ",
                "rank0",
                "ERROR",
                datetime(2026, 9, 20, 12),
            ),
            ("[F920 12:00:00.000000000 CUDACachingAllocator.cpp:7] ", "", "ERROR", datetime(2026, 9, 20, 12)),
            (
                "[I920 12:00:00.000000000 4711 CUDACachingAllocator.cpp:7] ",
                "",
                "INFO",
                datetime(2026, 9, 20, 12),
            ),
        ],
        ids=["two-digit-month", "one-digit-month", "rank", "rank-error", "fatal", "thread-id"],
    )
    def test_a_warning_is_a_record(self, raw: str, process: str, level: str, time: datetime) -> None:
        """Rank, level, time and file are read, and each line is a record."""
        records = parsed(f"{raw}memory allocation failed", f"{raw}again")
        assert [r.lines for r in records] == [("memory allocation failed",), ("again",)]
        assert (records[0].process, records[0].level, records[0].time) == (process, level, time)
        assert records[0].file == "CUDACachingAllocator.cpp"


def test_the_dashed_format_of_python_logging() -> None:
    """A logging configuration of the user's with dashes gives year, module and level."""
    (record,) = parsed("2025-11-02 12:00:04,315 - vllm.v1.engine.core_client - ERROR - Engine core died")
    assert (record.level, record.file, record.lines) == ("ERROR", "core_client.py", ("Engine core died",))
    assert (record.time, record.process) == (datetime(2025, 11, 2, 12, 0, 4), "")


@pytest.mark.parametrize("year", ["0001", "1999", "9999"])
def test_a_year_without_vllm_is_no_time(year: str) -> None:
    """Near the ends of the calendar a time has no seconds since the epoch; nobody served a model then."""
    raw = {**TestJson.BASE, "asctime": f"{year}-01-01 00:00:00,417"}
    records = parsed(f"{year}-01-01 00:00:04,315 - vllm.engine - ERROR - died", json.dumps(raw))
    assert [record.time for record in records] == [None, None]


class TestJson:
    """vLLM 0.32 and later with the JSON formatter, and older configurations of users."""

    BASE: ClassVar = {
        "asctime": "2026-11-02 10:00:00,417", "levelname": "ERROR", "name": "vllm.v1.engine.core",
        "processName": "EngineCore", "process": 104, "message": "EngineCore encountered a fatal error.",
    }  # fmt: skip

    def test_a_line_is_a_record(self) -> None:
        """One JSON line is one record, with its traceback behind the message."""
        raw = {**self.BASE, "exc_info": "Traceback (most recent call last):\nRuntimeError: x"}
        (record,) = parsed(json.dumps(raw))
        assert record.lines == (
            "EngineCore encountered a fatal error.",
            "Traceback (most recent call last):",
            "RuntimeError: x",
        )
        assert record.numbers == (1, 1, 1)
        assert (record.process, record.pid, record.level, record.file) == (
            "EngineCore",
            104,
            "ERROR",
            "core.py",
        )
        assert record.time == datetime(2026, 11, 2, 10, 0, 0, 417000)

    @pytest.mark.parametrize(
        ("changes", "process", "level", "file"),
        [
            ({"vllm_process_name": "Worker_TP1"}, "Worker_TP1", "ERROR", "core.py"),
            ({"name": "uvicorn.access", "levelname": "INFO"}, "EngineCore", "INFO", "uvicorn"),
            ({"levelname": None, "level": "warning"}, "EngineCore", "WARNING", "core.py"),
            ({"processName": None}, "", "ERROR", "core.py"),
        ],
        ids=["vllm-process-name", "uvicorn", "level-key", "no-process"],
    )
    def test_variants(self, changes: dict[str, object], process: str, level: str, file: str) -> None:
        """The names of process and level that formatters use are understood."""
        (record,) = parsed(json.dumps({**self.BASE, **changes}))
        assert (record.process, record.level, record.file) == (process, level, file)

    def test_inside_docker(self) -> None:
        """VLLM's JSON inside docker's JSON takes the time of docker."""
        raw = json.dumps(
            {"log": json.dumps(self.BASE) + "\n", "stream": "stderr", "time": "2026-11-02T09:00:00Z"}
        )
        (record,) = parsed(raw)
        assert (record.file, record.time) == ("core.py", datetime(2026, 11, 2, 9, tzinfo=UTC))

    @pytest.mark.parametrize(
        "raw",
        [
            '{"levelname": "ERROR", "message": ["x"]}',
            '{"levelname": "LOUD", "message": "x"}',
            '{"levelname": "ERROR", "message": "x"',
            '{"message": "x"}',
            '["levelname", "message"]',
        ],
        ids=["message-a-list", "no-level", "cut", "level-missing", "list"],
    )
    def test_other_json_is_a_raw_line(self, raw: str) -> None:
        """JSON that is no log line is a line without a level, kept as it is."""
        (record,) = parsed(raw)
        assert (record.level, record.lines) == ("", (raw,))


class TestClock:
    """The year that the log leaves out."""

    @pytest.mark.parametrize(
        ("latest", "at", "expected"),
        [
            (datetime(2026, 11, 30, 19), "11-30 18:59:59", datetime(2026, 11, 30, 18, 59, 59)),
            (datetime(2026, 11, 30, 19), "12-24 10:00:00", datetime(2025, 12, 24, 10)),
            (datetime(2027, 1, 1, 0, 10), "12-31 23:59:59", datetime(2026, 12, 31, 23, 59, 59)),
            (datetime(2027, 1, 1, 0, 10), "01-01 00:00:01", datetime(2027, 1, 1, 0, 0, 1)),
            (datetime(2026, 11, 30, 19), "12-01 02:00:00", datetime(2026, 12, 1, 2)),
            (datetime(2026, 12, 31, 23, 30), "01-01 00:10:00", datetime(2027, 1, 1, 0, 10)),
            (datetime(2026, 3, 1), "02-29 12:00:00", datetime(2024, 2, 29, 12)),
            (datetime(2024, 2, 28, 18), "02-29 12:00:00", datetime(2024, 2, 29, 12)),
            (datetime(2103, 6, 1), "02-29 12:00:00", datetime(2096, 2, 29, 12)),
            (datetime(2026, 3, 1), "02-30 12:00:00", None),
            (datetime(2026, 3, 1), "13-01 12:00:00", None),
            (datetime(2026, 3, 1), "02-01 24:00:00", None),
        ],
        ids=[
            "same-day", "last-year", "december-seen-in-january", "january", "a-zone-ahead",
            "a-zone-ahead-at-new-year", "leap-day", "leap-day-ahead", "over-a-century-without-one",
            "no-day", "no-month", "no-hour",
        ],
    )  # fmt: skip
    def test_the_year_is_the_latest_possible(
        self, latest: datetime, at: str, expected: datetime | None
    ) -> None:
        """The year is the latest that is not more than a day after the log's last change."""
        date, _, clock = at.partition(" ")
        month, day = date.split("-")
        hour, minute, second = clock.split(":")
        assert Clock(latest).at(month, day, hour, minute, second) == expected

    def test_december_to_january_rolls_over(self) -> None:
        """A log that runs over New Year goes on in time."""
        records = parsed(
            "INFO 12-31 23:59:59 [a.py:1] a", "INFO 01-01 00:00:01 [a.py:1] b", latest=datetime(2027, 1, 1, 9)
        )
        assert [r.time for r in records] == [
            datetime(2026, 12, 31, 23, 59, 59),
            datetime(2027, 1, 1, 0, 0, 1),
        ]

    def test_many_times_stay_bounded(self) -> None:
        """The clock remembers a bounded number of times and stays right."""
        clock = Clock(LATEST)
        times = [clock.at("11", "02", "10", f"{n // 60:02}", f"{n % 60:02}") for n in range(3000)]
        assert times[-1] == datetime(2026, 11, 2, 10, 49, 59)
        assert len(clock._cache) <= 257


@pytest.mark.parametrize(
    ("earlier", "later", "seconds"),
    [
        (NOV, datetime(2026, 11, 2, 10, 0, 2, 500000), 2.5),
        (NOV, datetime(2026, 11, 2, 9, 59, 59), -1.0),
        (NOV.replace(tzinfo=UTC), NOV, None),
        (None, NOV, None),
        (NOV, None, None),
    ],
    ids=["later", "earlier", "one-zone", "no-first", "no-second"],
)
def test_seconds_between(earlier: datetime | None, later: datetime | None, seconds: float | None) -> None:
    """The gap is known only between two times of one kind."""
    assert seconds_between(earlier, later) == seconds


_PIECES = st.sampled_from(
    [
        b"(EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1586] ",
        b"INFO 06-01 12:00:00 llm_engine.py:161] ",
        b"(Worker_TP0 pid=7) ",
        b"INFO:     ",
        b"[rank0]: ",
        b"[W920 12:00:00.000000000 x.cpp:1] ",
        b"\r",
        b"\r\r",
        b'{"levelname": "ERROR", "message": "x"}',
        b"2026-11-02T10:00:00Z stdout P ",
        b"2026-11-02T10:00:00Z stderr F ",
        b"vllm-1  | ",
        b"\x1b[36m",
        b"Process EngineCore:",
        b"Traceback (most recent call last):",
        b"ERROR 02-30 25:00:00 [a.py:1] ",
        b"2025-11-02 12:00:04,315 - vllm.a - ERROR - ",
        b'" 200 OK',
        b"\x00\xff\xfe",
    ]
)
_LINES = st.lists(
    st.lists(st.one_of(_PIECES, st.binary(max_size=12)), max_size=5).map(
        lambda parts: b"".join(parts).replace(b"\n", b"")
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(_LINES)
def test_no_line_is_lost(raw: list[bytes]) -> None:
    """Whatever the bytes, nothing is raised and every line is in a record, in the order of first lines."""
    framing, parser = Framing(), LogParser(LATEST)
    numbers: set[int] = set()
    records: list[Record] = []
    for number, one in enumerate(raw, 1):
        for line in framing.feed(number, one):
            numbers.add(line.number)
            records += parser.feed(line)
    for line in framing.flush():
        numbers.add(line.number)
        records += parser.feed(line)
    records += parser.flush()
    assert {number for record in records for number in record.numbers} == numbers
    assert all(len(record.lines) == len(record.numbers) >= 1 for record in records)


_HUGE = "9" * 5000


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(f"(X pid={_HUGE}) INFO 11-02 10:00:00 [a.py:1] x", id="pid"),
        pytest.param(f"(X pid={_HUGE}) x", id="pid-of-a-raw-line"),
        pytest.param("2025-13-42 12:00:04,315 - vllm.v1.engine.core - ERROR - x", id="dashed-date"),
        pytest.param('{"message": "x", "levelname": ' + "[" * 100_000, id="nested-json"),
    ],
)
def test_impossible_values_stop_nothing(raw: str) -> None:
    """A number, a date or a depth that can't be is a line like any other."""
    (record,) = parsed(raw)
    assert record.numbers == (1,)


def test_the_end_of_time() -> None:
    """A file dated at the end of the calendar is read."""
    (record,) = parsed("INFO 11-02 10:00:00 [a.py:1] x", latest=datetime(9999, 12, 31, 12))
    assert record.time == datetime(9999, 11, 2, 10)
