"""OpenAI's Responses API and Anthropic's Messages API, through the clients of both companies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.services.http_router import (
    CHAT,
    PROMPT_TEXT,
    REST_TEXT,
    TOKENIZER,
    Script,
    http_router,
    post,
    served,
    worker,
)
from tests.support.services.scripted_verifier import DEMO, MODEL, PROMPT, REST, TEXT, TOKENS

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # its import takes 4 s, in every process that collects tests

NUM_CACHED = len(PROMPT) - 1
ASKED: dict[str, Any] = {"model": "demo", "input": PROMPT_TEXT, "max_output_tokens": len(REST), "temperature": 0}
MESSAGE: dict[str, Any] = {name: CHAT[name] for name in ("model", "messages", "max_tokens")}
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<assistant>' if add_generation_prompt }}"


@asynccontextmanager
async def anthropic_client(url: str, script: Script | None = None, **router: Any) -> AsyncIterator[AsyncAnthropic]:
    """Run a router of one verifier; yields a client that does not retry."""
    from anthropic import AsyncAnthropic

    async with (
        worker(url, script or Script(TOKENS)),
        http_router(url, **router) as base,
        AsyncAnthropic(base_url=base, api_key="one", max_retries=0) as client,
    ):
        yield client


async def test_a_response_is_whole(url: str) -> None:
    async with served(url) as client:
        answer = await client.responses.create(**ASKED, metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.store) == (REST_TEXT, "incomplete", False)
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.id.startswith("resp_")
    assert answer.metadata == {"a": "b"}
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(PROMPT), len(REST), len(TOKENS))
    assert usage.input_tokens_details.cached_tokens == NUM_CACHED


async def test_a_response_streams_its_events_in_order(url: str) -> None:
    async with served(url) as client:
        events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == REST_TEXT == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == len(REST)


@pytest.mark.parametrize("stream", [False, True])
async def test_half_of_a_surrogate_pair_is_echoed_as_an_escape(stream: bool, url: str) -> None:
    async with (
        worker(url, Script(TOKENS)),
        http_router(url) as base,
        httpx.AsyncClient(base_url=base.removesuffix("/v1")) as client,
    ):
        body = json.dumps(ASKED | {"metadata": {"a": "\ud800"}, "stream": stream})
        answer = await client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert '{"a":"\\ud800"}' in answer.text


async def test_the_input_of_a_response_may_be_a_conversation(url: str) -> None:
    script = Script(TOKENS)
    async with served(url, script, template=CHATML) as client:
        first = await client.responses.create(**ASKED | {"max_output_tokens": 1})
        again: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            *first.model_dump(exclude_none=True)["output"],
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "developer", "content": "c"},
        ]
        await client.responses.create(**ASKED | {"input": again, "instructions": "i", "max_output_tokens": 1})

    text = TOKENIZER.decode(TOKENS[len(script.calls[0].request.prompt_ids) :][:1])
    expected = f"<system>i\n<user>a\n<assistant>{text}\n<developer>c\n<assistant>"
    assert TOKENIZER.decode(script.calls[1].request.prompt_ids) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_wait_for_the_text_of_their_tokens(url: str, stream: bool) -> None:
    """A character of several tokens is visible with the last of them. Tokens of the reasoning have no place."""
    text = "\U0001f985\u00e9 a"
    script = Script((*PROMPT, *TOKENIZER.encode_rendered(f"<think>Hm</think>{text}")))
    asked = ASKED | {"include": ["message.output_text.logprobs"], "max_output_tokens": len(script.tokens) - len(PROMPT)}
    async with served(url, script, template=HERMES) as client:
        answer: Any = await client.responses.create(**asked, stream=stream)
        if stream:
            events = [event async for event in answer]
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            answer = events[-1].response
            assert sum(len(event.logprobs) for event in deltas) == len(answer.output[-1].content[0].logprobs)
    entries = answer.output[-1].content[0].logprobs
    assert answer.output_text == text
    assert [entry.logprob for entry in entries] == [-0.5] * len(TOKENIZER.encode_rendered(text))
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text


async def test_a_message_is_whole(url: str) -> None:
    async with anthropic_client(url) as client:
        answer = await client.messages.create(**MESSAGE)
    assert [(block.type, block.text) for block in answer.content] == [("text", REST_TEXT)]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, NUM_CACHED, len(REST))


async def test_a_message_streams_its_events_in_order(url: str) -> None:
    async with anthropic_client(url) as client:
        events = [event async for event in await client.messages.create(**MESSAGE, stream=True)]
        async with client.messages.stream(**MESSAGE) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert text == REST_TEXT == message.content[0].text
    assert (events[0].message.usage.output_tokens, events[-2].usage.output_tokens) == (0, len(REST))
    assert message.stop_reason == "max_tokens"


async def test_a_message_stops_at_a_stop_sequence(url: str) -> None:
    async with anthropic_client(url) as client:
        answer = await client.messages.create(**MESSAGE, stop_sequences=["Eagle"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Eagle")
    assert answer.content[0].text == TEXT[len(PROMPT_TEXT) : TEXT.index("Eagle")]


async def test_messages_become_a_chat(url: str) -> None:
    script = Script(TOKENS)
    blocks: Any = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "c"}]
    turns: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": blocks},
    ]
    async with anthropic_client(url, script, template=CHATML) as client:
        asked = MESSAGE | {"max_tokens": 1, "system": "s"}
        await client.messages.create(**asked | {"messages": turns}, metadata={"user_id": "u"})
        await client.messages.create(**asked | {"messages": turns[:2]})
        counted = await client.messages.count_tokens(model="demo", system="s", messages=turns)
        num_tokens = counted.input_tokens
    texts = [TOKENIZER.decode(call.request.prompt_ids) for call in script.calls]
    assert texts == ["<system>s\n<user>a\n<assistant>x\n<user>b\nc\n<assistant>", "<system>s\n<user>a\n<assistant>x"]
    assert num_tokens == len(script.calls[0].request.prompt_ids)


async def test_errors_of_messages_have_anthropics_form(url: str) -> None:
    import anthropic

    async with anthropic_client(url, keys=ApiKeys(plain_keys(["one"], "test"))) as client:
        with pytest.raises(anthropic.AuthenticationError, match="no known API key"):
            await client.with_options(api_key="two").messages.create(**MESSAGE)
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.create(**MESSAGE | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match=r"budget_tokens is 1024, and max_tokens is") as raised:
            await client.messages.create(**MESSAGE, thinking={"type": "enabled", "budget_tokens": 1024})
        with pytest.raises(anthropic.BadRequestError, match="the type 'adaptive' has no budget_tokens"):
            await client.messages.create(**MESSAGE, thinking={"type": "adaptive", "budget_tokens": 4})
        reason = f"thinking.budget_tokens is 1024, and max_tokens is {MESSAGE['max_tokens']}; it must be less"
        assert raised.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": reason}}
        image: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type is 'image'"):
            await client.messages.create(**MESSAGE | {"messages": [image]})
        async with httpx.AsyncClient(base_url=str(client.base_url)) as plain:
            answer = await plain.get("/v1/messages", headers={"x-api-key": "one"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_tokens_of_texts_and_chats_are_returned(url: str) -> None:
    async with worker(url, Script(TOKENS)), http_router(url, template=CHATML) as base:

        async def tokens(**asked: Any) -> Any:
            return (await post(base, "/tokenize", asked)).json()

        whole = await tokens(prompt=TEXT, model="demo", return_token_strs=True)
        names = [TOKENIZER.tokenizer.id_to_token(token) for token in TOKENS]
        count = len(TOKENS)
        assert whole == {"count": count, "max_model_len": 2048, "tokens": list(TOKENS), "token_strs": names}
        assert (await tokens(prompt=TEXT, add_special_tokens=False))["tokens"] == list(TOKENS[1:])
        chat = (await tokens(messages=[{"role": "user", "content": "a"}]))["tokens"]
        assert TOKENIZER.decode(chat) == "<user>a\n<assistant>"
        last = await tokens(messages=[{"role": "user", "content": "a"}], add_generation_prompt=False)
        assert TOKENIZER.decode(last["tokens"]) == "<user>a\n"
        back = await post(base, "/detokenize", {"tokens": list(TOKENS)})
        assert back.json() == {"prompt": f"<|bos|>{TEXT}"}
        for path, bad, part in (
            ("/tokenize", {}, "either prompt or messages"),
            ("/tokenize", {"prompt": "return " * 90000}, "exceeds the context"),
            ("/detokenize", {"tokens": [4096]}, "outside the vocabulary"),
            ("/detokenize", {"tokens": ["a"]}, "valid integer"),
        ):
            answer = await post(base, path, bad)
            assert answer.status_code == 400
            assert part in answer.json()["error"]["message"]


HERMES = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{# <tool_call> </think> #}"
SHOWN = "{{ [messages, tools] | tojson }}{{ bos_token }}{# <tool_call> #}"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL_TEXT = '<think>Hm</think>Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def calling(text: str = CALL_TEXT) -> Script:
    """Return a verifier that answers PROMPT_TEXT with a text. A stop string ends it, because its own end is "length"."""
    return Script((*PROMPT, *TOKENIZER.encode_rendered(f"{text}END and more")))


FUNCTION: dict[str, Any] = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
ANTHROPIC_TOOL: dict[str, Any] = {"name": "add", "input_schema": PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_reasoning_text_and_calls(url: str, stream: bool) -> None:
    asked = ASKED | {"tools": [FUNCTION], "max_output_tokens": 999, "extra_body": {"stop": "END"}}
    async with served(url, calling(), template=HERMES) as client:
        answer = await client.responses.create(**asked, stream=stream)
        answer = [event async for event in answer] if stream else answer
    if stream:
        deltas = {event.type: "" for event in answer if event.type.endswith(".delta")}
        for event in answer:
            if event.type in deltas:
                deltas[event.type] += event.delta
        assert list(deltas.values()) == ["Hm", "Well.", '{"a": 1}']
        assert [event.sequence_number for event in answer] == list(range(len(answer)))
        answer = answer[-1].response
    reasoning, message, call = answer.output
    assert [part.text for part in reasoning.content] == ["Hm"]
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert message.content[0].text == "Well."
    assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_thinking_text_and_calls(url: str, stream: bool) -> None:
    asked = MESSAGE | {"tools": [ANTHROPIC_TOOL], "max_tokens": 999, "stop_sequences": ["END"]}
    async with anthropic_client(url, calling(), template=HERMES) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    thinking, text, call = answer.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("Hm", "Well.", "add", {"a": 1})


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 1100])
async def test_arguments_that_are_no_json_stay_text(url: str, arguments: str) -> None:
    script = calling(f'<tool_call>{{"name": "add", "arguments": {arguments}')
    asked = MESSAGE | {"tools": [ANTHROPIC_TOOL], "max_tokens": 2000, "stop_sequences": ["END"]}
    async with anthropic_client(url, script, template=HERMES) as client:
        answer = await client.messages.create(**asked)
    assert answer.content[-1].input == {"arguments": arguments.strip()}


async def test_tools_and_their_results_become_those_of_a_chat(url: str) -> None:
    """Both APIs reach the template with the same messages and tools."""
    script = Script(TOKENS * 40)
    called: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [{"id": "c", "type": "function", "function": None}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    called[1]["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"a": 1}'}
    blocks: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "c", "name": "add"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
    ]
    blocks[1]["content"][1]["input"] = {"a": 1}
    items: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    async with worker(url, script), http_router(url, template=SHOWN) as base:
        shared = {"model": "demo", "max_tokens": 1}
        bodies = {
            "/v1/chat/completions": shared | {"messages": called, "tools": [tool]},
            "/v1/messages": shared | {"messages": blocks, "tools": [ANTHROPIC_TOOL]},
            "/v1/responses": {"model": "demo", "max_output_tokens": 1, "input": items, "tools": [FUNCTION]},
        }
        for path, asked in bodies.items():
            answer = await post(base, path, asked)
            assert answer.status_code == 200, answer.text
    prompts = [TOKENIZER.decode(call.request.prompt_ids) for call in script.calls]
    assert len(set(prompts)) == 1
    assert '"tool_call_id": "c"' in prompts[0]


ORDERED = '<think>Hm</think>First.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\nThen.'


@pytest.mark.parametrize("text", [ORDERED, ORDERED[:60], ORDERED[:80]])
async def test_whole_and_streamed_messages_have_one_order(url: str, text: str) -> None:
    """Also a call that ends early, whose arguments are no object."""
    asked = MESSAGE | {"tools": [ANTHROPIC_TOOL], "max_tokens": 999, "stop_sequences": ["END"]}
    async with anthropic_client(url, calling(text), template=HERMES) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            whole, streamed = whole, await events.get_final_message()
    kinds = (
        ["thinking", "text", "tool_use", "text"]
        if text == ORDERED
        else ["thinking", "text", "tool_use"][: len(whole.content)]
    )
    assert [block.type for block in whole.content] == [block.type for block in streamed.content] == kinds
    texts = [[getattr(block, block.type) for block in one.content if block.type != "tool_use"] for one in (whole, streamed)]
    assert texts[0] == texts[1] == ["Hm", "First.", "\n\nThen."][: len(texts[0])]
    assert "".join(texts[0][1:]).find("<") < 0
    assert whole.content[0].signature
    assert streamed.content[0].signature


async def test_a_response_keeps_the_order_of_text_and_calls(url: str) -> None:
    asked = ASKED | {"tools": [FUNCTION], "max_output_tokens": 999, "extra_body": {"stop": "END"}}
    async with served(url, calling(ORDERED), template=HERMES) as client:
        answer = await client.responses.create(**asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "message"]


THINKING = "{{ bos_token }}{{ enable_thinking }}{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
THINKING += "{# <tool_call> </think> #}"


async def test_thinking_reaches_the_template_and_the_verifier(url: str) -> None:
    script, marked = Script(TOKENS * 40), load_tokenizer(DEMO).tokenizer
    marked.add_tokens(["<think>", "</think>"])
    model = replace(MODEL, vocab_size=marked.get_vocab_size())
    past: Any = [
        {"type": "thinking", "thinking": "Earlier", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "b"},
    ]
    turns: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": past}, {"role": "user", "content": "c"}]
    kinds: list[Any] = [{"type": "enabled", "budget_tokens": 2}, {"type": "adaptive"}, {"type": "disabled"}]
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Earlier"}]}
    items: Any = [turns[0], thought, {"role": "assistant", "content": "b"}, turns[2]]
    tokenizer = Tokenizer(marked)
    async with worker(url, script, model=model), http_router(url, template=THINKING, tokenizer=tokenizer) as base:
        for kind in kinds:
            asked = {"model": "demo", "messages": turns, "thinking": kind}
            assert (await post(base, "/v1/messages", asked | {"max_tokens": 3})).status_code == 200
            assert (await post(base, "/v1/messages/count_tokens", asked)).status_code == 200
        chat = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        assert (await post(base, "/v1/chat/completions", chat | {"thinking_token_budget": 0})).status_code == 200
        asked = {"model": "demo", "input": items, "thinking_token_budget": -1}
        assert (await post(base, "/v1/responses", asked | {"max_output_tokens": 3})).status_code == 200
        answer = await post(base, "/v1/chat/completions", chat | {"thinking_token_budget": -2})
        assert answer.status_code == 400
    prompts = [TOKENIZER.decode(call.request.prompt_ids) for call in script.calls]
    assert [prompt[: prompt.find("e") + 1] for prompt in prompts[:3]] == ["True", "True", "False"]
    assert all("Earlierb" in prompt for prompt in (*prompts[:3], prompts[4]))
    budgets = [call.request.sampling.reasoning_budget for call in script.calls]
    assert [budget and budget.num_tokens for budget in budgets] == [2, None, None, 0, None]
    assert budgets[0] is not None
    assert marked.decode(budgets[0].end_ids) == "</think>"
