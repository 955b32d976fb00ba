"""The suite runs in several processes: what their reports need."""

from __future__ import annotations

from conftest import HERE, LONGEST, encodable


def test_a_report_can_be_sent() -> None:
    """Hostile text in a failed comparison is no reason to lose the run; what is text stays as it is."""
    report = {"sections": [("log", "a\ud800b")], "longrepr": {"\udcff": ["größer", 1, None, True]}}
    sent = encodable(report)
    assert sent == {"sections": [("log", "a\\ud800b")], "longrepr": {"\\udcff": ["größer", 1, None, True]}}
    assert str(sent).encode()


def test_files_that_are_begun_first_exist() -> None:
    """A file that was renamed would be begun last, and nobody would see why the suite takes longer."""
    assert [name for name in LONGEST if not (HERE / name).exists()] == []
