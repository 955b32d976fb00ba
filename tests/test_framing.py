from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.records import Line
from exporter.sources.framing import MAX_LINE, Framing, clean, parse_stamp, wrapper_of

ERROR = "(EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1586] EngineCore encountered a fatal error."
OLD = "INFO 06-01 12:00:00 llm_engine.py:161] # GPU blocks: 1200, # CPU blocks: 512"
STAMP = "2026-07-03T13:21:34.123456789Z"
TIME = datetime(2026, 7, 3, 13, 21, 34, 123456, tzinfo=UTC)


def framed(*raw: str | bytes) -> list[Line]:
    """What comes out of ``raw`` lines, the unfinished ones last."""
    framing = Framing()
    lines = []
    for number, one in enumerate(raw, 1):
        lines += list(framing.feed(number, one.encode() if isinstance(one, str) else one))
    return lines + list(framing.flush())


def docker(log: str, stream: str = "stdout") -> str:
    """One line as docker's json-file driver writes it."""
    return json.dumps({"log": log, "stream": stream, "time": STAMP}, separators=(",", ":"))


WRAPPERS: dict[str, tuple[Callable[[str], str], datetime | None, str]] = {
    "raw": (lambda text: text, None, ""),
    "cri": (lambda text: f"{STAMP} stdout F {text}", TIME, ""),
    "cri-offset-zone": (lambda text: f"2026-07-03T15:21:34.123456789+02:00 stderr F {text}", TIME, ""),
    "cri-tags": (lambda text: f"{STAMP} stderr F:tag {text}", TIME, ""),
    "docker": (lambda text: docker(text + "\n"), TIME, ""),
    "docker-spaces": (
        lambda text: json.dumps({"log": text + "\n", "stream": "stderr", "time": STAMP}),
        TIME,
        "",
    ),
    "docker-without-time": (lambda text: json.dumps({"log": text + "\n"}), None, ""),
    "timestamps": (lambda text: f"{STAMP} {text}", TIME, ""),
    "timestamps-in-brackets": (lambda text: f"[{STAMP}] {text}", TIME, ""),
    "journald-short": (lambda text: f"Jul  3 13:21:34 node-7 vllm[812]: {text}", None, "vllm"),
    "journald-unit": (
        lambda text: f"Jul 13 13:21:34 node-7 vllm@big.service[8]: {text}",
        None,
        "vllm@big.service",
    ),
    "compose": (lambda text: f"vllm-1  | {text}", None, "vllm-1"),
    "compose-coloured": (lambda text: f"\x1b[36mvllm-1  | \x1b[0m{text}", None, "vllm-1"),
    "stern": (lambda text: f"llama-70b-0 vllm {text}", None, "llama-70b-0/vllm"),
    "stern-around-cri": (lambda text: f"llama-70b-0 vllm {STAMP} stdout F {text}", TIME, "llama-70b-0/vllm"),
    "compose-around-timestamps": (lambda text: f"vllm-1  | {STAMP} {text}", TIME, "vllm-1"),
    "cri-around-compose": (lambda text: f"{STAMP} stdout F vllm-1  | {text}", TIME, "vllm-1"),
    "docker-around-timestamps": (lambda text: docker(f"[{STAMP}] {text}\n"), TIME, ""),
}


class TestWrappers:
    """Every runtime's wrapper comes off."""

    @pytest.mark.parametrize("text", [ERROR, OLD], ids=["process-prefix", "old-prefix"])
    @pytest.mark.parametrize("name", WRAPPERS)
    def test_a_wrapper_comes_off(self, name: str, text: str) -> None:
        """The text, the time and the origin of a wrapped line are those that were wrapped."""
        wrap, time, origin = WRAPPERS[name]
        assert framed(wrap(text)) == [Line(1, text, time, origin, 0)]

    @settings(deadline=None, max_examples=60)
    @given(
        name=st.sampled_from(sorted(WRAPPERS)),
        prefix=st.sampled_from(
            ["(Worker_TP1 pid=9) INFO 11-02 10:00:00 [a.py:1] ", "WARNING 11-02 10:00:00 [b.py:2] "]
        ),
        text=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=60),
    )
    def test_whatever_the_text_wrapping_loses_nothing(self, name: str, prefix: str, text: str) -> None:
        """Framing is the inverse of every wrapper, for any text behind a prefix of vLLM."""
        wrap, time, origin = WRAPPERS[name]
        line = (prefix + text).replace("#033", "")
        assert framed(wrap(line)) == [Line(1, line, time, origin, 0)]

    def test_journald_short_iso_has_a_time(self) -> None:
        """The short-iso form of journald carries the time with its zone."""
        (line,) = framed(f"2026-07-03T13:21:34.123456+0000 node-7 vllm[812]: {ERROR}")
        assert (line.text, line.time) == (ERROR, TIME)

    def test_journald_short_iso_names_the_unit(self) -> None:
        """The short-iso form of journald names the unit, as the short one does."""
        (line,) = framed(f"2026-07-03T13:21:34.123456+0000 node-7 vllm[812]: {ERROR}")
        assert line.origin == "vllm"

    @pytest.mark.parametrize("repeat", ["", " [repeated 7x across cluster]"], ids=["once", "repeated"])
    def test_ray_names_the_node(self, repeat: str) -> None:
        """Ray's address becomes the origin, its repeat count goes, the process prefix stays usual."""
        raw = f"(RayWorkerWrapper pid=3012, ip=192.0.2.10) ERROR 11-02 10:00:00 [worker_base.py:620] Error{repeat}"
        expected = "(RayWorkerWrapper pid=3012) ERROR 11-02 10:00:00 [worker_base.py:620] Error"
        assert framed(raw) == [Line(1, expected, None, "192.0.2.10", 0)]

    def test_ray_explains_its_repeats_once(self) -> None:
        """The explanation that Ray adds to its first repeat count goes with it."""
        raw = (
            "\x1b[36m(RayWorkerWrapper pid=3012, ip=2001:db8::7)\x1b[0m INFO done [repeated 3x across cluster] "
            "(Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication.)"
        )
        assert framed(raw) == [Line(1, "(RayWorkerWrapper pid=3012) INFO done", None, "2001:db8::7", 0)]

    @pytest.mark.parametrize(
        "text",
        [
            "Loading safetensors checkpoint shards:  50%|█████     | 1/2 [00:01<00:01,  1.2s/it]",
            '{"model": "m", "log": 3}',
            '{"log": "cut by the end of the file',
            "[W1020 01:01:34.032955245 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM",
            "2026-11-02 12:00:04,315 - vllm.v1.engine.core - ERROR - died",
            '  File "/x/vllm/v1/engine/core.py", line 3, in f',
            "",
        ],
        ids=["progress", "json", "cut-json", "c++", "dashed", "frame", "empty"],
    )
    def test_a_bare_line_stays_as_it_is(self, text: str) -> None:
        """What looks a little like a wrapper and is none is left alone."""
        assert framed(ERROR, text)[1:] == [Line(2, text, None, "", 0)]

    def test_stern_around_the_end_of_a_traceback(self) -> None:
        """The line that names the exception belongs to the same container as its frames."""
        lines = framed(
            "llama-70b-0 vllm Traceback (most recent call last):",
            "llama-70b-0 vllm torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        )
        assert [(line.text, line.origin) for line in lines] == [
            ("Traceback (most recent call last):", "llama-70b-0/vllm"),
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "llama-70b-0/vllm"),
        ]

    def test_stern_around_uvicorn(self) -> None:
        """A line of uvicorn comes out of stern's wrapper too."""
        assert framed("llama-70b-0 vllm INFO:     Application startup complete.") == [
            Line(1, "INFO:     Application startup complete.", None, "llama-70b-0/vllm", 0)
        ]

    def test_kubectl_prefix(self) -> None:
        """``kubectl logs --prefix`` names pod and container in brackets."""
        assert framed(f"[pod/llama-70b-0/vllm] {ERROR}") == [Line(1, ERROR, None, "llama-70b-0/vllm", 0)]


class TestPasted:
    """What people put around a log when they show it to others."""

    @pytest.mark.parametrize(
        "fence",
        [
            "```",
            "```text",
            "~~~",
            "<details><summary>Log of the crash</summary>",
            "</details>",
            "<pre><code>",
        ],
    )
    def test_fences_are_no_lines_of_it(self, fence: str) -> None:
        """A fence is an empty line."""
        assert [line.text for line in framed(fence, ERROR, fence)] == ["", ERROR, ""]

    @pytest.mark.parametrize(
        "text", ["```sh and more than a fence```", "<module>", "~~~~~ ^^^^^", "<pre>text"]
    )
    def test_what_is_no_fence(self, text: str) -> None:
        """The marks below a source line, a frame's name and prose stay."""
        assert [line.text for line in framed(ERROR, text)] == [ERROR, text]

    def test_quoted(self) -> None:
        """Every line of a quotation begins with a mark, the empty ones too."""
        assert [line.text for line in framed(f"> {ERROR}", ">", "> > text", ">>> x")] == [
            ERROR, "", "text", ">>> x",
        ]  # fmt: skip

    def test_shifted(self) -> None:
        """The spaces that all lines have go, those of the traceback itself stay."""
        frame = '  File "/x/vllm/v1/engine/core.py", line 3, in f'
        assert [line.text for line in framed(f"    {ERROR}", "", f"    {frame}")] == [ERROR, "", frame]

    def test_only_the_beginning_is_shifted(self) -> None:
        """A log that was cut inside a traceback."""
        lines = ("    return f(x)", '  File "x.py", line 3, in f', "    f(x)", ERROR, "  text")
        assert [line.text for line in framed(*lines)] == [
            "return f(x)", 'File "x.py", line 3, in f', "  f(x)", ERROR, "  text",
        ]  # fmt: skip


class TestColoursAndEndings:
    """Terminal colours and carriage returns."""

    @pytest.mark.parametrize(
        ("raw", "shown"),
        [
            ("\x1b[0;36m(APIServer pid=1)\x1b[0;0m \x1b[32mINFO\x1b[0m text", "(APIServer pid=1) INFO text"),
            ("#033[1;36m(APIServer pid=1)#033[0;0m INFO text", "(APIServer pid=1) INFO text"),
            ("\x1b[2K\x1b[?25lINFO text", "INFO text"),
            ("price is #0334", "price is #0334"),
        ],
        ids=["vllm", "syslog-escaped", "cursor", "no-colour"],
    )
    def test_colours_go(self, raw: str, shown: str) -> None:
        """Colours are taken out of the whole line, other text stays."""
        assert clean(raw) == shown
        assert framed(raw) == [Line(1, shown, None, "", 0)]

    @pytest.mark.parametrize(
        ("raw", "returns"),
        [(f"{ERROR}\r", 1), (f"{ERROR}\r\r", 2), (ERROR, 0), (docker(f"{ERROR}\r\n"), 1)],
        ids=["crlf", "terminal", "last", "docker"],
    )
    def test_carriage_returns_are_counted(self, raw: str, returns: int) -> None:
        """Carriage returns leave the text and are counted: they tell where a record ends."""
        (line,) = framed(raw)
        assert (line.text, line.carriage_returns) == (ERROR, returns)

    def test_bytes_that_are_no_text_are_replaced(self) -> None:
        """Bytes outside UTF-8 never stop the reading."""
        assert framed(b"ab\xff\xfecd") == [Line(1, "ab\ufffd\ufffdcd", None, "", 0)]


class TestRejoining:
    """Lines that a runtime cut are put together again."""

    def test_cri_pieces(self) -> None:
        """Pieces marked P are joined to the F that ends them and keep the first number and time."""
        lines = framed(
            f"{STAMP} stderr P {ERROR[:30]}",
            "2026-07-03T13:21:35Z stderr P " + ERROR[30:60],
            "2026-07-03T13:21:36Z stderr F " + ERROR[60:],
        )
        assert lines == [Line(1, ERROR, TIME, "", 0)]

    def test_cri_streams_are_cut_apart(self) -> None:
        """A line of one stream between the pieces of the other belongs to neither piece."""
        lines = framed(
            f"{STAMP} stderr P {ERROR[:30]}", f"{STAMP} stdout F {OLD}", f"{STAMP} stderr F {ERROR[30:]}"
        )
        assert lines == [Line(2, OLD, TIME, "", 0), Line(1, ERROR, TIME, "", 0)]

    def test_cri_piece_that_looks_like_a_wrapper(self) -> None:
        """The rest of a cut line is text, whatever it begins with, where the piece says P."""
        lines = framed(f"{STAMP} stdout P {ERROR} ", f"{STAMP} stdout P vllm-1  | x", f"{STAMP} stdout F end")
        assert lines == [Line(1, f"{ERROR} vllm-1  | xend", TIME, "", 0)]

    def test_cri_last_piece_that_looks_like_a_wrapper(self) -> None:
        """The last piece of a cut line is text too: a dump may be cut before something like ``a | b``."""
        lines = framed(f"{STAMP} stdout P {ERROR} ", f"{STAMP} stdout F vllm-1  | x")
        assert lines == [Line(1, f"{ERROR} vllm-1  | x", TIME, "", 0)]

    def test_docker_pieces(self) -> None:
        """Docker leaves the newline out of every piece but the last."""
        lines = framed(docker(ERROR[:40]), docker(OLD + "\n", "stderr"), docker(ERROR[40:] + "\r\n"))
        assert lines == [Line(2, OLD, TIME, "", 0), Line(1, ERROR, TIME, "", 1)]

    def test_docker_pieces_that_look_like_a_wrapper(self) -> None:
        """Docker's pieces are text too; what wraps the line inside is taken off the whole one."""
        lines = framed(
            docker(f"vllm-1  | {ERROR} "), docker("vllm-2  | x"), docker("[2026-07-03T13:00:00Z] y\n")
        )
        assert lines == [Line(1, f"{ERROR} vllm-2  | x[2026-07-03T13:00:00Z] y", TIME, "vllm-1", 0)]

    def test_a_bare_line_ends_no_piece(self) -> None:
        """A line that docker did not wrap is no part of one that it cut."""
        lines = framed('{"log":"a"}', ERROR, '{"log":"b\\n"}')
        assert [line.text for line in lines] == [ERROR, "ab"]

    def test_a_line_without_its_end_is_given_out_at_the_end(self) -> None:
        """The pieces of a line whose end never came are not lost."""
        framing = Framing()
        assert list(framing.feed(1, f"{STAMP} stdout P {ERROR}".encode())) == []
        assert framing.waiting
        assert list(framing.flush()) == [Line(1, ERROR, TIME, "", 0)]
        assert not framing.waiting

    @settings(deadline=None, max_examples=40)
    @given(
        text=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=200),
        size=st.integers(1, 50),
        kind=st.sampled_from(["cri", "docker"]),
    )
    def test_any_cut_heals(self, text: str, size: int, kind: str) -> None:
        """Wherever a runtime cuts a line, its pieces make the line again."""
        whole = f"(EngineCore pid=104) ERROR 11-02 10:00:00 [dump_input.py:79] {text}".replace("#033", "")
        # '=' in front keeps a last piece from looking like a wrapper
        pieces = ["=" + whole[at : at + size] for at in range(0, len(whole), size)]
        if kind == "cri":
            raw = [f"{STAMP} stdout P {piece}" for piece in pieces[:-1]] + [f"{STAMP} stdout F {pieces[-1]}"]
        else:
            raw = [docker(piece) for piece in pieces[:-1]] + [docker(pieces[-1] + "\n")]
        assert framed(*raw) == [Line(1, "".join(pieces), TIME, "", 0)]


class TestBounds:
    """Memory stays bounded whatever comes."""

    def test_a_huge_line_keeps_head_and_tail(self) -> None:
        """Of a line above the limit the head and the tail are kept and the cut is counted."""
        framing = Framing()
        (line,) = framing.feed(1, b"<head>" + b"x" * (2 * MAX_LINE) + b"<tail>")
        assert len(line.text) == MAX_LINE
        assert line.text.startswith("<head>xxx")
        assert line.text.endswith("xxx<tail>")
        assert framing.truncated == 1

    def test_endless_pieces_stay_bounded(self) -> None:
        """Fifty megabytes of pieces without an end never hold more than one line's limit."""
        framing = Framing()
        piece = f"{STAMP} stdout P ".encode() + b"y" * (256 << 10)
        for number in range(1, 201):
            assert list(framing.feed(number, piece)) == []
        (line,) = framing.flush()
        assert line.number == 1
        assert len(line.text) == MAX_LINE
        assert framing.truncated > 0

    def test_many_cut_streams_are_given_out_oldest_first(self) -> None:
        """At most 64 streams wait for their end; the oldest is given out as it is."""
        framing = Framing()
        out = []
        for number in range(1, 71):
            out += list(framing.feed(number, f'vllm-{number}  | {{"log":"p{number}"}}'.encode()))
        assert [line.text for line in out] == [f"p{number}" for number in range(1, 7)]
        assert len(list(framing.flush())) == 64


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (f"{STAMP} stdout F {OLD}", "cri"),
        (docker(OLD + "\n"), "docker"),
        (f"vllm-1  | {OLD}", "compose"),
        (f"Jul  3 13:21:34 node-7 vllm[812]: {OLD}", "journald"),
        (f"[{STAMP}] {OLD}", "timestamp"),
        (OLD, "raw"),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
def test_the_scan_knows_the_outermost_wrapper(raw: str, name: str) -> None:
    """The wrapper that the scan builds its skip list on is the outermost one."""
    assert wrapper_of(raw.encode()).name == name


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-07-03T13:21:34Z", datetime(2026, 7, 3, 13, 21, 34, tzinfo=UTC)),
        ("2026-07-03T13:21:34,5Z", datetime(2026, 7, 3, 13, 21, 34, 500000, tzinfo=UTC)),
        ("2026-07-03T13:21:34.1234567891Z", datetime(2026, 7, 3, 13, 21, 34, 123456, tzinfo=UTC)),
        ("2026-07-03T00:21:34-0730", datetime(2026, 7, 3, 7, 51, 34, tzinfo=UTC)),
        ("2026-01-01T01:00:00+05:30", datetime(2025, 12, 31, 19, 30, tzinfo=UTC)),
        ("2024-02-29T12:00:00Z", datetime(2024, 2, 29, 12, tzinfo=UTC)),
        ("2026-02-29T12:00:00Z", None),
        ("0001-01-01T00:00:00+05:00", None),
        ("2026-07-03T13:21:34", None),
        ("yesterday", None),
    ],
    ids=[
        "utc",
        "comma",
        "nanoseconds",
        "west",
        "east",
        "leap-day",
        "no-leap-day",
        "overflow",
        "no-zone",
        "words",
    ],
)
def test_stamps(text: str, time: datetime | None) -> None:
    """An RFC 3339 time becomes UTC, cut to microseconds; anything else is no time."""
    assert parse_stamp(text) == time


def test_deep_json_is_text() -> None:
    """JSON nested too deep to be read is a line as it stands."""
    raw = '{"log": ' + "[" * 100_000
    assert framed(raw) == [Line(1, raw, None, "", 0)]
