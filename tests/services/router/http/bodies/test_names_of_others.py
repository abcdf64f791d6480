"""Fields as other servers name them mean the same here, and what no server knows is refused or ignored."""

import asyncio
import json
import logging
from typing import Any

import pytest
from httpx import AsyncClient
from pydantic import ValidationError

from eyas.api.request import StructuredOutputs
from eyas.errors import InvalidRequest
from eyas.services.router.http.bodies.anthropic import MessagesBody
from eyas.services.router.http.bodies.base import FieldPolicy, parse_body
from eyas.services.router.http.bodies.body_errors import invalid_body
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from eyas.services.router.http.bodies.other_servers import IGNORED, RENAMED, RESHAPED, near_names
from eyas.services.router.http.bodies.responses import ResponsesBody
from eyas.services.router.http.bodies.tokenize import DetokenizeBody, TokenizeBody
from tests.support.services.http_router import CHAT, TOKENS, Script, http_router, worker

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
# Fields of a completion's or chat's call, by what others send for them.
COMPLETION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n_predict": 3}, {"max_tokens": 3}),
    ({"max_new_tokens": 3, "do_sample": True}, {"max_tokens": 3}),
    ({"repeat_penalty": 1.5, "random_seed": 4}, {"repetition_penalty": 1.5, "seed": 4}),
    ({"options": {"num_predict": 3, "repeat_penalty": 1.5, "num_ctx": 9}}, {"max_tokens": 3, "repetition_penalty": 1.5}),
    ({"options": {"temperature": 0.5}, "temperature": 0.25}, {"temperature": 0.25}),
    ({"extra_body": {"min_new_tokens": 2}, "max_tokens": 4}, {"min_tokens": 2}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": False, "temperature": 0.5}, {"temperature": 0.5}),
    ({"stop_sequences": ["a"]}, {"stop": ("a",)}),
    ({"until": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"n_probs": 2}, {"logprobs": 2}),
    ({"ban_eos_token": True}, {"ignore_eos": True}),
    ({"mirostat": 2, "cache_prompt": True, "keep_alive": "5m", "provider": {"order": ["a"]}, "typical_p": 0.9}, {}),
]
# Every way to say what the output must match, and the fields of StructuredOutputs.
CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_json": None, "response_format": None}, None),
    ({"grammar": ""}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"json": SCHEMA}),
    ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
    ({"response_format": TAG}, {"structural_tag": TAG}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": "{}"}, {"json": "{}"}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, {"regex": "a+"}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, {"json": SCHEMA, "whitespace_pattern": "[ ]?"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
    ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
    ({"structured_outputs": {"json": "{}", "disable_any_whitespace": True}}, {"json": "{}", "whitespace_pattern": ""}),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
        {"json_object": True, "whitespace_pattern": ""},
    ),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"format": SCHEMA}, {"json": SCHEMA}),
    ({"format": "json"}, {"json_object": True}),
]
CHATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"reasoning": {"max_tokens": 9, "exclude": True}}, {"thinking_token_budget": 9, "include_reasoning": False}),
    ({"reasoning": {"enabled": False}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
    ({"think": "high"}, {"reasoning_effort": "high"}),
    (
        {"enable_thinking": False, "chat_template_kwargs": {"style": "x"}},
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "style": "x"}},
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "thinking_token_budget": 7},
    ),
    ({"reasoning_budget": 0}, {"thinking_token_budget": 0}),
    ({"num_predict": -1}, {"max_tokens": None}),
    ({"max_tokens": -1}, {"max_tokens": None}),
    ({"max_completion_tokens": -2, "max_tokens": -1, "lora": [], "image_data": []}, {"num_tokens": None}),
    ({"max_tokens": -1, "return_progress": True, "reasoning_in_content": False, "backend_sampling": False}, {}),
    ({"n_probs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"messages": [{**MESSAGES[0], "reasoning_details": [], "cache_control": {"type": "ephemeral"}}]}, {}),
]


@pytest.mark.parametrize(("given", "expected"), CONSTRAINTS)
def test_every_name_of_a_constraint_means_the_same(given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    body = parse_body(json.dumps({"prompt": "a"} | given).encode(), CompletionBody, 1000)
    assert body.sampling({}, 8).structured_outputs == (StructuredOutputs(**expected) if expected else None)


@pytest.mark.parametrize(("given", "expected"), COMPLETION)
def test_names_of_other_servers_mean_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    body = parse_body(json.dumps({"prompt": "a"} | given).encode(), CompletionBody, 1000)
    sampling = body.sampling({}, 16 if body.num_tokens is None else body.num_tokens, logprobs=body.logprobs)
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(("given", "expected"), CHATS)
def test_names_of_chats_of_other_servers_mean_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    body = parse_body(json.dumps({"messages": MESSAGES} | given).encode(), ChatBody, 1000)
    assert {name: getattr(body, name) for name in expected} == expected


def test_llama_cpp_names_the_text_to_encode_content() -> None:
    body = TokenizeBody.model_validate({"content": "a"})
    assert (body.prompt, body.add_special_tokens) == ("a", False)
    assert TokenizeBody.model_validate({"content": "a", "add_special": True}).add_special_tokens is True


@pytest.mark.parametrize("mark", ["prefix", "partial"])
@pytest.mark.parametrize("body", [ChatBody, TokenizeBody])
def test_the_mark_of_a_last_message_continues_it(body: type[ChatBody | TokenizeBody], mark: str) -> None:
    def parsed(is_marked: bool) -> ChatBody | TokenizeBody:
        return body.model_validate({"messages": [*MESSAGES, {"role": "assistant", "content": "A", mark: is_marked}]})

    marked = parsed(True)
    chat = marked.chat() if isinstance(marked, TokenizeBody) else marked
    assert chat.continue_final_message
    assert chat.messages[-1].content == "A"
    assert not parsed(False).continue_final_message


def test_no_guess_is_the_name_itself() -> None:
    with pytest.raises(ValidationError) as caught:
        DetokenizeBody.model_validate({"tokens": [1], "content": "a"})
    assert "did you mean content" not in str(invalid_body(caught.value.errors()))


def test_each_endpoint_has_its_own_name_of_a_limit() -> None:
    responses = ResponsesBody.model_validate({"input": "a", "max_tokens": 3})
    assert responses.max_output_tokens == 3
    messages = MessagesBody.model_validate({"messages": MESSAGES, "max_completion_tokens": 3, "stop_sequences": ["a"]})
    assert (messages.max_tokens, messages.stop_sequences) == (3, ["a"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"n_predict": 3, "max_tokens": 4}, "n_predict and max_tokens say different things"),
        ({"n_predict": -1}, "n_predict is -1, which sets no limit; give a number of tokens"),
        ({"max_tokens": -1}, "max_tokens is -1, which sets no limit; give a number of tokens"),
        ({"n_predict": "x"}, "max_tokens"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"image_data": ["aGk="]}, "image_data"),
        ({"session_params": {"id": "a"}}, "session_params"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; it must be true or false"),
        ({"regex": "a", "grammar": "b"}, "both say what the output must match"),
        ({"json_schema": 3}, "guided_json"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x*"}}, "whitespace_pattern is 'x[*]'; write a regular"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "contradict each other",
        ),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "no constraint"),
    ],
)
def test_wrong_values_of_other_names_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=reason):
        parse_body(json.dumps({"prompt": "a"} | given).encode(), CompletionBody, 1000).sampling({}, 16)


@pytest.mark.parametrize(
    "field", [{"reasoning": 3}, {"reasoning": {"exclude": "false"}}, {"thinking": {"type": "x"}}, {"think": 3}]
)
def test_wrong_settings_of_reasoning_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(field))):
        ChatBody.model_validate({"messages": MESSAGES} | field)


def test_no_field_is_both_used_and_ignored() -> None:
    used = {*CompletionBody.model_fields, *ChatBody.model_fields}
    assert not IGNORED & used
    assert not IGNORED & (RENAMED.keys() | RESHAPED.keys())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", ["temperature"]), ("temperatrue", ["temperature"]), ("Temperature", ["temperature"]),
        ("topP", ["top_p"]), ("top-k", ["top_k"]), ("max_token", ["max_tokens"]), ("maxTokens", ["max_tokens"]),
        ("min_k", []), ("n_predicts", []), ("foo", []), ("x" * 300, []), ("", []),
    ],
)  # fmt: skip
def test_a_guess_is_nearly_the_same_name(name: str, meant: list[str]) -> None:
    assert near_names(name, frozenset(CompletionBody.model_fields)) == meant


async def statuses(url: str, unknown_fields: Any, bodies: list[dict[str, Any]]) -> list[tuple[int, str]]:
    async with (
        worker(url, Script(TOKENS)),
        http_router(url, unknown_fields=unknown_fields) as base,
        AsyncClient(base_url=base, timeout=30) as client,
    ):
        answers = [await client.post("/v1/chat/completions", json=CHAT | body) for body in bodies]
    return [(answer.status_code, answer.json().get("error", {}).get("message", "")) for answer in answers]


def test_unknown_fields_are_refused_or_ignored(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Near misses, and fields of other endpoints, are refused in either case."""
    caplog.set_level(logging.INFO, "eyas.services.router.http.bodies.base")
    made_up: list[dict[str, Any]] = [
        {"wholly_new": 1},
        {"wholly_new": 2},
        {"messages": [CHAT["messages"][0] | {"mood": "good"}]},
    ]
    wrong: list[dict[str, Any]] = [
        {"temprature": 1},
        {"prompt": "a"},
        {"functions": [{"name": "f"}]},
        {"tool_choise": "auto"},
    ]
    others: list[dict[str, Any]] = [{"n_predict": 2, "max_tokens": 2}, {"mirostat": 1}, {"mirostat": 2}, {"keep_alive": 0}]
    for setting in ("refuse", "ignore"):
        caplog.clear()
        found = asyncio.run(statuses(url, setting, [*others, *made_up, *wrong]))
        assert [status for status, _ in found[:4]] == [200] * 4
        assert [status for status, _ in found[4:7]] == [400 if setting == "refuse" else 200] * 3
        assert [status for status, _ in found[7:]] == [400] * 4
        assert "did you mean temperature?" in found[7][1]
        assert "is a field of /v1/completions" in found[8][1]
        assert "did you mean tool_choice?" in found[10][1]
        logged = [record.getMessage() for record in caplog.records if "has no counterpart here" in record.getMessage()]
        names = ["mirostat", "keep_alive"] + (["wholly_new", "mood"] if setting == "ignore" else [])
        assert len(logged) == len(names)
        assert all(f"'{name}'" in line for name, line in zip(names, logged, strict=True))


def test_names_that_clients_make_up_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eyas.services.router.http.bodies.base")
    policy = FieldPolicy("ignore")
    for number in range(1000):
        assert policy.ignored([f"field {number} of mine"], frozenset(["prompt"]))
    assert len(caplog.records) == 256
