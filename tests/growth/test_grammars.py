"""What reads a client's schemas, grammars, expressions, choices and structural tags grows no faster than n log n."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from eyas.api.request import StructuredOutputs
from eyas.api.validation import MAX_CHOICES, MAX_REGEX_LENGTH, MAX_SCHEMA_LENGTH, check_structured_outputs
from eyas.grammar.structural_tags import structural_tag_to_lark
from eyas.services.router.http.bodies.tools import ToolFields
from eyas.services.router.http.tool_constraints import ChatOutput
from eyas.text.chat_parser import ChatFormat
from eyas.text.json_schema import Alternatives, Definitions, properties_of
from eyas.text.schema_keywords import known_schema
from tests.growth.growth import Reader, check_growth, label, pairs
from tests.support.services.http_router import TOKENIZER

# Patterns of n characters. What no part of them repeats is Unicode, or random to a regular expression.
PATTERNS: dict[str, Callable[[int], str]] = {
    "open classes": lambda n: "[" * n,
    "open named classes": lambda n: "[[:alpha" * (n // 8),
    "classes": lambda n: "[a]" * (n // 3),
    "escapes in a class": lambda n: "[" + r"\\" * (n // 2),
    "open groups": lambda n: "(" * n,
    "closed groups": lambda n: ")" * n,
    "nested groups": lambda n: "(" * (n // 2) + ")" * (n // 2),
    "nested groups of alternatives": lambda n: "(a|" * (n // 4) + ")" * (n // 4),
    "named groups": lambda n: "(?P<a" * (n // 5),
    "alternatives": lambda n: "a|" * (n // 2),
    "anchors": lambda n: "^" * (n // 2) + "$" * (n // 2),
    "backslashes": lambda n: "\\" * n,
    "slashes": lambda n: "/" * n,
    "repeats": lambda n: "a{1,2}" * (n // 6),
    "unicode": lambda n: "\u00fc\U0001f600" * (n // 2),
}


def tag(format_: object) -> str:
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)


def xml(schema: dict[str, Any]) -> str:
    return tag({"type": "json_schema", "style": "qwen_xml", "json_schema": schema})


def of_pattern(pattern: str) -> str:
    return xml({"properties": {"a": {"type": "string", "pattern": pattern}}})


def of_regex(pattern: str) -> str:
    return tag({"type": "regex", "pattern": pattern})


def nested(length: int) -> object:
    """Formats inside of one another, the deepest that a request may have."""
    inner: object = {"type": "const_string", "value": "a" * (length // 2)}
    for _ in range(20):
        inner = {"type": "optional", "content": inner}
    return inner


def triggered(number: int, excludes: int = 0) -> str:
    tags = [{"type": "tag", "begin": f"<{i}>", "content": {"type": "any_text"}, "end": "</>"} for i in range(max(number, 1))]
    triggers = [f"<{i}" for i in range(max(number, 1))]
    return tag(
        {"type": "triggered_tags", "triggers": triggers, "tags": tags, "excludes": [f"word {i}" for i in range(excludes)]}
    )


def enumeration(number: int) -> list[str]:
    return [f"value {i}" for i in range(number)]


def chain(number: int, key: str) -> dict[str, Any]:
    """Definitions that each refer to the next one."""
    links = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(number)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**links, f"d{number}": {"type": "string"}}}


# Objects of about n bytes.
SCHEMAS: dict[str, Callable[[int], dict[str, Any]]] = {
    "properties": lambda n: {"properties": {f"p{i}": {"type": "string"} for i in range(n // 24)}},
    "required": lambda n: {
        "properties": {f"p{i}": {} for i in range(n // 24)},
        "required": [f"p{i}" for i in range(n // 24)],
    },
    "required, and unknown": lambda n: {"properties": {}, "required": [f"p{i}" for i in range(n // 10)]},
    "an enum behind references": lambda n: {
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/e"}] * (n // 50)}},
        "$defs": {"e": {"enum": enumeration(n // 30)}},
    },
    "an enum with others": lambda n: {
        "properties": {"a": {"allOf": [{"enum": enumeration(n // 60)}, {"enum": enumeration(n // 60)}]}}
    },
    "an enum in every property": lambda n: {
        "properties": {f"p{i}": {"$ref": "#/$defs/e"} for i in range(n // 80)},
        "$defs": {"e": {"enum": enumeration(n // 40)}},
    },
    "enums that exclude each other": lambda n: {
        "properties": {"a": {"oneOf": [{"const": f"v{i}"} for i in range(n // 20)]}}
    },
    "combinations": lambda n: {
        "properties": {"a": {"allOf": [{"anyOf": [{"minLength": 1}, {"maxLength": 9}]}] * (n // 60)}}
    },
    "parts": lambda n: {"properties": {"a": {"allOf": [{"minLength": 1}] * (n // 20)}}},
    "a chain of allOf": lambda n: chain(n // 45, "allOf"),
    "a chain of anyOf": lambda n: chain(n // 45, "anyOf"),
    "a long pointer": lambda n: {"properties": {"a": {"anyOf": [{"$ref": "#/%61" + "b" * (n // 2)}] * 100}}},
    "a long name": lambda n: {"properties": {"a" * n: {}}},
    "names in an enum": lambda n: {
        "properties": {f"p{i}": {"propertyNames": {"$ref": "#/$defs/e"}} for i in range(n // 90)},
        "$defs": {"e": {"enum": enumeration(n // 30)}},
    },
    "tagged options": lambda n: {
        "properties": {"a": {"oneOf": [{"$ref": "#/$defs/e"}] * (n // 60)}},
        "$defs": {"e": {"properties": {f"p{i}": {"const": i} for i in range(n // 40)}}},
    },
    "options with many tags": lambda n: {
        "properties": {"a": {"oneOf": [{"properties": {key: {"const": i} for key in "abcdef"}} for i in range(n // 170)]}}
    },
    "notes": lambda n: {"properties": {"a": {"$ref": "#/b", **{f"x-{i}": {"y": [i]} for i in range(n // 24)}}}, "b": {}},
    "formats": lambda n: {"properties": {f"p{i}": {"type": "string", "format": "path"} for i in range(n // 40)}},
    "keywords": lambda n: {"properties": {"a": {f"k{i}": i for i in range(n // 14)}}},
    "a deep value": lambda n: {"properties": {"a": {"enum": [enumeration(n // 12)]}}},
}

TAGS: dict[str, Callable[[int], str]] = {
    **{f"pattern of {name}": lambda n, make=make: of_pattern(make(n)) for name, make in PATTERNS.items()},
    **{f"regex of {name}": lambda n, make=make: of_regex(make(n)) for name, make in PATTERNS.items()},
    **{f"tags of {name}": lambda n, make=make: xml(make(n)) for name, make in SCHEMAS.items()},
    "triggers": lambda n: triggered(n // 90),
    "triggers with excludes": lambda n: triggered(n // 180, n // 30),
    "a long sequence": lambda n: tag({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}] * (n // 40)}),
    "free texts": lambda n: tag(
        {
            "type": "sequence",
            "elements": [{"type": "any_text", "excludes": ["a"]}, {"type": "const_string", "value": "b"}] * (n // 80),
        }
    ),
    "choices": lambda n: tag({"type": "or", "elements": [{"type": "const_string", "value": "a"}] * (n // 40)}),
    "nested formats": lambda n: tag(nested(n)),
    "a long literal": lambda n: tag({"type": "const_string", "value": "\u00fc\\" * (n // 2)}),
    "an unknown type": lambda n: tag({"type": "a" * n}),
    "a wrong value": lambda n: tag({"type": "token", "token": ["a"] * (n // 5)}),
}


def first_property(schema: dict[str, Any]) -> object:
    return next(iter(schema["properties"].values()), {})


def find_alternatives(schema: dict[str, Any]) -> object:
    try:
        return [one.texts for one in Alternatives(schema).of(first_property(schema))]
    except ValueError:
        return None


def find_properties(schema: dict[str, Any]) -> object:
    try:
        return properties_of(schema)
    except ValueError:
        return None


def translate_keywords(schema: dict[str, Any]) -> object:
    try:
        return known_schema(schema)
    except ValueError:
        return None


def stand_alone(schema: dict[str, Any]) -> object:
    definitions = Definitions()
    try:
        return [definitions.standalone(own, schema) for own in schema["properties"].values()]
    except ValueError:
        return None


def translate(text: str) -> str:
    return structural_tag_to_lark(text, whitespace_pattern="", token_id={"<a>": 1}.get)


def constraint(form: str) -> Callable[[dict[str, Any]], object]:
    def make(schema: dict[str, Any]) -> object:
        function = {"name": "f", "strict": True, "parameters": {"type": "object", **schema}}
        tools = [{"type": "function", "function": function}]
        fields = ToolFields.model_validate({"tools": tools, "tool_choice": "required"})
        return ChatOutput(fields, "m", ChatFormat(tool_call_parser=form), TOKENIZER, ()).constraint(None)

    return make


DEEP: dict[str, Callable[[int], str]] = {
    "lists": lambda n: "[" * n,
    "objects": lambda n: '{"a":' * (n // 5),
    "closed lists": lambda n: '{"a":' + "[" * (n // 2) + "]" * (n // 2) + "}",
    "digits": lambda n: '{"a":' + "1" * n + "}",
}

READERS = (
    Reader("eyas.grammar.structural_tags.structural_tag_to_lark", translate, TAGS, MAX_SCHEMA_LENGTH),
    Reader("eyas.text.json_schema.alternatives", find_alternatives, SCHEMAS, MAX_SCHEMA_LENGTH, on_loop=True),
    Reader("eyas.text.json_schema.properties_of", find_properties, SCHEMAS, MAX_SCHEMA_LENGTH, on_loop=True),
    Reader("eyas.text.schema_keywords.known_schema", translate_keywords, SCHEMAS, MAX_SCHEMA_LENGTH),
    Reader("eyas.text.json_schema.Definitions.standalone", stand_alone, SCHEMAS, MAX_SCHEMA_LENGTH),
    *(
        Reader(f"tool_constraints.ChatOutput.constraint, {form}", constraint(form), SCHEMAS, 2 * MAX_SCHEMA_LENGTH)
        for form in ("hermes", "pythonic", "qwen3_xml")
    ),
    Reader(
        "eyas.api.validation.check_structured_outputs, json",
        lambda text: check_structured_outputs(StructuredOutputs(json=text)),
        {**DEEP, **{name: lambda n, make=make: json.dumps(make(n)) for name, make in SCHEMAS.items()}},
        MAX_SCHEMA_LENGTH,
        on_loop=True,
    ),
    Reader(
        "eyas.api.validation.check_structured_outputs, choice",
        lambda texts: check_structured_outputs(StructuredOutputs(choice=texts)),
        {"equal": lambda n: ["a"] * n, "long": lambda n: ["a" * 128] * n},
        MAX_CHOICES,
        on_loop=True,
    ),
    Reader(
        "eyas.api.validation.check_structured_outputs, regex",
        lambda text: check_structured_outputs(StructuredOutputs(regex=text)),
        PATTERNS,
        MAX_REGEX_LENGTH,
        on_loop=True,
    ),
)


@pytest.mark.parametrize(("reader", "shape"), pairs(READERS), ids=label)
def test_a_grammar_grows_no_faster_than_n_log_n(reader: Reader, shape: str) -> None:
    check_growth(reader, shape)
