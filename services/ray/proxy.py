"""What Serve's gRPC proxies are told of our service, so that a client who leaves is heard of at any moment.

Serve 2.60 cancels a streamed request only if it happens to wait for the replica when the client leaves. If it is writing to
the client then, its generators are thrown away with the request going on behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeAlias

from eyas.v1.generation_pb2_grpc import add_GenerationServicer_to_server

Streaming: TypeAlias = Callable[[Any, Any], AsyncGenerator[bytes, None]]


def add_generation(servicer: Any, server: Any) -> None:
    """Register the Generation service; name it in grpc_servicer_functions. server: Serve's own kind, which asks its
    service_handler_factory for what to do with each method."""
    factory = server.service_handler_factory
    server.service_handler_factory = partial(_cancelling, factory)
    try:
        add_GenerationServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = factory


def _cancelling(factory: Callable[..., Any], service_method: str, streaming_type: str) -> Any:
    handler = factory(service_method=service_method, streaming_type=streaming_type)
    return partial(pumped, handler) if streaming_type == "unary_stream" else handler


class _Call:
    """A call's context for a handler that may end after its call: gRPC crashes where a call that is gone is asked for its
    peer, which Serve logs."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        """Who called."""
        return str(self._peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def pumped(handler: Streaming, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
    """The same messages, but for empty ones, which a replica sends to carry metadata. A task of its own takes them: wherever
    this generator is when the call is cancelled, the handler is cancelled while it waits for the next message."""
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
