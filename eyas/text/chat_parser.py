"""Reads content, reasoning and tool calls from the text of an assistant, in the formats that models write.

A parser takes the text in pieces of any length; the message does not depend on where the pieces end. Text that breaks its
format is never dropped: it becomes content, or part of the arguments that it broke. `tool_call_formats` has the formats,
and `tool_calls.call_reader` says what becomes of a call that the end of the output cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.config.router import ReasoningParserName, ToolParserName
from eyas.text.chat_message import ChatMessage, MessageWriter
from eyas.text.incremental_reader import MAX_HEADER
from eyas.text.tool_call_arguments import ArgumentTypes, Tools
from eyas.text.tool_call_formats import NO_CALLS, TOOL_CALL_FORMATS, ToolCallFormat

THINK_TAGS: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
# Before and after the reasoning, also of gpt-oss, which may write it in several messages.
REASONING_MARKS: Mapping[str, tuple[str, str]] = {
    **THINK_TAGS,
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|>"),
}


@dataclass(frozen=True)
class ChatFormat:
    """Format in which a model writes reasoning and tool calls, by vLLM's names of parsers. Empty: it writes none."""

    tool_call_parser: ToolParserName | Literal[""] = ""
    reasoning_parser: ReasoningParserName | Literal[""] = ""

    def __post_init__(self) -> None:
        """Complete the format: gpt-oss writes both in channels, so one of its parsers implies the other."""
        if self.tool_call_parser == "openai" or self.reasoning_parser == "openai_gptoss":
            object.__setattr__(self, "tool_call_parser", "openai")
            object.__setattr__(self, "reasoning_parser", "openai_gptoss")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the text needs although the tokenizer may hide them."""
        return self.calls.tokens + THINK_TAGS.get(self.reasoning_parser, ())

    @property
    def calls(self) -> ToolCallFormat:
        """The format of calls; NO_CALLS if the model writes none."""
        return TOOL_CALL_FORMATS[self.tool_call_parser] if self.tool_call_parser else NO_CALLS

    def begins_with_reasoning(self, prompt: str) -> bool:
        """Return whether the output of a rendered prompt begins inside the reasoning, because the prompt ends with its tag.

        deepseek_r1 assumes it of every prompt that does not end the reasoning, as in vLLM.
        """
        if self.reasoning_parser not in THINK_TAGS:
            return False
        start, end = THINK_TAGS[self.reasoning_parser]
        text = prompt[-MAX_HEADER:].rstrip()
        return text.endswith(start) or (self.reasoning_parser == "deepseek_r1" and not text.endswith(end))

    def parser(
        self,
        prompt: str = "",
        tools: Tools | ArgumentTypes | None = None,
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> ChatParser:
        """Return a parser of one completion.

        Args:
            prompt: the rendered prompt.
            tools: the tools that may be called. Without any, calls stay text.
            max_calls: number of calls after which further ones are dropped.
            is_forced: the output must be a call, so that no beginning of one is text.
        """
        types = tools if isinstance(tools, ArgumentTypes) else ArgumentTypes(tools or {})
        return ChatParser(self, self.begins_with_reasoning(prompt), types, max_calls, is_forced)


def detect_format(template: str) -> ChatFormat:
    """Return the format in which a chat template renders earlier turns; empty names where it renders none."""
    if TOOL_CALL_FORMATS["openai"].is_shown(template):
        return ChatFormat("openai", "openai_gptoss")
    think: ReasoningParserName | Literal[""] = (
        "qwen3" if "</think>" in template else "mistral" if "[/THINK]" in template else ""
    )
    return ChatFormat(next((name for name, calls in TOOL_CALL_FORMATS.items() if calls.is_shown(template)), ""), think)


class ChatParser:
    """Parser of one completion; `ChatFormat.parser` makes it. num_calls: tool calls so far."""

    def __init__(
        self, form: ChatFormat, in_reasoning: bool, types: ArgumentTypes, max_calls: int | None, is_forced: bool
    ) -> None:
        self._output = MessageWriter(max_calls, form.calls.call_id_length)
        calls = form.calls if types.tools or form.calls.is_always_read else NO_CALLS
        tags = THINK_TAGS.get(form.reasoning_parser)
        self._reader = calls.reader(self._output, types, tags, in_reasoning, is_forced)
        self._reader.run(self._reader.read(calls.openers))

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._output.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text is inside the reasoning."""
        return self._reader.is_reasoning

    def pieces(self, text: str) -> list[ChatMessage]:
        """Take the next piece of the text; return what it adds to the message.

        Each message has reasoning before content before calls, so that they keep the order of the text.
        """
        self._reader.push(text)
        return self._output.take()

    def last_pieces(self) -> list[ChatMessage]:
        """Return what was held back, as `pieces` does; the text has ended."""
        self._reader.finish()
        self._output.end()
        return self._output.take()
