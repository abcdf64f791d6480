"""Writes what calls of tools must match, for the format of each model: parts of structural tags, as of xgrammar.

To add a format, name its writer in TAG_WRITERS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from eyas.config.router import ToolParserName
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.tools import Tool
from eyas.text.chat_parser import THINK_TAGS, ChatFormat
from eyas.text.json_schema import Definitions, properties_of
from eyas.text.schema_keywords import known_schema
from eyas.text.tool_call_arguments import is_python_key
from eyas.text.tool_call_formats import DEEPSEEK, KIMI
from eyas.text.tool_calls.section_reader import Marks

# Values in the parameters of one tool, about as many as fit into a constraint; and parameters in Python's form if all
# may be left out: each may be the first one, so that their grammar grows with the square of their number.
MAX_TOOL_VALUES, MAX_OPTIONAL = 2**16, 64

Format = dict[str, Any]  # of a structural tag


@dataclass(frozen=True)
class TagWriter:
    """Writer of structural tags for calls in <tool_call>, as Hermes has them, or a format below it.

    Attributes:
        form: how the model writes calls and reasoning.
        is_special: whether a text is a special token of the model; None if it is no token.
        is_parallel: one output may hold several calls.
    """

    form: ChatFormat
    is_special: Callable[[str], bool | None]
    tools: Sequence[Tool]
    is_parallel: bool
    definitions: Definitions = field(default_factory=Definitions)

    def calls(self) -> Format:
        """Return the format of one call or more."""
        return self._separated([self._tagged(tool) for tool in self.tools], "\n")

    def content_or_calls(self, content: Format) -> Format:
        """Return the format of either. Each begins with characters of its own, as llguidance does not go back."""
        return _or([content, self.calls()])

    def text_or_calls(self) -> Format:
        """Return the format of free text in which every call is valid."""
        tags = []
        for tool in self.tools:
            call = self._written(tool, is_free=not tool.function.strict)
            tags.append(_tag(f"<tool_call>{call['begin']}", call["content"], f"{call['end']}</tool_call>"))
        return self._text_or(tags, "<tool_call>")

    def after_reasoning(self, format_: Format, in_reasoning: bool, is_content: bool = False) -> Format:
        """Return a format that reasoning may precede; it must, if it has begun. is_content: it is content alone."""
        if self.form.reasoning_parser not in THINK_TAGS:
            return format_
        start, end = THINK_TAGS[self.form.reasoning_parser]
        reasoning = _sequence(*self._text_until(end), {"type": "optional", "content": const_string("\n\n")})
        if in_reasoning:
            return _sequence(reasoning, format_)
        return _sequence({"type": "optional", "content": _sequence(self._marker(start), reasoning)}, format_)

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

    def _marker(self, text: str) -> Format:
        return {"type": "token", "token": text} if self.is_special(text) else const_string(text)

    def _text_until(self, marker: str) -> list[Format]:
        """Return free text and the marker that ends it."""
        if self.is_special(marker):
            return [_ANY, self._marker(marker)]
        return [{"type": "any_text"}, const_string(marker)]

    def _separated(self, calls: list[Format], separator: str) -> Format:
        one = _or(calls)
        if not self.is_parallel:
            return one
        return _sequence(one, _star(_sequence(const_string(separator), one) if separator else one))

    def _object(self, tool: Tool, key: str) -> Format:
        return _sequence(const_string(_begin(tool, key)), _schema(tool), const_string("}"))

    def _tagged(self, tool: Tool) -> Format:
        begin, end, call = self._marker("<tool_call>"), self._marker("</tool_call>"), self._written(tool)
        after = [const_string(call["end"])] if call["end"] else []
        return _sequence(begin, const_string(call["begin"]), call["content"], *after, end)

    def _written(self, tool: Tool, is_free: bool = False) -> Format:
        """Return what stands between <tool_call> and </tool_call>, as a tag around the arguments."""
        return _tag(f"\n{_begin(tool, 'arguments')}", _schema(tool, is_free), "}\n")


class _QwenWriter(TagWriter):
    def _written(self, tool: Tool, is_free: bool = False) -> Format:
        return _tag(f"\n<function={tool.function.name}>\n", _xml(tool, "qwen_xml", is_free), "</function>\n")


class _Glm45Writer(TagWriter):
    def _written(self, tool: Tool, is_free: bool = False) -> Format:
        return _tag(f"{tool.function.name}\n", _xml(tool, "glm45_xml", is_free), "")


class _Glm47Writer(TagWriter):
    def _written(self, tool: Tool, is_free: bool = False) -> Format:
        return _tag(tool.function.name, _xml(tool, "glm_xml", is_free), "")


class _LlamaWriter(TagWriter):
    def calls(self) -> Format:
        return self._separated([self._object(tool, "parameters") for tool in self.tools], "; ")

    def content_or_calls(self, content: Format) -> Format:
        return _or([content, self._after_tag()])

    def text_or_calls(self) -> Format:
        return _or([self.calls(), self._after_tag(), _optional(self._text_without("{", "<|python_tag|>"))])

    def _after_tag(self) -> Format:
        return _sequence(self._marker("<|python_tag|>"), self.calls())


class _PythonicWriter(TagWriter):
    def calls(self) -> Format:
        return _sequence(const_string("["), self._separated([*map(self._python_call, self.tools)], ", "), const_string("]"))

    def text_or_calls(self) -> Format:
        return _or([self.calls(), _optional(self._text_without("[", "<|python_start|>"))])

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
            key: _sequence(const_string(f"{key}="), {"type": "json_schema", "json_schema": value})
            for key, value in values.items()
        }
        needed = [words[key] for key in words if key in required]
        others = [words[key] for key in words if key not in required]
        if needed:
            more = [_sequence(const_string(", "), word) for word in needed[1:]]
            arguments = [_sequence(needed[0], *more, *map(_following, others))]
        elif len(others) > MAX_OPTIONAL:
            reason = f"the tool {tool.function.name!r} has more than {MAX_OPTIONAL} parameters and requires none of them"
            raise InvalidRequest(f"{reason}; require one, or give fewer", "tools")
        else:
            arguments = [_sequence(word, *map(_following, others[at + 1 :])) for at, word in enumerate(others)]
        inner = [_or(arguments) if needed else _optional(_or(arguments))] if arguments else []
        return _sequence(const_string(f"{tool.function.name}("), *inner, const_string(")"))


class _MistralWriter(TagWriter):
    def calls(self) -> Format:
        """Return the newer form with [ARGS] if the vocabulary has it."""
        marker, arguments = self._marker("[TOOL_CALLS]"), self._marker("[ARGS]")
        if self.is_special("[ARGS]") is None:
            objects = self._separated([self._object(tool, "arguments") for tool in self.tools], ", ")
            return _sequence(marker, const_string("["), objects, const_string("]"))
        one = _or([_sequence(marker, const_string(tool.function.name), arguments, _schema(tool)) for tool in self.tools])
        return {"type": "plus", "content": one} if self.is_parallel else one

    def text_or_calls(self) -> Format:
        tags = [_tag(f"[TOOL_CALLS][{_begin(tool, 'arguments')}", _schema(tool, is_free=True), "}]") for tool in self.tools]
        return self._text_or(tags, "[TOOL_CALLS]")


class _HarmonyWriter(TagWriter):
    """Writer for gpt-oss, whose reasoning, content and calls are messages in channels."""

    def calls(self) -> Format:
        return _sequence(_star(self._message()), _or(self._channel_calls()))

    def content_or_calls(self, content: Format) -> Format:
        return _sequence(_star(self._message()), _or([_sequence(*self._header("final"), content), *self._channel_calls()]))

    def text_or_calls(self) -> Format:
        return self.content_or_calls(_ANY)

    def after_reasoning(self, format_: Format, in_reasoning: bool, is_content: bool = False) -> Format:
        return _sequence(_star(self._message()), *self._header("final"), format_) if is_content else format_

    def _header(self, channels: str) -> list[Format]:
        channel = {"type": "regex", "pattern": channels}
        return [self._marker("<|channel|>"), channel, self._marker("<|message|>")]

    def _message(self) -> Format:
        """Return the format of a message of gpt-oss that another one follows."""
        start = [self._marker("<|start|>"), const_string("assistant")]
        return _sequence(*self._header("analysis|commentary"), *self._text_until("<|end|>"), *start)

    def _channel_call(self, tool: Tool) -> Format:
        recipient = const_string(f"commentary to=functions.{tool.function.name} ")
        kind = [self._marker("<|constrain|>"), const_string("json"), self._marker("<|message|>")]
        return _sequence(self._marker("<|channel|>"), recipient, *kind, _schema(tool))

    def _channel_calls(self) -> list[Format]:
        return [self._channel_call(tool) for tool in self.tools]


class _SectionWriter(TagWriter):
    """Writer of calls between marks, in a section of their own, as DeepSeek V3.1 has them."""

    marks: ClassVar[Marks] = DEEPSEEK
    separator: ClassVar[str] = ""

    def calls(self) -> Format:
        return _sequence(self._marker(self.marks.section), self._section(), self._marker(self.marks.end))

    def text_or_calls(self) -> Format:
        return self._text_or([_tag(self.marks.section, self._section(), self.marks.end)], self.marks.section)

    def _section(self) -> Format:
        return self._separated([self._marked(tool) for tool in self.tools], self.separator)

    def _marked(self, tool: Tool) -> Format:
        call, separator, end = map(self._marker, (self.marks.call, self.marks.separator, self.marks.call_end))
        return _sequence(call, *self._named(tool.function.name, separator, _schema(tool)), end)

    def _named(self, name: str, separator: Format, arguments: Format) -> list[Format]:
        """Return what stands between the marks of a call."""
        return [const_string(name), separator, arguments]


class _DeepSeekV3Writer(_SectionWriter):
    separator = "\n"

    def _named(self, name: str, separator: Format, arguments: Format) -> list[Format]:
        return [const_string("function"), separator, const_string(f"{name}\n```json\n"), arguments, const_string("\n```")]


class _KimiWriter(_SectionWriter):
    marks = KIMI

    def _named(self, name: str, separator: Format, arguments: Format) -> list[Format]:
        return [const_string(f"functions.{name}:"), {"type": "regex", "pattern": "[0-9]{1,3}"}, separator, arguments]


TAG_WRITERS: Mapping[ToolParserName, type[TagWriter]] = {
    "hermes": TagWriter,
    "qwen3_coder": _QwenWriter,
    "qwen3_xml": _QwenWriter,
    "glm45": _Glm45Writer,
    "glm47": _Glm47Writer,
    "llama3_json": _LlamaWriter,
    "pythonic": _PythonicWriter,
    "llama4_pythonic": _PythonicWriter,
    "mistral": _MistralWriter,
    "openai": _HarmonyWriter,
    "deepseek_v3": _DeepSeekV3Writer,
    "deepseek_v31": _SectionWriter,
    "kimi_k2": _KimiWriter,
}


_ANY: Format = {"type": "regex", "pattern": r"(.|\n)*"}


def const_string(value: str) -> Format:
    """Return the format of one text."""
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
    return _optional(_sequence(const_string(", "), word))


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
