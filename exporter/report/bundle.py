"""One archive to attach to a vLLM issue, with nothing of a user in it.

It holds only what the analysis rebuilt from recognised parts: no line of the log is copied, and
names that a user chose (the model's path, the served name) stay out unless they are a public
``owner/name``.
"""

from __future__ import annotations

import json
import platform
import re
import zipfile
from pathlib import Path

from .. import __version__
from ..analyze import Analysis
from ..document import document
from .text import report

_PUBLIC_MODEL = re.compile(r"[A-Za-z0-9][\w.-]{0,60}/[A-Za-z0-9][\w.-]{0,90}")

README = """\
What vllm-oom-exporter {version} found in the log of a vLLM server.

verdict.txt     the verdict as text
analysis.json   the same as data: settings, memory accounting, incidents, evidence
excerpt.txt     the lines it stands on, rebuilt from what was recognised in them

No line of the log was copied. Prompts, token ids, request ids and paths are not in here; a model
name is only where it has the form of a public repository. Look through it before you attach it.
"""


def write_bundle(analysis: Analysis, path: Path) -> None:
    """Write the archive; raises ``OSError`` where the path can't be written."""
    for life in analysis.history.lives.all:
        if life.model is not None and not _PUBLIC_MODEL.fullmatch(life.model):
            life.model = "(not a public name)"
    data = document(analysis.history, analysis.lines, analysis.bytes)
    data["written_by"] = {"vllm_oom_exporter": __version__, "python": platform.python_version()}
    excerpts = "\n\n".join("\n".join(one.excerpt) for one in analysis.history.incidents())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README.txt", README.format(version=__version__))
        archive.writestr("verdict.txt", report(analysis))
        archive.writestr("analysis.json", json.dumps(data, indent=1) + "\n")
        archive.writestr("excerpt.txt", excerpts + "\n")
