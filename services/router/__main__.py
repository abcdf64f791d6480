"""Run a router as a process: `python -m eyas.services.router --config FILE --set key=value`."""

from __future__ import annotations

from eyas.config import RouterConfig
from eyas.rpc.server import RpcServer
from eyas.services.lifecycle import serve, service_app
from eyas.services.router.app import build_router
from eyas.services.router.auth import ApiKeyInterceptor, load_api_keys
from eyas.services.router.grpc_server import RouterServicer, server_credentials
from eyas.services.router.http.server import HttpServer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server


async def run(config: RouterConfig) -> None:
    """Serve until the process is stopped."""
    keys = load_api_keys(config.api_keys)
    server = RpcServer(config.server, [ApiKeyInterceptor(keys)], server_credentials(config.tls))
    async with build_router(config, keys, server) as router:
        add_GenerationServicer_to_server(RouterServicer(router.service), server.aio)
        name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
        await serve(server, [name], config.server, router.readiness, [HttpServer(router.http, config.http, config.tls)])


app = service_app(RouterConfig, run)

if __name__ == "__main__":
    app()
