from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporter.vllm import exposition
from exporter.vllm.exposition import (
    CacheConfig,
    Engine,
    ExpositionError,
    Histogram,
    Snapshot,
    increase,
    parse,
    progressed,
    restarted,
)
from exporter.vllm.startup import safe_model

FIXTURES = sorted((Path(__file__).parent / "expositions").glob("*.prom.gz"))
NAMES = [path.name.removesuffix(".prom.gz") for path in FIXTURES]
SCALARS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
}
HISTOGRAMS = {
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:iteration_tokens_total": "iteration_tokens",
}
MODEL = 'engine="0",model_name="tiny"'

# the same examples in every run; look further with FUZZ_EXAMPLES=100000
EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
FUZZ = settings(
    max_examples=int(EXAMPLES or 100),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

Found = list[tuple[str, dict[str, str], float]]


def fixture(name: str) -> bytes:
    """One exposition of the folder beside."""
    return gzip.decompress((Path(__file__).parent / "expositions" / f"{name}.prom.gz").read_bytes())


def theirs(text: str) -> Found:
    """Every sample as prometheus_client reads it. ValueError where it cannot."""
    found = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            try:
                value = float(sample.value)
            except OverflowError:  # it keeps whole numbers whole, however long they are
                value = math.inf if sample.value > 0 else -math.inf
            found.append((sample.name, dict(sample.labels), value))
    return found


def reference(samples: Found) -> Snapshot:
    """The snapshot that samples make, put together in the plainest way."""
    engines: dict[tuple[str, str | None], dict[str, Any]] = {}
    caches: dict[str, dict[str, str]] = {}
    start = None

    def of(labels: dict[str, str]) -> dict[str, Any]:
        key = (labels.get("engine", ""), safe_model(labels.get("model_name")))
        return engines.setdefault(key, {})

    for name, labels, value in samples:
        family, _, part = name.rpartition("_")
        if name == "process_start_time_seconds":
            start = value
        elif name == "vllm:gpu_cache_usage_perc":
            of(labels)["older"] = value
        elif name in SCALARS:
            of(labels)[SCALARS[name]] = value
        elif name == "vllm:request_success_total":
            of(labels).setdefault("finished", {})[labels["finished_reason"]] = value
        elif name == "vllm:engine_sleep_state":
            of(labels).setdefault("sleep", {})[labels["sleep_state"]] = value
        elif name == "vllm:cache_config_info":
            caches.setdefault(labels.get("engine", ""), {}).update(
                {name: text for name, text in labels.items() if text != "None"}
            )
        elif family in HISTOGRAMS and part in ("bucket", "count", "sum"):
            parts = of(labels).setdefault(HISTOGRAMS[family], {"bucket": {}})
            if part == "bucket":
                parts["bucket"][float(labels["le"])] = value
            else:
                parts[part] = value
    for engine in caches:
        if not any(one == engine for one, _ in engines) and (engine or not engines):
            engines[engine, None] = {}
    made = []
    in_order = sorted(engines.items(), key=lambda one: (len(one[0][0]), one[0][0], one[0][1] or ""))
    for (engine, model), values in in_order:
        if "older" in values:
            values.setdefault("kv_cache_usage", values["older"])
            del values["older"]
        for name in HISTOGRAMS.values():
            if parts := values.get(name):
                buckets = sorted(parts["bucket"].items())
                values[name] = Histogram(
                    tuple(bound for bound, _ in buckets),
                    tuple(count for _, count in buckets),
                    parts.get("count"),
                    parts.get("sum"),
                )
        cache = caches.get(engine, caches.get(""))
        made.append(Engine(engine, model, **values, cache=None if cache is None else reference_cache(cache)))
    return Snapshot(tuple(made), start)


def reference_cache(labels: dict[str, str]) -> CacheConfig:
    """The same labels, converted by what the fields of CacheConfig are."""
    convert: dict[str, Callable[[str], Any]] = {
        "float | None": float,
        "int | None": int,
        "str | None": str,
        "bool | None": lambda text: text == "True",
    }
    fields = CacheConfig.__dataclass_fields__
    return CacheConfig(**{n: convert[str(f.type)](labels[n]) for n, f in fields.items() if n in labels})


def plain(snapshot: Snapshot) -> Any:
    """The snapshot as plain data in which NaN equals itself."""

    def comparable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: comparable(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [comparable(one) for one in value]
        return "NaN" if isinstance(value, float) and math.isnan(value) else value

    return comparable(asdict(snapshot))


def one_engine(body: str) -> Engine:
    """The only engine of a body, all lines of which were read."""
    snapshot = parse(body.encode())
    assert snapshot.broken == 0
    (engine,) = snapshot.engines
    return engine


class TestRealExpositions:
    """What real and rendered expositions of every generation give."""

    @pytest.mark.parametrize("name", NAMES)
    def test_equal_to_prometheus_client(self, name: str) -> None:
        """Every wanted family has the values that prometheus_client's parser finds."""
        body = fixture(name)
        assert plain(parse(body)) == plain(reference(theirs(body.decode())))

    @pytest.mark.parametrize("name", NAMES)
    def test_in_any_order(self, name: str) -> None:
        """The order of the lines changes nothing but the order of the reasons."""
        body = fixture(name)
        backwards = b"".join(reversed(body.splitlines(keepends=True)))
        assert parse(backwards) == parse(body)

    def test_current(self) -> None:
        """All families of a server of today are there."""
        snapshot = parse(fixture("real_base_eager_after"))
        (engine,) = snapshot.engines
        assert (engine.engine, engine.model_name) == ("0", "tiny")
        assert (engine.running, engine.waiting, engine.kv_cache_usage) == (0, 0, 0)
        assert (engine.prompt_tokens, engine.generation_tokens, engine.preemptions) == (94, 32, 0)
        assert engine.finished == {"stop": 0, "length": 4, "abort": 0, "error": 0, "repetition": 0}
        assert engine.request_prompt_tokens is not None
        assert engine.request_prompt_tokens.bounds[-3:] == (10000, 20000, math.inf)
        assert engine.iteration_tokens is not None
        assert engine.iteration_tokens.total == 32
        assert engine.asleep is False
        assert engine.cache == CacheConfig(
            block_size=128, cache_dtype="auto", gpu_memory_utilization=0.92, num_gpu_blocks=16384,
            kv_cache_memory_bytes=1073741824, kv_cache_size_tokens=2097152, kv_cache_max_concurrency=64,
            enable_prefix_caching=False,
        )  # fmt: skip
        assert snapshot.process_start == 1796055894.04

    def test_several_engines(self) -> None:
        """With data parallelism every engine has its own series, and sums are over all."""
        snapshot = parse(fixture("real_dp2_clean_last_seen"))
        assert [one.engine for one in snapshot.engines] == ["0", "1"]
        assert [one.prompt_tokens for one in snapshot.engines] == [38117, 28175]
        assert all(one.cache is not None for one in snapshot.engines)
        assert snapshot.process_start is None
        assert (snapshot.running, snapshot.waiting, snapshot.kv_cache_usage) == (0, 0, 0)

    def test_v0(self) -> None:
        """V0 has no label engine, and its cache usage has the older name."""
        (engine,) = parse(fixture("synthetic_0.5.5_v0")).engines
        assert engine.engine == ""
        assert engine.model_name == "meta-llama/Llama-3.1-8B-Instruct"
        assert engine.kv_cache_usage == 0.118
        assert engine.iteration_tokens is None
        assert engine.sleep is None
        assert engine.asleep is None

    def test_statistics_are_off(self) -> None:
        """With --disable-log-stats no engine is known, but the start of the process is."""
        snapshot = parse(fixture("real_nostats_oom_mp_last_seen"))
        assert snapshot == Snapshot((), 1796059743.42)
        assert snapshot.running is None
        assert snapshot.kv_cache_usage is None


# --- expositions that try to confuse ------------------------------------------------------

blanks = st.sampled_from(["", "", "", " ", "\t", "  ", " \t "])
gaps = st.sampled_from([" ", " ", "\t", "  ", " \t", "\t "])
texts = st.text(
    st.one_of(
        st.sampled_from('\\"\n{}#,= \tn'),
        st.characters(codec="utf-8", exclude_characters="\0"),
    ),
    max_size=12,
)
numbers = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**30), 10**30).map(str),
    st.sampled_from(
        [
            "NaN",
            "+Inf",
            "-Inf",
            "Inf",
            "nan",
            "1e400",
            "-1e400",
            "9" * 400,
            "0" * 90 + "7",
            "1E+3",
            ".5",
            "5.",
            "+7",
        ]
    ),
)
bounds = st.sampled_from(["1.0", "1", "2048", "1e4", "+Inf", "0.5", "Inf", "16384.0"])
others = st.sampled_from(
    [
        "vllm:prompt_tokens_created", "vllm:prompt_tokens_total_created", "vllm:num_requests_waiting_by_reason",
        "vllm:num_requests_running_total", "xvllm:num_requests_running", "vllm:num_requests_runnin",
        "vllm:iteration_tokens_total", "vllm:iteration_tokens_total_created", "vllm:request_prompt_tokens_created",
        "vllm:request_success_created", "vllm:gpu_cache_usage_ratio", "vllm:cache_config", "vllm", "process_start_time",
        "process_start_time_seconds_x", "up", "vllm:prompt_tokens_cached_total",
    ]
)  # fmt: skip


def escaped(text: str) -> str:
    """A label value as the format wants it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def label_blocks(draw: st.DrawFn, labels: dict[str, str]) -> str:
    """Labels in any order with any blanks, a few foreign ones among them."""
    extra = draw(st.dictionaries(st.sampled_from(["note", "pid", "le_", "_x", "Engine"]), texts, max_size=2))
    pairs = draw(st.permutations(list((labels | extra).items())))
    if not pairs and draw(st.booleans()):
        return ""
    inside = ",".join(
        f'{draw(blanks)}{name}{draw(blanks)}={draw(blanks)}"{escaped(value)}"{draw(blanks)}'
        for name, value in pairs
    )
    return "{" + inside + (draw(st.sampled_from(["", ",", ", "])) if pairs else draw(blanks)) + "}"


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    """One sample of a wanted or of another family."""
    labels = {}
    if draw(st.booleans()):
        labels["engine"] = draw(st.sampled_from(["0", "1", "11", ""]))
    if draw(st.booleans()):
        labels["model_name"] = draw(
            st.one_of(st.sampled_from(["tiny", "a/b", "/data/m", "a}b", 'q"{x="1"} 5', "ü"]), texts)
        )
    kind = draw(st.sampled_from(["scalar", "scalar", "histogram", "finished", "sleep", "start", "other"]))
    if kind == "scalar":
        name = draw(st.sampled_from(list(SCALARS)))
    elif kind == "histogram":
        part = draw(st.sampled_from(["bucket", "bucket", "count", "sum"]))
        name = f"{draw(st.sampled_from(list(HISTOGRAMS)))}_{part}"
        if part == "bucket":
            labels["le"] = draw(bounds)
    elif kind == "finished":
        name, labels["finished_reason"] = (
            "vllm:request_success_total",
            draw(st.sampled_from(["stop", "error"])),
        )
    elif kind == "sleep":
        name, labels["sleep_state"] = (
            "vllm:engine_sleep_state",
            draw(st.sampled_from(["awake", "discard_all"])),
        )
    elif kind == "start":
        name = "process_start_time_seconds"
    else:
        name = draw(others)
    block = draw(label_blocks(labels))
    gap = draw(gaps) if not block else draw(blanks)
    tail = draw(
        st.sampled_from(
            ["", "", "", " 1796059743000", "\t-5", " 3 ", ' # {trace_id="a}b{"} 0.5', " # {} 1 2.5"]
        )
    )
    return f"{draw(blanks)}{name}{draw(blanks) if block else ''}{block}{gap}{draw(numbers)}{tail}"


comments = st.one_of(
    st.sampled_from(
        [
            "", " ", "#", "# ", "#vllm:num_requests_running 7", "# vllm:num_requests_running 7", "# EOF",
            '# HELP vllm:num_requests_running With "quotes", {braces} and \\n escapes \\\\ of "every kind',
            "# HELP vllm:prompt_tokens_total vllm:prompt_tokens_total 7", "# TYPE vllm:prompt_tokens_total counter",
            "# TYPE vllm:iteration_tokens_total histogram", "\t# TYPE vllm:request_prompt_tokens  histogram",
            "# TYPE vllm:kv_cache_usage_perc gauge", "# TYPE vllm:cache_config_info gauge", "# UNIT a b",
        ]
    ),
    texts.map(lambda text: "#x " + text.replace("\n", "").replace('"', "")),
)  # fmt: skip
documents = st.lists(st.one_of(sample_lines(), sample_lines(), comments), max_size=12)


class TestHostileExpositions:
    """The format allows much that vLLM does not write."""

    @FUZZ
    @given(documents, st.sampled_from(["\n", "\n", "\r\n", "\n\n"]))
    def test_equal_to_prometheus_client(self, lines: list[str], newline: str) -> None:
        """Whatever the format allows is read as prometheus_client reads it."""
        text = "".join(line + newline for line in lines)
        assert plain(parse(text.encode())) == plain(reference(theirs(text)))

    @FUZZ
    @given(st.text('{}",=\\#\t n0159.+-eIaé_', max_size=14))
    def test_never_another_value(self, rest: str) -> None:
        """Where a damaged line is read at all, it is not read otherwise than prometheus_client does."""
        line = f"vllm:num_requests_running{rest}\n"
        snapshot = parse(line.encode())
        assert len(snapshot.engines) + snapshot.broken <= 1
        if snapshot.engines:
            try:
                expected = reference(theirs(line))
            except ValueError:
                assert "#" in rest or "__" in rest  # it knows no exemplars, and reserves some names
            else:
                assert plain(snapshot) == plain(expected)

    @FUZZ
    @given(st.binary(max_size=200), st.sampled_from(FIXTURES), st.randoms(use_true_random=False))
    def test_any_bytes(self, garbage: bytes, path: Path, random: Any) -> None:
        """Any bytes anywhere give a snapshot or an ExpositionError of one line."""
        body = gzip.decompress(path.read_bytes())[:20_000]
        at = random.randrange(len(body))
        for one in (garbage, body[:at] + garbage + body[at:], body[:at] + garbage):
            try:
                problem = f"{parse(one).broken} broken"
            except ExpositionError as error:
                problem = str(error)
            assert "\n" not in problem

    @pytest.mark.parametrize(
        "line",
        [
            "vllm:num_requests_running 5",
            "vllm:num_requests_running\t5",
            "  vllm:num_requests_running   5  ",
            "vllm:num_requests_running 5\r",
            "vllm:num_requests_running{} 5",
            "vllm:num_requests_running{ } 5",
            "vllm:num_requests_running {}5",
            'vllm:num_requests_running{a="b"}5',
            'vllm:num_requests_running{a="b",} 5',
            'vllm:num_requests_running { a = "b" , c = "d" , } 5 1796059743000',
            'vllm:num_requests_running{a="="} 5',
            'vllm:num_requests_running{a="a=",b="}"} 5.0e0',
            'vllm:num_requests_running{"a.b"="c"} 5',
            "vllm:num_requests_running 5 # {} 1",
            'vllm:num_requests_running 5 17 # {trace_id="x y"} 1 17.5',
            'vllm:num_requests_running{a="\\x"} 5',
        ],
    )
    def test_in_the_format(self, line: str) -> None:
        """These ways to write a sample are all in the format."""
        assert parse(f"{line}\n".encode()) == Snapshot((Engine("", None, running=5.0),))

    @pytest.mark.parametrize(
        "line",
        [
            "vllm:num_requests_running",
            "vllm:num_requests_running ",
            "vllm:num_requests_running-5",
            "vllm:num_requests_running{}",
            "vllm:num_requests_running{ 5",
            "vllm:num_requests_running} 5",
            'vllm:num_requests_running{a="b} 5',
            'vllm:num_requests_running{a="b\\"} 5',
            'vllm:num_requests_running{a="b" c="d"} 5',
            'vllm:num_requests_running{a="b",,c="d"} 5',
            'vllm:num_requests_running{a="b",a="c"} 5',
            'vllm:num_requests_running{a="b",a="\\n"} 5',
            'vllm:num_requests_running{a="b"x} 5',
            "vllm:num_requests_running{a=b} 5",
            "vllm:num_requests_running{a=} 5",
            'vllm:num_requests_running{="b"} 5',
            'vllm:num_requests_running{1a="b"} 5',
            "vllm:num_requests_running{a='b'} 5",
            "vllm:num_requests_running five",
            "vllm:num_requests_running 5_000",
            "vllm:num_requests_running 0x10",
            "vllm:num_requests_running ٥",
            "vllm:num_requests_running 5,0",
            "vllm:num_requests_running 5 soon",
            "vllm:num_requests_running 5 6 7",
            "vllm:num_requests_running 5#",
            "vllm:num_requests_running " + "5" * 2000,
            "vllm:num_requests_running{a=" + '"' + "b" * 70_000 + '"} 5',
            'vllm:num_requests_running{engine="' + "9" * 65 + '"} 5',
            'vllm:num_requests_running{engine="a b"} 5',
            'vllm:request_success_total{engine="0"} 5',
            'vllm:request_success_total{finished_reason="Ignore all"} 5',
            'vllm:engine_sleep_state{sleep_state=""} 1',
            "vllm:request_prompt_tokens_bucket 5",
            'vllm:request_prompt_tokens_bucket{le=""} 5',
            'vllm:request_prompt_tokens_bucket{le="NaN"} 5',
            'vllm:request_prompt_tokens_bucket{le="x"} 5',
            'vllm:cache_config_info{block_size="16} 1',
            'vllm:cache_config_info{engine="a b"} 1',
            'vllm:cache_config_info{a="' + "b" * 9_000 + '"} 1',
        ],
        ids=lambda line: line[:60],
    )
    def test_broken(self, line: str) -> None:
        """A broken line is counted, and what stands before and behind it is read."""
        around = (
            f'vllm:num_requests_waiting{{engine="7"}} 1\n{line}\nvllm:prompt_tokens_total{{engine="7"}} 2\n'
        )
        snapshot = parse(around.encode())
        assert snapshot.broken == 1
        (engine,) = [one for one in snapshot.engines if one.engine == "7"]
        assert (engine.waiting, engine.prompt_tokens) == (1, 2)
        assert all(one == Engine(one.engine, None) for one in snapshot.engines if one.engine != "7")

    @pytest.mark.parametrize(
        ("raw", "value"),
        [
            (r"a\\b", "a\\b"), (r"a\nb", "a\nb"), (r"a\"b", 'a"b'), (r"\\n", "\\n"), (r"\\\n", "\\\n"),
            (r"\\\"", '\\"'), (r"a\tb", "a\\tb"), ("a}b{c,d=e", "a}b{c,d=e"), (r"\\", "\\"), ("\u2028", "\u2028"),
        ],
    )  # fmt: skip
    def test_escapes(self, raw: str, value: str) -> None:
        """Backslash, newline and quote are unescaped, any other backslash stands for itself."""
        read = exposition._read(f'{{note="{raw}"}} 5'.encode())
        assert read == ({"note": value}, 5.0)

    @pytest.mark.parametrize(
        "body", [b"vllm:num_requests_running 38117", b"x 1\nvllm:num_requests_running{} 38117"]
    )
    def test_cut_off(self, body: bytes) -> None:
        """A last line without its newline is not read, since its number may go on."""
        assert parse(body) == Snapshot(broken=1)
        assert parse(body + b"\n").engines[0].running == 38117

    def test_series_twice(self) -> None:
        """Where a series is there twice, the last line counts."""
        assert one_engine("vllm:num_requests_running 1\nvllm:num_requests_running 2\n").running == 2

    def test_odd_values(self) -> None:
        """NaN and the infinities are values, but make no sums."""
        snapshot = parse(
            b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_running{engine="1"} 1\n'
            b'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
            b'vllm:num_requests_waiting{engine="0"} +Inf\nvllm:num_requests_waiting{engine="1"} 1e999\n'
        )
        assert [one.waiting for one in snapshot.engines] == [math.inf, math.inf]
        assert math.isnan(snapshot.engines[0].running or 0)
        assert (snapshot.running, snapshot.waiting, snapshot.kv_cache_usage) == (None, None, 0.25)

    @pytest.mark.parametrize(
        ("awake", "offloaded", "discarded", "asleep"),
        [(1, 0, 0, False), (0, 1, 0, True), (0, 0, 1, True), (0, 0, 0, False)],
    )
    def test_asleep(self, awake: int, offloaded: int, discarded: int, asleep: bool) -> None:
        """Either level of sleep is sleep."""
        states = {"awake": awake, "weights_offloaded": offloaded, "discard_all": discarded}
        lines = [
            f'vllm:engine_sleep_state{{sleep_state="{state}"}} {value}\n' for state, value in states.items()
        ]
        assert one_engine("".join(lines)).asleep is asleep

    @pytest.mark.parametrize("name", ["x" * 200, "a\nb", '"', "{}", "<script>", "\u202e"])
    def test_unfit_model_names(self, name: str) -> None:
        """A model name that is too long or has odd characters is not kept, its values are."""
        engine = one_engine(f'vllm:num_requests_running{{model_name="{escaped(name)}"}} 3\n')
        assert (engine.model_name, engine.running) == (None, 3)


class TestLimits:
    """A body that is no exposition is refused, and an exposition cannot grow what is kept."""

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"up 1\n\0", "NUL"),
            (b"up 1\n\xff\xfe\n", "UTF-8"),
            ("é".encode()[:1], "UTF-8"),
            (b"\r\n <!DOCTYPE html><html>", "web page"),
            (gzip.compress(b"up 1\n"), "NUL"),
            (bytes(exposition.MAX_BODY + 1), "larger than 32 MiB"),
            (b"vllm:num_requests_running 1\n" * 100_001, "more than 100,000 lines"),
        ],
        ids=["NUL", "UTF-8", "half", "html", "gzip", "size", "samples"],
    )
    def test_refused(self, body: bytes, says: str) -> None:
        """The error says in one line what is wrong."""
        with pytest.raises(ExpositionError, match=says) as caught:
            parse(body)
        assert "\n" not in str(caught.value)

    def test_characters_across_steps_of_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Text is checked in steps, and a character may lie across two of them."""
        monkeypatch.setattr(exposition, "_CHECKED_AT_ONCE", 5)
        assert parse("# äöüß€\nvllm:num_requests_running 2\n".encode()).running == 2

    def test_engines(self) -> None:
        """At most 512 engines are kept; the lines of others count as broken."""
        lines = "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(600))
        lines += "".join(f'vllm:cache_config_info{{engine="{n}",block_size="16"}} 1\n' for n in range(600))
        snapshot = parse(lines.encode())
        assert (len(snapshot.engines), snapshot.broken) == (512, 176)

    def test_slow_lines(self) -> None:
        """Of lines that need the slow reader, some megabytes are read; the others count as broken."""
        line = b'vllm:num_requests_running{a="' + b"\\\\" * 25_000 + b'"} 1\n'
        snapshot = parse(line * 100 + b"vllm:num_requests_waiting 2\n")
        assert (snapshot.running, snapshot.waiting, snapshot.broken) == (1, 2, 17)

    def test_buckets_and_reasons(self) -> None:
        """At most 128 buckets and 32 reasons are kept."""
        letters = [chr(97 + n // 26) + chr(97 + n % 26) for n in range(40)]
        lines = "".join(f'vllm:request_prompt_tokens_bucket{{le="{n}"}} 1\n' for n in range(200))
        lines += "".join(f'vllm:request_success_total{{finished_reason="{n}"}} 1\n' for n in letters)
        snapshot = parse(lines.encode())
        (engine,) = snapshot.engines
        assert engine.request_prompt_tokens is not None
        assert engine.finished is not None
        assert (len(engine.request_prompt_tokens.bounds), len(engine.finished)) == (128, 32)
        assert snapshot.broken == 72 + 8
        assert snapshot.size == 20 + 2 * 128

    @pytest.mark.parametrize(
        "body",
        [
            b"\n" * 4_000_000,
            b"\n " * 2_000_000,
            b" " * 4_000_000 + b"\n",
            b"\n\t" + b" " * 4_000_000 + b"vllm:num_requests_running 1\n",
            b"vllm:num_requests_running{" + b'a="b",' * 700_000 + b"} 1\n",
            b'vllm:num_requests_running{a="' + b'\\"' * 2_000_000 + b"\n",
            b"vllm:num_requests_running" + b"{" * 4_000_000 + b"\n",
            b"vllm:num_requests_running " + b"1" * 4_000_000 + b"\n",
            b"vllm:" * 800_000 + b"\n",
            b"\nvllm:num_requests_running" * 90_000,
        ],
        ids=lambda body: repr(body[:30]),
    )
    def test_takes_no_longer_than_its_length(self, body: bytes) -> None:
        """No text makes the expressions go back and forth: megabytes end soon."""
        assert parse(body).broken <= 90_000


class TestCacheConfig:
    """``vllm:cache_config_info`` carries its values in labels."""

    def test_none_is_unknown(self) -> None:
        """'None', a missing label and a value of another type are all unknown."""
        engine = one_engine(
            'vllm:cache_config_info{engine="0",num_gpu_blocks="None",block_size="16",cache_dtype="None",'
            'sliding_window="many",gpu_memory_utilization="inf",enable_prefix_caching="true",'
            'swap_space_bytes="4294967296.0",cpu_offload_gb="0"} 1.0\n'
        )
        assert engine == Engine(
            "0", None, cache=CacheConfig(block_size=16, swap_space_bytes=2**32, cpu_offload_gb=0)
        )

    def test_known_later(self) -> None:
        """A second series of the same engine adds what became known."""
        engine = one_engine(
            'vllm:cache_config_info{num_gpu_blocks="900",block_size="16"} 1\n'
            'vllm:cache_config_info{num_gpu_blocks="None",cache_dtype="fp8_e4m3"} 1\n'
            'vllm:cache_config_info{num_gpu_blocks="1"} 0\n'
        )
        assert engine.cache == CacheConfig(num_gpu_blocks=900, block_size=16, cache_dtype="fp8_e4m3")

    def test_belongs_to_its_engine(self) -> None:
        """It has no model name, and without the label engine it is that of all engines."""
        series = f"vllm:num_requests_running{{{MODEL}}} 1\n"
        assert one_engine(
            series + 'vllm:cache_config_info{engine="0",block_size="8"} 1\n'
        ).cache == CacheConfig(8)
        assert one_engine(series + 'vllm:cache_config_info{block_size="8"} 1\n').cache == CacheConfig(8)


class TestHistogram:
    """What a histogram with foreign bounds can say."""

    HISTOGRAM = Histogram((1000, 2000, 5000, math.inf), (3, 5, 8, 9), 9, 20_000)

    @pytest.mark.parametrize(
        ("tokens", "count"),
        [(0, 6), (1001, 6), (1002, 4), (2000, 4), (2001, 4), (2002, 1), (5001, 1), (5002, 0)],
    )
    def test_at_least(self, tokens: int, count: int) -> None:
        """A bucket that straddles the limit is not counted, whole numbers decide at its edge."""
        assert self.HISTOGRAM.at_least(tokens) == count

    def test_without_a_count(self) -> None:
        """The bucket without a bound stands for a missing count; without both nothing is known."""
        assert replace(self.HISTOGRAM, count=None).total == 9
        assert Histogram((1.0,), (3.0,), None, None).total is None
        assert Histogram((1.0,), (3.0,), None, None).at_least(1) is None
        assert Histogram((), (), 3.0, 5.0).at_least(1) == 0


def server(
    tokens: float | None = 100.0, start: float | None = 1000.0, engine: str = "0", **more: Any
) -> Snapshot:
    """A server with one engine."""
    return Snapshot((Engine(engine, "tiny", prompt_tokens=tokens, **more),), start)


def joined(snapshots: Iterable[Snapshot]) -> Snapshot:
    """A server with the engines of several."""
    return Snapshot(tuple(engine for one in snapshots for engine in one.engines), 1000.0)


class TestIncrease:
    """Counters between two snapshots, never across a restart."""

    def test_real_server(self) -> None:
        """Between two scrapes of a real server everything rises by what it served."""
        before, after = parse(fixture("real_base_eager_before")), parse(fixture("real_base_eager_after"))
        rise = increase(before, after)
        assert rise is not None
        assert (rise.prompt_tokens, rise.generation_tokens, rise.preemptions) == (94, 32, 0)
        assert rise.finished == {"stop": 0, "length": 4, "abort": 0, "error": 0, "repetition": 0}
        assert rise.request_prompt_tokens is not None
        assert rise.request_prompt_tokens.total == 4
        assert rise.request_prompt_tokens.at_least(51) == 0
        assert rise.request_prompt_tokens.at_least(20) == 4
        assert rise.iteration_tokens is not None
        assert rise.iteration_tokens.sum == 126

    def test_sums_engines(self) -> None:
        """Rises are summed over engines, or taken of one."""
        before = joined([server(10, engine="0"), server(100, engine="1")])
        after = joined([server(11, engine="0"), server(140, engine="1")])
        total, one = increase(before, after), increase(before, after, engine="1")
        assert total is not None
        assert one is not None
        assert (total.prompt_tokens, one.prompt_tokens) == (41, 40)
        assert total.generation_tokens is None

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (server(100, start=1000.0), server(500, start=2000.0)),
            (server(100, start=1000.0), server(500, start=None)),
            (server(100, start=None), server(99, start=None)),
            (server(100, finished={"stop": 5.0}), server(100, finished={"stop": 4.0})),
            (
                server(100, iteration_tokens=Histogram((1.0, math.inf), (5.0, 6.0), 6.0, 9.0)),
                server(100, iteration_tokens=Histogram((1.0, math.inf), (4.0, 6.0), 6.0, 9.0)),
            ),
            (joined([server(10), server(10, engine="1")]), joined([server(20), server(9, engine="1")])),
        ],
        ids=["start", "start-gone", "counter", "reason", "bucket", "one-of-two"],
    )
    def test_restart(self, before: Snapshot, after: Snapshot) -> None:
        """Another process start or any counter that fell is a restart, and gives nothing."""
        assert restarted(before, after)
        assert increase(before, after) is None

    def test_series_that_appear(self) -> None:
        """A series that appears in a known process began at zero; in an unknown one it says nothing."""
        histogram = Histogram((1.0, math.inf), (2.0, 3.0), 3.0, 50.0)
        late: dict[str, Any] = {"finished": {"stop": 2.0}, "request_prompt_tokens": histogram}
        known = increase(server(None), server(30, **late))
        assert known is not None
        assert (known.prompt_tokens, known.finished, known.request_prompt_tokens) == (
            30,
            {"stop": 2},
            histogram,
        )
        unknown = increase(server(None, start=None), server(30, start=None, **late))
        assert unknown is not None
        assert (unknown.prompt_tokens, unknown.finished, unknown.request_prompt_tokens) == (None, None, None)
        doubtful = increase(replace(server(None), broken=1), server(30, **late))
        assert doubtful is not None
        assert (doubtful.prompt_tokens, doubtful.finished) == (None, None)

    def test_reasons_come_one_by_one(self) -> None:
        """V0 writes a reason only once there is a request that ended so."""
        rise = increase(server(finished={"stop": 1.0}), server(finished={"stop": 2.0, "length": 3.0}))
        assert rise is not None
        assert rise.finished == {"stop": 1, "length": 3}

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (server(100), server(None)),
            (server(100), server(math.nan)),
            (server(math.nan), server(100)),
            (server(100), server(math.inf)),
            (joined([server(10), server(10, engine="1")]), joined([server(20)])),
        ],
        ids=["gone", "nan", "was-nan", "inf", "engine-gone"],
    )
    def test_unknown(self, before: Snapshot, after: Snapshot) -> None:
        """What cannot be known is None, not a guess."""
        rise = increase(before, after)
        assert rise is not None
        assert rise.prompt_tokens is None

    def test_other_bounds(self) -> None:
        """Histograms with different bounds are not compared."""
        before = server(iteration_tokens=Histogram((1.0, math.inf), (2.0, 3.0), 3.0, 50.0))
        after = server(iteration_tokens=Histogram((1.0, 8.0, math.inf), (2.0, 4.0, 4.0), 4.0, 60.0))
        rise = increase(before, after)
        assert rise is not None
        assert rise.iteration_tokens is None

    @pytest.mark.parametrize(
        ("before", "after", "expected"),
        [
            (server(100), server(101), True),
            (server(100), server(100), False),
            (server(100), server(100, generation_tokens=1.0), True),
            (server(100), server(math.nan), False),
            (server(100), server(5, start=2000.0), True),
            (server(100), server(0, start=2000.0), False),
            (server(100), Snapshot((), 1000.0), False),
            (server(100), server(100, start=None), False),
            (server(100, start=None), server(7, start=None), True),
            (server(None), server(1), True),
            (
                joined([server(10), server(10, engine="1")]),
                joined([server(10), server(11, engine="1")]),
                True,
            ),
        ],
    )
    def test_progressed(self, before: Snapshot, after: Snapshot, expected: bool) -> None:
        """A token of any engine is progress; after a restart, any token is."""
        assert progressed(before, after) is expected
