"""The command ``test-page``: one marked alert through every receiver, and what came back."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from typing import TextIO

from ..config import Config, TargetConfig
from ..scrape import open_session
from .alertmanager import Alertmanager, PushError, as_json
from .alerts import test_alert
from .outlets import whose

_FIRES = 300.0


def test_page(config: Config, out: TextIO) -> bool:
    """Send it, write one line a receiver; whether all of them took it."""
    target = config.targets[0] if config.targets else TargetConfig("node", (), "")
    alert = test_alert(secrets.token_hex(4), whose(target, os.environ, config.listen.port), time.time())
    item = as_json(alert, alert.starts, alert.starts + _FIRES)

    async def send() -> list[bool]:
        async with open_session() as session:
            return await asyncio.gather(*(one(Alertmanager(url, session)) for url in config.alertmanager_url))

    async def one(receiver: Alertmanager) -> bool:
        began = time.monotonic()
        try:
            await receiver.push([item])
        except PushError as error:
            out.write(f"{receiver.name}: not delivered: {error}\n")
            return False
        took = time.monotonic() - began
        out.write(f"{receiver.name}: delivered in {took:.2f} s; whom it notifies is up to its routes\n")
        return True

    return all(asyncio.run(send()))
