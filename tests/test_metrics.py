from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter import metrics
from exporter.diagnosis.knowledge import CLASS_IDS, builtin_classes
from exporter.metrics import TABLE, StatusCollector, make_registry, reference
from exporter.records import Life
from exporter.sources.stream import SourceStats
from exporter.status import Counts, LastIncident, Status, TargetStatus

# The names that dashboards and rules rely on; a change here is a breaking change.
CONTRACT = [
    "vllm_oom_incidents_total",
    "vllm_oom_fatal_incidents_total",
    "vllm_oom_error_lines_total",
    "vllm_oom_near_misses_total",
    "vllm_oom_fingerprint_stage",
    "vllm_oom_fingerprint_matches_total",
    "vllm_oom_last_incident_timestamp_seconds",
    "vllm_oom_last_incident_requested_bytes",
    "vllm_oom_last_incident_free_bytes",
    "vllm_oom_last_incident_step_tokens",
    "vllm_oom_last_incident_longest_prompt_tokens",
    "vllm_oom_last_incident_kv_cache_usage_ratio",
    "vllm_oom_last_incident_confidence_ratio",
    "vllm_oom_engine_info",
    "vllm_oom_engine_state",
    "vllm_oom_engine_starts_total",
    "vllm_oom_engine_start_timestamp_seconds",
    "vllm_oom_max_num_batched_tokens",
    "vllm_oom_previous_max_num_batched_tokens",
    "vllm_oom_max_model_len_tokens",
    "vllm_oom_max_num_seqs",
    "vllm_oom_gpu_memory_utilization_ratio",
    "vllm_oom_setting_changed_timestamp_seconds",
    "vllm_oom_gpu_memory_bytes",
    "vllm_oom_gpu_capacity_bytes",
    "vllm_oom_largest_step_tokens",
    "vllm_oom_long_prompts_total",
    "vllm_oom_budget_risk",
    "vllm_oom_headroom_bytes",
    "vllm_oom_recommended_max_num_batched_tokens",
    "vllm_oom_trigger_pvalue",
    "vllm_oom_trigger_rank_ratio",
    "vllm_oom_trigger_events",
    "vllm_oom_trigger_control_windows",
    "vllm_oom_trigger_verdict",
    "vllm_oom_confirmation",
    "vllm_oom_confirmation_exposures",
    "vllm_oom_confirmation_exposures_needed",
    "vllm_oom_probe_state",
    "vllm_oom_probe_largest_step_tokens",
    "vllm_oom_probe_full_steps",
    "vllm_oom_probe_duration_seconds",
    "vllm_oom_budget_ready",
    "vllm_oom_target_up",
    "vllm_oom_target_scrape_duration_seconds",
    "vllm_oom_target_followed",
    "vllm_oom_exporter_failures_total",
    "vllm_oom_log_lines_total",
    "vllm_oom_log_read_bytes_total",
    "vllm_oom_log_read_errors_total",
    "vllm_oom_log_lines_truncated_total",
    "vllm_oom_log_lag_bytes",
    "vllm_oom_log_last_line_timestamp_seconds",
    "vllm_oom_log_rotations_total",
    "vllm_oom_node_containers",
    "vllm_oom_notifications_total",
    "vllm_oom_state_write_failures_total",
    "vllm_oom_config_last_reload_successful",
    "vllm_oom_exporter_build_info",
]

# untyped in the client library
parse_openmetrics: Callable[[str], Iterable[Metric]] = openmetrics_parser.text_string_to_metric_families


def filled_target() -> TargetStatus:
    """A server that ran out of memory once while serving, read from one file."""
    life = Life(
        index=1,
        settings={
            "max_num_batched_tokens": 16384,
            "max_model_len": 32768,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": "auto",
        },
        memory={"weights_bytes": 15 << 30, "kv_cache_bytes": 40 << 30, "total_bytes": 84986665370},
        vllm_version="0.32.0",
        model="example-org/dense-14b",
        state="dead",
        fingerprint={"info": True, "warn": False, "error": True},
    )
    return TargetStatus(
        name="default",
        counts=Counts(
            incidents=Counter({("prefill_budget", "serving"): 1, ("weights_load", "startup"): 2}),
            fatal=Counter({"prefill_budget": 1, "weights_load": 2}),
            error_lines=14,
            near_misses=3,
            long_prompts=41,
            engine_starts=2,
            fingerprints=Counter({"without_warn": 1}),
            lines=Counter({("/var/log/vllm/*.log", "parsed"): 1000, ("/var/log/vllm/*.log", "unparsed"): 7}),
            read_bytes=Counter({"/var/log/vllm/*.log": 123456}),
            read_errors=Counter({"/var/log/vllm/*.log": 1}),
        ),
        last={
            "prefill_budget": LastIncident(
                timestamp=1796056006.0,
                requested_bytes=4112435118,
                free_bytes=2265595248,
                step_tokens=16384,
                longest_prompt_tokens=30000,
                kv_cache_usage_ratio=0.118,
                confidence_ratio=0.8,
            ),
            "weights_load": LastIncident(timestamp=1796050000.5, confidence_ratio=1.0),
        },
        life=life,
        previous=Life(index=0, settings={"max_num_batched_tokens": 2048}),
        engine_state="dead",
        engine_start_timestamp=1796055988.0,
        setting_changed={"max_num_batched_tokens": 1796055988.0},
        sources=[SourceStats("/var/log/vllm/*.log", opened=True, lag_bytes=512)],
        last_line_timestamp={"/var/log/vllm/*.log": 1796056007.25},
        scrape_up=False,
        scrape_seconds=0.004,
        largest_step_tokens=16384,
        recommended_budget=4096,
        trigger={
            "verdict": "supports",
            "events": 4,
            "effective_events": 3,
            "control_windows": 30,
            "prompt_length": {"pvalue": 0.0003, "rank_ratio": 0.98},
            "request_rate": {"pvalue": 0.41, "rank_ratio": 0.55},
        },
        confirmation={"state": "accruing", "exposures": 12, "exposures_needed": 35},
        risk={"state": "exceeded", "reasons": ["…"], "headroom_bytes": -123456},
        probe={"state": "failed", "life": 1, "seconds": 8.5, "steps": {"largest_tokens": 12000, "full": 0}},
    )


def filled() -> Status:
    """An exporter of one target, all of it known."""
    return Status(
        targets=[filled_target()],
        state_write_failures=1,
        notifications=Counter({("alertmanager", "delivered"): 1, ("alertmanager", "failed"): 2}),
        ready=True,
    )


def hostile() -> Status:
    """One engine of which everything that can be wrong or endless is."""
    evil = 'a"b\\c\nd\r\x00\x1b[31m\udcff\u2028' + "é" * 5000
    endless = [f"{evil}{i}" for i in range(500)]
    life = Life(
        index=0,
        settings={
            **dict.fromkeys(endless, 1),
            "max_num_batched_tokens": 10**400,
            "max_model_len": math.inf,
            "max_num_seqs": evil,
            "gpu_memory_utilization": math.nan,
        },
        memory={**dict.fromkeys(endless, 1), "total_bytes": 10**400, "weights_bytes": 5},
        model=evil,
        vllm_version=evil,
        fingerprint={evil: True},
    )
    last = LastIncident(1.0, 1, 1, 1, 1, 1.0, 1.0)
    return Status(
        targets=[
            TargetStatus(
                name=evil,
                labels={**dict.fromkeys(endless, evil), "target": evil, "pod": evil},
                counts=Counts(
                    incidents=Counter({(one, evil): 1 for one in endless}),
                    fatal=Counter(endless),
                    error_lines=-5,
                    fingerprints=Counter(endless),
                    lines=Counter({(one, "parsed"): 1 for one in endless}),
                    read_bytes=Counter(dict.fromkeys(endless, 2)),
                    truncated=Counter(endless),
                    read_errors=Counter(endless),
                    rotations=Counter({(one, kind): 1 for one in endless for kind in ("rename", one)}),
                ),
                last={**dict.fromkeys(endless, last), **dict.fromkeys(CLASS_IDS, last)},
                life=life,
                previous=life,
                engine_state=evil,
                engine_start_timestamp=math.nan,
                setting_changed={**dict.fromkeys(endless, 1.0), **dict.fromkeys(metrics._CHANGEABLE, 1.0)},
                sources=[SourceStats(one) for one in endless],
                last_line_timestamp=dict.fromkeys(endless, 1.0),
                scrape_up=True,
                scrape_seconds=1.0,
                largest_step_tokens=1,
                recommended_budget=1,
            )
        ],
        notifications=Counter({(one, two): 1 for one in endless for two in ("delivered", evil)}),
    )


def text_of(status: Status) -> str:
    """The text exposition of a status, without what the process adds."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry).decode()


def series(status: Status) -> dict[str, float]:
    """Every series of a status, as ``name{labels}``, with its value."""
    pairs = (line.rpartition(" ") for line in text_of(status).splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def samples(families: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, without those of the process, which differ from one look to the next."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
        if not one.name.startswith("process_")
    }


def test_the_table_covers_the_contract_exactly() -> None:
    """Every name that others rely on is in the table, none twice, and no other is."""
    names = [family.name for family in TABLE]
    assert sorted(names) == sorted(CONTRACT)


def test_names_follow_the_conventions() -> None:
    """Counters end in _total, infos in _info, units are the suffix, and every family has a sentence."""
    for family in TABLE:
        assert re.fullmatch(r"vllm_oom_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.type == "counter")
        assert family.name.endswith("_info") == (family.type == "info")
        assert family.name.removesuffix("_total").endswith(family.unit)
        assert family.help.endswith(".")
        assert "\n" not in family.help


def test_every_valid_pair_is_there_at_zero_before_anything_happened() -> None:
    """A new target has 35 incident and 24 fatal counters at 0, so that the first increase is seen."""
    found = series(Status(targets=[TargetStatus("default")]))
    pairs = {
        f'vllm_oom_incidents_total{{class="{class_id}",phase="{phase}"}}'
        for class_id, known in builtin_classes().items()
        for phase in known.phases
    }
    assert len(pairs) == 35
    assert {name for name in found if name.startswith("vllm_oom_incidents_total")} == pairs
    fatal = {f'vllm_oom_fatal_incidents_total{{class="{one}"}}' for one in CLASS_IDS}
    assert {name for name in found if name.startswith("vllm_oom_fatal_incidents_total")} == fatal
    assert {found[name] for name in pairs | fatal} == {0.0}


def test_unknown_gauges_are_absent() -> None:
    """Of a target that nothing is known of there are counters, states that say so, and nothing else."""
    found = series(Status(targets=[TargetStatus("default")]))
    families = {name.partition("{")[0] for name in found}
    assert families == {
        "vllm_oom_incidents_total",
        "vllm_oom_fatal_incidents_total",
        "vllm_oom_error_lines_total",
        "vllm_oom_near_misses_total",
        "vllm_oom_fingerprint_matches_total",
        "vllm_oom_engine_state",
        "vllm_oom_engine_starts_total",
        "vllm_oom_long_prompts_total",
        "vllm_oom_budget_risk",
        "vllm_oom_probe_state",
        "vllm_oom_trigger_events",
        "vllm_oom_trigger_control_windows",
        "vllm_oom_trigger_verdict",
        "vllm_oom_confirmation",
        "vllm_oom_target_followed",
        "vllm_oom_exporter_failures_total",
        "vllm_oom_state_write_failures_total",
        "vllm_oom_config_last_reload_successful",
        "vllm_oom_exporter_build_info",
    }
    assert found['vllm_oom_engine_state{state="unknown"}'] == 1.0


def test_of_a_target_that_is_not_followed() -> None:
    """Whatever is still known of it is not of now, so only that it is not followed is shown."""
    status = filled()
    before = series(status)
    status.targets[0].followed, status.targets[0].exporter_failures = False, 3
    found = {
        name: value for name, value in series(status).items() if name not in before or before[name] != value
    }
    gone = {name.partition("{")[0] for name in before} - {name.partition("{")[0] for name in series(status)}
    assert found == {"vllm_oom_target_followed": 0.0, "vllm_oom_exporter_failures_total": 3.0}
    assert gone == {one.name for one in metrics.TARGET_TABLE if not one.always}


def test_a_gauge_vanishes_with_what_it_was_read_from() -> None:
    """Values are read when asked for, so a gauge whose fact is gone is gone too."""
    status = filled()
    assert series(status)["vllm_oom_target_up"] == 0.0
    assert series(status)["vllm_oom_max_num_batched_tokens"] == 16384.0
    status.targets[0].scrape_up = None
    status.targets[0].life = None
    after = series(status)
    assert "vllm_oom_target_up" not in after
    assert "vllm_oom_max_num_batched_tokens" not in after
    assert "vllm_oom_fingerprint_stage" not in after


def test_a_filled_status_reads_as_before(
    golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole exposition of a filled status is the golden file."""
    monkeypatch.setattr(metrics, "__version__", "1.2.3")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.0")
    golden("metrics.txt", text_of(filled()))


@pytest.mark.parametrize(
    ("info", "warn", "error", "stage"),
    [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 1), (1, 1, 0, 2), (1, 0, 1, 3), (1, 1, 1, 3)],
)
def test_fingerprint_stage(info: int, warn: int, error: int, stage: int) -> None:
    """Stages count from the budget line on; a failure completes the pattern with or without warning."""
    status = filled()
    assert status.targets[0].life is not None
    status.targets[0].life.fingerprint = {"info": bool(info), "warn": bool(warn), "error": bool(error)}
    assert series(status)["vllm_oom_fingerprint_stage"] == stage


@pytest.mark.parametrize(
    ("model", "version", "shown"),
    [
        ("org/model-7B", "0.32.0", 'model_name="org/model-7B",vllm_version="0.32.0"'),
        ("/data/models/secret-customer/m", "0.11.2.dev278+gdbc3d9991", 'model_name="m",vllm_version="0.11.2.dev278+gdbc3d9991"'),
        ("x" * 121, "0.32.0", 'model_name="",vllm_version="0.32.0"'),
        ('m"\n', "0." + "1" * 80, None),
        ("m", "latest; rm", 'model_name="m",vllm_version=""'),
        (None, None, None),
    ],
)  # fmt: skip
def test_engine_info_is_checked(model: str | None, version: str | None, shown: str | None) -> None:
    """Model and version are labels only where they look like what they are; a path loses its folders."""
    target = TargetStatus("default", life=Life(index=0, model=model, vllm_version=version))
    found = [name for name in series(Status(targets=[target])) if "engine_info" in name]
    assert found == ([] if shown is None else [f"vllm_oom_engine_info{{{shown}}}"])


def test_several_targets_carry_their_labels() -> None:
    """Series of a target carry its labels and only known ones; those of the exporter carry none."""
    one, two = filled_target(), filled_target()
    one.labels = {"namespace": "ns", "pod": "p-0", "container": "vllm", "uid": "not a label of ours"}
    two.labels = {"target": "b"}
    found = series(Status(targets=[one, two]))
    where = 'container="vllm",namespace="ns",pod="p-0"'
    assert found[f"vllm_oom_near_misses_total{{{where}}}"] == 3.0
    assert found['vllm_oom_near_misses_total{target="b"}'] == 3.0
    assert found["vllm_oom_state_write_failures_total"] == 0.0
    assert not any("uid" in name for name in found)


def test_sources_beyond_the_cap_are_summed_up() -> None:
    """With more sources than get labels of their own, the rest is one series and nothing is lost."""
    names = [f"/log/{i}" for i in range(10)]
    target = TargetStatus(
        "default",
        counts=Counts(
            read_bytes=Counter(dict.fromkeys([*names, "/from/an/older/configuration"], 10)),
            read_errors=Counter(names),
        ),
        sources=[SourceStats(name, lag_bytes=i) for i, name in enumerate(names)],
    )
    found = series(Status(targets=[target]))
    read = {name: value for name, value in found.items() if "log_read_bytes_total" in name}
    assert read == {
        **{f'vllm_oom_log_read_bytes_total{{source="/log/{i}"}}': 10.0 for i in range(5)},
        'vllm_oom_log_read_bytes_total{source="other"}': 60.0,
    }
    assert found['vllm_oom_log_lag_bytes{source="other"}'] == 9.0
    assert found['vllm_oom_log_read_errors_total{source="other"}'] == 5.0


def test_hostile_values_stay_within_400_series() -> None:
    """Whatever the status holds, one engine has at most 400 series."""
    found = [line for line in generate_latest(make_registry(hostile())).splitlines() if line[:1] != b"#"]
    assert 300 < len(found) <= 400
    assert len(found) == len({line.rpartition(b" ")[0] for line in found})
    assert not any(b"nan" in line.lower() or b"inf" in line.rpartition(b" ")[2].lower() for line in found)
    assert all(len(line) < 4096 for line in found)


@pytest.mark.parametrize("status", [Status(), filled(), hostile()], ids=["empty", "filled", "hostile"])
def test_both_formats_parse(status: Status) -> None:
    """Text and OpenMetrics parse to the same samples, and there is no _created among them."""
    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    text = samples(parse_text(generate_latest(make_registry(status)).decode()))
    openmetrics = samples(parse_openmetrics(encode(make_registry(status)).decode()))
    assert text == openmetrics
    assert not any(name.endswith("_created") for name, _ in text)


@pytest.mark.parametrize("status", [Status(), filled(), hostile()], ids=["empty", "filled", "hostile"])
def test_promtool_finds_nothing(status: Status) -> None:
    """'promtool check metrics' has nothing to say about what we expose."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing; 'apt-get install prometheus' brings it"
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(make_registry(status)), capture_output=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_reference_lists_every_family() -> None:
    """The table for the README has one row a family, in order, and none for what is not there yet."""
    head, rule, *rows = reference().splitlines()
    assert head == "| Metric | Type | Labels | Meaning |"
    assert rule == "| --- | --- | --- | --- |"
    assert [row.split("`")[1] for row in rows] == [family.name for family in TABLE]
    assert all(row.count("|") - row.count("\\|") == 5 for row in rows)
    assert "| `vllm_oom_incidents_total` | counter | `class`, `phase` | Memory incidents" in rows[0]
