"""What is saved of many targets: those that never come again end, and none takes the place of others."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from podlogs import PodLog
from test_app import Events, inside, log, logged, session, until
from test_incident import dead, fatal, start
from test_state import follower, full, give

from exporter import app as app_module
from exporter import state
from exporter.config import load
from exporter.diagnosis.exposure import Window
from exporter.follow import Follower, Known
from exporter.node.agent import NodeAgent
from exporter.state import FILE, KEPT_TARGET_SECONDS, Store, _share, _transaction
from exporter.streams import StreamState

__all__ = ["logged", "session"]  # fixtures

TABLES = ("target", "stream", "event", "exposure", "window", "incident")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the epoch, in the hands of the test."""
    now = [1_796_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


@pytest.fixture
def store(tmp_path: Path, clock: list[float]) -> Iterator[Store]:  # noqa: ARG001 - what is opened has its times
    """An open store in an empty folder."""
    opened = Store(tmp_path)
    opened.open()
    yield opened
    opened.close()


def named(name: str) -> Follower:
    """A target with something in every table."""
    one = full()
    one.status.name = name
    one.ledger.new_windows.append(("arrivals", Window(1.0, 0, 5.0, 2.0)))
    return one


def rows(store: Store, target: str) -> dict[str, int]:
    """How many rows each table has of a target."""
    column = {"target": "name"}
    db = store._open()
    return {
        table: db.execute(
            f"SELECT count(*) FROM {table} WHERE {column.get(table, 'target')} = ?",  # noqa: S608
            (target,),
        ).fetchone()[0]
        for table in TABLES
    }


class TestForget:
    """Targets that were not read for a week."""

    def test_everything_but_incidents(self, store: Store, clock: list[float]) -> None:
        """All that belongs to one goes, an instant after its time and not before; others stay whole."""
        store.save(named("prod/old-0/vllm"))
        clock[0] += 10
        store.save(named("prod/new-0/vllm"))
        before = rows(store, "prod/old-0/vllm")
        assert all(before.values()), before
        clock[0] += KEPT_TARGET_SECONDS - 10
        assert store.forget([]) == []
        clock[0] += 1
        assert store.forget([]) == ["prod/old-0/vllm"]
        assert rows(store, "prod/old-0/vllm") == {**dict.fromkeys(TABLES, 0), "incident": before["incident"]}
        assert rows(store, "prod/new-0/vllm") == before
        assert set(store.seen()) == {"prod/new-0/vllm"}

    def test_one_that_is_followed(self, store: Store, clock: list[float]) -> None:
        """A server that is silent for a month is still there."""
        store.save(named("prod/quiet-0/vllm"))
        clock[0] += 30 * 86_400
        assert store.forget(["prod/quiet-0/vllm"]) == []
        assert rows(store, "prod/quiet-0/vllm")["target"] == 1

    def test_it_comes_again(self, store: Store, clock: list[float]) -> None:
        """Under its old name it begins at zero, and its old incidents are still found by their address."""
        first = named("prod/old-0/vllm")
        store.save(first)
        (identity, *_) = first.known
        clock[0] += KEPT_TARGET_SECONDS + 1
        store.forget([])
        again = follower(store, "prod/old-0/vllm")
        assert again.checkpoint is None
        assert again.status.counts.incidents.total() == 0
        assert store.incident("prod/old-0/vllm", identity) is not None
        give(again, log(start(), fatal(100), dead(100)), 60)
        store.save(again)
        assert store.path.exists()
        assert store.moved_aside is None
        assert follower(store, "prod/old-0/vllm").status.counts == again.status.counts

    def test_a_few_at_a_time(self, store: Store, clock: list[float]) -> None:
        """Everyone waits for it, so it takes several looks."""
        for number in range(20):
            store.save(Follower(named(f"a/b-{number}/c").status, {}))
        clock[0] += KEPT_TARGET_SECONDS + 1
        assert [len(store.forget([])) for _ in range(3)] == [16, 4, 0]


class TestShare:
    """How much of the room each target may have."""

    @pytest.mark.parametrize(
        ("sizes", "share"),
        [
            ([], None), ([10], None), ([11], 10), ([5, 5], None), ([6, 5], 5), ([1, 100], 9), ([2, 3, 100], 5),
            ([4, 4, 4], 3), ([1] * 11, 1), ([1] * 10, None),
        ],
    )  # fmt: skip
    def test_share(self, sizes: list[int], share: int | None) -> None:
        """Small ones keep all they have, the large ones get the rest in equal parts."""
        assert _share(sizes, 10) == share

    @staticmethod
    def prune(store: Store) -> None:
        """As every so many saves do."""
        with _transaction(store._open()) as db:
            store._prune(db)

    def many(self, store: Store, name: str, count: int) -> None:
        """A target with that many incidents, events and streams."""
        one = Follower(follower(None, name).status, {})
        for number in range(count):
            one.known[f"i{number}"] = Known("lora", "serving", False)
            one.dirty[f"i{number}"] = {"id": f"i{number}"}
            one.new_events[f"e{number}"] = time.time()
        store.save(one)
        with _transaction(store._open()) as db:
            db.executemany(
                "INSERT INTO stream VALUES (?, ?, '', '', 0, NULL, 0, '[]', ?)",
                [(name, f"s{number}", time.time() + number) for number in range(count)],
            )

    def test_a_crash_loop(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """It loses its own oldest incidents, not those of others, however much older they are."""
        monkeypatch.setattr(state, "KEPT_INCIDENTS", 100)
        monkeypatch.setattr(state, "KEPT_STREAMS", 100)
        self.many(store, "prod/calm-0/vllm", 10)
        self.many(store, "prod/calm-1/vllm", 10)
        self.many(store, "prod/loop-0/vllm", 900)
        self.prune(store)
        for table in ("incident", "event", "stream"):
            assert [rows(store, f"prod/{one}/vllm")[table] for one in ("calm-0", "calm-1", "loop-0")] == [
                10,
                10,
                80,
            ]
        found, total = store.incidents("prod/loop-0/vllm", 0, 1)
        assert (found, total) == ([{"id": "i899"}], 80)

    def test_what_is_gone_is_one(
        self, store: Store, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pods that were forgotten share one part, so that hundreds of them leave room for what is there."""
        monkeypatch.setattr(state, "KEPT_INCIDENTS", 100)
        for number in range(50):
            self.many(store, f"prod/gone-{number}/vllm", 4)
        clock[0] += KEPT_TARGET_SECONDS + 1000
        while store.forget([]):
            pass
        self.many(store, "prod/llama-0/vllm", 60)
        self.prune(store)
        assert rows(store, "prod/llama-0/vllm")["incident"] == 50
        assert sum(rows(store, f"prod/gone-{number}/vllm")["incident"] for number in range(50)) == 50
        assert rows(store, "prod/gone-49/vllm")["incident"] == 4
        assert rows(store, "prod/gone-0/vllm")["incident"] == 0

    def test_streams_of_one_save(
        self, store: Store, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is read now was all seen with the same save, and none of it goes: it would be read again."""
        monkeypatch.setattr(state, "KEPT_STREAMS", 5)
        self.many(store, "prod/llama-0/vllm", 3)
        one = follower(None, "prod/llama-0/vllm")
        one._ended = {f"now-{number}": StreamState("x", "t") for number in range(8)}
        clock[0] += 100
        store.save(one)
        self.prune(store)
        names = {name for (name,) in store._open().execute("SELECT name FROM stream")}
        assert names == {f"now-{number}" for number in range(8)}


async def test_a_node_forgets(
    session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Once it knows which servers there are: none that is there but was silent for weeks, or is one too many."""
    monkeypatch.setattr(app_module, "_FORGET_SECONDS", 0.1)
    root = tmp_path / "pods"
    root.mkdir()
    gone = PodLog(root, "prod", "gone-0")
    for one in (gone, PodLog(root, "prod", "here-0"), PodLog(root, "prod", "here-1")):
        one.write(log(start(), fatal(100), dead(100)))
    config = load(
        None, {}, {"node": str(root), "listen": "127.0.0.1:0", "state_dir": str(tmp_path / "state")}
    )
    async with inside(session, config) as app:
        before = await app.reaches("vllm_oom_incidents_total", 3)
    gone.delete()
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as db:
        db.execute("UPDATE stream SET seen = ?", (time.time() - KEPT_TARGET_SECONDS - 60,))
        db.commit()
    monkeypatch.setattr(app_module, "NodeAgent", partial(NodeAgent, limit=1))
    async with inside(session, config) as app:

        async def dropped() -> bool:
            return any(one["event"].startswith("what was saved of targets that are gone") for one in logged())

        await until(dropped)
        after = await app.reaches("vllm_oom_incidents_total", 1)
        (followed,) = app.app._targets
        kept = {key: value for key, value in before.counters.items() if followed.split("/")[1] in key}
        assert {key: after[key] for key in kept} == kept
    assert [one["targets"] for one in logged() if "targets" in one and "dropped" in one["event"]] == [
        [gone.name]
    ]
