"""Runs a plan: stage after stage, with an eye on the server, to the first sign of trouble.

Whatever ends it, every request is cancelled before ``run`` returns; vLLM aborts what nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from .look import Look, Looker
from .plan import DEFAULT_SPEND, DEFAULT_TIMEOUT, Plan, Request, Stage
from .prompts import NARROWER, Prompts
from .server import FailedError, Load, RefusedError, Server, VocabularyError
from .verdict import Outcome, Ran, count_steps

WATCH_SECONDS = 1.0
_STARTED_SECONDS = 5.0  # how long to wait for short answers to be under way
_SETTLE_SECONDS = 6.0  # a log is read within a second or two; a dead engine writes for some
_POLL_SECONDS = 0.1
_GONE = ("dead", "stopped", "hung")
_PREFLIGHT = 16  # tokens of the first prompt


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms it may run.

    ``timeout``: seconds for all of it. ``spend``: seconds after which no shape that is optional is begun.
    ``watch``: seconds between two looks at the server.
    """

    model: str
    timeout: float = DEFAULT_TIMEOUT
    spend: float = DEFAULT_SPEND
    while_serving: bool = False
    watch: float = WATCH_SECONDS


class _TrafficError(Exception):
    """Somebody else uses the server."""


async def run(
    plan: Plan,
    server: Server,
    terms: Terms,
    looker: Looker | None = None,
    prompts: Prompts | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run ``plan`` and say what came of it. Raises ``RefusedError`` where it could not begin.

    ``say`` is told which stage begins.
    """
    before = await _idle(server, terms)
    probe = _Probe(plan, server, terms, looker, prompts or Prompts())
    await probe.preflight()
    if before is not None:
        await _was_idle(before, server, terms)
    return await probe.run(say)


async def _idle(server: Server, terms: Terms) -> Load | None:
    """What ``/metrics`` says of a server without traffic, or None where nobody cares. Refuses any other."""
    health = await server.health()
    if health is None:
        raise RefusedError("the server does not answer /health; start it, or correct --vllm-url")
    if health != 200:
        raise RefusedError(
            f"the server is not ready: /health answers HTTP {health}; wait until it answers 200"
        )
    if terms.while_serving:
        return None
    first = await server.load()
    if first is None:
        raise RefusedError(
            "whether the server has traffic is not known, as its /metrics does not tell; --while-serving probes all the same"
        )
    if not first.requests:
        await asyncio.sleep(terms.watch)
        second = await server.load()
        if second is not None and not second.requests and second.worked == first.worked:
            return second
        first = second or first
    raise _busy(first)


async def _was_idle(before: Load, server: Server, terms: Terms) -> None:
    """Refuse a server in which a step was on its way: ``/metrics`` shows requests when their step has ended.

    Our first small prompt had to wait for that, so now it is there.
    """
    now = await server.load()
    if now is not None and now.requests:
        await asyncio.sleep(terms.watch)  # perhaps it was ours
        now = await server.load()
    if now is None:
        return
    prompts, answers = (after - old for after, old in zip(now.worked, before.worked, strict=True))
    if now.requests or prompts > _PREFLIGHT or answers > 1:
        raise _busy(now)


def _busy(load: Load) -> RefusedError:
    number = f" ({load.requests:.0f} requests now)" if load.requests else ""
    return RefusedError(
        f"the server has live traffic{number}; probe a replica without any, or accept the risk with --while-serving"
    )


class _Probe:
    def __init__(
        self, plan: Plan, server: Server, terms: Terms, looker: Looker | None, prompts: Prompts
    ) -> None:
        self._plan = plan
        self._server = server
        self._terms = terms
        self._looker = looker
        self._prompts = prompts
        self._ran: list[Ran] = []
        self._in_flight = 0
        self._before: Look | None = None
        self._left_out: list[tuple[str, str]] = []
        self._short = min(_PREFLIGHT, plan.limits.longest)

    async def preflight(self) -> None:
        """One small request: key, model, vocabulary. Nothing has been put at risk before that."""
        for narrower in (*NARROWER, None):
            try:
                async with asyncio.timeout(self._terms.timeout):
                    await self._server.complete(self._terms.model, [self._prompts.highest(self._short)], 1)
            except VocabularyError:
                if narrower is None:
                    raise
                self._prompts = Prompts(narrower)
            except FailedError as error:
                raise RefusedError(
                    f"a first prompt of {self._short} tokens was not answered: {error}"
                ) from None
            except TimeoutError:
                raise RefusedError(
                    f"a first prompt of {self._short} tokens was not answered within {self._terms.timeout:g} s; "
                    "is the server well?"
                ) from None
            else:
                return

    async def run(self, say: Callable[[str], None]) -> Outcome:
        loop = asyncio.get_running_loop()
        self._before = await self._look()
        load = await self._server.load()
        outcome = Outcome("survived", self._plan, ran=self._ran, started=_now())
        began = loop.time()
        try:
            async with asyncio.timeout_at(began + self._terms.timeout):
                for stage in self._plan.stages:
                    await self._stage(stage, began, say)
                await self._still_well()
        except TimeoutError:
            where = f"in shape {self._ran[-1].stage.shape}" if self._ran else "before the first shape"
            outcome.state = "unfinished"
            outcome.reason = f"time ran out after {loop.time() - began:.0f} s, {where}"
        except FailedError as error:
            outcome.state, outcome.reason = "failed", str(error)
        except (_TrafficError, RefusedError) as error:
            outcome.state, outcome.reason = "skipped", str(error)
        outcome.seconds = loop.time() - began
        await self._conclude(outcome, load)
        return outcome

    async def _still_well(self) -> None:
        """The last word: the server is healthy, and answers."""
        if (health := await self._server.health()) != 200:
            raise FailedError(f"the server is not healthy after the last request: {health or 'no answer'}")
        await self._server.complete(self._terms.model, [self._prompts.prompt(self._short)], 1)

    async def _stage(self, stage: Stage, began: float, say: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        soft: float | None = None
        if stage.optional:
            left = began + self._terms.spend - loop.time()
            known = sum(one.finished_tokens for one in self._ran) / max(1e-3, loop.time() - began)
            least = self._plan.limits.step if stage.endless else 0 if stage.together else stage.tokens
            if left <= 0 or least > known * left:
                self._passed_over(stage.shape, "no time left for it; give more with --spend")
                return
            soft = loop.time() + left if stage.endless else None
        say(stage.shape)
        ran = Ran(stage)
        self._ran.append(ran)
        at = loop.time()
        try:
            try:
                async with asyncio.timeout_at(soft) as clock:
                    await self._watched(self._send(stage, ran))
                ran.done = True
            except TimeoutError:
                if not clock.expired():
                    raise
        finally:
            ran.seconds = loop.time() - at

    def _passed_over(self, shape: str, why: str) -> None:
        self._left_out.append((shape, why))

    async def _send(self, stage: Stage, ran: Ran) -> None:
        """Every request of the stage; the first that fails ends the others."""
        async with asyncio.TaskGroup() as group:
            for one in stage.first:
                group.create_task(self._ask((one,), ran))
            if stage.first:
                await self._under_way(len(stage.first), ran)
            if stage.together:
                group.create_task(self._ask(stage.then, ran))
                return
            gate = asyncio.Semaphore(stage.at_once or len(stage.then))
            for one in stage.then:
                await gate.acquire()
                task = group.create_task(self._ask((one,), ran))
                task.add_done_callback(lambda _: gate.release())

    async def _under_way(self, number: int, ran: Ran) -> None:
        """Wait until most of ``number`` requests run, as far as that can be seen."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STARTED_SECONDS):
                while not ran.finished:
                    load = await self._server.load()
                    if load is None or (load.snapshot.running or 0) * 2 >= number:
                        return
                    await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self, requests: Sequence[Request], ran: Ran) -> None:
        """One HTTP request for all of ``requests``, whose answers are of one length."""
        prompts = [self._prompts.prompt(one.prompt) for one in requests]
        self._in_flight += len(requests)
        try:
            await self._server.complete(self._terms.model, prompts, requests[0].answer)
        finally:
            self._in_flight -= len(requests)
        ran.finished += len(requests)
        ran.finished_tokens += sum(one.prompt for one in requests)
        ran.longest = max(ran.longest, *(one.prompt for one in requests))

    async def _watched(self, job: Coroutine[Any, Any, None]) -> None:
        """Run ``job`` until it ends or the server shows trouble; nothing of it is left running."""
        tasks = [asyncio.ensure_future(job), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Look again and again; ends by raising what it saw."""
        known = {one.get("id") for one in self._before.incidents} if self._before else set()
        crowded = 0
        loop, took = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(max(self._terms.watch, 10 * took))  # a log of gigabytes takes seconds to read
            began = loop.time()
            look = await self._look()
            took = loop.time() - began
            if look is not None and any(one.get("id") not in known for one in look.incidents):
                raise FailedError("the log reports a memory failure")
            was = (
                self._before.state if self._before else ""
            )  # a log that ends with a death is not this server's
            if look is not None and look.state in _GONE and look.state != was:
                raise FailedError(f"the engine is {look.state}, as its log tells")
            if self._terms.while_serving:
                continue
            ours = self._in_flight
            load = await self._server.load()
            # requests end between the two looks; a stranger stays for more than one
            others = 0 if load is None else load.requests - max(ours, self._in_flight)
            crowded = crowded + 1 if others > 0 else 0
            if crowded > 1:
                raise _TrafficError("requests of others came meanwhile; probe a replica without traffic")

    async def _look(self) -> Look | None:
        if self._looker is None:
            return None
        try:
            return await self._looker()
        except RefusedError:
            return None  # it told something before: what it tells now is a bonus

    async def _conclude(self, outcome: Outcome, load: Load | None) -> None:
        """Wait for the log: for the cause of a failure, or for the last of the steps."""
        before, after = self._before, await self._look()
        if before is not None:
            known = {one.get("id") for one in before.incidents}
            loop = asyncio.get_running_loop()
            end, seen = loop.time() + _SETTLE_SECONDS, -1
            while after is not None and loop.time() < end:
                new = [one for one in after.incidents if one.get("id") not in known]
                if new:
                    outcome.incident = dict(new[0])
                    outcome.state = "failed" if outcome.state != "skipped" else outcome.state
                    break
                if outcome.state == "survived" and after.steps == seen:
                    break  # nothing came since the last look
                seen = after.steps
                await asyncio.sleep(self._terms.watch)
                after = await self._look() or after
        if outcome.state != "failed" and load is not None and load.cached is not None:
            now = await self._server.load()
            if now is not None and now.cached is not None:
                outcome.cached = max(0.0, now.cached - load.cached)
        outcome.plan = replace(outcome.plan, left_out=(*outcome.plan.left_out, *self._left_out))
        count_steps(outcome, before, after)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that ended a stage: one of the server before one of a request."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        else:
            flat.append(one)
    return next((one for one in flat if isinstance(one, FailedError)), flat[0])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
