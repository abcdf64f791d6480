"""Keys and TLS of the gRPC door: what stands before its own services. Knows no messages.

The gRPC door of the router: messages in, messages out. Knows no text and no workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from eyas.config import TlsConfig
from eyas.errors import Unauthenticated
from eyas.rpc.channel import Certificates
from eyas.rpc.channel import server_credentials as credentials_of
from eyas.rpc.convert import call_from_message, chunk_to_message, models_to_message
from eyas.services.router.api_keys import ApiKeys
from eyas.services.router.generation import GenerationService
from eyas.telemetry.tracing import trace_pairs
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationServicer

_OURS = "/eyas."


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls of Eyas' own services in with the metadata `authorization: Bearer KEY`; health and reflection are open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = cast("tuple[tuple[str, str], ...]", handler_call_details.invocation_metadata or ())
        given = dict(metadata).get("authorization", "")
        if not handler_call_details.method.startswith(_OURS) or self._keys.admit(given):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Any) -> NoReturn:
    raise Unauthenticated("no known API key; send one as the metadata 'authorization: Bearer KEY'")


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """What a gRPC server needs for TLS; None without it. Raises ConfigError for files that cannot be used."""
    return (
        credentials_of(Certificates("tls.cert_file and tls.key_file", config.cert_file, config.key_file))
        if config.cert_file
        else None
    )


class RouterServicer(GenerationServicer):
    """Takes text or token ids from clients."""

    def __init__(self, front: GenerationService) -> None:
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
