"""Lives of a server: where one begins and ends, and what its start-up lines said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ..records import Dump, Failure, Life, LifeMark, MemoryParts, Record, Settings, Signal, Traffic

_DEAD = ("dead", "stopped")


def version_number(version: object) -> float | None:
    """``0.32.0`` -> 32.0 and ``0.10.2`` -> 10.02; ``1.2.0`` -> 102.0. None for a development build."""
    match = re.match(r"v?(\d{1,15}(?!\d))\.(\d{1,15}(?!\d))(?:\.(\d{1,15}(?!\d)))?", str(version))
    if match is None or (match[1] == "0" and match[2] in ("0", "1") and "dev" in str(version)):
        return None
    return int(match[1]) * 100 + int(match[2]) + int(match[3] or 0) / 100


class Lives:
    """Follows one server through its restarts. Feed it every signal, in order."""

    def __init__(self) -> None:
        self.all: list[Life] = []
        self._engines: set[str] = set()
        self._progress: list[tuple[str, Record]] = []
        self._stop_asked = False
        self._failed = False
        self._begun = 0
        self.line = 0
        """Line of the record being taken in."""

    @property
    def current(self) -> Life:
        """The life that is on; a log that begins in the middle has one without a start."""
        return self.all[-1] if self.all else self._begin(None)

    @property
    def previous(self) -> Life | None:
        """The life before the current one."""
        return self.all[-2] if len(self.all) > 1 else None

    def last_progress(self) -> tuple[str, Record] | None:
        """The latest start-up mark of this life: ``loading``, ``capturing``, …"""
        return self._progress[-1] if self._progress else None

    def apply(self, signal: Signal) -> None:
        """Take in what one signal says about the life."""
        match signal:
            case LifeMark():
                self._mark(signal)
            case Settings():
                self._settings(self.current, signal)
            case MemoryParts():
                self.current.memory.update(signal.values)
                if "weights_bytes" in signal.values:
                    self._progress.append(("loaded", signal.record))
                if {"kv_cache_bytes", "kv_cache_tokens", "num_gpu_blocks"} & signal.values.keys():
                    self._progress.append(("sized", signal.record))
            case Dump():
                version = signal.facts.get("vllm_version")
                if isinstance(version, str) and self.current.vllm_version is None:
                    self.current.vllm_version = version
            case Failure():
                if not self.all:
                    self._begin(None)
                self._failed = True
            case _:
                pass

    def traffic(self, traffic: Traffic) -> None:
        """Steps that succeeded show that the server serves, and how large they get."""
        if traffic.steps:
            life = self.current
            life.largest_step = max(life.largest_step, *(step.tokens for step in traffic.steps))
            if life.state == "starting":
                life.state = "serving"

    def died(self) -> None:
        """The engine of the current life is gone. A stop that was asked for stays a stop."""
        if self.current.state != "stopped" or not self._stop_asked:
            self.current.state = "dead"

    def forget(self, keep: int) -> None:
        """Drop all but the newest ``keep`` lives."""
        del self.all[:-keep]

    def snapshot(self) -> dict[str, object]:
        """What ``restore`` needs to go on from here, as plain JSON data."""
        return {
            "begun": self._begun,
            "engines": sorted(self._engines),
            "stop_asked": self._stop_asked,
            "failed": self._failed,
            "lives": [
                asdict(life) | {"started": life.started.isoformat() if life.started else None}
                for life in self.all[-2:]
            ],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``snapshot`` was taken."""
        self.all = [
            Life(**one | {"started": datetime.fromisoformat(one["started"]) if one["started"] else None})
            for one in saved["lives"]
        ]
        self._begun = saved["begun"]
        self._engines = set(saved["engines"])
        self._stop_asked = saved["stop_asked"]
        self._failed = saved.get("failed", False)

    def _begin(self, record: Record | None) -> Life:
        life = Life(index=self._begun, started=record.time if record else None, line=self.line)
        self._begun += 1
        self.all.append(life)
        self._engines.clear()
        self._progress.clear()
        self._stop_asked = self._failed = False
        return life

    def _mark(self, mark: LifeMark) -> None:
        kind, record = mark.kind, mark.record
        life = self.all[-1] if self.all else None
        if life is None or self._restarts(kind, record, life):
            life = self._begin(record if kind in ("start", "engine", "budget", "loading") else None)
        match kind:
            case "start" if record.head.startswith("non-default args"):
                life.args_seen = True
            case "engine":
                self._engines.add(_engine_name(record))
            case "budget":
                life.fingerprint["info"] = True
            case "memory_warning":
                life.fingerprint["warn"] = True
            case "listening" | "ready" if life.state == "starting":
                life.state = "serving"
            case "stop" if life.state != "dead":
                life.state, self._stop_asked = "stopped", True
            case "stopping" if life.state not in _DEAD:
                life.state = "stopped"
            case "sleep":
                life.asleep = True
            case "awake":
                life.asleep = False
            case _:
                pass
        if kind in ("loading", "capturing", "initialised"):
            self._progress.append((kind, record))

    def _restarts(self, kind: str, record: Record, life: Life) -> bool:
        """Whether this mark can only belong to a new life."""
        if kind == "start":
            return life.state != "starting" or bool(self._engines) or self._failed
        if kind in ("engine", "budget", "loading") and self._failed and self._from_the_middle(life):
            return True
        if kind == "engine":
            name = _engine_name(record)
            if life.state in _DEAD:
                return True
            # data parallel ranks, and ranks added while serving, have names of their own
            return name in self._engines or (
                life.state == "serving" and not self._engines and bool(life.settings)
            )
        if kind in ("budget", "loading"):
            return life.state in (*_DEAD, "serving") and record.file != "core_client.py"
        return False

    def _from_the_middle(self, life: Life) -> bool:
        """Whether nothing of the start of this life was in the log."""
        return life.started is None and not self._engines and not self._progress

    def _settings(self, life: Life, signal: Settings) -> None:
        for name, value in signal.values.items():
            if name == "vllm_version":
                life.vllm_version = str(value)
            elif name == "model":
                if life.model is None:
                    life.model = str(value)
            else:
                life.settings[name] = value


def _engine_name(record: Record) -> str:
    return record.process or "engine"


def memory_of(life: Life) -> dict[str, int]:
    """Start-up memory accounting in the contract's names, unknown parts left out.

    From vLLM 0.30 the logged "peak activation" includes the CUDA graph estimate; here it does not.
    """
    raw = life.memory
    parts: dict[str, int] = {
        name: raw[name]
        for name in (
            "weights_bytes", "peak_activation_bytes", "non_torch_bytes", "cuda_graph_bytes",
            "kv_cache_bytes", "kv_cache_tokens", "total_bytes",
        )
        if name in raw
    }  # fmt: skip
    logged = raw.get("logged_peak_activation_bytes")
    if logged is not None:
        version = version_number(life.vllm_version)
        estimate = raw.get("cuda_graph_estimate_bytes", 0)
        includes = version is not None and version >= 30
        parts["peak_activation_bytes"] = max(0, logged - estimate) if includes else logged
    if "weights_bytes" not in parts and "consumed_bytes" in raw and "non_torch_bytes" in parts:
        parts["weights_bytes"] = max(0, raw["consumed_bytes"] - parts["non_torch_bytes"])
    return parts


def step_limit(settings: Mapping[str, object]) -> int | None:
    """Tokens one step may hold: ``max_num_scheduled_tokens`` where set, else the budget."""
    scheduled = _positive(settings.get("max_num_scheduled_tokens"))
    return budget(settings) if scheduled is None else scheduled


def budget(settings: Mapping[str, object]) -> int | None:
    """``max_num_batched_tokens`` in force."""
    return _positive(settings.get("max_num_batched_tokens"))


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def settings_changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of settings that differ; one that is unknown in either is no change."""
    return sorted(name for name in before.keys() & after.keys() if before[name] != after[name])


def changed(before: Life, after: Life) -> Iterator[tuple[str, object, object]]:
    """Settings that differ between two lives, as (name, old, new); unknown ones are no change."""
    for name in settings_changed(before.settings, after.settings):
        yield name, before.settings[name], after.settings[name]
    if before.vllm_version and after.vllm_version and before.vllm_version != after.vllm_version:
        yield "vllm_version", before.vllm_version, after.vllm_version
