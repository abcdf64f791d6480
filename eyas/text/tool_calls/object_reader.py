"""Reads calls as JSON objects, {"name": NAME, "arguments": OBJECT}, which several formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator

from eyas.text.chat_message import ToolCall
from eyas.text.incremental_reader import MAX_HEADER, JsonValue, Steps
from eyas.text.tool_call_arguments import JsonSlips, PythonValue, python_json
from eyas.text.tool_calls.call_reader import CallReader

_LANGUAGE = re.compile(r"[a-z]*")
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


class ObjectReader(CallReader):
    """Reader that knows calls as objects of JSON, or as dicts of Python."""

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
            if (yield from self.begins_with(";", ",")):
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
