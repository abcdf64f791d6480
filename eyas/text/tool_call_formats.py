"""The formats of tool calls, by vLLM's names of parsers: how each is read, marked, and seen in a chat template.

To add a format, give it an entry in TOOL_CALL_FORMATS, with a reader in `tool_calls` if none fits; its name in
`ToolParserName`; and the output that a forced call must match in `services/router/http/tool_tags.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from eyas.config.router import ToolParserName
from eyas.text.tool_calls.call_reader import CallReader
from eyas.text.tool_calls.harmony_reader import HarmonyReader
from eyas.text.tool_calls.mistral_reader import MistralReader
from eyas.text.tool_calls.pythonic_reader import PythonicReader
from eyas.text.tool_calls.section_reader import Marks, SectionReader
from eyas.text.tool_calls.tagged_reader import LlamaReader, TaggedReader

_TAGS = ("<tool_call>", "</tool_call>")
_GLM_TAGS = (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# Marks of formats that nothing here reads, whose calls look like Hermes' at first: MiniMax, Apriel.
_OF_OTHERS = ("<function=", "<invoke", "<tool_calls>")
DEEPSEEK = Marks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
)


@dataclass(frozen=True)
class ToolCallFormat:
    """Format in which models write calls.

    Attributes:
        reader: makes the reader of a text; see CallReader.
        tokens: its special tokens, which the decoder has to leave in the text.
        openers: marks before calls, which end the reasoning too.
        shown: how a chat template shows it: with all marks of one of these. None: only a setting names the format.
        not_shown: marks of other formats that such a template does not hold.
        call_id_length: characters of the ids of calls; 0 for OpenAI's.
        is_always_read: its text needs the reader without tools, too.
    """

    reader: Callable[..., CallReader]
    tokens: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    shown: tuple[tuple[str, ...], ...] = ()
    not_shown: tuple[str, ...] = ()
    call_id_length: int = 0
    is_always_read: bool = False

    def is_shown(self, template: str) -> bool:
        """Return whether a chat template renders earlier calls in this format."""
        has_marks = any(all(mark in template for mark in marks) for marks in self.shown)
        return has_marks and not any(mark in template for mark in self.not_shown)


NO_CALLS = ToolCallFormat(CallReader)


def _in_tags(tokens: tuple[str, ...] = _TAGS, *shown: str, not_shown: tuple[str, ...] = _OF_OTHERS) -> ToolCallFormat:
    return ToolCallFormat(TaggedReader, tokens, ("<tool_call>",), (shown,) if shown else (), not_shown)


def _in_sections(marks: Marks, *shown: str) -> ToolCallFormat:
    openers = (*marks.sections, marks.call)
    return ToolCallFormat(partial(SectionReader, marks), marks.tokens, openers, ((marks.section, *shown),))


_PYTHONIC = ToolCallFormat(PythonicReader, ("<|python_start|>", "<|python_end|>"), ("<|python_start|>",))
# By name. Of several that a chat template shows, the first counts.
TOOL_CALL_FORMATS: Mapping[ToolParserName, ToolCallFormat] = {
    "mistral": ToolCallFormat(
        MistralReader, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",), (("[TOOL_CALLS]",),), call_id_length=9
    ),
    "deepseek_v3": _in_sections(DEEPSEEK, "```json"),
    "deepseek_v31": _in_sections(DEEPSEEK),
    "kimi_k2": _in_sections(KIMI),
    "qwen3_coder": _in_tags(_TAGS, "<tool_call>", "<function=", not_shown=()),
    "glm45": _in_tags(_GLM_TAGS, "<tool_call>", "</arg_key>\n<arg_value>"),
    "glm47": _in_tags(_GLM_TAGS, "<tool_call>", "<arg_key>"),
    "hermes": _in_tags(_TAGS, "<tool_call>"),
    "llama3_json": ToolCallFormat(
        LlamaReader,
        ("<|python_tag|>",),
        ("<|python_tag|>",),
        (("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        _OF_OTHERS,
    ),
    "qwen3_xml": _in_tags(),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "openai": ToolCallFormat(
        HarmonyReader,
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        shown=(("<|channel|>", "<|message|>"),),
        is_always_read=True,
    ),
}
