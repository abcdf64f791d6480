"""A body that cannot be served is rejected with an error that names the field; no verifier is called."""

import json
from typing import Any

import grpc
import httpx
import pytest
from openai import BadRequestError

from tests.support.services.http_router import ALL, CHAT, PLAIN, Script, http_router, post, served, worker
from tests.support.services.scripted_verifier import TOKENS

JSON = {"Content-Type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TOOL = {"type": "function", "function": {"name": "f"}}
COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": []}, "prompt", "must be a text"),
    ({"prompt": 7}, "prompt", "must be a text"),
    ({"prompt": [1, "a"]}, "prompt", "must be a text"),
    ({"prompt": [True]}, "prompt", "must be a text"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": [[]]}, "prompt", "is empty"),
    ({"prompt": [4096]}, "prompt", "token id 4096, outside"),
    ({"prompt": [-1], "echo": True}, "prompt", "token id -1, outside"),
    ({"prompt": [10**30], "echo": True}, "prompt", "outside the vocabulary"),
    ({"prompt": "return " * 9000}, "prompt", "exceed the context length 2048"),
    ({"prompt": "return " * 90000}, "prompt", "exceeds the context of 2048"),
    ({"prompt": "\ud800"}, "prompt", "no character"),
    ({"stop": "\ud800"}, "stop[0]", "no character"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": 3}, "stop", "stop is 3: must be a string or a list of strings"),
    ({"stop": ["a", 3]}, "stop[1]", "stop[1] is 3: Input should be a valid string"),
    ({"stream_options": 3}, "stream_options", "is 3: Input should be a valid dictionary"),
    ({"max_tokens": 0}, "max_tokens", "whole number from 1"),
    ({"max_tokens": 4096}, "max_tokens", "exceed the context length 2048"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"n": 2}, "n", "at temperature 0"),
    ({"n": 128, "temperature": 1, "prompt": ["a"] * 9}, "n", "more than 1024"),
    *(
        ({"logit_bias": {name: 1}}, "logit_bias", "no token id")
        for name in ("a", "1_0", " 7", "\u0663", "+7", "07", "9" * 99)
    ),
    ({"logit_bias": {"5": True}}, "logit_bias.5", "valid number"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"logprobs": 21, "echo": True}, "logprobs", "from 0 to 20"),
    ({"logprobs": 1, "echo": True, "n": 2, "temperature": 1}, "n", "ask for n = 1"),
    ({"logprobs": 1, "echo": True, "prompt_logprobs": 1}, "prompt_logprobs", "leave prompt_logprobs out"),
    ({"priority": -1}, "priority", "0 (normal) or more"),
    ({"bad_token_ids": [[]]}, "bad_token_ids", "0 tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not a known field"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"temperatur": 1}, "temperatur", "did you mean temperature?"),
    ({"body": 1}, "body", "not a known field"),
    ({"\ud800": 1}, None, "must be a JSON object"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"best_of": True}, "best_of", "not supported"),
    ({"n": True}, "n", "valid integer"),
    ({"echo": 0}, "echo", "valid boolean"),
    ({"max_tokens": 1, "n_predict": True}, "n_predict", "different things"),
    ({"suffix": "x"}, "suffix", "no tokens to fill in the middle"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "is missing"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs format"),
    ({"response_format": {"type": "json_object", "format": {}}}, "response_format", "has no format"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": 7}, "guided_json", "7: must be a JSON object, or its text"),
    ({"guided_choice": []}, "guided_choice", "no constraint"),
    ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "both say what the output must match"),
    ({"structured_outputs": {}}, "structured_outputs", "no constraint"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "no constraint"),
    ({"drafter": "eagle"}, "drafter", "'none'"),
    ({"messages": []}, "messages", "a field of /v1/chat/completions"),
]
CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "is missing"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages", "has no content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content", "images, audio and files"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "is 3: must be text, or parts"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "messages[0].tool_calls[0].function.arguments", "is 3: must be a JSON object, or its text",
    ),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content", "no character"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "is missing"),
    ({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"bos_token": ""}}, "messages", "is empty"),
    ({"messages": [{"role": "user", "content": "return " * 90000}]}, "messages", "exceeds the context of 2048"),
    ({"chat_template_kwargs": {"bos_token": "\ud800"}}, "messages", "chat template refuses"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "whole number from 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": False}, "top_logprobs", "valid integer"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"tools": [TOOL]}, "tools", "no format of tool calls"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"store": 1}, "store", "valid boolean"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "contradict"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"echo": True}, "echo", "a field of /v1/completions"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters", "type 'object'"),
    ({"tools": [TOOL, TOOL]}, "tools", "two tools have the name 'f'"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not among"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", "only the"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages", "has no content"),
]  # fmt: skip
RESPONSES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"conversation": "c"}, "conversation", "nothing is stored"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"n": 2}, "n", "a field of /v1/completions and /v1/chat/completions"),
    ({"return_verify_steps": True}, "return_verify_steps", "and not of this endpoint"),
    ({"input": []}, "input", "no message"),
    ({"input": 3}, "input", "is 3: must be a string or a list of items"),
    ({"tool_choice": 3}, "tool_choice", "is 3: must be 'none', 'auto', 'required'"),
    ({"input": [{"role": "user"}]}, "input", "needs content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'message'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_text'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"max_output_tokens": 4096}, "max_output_tokens", "exceed the context"),
    ({"input": "return " * 90000}, "input", "exceeds the context"),
]
NEUTRAL = {
    "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "u", "seed": None,
    "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "stop": None, "stream_options": None,
}  # fmt: skip


async def sent(base: str, path: str, body: Any) -> httpx.Response:
    """Post JSON whose escapes may encode half a character."""
    async with httpx.AsyncClient(base_url=base, timeout=30) as client:
        return await client.post(path, content=json.dumps(body).encode(), headers=JSON)


def check(answer: httpx.Response, status: int, param: str | None, part: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param), error
    assert part in error["message"]


@pytest.mark.parametrize(
    ("path", "good", "cases"),
    [
        ("/v1/completions", ALL, COMPLETIONS),
        ("/v1/chat/completions", CHAT, CHATS),
        ("/v1/responses", {"model": "demo", "input": "x"}, RESPONSES),
    ],
    ids=["completions", "chat", "responses"],
)
async def test_a_bad_body_gets_an_error_with_the_wrong_field(
    url: str, path: str, good: dict[str, Any], cases: list[tuple[dict[str, Any], str | None, str]]
) -> None:
    script = Script(TOKENS)
    async with worker(url, script), http_router(url) as base:
        for changes, param, part in cases:
            check(await sent(base, path, good | changes), 400, param, part)
        assert script.calls == []


async def test_bodies_that_are_not_json_or_too_long_are_rejected(url: str) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 2**20

    async with http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        check(await sent(base, "/v1/completions", [1]), 400, None, "must be a JSON object")
        check(await client.post("/v1/completions", content=b"{}"), 400, None, "Content-Type: application/json")
        check(await client.post("/v1/completions", content=b"{", headers=JSON), 400, None, "not JSON")
        check(await client.post("/v1/completions", content=b" " * (17 * 2**20)), 413, None, "longer than 16777216")
        check(await client.post("/v1/completions", content=chunks(), headers=JSON), 413, None, "longer than 16777216")


async def test_unknown_paths_methods_and_models_share_an_error_shape(url: str) -> None:
    async with worker(url, Script(TOKENS)), http_router(url) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        check(await client.post("/v1/embeddings", json={}), 404, None, "POST /v1/embeddings: Not Found")
        check(await client.get("/v1/completions"), 405, None, "Method Not Allowed")
        for answer in (
            await post(base, "/v1/completions", ALL | {"model": "other"}),
            await post(base, "/v1/chat/completions", CHAT | {"model": "other"}),
            await client.get("/v1/models/org/other"),
        ):
            check(answer, 404, "model", "'other'" if answer.request.method == "POST" else "'org/other'")
            assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("template", [PLAIN, ""])
async def test_neutral_values_are_ignored_and_chats_need_a_template(url: str, template: str) -> None:
    async with worker(url, Script(TOKENS)), http_router(url, template=template) as base:
        answer = await post(base, "/v1/chat/completions", CHAT | NEUTRAL)
        if template:
            assert answer.status_code == 200, answer.text
        else:
            check(answer, 400, "messages", "model 'demo' has no chat template; use /v1/completions")


@pytest.mark.parametrize(
    ("field", "value"), [("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a+"})]
)
async def test_what_a_verifier_cannot_compile_is_named_by_its_field(url: str, field: str, value: dict[str, Any]) -> None:
    script = Script(TOKENS, fails_after=0, status=grpc.StatusCode.INVALID_ARGUMENT, param="structured_outputs")
    async with served(url, script) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**CHAT, extra_body={field: value})
        assert caught.value.param == field
