"""Constraints on the output of a chat: calls of tools in the format of the model, after reasoning and beside content.

Constraints are structural tags, as of xgrammar. To constrain the calls of another format, see `_TagWriter.calls`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from eyas.api.request import ReasoningBudget, StructuredOutputs
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.tools import Tool, ToolFields
from eyas.text.chat_parser import REASONING_MARKS, THINK_TAGS, ChatFormat, ChatParser
from eyas.text.json_schema import Definitions, properties_of
from eyas.text.schema_keywords import known_schema
from eyas.text.tokenizer import Tokenizer
from eyas.text.tool_call_arguments import ArgumentTypes, is_python_key
from eyas.text.tool_call_formats import DEEPSEEK, KIMI
from eyas.text.tool_calls.section_reader import Marks

PROMPT_END_TOKENS = 32
# Values in the parameters of one tool, about as many as fit into a constraint; and parameters in Python's form if all
# may be left out: each may be the first one, so that their grammar grows with the square of their number.
MAX_TOOL_VALUES, MAX_OPTIONAL = 2**16, 64

log = logging.getLogger(__name__)

Format = dict[str, Any]  # of a structural tag


class ChatOutput:
    """Constraint and reader of the output of one chat.

    Attributes:
        kept_tokens: special tokens that its text needs.

    Raises InvalidRequest if there are tools, and no format of their calls.

    Args:
        form: of the model.
        prompt: its token ids, whose end shows where the output begins.
    """

    def __init__(
        self, fields: ToolFields, model: str, form: ChatFormat, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> None:
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
        self._model = model
        self._form = form
        self._tokenizer = tokenizer
        self._prompt_end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        self.kept_tokens = tokenizer.special_ids(form.special_tokens)

    @property
    def new_parser(self) -> Callable[[], ChatParser] | None:
        """Makes parsers of the completions; None if their text is all content."""
        if self._form == ChatFormat():
            return None
        types = ArgumentTypes({tool.function.name: tool.function.parameters for tool in self._fields.called_tools})
        is_forced = bool(types.tools) and self._fields.tool_choice.mode == "required"
        return lambda: self._form.parser(self._prompt_end, types, self._fields.max_calls, is_forced)

    def constraint(self, given: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return what the output must match. given: what other fields of the request ask for."""
        in_reasoning = self._form.begins_with_reasoning(self._prompt_end)
        return output_constraint(self._fields, self._form, in_reasoning, given, self._is_special)

    def reasoning_budget(self, num_tokens: int | None) -> ReasoningBudget | None:
        """Return what limits the reasoning to a number of tokens.

        None for no limit, if the model writes no reasoning, and if its marks are ordinary text, which has many spellings.
        """
        marks = REASONING_MARKS.get(self._form.reasoning_parser)
        if num_tokens is None or num_tokens < 0 or marks is None:
            return None
        start_ids, end_ids = map(self._tokenizer.mark_ids, marks)
        if start_ids is None or end_ids is None:
            _warn_of_no_budget(self._model, *marks)
            return None
        is_open = self._form.begins_with_reasoning(self._prompt_end)
        return ReasoningBudget(num_tokens, end_ids, start_ids, is_open)

    def _is_special(self, text: str) -> bool | None:
        token = self._tokenizer.tokenizer.token_to_id(text)
        return None if token is None else token in self._tokenizer.special


@cache
def _warn_of_no_budget(model: str, start: str, end: str) -> None:
    """Log once that a model's reasoning cannot be limited."""
    log.warning("%s: thinking budgets are not kept: its tokenizer has no token for %s or %s", model, start, end)


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
    if tools and mode == "required":
        return _structured(writer.after_reasoning(writer.calls(), in_reasoning))
    if given is not None:
        content, has_calls = _content_format(given), bool(tools and form.tool_call_parser)
        if content is None or not (has_calls or form.reasoning_parser) or _has_reasoning(given, form):
            return given
        if has_calls:
            content = writer.content_or_calls(content)
        whole = writer.after_reasoning(content, in_reasoning, is_content=not has_calls)
        return replace(_structured(whole), whitespace_pattern=given.whitespace_pattern)
    if fields.tool_choice.names or any(tool.function.strict for tool in tools):
        return _structured(writer.after_reasoning(writer.text_or_calls(), in_reasoning))
    return None


def _structured(format_: Format) -> StructuredOutputs:
    tag = json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)
    return StructuredOutputs(structural_tag=tag)


def _has_reasoning(given: StructuredOutputs, form: ChatFormat) -> bool:
    """Return whether a structural tag describes the reasoning itself, as it holds the marks of the model's format."""
    marks = THINK_TAGS.get(form.reasoning_parser, ("<|channel|>",))
    return any(mark in given.structural_tag for mark in marks)


def _content_format(given: StructuredOutputs) -> Format | None:
    """Return a constraint as part of a structural tag; None if it is a broken one."""
    if given.json:
        return {"type": "json_schema", "json_schema": json.loads(given.json)}
    if given.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if given.regex:
        return {"type": "regex", "pattern": given.regex}
    if given.choice:
        return {"type": "or", "elements": [_text(choice) for choice in given.choice]}
    if given.grammar:
        return {"type": "grammar", "grammar": given.grammar}
    tag = json.loads(given.structural_tag)
    own = tag.get("format") if tag.get("type") == "structural_tag" else None
    return own if isinstance(own, dict) else None


@dataclass(frozen=True)
class _TagWriter:
    """Writer of structural tags, as of xgrammar, for the calls of a model's format."""

    form: ChatFormat
    is_special: Callable[[str], bool | None]
    tools: Sequence[Tool]
    is_parallel: bool
    definitions: Definitions = field(default_factory=Definitions)

    def calls(self) -> Format:
        """Return the format of one call or more."""
        match self.form.tool_call_parser:
            case "llama3_json":
                return self._separated([self._object(tool, "parameters") for tool in self.tools], "; ")
            case "mistral":
                return self._mistral()
            case "openai":
                return _sequence(_star(self._message()), _or([self._channel_call(tool) for tool in self.tools]))
            case "pythonic" | "llama4_pythonic":
                return _sequence(_text("["), self._separated([*map(self._python_call, self.tools)], ", "), _text("]"))
            case "deepseek_v3" | "deepseek_v31" | "kimi_k2":
                marks = self._marks
                return _sequence(self._marker(marks.section), self._section(), self._marker(marks.end))
        return self._separated([self._tagged(tool) for tool in self.tools], "\n")

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
                return _or([self.calls(), tagged, _optional(self._text_without("{", "<|python_tag|>"))])
            case "pythonic" | "llama4_pythonic":
                return _or([self.calls(), _optional(self._text_without("[", "<|python_start|>"))])
            case "openai":
                final = _sequence(*self._header("final"), _ANY)
                calls = [self._channel_call(tool) for tool in self.tools]
                return _sequence(_star(self._message()), _or([final, *calls]))
            case "mistral":
                tags = [
                    _tag(f"[TOOL_CALLS][{_begin(tool, 'arguments')}", _schema(tool, is_free=True), "}]")
                    for tool in self.tools
                ]
                return self._text_or(tags, "[TOOL_CALLS]")
            case "deepseek_v3" | "deepseek_v31" | "kimi_k2":
                marks = self._marks
                return self._text_or([_tag(marks.section, self._section(), marks.end)], marks.section)
        tags = []
        for tool in self.tools:
            call = self._written(tool, is_free=not tool.function.strict)
            tags.append(_tag(f"<tool_call>{call['begin']}", call["content"], f"{call['end']}</tool_call>"))
        return self._text_or(tags, "<tool_call>")

    def _text_or(self, tags: list[Format], marker: str) -> Format:
        """Return the format of text in which calls follow the marker. tags: of calls where it is no special token."""
        if self.is_special(marker):
            return _sequence(_ANY, _optional(self.calls()))
        stop = not self.is_parallel
        return {"type": "triggered_tags", "triggers": [marker], "tags": tags, "stop_after_first": stop}

    def _text_without(self, first: str, marker: str) -> Format:
        """Return the format of text without calls: it neither begins with a character, nor holds the marker."""
        text: Format = {"type": "regex", "pattern": rf"[^\{first}\s](.|\n)*"}
        return text if self.is_special(marker) else {**text, "excludes": [marker]}

    def after_reasoning(self, format_: Format, in_reasoning: bool, is_content: bool = False) -> Format:
        """Return a format that reasoning may precede; it must, if it has begun.

        is_content: it is content alone, which gpt-oss writes in a channel.
        """
        if self.form.reasoning_parser == "openai_gptoss" and is_content:
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
        return _sequence(one, _star(_sequence(_text(separator), one) if separator else one))

    def _object(self, tool: Tool, key: str) -> Format:
        return _sequence(_text(_begin(tool, key)), _schema(tool), _text("}"))

    def _tagged(self, tool: Tool) -> Format:
        begin, end, call = self._marker("<tool_call>"), self._marker("</tool_call>"), self._written(tool)
        after = [_text(call["end"])] if call["end"] else []
        return _sequence(begin, _text(call["begin"]), call["content"], *after, end)

    def _written(self, tool: Tool, is_free: bool = False) -> Format:
        """Return what stands between <tool_call> and </tool_call>, as a tag around the arguments."""
        name = tool.function.name
        match self.form.tool_call_parser:
            case "qwen3_coder" | "qwen3_xml":
                return _tag(f"\n<function={name}>\n", _xml(tool, "qwen_xml", is_free), "</function>\n")
            case "glm45":
                return _tag(f"{name}\n", _xml(tool, "glm45_xml", is_free), "")
            case "glm47":
                return _tag(name, _xml(tool, "glm_xml", is_free), "")
        return _tag(f"\n{_begin(tool, 'arguments')}", _schema(tool, is_free), "}\n")

    @property
    def _marks(self) -> Marks:
        """The marks of a format with sections."""
        return KIMI if self.form.tool_call_parser == "kimi_k2" else DEEPSEEK

    def _section(self) -> Format:
        """Return the format of what stands in a section of calls."""
        is_old = self.form.tool_call_parser == "deepseek_v3"
        return self._separated([self._marked(tool) for tool in self.tools], "\n" if is_old else "")

    def _marked(self, tool: Tool) -> Format:
        name, marks = tool.function.name, self._marks
        call, separator, end = map(self._marker, (marks.call, marks.separator, marks.call_end))
        match self.form.tool_call_parser:
            case "deepseek_v3":
                block = (_text(f"{name}\n```json\n"), _schema(tool), _text("\n```"))
                return _sequence(call, _text("function"), separator, *block, end)
            case "kimi_k2":
                number: Format = {"type": "regex", "pattern": "[0-9]{1,3}"}
                return _sequence(call, _text(f"functions.{name}:"), number, separator, _schema(tool), end)
        return _sequence(call, _text(name), separator, _schema(tool), end)

    def _mistral(self) -> Format:
        """Return the newer form with [ARGS] if the vocabulary has it."""
        marker, arguments = self._marker("[TOOL_CALLS]"), self._marker("[ARGS]")
        if self.is_special("[ARGS]") is None:
            objects = self._separated([self._object(tool, "arguments") for tool in self.tools], ", ")
            return _sequence(marker, _text("["), objects, _text("]"))
        one = _or([_sequence(marker, _text(tool.function.name), arguments, _schema(tool)) for tool in self.tools])
        return {"type": "plus", "content": one} if self.is_parallel else one

    def _python_call(self, tool: Tool) -> Format:
        """Return the format of NAME(KEY=VALUE, ...), whose values are JSON: required keys first, then the others."""
        schema = _schema(tool)["json_schema"]
        properties, required = _properties(tool, schema)
        if unread := [key for key in properties if not is_python_key(key)]:
            raise InvalidRequest(
                f"{unread[0][:80]!r} of the tool {tool.function.name!r} is no name in Python's calls", "tools"
            )
        try:
            values = {key: self.definitions.standalone(own, schema) for key, own in properties.items()}
        except ValueError as error:
            raise InvalidRequest(f"the schema of the tool {tool.function.name!r} {error}", "tools") from None
        words = {
            key: _sequence(_text(f"{key}="), {"type": "json_schema", "json_schema": value}) for key, value in values.items()
        }
        needed = [words[key] for key in words if key in required]
        others = [words[key] for key in words if key not in required]
        if needed:
            more = [_sequence(_text(", "), word) for word in needed[1:]]
            arguments = [_sequence(needed[0], *more, *map(_following, others))]
        elif len(others) > MAX_OPTIONAL:
            reason = f"the tool {tool.function.name!r} has more than {MAX_OPTIONAL} parameters and requires none of them"
            raise InvalidRequest(f"{reason}; require one, or give fewer", "tools")
        else:
            arguments = [_sequence(word, *map(_following, others[at + 1 :])) for at, word in enumerate(others)]
        inner = [_or(arguments) if needed else _optional(_or(arguments))] if arguments else []
        return _sequence(_text(f"{tool.function.name}("), *inner, _text(")"))

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


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _following(word: Format) -> Format:
    return _optional(_sequence(_text(", "), word))


def _xml(tool: Tool, style: str, is_free: bool) -> Format:
    """Return the format of arguments between tags. is_free: any text."""
    if is_free:
        return {"type": "any_text"}
    schema = _schema(tool)
    _properties(tool, schema["json_schema"])
    return {**schema, "style": style}


def _properties(tool: Tool, schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the properties of the arguments, and the names of the required ones. Raises InvalidRequest."""
    try:
        return properties_of(schema)
    except ValueError as error:
        raise InvalidRequest(f"the schema of the tool {tool.function.name!r} {error}", "tools") from None


def _star(content: Format) -> Format:
    return {"type": "star", "content": content}


def _begin(tool: Tool, key: str) -> str:
    return f'{{"name": {json.dumps(tool.function.name)}, "{key}": '


def _schema(tool: Tool, is_free: bool = False) -> Format:
    """Return the arguments' format. is_free: arguments of a tool that is not `strict` are any object."""
    if is_free and not tool.function.strict:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    schema = {"type": "object", "properties": {}} | tool.function.parameters
    open_: list[Any] = [schema]
    for number, value in enumerate(open_):  # grows while it is read
        if number > MAX_TOOL_VALUES:
            reason = f"parameters of the tool {tool.function.name!r} have more than {MAX_TOOL_VALUES} values"
            raise InvalidRequest(f"{reason}; simplify them", "tools")
        open_ += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    try:
        return {"type": "json_schema", "json_schema": _closed(known_schema(schema))}
    except ValueError as error:
        raise InvalidRequest(f"the schema of the tool {tool.function.name!r} {error}", "tools") from None
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
