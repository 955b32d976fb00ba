"""Allocation arithmetic: which tensor was it?

torch rounds a request of 10 MiB or more up to 2 MiB and prints it with two decimals, so a size
fits many products. A fit only counts where it would be a coincidence: each function says how
wide the printed number is and accepts a match when the chance of one is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_ROUND = 2 << 20
_CHANCE = 0.15

COMMON_VOCABULARIES = (
    32000, 32064, 32256, 50304, 64000, 100352, 102400, 122753, 128256, 129280, 131072, 151552,
    151936, 152064, 154880, 163840, 200064, 201088, 248320, 256000, 256512, 262144, 262208,
)  # fmt: skip
"""Rows of the embedding of models in wide use, from their public configuration files."""


def bounds(tried_bytes: int) -> tuple[int, int]:
    """Smallest and largest number of bytes that torch prints as ``tried_bytes``."""
    gib, mib = 1 << 30, 1 << 20
    half = 0.005 * (gib if tried_bytes >= gib else mib)
    exact_mib = 10 * mib <= tried_bytes < gib and tried_bytes % _ROUND == 0
    slack = 0 if exact_mib else math.ceil(half)
    low = tried_bytes - slack - (_ROUND if tried_bytes >= 10 * mib else 512)
    return max(1, low + 1), tried_bytes + slack


def step_row(tried_bytes: int, step_tokens: int) -> int | None:
    """Elements a token, where ``tried_bytes`` = step tokens × elements × 2 bytes; None if no fit.

    Widths of layers are multiples of 1024 nearly always. Where the printed size is too coarse
    to tell one multiple from the next, nothing fits.
    """
    if step_tokens <= 0:
        return None
    low, high = (bound / (2 * step_tokens) for bound in bounds(tried_bytes))
    if (high - low) / 1024 > _CHANCE:
        return None
    row = math.floor(high / 1024) * 1024
    return row if row >= max(low, 1024) else None


def vocabulary_rows(tried_bytes: int, rows: Iterable[int]) -> tuple[int, int, int] | None:
    """``(rows, vocabulary, bytes)`` whose product fits, 4 or 2 bytes for logits and 12 for a sort."""
    low, high = bounds(tried_bytes)
    if (high - low) / tried_bytes > 0.02:
        return None
    for count in rows:
        for vocabulary in COMMON_VOCABULARIES:
            for width in (12, 4, 2):
                if low <= count * vocabulary * width <= high:
                    return count, vocabulary, width
    return None
