"""Bodies of OpenAI's Responses API, which become a ChatBody.

Responses are not stored. The shapes are those of https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator

from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.base import StrictModel, Text, one_or_list
from eyas.services.router.http.bodies.converted_chats import chat_with
from eyas.services.router.http.bodies.openai import ChatBody, SamplingBody

_LOGPROBS = "message.output_text.logprobs"
_PARTS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class TextPart(StrictModel):
    """A part of a message. annotations and logprobs come with the output of earlier responses, and have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _to_part(text: str) -> object:
    return {"type": "input_text", "text": text}


def _to_item(text: str) -> object:
    return {"role": "user", "content": text}


Parts = Annotated[list[TextPart], FailFast(), one_or_list(TextPart, "parts", _to_part)]


class InputItem(StrictModel):
    """An item of the conversation. Chat templates get reasoning with the assistant's message or calls that follow it.

    Summaries and encrypted content are left out.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = Field(default_factory=list)
    call_id: Text = ""
    name: Text = ""
    arguments: Text = ""
    output: Parts = Field(default_factory=list)
    id: str = ""
    status: str = ""
    phase: str = ""
    namespace: str = ""
    summary: list[Any] | None = None
    encrypted_content: str = ""

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("type") != "reasoning":
            return data
        parts = data.get("content")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        return {"type": "reasoning", "content": [_to_part(text) for text in texts if isinstance(text, str)]}

    @model_validator(mode="after")
    def _check_parts(self) -> InputItem:
        for name in _PARTS.get(self.type, ()):
            if name not in self.model_fields_set:
                raise InvalidRequest(f"an item of the type {self.type!r} needs {name}; give it", "input")
        return self


Items = Annotated[list[InputItem], FailFast(), one_or_list(InputItem, "items", _to_item)]


class FunctionTool(StrictModel):
    """A function that the client runs. Tools that a server runs, such as web_search, are refused by their type."""

    type: Literal["function"]
    name: Text
    description: Text = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    defer_loading: Literal[False] = False


class TextConfig(StrictModel):
    """Constraint that the text must match: text, json_object or json_schema. verbosity has no effect."""

    format: dict[str, Any] | None = None
    verbosity: str = ""


class Reasoning(StrictModel):
    """Reasoning settings of OpenAI's API.

    Attributes:
        effort: a variable of the chat template, reasoning_effort. The others have no effect.
    """

    effort: Text = ""
    summary: str = ""
    generate_summary: str = ""
    context: str = ""
    mode: str = ""


class ResponseStreamOptions(StrictModel):
    """Options of a stream, without effect."""

    include_obfuscation: bool = False


class ResponsesBody(SamplingBody):
    """The body of /v1/responses. include: only log-probabilities have an effect."""

    input: Items
    instructions: Text = ""
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] = Field(default_factory=list)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], FailFast()] = Field(default_factory=list)
    tool_choice: Any = None  # a chat's tool_choice reads it
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    thinking_token_budget: int | None = None

    @classmethod
    def translated(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name in ("previous_response_id", "conversation", "prompt"):
            if data.get(name) is not None:
                raise InvalidRequest(f"{name} refers to what is stored, and nothing is stored here; send it as input", name)
        return super().translated(data)

    def chat(self) -> ChatBody:
        """Return the chat that this body asks for. Raises InvalidRequest."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        has_logprobs = _LOGPROBS in self.include
        return chat_with(
            self,
            messages=[*instructions, *_messages(self.input)],
            max_tokens=self.max_output_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            thinking_token_budget=self.thinking_token_budget,
            tools=[_chat_tool(tool) for tool in self.tools],
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=_response_format(self.text.format) if self.text and self.text.format is not None else None,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
        )

    def name_of(self, param: str) -> str:
        """Return this body's name of a field of its chat."""
        names = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
        return names.get(param.partition("[")[0].partition(".")[0], param)


def _messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Calls follow the assistant's text in one message."""
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        thought = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
        if item.type == "reasoning":
            thoughts += [part.text for part in item.content]
            continue
        if item.type == "message":
            messages.append({"role": item.role, "content": _joined(item.content)})
            if item.role == "assistant":
                messages[-1] |= thought
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif item.type == "function_call":
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **thought})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        thoughts = []
    if not messages:
        raise InvalidRequest("input holds no message; give one", "input")
    return messages


def _joined(parts: list[TextPart]) -> str:
    return "\n".join(part.text for part in parts)


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_defaults=True)
    return {"type": "function", "function": function}


def _response_format(config: dict[str, Any]) -> dict[str, Any]:
    """Return the format as chats have it, where the schema is an object of its own."""
    if config.get("type") != "json_schema":
        return config
    return {"type": "json_schema", "json_schema": {name: value for name, value in config.items() if name != "type"}}
