"""What every live source gives: chunks of whole lines, each with a token to go on from.

A *source* is what the user configured (a glob, standard input, a container). It reads one or
more *streams*: one generation of a file, one instance of a container. A stream has an identity
that survives restarts of the exporter, and never changes what it has said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

_ERRORS = "read errors"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines of one stream, in order and without gaps.

    ``data`` ends at a newline, save when ``ended`` (nothing more will come) or when one line is
    longer than ``framing.MAX_LINE``. ``token`` resumes the stream right behind ``data``. The first
    chunk of a stream also has ``begin``, to resume it before ``data``, where a source would not
    find its beginning again without. ``follows`` names the stream before it where one text goes on
    from there, so that a record may begin in one and end in the other; always the same for a stream.
    """

    stream: str
    data: bytes
    token: str
    ended: bool = False
    begin: str = ""
    follows: str = ""


@dataclass(slots=True)
class SourceStats:
    """What a source says of itself; ``name`` is SOURCE as configured, never a matched path.

    ``read_errors`` and ``rotations`` are those of this process, and only grow.
    """

    name: str
    opened: bool = False
    read_errors: int = 0
    rotations: dict[str, int] = field(default_factory=lambda: {"rename": 0, "truncate": 0, "reopen": 0})
    lag_bytes: int = 0
    problem: str | None = None
    _taken: Counter[str] = field(default_factory=Counter)

    def take_new(self) -> tuple[int, Counter[str]]:
        """Read errors and rotations, by kind, since the last call."""
        now = Counter({_ERRORS: self.read_errors, **self.rotations})
        new, self._taken = now - self._taken, now
        return new.pop(_ERRORS, 0), new

    @property
    def has_new(self) -> bool:
        """Whether ``take_new`` would give any."""
        return self.read_errors + sum(self.rotations.values()) != self._taken.total()


class Source(Protocol):
    """A live source. ``chunks`` runs until cancelled, or to the end of a finite input."""

    stats: SourceStats

    def chunks(self, resume: Mapping[str, str]) -> AsyncIterator[Chunk]:
        """Every stream from the token in ``resume`` on, or from its beginning where it has none."""
        ...
