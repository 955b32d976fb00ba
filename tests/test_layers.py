"""The layers of the package: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import exporter

ROOT = Path(exporter.__file__).parent
ORDER = (
    *("plain", "records", "sources", "vllm", "diagnosis", "document", "analyze", "report"),
    *(
        "config",
        "logs",
        "status",
        "scrape",
        "engine_state",
        "streams",
        "follow",
        "state",
        "state_lock",
        "metrics",
        "web",
    ),
    *("notify", "device", "probe", "target", "node", "aside", "app", "cli"),
)
PURE = ("vllm", "diagnosis")
IO_MODULES = {
    "aiohttp",
    "watchfiles",
    "prometheus_client",
    "structlog",
    "socket",
    "subprocess",
    "sys",
    "time",
}


def layer_of(path: Path) -> str:
    """The layer a module belongs to: its folder, or its own name at the top."""
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> set[tuple[int, str]]:
    """``(relative level, module)`` of every import of a module, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add((node.level, node.module or node.names[0].name))
        elif isinstance(node, ast.Import):
            found |= {(0, name.name) for name in node.names}
    return found


def modules() -> list[Path]:
    """Every module of the package but its entry points."""
    return [p for p in sorted(ROOT.rglob("*.py")) if p.name not in ("__init__.py", "__main__.py")]


def test_layers_only_look_down() -> None:
    """A module imports from its own layer and from those below it."""
    wrong = []
    for path in modules():
        here = ORDER.index(layer_of(path))
        for level, module in imports(path):
            up = level - len(path.relative_to(ROOT).parts)
            if level == 0 or up < 0:
                continue
            target = module.partition(".")[0]
            if target in ORDER and ORDER.index(target) > here:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_core_does_no_io() -> None:
    """Parsing and diagnosis import nothing that reads, writes, waits or serves."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules()
        if layer_of(path) in PURE
        for level, module in imports(path)
        if level == 0 and module.partition(".")[0] in IO_MODULES
    ]
    assert wrong == []
