"""The example configs are what the services take, can be bound, and the parts of each cluster fit together."""

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI

from eyas.config import DraftConfig, RegistryConfig, RouterConfig, ServerConfig, VerifierConfig, load
from eyas.errors import ConfigError
from eyas.rpc.messages import Load, ModelInfo
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.router.http.server import HttpServer

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


@pytest.mark.parametrize("place", ["local", "gpu"])
def test_the_services_of_a_cluster_agree(place: str) -> None:
    router = load(RouterConfig, CONFIGS / place / "router.yaml")
    verifier = load(VerifierConfig, CONFIGS / place / "verifier.yaml")
    draft = load(DraftConfig, CONFIGS / place / "draft.yaml")
    assert [model.name for model in router.models] == [verifier.served_model_name] == [draft.served_model_name]
    assert (verifier.model, verifier.draft_model, verifier.tree) == (draft.model, draft.draft_model, draft.tree)
    assert router.registry == verifier.registry == draft.registry


async def enter(config: ServerConfig) -> None:
    """Listen as in `config`, on a free port, and register as a worker without Redis."""
    server, registry = RpcServer(replace(config, port=0)), Registry(RegistryConfig("redis://127.0.0.1:1/0"))
    registration = WorkerRegistration(server, registry, AnnouncedWorker("verifier", ModelInfo("m", "f", 1, 1), Load))
    try:
        await registration.register(await server.start([]))
    finally:
        await registration.deregister()
        await server.stop(0)


@pytest.mark.parametrize("place", ["local", "gpu"])
@pytest.mark.parametrize(("role", "kind"), [("verifier", VerifierConfig), ("draft", DraftConfig)])
async def test_the_example_worker_config_can_listen_and_be_found(place: str, role: str, kind: type) -> None:
    await enter(load(kind, CONFIGS / place / f"{role}.yaml").server)


@pytest.mark.parametrize("place", ["local", "gpu"])
async def test_the_example_router_config_can_listen(place: str) -> None:
    config = load(RouterConfig, CONFIGS / place / "router.yaml")
    server = RpcServer(replace(config.server, port=0))
    await server.start([])
    await server.stop(0)
    listener = HttpServer(FastAPI(), replace(config.http, port=0), config.tls)
    await listener.start()
    await listener.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
async def test_an_unreachable_worker_is_not_registered(host: str) -> None:
    with pytest.raises(ConfigError, match=r"set server\.advertise"):
        await enter(ServerConfig(host=host))


def test_every_example_is_tested() -> None:
    files = [file for file in CONFIGS.rglob("*.yaml") if file.parent.name != "ray"]  # tests/services/ray has those
    assert sorted(file.stem for file in files) == sorted(["router", "verifier", "draft"] * 2)
