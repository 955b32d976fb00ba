"""The exporter's own log, on standard error: standard output belongs to the log that is piped through.

Events are short phrases plus fields. What is logged may hold text of a log, a peer or an URL with
credentials, so every value passes ``_safe``: bounded, on one line, and without what looks like a
secret. Libraries that use ``logging`` come out in the same form.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import sys
from collections.abc import Hashable, Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

MAX_TEXT = 2000  # characters of one value
MAX_TRACE = 8000  # of a traceback: its end
MAX_ITEMS = 50  # of a list or a mapping
MAX_DEPTH = 4
MAX_CONDITIONS = 1000

HIDDEN = "***"


def configure(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - named after the option
    """Set up structlog and ``logging``; again on a reload. ``stream``: default standard error.

    ``level``: debug, info, warning, error. ``format``: console, json, or auto, which is console on
    a terminal. Libraries are heard from warning on, and from info at level debug.
    """
    out = _Lines(sys.stderr if stream is None else stream)
    console = format == "console" or (format == "auto" and out.terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _safe,
    ]
    renderer: Processor = structlog.processors.JSONRenderer()
    if console:
        colors = out.terminal and not os.environ.get("NO_COLOR")
        renderer = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, pad_event_to=0)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: out,
        cache_logger_on_first_use=False,  # else a reload could not change anything
    )
    handler = _Handler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if number <= logging.DEBUG else max(number, logging.WARNING))


# --- conditions that last -----------------------------------------------------------------

# Conditions that were said and still stand, oldest first. Bounded: with more, the oldest are said again.
_standing: dict[Hashable, None] = {}


def once(
    logger: FilteringBoundLogger, key: Hashable, event: str, *, level: str = "warning", **fields: object
) -> bool:
    """Log a condition that repeats, the first time only, until ``clear(key)``. True: it was logged now.

    ``key`` names the condition with what it is about: ``("log unreadable", source)``.
    """
    if key in _standing:
        return False
    while len(_standing) >= MAX_CONDITIONS:
        del _standing[next(iter(_standing))]
    _standing[key] = None
    getattr(logger, level)(event, **fields)
    return True


def clear(logger: FilteringBoundLogger, key: Hashable, event: str | None = None, **fields: object) -> bool:
    """The condition is over: say ``event``, if given, and be ready to log it again. False: it did not stand."""
    if key not in _standing:
        return False
    del _standing[key]
    if event is not None:
        logger.info(event, **fields)
    return True


# --- what may be written ------------------------------------------------------------------

# Endings of field names, so that max_num_batched_tokens is none of them
_SECRET_NAMES = (
    "password", "passwd", "passphrase", "secret", "token", "authorization", "cookie", "apikey",
    "privatekey", "credentials",
)  # fmt: skip
_USER_INFO = re.compile(r"(?<=://)[^/\s@]{1,1000}@")
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_FIRST = ("event", "level", "timestamp")


def _safe(_logger: WrappedLogger, _method: str, given: EventDict) -> EventDict:
    """Event, level and time first; then the fields, each made safe; a traceback last."""
    safe: dict[str, Any] = {key: _text(str(given.get(key, ""))) for key in _FIRST}
    for key, value in given.items():
        if key.startswith("_"):  # what structlog hands from processor to processor
            safe[key] = value
        elif key not in _FIRST and key != "exception":
            safe[_text(key)] = _field(key, value, MAX_DEPTH)
    if "exception" in given:
        # indented, because a message in it may look like a line of the log
        trace = _hide(str(given["exception"]))[-MAX_TRACE:].split("\n")
        safe["exception"] = "\n".join(f"  {_printable(line)}" for line in trace)
    return safe


def _field(key: str, value: object, depth: int) -> object:
    """A value fit for JSON and for a terminal."""
    if re.sub("[^a-z]", "", key.lower()).endswith(_SECRET_NAMES):
        return HIDDEN
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no word for the others
    if depth and isinstance(value, Mapping):
        some = itertools.islice(value.items(), MAX_ITEMS)
        return {_text(str(name)): _field(str(name), one, depth - 1) for name, one in some}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [_field("", one, depth - 1) for one in itertools.islice(value, MAX_ITEMS)]
    return _text(str(value))


def _text(text: str) -> str:
    text = _hide(text)  # first: half a password has no @ behind it
    return _printable(text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…")


def _hide(text: str) -> str:
    return _AUTHORIZATION.sub(rf"\1 {HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))


def _printable(text: str) -> str:
    """No newline, no escape sequence, no surrogate: a line of the log cannot be forged."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- where it goes ------------------------------------------------------------------------


class _Lines:
    """A stream that takes whole lines and never fails: the log must not end what it reports on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.terminal = stream.isatty()

    def msg(self, line: str) -> None:
        """Write one line. A reader that has gone, or a closed stream, is ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = warn = error = critical = fatal = exception = log = msg


class _Handler(logging.Handler):
    """Brings the records of ``logging`` to the same lines."""

    def __init__(self, out: _Lines) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write one record; a record that cannot be formatted is reported by ``logging``."""
        try:
            line = self.format(record)
        except Exception:  # what a library passes is its own; logging must not fail its caller
            self.handleError(record)
        else:
            self._out.msg(line)
