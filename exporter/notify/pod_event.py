"""A Kubernetes Event on the pod whose vLLM failed, so that ``kubectl describe pod`` says why.

Events need the verb ``create`` on ``events``; who may not write them is told so once, and they
stay off. An Event is named after its incident: the API server itself refuses to have it twice.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import structlog

from .. import logs
from ..config import KUBERNETES
from ..sources.kube_client import KubeClient, KubeError
from ..status import OpenAlert
from .alerts import OUT_OF_MEMORY

MAX_MESSAGE = 1024  # bytes; what the API server takes
QUEUE = 100
_ATTEMPTS = 10
_LONGEST_WAIT = 60.0

log = structlog.get_logger(__name__)


class PodEvents:
    """Writes one Event for each alert of an incident that names a pod."""

    def __init__(
        self,
        client: KubeClient,
        count: Callable[[str, str], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.name = KUBERNETES.rstrip(":")
        self._client = client
        self._count = count
        self._sleep = sleep
        self._queue: deque[OpenAlert] = deque()
        self._seen: deque[str] = deque(maxlen=4 * QUEUE)
        self._wake = asyncio.Event()
        self._off = False

    def put(self, alert: OpenAlert) -> None:
        """Write it, unless it was."""
        labels = alert.labels
        if self._off or labels["alertname"] != OUT_OF_MEMORY or self.name in alert.sent:
            return
        if "namespace" not in labels or "pod" not in labels or (name := _name(alert)) in self._seen:
            return
        self._seen.append(name)
        if len(self._queue) >= QUEUE:
            self._queue.popleft()
            self._count(self.name, "dropped")
        self._queue.append(alert)
        self._wake.set()

    def end(self, alert: OpenAlert, *, replaced: bool = False) -> None:
        """Events have no end."""

    def forget(self, alert: OpenAlert) -> None:
        """Events are not sent again."""

    async def flush(self) -> None:
        """One last attempt for what was not written."""
        while self._queue and not self._off:
            if not await self._write(self._queue[0]):
                return
            self._queue.popleft()

    async def run(self) -> None:
        """Write, for ever."""
        failures = 0
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            alert = self._queue[0]
            done = await self._write(alert)
            failures = 0 if done else failures + 1
            if failures == _ATTEMPTS:
                self._count(self.name, "dropped")
                done, failures = True, 0
            if done and self._queue and self._queue[0] is alert:
                self._queue.popleft()
            if not done:
                await self._sleep(min(2.0**failures, _LONGEST_WAIT))

    async def _write(self, alert: OpenAlert) -> bool:
        """Whether it is there, or never will be."""
        try:
            await self._client.create_event(alert.labels["namespace"], await self._event(alert))
        except KubeError as error:
            self._count(self.name, "failed")
            if error.status == 403:
                self._off = True
                self._queue.clear()
                log.warning("no Kubernetes Events are written", problem=str(error))
                return True
            logs.once(log, ("events",), "a Kubernetes Event is not written", problem=str(error))
            return error.status is not None and error.status // 100 == 4 and error.status not in (401, 429)
        self._count(self.name, "delivered")
        alert.sent[self.name] = alert.starts
        logs.clear(log, ("events",), "Kubernetes Events are written again")
        return True

    async def _event(self, alert: OpenAlert) -> dict[str, object]:
        labels = alert.labels
        namespace, pod = labels["namespace"], labels["pod"]
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod}
        if uid := await self._uid(namespace, pod):
            about["uid"] = uid  # kubectl describe shows only Events of this very pod
        if "container" in labels:
            about["fieldPath"] = f"spec.containers{{{labels['container']}}}"
        when = datetime.fromtimestamp(alert.starts, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": _name(alert), "namespace": namespace},
            "involvedObject": about,
            "type": "Warning",
            "reason": OUT_OF_MEMORY,
            "message": _message(alert),
            "source": {"component": "vllm-oom-exporter", "host": os.uname().nodename},
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }

    async def _uid(self, namespace: str, pod: str) -> str:
        """Empty where the pod can't be asked for: the Event is worth writing all the same."""
        try:
            metadata = (await self._client.pod(namespace, pod)).get("metadata")
        except KubeError:
            return ""
        uid = metadata.get("uid") if isinstance(metadata, dict) else None
        return uid if isinstance(uid, str) else ""


def _name(alert: OpenAlert) -> str:
    labels = alert.labels
    return f"{labels['pod'][:200].rstrip('.-')}.{labels['incident']}-{labels['severity']}"


def _message(alert: OpenAlert) -> str:
    """Whole lines, as far as there is room."""
    message = alert.annotations["summary"]
    for line in alert.annotations["description"].splitlines():
        if len(f"{message}\n{line}".encode()) > MAX_MESSAGE:
            break
        message = f"{message}\n{line}"
    return message
