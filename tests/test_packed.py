"""Logs that were rotated and packed while nobody looked."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from test_files import RESCAN, Follow, follow

from exporter.sources.files import DAMAGE_SECONDS
from exporter.sources.framing import MAX_LINE
from exporter.sources.matching import Found, expand

__all__ = ["follow"]  # a fixture
pytestmark = pytest.mark.asyncio


def lines(first: int, count: int) -> bytes:
    """Numbered lines."""
    return b"".join(b"line %d of the log\n" % number for number in range(first, first + count))


def append(path: Path, text: bytes) -> None:
    """Write more."""
    with path.open("ab") as out:
        out.write(text)


def pack(path: Path, packed: Path, modified: int | None = None) -> None:
    """Compress a file as gzip does; ``modified`` in ns, else as it was."""
    when = path.stat().st_mtime_ns if modified is None else modified
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    os.utime(packed, ns=(when, when))
    path.unlink()


# by whom it is packed: what it is called first, and then
NAMES = [
    ("0.log.20261130-162646", "0.log.20261130-162646.gz"),
    ("0.log.1", "0.log.1.gz"),
    ("0.log-20261130", "0.log-20261130.gz"),
]


class TestPacked:
    """What was written after the last look is in a packed file."""

    @pytest.mark.parametrize(("aside", "packed"), NAMES)
    async def test_the_rest_is_read(self, aside: str, packed: str, tmp_path: Path, follow: Follow) -> None:
        """From where it was left, before what came after it, as one text; and at no later start again."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 100) + b"half of a")
        one = await follow(path)
        saved = await one.stop()
        append(path, b" line\n" + lines(100, 50))
        path.rename(tmp_path / aside)
        pack(tmp_path / aside, tmp_path / packed)
        path.write_bytes(lines(150, 10))
        two = await follow(path, saved)
        assert two.text == b"half of a line\n" + lines(100, 60)
        (first, second) = two.streams
        assert first in saved
        assert two.ended == {first}
        assert {chunk.follows for chunk in two.chunks if chunk.stream == second} == {first}
        assert two.rotations == (1, 0, 0)
        assert (two.stats.read_errors, two.problem()) == (0, None)
        saved = await two.stop()
        append(path, lines(160, 1))
        assert (await follow(path, saved)).text == lines(160, 1)

    async def test_in_the_middle(self, tmp_path: Path, follow: Follow) -> None:
        """A start that ended while it was read goes on there, at each of its chunks."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 100))
        saved = await (await follow(path)).stop()
        rest = lines(100, 40_000)  # several blocks
        append(path, rest)
        path.rename(tmp_path / "0.log.1")
        pack(tmp_path / "0.log.1", tmp_path / "0.log.1.gz")
        path.write_bytes(lines(40_100, 5))
        whole = await follow(path, saved)
        assert whole.text == rest + lines(40_100, 5)
        inside = [chunk for chunk in whole.chunks if chunk.stream in saved]
        assert len(inside) > 2
        done = 0
        for chunk in inside[:-1]:
            done += len(chunk.data)
            again = await follow(path, {**saved, chunk.stream: chunk.token})
            assert again.text == (rest + lines(40_100, 5))[done:]

    async def test_one_between(self, tmp_path: Path, follow: Follow) -> None:
        """A kubelet packs one log when it rotates the next away, which is then older than the packed file."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 10))
        saved = await (await follow(path)).stop()
        append(path, lines(10, 10))
        path.rename(tmp_path / "0.log.20261130-000001")
        path.write_bytes(lines(20, 10))
        path.rename(tmp_path / "0.log.20261130-000002")
        pack(
            tmp_path / "0.log.20261130-000001", tmp_path / "0.log.20261130-000001.gz",
            (tmp_path / "0.log.20261130-000002").stat().st_mtime_ns + 10**9,
        )  # fmt: skip
        path.write_bytes(lines(30, 10))
        two = await follow(path, saved)
        assert two.text == lines(10, 30)
        assert two.in_a_row

    async def test_nothing_in_its_place(self, tmp_path: Path, follow: Follow) -> None:
        """The new file is there later."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 10))
        saved = await (await follow(path)).stop()
        append(path, lines(10, 10))
        pack(path, tmp_path / "0.log.1.gz")
        two = await follow(path, saved)
        assert two.text == lines(10, 10)
        path.write_bytes(lines(20, 10))
        await two.look(RESCAN)
        assert two.text == lines(10, 20)

    async def test_nothing_new_in_it(self, tmp_path: Path, follow: Follow) -> None:
        """What was read to its end gives nothing more, and what comes after it follows it."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 10))
        saved = await (await follow(path)).stop()
        pack(path, tmp_path / "0.log.1.gz")
        path.write_bytes(lines(10, 10))
        two = await follow(path, saved)
        assert two.text == lines(10, 10)
        assert two.ended == set(saved)

    async def test_before_its_first_line_was_read(self, tmp_path: Path, follow: Follow) -> None:
        """A position at the beginning is known by what comes after it."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 200))
        one = await follow(path)
        begin = {chunk.stream: chunk.begin for chunk in one.chunks if chunk.begin}
        await one.stop()
        pack(path, tmp_path / "0.log.1.gz")
        path.write_bytes(lines(200, 10))
        assert (await follow(path, begin)).text == lines(0, 210)

    async def test_others_are_left_alone(self, tmp_path: Path, follow: Follow) -> None:
        """A packed log that begins with something else, differs in front of the position, or is older."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 200))
        saved = await (await follow(path)).stop()
        written = path.stat().st_mtime_ns
        path.unlink()
        other = tmp_path / "other"
        for name, text in (
            ("0.log.1.gz", lines(1, 400)),
            ("0.log.2.gz", lines(0, 199) + b"line 2OO of the log\n" + lines(200, 10)),
            ("0.log.3.gz", lines(0, 100)),
            ("0.log.6.gz", b"LINE" + lines(0, 300)[4:]),
            ("0.log.4.gz", b""),
            ("1.log.1.gz", lines(0, 300)),
        ):
            other.write_bytes(text)
            pack(other, tmp_path / name, written + 10**9)
        other.write_bytes(lines(0, 300))
        pack(other, tmp_path / "0.log.5.gz", written - 10**9)
        path.write_bytes(lines(900, 10))
        two = await follow(path, saved)
        assert two.text == lines(900, 10)
        assert two.stats.read_errors == 0

    @pytest.mark.parametrize("how", ["cut", "damaged"])
    async def test_damage(self, how: str, tmp_path: Path, follow: Follow) -> None:
        """What can be unpacked is read, it is said and counted, and what comes after it is read as well."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 100))
        saved = await (await follow(path)).stop()
        append(path, os.urandom(400_000).hex().encode() + b"\n" + lines(100, 100))
        packed = tmp_path / "0.log.1.gz"
        pack(path, packed)
        data, modified = packed.read_bytes(), packed.stat().st_mtime_ns
        at = len(data) - 200
        packed.write_bytes(data[:at] if how == "cut" else data[:at] + b"\xff" * 100 + data[at + 100 :])
        os.utime(packed, ns=(modified, modified))
        path.write_bytes(lines(200, 10))
        two = await follow(path, saved)
        assert two.text.endswith(lines(200, 10))
        assert len(two.text) > 700_000
        assert two.stats.read_errors == 1
        problem = two.problem()
        assert problem is not None
        assert problem.startswith(f"{packed}: the gzip data ")
        assert problem.endswith("what came before was analysed")
        await two.look(DAMAGE_SECONDS)
        assert (two.stats.read_errors, two.problem()) == (1, None)

    async def test_a_line_without_an_end(self, tmp_path: Path, follow: Follow) -> None:
        """It is cut like anywhere else, so that little of a packed log is in memory."""
        path = tmp_path / "0.log"
        path.write_bytes(lines(0, 100))
        saved = await (await follow(path)).stop()
        append(path, b"x" * (3 * MAX_LINE) + b"\n")
        pack(path, tmp_path / "0.log.1.gz")
        path.touch()
        two = await follow(path, saved)
        assert two.text == b"x" * (3 * MAX_LINE) + b"\n"
        assert max(len(chunk.data) for chunk in two.chunks) <= MAX_LINE + 1

    async def test_under_a_link(self, tmp_path: Path, follow: Follow) -> None:
        """A runtime keeps and packs the file elsewhere."""
        real, path = tmp_path / "docker" / "json.log", tmp_path / "pods" / "0.log"
        real.parent.mkdir()
        path.parent.mkdir()
        path.symlink_to(real)
        real.write_bytes(lines(0, 10))
        saved = await (await follow(path)).stop()
        append(real, lines(10, 10))
        pack(real, real.with_name("json.log.1.gz"))
        real.write_bytes(lines(20, 10))
        assert (await follow(path, saved)).text == lines(10, 20)


async def test_the_tree_is_not_walked_for_it(tmp_path: Path) -> None:
    """A packed log is found beside the one it was, not by the pattern."""
    (tmp_path / "0.log.1.gz").write_bytes(b"")
    found: Found = expand(str(tmp_path / "*.log*"))
    assert found.files == {}
