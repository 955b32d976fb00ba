"""Rules are checked and run by Prometheus' own promtool; the cases are in ``tests/rules/``."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HERE, load_yaml

from exporter.diagnosis.knowledge import CLASS_IDS
from exporter.metrics import EXPORTER_TABLE, TABLE, TARGET_LABELS
from exporter.status import ENGINE_STATES

RULES = HERE.parent / "rules"
CASES = sorted((HERE / "rules").glob("*.yaml"))
PROMETHEUS_RULES = [*sorted(RULES.glob("vllm-oom-*.yaml")), *sorted(RULES.glob("dcgm/*.yaml"))]

FOREIGN = {
    # vLLM, 0.2.7 to 0.33: the old name of the usage went with 0.11.2, the new one came with 0.9.2
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:gpu_cache_usage_perc": {"model_name", "engine"},
    "vllm:num_preemptions_total": {"model_name", "engine"},
    "vllm:num_requests_running": {"model_name", "engine"},
    # kube-state-metrics
    "kube_pod_container_info": {"container", "image"},
    "kube_pod_container_status_running": {"container"},
    # dcgm-exporter
    "DCGM_FI_DEV_FB_FREE": {"gpu"},
    # Prometheus
    "up": set[str](),
}
"""Metrics of others that rules may read, with the labels they may be selected by."""

VALUES = {
    "class": set(CLASS_IDS),
    "phase": {"startup", "serving"},
    "result": {"parsed", "unparsed", "delivered", "failed", "dropped"},
    "part": {"weights", "peak_activation", "non_torch", "cuda_graphs", "kv_cache"},
    "state": {
        *ENGINE_STATES,
        *("unknown", "comfortable", "tight", "unexercised", "exceeded"),
        *("none", "accruing", "confirmed", "refuted", "confounded"),
    },
}
"""Values of labels that are closed sets: a selector with another one never finds anything."""

_NAME = re.compile(
    r"(?<![\w:.\"$])([a-zA-Z_][\w:]*)(?=\s*(?:\{|\[|offset\b|\)|$|==|[<>*/+-]|and\b|or\b|unless\b))"
)
"""What can only be the name of a metric: a word with a selector, an operator or an end after it."""
_SELECTOR = re.compile(r"([a-zA-Z_][\w:]*)\{([^{}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_WORDS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")

Rule = dict[str, Any]


def promtool() -> str:
    """The promtool to use; its absence is a failure, not a reason to skip."""
    found = shutil.which("promtool")
    assert found is not None, "promtool is missing; 'apt-get install prometheus' brings it"
    return found


def rules_of(path: Path) -> list[Rule]:
    """Every rule of one file, in order."""
    return [rule for group in load_yaml(path)["groups"] for rule in group["rules"]]


ALL_RULES = [rule for path in PROMETHEUS_RULES for rule in rules_of(path)]
ALERTS: dict[str, Rule] = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in ALL_RULES if "record" in rule}


def expressions(rule: Rule) -> list[str]:
    """The expression of a rule, and the queries that its annotations make."""
    found = [str(rule["expr"])]
    for text in rule.get("annotations", {}).values():
        for query in re.findall(r'printf ("(?:[^"\\]|\\.)*")', text):
            if "%s" in query or "%q" in query:
                plain = query[1:-1].replace('\\"', '"').replace("%q", '"any"')
                found.append(re.sub(r",?%s", "", plain))
    return [one for one in found if not re.fullmatch(r'(\w+="any",?)*', one)]


def known_labels(name: str) -> set[str] | None:
    """The labels that a metric may be selected by; None for a name that nothing exposes."""
    scraped = {"job", "instance", *TARGET_LABELS}
    if name in FOREIGN:
        return scraped | FOREIGN[name]
    if name in RECORDS:
        return scraped | {"model_name", "vllm_version", "class", "phase", "state"}
    for family in TABLE:
        if family.name == name:
            return scraped | set(family.labels)
    return None


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    bare = _WORDS.sub(" ", re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression))
    bare = re.sub(r"\{[^}]*\}", "{}", bare)
    found = set(_NAME.findall(bare))
    return found - {"and", "or", "unless", "offset", "by", "on", "time", "ignoring", "without"}


def test_promtool_accepts_every_file() -> None:
    """'promtool check rules' finds nothing in any of the files for Prometheus."""
    assert len(PROMETHEUS_RULES) >= 3
    told = subprocess.run(
        [promtool(), "check", "rules", "--lint=all", "--lint-fatal", *map(str, PROMETHEUS_RULES)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr


def run_cases(*paths: Path) -> subprocess.CompletedProcess[str]:
    """What promtool says to files of cases."""
    return subprocess.run(
        [promtool(), "test", "rules", *map(str, paths)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_rules_do_what_their_cases_say(path: Path) -> None:
    """Every case of the file holds: who fires when, with which labels and which text."""
    told = run_cases(path)
    assert told.returncode == 0, told.stdout + told.stderr


def test_every_alert_fires_in_one_case_and_not_in_another() -> None:
    """Each alert has a case in which it fires, with its text, and one in which it does not."""
    fires: set[str] = set()
    silent: set[str] = set()
    for path in CASES:
        for test in load_yaml(path)["tests"]:
            for case in test.get("alert_rule_test", ()):
                (fires if case.get("exp_alerts") else silent).add(case["alertname"])
                assert all(one["exp_annotations"] for one in case.get("exp_alerts", ()))
    assert fires == silent == set(ALERTS)


def test_every_record_is_used_or_checked() -> None:
    """Each recording rule feeds another rule, or its value stands in a case."""
    used = set().union(*(names_in(text) for rule in ALL_RULES for text in expressions(rule)))
    asked = {
        name
        for path in CASES
        for test in load_yaml(path)["tests"]
        for case in test.get("promql_expr_test", ())
        for name in names_in(case["expr"])
    }
    assert used | asked >= RECORDS


def test_every_metric_that_rules_read_exists() -> None:
    """Names in expressions and annotations are ours, a record's, or known of vLLM and its surroundings."""
    seen = set()
    for rule in ALL_RULES:
        for text in expressions(rule):
            for name in names_in(text):
                seen.add(name)
                assert known_labels(name) is not None, f"{name} in {rule.get('alert', rule.get('record'))}"
    assert {"vllm_oom_incidents_total", "vllm:gpu_cache_usage_perc", "up", "DCGM_FI_DEV_FB_FREE"} <= seen
    assert set(FOREIGN) <= seen


def test_every_selector_can_match() -> None:
    """Labels in selectors are those of the metric, and values of closed sets are among them."""
    checked = 0
    for rule in ALL_RULES:
        for text in expressions(rule):
            for name, body in _SELECTOR.findall(text):
                labels = known_labels(name)
                assert labels is not None, name
                for label, how, value in _MATCHER.findall(body):
                    assert label in labels, f"{name} has no label {label}"
                    if label in VALUES and value != "any":
                        values = set(value.split("|")) if "~" in how else {value}
                        assert values <= VALUES[label], f"{name}{{{label}}}: {values - VALUES[label]}"
                        checked += 1
    assert checked > 20


def test_exporter_metrics_have_no_target_labels_in_joins() -> None:
    """Metrics of the exporter itself carry no model, so no rule joins the name of a model to them."""
    own = {family.name for family in EXPORTER_TABLE}
    for rule in ALL_RULES:
        if names_in(str(rule["expr"])) & own:
            assert "group_left (model_name" not in rule["expr"]


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_are_labelled_and_explained(name: str) -> None:
    """An alert has a severity, one line of summary, numbers where there are some, and two links."""
    rule = ALERTS[name]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("page", "ticket", "info")
    notes = rule["annotations"]
    assert list(notes) == ["summary", "description", "runbook_url", "dashboard_url"]
    assert "\n" not in notes["summary"]
    assert "\n" not in notes["description"]
    assert notes["runbook_url"] == f"https://runbooks.example.com/vllm-oom/{name}.md"
    assert re.match(
        r"https://grafana\.example\.com/d/vllm-oom-(incident|overview)(\?|$)", notes["dashboard_url"]
    )


LEVELS = {"VLLMKVCachePressure", "VLLMLogSilent", "VLLMPromptsOutgrowBudget"}
"""Go on as long as their cause does; the window only smooths them."""


def test_for_is_shorter_than_the_window_of_an_event() -> None:
    """An increase that lasts five minutes can't hold for ten; such an alert would never fire."""
    checked = 0
    for name, rule in ALERTS.items():
        text = rule["expr"].replace("increase5m", "[5m]")
        windows = [int(amount) for amount in re.findall(r"\[(\d+)m\]", text)]
        if "for" in rule and windows and name not in LEVELS:
            assert int(rule["for"].removesuffix("m")) < min(windows), name
            checked += 1
    assert checked >= 2


# --- thresholds that move must turn a case red --------------------------------------------

_THRESHOLD = re.compile(r"(==|>=|<=|>|<)(\s*)(-?\d+(?:\.\d+)?)")


def mutants(expression: str, sparse: bool = False) -> list[str]:
    """The expression with one comparison changed, once for each change.

    ``sparse``: what it compares, or what reads it, holds nothing that is not above 0 anyway.
    """
    changed = []
    for found in _THRESHOLD.finditer(expression):
        operator, number = found[1], float(found[3])
        if operator == "==":
            others = [1 - number, number + 2]
        elif number == 0:
            sparse_here = sparse or "increase5m{" in expression[: found.start()].rsplit("\n", 1)[-1]
            others = [1e9] if sparse_here else [1e9, -1]
        elif number.is_integer() and number < 5:
            others = [number + 1, number - 1]
        else:
            others = [number * 1.3, number * 0.7]
        changed += [
            f"{expression[: found.start()]}{operator} {other:g}{expression[found.end() :]}"
            for other in others
        ]
    return changed


def cases_of(name: str, to: Path) -> list[Path]:
    """The cases of one alert alone, written below ``to``."""
    written = []
    for path in CASES:
        content = load_yaml(path)
        content["rule_files"] = [str(to / Path(one).name) for one in content["rule_files"]]
        content["tests"] = [
            {**test, "alert_rule_test": cases, "promql_expr_test": []}
            for test in content["tests"]
            if (cases := [one for one in test.get("alert_rule_test", ()) if one["alertname"] == name])
        ]
        if content["tests"]:
            written.append(to / f"test-{path.name}")
            written[-1].write_text(yaml.safe_dump(content), encoding="utf-8")
    return written


def needed_by(alert: str) -> set[str]:
    """The records that an alert reads, and those that these read."""
    by_name = {rule["record"]: rule for rule in ALL_RULES if "record" in rule}
    needed: set[str] = set()
    fresh = {name for text in expressions(ALERTS[alert]) for name in names_in(text)} & RECORDS
    while fresh:
        needed |= fresh
        fresh = (set().union(*(names_in(str(by_name[one]["expr"])) for one in fresh)) & RECORDS) - needed
    return needed


def with_expression(changed: str, expression: str, alert: str, to: Path) -> None:
    """Every rule file below ``to`` with the one alert and what it reads, and the rule ``changed`` changed."""
    wanted = {alert, *needed_by(alert)}
    for path in PROMETHEUS_RULES:
        content = load_yaml(path)
        for group in content["groups"]:
            group["rules"] = [
                {**rule, "expr": expression} if name == changed else rule
                for rule in group["rules"]
                if (name := rule.get("alert") or rule["record"]) in wanted
            ]
        (to / path.name).write_text(yaml.safe_dump(content), encoding="utf-8")


def _survives(changed: str, expression: str, alert: str, to: Path) -> bool:
    to.mkdir(parents=True)
    with_expression(changed, expression, alert, to)
    return run_cases(*cases_of(alert, to)).returncode == 0


WITHOUT_THRESHOLD = {"VLLMUnexercisedBudgetExceedsFreeMemory"}
"""Compares two metrics; its cases have one on either side."""

GUARDS = {
    "target:vllm_oom_incidents:increase5m": "VLLMPrefillBudgetOOM",
    "target:vllm_oom_fatal_incidents:increase5m": "VLLMOOMSpreading",
}
"""Records with thresholds of their own, and the alert whose cases hold them."""


def test_a_threshold_that_moves_turns_a_case_red(tmp_path: Path) -> None:
    """Each comparison of each alert is guarded on both sides: changed, a case fails."""
    jobs: list[tuple[str, str, str, Path]] = []
    for rule in ALL_RULES:
        name, text = rule.get("alert") or rule["record"], str(rule["expr"])
        if (alert := name if name in ALERTS else GUARDS.get(name)) is None:
            continue
        changes = mutants(text, sparse=name in GUARDS)
        assert bool(changes) is (name not in WITHOUT_THRESHOLD), name
        jobs += [(name, one, alert, tmp_path / f"{len(jobs)}-{at}") for at, one in enumerate(changes)]
    assert len(jobs) > 2 * len(ALERTS)
    with ThreadPoolExecutor(2) as pool:
        survived = list(pool.map(lambda job: _survives(*job), jobs))
    wrong = [f"{job[0]}: {job[1]}" for job, lives in zip(jobs, survived, strict=True) if lives]
    assert not wrong, "\n".join(wrong)
