"""The rules for Loki, run over captures: there is no Loki to be had, so their line filters are applied here.

What they miss is listed: whoever has nothing else should know it.
"""

from __future__ import annotations

import re

import pytest
from conftest import CAPTURES, capture, load_yaml
from test_rules import RULES, rules_of

ALERTS = {rule["alert"]: rule for rule in rules_of(RULES / "loki" / "vllm-oom-loki.yaml")}
FILTERS = {
    name: [re.compile(text) for text in re.findall(r"\|~ `(.*?)`", rule["expr"])]
    for name, rule in ALERTS.items()
}
DIED, NOT_STARTED = "VLLMDiedOfOOMLogged", "VLLMStartupOOMLogged"
REAL = load_yaml(CAPTURES / "expected.yaml")

MISSED = {
    "json_load_oom": "JSON logs",
    "json_oom_mp": "JSON logs",
    "prefix_oom_mp": "a prefix before every line (VLLM_LOGGING_PREFIX)",
    "v013_mlp_batchqueue": "the error stands in a raw traceback only",
    "kill_engine_mp": "killed, not out of memory by its own words",
    "v0271_kill_engine_mp": "the same",
    "v0271_kill_engine_uni": "the same",
    "kill_worker_tp2": "the host killed it",
    "kv_toobig": "memory of the host",
    "real_cpu_alloc_oom": "memory of the host",
}
"""Deaths that the rules do not see, and why."""


def fires(log: bytes) -> set[str]:
    """The alerts whose filters all find a line in the log."""
    lines = log.decode("utf-8", "replace").splitlines()
    return {
        name
        for name, filters in FILTERS.items()
        if filters and all(any(one.search(line) for line in lines) for one in filters)
    }


@pytest.mark.parametrize("name", REAL)
def test_a_capture_fires_what_it_should(name: str) -> None:
    """Deaths and failed starts fire their alert, but for those listed; healthy, hostile and survived logs fire none."""
    case = REAL[name]
    wanted = set()
    if case["fatal"] and name not in MISSED:
        wanted = {DIED if case["phase"] == "serving" else NOT_STARTED}
    assert fires(capture(name)) == wanted


def test_rules_have_the_shape_of_loki_rules() -> None:
    """Each has an expression with a stream, a severity and the annotations of the other rules."""
    for rule in ALERTS.values():
        assert '{container=~".*vllm.*"}' in rule["expr"]
        assert rule["labels"].keys() == {"severity"}
        assert list(rule["annotations"]) == ["summary", "description", "runbook_url", "dashboard_url"]
        assert rule["annotations"]["runbook_url"].endswith(f"/{rule['alert']}.md")
    assert FILTERS["VLLMLogsMissing"] == []
