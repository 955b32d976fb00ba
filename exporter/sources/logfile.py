"""Whole log files, read once from beginning to end, as ``analyze`` does it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from .scan import BLOCK

STDIN = "-"
_GZIP = 31  # zlib: a gzip header, and the largest window


class InputError(Exception):
    """An input could not be read, or not to its end. Its text names the input and what to do."""


def latest_time(source: str) -> datetime:
    """The time the log can't be younger than: when the file was last written, or now."""
    if source != STDIN:
        try:
            return datetime.fromtimestamp(Path(source).stat().st_mtime)
        except OSError:
            pass
    return datetime.now()


def size_of(source: str) -> int | None:
    """Bytes on disk, for a progress bar; None where that can't be known."""
    try:
        return None if source == STDIN else Path(source).stat().st_size
    except OSError:
        return None


def blocks(source: str, progress: Callable[[int], None] = lambda _: None) -> Iterator[bytes]:
    """The bytes of ``source`` (a path, ``.gz`` unpacked, or ``-``) in blocks.

    ``progress`` is told how many bytes were read from disk. Raises ``InputError``; what could
    be read before has been given out by then.
    """
    try:
        if source == STDIN:
            yield from _plain(sys.stdin.buffer, progress)
            return
        with Path(source).open("rb") as file:
            # a pipe can't be read twice: analyze <(kubectl logs …)
            if file.peek(2)[:2] == b"\x1f\x8b":
                yield from _unpacked(file, source, progress)
            else:
                yield from _plain(file, progress)
    except FileNotFoundError:
        raise InputError(f"{source}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{source}: is a directory; name the log files in it") from None
    except PermissionError:
        raise InputError(f"{source}: permission denied; run as a user who may read it") from None
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}; the rest was not read") from None


def _plain(file: BinaryIO, progress: Callable[[int], None]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        progress(len(block))
        yield block


def _unpacked(file: BinaryIO, source: str, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Unpack what can be unpacked, in blocks: a small file may hold gigabytes."""
    engine = zlib.decompressobj(_GZIP)
    while packed := file.read(BLOCK // 4):
        progress(len(packed))
        while packed:
            try:
                block = engine.decompress(packed, BLOCK)
            except zlib.error:
                raise InputError(
                    f"{source}: the gzip data is damaged; what came before was analysed"
                ) from None
            if block:
                yield block
            packed = engine.unconsumed_tail
            if engine.eof and (packed := engine.unused_data.lstrip(b"\0")):
                engine = zlib.decompressobj(_GZIP)  # files put together with cat
    if not engine.eof:
        raise InputError(f"{source}: the gzip data ends too early; what came before was analysed")
