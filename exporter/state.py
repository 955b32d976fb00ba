"""What outlives the exporter: one SQLite file, one transaction a save.

Counters, incidents and the position in the logs commit together, so that a kill at any moment
leaves a state that is true for some moment. A file that is not ours, broken or of a newer
version is moved aside, never deleted. When the disk is full the exporter goes on in memory and
tries again with the next save.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .follow import Checkpoint, Follower, Known, StreamState
from .status import Counts, LastIncident

SCHEMA = 1
FILE = "state.sqlite3"
KEPT_INCIDENTS = 10_000
KEPT_SECONDS = 400 * 86_400
_KEPT_STREAMS = 1000
_APPLICATION_ID = 0x564C4F4D  # "VLOM": tells our files from others

_TABLES = """
CREATE TABLE target (name TEXT PRIMARY KEY, counts TEXT NOT NULL, last TEXT NOT NULL, rest TEXT NOT NULL,
    history TEXT) WITHOUT ROWID;
CREATE TABLE stream (target TEXT, name TEXT, source TEXT NOT NULL, token TEXT NOT NULL, lines INTEGER NOT NULL,
    parser TEXT, counted_lines INTEGER NOT NULL, errors TEXT NOT NULL, seen REAL NOT NULL,
    PRIMARY KEY (target, name)) WITHOUT ROWID;
CREATE TABLE incident (target TEXT, id TEXT, seen REAL NOT NULL, class TEXT NOT NULL, phase TEXT NOT NULL,
    fatal INTEGER NOT NULL, stream TEXT NOT NULL, reports TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (target, id)) WITHOUT ROWID;
CREATE INDEX incident_seen ON incident (seen);
CREATE TABLE event (target TEXT, key TEXT, seen REAL NOT NULL, PRIMARY KEY (target, key)) WITHOUT ROWID;
CREATE INDEX event_seen ON event (seen);
"""


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
        db = sqlite3.connect(self.path, isolation_level=None, timeout=1)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA journal_size_limit = 4194304")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(
                f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION_ID};"
                f" PRAGMA user_version = {SCHEMA}; COMMIT;"
            )
        return db

    def _move_aside(self, reason: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        aside = self.path.with_name(f"{FILE}.{stamp}.aside")
        number = 0
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{FILE}.{stamp}.{number}.aside")
        self.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            beside = self.path.with_name(FILE + suffix)
            if beside.exists():
                beside.rename(aside.with_name(aside.name + suffix))
        self.moved_aside, self.why_moved = aside, reason

    # --- reading --------------------------------------------------------------------------------

    def load(self, follower: Follower) -> None:
        """Fill ``follower`` and its status with what was saved of its target."""
        try:
            self._load(follower)
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{self.path}: {_reason(error)}") from error

    def _load(self, follower: Follower) -> None:
        db, status = self._open(), follower.status
        row = db.execute(
            "SELECT counts, last, rest, history FROM target WHERE name = ?", (status.name,)
        ).fetchone()
        if row is None:
            return
        counts, last, rest = (json.loads(text) for text in row[:3])
        history = json.loads(row[3]) if row[3] else {}
        status.counts = _counts(counts)
        status.last = {name: LastIncident(**one) for name, one in last.items()}
        status.setting_changed = rest["setting_changed"]
        status.engines = rest["engines"]
        status.recommended_budget = rest["recommended_budget"]
        status.last_line_timestamp = rest["last_line_timestamp"]
        known = {
            one: Known(class_id, phase, bool(fatal), stream, frozenset(json.loads(reports)))
            for one, class_id, phase, fatal, stream, reports in db.execute(
                "SELECT id, class, phase, fatal, stream, reports FROM incident WHERE target = ? ORDER BY seen",
                (status.name,),
            )
        }
        status.incidents = [
            json.loads(text)
            for (text,) in db.execute(
                "SELECT document FROM incident WHERE target = ? ORDER BY seen DESC LIMIT 200", (status.name,)
            )
        ]
        events = dict(
            db.execute(
                "SELECT key, seen FROM event WHERE target = ? ORDER BY seen", (status.name,)
            ).fetchall()
        )
        streams = {
            name: StreamState(
                source, token, lines, json.loads(parser) if parser else None, counted, set(json.loads(errors))
            )
            for name, source, token, lines, parser, counted, errors in db.execute(
                "SELECT name, source, token, lines, parser, counted_lines, errors FROM stream WHERE target = ?",
                (status.name,),
            )
        }
        follower.restore(Checkpoint(streams, history), known, events)

    def incident(self, target: str, identity: str) -> dict[str, object] | None:
        """The document of one incident, also of one that is no longer in memory."""
        try:
            row = self._open().execute(
                "SELECT document FROM incident WHERE target = ? AND id = ?", (target, identity)
            ).fetchone()  # fmt: skip
        except (sqlite3.Error, StateError):
            return None
        found: dict[str, object] | None = json.loads(row[0]) if row else None
        return found

    # --- writing --------------------------------------------------------------------------------

    def save(self, follower: Follower) -> None:
        """Write what changed, in one transaction. Raises ``StateError``; then nothing changed."""
        try:
            if self._db is None:
                self.open()
            with _transaction(self._open()) as db:
                self._write(db, follower)
                self._saves += 1
                if self._saves % 256 == 1:
                    self._prune(db)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{self.path}: {_reason(error)}") from error
        follower.saved()

    def _write(self, db: sqlite3.Connection, follower: Follower) -> None:
        status, now = follower.status, time.time()
        rest = {
            "setting_changed": status.setting_changed,
            "engines": status.engines,
            "recommended_budget": status.recommended_budget,
            "last_line_timestamp": status.last_line_timestamp,
        }
        checkpoint = follower.checkpoint
        db.execute(
            "INSERT OR REPLACE INTO target VALUES (?, ?, ?, ?, ?)",
            (
                status.name,
                _json(_plain(status.counts)),
                _json({name: asdict(one) for name, one in status.last.items()}),
                _json(rest),
                _json(checkpoint.history) if checkpoint else None,
            ),
        )
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
            "INSERT INTO incident VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET fatal = excluded.fatal, reports = excluded.reports, document = excluded.document",
            [
                (
                    status.name, one, now, known.class_id, known.phase, known.fatal, known.stream,
                    _json(sorted(known.reports)), _json(document),
                )
                for one, document in follower.dirty.items()
                if (known := follower.known.get(one)) is not None
            ],
        )  # fmt: skip
        db.executemany(
            "INSERT OR IGNORE INTO event VALUES (?, ?, ?)",
            [(status.name, key, seen) for key, seen in follower.new_events.items()],
        )

    @staticmethod
    def _prune(db: sqlite3.Connection) -> None:
        for table, kept in (
            ("incident", KEPT_INCIDENTS),
            ("event", KEPT_INCIDENTS),
            ("stream", _KEPT_STREAMS),
        ):
            db.execute(f"DELETE FROM {table} WHERE seen < ?", (time.time() - KEPT_SECONDS,))  # noqa: S608 - our names
            db.execute(
                f"DELETE FROM {table} WHERE seen < (SELECT seen FROM {table} ORDER BY seen DESC LIMIT 1 OFFSET ?)",  # noqa: S608
                (kept - 1,),
            )

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            raise StateError(f"{self.path}: not open")
        return self._db


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


def _unfit(path: Path) -> str | None:
    """Why the file can't be used, or None."""
    try:
        with closing(sqlite3.connect(path, timeout=1)) as db:
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
    except sqlite3.OperationalError as error:
        raise error from None  # locked, or not readable: not the file's fault
    except sqlite3.DatabaseError:
        return "it is corrupt"
    return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=dict)


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
        "engine_starts": counts.engine_starts,
    }


def _counts(raw: Mapping[str, Any]) -> Counts:
    counts = Counts(
        error_lines=raw["error_lines"], near_misses=raw["near_misses"], engine_starts=raw["engine_starts"]
    )
    counts.incidents.update({(a, b): value for a, b, value in raw["incidents"]})
    counts.lines.update({(a, b): value for a, b, value in raw["lines"]})
    counts.fatal.update(raw["fatal"])
    counts.fingerprints.update(raw["fingerprints"])
    counts.read_bytes.update(raw["read_bytes"])
    counts.truncated.update(raw["truncated"])
    return counts
