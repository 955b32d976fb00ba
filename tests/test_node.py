"""A node with many servers: each incident at its pod, none lost, none twice, whatever the pods do."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from fault import Counts, Piece, Sidecar, counted, metrics, pieces
from podlogs import PodLog

ENGINES = 32
OTHERS = 300
LIVES = ("sampler_uni", "profile_uni", "preproc_survive", "mlp_uni_16384", "kv_none_mp")
DEADLINE = 15.0  # seconds, for a machine under load; nothing waits that long

_OF_POD = re.compile(r'(?:container|namespace|pod)="([^"]*)",?')


def of_pods(samples: dict[str, float]) -> dict[str, dict[str, float]]:
    """The samples of each target, by its name, without the labels that say whose they are."""
    found: dict[str, dict[str, float]] = {}
    for key, value in samples.items():
        labels = dict(re.findall(r'(container|namespace|pod)="([^"]*)"', key))
        if len(labels) == 3:
            plain = _OF_POD.sub("", key).replace(",}", "}").replace("{}", "")
            found.setdefault("{namespace}/{pod}/{container}".format(**labels), {})[plain] = value
    return found


def read_bytes(samples: dict[str, float]) -> int:
    """How much was read, over all sources."""
    return int(sum(n for name, n in samples.items() if name.startswith("vllm_oom_log_read_bytes_total")))


class Node:
    """The command on a tree, with its state beside."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.root = folder / "pods"
        self.root.mkdir()
        self.state = folder / "state"
        self.session = session
        self.base = ""
        self.sidecar: Sidecar

    async def start(self, *arguments: str) -> None:
        """Start it, and wait until it is ready."""
        self.sidecar = await Sidecar.start("--node", self.root, "--state-dir", self.state, *arguments)
        self.base = await self.sidecar.ready(self.session)

    async def until(self, missing: Callable[[dict[str, float]], object]) -> dict[str, float]:
        """All samples, as soon as nothing is missing."""
        end = time.monotonic() + DEADLINE
        while True:
            samples = await metrics(self.session, self.base)
            if not (still := missing(samples)):
                return samples
            assert time.monotonic() < end, (still, [*self.sidecar.said][-3:])
            await asyncio.sleep(0.3)  # an answer of 32 servers is large

    async def has_read(self, engines: list[PodLog]) -> None:
        """Everything that was written has been read and is safe."""

        def unread(samples: dict[str, float]) -> list[str]:
            found = of_pods(samples)
            return [one.name for one in engines if read_bytes(found.get(one.name, {})) < len(one.text)]

        await self.until(unread)

    async def targets(self) -> list[str]:
        """Names of those it follows."""
        async with self.session.get(f"{self.base}/api/v1/targets") as response:
            return sorted(one["target"] for one in (await response.json())["targets"])


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    """A node without pods; whatever runs is stopped at the end."""
    async with aiohttp.ClientSession() as session:
        one = Node(folder, session)
        try:
            yield one
        finally:
            if hasattr(one, "sidecar"):
                await one.sidecar.kill()


def halves(piece: Piece) -> tuple[bytes, bytes]:
    """A life, torn apart before its last tenth: inside what it wrote when it failed."""
    lines = piece.data.splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    return b"".join(lines[:cut]), b"".join(lines[cut:])


def fill(root: Path) -> list[PodLog]:
    """Containers that are no server; some of them quote one."""
    found = []
    for number in range(OTHERS):
        one = PodLog(root, "apps", f"web-{number // 3}", f"c{number % 3}")
        one.write(b"GET /healthz 200\n" * 200)
        if number % 10 == 0:
            one.write(
                b'{"msg": "(EngineCore pid=9) ERROR 11-30 10:00:00 [core.py:5] CUDA out of memory"}\n'
                b"the user said: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            )
        found.append(one)
    return found


class Story:
    """32 servers with four lives each, and what happens to a quarter of them each.

    0: restarts · 1: rotations · 2: a deleted pod that is created again · 3: all lives in two files
    """

    def __init__(self, root: Path) -> None:
        self.engines = [PodLog(root, f"team-{n % 4}", f"llama-{n}") for n in range(ENGINES)]
        self._lives = [[*itertools.islice(pieces(n + 1, LIVES, traffic=False), 4)] for n in range(ENGINES)]
        self._rotated: list[tuple[PodLog, Path]] = []
        self._going_on: list[tuple[PodLog, bytes]] = []

    def _each(self, life: int) -> Iterator[tuple[int, PodLog, bytes, bytes]]:
        for number, engine in enumerate(self.engines):
            yield number % 4, engine, *halves(self._lives[number][life])

    def before_anybody_looks(self) -> None:
        """A first life; some logs were rotated inside of it."""
        for kind, engine, first, rest in self._each(0):
            engine.write(first)
            if kind == 1:
                self._rotated.append((engine, engine.rotate()))
            engine.write(rest)

    def half_a_life(self) -> None:
        """Containers start anew, pods are replaced, logs are rotated; a failure is half written."""
        for kind, engine, first, rest in self._each(1):
            if kind == 0:
                engine.restart()
            if kind == 2:
                engine.delete()
                engine.recreate()
            engine.write(first)
            if kind == 1:
                engine.rotate()
            if kind == 3:
                engine.write(rest)
                engine.restart()
            else:
                self._going_on.append((engine, rest))

    def the_other_half(self) -> None:
        """What was begun goes on."""
        for engine, rest in self._going_on:
            engine.write(rest)

    def nobody_looks(self) -> None:
        """A life while the exporter is down, in new files or in files that are rotated after it."""
        for kind, engine, first, rest in self._each(2):
            if kind == 0:
                engine.restart()
            engine.write(first + rest)
            if kind == 1:
                engine.rotate()

    def the_end(self) -> None:
        """A last life; then one pod is deleted, and old logs are packed."""
        for _, engine, first, rest in self._each(3):
            engine.write(first + rest)
        self.engines[3].delete()  # who has it open reads what was written
        for engine, path in self._rotated:
            engine.pack(path)


async def test_every_incident_is_at_its_pod(tmp_path: Path) -> None:
    """32 servers among 300 others, over restarts, rotations, deleted pods and a killed exporter."""
    async with node(tmp_path) as one:
        others, story = fill(one.root), Story(one.root)
        story.before_anybody_looks()
        await one.start()
        await one.has_read(story.engines)
        story.half_a_life()
        for other in others[::7]:
            other.delete()
        await one.has_read(story.engines)
        story.the_other_half()
        await one.has_read(story.engines)
        await one.sidecar.kill(signal.SIGKILL)
        story.nobody_looks()
        await one.start()
        story.the_end()
        await one.has_read(story.engines)
        written = {engine.name: engine.counts for engine in story.engines}

        def wrong(samples: dict[str, float]) -> dict[str, list[str]]:
            found = {name: counted(of) for name, of in of_pods(samples).items()}
            differs = {name: one.differences(found.get(name, Counts())) for name, one in written.items()}
            return {name: differences for name, differences in differs.items() if differences}

        await one.until(wrong)
        await asyncio.sleep(1.5)  # what is counted twice comes late
        samples = await metrics(one.session, one.base)
        assert wrong(samples) == {}
        assert {name: read_bytes(of) for name, of in of_pods(samples).items()} == {
            engine.name: len(engine.text) for engine in story.engines
        }
        assert await one.targets() == sorted(written)
        assert sum(counts.incidents.total() for counts in written.values()) > 3 * ENGINES
        assert samples['vllm_oom_node_containers{state="vllm"}'] == ENGINES - 1


async def test_a_log_that_was_packed_meanwhile(tmp_path: Path) -> None:
    """A failure that is torn over a killed exporter and two rotations is counted, with its torn half packed."""
    async with node(tmp_path) as one:
        engines = [PodLog(one.root, "prod", f"llama-{number}") for number in range(3)]
        torn = {}
        for number, engine in enumerate(engines):
            whole, split = itertools.islice(pieces(number + 1, LIVES, traffic=False), 2)
            before, after = halves(split)
            engine.write(whole.data + before)
            torn[engine.name] = after.splitlines(keepends=True)
        await one.start()
        await one.has_read(engines)
        await one.sidecar.kill(signal.SIGKILL)
        for engine in engines:
            rest = torn[engine.name]
            engine.write(b"".join(rest[: len(rest) // 2]))
            aside = engine.rotate()
            engine.write(b"".join(rest[len(rest) // 2 :]))
            engine.rotate()
            engine.pack(aside)
        await one.start()
        await one.has_read(engines)

        def wrong(samples: dict[str, float]) -> list[str]:
            found = of_pods(samples)
            return [
                text for engine in engines for text in engine.counts.differences(counted(found[engine.name]))
            ]

        await one.until(wrong)
        await asyncio.sleep(1.5)  # what is counted twice comes late
        samples = await metrics(one.session, one.base)
        assert wrong(samples) == []
        assert [read_bytes(of_pods(samples)[engine.name]) for engine in engines] == [
            len(engine.text) for engine in engines
        ]


async def test_a_flood_starves_nobody(tmp_path: Path) -> None:
    """A server that writes 60 MB at once does not keep the failure of another waiting."""
    async with node(tmp_path) as one:
        flood, other = PodLog(one.root, "prod", "flood-0"), PodLog(one.root, "prod", "llama-0")
        lives = [life.data for life in itertools.islice(pieces(1, LIVES, traffic=False), 3)]
        flood.write(lives[0])
        other.write(lives[1])
        await one.start()
        await one.has_read([flood, other])
        before = counted(of_pods(await metrics(one.session, one.base))[other.name]).error_lines
        line = b"(APIServer pid=1) WARNING 11-02 10:00:00 [protocol.py:71] The following fields were ignored: {'a'}\n"
        with flood.path.open("ab") as out:
            out.write((b"2026-11-02T10:00:00.000000000Z stderr F " + line) * 400_000)
        other.write(lives[2])

        def untold(samples: dict[str, float]) -> bool:
            return counted(of_pods(samples)[other.name]).error_lines <= before

        samples = of_pods(await one.until(untold))
        assert read_bytes(samples[flood.name]) < flood.path.stat().st_size // 2


async def test_a_reload_keeps_the_targets(tmp_path: Path) -> None:
    """What applies to every target is taken over by a reload; targets that were found stay, and count on."""
    async with node(tmp_path) as one:
        engine = PodLog(one.root, "prod", "llama-0")
        lives = [life.data for life in itertools.islice(pieces(1, LIVES, traffic=False), 2)]
        engine.write(lives[0])
        file = tmp_path / "config.yaml"
        file.write_text(f"node: {one.root}\nstate_dir: {one.state}\nscrape_interval: 2s\n")
        one.sidecar = await Sidecar.start("--config", file)
        one.base = await one.sidecar.ready(one.session)
        await one.has_read([engine])
        file.write_text(file.read_text().replace("2s", "5s"))
        one.sidecar.process.send_signal(signal.SIGHUP)
        while not any('"configuration reloaded"' in line for line in one.sidecar.said):
            await asyncio.sleep(0.05)
        engine.write(lives[1])
        await one.has_read([engine])
        await one.until(
            lambda samples: engine.counts.differences(counted(of_pods(samples)[engine.name])),
        )
        assert await one.targets() == [engine.name]
