"""Which servers of a node are targets: they come with their pods, and go some time after them.

A pod that is deleted takes its log with it, but not what was counted: Prometheus has to see the
last increments, and a pod that is created again under its name goes on with its counters. So a
target stays for a quarter of an hour after its directory is gone. What is saved of it stays longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from .. import logs
from ..config import TargetConfig
from ..sources.files import FileSource
from ..sources.matching import Found
from .tree import Name, Tree
from .wakeups import Wakeup, Wakeups

LIMIT = 128
"""Targets at a time. A node has some eight devices; beyond this something else is wrong."""

GRACE = 900.0
"""Seconds that a target outlives its pod."""

SCAN_SECONDS = 2.0
_BEHIND_SECONDS = 0.02  # while a scan has left something to read

log = structlog.get_logger(__name__)


class Changes(NamedTuple):
    """Targets that are new, and names of those that are over."""

    appeared: list[TargetConfig]
    ended: list[str]


class NodeAgent:
    """Finds the targets in ``root``. ``clock`` gives seconds that only grow.

    ``saved`` maps the names of targets that a former process knew to the seconds since it last read
    something of them: they are vLLM without being asked, and those that are gone get their grace.
    """

    def __init__(
        self,
        root: Path,
        patterns: Iterable[str] = (),
        saved: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        limit: int = LIMIT,
    ) -> None:
        saved = {} if saved is None else saved
        self.tree = Tree(str(root.absolute()), patterns, saved)
        self.changed = asyncio.Event()
        """A target is new, or its pod is gone or there again; whoever waits for it clears it."""
        self.looked = False
        """Whether it is known which servers there are."""
        self._root = root
        self._clock = clock
        self._limit = limit
        self._wakeups = Wakeups()
        self._wakeup: dict[str, Wakeup] = {}
        self._gone: dict[Name, float] = {}  # targets whose pod is gone, since when
        self._targets: set[Name] = set()
        self._recent = [
            (name, age)
            for text, age in saved.items()
            if age < GRACE and (name := Name.parse(text)) is not None
        ]
        self.left_out = 0
        """Containers that are vLLM, and one too many."""

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return _BEHIND_SECONDS if self.tree.behind else SCAN_SECONDS

    @property
    def counts(self) -> dict[str, int]:
        """Containers of the node, by what is known of them."""
        known = {one: self.tree.counts[one] for one in ("vllm", "other", "undecided", "unreadable")}
        return {**known, "vllm": known["vllm"] - self.left_out, "left_out": self.left_out}

    def is_gone(self, target: str) -> bool:
        """Whether the pod of a target is gone."""
        return Name.parse(target) in self._gone

    async def look(self) -> Changes:
        """What has changed since the last look."""
        await asyncio.to_thread(self.tree.scan)
        now, there = self._clock(), self.tree.followed
        appeared: list[TargetConfig] = []
        while self._recent:  # at the first look only
            name, age = self._recent.pop()
            if name not in there and len(self._targets) < self._limit:
                self._gone[name] = now - age
                appeared.append(self._begin(name))
        gone = set(self._gone)
        for name in self._targets:
            if name in there:
                self._gone.pop(name, None)
            else:
                self._gone.setdefault(name, now)
        if gone != set(self._gone):
            self.changed.set()
        ended = [name for name, since in self._gone.items() if now - since >= GRACE]
        new = [name for name in there if name not in self._targets]
        # what is gone longest makes room for what is there
        room = self._limit - len(self._targets) + len(ended)
        waiting = sorted((one for one in self._gone if one not in ended), key=lambda one: self._gone[one])
        ended += waiting[: max(len(new) - room, 0)]
        for name in ended:
            self._end(name)
        appeared += [self._begin(name) for name in new[: self._limit - len(self._targets)]]
        self.left_out = sum(name not in self._targets for name in there)
        self.looked = self.looked or not self.tree.behind
        self._say()
        return Changes(appeared, [str(name) for name in ended])

    def source(self, target: TargetConfig) -> FileSource:
        """The log of a target."""
        name = Name.parse(target.name)
        assert name is not None
        if (former := self._wakeup.get(target.name)) is not None:  # of before a reload
            former.close()
        wakeup = self._wakeup[target.name] = Wakeup(self._wakeups)
        self.changed.set()

        def find(_: str) -> Found:
            found = self.tree.find(name)
            wakeup.directories = tuple(found.directories)
            return found

        return FileSource(target.log[0], waker=wakeup, find=find, name=str(self._root), history=True)

    def close(self) -> None:
        """Stop watching."""
        self._wakeups.close()

    def _begin(self, name: Name) -> TargetConfig:
        self._targets.add(name)
        pattern = f"{self.tree.root}/{name.namespace}_{name.pod}_*/{name.container}/*.log"
        return TargetConfig(str(name), (pattern,), "", name._asdict())

    def _end(self, name: Name) -> None:
        self._targets.discard(name)
        self._gone.pop(name, None)
        if (wakeup := self._wakeup.pop(str(name), None)) is not None:
            wakeup.close()

    def _say(self) -> None:
        if (problem := self.tree.problem) is not None:
            logs.once(log, ("node",), "some logs of the node can't be read", problem=problem)
        else:
            logs.clear(log, ("node",), "all logs of the node can be read")
        if self.left_out:
            logs.once(
                log, ("node", "limit"), "more vLLM containers than are followed",
                followed=self._limit, left_out=self.left_out,
                problem="narrow them with --node.match, or add sidecars",
            )  # fmt: skip
        else:
            logs.clear(log, ("node", "limit"), "all vLLM containers are followed")
