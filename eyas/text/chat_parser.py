"""Reads content, reasoning and tool calls from the text of an assistant, in the formats that models write.

A parser takes the text in pieces of any length; the message does not depend on where the pieces end. Text that breaks its
format is never dropped: it becomes content, or part of the arguments that it broke. `tool_call_formats` reads each format,
and says what becomes of a call that the end of the output cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.config.router import ReasoningParserName, ToolParserName
from eyas.text.chat_message import ChatMessage, MessageWriter
from eyas.text.incremental_reader import MAX_HEADER
from eyas.text.tool_call_arguments import ArgumentTypes, Tools
from eyas.text.tool_call_formats import MARKS, CallReader

_GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# Special tokens of the formats. The decoder has to leave them in the text.
_SPECIAL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "glm45": _GLM_TOKENS,
    "glm47": _GLM_TOKENS,
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    **{name: (m.section, m.call, m.separator, m.call_end, m.end) for name, m in MARKS.items()},
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}
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
        return _SPECIAL_TOKENS.get(self.tool_call_parser, ()) + THINK_TAGS.get(self.reasoning_parser, ())

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
    if "<|channel|>" in template and "<|message|>" in template:
        return ChatFormat("openai", "openai_gptoss")
    think: ReasoningParserName | Literal[""] = (
        "qwen3" if "</think>" in template else "mistral" if "[/THINK]" in template else ""
    )
    return ChatFormat(next((name for name, is_shown in _SHOWN if is_shown(template)), ""), think)


# How a template shows each format; the first match counts. Some calls look like Hermes' at first: MiniMax, Apriel.
_SHOWN: tuple[tuple[ToolParserName | Literal[""], Callable[[str], bool]], ...] = (
    ("mistral", lambda text: "[TOOL_CALLS]" in text),
    ("deepseek_v3", lambda text: MARKS["deepseek_v3"].section in text and "```json" in text),
    ("deepseek_v31", lambda text: MARKS["deepseek_v31"].section in text),
    ("kimi_k2", lambda text: MARKS["kimi_k2"].section in text),
    ("qwen3_coder", lambda text: "<function=" in text and "<tool_call>" in text),
    ("", lambda text: any(other in text for other in ("<function=", "<invoke", "<tool_calls>"))),
    ("glm45", lambda text: "<tool_call>" in text and "</arg_key>\n<arg_value>" in text),
    ("glm47", lambda text: "<tool_call>" in text and "<arg_key>" in text),
    ("hermes", lambda text: "<tool_call>" in text),
    ("llama3_json", lambda text: "<|python_tag|>" in text or '"parameters": dictionary of argument name' in text),
)


class ChatParser:
    """Parser of one completion; `ChatFormat.parser` makes it. num_calls: tool calls so far."""

    def __init__(
        self, form: ChatFormat, in_reasoning: bool, types: ArgumentTypes, max_calls: int | None, is_forced: bool
    ) -> None:
        self._output = MessageWriter(max_calls, 9 if form.tool_call_parser == "mistral" else 0)
        tags = THINK_TAGS.get(form.reasoning_parser)
        self._reader = CallReader(self._output, types, tags, in_reasoning, is_forced)
        is_read = form.tool_call_parser == "openai" or types.tools
        self._reader.run(self._reader.read(form.tool_call_parser if is_read else ""))

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
