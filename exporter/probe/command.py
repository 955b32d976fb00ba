"""The command ``probe``: what it was told, what it learns, and what it prints."""

from __future__ import annotations

import asyncio
import json
import ssl as tls
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import aiohttp

from ..config import KUBERNETES, STDIN
from ..scrape import open_session
from . import plan as planning
from .look import Look, Looker, exporter_look, limits_of, log_look
from .plan import Limits, PlanError
from .replay import Failing, Verdict, judge, read_incident, replay_plan
from .run import WATCH_SECONDS, Terms, run
from .server import Model, RefusedError, Server
from .verdict import EXIT_SURVIVED, Outcome, document, plan_document, plan_text, text

_MAX_INCIDENT = 64 << 20
_MAX_KEY = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, checked for itself. None: not given."""

    vllm_url: str
    logs: tuple[str, ...] = ()
    exporter: str | None = None
    target: str | None = None
    model: str | None = None
    step: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    shapes: tuple[str, ...] = ()
    repeat: int = planning.DEFAULT_REPEAT
    full_steps: int = planning.DEFAULT_STEPS
    max_tokens: int = planning.DEFAULT_TOKENS
    timeout: float = planning.DEFAULT_TIMEOUT
    spend: float = planning.DEFAULT_SPEND
    while_serving: bool = False
    dry_run: bool = False
    replay: str | None = None
    failed_before: int = 1
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    as_json: bool = False


def read_key(path: Path) -> str:
    """The key in a file. Raises ``RefusedError``, without anything of the file in it."""
    try:
        key = path.read_bytes()[: _MAX_KEY + 1].decode("ascii").strip()
    except OSError as error:
        raise RefusedError(f"--api-key-file {path}: {error.strerror or 'cannot be read'}") from None
    except ValueError:
        key = ""
    if not key or len(key) > _MAX_KEY or not key.isprintable():
        raise RefusedError(f"--api-key-file {path}: holds no key; one line of ASCII text is needed")
    return key


def probe(asked: Asked, out: TextIO, err: TextIO) -> int:
    """Do it; the exit code. Raises ``RefusedError`` and ``PlanError``: one line, exit code 2."""
    failing = None if asked.replay is None else read_incident(_incident_text(asked.replay))
    ssl = _ssl(asked.ca_file)
    return asyncio.run(_probe(asked, failing, ssl, out, err))


async def _probe(
    asked: Asked, failing: Failing | None, ssl: bool | tls.SSLContext, out: TextIO, err: TextIO
) -> int:
    async with open_session() as session:
        server = Server(asked.vllm_url, session, key=asked.api_key, ssl=ssl)
        looker = _looker(asked, session)
        look = Look() if looker is None else await looker()
        model = None
        if not (asked.dry_run and asked.max_model_len):
            model = _chosen(await server.models(), asked.model)
        limits = _limits(asked, look, model)
        if failing is not None:
            plan = replay_plan(failing, limits, asked.repeat, asked.max_tokens)
        else:
            plan = planning.plan(limits, asked.shapes, asked.repeat, asked.full_steps, asked.max_tokens)
        if asked.dry_run:
            out.write(_json(plan_document(plan)) if asked.as_json else plan_text(plan))
            return EXIT_SURVIVED
        assert model is not None
        terms = Terms(model.name, asked.timeout, asked.spend, asked.while_serving, WATCH_SECONDS)
        outcome = await run(plan, server, terms, looker, say=_progress(err))
    verdict = None if failing is None else _judged(failing, outcome, asked.failed_before)
    if asked.as_json:
        found = document(outcome)
        if verdict is not None:
            found["replay"] = _replayed(verdict)
        out.write(_json(found))
    else:
        out.write(text(outcome) + (f"\n  replay: {verdict.state}. {verdict.says}\n" if verdict else ""))
    if outcome.state == "skipped":
        raise RefusedError(outcome.reason)
    return outcome.exit_code


def _judged(failing: Failing, outcome: Outcome, failed_before: int) -> Verdict:
    survived = sum(one.done for one in outcome.ran)
    return judge(failing, outcome.plan.limits, survived, outcome.state == "failed", failed_before)


def _replayed(verdict: Verdict) -> dict[str, object]:
    known = {} if verdict.pvalue is None else {"pvalue": float(f"{verdict.pvalue:.3g}")}
    return {"state": verdict.state, **known, "says": verdict.says}


def _looker(asked: Asked, session: aiohttp.ClientSession) -> Looker | None:
    if asked.exporter is not None:
        return exporter_look(asked.exporter, asked.target, session)
    if not asked.logs:
        return None
    if any(one == STDIN or one.startswith(KUBERNETES) for one in asked.logs):
        raise RefusedError(
            "--log: a probe reads files only; ask the sidecar that reads this log with --exporter URL"
        )
    return log_look(asked.logs)


def _chosen(models: list[Model], name: str | None) -> Model:
    if name is None:
        if not models:
            raise RefusedError("/v1/models names no model; give --model NAME")
        return models[0]  # adapters are listed behind the base model
    found = next((one for one in models if one.name == name), None)
    if found is None:
        known = ", ".join(repr(one.name[:100]) for one in models[:10])
        raise RefusedError(f"--model {name!r}: the server has {known or 'none'}")
    return found


def _limits(asked: Asked, look: Look, model: Model | None) -> Limits:
    """What was given, else what the log says, else what the server says."""
    length = asked.max_model_len or (model.max_model_len if model else None) or look.number("max_model_len")
    step = asked.step or look.step_limit
    if step is None:
        raise RefusedError(
            "the budget is not known: give --exporter URL, --log FILE or --max-num-batched-tokens N"
        )
    if length is None:
        raise RefusedError("the longest sequence is not known; give --max-model-len N")
    settings = {**look.settings, "max_num_batched_tokens": step, "max_num_scheduled_tokens": None}
    found = limits_of(replace(look, settings=settings), length)
    assert found is not None
    return found if asked.max_num_seqs is None else replace(found, max_num_seqs=asked.max_num_seqs)


def _ssl(ca_file: str | None) -> bool | tls.SSLContext:
    if ca_file is None:
        return True
    try:
        return tls.create_default_context(cafile=ca_file)
    except (OSError, tls.SSLError) as error:
        reason = getattr(error, "strerror", None) or "holds no certificate"
        raise RefusedError(f"--ca-file {ca_file}: {reason}; give certificates in PEM format") from None


def _incident_text(path: str) -> str:
    try:
        data = sys.stdin.buffer.read(_MAX_INCIDENT + 1) if path == STDIN else Path(path).read_bytes()
        if len(data) > _MAX_INCIDENT:
            raise PlanError("--replay: the input is larger than 64 MiB; give one incident")
        return data.decode("utf-8")
    except OSError as error:
        raise PlanError(
            f"--replay {path}: {error.strerror or 'cannot be read'}; give a file or '-'"
        ) from None
    except UnicodeDecodeError:
        raise PlanError("--replay: this is not JSON; give what 'analyze --format json' prints") from None


def _progress(err: TextIO) -> Callable[[str], None]:
    """Which shape runs, on a terminal."""
    if not err.isatty():
        return lambda _: None
    return lambda shape: print(
        f"probe: {shape}: {planning.SHAPES.get(shape, 'the lengths of the incident')}", file=err
    )


def _json(data: object) -> str:
    return json.dumps(data, indent=1) + "\n"
