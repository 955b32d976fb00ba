"""The one declaration of the options; flags, keys, variables and documentation follow from it.

A new option is one field of ``Config`` and one row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .values import (
    ADDRESS,
    CONTAINERS,
    DIR,
    EXTERNAL_URL,
    FILE,
    PREFIX,
    PUSH_URLS,
    RUNBOOK_URL,
    SOURCES,
    VLLM_URL,
    YES_NO,
    Address,
    Kind,
    choice,
    duration,
)


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One vLLM server.

    ``log``: SOURCEs as written, never empty. ``vllm_url``: base URL without a trailing slash, and
    perhaps with credentials: show it with ``shown_url`` only. ``labels``: what its series carry:
    nothing without ``targets:``, else ``namespace``, ``pod`` and ``container``, or ``target``. One
    that was found on a node has no ``vllm_url`` yet: it is empty.
    """

    name: str
    log: tuple[str, ...]
    vllm_url: str = field(repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """A valid configuration. Durations are seconds; paths are as written, relative to the working folder.

    ``labelled`` says that there is ``targets:`` or ``node``: series then carry labels even if there is one.
    With ``node`` there are no targets yet: they are found there, and come and go.
    """

    targets: tuple[TargetConfig, ...]
    labelled: bool
    node: Path | None
    node_match: tuple[str, ...]
    scrape_interval: float
    listen: Address
    state_dir: Path | None
    alertmanager_url: tuple[str, ...] = field(repr=False)
    runbook_url: str | None
    linger: float
    web_config_file: Path | None
    web_external_url: str | None
    web_enable_lifecycle: bool
    web_hide_excerpts: bool
    classes: Path | None
    probe_on_start: bool
    probe_spend: float
    probe_timeout: float
    probe_api_key_file: Path | None
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``run``. ``default`` is what one would type to get it; empty: there is none."""

    flag: str
    kind: Kind
    default: str
    help: str

    @property
    def key(self) -> str:
        """Key in the file, and field of ``Config``: ``--web.config.file`` is ``web_config_file``."""
        return re.sub("[-.]", "_", self.flag.removeprefix("--"))

    @property
    def environment(self) -> str:
        """Name of the variable."""
        return PREFIX + self.key.upper()


OPTIONS = (
    Option("--log", SOURCES, "", "log of the server: path, glob, '-' for standard input, or 'kubernetes:[NAMESPACE/POD/CONTAINER]'"),
    Option("--vllm-url", VLLM_URL, "http://localhost:8000", "where the server answers; its /metrics is scraped"),
    Option("--node", DIR, "", "follow all vLLM containers of this node, instead of --log; DIR is where the kubelet keeps their logs: /var/log/pods"),
    Option("--node.match", CONTAINERS, "", "with --node: follow the containers whose names match; without it, those whose log is one of vLLM"),
    Option("--scrape-interval", duration("100ms", "1h"), "2s", "time between two scrapes of the server"),
    Option("--listen", ADDRESS, "0.0.0.0:10977", "address to serve metrics, pages and API on"),
    Option("--state-dir", DIR, "", "where counters, incidents and log positions outlive a restart; without it they don't"),
    Option("--alertmanager-url", PUSH_URLS, "", "Alertmanager to push incidents to, past Prometheus; repeat it for each replica"),
    Option("--runbook-url", RUNBOOK_URL, "", "address of the folder with the runbooks; pushed alerts link to them"),
    Option("--linger", duration("0s", "1h"), "30s", "time left for a last scrape when standard input has ended"),
    Option("--web.config.file", FILE, "", "TLS and basic auth, in the format of Prometheus' exporter-toolkit"),
    Option("--web.external-url", EXTERNAL_URL, "", "address under which people reach the pages here; pushed alerts link to it"),
    Option("--web.enable-lifecycle", YES_NO, "false", "allow POST /-/reload"),
    Option("--web.hide-excerpts", YES_NO, "false", "show no log excerpts on pages and in the API"),
    Option("--classes", DIR, "", "directory with more class files"),
    Option("--probe.on-start", YES_NO, "false", "fill steps of a server that has just started, before /-/budget-ready answers 200"),
    Option("--probe.spend", duration("1s", "1h"), "20s", "time after which that begins nothing more, once a step was full"),
    Option("--probe.timeout", duration("1s", "1h"), "2m", "time after which that has failed"),
    Option("--probe.api-key-file", FILE, "", "API key of the server for it; else the variable VLLM_API_KEY"),
    Option("--log-level", choice("debug", "info", "warning", "error"), "info", "least severe message of the exporter's own log"),
    Option("--log-format", choice("console", "json", "auto"), "auto", "of the exporter's own log; auto: console on a terminal, else json"),
)  # fmt: skip
BY_KEY = {option.key: option for option in OPTIONS}
SECTIONS = {
    section: {key.removeprefix(f"{section}_"): key for key in BY_KEY if key.startswith(f"{section}_")}
    for section in ("probe",)
}
"""Options that the file keeps under a key of their own: section, key in it, ``Option.key``."""
OF_TARGET = ("log", "vllm_url")  # options that describe the one server there is without targets:
OF_NODE = ("node", "node_match")  # options that say which servers there are, as targets: does


def options() -> tuple[Option, ...]:
    """Every option of ``run``, in the order they are documented."""
    return OPTIONS
