"""OpenAI's own client works unchanged with the router."""

from typing import Any

import pytest
from openai import NotFoundError

from tests.support.services.http_router import ALL, CHAT, PROMPT_TEXT, REST_TEXT, TOKENIZER, Script, served
from tests.support.services.scripted_verifier import CHUNK_TOKENS, PROMPT, REST, TEXT, TOKENS

USAGE = (len(PROMPT), len(REST), len(TOKENS), len(PROMPT) - 1)


def numbers(usage: Any) -> tuple[int, int, int, int]:
    return (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details.cached_tokens)


async def texts(events: Any) -> list[str]:
    return [event.choices[0].text async for event in events if event.choices]


@pytest.mark.parametrize("prompt", [PROMPT_TEXT, [PROMPT_TEXT], list(PROMPT), [list(PROMPT)]])
async def test_a_completion_is_whole(url: str, prompt: Any) -> None:
    async with served(url) as client:
        response = await client.completions.with_raw_response.create(**ALL | {"prompt": prompt})
    answer = response.parse()
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (REST_TEXT, "length", 0, None)
    assert numbers(answer.usage) == USAGE
    assert (answer.object, answer.model) == ("text_completion", "demo")
    assert response.headers["x-request-id"] == answer.id


async def test_a_chat_is_whole(url: str) -> None:
    async with served(url) as client:
        answer = await client.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REST_TEXT, "length")
    assert numbers(answer.usage) == USAGE
    assert answer.object == "chat.completion"


async def test_a_completion_streams_and_ends_with_its_usage(url: str) -> None:
    async with served(url) as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = [event async for event in await client.completions.create(**ALL | options)]
    assert "".join(event.choices[0].text for event in events) == REST_TEXT
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len(events) < len(REST), "usage counts tokens, and a chunk has several"
    assert (last.choices, numbers(last.usage)) == ([], USAGE)


async def test_a_chat_streams_its_role_once(url: str) -> None:
    async with served(url) as client:
        events = [event async for event in await client.chat.completions.create(**CHAT, stream=True)]
    assert "".join(event.choices[0].delta.content or "" for event in events) == REST_TEXT
    assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event.usage is None for event in events)


def predictions(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_reports_accepted_and_rejected_draft_tokens(url: str, n: int) -> None:
    """The scripted verifier drafts eight tokens in each step, and accepts all tokens of a chunk but the last."""
    num_verify_steps = -(-len(REST) // CHUNK_TOKENS)
    accepted = n * (len(REST) - num_verify_steps)
    request: dict[str, Any] = {"n": n, "seed": 1, "temperature": 1}
    streaming = request | {"stream": True, "stream_options": {"include_usage": True}}
    async with served(url) as client:
        whole = await client.completions.create(**ALL | request)
        chat = await client.chat.completions.create(**CHAT | request)
        *_, last = [event async for event in await client.chat.completions.create(**CHAT | streaming)]
        for answer in (whole, chat, last):
            assert predictions(answer.usage) == (accepted, 8 * n * num_verify_steps - accepted)
            assert not hasattr(answer, "metrics")


async def test_speculation_statistics_are_returned_on_request(url: str) -> None:
    num_verify_steps = -(-len(REST) // CHUNK_TOKENS)
    accepted = len(REST) - num_verify_steps
    own: dict[str, Any] = {"extra_body": {"return_speculation": True}}
    async with served(url) as client:
        whole = await client.completions.create(**ALL, **own)
        *_, last = [event async for event in await client.chat.completions.create(**CHAT, stream=True, **own)]
        scored = await client.completions.create(**ALL | {"max_tokens": 0, "echo": True}, **own)
        whole, last, scored = whole.metrics, last.metrics, scored.metrics["speculative_decoding"]["num_spec_steps"]
    histogram = whole["speculative_decoding"].pop("acceptance_histogram")
    assert whole["speculative_decoding"] == {
        "mean_acceptance_length": len(REST) / num_verify_steps,
        "draft_acceptance_rate": accepted / (8 * num_verify_steps),
        "num_spec_steps": num_verify_steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": 8 * num_verify_steps,
    }
    assert (sum(histogram), sum(at * steps for at, steps in enumerate(histogram))) == (num_verify_steps, accepted)
    assert last["speculative_decoding"]["acceptance_histogram"] == histogram
    assert scored == 0, "the one token that scoring costs does not count"


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_and_n_are_numbered(url: str, stream: bool) -> None:
    """The second prompt is two tokens longer, so its completion is two tokens shorter."""
    prompts = [list(PROMPT), list(TOKENS[: len(PROMPT) + 2])]
    request = ALL | {"prompt": prompts, "n": 2, "temperature": 1, "seed": 5}
    found: dict[int, str] = {}
    async with served(url) as client:
        answer = await client.completions.create(**request, stream=stream)
        if not stream:
            assert numbers(answer.usage) == (10, 4 * len(REST) - 4, 10 + 4 * len(REST) - 4, 8)
        for event in [event async for event in answer] if stream else [answer]:
            for choice in event.choices:
                found[choice.index] = found.get(choice.index, "") + choice.text
    rests = [TOKENIZER.decode(TOKENS[len(prompt) :]) for prompt in prompts]
    assert found == {0: rests[0], 1: rests[0], 2: rests[1], 3: rests[1]}


async def test_echo_returns_the_prompt_first(url: str) -> None:
    async with served(url) as client:
        prompts = ALL | {"prompt": [PROMPT_TEXT, list(PROMPT)], "echo": True}
        answer = await client.completions.create(**prompts)
        streamed = await client.completions.create(**prompts | {"prompt": PROMPT_TEXT}, stream=True)
        found = [choice.text for choice in answer.choices], "".join(await texts(streamed))
    assert found == ([TEXT, TEXT], TEXT)


async def test_models_are_listed_and_found(url: str) -> None:
    async with served(url) as client:
        (listed,) = [model async for model in client.models.list()]
        found = await client.models.retrieve("demo")
    assert listed == found
    assert (found.id, found.object, found.max_model_len) == ("demo", "model", 2048)


async def test_aliases_are_listed_and_accepted(url: str) -> None:
    async with served(url, aliases=("other",)) as client:
        listed = [model.id async for model in client.models.list()]
        answer = await client.completions.create(model="other", prompt="x", temperature=0)
        with pytest.raises(NotFoundError, match="known: demo, other"):
            await client.completions.create(model="third", prompt="x")
        found = listed, answer.model, (await client.models.retrieve("other")).id
    assert found == (["demo", "other"], "demo", "other")


async def test_request_parameters_reach_the_verifier(url: str) -> None:
    script = Script(TOKENS)
    own = {
        "top_k": 5, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "stop_token_ids": [9], "ignore_eos": True,
        "bad_token_ids": [[7, 8]], "session_id": "s", "priority": 3, "drafter": "none",
    }  # fmt: skip
    request = CHAT | {
        "temperature": 0.5, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tokens": 7,
        "logit_bias": {"5": 2, "9": -1.5}, "user": "u", "metadata": {"a": "b"}, "store": False, "extra_body": own,
    }  # fmt: skip
    async with served(url, script) as client:
        answer = await client.chat.completions.create(**request, extra_headers={"X-Request-Id": "mine"})
    (call,) = script.calls
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 11, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens, sampling.repetition_penalty) == (5, 0.1, 2, 1.1)
    assert (sampling.stop_token_ids, sampling.bad_token_ids, sampling.ignore_eos) == ((9,), ((7, 8),), True)
    assert sampling.logit_bias == ((5, 2.0), (9, -1.5))
    assert (call.request.session, call.request.priority, call.drafter) == ("s", 3, "none")
    assert call.request.id == answer.id == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"extra_headers": {"X-Request-Id": "a\t" + "b" * 300}}, "chatcmpl-a\\t" + "b" * 109),
        ({"extra_body": {"request_id": " "}}, None),
        ({"extra_body": {"request_id": "a "}}, "chatcmpl-a"),
        ({"extra_body": {"request_id": "漢"}}, "chatcmpl-\\u6f22"),
    ],
    ids=["long", "blank", "space", "letter"],
)
async def test_an_id_of_the_client_is_cut_and_escaped(own: dict[str, Any], expected: str | None, url: str) -> None:
    script = Script(TOKENS)
    async with served(url, script) as client:
        response = await client.chat.completions.with_raw_response.create(**CHAT, **own)
    assert response.headers["x-request-id"] == response.parse().id == script.calls[0].request.id
    assert expected in (None, script.calls[0].request.id)


async def test_a_chat_may_go_on_to_the_end_of_the_context(url: str) -> None:
    script = Script(TOKENS)
    request = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    async with served(url, script) as client:
        await client.chat.completions.create(**request)
        await client.chat.completions.create(**request, max_completion_tokens=5)
        await client.completions.create(model="demo", prompt=PROMPT_TEXT, temperature=0)
    assert [call.request.sampling.max_tokens for call in script.calls] == [2048 - len(PROMPT), 5, 16]
    assert {call.request.prompt_ids for call in script.calls} == {PROMPT}
