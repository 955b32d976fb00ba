"""The archive to attach to an issue."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

from conftest import Run, capture
from test_hostile import HIDDEN, TestNothingComesOut

MEMBERS = ["README.txt", "verdict.txt", "analysis.json", "excerpt.txt"]


def contents(path: Path) -> dict[str, str]:
    """Every member of an archive as text."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_holds_verdict_settings_facts_and_excerpt(run: Run, tmp_path: Path) -> None:
    """One archive has all that a maintainer asks for first."""
    log = tmp_path / "server.log.gz"
    log.write_bytes(gzip.compress(capture("mlp_eager_16384")))
    result = run("analyze", log, "--bundle", "bundle.zip")
    assert result.returncode == 1
    files = contents(tmp_path / "bundle.zip")
    assert list(files) == MEMBERS
    data = json.loads(files["analysis.json"])
    assert data["engines"][0]["vllm_version"] == "0.32.0"
    assert data["engines"][0]["settings"]["max_num_batched_tokens"] == 16384
    assert data["incidents"][0]["class"] == "prefill_budget"
    assert "activation.py" in files["excerpt.txt"]
    assert files["verdict.txt"].startswith("Incident: prefill_budget")


def test_holds_nothing_of_a_user(run: Run, tmp_path: Path) -> None:
    """Prompts, ids, token ids and private model names are in no member."""
    private = b"(APIServer pid=1) INFO 11-02 10:00:00 [utils.py:233] non-default args: {'model': '/home/alice/secret-model', 'max_num_batched_tokens': 8192, 'api_key': ['sk-1234'], 'chat_template': 'be kind'}\n"
    result = run(
        "analyze", "-", "--bundle", "bundle.zip", stdin=private + TestNothingComesOut.death_with_secrets()
    )
    assert result.returncode == 1
    text = "".join(contents(tmp_path / "bundle.zip").values())
    assert "8192" in text
    for hidden in (HIDDEN, "314159", "secret-model", "alice", "sk-1234", "be kind"):
        assert hidden not in text


def test_keeps_a_public_model_name(run: Run, tmp_path: Path) -> None:
    """``owner/name`` is public and helps; it stays."""
    log = b"(EngineCore pid=104) INFO 11-02 10:00:01 [core.py:110] Initializing a V1 LLM engine (v0.20.0) with config: model='example-org/dense-8b', speculative_config=None\n"
    run("analyze", "-", "--bundle", "bundle.zip", stdin=log)
    assert "example-org/dense-8b" in contents(tmp_path / "bundle.zip")["analysis.json"]


def test_a_path_that_can_not_be_written(run: Run) -> None:
    """One line says what and what to do, and the verdict is still printed."""
    result = run("analyze", "-", "--bundle", "no/such/folder/b.zip", stdin=capture("mlp_eager_16384"))
    assert result.returncode == 2
    assert b"Incident: prefill_budget" in result.stdout
    assert result.stderr.decode().splitlines() == [
        "vllm-oom-exporter: --bundle no/such/folder/b.zip: No such file or directory; choose a path that can be written"
    ]
