"""A vLLM server with a known truth: its log and its ``/metrics``, as synthetic traffic makes them.

Traffic comes in windows of 15 s. The rate wanders (AR(1) on its logarithm), prompts are log-normal,
so long prompts come with traffic as they do in production. ``truth`` says what kills the server:

``length``  windows with prompts above ``LONG`` tokens, the more of them the likelier
``rate``    windows of the busiest tenth
``none``    any window

Start-up lines, traceback and dump are those of a real capture with other numbers and times.
"""

from __future__ import annotations

import gzip
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

BEGIN = datetime(2026, 9, 1, 8)
WINDOW = 15
LONG = 10_000
SLICE = 3
DOWN = 700  # seconds: longer than a client tries again
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)

_CAPTURE = Path(__file__).parent / "captures" / "mlp_eager_16384.log.gz"
_CLOCK = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")
_NEW = (
    "NewRequestData(req_id=cmpl-{number}-{at},prompt_token_ids_len={tokens},prefill_token_ids_len=None,"
    "mm_features=[],sampling_params=SamplingParams(n=1, prompt_logprobs=None),block_ids=([1],),"
    "num_computed_tokens=0,lora_request=None,prompt_embeds_shape=None)"
)


@dataclass(frozen=True, slots=True)
class Window:
    """Lengths of the prompts that arrive in one window."""

    prompts: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens, 0 without a prompt."""
        return max(self.prompts, default=0)


def traffic(rng: random.Random, windows: int, limit: int = 30_000) -> list[Window]:
    """``windows`` windows; prompts of at most ``limit`` tokens."""
    found, state = [], 0.0
    for _ in range(windows):
        state = 0.97 * state + 0.24 * rng.gauss(0, 1)
        arrivals = _poisson(rng, 12 * math.exp(0.5 * state))
        found.append(
            Window(
                tuple(min(limit, 1 + int(rng.lognormvariate(math.log(900), 0.9))) for _ in range(arrivals))
            )
        )
    return found


def deaths(rng: random.Random, windows: list[Window], truth: str, k: int) -> list[int]:
    """The numbers of ``k`` windows in which the server dies, in order."""
    counts = sorted(len(one.prompts) for one in windows)
    busy = counts[int(0.9 * len(counts))]
    hazards: dict[str, Callable[[Window], float]] = {
        "length": lambda one: sum(tokens > LONG for tokens in one.prompts),
        "rate": lambda one: max(0, len(one.prompts) - busy),
        "none": lambda _: 1,
    }
    hazard = hazards[truth]
    quiet = min(_QUIET, len(windows) // 2)
    weights = {at: hazard(one) for at, one in enumerate(windows) if at >= quiet}
    found: list[int] = []
    for _ in range(k):
        (at,) = rng.choices(list(weights), list(weights.values()))
        del weights[at]
        found.append(at)
    return sorted(found)


_QUIET = 400  # windows before the first death, so that it has something to be compared with


def _poisson(rng: random.Random, mean: float) -> int:
    limit, number, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        number += 1
        product *= rng.random()
    return number


@dataclass(slots=True)
class Server:
    """Writes what the server would: every method returns text, at the time the clock stands at."""

    settings: dict[str, object] = field(default_factory=lambda: {"max_num_batched_tokens": 16384})
    now: datetime = BEGIN
    iterations: bool = True
    requests: bool = False  # lines of vLLM up to 0.11.0 with the ids of every prompt
    lives: int = 0
    finished: int = 0
    running: int = 0
    steps: int = 0
    counts: dict[float, int] = field(default_factory=dict)
    started: datetime = BEGIN

    @property
    def budget(self) -> int:
        """The prefill budget in force."""
        value = self.settings["max_num_batched_tokens"]
        assert isinstance(value, int)
        return value

    def start(self, **settings: object) -> str:
        """The lines of a start-up that ends well."""
        self.settings |= settings
        self.lives += 1
        self.finished = self.running = self.steps = 0
        self.counts = dict.fromkeys((*map(float, BOUNDS), math.inf), 0)
        self.started = self.now
        args = {"model": "/models/tiny", "max_model_len": 32768, **self.settings}
        lines = _text()[0].replace("=16384.", f"={self.budget}.").splitlines()
        lines = [re.sub(r"non-default args: .*", f"non-default args: {args}", line) for line in lines]
        text = self._timed("\n".join(lines) + "\n")
        self.now += timedelta(seconds=20)
        return text

    def serve(self, window: Window) -> str:
        """One window of traffic that is served."""
        return "".join(self.slices(window))

    def slices(self, window: Window) -> Iterator[str]:
        """The same, ``SLICE`` seconds after ``SLICE`` seconds."""
        parts = WINDOW // SLICE
        for part in range(parts):
            lines = []
            for tokens in window.prompts[part::parts]:
                lines.append(self._access())
                lines.append(self._received(tokens))
                lines += self._steps(tokens, len(window.prompts))
                for bound in self.counts:
                    self.counts[bound] += tokens <= bound
                self.finished += 1
            self.now += timedelta(seconds=SLICE)
            yield "".join(lines)

    def die(self, longest: int, running: int) -> str:
        """A prompt that is never finished: traceback, dump and the end."""
        step = min(longest, self.budget)
        name = f"cmpl-{self.lives}-0"
        new = _NEW.format(number=self.lives, at=0, tokens=longest)
        dump = (
            f"SchedulerOutput(scheduled_new_reqs=[{new}], scheduled_cached_reqs=CachedRequestData(req_ids=[],"
            "resumed_req_ids=set(),new_token_ids_lens=[],all_token_ids_lens={},new_block_ids=[],"
            f"num_computed_tokens=[],num_output_tokens=[]), num_scheduled_tokens={{{name}: {step}}}, "
            f"total_num_scheduled_tokens={step}, scheduled_spec_decode_tokens={{}}, scheduled_encoder_inputs={{}}, "
            "finished_req_ids=[], preempted_req_ids=[])"
        )
        end = re.sub(r"SchedulerOutput\(.*", lambda _: dump, _text()[1])
        end = re.sub(r"num_running_reqs=\d+", f"num_running_reqs={running}", end)
        text = self._received(longest) + self._timed(end)
        self.now += timedelta(seconds=DOWN)
        return text

    def exposition(self) -> str:
        """``/metrics`` as of now."""
        labels = 'model_name="tiny",engine="0"'
        begin = self.started.timestamp()
        buckets = "".join(
            f'vllm:request_prompt_tokens_bucket{{le="{_bound(bound)}",{labels}}} {count}\n'
            for bound, count in self.counts.items()
        )
        return (
            f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {begin}\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {self.running}\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} 0\n"
            "# TYPE vllm:request_success_total counter\n"
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} {self.finished}\n'
            f"# TYPE vllm:request_prompt_tokens histogram\n{buckets}"
            f"vllm:request_prompt_tokens_count{{{labels}}} {self.finished}\n"
        )

    def _steps(self, tokens: int, running: int) -> Iterator[str]:
        if not self.iterations:
            return
        while tokens > 0:
            step = min(tokens, self.budget)
            tokens -= step
            yield self._line(
                "INFO",
                "loggers.py:199",
                f"Engine 000: Iteration({self.steps}): 1 context requests, {step} context tokens, {running - 1} generation "
                "requests, 0 generation tokens, iteration elapsed time: 25.62 ms, GPU KV cache usage: 0.4%",
            )
            self.steps += 1

    def _received(self, tokens: int) -> str:
        if not self.requests:
            return ""
        ids = ", ".join(["7"] * tokens)
        return self._line(
            "INFO",
            "logger.py:43",
            f"Received request cmpl-{self.finished}: prompt: 'x', params: SamplingParams(n=1), "
            f"prompt_token_ids: [{ids}], prompt_embeds shape: None, lora_request: None.",
        )

    def _access(self) -> str:
        return '(APIServer pid=1) INFO:     192.0.2.7:50000 - "POST /v1/completions HTTP/1.1" 200 OK\n'

    def _line(self, level: str, place: str, text: str) -> str:
        return f"(APIServer pid=1) {level} {self.now:%m-%d %H:%M:%S} [{place}] {text}\n"

    def _timed(self, text: str) -> str:
        return _CLOCK.sub(f"{self.now:%m-%d %H:%M:%S}", text)


def _bound(bound: float) -> str:
    return "+Inf" if bound == math.inf else f"{bound}"


def _text() -> tuple[str, str]:
    """Start-up and death of the capture."""
    if not _parts:
        text = gzip.decompress(_CAPTURE.read_bytes()).decode()
        ready = text.index("INFO:     Application startup complete.")
        ready = text.index("\n", ready) + 1
        death = text.index("(Worker pid=6480) ERROR")
        _parts.extend((text[:ready], text[death:]))
    return _parts[0], _parts[1]


_parts: list[str] = []


@dataclass(frozen=True, slots=True)
class Moment:
    """What one window adds to the log, and what a scrape at its end finds; None: vLLM is down."""

    at: float
    log: str
    exposition: str | None


def run(truth: str, k: int, seed: int, windows: int = 900, *, iterations: bool = True) -> Iterator[Moment]:
    """A server that dies ``k`` times for the reason ``truth``, and is started again each time."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    work = traffic(rng, windows)
    fatal = set(deaths(rng, work, truth, k))
    server = Server(iterations=iterations)
    yield Moment(server.now.timestamp(), server.start(), server.exposition())
    for at, window in enumerate(work):
        served = window if at not in fatal else Window(_without_longest(window))
        for log in server.slices(served):
            yield Moment(server.now.timestamp(), log, server.exposition())
        if at in fatal:
            server.running = 1
            yield Moment(server.now.timestamp(), "", server.exposition())
            down = server.die(max(1, window.longest), max(1, len(window.prompts)))
            yield Moment(server.now.timestamp() - DOWN, down, None)
            yield Moment(server.now.timestamp(), server.start(), server.exposition())


def _without_longest(window: Window) -> tuple[int, ...]:
    rest = list(window.prompts)
    if rest:
        rest.remove(window.longest)
    return tuple(rest)


def lifecycle(
    *epochs: tuple[Mapping[str, object], int, int], seed: int = 1, server: Server | None = None
) -> str:
    """A log of epochs: settings, long prompts that were survived in each life, and deaths (0: it lives on).

    An epoch that dies ``k`` times is ``k`` lives that share the survived prompts.
    """
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    server = server or Server()
    text = ""
    for settings, survived, died in epochs:
        lives = max(1, died)
        for life in range(lives):
            text += server.start(**settings)
            share = survived // lives + (life < survived % lives)
            for _ in range(share):
                text += server.serve(Window((rng.randrange(16_400, 20_000), rng.randrange(100, 1000))))
            if died:
                text += server.die(rng.randrange(16_400, 20_000), 2)
        if not died:
            server.now += timedelta(seconds=60)
    return text
