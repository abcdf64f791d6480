"""Tools in chats: their definitions, the choice among them, earlier calls, and calls in answers.

`eyas.text.chat_parser` reads calls from the output, and `tool_constraints` says what the output must match.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.base import StrictModel, check_json
from eyas.text.chat_message import ChatMessage, ToolCall

MAX_TOOLS = 512

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CHOICE = """'none', 'auto', 'required', {"type": "function", "function": {"name": ...}}"""
_ALLOWED = """{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": ...}]}"""


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 128 letters, digits, underscores, dots or dashes")
    return name


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of the type 'object'; put the arguments into its properties")
    try:
        json.dumps(schema).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("holds half of a surrogate pair, or is nested too deeply") from None
    return schema


Name = Annotated[str, AfterValidator(_check_name)]


class FunctionDefinition(StrictModel):
    """A function.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: calls always match the schema.
    """

    name: Name
    description: str = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] = Field(default_factory=dict)
    strict: bool = False

    @property
    def template_value(self) -> dict[str, Any]:
        """The function as templates expect it. Some of them read its properties without asking whether there are any."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, "description": self.description, "parameters": parameters}


class Tool(StrictModel):
    """A tool that the client runs."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(StrictModel):
    """The function of an earlier call. arguments: JSON as text, as it came; also an object."""

    name: str
    arguments: Annotated[str | dict[str, Any], BeforeValidator(check_json)] = ""


class EarlierCall(StrictModel):
    """A call in an assistant's message. index: of deltas, without effect."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0


@dataclass(frozen=True)
class ToolChoice:
    """Choice whether the model calls tools.

    Attributes:
        names: those that it may call; empty: all.
        is_single: exactly one call.
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()
    is_single: bool = False


def _to_choice(value: object) -> object:
    """Read OpenAI's forms of a choice, of chats and of responses: a mode, one function, or several allowed ones."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("required", (name,), is_single=True)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)} | {"type": "allowed_tools", **allowed}:
            return _allowed_choice(allowed)
    raise ValueError(f"must be {_CHOICE}, or {_ALLOWED}")


def _allowed_choice(allowed: Mapping[Any, Any]) -> ToolChoice:
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
            names = tuple(map(_allowed_name, tools))
            if names and all(names):
                return ToolChoice(mode, names)
    raise ValueError(f"must be {_ALLOWED}, with at least one tool")


def _allowed_name(tool: object) -> str:
    """Return the name in an entry of allowed_tools; empty if it has none."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return ""


Choice = Annotated[ToolChoice, BeforeValidator(_to_choice, json_schema_input_type=str | dict[str, Any])]


class ToolFields(StrictModel):
    """The fields of a chat about tools. parallel_tool_calls: several calls in one message are allowed."""

    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Choice = ToolChoice("auto")
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools]
        if twice := next((name for name, number in Counter(names).items() if number > 1), None):
            raise InvalidRequest(f"two tools have the name {twice!r}; give each its own", "tools")
        if self.tool_choice.mode == "required" and not names:
            raise InvalidRequest("tool_choice asks for a call, and there are no tools; give tools", "tool_choice")
        if unknown := next((name for name in self.tool_choice.names if name not in names), None):
            raise InvalidRequest(f"tool_choice names {unknown[:80]!r}, which is not among the tools", "tool_choice")
        return self

    @property
    def called_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        choice = self.tool_choice
        if choice.mode == "none":
            return []
        return [tool for tool in self.tools if not choice.names or tool.function.name in choice.names]

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as templates expect them, with all keys; None without any, and if none may be called."""
        shown = self.tools if self.tool_choice.mode != "none" else []
        return [{"type": "function", "function": tool.function.template_value} for tool in shown] or None

    @property
    def max_calls(self) -> int | None:
        """Most calls in one message; None if there is no limit."""
        return None if self.parallel_tool_calls and not self.tool_choice.is_single else 1


def whole_message(message: ChatMessage) -> dict[str, Any]:
    """Return the fields of a whole message. reasoning is vLLM's newer name."""
    is_content = message.content or not (message.tool_calls or message.reasoning)
    reasoning = message.reasoning or None
    fields = {"content": message.content if is_content else None, "reasoning_content": reasoning, "reasoning": reasoning}
    calls = [_call_fields(call) for call in message.tool_calls]
    return fields | ({"tool_calls": calls} if calls else {})


def message_delta(message: ChatMessage) -> dict[str, Any]:
    """Return what an event adds to a message."""
    fields: dict[str, Any] = {}
    if message.reasoning:
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.content:
        fields["content"] = message.content
    if message.tool_calls:
        fields["tool_calls"] = [{"index": call.index} | _call_fields(call) for call in message.tool_calls]
    return fields


def _call_fields(call: ToolCall) -> dict[str, Any]:
    """Return a call, or what an event adds to one: id, type and name are in its first event only."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
