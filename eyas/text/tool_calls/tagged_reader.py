"""Reads calls in tags: Hermes, Qwen and GLM; and Llama 3's, which may be functions in tags too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

from eyas.text.incremental_reader import JsonValue, Steps
from eyas.text.tool_call_arguments import ValueType
from eyas.text.tool_calls.call_reader import NAME, without_end
from eyas.text.tool_calls.object_reader import ObjectReader


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
FUNCTIONS = ("<function=", "<function name=")
_QUOTES = re.compile("[\"']*")


class TaggedReader(ObjectReader):
    """Reader of <tool_call>...</tool_call> of Hermes, Qwen and GLM, with any of their forms inside."""

    def calls(self) -> Steps:
        """Read content, and calls in all of their forms, see `_tagged_call`."""
        is_call = (not self.is_reasoning) and (yield from self._objects("", "</tool_call>", self._tools))
        while True:
            while is_call:
                space = yield from self.skip_space()
                if (yield from self.skip_end("</tool_call>")):
                    continue
                is_call = bool((yield from self.begins_with("<function"))) and (yield from self._tagged_call(space))
                if not is_call:
                    self._text(space)
            openers = ("<tool_call>",) if self.is_reasoning else ("<tool_call>", *FUNCTIONS)
            opener = yield from self._next(*openers)
            if not opener:
                return
            if opener in FUNCTIONS:
                is_call = yield from self._function(opener, self._tools)
            else:
                is_call = yield from self._tagged_call(opener + (yield from self._repeated(opener)))

    def _tagged_call(self, held: str) -> Generator[None, None, bool]:
        """Read JSON, <function=NAME> with parameters, or NAME with keys and values; return whether it was there."""
        if function := (yield from self.skip(*FUNCTIONS)):
            return (yield from self._function(held + function))
        if (yield from self.begins_with("{", "[", "```")):
            return (yield from self._objects(held, "</tool_call>"))
        name = yield from self.take_while(NAME)
        space = yield from self.skip_space()
        has_keys = yield from self.begins_with("<arg_key>")
        is_known = name in self._tools and (yield from self.begins_with("</tool_call>", "{"))
        if not name or not (has_keys or is_known):
            self._refuse_name(held + name + space, name, "<arg_key>", "</tool_call>", *([] if name else (*FUNCTIONS, "```")))
            return False
        self._call(name)
        if (yield from self.begins_with("{")):
            yield from self._arguments("</tool_call>")
        else:
            yield from self._parameters(name, _GLM_TAGS)
        return True

    def _function(self, held: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read NAME><parameter=KEY>VALUE</parameter>...</function>; return whether it was there. names: see `_object`."""
        quote = yield from self.take_while(_QUOTES)
        name = yield from self.take_while(NAME)
        held += quote + name + (yield from self.take_while(_QUOTES))
        if not name or (names and name not in names) or not (yield from self.skip(">")):
            self._refuse_name(held, name, ">")
            return False
        space = yield from self.skip_space()
        is_begun = yield from self.begins_with("<parameter", "</function>", "{")
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
        while (yield from self.skip(*tags.keys)):
            keys: list[str] = []
            ends = (tags.key_end, tags.value) if tags.value else (tags.key_end,)
            end = yield from self.until(ends, keys.append)
            key = "".join(keys).strip().strip("\"'")
            if not end:
                self._out.arguments(before + ValueType().cut_json(without_end(key, *ends)))
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
            text = without_end(text, tags.value_end, *tags.stops)
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


class LlamaReader(TaggedReader):
    """Reader of {"name": NAME, "parameters": OBJECT} of Llama 3, and of functions in tags."""

    def calls(self) -> Steps:
        """Parse {"name": NAME, "parameters": OBJECT} as the whole text, or after <|python_tag|>; several with `;` between
        them.
        """
        if not self.is_reasoning:
            yield from self._objects("", "", self._tools)
        while opener := (yield from self._next("<|python_tag|>", *FUNCTIONS)):
            if opener in FUNCTIONS:
                yield from self._function(opener, self._tools)
            else:
                yield from self._objects(opener + (yield from self._repeated(opener)), opener)
