"""Keeps the exposures of one server while they happen, from its log and from its ``/metrics``.

What comes from the log follows the log's own clock and is the same on a second reading: it is
part of the checkpoint. What comes from ``/metrics`` exists once, so it is saved as it comes.
``trigger.py``, ``confirm.py`` and ``risk.py`` read what is here and keep nothing themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from ..records import Life, Step, Traffic
from .confirm import FULL
from .engine import budget, memory_of, settings_changed, step_limit
from .exposure import PROMPT_SOURCES, WINDOW_SECONDS, Failed, LifeExposure, Window
from .step_size import utilization
from .trigger import Event, Trigger, event, judge

KEPT_LIVES = 50
KEPT_EVENTS = 100
KEPT_WINDOWS = 4096
"""Of each kind: 17 hours of windows."""
_KEPT_FAILURES = 100
_KEPT_LENGTHS = 512  # different prompt lengths of one life; beyond it they are rounded down
WARM_UP_SECONDS = 60.0  # first requests compile and fill caches: not what follows
_CHUNKED = 0.98  # a step that a longer prompt fills is full, save what a block or a decode takes
_KEPT_CASES = 8
_ENOUGH = 60  # windows to choose 30 from
_DAY = 86_400.0
_BAND_SECONDS = 3 * 3600.0  # of the day, where windows of several days are compared

# What ``non-default args: {…}`` does not name was left as it is.
_DEFAULTS: Mapping[str, object] = {
    "max_num_scheduled_tokens": None, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": None,
    "max_num_seqs": None, "cpu_offload_gb": None, "quantization": None, "enable_lora": None,
    "speculative_decoding": False, "kv_connector": False,
}  # fmt: skip

STEPS, REQUESTS, METRICS = "steps", "requests", "metrics"
KINDS = (STEPS, REQUESTS, METRICS)

# Classes whose failure may follow what a step holds. A killed process, a failed transfer or a
# neighbour on the device do not ask for a comparison of prompts.
STEP_CLASSES = frozenset(
    {
        "prefill_budget", "context_workspace", "moe_workspace", "prompt_logprobs", "sampler", "spec_decode",
        "fragmentation", "static_overcommit", "memory_growth", "unknown",
    }
)  # fmt: skip


@dataclass(slots=True)
class _Open:
    """The window that is being filled: its number on the clock, and the highest of what it saw."""

    slot: int
    life: int
    length: float = 0.0
    rate: float = 0.0


@dataclass(slots=True)
class _Prefill:
    """Steps in a row that one prompt may have filled.

    Their prompt tokens, and the most requests of a step.
    """

    tokens: int = 0
    requests: int = 0


class Ledger:
    """Feed it what ``History`` and ``Target`` see, in order. Bounded, whatever comes."""

    def __init__(self) -> None:
        self.lives: list[LifeExposure] = []
        self.windows: dict[str, deque[Window]] = {kind: deque(maxlen=KEPT_WINDOWS) for kind in KINDS}
        self.new_windows: list[tuple[str, Window]] = []
        """Complete since the caller last cleared it, so that each is saved once."""
        self.events: dict[str, Event] = {}
        self.events_changed = 0
        self.changed = 0
        """Grows with everything that a verdict may depend on."""
        self._verdict: tuple[int, Trigger] | None = None
        self._open: dict[str, _Open] = {}
        self._prefill = _Prefill()
        self._served_at: float | None = None
        self._recent: dict[str, deque[tuple[float, float, float]]] = {STEPS: deque(), REQUESTS: deque()}
        self._cases: dict[str, dict[str, tuple[float, float] | None]] = {}
        self._settings_of: dict[int, dict[str, object]] = {}  # of lives, as /metrics says

    # --- from the log ---------------------------------------------------------------------------

    def life(self, life: Life) -> LifeExposure:
        """The entry of ``life``, brought up to date with what its log has said so far."""
        one = self._entry(life.index)
        if one is None:
            one = LifeExposure(life.index, life.started)
            if self.lives and life.index < self.lives[-1].index:
                return one  # long put together with others, or forgotten
            self.lives.append(one)
            self._prefill, self._served_at = _Prefill(), None
            for recent in self._recent.values():
                recent.clear()
            self.changed += 1
            self._make_room()
        one.served = one.served or life.state == "serving"
        named = {"vllm_version": life.vllm_version, "model": life.model}
        one.settings = {
            **(_unset(life) if life.args_seen else {}),
            **self._settings_of.get(life.index, {}),
            **life.settings,
            **{name: value for name, value in named.items() if value is not None},
        }
        one.started = life.started
        one.near_misses, one.largest_step = life.near_misses, life.largest_step
        one.kv_cache_bytes = memory_of(life).get("kv_cache_bytes")
        return one

    def traffic(self, life: Life, traffic: Traffic, time: datetime | None) -> None:
        """Take in what one second of the log says of requests and steps."""
        one = self.life(life)
        longest, most = self._steps(one, traffic.steps, step_limit(life.settings))
        for length in traffic.prompts:
            _count(one.prompts.setdefault("requests", {}), length)
        self.changed += bool(traffic.steps or traffic.prompts)
        if time is None:
            return
        at = time.timestamp()
        if self._served_at is None:
            self._served_at = at
        if traffic.steps:
            self._fill(STEPS, one, at, longest, most)
        if traffic.prompts or (traffic.arrivals and self._recent[REQUESTS]):
            self._fill(REQUESTS, one, at, max(traffic.prompts, default=0), traffic.arrivals)

    def failed(self, life: Life, failed: Failed, running: int | None) -> None:
        """An incident settled, or became more complete. ``running``: requests in the failing step."""
        one = self.life(life)
        known = _failure(one, failed.incident)
        if failed == known:
            return
        if known is not None:
            one.failures[one.failures.index(known)] = failed
        elif len(one.failures) < _KEPT_FAILURES:
            one.failures.append(failed)
        self.changed += 1
        if failed.phase == "serving" and failed.class_id in STEP_CLASSES:
            self._compare(one, failed, running)

    def same(self, incident: str, as_before: str) -> None:
        """An incident is one that was known by another identity: nothing is compared twice."""
        for one in self.lives:
            if any(f.incident == as_before for f in one.failures):
                one.failures = [f for f in one.failures if f.incident != incident]
            one.failures = [
                replace(f, incident=as_before) if f.incident == incident else f for f in one.failures
            ]
        if (found := self.events.pop(incident, None)) is not None:
            self.events.setdefault(as_before, replace(found, incident=as_before))
            self.events_changed += 1

    # --- from /metrics ----------------------------------------------------------------------------

    def settings_of(self, life: int, settings: Mapping[str, object]) -> None:
        """Settings that ``vllm:cache_config_info`` names; those of the log are preferred."""
        if self._settings_of.get(life) == settings:
            return
        self._settings_of[life] = dict(settings)
        while len(self._settings_of) > KEPT_LIVES:
            del self._settings_of[min(self._settings_of)]
        if (one := self._entry(life)) is not None:
            one.settings = {**settings, **one.settings}

    def finished(self, life: int, lengths: Mapping[int, float]) -> None:
        """Requests that finished, by the smallest length of their bucket, empty buckets too."""
        if (one := self._entry(life)) is None:
            return
        counts = one.prompts.setdefault("metrics", {})
        for length, count in lengths.items():
            counts[length] = counts.get(length, 0.0) + count
        self.changed += any(lengths.values())

    def window(self, life: int, end: float, length: float | None, rate: float | None) -> None:
        """A window between two scrapes is complete."""
        self._keep(METRICS, Window(end, life, length, rate))

    def failed_while_scraped(self, incident: str, life: int, seen: tuple[float | None, float | None]) -> None:
        """What scrapes say of an incident that the log alone can't compare with more.

        ``seen``: longest bucket and arrivals of the window that ended with the last scrape before it.
        """
        one = self._entry(life)
        failed = _failure(one, incident) if one else None
        if one is None or failed is None or failed.class_id not in STEP_CLASSES:
            return
        # The bucket of the longest prompt is all that scrapes know of a window; the dump's prompt is
        # put into the same buckets, so that both were measured with one rule.
        at = failed.time.timestamp() if failed.time else None
        pool, lost = self._pool(METRICS, one, None)
        edges = sorted(one.prompts.get("metrics", {}))
        longest, rate = seen
        case: float | None = None
        if failed.longest_prompt is not None and edges:
            case = float(max((edge for edge in edges if edge <= failed.longest_prompt), default=0))
            case = max(case, longest or 0.0)
        source = "dump" if case is not None else "metrics"
        found = event(failed, life, at, case, rate, source, pool, lost)
        known = self.events.get(incident)
        if known is None or _controls(found) > _controls(known):
            self._remember(found)

    def lose_window(self, life: int) -> None:
        """A window could not be compared: a scrape was missing, or vLLM restarted in it."""
        if (one := self._entry(life)) is not None:
            one.lost_windows += 1

    def probed(self, life: int, full_steps: int) -> None:
        """A probe of that life finished: so many full steps must have been scheduled, and succeeded."""
        if (one := self._entry(life)) is not None:
            one.probed_steps = full_steps
            self.changed += 1

    # --- results ----------------------------------------------------------------------------------

    def trigger(self) -> Trigger:
        """The verdict over every event that is kept."""
        if self._verdict is None or self._verdict[0] != self.events_changed:
            self._verdict = self.events_changed, judge(list(self.events.values()))
        return self._verdict[1]

    def long_prompt_tokens(self) -> int | None:
        """From how many tokens a prompt counts as long: as the smallest that failed, or as fills a step now."""
        known = [f.longest_prompt or f.step_tokens for one in self.lives for f in one.failures
                 if f.class_id == "prefill_budget" and f.phase == "serving"]  # fmt: skip
        now = step_limit(self.lives[-1].settings) if self.lives else None
        candidates = [one for one in (*known, now) if one]
        return min(candidates, default=None)

    def good_budget(self, life: Life) -> int | None:
        """The prefill budget of the latest life before ``life`` that had a smaller one and did not fail."""
        now = budget(life.settings)
        if now is None:
            return None
        known = (
            budget(one.settings)
            for one in reversed(self.lives)
            if one.index < life.index and one.served and not one.failures
        )
        return next((one for one in known if one is not None and one < now), None)

    def long_prompts(self) -> tuple[int, str, int, float] | None:
        """Life, source, threshold, and how many long prompts that source saw in the life."""
        threshold = self.long_prompt_tokens()
        if threshold is None or not self.lives:
            return None
        one = self.lives[-1]
        source = next((name for name in PROMPT_SOURCES if one.prompts.get(name)), None)
        return None if source is None else (one.index, source, threshold, one.at_least(source, threshold))

    # --- going on after a restart -----------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """What was learned from the log, as plain JSON data. Windows and events are kept by the caller."""
        return {
            "lives": [_life_plain(one) for one in self.lives],
            "open": {kind: asdict(one) for kind, one in self._open.items()},
            "recent": {kind: list(seen) for kind, seen in self._recent.items()},
            "prefill": asdict(self._prefill),
            "served_at": self._served_at,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``snapshot`` was taken. Raises on anything that is none."""
        self.lives = [_life_of(one) for one in saved["lives"]]
        self._open = {kind: _Open(**one) for kind, one in saved["open"].items()}
        self._recent = {
            kind: deque((float(at), float(length), float(rate)) for at, length, rate in saved["recent"][kind])
            for kind in (STEPS, REQUESTS)
        }
        self._prefill = _Prefill(**saved["prefill"])
        self._served_at = saved["served_at"]

    def scraped(self) -> dict[str, object]:
        """What came from ``/metrics`` and is nowhere else, as plain JSON data."""
        return {
            "prompts": {
                str(one.index): {str(k): v for k, v in one.prompts["metrics"].items()}
                for one in self.lives
                if "metrics" in one.prompts
            },
            "settings": {str(life): one for life, one in self._settings_of.items()},
            "probed": {str(one.index): one.probed_steps for one in self.lives if one.probed_steps},
        }

    def restore_scraped(self, saved: Mapping[str, Any]) -> None:
        """Go on with what ``scraped`` gave; call it after ``restore``. Raises on anything that is none."""
        for index, lengths in saved["prompts"].items():
            self._restored(int(index)).prompts["metrics"] = {int(k): float(v) for k, v in lengths.items()}
        self._settings_of = {int(life): dict(one) for life, one in saved["settings"].items()}
        for index, steps in saved.get("probed", {}).items():
            self._restored(int(index)).probed_steps = int(steps)

    def _restored(self, life: int) -> LifeExposure:
        one = self._entry(life)
        if one is None:  # its lines are behind the checkpoint: they are read again
            one = LifeExposure(life)
            self.lives.append(one)
            self.lives.sort(key=lambda o: o.index)
        return one

    def restore_windows(self, windows: Iterable[tuple[str, Window]]) -> None:
        """Windows that were saved, oldest first; those behind the checkpoint come again by themselves."""
        for kind, window in windows:
            opened = self._open.get(kind)
            if kind == METRICS or (opened is not None and window.end <= opened.slot * WINDOW_SECONDS):
                self.windows[kind].append(window)

    # --- inside -----------------------------------------------------------------------------------

    def _entry(self, index: int) -> LifeExposure | None:
        return next((one for one in reversed(self.lives) if one.index == index), None)

    def _steps(self, one: LifeExposure, steps: tuple[Step, ...], limit: int | None) -> tuple[int, int]:
        """Count steps and the prompts in them; the tokens of the largest step and the most requests of one.

        Chunks are put together: a step that is full is followed by the rest of its prompt.
        ``Iteration(3): 1 context requests, 2048 context tokens, …`` eight times is one prompt of
        16,384 tokens. Where steps hold several prompts, one of the mean length is counted: too few
        rather than too many, before and after a change alike. One loop, as backlogs have millions.
        """
        if not steps:
            return 0, 0
        counts = one.prompts.setdefault("iteration", {})
        full, chunked = (FULL * limit, _CHUNKED * limit) if limit else (math.inf, math.inf)
        tokens, requests, largest, most = self._prefill.tokens, self._prefill.requests, 0, 0
        for prefilling, context, generating, generated in steps:
            size = context + generated
            largest = max(largest, size)
            most = max(most, prefilling + generating)
            if size >= full:
                one.full_steps += 1
            if context:
                tokens += context
                requests = max(requests, prefilling)
                if size >= chunked:
                    continue
            elif not tokens:
                continue
            length = tokens // (requests or 1)
            if length in counts:
                counts[length] += 1
            else:
                _count(counts, length)
            tokens = requests = 0
        one.steps += len(steps)
        self._prefill = _Prefill(tokens, requests)
        return largest, most

    def _fill(self, kind: str, one: LifeExposure, at: float, length: float, rate: float) -> None:
        recent = self._recent[kind]
        recent.append((at, length, rate))
        while recent[0][0] <= at - WINDOW_SECONDS:
            recent.popleft()
        slot = int(at // WINDOW_SECONDS)
        opened = self._open.get(kind)
        if opened is not None and (opened.slot < slot or opened.life != one.index):
            begin = opened.slot * WINDOW_SECONDS
            warm = self._served_at is not None and begin >= self._served_at + WARM_UP_SECONDS
            if opened.life == one.index and warm:
                self._keep(kind, Window(begin + WINDOW_SECONDS, opened.life, opened.length, opened.rate))
            else:
                one.lost_windows += 1
            opened = None
        if opened is None:
            opened = self._open[kind] = _Open(slot, one.index)
        opened.length = max(opened.length, length)
        opened.rate = opened.rate + rate if kind == REQUESTS else max(opened.rate, rate)

    def _window_before(self, kind: str, at: float | None) -> tuple[float, float] | None:
        """Length and rate of the seconds before a failure: what windows hold, a case must hold."""
        seen = [one for one in self._recent[kind] if at is None or at - WINDOW_SECONDS < one[0] <= at]
        if not seen:
            return None
        rates = [rate for *_, rate in seen]
        return max(length for _, length, _ in seen), sum(rates) if kind == REQUESTS else max(rates)

    def _keep(self, kind: str, window: Window) -> None:
        self.windows[kind].append(window)
        self.new_windows.append((kind, window))
        del self.new_windows[:-KEPT_WINDOWS]
        self.changed += 1

    def _pool(self, kind: str, one: LifeExposure, at: float | None) -> tuple[list[Window], int]:
        """Windows before ``at`` of lives with the same settings, and how many of theirs were lost.

        Of several days only those of the same hours: nights are not days.
        """
        lives = [other for other in self.lives if not settings_changed(other.settings, one.settings)]
        same = {other.index for other in lives}
        pool = [w for w in self.windows[kind] if w.life in same and (at is None or w.end <= at)]
        if pool and pool[-1].end - pool[0].end > _DAY:
            now = pool[-1].end
            near = [w for w in pool if min((now - w.end) % _DAY, (w.end - now) % _DAY) <= _BAND_SECONDS]
            pool = near if len(near) >= _ENOUGH else pool
        return pool, sum(other.lost_windows for other in lives)

    def _compare(self, one: LifeExposure, failed: Failed, running: int | None) -> None:
        """Compare the failing step with windows of the log, of whichever kind there are most."""
        at = failed.time.timestamp() if failed.time else None
        pools = {kind: self._pool(kind, one, at) for kind in (STEPS, REQUESTS)}
        kind = max(pools, key=lambda name: len(pools[name][0]))
        # once: when more becomes known of the failure, the next life may have begun
        before = self._cases.setdefault(failed.incident, {k: self._window_before(k, at) for k in pools})[kind]
        while len(self._cases) > _KEPT_CASES:
            del self._cases[next(iter(self._cases))]
        dumped = failed.step_tokens if kind == STEPS else failed.longest_prompt
        case, rate, source = _most(dumped), None, "dump"
        if before is not None:
            longest, rate = before
            # requests are logged before they kill; a step that kills is not
            case = max(case or 0.0, longest) if case is not None or kind == REQUESTS else None
        if kind == STEPS and running is not None:
            rate = max(rate or 0.0, float(running))
        if dumped is None:
            source = "iteration" if kind == STEPS else "requests"
        self._remember(event(failed, one.index, at, case, rate, source, *pools[kind]))

    def _remember(self, one: Event) -> None:
        self.events.pop(one.incident, None)
        self.events[one.incident] = one
        while len(self.events) > KEPT_EVENTS:
            del self.events[next(iter(self.events))]
        self.changed += 1
        self.events_changed += 1

    def _make_room(self) -> None:
        """Put old lives of the same settings together before any are forgotten."""
        while len(self.lives) > KEPT_LIVES:
            old = self.lives[: KEPT_LIVES // 2]
            for at, one in enumerate(old):
                twin = next((o for o in old[at + 1 :] if o.settings == one.settings), None)
                if twin is not None:
                    self.lives[at] = _merged(one, twin)
                    self.lives.remove(twin)
                    break
            else:
                del self.lives[0]


def _failure(one: LifeExposure, incident: str) -> Failed | None:
    return next((f for f in one.failures if f.incident == incident), None)


def _most(value: int | None) -> float | None:
    return None if value is None else float(value)


def _unset(life: Life) -> dict[str, object]:
    default = utilization(life)
    return dict(_DEFAULTS) if default is None else {**_DEFAULTS, "gpu_memory_utilization": default}


def _controls(one: Event) -> int:
    return max(len(part.controls) if part else 0 for part in (one.length, one.rate))


def _merged(one: LifeExposure, other: LifeExposure) -> LifeExposure:
    prompts: dict[str, dict[int, float]] = {}
    for source in one.prompts.keys() | other.prompts.keys():
        first, second = one.prompts.get(source, {}), other.prompts.get(source, {})
        prompts[source] = {
            k: first.get(k, 0.0) + second.get(k, 0.0) for k in sorted(first.keys() | second.keys())
        }
    return replace(
        one,
        served=one.served or other.served,
        prompts=prompts,
        steps=one.steps + other.steps,
        full_steps=one.full_steps + other.full_steps,
        probed_steps=one.probed_steps + other.probed_steps,
        largest_step=max(one.largest_step, other.largest_step),
        near_misses=one.near_misses + other.near_misses,
        failures=[*one.failures, *other.failures][-_KEPT_FAILURES:],
    )


def _count(counts: dict[int, float], length: int) -> None:
    """One more prompt of ``length``; where there are too many lengths they are rounded down.

    To five binary digits: two of a thousand lengths are never more than 1/16 apart.
    """
    if length in counts:
        counts[length] += 1
        return
    if len(counts) >= _KEPT_LENGTHS:
        length -= length & (1 << max(0, length.bit_length() - 5)) - 1
    counts[length] = counts.get(length, 0.0) + 1


def _life_plain(one: LifeExposure) -> dict[str, object]:
    plain = asdict(one)
    plain["started"] = one.started.isoformat() if one.started else None
    plain["prompts"] = {
        source: {str(length): count for length, count in counts.items()}
        for source, counts in one.prompts.items()
        if source != "metrics"
    }
    for failed in plain["failures"]:
        failed["time"] = failed["time"].isoformat() if failed["time"] else None
    return plain


def _life_of(raw: Mapping[str, Any]) -> LifeExposure:
    values = dict(raw)
    values["started"] = datetime.fromisoformat(raw["started"]) if raw["started"] else None
    values["prompts"] = {
        str(source): {int(length): float(count) for length, count in counts.items()}
        for source, counts in raw["prompts"].items()
    }
    values["failures"] = [
        Failed(
            **{
                **one,
                "time": datetime.fromisoformat(one["time"]) if one["time"] else None,
                "prompts": tuple(one["prompts"]),
            }
        )
        for one in raw["failures"]
    ]
    return LifeExposure(**values)
