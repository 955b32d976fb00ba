"""One exporter to a state directory: two would count the same lines, and save over each other."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FILE = "lock"


class InUseError(Exception):
    """Another exporter has the directory; the message names it and is for the user."""


def take(folder: Path) -> int | None:
    """The lock of ``folder``, as a file descriptor that holds it until it is closed or the process ends.

    None where there can't be one: the folder can't be written, or its file system has no locks. Raises
    ``InUseError``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InUseError(
            f"--state-dir {folder}: another vllm-oom-exporter uses it; stop that one, or give each a directory"
        ) from None
    except OSError:
        os.close(fd)
        return None
    return fd
