"""Loads the knowledge base, ``classes/*.yaml``.

A class of memory failure is one file: what it is, the evidence that speaks for and against
it, remedies with their cost, dead ends with their reason, how to confirm, sources, and
examples that are tests. ``CONTRIBUTING.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from .class_file import ClassFile
from .rules import (
    ADVICE_NUMBERS,
    CLASS_IDS,
    FACTS,
    FEATURES,
    EvidenceRule,
    FailureClass,
    fields_of,
    holds,
)

__all__ = [
    "ADVICE_NUMBERS", "CLASS_IDS", "FACTS", "FEATURES", "EvidenceRule", "FailureClass", "KnowledgeError",
    "builtin_classes", "fields_of", "holds", "load_classes",
]  # fmt: skip


class KnowledgeError(ValueError):
    """The knowledge base has mistakes. ``problems`` lists each as ``file: place: what``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@cache
def builtin_classes() -> Mapping[str, FailureClass]:
    """The shipped knowledge base, in the order of ``CLASS_IDS``."""
    loaded = load_classes(files("exporter.diagnosis") / "classes")
    return {class_id: loaded[class_id] for class_id in CLASS_IDS}


def load_classes(folder: Traversable, complete: bool = True) -> dict[str, FailureClass]:
    """Read every ``*.yaml`` of ``folder``; raises ``KnowledgeError`` with every problem found.

    ``complete`` asks for a file of every class; without it they replace some of the shipped ones.
    """
    problems: list[str] = []
    classes: dict[str, FailureClass] = {}
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        one = ClassFile(name, problems).read(text)
        if one is not None:
            classes[one.id] = one
    if complete:
        problems += [f"{one}.yaml: missing file" for one in CLASS_IDS if f"{one}.yaml" not in names]
    if problems:
        raise KnowledgeError(problems)
    return classes
