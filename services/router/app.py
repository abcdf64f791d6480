"""Build a router from its settings: everything but the sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.channel import Peers
from eyas.services.discovery.build import build_discovery, session_registry
from eyas.services.router.auth import ApiKeys
from eyas.services.router.dispatcher import Dispatcher, SessionMap
from eyas.services.router.generation import GenerationService
from eyas.services.router.http.app import build_app
from eyas.services.router.http.chat_template import load_template
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.router.workers import HealthReporter, ReadinessMonitor, WorkerPool
from eyas.telemetry.exporters import telemetry
from eyas.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RouterApp:
    """A router without its sockets. It serves requests after `readiness.register`. http: the HTTP application."""

    service: GenerationService
    http: FastAPI
    readiness: ReadinessMonitor


@asynccontextmanager
async def build_router(config: RouterConfig, keys: ApiKeys, health: HealthReporter) -> AsyncIterator[RouterApp]:
    """Build a router, and close what it opened at the end. health: reports whether a verifier is reachable.

    Raises ConfigError if the settings name no model, or files that cannot be read.
    """
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    tokenizers = {model.name: load_tokenizer(model.tokenizer) for model in config.models}
    templates = {model.name: load_template(model) for model in config.models}
    with telemetry(config.telemetry, "router") as exporters:
        traces, registry = RouterTelemetry(exporters), session_registry(config.discovery, config.registry)
        peers = Peers(config.peers)
        discovery = build_discovery(config.discovery, registry, peers)
        traces.watch(discovery.known)
        workers = WorkerPool(discovery, config.routing, config.outlier_detection, config.server.zone, peers)
        dispatcher = Dispatcher(workers, SessionMap(registry), config.stall_timeout_s, traces)
        service = GenerationService(tokenizers, workers, dispatcher, config.request_timeout_s, traces)
        readiness = ReadinessMonitor(health, discovery, workers, config.registry.heartbeat_interval_s / 4, registry)
        try:
            yield RouterApp(service, build_app(service, templates, readiness, keys, traces), readiness)
        finally:
            await workers.close()
            await discovery.close()
            if registry:
                await registry.close()
