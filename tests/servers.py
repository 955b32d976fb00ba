"""Servers to look at, as the sidecar would know them: what the tests of the pages show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import quote

from aiohttp import web
from conftest import analyzed, capture

from exporter.diagnosis.knowledge import builtin_classes
from exporter.sources.stream import SourceStats
from exporter.status import Status, TargetStatus
from exporter.web.app import make_app

Document = dict[str, Any]

SCRIPT = "<script>document.title = 'owned'</script>"
IMAGE = "\"'><img src=x onerror=\"document.title='owned'\">"
ANSI = "\x1b[31mred\x1b[0m \x1b]8;;http://example.org\x07link\x1b\\"
BIDI = "user\u202eexe.gpj\u2066\u200f\u2028"
LONG = "x" * 100_000
HOSTILE = (SCRIPT, IMAGE, ANSI, BIDI, LONG, "{{ 7 * 7 }}", "\ud800 \x00 \x9b", "</code></main><h1>owned</h1>")


_RUNNING = "0000111122211122233322111122332221111000011112222333222112344"


@cache
def _analyzed(name: str) -> Document:
    return analyzed(capture(name))


def minutes_before() -> list[dict[str, float]]:
    """Five minutes of scrapes, made up, that end as the dump of ``mlp_eager_16384`` says."""
    return [
        {
            "seconds_before": seconds,
            "running_requests": running,
            "waiting_requests": 1.0 if seconds < 15 else 0.0,
            "kv_cache_usage": running * 0.002,
        }
        for seconds, running in zip(map(float, range(300, -1, -5)), map(float, _RUNNING), strict=True)
    ]


def server(name: str, log: str, **more: Any) -> TargetStatus:
    """A server whose log is a capture of a real one."""
    document = _analyzed(log)
    target = TargetStatus(
        name,
        engine_state=document["engines"][-1]["state"],
        engines=[{**one, "index": index} for index, one in enumerate(document["engines"])],
        incidents=[{**one, "metrics_before": minutes_before()} for one in reversed(document["incidents"])],
        trigger=document["trigger"],
        confirmation=document["confirmation"],
        risk=document["risk"],
        scrape_up=False,
        sources=[SourceStats("/var/log/vllm/*.log", opened=True)],
    )
    for field, value in more.items():
        setattr(target, field, value)
    target.counts.lines["/var/log/vllm/*.log", "parsed"] = document["lines"]
    return target


def empty() -> Status:
    """Nothing was read yet, and one of the two logs is not there."""
    missing = SourceStats("/var/log/vllm/*.log", problem="nothing matches; is the folder mounted?")
    return Status([TargetStatus("vllm", sources=[missing, SourceStats("-", opened=True)])])


def healthy() -> Status:
    """A server that answers, and never failed."""
    return Status([server("vllm", "clean_eager_16384", engine_state="serving", scrape_up=True)])


def one() -> Status:
    """A server that died of its prefill budget."""
    return Status([server("vllm", "mlp_eager_16384")])


def cured() -> Status:
    """Three deaths, then a smaller budget that held."""
    return Status([server("vllm", "lifecycle_iter_mp")])


def many() -> Status:
    """As many incidents as are kept in memory."""
    target = server("vllm", "mlp_eager_16384")
    first = target.incidents[0]
    target.incidents = [{**first, "id": f"{number:012x}"} for number in range(200, 0, -1)]
    return Status([target])


def several() -> Status:
    """Three servers: two in a cluster, one that nothing is known of."""
    pods = [{"namespace": "models", "pod": f"llama-{number}", "container": "vllm"} for number in range(2)]
    logs = ("mlp_eager_16384", "tp2_oom_both")
    return Status(
        [
            *(server(f"node/{pod['pod']}", log, labels=pod) for pod, log in zip(pods, logs, strict=True)),
            TargetStatus(
                "spare", {"target": "spare"}, sources=[SourceStats("/var/log/spare.log", opened=True)]
            ),
        ]
    )


def hostile() -> Status:
    """What must not be believed, in every text and in every place of a number."""
    text = " ".join(HOSTILE)
    wrong: Document = {
        "id": SCRIPT, "time": text, "engine": "0", "class": IMAGE, "phase": BIDI, "fatal": "yes",
        "confidence": ANSI,
        "facts": {"tried_bytes": text, "free_bytes": float("nan"), "step_tokens": True, "frame": text,
                  "ranks": [text, {}], SCRIPT: SCRIPT, "kv_cache_usage": None, "budget_tokens": 10**400},
        "evidence": [{"says": one, "favours": one, "weight": one, "line": one} for one in HOSTILE] + [text, None],
        "ranking": [{"class": text, "score": "high"}, {"class": IMAGE, "score": 1e300}],
        "advice": {"do": [{"text": text, "flags": text, "cost": text}, "no"], "confirm": text, "because": text,
                   "dead_ends": [{"text": text, "why": text}]},
        "metrics_before": [{"seconds_before": one} for one in HOSTILE] + [
            {"seconds_before": 1e300, "running_requests": -1e300},
            {"seconds_before": 2.0, "running_requests": float("inf"), "waiting_requests": -5, "kv_cache_usage": 1e9},
        ],
        "excerpt": [*HOSTILE, 3, None],
    }  # fmt: skip
    bare: Document = {"id": "bare", "advice": [], "facts": "none", "evidence": {}, "excerpt": 5}
    real = {**server("x", "hostile_then_oom_mp").incidents[0], "excerpt": list(HOSTILE)}
    target = TargetStatus(
        SCRIPT,
        engine_state=BIDI,
        incidents=[real, wrong, bare],
        engines=[
            {"index": 0, "model": text, "settings": {SCRIPT: text, "a": 1}, "memory": {"weights_bytes": text}},
            {"index": 1, "model": text, "started": text, "vllm_version": text, "state": text,
             "settings": {SCRIPT: IMAGE, "a": [text]}, "memory": text, "fingerprint": [text]},
        ],
        trigger={"verdict": text, "says": text, "events": 3},
        confirmation={"state": text, "says": [text], "failures": 1, "exposures": -3, "exposures_needed": 5},
        risk={"state": text, "reasons": [text, None]},
        sources=[SourceStats(text, problem=text)],
    )  # fmt: skip
    return Status([target])


CASES: dict[str, Callable[[], Status]] = {
    case.__name__: case for case in (empty, healthy, one, cured, many, several, hostile)
}


def application(status: Status, **options: Any) -> web.Application:
    """The application that shows ``status``."""
    defaults: dict[str, Any] = {"reload": None, "enable_lifecycle": False, "hide_excerpts": False}
    return make_app(status, classes=builtin_classes(), **{**defaults, **options})


def newest(status: Status, target: int = 0) -> str:
    """The path of the last incident of a target."""
    return f"/incidents/{quote(str(status.targets[target].incidents[0]['id']), safe='')}"
