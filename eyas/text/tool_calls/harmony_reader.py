"""Reads the messages of gpt-oss, whose headers name a channel or the tool that they call."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from eyas.text.incremental_reader import MAX_HEADER, Steps
from eyas.text.tool_calls.call_reader import CallReader, without_end

_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HARMONY_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*)?(?:assistant\s*)?(?:to=(?P<first>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*)?"
    r"(?:to=(?P<second>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?(?:(?:json|code|text)\s*)?"
)
# A header at the end of a text that max_tokens cut.
_CUT_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*[a-z]{0,9}\s*)?(?:to=?(?P<first>[^\s<]*)\s*)?(?:<\|channel\|>\s*[a-z]{0,10}\s*)?"
    r"(?:t|to=?(?P<second>[^\s<]*)\s*)?(?:<\|constrain\|>\s*)?[jsonctdex]{0,4}\s*"
)


class HarmonyReader(CallReader):
    """Reader of harmony, in which reasoning, content and calls are messages."""

    def calls(self) -> Steps:
        """Parse <|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|> of gpt-oss.

        The prompt ends with <|start|>assistant.
        """
        header = ""
        while True:
            found = yield from self._header(header)
            if found is None:
                return
            marker = yield from self.until(_HARMONY_ENDS, found)
            self._out.end_call()
            self.is_reasoning = False
            header = marker if marker in ("<|start|>", "<|channel|>") else ""

    def _header(self, begun: str) -> Generator[None, None, Callable[[str], None] | None]:
        """Read the header of a message of harmony; return where its text goes, None at the end.

        begun: what is read of it.
        """
        marker = "<|message|>"
        while (at := self.rest.find(marker)) < 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                header = begun + self.take(len(self.rest))
                marks = ("<|start|>", "<|channel|>", "<|constrain|>", marker)
                shown = without_end(header, *marks)
                is_cut = len(header) - len(shown) >= (1 if begun or shown.strip() else self.least_cut)
                if (header.isspace() and not begun) or not self._is_cut_header(shown if is_cut else header):
                    self._out.content(header)
                return None
        if at < 0 or at + len(marker) > MAX_HEADER:
            self._out.content(begun)
            return self._out.content
        header = begun + self.take(at)
        self.take(len(marker))
        found = _HARMONY_HEADER.fullmatch(header)
        recipient = found and (found["first"] or found["second"])
        if found is None or (recipient and not self._is_tool(recipient)):
            self._out.content(header + marker)
            return self._out.content
        if recipient:
            self._out.call(recipient.removeprefix("functions."))
            return self._out.arguments
        self._out.begin_message()
        self.is_reasoning = found["channel"] == "analysis"
        return self._out.reasoning if self.is_reasoning else self._out.content

    def _is_cut_header(self, header: str) -> bool:
        """Return whether it is the beginning of a header. A recipient in it must be the beginning of a tool's name."""
        found = _CUT_HEADER.fullmatch(header)
        names = [name for tool in self._tools for name in (tool, f"functions.{tool}")]
        recipients = [one for one in (found["first"], found["second"]) if one] if found else []
        return found is not None and all(any(name.startswith(one) for name in names) for one in recipients)

    def _is_tool(self, recipient: str) -> bool:
        return bool(self._tools) and (recipient.startswith("functions.") or recipient in self._tools)
