"""What the user asked for: file < environment < flag, checked as a whole before anything starts.

There is one declaration of the options (``options()``); the flags of ``run``, the keys of the
file, the variables and the documentation follow from it. A new option is one field of ``Config``
and one row. Every mistake is reported at once, with its place and with what is allowed there;
values are never repeated in a problem, because they may hold credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .file import File, Target
from .schema import OF_NODE, OF_TARGET, OPTIONS, Config, Option, TargetConfig, options
from .values import (
    KUBERNETES,
    PREFIX,
    SOURCES,
    STDIN,
    Address,
    Given,
    Text,
    Value,
    duration_text,
    kubernetes_labels,
    parse_duration,
    parse_values,
    printable,
    shown_url,
    suggest,
)

__all__ = [
    "DEFAULT_TARGET", "KUBERNETES", "STDIN", "Address", "Config", "ConfigError", "Option", "TargetConfig",
    "describe", "duration_text", "kubernetes_labels", "load", "options", "parse_duration", "shown_url",
]  # fmt: skip

DEFAULT_TARGET = "vllm"
"""Name of the only target where the file has no ``targets:``."""


class ConfigError(Exception):
    """The configuration cannot be used. ``problems``: one line each, in the order of reading."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object], *, needs_log: bool = True
) -> Config:
    """Read and check everything; ConfigError with every problem if there is one.

    ``path``: the file, else the one that ``VLLM_OOM_CONFIG`` names, else none. ``flags`` maps keys
    (``Option.key``) to text, a list of texts or a bool; None and an empty list mean not given, and
    what is no option is ignored. A list given in one layer replaces that of the layer below. Without
    ``needs_log`` no log has to be named: for a command that reads none.
    """
    problems: list[str] = []
    if path is None and environment.get(PREFIX + "CONFIG", "").strip():
        path = Path(environment[PREFIX + "CONFIG"].strip())
    file = File(printable(str(path)), problems)
    readable = path is None or file.read(path)
    given = {
        **file.options,
        **_given(_from_environment(environment, problems), problems),
        **_given(_from_flags(flags), problems),
    }
    targets = None
    if file.targets_place is not None:
        targets = _check_targets(file.targets, problems)
        problems += [
            f"{given[key].place}: cannot be used beside targets ({file.targets_place}); "
            f"move it into an item of targets, or remove targets"
            for key in OF_TARGET
            if key in given
        ]
        problems += [
            f"{given[key].place}: cannot be used beside targets ({file.targets_place}); keep one of them"
            for key in OF_NODE
            if key in given
        ]
    elif "node" in given:
        problems += [
            f"{given[key].place}: cannot be used beside {_path_of(given['node'].place)}, "
            "which finds the servers of the node itself; keep one of them"
            for key in OF_TARGET
            if key in given
        ]
    elif "log" in given:
        _check_sources(given["log"].values, problems)
        if "node_match" in given:
            problems.append(
                f"{given['node_match'].place}: is of no use without node; give node too, or remove it"
            )
    elif readable and needs_log:
        problems.append(_no_log(path))
    if problems:
        raise ConfigError(problems)
    return _build(given, targets)


def _build(given: Mapping[str, Given], targets: tuple[TargetConfig, ...] | None) -> Config:
    """Defaults, and over them what was given."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.key in given:
            found = [one.value for one in given[option.key].values]
        else:
            found = [option.kind.parse(option.default)] if option.default else []
        values[option.key] = tuple(found) if option.kind.repeatable else next(iter(found), None)
    log, url = (values.pop(key) for key in OF_TARGET)
    labelled = targets is not None or values["node"] is not None
    if targets is None:
        targets = () if values["node"] else (TargetConfig(DEFAULT_TARGET, log, url),)
    return Config(targets=targets, labelled=labelled, **values)


def _no_log(path: Path | None) -> str:
    where = "log: in a configuration file" if path is None else f"log: in {printable(str(path))}"
    return f"--log: no log to read; give --log SOURCE, {PREFIX}LOG or {where}; SOURCE is {SOURCES.allowed}"


def _given(layer: Iterable[tuple[Option, str, list[Text]]], problems: list[str]) -> dict[str, Given]:
    return {
        option.key: Given(place, parse_values(option.kind, written, problems))
        for option, place, written in layer
    }


# Kubernetes sets such variables for each Service of the namespace; one may be called vllm-oom-exporter
_SERVICE_LINK = re.compile(
    PREFIX
    + r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)",
    re.ASCII,
)


def _from_environment(
    environment: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[Option, str, list[Text]]]:
    """Lists are separated by commas. An empty variable is one that was not set."""
    known = {option.environment: option for option in OPTIONS}
    for name in sorted(environment):
        text = environment[name].strip()
        if not name.startswith(PREFIX) or name == PREFIX + "CONFIG" or not text:
            continue
        if name in known:
            option = known[name]
            parts = [one.strip() for one in text.split(",")] if option.kind.repeatable else [text]
            yield option, name, _numbered(name, parts)
        elif not _SERVICE_LINK.fullmatch(name):
            problems.append(
                f"{printable(name)}: unknown variable; {suggest(name, [*known, PREFIX + 'CONFIG'])}"
            )


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[Option, str, list[Text]]]:
    for option in OPTIONS:
        value = flags.get(option.key)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            continue
        parts = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        yield option, option.flag, _numbered(option.flag, parts)


def _numbered(place: str, texts: list[str]) -> list[Text]:
    """Several values are told apart in problems by their index."""
    return [Text(f"{place}[{i}]" if len(texts) > 1 else place, text) for i, text in enumerate(texts)]


# --- what must hold between values --------------------------------------------------------


def _check_sources(sources: Iterable[Value], problems: list[str]) -> None:
    """No log is read twice."""
    first: dict[str, str] = {}
    for place, source in sources:
        if source in first:
            problems.append(f"{place}: is the same log as {_path_of(first[source])}; name it once")
        first.setdefault(source, place)


def _check_targets(targets: list[Target], problems: list[str]) -> tuple[TargetConfig, ...]:
    """Names, logs and labels tell the targets apart. Those that are incomplete are left out."""
    _check_sources([source for target in targets for source in target.log], problems)
    whole: list[TargetConfig] = []
    names: dict[str, str] = {}
    series: dict[tuple[tuple[str, str], ...], str] = {}
    for target in targets:
        for place, source in target.log:
            if source == STDIN and len(targets) > 1:
                problems.append(f"{place}: the exporter ends with standard input; make it the only target")
        if target.name is None:
            continue
        place, name = target.name
        if names.setdefault(name, target.place) != target.place:
            problems.append(f"{place}: is the name of {_path_of(names[name])} too; give each its own")
            continue
        labels = target.labels
        for _, source in target.log:
            labels = labels or kubernetes_labels(source)
        labels = labels or {"target": name}
        owner = series.setdefault(tuple(labels.items()), target.place)
        if owner != target.place:
            problems.append(
                f"{target.place}: has the labels of {_path_of(owner)}, so their series would collide; "
                "give labels that differ"
            )
        if target.log and target.vllm_url is not None:
            logs = tuple(one.value for one in target.log)
            whole.append(TargetConfig(name, logs, target.vllm_url.value, labels))
    return tuple(whole)


def _path_of(place: str) -> str:
    """``targets[0].log[1]`` of ``file.yaml:12: targets[0].log[1]``; flags and variables as they are."""
    return place.rpartition(": ")[2]


# --- showing it ---------------------------------------------------------------------------


def describe(config: Config) -> str:
    """What would be watched, one line a target; no credentials."""
    every = duration_text(config.scrape_interval)
    lines = []
    if config.node is not None:
        patterns = ", ".join(config.node_match)
        which = f"that match {patterns}" if patterns else "whose log is one of vLLM"
        lines.append(f"node: follows the containers in {config.node} {which}")
    for target in config.targets:
        logs = ", ".join("standard input" if source == STDIN else source for source in target.log)
        lines.append(
            f"{target.name}: reads {logs}; scrapes {shown_url(target.vllm_url)}/metrics every {every}"
        )
    return "".join(f"{line}\n" for line in lines)
