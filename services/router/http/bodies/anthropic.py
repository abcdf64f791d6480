"""Bodies of Anthropic's Messages API, which become a ChatBody.

The shapes are those of https://docs.anthropic.com/en/api/messages and of its streaming events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, model_validator

from eyas.api.validation import MAX_INT
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.base import StrictModel, Text, Texts, one_or_list
from eyas.services.router.http.bodies.converted_chats import chat_with
from eyas.services.router.http.bodies.openai import ChatBody, SamplingBody

_PARTS = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


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
    """Choice of the tools that are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text = ""
    disable_parallel_tool_use: bool = False


class OutputFormat(StrictModel):
    """Constraint that the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Output settings of Anthropic's API.

    Attributes:
        effort: a variable of the chat template, reasoning_effort.
    """

    format: OutputFormat | None = None
    effort: Text = ""


class Thinking(StrictModel):
    """Switch of the thinking before an answer, for the chat template. display has no effect.

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
        """Return the chat that this body asks for. Raises InvalidRequest."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        return chat_with(
            self,
            messages=[*system, *(turn for message in self.messages for turn in _turns(message))],
            metadata=None,  # here it may hold more than texts
            chat_template_kwargs=(self.thinking.template_variables if self.thinking else {}) | self.chat_template_kwargs,
            tools=[_function(tool) for tool in self.tools],
            continue_final_message=self.messages[-1].role == "assistant",
            **(_tool_choice(self.tool_choice) if self.tool_choice else {}),
            **(_output_options(self.output_config) if self.output_config else {}),
        )


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: Texts = Field(default_factory=list)

    def chat(self) -> ChatBody:
        """Return the chat that this body asks for. Raises InvalidRequest."""
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
    function = tool.model_dump(include={"name", "description", "strict"})
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


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
