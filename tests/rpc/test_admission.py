"""What a caller may hold before its request is known to be good: nothing without a key, and a bounded part with one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import LimitsConfig, ServerConfig
from eyas.errors import ConfigError, InvalidRequest
from eyas.rpc.admission import MAX_OPEN_CALLS_PER_ADDRESS, Admission, MemoryBudget, address_of, check_num_fields
from eyas.rpc.convert import generate_call_to_proto
from eyas.rpc.server import RpcServer
from eyas.services.router.auth.keys import ApiKeys, plain_keys
from eyas.v1.generation_pb2 import GenerateRequest
from eyas.v1.generation_pb2_grpc import GenerationStub, add_GenerationServicer_to_server
from eyas.v1.types_pb2 import LogitBias, SamplingParams, TokenIds
from tests.support.services.scripted_verifier import (
    CALL,
    REST,
    TOKENS,
    Script,
    ScriptedVerifier,
    failure,
    request_with,
    router,
    until,
    worker,
)

GENERATE = "/eyas.v1.Generation/Generate"
LIMITS = LimitsConfig(max_request_bytes=2**20, max_pending_bytes=2**21, max_header_bytes=4096)
EMPTY = Script(TOKENS)


def key(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}"),)


@asynccontextmanager
async def guarded(
    limits: LimitsConfig = LIMITS, script: Script = EMPTY
) -> AsyncIterator[tuple[grpc.aio.Channel, MemoryBudget]]:
    """Serve a scripted verifier to the keys one and two."""
    admission = Admission(limits, has_keys=True)
    keys = ApiKeys(plain_keys(("one", "two"), "test"))
    server = RpcServer(ServerConfig(reflection=True), check_metadata=keys.access, admission=admission)
    add_GenerationServicer_to_server(ScriptedVerifier(script), server.aio)
    address = await server.start([])
    try:
        unlimited = (("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 2**20))
        async with grpc.aio.insecure_channel(address, unlimited) as channel:
            yield channel, admission.memory
    finally:
        await server.stop(0)


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call ends."""
    return await call.code(), await call.details()


def silent(channel: grpc.aio.Channel, metadata: Any = None, method: str = GENERATE) -> Any:
    """Open a call, and send no message."""
    return channel.stream_stream(method)(metadata=metadata, timeout=20)


def call(channel: grpc.aio.Channel, message: GenerateRequest, name: str = "one") -> Any:
    return GenerationStub(channel).Generate(message, metadata=key(name), timeout=20)


async def test_a_call_without_a_key_ends_before_its_message() -> None:
    async with guarded() as (channel, _):
        for metadata in (None, key("three")):
            code, details = await status(silent(channel, metadata))
            assert (code, details[:16]) == (grpc.StatusCode.UNAUTHENTICATED, "no known API key")
        code, _ = await status(silent(channel, method="/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_a_known_key_gets_its_stream() -> None:
    async with guarded() as (channel, memory):
        chunks = [chunk async for chunk in call(channel, generate_call_to_proto(CALL))]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(REST)
        await until(lambda: not memory.num_held)


async def test_a_message_that_does_not_arrive_ends_its_call() -> None:
    async with guarded(limits=replace(LIMITS, body_timeout_s=0.1)) as (channel, _):
        code, details = await status(silent(channel, key("one")))
        assert (code, "the request message did not arrive within" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


async def test_a_call_that_ends_without_a_message_is_invalid() -> None:
    async with guarded() as (channel, _):
        ended = silent(channel, key("one"))
        await ended.done_writing()
        assert (await status(ended))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_silent_calls_of_one_key_leave_room_for_another() -> None:
    async with guarded(limits=replace(LIMITS, max_pending_bytes=2**23, header_timeout_s=1.0)) as (channel, _):
        calls = [silent(channel, key("one")) for _ in range(20)]
        probes = [silent(channel, method="/grpc.health.v1.Health/Check") for _ in range(20)]
        assert [chunk async for chunk in call(channel, generate_call_to_proto(CALL), "two")]
        for each in (*calls, *probes):
            each.cancel()


def test_made_up_keys_do_not_make_other_callers() -> None:
    keyed, peer = Admission(LIMITS, has_keys=True), "ipv4:10.0.0.1:5000"
    for spelling in ("Bearer one", "bearer   one ", "BEARER one"):
        assert keyed.callers({"authorization": spelling}, peer) == ("one", "10.0.0.1")
    assert keyed.callers({"x-api-key": "one"}, peer) == ("one", "10.0.0.1")
    assert keyed.callers({"authorization": "Bearer one"}, peer, is_open=True) == ("10.0.0.1",)
    assert Admission(LIMITS).callers({"authorization": "Bearer one"}, peer) == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:5::6]:5000", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:7::8", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix:/run/eyas", "unix:/run/eyas"),
        ("", ""),
    ],
)
def test_a_peer_is_known_by_its_address_or_network(peer: str, address: str) -> None:
    assert address_of(peer) == address


async def test_one_key_cannot_hold_the_whole_memory_budget() -> None:
    script = Script(TOKENS, gate=asyncio.Event())
    async with guarded(script=script, limits=replace(LIMITS, max_pending_bytes=2**23)) as (channel, memory):
        message = generate_call_to_proto(CALL)
        message.session_id = "s" * 900_000
        calls = [call(channel, message, "one") for _ in range(4)]
        await until(lambda: len(script.calls) == 4)
        code, details = await status(call(channel, message, "one"))
        assert (code, "this key or address holds its share" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        other = call(channel, message, "two")
        await until(lambda: len(script.calls) == 5)
        assert script.gate
        script.gate.set()
        for each in (*calls, other):
            assert [chunk async for chunk in each]
        await until(lambda: not memory.num_held)


async def test_half_sent_messages_make_room_for_calls_that_wait() -> None:
    """Keys of one address hold their shares. One more call of it waits for a short time only."""
    limits = replace(LIMITS, max_pending_bytes=2**23, body_timeout_s=60.0, header_timeout_s=1.0)
    async with guarded(limits=limits) as (channel, _):
        calls = [silent(channel, key(name)) for name in ("one", "two") for _ in range(8)]
        while not calls[0].done():  # the silent ones may not all have come before the first of these
            assert [chunk async for chunk in call(channel, generate_call_to_proto(CALL), "two")]
        assert "did not arrive within" in (await status(calls[0]))[1]
        for each in calls:
            each.cancel()


async def test_health_checks_hold_little_memory() -> None:
    async with guarded() as (channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        code, details = await status(stub.Watch(health_pb2.HealthCheckRequest(service="s" * 2000)))
        assert (code, details[:24]) == (grpc.StatusCode.INVALID_ARGUMENT, "a health check of 2003 b")
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_OPEN_CALLS_PER_ADDRESS)]
        for watch in watches:
            await watch.read()
        code, details = await status(stub.Watch(health_pb2.HealthCheckRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, details
        assert [chunk async for chunk in call(channel, generate_call_to_proto(CALL))]
        for watch in watches:
            watch.cancel()

        async def is_open() -> bool:
            return (await stub.Check(health_pb2.HealthCheckRequest()).code()) is grpc.StatusCode.OK

        await until(is_open)


async def test_an_address_has_a_maximum_of_connections() -> None:
    """The latest ones are closed; the calls of the others go on."""
    most = 8
    limits = replace(LIMITS, max_connections_per_peer=most, header_timeout_s=120.0)
    server = RpcServer(ServerConfig(), admission=Admission(limits))
    add_GenerationServicer_to_server(ScriptedVerifier(EMPTY), server.aio)
    address = await server.start([])
    async with grpc.aio.insecure_channel(address) as channel, AsyncExitStack() as writers:
        assert [chunk async for chunk in call(channel, generate_call_to_proto(CALL))]
        reads = []
        for _ in range(3 * most):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writers.callback(writer.close)
            reads.append(asyncio.create_task(reader.read()))
        await until(lambda: sum(read.done() for read in reads) == 2 * most + 1)
        assert [chunk async for chunk in call(channel, generate_call_to_proto(CALL))]
        assert sum(read.done() for read in reads) == 2 * most + 1
    await server.stop(0)
    await asyncio.gather(*reads, return_exceptions=True)


async def test_messages_and_metadata_have_a_maximum_size() -> None:
    async with guarded() as (channel, _):
        code, _ = await status(call(channel, GenerateRequest(text="a" * 2**20)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, _ = await status(silent(channel, (("name", "a" * 8192),)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, details = await status(call(channel, many_fields(40_000)))
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request has more than 32768 fields; send less at once",
        )


def many_fields(number: int) -> GenerateRequest:
    return GenerateRequest(sampling=SamplingParams(bad_token_ids=[TokenIds()] * number))


async def test_unfinished_requests_share_a_memory_budget() -> None:
    script = Script(TOKENS, gate=asyncio.Event())
    async with guarded(script=script) as (channel, memory):
        message = generate_call_to_proto(CALL)
        message.session_id = "s" * 900_000
        calls = [call(channel, message, name) for name in ("one", "two")]
        await until(lambda: len(script.calls) == 2)
        code, details = await status(call(channel, message))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limits.max_pending_bytes" in details
        assert script.gate
        script.gate.set()
        for each in calls:
            assert [chunk async for chunk in each]
        await until(lambda: not memory.num_held)
        assert [chunk async for chunk in call(channel, message)]
        await until(lambda: not memory.num_held)


def test_fields_are_counted_in_nested_messages() -> None:
    kind, message = GenerateRequest.DESCRIPTOR, many_fields(100)
    message.tokens.ids.extend(range(1000))  # packed: one field
    data = message.SerializeToString()
    num_fields = 1 + 1 + 100 + 1
    check_num_fields(data, kind, 1000, num_fields)
    with pytest.raises(InvalidRequest, match=f"more than {num_fields - 1} fields"):
        check_num_fields(data, kind, 1000, num_fields - 1)
    group = b"\xa3\x1f\xa4\x1f"  # field 500 begins and ends
    for beside in (
        group + data,
        data + b"\x12\x01\xff",
        data + GenerateRequest(sampling=SamplingParams()).SerializeToString(),
    ):
        with pytest.raises(InvalidRequest, match="more than 50 fields"):
            check_num_fields(beside, kind, 1000, 50)
    for end in range(0, len(data), 7):
        check_num_fields(data[:end] + b"\xff" * 20, kind, 1000, num_fields)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("stop", SamplingParams(stop=["s"] * 30_000)),
        ("stop", SamplingParams(stop=["s" * 2000])),
        ("stop_token_ids", SamplingParams(stop_token_ids=[5] * 30_000)),
        ("logit_bias", SamplingParams(logit_bias=[LogitBias(token_id=5)] * 10_000)),
        ("bad_words", SamplingParams(bad_words=["s"] * 30_000)),
        ("bad_token_ids", SamplingParams(bad_token_ids=[TokenIds(ids=[5])] * 10_000)),
    ],
    ids=["stops", "length", "stop_token_ids", "biases", "words", "bad_token_ids"],
)
async def test_large_parameters_are_rejected_by_name(url: str, name: str, sampling: SamplingParams) -> None:
    async with router(url) as address, grpc.aio.insecure_channel(address) as channel:
        code, details = await status(GenerationStub(channel).Generate(GenerateRequest(text="a", sampling=sampling)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{name} has ")


async def test_a_prompt_beyond_the_context_is_rejected_by_its_length(url: str) -> None:
    script = Script(TOKENS)
    async with worker(url, script), router(url) as address:
        code, details = await failure(address, request_with(prompt_ids=(2**31 - 1,) * 500_000))
        assert (code, script.calls) == (grpc.StatusCode.INVALID_ARGUMENT, [])
        assert details == "prompt of 500000 tokens exceeds the context length 2048; shorten it"
        code, details = await failure(address, request_with(session="s" * 257))
        assert details == "session_id has 257 characters; it may have 256"


def test_limits_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="max_pending_bytes is 5; it must be at least max_request_bytes 16777216"):
        LimitsConfig(max_pending_bytes=5)
    with pytest.raises(ConfigError, match="body_timeout_s"):
        LimitsConfig(body_timeout_s=0)


def test_a_request_that_has_ended_takes_no_more_memory() -> None:
    """A thread may still count what it makes for a request that was cancelled."""
    memory = MemoryBudget(LimitsConfig())
    with memory.reservation("a key") as take:
        take(1000)
        assert memory.num_held == 1000
    take(1000)
    assert memory.num_held == 0
