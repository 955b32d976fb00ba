"""Where the servers of a node answer, asked of the Kubernetes API: a log does not tell its pod's address.

Needs the verb ``list`` on pods and the name of the node (``NODE_NAME``, by the downward API). Without
them everything works that comes from logs; ``/metrics`` of the servers is then not scraped.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterator, Mapping

import structlog

from .. import logs
from ..plain import items, mapping, mappings
from ..sources.kube_client import KubeClient, KubeError, LoopClock, in_cluster
from .tree import Name

PORT = 8000
"""Where vLLM listens unless it is told otherwise."""

SEARCH_SECONDS = 5.0
"""Until the second question for a server that is not found; then twice as long each time."""

CHECK_SECONDS = 60.0
_REFUSED_SECONDS = 300.0
_NOT_SCRAPED = "vLLM's metrics are not scraped, only logs are read"
_NODE = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_OPTION = re.compile(r"--port(?:=|\s+)(\d{1,5})(?=\s|$|[\"'])")

log = structlog.get_logger(__name__)


class Addresses:
    """Base URLs of the containers of a node, as the last ``look`` found them."""

    def __init__(self, client: KubeClient, node: str) -> None:
        self.found: dict[str, str] = {}
        self._client = client
        self._node = node
        self._missing: set[str] = set()
        self._search = SEARCH_SECONDS

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str]) -> Addresses | None:
        """Of the node this process runs on; None where it is not known, which is said in the log."""
        node = environ.get("NODE_NAME", "")
        problem = "NODE_NAME is not set; give it by the downward API (spec.nodeName)"
        try:
            client = in_cluster(environ, LoopClock())
        except KubeError as error:
            problem = str(error).removeprefix("kubernetes: ")
        else:
            if _NODE.fullmatch(node):
                return cls(client, node)
        log.warning(_NOT_SCRAPED, problem=problem)
        return None

    async def look(self, wanted: set[str]) -> float:
        """Ask once; gives the seconds until it is worth while again. Never raises."""
        try:
            pods = await self._client.pods(self._node)
            self.found = await asyncio.to_thread(lambda: dict(_urls(pods)))
        except KubeError as error:
            logs.once(log, ("addresses",), _NOT_SCRAPED, problem=str(error))
            return _REFUSED_SECONDS if error.status in (401, 403) else CHECK_SECONDS
        logs.clear(log, ("addresses",), "the pods of the node are known again")
        missing = wanted - self.found.keys()
        self._search = self._search * 2 if missing == self._missing else SEARCH_SECONDS
        self._missing = missing
        return min(self._search, CHECK_SECONDS) if missing else CHECK_SECONDS

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _urls(pods: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Names of containers, and where they answer."""
    for pod in mappings(pods.get("items")):
        metadata, spec, status = (mapping(pod.get(one)) for one in ("metadata", "spec", "status"))
        host = _host(status.get("podIP"))
        if host is None or status.get("phase") in ("Succeeded", "Failed"):
            continue
        annotated = mapping(metadata.get("annotations")).get("prometheus.io/port")
        for one in mappings(spec.get("containers")) + mappings(spec.get("initContainers")):
            name = Name.parse(f"{metadata.get('namespace')}/{metadata.get('name')}/{one.get('name')}")
            if name is not None:
                yield str(name), f"http://{host}:{_option(one) or _port(annotated) or _declared(one) or PORT}"


def _host(address: object) -> str | None:
    try:
        found = ipaddress.ip_address(address) if isinstance(address, str) else None
    except ValueError:
        return None
    return f"[{found}]" if found is not None and found.version == 6 else None if found is None else str(found)


def _option(container: Mapping[str, object]) -> int | None:
    """What vLLM is told on its command line, which may be a whole script."""
    words = [*items(container.get("command")), *items(container.get("args"))]
    found = _OPTION.search(" ".join(one for one in words if isinstance(one, str)))
    return _port(found[1]) if found is not None else None


def _declared(container: Mapping[str, object]) -> int | None:
    """The port that is called http, else the only one."""
    ports = mappings(container.get("ports"))
    named = [one for one in ports if str(one.get("name")).startswith("http")]
    chosen = named[:1] or (ports if len(ports) == 1 else [])
    return _port(chosen[0].get("containerPort")) if chosen else None


def _port(value: object) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536 else None
