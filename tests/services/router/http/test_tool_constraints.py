"""The constraint of every format of calls admits what its parser reads, and nothing else; markers may be special tokens."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.api.request import ReasoningBudget, StructuredOutputs
from eyas.config.router import ToolParserName
from eyas.errors import InvalidRequest
from eyas.grammar.compiler import GrammarCompiler
from eyas.services.router.http.bodies.tools import ToolFields
from eyas.services.router.http.tool_constraints import ChatOutput
from eyas.services.router.http.tool_tags import TAG_WRITERS
from eyas.text.chat_message import joined
from eyas.text.chat_parser import ChatFormat
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from eyas.text.tool_call_formats import DEEPSEEK, KIMI
from tests.support.services.scripted_verifier import DEMO

MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "deepseek_v3": list(DEEPSEEK.tokens),
    "kimi_k2": list(KIMI.tokens),
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
    m = DEEPSEEK
    bodies = (f"{m.call}function{m.separator}{name}\n```json\n{text}\n```{m.call_end}" for name, text in calls)
    return m.section + "\n".join(bodies) + m.end


def deepseek_v31(*calls: tuple[str, str]) -> str:
    m = DEEPSEEK
    return m.section + "".join(f"{m.call}{name}{m.separator}{text}{m.call_end}" for name, text in calls) + m.end


def kimi(*calls: tuple[str, str]) -> str:
    m = KIMI
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


@cache
def tokenizer_of(folder: str | Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@cache
def compiler(folder: str | Path) -> GrammarCompiler:
    return GrammarCompiler(str(folder), tokenizer_of(folder).tokenizer.get_vocab_size(), frozenset([1]))


class Constraint:
    """What the output of a chat must match."""

    def __init__(self, folder: str | Path, form: ChatFormat, given: StructuredOutputs | None = None, **fields: Any) -> None:
        self.tokenizer = tokenizer_of(folder)
        output = ChatOutput(ToolFields.model_validate(fields), "m", form, self.tokenizer, ())
        structured = output.constraint(given)
        assert structured is not None
        self.grammar = compiler(folder).submit(structured).result()

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
        message = joined(parser.pieces(text) + parser.last_pieces())
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
    message = joined(form.parser(tools={"look": TEXTS}).pieces(text))
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


TEXT_OR_NULL = [{"type": "string", "maxLength": 2}, {"type": "null"}]
# A schema, values by how they are written, and texts that it refuses.
VALUES: list[tuple[Any, dict[str, Any], list[str]]] = [
    ({"$ref": "#/$defs/Unit"}, {"C": "C", "F": "F"}, ["K", '"C"']),
    ({"$ref": "#/$defs/a~1b~0c/0"}, {"5": 5}, ["C"]),
    ({"$ref": "#/$defs/Unit", "description": "of degrees", "pattern": "C"}, {"C": "C"}, ["F"]),
    ({"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]}, {"C": "C", "null": None}, ["K", ""]),
    ({"anyOf": TEXT_OR_NULL}, {"ab": "ab", "": "", "null": None}, ["abc"]),
    ({"anyOf": [{"maxLength": 2}, {"type": "null"}]}, {"12": "12", "null": None}, ["abc"]),
    ({"type": ["string", "null"], "pattern": "^a"}, {"ab": "ab", "null": None}, ["b"]),
    ({"allOf": [{"pattern": "^a$"}]}, {"a": "a"}, ["zzz"]),
    ({"allOf": [{"$ref": "#/$defs/Unit"}, {"enum": ["C", "K"]}]}, {"C": "C"}, ["F", "K"]),
    ({"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}, {"a": "a", "b": "b"}, ["c"]),
    ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, {"auto": "auto", "-5": -5}, ["other", '"auto"', "null"]),
    ({"enum": ["C", 1, None, {"a": 1}]}, {"C": "C", "1": 1, "null": None, '{"a":1}': {"a": 1}}, ["2", "K"]),
    ({"enum": ["ab", "b"], "pattern": "^a", "maxLength": 3}, {"ab": "ab"}, ["b"]),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, {"true": True, "7": 7}, ["True", "x"]),
    ({"$ref": "#/$defs/Node"}, {"{}": {}, '{"next":{"next":{}}}': {"next": {"next": {}}}}, ['{"next":1}', "x"]),
    ({"type": "array", "items": {"$ref": "#"}}, {'[{"p":[]}]': [{"p": []}]}, ["[1]"]),
    ({"type": "string"}, {"a <b>": "a <b>"}, ["a</parameter>b", "<parameter=q>", "</function>"]),
    ({"type": "array"}, {'["</parameter>",{"a":"</function>"}]': ["</parameter>", {"a": "</function>"}]}, ["[<parameter=]"]),
    (True, {"x": "x", "null": "null"}, []),
    ({"pattern": "^(a|b)$"}, {"a": "a", "b": "b"}, ["ab", "c"]),
    ({"pattern": "^a$|^b$"}, {"a": "a", "b": "b"}, ["ab", "c"]),
    ({"pattern": "(^a$)|b"}, {"a": "a", "abc": "abc"}, ["aa", "c"]),
    ({"pattern": "^[a|b]$"}, {"|": "|"}, ["a|b"]),
    ({"pattern": r"^[]|)]\]$"}, {"|]": "|]"}, ["]", "|"]),
    ({"pattern": r"^\d+\$"}, {"5$": "5$", "5$ or so": "5$ or so"}, ["5", "a5$"]),
    ({"pattern": r"^\d+\\$"}, {"5\\": "5\\"}, ["5", "5$", "5\\ or so"]),
    ({"pattern": r"^a\\/b/\/$"}, {r"a\/b//": r"a\/b//"}, ["a/b//"]),
    ({"pattern": ""}, {"": "", "a": "a"}, []),
]  # fmt: skip
DEFINITIONS: dict[str, Any] = {
    "Unit": {"enum": ["C", "F"]},
    "a/b~c": [{"type": "integer"}],
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False},
}


def strict(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "strict": True, "parameters": schema}}]


@pytest.mark.parametrize(("schema", "written", "wrong"), VALUES, ids=lambda value: str(value)[:40])
def test_a_value_between_tags_is_one_of_its_schema(schema: Any, written: dict[str, Any], wrong: list[str]) -> None:
    whole = {"type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": DEFINITIONS}
    form = ChatFormat("qwen3_coder")
    constraint = Constraint(DEMO, form, tools=strict(whole), tool_choice="required")
    for text, value in written.items():
        call = parameters(p=text)
        assert constraint.admits(call), text
        message = joined(form.parser(tools={"look": whole}).pieces(call))
        assert json.loads(message.tool_calls[0].arguments) == {"p": value}
    for text in wrong:
        assert not constraint.admits(parameters(p=text)), text


REFUSED = [
    ({"type": "string", "not": {"const": "a"}}, "property 'p' of a json_schema has not, which"),
    ({"enum": []}, "allows no value"),
    ({"$ref": "#/$defs/Other"}, "has \\$ref '#/\\$defs/Other', which leads nowhere"),
    ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "a oneOf whose parts may match the same text"),
    ({"type": "string", "minLength": "1"}, "has minLength '1'"),
    ({"type": "string", "pattern": "a\\"}, "ends with a single backslash"),
    ({"allOf": [{"anyOf": [{"const": f"{i}-{j}"} for i in range(40)]} for j in range(40)]}, "more than 500 alternatives"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_hold_between_tags_is_refused(schema: Any, reason: str) -> None:
    whole = {"type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": DEFINITIONS}
    with pytest.raises(InvalidRequest, match=reason):
        Constraint(DEMO, ChatFormat("glm47"), tools=strict(whole), tool_choice="required")


NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 1}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["name"],
}
NESTED = {"name": "a", "next": {"name": "b"}}


@pytest.mark.parametrize("top", [{"$ref": "#/$defs/Node"}, {"allOf": [{"$ref": "#/$defs/Node"}], "title": "Node"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "hermes"])
def test_a_reference_at_the_top_is_followed(name: Any, top: dict[str, Any]) -> None:
    whole = {**top, "$defs": {"Node": NODE}}
    constraint = Constraint(DEMO, ChatFormat(name), tools=strict(whole), tool_choice="required")

    def written(**values: Any) -> str:
        text = WRITERS[name](("look", json.dumps(values, separators=(",", ":"))))
        texts = text if name in ("hermes", "pythonic") else text.replace('"a"', "a").replace('"ab"', "ab")
        return texts.replace('": ', '":') if name == "pythonic" else texts.replace('{"name": "b"}', '{"name":"b"}')

    assert constraint.admits(written(**NESTED))
    assert constraint.admits(written(name="a"))
    for wrong in (written(), written(name="ab"), written(name="a", next={}), written(name="a", other=1)):
        assert not constraint.admits(wrong), wrong


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"properties": {}}]}, "has anyOf at its top level"),
        ({"properties": {}, "minProperties": 1}, "has minProperties at its top level"),
        ({"properties": {}, "required": ["p"]}, "requires 'p', which is not among its properties"),
        ({"$ref": "#/$defs/Other"}, "leads nowhere"),
        ({"properties": {"a=>b": {}}}, "of a property cannot be written between tags|is no name in Python's calls"),
    ],
    ids=str,
)
def test_a_schema_beyond_its_properties_is_refused(name: Any, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Constraint(DEMO, ChatFormat(name), tools=strict({"type": "object", **schema}), tool_choice="required")


def test_definitions_are_repeated_within_bounds() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(400)}}
    with pytest.raises(InvalidRequest, match="refers to large definitions too often"):
        Constraint(DEMO, ChatFormat("pythonic"), tools=strict(schema), tool_choice="required")


def test_names_that_python_reserves_are_parameters() -> None:
    schema = {"type": "object", "properties": {"from": {"type": "string"}, "user-id": {"type": "integer"}}}
    text, form = '[look(from="a/b", user-id=3)]', ChatFormat("pythonic")
    assert Constraint(DEMO, form, tools=strict(schema), tool_choice="required").admits(text)
    (call,) = joined(form.parser(tools={"look": schema}).pieces(text)).tool_calls
    assert json.loads(call.arguments) == {"from": "a/b", "user-id": 3}


GIVEN: list[tuple[dict[str, Any], str, str]] = [
    ({"grammar": 'root ::= "yes" | "no" [0-9}]{1,2}'}, "no5}", "maybe"),
    ({"grammar": 'start: "yes" "!"\n%ignore / +/'}, "yes  !", "yes"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}}, "aa", "b"),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}]},
            }
        },
        "x",
        "b",
    ),
    ({"regex": "^a+$"}, "aa", "b"),
    ({"choice": tuple(f"c{i}" for i in range(1000))}, "c999", "d"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), GIVEN, ids=lambda value: str(value)[:40])
def test_every_constraint_holds_behind_the_reasoning(
    fields: dict[str, Any], good: str, bad: str, special_tokenizer: Path
) -> None:
    given = StructuredOutputs(**fields)
    constraint = Constraint(special_tokenizer, ChatFormat("", "deepseek_r1"), given)
    assert constraint.admits(f"Hm, {bad}?\n</think>\n\n{good}")
    assert not constraint.admits(f"Hm</think>{bad}")
    assert not constraint.admits(good)
    channels = Constraint(special_tokenizer, ChatFormat("openai"), given)
    assert channels.admits(f"<|channel|>analysis<|message|>{bad}<|end|><|start|>assistant<|channel|>final<|message|>{good}")
    assert not channels.admits(good)
    call = Constraint(special_tokenizer, ChatFormat("hermes"), given, tools=TOOLS)
    assert call.admits(hermes(ADD))
    assert call.admits(good)
    assert not call.admits(bad)


def test_a_structural_tag_may_describe_the_reasoning_itself(special_tokenizer: Path) -> None:
    elements = [{"type": "const_string", "value": text} for text in ("Hm", "</think>", "yes")]
    given = StructuredOutputs(
        structural_tag={"type": "structural_tag", "format": {"type": "sequence", "elements": [*elements]}}
    )
    constraint = Constraint(DEMO, ChatFormat("", "deepseek_r1"), given)
    assert constraint.admits("Hm</think>yes")
    assert not constraint.admits("Hm</think></think>yes")


@pytest.mark.parametrize(("name", "marker"), [("llama3_json", "<|python_tag|>"), ("pythonic", "<|python_start|>")])
def test_text_holds_no_unchecked_call(name: Any, marker: str) -> None:
    constraint, wrong = Constraint(DEMO, ChatFormat(name), tools=TOOLS), WRITERS[name](("add", '{"a":"1"}'))
    assert constraint.admits("Hello <|python")
    for text in (wrong, marker + wrong, f"Hello {marker}{wrong}"):
        assert not constraint.admits(text), text


def test_a_budget_is_kept_where_the_marks_are_tokens(special_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    def budget(folder: str | Path) -> ReasoningBudget | None:
        output = ChatOutput(ToolFields(), "marks", ChatFormat("", "qwen3"), tokenizer_of(folder), ())
        return output.reasoning_budget(3)

    assert [budget(DEMO), budget(DEMO)] == [None, None]
    assert [record.message for record in caplog.records] == [
        "marks: thinking budgets are not kept: its tokenizer has no token for <think> or </think>"
    ]
    ids = tokenizer_of(special_tokenizer).tokenizer.token_to_id
    assert budget(special_tokenizer) == ReasoningBudget(3, (ids("</think>"),), (ids("<think>"),), is_open=False)


def test_every_name_of_a_tool_parser_has_a_writer() -> None:
    assert set(TAG_WRITERS) == set(get_args(ToolParserName))
