"""`eyas.client`: vLLM's outputs from a router, retries that resume exactly, cancellation, keys."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from grpc import StatusCode

from eyas import RequestOutput, SamplingParams
from eyas.client import Client, RetryPolicy
from eyas.errors import EyasError, InvalidRequest, Overloaded, RequestFailed, TimedOut, Unavailable
from eyas.services.local.cluster import free_port
from tests.support.services.scripted_verifier import (
    MODEL,
    PROMPT,
    PROMPT_TEXT,
    REST,
    TEXT,
    TOKENS,
    Script,
    router,
    until,
    worker,
)

GREEDY = SamplingParams(max_tokens=len(REST), temperature=0)
QUICK = RetryPolicy(initial_backoff_s=0.01, budget_s=20.0)
ANSWER = TEXT.removeprefix(PROMPT_TEXT)


def joined(outputs: list[RequestOutput]) -> tuple[list[int], str]:
    """Tokens and text of streamed outputs of one completion."""
    parts = [one for output in outputs for one in output.outputs]
    return [token for one in parts for token in one.token_ids], "".join(one.text for one in parts)


async def test_the_client_returns_the_outputs_of_vllm(url: str) -> None:
    asked = replace(GREEDY, logprobs=1)

    def synchronous(address: str) -> list[RequestOutput]:
        with Client(address) as client:
            assert [model.name for model in client.models()] == ["demo"]
            assert joined(list(client.stream(PROMPT_TEXT, asked))) == (list(REST), ANSWER)
            outputs = client.generate([PROMPT_TEXT, list(PROMPT)], asked, draft=False)
            return outputs + client.generate([PROMPT_TEXT, {"prompt_token_ids": PROMPT}], asked)

    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        outputs = await asyncio.to_thread(synchronous, address)
        assert [call.drafter for call in script.calls] == ["", "none", "none", "", ""]
    for output in outputs:
        (one,) = output.outputs
        assert (one.token_ids, one.text, one.finish_reason) == (list(REST), ANSWER, "length")
        assert one.cumulative_logprob == pytest.approx(-0.5 * len(REST))
        assert one.stats.num_accepted > 0
        assert output.finished
    assert outputs[1].prompt_token_ids == list(PROMPT)


async def test_a_call_without_parameters_uses_the_model_defaults(url: str) -> None:
    defaults = {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "max_tokens": 7}
    model = replace(MODEL, sampling_defaults=tuple(defaults.items()))

    def synchronous(address: str) -> None:
        with Client(address) as client:
            client.generate(PROMPT_TEXT)
            list(client.stream(PROMPT_TEXT))
            client.generate([PROMPT_TEXT, PROMPT_TEXT], SamplingParams(seed=1))
            list(client.stream(PROMPT_TEXT, SamplingParams(seed=1)))

    script = Script(TOKENS)
    async with worker(url, script, model=model), router(url) as address:
        await asyncio.to_thread(synchronous, address)
    left_out, stated = SamplingParams(**defaults), SamplingParams()  # type: ignore[arg-type]
    received = [replace(call.request.sampling, seed=None) for call in script.calls]
    assert received == [left_out, left_out, stated, stated, stated]


async def test_outputs_name_the_stop_string(url: str) -> None:
    stops = [replace(GREEDY, stop=(ANSWER[3:6],)), GREEDY]
    async with worker(url, Script(TOKENS)), router(url) as address:
        with Client(address) as client:
            found = await asyncio.to_thread(client.generate, [PROMPT_TEXT] * len(stops), stops)
    outputs = [output.outputs[0] for output in found]
    assert [(one.finish_reason, one.stop_reason) for one in outputs] == [("stop", ANSWER[3:6]), ("length", None)]


async def test_an_answer_continues_on_another_router(url: str) -> None:
    async with worker(url, Script(TOKENS)), router(url) as second, AsyncExitStack() as stack:
        first = await stack.enter_async_context(router(url))
        with Client(f"{first},{second}", retry=QUICK) as client:
            stream = client.stream(PROMPT_TEXT, replace(GREEDY, stop=("nowhere",)))
            outputs = [await asyncio.to_thread(next, stream) for _ in range(2)]
            await stack.aclose()
            outputs += await asyncio.to_thread(list, stream)
    assert joined(outputs) == (list(REST), ANSWER)
    assert outputs[-1].outputs[0].stats.num_emitted == len(REST)


async def test_a_retried_answer_that_differs_is_an_error(url: str) -> None:
    """Without a router between: verifiers of different targets, which no router would mix."""
    other = [*TOKENS[: len(PROMPT)], *(token + 1 for token in REST)]
    async with worker(url, Script(TOKENS, fails_after=2)) as first, worker(url, Script(other)) as second:
        with (
            Client(f"{first},{second}", retry=QUICK) as client,
            pytest.raises(RequestFailed, match="the answer changed between two attempts"),
        ):
            await asyncio.to_thread(client.generate, [PROMPT], GREEDY)


@pytest.mark.parametrize(
    ("script", "error", "num_calls"),
    [
        (Script(TOKENS, fails_after=0), Unavailable, 3),
        (Script(TOKENS, breaks_after=1), RequestFailed, 1),
        (Script(TOKENS, fails_after=0, status=StatusCode.RESOURCE_EXHAUSTED, pushback=60_000), Overloaded, 1),
    ],
    ids=["stays", "breaks", "a wait beyond the budget"],
)
async def test_a_failure_that_stays_is_raised(url: str, script: Script, error: type[EyasError], num_calls: int) -> None:
    retry = replace(QUICK, max_attempts=3)
    async with worker(url, script) as address:
        with Client(address, retry=retry) as client, pytest.raises(error):
            await asyncio.to_thread(list, client.stream(PROMPT, GREEDY))
    assert len(script.calls) == num_calls


@pytest.mark.parametrize(
    "script",
    [Script(TOKENS, stalls_after=1), Script(TOKENS, fails_after=0, status=StatusCode.RESOURCE_EXHAUSTED, pushback=200_000)],
)
def test_a_request_ends_with_its_time(url: str, script: Script) -> None:
    """Also where the router asks to wait beyond it."""

    async def reaches_the_router(timeout_s: float) -> bool:
        retry = replace(QUICK, budget_s=300.0)
        ends = pytest.raises(TimedOut, match=r"^the request was not done in its time")
        async with worker(url, script) as address:
            with Client(address, retry=retry) as client, ends:
                await asyncio.to_thread(list, client.stream(PROMPT, GREEDY, timeout_s=timeout_s))
        return len(script.calls) == 1

    assert any(asyncio.run(reaches_the_router(timeout_s)) for timeout_s in (0.3, 3.0, 30.0))


async def test_a_refused_request_is_not_retried(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        with Client(address) as client, pytest.raises(InvalidRequest, match="the prompt is empty"):
            await asyncio.to_thread(list, client.stream("", GREEDY))
    assert script.calls == []


async def test_leaving_a_stream_cancels_the_request(url: str) -> None:
    def leave(address: str) -> None:
        with Client(address) as client:
            for output in client.stream(PROMPT, GREEDY):
                assert not output.finished
                break

    script = Script(TOKENS, stalls_after=1)
    async with worker(url, script) as address:
        await asyncio.to_thread(leave, address)
        await until(lambda: script.num_cancelled == 1)


def test_nothing_there_is_unavailable() -> None:
    with Client(f"127.0.0.1:{free_port()}", retry=RetryPolicy(max_attempts=1)) as client, pytest.raises(Unavailable):
        next(client.stream(PROMPT, GREEDY))


@pytest.mark.parametrize("prompt", [[5.5], ["x"], {"prompt_token_ids": [5, None]}, {"text": "x"}])
def test_a_prompt_that_is_none_is_refused_before_it_is_sent(prompt: object) -> None:
    with Client(f"127.0.0.1:{free_port()}") as client, pytest.raises(InvalidRequest, match=r"token id|is no prompt"):
        next(client.stream(prompt))  # type: ignore[arg-type]
