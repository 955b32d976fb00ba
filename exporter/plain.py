"""Plain data as JSON and YAML give it: of the type that is meant, or nothing."""

from __future__ import annotations

from collections.abc import Mapping


def mapping(value: object) -> Mapping[str, object]:
    """``value``, or nothing where it is no object."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[object]:
    """What is in a list; nothing where it is none."""
    return list(value) if isinstance(value, list | tuple) else []


def mappings(value: object) -> list[Mapping[str, object]]:
    """The objects in a list."""
    return [one for one in items(value) if isinstance(one, Mapping)]


def whole(value: object) -> int | None:
    """``value`` where it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
