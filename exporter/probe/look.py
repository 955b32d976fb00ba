"""What the server's log says of it at one moment: read here, or by a sidecar that is asked.

Without any of them a probe still sees whether requests finish. With one it learns the budget, counts
true steps, and can name what the server died of.
"""

from __future__ import annotations

import asyncio
import glob
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from ..analyze import analyze
from ..diagnosis.engine import step_limit
from ..document import incident_document, life_document
from ..scrape import in_words
from ..status import TargetStatus
from .plan import Limits
from .server import RefusedError

_ASKED_SECONDS = 10.0
_MAX_ANSWER = 32 << 20

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """The current life of the engine. ``steps``, ``full``, ``largest``: of its per-step lines so far.

    ``incidents``: documents, newest first. ``settings`` and ``memory`` are those of the contract.
    """

    state: str = "unknown"
    model: str | None = None
    settings: Document = field(default_factory=dict)
    memory: Document = field(default_factory=dict)
    steps: int = 0
    full: int = 0
    largest: int = 0
    incidents: tuple[Document, ...] = ()

    @property
    def step_limit(self) -> int | None:
        """Tokens one step may hold."""
        return step_limit(self.settings)

    def number(self, name: str) -> int | None:
        """A setting that is a positive number."""
        return positive(self.settings.get(name))


Looker = Callable[[], Awaitable[Look]]
"""Looks anew each time it is called. Raises ``RefusedError`` where it can't."""


def positive(value: object) -> int | None:
    """``value`` if it is a whole number above 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def limits_of(look: Look, max_model_len: int | None = None) -> Limits | None:
    """The limits that the log tells; None without a step limit or a longest sequence."""
    step, longest = look.step_limit, max_model_len or look.number("max_model_len")
    if step is None or longest is None:
        return None
    known = {"max_num_seqs": seqs} if (seqs := look.number("max_num_seqs")) else {}
    return Limits(step, longest, kv_cache=positive(look.memory.get("kv_cache_tokens")), **known)


def status_look(status: TargetStatus) -> Look:
    """What the sidecar itself knows of a target."""
    engine = status.engines[-1] if status.engines else {}
    return _look(status.engine_state, engine, status.steps, status.incidents)


def log_look(sources: tuple[str, ...]) -> Looker:
    """Reads log files, whole, each time."""

    async def look() -> Look:
        files = sorted({one for source in sources for one in glob.glob(source)} or sources)  # noqa: PTH207 - SOURCE may be relative or absolute
        result = await asyncio.to_thread(analyze, files)
        if result.problems:
            raise RefusedError(result.problems[0])
        history = result.history
        if not history.lives.all:
            return Look()
        life = history.lives.current
        own = history.ledger.life(life)
        incidents = [incident_document(one) for one in history.incidents()]
        steps = {"seen": own.steps, "full": own.full_steps, "largest_tokens": own.largest_step}
        return _look(life.state, life_document(life), steps, incidents[::-1])

    return look


def exporter_look(url: str, target: str | None, session: aiohttp.ClientSession) -> Looker:
    """Asks a running sidecar. ``target`` chooses where it follows several servers."""
    base = URL(url)

    async def ask(path: str, **query: str) -> Any:
        try:
            async with (
                asyncio.timeout(_ASKED_SECONDS),
                session.get(base / path, params=query, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise RefusedError(
                        f"--exporter: HTTP {response.status} from /{path}; give the sidecar's address"
                    )
                body = await response.content.read(_MAX_ANSWER)
                while not response.content.at_eof() and len(body) < _MAX_ANSWER:
                    body += await response.content.read(_MAX_ANSWER)
            return json.loads(body)
        except TimeoutError:
            raise RefusedError(f"--exporter: no answer within {_ASKED_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RefusedError(f"--exporter: {in_words(error)}") from None
        except ValueError:
            raise RefusedError("--exporter: the answer is not JSON; give the sidecar's address") from None

    async def look() -> Look:
        try:
            every = (await ask("api/v1/targets"))["targets"]
            chosen = [one for one in every if target in (None, one["target"])]
            if len(chosen) != 1:
                names = ", ".join(str(one["target"])[:100] for one in every)
                raise RefusedError(f"--exporter: it follows {names or 'nothing'}; choose one with --target")
            of = chosen[0]
            found = await ask("api/v1/incidents", target=str(of["target"]), limit="20")
            engine = of["engines"][-1] if of["engines"] else {}
            return _look(of["engine_state"], engine, of.get("steps"), found["incidents"])
        except (KeyError, TypeError, IndexError):
            raise RefusedError("--exporter: this is not the API of the sidecar; give its address") from None

    return look


def _look(state: str, engine: Document, steps: Document | None, incidents: Any) -> Look:
    counted = {name: value for name, value in (steps or {}).items() if isinstance(value, int)}
    model = engine.get("model")
    return Look(
        state,
        model if isinstance(model, str) else None,
        dict(engine.get("settings") or {}),
        dict(engine.get("memory") or {}),
        counted.get("seen", 0),
        counted.get("full", 0),
        counted.get("largest_tokens", 0),
        tuple(incidents),
    )
