"""What the manifests ask of a cluster: Pod Security Standards, rights, resources, and options that exist.

These read the files as they are. ``tests/deploy/manifests.py`` does the same to what helm and kubectl make of them.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import load_yaml

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy/kubernetes"
EXPORTER = Path(sys.executable).with_name("vllm-oom-exporter")
NAME = "vllm-oom-exporter"

Spec = dict[str, Any]

# what the restricted profile lets a pod mount
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SELINUX = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(pod: Mapping[str, Any], container: Mapping[str, Any]) -> set[str]:
    """What the restricted profile of the Pod Security Standards refuses in one container and in its pod.

    Security fields must stand at the container: a sidecar is added to pods whose own fields are not ours.
    """
    security = container.get("securityContext", {})
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)}
    found |= {"sysctls"} if pod.get("securityContext", {}).get("sysctls") else set()
    found |= {
        f"volume {kind}"
        for volume in pod.get("volumes", [])
        for kind in volume.keys() - {"name"}
        if kind not in VOLUMES
    }
    found |= {"hostPort" for port in container.get("ports", []) if port.get("hostPort")}
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        found |= {f"{probe} host"} if container.get(probe, {}).get("httpGet", {}).get("host") else set()
    wanted: dict[str, Callable[[Any], bool]] = {
        "privileged": lambda value: not value,
        "allowPrivilegeEscalation": lambda value: value is False,
        "runAsNonRoot": lambda value: value is True,
        "runAsUser": lambda value: value != 0 and value is not None,
        "procMount": lambda value: value in (None, "Default"),
        "capabilities": lambda value: value == {"drop": ["ALL"]},
        "seccompProfile": lambda value: value == {"type": "RuntimeDefault"},
        "seLinuxOptions": lambda value: (
            value is None or (value.get("type") in SELINUX and not value.keys() & {"user", "role"})
        ),
        "appArmorProfile": lambda value: value is None or value.get("type") != "Unconfined",
        "windowsOptions": lambda value: value is None,
    }
    found |= {field for field, good in wanted.items() if not good(security.get(field))}
    # beyond the profile, and promised
    found |= {"readOnlyRootFilesystem"} if security.get("readOnlyRootFilesystem") is not True else set()
    return found


def own(pod: Mapping[str, Any]) -> Spec:
    """The exporter's container of a pod, whichever list it is in."""
    (found,) = [
        one for key in ("initContainers", "containers") for one in pod.get(key, []) if one["name"] == NAME
    ]
    assert isinstance(found, dict)
    return found


def check_container(container: Mapping[str, Any]) -> None:
    """What holds for every exporter, wherever it runs."""
    assert container["resources"]["requests"] == container["resources"]["limits"], (
        "the pod would lose Guaranteed"
    )
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}, "it needs no device"
    assert "readinessProbe" not in container, "it would take vLLM out of rotation"
    assert "startupProbe" not in container, "vLLM would wait for it"
    assert container["livenessProbe"]["httpGet"] == {"path": "/-/healthy", "port": "oom-metrics"}
    assert container["ports"] == [{"name": "oom-metrics", "containerPort": 10977}]
    check_options(container)


def check_options(container: Mapping[str, Any]) -> None:
    """``vllm-oom-exporter check`` accepts the arguments and variables that ``run`` is given."""
    command, *options = container["args"]
    assert command == "run"
    given = {
        one["name"]: one.get("value", "http://alertmanager:9093") for one in container.get("env", [])
    }  # a Secret holds addresses
    for name, value in (
        given | {"POD_NAMESPACE": "prod", "POD_NAME": "chat-0"}
    ).items():  # as the kubelet does
        options = [one.replace(f"$({name})", value) for one in options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_OOM_")}
    done = subprocess.run(
        [EXPORTER, "check", *options], env=clean | given, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def _sidecar(name: str) -> Spec:
    spec = load_yaml(KUBERNETES / name / "sidecar.yaml")["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.mark.parametrize("name", ["shared-log", "kubernetes-api"])
def test_the_sidecar_passes_the_restricted_profile(name: str) -> None:
    """Nothing that is added to a pod of vLLM, container or volume, is refused by the strictest profile."""
    pod = _sidecar(name)
    assert violations(pod, own(pod)) == set()
    check_container(own(pod))
    assert own(pod)["restartPolicy"] == "Always"


@pytest.mark.parametrize(
    ("where", "value", "refused"),
    [
        ("runAsNonRoot", False, "runAsNonRoot"),
        ("runAsUser", 0, "runAsUser"),
        ("allowPrivilegeEscalation", None, "allowPrivilegeEscalation"),
        ("readOnlyRootFilesystem", False, "readOnlyRootFilesystem"),
        ("capabilities", {"drop": ["NET_RAW"]}, "capabilities"),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_PTRACE"]}, "capabilities"),
        ("seccompProfile", {"type": "Unconfined"}, "seccompProfile"),
        ("seccompProfile", None, "seccompProfile"),
        ("privileged", True, "privileged"),
        ("seLinuxOptions", {"type": "spc_t"}, "seLinuxOptions"),
        ("procMount", "Unmasked", "procMount"),
        ("appArmorProfile", {"type": "Unconfined"}, "appArmorProfile"),
        ("windowsOptions", {"hostProcess": True}, "windowsOptions"),
    ],
)
def test_every_field_of_the_profile_is_looked_at(where: str, value: object, refused: str) -> None:
    """The check above sees each field that is wrong or missing."""
    pod = copy.deepcopy(_sidecar("shared-log"))
    own(pod)["securityContext"][where] = value
    assert violations(pod, own(pod)) == {refused}


def test_the_pod_is_looked_at_too() -> None:
    """Volumes of the host, its namespaces and its ports are seen."""
    pod = copy.deepcopy(_sidecar("shared-log"))
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    pod["hostPID"] = True
    own(pod)["ports"][0]["hostPort"] = 10977
    assert violations(pod, own(pod)) == {"volume hostPath", "hostPID", "hostPort"}


def test_the_volume_cannot_evict_the_pod() -> None:
    """The limit of the log volume is twice what serve.sh lets it hold by default."""
    namespace: dict[str, Any] = {"__name__": "keep"}
    exec((KUBERNETES / "shared-log/keep.py").read_text(), namespace)  # noqa: S102 - our own file, no module
    (limit,) = [
        one["emptyDir"]["sizeLimit"] for one in _sidecar("shared-log")["volumes"] if one["name"] == "vllm-log"
    ]
    assert limit == "128Mi"
    assert 2 * 2 * namespace["MAX_BYTES"] == 128 << 20


def test_the_api_sidecar_alone_has_a_token() -> None:
    """vLLM, which runs code of others, gets no token of the service account that may read logs."""
    pod = _sidecar("kubernetes-api")
    assert pod["automountServiceAccountToken"] is False
    assert "containers" not in pod
    mounts = {one["mountPath"]: one for one in own(pod)["volumeMounts"]}
    assert mounts["/var/run/secrets/kubernetes.io/serviceaccount"]["readOnly"] is True


def test_the_role_is_the_smallest() -> None:
    """Reading pods and logs, and creating Events; nothing in other namespaces."""
    text = (KUBERNETES / "kubernetes-api/rbac.yaml").read_text()
    role = load_yaml_all(text)[1]
    assert role["kind"] == "Role"
    assert [(one["resources"], one["verbs"]) for one in role["rules"]] == [
        (["pods", "pods/log"], ["get"]),
        (["events"], ["create"]),
    ]


def load_yaml_all(text: str) -> list[Spec]:
    """Every document of a YAML stream that is not empty."""
    import yaml

    return [one for one in yaml.safe_load_all(text) if one]


def test_the_node_agent_has_no_more_than_it_must() -> None:
    """Root, because of the files' mode, and the host's logs, read-only; everything else is as restricted."""
    pod = load_yaml(KUBERNETES / "node-agent/daemonset.yaml")["spec"]["template"]["spec"]
    container = own(pod)
    assert violations(pod, container) == {"volume hostPath", "runAsNonRoot", "runAsUser"}
    check_container(container)
    assert pod["automountServiceAccountToken"] is False
    assert [one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one] == ["/var/log/pods"]
    (logs,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/var/log/pods"]
    assert logs["readOnly"] is True
    labels = load_yaml(KUBERNETES / "node-agent/namespace.yaml")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"


SNIPPETS = {
    "vllm-chart.yaml": ("extraContainers",),
    "llm-d.yaml": ("decode", "initContainers"),
    "kserve.yaml": ("spec", "predictor", "initContainers"),
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_what_is_pasted_into_other_charts(name: str) -> None:
    """The container that users paste into values of others is as restricted as ours, and its options exist."""
    found = load_yaml(ROOT / "deploy/helm/snippets" / name)
    outer: Spec = {}
    for key in SNIPPETS[name]:
        outer, found = found, found[key]
    (container,) = found
    pod = {"volumes": outer.get("volumes", [])}
    assert violations(pod, container) == set()
    check_container(container)
    assert {one["name"] for one in container.get("volumeMounts", [])} == {
        one["name"] for one in pod["volumes"]
    }
    assert (container.get("restartPolicy") == "Always") == (SNIPPETS[name][-1] == "initContainers")


def test_every_snippet_is_tested() -> None:
    """No file lies there that the test above does not know."""
    assert {one.name for one in (ROOT / "deploy/helm/snippets").iterdir()} == SNIPPETS.keys()


def test_the_chart_ships_what_is_kept_elsewhere() -> None:
    """Rules, dashboards and the shell around vLLM are the same in the chart: ``python deploy/helm/copy_files.py`` copies them."""
    done = subprocess.run(
        [sys.executable, ROOT / "deploy/helm/copy_files.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_what_is_copied_is_not_nothing() -> None:
    """The copy knows the rules that are for Prometheus, and not Alertmanager's configuration."""
    names = {one.name for one in (ROOT / "deploy/helm/vllm-oom-exporter/files/rules").iterdir()}
    assert names == {"vllm-oom-alerts.yaml", "vllm-oom-recording.yaml"}


def test_versions_are_one() -> None:
    """Chart, application and image tags of the manifests are the version of the package."""
    from exporter import __version__

    chart = load_yaml(ROOT / "deploy/helm/vllm-oom-exporter/Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    for file in (*KUBERNETES.rglob("*.yaml"), ROOT / "deploy/compose/compose.yaml"):
        for line in file.read_text().splitlines():
            if f"/{NAME}:" in line and "image:" in line:
                assert line.endswith(f":{__version__}"), f"{file}: {line}"
