"""Reads calls between special tokens, in a section of their own: DeepSeek and Kimi."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from eyas.text.incremental_reader import Steps
from eyas.text.tool_calls.call_reader import NAME
from eyas.text.tool_calls.object_reader import ObjectReader


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
    def tokens(self) -> tuple[str, ...]:
        """Return all of them but the other form."""
        return self.section, self.call, self.separator, self.call_end, self.end

    @property
    def sections(self) -> tuple[str, ...]:
        """Return what begins a section."""
        return (self.section, self.other_section) if self.other_section else (self.section,)


_NUMBER = re.compile(r":\d*$")
_MARKED_CALL = re.compile(r"function (\S+)|(?:functions\.)?([\w.-]+)(?::\d+)? ")


class SectionReader(ObjectReader):
    """Reader of calls between marks. args, kwargs: of CallReader."""

    def __init__(self, marks: Marks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._marks = marks

    def calls(self) -> Steps:
        """Parse calls between markers, in a section of their own, whose markers may be missing."""
        marks = self._marks
        while opener := (yield from self._next(*marks.sections, marks.call)):
            if opener == marks.call:
                held, self.rest = "", opener + self.rest
            else:
                held = opener + (yield from self.skip_space())
            is_call = False
            while (yield from self.skip(marks.call)):
                is_call = yield from self._marked_call(held + marks.call)
                if not is_call:
                    break
                held = yield from self.skip_space()
            else:
                if not is_call:
                    self._refuse(held, marks.call)
            yield from self.skip_end(marks.end, "<|tool_call_section_end|>")

    def _marked_call(self, held: str) -> Generator[None, None, bool]:
        """Read NAME, a separator and an object, up to the end of the call; return whether it was there."""
        marks = self._marks
        held += yield from self.skip_space()
        header = yield from self.take_while(NAME)
        space = yield from self.skip_space()
        held += header + space
        if not (yield from self.skip(marks.separator)):
            name = _NUMBER.sub("", header)
            name = "" if "functions".startswith(name) else name.removeprefix("functions.")
            self._refuse_name(held, name, marks.separator)
            return False
        space = yield from self.skip_space()
        name = yield from self.take_while(NAME)  # DeepSeek V3 has "function" in the header, and the name here
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
