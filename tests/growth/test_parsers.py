"""How the work of reading outputs grows with what a client makes a model write, and of bodies that become chats."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from eyas.config.router import ToolParserName
from eyas.services.router.http.bodies.anthropic import MessagesBody
from eyas.services.router.http.bodies.base import parse_body
from eyas.services.router.http.bodies.responses import ResponsesBody
from eyas.services.router.http.bodies.tools import whole_message
from eyas.text.chat_message import ChatMessage, joined
from eyas.text.chat_parser import ChatFormat
from eyas.text.tool_call_arguments import cut_python_arguments, python_arguments, python_json
from eyas.text.tool_call_formats import DEEPSEEK, KIMI
from tests.growth.growth import Reader, check_growth, label, pairs

MAX_OUTPUT = 2**14  # characters: the work of each token is the same
TOKEN = 8  # characters
MAX_PIECE = 2**12  # characters of one token, or of what a stop string held back
MAX_VALUES = 2**17  # characters of a call's arguments, which one step reads when they end
MAX_BODY = 2**16  # a thread reads larger ones too
TOOLS = {"f": {"type": "object", "properties": {"o": {"type": "object"}, "s": {"type": "string"}}}}


def repeated(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    """Make texts of about n characters that repeat a unit between two others."""
    return lambda n: before + unit * (n // len(unit)) + after


SHAPES: Mapping[ToolParserName, Mapping[str, Callable[[int], str]]] = {
    "hermes": {
        "openers": repeated("<tool_call>[TOOL_CALLS]<|python_tag|><function=f>" + DEEPSEEK.section + KIMI.call),
        "openers in reasoning": repeated("<tool_call>[TOOL_CALLS]</thin", "<think>"),
        "spaces": repeated(" ", "a", "b"),
        "spaces in an object": repeated(" ", '<tool_call>{"name"'),
        "keys before the name": repeated('"id": "x", ', "<tool_call>{"),
        "arguments first": repeated("x", '<tool_call>{"arguments": {"s": "', '"}, "name": "f"}'),
        "deep arguments": repeated('{"a":', '<tool_call>{"name": "f", "arguments": '),
        "a dict": repeated("'a': {", "<tool_call>{'name': 'f', 'arguments': {"),
        "calls": repeated('<tool_call>{"name": "f", "arguments": {}}</tool_call>a'),
    },
    "qwen3_coder": {
        "functions": repeated("<function=f></function>"),
        "beginnings of ends": repeated("</paramete", "<tool_call><function=f><parameter=s>"),
        "a deep parameter": repeated("[", "<tool_call><function=f><parameter=o>", "</parameter></function>"),
    },
    "glm45": {"keys and values": repeated("<arg_key>o</arg_key><arg_value>{}</arg_value>", "<tool_call>f")},
    "mistral": {
        "calls": repeated("[TOOL_CALLS]f[ARGS]{}"),
        "brackets": repeated("[", "[TOOL_CALLS]"),
        "beginnings of openers": repeated("[TOOL_CAL"),
    },
    "llama3_json": {"calls": repeated('{"name": "f", "parameters": {}}; '), "openers": repeated("<|python_tag|>")},
    "pythonic": {
        "calls": repeated("f(s='x'), ", "[", "f()]"),
        "one call": repeated("a='x', ", "[f(", "b=1)]"),
        "an open call": repeated("(", "[f(a="),
    },
    "deepseek_v31": {
        "calls": repeated(f"{DEEPSEEK.call}f{DEEPSEEK.separator}{{}}{DEEPSEEK.call_end}", DEEPSEEK.section),
        "openers in reasoning": repeated(DEEPSEEK.section, "<think>"),
    },
    "kimi_k2": {
        "calls": repeated(f"{KIMI.call}f:0{KIMI.separator}{{}}{KIMI.call_end}", KIMI.section),
        "openers in reasoning": repeated(KIMI.sections[0], "<think>"),
    },
    "openai": {
        "messages": repeated("<|start|>assistant<|channel|>analysis<|message|>a<|end|>"),
        "headers": repeated("<|start|>assistant<|channel|>"),
    },
}


def form_of(name: ToolParserName) -> ChatFormat:
    return ChatFormat(name, "" if name == "openai" else "qwen3")


def read(form: ChatFormat, size: int, text: str) -> None:
    """Read an output in pieces of a size as the router does, then all that came of them together."""
    parser, pieces = form.parser(tools=TOOLS), list[ChatMessage]()
    for at in range(0, len(text), size):
        pieces += parser.pieces(text[at : at + size])
    whole_message(joined([*pieces, *parser.last_pieces()]))


VALUES = {
    "open brackets": repeated("["),
    "pairs of brackets": repeated("[],", "[", "]"),
    "a long dict": repeated("'a':1,", "{", "}"),
    "numbers": repeated("1,", "[", "]"),
    "strings in a row": repeated("''"),
    "backslashes": repeated("\\", "'", "'"),
    "an open string": repeated("\\", "'a"),
    "quotes in an open string": repeated('\\"'),
    "sums": repeated("1+", after="1"),
    "one number": repeated("9"),
}
KEYWORDS = {
    "the same keyword": repeated("a=1,", "(", ")"),
    "short values": lambda n: "(" + ",".join(f"a{i}=['x']" for i in range(n // 12)) + ")",
    "long values": lambda n: "(" + ",".join(f"a{i}=[{'None,' * 100}]" for i in range(n // 500)) + ")",
    "an open string": repeated("x", "(a='"),
    "quotes in an open string": repeated("\\'", "(a='"),
}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def messages(blocks: list[dict[str, Any]], **fields: Any) -> bytes:
    return body(messages=[{"role": "user", "content": blocks}], max_tokens=9, **fields)


def read_body(model: type[MessagesBody] | type[ResponsesBody], data: bytes) -> None:
    """Read a body and make a chat of it; refusing it is an answer."""
    try:
        parse_body(data, model, MAX_BODY).chat()
    except ValidationError:
        return


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(min(n // 40, 200)):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


OF_MESSAGES = {
    "blocks": lambda n: messages([{"type": "text", "text": "a"}] * (n // 32)),
    "results of tools": lambda n: messages([{"type": "tool_result", "tool_use_id": "a", "content": "b"}] * (n // 64)),
    "unknown blocks": lambda n: messages([{"type": "image", "source": "A" * 32}] * (n // 64)),
    "thinking": lambda n: messages([{"type": "thinking", "thinking": "a", "signature": "b"}] * (n // 64)),
    "deep tools": lambda n: messages([], tools=[{"name": f"t{i}", "input_schema": deep(n // 64)} for i in range(64)]),
    "tools": lambda n: messages([], tools=[{"name": f"t{i}", "input_schema": {}} for i in range(n // 64)]),
}
CALL = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
OF_RESPONSES = {
    "items": lambda n: body(input=[{"role": "user", "content": "a"}] * (n // 32)),
    "parts": lambda n: body(input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (n // 40)}]),
    "calls": lambda n: body(input=[CALL] * (n // 80)),
    "tools": lambda n: body(input="a", tools=[{"type": "function", "name": f"t{i}"} for i in range(n // 48)]),
}

READERS = (
    *(
        Reader(f"eyas.text.chat_parser.ChatParser.pieces, {name}", partial(read, form_of(name), TOKEN), shapes, MAX_OUTPUT)
        for name, shapes in SHAPES.items()
    ),
    *(
        Reader(
            f"eyas.text.chat_parser.ChatParser.pieces, {name}, one",
            partial(read, form_of(name), MAX_PIECE),
            {shape: shapes[shape] for shape in list(shapes)[-1:]},
            MAX_PIECE,
            on_loop=True,
        )
        for name, shapes in SHAPES.items()
    ),
    Reader("eyas.text.tool_call_arguments.python_json", python_json, VALUES, MAX_VALUES, on_loop=True),
    Reader("eyas.text.tool_call_arguments.python_arguments", python_arguments, KEYWORDS, MAX_VALUES, on_loop=True),
    Reader("eyas.text.tool_call_arguments.cut_python_arguments", cut_python_arguments, KEYWORDS, MAX_VALUES, on_loop=True),
    Reader("eyas.services.router.http.bodies.anthropic", partial(read_body, MessagesBody), OF_MESSAGES, MAX_BODY),
    Reader("eyas.services.router.http.bodies.responses", partial(read_body, ResponsesBody), OF_RESPONSES, MAX_BODY),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_outputs_and_bodies_grow_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)
