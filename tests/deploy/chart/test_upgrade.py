"""An upgrade changes no immutable field, and an upgrade of the chart alone restarts nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    VALUES,
    Object,
    SafeLoader,
    arguments,
    named,
    of_kind,
    pod_templates,
    run_helm,
    settings,
    template,
)

CHANGES = (
    "image.tag=next", "router.replicas=5", "verifier.replicas=3", "draft.replicas=4", "commonLabels.team=b",
    "verifier.config.engine.max_num_seqs=8", "verifier.podLabels.colour=blue", "router.service.type=LoadBalancer",
    "draft.tree.num_draft_tokens=4", "verifier.preStopSeconds=9", "redis.image.tag=next", "prometheusRule.enabled=false",
    "verifier.resources.limits.memory=3Gi", "verifier.probes.startupFailureThreshold=99",
)  # fmt: skip


def immutable(item: Object) -> Any:
    """The part of an object that the API server refuses to change."""
    spec = item.get("spec", {})
    match item["kind"]:
        case "Deployment":
            return spec["selector"]
        case "StatefulSet":
            changeable = {
                "replicas",
                "template",
                "updateStrategy",
                "minReadySeconds",
                "persistentVolumeClaimRetentionPolicy",
            }
            return {key: value for key, value in spec.items() if key not in changeable}
        case "Service":
            return spec.get("clusterIP")
        case "LeaderWorkerSet":
            return spec["leaderWorkerTemplate"]["size"]
        case "RoleBinding":
            return item["roleRef"]
        case "Secret":
            return item.get("type")
        case "ConfigMap":
            return item.get("immutable", False)
    return None


def parts(objects: list[Object]) -> dict[tuple[str, str], Any]:
    return {(item["kind"], item["metadata"]["name"]): immutable(item) for item in objects}


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """The same chart as a later release of itself."""
    for file in CHART.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(CHART)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.read_text().replace("ersion: 0.1.0", "ersion: 9.9.9"))
    return tmp_path


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_an_upgrade_keeps_immutable_fields(values: Path, next_chart: Path) -> None:
    before = parts(template("--values", str(values)))
    after = parts(template("--values", str(values), *settings(CHANGES)))
    later = parts(render_from(next_chart, "--values", str(values)))
    for other in (after, later):
        assert {key: other[key] for key in before if key in other} == {key: before[key] for key in before if key in other}
        assert {key[1] for key in before if key[0] != "PrometheusRule"} <= {key[1] for key in other}


@pytest.mark.parametrize("name", ["defaults", "70b-tp4-multinode", "kubernetes discovery, no redis", "ray"])
def test_a_new_chart_with_the_same_image_restarts_no_pod(name: str, next_chart: Path) -> None:
    chosen = [*arguments(name), "--set", "image.tag=0.1.0"]
    before, after = template(*chosen), render_from(next_chart, *chosen)
    assert dict(pod_templates(before)) == dict(pod_templates(after))
    clusters = [[item["spec"] for item in of_kind(objects, "RayService")] for objects in (before, after)]
    assert clusters[0] == clusters[1], "KubeRay starts another cluster for another spec"


def test_an_upgrade_keeps_both_tokens_of_a_rotation(next_chart: Path) -> None:
    template_file, both = next_chart / "templates" / "token.yaml", "a" * 32 + "\n" + "b" * 32
    found = '(lookup "v1" "Secret" .Release.Namespace (include "eyas.name" $place)).data'
    text = template_file.read_text()
    assert found in text
    template_file.write_text(text.replace(found, f'(dict "token" (b64enc {json.dumps(both)}))'))
    assert named(render_from(next_chart), "Secret", "demo-eyas-token")["stringData"] == {"token": both}


def render_from(chart: Path, *arguments: str) -> list[Object]:
    result = run_helm("template", "demo", str(chart), "--namespace", "eyas", *arguments)
    assert result.returncode == 0, result.stderr
    return [item for item in yaml.load_all(result.stdout, SafeLoader) if item]


def test_versions_stand_in_no_selector() -> None:
    for item in of_kind(template(), "Deployment", "StatefulSet", "Service"):
        selector = item["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & set(labels)
