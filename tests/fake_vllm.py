"""A vLLM that is none: its API, its scheduler's arithmetic and its log, with failures to order.

Steps are filled as vLLM fills them: requests in the order they came, each running one its next token
or its next chunk, up to the limit. So a step is as large here as it would be there, and what the log
says of it (per-step lines, dump, traceback) is true.
"""

from __future__ import annotations

import asyncio
import json
import ssl as tls
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from test_incident import API, at, dead, dump, fatal, start

BLOCK = 16


@dataclass(eq=False)
class Sequence:
    """One request in the engine."""

    prompt: list[int]
    answer: int
    ended: asyncio.Future[str]
    computed: int = 0
    answered: int = 0


@dataclass(frozen=True)
class Step:
    """One step: tokens of prompts and of answers, and of how many requests."""

    prefills: int
    prefill_tokens: int
    decodes: int

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.prefill_tokens + self.decodes


@dataclass
class FakeVllm:
    """What it is. Counters and ``steps`` may be read at any time.

    ``dies_above``: tokens of a step that kill the engine. ``hangs_above``: that it never finishes.
    ``busy``: requests that somebody else has in it. ``refusals``: how often it answers 429 first.
    """

    log: Path
    limit: int = 2048
    max_model_len: int = 8192
    max_num_seqs: int = 64
    vocabulary: int = 32_000
    model: str = "acme/a"
    key: str | None = None
    base: str = ""
    dies_above: int | None = None
    hangs_above: int | None = None
    step_seconds: float = 0.002
    iteration_lines: bool = True
    prefix_cache: bool = False
    metrics: bool = True
    healthy: bool = True
    busy: int = 0
    refusals: int = 0
    retry_after: str = "0"
    url: str = ""
    steps: list[Step] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    hits: int = 0
    queries: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    most_at_once: int = 0
    starts: int = 0
    dead: bool = False

    def __post_init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._arrived = asyncio.Event()
        self._cached: set[tuple[int, ...]] = set()
        self._clock = 0.0
        self._shown = 0  # requests as of the last step: so long does /metrics lag behind
        self.begin()

    @property
    def in_flight(self) -> int:
        """Requests that are in the engine now."""
        return len(self._sequences)

    # --- its log --------------------------------------------------------------------------------

    def _write(self, *parts: list[str]) -> None:
        with self.log.open("a", newline="") as out:
            out.writelines(line + "\n" for part in parts for line in part)

    def begin(self) -> None:
        """A start, with the limit there is now."""
        self._clock += 100
        self.starts += 1
        self.dead = False
        self._sequences.clear()
        self._write(start(self._clock, self.limit))
        self._clock += 50

    # --- its engine -----------------------------------------------------------------------------

    async def engine(self) -> None:
        """Step after step, until cancelled."""
        while True:
            if self.dead or not self._sequences:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            scheduled = self._schedule()
            step = Step(
                sum(one.computed < len(one.prompt) for one, _ in scheduled),
                sum(number for one, number in scheduled if one.computed < len(one.prompt)),
                sum(one.computed >= len(one.prompt) for one, _ in scheduled),
            )
            if self.hangs_above is not None and step.tokens > self.hangs_above:
                await asyncio.Event().wait()
            await asyncio.sleep(self.step_seconds)
            if self.dies_above is not None and step.tokens > self.dies_above:
                self._die(step)
                continue
            self._done(scheduled, step)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        left, scheduled = self.limit, []
        for one in self._sequences[: self.max_num_seqs]:
            if left == 0:
                break
            if one.computed == 0:
                one.computed = self._from_cache(one)
            number = min(left, max(1, len(one.prompt) - one.computed))
            scheduled.append((one, number))
            left -= number
        return scheduled

    def _from_cache(self, one: Sequence) -> int:
        """Tokens that need not be computed: whole blocks, but never the last token."""
        self.queries += len(one.prompt)
        if not self.prefix_cache:
            return 0
        found = 0
        while found + BLOCK < len(one.prompt) and tuple(one.prompt[: found + BLOCK]) in self._cached:
            found += BLOCK
        self.hits += found
        return found

    def _done(self, scheduled: list[tuple[Sequence, int]], step: Step) -> None:
        self.steps.append(step)
        self._clock += 0.01
        if self.iteration_lines:
            self._write(
                at(
                    self._clock, API, "INFO", "loggers.py:199",
                    f"Engine 000: Iteration({len(self.steps)}): {step.prefills} context requests, {step.prefill_tokens} "
                    f"context tokens, {step.decodes} generation requests, {step.decodes} generation tokens, "
                    "iteration elapsed time: 10.00 ms, GPU KV cache usage: 1.0%",
                )
            )  # fmt: skip
        for one, number in scheduled:
            if one.computed < len(one.prompt):
                one.computed += number
                if one.computed < len(one.prompt):
                    continue
                self.prompt_tokens += len(one.prompt)
                if self.prefix_cache:
                    ends = range(BLOCK, len(one.prompt) + 1, BLOCK)
                    self._cached.update(tuple(one.prompt[:end]) for end in ends)
            one.answered += 1
            self.generation_tokens += 1
            if one.answered >= one.answer:
                self._sequences.remove(one)
                if not one.ended.done():
                    one.ended.set_result("length")
        self._shown = self.in_flight

    def _die(self, step: Step) -> None:
        self.dead = True
        self._clock += 0.01
        self._write(dump(self._clock, step.tokens), fatal(self._clock), dead(self._clock))
        for one in self._sequences:
            if not one.ended.done():
                one.ended.set_result("dead")

    # --- its API --------------------------------------------------------------------------------

    def _guard(self, request: web.Request) -> None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text='{"error":"Unauthorized"}')

    async def _models(self, request: web.Request) -> web.Response:
        self._guard(request)
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy and not self.dead else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        labels = f'{{engine="0",model_name="{self.model}"}}'
        values = {
            "num_requests_running": self._shown + self.busy,
            "num_requests_waiting": 0,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "prefix_cache_queries_total": self.queries,
            "prefix_cache_hits_total": self.hits,
        }
        return web.Response(
            text="".join(f"vllm:{name}{labels} {value}.0\n" for name, value in values.items())
        )

    async def _completions(self, request: web.Request) -> web.Response:
        self._guard(request)
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=429, headers={"Retry-After": self.retry_after}, text="slow down")
        body = json.loads(await request.read())
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        self.prompts += prompts
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if (highest := max(map(max, prompts))) >= self.vocabulary:
            return _error(400, f"Token id {highest} is out of vocabulary")
        if max(map(len, prompts)) + body["max_tokens"] > self.max_model_len:
            return _error(
                400, f"This model's maximum context length is {self.max_model_len} tokens. However, …"
            )
        if self.dead:
            return _error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        loop = asyncio.get_running_loop()
        sequences = [Sequence(one, body["max_tokens"], loop.create_future()) for one in prompts]
        self._sequences += sequences
        self.most_at_once = max(self.most_at_once, self.in_flight)
        self._arrived.set()
        try:
            reasons = [await one.ended for one in sequences]
        finally:
            self._sequences = [one for one in self._sequences if one not in sequences]
        if "dead" in reasons:
            return _error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        return web.json_response(
            {
                "choices": [
                    {"index": index, "text": "…", "finish_reason": reason}
                    for index, reason in enumerate(reasons)
                ],
                "usage": {"prompt_tokens": sum(map(len, prompts))},
            }
        )

    @asynccontextmanager
    async def running(self, ssl: tls.SSLContext | None = None) -> AsyncIterator[FakeVllm]:
        """It listens at ``url``."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get(f"{self.base}/v1/models", self._models),
                web.get(f"{self.base}/health", self._health),
                web.get(f"{self.base}/metrics", self._metrics),
                web.post(f"{self.base}/v1/completions", self._completions),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl).start()
        engine = asyncio.create_task(self.engine())
        self.url = f"http{'s' if ssl else ''}://127.0.0.1:{runner.addresses[0][1]}{self.base}"
        try:
            yield self
        finally:
            engine.cancel()
            await runner.cleanup()


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "code": status}}, status=status)
