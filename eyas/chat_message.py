"""An assistant's message: content, reasoning and tool calls, as a value and as it grows."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from eyas.text_reader import WHITE_SPACE


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, or what a piece of text adds to one.

    index: of the call in its message. id, name: empty but in the first piece. arguments: JSON as the model wrote it.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ChatMessage:
    """An assistant's message, or what a piece of text adds to it. tool_calls: in the order of the text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ChatMessage) -> ChatMessage:
        calls = {call.index: call for call in self.tool_calls}
        for call in other.tool_calls:
            begun = calls.get(call.index, ToolCall(call.index, call.id, call.name))
            calls[call.index] = ToolCall(call.index, begun.id, begun.name, begun.arguments + call.arguments)
        return ChatMessage(self.content + other.content, self.reasoning + other.reasoning, tuple(calls.values()))


class MessageWriter:
    """The message as it grows. White space of the content is held until it is known not to be beside a call."""

    def __init__(self, max_calls: int | None, id_length: int) -> None:
        self.num_calls = 0
        self._max_calls, self._id_length = max_calls, id_length
        self._new = ChatMessage()
        self._space: list[str] = []
        self._is_after_call = False
        self._has_arguments = True

    def take(self) -> ChatMessage:
        new, self._new = self._new, ChatMessage()
        return new

    def content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip(WHITE_SPACE)
        shown = text.rstrip(WHITE_SPACE)
        if shown:
            self._new += ChatMessage("".join([*self._space, shown]))
            self._space, self._is_after_call = [], False
        self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        self._new += ChatMessage(reasoning=text)

    def call(self, name: str, call_id: str = "") -> None:
        self.end_call()
        self.num_calls += 1
        self._space, self._is_after_call, self._has_arguments = [], True, False
        if not self._is_dropped:
            self._new += ChatMessage(tool_calls=(ToolCall(self.num_calls - 1, call_id or self._new_id(), name),))

    def arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text.strip())
        if text and not self._is_dropped:
            self._new += ChatMessage(tool_calls=(ToolCall(self.num_calls - 1, arguments=text),))

    def end_call(self) -> None:
        """Give a call without arguments an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        self.end_call()
        if not self._is_after_call:
            self._new += ChatMessage("".join(self._space))

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _new_id(self) -> str:
        """Templates of Mistral accept ids of nine letters and digits only."""
        return secrets.token_hex(8)[: self._id_length] if self._id_length else f"call_{secrets.token_hex(12)}"
