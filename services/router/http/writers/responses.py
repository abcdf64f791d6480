"""Writes answers of the Responses API, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.api.outputs import TextChunk
from eyas.errors import EyasError
from eyas.services.router.dispatch.generation import ReadyChunks
from eyas.services.router.http.bodies.responses import ResponsesBody
from eyas.services.router.http.writers.json_blocks import event_name, num_values
from eyas.services.router.http.writers.logprobs import chat_logprobs
from eyas.services.router.http.writers.openai import ResponseWriter, stream_events
from eyas.text.chat_message import ChatMessage

# Estimates of the memory of what is kept until the last event: of a chunk's text, and of a value of JSON.
_BYTES_PER_CHUNK, _BYTES_PER_VALUE = 128, 96


@dataclass
class ResponsesWriter:
    """Writer of a chat as OpenAI's response. chat: writes the chat."""

    body: ResponsesBody
    chat: ResponseWriter
    _sequence_number: int = 0
    _items: list[_Item] = field(default_factory=list)
    _held: list[dict[str, Any]] = field(default_factory=list)
    _num_reasoning_tokens: int = 0
    _finish_reason: str = "stop"

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.chat.id

    async def response(self, chunks: ReadyChunks) -> dict[str, Any]:
        """Return the whole response. Raises RequestFailed if the completion failed."""
        response: dict[str, Any] = {}
        async with aclosing(stream_events(self, chunks, self.chat.body.name_of)) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    def events(self, ready: Sequence[TextChunk]) -> Iterator[dict[str, Any]]:
        """Yield the events of the chunks that are ready. Raises RequestFailed if the completion failed."""
        for delta in self.chat.deltas(ready):
            if not self._sequence_number:
                yield self._event("response.created", response=self._response("in_progress"))
                yield self._event("response.in_progress", response=self._response("in_progress"))
            *before, last = delta.parts or (ChatMessage(),)
            for message in before:
                yield from self._add(message)
            yield from self._add(last, chat_logprobs(self.chat.tokenizer, delta.logprobs)["content"])
            self._finish_reason = delta.finish_reason or self._finish_reason

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the response."""
        yield from self._add_held()
        response = self._ended(self._finish_reason, self.chat.usage())
        if self._items:
            yield from self._done(self._items[-1])
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: EyasError) -> dict[str, Any]:
        """Return the event of an error after the first event."""
        reason = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=self._response("failed") | {"error": reason})

    before = staticmethod(event_name)
    end = b""

    def _add(self, message: ChatMessage, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
        """Take what a chunk adds; yield its events.

        Log-probabilities of tokens without visible text wait for the text after them. Those of reasoning have no place.
        """
        num_reasoning = self.chat.num_reasoning_tokens + self.chat.num_reasoning_ends - self._num_reasoning_tokens
        if num_reasoning:
            self._held = []
            self._num_reasoning_tokens += num_reasoning
        entries = logprobs[num_reasoning:]
        self._held += entries
        self.chat.hold(_BYTES_PER_CHUNK + _BYTES_PER_VALUE * num_values(entries))
        if message.reasoning:
            if not self._items or self._items[-1].kind != "reasoning":
                yield from self._begin(_Item("reasoning", f"rs_{self.id}_{len(self._items)}"))
            self._items[-1].add(message.reasoning)
            yield self._event("response.reasoning_text.delta", **self._place, delta=message.reasoning)
        if message.content:
            yield from self._add_text(message.content)
        for call in message.tool_calls:
            if not self._items or self._items[-1].call != call.index:
                id_ = f"fc_{self.id}_{len(self._items)}"
                yield from self._begin(_Item("function_call", id_, call.index, call.id, call.name))
            if call.arguments:
                self._items[-1].add(call.arguments)
                yield self._event("response.function_call_arguments.delta", **self._place, delta=call.arguments)
            self._held = []

    def _add_text(self, text: str) -> Iterator[dict[str, Any]]:
        """Add text to the message, with the log-probabilities that wait."""
        if not self._items or self._items[-1].kind != "message":
            yield from self._begin(_Item("message", f"msg_{self.id}_{len(self._items)}"))
        entries, self._held = self._held, []
        self._items[-1].add(text)
        self._items[-1].logprobs += entries
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=entries)

    def _add_held(self) -> Iterator[dict[str, Any]]:
        """Add the log-probabilities of tokens at the end that show no text."""
        if self._held and (not self._items or self._items[-1].kind == "message"):
            yield from self._add_text("")

    def _begin(self, item: _Item) -> Iterator[dict[str, Any]]:
        """Yield the end of the item before, and the beginning of this one."""
        if self._items:
            yield from self._done(self._items[-1])
        self._items.append(item)
        added = item.json(is_done=False)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=added)
        if item.kind == "message":
            yield self._event("response.content_part.added", **self._place, part=_Item("message", "").part)

    def _done(self, item: _Item) -> Iterator[dict[str, Any]]:
        place = self._place
        if item.kind == "message":
            yield self._event("response.output_text.done", **place, text=item.text, logprobs=item.logprobs)
            yield self._event("response.content_part.done", **place, part=item.part)
        elif item.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **place, text=item.text)
        else:
            yield self._event("response.function_call_arguments.done", **place, name=item.name, arguments=item.text)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item.json())

    @property
    def _place(self) -> dict[str, Any]:
        """Return where the last item is."""
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}

    def _ended(self, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as it ended. Its last item is incomplete if the limit of tokens ended it."""
        if finish_reason != "length":
            return self._response("completed", usage)
        if self._items:
            self._items[-1].status = "incomplete"
        return self._response("incomplete", usage) | {"incomplete_details": {"reason": "max_output_tokens"}}

    def _response(self, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body, chat = self.body, self.chat
        format_ = body.text.format if body.text and body.text.format else {"type": "text"}
        return {
            "id": self.id,
            "object": "response",
            "created_at": chat.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": chat.model,
            "output": [item.json() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort or None if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": format_},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(usage) if usage else None,
            "user": body.user or None,
        }


@dataclass
class _Item:
    """An item of the output. call: index of a call of a function, whose arguments are `text`."""

    kind: Literal["message", "reasoning", "function_call"]
    id: str
    call: int | None = None
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: str = "completed"
    _parts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Take a piece of the text."""
        self._parts.append(text)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    @property
    def part(self) -> dict[str, Any]:
        """The text of a message."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def json(self, is_done: bool = True) -> dict[str, Any]:
        """Return the item; before it is done, without its text."""
        named = {"id": self.id, "status": self.status if is_done else "in_progress"}
        if self.kind == "message":
            return named | {"type": "message", "role": "assistant", "content": [self.part] if is_done else []}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if is_done else []
            return named | {"type": "reasoning", "summary": [], "content": content}
        function = {"call_id": self.call_id, "name": self.name, "arguments": self.text if is_done else ""}
        return named | {"type": "function_call", **function}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"].get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
