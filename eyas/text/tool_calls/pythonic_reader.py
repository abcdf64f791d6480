"""Reads calls in Python's syntax, as Llama 4 and others write them."""

from __future__ import annotations

from collections.abc import Generator

from eyas.text.incremental_reader import Steps
from eyas.text.tool_call_arguments import PythonValue, cut_python_arguments, python_arguments
from eyas.text.tool_calls.call_reader import NAME
from eyas.text.tool_calls.object_reader import ObjectReader

_LEAST_NAME = 3  # characters of a tool's name that a bracket alone makes the beginning of a call


class PythonicReader(ObjectReader):
    """Reader of [NAME(KEY=VALUE, ...), ...], with Python's literals."""

    def calls(self) -> Steps:
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
        name = yield from self.take_while(NAME)
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
