"""A checked body to its answer: calls for the front, their chunks into one answer or a stream. Knows no paths."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from eyas.errors import EyasError, InvalidRequest
from eyas.request import Request as InnerRequest
from eyas.request import SamplingParams
from eyas.rpc.messages import GenerateCall, TextChunk
from eyas.telemetry.tracing import trace_pairs
from services.router.completions import merged
from services.router.front import Front
from services.router.http.answers import Answers, ChatForm, CompletionForm, Plan
from services.router.http.bodies import Body, ChatBody, CompletionBody
from services.router.http.chat import ChatTemplate
from services.router.http.errors import refusal
from services.router.http.streaming import DONE, EventStream, as_json, first_of, while_there

MAX_CHOICES = 1024
MAX_ID_LENGTH = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """Both endpoints over one front. templates: of every model, None where it has none."""

    front: Front
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
    ) -> tuple[Answers, AsyncGenerator[TextChunk, None]]:
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
        plan = Plan(body.n, echoes, body.prompt_logprobs is not None, body.return_speculation)
        answers = Answers(asked.request.id, info.name, form, tokenizer, plan)
        return answers, _prompt_only(chunks) if only_prompt else chunks

    async def _chat(self, body: ChatBody, asked: GenerateCall) -> tuple[Answers, AsyncGenerator[TextChunk, None]]:
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
            max_tokens = max(info.context_length - len(ids), 1)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        calls = [body.call(ids, max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)]
        tokenizer = self.front.tokenizer(info.name)
        plan = Plan(body.n, (), body.prompt_logprobs is not None, body.return_speculation)
        chunks = await self._chunks(body, asked, calls)
        return Answers(asked.request.id, info.name, ChatForm(tokenizer, body.logprobs), tokenizer, plan), chunks

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


async def _answered(body: Body, request: Request, answers: Answers, chunks: AsyncGenerator[TextChunk, None]) -> Response:
    headers = {"X-Request-Id": answers.id}
    if not body.stream:
        return JSONResponse(await while_there(request.receive, answers.whole(chunks)), headers=headers)
    texts = _texts(answers, chunks, body)
    first = await while_there(request.receive, first_of(texts))
    return EventStream(first, texts, headers)


async def _texts(answers: Answers, chunks: AsyncGenerator[TextChunk, None], body: Body) -> AsyncGenerator[str, None]:
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
