"""Ordinary schemas of Pydantic, zod and OpenAPI compile, and still say what they say."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyUrl, Base64Str, BaseModel, ByteSize, Field, Json, PastDate, SecretStr

from eyas.api.request import StructuredOutputs
from eyas.errors import InvalidRequest
from eyas.grammar.compiler import GrammarCompiler, Matcher
from eyas.text.schema_keywords import known_schema
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny import DEMO

TARGET = str(DEMO / "target")


class Shade(enum.Enum):
    LIGHT = "light"
    DARK = "dark"


class Line(BaseModel):
    shape: Literal["line"] = "line"
    length: int = 1


class Group(BaseModel):
    shape: Literal["group"] = "group"
    parts: list[Shape] = []


Shape = Annotated[Line | Group, Field(discriminator="shape")]
Group.model_rebuild()

FIELDS: dict[str, Any] = {
    "path": pathlib.Path,
    "secret": SecretStr,
    "bytes": bytes,
    "base64": Base64Str,
    "network": ipaddress.IPv4Network,
    "interface": ipaddress.IPv6Interface,
    "decimal": decimal.Decimal,
    "duration": datetime.timedelta,
    "moment": datetime.datetime,
    "past": PastDate,
    "uuid": uuid.UUID,
    "url": AnyUrl,
    "json": Json[Any],
    "size": ByteSize,
    "pattern": re.Pattern[str],
    "set": set[int],
    "frozen": frozenset[Shade],
    "pair": tuple[int, str],
    "by shade": dict[Shade, int],
    "by word": dict[Literal["a", "b"], float],
    "by id": dict[uuid.UUID, int],
    "by name": dict[Annotated[str, Field(min_length=2, max_length=4)], int],
    "by expression": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "shape": Shape,
    "shapes": list[Shape],
    "noted": Annotated[int, Field(json_schema_extra={"x-unit": "m", "example": 3, "readOnly": True})],
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TARGET, 4096, frozenset({1}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TARGET)


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.consume(ids) == len(ids) and matcher.is_accepting


@pytest.mark.parametrize("style", ["json", "qwen_xml"])
def test_ordinary_pydantic_models_compile(style: str, compiler: GrammarCompiler) -> None:
    refused = dict[str, str]()
    for name, field in FIELDS.items():
        schema = type("Model", (BaseModel,), {"__annotations__": {"a": field, "b": field | None}}).model_json_schema()
        format_ = {"type": "json_schema", "style": style, "json_schema": schema}
        structured = StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})
        if error := compiler.submit(StructuredOutputs(json=schema) if style == "json" else structured).exception():
            refused[name] = str(error)
    assert refused == {}


CAT = {"type": "object", "properties": {"is": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"is": {"const": "dog", "default": "dog"}}}
GROUP = {"properties": {"is": {"const": "group"}, "of": {"type": "array", "items": {"$ref": "#/$defs/s"}}}}
NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}
# A schema, texts that match it, and texts that do not.
MEANINGS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "an unknown format": ({"type": "string", "format": "path", "minLength": 2}, ['"/a"'], ['"a"', "1"]),
    "a known format": ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"2026-02-30"']),
    "properties with names of keywords": (
        {"type": "object", "properties": {"format": {"const": "x"}, "propertyNames": {"const": 1}}, "required": ["format"]},
        ['{"format":"x","propertyNames":1}'],
        ['{"format":"y"}', "{}"],
    ),
    "a value that looks like a schema": ({"const": {"format": "x"}}, ['{"format":"x"}'], ["{}"]),
    "a reference into tagged parts": (
        {"type": "array", "minItems": 2, "prefixItems": [{"oneOf": [CAT, DOG]}, {"$ref": "#/prefixItems/0/oneOf/1"}]},
        ['[{"is":"cat"},{"is":"dog"}]'],
        ['[{"is":"cat"},{"is":"cat"}]', '[{"is":"cat"},{}]'],
    ),
    "tags with defaults": ({"oneOf": [CAT, DOG]}, ['{"is":"cat","lives":9}', '{"is":"dog"}'], ["{}", '{"lives":9}']),
    "tags behind references": (
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        ['{"is":"cat"}'],
        ["{}", '{"is":"cow"}'],
    ),
    "tags and other alternatives": (
        {"oneOf": [CAT, DOG], "anyOf": [{"required": ["lives"]}, {"required": ["age"]}]},
        ['{"is":"cat","lives":9}'],
        ['{"is":"cat"}'],
    ),
    "names of an enum": (
        NUMBERS | {"propertyNames": {"enum": ["a", "b"]}},
        ['{"a":1,"b":2}', "{}"],
        ['{"c":1}', '{"a":"1"}'],
    ),
    "names of an enum, all of them": (
        NUMBERS | {"propertyNames": {"enum": ["a", "b"]}, "required": ["a", "b"]},
        ['{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "names of an enum, some with schemas": (
        NUMBERS | {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"type": "null"}, "c": {}}},
        ['{"a":null,"b":2}'],
        ['{"a":1}', '{"c":1}'],
    ),
    "names of a pattern": (NUMBERS | {"propertyNames": {"pattern": "^[a-c]+$"}}, ['{"ab":1}'], ['{"d":1}', '{"a":"1"}']),
    "names of a length": (
        NUMBERS | {"propertyNames": {"minLength": 2, "maxLength": 3}},
        ['{"ab":1}'],
        ['{"a":1}', '{"abcd":1}'],
    ),
    "names that are texts": (NUMBERS | {"propertyNames": {"type": "string"}}, ['{"a":1}'], ['{"a":"1"}']),
    "no further properties": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a":1}'],
        ['{"b":1}'],
    ),
    "keywords without their other one": ({"type": "array", "minContains": 1, "then": {"minItems": 9}}, ["[]"], ["{}"]),
    "a property that cannot be": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {}}},
        ['{"b":1}', "{}"],
        ['{"a":1}'],
    ),
    "tags in a circle": (
        {
            "$ref": "#/$defs/s",
            "$defs": {"s": {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/g"}]}, "c": CAT, "g": GROUP},
        },
        ['{"is":"group","of":[{"is":"cat"},{"is":"group"}]}'],
        ['{"is":"group","of":[{}]}', '{"of":[]}'],
    ),
    "notes next to a reference in a circle": (
        {"$ref": "#/own/n", "own": {"n": {"properties": {"n": {"$ref": "#/own/n", "x-note": {"a": 1}, "nullable": True}}}}},
        ['{"n":{"n":{}}}'],
        ['{"n":1'],
    ),
    "bounds of integers of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["-5", "123456789012"],
        ["1.5", "10000000000000000000"],
    ),
    "bounds of floats": ({"type": "number", "minimum": -1.8e308, "exclusiveMaximum": 3.5e38}, ["-1.5", "0"], ['"a"']),
    "a bound on one side": ({"type": "integer", "exclusiveMinimum": -(2**63)}, ["-1", "7"], ["1.5"]),
    "a decimal": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        ["1.5"],
        ["null", '"."'],
    ),
    "a format with a pattern that looks around": (
        {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$"},
        ['"a@b.org"'],
        ['"a"', "1"],
    ),
    "a dialect of somebody": ({"$schema": "https://example.org/own", "type": "integer"}, ["1"], ["{}"]),
    "unique items": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1,2]"], ['["a"]']),
}


@pytest.mark.parametrize("kind", MEANINGS)
def test_a_translated_schema_means_the_same(kind: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema, good, bad = MEANINGS[kind]
    before = json.dumps(schema)
    grammar = compiler.submit(StructuredOutputs(json=schema)).result()
    assert [text for text in good if not accepts(grammar.matcher(), tokenizer, text)] == []
    assert [text for text in bad if accepts(grammar.matcher(), tokenizer, text)] == []
    known_schema(schema)
    assert json.dumps(schema) == before, "the schema of the request stays as it is"


REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": NUMBERS | {"propertyNames": {"pattern": "^a", "minLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 9}]},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_limit_that_no_grammar_has_is_refused_by_name(keyword: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=keyword):
        compiler.submit(StructuredOutputs(json=REFUSED[keyword])).result()


def test_a_schema_that_is_no_json_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="json is no JSON: Object of type set"):
        StructuredOutputs(json={"enum": {1, 2}})  # type: ignore[arg-type]
