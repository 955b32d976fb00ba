"""The dashboards: what they ask a live Prometheus, what they name, and their written form.

``story`` is an hour of five engines, imported; ``live`` a real death, scraped as it happens. See ``dashboards/stack.py``.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE
from dashboards.panels import FILES, GRAFANA, Json, View, load, panels
from dashboards.sdk import round_trip
from dashboards.stack import CAPTURE, HOST, Shown, shown

from exporter.metrics import TABLE, TARGET_LABELS

UIDS = ("vllm-oom-incident", "vllm-oom-overview")
DASHBOARDS = {path.stem: load(path) for path in FILES}
RUNBOOKS = GRAFANA.parent / "rules" / "runbooks"
TYPES = {"bargauge", "heatmap", "stat", "table", "text", "timeseries"}
SCRAPED = {"job", "instance", *TARGET_LABELS}
VLLM = {"le", "model_name", "engine"}
_METRIC = re.compile(r"(?<![\w:\"$])(vllm_oom_\w+|vllm:\w+|up)(?![\w:\"(])")
_SELECTOR = re.compile(r"(vllm_oom_\w+|vllm:\w+|up)\{([^{}]*)\}")
_MATCHER = re.compile(r'(\w+)(?:=~|!=|!~|=)"')

MAY_BE_EMPTY = {
    ("story", "vllm-oom-incident"): set[tuple[str, str]](),
    ("story", "vllm-oom-overview"): {
        ("Reading went wrong", "C"),  # no receiver of direct notifications is configured there
    },
    ("live", "vllm-oom-incident"): {
        ("Budget before", "A"),  # its first life
        ("Could that be chance?", "A"),  # one failure, nothing to compare it with
        ("GPU memory as start-up accounted for it", "A"),  # a CPU has no accounting of device memory
        ("GPU memory as start-up accounted for it", "B"),
        ("Long prompts survived, of those needed", "A"),  # no lower budget was tried
        ("Longest prompts and steps against the budget", "C"),  # no per-step lines in its log
        ("Rank of the failing windows", "A"),  # one failure
        ("Settings and memory of this engine life", "C"),  # gpu_memory_utilization is not among its arguments
        ("Settings and memory of this engine life", "D"),
        ("Settings and memory of this engine life", "E"),
        ("Settings that changed", "A"),  # its first life
    },
    ("live", "vllm-oom-overview"): {
        ("Engines and their budgets", "D"),  # its first life
        ("Engines and their budgets", "F"),  # no per-step lines in its log
        ("Engines and their budgets", "G"),  # no accounting of device memory
        ("Fixes", "A"),  # no lower budget was tried
        *(("Fixes on trial", ref) for ref in "ABCDE"),
        ("Near misses", "A"),
    },
}
"""Queries (title of the panel, refId) that find nothing, with the reason; all others must find something."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shown]]:
    """Both Prometheus servers, with everything in them."""
    with shown(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


def view(servers: dict[str, Shown], where: str, uid: str) -> View:
    """A dashboard as it is opened there; in ``story`` the incident of one pod."""
    server = servers[where]
    chosen = {"namespace": "models", "pod": "chat-0"} if (where, uid) == ("story", UIDS[0]) else {}
    start, end = server.start, server.end
    if (where, uid) == ("live", UIDS[1]):  # bars of two minutes need more than the seconds of a replay
        start, end = end - 900, 120 * math.ceil(end / 120)
    return View(DASHBOARDS[uid], server.prometheus, start, end, server.scrape, chosen)


def samples(result: list[Json]) -> list[float]:
    """The numbers of an answer. One NaN is enough to leave a whole plot without its scale."""
    found = [float(value) for one in result for _, value in one.get("values") or [one["value"]]]
    assert not any(map(math.isnan, found)), result[0]["metric"]
    return found


def expressions(dashboard: Json) -> Iterator[str]:
    """Everything that is PromQL in a dashboard: panels, annotations, variables."""
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        if "expr" in annotation:
            yield annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


# --- what they ask -------------------------------------------------------------------------


@pytest.mark.parametrize("uid", UIDS)
@pytest.mark.parametrize("where", ["live", "story"])
def test_every_query_finds_what_there_is(servers: dict[str, Shown], where: str, uid: str) -> None:
    """No query fails, and those that find nothing are the ones for which nothing is there."""
    look = view(servers, where, uid)
    empty = {
        (panel["title"], target["refId"])
        for panel in panels(look.dashboard)
        for target in panel.get("targets", [])
        if not samples(look.result(panel, target)["result"])
    }
    assert empty == MAY_BE_EMPTY[where, uid]


def test_what_may_be_empty_is_seen_somewhere() -> None:
    """Each query of a dashboard finds something in one of the two places."""
    for uid in UIDS:
        assert not MAY_BE_EMPTY["live", uid] & MAY_BE_EMPTY["story", uid]


def test_a_plain_process_is_found_without_pods(servers: dict[str, Shown]) -> None:
    """Without ``namespace`` and ``pod`` the variables are empty or All, and the engine is chosen by its exporter."""
    look = view(servers, "live", UIDS[0])
    assert look.offered["pod"] == look.offered["namespace"] == look.offered["target"] == []
    assert look.variables["instance"] == f"{HOST}:10977"
    assert look.variables["vllm"] == f"{HOST}:8000"


def test_variables_offer_what_there_is(servers: dict[str, Shown]) -> None:
    """Pods of the chosen namespace and model, and of the chosen pod its exporter and its vLLM."""
    look = view(servers, "story", UIDS[0])
    assert look.offered["namespace"] == ["models", "research"]
    assert look.offered["pod"] == ["chat-0", "chat-1", "embed-7d9c-x2x4k"]
    assert (look.variables["instance"], look.variables["vllm"]) == ("10.0.0.1:10977", "10.0.0.1:8000")
    assert look.variables["class"] == "prefill_budget"
    assert look.variables["recommended"] == "8192"
    assert look.variables["kv_cache"] == str(round(49.1 * 2**30))


def test_what_to_do_names_the_budget(servers: dict[str, Shown]) -> None:
    """The text panel has the flag in it, with the number of this engine; without a number it says so."""
    text = next(panel for panel in panels(DASHBOARDS[UIDS[0]]) if panel["type"] == "text")["options"][
        "content"
    ]
    assert "--max-num-batched-tokens 8192" in view(servers, "story", UIDS[0]).filled(text)
    without_accounting = view(servers, "live", UIDS[0]).filled(text)
    assert "--max-num-batched-tokens 4096" in without_accounting
    assert "--kv-cache-memory-bytes BYTES" in without_accounting


def test_annotations_mark_lives_and_failures(servers: dict[str, Shown]) -> None:
    """Each start once, with its settings; each failure once, where the log puts it."""
    look = view(servers, "story", UIDS[0])
    found = {
        one["name"]: [
            (round((event["time"] / 1000 - look.start) / 60), event["title"], event["text"])
            for event in look.events(one)
        ]
        for one in look.dashboard["annotations"]["list"]
        if "expr" in one
    }
    settings = "budget {} tokens, gpu_memory_utilization 0.9, max_num_seqs 64"
    assert found == {
        "Memory failures": [(at, "prefill_budget", "a step of 16384 tokens") for at in (32, 41)],
        "Engine starts": [
            (at, "started", settings.format(budget))
            for at, budget in ((0, 8192), (8, 16384), (33, 16384), (42, 4096))
        ],
    }


def test_annotations_of_a_replay_are_where_it_happened(servers: dict[str, Shown]) -> None:
    """The failure of a real log, played now, is marked now."""
    look = view(servers, "live", UIDS[0])
    events = {one["name"]: look.events(one) for one in look.dashboard["annotations"]["list"] if "expr" in one}
    (start,), (failure,) = events["Engine starts"], events["Memory failures"]
    assert failure["title"] == "prefill_budget", CAPTURE
    assert look.start * 1000 < start["time"] < failure["time"] < look.end * 1000


def test_counts_are_those_of_the_story(servers: dict[str, Shown]) -> None:
    """Four failures, each in one bar: three of the budget and one start without room for a KV cache."""
    look = view(servers, "story", UIDS[1])
    by_title = {panel["title"]: panel for panel in panels(look.dashboard)}

    def sums(title: str, label: str) -> dict[str, float]:
        panel = by_title[title]
        found = look.result(panel, panel["targets"][0])["result"]
        totals = {one["metric"][label]: math.fsum(samples([one])) for one in found}
        return {name: total for name, total in totals.items() if total}

    assert sums("Failures by class", "class") == {"prefill_budget": 3, "kv_cache_no_room": 1}
    assert sums("Failures by model", "model_name") == {"example-org/chat-8b": 3, "example-org/dense-7b": 1}
    assert sums("Near misses", "model_name") == {"example-org/dense-7b": 2}


# --- what they name ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Names of samples in what vLLM served, of every version there is a fixture of."""
    found = set()
    for path in sorted((HERE / "expositions").glob("*.prom.gz")):
        found |= set(
            re.findall(r"^(vllm:\w+)[{ ]", gzip.decompress(path.read_bytes()).decode(), re.MULTILINE)
        )
    return found


@pytest.mark.parametrize("uid", UIDS)
def test_names_of_metrics_and_labels_exist(uid: str, exposed: set[str]) -> None:
    """Every metric is in the exporter's table or was served by a vLLM, and is selected by labels it can have."""
    labels = {family.name: {*family.labels, *SCRAPED} for family in TABLE}
    for expression in expressions(DASHBOARDS[uid]):
        named = set(_METRIC.findall(expression))
        assert named, expression
        assert named <= {*labels, *exposed, "up"}, expression
        for name, matchers in _SELECTOR.findall(expression):
            allowed = labels.get(name, SCRAPED | (VLLM if name.startswith("vllm:") else set()))
            assert set(_MATCHER.findall(matchers)) <= allowed, (name, matchers)


@pytest.mark.parametrize("uid", UIDS)
def test_descriptions_name_the_metrics(uid: str) -> None:
    """A panel says which metrics it is made of, no more and no less, save ``_info`` that only adds labels."""
    for panel in panels(DASHBOARDS[uid]):
        if panel["type"] != "text":
            asked = set(_METRIC.findall(" ".join(target["expr"] for target in panel["targets"])))
            told = set(re.findall(r"`(vllm_oom_\w+|vllm:\w+|up)`", panel["description"]))
            assert told ^ asked <= {"vllm_oom_engine_info", "vllm_oom_exporter_build_info"}, panel["title"]


@pytest.mark.parametrize("uid", UIDS)
def test_links_lead_somewhere(uid: str) -> None:
    """Links between dashboards, of cells too, name dashboards that ship; runbooks are files that ship."""
    text = json.dumps(DASHBOARDS[uid])
    dashboards = set(re.findall(r"/d/([\w-]+)", text))
    assert dashboards == {one for one in UIDS if one != uid}
    for page in re.findall(r"\$runbooks/(\w+\.md)", text):
        assert (RUNBOOKS / page).is_file(), page
    assert any(link["type"] == "dashboards" and link["tags"] == ["vllm"] for link in DASHBOARDS[uid]["links"])


def test_the_readme_of_the_dashboards_links_to_files() -> None:
    """Relative links and pictures of ``grafana/README.md`` are there."""
    text = (GRAFANA / "README.md").read_text(encoding="utf-8")
    targets = [one for one in re.findall(r"\]\(([^)#]+)", text) if "://" not in one]
    assert targets
    for target in targets:
        assert (GRAFANA / target).exists(), target


def test_a_row_leads_to_the_incident() -> None:
    """The link of a cell passes what identifies an engine, and each name is a variable of the other dashboard."""
    text = json.dumps(DASHBOARDS[UIDS[1]])
    passed = set(re.findall(r"var-(\w+)=", text))
    assert passed == {"namespace", "pod", "instance", "target"}
    assert passed <= {variable["name"] for variable in DASHBOARDS[UIDS[0]]["templating"]["list"]}


def test_alerts_open_dashboards_that_understand_them() -> None:
    """What ``dashboard_url`` of an alert passes is a variable of the dashboard it opens."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(RUNBOOKS.parent.rglob("*.yaml")))
    links = set(re.findall(r"/d/([\w-]+)\?(\S+)", text))
    assert {uid for uid, _ in links} == set(UIDS)
    for uid, query in links:
        names = {variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", query)) <= names, (uid, query)


# --- conventions and form ------------------------------------------------------------------


@pytest.mark.parametrize("uid", UIDS)
def test_conventions(uid: str) -> None:
    """A stable uid, the tag upstream's menu looks for, one variable for the data source, nothing of one server."""
    dashboard = DASHBOARDS[uid]
    assert (dashboard["uid"], dashboard["schemaVersion"], "vllm" in dashboard["tags"]) == (uid, 42, True)
    assert not {"__inputs", "__requires", "id", "version"} & set(dashboard)
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[:5] == ["datasource", "job", "namespace", "model_name", "pod"]
    sources = {json.dumps(one, sort_keys=True) for one in _values_of("datasource", dashboard)}
    grafana, prometheus = (
        '{"type": "grafana", "uid": "-- Grafana --"}',
        '{"type": "prometheus", "uid": "${datasource}"}',
    )
    assert sources == {grafana, prometheus}
    for panel in panels(dashboard):
        assert panel["type"] in TYPES
        if panel["type"] != "text":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
            units = [
                panel["fieldConfig"]["defaults"].get("unit"),
                *_values_of("unit", panel["fieldConfig"]["overrides"]),
            ]
            assert any(units) or panel["type"] == "table", panel["title"]
        for target in panel.get("targets", []):
            assert not re.search(r"\[\d+[smhd]\]", target["expr"]), "windows follow the time range"
            assert target["instant"] != target["range"]


def _values_of(key: str, value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name == key and not isinstance(one, str):
                yield one
            yield from _values_of(key, one)
    elif isinstance(value, list):
        for one in value:
            yield from _values_of(key, one)


@pytest.mark.parametrize("uid", UIDS)
def test_panels_have_a_place_of_their_own(uid: str) -> None:
    """Ids differ, nothing lies over anything else, and nothing is wider than the page."""
    every = DASHBOARDS[uid]["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in every:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(every, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one["title"], other["title"])


def canonical(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the formatter."""
    return subprocess.run(
        [sys.executable, GRAFANA / "canonical.py", *arguments], capture_output=True, text=True, check=False
    )


def test_files_are_in_the_canonical_form() -> None:
    """``python grafana/canonical.py`` has nothing to change."""
    told = canonical("--check")
    assert (told.returncode, told.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_export_of_grafana_becomes_the_file_again(path: Path, tmp_path: Path) -> None:
    """Another order of keys, and what a server adds, makes no difference."""
    exported = load(path) | {"id": 7, "version": 12, "iteration": 1, "__inputs": [], "__requires": []}
    for panel in exported["panels"]:
        panel["pluginVersion"] = "13.2.3"
    for variable in exported["templating"]["list"]:
        if variable["type"] == "query":
            variable["current"] = {"text": "All", "value": ["$__all"]}
            variable["options"] = [{"text": "chat-0", "value": "chat-0"}]
    other = tmp_path / path.name
    other.write_text(json.dumps(exported, sort_keys=True, indent=4), encoding="utf-8")
    assert canonical("--check", other).returncode == 1
    assert canonical(other).returncode == 0
    assert other.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def lost(given: Any, back: Any, at: str = "") -> list[str]:
    """Where ``back`` does not have what ``given`` has."""
    if isinstance(given, dict) and isinstance(back, dict):
        gone = [f"{at}.{key}" for key in given if key not in back]
        return gone + [
            one for key in given if key in back for one in lost(given[key], back[key], f"{at}.{key}")
        ]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        return [
            one for n, pair in enumerate(zip(given, back, strict=True)) for one in lost(*pair, f"{at}[{n}]")
        ]
    return [] if given == back else [at]


@pytest.mark.parametrize("uid", UIDS)
def test_grafanas_own_types_know_every_key(uid: str) -> None:
    """A round trip through the types of grafana-foundation-sdk loses nothing; a key that they do not know would be seen."""
    dashboard = DASHBOARDS[uid]
    assert lost(dashboard, round_trip(dashboard)) == []
    wrong = json.loads(json.dumps(dashboard))
    wrong["panels"][0]["options"]["colourMode"] = "value"
    assert lost(wrong, round_trip(wrong)) == [".panels[0].options.colourMode"]
