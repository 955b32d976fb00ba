"""All places that alerts go to, as the configuration names them; changed by a reload."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from ..config import KUBERNETES, TargetConfig, kubernetes_labels
from ..sources.kube_client import ACCOUNT, KubeClient, KubeError, LoopClock, in_cluster, own_pod
from ..status import NOTIFICATION_RESULTS, Status
from .alertmanager import Alertmanager
from .pod_event import PodEvents
from .receiver import Outlet, Receiver

_FLUSH_SECONDS = 1.0


class Outlets:
    """One receiver for each URL, and Events where the API can be asked. ``open`` is what is in use."""

    def __init__(
        self,
        status: Status,
        session: aiohttp.ClientSession,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.open: dict[str, Outlet] = {}
        self._status = status
        self._session = session
        self._start = start
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._kube: KubeClient | None = None

    def use(self, urls: tuple[str, ...]) -> None:
        """Push to these from now on; those that were in use before go on with what they hold."""
        for url in [one for one in self.open if one != KUBERNETES and one not in urls]:
            self._tasks.pop(url).cancel()
            del self.open[url]
        for url in urls:
            if url not in self.open:
                self._add(url, Receiver(Alertmanager(url, self._session), self._count))

    def use_events(self, environ: Mapping[str, str], account: Path = ACCOUNT) -> None:
        """Write Events too, where this process runs in a cluster. Whether it may is found out with the first."""
        with contextlib.suppress(KubeError):
            self._kube = in_cluster(environ, LoopClock(), account)
            self._add(KUBERNETES, PodEvents(self._kube, self._count))

    async def flush(self) -> None:
        """A last attempt, before the process ends."""
        for task in self._tasks.values():
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
                await asyncio.gather(*(one.flush() for one in self.open.values()))
        if self._kube is not None:
            await self._kube.close()

    def _add(self, key: str, outlet: Outlet) -> None:
        self.open[key] = outlet
        for result in NOTIFICATION_RESULTS:
            self._status.notifications[outlet.name, result] += 0  # a counter is there before it counts
        self._tasks[key] = self._start(outlet.run())

    def _count(self, receiver: str, result: str) -> None:
        self._status.notifications[receiver, result] += 1


def whose(config: TargetConfig, environ: Mapping[str, str], port: int) -> dict[str, str]:
    """Labels that say on an alert which server it is about, as nothing is added on the way.

    Series without labels get theirs from the scrape configuration; here they come from the pod
    this runs in, whose container vLLM is beside ours. Outside of a cluster it is this host and the
    ``port`` we listen on, which is what Prometheus calls ``instance`` if it scrapes us by that name.
    """
    if config.labels:
        return dict(config.labels)
    for source in config.log:
        if labels := kubernetes_labels(source):
            return labels
    if "KUBERNETES_SERVICE_HOST" in environ:
        if environ.get("POD_NAMESPACE") and environ.get("POD_NAME"):
            return {"namespace": environ["POD_NAMESPACE"], "pod": environ["POD_NAME"]}
        with contextlib.suppress(KubeError):
            namespace, pod = own_pod(environ)
            return {"namespace": namespace, "pod": pod}
    return {"instance": f"{os.uname().nodename}:{port}"}
