"""Reads one file of the knowledge base and is the only thing that validates it.

Every mistake is reported with its place, all of them at once, instead of stopping at the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import yaml

from ..plain import mapping
from .rules import (
    ADVICE_NUMBERS,
    BASES,
    CLASS_IDS,
    EFFECTS,
    FACTS,
    FEATURES,
    STATUSES,
    DeadEndRule,
    EvidenceRule,
    Example,
    FailureClass,
    RemedyRule,
    compare,
    fields_of,
)

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ClassFile:
    """Turns one file into a ``FailureClass``, collecting problems instead of stopping at one."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems

    def _problem(self, place: str, what: str) -> None:
        self.problems.append(f"{self.name}: {place}: {what}")

    def read(self, text: str) -> FailureClass | None:
        """The class that the file describes, or None where it has a mistake."""
        before = len(self.problems)
        try:
            raw = yaml.load(text, Loader=LOADER)  # noqa: S506 - one of the two safe loaders
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"line {mark.line + 1}" if mark else "file"
            self._problem(place, getattr(error, "problem", None) or "not YAML")
            return None
        if not isinstance(raw, dict):
            self._problem("file", "must be a mapping")
            return None
        self._keys(
            "file",
            raw,
            required=[
                "id",
                "name",
                "phases",
                "status",
                "vllm",
                "summary",
                "mechanism",
                "scales_with",
                "evidence",
                "remedies",
                "dead_ends",
                "confirm",
                "confused_with",
                "sources",
                "examples",
            ],
        )
        if len(self.problems) > before:
            return None
        class_id = self._text("id", raw["id"])
        if f"{class_id}.yaml" != self.name or class_id not in CLASS_IDS:
            self._problem("id", f"{class_id!r} is not a known class, or not the file's name")
        vllm = raw["vllm"] if isinstance(raw["vllm"], dict) else {}
        self._keys("vllm", vllm, required=["first", "last"])
        result = FailureClass(
            id=class_id,
            name=self._text("name", raw["name"]),
            phases=tuple(
                self._choice("phases", one, ("startup", "serving"))
                for one in self._list("phases", raw["phases"])
            ),
            status=self._choice("status", raw["status"], STATUSES),
            first_vllm=str(vllm.get("first")),
            last_vllm=None if vllm.get("last") is None else str(vllm["last"]),
            summary=self._text("summary", raw["summary"]),
            mechanism=self._text("mechanism", raw["mechanism"]),
            scales_with=self._text("scales_with", raw["scales_with"]),
            evidence=tuple(self._evidence(i, one) for i, one in self._items("evidence", raw)),
            remedies=tuple(self._remedy(i, one) for i, one in self._items("remedies", raw)),
            dead_ends=tuple(self._dead_end(i, one) for i, one in self._items("dead_ends", raw)),
            confirm=self._text("confirm", raw["confirm"]),
            confused_with=tuple(self._confused(i, one) for i, one in self._items("confused_with", raw)),
            sources=tuple(
                self._text(f"sources[{i}]", s) for i, s in enumerate(self._list("sources", raw["sources"]))
            ),
            examples=tuple(self._example(i, one, class_id) for i, one in self._items("examples", raw)),
        )
        ids = [rule.id for rule in result.evidence]
        for twice in {one for one in ids if ids.count(one) > 1}:
            self._problem("evidence", f"id {twice!r} is used twice")
        if class_id != "unknown":
            expects = {example.expect for example in result.examples}
            if class_id not in expects or expects == {class_id}:
                self._problem("examples", "needs one of this class and one of something else")
            if raw["sources"] == []:
                self._problem("sources", "must not be empty")
        return result if len(self.problems) == before else None

    def _evidence(self, i: int, raw: Mapping[str, object]) -> EvidenceRule:
        place = f"evidence[{i}]"
        self._keys(place, raw, required=["id", "group", "when", "weight", "says"], optional=["basis"])
        self._when(place, raw.get("when"))
        self._bases(place, raw.get("basis"))
        weight = raw.get("weight")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight == 0:
            self._problem(f"{place}.weight", "must be a number other than 0")
            weight = 0.0
        says = self._template(f"{place}.says", raw.get("says"), (*FEATURES, *FACTS))
        return EvidenceRule(
            id=self._text(f"{place}.id", raw.get("id")),
            group=self._text(f"{place}.group", raw.get("group")),
            when=mapping(raw.get("when")),
            weight=float(weight),
            says=says,
        )

    def _remedy(self, i: int, raw: Mapping[str, object]) -> RemedyRule:
        place = f"remedies[{i}]"
        self._keys(place, raw, required=["do", "effect", "basis"], optional=["flags", "cost", "when"])
        self._when(place, raw.get("when"), (*FEATURES, *ADVICE_NUMBERS))
        allowed = (*FEATURES, *FACTS, *ADVICE_NUMBERS)
        flags, cost = raw.get("flags"), raw.get("cost")
        return RemedyRule(
            do=self._template(f"{place}.do", raw.get("do"), allowed),
            effect=self._choice(f"{place}.effect", raw.get("effect"), EFFECTS),
            flags=None if flags is None else self._template(f"{place}.flags", flags, allowed),
            cost=None if cost is None else self._text(f"{place}.cost", cost),
            when=mapping(raw.get("when")),
            basis=self._bases(place, raw.get("basis")),
        )

    def _dead_end(self, i: int, raw: Mapping[str, object]) -> DeadEndRule:
        place = f"dead_ends[{i}]"
        self._keys(place, raw, required=["do", "why"], optional=["when"])
        self._when(place, raw.get("when"), (*FEATURES, *ADVICE_NUMBERS))
        return DeadEndRule(
            do=self._text(f"{place}.do", raw.get("do")),
            why=self._text(f"{place}.why", raw.get("why")),
            when=mapping(raw.get("when")),
        )

    def _confused(self, i: int, raw: Mapping[str, object]) -> tuple[str, str]:
        place = f"confused_with[{i}]"
        self._keys(place, raw, required=["class", "tell"])
        return (
            self._choice(f"{place}.class", raw.get("class"), CLASS_IDS),
            self._text(f"{place}.tell", raw.get("tell")),
        )

    def _example(self, i: int, raw: Mapping[str, object], class_id: str) -> Example:
        place = f"examples[{i}]"
        self._keys(place, raw, required=["name", "log"], optional=["expect", "phase"])
        phase = raw.get("phase")
        return Example(
            name=self._text(f"{place}.name", raw.get("name")),
            log=self._text(f"{place}.log", raw.get("log")),
            expect=self._choice(f"{place}.expect", raw.get("expect", class_id), (*CLASS_IDS, "none")),
            phase=None if phase is None else self._choice(f"{place}.phase", phase, ("startup", "serving")),
        )

    # --- small checks -----------------------------------------------------------------------

    def _items(self, place: str, raw: Mapping[str, object]) -> Iterable[tuple[int, Mapping[str, object]]]:
        value = raw[place]
        if not isinstance(value, list):
            self._problem(place, "must be a list")
            return
        for i, one in enumerate(value):
            if isinstance(one, dict):
                yield i, one
            else:
                self._problem(f"{place}[{i}]", "must be a mapping")

    def _keys(
        self,
        place: str,
        raw: Mapping[str, object],
        required: Iterable[str],
        optional: Iterable[str] = (),
    ) -> None:
        required = list(required)
        for missing in [key for key in required if key not in raw]:
            self._problem(place, f"{missing!r} is missing")
        for extra in [key for key in raw if key not in (*required, *optional)]:
            self._problem(place, f"{extra!r} is not a known key")

    def _text(self, place: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            self._problem(place, "must be a text that is not empty")
            return ""
        return value.strip()

    def _choice(self, place: str, value: object, allowed: Iterable[str]) -> str:
        allowed = list(allowed)
        if value not in allowed:
            self._problem(place, f"{value!r} is none of {', '.join(allowed)}")
            return allowed[0]
        return str(value)

    def _bases(self, place: str, value: object) -> tuple[str, ...]:
        values = value if isinstance(value, list) else []
        if value is not None and not isinstance(value, list):
            self._problem(f"{place}.basis", "must be a list")
        return tuple(self._choice(f"{place}.basis", str(one).split(" ")[0], BASES) for one in values)

    def _list(self, place: str, value: object) -> Sequence[object]:
        if isinstance(value, list):
            return value
        self._problem(place, "must be a list")
        return ()

    def _when(self, place: str, value: object, allowed: Iterable[str] = FEATURES) -> None:
        if value is None:
            return
        if not isinstance(value, dict):
            self._problem(f"{place}.when", "must be a mapping of features to tests")
            return
        for name, test in value.items():
            if name not in allowed:
                self._problem(f"{place}.when", f"{name!r} is not a known feature")
            for one in test if isinstance(test, list) else [test]:
                if isinstance(one, str) and one[:1] in "<>":
                    try:
                        compare(one, 0.0)
                    except ValueError:
                        self._problem(f"{place}.when.{name}", f"{one!r} is not a comparison")

    def _template(self, place: str, value: object, allowed: Iterable[str]) -> str:
        text = self._text(place, value)
        try:
            names = fields_of(text)
        except ValueError as error:
            self._problem(place, f"not a template: {error}")
            return ""
        for name in names:
            if name not in allowed:
                self._problem(place, f"{{{name}}} is not a known fact or feature")
        return text
