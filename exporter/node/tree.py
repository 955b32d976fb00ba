"""The logs that a kubelet keeps, ``/var/log/pods``: which containers there are, and which are vLLM.

    <namespace>_<pod>_<uid>/<container>/<run>.log      rotated: 0.log.20261130-162646, later with .gz

A node runs hundreds of containers that are none of ours. What a container is, is asked of the first
bytes of its log, once; after that it costs one look at the time of its directory. A log that was
rotated is asked again: what is a server may have been quiet when it began.
"""

# Paths are compared as text and looked at by the hundred, so they stay strings here.
# ruff: noqa: PTH115, PTH116, PTH118, PTH120

from __future__ import annotations

import errno
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..sources.matching import Found
from ..vllm.recognise import is_vllm

HEAD = 256 << 10
"""Bytes of one log file in which a server must have said that it is vLLM."""

PIECE = 64 << 10  # of them are read at a time, so that one container does not keep the others waiting
BUDGET = 16 << 20  # bytes that one scan reads
_MAX_PODS = 4096
_MAX_FILES = 64  # of one container that are asked
_RACY = 20_000_000  # ns; a directory may change again within one tick of its time stamp

# RFC 1123 has no underscore, so the three parts can't be mistaken. A static pod has a hash as its uid.
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_POD = re.compile(rf"({_LABEL})_((?=[^_]{{1,253}}_){_LABEL}(?:\.{_LABEL})*)_([A-Za-z0-9-]{{1,64}})")
_CONTAINER = re.compile(_LABEL)
_RUN = re.compile(r"\d{1,9}\.log")
# 0.log   0.log.20261130-162646   but not what is being packed: 0.log.20261130-162646.tmp
_LOG = re.compile(r"\d{1,9}\.log(?:\.\d{8}-\d{6})?")


class Name(NamedTuple):
    """A container of the cluster. A pod that is created again under its name is the same one."""

    namespace: str
    pod: str
    container: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that was written so, or None."""
        parts = text.split("/")
        if (
            len(parts) != 3
            or not _POD.fullmatch(f"{parts[0]}_{parts[1]}_0")
            or not _CONTAINER.fullmatch(parts[2])
        ):
            return None
        return cls(*parts)


@dataclass(slots=True)
class _Log:
    """One file that is asked: what was read of it, and its size when that was."""

    path: str
    read: int = 0
    size: int = 0


@dataclass(slots=True)
class _Container:
    """The directory of one container of one pod. ``vllm`` is None until it has said what it is."""

    path: str
    name: Name
    vllm: bool | None = None
    modified: int = -1
    logs: dict[tuple[int, int], _Log] = field(default_factory=dict)  # by device and inode


@dataclass(slots=True)
class _Pod:
    path: str
    namespace: str
    name: str
    modified: int = -1
    containers: dict[str, _Container] = field(default_factory=dict)


class Tree:
    """The tree at ``root``, as the last ``scan`` found it.

    ``patterns`` name the containers to follow (``prod/llama-*/vllm``); without them their logs
    decide. ``known``: names of containers that are vLLM, as was found out before.
    """

    def __init__(self, root: str, patterns: Iterable[str] = (), known: Iterable[str] = ()) -> None:
        self.root = root
        self.followed: dict[Name, tuple[str, ...]] = {}
        """Directories of the containers to follow; several while a pod is replaced by one of its name."""
        self.counts: Counter[str] = Counter()
        """Containers by what is known of them: vllm, other, undecided, unreadable."""
        self.problem: str | None = None
        self.behind = False
        """Whether there was more to read than one scan may."""
        self._patterns = [one.split("/") for one in patterns]
        self._known = set(known)
        self._pods: dict[str, _Pod] = {}
        self._modified = -1
        self._problems: list[str] = []
        self._left = 0

    def scan(self) -> None:
        """Look at everything that changed; blocks, but reads no more than ``BUDGET`` bytes."""
        self._problems, self._left = [], BUDGET
        self._list_root()
        followed: dict[Name, tuple[str, ...]] = {}
        counts: Counter[str] = Counter()
        for pod in self._pods.values():
            self._list_pod(pod)
            for one in pod.containers.values():
                problems = len(self._problems)
                if not one.vllm:
                    self._decide(one)
                if one.vllm:
                    followed[one.name] = (*followed.get(one.name, ()), one.path)
                    counts["vllm"] += 1
                elif len(self._problems) > problems:
                    counts["unreadable"] += 1
                else:
                    counts["undecided" if one.vllm is None else "other"] += 1
        self.followed, self.counts, self.behind = followed, counts, self._left <= 0
        others = len(self._problems) - 1
        more = f" (and {others} more)" if others > 0 else ""
        self.problem = self._problems[0] + more if self._problems else None

    def find(self, name: Name) -> Found:
        """The log of each run of a container. What was rotated is known by what it was before."""
        found = Found()
        for directory in self.followed.get(name, ()):
            for entry in found.list(directory):
                if _RUN.fullmatch(entry.name):
                    found.add_file(entry.path)
        return found

    # --- which containers there are

    def _list_root(self) -> None:
        changed = self._changed(self.root, self._modified)
        if changed is None:
            return
        pods: dict[str, _Pod] = {}
        for name in self._directories(self.root):
            match = _POD.fullmatch(name)
            if match is not None and len(pods) < _MAX_PODS:
                pods[name] = self._pods.get(name) or _Pod(os.path.join(self.root, name), match[1], match[2])
        self._pods, self._modified = pods, changed

    def _list_pod(self, pod: _Pod) -> None:
        changed = self._changed(pod.path, pod.modified)
        if changed is None:
            return
        containers = {}
        for name in self._directories(pod.path):
            if _CONTAINER.fullmatch(name):
                path, whole = os.path.join(pod.path, name), Name(pod.namespace, pod.name, name)
                containers[name] = pod.containers.get(name) or _Container(path, whole, self._chosen(whole))
        pod.containers, pod.modified = containers, changed

    def _chosen(self, name: Name) -> bool | None:
        """What is known of a container before its log is asked."""
        if self._patterns:
            return any(all(map(fnmatchcase, name, pattern)) for pattern in self._patterns)
        return True if str(name) in self._known else None

    def _changed(self, path: str, known: int) -> int | None:
        """Modification time of a directory that is to be listed again; -1 if it may still change at that time."""
        try:
            modified = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            if path == self.root:
                self._problems.append(f"{path}: no such directory; mount the one of the host there")
            return -1
        except OSError as error:
            self._problems.append(_explain(path, error))
            return None
        if modified == known:
            return None
        return modified if modified < time.time_ns() - _RACY else -1

    def _directories(self, path: str) -> Iterator[str]:
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        yield entry.name
        except FileNotFoundError:
            return
        except OSError as error:
            self._problems.append(_explain(path, error))

    # --- what a container is

    def _decide(self, one: _Container) -> None:
        """Ask logs that are new, or were not read to where they say nothing new."""
        if self._patterns:
            return
        if str(one.name) in self._known:  # a pod of that name is, or was
            one.vllm = True
            return
        changed = self._changed(one.path, one.modified)
        if changed is not None:
            self._list_logs(one)
            one.modified = changed
        undecided = False
        for log in one.logs.values():
            if log.read >= HEAD:
                continue
            undecided = True
            if self._left <= 0:
                break
            if self._ask(log):
                one.vllm, one.logs = True, {}
                self._known.add(str(one.name))
                return
        one.vllm = None if undecided or not one.logs else False

    def _list_logs(self, one: _Container) -> None:
        logs: dict[tuple[int, int], _Log] = {}
        found = Found()
        for entry in found.list(one.path):
            if _LOG.fullmatch(entry.name) and len(logs) < _MAX_FILES:
                try:
                    status = os.stat(entry.path)
                except FileNotFoundError:
                    if entry.is_symlink():
                        self._problems.append(
                            f"{entry.path}: leads to {os.path.dirname(_target(entry.path))}, which is not there; "
                            "mount that directory of the host too"
                        )
                    continue
                except OSError as error:
                    self._problems.append(_explain(entry.path, error))
                    continue
                key = (status.st_dev, status.st_ino)
                logs[key] = one.logs.get(key) or _Log(entry.path)
                logs[key].path = entry.path
        self._problems += [_explain(path, error) for path, error in found.errors.items()]
        one.logs = logs

    def _ask(self, log: _Log) -> bool:
        """Whether what is new in a log is of vLLM."""
        try:
            size = os.stat(log.path).st_size
            if size == log.size:
                return False
            fd = os.open(log.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            try:
                block = os.pread(fd, PIECE, log.read)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._problems.append(_explain(log.path, error))
            return False
        self._left -= len(block)
        if is_vllm(block):
            return True
        # an unfinished line is read again, unless it is longer than what is asked at a time
        log.read += block.rfind(b"\n") + 1 or (len(block) if len(block) == PIECE else 0)
        log.size = size if len(block) < PIECE else 0
        return False


def _target(path: str) -> str:
    try:
        return os.path.join(os.path.dirname(path), os.readlink(path))
    except OSError:
        return path


def _explain(path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: permission denied; run as root, or with the capability DAC_READ_SEARCH"
    return f"{path}: {error.strerror or error}"
