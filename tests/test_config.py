"""Configuration: what is accepted, what wins, and what is said of every mistake."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HERE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.config import (
    Address,
    Config,
    ConfigError,
    TargetConfig,
    describe,
    duration_text,
    load,
    options,
    parse_duration,
    shown_url,
)
from exporter.config import file as module

FILES = HERE / "config"
LOG = {"log": ["/var/log/vllm.log"]}

SOURCE = "a path or glob, '-' (standard input), 'kubernetes:' or 'kubernetes:NAMESPACE/POD/CONTAINER'"
URL = "an http:// or https:// URL of a host, such as http://localhost:8000"
PUSH_URL = "an http:// or https:// URL of a host, such as http://alertmanager:9093"
ADDRESS = "HOST:PORT, :PORT or [IPV6]:PORT with a port up to 65535"
INTERVAL = "a duration from 100ms to 1h, such as 2s, 500ms or 1m30s"
LINGER = "a duration from 0s to 1h, such as 2s, 500ms or 1m30s"
NAME = "1 to 128 of the characters a-z A-Z 0-9 _ . : / -"
KUBERNETES_NAME = "a Kubernetes name (lower-case letters, digits and '-')"
KEYS = (
    "log, vllm_url, node, node_match, scrape_interval, listen, state_dir, alertmanager_url, runbook_url, linger, "
    "web_config_file, web_external_url, web_enable_lifecycle, web_hide_excerpts, classes, log_level, log_format, probe, targets"
)
PROBE = "on_start, spend, timeout, api_key_file"
NO_LOG = "--log: no log to read; give --log SOURCE, VLLM_OOM_LOG or log: in "

# FILE stands for the name of the file
INVALID = {
    "alias": ["FILE:2: is not YAML: found undefined alias"],
    "boolean": [
        "FILE:2: web_enable_lifecycle: must be true or false",
        "FILE:3: web_hide_excerpts: must be true or false",
    ],
    "choice": [
        "FILE:2: log_level: must be debug, info, warning or error",
        "FILE:3: log_format: must be console, json or auto",
    ],
    "complex-key": ["FILE:2: a key must be plain text"],
    "control-character": ["FILE:2: holds a control character; write plain text"],
    "depth": ["FILE:1: is nested more than 16 deep; unfold it"],
    "duplicate-key": ["FILE:4: linger: is given twice, first on line 2; keep one"],
    "duration": [f"FILE:2: scrape_interval: must be {INTERVAL}", f"FILE:3: linger: must be {LINGER}"],
    "duration-range": [f"FILE:2: scrape_interval: must be {INTERVAL}", f"FILE:3: linger: must be {LINGER}"],
    "empty": [f"{NO_LOG}FILE; SOURCE is {SOURCE}"],
    "encoding": ["FILE:2: is not UTF-8 text"],
    "listen": [f"FILE:2: listen: an IPv6 address needs brackets; must be {ADDRESS}"],
    "listen-port": [f"FILE:2: listen: must be {ADDRESS}"],
    "no-log": ['FILE:1: log: is empty; needs at least one log, such as ["/var/log/vllm/*.log"]'],
    "no-value": [
        "FILE:2: state_dir: has no value; must be the path of a directory",
        f"FILE:3: linger: has no value; must be {LINGER}",
    ],
    "not-a-mapping": ["FILE:1: must be a mapping of keys, such as log: [/var/log/vllm.log]"],
    "shape": [
        'FILE:1: log: must be a list, such as ["/var/log/vllm/*.log"]',
        f"FILE:2: listen: is a list; must be {ADDRESS}",
        f"FILE:3: linger: is a mapping; must be {LINGER}",
        'FILE:4: alertmanager_url: must be a list, such as ["http://alertmanager:9093"]',
    ],
    "source": [
        f"FILE:2: log[0]: is empty; must be {SOURCE}",
        f"FILE:3: log[1]: a URL is not a log; must be {SOURCE}",
        f"FILE:4: log[2]: needs all of namespace, pod and container, or none; must be {SOURCE}",
        f"FILE:5: log[3]: the pod is not a Kubernetes name (RFC 1123); must be {SOURCE}",
        f"FILE:6: log[4]: the container is not a Kubernetes name (RFC 1123); must be {SOURCE}",
        f"FILE:7: log[5]: is a list; must be {SOURCE}",
        f"FILE:8: log[6]: holds characters that cannot be printed; must be {SOURCE}",
        f"FILE:9: log[7]: is a mapping; must be {SOURCE}",
    ],
    "source-twice": [
        "FILE:1: log[2]: is the same log as log[0]; name it once",
        "FILE:1: log[3]: is the same log as log[1]; name it once",
    ],
    "syntax": ["FILE:3: is not YAML: did not find expected ',' or ']'"],
    "tab": ["FILE:2: is not YAML: found character that cannot start any token"],
    "tag": [
        "FILE:2: state_dir: has a YAML tag; must be the path of a directory",
        "FILE:3: classes: has a YAML tag; must be the path of a directory",
    ],
    "target-keys": [
        f"FILE:2: targets[0]: has no name; needs {NAME}",
        f"FILE:2: targets[0]: has no log; needs {SOURCE}",
        f"FILE:2: targets[0]: has no vllm_url; needs {URL}",
        f"FILE:3: targets[1]: has no log; needs {SOURCE}",
        f"FILE:3: targets[1]: has no vllm_url; needs {URL}",
        "FILE:4: targets[1].logs: unknown key; did you mean log?",
        "FILE:5: targets[1].vllm-url: unknown key; did you mean vllm_url?",
        "FILE:6: targets[2]: must be a mapping with the keys name, log, vllm_url, labels",
    ],
    "target-labels": [
        f"FILE:5: targets[0].labels: has no pod; needs {KUBERNETES_NAME}",
        f"FILE:5: targets[0].labels: has no container; needs {KUBERNETES_NAME}",
        "FILE:5: targets[0].labels.team: unknown key; known are namespace, pod, container",
        f"FILE:5: targets[0].labels.namespace: must be {KUBERNETES_NAME}",
        "FILE:9: targets[1].labels: must be a mapping with the keys namespace, pod, container",
    ],
    "target-labels-twice": [
        "FILE:5: targets[1]: has the labels of targets[0], so their series would collide; "
        "give labels that differ"
    ],
    "target-log-twice": ["FILE:3: targets[1].log[1]: is the same log as targets[0].log[0]; name it once"],
    "target-name": [
        f"FILE:2: targets[0].name: must be {NAME}",
        f"FILE:3: targets[1].name: is empty; must be {NAME}",
    ],
    "target-name-twice": ["FILE:3: targets[1].name: is the name of targets[0] too; give each its own"],
    "target-stdin": [
        "FILE:2: targets[0].log[0]: the exporter ends with standard input; make it the only target"
    ],
    "targets-beside-log": [
        "FILE:1: log: cannot be used beside targets (FILE:2); move it into an item of targets, or remove targets",
        "FILE:4: vllm_url: cannot be used beside targets (FILE:2); "
        "move it into an item of targets, or remove targets",
    ],
    "targets-empty": ["FILE:1: targets: is empty; needs at least one target, or remove it"],
    "targets-shape": [
        'FILE:1: targets: must be a list, such as [{name: a, log: ["/var/log/a.log"], '
        'vllm_url: "http://localhost:8000"}]'
    ],
    "two-documents": ["FILE:2: begins a second YAML document; keep one"],
    "unknown-key": [
        "FILE:2: scrape-interval: unknown key; did you mean scrape_interval?",
        "FILE:3: alertmanager_password: unknown key; did you mean alertmanager_url?",
        f"FILE:4: …: unknown key; known are {KEYS}",
    ],
    "url": [
        f"FILE:2: vllm_url: /metrics is added to it; must be {URL}",
        f"FILE:4: alertmanager_url[0]: must be {PUSH_URL}",
        f"FILE:5: alertmanager_url[1]: must be {PUSH_URL}",
        f"FILE:6: alertmanager_url[2]: must be {PUSH_URL}",
        f"FILE:7: alertmanager_url[3]: has a query or a fragment; must be {PUSH_URL}",
    ],
}


def problems_of(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> list[str]:
    """What ``load`` refuses with."""
    with pytest.raises(ConfigError) as caught:
        load(path, environment or {}, flags or {})
    return caught.value.problems


def refusal(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[Config | None, list[str]]:
    """The configuration, or the problems."""
    try:
        return load(path, environment, flags), []
    except ConfigError as error:
        return None, error.problems


def written(folder: Path, text: str | bytes) -> Path:
    """A configuration file with that content."""
    path = folder / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(INVALID))
def test_invalid_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mistake in a file is reported with its line, its path and what is allowed there."""
    monkeypatch.chdir(FILES)
    file = f"invalid-{name}.yaml"
    assert problems_of(Path(file)) == [one.replace("FILE", file) for one in INVALID[name]]


def test_every_invalid_file_has_its_problems() -> None:
    """The table and the folder hold the same files."""
    assert {path.stem for path in FILES.glob("invalid-*")} == {f"invalid-{name}" for name in INVALID}


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@pytest.mark.parametrize("name", sorted(INVALID))
def test_problems_hold_no_values(name: str, loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No problem repeats a password, wherever it was written, and each is one printable line."""
    monkeypatch.setattr(module, "_LOADER", loader)
    problems = problems_of(FILES / f"invalid-{name}.yaml")
    assert [one for one in problems if "hunter2" in one or "aHVudGVy" in one or not one.isprintable()] == []


@pytest.mark.parametrize("name", sorted(INVALID))
def test_without_libyaml(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser in Python refuses the same files at the same places, save for its words on syntax."""
    monkeypatch.chdir(FILES)
    monkeypatch.setattr(module, "_LOADER", yaml.SafeLoader)
    file = f"invalid-{name}.yaml"
    wanted = [one.replace("FILE", file).partition(" is not YAML")[0] for one in INVALID[name]]
    assert [one.partition(" is not YAML")[0] for one in problems_of(Path(file))] == wanted


def test_full_file() -> None:
    """Every key of the file arrives in its field, in units of seconds and without trailing slashes."""
    assert load(FILES / "valid-full.yaml", {}, {}) == Config(
        targets=(
            TargetConfig(
                "vllm",
                ("/var/log/vllm/*.log", "kubernetes:models/llama-0/vllm"),
                "http://user:hunter2@vllm:8000/base",
            ),
        ),
        labelled=False,
        node=None,
        node_match=(),
        scrape_interval=0.5,
        listen=Address("::", 10977),
        state_dir=Path("/var/lib/vllm-oom"),
        alertmanager_url=("http://am-0:9093", "https://am-1:9093/alerts"),
        runbook_url="https://runbooks.example.com/vllm-oom",
        linger=90.0,
        web_config_file=Path("web.yaml"),
        web_external_url="https://oom.example.org/llama",
        web_enable_lifecycle=True,
        web_hide_excerpts=True,
        classes=Path("classes.d"),
        probe_on_start=True,
        probe_spend=60.0,
        probe_timeout=300.0,
        probe_api_key_file=Path("/run/secrets/vllm"),
        log_level="debug",
        log_format="json",
    )


def test_defaults() -> None:
    """One log is enough; everything else has the default of the contract."""
    assert load(FILES / "valid-minimal.yaml", {}, {}) == Config(
        targets=(TargetConfig("vllm", ("/var/log/vllm/*.log",), "http://localhost:8000", {}),),
        labelled=False,
        node=None,
        node_match=(),
        scrape_interval=2.0,
        listen=Address("0.0.0.0", 10977),  # noqa: S104 - a sidecar is scraped from elsewhere
        state_dir=None,
        alertmanager_url=(),
        runbook_url=None,
        linger=30.0,
        web_config_file=None,
        web_external_url=None,
        web_enable_lifecycle=False,
        web_hide_excerpts=False,
        classes=None,
        probe_on_start=False,
        probe_spend=20.0,
        probe_timeout=120.0,
        probe_api_key_file=None,
        log_level="info",
        log_format="auto",
    )


def test_targets() -> None:
    """Targets keep their order and carry Kubernetes labels where they are known, else their name."""
    config = load(FILES / "valid-targets.yaml", {}, {})
    assert config.labelled
    assert config.targets == (
        TargetConfig("chat", ("/var/log/chat.log",), "http://chat:8000", {"target": "chat"}),
        TargetConfig(
            "models/llama-0/vllm",
            ("kubernetes:models/llama-0/vllm",),
            "http://10.0.0.7:8000",
            {"namespace": "models", "pod": "llama-0", "container": "vllm"},
        ),
        TargetConfig(
            "embed",
            ("/var/log/embed.log",),
            "http://embed:8000",
            {"namespace": "models", "pod": "embed-0", "container": "vllm"},
        ),
    )


def test_the_probe_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Its options are together in the file; flag, variable and key say the same, and mistakes are told with their place."""
    by_file = load(written(tmp_path, "log: [a]\nprobe:\n  on_start: true\n  timeout: 5m\n"), {}, {})
    by_flag = load(None, {}, {"log": ["a"], "probe_on_start": "true", "probe_timeout": "5m"})
    by_variable = load(
        None, {"VLLM_OOM_LOG": "a", "VLLM_OOM_PROBE_ON_START": "true", "VLLM_OOM_PROBE_TIMEOUT": "5m"}, {}
    )
    assert by_file == by_flag == by_variable
    assert (by_flag.probe_on_start, by_flag.probe_timeout) == (True, 300.0)
    file = written(tmp_path, "log: [a]\nprobe:\n  on_strat: true\n  spend: 0s\nprobe_timeout: 1m\n")
    assert problems_of(file, {}, {}) == [
        f"{file}:5: probe_timeout: unknown key; known are {KEYS}",
        f"{file}:3: probe.on_strat: unknown key; did you mean on_start?",
        f"{file}:4: probe.spend: must be a duration from 1s to 1h, such as 2s, 500ms or 1m30s",
    ]
    file = written(tmp_path, "log: [a]\nprobe: true\n")
    assert problems_of(file, {}, {}) == [f"{file}:2: probe: must be a mapping with the keys {PROBE}"]


def test_node(tmp_path: Path) -> None:
    """A node has no targets yet, and its series carry labels; flag, variable and key say the same."""
    match = ["prod/llama-*/vllm", "team-[ab]/*/*"]
    by_file = load(written(tmp_path, yaml.safe_dump({"node": "/var/log/pods", "node_match": match})), {}, {})
    by_flag = load(None, {}, {"node": "/var/log/pods", "node_match": match})
    by_variable = load(None, {"VLLM_OOM_NODE": "/var/log/pods", "VLLM_OOM_NODE_MATCH": ",".join(match)}, {})
    assert by_file == by_flag == by_variable
    assert (by_flag.node, by_flag.node_match) == (Path("/var/log/pods"), tuple(match))
    assert (by_flag.targets, by_flag.labelled) == ((), True)
    assert describe(by_flag) == (
        "node: follows the containers in /var/log/pods that match prod/llama-*/vllm, team-[ab]/*/*\n"
    )
    assert "whose log is one of vLLM" in describe(load(None, {}, {"node": "/var/log/pods"}))


def test_a_node_is_beside_nothing(tmp_path: Path) -> None:
    """Logs, an address and targets are refused beside it, each with both places; so is a match without it."""
    file = written(tmp_path, "log: [/var/log/a.log]\n")
    assert problems_of(file, {"VLLM_OOM_VLLM_URL": "http://v"}, {"node": "/var/log/pods"}) == [
        f"{file}:1: log: cannot be used beside --node, which finds the servers of the node itself; keep one of them",
        "VLLM_OOM_VLLM_URL: cannot be used beside --node, which finds the servers of the node itself; "
        "keep one of them",
    ]
    file = written(tmp_path, "targets:\n- {name: a, log: [/a], vllm_url: http://a}\n")
    assert problems_of(file, {"VLLM_OOM_NODE_MATCH": "a/b/c"}, {"node": "/var/log/pods"}) == [
        f"--node: cannot be used beside targets ({file}:1); keep one of them",
        f"VLLM_OOM_NODE_MATCH: cannot be used beside targets ({file}:1); keep one of them",
    ]
    assert problems_of(None, {}, {"log": ["/a"], "node_match": ["a/b/c"]}) == [
        "--node.match: is of no use without node; give node too, or remove it"
    ]


@pytest.mark.parametrize("text", ["llama-*", "prod/llama-0", "Prod/x/y", "a/b/c/d", "a//c", "a/b/{c}"])
def test_patterns_of_containers(text: str) -> None:
    """Three names or globs, of the characters of Kubernetes; the value is not repeated."""
    problem = problems_of(None, {}, {"node": "/var/log/pods", "node_match": [text]})
    wanted = "must be names or globs for namespace, pod and container, such as prod/llama-*/vllm"
    assert len(problem) == 1
    assert problem[0].startswith("--node.match: ")
    assert problem[0].endswith(wanted)


def test_labels_win_over_the_container_read(tmp_path: Path) -> None:
    """Labels that are given replace those that would follow from the log."""
    labels = {"namespace": "x", "pod": "y", "container": "z"}
    target = {"name": "a", "log": ["kubernetes:n/p/c"], "vllm_url": "http://a", "labels": labels}
    assert load(written(tmp_path, yaml.safe_dump({"targets": [target]})), {}, {}).targets[0].labels == labels


def test_a_single_target_of_the_file_is_labelled() -> None:
    """Labels follow from ``targets:`` being there, not from how many there are; one may read standard input."""
    config = load(FILES / "valid-stdin.yaml", {}, {})
    assert config.labelled
    assert config.targets == (TargetConfig("only", ("-",), "http://localhost:8000", {"target": "only"}),)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "full",
            "vllm: reads /var/log/vllm/*.log, kubernetes:models/llama-0/vllm; "
            "scrapes http://vllm:8000/base/metrics every 500ms\n",
        ),
        ("stdin", "only: reads standard input; scrapes http://localhost:8000/metrics every 2s\n"),
        (
            "targets",
            "chat: reads /var/log/chat.log; scrapes http://chat:8000/metrics every 2s\n"
            "models/llama-0/vllm: reads kubernetes:models/llama-0/vllm; "
            "scrapes http://10.0.0.7:8000/metrics every 2s\n"
            "embed: reads /var/log/embed.log; scrapes http://embed:8000/metrics every 2s\n",
        ),
    ],
)
def test_describe(name: str, lines: str) -> None:
    """What would be watched is one line a target, without credentials."""
    assert describe(load(FILES / f"valid-{name}.yaml", {}, {})) == lines


def test_repr_hides_urls() -> None:
    """Neither a configuration nor a target shows its URLs when it is printed whole."""
    config = load(
        None, {}, {**LOG, "vllm_url": "http://a:hunter2@v", "alertmanager_url": ["http://a:hunter2@m"]}
    )
    assert "hunter2" not in repr(config)
    assert config.targets[0].vllm_url == "http://a:hunter2@v"


def test_shown_url() -> None:
    """A URL is shown without user and password, port and path kept."""
    assert shown_url("http://user:p@ss@[::1]:9093/am") == "http://[::1]:9093/am"
    assert shown_url("http://localhost:8000") == "http://localhost:8000"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none.yaml", "No such file or directory"), (".", "Is a directory"), ("a\0b", "not a path")],
)
def test_unreadable_file(name: str, reason: str, tmp_path: Path) -> None:
    """A file that cannot be read is the only problem of the file, and flags are checked all the same."""
    path = tmp_path / name
    shown = str(path).replace("\0", "\\x00")
    assert problems_of(path, {}, {"log_level": "loud"}) == [
        f"{shown}: cannot be read ({reason}); name a readable YAML file",
        "--log-level: must be debug, info, warning or error",
    ]


def test_byte_order_mark_and_aliases(tmp_path: Path) -> None:
    """A byte order mark is skipped, and an alias means what its anchor holds."""
    path = written(tmp_path, b"\xef\xbb\xbfstate_dir: &d /data\nlog: [/l]\nclasses: *d\n")
    config = load(path, {}, {})
    assert (config.state_dir, config.classes) == (Path("/data"), Path("/data"))


def test_words_yaml_would_convert_stay_text(tmp_path: Path) -> None:
    """Plain numbers and booleans are read as they are written, like in a variable or a flag."""
    config = load(written(tmp_path, "log: [0x10, yes, 1.10]\nstate_dir: 2026-01-01\n"), {}, {})
    assert config.targets[0].log == ("0x10", "yes", "1.10")
    assert config.state_dir == Path("2026-01-01")


MANY = "holds more than 20000 values, repeated aliases included"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("#" * (1 << 20) + "\n", ": is larger than 1 MiB; this is no configuration file"),
        ("log: [" + "a," * 20_001 + "]", f":1: {MANY}"),
        (
            # 200 targets of 200 logs each, in 3 kB
            "targets:\n- {log: &l [" + "a," * 200 + "]}\n" + "- {log: *l}\n" * 200,
            f":2: {MANY}",
        ),
        ("[" * 500_000, ":1: is nested more than 16 deep; unfold it"),
        ("{a: " * 200_000, ":1: is nested more than 16 deep; unfold it"),
        ("- " * 500_000, ":1: is nested more than 16 deep; unfold it"),
    ],
)
@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_bombs(loader: Any, text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size, mass, depth and multiplied aliases are refused, early."""
    monkeypatch.setattr(module, "_LOADER", loader)
    path = written(tmp_path, text)
    said = [one for one in problems_of(path) if one.startswith(f"{path}:") and "targets[" not in one]
    if "[" * 100 in text and loader is not yaml.SafeLoader:
        problem = ":1: is not YAML: exceeded maximum nesting depth"  # libyaml looks ahead
    assert said[0] == f"{path}{problem}"


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@pytest.mark.parametrize("text", ['log: ["\\U99999999"]\n', "%YAML 1." + "9" * 5000 + "\n--- a\n"])
def test_absurd_escapes(loader: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the parser itself stumble is no YAML."""
    monkeypatch.setattr(module, "_LOADER", loader)
    path = written(tmp_path, text)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:")
    assert ": is not YAML" in problem


def test_recursive_alias(tmp_path: Path) -> None:
    """A list that holds itself is a list where something else belongs, and nothing is followed for ever."""
    path = written(tmp_path, "log: &a [*a]\n")
    assert problems_of(path) == [f"{path}:1: log[0]: is a list; must be {SOURCE}"]


# --- layers -------------------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    """File < environment < flag, option by option; a list replaces the list below it."""
    path = written(tmp_path, "log: [/file]\nlinger: 1s\nlisten: ':1'\nstate_dir: /file\n")
    environment = {"VLLM_OOM_LOG": "/env/a, /env/b", "VLLM_OOM_LINGER": "2s", "VLLM_OOM_LISTEN": ":2"}
    config = load(path, environment, {"linger": "3s"})
    assert config.targets[0].log == ("/env/a", "/env/b")
    assert (config.linger, config.listen, config.state_dir) == (3.0, Address("", 2), Path("/file"))
    assert load(path, environment, {"log": ["/flag"]}).targets[0].log == ("/flag",)


def test_a_flag_can_switch_off(tmp_path: Path) -> None:
    """False is a value, None is not given."""
    path = written(tmp_path, "log: [/l]\nweb_enable_lifecycle: true\n")
    assert load(path, {}, {"web_enable_lifecycle": None}).web_enable_lifecycle is True
    assert load(path, {"VLLM_OOM_WEB_ENABLE_LIFECYCLE": "0"}, {}).web_enable_lifecycle is False
    assert load(path, {}, {"web_enable_lifecycle": False}).web_enable_lifecycle is False


def test_every_layer_is_checked(tmp_path: Path) -> None:
    """A mistake is reported even where a higher layer would win, each under the name of its layer."""
    path = written(tmp_path, "log: [/l]\nlinger: soon\n")
    environment = {"VLLM_OOM_LINGER": "later", "VLLM_OOM_ALERTMANAGER_URL": "http://a,b"}
    assert problems_of(path, environment, {"linger": "never", "log": ["", "/l", "/l"]}) == [
        f"{path}:2: linger: must be {LINGER}",
        f"VLLM_OOM_ALERTMANAGER_URL[1]: must be {PUSH_URL}",
        f"VLLM_OOM_LINGER: must be {LINGER}",
        f"--log[0]: is empty; must be {SOURCE}",
        f"--linger: must be {LINGER}",
        "--log[2]: is the same log as --log[1]; name it once",
    ]


def test_nothing_given() -> None:
    """Without any configuration the one thing missing is named, with all the ways to give it."""
    assert problems_of() == [f"{NO_LOG}a configuration file; SOURCE is {SOURCE}"]
    assert problems_of(None, {"VLLM_OOM_LOG": " "}, {"log": []}) == problems_of()


def test_flags_beside_targets() -> None:
    """A log or URL from a flag or a variable cannot be mixed with targets of the file."""
    path = FILES / "valid-targets.yaml"
    advice = f"cannot be used beside targets ({path}:1); move it into an item of targets, or remove targets"
    assert problems_of(path, {"VLLM_OOM_VLLM_URL": "http://a"}, {"log": ["/l"]}) == [
        f"--log: {advice}",
        f"VLLM_OOM_VLLM_URL: {advice}",
    ]


def test_unknown_variables() -> None:
    """A misspelt variable is refused; those that Kubernetes makes of Services, and other programs', are not."""
    links = {
        "VLLM_OOM_PORT": "tcp://10.0.0.1:80",
        "VLLM_OOM_EXPORTER_SERVICE_HOST": "10.0.0.1",
        "VLLM_OOM_EXPORTER_SERVICE_PORT": "10977",
        "VLLM_OOM_EXPORTER_SERVICE_PORT_HTTP": "10977",
        "VLLM_OOM_EXPORTER_PORT_10977_TCP_ADDR": "10.0.0.1",
        "VLLM_PORT": "8000",
    }
    load(None, links, LOG)
    assert problems_of(None, {**links, "VLLM_OOM_SCRAPE_INTERVALL": "2s", "VLLM_OOM_\x1b": "x"}, LOG) == [
        "VLLM_OOM_\\x1b: unknown variable; did you mean VLLM_OOM_LOG?",
        "VLLM_OOM_SCRAPE_INTERVALL: unknown variable; did you mean VLLM_OOM_SCRAPE_INTERVAL?",
    ]


def test_file_named_by_a_variable() -> None:
    """VLLM_OOM_CONFIG names the file unless a flag does."""
    environment = {"VLLM_OOM_CONFIG": str(FILES / "valid-full.yaml")}
    assert load(None, environment, {}).log_level == "debug"
    assert load(FILES / "valid-minimal.yaml", environment, {}).log_level == "info"


def test_long_values() -> None:
    """A value longer than any path is refused; the longest path is not."""
    assert load(None, {}, {"log": ["/" * 4096]}).targets[0].log == ("/" * 4096,)
    assert problems_of(None, {}, {"log": ["/" * 4097]}) == [
        f"--log: is longer than 4096 characters; must be {SOURCE}"
    ]


def test_bytes_of_a_variable_that_are_no_text() -> None:
    """A path that is not UTF-8 is refused, because a label must show it."""
    assert problems_of(None, {"VLLM_OOM_LOG": "/caf\udce9"}) == [
        f"VLLM_OOM_LOG: holds characters that cannot be printed; must be {SOURCE}"
    ]


# --- values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0:10977", Address("0.0.0.0", 10977)),  # noqa: S104 - the default
        (":10977", Address("", 10977)),
        ("[::]:10977", Address("::", 10977)),
        ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1)),
        ("localhost:0", Address("localhost", 0)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """Addresses are read, and printed as they were written."""
    config = load(None, {}, {**LOG, "listen": text})
    assert config.listen == address
    assert str(config.listen) == text


@pytest.mark.parametrize(
    "text", ["", "10977", "localhost", "[::]", "[]:1", "[a]:1", "a b:1", "-a:1", ":٣", ":-1"]
)
def test_wrong_addresses(text: str) -> None:
    """What is no address is refused with what is one."""
    (problem,) = problems_of(None, {}, {**LOG, "listen": text})
    assert problem.endswith(f"must be {ADDRESS}")


@pytest.mark.parametrize(
    "text",
    ["http://a", "https://a.b:1/c", "http://[::1]:8000", "http://under_score:80", "HTTP://A", "http://u:p@h"],
)
def test_urls(text: str) -> None:
    """Base URLs of every kind of host are accepted unchanged."""
    assert load(None, {}, {**LOG, "vllm_url": text}).targets[0].vllm_url == text


@pytest.mark.parametrize(
    "text",
    [
        "localhost:8000", "http://", "http:///x", "http://a:0", "http://a:99999", "http://a:b", "http://[::1",
        "http://[v1.a]", "http://a?", "http://a#", "http://a b",
        r"http://a\b@c", "http://bücher", "unix:///a", "http://h/metrics/",
        "http://[1.2.3.4]", "http://[::1::]", "http://a@b@c",
    ],
)  # fmt: skip
def test_wrong_urls(text: str) -> None:
    """What cannot be the base URL of a server is refused."""
    (problem,) = problems_of(None, {}, {**LOG, "vllm_url": text})
    assert problem.endswith(f"must be {URL}")


@pytest.mark.parametrize(
    "text",
    [
        "-",
        "a",
        "./-",
        "/var/log/**/*.log",
        "kubernetes:",
        "kubernetes:a/b.c-1.d/e",
        "kubernetes",
        "/ü/[ab]?.log",
    ],
)
def test_sources(text: str) -> None:
    """Paths, globs, standard input and containers are accepted as they are written."""
    assert load(None, {}, {"log": [text]}).targets[0].log == (text,)


@pytest.mark.parametrize(
    "names",
    ["a/b", "a/b/c/d", "//", "A/b/c", "a/b./c", "a/.b/c", "a/b..c/d", "-a/b/c", "a/b/c\n", f"{'a' * 64}/b/c"],
)
def test_wrong_containers(names: str) -> None:
    """A container needs three names of RFC 1123."""
    (problem,) = problems_of(None, {}, {"log": [f"kubernetes:{names}"]})
    assert problem.endswith(f"must be {SOURCE}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0s", 0.0),
        ("500ms", 0.5),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("1y2w3d4h5m6s7ms", 33019506.007),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """Durations have the syntax of Prometheus."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1", "1.5s", "-1s", "1s1m", "1s 1ms", "٣s", "1S", "1s\n", "9" * 13 + "s"]
)
def test_wrong_durations(text: str) -> None:
    """Units are needed, in falling order, with whole numbers."""
    with pytest.raises(ValueError, match=r"^$"):
        parse_duration(text)


@given(st.integers(0, 10**13))
def test_durations_round_trip(milliseconds: int) -> None:
    """Every number of milliseconds is read back from its text."""
    assert round(parse_duration(duration_text(milliseconds / 1000)) * 1000) == milliseconds


@pytest.mark.parametrize("text", ["0s", "1ms", "1m30s", "90d", "2w", "1y", "1d1s"])
def test_duration_text(text: str) -> None:
    """Durations are written as Prometheus writes them."""
    assert duration_text(parse_duration(text)) == text


# --- the table of options -----------------------------------------------------------------


def test_one_field_one_row() -> None:
    """Every row has its field, its flag, key and variable of one name, and a default that is valid."""
    keys = [option.key for option in options()]
    apart = [f"probe_{one}" for one in PROBE.split(", ")]
    assert [key for key in keys if key not in apart] == KEYS.split(", ")[:-2]
    assert [key for key in keys if key in apart] == apart
    assert {*keys, "targets", "labelled"} - {"log", "vllm_url"} == {field.name for field in fields(Config)}
    for option in options():
        assert option.environment == f"VLLM_OOM_{option.key.upper()}"
        assert option.help
        if option.default:
            given = {**LOG, option.key: option.default}
            assert load(None, {}, given) == load(None, {}, LOG)
    assert {o.flag: o.key for o in options() if "." in o.flag} == {
        "--probe.api-key-file": "probe_api_key_file",
        "--probe.on-start": "probe_on_start",
        "--probe.spend": "probe_spend",
        "--probe.timeout": "probe_timeout",
        "--node.match": "node_match",
        "--web.config.file": "web_config_file",
        "--web.enable-lifecycle": "web_enable_lifecycle",
        "--web.external-url": "web_external_url",
        "--web.hide-excerpts": "web_hide_excerpts",
    }


def test_flags_from_the_table() -> None:
    """A parser of the command line made from the table hands over what ``load`` takes."""
    parser = argparse.ArgumentParser()
    for option in options():
        kind = option.kind
        extra: dict[str, Any] = {"metavar": kind.metavar, "action": "append" if kind.repeatable else "store"}
        if kind.switch:
            extra = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(option.flag, dest=option.key, default=None, help=option.help, **extra)
    line = "--log a --log b --web.enable-lifecycle --no-web.hide-excerpts --web.config.file w --linger 0"
    config = load(None, {"VLLM_OOM_WEB_HIDE_EXCERPTS": "true"}, vars(parser.parse_args(line.split())))
    assert config.targets[0].log == ("a", "b")
    assert (config.web_enable_lifecycle, config.web_hide_excerpts) == (True, False)
    assert (config.web_config_file, config.linger) == (Path("w"), 0.0)
    assert "--no-web.hide-excerpts" in parser.format_help()


# --- whatever comes -----------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
WORDS = st.sampled_from(
    ["log", "targets", "vllm_url", "name", "labels", "listen", "linger", "-", "2s", ":1", "http://a"]
)
TREES = st.recursive(
    SCALARS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=25,
)
LOADERS = st.sampled_from([yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
SIGNS = (
    "log|targets|: |\n|  |- |[|]|{|}|,|&a |*a|!!str |!x!|%YAML 1.1\n|---\n|...\n|>|\"|'|\\U99999999|\\x|<<: |? |#|\t|\r|"
    "\ufeff|\x85|😀"
)
PIECES = st.sampled_from([*SIGNS.split("|"), "|\n"])
QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def harmless(path: Path, loader: Any, data: bytes) -> None:
    """Loading gives a configuration or printable problems, nothing else."""
    path.write_bytes(data)
    before, module._LOADER = module._LOADER, loader
    try:
        config, problems = refusal(path, {}, {})
    finally:
        module._LOADER = before
    assert all(one.isprintable() for one in problems)
    assert (config is None) == bool(problems)
    if config is not None:
        assert describe(config).count("\n") == len(config.targets)


@QUICK
@given(loader=LOADERS, data=st.binary(max_size=60))
def test_arbitrary_bytes(tmp_path: Path, loader: Any, data: bytes) -> None:
    """Whatever bytes a file holds, only ConfigError is raised."""
    harmless(tmp_path / "f", loader, data)


@QUICK
@given(loader=LOADERS, pieces=st.lists(PIECES, max_size=25))
def test_arbitrary_syntax(tmp_path: Path, loader: Any, pieces: list[str]) -> None:
    """Whatever is put together from the signs of YAML, only ConfigError is raised."""
    harmless(tmp_path / "f", loader, "".join(pieces).encode())


@QUICK
@given(loader=LOADERS, tree=TREES)
def test_arbitrary_yaml(tmp_path: Path, loader: Any, tree: object) -> None:
    """Whatever valid YAML a file holds, only ConfigError is raised."""
    harmless(tmp_path / "f", loader, yaml.safe_dump(tree, allow_unicode=True).encode())


@QUICK
@given(
    environment=st.dictionaries(
        st.sampled_from([option.environment for option in options()])
        | st.text(max_size=9).map("VLLM_OOM_".__add__),
        st.text(max_size=20)
        | st.sampled_from([":1", "http://[", "http://a:1", "kubernetes://", "1m", "-,-"]),
        max_size=6,
    ),
    flags=st.dictionaries(st.sampled_from([option.key for option in options()]), TREES, max_size=5),
)
def test_arbitrary_layers(environment: dict[str, str], flags: dict[str, object]) -> None:
    """Whatever stands in variables and flags, only ConfigError is raised, and its lines are printable."""
    environment.pop("VLLM_OOM_CONFIG", None)
    config, problems = refusal(None, environment, flags)
    assert all(one.isprintable() for one in problems)
    assert (config is None) == bool(problems)


@QUICK
@given(
    key=st.sampled_from([option.key for option in options()]),
    shape=st.sampled_from(
        ["{0}", "http://u:{0}@h", "http://h/?{0}", "//{0}@x:1", "kubernetes:{0}/a", "[{0}]:1", "a\n{0}"]
    ),
    nest=st.sampled_from(
        ["{0}: {1}", "{0}: [{1}]", "{0}: {{{1}: 1}}", "targets: [{{{0}: {1}}}]", "{0}: [[{1}]]"]
    ),
)
def test_no_value_is_repeated(tmp_path: Path, key: str, shape: str, nest: str) -> None:
    """A secret in the place of any value is in no problem, whichever layer it came from."""
    value = shape.format("hunter2 Xyzzy!")
    path = written(tmp_path, nest.format(key, yaml.safe_dump(value, default_style='"').strip()))
    problems = [
        *refusal(path, {}, {})[1],
        *refusal(None, {f"VLLM_OOM_{key.upper()}": value}, {})[1],
        *refusal(None, {}, {key: value})[1],
    ]
    assert [one for one in problems if "hunter2" in one or "Xyzzy" in one] == []
