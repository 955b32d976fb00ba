"""Copies what the chart ships from where it is kept: rules, dashboards, the shell around vLLM.

A chart can't reach outside of its folder, and links don't survive packaging. ``copy_files.py`` after a
change of a source; ``copy_files.py --check`` says what differs, and exits 1 if something does.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "vllm-oom-exporter/files"
SOURCES = {
    "rules": sorted((ROOT / "rules").glob("*.yaml")),
    "dashboards": sorted((ROOT / "grafana").glob("*.json")),
    "shared-log": [ROOT / "deploy/kubernetes/shared-log" / name for name in ("serve.sh", "keep.py")],
}
NO_RULES = ("alertmanager.yaml",)  # lies beside the rules and is none


def differences() -> dict[Path, bytes | None]:
    """What a copy would write; None: delete."""
    wanted = {
        FILES / folder / one.name: one.read_bytes()
        for folder, sources in SOURCES.items()
        for one in sources
        if one.name not in NO_RULES
    }
    there = {one: one.read_bytes() for one in FILES.rglob("*") if one.is_file()}
    changed: dict[Path, bytes | None] = {
        path: data for path, data in wanted.items() if there.get(path) != data
    }
    return changed | {path: None for path in there if path not in wanted}


def main(arguments: list[str]) -> int:
    """Copy, or only look; returns an exit code."""
    changes = differences()
    for path, data in changes.items():
        print(f"{'differs' if data is not None else 'has no source'}: {path.relative_to(ROOT)}")
        if arguments != ["--check"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if data is None else path.write_bytes(data)
    return int(bool(changes)) if arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
