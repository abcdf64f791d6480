"""The router as a Serve deployment behind Serve's HTTP and gRPC proxies.

`add_generation` repairs cancellation: Serve 2.60 cancels a streamed request only if it waits for the replica when the client
disconnects. If it writes to the client then, it drops its generators and the request goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, NoReturn

from fastapi import FastAPI
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from eyas.config import RouterConfig
from eyas.errors import EyasError, RequestFailed
from eyas.rpc.admission import Admission
from eyas.rpc.convert import text_chunk_to_proto
from eyas.rpc.status import error_trailers, status_of
from eyas.services.ray.config import EnvironmentConfig
from eyas.services.ray.replicas import on_this_node
from eyas.services.router.__main__ import build_router
from eyas.services.router.auth.keys import load_api_keys
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server


def add_generation(servicer: Any, server: Any) -> None:
    """Register the Generation service; name this function in grpc_servicer_functions.

    server: Serve's gRPC server, whose service_handler_factory makes the handler of each method.
    """
    factory = server.service_handler_factory
    server.service_handler_factory = partial(_cancellable_handler, factory)
    try:
        add_GenerationServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = factory


def _cancellable_handler(factory: Callable[..., Any], service_method: str, streaming_type: str) -> Any:
    handler = factory(service_method=service_method, streaming_type=streaming_type)
    return partial(read_in_task, handler) if streaming_type == "unary_stream" else handler


class _Call:
    """The context of a call whose handler may outlive it.

    Serve logs the peer, and gRPC crashes when it is asked for the peer of a call that has ended; so the peer is read first.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        """Return the address of the caller."""
        return str(self._peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def read_in_task(
    handler: Callable[[Any, Any], AsyncGenerator[bytes, None]], request: Any, context: Any
) -> AsyncGenerator[bytes, None]:
    """Yield the messages of a handler, except empty ones, which a replica sends to carry metadata.

    A task of its own reads them. So the handler is cancelled with the call, wherever this generator is then.
    """
    messages: asyncio.Queue[bytes | None] = asyncio.Queue()
    call = _Call(context)

    async def pump() -> None:
        try:
            async for message in handler(request, call):
                if message:
                    messages.put_nowait(message)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(pump())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _ignore_health(serving: bool, *unavailable: str) -> None:
    """Do nothing: Serve checks replicas itself."""


class Router:
    """A router in a replica. Wrap it in `serve.ingress()`; its HTTP application exists once it is constructed."""

    async def __init__(  # type: ignore[misc]
        self, config: RouterConfig, environment: EnvironmentConfig, *workers: DeploymentHandle[Any]
    ) -> None:
        """Begin to look for workers; Serve awaits it.

        workers: the deployments that belong to the application; the router finds them by their leases.
        Raises ConfigError, which Serve shows.
        """
        self._stack = AsyncExitStack()
        config = on_this_node(config, environment)
        router = build_router(config, _ignore_health, load_api_keys(config.api_keys), Admission(config.limits))
        self._app = await self._stack.enter_async_context(router)
        await self._app.readiness.register("")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application for Serve's proxies."""
        return self._app.http

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerateChunk, None]:
        """Stream the continuation of a prompt; Serve cancels it when the client disconnects."""
        try:
            stream = await self._app.grpc.open_stream(request, grpc_context)
            async with aclosing(stream) as chunks:
                async for ready in chunks:
                    for chunk in ready:
                        yield text_chunk_to_proto(chunk)
        except EyasError as error:
            grpc_context.set_trailing_metadata(list(error_trailers(error)))
            yield generation_pb2.GenerateChunk()  # metadata travels only with messages; read_in_task drops this one
            _refuse(error, grpc_context)

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """Return the configured models that a live verifier serves."""
        try:
            return await self._app.grpc.ListModels(request, grpc_context)
        except EyasError as error:
            _refuse(error, grpc_context)

    async def __del__(self) -> None:
        """Serve awaits it when no request is left."""
        await self._app.readiness.deregister()
        await self._stack.aclose()


def _refuse(error: EyasError, context: RayServegRPCContext) -> NoReturn:
    """End a call with the status of an error. Serve pickles what is raised; RequestFailed survives it."""
    context.set_code(status_of(error))
    context.set_details(str(error))
    raise RequestFailed(str(error)) from None
