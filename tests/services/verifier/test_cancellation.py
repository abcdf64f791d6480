"""A client that leaves the router ends its request in a verifier's engine within one step."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.config import EngineConfig, RegistryConfig, ServerConfig, TreeConfig
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.models.loading import load_target
from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto
from eyas.rpc.messages import GenerateCall
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.verifier.servicer import GenerationServicer, announced_load
from eyas.v1 import generation_pb2_grpc
from tests.support.services.scripted_verifier import DEMO, LEASE_S, MODEL, router, until

CALL = GenerateCall(Request("r", (0, 282, 659, 276), SamplingParams(900, temperature=0.0, ignore_eos=True)))


class Watched(GenerationServicer):
    """Records when a call has left the service, however it ended."""

    def __init__(self, loop: AsyncEngine, left: threading.Event) -> None:
        super().__init__(loop, MODEL, None)
        self._left = left

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        try:
            await super().Generate(request, context)
        finally:
            self._left.set()


@asynccontextmanager
async def verifier(url: str, engine: Engine, left: threading.Event) -> AsyncIterator[AsyncEngine]:
    """A verifier around `engine`, with a lease."""
    server = RpcServer(ServerConfig())
    async with AsyncEngine(engine) as loop:
        generation_pb2_grpc.add_GenerationServicer_to_server(Watched(loop, left), server.aio)
        registry = Registry(RegistryConfig(url, LEASE_S, 0.05))
        registration = WorkerRegistration(
            server, registry, AnnouncedWorker("verifier", MODEL, lambda: announced_load(loop.load))
        )
        await registration.register(await server.start([]))
        try:
            yield loop
        finally:
            await registration.deregister()
            await server.stop(0)


async def test_leaving_the_router_ends_the_request_with_the_next_step(url: str) -> None:
    target = load_target(DEMO, "float32", "cpu", ())
    engine = assemble_engine(target, None, EngineConfig(max_kv_tokens=1024), TreeConfig(), None)
    step, steps, left = engine.step, list[list[Chunk]](), threading.Event()

    def watched(meanwhile: Callable[[], None]) -> list[Chunk]:
        if len(steps) == 1:
            assert left.wait(30), "the verifier was not notified"
        steps.append(step(meanwhile))
        return steps[-1]

    engine.step = watched  # type: ignore[method-assign]
    async with verifier(url, engine, left) as loop, router(url) as address, open_channel(address) as channel:
        answers = generation_pb2_grpc.GenerationStub(channel).Generate(generate_call_to_proto(CALL), wait_for_ready=True)
        await answers.read()
        answers.cancel()
        await until(lambda: len(steps) > 1 and loop.load.num_running == 0)
    reasons = [chunk.finish_reason for chunks in steps for chunk in chunks]
    assert reasons in ([None, "cancelled"], [None, None, "cancelled"])  # the step under way may end with its token first
    engine.check()
