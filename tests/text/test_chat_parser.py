"""Tool calls and reasoning are read from every format, wherever the pieces of a text end, and no text is lost."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config.router import ToolParserName
from eyas.text.chat_message import ChatMessage, ToolCall, joined
from eyas.text.chat_parser import ChatFormat, detect_format
from eyas.text.tool_call_arguments import MAX_PIECES, Tools, python_arguments, python_json
from eyas.text.tool_call_formats import DEEPSEEK, KIMI, TOOL_CALL_FORMATS

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "array"},
    "is_warm": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: dict[str, dict[str, object]] = {"add": {}, "get_weather": {"properties": PROPERTIES}}
HERMES, LLAMA = ChatFormat("hermes"), ChatFormat("llama3_json")
MISTRAL, OPENAI = ChatFormat("mistral"), ChatFormat("openai")
QWEN3, R1 = ChatFormat("hermes", "qwen3"), ChatFormat("", "deepseek_r1")
MAGISTRAL = ChatFormat("mistral", "mistral")
OTHERS = [ChatFormat(name) for name in ("pythonic", "glm45", "deepseek_v3", "kimi_k2")]
FORMATS = [HERMES, LLAMA, MISTRAL, OPENAI, QWEN3, R1, MAGISTRAL, *OTHERS]


def read(
    form: ChatFormat, pieces: Sequence[str], prompt: str = "", tools: Tools = TOOLS, max_calls: int | None = None
) -> ChatMessage:
    """Return the message of a text that comes in pieces, without the ids of its calls."""
    parser = form.parser(prompt, tools, max_calls)
    message = joined([part for piece in pieces for part in parser.pieces(piece)] + parser.last_pieces())
    assert all(call.id for call in message.tool_calls)
    return replace(message, tool_calls=tuple(replace(call, id="") for call in message.tool_calls))


def calls(*named: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(index, name=name, arguments=arguments) for index, (name, arguments) in enumerate(named))


ADD = ("add", '{"a": 1}')
WEATHER = ("get_weather", '{"city": "Z\u00fcrich", "days": [1, {"n": null}]}')
CASES: list[tuple[ChatFormat, str, ChatMessage]] = [
    (HERMES, "Hello\n", ChatMessage("Hello\n")),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {ADD[1]}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER[1]}}}\n</tool_call>',
        ChatMessage("Let me see.", "", calls(ADD, WEATHER)),
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>Done', ChatMessage("Done", "", calls(ADD))),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', ChatMessage("", "", calls(("add", "{}")))),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ChatMessage("", "", calls(ADD))),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>ok', ChatMessage("ok", "", calls(ADD))),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}, "id": "x"}</tool_call>',
        ChatMessage("", "", calls(("add", '{"a": "</tool_call>"}'))),
    ),
    (
        ChatFormat("qwen3_coder"),
        "Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n1\n</parameter>\n<parameter=days>\n[1]\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n<parameter=x>a\nb</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=add></function></tool_call>",
        ChatMessage(
            "Well.", "", calls(("get_weather", '{"city": "1", "days": [1], "note": null, "x": "a\\nb"}'), ("add", "{}"))
        ),
    ),
    (HERMES, "<tool_call><function=f g", ChatMessage("<tool_call><function=f g")),
    (HERMES, "<tool_call><function=add>w1</function>", ChatMessage("w1</function>", "", calls(("add", "{}")))),
    (HERMES, "<tool_call>add(1)</tool_call>", ChatMessage("<tool_call>add(1)</tool_call>")),
    (HERMES, '<tool_call>{"name": "add", "w1', ChatMessage('<tool_call>{"name": "add", "w1')),
    (HERMES, '<tool_call>{"name": "subtract', ChatMessage('<tool_call>{"name": "subtract')),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": (1)}}</tool_call> b',
        ChatMessage("b", "", calls(("add", '{"a": (1)}}'))),
    ),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ChatMessage("", "", calls(ADD))),
    (
        LLAMA,
        f'<|python_tag|>{{"name": "add", "parameters": {ADD[1]}}}; {{"name": "get_weather", "parameters": {WEATHER[1]}}}',
        ChatMessage("", "", calls(ADD, WEATHER)),
    ),
    (LLAMA, '{"name": "Ada", "parameters": {"a": 1}}', ChatMessage('{"name": "Ada", "parameters": {"a": 1}}')),
    (LLAMA, '{"sum": 3}', ChatMessage('{"sum": 3}')),
    (LLAMA, '<|python_tag|>add.call(a="1")', ChatMessage('<|python_tag|>add.call(a="1")')),
    (LLAMA, 'It is {"name": "add", "parameters": {}}', ChatMessage('It is {"name": "add", "parameters": {}}')),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD[1]}}}, {{"name": "get_weather", "arguments": {WEATHER[1]}}}]',
        ChatMessage("", "", calls(ADD, WEATHER)),
    ),
    (
        MISTRAL,
        f"Well.[TOOL_CALLS]add{ADD[1]}[TOOL_CALLS]get_weather[CALL_ID]a1b2[ARGS]{WEATHER[1]}",
        ChatMessage("Well.", "", calls(ADD, WEATHER)),
    ),
    (MISTRAL, "[TOOL_CALLS] none of them", ChatMessage("[TOOL_CALLS] none of them")),
    (MISTRAL, "[TOOL_CALLS][]", ChatMessage("[TOOL_CALLS][]")),
    (
        OPENAI,
        "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        ChatMessage("", "Add them.", calls(ADD)),
    ),
    (
        OPENAI,
        f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER[1]}<|call|>",
        ChatMessage("", "", calls(WEATHER)),
    ),
    (
        OPENAI,
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Done<|return|>",
        ChatMessage("First.\nDone"),
    ),
    (
        OPENAI,
        "<|channel|>commentary to=functions.add<|message|><|call|><|start|>assistant<|channel|>fin",
        ChatMessage("", "", calls(("add", "{}"))),
    ),
    (OPENAI, "Hello", ChatMessage("Hello")),
    (OPENAI, "Hello there<|message|>you<|end|>", ChatMessage("Hello there<|message|>you")),
    (
        QWEN3,
        f'<think>\nHm\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {ADD[1]}}}\n</tool_call>',
        ChatMessage("", "\nHm\n", calls(ADD)),
    ),
    (QWEN3, "\n\nHello", ChatMessage("\n\nHello")),
    (QWEN3, "<think>Hm", ChatMessage("", "Hm")),
    (R1, "Hm</think>Hello", ChatMessage("Hello", "Hm")),
    (R1, "<think>Hm</think>Hello", ChatMessage("Hello", "Hm")),
    (
        ChatFormat("deepseek_v3"),
        f"Well.\n{DEEPSEEK.section}{DEEPSEEK.call}function{DEEPSEEK.separator}add\n```json\n{ADD[1]}\n```{DEEPSEEK.call_end}\n"
        f"{DEEPSEEK.call}function{DEEPSEEK.separator}get_weather\n```json\n{WEATHER[1]}\n```{DEEPSEEK.call_end}{DEEPSEEK.end}",
        ChatMessage("Well.", "", calls(ADD, WEATHER)),
    ),
    (
        ChatFormat("deepseek_v31"),
        f"{DEEPSEEK.section}{DEEPSEEK.call}add{DEEPSEEK.separator}{ADD[1]}{DEEPSEEK.call_end}{DEEPSEEK.end}Done",
        ChatMessage("Done", "", calls(ADD)),
    ),
    (ChatFormat("deepseek_v31"), f"{DEEPSEEK.section} none", ChatMessage(f"{DEEPSEEK.section} none")),
    (
        ChatFormat("deepseek_v31"),
        f"{DEEPSEEK.section}{DEEPSEEK.call}add is it",
        ChatMessage(f"{DEEPSEEK.section}{DEEPSEEK.call}add is it"),
    ),
    (
        ChatFormat("kimi_k2"),
        f"{KIMI.section}{KIMI.call}functions.add:0{KIMI.separator}{ADD[1]}{KIMI.call_end}"
        f"{KIMI.call}functions.get_weather:1{KIMI.separator}{WEATHER[1]}{KIMI.call_end}{KIMI.end}",
        ChatMessage("", "", calls(ADD, WEATHER)),
    ),
    (
        ChatFormat("glm45"),
        "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Z\u00fcrich</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>[1, {"n": null}]</arg_value>\n</tool_call>\n<tool_call>add</tool_call>',
        ChatMessage("Hm.", "", calls(WEATHER, ("add", "{}"))),
    ),
    (
        ChatFormat("glm47"),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>",
        ChatMessage("", "", calls(("get_weather", '{"city": "Bern"}'))),
    ),
    (ChatFormat("glm45"), "<tool_call>now or never", ChatMessage("<tool_call>now or never")),
    (
        ChatFormat("pythonic"),
        " [add(a=1), get_weather(city='Z\u00fcrich', days=[1, {'n': None}])]",
        ChatMessage("", "", calls(ADD, WEATHER)),
    ),
    (
        ChatFormat("llama4_pythonic"),
        '<|python_start|>[add(a=true, b=")]")]<|python_end|>',
        ChatMessage("", "", calls(("add", '{"a": true, "b": ")]"}'))),
    ),
    (ChatFormat("pythonic"), "[1, 2] is a list", ChatMessage("[1, 2] is a list")),
    (ChatFormat("pythonic"), "[add(1)]", ChatMessage("[add(1)]")),
    (ChatFormat("pythonic"), "[add(a=os.system())]", ChatMessage("[add(a=os.system())]")),
    (ChatFormat("pythonic"), "<|python_start|> None", ChatMessage("<|python_start|> None")),
    (ChatFormat("pythonic"), "<|python_start|>[add(1)]", ChatMessage("<|python_start|>[add(1)]")),
    (
        ChatFormat("pythonic"),
        r"""[add(from="x", user-id=1, a="\d\/", b=[{'c': r"\d"}, (1, None)], )]""",
        ChatMessage("", "", calls(("add", r'{"from": "x", "user-id": 1, "a": "\\d/", "b": [{"c": "\\d"}, [1, null]]}'))),
    ),
    (ChatFormat("pythonic"), "[add(a=1, a=2)]", ChatMessage("[add(a=1, a=2)]")),
    (
        HERMES,
        "<tool_call><function=get_weather><parameter=is_warm>True</parameter><parameter=note>None</parameter></function>",
        ChatMessage("", "", calls(("get_weather", '{"is_warm": true, "note": "None"}'))),
    ),
    (
        HERMES,
        "<tool_call><function=add>\n<parameter=a>\nx\n<parameter=b>\ny\n\n</parameter>\n<parameter=c>z</function></tool_call>ok",
        ChatMessage("ok", "", calls(("add", '{"a": "x", "b": "y\\n", "c": "z"}'))),
    ),
    (
        ChatFormat("glm47"),
        "<tool_call>add<arg_key>a</arg_key><arg_value>print(1)\n</arg_value></tool_call>",
        ChatMessage("", "", calls(("add", '{"a": "print(1)\\n"}'))),
    ),
    (OPENAI, " to=functions.get_w", ChatMessage()),
    (OPENAI, "<|channel|>commentary to=functions.add <|constrain|>json", ChatMessage()),
    (OPENAI, " to=functions.other", ChatMessage(" to=functions.other")),
    (MAGISTRAL, f"[THINK]Hm[/THINK]Yes[TOOL_CALLS]add[ARGS]{ADD[1]}", ChatMessage("Yes", "Hm", calls(ADD))),
]

LIST = '[{"name": "add", "parameters": {"a": 1}}]'
DICT = "{'name': 'add', 'arguments': {'a': True, 'b': (\"it's\", None)}}"
PYTHON_ADD = ("add", '{"a": true, "b": ["it\'s", null]}')
IN_DAYS = ("get_weather", '{"city": "Bern", "days": [1]}')
# Slips that models make: other openers, orders and ends than the format has.
SLIPS: list[tuple[ChatFormat, str, ChatMessage]] = [
    (HERMES, '{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ChatMessage("", "", calls(ADD))),
    (HERMES, f"<tool_call>\n{LIST}\n</tool_call>", ChatMessage("", "", calls(ADD))),
    (HERMES, f"<tool_call>\n```json\n{LIST}\n```\n</tool_call>", ChatMessage("", "", calls(ADD))),
    (HERMES, f"<tool_call>\n<tool_call>{LIST}</tool_call></tool_call>ok", ChatMessage("ok", "", calls(ADD))),
    (HERMES, f"<tool_call>{DICT}</tool_call>", ChatMessage("", "", calls(PYTHON_ADD))),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1}}\n{"name": "add"}</tool_call>',
        ChatMessage("", "", calls(ADD, ("add", "{}"))),
    ),
    (HERMES, """<tool_call>{"name": "add", "arguments": {'a': 1, }}}</tool_call>ok""", ChatMessage("ok", "", calls(ADD))),
    (
        HERMES,
        '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>',
        ChatMessage("", "", calls(ADD)),
    ),
    (HERMES, '```json\n{"a": 1}\n```', ChatMessage('```json\n{"a": 1}\n```')),
    (LLAMA, LIST, ChatMessage("", "", calls(ADD))),
    (LLAMA, f"```json\n{LIST}\n```", ChatMessage("", "", calls(ADD))),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1}}', ChatMessage("", "", calls(ADD))),
    (LLAMA, 'I add.<function=add>{"a": 1}</function>', ChatMessage("I add.", "", calls(ADD))),
    (MISTRAL, LIST, ChatMessage("", "", calls(ADD))),
    (MISTRAL, '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}', ChatMessage("", "", calls(ADD))),
    (MISTRAL, '[TOOL_CALLS] add [ARGS] {"a": 1}', ChatMessage("", "", calls(ADD))),
    (MISTRAL, '["add", 1] is a list', ChatMessage('["add", 1] is a list')),
    (
        ChatFormat("qwen3_coder"),
        "Now.\n\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
        ChatMessage("Now.", "", calls(("get_weather", '{"city": "Bern"}'))),
    ),
    (
        ChatFormat("qwen3_coder"),
        '<tool_call><function name="get_weather"><parameter name="city">Bern</parameter></function></tool_call>',
        ChatMessage("", "", calls(("get_weather", '{"city": "Bern"}'))),
    ),
    (
        ChatFormat("qwen3_coder"),
        "<tool_call><function=get_weather><parameter=city>Bern</tool_call>ok",
        ChatMessage("ok", "", calls(("get_weather", '{"city": "Bern"}'))),
    ),
    (ChatFormat("qwen3_coder"), f"<tool_call>{LIST}</tool_call>", ChatMessage("", "", calls(ADD))),
    (ChatFormat("qwen3_coder"), "<function=add> is how to call", ChatMessage("<function=add> is how to call")),
    (
        ChatFormat("glm45"),
        "<tool_call>get_weather<arg_key>city<arg_value>Bern<arg_key>days</arg_key><arg_value>[1]</tool_call>",
        ChatMessage("", "", calls(IN_DAYS)),
    ),
    (ChatFormat("glm45"), '<tool_call>add\n{"a": 1}</tool_call>', ChatMessage("", "", calls(ADD))),
    (
        ChatFormat("deepseek_v31"),
        f"{DEEPSEEK.call} add {DEEPSEEK.separator}\n{ADD[1]}{DEEPSEEK.call}add{DEEPSEEK.separator}{{}}{DEEPSEEK.end}ok",
        ChatMessage("ok", "", calls(ADD, ("add", "{}"))),
    ),
    (
        ChatFormat("kimi_k2"),
        f"<|tool_call_section_begin|>{KIMI.call}add:0{KIMI.separator}{ADD[1]}{KIMI.call_end}<|tool_call_section_end|>ok",
        ChatMessage("ok", "", calls(ADD)),
    ),
    (ChatFormat("pythonic"), "[add(a=1)]\n[add()]", ChatMessage("", "", calls(ADD, ("add", "{}")))),
    (ChatFormat("pythonic"), "So.<|python_start|>add(a=1)<|python_end|>", ChatMessage("So.", "", calls(ADD))),
    (ChatFormat("llama4_pythonic"), f"<|python_start|>{LIST[1:-1]}<|python_end|>", ChatMessage("", "", calls(ADD))),
    (R1, "Hm</think>", ChatMessage("", "Hm")),
    (QWEN3, f"<think>Hm<tool_call>{LIST}</tool_call>", ChatMessage("", "Hm", calls(ADD))),
    (
        ChatFormat("kimi_k2", "qwen3"),
        f"<think>Hm{KIMI.call}functions.add:0{KIMI.separator}{ADD[1]}{KIMI.call_end}ok",
        ChatMessage("ok", "Hm", calls(ADD)),
    ),
    (
        QWEN3,
        f"<think>A <tool_call> begins a call.</think>Yes<tool_call>{LIST}</tool_call>",
        ChatMessage("Yes", "A <tool_call> begins a call.", calls(ADD)),
    ),
    (QWEN3, "</think>\n\nHello", ChatMessage("\n\nHello")),
    (MAGISTRAL, f"[THINK]Hm[TOOL_CALLS]add{ADD[1]}", ChatMessage("", "Hm", calls(ADD))),
]

# Calls that the end of the text cuts: their arguments stay as the model wrote them, and are no JSON.
GLM, QWEN = ChatFormat("glm45"), ChatFormat("qwen3_coder")
CUT = [
    (form, f"<tool_call>{text}", ChatMessage("", "", calls((name, arguments))))
    for form, text, name, arguments in [
        (HERMES, '{"name": "add", "arguments": {"a": 1', "add", '{"a": 1'),
        (HERMES, '{"name": "add"', "add", "{"),
        (HERMES, '{"type": "function", "name": "add", "argu', "add", "{"),
        (HERMES, '{"name": "add", "arguments": "{', "add", '"{'),
        (GLM, "add\n<arg_key>ci", "add", '{"ci'),
        (GLM, "add\n<arg_key>city</arg_k", "add", '{"city'),
        (GLM, "add\n<arg_key>city</arg_key>", "add", '{"city": '),
        (GLM, "add<arg_key>city</arg_key>\n<arg_v", "add", '{"city": '),
        (GLM, "get_weather<arg_key>city</arg_key><arg_value>New Yo", "get_weather", '{"city": "New Yo'),
        (GLM, "get_weather<arg_key>days</arg_key><arg_value>[1, 2", "get_weather", '{"days": [1, 2'),
        (GLM, "add<arg_key>a</arg_key><arg_value>w1</arg_value>", "add", '{"a": "w1"'),
        (QWEN, "<function=add>\n", "add", "{"),
        (QWEN, "<function=add>\n<param", "add", "{"),
        (QWEN, "<function=add>\n<parameter=ci", "add", '{"ci'),
        (QWEN, "<function=add><parameter=a>w1", "add", '{"a": "w1'),
        (QWEN, "<function=get_weather>\n<parameter=city>\nNew Yo", "get_weather", '{"city": "New Yo'),
        (QWEN, "<function=get_weather>\n<parameter=city>\nNew York\n</para", "get_weather", '{"city": "New York'),
        (QWEN, "<function=add>\n<parameter=a>\nw1\n</parameter>\n</func", "add", '{"a": "w1"'),
    ]
]
CUT += [
    (MISTRAL, "[TOOL_CALLS]add[ARGS]", ChatMessage("", "", calls(("add", "{")))),
    (ChatFormat("pythonic"), "[add(a=1, b='x", ChatMessage("", "", calls(("add", '{"a": 1, "b": \'x')))),
    (ChatFormat("kimi_k2"), f"{KIMI.call}functions.add:0{KIMI.separator}", ChatMessage("", "", calls(("add", "{")))),
]


@pytest.mark.parametrize(
    ("form", "text", "expected"), CASES + SLIPS + CUT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_format_is_read_whole_and_in_pieces(form: ChatFormat, text: str, expected: ChatMessage) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "<think>", "</think>",
    "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
    "<function=", "<parameter=", ">", "</parameter>", "</function>",
    "assistant", "analysis", "commentary", "final", " to=functions.add", "json", "add", "get_weather", "{", "}", ",", ":",
    '"', "\\", ";", " ", "\n", "<", '{"name": "add", "arguments": ', '{"name": "get_weather", "parameters": {', '{"a": 1}',
    '{"name": "add", "arguments": {"a": 1}}', '{"arguments": {}, "name": "add"}', '{"city": "x"', ', "id": "y"}', '"]}', "1",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "(", ")", "a=", "add(a=1)", "get_weather(city='x', ",
    "function", "functions.add:0", "```json\n", "```", *vars(DEEPSEEK).values(), *vars(KIMI).values(),
]  # fmt: skip
WORD = "w{}q"


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Texts of fragments of all formats, valid and broken ones; each word occurs once."""
    parts = draw(st.lists(st.sampled_from([*FRAGMENTS, "WORD", "WORD"]), max_size=24))
    return "".join(WORD.format(number) if part == "WORD" else part for number, part in enumerate(parts))


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.one_of(texts(), st.sampled_from([case[1] for case in CASES + SLIPS + CUT]), st.text(max_size=40)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(pieces=split_texts(), prompt=st.sampled_from(["", "<think>", "<think></think>", "[THINK]\n"]))
def test_a_message_does_not_depend_on_its_pieces(form: ChatFormat, pieces: list[str], prompt: str) -> None:
    assert read(form, pieces, prompt) == read(form, ["".join(pieces)], prompt) == read(form, list("".join(pieces)), prompt)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(text=texts())
def test_no_word_of_a_text_is_lost(form: ChatFormat, text: str) -> None:
    message = read(form, [text])
    found = message.content + message.reasoning + "".join(call.name + call.arguments for call in message.tool_calls)
    assert sorted(re.findall(r"w\d+q", found)) == sorted(re.findall(r"w\d+q", text))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(text=st.text(alphabet='ab \n{}[]"<>', max_size=60))
def test_text_without_markers_is_content(form: ChatFormat, text: str) -> None:
    message = read(form, [text], "<think></think>")
    assert message == ChatMessage(text)


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = HERMES.parser(tools=TOOLS)
    (first,) = parser.pieces('<tool_call>{"name": "add", "arguments": {"a"')
    assert [(call.index, call.name, call.arguments) for call in first.tool_calls] == [(0, "add", '{"a"')]
    assert parser.pieces(": 1") == [ChatMessage(tool_calls=(ToolCall(0, arguments=": 1"),))]
    assert parser.pieces("2}}</tool_call>") == [ChatMessage(tool_calls=(ToolCall(0, arguments="2}"),))]


def test_calls_stay_text_without_tools() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read(HERMES, [text], tools={}) == ChatMessage(text)


def test_calls_above_the_limit_are_dropped() -> None:
    text = f"[TOOL_CALLS]add{ADD[1]}[TOOL_CALLS]get_weather{WEATHER[1]}[TOOL_CALLS]add"
    assert read(MISTRAL, list(text), max_calls=1).tool_calls == calls(ADD)


def test_ids_suit_the_templates() -> None:
    parser = MISTRAL.parser(tools=TOOLS)
    (call,) = joined(parser.pieces("[TOOL_CALLS]add{}")).tool_calls
    assert re.fullmatch("[a-z0-9]{9}", call.id)


def test_the_prompt_decides_where_reasoning_begins() -> None:
    assert read(QWEN3, ["Hm</think>Yes"], "user<think>\n") == ChatMessage("Yes", "Hm")
    assert read(QWEN3, ["Yes"], "<think>\n\n</think>\n\n") == ChatMessage("Yes")
    assert read(R1, ["Yes"], "<think>\n\n</think>\n\n") == ChatMessage("Yes")
    assert read(R1, ["Hm"], "assistant") == ChatMessage("", "Hm")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ChatFormat()),
        ("<|im_start|><tool_call></tool_call>", HERMES),
        ("{% if enable_thinking %}<think></think>{% endif %}<tool_call>", QWEN3),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
        ("[TOOL_CALLS]", MISTRAL),
        ("<tool_call>\n<function=NAME>\n<parameter=KEY>", ChatFormat("qwen3_coder")),
        ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>", ChatFormat("glm45")),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>", ChatFormat("glm47")),
        (DEEPSEEK.section + "```json", ChatFormat("deepseek_v3")),
        (DEEPSEEK.section, ChatFormat("deepseek_v31")),
        (KIMI.section, ChatFormat("kimi_k2")),
        ("<tool_call><invoke name=", ChatFormat()),
        ("<tool_calls>[{{ calls }}]</tool_calls>{# not <tool_call> #}", ChatFormat()),
        ("<|python_tag|><function={{ name }}>{{ arguments }}</function>", ChatFormat()),
        ("<|start|>assistant<|channel|>analysis<|message|>", OPENAI),
    ],
)
def test_the_template_shows_the_format(template: str, expected: ChatFormat) -> None:
    assert detect_format(template) == expected


def test_arguments_of_valid_calls_are_json() -> None:
    for form, text, _ in CASES + SLIPS:
        message = read(form, [text])
        if message.tool_calls and "(1)}}" not in text:
            assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)


@pytest.mark.parametrize(("form", "text", "expected"), CUT, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_of_cut_calls_are_no_json(form: ChatFormat, text: str, expected: ChatMessage) -> None:
    (call,) = read(form, [text]).tool_calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


CALLING = [(form, text) for form, text, expected in CASES + SLIPS if expected.tool_calls and "(1)}}" not in text]


@pytest.mark.parametrize(("form", "text"), CALLING, ids=str)
def test_no_end_of_a_forced_call_leaves_markup(form: ChatFormat, text: str) -> None:
    whole = read(form, [text])
    for end in range(len(text)):
        parser = form.parser(tools=TOOLS, is_forced=True)
        cut = joined(parser.pieces(text[:end]) + parser.last_pieces())
        assert whole.content.strip().startswith(cut.content.strip())
        assert whole.reasoning.startswith(cut.reasoning)
        assert [call.name for call in cut.tool_calls] == [call.name for call in whole.tool_calls[: len(cut.tool_calls)]]


@pytest.mark.parametrize(("form", "text"), CALLING, ids=str)
def test_no_end_of_a_call_leaves_much_of_its_markup(form: ChatFormat, text: str) -> None:
    whole = read(form, [text])
    for end in range(len(text)):
        cut = read(form, [text[:end]])
        shown = next((n for n, pair in enumerate(zip(cut.content, whole.content, strict=False)) if pair[0] != pair[1]), 0)
        left = cut.content[shown or min(len(cut.content), len(whole.content)) :].strip()
        assert len(left) <= (12 if text[0] in "`[{" else 3)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(pieces=split_texts())
def test_pieces_keep_the_order_of_the_text(form: ChatFormat, pieces: list[str]) -> None:
    def kinds(pieces: Sequence[str]) -> list[str]:
        parser, found = form.parser(tools=TOOLS), list[str]()
        for message in [*(one for piece in pieces for one in parser.pieces(piece)), *parser.last_pieces()]:
            parts = (("reasoning", message.reasoning), ("content", message.content), ("calls", message.tool_calls))
            found += [kind for kind, part in parts if part and found[-1:] != [kind]]
        return found

    assert kinds(pieces) == kinds(["".join(pieces)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("First.\n<tool_call>{}</tool_call>\nThen.", "First.\n\nThen."),
        ("First. <tool_call>{}</tool_call><tool_call>{}</tool_call>Then.", "First. Then."),
        ("First.<tool_call>{}</tool_call>Then.", "First.\nThen."),
        ("\n<tool_call>{}</tool_call>\nThen.\n", "Then.\n"),
        ("First.\n\n<tool_call>{}</tool_call>\n", "First."),
    ],
)
def test_what_separates_texts_around_calls_is_kept(text: str, expected: str) -> None:
    text = text.replace("{}", '{"name": "add"}')
    assert read(HERMES, [text]).content == read(HERMES, list(text)).content == expected


def test_messages_of_reasoning_are_kept_apart() -> None:
    text = "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
    assert read(OPENAI, [text]) == ChatMessage("", "A.\nB.")


PYTHON_VALUES = [
    ("{'k': True, 'n': None, 's': \"it's\"}", '{"k": true, "n": null, "s": "it\'s"}'),
    ("('x', ('y',), [], ())", '["x", ["y"], [], []]'),
    ("{'a': {'b': [1, {'c': -2.5e3, }, ], }, }", '{"a": {"b": [1, {"c": -2.5e3}]}}'),
    (r"{'a': '\x41\u00e9\n\/\d'}", r'{"a": "A\u00e9\n/\\d"}'),
    ("{1: 'a' 'b', 'q': '\"'}", '{"1": "ab", "q": "\\""}'),
    ("[0x1F, 1_000, 1., true, null]", "[31, 1000, 1.0, true, null]"),
]
WANTED = {
    "type": "object",
    "properties": {"o": {"type": "object"}, "a": {"type": ["array", "null"]}, "s": {"type": "string"}},
}
TYPED = [
    (ChatFormat("qwen3_coder"), "<tool_call><function=f><parameter={}>{}</parameter></function></tool_call>"),
    (ChatFormat("glm45"), "<tool_call>f<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"),
    (ChatFormat("pythonic"), "[f({}={})]"),
    (HERMES, "<tool_call>{{'name': 'f', 'arguments': {{'{}': {}}}}}</tool_call>"),
]


@pytest.mark.parametrize(("form", "call"), TYPED, ids=str)
@pytest.mark.parametrize(("text", "expected"), PYTHON_VALUES)
def test_values_of_python_become_json(form: ChatFormat, call: str, text: str, expected: str) -> None:
    key = "o" if text.startswith("{") else "a"
    (found,) = read(form, [call.format(key, text)], tools={"f": WANTED}).tool_calls
    assert json.loads(found.arguments) == {key: json.loads(expected)}


@pytest.mark.parametrize(
    "text", ["{'a': b}", "[1 2]", "{'a'}", "{[1]: 2}", "f'{x}'", "[1,,2]", "(1)", "[" * 50_000, "[nan]"]
)
def test_what_is_no_value_of_the_type_stays_text(text: str) -> None:
    call = f"<tool_call><function=f><parameter=o>{text}</parameter></function></tool_call>"
    (found,) = read(QWEN, [call], tools={"f": WANTED}).tool_calls
    assert json.loads(found.arguments) == {"o": text}


BAD_JSON = '{"a": True, "b": [None , 1 , ], "c": "True, ]\\" ,}\n\t", "d": -1.5E+3, "e": False,\n}'
MENDED = {"a": True, "b": [None, 1], "c": 'True, ]" ,}\n\t', "d": -1500.0, "e": False}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {BAD_JSON}}}</tool_call>'),
        (HERMES, f'<tool_call>{{"arguments": {BAD_JSON}, "name": "add"}}</tool_call>'),
        (LLAMA, f'{{"name": "add", "parameters": {BAD_JSON}}}'),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{BAD_JSON}"),
        (ChatFormat("kimi_k2"), f"{KIMI.call}functions.add:0{KIMI.separator}{BAD_JSON}{KIMI.call_end}"),
    ],
    ids=str,
)
def test_slips_in_json_are_mended_wherever_pieces_end(form: ChatFormat, text: str) -> None:
    for size in (1, 5, len(text)):
        message = read(form, [text[at : at + size] for at in range(0, len(text), size)])
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("add", MENDED)]
        assert not message.content


def test_text_stays_text_whatever_it_looks_like() -> None:
    call = "<function=f><parameter=s>{'a': None}</parameter><parameter=other>(1, 2)</parameter></function>"
    (found,) = read(QWEN, [call], tools={"f": WANTED}).tool_calls
    assert json.loads(found.arguments) == {"s": "{'a': None}", "other": "(1, 2)"}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_every_literal_of_python_is_read(value: object) -> None:
    found = python_json(repr(value))
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "text", ["", "1,", "1] #", "1 # one", "1], [2", "1][0", "-True", "1+1", "f'{1}'", "b'a'", "1if 1else 2"]
)
def test_what_is_no_literal_of_python_is_not_read(text: str) -> None:
    assert python_json(text) is None


def test_long_values_in_pythons_form_are_read() -> None:
    program = "\n".join(f"print('line {i}', \"\\t\")" for i in range(2000))
    values = {"program": program, "numbers": list(range(900)), "lines": {f"k{i}": None for i in range(400)}}
    found = python_arguments(f"({', '.join(f'{key}={value!r}' for key, value in values.items())})")
    assert found is not None
    assert json.loads(found) == values


def test_very_long_values_in_pythons_form_stay_text() -> None:
    assert python_json("'a' " * 10_000) is None
    assert python_json(repr([None] * 10_000)) is None
    assert python_json(repr("\\" * 150_000)) is None
    assert python_arguments(f"({', '.join(f'a{i}=[None]' for i in range(5000))})") is None


DOUBLING = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
HOSTILE: dict[str, dict[str, Any]] = {
    "doubling references": {"$ref": "#/$defs/d0", "$defs": {**DOUBLING, "d60": {"type": "string"}}},
    "endless references": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 300}}},
    "many parts": {"allOf": [{"anyOf": [{"const": i} for i in range(200)]}] + [{"minimum": i} for i in range(5000)]},
    "large enumerations": {"allOf": [{"enum": [f"{i}-{j}" for i in range(5000)]} for j in range(2)]},
    "deep": {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_schema_takes_bounded_time(kind: str) -> None:
    schema = {"properties": {"a": HOSTILE[kind]}, **HOSTILE[kind]}
    started = time.thread_time()
    message = read(QWEN, ["<tool_call><function=add><parameter=a>w1</parameter></function>"], tools={"add": schema})
    assert message.tool_calls == calls(("add", '{"a": "w1"}'))
    assert time.thread_time() - started < 0.5


def test_many_arguments_of_python_take_linear_time() -> None:
    text = f"({','.join(f'a{n}=None' for n in range(MAX_PIECES // 2))})"
    started = time.thread_time()
    assert len(json.loads(python_arguments(text) or "")) == MAX_PIECES // 2
    assert time.thread_time() - started < 0.3
    assert python_arguments(f"{text[:-1]},more=1)") is None
    many = f"[{', '.join(['1'] * MAX_PIECES)}]"
    assert python_arguments(f"(a={many})") == f'{{"a": {many}}}'


def test_every_name_of_a_tool_parser_has_a_format() -> None:
    assert set(TOOL_CALL_FORMATS) == set(get_args(ToolParserName))
