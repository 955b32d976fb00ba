"""What an option takes: kinds of values, and the checks of one value.

Values are never repeated in a problem, because they may hold credentials.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PREFIX = "VLLM_OOM_"
STDIN = "-"
KUBERNETES = "kubernetes:"

MAX_TEXT = 4096  # the longest path of Linux
MAX_SHOWN = 60  # of a key in a problem


class Address(NamedTuple):
    """Where to listen. ``host`` is empty for every interface; ``port`` 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RefusedError(ValueError):
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
        raise RefusedError
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


def duration(least: str, most: str) -> Kind:
    """A duration between two, both of which are allowed."""
    low, high = parse_duration(least), parse_duration(most)

    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if not low <= seconds <= high:
            raise RefusedError
        return seconds

    return Kind("DURATION", f"a duration from {least} to {most}, such as 2s, 500ms or 1m30s", parse)


def _among(known: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in known:
            raise RefusedError
        return known[text]

    return parse


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise RefusedError
        return text

    return parse


def choice(*choices: str) -> Kind:
    """One of a few words."""
    allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return Kind("|".join(choices), allowed, _among({one: one for one in choices}), choices=choices)


_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9._])?")


def _check_host(host: str) -> None:
    """Refuse what is neither a name nor an address; IPv6 without its brackets."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise RefusedError from None
    elif not _HOST.fullmatch(host):
        raise RefusedError


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise RefusedError
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        raise RefusedError("an IPv6 address needs brackets")
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
        raise RefusedError("has a query or a fragment")
    found = _URL.fullmatch(text)
    if found is None or not 0 < int(found["port"] or 80) < 65536:
        raise RefusedError
    if found["v6"] is not None and ":" not in found["v6"]:
        raise RefusedError  # brackets are for IPv6 only
    _check_host(found["v6"] or found["name"])
    return text.rstrip("/")


def _vllm_url(text: str) -> str:
    url = _url(text)
    if urlsplit(url).path.endswith("/metrics"):
        raise RefusedError("/metrics is added to it")
    return url


def _push_url(text: str) -> str:
    url = _url(text)
    if urlsplit(url).path.endswith("/api/v2/alerts"):
        raise RefusedError("/api/v2/alerts is added to it")
    return url


def _shown_url(text: str) -> str:
    url = _url(text)
    if "@" in urlsplit(url).netloc:
        raise RefusedError("is shown to people, so it can't hold credentials")
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
            raise RefusedError("needs all of namespace, pod and container, or none")
        for (what, pattern), name in zip(_KUBERNETES_NAMES.items(), names, strict=True):
            if not pattern.fullmatch(name):
                raise RefusedError(f"the {what} is not a Kubernetes name (RFC 1123)")
    elif "://" in text:
        raise RefusedError("a URL is not a log")
    return text


SOURCES = Kind(
    "SOURCE", "a path or glob, '-' (standard input), 'kubernetes:' or 'kubernetes:NAMESPACE/POD/CONTAINER'",
    _source, repeatable=True,
)  # fmt: skip
_PATTERN = re.compile(r"[a-z0-9.*?\[\]!-]{1,253}")  # a name, or a glob for names


def _container(text: str) -> str:
    parts = text.split("/")
    if len(parts) != len(_KUBERNETES_NAMES):
        raise RefusedError("needs all of namespace, pod and container")
    if not all(map(_PATTERN.fullmatch, parts)):
        raise RefusedError
    return text


CONTAINERS = Kind(
    "NAMESPACE/POD/CONTAINER", "names or globs for namespace, pod and container, such as prod/llama-*/vllm",
    _container, repeatable=True,
)  # fmt: skip
_HTTP = "an http:// or https:// URL of a host, such as "
VLLM_URL = Kind("URL", _HTTP + "http://localhost:8000", _vllm_url)
PUSH_URLS = Kind("URL", _HTTP + "http://alertmanager:9093", _push_url, repeatable=True)
EXTERNAL_URL = Kind("URL", _HTTP + "https://oom.example.org", _shown_url)
RUNBOOK_URL = Kind("URL", _HTTP + "https://runbooks.example.com/vllm-oom", _shown_url)
FILE = Kind("FILE", "the path of a file", Path)
DIR = Kind("DIR", "the path of a directory", Path)
# what YAML spells so, and what charts put into variables
_TRUE_FALSE = dict.fromkeys(("true", "True", "TRUE", "1"), True) | dict.fromkeys(
    ("false", "False", "FALSE", "0"), False
)
YES_NO = Kind("", "true or false", _among(_TRUE_FALSE), switch=True)
ADDRESS = Kind("ADDRESS", "HOST:PORT, :PORT or [IPV6]:PORT with a port up to 65535", _address)
_TARGET_NAME = Kind(
    "NAME", "1 to 128 of the characters a-z A-Z 0-9 _ . : / -", _matching(re.compile("[a-zA-Z0-9_.:/-]{1,128}"))
)  # fmt: skip
TARGET_KINDS = {"name": _TARGET_NAME, "log": SOURCES, "vllm_url": VLLM_URL}
LABEL_KINDS = {
    what: Kind("NAME", "a Kubernetes name (lower-case letters, digits and '-')", _matching(pattern))
    for what, pattern in _KUBERNETES_NAMES.items()
}


# --- values with their place ---------------------------------------------------------------


class Text(NamedTuple):
    """One value as written, with the place to name when it is wrong."""

    place: str
    text: str


class Value(NamedTuple):
    """One valid value, with its place."""

    place: str
    value: Any


class Given(NamedTuple):
    """One option as one layer gives it. ``values`` lacks those that were wrong."""

    place: str
    values: tuple[Value, ...]


def parse_values(kind: Kind, written: Iterable[Text], problems: list[str]) -> tuple[Value, ...]:
    """The valid values; a problem for each of the others."""
    values = []
    for place, text in written:
        try:
            values.append(Value(place, kind.parse(_sound(text))))
        except RefusedError as refused:
            reason = f"{refused}; " if str(refused) else ""
            problems.append(f"{place}: {reason}must be {kind.allowed}")
    return tuple(values)


def _sound(text: str) -> str:
    """Refuse what no label and no line of a log could hold."""
    if not text:
        raise RefusedError("is empty")
    if len(text) > MAX_TEXT:
        raise RefusedError(f"is longer than {MAX_TEXT} characters")
    if not text.isprintable():  # so are surrogates: bytes of a variable that are no UTF-8
        raise RefusedError("holds characters that cannot be printed")
    return text


def suggest(key: str, known: Iterable[str]) -> str:
    """The known name that was meant, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(key[:MAX_SHOWN].replace("-", "_").replace(".", "_"), names, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"


def printable(text: str) -> str:
    """Text of the user on one line of bounded length."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:MAX_TEXT])
