"""Verifiers that reject, fail, stall or are missing, and clients that disconnect."""

import asyncio
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import RegistryConfig, RetryConfig, ServerConfig
from eyas.errors import Unavailable, WorkerLost
from eyas.rpc.channel import open_channel
from eyas.rpc.messages import Load
from eyas.rpc.server import GENERATION_SERVICE, RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.local.cluster import free_port
from eyas.v1 import generation_pb2
from tests.support.services.scripted_verifier import (
    CALL,
    CHUNK_TOKENS,
    LEASE_S,
    MODEL,
    PROMPT,
    REST,
    TOKENS,
    Received,
    Script,
    failure,
    router,
    send,
    tokens_of,
    until,
    worker,
)

LIMITS_S = (1.0, 4.0, 16.0, 64.0)  # a busy machine needs longer to reach the verifier
ONE_ATTEMPT = RetryConfig(max_attempts=1)
SERVING = health_pb2.HealthCheckResponse.SERVING


async def is_serving(address: str, service: str = "") -> bool:
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return bool(answer.status == SERVING)


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_is_not_lost_to_a_message(turns: int) -> None:
    """A cancelled stream whose next message arrives in the same turn of the event loop must end, not go on unread."""

    class Upstream:
        def __init__(self) -> None:
            self.message = asyncio.get_running_loop().create_future()

        async def read(self) -> generation_pb2.GenerateChunk:
            chunk: generation_pb2.GenerateChunk = await self.message
            return chunk

    upstream = Upstream()

    async def consume() -> None:
        await Received().call().run(upstream, 30)  # type: ignore[arg-type]

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    upstream.message.set_result(generation_pb2.GenerateChunk())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert task.cancelled()


@pytest.mark.parametrize(
    ("deadline_s", "stall_timeout_s", "error"),
    [(0.02, 60.0, TimeoutError), (60.0, 0.02, Unavailable), (60.0, 60.0, WorkerLost)],
    ids=["deadline", "stall", "pool"],
)
async def test_a_call_that_ends_early_says_who_ended_it(
    deadline_s: float, stall_timeout_s: float, error: type[Exception]
) -> None:
    class Upstream:
        num_read = 0

        async def read(self) -> generation_pb2.GenerateChunk:
            self.num_read += 1
            if self.num_read > 1:
                await asyncio.Event().wait()
            return generation_pb2.GenerateChunk(token_ids=[1], is_draft_token=[False])

    received = Received()
    call = received.call(deadline_s)
    if error is WorkerLost:  # the pool ends the calls of a stuck verifier
        asyncio.get_running_loop().call_later(0.02, call.fail, WorkerLost("stuck"))
    with pytest.raises(error) as raised:
        await call.run(Upstream(), stall_timeout_s)  # type: ignore[arg-type]
    assert raised.type is error
    assert received.tokens == [1]


async def test_no_error_names_an_internal_address(url: str, caplog: pytest.LogCaptureFixture) -> None:
    dead = f"127.0.0.1:{free_port()}"
    announced = AnnouncedWorker("verifier", MODEL, lambda: Load(0, 0, 10_000))
    lease = WorkerRegistration(RpcServer(ServerConfig()), Registry(RegistryConfig(url, LEASE_S, 0.05)), announced)
    await lease.register(dead)
    try:
        async with router(url, retry=RetryConfig(budget_s=0.3)) as address:
            code, details = await failure(address, CALL)
    finally:
        await lease.deregister()
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the connection to the verifier failed")
    assert f"{dead}: the connection to the verifier failed: failed to connect to all addresses" in caplog.text


async def test_only_generation_is_not_serving_without_a_verifier(url: str) -> None:
    async with router(url) as address:

        async def is_generating() -> bool:
            return await is_serving(address, GENERATION_SERVICE)

        async def is_not_generating() -> bool:
            return not await is_generating()

        await until(partial(is_serving, address))
        assert not await is_serving(address, GENERATION_SERVICE)
        async with worker(url, Script(TOKENS)):
            await until(is_generating)
        await until(is_not_generating)
        assert await is_serving(address)


@pytest.mark.parametrize("status", ["UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
@pytest.mark.parametrize("fails_after", [0, 2])
async def test_a_lost_verifier_is_replaced_with_equal_output(url: str, status: str, fails_after: int) -> None:
    dying, living = Script(TOKENS, fails_after=fails_after, status=grpc.StatusCode[status]), Script(TOKENS)
    async with worker(url, dying, free_kv_tokens=99_999), worker(url, living), router(url) as address:
        chunks = await send(address, CALL)
    assert (len(dying.calls), len(living.calls)) == (1, 1)
    assert tokens_of(chunks) == REST
    assert chunks[-1].totals is not None
    assert chunks[-1].totals.num_output_tokens == len(REST)
    assert living.calls[0].request.prompt_ids == TOKENS[: len(PROMPT) + fails_after * CHUNK_TOKENS]
    assert living.calls[0].request.sampling.seed == dying.calls[0].request.sampling.seed


@pytest.mark.parametrize(("status", "num_calls"), [("INVALID_ARGUMENT", 1), ("INTERNAL", 2), ("UNAVAILABLE", 4)])
async def test_only_server_faults_are_retried_and_the_last_is_reported(url: str, status: str, num_calls: int) -> None:
    one, other = (Script(TOKENS, fails_after=0, status=grpc.StatusCode[status]) for _ in range(2))
    async with worker(url, one), worker(url, other), router(url) as address:
        code, details = await failure(address, CALL)
    assert (code.name, len(one.calls) + len(other.calls)) == (status, num_calls)
    assert bool(one.calls and other.calls) == (num_calls > 1)
    assert "scripted failure" in details


async def test_a_silent_verifier_is_dropped_and_its_calls_cancelled(url: str) -> None:
    script = Script(TOKENS, stalls_after=1)
    async with worker(url, script), router(url, stall_timeout_s=1.0, retry=ONE_ATTEMPT) as address:
        code, details = await failure(address, CALL)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "sent nothing for 1.0 s" in details
        await until(lambda: script.num_cancelled == 1)


async def test_the_stall_timeout_excludes_the_verifiers_queue(url: str) -> None:
    gate = asyncio.Event()
    script = Script(TOKENS, gate=gate)
    async with worker(url, script), router(url, stall_timeout_s=0.05, retry=ONE_ATTEMPT) as address:
        answer = asyncio.create_task(send(address, CALL))
        await until(lambda: bool(script.calls))
        await asyncio.sleep(0.3)
        assert not answer.done()
        script.stalls_after = 1
        gate.set()
        with pytest.raises(grpc.aio.AioRpcError, match=r"sent nothing for 0\.05 s"):
            await answer
    assert len(script.calls) == 1


@pytest.mark.parametrize("silent_after", [0, 1])
@pytest.mark.parametrize("limit", ["router", "client"])
def test_router_and_client_timeouts_cancel_at_the_verifier(url: str, limit: str, silent_after: int) -> None:
    async def reaches_the_verifier(limit_s: float) -> bool:
        script = Script(TOKENS, stalls_after=silent_after)
        router_limit_s, client_limit_s = (limit_s, 300.0) if limit == "router" else (300.0, limit_s)
        async with worker(url, script), router(url, request_timeout_s=router_limit_s) as address:
            code, details = await failure(address, CALL, client_limit_s)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert limit == "client" or f"not done within {limit_s} s" in details
            await until(lambda: script.num_cancelled == len(script.calls))
        return bool(script.calls)

    assert any(asyncio.run(reaches_the_verifier(limit_s)) for limit_s in LIMITS_S)
