from __future__ import annotations

import asyncio
import gc
import heapq
import random
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import trustme
from conftest import analyzed
from hypothesis import given
from hypothesis import strategies as st
from kubelet import BIRTH, SECOND, Kubelet, Run, stamp

from exporter.sources.framing import MAX_LINE
from exporter.sources.kube_client import (
    Clock,
    Ending,
    Instance,
    KubeClient,
    KubeError,
    in_cluster,
    instances,
    own_pod,
    vllm_container,
)
from exporter.sources.kube_position import KEEP, Cursor, Position, stamp_of
from exporter.sources.kubernetes import HOLD, KubernetesSource, open_source
from exporter.sources.stream import Chunk


class HandClock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._came = asyncio.Event()

    def now(self) -> float:
        """Seconds since nothing in particular."""
        return self.time

    async def sleep(self, seconds: float) -> None:
        """Return when the time has been moved so far; the hold after an answer passes by itself."""
        if seconds == HOLD:
            self.time += seconds
            return
        self.slept.append(seconds)
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, len(self.slept), future))
        self._came.set()
        self._came = asyncio.Event()
        await future

    async def advance(self, seconds: float) -> None:
        """Wait until somebody sleeps, then move the time on past ``seconds``, waking who is due."""
        async with asyncio.timeout(5):
            while not self._awake():
                await self._came.wait()
        self.time += seconds
        while self._sleepers and self._sleepers[0][0] <= self.time:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)

    def _awake(self) -> bool:
        self._sleepers = [one for one in self._sleepers if not one[2].done()]
        heapq.heapify(self._sleepers)
        return bool(self._sleepers)


class RushClock:
    """Time that runs two thousand times faster."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        """Seconds since nothing in particular."""
        return asyncio.get_running_loop().time() * 2000

    async def sleep(self, seconds: float) -> None:
        """Return ``seconds`` later, which is soon."""
        self.slept.append(seconds)
        await asyncio.sleep(seconds / 2000)


class Reading:
    """Runs a source in the background and collects what it gives."""

    def __init__(
        self,
        kubelet: Kubelet,
        clock: Clock,
        resume: Mapping[str, str] | None = None,
        container: str | None = None,
    ) -> None:
        client = KubeClient(kubelet.url, None, None, clock)
        self.source = KubernetesSource("ns", "pod", container, client, clock, random=lambda: 0.0)
        self.stats = self.source.stats
        self.chunks: list[Chunk] = []
        self._resume = resume or {}
        self._came = asyncio.Event()

    async def __aenter__(self) -> Reading:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(1):
                await self._task

    async def _run(self) -> None:
        async for chunk in self.source.chunks(self._resume):
            self.chunks.append(chunk)
            self._came.set()
            self._came = asyncio.Event()

    def text(self, stream: str | None = None) -> bytes:
        """What came, of one stream or of all."""
        return b"".join(one.data for one in self.chunks if stream in (None, one.stream))

    @property
    def tokens(self) -> dict[str, str]:
        """What a restart would go on from."""
        return {one.stream: one.token for one in self.chunks}

    @property
    def ended(self) -> list[str]:
        """Streams that were finished, in order."""
        return [one.stream for one in self.chunks if one.ended]

    async def until(self, size: int, seconds: float = 5) -> bytes:
        """Everything that came, once it is ``size`` bytes or more."""
        async with asyncio.timeout(seconds):
            while len(self.text()) < size:
                await self._came.wait()
        return self.text()

    async def until_ended(self, count: int = 1) -> None:
        """Return once ``count`` streams ended."""
        async with asyncio.timeout(5):
            while len(self.ended) < count:
                await self._came.wait()


async def until(condition: Any) -> None:
    """Let everything run on until something is so."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def said(run: Run) -> bytes:
    """What is added behind the log of a run that ended."""
    assert run.ended is not None
    at = run.ended["finishedAt"]
    return (
        f"{at}       Reason:       {run.ended['reason']}\n{at}       Exit Code:    {run.ended['exitCode']}\n"
    ).encode()


def whole(run: Run) -> bytes:
    """All that is delivered of a run."""
    return run.text + said(run) if run.ended else run.text


# --- following -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_reads_from_the_beginning_and_follows() -> None:
    """Every line comes as the API gives it, time in front, also those written later."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one", "two")
        async with Reading(kubelet, HandClock()) as reading:
            await reading.until(len(run.text))
            kubelet.write("three")
            assert await reading.until(len(run.text)) == run.text
            assert reading.chunks[0].data.startswith(stamp(BIRTH + 1000).encode() + b" one\n")
            assert {one.stream for one in reading.chunks} == {run.id}
            assert reading.ended == []
            assert reading.stats.opened
            assert reading.stats.problem is None
            assert kubelet.asked("log") == [{"container": "vllm", "timestamps": "true", "follow": "true"}]


@pytest.mark.asyncio
async def test_a_silent_log_is_no_problem() -> None:
    """A server that answers only with the first line is waited for, and asked again after a minute."""
    async with Kubelet() as kubelet:
        kubelet.start()
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            for _ in range(12):
                before = len(kubelet.asked("pod"))
                await clock.advance(5)
                await kubelet.until_asked("pod", before + 1)
            await kubelet.until_asked("log", 2)
            assert reading.stats.opened
            assert reading.stats.read_errors == 0
            kubelet.write("at last")
            assert await reading.until(1) == kubelet.runs[0].text
            assert reading.stats.rotations == {"rename": 0, "truncate": 0, "reopen": 1}


@pytest.mark.asyncio
async def test_waits_for_a_container_that_was_not_started() -> None:
    """Before the first run nothing is asked but the pod, and the source counts as opened."""
    async with Kubelet() as kubelet:
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await kubelet.until_asked("pod", 1)
            await until(lambda: reading.stats.opened)
            kubelet.start()
            kubelet.write("one")
            await clock.advance(5)
            assert await reading.until(1) == kubelet.runs[0].text


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [0, 1000, SECOND // 3, SECOND])
async def test_every_token_resumes_exactly_behind_its_chunk(step: int) -> None:
    """Whatever share of a second lines have in common, each token gives exactly the rest."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        async with Reading(kubelet, HandClock()) as reading:
            for n in range(20):
                kubelet.write(f"{n % 3} same", step=step)
                await reading.until(len(run.text))
        assert len(reading.chunks) == 20
        for at, chunk in enumerate(reading.chunks):
            rest = b"".join(one.data for one in reading.chunks[at + 1 :])
            async with Reading(kubelet, HandClock(), {chunk.stream: chunk.token}) as again:
                if rest:
                    assert await again.until(len(rest)) == rest
                else:
                    await kubelet.until_asked("log", len(kubelet.asked("log")) + 1)
        assert kubelet.asked("log")[-1]["sinceTime"].endswith("Z")


@pytest.mark.asyncio
async def test_a_life_of_ten_minutes() -> None:
    """A connection that is never silent is replaced after ten minutes, without a gap."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one")
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await reading.until(1)
            for n in range(120):
                asked = len(kubelet.asked("pod"))
                kubelet.write(f"line {n}")
                await reading.until(len(run.text))
                assert len(kubelet.asked("log")) == 1
                await clock.advance(5)
                await kubelet.until_asked("pod", asked + 1)
            await kubelet.until_asked("log", 2)
            kubelet.write("behind")
            assert await reading.until(len(run.text)) == run.text
            assert reading.stats.rotations["reopen"] == 0


@pytest.mark.asyncio
async def test_a_rotation_that_stops_following() -> None:
    """Lines that pile up unseen after a rotation come once the silence has lasted a minute."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one", "two")
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await reading.until(len(run.text))
            kubelet.rotate()
            kubelet.write("three", "four", step=0)
            for _ in range(12):
                before = len(kubelet.asked("pod"))
                await clock.advance(5)
                await kubelet.until_asked("pod", before + 1)
            assert await reading.until(len(run.text)) == run.text
            assert reading.stats.rotations["reopen"] == 1
            assert reading.stats.read_errors == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("proper", [True, False])
async def test_a_connection_cut_in_the_middle_of_a_line(proper: bool) -> None:
    """Half a line is not delivered; after the cut the line comes whole, once."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one", "two", "three")
        kubelet.cuts.append((len(run.text) - 3, proper))
        clock = RushClock()
        async with Reading(kubelet, clock) as reading:
            assert await reading.until(len(run.text)) == run.text
            assert reading.stats.read_errors == (0 if proper else 1)
            assert all(one.data.endswith(b"\n") for one in reading.chunks)
            await until(lambda: reading.stats.problem is None)


@pytest.mark.asyncio
async def test_never_more_than_two_connections() -> None:
    """The log and the pod are asked for at once, but nothing more."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        async with Reading(kubelet, RushClock()) as reading:
            for n in range(30):
                kubelet.write(f"line {n}")
                await reading.until(len(run.text))
            await kubelet.until_asked("log", 4)
        assert kubelet.most == 2


@pytest.mark.asyncio
async def test_who_reads_slowly_is_not_drowned() -> None:
    """While nobody takes chunks, little more than the socket holds is read from the server."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write(*(b"x" * 999 for _ in range(64_000)))
        clock = HandClock()
        client = KubeClient(kubelet.url, None, None, clock)
        chunks = KubernetesSource("ns", "pod", None, client, clock).chunks({})
        size, whole_size = len((await anext(chunks)).data), len(run.text)
        await until_still(kubelet)
        assert kubelet.sent < whole_size / 2
        while size < whole_size:
            size += len((await anext(chunks)).data)
        assert size == whole_size
        await chunks.aclose()


async def until_still(kubelet: Kubelet) -> None:
    """Return once the server could send nothing for a while."""
    sent = -1
    while sent != kubelet.sent:
        sent = kubelet.sent
        for _ in range(50):
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
@pytest.mark.parametrize("state", ["following", "unanswered", "backing off", "waiting"])
async def test_cancelling_ends_at_once(state: str) -> None:
    """Wherever the source waits, it is gone when cancelled, and so are its connections."""
    async with Kubelet() as kubelet:
        if state != "waiting":
            kubelet.start()
        if state == "following":
            kubelet.write("one")
        if state == "backing off":
            kubelet.refusals["log"].append((500, {}))
        clock = HandClock()
        reading = Reading(kubelet, clock)
        async with reading:
            await kubelet.until_asked("pod" if state == "waiting" else "log", 1)
            if state == "following":
                await reading.until(1)
            await until(lambda: clock.slept)
            begun = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - begun < 0.5
        await until(lambda: kubelet.now == 0)


@pytest.mark.asyncio
async def test_cancelling_at_any_step_leaves_nothing_open() -> None:
    """However far reading came, also while it cleans up, every connection is closed."""
    async with Kubelet() as kubelet:
        kubelet.start()
        kubelet.write("one")
        for steps in range(150):
            kubelet.cuts.append((70, steps % 2 == 0))
            async with Reading(kubelet, RushClock()):
                for _ in range(steps):
                    await asyncio.sleep(0)
        gc.collect()  # what was not closed warns now, and warnings are errors
        await until(lambda: kubelet.now == 0)


# --- runs ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_restart_finishes_the_old_run_before_the_new_one() -> None:
    """The rest of the old run comes from the previous log, then how it ended, then the new run."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one", "two")
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(len(old.text))
            kubelet.rotate(keep=True)  # so that the rest is left to the previous log
            kubelet.write("CUDA out of memory", "dead")
            kubelet.end()
            new = kubelet.start()
            kubelet.write("born")
            expected = whole(old) + new.text
            assert await reading.until(len(expected)) == expected
            assert reading.ended == [old.id]
            assert reading.text(new.id) == new.text
            finishing = [one for one in kubelet.asked("log") if "previous" in one]
            assert [one["sinceTime"] for one in finishing] == ["2026-11-30T16:26:45Z"] * len(finishing)
            assert finishing


@pytest.mark.asyncio
async def test_a_first_start_reads_the_run_before_too() -> None:
    """What ended before the exporter came is read from its beginning, and ended."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one")
        kubelet.end(code=0, reason="Completed")
        new = kubelet.start()
        kubelet.write("two")
        async with Reading(kubelet, RushClock()) as reading:
            expected = whole(old) + new.text
            assert await reading.until(len(expected)) == expected
            assert reading.ended == [old.id]


@pytest.mark.asyncio
@pytest.mark.parametrize("waiting", [True, False])
async def test_how_a_run_ended_is_said_once(waiting: bool) -> None:
    """An ended run is finished without a next one, and its token keeps it from coming again."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one")
        kubelet.end("OOMKilled", 137, waiting=waiting)
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until_ended()
            assert reading.text() == run.text + said(run)
            await kubelet.until_asked("pod", len(kubelet.asked("pod")) + 3)
            assert reading.text() == run.text + said(run)
        async with Reading(kubelet, RushClock(), reading.tokens) as again:
            new = kubelet.start()
            kubelet.write("two")
            assert await again.until(len(new.text)) == new.text


@pytest.mark.asyncio
async def test_a_dropped_token_of_an_ended_run_does_not_bring_it_back() -> None:
    """Where a later run was begun, the one before is done, whether or not its token was kept."""
    async with Kubelet() as kubelet:
        kubelet.start()
        kubelet.write("one")
        kubelet.end()
        new = kubelet.start()
        kubelet.write("two")
        async with Reading(kubelet, RushClock()) as reading:
            await until(lambda: new.id in reading.tokens)
        async with Reading(kubelet, RushClock(), {new.id: reading.tokens[new.id]}) as again:
            kubelet.write("three")
            assert await again.until(1) == new.lines[-1][1]


@pytest.mark.asyncio
async def test_a_killed_container_is_a_memory_incident() -> None:
    """The end of an OOMKilled run, as delivered, is classified; that of an ordinary one is not."""
    found = {}
    for reason, code in (("OOMKilled", 137), ("Error", 1), ("Completed", 0)):
        async with Kubelet() as kubelet:
            kubelet.start()
            kubelet.write(
                "(APIServer pid=1) INFO 11-30 16:26:46 [api_server.py:1977] vLLM API server version 0.32.0"
            )
            kubelet.end(reason, code)
            async with Reading(kubelet, RushClock()) as reading:
                await reading.until_ended()
                found[reason] = analyzed(reading.text())["incidents"]
    assert [(one["class"], one["time"]) for one in found["OOMKilled"]] == [
        ("host_memory", "2026-11-30T16:26:46Z")
    ]
    assert found["Error"] == found["Completed"] == []


@pytest.mark.asyncio
async def test_an_end_is_believed_only_twice() -> None:
    """An answer cut as if it was complete does not end a run early, nor does a last half line."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one", "two", "three")
        kubelet.write("no newline", end=b"")
        kubelet.end()
        kubelet.cuts.extend([(len(run.lines[0][1]) + 5, True), (5, True), (len(run.text) - 2, True)])
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until_ended()
            assert reading.text() == run.text + b"\n" + said(run)
            assert len(kubelet.asked("log")) == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("shown", ["running", "ended"])
async def test_lines_of_the_next_run_are_not_taken_for_this_ones(shown: str) -> None:
    """While the status lags behind, a restarted container's lines wait until it is known whose they are."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one")
        clock = RushClock()
        kubelet.time = clock.now
        async with Reading(kubelet, clock) as reading:
            await reading.until(1)
            kubelet.lag = 1.5 if shown == "running" else 0
            kubelet.end()
            kubelet.lag = 1.5
            new = kubelet.start()
            kubelet.write("two")
            await reading.until_ended()
            await reading.until(len(whole(old) + new.text))
            assert reading.text(old.id) == whole(old)
            assert reading.text(new.id) == new.text


@pytest.mark.asyncio
@pytest.mark.parametrize("lag", [0, 1.5])
async def test_a_restart_between_look_and_answer_is_noticed(lag: float) -> None:
    """An answer that turns out to be another run's is thrown away unread."""
    async with Kubelet() as kubelet:
        clock = RushClock()
        kubelet.time, kubelet.lag = clock.now, lag
        old = kubelet.start()
        kubelet.write("one")

        async def restart() -> None:
            kubelet.write("two")
            kubelet.end()
            kubelet.start()
            kubelet.write("three")

        kubelet.before_log = restart
        async with Reading(kubelet, clock) as reading:
            await until(lambda: len(reading.tokens) == 2)
            assert reading.text(old.id) == whole(old)
            assert reading.text(kubelet.runs[1].id) == kubelet.runs[1].text
            assert reading.stats.read_errors == 0


@pytest.mark.asyncio
async def test_a_request_that_was_under_way_during_a_restart_is_noticed() -> None:
    """Looks from before the answer began do not vouch for it."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one")
        arrive = asyncio.Event()

        async def hold() -> None:
            await arrive.wait()

        kubelet.before_log = hold
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await kubelet.until_asked("log", 1)
            await clock.advance(5)
            await kubelet.until_asked("pod", 2)
            await until(lambda: clock.slept == [5, 5])
            kubelet.end()
            new = kubelet.start()
            kubelet.write("two")
            arrive.set()
            while new.id not in reading.tokens:
                await clock.advance(1)
                await asyncio.sleep(0.005)
            assert reading.text(old.id) == whole(old)
            assert reading.text(new.id) == new.text


@pytest.mark.asyncio
async def test_a_status_that_is_away_for_a_while_ends_nothing() -> None:
    """Where the pod shows no run at all, the one that was read goes on once it is back."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one")
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(1)
            kubelet.rewrite = lambda pod: pod["status"].clear()
            await kubelet.until_asked("pod", len(kubelet.asked("pod")) + 4)
            kubelet.write("two")
            kubelet.rewrite = lambda _: None
            assert await reading.until(len(run.text)) == run.text
            assert reading.ended == []


@pytest.mark.asyncio
async def test_two_restarts_at_once_lose_the_end_but_nothing_else() -> None:
    """A run whose log is gone is ended and counted, and reading goes on with the next."""
    async with Kubelet() as kubelet:
        first = kubelet.start()
        kubelet.write("one")
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await reading.until(1)
            for text in ("two", "three"):
                kubelet.end()
                kubelet.start()
                kubelet.write(text)
            await until(lambda: reading.source._end.name == "EOF")  # and time stands still
            for _ in range(20):
                if len(reading.ended) > 1 and reading.text(kubelet.runs[2].id):
                    break
                await clock.advance(1)
                await asyncio.sleep(0.02)
            assert reading.ended == [first.id, kubelet.runs[1].id]
            assert reading.text(first.id) == first.text
            assert reading.text(kubelet.runs[1].id) == kubelet.runs[1].text + said(kubelet.runs[1])
            assert reading.text(kubelet.runs[2].id) == kubelet.runs[2].text
            assert reading.stats.read_errors == 1


@pytest.mark.asyncio
async def test_a_previous_log_that_was_deleted_holds_nothing_up() -> None:
    """After five refusals the old run is ended without the rest, and the new one is read."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one")
        kubelet.end("OOMKilled", 137)
        new = kubelet.start()
        kubelet.write("two")
        kubelet.refusals["log"].extend([(500, {})] * 5)
        clock = RushClock()
        async with Reading(kubelet, clock) as reading:
            expected = said(old) + new.text
            assert await reading.until(len(expected)) == expected
            assert reading.stats.read_errors == 5


@pytest.mark.asyncio
async def test_without_ids_runs_are_told_apart_by_their_count() -> None:
    """A status that names no container id gives pod, container and restart count instead."""
    async with Kubelet() as kubelet:
        kubelet.ids = False
        kubelet.start()
        kubelet.write("one")
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(1)
            kubelet.end(waiting=True)
            await reading.until_ended()
            kubelet.start()
            kubelet.write("two")
            await until(lambda: len(reading.tokens) == 2)
            assert list(reading.tokens) == ["u-1/vllm/0", "u-1/vllm/1"]
            assert reading.ended == ["u-1/vllm/0"]


# --- refusals ------------------------------------------------------------------------------

PROBLEMS = {
    ("pod", 401): "the token is not accepted (401); check that the service account exists and is mounted",
    ("pod", 403): "may not read pod ns/pod (403); grant the service account the verb get on pods",
    (
        "log",
        403,
    ): "may not read the log of pod ns/pod (403); grant the service account the verb get on pods/log",
    ("pod", 404): "pod ns/pod is not there (404); waiting for it",
    ("log", 404): "the log of pod ns/pod is not there (404); waiting for it",
    ("log", 410): "the log of pod ns/pod no longer reaches back so far (410); going on with what is there",
    ("log", 429): "the API server asks to slow down (429); waiting",
    ("pod", 429): "the API server asks to slow down (429); waiting",
    ("log", 500): "reading the log of pod ns/pod failed with status 500; trying again",
    ("pod", 503): "reading pod ns/pod failed with status 503; trying again",
    ("log", 302): "reading the log of pod ns/pod failed with status 302; trying again",
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "status"), PROBLEMS)
async def test_a_refusal_is_said_counted_and_got_over(kind: str, status: int) -> None:
    """Each refusal is one line that says what to do, and is taken back when it is over."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one")
        kubelet.refusals[kind].append((status, {"Location": "/elsewhere"}))
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await until(lambda: clock.slept and reading.stats.problem)
            assert reading.stats.problem == PROBLEMS[kind, status]
            assert reading.stats.read_errors == 1
            assert reading.stats.opened is False
            await clock.advance(1)
            assert await reading.until(1) == run.text
            await until(lambda: reading.stats.problem is None)
            assert reading.stats.read_errors == 1
            assert reading.stats.opened


@pytest.mark.asyncio
async def test_attempts_grow_apart_up_to_a_minute() -> None:
    """Failures in a row wait twice as long each time, at most a minute; success starts anew."""
    async with Kubelet() as kubelet:
        kubelet.start()
        kubelet.refusals["pod"].extend([(500, {})] * 8)
        clock = RushClock()
        async with Reading(kubelet, clock) as reading:
            kubelet.write("one")
            await reading.until(1)
            assert clock.slept[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
            kubelet.refusals["log"].append((500, {}))
            await until(lambda: reading.stats.read_errors == 9)
            await until(lambda: reading.stats.problem is None)
            assert clock.slept[8:].count(1) == 1


@pytest.mark.asyncio
async def test_the_server_decides_how_long_to_wait() -> None:
    """``Retry-After`` is honoured up to ten minutes, and nonsense in it is not."""
    async with Kubelet() as kubelet:
        kubelet.start()
        for after in ("7", "86400", "-1", "soon", "9" * 400):
            kubelet.refusals["pod"].append((429, {"Retry-After": after}))
        clock = RushClock()
        async with Reading(kubelet, clock) as reading:
            kubelet.write("one")
            await reading.until(1)
            assert clock.slept[:5] == [7, 600, 4, 8, 16]


@pytest.mark.asyncio
async def test_a_pod_that_is_unreadable_for_a_while_does_not_stop_its_log() -> None:
    """Looks that fail while the log is followed are counted, and lines go on coming."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write("one")
        clock = HandClock()
        async with Reading(kubelet, clock) as reading:
            await reading.until(1)
            kubelet.refusals["pod"].append((500, {}))
            await clock.advance(5)
            await until(lambda: reading.stats.problem is not None)
            kubelet.write("two")
            assert await reading.until(len(run.text)) == run.text
            await clock.advance(5)
            await until(lambda: reading.stats.problem is None)
            assert reading.stats.read_errors == 1
            assert len(kubelet.asked("log")) == 1


@pytest.mark.asyncio
async def test_a_time_that_is_gone_is_not_asked_for_again() -> None:
    """After 410 everything there is is asked for, and what was delivered is left out."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        kubelet.write(*(f"line {n}" for n in range(40)), step=SECOND // 3)
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(len(run.text))
        kubelet.write("new")
        kubelet.refusals["log"].append((410, {}))
        before = len(kubelet.asked("log"))
        async with Reading(kubelet, RushClock(), reading.tokens) as again:
            assert await again.until(1) == run.lines[-1][1]
        assert ["sinceTime" in one for one in kubelet.asked("log")[before : before + 2]] == [True, False]


@pytest.mark.asyncio
async def test_a_pod_that_comes_back_under_its_name_is_another_run() -> None:
    """A deleted pod is waited for; its successor is read from the beginning."""
    async with Kubelet() as kubelet:
        old = kubelet.start()
        kubelet.write("one")
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(1)
            kubelet.gone = True
            kubelet.end()
            await until(lambda: reading.stats.problem == PROBLEMS["pod", 404])
            kubelet.runs.clear()
            new = kubelet.start()
            new.id = "containerd://another"
            kubelet.write("two")
            kubelet.gone = False
            await until(lambda: reading.text(new.id) == new.text)
            assert reading.ended == [old.id]
            assert reading.text(old.id) == old.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body", ["", "[]", "{", "[" * 100_000, '{"status": {"containerStatuses": 7}}', "null"]
)
async def test_an_answer_that_is_no_pod_harms_nobody(body: str, aiohttp_server: Any) -> None:
    """Whatever is sent instead of a pod, the source says so or waits, and goes on."""
    from aiohttp import web

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = await aiohttp_server(app)
    clock = HandClock()
    client = KubeClient(str(server.make_url("")).rstrip("/"), None, None, clock)
    source = KubernetesSource("ns", "pod", "vllm", client, clock)
    task = asyncio.ensure_future(anext(source.chunks({})))
    await until(lambda: clock.slept)
    assert source.stats.problem == (
        None if "status" in body else "the answer for pod ns/pod is not JSON; is that the API server?"
    )
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_an_unreachable_server_is_one_line() -> None:
    """Where nobody listens, the problem names the server and is one line."""
    clock = HandClock()
    client = KubeClient("http://127.0.0.1:9", None, None, clock)
    with pytest.raises(
        KubeError, match=r"^cannot read from the API server at http://127\.0\.0\.1:9: "
    ) as caught:
        await client.pod("ns", "pod")
    assert "\n" not in str(caught.value)
    await client.close()


# --- long lines ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_line_without_end_comes_in_pieces() -> None:
    """Lines above the limit are never held whole, and a token within one resumes within it."""
    async with Kubelet() as kubelet:
        run = kubelet.start()
        rng = random.Random(7)  # noqa: S311
        kubelet.write("before", rng.randbytes(3 * MAX_LINE + 17).replace(b"\n", b"."), "after")
        kubelet.piece = 1 << 16
        async with Reading(kubelet, RushClock()) as reading:
            await reading.until(len(run.text))
            assert reading.text() == run.text
        assert max(len(one.data) for one in reading.chunks) <= MAX_LINE + (1 << 19)
        assert sum(not one.data.endswith(b"\n") for one in reading.chunks) >= 2
        kubelet.write("last")
        reading.chunks.append(Chunk(run.id, run.lines[-1][1], ""))
        for at in range(len(reading.chunks) - 1):
            rest = b"".join(one.data for one in reading.chunks[at + 1 :])
            resume = {run.id: reading.chunks[at].token}
            async with Reading(kubelet, RushClock(), resume) as again:
                assert await again.until(len(rest)) == rest


def test_a_line_that_was_begun_and_is_gone_gets_its_newline() -> None:
    """When the rest of a long line was rotated away, the next line does not run into it."""
    position = Position()
    long = stamp(BIRTH).encode() + b" " + b"x" * (MAX_LINE + 5)
    assert Cursor(position, resumed=False).feed(long) == long
    assert position.part == len(long)
    other = stamp(BIRTH + 5).encode() + b" other\n"
    assert Cursor(position, resumed=True).feed(other) == b"\n" + other
    assert position.part == 0


# --- positions -----------------------------------------------------------------------------

LINES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([b"a", b"b", b"", b"c" * 300])), min_size=1, max_size=60
)


def written(drawn: list[tuple[int, bytes]], step: int) -> list[tuple[int, bytes]]:
    """Lines of a log whose times mostly grow, some the same, some out of order by a little."""
    ns, lines = BIRTH, []
    for jump, text in drawn:
        ns += jump * step // 10
        at = ns - (1 if jump % 7 == 3 else 0)
        lines.append((at, stamp(at).encode() + b" " + text + b"\n"))
    return lines


@given(LINES, st.sampled_from([0, 1, 1000, SECOND // 7, SECOND]), st.data())
def test_a_position_resumes_anywhere(drawn: list[tuple[int, bytes]], step: int, data: st.DataObject) -> None:
    """Wherever a log is cut, the lines since the second asked from are exactly completed."""
    lines = written(drawn, step)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lines)), min_size=1, max_size=4)))
    position, given_out = Position(), []
    for end in [*cuts, len(lines)]:
        position = Position.parse(position.token)
        since = position.since
        first = int(datetime.fromisoformat(since).timestamp()) * SECOND if since else 0
        cursor = Cursor(position, resumed=since is not None)
        sent = b"".join(line for ns, line in lines[:end] if ns >= first)
        size = data.draw(st.integers(1, 200))
        given_out += [cursor.feed(sent[at : at + size]) for at in range(0, len(sent), size)]
        assert cursor.caught_up
    assert b"".join(given_out) == b"".join(line for _, line in lines)
    assert len(position.token) < 1000


def test_a_rotation_among_lines_of_one_time_loses_none() -> None:
    """Where the counted lines are no longer there, lines may come twice but none is left out."""
    at = stamp(BIRTH).encode()
    position = Position()
    Cursor(position, resumed=False).feed(b"%b one\n%b two\n" % (at, at))
    after = b"%b two\n%b three\n%b four\n" % (at, at, at)
    assert Cursor(position, resumed=True).feed(after) == after
    assert Cursor(position, resumed=True).feed(after) == b""


def test_a_clock_set_back_after_a_rotation_hides_nothing() -> None:
    """Once newer lines have come, older times are taken for what they are: new lines."""
    position = Position()
    Cursor(position, resumed=False).feed(stamp(BIRTH).encode() + b" gone by now\n")
    cursor = Cursor(position, resumed=True)
    lines = b"".join(stamp(BIRTH + ns).encode() + b" x\n" for ns in (5, -5 * SECOND, -4 * SECOND))
    assert cursor.feed(lines) == lines


def test_late_lines_among_the_latest_are_remembered() -> None:
    """A line that came after a newer one is known when both come again."""
    position = Position()
    lines = b"".join(stamp(BIRTH + ns).encode() + b" x\n" for ns in (100, 90, 110, 105, 80))
    Cursor(position, resumed=False).feed(lines)
    cursor = Cursor(position, resumed=True)
    assert cursor.feed(lines) == b""
    assert cursor.caught_up


def test_pieces_of_an_older_line_are_left_out() -> None:
    """A first line without a time is the end of one that was delivered."""
    position = Position()
    one = stamp(BIRTH).encode() + b" one\n"
    two = stamp(BIRTH + 1).encode() + b" two\n"
    Cursor(position, resumed=False).feed(one)
    assert Cursor(position, resumed=True).feed(b"rest of a line\n" + one + two) == two
    assert Cursor(Position(), resumed=False).feed(b"no time at all\n" + one) == b"no time at all\n" + one


def test_times_are_compared_across_zones() -> None:
    """A time is the same moment however its zone and fraction are written."""
    utc = stamp_of(b"2026-11-30T16:26:46.5Z x")
    assert utc == BIRTH + SECOND // 2
    assert stamp_of(b"2026-11-30T17:26:46.500000000+01:00 x") == utc
    assert stamp_of(b"2026-11-30T16:26:46Z") is None
    assert stamp_of(b"2026-13-30T16:26:46Z x") is None


@pytest.mark.parametrize(
    "token",
    ["", "x", "[]", "{}", "null", "[1,2,3,4]", '[[["a",1,1]],0,0,0]', "[" * 100_000, "[[[1e400,1,1]],0,0,0]"],
)
def test_a_damaged_token_is_the_beginning(token: str) -> None:
    """A token that is none starts anew instead of failing."""
    assert Position.parse(token) == Position()


def test_a_position_forgets_the_oldest_times() -> None:
    """Only so many times are kept, whatever comes, and a late one does not displace a newer."""
    position = Position()
    for n in range(100):
        position.add(BIRTH + n, 0)
    position.add(BIRTH, 0)
    assert sorted(position.seen) == [BIRTH + n for n in range(100 - KEEP, 100)]


# --- what a pod tells ----------------------------------------------------------------------


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """A pod with these containers."""
    return {"spec": {"containers": list(containers), "initContainers": list(init)}}


EXPORTER = {"name": "oom", "image": "mirror/sidecar:1", "args": ["run", "--log", "kubernetes:"]}


@pytest.mark.parametrize(
    "server",
    [
        {"name": "s", "image": "docker.io/vllm/vllm-openai:v0.32.0"},
        {"name": "s", "image": "mirror/llm:1", "command": ["vllm", "serve"]},
        {
            "name": "s",
            "image": "mirror/llm:1",
            "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        },
        {"name": "s", "image": "mirror/llm:1", "command": ["sh", "-c"], "args": ["exec vllm serve m"]},
    ],
)
def test_the_server_is_found_by_image_or_command(server: dict[str, Any]) -> None:
    """The one container that names vLLM is taken, never the exporter or a loader that ends."""
    loader = {"name": "loader", "image": "vllm/vllm-openai", "command": ["download"]}
    other = {"name": "proxy", "image": "istio/proxyv2"}
    assert vllm_container(pod(other, server, EXPORTER, init=(loader,))) == "s"
    native = {"name": "oom", "image": "x/vllm-oom-exporter", "restartPolicy": "Always"}
    assert vllm_container(pod(server, init=(loader, native))) == "s"


def test_an_unclear_choice_of_container_is_said() -> None:
    """None or several candidates give one line with what to write instead."""
    one, two = {"name": "a", "image": "vllm/vllm-openai"}, {"name": "b", "image": "my/vllm"}
    with pytest.raises(KubeError) as several:
        vllm_container(pod(one, two))
    assert str(several.value) == (
        "several containers name vLLM (a, b) in image or command; write kubernetes:NAMESPACE/POD/CONTAINER"
    )
    with pytest.raises(KubeError) as none:
        vllm_container(pod(EXPORTER))
    assert (
        str(none.value)
        == "no container names vLLM in image or command; write kubernetes:NAMESPACE/POD/CONTAINER"
    )


@pytest.mark.parametrize(
    "status",
    [
        None,
        7,
        [],
        {"state": 1},
        {"state": {"terminated": []}, "lastState": {"terminated": {"exitCode": "x"}}},
    ],
)
def test_a_strange_status_is_no_error(status: object) -> None:
    """Whatever stands where a status should, runs come out of it or none."""
    strange = {"name": "vllm", **status} if isinstance(status, dict) else status
    for one in instances({"status": {"containerStatuses": [strange]}}, "vllm"):
        assert isinstance(one, Instance)


def test_a_run_keeps_its_name_without_an_id() -> None:
    """The same run counts the same while it runs, when it ended, and when the next one runs."""

    def names(restarts: int, state: str, last: str) -> list[tuple[str, bool]]:
        status = {"name": "v", "restartCount": restarts, "state": {state: {}}, "lastState": {last: {}}}
        found = {"metadata": {"uid": "u"}, "status": {"containerStatuses": [status]}}
        return [(one.stream, one.previous) for one in instances(found, "v")]

    assert names(0, "running", "") == [("u/v/0", False)]
    assert names(0, "terminated", "") == [("u/v/0", False)]
    assert names(0, "waiting", "terminated") == [("u/v/0", True)]
    assert names(1, "running", "terminated") == [("u/v/0", True), ("u/v/1", False)]


def test_text_of_a_status_cannot_forge_lines() -> None:
    """A reason or a time that is not what the API writes is left out."""
    ended = {"reason": "a\nb", "exitCode": 1, "finishedAt": "now\n", "containerID": "c"}
    status = {"name": "vllm", "state": {"terminated": ended}}
    assert instances({"status": {"containerStatuses": [status]}}, "vllm") == (
        Instance("c", "vllm", False, Ending("", 1, "")),
    )


# --- inside a cluster ----------------------------------------------------------------------


FIRST, SECOND_TOKEN = "first", "second"


def account(folder: Path, authority: trustme.CA, token: str = FIRST) -> Path:
    """A folder as the kubelet mounts it."""
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    (folder / "token").write_text(token + "\n")
    (folder / "namespace").write_text("ns")
    return folder


@pytest.mark.asyncio
async def test_inside_a_cluster_with_a_token_that_changes(tmp_path: Path) -> None:
    """The own pod is read over TLS with the mounted credentials, which are read again every minute."""
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    async with Kubelet(tls) as kubelet:
        kubelet.tokens = {FIRST, SECOND_TOKEN, "third"}
        kubelet.start()
        kubelet.write("one")
        folder = account(tmp_path, authority)
        clock = HandClock()
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(kubelet.port),
            "HOSTNAME": "pod",
        }
        source = open_source("kubernetes:", environ, clock, folder)
        chunks = source.chunks({})
        assert (await anext(chunks)).data == kubelet.runs[0].text
        more = asyncio.ensure_future(anext(chunks))

        async def look(seconds: float) -> str:
            count = len(kubelet.credentials)
            await clock.advance(seconds)
            await until(lambda: len(kubelet.credentials) > count)
            return kubelet.credentials[count]

        (folder / "token").write_text(SECOND_TOKEN)
        assert await look(5) == "Bearer first"
        assert await look(55) == "Bearer second"
        assert source.stats.read_errors == 0
        # a refusal has the file read again at once
        (folder / "token").write_text("third")
        kubelet.tokens = {"third"}
        assert await look(5) == "Bearer second"
        await until(lambda: source.stats.read_errors == 1)
        assert await look(5) == "Bearer third"
        kubelet.write("two")
        async with asyncio.timeout(5):
            assert (await more).data == kubelet.runs[0].lines[1][1]
        assert source.stats.read_errors == 1
        await chunks.aclose()


@pytest.mark.asyncio
async def test_a_server_with_a_foreign_certificate_is_not_talked_to(tmp_path: Path) -> None:
    """A certificate of another authority ends the connection before the token is sent."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with Kubelet(tls) as kubelet:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(kubelet.port)}
        client = in_cluster(environ, HandClock(), account(tmp_path, trustme.CA()))
        with pytest.raises(KubeError, match="certificate"):
            await client.pod("ns", "pod")
        assert kubelet.requests == []
        await client.close()


def test_outside_of_a_cluster_it_says_so(tmp_path: Path) -> None:
    """Each missing piece of the environment is one line with what to do."""
    with pytest.raises(KubeError) as outside:
        open_source("kubernetes:", {})
    assert str(outside.value) == "kubernetes: works inside a pod only (KUBERNETES_SERVICE_HOST is not set)"
    with pytest.raises(KubeError) as bare:
        open_source("kubernetes:", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, account=tmp_path)
    assert str(bare.value) == (
        f"{tmp_path / 'ca.crt'}: No such file or directory; set automountServiceAccountToken: true"
    )
    with pytest.raises(KubeError) as nameless:
        own_pod({"POD_NAME": "pod"}, tmp_path)
    assert str(nameless.value) == (
        "kubernetes: the namespace of the service account is not known; write kubernetes:NAMESPACE/POD/CONTAINER"
    )
    (tmp_path / "namespace").write_text("ns\n")
    assert own_pod({"POD_NAME": "pod", "HOSTNAME": "host"}, tmp_path) == ("ns", "pod")
    assert own_pod({"HOSTNAME": "host"}, tmp_path) == ("ns", "host")


@pytest.mark.asyncio
async def test_a_missing_token_is_a_problem_not_an_end(tmp_path: Path) -> None:
    """Without a token nothing is sent, and the problem names the file."""
    client = KubeClient("http://127.0.0.1:9", tmp_path / "token", None, HandClock())
    with pytest.raises(KubeError) as caught:
        await client.pod("ns", "pod")
    assert (
        str(caught.value) == f"{tmp_path / 'token'}: no token there; set automountServiceAccountToken: true"
    )
    await client.close()


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_addresses_of_both_families(host: str, url: str, tmp_path: Path) -> None:
    """The API server is found at an address of either family."""
    folder = account(tmp_path, trustme.CA())
    assert in_cluster({"KUBERNETES_SERVICE_HOST": host}, HandClock(), folder)._url == url


# --- everything at once --------------------------------------------------------------------


async def fault_run(seed: int, count: int) -> tuple[list[Run], dict[str, bytes], dict[str, str]]:
    """Write ``count`` lines while everything goes wrong; what was written and what was read."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    read: dict[str, bytes] = {}
    tokens: dict[str, str] = {}
    async with Kubelet() as kubelet:
        kubelet.lag = rng.choice([0, 0.5, 1.5])
        kubelet.start()
        left = count
        restarts = 0
        while left:
            clock = RushClock()
            kubelet.time = clock.now
            reading = Reading(kubelet, clock, dict(tokens))
            async with reading:
                for _ in range(rng.randint(5, 40)):
                    lines = min(left, rng.randint(1, 40))
                    left -= lines
                    for _ in range(lines):
                        step = rng.choice([0, 0, 1, 1000, SECOND // 3, 2 * SECOND])
                        kubelet.write(f"{left} {rng.random()}" + "x" * rng.choice([0, 80, 3000]), step=step)
                    kubelet.piece = rng.choice([50, 1000, 4096, 1 << 20])
                    match rng.randint(0, 9):
                        case 0 | 1 | 2:
                            kubelet.cuts.append((rng.randint(0, 4000), rng.random() < 0.5))
                        case 3:
                            kind = rng.choice(["pod", "log"])
                            # a log that is refused as gone several times in a row is given up
                            gone = [404, 410, 500] if kind == "pod" or not kubelet.refusals[kind] else []
                            status = rng.choice([401, 403, 429, 503, *gone])
                            kubelet.refusals[kind].append((status, {}))
                        case 4:
                            kubelet.rotate(keep=True)
                        case 5 if restarts == len(set(tokens) | set(reading.tokens)) - 1:
                            # not before this run was begun: a run that begins and ends unseen is gone
                            kubelet.end(rng.choice(["OOMKilled", "Error"]), 137)
                            kubelet.start()
                            restarts += 1
                    await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
                    if not left:
                        break
                if not left:
                    kubelet.piece = 1 << 20
                    async with asyncio.timeout(20):
                        for run in kubelet.runs:
                            rest = len(whole(run)) - len(read.get(run.id, b""))
                            while len(reading.text(run.id)) < rest:
                                await reading._came.wait()
            for chunk in reading.chunks:
                read[chunk.stream] = read.get(chunk.stream, b"") + chunk.data
            tokens |= reading.tokens
        return kubelet.runs, read, tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_or_doubled_whatever_happens(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Cuts, refusals, rotations, restarts of both sides and lagging states lose and repeat no line."""
    runs, read, _ = await fault_run(seed, 2000)
    lost = doubled = total = got = 0
    for run in runs:
        expected = whole(run).splitlines()
        found = read[run.id].splitlines()
        total += len(expected)
        got += len(found)
        lost += len(set(expected) - set(found))
        doubled += len(found) - len(set(found))
        assert found == expected
    record_property(
        "counts",
        f"seed {seed}, {len(runs)} runs: {total} written, {got} read, {lost} lost, {doubled} doubled",
    )
    assert (lost, doubled) == (0, 0)
