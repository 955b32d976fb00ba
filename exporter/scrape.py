"""Asks vLLM for ``/metrics`` and ``/health`` on a timer, and keeps what the last ten minutes said.

A timer and not "scrape on scrape", because ``/metrics`` is gone within 0.1 s of the crash: what is
to be known of the time before it has to be here already. Whoever answers is not trusted: time,
size, compression and redirects are bounded, and nothing of an answer reaches the log.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl as tls
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import aiohttp
import structlog
from yarl import URL

from . import __version__
from .vllm.exposition import MAX_BODY, ExpositionError, Snapshot, parse, progressed

LONGEST_WAIT = 5.0
"""Seconds that one request may take, where the interval is longer."""

RING_SAMPLES = 300
RING_SECONDS = 600.0
RING_NUMBERS = 500_000
"""Numbers kept over all samples: ten minutes of 20 engines, some 16 MB."""

_IN_THREAD = 1 << 20  # bytes that take longer to read than the event loop should stand still
_HEADERS = {
    "Accept": "text/plain; version=0.0.4",
    # the answer comes from the process that serves requests: it need not compress for us
    "Accept-Encoding": "identity",
    "User-Agent": f"vllm-oom-exporter/{__version__}",
}
_NO_TIMEOUT = aiohttp.ClientTimeout()  # ours is around the whole exchange

log = structlog.get_logger(__name__)


class Sample(NamedTuple):
    """One answer, and when it began: seconds since the epoch."""

    time: float
    snapshot: Snapshot


class ScrapeError(Exception):
    """An answer that is of no use; the message is one line without anything from the answer."""


def open_session() -> aiohttp.ClientSession:
    """A session fit for scraping: it keeps no cookies and reads no proxy settings. Close it."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())


class Scraper:
    """Polls one vLLM server; one request at a time, however slow it is.

    ``url`` is its base (``http://localhost:8000``, perhaps with a path or credentials), or None as
    long as it is not known. ``interval``
    is in seconds, ``clock`` gives seconds since the epoch. ``ssl`` is what aiohttp takes: True
    verifies certificates, False does not, a context brings its own authorities. Raises ValueError
    for a URL or an interval that cannot work.

    All attributes describe the last poll and may be read at any time:

    * ``up``: whether ``/metrics`` gave an exposition; None before the first poll.
    * ``seconds``: how long ``/metrics`` took, with reading it.
    * ``health``: the status code of ``/health``, or None without an answer.
    * ``problem``: one line for people, or None. Also set where ``up`` but something is odd.
    * ``last_progress``: when a token was last seen to be read or written, seconds since the epoch;
      None until two answers differ. A pause in answers ends at the first answer after it.
    * ``ring``: samples, oldest first.
    """

    def __init__(
        self,
        url: str | None,
        interval: float,
        clock: Callable[[], float],
        session: aiohttp.ClientSession,
        *,
        ssl: bool | tls.SSLContext = True,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not (math.isfinite(interval) and interval > 0):
            raise ValueError(f"scrape interval {interval}: must be a positive number of seconds")
        self.interval = interval
        self.up: bool | None = None
        self.seconds: float | None = None
        self.health: int | None = None
        self.problem: str | None = None
        self.last_progress: float | None = None
        self.ring: deque[Sample] = deque()
        self.point_to(url)
        self._clock = clock
        self._session = session
        self._ssl = ssl
        self._sleep = sleep
        self._wait = min(interval, LONGEST_WAIT)
        self._numbers = 0
        self._one_at_a_time = asyncio.Lock()

    def point_to(self, url: str | None) -> None:
        """Ask this server from the next poll on, or none. Raises ValueError for a URL that cannot work."""
        self._base = None if url is None else _base(url)

    @property
    def latest(self) -> Snapshot | None:
        """What the last poll gave; None if it failed."""
        return self.ring[-1].snapshot if self.up and self.ring else None

    def before(self, when: float) -> Sample | None:
        """The newest sample that is not younger than ``when``, seconds since the epoch."""
        return next((sample for sample in reversed(self.ring) if sample.time <= when), None)

    async def run(self) -> None:
        """Poll at once and then every interval, until cancelled. A failed poll waits a whole interval."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.poll()
            spent = loop.time() - began if self.up else 0.0
            await self._sleep(max(self.interval - spent, 0.0))

    async def poll(self) -> None:
        """Ask once. Raises nothing but CancelledError."""
        async with self._one_at_a_time:
            if (base := self._base) is None:
                self.up = self.seconds = self.health = self.problem = None
                return
            loop = asyncio.get_running_loop()
            began = loop.time()
            sample: Sample | None = None
            try:
                sample = await self._scrape(base / "metrics")
                problem = _odd(sample.snapshot)
            except (ScrapeError, ExpositionError) as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no complete answer within {self._wait:g} s"
            except (aiohttp.ClientError, OSError) as error:
                problem = in_words(error)
            except Exception as error:  # without it a surprise in one answer would end the exporter
                problem = f"unexpected {type(error).__name__}"
            self.seconds = loop.time() - began
            self.up = sample is not None
            if sample is not None:
                self._keep(sample)
            self._tell(problem, base)
            self.health = await self._ask_health(base / "health")

    async def _scrape(self, url: URL) -> Sample:
        async with asyncio.timeout(self._wait), self._get(url) as response:
            when = self._clock()
            if response.status != 200:
                raise ScrapeError(_status_in_words(response.status))
            encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if encoding not in ("identity", "", "gzip", "x-gzip"):
                raise ScrapeError("the answer is compressed in a way that was not asked for")
            body = await _body(response)
        compressed = encoding.endswith("gzip")
        # outside the timeout: a thread cannot be stopped, so the next poll has to wait for it
        if compressed or len(body) > _IN_THREAD:
            snapshot = await asyncio.to_thread(_parsed, body, compressed)
        else:
            snapshot = parse(body)
        return Sample(when, snapshot)

    async def _ask_health(self, url: URL) -> int | None:
        try:
            async with asyncio.timeout(self._wait), self._get(url) as response:
                return response.status
        except (aiohttp.ClientError, OSError, ValueError):  # a timeout is an OSError
            return None

    def _get(self, url: URL) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(
            url,
            headers=_HEADERS,
            allow_redirects=False,
            auto_decompress=False,
            timeout=_NO_TIMEOUT,
            ssl=self._ssl,
        )

    def _keep(self, sample: Sample) -> None:
        ring = self.ring
        if ring and progressed(ring[-1].snapshot, sample.snapshot):
            self.last_progress = sample.time
        ring.append(sample)
        self._numbers += sample.snapshot.size
        while len(ring) > 1 and (
            len(ring) > RING_SAMPLES
            or self._numbers > RING_NUMBERS
            # also where the clock was set far back: samples from the future are of no use
            or abs(sample.time - ring[0].time) > RING_SECONDS
        ):
            self._numbers -= ring.popleft().snapshot.size

    def _tell(self, problem: str | None, base: URL) -> None:
        """Log a change of ``problem``, once."""
        if problem == self.problem:
            return
        self.problem = problem
        shown = str((base / "metrics").with_user(None))
        if problem is None:
            log.info("vLLM's metrics are read again", url=shown)
        else:
            log.warning("vLLM's metrics are not read" if not self.up else "vLLM's metrics are odd",
                        url=shown, problem=problem)  # fmt: skip


def _base(url: str) -> URL:
    try:
        base = URL(url)
        usable = base.scheme in ("http", "https") and bool(base.host)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("vLLM's URL is not usable: give it as http://host:port")
    return base


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The body as sent. Raises ScrapeError as soon as it is, or claims to be, too large."""
    if (response.content_length or 0) > MAX_BODY:
        raise ScrapeError(_TOO_LARGE)
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_BODY:
            raise ScrapeError(_TOO_LARGE)
        chunks.append(chunk)
    return b"".join(chunks)


def _parsed(body: bytes, compressed: bool) -> Snapshot:
    return parse(_inflated(body) if compressed else body)


def _inflated(body: bytes) -> bytes:
    """One gzip member, never more than ``MAX_BODY`` of it."""
    stream = zlib.decompressobj(wbits=31)
    try:
        text = stream.decompress(body, MAX_BODY + 1)
    except zlib.error:
        raise ScrapeError("the answer says that it is gzip, but is not") from None
    if len(text) > MAX_BODY:
        raise ScrapeError(_TOO_LARGE)
    if not stream.eof or stream.unused_data:
        raise ScrapeError("the answer is gzip that was cut off, or has something behind it")
    return text


_TOO_LARGE = f"the answer is larger than {MAX_BODY >> 20} MiB"


def _odd(snapshot: Snapshot) -> str | None:
    """What is odd about an exposition that could be read."""
    if snapshot.broken:
        return "some lines of vLLM's metrics could not be read"
    if not snapshot.engines:
        return "no vLLM metrics in the answer: wrong address, or vLLM runs with --disable-log-stats"
    return None


def _status_in_words(status: int) -> str:
    if 300 <= status < 400:
        return f"the answer is a redirect ({status}), which is not followed: give the final URL"
    if status in (401, 403):
        return f"access denied (HTTP {status})"
    if status == 404:
        return "there is no /metrics (HTTP 404): is this vLLM's address?"
    return f"HTTP status {status}"


def in_words(error: aiohttp.ClientError | OSError) -> str:
    """An error without anything of the answer in it, and the same text whenever it is the same error."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or "not valid"
        return f"its TLS certificate is not accepted: {reason}"
    if isinstance(error, aiohttp.ClientSSLError):
        return "the TLS handshake failed: is it https?"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, socket.gaierror):
            return "cannot connect: the name of the host is not known"
        return f"cannot connect: {_strerror(error.os_error)}"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is not HTTP"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | OSError):
        return "the connection was lost before the end of the answer"
    return f"cannot be asked: {type(error).__name__}"


def _strerror(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else type(error).__name__
