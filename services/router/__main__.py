"""`python -m eyas.services.router --config FILE --set key=value`: the router as a process."""

from __future__ import annotations

from eyas.config import RouterConfig
from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import serve, service_app
from eyas.services.router.api_keys import load_keys
from eyas.services.router.app import build_router
from eyas.services.router.grpc_server import ApiKeyInterceptor, RouterServicer, server_credentials
from eyas.services.router.http.server import HttpServer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server


async def run(config: RouterConfig) -> None:
    """Serve until told to stop."""
    keys = load_keys(config.api_keys)
    server = RpcServer(config.server, [ApiKeyInterceptor(keys)], server_credentials(config.tls))
    async with build_router(config, keys, server) as core:
        add_GenerationServicer_to_server(RouterServicer(core.front), server.aio)
        door = HttpServer(core.app, config.http, config.tls)
        name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
        await serve(server, [name], config.server, core.presence, [door])


app = service_app(RouterConfig, run)

if __name__ == "__main__":
    app()
