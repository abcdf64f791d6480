"""The gRPC door of the router: messages in, messages out. Knows no text and no workers."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

from eyas.rpc.wire import call_from_message, chunk_to_message, models_to_message
from eyas.telemetry.tracing import trace_pairs
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationServicer
from services.router.front import Front


class RouterServicer(GenerationServicer):
    """Takes text or token ids from clients."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes hears of a cancellation at once
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream the continuation of a prompt."""
        asked = replace(call_from_message(request), trace=trace_pairs(context.invocation_metadata() or ()))
        with self._front.refusals(asked):
            call = await self._front.prepare(asked)
        stream = self._front.stream(call, context.time_remaining(), context.set_trailing_metadata)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await context.write(chunk_to_message(chunk))

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The configured models that a live verifier serves."""
        return models_to_message(self._front.models())
