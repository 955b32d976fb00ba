"""Stands in for vLLM where there is no GPU: a recorded server that starts, serves and dies, again and again.

    replay_server.py LOG        writes LOG as it was written, and answers /metrics and /health on port 8000

``PORT``, ``SPEED`` and ``PAUSE`` (seconds between two lives) are variables. Needs ``tests/`` on ``PYTHONPATH``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
from aiohttp import web
from replay import Replay


async def main(log: Path) -> None:
    """Play for ever."""
    replay = Replay("mlp_eager_16384", float(os.environ.get("SPEED", "1")))
    async with replay.server() as url, aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            try:
                async with session.get(url + request.path) as answer:
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
            except aiohttp.ClientError:  # it is dead: nobody answers
                assert request.transport is not None
                request.transport.abort()
                return web.Response()

        app = web.Application()
        app.add_routes([web.get("/metrics", forward), web.get("/health", forward)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, port=int(os.environ.get("PORT", "8000"))).start()
        while True:
            await replay.write(log)
            await asyncio.sleep(float(os.environ.get("PAUSE", "60")))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
