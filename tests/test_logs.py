"""The exporter's own log: its form, what it never holds, and conditions that are said once."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from exporter import logs
from exporter.logs import clear, configure, once


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Always."""
        return True


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _text: str) -> int:
        """Fail as the system does."""
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave structlog, ``logging`` and the standing conditions as they were."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    structlog.reset_defaults()
    logs._standing.clear()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The lines of a JSON log."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def json_log(level: str = "info") -> tuple[Any, io.StringIO]:
    """A logger that writes JSON into a stream."""
    stream = io.StringIO()
    configure(level, "json", stream)
    return structlog.get_logger(), stream


def fail(text: str) -> None:
    """Raise an error that says ``text``."""
    raise ValueError(text)


def test_json_line() -> None:
    """A line begins with event, level and a UTC time, then has the fields as they were given."""
    log, stream = json_log()
    log.info("log opened", source="/var/log/*.log", lag_bytes=7, ratio=0.5, whole=True, nothing=None)
    (line,) = lines(stream)
    assert list(line) == ["event", "level", "timestamp", "source", "lag_bytes", "ratio", "whole", "nothing"]
    time = datetime.fromisoformat(line.pop("timestamp"))
    assert time.tzinfo is UTC
    assert line == {
        "event": "log opened", "level": "info", "source": "/var/log/*.log",
        "lag_bytes": 7, "ratio": 0.5, "whole": True, "nothing": None,
    }  # fmt: skip


def test_console_line() -> None:
    """On a terminal a line is text with colours, and the order of the fields is kept."""
    stream = Terminal()
    configure("info", "auto", stream)
    structlog.get_logger().warning("log unreadable", source="a", errors=2)
    (line,) = stream.getvalue().splitlines()
    assert "\x1b[" in line
    plain = io.StringIO()
    configure("info", "console", plain)
    structlog.get_logger().warning("log unreadable", source="a", errors=2)
    assert plain.getvalue().partition("Z ")[2] == "[warning  ] log unreadable source=a errors=2\n"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR is respected."""
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    configure("info", "auto", stream)
    structlog.get_logger().info("started")
    assert stream.getvalue().partition("Z ")[2] == "[info     ] started\n"


@pytest.mark.parametrize(
    ("form", "stream", "is_json"),
    [
        ("auto", io.StringIO(), True),
        ("auto", Terminal(), False),
        ("json", Terminal(), True),
        ("console", io.StringIO(), False),
    ],
)
def test_form(form: str, stream: io.StringIO, is_json: bool) -> None:
    """Auto is console on a terminal and JSON elsewhere; a form that is named wins."""
    configure("info", form, stream)
    structlog.get_logger().info("started")
    assert stream.getvalue().startswith("{") is is_json


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_level(level: str, count: int) -> None:
    """Messages below the level are left out."""
    log, stream = json_log(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)(name)
    assert [line["level"] for line in lines(stream)] == ["debug", "info", "warning", "error"][-count:]


def test_reload() -> None:
    """A logger that exists follows a new configuration."""
    log, first = json_log("error")
    log.info("unheard")
    second = io.StringIO()
    configure("info", "json", second)
    log.info("heard")
    logging.getLogger("aiohttp.server").warning("once")
    assert first.getvalue() == ""
    assert [line["event"] for line in lines(second)] == ["heard", "once"]


def test_libraries() -> None:
    """What libraries log through ``logging`` has the same form, from warning on, and from info for debugging."""
    _, stream = json_log()
    library = logging.getLogger("aiohttp.server")
    library.info("unheard")
    library.error("cannot %s", "answer", exc_info=ValueError("bad\nline"))
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("cannot answer", "error", "aiohttp.server")
    assert line["exception"] == "  ValueError: bad\n  line"
    configure("debug", "json", stream)
    library.info("heard")
    assert lines(stream)[-1]["event"] == "heard"


def test_a_record_that_cannot_be_formatted(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong call of ``logging`` in a library is reported by ``logging`` and fails nobody."""
    _, stream = json_log()
    root = logging.getLogger()
    root.handlers[:] = [
        one for one in root.handlers if isinstance(one, logs._Handler)
    ]  # pytest's would raise
    logging.getLogger("aiohttp").warning("%d", "not a number")
    assert stream.getvalue() == ""
    assert "--- Logging error ---" in capsys.readouterr().err


def test_secrets() -> None:
    """Fields named like secrets, credentials in URLs and in headers are hidden, wherever they are nested."""
    log, stream = json_log()
    log.warning(
        "push to http://u:hunter2@am failed",
        url="https://u:hunter2@am:9093/x http://hunter2@b",
        password="hunter2",  # noqa: S106
        api_key="hunter2",
        bearer_token="hunter2",  # noqa: S106
        headers={"Authorization": "hunter2", "X": "Bearer hunter2hunter2", "Set-Cookie": "hunter2"},
        several=["Basic aHVudGVyMg==", {"client_secret": "hunter2"}],
        error=OSError(111, "refused by http://u:hunter2@am"),
        max_num_batched_tokens=16384,
    )
    try:
        fail("http://u:hunter2@am")
    except ValueError:
        log.exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert "aHVudGVy" not in stream.getvalue()
    first, second = lines(stream)
    assert first["event"] == "push to http://***@am failed"
    assert first["url"] == "https://***@am:9093/x http://***@b"
    assert first["headers"] == {"Authorization": "***", "X": "Bearer ***", "Set-Cookie": "***"}
    assert first["several"] == ["Basic ***", {"client_secret": "***"}]
    assert first["error"] == "[Errno 111] refused by http://***@am"
    assert first["max_num_batched_tokens"] == 16384
    assert second["level"] == "error"
    assert second["exception"].startswith("  Traceback (most recent call last):\n  ")
    assert second["exception"].endswith("\n  ValueError: http://***@am")


def test_a_password_is_not_cut_into_view() -> None:
    """Text is cut after credentials were hidden in it, not before."""
    log, stream = json_log()
    log.info("x", url="a" * (logs.MAX_TEXT - 17) + " http://hunter2:hunter2@am")
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
def test_hostile_text(form: str) -> None:
    """Text of a log or a peer stays on its line, sends nothing to a terminal, and is cut."""
    stream = io.StringIO()
    configure("info", form, stream)
    evil = "a\r\n\x1b[2J\x9b1m\u2028\udcff{} %s [bold]"
    structlog.get_logger().info(evil, text=evil, long="x" * 10_000, many=list(range(1000)), **{evil: 1})
    logging.getLogger("aiohttp").warning(evil.replace("%", ""))
    out = stream.getvalue()
    assert len(out.splitlines()) == 2
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out) < logs.MAX_TEXT + 1000
    assert r"a\r\n\x1b[2J\x9b1m\u2028\udcff{} %s [bold]" in out.replace(r"\\", "\\")


def test_traceback_cannot_forge_a_line() -> None:
    """Every line of a traceback is indented, so text in a message never begins a line; the end is kept."""
    stream = io.StringIO()
    configure("info", "console", stream)
    try:
        fail("x" * 20_000 + "\n2026-11-30T20:00:00Z [info     ] all is well\x1b[0m")
    except ValueError:
        structlog.get_logger().exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("[error    ] failed")
    assert rest[-1] == r"  2026-11-30T20:00:00Z [info     ] all is well\x1b[0m"
    assert all(line.startswith("  ") for line in rest)
    assert len(stream.getvalue()) < logs.MAX_TRACE + 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.text(), st.dictionaries(st.text(min_size=1).filter(lambda k: k not in ("event", "self")), VALUES))
def test_every_line_is_json(event: str, values: dict[str, Any]) -> None:
    """Whatever is logged, a line is one line and strict JSON."""
    log, stream = json_log()
    log.info("values", **{"text": event, "values": values})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = stream.getvalue().splitlines()
    assert json.loads(line, parse_constant=refuse)["event"] == "values"


def test_deep_values_end() -> None:
    """A value that holds itself is cut at a depth."""
    log, stream = json_log()
    ring: list[object] = []
    ring.append(ring)
    log.info("ring", ring=ring)
    assert lines(stream)[0]["ring"] == [[[["[[...]]"]]]]


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_reader_that_has_gone(form: str) -> None:
    """Neither a closed stream nor a broken pipe fails whoever logs."""
    for stream in (Gone(), io.StringIO()):
        configure("info", form, stream)
        stream.close()
        structlog.get_logger().error("lost")
        logging.getLogger("asyncio").error("lost")


def test_standard_output_stays_free() -> None:
    """Nothing is written to standard output; the log goes to standard error."""
    program = (
        "import logging, structlog; from exporter.logs import configure; configure('debug', 'auto');"
        "structlog.get_logger().error('one'); logging.getLogger('x').error('two')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b""
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["one", "two"]


# --- conditions ---------------------------------------------------------------------------


def test_once() -> None:
    """A condition is logged when it begins, not while it lasts, and again after it was over."""
    log, stream = json_log()
    key = ("log unreadable", "/a")
    assert once(log, key, "log unreadable", source="/a") is True
    assert once(log, key, "log unreadable", source="/a") is False
    assert once(log, ("log unreadable", "/b"), "log unreadable", level="error", source="/b") is True
    assert clear(log, key, "log readable again", source="/a") is True
    assert clear(log, key, "log readable again", source="/a") is False
    assert once(log, key, "log unreadable", source="/a") is True
    assert clear(log, key) is True
    assert [(line["level"], line["event"], line["source"]) for line in lines(stream)] == [
        ("warning", "log unreadable", "/a"),
        ("error", "log unreadable", "/b"),
        ("info", "log readable again", "/a"),
        ("warning", "log unreadable", "/a"),
    ]


def test_once_is_bounded() -> None:
    """With more conditions than are remembered, the oldest is forgotten, and so said again."""
    log, _ = json_log("error")
    for number in range(logs.MAX_CONDITIONS + 1):
        assert once(log, number, "x") is True
    assert len(logs._standing) == logs.MAX_CONDITIONS
    assert once(log, 1, "x") is False
    assert once(log, 0, "x") is True
