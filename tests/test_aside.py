"""A target that the exporter fails at, among others: they go on, and nothing of it stands still as if live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from podlogs import PodLog
from test_app import NOBODY, Events, Inside, Metrics, inside, log, logged, session, until
from test_incident import dead, fatal, later, start

from exporter.app import EXIT_CRASHED
from exporter.aside import PAUSES, PROVEN, Aside
from exporter.config import Config, TargetConfig, load
from exporter.follow import Follower
from exporter.state import StateError, Store
from exporter.status import TargetStatus, unready

__all__ = ["logged", "session"]  # fixtures

BAD, GOOD = "prod/bad-0/vllm", "prod/good-0/vllm"


class TestAside:
    """When one is begun anew, and what is shown until then."""

    config = TargetConfig("a", ("/var/log/a.log",), "", {"pod": "a"})

    def put(self, aside: Aside, now: float) -> float:
        """It failed."""
        return aside.put(self.config, TargetStatus("a", incidents=[{"id": "i"}]), "KeyError", now)

    def test_pauses(self) -> None:
        """They grow while it fails in a row, to an hour, and are short again once it ran for a while."""
        aside, now = Aside(), 0.0
        for pause in (*PAUSES, PAUSES[-1]):
            assert self.put(aside, now) == pause
            assert aside.due(now + pause - 0.1) == []
            now += pause
            assert aside.due(now) == [self.config]
            aside.begun(TargetStatus("a"), now)
            assert aside.due(now) == []
        assert self.put(aside, now + PROVEN - 1) == PAUSES[-1]
        aside.begun(TargetStatus("a"), now)
        assert self.put(aside, now + PROVEN) == PAUSES[0]

    def test_what_is_shown(self) -> None:
        """That it is not followed, why, and what is past; nothing that could be taken for now."""
        aside = Aside()
        self.put(aside, 0.0)
        self.put(aside, 0.0)
        shown = aside.targets["a"].status
        (source,) = shown.sources
        assert source.problem == (
            "the exporter failed at it (KeyError) and starts over in 5 s; its own log says more"
        )
        source.problem = None
        assert shown == TargetStatus(
            "a",
            {"pod": "a"},
            sources=shown.sources,
            incidents=[{"id": "i"}],
            followed=False,
            exporter_failures=2,
        )
        assert unready(shown) == "the exporter failed at it, and does not follow it now"
        again = TargetStatus("a")
        aside.begun(again, 1.0)
        assert (again.followed, again.exporter_failures) == (True, 2)

    def test_forgotten(self) -> None:
        """Another one of its name begins without a failure."""
        aside = Aside()
        self.put(aside, 0.0)
        aside.forget("a")
        assert aside.targets == {}
        assert self.put(aside, 0.0) == PAUSES[0]
        assert aside.targets["a"].status.exporter_failures == 1


# --- the application ------------------------------------------------------------------------


def of(metrics: Metrics, name: str) -> Metrics:
    """The samples of one target, without its labels."""
    pod = name.split("/")[1]
    labels = f'container="vllm",namespace="prod",pod="{pod}"'
    found = Metrics("")
    for key, value in metrics.items():
        if labels in key or f'pod="{pod}"' in key:
            plain = key
            for label in ('container="vllm"', 'namespace="prod"', f'pod="{pod}"'):
                plain = plain.replace(f"{label},", "").replace(f",{label}", "").replace(label, "")
            found[plain.replace("{}", "")] = value
    return found


class Two:
    """Two servers of a node with a failure each. ``broken``: whoever reads a new line of the bad one fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = True
        root = folder / "pods"
        root.mkdir()
        self.bad, self.good = PodLog(root, "prod", "bad-0"), PodLog(root, "prod", "good-0")
        for one in (self.bad, self.good):
            one.write(log(start(), fatal(100), dead(100)))
        self.config = load(
            None, {}, {"node": str(root), "listen": "127.0.0.1:0", "state_dir": str(folder / "state")}
        )
        take = Follower.take
        self.poison = b"poison"
        self.failed: list[Follower] = []
        self.next_turn: Callable[[], None] = lambda: None  # whatever runs right after it failed

        def takes(follower: Follower, source: str, chunk: Any, at: float) -> None:
            take(follower, source, chunk, at)
            if self.broken and self.poison in chunk.data and follower.status.name == BAD:
                follower.urgent = follower.stale = True  # whoever looks at it wants it saved
                self.failed.append(follower)
                asyncio.get_running_loop().call_soon(self.next_turn)
                raise RuntimeError(f"cannot take {chunk.data.decode()}")

        monkeypatch.setattr(Follower, "take", takes)

    async def both(self, one: Inside) -> Metrics:
        """Both have their first incident, and it is saved."""
        found = await one.reaches("vllm_oom_incidents_total", 2)
        assert one.app._store is not None
        for target in one.app._targets.values():
            one.app._store.save(target.follower)
        return found

    def break_one(self) -> None:
        """A line that can't be taken, and beside it a life of both that can."""
        self.bad.write(b"INFO 11-30 09:00:00 [x.py:1] poison\n" + log(start(), fatal(200), dead(200)))
        self.good.write(log(start(), fatal(200), dead(200)))


async def event(logged: Events, name: str, times: int = 1) -> dict[str, Any]:
    """The event, as soon as it was logged that often."""

    async def there() -> list[dict[str, Any]]:
        return [one for one in logged() if one["event"] == name][times - 1 : times]

    return (await until(there))[0]


FAILURES = "vllm_oom_exporter_failures_total"
CRASHED = "a target crashed and is not followed; the others are"


class TestApplication:
    """One of two targets of a node fails."""

    @pytest.fixture(autouse=True)
    def _pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("exporter.aside.PAUSES", (0.3, 3600.0))

    async def test_the_others_go_on(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        """It is said, counted and shown; none of its numbers is; and the other one is followed as before."""
        two = Two(tmp_path, monkeypatch)
        async with inside(session, two.config) as one:
            before = await two.both(one)
            assert of(before, BAD)["vllm_oom_target_followed"] == 1
            two.break_one()
            assert (await event(logged, CRASHED, 2))["target"] == BAD

            async def counted() -> Metrics | None:
                found = await one.metrics()
                return found if of(found, GOOD).sum("vllm_oom_incidents_total") == 2 else None

            metrics = await until(counted)
            assert metrics is not None
            assert of(metrics, BAD) == {"vllm_oom_target_followed": 0, FAILURES: 2}
            assert of(metrics, GOOD)["vllm_oom_target_followed"] == 1
            assert of(metrics, GOOD)[FAILURES] == 0
            shown = json.loads(await one.get(f"/api/v1/targets/{BAD}"))
            assert shown["engine_state"] == "unknown"
            assert "the exporter failed at it (RuntimeError)" in shown["sources"][0]["problem"]
            assert "the exporter failed at it (RuntimeError)" in await one.get("/")
            assert "poison" not in await one.get("/")
            assert [incident["target"] for incident in await one.incidents()].count(BAD) == 1
            assert await one.get("/-/healthy")
            assert await one.get("/-/ready")
            assert not one.task.done()
        said = [entry for entry in logged() if entry["level"] == "error"]
        assert [(entry["event"], entry["again_in_seconds"]) for entry in said] == [
            (CRASHED, 0.3),
            (CRASHED, 3600.0),
        ]
        assert "RuntimeError" in said[0]["exception"]

    @pytest.mark.parametrize("where", ["take", "tick", "save", "scrape"])
    async def test_it_goes_on_from_what_was_saved(
        self, where: str, session: aiohttp.ClientSession, tmp_path: Path, logged: Events,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Wherever it fails; once it can, everything is counted, once."""
        two = Two(tmp_path, monkeypatch)
        async with inside(session, two.config) as one:
            before = await two.both(one)
            if where != "take":
                two.poison = b"never"
                bad = one.app._targets[BAD]

                def fail(*_: object, **__: object) -> None:
                    if two.broken:
                        raise RuntimeError(where)

                if where == "save":
                    save = Store.save

                    def saves(store: Store, follower: Follower) -> None:
                        if follower is bad.follower:
                            fail()
                        save(store, follower)

                    monkeypatch.setattr(Store, "save", saves)
                elif where == "scrape":
                    monkeypatch.setattr(bad._scraper, "_tell", fail)
                    bad.point_to("http://127.0.0.1:9")
                else:
                    monkeypatch.setattr(bad.follower, "tick", fail)
            two.break_one()
            await event(logged, CRASHED)
            two.broken = False
            await event(logged, "a target is followed again")
            metrics = await one.reaches("vllm_oom_incidents_total", 4)
            found, good = of(metrics, BAD), of(metrics, GOOD)
            assert found["vllm_oom_target_followed"] == 1
            assert found[FAILURES] == 1
            assert found.sum("vllm_oom_incidents_total") == 2
            counters = {key: value for key, value in found.counters.items() if "_oom_log_" not in key}
            assert counters == {
                key: value + (key == FAILURES) for key, value in good.counters.items() if key in counters
            }
            assert {key: metrics[key] for key, value in before.counters.items() if metrics[key] < value} == {}

            async def all_read() -> bool:
                now = of(await one.metrics(), BAD)
                return now.sum("vllm_oom_log_read_bytes_total") == len(two.bad.text)

            await until(all_read)

    async def test_half_of_something_is_not_saved(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        """What was in memory when it failed is never written, not at the end either."""
        two = Two(tmp_path, monkeypatch)
        saved: list[Follower] = []
        save = Store.save

        def saves(store: Store, follower: Follower) -> None:
            saved.append(follower)
            assert follower not in two.failed
            save(store, follower)

        async with inside(session, two.config) as one:
            await two.both(one)
            monkeypatch.setattr(Store, "save", saves)
            left: list[bool] = []
            two.next_turn = lambda: left.append(BAD in one.app._targets)
            two.break_one()
            await event(logged, CRASHED, 2)
        assert len(two.failed) == 2
        assert left == [False, False]
        assert {one.status.name for one in saved} >= {GOOD}
        assert [entry["error"][:12] for entry in logged() if "error" in entry] == ["RuntimeError"] * 2

    async def test_a_reload_begins_it_anew(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        """At once, however long it would have waited."""
        two = Two(tmp_path, monkeypatch)
        async with inside(session, two.config) as one:
            await two.both(one)
            two.break_one()
            await event(logged, CRASHED, 2)
            two.broken = False
            assert await one.app.reload() is None
            metrics = await one.reaches("vllm_oom_incidents_total", 4)
            assert of(metrics, BAD)["vllm_oom_target_followed"] == 1
            assert of(metrics, BAD)[FAILURES] == 2

    async def test_a_state_that_cannot_be_read(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        """It is not begun from zero, which would count all of it again."""
        two = Two(tmp_path, monkeypatch)
        loads = Store.load

        def fails(store: Store, follower: Follower) -> None:
            if two.broken and follower.status.name == BAD:
                raise StateError("disk I/O error")
            loads(store, follower)

        async with inside(session, two.config) as one:
            await two.both(one)
            monkeypatch.setattr(Store, "load", fails)
            two.break_one()
            assert (await event(logged, CRASHED, 2))["error"] == "StateError: disk I/O error"
            two.broken = False
            assert await one.app.reload() is None
            metrics = await one.reaches("vllm_oom_incidents_total", 4)
            assert of(metrics, BAD).sum("vllm_oom_incidents_total") == 2

    async def test_its_pod_goes(
        self, session: aiohttp.ClientSession, tmp_path: Path, logged: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        """A target that is set aside ends like any other."""
        monkeypatch.setattr("exporter.node.agent.GRACE", 0.0)
        monkeypatch.setattr("exporter.node.agent.SCAN_SECONDS", 0.1)
        two = Two(tmp_path, monkeypatch)
        async with inside(session, two.config) as one:
            await two.both(one)
            two.break_one()
            await event(logged, CRASHED, 2)
            two.bad.delete()
            await event(logged, "a container is no longer followed")
            assert [target.name for target in one.app.status.targets] == [GOOD]
            assert not one.task.done()

    def configured(self, folder: Path, names: str) -> Config:
        """Targets of a configuration file."""
        path = folder / "config.yaml"
        targets = [{"name": n, "log": [f"{folder}/{n}.log"], "vllm_url": NOBODY} for n in names]
        path.write_text(json.dumps({"targets": targets}))
        return load(path, {}, {"listen": "127.0.0.1:0", "state_dir": str(folder / "state")})

    @pytest.mark.parametrize(("names", "ends"), [("ab", False), ("a", True)])
    async def test_configured_targets(
        self, names: str, ends: bool, session: aiohttp.ClientSession, tmp_path: Path, logged: Events
    ) -> None:  # fmt: skip
        """So it is with several targets of a configuration; a single one still takes the process down."""
        for name in names:
            (tmp_path / f"{name}.log").write_bytes(log(start(), fatal(100), dead(100)))
        async with inside(session, self.configured(tmp_path, names)) as one:
            await one.reaches("vllm_oom_incidents_total", len(names))

            def fail() -> None:
                raise RuntimeError("of our own making")

            one.app._targets["a"].follower.tick = fail  # type: ignore[method-assign]
            with (tmp_path / "a.log").open("ab") as out:
                out.write(log(later(200)))
            if ends:
                assert await one.ended() == EXIT_CRASHED
            else:
                await event(logged, "a target is followed again")
                await one.reaches("vllm_oom_incidents_total", 2)
