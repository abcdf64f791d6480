"""The parts of a router put together: settings in, what all doors share out. Knows no sockets of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.channel import Peers
from eyas.services.discovery.build import build_discovery, session_registry
from eyas.services.router.api_keys import ApiKeys
from eyas.services.router.dispatcher import Dispatcher
from eyas.services.router.generation import GenerationService
from eyas.services.router.http.app import build_app
from eyas.services.router.http.chat_template import load_template
from eyas.services.router.registration import Health, RouterRegistration
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.router.workers import SessionMap, WorkerPool
from eyas.telemetry.setup import telemetry
from eyas.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RouterApp:
    """A router without its sockets. app: the HTTP door's paths. Nothing is served before the presence has entered."""

    front: GenerationService
    app: FastAPI
    presence: RouterRegistration


@asynccontextmanager
async def build_router(config: RouterConfig, keys: ApiKeys, health: Health) -> AsyncIterator[RouterApp]:
    """What the doors of a router share, until the end. keys: of those who may ask. health: told whether a verifier can be
    reached.

    Raises ConfigError for settings that name no model, or what cannot be read.
    """
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    tokenizers = {model.name: load_tokenizer(model.tokenizer) for model in config.models}
    templates = {model.name: load_template(model) for model in config.models}
    with telemetry(config.telemetry, "router") as own:
        observer, registry = RouterTelemetry(own), session_registry(config.discovery, config.registry)
        peers = Peers(config.peers)
        discovery = build_discovery(config.discovery, registry, peers)
        workers = WorkerPool(discovery, config.routing, config.outlier_detection, config.server.zone, peers)
        observer.watch(discovery.known)
        relay = Dispatcher(workers, SessionMap(registry), config.stall_timeout_s, observer)
        front = GenerationService(tokenizers, workers, relay, config.request_timeout_s, observer)
        presence = RouterRegistration(health, discovery, workers, config.registry.heartbeat_interval_s / 4, registry)
        try:
            yield RouterApp(front, build_app(front, templates, presence, keys, observer), presence)
        finally:
            await workers.close()
            await discovery.close()
            if registry:
                await registry.close()
