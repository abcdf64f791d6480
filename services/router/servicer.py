"""The router's Generation service: encode, check, relay, decode. Knows no trees and no torch."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from eyas.errors import InvalidRequest, Unavailable, UnknownModel
from eyas.limits import check_fit, check_request
from eyas.rpc.messages import GenerateCall, ModelInfo, TextChunk
from eyas.rpc.wire import call_from_message, chunk_to_message, models_to_message
from eyas.telemetry.tracing import trace_pairs
from eyas.text import TokenText
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationServicer
from services.router.answer import Answer
from services.router.completions import completion, merged
from services.router.relay import Home, Relay, TrailerSink
from services.router.telemetry.observer import RouterTelemetry
from services.router.workers import Workers


class RouterServicer(GenerationServicer):
    """Takes text or token ids from clients. request_timeout: longest life of a request, in seconds."""

    def __init__(
        self,
        tokenizers: Mapping[str, TokenText],
        workers: Workers,
        relay: Relay,
        request_timeout: float,
        telemetry: RouterTelemetry | None = None,
    ) -> None:
        self._telemetry = telemetry or RouterTelemetry()
        self._tokenizers = tokenizers
        self._workers = workers
        self._relay = relay
        self._request_timeout = request_timeout

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes hears of a cancellation at once
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream the continuation of a prompt."""
        asked = replace(call_from_message(request), trace=trace_pairs(context.invocation_metadata() or ()))
        left = min(context.time_remaining() or self._request_timeout, self._request_timeout)
        deadline = asyncio.get_running_loop().time() + left
        try:
            with self._telemetry.request(asked) as observed:
                call = observed.prepared(await self._prepare(asked))
                async with aclosing(merged(self._completions(call, deadline, context.set_trailing_metadata))) as chunks:
                    async for chunk in chunks:
                        observed.saw(chunk)
                        await context.write(chunk_to_message(chunk))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request was not done within {left:.1f} s")

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The configured models that a live verifier serves."""
        infos = {lease.model.name: lease.model for lease in self._workers.fleet().verifiers}
        return models_to_message(tuple(infos[name] for name in self._tokenizers if name in infos))

    def _completions(self, call: GenerateCall, deadline: float, sink: TrailerSink) -> list[AsyncGenerator[TextChunk, None]]:
        """A stream of chunks for each completion of a call."""
        tokenizer, request, home = self._tokenizers[call.model], call.request, Home()
        split = request.sampling.completions(tokenizer.bad_token_ids(request.sampling.bad_words))
        requests = [replace(request, sampling=sampling) for sampling in split]
        answers = [Answer(request, one, index, tokenizer) for index, one in enumerate(requests)]
        chunks = [self._relay.stream(replace(call, request=one), home, deadline, sink) for one in requests]
        return [completion(answer, stream) for answer, stream in zip(answers, chunks, strict=True)]

    async def _prepare(self, call: GenerateCall) -> GenerateCall:
        """The call with its model, id, token ids and seed filled in. Raises InvalidRequest, UnknownModel, Unavailable."""
        model = self._model_name(call.model)
        check_request(call.request)
        info = self._model_info(model)
        request = replace(
            call.request,
            id=call.request.id or uuid.uuid4().hex,
            prompt_ids=await _prompt_ids(call, self._tokenizers[model], info),
            sampling=call.request.sampling.seeded(),
        )
        check_fit(request, info.vocab_size, info.context_length)
        return replace(call, request=request, prompt_text=None, model=model)

    def _model_name(self, asked: str) -> str:
        names = tuple(self._tokenizers)
        if asked in self._tokenizers:
            return asked
        if asked:
            raise UnknownModel(f"model {asked!r} is not served here; known: {', '.join(names)}")
        if len(names) > 1:
            raise InvalidRequest(f"several models are served here; name one of {', '.join(names)}")
        return names[0]

    def _model_info(self, model: str) -> ModelInfo:
        """Of the verifier that takes the longest requests."""
        infos = [lease.model for lease in self._workers.fleet().verifiers if lease.model.name == model]
        if not infos:
            raise Unavailable(f"no verifier of model {model!r} is alive; start one or try again later")
        return max(infos, key=lambda info: info.context_length)


async def _prompt_ids(call: GenerateCall, tokenizer: TokenText, info: ModelInfo) -> tuple[int, ...]:
    """Encodes beside the event loop, and not at all what cannot fit."""
    text, prompt_ids = call.prompt_text, call.request.prompt_ids
    if text:
        if (least := tokenizer.least_tokens(text)) > info.context_length:
            raise InvalidRequest(f"prompt of at least {least} tokens exceeds the context of {info.context_length} tokens")
        prompt_ids = await asyncio.to_thread(tokenizer.encode, text)
    return prompt_ids
