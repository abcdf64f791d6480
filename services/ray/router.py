"""The router as a Serve deployment: Serve's HTTP and gRPC proxies are its sockets. Knows no tokens' origin."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, NoReturn

from fastapi import FastAPI
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from eyas.config import RouterConfig
from eyas.errors import EyasError, RequestFailed, Unauthenticated
from eyas.rpc.messages import TextChunk
from eyas.rpc.server import retry_hint, status_of
from eyas.rpc.wire import call_from_message, chunk_to_message, models_to_message
from eyas.telemetry.logs import configure_logging
from eyas.telemetry.tracing import trace_pairs
from eyas.v1 import generation_pb2
from services.ray.config import EnvironmentConfig, on_node
from services.router.access.keys import load_keys
from services.router.core import router_core


class _NoHealth:
    """Serve asks replicas itself whether they live; without a verifier a router is well all the same."""

    async def set_serving(self, serving: bool) -> None:
        """Nobody asks."""


class Router:
    """A router in a replica. Give it `serve.ingress()`: its HTTP door exists once it is constructed."""

    async def __init__(  # type: ignore[misc]
        self, config: RouterConfig, names: EnvironmentConfig, *workers: DeploymentHandle[Any]
    ) -> None:
        """Look for workers from now on; Serve awaits it. workers: the pools that belong to the application; they are found
        by their leases. Raises ConfigError, which Serve shows."""
        configure_logging(config.telemetry.log_format)
        here = on_node(config, names, get_node_ip_address())
        self._keys = load_keys(here.keys)
        self._stack = AsyncExitStack()
        self._core = await self._stack.enter_async_context(router_core(here, self._keys, _NoHealth()))
        await self._core.presence.enter("")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve's HTTP proxies talk to."""
        return self._core.app

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerateChunk, None]:
        """Stream the continuation of a prompt; Serve cancels it when the client has left."""
        try:
            self._admit(grpc_context)
            asked = replace(call_from_message(request), trace=trace_pairs(grpc_context.invocation_metadata()))
            with self._core.front.refusals(asked):
                call = await self._core.front.prepare(asked)
            stream = self._core.front.stream(call, None, lambda pairs: grpc_context.set_trailing_metadata(list(pairs)))
            async with aclosing(_last_ones_last(stream)) as chunks:
                async for chunk in chunks:
                    yield chunk_to_message(chunk)
        except EyasError as error:
            if hint := retry_hint(error):
                grpc_context.set_trailing_metadata(list(hint))
                yield generation_pb2.GenerateChunk()  # metadata travels with messages alone; the proxy drops this one
            _refuse(error, grpc_context)

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """The configured models that a live verifier serves."""
        try:
            self._admit(grpc_context)
            return models_to_message(self._core.front.models())
        except EyasError as error:
            _refuse(error, grpc_context)

    async def __del__(self) -> None:
        """Serve awaits it, when no request is left."""
        await self._core.presence.leave()
        await self._stack.aclose()

    def _admit(self, context: RayServegRPCContext) -> None:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not self._keys.admit(given):
            raise Unauthenticated("no known API key; send one as the metadata 'authorization: Bearer KEY'")


async def _last_ones_last(stream: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
    """The same chunks, but those that end a completion wait for what follows: Serve sends trailing metadata along with
    messages, and they are known only at the stream's end."""
    held: TextChunk | None = None
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            if held is not None:
                yield held
            held = chunk if chunk.totals is not None else None
            if held is None:
                yield chunk
    if held is not None:
        yield held


def _refuse(error: EyasError, context: RayServegRPCContext) -> NoReturn:
    """End a call with the status of an error. Serve carries exceptions between processes, for which ours are not made."""
    context.set_code(status_of(error))
    context.set_details(str(error))
    raise RequestFailed(str(error)) from None
