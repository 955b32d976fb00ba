"""Probes each life of a server once, right after it is healthy: what ``/-/budget-ready`` waits for.

The server is not ready for others as long as this goes on, if its start-up probe asks for
``/-/budget-ready``. A server that has served already, or does so now, is left alone: its start is over,
and it was the sidecar that was restarted. One that remembers (``--state-dir``) does not probe a life twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import structlog

from ..follow import Follower
from ..records import Life
from ..status import TargetStatus
from .command import read_key
from .look import Look, limits_of, status_look
from .plan import DEFAULT_SPEND, DEFAULT_TIMEOUT, PlanError, plan
from .run import Terms, run
from .server import RefusedError, Server
from .verdict import Outcome, document, text

SURVIVED = "probe_survived"
ENDED = "probe_ended"
BEGUN = "probe_begun"
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 10.0  # after it could not run: a key may be mounted late, traffic may end

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How each life is to be probed; durations in seconds. ``key`` wins over ``key_file``."""

    spend: float = DEFAULT_SPEND
    timeout: float = DEFAULT_TIMEOUT
    key_file: Path | None = None
    key: str | None = None


class OnStart:
    """Run it beside a target. ``url`` says where the server is now, or that it is not known."""

    def __init__(
        self,
        wanted: Wanted,
        follower: Follower,
        url: Callable[[], str | None],
        session: aiohttp.ClientSession,
    ) -> None:
        self._wanted = wanted
        self._follower = follower
        self._url = url
        self._session = session
        follower.status.probe_asked = True

    async def run(self) -> None:
        """Probe one life after the other, until cancelled."""
        life: Life | None = None
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            status = self._follower.status
            if status.life is None or (life is not None and life.index == status.life.index):
                continue
            life = await self._one_life(status, status.life)

    async def _one_life(self, status: TargetStatus, life: Life) -> Life | None:
        """The life, if nothing is left to be done for it."""
        if status.engine_state != "serving" or not (url := self._url()):
            return None
        if self._follower.life_marked(ENDED):
            survived = self._follower.life_marked(SURVIVED)
            reason = "as the sidecar knows from before its restart"
            state = "survived" if survived else "unfinished"
            self._show(life, {"state": state, "reason": reason, "says": [reason]})
            return life
        try:
            server = Server(url, self._session, key=self._key())
            if await server.health() != 200:
                return None
            outcome = await self._probe(server, status_look(status), life)
        except (RefusedError, PlanError) as error:
            await self._skipped(life, str(error))
            return None
        except asyncio.CancelledError:
            status.probe = None
            raise
        if outcome.state == "skipped":
            await self._skipped(life, outcome.reason)
            return None
        self._ended(life, outcome)
        return life

    def _key(self) -> str | None:
        return self._wanted.key if self._wanted.key_file is None else read_key(self._wanted.key_file)

    async def _probe(self, server: Server, look: Look, life: Life) -> Outcome:
        status = self._follower.status
        models = await server.models()
        if not models:
            raise RefusedError("/v1/models names no model")
        limits = limits_of(look, models[0].max_model_len)
        if limits is None:
            raise RefusedError("the log does not tell the budget of this life, or its longest sequence")
        planned, load = plan(limits), await server.load()
        if load is not None and load.worked[0] > limits.step and not self._follower.life_marked(BEGUN):
            raise RefusedError(
                f"the server has served {load.worked[0]:.0f} prompt tokens, so its start is over; restart it, or run "
                "'vllm-oom-exporter probe'"
            )
        self._follower.mark_life(BEGUN)
        terms = Terms(models[0].name, self._wanted.timeout, self._wanted.spend)
        self._show(life, {"state": "running", "step_limit_tokens": limits.step})
        log.info("the budget probe begins", target=status.name, step_limit_tokens=limits.step)

        async def now() -> Look:
            return status_look(status)

        return await run(planned, server, terms, now)

    def _ended(self, life: Life, outcome: Outcome) -> None:
        status, follower = self._follower.status, self._follower
        if outcome.state == "survived" and not outcome.true_steps:
            follower.ledger.probed(life.index, outcome.full)
        if (
            status.life is not None and status.life.index == life.index
        ):  # else it died, and the next one has begun
            follower.mark_life(ENDED)
            if outcome.state == "survived":
                follower.mark_life(SURVIVED)
        self._show(life, document(outcome))
        tell = log.info if outcome.state == "survived" else log.error
        tell("the budget probe ended", target=status.name, result=outcome.state, says=text(outcome))

    async def _skipped(self, life: Life, reason: str) -> None:
        before = self._follower.status.probe or {}
        if before.get("reason") != reason:
            log.warning("the budget probe could not run", target=self._follower.status.name, reason=reason)
        self._show(life, {"state": "skipped", "reason": reason, "says": [reason]})
        await asyncio.sleep(_RETRY_SECONDS)

    def _show(self, life: Life, found: Mapping[str, object]) -> None:
        self._follower.status.probe = {**found, "life": life.index}
