"""`python -m services.router --config FILE --set key=value`: the router as a process."""

from __future__ import annotations

from collections.abc import Mapping

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.server import RpcServer
from eyas.telemetry.process import telemetry
from eyas.text import TokenText, load_tokenizer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from services.lifecycle import main, serve
from services.registry import Registry
from services.router.presence import RouterPresence
from services.router.relay import Relay
from services.router.servicer import RouterServicer
from services.router.telemetry.observer import RouterTelemetry
from services.router.workers import Workers


async def run(config: RouterConfig) -> None:
    """Serve until told to stop."""
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    tokenizers = {model.name: load_tokenizer(model.tokenizer) for model in config.models}
    with telemetry(config.telemetry, "router") as own:
        await _serve(config, tokenizers, RouterTelemetry(own))


async def _serve(config: RouterConfig, tokenizers: Mapping[str, TokenText], telemetry: RouterTelemetry) -> None:
    server, registry = RpcServer(config.server), Registry(config.registry)
    workers = Workers(registry, suspicion=config.registry.ttl)
    telemetry.watch(registry.known)
    relay = Relay(workers, registry, config.stall_timeout, telemetry)
    servicer = RouterServicer(tokenizers, workers, relay, config.request_timeout, telemetry)
    add_GenerationServicer_to_server(servicer, server.aio)
    name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    try:
        await serve(server, [name], config.server, RouterPresence(server, registry, workers, config.registry.heartbeat / 4))
    finally:
        await workers.close()
        await registry.close()


if __name__ == "__main__":
    main(RouterConfig, run)
