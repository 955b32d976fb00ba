"""What the trigger test, confirmation and risk cost: CPU time a scrape, and state for a month.

``python tests/bench/outlook.py`` prints a table. A server that died 8 times serves for a month, with a
scrape every 2 s and its per-step lines in the log; everything is kept and judged as in the sidecar.
"""

from __future__ import annotations

import random
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from simulator import WINDOW, Server, Window, run

from exporter.diagnosis.knowledge import builtin_classes
from exporter.diagnosis.scraped import ScrapedWindows
from exporter.follow import Follower
from exporter.sources.stream import Chunk
from exporter.state import Store
from exporter.status import TargetStatus
from exporter.vllm.exposition import parse

SCRAPES = 3000
INTERVAL = 2
MONTH = 30 * 86_400


def main() -> None:
    """Measure, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.open()
        follower = Follower(TargetStatus("vllm"), builtin_classes(), datetime.now)
        windows = ScrapedWindows(follower.ledger)
        follower.window_before = windows.window_before
        for number, moment in enumerate(run("length", 8, 1)):
            if moment.log:
                follower.take("log", Chunk("one", moment.log.encode(), f'{{"n": {number}}}'), moment.at)
            for _ in range(12):
                follower.tick()
            if moment.exposition is not None and follower.status.life is not None:
                windows.take(moment.at, parse(moment.exposition.encode()), follower.status.life.index)
        store.save(follower)
        assert follower.status.life is not None
        life = follower.status.life.index
        events = len(follower.ledger.events)

        server, rng = Server(), random.Random(1)  # noqa: S311 - repeatable, not secret
        server.start()
        spent = []
        for _ in range(SCRAPES):
            server.serve(Window(tuple(rng.randrange(1, 12_000) for _ in range(3))))
            snapshot = parse(server.exposition().encode())
            at = server.now.timestamp()
            began = time.process_time()
            windows.take(at, snapshot, life)
            follower.judge()
            spent.append(time.process_time() - began)

        ledger = follower.ledger
        begin = server.now.timestamp()
        for number in range(MONTH // WINDOW):
            ledger.window(life, begin + WINDOW * number, 8000.0, 12.0)
            if number % 4 == 0:
                store.save(follower)
        store.save(follower)
        store.close()
        with closing(sqlite3.connect(store.path)) as db:
            db.execute("VACUUM")
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            (size,) = db.execute("PRAGMA page_size").fetchone()
    spent.sort()
    print(f"{events} failures compared, {SCRAPES} scrapes, CPU time a scrape with everything judged again:")
    print("| median | 99th percentile | longest | state file after a month |")
    print("| --- | --- | --- | --- |")
    print(
        f"| {1000 * statistics.median(spent):.2f} ms | {1000 * spent[int(0.99 * SCRAPES)]:.2f} ms "
        f"| {1000 * spent[-1]:.2f} ms | {pages * size / 2**20:.1f} MiB |"
    )


if __name__ == "__main__":
    main()
