from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.diagnosis.arithmetic import COMMON_VOCABULARIES, bounds, step_row, vocabulary_rows
from exporter.vllm.memory_error import human, to_bytes

MIB, GIB = 1 << 20, 1 << 30


def printed(size: int) -> int:
    """``size`` as it comes back from torch's message: rounded up to 2 MiB and printed with two decimals."""
    rounded = -(-size // (2 * MIB)) * 2 * MIB if size >= 10 * MIB else -(-size // 512) * 512
    number, unit = human(rounded).split()
    return to_bytes(number, unit)


class TestBounds:
    """How wide a printed number is."""

    @pytest.mark.parametrize(
        ("tried", "expected"),
        [
            (512 * MIB, (510 * MIB + 1, 512 * MIB)),
            (513 * MIB, (513 * MIB - 5243 - 2 * MIB + 1, 513 * MIB + 5243)),
            (4112431186, (4112431186 - 5368710 - 2 * MIB + 1, 4112431186 + 5368710)),
            (MIB, (MIB - 5243 - 511, MIB + 5243)),
            (512, (1, 512 + 5243)),
        ],
        ids=["whole-pages", "odd-mebibytes", "gibibytes", "small", "tiny"],
    )
    def test_width(self, tried: int, expected: tuple[int, int]) -> None:
        """The smallest and largest size that is printed so follow from the rounding."""
        assert bounds(tried) == expected

    @settings(deadline=None, max_examples=200)
    @given(st.integers(10 * MIB, 200 * GIB))
    def test_the_true_size_is_inside(self, size: int) -> None:
        """Whatever was asked for lies within the bounds of what is printed for it."""
        low, high = bounds(printed(size))
        assert low <= size <= high

    def test_a_small_true_size_is_inside(self) -> None:
        """The same holds below 10 MiB, where only the two decimals are lost."""
        size = 4 * MIB + 1
        low, high = bounds(printed(size))
        assert low <= size <= high


class TestStepRow:
    """Tokens of a step times a row."""

    @pytest.mark.parametrize(
        ("tried", "tokens", "row"),
        [
            (896 * MIB, 16384, 28672),
            (671088640, 16384, 20480),
            (448 * MIB, 8192, 28672),
            (printed(9000 * 14336 * 2), 9000, 14336),
            (900 * MIB, 16384, None),
            (106 * MIB, 9, None),
            (4112431186, 16384, None),
            (896 * MIB, 0, None),
            (896 * MIB, -1, None),
            (16 * MIB, 16384, None),
        ],
        ids=[
            "one-tensor",
            "documented",
            "half-the-step",
            "odd-step",
            "no-multiple",
            "too-coarse",
            "printed-too-coarsely",
            "no-tokens",
            "negative",
            "below-one-width",
        ],
    )
    def test_rows(self, tried: int, tokens: int, row: int | None) -> None:
        """A size that is the tokens times a multiple of 1024 two-byte elements fits, another does not."""
        assert step_row(tried, tokens) == row

    @settings(deadline=None, max_examples=100)
    @given(tokens=st.integers(8192, 16384), width=st.integers(1, 30))
    def test_a_true_row_is_found(self, tokens: int, width: int) -> None:
        """Where the printed size is fine enough, the row that made it comes out."""
        found = step_row(printed(tokens * width * 1024 * 2), tokens)
        assert found in (width * 1024, None)
        if tokens * width * 1024 * 2 < GIB:
            assert found == width * 1024


class TestVocabularyRows:
    """Rows times a vocabulary."""

    @pytest.mark.parametrize(
        ("tried", "rows", "found"),
        [
            (106 * MIB, [72], (72, 128256, 12)),
            (500 * MIB, [7, 4096], (4096, 32000, 4)),
            (printed(8192 * 151936 * 4), [8192], (8192, 151936, 4)),
            (20 * MIB, [72], None),
            (106 * MIB, [], None),
            (333 * MIB, [5], None),
        ],
        ids=["sort", "second-count", "logits", "too-coarse", "no-rows", "no-fit"],
    )
    def test_rows(self, tried: int, rows: list[int], found: tuple[int, int, int] | None) -> None:
        """A size that is a count times a known vocabulary times an element fits."""
        assert vocabulary_rows(tried, rows) == found

    def test_the_vocabularies_are_in_order(self) -> None:
        """The vocabularies are listed once each, in order."""
        assert list(COMMON_VOCABULARIES) == sorted(set(COMMON_VOCABULARIES))
