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
from services.router.access.calls import KeyInterceptor, server_credentials
from services.router.access.keys import load_keys
from services.router.front import Front
from services.router.http.app import build_app
from services.router.http.chat import ChatTemplate, load_template
from services.router.http.door import HttpDoor
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
    templates = {model.name: load_template(model) for model in config.models}
    with telemetry(config.telemetry, "router") as own:
        await _serve(config, tokenizers, templates, RouterTelemetry(own))


async def _serve(
    config: RouterConfig,
    tokenizers: Mapping[str, TokenText],
    templates: Mapping[str, ChatTemplate | None],
    telemetry: RouterTelemetry,
) -> None:
    keys = load_keys(config.keys)
    server = RpcServer(config.server, [KeyInterceptor(keys)], server_credentials(config.tls))
    registry = Registry(config.registry)
    workers = Workers(registry, suspicion=config.registry.ttl)
    telemetry.watch(registry.known)
    relay = Relay(workers, registry, config.stall_timeout, telemetry)
    front = Front(tokenizers, workers, relay, config.request_timeout, telemetry)
    add_GenerationServicer_to_server(RouterServicer(front), server.aio)
    presence = RouterPresence(server, registry, workers, config.registry.heartbeat / 4)
    door = HttpDoor(build_app(front, templates, presence, keys), config.http, config.tls)
    name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    try:
        await serve(server, [name], config.server, presence, [door])
    finally:
        await workers.close()
        await registry.close()


if __name__ == "__main__":
    main(RouterConfig, run)
