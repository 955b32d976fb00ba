"""vLLM's ``/metrics``: reads the few families that the diagnosis needs, and passes over the rest.

A server exposes hundreds to thousands of lines, the sidecar wants some sixty of them every two
seconds, and it shares its cores with the server. So no line is looked at but those whose exact
name is wanted: one regular expression runs over the whole body, and only what it does not
recognise at once (escapes, timestamps, odd blanks) is read token by token.

What to know of the families (0.2.7..0.33.0):

* ``vllm:kv_cache_usage_perc`` (0.9.2 on) and ``vllm:gpu_cache_usage_perc`` (..0.11.2) are
  fractions from 0 to 1 despite their names.
* ``vllm:iteration_tokens_total`` is a histogram despite its name, and books whole prompts in the
  step of their first token: it is no measure of step sizes.
* ``vllm:request_prompt_tokens`` is observed when a request ends, so the prompt that killed the
  engine is never in it. Its bounds depend on the model and, from 0.32, on the user.
* ``…_created`` is a time, not a value: names are compared whole, never by how they begin.
* The label ``engine`` came with 0.8.3; V0 creates a series only at its first observation.
* With several API servers there is no ``process_start_time_seconds``.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, 0.0.4).
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from .startup import safe_model

MAX_BODY = 32 * 1024 * 1024
"""Bytes of one exposition; 512 engines make some 20 MiB."""

MAX_SAMPLES = 100_000
MAX_ENGINES = 512
MAX_BUCKETS = 128
_MAX_REASONS = 32
_MAX_LINE = 65_536
_MAX_NUMBER = 1024
_MAX_CACHED = 512
_MAX_CACHE_LINE = 8192
_MAX_SLOW = 4 * 1024 * 1024  # bytes read token by token, half a second; real ones stay below 0.7 MB
_CHECKED_AT_ONCE = 1 << 20


class ExpositionError(ValueError):
    """A body that is no exposition, or too large for one; the message is one line."""


# --- what is read -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Histogram:
    """One histogram as exposed. Observations are tokens.

    ``bounds`` are the upper bounds in rising order, the last usually ``inf``; ``counts`` parallels
    them and is cumulative. ``count`` and ``sum`` are None where their line is missing.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    count: float | None
    sum: float | None

    @property
    def total(self) -> float | None:
        """All observations: ``count``, else the bucket without a bound."""
        if self.count is None and self.bounds and self.bounds[-1] == math.inf:
            return self.counts[-1]
        return self.count

    def at_least(self, tokens: float) -> float | None:
        """How many observations are known to be of ``tokens`` or more; None without a total.

        Observations are whole numbers. A bucket that straddles ``tokens`` is not counted.
        """
        total = self.total
        if total is None:
            return None
        for bound, below in zip(self.bounds, self.counts, strict=True):
            if bound >= tokens - 1:
                return max(total - below, 0.0)
        return 0.0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """``vllm:cache_config_info``: None where the label is missing or says ``None``.

    ``gpu_memory_utilization`` is a fraction, ``swap_space_bytes`` and ``kv_cache_memory_bytes``
    are bytes, ``kv_cache_size_tokens`` tokens, ``cpu_offload_gb`` GiB as configured.
    """

    block_size: int | None = None
    cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    num_gpu_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    enable_prefix_caching: bool | None = None
    sliding_window: int | None = None
    cpu_offload_gb: float | None = None
    swap_space_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """The series of one engine; None where the family is missing.

    ``engine`` is ``""`` where vLLM sets no such label (V0), ``model_name`` None where there is
    none or it is not fit to be shown. ``kv_cache_usage`` is a fraction from 0 to 1. ``finished``
    counts requests by ``finished_reason``. ``sleep`` has 0 or 1 for every ``sleep_state``.
    Values are as exposed, so they can be NaN or infinite.
    """

    engine: str
    model_name: str | None
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    finished: Mapping[str, float] | None = None
    request_prompt_tokens: Histogram | None = None
    iteration_tokens: Histogram | None = None
    cache: CacheConfig | None = None
    sleep: Mapping[str, float] | None = None

    @property
    def asleep(self) -> bool | None:
        """Whether the engine gave its memory back on purpose; None where vLLM does not say."""
        if self.sleep is None:
            return None
        return any(value == 1 for state, value in self.sleep.items() if state != "awake")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One exposition. ``engines`` are in the order of their labels.

    ``process_start`` is in seconds since the epoch. ``broken`` counts lines of wanted families
    that could not be read: not in the format, or a label that no vLLM writes.
    """

    engines: tuple[Engine, ...] = ()
    process_start: float | None = None
    broken: int = 0

    @property
    def running(self) -> float | None:
        """Requests in execution, over all engines."""
        return _sum(engine.running for engine in self.engines)

    @property
    def waiting(self) -> float | None:
        """Requests waiting, over all engines."""
        return _sum(engine.waiting for engine in self.engines)

    @property
    def kv_cache_usage(self) -> float | None:
        """The fullest KV cache of all engines, from 0 to 1."""
        known = [e.kv_cache_usage for e in self.engines if e.kv_cache_usage is not None]
        return max((one for one in known if not math.isnan(one)), default=None)

    @property
    def size(self) -> int:
        """About how many numbers are kept, for whoever keeps many snapshots."""
        histograms = (h for e in self.engines for h in (e.request_prompt_tokens, e.iteration_tokens))
        return 20 * len(self.engines) + sum(2 * len(h.bounds) for h in histograms if h is not None)


# --- names --------------------------------------------------------------------------------

_HISTOGRAMS = ("request_prompt_tokens", "iteration_tokens")
_COUNTERS = ("prompt_tokens", "generation_tokens", "preemptions")

# how a sample is stored, and under which name
_SCALAR, _BUCKET, _FINISHED, _SLEEP, _CACHE, _START = range(6)

_START_NAME = b"process_start_time_seconds"
_TARGETS: dict[bytes, tuple[int, str]] = {
    _START_NAME: (_START, ""),
    b"vllm:num_requests_running": (_SCALAR, "running"),
    b"vllm:num_requests_waiting": (_SCALAR, "waiting"),
    b"vllm:kv_cache_usage_perc": (_SCALAR, "kv_cache_usage"),
    b"vllm:gpu_cache_usage_perc": (_SCALAR, "gpu_cache_usage"),
    b"vllm:num_preemptions_total": (_SCALAR, "preemptions"),
    b"vllm:prompt_tokens_total": (_SCALAR, "prompt_tokens"),
    b"vllm:generation_tokens_total": (_SCALAR, "generation_tokens"),
    b"vllm:request_success_total": (_FINISHED, ""),
    b"vllm:request_prompt_tokens_bucket": (_BUCKET, "request_prompt_tokens"),
    b"vllm:request_prompt_tokens_count": (_SCALAR, "request_prompt_tokens_count"),
    b"vllm:request_prompt_tokens_sum": (_SCALAR, "request_prompt_tokens_sum"),
    b"vllm:iteration_tokens_total_bucket": (_BUCKET, "iteration_tokens"),
    b"vllm:iteration_tokens_total_count": (_SCALAR, "iteration_tokens_count"),
    b"vllm:iteration_tokens_total_sum": (_SCALAR, "iteration_tokens_sum"),
    b"vllm:engine_sleep_state": (_SLEEP, ""),
    b"vllm:cache_config_info": (_CACHE, ""),
}


def _names() -> bytes:
    """The wanted names of vLLM as an expression that decides at their first letter."""
    by_letter: dict[bytes, list[bytes]] = {}
    for name in sorted(name.removeprefix(b"vllm:") for name in _TARGETS if name != _START_NAME):
        by_letter.setdefault(name[:1], []).append(name[1:])
    return b"vllm:(?:%s)" % b"|".join(
        b"%s(?:%s)" % (letter, b"|".join(rest)) for letter, rest in by_letter.items()
    )


def _lines(before: bytes) -> tuple[re.Pattern[bytes], ...]:
    """Expressions for wanted lines: name, then either plain labels and a number, or all the rest.

    Each begins with the newline before the line and a literal name, which lets ``re`` hop from
    line to line; possessive quantifiers keep it linear whatever is in a line.
    """
    rest = rb")(?:(?:\{([^\n\\{}]*+)\})?+[ \t]++([-+.0-9a-zA-Z]{1,64}+)\r?+(?=\n)|(?![a-zA-Z0-9_:])([^\n]*+))"
    return tuple(re.compile(rb"\n" + before + b"(" + name + rest) for name in (_names(), _START_NAME))


_LINES = _lines(b"")
_INDENTED_LINES = _lines(rb"[ \t]*+")  # three times as slow
_INDENTED = re.compile(rb"\n[ \t]")
_PLAIN_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*+)="([^"]*+)"(?:,|\Z)')
_BLANKS = re.compile(r"[ \t]*+")
_LABEL = re.compile(
    r'[ \t]*+(?:([a-zA-Z_:][a-zA-Z0-9_:]*+)|"((?:[^"\\]|\\.)*+)")[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+'
)
# The number, perhaps a timestamp, perhaps an exemplar (OpenMetrics). Python's float() would also
# take 1_000 and the digits of any script.
_VALUE = re.compile(
    r"[ \t]*+([-+.0-9a-zA-Z]++)(?:[ \t]++([-+.0-9a-zA-Z]++))?+(?:[ \t]++#.*+)?+[ \t\r]*+", re.DOTALL
)
_ESCAPE = re.compile(r'\\[\\n"]')
_UNESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}
_ENGINE = re.compile(r"[\w.:-]{0,64}", re.ASCII)
_REASON = re.compile(r"[a-z_]{1,32}")


# --- parsing ------------------------------------------------------------------------------


def parse(body: bytes) -> Snapshot:
    """Read one exposition.

    A line that cannot be read is counted and passed over, as is a last line without its newline:
    a body that was cut off ends in half a number. Where a series is there twice, the last counts.
    Raises ExpositionError for a body that is too large, is not UTF-8 text, is a web page, or has
    more than ``MAX_SAMPLES`` lines of the wanted families.
    """
    _check_text(body)
    builder = _Builder()
    first = body.find(b"\n") + 1 or len(body)
    for text in (b"\n" + body[:first], body):  # the expressions want a newline before the name
        for lines in _INDENTED_LINES if _INDENTED.search(text) else _LINES:
            for match in lines.finditer(text):
                builder.add(match)
    return builder.snapshot()


def _check_text(body: bytes) -> None:
    if len(body) > MAX_BODY:
        raise ExpositionError(f"the answer is larger than {MAX_BODY >> 20} MiB")
    if b"\0" in body:
        raise ExpositionError("the answer is not text: it has NUL bytes")
    if not body.isascii():
        decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(body)
        try:
            for at in range(0, len(body), _CHECKED_AT_ONCE):
                decoder.decode(view[at : at + _CHECKED_AT_ONCE])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise ExpositionError("the answer is not text in UTF-8") from None
    if body[:256].lstrip().startswith(b"<"):
        raise ExpositionError("the answer is a web page, not metrics")


class _Place(NamedTuple):
    """Where a sample belongs, as its labels say. ``key`` is the engine and its model."""

    key: tuple[str, str | None]
    bound: float | None
    reason: str | None
    sleep_state: str | None


def _placed(labels: Mapping[str, str]) -> _Place | None:
    """The place that labels give; None where they hold what no vLLM writes."""
    engine = labels.get("engine", "")
    reason, state = labels.get("finished_reason"), labels.get("sleep_state")
    if not _ENGINE.fullmatch(engine) or not all(
        _REASON.fullmatch(s) for s in (reason, state) if s is not None
    ):
        return None
    bound = _number(labels.get("le", ""))
    known = bound is not None and not math.isnan(bound)
    return _Place((engine, safe_model(labels.get("model_name"))), bound if known else None, reason, state)


def _number(text: str | bytes) -> float | None:
    """A number of the format, or None."""
    if len(text) > _MAX_NUMBER:
        return None
    try:
        return float(text)
    except ValueError:
        return None


@lru_cache(maxsize=2048)
def _plain(raw: bytes) -> _Place | None:
    """The place that a plain label text gives, or None where it is not plain or no such place.

    Kept, because a server writes the same texts with every answer.
    """
    labels: dict[str, str] = {}
    at = 0
    for match in _PLAIN_LABEL.finditer(raw):
        if match.start() != at:
            return None
        at = match.end()
        labels[match[1].decode()] = match[2].decode()
    return _placed(labels) if at == len(raw) and len(labels) == raw.count(b'="') else None


def _read(rest: bytes) -> tuple[dict[str, str], float] | None:
    """Labels and value of what follows a name, token by token; None where it is not in the format."""
    if len(rest) > _MAX_LINE:
        return None
    text = rest.decode()
    labels: dict[str, str] = {}
    at = _after_blanks(text, 0)
    if text.startswith("{", at):
        at += 1
        while match := _LABEL.match(text, at):
            name = match[1] if match[1] is not None else _unescaped(match[2])
            if name in labels:
                return None
            labels[name] = _unescaped(match[3])
            at = match.end()
            if not text.startswith(",", at):
                break
            at += 1
        at = _after_blanks(text, at)
        if not text.startswith("}", at):
            return None
        at += 1
    elif not at:
        return None
    found = _VALUE.fullmatch(text, at)
    if found is None:
        return None
    value = _number(found[1])
    if value is None or (found[2] is not None and _number(found[2]) is None):
        return None
    return labels, value


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _unescaped(text: str) -> str:
    """A label value without its escapes. Any other backslash stands for itself."""
    return _ESCAPE.sub(lambda found: _UNESCAPED[found[0]], text) if "\\" in text else text


@dataclass(slots=True)
class _Series:
    """What is collected of one engine."""

    scalars: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    sleep: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: {name: {} for name in _HISTOGRAMS})

    def histogram(self, name: str) -> Histogram | None:
        """One histogram, or None where it has no line."""
        buckets = self.buckets[name]
        count, total = self.scalars.get(f"{name}_count"), self.scalars.get(f"{name}_sum")
        if not buckets and count is None and total is None:
            return None
        bounds = tuple(sorted(buckets))
        return Histogram(bounds, tuple([buckets[bound] for bound in bounds]), count, total)


class _Builder:
    """Collects the samples of one exposition."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str | None], _Series] = {}
        self._caches: dict[str, CacheConfig] = {}
        self._start: float | None = None
        self._broken = 0
        self._samples = 0
        self._slow = 0

    def add(self, match: re.Match[bytes]) -> None:
        """Store one wanted line, or count it as broken."""
        self._samples += 1
        if self._samples > MAX_SAMPLES:
            raise ExpositionError(f"the answer has more than {MAX_SAMPLES:,} lines of vLLM's metrics")
        name, raw, number, rest = match.groups(b"")
        kind, attribute = _TARGETS[name]
        if number and kind != _CACHE and len(raw) <= _MAX_CACHED:
            place, value = _plain(raw), _number(number)
            if place is not None and value is not None:
                self._broken += not self._store(kind, attribute, place, value)
                return
        elif rest and match.end() == len(match.string):
            self._broken += 1  # without its newline a line may have lost half of its number
            return
        line = match.string[match.end(1) : match.end()]
        self._slow += len(line)
        if self._slow > _MAX_SLOW:
            self._broken += 1
            return
        if kind == _CACHE:
            self._broken += not self._add_cache(line)
            return
        read = _read(line)
        place = None if read is None else _placed(read[0])
        if read is None or place is None or not self._store(kind, attribute, place, read[1]):
            self._broken += 1

    def _store(self, kind: int, name: str, place: _Place, value: float) -> bool:
        """Store one sample; False where a label is missing or there is no room."""
        if kind == _START:
            self._start = value
            return True
        series = self._engines.get(place.key)
        if series is None:
            if len(self._engines) >= MAX_ENGINES:
                return False
            series = self._engines[place.key] = _Series()
        if kind == _BUCKET:
            return _put(series.buckets[name], place.bound, value, MAX_BUCKETS)
        if kind == _SCALAR:
            series.scalars[name] = value
            return True
        if kind == _FINISHED:
            return _put(series.finished, place.reason, value, _MAX_REASONS)
        return _put(series.sleep, place.sleep_state, value, _MAX_REASONS)

    def _add_cache(self, line: bytes) -> bool:
        read = _cache_line(line) if len(line) <= _MAX_CACHE_LINE else None
        if read is None or (read[0] not in self._caches and len(self._caches) >= MAX_ENGINES):
            return False
        # a value that becomes known makes a second series: what is known stays known
        engine, fields = read
        self._caches[engine] = replace(self._caches.get(engine, CacheConfig()), **fields)
        return True

    def snapshot(self) -> Snapshot:
        """What was collected."""
        keys = set(self._engines)
        named = {engine for engine, _ in keys}
        if named - {""}:
            named.add("")  # a configuration without an engine is then that of all of them
        keys |= {(engine, None) for engine in self._caches if engine not in named}
        order = sorted(keys, key=lambda key: (len(key[0]), key[0], key[1] or ""))
        return Snapshot(tuple(self._frozen(*key) for key in order), self._start, self._broken)

    def _frozen(self, engine: str, model: str | None) -> Engine:
        series = self._engines.get((engine, model)) or _Series()
        scalar = series.scalars.get
        usage = scalar("kv_cache_usage")
        return Engine(
            engine,
            model,
            running=scalar("running"),
            waiting=scalar("waiting"),
            kv_cache_usage=scalar("gpu_cache_usage") if usage is None else usage,
            preemptions=scalar("preemptions"),
            prompt_tokens=scalar("prompt_tokens"),
            generation_tokens=scalar("generation_tokens"),
            finished=series.finished or None,
            request_prompt_tokens=series.histogram("request_prompt_tokens"),
            iteration_tokens=series.histogram("iteration_tokens"),
            cache=self._caches.get(engine) or self._caches.get(""),
            sleep=series.sleep or None,
        )


_Key = TypeVar("_Key", str, float)


def _put(values: dict[_Key, float], key: _Key | None, value: float, most: int) -> bool:
    """Set ``key``; False where it is None, or new and there is no room."""
    if key is None or (key not in values and len(values) >= most):
        return False
    values[key] = value
    return True


@lru_cache(maxsize=256)
def _cache_line(line: bytes) -> tuple[str, Mapping[str, Any]] | None:
    """The engine and the known fields of one line of ``vllm:cache_config_info``; None if broken."""
    read = _read(line)
    place = None if read is None else _placed(read[0])
    if read is None or place is None:
        return None
    labels = read[0] if read[1] == 1 else {}
    fields = {name: convert(labels.get(name, "None")) for name, convert in _CACHE_FIELDS.items()}
    return place.key[0], {name: value for name, value in fields.items() if value is not None}


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _finite(text: str) -> float | None:
    value = _number(text) if re.fullmatch(r"[-+.0-9e]{1,64}", text) else None
    return value if value is not None and math.isfinite(value) else None


def _word(text: str) -> str | None:
    return text if text != "None" and re.fullmatch(r"[\w.-]{1,64}", text, re.ASCII) else None


def _boolean(text: str) -> bool | None:
    return {"True": True, "False": False}.get(text)


_CACHE_FIELDS: dict[str, Callable[[str], Any]] = {
    "block_size": _integer,
    "cache_dtype": _word,
    "gpu_memory_utilization": _finite,
    "num_gpu_blocks": _integer,
    "num_gpu_blocks_override": _integer,
    "kv_cache_memory_bytes": _integer,
    "kv_cache_size_tokens": _integer,
    "kv_cache_max_concurrency": _finite,
    "enable_prefix_caching": _boolean,
    "sliding_window": _integer,
    "cpu_offload_gb": _finite,
    "swap_space_bytes": _finite,
}


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known and all(map(math.isfinite, known)) else None


# --- two snapshots of one server ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Increase:
    """How far the counters of one server rose between two snapshots, all engines together.

    None where a family is missing or its rise cannot be known. In the histograms ``counts`` are
    the rises of the cumulative buckets.
    """

    prompt_tokens: float | None
    generation_tokens: float | None
    preemptions: float | None
    finished: Mapping[str, float] | None
    request_prompt_tokens: Histogram | None
    iteration_tokens: Histogram | None


def increase(before: Snapshot, after: Snapshot, engine: str | None = None) -> Increase | None:
    """The rise of every counter from ``before`` to ``after``, or None across a restart.

    ``engine`` limits it to one engine. A series that is only in ``after`` began at zero if both
    snapshots name the same process start and ``before`` was read without a broken line (V0
    creates a series at its first observation); otherwise its rise is not known.
    """
    if restarted(before, after):
        return None
    fresh = before.process_start is not None and not before.broken
    rises: dict[str, dict[float | str, float]] = {}
    for old, new in _pairs(before, after):
        if engine is not None and new.engine != engine:
            continue
        then, now = _counters(old), _counters(new)
        for family in then.keys() | now.keys():
            earlier, later = then.get(family, {}), now.get(family, {})
            # only reasons come one by one; a histogram that gains a bound is another histogram
            begun = fresh and (not earlier or family == "finished")
            rise = rises.setdefault(family, {})
            for key in earlier.keys() | later.keys():
                one = later.get(key, math.nan) - earlier.get(key, 0.0 if begun else math.nan)
                rise[key] = rise.get(key, 0.0) + one
    known = {family: rise for family, rise in rises.items() if all(map(math.isfinite, rise.values()))}
    return Increase(
        prompt_tokens=known.get("prompt_tokens", {}).get(""),
        generation_tokens=known.get("generation_tokens", {}).get(""),
        preemptions=known.get("preemptions", {}).get(""),
        finished={str(reason): value for reason, value in known.get("finished", {}).items()} or None,
        request_prompt_tokens=_as_histogram(known.get("request_prompt_tokens")),
        iteration_tokens=_as_histogram(known.get("iteration_tokens")),
    )


def restarted(before: Snapshot, after: Snapshot) -> bool:
    """Whether vLLM started anew in between: another process start, or a counter that fell."""
    if before.process_start != after.process_start:
        return True
    for old, new in _pairs(before, after):
        then, now = _counters(old), _counters(new)
        for family in then.keys() & now.keys():
            later = now[family]
            if any(later.get(key, value) < value for key, value in then[family].items()):
                return True
    return False


def progressed(before: Snapshot, after: Snapshot) -> bool:
    """Whether any engine read or wrote a token since ``before``, also across a restart."""
    starts = {before.process_start, after.process_start}
    new_process = len(starts) == 2 and None not in starts
    return any(
        now is not None and now > 0 and (new_process or now != then)  # less than before: a restart
        for old, new in _pairs(before, after)
        for then, now in (
            (old.prompt_tokens, new.prompt_tokens),
            (old.generation_tokens, new.generation_tokens),
        )
    )


def _pairs(before: Snapshot, after: Snapshot) -> Iterator[tuple[Engine, Engine]]:
    """Every engine of either snapshot, then and now; an engine without series stands for a missing one."""
    then = {(one.engine, one.model_name): one for one in before.engines}
    now = {(one.engine, one.model_name): one for one in after.engines}
    for key in then | now:
        yield then.get(key) or Engine(*key), now.get(key) or Engine(*key)


def _counters(engine: Engine) -> dict[str, dict[float | str, float]]:
    """All that only rises: family, then reason, bound or part, then value."""
    found: dict[str, dict[float | str, float]] = {
        name: {"": value} for name in _COUNTERS if (value := getattr(engine, name)) is not None
    }
    if engine.finished:
        found["finished"] = dict(engine.finished.items())
    for name in _HISTOGRAMS:
        histogram: Histogram | None = getattr(engine, name)
        if histogram is not None:
            found[name] = dict(zip(histogram.bounds, histogram.counts, strict=True))
            parts = {"count": histogram.count, "sum": histogram.sum}
            found[name] |= {part: value for part, value in parts.items() if value is not None}
    return found


def _as_histogram(rise: Mapping[float | str, float] | None) -> Histogram | None:
    if rise is None:
        return None
    bounds = tuple(sorted(key for key in rise if isinstance(key, float)))
    return Histogram(bounds, tuple(rise[one] for one in bounds), rise.get("count"), rise.get("sum"))
