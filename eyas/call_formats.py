"""Reads the formats in which models write tool calls and reasoning. White space beside a call is format.

To add a format, write a generator beside `hermes`, and name it in `READERS` and `ToolParserName`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from eyas.argument_values import PythonArguments, cut_value, json_value, may_be_text, python_arguments
from eyas.chat_message import MessageWriter, ToolCall
from eyas.text_reader import MAX_HEADER, JsonValue, Steps, TextReader, overlap

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the tools' names


@dataclass(frozen=True)
class Marks:
    """Special tokens around calls: of their section, of a call, between its name and its arguments, and the ends of both."""

    section: str
    call: str
    separator: str
    call_end: str
    end: str


@dataclass(frozen=True)
class ParameterTags:
    """Tags around the parameters of a call.

    Attributes:
        key, key_end: before and behind a name.
        value, value_end: before and behind its value; the first may be empty.
        end: of the call.
        stops: what else ends a value, because models forget `value_end` at times.
        is_on_lines: line breaks around a value are format.
    """

    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    stops: tuple[str, ...] = ()
    is_on_lines: bool = False


_QWEN_TAGS = ParameterTags(
    "<parameter=", ">", "", "</parameter>", "</function>", ("<parameter=", "</function>"), is_on_lines=True
)
_GLM_TAGS = ParameterTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_DEEPSEEK = Marks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
MARKS: Mapping[str, Marks] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi_k2": Marks(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
}


class CallReader(TextReader):
    """Reads what one format means into the message. tools: those that may be called."""

    def __init__(self, output: MessageWriter, tools: Tools) -> None:
        super().__init__()
        self.is_reasoning = False
        self._out = output
        self._tools = tools

    def plain(self) -> Steps:
        """Everything is content."""
        return self.pass_on(self._out.content)

    def think(self, start: str, end: str, in_reasoning: bool, content: CallReader) -> Steps:
        """Reasoning between two tags, then content. The first tag may be part of the prompt."""
        self.is_reasoning = in_reasoning
        space = yield from self.skip_space()
        if (yield from self.skip(start)):
            self.is_reasoning = True
        elif in_reasoning:
            self._out.reasoning(space)
        else:
            content.push(space)
        if self.is_reasoning:
            yield from self.until((end,), self._out.reasoning)
            self.is_reasoning = False
        yield from self.pass_on(content.push)

    def hermes(self) -> Steps:
        """<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>, also of Qwen; or with <function=NAME> inside."""
        while (yield from self.until(("<tool_call>",), self._out.content)):
            prefix = "<tool_call>" + (yield from self.skip_space())
            if (yield from self.skip("<function=")):
                is_call = yield from self._function(f"{prefix}<function=")
            else:
                is_call = yield from self._call(prefix, "</tool_call>")
            if is_call:
                yield from self.skip_space()
                yield from self.skip("</tool_call>")

    def llama3_json(self) -> Steps:
        """{"name": NAME, "parameters": OBJECT} as the whole text, or after <|python_tag|>; several with `;` between them."""
        space = yield from self.skip_space()
        yield from self._calls_after(space, "", ";", self._tools)
        while (yield from self.until(("<|python_tag|>",), self._out.content)):
            space = yield from self.skip_space()
            yield from self._calls_after(f"<|python_tag|>{space}", "<|python_tag|>", ";")

    def mistral(self) -> Steps:
        """[TOOL_CALLS][{"name": NAME, "arguments": OBJECT}, ...], or [TOOL_CALLS]NAME[ARGS]OBJECT for each call."""
        marker = "[TOOL_CALLS]"
        while (yield from self.until((marker,), self._out.content)):
            space = yield from self.skip_space()
            name = yield from self.take_while(_NAME)
            if name:
                yield from self._named_call(f"{marker}{space}{name}", name)
            elif (yield from self.skip("[")):
                if (yield from self._calls_after(f"{marker}{space}[", marker, ",")):
                    yield from self.skip("]")
            else:
                yield from self._calls_after(f"{marker}{space}", marker, ",")

    def harmony(self) -> Steps:
        """<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|> of gpt-oss. The prompt ends with <|start|>assistant."""
        header = ""
        while True:
            found = yield from self._header(header)
            if found is None:
                return
            marker = yield from self.until(_HARMONY_ENDS, found)
            self._out.end_call()
            self.is_reasoning = False
            header = marker if marker in ("<|start|>", "<|channel|>") else ""

    def sections(self, marks: Marks) -> Steps:
        """Calls between markers, in a section of their own: DeepSeek and Kimi."""
        while (yield from self.until((marks.section,), self._out.content)):
            prefix = marks.section + (yield from self.skip_space())
            is_call = False
            while (yield from self.skip(marks.call)):
                is_call = yield from self._marked_call(prefix + marks.call, marks)
                if not is_call:
                    break
                prefix = yield from self.skip_space()
            else:
                if not is_call:
                    self._out.content(prefix)
            yield from self.skip(marks.end)

    def glm(self) -> Steps:
        """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>, with or without line breaks."""
        while (yield from self.until(("<tool_call>",), self._out.content)):
            prefix = "<tool_call>" + (yield from self.skip_space())
            name = yield from self.take_while(_NAME)
            space = yield from self.skip_space()
            has_arguments = yield from self.begins_with("<arg_key>")
            if not name or not (has_arguments or (yield from self.begins_with("</tool_call>"))):
                self._out.content(prefix + name + space)
                continue
            self._out.call(name)
            yield from self._parameters(name, _GLM_TAGS)

    def pythonic(self) -> Steps:
        """[NAME(KEY=VALUE, ...), ...] as the whole text, with Python's literals; also after <|python_start|>."""
        prefix = yield from self.skip_space()
        if (yield from self.skip("<|python_start|>")):
            prefix += "<|python_start|>" + (yield from self.skip_space())
        if (yield from self.skip("[")):
            prefix += "["
            while (yield from self._python_call(prefix)):
                yield from self.skip_space()
                prefix = "," if (yield from self.skip(",")) else ""
                prefix += yield from self.skip_space()
                if (yield from self.skip("]")):
                    yield from self.skip("<|python_end|>")
                    break
        else:
            self._out.content(prefix)
        yield from self.pass_on(self._out.content)

    # What the formats share

    def _marked_call(self, prefix: str, marks: Marks) -> Generator[None, None, bool]:
        """Read NAME, a separator and an object, up to the end of the call; return whether it was there."""
        header = yield from self.take_while(_NAME)
        if not (yield from self.skip(marks.separator)):
            self._out.content(prefix + header)
            return False
        prefix += header + marks.separator
        name = yield from self.take_while(_NAME)  # DeepSeek V3 has "function" in the header, and the name here
        prefix += name + (yield from self.skip_space())
        if (yield from self.skip("```json")):
            prefix += f"```json{(yield from self.skip_space())}"
        call = _MARKED_CALL.fullmatch(f"{header} {name}")
        if call is None or not (yield from self.begins_with("{")):
            self._out.content(prefix)
            return False
        self._out.call(call[1] or call[2], header if header.startswith("functions.") else "")
        yield from self._arguments(marks.call_end)
        yield from self.skip_space()
        yield from self.skip("```")
        yield from self.skip_space()
        return (yield from self.skip(marks.call_end))

    def _python_call(self, prefix: str) -> Generator[None, None, bool]:
        """Read NAME(KEY=VALUE, ...); return whether it was there."""
        name = yield from self.take_while(_NAME)
        if name not in self._tools or not (yield from self.begins_with("(")):
            self._out.content(prefix + name)
            return False
        text, length = PythonArguments(), 0
        while not text.is_done:
            length += text.scan(self.rest, length)
            if text.is_broken or (not text.is_done and not (yield from self.more())):
                break
        arguments = python_arguments(self.rest[:length]) if text.is_done else None
        if arguments is None:
            self._out.content(prefix + name)
            return False
        self.take(length)
        self._out.call(name)
        self._out.arguments(arguments)
        return True

    def _header(self, begun: str) -> Generator[None, None, Callable[[str], None] | None]:
        """Read the header of a message of harmony; return where its text goes, None at the end.

        begun: what is read of it.
        """
        marker = "<|message|>"
        while (at := self.rest.find(marker)) < 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                header = begun + self.take(len(self.rest))
                if header.isspace() or not self._is_cut_header(header):
                    self._out.content(header)
                return None
        if at < 0 or at + len(marker) > MAX_HEADER:
            self._out.content(begun)
            return self._out.content
        header = begun + self.take(at)
        self.take(len(marker))
        found = _HARMONY_HEADER.fullmatch(header)
        recipient = found and (found["first"] or found["second"])
        if found is None or (recipient and not self._is_tool(recipient)):
            self._out.content(header + marker)
            return self._out.content
        if recipient:
            self._out.call(recipient.removeprefix("functions."))
            return self._out.arguments
        self.is_reasoning = found["channel"] == "analysis"
        return self._out.reasoning if self.is_reasoning else self._out.content

    def _is_cut_header(self, header: str) -> bool:
        """Whether it is the beginning of a header. A recipient in it must be the beginning of a tool's name."""
        found = _CUT_HEADER.fullmatch(header)
        names = [name for tool in self._tools for name in (tool, f"functions.{tool}")]
        recipients = [one for one in (found["first"], found["second"]) if one] if found else []
        return found is not None and all(any(name.startswith(one) for name in names) for one in recipients)

    def _is_tool(self, recipient: str) -> bool:
        return bool(self._tools) and (recipient.startswith("functions.") or recipient in self._tools)

    def _calls_after(
        self, prefix: str, broken_until: str, separator: str, names: Collection[str] = ()
    ) -> Generator[None, None, bool]:
        """Read one call after the other; return whether the last one was there. See `_call`."""
        while (yield from self._call(prefix, broken_until, names)):
            yield from self.skip_space()
            prefix = separator if (yield from self.skip(separator)) else ""
            prefix += yield from self.skip_space()
            if not (yield from self.begins_with("{")):
                self._out.content(prefix)
                return True
        return False

    def _named_call(self, prefix: str, name: str) -> Steps:
        """Read OBJECT, [ARGS]OBJECT or [CALL_ID]ID[ARGS]OBJECT after a name."""
        if (yield from self.skip("[CALL_ID]")):
            prefix += "[CALL_ID]" + (yield from self.take_while(_NAME))
        if (yield from self.skip("[ARGS]")):
            prefix += "[ARGS]"
        prefix += yield from self.skip_space()
        if not (yield from self.begins_with("{")):
            self._out.content(prefix)
            return
        self._out.call(name)
        yield from self._arguments("[TOOL_CALLS]")

    def _function(self, prefix: str) -> Generator[None, None, bool]:
        """Read NAME><parameter=KEY>VALUE</parameter>...</function>; return whether it was there."""
        name = yield from self.take_while(_NAME)
        if not name or not (yield from self.skip(">")):
            self._out.content(prefix + name)
            return False
        self._out.call(name)
        yield from self._parameters(name, _QWEN_TAGS)
        return True

    def _parameters(self, name: str, tags: ParameterTags) -> Steps:
        """Read the parameters of a call and its end. What the end of the text cuts stays unclosed: it is no JSON."""
        schema, before = self._tools.get(name, {}), "{"
        yield from self.skip_space()
        while (yield from self.skip(tags.key)):
            keys: list[str] = []
            if not (yield from self.until((tags.key_end,), keys.append)):
                self._out.arguments(before + cut_value(_without_end("".join(keys), tags.key_end), {}, {}))
                return
            key = "".join(keys).strip()
            self._out.arguments(f"{before}{json.dumps(key)}: ")
            if not (yield from self._value(key, schema, tags)):
                return
            before = ", "
            yield from self.skip_space()
        is_closed = (yield from self.skip(tags.end)) or (yield from self.begins_with("</tool_call>"))
        if not is_closed and self.is_cut(tags.key, tags.end, "</tool_call>"):
            self.take(len(self.rest))
            self._out.arguments("{" if before == "{" else "")
        elif before == ", ":
            self._out.arguments("}")

    def _value(self, key: str, schema: Mapping[str, Any], tags: ParameterTags) -> Generator[None, None, bool]:
        """Read the value of a parameter; return whether it has an end."""
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        if tags.value:
            yield from self.skip_space()
            if not (yield from self.skip(tags.value)) and self.is_cut(tags.value):
                self.take(len(self.rest))
                return False
        value: list[str] = []
        if not may_be_text(own, schema):
            yield from self._json(value.append)
        found = yield from self.until((tags.value_end, *tags.stops), value.append)
        text = "".join(value)
        if not found:
            text = _without_end(text, tags.value_end, *tags.stops)
        if tags.is_on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._out.arguments(json_value(text, own, schema) if found else cut_value(text, own, schema))
        if found in tags.stops:
            self.rest = found + self.rest
        return bool(found)

    def _json(self, emit: Callable[[str], None]) -> Steps:
        """Pass on an object, a list or a string of JSON, as far as it is one. It may hold tags."""
        emit((yield from self.skip_space()))
        value = JsonValue()
        while self.rest[:1] in ("{", "[", '"') or value.is_open:
            emit(self.take(value.scan(self.rest)))
            if value.is_done or value.is_broken or not (yield from self.more()):
                return

    def _call(self, prefix: str, broken_until: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read {"name": NAME, "arguments": OBJECT}; return whether it was there.

        Args:
            prefix: what becomes content if it is not there, with the text that shows it.
            broken_until: the arguments go on up to this marker if they are no JSON; empty: to the end.
            names: names that count as a call; empty: all.
        """
        if not (yield from self.begins_with("{")):
            self._out.content(prefix)
            return False
        value, length = JsonValue(), 0
        while True:
            if header := _CALL_HEADER.match(self.rest[:MAX_HEADER]):
                text = self.take(header.end())
                if names and header[1] not in names:
                    self._out.content(prefix + text)
                    return False
                self._out.call(header[1])
                yield from self._arguments(broken_until)
                yield from self._end_of_object()
                return True
            key = _FIRST_KEY.match(self.rest[:MAX_HEADER])
            if key and key[1] not in _CALL_KEYS:
                self._out.content(prefix + self.take(key.end()))
                return False
            length += value.scan(self.rest, length)
            if value.is_done or value.is_broken or not (yield from self.more()):
                break
        text = self.take(length)
        if not value.is_done or (call := _whole_call(text, names)) is None:
            self._out.content(prefix + text)
            return False
        self._out.call(call.name)
        self._out.arguments(call.arguments)
        return True

    def _arguments(self, broken_until: str) -> Steps:
        """Pass on one JSON object as it comes."""
        value = JsonValue()
        while not value.is_done:
            self._out.arguments(self.take(value.scan(self.rest)))
            if value.is_broken:
                yield from self.pass_on(self._out.arguments, broken_until)
                return
            if not value.is_done and not (yield from self.more()):
                return

    def _end_of_object(self) -> Steps:
        """Read the rest of a call's object after its arguments. Models forget the brace at times."""
        yield from self.skip_space()
        if not (yield from self.begins_with(",")):
            yield from self.skip("}")
            return
        while (at := self.rest.find("}") + 1) == 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                break
        text = self.take(at if 0 < at <= MAX_HEADER else min(len(self.rest), MAX_HEADER))
        if not _MORE_KEYS.fullmatch(text):
            self._out.content(text)


READERS: Mapping[str, Callable[[CallReader], Steps]] = {
    "hermes": CallReader.hermes,
    "qwen3_coder": CallReader.hermes,
    "qwen3_xml": CallReader.hermes,
    "glm45": CallReader.glm,
    "glm47": CallReader.glm,
    "pythonic": CallReader.pythonic,
    "llama4_pythonic": CallReader.pythonic,
    **{name: partial(CallReader.sections, marks=marks) for name, marks in MARKS.items()},
    "llama3_json": CallReader.llama3_json,
    "mistral": CallReader.mistral,
    "openai": CallReader.harmony,
}
_NAME = re.compile(r"[\w.:/-]*")
_MARKED_CALL = re.compile(r"function (\S+)|(?:functions\.)?([\w.-]+)(?::\d+)? ")
_CALL_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
_MORE_KEYS = re.compile(r'(?:,\s*"(?:id|type)"\s*:\s*"[^"\\]*"\s*)+\}')
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HARMONY_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*)?(?:assistant\s*)?(?:to=(?P<first>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*)?"
    r"(?:to=(?P<second>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?(?:(?:json|code|text)\s*)?"
)
# A header at the end of a text that max_tokens cut.
_CUT_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*(?:assistant\s*)?)?(?:to=(?P<first>[^\s<]*)\s*)?(?:<\|channel\|>\s*[a-z]{0,10}\s*)?"
    r"(?:to=(?P<second>[^\s<]*)\s*)?(?:<\|constrain\|>\s*)?(?:json|code|text)?\s*"
)


def _without_end(text: str, *markers: str) -> str:
    """Return a text without the beginning of a marker that the text ends with."""
    return text[: len(text) - max(overlap(text, marker) for marker in markers)]


def _whole_call(text: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that an object describes, whatever the order of its keys; None if it describes none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS:
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (names and name not in names):
        return None
    if isinstance(arguments, str):  # some models encode them twice
        return ToolCall(0, name=name, arguments=arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return ToolCall(0, name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))
