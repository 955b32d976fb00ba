"""The per-step line of ``--enable-logging-iteration-details``, 0.14.0..0.33.0.

``Iteration(123): 2 context requests, 8192 context tokens, 5 generation requests, 5 generation
tokens, iteration elapsed time: 310.55 ms`` — from 0.26 behind ``Engine 000: ``. It is written
after a step succeeded, so the step that killed the engine is never among them; it is the only
source of true step sizes (``vllm:iteration_tokens_total`` books whole prompts).
"""

from __future__ import annotations

import re

from ..records import Iteration, Record

_LINE = re.compile(
    r"(?:Engine \d+: )?Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens"
)


def iteration(record: Record) -> Iteration | None:
    """The step that ``record`` reports, or None. The dummy steps of data parallel count as none."""
    match = _LINE.match(record.head)
    if match is None or "(dummy)" in record.head:
        return None
    a, b, c, d = (int(n) for n in match.groups())
    return Iteration(a, b, c, d, record)
