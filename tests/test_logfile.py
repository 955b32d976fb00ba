from __future__ import annotations

import gzip
import hashlib
import io
import os
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from exporter.sources.logfile import InputError, blocks, latest_time, size_of
from exporter.sources.scan import BLOCK

TEXT = b"".join(b"INFO 11-02 10:00:%02d [core.py:%d] step\n" % (n % 60, n) for n in range(30_000))


class _Stdin:
    """Stands in for ``sys.stdin``."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Writes a file and returns its path."""

    def writer(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return writer


def test_a_plain_file_comes_in_blocks(write: Callable[[str, bytes], str]) -> None:
    """A file is read to its end in blocks of one size, and progress adds up to its bytes."""
    seen: list[int] = []
    out = list(blocks(write("a.log", TEXT), seen.append))
    assert b"".join(out) == TEXT
    assert {len(block) for block in out[:-1]} == {BLOCK}
    assert sum(seen) == len(TEXT)


def test_an_empty_file_has_no_block(write: Callable[[str, bytes], str]) -> None:
    """An empty file is no problem and gives nothing."""
    assert list(blocks(write("empty.log", b""))) == []


def test_one_byte_is_read(write: Callable[[str, bytes], str]) -> None:
    """A file shorter than the magic number of gzip is read as it is."""
    assert list(blocks(write("a.log", b"\x1f"))) == [b"\x1f"]


@pytest.mark.parametrize("name", ["a.log.gz", "a.log.1"], ids=["named-gz", "named-otherwise"])
def test_gzip_is_unpacked_by_its_content(write: Callable[[str, bytes], str], name: str) -> None:
    """What is packed is unpacked, whatever its name; progress counts bytes on disk."""
    data = gzip.compress(TEXT)
    seen: list[int] = []
    assert b"".join(blocks(write(name, data), seen.append)) == TEXT
    assert sum(seen) == len(data)


def test_gzip_members_follow_one_another(write: Callable[[str, bytes], str]) -> None:
    """Packed files put behind one another are one log."""
    packed = gzip.compress(b"first\n") + gzip.compress(b"second\n")
    assert b"".join(blocks(write("a.gz", packed))) == b"first\nsecond\n"


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _damaged(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\xff" * 64 + data[len(data) // 2 + 64 :]


def _trailed(data: bytes) -> bytes:
    return data + b"not gzip"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_cut, "ends too early"), (_damaged, "is damaged"), (_trailed, "is damaged")],
    ids=["cut", "damaged", "rubbish-behind"],
)
def test_spoilt_gzip_gives_what_came_before(
    write: Callable[[str, bytes], str], spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """What could be unpacked is given out, then one line names the file and the reason."""
    text = b"".join(hashlib.sha256(b"%d" % n).hexdigest().encode() for n in range(65_536))
    path = write("a.gz", spoil(gzip.compress(text)))
    got = []
    with pytest.raises(InputError) as problem:  # noqa: PT012
        for block in blocks(path):
            got.append(block)  # noqa: PERF402
    assert str(problem.value) == f"{path}: the gzip data {reason}; what came before was analysed"
    before = b"".join(got)
    assert len(before) >= 1 << 20
    assert before[: 1 << 20] == text[: 1 << 20]


def test_a_missing_file(tmp_path: Path) -> None:
    """A missing file is named with what to do."""
    path = str(tmp_path / "none.log")
    with pytest.raises(InputError) as problem:
        list(blocks(path))
    assert str(problem.value) == f"{path}: no such file; check the path"


def test_a_directory(tmp_path: Path) -> None:
    """A directory is named with what to do."""
    with pytest.raises(InputError) as problem:
        list(blocks(str(tmp_path)))
    assert str(problem.value) == f"{tmp_path}: is a directory; name the log files in it"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(13, "Permission denied"), "permission denied; run as a user who may read it"),
        (OSError(5, "Input/output error"), "Input/output error; the rest was not read"),
    ],
    ids=["permission", "device"],
)
def test_a_file_that_cannot_be_read(
    write: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch, error: OSError, text: str
) -> None:
    """Whatever the system answers becomes one line that names the file."""
    path = write("a.log", b"x\n")

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError) as problem:
        list(blocks(path))
    assert str(problem.value) == f"{path}: {text}"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """``-`` reads standard input to its end and tells the progress."""
    monkeypatch.setattr("sys.stdin", _Stdin(TEXT))
    seen: list[int] = []
    assert b"".join(blocks("-", seen.append)) == TEXT
    assert sum(seen) == len(TEXT)


def test_the_log_is_not_younger_than_its_last_change(write: Callable[[str, bytes], str]) -> None:
    """The bound of a log's year is when the file was last written."""
    path = write("a.log", b"x\n")
    written = datetime(2023, 5, 6, 7, 8, 9)
    os.utime(path, (written.timestamp(), written.timestamp()))
    assert latest_time(path) == written


@pytest.mark.parametrize("source", ["-", "/nonexistent/a.log"], ids=["stdin", "missing"])
def test_without_a_file_the_bound_is_now(source: str) -> None:
    """Standard input and a missing file are bounded by the present."""
    before = datetime.now()
    assert before <= latest_time(source) <= datetime.now()


def test_sizes(write: Callable[[str, bytes], str]) -> None:
    """The size is that on disk; of standard input and a missing file none is known."""
    assert size_of(write("a.log", b"12345")) == 5
    assert size_of("-") is None
    assert size_of("/nonexistent/a.log") is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_without_going_back(tmp_path: Path, packed: bool) -> None:
    """``analyze <(kubectl logs …)``: the first bytes tell gzip, and can't be read again."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = b"INFO 11-30 16:26:46 [core.py:1] one\n" * 9
    writer = threading.Thread(
        target=path.write_bytes, args=(gzip.compress(data) if packed else data,), daemon=True
    )
    writer.start()
    assert b"".join(blocks(str(path))) == data
    writer.join(10)
