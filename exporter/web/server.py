"""Listening: sockets, TLS that is renewed while we run, and limits on what a client may hold.

A scrape takes milliseconds, so whoever takes seconds gets cut off: for the handshake, for the
headers, for reading the answer. Where connections run out the oldest makes room, because a full
house of idle strangers must not keep Prometheus out.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from .app import GUARD
from .tls import WebConfigError, WebConfigFile

MAX_CONNECTIONS = 64
BACKLOG = 64
HEADER_SECONDS = 20.0  # also how long an idle connection is kept
HANDSHAKE_SECONDS = 10.0
STOP_SECONDS = 5.0
MAX_HEADER = 4096
MAX_HEADERS = 64
READ_BUFFER = 1 << 14
POLL_SECONDS = 5.0
log = structlog.get_logger(__name__)


async def serve(
    app: web.Application,
    host: str,
    port: int,
    web_config: Path | None,
    *,
    poll_seconds: float = POLL_SECONDS,
) -> web.AppRunner:
    """Serve ``app`` until ``cleanup`` of what is returned; an empty ``host`` is every address.

    Raises ``WebConfigError`` for a web configuration that is not right, ``OSError`` where the
    address can't be had.
    """
    config = None if web_config is None else await asyncio.to_thread(WebConfigFile, web_config)
    sockets = await _bind(host, port)
    sites: list[_Site] = []
    app.cleanup_ctx.append(lambda _: _guarding(app, config, sites, poll_seconds))
    runner = web.AppRunner(
        app,
        access_log_class=AccessLog,
        shutdown_timeout=STOP_SECONDS,
        keepalive_timeout=HEADER_SECONDS,
        lingering_time=1.0,
        max_line_size=MAX_HEADER,
        max_field_size=MAX_HEADER,
        max_headers=MAX_HEADERS,
        read_bufsize=READ_BUFFER,
        auto_decompress=False,
    )
    try:
        await runner.setup()
        sites += [_Site(runner, one, config.current.ssl_context if config else None) for one in sockets]
        for site in sites:
            await site.start()
    except BaseException:
        await runner.cleanup()
        for one in sockets:
            one.close()
        raise
    return runner


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of ``host``; all or, with ``OSError``, none."""
    if not host and socket.has_dualstack_ipv6():
        return [_listening(socket.AF_INET6, ("", port), both=True)]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host or "0.0.0.0",  # noqa: S104 - every address is what was asked for
        port,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE,
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            sockets.append(_listening(family, address))
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def _listening(family: int, address: tuple[Any, ...], both: bool = False) -> socket.socket:
    made = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    made.setblocking(False)
    return made


class _Site(web.BaseSite):
    """One listening socket. It outlives its servers, so that TLS can change between two clients."""

    def __init__(
        self, runner: web.AppRunner, listening: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(runner, ssl_context=context, backlog=BACKLOG)
        self._listening = listening

    @property
    def name(self) -> str:
        host, port = self._listening.getsockname()[:2]
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        await self.renew(self._ssl_context)

    async def renew(self, context: ssl.SSLContext | None) -> None:
        """Take new clients by ``context``; those already here stay as they are."""
        loop = asyncio.get_running_loop()
        before = self._server
        self._server = await loop.create_server(
            self._connection,
            sock=self._listening.dup(),
            ssl=context,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=None if context is None else HANDSHAKE_SECONDS,
        )
        self._ssl_context = context
        if before is not None:
            before.close()

    async def stop(self) -> None:
        await super().stop()
        self._listening.close()

    def _connection(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        # a connection counts once it is made, which a plain one is in the turn after the next
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._make_room)
        return self._runner.server()

    def _make_room(self) -> None:
        connections = [] if self._runner.server is None else self._runner.server.connections
        for oldest in connections[: max(0, len(connections) - MAX_CONNECTIONS)]:
            oldest.force_close()


async def _guarding(
    app: web.Application, config: WebConfigFile | None, sites: list[_Site], poll_seconds: float
) -> AsyncIterator[None]:
    """Apply the web configuration while the application runs, and follow its file."""
    guard = app[GUARD]
    if config is None:
        yield
        return
    guard.apply(config.current)
    following = asyncio.create_task(_follow(app, config, sites, poll_seconds))
    yield
    following.cancel()
    await asyncio.wait([following])
    guard.close()


async def _follow(
    app: web.Application, config: WebConfigFile, sites: list[_Site], poll_seconds: float
) -> None:
    pending = False
    while True:
        await asyncio.sleep(poll_seconds)
        try:
            pending = await asyncio.to_thread(config.refresh) or pending
            if pending:
                app[GUARD].apply(config.current)
                for site in sites:
                    await site.renew(config.current.ssl_context)
                pending = False
                log.info("web configuration reloaded")
        except WebConfigError as error:
            log.error("web configuration kept", problems=error.problems)  # noqa: TRY400 - a user's mistake
        except OSError as error:
            # out of file descriptors, most likely; tried again with the next look
            log.error("web configuration not in force yet", problem=str(error))  # noqa: TRY400 - says it all


class AccessLog(AbstractAccessLogger):
    """One line a request at debug level; of the path only what we named ourselves."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Called by aiohttp once an answer is out; ``time`` in seconds."""
        resource = request.match_info.route.resource if isinstance(request, web.Request) else None
        log.debug(
            "request served",
            peer=request.remote,
            method=request.method,
            route=resource.canonical if resource is not None else None,
            status=response.status,
            seconds=round(time, 6),
        )
