"""Takes a line out of what people put around a log when they show it to others.

Reports hold logs in fences, quotations and lists. A log that a server writes has none of these, and
costs one look at the first character of a line.
"""

from __future__ import annotations

import re

# ```text   <details><summary>log</summary>
_FENCE = re.compile(
    r"(?:(?:```|~~~)[\w+ -]{0,20}|(?:</?(?:details|summary|pre|code)>){1,4}(?:[^<>]{0,80}</summary>)?)\s*"
)
_MARKS = frozenset("`~<>")
_MAX_QUOTES = 8  # an answer to an answer


class Pasted:
    """Of one input, in order."""

    def __init__(self) -> None:
        self._shift: int | None = None  # spaces before every line so far

    def take_off(self, text: str) -> str:
        """``text`` as the server wrote it; empty where it is none of its lines."""
        if self._shift != 0:
            text = self._unshifted(text)
        if text[:1] not in _MARKS:
            return text
        for _ in range(_MAX_QUOTES):
            if text[:1] != ">" or text[1:2] not in (" ", ""):
                break
            text = text[2:]
        return "" if _FENCE.fullmatch(text) else text

    def _unshifted(self, text: str) -> str:
        """``text`` without the spaces that every line had so far. A server soon writes a line without any."""
        own = text.lstrip(" ")
        if own:
            self._shift = min(len(text) - len(own), len(text) if self._shift is None else self._shift)
        return text[self._shift or 0 :]
