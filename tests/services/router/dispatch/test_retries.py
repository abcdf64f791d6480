"""Requests that go on when verifiers fail, return, come late or never come; every answer equals the plain one."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from eyas.config import RetryConfig
from eyas.rpc.messages import RETRY_KEY
from tests.support.services.scripted_verifier import (
    CALL,
    CHUNK_TOKENS,
    MODEL,
    PROMPT,
    REST,
    RETRY,
    TOKENS,
    Script,
    failure,
    router,
    send,
    tokens_of,
    until,
    worker,
)

PATIENT = RetryConfig(max_attempts=3, budget_s=20.0, initial_backoff_s=0.01, max_backoff_s=0.05)
ENDLESS = replace(PATIENT, max_attempts=10_000)  # however long a verifier that fails every call takes to stop
NUM_CHUNKS = -(-len(REST) // CHUNK_TOKENS)


class Flaky(Script):
    """A verifier that fails every call after some chunks, and takes the next one."""

    def fails_at(self, number: int) -> bool:
        return number == self.fails_after


@pytest.mark.parametrize("fails_after", [0, 2])
@pytest.mark.parametrize("cooldown_s", [0.0, 600.0])
async def test_a_request_returns_to_a_verifier_that_failed_it(url: str, fails_after: int, cooldown_s: float) -> None:
    first, second = Script(TOKENS, fails_after=fails_after), Script(TOKENS, fails_after=2, gate=asyncio.Event())
    retry = replace(PATIENT, cooldown_s=cooldown_s)
    async with worker(url, first, free_kv_tokens=99_999), worker(url, second), router(url, retry=retry) as address:
        answer = asyncio.create_task(send(address, CALL))
        await until(lambda: bool(second.calls))
        first.fails_after = None
        assert second.gate is not None
        second.gate.set()
        assert tokens_of(await answer) == REST
    assert len(first.calls) == 2
    assert first.calls[1].request.prompt_ids == TOKENS[: len(PROMPT) + (fails_after + 2) * CHUNK_TOKENS]


@pytest.mark.parametrize("num_chunks", [0, 2])
async def test_a_request_waits_for_a_verifier_to_come_back(url: str, num_chunks: int) -> None:
    async with router(url, retry=ENDLESS) as address, AsyncExitStack() as dying:
        script = Script(TOKENS, fails_after=num_chunks)
        await dying.enter_async_context(worker(url, script))
        answer = asyncio.create_task(send(address, CALL))
        await until(lambda: script.has_failed)
        await dying.aclose()
        await asyncio.sleep(0.2)
        assert not answer.done()
        async with worker(url, Script(TOKENS)):
            assert tokens_of(await answer) == REST


async def test_an_unknown_model_is_rejected_without_a_wait(url: str) -> None:
    async with router(url, retry=replace(PATIENT, budget_s=600.0)) as address:
        async with asyncio.timeout(20):
            assert (await failure(address, replace(CALL, model="other")))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_wait_without_a_verifier_ends_with_the_budget(url: str) -> None:
    async with router(url, retry=replace(RETRY, budget_s=0.3)) as address:
        started_at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="no verifier of model 'demo' is alive") as raised:
            await send(address, CALL)
        assert time.monotonic() - started_at >= 0.3
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (RETRY_KEY, "1000") in list(raised.value.trailing_metadata())


async def test_a_wait_without_a_verifier_ends_at_the_deadline(url: str) -> None:
    async with router(url, retry=ENDLESS, request_timeout_s=1.0) as address, AsyncExitStack() as dying:
        script = Script(TOKENS, fails_after=1)
        await dying.enter_async_context(worker(url, script))
        answer = asyncio.create_task(failure(address, CALL))
        await until(lambda: script.has_failed or answer.done())
        await dying.aclose()
        code, details = await answer
        assert (code, "not done within 1.0 s" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


async def test_failures_with_a_token_between_them_do_not_add_up(url: str) -> None:
    script = Flaky(TOKENS, fails_after=1)
    async with worker(url, script), router(url, retry=replace(PATIENT, max_attempts=2)) as address:
        assert tokens_of(await send(address, CALL)) == REST
    assert len(script.calls) == NUM_CHUNKS > 2


@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_failures_in_a_row_end_a_request(url: str, num_verifiers: int) -> None:
    scripts = [Script(TOKENS, fails_after=0) for _ in range(num_verifiers)]
    async with AsyncExitStack() as stack:
        for script in scripts:
            await stack.enter_async_context(worker(url, script))
        address = await stack.enter_async_context(router(url, retry=PATIENT))
        code, details = await failure(address, CALL)
    assert (code, "scripted failure" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    assert sum(len(script.calls) for script in scripts) == PATIENT.max_attempts


@pytest.mark.parametrize("breaks_after", [0, 2])
async def test_a_failed_engine_step_is_retried_and_not_streamed(url: str, breaks_after: int) -> None:
    broken, whole = Script(TOKENS, breaks_after=breaks_after), Script(TOKENS)
    async with worker(url, broken, free_kv_tokens=99_999), worker(url, whole), router(url) as address:
        chunks = await send(address, CALL)
    assert (len(broken.calls), len(whole.calls)) == (1, 1)
    assert tokens_of(chunks) == REST
    assert {chunk.chunk.finish_reason for chunk in chunks} == {None, "length"}


async def test_a_second_failed_engine_step_ends_the_request(url: str) -> None:
    scripts = [Script(TOKENS, breaks_after=0) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for script in scripts:
            await stack.enter_async_context(worker(url, script))
        *_, last = await send(await stack.enter_async_context(router(url)), CALL)
    assert (last.chunk.finish_reason, last.chunk.message) == ("error", "scripted step failure")
    assert sorted(len(script.calls) for script in scripts) == [0, 1, 1]


async def test_a_request_that_has_begun_waits_for_a_full_verifier(url: str) -> None:
    dying, full = Script(TOKENS, fails_after=1), Script(TOKENS, fails_after=0, pushback=20)
    full.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with worker(url, dying, free_kv_tokens=99_999), worker(url, full), router(url, retry=PATIENT) as address:
        answer = asyncio.create_task(send(address, CALL))
        await until(lambda: len(full.calls) > PATIENT.max_attempts)
        full.fails_after = None
        assert tokens_of(await answer) == REST


async def test_a_request_is_never_continued_by_another_target(url: str) -> None:
    dying, other = Script(TOKENS, fails_after=1), Script(TOKENS)
    other_model = replace(MODEL, fingerprint="another target")
    async with worker(url, dying, free_kv_tokens=99_999), worker(url, other, model=other_model), router(url) as address:
        code, _ = await failure(address, CALL)
    assert (code, other.calls) == (grpc.StatusCode.UNAVAILABLE, [])
