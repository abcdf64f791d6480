"""The router over real sockets: text to tokens, tokens to a verifier, tokens to text."""

import asyncio
import math
import threading
from contextlib import AsyncExitStack
from dataclasses import replace

from tokenizers import Tokenizer as HuggingFaceTokenizer

from eyas.api.outputs import TextChunk
from eyas.rpc.channel import open_channel
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from eyas.v1.generation_pb2 import ListModelsRequest
from eyas.v1.generation_pb2_grpc import GenerationStub
from tests.support import strategies
from tests.support.services.scripted_verifier import (
    CALL,
    DEMO,
    MODEL,
    PROMPT,
    PROMPT_TEXT,
    REST,
    TEXT,
    TOKENS,
    Script,
    call_with,
    failure,
    request_with,
    router,
    send,
    tokens_of,
    until,
    worker,
)


def text_of(chunks: list[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def unchecked(**sampling: object) -> GenerateCall:
    """CALL with sampling parameters that only another client would send."""
    return request_with(sampling=strategies.unchecked(CALL.request.sampling, **sampling))


async def test_text_goes_in_and_text_with_totals_comes_out(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as address:
        chunks = await send(address, replace(request_with(prompt_ids=()), prompt_text=PROMPT_TEXT))
    assert PROMPT_TEXT + text_of(chunks) == TEXT
    assert tokens_of(chunks) == REST
    assert [chunk.seed is None for chunk in chunks] == [False] + [True] * (len(chunks) - 1)
    assert all(sum(chunk.text_lengths) == len(chunk.text) for chunk in chunks)
    totals = chunks[-1].totals
    assert totals is not None
    assert totals.stats is not None
    assert (totals.num_prompt_tokens, totals.num_output_tokens) == (len(PROMPT), len(REST))
    assert totals.num_cached_tokens == len(PROMPT) - 1
    assert totals.stats.num_emitted == len(REST)
    assert totals.stats.num_verify_steps == len(chunks)


async def test_a_stop_string_ends_the_text_and_the_verifier(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        chunks = await send(address, call_with(stop=("Eagle",)))
        await until(lambda: script.num_cancelled == 1)
    assert text_of(chunks) == TEXT[len(PROMPT_TEXT) : TEXT.index("Eagle")]
    assert chunks[-1].chunk.finish_reason == "stop"
    assert load_tokenizer(DEMO).decode(tokens_of(chunks)).endswith("Eagle")
    assert chunks[-1].totals is not None
    assert chunks[-1].totals.num_output_tokens == len(tokens_of(chunks))


BAD: list[tuple[GenerateCall, str, str]] = [
    (request_with(prompt_ids=()), "INVALID_ARGUMENT", "prompt is empty"),
    (replace(CALL, prompt_text=""), "INVALID_ARGUMENT", "prompt is empty"),
    (request_with(prompt_ids=(4096,)), "INVALID_ARGUMENT", "token id 4096, outside"),
    (request_with(prompt_ids=(-1,)), "INVALID_ARGUMENT", "token id -1, outside"),
    (call_with(max_tokens=2048), "INVALID_ARGUMENT", "exceed the context length 2048"),
    (unchecked(max_tokens=0), "INVALID_ARGUMENT", "max_tokens is 0"),
    (unchecked(temperature=math.nan), "INVALID_ARGUMENT", "temperature is nan"),
    (unchecked(stop=("",)), "INVALID_ARGUMENT", "empty string"),
    (call_with(stop_token_ids=(5000,)), "INVALID_ARGUMENT", "stop_token_ids holds token id 5000, outside"),
    (replace(CALL, model="other"), "NOT_FOUND", "'other' is not served here; known: demo"),
]


async def test_a_bad_request_is_rejected_at_the_router_with_a_reason(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        for call, status, message in BAD:
            code, details = await failure(address, call)
            assert (code.name, script.calls) == (status, []), message
            assert message in details


async def test_a_request_without_a_drafter_may_still_get_one_later(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        await send(address, CALL)
    assert [call.drafter for call in script.calls] == [""]


async def test_others_are_served_while_a_long_text_is_encoded(url: str) -> None:
    started, done = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def encode(self, text: str) -> tuple[int, ...]:
            started.set()
            assert done.wait(30)
            return PROMPT

    slow = Slow(HuggingFaceTokenizer.from_file(f"{DEMO}/tokenizer.json"))
    async with worker(url, Script(TOKENS)), router(url, tokenizer=slow) as address:
        long = asyncio.create_task(send(address, replace(CALL, prompt_text="long")))
        await until(started.is_set)
        assert tokens_of(await send(address, CALL)) == REST
        done.set()
        assert tokens_of(await long) == REST


async def test_a_request_goes_where_its_context_fits(url: str) -> None:
    short, long = Script(TOKENS), Script(TOKENS)
    model = replace(MODEL, max_model_len=len(TOKENS) - 1)
    async with worker(url, short, model=model, free_kv_tokens=99_999), worker(url, long), router(url) as address:
        assert tokens_of(await send(address, CALL)) == REST
        code, details = await failure(address, call_with(max_tokens=2048))
    assert (len(short.calls), len(long.calls)) == (0, 1)
    assert code.name == "INVALID_ARGUMENT"
    assert "exceed the context length 2048" in details


async def test_models_are_listed_while_a_verifier_serves_them(url: str) -> None:
    async def names(address: str) -> list[str]:
        async with open_channel(address) as channel:
            return [model.name for model in (await GenerationStub(channel).ListModels(ListModelsRequest())).models]

    async with router(url) as address:
        assert await names(address) == []
    async with worker(url, Script(TOKENS)), router(url) as address:
        assert await names(address) == ["demo"]


async def test_the_verifier_gets_the_full_request_a_drafter_and_a_seed(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), worker(url, Script(()), "draft") as drafter, router(url) as address:
        await send(address, call_with(stop=("never seen",), top_k=5))
        await send(address, replace(CALL, drafter=NO_DRAFTER))
    assert [call.drafter for call in script.calls] == [drafter, NO_DRAFTER]
    sampling = script.calls[0].request.sampling
    assert (sampling.top_k, sampling.stop) == (5, ())
    assert sampling.seed is not None
    assert {(call.request.id, call.request.prompt_ids, call.model) for call in script.calls} == {("r", PROMPT, "demo")}


async def test_a_drafter_that_its_verifier_does_not_know_is_left_out(url: str) -> None:
    script = Script(TOKENS, knows_drafters=False)
    async with worker(url, script), worker(url, Script(()), "draft") as drafter, router(url) as address:
        assert tokens_of(await send(address, CALL)) == REST
        await send(address, replace(CALL, drafter="10.0.0.1:1"))
    assert [call.drafter for call in script.calls] == [drafter, ""] * 2, "clients name no drafters"


async def test_the_requests_of_a_session_share_a_verifier(url: str) -> None:
    scripts = [Script(TOKENS) for _ in range(3)]
    call = request_with(session="s")
    async with AsyncExitStack() as stack:
        for script in scripts:
            await stack.enter_async_context(worker(url, script))
        address = await stack.enter_async_context(router(url))
        await send(address, call)
        for _ in range(3):
            await asyncio.gather(send(address, call), send(address, call))
    assert sorted(len(script.calls) for script in scripts) == [0, 0, 7]


async def test_requests_without_a_session_spread_over_the_verifiers(url: str) -> None:
    gate = asyncio.Event()
    one, other = Script(TOKENS, gate=gate), Script(TOKENS, gate=gate)
    async with worker(url, one), worker(url, other), router(url) as address:
        answers = [asyncio.create_task(send(address, CALL)) for _ in range(4)]
        await until(lambda: len(one.calls) + len(other.calls) == 4)
        gate.set()
        await asyncio.gather(*answers)
    assert (len(one.calls), len(other.calls)) == (2, 2)
