"""Feeds of routers: the chunks of all their calls go out in one message for each step, not in one for each call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eyas.api.outputs import TextChunk
from eyas.engine.async_engine import UnreadBudget
from eyas.errors import InvalidRequest, Unavailable
from eyas.rpc.convert import text_chunk_to_proto
from eyas.rpc.messages import GenerateCall
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import ChunkFeedServicer

# Chunks that wait for a router that does not read its feed, and that a message holds.
MAX_PENDING, MAX_PER_MESSAGE = 4096, 256
# Estimated bytes of a chunk from which its own call takes it.
LARGE_CHUNK_BYTES = 16 * 2**10


@dataclass(eq=False)
class RouterFeed:
    """Chunks for one router.

    Attributes:
        unread: counts the bytes that wait here.
        calls: the numbers of those whose chunks it takes.
        pending: the chunks that wait, with their bytes.
        num_bytes: of all of these.
    """

    unread: UnreadBudget
    calls: set[int] = field(default_factory=set)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    pending: deque[tuple[generation_pb2.FedChunk, int]] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, call: int, chunk: generation_pb2.GenerateChunk, num_bytes: int) -> bool:
        """Queue a chunk; return False where the call's own stream has to take it."""
        is_full = len(self.pending) >= MAX_PENDING or not self.unread.allows(self.num_bytes, num_bytes)
        if call not in self.calls or is_full:
            return False
        self.pending.append((generation_pb2.FedChunk(call=call, chunk=chunk), num_bytes))
        self._count(num_bytes)
        self.has_news.set()
        return True

    def take(self) -> list[generation_pb2.FedChunk]:
        """Remove and return the chunks of the next message."""
        taken = [self.pending.popleft() for _ in range(min(len(self.pending), MAX_PER_MESSAGE))]
        self._count(-sum(num_bytes for _, num_bytes in taken))
        return [chunk for chunk, _ in taken]

    def close(self) -> None:
        """Drop the chunks, and take no more."""
        self.calls.clear()
        self.pending.clear()  # running calls keep the feed
        self._count(-self.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.unread.num_bytes += num_bytes

    def end(self, call: int) -> None:
        """Take no further chunks of a call."""
        self.calls.discard(call)
        self.has_news.set()


class ChunkFeeds(ChunkFeedServicer):
    """Servicer of the feeds of all routers. unread: counts the bytes that wait in them."""

    def __init__(self, unread: UnreadBudget | None = None) -> None:
        self._unread = unread or UnreadBudget()
        self._feeds: dict[str, RouterFeed] = {}
        self._is_stopping = False

    @contextmanager
    def call(self, call: GenerateCall, context: Any) -> Iterator[Callable[[TextChunk], Awaitable[None]]]:
        """Yield a function that writes the chunks of a call: to its feed, or else to the call's own stream.

        From its first chunk on the stream, a call stays there: nothing orders the two.
        """
        feed, number, num_fed = self._feeds.get(call.feed_id), call.feed_call, 0
        if feed:
            feed.calls.add(number)

        async def write(chunk: TextChunk) -> None:
            nonlocal num_fed
            message = text_chunk_to_proto(chunk)
            num_bytes = chunk.chunk.num_bytes
            is_small = chunk.totals is None and num_bytes < LARGE_CHUNK_BYTES
            if feed and is_small and feed.add(number, message, num_bytes):
                num_fed += 1
                return
            if feed:
                feed.end(number)
            message.num_fed = num_fed
            await context.write(message)

        try:
            yield write
        finally:
            if feed:
                feed.end(number)

    async def Follow(  # type: ignore[override]  # noqa: N802 - a coroutine that writes is cancelled at once
        self, request_iterator: AsyncIterator[generation_pb2.FollowRequest], context: Any
    ) -> None:
        """Write what the feed takes, until no further call can name it.

        Raises InvalidRequest for a feed without an id of its own, Unavailable after `close`.
        """
        first = await anext(request_iterator, generation_pb2.FollowRequest())
        if not first.feed_id or first.feed_id in self._feeds:
            raise InvalidRequest("the first message of a feed names its id, which no other feed has")
        if self._is_stopping:
            raise Unavailable("this verifier is stopping")
        feed = self._feeds[first.feed_id] = RouterFeed(self._unread)
        reader = asyncio.create_task(_end_slow_calls(request_iterator, feed))
        reader.add_done_callback(lambda _: feed.has_news.set())
        try:
            await context.write(generation_pb2.FedChunks())
            while feed.calls or not (self._is_stopping or reader.done()):
                await feed.has_news.wait()
                feed.has_news.clear()
                while chunks := feed.take():
                    await context.write(generation_pb2.FedChunks(chunks=chunks))
            if reader.done():
                reader.result()  # raises for a message that cannot be read
        finally:
            del self._feeds[first.feed_id]
            feed.close()
            reader.cancel()

    async def close(self) -> None:
        """End the feeds when their calls have ended, and accept no more."""
        self._is_stopping = True
        for feed in self._feeds.values():
            feed.has_news.set()


async def _end_slow_calls(requests: AsyncIterator[generation_pb2.FollowRequest], feed: RouterFeed) -> None:
    async for message in requests:
        feed.calls.difference_update(message.slow_calls)
