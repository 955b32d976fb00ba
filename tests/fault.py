"""Kills the sidecar over and over while a log is written and rotated, then compares the counts.

A writer appends real failures, each with its own times and process ids, and rotates the log at
random moments. The sidecar keeps its state in ``--state-dir``, is killed with SIGKILL at random
moments, also in its start-up, and is started again. When it has caught up at the end, what it
counts must be what was written: nothing lost, nothing twice; and no counter may ever have been
seen to go down while the sidecar was ready.

``python tests/fault.py --kills 200`` runs the long version and prints its counts; the short one
is a test of the suite. The seed fixes what is written and every random choice, but not where
the scheduler lets a kill fall: a defect may need several runs of its seed to be seen again.

What is promised, by kind of rotation:

``rename``        the log is renamed and begun anew between two records, at any moment, also while
                  the sidecar is down and with a failure half written. The older files stay where
                  they are. ``--torn`` rotates between any two lines, also inside a traceback.
``copytruncate``  the log is copied and truncated at any moment, with no write in between. Bytes
                  that a writer adds between copy and truncation are lost to everybody: they are
                  in no file. That is logrotate's own warning, and not tested. The copies stay, so
                  everything that is written can be read by somebody.
``recreate``      the log is deleted and begun anew. What nobody has read by then is gone, and a
                  failure that was only half read can't be read again, so nothing is promised to
                  a sidecar that is down then. It happens here at random moments of a running
                  sidecar that has the log open (``/proc`` says so), and the next kill waits until
                  all that was written before is behind the checkpoint (``SAFE_SECONDS`` of silence).
                  A life that survives its failure is not torn: until the next one begins nobody
                  knows how it ends, so it stays before the checkpoint, and half of it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import aiohttp

from exporter.analyze import Reader
from exporter.diagnosis.history import History

sys.path.append(str(Path(__file__).parent / "bench"))

from generate import KINDS
from replay import EXPORTER
from replay import _read as read

ROTATIONS = ("rename", "copytruncate", "recreate")

SAFE_SECONDS = 4.0
"""Silence after which everything that was read is behind the sidecar's checkpoint and saved."""

_NAMES = (
    "mlp_eager_16384", "mlp_uni_16384", "sampler_uni", "load_uni", "profile_uni", "lora_survive",
    "preproc_survive", "tp2_oom_both", "kv_none_mp", "warmup_uni", "v0271_mlp_mp", "v013_mlp_16384",
    "prompt_logprobs_uni", "kvcache_uni",
)  # fmt: skip
_TIME = re.compile(rb"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_HEAD = re.compile(rb"^(?:\([^)]*\) )?(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]*\]")
_PID = re.compile(rb"(?<=pid=)\d+")
_COUNTERS = (
    "vllm_oom_incidents_total",
    "vllm_oom_fatal_incidents_total",
    "vllm_oom_error_lines_total",
    "vllm_oom_near_misses_total",
    "vllm_oom_engine_starts_total",
    "vllm_oom_fingerprint_matches_total",
    "vllm_oom_log_lines_total",
    "vllm_oom_log_read_bytes_total",
    "vllm_oom_log_read_errors_total",
    "vllm_oom_log_rotations_total",
)
_BEGIN = datetime(2026, 9, 1)


# --- what is written ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Traffic, then one life of a real server with its failure. ``begin`` by the log's own clock."""

    number: int
    name: str
    begin: datetime
    data: bytes


def pieces(
    seed: int, names: tuple[str, ...] = _NAMES, traffic: bool = True, begin: datetime = _BEGIN
) -> Iterator[Piece]:
    """Lives one after the other, no two with equal times or process ids; the same for a seed."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    texts = {name: read(name, "log") for name in names}
    now = begin
    for number in range(1_000_000):
        name = rng.choice(names)
        text = texts[name]
        times = [_moment(match) for match in _TIME.finditer(text)]
        shift = now - min(times)

        def moved(match: re.Match[bytes], by: timedelta = shift) -> bytes:
            return (_moment(match) + by).strftime("%m-%d %H:%M:%S").encode()

        def renumbered(match: re.Match[bytes], base: int = 10_000 + 1000 * number) -> bytes:
            return b"%d" % (base + int(match[0]) % 1000)

        life = _PID.sub(renumbered, _TIME.sub(moved, text))
        length = rng.choice((0, 5, 50, 1500)) if traffic else 0
        yield Piece(number, name, now, b"".join(_traffic(rng, number, now) for _ in range(length)) + life)
        now += max(times) - min(times) + timedelta(seconds=rng.randrange(60, 240))


def _traffic(rng: random.Random, number: int, now: datetime) -> bytes:
    line = KINDS["mixed"][0](rng, number)
    clock = (now - timedelta(seconds=30)).strftime("%m-%d %H:%M:%S").encode()
    return _TIME.sub(clock, line)


def _between_records(lines: list[bytes]) -> list[int]:
    """Where a new log call begins, so that a rotation there tears no traceback apart."""
    heads = [found[0] if (found := _HEAD.match(line)) else b"" for line in lines]
    return [at for at in range(1, len(lines)) if heads[at] and heads[at] != heads[at - 1]] or [1]


def _moment(match: re.Match[bytes]) -> datetime:
    month, day, hour, minute, second = map(int, match.groups())
    return datetime(_BEGIN.year, month, day, hour, minute, second)


@dataclass(slots=True)
class Counts:
    """What a log holds, or what was counted: by (class, phase), by class, and plain numbers."""

    incidents: Counter[str] = field(default_factory=Counter)
    fatal: Counter[str] = field(default_factory=Counter)
    error_lines: int = 0
    near_misses: int = 0
    engine_starts: int = 0

    def differences(self, counted: Counts) -> list[str]:
        """One line for every number of ``counted`` that is not the one written."""
        found = []
        for what in ("incidents", "fatal"):
            written, seen = getattr(self, what), getattr(counted, what)
            found += [
                f"{what} {key}: {written[key]} written, {seen[key]} counted"
                for key in sorted(written | seen)
                if written[key] != seen[key]
            ]
        for what in ("error_lines", "near_misses", "engine_starts"):
            written, seen = getattr(self, what), getattr(counted, what)
            if written != seen:
                found.append(f"{what}: {written} written, {seen} counted")
        return found


def counts_of(log: bytes) -> Counts:
    """What the offline analysis, which knows no restarts and no rotations, finds in ``log``."""
    history = History()
    reader = Reader(history, datetime.now())
    for at in range(0, len(log), 1 << 20):
        reader.feed(log[at : at + (1 << 20)])
    reader.finish()
    history.finish()
    found = Counts(
        error_lines=len(set(history.error_lines)),
        near_misses=history.near_misses,
        engine_starts=len(history.lives.all),
    )
    for one in history.incidents():
        found.incidents[f"{one.class_id}/{one.phase}"] += 1
        found.fatal[one.class_id] += one.fatal
    return found


# --- the sidecar ----------------------------------------------------------------------------


class Sidecar:
    """The real command as a process of its own. ``base`` is where it listens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: deque[str] = deque(maxlen=200)
        """The newest lines of its own log."""
        self.base: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *arguments: str | Path) -> Sidecar:
        """Start ``run`` on a free port."""
        process = await asyncio.create_subprocess_exec(
            EXPORTER, "run", "--listen", "127.0.0.1:0", "--log-format", "json", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip
        return cls(process)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.said.append(line)
            if '"listening"' in line and not self.base.done():
                self.base.set_result("http://" + json.loads(line)["address"])
        if not self.base.done():
            self.base.cancel()

    async def ready(self, session: aiohttp.ClientSession) -> str:
        """Wait until ``/-/ready`` answers 200; gives the base URL. Raises if it ends before."""
        await asyncio.wait([self.base])
        if self.base.cancelled():
            raise RuntimeError(f"the sidecar ended in its start-up: {list(self.said)[-5:]}")
        base = self.base.result()
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{base}/-/ready") as response:
                    if response.status == 200:
                        return base
            if self.process.returncode is not None:
                raise RuntimeError(
                    f"the sidecar ended with {self.process.returncode}: {list(self.said)[-3:]}"
                )
            await asyncio.sleep(0.005)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; gives the exit code (negative: the signal)."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
        code = await self.process.wait()
        await self._reading
        return code


async def metrics(session: aiohttp.ClientSession, base: str) -> dict[str, float]:
    """All samples of ``/metrics``, by name with labels."""
    async with session.get(f"{base}/metrics") as response:
        text = await response.text()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def counted(samples: dict[str, float]) -> Counts:
    """The counters in ``samples``."""
    found = Counts(
        error_lines=int(samples["vllm_oom_error_lines_total"]),
        near_misses=int(samples["vllm_oom_near_misses_total"]),
        engine_starts=int(samples["vllm_oom_engine_starts_total"]),
    )
    for name, value in samples.items():
        if not value:
            continue
        if one := re.fullmatch(r'vllm_oom_incidents_total\{class="(\w+)",phase="(\w+)"\}', name):
            found.incidents[f"{one[1]}/{one[2]}"] = int(value)
        elif one := re.fullmatch(r'vllm_oom_fatal_incidents_total\{class="(\w+)"\}', name):
            found.fatal[one[1]] = int(value)
    return found


# --- the trial ------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """What one trial came to. ``defects`` is empty if everything held."""

    rotation: str
    seed: int
    kills: int = 0
    rotations: int = 0
    pieces: int = 0
    megabytes: float = 0.0
    written: Counts = field(default_factory=Counts)
    seen: Counts = field(default_factory=Counts)
    defects: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def says(self) -> str:
        """The result for a person."""
        lost, doubled = self.lost()
        head = (
            f"{self.rotation} seed {self.seed}: {self.kills} kills, {self.rotations} rotations,"
            f" {self.pieces} lives, {self.megabytes:.1f} MB in {self.seconds:.0f} s; incidents"
            f" {sum(self.written.incidents.values())} written, {sum(self.seen.incidents.values())} counted"
            f" (lost {lost}, doubled {doubled}); fatal {self.written.fatal.total()}/{self.seen.fatal.total()},"
            f" error lines {self.written.error_lines}/{self.seen.error_lines},"
            f" engine starts {self.written.engine_starts}/{self.seen.engine_starts}"
        )
        return "\n  ".join([head, *self.defects])

    def lost(self) -> tuple[int, int]:
        """Incidents too few and too many, by class and phase."""
        missing, extra = (
            self.written.incidents - self.seen.incidents,
            self.seen.incidents - self.written.incidents,
        )
        return missing.total(), extra.total()


class Trial:
    """One log, one state directory, one kind of rotation, many kills."""

    def __init__(
        self,
        folder: Path,
        rotation: str,
        seed: int,
        kills: int,
        busy: float = 1.0,
        warm: bool = True,
        torn: bool = False,
        glob: str = "",
    ) -> None:
        self.path = folder / "vllm.log"
        self.source = folder / glob if glob else self.path
        self.state = folder / "state"
        self.path.touch()
        self.result = Result(rotation, seed)
        self.trace: list[tuple[float, str]] = []
        self._rotation = rotation
        self._kills = kills
        self._busy = busy  # below 1: shorter pauses and lives
        self._safe = SAFE_SECONDS if rotation == "recreate" else 1.5
        self._seed = seed
        self._warm = warm
        self._torn = torn
        self._write_rng = random.Random(seed)  # noqa: S311
        self._kill_rng = random.Random(-seed - 1)  # noqa: S311
        self._written = bytearray()
        self._pieces: list[Piece] = []
        self._failed = asyncio.Event()  # an out-of-memory line was just written
        self._killing = asyncio.Lock()
        self._held: asyncio.Task[None] | None = None
        self._ready_since: float | None = None
        self._process: Sidecar | None = None
        self._enough = False
        self._number = 0
        self._high: dict[str, float] = {}
        self._begin = time.monotonic()

    def _say(self, what: str) -> None:
        self.trace.append((time.monotonic() - self._begin, what))

    def keep(self) -> None:
        """Leave what happened beside the logs and the state."""
        text = "".join(f"{at:9.3f} {what}\n" for at, what in self.trace)
        self.path.with_name("trace.txt").write_text(text, encoding="utf-8")
        self.path.with_name("all.log").write_bytes(bytes(self._written))

    # --- writing

    async def _write(self) -> None:
        rng = self._write_rng
        for piece in pieces(self._seed):
            if self._enough:
                return
            self._pieces.append(piece)
            self._say(f"piece {piece.number} {piece.name} begins")
            lines = piece.data.splitlines(keepends=True)
            turns = range(1, len(lines)) if self._torn else _between_records(lines)
            turn = rng.choice(turns) if rng.random() < 0.5 else None
            if self._rotation == "recreate" and piece.name.endswith("_survive"):
                turn = None
            # asked here, as it may take seconds: who falls silent inside a traceback has ended it
            if turn is not None and not await self._may_rotate():
                turn = None
            at = 0
            while at < len(lines):
                upto = min(len(lines), at + rng.choice((1, 3, 10, 40, 400)))
                if turn is not None and at < turn < upto:
                    upto = turn
                await self._append(b"".join(lines[at:upto]))
                at = upto
                if at == turn:
                    await self._rotate()
            self._say(f"piece {piece.number} ends")
            if self._held is not None:
                await self._held
                self._held = None
            await asyncio.sleep(rng.choice((0, 0, 0.05, 0.3, 1.2, 3.0)) * self._busy)
            if rng.random() < 0.15 and await self._may_rotate():
                await self._rotate()

    async def _append(self, data: bytes) -> None:
        rng = self._write_rng
        cut = rng.randrange(len(data)) if rng.random() < 0.2 else 0
        for part in (data[:cut], data[cut:]):
            if part:
                with self.path.open("ab", buffering=0) as out:
                    out.write(part)
                self._written += part
                if b"OutOfMemoryError" in part:
                    self._failed.set()
                await asyncio.sleep(rng.choice((0, 0.001, 0.004, 0.02)))

    async def _rotate(self) -> None:
        if self._rotation == "recreate":
            self._recreate()
            return
        self._number += 1
        older = self.path.with_name(f"{self.path.name}.{self._number}")
        if self._rotation == "rename":
            self.path.rename(older)
            await asyncio.sleep(self._write_rng.choice((0, 0, 0.01, 0.2)))
            if self._write_rng.random() < 0.5:
                self.path.touch()
        else:
            shutil.copyfile(self.path, older)
            with self.path.open("r+b") as out:
                out.truncate(0)
        self.result.rotations += 1
        self._say(f"rotation {self._number} behind byte {len(self._written)}")

    async def _may_rotate(self) -> bool:
        """Whether a rotation may follow. What is deleted has to be read, so no kill comes before then."""
        if self._rotation != "recreate":
            return True
        self.path.touch()  # to be opened by the sidecar
        return await self._try_lock()

    def _recreate(self) -> None:
        """Delete the log under a sidecar that has it open, and keep that one alive for long enough."""
        self.path.unlink()
        self._number += 1
        self.result.rotations += 1
        self._say(f"deleted behind byte {len(self._written)}")
        self._held = asyncio.create_task(self._unlock())

    async def _try_lock(self) -> bool:
        """Hold kills back once a sidecar has the log open; false if there is none."""
        await self._killing.acquire()
        for _ in range(400):
            since = self._ready_since
            if since is not None and time.monotonic() - since > 1.5 and self._has_log_open():
                return True
            await asyncio.sleep(0.05)
        self._killing.release()
        return False

    def _has_log_open(self) -> bool:
        """Whether the sidecar can read the log even after it is deleted."""
        assert self._process is not None
        log = self.path.stat()
        for one in Path(f"/proc/{self._process.process.pid}/fd").iterdir():
            with suppress(OSError):
                found = one.stat()
                if (found.st_dev, found.st_ino) == (log.st_dev, log.st_ino):
                    return True
        return False

    async def _unlock(self) -> None:
        """Allow kills again when the log was silent long enough."""
        length, since = len(self._written), time.monotonic()
        while time.monotonic() - since < self._safe:
            await asyncio.sleep(0.05)
            if len(self._written) != length:
                length, since = len(self._written), time.monotonic()
        self._killing.release()

    # --- killing

    async def _warm_up(self, session: aiohttp.ClientSession) -> None:
        """Let the sidecar see the log and save where it is."""
        first = next(pieces(-1, ("mlp_eager_16384",), begin=_BEGIN - timedelta(days=1)))
        self._pieces.append(replace(first, number=-1))
        await self._append(first.data)
        async with self._sidecar(session, -1) as sidecar:
            await sidecar.ready(session)
            await asyncio.sleep(self._safe)

    async def _kill(self, session: aiohttp.ClientSession) -> None:
        rng = self._kill_rng
        for number in range(self._kills):
            async with self._sidecar(session, number):
                kind = rng.random()
                if kind < 0.15:
                    await asyncio.sleep(rng.uniform(0.1, 0.9))  # in its start-up
                elif kind < 0.55:
                    self._failed.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._failed.wait(), 2 * self._busy)
                    await asyncio.sleep(rng.choice((0, 0.01, 0.1, 0.4, 1.0)) * rng.random())
                elif kind < 0.9:
                    await asyncio.sleep(rng.expovariate(2) * self._busy)
                else:
                    await asyncio.sleep(rng.uniform(3, 7) * self._busy)
            await asyncio.sleep(rng.choice((0, 0, 0.1, 0.6)) * self._busy)

    @asynccontextmanager
    async def _sidecar(self, session: aiohttp.ClientSession, number: int) -> AsyncIterator[Sidecar]:
        sidecar = self._process = await self._start()
        self._say(f"start {number}")
        watching = asyncio.create_task(self._watch(session, sidecar))
        try:
            if self._kill_rng.random() < 0.85:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(sidecar.base), 20)
            yield sidecar
        finally:
            async with self._killing:
                self._ready_since = None
                watching.cancel()
                code = await sidecar.kill()
            self.result.kills += 1
            self._say(f"kill {number}")
            with suppress(asyncio.CancelledError):
                await watching
            if code != -signal.SIGKILL:
                self.result.defects.append(
                    f"the sidecar ended by itself with {code}: {list(sidecar.said)[-5:]}"
                )

    async def _start(self) -> Sidecar:
        return await Sidecar.start(
            "--log", self.source, "--state-dir", self.state, "--vllm-url", "http://127.0.0.1:9"
        )

    async def _watch(self, session: aiohttp.ClientSession, sidecar: Sidecar) -> None:
        """No counter that was ever seen may be smaller later."""
        base = await sidecar.ready(session)
        self._ready_since = time.monotonic()
        self._say("ready")
        while True:
            with suppress(aiohttp.ClientError):
                self._compare(await metrics(session, base))
            await asyncio.sleep(0.01)

    def _compare(self, samples: dict[str, float]) -> None:
        for name, value in samples.items():
            if name.startswith(_COUNTERS):
                before = self._high.get(name, 0.0)
                if value < before:
                    self.result.defects.append(f"{name} went down from {before:.0f} to {value:.0f}")
                    self._say(self.result.defects[-1])
                elif value > before and not name.startswith("vllm_oom_log"):
                    self._say(f"{name} = {value:.0f}")
                self._high[name] = value

    # --- the verdict

    async def run(self) -> Result:
        """Write, rotate and kill; then let it catch up, twice, and compare."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            if self._warm:
                await self._warm_up(session)
            writing = asyncio.create_task(self._write())
            killing = asyncio.create_task(self._kill(session))
            await asyncio.wait([writing, killing], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                killing.cancel()
                writing.result()
            await killing
            self._enough = True
            await writing
            async with self._killing:
                pass
            self.path.touch()  # a sidecar that finds no log does not look for older ones
            self.result.written = counts_of(bytes(self._written))
            for _ in range(2):
                await self._catch_up(session)
        self.result.pieces = len(self._pieces)
        self.result.megabytes = len(self._written) / 1e6
        self.result.seconds = time.monotonic() - self._begin
        if differences := self.result.written.differences(self.result.seen):
            self.result.defects += differences
            self.result.defects += self._explain()
        return self.result

    async def _catch_up(self, session: aiohttp.ClientSession) -> None:
        """Let the sidecar read to the end; the second time nothing may be counted any more."""
        # lags until it ends, which may be never
        open_line = len(self._written) - self._written.rfind(b"\n") - 1
        sidecar = await self._start()
        watching = asyncio.create_task(self._watch(session, sidecar))
        try:
            base = await sidecar.ready(session)
            await asyncio.sleep(2.0)
            deadline, quiet = time.monotonic() + 300.0, 0
            while time.monotonic() < deadline and quiet < 60:
                await asyncio.sleep(0.05)
                samples = await metrics(session, base)
                seen = counted(samples)
                lag = sum(
                    value for name, value in samples.items() if name.startswith("vllm_oom_log_lag_bytes")
                )
                right = not self.result.written.differences(seen)
                quiet = 0 if lag > open_line or seen != self.result.seen else quiet + (5 if right else 1)
                self.result.seen = seen
            if quiet < 60:
                self.result.defects.append(f"the sidecar never came to rest; it lags {lag:.0f} bytes")
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await sidecar.kill()

    def _explain(self) -> Iterator[str]:
        """Which of the lives were lost or doubled, by the times of the incidents that were kept."""
        with closing(sqlite3.connect(self.state / "state.sqlite3")) as db:
            documents = [json.loads(text) for (text,) in db.execute("SELECT document FROM incident")]
        held: dict[int, list[dict[str, object]]] = {}
        for one in documents:
            owner = -2
            if "time" in one:
                when = datetime.fromisoformat(str(one["time"])).replace(tzinfo=None)
                owner = max((p.number for p in self._pieces if p.begin <= when), default=-2)
            held.setdefault(owner, []).append(one)
        if odd := held.get(-2):
            yield f"incidents without a life: {[(one['class'], one.get('time'), one['excerpt']) for one in odd]}"
        for piece in self._pieces:
            expected = counts_of(piece.data)
            found = held.get(piece.number, [])
            seen = Counter(f"{one['class']}/{one['phase']}" for one in found)
            fatal = sum(bool(one["fatal"]) for one in found)
            if seen != expected.incidents or fatal != expected.fatal.total():
                yield (
                    f"life {piece.number} ({piece.name}): written {dict(expected.incidents)}, fatal"
                    f" {expected.fatal.total()}; kept {dict(seen)}, fatal {fatal}; {self._around(piece.number)}"
                )

    def _around(self, number: int) -> str:
        begin = next((i for i, (_, what) in enumerate(self.trace) if what.startswith(f"piece {number} ")), 0)
        end = next((i for i, (_, what) in enumerate(self.trace) if what == f"piece {number} ends"), begin)
        shown = [one for one in self.trace[begin : end + 40] if not one[1].startswith("vllm")]
        return " | ".join(f"{at:.2f} {what}" for at, what in shown[:16])


async def trial(
    rotation: str,
    seed: int,
    kills: int,
    busy: float = 1.0,
    warm: bool = True,
    torn: bool = False,
    glob: str = "",
    keep: Path | None = None,
) -> Result:
    """Run one trial in a folder of its own, which is kept in ``keep`` if something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"fault-{rotation}-{seed}-", dir=keep))
    one = Trial(folder, rotation, seed, kills, busy, warm, torn, glob)
    try:
        result = await one.run()
    except BaseException:
        shutil.rmtree(folder)
        raise
    if keep is not None and result.defects:
        one.keep()
    else:
        shutil.rmtree(folder)
    return result


def main() -> int:
    """The command line; exit code 1 if anything was lost, doubled or went down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="kills for each kind of rotation")
    parser.add_argument("--rotation", nargs="+", choices=ROTATIONS, default=list(ROTATIONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, state and trace of failures")
    parser.add_argument("--torn", action="store_true", help="rotate also in the middle of a traceback")
    parser.add_argument("--cold", action="store_true", help="kill before the first position was saved, too")
    parser.add_argument("--busy", type=float, default=1.0, help="below 1: shorter pauses and lives")
    parser.add_argument("--glob", default="", help="what is read in the folder, as *.log*; default: vllm.log")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    failed = False
    for rotation in args.rotation:
        result = asyncio.run(
            trial(rotation, args.seed, args.kills, args.busy, not args.cold, args.torn, args.glob, args.keep)
        )
        print(result.says(), flush=True)
        failed = failed or bool(result.defects)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
