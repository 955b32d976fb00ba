"""A tree as a kubelet keeps it, ``/var/log/pods``: containers that write, restart, are rotated and deleted.

    <namespace>_<pod>_<uid>/<container>/<run>.log      rotated: 0.log.20261130-162646, then with .gz

What was written of a container is kept beside, so that a test can compare it with what was counted.
"""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

from fault import Counts, counts_of

_TIME = re.compile(rb"\b(\d\d)-(\d\d) (\d\d:\d\d:\d\d)")
_PIECE = 16 << 10  # where the runtime cuts a line


class PodLog:
    """One container of one pod; a pod that is created again under its name has another uid."""

    def __init__(self, root: Path, namespace: str, pod: str, container: str = "vllm") -> None:
        self.root, self.namespace, self.pod, self.container = root, namespace, pod, container
        self.uid = 0
        self.run = 0
        self.text = bytearray()
        """Everything that was written, wrapped as it stands in the files."""
        self._clock = b"09-01T00:00:00"
        self._ticks = self._rotations = 0
        self.folder.mkdir(parents=True)

    @property
    def name(self) -> str:
        """As its target is called."""
        return f"{self.namespace}/{self.pod}/{self.container}"

    @property
    def folder(self) -> Path:
        """Of its logs."""
        pod = f"{self.namespace}_{self.pod}_00000000-0000-4000-8000-{self.uid:012d}"
        return self.root / pod / self.container

    @property
    def path(self) -> Path:
        """What is written now."""
        return self.folder / f"{self.run}.log"

    @property
    def counts(self) -> Counts:
        """What the offline analysis finds in all of it."""
        return counts_of(bytes(self.text))

    def write(self, text: bytes) -> None:
        """Append lines, each behind the time of vLLM's own clock, as a runtime would have stamped it."""
        wrapped = b"".join(self._wrapped(line) for line in text.splitlines())
        with self.path.open("ab") as out:
            out.write(wrapped)
        self.text += wrapped

    def _wrapped(self, line: bytes) -> bytes:
        if (found := _TIME.search(line)) is not None:
            self._clock = b"%b-%bT%b" % found.groups()
        self._ticks += 1
        head = b"2026-%b.%09dZ stderr " % (self._clock, self._ticks)
        cut = [line[at : at + _PIECE] for at in range(0, len(line), _PIECE)] or [b""]
        return b"".join(head + b"P " + one + b"\n" for one in cut[:-1]) + head + b"F " + cut[-1] + b"\n"

    def restart(self) -> None:
        """The container ended and runs again: a new file. Of the runs before the kubelet keeps one."""
        self.run += 1
        for old in self.folder.glob(f"{self.run - 2}.log*"):
            old.unlink()
        self.path.touch()

    def rotate(self) -> Path:
        """The log is too large: renamed, and begun anew. A kubelet packs it at the next rotation."""
        self._rotations += 1
        aside = self.path.with_name(f"{self.path.name}.20261130-{self._rotations:06d}")
        self.path.rename(aside)
        self.path.touch()
        return aside

    def pack(self, old: Path) -> None:
        """Compress a rotated log, by way of another file as the kubelet does."""
        beside = old.with_name(f"{old.name}.tmp")
        beside.write_bytes(gzip.compress(old.read_bytes(), 1))
        beside.rename(old.with_name(f"{old.name}.gz"))
        old.unlink()

    def delete(self) -> None:
        """The pod is gone, and its logs with it."""
        shutil.rmtree(self.folder.parent)

    def recreate(self) -> None:
        """A pod of the same name takes its place."""
        self.uid += 1
        self.run = 0
        self.folder.mkdir(parents=True)
        self.path.touch()
