"""Puts the dashboards into their one written form: ``python grafana/canonical.py`` rewrites, ``--check`` only tells.

Grafana writes keys in an order of its own, adds what only it needs, and puts every number on a line. Without one form,
moving a panel would be a change of a thousand lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH = 110
FIRST = ("uid", "name", "id", "type", "title", "refId", "description", "gridPos", "expr", "datasource")
"""Keys that say what an object is; the others follow by name."""

OF_ONE_GRAFANA = ("__elements", "__inputs", "__requires", "iteration", "version", "pluginVersion")
"""What a server or an export for another one adds. ``id`` of a dashboard is one more; panels keep theirs."""


def canonical(dashboard: dict[str, Any]) -> str:
    """The text of a dashboard's file."""
    kept = {key: value for key, value in dashboard.items() if key != "id"}
    return _written(_clean(kept), "") + "\n"


def _clean(value: Any) -> Any:
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if not isinstance(value, dict):
        return value
    keys = [key for key in value if key not in OF_ONE_GRAFANA]
    keys.sort(key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    found = {key: _clean(value[key]) for key in keys}
    if (
        found.get("type") in ("query", "datasource") and "name" in found
    ):  # a variable: what somebody had chosen
        found["current"], found["options"] = {}, []
    return found


def _written(value: Any, indent: str) -> str:
    """``value`` on one line where it fits, else an item a line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDTH or not value:
        return line
    inner = indent + "  "
    if isinstance(value, list):
        items = [_written(one, inner) for one in value]
        return "[\n" + ",\n".join(inner + item for item in items) + "\n" + indent + "]"
    items = [f"{json.dumps(key, ensure_ascii=False)}: {_written(one, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(inner + item for item in items) + "\n" + indent + "}"


def main() -> int:
    """Rewrite, or with ``--check`` name the files that are not in the form; exit 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("files", nargs="*", type=Path, default=sorted(HERE.glob("*.json")))
    args = parser.parse_args()
    wrong = 0
    for path in args.files:
        before = path.read_text(encoding="utf-8")
        after = canonical(json.loads(before))
        if before != after:
            wrong += 1
            print(f"{path}: {'not in the canonical form' if args.check else 'rewritten'}")
            if not args.check:
                path.write_text(after, encoding="utf-8")
    return int(bool(wrong and args.check))


if __name__ == "__main__":
    sys.exit(main())
