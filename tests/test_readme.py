"""The README shows what the command prints, and counts what the tests count."""

from __future__ import annotations

import re

from conftest import CAPTURES, CORPUS, HERE, analyzed, capture, load_yaml, log_of
from test_corpus import REAL, among, said, same

README = (HERE.parent / "README.md").read_text(encoding="utf-8")


def test_the_verdict_is_the_real_one() -> None:
    """Every line of the verdict stands in the golden file, in that order, but for the elisions."""
    block = README.split("    $ vllm-oom-exporter analyze server.log\n")[1].split("\n\nThat is a real")[0]
    shown = [line.removeprefix("    ") for line in block.splitlines()]
    real = (HERE / "golden" / "analyze_mlp_eager_16384.txt").read_text(encoding="utf-8").splitlines()
    assert len(shown) > 20
    at = 0
    for line in shown:
        if line == "…":
            continue
        assert line in real[at:], line
        at = real.index(line, at) + 1


def test_the_score_is_the_real_one() -> None:
    """The table of the README holds the numbers that the labelled cases give."""
    corpus = {path.stem: load_yaml(path) for path in sorted(CORPUS.glob("*.yaml"))}
    rows = {
        "`tests/corpus/`": [(case, analyzed(log_of(case))) for case in corpus.values()],
        "`tests/captures/`": [(case, analyzed(capture(name))) for name, case in REAL.items()],
    }
    assert len(list(CAPTURES.glob("*.log.gz"))) == len(REAL)
    for folder, judged in rows.items():
        exact = sum(said(document) == case["label"] for case, document in judged)
        accepted = sum(said(document) in (case["label"], *case["accept"]) for case, document in judged)
        healthy = [(case, document) for case, document in judged if case["label"] == "none"]
        failing = [(case, document) for case, document in judged if case["label"] != "none"]
        alarms = sum(said(document) not in ("none", *case["accept"]) for case, document in healthy)
        missed = sum(said(d) == "none" and "none" not in case["accept"] for case, d in failing)
        facts = [
            any(same(fact, document["incidents"][0]["facts"].get(fact), one) for one in among(want))
            for case, document in failing
            if document["incidents"]
            for fact, want in (case.get("expect") or {}).items()
        ]
        wanted = (
            f"{folder} | {len(judged)} | {exact} | {accepted} | {alarms} of {len(healthy)} | "
            f"{missed} of {len(failing)} | {sum(facts)} of {len(facts)} |"
        )
        assert wanted in README


def test_every_class_is_named() -> None:
    """The table of classes names each of the 24 once."""
    from exporter.diagnosis.knowledge import CLASS_IDS

    table = README.split("## What it tells apart")[1].split("`unknown` is a result")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(CLASS_IDS)


def test_the_metric_reference_is_generated() -> None:
    """The table of metrics is what ``metrics.py`` says. After a change, print ``reference()`` into it."""
    from exporter.metrics import reference

    assert README.split("<!-- metrics -->\n")[1].split("<!-- end of metrics -->")[0] == reference()


def test_every_exposition_has_its_version() -> None:
    """The table of versions names every recorded or written ``/metrics``."""
    table = README.split("### Which versions of vLLM")[1].split("Synthetic ones")[0]
    fixtures = {path.name.removesuffix(".prom.gz") for path in (HERE / "expositions").glob("*.prom.gz")}
    assert set(re.findall(r"`((?:real|synthetic)_[\w.]+)`", table)) == fixtures
