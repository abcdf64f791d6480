"""The gRPC listener of the router: its servicer and its TLS credentials."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from eyas.api.request import SamplingParams
from eyas.api.validation import MAX_ENTRIES, check_prompt_length, check_request_id, check_sizes
from eyas.config import TlsConfig
from eyas.rpc import identity
from eyas.rpc.convert import generate_call_from_proto, models_to_proto, text_chunk_to_proto
from eyas.services.router.auth.keys import Access, ApiKeys
from eyas.services.router.dispatch.generation import GenerationService, ReadyChunks
from eyas.services.router.dispatch.upstream import LARGE_NUM_LOGPROBS
from eyas.services.router.telemetry import Arrival
from eyas.telemetry.tracing import trace_pairs
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationServicer


class RouterServicer(GenerationServicer):
    """Servicer of Generation to clients that have an API key, for prompts of text or token ids."""

    def __init__(self, service: GenerationService, keys: ApiKeys) -> None:
        self._service = service
        self._keys = keys

    async def open_stream(
        self, request: generation_pb2.GenerateRequest, context: Any, timeout_s: float | None = None
    ) -> ReadyChunks:
        """Check a call and return the stream of its chunks; the context gets the trailing metadata."""
        metadata = context.invocation_metadata() or ()
        access = self._keys.access(metadata)
        check_request_id(request.request_id)
        arrival = Arrival(request.request_id, trace_pairs(metadata), time.perf_counter())

        with self._service.record_rejection(arrival):
            access.begin("generate")
            defaults = await self._check_sizes(request)
            converted = replace(generate_call_from_proto(request, defaults), trace=arrival.trace, arrived_at=arrival.at)
            call = await self._service.prepare(access.authorize(converted), access.caller(str(context.peer())))
        stream = partial(self._service.stream, [call], timeout_s=timeout_s)
        chunks = access.meter(stream, [call], self._service.record_rejection(arrival))
        return chunks if access.quota is None else _with_trailers(chunks, access, context)

    async def _check_sizes(self, request: generation_pb2.GenerateRequest) -> dict[str, float]:
        """Return the sampling defaults of the message's model.

        Raises InvalidRequest for a message that is too large to be converted, and the errors of finding its model.
        """
        check_sizes({name: getattr(request.sampling, name) for name in MAX_ENTRIES})
        info = await self._service.model(request.model)
        check_prompt_length(len(request.tokens.ids), info.max_model_len)
        return info.defaults(SamplingParams().max_tokens)

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes is cancelled with its call
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream the continuation of a prompt."""
        async with aclosing(await self.open_stream(request, context, context.time_remaining())) as chunks:
            async for ready in chunks:
                for chunk in ready:
                    is_large = len(chunk.chunk.prompt_logprobs) > LARGE_NUM_LOGPROBS
                    message = await asyncio.to_thread(text_chunk_to_proto, chunk) if is_large else text_chunk_to_proto(chunk)
                    await context.write(message)

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """List the configured models that a live verifier serves."""
        self._keys.access(context.invocation_metadata() or ()).begin("models")
        return models_to_proto(self._service.models())


async def _with_trailers(chunks: ReadyChunks, access: Access, context: Any) -> ReadyChunks:
    """Yield the chunks of a call whose trailing metadata says what is left of the quota: at the first chunk, for replicas of
    Ray send it with the chunks, and with each chunk that ends an answer.
    """
    is_first = True
    async with aclosing(chunks):
        async for ready in chunks:
            if is_first or any(chunk.chunk.finish_reason for chunk in ready):
                context.set_trailing_metadata(list(access.headers.items()))
            is_first = False
            yield ready


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """Return the gRPC server's TLS credentials; None without TLS. Raises ConfigError for files that cannot be used."""
    if not config.cert_file:
        return None
    names = "tls.cert_file and tls.key_file"
    return identity.server_credentials(identity.Certificates(names, config.cert_file, config.key_file))
