"""One pod, its logs and its Events through the Kubernetes API, from inside the cluster.

Two GET requests and one POST are all the exporter ever makes there, so a client library would be
larger than what it is used for. What the API answers is checked here, so that nobody else meets
raw JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from ..plain import items, mapping, mappings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts token, CA bundle and namespace of the service account."""

TOKEN_LIFE = 60.0
"""Seconds a token is used before its file is read again: the kubelet replaces it while we run."""

CONNECTIONS = 2
"""One that follows the log, one that asks for the pod."""

_POD_LIMIT = 8 << 20  # bytes; the API server stores no object above 1.5 MiB
_LIST_LIMIT = 64 << 20  # of all pods of a node; some hundred, of some 20 kB each
_POD_TIMEOUT = aiohttp.ClientTimeout(total=20, sock_connect=10)
_LOG_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)")
_VLLM = re.compile(r"(?<![A-Za-z0-9])vllm(?![A-Za-z0-9])")
# the exporter itself names vLLM too: by its image, its command or its options
_EXPORTER = re.compile(r"vllm[-_]oom|--vllm-url|^kubernetes:|=kubernetes:")


class KubeError(Exception):
    """The API could not be asked, or said no. The text is one line that says what to do.

    ``status`` is the HTTP status, None where there was none; ``retry_after`` is in seconds;
    ``log`` says that it was the log that was refused.
    """

    def __init__(
        self, text: str, status: int | None = None, retry_after: float | None = None, *, log: bool = False
    ) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after
        self.log = log


class Clock(Protocol):
    """Time as the source sees it; tests bring their own."""

    def now(self) -> float:
        """Seconds that never go back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return ``seconds`` later."""
        ...


class LoopClock:
    """Real time."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return ``seconds`` later."""
        await asyncio.sleep(seconds)


# --- what a pod tells -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """How a container ended. ``finished`` is RFC 3339 as the API gives it, empty where unknown."""

    reason: str
    exit_code: int | None
    finished: str


@dataclass(frozen=True, slots=True)
class Instance:
    """One run of a container. ``previous``: its log is the one that ``previous=true`` gives."""

    stream: str
    container: str
    previous: bool
    ending: Ending | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.ending is None


def instances(pod: Mapping[str, object], container: str) -> tuple[Instance, ...]:
    """The runs of ``container`` whose logs the API can give, the older first: none, one or two."""
    status = next((one for one in _statuses(pod) if one.get("name") == container), None)
    if status is None:
        return ()
    state, last = mapping(status.get("state")), mapping(status.get("lastState"))
    restarts = status.get("restartCount")
    count = restarts if isinstance(restarts, int) else 0
    found = []
    now = None
    if "running" in state:
        now = Instance(_stream(pod, container, status, count), container, previous=False)
    elif "terminated" in state:
        ended = mapping(state["terminated"])
        stream = _stream(pod, container, {"containerID": status.get("containerID"), **ended}, count)
        now = Instance(stream, container, previous=False, ending=_ending(ended))
    if "terminated" in last:
        ended = mapping(last["terminated"])
        # while it waits for its next run, the count is still the one of the run that ended
        stream = _stream(pod, container, ended, count - 1 if now else count)
        found.append(Instance(stream, container, previous=True, ending=_ending(ended)))
    if now is not None:
        found.append(now)
    return tuple(found)


def vllm_container(pod: Mapping[str, object]) -> str:
    """The one container whose image or command names vLLM. ``KubeError`` if that is not one."""
    spec = mapping(pod.get("spec"))
    found = []
    # an init container that ends is no server: it may load the model with vLLM's image
    sidecars = [one for one in mappings(spec.get("initContainers")) if one.get("restartPolicy") == "Always"]
    for one in sidecars + mappings(spec.get("containers")):
        words = [one.get("image"), *items(one.get("command")), *items(one.get("args"))]
        texts = [word for word in words if isinstance(word, str)]
        if any(map(_VLLM.search, texts)) and not any(map(_EXPORTER.search, texts)):
            found.append(str(one.get("name")))
    if len(found) == 1:
        return found[0]
    what = f"several containers name vLLM ({', '.join(found)[:200]})" if found else "no container names vLLM"
    raise KubeError(f"{what} in image or command; write kubernetes:NAMESPACE/POD/CONTAINER")


def _statuses(pod: Mapping[str, object]) -> list[Mapping[str, object]]:
    status = mapping(pod.get("status"))
    return mappings(status.get("containerStatuses")) + mappings(status.get("initContainerStatuses"))


def _stream(pod: Mapping[str, object], container: str, holder: Mapping[str, object], count: int) -> str:
    given = holder.get("containerID")
    if isinstance(given, str) and given:
        return given[:200]
    return f"{mapping(pod.get('metadata')).get('uid', '')}/{container}/{count}"


def _ending(ended: Mapping[str, object]) -> Ending:
    reason, code, finished = ended.get("reason"), ended.get("exitCode"), ended.get("finishedAt")
    return Ending(
        reason if isinstance(reason, str) and _REASON.fullmatch(reason) else "",
        code if isinstance(code, int) else None,
        finished if isinstance(finished, str) and _TIME.fullmatch(finished) else "",
    )


# --- asking ---------------------------------------------------------------------------------


class KubeClient:
    """Asks one API server. ``url`` has no path; ``token`` is a file, or None for no credentials.

    Opens its connections when first asked and again after ``close``; never more than two.
    """

    def __init__(self, url: str, token: Path | None, tls: ssl.SSLContext | None, clock: Clock) -> None:
        self._url = url
        self._file = token
        self._tls = tls
        self._clock = clock
        self._token = ""
        self._token_until = float("-inf")
        self._session: aiohttp.ClientSession | None = None

    async def pod(self, namespace: str, pod: str) -> Mapping[str, object]:
        """The pod as the API gives it. Raises ``KubeError``."""
        async with self._get(namespace, pod, "", {}, _POD_TIMEOUT) as response:
            body = await _body(response, f"pod {namespace}/{pod}", _POD_LIMIT)
        return _parsed(body, f"pod {namespace}/{pod}")

    async def pods(self, node: str) -> Mapping[str, object]:
        """The list of all pods of a node as the API gives it. Raises ``KubeError``."""
        what = f"the pods of node {node}"
        try:
            async with self._opened().get(
                f"{self._url}/api/v1/pods",
                # resourceVersion 0: from the cache of the API server, which is asked by every node
                params={"fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"},
                headers=self._authorization(),
                timeout=_POD_TIMEOUT,
                allow_redirects=False,
                ssl=self._tls or True,
            ) as response:
                if response.status != 200:
                    raise self._refused(response, what, "list", "pods")
                body = await _body(response, what, _LIST_LIMIT)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise KubeError(f"cannot read from the API server at {self._url}: {why}; trying again") from error
        return await asyncio.to_thread(_parsed, body, what)

    async def log(
        self, namespace: str, pod: str, container: str, *, follow: bool, previous: bool, since: str | None
    ) -> AsyncGenerator[bytes, None]:
        """The log as it comes, each line behind its time; first ``b""`` once the server answers.

        ``since`` is RFC 3339 in whole seconds: finer ones are cut by the API. A server answers
        only with the first line, so on a silent log that may take for ever. Raises ``KubeError``
        also when the connection breaks.
        """
        query = {"container": container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if previous:
            query["previous"] = "true"
        if since:
            query["sinceTime"] = since
        async with self._get(namespace, pod, "/log", query, _LOG_TIMEOUT) as response:
            yield b""
            async for data in response.content.iter_any():
                yield data

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        """Create an Event; one of that name that is there already will do. Raises ``KubeError``."""
        what = f"events in namespace {namespace}"
        try:
            async with self._opened().post(
                f"{self._url}/api/v1/namespaces/{namespace}/events",
                json=event,
                headers=self._authorization(),
                timeout=_POD_TIMEOUT,
                allow_redirects=False,
                ssl=self._tls or True,
            ) as response:
                if response.status not in (200, 201, 202, 409):
                    raise self._refused(response, what, "create", "events")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise KubeError(f"cannot write to the API server at {self._url}: {why}; trying again") from error

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _get(
        self, namespace: str, pod: str, sub: str, query: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._opened().get(
                f"{self._url}/api/v1/namespaces/{namespace}/pods/{pod}{sub}",
                params=query,
                headers=self._authorization(),
                timeout=timeout,
                allow_redirects=False,  # the token is for this server alone
                ssl=self._tls or True,
            ) as response:
                if response.status != 200:
                    what = f"the log of pod {namespace}/{pod}" if sub else f"pod {namespace}/{pod}"
                    raise self._refused(response, what, "get", "pods/log" if sub else "pods")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise KubeError(f"cannot read from the API server at {self._url}: {why}; trying again") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # lines must come when they are written, so nothing may be compressed in blocks
                headers={"Accept-Encoding": "identity"},
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _authorization(self) -> Mapping[str, str]:
        if self._file is None:
            return {}
        if self._clock.now() >= self._token_until:
            try:
                self._token = self._file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):
                self._token = ""
            if not self._token or not self._token.isprintable():
                raise KubeError(f"{self._file}: no token there; set automountServiceAccountToken: true")
            self._token_until = self._clock.now() + TOKEN_LIFE
        return {"Authorization": f"Bearer {self._token}"}

    def _refused(self, response: aiohttp.ClientResponse, what: str, verb: str, resource: str) -> KubeError:
        status = response.status
        does = "read" if verb == "get" else verb
        match status:
            case 401:
                self._token_until = float("-inf")
                text = "the token is not accepted (401); check that the service account exists and is mounted"
            case 403:
                text = f"may not {does} {what} (403); grant the service account the verb {verb} on {resource}"
            case 404:
                text = f"{what} is not there (404); waiting for it"
            case 410:
                text = f"{what} no longer reaches back so far (410); going on with what is there"
            case 429:
                text = "the API server asks to slow down (429); waiting"
            case _:
                doing = "reading" if verb == "get" else "creating"
                text = f"{doing} {what} failed with status {status}; trying again"
        after = response.headers.get("Retry-After", "")
        seconds = float(after) if re.fullmatch(r"\d{1,6}", after) else None
        return KubeError(text, status, seconds, log=resource == "pods/log")


async def _body(response: aiohttp.ClientResponse, what: str, limit: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit:
            raise KubeError(f"the answer for {what} is too large to be one")
    return bytes(body)


def _parsed(body: bytes, what: str) -> Mapping[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise KubeError(f"the answer for {what} is not JSON; is that the API server?")
    return found


def in_cluster(environ: Mapping[str, str], clock: Clock, account: Path = ACCOUNT) -> KubeClient:
    """A client for the cluster this process runs in. Raises ``KubeError`` outside of one."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise KubeError("kubernetes: works inside a pod only (KUBERNETES_SERVICE_HOST is not set)")
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise KubeError(
            f"{account / 'ca.crt'}: {error.strerror or error}; set automountServiceAccountToken: true"
        ) from None
    name = f"[{host}]" if ":" in host else host
    return KubeClient(f"https://{name}:{port}", account / "token", tls, clock)


def own_pod(environ: Mapping[str, str], account: Path = ACCOUNT) -> tuple[str, str]:
    """Namespace and name of the pod this process runs in. Raises ``KubeError`` where unknown."""
    pod = environ.get("POD_NAME") or environ.get("HOSTNAME", "")
    try:
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        namespace = ""
    if not namespace or not pod:
        missing = "the namespace of the service account" if pod else "POD_NAME"
        raise KubeError(f"kubernetes: {missing} is not known; write kubernetes:NAMESPACE/POD/CONTAINER")
    return namespace, pod
