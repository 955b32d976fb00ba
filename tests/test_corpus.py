"""The labelled cases and the captures of a real vLLM: class, count, phase, fatal, facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CAPTURES, CORPUS, Document, analyzed, capture, load_yaml, log_of

CASES = {path.stem: load_yaml(path) for path in sorted(CORPUS.glob("*.yaml"))}
REAL = load_yaml(CAPTURES / "expected.yaml")

# Not the label, but an answer the label's author accepts; anything else here is a regression.
ACCEPTED_ONLY = {
    "002": "unknown",  # a forward operation fails; no line shows the phase
    "kill_engine_mp": "none",  # an engine process vanishes; no line speaks of memory
    "v0271_kill_engine_mp": "none",
    "v0271_kill_engine_uni": "none",
}


def said(document: Document) -> str:
    """The class of the first incident, or none."""
    incidents = document["incidents"]
    return str(incidents[0]["class"]) if incidents else "none"


def among(wanted: Any) -> list[Any]:
    """A label that lists what is allowed."""
    return wanted if isinstance(wanted, list) else [wanted]


def same(name: str, got: Any, want: Any) -> bool:
    """Whether a fact is right: bytes as printed with two decimals of a unit, the rest exact."""
    if isinstance(got, int | float) and isinstance(want, int | float):
        if name.endswith("_bytes"):
            return abs(got - want) <= max(0.01 * abs(want), 1024)
        return math.isclose(got, want, abs_tol=0.005 if name == "kv_cache_usage" else 0)
    return str(got) == str(want)


def judge(name: str, case: dict[str, Any], document: Document) -> None:
    """Everything the label says of one log."""
    label = case["label"]
    expected = ACCEPTED_ONLY.get(name, label)
    assert expected == label or expected in case["accept"]
    assert said(document) == expected
    assert document["near_misses"] in among(case["near_misses"])
    incidents = document["incidents"]
    if not incidents:
        return
    assert len(incidents) in among(case["incidents"])
    if case["phase"] in ("startup", "serving") and case.get("phase_visible", True):
        assert incidents[0]["phase"] == case["phase"]
    if case["fatal"] is not None and case.get("decidable", True):
        assert incidents[0]["fatal"] is case["fatal"]
    facts = incidents[0]["facts"]
    wrong = {
        fact: (facts.get(fact), want)
        for fact, want in (case.get("expect") or {}).items()
        if not any(same(fact, facts.get(fact), one) for one in among(want))
    }
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_labelled_case(name: str) -> None:
    """Each labelled case gets its label, count, phase, consequence and facts."""
    judge(name, CASES[name], analyzed(log_of(CASES[name])))


def shifted(by: bytes) -> Callable[[bytes], bytes]:
    """Put ``by`` before every line."""
    return lambda log: b"".join(by + line for line in log.splitlines(keepends=True))


PASTED: dict[str, Callable[[bytes], bytes]] = {
    "fenced": lambda log: b"```text\n" + log + b"\n```\n",
    "folded": lambda log: b"<details><summary>Log</summary>\n\n```\n" + log + b"\n```\n\n</details>\n",
    "quoted": shifted(b"> "),
    "shifted": shifted(b"    "),
    "fenced in a list": lambda log: shifted(b"  ")(b"```\n" + log + b"\n```\n"),
}


@pytest.mark.parametrize("how", PASTED)
def test_a_pasted_log_says_the_same(how: str) -> None:
    """Reports hold logs in fences, quotations and lists; what is found in them is what the log alone says."""
    kept = ("class", "phase", "fatal", "confidence", "facts")
    for name, case in CASES.items():
        alone, pasted = (
            [{key: one[key] for key in kept} for one in analyzed(log)["incidents"]]
            for log in (log_of(case), PASTED[how](log_of(case)))
        )
        assert pasted == alone, name


@pytest.mark.parametrize("name", REAL)
def test_capture(name: str) -> None:
    """Each capture of a real vLLM gets its label, count, phase, consequence and facts."""
    judge(name, REAL[name], analyzed(capture(name)))


def test_lives_of_a_whole_history() -> None:
    """Five lives in one log: their budgets, who died, and which incident belongs to which."""
    document = analyzed(capture("lifecycle_iter_mp"))
    more = REAL["lifecycle_iter_mp"]["more"]
    lives = document["engines"]
    assert [life["settings"]["max_num_batched_tokens"] for life in lives] == more["budgets_by_life"]
    assert [life["state"] for life in lives] == ["stopped", "dead", "dead", "dead", "stopped"]
    by_life = [sum(i["engine"] == n for i in document["incidents"]) for n in range(len(lives))]
    assert by_life == more["incidents_by_life"]
    prompts = [i["facts"]["max_prompt_tokens"] for i in document["incidents"]]
    assert prompts == [n for n in more["failing_prompt_tokens_by_life"] if n is not None]


def test_numbers_are_of_the_rank_with_the_least_free_memory() -> None:
    """Two ranks fail; free bytes are those of the tighter one and both ranks are named."""
    (incident,) = analyzed(capture("tp2_oom_both"))["incidents"]
    assert incident["facts"]["free_bytes"] == REAL["tp2_oom_both"]["more"]["free_bytes_rank1"]
    assert incident["facts"]["ranks"] == [0, 1]


def test_a_hang_starts_at_the_first_line() -> None:
    """One rank fails and the engine notices five minutes later: one incident, at the first line."""
    (incident,) = analyzed(capture("tp2_oom_rank1"))["incidents"]
    assert incident["time"] == "2026-11-30T17:22:29"
    assert incident["fatal"] is True
    assert incident["facts"]["ranks"] == [1]


def test_prompts_of_a_dump_are_not_taken_from_an_id() -> None:
    """A request id that holds a whole fake dump changes no number."""
    (incident,) = analyzed(capture("hostile_id_in_dump"))["incidents"]
    assert incident["facts"]["max_prompt_tokens"] == 15000
    assert incident["facts"]["prefill_tokens"] == 15000
    assert "66666" not in str(incident)
