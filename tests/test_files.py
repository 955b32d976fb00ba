from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from exporter.sources import files
from exporter.sources.files import FileSource
from exporter.sources.framing import MAX_LINE
from exporter.sources.generation import Generation, open_generation
from exporter.sources.matching import expand, matches
from exporter.sources.scan import BLOCK
from exporter.sources.stream import Chunk, SourceStats
from exporter.sources.waker import DirectoryWaker, InotifyWatch, StepWatch

pytestmark = pytest.mark.asyncio

LONG = bool(os.environ.get("VLLM_OOM_LONG_TESTS"))
DRAINED = files.DRAIN_SECONDS + 0.1
RESCAN = files.SCAN_SECONDS + 0.1


class Hand:
    """A waker moved by the test: ``idle`` says that the source has seen everything there is."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.go = asyncio.Event()
        self.timeouts: list[float] = []

    async def wait(self, timeout: float) -> None:
        """Wait for the test."""
        self.timeouts.append(timeout)
        self.idle.set()
        await self.go.wait()
        self.go.clear()


class Tail:
    """A source with everything it gave; time stands still between looks."""

    def __init__(self, pattern: Path | str, resume: Mapping[str, str] | None = None, **options: Any) -> None:
        self.now = 1000.0
        self.hand = Hand()
        self.source = FileSource(str(pattern), waker=self.hand, clock=lambda: self.now, **options)
        self.chunks: list[Chunk] = []
        self.tokens: dict[str, str] = dict(resume or {})
        self._task = asyncio.create_task(self._run(dict(self.tokens)))

    async def _run(self, resume: Mapping[str, str]) -> None:
        async for chunk in self.source.chunks(resume):
            self.chunks.append(chunk)
            self.tokens[chunk.stream] = chunk.token

    async def look(self, seconds: float = 0.1) -> None:
        """Let ``seconds`` pass, wake the source and wait until it has nothing more to do."""
        self.now += seconds
        async with asyncio.timeout(30):
            await self.hand.idle.wait()
            self.hand.idle.clear()
            self.hand.go.set()
            await self.hand.idle.wait()

    async def stop(self) -> dict[str, str]:
        """End as a killed exporter does; what it would have saved."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        return self.tokens

    @property
    def stats(self) -> SourceStats:
        """The source's own."""
        return self.source.stats

    def problem(self) -> str | None:
        """What the source says that is wrong."""
        return self.source.stats.problem

    @property
    def text(self) -> bytes:
        """Everything given, in order."""
        return b"".join(chunk.data for chunk in self.chunks)

    @property
    def streams(self) -> dict[str, bytes]:
        """Everything given, by stream, in the order of their first words."""
        found: dict[str, bytes] = {}
        for chunk in self.chunks:
            found[chunk.stream] = found.get(chunk.stream, b"") + chunk.data
        return found

    @property
    def in_a_row(self) -> bool:
        """Whether every stream says, with each chunk, that it follows the one before it here."""
        names = [*self.streams]
        said = {(chunk.stream, chunk.follows) for chunk in self.chunks}
        before = next(one.follows for one in self.chunks if one.stream == names[0])
        return said == set(zip(names, [before, *names], strict=False))

    @property
    def ended(self) -> set[str]:
        """Streams that said that nothing more will come."""
        return {chunk.stream for chunk in self.chunks if chunk.ended}

    @property
    def rotations(self) -> tuple[int, int, int]:
        """``rename``, ``truncate``, ``reopen``."""
        counts = self.stats.rotations
        return counts["rename"], counts["truncate"], counts["reopen"]


Follow = Callable[..., Awaitable[Tail]]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    """Start to follow a pattern; stopped at the end."""
    started: list[Tail] = []

    async def start(pattern: Path | str, resume: Mapping[str, str] | None = None, **options: int) -> Tail:
        tail = Tail(pattern, resume, **options)
        started.append(tail)
        await tail.look()
        return tail

    yield start
    for tail in started:
        await tail.stop()


def add(path: Path, data: bytes) -> None:
    """Append to a file as a log does."""
    with path.open("ab") as file:
        file.write(data)


def numbered(first: int, count: int) -> bytes:
    """Lines of a log that differ."""
    return b"".join(b"INFO 11-30 16:26:46 [core.py:58] step %06d\n" % n for n in range(first, first + count))


# --- one file -----------------------------------------------------------------------------


async def test_a_file_is_read_from_its_beginning_and_followed(follow: Follow, tmp_path: Path) -> None:
    """What is there comes first, then what is added; the position is behind the last line given."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\ntwo\n")
    tail = await follow(log)
    assert tail.text == b"one\ntwo\n"
    add(log, b"three\n")
    await tail.look()
    assert tail.text == b"one\ntwo\nthree\n"
    (stream,) = tail.streams
    token = json.loads(tail.tokens[stream])
    status = log.stat()
    assert (token["offset"], token["inode"], token["device"], token["path"]) == (
        14,
        status.st_ino,
        status.st_dev,
        str(log),
    )
    assert token["fingerprint_length"] == 14
    assert (tail.stats.opened, tail.problem(), tail.stats.lag_bytes) == (True, None, 0)
    assert tail.rotations == (0, 0, 0)


async def test_a_partial_line_is_held_back_until_its_newline(follow: Follow, tmp_path: Path) -> None:
    """A line comes whole, whatever pieces it was written in, and counts as lag until then."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\ntw")
    tail = await follow(log)
    assert tail.text == b"one\n"
    assert tail.stats.lag_bytes == 2
    add(log, b"o, still")
    await tail.look()
    assert tail.text == b"one\n"
    add(log, b" two\nthr")
    await tail.look()
    assert tail.text == b"one\ntwo, still two\n"
    assert tail.stats.lag_bytes == 3


@pytest.mark.parametrize("size", [20_000, MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, 3 * MAX_LINE + 77])
async def test_long_lines_lose_nothing(follow: Follow, tmp_path: Path, size: int) -> None:
    """A line up to the limit comes whole; a longer one in pieces of the limit while it has no end."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"first\n" + b"x" * size)
    tail = await follow(log)
    whole = size // MAX_LINE if size % MAX_LINE else (size - 1) // MAX_LINE
    assert [len(chunk.data) for chunk in tail.chunks] == [6] + [MAX_LINE] * whole
    add(log, b"\nlast\n")
    await tail.look()
    assert tail.text == log.read_bytes()
    assert len(tail.streams) == 1


async def test_a_backlog_comes_in_blocks_that_end_at_lines(follow: Follow, tmp_path: Path) -> None:
    """No chunk is larger than one block and the line that crosses its border."""
    log = tmp_path / "vllm.log"
    log.write_bytes(numbered(0, 40_000))
    tail = await follow(log)
    assert tail.text == log.read_bytes()
    assert all(chunk.data.endswith(b"\n") for chunk in tail.chunks)
    assert max(len(chunk.data) for chunk in tail.chunks) <= BLOCK + 64


async def test_a_file_is_only_read_never_locked_or_changed(follow: Follow, tmp_path: Path) -> None:
    """Every file is opened for reading only."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    await follow(log)
    flags = [
        int(line.split()[1], 8)
        for fd in Path("/proc/self/fd").iterdir()
        if os.path.realpath(fd) == str(log)
        for line in Path(f"/proc/self/fdinfo/{fd.name}").read_text().splitlines()
        if line.startswith("flags:")
    ]
    assert [flag & os.O_ACCMODE for flag in flags] == [os.O_RDONLY]
    assert "vllm" not in Path("/proc/locks").read_text()


# --- beginning ----------------------------------------------------------------------------


async def test_a_file_may_appear_late(follow: Follow, tmp_path: Path) -> None:
    """A missing file, even in a missing directory, is said and then read when it comes."""
    log = tmp_path / "not" / "yet" / "vllm.log"
    tail = await follow(log)
    assert tail.problem() == f"{log}: no such file yet; check the path if it should exist"
    assert not tail.stats.opened
    log.parent.mkdir(parents=True)
    await tail.look()
    log.write_bytes(b"one\n")
    await tail.look()
    assert tail.text == b"one\n"
    assert (tail.stats.opened, tail.problem()) == (True, None)
    assert tail.rotations == (0, 0, 0)


async def test_new_files_and_directories_under_a_glob(follow: Follow, tmp_path: Path) -> None:
    """``**`` finds files in directories made later; hidden and packed files are left alone."""
    tail = await follow(tmp_path / "pods" / "**" / "*.log*")
    (tmp_path / "pods" / "a" / "vllm").mkdir(parents=True)
    await tail.look(RESCAN)
    (tmp_path / "pods" / "a" / "vllm" / "0.log").write_bytes(b"one\n")
    (tmp_path / "pods" / "top.log").write_bytes(b"top\n")
    (tmp_path / "pods" / "a" / ".hidden.log").write_bytes(b"hidden\n")
    (tmp_path / "pods" / "a" / "0.log.20241010-132438.gz").write_bytes(b"\x1f\x8b packed\n")
    (tmp_path / "pods" / "loop").symlink_to(tmp_path / "pods")
    await tail.look(RESCAN)
    assert sorted(tail.streams.values()) == [b"one\n", b"top\n"]


async def test_a_change_in_a_directory_is_seen_before_the_next_scan(follow: Follow, tmp_path: Path) -> None:
    """A wake-up looks for new files at once if a directory changed, not only every two seconds."""
    tail = await follow(tmp_path / "*.log")
    await tail.look(RESCAN)
    (tmp_path / "new.log").write_bytes(b"one\n")
    await tail.look(1.0)
    assert tail.text == b"one\n"


async def test_the_wait_is_never_longer_than_a_second(follow: Follow, tmp_path: Path) -> None:
    """However silent the hint is, every file is looked at each second."""
    (tmp_path / "vllm.log").write_bytes(b"one\n")
    for pattern in ("vllm.log", "*.log"):
        tail = await follow(tmp_path / pattern)
        for _ in range(5):
            await tail.look(1.0)
        assert max(tail.hand.timeouts) <= 1.0


async def test_what_a_glob_matches(tmp_path: Path) -> None:
    """A path matches a pattern exactly where a look at the file system finds it by that pattern."""
    paths = ["a.log", ".a.log", "b/a.log", "b/.c/a.log", ".b/a.log", "b/c/a.log", "b/c/d/a.txt"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for glob in (
        "a.log",
        "*.log",
        ".*.log",
        "*/a.log",
        "**/a.log",
        "**/*",
        "b/**",
        "?/*/*.log",
        ".b/*",
        "b/**/d/*",
    ):
        pattern = str(tmp_path / glob)
        found = set(expand(pattern).files)
        assert {str(tmp_path / one) for one in paths if matches(pattern, str(tmp_path / one))} == found, glob


async def test_names_with_brackets_are_taken_as_they_are(follow: Follow, tmp_path: Path) -> None:
    """A path that exists is that file, even if it could be read as a pattern."""
    log = tmp_path / "vllm[0].log"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    assert tail.text == b"one\n"


async def test_pipes_and_directories_are_not_opened(follow: Follow, tmp_path: Path) -> None:
    """Only regular files are logs; a pipe without a writer does not block the others."""
    os.mkfifo(tmp_path / "a.log")
    (tmp_path / "b.log").mkdir()
    (tmp_path / "c.log").write_bytes(b"one\n")
    tail = await follow(tmp_path / "*.log")
    assert tail.text == b"one\n"


async def test_one_inode_is_read_once(follow: Follow, tmp_path: Path) -> None:
    """Hard links and symbolic links to a file that is followed add nothing."""
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    (tmp_path / "b.log").hardlink_to(log)
    (tmp_path / "c.log").symlink_to(log)
    tail = await follow(tmp_path / "*.log")
    add(log, b"two\n")
    await tail.look(RESCAN)
    assert tail.text == b"one\ntwo\n"
    assert tail.rotations == (0, 0, 0)


async def test_old_generations_are_read_before_new_ones(follow: Follow, tmp_path: Path) -> None:
    """At the first start, the files of one log come in the order in which they were written."""
    for age, name in enumerate(("vllm.log", "vllm.log.1", "vllm.log.2")):
        (tmp_path / name).write_bytes(b"%d\n" % (3 - age) * 200_000)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    tail = await follow(tmp_path / "vllm.log*")
    assert tail.text == b"1\n" * 200_000 + b"2\n" * 200_000 + b"3\n" * 200_000
    assert tail.in_a_row
    assert tail.rotations == (0, 0, 0)


async def test_packed_files_that_match(follow: Follow, tmp_path: Path) -> None:
    """They are not read as logs, which is said once."""
    (tmp_path / "vllm.log").write_bytes(b"one\n")
    (tmp_path / "vllm.log.2.gz").write_bytes(b"packed\n")
    with capture_logs() as said:
        tail = await follow(tmp_path / "*.log*")
        await tail.look(RESCAN)
    assert tail.text == b"one\n"
    assert said == [
        {
            "event": "packed files that match are not read",
            "log_level": "info",
            "source": str(tmp_path / "*.log*"),
            "for_example": str(tmp_path / "vllm.log.2.gz"),
        }
    ]


async def test_a_backlog_does_not_starve_other_files(follow: Follow, tmp_path: Path) -> None:
    """A small file is read whole while a large one of another log is still at its beginning."""
    (tmp_path / "big.log").write_bytes(numbered(0, 100_000))
    (tmp_path / "small.log").write_bytes(b"small\n")
    tail = await follow(tmp_path / "*.log")
    small = next(i for i, chunk in enumerate(tail.chunks) if chunk.data == b"small\n")
    assert small <= 1
    assert len(tail.chunks) > 10


# --- rotation -----------------------------------------------------------------------------


async def test_rename_drains_the_old_file_first(follow: Follow, tmp_path: Path) -> None:
    """What was written before and after the rename comes, in order, and then the old stream ends."""
    log, old = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    add(log, b"two\n")
    log.rename(old)
    add(old, b"three\nthe rest without a new")
    log.write_bytes(b"four\n")
    await tail.look()
    assert tail.text == b"one\ntwo\nthree\nfour\n"
    assert tail.rotations == (1, 0, 0)
    add(old, b"line")  # the writer was late to notice
    await tail.look(1.0)
    assert tail.ended == set()
    await tail.look(DRAINED)
    first, second = tail.streams
    assert tail.streams[first] == b"one\ntwo\nthree\nthe rest without a newline"
    assert tail.streams[second] == b"four\n"
    assert tail.ended == {first}
    assert tail.in_a_row
    assert tail.stats.lag_bytes == 0


async def test_a_renamed_file_is_followed_while_the_next_is_empty(follow: Follow, tmp_path: Path) -> None:
    """A writer that never reopens goes on in the old file, however long ago it was renamed."""
    log, old = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    log.rename(old)
    log.touch()
    await tail.look()
    await tail.look(1000)
    add(old, b"two\n")
    await tail.look()
    assert tail.text == b"one\ntwo\n"
    assert tail.ended == set()


async def test_rename_under_a_glob_that_matches_both_names(follow: Follow, tmp_path: Path) -> None:
    """Generations that shift through matching names are each read once and counted once."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"a\n")
    tail = await follow(tmp_path / "vllm.log*")
    for data in (b"b\n", b"c\n", b"d\n"):
        for number in (2, 1):
            if (older := tmp_path / f"vllm.log.{number}").exists():
                older.rename(tmp_path / f"vllm.log.{number + 1}")
        log.rename(tmp_path / "vllm.log.1")
        log.write_bytes(data)
        await tail.look(RESCAN)
    await tail.look(DRAINED)
    await tail.look(DRAINED)
    assert tail.text == b"a\nb\nc\nd\n"
    assert tail.rotations == (3, 0, 0)
    assert tail.in_a_row
    assert len(tail.ended) == 3


async def test_a_glob_while_nothing_is_at_the_path_of_the_log(follow: Follow, tmp_path: Path) -> None:
    """Files that were rotated away are one text, from before the first look or not, also where no log took their place."""
    log, copies = tmp_path / "vllm.log", [tmp_path / f"vllm.log.{number}" for number in range(5)]
    for number, path in ((1, copies[2]), (2, copies[1])):
        path.write_bytes(b"%d\n" % number)
        os.utime(path, (number, number))
    tail = await follow(tmp_path / "*.log*")
    assert tail.text == b"1\n2\n"
    copies[2].rename(copies[4])
    copies[1].rename(copies[3])
    for number, path in ((3, copies[2]), (4, copies[1])):
        path.write_bytes(b"%d\n" % number)
        os.utime(path, (number, number))
    await tail.look(RESCAN)
    assert tail.text == b"1\n2\n3\n4\n"
    log.write_bytes(b"5\n")
    await tail.look(RESCAN)
    assert tail.text == b"1\n2\n3\n4\n5\n"
    assert tail.in_a_row


async def test_a_pattern_of_nothing_but_rotated_names(follow: Follow, tmp_path: Path) -> None:
    """Without their log they are logs of their own."""
    (tmp_path / "vllm.log").write_bytes(b"not meant\n")
    for number in (1, 2):
        (tmp_path / f"vllm.log.{number}").write_bytes(b"%d\n" % number)
    tail = await follow(tmp_path / "vllm.log.*")
    assert sorted(tail.streams.values()) == [b"1\n", b"2\n"]
    assert {chunk.follows for chunk in tail.chunks} == {""}


async def test_names_with_numbers_are_logs_of_their_own(follow: Follow, tmp_path: Path) -> None:
    """Of ``server`` and ``server-1`` none was rotated: both are read while both are written."""
    logs = tmp_path / "server", tmp_path / "server-1"
    for log in logs:
        log.write_bytes(log.name.encode() + b"\n")
    tail = await follow(tmp_path / "server*")
    for log in logs:
        add(log, b"two\n")
    await tail.look(RESCAN)
    assert sorted(tail.streams.values()) == [b"server\ntwo\n", b"server-1\ntwo\n"]
    assert {chunk.follows for chunk in tail.chunks} == {""}


@pytest.mark.parametrize("pattern", ["vllm.log", "vllm.lo*[!s]"])
async def test_two_renames_between_two_looks(follow: Follow, tmp_path: Path, pattern: str) -> None:
    """A generation that came and went while nobody looked is read between its neighbours."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"a\n")
    tail = await follow(tmp_path / pattern)
    log.rename(tmp_path / "vllm.log.2")
    (tmp_path / "vllm.log.1").write_bytes(b"b\n")
    (tmp_path / "vllm.log.notes").write_bytes(b"not a generation\n")
    log.write_bytes(b"c\n")
    await tail.look(RESCAN)
    assert tail.text == b"a\nb\nc\n"
    assert tail.in_a_row
    assert tail.rotations == (2, 0, 0)


async def test_truncation_by_size(follow: Follow, tmp_path: Path) -> None:
    """A file that shrank begins anew, as another stream; what was held back of the old one comes."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\ntwo\nhalf")
    tail = await follow(log)
    log.write_bytes(b"new\n")
    await tail.look()
    first, second = tail.streams
    assert tail.streams == {first: b"one\ntwo\nhalf", second: b"new\n"}
    assert tail.ended == {first}
    assert tail.in_a_row
    assert tail.rotations == (0, 1, 0)


async def test_truncation_that_grew_past_the_old_position(follow: Follow, tmp_path: Path) -> None:
    """The first bytes tell that a file is another one, whatever its size."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    with log.open("r+b") as file:
        file.truncate()
        file.write(b"new one\nnew two\n")
    await tail.look()
    assert list(tail.streams.values()) == [b"one\n", b"new one\nnew two\n"]
    assert tail.rotations == (0, 1, 0)


async def test_truncation_to_the_same_size(follow: Follow, tmp_path: Path) -> None:
    """A file rewritten to exactly its old size is noticed by its time stamp and content."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    os.utime(log, (1e9, 1e9))
    tail = await follow(log)
    log.write_bytes(b"two\n")
    await tail.look()
    assert list(tail.streams.values()) == [b"one\n", b"two\n"]


async def test_truncation_behind_the_same_banner(follow: Follow, tmp_path: Path) -> None:
    """Logs that begin with the same 2 KiB differ before the old position, and that is enough."""
    banner = b"== CUDA ==\n" * 200
    log = tmp_path / "vllm.log"
    log.write_bytes(banner + numbered(0, 100))
    tail = await follow(log)
    log.write_bytes(banner + numbered(500, 200))
    await tail.look()
    assert list(tail.streams.values()) == [banner + numbered(0, 100), banner + numbered(500, 200)]


async def test_the_same_first_bytes_make_another_stream(follow: Follow, tmp_path: Path) -> None:
    """A new generation in the same inode with the same beginning has an identity of its own."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"start\none\n")
    tail = await follow(log)
    for _ in range(3):
        log.write_bytes(b"")
        await tail.look()
        log.write_bytes(b"start\n")
        await tail.look()
    assert list(tail.streams.values()) == [b"start\none\n", b"start\n", b"start\n", b"start\n"]
    assert tail.rotations == (0, 3, 0)
    assert tail.in_a_row


async def test_a_hole_after_truncation_is_skipped(follow: Follow, tmp_path: Path) -> None:
    """A writer without O_APPEND leaves a hole when its file is truncated: no NULs are given out."""
    log = tmp_path / "vllm.log"
    with log.open("wb", buffering=0) as writer:
        writer.write(numbered(0, 50_000))
        tail = await follow(log)
        os.truncate(log, 0)
        writer.write(b"new one\n")
        await tail.look()
        writer.write(b"new two\n")
        await tail.look()
        assert list(tail.streams.values()) == [numbered(0, 50_000), b"new one\nnew two\n"]
        tokens = await tail.stop()
        writer.write(b"new three\n")
    again = await follow(log, tokens)
    assert again.text == b"new three\n"


async def test_the_rest_of_a_truncated_file_is_found_in_its_copy(follow: Follow, tmp_path: Path) -> None:
    """What was not read before copytruncate is read from the copy, before the new generation."""
    log = tmp_path / "vllm.log"
    log.write_bytes(numbered(0, 100))
    tail = await follow(log)
    add(log, numbered(100, 50) + b"half")
    shutil.copyfile(log, tmp_path / "vllm.log.1")
    log.write_bytes(numbered(900, 300))
    await tail.look()
    first, second = tail.streams
    assert tail.streams == {first: numbered(0, 150) + b"half", second: numbered(900, 300)}
    assert tail.text == numbered(0, 150) + b"half" + numbered(900, 300)
    assert tail.ended == {first}
    assert tail.in_a_row
    assert tail.rotations == (0, 1, 0)


async def test_copies_that_match_the_glob_are_not_read_twice(follow: Follow, tmp_path: Path) -> None:
    """A copy is recognised while it is made, when the original is truncated, and ever after."""
    log, copy = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    log.write_bytes(numbered(0, 100))
    tail = await follow(tmp_path / "vllm.log*")
    copy.touch()
    await tail.look(RESCAN)
    add(copy, numbered(0, 50))
    await tail.look(RESCAN)
    add(copy, numbered(50, 50))
    await tail.look(RESCAN)
    log.write_bytes(b"")
    await tail.look(RESCAN)
    add(log, numbered(100, 10))
    await tail.look(RESCAN)
    tokens = await tail.stop()
    assert tail.text == numbered(0, 110)
    again = await follow(tmp_path / "vllm.log*", tokens)
    await again.look(RESCAN)
    assert again.chunks == []


async def test_delete_and_recreate(follow: Follow, tmp_path: Path) -> None:
    """A deleted file is read to its end, as long as it is open; the new one is another stream."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    add(log, b"two\nhalf")
    log.unlink()
    await tail.look()
    log.write_bytes(b"three\n")
    await tail.look()
    await tail.look(DRAINED)
    first, second = tail.streams
    assert tail.streams == {first: b"one\ntwo\nhalf", second: b"three\n"}
    assert tail.ended == {first}
    assert tail.in_a_row
    assert tail.rotations == (0, 0, 1)


async def test_recreation_after_the_end(follow: Follow, tmp_path: Path) -> None:
    """A deleted file ends although nothing follows it, its space is given free, and a later one is read."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    log.unlink()
    await tail.look(DRAINED)
    assert len(tail.ended) == 1
    log.write_bytes(b"one\n")  # the inode is free to be used again
    await tail.look()
    assert tail.in_a_row
    assert list(tail.streams.values()) == [b"one\n", b"one\n"]
    assert sum(tail.rotations) == 1


async def test_the_links_of_the_kubelet(follow: Follow, tmp_path: Path) -> None:
    """A link to a link: rotation behind it is a rename, a new target of either link a reopen."""
    pods, containers = tmp_path / "pods", tmp_path / "containers"
    pods.mkdir()
    containers.mkdir()
    link, middle = containers / "vllm.log", tmp_path / "current"
    (pods / "0.log").write_bytes(b"a\n")
    middle.symlink_to(pods / "0.log")
    link.symlink_to(middle)
    tail = await follow(containers / "*.log")
    (pods / "0.log").rename(pods / "0.log.20241010-132438")
    (pods / "0.log").write_bytes(b"b\n")
    await tail.look()
    assert tail.rotations == (1, 0, 0)
    add(pods / "0.log", b"the last words\n")
    (pods / "1.log").write_bytes(b"c\n")
    (tmp_path / "swap").symlink_to(pods / "1.log")
    (tmp_path / "swap").rename(middle)
    await tail.look()
    assert tail.rotations == (1, 0, 1)
    assert tail.text == b"a\nb\nthe last words\nc\n"
    await tail.look(DRAINED)
    await tail.look(DRAINED)
    assert len(tail.ended) == 2
    add(pods / "1.log", b"d\n")
    await tail.look()
    assert tail.text == b"a\nb\nthe last words\nc\nd\n"


async def test_a_link_that_is_pointed_back(follow: Follow, tmp_path: Path) -> None:
    """A target that is followed again goes on where it was."""
    link = tmp_path / "link.log"
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() + b"\n")

    def point(name: str) -> None:
        (tmp_path / "swap").symlink_to(tmp_path / name)
        (tmp_path / "swap").rename(link)

    point("a")
    tail = await follow(link)
    point("b")
    await tail.look()
    point("a")
    add(tmp_path / "a", b"again\n")
    await tail.look()
    await tail.look(DRAINED)
    assert tail.text == b"a\nb\nagain\n"
    assert tail.rotations == (0, 0, 2)
    _, second = tail.streams
    assert tail.ended == {second}
    point("b")
    add(tmp_path / "b", b"once more\n")
    await tail.look()
    assert list(tail.streams.values()) == [b"a\nagain\n", b"b\n", b"once more\n"]


# --- restarts -----------------------------------------------------------------------------


async def test_a_restart_goes_on_behind_the_token(follow: Follow, tmp_path: Path) -> None:
    """The stream keeps its identity although the file, and so its fingerprint, has grown."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\nhal")
    tokens = await (await follow(log)).stop()
    add(log, b"f\n" + numbered(0, 100))
    second = await follow(log, tokens)
    assert second.text == b"half\n" + numbered(0, 100)
    assert set(second.streams) == set(tokens)
    tokens = await second.stop()
    assert json.loads(next(iter(tokens.values())))["fingerprint_length"] == 1024
    third = await follow(log, tokens)
    assert third.chunks == []
    assert third.rotations == (0, 0, 0)


async def test_a_rename_during_a_stop_is_found_by_its_inode(follow: Follow, tmp_path: Path) -> None:
    """The renamed file is drained before its successors, those that came and went meanwhile too."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(log)).stop()
    add(log, b"two\nhalf")
    log.rename(tmp_path / "vllm.log-20261130")
    (tmp_path / "vllm.log-20261201").write_bytes(b"three\n")
    log.write_bytes(b"four\n")
    tail = await follow(log, tokens)
    assert tail.text == b"two\nthree\nfour\n"
    assert tail.rotations == (2, 0, 0)
    await tail.look(DRAINED)
    assert list(tail.streams.values()) == [b"two\nhalf", b"three\n", b"four\n"]
    assert next(iter(tail.streams)) in tokens
    assert tail.in_a_row
    assert len(tail.ended) == 2
    again = await follow(log, await tail.stop())
    await again.look(DRAINED)
    assert again.text == b""
    assert again.rotations == (0, 0, 0)


@pytest.mark.parametrize("pattern", ["vllm.log", "*.log", "**/vllm.log"])
async def test_a_rename_during_a_stop_without_a_successor(
    follow: Follow, tmp_path: Path, pattern: str
) -> None:
    """A log that was renamed is read to its end though nothing took its place, and so are those after it."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(tmp_path / pattern)).stop()
    add(log, b"two\n")
    log.rename(tmp_path / "vllm.log.2")
    (tmp_path / "vllm.log.1").write_bytes(b"three\n")
    tail = await follow(tmp_path / pattern, tokens)
    assert (tail.text, tail.rotations, tail.problem()) == (b"two\nthree\n", (1, 0, 0), None)
    log.write_bytes(b"four\n")
    await tail.look(RESCAN)
    assert (tail.text, tail.rotations) == (b"two\nthree\nfour\n", (2, 0, 0))
    assert tail.in_a_row


async def test_a_directory_that_never_rests(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rotated during a stop is found though the directory changes with every file that is opened."""
    log = tmp_path / "vllm.log"
    log.write_bytes(numbered(0, 1))
    tokens = await (await follow(log)).stop()
    for number in range(9):
        log.rename(tmp_path / f"vllm.log.{number}")
        log.write_bytes(numbered(number + 1, 1))
        os.utime(log, ns=(0, (tmp_path / f"vllm.log.{number}").stat().st_mtime_ns + 1000))

    def busy(path: str) -> Generation | None:
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other").rmdir()
        return open_generation(path)

    monkeypatch.setattr(files, "open_generation", busy)
    tail = await follow(log, tokens)
    assert tail.text == numbered(1, 9)
    assert tail.in_a_row


async def test_logs_of_another_source_are_left_alone(follow: Follow, tmp_path: Path) -> None:
    """A position of a path that is not asked for any more does not bring its file back."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(log)).stop()
    add(log, b"two\n")
    log.rename(tmp_path / "vllm.log.1")
    assert (await follow(tmp_path / "other.log", tokens)).chunks == []


async def test_a_source_that_is_written_another_way(follow: Follow, tmp_path: Path) -> None:
    """A path that becomes a glob, or the other way round, goes on where it was read to."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(log)).stop()
    add(log, b"two\n")
    tail = await follow(tmp_path / "*.log", tokens)
    assert (tail.text, set(tail.streams)) == (b"two\n", set(tokens))
    add(log, b"three\n")
    assert (await follow(log, await tail.stop())).text == b"three\n"


async def test_a_rename_during_a_stop_under_a_glob(follow: Follow, tmp_path: Path) -> None:
    """Where the pattern matches the renamed file too, it is the same stream all the same."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(tmp_path / "*.log*")).stop()
    add(log, b"two\n")
    log.rename(tmp_path / "vllm.log.2")
    (tmp_path / "vllm.log.1").write_bytes(b"three\n")
    log.write_bytes(b"four\n")
    tail = await follow(tmp_path / "*.log*", tokens)
    assert tail.text == b"two\nthree\nfour\n"
    assert next(iter(tail.streams)) in tokens
    assert tail.in_a_row
    assert tail.rotations[0] >= 1


async def test_a_mark_that_names_the_rotated_file(follow: Follow, tmp_path: Path) -> None:
    """Former versions took a rotated file that matches for a log of its own: it goes on, before its log."""
    log, old = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    old.write_bytes(b"one\n")
    tokens = await (await follow(old)).stop()
    assert str(old) in next(iter(tokens.values()))
    add(old, b"two\n")
    log.write_bytes(b"three\n")
    tail = await follow(tmp_path / "*.log*", tokens)
    assert tail.text == b"two\nthree\n"
    assert next(iter(tail.streams)) in tokens
    assert tail.in_a_row


async def test_a_kill_while_draining(follow: Follow, tmp_path: Path) -> None:
    """Killed between rename and end, the next start drains what came since and counts nothing again."""
    log, old = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    log.write_bytes(b"one\n")
    first = await follow(log)
    log.rename(old)
    log.write_bytes(b"two\n")
    await first.look()
    tokens = await first.stop()
    add(old, b"late\n")
    add(log, b"three\n")
    tail = await follow(log, tokens)
    assert tail.text == b"late\nthree\n"
    assert set(tail.streams) == set(tokens)
    assert tail.in_a_row
    assert tail.rotations == (0, 0, 0)


async def test_copytruncate_during_a_stop(follow: Follow, tmp_path: Path) -> None:
    """A file regrown past the position is another generation; the rest of the old one is in the copy."""
    for pattern in ("vllm.log", "vllm.log*"):
        log = tmp_path / "vllm.log"
        log.write_bytes(numbered(0, 100))
        tokens = await (await follow(tmp_path / pattern)).stop()
        add(log, numbered(100, 20))
        shutil.copyfile(log, tmp_path / "vllm.log.1")
        log.write_bytes(numbered(500, 300))
        tail = await follow(tmp_path / pattern, tokens)
        assert list(tail.streams.values()) == [numbered(100, 20), numbered(500, 300)]
        assert next(iter(tail.streams)) in tokens
        assert tail.in_a_row
        assert tail.rotations == (0, 1, 0)
        await tail.stop()
        (tmp_path / "vllm.log.1").unlink()


async def test_an_inode_that_is_used_again_is_another_stream(follow: Follow, tmp_path: Path) -> None:
    """Deleted and recreated during a stop: read from the beginning, whether or not the inode is the same."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tokens = await (await follow(log)).stop()
    inode = log.stat().st_ino
    log.unlink()
    log.write_bytes(b"another\n")
    tail = await follow(log, tokens)
    assert tail.text == b"another\n"
    assert set(tail.streams) != set(tokens)
    assert [chunk.follows for chunk in tail.chunks] == list(tokens)
    assert tail.rotations == ((0, 1, 0) if log.stat().st_ino == inode else (0, 0, 1))


async def test_finished_files_are_not_read_again(follow: Follow, tmp_path: Path) -> None:
    """A file whose stream has ended is left alone after a restart; what is added to it is a new stream."""
    log, old = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    log.write_bytes(b"one\n")
    first = await follow(tmp_path / "vllm.log*")
    log.rename(old)
    log.write_bytes(b"two\n")
    await first.look(RESCAN)
    await first.look(DRAINED)
    tokens = await first.stop()
    tail = await follow(tmp_path / "vllm.log*", tokens)
    assert tail.chunks == []
    add(old, b"late\n")
    await tail.look(RESCAN)
    assert tail.text == b"late\n"
    assert not set(tail.streams) & set(tokens)
    again = await follow(tmp_path / "vllm.log*", await tail.stop())
    assert again.chunks == []


@pytest.mark.parametrize("token", ["", "{}", "[]", "null", '{"offset": 8}', '{"offset": "x"}', "\x00"])
async def test_foreign_tokens_are_ignored(follow: Follow, tmp_path: Path, token: str) -> None:
    """A token of another kind of source, or a broken one, changes nothing."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tail = await follow(log, {"stdin-1": token})
    assert tail.text == b"one\n"


async def test_a_device_may_change_its_number(follow: Follow, tmp_path: Path) -> None:
    """After a reboot the same inode with the same content is the same stream."""
    log = tmp_path / "vllm.log"
    log.write_bytes(numbered(0, 100))
    tokens = await (await follow(log)).stop()
    (stream,) = tokens
    moved = json.dumps({**json.loads(tokens[stream]), "device": 1})
    add(log, b"next\n")
    tail = await follow(log, {stream: moved})
    assert tail.streams == {stream: b"next\n"}


# --- trouble ------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["vllm.log", "*.log"])
async def test_permission_denied_then_granted(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """A file that may not be read counts once, is said, and is read when it may."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    real, allowed = os.open, False

    def guarded(path: str, flags: int, *rest: int) -> int:
        if not allowed and str(path) == str(log):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", guarded)
    tail = await follow(tmp_path / pattern)
    for _ in range(5):
        await tail.look(RESCAN)
    assert tail.stats.read_errors == 1
    assert tail.problem() == f"{log}: permission denied; let the exporter's user or group read it"
    allowed = True
    await tail.look(RESCAN)
    assert (tail.text, tail.problem(), tail.stats.read_errors) == (b"one\n", None, 1)


async def test_a_directory_that_may_not_be_listed(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory without permission is said, counted once and read when it may."""
    pods = tmp_path / "pods"
    pods.mkdir()
    (pods / "a.log").write_bytes(b"one\n")
    real, allowed = os.scandir, False

    def guarded(path: str) -> object:
        if not allowed and path == str(pods):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", guarded)
    tail = await follow(pods / "*.log")
    await tail.look(RESCAN)
    assert tail.stats.read_errors == 1
    assert tail.problem() == f"{pods}: permission denied; let the exporter's user or group read it"
    allowed = True
    await tail.look(RESCAN)
    assert (tail.text, tail.problem()) == (b"one\n", None)


async def test_a_read_error_is_counted_once_and_reading_goes_on(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that can't be read for a while goes on as the same stream at the same place."""
    log = tmp_path / "vllm.log"
    log.write_bytes(b"one\n")
    tail = await follow(log)
    real, broken = os.pread, True

    def failing(fd: int, size: int, offset: int) -> bytes:
        if broken and size == BLOCK:
            raise OSError(5, "Input/output error")
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    add(log, b"two\n")
    for _ in range(5):
        await tail.look(RESCAN)
    assert tail.stats.read_errors == 1
    assert tail.problem() == f"{log}: Input/output error; it is tried again every 2 s"
    broken = False
    await tail.look(RESCAN)
    assert list(tail.streams.values()) == [b"one\ntwo\n"]
    assert (tail.problem(), tail.stats.read_errors, tail.rotations) == (None, 1, (0, 0, 0))


async def test_the_number_of_open_files_is_bounded(follow: Follow, tmp_path: Path) -> None:
    """Beyond the limit the file that has been quiet longest is closed, and opened again when it grows."""
    for number in range(12):
        (tmp_path / f"{number:02}.log").write_bytes(b"%d\n" % number)
    tail = await follow(tmp_path / "*.log", max_files=4)
    for _ in range(4):
        await tail.look(RESCAN)
    opened = [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]
    assert len(opened) == 4
    assert sorted(tail.streams.values()) == sorted(b"%d\n" % number for number in range(12))
    for number in range(12):
        add(tmp_path / f"{number:02}.log", b"more %d\n" % number)
    for _ in range(4):
        await tail.look(RESCAN)
    assert sorted(tail.streams.values()) == sorted(b"%d\nmore %d\n" % (n, n) for n in range(12))
    assert (tail.problem(), tail.rotations) == (None, (0, 0, 0))


async def test_everything_is_closed_at_the_end(follow: Follow, tmp_path: Path) -> None:
    """A source that was stopped leaves no file open."""
    (tmp_path / "a.log").write_bytes(b"one\n")
    tail = await follow(tmp_path / "*.log")
    await tail.stop()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]


# --- the hint -----------------------------------------------------------------------------


@pytest.fixture(params=[InotifyWatch, StepWatch])
def watch(request: pytest.FixtureRequest) -> type[InotifyWatch | StepWatch]:
    """Both ways to be told of changes."""
    if request.param is InotifyWatch and sys.platform != "linux":
        pytest.skip("inotify is part of Linux")
    kind: type[InotifyWatch | StepWatch] = request.param
    return kind


async def test_a_write_wakes(tmp_path: Path, watch: type[InotifyWatch | StepWatch]) -> None:
    """A write, a new file and a new directory to watch end a wait that would last for minutes."""
    watched = [str(tmp_path)]
    waker = DirectoryWaker(lambda: watched, watch)
    log = tmp_path / "vllm.log"
    try:
        async with asyncio.timeout(20):
            await waker.wait(600)  # the watch has begun
            log.write_bytes(b"one\n")
            await waker.wait(600)
            add(log, b"two\n")
            await waker.wait(600)
            (tmp_path / "deeper").mkdir()
            await waker.wait(600)
            watched.append(str(tmp_path / "deeper"))
            await waker.wait(600)
            (tmp_path / "deeper" / "vllm.log").write_bytes(b"one\n")
            await waker.wait(600)
    finally:
        waker.close()


async def test_without_a_hint_the_wait_is_short(
    tmp_path: Path, watch: type[InotifyWatch | StepWatch]
) -> None:
    """Where nothing can be watched, every wait still ends, soon and without an error."""
    waker = DirectoryWaker(lambda: [str(tmp_path / "missing")], watch)
    async with asyncio.timeout(20):
        for _ in range(3):
            await waker.wait(600)
    waker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is part of Linux")
async def test_a_directory_that_went_away_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its directory a waker looks often, and sees writes to the next one of that name."""
    monkeypatch.setattr(DirectoryWaker, "RETRY_SECONDS", 0.0)
    logs = tmp_path / "logs"
    logs.mkdir()
    waker = DirectoryWaker(lambda: [str(logs)])
    async with asyncio.timeout(20):
        await waker.wait(600)  # the watch has begun
        for gone in (logs.rmdir, lambda: logs.rename(tmp_path / "old")):
            gone()
            for _ in range(3):
                await waker.wait(600)
            logs.mkdir()
            await waker.wait(600)
            await waker.wait(1)
            (logs / "vllm.log").write_bytes(b"one\n")
            await waker.wait(600)
            (logs / "vllm.log").unlink()
    waker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is part of Linux")
async def test_a_busy_log_is_looked_at_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a log is written to, the next look waits for the pause; and nothing stays open."""
    monkeypatch.setattr(InotifyWatch, "PAUSE_SECONDS", 60.0)
    before = sorted(Path("/proc/self/fd").iterdir())
    woken: list[str] = []
    watching = InotifyWatch([str(tmp_path)], lambda: woken.append("change"), lambda: woken.append("lost"))
    for number in range(1, 101):
        (tmp_path / "vllm.log").write_bytes(b"x" * number)
        await asyncio.sleep(0)
    assert woken == ["change", "change"]  # what was before, and the first write
    watching.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


# --- under load ---------------------------------------------------------------------------

WRITER = r"""
import os, shutil, sys, time
kind, path, generations, lines = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
marks = sys.argv[5]

def shift():
    for number in range(8, 0, -1):
        if os.path.exists(f"{path}.{number}"):
            os.rename(f"{path}.{number}", f"{path}.{number + 1}")

if kind == "link":
    os.symlink(f"{path}.gen0", path)
file = open(path, "ab", buffering=0)
for generation in range(generations):
    while generation and not os.path.exists(f"{marks}/started"):
        time.sleep(0.001)  # what came and went before nobody missed
    while generation > 3 and not os.path.exists(f"{marks}/read{generation - 4}"):
        time.sleep(0.001)  # only so many generations are kept
    if generation:
        if kind == "rename":
            shift()
            os.rename(path, path + ".1")
            file = open(path, "ab", buffering=0)
        elif kind == "truncate":
            shift()
            shutil.copyfile(path, path + ".1")
            os.truncate(path, 0)
        elif kind == "delete":
            while not os.path.exists(f"{marks}/read{generation - 1}"):
                time.sleep(0.001)  # what is deleted unread is lost for everybody
            os.unlink(path)
            file = open(path, "ab", buffering=0)
        elif kind == "link":
            file = open(f"{path}.gen{generation}", "ab", buffering=0)
            os.symlink(f"{path}.gen{generation}", path + ".swap")
            while not os.path.exists(f"{marks}/read{generation - 1}"):
                time.sleep(0.001)
            os.rename(path + ".swap", path)
    for start in range(0, lines, 20):
        batch = b"".join(b"INFO 11-30 16:26:46 [core.py:58] generation %03d line %07d\n" % (generation, n)
                         for n in range(start, min(start + 20, lines)))
        cut = len(batch) // 3
        file.write(batch[:cut])  # readers see unfinished lines
        file.write(batch[cut:])
"""


@dataclass
class Load:
    """A process that writes and rotates, and the lines that were read of it."""

    path: Path
    kind: str
    generations: int
    lines: int
    got: dict[int, list[int]] = field(default_factory=dict)
    by_stream: dict[str, set[int]] = field(default_factory=dict)
    rest: dict[str, bytes] = field(default_factory=dict)

    async def start(self) -> asyncio.subprocess.Process:
        """Start to write."""
        self.path.parent.mkdir()
        arguments = (self.kind, str(self.path), str(self.generations), str(self.lines), str(self.marks))
        return await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, *arguments)

    def take(self, chunk: Chunk) -> None:
        """Count the lines of one chunk, and tell the writer how far reading got."""
        *whole, rest = (self.rest.pop(chunk.stream, b"") + chunk.data).split(b"\n")
        if rest:
            self.rest[chunk.stream] = rest
        for line in whole:
            words = line.split()
            assert len(words) == 8
            assert words[4] == b"generation"
            numbers = self.got.setdefault(int(words[5]), [])
            numbers.append(int(words[7]))
            self.by_stream.setdefault(chunk.stream, set()).add(int(words[5]))
            if len(numbers) == self.lines:
                (self.marks / f"read{int(words[5])}").touch()
        if self.got:
            (self.marks / "started").touch()

    @property
    def marks(self) -> Path:
        """Where reader and writer tell each other how far they are, away from the log."""
        return self.path.parent.parent

    @property
    def read(self) -> int:
        """Lines read so far."""
        return sum(len(numbers) for numbers in self.got.values())

    def check(self, name: str, record_property: Callable[[str, object], None]) -> None:
        """Every line was read once, in order, and no stream mixes generations."""
        written = self.generations * self.lines
        distinct = sum(len(set(numbers)) for numbers in self.got.values())
        record_property(
            "counts",
            f"{name}: {written} written, {self.read} read, {written - distinct} lost,"
            f" {self.read - distinct} doubled",
        )
        assert self.got == {generation: list(range(self.lines)) for generation in range(self.generations)}
        assert all(len(found) == 1 for found in self.by_stream.values())
        assert self.rest == {}


@pytest.mark.parametrize("kind", ["rename", "truncate", "delete", "link"])
async def test_every_line_exactly_once_under_load(
    tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """A process writes and rotates as fast as it can: no line is lost, doubled or out of order."""
    load = Load(tmp_path / "logs" / "vllm.log", kind, *((40, 50_000) if LONG else (8, 3000)))
    source = FileSource(str(load.path))
    writer = await load.start()
    chunks = source.chunks({})
    async with asyncio.timeout(600 if LONG else 30):
        while load.read < load.generations * load.lines:
            load.take(await anext(chunks))
        assert await writer.wait() == 0
    await chunks.aclose()  # type: ignore[attr-defined]
    load.check(kind, record_property)
    assert sum(source.stats.rotations.values()) == load.generations - 1


@pytest.mark.parametrize("pattern", ["vllm.log", "vllm.log*"])
@pytest.mark.parametrize("kind", ["rename", "truncate"])
async def test_kills_while_rotating(
    tmp_path: Path, kind: str, pattern: str, record_property: Callable[[str, object], None]
) -> None:
    """Killed at random, between a chunk and its commit too, the exporter loses and doubles nothing."""
    random = Random(1)  # noqa: S311 - the same kills in every run
    load = Load(tmp_path / "logs" / "vllm.log", kind, *((60, 20_000) if LONG else (15, 4000)))
    writer = await load.start()
    saved: dict[str, str] = {}
    kills = 0
    async with asyncio.timeout(600 if LONG else 30):
        while load.read < load.generations * load.lines:
            chunks = FileSource(str(load.path.parent / pattern)).chunks(dict(saved))
            for _ in range(random.randint(1, 3)):
                chunk = await anext(chunks)
                if random.random() < 0.2:
                    break  # given out but not committed
                load.take(chunk)
                saved[chunk.stream] = chunk.token
                if load.read == load.generations * load.lines:
                    break
            await chunks.aclose()  # type: ignore[attr-defined]
            kills += 1
        assert await writer.wait() == 0
    load.check(f"{kind}, {pattern}, {kills} kills", record_property)


class TestOrder:
    """Generations of one log are read one after the other, however fast they come."""

    @staticmethod
    def opened(path: Path, content: bytes) -> Generation:
        """A new file with that content."""
        path.write_bytes(content)
        one = open_generation(str(path))
        assert one is not None
        return one

    @pytest.mark.parametrize("later", [b"", b"second\n"], ids=["nothing", "something"])
    async def test_one_that_waits_is_waited_for(self, later: bytes, tmp_path: Path) -> None:
        """A file that was empty when it was opened, and rotated away while an older one was still read."""
        first, second, third = (
            self.opened(tmp_path / name, content)
            for name, content in (("x.log.2", b"first\n"), ("x.log.1", b""), ("x.log", b"third\n"))
        )
        second.succeed(first)
        (tmp_path / "x.log.1").write_bytes(later)
        third.succeed(second)
        order: list[bytes] = []
        for _ in range(3):
            # the newest is asked first
            order += [one.read() for one in (third, second, first) if not one.waits() and one.look()]
        assert order == [one for one in (b"first\n", later, b"third\n") if one]
        for one in (first, second, third):
            one.close()
