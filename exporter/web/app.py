"""The HTTP application: which path answers what, for whom, and with which headers.

Nothing here changes the status it shows. Handlers read it and answer without waiting for a client,
so a slow one can only wait for itself; ``server.py`` sees to it that this ends.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import hdrs, web
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..diagnosis.knowledge import FailureClass
from ..metrics import Reading, Single, make_registry
from ..status import Status, unready
from . import api
from .auth import BasicAuth, TooBusyError, names_in
from .pages import Listed, Pages
from .tls import WebConfig

ALIVE_SECONDS = 30.0
WRITE_SECONDS = 15.0
MAX_BODY = 4096
DEFAULT_LIMIT = 100
MAX_LIMIT = 500
FEW = 4
"""Targets whose metrics are rendered at once, in some 3 ms each; those of more in pieces."""

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Server": "vllm-oom-exporter",
}

PIECE_SECONDS = 0.01
"""What an answer for many targets takes at a time, and one family more, which is another 12 ms of 32 targets. A
request of somebody else needs some three turns."""

Reload = Callable[[], Awaitable[str | None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """What the web configuration asks of every request; open while there is none."""

    def __init__(self) -> None:
        self._users: Mapping[str, str] = {}
        self._auth: BasicAuth | None = None
        self._sans: frozenset[str] = frozenset()
        self.headers: Mapping[str, str] = {}

    def apply(self, config: WebConfig) -> None:
        """Ask what ``config`` says from now on."""
        if config.users != self._users:
            if self._auth is not None:
                self._auth.close()
            self._users = config.users
            self._auth = BasicAuth(config.users) if config.users else None
        self._sans = config.allowed_sans
        self.headers = config.headers

    def close(self) -> None:
        """Stop what runs for it, for good."""
        if self._auth is not None:
            self._auth.close(drop=True)

    async def check(self, request: web.Request) -> None:
        """Raise the refusal, if any."""
        if self._sans:
            peer = request.transport.get_extra_info("peercert") if request.transport else None
            if not self._sans & names_in(peer):
                raise web.HTTPForbidden(text="403: this client certificate is not allowed here\n")
        if self._auth is None:
            return
        try:
            allowed = await self._auth.allows(request.headers.get(hdrs.AUTHORIZATION))
        except TooBusyError:
            raise web.HTTPServiceUnavailable(
                text="503: too many logins at once\n", headers={hdrs.RETRY_AFTER: "5"}
            ) from None
        if not allowed:
            raise web.HTTPUnauthorized(
                text="401: a user and a password are needed\n",
                headers={hdrs.WWW_AUTHENTICATE: 'Basic realm="vllm-oom-exporter", charset="UTF-8"'},
            )


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


def make_app(
    status: Status,
    *,
    classes: Mapping[str, FailureClass],
    reload: Reload | None,
    enable_lifecycle: bool,
    hide_excerpts: bool,
    stored: api.Stored = lambda _target, _identity: None,
    listed: Listed = lambda _target, _skip, _most: ([], 0),
) -> web.Application:
    """The application that shows ``status``, open to everyone until ``serve`` gives it a guard.

    ``reload`` loads the configuration anew and returns what is wrong with it, or None. ``stored``
    is asked for an incident that ``status`` does not hold, ``listed`` for a part of them all; both
    have to answer at once.
    """
    app = web.Application(middlewares=[_answer, _guarded], client_max_size=MAX_BODY)
    app[GUARD] = Guard()
    app.on_response_prepare.append(_add_headers)
    views = _Views(status, classes, hide_excerpts, stored)
    pages = Pages(status, classes, stored, listed, hide_excerpts)
    app.add_routes(
        [
            web.get("/", pages.overview),
            web.get("/incidents/{id}", pages.incident),
            web.get("/metrics", views.metrics),
            web.get("/api/v1/incidents", views.incidents),
            web.get("/api/v1/incidents/{id}", views.incident),
            web.get("/api/v1/targets", views.targets),
            web.get("/api/v1/targets/{name:.+}", views.target),
            web.get("/api/v1/classes", views.classes),
            web.get("/-/healthy", views.healthy),
            web.get("/-/ready", views.ready),
            web.get("/-/budget-ready", views.budget_ready),
            web.post("/-/reload", _reloader(reload if enable_lifecycle else None)),
        ]
    )
    return app


# --- around every request -----------------------------------------------------------------


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send the answer, errors as short text, and drop a client that does not read it."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        headers = error.headers.copy()
        headers.popall(hdrs.CONTENT_TYPE, None)
        response = web.Response(status=error.status, text=error.text, headers=headers)
    transport = request.transport
    if transport is None:
        return response
    unread = asyncio.get_running_loop().call_later(WRITE_SECONDS, _drop_unread, transport)
    # a client that left is no error; aiohttp notices by itself
    with suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
    if transport.get_write_buffer_size() == 0:
        unread.cancel()
    return response


def _drop_unread(transport: Any) -> None:
    if transport.get_write_buffer_size() > 0:
        transport.abort()


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    await request.app[GUARD].check(request)
    if (request.content_length or 0) > MAX_BODY:
        raise web.HTTPRequestEntityTooLarge(
            max_size=MAX_BODY,
            actual_size=request.content_length or 0,
            text=f"413: a request may hold at most {MAX_BODY} bytes\n",
        )
    return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    policy = response.headers.get("Content-Security-Policy", SECURITY_HEADERS["Content-Security-Policy"])
    always = {**SECURITY_HEADERS, "Content-Security-Policy": policy, **request.app[GUARD].headers}
    for name, value in always.items():
        response.headers[name] = value


def _reloader(reload: Reload | None) -> Handler:
    lock = asyncio.Lock()

    async def handle(_: web.Request) -> web.Response:
        if reload is None:
            raise web.HTTPForbidden(text="403: start with --web.enable-lifecycle to allow this\n")
        async with lock:
            problem = await reload()
        if problem is not None:
            return web.Response(status=500, text=f"not reloaded: {problem}\n")
        return web.Response(text="reloaded\n")

    return handle


# --- what is shown ------------------------------------------------------------------------


class _Views:
    """One method a path; each answers at once from the status."""

    def __init__(
        self,
        status: Status,
        classes: Mapping[str, FailureClass],
        hide_excerpts: bool,
        stored: api.Stored,
    ) -> None:
        self._status = status
        self._registry = make_registry(status)
        self._process = ProcessCollector(registry=None)
        self._rendering = asyncio.Lock()
        self._classes = classes
        self._hide_excerpts = hide_excerpts
        self._stored = stored

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(_best_format(request.headers.get(hdrs.ACCEPT, "")))
        headers = {hdrs.CONTENT_TYPE: content_type, hdrs.VARY: "Accept, Accept-Encoding"}
        packed = _takes_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, ""))
        if packed:
            headers[hdrs.CONTENT_ENCODING] = "gzip"

        if len(self._status.targets) <= FEW:
            body = encode(self._registry)
            return web.Response(body=_gzip(body) if packed else body, headers=headers)
        async with self._rendering:  # one at a time: what many want at once is no sooner there together
            body = await self._rendered(encode)
            return web.Response(
                body=await asyncio.to_thread(_gzip, body) if packed else body, headers=headers
            )

    async def _rendered(self, encode: Callable[[Collector], bytes]) -> bytes:
        """What ``encode`` makes of the registry, while others have their turn between two targets or families.

        A thread would not do: each time the loop reads a file, it would have to get the interpreter back from it.
        """
        reading, parts, end, turns = Reading(self._status), list[bytes](), b"# EOF\n", _Turns()
        for _ in reading.targets():
            await turns.give()
        for one in itertools.chain(reading.families(), self._process.collect()):
            parts.append(encode(Single(one)))
            await turns.give()
        ended = parts[-1].endswith(end)  # as OpenMetrics is
        return b"".join(one.removesuffix(end) for one in parts) + (end if ended else b"")

    async def incidents(self, request: web.Request) -> web.Response:
        """``?class=``, ``?target=`` and ``?limit=`` choose; ``total`` counts what was chosen."""
        limit = _limit(request.query.get("limit"))
        wanted = [(key, request.query[key]) for key in ("class", "target") if key in request.query]
        chosen = [
            one
            for one in api.incidents(self._status, self._hide_excerpts)
            if all(one.get(key) == value for key, value in wanted)
        ]
        return _json({"incidents": chosen[:limit], "total": len(chosen)})

    async def incident(self, request: web.Request) -> web.Response:
        found = api.incident(self._status, request.match_info["id"], self._stored, self._hide_excerpts)
        if found is None:
            raise web.HTTPNotFound(text="404: no incident has this id\n")
        return _json(found)

    async def targets(self, _: web.Request) -> web.Response:
        return _json({"targets": [api.target_document(one) for one in self._status.targets]})

    async def target(self, request: web.Request) -> web.Response:
        for one in self._status.targets:
            if one.name == request.match_info["name"]:
                return _json(api.target_document(one))
        raise web.HTTPNotFound(text="404: no target has this name\n")

    async def classes(self, _: web.Request) -> web.Response:
        return _json({"classes": [api.class_document(one) for one in self._classes.values()]})

    async def healthy(self, _: web.Request) -> web.Response:
        silent = asyncio.get_running_loop().time() - self._status.alive
        if silent > ALIVE_SECONDS:
            raise web.HTTPServiceUnavailable(text=f"503: no sign of life for {silent:.0f} s\n")
        return web.Response(text="healthy\n")

    async def ready(self, _: web.Request) -> web.Response:
        if not self._status.ready:
            raise web.HTTPServiceUnavailable(text="503: the logs are not open yet\n")
        return web.Response(text="ready\n")

    async def budget_ready(self, _: web.Request) -> web.Response:
        several = len(self._status.targets) > 1
        for one in self._status.targets:
            if (why := unready(one)) is not None:
                raise web.HTTPServiceUnavailable(text=f"503: {f'{one.name}: ' if several else ''}{why}\n")
        if not self._status.targets:
            raise web.HTTPServiceUnavailable(text="503: there is no server\n")
        return web.Response(text="the budget was exercised\n")


class _Turns:
    """Gives others a turn after each piece of work of some size: with every small one they would have many."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def give(self) -> None:
        """A little was done."""
        if self._loop.time() - self._began >= PIECE_SECONDS:
            await asyncio.sleep(0)
            self._began = self._loop.time()


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, compresslevel=6, mtime=0)


def _json(data: object) -> web.Response:
    return web.Response(body=api.to_json(data), content_type="application/json")


def _limit(raw: str | None) -> int:
    if raw is None:
        return DEFAULT_LIMIT
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 9 and 1 <= int(raw) <= MAX_LIMIT):
        raise web.HTTPBadRequest(text=f"400: limit must be a number from 1 to {MAX_LIMIT}\n")
    return int(raw)


# --- content negotiation ------------------------------------------------------------------

_FORMATS = {
    "application/openmetrics-text": ("", "1.0.0"),
    "text/plain": ("", "0.0.4", "1.0.0"),
    "text/*": ("",),
    "*/*": ("",),
}


def _best_format(header: str) -> str:
    """The best entry of an ``Accept`` header that can be served, empty where there is none.

    ``choose_encoder`` knows the formats but neither weights nor versions it can't compare.
    """
    best, best_weight = "", 0.0
    for entry, parameters, weight in _entries(header):
        if parameters.get("version", "") in _FORMATS.get(entry, ()) and weight > best_weight:
            kept = [f"{name}={parameters[name]}" for name in ("version", "escaping") if name in parameters]
            best, best_weight = ";".join([entry, *kept]), weight
    return best


def _takes_gzip(header: str) -> bool:
    weights = {entry: weight for entry, _, weight in _entries(header)}
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _entries(header: str) -> list[tuple[str, dict[str, str], float]]:
    """Value, parameters and weight (0 to 1) of each entry of an ``Accept`` or alike."""
    found = []
    for part in header.split(","):
        value, *rest = (piece.strip() for piece in part.split(";"))
        pairs = (piece.partition("=") for piece in rest)
        parameters = {name.strip().lower(): text.strip().strip('"') for name, _, text in pairs}
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            weight = 0.0
        found.append((value.lower(), parameters, weight if 0 <= weight <= 1 else 0.0))
    return found
