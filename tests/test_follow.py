"""The follower against ``analyze``, over captures of real servers, in pieces and with kills.

``FOLLOW_SEEDS=200 pytest tests/test_follow.py`` tries more ways to cut, to wait and to be killed
(by default there are 4), and feeds more than 10,000 incidents (by default 700 at a lower bound).
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from conftest import CAPTURES, LATEST, analyzed, capture
from replay import Replay
from test_incident import (
    API,
    ENGINE,
    WORKER0,
    WORKER1,
    at,
    dead,
    fatal,
    later,
    oom,
    start,
    survived,
    warning,
    worker,
)

from exporter import follow
from exporter.analyze import Reader
from exporter.diagnosis.history import History
from exporter.diagnosis.knowledge import builtin_classes
from exporter.follow import Follower
from exporter.sources.stream import Chunk, SourceStats
from exporter.state import Store
from exporter.status import TargetStatus

SEEDS = range(int(os.environ.get("FOLLOW_SEEDS", "4")))
LONG = len(SEEDS) > 50
CLASSES = builtin_classes()
NAMES = sorted(path.name.removesuffix(".log.gz") for path in CAPTURES.glob("*.log.gz"))
ARRIVALS = sorted(path.name.removesuffix(".arrival.txt.gz") for path in CAPTURES.glob("*.arrival.txt.gz"))
SOURCE = "/var/log/vllm.log"
_LINE = re.compile(rb"[^\n]*\n")
_TIME = re.compile(rb"\d\d-\d\d \d\d:\d\d:\d\d")


def log(*parts: list[str]) -> bytes:
    """Lines of a log."""
    return "".join(line + "\n" for part in parts for line in part).encode()


def awake(seconds: float) -> list[str]:
    """A harmless line that is looked at, so that the log's clock goes on."""
    return at(seconds, ENGINE, "INFO", "gpu_worker.py:441", "Available KV cache memory: 11.12 GiB")


class Feed:
    """One follower and one stream of lines that are handed to it."""

    def __init__(self, store: Store | None = None, **more: Any) -> None:
        self.one = Follower(TargetStatus("vllm"), CLASSES, lambda: LATEST, **more)
        self.position = 0
        if store is not None:
            store.load(self.one)
            self.position = int(self.one.tokens().get("s", 0))
        self.status = self.one.status
        self.counts = self.one.status.counts

    def give(self, *parts: list[str] | bytes, ticks: int = 0) -> None:
        """Lines, then silence for ``ticks`` tenths of a second."""
        data = b"".join(part if isinstance(part, bytes) else log(part) for part in parts)
        self.position += len(data)
        self.one.take(SOURCE, Chunk("s", data, str(self.position)), 1.5)
        self.tick(ticks)

    def tick(self, times: int = 1) -> None:
        """A silence."""
        for _ in range(times):
            self.one.tick()

    def ticks_until(self, what: str, most: int = 100) -> int:
        """How long until an incident is counted."""
        for number in range(most):
            if self.counts.incidents.total():
                return number
            self.one.tick()
        raise AssertionError(f"no {what} within {most} ticks")


# --- the same as analyze ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What must come out the same, however the log came in. Incidents: class, phase, fatal."""

    incidents: tuple[tuple[str, str, bool], ...]
    counted: tuple[tuple[tuple[str, str], int], ...]
    fatal: tuple[tuple[str, int], ...]
    near_misses: int
    engine_starts: int
    lines: int
    bytes: int


def expected(data: bytes) -> Outcome:
    """What ``analyze`` says."""
    history = History(CLASSES)
    reader = Reader(history, LATEST)
    reader.feed(data)
    reader.finish()
    history.finish()
    found = sorted((one.class_id, str(one.phase), one.fatal) for one in history.incidents())
    return Outcome(
        tuple(found),
        tuple(sorted(Counter((one, phase) for one, phase, _ in found).items())),
        tuple(sorted(Counter(one for one, _, fatal in found if fatal).items())),
        history.near_misses,
        len(history.lives.all),
        reader.lines,
        reader.bytes,
    )


def outcome(one: Follower) -> Outcome:
    """What the follower counted."""
    one.count_read()
    counts = one.status.counts
    return Outcome(
        tuple(sorted((k.class_id, k.phase, k.fatal) for k in one.known.values())),
        tuple(sorted(counts.incidents.items())),
        tuple(sorted(counts.fatal.items())),
        counts.near_misses,
        counts.engine_starts,
        counts.lines.total(),
        counts.read_bytes.total(),
    )


@dataclass(slots=True)
class Follow:
    """Follows ``data`` in pieces, waits between them, and dies now and then.

    A tenth of a second may go by between any two lines; a silence falls only before a line whose
    time is later, and is no longer than that: a server writes a record at once.
    """

    data: bytes
    seed: int
    folder: Path
    kill: float = 0.0
    kills: int = 0
    error_lines: int = 0
    most_kills: int = 10

    def run(self) -> Follower:
        """Follow to the end; the follower that a restart would give."""
        chance = random.Random(self.seed)  # noqa: S311 - repeatable
        store = Store(self.folder)
        store.open()
        feed = Feed(store)
        while self._life(feed, store, chance):
            self.kills += 1
            feed = Feed(store)
        feed.one.finish()
        store.save(feed.one)
        last = Feed(store).one
        assert outcome(last) == outcome(feed.one)
        store.close()
        return last

    def _life(self, feed: Feed, store: Store, chance: random.Random) -> bool:
        """Read until killed (True), or to the end."""
        counts = feed.counts
        assert counts.error_lines >= self.error_lines, "error lines were forgotten"
        for data, silence in self._pieces(feed.position, chance):
            feed.give(data)
            die = chance.random() < self.kill and self.kills < self.most_kills
            if die and chance.random() < 0.3:
                return True  # before it could save
            for _ in range(silence):
                feed.tick()
                if feed.one.urgent:
                    store.save(feed.one)
            if feed.one.urgent or chance.random() < 0.3:
                store.save(feed.one)
                self.error_lines = counts.error_lines
            if die:
                return True
        return False

    def _pieces(self, position: int, chance: random.Random) -> Iterator[tuple[bytes, int]]:
        lines = _LINE.findall(self.data, position)
        at = 0
        before: bytes | None = None
        while at < len(lines):
            size = chance.choice([1, 2, 5, 20, 50])
            piece = b"".join(lines[at : at + size])
            at += size
            # the first of a line: others may be in what a client wrote
            times = [found[0] for line in _LINE.findall(piece) if (found := _TIME.search(line))]
            before = times[-1] if times else before
            following = _TIME.search(lines[at]) if at < len(lines) else None
            gap = seconds(following[0]) - seconds(before) if following and before else 0
            # 9 tenths may have passed within either second
            yield (
                piece,
                min(chance.choice([1, 5, 12, 30]), 10 * gap + 9) if gap > 0 else chance.choice([0, 0, 1]),
            )


def seconds(text: bytes) -> int:
    """Of a time in a log."""
    return int(datetime.strptime(f"2026-{text.decode()}", "%Y-%m-%d %H:%M:%S").timestamp())


def whole(name: str) -> bytes:
    """A capture that ends with a newline, as followed files do."""
    data = capture(name)
    return data if data.endswith(b"\n") else data + b"\n"


class TestCaptures:
    """Every capture of a real server."""

    @pytest.mark.parametrize("name", NAMES)
    def test_in_pieces(self, name: str, tmp_path: Path) -> None:
        """Cut and killed anywhere, it gives what ``analyze`` gives: nothing is lost or counts twice."""
        seed = crc32(name.encode())
        calm = Follow(whole(name), seed, tmp_path / "calm")
        without = calm.run()
        assert outcome(without) == expected(calm.data)
        run = Follow(calm.data, seed, tmp_path / "killed", 0.2)
        with_kills = run.run()
        assert outcome(with_kills) == outcome(without), f"{run.kills} kills"
        errors = with_kills.status.counts.error_lines
        assert errors == without.status.counts.error_lines, f"{run.kills} kills"

    @pytest.mark.parametrize("name", ARRIVALS)
    def test_as_it_arrived(self, name: str) -> None:
        """Line by line at the times of the capture, incidents equal those of ``analyze`` to the last word."""
        replay, feed = Replay(name), Feed()
        gone = 0
        for line, arrival in zip(replay.lines, replay.arrivals, strict=True):
            feed.tick(int(arrival * 10) - gone)
            gone = max(gone, int(arrival * 10))
            feed.give(line)
        feed.tick(60)
        document = analyzed(b"".join(replay.lines))
        # "fatal" is presumed by analyze where a log ends at a failure
        feed.one.finish()
        assert [dict(one) for one in reversed(feed.status.incidents)] == document["incidents"]
        assert [{k: v for k, v in one.items() if k != "index"} for one in feed.status.engines] == document[
            "engines"
        ]

    @pytest.mark.parametrize("name", ARRIVALS)
    def test_how_soon(self, name: str) -> None:
        """An incident is counted within 1.3 s of its last error, and error lines at once."""
        replay, feed = Replay(name), Feed()
        gone, last_error, counted_at = 0, 0.0, None
        for line, arrival in [*zip(replay.lines, replay.arrivals, strict=True), (b"", 10_000.0)]:
            for _ in range(min(int(arrival * 10) - gone, 100)):
                gone += 1
                feed.tick()
                if counted_at is None and feed.counts.incidents:
                    counted_at = gone / 10
            gone = max(gone, int(arrival * 10))
            before = feed.counts.error_lines
            feed.give(line)
            if feed.counts.error_lines > before and counted_at is None:
                last_error = arrival
        assert counted_at is not None
        assert -0.1 <= counted_at - last_error <= 1.3


class TestLongHistory:
    """Several servers one after the other in one log."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_with_kills(self, seed: int, tmp_path: Path) -> None:
        """Many lives in one log, killed dozens of times: nothing is lost, nothing counts twice."""
        names = apart(random.Random(seed))  # noqa: S311 - repeatable
        data = b"".join(whole(name) for name in names)
        calm = Follow(data, seed, tmp_path / "calm")
        without = calm.run()
        run = Follow(data, seed, tmp_path / "killed", 0.2, most_kills=60)
        with_kills = run.run()
        said = f"{run.kills} kills in {', '.join(names)}"
        assert outcome(without) == expected(data), said
        assert outcome(with_kills) == expected(data), said
        assert with_kills.status.counts.error_lines == without.status.counts.error_lines, said
        assert run.kills > 9, said


def apart(chance: random.Random) -> list[str]:
    """Some captures whose times don't overlap, oldest first."""
    chosen: list[tuple[bytes, bytes, str]] = []
    for name in chance.sample(NAMES, len(NAMES)):
        times = _TIME.findall(capture(name))
        begin, end = times[0], times[-1]
        if all(end < other[0] or begin > other[1] for other in chosen):
            chosen.append((begin, end, name))
        if len(chosen) == 6:
            break
    return [name for _, _, name in sorted(chosen)]


# --- silence ------------------------------------------------------------------------------


class TestSilence:
    """What closes records and incidents where no later line does."""

    def test_error_lines_wait_for_nothing(self) -> None:
        """An error line counts with the chunk that brings it; its incident is not yet counted."""
        feed = Feed()
        feed.give(start(), fatal(100))
        assert (feed.counts.error_lines, feed.counts.incidents.total(), feed.one.urgent) == (1, 0, True)
        feed.tick(30)
        assert (feed.counts.error_lines, feed.counts.incidents.total()) == (1, 1)

    def test_half_a_record(self) -> None:
        """An error line that is there already counts before its record is complete, and once."""
        feed = Feed()
        lines = [*start(), *at(100, ENGINE, "ERROR", "core.py:1138", f"{oom()}\nand more")]
        feed.give(lines[:-1])
        assert feed.counts.error_lines == 1
        feed.give(lines[-1:], ticks=30)
        assert feed.counts.error_lines == 1

    def test_settles_after_a_second(self) -> None:
        """Without a line that says how it ended, an incident settles a second after its record closed."""
        feed = Feed()
        feed.give(start())
        feed.tick(30)
        feed.give(at(100, WORKER0, "ERROR", "w.py:1", oom()))
        assert 10 <= feed.ticks_until("incident") <= 13

    def test_settles_sooner_when_it_is_over(self) -> None:
        """After the line that says that the engine died it settles within 0.6 s."""
        feed = Feed()
        feed.give(start())
        feed.tick(30)
        feed.give(fatal(100), dead(100))
        assert 4 <= feed.ticks_until("incident") <= 6

    def test_lines_of_its_own_keep_it_open(self) -> None:
        """Reports that come in less than a second apart are one incident, counted behind the last."""
        feed = Feed()
        feed.give(start())
        feed.tick(30)
        for rank in range(8):
            feed.give(at(100, f"Worker_TP{rank} pid={200 + rank}", "ERROR", "w.py:1", oom(gpu=rank)), ticks=7)
            assert feed.counts.incidents.total() == 0
        feed.tick(15)
        assert feed.counts.incidents.total() == 1
        assert feed.status.incidents[0]["facts"]["ranks"] == list(range(8))  # type: ignore[index]

    def test_other_lines_do_not_keep_it_open(self) -> None:
        """Traffic beside an incident does not hold it up."""
        feed = Feed()
        feed.give(start(), fatal(100))
        for _ in range(15):
            feed.give(b'(APIServer pid=1) INFO:     10.0.0.1:4100 - "GET /health HTTP/1.1" 200 OK\n', ticks=1)
        assert feed.counts.incidents.total() == 1

    def test_time_that_was_not_ours(self) -> None:
        """However late the next chunk comes, without ticks there was no silence."""
        feed = Feed()
        lines = [*start(), *fatal(100)]
        for line in lines:
            feed.one.take(SOURCE, Chunk("s", log([line]), "x"), 1e9 + 3600.0 * len(line))
        assert feed.counts.incidents.total() == 0

    @pytest.mark.parametrize("silence", range(10))
    @pytest.mark.parametrize("behind", range(4))
    def test_an_announced_line(self, silence: int, behind: int) -> None:
        """A record whose last line ends with ``\\r`` waits almost a second for the next one."""
        feed = Feed()
        feed.give(start(), ticks=30)
        lines = fatal(100)
        assert (len(lines), all(line.endswith("\r") for line in lines[:-1])) == (5, True)
        feed.give(lines[: behind + 1], ticks=silence)
        assert feed.one.fed == 5
        feed.give(lines[behind + 1 :], ticks=30)
        assert feed.one.fed == 6
        assert feed.status.incidents == analyzed(log(start(), lines))["incidents"]

    def test_an_announced_line_that_never_comes(self) -> None:
        """After a second the record closes without it."""
        feed = Feed()
        feed.give(start(), ticks=30)
        feed.give(fatal(100)[:-1], ticks=9)
        assert feed.one.fed == 5
        feed.tick(1)
        assert feed.one.fed == 6

    def test_a_record_without_announcement(self) -> None:
        """A record of one line closes 0.2 s after it."""
        feed = Feed()
        feed.give(later(1)[:1], ticks=1)
        feed.give(at(2, API, "INFO", "api_server.py:1", "Initializing a V1 LLM engine (v0.32.0) with memory"))
        feed.tick(1)
        before = feed.one.fed
        feed.tick(1)
        assert feed.one.fed == before + 1

    def test_a_stream_that_ended(self) -> None:
        """The end of a stream ends its last line; its records wait for what may follow it."""
        feed = Feed()
        feed.one.take(SOURCE, Chunk("s", log(start(), fatal(100))[:-1], "x", ended=True), 0.0)
        assert (feed.one.fed, feed.counts.error_lines) == (5, 1)
        feed.tick(2)
        assert feed.one.fed == 6


# --- what changes later -------------------------------------------------------------------


class TestLater:
    """What later lines change of an incident, and what not."""

    def test_turns_fatal(self) -> None:
        """The end of the engine, seconds after the class froze, turns it fatal and counts that once."""
        feed = Feed()
        feed.give(start(), at(100, WORKER0, "ERROR", "w.py:1", oom()), ticks=30)
        (before,) = feed.status.incidents
        assert (before["fatal"], feed.counts.fatal.total(), feed.one.unresolved) == (False, 0, True)
        for _ in range(3):
            feed.give(dead(105), ticks=30)
        (after,) = feed.status.incidents
        assert (after["id"], after["class"], after["phase"]) == (
            before["id"],
            before["class"],
            before["phase"],
        )
        assert after["fatal"] is True
        assert dict(feed.counts.fatal) == {before["class"]: 1}
        assert (feed.counts.incidents.total(), feed.one.unresolved) == (1, False)

    def test_class_is_frozen(self) -> None:
        """A dump that would have decided the class comes too late for it, and completes the facts."""
        late = Feed()
        late.give(start(), at(100, ENGINE, "ERROR", "core.py:1", oom()), ticks=30)
        (before,) = late.status.incidents
        late.give(fatal(104), dead(104), ticks=30)
        (after,) = late.status.incidents
        assert analyzed(log(start(), fatal(104), dead(104)))["incidents"][0]["class"] != before["class"]
        assert after["class"] == before["class"] == "unknown"
        assert dict(late.counts.incidents) == {("unknown", "serving"): 1}
        assert dict(late.counts.fatal) == {"unknown": 1}

    def test_class_is_frozen_over_a_restart(self, tmp_path: Path) -> None:
        """A process that reads the whole failure again keeps the class that was counted."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.give(start(), at(100, ENGINE, "ERROR", "core.py:1", oom()), ticks=15)
        store.save(feed.one)
        again = Feed(store)
        again.give(
            log(start(), at(100, ENGINE, "ERROR", "core.py:1", oom()), fatal(100), dead(100))[
                again.position :
            ],
            ticks=30,
        )
        assert dict(again.counts.incidents) == {("unknown", "serving"): 1}
        assert dict(again.counts.fatal) == {"unknown": 1}
        (incident,) = again.status.incidents
        assert (incident["class"], incident["fatal"]) == ("unknown", True)
        store.close()

    def test_a_new_life_decides(self) -> None:
        """A server that starts again shows that the failure before it was the end."""
        feed = Feed()
        feed.give(start(), fatal(100), ticks=30)
        feed.give(start(200), ticks=30)
        assert (feed.counts.fatal.total(), feed.counts.incidents.total()) == (1, 1)

    def test_survived(self) -> None:
        """An engine that says that it goes on had an incident that was not fatal."""
        feed = Feed()
        feed.give(start(), survived(100), ticks=30)
        assert (feed.counts.fatal.total(), dict(feed.counts.incidents)) == (0, {("lora", "serving"): 1})
        assert not feed.one.unresolved

    def test_what_metrics_said_before(self) -> None:
        """The minutes before a failure are asked for by our clock, and only if it was seen live."""
        asked: list[float] = []

        def before(when: float) -> list[dict[str, float]]:
            asked.append(when)
            return [{"seconds_before": 2.0}]

        feed = Feed(before=before)
        feed.give(start(), fatal(100), dead(100), ticks=30)
        assert "metrics_before" not in feed.status.incidents[0]
        feed.give(start(200), fatal(300), dead(300), ticks=30)
        assert set(asked) == {1.5}  # when ``give`` says that the lines came
        assert feed.status.incidents[0]["metrics_before"] == [{"seconds_before": 2.0}]


class TestLives:
    """Starts, settings, fingerprints."""

    def test_setting_changed(self) -> None:
        """A setting that differs from the life before has the time of the start that brought it."""
        feed = Feed()
        feed.give(start(), fatal(100), dead(100), ticks=30)
        assert feed.status.setting_changed == {}
        feed.give(start(200, 4096), ticks=60)
        at_200 = datetime(2026, 11, 2, 10, 3, 20).timestamp()
        assert feed.status.setting_changed == {"max_num_batched_tokens": at_200}
        feed.give(fatal(300), dead(300), start(400, 4096), ticks=60)
        assert feed.status.setting_changed == {"max_num_batched_tokens": at_200}
        assert feed.status.engine_start_timestamp == datetime(2026, 11, 2, 10, 6, 40).timestamp()
        feed.give(fatal(500), dead(500), start(600, 2048), ticks=60)
        assert feed.status.setting_changed == {
            "max_num_batched_tokens": datetime(2026, 11, 2, 10, 10).timestamp()
        }
        assert feed.counts.engine_starts == 4

    def test_fingerprint(self) -> None:
        """A life that reached the error after the budget line counts once."""
        feed = Feed()
        feed.give(start(), ticks=60)
        assert feed.counts.fingerprints.total() == 0
        feed.give(fatal(100), ticks=60)
        feed.give(dead(105), ticks=60)
        assert dict(feed.counts.fingerprints) == {"without_warn": 1}

    def test_shown(self) -> None:
        """The last 50 lives are shown, oldest first."""
        feed = Feed()
        for number in range(60):
            feed.give(start(number * 200), fatal(number * 200 + 100), dead(number * 200 + 100), ticks=20)
        assert [one["index"] for one in feed.status.engines] == list(range(10, 60))
        assert feed.counts.engine_starts == 60


class TestNearMisses:
    """Allocator retries."""

    def test_once(self) -> None:
        """A near miss counts once, however often the log is looked at."""
        feed = Feed()
        feed.give(start(), warning(100), ticks=30)
        for seconds in (110, 120, 130):
            feed.give(awake(seconds), ticks=30)
        assert feed.counts.near_misses == 1

    def test_not_before_five_seconds(self) -> None:
        """A failure of the same size within five seconds claims the warning: it was no near miss."""
        feed = Feed()
        feed.give(start(), warning(100), ticks=20)
        assert feed.counts.near_misses == 0
        feed.give(awake(105), ticks=5)
        assert feed.counts.near_misses == 0
        feed.give(fatal(105), dead(105), ticks=60)
        feed.give(start(200), ticks=60)
        assert feed.counts.near_misses == 0
        assert feed.status.incidents[0]["class"] != "unknown"

    def test_over_a_restart(self, tmp_path: Path) -> None:
        """A near miss that was counted is not counted by the next process, though it reads it again."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.give(start(), warning(100), awake(110), ticks=2)
        feed.tick(1)
        assert feed.counts.near_misses == 1
        store.save(feed.one)
        again = Feed(store)
        assert again.position == 0
        again.give(start(), warning(100), awake(110), warning(120), awake(130), ticks=30)
        assert again.counts.near_misses == 2
        store.close()

    def test_in_ordinary_traffic(self) -> None:
        """A near miss counts a few seconds after it, though nothing but statistics follows."""
        feed = Feed()
        feed.give(start(), ticks=30)
        feed.give(warning(100), ticks=40)
        assert feed.counts.near_misses == 0
        for seconds in range(110, 400, 10):
            feed.give(
                at(seconds, API, "INFO", "loggers.py:271", "Engine 000: Avg prompt throughput: 0.0 tokens/s")
            )
            feed.tick(100)
        assert feed.counts.near_misses == 1

    def test_at_the_end_of_the_input(self) -> None:
        """A warning right before the end of a finite input counts, as in ``analyze``."""
        feed = Feed()
        feed.give(start(), warning(100))
        feed.one.finish()
        assert feed.counts.near_misses == analyzed(log(start(), warning(100)))["near_misses"] == 1


# --- exactly once -------------------------------------------------------------------------


class TestRestart:
    """Going on behind a former process."""

    def test_counters_go_on(self, tmp_path: Path) -> None:
        """A restart continues every counter, and an old failure counts no more."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        data = log(start(), fatal(100), dead(100))
        feed.give(data, ticks=60)
        store.save(feed.one)
        again = Feed(store)
        assert again.counts == feed.counts
        again.give((data + log(start(200), fatal(300), dead(300)))[again.position :], ticks=60)
        assert (again.counts.incidents.total(), again.counts.fatal.total()) == (2, 2)
        assert (again.counts.engine_starts, again.counts.error_lines) == (2, 2)
        again.one.count_read()
        assert again.counts.lines.total() == data.count(b"\n") + again.counts.engine_starts * 0 + len(
            start() + fatal(0) + dead(0)
        )
        store.close()

    def test_what_was_read_is_shown_with_the_save(self, tmp_path: Path) -> None:
        """Lines and bytes grow with a save only: what nobody saved may be read again, and nobody saw it."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.give(start(), ticks=1)
        store.save(feed.one)
        shown = feed.counts.lines.total(), feed.counts.read_bytes[SOURCE]
        assert shown == (len(start()), len(log(start())))
        feed.give(later(60))
        assert (feed.counts.lines.total(), feed.counts.read_bytes[SOURCE]) == shown
        again = Feed(store)
        assert (again.counts.lines.total(), again.counts.read_bytes[SOURCE]) == shown
        store.close()

    def test_rotations_are_shown_with_the_save(self, tmp_path: Path) -> None:
        """What a source counts is shown with the save that holds it, so no kill makes it fall; and is saved soon."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        stats = SourceStats(SOURCE)
        feed.status.sources = [stats]
        stats.read_errors, stats.rotations["rename"] = 1, 2
        assert not feed.one.stale
        feed.tick()
        assert feed.one.stale
        assert (feed.counts.read_errors[SOURCE], feed.counts.rotations[SOURCE, "rename"]) == (0, 0)
        store.save(feed.one)
        stats.rotations["rename"] += 4  # nobody saves them before the kill
        again = Feed(store)
        for one in (feed, again):
            assert (one.counts.read_errors[SOURCE], one.counts.rotations[SOURCE, "rename"]) == (1, 2)
        feed.tick()
        store.save(feed.one)
        feed.tick()
        assert (feed.counts.rotations[SOURCE, "rename"], feed.one.stale) == (6, False)
        store.close()

    def test_checkpoint(self, tmp_path: Path) -> None:
        """Two seconds after start-up the position is kept, and nothing before it is asked for again."""
        feed = Feed()
        feed.give(start())
        feed.tick(15)
        assert feed.one.checkpoint is None
        feed.tick(30)
        assert feed.one.checkpoint is not None
        assert feed.one.checkpoint.streams["s"].token == str(len(log(start())))
        feed.give(at(100, WORKER0, "ERROR", "w.py:1", oom()), ticks=100)  # how it ends is not known
        assert feed.one.checkpoint.streams["s"].token == str(len(log(start())))
        with_store = Store(tmp_path)
        with_store.open()
        with_store.save(feed.one)
        assert Feed(with_store).one.tokens() == {"s": str(len(log(start())))}
        with_store.close()

    def test_behind_a_death(self, tmp_path: Path) -> None:
        """Two seconds after the end of an engine a restart reads nothing of it again; late reports repeat it."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        parts = [
            log(start(), fatal(100), dead(100)),
            log(at(130, WORKER0, "ERROR", "w.py:1", oom(gpu=1)), dead(160)),
            log(warning(162), at(164, WORKER0, "ERROR", "w.py:1", oom()), start(200), fatal(300), dead(300)),
        ]
        for number, part in enumerate(parts):
            feed.give(part, ticks=60)
            store.save(feed.one)
            feed = Feed(store)
            assert feed.position == sum(map(len, parts[: number + 1]))
        assert (feed.counts.incidents.total(), feed.counts.fatal.total()) == (2, 2)
        assert (feed.counts.error_lines, feed.counts.engine_starts, feed.counts.near_misses) == (4, 2, 0)
        calm = Feed()
        for part in parts:
            calm.give(part, ticks=60)
        assert outcome(calm.one) == outcome(feed.one)
        store.close()

    @pytest.mark.parametrize("counted", range(12))
    def test_lines_counted_before(self, counted: int, tmp_path: Path) -> None:
        """Lines that were counted behind the checkpoint count no more, wherever chunks begin and end."""
        store = Store(tmp_path)
        store.open()
        lines = [*start(), *fatal(100)]
        feed = Feed(store)
        feed.give(lines[:counted])
        store.save(feed.one)
        again = Feed(store)
        again.give(lines, ticks=30)
        again.one.count_read()
        assert (again.counts.lines.total(), again.counts.read_bytes[SOURCE]) == (len(lines), len(log(lines)))
        assert (again.counts.error_lines, again.counts.incidents.total()) == (1, 1)
        store.close()

    def test_first_lines_of_a_life(self, tmp_path: Path) -> None:
        """A life that begins with lines without weight counts once, if the process changes right then."""
        banner = at(
            0, API, "INFO", "api_utils.py:347", "\n  ▄▄ ▄█ █     █  version 0.32.0\n  model   /models/a\n"
        )
        rest = start(4)
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        # ordinary traffic of the life before: the beginning of a log is read whole
        feed.give(
            start(-900), b'(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1 HTTP/1.1" 200 OK\n' * 2000
        )
        feed.give(at(-800, API, "INFO", "launcher.py:1", "Shutting down"), ticks=60)
        feed.give(b'(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1 HTTP/1.1" 200 OK\n' * 2000)
        begin = feed.position
        feed.give(banner, ticks=60)
        feed.give(rest, ticks=2)
        store.save(feed.one)
        assert feed.counts.engine_starts == 2
        again = Feed(store)
        assert again.position <= begin
        again.give(banner, rest, ticks=60)
        assert again.counts.engine_starts == 2
        store.close()

    def test_order(self, tmp_path: Path) -> None:
        """Incidents stay in the order they were seen, the newest first, when one is read again."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        lines = [*start(), *fatal(100), *dead(100), *start(200), *fatal(300), *dead(300)]
        feed.give(lines, ticks=12)
        store.save(feed.one)
        before = [one["id"] for one in feed.status.incidents]
        again = Feed(store)
        assert ([one["id"] for one in again.status.incidents], again.position) == (before, 0)
        again.give(lines[:12], ticks=30)
        assert [one["id"] for one in again.status.incidents] == before
        store.close()

    def test_streams_that_ended(self, tmp_path: Path) -> None:
        """A stream that ended is kept with its last position, so that it is not read again."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.one.take(SOURCE, Chunk("old", log(start()), "end", ended=True), 0.0)
        feed.tick(60)
        store.save(feed.one)
        feed.give(start(500), ticks=60)
        store.save(feed.one)
        assert Feed(store).one.tokens() == {"old": "end", "s": str(len(log(start(500))))}
        assert set(feed.one.reading()) == {"s"}
        store.close()

    def test_a_source_that_is_written_another_way(self, tmp_path: Path) -> None:
        """Another SOURCE that leads to the same stream goes on with it, and counts nothing again."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.give(start(), ticks=60)
        store.save(feed.one)
        again = Feed(store)
        again.one.take("/var/log/*.log", Chunk("s", log(fatal(100)), "900"), 2.0)
        again.tick(60)
        again.one.count_read()
        assert (again.counts.engine_starts, again.counts.incidents.total()) == (1, 1)
        assert again.counts.lines.total() == len(start() + fatal(100))
        store.close()

    def test_an_end_that_the_checkpoint_does_not_know(self, tmp_path: Path) -> None:
        """A stream that ends while a checkpoint is being made keeps the position it had then, and its lines."""
        store = Store(tmp_path)
        store.open()
        feed = Feed(store)
        feed.give(start(), ticks=11)
        data = log(start(), later(50))
        feed.one.take(SOURCE, Chunk("s", data[feed.position :], str(len(data)), ended=True), 0.0)
        for _ in range(60):
            feed.tick()
            store.save(feed.one)
            again = Feed(store)
            if again.position < len(data):
                again.give(data[again.position :])
            again.one.count_read()
            assert again.counts.lines.total() == len(start()) + 1
        assert set(feed.one.reading()) == set()
        store.close()

    def test_nothing_to_save(self) -> None:
        """Silence changes nothing that would have to be saved."""
        feed = Feed()
        feed.give(start(), ticks=60)
        feed.one.saved()
        feed.tick(100)
        assert (feed.one.stale, feed.one.urgent, feed.one.dirty) == (False, False, {})


# --- bounds -------------------------------------------------------------------------------


class TestBounds:
    """Memory does not grow with the log."""

    def test_incidents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After many incidents as many are known as the bound says, with 200 documents and one case."""
        bound, hundreds = (10_000, 103) if LONG else (500, 7)
        monkeypatch.setattr(follow, "KNOWN", bound)
        feed = Feed()
        feed.give(start(), ticks=30)
        history = feed.one._history
        for hundred in range(hundreds):
            begin = 1000 + hundred * 4100
            feed.give(*[survived(begin + number * 40) for number in range(100)], awake(begin + 4050))
            assert len(history._incidents.cases) == 1
            feed.tick(60)
            feed.one.saved()
            assert (len(history._incidents.cases), len(history._frozen)) == (1, 1)
            assert len(feed.one._streams["s"].errors) == 0
        assert feed.counts.incidents == {("lora", "serving"): 100 * hundreds}
        assert (len(feed.one.known), len(feed.status.incidents)) == (bound, 200)
        assert (len(history.lives.all), len(feed.one.events)) == (1, 2)

    def test_lives(self) -> None:
        """Of many lives two are kept."""
        feed = Feed()
        for number in range(100):
            feed.give(start(number * 200), fatal(number * 200 + 100), dead(number * 200 + 100), ticks=1)
        assert len(feed.one._history.lives.all) == 2
        assert len(feed.status.engines) == 50

    def test_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Events are known up to a bound."""
        monkeypatch.setattr(follow, "KNOWN", 400)
        feed = Feed()
        feed.give(start(), ticks=30)
        for number in range(0, 1000, 100):
            feed.give(*[warning(100 + (number + one) * 7) for one in range(100)], ticks=1)
        feed.give(awake(9000), ticks=30)
        assert feed.counts.near_misses == 1000
        assert len(feed.one.events) <= 401

    def test_a_start_is_not_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many near misses a server has, it started once."""
        monkeypatch.setattr(follow, "KNOWN", 400)
        feed = Feed()
        feed.give(start(), ticks=30)
        for number in range(0, 1000, 100):
            feed.give(*[warning(100 + (number + one) * 7) for one in range(100)], ticks=1)
        assert feed.counts.engine_starts == 1

    def test_while_nothing_can_be_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What waits to be saved is bounded too, for a disk that stays full."""
        monkeypatch.setattr(follow, "KNOWN", 100)
        monkeypatch.setattr(follow, "_UNSAVED", 50)
        feed = Feed()
        feed.give(start(), ticks=30)
        for number in range(0, 300, 100):
            feed.give(*[survived(1000 + (number + one) * 40) for one in range(100)])
            feed.give(*[warning(1000 + (number + 100) * 40 + one * 7) for one in range(100)])
        assert len(feed.one.known) == 100
        assert (len(feed.one.dirty) <= 50, len(feed.one.new_events) <= 101) == (True, True)

    def test_what_a_restart_reads_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long something stays open, a restart reads a bounded part of the log again."""
        monkeypatch.setattr(follow, "_REPLAY_BYTES", 10_000)
        feed = Feed()
        feed.give(start()[:3], ticks=30)  # a start whose end is never seen
        for _ in range(20):
            feed.give(
                b'(APIServer pid=1) INFO:     10.0.0.1:1 - "POST /v1 HTTP/1.1" 200 OK\n' * 100, ticks=30
            )
        assert feed.one.checkpoint is not None
        assert feed.position - int(feed.one.checkpoint.streams["s"].token) < 30_000

    def test_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files that come and go leave a bounded number of positions behind, the newest."""
        monkeypatch.setattr(follow, "KEPT_STREAMS", 1000)
        feed = Feed()
        for number in range(1200):
            feed.one.take(SOURCE, Chunk(f"s{number}", b"a\n", "2", ended=True), 0.0)
            if number % 100 == 0:
                feed.one.take(SOURCE, Chunk("s", log(start(number * 10)), "9"), 0.0)
                feed.tick(60)
                feed.one.saved()
        assert len(feed.one._saved) <= 1000
        assert len(feed.one._streams) <= 102

    def test_files_of_a_crash_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Deaths without a silence between them, in a log that is rotated: what is done is let go."""
        monkeypatch.setattr(follow, "_REPLAY_BYTES", 20_000)
        one = Feed().one
        for number in range(200):
            name, before = f"s{number}", f"s{number - 1}" if number else ""
            if before:
                one.take(SOURCE, Chunk(before, b"", "9", ended=True), 0.0)
            begin = number * 200
            lines = log(start(begin), fatal(begin + 100), dead(begin + 100))
            one.take(SOURCE, Chunk(name, lines, "9", follows=before), 0.0)
            one.tick()
        held = one._streams.values()
        assert one.status.counts.error_lines == 200
        assert (len(held) <= 20, sum(len(stream.errors) for stream in held) <= 20) == (True, True)
        assert len(one._numbered) == len(held)

    def test_a_crash_loop_that_never_pauses(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A kill while it is read: the checkpoint moves all the same, and stands in no failure."""
        monkeypatch.setattr(follow, "_REPLAY_BYTES", 30_000)
        monkeypatch.setattr(
            follow, "RECENT", 2
        )  # what is told again under another first line is found among these
        lives = [
            log(
                start(at),
                *[worker(at + 100, one) for one in (WORKER0, WORKER1)],
                fatal(at + 100),
                dead(at + 100),
            )
            for at in range(0, 60 * 200, 200)
        ]
        data = b"".join(lives)
        store, again = Store(tmp_path), 0
        store.open()
        feed = Feed(store)
        for number in range(1, 10_000):
            begin = feed.position
            end = data.find(b"\n", min(begin + 700, len(data) - 1)) + 1
            if begin == len(data):
                break
            feed.give(data[begin:end], ticks=1)
            if feed.one.urgent:
                store.save(feed.one)
            if number % 150 == 0:
                feed = Feed(store)
                again = max(again, end - feed.position)
        feed.tick(30)
        assert 0 < again < 32_000
        assert feed.counts.incidents.total() == feed.counts.engine_starts == len(lives)
        assert feed.counts.error_lines == 3 * len(lives)
