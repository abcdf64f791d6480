"""`python -m services.router --config FILE --set key=value`: the router as a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from eyas.config import RouterConfig
from eyas.errors import ConfigError
from eyas.rpc.server import RpcServer
from eyas.text import load_tokenizer
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from services.lifecycle import main, serve
from services.registry import Registry
from services.router.relay import Relay
from services.router.servicer import RouterServicer
from services.router.workers import Workers


@dataclass
class RouterPresence:
    """SERVING while at least one verifier can be reached; looks every `interval` seconds."""

    server: RpcServer
    registry: Registry
    workers: Workers
    interval: float
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def enter(self, address: str) -> None:
        """Begin to watch the registry and the verifiers."""
        await self.registry.watch("verifier", "draft")
        self._task = asyncio.create_task(self._follow(), name="readiness")

    async def leave(self) -> None:
        """Answer NOT_SERVING whatever the verifiers do; running requests go on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.server.set_serving(False)

    async def _follow(self) -> None:
        while True:
            await self.server.set_serving(await self.workers.refresh())
            await asyncio.sleep(self.interval)


async def run(config: RouterConfig) -> None:
    """Serve until told to stop."""
    if not config.models:
        raise ConfigError("models is empty; name at least one model and its tokenizer")
    tokenizers = {model.name: load_tokenizer(model.tokenizer) for model in config.models}
    server, registry = RpcServer(config.server), Registry(config.registry)
    workers = Workers(registry, suspicion=config.registry.ttl)
    relay = Relay(workers, registry, config.stall_timeout)
    servicer = RouterServicer(tokenizers, workers, relay, config.request_timeout)
    add_GenerationServicer_to_server(servicer, server.aio)
    name = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    try:
        await serve(server, [name], config.server, RouterPresence(server, registry, workers, config.registry.heartbeat / 4))
    finally:
        await workers.close()
        await registry.close()


if __name__ == "__main__":
    main(RouterConfig, run)
