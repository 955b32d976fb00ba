"""The sidecar put together: targets, state, web server; started, supervised, reloaded, stopped.

A task that ends unexpectedly takes the process down: a restart is seen by everyone, frozen
numbers by nobody. Where there are several targets, one that fails is set aside instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from . import logs, state_lock
from .aside import Aside
from .config import KUBERNETES, STDIN, Config, ConfigError, TargetConfig
from .device import Devices
from .diagnosis.knowledge import FailureClass
from .follow import TICK
from .node.addresses import Addresses
from .node.agent import NodeAgent
from .notify.alerts import Links
from .notify.outlets import Outlets, whose
from .probe.on_start import Wanted
from .scrape import open_session
from .sources.files import FileSource
from .sources.kube_client import KubeError
from .sources.kubernetes import open_source as open_kubernetes
from .sources.stdin import StdinSource
from .sources.stream import Source
from .state import StateError, Store
from .status import Status, TargetStatus
from .target import Target
from .web.app import make_app
from .web.server import serve
from .web.tls import WebConfigError

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_CONFIG = 2

_SAVE_SECONDS = 1.0
_IDLE_SECONDS = 1.0
_RETRY_SECONDS = 10.0  # after the state could not be written
_STOP_SECONDS = 2.0
_FORGET_SECONDS = 60.0  # between two looks at saved targets that are gone
_FIXED = (
    *("node", "node_match", "listen", "state_dir", "web_config_file", "web_enable_lifecycle"),
    *("web_hide_excerpts", "classes"),
)

_OF_EVERY_TARGET = (
    *("scrape_interval", "web_external_url", "runbook_url"),
    *("probe_on_start", "probe_spend", "probe_timeout", "probe_api_key_file"),
)

log = structlog.get_logger(__name__)


class StartError(Exception):
    """The sidecar can't start; the message is one line for the user."""


class App:
    """One run of the sidecar. ``load`` reads the configuration anew for a reload."""

    def __init__(
        self, config: Config, classes: Mapping[str, FailureClass], load: Callable[[], Config]
    ) -> None:
        self.status = Status()
        self._config = config
        self._classes = classes
        self._load = load
        self._targets: dict[str, Target] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._aside = Aside()
        self._store = Store(config.state_dir) if config.state_dir else None
        self._state_lock: int | None = None
        self._retry_at = 0.0
        self._moved_aside: Path | None = None
        self._stop = asyncio.Event()
        self._crash: BaseException | None = None
        self._session: aiohttp.ClientSession | None = None
        self._devices = Devices()
        self._awake = asyncio.Event()  # something was read, of whatever target
        self._node: NodeAgent | None = None
        self._outlets: Outlets | None = None
        self.bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        """Where it listens, as soon as it does: the port may have been 0."""

    async def run(self) -> int:
        """Run until stopped by a signal or the end of standard input; returns the exit code."""
        loop = asyncio.get_running_loop()
        self._session = open_session()
        runner: web.AppRunner | None = None
        try:
            self._lock_state()
            self._open_store()
            self._outlets = Outlets(self.status, self._session, lambda job: self._supervise("", job))
            self._outlets.use(self._config.alertmanager_url)
            self._outlets.use_events(os.environ)
            self._node = self._open_node()
            for one in self._config.targets:
                self._add(self._build(one))
            runner = await self._listen()
            if self._store is None:
                log.warning("no --state-dir: counters and positions are lost with this process")
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
            loop.add_signal_handler(signal.SIGHUP, lambda: self._supervise("", self._reload_logged()))
            for target in self._targets.values():
                self._start(target)
            self._supervise("", self._tick())
            if self._node is None:
                self._supervise("", self._end_with_input())
            else:
                self._supervise("", self._follow(self._node))
                self._supervise("", self._locate(self._node))
            await self._stop.wait()
        finally:
            await self._shut_down(runner)
        if self._crash is not None:
            log.error("stopping after a crash", error=f"{type(self._crash).__name__}: {self._crash}")
            return EXIT_CRASHED
        log.info("stopped")
        return EXIT_OK

    # --- starting -------------------------------------------------------------------------------

    def _lock_state(self) -> None:
        if self._config.state_dir is not None:
            try:
                self._state_lock = state_lock.take(self._config.state_dir)
            except state_lock.InUseError as error:
                raise StartError(str(error)) from error

    def _open_store(self) -> None:
        if self._store is None:
            return
        try:
            self._store.open()
        except StateError as error:
            self._state_failed(error)
        self._say_moved()

    def _say_moved(self) -> None:
        """The state file may be found unfit at the start, or when it can be read at last."""
        if self._store is None or self._store.moved_aside == self._moved_aside:
            return
        self._moved_aside = self._store.moved_aside
        self.status.state_write_failures += 1
        log.warning(
            "the state file was moved aside and a new one begun",
            why=self._store.why_moved,
            moved_to=str(self._moved_aside),
        )

    def _open_node(self) -> NodeAgent | None:
        """What a former process followed there is vLLM, without being asked again."""
        config, saved = self._config, {}
        if config.node is None:
            return None
        if self._store is not None and self._store.is_open:
            saved = {name: max(time.time() - when, 0.0) for name, when in self._store.seen().items()}
        return NodeAgent(config.node, config.node_match, saved)

    async def _listen(self) -> web.AppRunner:
        config = self._config
        app = make_app(
            self.status,
            classes=self._classes,
            reload=self.reload,
            enable_lifecycle=config.web_enable_lifecycle,
            hide_excerpts=config.web_hide_excerpts,
            stored=self._stored,
            listed=self._listed,
        )
        try:
            runner = await serve(app, *config.listen, config.web_config_file)
        except WebConfigError as error:
            raise StartError("\n".join(error.problems)) from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(
                f"--listen {config.listen}: {reason}; choose another address or stop what listens there"
            ) from error
        self.bound.set_result(runner.addresses[0][:2])
        log.info("listening", address=f"{runner.addresses[0][0]}:{runner.addresses[0][1]}")
        return runner

    def _stored(self, target: str, identity: str) -> dict[str, object] | None:
        return None if self._store is None else self._store.incident(target, identity)

    def _listed(self, target: str, skip: int, most: int) -> tuple[list[dict[str, object]], int]:
        return ([], 0) if self._store is None else self._store.incidents(target, skip, most)

    def _build(self, config: TargetConfig) -> Target:
        """A target that does nothing yet. Raises ``StartError`` where it never could."""
        assert self._session is not None
        assert self._outlets is not None
        status = TargetStatus(config.name, dict(config.labels))
        node = self._node
        sources = [_open_source(one) if node is None else node.source(config) for one in config.log]
        interval = self._config.scrape_interval
        try:
            # of several servers nobody knows whose device is whose
            devices = self._devices if len(self._config.targets) == 1 else None
            return Target(
                config, status, sources, self._classes, self._session, interval, devices=devices,
                outlets=self._outlets.open, labels=whose(config, os.environ, self._config.listen.port),
                links=Links(self._config.web_external_url, self._config.runbook_url),
                probe=_probe_wanted(self._config),
            )  # fmt: skip
        except ValueError as error:
            raise StartError(f"vllm_url of {config.name}: {error}") from error

    def _add(self, target: Target) -> None:
        """Take over what was saved of it, and show it."""
        if self._store is not None and self._store.is_open:
            try:
                self._store.load(target.follower)
            except StateError as error:
                if target.config.name in self._aside.targets:
                    raise  # it was counted from there on; from zero on would count all of it again
                self._state_failed(error)
        target.alerts.resumed = target.follower.checkpoint is not None
        target.alerts.adopt()
        target.awake = self._awake
        self._targets[target.config.name] = target
        self._aside.begun(target.status, asyncio.get_running_loop().time())
        self._show()

    def _show(self) -> None:
        aside = [one.status for one in self._aside.targets.values()]
        self.status.targets = [one.status for one in self._targets.values()] + aside

    def _start(self, target: Target) -> None:
        for job in target.jobs(lambda: self._save(target)):
            task = self._supervise(target.config.name, self._run_alone(target, job))
            task.add_done_callback(partial(_close, job))

    def _supervise(self, owner: str, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``job``; an exception in it ends the process."""
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.setdefault(owner, []).append(task)
        task.add_done_callback(lambda done: self._done(owner, done))
        return task

    def _done(self, owner: str, task: asyncio.Task[None]) -> None:
        if task in self._tasks.get(owner, []):
            self._tasks[owner].remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task crashed", target=owner, exc_info=error)
            self._crash = self._crash or error
            self._stop.set()

    # --- targets that fail alone ----------------------------------------------------------------

    def _spared(self, config: TargetConfig) -> bool:
        """Whether a failure of one target leaves the others alone. Standard input can't be read again."""
        return (self._node is not None or len(self._config.targets) > 1) and STDIN not in config.log

    @contextlib.contextmanager
    def _alone(self, target: Target) -> Iterator[None]:
        """What fails in here is of that target, and nothing else is done with it before it is set aside."""
        try:
            yield
        except Exception as error:
            if not self._spared(target.config):
                raise
            if self._targets.get(target.config.name) is target:
                self._set_aside(target.config, error)
            else:
                log.exception("a target crashed at its end", target=target.config.name)

    async def _run_alone(self, target: Target, job: Coroutine[Any, Any, None]) -> None:
        with self._alone(target):
            await job

    def _begin(self, config: TargetConfig, built: Target | None = None) -> None:
        try:
            self._add(target := built or self._build(config))
            self._start(target)
        except Exception as error:
            if not self._spared(config):
                raise
            self._set_aside(config, error)

    def _set_aside(self, config: TargetConfig, error: Exception) -> None:
        """Forget what is in memory of it, which may be half of something. What was saved is whole."""
        now, name = asyncio.get_running_loop().time(), config.name
        target, before = self._targets.pop(name, None), self._aside.targets.get(name)
        for task in self._tasks.pop(name, []):
            if task is not asyncio.current_task():
                task.cancel()
        if target is not None:
            target.alerts.release()
        shown = target or before
        # the text of an error may hold what a client sent: it is for our own log alone
        pause = self._aside.put(config, shown.status if shown else None, type(error).__name__, now)
        log.error(
            "a target crashed and is not followed; the others are", target=name,
            error=f"{type(error).__name__}: {error}", again_in_seconds=pause, exc_info=error,
        )  # fmt: skip
        self._show()

    def _begin_anew(self) -> None:
        for config in self._aside.due(asyncio.get_running_loop().time()):
            self._begin(config)
            if config.name in self._targets:
                log.info("a target is followed again", target=config.name)

    # --- running --------------------------------------------------------------------------------

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        save_at = loop.time() + _SAVE_SECONDS
        while True:
            await self._pause()
            self.status.alive = now = loop.time()
            for target in [*self._targets.values()]:
                with self._alone(target):
                    target.tick()
            self._begin_anew()
            looked = self._node is None or self._node.looked
            if looked and not self.status.ready and all(one.opened for one in self._targets.values()):
                self.status.ready = True
                log.info("ready", targets=len(self._targets))
            due = now >= save_at
            if due:
                save_at = now + _SAVE_SECONDS
            for target in [*self._targets.values()]:
                if target.follower.urgent or (due and target.follower.stale):
                    with self._alone(target):
                        self._save(target)
            self._say_problems()

    async def _pause(self) -> None:
        """A tick; longer while nothing is under way, until something is read."""
        if self.status.ready and all(one.follower.idle for one in self._targets.values()):
            self._awake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), _IDLE_SECONDS)
        await asyncio.sleep(TICK)

    def _say_problems(self) -> None:
        for target in self._targets.values():
            for source in target.status.sources:
                key = ("source", target.config.name, source.name)
                if source.problem is not None:
                    logs.once(log, key, "the log can't be read", source=source.name, problem=source.problem)
                else:
                    logs.clear(log, key, "the log is read again", source=source.name)

    def _save(self, target: Target) -> None:
        """Save, or go on in memory; everything unsaved is part of the next attempt."""
        if self._store is None:
            target.follower.saved()
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._retry_at:
            return
        try:
            self._store.save(target.follower)
        except StateError as error:
            self._state_failed(error)
            self._retry_at = loop.time() + _RETRY_SECONDS
        else:
            logs.clear(log, ("state",), "the state is saved again")
            self._say_moved()

    def _state_failed(self, error: StateError) -> None:
        self.status.state_write_failures += 1
        logs.once(log, ("state",), "the state can't be read or saved: going on in memory", problem=str(error))

    async def _follow(self, node: NodeAgent) -> None:
        """Targets come and go with the pods of the node."""
        forget_at = 0.0
        while True:
            changes = await node.look()
            for name in changes.ended:
                self._remove(name)
                self._aside.forget(name)
                log.info("a container is no longer followed", target=name)
            for one in changes.appeared:
                self._begin(one)
                if one.name in self._targets:
                    log.info("a container is followed", target=one.name)
                await asyncio.sleep(0)
            self._show()
            self.status.node_containers = node.counts
            if node.looked and asyncio.get_running_loop().time() >= forget_at:
                forget_at = asyncio.get_running_loop().time() + _FORGET_SECONDS
                self._forget(node)
            await asyncio.sleep(node.pause)

    def _forget(self, node: NodeAgent) -> None:
        """Pods come under new names for ever: what is saved of those that are gone has to end."""
        if self._store is None or not self._store.is_open:
            return
        try:
            gone = self._store.forget({*self._targets, *self._aside.targets, *map(str, node.tree.followed)})
        except StateError as error:
            self._state_failed(error)
        else:
            if gone:
                log.info("what was saved of targets that are gone is dropped", targets=gone)

    async def _locate(self, node: NodeAgent) -> None:
        """Where the servers of the node answer, as long as their pods are there."""
        addresses = Addresses.in_cluster(os.environ)
        if addresses is None:
            return
        try:
            while True:
                node.changed.clear()
                there = {name for name in self._targets if not node.is_gone(name)}
                pause = await addresses.look(there)
                for name, target in [*self._targets.items()]:
                    with self._alone(target):
                        target.point_to(None if node.is_gone(name) else addresses.found.get(name))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(node.changed.wait(), pause)
        finally:
            await addresses.close()

    async def _end_with_input(self) -> None:
        """Standard input ended: leave time for a last scrape, then stop."""
        for target in list(self._targets.values()):
            await target.ended.wait()
        log.info("the input ended", linger_seconds=self._config.linger)
        await asyncio.sleep(self._config.linger)
        self._stop.set()

    # --- reloading ------------------------------------------------------------------------------

    async def reload(self) -> str | None:
        """Take over the configuration as it is now, whole or not at all; what is wrong, or None."""
        problem = self._reload()
        self.status.config_reload_successful = problem is None
        if problem is None:
            log.info("configuration reloaded", targets=len(self._targets))
        else:
            log.error("configuration not reloaded", problem=problem)
        return problem

    async def _reload_logged(self) -> None:
        await self.reload()

    def _reload(self) -> str | None:
        try:
            new = self._load()
        except ConfigError as error:
            return "\n".join(error.problems)
        for name in _FIXED:
            if getattr(new, name) != getattr(self._config, name):
                return f"{name} can't change while running; restart to change it"
        followed = [one.config for one in self._targets.values()]
        followed += [one.config for one in self._aside.targets.values()]
        targets = new.targets if self._node is None else followed
        wanted = {one.name: one for one in targets}
        again = any(getattr(new, one) != getattr(self._config, one) for one in _OF_EVERY_TARGET)
        stdin = {one.name for one in self._config.targets if STDIN in one.log}
        if any(one not in wanted or again or wanted[one] != self._targets[one].config for one in stdin):
            return "the target that reads standard input can't change while running; restart to change it"
        if any(STDIN in one.log and one.name not in stdin for one in new.targets):
            return "standard input can't be added while running; restart to add it"
        old, self._config = self._config, new
        try:
            built = [
                self._build(one)
                for one in targets
                if again or one.name not in self._targets or one != self._targets[one.name].config
            ]
        except StartError as error:
            self._config = old
            return str(error)
        logs.configure(new.log_level, new.log_format)
        assert self._outlets is not None
        self._outlets.use(new.alertmanager_url)
        for target in self._targets.values():
            target.alerts.adopt()
        for name, target in list(self._targets.items()):
            if again or wanted.get(name) != target.config:
                self._remove(name)
        for name in [one.name for one in followed if one.name not in wanted]:
            self._aside.forget(name)
        for target in built:
            self._begin(target.config, target)
        self._show()
        return None

    def _remove(self, name: str) -> None:
        for task in self._tasks.pop(name, []):
            task.cancel()
        if (target := self._targets.pop(name, None)) is not None:
            with self._alone(target):
                self._save(target)
            target.alerts.release()

    # --- stopping -------------------------------------------------------------------------------

    async def _shut_down(self, runner: web.AppRunner | None) -> None:
        tasks = [task for owned in self._tasks.values() for task in owned]
        for task in tasks:
            task.cancel()
        if self._outlets is not None:
            await self._outlets.flush()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        self._retry_at = 0.0
        if runner is not None:  # else another one may be at work, and know more than we do
            for target in [*self._targets.values()]:
                with self._alone(target):
                    self._save(target)
        if self._node is not None:
            self._node.close()
        if self._store is not None:
            self._store.close()
        if self._state_lock is not None:
            os.close(self._state_lock)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                if runner is not None:
                    await runner.cleanup()
                if self._session is not None:
                    await self._session.close()


def _close(job: Coroutine[Any, Any, None], _: asyncio.Task[None]) -> None:
    job.close()  # it was never begun, where its task was cancelled at once


def _probe_wanted(config: Config) -> Wanted | None:
    if not config.probe_on_start:
        return None
    key = os.environ.get("VLLM_API_KEY") or None
    return Wanted(config.probe_spend, config.probe_timeout, config.probe_api_key_file, key)


def _open_source(text: str) -> Source:
    if text == STDIN:
        return StdinSource(text)
    if text.startswith(KUBERNETES):
        try:
            return open_kubernetes(text, os.environ)
        except KubeError as error:
            raise StartError(f"--log {text}: {error}") from error
    return FileSource(text)


def run(config: Config, classes: Mapping[str, FailureClass], load: Callable[[], Config]) -> int:
    """Run the sidecar until it ends; returns the exit code of the contract."""
    logs.configure(config.log_level, config.log_format)

    async def main() -> int:
        return await App(config, classes, load).run()

    try:
        return asyncio.run(main())
    except StartError as error:
        for line in str(error).splitlines():
            print(f"vllm-oom-exporter: {line}", file=sys.stderr)
        return EXIT_CONFIG
