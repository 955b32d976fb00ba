"""Prompts that no cache has an answer for: random token ids, different from the first block on.

The prefix cache goes by whole blocks from the beginning of a prompt, so it is enough that no two
begin alike. Ids are drawn from where vocabularies hold ordinary text: control tokens and
placeholders of images have the lowest ids in some, the highest in others.
"""

from __future__ import annotations

import random

LOWEST = 1000
HIGHEST = 30_000
NARROWER = (2000, 1500)
"""Upper ends to try where the vocabulary turns out to be smaller."""

_BEGINNING = 16  # tokens; the smallest block that vLLM caches


class Prompts:
    """Makes prompts; ``highest`` is the first id that is not used. ``seed`` is for tests."""

    def __init__(self, highest: int = HIGHEST, seed: int | None = None) -> None:
        self._ids = range(LOWEST, highest)
        # not for secrets: only has to differ from what was sent before
        self._random = random.Random(seed)  # noqa: S311
        self._begun: set[tuple[int, ...]] = set()

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that begin unlike every prompt before."""
        while True:
            made = self._random.choices(self._ids, k=tokens)
            beginning = tuple(made[:_BEGINNING])
            if beginning not in self._begun or tokens < _BEGINNING:
                self._begun.add(beginning)
                return made

    def highest(self, tokens: int) -> list[int]:
        """A prompt with the highest id there is, to find out whether the vocabulary has it."""
        return [*self.prompt(tokens)[:-1], self._ids[-1]]
