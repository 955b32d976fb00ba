"""The configuration file: YAML, strictly, with the line of everything that is wrong.

Values stay text, so that file, environment and flags accept the same things.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from .schema import BY_KEY, SECTIONS
from .values import (
    LABEL_KINDS,
    MAX_SHOWN,
    SOURCES,
    TARGET_KINDS,
    Given,
    Kind,
    Text,
    Value,
    parse_values,
    printable,
    suggest,
)

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16  # the deepest valid place is targets[0].log[0]: 4
MAX_NODES = 20_000  # aliases count each time they are used


class Target(NamedTuple):
    """One item of ``targets:`` while it is checked against the others."""

    place: str
    name: Value | None
    log: tuple[Value, ...]
    vllm_url: Value | None
    labels: dict[str, str]


class _BadFileError(Exception):
    """The file as a whole cannot be used; the text says where and why."""


class _At(NamedTuple):
    """A node of the file: its path from the top, and the line where a reader finds it."""

    path: str
    line: int
    node: yaml.Node


_EXAMPLES = {
    "SOURCE": '["/var/log/vllm/*.log"]',
    "URL": '["http://alertmanager:9093"]',
    "NAMESPACE/POD/CONTAINER": '["prod/llama-*/vllm"]',
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{tag}" for tag in ("str", "int", "float", "bool", "timestamp", "value", "merge")
}
_NULL = "tag:yaml.org,2002:null"


class File:
    """The tree of one file. Values stay text, so that all layers accept the same things.

    Nodes are followed only where the schema expects them, and counted: an alias costs each time.
    """

    def __init__(self, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems
        self.options: dict[str, Given] = {}
        self.targets: list[Target] = []
        self.targets_place: str | None = None
        self._nodes = 0

    def read(self, path: Path) -> bool:
        """Fill in what the file gives. False: it could not be read to its end, so keys may be missing."""
        try:
            self._top(self._parse(path))
        except _BadFileError as bad:
            self.problems.append(f"{self.name}{bad}")
            return False
        return True

    def _parse(self, path: Path) -> yaml.Node | None:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            reason = getattr(error, "strerror", None) or "not a path"
            raise _BadFileError(f": cannot be read ({reason}); name a readable YAML file") from None
        if len(data) > MAX_FILE_BYTES:
            raise _BadFileError(": is larger than 1 MiB; this is no configuration file")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise _BadFileError(f":{line}: is not UTF-8 text") from None
        control = yaml.reader.Reader.NON_PRINTABLE.search(text)
        if control:
            line = text.count("\n", 0, control.start()) + 1
            raise _BadFileError(f":{line}: holds a control character; write plain text")
        try:
            _check_shape(text)
            node: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise _BadFileError(
                f"{f':{mark.line + 1}' if mark else ''}: is not YAML: {_reason(error)}"
            ) from None
        except (yaml.YAMLError, ValueError, OverflowError):
            # the Python parser lets through what int() and chr() raise for absurd escapes
            raise _BadFileError(": is not YAML") from None
        return node

    def _place(self, at: _At) -> str:
        return f"{self.name}:{at.line}: {at.path}" if at.path else f"{self.name}:{at.line}"

    def _wrong(self, at: _At, problem: str) -> None:
        self.problems.append(f"{self._place(at)}: {problem}")

    def _count(self, line: int) -> None:
        self._nodes += 1
        _check_count(self._nodes, line)

    def _mapping(self, at: _At, known: Iterable[str], needed: Mapping[str, Kind]) -> dict[str, _At]:
        """The known keys with their values; everything else is a problem, and so is a needed one's lack."""
        names = list(known)
        if not isinstance(at.node, yaml.MappingNode):
            self._wrong(at, f"must be a mapping with the keys {', '.join(names)}")
            return {}
        present = {key.value for key, _ in at.node.value if isinstance(key, yaml.ScalarNode)}
        for key, kind in needed.items():
            if key not in present:
                self._wrong(at, f"has no {key}; needs {kind.allowed}")
        found: dict[str, _At] = {}
        lines: dict[str, int] = {}
        for key, value in at.node.value:
            line = key.start_mark.line + 1
            self._count(line)
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(_At(at.path, line, key), "a key must be plain text")
                continue
            path = f"{at.path}.{_short(key.value)}" if at.path else _short(key.value)
            here = _At(path, line, value)
            if key.value in lines:
                self._wrong(here, f"is given twice, first on line {lines[key.value]}; keep one")
            elif key.value not in names:
                self._wrong(here, f"unknown key; {suggest(key.value, names)}")
            else:
                found[key.value] = here
            lines.setdefault(key.value, line)
        return found

    def _items(self, at: _At, example: str) -> list[_At] | None:
        if not isinstance(at.node, yaml.SequenceNode):
            self._wrong(at, f"must be a list, such as {example}")
            return None
        items = [_At(f"{at.path}[{i}]", n.start_mark.line + 1, n) for i, n in enumerate(at.node.value)]
        for item in items:
            self._count(item.line)
        return items

    def _text(self, at: _At, kind: Kind) -> list[Text]:
        """The text of a scalar, or nothing and a problem."""
        node = at.node
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS:
            return [Text(self._place(at), node.value)]
        if node.tag == _NULL:
            self._wrong(at, f"has no value; must be {kind.allowed}")
        elif isinstance(node, yaml.ScalarNode):
            self._wrong(at, f"has a YAML tag; must be {kind.allowed}")
        else:
            shape = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            self._wrong(at, f"is a {shape}; must be {kind.allowed}")
        return []

    def _values(self, at: _At, kind: Kind) -> tuple[Value, ...]:
        if not kind.repeatable:
            return parse_values(kind, self._text(at, kind), self.problems)
        example = _EXAMPLES[kind.metavar]
        items = self._items(at, example)
        if items == [] and kind is SOURCES:
            self._wrong(at, f"is empty; needs at least one log, such as {example}")
        values: list[Value] = []
        for item in items or ():
            values += parse_values(kind, self._text(item, kind), self.problems)
        return tuple(values)

    def _top(self, node: yaml.Node | None) -> None:
        if node is None or node.tag == _NULL:  # nothing but comments
            return
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise _BadFileError(f":{line}: must be a mapping of keys, such as log: [/var/log/vllm.log]")
        apart = {key for section in SECTIONS.values() for key in section.values()}
        plain = [key for key in BY_KEY if key not in apart]
        top = self._mapping(_At("", line, node), [*plain, *SECTIONS, "targets"], {})
        for key, at in top.items():
            if key == "targets":
                self.targets_place = f"{self.name}:{at.line}"
                self.targets = self._targets(at)
            elif key in SECTIONS:
                for inner, value in self._mapping(at, SECTIONS[key], {}).items():
                    self._option(SECTIONS[key][inner], value)
            else:
                self._option(key, at)

    def _option(self, key: str, at: _At) -> None:
        self.options[key] = Given(self._place(at), self._values(at, BY_KEY[key].kind))

    def _targets(self, at: _At) -> list[Target]:
        items = self._items(at, '[{name: a, log: ["/var/log/a.log"], vllm_url: "http://localhost:8000"}]')
        if items == []:
            self._wrong(at, "is empty; needs at least one target, or remove it")
        return [self._target(item) for item in items or ()]

    def _target(self, at: _At) -> Target:
        found = self._mapping(at, (*TARGET_KINDS, "labels"), TARGET_KINDS)
        values = {k: self._values(found[k], kind) if k in found else () for k, kind in TARGET_KINDS.items()}
        return Target(
            place=self._place(at),
            name=next(iter(values["name"]), None),
            log=values["log"],
            vllm_url=next(iter(values["vllm_url"]), None),
            labels=self._labels(found["labels"]) if "labels" in found else {},
        )

    def _labels(self, at: _At) -> dict[str, str]:
        found = self._mapping(at, LABEL_KINDS, LABEL_KINDS)
        return {
            name: one.value
            for name, kind in LABEL_KINDS.items()
            if name in found
            for one in self._values(found[name], kind)
        }


def _check_shape(text: str) -> None:
    """Refuse depth and mass before a tree is built of them, and a second document."""
    depth = documents = nodes = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            _check_count(nodes, line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _BadFileError(f":{line}: is nested more than {MAX_DEPTH} deep; unfold it")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _BadFileError(f":{line}: begins a second YAML document; keep one")


def _check_count(nodes: int, line: int) -> None:
    if nodes > MAX_NODES:
        raise _BadFileError(f":{line}: holds more than {MAX_NODES} values, repeated aliases included")


def _reason(error: yaml.MarkedYAMLError) -> str:
    """What the parser says, without the names it quotes: a password may look like an alias."""
    problem = error.problem or "cannot be parsed"
    found = re.match("found (?:undefined|duplicate) (?:alias|anchor|tag handle)", problem)
    return found[0] if found else printable(problem)


def _short(key: str) -> str:
    """A key fit for a problem: a value that slipped into the place of a key is not shown."""
    return key if re.fullmatch(f"[A-Za-z0-9_.-]{{1,{MAX_SHOWN}}}", key) else "…"
