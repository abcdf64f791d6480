"""The parts of a router put together: settings in, what all doors share out. Knows no sockets of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.peers import Peers
from eyas.telemetry.process import telemetry
from eyas.text import load_tokenizer
from services.discovery.build import build_discovery, session_registry
from services.router.access.keys import Keys
from services.router.fleet.memory import Sessions
from services.router.front import Front
from services.router.http.app import build_app
from services.router.http.chat import load_template
from services.router.presence import Health, RouterPresence
from services.router.relay import Relay
from services.router.telemetry.observer import RouterTelemetry
from services.router.workers import Workers


@dataclass(frozen=True)
class Core:
    """A router without its sockets. app: the HTTP door's paths. Nothing is served before the presence has entered."""

    front: Front
    app: FastAPI
    presence: RouterPresence


@asynccontextmanager
async def router_core(config: RouterConfig, keys: Keys, health: Health) -> AsyncIterator[Core]:
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
        workers = Workers(discovery, config.placement, config.ejection, config.server.zone, peers)
        observer.watch(discovery.known)
        relay = Relay(workers, Sessions(registry), config.stall_timeout, observer)
        front = Front(tokenizers, workers, relay, config.request_timeout, observer)
        presence = RouterPresence(health, discovery, workers, config.registry.heartbeat / 4, registry)
        try:
            yield Core(front, build_app(front, templates, presence, keys, observer), presence)
        finally:
            await workers.close()
            await discovery.close()
            if registry:
                await registry.close()
