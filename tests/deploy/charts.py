"""The chart as helm renders it."""

import functools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.binaries import helm
from tests.support.repository import ROOT

Object = dict[str, Any]
# The quick one, where PyYAML is built with it.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

CHART = ROOT / "deploy" / "helm"
VALUES = sorted((CHART / "values").glob("*.yaml"))

SECURED = ("router.tls.existingSecret=router-tls", "router.apiKeys.existingSecret=keys")
ENCRYPTED = ("peers.tls.existingSecret=peers", "peers.tls.serverName=on")  # a name that YAML takes for true
SCALED = (
    "verifier.autoscaling.kind=keda",
    "draft.autoscaling.kind=keda",
    "draft.autoscaling.maxReplicas=8",
    "prometheus.address=http://prometheus:9090",
)
MONITORED = ("serviceMonitor.enabled=true", "prometheusRule.enabled=true", "dashboards.enabled=true")

# Every branch of the templates is in one of these.
SETTINGS: Mapping[str, Sequence[str]] = {
    "defaults": (),
    "kubernetes discovery, no redis": ("discovery.kind=kubernetes", "redis.kind=none", *SECURED, *ENCRYPTED, *SCALED),
    "external redis by secret": (
        "redis.kind=external", "redis.external.existingSecret=redis", "router.autoscaling.kind=hpa",
    ),
    "external redis by url": (
        "redis.kind=external", "redis.external.url=redis://cache:6379/1", "draft.enabled=false",
        "peers.token.existingSecret=token", "peers.token.key=shared",
    ),
    "host path": (
        "model.source.kind=hostPath", "model.source.hostPath.path=/data",
        "verifier.tensorParallelSize=4", "commonLabels.team=a",
        "telemetry.otlpEndpoint=http://otel:4317", "networkPolicy.scrapers[0].podSelector.matchLabels.app=prometheus",
    ),
    "open": (
        "networkPolicy.enabled=false", "redis.auth.existingSecret=redis", "router.serviceAccount.create=false",
        "peers.token.enabled=false",
    ),
    "ray": (
        "mode=ray", "ray.gcsFaultTolerance.redisAddress=redis:6379", "ray.gcsFaultTolerance.passwordSecret=ray",
        "router.service.annotations.team=a",
    ),
    "monitored": MONITORED,
}  # fmt: skip
RENDERINGS = [*(file.stem for file in VALUES), *SETTINGS]


# What KubeRay adds to a pod whose Serve proxy is well.
KUBERAY_LABELS = {"ray.io/serve": "true"}


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm()), *arguments], cwd=CHART, capture_output=True, text=True, check=False)


def template(*arguments: str) -> list[Object]:
    """Output of `helm template`. Raises AssertionError with helm's message."""
    result = run_helm("template", "demo", ".", "--namespace", "eyas", *arguments)
    assert result.returncode == 0, result.stderr
    return [item for item in yaml.load_all(result.stdout, SafeLoader) if item]


def settings(assignments: Sequence[str]) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def arguments(name: str) -> list[str]:
    """The arguments of helm for one of RENDERINGS."""
    if name in SETTINGS:
        return settings(SETTINGS[name])
    return ["--values", str(CHART / "values" / f"{name}.yaml")]


@functools.cache
def rendered(name: str) -> tuple[Object, ...]:
    """The objects of one of RENDERINGS."""
    return tuple(template(*arguments(name)))


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def pod_templates(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod template with a name for messages."""
    for item in objects:
        name, spec = f"{item['kind']} {item['metadata']['name']}", item.get("spec", {})
        match item["kind"]:
            case "Deployment" | "StatefulSet":
                yield name, spec["template"]
            case "LeaderWorkerSet":
                yield f"{name} leader", spec["leaderWorkerTemplate"]["leaderTemplate"]
                yield f"{name} worker", spec["leaderWorkerTemplate"]["workerTemplate"]
            case "RayService":
                cluster = spec["rayClusterConfig"]
                for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                    labels = group["template"]["metadata"]["labels"] | KUBERAY_LABELS
                    yield f"{name} {group.get('groupName', 'head')}", group["template"] | {"metadata": {"labels": labels}}


def containers(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    for name, pod in pod_templates(objects):
        for container in pod["spec"]["containers"]:
            yield f"{name}: {container['name']}", container


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches these labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def write_values(folder: Path, values: Mapping[str, Any]) -> str:
    """A values file for helm."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    return str(file)


def configs(name: str) -> dict[str, Any]:
    """The settings of the services by file name; under Ray those in the arguments of the application."""
    objects = rendered(name)
    for item in of_kind(objects, "RayService"):
        (application,) = yaml.safe_load(item["spec"]["serveConfigV2"])["applications"]
        return {f"{service}.yaml": application["args"][service] for service in ("router", "verifier", "draft")}
    maps = [item["data"] for item in of_kind(objects, "ConfigMap")]
    return {file: yaml.safe_load(text) for data in maps for file, text in data.items() if file.endswith(".yaml")}
