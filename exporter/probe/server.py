"""Talks to the vLLM under test: what it is, whether it is busy, one completion at a time.

Nothing of an answer gets into a message: an error may repeat a prompt, and a key is in every
request. What is recognised of it is said in our words.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl as tls
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from .. import __version__
from ..scrape import in_words
from ..vllm.exposition import ExpositionError, Snapshot, parse

_ASKED_SECONDS = 10.0  # for what is not a completion
_MAX_ANSWER = 4 << 20
_BACK_OFF = (1.0, 2.0, 4.0, 8.0)  # seconds between tries after 429; the last one goes on
_LONGEST_BACK_OFF = 30.0
_HITS = re.compile(
    rb"^vllm:(?:gpu_)?prefix_cache_hits(?:_total)?(?:\{[^\n]*\})? (\d[0-9.e+]{0,30})$", re.MULTILINE
)
_TOO_LONG = re.compile(r"maximum context length|longer than the maximum model length|max_model_len", re.I)
_VOCABULARY = re.compile(r"out of vocabulary|out of range|vocab", re.I)


class RefusedError(Exception):
    """The server did not take the request, and is well. One line that says what to do."""


class VocabularyError(RefusedError):
    """A token id that the model does not have."""


class FailedError(Exception):
    """The server failed at, or under, a request. One line."""


class Model(NamedTuple):
    """One entry of ``/v1/models``."""

    name: str
    max_model_len: int | None


class Load(NamedTuple):
    """What ``/metrics`` says at one moment. ``cached``: prompt tokens that the prefix cache answered."""

    snapshot: Snapshot
    cached: float | None

    @property
    def requests(self) -> float:
        """Requests that run or wait."""
        return (self.snapshot.running or 0) + (self.snapshot.waiting or 0)

    @property
    def worked(self) -> tuple[float, float]:
        """Prompt tokens and answered tokens so far; they stand still on an idle server."""
        engines = self.snapshot.engines
        return sum(e.prompt_tokens or 0 for e in engines), sum(e.generation_tokens or 0 for e in engines)


class Server:
    """One server at ``url``. ``key`` goes into every request to ``/v1``. ``ssl`` as aiohttp takes it."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        key: str | None = None,
        ssl: bool | tls.SSLContext = True,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._base = URL(url)
        self._session = session
        self._ssl = ssl
        self._sleep = sleep
        self._headers = {"User-Agent": f"vllm-oom-exporter/{__version__}"}
        self._key = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def health(self) -> int | None:
        """The status of ``/health``; None without an answer."""
        try:
            async with asyncio.timeout(_ASKED_SECONDS), self._request("GET", "health") as response:
                return response.status
        except (aiohttp.ClientError, OSError):  # a timeout is an OSError
            return None

    async def load(self) -> Load | None:
        """What ``/metrics`` says; None where it does not say anything of an engine."""
        try:
            async with asyncio.timeout(_ASKED_SECONDS), self._request("GET", "metrics") as response:
                if response.status != 200:
                    return None
                body = await _body(response, 32 << 20)
            snapshot = parse(body)
        except (aiohttp.ClientError, OSError, ExpositionError, FailedError):
            return None
        if not snapshot.engines:
            return None
        hits = [float(number) for number in _HITS.findall(body)]
        return Load(snapshot, sum(hits) if hits else None)

    async def models(self) -> list[Model]:
        """The models it serves. Raises ``RefusedError`` where it can't be asked."""
        try:
            async with (
                asyncio.timeout(_ASKED_SECONDS),
                self._request("GET", "v1/models", self._key) as response,
            ):
                if response.status != 200:
                    raise RefusedError(_refusal(response.status, self._key, "/v1/models"))
                document = json.loads(await _body(response, _MAX_ANSWER))
        except TimeoutError:
            raise RefusedError(f"no answer from /v1/models within {_ASKED_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RefusedError(in_words(error)) from None
        except (ValueError, FailedError):
            raise RefusedError("/v1/models does not answer as vLLM does: is this its address?") from None
        found = document.get("data") if isinstance(document, Mapping) else None
        return [
            Model(one["id"], length if isinstance(length := one.get("max_model_len"), int) else None)
            for one in (found if isinstance(found, list) else [])
            if isinstance(one, Mapping) and isinstance(one.get("id"), str)
        ]

    async def complete(self, model: str, prompts: list[list[int]], answer: int) -> None:
        """Ask for completions of ``answer`` tokens, in one request, and wait for the end of all.

        After 429 it is asked again, later and later. Raises ``RefusedError`` and ``FailedError``.
        """
        body = {
            "model": model, "prompt": prompts[0] if len(prompts) == 1 else prompts, "max_tokens": answer, "temperature": 0,
            "ignore_eos": True, "stream": False,
        }  # fmt: skip
        for tried in range(1 << 30):
            try:
                async with self._request("POST", "v1/completions", self._key, body) as response:
                    status, after = response.status, response.headers.get("Retry-After", "")
                    text = await _body(response, _MAX_ANSWER)
            except (aiohttp.ClientError, OSError) as error:
                raise FailedError(f"the server was lost during a request: {in_words(error)}") from None
            if status == 200:
                _check(text, [len(one) for one in prompts])
                return
            if status != 429:
                break
            wait = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
            await self._sleep(min(max(wait, _BACK_OFF[min(tried, len(_BACK_OFF) - 1)]), _LONGEST_BACK_OFF))
        if status >= 500:
            raise FailedError(f"the server answered a request with HTTP {status}")
        if status == 400 and _VOCABULARY.search(said := text[:4096].decode("utf-8", "replace")):
            raise VocabularyError("the vocabulary of the model is too small for the prompts")
        if status in (400, 413) and (status == 413 or _TOO_LONG.search(said)):
            raise RefusedError(
                f"a prompt of {max(map(len, prompts))} tokens is longer than the server takes; give --max-model-len"
            )
        if status == 404:
            raise RefusedError(
                f"there is no model {_shown(model)} here (HTTP 404); give --model as /v1/models names it"
            )
        raise RefusedError(_refusal(status, self._key, "/v1/completions"))

    def _request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Any = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.request(
            method, self._base / path, json=body, headers={**self._headers, **(headers or {})}, ssl=self._ssl,
            allow_redirects=False, timeout=aiohttp.ClientTimeout(sock_connect=_ASKED_SECONDS),
        )  # fmt: skip


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > most:
            raise FailedError("an answer was too large to be vLLM's")
        chunks.append(chunk)
    return b"".join(chunks)


def _check(text: bytes, sent: list[int]) -> None:
    """That the answer says that the prompts, of so many tokens, were computed to their end."""
    try:
        document = json.loads(text)
        reasons = {one.get("finish_reason") for one in document["choices"]}
        answered = len(document["choices"])
        counted = document.get("usage", {}).get("prompt_tokens")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FailedError("a request was answered with something that is no completion") from None
    if answered != len(sent):
        raise FailedError("a request was answered with fewer completions than it has prompts")
    if reasons & {"abort", "error"}:
        raise FailedError("the server gave up a request")
    if counted is not None and counted != sum(sent):
        raise RefusedError(
            "the server counts other tokens than were sent: something in front of it cuts prompts"
        )


def _refusal(status: int, key: Mapping[str, str], path: str) -> str:
    if status in (401, 403):
        known = "does not take this API key" if key else "wants an API key"
        return f"the server {known} (HTTP {status}); set VLLM_API_KEY or give --api-key-file FILE"
    if status == 404:
        return f"there is no {path} (HTTP 404): is this vLLM's address, with its base path?"
    if 300 <= status < 400:
        return f"{path} answers with a redirect (HTTP {status}), which is not followed; give the final URL"
    if status in (502, 503, 504):
        return f"the server is not ready (HTTP {status}); wait until /health answers 200"
    return f"{path} answers HTTP {status}"


def _shown(name: str) -> str:
    return repr(name[:100])
