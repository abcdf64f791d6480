"""Every way to say what the output must match reaches the verifier as one constraint."""

import json
from typing import Any

import grpc
import pytest
from openai import BadRequestError

from eyas.api.request import StructuredOutputs
from eyas.services.router.http.bodies.base import parse_body
from eyas.services.router.http.bodies.openai import CompletionBody
from tests.support.services.http_router import CHAT, TOKENS, Script, served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
WAYS: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_json": None, "response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        StructuredOutputs(json=json.dumps(SCHEMA)),
    ),
    ({"response_format": TAG}, StructuredOutputs(structural_tag=json.dumps(TAG))),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"guided_json": "{}"}, StructuredOutputs(json="{}")),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    ({"structured_outputs": {"choice": ["a"]}}, StructuredOutputs(choice=("a",))),
    ({"structured_outputs": {"structural_tag": TAG}}, StructuredOutputs(structural_tag=json.dumps(TAG))),
    (
        {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
        StructuredOutputs(json="{}", whitespace_pattern=""),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), WAYS)
def test_every_name_of_a_constraint_means_the_same(fields: dict[str, Any], expected: StructuredOutputs | None) -> None:
    data = json.dumps({"prompt": "a"} | fields).encode()
    assert parse_body(data, CompletionBody, 1000).sampling({}, 8).structured_outputs == expected


@pytest.mark.parametrize(
    ("field", "value"), [("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a+"})]
)
async def test_what_a_verifier_cannot_compile_is_named_by_its_field(url: str, field: str, value: dict[str, Any]) -> None:
    script = Script(TOKENS, fails_after=0, status=grpc.StatusCode.INVALID_ARGUMENT, param="structured_outputs")
    async with served(url, script) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**CHAT, extra_body={field: value})
        assert caught.value.param == field
