"""The constraint of every format of calls admits what its parser reads, and nothing else; markers may be special tokens."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.call_formats import MARKS
from eyas.chat_output import ChatFormat
from eyas.grammar import GrammarCompiler
from eyas.request import StructuredOutputs
from eyas.services.router.http.call_constraints import ChatOutput
from eyas.services.router.http.tools import ToolFields
from eyas.tokenizer import Tokenizer, load_tokenizer
from tests.services.router.scripted_verifier import DEMO

MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    **{name: [m.section, m.call, m.separator, m.call_end, m.end] for name, m in MARKS.items() if name != "deepseek_v31"},
    "openai": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"],
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
ADD, NOW = ("add", '{"a":1}'), ("now", "{}")


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def mistral(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)


def old_mistral(*calls: tuple[str, str]) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls) + "]"


def harmony(*calls: tuple[str, str]) -> str:
    ((name, text),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}"


def qwen(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in json.loads(text).items())
        + "</function>\n</tool_call>"
        for name, text in calls
    )


def glm45(*calls: tuple[str, str], space: str = "\n") -> str:
    return "\n".join(
        f"<tool_call>{name}{space}"
        + "".join(
            f"<arg_key>{key}</arg_key>{space}<arg_value>{json.dumps(value)}</arg_value>{space}"
            for key, value in json.loads(text).items()
        )
        + "</tool_call>"
        for name, text in calls
    )


def pythonic(*calls: tuple[str, str]) -> str:
    words = (", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(text).items()) for _, text in calls)
    return "[" + ", ".join(f"{name}({own})" for (name, _), own in zip(calls, words, strict=True)) + "]"


def deepseek_v3(*calls: tuple[str, str]) -> str:
    m = MARKS["deepseek_v3"]
    bodies = (f"{m.call}function{m.separator}{name}\n```json\n{text}\n```{m.call_end}" for name, text in calls)
    return m.section + "\n".join(bodies) + m.end


def deepseek_v31(*calls: tuple[str, str]) -> str:
    m = MARKS["deepseek_v31"]
    return m.section + "".join(f"{m.call}{name}{m.separator}{text}{m.call_end}" for name, text in calls) + m.end


def kimi(*calls: tuple[str, str]) -> str:
    m = MARKS["kimi_k2"]
    bodies = (
        f"{m.call}functions.{name}:{number}{m.separator}{text}{m.call_end}" for number, (name, text) in enumerate(calls)
    )
    return m.section + "".join(bodies) + m.end


WRITERS = {
    "hermes": hermes,
    "llama3_json": llama,
    "mistral": mistral,
    "openai": harmony,
    "qwen3_coder": qwen,
    "qwen3_xml": qwen,
    "glm45": glm45,
    "glm47": partial(glm45, space=""),
    "pythonic": pythonic,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "kimi_k2": kimi,
}


@pytest.fixture(scope="module")
def special_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer with all markers as special tokens."""
    folder = tmp_path_factory.mktemp("special")
    tokenizer = HuggingFaceTokenizer.from_file(f"{DEMO}/tokenizer.json")
    tokenizer.add_special_tokens([marker for markers in MARKERS.values() for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Constraint:
    """What the output of a chat must match."""

    def __init__(self, folder: str | Path, form: ChatFormat, given: StructuredOutputs | None = None, **fields: Any) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(str(folder))
        output = ChatOutput(ToolFields.model_validate(fields), "m", form, self.tokenizer, ())
        structured = output.constraint(given)
        assert structured is not None
        size = self.tokenizer.tokenizer.get_vocab_size()
        self.grammar = GrammarCompiler(str(folder), size, frozenset([1])).compile(structured)

    def admits(self, text: str) -> bool:
        """Whether a text is a whole output."""
        ids, matcher = self.tokenizer.encode_rendered(text), self.grammar.matcher()
        return matcher.consume(ids) == len(ids) and matcher.is_accepting


@pytest.fixture(params=["text", "special tokens"])
def folder(request: pytest.FixtureRequest, special_tokenizer: Path) -> str | Path:
    return DEMO if request.param == "text" else special_tokenizer


@pytest.mark.parametrize("name", WRITERS)
def test_a_forced_call_is_one_that_the_parser_reads(name: Any, folder: str | Path) -> None:
    write = old_mistral if name == "mistral" and folder == DEMO else WRITERS[name]
    form = ChatFormat(name)
    several = Constraint(folder, form, tools=TOOLS, tool_choice="required")
    named: Any = {"type": "function", "function": {"name": "add"}}
    one = Constraint(folder, form, tools=TOOLS, tool_choice=named)
    texts = [(ADD,), (NOW,)] if name == "openai" else [(ADD,), (NOW,), (ADD, NOW)]
    for calls in texts:
        text = write(*calls)
        assert several.admits(text)
        assert one.admits(text) == (calls == (ADD,))
        parser = form.parser(tools={"add": PARAMETERS, "now": {}})
        message = parser.push(text) + parser.finish()
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
            (name, json.loads(own)) for name, own in calls
        ]
    for text in ("Hello", write(("add", '{"a":"1"}')), write(("add", '{"a":1,"b":2}')), write(("sub", "{}")), ""):
        assert not several.admits(text)


@pytest.mark.parametrize("name", WRITERS)
def test_strict_tools_admit_text_and_valid_calls(name: Any, folder: str | Path) -> None:
    write = old_mistral if name == "mistral" and folder == DEMO else WRITERS[name]
    text = "<|channel|>final<|message|>Hello\nthere" if name == "openai" else "Hello\nthere"
    constraint = Constraint(folder, ChatFormat(name), tools=TOOLS)
    assert constraint.admits(text)
    assert constraint.admits(write(ADD))
    assert not constraint.admits(write(("add", '{"a":"1"}')))


@pytest.mark.parametrize(
    ("form", "tags"),
    [(ChatFormat("hermes", "qwen3"), ("<think>", "</think>")), (ChatFormat("mistral", "mistral"), ("[THINK]", "[/THINK]"))],
)
def test_reasoning_may_precede_calls_and_formats(form: ChatFormat, tags: tuple[str, str], special_tokenizer: Path) -> None:
    reasoning = f"{tags[0]}\nHm, {{}}\n{tags[1]}\n\n"
    call = WRITERS[form.tool_call_parser](ADD)
    forced = Constraint(special_tokenizer, form, tools=TOOLS, tool_choice="required")
    assert forced.admits(reasoning + call)
    assert forced.admits(call)
    assert not forced.admits(reasoning)
    given = StructuredOutputs(json=json.dumps(PARAMETERS))
    content = Constraint(special_tokenizer, form, given, tools=TOOLS)
    assert content.admits(reasoning + '{"a": 1}')
    assert content.admits(reasoning + call)
    assert not content.admits(reasoning + "Hello")


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_is_a_call_or_has_its_format(name: Any, special_tokenizer: Path) -> None:
    given = StructuredOutputs(json=json.dumps(PARAMETERS))
    constraint = Constraint(special_tokenizer, ChatFormat(name), given, tools=TOOLS)
    begin = {"llama3_json": "<|python_tag|>"}.get(name, "")
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert constraint.admits(begin + WRITERS[name](ADD))
    assert constraint.admits(final + '{"a": 1}')
    assert not constraint.admits(final + "Hello")


def test_channels_of_gpt_oss_may_precede_calls_and_formats(special_tokenizer: Path) -> None:
    reasoning = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    forced = Constraint(special_tokenizer, ChatFormat("openai"), tools=TOOLS, tool_choice="required")
    assert forced.admits(reasoning + harmony(ADD))
    given = StructuredOutputs(json=json.dumps(PARAMETERS))
    content = Constraint(special_tokenizer, ChatFormat("openai"), given)
    assert content.admits(reasoning + '<|channel|>final<|message|>{"a": 1}')
    assert not content.admits(reasoning + "<|channel|>final<|message|>Hello")


TEXTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "near": {"$ref": "#/$defs/Near"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "near"],
    "$defs": {"Near": {"type": "object", "properties": {"km": {"type": "integer"}}, "required": ["km"]}},
}


def parameters(**values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"


def test_parameters_between_tags_match_their_schema() -> None:
    tools = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": TEXTS}}]
    form = ChatFormat("qwen3_coder")
    constraint = Constraint(DEMO, form, tools=tools, tool_choice="required")
    near, city = '{"km":3}', 'New "York"\n<b> & co'
    text = parameters(city=city, unit="F", code="US", near=near, days="[1,2]")
    assert constraint.admits(text)
    message = form.parser(tools={"look": TEXTS}).push(text)
    expected = {"city": city, "unit": "F", "code": "US", "near": {"km": 3}, "days": [1, 2]}
    assert json.loads(message.tool_calls[0].arguments) == expected
    assert constraint.admits(parameters(city="", near=near))
    for wrong in (
        parameters(city="Paris"),
        parameters(near=near, city="Paris"),
        parameters(city="Paris", unit="K", near=near),
        parameters(city="Paris", code="USA", near=near),
        parameters(city="Paris", near="3"),
        parameters(city="Paris", near=near, other="1"),
    ):
        assert not constraint.admits(wrong)
