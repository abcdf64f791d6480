"""`python -m services.router --config FILE --set key=value`: the router as a process."""

from __future__ import annotations

from eyas.config import RouterConfig
from eyas.rpc.server import RpcServer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from services.lifecycle import main, serve
from services.router.access.calls import KeyInterceptor, server_credentials
from services.router.access.keys import load_keys
from services.router.core import router_core
from services.router.http.door import HttpDoor
from services.router.servicer import RouterServicer


async def run(config: RouterConfig) -> None:
    """Serve until told to stop."""
    keys = load_keys(config.keys)
    server = RpcServer(config.server, [KeyInterceptor(keys)], server_credentials(config.tls))
    async with router_core(config, keys, server) as core:
        add_GenerationServicer_to_server(RouterServicer(core.front), server.aio)
        door = HttpDoor(core.app, config.http, config.tls)
        name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
        await serve(server, [name], config.server, core.presence, [door])


if __name__ == "__main__":
    main(RouterConfig, run)
