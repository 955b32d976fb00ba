from __future__ import annotations

import asyncio
import gzip
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import structlog.testing
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from exporter import scrape
from exporter.scrape import RING_SAMPLES, Sample, Scraper, open_session
from exporter.vllm.exposition import MAX_BODY, ExpositionError, increase, parse

pytestmark = pytest.mark.asyncio

BODY = gzip.decompress((Path(__file__).parent / "expositions" / "real_base_eager_after.prom.gz").read_bytes())
NOW = 1_796_059_743.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    """A wall clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self.now


class Vllm:
    """A server that answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.metrics: Handler = answering(BODY)
        self.health: Handler = answering(b"")
        self.asked: list[str] = []
        self.headers: dict[str, str] = {}
        self.busy = 0
        self.busiest = 0
        self.over = asyncio.Event()
        self.server = TestServer(self._app(), host="127.0.0.1")

    def _app(self) -> web.Application:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.asked.append(request.path)
            self.headers = dict(request.headers)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            try:
                handler = self.health if request.path.endswith("health") else self.metrics
                return await handler(request)
            finally:
                self.busy -= 1

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        app.on_shutdown.append(self._end)
        return app

    async def _end(self, _: web.Application) -> None:
        self.over.set()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.server.port}"


def answering(body: bytes, status: int = 200, **headers: str) -> Handler:
    """A handler with one answer."""

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return handler


def tokens(count: float, start: float = 1000.0, engine: str = "0") -> Handler:
    """A server that has generated ``count`` tokens since ``start``."""
    text = f'vllm:generation_tokens_total{{engine="{engine}"}} {count}\nprocess_start_time_seconds {start}\n'
    return answering(text.encode())


@pytest_asyncio.fixture
async def vllm() -> AsyncIterator[Vllm]:
    """A running server."""
    vllm = Vllm()
    await vllm.server.start_server()
    yield vllm
    vllm.over.set()
    await vllm.server.close()


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """The session of the exporter."""
    async with open_session() as session:
        yield session


@pytest.fixture
def clock() -> Clock:
    """A wall clock."""
    return Clock()


@pytest.fixture
def scraper(vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> Scraper:
    """A scraper of the server with time enough for a busy machine."""
    return Scraper(vllm.url, 60.0, clock, session)


def failed(scraper: Scraper, problem: str) -> None:
    """Check that the last poll failed, and how."""
    assert scraper.problem == problem
    assert scraper.up is False
    assert scraper.latest is None
    assert scraper.seconds is not None
    assert not scraper.ring


class TestAnswers:
    """What an answer does."""

    async def test_before_the_first(self, scraper: Scraper) -> None:
        """Before the first poll nothing is known."""
        known = (scraper.up, scraper.seconds, scraper.health, scraper.problem, scraper.last_progress)
        assert known == (None, None, None, None, None)
        assert scraper.latest is None
        assert scraper.before(NOW) is None

    async def test_normal(self, scraper: Scraper, vllm: Vllm) -> None:
        """A good answer is kept with its time, and vLLM's process need not compress it."""
        await scraper.poll()
        assert (scraper.up, scraper.health, scraper.problem) == (True, 200, None)
        assert scraper.seconds is not None
        assert 0 < scraper.seconds < 60
        assert list(scraper.ring) == [Sample(NOW, parse(BODY))]
        assert scraper.latest == parse(BODY)
        assert vllm.asked == ["/metrics", "/health"]
        assert vllm.headers["Accept-Encoding"] == "identity"

    async def test_base_path(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """A path in the URL comes before /metrics, a query does not survive."""
        await Scraper(f"{vllm.url}/llm/?a=b", 60.0, clock, session).poll()
        assert vllm.asked == ["/llm/metrics", "/llm/health"]

    async def test_health(self, scraper: Scraper, vllm: Vllm) -> None:
        """The status of /health is told apart from /metrics."""
        vllm.health = answering(b"dead", 503)
        await scraper.poll()
        assert (scraper.up, scraper.health) == (True, 503)
        vllm.metrics = answering(b"", 500)
        await scraper.poll()
        assert (scraper.up, scraper.health) == (False, 503)

    async def test_health_is_silent(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """/health that never answers is None, and leaves the metrics alone."""

        async def silent(_: web.Request) -> web.StreamResponse:
            await vllm.over.wait()
            return web.Response()

        vllm.health = silent
        scraper = Scraper(vllm.url, 0.5, clock, session)
        await scraper.poll()
        assert (scraper.up, scraper.health) == (True, None)

    @pytest.mark.parametrize(
        ("status", "problem"),
        [
            (404, "there is no /metrics (HTTP 404): is this vLLM's address?"),
            (500, "HTTP status 500"),
            (503, "HTTP status 503"),
            (401, "access denied (HTTP 401)"),
            (204, "HTTP status 204"),
        ],
    )
    async def test_status(self, scraper: Scraper, vllm: Vllm, status: int, problem: str) -> None:
        """Any other status than 200 is a failure, whatever the body."""
        vllm.metrics = answering(b"" if status == 204 else BODY, status)
        await scraper.poll()
        failed(scraper, problem)
        assert scraper.health == 200

    async def test_redirect(self, scraper: Scraper, vllm: Vllm) -> None:
        """A redirect is not followed."""
        vllm.metrics = answering(b"", 302, Location="/elsewhere")
        vllm.health = answering(b"", 307, Location="/elsewhere")
        await scraper.poll()
        failed(scraper, "the answer is a redirect (302), which is not followed: give the final URL")
        assert scraper.health == 307
        assert vllm.asked == ["/metrics", "/health"]

    async def test_web_page(self, scraper: Scraper, vllm: Vllm) -> None:
        """A web page with status 200 is no exposition."""
        vllm.metrics = answering(b"<html>hello</html>\n")
        await scraper.poll()
        failed(scraper, "the answer is a web page, not metrics")

    @pytest.mark.parametrize(
        ("body", "problem"),
        [
            (b"", "no vLLM metrics in the answer: wrong address, or vLLM runs with --disable-log-stats"),
            (
                b"go_goroutines 7\n",
                "no vLLM metrics in the answer: wrong address, or vLLM runs with --disable-log-stats",
            ),
            (BODY + b"vllm:num_requests_running oops\n", "some lines of vLLM's metrics could not be read"),
        ],
        ids=["empty", "other", "broken"],
    )
    async def test_odd(self, scraper: Scraper, vllm: Vllm, body: bytes, problem: str) -> None:
        """An exposition with something odd about it is up, with a problem."""
        vllm.metrics = answering(body)
        await scraper.poll()
        assert (scraper.up, scraper.problem) == (True, problem)
        assert scraper.latest == parse(body)

    async def test_large(self, scraper: Scraper, vllm: Vllm) -> None:
        """A large exposition is read in a thread, to the same end."""
        padding = b"".join(b'http_requests_total{route="%d"} 1\n' % n for n in range(60_000))
        assert len(padding) > 1 << 20
        vllm.metrics = answering(padding + BODY)
        await scraper.poll()
        assert scraper.latest == parse(BODY)


class TestHostileAnswers:
    """What an answer cannot do."""

    async def test_one_byte_at_a_time(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """The whole answer has to be there within the interval, however steadily it comes."""

        async def slow(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for byte in BODY:
                await response.write(bytes([byte]))
                try:
                    await asyncio.wait_for(vllm.over.wait(), 0.05)
                except TimeoutError:
                    continue
                break
            return response

        vllm.metrics = slow
        scraper = Scraper(vllm.url, 0.3, clock, session)
        await scraper.poll()
        failed(scraper, "no complete answer within 0.3 s")
        assert scraper.seconds is not None
        assert 0.25 < scraper.seconds < 5

    async def test_longest_wait(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """A long interval does not make a long wait."""
        assert Scraper(vllm.url, 60.0, clock, session)._wait == 5.0
        assert Scraper(vllm.url, 2.0, clock, session)._wait == 2.0

    @pytest.mark.parametrize("claimed", [100_000_000, None], ids=["100 MB", "endless"])
    async def test_too_large(self, scraper: Scraper, vllm: Vllm, claimed: int | None) -> None:
        """A body is given up when it is, or says that it will be, larger than 32 MiB."""
        sent = 0

        async def large(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse()
            response.content_length = claimed
            await response.prepare(request)
            while not vllm.over.is_set():
                await response.write(b"a 1\n" * 65_536)
                sent += 4 * 65_536
            return response

        vllm.metrics = large
        await scraper.poll()
        failed(scraper, "the answer is larger than 32 MiB")
        assert sent < (1 << 24 if claimed else MAX_BODY + (1 << 24))

    @pytest.mark.parametrize(
        ("body", "encoding", "problem"),
        [
            (gzip.compress(bytes(MAX_BODY + 1)), "gzip", "the answer is larger than 32 MiB"),
            (gzip.compress(b"\n" * (MAX_BODY + 1)), "x-gzip", "the answer is larger than 32 MiB"),
            (b"no gzip at all", "gzip", "the answer says that it is gzip, but is not"),
            (gzip.compress(BODY)[:-9], "gzip", "the answer is gzip that was cut off, or has something behind it"),
            (gzip.compress(BODY) * 2, "gzip", "the answer is gzip that was cut off, or has something behind it"),
            (zlib.compress(BODY), "deflate", "the answer is compressed in a way that was not asked for"),
            (BODY, "gzip, gzip", "the answer is compressed in a way that was not asked for"),
        ],
        ids=["bomb", "lines", "none", "cut", "two", "deflate", "nested"],
    )  # fmt: skip
    async def test_compressed(
        self, scraper: Scraper, vllm: Vllm, body: bytes, encoding: str, problem: str
    ) -> None:
        """Compression that bombs, breaks or was not asked for is refused."""
        vllm.metrics = answering(body, Content_Encoding=encoding)
        await scraper.poll()
        failed(scraper, problem)

    async def test_gzip(self, scraper: Scraper, vllm: Vllm) -> None:
        """Plain gzip is read, although it was not asked for."""
        vllm.metrics = answering(gzip.compress(BODY), Content_Encoding="GZIP")
        await scraper.poll()
        assert scraper.latest == parse(BODY)

    async def test_refused(self, clock: Clock, session: aiohttp.ClientSession) -> None:
        """A server that is not there yet is a failure."""
        scraper = Scraper(f"http://127.0.0.1:{unused_port()}", 60.0, clock, session)
        await scraper.poll()
        failed(scraper, "cannot connect: Connection refused")
        assert scraper.health is None

    async def test_reset(self, scraper: Scraper, vllm: Vllm) -> None:
        """A connection that is reset in the middle of the body is a failure."""

        async def reset(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            response.content_length = len(BODY)
            await response.prepare(request)
            await response.write(BODY[:1000])
            assert request.transport is not None
            request.transport.abort()
            return response

        vllm.metrics = reset
        await scraper.poll()
        failed(scraper, "the connection was lost before the end of the answer")
        assert scraper.health == 200

    @pytest.mark.parametrize(
        ("answer", "problem"),
        [
            (b"", "the connection was lost before the end of the answer"),
            (b"SSH-2.0-OpenSSH_9.2 vllm secret\r\n\r\n", "the answer is not HTTP"),
            (b"HTTP/1.1 200 OK\r\nX-Secret: " + b"a" * 100_000 + b"\r\n\r\n", "the answer is not HTTP"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "the answer is not HTTP"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nsecret", "the answer is not HTTP"),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nup 1\n",
                "the connection was lost before the end of the answer",
            ),
            (b"HTTP/1.1 200 OK\r\n\r\nup \xff\xff\n", "the answer is not text in UTF-8"),
        ],
        ids=["nothing", "ssh", "header", "length", "chunk", "short", "bytes"],
    )
    async def test_not_http(
        self, clock: Clock, session: aiohttp.ClientSession, answer: bytes, problem: str
    ) -> None:
        """Whatever a port answers, the problem is one line in our own words."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            scraper = Scraper(f"http://127.0.0.1:{port}", 60.0, clock, session)
            await scraper.poll()
        failed(scraper, problem)

    async def test_a_surprise(self, scraper: Scraper, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even an error that nobody thought of ends no more than one poll."""

        def surprise(_: bytes) -> None:
            raise RuntimeError("text of an answer")

        with monkeypatch.context() as patch:
            patch.setattr(scrape, "parse", surprise)
            await scraper.poll()
        failed(scraper, "unexpected RuntimeError")
        await scraper.poll()
        assert scraper.up

    async def test_no_cookies(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """Cookies of an answer are neither kept nor sent back."""
        vllm.metrics = answering(BODY, Set_Cookie="a=b; Path=/")
        # a cookie jar passes over hosts that are only numbers
        scraper = Scraper(vllm.url.replace("127.0.0.1", "localhost"), 60.0, clock, session)
        await scraper.poll()
        await scraper.poll()
        assert scraper.up
        assert "Cookie" not in vllm.headers


class TestTls:
    """Certificates are verified unless it is configured otherwise."""

    async def test_certificates(self, clock: Clock, session: aiohttp.ClientSession) -> None:
        """An unknown authority is refused; its own context, or none, lets it pass."""
        authority = trustme.CA()
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(theirs)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        vllm = Vllm()
        await vllm.server.start_server(ssl=theirs)
        url = f"https://127.0.0.1:{vllm.server.port}"
        try:
            unknown = Scraper(url, 60.0, clock, session)
            await unknown.poll()
            assert not vllm.asked
            failed(unknown, "its TLS certificate is not accepted: unable to get local issuer certificate")
            for ours in (trusting, False):
                known = Scraper(url, 60.0, clock, session, ssl=ours)
                await known.poll()
                assert (known.up, known.health) == (True, 200)
            plain = Scraper(url.replace("https", "http"), 60.0, clock, session)
            await plain.poll()
            assert plain.up is False
        finally:
            await vllm.server.close()

    async def test_not_https(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """A server that speaks http is said not to speak https."""
        scraper = Scraper(vllm.url.replace("http:", "https:"), 60.0, clock, session)
        await scraper.poll()
        failed(scraper, "the TLS handshake failed: is it https?")


class TestTime:
    """Restarts, progress, and how long samples are kept."""

    async def test_restart(self, scraper: Scraper, vllm: Vllm, clock: Clock) -> None:
        """Over a restart of vLLM there is no increase, but any token is progress."""
        for at, handler in enumerate([tokens(500), tokens(600), tokens(20, start=2000.0)]):
            vllm.metrics = handler
            clock.now = NOW + 2 * at
            await scraper.poll()
        first, second, third = (sample.snapshot for sample in scraper.ring)
        rise = increase(first, second)
        assert rise is not None
        assert rise.generation_tokens == 100
        assert increase(second, third) is None
        assert scraper.last_progress == NOW + 4

    async def test_progress(self, scraper: Scraper, vllm: Vllm, clock: Clock) -> None:
        """The last progress is when a counter was last seen to grow; failures in between do not matter."""
        seen = []
        steps = [
            tokens(500), tokens(500), tokens(501), tokens(501), answering(b"", 500), tokens(501),
            tokens(0, start=2000.0), tokens(1, start=2000.0),
        ]  # fmt: skip
        for at, handler in enumerate(steps):
            vllm.metrics = handler
            clock.now = NOW + at
            await scraper.poll()
            seen.append(scraper.last_progress and scraper.last_progress - NOW)
        assert seen == [None, None, 2, 2, 2, 2, 2, 7]

    async def test_what_was_before_the_crash(self, scraper: Scraper, vllm: Vllm, clock: Clock) -> None:
        """After vLLM is gone its last samples are still there, found by time."""
        for at in (0, 2, 4):
            vllm.metrics = tokens(at)
            clock.now = NOW + at
            await scraper.poll()
        vllm.metrics = answering(b"", 500)
        clock.now = NOW + 6
        await scraper.poll()
        assert scraper.latest is None
        assert scraper.before(NOW + 3.5) == scraper.ring[1]
        assert scraper.before(NOW + 2) == scraper.ring[1]
        assert scraper.before(NOW + 60) == scraper.ring[2]
        assert scraper.before(NOW - 1) is None

    async def test_ring_by_count(
        self, scraper: Scraper, monkeypatch: pytest.MonkeyPatch, clock: Clock
    ) -> None:
        """No more than so many samples are kept: ten minutes at 2 s."""
        assert RING_SAMPLES == 300
        monkeypatch.setattr(scrape, "RING_SAMPLES", 5)
        for at in range(8):
            clock.now = NOW + at
            await scraper.poll()
        assert [sample.time - NOW for sample in scraper.ring] == [3, 4, 5, 6, 7]
        assert scraper._numbers == sum(sample.snapshot.size for sample in scraper.ring)

    async def test_ring_by_age(self, scraper: Scraper, clock: Clock) -> None:
        """Samples are kept for ten minutes, also where the clock is set back."""
        kept = []
        for at in (0, 300, 600, 601, 1200, 1195, 10, -1000):
            clock.now = NOW + at
            await scraper.poll()
            kept.append([sample.time - NOW for sample in scraper.ring])
        assert kept[2:] == [
            [0, 300, 600],
            [300, 600, 601],
            [600, 601, 1200],
            [600, 601, 1200, 1195],
            [600, 601, 1200, 1195, 10],
            [-1000],
        ]

    async def test_ring_by_size(
        self, scraper: Scraper, monkeypatch: pytest.MonkeyPatch, clock: Clock
    ) -> None:
        """Expositions of many engines are kept for a shorter time, but the last one always."""
        monkeypatch.setattr(scrape, "RING_NUMBERS", 2 * parse(BODY).size + 1)
        for at in range(4):
            clock.now = NOW + at
            await scraper.poll()
        assert [sample.time - NOW for sample in scraper.ring] == [2, 3]
        monkeypatch.setattr(scrape, "RING_NUMBERS", 1)
        await scraper.poll()
        assert len(scraper.ring) == 1


class TestRun:
    """The loop around the polls."""

    async def test_cadence(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """It asks at once, then every interval less what the poll took; after a failure it waits all of it."""
        slept: list[float] = []
        done = asyncio.Event()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 1:
                vllm.metrics = answering(b"", 500)
            if len(slept) == 3:
                done.set()
                await vllm.over.wait()

        scraper = Scraper(vllm.url, 60.0, clock, session, sleep=sleep)
        running = asyncio.create_task(scraper.run())
        async with asyncio.timeout(30):
            await done.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert 50 < slept[0] < 60
        assert slept[1:] == [60, 60]
        assert vllm.asked == ["/metrics", "/health"] * 3

    async def test_cancelled_while_waiting_for_an_answer(self, scraper: Scraper, vllm: Vllm) -> None:
        """Cancellation ends it at once, also in the middle of an answer."""
        asked = asyncio.Event()

        async def silent(_: web.Request) -> web.StreamResponse:
            asked.set()
            await vllm.over.wait()
            return web.Response()

        vllm.metrics = silent
        running = asyncio.create_task(scraper.run())
        async with asyncio.timeout(30):
            await asked.wait()
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 1
        assert scraper.up is None

    async def test_one_request_at_a_time(self, scraper: Scraper, vllm: Vllm) -> None:
        """Whoever polls beside the loop waits for it."""

        async def unhurried(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.02)  # long enough for another request to come in between
            return web.Response(body=BODY)

        vllm.metrics = unhurried
        await asyncio.gather(*(scraper.poll() for _ in range(4)))
        assert vllm.busiest == 1
        assert len(scraper.ring) == 4


class TestSaying:
    """What is said of it, and what is not."""

    async def test_once_per_change(self, scraper: Scraper, vllm: Vllm) -> None:
        """A problem is logged when it comes, when it becomes another, and when it goes."""
        with structlog.testing.capture_logs() as logs:
            for handler in (
                answering(BODY), answering(BODY), answering(b"", 500), answering(b"", 500), answering(b"", 404),
                answering(b"x 1\n"), answering(b"x 1\n"), answering(BODY), answering(BODY),
            ):  # fmt: skip
                vllm.metrics = handler
                await scraper.poll()
        assert [(one["log_level"], one["event"], one.get("problem")) for one in logs] == [
            ("warning", "vLLM's metrics are not read", "HTTP status 500"),
            (
                "warning",
                "vLLM's metrics are not read",
                "there is no /metrics (HTTP 404): is this vLLM's address?",
            ),
            (
                "warning",
                "vLLM's metrics are odd",
                "no vLLM metrics in the answer: wrong address, or vLLM runs with --disable-log-stats",
            ),
            ("info", "vLLM's metrics are read again", None),
        ]
        assert {one["url"] for one in logs} == {f"{vllm.url}/metrics"}

    async def test_credentials(self, vllm: Vllm, clock: Clock, session: aiohttp.ClientSession) -> None:
        """Credentials in the URL are sent to vLLM and said nowhere."""
        url = vllm.url.replace("//", "//user:secret@")
        vllm.metrics = answering(b"", 401)
        scraper = Scraper(url, 60.0, clock, session)
        with structlog.testing.capture_logs() as logs:
            await scraper.poll()
        assert vllm.headers["Authorization"] == "Basic dXNlcjpzZWNyZXQ="
        assert len(logs) == 1
        assert "secret" not in f"{logs}{scraper.problem}"

    @pytest.mark.parametrize(
        "url", ["", "localhost:8000", "ftp://h/", "http://", "http://h:port", "/metrics"]
    )
    async def test_unusable_url(self, clock: Clock, session: aiohttp.ClientSession, url: str) -> None:
        """A URL that cannot work is an error from the start."""
        with pytest.raises(ValueError, match="URL is not usable: give it as http://host:port"):
            Scraper(url, 2.0, clock, session)

    @pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
    async def test_unusable_interval(
        self, clock: Clock, session: aiohttp.ClientSession, interval: float
    ) -> None:
        """An interval has to be a time."""
        with pytest.raises(ValueError, match="must be a positive number of seconds"):
            Scraper("http://localhost:8000", interval, clock, session)

    @pytest.mark.parametrize(
        ("error", "problem"),
        [
            (aiohttp.ClientError("text of an answer"), "cannot be asked: ClientError"),
            (ExpositionError("one line"), "one line"),
            (ConnectionResetError(104, "text"), "the connection was lost before the end of the answer"),
        ],
        ids=["client", "exposition", "os"],
    )
    async def test_errors_in_words(
        self, scraper: Scraper, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
    ) -> None:
        """The text of an error that may quote an answer is not repeated."""

        def broken(*_: Any) -> None:
            raise error

        monkeypatch.setattr(scraper, "_get", broken)
        await scraper.poll()
        assert scraper.problem == problem
