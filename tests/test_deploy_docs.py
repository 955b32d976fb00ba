"""The pages about running it, and the release workflow: what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from conftest import load_yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "SECURITY.md", *sorted((ROOT / "deploy").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
WORKFLOW = ROOT / ".github/workflows/release.yaml"


def _anchors(page: Path) -> set[str]:
    """What headings of a page can be linked as."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).lower() for one in headings]
    return {re.sub(r"[^\w -]", "", one).replace(" ", "-") for one in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every link of a page is a file of the repository, and its anchor a heading there."""
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {path}"
        assert not anchor or anchor in _anchors(target), f"{page}: {path}#{anchor}"


def test_every_way_of_running_has_its_page() -> None:
    """Each says how to upgrade and to uninstall, what it needs, and what it may do."""
    for way in ("kubernetes", "helm/vllm-oom-exporter", "compose", "systemd"):
        text = (ROOT / "deploy" / way / "README.md").read_text().lower()
        for word in ("upgrade", "uninstall", "sizing", "security"):
            assert word in text, f"{way}: {word}"


def test_the_release_label_comes_first() -> None:
    """The trap most people fall into is the first thing under troubleshooting."""
    kubernetes = (ROOT / "deploy/kubernetes/README.md").read_text().split("## It is not scraped\n\n")[1]
    assert kubernetes.startswith("1. **The label `release`.**")
    chart = (ROOT / "deploy/helm/vllm-oom-exporter/README.md").read_text().split("## Troubleshooting\n\n")[1]
    assert "`release:" in chart.split("\n\n")[0]


def test_the_release_workflow_asks_for_little() -> None:
    """Jobs may write nothing but what they attest; nothing is published before the tests have passed."""
    workflow = load_yaml(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        written = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        assert written <= {"id-token", "attestations"}, name
        needed = name
        while needed != "test":
            needed = jobs[needed]["needs"]


def test_the_release_workflow_runs_what_was_reviewed() -> None:
    """A tag can be moved; every action is named by a commit, with its version beside it."""
    uses = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert uses
    for one in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


def test_the_release_workflow_runs_what_exists() -> None:
    """Files and make targets that it names are in the repository."""
    text = WORKFLOW.read_text()
    for path in re.findall(r"(?:deploy|\.ci)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", text):
        assert f"\n{target}:" in targets, target
    assert yaml.safe_load(text)["name"] == "release"
