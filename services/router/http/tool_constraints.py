"""Constraints on the output of a chat: calls of tools in the format of the model, after reasoning and beside content.

Constraints are structural tags, as of xgrammar, whose parts `tool_tags` writes for each format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from eyas.api.request import ReasoningBudget, StructuredOutputs
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.tools import ToolFields
from eyas.services.router.http.tool_tags import TAG_WRITERS, Format, TagWriter, const_string
from eyas.text.chat_parser import REASONING_MARKS, THINK_TAGS, ChatFormat, ChatParser
from eyas.text.tokenizer import Tokenizer
from eyas.text.tool_call_arguments import ArgumentTypes

PROMPT_END_TOKENS = 32
log = logging.getLogger(__name__)


class ChatOutput:
    """Constraint and reader of the output of one chat.

    Attributes:
        kept_tokens: special tokens that its text needs.

    Raises InvalidRequest if there are tools, and no format of their calls.

    Args:
        form: of the model.
        prompt: its token ids, whose end shows where the output begins.
    """

    def __init__(
        self, fields: ToolFields, model: str, form: ChatFormat, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> None:
        tools, mode = fields.called_tools, fields.tool_choice.mode
        if mode == "auto" and tools and not form.tool_call_parser:
            reason = (
                f"the chat template of {model!r} shows no format of tool calls; set tool_call_parser in the router's models"
            )
            raise InvalidRequest(f"{reason}, or force a call with tool_choice", "tools")
        if mode == "required" and not form.tool_call_parser:
            form = replace(form, tool_call_parser="hermes")
        if not tools and form.tool_call_parser != "openai":
            form = replace(form, tool_call_parser="")
        self._fields = fields
        self._model = model
        self._form = form
        self._tokenizer = tokenizer
        self._prompt_end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        self.kept_tokens = tokenizer.special_ids(form.special_tokens)

    @property
    def new_parser(self) -> Callable[[], ChatParser] | None:
        """Makes parsers of the completions; None if their text is all content."""
        if self._form == ChatFormat():
            return None
        types = ArgumentTypes({tool.function.name: tool.function.parameters for tool in self._fields.called_tools})
        is_forced = bool(types.tools) and self._fields.tool_choice.mode == "required"
        return lambda: self._form.parser(self._prompt_end, types, self._fields.max_calls, is_forced)

    def constraint(self, given: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return what the output must match: a call where one is forced, calls of `strict` tools, and what is asked for.

        given: what other fields of the request ask for.
        """
        form, fields, tools = self._form, self._fields, self._fields.called_tools
        kind = TAG_WRITERS[form.tool_call_parser] if form.tool_call_parser else TagWriter
        writer = kind(form, self._is_special, tools, is_parallel=fields.max_calls is None)
        in_reasoning = form.begins_with_reasoning(self._prompt_end)
        if tools and fields.tool_choice.mode == "required":
            return _structured(writer.after_reasoning(writer.calls(), in_reasoning))
        if given is not None:
            content, has_calls = _content_format(given), bool(tools and form.tool_call_parser)
            if content is None or not (has_calls or form.reasoning_parser) or _has_reasoning(given, form):
                return given
            if has_calls:
                content = writer.content_or_calls(content)
            whole = writer.after_reasoning(content, in_reasoning, is_content=not has_calls)
            return replace(_structured(whole), whitespace_pattern=given.whitespace_pattern)
        if fields.tool_choice.names or any(tool.function.strict for tool in tools):
            return _structured(writer.after_reasoning(writer.text_or_calls(), in_reasoning))
        return None

    def reasoning_budget(self, num_tokens: int | None) -> ReasoningBudget | None:
        """Return what limits the reasoning to a number of tokens.

        None for no limit, if the model writes no reasoning, and if its marks are ordinary text, which has many spellings.
        """
        marks = REASONING_MARKS.get(self._form.reasoning_parser)
        if num_tokens is None or num_tokens < 0 or marks is None:
            return None
        start_ids, end_ids = map(self._tokenizer.mark_ids, marks)
        if start_ids is None or end_ids is None:
            _warn_of_no_budget(self._model, *marks)
            return None
        is_open = self._form.begins_with_reasoning(self._prompt_end)
        return ReasoningBudget(num_tokens, end_ids, start_ids, is_open)

    def _is_special(self, text: str) -> bool | None:
        """Return whether a text is a special token of the model; None if it is no token."""
        token = self._tokenizer.tokenizer.token_to_id(text)
        return None if token is None else token in self._tokenizer.special


@cache
def _warn_of_no_budget(model: str, start: str, end: str) -> None:
    """Log once that a model's reasoning cannot be limited."""
    log.warning("%s: thinking budgets are not kept: its tokenizer has no token for %s or %s", model, start, end)


def _structured(format_: Format) -> StructuredOutputs:
    tag = json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)
    return StructuredOutputs(structural_tag=tag)


def _has_reasoning(given: StructuredOutputs, form: ChatFormat) -> bool:
    """Return whether a structural tag describes the reasoning itself, as it holds the marks of the model's format."""
    marks = THINK_TAGS.get(form.reasoning_parser, ("<|channel|>",))
    return any(mark in given.structural_tag for mark in marks)


def _content_format(given: StructuredOutputs) -> Format | None:
    """Return a constraint as part of a structural tag; None if it is a broken one."""
    if given.json:
        return {"type": "json_schema", "json_schema": json.loads(given.json)}
    if given.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if given.regex:
        return {"type": "regex", "pattern": given.regex}
    if given.choice:
        return {"type": "or", "elements": [const_string(choice) for choice in given.choice]}
    if given.grammar:
        return {"type": "grammar", "grammar": given.grammar}
    tag = json.loads(given.structural_tag)
    own = tag.get("format") if tag.get("type") == "structural_tag" else None
    return own if isinstance(own, dict) else None
