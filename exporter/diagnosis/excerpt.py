"""The lines of an incident, rebuilt from what was recognised in them.

Nothing is copied from the log but prefixes, paths of known packages and numbers: so there is
no prompt, token id, request id or name of a user in it, whatever the log held.
"""

from __future__ import annotations

import re

from ..records import Dump, Failure, Frame, Record, Terminal
from ..vllm.traceback import passes_on
from .incident import Case

_MAX_FRAMES = 10
_MAX_REPORTS = 4
_NAME = re.compile(r"[\w.<>/-]{1,120}")
_KNOWN_PATHS = (
    "vllm/",
    "torch/",
    "aiter/",
    "flashinfer/",
    "triton/",
    "ray/",
    "flash_attn/",
    "inductor_cache/",
)
_TERMINAL_TEXT = {
    "fatal": "EngineCore encountered a fatal error.",
    "start_failed": "the engine failed to start",
    "dead": "the engine was found dead",
    "survived": "the engine goes on after a failed call",
    "survived_request": "the engine goes on after a failed request",
    "cut": "a worker failed; the log ends before it says of what",
}


def excerpt(case: Case) -> tuple[str, ...]:
    """At most about sixty lines, in the order of the log."""
    lines: list[tuple[int, str]] = []
    shown: set[str] = set()
    for failure in case.failures:
        if failure.shown in shown or len(shown) >= _MAX_REPORTS:
            continue
        shown.add(failure.shown)
        lines += _failure(failure)
    for part in case.dump.values():
        lines += _dump(part)
    kinds: set[str] = set()
    for terminal in case.terminals:
        if terminal.kind not in kinds:
            kinds.add(terminal.kind)
            lines.append((terminal.record.numbers[0], _prefix(terminal.record) + _ending(terminal)))
    return tuple(text for _, text in sorted(lines, key=lambda item: item[0]))


def _prefix(record: Record) -> str:
    process = record.process if _NAME.fullmatch(record.process) else ""
    lead = f"({process} pid={record.pid}) " if process and record.pid is not None else ""
    if not record.level:
        return lead
    time = f" {record.time:%m-%d %H:%M:%S}" if record.time else ""
    file = record.file if _NAME.fullmatch(record.file) else "?"
    return f"{lead}{record.level}{time} [{file}] "


def _failure(failure: Failure) -> list[tuple[int, str]]:
    prefix = _prefix(failure.record)
    frames = [f for f in failure.frames if f.path.startswith(_KNOWN_PATHS) and not passes_on(f)]
    lines = []
    if len(frames) > _MAX_FRAMES:
        lines.append(f"  … {len(frames) - _MAX_FRAMES} frames")
    lines += [_frame(frame) for frame in frames[-_MAX_FRAMES:]]
    lines.append(failure.shown)
    return [(failure.line, prefix + text) for text in lines]


def _frame(frame: Frame) -> str:
    path = frame.path if _NAME.fullmatch(frame.path) else "?"
    function = frame.function if _NAME.fullmatch(frame.function or "?") else "?"
    return f'  File "{path}", line {frame.line}, in {function}'


def _dump(dump: Dump) -> list[tuple[int, str]]:
    if dump.part == "config" or not dump.facts:
        return []
    name = "SchedulerOutput" if dump.part == "output" else "SchedulerStats"
    numbers = ", ".join(f"{key}={value}" for key, value in dump.facts.items() if key != "prompt_lengths")
    return [(dump.record.numbers[0], f"{_prefix(dump.record)}{name}({numbers})")]


def _ending(terminal: Terminal) -> str:
    detail = terminal.detail if _NAME.fullmatch(terminal.detail or " ") else ""
    return _TERMINAL_TEXT[terminal.kind] + (f": {detail}" if detail else "")
