"""Values: bad ones are refused with the reason, others reach the services, and the pages list them."""

import re
from typing import Any

import pytest

from deploy.generate import generated
from eyas.config import DraftConfig, RouterConfig, VerifierConfig, load
from tests.deploy.charts import (
    CHART,
    RENDERINGS,
    VALUES,
    named,
    of_kind,
    rendered,
    run_helm,
    settings,
    template,
    write_values,
)
from tests.support.repository import name as path_name

KINDS = {"router": RouterConfig, "verifier": VerifierConfig, "draft": DraftConfig}

REFUSED = {
    "foo=1": "'foo' not allowed",
    "router.replica=2": "'replica' not allowed",
    "router.config.server.drain=3": "at '/router/config/server': additional properties 'drain' not allowed",
    "router.config.server.port=3": "'port' not allowed",
    "draft.config.registry.url=redis://elsewhere": "'url' not allowed",
    "verifier.config.engine.max_num_seqs=many": "at '/verifier/config/engine/max_num_seqs'",
    "model.dtype=int4": "at '/model/dtype'",
    "model.source.kind=s3": "at '/model/source/kind'",
    "draft.tree.num_draft_tokens=0": "at '/draft/tree/num_draft_tokens'",
    "draft.autoscaling.kind=both": "at '/draft/autoscaling/kind'",
    "security.runAsUser=0": "at '/security/runAsUser'",
    "router.resources.limits.cpu=null": "missing property 'cpu'",
    "model.source.kind=pvc": "set model.source.pvc.claimName",
    "model.source.kind=hostPath": "set model.source.hostPath.path",
    "redis.kind=external": "set redis.external.url",
    "redis.kind=none": "set discovery.kind to kubernetes",
    "redis.external.url=redis://user:secret@host": "set redis.external.existingSecret",
    "verifier.multiNode.enabled=true": "set verifier.tensorParallelSize",
    "verifier.autoscaling.kind=hpa": "set verifier.autoscaling.metrics",
    "draft.autoscaling.kind=keda": "set prometheus.address for the chart's own triggers, or draft.autoscaling.triggers",
    "router.autoscaling.kind=keda,prometheus.address=http://p:9090": "set router.autoscaling.triggers",
    "mode=ray,verifier.multiNode.enabled=true,verifier.tensorParallelSize=2": "needs mode plain",
    "router.autoscaling.kind=hpa,router.autoscaling.minReplicas=20": "minReplicas is above maxReplicas",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_bad_value_is_refused_with_its_reason(setting: str) -> None:
    result = run_helm("template", "demo", ".", "--set", setting)
    assert result.returncode != 0
    assert REFUSED[setting] in result.stderr


@pytest.mark.parametrize("name", [name for name in RENDERINGS if name != "ray"])
def test_services_take_the_files_that_the_chart_writes(name: str, tmp_path: Any) -> None:
    found = 0
    for item in of_kind(rendered(name), "ConfigMap"):
        for file, text in item["data"].items():
            if (service := file.removesuffix(".yaml")) in KINDS:
                (tmp_path / file).write_text(text)
                load(KINDS[service], tmp_path / file, ['registry.url="redis://host"', 'server.advertise_host="fd00::1"'])
                found += 1
    assert found >= 2


def test_a_service_takes_every_setting_that_its_config_may_hold(tmp_path: Any, monkeypatch: Any) -> None:
    """What the chart does not fill in, with another value than the default, reaches the file."""
    config = {"request_timeout_s": 77.5, "registry": {"ttl_s": 9}, "server": {"graceful_shutdown_timeout_s": 12}}
    values = write_values(tmp_path, {"router": {"config": config}})
    (text,) = named(template("--values", values), "ConfigMap", "demo-eyas-router")["data"].values()
    (tmp_path / "router.yaml").write_text(text)
    monkeypatch.setenv("REGISTRY_URL", "redis://:secret@host")
    loaded = load(RouterConfig, tmp_path / "router.yaml")
    assert loaded.registry.url == "redis://:secret@host"
    assert (loaded.request_timeout_s, loaded.registry.ttl_s, loaded.server.graceful_shutdown_timeout_s) == (77.5, 9, 12)
    assert loaded.server.shutdown_delay_s == 5, "what is not set keeps the chart's own value"


def test_a_service_that_has_its_config_changed_is_restarted(tmp_path: Any) -> None:
    def checksums(*arguments: str) -> dict[str, str]:
        objects = of_kind(template(*arguments), "Deployment", "StatefulSet")
        annotations = {o["metadata"]["name"]: o["spec"]["template"]["metadata"].get("annotations", {}) for o in objects}
        return {name: found.get("checksum/config", "") for name, found in annotations.items()}

    before, after = checksums(), checksums(*settings(["verifier.config.engine.max_num_seqs=3"]))
    assert {name for name in before if before[name] != after[name]} == {"demo-eyas-verifier"}


def test_every_setting_of_the_values_is_explained() -> None:
    """By a comment that begins with `--`, above it or above a block that holds it."""
    comment = ""
    levels: list[tuple[int, bool]] = []
    bare: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if found := re.match(r"( *)[\w.]+:(.*)", line):
            levels = [level for level in levels if level[0] < len(found[1])] + [(len(found[1]), "# --" in comment)]
            bare += [line] if found[2] and not any(explained for _, explained in levels) else []
        comment = comment + line if line.strip().startswith("#") else ""
    assert not bare


def test_generated_files_of_the_chart_are_fresh() -> None:
    stale = [path_name(file) for file, text in generated().items() if not file.exists() or file.read_text() != text]
    assert not stale, "run: make chart"


def test_the_page_lists_every_file_of_values() -> None:
    readme = (CHART / "README.md").read_text()
    assert not [file.name for file in VALUES if f"values/{file.name}" not in readme]


@pytest.mark.parametrize("secured", [False, True])
def test_the_notes_say_how_to_send_the_first_request(secured: bool) -> None:
    assignments = ["router.tls.existingSecret=router-tls", "router.apiKeys.existingSecret=keys"] if secured else []
    result = run_helm("install", "demo", ".", "--dry-run=client", "--namespace", "eyas", *settings(assignments))
    assert result.returncode == 0, result.stderr
    notes = result.stdout.partition("NOTES:")[2]
    assert "svc/demo-eyas-router 8000:8000" in notes
    assert ("https://127.0.0.1:8000/v1/completions" in notes) == secured
    assert ("Authorization: Bearer" in notes) == secured
    assert '"model": "llama-3.1-8b"' in notes


def test_extra_objects_are_templates(tmp_path: Any) -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}, "data": {}}
    objects = template("--values", write_values(tmp_path, {"extraObjects": [extra]}))
    assert named(objects, "ConfigMap", "demo-more")
