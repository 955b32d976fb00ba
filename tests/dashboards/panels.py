"""Reads a dashboard as Grafana does: variables, intervals, and the queries that come of them, put to a Prometheus.

Only what these dashboards use. A variable or function that is not known here is an error, as it would be a blank in Grafana.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "grafana"
FILES = sorted(GRAFANA.glob("*.json"))
WIDTH = 1600
"""Pixels of a dashboard: Grafana asks for a point a pixel of the panel."""

_NICE = (
    1,
    2,
    5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
    600,
    900,
    1200,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    86_400,
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)", re.DOTALL)
_QUERY_RESULT = re.compile(r"query_result\((?P<query>.+)\)", re.DOTALL)

Json = dict[str, Any]


def load(path: Path) -> Json:
    """One dashboard."""
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def panels(dashboard: Json) -> Iterator[Json]:
    """Every panel, those in collapsed rows too; not the rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


class Prometheus:
    """The HTTP API of one server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: object) -> Any:
        """``data`` of an answer. An error of Prometheus is raised with its text."""
        given = urllib.parse.urlencode({key.replace("__", "[]"): value for key, value in parameters.items()})
        request = urllib.request.Request(f"{self.url}/api/v1/{path}?{given}")  # noqa: S310 - a server of the tests
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - the same
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", "") + f"\n{parameters}") from error

    def value(self, query: str) -> float | None:
        """The one number that a query gives now, or None."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None


@dataclass(slots=True)
class View:
    """A dashboard as somebody looks at it: a time range, and what is chosen in the variables.

    ``start`` and ``end`` in seconds since the epoch; ``scrape`` is the scrape interval that the data source is set to.
    """

    dashboard: Json
    prometheus: Prometheus
    start: float
    end: float
    scrape: int
    chosen: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    offered: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Ask for the variables, in their order: later ones depend on earlier ones."""
        for variable in self.dashboard["templating"]["list"]:
            name, kind = variable["name"], variable["type"]
            if kind in {"datasource", "constant"}:
                self.variables[name] = variable["query"]
            else:
                self.offered[name] = values = self._values(variable)
                everything = variable.get("allValue", "") if variable["includeAll"] else ""
                self.variables[name] = self.chosen.get(name, everything or (values[0] if values else ""))

    def _values(self, variable: Json) -> list[str]:
        definition = variable["query"]["query"]
        if (found := _LABEL_VALUES.fullmatch(definition)) is not None:
            texts = self.prometheus.ask(
                f"label/{found['label']}/values",
                match__=self.filled(found["selector"]), start=self.start, end=self.end,
            )  # fmt: skip
        else:
            found = _QUERY_RESULT.fullmatch(definition)
            assert found is not None, f"{variable['name']}: {definition}"
            result = self.prometheus.ask("query", query=self.filled(found["query"]), time=self.end)["result"]
            texts = [_as_text(one) for one in result]
        if variable["regex"]:
            pattern = re.compile(variable["regex"].strip("/"))
            texts = [match[1] for text in texts if (match := pattern.search(text)) is not None]
        return sorted(texts)

    def filled(self, text: str, step: int = 0) -> str:
        """``text`` with its variables put in. ``step``: seconds between two points of the panel."""
        rate = max(step + self.scrape, 4 * self.scrape)
        span = round(self.end - self.start)
        builtin = {
            "__interval": f"{step}s", "__interval_ms": f"{step * 1000}",
            "__rate_interval": f"{rate}s", "__rate_interval_ms": f"{rate * 1000}",
            "__range": f"{span}s", "__range_s": f"{span}",
        }  # fmt: skip
        known = {**builtin, **self.variables}
        return _VARIABLE.sub(lambda match: known[match[1] or match[2]], text)

    def step(self, panel: Json) -> int:
        """Seconds between two points, as Grafana chooses them for the width of a panel."""
        wanted = (self.end - self.start) / (WIDTH * panel["gridPos"]["w"] / 24)
        least = max(self.scrape, _seconds(panel.get("interval", "")))
        return max(least, next((one for one in _NICE if one >= wanted * 0.85), _NICE[-1]))

    def result(self, panel: Json, target: Json) -> Any:
        """What Prometheus answers to one query of a panel: ``{"resultType": …, "result": […]}``."""
        step = self.step(panel)
        query = self.filled(target["expr"], step)
        if target["instant"]:
            return self.prometheus.ask("query", query=query, time=self.end)
        start = self.start - self.start % step
        return self.prometheus.ask("query_range", query=query, start=start, end=self.end, step=step)

    def events(self, annotation: Json) -> list[Json]:
        """What an annotation marks within the time range: ``time`` in milliseconds, ``title``, ``text``."""
        step = max(self.scrape, round((self.end - self.start) / 240))
        query = self.filled(annotation["expr"], step)
        result = self.prometheus.ask("query_range", query=query, start=self.start, end=self.end, step=step)[
            "result"
        ]
        found = {}
        for series in result:
            title, text = (
                _legend(annotation[key], series["metric"]) for key in ("titleFormat", "textFormat")
            )
            for _, value in series["values"]:
                if self.start <= float(value) / 1000 <= self.end:
                    found[float(value), title, text] = annotation["iconColor"]
        return [
            {"time": at, "title": a, "text": b, "color": color} for (at, a, b), color in sorted(found.items())
        ]

    def drawn(self) -> Json:
        """Everything that a drawing of the dashboard needs, without a server."""
        return {
            "dashboard": self.dashboard,
            "from": self.start * 1000,
            "to": self.end * 1000,
            "variables": self.variables,
            "events": [
                event
                for annotation in self.dashboard["annotations"]["list"]
                if "expr" in annotation and annotation["enable"]
                for event in self.events(annotation)
            ],
            "results": {
                panel["id"]: {
                    target["refId"]: self.result(panel, target) for target in panel.get("targets", [])
                }
                for panel in panels(self.dashboard)
            },
        }


def _as_text(sample: Json) -> str:
    """A sample as ``query_result`` gives it: ``name{label="value"} value time``."""
    labels = dict(sample["metric"])
    name = labels.pop("__name__", "")
    inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
    at, value = sample["value"]
    return f"{name}{{{inner}}} {value} {at * 1000:.0f}"


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    """As Grafana does: a label that is not there shows as its own name."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1]) or match[1], pattern)


def _seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]] if text else 0
