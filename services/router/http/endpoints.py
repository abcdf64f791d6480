"""Work for a client that may leave at any moment: it is cancelled then. Knows nothing of what is said.

A checked body to its answer: calls for the front, their chunks into one answer or a stream. Knows no paths.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from eyas.errors import EyasError, InvalidRequest
from eyas.request import Request as InnerRequest
from eyas.request import SamplingParams
from eyas.rpc.messages import GenerateCall, TextChunk
from eyas.services.router.generation import GenerationService, merged
from eyas.services.router.http.chat_template import ChatTemplate
from eyas.services.router.http.requests import Body, ChatBody, CompletionBody
from eyas.services.router.http.responses import ChatForm, CompletionForm, ResponsePlan, ResponseWriter, refusal
from eyas.telemetry.tracing import trace_pairs

ResultT = TypeVar("ResultT")

DONE = "[DONE]"


class ClientGone(Exception):
    """The client has left; nobody reads an answer."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` gives back or raises. Once the client has left, cancels it, waits for its end and raises ClientGone.

    receive: the request's own, its body read.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one for each text. texts: what follows the first; asked for one at a time, as the client reads."""

    media_type = "text/event-stream"

    def __init__(self, first: str, texts: AsyncGenerator[str, None], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            await self._texts.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_event(self._first))
        async for text in self._texts:
            await send(_event(text))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def first_of(texts: AsyncGenerator[str, None]) -> str:
    """The first text; there must be one."""
    return await anext(texts)


def as_json(value: dict[str, Any]) -> str:
    """Compact JSON of one event."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event(text: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_CHOICES = 1024
MAX_ID_LENGTH = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenAIEndpoints:
    """Both endpoints over one front. templates: of every model, None where it has none."""

    front: GenerationService
    templates: Mapping[str, ChatTemplate | None]

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """The answer of /v1/completions. Raises what the front raises, and ClientGone."""
        asked = _asked("cmpl", request)
        with self.front.refusals(asked):
            answers, chunks = await self._completions(body, asked)
        return await _answered(body, request, answers, chunks)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The answer of /v1/chat/completions. Raises what the front raises, and ClientGone."""
        asked = _asked("chatcmpl", request)
        with self.front.refusals(asked, "chat"):
            answers, chunks = await self._chat(body, asked)
        return await _answered(body, request, answers, chunks)

    async def _completions(
        self, body: CompletionBody, asked: GenerateCall
    ) -> tuple[ResponseWriter, AsyncGenerator[TextChunk, None]]:
        _check(body)
        info = self.front.model(body.model)
        tokenizer = self.front.tokenizer(info.name)
        only_prompt = body.echo and body.max_tokens == 0
        told = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        calls = [
            body.call(prompt, 1 if only_prompt else body.max_tokens, logprobs=body.logprobs, prompt_logprobs=told)
            for prompt in body.prompt
        ]
        form = CompletionForm(tokenizer, body.logprobs is not None)
        chunks = await self._chunks(body, asked, calls)
        echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompt] if body.echo else []
        plan = ResponsePlan(body.n, echoes, body.prompt_logprobs is not None, body.return_speculation)
        answers = ResponseWriter(asked.request.id, info.name, form, tokenizer, plan)
        return answers, _prompt_only(chunks) if only_prompt else chunks

    async def _chat(self, body: ChatBody, asked: GenerateCall) -> tuple[ResponseWriter, AsyncGenerator[TextChunk, None]]:
        info = self.front.model(body.model)
        template = self.templates[info.name]
        if template is None:
            reason = f"model {info.name!r} has no chat template; ask /v1/completions, or give the router its chat_template"
            raise InvalidRequest(reason, "messages")
        messages = [message.model_dump(exclude_defaults=True) for message in body.messages]
        text = await asyncio.to_thread(template.render, messages, body.chat_template_kwargs)
        with _in_the_words_of(body):
            ids = await self.front.encode_rendered(info, text)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens is None:
            max_tokens = max(info.max_model_len - len(ids), 1)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        calls = [body.call(ids, max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)]
        tokenizer = self.front.tokenizer(info.name)
        plan = ResponsePlan(body.n, (), body.prompt_logprobs is not None, body.return_speculation)
        chunks = await self._chunks(body, asked, calls)
        return ResponseWriter(asked.request.id, info.name, ChatForm(tokenizer, body.logprobs), tokenizer, plan), chunks

    async def _chunks(
        self, body: CompletionBody | ChatBody, asked: GenerateCall, calls: Sequence[GenerateCall]
    ) -> AsyncGenerator[TextChunk, None]:
        """The chunks of all calls, which are checked before the first of them runs; a chunk's index is its choice's."""
        name = asked.request.id
        names = [name] if len(calls) == 1 else [f"{name}-{number}" for number in range(len(calls))]
        operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        named = [replace(c, request=replace(c.request, id=i), trace=asked.trace) for c, i in zip(calls, names, strict=True)]
        with _in_the_words_of(body):
            prepared = [await self.front.prepare(call) for call in named]
        streams = [self.front.stream(call, None, _unheard, operation) for call in prepared]
        return merged([_shifted(stream, number * body.n) for number, stream in enumerate(streams)])


def _check(body: CompletionBody) -> None:
    if len(body.prompt) * body.n > MAX_CHOICES:
        raise InvalidRequest(f"more than {MAX_CHOICES} completions in one request; send several requests", "n")
    if body.echo and body.logprobs is not None:
        if body.n > 1:
            raise InvalidRequest("echo with logprobs tells of the prompt once; ask for n = 1", "n")
        if body.prompt_logprobs is not None:
            reason = "echo with logprobs tells of the prompt already; leave prompt_logprobs out"
            raise InvalidRequest(reason, "prompt_logprobs")


async def _answered(
    body: Body, request: Request, answers: ResponseWriter, chunks: AsyncGenerator[TextChunk, None]
) -> Response:
    headers = {"X-Request-Id": answers.id}
    if not body.stream:
        return JSONResponse(await while_there(request.receive, answers.whole(chunks)), headers=headers)
    texts = _texts(answers, chunks, body)
    first = await while_there(request.receive, first_of(texts))
    return EventStream(first, texts, headers)


async def _texts(answers: ResponseWriter, chunks: AsyncGenerator[TextChunk, None], body: Body) -> AsyncGenerator[str, None]:
    """The events of a stream as JSON. An error is raised before the first of them, and told as an event after it."""
    begun = False
    try:
        async with aclosing(answers.events(chunks)) as events:
            async for event in events:
                begun = True
                yield as_json(event)
        if body.include_usage or body.return_speculation:
            yield as_json(answers.last_event())
    except EyasError as error:
        if not begun:
            raise
        log.warning("request %s: %s", answers.id, error)
        yield as_json(refusal(error).body)
    yield DONE


async def _shifted(chunks: AsyncGenerator[TextChunk, None], by: int) -> AsyncGenerator[TextChunk, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield replace(chunk, chunk=replace(chunk.chunk, index=chunk.chunk.index + by))


async def _prompt_only(chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
    """Without the one token that had to be asked for: a verifier generates at least that many."""
    async with aclosing(chunks):
        async for chunk in chunks:
            inner = chunk.chunk.first(0)
            if inner.finish_reason == "stop":
                inner = replace(inner, finish_reason="length")
            totals = replace(chunk.totals, num_output_tokens=0, stats=None) if chunk.totals else None
            yield replace(chunk, chunk=inner, text="", text_lengths=(), totals=totals)


@contextmanager
def _in_the_words_of(body: CompletionBody | ChatBody) -> Iterator[None]:
    """Errors name parameters as the client does."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(str(error), body.name_of(error.param)) from error


def _asked(prefix: str, request: Request) -> GenerateCall:
    """What is known of a request before its body is: its id, the client's own or one that is made up, and its trace."""
    name = f"{prefix}-{request.headers.get('x-request-id', '')[:MAX_ID_LENGTH] or uuid.uuid4().hex}"
    return GenerateCall(InnerRequest(name, (), SamplingParams()), trace=trace_pairs(request.headers.items()))


def _unheard(trailers: Sequence[tuple[str, str]]) -> None:
    """HTTP has no place for what a verifier measured."""
