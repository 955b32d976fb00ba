"""How long a page takes with 10,000 incidents in the state file: from the request to its last byte.

``python tests/bench/pages.py`` prints a table. Server and client share a process and a core, so the
times hold what the client needs to read; a page is asked for 100 times, other than the newest each time.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

sys.path.append(str(Path(__file__).parent.parent))

from servers import application, one

from exporter.diagnosis.knowledge import builtin_classes
from exporter.follow import Follower, Known
from exporter.state import FILE, KEPT_INCIDENTS, Store
from exporter.status import Status, TargetStatus

TIMES = 100
BUDGET = 0.05


def fill(store: Store) -> None:
    """As many incidents as are kept, each with all its evidence, advice and minutes before."""
    follower = Follower(TargetStatus("vllm"), builtin_classes())
    (incident,) = one().targets[0].incidents
    for number in range(KEPT_INCIDENTS):
        identity = f"{number:012x}"
        follower.known[identity] = Known("prefill_budget", "serving", True)
        follower.dirty[identity] = {**incident, "id": identity}
    store.save(follower)


async def measure(store: Store, status: Status) -> None:
    """Print the table."""
    app = application(status, stored=store.incident, listed=store.incidents)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    step = KEPT_INCIDENTS // TIMES
    pages: dict[str, Callable[[int], str]] = {
        "the newest incident": lambda _: f"/incidents/{KEPT_INCIDENTS - 1:012x}",
        "any incident": lambda at: f"/incidents/{at * step:012x}",
        "an incident that is not there": lambda at: f"/incidents/none{at}",
        "the overview": lambda _: "/",
        "any page of it": lambda at: f"/?page={1 + at * 2}",
    }
    print("| page | median | slowest | size |\n| --- | ---: | ---: | ---: |")
    async with aiohttp.ClientSession(base) as session:
        for name, path in pages.items():
            took, size = [], 0
            for at in range(TIMES):
                begin = time.perf_counter()
                async with session.get(path(at)) as answer:
                    size = len(await answer.read())
                took.append(time.perf_counter() - begin)
            late = sum(1 for one in took if one >= BUDGET)
            print(
                f"| {name} | {statistics.median(took) * 1e3:.1f} ms | {max(took) * 1e3:.1f} ms"
                f"{f' ({late} late)' if late else ''} | {size / 1024:.0f} KiB |"
            )
    await runner.cleanup()


def main() -> None:
    """Fill a state file, start anew from it, measure."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.open()
        fill(store)
        status = one()
        follower = Follower(status.targets[0], builtin_classes())
        store.load(follower)
        size = (Path(folder) / FILE).stat().st_size
        print(f"{KEPT_INCIDENTS:,} incidents, {size >> 20} MiB\n")
        asyncio.run(measure(store, status))
        store.close()


if __name__ == "__main__":
    main()
