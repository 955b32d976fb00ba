"""What is shipped: the wheel holds the package and its data, nothing else, and works alone."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import HERE, capture

import exporter
from exporter.diagnosis.knowledge import CLASS_IDS

ROOT = HERE.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as for a release."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, check=False)
    assert built.returncode == 0, built.stderr.decode()[-2000:]
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, class file and template is in the wheel; tests and captures are not."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"exporter", f"vllm_oom_exporter-{exporter.__version__}.dist-info"}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "exporter").rglob("*.py")}
    assert sources <= set(names)
    assert {f"exporter/diagnosis/classes/{one}.yaml" for one in CLASS_IDS} <= set(names)
    assert {"exporter/web/templates/incident.html", "exporter/web/static/page.css"} <= set(names)


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed from the wheel alone, with its declared dependencies, the command analyses a log."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    install = subprocess.run(
        [home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel],
        capture_output=True, check=False,
    )  # fmt: skip
    assert install.returncode == 0, install.stderr.decode()[-2000:]
    result = subprocess.run(
        [home / "bin" / "vllm-oom-exporter", "analyze"],
        input=capture("mlp_eager_16384"), capture_output=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stdout.startswith(b"Incident: prefill_budget")
    # "exporter" is a common word; among what is installed it must be ours alone
    who = "from importlib.metadata import packages_distributions as p; print(p()['exporter'])"
    asked = subprocess.run([home / "bin" / "python", "-c", who], capture_output=True, check=True)
    assert asked.stdout.decode().strip() == "['vllm-oom-exporter']"
