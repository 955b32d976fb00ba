"""What outlives the exporter: one SQLite file, one transaction a save.

Counters, incidents and the position in the logs commit together, so that a kill at any moment
leaves a state that is true for some moment. A file that is not ours, broken or of a newer
version is moved aside, never deleted; that is found out when it is opened, by reading all of it.
When the disk is full the exporter goes on in memory and tries again with the next save.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from .diagnosis.exposure import Window
from .diagnosis.ledger import KEPT_WINDOWS, KINDS
from .diagnosis.trigger import to_plain as event_plain
from .follow import KEPT_STREAMS, KNOWN, RECENT, SHOWN_INCIDENTS, Checkpoint, Follower, Known, ends_of
from .status import Counts, LastIncident, OpenAlert, TargetStatus
from .streams import StreamState
from .vllm.log import LogParser

SCHEMA = 2
_EXPOSURES = """
CREATE TABLE exposure (target TEXT, name TEXT, value TEXT NOT NULL, PRIMARY KEY (target, name)) WITHOUT ROWID;
CREATE TABLE window (target TEXT, kind TEXT, ended REAL, life INTEGER NOT NULL, length REAL, rate REAL,
    PRIMARY KEY (target, kind, ended)) WITHOUT ROWID;
CREATE INDEX incident_by_target ON incident (target, number);
"""
MIGRATIONS: Mapping[int, str] = {1: _EXPOSURES}
"""Statements that bring a file of one version to the next; a new version adds a row."""
FILE = "state.sqlite3"
KEPT_INCIDENTS = 10_000
KEPT_SECONDS = 400 * 86_400
KEPT_TARGET_SECONDS = 7 * 86_400
"""How long a target of a node is kept after it was last read: a StatefulSet that is scaled down over a
weekend goes on with its counters, the names of a Deployment's pods never come again."""
_FORGOTTEN_AT_ONCE = 16  # targets; each has up to 16,000 windows, and everyone waits meanwhile
_APPLICATION_ID = 0x564C4F4D  # "VLOM": tells our files from others

_TABLES = f"""
CREATE TABLE target (name TEXT PRIMARY KEY, counts TEXT NOT NULL, last TEXT NOT NULL, rest TEXT NOT NULL,
    history TEXT) WITHOUT ROWID;
CREATE TABLE stream (target TEXT, name TEXT, source TEXT NOT NULL, token TEXT NOT NULL, lines INTEGER NOT NULL,
    parser TEXT, counted_lines INTEGER NOT NULL, errors TEXT NOT NULL, seen REAL NOT NULL,
    PRIMARY KEY (target, name)) WITHOUT ROWID;
CREATE TABLE incident (number INTEGER PRIMARY KEY, target TEXT NOT NULL, id TEXT NOT NULL, seen REAL NOT NULL,
    class TEXT NOT NULL, phase TEXT NOT NULL, fatal INTEGER NOT NULL, reports TEXT NOT NULL,
    document TEXT NOT NULL, UNIQUE (target, id));
CREATE TABLE event (number INTEGER PRIMARY KEY, target TEXT NOT NULL, key TEXT NOT NULL, seen REAL NOT NULL,
    UNIQUE (target, key));
{_EXPOSURES}
"""  # "number" is the order in which they came: many come with one save, and clocks are set back

_OF_TARGET = (
    *(("target", "name"), ("stream", "target"), ("event", "target"), ("exposure", "target")),
    ("window", "target"),
)
"""Tables and their columns that name a target, save incidents."""

# What says nothing about the file: it is in use, or cannot be read or written at the moment.
_TRANSIENT = frozenset(
    [
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_AUTH, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_NOLFS,
    ]
)  # fmt: skip
_UNREADABLE = (
    sqlite3.Error,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What comes out of rows that hold something else than we write."""


class StateError(Exception):
    """The state can't be kept; the message says where and why."""


class Store:
    """The state file in ``folder``. Not for several threads or processes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.moved_aside: Path | None = None
        self.why_moved = ""
        self._db: sqlite3.Connection | None = None
        self._saves = 0
        self._encoded: dict[
            str, tuple[Checkpoint, str]
        ] = {}  # histories, which change less often than they are saved
        self._events_saved: dict[str, int] = {}
        self._windows_saved = 0  # since the last look at how many there are
        self._loaded: set[str] = set()  # targets of which we know what the file says

    def open(self) -> None:
        """Open or create the file. Raises ``StateError`` where the folder can't be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._checked()
        except (OSError, sqlite3.Error) as error:
            self._db = None
            raise StateError(f"{self.path.parent}: {_reason(error)}") from error

    @property
    def is_open(self) -> bool:
        """Whether there is a file to read from."""
        return self._db is not None

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _checked(self) -> sqlite3.Connection:
        if self.path.exists() and (reason := _unfit(self.path)) is not None:
            self._move_aside(reason)
        try:
            return self._connected()
        except _UNREADABLE as error:
            if isinstance(error, sqlite3.Error) and _transient(error):
                raise
        self._move_aside("it is corrupt")
        return self._connected()

    def _connected(self) -> sqlite3.Connection:
        """The file, of this version, and found to be readable from its first row to its last."""
        db = sqlite3.connect(self.path, isolation_level=None, timeout=1)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = 4194304")
            db.execute("PRAGMA cache_size = -512")  # KiB; we write a few rows and read hardly any
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(
                    f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION_ID};"
                    f" PRAGMA user_version = {SCHEMA}; COMMIT;"
                )
            for older in range(version or SCHEMA, SCHEMA):
                db.executescript(
                    f"BEGIN IMMEDIATE; {MIGRATIONS[older]} ; PRAGMA user_version = {older + 1}; COMMIT;"
                )
            for (name,) in db.execute("SELECT name FROM target").fetchall():
                _load(db, Follower(TargetStatus(name), {}))
        except BaseException:
            db.close()
            raise
        return db

    def _move_aside(self, reason: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        aside = self.path.with_name(f"{FILE}.{stamp}.aside")
        number = 0
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{FILE}.{stamp}.{number}.aside")
        for suffix in (
            "-journal",
            "-wal",
            "-shm",
            "",
        ):  # the file last: SQLite deletes what it finds beside none
            part = self.path.with_name(FILE + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        self.moved_aside, self.why_moved = aside, reason

    # --- reading --------------------------------------------------------------------------------

    def load(self, follower: Follower) -> None:
        """Fill ``follower`` and its status with what was saved of its target."""
        try:
            _load(self._open(), follower)
        except _UNREADABLE as error:
            raise StateError(f"{self.path}: {_reason(error)}") from error
        self._loaded.add(follower.status.name)
        self._events_saved.pop(follower.status.name, None)  # each follower counts its changes anew

    def incident(self, target: str, identity: str) -> dict[str, object] | None:
        """The document of one incident, also of one that is no longer in memory."""
        try:
            row = self._open().execute(
                "SELECT document FROM incident WHERE target = ? AND id = ?", (target, identity)
            ).fetchone()  # fmt: skip
            found: dict[str, object] | None = json.loads(row[0]) if row else None
        except (sqlite3.Error, StateError, ValueError):
            return None
        return found

    def incidents(self, target: str, skip: int, most: int) -> tuple[list[dict[str, object]], int]:
        """Documents of a target, newest first, ``most`` of them after ``skip``; and how many there are."""
        try:
            db = self._open()
            (total,) = db.execute("SELECT count(*) FROM incident WHERE target = ?", (target,)).fetchone()
            # the inner part is answered by the index alone: what is skipped is not read
            rows = db.execute(
                "SELECT document FROM incident WHERE number IN (SELECT number FROM incident WHERE target = ?"
                " ORDER BY number DESC LIMIT ? OFFSET ?) ORDER BY number DESC",
                (target, most, skip),
            )
            return [dict(json.loads(text)) for (text,) in rows], int(total)
        except (*_UNREADABLE, StateError):
            return [], 0

    def seen(self) -> dict[str, float]:
        """Every target in the file that was read, and when that was, in seconds since the epoch."""
        try:
            rows = self._open().execute("SELECT target, max(seen) FROM stream GROUP BY target").fetchall()
            return {str(target): float(when) for target, when in rows}
        except (*_UNREADABLE, StateError):
            return {}

    # --- forgetting -----------------------------------------------------------------------------

    def forget(self, followed: Iterable[str]) -> list[str]:
        """Drop some targets that were not read for ``KEPT_TARGET_SECONDS`` and are not ``followed``; their names.

        Their incidents stay, within the limit for those of all that are gone. Raises ``StateError``.
        """
        kept, before = set(followed), time.time() - KEPT_TARGET_SECONDS
        try:
            seen = self.seen()
            names = (name for (name,) in self._open().execute("SELECT name FROM target"))
            gone = [one for one in names if one not in kept and seen.get(one, 0.0) < before]
            gone = gone[:_FORGOTTEN_AT_ONCE]
            with _transaction(self._open()) as db:
                for table, column in _OF_TARGET:
                    db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(one,) for one in gone])  # noqa: S608 - our names
        except sqlite3.Error as error:
            raise StateError(f"{self.path}: {_reason(error)}") from error
        for one in gone:
            self._encoded.pop(one, None)
            self._events_saved.pop(one, None)
        return gone

    # --- writing --------------------------------------------------------------------------------

    def save(self, follower: Follower) -> None:
        """Write what changed, in one transaction. Raises ``StateError``; then nothing changed."""
        follower.count_read()
        try:
            if self._db is None:
                self.open()
            self._keep_what_was_not_loaded(follower.status.name)
            with _transaction(self._open()) as db:
                self._write(db, follower)
                self._saves += 1
                if self._saves % 256 == 1:
                    self._prune(db)
                self._windows_saved += len(follower.ledger.new_windows)
                if self._windows_saved > KEPT_WINDOWS // 4:
                    self._prune_windows(db)
                    self._windows_saved = 0
        except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: text that is not Unicode
            raise StateError(f"{self.path}: {_reason(error)}") from error
        self._events_saved[follower.status.name] = follower.ledger.events_changed
        follower.saved()

    def _keep_what_was_not_loaded(self, target: str) -> None:
        """A file that could not be read at the start, and now can, has counters that we don't know of."""
        if target in self._loaded:
            return
        if self._open().execute("SELECT 1 FROM target WHERE name = ?", (target,)).fetchone() is not None:
            self.close()
            self._move_aside("it could not be read when the exporter started")
            self.open()
        self._loaded.add(target)

    def _write(self, db: sqlite3.Connection, follower: Follower) -> None:
        status, now = follower.status, time.time()
        rest = {
            "setting_changed": status.setting_changed,
            "engines": status.engines,
            "recommended_budget": status.recommended_budget,
            "last_line_timestamp": status.last_line_timestamp,
            "sources": _of_sources(status.counts),
            "alerts": {key: asdict(one) for key, one in status.alerts.items()},
        }
        checkpoint = follower.checkpoint
        db.execute(
            "INSERT OR REPLACE INTO target VALUES (?, ?, ?, ?, ?)",
            (
                status.name,
                _json(_plain(status.counts)),
                _json({name: asdict(one) for name, one in status.last.items()}),
                _json(rest),
                self._history(status.name, checkpoint) if checkpoint else None,
            ),
        )
        self._write_exposures(db, follower)
        db.executemany(
            "INSERT OR REPLACE INTO stream VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    status.name, name, one.source, one.token, one.lines,
                    _json(one.parser) if one.parser else None, one.counted_lines, _json(sorted(one.errors)), now,
                )
                for name, one in follower.reading().items()
            ],
        )  # fmt: skip
        db.executemany(
            "INSERT INTO incident VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET fatal = excluded.fatal, reports = excluded.reports, document = excluded.document",
            [
                (
                    status.name, one, now, known.class_id, known.phase, known.fatal,
                    _json(sorted(known.reports)), _json(document),
                )
                for one, document in follower.dirty.items()
                if (known := follower.known.get(one)) is not None
            ],
        )  # fmt: skip
        db.executemany(
            "INSERT OR IGNORE INTO event VALUES (NULL, ?, ?, ?)",
            [(status.name, key, seen) for key, seen in follower.new_events.items()],
        )

    def _history(self, target: str, checkpoint: Checkpoint) -> str:
        known = self._encoded.get(target)
        if known is None or known[0] is not checkpoint:
            known = self._encoded[target] = checkpoint, _json(checkpoint.history)
        return known[1]

    def _write_exposures(self, db: sqlite3.Connection, follower: Follower) -> None:
        name, ledger = follower.status.name, follower.ledger
        rows = {"scraped": _json(ledger.scraped()), "long_prompts": _json(follower.long_prompts)}
        if self._events_saved.get(name) != ledger.events_changed:
            rows["events"] = _json([event_plain(one) for one in ledger.events.values()])
        db.executemany(
            "INSERT OR REPLACE INTO exposure VALUES (?, ?, ?)",
            [(name, part, text) for part, text in rows.items()],
        )
        db.executemany(
            "INSERT OR REPLACE INTO window VALUES (?, ?, ?, ?, ?, ?)",
            [(name, kind, w.end, w.life, w.length, w.rate) for kind, w in ledger.new_windows],
        )

    @staticmethod
    def _prune(db: sqlite3.Connection) -> None:
        # streams have no order, and those that are read are all seen with the same save: none of them goes
        for table, kept, order, key in (
            ("incident", KEPT_INCIDENTS, "number", "number"),
            ("event", KEPT_INCIDENTS, "number", "number"),
            ("stream", KEPT_STREAMS, "seen", "target, name"),
        ):
            db.execute(f"DELETE FROM {table} WHERE seen < ?", (time.time() - KEPT_SECONDS,))  # noqa: S608 - our names
            sizes = [n for (n,) in db.execute(f"SELECT count(*) FROM {table} GROUP BY {_OWNER}")]  # noqa: S608
            if (share := _share(sizes, kept)) is not None:
                db.execute(
                    f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM (SELECT {key},"  # noqa: S608
                    f" rank() OVER (PARTITION BY {_OWNER} ORDER BY {order} DESC) AS place FROM {table})"
                    " WHERE place > ?)",
                    (share,),
                )

    @staticmethod
    def _prune_windows(db: sqlite3.Connection) -> None:
        db.execute(
            "DELETE FROM window WHERE (target, kind, ended) IN (SELECT target, kind, ended FROM (SELECT *,"
            " row_number() OVER (PARTITION BY target, kind ORDER BY ended DESC) AS number FROM window)"
            " WHERE number > ?)",
            (KEPT_WINDOWS,),
        )

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise StateError(f"{self.path}: not open")
        return self._db


_OWNER = "CASE WHEN target IN (SELECT name FROM target) THEN target END"  # all that were forgotten are one


def _share(sizes: Iterable[int], kept: int) -> int | None:
    """How many each may have so that all together have ``kept``; None where they have no more anyway.

    Whoever has fewer leaves the rest to the others, so one in a crash loop gets what nobody else needs.
    """
    left, waiting = kept, sorted(sizes)
    for at, size in enumerate(waiting):
        share = left // (len(waiting) - at)
        if size > share:
            return max(share, 1)
        left -= size
    return None


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _load(db: sqlite3.Connection, follower: Follower) -> None:
    """Read everything before anything is taken over, so that nothing is taken over by half."""
    status = follower.status
    row = db.execute(
        "SELECT counts, last, rest, history FROM target WHERE name = ?", (status.name,)
    ).fetchone()
    if row is None:
        return
    raw, last, rest = (json.loads(text) for text in row[:3])
    history = json.loads(row[3]) if row[3] else {}
    counts = _counts(raw)
    latest = {name: LastIncident(**one) for name, one in last.items()}
    rows = db.execute(
        "SELECT id, class, phase, fatal, reports FROM incident WHERE target = ? ORDER BY number DESC LIMIT ?",
        (status.name, KNOWN),
    ).fetchall()
    known = {
        one: Known(
            class_id, phase, bool(fatal), _reports(reports) if back < RECENT else ends_of(_reports(reports))
        )
        for back, (one, class_id, phase, fatal, reports) in reversed([*enumerate(rows)])
    }
    incidents = [
        dict(json.loads(text))
        for (text,) in db.execute(
            "SELECT document FROM incident WHERE target = ? ORDER BY number DESC LIMIT ?",
            (status.name, SHOWN_INCIDENTS),
        )
    ]
    events = dict(
        db.execute(
            "SELECT key, seen FROM (SELECT * FROM event WHERE target = ? ORDER BY number DESC LIMIT ?)"
            " ORDER BY number",
            (status.name, KNOWN),
        ).fetchall()
    )
    streams = {
        name: StreamState(
            source, token, lines, _parser(parser) if parser else None, counted, set(json.loads(errors))
        )
        for name, source, token, lines, parser, counted, errors in db.execute(
            "SELECT name, source, token, lines, parser, counted_lines, errors FROM stream WHERE target = ?",
            (status.name,),
        )
    }
    for name, (errors, rotations) in rest["sources"].items():
        counts.read_errors[name] = _number(errors)
        counts.rotations.update({(name, kind): _number(times) for kind, times in rotations.items()})
    exposures = {
        name: json.loads(text)
        for name, text in db.execute("SELECT name, value FROM exposure WHERE target = ?", (status.name,))
    }
    windows = [
        (_one_of(KINDS, kind), Window(float(ended), _number(life), *map(_maybe_float, both)))
        for kind, ended, life, *both in db.execute(
            "SELECT kind, ended, life, length, rate FROM window WHERE target = ? ORDER BY ended",
            (status.name,),
        )
    ]
    alerts = {key: _alert(one) for key, one in rest.get("alerts", {}).items()}
    follower.restore(Checkpoint(streams, history), known, events)
    follower.restore_exposures(exposures, windows)
    status.counts, status.last, status.incidents = counts, latest, incidents
    status.setting_changed.update(rest["setting_changed"])
    status.engines = rest["engines"]
    status.alerts = alerts
    status.recommended_budget = rest["recommended_budget"]
    status.last_line_timestamp = rest["last_line_timestamp"]


def _alert(raw: Mapping[str, Any]) -> OpenAlert:
    labels, annotations = ({str(k): str(v) for k, v in raw[one].items()} for one in ("labels", "annotations"))
    sent = {str(receiver): float(when) for receiver, when in raw["sent"].items()}
    datetime.fromtimestamp(raw["starts"])  # it is written as a date, where an error would end the exporter
    return OpenAlert(labels, annotations, float(raw["starts"]), str(raw["url"]), sent, bool(raw["ended"]))


def _reports(text: str) -> frozenset[tuple[str, int]]:
    # there are few streams, and thousands of incidents that name them
    return frozenset((sys.intern(str(stream)), int(line)) for stream, line in json.loads(text))


def _parser(text: str) -> Mapping[str, Any]:
    """State of a parser, tried out: it is needed much later, where an error would end the exporter."""
    state: Mapping[str, Any] = json.loads(text)
    LogParser(datetime.max).restore(state)
    return state


def _transient(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _TRANSIENT


def _unfit(path: Path) -> str | None:
    """Why the file can't be used, or None."""
    try:
        # for reading only: to close it otherwise would write to what is not ours, or broken
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            owner = db.execute("PRAGMA application_id").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and owner == 0 and tables == 0:
                return None
            if owner != _APPLICATION_ID:
                return "it belongs to another program"
            if version > SCHEMA:
                return f"it was written by a newer version (schema {version}, this one knows {SCHEMA})"
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                return "it is corrupt"
    except sqlite3.DatabaseError as error:
        if _transient(error):
            raise
        return "it is corrupt"
    return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _json(value: object) -> str:
    # ASCII: a log can hold halves of surrogate pairs, which SQLite refuses
    return json.dumps(value, separators=(",", ":"), default=dict)


def _plain(counts: Counts) -> dict[str, object]:
    """JSON has no keys of several parts: they become lists of parts and value."""
    return {
        "incidents": [[*key, value] for key, value in counts.incidents.items()],
        "lines": [[*key, value] for key, value in counts.lines.items()],
        "fatal": counts.fatal,
        "fingerprints": counts.fingerprints,
        "read_bytes": counts.read_bytes,
        "truncated": counts.truncated,
        "error_lines": counts.error_lines,
        "near_misses": counts.near_misses,
        "long_prompts": counts.long_prompts,
        "engine_starts": counts.engine_starts,
    }


def _of_sources(counts: Counts) -> dict[str, tuple[int, dict[str, int]]]:
    """Read errors and rotations by kind, by source."""
    found: dict[str, tuple[int, dict[str, int]]] = {
        name: (errors, {}) for name, errors in counts.read_errors.items()
    }
    for (name, kind), times in counts.rotations.items():
        found.setdefault(name, (0, {}))[1][kind] = times
    return found


def _counts(raw: Mapping[str, Any]) -> Counts:
    counts = Counts(
        error_lines=_number(raw["error_lines"]),
        near_misses=_number(raw["near_misses"]),
        long_prompts=_number(raw.get("long_prompts", 0)),
        engine_starts=_number(raw["engine_starts"]),
    )
    counts.incidents.update({(a, b): _number(value) for a, b, value in raw["incidents"]})
    counts.lines.update({(a, b): _number(value) for a, b, value in raw["lines"]})
    for name in ("fatal", "fingerprints", "read_bytes", "truncated"):
        getattr(counts, name).update({one: _number(value) for one, value in raw[name].items()})
    return counts


def _one_of(names: tuple[str, ...], name: object) -> str:
    if name not in names:
        raise ValueError("not a kind of window")
    return str(name)


def _maybe_float(value: object) -> float | None:
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"not a number: {type(value).__name__}")
    return None if value is None else float(value)


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"not a number: {type(value).__name__}")
    return value
