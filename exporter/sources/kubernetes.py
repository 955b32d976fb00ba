"""Follows the log of one container through the Kubernetes API: every run of it, each line once.

What makes this more than one GET request, and decided its shape:

* The API resumes by whole seconds only: see ``kube_position``.
* A cut connection looks like a finished one: the API server ends its answer properly when the
  kubelet's breaks. So an end is believed only when a second reading adds nothing.
* A request names a container, not a run of it, and the API learns of a restart later than the
  kubelet that answers. So whose log an answer holds is asked two seconds after it began. That
  makes lines late by as much after each connect, and the end of a run by about eight seconds.
* Kubelets before 1.29 stop following when they rotate the log. So no connection lives long.

Known limits, all of the API: lines rotated away before they were asked for are gone, and so is
the end of a run when the container restarted twice in between. Old kubelets put another time into
the middle of lines above 16 KiB. When a node's clock is set back by seconds and the connection
breaks within them, lines of these seconds are missed. When the API learns of a restart more than
``HOLD`` seconds late while we reconnect, first lines of the new run count for the old one too.
"""

from __future__ import annotations

import asyncio
import random as random_module
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from .kube_client import (
    ACCOUNT,
    Clock,
    Ending,
    Instance,
    KubeClient,
    KubeError,
    LoopClock,
    in_cluster,
    instances,
    own_pod,
    vllm_container,
)
from .kube_position import Cursor, Position
from .stream import Chunk, SourceStats

PREFIX = "kubernetes:"
LOOK = 5.0
"""Seconds between two looks at the pod."""
SILENCE = 60.0
"""Seconds without a byte after which following starts anew: the log may have been rotated."""
LIFE = 600.0
"""Seconds a connection lives at most."""
HOLD = 2.0
"""Seconds after which an answer is believed to be of the run that the pod's status shows."""
BACKOFF = 60.0
"""Seconds between two attempts at most, save when the server asks for more."""
PATIENCE = 600.0
"""Seconds granted when the server asks for more."""
GIVE_UP = 5
"""Refusals in a row after which the log of an ended run is taken for gone: half a minute."""
_GONE = (400, 404, 410, 500)  # a log that was deleted under the kubelet is a 500


class _Event(NamedTuple):
    """Bytes of a log, empty once it is known whose; or the pod as it is, None if unknown."""

    data: bytes | None = None
    found: tuple[Instance, ...] | None = None


class _End(Enum):
    """Why reading one answer ended."""

    MOVED = auto()  # the container is no longer in the state it was
    AGED = auto()  # it was silent, or lived long enough
    EOF = auto()
    FAILED = auto()


@dataclass(slots=True)
class _Stream:
    position: Position
    tail: bytes | None = None  # unfinished line at the end of the last reading, None before the first
    same: int = 0  # readings in a row that ended where the one before did
    refusals: int = 0  # in a row
    everything: bool = False  # ask for all there is: the time asked from is gone


class KubernetesSource:
    """The log of one container of one pod. Implements ``exporter.sources.stream.Source``.

    ``container`` None is the only other one that names vLLM. ``client`` belongs to the source:
    it is closed when ``chunks`` ends. ``random`` gives 0 to 1 and spreads attempts of many pods.
    """

    def __init__(
        self,
        namespace: str,
        pod: str,
        container: str | None,
        client: KubeClient,
        clock: Clock,
        *,
        name: str = PREFIX,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self.stats = SourceStats(name)
        self._namespace = namespace
        self._pod = pod
        self._container = container
        self._client = client
        self._clock = clock
        self._random = random
        self._resume: Mapping[str, str] = {}
        self._streams: dict[str, _Stream] = {}
        self._failures = 0
        self._end = _End.EOF
        self._delay = 0.0
        self._silent = False

    async def chunks(self, resume: Mapping[str, str]) -> AsyncGenerator[Chunk, None]:
        """Every run of the container, one after the other, until cancelled.

        A run that ended is delivered to its end, with how it ended as ``kubectl describe`` says
        it, before the next begins. Never raises for what the API does: see ``stats``.
        """
        self._resume, self._streams = resume, {}
        try:
            while True:
                try:
                    found = await self._look()
                except KubeError as error:
                    await self._clock.sleep(self._failed(error))
                    continue
                for chunk in self._lost(found):
                    yield chunk
                instance = self._next(found)
                if instance is None:
                    self._well()
                    await self._clock.sleep(LOOK)
                    continue
                async with aclosing(self._read(instance)) as reading:
                    async for chunk in reading:
                        yield chunk
                await self._pause(instance)
        finally:
            await self._client.close()

    async def _look(self, after: float = 0.0) -> tuple[Instance, ...]:
        """The runs of the container whose logs are there."""
        if after:
            await self._clock.sleep(after)
        pod = await self._client.pod(self._namespace, self._pod)
        return instances(pod, self._container or vllm_container(pod))

    def _next(self, found: tuple[Instance, ...]) -> Instance | None:
        """The oldest run that is not delivered to its end."""
        for at, instance in enumerate(found):
            stream = self._known(instance.stream)
            if stream is not None:
                if not stream.position.ended:
                    return instance
            elif not any(self._known(later.stream) for later in found[at + 1 :]):
                return instance
            # else a later one was begun, so this one was done: its token was dropped since
        return None

    def _known(self, name: str) -> _Stream | None:
        if name not in self._streams and name in self._resume:
            self._streams[name] = _Stream(Position.parse(self._resume[name]))
        return self._streams.get(name)

    def _lost(self, found: tuple[Instance, ...]) -> list[Chunk]:
        """Ends of streams the API has no log of any more. Without any log, it may come back."""
        if not found:
            return []
        there = {instance.stream for instance in found}
        chunks = []
        for name in [name for name in self._streams if name not in there]:
            stream = self._streams.pop(name)
            if not stream.position.ended:
                self.stats.read_errors += 1
                self.stats.problem = f"the container restarted before the end of {name} was read; it is lost"
                stream.position.ended = True
                chunks.append(Chunk(name, b"", stream.position.token, ended=True))
        return chunks

    async def _pause(self, instance: Instance) -> None:
        """Wait as long as the way the last reading ended demands."""
        if self._end is _End.FAILED:
            await self._clock.sleep(self._delay)
        elif self._end is _End.EOF and not self._streams[instance.stream].position.ended:
            # an end says little: the connection may have been cut, or the API not know of it yet
            await self._clock.sleep(1)

    async def _read(self, instance: Instance) -> AsyncGenerator[Chunk, None]:
        """One answer of the log API, as far as it goes; ``_end`` says how it ended."""
        name = instance.stream
        stream = self._known(name) or self._streams.setdefault(name, _Stream(Position()))
        position = stream.position
        since = None if stream.everything else position.since
        cursor = Cursor(position, resumed=since is not None)
        opened = touched = self._clock.now()
        silent, self._silent = self._silent, False
        try:
            async with aclosing(self._events(instance, since)) as events:
                async for event in events:
                    now = self._clock.now()
                    if event.found is not None and instance not in event.found:
                        self._end = _End.MOVED
                        return
                    if event.data:
                        touched = now
                        given = cursor.feed(event.data)
                        if given and silent:
                            self.stats.rotations["reopen"] += now - opened < HOLD + 1
                            silent = False
                        if given:
                            yield Chunk(name, given, position.token)
                    elif event.data is not None:
                        stream.everything, stream.refusals = False, 0
                    elif (quiet := now - touched >= SILENCE) or now - opened >= LIFE:
                        self._end, self._silent = _End.AGED, quiet
                        return
            self._end = _End.EOF
            if (chunk := self._at_end(instance, stream, cursor)) is not None:
                yield chunk
        except KubeError as error:
            self._end, self._delay = _End.FAILED, self._failed(error)
            stream.everything = stream.everything or (error.log and error.status == 410)
            stream.refusals += error.log and error.status in _GONE
            if stream.refusals >= GIVE_UP and not instance.running:
                yield self._ended(instance, position, b"")

    async def _events(self, instance: Instance, since: str | None) -> AsyncGenerator[_Event, None]:
        """What one answer brings until its end, and a look at the pod every few seconds.

        A first empty ``data`` says that it is the log of ``instance``: whose log it is was
        decided before the answer began, and the API may learn of a restart a little later than
        the kubelet. So a look that began ``HOLD`` seconds later must still find it there.
        """
        answer = self._client.log(
            self._namespace, self._pod, instance.container, follow=instance.running,
            previous=instance.previous, since=since,
        )  # fmt: skip
        read = asyncio.ensure_future(anext(answer, None))
        look = asyncio.create_task(self._look(LOOK))
        answered = confirmed = False
        try:
            while True:
                waiting = {look} if answered and not confirmed else {look, read}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not answered and read.done():
                    read.result()
                    answered = True
                    await _stop(look)
                    look = asyncio.create_task(self._look(HOLD))
                    continue
                if confirmed and read.done():
                    data = read.result()
                    if data is None:
                        return
                    yield _Event(data=data)
                    read = asyncio.ensure_future(anext(answer, None))
                if look.done():
                    after, found = LOOK, None
                    try:
                        found = look.result()
                    except KubeError as error:
                        if answered and not confirmed:
                            raise
                        after = max(LOOK, self._failed(error))
                    else:
                        self._well()
                    confirmed = answered
                    yield _Event(found=found)
                    look = asyncio.create_task(self._look(after))
        finally:
            try:
                await _stop(read, look)
            finally:  # also when cancelled meanwhile
                await answer.aclose()

    def _at_end(self, instance: Instance, stream: _Stream, cursor: Cursor) -> Chunk | None:
        """The last chunk of a run that ended, once nothing more can be expected."""
        if instance.running:
            return None
        same = not cursor.new and cursor.tail == stream.tail
        stream.same = stream.same + 1 if same else 0
        stream.tail = cursor.tail
        # runtimes finish the last line, and what was delivered comes again: else look twice more
        enough = 1 if cursor.caught_up and not cursor.tail else 3
        return self._ended(instance, stream.position, cursor.last()) if stream.same >= enough else None

    def _ended(self, instance: Instance, position: Position, rest: bytes) -> Chunk:
        position.ended = True
        if instance.ending is not None:
            if rest and not rest.endswith(b"\n"):
                rest += b"\n"
            rest += _said(instance.ending)
        return Chunk(instance.stream, rest, position.token, ended=True)

    def _well(self) -> None:
        self._failures = 0
        self.stats.problem = None
        self.stats.opened = True

    def _failed(self, error: KubeError) -> float:
        """Count a failure; returns the seconds to wait."""
        self.stats.read_errors += 1
        self.stats.problem = str(error)
        delay = min(BACKOFF, (1 << min(self._failures, 6)) * (1 + self._random()))
        self._failures += 1
        return max(delay, min(error.retry_after or 0, PATIENCE))


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _said(ending: Ending) -> bytes:
    """How a container ended, in the words of ``kubectl describe``, each line behind its time."""
    lines = [f"      Reason:       {ending.reason}"] if ending.reason else []
    if ending.exit_code is not None:
        lines.append(f"      Exit Code:    {ending.exit_code}")
    return "".join(f"{ending.finished} {line}\n" for line in lines).encode()


def open_source(
    text: str, environ: Mapping[str, str], clock: Clock | None = None, account: Path = ACCOUNT
) -> KubernetesSource:
    """The source for SOURCE ``kubernetes:`` or ``kubernetes:NAMESPACE/POD/CONTAINER``.

    Names are those ``config`` has checked. Raises ``KubeError`` outside of a cluster, or where
    the own pod is not known.
    """
    clock = clock or LoopClock()
    client = in_cluster(environ, clock, account)
    names = text.removeprefix(PREFIX)
    if names:
        namespace, pod, container = names.split("/")
        return KubernetesSource(namespace, pod, container, client, clock, name=text)
    namespace, pod = own_pod(environ, account)
    return KubernetesSource(namespace, pod, None, client, clock, name=text)
