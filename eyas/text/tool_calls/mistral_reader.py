"""Reads Mistral's calls, which follow [TOOL_CALLS]."""

from __future__ import annotations

from eyas.text.incremental_reader import Steps
from eyas.text.tool_calls.call_reader import NAME
from eyas.text.tool_calls.object_reader import ObjectReader


class MistralReader(ObjectReader):
    """Reader of a list of objects after the marker, or of NAME[ARGS]OBJECT after each marker."""

    def calls(self) -> Steps:
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
            name = yield from self.take_while(NAME)
            if name:
                yield from self._named_call(held + name, name)
            else:
                yield from self._objects(held, marker)

    def _named_call(self, held: str, name: str) -> Steps:
        """Read OBJECT, [ARGS]OBJECT or [CALL_ID]ID[ARGS]OBJECT after a name."""
        space = yield from self.skip_space()
        held += space
        is_whole = bool(space)
        if (yield from self.skip("[CALL_ID]")):
            is_whole = True
            held += "[CALL_ID]" + (yield from self.take_while(NAME))
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
