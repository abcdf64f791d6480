"""Fields of OpenAI and vLLM: those without effect change nothing, the others do what they do there."""

import asyncio
from typing import Any, get_type_hints

import pytest
from httpx import AsyncClient
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from eyas.services.router.http.bodies.base import NEUTRAL, UnusedFields
from eyas.services.router.http.bodies.openai import ChatBody, CompletionBody
from tests.support.services.http_router import (
    ALL,
    CHAT,
    PROMPT_TEXT,
    REST_TEXT,
    TOKENIZER,
    Script,
    http_router,
    served,
    worker,
)
from tests.support.services.scripted_verifier import PROMPT, REST, TEXT, TOKENS

# The fields of vLLM's two requests that OpenAI's do not have.
OF_VLLM = [
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids",
    "bad_words", "prompt_embeds", "add_special_tokens", "response_format", "structured_outputs", "priority",
    "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start",
    "return_token_offsets", "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
    "repetition_detection", "thinking_token_budget", "stream_interval",
]  # fmt: skip
OF_VLLM_CHAT = [
    "include_reasoning", "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template",
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
]  # fmt: skip
# Values that change no result, besides those of NEUTRAL.
UNUSED: dict[str, Any] = {
    "max_tool_calls": 3, "metadata": {"a": "b"}, "prompt_cache_key": "k", "store": True,
    "prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"mode": "implicit"}, "user": "u",
    "prompt_cache_retention": "24h", "return_mm_kwargs": False, "safety_identifier": "s", "service_tier": "flex",
    "spaces_between_special_tokens": False, "stream_interval": 8, "verbosity": "low",
}  # fmt: skip
SPECIAL_TEXT = "<|eos|>"


def test_every_field_of_openai_and_vllm_is_decided() -> None:
    """A field is used, has no effect, or is refused by its name; none is unknown."""
    of_completions = set(get_type_hints(completion_create_params.CompletionCreateParamsStreaming)) | set(OF_VLLM)
    of_chats = set(get_type_hints(chat_create_params.CompletionCreateParamsStreaming)) | {*OF_VLLM, *OF_VLLM_CHAT}
    assert of_completions - {*CompletionBody.model_fields, *NEUTRAL} == set()
    assert of_chats - {*ChatBody.model_fields, *NEUTRAL, "prompt_embeds"} == set()


@pytest.mark.parametrize(("path", "good"), [("/v1/completions", ALL), ("/v1/chat/completions", CHAT)])
def test_fields_without_effect_change_nothing(url: str, path: str, good: dict[str, Any]) -> None:
    fields = [{name: value} for name, values in NEUTRAL.items() for value in (None, *values)]
    fields += [{name: value} for name, value in UNUSED.items()]
    body = CompletionBody if path == "/v1/completions" else ChatBody
    fields = [field for field in fields if not {*field} & {*body.model_fields} - {*UNUSED, "n", "seed", "top_k", "echo"}]
    assert set(UNUSED) == set(UnusedFields.model_fields)
    good = good | {"seed": 3, "max_tokens": 2}

    async def run() -> None:
        script = Script(TOKENS)
        async with (
            worker(url, script),
            http_router(url, request_timeout_s=600.0) as base,
            AsyncClient(base_url=base, timeout=None) as client,
        ):
            plain = await client.post(path, json=good)
            for field in fields:
                answer = await client.post(path, json=good | field)
                assert answer.status_code == 200, (field, answer.text)
                assert answer.json()["choices"] == plain.json()["choices"]
            seeds = {call.request.sampling.seed for call in script.calls}
            assert len(seeds) == 3, "only seed = null and -1 draw one"

    asyncio.run(run())


async def test_best_of_is_accepted_when_it_equals_n(url: str) -> None:
    async with served(url) as client:
        request = ALL | {"n": 2, "temperature": 1, "seed": 1}
        found = len((await client.completions.create(**request, best_of=2)).choices)
    assert found == 2


async def test_events_have_the_usage_so_far_on_request(url: str) -> None:
    async with served(url) as client:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for request, create in ((ALL, client.completions.create), (CHAT, client.chat.completions.create)):
            *events, last = [event async for event in await create(**request | options)]  # type: ignore[operator]
            counts = [event.usage.completion_tokens for event in events]
            assert counts == sorted(set(counts))
            assert counts[-1] == last.usage.completion_tokens == len(REST)
            assert {event.usage.prompt_tokens for event in events} == {len(PROMPT)}
            assert all(event.usage.total_tokens == count + len(PROMPT) for event, count in zip(events, counts, strict=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_on_request(url: str, stream: bool) -> None:
    own: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "stream": stream}
    async with served(url) as client:
        for request, create in ((ALL, client.completions.create), (CHAT, client.chat.completions.create)):
            answer = await create(**request, **own)  # type: ignore[operator]
            parts = [part async for part in answer] if stream else [answer]
            assert [token for part in parts for token in part.choices[0].token_ids] == list(REST)
            prompts = [getattr(part.choices[0] if request is ALL else part, "prompt_token_ids", None) for part in parts]
            assert prompts == [list(PROMPT)] + [None] * (len(parts) - 1)


async def test_the_reason_of_a_stop_is_named(url: str) -> None:
    before = TEXT[len(PROMPT_TEXT) : TEXT.index("Eagle")]
    async with served(url) as client:
        stopped = [{"stop": ["nowhere", "Eagle"]}, {}, {"stop": "Eagle", "extra_body": {"include_stop_str_in_output": True}}]
        choices = [(await client.completions.create(**ALL | more)).choices[0] for more in stopped]
        found = [(choice.text, choice.stop_reason) for choice in choices]
    assert found == [(before, "Eagle"), (REST_TEXT, None), (before + "Eagle", "Eagle")]


async def test_special_tokens_are_shown_on_request(url: str) -> None:
    eos = TOKENIZER.tokenizer.token_to_id(SPECIAL_TEXT)
    tokens = (*TOKENS[:8], eos, *TOKENS[8:])
    async with served(url, Script(tokens)) as client:
        own = [{}, {"skip_special_tokens": False}]
        hidden, shown = [(await client.completions.create(**ALL | {"extra_body": more})).choices[0].text for more in own]
    start = TOKENIZER.decode(TOKENS[:8])[len(PROMPT_TEXT) :]
    assert shown == start + SPECIAL_TEXT + hidden[len(start) :]


async def test_special_tokens_of_a_prompt_are_the_clients_choice(url: str) -> None:
    script = Script(TOKENS)
    async with served(url, script) as client:
        await client.completions.create(**ALL | {"max_tokens": 1}, extra_body={"add_special_tokens": False})
        await client.chat.completions.create(**CHAT | {"max_tokens": 1}, extra_body={"add_special_tokens": False})
    assert [call.request.prompt_ids for call in script.calls] == [PROMPT[1:], PROMPT]


async def test_the_last_message_can_be_continued(url: str) -> None:
    script = Script(TOKENS)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}{{ 'A:' if add_generation_prompt }}"
    async with served(url, script, template=template) as client:
        messages: Any = [{"role": "assistant", "content": PROMPT_TEXT}]
        for own in ({"continue_final_message": True}, {"add_generation_prompt": False}, {"request_id": "mine"}):
            request = CHAT | {"max_tokens": 1, "messages": messages}
            await client.chat.completions.create(**request, extra_body=own)
    texts = [TOKENIZER.decode(call.request.prompt_ids) for call in script.calls]
    assert texts == [PROMPT_TEXT, f"{PROMPT_TEXT}\n", f"{PROMPT_TEXT}\nA:"]
    assert script.calls[-1].request.id == "chatcmpl-mine"
