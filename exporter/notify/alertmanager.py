"""Alertmanager's API, version 2: how an alert is written, and one push of some of them.

Whoever answers is not trusted: time and size are bounded, redirects are not followed (credentials
are for this server alone), and nothing of an answer or of credentials is in a message.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import aiohttp
from yarl import URL

from .. import __version__
from ..status import OpenAlert

TIMEOUT = 10.0
"""Seconds for one push, from connecting to the end of the answer."""

_MAX_ANSWER = 64 << 10
_REJECTED = frozenset({400, 413, 422})


class PushError(Exception):
    """Alerts were not taken. The message is one line; ``rejected``: it is the alerts, not the server."""

    def __init__(self, text: str, *, rejected: bool = False) -> None:
        super().__init__(text)
        self.rejected = rejected


class Api(Protocol):
    """Takes alerts; tests bring their own."""

    name: str

    async def push(self, alerts: Sequence[Mapping[str, object]]) -> None:
        """Hand them over, or raise ``PushError``."""
        ...


class Alertmanager:
    """One server. ``url``: its base, perhaps with a path prefix and credentials, as checked by the configuration."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        base = URL(url)
        self.name = f"{f'[{base.host}]' if ':' in (base.host or '') else base.host}:{base.port}"
        """Host and port: the label ``receiver``."""
        self._headers = {"User-Agent": f"vllm-oom-exporter/{__version__}"}
        if base.user is not None:
            pair = base64.b64encode(f"{base.user}:{base.password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        self._url = base.with_user(None) / "api" / "v2" / "alerts"
        self._session = session

    async def push(self, alerts: Sequence[Mapping[str, object]]) -> None:
        """One POST. Raises ``PushError``, and nothing else but CancelledError."""
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                self._session.post(
                    self._url, json=alerts, headers=self._headers, allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(),
                ) as response,
            ):  # fmt: skip
                await _check(response)
        except TimeoutError:
            raise PushError(f"no complete answer within {TIMEOUT:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PushError(_in_words(error)) from None
        except PushError:
            raise
        except Exception as error:  # without it a surprise in one answer would end the exporter
            raise PushError(f"unexpected {type(error).__name__}") from error


def as_json(alert: OpenAlert, now: float, ends: float) -> dict[str, object]:
    """One item of ``POST /api/v2/alerts``. ``now`` and ``ends`` are seconds since the epoch."""
    annotations = {name: text for name, text in alert.annotations.items() if text}
    return {
        "labels": {name: text for name, text in alert.labels.items() if text},
        "annotations": annotations,
        "startsAt": _stamp(min(alert.starts, now)),
        "endsAt": _stamp(ends),
        **({"generatorURL": alert.url} if alert.url else {}),
    }


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def _check(response: aiohttp.ClientResponse) -> None:
    """Alertmanager says nothing, or JSON; a login page or the server of something else says 200 too."""
    if response.status // 100 != 2:
        raise _refused(response.status)
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) > _MAX_ANSWER:
            raise PushError("the answer is no Alertmanager's (too long)")
    if body.strip():
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise PushError("the answer is no Alertmanager's (not JSON); is the URL right?") from None


def _refused(status: int) -> PushError:
    if status in _REJECTED:
        return PushError(f"the alert is refused (HTTP {status})", rejected=True)
    if status // 100 == 3:
        return PushError(f"it redirects (HTTP {status}); give the URL it leads to")
    if status in (401, 403):
        return PushError(f"it wants other credentials (HTTP {status})")
    if status in (404, 405):
        return PushError(f"there is no /api/v2/alerts (HTTP {status}); is the URL right?")
    return PushError(f"it answers HTTP {status}")


def _in_words(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            why = getattr(error.certificate_error, "verify_message", "") or "it does not match"
            return f"its certificate is not accepted: {why}"
        case aiohttp.ClientConnectorSSLError():
            return "TLS failed; does it speak https there?"
        case aiohttp.ClientConnectorDNSError():
            return "its name is not known"
        case aiohttp.ClientConnectorError(errno=int(number)):
            return f"cannot connect: {os.strerror(number)}"
        case aiohttp.ClientResponseError():
            return "the answer is not HTTP"
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "it hung up"
        case _:
            return f"no valid answer ({type(error).__name__})"
