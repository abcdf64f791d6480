"""Anthropic's Messages API as a translation of chats: its bodies become a ChatBody, chats become its messages and events.

The shapes are those of https://docs.anthropic.com/en/api/messages and of its streaming events.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import FailFast, Field, model_validator

from eyas.errors import EyasError, InvalidRequest
from eyas.outputs import TextChunk
from eyas.services.router.http.bodies import StrictModel, Text, Texts, one_or_list
from eyas.services.router.http.errors import anthropic_error_body
from eyas.services.router.http.requests import ChatBody, SamplingBody, chat_body
from eyas.services.router.http.response_json import named_frame
from eyas.services.router.http.responses import ResponseWriter
from eyas.validation import MAX_INT

_PARTS = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
_BYTES_PER_EVENT = 256  # that are kept until the message is sent, estimated
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# Bodies


def _to_block(text: str) -> object:
    return {"type": "text", "text": text}


class ContentBlock(StrictModel):
    """A block of a message. Chat templates get thinking as the reasoning of its message; redacted thinking is left out."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Text | None = None
    id: Text = ""
    name: Text = ""
    input: dict[str, Any] | None = None
    tool_use_id: Text = ""
    content: Blocks = Field(default_factory=list)
    is_error: bool = False
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None
    caller: dict[str, Any] | None = None
    thinking: Text = ""
    signature: str = ""
    data: str = ""

    @model_validator(mode="after")
    def _check_parts(self) -> ContentBlock:
        for name in _PARTS.get(self.type, ()):
            if name not in self.model_fields_set:
                raise InvalidRequest(f"a block of the type {self.type!r} needs {name}; give it", name)
        return self


Blocks = Annotated[list[ContentBlock], FailFast(), one_or_list(ContentBlock, "blocks", _to_block)]


class InputMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(StrictModel):
    """A tool that the client runs. Tools that a server runs, such as web search, are refused by their type."""

    name: Text
    description: Text = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool = False
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool = False
    defer_loading: Literal[False] = False
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class AnthropicToolChoice(StrictModel):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text = ""
    disable_parallel_tool_use: bool = False


class OutputFormat(StrictModel):
    """What the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """effort: a variable of the chat template, reasoning_effort."""

    format: OutputFormat | None = None
    effort: Text = ""


class Thinking(StrictModel):
    """Return whether the model thinks before it answers, for its chat template. display has no effect.

    budget_tokens: most tokens of reasoning, of models that write it.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    display: Text | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            needs = "needs" if self.type == "enabled" else "has no"
            raise InvalidRequest(f"thinking of the type {self.type!r} {needs} budget_tokens", "thinking")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables by which chat templates turn the reasoning on and off."""
        thinks = self.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks}


class PromptBody(SamplingBody):
    """The body of /v1/messages/count_tokens, and what /v1/messages shares with it.

    cache_control, diagnostics, inference_geo and speed are accepted and have no effect.
    """

    MEANT: ClassVar[frozenset[str]] = frozenset({"thinking"})

    messages: Annotated[list[InputMessage], FailFast()] = Field(min_length=1)
    system: Blocks = Field(default_factory=list)
    tools: Annotated[list[AnthropicTool], FailFast()] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str = ""
    speed: str = ""
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None

    def chat(self) -> ChatBody:
        """Return the chat that this body asks for; its events have usage. Raises InvalidRequest."""
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name in self.model_fields_set}
        shared.pop("metadata", None)
        messages: list[dict[str, Any]] = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages += [turn for message in self.messages for turn in _turns(message)]
        variables = (self.thinking.template_variables if self.thinking else {}) | self.chat_template_kwargs
        more: dict[str, Any] = {"chat_template_kwargs": variables} if variables else {}
        if self.tools:
            more["tools"] = [_function(tool) for tool in self.tools]
        if self.tool_choice is not None:
            more |= _tool_choice(self.tool_choice)
        if self.output_config is not None:
            more |= _output_options(self.output_config)
        if self.messages[-1].role == "assistant":
            more["continue_final_message"] = True
        options = {"include_usage": True, "continuous_usage_stats": True}
        return chat_body(**(shared | more | {"messages": messages, "stream": True, "stream_options": options}))


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: Texts = Field(default_factory=list)

    def chat(self) -> ChatBody:
        """Return the chat that this body asks for; its events have usage. Raises InvalidRequest."""
        stop = [*self.stop_sequences, *self.stop]
        chat = super().chat().model_copy(update={"max_tokens": self.max_tokens, "stop": stop})
        if self.thinking is None or (budget := self.thinking.budget_tokens) is None:
            return chat
        if budget >= self.max_tokens:
            reason = f"thinking.budget_tokens is {budget}, and max_tokens is {self.max_tokens}; it must be less"
            raise InvalidRequest(reason, "thinking")
        return chat.model_copy(update={"thinking_token_budget": budget})


def _text(content: Sequence[ContentBlock]) -> str:
    for block in content:
        if block.type not in ("text", "thinking", "redacted_thinking"):
            raise InvalidRequest(f"a block of the type {block.type!r} has no place here; give text", "messages")
    return "\n".join(block.text for block in content if block.text)


def _turns(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that hold a message's blocks: results of tools each have their own."""
    calls = [_call(block) for block in message.content if block.type == "tool_use"]
    results = [block for block in message.content if block.type == "tool_result"]
    rest = [block for block in message.content if block.type not in ("tool_use", "tool_result")]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
    if rest or calls or not results:
        turn = {"role": message.role, "content": _text(rest)} | ({"tool_calls": calls} if calls else {})
        thinking = "\n".join(block.thinking for block in rest if block.thinking)
        yield turn | ({"reasoning_content": thinking} if thinking and message.role == "assistant" else {})


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _function(tool: AnthropicTool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    strict = {"strict": True} if tool.strict else {}
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema} | described | strict}


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": _TOOL_CHOICES.get(choice.type, named)} | parallel


def _output_options(config: OutputConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"reasoning_effort": config.effort} if config.effort else {}
    if config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return options


# Responses


@dataclass
class MessagesWriter:
    """Writes a chat as Anthropic's message. chat: writes the chat."""

    chat: ResponseWriter

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.chat.id

    async def response(self, chunks: AsyncGenerator[TextChunk, None]) -> dict[str, Any]:
        """Return the whole message, which its events make. Raises RequestFailed if the completion failed."""
        message, content = dict[str, Any](), list[_WholeBlock]()
        async with aclosing(self.events(chunks)) as events:
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

    async def events(self, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the message. Raises RequestFailed if the completion failed."""
        blocks, ending, usage = _Blocks(self.id), {"stop_reason": None, "stop_sequence": None}, None
        async with aclosing(self.chat.events(chunks)) as events:
            async for event in events:
                if usage is None:
                    yield {"type": "message_start", "message": self._message([], event["usage"] | {"completion_tokens": 0})}
                    yield {"type": "ping"}
                usage = event["usage"]
                for choice in event["choices"]:
                    for block_event in blocks.add(choice["delta"]):
                        yield block_event
                    if choice["finish_reason"]:
                        ending = _ending(choice)
        for block_event in blocks.close():
            yield block_event
        assert usage is not None
        yield {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def frame(self, event: dict[str, Any]) -> list[bytes]:
        """Return an event as a stream has it."""
        return named_frame(event)

    def last_frames(self, error: EyasError | None = None) -> Iterator[list[bytes]]:
        """Yield what ends a stream. error: what failed after the first event."""
        if error is not None:
            yield self.frame(anthropic_error_body(error))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        named = {"id": self.id, "type": "message", "role": "assistant", "model": self.chat.model, "content": content}
        return named | {"stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}


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
                yield from self._start(call["index"], _tool_use(call) | {"input": {}})
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


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


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
