"""The feed of a verifier: chunks of all its calls in one message for each of its steps, and the wake-up that it costs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from eyas.errors import Unavailable
from eyas.rpc.channel import Peers
from eyas.services.discovery.base import cancel_task
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import ChunkFeedStub

# Chunks that a call keeps for a slow client. From then on its own stream has them, which the verifier fills as it is read.
MAX_UNREAD = 64
RETRY_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class FeedLost(Unavailable):
    """A feed that ended before it had all chunks of a call, whose own stream works."""


class VerifierFeed:
    """Feed of the calls to one verifier, over its channel. One that has no feeds answers each call on its own stream."""

    def __init__(self, channel: grpc.aio.Channel, peers: Peers) -> None:
        self._channel = channel
        self._peers = peers
        self._id = ""  # empty while it is not open
        self._numbers = itertools.count(1)
        self._calls: dict[int, FedCall] = {}
        self._task = asyncio.create_task(self._run(), name="chunk feed")

    @contextmanager
    def call(self) -> Iterator[FedCall | None]:
        """Take the chunks of a call while the body runs; yields None while the feed is not open."""
        if not self._id:
            yield None
            return
        fed = FedCall(self._id, next(self._numbers))
        self._calls[fed.number] = fed
        try:
            yield fed
        finally:
            self._calls.pop(fed.number, None)
            fed.close()

    async def close(self) -> None:
        """End the feed."""
        await cancel_task(self._task)

    async def _run(self) -> None:
        """Follow the verifier's feed, again after each failure, unless it has none."""
        while True:
            try:
                await self._follow(uuid.uuid4().hex)
            except grpc.aio.AioRpcError as error:
                log.debug("no feed: %s", error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            except Exception:
                log.exception("a feed failed; trying again", extra={"rate_limited": True})
            finally:
                lost, self._calls, self._id = self._calls, {}, ""
                for call in lost.values():
                    call.lose()
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _follow(self, feed_id: str) -> None:
        follow = ChunkFeedStub(self._channel).Follow
        stream = follow(wait_for_ready=True, metadata=self._peers.metadata)  # type: ignore[call-arg]  # it is written to
        await stream.write(generation_pb2.FollowRequest(feed_id=feed_id))
        while isinstance(message := await stream.read(), generation_pb2.FedChunks):
            self._id = feed_id
            slow = [each.call for each in message.chunks if (call := self._calls.get(each.call)) and call.add(each.chunk)]
            if slow:
                await stream.write(generation_pb2.FollowRequest(slow_calls=slow))


class FedCall:
    """The chunks of one call, from the feed and from its own stream, in their order."""

    def __init__(self, feed_id: str, number: int) -> None:
        self.feed_id = feed_id
        self.number = number
        self._num_read = 0
        self._unread: deque[generation_pb2.GenerateChunk] = deque()
        self._is_lost = self._is_cancelled = False
        self._has_news = asyncio.Event()
        self._own: asyncio.Task[Any] | None = None

    def add(self, chunk: generation_pb2.GenerateChunk) -> bool:
        """Take a chunk of the feed; return whether that is one too many."""
        if self._unread:  # kept for a while: without a copy, each would keep the chunks of all calls in its message
            own = generation_pb2.GenerateChunk()
            own.CopyFrom(chunk)
            chunk = own
        self._unread.append(chunk)
        self._has_news.set()
        return len(self._unread) == MAX_UNREAD

    def lose(self) -> None:
        """Note that the feed has ended."""
        self._is_lost = True
        self._has_news.set()

    def cancel(self) -> None:
        """End `read`, which may wait for the feed when all of the call's own stream has been read."""
        self._is_cancelled = True
        self._has_news.set()

    async def read(self, stream: Any) -> Any:
        """Return the next chunk, and what `stream.read` raises or returns at the end. stream: the call's own.

        Raises FeedLost if the feed has ended before it had all chunks, CancelledError after `cancel`.
        """
        while not self._unread or self._is_cancelled:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._own is None:
                self._own = asyncio.ensure_future(stream.read())
                self._own.add_done_callback(self._note_own)
            if self._own.done():
                message = self._own.result()
                if not isinstance(message, generation_pb2.GenerateChunk) or message.num_fed == self._num_read:
                    self._own = None
                    return message
                if self._is_lost:
                    raise FeedLost("the verifier's feed ended before it had all chunks of a call")
            self._has_news.clear()
            await self._has_news.wait()
        self._num_read += 1
        return self._unread.popleft()

    def close(self) -> None:
        """Read no more."""
        if self._own is not None:
            self._own.cancel()

    def _note_own(self, own: asyncio.Task[Any]) -> None:
        if not own.cancelled():
            own.exception()  # counts as seen, also after the last read
        self._has_news.set()
