"""What an application's args may be: the services' own settings and pools, checked before anything starts."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.config import ServerConfig, TelemetryConfig
from eyas.errors import ConfigError
from eyas.services.ray.config import EnvironmentConfig, PoolConfig, graceful_shutdown_timeout_s, num_gpus, on_node, read

CONFIGS = Path(__file__).parents[3] / "examples" / "configs" / "ray"


def args(file: str = "demo.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONFIGS / file).read_text())["applications"][0]["args"]
    return copy.deepcopy(found)


@pytest.mark.parametrize("file", [path.name for path in sorted(CONFIGS.glob("*.yaml"))])
def test_example_configs_parse_for_ray_serve(file: str) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray: pip install -e '.[ray]'")
    config = read(args(file))
    assert config.draft is not None
    assert (
        [model.name for model in config.router.models]
        == [config.verifier.served_model_name]
        == [config.draft.served_model_name]
    )
    assert (config.verifier.draft_model, config.verifier.tree) == (config.draft.draft_model, config.draft.tree)
    assert config.router.registry == config.verifier.registry == config.draft.registry
    deployed = schema.ServeDeploySchema(**yaml.safe_load((CONFIGS / file).read_text()))
    assert [application.import_path for application in deployed.applications] == ["eyas.services.ray.app:build"]
    assert deployed.grpc_options.grpc_servicer_functions == ["eyas.services.ray.ingress.add_generation"]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("verifier", None, "no settings for the verifier"),
        ("router", "fast", "no settings for the router"),
        ("verifier.modl", "x", "verifier.modl; did you mean verifier.model"),
        ("pools.drafts", {}, "pools.drafts; did you mean pools.draft"),
        ("pools.verifier.max_replicas", 0, "max_replicas is 0"),
        ("pools.draft.scaling", {"low": 0.9}, "low 0.9"),
        ("pools.draft.max_late_ratio", 0, "max_late_ratio is 0"),
        ("router.tls", {"cert_file": "a", "key_file": "b"}, "router.tls has no effect on Ray"),
    ],
)
def test_unsupported_settings_are_refused_with_a_reason(place: str, value: object, reason: str) -> None:
    settings = args()
    *parents, last = place.split(".")
    group = settings
    for parent in parents:
        group = group.setdefault(parent, {})
    group[last] = value
    with pytest.raises(ConfigError, match=reason):
        read(settings)


def test_without_a_draft_block_there_are_no_drafters() -> None:
    settings = args()
    del settings["draft"], settings["pools"]["draft"]
    assert read(settings).draft is None


def test_replicas_listen_on_free_ports_of_their_node() -> None:
    server = ServerConfig("0.0.0.0", 50051, "elsewhere", shutdown_delay_s=2.5, graceful_shutdown_timeout_s=20)
    config = replace(read(args()).verifier, server=server, telemetry=TelemetryConfig(metrics_port=9100))
    here = on_node(config, EnvironmentConfig(), "10.0.0.7", {})
    assert here.server == ServerConfig("10.0.0.7", 0, "", 2.5, 20)
    assert (here.telemetry.metrics_port, here.registry) == (0, config.registry)
    names, variables = EnvironmentConfig("REGISTRY_URL", "ZONE"), {"REGISTRY_URL": "redis://kept:1/0", "ZONE": "a"}
    here = on_node(replace(config, telemetry=TelemetryConfig()), names, "10.0.0.7", variables)
    assert (here.registry.url, here.server.zone, here.telemetry.metrics_port) == ("redis://kept:1/0", "a", None)
    with pytest.raises(ConfigError, match="ZONE, which is not set on the node"):
        on_node(config, names, "10.0.0.7", {"REGISTRY_URL": "redis://kept:1/0"})
    assert graceful_shutdown_timeout_s(server) > 22.5


def test_a_pool_takes_the_gpus_that_its_service_needs() -> None:
    assert num_gpus(PoolConfig(), "cuda", 4) == 4
    assert num_gpus(PoolConfig(num_gpus=0.5), "cuda") == 0.5
    assert num_gpus(PoolConfig(), "cpu") == 0
