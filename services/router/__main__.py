"""Run a router as a process: `python -m eyas.services.router --config FILE --set key=value`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import FastAPI

from eyas.config import RouterConfig, TlsConfig
from eyas.errors import ConfigError
from eyas.rpc.admission import Admission, fit_descriptors
from eyas.rpc.channel import Peers
from eyas.rpc.server import GENERATION_SERVICE, RpcServer
from eyas.services.discovery.probing import build_discovery
from eyas.services.discovery.redis_registry import session_registry
from eyas.services.lifecycle import ProcessRunner, serve, service_app
from eyas.services.router.auth.keys import ApiKeys, load_api_keys
from eyas.services.router.dispatch.dispatcher import Dispatcher, SessionMap
from eyas.services.router.dispatch.generation import GenerationService
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.grpc_server import RouterServicer, server_credentials
from eyas.services.router.http.app import build_app, build_operations_app
from eyas.services.router.http.server import HttpServer
from eyas.services.router.models import load_model
from eyas.services.router.telemetry import RouterTelemetry
from eyas.telemetry.exporters import telemetry
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server


@dataclass(frozen=True)
class RouterApp:
    """A router without its sockets. It serves requests after `readiness.register`.

    Attributes:
        http, operations: the HTTP applications of clients and of the operations port.
        end_calls: see GenerationService.
    """

    grpc: RouterServicer
    http: FastAPI
    operations: FastAPI
    readiness: ReadinessMonitor
    end_calls: Callable[[], None]


@asynccontextmanager
async def build_router(
    config: RouterConfig, set_serving: Callable[..., Awaitable[None]], keys: ApiKeys, admission: Admission
) -> AsyncIterator[RouterApp]:
    """Build a router, and close what it opened at the end.

    Raises ConfigError if the settings name no model, or files that cannot be read.

    Args:
        set_serving: see ReadinessMonitor.
        admission: the bounds that both servers share.
    """
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    models = list(map(load_model, config.models))
    with telemetry(config.telemetry, "router") as exporters:
        traces, peers = RouterTelemetry(exporters), Peers(config.peers)
        registry = session_registry(config.discovery, config.registry, peers)
        discovery = build_discovery(config.discovery, registry, peers)
        traces.watch(discovery.known)
        workers = WorkerPool(discovery, config, peers)
        dispatcher = Dispatcher(workers, SessionMap(registry), config.stall_timeout_s, traces, config.retry)
        service = GenerationService(models, workers, dispatcher, config.request_timeout_s, traces)
        interval_s = config.registry.heartbeat_interval_s / 4
        needs_verifier = not config.ready_without_verifiers
        readiness = ReadinessMonitor(set_serving, discovery, workers, interval_s, registry, needs_verifier)
        try:
            http = build_app(service, readiness, keys, traces, config.http, admission)
            operations = build_operations_app(readiness, http)
            yield RouterApp(RouterServicer(service, keys), http, operations, readiness, service.end_calls)
        finally:
            service.threads.close()
            await workers.close()
            await discovery.close()
            if registry:
                await registry.close()


async def run(config: RouterConfig) -> None:
    """Serve until the process is stopped."""
    keys = load_api_keys(config.api_keys)
    limits = fit_descriptors(config.limits, num_servers=2 + (config.http.operations_port is not None))
    admission = Admission(limits, has_keys=bool(config.api_keys.env or config.api_keys.file))
    server = RpcServer(config.server, server_credentials(config.tls), keys.access, admission=admission)
    async with build_router(config, server.set_serving, keys, admission) as router:
        add_GenerationServicer_to_server(router.grpc, server.aio)
        listeners = [HttpServer(router.http, config.http, config.tls, limits)]
        if config.http.operations_port is not None:
            own = replace(config.http, host=config.http.operations_host, port=config.http.operations_port)
            listeners.append(HttpServer(router.operations, own, TlsConfig(), limits))

        def end_calls() -> None:
            router.end_calls()
            for listener in listeners:
                listener.end_requests()

        runner = ProcessRunner(config.stuck_loop_exit_timeout_s)
        await serve(server, [GENERATION_SERVICE], config.server, router.readiness, listeners, runner, end_calls)


app = service_app(RouterConfig, run)

if __name__ == "__main__":
    app()
