"""What several test files need: cases, captures, and a log turned into a document."""

from __future__ import annotations

import base64
import gzip
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from exporter.analyze import Reader
from exporter.diagnosis.history import History
from exporter.document import document
from exporter.sources.scan import BLOCK

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
CAPTURES = HERE / "captures"
LATEST = datetime(2026, 11, 30, 23, 0, 0)

Document = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--renew-golden`` rewrites golden files; look at the difference before you commit it."""
    parser.addoption("--renew-golden", action="store_true", help="rewrite the golden files")
    parser.addoption("--renew-screenshots", action="store_true", help="rewrite tests/screenshots")
    parser.addoption("--outage", default="2", help="seconds Alertmanager is away in its test; default: 2")


LONGEST = (
    "test_faults.py",
    "test_dashboards.py",
    "test_notify_live.py",
    "test_packaging.py",
    "test_probe.py",
    "test_probe_on_start.py",
    "test_pages_browser.py",
    "test_app.py",
    "test_node.py",
    "test_scan.py",
    "test_replay.py",
    "test_rules.py",
)
"""Files that take long. A worker that begins one of them last would be the only one at work."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the longest files; without workers the order is as ever."""
    if hasattr(config, "workerinput"):
        rank = {name: at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def encodable(value: Any) -> Any:
    """Plain data with every lone surrogate written as ``\\udcff``, so that it is UTF-8."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {encodable(key): encodable(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(map(encodable, value))
    return value


# Hostile text is logged and compared in tests, and a worker that cannot send its report ends the whole run
@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Reports go from workers to the terminal as UTF-8."""
    return encodable((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded as ``counts`` is printed when all have run; workers have no terminal."""
    reports = [one for some in terminalreporter.stats.values() for one in some]
    found = [
        text
        for one in reports
        if isinstance(one, pytest.TestReport) and one.when == "call"
        for name, text in one.user_properties
        if name == "counts"
    ]
    if found:
        terminalreporter.section("counts")
        for text in sorted(map(str, found)):
            terminalreporter.write_line(text)


def load_yaml(path: Path) -> Any:
    """The content of one YAML file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - one of the two safe loaders


def log_of(case: Mapping[str, Any]) -> bytes:
    """The log of one labelled case."""
    if "log_base64" in case:
        return base64.b64decode(case["log_base64"])
    return str(case["log"]).encode()


def capture(name: str) -> bytes:
    """The log of one capture of a real vLLM."""
    return gzip.decompress((CAPTURES / f"{name}.log.gz").read_bytes())


def analyzed(log: bytes, block: int = BLOCK) -> Document:
    """The document that ``analyze --format json`` prints for ``log``."""
    history = History()
    reader = Reader(history, LATEST)
    for at in range(0, len(log), block):
        reader.feed(log[at : at + block])
    reader.finish()
    history.finish()
    return document(history, reader.lines, reader.bytes)


@pytest.fixture(autouse=True)
def own_log_as_it_was() -> Iterator[None]:
    """A test that configures the exporter's own log does not do it for those after it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The installed command, as a user runs it."""
    found = Path(sys.executable).with_name("vllm-oom-exporter")
    assert found.exists(), "the package is not installed in this environment; run 'make test'"
    return [str(found)]


Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def run(command: list[str], tmp_path: Path) -> Run:
    """Run the command in an empty folder; standard input is ``input``, empty unless given."""

    def call(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*command, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )

    return call


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a golden file, or rewrite the file with ``--renew-golden``."""

    def check(name: str, text: str) -> None:
        path = HERE / "golden" / name
        if request.config.getoption("--renew-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path.name}; renew with --renew-golden and look at it"
        assert text == path.read_text(encoding="utf-8")

    return check
