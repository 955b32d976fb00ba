"""Plays a capture of a real vLLM again: its log line by line as it arrived, beside its ``/metrics``.

For tests, and by itself for newcomers: ``python tests/replay.py`` shows a server starting, serving
and dying, and what the sidecar says of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp import web

CAPTURES = Path(__file__).parent / "captures"
EXPORTER = Path(sys.executable).with_name("vllm-oom-exporter")


class Replay:
    """One capture. ``speed`` 2 plays it twice as fast."""

    def __init__(self, name: str, speed: float = 1.0) -> None:
        self.name = name
        self.lines = re.findall(rb"[^\n]*\n|[^\n]+", _read(name, "log"))
        self.arrivals = [float(one) for one in _read(name, "arrival.txt").split()]
        assert len(self.lines) == len(self.arrivals), f"{name}: not one arrival a line"
        self.speed = speed
        self.written: list[float] = []
        """When each line was written, on the clock of ``time.monotonic``."""
        self._metrics: bytes | None = None

    async def write(self, path: Path, wrote: Callable[[int], None] = lambda _: None) -> None:
        """Append every line to ``path`` when its time has come, as vLLM writes: unbuffered."""
        loop = asyncio.get_running_loop()
        begin = loop.time() - self.arrivals[0] / self.speed
        with path.open("ab", buffering=0) as out:
            for number, (line, arrival) in enumerate(zip(self.lines, self.arrivals, strict=True), 1):
                wait = begin + arrival / self.speed - loop.time()
                if wait > 0:
                    await asyncio.sleep(wait)
                self._meet(line)
                out.write(line)
                self.written.append(time.monotonic())
                wrote(number)
        self._metrics = None

    def _meet(self, line: bytes) -> None:
        """``/metrics`` answers from the end of start-up to the death."""
        if b"Application startup complete" in line:
            self._metrics = _read(self.name, "metrics_before.txt")
        elif b"POST /v1" in line and self._metrics is not None:
            self._metrics = _read(self.name, "metrics_last_seen.txt")
        elif b"Shutting down" in line or b"EngineDeadError" in line:
            self._metrics = None

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """Serve what the capture served; gives the base URL. While vLLM is dead it hangs up."""

        async def metrics(request: web.Request) -> web.Response:
            if self._metrics is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.Response(body=self._metrics, content_type="text/plain")

        async def health(request: web.Request) -> web.Response:
            answer = await metrics(request)
            answer.body = b""
            return answer

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _read(name: str, what: str) -> bytes:
    path = CAPTURES / f"{name}.{what}.gz"
    return gzip.decompress(path.read_bytes()) if path.exists() else b""


# --- for a newcomer -------------------------------------------------------------------------


async def show(name: str, listen: str, speed: float, stay: bool) -> int:
    """Run the sidecar beside the replay and tell what it sees."""
    replay = Replay(name, speed)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        async with replay.server() as url, aiohttp.ClientSession() as session:
            sidecar = await asyncio.create_subprocess_exec(
                EXPORTER, "run", "--log", log, "--vllm-url", url, "--listen", listen,
                "--state-dir", Path(folder) / "state", "--log-level", "error",
            )  # fmt: skip
            base = f"http://{listen}"
            print(f"Replaying a real vLLM that dies ({name}). Look at {base}/metrics meanwhile.\n")
            writer = asyncio.create_task(replay.write(log))
            try:
                watching = asyncio.create_task(_watch(session, base))
                ended = asyncio.create_task(sidecar.wait())
                await asyncio.wait([watching, ended], return_when=asyncio.FIRST_COMPLETED, timeout=120)
                if not watching.done():
                    watching.cancel()
                    return sidecar.returncode or 1
                if stay:
                    print(f"\nThe sidecar still answers at {base}/; Ctrl-C stops it.")
                    with suppress(asyncio.CancelledError):
                        await ended
            finally:
                writer.cancel()
                if sidecar.returncode is None:
                    sidecar.send_signal(signal.SIGTERM)
                    await sidecar.wait()
    return 0


async def _watch(session: aiohttp.ClientSession, base: str) -> None:
    """Print engine states as they change, then the counters and the incident."""
    begin, state = time.monotonic(), ""
    while True:
        await asyncio.sleep(0.1)
        with suppress(aiohttp.ClientError):
            async with session.get(f"{base}/metrics") as response:
                lines = (await response.text()).splitlines()
            for line in lines:
                if line.startswith("vllm_oom_engine_state{") and line.endswith(" 1.0") and line != state:
                    state = line
                    print(f"{time.monotonic() - begin:5.1f} s  {line}")
            counted = [
                one for one in lines if one.startswith("vllm_oom_incidents_total{") and one[-3:] != "0.0"
            ]
            if counted and 'state="dead"' in state:
                shown = (
                    "vllm_oom_error_lines_total ",
                    "vllm_oom_fatal_incidents_total{",
                    "vllm_oom_recommended",
                )
                counted += [one for one in lines if one.startswith(shown) and not one.endswith(" 0.0")]
                print(f"{time.monotonic() - begin:5.1f} s  " + "\n         ".join(counted))
                break
    async with session.get(f"{base}/api/v1/incidents") as response:
        incident = json.loads(await response.read())["incidents"][0]
    print(f"\n{base}/api/v1/incidents says, among others:")
    for one in incident["evidence"]:
        print(f"  {one['weight']:+5.1f}  {one['says']}")
    for one in incident["advice"]["do"][:2]:
        print(f"  do:    {one['text']}" + (f"  {one['flags']}" if "flags" in one else ""))


def main() -> int:
    """The command line of ``make run``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="mlp_eager_16384", help="capture to play")
    parser.add_argument("--listen", default="127.0.0.1:10977", help="where the sidecar listens")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--stay", action="store_true", default=sys.stdout.isatty(), help="until Ctrl-C")
    args = parser.parse_args()
    with suppress(KeyboardInterrupt):
        return asyncio.run(show(args.name, args.listen, args.speed, args.stay))
    return 0


if __name__ == "__main__":
    sys.exit(main())
