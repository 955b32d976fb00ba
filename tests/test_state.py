from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, LATEST, capture
from test_incident import dead, fatal, start, warning

from exporter import state
from exporter.diagnosis.knowledge import builtin_classes
from exporter.follow import KNOWN, Checkpoint, Follower, Known
from exporter.sources.stream import Chunk, SourceStats
from exporter.state import FILE, KEPT_INCIDENTS, KEPT_SECONDS, SCHEMA, StateError, Store
from exporter.status import LastIncident, TargetStatus
from exporter.streams import StreamState

CLASSES = builtin_classes()
NAME = "vllm"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An open store in an empty folder."""
    opened = Store(tmp_path)
    opened.open()
    yield opened
    opened.close()


def follower(store: Store | None = None, name: str = NAME) -> Follower:
    """A follower, with what ``store`` has of its target."""
    new = Follower(TargetStatus(name), CLASSES, lambda: LATEST)
    if store is not None:
        store.load(new)
    return new


def give(one: Follower, data: bytes, ticks: int = 0, stream: str = "s") -> None:
    """The whole of a stream in one chunk, and then silence."""
    one.take("/var/log/vllm.log", Chunk(stream, data, f"behind {len(data)}"), 1.5)
    for _ in range(ticks):
        one.tick()


def log(*parts: list[str]) -> bytes:
    """Lines of a log."""
    return "".join(line + "\n" for part in parts for line in part).encode()


def full() -> Follower:
    """A follower that has something of everything that is saved."""
    one = follower()
    give(one, capture("mlp_eager_16384"), 60)
    give(one, log(start(), warning(100), start(200, 4096), fatal(300)), 2, "t")
    status = one.status
    status.counts.incidents["unknown", "startup"] += 3
    status.counts.near_misses += 7
    status.counts.truncated["-"] += 2
    status.counts.fingerprints["without_warn"] += 1
    status.counts.lines["-", "unparsed"] += 11
    status.last["lora"] = LastIncident(12.5, None, 0, 3, None, 0.118, 0.25)
    status.setting_changed["max_num_seqs"] = 1234.5
    status.recommended_budget = 4096
    return one


def shown(status: TargetStatus) -> dict[str, Any]:
    """All of a status that outlives the exporter."""
    return {
        "counts": status.counts,
        "last": status.last,
        "setting_changed": status.setting_changed,
        "engines": status.engines,
        "recommended_budget": status.recommended_budget,
        "last_line_timestamp": status.last_line_timestamp,
        "incidents": status.incidents,
    }


def known(one: Follower) -> list[tuple[str, str, str, bool, frozenset[tuple[str, int]]]]:
    """Known incidents in their order, without what need not outlive the exporter."""
    return [(i, k.class_id, k.phase, k.fatal, k.reports) for i, k in one.known.items()]


def asides(folder: Path) -> list[Path]:
    """What was moved aside."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(".aside"))


def dumped(path: Path) -> list[str]:
    """The content of a state file as statements."""
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def saved(folder: Path, one: Follower | None = None) -> Path:
    """A closed state file of a follower that has seen something."""
    new = Store(folder)
    new.open()
    new.save(one or full())
    new.close()
    return folder / FILE


class TestRoundTrip:
    """What was saved is there again."""

    def test_everything(self, store: Store) -> None:
        """Counters, last incidents, settings, lives, documents, known incidents and events come back equal."""
        before = full()
        assert before.status.counts.incidents["prefill_budget", "serving"] == 1
        assert (len(before.status.incidents), len(before.status.engines)) == (1, 3)
        store.save(before)
        after = follower(store)
        assert shown(after.status) == shown(before.status)
        assert known(after) == known(before)
        assert list(after.events) == list(before.events)
        assert after.events == before.events

    def test_counters_of_sources(self, store: Store) -> None:
        """Read errors and rotations go on from where they were; another source begins at zero."""
        before = full()
        rotations = {"rename": 3, "truncate": 2, "reopen": 1}
        before.status.sources = [SourceStats("x", read_errors=7, rotations=rotations)]
        store.save(before)
        after = follower()
        after.status.sources = [SourceStats("x", read_errors=1), SourceStats("y")]
        store.load(after)
        after.count_read()
        counts = after.status.counts
        assert (counts.read_errors["x"], counts.read_errors["y"]) == (8, 0)
        assert [counts.rotations["x", kind] for kind in rotations] == [3, 2, 1]
        assert [counts.rotations["y", kind] for kind in rotations] == [0, 0, 0]

    def test_where_to_go_on(self, store: Store) -> None:
        """Every stream comes back with its token, its parser, its lines and what was counted of them."""
        before = follower()
        give(before, log(start()), 60)
        assert before.checkpoint is not None
        give(before, log(start(), fatal(100)), 0, "t")
        store.save(before)
        after = follower(store)
        assert after.checkpoint is not None
        assert after.checkpoint.history == before.checkpoint.history
        first, second = after.checkpoint.streams["s"], after.checkpoint.streams["t"]
        assert (first.source, first.token, first.lines, first.counted_lines) == (
            "/var/log/vllm.log", f"behind {len(log(start()))}", 5, 5,
        )  # fmt: skip
        parser = before.checkpoint.streams["s"].parser
        assert first.parser == json.loads(json.dumps(parser))  # lists for tuples
        assert (second.token, second.lines, second.parser, second.counted_lines) == ("", 0, None, 10)
        assert (first.errors, second.errors) == (set(), {10})

    def test_lives(self, store: Store) -> None:
        """The current life and the one before come back with their settings, and count no second time."""
        before = follower()
        give(before, log(start(), fatal(100), dead(100)), 20)
        give(before, log(start(200, 4096)), 60)
        store.save(before)
        after = follower(store)
        assert after.status.counts.engine_starts == 2
        assert (after.status.life, after.status.previous) == (before.status.life, before.status.previous)
        assert after.status.engine_start_timestamp == datetime(2026, 11, 2, 10, 3, 20).timestamp()
        assert after.status.setting_changed == before.status.setting_changed != {}

    def test_nothing_saved(self, store: Store) -> None:
        """A target that the file does not know begins at nothing."""
        store.save(full())
        other = follower(store, "other")
        assert (shown(other.status), other.known, other.checkpoint) == (shown(TargetStatus("o")), {}, None)

    def test_targets_are_apart(self, store: Store) -> None:
        """Two targets with equal logs share nothing, not even equal incidents."""
        for name, times in (("a", 1), ("b", 2)):
            one = follower(store, name)
            give(one, log(start(), fatal(100), dead(100)), 20)
            one.status.counts.near_misses = times
            store.save(one)
        a, b = follower(store, "a"), follower(store, "b")
        assert (a.status.counts.near_misses, b.status.counts.near_misses) == (1, 2)
        assert list(a.known) == list(b.known) != []
        (identity,) = a.known
        assert store.incident("a", identity) is not None
        assert store.incident("c", identity) is None

    def test_order(self, store: Store) -> None:
        """Incidents that were saved at once come back in the order they were seen, the newest first."""
        one = follower()
        for number in range(40):
            one.known[f"{number * 7919 % 40:03}"] = Known("lora", "serving", False)
            one.dirty[f"{number * 7919 % 40:03}"] = {"id": f"{number * 7919 % 40:03}"}
        one.new_events = {f"{number * 7919 % 40:03}": 2e9 for number in range(40)}
        store.save(one)
        after = follower(store)
        order = [f"{number * 7919 % 40:03}" for number in range(40)]
        assert list(after.known) == order
        assert list(after.events) == order
        assert [one["id"] for one in after.status.incidents] == order[::-1]

    def test_an_incident_grows(self, store: Store) -> None:
        """A later save of an incident turns it fatal and renews its document, and keeps its class and place."""
        one = follower()
        for identity in ("a", "b"):
            one.known[identity] = Known("lora", "serving", False, frozenset({("s", 1)}))
            one.dirty[identity] = {"id": identity, "fatal": False}
        store.save(one)
        one.known["a"] = Known("lora", "serving", True, frozenset({("s", 1), ("s", 9)}))
        one.dirty["a"] = {"id": "a", "fatal": True}
        store.save(one)
        after = follower(store)
        assert known(after) == [
            ("a", "lora", "serving", True, frozenset({("s", 1), ("s", 9)})),
            ("b", "lora", "serving", False, frozenset({("s", 1)})),
        ]
        assert store.incident(NAME, "a") == {"id": "a", "fatal": True}

    def test_half_a_surrogate_pair(self, store: Store) -> None:
        """Text that a JSON log can hold and SQLite cannot is kept all the same."""
        one = follower()
        one.known["a"] = Known("lora", "serving", False)
        one.dirty["a"] = {"id": "a", "model": "x\ud800", "umlaut": "ü"}
        store.save(one)
        assert store.incident(NAME, "a") == {"id": "a", "model": "x\ud800", "umlaut": "ü"}

    def test_a_name_that_is_not_text(self, store: Store) -> None:
        """A file name that is no Unicode does not end the exporter: it goes on in memory."""
        one = follower()
        one.take(os.fsdecode(b"/var/\xff.log"), Chunk("s", b"a\n", "2"), 0.0)
        with pytest.raises(StateError, match="surrogates"):
            store.save(one)
        assert one.stale


class TestMovedAside:
    """A file that can't be used is kept as it is, and a new one begun."""

    @staticmethod
    def reopened(folder: Path) -> Store:
        """A store that had to begin anew, and works."""
        new = Store(folder)
        new.open()
        assert new.moved_aside is not None
        assert asides(folder) == [new.moved_aside]
        assert follower(new).known == {}
        new.save(full())
        assert len(follower(new).known) == 1
        new.close()
        return new

    @pytest.mark.parametrize("size", [2, 15, 16, 100, 4096, 100_000])
    def test_random_bytes(self, tmp_path: Path, size: int) -> None:
        """A file of anything, of any size, is moved aside with all its bytes."""
        data = random.Random(size).randbytes(size)  # noqa: S311 - repeatable
        (tmp_path / FILE).write_bytes(data)
        new = self.reopened(tmp_path)
        assert new.moved_aside is not None
        assert (new.why_moved, new.moved_aside.read_bytes()) == ("it is corrupt", data)

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
    def test_truncated(self, tmp_path: Path, share: float) -> None:
        """A state file that lost its end is moved aside with all the bytes it has."""
        path = saved(tmp_path)
        data = path.read_bytes()[: int(path.stat().st_size * share)]
        path.write_bytes(data)
        new = self.reopened(tmp_path)
        assert new.moved_aside is not None
        assert (new.why_moved, new.moved_aside.read_bytes()) == ("it is corrupt", data)

    def test_foreign(self, tmp_path: Path) -> None:
        """The database of another program is not written to."""
        with closing(sqlite3.connect(tmp_path / FILE)) as db:
            db.executescript("CREATE TABLE target (name TEXT); INSERT INTO target VALUES ('theirs');")
        data = (tmp_path / FILE).read_bytes()
        new = self.reopened(tmp_path)
        assert new.moved_aside is not None
        assert new.moved_aside.read_bytes() == data
        assert new.why_moved == "it belongs to another program"

    def test_newer(self, tmp_path: Path) -> None:
        """The file of a newer version is kept for that version."""
        path = saved(tmp_path)
        with closing(sqlite3.connect(path)) as db:
            db.execute(f"PRAGMA user_version = {state.SCHEMA + 1}")
            db.execute("ALTER TABLE target ADD COLUMN more TEXT")
            db.commit()
        before = dumped(path)
        new = self.reopened(tmp_path)
        assert new.moved_aside is not None
        assert dumped(new.moved_aside) == before
        assert f"newer version (schema {SCHEMA + 1}, this one knows {SCHEMA})" in new.why_moved

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE target SET counts = '['",
            "UPDATE target SET counts = '[]'",
            "UPDATE target SET counts = 'null'",
            """UPDATE target SET counts = json_set(counts, '$.read_bytes', json('{"a": "many"}'))""",
            "UPDATE target SET counts = json_set(counts, '$.near_misses', 'many')",
            "UPDATE target SET counts = json_remove(counts, '$.fatal')",
            "UPDATE target SET counts = json_set(counts, '$.incidents', 5)",
            "UPDATE target SET counts = json_set(counts, '$.lines', json('[[1]]'))",
            "UPDATE target SET counts = x'ff'",
            "UPDATE target SET last = '[1]'",
            """UPDATE target SET last = '{"lora": {"when": 1}}'""",
            "UPDATE target SET rest = '{}'",
            "UPDATE target SET rest = '3'",
            "UPDATE target SET rest = json_set(rest, '$.setting_changed', 5)",
            "UPDATE target SET history = '[5]'",
            "UPDATE target SET history = json_remove(history, '$.lives')",
            "UPDATE target SET history = json_set(history, '$.lives[0].started', 'soon')",
            "UPDATE target SET history = json_set(history, '$.lives[0].unheard', 1)",
            "UPDATE stream SET errors = 'x'",
            "UPDATE stream SET errors = '7'",
            "UPDATE stream SET parser = '{}'",
            "UPDATE stream SET parser = '[1]'",
            "UPDATE stream SET parser = json_set(parser, '$.now', 'soon')",
            "UPDATE incident SET reports = '{'",
            "UPDATE incident SET reports = '[[1]]'",
            "UPDATE incident SET document = '9'",
            "UPDATE incident SET document = '" + "[" * 100_000 + "'",
            "DROP TABLE event",
            "ALTER TABLE stream RENAME COLUMN token TO place",
        ],
    )
    def test_rows_that_say_something_else(self, tmp_path: Path, change: str) -> None:
        """A sound database with rows that nobody can use is found out at the start, not in operation."""
        one = full()
        one.checkpoint = Checkpoint({}, one._history.snapshot())
        give(one, log(start()), 60, "u")
        one.checkpoint.streams["s"] = StreamState("x", "t", 3, one._streams["s"].parser.snapshot(), 3)
        path = saved(tmp_path, one)
        with closing(sqlite3.connect(path)) as db:
            db.execute(change)
            db.commit()
        before = dumped(path)
        new = self.reopened(tmp_path)
        assert new.moved_aside is not None
        assert new.why_moved == "it is corrupt"
        assert dumped(new.moved_aside) == before

    @pytest.mark.parametrize("seed", range(2))
    def test_flipped_bytes(self, tmp_path: Path, seed: int) -> None:
        """Whatever byte of it a disk gets wrong, the exporter starts, follows and saves."""
        chance = random.Random(seed)  # noqa: S311 - repeatable
        data = saved(tmp_path).read_bytes()
        for number in range(20):
            broken = bytearray(data)
            for _ in range(chance.choice([1, 1, 20])):
                # half of them at the front, where the structure is
                broken[chance.randrange(chance.choice([200, len(data)]))] = chance.randrange(256)
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / FILE).write_bytes(broken)
            new = Store(folder)
            new.open()
            one = follower(new)
            give(one, log(start(), fatal(100), dead(100)), 60)
            new.save(one)
            new.close()
            if new.moved_aside is not None:
                assert new.moved_aside.stat().st_size >= len(data)

    def test_together_with_its_log(self, tmp_path: Path) -> None:
        """What SQLite had not yet copied into the file is moved aside with it."""
        (tmp_path / FILE).write_bytes(b"not a database" * 500)
        (tmp_path / f"{FILE}-wal").write_bytes(b"its log")
        new = Store(tmp_path)
        new.open()
        assert new.moved_aside is not None
        beside = new.moved_aside.with_name(new.moved_aside.name + "-wal")
        assert (new.moved_aside.read_bytes(), beside.read_bytes()) == (b"not a database" * 500, b"its log")
        new.close()

    def test_again_and_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files that are moved aside within one second do not replace each other."""
        monkeypatch.setattr("time.strftime", lambda *_: "20261130T200000")
        for number in range(3):
            (tmp_path / FILE).write_text(f"broken {number}")
            new = Store(tmp_path)
            new.open()
            new.close()
        assert sorted(path.read_text() for path in asides(tmp_path)) == ["broken 0", "broken 1", "broken 2"]

    def test_an_empty_file_is_none(self, tmp_path: Path) -> None:
        """An empty file is used as it is."""
        (tmp_path / FILE).touch()
        new = Store(tmp_path)
        new.open()
        assert (new.moved_aside, asides(tmp_path)) == (None, [])
        new.close()

    def test_not_while_it_is_in_use(self, tmp_path: Path) -> None:
        """A file that another process has locked is not taken for a broken one."""
        path = saved(tmp_path)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            new = Store(tmp_path)
            with pytest.raises(StateError, match="locked"):
                new.open()
        assert (new.moved_aside, asides(tmp_path)) == (None, [])

    def test_what_could_not_be_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counters that could not be read at the start are not overwritten when writing works again."""
        path = saved(tmp_path)
        before = dumped(path)
        new = Store(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(new, "_checked", _raises(OSError(5, "Input/output error")))
            with pytest.raises(StateError):
                new.open()
            with pytest.raises(StateError):
                new.load(one := follower())
        give(one, log(start(), fatal(100), dead(100)), 20)
        new.save(one)
        assert new.moved_aside is not None
        assert dumped(new.moved_aside) == before
        assert new.why_moved == "it could not be read when the exporter started"
        new.save(one)
        assert len(follower(new).known) == 1
        new.close()
        assert asides(tmp_path) == [new.moved_aside]


def _raises(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


@contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, whom no folder refuses."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


class TestCannotWrite:
    """The exporter goes on in memory, and everything is saved when it can be."""

    def test_a_file_where_the_folder_should_be(self, tmp_path: Path) -> None:
        """A path that is a file is one line that names it."""
        (tmp_path / "state").write_text("in the way")
        with pytest.raises(StateError) as error:
            Store(tmp_path / "state").open()
        assert str(error.value) == f"{tmp_path / 'state'}: File exists"
        assert (tmp_path / "state").read_text() == "in the way"

    def test_unwritable(self, tmp_path: Path) -> None:
        """A folder that may not be written to is one line that names it."""
        folder = tmp_path / "state"
        folder.mkdir()
        folder.chmod(0o500)
        with nobody(), pytest.raises(StateError) as error:
            Store(folder).open()
        assert str(error.value).startswith(f"{folder}: ")
        assert "\n" not in str(error.value)
        folder.chmod(0o700)
        assert list(folder.iterdir()) == []

    def test_a_folder_in_place_of_the_file(self, tmp_path: Path) -> None:
        """A folder with the name of the file is one line too."""
        (tmp_path / FILE).mkdir()
        with pytest.raises(StateError, match=r"I/O error|unable to open"):
            Store(tmp_path).open()

    def test_not_open(self, tmp_path: Path) -> None:
        """Without a file nothing can be loaded, and no incident found."""
        new = Store(tmp_path)
        assert not new.is_open
        with pytest.raises(StateError, match="not open"):
            new.load(follower())
        assert new.incident(NAME, "a") is None

    def test_folders_are_made(self, tmp_path: Path) -> None:
        """The folder need not exist."""
        new = Store(tmp_path / "a" / "b")
        new.open()
        assert (tmp_path / "a" / "b" / FILE).exists()
        new.close()

    def test_full_disk(self, store: Store, tmp_path: Path) -> None:
        """A save that does not fit changes nothing; the next one writes all that was new, and continues."""
        first = follower()
        give(first, log(start()), 60)
        store.save(first)
        before = dumped(tmp_path / FILE)
        assert store._db is not None
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        for number in range(3):
            give(
                first, log(start(200 + number * 100), fatal(300 + number * 100), dead(300 + number * 100)), 30
            )
            with pytest.raises(StateError) as error:
                store.save(first)
            assert str(error.value) == f"{tmp_path / FILE}: database or disk is full"
            assert dumped(tmp_path / FILE) == before
            assert (len(first.dirty), first.urgent) == (number + 1, True)
        store._db.execute("PRAGMA max_page_count = 1000000")
        store.save(first)
        assert (first.dirty, first.new_events, first.urgent) == ({}, {}, False)
        after = follower(store)
        assert shown(after.status) == shown(first.status)
        assert (known(after), after.events) == (known(first), first.events)
        assert after.status.counts.incidents.total() == 3

    def test_full_disk_at_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that could not be begun is begun with the first save that works."""
        new, one = Store(tmp_path), follower()
        give(one, log(start(), fatal(100), dead(100)), 20)
        with monkeypatch.context() as patch:
            patch.setattr(state, "_TABLES", "PRAGMA max_page_count = 3;" + state._TABLES)
            for attempt in (new.open, lambda: new.save(one), lambda: new.save(one)):
                with pytest.raises(StateError, match="full"):
                    attempt()
                assert not new.is_open
        new.save(one)
        assert known(follower(new)) == known(one) != []
        new.close()
        assert asides(tmp_path) == []

    def test_file_size_limit(self, tmp_path: Path) -> None:
        """Where the system refuses to let the file grow, a process goes on and saves it all later."""
        script = f"""
            import resource, sys
            sys.path.insert(0, {str(HERE)!r})
            from pathlib import Path
            from test_state import *
            store = Store(Path({str(tmp_path)!r}))
            store.open()
            one = full()
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
            for number in range(30):
                one.known[str(number)] = Known("lora", "serving", False)
                one.dirty[str(number)] = {{"text": "x" * 4000}}
            try:
                store.save(one)
            except StateError as error:
                print(str(error).count("\\n"), len(one.dirty))
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            store.save(one)
            print(len(follower(store).known))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["0", "31", "31"]


class TestBounds:
    """The file does not grow for ever; counters are not made of what it keeps."""

    @staticmethod
    def many(one: Follower, first: int, count: int) -> None:
        """Incidents and events as if they had been seen."""
        for number in range(first, first + count):
            one.known[f"i{number}"] = Known("lora", "serving", False, frozenset({("s", number)}))
            one.dirty[f"i{number}"] = {"id": f"i{number}"}
            one.new_events[f"e{number}"] = 1.0 * number
            one.status.counts.incidents["lora", "serving"] += 1

    @staticmethod
    def prune(store: Store) -> None:
        """As a save does from time to time."""
        assert store._db is not None
        with state._transaction(store._db) as db:
            store._prune(db)

    def test_number(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The newest 10,000 incidents and events stay, also if all came with one save; counters stay whole."""
        monkeypatch.setattr(state, "KEPT_SECONDS", 10**10)
        one = follower()
        self.many(one, 0, KEPT_INCIDENTS + 500)
        store.save(one)  # the first save prunes
        after = follower(store)
        last = range(KEPT_INCIDENTS + 500 - KNOWN, KEPT_INCIDENTS + 500)
        assert list(after.known) == [f"i{number}" for number in last]
        assert list(after.events) == [f"e{number}" for number in last]
        assert store.incident(NAME, "i499") is None
        assert store.incident(NAME, "i500") is not None
        assert after.status.counts.incidents["lora", "serving"] == KEPT_INCIDENTS + 500
        assert [one["id"] for one in after.status.incidents][::199] == ["i10499", "i10300"]

    def test_load_is_bounded(self, store: Store) -> None:
        """What was not pruned yet is not all read into memory."""
        store.save(one := follower())
        self.many(one, 0, KEPT_INCIDENTS + 500)
        store.save(one)
        after = follower(store)
        assert (len(after.known), len(after.events)) == (KNOWN, KNOWN)
        assert list(after.known)[-1] == f"i{KEPT_INCIDENTS + 499}"

    def test_age(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is older than 400 days goes, on the day after and not before; counters stay whole."""
        clock = [1_800_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        one = follower()
        give(one, log(start(), fatal(100), dead(100)), 60)
        one.new_events = dict.fromkeys(one.new_events, clock[0])
        store.save(one)
        clock[0] += KEPT_SECONDS
        self.prune(store)
        assert len(follower(store).known) == 1
        clock[0] += 1
        self.prune(store)
        after = follower(store)
        assert (after.known, after.status.incidents) == ({}, [])
        # the life is in the checkpoint, so it stays known
        assert {one.partition(":")[0] for one in after.events} == {"life", "fingerprint"}
        assert (after.status.counts.incidents.total(), after.status.counts.engine_starts) == (1, 1)
        assert after.checkpoint is not None
        assert after.checkpoint.streams == {}

    def test_a_life_outlives_its_event(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that runs longer than events are kept does not count as another start."""
        clock = [1_800_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        one = follower()
        give(one, log(start()), 60)
        one.new_events = dict.fromkeys(one.new_events, clock[0])
        store.save(one)
        clock[0] += KEPT_SECONDS + 1
        self.prune(store)
        after = follower(store)
        give(after, log(warning(200)), 60)
        assert after.status.counts.engine_starts == 1

    def test_streams(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of streams that are no longer read the newest stay, and all that are read."""
        monkeypatch.setattr(state, "KEPT_STREAMS", 1000)
        clock = [1_800_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        for name in range(1100):
            one = follower()
            one.take("x", Chunk(f"s{name}", b"a\n", "2"), 0.0)
            clock[0] += 1
            if name == 1099:
                for other in range(5):
                    one.take("x", Chunk(f"t{other}", b"a\n", "2"), 0.0)
            assert store._db is not None
            with state._transaction(store._db) as db:
                store._write(db, one)
        self.prune(store)
        after = follower(store)
        assert after.checkpoint is not None
        names = set(after.checkpoint.streams)
        assert {f"t{other}" for other in range(5)} <= names
        assert "s1099" in names
        assert "s0" not in names
        assert len(names) == 1000

    def test_now_and_then(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pruning happens by itself, with the first save and with every 256th behind it."""
        times: list[int] = []
        monkeypatch.setattr(Store, "_prune", lambda *_: times.append(store._saves))
        one = follower()
        for _ in range(600):
            store.save(one)
        assert times == [1, 257, 513]


class TestKill:
    """A kill at any moment leaves what was true at some moment."""

    SCRIPT = """
        import os, sys
        sys.path.insert(0, {tests!r})
        from pathlib import Path
        from test_state import *
        store = Store(Path({folder!r}))
        store.open()
        one = follower(store)
        give(one, log(start()), 60)
        store.save(one)
        print(shown(one.status), known(one), sorted(one.events), flush=True)
        give(one, log(start(), fatal(100), dead(100)), 60, "t")
        class Killed(dict):
            def items(self):
                os._exit(9)
        {how}
        print("not killed", flush=True)
    """

    @pytest.mark.parametrize(
        "how",
        [
            "one.new_events = Killed(); store.save(one)",  # everything but the events is written
            "store._prune = lambda db: os._exit(9); store._saves = 0; store.save(one)",
            "store._db.set_trace_callback(lambda sql: os._exit(9) if sql == 'COMMIT' else None); store.save(one)",
        ],
        ids=["writing", "pruning", "committing"],
    )
    def test_before_the_commit(self, tmp_path: Path, how: str) -> None:
        """A process that dies between BEGIN and COMMIT leaves the state before, whole."""
        script = self.SCRIPT.format(tests=str(HERE), folder=str(tmp_path), how=how)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (9, "")
        new = Store(tmp_path)
        new.open()
        after = follower(new)
        assert new.moved_aside is None
        assert f"{shown(after.status)} {known(after)} {sorted(after.events)}\n" == done.stdout
        assert (after.status.counts.engine_starts, after.status.counts.incidents.total()) == (1, 0)
        new.close()

    def test_behind_the_commit(self, tmp_path: Path) -> None:
        """What was committed is there, though the process closed nothing."""
        script = self.SCRIPT.format(
            tests=str(HERE),
            folder=str(tmp_path),
            how="store.save(one); print(shown(one.status)); os._exit(9)",
        )
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 9
        new = Store(tmp_path)
        new.open()
        assert len(follower(new).known) == 1
        new.close()

    def test_in_the_middle_of_moving_aside(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kill while a file is moved aside leaves all its bytes, and the next start goes on."""
        (tmp_path / FILE).write_bytes(b"not a database" * 500)
        (tmp_path / f"{FILE}-wal").write_bytes(b"its log")
        rename = Path.rename

        def once(path: Path, target: Path) -> Path:
            rename(path, target)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "rename", once)
            Store(tmp_path).open()
        new = Store(tmp_path)
        new.open()
        new.close()
        kept = {path.read_bytes() for path in tmp_path.iterdir() if ".aside" in path.name}
        assert kept >= {b"not a database" * 500, b"its log"}


class TestMigration:
    """A file of an older version is brought up, step by step."""

    def old(self, folder: Path) -> Path:
        """A file of this version, which a later one would find."""
        path = saved(folder)
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        return path

    def test_a_file_without_exposures(self, tmp_path: Path) -> None:
        """Version 1 had no windows: everything it knew is taken over, and they are kept from now on."""
        path = saved(tmp_path)
        with closing(sqlite3.connect(path)) as db:
            known = db.execute("SELECT count(*) FROM incident").fetchone()
            counts = json.loads(db.execute("SELECT counts FROM target").fetchone()[0])
            del counts["long_prompts"]
            db.execute("UPDATE target SET counts = ?", (json.dumps(counts),))
            db.commit()
            db.executescript(
                "DROP TABLE exposure; DROP TABLE window; DROP INDEX incident_by_target; PRAGMA user_version = 1;"
            )
        new = Store(tmp_path)
        new.open()
        assert new.moved_aside is None
        one = follower(new)
        assert (len(one.known),) == known
        new.save(one)
        new.close()
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
            assert db.execute("SELECT count(*) FROM exposure").fetchone()[0] > 0

    def test_steps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every version between is passed, and nothing is lost."""
        path = self.old(tmp_path)
        monkeypatch.setattr(state, "SCHEMA", SCHEMA + 2)
        monkeypatch.setattr(
            state,
            "MIGRATIONS",
            {
                SCHEMA: "ALTER TABLE event ADD COLUMN kind TEXT NOT NULL DEFAULT 'life'",
                SCHEMA + 1: "UPDATE event SET kind = kind || '!'; CREATE TABLE more (name TEXT);",
            },
        )
        new = Store(tmp_path)
        new.open()
        assert new.moved_aside is None
        assert len(follower(new).known) == 1
        new.close()
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA + 2,)
            assert db.execute("SELECT DISTINCT kind FROM event").fetchall() == [("life!",)]
            assert db.execute("SELECT count(*) FROM more").fetchone() == (0,)

    def test_a_step_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step is done whole or not at all; a file that can't be brought up is moved aside as it was."""
        path = self.old(tmp_path)
        before = dumped(path)
        monkeypatch.setattr(state, "SCHEMA", SCHEMA + 1)
        monkeypatch.setattr(state, "MIGRATIONS", {SCHEMA: "DELETE FROM incident; DELETE FROM nothing"})
        new = Store(tmp_path)
        new.open()
        assert new.moved_aside is not None
        assert dumped(new.moved_aside) == before
        new.close()

    def test_every_older_version_has_a_step(self) -> None:
        """A new schema comes with the way to it."""
        assert sorted(state.MIGRATIONS) == list(range(1, state.SCHEMA))


def test_the_file_is_plain(tmp_path: Path) -> None:
    """The file can be read with any SQLite, and says whose it is."""
    path = saved(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (0x564C4F4D,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        counts = json.loads(db.execute("SELECT counts FROM target").fetchone()[0])
    assert counts["near_misses"] == 8
    assert ["prefill_budget", "serving", 1] in counts["incidents"]
