"""The command as a user meets it: output, exit codes, and bad input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run, capture

import exporter
from exporter.cli import main
from exporter.diagnosis.knowledge import builtin_classes


def one_line(stderr: bytes) -> str:
    """Standard error, which must be one line and no traceback."""
    lines = stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert "Traceback" not in lines[0]
    return lines[0]


class TestAnalyze:
    """``analyze`` on good input."""

    def test_an_incident_is_exit_code_1(self, run: Run) -> None:
        """A log with a memory failure says so and exits with 1."""
        result = run("analyze", stdin=capture("mlp_eager_16384"))
        assert result.returncode == 1
        assert result.stdout.startswith(b"Incident: prefill_budget (serving, the engine died)\n")
        assert result.stderr == b""

    def test_a_healthy_log_is_exit_code_0(self, run: Run) -> None:
        """A healthy log says that nothing failed."""
        result = run("analyze", "-", stdin=capture("clean_eager_16384"))
        assert result.returncode == 0
        assert result.stdout.startswith(b"No memory failure in this log.\n")

    def test_several_files_are_one_history(self, run: Run, tmp_path: Path) -> None:
        """Files are put in the order of their times, whatever the order of the arguments."""
        lines = capture("lifecycle_iter_mp").split(b"\n")
        starts = [n for n, line in enumerate(lines) if line.startswith(b"Triton is installed")]
        cut = next(n for n in starts if n > 400)
        (tmp_path / "b.log").write_bytes(b"\n".join(lines[:cut]) + b"\n")
        (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"\n".join(lines[cut:])))
        together = json.loads(run("analyze", "--format", "json", "a.log.gz", "b.log").stdout)
        whole = json.loads(run("analyze", "--format", "json", stdin=b"\n".join(lines)).stdout)
        assert [i["class"] for i in together["incidents"]] == [i["class"] for i in whole["incidents"]]
        assert [i["time"][5:] for i in together["incidents"]] == [i["time"][5:] for i in whole["incidents"]]
        assert len(together["engines"]) == len(whole["engines"]) == 5

    def test_a_closed_pipe_is_no_error(self, command: list[str]) -> None:
        """``analyze | head -1`` ends quietly."""
        script = f"{command[0]} analyze - < /dev/stdin | head -1"
        result = subprocess.run(
            ["/bin/sh", "-c", script], input=capture("mlp_eager_16384"), capture_output=True, check=False
        )
        assert result.stderr == b""
        assert result.stdout.count(b"\n") == 1


class TestBadInput:
    """One clear line or a normal result, the exit code of the contract, never a traceback."""

    def test_missing_file(self, run: Run) -> None:
        """A path that does not exist is named."""
        result = run("analyze", "nowhere.log")
        assert result.returncode == 2
        assert one_line(result.stderr) == "vllm-oom-exporter: nowhere.log: no such file; check the path"
        assert result.stdout == b""

    def test_directory(self, run: Run) -> None:
        """A folder is named, with what to do."""
        result = run("analyze", ".")
        assert result.returncode == 2
        assert one_line(result.stderr) == "vllm-oom-exporter: .: is a directory; name the log files in it"

    def test_unreadable_file(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file that may not be read is named. (Tests may run as root, who may read all.)"""
        builtin_classes()  # read once, and kept

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        assert main(["analyze", "secret.log"]) == 2
        assert capsys.readouterr().err.startswith("vllm-oom-exporter: secret.log: permission denied; run as")

    def test_the_rest_is_still_read(self, run: Run, tmp_path: Path) -> None:
        """One bad input among several costs the exit code, not the verdict on the others."""
        (tmp_path / "good.log").write_bytes(capture("mlp_eager_16384"))
        result = run("analyze", "nowhere.log", "good.log")
        assert result.returncode == 2
        assert b"Incident: prefill_budget" in result.stdout

    def test_empty_file(self, run: Run) -> None:
        """Nothing in, nothing found."""
        result = run("analyze", stdin=b"")
        assert result.returncode == 0
        assert result.stdout.startswith(b"The input is empty")

    def test_binary_file(self, run: Run) -> None:
        """Binary data is a log without records."""
        result = run("analyze", stdin=bytes(range(256)) * 4096)
        assert result.returncode == 0
        assert b"Is this the log of a vLLM server?" in result.stdout

    def test_truncated_gzip(self, run: Run, tmp_path: Path) -> None:
        """What could be unpacked is analysed, and a line says that the rest is missing."""
        packed = gzip.compress(capture("lifecycle_iter_mp"))
        (tmp_path / "cut.log.gz").write_bytes(packed[: len(packed) // 2])
        result = run("analyze", "cut.log.gz")
        assert result.returncode == 2
        assert one_line(result.stderr) == (
            "vllm-oom-exporter: cut.log.gz: the gzip data ends too early; what came before was analysed"
        )
        assert b"prefill_budget" in result.stdout

    def test_damaged_gzip(self, run: Run, tmp_path: Path) -> None:
        """A gzip file with wrong bytes in it is named."""
        packed = bytearray(gzip.compress(os.urandom(300_000)))
        packed[150_000:150_100] = b"\0" * 100
        (tmp_path / "bad.gz").write_bytes(packed)
        result = run("analyze", "bad.gz")
        assert result.returncode == 2
        assert "is damaged" in one_line(result.stderr)

    @pytest.mark.parametrize("where", ["before", "after"])
    def test_ten_megabytes_on_one_line(self, run: Run, where: str) -> None:
        """A giant line costs itself only."""
        death, giant = capture("mlp_eager_16384"), b"x" * 10_000_000
        log = giant + b"\n" + death if where == "before" else death + giant
        result = run("analyze", "--format", "json", stdin=log)
        document = json.loads(result.stdout)
        assert [i["class"] for i in document["incidents"]] == ["prefill_budget"]
        assert document["lines"] == log.count(b"\n") + (where == "after")

    def test_invalid_utf8(self, run: Run) -> None:
        """Bytes that are no text stand in the middle of a failure; it is still recognised."""
        log = capture("mlp_eager_16384").replace(b"Tried to allocate", b"\xff\xfe Tried to allocate")
        log = log.replace(b"CUDA out of memory. \xff\xfe Tried", b"CUDA out of memory. Tried\xc3")
        result = run("analyze", "--format", "json", stdin=log)
        assert [i["class"] for i in json.loads(result.stdout)["incidents"]] == ["prefill_budget"]

    @pytest.mark.parametrize(
        "arguments",
        [["analyze", "--format", "xml"], ["explain", "nonsense"], ["no-such-command"], []],
        ids=["format", "class", "command", "nothing"],
    )
    def test_wrong_usage_is_exit_code_2(self, run: Run, arguments: list[str]) -> None:
        """Wrong words are refused without a traceback."""
        result = run(*arguments)
        assert result.returncode == 2
        assert b"Traceback" not in result.stderr
        assert result.stderr


class TestReadsLikeAColleague:
    """The texts a person reads, as golden files."""

    @pytest.mark.parametrize(
        "name",
        [
            "mlp_eager_16384",
            "lifecycle_iter_mp",
            "lora_survive",
            "kv_small_mp",
            "kill_worker_tp2",
            "clean_eager_16384",
            "preproc_survive",
        ],
    )
    def test_analyze(self, run: Run, golden: Callable[[str, str], None], name: str) -> None:
        """The verdict on a capture, word for word."""
        golden(f"analyze_{name}.txt", run("analyze", stdin=capture(name)).stdout.decode())

    @pytest.mark.parametrize("name", ["prefill_budget", "workspace_locked", "unknown"])
    def test_explain(self, run: Run, golden: Callable[[str, str], None], name: str) -> None:
        """A class explained, word for word."""
        golden(f"explain_{name}.txt", run("explain", name).stdout.decode())

    def test_explain_lists_every_class(self, run: Run, golden: Callable[[str, str], None]) -> None:
        """Without a class, the list."""
        golden("explain.txt", run("explain").stdout.decode())

    def test_the_document(self, run: Run, golden: Callable[[str, str], None]) -> None:
        """The JSON of one capture, whole, so that a change of the contract is seen."""
        golden(
            "analyze_tp2_oom_both.json",
            run("analyze", "--format", "json", stdin=capture("tp2_oom_both")).stdout.decode(),
        )


def test_version(run: Run) -> None:
    """The version printed is the package's."""
    assert run("--version").stdout.decode() == f"vllm-oom-exporter {exporter.__version__}\n"
