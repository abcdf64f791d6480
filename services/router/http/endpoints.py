"""Endpoints that generate text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from eyas.api.outputs import TextChunk
from eyas.api.validation import MAX_REQUEST_ID_LENGTH, check_prompt_length
from eyas.errors import InvalidRequest
from eyas.rpc.messages import GenerateCall, ModelInfo
from eyas.services.router.auth.keys import Access
from eyas.services.router.dispatch.generation import GenerationService, ReadyChunks
from eyas.services.router.http.bodies.anthropic import MessagesBody, PromptBody
from eyas.services.router.http.bodies.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
)
from eyas.services.router.http.bodies.responses import ResponsesBody
from eyas.services.router.http.bodies.tokenize import DetokenizeBody, TokenizeBody
from eyas.services.router.http.errors import named_by
from eyas.services.router.http.fill_in_middle import end_tokens, middle_format, middle_prompt
from eyas.services.router.http.streaming import BlockResponse, EventStream, cancel_on_disconnect
from eyas.services.router.http.tool_constraints import ChatOutput
from eyas.services.router.http.writers.anthropic import MessagesWriter
from eyas.services.router.http.writers.json_blocks import LARGE_NUM_VALUES, json_blocks, num_values
from eyas.services.router.http.writers.openai import ResponseWriter, StreamWriter, stream_events
from eyas.services.router.http.writers.responses import ResponsesWriter
from eyas.services.router.telemetry import Arrival
from eyas.telemetry.logging import escaped
from eyas.telemetry.tracing import trace_pairs
from eyas.text.chat_parser import ChatFormat
from eyas.text.tokenizer import Tokenizer

MAX_QUOTED_NAME = 80
# Characters that the router adds to the id of a client: the kind of request, and the number of the prompt.
ID_AFFIX_LENGTH = 16

BodyT = TypeVar("BodyT")
ResultT = TypeVar("ResultT")


def until_disconnect(
    endpoint: Callable[[GenerationEndpoints, BodyT, Request], Awaitable[ResultT]],
) -> Callable[[GenerationEndpoints, BodyT, Request], Awaitable[ResultT]]:
    """Let an endpoint end with its client. Raises ClientDisconnected then."""

    @wraps(endpoint)
    async def ended(self: GenerationEndpoints, body: BodyT, request: Request) -> ResultT:
        return await cancel_on_disconnect(request.receive, endpoint(self, body, request))

    return ended


@dataclass(frozen=True)
class GenerationEndpoints:
    """The endpoints that generate or encode. All raise the errors of GenerationService.

    Attributes:
        keepalive_interval_s: silence of a stream after which its client gets a comment.
    """

    service: GenerationService
    keepalive_interval_s: float

    @until_disconnect
    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Respond to /v1/completions."""
        arrival = _arrival("cmpl-", request, body.request_id)
        with self.service.record_rejection(arrival):
            info = await self.service.model(body.model)
            for prompt in body.prompt:
                if not isinstance(prompt, str):
                    check_prompt_length(len(prompt), info.max_model_len)
            with named_by(body.name_of):
                defaults = info.defaults(DEFAULT_COMPLETION_TOKENS)
                max_tokens = int(defaults["max_tokens"]) if body.num_tokens is None else body.num_tokens
                max_tokens = 1 if body.scores_prompt_only else max_tokens  # a verifier emits at least one
                counts = {"logprobs": body.logprobs, "prompt_logprobs": body.num_prompt_logprobs}
                sampling = body.sampling(defaults, max_tokens, **counts)
                requested = [body.call(prompt, sampling) for prompt in body.prompt]
                if body.suffix:
                    requested = await self._run(request, self._around, body, info, requested)
            calls = await self._prepare(body, arrival, request, requested)
            rejection = self.service.record_rejection(arrival)
            chunks = request.state.access.meter(partial(self.service.stream, calls), calls, rejection)
            if body.scores_prompt_only:
                chunks = _without_output(chunks)
            tokenizer = self.service.configured[info.name].tokenizer
            echoes = await self._run(request, _echoes, body, tokenizer) if body.echo else []
            prompts = [call.request.prompt_ids for call in calls]
            writer = ResponseWriter(body, arrival.request_id, info.name, tokenizer, prompts, echoes)
            writer.reserve(request.state.hold)
        return await self._respond(body, body.stream, request, writer, chunks)

    @until_disconnect
    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Respond to /v1/chat/completions."""
        return await self._chat("chatcmpl-", body, request, body.stream, lambda writer: writer)

    @until_disconnect
    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Respond to /v1/responses."""
        with named_by(body.name_of):
            chat = await self._run(request, body.chat)
            return await self._chat("resp_", chat, request, body.stream, partial(ResponsesWriter, body))

    @until_disconnect
    async def messages(self, body: MessagesBody, request: Request) -> Response:
        """Respond to /v1/messages."""
        chat = await self._run(request, body.chat)
        return await self._chat("msg_", chat, request, body.stream, MessagesWriter)

    @until_disconnect
    async def count_tokens(self, body: PromptBody, request: Request) -> dict[str, int]:
        """Respond to /v1/messages/count_tokens."""
        info = await self.service.model(body.model)
        return {"input_tokens": len(await self._run(request, lambda: self._encode_chat(body.chat(), info)))}

    @until_disconnect
    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Respond to /tokenize."""
        info = await self.service.model(body.model)
        if body.prompt is None:
            token_ids = await self._run(request, lambda: self._encode_chat(body.chat(), info))
        else:
            is_rendered = body.add_special_tokens is False
            token_ids = await self.service.encode(info, body.prompt, request.state.caller, is_rendered)
        tokenizer = self.service.configured[info.name].tokenizer
        return await self._run(request, lambda: _json(body.response(token_ids, info, tokenizer)))

    @until_disconnect
    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Respond to /detokenize."""
        info = await self.service.model(body.model)
        return await self._run(request, lambda: _json(body.response(info, self.service.configured[info.name].tokenizer)))

    async def _chat(
        self,
        prefix: str,
        body: ChatBody,
        request: Request,
        stream: bool,
        write: Callable[[ResponseWriter], StreamWriter],
    ) -> Response:
        """Respond to a chat.

        Args:
            prefix: of the id.
            write: turns the writer of the chat into that of an API.
        """
        arrival = _arrival(prefix, request, body.request_id)
        with self.service.record_rejection(arrival, "chat"):
            info = await self.service.model(body.model)
            requested = [await self._run(request, self._chat_call, body, info)]
            calls = await self._prepare(body, arrival, request, requested)
            rejection = self.service.record_rejection(arrival, "chat")
            chunks = request.state.access.meter(partial(self.service.stream, calls, "chat"), calls, rejection)
            prompts = [call.request.prompt_ids for call in calls]
            writer = ResponseWriter(
                body, arrival.request_id, info.name, self.service.configured[info.name].tokenizer, prompts
            )
            writer.new_parser = self._chat_output(body, info, prompts[0]).new_parser
            writer.reserve(request.state.hold)
        return await self._respond(body, stream, request, write(writer), chunks)

    async def _run(self, request: Request, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return what a function makes of a client's text, in one of its threads."""
        return await self.service.threads.run(request.state.caller, function, *args)

    async def _respond(
        self, body: CompletionBody | ChatBody, stream: bool, request: Request, writer: StreamWriter, chunks: ReadyChunks
    ) -> Response:
        """Return one JSON response, or a stream of events."""
        headers = {"X-Request-Id": writer.id}
        if not stream:
            answer = await writer.response(chunks)
            if num_values(answer) > LARGE_NUM_VALUES:
                return await asyncio.to_thread(_json, answer, headers)
            return _json(answer, headers)
        return EventStream(writer, stream_events(writer, chunks, body.name_of), headers, self.keepalive_interval_s)

    def _encode_chat(self, body: ChatBody, info: ModelInfo) -> tuple[int, ...]:
        """Return the token ids of a chat's prompt. Meant for a thread."""
        model = self.service.configured[info.name]
        tokenizer, template, content = model.tokenizer, model.template, model.content
        if template is None:
            reason = f"model {info.name!r} has no chat template; use /v1/completions, or set its chat_template"
            raise InvalidRequest(reason, "messages")
        with named_by(body.name_of):
            tokenizer.check_length(sum(len(message.content) for message in body.messages), info.max_model_len)
            encode = content.encode if content else tokenizer.encode_within
            messages = [message.template_value for message in body.messages]
            marked = content.mark if content else lambda value: value
            text = template.render(messages, body.template_variables, body.continue_final_message, marked)
            return encode(text, info.max_model_len, not body.add_special_tokens)

    def _chat_call(self, body: ChatBody, info: ModelInfo) -> GenerateCall:
        """Return the call of a chat. Meant for a thread: messages and tools may be large."""
        token_ids = self._encode_chat(body, info)
        defaults = info.defaults(max(info.max_model_len - len(token_ids), 1))
        max_tokens = int(defaults["max_tokens"]) if body.num_tokens is None else body.num_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        with named_by(body.name_of):
            sampling = body.sampling(defaults, max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
            output = self._chat_output(body, info, token_ids)
            constraint = output.constraint(sampling.structured_outputs)
            if constraint is not None:
                constraint = replace(constraint, **body.whitespace)
            budget = output.reasoning_budget(body.thinking_token_budget)
            sampling = replace(sampling, structured_outputs=constraint, reasoning_budget=budget)
        return replace(body.call(token_ids, sampling), kept_tokens=output.kept_tokens)

    def _around(self, body: CompletionBody, info: ModelInfo, calls: Sequence[GenerateCall]) -> list[GenerateCall]:
        """Return the calls with prompts that have the suffix after the output. Meant for a thread."""
        tokenizer, found = self.service.configured[info.name].tokenizer, list[GenerateCall]()
        format_ = middle_format(tokenizer, info.name)
        tokenizer.encode_within(body.suffix, info.max_model_len, is_rendered=True)
        suffix = tokenizer.encode_inside(body.suffix)
        sampling = calls[0].request.sampling  # of all prompts
        ends = (*sampling.stop_token_ids, *end_tokens(format_, tokenizer))
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)))
        for call in calls:
            prefix = call.request.prompt_ids
            if call.prompt_text:
                prefix = tokenizer.encode_within(call.prompt_text, info.max_model_len, is_rendered=True)
            prompt = middle_prompt(format_, tokenizer, prefix, suffix)
            own = replace(call.request, prompt_ids=prompt, sampling=sampling)
            found.append(replace(call, prompt_text=None, request=own))
        return found

    def _chat_output(self, body: ChatBody, info: ModelInfo, prompt: Sequence[int]) -> ChatOutput:
        """Return how the output of a chat is constrained and read."""
        model = self.service.configured[info.name]
        form = model.template.format if model.template else ChatFormat()
        return ChatOutput(body, info.name, form, model.tokenizer, prompt)

    async def _prepare(
        self, body: CompletionBody | ChatBody, arrival: Arrival, request: Request, calls: Sequence[GenerateCall]
    ) -> list[GenerateCall]:
        """Check all calls of a request; return them with their token ids."""
        access: Access = request.state.access
        prepared, caller = list[GenerateCall](), request.state.caller
        with named_by(body.name_of):
            for number, call in enumerate(calls):
                id_ = arrival.request_id if len(calls) == 1 else f"{arrival.request_id}-{number}"
                own = replace(call.request, id=id_)
                call = replace(call, request=own, trace=arrival.trace, arrived_at=arrival.at)
                prepared.append(await self.service.prepare(access.authorize(call), caller, not body.add_special_tokens))
                await asyncio.sleep(0)  # between the prompts of a long list, other requests have their turn
        return prepared


def _json(answer: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return BlockResponse(json_blocks(answer), headers, "application/json")


def _arrival(prefix: str, request: Request, own_id: str = "") -> Arrival:
    """Return what is known of a request without its body, but own_id, its request_id.

    The id is a header of the response too: only ASCII, and no space around it.
    """
    given = escaped(request.headers.get("x-request-id", "") or own_id).encode("ascii", "backslashreplace").decode()
    given = given[: MAX_REQUEST_ID_LENGTH - ID_AFFIX_LENGTH].strip()
    id_ = f"{prefix}{given or uuid.uuid4().hex}"
    return Arrival(id_, trace_pairs(request.headers.items()), request.state.arrived_at)


def _echoes(body: CompletionBody, tokenizer: Tokenizer) -> list[str]:
    return [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompt]


async def _without_output(chunks: ReadyChunks) -> ReadyChunks:
    """Remove the output token that scoring a prompt costs."""

    def prompt_of(chunk: TextChunk) -> TextChunk:
        inner = chunk.chunk.first(0)
        if inner.finish_reason == "stop":
            inner = replace(inner, finish_reason="length")
        totals = replace(chunk.totals, num_output_tokens=0, stats=None) if chunk.totals else None
        return replace(chunk, chunk=inner, text="", text_lengths=(), totals=totals)

    async with aclosing(chunks):
        async for ready in chunks:
            yield list(map(prompt_of, ready))
