"""What the user asked for: file < environment < flag, checked as a whole before anything starts.

There is one declaration of the options (``options()``); the flags of ``run``, the keys of the
file, the variables and the documentation follow from it. A new option is one field of ``Config``
and one row. Every mistake is reported at once, with its place and with what is allowed there;
values are never repeated in a problem, because they may hold credentials.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

PREFIX = "VLLM_OOM_"
STDIN = "-"
KUBERNETES = "kubernetes:"
DEFAULT_TARGET = "vllm"
"""Name of the only target where the file has no ``targets:``."""

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16  # the deepest valid place is targets[0].log[0]: 4
MAX_NODES = 20_000  # aliases count each time they are used
MAX_TEXT = 4096  # the longest path of Linux
MAX_SHOWN = 60  # of a key in a problem


class ConfigError(Exception):
    """The configuration cannot be used. ``problems``: one line each, in the order of reading."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Address(NamedTuple):
    """Where to listen. ``host`` is empty for every interface; ``port`` 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One vLLM server.

    ``log``: SOURCEs as written, never empty. ``vllm_url``: base URL without a trailing slash, and
    perhaps with credentials: show it with ``shown_url`` only. ``labels``: what its series carry:
    nothing without ``targets:``, else ``namespace``, ``pod`` and ``container``, or ``target``.
    """

    name: str
    log: tuple[str, ...]
    vllm_url: str = field(repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """A valid configuration. Durations are seconds; paths are as written, relative to the working folder.

    ``labelled`` says that the file has ``targets:``: series then carry labels even if there is one.
    """

    targets: tuple[TargetConfig, ...]
    labelled: bool
    scrape_interval: float
    listen: Address
    state_dir: Path | None
    alertmanager_url: tuple[str, ...] = field(repr=False)
    linger: float
    web_config_file: Path | None
    web_enable_lifecycle: bool
    web_hide_excerpts: bool
    classes: Path | None
    log_level: str
    log_format: str


# --- kinds of values ----------------------------------------------------------------------


class _RefusedError(ValueError):
    """A value is not allowed; its text, where there is one, is a reason without the value in it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option takes: ``parse`` turns one text into a value, ``allowed`` says which ones."""

    metavar: str
    allowed: str
    parse: Callable[[str], Any]
    repeatable: bool = False
    switch: bool = False
    choices: tuple[str, ...] = ()


_MILLISECONDS = {
    "y": 31_536_000_000, "w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1,
}  # fmt: skip
_DURATION = re.compile("".join(f"(?:([0-9]{{1,12}}){unit})?" for unit in _MILLISECONDS))


def parse_duration(text: str) -> float:
    """Seconds of a duration as Prometheus writes it: ``1m30s``, ``500ms``, ``0``. Else ValueError."""
    if text == "0":
        return 0.0
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        raise _RefusedError
    sizes = _MILLISECONDS.values()
    return sum(int(count or 0) * size for count, size in zip(found.groups(), sizes, strict=True)) / 1000


def duration_text(seconds: float) -> str:
    """The shortest way to write a duration, to the millisecond; as Prometheus prints it."""
    rest = round(seconds * 1000)
    text = ""
    for unit, size in _MILLISECONDS.items():
        if unit in ("y", "w") and rest % size:
            continue  # 90d is easier to read than 12w6d
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def _duration(least: str, most: str) -> Kind:
    low, high = parse_duration(least), parse_duration(most)

    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if not low <= seconds <= high:
            raise _RefusedError
        return seconds

    return Kind("DURATION", f"a duration from {least} to {most}, such as 2s, 500ms or 1m30s", parse)


def _among(known: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in known:
            raise _RefusedError
        return known[text]

    return parse


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise _RefusedError
        return text

    return parse


def _choice(*choices: str) -> Kind:
    allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return Kind("|".join(choices), allowed, _among({one: one for one in choices}), choices=choices)


_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9._])?")


def _check_host(host: str) -> None:
    """Refuse what is neither a name nor an address; IPv6 without its brackets."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _RefusedError from None
    elif not _HOST.fullmatch(host):
        raise _RefusedError


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise _RefusedError
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        raise _RefusedError("an IPv6 address needs brackets")
    if host:
        _check_host(host)
    return Address(host, int(port))


# RFC 3986, narrower: what aiohttp accepts too. Anything else in a password needs percent-encoding.
_PCHAR = "A-Za-z0-9._~!$&'()*+,;=:%-"
_URL = re.compile(
    rf"https?://(?:[{_PCHAR}]*@)?(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))"
    rf"(?::(?P<port>[0-9]{{1,5}}))?(?:/[{_PCHAR}@/]*)?",
    re.IGNORECASE,
)


def _url(text: str) -> str:
    if "?" in text or "#" in text:
        raise _RefusedError("has a query or a fragment")
    found = _URL.fullmatch(text)
    if found is None or not 0 < int(found["port"] or 80) < 65536:
        raise _RefusedError
    if found["v6"] is not None and ":" not in found["v6"]:
        raise _RefusedError  # brackets are for IPv6 only
    _check_host(found["v6"] or found["name"])
    return text.rstrip("/")


def _vllm_url(text: str) -> str:
    url = _url(text)
    if urlsplit(url).path.endswith("/metrics"):
        raise _RefusedError("/metrics is added to it")
    return url


def shown_url(url: str) -> str:
    """A URL of the configuration without the credentials in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


# RFC 1123: namespaces and containers are labels, pods are labels with dots between them
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*"
_KUBERNETES_NAMES = {
    "namespace": re.compile(_LABEL), "pod": re.compile(_SUBDOMAIN), "container": re.compile(_LABEL)
}  # fmt: skip


def kubernetes_labels(source: str) -> dict[str, str]:
    """``namespace``, ``pod`` and ``container`` of a SOURCE that names them, else nothing."""
    if not source.startswith(KUBERNETES) or source == KUBERNETES:
        return {}
    return dict(zip(_KUBERNETES_NAMES, source.removeprefix(KUBERNETES).split("/"), strict=True))


def _source(text: str) -> str:
    if text.startswith(KUBERNETES) and text != KUBERNETES:
        names = text.removeprefix(KUBERNETES).split("/")
        if len(names) != len(_KUBERNETES_NAMES):
            raise _RefusedError("needs all of namespace, pod and container, or none")
        for (what, pattern), name in zip(_KUBERNETES_NAMES.items(), names, strict=True):
            if not pattern.fullmatch(name):
                raise _RefusedError(f"the {what} is not a Kubernetes name (RFC 1123)")
    elif "://" in text:
        raise _RefusedError("a URL is not a log")
    return text


_SOURCES = Kind(
    "SOURCE", "a path or glob, '-' (standard input), 'kubernetes:' or 'kubernetes:NAMESPACE/POD/CONTAINER'",
    _source, repeatable=True,
)  # fmt: skip
_HTTP = "an http:// or https:// URL of a host, such as "
_VLLM_URL = Kind("URL", _HTTP + "http://localhost:8000", _vllm_url)
_PUSH_URLS = Kind("URL", _HTTP + "http://alertmanager:9093", _url, repeatable=True)
_FILE = Kind("FILE", "the path of a file", Path)
_DIR = Kind("DIR", "the path of a directory", Path)
# what YAML spells so, and what charts put into variables
_TRUE_FALSE = dict.fromkeys(("true", "True", "TRUE", "1"), True) | dict.fromkeys(
    ("false", "False", "FALSE", "0"), False
)
_YES_NO = Kind("", "true or false", _among(_TRUE_FALSE), switch=True)
_ADDRESS = Kind("ADDRESS", "HOST:PORT, :PORT or [IPV6]:PORT with a port up to 65535", _address)
_TARGET_NAME = Kind(
    "NAME", "1 to 128 of the characters a-z A-Z 0-9 _ . : / -", _matching(re.compile("[a-zA-Z0-9_.:/-]{1,128}"))
)  # fmt: skip
_TARGET_KINDS = {"name": _TARGET_NAME, "log": _SOURCES, "vllm_url": _VLLM_URL}
_LABEL_KINDS = {
    what: Kind("NAME", "a Kubernetes name (lower-case letters, digits and '-')", _matching(pattern))
    for what, pattern in _KUBERNETES_NAMES.items()
}


# --- the options --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``run``. ``default`` is what one would type to get it; empty: there is none."""

    flag: str
    kind: Kind
    default: str
    help: str

    @property
    def key(self) -> str:
        """Key in the file, and field of ``Config``: ``--web.config.file`` is ``web_config_file``."""
        return re.sub("[-.]", "_", self.flag.removeprefix("--"))

    @property
    def environment(self) -> str:
        """Name of the variable."""
        return PREFIX + self.key.upper()


_OPTIONS = (
    Option("--log", _SOURCES, "", "log of the server: path, glob, '-' for standard input, or 'kubernetes:[NAMESPACE/POD/CONTAINER]'"),
    Option("--vllm-url", _VLLM_URL, "http://localhost:8000", "where the server answers; its /metrics is scraped"),
    Option("--scrape-interval", _duration("100ms", "1h"), "2s", "time between two scrapes of the server"),
    Option("--listen", _ADDRESS, "0.0.0.0:10977", "address to serve metrics, pages and API on"),
    Option("--state-dir", _DIR, "", "where counters, incidents and log positions outlive a restart; without it they don't"),
    Option("--alertmanager-url", _PUSH_URLS, "", "Alertmanager to push incidents to (checked only: not used yet)"),
    Option("--linger", _duration("0s", "1h"), "30s", "time left for a last scrape when standard input has ended"),
    Option("--web.config.file", _FILE, "", "TLS and basic auth, in the format of Prometheus' exporter-toolkit"),
    Option("--web.enable-lifecycle", _YES_NO, "false", "allow POST /-/reload"),
    Option("--web.hide-excerpts", _YES_NO, "false", "show no log excerpts on pages and in the API"),
    Option("--classes", _DIR, "", "directory with more class files"),
    Option("--log-level", _choice("debug", "info", "warning", "error"), "info", "least severe message of the exporter's own log"),
    Option("--log-format", _choice("console", "json", "auto"), "auto", "of the exporter's own log; auto: console on a terminal, else json"),
)  # fmt: skip
_BY_KEY = {option.key: option for option in _OPTIONS}
_OF_TARGET = ("log", "vllm_url")  # options that describe the one server there is without targets:


def options() -> tuple[Option, ...]:
    """Every option of ``run``, in the order they are documented."""
    return _OPTIONS


# --- loading ------------------------------------------------------------------------------


class _Text(NamedTuple):
    """One value as written, with the place to name when it is wrong."""

    place: str
    text: str


class _Value(NamedTuple):
    """One valid value, with its place."""

    place: str
    value: Any


class _Given(NamedTuple):
    """One option as one layer gives it. ``values`` lacks those that were wrong."""

    place: str
    values: tuple[_Value, ...]


class _Target(NamedTuple):
    """One item of ``targets:`` while it is checked against the others."""

    place: str
    name: _Value | None
    log: tuple[_Value, ...]
    vllm_url: _Value | None
    labels: dict[str, str]


def load(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """Read and check everything; ConfigError with every problem if there is one.

    ``path``: the file, else the one that ``VLLM_OOM_CONFIG`` names, else none. ``flags`` maps keys
    (``Option.key``) to text, a list of texts or a bool; None and an empty list mean not given, and
    what is no option is ignored. A list given in one layer replaces that of the layer below.
    """
    problems: list[str] = []
    if path is None and environment.get(PREFIX + "CONFIG", "").strip():
        path = Path(environment[PREFIX + "CONFIG"].strip())
    file = _File(_printable(str(path)), problems)
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
            for key in _OF_TARGET
            if key in given
        ]
    elif "log" in given:
        _check_sources(given["log"].values, problems)
    elif readable:
        problems.append(_no_log(path))
    if problems:
        raise ConfigError(problems)
    return _build(given, targets)


def _build(given: Mapping[str, _Given], targets: tuple[TargetConfig, ...] | None) -> Config:
    """Defaults, and over them what was given."""
    values: dict[str, Any] = {}
    for option in _OPTIONS:
        if option.key in given:
            found = [one.value for one in given[option.key].values]
        else:
            found = [option.kind.parse(option.default)] if option.default else []
        values[option.key] = tuple(found) if option.kind.repeatable else next(iter(found), None)
    log, url = (values.pop(key) for key in _OF_TARGET)
    only = TargetConfig(DEFAULT_TARGET, log, url)
    return Config(targets=targets or (only,), labelled=targets is not None, **values)


def _no_log(path: Path | None) -> str:
    where = "log: in a configuration file" if path is None else f"log: in {_printable(str(path))}"
    return f"--log: no log to read; give --log SOURCE, {PREFIX}LOG or {where}; SOURCE is {_SOURCES.allowed}"


def _parse(kind: Kind, written: Iterable[_Text], problems: list[str]) -> tuple[_Value, ...]:
    """The valid values; a problem for each of the others."""
    values = []
    for place, text in written:
        try:
            values.append(_Value(place, kind.parse(_sound(text))))
        except _RefusedError as refused:
            reason = f"{refused}; " if str(refused) else ""
            problems.append(f"{place}: {reason}must be {kind.allowed}")
    return tuple(values)


def _sound(text: str) -> str:
    """Refuse what no label and no line of a log could hold."""
    if not text:
        raise _RefusedError("is empty")
    if len(text) > MAX_TEXT:
        raise _RefusedError(f"is longer than {MAX_TEXT} characters")
    if not text.isprintable():  # so are surrogates: bytes of a variable that are no UTF-8
        raise _RefusedError("holds characters that cannot be printed")
    return text


def _given(layer: Iterable[tuple[Option, str, list[_Text]]], problems: list[str]) -> dict[str, _Given]:
    return {
        option.key: _Given(place, _parse(option.kind, written, problems)) for option, place, written in layer
    }


# Kubernetes sets such variables for each Service of the namespace; one may be called vllm-oom-exporter
_SERVICE_LINK = re.compile(
    PREFIX
    + r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)",
    re.ASCII,
)


def _from_environment(
    environment: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[Option, str, list[_Text]]]:
    """Lists are separated by commas. An empty variable is one that was not set."""
    known = {option.environment: option for option in _OPTIONS}
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
                f"{_printable(name)}: unknown variable; {_suggest(name, [*known, PREFIX + 'CONFIG'])}"
            )


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[Option, str, list[_Text]]]:
    for option in _OPTIONS:
        value = flags.get(option.key)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            continue
        parts = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
        yield option, option.flag, _numbered(option.flag, parts)


def _numbered(place: str, texts: list[str]) -> list[_Text]:
    """Several values are told apart in problems by their index."""
    return [_Text(f"{place}[{i}]" if len(texts) > 1 else place, text) for i, text in enumerate(texts)]


def _suggest(key: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(key[:MAX_SHOWN].replace("-", "_").replace(".", "_"), names, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"


def _printable(text: str) -> str:
    """Text of the user on one line of bounded length."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:MAX_TEXT])


# --- what must hold between values --------------------------------------------------------


def _check_sources(sources: Iterable[_Value], problems: list[str]) -> None:
    """No log is read twice."""
    first: dict[str, str] = {}
    for place, source in sources:
        if source in first:
            problems.append(f"{place}: is the same log as {_path_of(first[source])}; name it once")
        first.setdefault(source, place)


def _check_targets(targets: list[_Target], problems: list[str]) -> tuple[TargetConfig, ...]:
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


# --- the file -----------------------------------------------------------------------------


class _BadFileError(Exception):
    """The file as a whole cannot be used; the text says where and why."""


class _At(NamedTuple):
    """A node of the file: its path from the top, and the line where a reader finds it."""

    path: str
    line: int
    node: yaml.Node


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{tag}" for tag in ("str", "int", "float", "bool", "timestamp", "value", "merge")
}
_NULL = "tag:yaml.org,2002:null"


class _File:
    """The tree of one file. Values stay text, so that all layers accept the same things.

    Nodes are followed only where the schema expects them, and counted: an alias costs each time.
    """

    def __init__(self, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems
        self.options: dict[str, _Given] = {}
        self.targets: list[_Target] = []
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
                self._wrong(here, f"unknown key; {_suggest(key.value, names)}")
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

    def _text(self, at: _At, kind: Kind) -> list[_Text]:
        """The text of a scalar, or nothing and a problem."""
        node = at.node
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS:
            return [_Text(self._place(at), node.value)]
        if node.tag == _NULL:
            self._wrong(at, f"has no value; must be {kind.allowed}")
        elif isinstance(node, yaml.ScalarNode):
            self._wrong(at, f"has a YAML tag; must be {kind.allowed}")
        else:
            shape = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            self._wrong(at, f"is a {shape}; must be {kind.allowed}")
        return []

    def _values(self, at: _At, kind: Kind) -> tuple[_Value, ...]:
        if not kind.repeatable:
            return _parse(kind, self._text(at, kind), self.problems)
        example = '["/var/log/vllm/*.log"]' if kind is _SOURCES else '["http://alertmanager:9093"]'
        items = self._items(at, example)
        if items == [] and kind is _SOURCES:
            self._wrong(at, f"is empty; needs at least one log, such as {example}")
        values: list[_Value] = []
        for item in items or ():
            values += _parse(kind, self._text(item, kind), self.problems)
        return tuple(values)

    def _top(self, node: yaml.Node | None) -> None:
        if node is None or node.tag == _NULL:  # nothing but comments
            return
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise _BadFileError(f":{line}: must be a mapping of keys, such as log: [/var/log/vllm.log]")
        top = self._mapping(_At("", line, node), [*_BY_KEY, "targets"], {})
        for key, at in top.items():
            if key == "targets":
                self.targets_place = f"{self.name}:{at.line}"
                self.targets = self._targets(at)
            else:
                self.options[key] = _Given(self._place(at), self._values(at, _BY_KEY[key].kind))

    def _targets(self, at: _At) -> list[_Target]:
        items = self._items(at, '[{name: a, log: ["/var/log/a.log"], vllm_url: "http://localhost:8000"}]')
        if items == []:
            self._wrong(at, "is empty; needs at least one target, or remove it")
        return [self._target(item) for item in items or ()]

    def _target(self, at: _At) -> _Target:
        found = self._mapping(at, (*_TARGET_KINDS, "labels"), _TARGET_KINDS)
        values = {k: self._values(found[k], kind) if k in found else () for k, kind in _TARGET_KINDS.items()}
        return _Target(
            place=self._place(at),
            name=next(iter(values["name"]), None),
            log=values["log"],
            vllm_url=next(iter(values["vllm_url"]), None),
            labels=self._labels(found["labels"]) if "labels" in found else {},
        )

    def _labels(self, at: _At) -> dict[str, str]:
        found = self._mapping(at, _LABEL_KINDS, _LABEL_KINDS)
        return {
            name: one.value
            for name, kind in _LABEL_KINDS.items()
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
    return found[0] if found else _printable(problem)


def _short(key: str) -> str:
    """A key fit for a problem: a value that slipped into the place of a key is not shown."""
    return key if re.fullmatch(f"[A-Za-z0-9_.-]{{1,{MAX_SHOWN}}}", key) else "…"


# --- showing it ---------------------------------------------------------------------------


def describe(config: Config) -> str:
    """What would be watched, one line a target; no credentials."""
    every = duration_text(config.scrape_interval)
    lines = []
    for target in config.targets:
        logs = ", ".join("standard input" if source == STDIN else source for source in target.log)
        lines.append(
            f"{target.name}: reads {logs}; scrapes {shown_url(target.vllm_url)}/metrics every {every}"
        )
    return "".join(f"{line}\n" for line in lines)
