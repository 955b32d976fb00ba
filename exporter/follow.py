"""Follows one vLLM server: chunks of its log in; counts, lives and incidents out.

The same ``History`` as in ``analyze``, with three things a finite log does not need:

* *quiet*: records and incidents are closed by silence, counted in ticks of the caller's timer, so
  that a process that was stopped for a minute does not take its own absence for a silence;
* *forgetting*: only what later lines can still change stays in memory;
* *exactly once*: reading goes on from a checkpoint, a moment when nothing was open. What was
  counted behind the checkpoint is known by line number (lines) or by an identity that comes
  from the log alone (incidents, lives, near misses), so reading it again counts nothing twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from .diagnosis.engine import changed
from .diagnosis.exposure import Window
from .diagnosis.history import History, short_hash
from .diagnosis.knowledge import FailureClass
from .diagnosis.ledger import Ledger
from .diagnosis.trigger import from_plain as event_from_plain
from .document import incident_document, life_document, outlook
from .plain import whole
from .records import Failure, Incident, Life, Record, line_number, numbered, stream_number
from .sources.scan import Given
from .sources.stream import Chunk
from .status import Counts, LastIncident, TargetStatus
from .streams import ASIDE_TICKS, FAILURE_LEVELS, Stream, StreamState, Text, in_parts
from .vllm.signals import signals

TICK = 0.1
"""Seconds between two calls of ``Follower.tick``."""

_RECORD_TICKS = 2  # a record is written at once; what follows later is another one
_BUSY_RECORD_TICKS = 5  # while other lines go by
_TERMINAL_TICKS = 3
_SETTLE_TICKS = 10  # one second
_SURVIVED_TICKS = 51  # five seconds: no failure of that allocation will be logged any more
_CHECKPOINT_TICKS = 20
_JUDGE_TICKS = 10
_REPLAY_BYTES = 64 << 20  # what a restart may have to read again, at most
_KEPT_DONE = 16  # logs whose last file is gone and the next one not there yet
KNOWN = 3000
"""What was counted, kept in memory: as much as a restart can have to read again, and some more."""
_UNSAVED = 1000  # documents kept while the state can't be written
_NEAR_MISS = "near_miss"
RECENT = 100
"""Incidents of which every line that reported them is known. Of older ones it is the last, which is told again
wherever a restart begins to read."""
KEPT_STREAMS = 4000  # of files that are done: without its token one that still matches is read again
# Access lines, of our own scrapes too, and "Engine 000: Avg prompt throughput: …" go on in a hang.
_HEARTBEATS = frozenset({"uvicorn", "loggers.py", "metrics.py"})
SHOWN_INCIDENTS = 200
_SHOWN_LIVES = 50
_BANDS = {"insufficient": 0.25, "possible": 0.5, "probable": 0.8, "confirmed": 1.0}


@dataclass(slots=True)
class Known:
    """What was counted of an incident, so that it is not counted again."""

    class_id: str
    phase: str
    fatal: bool
    reports: frozenset[tuple[str, int]] = frozenset()  # stream and line of what reported it
    version: tuple[int, bool] = (0, False)  # of the evidence in the stored document


@dataclass(slots=True)
class Checkpoint:
    """Where a restart goes on: streams, and the lives at that moment."""

    streams: dict[str, StreamState]
    history: Mapping[str, Any]


class Follower:
    """One target. ``take`` chunks as they come and ``tick`` ten times a second; read ``status``."""

    def __init__(
        self,
        status: TargetStatus,
        classes: Mapping[str, FailureClass],
        now: Callable[[], datetime] = datetime.now,
        before: Callable[[float], list[dict[str, float]]] = lambda _: [],
    ) -> None:
        self.status = status
        self._before = before
        self.failures = 0
        """Grows with every line that reports a failure."""
        self.fed = 0
        """Grows with every record that tells more than that the API server is there."""
        self._classes = classes
        self._now = now
        self._history = History(classes, self._stream_of)
        self._streams: dict[str, Stream] = {}
        self._numbered: dict[int, Stream] = {}  # those of ``_streams``
        self._names: dict[int, str] = {}  # also of streams that are done: incidents name their lines
        self._begun = 0
        self._done: dict[str, Text] = {}  # logs of streams that ended, for whatever follows them
        self._saved: dict[str, StreamState] = {}
        self.known: dict[str, Known] = {}
        self.events: dict[str, float] = {}
        self.dirty: dict[str, dict[str, object]] = {}  # incident documents that are to be saved
        self.news: deque[dict[str, object]] = deque(maxlen=_UNSAVED)
        """Documents of incidents that are new or known better; whoever reads them takes them out."""
        self.new_events: dict[str, float] = {}
        self.checkpoint: Checkpoint | None = None
        self.urgent = False
        """Whether something was counted that may not be lost; the caller saves and clears it."""
        self.stale = False
        """Whether anything at all changed since the last save."""
        self.changed = False
        self._candidate: Checkpoint | None = None
        self._ticks_since_candidate = 0
        self._bytes_since = 0
        self._silent_ticks = 0
        self._activity = 0
        self._ticks = 0
        self._fed = False
        self._failed_at: float | None = None
        self._ended: dict[str, StreamState] = {}
        self._read_since = Counts()
        self.window_before: Callable[[float], tuple[float | None, float | None]] = lambda _: (None, None)
        """Longest prompt and arrivals before a moment, as scrapes tell; the caller knows them."""
        self.free_bytes: int | None = None
        """Free memory of the device now, where somebody can say."""
        self.long_prompts: tuple[int, str, int, float] | None = None
        """What ``Ledger.long_prompts`` said when it was last counted."""
        self._judged = -1

    # --- going on where a former process stopped ------------------------------------------------

    def restore(
        self,
        checkpoint: Checkpoint | None,
        known: Mapping[str, Known],
        events: Mapping[str, float],
    ) -> None:
        """Take over what was saved; ``status`` was filled by the caller."""
        self.known.update(known)
        self.events.update(events)
        if checkpoint is None:
            return
        self.checkpoint = checkpoint
        self._saved = dict(checkpoint.streams)
        if checkpoint.history:
            self._history.restore(checkpoint.history)
        self._refresh_lives()

    def restore_exposures(self, saved: Mapping[str, Any], windows: Iterable[tuple[str, Window]]) -> None:
        """Take over what lives were exposed to, after ``restore``."""
        ledger = self.ledger
        if "scraped" in saved:
            ledger.restore_scraped(saved["scraped"])
        for one in map(event_from_plain, saved.get("events", ())):
            ledger.events[one.incident] = one
        if (counted := saved.get("long_prompts")) is not None:
            life, source, threshold, seen = counted
            self.long_prompts = int(life), str(source), int(threshold), float(seen)
        ledger.restore_windows(windows)

    @property
    def ledger(self) -> Ledger:
        """What the server was exposed to."""
        return self._history.ledger

    def tokens(self) -> dict[str, str]:
        """Where streams go on. A source knows its own: SOURCE may have been written another way before."""
        return {name: state.token for name, state in self._saved.items() if state.token}

    @property
    def unresolved(self) -> bool:
        """Whether a failure was logged, and not how it ended."""
        return self._history.unresolved

    def reading(self) -> dict[str, StreamState]:
        """What was counted of every stream that is read, and where the checkpoint is in it."""
        before = self.checkpoint.streams if self.checkpoint else {}
        found: dict[str, StreamState] = {}
        for name, stream in self._streams.items():
            at = before.get(name, stream.before)
            found[name] = replace(
                at, counted_lines=stream.counted_lines, errors={n for n in stream.errors if n > at.lines}
            )
        return found | self._ended

    def count_read(self) -> None:
        """Show what was read, right before it is saved: else a counter would fall with a kill."""
        counts, new = self.status.counts, self._read_since
        counts.lines.update(new.lines)
        counts.read_bytes.update(new.read_bytes)
        counts.truncated.update(new.truncated)
        self._read_since = Counts()
        for stats in self.status.sources:
            errors, rotations = stats.take_new()
            counts.read_errors[stats.name] += errors
            counts.rotations.update({(stats.name, kind): times for kind, times in rotations.items()})

    def saved(self) -> None:
        """Everything that was new is safe."""
        self.count_read()
        self.dirty.clear()
        self.new_events.clear()
        self._ended.clear()
        self.ledger.new_windows.clear()
        self.urgent = self.stale = False

    # --- input ----------------------------------------------------------------------------------

    def take(self, source: str, chunk: Chunk, at: float) -> None:
        """Read the next lines of one stream. ``at``: seconds since the epoch."""
        stream = self._streams.get(chunk.stream) or self._begin(source, chunk)
        text = stream.text
        if text.writing is not stream:
            if text.writing is not None:
                self._read(text.writing, text.scanner.finish())
            text.turn_to(stream)
        failures = self.failures
        for data in in_parts(chunk.data, stream.counted_lines - stream.lines):
            self._read(stream, text.scanner.feed(data), len(data))
        stream.token = chunk.token
        if chunk.ended:
            stream.ended = True
            self._read(stream, text.scanner.finish())
        if chunk.data:
            text.silent = 0
            self.status.last_line_timestamp[source] = at
            self._bytes_since += len(chunk.data)
        self.changed = self.stale = True
        self._look(text)
        if self.failures != failures:
            # by our clock: that of the log may be in another zone
            self._failed_at = at if text.live else None
        self._update()
        if self._bytes_since > _REPLAY_BYTES // 2:
            self._keep_up()

    def _begin(self, source: str, chunk: Chunk) -> Stream:
        """A stream that this process had no chunk of."""
        before = self._saved.pop(chunk.stream, None) or StreamState(source, chunk.begin)
        text = self._text_before(chunk)
        if text is None:
            first = self._saved.get(chunk.follows)
            text = Text(self._now(), before.parser or (first.parser if first else None))
        for other in self._streams.values():
            if other.source == source and other.text is not text:
                self._flush(other.text)  # what was open there comes before what is here
        stream = Stream(chunk.stream, self._begun, source, before, text)
        stream.follows = chunk.follows
        self._begun += 1
        self._streams[chunk.stream] = self._numbered[stream.number] = stream
        self._names[stream.number] = stream.name
        if len(self._names) > KEPT_STREAMS:
            del self._names[next(iter(self._names))]
        self.urgent = True  # from now on it can be found again
        return stream

    def _text_before(self, chunk: Chunk) -> Text | None:
        """The text that a new stream goes on with, if it is being read."""
        if chunk.follows in self._streams:
            return self._streams[chunk.follows].text
        if chunk.follows in self._done:
            return self._done.pop(chunk.follows)
        # late lines for a file that was rotated away, and the next one was read before, since a restart
        return next((one.text for one in self._streams.values() if one.follows == chunk.stream), None)

    def _stream_of(self, number: int) -> str:
        return self._names.get(stream_number(number), "")

    def _read(self, stream: Stream, lines: Iterable[Given], size: int = 0) -> None:
        """``lines``, out of ``size`` bytes, are either all behind what was counted, or all new."""
        text, counts, source = stream.text, self._read_since, stream.source
        scanner, parser = text.scanner, text.parser
        kept_aside, before, unparsed, truncated = (
            scanner.kept_aside, scanner.lines, parser.unparsed, text.truncated,
        )  # fmt: skip
        self._give(text, lines)
        if scanner.kept_aside != kept_aside:
            text.aside = 0
        new = scanner.lines - before
        stream.lines += new
        if stream.lines - new < stream.counted_lines:
            return
        odd = min(new, parser.unparsed - unparsed)
        counts.lines[source, "parsed"] += new - odd
        counts.lines[source, "unparsed"] += odd
        counts.read_bytes[source] += size
        counts.truncated[source] += text.truncated - truncated
        stream.counted_lines = stream.lines

    def _give(self, text: Text, lines: Iterable[Given]) -> None:
        for number, raw, traffic in lines:
            if traffic is None:
                text.quiet = 0
                text.given = True
            for line in text.framing.feed(text.number(number), raw, traffic):
                self._records(text.parser.feed(line))

    def _flush(self, text: Text) -> None:
        for line in text.framing.flush():
            self._records(text.parser.feed(line))
        self._records(text.parser.flush())

    def _records(self, records: Iterable[Record]) -> None:
        for record in records:
            self._fed = True
            # requests also come while the engine hangs; its steps don't
            requests = record.traffic is not None and not record.traffic.steps
            self.fed += record.file not in _HEARTBEATS and not requests
            self._history.feed(record)
            if self._history.error_lines:
                self._count_errors(self._history.error_lines)
                self._history.error_lines.clear()

    def _look(self, text: Text) -> None:
        """Count error lines of records that are not complete yet: alerts wait for nothing."""
        if not text.given or not text.open:
            return
        text.given = False
        for record in text.parser.peek():
            if record.level in FAILURE_LEVELS:
                self._count_errors(signal.line for signal in signals(record) if isinstance(signal, Failure))

    def _count_errors(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            stream, line = self._numbered.get(stream_number(number)), line_number(number)
            if stream is not None and line not in stream.errors:
                stream.errors.add(line)
                self.failures += 1
                self.status.counts.error_lines += 1
                self.urgent = True

    # --- silence --------------------------------------------------------------------------------

    def tick(self) -> None:
        """A tenth of a second went by, during which the caller was able to read."""
        self._ticks += 1
        self.stale = self.stale or any(stats.has_new for stats in self.status.sources)
        for text in self._texts:
            if self._ticks % 36_000 == 0:
                text.parser.until(self._now())
            text.quiet += 1
            text.silent += 1
            text.live = text.live or text.silent >= _RECORD_TICKS
            text.aside += 1
            if not text.open:
                continue
            if text.quiet >= _SETTLE_TICKS:
                self._flush(text)
            elif text.quiet >= _RECORD_TICKS and (
                text.silent >= _RECORD_TICKS or text.quiet >= _BUSY_RECORD_TICKS
            ):
                self._records(text.parser.rest())
            self._update()
        if self._history.activity != self._activity:
            self._activity, self._silent_ticks = self._history.activity, 0
        else:
            self._silent_ticks += 1
        if self._history.open and self._silent_ticks >= (
            _TERMINAL_TICKS if self._history.terminated else _SETTLE_TICKS
        ):
            self._history.settle()
            self._update(settled=True)
        if self._silent_ticks == _SURVIVED_TICKS:
            self._near_misses(quiet=True)
        if self._ticks % _JUDGE_TICKS == 0:
            self.judge()
        self._advance()

    @property
    def idle(self) -> bool:
        """Whether no tick can change anything before the next chunk."""
        return (
            self._silent_ticks > _SURVIVED_TICKS
            and not (self._candidate or self._history.open or self._undecided)
            and not (self.changed and self._history.done)
            and self._judged == self.ledger.changed
        )

    def finish(self) -> None:
        """The input is finite and ended."""
        for text in self._texts:
            self._flush(text)
        self._history.finish()
        self._update(settled=True)
        self._near_misses(quiet=True)
        self.judge()

    def _advance(self) -> None:
        """Move the checkpoint to a moment two seconds ago, if nothing was open then or since."""
        self._ticks_since_candidate += 1
        if self._undecided or not self._history.done:
            self._candidate = None
        elif self._candidate is None:
            if self.changed:
                self._next_candidate(self._moment())
        elif self._ticks_since_candidate >= _CHECKPOINT_TICKS:
            self._keep(self._candidate)
            self._next_candidate(self._moment() if self.changed else None)

    def _keep_up(self) -> None:
        """Move the checkpoint in a log that never pauses, as a restart must not read for ever.

        Where no failure is open, if that comes in time: a record that is read in two may be told as two.
        """
        quiet = self._history.done and not any(text.may_fail for text in self._texts)
        if quiet or self._bytes_since > _REPLAY_BYTES:
            self._keep(self._moment())
            self._next_candidate(None)

    def _next_candidate(self, candidate: Checkpoint | None) -> None:
        self._candidate = candidate
        self._ticks_since_candidate = self._bytes_since = 0
        self.changed = False

    def _keep(self, checkpoint: Checkpoint) -> None:
        """A restart goes on from ``checkpoint``; forget what only mattered before it."""
        self.checkpoint = checkpoint
        self.stale = True
        for name, state in checkpoint.streams.items():
            if (stream := self._streams.get(name)) is None:
                continue
            if not stream.text.told(numbered(stream.number, state.lines)):
                continue  # what is open would count its lines again
            stream.errors = {n for n in stream.errors if n > state.lines}
            # where it went on meanwhile, the next checkpoint is the first that has its end
            if stream.ended and state.token == stream.token:
                self._forget(stream, state)

    def _forget(self, stream: Stream, state: StreamState) -> None:
        """The stream has ended. What follows it may be yet to come, and goes on with its text."""
        name = stream.name
        del self._streams[name], self._numbered[stream.number]
        followed = any(one.text is stream.text for one in self._streams.values())
        self._ended[name] = self._saved[name] = replace(state, parser=None) if followed else state
        if not followed:
            self._done[name] = stream.text
        if len(self._done) > _KEPT_DONE:
            oldest = next(iter(self._done))
            del self._done[oldest]
            if oldest in self._saved:
                self._ended[oldest] = self._saved[oldest] = replace(self._saved[oldest], parser=None)
        if len(self._saved) > KEPT_STREAMS:
            del self._saved[next(iter(self._saved))]

    @property
    def _texts(self) -> Iterable[Text]:
        return dict.fromkeys(one.text for one in self._streams.values())

    @property
    def _undecided(self) -> bool:
        """Whether lines that were read may still become part of something."""
        return any(text.open or text.aside < ASIDE_TICKS for text in self._texts)

    def _moment(self) -> Checkpoint:
        streams = {name: stream.state() for name, stream in self._streams.items()}
        return Checkpoint(streams, self._history.snapshot())

    # --- results --------------------------------------------------------------------------------

    def _update(self, settled: bool = False) -> None:
        if not (self._fed or settled):
            return  # ordinary traffic: nothing reached the history
        self._fed = False
        history = self._history
        for incident in history.settled():
            self._incident(incident)
        self._near_misses()
        self._refresh_lives()
        history.forget()

    def judge(self) -> None:
        """Bring trigger, confirmation and risk up to date, where anything they depend on has changed."""
        ledger, status = self.ledger, self.status
        if self._judged == ledger.changed:
            return
        found = outlook(self._history, self.free_bytes)
        self._judged = ledger.changed  # bringing lives up to date may have changed it
        self.stale = True
        status.trigger, status.confirmation = found.get("trigger"), found.get("confirmation")
        status.risk = found.get("risk")
        own = ledger.lives[-1] if ledger.lives else None
        if own is not None and status.life is not None and own.index == status.life.index:
            status.steps = {"seen": own.steps, "full": own.full_steps, "largest_tokens": own.largest_step}
        before, now = self.long_prompts, ledger.long_prompts()
        if now is None:
            return
        if before is not None and now[0] < before[0]:
            return  # read again after a restart
        if before is None or before[0] != now[0]:
            status.counts.long_prompts += int(now[3])
        elif before[1:3] == now[1:3]:
            status.counts.long_prompts += max(0, int(now[3]) - int(before[3]))
            now = (*now[:3], max(now[3], before[3]))
        self.long_prompts = now

    def _near_misses(self, quiet: bool = False) -> None:
        """Count the warnings that no failure can claim any more; after a silence those are all."""
        for warning in self._history.survived_warnings(quiet):
            record = warning.record
            if self._once(
                _NEAR_MISS, record.time, record.process, record.pid, line_number(record.numbers[0])
            ):
                self.status.counts.near_misses += 1

    def _incident(self, incident: Incident) -> None:
        counts = self.status.counts
        identity, known = self._same(incident)
        if identity != incident.id:
            self.ledger.same(incident.id, identity)
        version = (len(incident.reports) + incident.lines[1], incident.fatal)
        if known is None:
            known = Known(incident.class_id, str(incident.phase), False)
            self.known[identity] = known
            for old in islice(reversed(self.known), RECENT, RECENT + 1):
                # thousands of them would be most of our memory
                self.known[old].reports = ends_of(self.known[old].reports)
            if len(self.known) > KNOWN:
                del self.known[next(iter(self.known))]
            counts.incidents[known.class_id, known.phase] += 1
        elif known.version == version or (known.fatal and not incident.fatal):
            return
        known.version, known.reports = version, known.reports | incident.reports
        if incident.fatal and not known.fatal:
            known.fatal = True
            counts.fatal[known.class_id] += 1
        shown = incident_document(incident) | {
            "id": identity,
            "class": known.class_id,
            "phase": known.phase,
        }
        if self._failed_at is not None and (metrics := self._before(self._failed_at)):
            shown["metrics_before"] = metrics
        if self._failed_at is not None:
            self.ledger.failed_while_scraped(identity, incident.engine, self.window_before(self._failed_at))
        self.dirty[identity] = shown
        self.news.append(shown)
        self.urgent = True
        if len(self.dirty) > _UNSAVED:
            del self.dirty[next(iter(self.dirty))]
        self._show_incident(identity, shown)
        when = incident.time.timestamp() if incident.time else self._now().timestamp()
        facts = incident.facts
        before = self.status.last.get(known.class_id)
        if before is None or before.timestamp <= when:
            self.status.last[known.class_id] = LastIncident(
                when,
                whole(facts.get("tried_bytes")),
                whole(facts.get("free_bytes")),
                whole(facts.get("step_tokens")),
                whole(facts.get("max_prompt_tokens")),
                _number(facts.get("kv_cache_usage")),
                _BANDS[str(incident.confidence)],
            )
            budget = incident.advice.numbers.get("recommended_max_num_batched_tokens")
            if budget is not None:
                self.status.recommended_budget = budget

    def _show_incident(self, identity: str, shown: dict[str, object]) -> None:
        """Newest first; one that is completed stays where it is."""
        incidents = self.status.incidents
        for at, one in enumerate(incidents):
            if one["id"] == identity:
                for name in one.keys() & {"metrics_before"} - shown.keys():
                    shown[name] = one[name]  # read again after a restart: the ring is gone
                incidents[at] = shown
                return
        incidents.insert(0, shown)
        del incidents[SHOWN_INCIDENTS:]

    def _same(self, incident: Incident) -> tuple[str, Known | None]:
        """Identity of the incident, and what was counted of it already.

        The first report may be another one on a second reading, when processes wrote at once and
        silences fell differently; a line reports one incident only.
        """
        if (known := self.known.get(incident.id)) is not None:
            return incident.id, known
        for identity, known in reversed(self.known.items()):
            if not known.reports.isdisjoint(incident.reports):
                return identity, known
        return incident.id, None

    def _refresh_lives(self) -> None:
        status, lives = self.status, self._history.lives
        for life in lives.all:
            # see _life_key
            key = (life.started.replace(microsecond=0),) if life.started else (life.line,)
            if self._once("life", *key):
                status.counts.engine_starts += 1
            if life.fingerprint["info"] and life.fingerprint["error"] and self._once("fingerprint", *key):
                form = "full" if life.fingerprint["warn"] else "without_warn"
                status.counts.fingerprints[form] += 1
            self._show_life(life)
        status.life = lives.all[-1] if lives.all else None
        status.previous = lives.previous
        if status.life is None:
            return
        status.engine_start_timestamp = status.life.started.timestamp() if status.life.started else None
        status.largest_step_tokens = status.life.largest_step or None
        if status.previous is not None and status.engine_start_timestamp is not None:
            for name, _, _ in changed(status.previous, status.life):
                status.setting_changed[name] = status.engine_start_timestamp

    def _show_life(self, life: Life) -> None:
        shown = life_document(life) | {"index": life.index}
        engines = self.status.engines
        for at in range(len(engines) - 1, -1, -1):
            if engines[at]["index"] == life.index:
                engines[at] = shown
                return
        engines.append(shown)
        del engines[:-_SHOWN_LIVES]

    def mark_life(self, kind: str) -> None:
        """Remember ``kind`` of the current life, also for a later process."""
        if (key := self._life_key()) is not None:
            self._once(kind, *key)

    def life_marked(self, kind: str) -> bool:
        """Whether ``mark_life`` was called for the current life, also by a former process."""
        key = self._life_key()
        return key is not None and f"{kind}:{short_hash(*key)}" in self.events

    def _life_key(self) -> tuple[object, ...] | None:
        life = self.status.life
        if life is None:
            return None
        # cut to a second, as its first record may be read in two pieces
        return (life.started.replace(microsecond=0),) if life.started else (life.line,)

    def _once(self, kind: str, *parts: object) -> bool:
        """Whether this is seen for the first time, also by a former process."""
        key = f"{kind}:{short_hash(*parts)}"
        if key in self.events:
            return False
        when = self._now().timestamp()
        self.events[key] = self.new_events[key] = when
        if len(self.events) > KNOWN:
            # there may be any number of near misses in one life, and its start must not be forgotten
            near = (one for one in self.events if one.startswith(_NEAR_MISS))
            del self.events[next(near, next(iter(self.events)))]
        if len(self.new_events) > KNOWN:
            del self.new_events[next(iter(self.new_events))]
        self.urgent = True
        return True


def ends_of(reports: Iterable[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """The last of the lines in each stream."""
    last: dict[str, int] = {}
    for stream, line in reports:
        last[stream] = max(line, last.get(stream, 0))
    return frozenset(last.items())


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
