"""Writes answers of Anthropic's Messages API, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from eyas.api.outputs import TextChunk
from eyas.errors import EyasError
from eyas.services.router.dispatch.generation import ReadyChunks
from eyas.services.router.http.errors import ANTHROPIC_PATH, error_body
from eyas.services.router.http.writers.json_blocks import event_name
from eyas.services.router.http.writers.openai import ResponseWriter, TextDelta, stream_events
from eyas.text.chat_message import ChatMessage

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# The type of an event that adds to a block, and what holds the addition, by the type of the block.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_BYTES_PER_EVENT = 256  # that are kept until the message is sent, estimated


@dataclass
class MessagesWriter:
    """Writer of a chat as Anthropic's message. chat: writes the chat.

    Content blocks are thinking, text, and one for each call of a tool. Clients send thinking back with its signature, and
    some drop it without one. Nothing here checks it.
    """

    chat: ResponseWriter
    _has_started: bool = False
    _blocks: list[_Block] = field(default_factory=list)
    _ending: dict[str, Any] = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.chat.id

    async def response(self, chunks: ReadyChunks) -> dict[str, Any]:
        """Return the whole message. Raises RequestFailed if the completion failed."""
        message = dict[str, Any]()
        async with aclosing(stream_events(self, chunks, self.chat.body.name_of)) as events:
            async for event in events:
                self.chat.hold(_BYTES_PER_EVENT)
                if event["type"] == "message_start":
                    message = event["message"]
                elif event["type"] == "content_block_delta":
                    self._blocks[event["index"]].add(event["delta"])
                elif event["type"] == "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        return message | {"content": [block.whole() for block in self._blocks]}

    def events(self, ready: Sequence[TextChunk]) -> Iterator[dict[str, Any]]:
        """Yield the events of the chunks that are ready. Raises RequestFailed if the completion failed."""
        for delta in self.chat.deltas(ready):
            if not self._has_started:
                self._has_started = True
                named = {"id": self.id, "type": "message", "role": "assistant", "model": self.chat.model, "content": []}
                usage = _usage(self.chat.token_counts() | {"completion_tokens": 0})
                yield {"type": "message_start", "message": named | self._ending | {"usage": usage}}
                yield {"type": "ping"}
            for message in delta.parts:
                yield from self._add(message)
            if delta.finish_reason:
                self._ending = _ending(delta)

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the message."""
        yield from self._end_block()
        yield {"type": "message_delta", "delta": self._ending, "usage": _usage(self.chat.usage())}
        yield {"type": "message_stop"}

    def failure(self, error: EyasError) -> dict[str, Any]:
        """Return the event of an error after the first event."""
        return error_body(error, ANTHROPIC_PATH)

    before = staticmethod(event_name)
    end = b""

    def _add(self, message: ChatMessage) -> Iterator[dict[str, Any]]:
        """Yield the events of what a chunk adds to the message."""
        if message.reasoning:
            yield from self._add_to("thinking", {"type": "thinking", "thinking": "", "signature": ""}, message.reasoning)
        if message.content:
            yield from self._add_to("text", {"type": "text", "text": ""}, message.content)
        for call in message.tool_calls:
            begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._add_to(call.index, begun, call.arguments)

    def _add_to(self, key: str | int, begun: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a text for the last block, or for a new one if that has another key."""
        if not self._blocks or self._blocks[-1].key != key:
            yield from self._end_block()
            self._blocks.append(_Block(key, begun))
            yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(begun)}
        if text:
            kind, name = _DELTAS[begun["type"]]
            yield self._delta({"type": kind, name: text})

    def _end_block(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the last block."""
        if not self._blocks:
            return
        if self._blocks[-1].key == "thinking":
            self._blocks[-1].begun["signature"] = self.id
            yield self._delta({"type": "signature_delta", "signature": self.id})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


@dataclass
class _Block:
    """A content block. key: its type, or the index of a call. begun: the block without its text."""

    key: str | int
    begun: dict[str, Any]
    parts: list[str] = field(default_factory=list)

    def add(self, delta: Mapping[str, str]) -> None:
        """Keep what an event adds."""
        self.parts.append(delta.get(_DELTAS[self.begun["type"]][1], ""))

    def whole(self) -> dict[str, Any]:
        """Return the block."""
        kind, text = self.begun["type"], "".join(self.parts)
        return self.begun | ({"input": _arguments(text)} if kind == "tool_use" else {kind: text})


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; what is no object, under the name "arguments"."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, allow_nan=False)  # Python reads NaN and infinity, which JSON cannot hold
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _ending(delta: TextDelta) -> dict[str, Any]:
    """Return why a message ended. Only a stop string is a stop sequence."""
    if isinstance(delta.stop_reason, str) and delta.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    return {"stop_reason": _STOP_REASONS.get(delta.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a chat. Anthropic counts cached input tokens by themselves."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }
