"""The way to the log through a shared volume: ``serve.sh`` and ``keep.py``, with a real shell and real signals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from exporter.sources.files import FileSource

SHARED_LOG = Path(__file__).parents[1] / "deploy/kubernetes/shared-log"
PYTHON = sys.executable
LAST = "import os; os.write(1, b'first\\n' * 500); os.write(2, b'last\\n'); os._exit({code})"


def _command(*server: str) -> list[str]:
    return ["bash", str(SHARED_LOG / "serve.sh"), *server]


def _environment(file: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "VLLM_LOG_FILE": str(file), **more}


@pytest.mark.parametrize("code", [0, 1, 137])
def test_the_exit_code_is_the_servers(tmp_path: Path, code: int) -> None:
    """The shell exits as the server did, and both copies of its output are whole."""
    log = tmp_path / "vllm.log"
    done = subprocess.run(
        _command(PYTHON, "-c", LAST.format(code=code)),
        env=_environment(log),
        stdout=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout == log.read_bytes() == b"first\n" * 500 + b"last\n"


def test_a_killed_server_gives_the_code_of_its_signal(tmp_path: Path) -> None:
    """What a runtime calls 137 stays 137."""
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        _command(PYTHON, "-c", suicide),
        env=_environment(tmp_path / "vllm.log"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 137


def test_the_last_line_survives_the_end_of_a_container() -> None:
    """As process 1, whose end kills all others, the shell waits for the last line. ``exec`` would lose it in half the runs."""
    container = [shutil.which("unshare") or "unshare", "--pid", "--fork"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid needs root")
    for _ in range(20):
        command = [*container, *_command(PYTHON, "-ISc", LAST.format(code=0))]
        done = subprocess.run(command, env=_environment(Path(os.devnull)), stdout=subprocess.PIPE, check=True)
        assert done.stdout.endswith(b"last\n")


async def test_sigterm_reaches_the_server(tmp_path: Path) -> None:
    """SIGTERM stops the server, which may take its time; its farewell and its exit code are kept."""
    server = (
        "import signal, sys, time\n"
        "def stop(*_): print('stopping', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, stop); print('serving', flush=True); time.sleep(60)"
    )
    log = tmp_path / "vllm.log"
    process = await asyncio.create_subprocess_exec(
        *_command(PYTHON, "-c", server), env=_environment(log), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"serving\n"
    process.send_signal(signal.SIGTERM)
    assert await process.stdout.read() == b"stopping\n"
    assert await process.wait() == 3
    assert log.read_bytes() == b"serving\nstopping\n"


async def test_rotation_while_the_server_writes(tmp_path: Path) -> None:
    """Whoever follows the file gets every line once and in order over every rotation; the volume holds two files at most."""
    log = tmp_path / "vllm.log"
    limit = 100_000
    read, write = os.pipe()
    keep = await asyncio.create_subprocess_exec(
        PYTHON,
        "-IS",
        str(SHARED_LOG / "keep.py"),
        str(log),
        str(limit),
        stdin=read,
        stdout=asyncio.subprocess.DEVNULL,
    )
    os.close(read)
    block, blocks = 400, 30
    got: list[int] = []
    with os.fdopen(write, "wb", buffering=0) as server:

        def say(number: int) -> None:
            server.write(b"".join(b"%7d %90s\n" % (i, b"") for i in range(number, number + block)))

        say(0)
        chunks = FileSource(str(log)).chunks({})
        assert isinstance(chunks, AsyncGenerator)
        async with asyncio.timeout(30), aclosing(chunks):
            async for chunk in chunks:
                got += [int(line[:7]) for line in chunk.data.splitlines()]
                used = sum(one.stat().st_size for one in tmp_path.iterdir())
                assert used <= 2 * limit + (64 << 10)
                if len(got) == block * blocks:
                    break
                if len(got) % block == 0:
                    say(len(got))
    assert await keep.wait() == 0
    assert got == list(range(block * blocks))


def test_files_are_cut_between_lines(tmp_path: Path) -> None:
    """Every file ends with a whole line, however lines fall into blocks; one line may be longer than the limit."""
    log = tmp_path / "log"
    data = b"".join(b"%d %s\n" % (i, b"x" * (i * 7 % 300)) for i in range(2000)) + b"y" * 200_000 + b"\nend"
    subprocess.run(
        [PYTHON, str(SHARED_LOG / "keep.py"), str(log), "50000"],
        input=data,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    old = (tmp_path / "log.1").read_bytes()
    assert old.endswith(b"\n")
    assert data.endswith(old + log.read_bytes())


def test_it_appends_and_any_user_may_read(tmp_path: Path) -> None:
    """A container that starts again goes on in the same file; a strict umask does not keep the exporter out."""
    log = tmp_path / "vllm.log"
    for word in ("one", "two"):
        command = ["bash", "-c", 'umask 077; exec "$@"', "bash", *_command("echo", word)]
        subprocess.run(command, env=_environment(log), stdout=subprocess.DEVNULL, check=True)
    assert log.read_bytes() == b"one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_written_does_not_stop_the_server(tmp_path: Path) -> None:
    """Standard output is whole, the exit code is the server's, and the reason is said once, on standard error."""
    log = tmp_path / "absent" / "vllm.log"
    done = subprocess.run(
        _command(PYTHON, "-c", LAST.format(code=4)), env=_environment(log), capture_output=True, check=False
    )
    assert done.returncode == 4
    assert done.stdout == b"first\n" * 500 + b"last\n"
    assert (
        done.stderr.decode()
        == f"keep.py: {log}: No such file or directory; the log goes to standard output only\n"
    )


def test_a_worker_left_behind_does_not_hold_the_container(tmp_path: Path) -> None:
    """A child of the server that still holds the pipe ends neither the wait for ever nor the exit code."""
    log = tmp_path / "vllm.log"
    # the five seconds pass as soon as the file has the line
    (tmp_path / "sleep").write_text(f"#!/bin/bash\nwhile [ ! -s {log} ]; do :; done\n")
    (tmp_path / "sleep").chmod(0o755)
    leaves = (
        "import subprocess, sys; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); sys.exit(5)"
    )
    done = subprocess.run(
        _command(PYTHON, "-c", leaves),
        env=_environment(log, PATH=f"{tmp_path}:{os.environ['PATH']}"),
        stdout=subprocess.PIPE, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 5
    os.kill(int(done.stdout), signal.SIGKILL)
