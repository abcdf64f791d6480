"""Tools in chats: their definitions, the choice among them, earlier calls, what the output must match, and calls in answers.

`eyas.chat_output` reads calls from the output. To constrain the calls of another format, write a method like `_hermes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from eyas.chat_output import THINK_TAGS, ChatFormat, ChatMessage, ChatParser, ToolCall
from eyas.errors import InvalidRequest
from eyas.request import StructuredOutputs
from eyas.services.router.http.bodies import StrictModel
from eyas.tokenizer import Tokenizer

MAX_TOOLS = 512
PROMPT_END_TOKENS = 32

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CHOICE = """'none', 'auto', 'required', {"type": "function", "function": {"name": ...}}"""
_ALLOWED = """{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": ...}]}"""

Format = dict[str, Any]  # of a structural tag


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
    """A function. parameters: JSON schema of its arguments. strict: calls always match the schema."""

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
    arguments: str | dict[str, Any] = ""


class EarlierCall(StrictModel):
    """A call in an assistant's message. index: of deltas, without effect."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model calls tools. names: those that it may call; empty: all. is_single: exactly one call."""

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
        if twice := next((name for name in names if names.count(name) > 1), None):
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


def message_delta(message: ChatMessage, is_first: bool) -> dict[str, Any]:
    """Return what an event adds to a message."""
    fields: dict[str, Any] = {}
    if message.reasoning:
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.content or (is_first and not message.reasoning and not message.tool_calls):
        fields["content"] = message.content
    if message.tool_calls:
        fields["tool_calls"] = [{"index": call.index} | _call_fields(call) for call in message.tool_calls]
    return fields


def _call_fields(call: ToolCall) -> dict[str, Any]:
    """Return a call, or what an event adds to one: id, type and name are in its first event only."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatOutput:
    """How the output of one chat is constrained and read.

    Attributes:
        kept_tokens: special tokens that its text needs.
    """

    def __init__(
        self, fields: ToolFields, model: str, form: ChatFormat, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> None:
        """form: of the model. prompt: its token ids, whose end shows where the output begins.

        Raises InvalidRequest if there are tools, and no format of their calls.
        """
        tools, mode = fields.called_tools, fields.tool_choice.mode
        if mode == "auto" and tools and not form.tool_call_parser:
            reason = (
                f"the chat template of {model!r} shows no format of tool calls; set tool_call_parser in the router's models"
            )
            raise InvalidRequest(f"{reason}, or force a call with tool_choice", "tools")
        if mode == "required" and not form.tool_call_parser:
            form = replace(form, tool_call_parser="hermes")
        if not tools and form.tool_call_parser != "openai":
            form = replace(form, tool_call_parser="")
        self._fields = fields
        self._form = form
        self._tokenizer = tokenizer
        self._prompt_end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        self.kept_tokens = tokenizer.special_ids(form.special_tokens)

    @property
    def new_parser(self) -> Callable[[], ChatParser] | None:
        """Makes parsers of the completions; None if their text is all content."""
        if self._form == ChatFormat():
            return None
        tools = {tool.function.name: tool.function.parameters for tool in self._fields.called_tools}
        return lambda: self._form.parser(self._prompt_end, tools, self._fields.max_calls)

    def constraint(self, given: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return what the output must match. given: what other fields of the request ask for."""
        in_reasoning = self._form.begins_with_reasoning(self._prompt_end)
        return output_constraint(self._fields, self._form, in_reasoning, given, self._is_special)

    def _is_special(self, text: str) -> bool | None:
        token = self._tokenizer.tokenizer.token_to_id(text)
        return None if token is None else self._tokenizer.is_special(token)


def output_constraint(
    fields: ToolFields,
    form: ChatFormat,
    in_reasoning: bool,
    given: StructuredOutputs | None,
    is_special: Callable[[str], bool | None],
) -> StructuredOutputs | None:
    """Return what the output must match: a call where one is forced, calls of `strict` tools, and what is asked for.

    Args:
        fields: the tools, and the choice among them.
        form: how the model writes calls and reasoning.
        in_reasoning: whether the output begins inside the reasoning.
        given: what the content must match, from other fields of the request.
        is_special: whether a text is a special token of the model; None if it is no token.
    """
    tools, mode = fields.called_tools, fields.tool_choice.mode
    writer = _TagWriter(form, is_special, tools, fields.max_calls is None)
    content = _content_format(given)
    if tools and mode == "required":
        return _structured(writer.after_reasoning(writer.calls(), in_reasoning))
    if given is not None:
        if content is None:
            return given
        if tools and form.tool_call_parser:
            content = writer.content_or_calls(content)
        elif not form.reasoning_parser:
            return given
        return replace(
            _structured(writer.after_reasoning(content, in_reasoning, is_content=True)), any_whitespace=given.any_whitespace
        )
    if fields.tool_choice.names or any(tool.function.strict for tool in tools):
        return _structured(writer.after_reasoning(writer.text_or_calls(), in_reasoning, is_content=True))
    return None


def _structured(format_: Format) -> StructuredOutputs:
    tag = json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)
    return StructuredOutputs(structural_tag=tag, any_whitespace=False)


def _content_format(given: StructuredOutputs | None) -> Format | None:
    """Return a constraint as part of a structural tag; None if it is none, or of a kind that cannot be a part."""
    if given is None:
        return None
    if given.json:
        return {"type": "json_schema", "json_schema": json.loads(given.json)}
    if given.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if given.regex:
        return {"type": "regex", "pattern": given.regex}
    if given.choice:
        return {"type": "or", "elements": [_text(choice) for choice in given.choice]}
    return None


@dataclass(frozen=True)
class _TagWriter:
    """Writes structural tags, as of xgrammar, for the calls of a model's format."""

    form: ChatFormat
    is_special: Callable[[str], bool | None]
    tools: Sequence[Tool]
    is_parallel: bool

    def calls(self) -> Format:
        """Return the format of one call or more."""
        match self.form.tool_call_parser:
            case "llama3_json":
                return self._separated([self._object(tool, "parameters") for tool in self.tools], "; ")
            case "mistral":
                return self._mistral()
            case "openai":
                return _sequence(_star(self._message()), _or([self._channel_call(tool) for tool in self.tools]))
        return self._separated([self._hermes(tool) for tool in self.tools], "\n")

    def content_or_calls(self, content: Format) -> Format:
        """Return the format of either. Each begins with characters of its own, as llguidance does not go back."""
        match self.form.tool_call_parser:
            case "llama3_json":
                return _or([content, _sequence(self._marker("<|python_tag|>"), self.calls())])
            case "openai":
                final = _sequence(*self._header("final"), content)
                return _sequence(_star(self._message()), _or([final, *map(self._channel_call, self.tools)]))
        return _or([content, self.calls()])

    def text_or_calls(self) -> Format:
        """Return the format of free text in which every call is valid."""
        match self.form.tool_call_parser:
            case "llama3_json":
                tagged = _sequence(self._marker("<|python_tag|>"), self.calls())
                text = {"type": "regex", "pattern": r"[^{\s](.|\n)*"}
                return _or([self.calls(), tagged, {"type": "optional", "content": text}])
            case "mistral":
                if self.is_special("[TOOL_CALLS]"):
                    return _sequence(_ANY, {"type": "optional", "content": self._mistral()})
                return self._triggered("[TOOL_CALLS]", "[", "]")
            case "openai":
                final = _sequence(*self._header("final"), _ANY)
                calls = [self._channel_call(tool) for tool in self.tools]
                return _sequence(_star(self._message()), _or([final, *calls]))
        if self.is_special("<tool_call>"):
            return _sequence(_ANY, {"type": "optional", "content": self.calls()})
        return self._triggered("<tool_call>", "\n", "\n</tool_call>")

    def _triggered(self, marker: str, before: str, after: str) -> Format:
        """Return the format of text in which an object with a call follows each marker."""
        tags = [
            {
                "type": "tag",
                "begin": marker + before + _begin(tool, "arguments"),
                "content": _schema(tool, is_free=True),
                "end": "}" + after,
            }
            for tool in self.tools
        ]
        stop = not self.is_parallel
        return {"type": "triggered_tags", "triggers": [marker], "tags": tags, "stop_after_first": stop}

    def after_reasoning(self, format_: Format, in_reasoning: bool, is_content: bool = False) -> Format:
        """Return a format that reasoning may precede; it must, if it has begun. is_content: not a call.

        The messages of gpt-oss need channels.
        """
        if self.form.reasoning_parser == "openai_gptoss" and is_content and format_.get("type") != "sequence":
            return _sequence(_star(self._message()), *self._header("final"), format_)
        if self.form.reasoning_parser not in THINK_TAGS:
            return format_
        start, end = THINK_TAGS[self.form.reasoning_parser]
        reasoning = _sequence(*self._text_until(end), {"type": "optional", "content": _text("\n\n")})
        if in_reasoning:
            return _sequence(reasoning, format_)
        return _sequence({"type": "optional", "content": _sequence(self._marker(start), reasoning)}, format_)

    def _marker(self, text: str) -> Format:
        return {"type": "token", "token": text} if self.is_special(text) else _text(text)

    def _text_until(self, marker: str) -> list[Format]:
        """Return free text and the marker that ends it."""
        if self.is_special(marker):
            return [_ANY, self._marker(marker)]
        return [{"type": "any_text"}, _text(marker)]

    def _separated(self, calls: list[Format], separator: str) -> Format:
        one = _or(calls)
        if not self.is_parallel:
            return one
        return _sequence(one, _star(_sequence(_text(separator), one)))

    def _object(self, tool: Tool, key: str) -> Format:
        return _sequence(_text(_begin(tool, key)), _schema(tool), _text("}"))

    def _hermes(self, tool: Tool) -> Format:
        begin, end = self._marker("<tool_call>"), self._marker("</tool_call>")
        return _sequence(begin, _text("\n"), self._object(tool, "arguments"), _text("\n"), end)

    def _mistral(self) -> Format:
        """Return the newer form with [ARGS] if the vocabulary has it."""
        marker, arguments = self._marker("[TOOL_CALLS]"), self._marker("[ARGS]")
        if self.is_special("[ARGS]") is None:
            objects = self._separated([self._object(tool, "arguments") for tool in self.tools], ", ")
            return _sequence(marker, _text("["), objects, _text("]"))
        one = _or([_sequence(marker, _text(tool.function.name), arguments, _schema(tool)) for tool in self.tools])
        return {"type": "plus", "content": one} if self.is_parallel else one

    def _header(self, channels: str) -> list[Format]:
        channel = {"type": "regex", "pattern": channels}
        return [self._marker("<|channel|>"), channel, self._marker("<|message|>")]

    def _message(self) -> Format:
        """Return the format of a message of gpt-oss that another one follows."""
        start = [self._marker("<|start|>"), _text("assistant")]
        return _sequence(*self._header("analysis|commentary"), *self._text_until("<|end|>"), *start)

    def _channel_call(self, tool: Tool) -> Format:
        recipient = _text(f"commentary to=functions.{tool.function.name} ")
        kind = [self._marker("<|constrain|>"), _text("json"), self._marker("<|message|>")]
        return _sequence(self._marker("<|channel|>"), recipient, *kind, _schema(tool))


_ANY: Format = {"type": "regex", "pattern": r"(.|\n)*"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _star(content: Format) -> Format:
    return {"type": "star", "content": content}


def _begin(tool: Tool, key: str) -> str:
    return f'{{"name": {json.dumps(tool.function.name)}, "{key}": '


def _schema(tool: Tool, is_free: bool = False) -> Format:
    """Return the arguments' format. is_free: arguments of a tool that is not `strict` are any object."""
    if is_free and not tool.function.strict:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    schema = {"type": "object", "properties": {}} | tool.function.parameters
    try:
        return {"type": "json_schema", "json_schema": _closed(schema)}
    except RecursionError:
        raise InvalidRequest(f"parameters of the tool {tool.function.name!r} are nested too deeply", "tools") from None


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, unless it says otherwise.

    Small models go on with properties of their own else. What a schema combines with others stays open.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(named := schema.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in named.items()}
    for name in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
        if name in schema:
            closed[name] = _closed(schema[name])
    if isinstance(schema.get("properties"), Mapping) and not schema.keys() & _COMBINED:
        closed.setdefault("additionalProperties", False)
    return closed


_COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"}
