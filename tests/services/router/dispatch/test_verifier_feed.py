"""Feeds: chunks of many calls in one message. Order, slow readers, lost feeds, and verifiers that have none."""

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Chunk
from eyas.config import RegistryConfig, RetryConfig, RouterConfig, ServerConfig
from eyas.engine.async_engine import UnreadBudget
from eyas.errors import Unavailable
from eyas.rpc.channel import Peers, open_channel
from eyas.rpc.convert import generate_call_from_proto, generate_call_to_proto
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.router.dispatch.dispatcher import Dispatcher, RequestContext, SessionMap
from eyas.services.router.dispatch.generation import MAX_READY, ReadyQueue
from eyas.services.router.dispatch.upstream import FeedLost, UpstreamCall, VerifierFeed
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.verifier.chunk_feeds import LARGE_CHUNK_BYTES, ChunkFeeds, RouterFeed
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import (
    ChunkFeedServicer,
    ChunkFeedStub,
    GenerationServicer,
    GenerationStub,
    add_ChunkFeedServicer_to_server,
    add_GenerationServicer_to_server,
)
from tests.support.services.scripted_verifier import (
    CALL,
    PROMPT,
    REST,
    Received,
    Script,
    ScriptedVerifier,
    call_with,
    router,
    send,
    until,
    worker,
)
from tests.support.services.scripted_verifier import tokens_of as received

NUM_TOKENS = 20


@dataclass
class Verifier(GenerationServicer):
    """A verifier that sends token n as chunk n, one in each turn of the event loop, all calls in the same ones.

    Attributes:
        large: a token whose chunk is too large for a feed.
        streamed: tokens that came on the calls' own streams.
        num_calls: calls that have arrived.
    """

    large: int = -1
    feeds: ChunkFeeds = field(default_factory=ChunkFeeds)
    streamed: list[int] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 0

    async def Generate(self, message: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        call = generate_call_from_proto(message)
        num_tokens = call.request.sampling.max_tokens

        async def write_to_stream(chunk: generation_pb2.GenerateChunk) -> None:
            self.streamed.extend(chunk.token_ids)
            await context.write(chunk)

        with self.feeds.call(call, SimpleNamespace(write=write_to_stream)) as write:
            self.num_calls += 1
            await self.go.wait()
            for token in range(num_tokens):
                num_marks = LARGE_CHUNK_BYTES // 48 if token == self.large else 1
                totals = Totals(1, num_tokens) if token == num_tokens - 1 else None
                chunk = Chunk("", (token,) * num_marks, (False,) * num_marks, finish_reason="length" if totals else None)
                await write(TextChunk(chunk, totals=totals))
                await asyncio.sleep(0)


def chunk_of(token: int, **fields: Any) -> generation_pb2.GenerateChunk:
    """Return the chunk of one token."""
    return generation_pb2.GenerateChunk(token_ids=[token], is_draft_token=[False], **fields)


class Stream:
    """A call's own stream. last: its only chunk."""

    def __init__(self, last: generation_pb2.GenerateChunk) -> None:
        self.last = last

    async def read(self) -> generation_pb2.GenerateChunk:
        return self.last

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


@asynccontextmanager
async def connected(verifier: Verifier, feeds: ChunkFeedServicer | None = None) -> AsyncIterator[Any]:
    """Serve a verifier; yields a channel to it."""
    server = RpcServer(ServerConfig())
    add_GenerationServicer_to_server(verifier, server.aio)
    add_ChunkFeedServicer_to_server(feeds or verifier.feeds, server.aio)
    server.before_stop(verifier.feeds.close)
    address = await server.start(())
    async with open_channel(address) as channel:
        yield channel
    await server.stop(0)


async def opened(feed: VerifierFeed) -> None:
    """Wait until calls may name a feed."""
    for _ in range(1000):
        with feed.call(Received().call()) as (feed_id, _):
            if feed_id:
                return
        await asyncio.sleep(0.01)
    raise AssertionError("the feed does not open")


async def tokens_of(channel: Any, feed: VerifierFeed, num_tokens: int = NUM_TOKENS, is_slow: bool = False) -> list[int]:
    """Return the first token of each chunk of a call that names the feed. is_slow: see Received."""
    received = Received(is_slow)
    firsts = list[int]()
    most = call_with(max_tokens=10**6).request  # a large chunk holds its token many times

    def take(chunk: Chunk) -> bool:
        firsts.append(chunk.token_ids[0])
        return received.add(chunk)

    upstream = UpstreamCall(most, asyncio.get_running_loop().time() + 60, 2**31, take, received.wait_for_room)
    with feed.call(upstream) as (feed_id, number):
        assert feed_id
        call = replace(call_with(max_tokens=num_tokens), feed_id=feed_id, feed_call=number)
        await upstream.run(GenerationStub(channel).Generate(generate_call_to_proto(call)), 60.0)
    return firsts


async def test_calls_share_messages_and_keep_their_order() -> None:
    verifier = Verifier()
    async with connected(verifier) as channel:
        feed = VerifierFeed(channel, Peers())
        await opened(feed)
        calls = [asyncio.create_task(tokens_of(channel, feed)) for _ in range(8)]
        await until(lambda: verifier.num_calls == 8)
        verifier.go.set()
        assert await asyncio.gather(*calls) == [list(range(NUM_TOKENS))] * 8
        assert verifier.streamed == [NUM_TOKENS - 1] * 8, "only the last chunk is on the call's own stream"
        await feed.close()


async def followed(channel: grpc.aio.Channel, feed_id: str) -> Any:
    """Open a feed of that id."""
    follow = ChunkFeedStub(channel).Follow()  # type: ignore[call-arg]
    await follow.write(generation_pb2.FollowRequest(feed_id=feed_id))
    return follow


async def test_a_message_holds_the_chunks_of_a_step() -> None:
    verifier = Verifier()
    async with connected(verifier) as channel:
        follow = await followed(channel, "f")
        assert not (await follow.read()).chunks
        calls = [replace(call_with(max_tokens=3), feed_id="f", feed_call=number) for number in range(4)]
        streams = [GenerationStub(channel).Generate(generate_call_to_proto(call)) for call in calls]
        await until(lambda: verifier.num_calls == 4)
        verifier.go.set()
        message = await follow.read()
        assert [(each.call, *each.chunk.token_ids) for each in message.chunks][:4] == [(n, 0) for n in range(4)]
        for stream in streams:
            last = await stream.read()
            assert isinstance(last, generation_pb2.GenerateChunk)
            assert (last.num_fed, *last.token_ids) == (2, 2)


def test_a_feed_holds_what_other_readers_leave_free() -> None:
    unread = UnreadBudget(max_bytes=1000, num_bytes=200)
    feed = RouterFeed(unread, {1})
    chunk = generation_pb2.GenerateChunk(token_ids=[1])
    while feed.add(1, chunk, 100):
        assert unread.num_bytes == 200 + feed.num_bytes
    assert feed.num_bytes == 400
    assert len(feed.take()) == 4
    assert unread.num_bytes == 200
    assert feed.add(1, chunk, 100)
    feed.close()
    assert not feed.take()
    assert unread.num_bytes == 200


@pytest.mark.parametrize("large", [0, 5])
async def test_chunks_after_a_large_one_keep_their_order(large: int) -> None:
    verifier = Verifier(large)
    verifier.go.set()
    async with connected(verifier) as channel:
        feed = VerifierFeed(channel, Peers())
        await opened(feed)
        assert await tokens_of(channel, feed) == list(range(NUM_TOKENS))
        assert verifier.streamed[-1] == NUM_TOKENS - 1
        assert set(verifier.streamed) == set(range(large, NUM_TOKENS))
        await feed.close()


async def test_a_slow_reader_gets_the_rest_on_its_own_stream() -> None:
    """It does not fill the router's memory, nor keep other calls from theirs."""
    verifier = Verifier()
    verifier.go.set()
    num_tokens = 40 * MAX_READY
    async with connected(verifier) as channel:
        feed = VerifierFeed(channel, Peers())
        await opened(feed)
        slow = asyncio.create_task(tokens_of(channel, feed, num_tokens, True))
        assert await tokens_of(channel, feed) == list(range(NUM_TOKENS))
        assert await slow == list(range(num_tokens))
        assert len(verifier.streamed) > num_tokens // 2
        await feed.close()


@pytest.mark.parametrize(("num_fed", "is_complete"), [(1, True), (2, False)])
async def test_a_feed_that_is_lost_loses_no_chunk(num_fed: int, is_complete: bool) -> None:
    """A call whose chunks it had fails, so that the router continues it elsewhere; others go on."""
    last = chunk_of(2, num_fed=num_fed, finish=generation_pb2.Finish(reason="length"))
    received = Received()
    call = received.call()
    call.add(chunk_of(1))
    call.lose_feed()
    if is_complete:
        await call.run(Stream(last), 60.0)  # type: ignore[arg-type]
        assert received.tokens == [1, 2]
    else:
        with pytest.raises(Unavailable, match="feed ended"):
            await call.run(Stream(last), 60.0)  # type: ignore[arg-type]
        assert received.tokens == [1]


class BreakingFeeds(ChunkFeeds):
    """Feeds that break once a call has come, with a chunk of it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_call = asyncio.Event()

    async def Follow(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.write(generation_pb2.FedChunks())
        await self.has_call.wait()
        raise Unavailable("broken")


class BreakingVerifier(ScriptedVerifier):
    """A verifier that answers, and whose feed does not."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.feeds: BreakingFeeds = BreakingFeeds()

    async def Generate(self, message: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.feeds.has_call.set()
        await context.write(generation_pb2.GenerateChunk(token_ids=REST[1:2], is_draft_token=[False], num_fed=1))


async def test_a_lost_feed_ejects_no_verifier(url: str) -> None:
    registry, peers = Registry(RegistryConfig(url, 60.0, 0.05)), Peers()
    workers = WorkerPool(registry, RouterConfig(()), peers)
    once = RetryConfig(max_attempts=1)
    dispatcher = Dispatcher(workers, SessionMap(None), 20.0, RouterTelemetry(), once)
    async with worker(url, Script(REST), servicer=BreakingVerifier):
        await registry.watch("verifier")
        (verifier,) = registry.known("verifier")
        await opened(workers.connection(verifier).feed)
        received = Received()
        context = RequestContext(asyncio.get_running_loop().time() + 30, received.wait_for_room)
        with pytest.raises(FeedLost):
            await dispatcher.run(replace(CALL, model="demo"), context, received.add)
        assert not workers.snapshot().unhealthy
        await workers.close()
        await registry.close()


async def test_a_call_that_failed_takes_no_more_chunks() -> None:
    received = Received()
    call = received.call()
    call.add(chunk_of(1))
    call.fail(Unavailable("stuck"))
    call.add(chunk_of(2))
    with pytest.raises(Unavailable, match="stuck"):
        await call.run(Stream(chunk_of(3)), 60.0)  # type: ignore[arg-type]
    assert received.tokens == [1]


@pytest.mark.parametrize(("size", "number"), [(1, 3 * MAX_READY), (2**12, MAX_READY // 2)])
async def test_each_attempt_of_a_slow_client_leaves_its_feed(size: int, number: int) -> None:
    """After many chunks, or a few large ones."""
    queue = ReadyQueue()
    deadline = asyncio.get_running_loop().time() + 60
    most = call_with(max_tokens=10**6).request
    message = generation_pb2.GenerateChunk(token_ids=[1] * size, is_draft_token=[False] * size)
    for _ in range(2):
        call = UpstreamCall(most, deadline, 10, lambda chunk: queue.add(TextChunk(chunk)), queue.wait_for_room)
        assert [call.add(message) for _ in range(number)].count(True) == 1


async def test_what_a_fed_chunk_causes_is_logged_for_its_request() -> None:
    name = contextvars.ContextVar("name", default="none")
    seen = list[str]()

    def take(_: Chunk) -> bool:
        seen.append(name.get())
        return False

    name.set("own")
    call = UpstreamCall(CALL.request, asyncio.get_running_loop().time() + 60, 10, take, Received().wait_for_room)
    contextvars.Context().run(call.add, chunk_of(1))
    assert seen == ["own"]


async def test_a_stopped_call_lasts_until_its_client_has_read(url: str) -> None:
    """A verifier's later chunks are not wanted, and a body of many completions does not end them all at once."""
    registry, peers = Registry(RegistryConfig(url, 60.0, 0.05)), Peers()
    workers = WorkerPool(registry, RouterConfig(()), peers)
    dispatcher = Dispatcher(workers, SessionMap(None), 20.0, RouterTelemetry(), RetryConfig())
    async with worker(url, Script(REST)):
        await registry.watch("verifier")
        (verifier,) = registry.known("verifier")
        await opened(workers.connection(verifier).feed)
        is_read = asyncio.Event()
        is_taken = asyncio.Event()

        async def wait_for_room() -> None:
            await is_read.wait()

        context = RequestContext(asyncio.get_running_loop().time() + 30, wait_for_room)
        run = asyncio.create_task(dispatcher.run(replace(CALL, model="demo"), context, lambda _: is_taken.set()))
        await is_taken.wait()
        await asyncio.sleep(0.2)
        assert not run.done()
        is_read.set()
        await run
        await workers.close()
        await registry.close()


async def test_a_chunk_that_waits_for_others_of_its_feed_stalls() -> None:
    """Also the first one, which has no other limit than the deadline."""
    with pytest.raises(Unavailable, match=r"sent nothing for 0\.1 s"):
        await Received().call().run(Stream(chunk_of(1, num_fed=9)), 0.1)  # type: ignore[arg-type]


async def test_an_invalid_chunk_of_a_feed_fails_its_call_only() -> None:
    call = Received().call()
    assert not call.add(chunk_of(10))
    with pytest.raises(Unavailable, match=r"a token id outside \[0, 10\)"):
        await call.run(Stream(chunk_of(1)), 60.0)  # type: ignore[arg-type]


async def test_a_verifier_without_feeds_is_called_as_before() -> None:
    """A chunk that counts those of a feed is a failure then."""
    async with connected(Verifier(), ChunkFeedServicer()) as channel:
        feed = VerifierFeed(channel, Peers())
        await asyncio.sleep(0.2)
        call = Received().call()
        with feed.call(call) as named:
            assert named == ("", 0)
            with pytest.raises(FeedLost):
                await call.run(Stream(chunk_of(1, num_fed=1)), 60.0)  # type: ignore[arg-type]
        await feed.close()


async def test_feeds_end_with_their_calls_when_a_verifier_stops() -> None:
    verifier = Verifier()
    async with connected(verifier) as channel:
        follow = await followed(channel, "f")
        await follow.read()
        call = replace(call_with(max_tokens=2), feed_id="f", feed_call=7)
        stream = GenerationStub(channel).Generate(generate_call_to_proto(call))
        await until(lambda: verifier.num_calls == 1)
        await verifier.feeds.close()
        verifier.go.set()
        assert [list(each.chunk.token_ids) for each in (await follow.read()).chunks] == [[0]]
        last = await stream.read()
        assert isinstance(last, generation_pb2.GenerateChunk)
        assert await follow.code() is grpc.StatusCode.OK
        again = await followed(channel, "g")
        assert await again.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_feed_ends_when_its_caller_names_no_more_calls() -> None:
    async with connected(Verifier()) as channel:
        follow = await followed(channel, "f")
        await follow.read()
        await follow.done_writing()
        assert await follow.read() is grpc.aio.EOF
        assert await follow.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("feed_id", ["", "f"])
async def test_a_feed_needs_an_id_of_its_own(feed_id: str) -> None:
    async with connected(Verifier()) as channel:
        first = await followed(channel, "f")
        await first.read()
        second = await followed(channel, feed_id)
        assert await second.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_reads_its_calls_from_feeds(url: str) -> None:
    script = Script((*PROMPT, *REST))
    async with worker(url, script), router(url) as address:
        while not script.calls or not script.calls[-1].feed_id:
            assert received(await send(address, CALL)) == REST
