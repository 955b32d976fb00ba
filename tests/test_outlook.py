"""The whole way on synthetic servers: log lines and scrapes in, trigger, confirmation and risk out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from simulator import Moment, Server, Window, lifecycle, run

from exporter.analyze import Analysis, Reader
from exporter.diagnosis.history import History
from exporter.diagnosis.knowledge import builtin_classes
from exporter.diagnosis.ledger import KEPT_EVENTS, KEPT_LIVES, KEPT_WINDOWS, METRICS
from exporter.diagnosis.scraped import ScrapedWindows
from exporter.document import document
from exporter.follow import Follower
from exporter.metrics import make_registry
from exporter.report.text import report
from exporter.sources.stream import Chunk
from exporter.state import Store
from exporter.status import Status, TargetStatus
from exporter.vllm.exposition import parse

NOW = datetime(2026, 12, 1)
SEED = 1


def analysed(text: str) -> Analysis:
    """What ``analyze`` makes of a log."""
    history = History()
    reader = Reader(history, NOW)
    reader.feed(text.encode())
    reader.finish()
    history.finish()
    return Analysis(history, reader.lines, reader.bytes)


def outlook(text: str) -> dict[str, Any]:
    """Trigger, confirmation and risk of a log."""
    return document(analysed(text).history, 0, 0)


class Beside:
    """The sidecar without its files and sockets: what is in ``target.py``, driven by hand."""

    def __init__(self, store: Store | None = None) -> None:
        self.status = TargetStatus("vllm")
        self.follower = Follower(self.status, builtin_classes(), lambda: NOW)
        if store is not None:
            store.load(self.follower)
        self.windows = ScrapedWindows(self.follower.ledger)
        self.follower.window_before = self.windows.window_before
        self.given = 0

    def see(self, moments: Iterable[Moment]) -> Beside:
        """Let it read and scrape."""
        for moment in moments:
            if moment.log:
                self.given += 1
                chunk = Chunk("one", moment.log.encode(), f'{{"at": {self.given}}}')
                self.follower.take("vllm.log", chunk, moment.at)
            self.tick(12)
            if moment.exposition is not None and self.status.life is not None:
                self.windows.take(moment.at, parse(moment.exposition.encode()), self.status.life.index)
        self.tick(60)
        return self

    def tick(self, times: int) -> None:
        """Let tenths of a second go by."""
        for _ in range(times):
            self.follower.tick()


# --- prompt length or request rate? ---------------------------------------------------------


@pytest.mark.parametrize(("truth", "verdict"), [("length", "supports"), ("rate", "contradicts")])
def test_the_truth_is_found_from_the_log_alone(truth: str, verdict: str) -> None:
    """Three deaths with dumps among iteration lines tell length from rate."""
    text = "".join(moment.log for moment in run(truth, 3, SEED))
    trigger = outlook(text)["trigger"]
    assert trigger["verdict"] == verdict, trigger
    assert (trigger["events"], trigger["effective_events"]) == (3, 3)
    assert trigger["control_windows"] >= 15
    assert trigger["exposure_source"] == "dump"


def test_the_truth_is_found_from_scrapes() -> None:
    """Without iteration lines, windows between scrapes are what dumps are compared with."""
    beside = Beside().see(run("length", 3, SEED, iterations=False))
    trigger = beside.status.trigger
    assert trigger is not None
    assert trigger["verdict"] == "supports", trigger
    assert trigger["exposure_source"] == "dump"
    assert len(beside.follower.ledger.windows[METRICS]) > 800


def test_deaths_without_a_reason_support_nothing() -> None:
    """Where any window may kill, failures do not follow prompt length."""
    text = "".join(moment.log for moment in run("none", 3, SEED))
    assert outlook(text)["trigger"]["verdict"] in ("mixed", "contradicts", "insufficient")


def test_one_failure_without_a_dump_is_not_enough() -> None:
    """One event whose step nobody logged: text, JSON and metrics say that it does not decide anything."""
    server = Server()
    text = server.start() + "".join(server.serve(Window((900, 1200))) for _ in range(40))
    death = server.die(16_000, 2)
    text += "".join(line for line in death.splitlines(keepends=True) if "dump_input" not in line)
    analysis = analysed(text)
    assert document(analysis.history, 0, 0)["trigger"]["verdict"] == "insufficient"  # type: ignore[index]
    assert "(insufficient): Not enough evidence" in report(analysis)
    beside = Beside().see([Moment(server.now.timestamp(), text, None)])
    assert exposed(beside.status)['vllm_oom_trigger_verdict{verdict="insufficient"}'] == 1


# --- is it fixed? ---------------------------------------------------------------------------

BUDGET = "max_num_batched_tokens"


def test_a_lower_budget_that_survives_is_confirmed() -> None:
    """Healthy at 8192, two deaths at 16384, enough long prompts at 2048."""
    text = lifecycle(({BUDGET: 8192}, 8, 0), ({BUDGET: 16384}, 8, 2), ({BUDGET: 2048}, 40, 0))
    found = outlook(text)["confirmation"]
    assert found["state"] == "confirmed", found
    assert (found["old_budget"], found["new_budget"], found["failures"]) == (16384, 2048, 2)


def test_few_prompts_are_counted_against_what_is_needed() -> None:
    """Two failures among ten long prompts need 35 without one: the 12 that came are told."""
    text = lifecycle(({BUDGET: 16384}, 8, 2), ({BUDGET: 2048}, 12, 0))
    found = outlook(text)["confirmation"]
    assert found["state"] == "accruing", found
    assert (found["old_exposures"], found["exposures"], found["exposures_needed"]) == (10, 12, 35)
    assert found["pvalue"] == pytest.approx((10 / 22) ** 2, rel=0.01)


def test_request_lines_tell_the_same_as_steps() -> None:
    """Up to 0.11.0 vLLM logs the ids of every prompt when it arrives, that of the killing one too."""
    server = Server(iterations=False, requests=True)
    text = lifecycle(({BUDGET: 16384}, 8, 2), ({BUDGET: 2048}, 12, 0), server=server)
    found = outlook(text)["confirmation"]
    assert found["state"] == "accruing", found
    assert (found["old_exposures"], found["exposures"], found["exposures_needed"]) == (10, 12, 35)


def test_a_failure_at_the_lower_budget_refutes() -> None:
    """Whatever survived before it."""
    text = lifecycle(({BUDGET: 16384}, 8, 2), ({BUDGET: 2048}, 40, 1))
    text += Server().start(**{BUDGET: 2048})
    found = outlook(text)["confirmation"]
    assert found["state"] == "refuted", found


@pytest.mark.parametrize("before", [{}, {"gpu_memory_utilization": 0.9}])
def test_what_else_changed_confounds(before: Mapping[str, object]) -> None:
    """A utilisation that was changed with the budget may be the cure; so may one that was left alone before."""
    text = lifecycle(
        ({BUDGET: 16384, **before}, 8, 2), ({BUDGET: 2048, "gpu_memory_utilization": 0.8}, 40, 0)
    )
    found = outlook(text)["confirmation"]
    assert found["state"] == "confounded", found
    assert found["also_changed"] == ["gpu_memory_utilization"]


def test_a_healthy_life_before_is_a_comparison_to_lean_on() -> None:
    """8192 served enough long prompts with nothing else changed, so the confounded 2048 does not matter."""
    text = lifecycle(
        ({BUDGET: 8192}, 60, 0), ({BUDGET: 16384}, 8, 2),
        ({BUDGET: 2048, "gpu_memory_utilization": 0.8}, 5, 0),
    )  # fmt: skip
    found = outlook(text)["confirmation"]
    assert found["state"] != "confounded", found
    assert found["new_budget"] == 8192


# --- the same everywhere --------------------------------------------------------------------


def exposed(status: TargetStatus) -> dict[str, float]:
    """Series and values of the exposition."""
    found = {}
    for metric in make_registry(Status([status])).collect():
        for sample in metric.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_text_json_and_metrics_say_the_same() -> None:
    """Of one log, followed and analysed."""
    text = lifecycle(({BUDGET: 16384}, 8, 2), ({BUDGET: 2048}, 12, 0))
    analysis = analysed(text)
    shown = document(analysis.history, 0, 0)
    beside = Beside().see([Moment(0.0, text, None)])
    series = exposed(beside.status)
    for name in ("trigger", "confirmation", "risk"):
        assert getattr(beside.status, name) == shown[name]
    confirmation: Any = shown["confirmation"]
    assert series['vllm_oom_confirmation{state="accruing"}'] == 1
    assert series["vllm_oom_confirmation_exposures"] == confirmation["exposures"]
    assert series["vllm_oom_confirmation_exposures_needed"] == confirmation["exposures_needed"]
    risk: Any = shown["risk"]
    assert series[f'vllm_oom_budget_risk{{state="{risk["state"]}"}}'] == 1
    printed = " ".join(report(analysis).split())
    for says in (confirmation["says"], *risk["reasons"]):
        assert says in printed


def test_long_prompts_are_counted_from_the_least_that_matters() -> None:
    """All prompts of at least the budget, as no shorter one failed; none twice."""
    text = lifecycle(({BUDGET: 2048}, 12, 0))
    beside = Beside().see([Moment(0.0, text, None)])
    assert exposed(beside.status)["vllm_oom_long_prompts_total"] == 12


# --- over restarts of the exporter ----------------------------------------------------------


def test_a_restart_changes_no_verdict(tmp_path: Path) -> None:
    """Stopped and started again after every tenth piece of log, it says in the end what it would have said.

    What only ``/metrics`` tells between two processes is lost, so nothing is scraped here.
    """
    moments = [replace(one, exposition=None) for one in run("none", 2, SEED, windows=150)]
    whole = Beside().see(moments).status
    store = Store(tmp_path)
    store.open()
    beside = Beside(store)
    for at in range(0, len(moments), 10):
        given = beside.given
        beside = Beside(store)
        beside.given = given
        beside.see(moments[at : at + 10])
        store.save(beside.follower)
    assert beside.status.confirmation == whole.confirmation
    assert beside.status.risk == whole.risk
    assert beside.status.counts.long_prompts == whole.counts.long_prompts
    assert beside.status.trigger is not None
    assert whole.trigger is not None
    for name in ("verdict", "events", "effective_events", "control_windows"):
        assert beside.status.trigger[name] == whole.trigger[name]
    store.close()


def test_state_and_memory_stay_bounded(tmp_path: Path) -> None:
    """A month of windows, and lives and failures without end, take less than 2 MB."""
    store = Store(tmp_path)
    store.open()
    beside = Beside(store)
    ledger = beside.follower.ledger
    log = "".join(moment.log for moment in run("none", 8, SEED, windows=150))
    beside.see([Moment(0.0, log, None)])
    for number in range(30 * 86_400 // 15):
        ledger.window(8, 1e9 + 15 * number, 1234, 7)
        if number % 1000 == 0:
            store.save(beside.follower)
    store.save(beside.follower)
    assert len(ledger.windows[METRICS]) == KEPT_WINDOWS
    assert len(ledger.lives) <= KEPT_LIVES
    assert len(ledger.events) <= KEPT_EVENTS
    store.close()
    with closing(sqlite3.connect(store.path)) as db:
        db.execute("VACUUM")
        size = sum(
            len(json.dumps(row))
            for table in ("exposure", "window")
            for row in db.execute(f"SELECT * FROM {table}")  # noqa: S608
        )
    assert size < 2 << 20
