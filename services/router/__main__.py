"""`python -m services.router --config FILE --set key=value`: the router as a process."""

from __future__ import annotations

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.server import RpcServer
from eyas.text import load_tokenizer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from services.discovery.build import build_discovery, session_registry
from services.lifecycle import main, serve
from services.router.fleet.memory import Sessions
from services.router.presence import RouterPresence
from services.router.relay import Relay
from services.router.servicer import RouterServicer
from services.router.workers import Workers


async def run(config: RouterConfig) -> None:
    """Serve until told to stop."""
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    tokenizers = {model.name: load_tokenizer(model.tokenizer) for model in config.models}
    server, registry = RpcServer(config.server), session_registry(config.discovery, config.registry)
    discovery = build_discovery(config.discovery, registry)
    workers = Workers(discovery, config.placement, config.ejection, config.server.zone)
    relay = Relay(workers, Sessions(registry), config.stall_timeout)
    servicer = RouterServicer(tokenizers, workers, relay, config.request_timeout)
    add_GenerationServicer_to_server(servicer, server.aio)
    presence = RouterPresence(server, discovery, workers, config.registry.heartbeat / 4, registry)
    name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    try:
        await serve(server, [name], config.server, presence)
    finally:
        await workers.close()
        await discovery.close()
        if registry:
            await registry.close()


if __name__ == "__main__":
    main(RouterConfig, run)
