"""A progress bar for long input, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_IT = 32 << 20  # bytes; anything smaller is done before a bar can be read


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A function to tell how many bytes were read. ``total`` is None where it can't be known."""
    if not sys.stderr.isatty() or (total is not None and total < _WORTH_IT):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        "reading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)
