"""What an assistant's text means: content, reasoning and tool calls, read from the formats that models write.

A parser takes the text in pieces of any length; the message does not depend on where the pieces end. Text that breaks its
format is never dropped: it becomes content, or part of the arguments that it broke. White space beside a call is format.
To add a format, write a generator beside `hermes` and name it in `_READERS` and in `ToolParserName`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from eyas.text_reader import MAX_HEADER, WHITE_SPACE, JsonValue, Steps, TextReader

ToolParserName = Literal["llama3_json", "hermes", "qwen3_coder", "mistral", "openai"]
ReasoningParserName = Literal["deepseek_r1", "qwen3", "mistral", "openai_gptoss"]

# Special tokens of the formats. The decoder has to leave them in the text.
_SPECIAL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "llama3_json": ("<|python_tag|>",),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}
THINK_TAGS: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the tools' names


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


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes reasoning and tool calls, by vLLM's names of parsers. Empty: it writes none."""

    tool_call_parser: ToolParserName | Literal[""] = ""
    reasoning_parser: ReasoningParserName | Literal[""] = ""

    def __post_init__(self) -> None:
        """gpt-oss writes both in channels: one of its parsers implies the other."""
        if self.tool_call_parser == "openai" or self.reasoning_parser == "openai_gptoss":
            object.__setattr__(self, "tool_call_parser", "openai")
            object.__setattr__(self, "reasoning_parser", "openai_gptoss")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the text needs although the tokenizer may hide them."""
        return _SPECIAL_TOKENS.get(self.tool_call_parser, ()) + THINK_TAGS.get(self.reasoning_parser, ())

    def begins_with_reasoning(self, prompt: str) -> bool:
        """Whether the output of a rendered prompt begins inside the reasoning, because the prompt ends with its tag.

        deepseek_r1 assumes it of every prompt that does not end the reasoning, as in vLLM.
        """
        if self.reasoning_parser not in THINK_TAGS:
            return False
        start, end = THINK_TAGS[self.reasoning_parser]
        text = prompt[-MAX_HEADER:].rstrip()
        return text.endswith(start) or (self.reasoning_parser == "deepseek_r1" and not text.endswith(end))

    def parser(self, prompt: str = "", tools: Tools | None = None, max_calls: int | None = None) -> ChatParser:
        """Return a parser of one completion.

        Args:
            prompt: the rendered prompt.
            tools: the tools that may be called. Without any, calls stay text.
            max_calls: number of calls after which further ones are dropped.
        """
        return ChatParser(self, self.begins_with_reasoning(prompt), tools or {}, max_calls)


def detect_format(template: str) -> ChatFormat:
    """Return the format in which a chat template renders earlier turns; empty names where it renders none."""
    if "<|channel|>" in template and "<|message|>" in template:
        return ChatFormat("openai", "openai_gptoss")
    tools: ToolParserName | Literal[""] = ""
    if "[TOOL_CALLS]" in template:
        tools = "mistral"
    elif "<function=" in template:
        tools = "qwen3_coder" if "<tool_call>" in template else ""
    elif "<tool_call>" in template and not any(other in template for other in _OTHER_CALLS):
        tools = "hermes"
    elif "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        tools = "llama3_json"
    return ChatFormat(tools, "qwen3" if "</think>" in template else "mistral" if "[/THINK]" in template else "")


# In templates of models whose calls look like Hermes' at first: GLM, MiniMax, Apriel.
_OTHER_CALLS = ("<arg_key>", "<invoke", "<tool_calls>")


class ChatParser:
    """Reads one completion; `ChatFormat.parser` makes it. num_calls: tool calls so far."""

    def __init__(self, form: ChatFormat, in_reasoning: bool, tools: Tools, max_calls: int | None) -> None:
        self._output = _Output(max_calls, 9 if form.tool_call_parser == "mistral" else 0)
        content = _Reader(self._output, tools)
        is_read = form.tool_call_parser == "openai" or bool(tools and form.tool_call_parser)
        content.run((_READERS[form.tool_call_parser] if is_read else _Reader.plain)(content))
        self._readers = [content]
        if form.reasoning_parser in THINK_TAGS:
            reasoning = _Reader(self._output, tools)
            reasoning.run(reasoning.think(*THINK_TAGS[form.reasoning_parser], in_reasoning, content))
            self._readers = [reasoning, content]

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._output.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is inside the reasoning."""
        return self._readers[0].is_reasoning

    def push(self, text: str) -> ChatMessage:
        """Take the next piece of the text; return what it adds to the message."""
        self._readers[0].push(text)
        return self._output.take()

    def finish(self) -> ChatMessage:
        """Return what was held back; the text has ended."""
        for reader in self._readers:
            reader.finish()
        self._output.end()
        return self._output.take()


class _Output:
    """The message as it grows. White space of the content is held until it is known not to be beside a call."""

    def __init__(self, max_calls: int | None, id_length: int) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._id_length = id_length
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

    def call(self, name: str) -> None:
        self.end_call()
        self.num_calls += 1
        self._space, self._is_after_call, self._has_arguments = [], True, False
        if not self._is_dropped:
            self._new += ChatMessage(tool_calls=(ToolCall(self.num_calls - 1, self._new_id(), name),))

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


class _Reader(TextReader):
    """Reads what one format means into the message. tools: those that may be called."""

    def __init__(self, output: _Output, tools: Tools) -> None:
        super().__init__()
        self.is_reasoning = False
        self._out = output
        self._tools = tools

    def plain(self) -> Steps:
        """Everything is content."""
        return self.pass_on(self._out.content)

    def think(self, start: str, end: str, in_reasoning: bool, content: _Reader) -> Steps:
        """Reasoning between two tags, then content. The first tag may be part of the prompt."""
        self.is_reasoning = in_reasoning
        space = yield from self.skip_space()
        if (yield from self.skip(start)):
            self.is_reasoning = True
        elif in_reasoning:
            self._out.reasoning(space)
        else:
            content.push(space)
        if self.is_reasoning:
            yield from self.until((end,), self._out.reasoning)
            self.is_reasoning = False
        yield from self.pass_on(content.push)

    def hermes(self) -> Steps:
        """<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>, also of Qwen; or with <function=NAME> inside."""
        while (yield from self.until(("<tool_call>",), self._out.content)):
            prefix = "<tool_call>" + (yield from self.skip_space())
            if (yield from self.skip("<function=")):
                is_call = yield from self._function(f"{prefix}<function=")
            else:
                is_call = yield from self._call(prefix, "</tool_call>")
            if is_call:
                yield from self.skip_space()
                yield from self.skip("</tool_call>")

    def llama3_json(self) -> Steps:
        """{"name": NAME, "parameters": OBJECT} as the whole text, or after <|python_tag|>; several with `;` between them."""
        space = yield from self.skip_space()
        yield from self._calls_after(space, "", ";", self._tools)
        while (yield from self.until(("<|python_tag|>",), self._out.content)):
            space = yield from self.skip_space()
            yield from self._calls_after(f"<|python_tag|>{space}", "<|python_tag|>", ";")

    def mistral(self) -> Steps:
        """[TOOL_CALLS][{"name": NAME, "arguments": OBJECT}, ...], or [TOOL_CALLS]NAME[ARGS]OBJECT for each call."""
        marker = "[TOOL_CALLS]"
        while (yield from self.until((marker,), self._out.content)):
            space = yield from self.skip_space()
            name = yield from self.take_while(_NAME)
            if name:
                yield from self._named_call(f"{marker}{space}{name}", name)
            elif (yield from self.skip("[")):
                if (yield from self._calls_after(f"{marker}{space}[", marker, ",")):
                    yield from self.skip("]")
            else:
                yield from self._calls_after(f"{marker}{space}", marker, ",")

    def harmony(self) -> Steps:
        """<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|> of gpt-oss. The prompt ends with <|start|>assistant."""
        header = ""
        while True:
            found = yield from self._header(header)
            if found is None:
                return
            marker = yield from self.until(_HARMONY_ENDS, found)
            self._out.end_call()
            self.is_reasoning = False
            header = marker if marker in ("<|start|>", "<|channel|>") else ""

    # What the formats share

    def _header(self, begun: str) -> Generator[None, None, Callable[[str], None] | None]:
        """Read the header of a message of harmony; return where its text goes, None at the end.

        begun: what is read of it.
        """
        marker = "<|message|>"
        while (at := self.rest.find(marker)) < 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                header = begun + self.take(len(self.rest))
                if header.isspace() or not _CUT_HEADER.fullmatch(header):
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
        self.is_reasoning = found["channel"] == "analysis"
        return self._out.reasoning if self.is_reasoning else self._out.content

    def _is_tool(self, recipient: str) -> bool:
        return bool(self._tools) and (recipient.startswith("functions.") or recipient in self._tools)

    def _calls_after(
        self, prefix: str, broken_until: str, separator: str, names: Collection[str] = ()
    ) -> Generator[None, None, bool]:
        """Read one call after the other; return whether the last one was there. See `_call`."""
        while (yield from self._call(prefix, broken_until, names)):
            yield from self.skip_space()
            prefix = separator if (yield from self.skip(separator)) else ""
            prefix += yield from self.skip_space()
            if not (yield from self.begins_with("{")):
                self._out.content(prefix)
                return True
        return False

    def _named_call(self, prefix: str, name: str) -> Steps:
        """Read OBJECT, [ARGS]OBJECT or [CALL_ID]ID[ARGS]OBJECT after a name."""
        if (yield from self.skip("[CALL_ID]")):
            prefix += "[CALL_ID]" + (yield from self.take_while(_NAME))
        if (yield from self.skip("[ARGS]")):
            prefix += "[ARGS]"
        prefix += yield from self.skip_space()
        if not (yield from self.begins_with("{")):
            self._out.content(prefix)
            return
        self._out.call(name)
        yield from self._arguments("[TOOL_CALLS]")

    def _function(self, prefix: str) -> Generator[None, None, bool]:
        """Read NAME><parameter=KEY>VALUE</parameter>...</function>; return whether it was there."""
        name = yield from self.take_while(_NAME)
        if not name or not (yield from self.skip(">")):
            self._out.content(prefix + name)
            return False
        self._out.call(name)
        before = "{"
        yield from self.skip_space()
        while (yield from self.skip("<parameter=")):
            key = yield from self.take_while(_NAME)
            yield from self.skip(">")
            value: list[str] = []
            yield from self.until(("</parameter>",), value.append)
            properties = self._tools.get(name, {}).get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            text = _json_value("".join(value).removeprefix("\n").removesuffix("\n"), schema)
            self._out.arguments(f"{before}{json.dumps(key)}: {text}")
            before = ", "
            yield from self.skip_space()
        if before == ", ":
            self._out.arguments("}")
        yield from self.skip("</function>")
        return True

    def _call(self, prefix: str, broken_until: str, names: Collection[str] = ()) -> Generator[None, None, bool]:
        """Read {"name": NAME, "arguments": OBJECT}; return whether it was there.

        Args:
            prefix: what becomes content if it is not there, with the text that shows it.
            broken_until: the arguments go on up to this marker if they are no JSON; empty: to the end.
            names: names that count as a call; empty: all.
        """
        if not (yield from self.begins_with("{")):
            self._out.content(prefix)
            return False
        value, length = JsonValue(), 0
        while True:
            if header := _CALL_HEADER.match(self.rest[:MAX_HEADER]):
                text = self.take(header.end())
                if names and header[1] not in names:
                    self._out.content(prefix + text)
                    return False
                self._out.call(header[1])
                yield from self._arguments(broken_until)
                yield from self._end_of_object()
                return True
            key = _FIRST_KEY.match(self.rest[:MAX_HEADER])
            if key and key[1] not in _CALL_KEYS:
                self._out.content(prefix + self.take(key.end()))
                return False
            length += value.scan(self.rest, length)
            if value.is_done or value.is_broken or not (yield from self.more()):
                break
        text = self.take(length)
        if not value.is_done or (call := _whole_call(text, names)) is None:
            self._out.content(prefix + text)
            return False
        self._out.call(call.name)
        self._out.arguments(call.arguments)
        return True

    def _arguments(self, broken_until: str) -> Steps:
        """Pass on one JSON object as it comes."""
        value = JsonValue()
        while not value.is_done:
            self._out.arguments(self.take(value.scan(self.rest)))
            if value.is_broken:
                yield from self.pass_on(self._out.arguments, broken_until)
                return
            if not value.is_done and not (yield from self.more()):
                return

    def _end_of_object(self) -> Steps:
        """Read the rest of a call's object after its arguments. Models forget the brace at times."""
        yield from self.skip_space()
        if not (yield from self.begins_with(",")):
            yield from self.skip("}")
            return
        while (at := self.rest.find("}") + 1) == 0 and len(self.rest) < MAX_HEADER:
            if not (yield from self.more()):
                break
        text = self.take(at if 0 < at <= MAX_HEADER else min(len(self.rest), MAX_HEADER))
        if not _MORE_KEYS.fullmatch(text):
            self._out.content(text)


_READERS: Mapping[str, Callable[[_Reader], Steps]] = {
    "hermes": _Reader.hermes,
    "qwen3_coder": _Reader.hermes,
    "llama3_json": _Reader.llama3_json,
    "mistral": _Reader.mistral,
    "openai": _Reader.harmony,
}
_NAME = re.compile(r"[\w.:/-]*")
_CALL_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
_MORE_KEYS = re.compile(r'(?:,\s*"(?:id|type)"\s*:\s*"[^"\\]*"\s*)+\}')
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HARMONY_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*)?(?:assistant\s*)?(?:to=(?P<first>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*)?"
    r"(?:to=(?P<second>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?(?:(?:json|code|text)\s*)?"
)
# A header at the end of a text that max_tokens cut.
_CUT_HEADER = re.compile(r"\s*(?:<\|start\|>\s*(?:assistant\s*)?)?(?:<\|channel\|>\s*[a-z]{0,10}\s*)?")


def _whole_call(text: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that an object describes, whatever the order of its keys; None if it describes none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS:
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or (names and name not in names):
        return None
    if isinstance(arguments, str):  # some models encode them twice
        return ToolCall(0, name=name, arguments=arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return ToolCall(0, name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))


def _json_value(text: str, schema: object) -> str:
    """Return the value of a parameter as JSON. It is text unless its schema says otherwise."""
    kinds = _kinds(schema)
    if not kinds or ("string" in kinds and not (text == "null" and "null" in kinds)):
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _kinds(schema: object) -> list[object]:
    """Return the types that a schema names, unchecked as it is."""
    if not isinstance(schema, Mapping):
        return []
    own, others = schema.get("type"), schema.get("anyOf")
    kinds = own if isinstance(own, list) else [own] if own else []
    return kinds + [kind for other in others for kind in _kinds(other)] if isinstance(others, list) else kinds
