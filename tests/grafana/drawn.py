"""The dashboards drawn with Grafana's own components: ``make dashboards``.

Not part of the default suite: it wants Node, half a gigabyte of packages and Chromium. The pictures are in
``tests/grafana/build/``; ``--renew-golden`` also renews those in ``grafana/screenshots/``. Look at them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dashboards.panels import GRAFANA, View, load
from dashboards.stack import Shown, shown

HERE = Path(__file__).parent
BUILD = HERE / "build"
SCREENSHOTS = GRAFANA / "screenshots"
INCIDENT, OVERVIEW = (load(GRAFANA / f"vllm-oom-{name}.json") for name in ("incident", "overview"))
POD = {"namespace": "models", "pod": "chat-0"}
GREEN, RED, YELLOW, BLUE = "#73BF69", "#F2495C", "#FADE2A", "#5794F2"  # of Grafana's dark theme
_SECOND_DEATH = 41.75 * 60


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a drawing shows: of each panel its texts, by title; and what the browser complained of."""

    panels: dict[str, list[dict[str, str]]]
    empty: set[str]
    failed: dict[str, str]
    complaints: list[str]
    picture: Path

    def texts(self, title: str) -> list[tuple[str, str]]:
        """Name and formatted value of everything in a panel."""
        return [(one["name"], one["text"]) for one in self.panels[title]]

    def text(self, title: str, name: str) -> str:
        """The one value of that name."""
        (found,) = [text for called, text in self.texts(title) if called == name]
        return found

    def colors(self, title: str) -> dict[str, str]:
        """The color of each value, by the name or the text that goes with it."""
        return {key: one["color"] for one in self.panels[title] for key in (one["name"], one["text"])}


@pytest.fixture(scope="module")
def drawings(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Drawn]]:
    """Everything, drawn once: the fleet, an engine right after its death, that engine later, and a replay."""
    folder = tmp_path_factory.mktemp("drawings")
    BUILD.mkdir(exist_ok=True)
    with shown(folder) as servers:
        yield draw(folder, views(servers), renew=bool(request.config.getoption("--renew-golden")))


def views(servers: dict[str, Shown]) -> dict[str, View]:
    """What is drawn, by name."""
    live, story = servers["live"], servers["story"]

    def of_story(dashboard: dict[str, Any], end: float, **chosen: str) -> View:
        return View(dashboard, story.prometheus, story.start, end, story.scrape, chosen)

    return {
        "overview": of_story(OVERVIEW, story.end),
        "incident": of_story(INCIDENT, story.start + _SECOND_DEATH, **POD),
        "incident-later": of_story(INCIDENT, story.end, **POD),
        "incident-replayed": View(INCIDENT, live.prometheus, live.start, live.end, live.scrape),
    }


def draw(folder: Path, looks: dict[str, View], *, renew: bool) -> dict[str, Drawn]:
    """Draw in one browser; ``renew``: the small pictures for people too."""
    jobs: list[dict[str, Any]] = []
    for name, look in looks.items():
        drawing, report = folder / f"{name}.json", folder / f"{name}.report.json"
        drawing.write_text(json.dumps(look.drawn()), encoding="utf-8")
        files = {"drawing": str(drawing), "report": str(report)}
        jobs.append({**files, "picture": str(BUILD / f"{name}.png"), "scale": 1})
        if renew and name in {"overview", "incident"}:
            SCREENSHOTS.mkdir(exist_ok=True)
            jobs.append({**files, "picture": str(SCREENSHOTS / f"{name}.png"), "scale": 0.7, "height": 1370})
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    node = shutil.which("node")
    assert node is not None, "node is missing; 'make dashboards' needs Node 20 or newer"
    subprocess.run([node, HERE / "draw.mjs", folder / "jobs.json"], check=True, timeout=300)
    return {name: _read(folder / f"{name}.report.json", BUILD / f"{name}.png") for name in looks}


def _read(report: Path, picture: Path) -> Drawn:
    found = json.loads(report.read_text(encoding="utf-8"))
    panels = found["panels"]
    return Drawn(
        {one["title"]: one["shown"] for one in panels},
        {one["title"] for one in panels if one["empty"]},
        {one["title"]: one["failed"] for one in panels if "failed" in one},
        found["complaints"],
        picture,
    )


NAMES = ("overview", "incident", "incident-later", "incident-replayed")


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_drawn(drawings: dict[str, Drawn], name: str) -> None:
    """Every panel, without an error in the page, and without asking anybody for anything."""
    drawn = drawings[name]
    dashboard = OVERVIEW if name == "overview" else INCIDENT
    assert (drawn.complaints, drawn.failed) == ([], {})
    assert set(drawn.panels) == {panel["title"] for panel in dashboard["panels"] if panel["type"] != "row"}
    assert all(drawn.panels.values()), "a panel says something, if only that there is nothing"
    assert drawn.picture.read_bytes().startswith(b"\x89PNG")


def test_empty_panels_say_so(drawings: dict[str, Drawn]) -> None:
    """In the story nothing is empty; for a replay on a CPU panels say what is missing, not "No data"."""
    assert drawings["overview"].empty == drawings["incident-later"].empty == set()
    replayed = drawings["incident-replayed"]
    said = {title: replayed.texts(title) for title in replayed.empty}
    assert said == {
        "Budget before": [("", "first life")],
        "GPU memory as start-up accounted for it": [("", "start-up logged no memory accounting")],
        "Long prompts survived, of those needed": [("", "no lower budget on trial")],
        "Rank of the failing windows": [("", "too few failures")],
        "Settings that changed": [("", "–")],
    }


def test_a_crash_is_told_at_the_top(drawings: dict[str, Drawn]) -> None:
    """State, class, verdict, budgets and risk: the first row of the incident, in the colors of their meaning."""
    drawn = drawings["incident"]
    assert [name for name, _ in drawn.texts("Engine")] == ["dead"]
    assert drawn.colors("Engine")["dead"] == RED
    assert drawn.texts("Last memory failure") == [("prefill_budget", "a few seconds ago")]
    assert [text for _, text in drawn.texts("Verdict")] == ["probable"]
    assert [text for _, text in drawn.texts("Budget")] == ["16,384"]
    assert [text for _, text in drawn.texts("Recommended")] == ["8,192"]
    assert [name for name, _ in drawn.texts("Risk")] == ["exceeded"]
    assert drawn.colors("Risk")["exceeded"] == RED


def test_numbers_have_units(drawings: dict[str, Drawn]) -> None:
    """Bytes in GiB, shares in percent, tokens with separators, in tables and legends alike."""
    drawn = drawings["incident"]
    evidence = {name: drawn.text("Evidence: the newest failure of each class", name) for name in (
        "class", "verdict", "asked for", "was free", "step", "KV used",
    )}  # fmt: skip
    assert evidence == {
        "class": "prefill_budget", "verdict": "probable", "asked for": "3.83 GiB", "was free": "2.11 GiB",
        "step": "16,384", "KV used": "0.8%",
    }  # fmt: skip
    memory = dict(drawn.texts("GPU memory as start-up accounted for it"))
    assert (memory["kv_cache"], memory["capacity"]) == ("49.1 GiB", "79.2 GiB")
    assert dict(drawn.texts("KV cache in use"))["in use"].endswith("%")
    assert dict(drawn.texts("Request rate"))["finished"].endswith(" req/s")


def test_the_heatmap_has_the_rows_of_vllm(drawings: dict[str, Drawn]) -> None:
    """A row a bucket, and something in the buckets above the budget before the death."""
    rows = dict(drawings["incident"].texts("Prompt lengths of finished requests"))
    assert list(rows)[-3:] == ["10000", "20000", "Infinity"]
    assert float(rows["20000"]) > 0


def test_a_fix_on_trial_is_seen(drawings: dict[str, Drawn]) -> None:
    """After the budget was lowered: accruing, in the incident and in the fleet."""
    later, fleet = drawings["incident-later"], drawings["overview"]
    assert [name for name, _ in later.texts("Lower budget on trial")] == ["accruing"]
    assert later.colors("Engine")["serving"] == GREEN
    assert fleet.text("Fixes on trial", "fix") == "accruing"
    assert fleet.text("Fixes on trial", "to budget") == "4,096"


def test_the_fleet_is_told_apart(drawings: dict[str, Drawn]) -> None:
    """Each engine with its risk, in the colors of their meaning."""
    drawn = drawings["overview"]
    title = "Engines and their budgets"
    risks = sorted(text for name, text in drawn.texts(title) if name == "risk")
    assert risks == ["comfortable", "comfortable", "exceeded", "exceeded", "unexercised"]
    colors = drawn.colors(title)
    assert (colors["comfortable"], colors["exceeded"], colors["unexercised"]) == (GREEN, RED, YELLOW)
    assert [text for _, text in drawn.texts("Memory failures")] == ["4"]
    assert dict(drawn.texts("Engines now")) == {"serving": "5"}
    assert drawn.colors("Fixes")["accruing"] == BLUE
