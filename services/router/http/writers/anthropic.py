"""Writes answers of Anthropic's Messages API, whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn

from eyas.api.outputs import TextChunk
from eyas.errors import EyasError
from eyas.services.router.dispatch.generation import ReadyChunks
from eyas.services.router.http.errors import ANTHROPIC_PATH, error_body
from eyas.services.router.http.writers.json_blocks import event_name
from eyas.services.router.http.writers.openai import ResponseWriter, stream_events

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
_BYTES_PER_EVENT = 256  # that are kept until the message is sent, estimated


@dataclass
class MessagesWriter:
    """Writer of a chat as Anthropic's message. chat: writes the chat."""

    chat: ResponseWriter
    _has_started: bool = False
    _ending: dict[str, Any] = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})

    def __post_init__(self) -> None:
        self._blocks = _Blocks(self.id)

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.chat.id

    async def response(self, chunks: ReadyChunks) -> dict[str, Any]:
        """Return the whole message, which its events make. Raises RequestFailed if the completion failed."""
        message, content = dict[str, Any](), list[_WholeBlock]()
        async with aclosing(stream_events(self, chunks, self.chat.body.name_of)) as events:
            async for event in events:
                self.chat.hold(_BYTES_PER_EVENT)
                if event["type"] == "message_start":
                    message = event["message"]
                elif event["type"] == "content_block_start":
                    content.append(_WholeBlock(event["content_block"]))
                elif event["type"] == "content_block_delta":
                    content[-1].add(event["delta"])
                elif event["type"] == "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        return message | {"content": [block.whole() for block in content]}

    def events(self, ready: Sequence[TextChunk]) -> Iterator[dict[str, Any]]:
        """Yield the events of the chunks that are ready. Raises RequestFailed if the completion failed."""
        for event in self.chat.events(ready):
            if not self._has_started:
                self._has_started = True
                named = {"id": self.id, "type": "message", "role": "assistant", "model": self.chat.model, "content": []}
                usage = _usage(event["usage"] | {"completion_tokens": 0})
                yield {"type": "message_start", "message": named | self._ending | {"usage": usage}}
                yield {"type": "ping"}
            for choice in event["choices"]:
                yield from self._blocks.add(choice["delta"])
                if choice["finish_reason"]:
                    self._ending = _ending(choice)

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the message."""
        yield from self._blocks.close()
        (ending,) = self.chat.last_events()
        yield {"type": "message_delta", "delta": self._ending, "usage": _usage(ending["usage"])}
        yield {"type": "message_stop"}

    def failure(self, error: EyasError) -> dict[str, Any]:
        """Return the event of an error after the first event."""
        return error_body(error, ANTHROPIC_PATH)

    before = staticmethod(event_name)
    end = b""


class _Blocks:
    """The content blocks of a stream: thinking, text, and one for each call of a tool. One is open at a time.

    Clients send thinking back with its signature, and some drop it without one. Nothing here checks it.
    """

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._index = -1
        self._open: str | int = ""  # "thinking", "text", or the index of a call

    def add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of what a chunk adds to the message."""
        if thinking := delta.get("reasoning_content"):
            if self._open != "thinking":
                yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thinking})
        if text := delta.get("content"):
            if self._open != "text":
                yield from self._start("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            if self._open != call["index"]:
                tool = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._start(call["index"], tool)
            if arguments := call["function"].get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._open != "":
            yield {"type": "content_block_stop", "index": self._index}
            self._open = ""

    def _start(self, kind: str | int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._index, self._open = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _WholeBlock:
    """A content block, from the events of a stream."""

    def __init__(self, begun: dict[str, Any]) -> None:
        self._begun = begun
        self._parts: list[str] = []

    def add(self, delta: Mapping[str, str]) -> None:
        """Take an event's delta."""
        if delta["type"] == "signature_delta":
            self._begun |= {"signature": delta["signature"]}
        else:
            self._parts.append(delta[_DELTAS[self._begun["type"]]])

    def whole(self) -> dict[str, Any]:
        """Return the block."""
        kind, text = self._begun["type"], "".join(self._parts)
        return self._begun | ({"input": _arguments(text)} if kind == "tool_use" else {kind: text})


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; what is no object, under the name "arguments"."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant, parse_float=_finite_float)
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def _refuse_constant(text: str) -> NoReturn:
    """Refuse NaN and infinity, which Python reads but JSON cannot hold."""
    raise ValueError(text)


def _ending(choice: dict[str, Any]) -> dict[str, Any]:
    """Return why a message ended. Only a stop string is a stop sequence."""
    stop = choice.get("stop_reason")
    if isinstance(stop, str) and choice["finish_reason"] == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a chat. Anthropic counts cached input tokens by themselves."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }
