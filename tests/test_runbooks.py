"""Every alert has a page for whoever it wakes, and every link in the pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_rules import ALERTS, RULES, rules_of

from exporter.diagnosis.knowledge import CLASS_IDS, builtin_classes
from exporter.metrics import TABLE

RUNBOOKS = RULES / "runbooks"
LOKI = {rule["alert"]: rule for path in sorted((RULES / "loki").glob("*.yaml")) for rule in rules_of(path)}
PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.stem != "README")
SECTIONS = ["Meaning", "Impact", "Look at", "Do", "Verify", "Looks similar, but is not"]
LINKED = [*PAGES, RUNBOOKS / "README.md", RULES / "README.md"]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_alerts_and_pages_are_the_same() -> None:
    """There is a page for every alert of every rule file, and none for anything else."""
    assert {path.stem for path in PAGES} == set(ALERTS) | set(LOKI)
    assert not set(ALERTS) & set(LOKI)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_every_section_with_something_in_it(path: Path) -> None:
    """The page is named after its alert, and has the six sections in order, none of them empty."""
    text = path.read_text(encoding="utf-8")
    title, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title.startswith(f"# {path.stem}\n")
    assert [part.split("\n", 1)[0] for part in parts] == SECTIONS
    assert all(len(part.split("\n", 1)[1].split()) >= 2 for part in parts)
    rule = ALERTS.get(path.stem) or LOKI[path.stem]
    assert f"Severity: {rule['labels']['severity']}." in title


@pytest.mark.parametrize("path", LINKED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links name files of the repository, and anchors headings in them."""
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    assert links
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_the_index_names_every_page() -> None:
    """The index has one row for each page, with its severity."""
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[\w+\]\((\w+)\.md\) \| (\w+) \|", index, re.MULTILINE))
    severity = {name: rule["labels"]["severity"] for name, rule in {**ALERTS, **LOKI}.items()}
    assert rows == severity


def test_pages_name_only_what_exists() -> None:
    """Metrics of ours and alerts that a page names exist."""
    exposed = {family.name for family in TABLE}
    records = (RULES / "vllm-oom-recording.yaml").read_text(encoding="utf-8")
    for path in LINKED:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w:])vllm_oom_\w+", text):
            assert name in exposed, f"{path.name}: {name}"
        for name in re.findall(r"\w+:vllm_oom_\w+:\w+", text):
            everywhere = records + "".join(one.read_text(encoding="utf-8") for one in RULES.rglob("*.yaml"))
            assert f"record: {name}\n" in everywhere, f"{path.name}: {name}"
        for name in re.findall(r"\bVLLM[A-Z]\w+", text):
            assert name in {*ALERTS, *LOKI, "VLLMOutOfMemory"}, f"{path.name}: {name}"


def test_the_tables_of_classes_are_whole() -> None:
    """Whoever is paged finds every class that can kill a serving engine, and every one of start-up only."""
    classes = builtin_classes()
    serving = {name for name in CLASS_IDS if "serving" in classes[name].phases} - {"prefill_budget"}
    startup = {name for name in CLASS_IDS if classes[name].phases == ("startup",)}
    for page, wanted in (("VLLMFatalOOM", serving), ("VLLMStartupOOM", startup)):
        rows = re.findall(
            r"^\| (.+?) \|", (RUNBOOKS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == wanted
