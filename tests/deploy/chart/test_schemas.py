"""Every object fits the API schema of every Kubernetes version that the chart supports."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils
from kubernetes_validate.utils import all_versions
from packaging.version import Version

from tests.deploy.charts import CHART, RENDERINGS, VALUES, rendered, run_helm
from tests.support.repository import ROOT

OLDEST = "1.32"
KNOWN = {version.rpartition(".")[0] for version in all_versions()}
VERSIONS = sorted((version for version in KNOWN if Version(version) >= Version(OLDEST)), key=Version)

# Custom resources; their schemas are in definitions.yaml.
DEFINITIONS = yaml.safe_load((ROOT / "tests" / "deploy" / "chart" / "definitions.yaml").read_text())


def unique(names: list[str]) -> list[dict[str, Any]]:
    """The objects of these renderings, each once."""
    objects = [item for name in names for item in rendered(name)]
    return [json.loads(text) for text in dict.fromkeys(json.dumps(item, sort_keys=True) for item in objects)]


def test_the_chart_supports_the_versions_that_are_checked() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"
    assert len(VERSIONS) >= 4


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The schemas of all objects of a version, which are read again for each object else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_what_kubernetes_takes(version: str) -> None:
    """All renderings in the newest version; the values files in older ones."""
    names = RENDERINGS if version == VERSIONS[-1] else [file.stem for file in VALUES]
    checked = [item for item in unique(names) if item["kind"] not in DEFINITIONS]
    assert len(checked) > 30
    for item in checked:
        kubernetes_validate.validate(item, version, strict=True)


def test_objects_of_other_apis_are_what_those_take() -> None:
    seen = set()
    for item in unique(RENDERINGS):
        if schema := DEFINITIONS.get(item["kind"]):
            jsonschema.validate(item, {**schema, "$defs": DEFINITIONS["$defs"]})
            seen.add(item["kind"])
    assert seen == set(DEFINITIONS) - {"$defs"}


def test_the_chart_passes_lint_with_every_file_of_values() -> None:
    for values in ([], *(["--values", str(file)] for file in VALUES)):
        result = run_helm("lint", "--strict", ".", *values)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own
def test_ray_serve_takes_the_application_of_the_ray_service() -> None:
    from ray.serve.schema import ServeDeploySchema

    from eyas.services.ray.config import read

    (service,) = [item for item in rendered("ray") if item["kind"] == "RayService"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "eyas.services.ray.app:build"
    settings = read(application.args)
    assert settings.environment.registry_url == "REGISTRY_URL"
    assert settings.pools.verifier.resources == {"verifier": 1}
    assert config.grpc_options.grpc_servicer_functions == ["eyas.services.ray.ingress.add_generation"]
    assert config.grpc_options.port == 50050
