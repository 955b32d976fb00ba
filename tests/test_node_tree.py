"""Which containers of a node are followed, and what it costs to find out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import capture
from podlogs import PodLog

from exporter.node import tree as module
from exporter.node.tree import HEAD, PIECE, Name, Tree
from exporter.vllm.recognise import is_vllm

SERVER = b"(EngineCore pid=104) INFO 11-02 10:00:00 [core.py:58] Initializing a V1 LLM engine\n"
OTHER = b"GET /healthz 200\n"


def scanned(tree: Tree) -> list[str]:
    """Names of the containers to follow, after another look."""
    tree.scan()
    return sorted(map(str, tree.followed))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every block that is asked whether it is of vLLM."""
    sizes: list[int] = []

    def counting(block: bytes) -> bool:
        sizes.append(len(block))
        return is_vllm(block)

    monkeypatch.setattr(module, "is_vllm", counting)
    return sizes


def settled(root: Path) -> None:
    """Nothing in the tree changed within the last moments."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (1, 1))


class TestWhatIsFollowed:
    """By the log, or by a pattern."""

    def test_the_log_decides(self, tmp_path: Path) -> None:
        """A server among others, one of them quoting it."""
        PodLog(tmp_path, "prod", "llama-0").write(SERVER)
        PodLog(tmp_path, "prod", "web-0", "app").write(OTHER)
        quoting = b'{"level": "info", "msg": "' + SERVER.rstrip() + b'"}\n'
        PodLog(tmp_path, "prod", "logs-0", "shipper").write(quoting)
        tree = Tree(str(tmp_path))
        assert scanned(tree) == ["prod/llama-0/vllm"]
        assert tree.counts == {"vllm": 1, "undecided": 2}

    def test_a_pattern_decides(self, tmp_path: Path) -> None:
        """With a pattern no log is asked: what matches is followed before it has said anything."""
        for namespace, pod, container in (
            ("prod", "llama-0", "vllm"),
            ("prod", "llama-0", "proxy"),
            ("dev", "x", "vllm"),
        ):
            PodLog(tmp_path, namespace, pod, container)
        PodLog(tmp_path, "dev", "y", "vllm").write(SERVER)
        assert scanned(Tree(str(tmp_path), ["prod/*/vllm", "*/x/*"])) == ["dev/x/vllm", "prod/llama-0/vllm"]

    def test_known_before(self, tmp_path: Path) -> None:
        """What a former process followed is followed at once, whatever its log begins with."""
        PodLog(tmp_path, "prod", "llama-0").write(OTHER)
        assert scanned(Tree(str(tmp_path), known=["prod/llama-0/vllm"])) == ["prod/llama-0/vllm"]

    def test_it_speaks_late(self, tmp_path: Path) -> None:
        """A script that downloads the model first does not make it another container."""
        one = PodLog(tmp_path, "prod", "llama-0")
        tree = Tree(str(tmp_path))
        assert scanned(tree) == []
        one.write(b"Downloading model.safetensors: 12%\n" * 4000)
        assert scanned(tree) == []
        one.write(SERVER)
        found = [scanned(tree) for _ in range(4)]
        assert found[-1] == ["prod/llama-0/vllm"]

    def test_a_line_that_is_written_in_two(self, tmp_path: Path) -> None:
        """The end of a line may come after the look that saw its beginning."""
        one = PodLog(tmp_path, "prod", "llama-0")
        whole = b"2026-11-02T10:00:00.000000001Z stderr F " + SERVER
        one.path.write_bytes(whole[:45])
        tree = Tree(str(tmp_path))
        assert scanned(tree) == []
        one.path.write_bytes(whole)
        assert scanned(tree) == ["prod/llama-0/vllm"]

    def test_pods_of_one_name(self, tmp_path: Path) -> None:
        """A pod that takes the place of another is the same target, with both directories."""
        one = PodLog(tmp_path, "prod", "llama-0")
        one.write(SERVER)
        old = one.folder
        one.recreate()
        tree = Tree(str(tmp_path))
        for _ in range(2):  # whichever comes first
            assert scanned(tree) == ["prod/llama-0/vllm"]
        assert sorted(tree.followed[Name("prod", "llama-0", "vllm")]) == sorted([str(old), str(one.folder)])
        one.delete()
        scanned(tree)
        assert tree.followed[Name("prod", "llama-0", "vllm")] == (str(old),)

    @pytest.mark.parametrize(
        "name", ["json_clean", "v013_clean", "force_color_oom_mp", "base_tty", "kill_api"]
    )
    def test_real_servers(self, tmp_path: Path, name: str) -> None:
        """Text, JSON and coloured logs of real servers are recognised, whichever release wrote them."""
        PodLog(tmp_path, "prod", "llama-0").write(capture(name)[:PIECE])
        assert scanned(Tree(str(tmp_path))) == ["prod/llama-0/vllm"]

    @pytest.mark.parametrize(
        "folder",
        [
            "prod_llama-0",
            "Prod_llama-0_u1/vllm",
            "prod_llama 0_u1/vllm",
            "prod_llama-0_u1/vl\nlm",
            "a_b_c_d/vllm",
        ],
    )
    def test_strange_names(self, tmp_path: Path, folder: str) -> None:
        """Only names that Kubernetes allows become labels."""
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / "0.log").write_bytes(SERVER)
        assert scanned(Tree(str(tmp_path), ["*/*/*"])) == []


class TestFiles:
    """What is read of a container."""

    def test_runs(self, tmp_path: Path) -> None:
        """The log of every run; what was rotated, or is being packed, is no log of its own."""
        one = PodLog(tmp_path, "prod", "llama-0")
        one.write(SERVER)
        first = one.rotate()
        one.write(SERVER)
        one.rotate()
        one.pack(first)
        first.with_name(first.name + ".tmp").write_bytes(b"\x1f\x8b")
        one.restart()
        tree = Tree(str(tmp_path))
        tree.scan()
        found = tree.find(Name("prod", "llama-0", "vllm"))
        assert sorted(Path(path).name for path in found.files) == ["0.log", "1.log"]

    def test_links_of_docker(self, tmp_path: Path) -> None:
        """Through links the log is elsewhere; if that is not mounted, it is said."""
        root, docker = tmp_path / "pods", tmp_path / "docker"
        one = PodLog(root, "prod", "llama-0")
        one.path.symlink_to(docker / "c1-json.log")
        tree = Tree(str(root))
        assert scanned(tree) == []
        assert tree.problem == (
            f"{one.path}: leads to {docker}, which is not there; mount that directory of the host too"
        )
        assert tree.counts == {"unreadable": 1}
        docker.mkdir()
        (docker / "c1-json.log").write_bytes(b'{"log":"' + SERVER.rstrip() + b'\\n","stream":"stderr"}\n')
        settled(root)
        os.utime(one.folder)
        assert scanned(tree) == ["prod/llama-0/vllm"]
        assert tree.problem is None


class TestProblems:
    """What a user gets wrong."""

    def test_no_such_directory(self, tmp_path: Path) -> None:
        """It is named, with what to do; and taken up when it is there."""
        tree = Tree(str(tmp_path / "pods"))
        assert scanned(tree) == []
        assert tree.problem == f"{tmp_path / 'pods'}: no such directory; mount the one of the host there"
        PodLog(tmp_path / "pods", "prod", "llama-0").write(SERVER)
        assert scanned(tree) == ["prod/llama-0/vllm"]
        assert tree.problem is None

    def test_not_readable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logs of the kubelet belong to root: who may not read them is told which right is missing."""
        for number in range(3):
            PodLog(tmp_path, "prod", f"llama-{number}").write(SERVER)
        real = os.open

        def refusing(path: str, flags: int) -> int:
            if str(path).endswith(".log"):
                raise PermissionError(13, "Permission denied")
            return real(path, flags)

        tree = Tree(str(tmp_path))
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refusing)
            assert scanned(tree) == []
        assert tree.counts == {"unreadable": 3}
        assert tree.problem is not None
        assert tree.problem.endswith(
            "0.log: permission denied; run as root, or with the capability DAC_READ_SEARCH (and 2 more)"
        )
        assert len(scanned(tree)) == 3


class TestCost:
    """Hundreds of containers that are none cost nearly nothing."""

    def test_a_silent_container_is_asked_once(self, tmp_path: Path, asked: list[int]) -> None:
        """Nothing is read again of what has not grown, decided or not."""
        for number in range(50):
            PodLog(tmp_path, "apps", f"web-{number}", "app").write(OTHER * 10)
        tree = Tree(str(tmp_path))
        tree.scan()
        assert len(asked) == 50
        for _ in range(10):
            tree.scan()
        assert len(asked) == 50

    def test_a_busy_container_is_given_up(self, tmp_path: Path, asked: list[int]) -> None:
        """After 256 KB without a word of vLLM nothing more is read, however much it writes."""
        one = PodLog(tmp_path, "apps", "web-0", "app")
        one.write(OTHER * (2 * HEAD // len(OTHER)))
        tree = Tree(str(tmp_path))
        for _ in range(10):
            tree.scan()
            one.write(OTHER * 1000)
        assert tree.counts == {"other": 1}
        assert len(asked) == 1 + HEAD // PIECE
        assert sum(asked) <= HEAD + PIECE

    def test_a_rotated_log_is_asked_again(self, tmp_path: Path) -> None:
        """A server that had logged nothing but requests for long is found when it says something at last."""
        one = PodLog(tmp_path, "apps", "web-0", "app")
        one.write(OTHER * (2 * HEAD // len(OTHER)))
        tree = Tree(str(tmp_path))
        for _ in range(6):
            tree.scan()
        assert tree.counts == {"other": 1}
        one.rotate()
        one.write(SERVER)
        assert scanned(tree) == ["apps/web-0/app"]

    def test_nothing_is_listed_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Directories that did not change are not listed, however many they are."""
        for number in range(50):
            PodLog(tmp_path, "apps", f"web-{number}", "app").write(OTHER * 10)
        tree = Tree(str(tmp_path))
        tree.scan()
        settled(tmp_path)
        tree.scan()
        listed: list[str] = []
        real = os.scandir

        def counting(path: str) -> object:
            listed.append(path)
            return real(path)

        monkeypatch.setattr(os, "scandir", counting)
        tree.scan()
        assert listed == []
        PodLog(tmp_path, "apps", "web-50", "app")
        tree.scan()
        assert len([one for one in listed if one == str(tmp_path)]) == 1
        assert len(listed) == 3  # the tree, the new pod, its container

    def test_a_scan_is_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]
    ) -> None:
        """What is more than one look may read is left to the next, and said."""
        monkeypatch.setattr(module, "BUDGET", 3 * PIECE)
        for number in range(8):
            PodLog(tmp_path, "apps", f"web-{number}", "app").write(OTHER * (PIECE // len(OTHER)))
        PodLog(tmp_path, "prod", "llama-0").write(OTHER * (PIECE // len(OTHER)) + SERVER)
        tree = Tree(str(tmp_path))
        tree.scan()
        assert (len(asked), tree.behind) == (3, True)
        found = [scanned(tree) for _ in range(20)]
        assert found[-1] == ["prod/llama-0/vllm"]
        assert not tree.behind
