"""The per-step line of ``--enable-logging-iteration-details``, 0.14.0..0.33.0.

``Iteration(123): 2 context requests, 8192 context tokens, 5 generation requests, 5 generation
tokens, iteration elapsed time: 310.55 ms`` — from 0.26 behind ``Engine 000: ``. It is written
after a step succeeded, so the step that killed the engine is never among them; it is the only
source of true step sizes (``vllm:iteration_tokens_total`` books whole prompts).
"""

from __future__ import annotations

import re

from ..records import Record, Step

_LINE = re.compile(
    r"(?:Engine \d+: )?Iteration\(\d+\): (\d{1,18}) context requests, (\d{1,18}) context tokens, "
    r"(\d{1,18}) generation requests, (\d{1,18}) generation tokens"
)


def iterations(record: Record) -> tuple[Step, ...]:
    """The steps that ``record`` reports. The dummy steps of data parallel count as none.

    The steps of one second come from one place in the code, so they are lines of one record.
    """
    if _LINE.match(record.head) is None:
        return ()
    return tuple(
        Step(*map(int, match.groups()))
        for text in record.lines
        if (match := _LINE.match(text)) is not None and "(dummy)" not in text
    )
