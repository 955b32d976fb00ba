from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from exporter.diagnosis.knowledge import CLASS_IDS, builtin_classes
from exporter.records import Life
from exporter.sources.stream import SourceStats
from exporter.status import Counts, Status, TargetStatus
from exporter.web import app as web_app
from exporter.web import auth, server, tls
from exporter.web.app import make_app
from exporter.web.auth import BasicAuth, TooBusyError, names_in
from exporter.web.server import serve
from exporter.web.tls import WebConfig, WebConfigError, WebConfigFile, load_web_config

Client = TestClient[web.Request, web.Application]
Connect = Callable[[web.Application], Awaitable[Client]]

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
PASSWORD = "correct horse"  # noqa: S105 - of nobody
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def incident(number: int, **more: object) -> dict[str, object]:
    """A document of one incident."""
    return {
        "id": f"a{number}",
        "class": "prefill_budget",
        "phase": "serving",
        "facts": {"kv_cache_usage": 0.118},
        "excerpt": ["CUDA out of memory"],
        **more,
    }


def two_targets() -> Status:
    """An exporter of two servers with three incidents."""
    first = TargetStatus(
        "first",
        counts=Counts(
            incidents=Counter({("prefill_budget", "serving"): 2}),
            near_misses=3,
            lines=Counter({("-", "parsed"): 10, ("-", "unparsed"): 2}),
            read_bytes=Counter({"-": 900}),
        ),
        engine_state="serving",
        scrape_up=True,
        sources=[SourceStats("-", opened=True)],
        incidents=[incident(2), incident(1)],
        engines=[{"state": "serving"}],
    )
    second = TargetStatus("ns/pod/<b>", incidents=[incident(3, **{"class": "unknown"})])
    return Status(targets=[first, second], ready=True)


def application(status: Status | None = None, **options: Any) -> web.Application:
    """The application, of two targets unless told otherwise."""
    defaults: dict[str, Any] = {
        "classes": builtin_classes(),
        "reload": None,
        "enable_lifecycle": False,
        "hide_excerpts": False,
    }
    return make_app(two_targets() if status is None else status, **{**defaults, **options})


@pytest.fixture
def connect(aiohttp_client: Any) -> Connect:
    """A client of an application."""
    return aiohttp_client  # type: ignore[no-any-return]


# --- metrics ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("*/*", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS.replace("underscores", "allow-utf-8")),
        ("application/openmetrics-text", OPENMETRICS.partition("; escaping")[0]),
        ("text/plain;version=1.0.0;q=0.5, application/openmetrics-text;version=1.0.0;q=0.4",
         "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("text/plain;version=0.0.4;q=0.9, application/openmetrics-text;q=0.4", TEXT),
        ("application/openmetrics-text;version=bad", TEXT),
        ("application/openmetrics-text;version=99.0.0", TEXT),
        ("application/openmetrics-text;q=0, text/html;q=x,;;=,", TEXT),
    ],
)  # fmt: skip
@pytest.mark.asyncio
async def test_metrics_negotiates_the_format(connect: Connect, accept: str | None, content_type: str) -> None:
    """The best format of an Accept header that can be served is served, whatever stands in it."""
    client = await connect(application())
    answer = await client.get("/metrics", headers={} if accept is None else {"Accept": accept})
    body = await answer.text()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == content_type
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    assert body.endswith("# EOF\n") == content_type.startswith("application/openmetrics-text")
    assert "vllm_oom_near_misses_total 3.0\n" in body


@pytest.mark.parametrize(
    ("accepts", "zipped"), [("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False), ("", False)]
)
@pytest.mark.asyncio
async def test_metrics_are_zipped_for_who_takes_it(connect: Connect, accepts: str, zipped: bool) -> None:
    """The answer is gzip where the client accepts it, and parses either way."""
    client = await connect(application())
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        answer = await session.get(client.make_url("/metrics"), headers={"Accept-Encoding": accepts})
        body = await answer.read()
    assert (answer.headers.get("Content-Encoding") == "gzip") == zipped
    text = gzip.decompress(body) if zipped else body
    assert "vllm_oom_incidents" in {one.name for one in text_string_to_metric_families(text.decode())}


@pytest.mark.asyncio
async def test_head_has_the_headers_and_no_body(connect: Connect) -> None:
    """HEAD of what GET answers is the same without a body."""
    client = await connect(application())
    for path in ("/metrics", "/", "/api/v1/incidents", "/-/ready"):
        answer = await client.head(path)
        assert (answer.status, await answer.read()) == (200, b"")
        assert int(answer.headers["Content-Length"]) > 0


# --- the API ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_incidents_of_all_targets(connect: Connect) -> None:
    """Every incident is listed with the name of its target."""
    client = await connect(application())
    answer = await client.get("/api/v1/incidents")
    assert answer.headers["Content-Type"] == "application/json"
    assert await answer.json() == {
        "incidents": [
            {**incident(2), "target": "first"},
            {**incident(1), "target": "first"},
            {**incident(3, **{"class": "unknown"}), "target": "ns/pod/<b>"},
        ],
        "total": 3,
    }


@pytest.mark.parametrize(
    ("query", "ids", "total"),
    [
        ("limit=1", ["a2"], 3),
        ("class=unknown", ["a3"], 1),
        ("target=first", ["a2", "a1"], 2),
        ("target=first&class=unknown", [], 0),
    ],
)
@pytest.mark.asyncio
async def test_incidents_can_be_chosen(connect: Connect, query: str, ids: list[str], total: int) -> None:
    """Class, target and a limit narrow the list, and the total says what the limit hides."""
    client = await connect(application())
    found = await (await client.get(f"/api/v1/incidents?{query}")).json()
    assert ([one["id"] for one in found["incidents"]], found["total"]) == (ids, total)


@pytest.mark.parametrize("limit", ["0", "-1", "501", "x", "٣", "9" * 50])
@pytest.mark.asyncio
async def test_limit_is_checked(connect: Connect, limit: str) -> None:
    """A limit that is no sensible number is refused with what is."""
    client = await connect(application())
    answer = await client.get("/api/v1/incidents", params={"limit": limit})
    assert (answer.status, await answer.text()) == (400, "400: limit must be a number from 1 to 500\n")


@pytest.mark.asyncio
async def test_one_incident(connect: Connect) -> None:
    """An incident is found by its id; another id is not found."""
    client = await connect(application())
    assert await (await client.get("/api/v1/incidents/a3")).json() == {
        **incident(3, **{"class": "unknown"}),
        "target": "ns/pod/<b>",
    }
    answer = await client.get("/api/v1/incidents/nope")
    assert (answer.status, await answer.text()) == (404, "404: no incident has this id\n")


@pytest.mark.asyncio
async def test_an_incident_that_was_stored(connect: Connect) -> None:
    """An incident that is no longer in memory is looked up for each target, and shown like the others."""
    kept = {("ns/pod/<b>", "old"): incident(9), ("ns/pod/<b>", "a1"): incident(8)}
    client = await connect(application(stored=lambda *key: kept.get(key), hide_excerpts=True))
    shown = {**incident(9), "target": "ns/pod/<b>"}
    del shown["excerpt"]
    assert await (await client.get("/api/v1/incidents/old")).json() == shown
    assert (await (await client.get("/api/v1/incidents/a1")).json())["id"] == "a1"
    assert (await client.get("/api/v1/incidents/nope")).status == 404


@pytest.mark.asyncio
async def test_excerpts_can_be_hidden(connect: Connect) -> None:
    """With excerpts hidden no answer has one, and the status keeps them."""
    status = two_targets()
    client = await connect(application(status, hide_excerpts=True))
    for path in ("/api/v1/incidents", "/api/v1/incidents/a1"):
        assert "excerpt" not in await (await client.get(path)).text()
    assert status.targets[0].incidents[0]["excerpt"] == ["CUDA out of memory"]


@pytest.mark.asyncio
async def test_targets(connect: Connect) -> None:
    """A target is the document of analyze without its incidents, and says how its sources are."""
    client = await connect(application())
    first = {
        "schema_version": 1,
        "target": "first",
        "labels": {},
        "lines": 12,
        "bytes": 900,
        "engine_state": "serving",
        "up": True,
        "engines": [{"state": "serving"}],
        "near_misses": 3,
        "sources": [{"source": "-", "opened": True, "lag_bytes": 0}],
    }
    listed = await (await client.get("/api/v1/targets")).json()
    assert listed["targets"][0] == first
    assert await (await client.get("/api/v1/targets/first")).json() == first
    second = await (await client.get("/api/v1/targets/ns%2Fpod%2F%3Cb%3E")).json()
    assert second == listed["targets"][1]
    assert "up" not in second
    answer = await client.get("/api/v1/targets/third")
    assert (answer.status, await answer.text()) == (404, "404: no target has this name\n")


@pytest.mark.asyncio
async def test_classes(connect: Connect) -> None:
    """Every class is there, in the order of the contract, with what to do and why."""
    client = await connect(application())
    found = (await (await client.get("/api/v1/classes")).json())["classes"]
    assert [one["id"] for one in found] == list(CLASS_IDS)
    assert found[0]["phases"] == ["serving"]
    assert found[0]["remedies"][0]["text"]
    assert found[0]["dead_ends"][0]["why"]


@pytest.mark.asyncio
async def test_json_never_has_what_json_lacks(connect: Connect) -> None:
    """NaN and infinities are left out of objects and null in arrays; odd text arrives escaped."""
    status = Status(targets=[TargetStatus("t")])
    odd = incident(1, facts={"a": math.nan, "b": 1.5, "c": [math.inf, 2]}, frame="\udcff\x00</script>")
    status.targets[0].incidents = [odd]
    client = await connect(application(status))
    text = await (await client.get("/api/v1/incidents/a1")).text()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse)["facts"] == {"b": 1.5, "c": [None, 2]}
    assert text.isascii()


# --- pages, health, life cycle ------------------------------------------------------------


@pytest.mark.asyncio
async def test_index_links_what_is_there(connect: Connect) -> None:
    """The first page works without a script, escapes names, and every link on it leads somewhere."""
    client = await connect(application())
    answer = await client.get("/")
    page = await answer.text()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "ns/pod/&lt;b&gt;" in page
    assert "<script" not in page
    links = {part.partition('"')[0] for part in page.split('<a href="')[1:]} - {"-/healthy"}
    assert {
        "metrics",
        "api/v1/incidents",
        "api/v1/targets",
        "api/v1/classes",
        "-/ready",
        "incidents/a2",
    } <= links
    assert {(await client.get(f"/{link}")).status for link in links} == {200}


@pytest.mark.asyncio
async def test_healthy_while_there_is_a_sign_of_life(connect: Connect) -> None:
    """Healthy means a sign of life within 30 seconds."""
    status = two_targets()
    client = await connect(application(status))
    now = asyncio.get_running_loop().time()
    status.alive = now
    answer = await client.get("/-/healthy")
    assert (answer.status, await answer.text()) == (200, "healthy\n")
    status.alive = now - 31
    answer = await client.get("/-/healthy")
    assert (answer.status, await answer.text()) == (503, "503: no sign of life for 31 s\n")


@pytest.mark.asyncio
async def test_ready_once_sources_are_open(connect: Connect) -> None:
    """Ready follows the status; the budget is ready when that of every server is."""
    status = two_targets()
    client = await connect(application(status))
    assert (await client.get("/-/ready")).status == 200
    status.ready = False
    answer = await client.get("/-/ready")
    assert (answer.status, await answer.text()) == (503, "503: the logs are not open yet\n")
    answer = await client.get("/-/budget-ready")
    said = "503: first: no start of the server was read yet\n"
    assert (answer.status, await answer.text()) == (503, said)
    for one in status.targets:
        one.life, one.steps = Life(0), {"seen": 1, "full": 1, "largest_tokens": 8192}
    answer = await client.get("/-/budget-ready")
    assert (answer.status, await answer.text()) == (200, "the budget was exercised\n")
    status.targets.clear()
    answer = await client.get("/-/budget-ready")
    assert (answer.status, await answer.text()) == (503, "503: there is no server\n")


@pytest.mark.parametrize(
    ("enabled", "problem", "status", "text"),
    [
        (False, None, 403, "403: start with --web.enable-lifecycle to allow this\n"),
        (True, None, 200, "reloaded\n"),
        (True, "config.yml: line 3: no", 500, "not reloaded: config.yml: line 3: no\n"),
    ],
)
@pytest.mark.asyncio
async def test_reload(connect: Connect, enabled: bool, problem: str | None, status: int, text: str) -> None:
    """Reload happens where it is enabled, once a request, and says what is wrong."""
    calls = []

    async def reload() -> str | None:
        calls.append(1)
        return problem

    client = await connect(application(reload=reload, enable_lifecycle=enabled))
    answer = await client.post("/-/reload")
    assert (answer.status, await answer.text()) == (status, text)
    assert len(calls) == int(enabled)


@pytest.mark.asyncio
async def test_reloads_do_not_overlap(connect: Connect) -> None:
    """Two requests reload one after the other."""
    running, most = 0, 0

    async def reload() -> str | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return None

    client = await connect(application(reload=reload, enable_lifecycle=True))
    answers = await asyncio.gather(*(client.post("/-/reload") for _ in range(5)))
    assert [one.status for one in answers] == [200] * 5
    assert most == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nope", 404, None),
        ("GET", "/api/v1/", 404, None),
        ("GET", "/metrics/", 404, None),
        ("POST", "/metrics", 405, "GET,HEAD"),
        ("PUT", "/api/v1/incidents", 405, "GET,HEAD"),
        ("DELETE", "/api/v1/targets/first", 405, "GET,HEAD"),
        ("OPTIONS", "/", 405, "GET,HEAD"),
        ("GET", "/-/reload", 405, "POST"),
    ],
)
@pytest.mark.asyncio
async def test_wrong_paths_and_methods(
    connect: Connect, method: str, path: str, status: int, allowed: str | None
) -> None:
    """An unknown path is 404 and a wrong method 405 with the right ones, both short text."""
    client = await connect(application())
    answer = await client.request(method, path)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert len(await answer.text()) < 100
    assert answer.headers.get("Allow") == allowed


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/incidents", "/-/healthy", "/nope"])
@pytest.mark.asyncio
async def test_every_answer_has_the_security_headers(connect: Connect, path: str) -> None:
    """Answers and errors alike forbid scripts, sniffing and storing, and name no versions."""
    client = await connect(application())
    headers = (await client.get(path)).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"] == "vllm-oom-exporter"


# --- listening and limits -----------------------------------------------------------------


@asynccontextmanager
async def served(
    app: web.Application, config: Path | None = None, host: str = "127.0.0.1", port: int = 0, **options: Any
) -> AsyncIterator[int]:
    """Serve ``app`` for a while; gives the port."""
    runner = await serve(app, host, port, config, **options)
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def raw(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which ``data`` was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other side closes; fails after 5 seconds."""
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
@pytest.mark.asyncio
async def test_serves_on_every_form_of_address(host: str) -> None:
    """A name, an address and all addresses can be listened on."""
    async with served(application(), host=host) as port, aiohttp.ClientSession() as session:
        url = f"http://{host or '127.0.0.1'}:{port}/-/ready"
        assert (await session.get(url)).status == 200


@pytest.mark.asyncio
async def test_a_taken_port_is_an_error() -> None:
    """Listening where somebody listens raises, and leaves nothing behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await serve(application(), "127.0.0.1", port, None)
    async with served(application(), port=port) as again:
        assert again == port


@pytest.mark.parametrize("start", [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "])
@pytest.mark.asyncio
async def test_slow_headers_are_cut_off(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """A client that does not finish its headers in time is cut off."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.05)
    async with served(application()) as port:
        reader, writer = await raw(port, start)
        assert await closed(reader) == b""
        writer.close()


@pytest.mark.asyncio
async def test_unread_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read its answer is cut off, and nobody else waits for it."""
    monkeypatch.setattr(web_app, "WRITE_SECONDS", 0.05)
    status = two_targets()
    status.targets[0].incidents = [incident(1, says="x" * (16 << 20))]
    runner = await serve(application(status), "127.0.0.1", 0, None)
    assert runner.server is not None
    port = runner.addresses[0][1]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /api/v1/incidents HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5), aiohttp.ClientSession() as session:
            assert (await session.get(f"http://127.0.0.1:{port}/-/ready")).status == 200
            while len(runner.server.connections) != 1:
                await asyncio.sleep(0.01)
    await runner.cleanup()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 5000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 65 + b"\r\n", b"400"),
        (b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
    ids=["line", "header", "headers", "body", "tls"],
)
@pytest.mark.asyncio
async def test_requests_are_limited(request_head: bytes, status: bytes) -> None:
    """A line, a header, a number of headers or a body that is too large is refused, and no TLS is read."""
    async with served(application()) as port:
        reader, writer = await raw(port, request_head)
        assert (await closed(reader)).split(b" ", 2)[1] == status
        writer.close()


@pytest.mark.asyncio
async def test_a_full_house_lets_prometheus_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where connections run out the oldest makes room, so a new client is always answered."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    async with served(application()) as port:
        crowd = []
        for _ in range(10):
            crowd.append(await raw(port, b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n"))
            async with asyncio.timeout(5):
                assert (await crowd[-1][0].readline()) == b"HTTP/1.1 200 OK\r\n"
        for reader, _ in crowd[:7]:
            assert (await closed(reader)).endswith(b"ready\n")
        for _, writer in crowd:
            writer.close()


@pytest.mark.asyncio
async def test_access_is_logged_at_debug_without_the_path() -> None:
    """A request is one debug event that names the route; nothing a client wrote is in it but the method."""
    with capture_logs() as logs:
        async with served(application()) as port, aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{port}/api/v1/incidents/evil%0Aid?x=1")
            await session.get(f"http://127.0.0.1:{port}/evil")
    logged = [one for one in logs if one["event"] == "request served"]
    assert [(one["log_level"], one["route"], one["status"]) for one in logged] == [
        ("debug", "/api/v1/incidents/{id}", 404),
        ("debug", None, 404),
    ]
    assert "evil" not in str(logged)


# --- the web configuration: the file ------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority."""
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> Path:
    """A folder with a server certificate, its key, and the authority."""
    issue(authority, tmp_path)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path


def issue(authority: trustme.CA, folder: Path) -> None:
    """Write a new server certificate and key."""
    made = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    made.cert_chain_pems[0].write_to_path(folder / "server.pem")
    made.private_key_pem.write_to_path(folder / "server.key")


def config(folder: Path, text: str) -> Path:
    """A web configuration with this text."""
    path = folder / "web.yml"
    path.write_text(text, encoding="utf-8")
    return path


TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key"


def test_a_full_web_configuration(folder: Path) -> None:
    """Everything of the format that is supported is read, with paths relative to the file."""
    found = load_web_config(
        config(
            folder,
            f"""
            tls_server_config:
              cert_file: server.pem
              key_file: server.key
              client_ca_file: ca.pem
              client_auth_type: RequireAndVerifyClientCert
              client_allowed_sans: [prometheus.example]
              min_version: TLS12
              max_version: TLS13
              cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
              prefer_server_cipher_suites: false
            http_server_config:
              http2: true
              headers:
                X-Frame-Options: deny
                Strict-Transport-Security: max-age=600
            basic_auth_users:
              prometheus: {HASH}
              other: {HASH.replace("$2b$", "$2y$")}
            """,
        )
    )
    assert found.ssl_context is not None
    assert found.ssl_context.verify_mode is ssl.CERT_REQUIRED
    assert found.ssl_context.minimum_version is ssl.TLSVersion.TLSv1_2
    ciphers = [one["name"] for one in found.ssl_context.get_ciphers() if one["protocol"] != "TLSv1.3"]
    assert ciphers == ["ECDHE-ECDSA-AES128-GCM-SHA256"]
    assert found.allowed_sans == {"prometheus.example"}
    assert found.headers == {"X-Frame-Options": "deny", "Strict-Transport-Security": "max-age=600"}
    assert list(found.users) == ["prometheus", "other"]
    assert found.files == tuple(folder / name for name in ("web.yml", "ca.pem", "server.pem", "server.key"))


def test_a_configuration_may_ask_for_nothing(tmp_path: Path) -> None:
    """An empty mapping is plain HTTP for everyone."""
    found = load_web_config(config(tmp_path, "{}"))
    assert (found.ssl_context, found.users, found.headers) == (None, {}, {})


PROBLEMS: list[tuple[str, list[str]]] = [
    ("", ["file: is empty; write {} for neither TLS nor users"]),
    ("a: ]", ["line 1: is not YAML"]),
    ("- a", ["file: must be a mapping of names to values"]),
    ("1: a", ["file: has a name that is no text; quote it"]),
    ("x: &a [*a]", ["x: is unknown; known are tls_server_config, http_server_config, basic_auth_users"]),
    ("tls_config: {}", ["tls_config: is unknown; known are tls_server_config, http_server_config, basic_auth_users"]),
    ("rate_limit: {burst: 1}", ["rate_limit: rate limits are not supported; remove it"]),
    ("basic_auth_users:\n  a: secret\n  a: secret", ["line 3: a is there twice", "basic_auth_users.a: is no bcrypt hash; make one with 'htpasswd -nBC 10 NAME'"]),
    (f"basic_auth_users: {{a: {HASH.replace('$04$', '$25$')}}}", ["basic_auth_users.a: the cost of the hash must be 4 to 18"]),
    (f"basic_auth_users: {{'a:b': {HASH}}}", ["basic_auth_users.a:b: a user name must not be empty nor hold a colon"]),
    ("http_server_config: {headers: {Server: x}}", ["http_server_config.headers.Server: can't be set; known are Content-Security-Policy, Strict-Transport-Security, X-Content-Type-Options, X-Frame-Options, X-XSS-Protection"]),
    ("http_server_config: {headers: {X-Frame-Options: allow}}", ["http_server_config.headers.X-Frame-Options: must be deny or sameorigin"]),
    ('http_server_config: {headers: {X-XSS-Protection: "a\\nb"}}', ["http_server_config.headers.X-XSS-Protection: must be one line of ASCII"]),
    ("http_server_config: {http2: maybe}", ["http_server_config.http2: must be true or false"]),
    ("tls_server_config: {min_version: TLS13}", ["tls_server_config.cert_file: is missing; TLS needs a certificate and its key", "tls_server_config.key_file: is missing; TLS needs a certificate and its key"]),
    (TLS + ", min_version: TLS10}", ["tls_server_config.min_version: must be TLS12 or TLS13"]),
    (TLS + ", min_version: TLS13, max_version: TLS12}", ["tls_server_config.max_version: is below min_version"]),
    (TLS + ", curve_preferences: [X25519]}", ["tls_server_config.curve_preferences: curves can't be chosen here; remove it"]),
    (TLS + ", client_auth_type: RequireAnyClientCert}", ["tls_server_config.client_auth_type: RequireAnyClientCert accepts any certificate and is not supported; use RequireAndVerifyClientCert"]),
    (TLS + ", client_auth_type: Yes Please}", ["tls_server_config.client_auth_type: is unknown; known are NoClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert"]),
    (TLS + ", client_auth_type: RequireAndVerifyClientCert}", ["tls_server_config.client_ca_file: is missing; RequireAndVerifyClientCert needs it"]),
    (TLS + ", client_ca_file: ca.pem}", ["tls_server_config.client_auth_type: is missing; client_ca_file does nothing without it"]),
    (TLS + ", client_allowed_sans: [a]}", ["tls_server_config.client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert"]),
    (TLS + ", client_ca_file: web.yml, client_auth_type: VerifyClientCertIfGiven}", ["tls_server_config.client_ca_file: {folder}/web.yml holds no PEM certificates"]),
    ("tls_server_config: {cert_file: no.pem, key_file: server.key}", ["tls_server_config.cert_file: {folder}/no.pem can't be read: No such file or directory"]),
    ("tls_server_config: {cert_file: ca.pem, key_file: server.key}", ["tls_server_config.cert_file: {folder}/ca.pem and {folder}/server.key are no PEM certificate and unencrypted key that belong together"]),
    ("tls_server_config: {cert_file: 1, key_file: server.key}", ["tls_server_config.cert_file: must be text; quote it"]),
    (TLS + ", cipher_suites: TLS_X}", ["tls_server_config.cipher_suites: must be a list"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problems"), PROBLEMS, ids=range(len(PROBLEMS)))
def test_problems_are_named_with_their_place(folder: Path, text: str, problems: list[str]) -> None:
    """Every mistake is reported with its place and what to do, and secrets are never repeated."""
    path = config(folder, text)
    with pytest.raises(WebConfigError) as caught:
        load_web_config(path)
    assert caught.value.problems == [f"{path}: {one.replace('{folder}', str(folder))}" for one in problems]
    assert "secret" not in str(caught.value)
    assert "$2b$" not in str(caught.value)


def test_a_missing_web_configuration(tmp_path: Path) -> None:
    """A file that is not there, or is far too large, is a problem like any other."""
    with pytest.raises(WebConfigError, match=r"web\.yml: file: can't be read: No such file"):
        load_web_config(tmp_path / "web.yml")
    with pytest.raises(WebConfigError, match="is larger than 1 MiB"):
        load_web_config(config(tmp_path, "#" * (1 << 20) + "x"))


def test_cipher_suites_are_a_closed_list(folder: Path) -> None:
    """A suite that is not known to be safe is refused."""
    with pytest.raises(WebConfigError, match="'TLS_RSA_WITH_RC4_128_SHA' is unknown or unsafe"):
        load_web_config(config(folder, TLS + ", cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}"))


def test_a_changed_file_is_read_once_it_stays_the_same(folder: Path) -> None:
    """A change counts only when the next look finds it again, so half a file is never used."""
    path = config(folder, "{}")
    followed = WebConfigFile(path)
    assert followed.refresh() is False
    config(folder, "basic_auth_users:")
    assert followed.refresh() is False
    config(folder, f"basic_auth_users: {{a: {HASH}}}")
    assert followed.refresh() is False
    assert followed.refresh() is True
    assert list(followed.current.users) == ["a"]
    assert followed.refresh() is False


def test_a_change_while_the_file_is_read_is_not_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes between reading the file and remembering its stamp is read with the next look."""
    path = config(folder, "{}")
    real = tls.load_web_config

    def load(path: Path) -> WebConfig:
        found = real(path)
        config(folder, f"basic_auth_users: {{a: {HASH}}}")
        return found

    monkeypatch.setattr(tls, "load_web_config", load)
    followed = WebConfigFile(path)
    monkeypatch.setattr(tls, "load_web_config", real)
    assert followed.current.users == {}
    assert followed.refresh() is False
    assert followed.refresh() is True
    assert list(followed.current.users) == ["a"]


def test_a_wrong_change_is_reported_once_and_changes_nothing(folder: Path, authority: trustme.CA) -> None:
    """What was right stays in force until the file, or one that it newly names, is right again."""
    path = config(folder, f"basic_auth_users: {{a: {HASH}}}")
    followed = WebConfigFile(path)
    config(folder, "tls_server_config: {cert_file: new.pem, key_file: server.key}")
    assert followed.refresh() is False
    with pytest.raises(WebConfigError, match=r"new\.pem can't be read"):
        followed.refresh()
    assert list(followed.current.users) == ["a"]
    assert followed.refresh() is False
    issue(authority, folder)
    (folder / "server.pem").rename(folder / "new.pem")
    assert followed.refresh() is False
    assert followed.refresh() is True
    assert followed.current.ssl_context is not None


# --- the web configuration: users ---------------------------------------------------------


def basic(user: str, password: str) -> str:
    """An Authorization header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


LOGINS = [
    (basic("ann", PASSWORD), True),
    (basic("ann", PASSWORD).replace("Basic", "bAsIc"), True),
    (basic("ann", "wrong"), False),
    (basic("ann", ""), False),
    (basic("ann", PASSWORD + "\0"), False),
    (basic("ann", "x" * 5000), False),
    (basic("bob", PASSWORD), False),
    (basic("", PASSWORD), False),
    (None, False),
    ("", False),
    ("Bearer abc", False),
    ("Basic", False),
    ("Basic !!!", False),
    ("Basic YW5u", False),
    ("Basic /////w==", False),
]


@pytest.mark.parametrize(("header", "allowed"), LOGINS, ids=range(len(LOGINS)))
@pytest.mark.asyncio
async def test_who_is_allowed(header: str | None, allowed: bool) -> None:
    """Only a user with their own password gets in, asked once or twice."""
    users = BasicAuth({"ann": HASH, "eve": HASH[:-5] + "aaaaa"})
    assert await users.allows(header) is allowed
    assert await users.allows(header) is allowed
    users.close()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes that bcrypt was asked about."""
    asked = []
    real = bcrypt.checkpw

    def check(password: bytes, wanted: bytes) -> bool:
        asked.append(wanted.decode())
        return real(password, wanted)

    monkeypatch.setattr(bcrypt, "checkpw", check)
    return asked


@pytest.mark.asyncio
async def test_an_unknown_user_costs_as_much_as_a_known_one(compared: list[str]) -> None:
    """A name nobody has is compared with a hash of the same cost, so time tells nothing."""
    users = BasicAuth({"ann": HASH})
    assert await users.allows(basic("bob", "x")) is False
    assert await users.allows(basic("ann", "x")) is False
    assert [one[:7] for one in compared] == ["$2b$04$", "$2b$04$"]
    assert compared[0] != HASH
    assert compared[1] == HASH
    users.close()


@pytest.mark.asyncio
async def test_an_unknown_user_never_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a password that fits the hash compared for unknown names lets anyone in."""
    monkeypatch.setattr(bcrypt, "checkpw", lambda *_: True)
    users = BasicAuth({"ann": HASH})
    assert await users.allows(basic("ann", "x")) is True
    assert await users.allows(basic("bob", "x")) is False
    users.close()


@pytest.mark.asyncio
async def test_answers_are_remembered_within_bounds(
    compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login is compared once; guessing neither pushes it out nor grows the memory."""
    monkeypatch.setattr(auth, "MAX_REMEMBERED", 3)
    users = BasicAuth({"ann": HASH})
    assert await users.allows(basic("ann", PASSWORD)) is True
    for i in range(10):
        assert await users.allows(basic("ann", f"guess {i}")) is False
    assert len(compared) == 11
    assert await users.allows(basic("ann", PASSWORD)) is True
    assert await users.allows(basic("ann", "guess 9")) is False
    assert len(compared) == 11
    assert await users.allows(basic("ann", "guess 0")) is False
    assert len(compared) == 12
    assert PASSWORD not in repr(vars(users))
    users.close()


@pytest.mark.asyncio
async def test_too_many_logins_at_once_are_refused(compared: list[str]) -> None:
    """Beyond a number of waiting comparisons a new one is refused, while a known login still works."""
    users = BasicAuth({"ann": HASH})
    assert await users.allows(basic("ann", PASSWORD)) is True
    waiting = [asyncio.create_task(users.allows(basic("ann", str(i)))) for i in range(auth.MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooBusyError):
        await users.allows(basic("ann", "one more"))
    assert await users.allows(basic("ann", PASSWORD)) is True
    assert await asyncio.gather(*waiting) == [False] * auth.MAX_WAITING
    assert len(compared) == 1 + auth.MAX_WAITING
    users.close()


@pytest.mark.asyncio
async def test_users_guard_every_path(tmp_path: Path) -> None:
    """With users configured nothing is shown to strangers, and headers are those of the file."""
    path = config(
        tmp_path,
        f"basic_auth_users: {{ann: {HASH}}}\nhttp_server_config: {{headers: {{X-Frame-Options: deny}}}}",
    )
    async with served(application(), path) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        for where in ("/", "/metrics", "/api/v1/targets", "/-/healthy", "/nope"):
            answer = await session.get(url + where)
            assert (answer.status, await answer.text()) == (401, "401: a user and a password are needed\n")
            assert answer.headers["WWW-Authenticate"].startswith("Basic realm=")
            assert answer.headers["X-Frame-Options"] == "deny"
        answer = await session.get(url + "/metrics", headers={"Authorization": basic("ann", PASSWORD)})
        assert answer.status == 200
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


# --- the web configuration: TLS -----------------------------------------------------------


def trusting(authority: trustme.CA, name: str | None = None) -> ssl.SSLContext:
    """TLS of a client that trusts the authority, with a certificate of that name."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if name is not None:
        authority.issue_cert(name, key_type=trustme.KeyType.ECDSA).configure_cert(context)
    return context


async def status_of(port: int, context: ssl.SSLContext) -> int:
    """Status of ``/-/ready`` over TLS, on a connection of its own."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        return (await session.get(f"https://127.0.0.1:{port}/-/ready", ssl=context)).status


@pytest.mark.asyncio
async def test_tls(folder: Path, authority: trustme.CA) -> None:
    """With a certificate configured HTTPS is served, plain HTTP is not, nor an older TLS."""
    async with served(application(), config(folder, TLS + ", min_version: TLS13}")) as port:
        assert await status_of(port, trusting(authority)) == 200
        old = trusting(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(aiohttp.ClientConnectorError):
            await status_of(port, old)
        reader, writer = await raw(port, b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"ready" not in await closed(reader)
        writer.close()


@pytest.mark.asyncio
async def test_client_certificates(folder: Path, authority: trustme.CA) -> None:
    """Only a client with a certificate of the authority, and an allowed name in it, is served."""
    stranger = trusting(authority)
    trustme.CA(key_type=trustme.KeyType.ECDSA).issue_cert("prometheus.example").configure_cert(stranger)
    path = config(
        folder,
        TLS + ", client_ca_file: ca.pem, client_auth_type: RequireAndVerifyClientCert,"
        " client_allowed_sans: [prometheus.example, '::1']}",
    )
    async with served(application(), path) as port:
        assert await status_of(port, trusting(authority, "prometheus.example")) == 200
        assert await status_of(port, trusting(authority, "::1")) == 200
        assert await status_of(port, trusting(authority, "grafana.example")) == 403
        for context in (trusting(authority), stranger):
            with pytest.raises(aiohttp.ClientError):
                await status_of(port, context)


def test_names_in_a_certificate() -> None:
    """Names of every kind are found, addresses in their short form; no certificate has none."""
    certificate = {
        "subjectAltName": (
            ("DNS", "a.example"),
            ("IP Address", "0:0:0:0:0:0:0:1"),
            ("IP Address", "?"),
            ("URI", "spiffe://x/y"),
            ("email", "a@example"),
            ("DirName", "ignored"),
        )
    }
    assert names_in(certificate) == {"a.example", "::1", "?", "spiffe://x/y", "a@example"}
    assert names_in(None) == frozenset()
    assert names_in({}) == frozenset()


@pytest.mark.asyncio
async def test_tls_and_users_follow_the_file(folder: Path, authority: trustme.CA) -> None:
    """A new certificate, a new user and a stricter policy are in force without a restart."""
    path = config(folder, TLS + "}")
    with capture_logs() as logs:
        async with served(application(), path, poll_seconds=0.01) as port:

            async def until(event: str) -> None:
                async with asyncio.timeout(10):
                    while not any(one["event"] == event for one in logs):
                        await asyncio.sleep(0.01)
                logs.clear()

            async def certificate() -> bytes:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
                found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                writer.close()
                await writer.wait_closed()
                return bytes(found)

            before = await certificate()
            async with aiohttp.ClientSession() as kept:
                url = f"https://127.0.0.1:{port}/-/ready"
                assert (await kept.get(url, ssl=trusting(authority))).status == 200
                issue(authority, folder)
                await until("web configuration reloaded")
                assert await certificate() != before
                assert (await kept.get(url, ssl=trusting(authority))).status == 200
            config(folder, "nonsense: 1")
            await until("web configuration kept")
            assert await status_of(port, trusting(authority)) == 200
            config(folder, TLS + f"}}\nbasic_auth_users: {{ann: {HASH}}}")
            await until("web configuration reloaded")
            assert await status_of(port, trusting(authority)) == 401
            config(folder, TLS + ", client_ca_file: ca.pem, client_auth_type: RequireAndVerifyClientCert}")
            await until("web configuration reloaded")
            with pytest.raises(aiohttp.ClientError):
                await status_of(port, trusting(authority))
            assert await status_of(port, trusting(authority, "a.example")) == 200


@pytest.mark.asyncio
async def test_a_silent_handshake_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects to TLS and says nothing is cut off."""
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.05)
    async with served(application(), config(folder, TLS + "}")) as port:
        reader, writer = await raw(port, b"")
        assert await closed(reader) == b""
        writer.close()


@pytest.mark.asyncio
async def test_a_wrong_web_configuration_does_not_start(tmp_path: Path) -> None:
    """Serving with a web configuration that is not right raises before anything listens."""
    with pytest.raises(WebConfigError):
        await serve(application(), "127.0.0.1", 0, config(tmp_path, "x: 1"))
