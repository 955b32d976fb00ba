"""The only place with metric names: one table, from which exposition and reference come.

A ``Status`` is rendered when it is asked for, into a registry of its own: counters are there at
zero from the first scrape on (``increase`` does not see a series that is born at 1), gauges are
left out while unknown, and no state is kept here that could go stale. Whatever the status holds,
label values stay in closed sets or are checked and capped, so one engine never yields more than
400 series.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector

from . import __version__
from .diagnosis.engine import budget, memory_of
from .diagnosis.knowledge import CLASS_IDS, builtin_classes
from .records import Life
from .status import ENGINE_STATES, NOTIFICATION_RESULTS, LastIncident, Status, TargetStatus, unready
from .vllm.startup import FLAGS, SETTINGS, safe_model

TARGET_LABELS = ("namespace", "pod", "container", "target")
MAX_SOURCES = 6
MAX_RECEIVERS = 4
MAX_LABEL = 256
OTHER = "other"  # sums up what is beyond MAX_SOURCES and MAX_RECEIVERS

Of = TypeVar("Of", TargetStatus, Status)
Values = Iterable[tuple[tuple[str, ...], object]]
"""Label values in the order of the family's labels, and a number; anything else is left out."""

Labels = tuple[tuple[str, str], ...]
Samples = dict[Labels, float]

_VERSION = re.compile(r"v?\d[0-9A-Za-z.+!_-]{0,63}")
_RESULTS = ("parsed", "unparsed")
_ROTATIONS = ("rename", "truncate", "reopen")
_FORMS = ("full", "without_warn")
RISKS = ("unknown", "comfortable", "tight", "unexercised", "exceeded")
VERDICTS = ("insufficient", "descriptive", "supports", "contradicts", "mixed")
CONFIRMATIONS = ("none", "accruing", "confirmed", "refuted", "confounded")
PROBES = ("none", "running", "survived", "failed", "unfinished", "skipped")
_COVARIATES = ("prompt_length", "request_rate")
_CONTAINERS = ("vllm", "other", "undecided", "unreadable", "left_out")
_CHANGEABLE = tuple(sorted({*SETTINGS.values(), *FLAGS.values(), "vllm_version"}))
_PARTS = {
    "weights": "weights_bytes",
    "peak_activation": "peak_activation_bytes",
    "non_torch": "non_torch_bytes",
    "cuda_graphs": "cuda_graph_bytes",
    "kv_cache": "kv_cache_bytes",
}


@dataclass(frozen=True, slots=True)
class Family(Generic[Of]):
    """One metric: its name as exposed, and how its values are read from a status.

    ``unit`` is the suffix of the name that OpenMetrics calls the unit, or empty. ``always``: also
    shown of a target that is not followed.
    """

    name: str
    type: Literal["counter", "gauge", "info"]
    help: str
    values: Callable[[Of], Values]
    labels: tuple[str, ...] = ()
    unit: str = ""
    always: bool = False

    def read(self, common: Labels, of: Of, into: Samples) -> None:
        """Take the values as of now; two series of the same labels become one."""
        lowest = 0.0 if self.type == "counter" else -math.inf
        for values, raw in self.values(of):
            number = _number(raw, lowest)
            if number is None:
                continue
            key = common + tuple(zip(self.labels, map(_label, values), strict=True))
            if key in into:
                both = into[key], number
                number = sum(both) if self.type == "counter" else max(both)
            into[key] = number

    def metric(self, samples: Samples) -> Metric:
        """The family with what was read."""
        suffix = {"counter": "_total", "info": "_info", "gauge": ""}[self.type]
        metric = Metric(self.name.removesuffix(suffix), self.help, self.type, self.unit)
        for key, number in samples.items():
            metric.add_sample(self.name, dict(key), number)
        return metric


def _number(raw: object, lowest: float) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    try:
        number = float(raw)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= lowest else None


def _label(text: str) -> str:
    """``text`` as one short line that encodes: no control characters, no lone surrogates."""
    text = text[:MAX_LABEL]
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


# --- readers of a target ------------------------------------------------------------------


def _one(raw: object) -> Values:
    return [((), raw)]


def _pairs(target: TargetStatus) -> Values:
    for class_id, known in builtin_classes().items():
        for phase in known.phases:
            yield (class_id, phase), target.counts.incidents[class_id, phase]


def _last(field: Callable[[LastIncident], object]) -> Callable[[TargetStatus], Values]:
    def values(target: TargetStatus) -> Values:
        return [((one,), field(target.last[one])) for one in CLASS_IDS if one in target.last]

    return values


def _stage(target: TargetStatus) -> Values:
    if target.life is None:
        return []
    info, warn, error = (target.life.fingerprint.get(one, False) for one in ("info", "warn", "error"))
    stage = (3 if error else 2 if warn else 1) if info else 0
    return _one(stage)


def _engine_info(target: TargetStatus) -> Values:
    model = safe_model(target.life.model) if target.life else None
    version = target.life.vllm_version if target.life else None
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        version = None
    return [((model or "", version or ""), 1)] if model or version else []


def _engine_state(target: TargetStatus) -> Values:
    state = target.engine_state if target.engine_state in ENGINE_STATES else "unknown"
    return [((one,), int(one == state)) for one in ENGINE_STATES]


def _of_life(read: Callable[[Life], object]) -> Callable[[TargetStatus], Values]:
    return lambda target: [] if target.life is None else _one(read(target.life))


def _setting(name: str) -> Callable[[TargetStatus], Values]:
    return _of_life(lambda life: life.settings.get(name))


def _of_states(
    document: Literal["trigger", "confirmation", "risk", "probe"],
    field: str,
    states: tuple[str, ...],
    unknown: str,
) -> Callable[[TargetStatus], Values]:
    def values(target: TargetStatus) -> Values:
        state = (getattr(target, document) or {}).get(field)
        now = state if state in states else unknown
        return [((one,), int(one == now)) for one in states]

    return values


def _covariates(field: str) -> Callable[[TargetStatus], Values]:
    def values(target: TargetStatus) -> Values:
        for name in _COVARIATES:
            found = (target.trigger or {}).get(name)
            if isinstance(found, Mapping):
                yield (name,), found.get(field)

    return values


def _probed(field: str) -> Callable[[TargetStatus], Values]:
    def values(target: TargetStatus) -> Values:
        found = (target.probe or {}).get("steps")
        return _one(found.get(field)) if isinstance(found, Mapping) else []

    return values


def _memory(target: TargetStatus) -> Values:
    parts = memory_of(target.life) if target.life else {}
    return [((part,), parts.get(name)) for part, name in _PARTS.items()]


def _sources(target: TargetStatus) -> Iterator[tuple[str, str]]:
    """Sources and the label each has: configured ones first, then those only counters know of."""
    counts = target.counts
    known = [one.name for one in target.sources]
    of_pairs = (source for source, _ in (*counts.lines, *counts.rotations))
    known += sorted({*counts.read_bytes, *counts.truncated, *counts.read_errors, *of_pairs})
    names = list(dict.fromkeys(known))
    alone = len(names) if len(names) <= MAX_SOURCES else MAX_SOURCES - 1
    for at, name in enumerate(names):
        yield name, name if at < alone else OTHER


def _by_source(read: Callable[[TargetStatus, str], object]) -> Callable[[TargetStatus], Values]:
    return lambda target: [((label,), read(target, name)) for name, label in _sources(target)]


def _lines(target: TargetStatus) -> Values:
    for name, label in _sources(target):
        for result in _RESULTS:
            yield (label, result), target.counts.lines[name, result]


def _rotations(target: TargetStatus) -> Values:
    for name, label in _sources(target):
        for kind in _ROTATIONS:
            yield (label, kind), target.counts.rotations[name, kind]


def _lag(target: TargetStatus) -> Values:
    labels = dict(_sources(target))
    return [((labels[stats.name],), stats.lag_bytes) for stats in target.sources]


# --- readers of the exporter itself -------------------------------------------------------


def _notifications(status: Status) -> Values:
    receivers = sorted({receiver for receiver, _ in status.notifications})
    alone = len(receivers) if len(receivers) <= MAX_RECEIVERS else MAX_RECEIVERS - 1
    for at, receiver in enumerate(receivers):
        for result in NOTIFICATION_RESULTS:
            yield (receiver if at < alone else OTHER, result), status.notifications[receiver, result]


def _containers(status: Status) -> Values:
    return [((one,), (status.node_containers or {}).get(one)) for one in _CONTAINERS]


# --- the table ----------------------------------------------------------------------------

TARGET_TABLE: tuple[Family[TargetStatus], ...] = (
    Family(
        "vllm_oom_incidents_total", "counter",
        "Memory incidents by cause and phase. One failure of the engine is one incident, however many "
        "ranks and requests repeat it.",
        _pairs, ("class", "phase"),
    ),
    Family(
        "vllm_oom_fatal_incidents_total", "counter",
        "Memory incidents that killed the engine or kept it from starting.",
        lambda target: [((one,), target.counts.fatal[one]) for one in CLASS_IDS], ("class",),
    ),
    Family(
        "vllm_oom_error_lines_total", "counter",
        "Log lines that report a memory failure, before they are grouped into incidents.",
        lambda target: _one(target.counts.error_lines),
    ),
    Family(
        "vllm_oom_near_misses_total", "counter",
        "Allocations that failed once and succeeded after the allocator emptied its cache.",
        lambda target: _one(target.counts.near_misses),
    ),
    Family(
        "vllm_oom_fingerprint_stage", "gauge",
        "How far the log of this engine life matches the prefill-budget pattern: 0 none, 1 budget line, "
        "2 budget line and memory warning, 3 memory failure after the budget line.",
        _stage,
    ),
    Family(
        "vllm_oom_fingerprint_matches_total", "counter",
        "Engine lives whose log completed the prefill-budget pattern, with or without the memory warning.",
        lambda target: [((form,), target.counts.fingerprints[form]) for form in _FORMS], ("form",),
    ),
    Family(
        "vllm_oom_last_incident_timestamp_seconds", "gauge",
        "When the newest incident of the class happened, in seconds since the epoch.",
        _last(lambda last: last.timestamp), ("class",), "seconds",
    ),
    Family(
        "vllm_oom_last_incident_requested_bytes", "gauge",
        "Size of the allocation that failed in the newest incident of the class.",
        _last(lambda last: last.requested_bytes), ("class",), "bytes",
    ),
    Family(
        "vllm_oom_last_incident_free_bytes", "gauge",
        "Free device memory that the failing allocation found in the newest incident of the class.",
        _last(lambda last: last.free_bytes), ("class",), "bytes",
    ),
    Family(
        "vllm_oom_last_incident_step_tokens", "gauge",
        "Tokens scheduled in the failing step of the newest incident of the class.",
        _last(lambda last: last.step_tokens), ("class",), "tokens",
    ),
    Family(
        "vllm_oom_last_incident_longest_prompt_tokens", "gauge",
        "Longest prompt in the failing step of the newest incident of the class.",
        _last(lambda last: last.longest_prompt_tokens), ("class",), "tokens",
    ),
    Family(
        "vllm_oom_last_incident_kv_cache_usage_ratio", "gauge",
        "Share of KV cache blocks in use at the newest incident of the class, 0 to 1.",
        _last(lambda last: last.kv_cache_usage_ratio), ("class",), "ratio",
    ),
    Family(
        "vllm_oom_last_incident_confidence_ratio", "gauge",
        "How far the evidence carries the newest verdict of the class: 0.25 insufficient, 0.5 possible, "
        "0.8 probable, 1 confirmed.",
        _last(lambda last: last.confidence_ratio), ("class",), "ratio",
    ),
    Family(
        "vllm_oom_engine_info", "info",
        "Model and version of the engine, as its log names them.",
        _engine_info, ("model_name", "vllm_version"),
    ),
    Family(
        "vllm_oom_engine_state", "gauge",
        "State of the engine: 1 for the one it is in, 0 for the others.",
        _engine_state, ("state",),
    ),
    Family(
        "vllm_oom_engine_starts_total", "counter",
        "Engine lives seen in the log.",
        lambda target: _one(target.counts.engine_starts),
    ),
    Family(
        "vllm_oom_engine_start_timestamp_seconds", "gauge",
        "When this engine life began, in seconds since the epoch.",
        lambda target: _one(target.engine_start_timestamp), unit="seconds",
    ),
    Family(
        "vllm_oom_max_num_batched_tokens", "gauge",
        "Prefill budget in force: the tokens that one engine step may schedule.",
        _of_life(lambda life: budget(life.settings)), unit="tokens",
    ),
    Family(
        "vllm_oom_previous_max_num_batched_tokens", "gauge",
        "Prefill budget of the engine life before this one.",
        lambda target: [] if target.previous is None else _one(budget(target.previous.settings)), unit="tokens",
    ),
    Family(
        "vllm_oom_max_model_len_tokens", "gauge",
        "Longest sequence the engine accepts (max_model_len).",
        _setting("max_model_len"), unit="tokens",
    ),
    Family(
        "vllm_oom_max_num_seqs", "gauge",
        "Sequences that one engine step may hold (max_num_seqs).",
        _setting("max_num_seqs"),
    ),
    Family(
        "vllm_oom_gpu_memory_utilization_ratio", "gauge",
        "Share of device memory the engine may claim (gpu_memory_utilization), 0 to 1.",
        _setting("gpu_memory_utilization"), unit="ratio",
    ),
    Family(
        "vllm_oom_setting_changed_timestamp_seconds", "gauge",
        "When a setting last differed from the engine life before, in seconds since the epoch.",
        lambda target: [((one,), target.setting_changed.get(one)) for one in _CHANGEABLE],
        ("setting",), "seconds",
    ),
    Family(
        "vllm_oom_gpu_memory_bytes", "gauge",
        "Device memory by use, as start-up accounted for it.",
        _memory, ("part",), "bytes",
    ),
    Family(
        "vllm_oom_gpu_capacity_bytes", "gauge",
        "Capacity of the device, as start-up logged it.",
        _of_life(lambda life: memory_of(life).get("total_bytes")), unit="bytes",
    ),
    Family(
        "vllm_oom_largest_step_tokens", "gauge",
        "Largest engine step known to have run since the settings last changed.",
        lambda target: _one(target.largest_step_tokens), unit="tokens",
    ),
    Family(
        "vllm_oom_long_prompts_total", "counter",
        "Prompts at least as long as the shortest that failed, or as fill a step now, whichever is less.",
        lambda target: _one(target.counts.long_prompts),
    ),
    Family(
        "vllm_oom_budget_risk", "gauge",
        "Whether the prefill budget may run the engine out of memory: 1 for the state that holds.",
        _of_states("risk", "state", RISKS, "unknown"), ("state",),
    ),
    Family(
        "vllm_oom_headroom_bytes", "gauge",
        "Device memory that start-up left to what it did not profile, as far as is known.",
        lambda target: _one((target.risk or {}).get("headroom_bytes")), unit="bytes",
    ),
    Family(
        "vllm_oom_trigger_pvalue", "gauge",
        "How likely ranks like those of the failing windows are by chance, by what windows are ranked by.",
        _covariates("pvalue"), ("covariate",),
    ),
    Family(
        "vllm_oom_trigger_rank_ratio", "gauge",
        "Mean rank of the failing windows among windows they are comparable with: 0 least, 1 most.",
        _covariates("rank_ratio"), ("covariate",), "ratio",
    ),
    Family(
        "vllm_oom_trigger_events", "gauge",
        "Failures behind the trigger test; repeats of one killing prompt count as one.",
        lambda target: _one((target.trigger or {}).get("effective_events", 0)),
    ),
    Family(
        "vllm_oom_trigger_control_windows", "gauge",
        "Windows of ordinary serving that the failing ones are compared with.",
        lambda target: _one((target.trigger or {}).get("control_windows", 0)),
    ),
    Family(
        "vllm_oom_trigger_verdict", "gauge",
        "Whether failures follow prompt length, not request rate: 1 for the verdict that holds.",
        _of_states("trigger", "verdict", VERDICTS, "insufficient"), ("verdict",),
    ),
    Family(
        "vllm_oom_confirmation", "gauge",
        "Whether a lower prefill budget cured the failures, told across restarts: 1 for the state that holds.",
        _of_states("confirmation", "state", CONFIRMATIONS, "none"), ("state",),
    ),
    Family(
        "vllm_oom_confirmation_exposures", "gauge",
        "Long prompts that the lower budget has survived.",
        lambda target: _one((target.confirmation or {}).get("exposures")),
    ),
    Family(
        "vllm_oom_confirmation_exposures_needed", "gauge",
        "Long prompts that the lower budget must survive in all to be confirmed.",
        lambda target: _one((target.confirmation or {}).get("exposures_needed")),
    ),
    Family(
        "vllm_oom_recommended_max_num_batched_tokens", "gauge",
        "Prefill budget estimated to fit the memory there is.",
        lambda target: _one(target.recommended_budget), unit="tokens",
    ),
    Family(
        "vllm_oom_probe_state", "gauge",
        "What came of the last probe, which fills steps on purpose: 1 for the state that holds. Unfinished ran out of "
        "time, skipped could not run.",
        _of_states("probe", "state", PROBES, "none"), ("state",),
    ),
    Family(
        "vllm_oom_probe_largest_step_tokens", "gauge",
        "Largest step of the last probe: true where per-step lines are logged, else what must have been scheduled.",
        _probed("largest_tokens"), unit="tokens",
    ),
    Family(
        "vllm_oom_probe_full_steps", "gauge",
        "Full steps that the engine survived in the last probe.",
        _probed("full"),
    ),
    Family(
        "vllm_oom_probe_duration_seconds", "gauge",
        "How long the last probe took.",
        lambda target: _one((target.probe or {}).get("seconds")), unit="seconds",
    ),
    Family(
        "vllm_oom_budget_ready", "gauge",
        "Whether a step as large as the budget has succeeded in this engine life, as /-/budget-ready answers.",
        lambda target: [] if target.life is None else _one(int(unready(target) is None)),
    ),
    Family(
        "vllm_oom_target_up", "gauge",
        "Whether the last scrape of the metrics of vLLM succeeded: 1 yes, 0 no.",
        lambda target: [] if target.scrape_up is None else _one(int(target.scrape_up)),
    ),
    Family(
        "vllm_oom_target_scrape_duration_seconds", "gauge",
        "How long the last scrape of the metrics of vLLM took.",
        lambda target: _one(target.scrape_seconds), unit="seconds",
    ),
    Family(
        "vllm_oom_target_followed", "gauge",
        "Whether the exporter follows this server: 0 after a failure of its own, until it has started over; its other "
        "series are missing meanwhile.",
        lambda target: _one(int(target.followed)), always=True,
    ),
    Family(
        "vllm_oom_exporter_failures_total", "counter",
        "Failures of the exporter itself at this server, after which it started over from what was saved. A sidecar "
        "of a single server ends instead.",
        lambda target: _one(target.exporter_failures), always=True,
    ),
    Family(
        "vllm_oom_log_lines_total", "counter",
        "Log lines read, by whether their format was recognised.",
        _lines, ("source", "result"),
    ),
    Family(
        "vllm_oom_log_read_bytes_total", "counter",
        "Bytes of log read.",
        _by_source(lambda target, name: target.counts.read_bytes[name]), ("source",), "bytes",
    ),
    Family(
        "vllm_oom_log_read_errors_total", "counter",
        "Failures to open or read a log.",
        _by_source(lambda target, name: target.counts.read_errors[name]), ("source",),
    ),
    Family(
        "vllm_oom_log_lines_truncated_total", "counter",
        "Log lines cut because they were too long.",
        _by_source(lambda target, name: target.counts.truncated[name]), ("source",),
    ),
    Family(
        "vllm_oom_log_lag_bytes", "gauge",
        "Bytes of log written but not yet read.",
        _lag, ("source",), "bytes",
    ),
    Family(
        "vllm_oom_log_last_line_timestamp_seconds", "gauge",
        "When the newest line was read, in seconds since the epoch.",
        _by_source(lambda target, name: target.last_line_timestamp.get(name)), ("source",), "seconds",
    ),
    Family(
        "vllm_oom_log_rotations_total", "counter",
        "Log files that were rotated under the reader, by how.",
        _rotations, ("source", "kind"),
    ),
)  # fmt: skip

EXPORTER_TABLE: tuple[Family[Status], ...] = (
    Family(
        "vllm_oom_notifications_total", "counter",
        "Direct notifications by receiver and result.",
        _notifications, ("receiver", "result"),
    ),
    Family(
        "vllm_oom_node_containers", "gauge",
        "Containers of the node: vllm is followed, other is not vLLM, undecided has not said what it is, "
        "unreadable may not be read, left_out is vLLM and one too many.",
        _containers, ("state",),
    ),
    Family(
        "vllm_oom_state_write_failures_total", "counter",
        "Failures to write the state file; what they would have saved is kept in memory.",
        lambda status: _one(status.state_write_failures),
    ),
    Family(
        "vllm_oom_config_last_reload_successful", "gauge",
        "Whether the configuration in use is the one on disk: 0 after a reload that failed, else 1.",
        lambda status: _one(int(status.config_reload_successful)),
    ),
    Family(
        "vllm_oom_exporter_build_info", "info",
        "Version of this exporter and of the Python it runs on.",
        lambda _: [((__version__, platform.python_version()), 1)], ("version", "python"),
    ),
)  # fmt: skip

TABLE: tuple[Family[Any], ...] = (*TARGET_TABLE, *EXPORTER_TABLE)


# --- what others use ----------------------------------------------------------------------


class Reading:
    """A status as it is read for one answer, piece by piece: between two of them others may have their turn.

    ``targets`` has to be done before ``families`` is begun. Targets share nothing, so each is of one
    moment, and that is all there is to be had.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._of_targets: list[tuple[Family[TargetStatus], Samples]] = [(one, {}) for one in TARGET_TABLE]

    def targets(self) -> Iterator[None]:
        """Read one target after the other."""
        for one in self._status.targets:
            common = tuple((name, _label(one.labels[name])) for name in TARGET_LABELS if name in one.labels)
            for family, samples in self._of_targets:
                if one.followed or family.always:
                    family.read(common, one, samples)
            yield

    def families(self) -> Iterator[Metric]:
        """Every family that has something to say, in the order of the table."""
        for family, samples in self._of_targets:
            if samples:
                yield family.metric(samples)
        for of_exporter in EXPORTER_TABLE:
            own: Samples = {}
            of_exporter.read((), self._status, own)
            if own:
                yield of_exporter.metric(own)


class StatusCollector:
    """Renders a status for ``prometheus_client``. Only reads; call it where the status is written."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing: names are unique by the table, so registering need not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The whole status, of one moment."""
        reading = Reading(self._status)
        for _ in reading.targets():
            pass
        return reading.families()


class Single(Collector):
    """One family, as an encoder of ``prometheus_client`` wants to be given it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        """It, and nothing else."""
        return [self._family]


def make_registry(status: Status) -> CollectorRegistry:
    """A registry with the status and ``process_*`` of the exporter, and nothing global."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    ProcessCollector(registry=registry)
    return registry


def reference() -> str:
    """Every metric as a Markdown table, for the README."""
    rows = ["| Metric | Type | Labels | Meaning |", "| --- | --- | --- | --- |"]
    for family in TABLE:
        labels = ", ".join(f"`{one}`" for one in family.labels)
        rows.append(
            f"| `{family.name}` | {family.type} | {labels} | {family.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(rows) + "\n"
