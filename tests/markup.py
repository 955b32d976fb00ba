"""Reads a page as a strict parser would: what a browser forgives is a mistake here."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = frozenset({"meta", "link"})
_CELLS = frozenset({"td", "th", "dt", "dd"})  # a space between them, as one sees


@dataclass(slots=True)
class Element:
    """One element, with the text in it and in what is below."""

    tag: str
    attributes: dict[str, str]
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What a reader gets, spaces collapsed."""
        return " ".join("".join(self.parts).split())


class Page(HTMLParser):
    """The elements of a page in order. ``mistakes`` is empty for one that is well-formed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.mistakes: list[str] = []
        self._open: list[Element] = []
        if not source.startswith("<!DOCTYPE html>\n"):
            self.mistakes.append("no doctype")
        self.feed(source)
        self.close()
        self.mistakes += [f"<{one.tag}> is not closed" for one in self._open]
        self._check_references()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element."""
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.mistakes.append(f"<{tag}> has an attribute twice")
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Shapes of a drawing close themselves."""
        self.handle_starttag(tag, attrs)
        if tag == "path":
            self._open.pop()
        else:
            self.mistakes.append(f"<{tag}/>")

    def handle_endtag(self, tag: str) -> None:
        """It has to close what was opened last."""
        if not self._open or self._open[-1].tag != tag:
            self.mistakes.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")
        else:
            self._open.pop()
        if tag in _CELLS:
            for one in self._open:
                one.parts.append(" ")

    def handle_data(self, data: str) -> None:
        """Text belongs to everything it stands in."""
        for one in self._open:
            one.parts.append(data)
        if not self._open and data.strip():
            self.mistakes.append("text outside of everything")

    def handle_comment(self, data: str) -> None:
        """The templates have none, so that none of theirs can be shown."""
        self.mistakes.append(f"comment {data[:20]}")

    def _check_references(self) -> None:
        ids = [one.attributes["id"] for one in self.elements if "id" in one.attributes]
        if len(ids) != len(set(ids)):
            self.mistakes.append("an id is there twice")
        for one in self.elements:
            wanted = one.attributes.get("aria-labelledby", "").split()
            if one.attributes.get("href", "").startswith("#"):
                wanted.append(one.attributes["href"][1:])
            self.mistakes += [f"nothing has the id {name}" for name in wanted if name not in ids]
        if sum(one.tag == "h1" for one in self.elements) != 1:
            self.mistakes.append("not one h1")

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements of that tag, with those attributes (``class_`` for ``class``)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [one for one in self.elements if one.tag == tag and wanted.items() <= one.attributes.items()]

    @property
    def text(self) -> str:
        """What a reader gets of the content."""
        return self.all("main")[0].text

    @property
    def links(self) -> list[str]:
        """Where it leads, other than within itself."""
        found = [one.attributes["href"] for one in self.elements if one.tag == "a"]
        return [one for one in found if not one.startswith("#")]
