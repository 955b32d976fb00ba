"""Whether a text is the log of a vLLM server, by how its lines begin.

A node holds hundreds of logs that are none. What they are is asked of their first bytes, so a
block is searched for what a line of vLLM can't do without before any line is taken apart.
"""

from __future__ import annotations

import re

from ..records import Line
from ..sources.framing import Framing

# What every line below holds: "[core.py:1586]", "llm_engine.py:161]", "vllm.v1.engine.core", "(EngineCore pid=104)"
_HINT = re.compile(rb"\.py:\d+\]|vllm[./]| pid=\d+\)")
# (EngineCore pid=104) ERROR 11-02 10:00:00 [core.py:1586] msg     INFO 06-01 12:00:00 llm_engine.py:161] msg
# VLLM_LOGGING_PREFIX may stand before the process or behind it
_LOGGED = re.compile(
    r"[^\"'{]{0,160}?\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d(?::\d\d)?(?:[.,]\d+)? "
    r"\[?(?:[\w.-]+/)*[\w.-]+\.py:\d+\]"
)
# 2025-11-02 12:00:04,315 - vllm.v1.engine.core_client - ERROR - msg
_DASHED = re.compile(r"\d{4}-\d\d-\d\d[ T][\d:.,]+ - vllm\.[\w.]+ - ")
# {"asctime": "…", "levelname": "INFO", "name": "vllm.entrypoints.launcher", …}
_JSON = re.compile(r"\{.{0,200}\"(?:name|logger)\": ?\"vllm\.[\w.]+\"")
# (EngineCore_DP0 pid=301) ValueError: …     what no logger wrote is marked too
_MARKED = re.compile(r"\((?:APIServer|EngineCore|Worker|VllmWorker)\w*(?: (?:rank=)?\w+)? pid=\d{1,18}\) ")
#   File "/opt/venv/lib/python3.12/site-packages/vllm/v1/core/kv_cache_utils.py", line 761, in …
_FRAME = re.compile(r"[^\"]{0,80}? {2,}File \"[^\"]*\bvllm/[\w/]+\.py\", line \d+, in ")
_LONGEST = 4096  # bytes of a line; what it is stands in front


def is_vllm(block: bytes) -> bool:
    """Whether a line of ``block`` is one that only vLLM writes; it may be wrapped by a runtime.

    Text that quotes such a line is none: not in a message, not as a value of a JSON object.
    """
    seen = -1
    for hint in _HINT.finditer(block):
        begin = block.rfind(b"\n", 0, hint.start()) + 1
        if begin == seen:
            continue
        seen = begin
        end = block.find(b"\n", hint.end())
        raw = block[begin : min(len(block) if end < 0 else end, begin + _LONGEST)]
        if any(map(_is_of_vllm, _lines(raw))):
            return True
    return False


def _lines(raw: bytes) -> list[Line]:
    framing = Framing()
    return [*framing.feed(1, raw), *framing.flush()]


def _is_of_vllm(line: Line) -> bool:
    patterns = (_JSON,) if line.text[:1] == "{" else (_LOGGED, _MARKED, _FRAME, _DASHED)
    return any(one.match(line.text) for one in patterns)
