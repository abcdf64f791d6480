"""Request parameters that the router handles: n, bad words, and the limits of a request that moves."""

import json
from dataclasses import replace
from typing import Any

import grpc

from eyas.api.request import SamplingParams
from eyas.text.tokenizer import load_tokenizer
from tests.services.router.test_router_cli import eyas
from tests.support.services.scripted_verifier import (
    CALL,
    DEMO,
    PROMPT,
    PROMPT_TEXT,
    REST,
    TOKENS,
    Script,
    call_with,
    failure,
    router,
    send,
    tokens_of,
    worker,
)

PARAMETERS: dict[str, Any] = {
    "temperature": 0.5, "min_p": 0.1, "logit_bias": ((5, 2.0),), "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logprobs": 2, "ignore_eos": True, "bad_token_ids": ((7, 8),),
}  # fmt: skip


async def test_completions_run_side_by_side_at_one_verifier(url: str) -> None:
    scripts = [Script(TOKENS), Script(TOKENS)]
    async with worker(url, scripts[0]), worker(url, scripts[1]), router(url) as address:
        chunks = await send(address, call_with(n=3, seed=11, temperature=1.0, prompt_logprobs=0))
    splits = SamplingParams(n=3, seed=11).completions()
    for index in range(3):
        part = [chunk for chunk in chunks if chunk.chunk.index == index]
        assert tokens_of(part) == REST
        assert [chunk.seed for chunk in part] == [splits[index].seed] + [None] * (len(part) - 1)
        assert [chunk.totals is not None for chunk in part] == [False] * (len(part) - 1) + [True]
    calls = next(script.calls for script in scripts if script.calls)
    assert len(calls) == 3, "all completions run where the prompt is cached"
    assert {call.request.sampling.n for call in calls} == {1}
    assert sorted(str(call.request.sampling.prompt_logprobs) for call in calls) == ["0", "None", "None"]


async def test_a_stop_string_ends_one_choice_a_lost_verifier_all(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        chunks = await send(address, call_with(n=2, temperature=1.0, stop=("Eagle",)))
        assert [chunk.chunk.finish_reason for chunk in chunks if chunk.totals] == ["stop", "stop"]
        script.fails_after, script.status = 2, grpc.StatusCode.INVALID_ARGUMENT
        assert await failure(address, call_with(n=2, temperature=1.0)) == (script.status, "scripted failure")


async def test_the_verifier_gets_the_parameters_with_words_as_tokens(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        await send(address, call_with(**PARAMETERS, bad_words=("return",), stop=("nowhere",)))
    sampling = script.calls[0].request.sampling
    words = load_tokenizer(DEMO).bad_token_ids(["return"])
    assert replace(sampling, seed=None) == replace(
        CALL.request.sampling, **(PARAMETERS | {"bad_token_ids": ((7, 8), *words)}), stop=(), seed=None
    )
    assert load_tokenizer(DEMO).decode(words[-1]) == " return"


async def test_a_moved_request_resends_its_emitted_tokens(url: str) -> None:
    scripts = [Script(TOKENS, fails_after=2), Script(TOKENS, fails_after=2), Script(TOKENS)]
    async with worker(url, scripts[0]), worker(url, scripts[1]), worker(url, scripts[2]), router(url) as address:
        chunks = await send(address, call_with(**PARAMETERS, min_tokens=10, prompt_logprobs=1))
    assert tokens_of(chunks) == REST
    for call in (call for script in scripts for call in script.calls):
        done = len(call.request.prompt_ids) - len(PROMPT)
        assert call.request.num_emitted == done
        assert call.request.sampling.min_tokens == max(10 - done, 0)
        assert call.request.sampling.max_tokens == len(REST) - done
        assert call.request.sampling.prompt_logprobs == (None if done else 1)


async def test_the_command_passes_its_options_on(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        options = (
            "--max-tokens", "7", "-n", "2", "--min-p", "0.1", "--min-tokens", "3", "--ignore-eos", "--logprobs", "2",
            "--repetition-penalty", "1.1", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5",
            "--logit-bias", "5=2", "--logit-bias", "9=-1.5", "--bad-word", "return", "--seed", "4",
        )  # fmt: skip
        outcome = await eyas("generate", PROMPT_TEXT, "--address", address, *options, "--json")
        lines = list(map(json.loads, outcome.out.splitlines()))
        screen = await eyas("generate", PROMPT_TEXT, "--address", address, "--max-tokens", "7", "-n", "2")
        wrong = await eyas("generate", PROMPT_TEXT, "--address", address, "--logit-bias", "five")
        lost = await eyas("generate", PROMPT_TEXT, "--address", address, "--logprobs", "2")
    sampling = script.calls[0].request.sampling
    assert (sampling.min_p, sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (0.1, 3, True, 2)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.5, -0.5)
    assert sampling.logit_bias == ((5, 2.0), (9, -1.5))
    assert len(sampling.bad_token_ids) == 2
    assert {line["index"] for line in lines if "finish_reason" in line} == {0, 1}
    assert screen.out.count(load_tokenizer(DEMO).decode(REST[:7])) == 2
    assert wrong.err == "error: INVALID_ARGUMENT: logit bias 'five' is not of the form TOKEN_ID=BIAS, such as 42=-5\n"
    assert lost.err == "error: INVALID_ARGUMENT: log-probabilities are shown as JSON only; add --json\n"
