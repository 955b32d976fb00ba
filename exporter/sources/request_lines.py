"""Request lines, 0.4.3..0.11.0: how many requests came, and how long their prompts were.

``Received request cmpl-1: prompt: 'Hello', params: SamplingParams(…), prompt_token_ids: [1, 2],
prompt_embeds shape: None, lora_request: None.`` — from 0.11.1 on without prompt and ids. The log
call puts the id of the request first, as the client wrote it, newlines included; the prompt and
the strings in ``params`` are quoted, so they add no line. What vLLM itself wrote of the ids is
therefore in the last line of the call, and is the last of its kind there. Ids are counted where
they stand and go nowhere.
"""

from __future__ import annotations

import re

from ..records import Traffic

_RECEIVED = b"Received request "
_IDS = b", prompt_token_ids: "
# the list, and what vLLM writes behind it
_COUNTED = re.compile(rb"\[([\d, ]*+)\](?:, prompt_embeds shape: [^\n]*)?, lora_request: ")
_LONGEST = (1 << 20) - 4096  # of a longer line, with its prefix, the middle is left out
_KEPT_CALLS = 64  # processes whose calls have lines to come


class Requests:
    """Puts the lines of log calls together. Feed them in order, without their prefix."""

    def __init__(self) -> None:
        self._begun: dict[str | bytes, bool] = {}  # call -> whether it reports a request
        self._prompts: list[int] = []
        self._arrivals = 0

    def add(self, call: str | bytes, text: bytes, goes_on: bool) -> None:
        """One line. ``call`` tells writers apart; ``goes_on``: the call has another line."""
        received = self._begun.pop(call, None)
        if received is None:
            received = text.startswith(_RECEIVED)
        if goes_on:
            if len(self._begun) >= _KEPT_CALLS:
                del self._begun[next(iter(self._begun))]
            self._begun[call] = received
        elif received and len(text) > _LONGEST:
            self._arrivals += 1
        elif received and (at := text.rfind(_IDS)) >= 0:
            self._arrivals += 1
            if (ids := _COUNTED.match(text, at + len(_IDS))) is not None and ids[1]:
                self._prompts.append(ids[1].count(b",") + 1)

    def take(self) -> Traffic | None:
        """What came since the last time, or None."""
        if not self._arrivals:
            return None
        found = Traffic((), tuple(self._prompts), self._arrivals)
        self._prompts, self._arrivals = [], 0
        return found
