"""Calls to a verifier, and its feed: chunks of all its calls in one message for each of its steps, for one wake-up."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio

from eyas.api.request import Chunk, Request, VerifyStepDetails
from eyas.errors import EyasError, InvalidRequest, Unavailable, WorkerLost
from eyas.rpc.channel import Peers
from eyas.rpc.convert import chunk_from_proto
from eyas.rpc.status import is_connection_error, status_error
from eyas.services.discovery.base import cancel_task
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import ChunkFeedStub

RETRY_INTERVAL_S = 1.0
# How long a verifier may take to end a call after its last chunk.
END_TIMEOUT_S = 1.0
# The clocks of gRPC and of the event loop may end a call a little before its deadline.
DEADLINE_TOLERANCE_S = 0.05
# Log-probabilities of a prompt from which a thread parses their chunk.
LARGE_NUM_LOGPROBS = 256

# Parts of gRPC's texts for a connection that ended under a call. A refused call, or one that a drain ended, has others.
_BROKEN_CONNECTION = ("socket closed", "connection reset", "broken pipe")
# In the text for a call that no verifier got: none was connected, whatever ended the attempt to connect.
_NOT_CONNECTED = "failed to connect"

Take: TypeAlias = Callable[[Chunk], bool | None]
GenerateStream = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateChunk]

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
        self._calls: dict[int, UpstreamCall] = {}
        # not in the context of the request that happened to need it first
        self._task = asyncio.create_task(self._run(), name="chunk feed", context=contextvars.Context())

    @contextmanager
    def call(self, upstream: UpstreamCall) -> Iterator[tuple[str, int]]:
        """Give a call its chunks while the body runs. Yields ids of the feed and of the call; none while it is not open."""
        number = next(self._numbers) if self._id else 0
        if number:
            self._calls[number] = upstream
        else:
            upstream.lose_feed()
        try:
            yield self._id, number
        finally:
            self._calls.pop(number, None)

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
                    call.lose_feed()
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


class UpstreamCall:
    """A call to one verifier. Takes its chunks in their order, from the verifier's feed and from the call's own stream.

    Those of the feed are taken in the feed's task, as they come: they wake only who reads them. Once too many of them wait
    for a slow client, the call's own stream has the rest, which the verifier fills as it is read.

    Args:
        deadline: by the clock of the running event loop.
        vocab_size: of the verifier's model.
        take: gets each chunk, and may raise. Returns whether too many wait for the client; None once it takes no more.
        wait_for_room: awaited before a chunk of the call's own stream.
    """

    def __init__(
        self, request: Request, deadline: float, vocab_size: int, take: Take, wait_for_room: Callable[[], Awaitable[None]]
    ) -> None:
        self._request = request
        self._deadline = deadline
        self._vocab_size = vocab_size
        self._take = take
        self._wait_for_room = wait_for_room
        self._num_left = request.sampling.max_tokens
        self._num_fed = 0
        self._last_chunk_at = math.inf
        self._is_finished = False
        self._has_ended = False  # by its verifier
        self._has_lost_feed = False
        self._failure: Exception | None = None
        self._is_slow = False  # for the feed
        self._context = contextvars.copy_context()  # for log lines of what the feed's task does here
        self._own: asyncio.Future[Any] | None = None  # the next message of its own stream
        self._has_news = asyncio.Event()

    def add(self, message: generation_pb2.GenerateChunk) -> bool:
        """Take a chunk of the feed; return True with the first that is one too many."""
        if self._is_finished or self._failure:
            return False
        if self._last_chunk_at == math.inf or (self._own and self._own.done()):
            self._has_news.set()
        self._num_fed += 1
        try:
            is_slow = self._context.run(self._add, self._checked(message))
        except Exception as error:  # the feed goes on for other calls
            self.fail(error)
            return False
        if self._is_slow or not is_slow:
            return False
        self._is_slow = True
        return True

    def fail(self, error: Exception) -> None:
        """End `run` with an error."""
        self._failure = error
        self._has_news.set()

    def lose_feed(self) -> None:
        """Note that the feed has ended, or that there is none."""
        self._has_lost_feed = True
        self._has_news.set()

    async def run(self, stream: GenerateStream, stall_timeout_s: float) -> None:
        """Take all chunks.

        Args:
            stream: the call's own.
            stall_timeout_s: longest time between two chunks. It does not apply before the first: a request may wait in the
                verifier's queue until its deadline.

        Raises:
            TimeoutError: at the deadline.
            Unavailable: the verifier stalls, fails, or sends what no sound one sends.
            EyasError: the verifier's own, and that of `take` or `fail`.
        """
        try:
            while not self._is_finished:
                if self._failure:
                    raise self._failure
                if self._own is None:
                    self._own = asyncio.ensure_future(stream.read())
                    self._own.add_done_callback(self._note_own)
                message = self._result(self._own) if self._own.done() else None
                if message is not None and message.num_fed == self._num_fed:
                    self._own = None
                    await self._wait_for_room()
                    is_large = len(message.prompt_logprobs) > LARGE_NUM_LOGPROBS
                    self._add(await asyncio.to_thread(self._checked, message) if is_large else self._checked(message))
                elif message is not None and self._has_lost_feed:
                    raise FeedLost("the verifier's feed ended before it had all chunks of a call")
                else:
                    if message is not None:  # the feed may not take longer than a step for the chunks before it
                        self._last_chunk_at = min(self._last_chunk_at, asyncio.get_running_loop().time())
                    self._has_news.clear()
                    await self._wait(stall_timeout_s)
            if self._has_ended:  # a call that is cancelled before its end counts as such there
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_TIMEOUT_S):
                        await stream.code()
        finally:
            if self._own is not None:
                self._own.cancel()

    def _note_own(self, own: asyncio.Future[Any]) -> None:
        if not own.cancelled():
            own.exception()  # counts as seen, also after the end
        self._has_news.set()

    def _result(self, own: asyncio.Future[Any]) -> generation_pb2.GenerateChunk:
        """Return a message of the own stream. Raises as `run`."""
        try:
            message = own.result()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _eyas_error(error) from error
            if self._deadline - asyncio.get_running_loop().time() <= DEADLINE_TOLERANCE_S:
                raise TimeoutError from error
            raise Unavailable("the verifier ended the call before its deadline") from error
        except asyncio.CancelledError:
            raise Unavailable("the connection to the verifier was closed") from None
        if not isinstance(message, generation_pb2.GenerateChunk):
            raise Unavailable("the verifier ended the stream without a finish reason")
        return message

    async def _wait(self, stall_timeout_s: float) -> None:
        """Wait for news other than chunks of the feed. Raises TimeoutError, and Unavailable for a verifier that stalls."""
        while not self._has_news.is_set():
            stalls_at = self._last_chunk_at + stall_timeout_s
            try:
                async with asyncio.timeout_at(min(stalls_at, self._deadline)):
                    await self._has_news.wait()
            except TimeoutError:
                if stalls_at >= self._deadline:
                    raise
                if stalls_at == self._last_chunk_at + stall_timeout_s:
                    raise Unavailable(f"the verifier sent nothing for {stall_timeout_s} s") from None

    def _checked(self, message: generation_pb2.GenerateChunk) -> Chunk:
        """Return the chunk of a message. Raises Unavailable for one that no sound verifier sends."""
        try:
            chunk = chunk_from_proto(message, self._request.id)
        except InvalidRequest as error:
            raise Unavailable(f"the verifier sent an invalid chunk: {error}") from error
        self._num_left -= len(chunk.token_ids)
        for fault in _faults(chunk, self._vocab_size, self._request, self._num_left):
            raise Unavailable(f"the verifier sent an invalid chunk: {fault}")
        return chunk

    def _add(self, chunk: Chunk) -> bool:
        """Give a chunk away; return whether too many wait for the client."""
        self._last_chunk_at = asyncio.get_running_loop().time()
        is_slow = self._take(chunk)
        self._has_ended = chunk.finish_reason is not None
        if self._has_ended or is_slow is None:
            self._is_finished = True
            self._has_news.set()
        return bool(is_slow)


def _faults(chunk: Chunk, vocab_size: int, request: Request, num_left: int) -> Iterator[str]:
    """Yield what is wrong with a chunk. num_left: tokens that the request may get after it."""
    step, count = chunk.verify_step, len(chunk.token_ids)
    logprobs, ids = (*chunk.logprobs, *chunk.prompt_logprobs), chunk.token_ids
    if logprobs:
        ids = (*ids, *(token for entry in logprobs for token in (entry.token, *entry.top_ids)))
    if num_left < 0:
        yield "more tokens than it was asked for"
    if num_left <= 0 and chunk.finish_reason is None:
        yield "no end after the last token"
    if chunk.finish_reason == "cancelled":
        yield "an end that this router did not ask for"
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        yield f"a token id outside [0, {vocab_size})"
    if len(chunk.is_draft_token) != count:
        yield "marks of drafts for other tokens"
    if (
        len(chunk.logprobs) != (0 if request.sampling.logprobs is None else count)
        or len(chunk.prompt_logprobs) not in (0, len(request.prompt_ids))
        or any(len(entry.top_ids) != len(entry.top_logprobs) for entry in logprobs)
    ):
        yield "other log-probabilities than it was asked for"
    if step and step.details is not None and not _is_tree(step.details, chunk, request, vocab_size):
        yield "other details of its verify step than it was asked for"
    if not 0 <= chunk.num_cached <= len(request.prompt_ids):
        yield "impossible counts"
    if step and not (0 <= step.accepted <= step.drafted and 0 <= step.depth <= step.drafted):
        yield "impossible counts"


def _is_tree(details: VerifyStepDetails, chunk: Chunk, request: Request, vocab_size: int) -> bool:
    """Return whether details were asked for, and these are a tree with a path from the root to the
    chunk's drafted tokens.
    """
    tokens, parents, path, size = details.tokens, details.parents, details.path, len(details.tokens)
    return (
        request.return_verify_steps
        and size == len(parents) == len(details.log_probs) >= 1
        and len(details.sources) in (0, size)
        and 0 <= min(tokens) <= max(tokens) < vocab_size
        and all(0 <= parent < max(node, 1) for node, parent in enumerate(parents))
        and all(0 < node < size for node in path)
        and [parents[node] for node in path] == [0, *path][: len(path)]
        and tuple(tokens[node] for node in path) == chunk.token_ids[: len(path)]
        and len(path) == sum(chunk.is_draft_token)
    )


def _eyas_error(error: grpc.aio.AioRpcError) -> EyasError:
    """Return the error of a failed call; one that the verifier cancelled may be retried."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the verifier cancelled the call")
    if error.code() is grpc.StatusCode.UNAVAILABLE and "ping timeout" in (error.details() or ""):
        return WorkerLost("the verifier does not answer keepalive pings; it hangs, or the network is broken")
    if is_connection_error(error):  # the log has gRPC's text, which is not for clients
        details = (error.details() or "").lower()
        is_lost = _NOT_CONNECTED not in details and any(text in details for text in _BROKEN_CONNECTION)
        return (WorkerLost if is_lost else Unavailable)("the connection to the verifier failed")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        log.warning("a verifier refuses this router: %s", error.details(), extra={"rate_limited": True})
        return Unavailable("the verifier refuses this router")
    return status_error(error)
