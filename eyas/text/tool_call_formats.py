"""Reads the formats in which models write tool calls and reasoning, with the slips that models make in them.

A call that the end of the output cuts is a call with the arguments so far if its name is whole; else nothing of it is shown.
Text that breaks its format stays text.

To add a format, write a generator beside `tagged`, and name it in `READERS` and `ToolParserName`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import partial

from eyas.text.chat_message import MessageWriter, ToolCall
from eyas.text.incremental_reader import MAX_HEADER, JsonValue, Steps, TextReader, overlap
from eyas.text.tool_call_arguments import (
    ArgumentTypes,
    JsonSlips,
    PythonValue,
    Tools,
    ValueType,
    cut_python_arguments,
    python_arguments,
    python_json,
)


@dataclass(frozen=True)
class Marks:
    """Special tokens around calls: of their section, of a call, between its name and its arguments, and the ends of both.

    other_section: a form of the first one that models write at times; empty if there is none.
    """

    section: str
    call: str
    separator: str
    call_end: str
    end: str
    other_section: str = ""

    @property
    def sections(self) -> tuple[str, ...]:
        """Return what begins a section."""
        return (self.section, self.other_section) if self.other_section else (self.section,)


@dataclass(frozen=True)
class ParameterTags:
    """Tags around the parameters of a call. Models forget the ends at times.

    Attributes:
        keys: before a name.
        key_end: after a name.
        value, value_end: before and after its value; the first may be empty.
        end: of the call.
        is_on_lines: line breaks around a value are format.
    """

    keys: tuple[str, ...]
    key_end: str
    value: str
    value_end: str
    end: str
    is_on_lines: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Tags after a value whose own end is missing."""
        return tuple({*self.keys, self.end, "</tool_call>"})


_QWEN_TAGS = ParameterTags(("<parameter=", "<parameter name="), ">", "", "</parameter>", "</function>", is_on_lines=True)
_GLM_TAGS = ParameterTags(("<arg_key>",), "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_FUNCTIONS = ("<function=", "<function name=")
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
        "<|tool_call_section_begin|>",
    ),
}


class CallReader(TextReader):
    """Reader of one format's calls into the message.

    Attributes:
        is_reasoning: the text is inside the reasoning.

    Args:
        types: of the tools that may be called.
        tags: around the reasoning.
        is_forced: the output is calls.
    """

    def __init__(
        self,
        output: MessageWriter,
        types: ArgumentTypes,
        tags: tuple[str, str] | None = None,
        in_reasoning: bool = False,
        is_forced: bool = False,
    ) -> None:
        super().__init__(least_cut=1 if is_forced else 2)
        self.is_reasoning = in_reasoning
        self._is_forced = is_forced
        self._out = output
        self._types = types
        self._tools: Tools = types.tools
        self._tags = tags

    def read(self, name: str) -> Steps:
        """Read reasoning, then a format. Some models forget the end of the reasoning before a call."""
        if self._tags is not None:
            yield from self._begin(*self._tags, openers=_OPENERS.get(name, ()))
        yield from READERS[name](self)

    def plain(self) -> Steps:
        """Parse everything as content."""
        return self.pass_on(self._out.content)

    def tagged(self) -> Steps:
        """Parse <tool_call>...</tool_call> of Hermes, Qwen and GLM, with any of their forms inside. See `_tagged_call`."""
        is_call = (not self.is_reasoning) and (yield from self._objects("", "</tool_call>", self._tools))
        while True:
            while is_call:
                space = yield from self.skip_space()
                if (yield from self.skip_end("</tool_call>")):
                    continue
                is_call = (yield from self.begins_with("<function")) and (yield from self._tagged_call(space))
                if not is_call:
                    self._text(space)
            openers = ("<tool_call>",) if self.is_reasoning else ("<tool_call>", *_FUNCTIONS)
            opener = yield from self._next(*openers)
            if not opener:
                return
            if opener in _FUNCTIONS:
                is_call = yield from self._function(opener, self._tools)
            else:
                is_call = yield from self._tagged_call(opener + (yield from self._repeated(opener)))

    def llama3_json(self) -> Steps:
        """Parse {"name": NAME, "parameters": OBJECT} as the whole text, or after <|python_tag|>; several with `;` between
        them.
        """
        if not self.is_reasoning:
            yield from self._objects("", "", self._tools)
        while opener := (yield from self._next("<|python_tag|>", *_FUNCTIONS)):
            if opener in _FUNCTIONS:
                yield from self._function(opener, self._tools)
            else:
                yield from self._objects(opener + (yield from self._repeated(opener)), opener)

    def mistral(self) -> Steps:
        """Parse [TOOL_CALLS][{"name": NAME, "arguments": OBJECT}, ...], or [TOOL_CALLS]NAME[ARGS]OBJECT for each call."""
        marker = "[TOOL_CALLS]"
        space = yield from self.skip_space()
        if self.is_reasoning or (yield from self.begins_with(marker)):
            self._text(space)
        elif self.is_cut(marker) and len(self.rest) >= self.least_cut:
            self.take(len(self.rest))
        else:
            yield from self._objects(space, marker, self._tools)
        while (yield from self._next(marker)):
            held = marker + (yield from self._repeated(marker))
            name = yield from self.take_while(_NAME)
            if name:
                yield from self._named_call(held + name, name)
            else:
                yield from self._objects(held, marker)

    def harmony(self) -> Steps:
        """Parse <|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|> of gpt-oss.

        The prompt ends with <|start|>assistant.
        """
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
        """Parse calls between markers, in a section of their own, whose markers may be missing: DeepSeek and Kimi."""
        while opener := (yield from self._next(*marks.sections, marks.call)):
            if opener == marks.call:
                held, self.rest = "", opener + self.rest
            else:
                held = opener + (yield from self.skip_space())
            is_call = False
            while (yield from self.skip(marks.call)):
                is_call = yield from self._marked_call(held + marks.call, marks)
                if not is_call:
                    break
                held = yield from self.skip_space()
            else:
                if not is_call:
                    self._refuse(held, marks.call)
            yield from self.skip_end(marks.end, "<|tool_call_section_end|>")

    def pythonic(self) -> Steps:
        """Parse [NAME(KEY=VALUE, ...), ...] as the whole text, with Python's literals; also after <|python_start|>."""
        opener = "<|python_start|>"
        space = yield from self.skip_space()
        if self.is_reasoning or (yield from self.begins_with(opener)):
            self._text(space)
        else:
            yield from self._python_lists(space)
        while (yield from self._next(opener)):
            held = opener + (yield from self._repeated(opener))
            if (yield from self.begins_with("{")):
                yield from self._objects(held, "<|python_end|>")
            elif (yield from self.begins_with("[")):
                yield from self._python_lists(held)
            else:
                yield from self._python_call(held)
            yield from self.skip_end("<|python_end|>")

    # What the formats share

    def _begin(self, start: str, end: str, openers: tuple[str, ...]) -> Steps:
        """Read the reasoning at the beginning, up to its end or to a call. Its first tag may be part of the prompt."""
        space = yield from self.skip_space()
        if (yield from self.skip(start)):
            self.is_reasoning = True
        elif self.is_reasoning:
            self._out.reasoning(space)
        elif self.is_cut(start, end) and len(self.rest) >= self.least_cut:
            self.take(len(self.rest))
        elif not (yield from self.skip(end)):
            self._out.content(space)
        if self.is_reasoning:
            opener = yield from self.until((end, *openers), self._out.reasoning)
            self.is_reasoning = opener in openers
            self.rest = (opener if self.is_reasoning else "") + self.rest

    def _next(self, *openers: str) -> Generator[None, None, str]:
        """Pass text on up to an opener of calls; remove and return it, or return "" at the end."""
        while True:
            end = self._tags[1] if self._tags and self.is_reasoning else ""
            found = yield from self.until((*openers, end) if end else openers, self._text)
            if not end or found != end:
                return found
            self.is_reasoning = False

    def _text(self, text: str) -> None:
        """Pass on text that is no call."""
        (self._out.reasoning if self.is_reasoning else self._out.content)(text)

    def _call(self, name: str, call_id: str = "") -> None:
        """Begin a call, which ends the reasoning."""
        self.is_reasoning = False
        self._out.call(name, call_id)

    def _refuse(self, held: str, *expected: str) -> None:
        """Pass on what looked like a call as text, unless the end of the output cut it. expected: what had to follow."""
        if self.is_cut(*expected):
            self.take(len(self.rest))
        else:
            self._text(held)

    def _refuse_name(self, held: str, name: str, *expected: str) -> None:
        """Do the same after a name, which has to be the beginning of a tool's."""
        if any(tool.startswith(name) for tool in self._tools):
            self._refuse(held, *expected)
        else:
            self._text(held)

    def _repeated(self, opener: str) -> Generator[None, None, str]:
        """Remove and return white space and further openers of the same call."""
        space = yield from self.skip_space()
        while (yield from self.skip_end(opener)):
            space += yield from self.skip_space()
        return space

    def _tagged_call(self, held: str) -> Generator[None, None, bool]:
        """Read JSON, <function=NAME> with parameters, or NAME with keys and values; return whether it was there."""
        for function in _FUNCTIONS:
            if (yield from self.skip(function)):
                return (yield from self._function(held + function))
        if (yield from self._begins_with_any("{", "[", "```")):
            return (yield from self._objects(held, "</tool_call>"))
        name = yield from self.take_while(_NAME)
        space = yield from self.skip_space()
        has_keys = yield from self.begins_with("<arg_key>")
        is_known = name in self._tools and (yield from self._begins_with_any("</tool_call>", "{"))
        if not name or not (has_keys or is_known):
            self._refuse_name(
                held + name + space, name, "<arg_key>", "</tool_call>", *([] if name else (*_FUNCTIONS, "```"))
            )
            return False
        self._call(name)
        if (yield from self.begins_with("{")):
            yield from self._arguments("</tool_call>")
        else:
            yield from self._parameters(name, _GLM_TAGS)
        return True

    def _begins_with_any(self, *texts: str) -> Generator[None, None, bool]:
        for text in texts:
            if (yield from self.begins_with(text)):
                return True
        return False

    def _marked_call(self, held: str, marks: Marks) -> Generator[None, None, bool]:
        """Read NAME, a separator and an object, up to the end of the call; return whether it was there."""
        held += yield from self.skip_space()
        header = yield from self.take_while(_NAME)
        space = yield from self.skip_space()
        held += header + space
        if not (yield from self.skip(marks.separator)):
            name = _NUMBER.sub("", header)
            name = "" if "functions".startswith(name) else name.removeprefix("functions.")
            self._refuse_name(held, name, marks.separator)
            return False
        space = yield from self.skip_space()
        name = yield from self.take_while(_NAME)  # DeepSeek V3 has "function" in the header, and the name here
        end = yield from self.skip_space()
        held += marks.separator + space + name + end
        if (yield from self.skip("```json")):
            held += f"```json{(yield from self.skip_space())}"
        call = _MARKED_CALL.fullmatch(f"{header} {name}")
        is_cut = self.is_cut("{", "```json") and bool(end if name else header != "function")
        if call is None or not (is_cut or (yield from self.begins_with("{"))):
            self._refuse_name(held, name, "{", "```json")
            return False
        self._call(call[1] or call[2], header if header.startswith("functions.") else "")
        if is_cut:
            self._out.arguments("{")
            self.take(len(self.rest))
        yield from self._arguments(marks.call_end)
        for mark in ("```", marks.call_end):
            yield from self.skip_space()
            yield from self.skip_end(mark)
        return True

    def _python_lists(self, held: str) -> Steps:
        """Read lists of Python's calls."""
        while (yield from self.skip("[")):
            held += "["
            while (yield from self._python_call(held)):
                held = yield from self.skip_space()
                if (yield from self.skip(",")):
                    held += "," + (yield from self.skip_space())
                if (yield from self.skip("]")):
                    held = yield from self.skip_space()
                    break
            else:
                return
        self._text(held)

    def _python_call(self, held: str) -> Generator[None, None, bool]:
        """Read NAME(KEY=VALUE, ...); return whether it was there."""
        held += yield from self.skip_space()
        name = yield from self.take_while(_NAME)
        if name not in self._tools or not (yield from self.begins_with("(")):
            if held.strip() == "[" and len(name) < _LEAST_NAME and not self._is_forced:
                self._text(held + name)
            else:
                self._refuse_name(held + name, name)
            return False
        end, text = yield from self._value_text(PythonValue())
        arguments = python_arguments(text) if end == "done" else cut_python_arguments(text) if end == "cut" else None
        if arguments is None:
            self._text(held + name + text)
            return False
        self._call(name)
        self._out.arguments(arguments)
        return True

    def _value_text(self, value: JsonValue, text: str = "") -> Generator[None, None, tuple[str, str]]:
        """Remove and return a value that has begun with a text, with "done", "broken" or "cut"."""
        parts = [text]
        value.scan(text)
        while not value.is_done:
            parts.append(self.take(value.scan(self.rest)))
            if value.is_broken:
                return "broken", "".join(parts)
            if not value.is_done and not (yield from self.more()):
                return "cut", "".join(parts)
        return "done", "".join(parts)

    def _header(self, begun: str) -> Generator[None, None, Callable[[str], None] | None]:
        """Read the header of a message of harmony; return where its text goes, None at the end.

        begun: what is read of it.
        """
        marker = "<|message|>"
        while (at := self.rest.find(marker)) < 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                header = begun + self.take(len(self.rest))
                marks = ("<|start|>", "<|channel|>", "<|constrain|>", marker)
                shown = _without_end(header, *marks)
                is_cut = len(header) - len(shown) >= (1 if begun or shown.strip() else self.least_cut)
                if (header.isspace() and not begun) or not self._is_cut_header(shown if is_cut else header):
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
        self._out.begin_message()
        self.is_reasoning = found["channel"] == "analysis"
        return self._out.reasoning if self.is_reasoning else self._out.content

    def _is_cut_header(self, header: str) -> bool:
        """Return whether it is the beginning of a header. A recipient in it must be the beginning of a tool's name."""
        found = _CUT_HEADER.fullmatch(header)
        names = [name for tool in self._tools for name in (tool, f"functions.{tool}")]
        recipients = [one for one in (found["first"], found["second"]) if one] if found else []
        return found is not None and all(any(name.startswith(one) for name in names) for one in recipients)

    def _is_tool(self, recipient: str) -> bool:
        return bool(self._tools) and (recipient.startswith("functions.") or recipient in self._tools)

    def _objects(self, held: str, broken_until: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read calls as objects, alone, in a list or in a fence of code; return whether the last one was there.

        See `_object`.
        """
        held += yield from self.skip_space()
        is_fenced = yield from self.skip("```")
        if is_fenced:
            held += "```" + (yield from self.take_while(_LANGUAGE)) + (yield from self.skip_space())
        is_list = yield from self.skip("[")
        if is_list:
            held += "[" + (yield from self.skip_space())
        while (yield from self._object(held, broken_until, names)):
            space = yield from self.skip_space()
            held = space
            if (yield from self._begins_with_any(";", ",")):
                held = self.take(1) + (yield from self.skip_space())
            if (yield from self.begins_with("{")):
                continue
            if is_list and (yield from self.skip("]")):
                held = yield from self.skip_space()
            if is_fenced and (yield from self.skip_end("```")):
                held = ""
            self._text("" if self.is_cut() else held)
            return True
        return False

    def _object(self, held: str, broken_until: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read {"name": NAME, "arguments": OBJECT}; return whether it was there.

        Args:
            held: what becomes text if it is not there: its beginning, and what shows it.
            broken_until: the arguments go on up to this marker if they are no JSON; empty: to the end.
            names: names that count as a call, where nothing but them shows it; empty: all.
        """
        if not (yield from self.begins_with("{")):
            if names and not self._is_forced:
                self._text(held)
            else:
                self._refuse(held, "{", "[", "```")
            return False
        while len(self.rest) < MAX_HEADER:
            if header := _CALL_HEADER.match(self.rest):
                return (yield from self._streamed_object(held, header, broken_until, names))
            key = _FIRST_KEY.match(self.rest)
            if key and key[2] not in _CALL_KEYS:
                self._text(held + self.take(key.end()))
                return False
            value = PythonValue() if key and key[1] == "'" else JsonValue()
            value.scan(self.rest)
            if value.is_done or value.is_broken or not (yield from self.more()):
                break
        value = PythonValue() if _PYTHON_DICT.match(self.rest) else JsonValue()
        end, text = yield from self._value_text(value)
        call = _described_call(text, names) if end == "done" else None
        if end == "cut":
            call = self._cut_call(text, names)
        if call is None:
            self._text(held + text)
        elif call.name:
            self._call(call.name)
            self._out.arguments(call.arguments)
        return call is not None

    def _streamed_object(
        self, held: str, header: re.Match[str], broken_until: str, names: Collection[str]
    ) -> Generator[None, None, bool]:
        """Read a call whose name comes before its arguments, and pass them on as they come."""
        text = self.take(header.end())
        if names and header[1] not in names:
            self._text(held + text)
            return False
        self._call(header[1])
        yield from self._arguments(broken_until)
        yield from self._end_of_object()
        return True

    def _cut_call(self, text: str, names: Collection[str]) -> ToolCall | None:
        """Return the call of an object that the end of the output cut; None for other objects.

        One without a name is nothing that could be shown.
        """
        is_bare = bool(names) and not self._is_forced
        found = _CUT_CALL.fullmatch(text.replace("'", '"') if _PYTHON_DICT.match(text) else text)
        if found is None or (is_bare and found["name"] is None and not _CUT_BARE.match(text)):
            return None
        if found["name_end"] is None:
            is_name = any(tool.startswith(found["name"] or "") for tool in self._tools)
            return ToolCall(0) if is_name else None
        if is_bare and found["name"] not in names:
            return None
        begun = found.start("arguments")
        return ToolCall(0, name=found["name"], arguments=(text[begun:] if begun >= 0 else "") or "{")

    def _named_call(self, held: str, name: str) -> Steps:
        """Read OBJECT, [ARGS]OBJECT or [CALL_ID]ID[ARGS]OBJECT after a name."""
        space = yield from self.skip_space()
        held += space
        is_whole = bool(space)
        if (yield from self.skip("[CALL_ID]")):
            is_whole = True
            held += "[CALL_ID]" + (yield from self.take_while(_NAME))
        if (yield from self.skip("[ARGS]")):
            is_whole = True
            held += "[ARGS]"
        held += yield from self.skip_space()
        if (yield from self.begins_with("{")):
            self._call(name)
            yield from self._arguments("[TOOL_CALLS]")
        elif is_whole and name in self._tools and self.is_cut("{", "[ARGS]"):
            self._call(name)
            self._out.arguments("{")
            self.take(len(self.rest))
        else:
            self._refuse_name(held, name, "{", "[ARGS]", "[CALL_ID]")

    def _function(self, held: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read NAME><parameter=KEY>VALUE</parameter>...</function>; return whether it was there. names: see `_object`."""
        quote = yield from self.take_while(_QUOTES)
        name = yield from self.take_while(_NAME)
        held += quote + name + (yield from self.take_while(_QUOTES))
        if not name or (names and name not in names) or not (yield from self.skip(">")):
            self._refuse_name(held, name, ">")
            return False
        space = yield from self.skip_space()
        is_begun = yield from self._begins_with_any("<parameter", "</function>", "{")
        if names and not is_begun and not self.is_cut("<parameter", "</function>", "{"):
            self._text(f"{held}>{space}")
            return False
        self._call(name)
        if (yield from self.begins_with("{")):
            yield from self._arguments("</function>")
            yield from self.skip_space()
            yield from self.skip_end("</function>")
        else:
            yield from self._parameters(name, _QWEN_TAGS)
        return True

    def _parameters(self, name: str, tags: ParameterTags) -> Steps:
        """Read the parameters of a call and its end. What the end of the text cuts stays unclosed: it is no JSON."""
        before = "{"
        yield from self.skip_space()
        while (yield from self._skip_any(*tags.keys)):
            keys: list[str] = []
            ends = (tags.key_end, tags.value) if tags.value else (tags.key_end,)
            end = yield from self.until(ends, keys.append)
            key = "".join(keys).strip().strip("\"'")
            if not end:
                self._out.arguments(before + ValueType().cut_json(_without_end(key, *ends)))
                return
            self.rest = (end if end == tags.value else "") + self.rest
            self._out.arguments(f"{before}{json.dumps(key)}: ")
            if not (yield from self._value(self._types.of(name, key), tags)):
                return
            before = ", "
            yield from self.skip_space()
        is_closed = (yield from self.skip(tags.end)) or (yield from self.begins_with("</tool_call>"))
        if not is_closed and self.is_cut(*tags.keys, tags.end, "</tool_call>"):
            self.take(len(self.rest))
            self._out.arguments("{" if before == "{" else "")
        elif before == ", ":
            self._out.arguments("}")

    def _skip_any(self, *texts: str) -> Generator[None, None, bool]:
        for text in texts:
            if (yield from self.skip(text)):
                return True
        return False

    def _value(self, kind: ValueType, tags: ParameterTags) -> Generator[None, None, bool]:
        """Read the value of a parameter; return whether it has an end."""
        if tags.value:
            yield from self.skip_space()
            if not (yield from self.skip(tags.value)) and self.is_cut(tags.value):
                self.take(len(self.rest))
                return False
        value: list[str] = []
        if not kind.may_be_text:
            yield from self._json(value.append)
        found = yield from self.until((tags.value_end, *tags.stops), value.append)
        text = "".join(value)
        if not found:
            text = _without_end(text, tags.value_end, *tags.stops)
        if tags.is_on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._out.arguments(kind.json(text) if found else kind.cut_json(text))
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

    def _arguments(self, broken_until: str) -> Steps:
        """Pass on one JSON object as it comes, or a dict of Python as a whole."""
        while self.rest[1:].isspace() or len(self.rest) == 1:
            if len(self.rest) > MAX_HEADER or not (yield from self.more()):
                break
        if _PYTHON_DICT.match(self.rest):
            end, text = yield from self._value_text(PythonValue())
            self._out.arguments((python_json(text) if end == "done" else None) or text)
            if end == "broken":
                yield from self.pass_on(self._out.arguments, broken_until)
            return
        value, slips = JsonValue(), JsonSlips()
        while not value.is_done:
            self._out.arguments(slips.mend(self.take(value.scan(self.rest))))
            if value.is_broken:
                self._out.arguments(slips.rest())
                yield from self.pass_on(self._out.arguments, broken_until)
                return
            if not value.is_done and not (yield from self.more()):
                self._out.arguments(slips.rest())
                return

    def _end_of_object(self) -> Steps:
        """Read the rest of a call's object after its arguments. Models write a brace too few or too many at times."""
        space = yield from self.skip_space()
        if not (yield from self.begins_with(",")):
            self._text(space)
            while (yield from self.skip("}")):
                pass
            return
        while (at := self.rest.find("}") + 1) == 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                break
        text = self.take(at if 0 < at <= MAX_HEADER else min(len(self.rest), MAX_HEADER))
        if not _MORE_KEYS.fullmatch(text) and not self.is_cut():
            self._text(text)


READERS: Mapping[str, Callable[[CallReader], Steps]] = {
    "": CallReader.plain,
    "hermes": CallReader.tagged,
    "qwen3_coder": CallReader.tagged,
    "qwen3_xml": CallReader.tagged,
    "glm45": CallReader.tagged,
    "glm47": CallReader.tagged,
    "pythonic": CallReader.pythonic,
    "llama4_pythonic": CallReader.pythonic,
    **{name: partial(CallReader.sections, marks=marks) for name, marks in MARKS.items()},
    "llama3_json": CallReader.llama3_json,
    "mistral": CallReader.mistral,
    "openai": CallReader.harmony,
}
# Markers that end the reasoning if a call follows.
_OPENERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml", "glm45", "glm47"), ("<tool_call>",)),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("<|python_start|>",)),
    **{name: (*marks.sections, marks.call) for name, marks in MARKS.items()},
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
}
_LEAST_NAME = 3  # characters of a tool's name that a bracket alone makes the beginning of a call
_NAME = re.compile(r"[\w.:/-]*")
_LANGUAGE = re.compile(r"[a-z]*")
_QUOTES = re.compile("[\"']*")
_NUMBER = re.compile(r":\d*$")
_MARKED_CALL = re.compile(r"function (\S+)|(?:functions\.)?([\w.-]+)(?::\d+)? ")
_PAIRS = r'(?:"(?:id|type)"\s*+:\s*+"[^"\\]*"\s*+,\s*+)*'
_CALL_HEADER = re.compile(
    rf'\{{\s*+{_PAIRS}"name"\s*+:\s*+"([^"\\]+)"\s*+,\s*+{_PAIRS}"(?:arguments|parameters)"\s*+:\s*+(?=\{{)'
)
# The beginning of an object that is a call, by the order of its keys.
_CUT_CALL = re.compile(
    rf'\{{\s*+{_PAIRS}(?:"(?:arguments|parameters|function)"\s*+(?s::.*)?|"?[a-z]{{0,10}}'
    rf'|"(?:id|type)"\s*+:?+\s*+(?:"[^"\\]*"?)?\s*+,?+\s*+'
    rf'|"name"\s*+:?+\s*+(?:"(?P<name>[^"\\]*)(?:(?P<name_end>")\s*+(?:,\s*+{_PAIRS}'
    r'(?:"(?:arguments|parameters)"\s*+:?+\s*+(?P<arguments>(?s:.*))|"?[a-z]{0,10}|"(?:id|type)"\s*+:?+\s*+(?:"[^"\\]*"?)?\s*+,?+\s*+))?)?)?)'
)
_CUT_BARE = re.compile(r'\{\s*"(?:na|type"\s*:\s*"f)')
_FIRST_KEY = re.compile(r"""\{\s*(["'])((?:(?!\1)[^\\]|\\.)*)\1""")
_PYTHON_DICT = re.compile(r"\{\s*'")
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type", "function"}
_MORE_KEYS = re.compile(r'(?:,\s*"(?:id|type)"\s*:\s*"[^"\\]*"\s*)+\}')
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HARMONY_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*)?(?:assistant\s*)?(?:to=(?P<first>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*)?"
    r"(?:to=(?P<second>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?(?:(?:json|code|text)\s*)?"
)
# A header at the end of a text that max_tokens cut.
_CUT_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*[a-z]{0,9}\s*)?(?:to=?(?P<first>[^\s<]*)\s*)?(?:<\|channel\|>\s*[a-z]{0,10}\s*)?"
    r"(?:t|to=?(?P<second>[^\s<]*)\s*)?(?:<\|constrain\|>\s*)?[jsonctdex]{0,4}\s*"
)


def _without_end(text: str, *markers: str) -> str:
    """Return a text without the beginning of a marker that the text ends with."""
    return text[: len(text) - max(overlap(text, marker) for marker in markers)]


def _described_call(text: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that an object describes, whatever the order of its keys; None if it describes none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = json.loads(python_json(text) or "")
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {name: own for name, own in value.items() if name != "function"} | value["function"]
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS:
        return None
    name, arguments = value.get("name", value.get("function")), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (names and name not in names):
        return None
    if isinstance(arguments, str):  # some models encode them twice
        return ToolCall(0, name=name, arguments=arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return ToolCall(0, name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))
