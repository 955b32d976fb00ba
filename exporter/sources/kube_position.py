"""Where reading a container's log stands, when the server resumes by whole seconds only.

Asked for the lines since a second, the API gives again what was delivered in that second, and
runtimes give one time to many lines. So a position holds the latest times with the number of
lines delivered at each, and a cursor compares the head of each new answer with it. Two streams
written at once come out of order by microseconds, which is why it is not the last time alone.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime

from .framing import MAX_LINE

KEEP = 16
"""Times a position remembers."""

SKEW = 10**8
"""Nanoseconds by which a line may come too late: it may belong to the second before."""

_HEAD = 256  # bytes of a line that stand for it
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")
_OLDER = -1  # the time of a line whose beginning is older than what was asked for


@dataclass(slots=True)
class Position:
    """How far one stream was delivered.

    ``seen`` holds the latest ``KEEP`` times (nanoseconds) with the number of lines delivered at
    each and a checksum of the first; whatever is older than all of them was delivered. ``part``
    bytes of the line after these were delivered too, if it is longer than ``MAX_LINE``.
    """

    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    part: int = 0
    part_stamp: int = 0
    ended: bool = False

    @classmethod
    def parse(cls, token: str) -> Position:
        """The position a token stands for. A damaged one is the beginning: nothing is lost."""
        try:
            seen, part, part_stamp, ended = json.loads(token)
            return cls(
                {int(stamp): (int(count), int(first)) for stamp, count, first in seen[:KEEP]},
                int(part), int(part_stamp), bool(ended),
            )  # fmt: skip
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls()

    @property
    def token(self) -> str:
        """The position as text, at most about 800 characters."""
        seen = [[stamp, *rest] for stamp, rest in sorted(self.seen.items())]
        return json.dumps([seen, self.part, self.part_stamp, int(self.ended)], separators=(",", ":"))

    @property
    def since(self) -> str | None:
        """The second to ask from, None for the beginning."""
        stamps = [*self.seen, self.part_stamp] if self.part else [*self.seen]
        first = min(stamps, default=0) - SKEW
        try:
            return (
                datetime.fromtimestamp(first // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                if first > 0
                else None
            )
        except (ValueError, OverflowError, OSError):
            return None

    def add(self, stamp: int, first: int) -> None:
        """One more line was delivered."""
        known = self.seen.get(stamp)
        if known is not None:
            self.seen[stamp] = (known[0] + 1, known[1])
        elif len(self.seen) < KEEP:
            self.seen[stamp] = (1, first)
        elif stamp > (oldest := min(self.seen)):
            del self.seen[oldest]
            self.seen[stamp] = (1, first)


class Cursor:
    """Takes the lines that are new out of one answer and moves the position behind them.

    Memory is bounded by ``MAX_LINE`` and what is fed at once. ``new`` becomes true with the
    first byte that is.
    """

    def __init__(self, position: Position, *, resumed: bool) -> None:
        self._position = position
        self._skip = dict(position.seen)  # lines still expected to come again
        self._untouched = set(position.seen)
        self._behind = bool(position.seen)  # what comes may be older than the position
        self._floor = min(position.seen, default=0)
        self._newest = max(position.seen, default=0)
        self._stamp = _OLDER if resumed else 0
        self._cut = position.part  # bytes of the next line that were delivered
        self._buffer = bytearray()
        self._inside: tuple[int, int, bool] | None = None  # time, checksum, new: of an unfinished line
        self.new = False

    @property
    def tail(self) -> bytes:
        """What came of a line that is not finished."""
        return bytes(self._buffer)

    @property
    def caught_up(self) -> bool:
        """Whether everything that was delivered came again."""
        return not self._skip

    def feed(self, data: bytes) -> bytes:
        """The new ones of the lines that ``data`` ends."""
        self._buffer += data
        end = self._buffer.rfind(b"\n") + 1
        given = b""
        if end:
            block = bytes(self._buffer[:end])
            del self._buffer[:end]
            given = self._lines(block)
        if len(self._buffer) > MAX_LINE:
            given += self._piece(self.finish())
        self.new = self.new or bool(given)
        return given

    def last(self) -> bytes:
        """The unfinished line, if it is new: its end will never come."""
        tail = self.finish()
        return self._piece(tail) if tail else b""

    def finish(self) -> bytes:
        """Empty the buffer."""
        tail = self.tail
        self._buffer.clear()
        return tail

    def _lines(self, block: bytes) -> bytes:
        position = self._position
        if not self._skip and not self._behind and self._inside is None and not self._cut:
            for text in block.split(b"\n")[:-1]:
                position.add(self._time(text), zlib.crc32(text[:_HEAD]))
            return block
        given = []
        for text in block.split(b"\n")[:-1]:
            stamp, first, new = self._inside or self._look(text)
            self._inside = None
            if new:
                given.append(self._rest(stamp, text + b"\n") or b"\n")
                position.add(stamp, first)
                position.part = 0
        return b"".join(given)

    def _piece(self, text: bytes) -> bytes:
        if self._inside is None:
            self._inside = self._look(text)
        stamp, _, new = self._inside
        if not new:
            return b""
        given = self._rest(stamp, text)
        self._position.part += len(given.removeprefix(b"\n"))
        self._position.part_stamp = stamp
        return given

    def _rest(self, stamp: int, text: bytes) -> bytes:
        """``text`` without what was delivered of its line before."""
        if not self._cut:
            return text
        if stamp != self._position.part_stamp:
            self._cut = self._position.part = 0
            return b"\n" + text  # the line that was begun is gone; this is another one
        cut = min(self._cut, len(text))
        self._cut -= cut
        return text[cut:]

    def _time(self, text: bytes) -> int:
        """When a line was written; the end of a line cut by the runtime has no time of its own."""
        stamp = stamp_of(text)
        if stamp is not None:
            self._stamp = stamp
        return self._stamp

    def _look(self, text: bytes) -> tuple[int, int, bool]:
        stamp, first = self._time(text), zlib.crc32(text[:_HEAD])
        return stamp, first, self._is_new(stamp, first)

    def _is_new(self, stamp: int, first: int) -> bool:
        expected = self._skip.get(stamp)
        if expected is not None:
            if stamp in self._untouched and expected[1] != first:
                # the log was rotated between lines of one time: better twice than never
                del self._skip[stamp]
                self._position.seen.pop(stamp, None)
                return True
            self._untouched.discard(stamp)
            if expected[0] > 1:
                self._skip[stamp] = (expected[0] - 1, expected[1])
            else:
                del self._skip[stamp]
                self._behind = bool(self._skip)
            return False
        if self._behind and stamp < self._floor:
            return bool(self._cut) and stamp == self._position.part_stamp
        if stamp > self._newest:
            self._behind = False
        return True


_seconds: dict[bytes, int] = {}  # the last second met, as text: most lines share it with the one before


def stamp_of(text: bytes) -> int | None:
    """Nanoseconds since the epoch of the time a line begins with, None if it has none."""
    match = _STAMP.match(text)
    if match is None:
        return None
    whole = match[1] + match[3]
    seconds = _seconds.get(whole)
    if seconds is None:
        try:
            seconds = int(datetime.fromisoformat(whole.decode()).timestamp())
        except (ValueError, OverflowError):
            return None
        _seconds.clear()
        _seconds[whole] = seconds
    return seconds * 10**9 + int((match[2] or b"0").ljust(9, b"0"))
