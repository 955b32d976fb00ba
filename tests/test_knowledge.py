from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.analyze import Reader
from exporter.diagnosis import advice, features
from exporter.diagnosis.history import History
from exporter.diagnosis.knowledge import (
    ADVICE_NUMBERS,
    CLASS_IDS,
    FACTS,
    FEATURES,
    KnowledgeError,
    builtin_classes,
    fields_of,
    holds,
    load_classes,
)
from exporter.diagnosis.rules import BASES, EFFECTS, STATUSES, Example
from exporter.vllm import signals
from exporter.vllm.memory_error import WORDINGS
from exporter.vllm.traceback import OPERATIONS, STAGES

LATEST = datetime(2026, 11, 30)
FILE = "lora.yaml"
VALID: dict[str, Any] = {
    "id": "lora",
    "name": "An adapter does not fit",
    "phases": ["serving"],
    "status": "stable",
    "vllm": {"first": "0.3.0", "last": None},
    "summary": "An adapter does not fit.",
    "mechanism": "It needs memory.",
    "scales_with": "rank",
    "evidence": [
        {
            "id": "frames",
            "group": "traceback",
            "when": {"operation": "lora"},
            "weight": 3.0,
            "says": "{frame} is of an adapter",
            "basis": ["src"],
        },
    ],
    "remedies": [
        {
            "do": "Lower it to {max_model_len}.",
            "effect": "helps",
            "basis": ["src", "rep 12"],
            "flags": "--max-loras 1",
            "cost": "fewer",
            "when": {"step_fill": ">= 0.5"},
        },
    ],
    "dead_ends": [{"do": "wait", "why": "it comes back", "when": {"phase": "serving"}}],
    "confirm": "Start without adapters.",
    "confused_with": [{"class": "prefill_budget", "tell": "frames"}],
    "sources": ["vllm/lora/layers.py"],
    "examples": [
        {"name": "one", "log": "x"},
        {"name": "two", "log": "x", "expect": "none", "phase": "serving"},
    ],
}

Change = Callable[[dict[str, Any]], object]


def problems_of(tmp_path: Path, text: str) -> list[str]:
    """What is wrong with ``lora.yaml`` of this text, without its name."""
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(KnowledgeError) as error:
        load_classes(tmp_path)
    return [one.removeprefix(f"{FILE}: ") for one in error.value.problems if one.startswith(FILE)]


def changed(change: Change) -> str:
    """The valid file after a change, as YAML."""
    raw = copy.deepcopy(VALID)
    change(raw)
    return yaml.safe_dump(raw)


MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "key-missing": (lambda r: r.pop("summary"), ["file: 'summary' is missing"]),
    "two-keys-missing": (
        lambda r: (r.pop("summary"), r.pop("id")),
        ["file: 'id' is missing", "file: 'summary' is missing"],
    ),
    "key-unknown": (lambda r: r.update(extra=1), ["file: 'extra' is not a known key"]),
    "id-unknown": (
        lambda r: r.update(id="nothing"),
        [
            "id: 'nothing' is not a known class, or not the file's name",
            f"examples[0].expect: 'nothing' is none of {', '.join(CLASS_IDS)}, none",
            "examples: needs one of this class and one of something else",
        ],
    ),
    "id-of-another-file": (
        lambda r: r.update(id="sampler"),
        ["id: 'sampler' is not a known class, or not the file's name"],
    ),
    "text-empty": (lambda r: r.update(summary="  "), ["summary: must be a text that is not empty"]),
    "text-a-number": (lambda r: r.update(name=5), ["name: must be a text that is not empty"]),
    "phase-unknown": (lambda r: r.update(phases=["night"]), ["phases: 'night' is none of startup, serving"]),
    "status-unknown": (lambda r: r.update(status="old"), ["status: 'old' is none of stable, experimental"]),
    "version-missing": (lambda r: r.update(vllm={"first": "0.3.0"}), ["vllm: 'last' is missing"]),
    "version-no-mapping": (
        lambda r: r.update(vllm="0.3.0"),
        ["vllm: 'first' is missing", "vllm: 'last' is missing"],
    ),
    "list-no-list": (lambda r: r.update(evidence={"id": "x"}), ["evidence: must be a list"]),
    "item-no-mapping": (lambda r: r["remedies"].append("x"), ["remedies[1]: must be a mapping"]),
    "evidence-key-missing": (
        lambda r: r["evidence"][0].pop("group"),
        ["evidence[0]: 'group' is missing", "evidence[0].group: must be a text that is not empty"],
    ),
    "evidence-key-unknown": (
        lambda r: r["evidence"][0].update(wieght=1),
        ["evidence[0]: 'wieght' is not a known key"],
    ),
    "evidence-weight-zero": (
        lambda r: r["evidence"][0].update(weight=0),
        ["evidence[0].weight: must be a number other than 0"],
    ),
    "evidence-weight-text": (
        lambda r: r["evidence"][0].update(weight="3"),
        ["evidence[0].weight: must be a number other than 0"],
    ),
    "evidence-weight-truth": (
        lambda r: r["evidence"][0].update(weight=True),
        ["evidence[0].weight: must be a number other than 0"],
    ),
    "evidence-id-twice": (
        lambda r: r["evidence"].append(r["evidence"][0]),
        ["evidence: id 'frames' is used twice"],
    ),
    "when-no-mapping": (
        lambda r: r["evidence"][0].update(when=["operation"]),
        ["evidence[0].when: must be a mapping of features to tests"],
    ),
    "when-unknown": (
        lambda r: r["evidence"][0].update(when={"opration": "lora"}),
        ["evidence[0].when: 'opration' is not a known feature"],
    ),
    "when-no-comparison": (
        lambda r: r["evidence"][0].update(when={"step_fill": ">=0.9"}),
        ["evidence[0].when.step_fill: '>=0.9' is not a comparison"],
    ),
    "when-no-number": (
        lambda r: r["evidence"][0].update(when={"step_fill": ">= much"}),
        ["evidence[0].when.step_fill: '>= much' is not a comparison"],
    ),
    "when-no-operator": (
        lambda r: r["evidence"][0].update(when={"step_fill": "<> 1"}),
        ["evidence[0].when.step_fill: '<> 1' is not a comparison"],
    ),
    "advice-number-in-evidence": (
        lambda r: r["evidence"][0].update(when={"shortage_bytes": "> 1"}),
        ["evidence[0].when: 'shortage_bytes' is not a known feature"],
    ),
    "template-unknown": (
        lambda r: r["evidence"][0].update(says="{fram} did it"),
        ["evidence[0].says: {fram} is not a known fact or feature"],
    ),
    "template-broken": (
        lambda r: r["evidence"][0].update(says="{frame did it"),
        ["evidence[0].says: not a template: expected '}' before end of string"],
    ),
    "template-advice-number-in-evidence": (
        lambda r: r["evidence"][0].update(says="{shortage_bytes}"),
        ["evidence[0].says: {shortage_bytes} is not a known fact or feature"],
    ),
    "basis-unknown": (
        lambda r: r["evidence"][0].update(basis=["guess"]),
        ["evidence[0].basis: 'guess' is none of src, doc, maint, rep, arith, inf, measured"],
    ),
    "remedy-key-missing": (lambda r: r["remedies"][0].pop("basis"), ["remedies[0]: 'basis' is missing"]),
    "remedy-effect-unknown": (
        lambda r: r["remedies"][0].update(effect="heals"),
        ["remedies[0].effect: 'heals' is none of fixes, helps, depends"],
    ),
    "remedy-flags-unknown": (
        lambda r: r["remedies"][0].update(flags="--x {y}"),
        ["remedies[0].flags: {y} is not a known fact or feature"],
    ),
    "remedy-cost-empty": (
        lambda r: r["remedies"][0].update(cost=""),
        ["remedies[0].cost: must be a text that is not empty"],
    ),
    "remedy-when-unknown": (
        lambda r: r["remedies"][0].update(when={"x": 1}),
        ["remedies[0].when: 'x' is not a known feature"],
    ),
    "dead-end-why-missing": (
        lambda r: r["dead_ends"][0].pop("why"),
        ["dead_ends[0]: 'why' is missing", "dead_ends[0].why: must be a text that is not empty"],
    ),
    "confused-with-unknown": (
        lambda r: r["confused_with"][0].update({"class": "x"}),
        [f"confused_with[0].class: 'x' is none of {', '.join(CLASS_IDS)}"],
    ),
    "sources-empty": (lambda r: r.update(sources=[]), ["sources: must not be empty"]),
    "source-no-text": (lambda r: r.update(sources=[5]), ["sources[0]: must be a text that is not empty"]),
    "example-log-missing": (
        lambda r: r["examples"][0].pop("log"),
        ["examples[0]: 'log' is missing", "examples[0].log: must be a text that is not empty"],
    ),
    "example-expects-unknown": (
        lambda r: r["examples"][1].update(expect="x"),
        [f"examples[1].expect: 'x' is none of {', '.join(CLASS_IDS)}, none"],
    ),
    "example-phase-unknown": (
        lambda r: r["examples"][1].update(phase="x"),
        ["examples[1].phase: 'x' is none of startup, serving"],
    ),
    "examples-only-of-it": (
        lambda r: r["examples"].pop(),
        ["examples: needs one of this class and one of something else"],
    ),
    "examples-none-of-it": (
        lambda r: r["examples"].pop(0),
        ["examples: needs one of this class and one of something else"],
    ),
    "two-mistakes": (
        lambda r: r.update(name="", status="x"),
        ["name: must be a text that is not empty", "status: 'x' is none of stable, experimental"],
    ),
}
UNSTOPPED: dict[str, tuple[Change, list[str]]] = {
    "phases-no-list": (lambda r: r.update(phases=None), ["phases: must be a list"]),
    "phases-a-text": (lambda r: r.update(phases="serving"), ["phases: must be a list"]),
    "sources-no-list": (lambda r: r.update(sources=5), ["sources: must be a list"]),
    "basis-no-list": (lambda r: r["remedies"][0].update(basis="src"), ["remedies[0].basis: must be a list"]),
    "comparison-in-a-list": (
        lambda r: r["evidence"][0].update(when={"step_fill": [">= much"]}),
        ["evidence[0].when.step_fill: '>= much' is not a comparison"],
    ),
}


class TestValidation:
    """Every mistake in a file is reported with its place."""

    def test_the_valid_file_is_valid(self, tmp_path: Path) -> None:
        """The file that the others are made of has no problem; the missing ones are named."""
        (tmp_path / FILE).write_text(yaml.safe_dump(VALID), encoding="utf-8")
        with pytest.raises(KnowledgeError) as error:
            load_classes(tmp_path)
        assert error.value.problems == [f"{one}.yaml: missing file" for one in CLASS_IDS if one != "lora"]

    @pytest.mark.parametrize("name", MISTAKES)
    def test_a_mistake(self, tmp_path: Path, name: str) -> None:
        """A mistake is reported as place and what, exactly, and nothing else is."""
        change, expected = MISTAKES[name]
        assert problems_of(tmp_path, changed(change)) == expected

    @pytest.mark.parametrize("name", UNSTOPPED)
    def test_a_mistake_that_is_not_caught(self, tmp_path: Path, name: str) -> None:
        """A value of the wrong kind is reported like any other mistake."""
        change, expected = UNSTOPPED[name]
        assert problems_of(tmp_path, changed(change)) == expected

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "file: must be a mapping"),
            ("- a\n- b\n", "file: must be a mapping"),
            ("id: lora\nname: 'x\n", "line 3: found unexpected end of stream"),
            ("id: lora\nname: a: b\n", "line 2: mapping values are not allowed in this context"),
            (
                "id: !!python/object:os.system x\n",
                "line 1: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'",
            ),
        ],
        ids=["empty", "list", "open-quote", "two-colons", "python-object"],
    )
    def test_what_is_no_yaml(self, tmp_path: Path, text: str, problem: str) -> None:
        """What is no YAML, or builds objects, is reported with its line."""
        assert problems_of(tmp_path, text) == [problem]

    def test_the_error_lists_all(self, tmp_path: Path) -> None:
        """The text of the error has every problem on a line of its own."""
        with pytest.raises(KnowledgeError) as error:
            load_classes(tmp_path)
        assert str(error.value).split("\n") == [f"{one}.yaml: missing file" for one in CLASS_IDS]


class TestHolds:
    """Conditions."""

    @pytest.mark.parametrize(
        ("when", "found", "expected"),
        [
            ({}, {}, True),
            ({"a": 1}, {"a": 1}, True),
            ({"a": "x"}, {"a": "y"}, False),
            ({"a": ["x", "y"]}, {"a": "y"}, True),
            ({"a": ["x", "y"]}, {"a": "z"}, False),
            ({"a": ">= 0.9"}, {"a": 0.9}, True),
            ({"a": "> 0.9"}, {"a": 0.9}, False),
            ({"a": "< 0.9"}, {"a": 0}, True),
            ({"a": "<= 5"}, {"a": 6}, False),
            ({"a": ">= 1"}, {"a": "text"}, False),
            ({"a": None}, {}, True),
            ({"a": None}, {"a": 0}, False),
            ({"a": False}, {}, False),
            ({"a": "x"}, {"a": frozenset({"x", "y"})}, True),
            ({"a": ["z", "y"]}, {"a": frozenset({"x", "y"})}, True),
            ({"a": "z"}, {"a": frozenset({"x", "y"})}, False),
            ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
        ],
        ids=[
            "nothing",
            "equal",
            "unequal",
            "one-of",
            "none-of",
            "at-least",
            "more",
            "less",
            "at-most",
            "no-number",
            "unknown",
            "known-zero",
            "unknown-is-not-false",
            "member",
            "member-of-list",
            "no-member",
            "all-must-hold",
        ],
    )
    def test_one(self, when: dict[str, object], found: dict[str, object], expected: bool) -> None:
        """A condition holds as its documentation says."""
        assert holds(when, found) is expected

    def test_names_of_a_template(self) -> None:
        """The names in braces are found, doubled braces are text."""
        assert fields_of("a {b} {c:x} {{d}}") == ["b", "c"]


class TestVocabulary:
    """The names that the files use mean something."""

    @pytest.mark.parametrize("name", FEATURES)
    def test_every_feature_is_filled(self, name: str) -> None:
        """Every documented feature is one that the code fills."""
        assert f'"{name}"' in inspect.getsource(features)

    @pytest.mark.parametrize("name", FACTS)
    def test_every_fact_is_filled(self, name: str) -> None:
        """Every documented fact is one that the code fills."""
        assert f'"{name}"' in inspect.getsource(features)

    @pytest.mark.parametrize("name", ADVICE_NUMBERS)
    def test_every_number_is_computed(self, name: str) -> None:
        """Every number that a remedy may name is one that the advice computes."""
        assert f'"{name}"' in inspect.getsource(advice)

    @pytest.mark.parametrize("feature", ["message", "stage", "operation", "frames"])
    def test_conditions_name_what_there_is(self, feature: str) -> None:
        """Kinds, stages and operations in the files are ones that a log can give."""
        in_signals = inspect.getsource(signals) + inspect.getsource(inspect.getmodule(History) or features)
        kinds = {wording.kind for wording in WORDINGS} | {"warning_then_failure"}
        known = {
            "message": kinds,
            "stage": set(STAGES),
            "operation": set(OPERATIONS),
            "frames": {*STAGES, *OPERATIONS},
        }[feature]
        used: set[str] = set()
        for one in builtin_classes().values():
            conditions = [rule.when for rule in one.evidence] + [rule.when for rule in one.remedies]
            for when in conditions + [rule.when for rule in one.dead_ends]:
                test = when.get(feature)
                used |= set(test) if isinstance(test, list) else {test} if isinstance(test, str) else set()
        assert {name for name in used - known if f'"{name}"' not in in_signals} == set()

    def test_the_shipped_classes(self) -> None:
        """All classes of the contract are there, in its order."""
        assert tuple(builtin_classes()) == CLASS_IDS
        assert len(CLASS_IDS) == 24
        assert sum(len(one.phases) for one in builtin_classes().values()) == 35

    @pytest.mark.parametrize("class_id", CLASS_IDS)
    def test_a_shipped_class(self, class_id: str) -> None:
        """A shipped class is complete: a known status, effects and bases, remedies, examples, a way to confirm."""
        one = builtin_classes()[class_id]
        assert one.status in STATUSES
        assert {rule.effect for rule in one.remedies} <= set(EFFECTS)
        assert {base for rule in one.remedies for base in rule.basis} <= set(BASES)
        assert one.confirm
        assert one.examples
        assert one.evidence or class_id == "unknown"
        assert class_id not in {other for other, _ in one.confused_with}


def _examples() -> Iterator[tuple[str, Example]]:
    for one in builtin_classes().values():
        for example in one.examples:
            yield one.id, example


EXAMPLES = list(_examples())


@pytest.mark.parametrize(
    ("class_id", "example"),
    EXAMPLES,
    ids=[f"{name}-{one.name[:50].replace(' ', '-')}" for name, one in EXAMPLES],
)
def test_an_example(class_id: str, example: Example) -> None:
    """The log of an example gives exactly the class, the phase and the number of incidents it stands for."""
    history = History()
    reader = Reader(history, LATEST)
    reader.feed(example.log.encode())
    reader.finish()
    history.finish()
    found = [(one.class_id, str(one.phase)) for one in history.incidents()]
    if example.expect == "none":
        assert found == []
        return
    assert [name for name, _ in found] == [example.expect], class_id
    assert example.phase in (found[0][1], None)


@pytest.mark.parametrize(
    ("class_id", "example"),
    EXAMPLES,
    ids=[f"{name}-{one.name[:50].replace(' ', '-')}" for name, one in EXAMPLES],
)
def test_an_example_shows_no_gap(class_id: str, example: Example) -> None:
    """Everything that is said of an example is complete: no name without a value."""
    history = History()
    reader = Reader(history, LATEST)
    reader.feed(example.log.encode())
    reader.finish()
    history.finish()
    for one in history.incidents():
        said = [e.says for e in one.evidence] + [f"{r.text} {r.flags or ''}" for r in one.advice.do]
        assert [text for text in said if set("{}?") & set(text)] == [], class_id
