"""Values of documents made fit for people's eyes: of the type that is meant, printable, and cut.

Documents hold what a log or a state file said. A template escapes markup, but not what a terminal,
a right-to-left mark or a line of 100 kB does to a reader; and it must not fail on a number that is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

MAX_TEXT = 2000
MAX_NAME = 200
MAX_ITEMS = 200

Document = Mapping[str, object]

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ?", re.ASCII)


def text(value: object, most: int = MAX_TEXT) -> str:
    """``value`` on one line. What does not print is shown as a symbol or its number: ``␛``, ``⟨U+202E⟩``."""
    raw = "" if value is None else str(value)
    shown = raw[:most]
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else _symbol(ord(one)) for one in shown)
    return shown if len(raw) <= most else f"{shown}… ({len(raw) - most:,} more characters)"


def _symbol(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def name(value: object) -> str:
    """A short text: a model, a class, a state."""
    return text(value, MAX_NAME)


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: object) -> str | None:
    """A whole number in groups of three: ``16,384``."""
    found = number(value)
    return None if found is None else _grouped(found, 0)


def size(value: object) -> str | None:
    """Bytes in the unit that torch would choose: ``3.83 GiB``."""
    found = number(value)
    if found is None:
        return None
    for unit, one in _UNITS:
        if abs(found) >= one:
            return f"{_grouped(found / one, 2)} {unit}"
    return f"{_grouped(found, 0)} bytes"


def _grouped(found: float, digits: int) -> str:
    # nothing counts that far, and it would be hundreds of digits
    return f"{found:,.{digits}f}" if abs(found) < 1e15 else f"{found:.3g}"


def percent(value: object) -> str | None:
    """A ratio: ``0.8%``, ``94%``."""
    found = number(value)
    if found is None:
        return None
    return f"{found:.1%}" if found < 0.1 else f"{_grouped(found * 100, 0)}%"


def plain(value: object) -> str:
    """The value of a setting as vLLM's command line writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return count(value) or name(value)
    return "not set" if value is None else name(value)


def items(value: object) -> list[object]:
    """``value``, or nothing where it is no list; at most ``MAX_ITEMS``."""
    return list(value[:MAX_ITEMS]) if isinstance(value, list | tuple) else []


def mappings(value: object) -> list[Document]:
    """The objects in a list."""
    return [one for one in items(value) if isinstance(one, Mapping)]


@dataclass(frozen=True, slots=True)
class Time:
    """``text`` for people, ``zone`` how to read it (``UTC``, ``local`` or nothing), ``machine`` for the markup."""

    text: str
    zone: str
    machine: str | None


def time(value: object) -> Time | None:
    """A time of a document: UTC with its ``Z``, else local time of the server that wrote the log."""
    if not isinstance(value, str) or not value:
        return None
    if not _TIME.fullmatch(value):
        return Time(name(value), "", None)
    return Time(value[:19].replace("T", " "), "UTC" if value.endswith("Z") else "local", value)


def utc(when: datetime) -> Time:
    """A moment of our own clock."""
    return Time(f"{when:%Y-%m-%d %H:%M:%S}", "UTC", f"{when:%Y-%m-%dT%H:%M:%SZ}")
