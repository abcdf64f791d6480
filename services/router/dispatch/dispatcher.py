"""Run a request on a pair of workers, and retry it when its verifier fails: on another one, or on the same one later.

While no verifier can take it, a request waits. A retry continues exactly: the noise of a draw depends only on the
request's seed and the absolute position, so another verifier of the same target goes on from the tokens that the request
already has.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import grpc
import grpc.aio

from eyas.api.request import Chunk, Request
from eyas.config import RetryConfig
from eyas.errors import EyasError, Overloaded, RequestFailed, Unavailable, UnknownDrafter, WorkerLost
from eyas.protocol.prefix_hash import block_hashes
from eyas.rpc.convert import generate_call_to_proto
from eyas.rpc.messages import NO_DRAFTER, GenerateCall
from eyas.services.discovery.redis_registry import Placement, Registry
from eyas.services.router.dispatch.poison import ISOLATION_S, Attempt, PoisonDetector
from eyas.services.router.dispatch.routing import Pair, RoutingRequest
from eyas.services.router.dispatch.upstream import FeedLost, Take, UpstreamCall
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.telemetry import RouterTelemetry
from eyas.v1.generation_pb2_grpc import GenerationStub

MAX_SESSIONS = 65536
# Verifiers that a request may lose in a row before its first token, also if others waited there each time.
MAX_LOST = 3

log = logging.getLogger(__name__)


class SessionMap:
    """The last placement of each session: from the registry that all routers share, else from this router's memory.

    registry: None without one; its owner closes it.
    """

    def __init__(self, registry: Registry | None, limit: int = MAX_SESSIONS) -> None:
        self._registry = registry
        self._limit = limit
        self._local: OrderedDict[str, Placement] = OrderedDict()

    async def placement(self, session: str) -> Placement | None:
        """Return the session's last placement, or None if it is not known."""
        shared = await self._registry.placement(session) if self._registry else None
        return shared or self._local.get(session)

    async def place(self, session: str, placement: Placement) -> None:
        """Store a session's placement."""
        self._local[session] = placement
        self._local.move_to_end(session)
        while len(self._local) > self._limit:
            self._local.popitem(last=False)
        if self._registry:
            await self._registry.place(session, placement)


@dataclass
class RequestContext:
    """State that the completions of one request share.

    Attributes:
        deadline: by the clock of the running event loop, in seconds.
        wait_for_room: waits until the client has read enough of what it has.
        placement: where the first completion runs; the others are placed there too, to share its cached prefix.
        body: identifies the client's request, which may have several prompts.
    """

    deadline: float
    wait_for_room: Callable[[], Awaitable[None]]
    placement: Placement | None = None
    body: object = field(default_factory=object)


class Dispatcher:
    """Streams calls from verifiers, with retries. stall_timeout_s: longest time between two chunks of a verifier.

    The stall timeout does not apply before the first chunk: a request may wait in the verifier's queue until its deadline.
    Keepalive pings detect a verifier that hangs or cannot be reached meanwhile.
    """

    def __init__(
        self,
        workers: WorkerPool,
        sessions: SessionMap,
        stall_timeout_s: float,
        telemetry: RouterTelemetry,
        retry: RetryConfig | None = None,
    ) -> None:
        self.retry = retry or RetryConfig()
        self._workers = workers
        self._sessions = sessions
        self._stall_timeout_s = stall_timeout_s
        self._telemetry = telemetry
        self._poison = PoisonDetector(workers.notify)
        self._placing: set[asyncio.Task[None]] = set()

    def check(self, call: GenerateCall) -> None:
        """Raises PoisonRequest for a request that has ended verifiers a short while ago."""
        self._poison.check(call)

    async def run(self, call: GenerateCall, context: RequestContext, take: Take) -> None:
        """Call `take` with the chunks of a call; the last one has a finish reason, unless `take` wants no more.

        Args:
            call: one completion, with its seed set and without stop strings.
            take: see UpstreamCall.

        Raises:
            TimeoutError: at the deadline.
            Unavailable: no verifier could serve the call within `retry.max_attempts` and `retry.budget_s`.
            EyasError: the verifier's own error, when it rejects the call.
        """
        session = _session_key(call.request)
        last = await self._sessions.placement(session) if session else None
        state = _RetryState(call, _routing_request(call, context.placement or last), self.retry)
        while True:
            pair = await self._next_pair(state, context)
            context.placement = context.placement or pair.placement
            try:
                async with self._attempt(pair, state, context) as attempt:
                    traced_call = self._telemetry.upstream_request(state.remaining_call(pair), pair, state.num_retries)
                    with traced_call as sent:
                        await self._call(pair, sent, context, partial(self._take, attempt, pair, state, take))
                return
            except UnknownDrafter as error:
                if state.drafter_is_unknown:
                    raise
                reason = (call.request.id, pair.verifier.address, str(error))
                log.info("request %s: verifier %s: %s", *reason, extra={"rate_limited": True})
                state.drafter_is_unknown = True
            except (Unavailable, Overloaded, RequestFailed) as error:
                reason = (call.request.id, pair.verifier.address, _log_reason(error))
                log.warning("request %s: verifier %s: %s", *reason, extra={"rate_limited": True})
                if isinstance(error, Unavailable) and not isinstance(error, FeedLost):
                    self._workers.record_failure(pair.verifier)
                if isinstance(error, WorkerLost) and state.lose(pair, attempt):
                    raise self._poison.refuse(call, attempt, state.lost) from error
                if len(state.lost) >= MAX_LOST:  # never alone, so no one is proven guilty
                    log.error(
                        "request %s lost the verifiers %s before its first token", call.request.id, ", ".join(state.lost)
                    )
                    raise error
                state.fail(pair, error)

    @asynccontextmanager
    async def _attempt(self, pair: Pair, state: _RetryState, context: RequestContext) -> AsyncIterator[Attempt]:
        """Follow a call to a verifier. A suspect first waits until no other call there lacks its first token."""
        with self._poison.attempt(pair.verifier.incarnation, context.body, bool(state.lost)) as attempt:
            if attempt.trial_until:
                left_s = max(context.deadline - asyncio.get_running_loop().time(), 0.0)
                await self._workers.wait_for(lambda: self._poison.isolate(attempt) or None, min(ISOLATION_S, left_s))
            yield attempt

    async def _next_pair(self, state: _RetryState, context: RequestContext) -> Pair:
        """Return the pair of the next attempt: at once if a verifier is left that has not just failed the request.

        Else wait for one. After a backoff, a verifier that has failed the request may try again if it can be called now.
        Raises the request's last error, or `no_verifier`, when the budget is spent, and TimeoutError at the deadline.
        """
        clock, deadline = asyncio.get_running_loop().time, context.deadline

        def pick_other() -> Pair | None:
            return self._pick(state, context, self._workers.pick, state.avoided_at(clock()))

        def pick_any() -> Pair | None:
            return pick_other() or self._pick(state, context, self._workers.pick_again, frozenset())

        if pair := pick_other():
            return pair
        if state.was_rejected:
            raise state.error or no_verifier(state.call.model)
        started_at = clock()
        budget_s, remaining_s = self.retry.budget_s - state.waited_s, deadline - started_at
        timeout_s, backoff_s = min(budget_s, remaining_s), state.backoff_s()
        with self._telemetry.waiting():
            pair = await self._workers.wait_for(pick_other, min(backoff_s, timeout_s))
            if pair is None and backoff_s < timeout_s:
                pair = await self._workers.wait_for(pick_any, started_at + timeout_s - clock())
        state.waited_s += clock() - started_at
        if pair is None:
            if remaining_s <= budget_s:
                raise TimeoutError
            raise state.error or no_verifier(state.call.model)
        return pair

    def _pick(
        self,
        state: _RetryState,
        context: RequestContext,
        pick: Callable[[RoutingRequest], Pair | None],
        avoided: frozenset[str],
    ) -> Pair | None:
        """Return a pair whose verifier is not closed for a trial. A suspect waits for such a one only ISOLATION_S."""
        closed, open_pair = self._poison.closed(), None
        if not (closed and state.lost and self._poison.is_tried(context.body)):
            open_pair = pick(replace(state.routing, excluded=avoided | closed))
        if open_pair is not None or not closed or not state.lost:
            return open_pair
        now, pair = asyncio.get_running_loop().time(), pick(replace(state.routing, excluded=avoided))
        if pair is not None and state.excluded_since is None:
            state.excluded_since = now
        return pair if state.excluded_since is not None and now >= state.excluded_since + ISOLATION_S else None

    async def _call(self, pair: Pair, call: GenerateCall, context: RequestContext, take: Take) -> None:
        """Call a verifier. Raises as `UpstreamCall.run`; an early end cancels the call."""
        remaining_s = context.deadline - asyncio.get_running_loop().time()
        connection = self._workers.connection(pair.verifier)
        vocab_size = pair.verifier.model.vocab_size
        upstream = UpstreamCall(call.request, context.deadline, vocab_size, take, context.wait_for_room)
        stuck = WorkerLost("the verifier is stuck in one step")
        with (
            connection.feed.call(upstream) as (feed_id, number),
            self._workers.in_flight(pair, partial(upstream.fail, stuck)),
        ):
            message = generate_call_to_proto(replace(call, feed_id=feed_id, feed_call=number))
            metadata = (*call.trace, *self._workers.metadata)
            stream = GenerationStub(connection.channel).Generate(message, timeout=max(remaining_s, 0), metadata=metadata)
            try:
                await upstream.run(stream, self._stall_timeout_s)
            finally:
                stream.cancel()
        await context.wait_for_room()  # else a body of many completions would end them all for a client that reads nothing

    def _take(self, attempt: Attempt, pair: Pair, state: _RetryState, take: Take, chunk: Chunk) -> bool | None:
        """Note a verifier's chunk, and take it. Raises RequestFailed for an error that another verifier may not have."""
        if chunk.finish_reason == "error" and not state.has_broken:
            raise RequestFailed(chunk.message)
        if not attempt.has_begun:
            self._begin(attempt, pair, state, chunk)
        state.add(pair, chunk)
        return take(chunk)

    def _begin(self, attempt: Attempt, pair: Pair, state: _RetryState, chunk: Chunk) -> None:
        """Note a verifier's first chunk. From now on only verifiers with the same outputs may continue.

        Stores where the session runs, without waiting for the registry.
        """
        self._poison.begin(attempt)
        state.routing = replace(state.routing, target_fingerprint=pair.verifier.model.pin)
        if chunk.finish_reason == "error":
            return
        self._workers.record_success(pair, state.routing)
        if session := _session_key(state.call.request):
            task = asyncio.create_task(self._sessions.place(session, pair.placement))
            self._placing.add(task)
            task.add_done_callback(self._placing.discard)


@dataclass
class _RetryState:
    """A request across its upstream attempts: the tokens received so far, and the verifiers that failed it.

    Attributes:
        num_failures, waited_s: attempts and seconds of waiting in a row, without a token.
        num_retries: all failed attempts.
        has_broken: an engine failed since the last token.
        avoided: verifiers that failed, and until when they are avoided, by the clock of the event loop.
        drafter_is_unknown: a verifier does not know the chosen drafter yet or any more. It chooses one itself then.
        lost: addresses of verifiers that were lost in a row before their first chunk; with any, the request is a suspect.
        excluded_since: since when only the trials of other suspects keep it from a verifier.
    """

    call: GenerateCall
    routing: RoutingRequest
    config: RetryConfig
    token_ids: list[int] = field(default_factory=list)
    error: EyasError | None = None
    avoided: dict[str, float] = field(default_factory=dict)
    num_failures: int = 0
    num_retries: int = 0
    waited_s: float = 0.0
    has_broken: bool = False
    drafter_is_unknown: bool = False
    lost: list[str] = field(default_factory=list)
    excluded_since: float | None = None

    @property
    def was_rejected(self) -> bool:
        """Return whether the request has not begun, and a verifier was full: the client should try again later."""
        return isinstance(self.error, Overloaded) and not self.token_ids

    def avoided_at(self, now: float) -> frozenset[str]:
        """Return the verifiers that have failed the request and are still avoided."""
        return frozenset(name for name, until in self.avoided.items() if now < until)

    def backoff_s(self) -> float:
        """Return the seconds before the next attempt on a verifier that has failed the request, drawn at random."""
        longest = min(
            self.config.initial_backoff_s * 2.0 ** min(max(self.num_failures - 1, 0), 32), self.config.max_backoff_s
        )
        pushback_s = self.error.retry_after if isinstance(self.error, Overloaded) else None
        return max(random.uniform(0.5, 1.0) * longest, pushback_s or 0.0) if self.error else 0.0

    def remaining_call(self, pair: Pair) -> GenerateCall:
        """Return the call that continues after the tokens received so far."""
        request, sampling, num_received = self.call.request, self.call.request.sampling, len(self.token_ids)
        if num_received:  # a copy checks all parameters again
            sampling = replace(
                sampling,
                max_tokens=sampling.max_tokens - num_received,
                min_tokens=max(sampling.min_tokens - num_received, 0),
                prompt_logprobs=None,
            )
        prompt_ids = (*request.prompt_ids, *self.token_ids)
        num_emitted = request.num_emitted + num_received
        request = replace(request, prompt_ids=prompt_ids, sampling=sampling, num_emitted=num_emitted)
        chosen = pair.drafter.address if pair.drafter and not self.drafter_is_unknown else ""
        drafter = chosen if self.routing.wants_drafter else NO_DRAFTER
        return replace(self.call, request=request, drafter=drafter, target_fingerprint=pair.verifier.model.pin)

    def add(self, pair: Pair, chunk: Chunk) -> None:
        """Keep a chunk's tokens. A token is progress."""
        self.token_ids += chunk.token_ids
        if chunk.token_ids:
            self.avoided.pop(pair.verifier.incarnation, None)
            self.num_failures, self.waited_s, self.has_broken = 0, 0.0, False
            self.lost.clear()

    def lose(self, pair: Pair, attempt: Attempt) -> bool:
        """Note that a verifier was lost. Returns whether the request is to blame: no other request can have ended it."""
        if attempt.has_begun:
            return False
        self.lost.append(pair.verifier.address)
        return attempt.is_alone

    def fail(self, pair: Pair, error: EyasError) -> None:
        """Avoid a verifier that failed for some time. Raises the error if it ends the request.

        A full verifier does not count as a failed attempt for a request that has begun: its client waits.
        """
        is_broken = isinstance(error, RequestFailed)
        self.error = error
        self.num_retries += 1
        self.num_failures += not (isinstance(error, Overloaded) and self.token_ids)
        if self.num_failures >= self.config.max_attempts or (is_broken and self.has_broken):
            raise error
        self.has_broken |= is_broken
        self.avoided[pair.verifier.incarnation] = asyncio.get_running_loop().time() + self.config.cooldown_s


def no_verifier(model: str) -> Unavailable:
    """Return the error for a model without a live verifier."""
    return Unavailable(f"no verifier of model {model!r} is alive; start one or try again later")


def _session_key(request: Request) -> str:
    """Return the request's session by a name that no other tenant's session has; empty without a session."""
    return f"{request.tenant}/{request.session}" if request.tenant and request.session else request.session


def _routing_request(call: GenerateCall, last: Placement | None) -> RoutingRequest:
    request = call.request
    return RoutingRequest(
        model=call.model,
        num_tokens=len(request.prompt_ids) + request.sampling.max_tokens,
        wants_drafter=call.drafter != NO_DRAFTER,
        last=last,
        session=_session_key(request),
        block_hashes=block_hashes(request.prompt_ids, request.cache_salt),
    )


def _log_reason(error: EyasError) -> str:
    cause = error.__cause__
    return f"{error}: {cause.details()}" if isinstance(cause, grpc.aio.AioRpcError) else str(error)
