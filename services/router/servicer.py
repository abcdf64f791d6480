"""The router's Generation service: encode, check, relay, decode. Knows no trees and no torch."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from eyas.errors import InvalidRequest, Unavailable, UnknownModel
from eyas.request import Request
from eyas.rpc.messages import GenerateCall, ModelInfo
from eyas.rpc.wire import call_from_message, chunk_to_message, models_to_message
from eyas.text import TokenText
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationServicer
from services.router.answer import Answer
from services.router.relay import Relay
from services.router.workers import Workers


class RouterServicer(GenerationServicer):
    """Takes text or token ids from clients. request_timeout: longest life of a request, in seconds."""

    def __init__(self, tokenizers: Mapping[str, TokenText], workers: Workers, relay: Relay, request_timeout: float) -> None:
        self._tokenizers = tokenizers
        self._workers = workers
        self._relay = relay
        self._request_timeout = request_timeout

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes hears of a cancellation at once
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream the continuation of a prompt."""
        call = self._prepare(call_from_message(request))
        answer = Answer(call.request, self._tokenizers[call.model])
        left = min(context.time_remaining() or self._request_timeout, self._request_timeout)
        deadline = asyncio.get_running_loop().time() + left
        try:
            async with aclosing(self._relay.stream(call, deadline, context.set_trailing_metadata)) as chunks:
                async for chunk in chunks:
                    shown = answer.add(chunk)
                    await context.write(chunk_to_message(shown))
                    if shown.chunk.finish_reason != chunk.finish_reason:
                        return  # at a stop string: the verifier would go on
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request was not done within {left:.1f} s")

    async def ListModels(  # noqa: N802
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The configured models that a live verifier serves."""
        infos = {lease.model.name: lease.model for lease in self._workers.fleet().verifiers}
        return models_to_message(tuple(infos[name] for name in self._tokenizers if name in infos))

    def _prepare(self, call: GenerateCall) -> GenerateCall:
        """The call with its model, id, token ids and seed filled in. Raises InvalidRequest, UnknownModel, Unavailable."""
        model = self._model_name(call.model)
        call.request.validate()
        request = replace(
            call.request,
            id=call.request.id or uuid.uuid4().hex,
            prompt_ids=self._prompt_ids(call, self._tokenizers[model]),
            sampling=call.request.sampling.seeded(),
        )
        _check_limits(request, self._model_info(model))
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

    def _prompt_ids(self, call: GenerateCall, tokenizer: TokenText) -> tuple[int, ...]:
        text = call.prompt_text
        prompt_ids = call.request.prompt_ids if text is None else tokenizer.encode(text) if text else ()
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty; send text or at least one token id")
        return prompt_ids

    def _model_info(self, model: str) -> ModelInfo:
        for lease in self._workers.fleet().verifiers:
            if lease.model.name == model:
                return lease.model
        raise Unavailable(f"no verifier of model {model!r} is alive; start one or try again later")


def _check_limits(request: Request, info: ModelInfo) -> None:
    """Raises InvalidRequest when a request does not fit the model."""
    for name, ids in (("prompt token", request.prompt_ids), ("stop token", request.sampling.stop_token_ids)):
        outside = next((token for token in ids if not 0 <= token < info.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"{name} id {outside} is outside the vocabulary [0, {info.vocab_size})")
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt + max_tokens > info.context_length:
        raise InvalidRequest(
            f"prompt of {num_prompt} tokens and max_tokens {max_tokens} exceed the context of {info.context_length} tokens"
        )
