"""Kills and rotations: what was written is counted once, whatever happened in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from fault import Counts, counts_of, pieces, trial

from exporter.diagnosis.knowledge import builtin_classes
from exporter.follow import Follower
from exporter.sources.stream import Chunk
from exporter.state import Store
from exporter.status import TargetStatus

KILLS = 5
LIVES = ("sampler_uni", "profile_uni", "preproc_survive")


@pytest.mark.parametrize(("rotation", "glob"), [("rename", ""), ("copytruncate", "*.log*")])
async def test_nothing_is_lost_or_doubled_over_kills_and_rotations(
    rotation: str, glob: str, record_property: Callable[[str, object], None]
) -> None:
    """Everything is counted once, though the sidecar is killed and its log rotated between any two lines."""
    one = await trial(rotation, seed=1, kills=KILLS, busy=0.2, torn=True, glob=glob)
    record_property("counts", one.says())
    assert one.defects == [], one.says()
    assert one.lost() == (0, 0)
    assert one.seen == one.written
    assert one.kills == KILLS + 1
    assert one.rotations > 2
    assert one.pieces > 5


def test_every_generated_failure_is_another_one() -> None:
    """Ten lives of one capture are ten incidents, as no two have a time or a process in common."""
    log = b"".join(piece.data for piece in itertools.islice(pieces(1, ("mlp_uni_16384",)), 10))
    assert counts_of(log).incidents == {"prefill_budget/serving": 10}
    assert counts_of(log).fatal == {"prefill_budget": 10}
    assert counts_of(log).engine_starts == 10


def test_what_is_written_depends_on_the_seed_alone() -> None:
    """The same seed gives the same bytes, another seed others."""
    first, again, other = ([one.data for one in itertools.islice(pieces(s), 5)] for s in (1, 1, 2))
    assert first == again != other


def test_lost_and_doubled_are_told_apart() -> None:
    """One line for every number that differs, with both values."""
    written, seen = Counts(error_lines=3), Counts(error_lines=4)
    written.incidents["sampler/serving"], seen.incidents["lora/serving"] = 2, 1
    assert written.differences(seen) == [
        "incidents lora/serving: 0 written, 1 counted",
        "incidents sampler/serving: 2 written, 0 counted",
        "error_lines: 3 written, 4 counted",
    ]


@pytest.mark.parametrize("name", LIVES)
def test_a_rotation_between_any_two_lines_changes_nothing(name: str) -> None:
    """A death whose log was renamed behind any of its lines counts as if it had not been."""
    lines, whole = _life(name)
    torn = {at: _read(Files(lines, at)).counts() for at in range(1, len(lines))}
    assert {at: seen for at, seen in torn.items() if seen != whole} == {}


def test_a_kill_around_a_rotation_changes_nothing(tmp_path: Path) -> None:
    """It also counts so if the process is killed right before, at or after the rotation, and reads again."""
    lines, whole = _life("sampler_uni")
    with closing(Store(tmp_path)) as store:
        store.open()
        for at in range(3, len(lines) - 1, len(lines) // 12):
            for silence, until in ((0, at - 1), (0, at), (5, at), (60, at), (0, at + 1), (5, at + 1)):
                target = f"{at} {silence} {until}"
                files = Files(lines, at, target)
                store.load(files.follower)
                files.read(until, silence)
                store.save(files.follower)
                again = Files(lines, at, target)
                store.load(again.follower)
                assert _read(again).counts() == whole, target


def test_late_lines_of_the_older_file() -> None:
    """A writer that keeps the renamed file open for a while adds to the records it began there."""
    lines, whole = _life("tp2_oom_both")
    for at in range(len(lines) // 2, len(lines) - 20, 7):
        files = Files(lines, at)
        files.read(at + 5)
        files.give(0, lines[at + 5 : at + 10])
        files.give(1, lines[at + 10 :])
        files.silence()
        assert files.counts() == whole, at


class Files:
    """Two files that follow each other at one path, and a follower. The first one ends behind ``at``."""

    def __init__(self, lines: list[bytes], at: int, target: str = "default") -> None:
        self.follower = Follower(TargetStatus(target), builtin_classes(), lambda: datetime(2026, 11, 30))
        self.files = lines[:at], lines[at:]

    def read(self, until: int, silence: int = 0) -> None:
        """Read from where the state says to the line ``until``, some lines at a time."""
        tokens, first = self.follower.tokens(), 0
        for number, lines in enumerate(self.files):
            begin = int(tokens.get(f"file {number}", "0"))
            end = min(len(lines), until - first)
            for line in range(begin, end, 9):
                self.give(number, lines[line : min(line + 9, end)], min(line + 9, end))
            first += len(lines)
        self.silence(silence)

    def give(self, number: int, lines: list[bytes], token: int = 0) -> None:
        """Lines of one of the two."""
        follows = "file 0" if number else ""
        data = b"".join(lines)
        self.follower.take(
            "vllm.log", Chunk(f"file {number}", data, str(token), begin="0", follows=follows), 0.0
        )

    def silence(self, ticks: int = 60) -> None:
        """Nothing is written."""
        for _ in range(ticks):
            self.follower.tick()

    def counts(self) -> Counts:
        """What was counted."""
        counts = self.follower.status.counts
        found = Counts(
            error_lines=counts.error_lines, near_misses=counts.near_misses, engine_starts=counts.engine_starts
        )
        found.incidents.update({f"{one}/{phase}": n for (one, phase), n in counts.incidents.items()})
        found.fatal.update(counts.fatal)
        return found


def _life(name: str) -> tuple[list[bytes], Counts]:
    """Lines of a life with its failure, and what is counted of them in one file."""
    lines = next(pieces(1, (name,), traffic=False)).data.splitlines(keepends=True)
    return lines, _read(Files(lines, len(lines))).counts()


def _read(files: Files) -> Files:
    files.read(1 << 30)
    files.silence()
    return files
