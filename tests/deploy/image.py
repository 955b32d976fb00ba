"""Builds the image for real and runs it. Slow, as root, with Debian packages: ``make image-test``.

The base is made by mmdebstrap and stands in for the one that the Dockerfile pins, as registries are
not everywhere to be had. What runs in the image runs as an admission policy would have it: root file
system read-only, user 65532, no capability, no network but its own loopback.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy/image"
CAPTURE = ROOT / "tests/captures/base_eager.log.gz"
DEATH = ROOT / "tests/captures/compiled_16384.log.gz"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-oom-exporter"

# what unshare starts as root: a loopback for the HEALTHCHECK, a root that can't be written, then nobody
CONTAINER = r"""
import fcntl, os, socket, struct, subprocess, sys
root, user = sys.argv[1:3]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
mount = lambda *args: subprocess.run(["mount", *args], check=True)
mount("--bind", root, root)
mount("-t", "tmpfs", "-o", "mode=1777", "none", root + "/tmp")
mount("--bind", sys.argv[3], root + "/mnt")
mount("-o", "remount,ro,bind", root + "/mnt")
mount("-t", "proc", "proc", root + "/proc")
mount("-o", "remount,ro,bind", root)
os.execvp("chroot", ["chroot", "--userspec", user, root, *sys.argv[4:]])
"""


def _run(*command: str | Path, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(one) for one in command], capture_output=True, text=True, check=False, **more  # type: ignore[call-overload]
    )  # fmt: skip
    if check and done.returncode:
        pytest.fail(f"{command[0]} {command[1]} exited {done.returncode}:\n{done.stderr[-3000:]}")
    assert isinstance(done, subprocess.CompletedProcess)
    return done


class Image:
    """The built image, mounted. ``config`` is what its manifest tells a runtime."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = json.loads(_run("buildah", "inspect", "--type", "image", name).stdout)["Docker"][
            "config"
        ]
        self.container = _run("buildah", "from", "--pull=never", name).stdout.strip()
        self.root = _run("buildah", "mount", self.container).stdout.strip()

    def run(
        self, command: list[str], given: Path, user: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; ``given`` is at /mnt, read-only, and /tmp can be written. ``user``: other than the image's."""
        env = dict(one.split("=", 1) for one in self.config["Env"])
        given.chmod(0o755)  # pytest's folders are for their owner alone
        return _run(
            "unshare", "--mount", "--pid", "--net", "--fork",
            "setpriv", "--no-new-privs", "--bounding-set", "-all,+sys_chroot,+setuid,+setgid,+sys_admin,+net_admin",
            sys.executable, "-c", CONTAINER, self.root, user or self.config["User"], given, *command,
            env=env | {"PATH": env["PATH"] + ":/usr/sbin:/usr/bin:/sbin:/bin"}, check=False, timeout=120,
        )  # fmt: skip

    def exporter(self, *args: str, given: Path) -> subprocess.CompletedProcess[str]:
        """Run the entry point."""
        return self.run([*self.config["Entrypoint"], *args], given)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The image, built of this tree."""
    for tool in ("buildah", "mmdebstrap", "unshare", "setpriv"):
        assert shutil.which(tool), f"{tool} is missing; apt-get install buildah mmdebstrap util-linux"
    assert os.geteuid() == 0, "mounts need root"
    wheels = CACHE / "wheels"
    for lock in ("requirements.txt", "requirements-build.txt"):
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:",
            "--python-version", "3.11", "--dest", wheels, "-r", IMAGE / lock,
        )  # fmt: skip
    base = CACHE / "bookworm-python.tar"
    if not base.exists():
        making = base.with_suffix(".part.tar")
        _run(
            "mmdebstrap",
            "--variant=minbase",
            "--include=python3,python3-venv,ca-certificates",
            "bookworm",
            making,
        )
        making.rename(base)
    empty = _run("buildah", "from", "scratch").stdout.strip()
    _run("buildah", "add", "--quiet", empty, base, "/")
    _run("buildah", "commit", "--quiet", "--rm", empty, "localhost/vllm-oom-exporter-base")
    _run(
        "buildah", "build", "--isolation", "chroot", "--format", "docker",
        "--file", IMAGE / "Dockerfile", "--ignorefile", IMAGE / "Dockerfile.dockerignore",
        "--build-arg", "BASE=localhost/vllm-oom-exporter-base",
        "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels", "--volume", f"{wheels}:/wheels:ro",
        "--layers", "--tag", "localhost/vllm-oom-exporter:test", ROOT,
    )  # fmt: skip
    built = Image("localhost/vllm-oom-exporter:test")
    yield built
    _run("buildah", "rm", built.container)


def test_what_a_runtime_is_told(image: Image) -> None:
    """The image names its user by number, so that runAsNonRoot can be checked, its port, labels and check."""
    assert image.config["User"] == "65532:65532"
    assert list(image.config["ExposedPorts"]) == ["10977/tcp"]
    assert image.config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image.config["Healthcheck"]["Test"][0] == "CMD"


def test_a_capture_is_analysed(image: Image, tmp_path: Path) -> None:
    """``analyze`` in the image finds the incident of a real log, on a read-only root as 65532."""
    shutil.copy(DEATH, tmp_path / "server.log.gz")
    done = image.exporter("analyze", "--format", "json", "/mnt/server.log.gz", given=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert [one["class"] for one in json.loads(done.stdout)["incidents"]] == ["prefill_budget"]


def test_who_it_is_and_what_it_may(image: Image, tmp_path: Path) -> None:
    """The process has no capability and can't write to its own installation."""
    look = (
        "import os, re; status = open('/proc/self/status').read(); "
        "print(os.getuid(), os.getgid(), os.getgroups(), *re.findall(r'CapEff:\\s*(\\w+)|NoNewPrivs:\\s*(\\d)', status)); "
        "open('/opt/vllm-oom-exporter/x', 'w')"
    )
    done = image.run(["/opt/vllm-oom-exporter/bin/python3", "-c", look], tmp_path)
    assert done.stdout == "65532 65532 [] ('0000000000000000', '') ('', '1')\n"
    assert "Read-only file system" in done.stderr


def test_it_runs_and_is_found_healthy(image: Image, tmp_path: Path) -> None:
    """``run`` serves with its state on the one writable mount, and the image's own check says so, and only then."""
    (tmp_path / "vllm.log").write_bytes(gzip.decompress(CAPTURE.read_bytes()))
    check = image.config["Healthcheck"]["Test"][1:]
    script = f"""
import subprocess, sys, time, urllib.request
check = {check!r}
before = subprocess.run(check, stderr=subprocess.DEVNULL).returncode
server = subprocess.Popen({image.config["Entrypoint"]!r} + ["run", "--log", "/mnt/vllm.log", "--state-dir", "/tmp/state"])
deadline = time.monotonic() + 30
while subprocess.run(check, stderr=subprocess.DEVNULL).returncode and time.monotonic() < deadline:
    time.sleep(0.1)
text = ""
while "vllm_oom_engine_starts_total 1.0" not in text and time.monotonic() < deadline:
    text = urllib.request.urlopen("http://127.0.0.1:10977/metrics").read().decode()
server.terminate()
print(before, "vllm_oom_engine_starts_total 1.0" in text, server.wait())
"""
    done = image.run(["/opt/vllm-oom-exporter/bin/python3", "-c", script], tmp_path)
    assert done.stdout == "1 True 0\n", done.stderr[-3000:]


NODE = """
import subprocess, sys, time, urllib.request
server = subprocess.Popen({entrypoint!r} + ["run", "--node", "/mnt", "--log-level", "error"])
deadline = time.monotonic() + 30
text = ""
while {wanted!r} not in text.splitlines() and time.monotonic() < deadline:
    time.sleep(0.1)
    try:
        text = urllib.request.urlopen("http://127.0.0.1:10977/metrics").read().decode()
    except OSError:
        pass
server.terminate()
server.wait()
print({wanted!r} in text.splitlines())
"""


@pytest.mark.parametrize(
    ("user", "state"), [("0:0", "vllm"), ("65532:65532", "unreadable")], ids=["root", "the image's user"]
)
def test_the_node_agent_must_be_root_and_no_more(image: Image, tmp_path: Path, user: str, state: str) -> None:
    """Files of the mode that a kubelet gives them are read by root without any capability, and by nobody else."""
    log = tmp_path / "prod_chat-0_5e9b2f3c-0000-4000-8000-000000000000/vllm/0.log"
    log.parent.mkdir(parents=True)
    lines = gzip.decompress(DEATH.read_bytes()).splitlines(keepends=True)
    log.write_bytes(b"".join(b"2026-11-30T16:26:46.000000000Z stderr F " + one for one in lines))
    log.chmod(0o640)
    script = NODE.format(
        entrypoint=image.config["Entrypoint"], wanted=f'vllm_oom_node_containers{{state="{state}"}} 1.0'
    )
    bare = ["/usr/bin/setpriv", "--bounding-set=-all", "--inh-caps=-all"] if user == "0:0" else []
    done = image.run([*bare, "/opt/vllm-oom-exporter/bin/python3", "-c", script], tmp_path, user)
    assert done.stdout == "True\n", done.stderr[-3000:]


def test_how_large_it_is(image: Image) -> None:
    """What the image adds to its base is less than 60 MB; the number is printed for the documentation."""
    added = sum(
        one.stat().st_size
        for one in Path(image.root, "opt/vllm-oom-exporter").rglob("*")
        if one.is_file() and not one.is_symlink()
    )
    print(f"\nadded to the base: {added / 1e6:.0f} MB")
    assert added < 60e6
