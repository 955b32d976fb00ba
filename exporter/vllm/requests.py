"""Request lines of records that were parsed; the scan sums up those it skips by the same rules.

See ``sources/request_lines.py`` for what such a line looks like and who writes which part of it.
"""

from __future__ import annotations

from ..records import Record, Traffic
from ..sources.request_lines import Requests

REQUEST_FILES = frozenset(["logger.py", "async_llm_engine.py"])
"""Modules that write ``Received request …`` with a prompt: 0.4.3..0.11.0."""


def received(record: Record) -> Traffic | None:
    """The requests that ``record`` reports, or None. The calls of one second are lines of one record."""
    if record.level != "INFO" or record.file not in REQUEST_FILES or not record.returns:
        return None
    requests = Requests()
    single = min(record.returns)
    for text, returns in zip(record.lines, record.returns, strict=True):
        requests.add("", text.encode("utf-8", "replace"), returns > single)
    return requests.take()
