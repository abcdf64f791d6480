"""OpenAI's responses, made from the router's chunks: one JSON object, or one event for each choice's chunks that are ready.

To add a field to a choice, extend `ResponseWriter._choice`; to the usage, `ResponseWriter.usage`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

from eyas.api.outputs import TextChunk
from eyas.api.request import GenerationStats, TokenLogprob
from eyas.errors import EyasError, RequestFailed
from eyas.services.router.dispatch.generation import ReadyChunks
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.services.router.http.bodies.tools import message_delta, whole_message
from eyas.services.router.http.errors import error_body, named_by
from eyas.services.router.http.writers.json_blocks import num_values, pieces
from eyas.services.router.http.writers.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_token_logprobs,
    text_offsets,
    token_name,
)
from eyas.services.router.http.writers.verify_steps import verify_step_object
from eyas.text.chat_message import ChatMessage, in_order, joined
from eyas.text.chat_parser import ChatParser
from eyas.text.tokenizer import Tokenizer

# Chunks that a thread turns into events: beyond what 64 of them take that hold only a few tokens.
_LARGE_CHUNKS_BYTES = 128 * 2**10
# Estimates of memory until a response is sent: of a token, a value of JSON, a token with its log-probability, and a likely
# token beside it. Measured with 20 of them: 126 to 160 bytes for each, 10 to 20 of gRPC's message not counted.
_BYTES_PER_TOKEN, _BYTES_PER_VALUE, _BYTES_PER_LOGPROB, _BYTES_PER_TOP_LOGPROB = 64, 96, 450, 180
_FAILURES = ("error", "cancelled")
_MAX_DELTAS = 64  # of a choice that are kept one by one


@dataclass(frozen=True)
class TextDelta:
    """Addition of a chunk to a choice, or of all its chunks.

    Attributes:
        logprobs: of its tokens; the first delta of an echo begins with the prompt's.
        offset: characters of the tokens before it.
        is_first: no delta of the choice was visible before.
        prompt_logprobs: where a field of their own holds them.
        token_ids: if they were asked for.
        stop_reason: as in TextChunk.
        verify_steps: as JSON, if the request asks for them.
        messages: what the text means, in its order, if it is parsed; each has reasoning before content before calls.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    offset: int = 0
    finish_reason: str | None = None
    is_first: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    stop_reason: str | int | None = None
    verify_steps: tuple[dict[str, Any], ...] = ()
    messages: tuple[ChatMessage, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The memory that it takes in a response, estimated."""
        num_logprobs = len(self.logprobs) + len(self.prompt_logprobs)
        num_top_logprobs = sum(len(entry.top_ids) for entry in (*self.logprobs, *self.prompt_logprobs))
        num_step_values = sum(map(num_values, self.verify_steps))
        sized = (
            _BYTES_PER_LOGPROB * num_logprobs,
            _BYTES_PER_TOP_LOGPROB * num_top_logprobs,
            _BYTES_PER_VALUE * num_step_values,
            _BYTES_PER_TOKEN * len(self.token_ids),
        )
        return sum(sized) + 4 * len(self.text)

    @property
    def parts(self) -> Sequence[ChatMessage]:
        """What the text means; text that is not parsed is content."""
        return (ChatMessage(self.text),) if self.messages is None else self.messages

    @property
    def is_empty(self) -> bool:
        """Return whether a client would see nothing of it."""
        text = self.text if self.messages is None else self.messages
        seen = text or self.logprobs or self.finish_reason or self.prompt_logprobs
        return not (seen or self.token_ids or self.verify_steps)


class StreamWriter(Protocol):
    """Writer of the response to one request, whole or as events, in the form of one API.

    id: of the request. end: what comes after the last event of a stream.
    """

    @property
    def id(self) -> str: ...

    @property
    def end(self) -> bytes: ...

    async def response(self, chunks: ReadyChunks) -> dict[str, Any]: ...

    def events(self, ready: Sequence[TextChunk]) -> Iterator[dict[str, Any]]: ...

    def last_events(self) -> Iterator[dict[str, Any]]: ...

    def failure(self, error: EyasError) -> dict[str, Any]: ...

    def before(self, event: dict[str, Any]) -> str: ...


async def stream_events(
    writer: StreamWriter, chunks: ReadyChunks, name_of: Callable[[str], str]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a stream. A thread makes those of large chunks.

    Raises RequestFailed if a completion failed, and what `hold` of the writer raises.

    Args:
        name_of: the field of a parameter, for errors.
    """
    with named_by(name_of):
        async with aclosing(chunks):
            async for ready in chunks:
                events = writer.events(ready)
                is_large = _is_large(ready)
                while event := await asyncio.to_thread(next, events, None) if is_large else next(events, None):
                    yield event
        for event in writer.last_events():
            yield event


@dataclass
class ResponseWriter:
    """The choices of one request as they grow, and their usage. A prompt counts once, whatever its number of completions.

    Raises Overloaded, and InvalidRequest for more than fit.

    Attributes:
        prompts: their token ids.
        echoes: their texts, which begin the choices; empty without echo.
        new_parser: makes a parser of a choice's reasoning and tool calls; None if the text is all content.
        hold: counts bytes that are kept until the response is sent.
        num_reasoning_tokens, num_reasoning_ends: of all choices so far; the tokens that end a reasoning are no part of it.
    """

    body: CompletionBody | ChatBody
    id: str
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str] = ()
    new_parser: Callable[[], ChatParser] | None = None
    hold: Callable[[int], None] = lambda _: None
    created: int = field(default_factory=lambda: int(time.time()))
    num_reasoning_tokens: int = 0
    num_reasoning_ends: int = 0
    _parsers: dict[int, ChatParser] = field(default_factory=dict)
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _visible: set[int] = field(default_factory=set)
    _num_steps: Counter[int] = field(default_factory=Counter)
    _num_output_tokens: Counter[int] = field(default_factory=Counter)
    _num_cached_tokens: int = 0
    _num_reserved_bytes: int = 0
    _stats: GenerationStats = field(default_factory=GenerationStats)

    def __post_init__(self) -> None:
        self._wants_logprobs, self._counts_events = self.body.wants_logprobs, self.body.has_usage_in_events

    async def response(self, chunks: ReadyChunks) -> dict[str, Any]:
        """Return the whole response. Raises RequestFailed if a completion failed, and what `hold` raises."""
        deltas: defaultdict[int, list[TextDelta]] = defaultdict(list)
        with named_by(self.body.name_of):
            async with aclosing(chunks):
                async for ready in chunks:
                    deltas_of = partial(list[TextDelta], map(self._delta, ready))
                    new = await asyncio.to_thread(deltas_of) if _is_large(ready) else deltas_of()
                    for delta in new:
                        self._hold(delta)
                        kept = deltas[delta.index]
                        kept.append(delta)
                        if len(kept) == _MAX_DELTAS:
                            deltas[delta.index] = [_join(kept)]
        # in a thread: of many completions with log-probabilities it takes seconds
        return await asyncio.to_thread(self._response, [deltas[index] for index in sorted(deltas)])

    def _response(self, deltas: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        joined = list(map(_join, deltas))
        choices = [self._choice(delta, self._content(delta)) for delta in joined]
        return self._constants("chat.completion") | {"choices": choices} | self._prompt_ids(joined) | self._numbers()

    def deltas(self, ready: Sequence[TextChunk]) -> Iterator[TextDelta]:
        """Yield what each choice gets of the chunks that are ready."""
        for group in self._groups(ready):
            delta = _join(list(map(self._delta, group)))
            if any(chunk.chunk.prompt_logprobs for chunk in group):
                self._hold(delta)
            if not delta.is_empty:
                yield delta

    def events(self, ready: Sequence[TextChunk]) -> Iterator[dict[str, Any]]:
        """Yield an event for each delta. They lack what is the same in all, see `before`."""
        for delta in self.deltas(ready):
            *contents, last = self._event_contents(delta)
            usage = {"usage": self.token_counts()} if self._counts_events else {}
            for content in contents:
                choice = {"index": delta.index, **content, "logprobs": None, "finish_reason": None}
                yield {"choices": [choice]} | usage
            event = {"choices": [self._choice(delta, last)]} | usage
            yield event | self._prompt_ids([delta]) if self.body.return_token_ids else event

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the usage if it is asked for."""
        if self.body.ends_with_usage:
            yield {"choices": []} | self._numbers()

    def failure(self, error: EyasError) -> dict[str, Any]:
        """Return the event of an error after the first event."""
        return error_body(error)

    def before(self, event: dict[str, Any]) -> str:
        """Return what comes before the JSON of an event: the beginning of its object, which all but an error share."""
        return self._before_event if "choices" in event else "data: "

    end = b"data: [DONE]\n\n"

    @cached_property
    def _before_event(self) -> str:
        return "data: " + "".join(pieces(self._constants("chat.completion.chunk")))[:-1] + ","

    def reserve(self, hold: Callable[[int], None]) -> None:
        """Count the log-probabilities of the prompts before a verifier computes them. hold: counts all that is kept."""
        self.hold = hold
        if (num_top := self.body.num_prompt_logprobs) is not None:
            self._num_reserved_bytes = (_BYTES_PER_LOGPROB + _BYTES_PER_TOP_LOGPROB * num_top) * sum(map(len, self.prompts))
            self.hold(self._num_reserved_bytes)

    def _hold(self, delta: TextDelta) -> None:
        """Count a delta that is kept, as far as it is not reserved."""
        num_reserved = min(self._num_reserved_bytes, delta.num_bytes)
        self._num_reserved_bytes -= num_reserved
        self.hold(delta.num_bytes - num_reserved)

    def _groups(self, ready: Sequence[TextChunk]) -> Iterable[Sequence[TextChunk]]:
        """Group ready chunks by choice; each group becomes one event. A failure comes last, after what all choices got.

        Log-probabilities of parsed text are not joined: the writers of other APIs count the tokens of reasoning before them.
        """
        if len(ready) == 1:
            return [ready]
        ordered = sorted(ready, key=lambda chunk: chunk.chunk.finish_reason in _FAILURES)
        if self.new_parser is not None and self._wants_logprobs:
            return [[chunk] for chunk in ordered]
        groups: defaultdict[tuple[int, bool], list[TextChunk]] = defaultdict(list)
        for chunk in ordered:
            groups[chunk.chunk.index, chunk.chunk.finish_reason in _FAILURES].append(chunk)
        return groups.values()

    def _delta(self, chunk: TextChunk) -> TextDelta:
        inner, index = chunk.chunk, chunk.chunk.index
        if inner.finish_reason in _FAILURES:
            raise RequestFailed(inner.message or "the verifier ended the request before it was done")
        if index % self.body.n == 0 and not self._num_output_tokens[index]:  # only the first of several verifiers counts
            self._num_cached_tokens += inner.num_cached
        self._num_output_tokens[index] += len(inner.token_ids)
        if chunk.totals is not None and chunk.totals.stats is not None:
            self._stats.merge(chunk.totals.stats)
        verify_steps: tuple[dict[str, Any], ...] = ()
        if self.body.return_verify_steps and inner.token_ids:
            verify_steps = (verify_step_object(chunk, self._num_steps[index], partial(token_name, self.tokenizer)),)
            self._num_steps[index] += 1
        is_first = index not in self._visible
        echo = self.echoes[index // self.body.n] if self.echoes and is_first else ""
        prompt_logprobs = inner.prompt_logprobs if self.body.prompt_logprobs is not None else ()
        logprobs = inner.logprobs if prompt_logprobs else inner.prompt_logprobs + inner.logprobs
        offset = self._offsets[index]
        if logprobs:
            self._offsets[index] = self._text_offsets(index, logprobs, offset)[-1]
        delta = TextDelta(
            index=index,
            text=echo + chunk.text,
            logprobs=logprobs,
            offset=offset,
            finish_reason=inner.finish_reason,
            is_first=is_first,
            prompt_logprobs=prompt_logprobs,
            token_ids=inner.token_ids if self.body.return_token_ids else (),
            stop_reason=chunk.stop_reason,
            verify_steps=verify_steps,
        )
        if self.new_parser is not None:
            delta = self._parsed(delta, chunk, self.new_parser)
        if is_first and not delta.is_empty:
            self._visible.add(index)
        return delta

    def _parsed(self, delta: TextDelta, chunk: TextChunk, new_parser: Callable[[], ChatParser]) -> TextDelta:
        """Add to a delta what its text means, token by token, so that tokens of reasoning can be counted."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = new_parser()
        parser = self._parsers[delta.index]
        pieces = list[ChatMessage]()
        for text in chunk.token_texts:
            was_reasoning = parser.is_reasoning
            pieces += parser.pieces(text)
            self.num_reasoning_tokens += was_reasoning and parser.is_reasoning
            self.num_reasoning_ends += was_reasoning and not parser.is_reasoning
        pieces += parser.pieces(chunk.released_text)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            pieces += parser.last_pieces()
            if finish_reason == "stop" and parser.num_calls:
                finish_reason = "tool_calls"
        if isinstance(self.body, ChatBody) and not self.body.include_reasoning:
            pieces = [replace(piece, reasoning="") for piece in pieces]
        return replace(delta, messages=tuple(in_order(pieces)), finish_reason=finish_reason)

    def _text_offsets(self, index: int, logprobs: Sequence[TokenLogprob], offset: int) -> list[int]:
        prompt = self.prompts[index // self.body.n]
        begins_text = bool(self.echoes) or not self.tokenizer.has_text(prompt)
        return text_offsets(self.tokenizer, logprobs, offset, self.body.skip_special_tokens, begins_text)

    def _constants(self, chat_name: str) -> dict[str, Any]:
        """Return the beginning of a response, and of each event."""
        name = chat_name if self.body.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(self, delta: TextDelta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._wants_logprobs and self.body.is_chat:
            logprobs = chat_logprobs(self.tokenizer, delta.logprobs)
        elif self._wants_logprobs:
            offsets = self._text_offsets(delta.index, delta.logprobs, delta.offset)
            logprobs = completion_logprobs(self.tokenizer, delta.logprobs, offsets)
        choice = {"index": delta.index, **content, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.body.return_verify_steps:
            choice["verify_steps"] = list(delta.verify_steps)
        if delta.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_token_logprobs(self.tokenizer, delta.prompt_logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if delta.is_first and not self.body.is_chat:
                choice["prompt_token_ids"] = list(self.prompts[delta.index // self.body.n])
        return choice

    def _prompt_ids(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """Return the prompt's token ids where a response of a chat, or its first event, has them."""
        if self.body.is_chat and self.body.return_token_ids and any(delta.is_first for delta in deltas):
            return {"prompt_token_ids": list(self.prompts[0])}
        return {}

    def _content(self, delta: TextDelta) -> dict[str, Any]:
        """Return the text of a choice in a whole response."""
        if delta.messages is not None:
            return {"message": {"role": "assistant", "refusal": None} | whole_message(joined(delta.messages))}
        if self.body.is_chat:
            return {"message": {"role": "assistant", "content": delta.text, "refusal": None}}
        return {"text": delta.text}

    def _event_contents(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the text of a choice in one event; in several where content or reasoning follows a call."""
        if not self.body.is_chat:
            return [{"text": delta.text}]
        deltas = list(map(message_delta, delta.parts)) or [{}]
        if delta.is_first:
            deltas[0] = {"role": "assistant"} | (deltas[0] or {"content": ""})
        return [{"delta": one} for one in deltas]

    def token_counts(self) -> dict[str, Any]:
        """Return how many tokens all choices have so far."""
        num_prompt_tokens, num_output_tokens = sum(map(len, self.prompts)), self._num_output_tokens.total()
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens of all choices together."""
        stats = self._stats
        details = {
            "accepted_prediction_tokens": stats.num_accepted,
            "rejected_prediction_tokens": stats.num_drafted - stats.num_accepted,
            **({"reasoning_tokens": self.num_reasoning_tokens} if self.new_parser else {}),
        }
        return self.token_counts() | {"completion_tokens_details": details}

    def _numbers(self) -> dict[str, Any]:
        """Return the usage, and the numbers of speculation if they are asked for."""
        metrics = {"metrics": {"speculative_decoding": _speculation(self._stats)}} if self.body.return_speculation else {}
        return {"usage": self.usage()} | metrics


def _is_large(ready: Sequence[TextChunk]) -> bool:
    """Return whether log-probabilities and draft trees of chunks are too many for the event loop."""
    return sum(chunk.chunk.num_bytes for chunk in ready) > _LARGE_CHUNKS_BYTES


def _join(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return the deltas of a choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    messages = [message for delta in deltas for message in delta.messages or ()]
    return replace(
        deltas[0],
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        stop_reason=deltas[-1].stop_reason,
        messages=tuple(in_order(messages)) if deltas[0].messages is not None else None,
        verify_steps=tuple(step for delta in deltas for step in delta.verify_steps),
    )


def _speculation(stats: GenerationStats) -> dict[str, Any]:
    """Return speculation metrics with vLLM's names. Draft tokens are all nodes of the trees but their roots."""
    reached = [stats.num_verify_steps, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0,
        "acceptance_histogram": [here - further for here, further in pairwise(reached)],
        "num_spec_steps": stats.num_verify_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
    }
