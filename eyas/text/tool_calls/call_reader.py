"""Reads reasoning and content; the readers of formats add their calls.

A call that the end of the output cuts is a call with the arguments so far if its name is whole; else nothing of it is shown.
Text that breaks its format stays text.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from eyas.text.chat_message import MessageWriter
from eyas.text.incremental_reader import JsonValue, Steps, TextReader, overlap
from eyas.text.tool_call_arguments import ArgumentTypes, Tools

NAME = re.compile(r"[\w.:/-]*")


class CallReader(TextReader):
    """Reader of a text into the message. Formats have readers of their own below it.

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

    def read(self, openers: tuple[str, ...]) -> Steps:
        """Read reasoning, then calls. openers: what ends the reasoning too, as some models forget its end before a call."""
        if self._tags is not None:
            yield from self._begin(*self._tags, openers=openers)
        yield from self.calls()

    def calls(self) -> Steps:
        """Read content, with the calls of a format. A reader of a format overrides it; here there are none."""
        yield from self.pass_on(self._out.content)

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


def without_end(text: str, *markers: str) -> str:
    """Return a text without the beginning of a marker that the text ends with."""
    return text[: len(text) - max(overlap(text, marker) for marker in markers)]
