"""An assistant's message: content, reasoning and tool calls, as a value and as it grows."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eyas.text.incremental_reader import WHITE_SPACE


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, or what a piece of text adds to one.

    Attributes:
        index: of the call in its message.
        id, name: empty but in the first piece.
        arguments: JSON as the model wrote it.
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


def joined(messages: Iterable[ChatMessage]) -> ChatMessage:
    """Return the message that pieces make, in time linear in their size."""
    content, reasoning, calls = list[str](), list[str](), dict[int, list[ToolCall]]()
    for message in messages:
        content.append(message.content)
        reasoning.append(message.reasoning)
        for call in message.tool_calls:
            calls.setdefault(call.index, []).append(call)
    whole = (
        ToolCall(index, parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
        for index, parts in calls.items()
    )
    return ChatMessage("".join(content), "".join(reasoning), tuple(whole))


def in_order(pieces: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the fewest messages that keep the order of pieces: each has reasoning before content before calls."""
    runs, last = list[list[ChatMessage]](), 0
    for piece in pieces:
        if piece == _EMPTY:
            continue
        first = 0 if piece.reasoning else 1 if piece.content else 2
        if not runs or first < last:
            runs.append([])
        runs[-1].append(piece)
        last = 2 if piece.tool_calls else 1 if piece.content else 0
    return [joined(run) for run in runs]


_EMPTY = ChatMessage()


class MessageWriter:
    """The message as it grows.

    White space of the content is held until it is known not to be next to a call. There it only separates the texts before
    and after the call.
    """

    def __init__(self, max_calls: int | None, id_length: int) -> None:
        self.num_calls = 0
        self._max_calls, self._id_length = max_calls, id_length
        self._new: list[ChatMessage] = []
        self._space: list[str] = []  # after the last content or call
        self._space_before_calls = ""
        self._is_apart = False  # calls, or the end of a message, stand between the content and what follows
        self._has_content = False
        self._reasoning_begins = ""  # what keeps the next reasoning apart
        self._has_reasoning = False
        self._has_arguments = True

    def take(self) -> list[ChatMessage]:
        """Return what is new, as `in_order` does."""
        new, self._new = self._new, []
        return in_order(new)

    def content(self, text: str) -> None:
        shown = text.rstrip(WHITE_SPACE)
        if shown:
            space = "".join([*self._space, shown[: -len(shown.lstrip(WHITE_SPACE))]])
            if self._is_apart:
                space = (self._space_before_calls + space or "\n") if self._has_content else ""
            self._new.append(ChatMessage(space + shown.lstrip(WHITE_SPACE)))
            self._space, self._space_before_calls = [], ""
            self._is_apart, self._has_content = False, True
        self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        if text:
            self._new.append(ChatMessage(reasoning=self._reasoning_begins + text))
            self._reasoning_begins, self._has_reasoning = "", True

    def begin_message(self) -> None:
        """Keep what follows apart from the message before."""
        self._is_apart = self._is_apart or self._has_content
        self._reasoning_begins = "\n" if self._has_reasoning else ""

    def call(self, name: str, call_id: str = "") -> None:
        self.end_call()
        self.num_calls += 1
        if not self._is_apart:
            self._space_before_calls = "".join(self._space)
        self._space, self._is_apart, self._has_arguments = [], True, False
        if not self._is_dropped:
            self._new.append(ChatMessage(tool_calls=(ToolCall(self.num_calls - 1, call_id or self._new_id(), name),)))

    def arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text.strip())
        if text and not self._is_dropped:
            self._new.append(ChatMessage(tool_calls=(ToolCall(self.num_calls - 1, arguments=text),)))

    def end_call(self) -> None:
        """Give a call without arguments an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        self.end_call()
        if not self._is_apart and any(self._space):
            self._new.append(ChatMessage("".join(self._space)))

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _new_id(self) -> str:
        """Return a new id. Templates of Mistral accept ids of nine letters and digits only."""
        return secrets.token_hex(8)[: self._id_length] if self._id_length else f"call_{secrets.token_hex(12)}"
