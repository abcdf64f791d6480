"""From a pair of workers back to one unbroken run of chunks. Given a call with token ids; knows no text.

The noise of a draw depends on the request's seed and the absolute position alone, so a request whose verifier is lost goes
on elsewhere, exactly, from the tokens it already has.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio

from eyas.block_hash import block_hashes
from eyas.errors import EyasError, Overloaded, Unavailable
from eyas.request import Chunk
from eyas.rpc.convert import call_to_message, chunk_from_message
from eyas.rpc.messages import NO_DRAFTER, ROUND_TRIP_KEY, GenerateCall
from eyas.rpc.server import status_error
from eyas.services.discovery.registry import Placement
from eyas.services.router.routing import Pair, RequestDemand
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.router.workers import SessionMap, WorkerPool
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import GenerationStub

MAX_ATTEMPTS = 3
TRAILER_SECONDS = 1.0

TrailerSink = Callable[[Sequence[tuple[str, str]]], None]
GenerateStream = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateChunk]

log = logging.getLogger(__name__)


@dataclass
class _RetryState:
    """A request between its attempts: what it has got so far, and who has failed it."""

    call: GenerateCall
    demand: RequestDemand
    token_ids: list[int] = field(default_factory=list)
    error: EyasError | None = None

    def rest(self, pair: Pair) -> GenerateCall:
        """The call that continues after the tokens it already has."""
        request, num_done = self.call.request, len(self.token_ids)
        sampling = replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - num_done,
            min_tokens=max(request.sampling.min_tokens - num_done, 0),
            prompt_logprobs=None if num_done else request.sampling.prompt_logprobs,
        )
        prompt_ids = (*request.prompt_ids, *self.token_ids)
        request = replace(request, prompt_ids=prompt_ids, sampling=sampling, num_emitted=request.num_emitted + num_done)
        drafter = pair.drafter.address if pair.drafter else "" if self.demand.wants_drafter else NO_DRAFTER
        return replace(self.call, request=request, drafter=drafter, fingerprint=pair.verifier.model.fingerprint)

    def accepted(self, pair: Pair, chunk: Chunk) -> None:
        """Count a chunk; from here on only the same target may continue."""
        self.token_ids += chunk.token_ids
        self.demand = replace(self.demand, fingerprint=pair.verifier.model.fingerprint)

    def failed(self, pair: Pair, error: EyasError) -> None:
        """Try no more on this verifier."""
        self.error = error
        self.demand = replace(self.demand, excluded=self.demand.excluded | {pair.verifier.incarnation})


@dataclass
class PlacementHint:
    """Where the completions of one request run, so that they share its prefix: the pair that the first of them got."""

    placement: Placement | None = None


class Dispatcher:
    """Runs calls on workers. stall: longest silence of a verifier that has begun to answer, in seconds.

    Before its first chunk a request may wait in the verifier's queue as long as its deadline lets it; a verifier that hangs
    or is out of reach meanwhile shows in the channel's pings.
    """

    def __init__(
        self, workers: WorkerPool, sessions: SessionMap, stall: float, telemetry: RouterTelemetry | None = None
    ) -> None:
        self._telemetry = telemetry or RouterTelemetry()
        self._workers = workers
        self._sessions = sessions
        self._stall = stall
        self._binding: set[asyncio.Task[None]] = set()

    async def stream(
        self, call: GenerateCall, home: PlacementHint, deadline: float, sink: TrailerSink
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a call, up to and with the one that says why it ended.

        call: for one completion, its seed set and its stop strings left out. home: shared by the completions of a request.
        deadline: on the running loop's clock. sink: takes what the verifier measured, once it has ended by itself.
        Raises TimeoutError at the deadline; Unavailable when no verifier can serve the call; the verifier's own error
        when it refuses it.
        """
        request = call.request
        last = await self._sessions.placement(request.session) if request.session else None
        journey = _RetryState(call, _demand(call, home.placement or last))
        while True:
            pair = self._choose(journey)
            home.placement = home.placement or _placement(pair)
            try:
                with self._telemetry.attempt(journey.rest(pair), pair, len(journey.demand.excluded)) as rest:
                    async with aclosing(self._attempt(pair, rest, deadline, sink)) as chunks:
                        async for chunk in chunks:
                            if not journey.demand.fingerprint:
                                self._workers.accepted(pair, journey.demand)
                                self._bind(request.session, pair)
                            journey.accepted(pair, chunk)
                            yield chunk
                return
            except (Unavailable, Overloaded) as error:
                log.warning("request %s: verifier %s: %s", request.id, pair.verifier.address, error)
                if isinstance(error, Unavailable):
                    self._workers.suspect(pair.verifier)
                journey.failed(pair, error)

    def _choose(self, journey: _RetryState) -> Pair:
        demand = journey.demand
        pair = self._workers.choose(demand) if len(demand.excluded) < MAX_ATTEMPTS else None
        if pair is not None:
            return pair
        raise journey.error or Unavailable(f"no verifier of model {demand.model!r} is alive; start one or try again later")

    async def _attempt(
        self, pair: Pair, call: GenerateCall, deadline: float, sink: TrailerSink
    ) -> AsyncGenerator[Chunk, None]:
        """One verifier's chunks. Leaving early cancels the call there."""
        left = deadline - asyncio.get_running_loop().time()
        stub = GenerationStub(self._workers.channel(pair.verifier))
        stream = stub.Generate(call_to_message(call), timeout=max(left, 0), metadata=call.trace)
        with self._workers.busy(pair, stream.cancel):
            try:
                finished, stall = False, math.inf
                while not finished:
                    chunk = await self._read(stream, call.request.id, deadline, stall)
                    finished, stall = chunk.finish_reason is not None, self._stall
                    yield chunk
                sink(await _measurements(stream))
            finally:
                stream.cancel()

    async def _read(self, stream: GenerateStream, request_id: str, deadline: float, stall: float) -> Chunk:
        left = deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(stream.read(), min(left, stall))
        except TimeoutError as error:
            if left <= stall:
                raise
            raise Unavailable(f"the verifier sent nothing for {stall} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            raise _as_eyas_error(error) from error
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            raise Unavailable("the verifier cancelled the call") from None
        if isinstance(message, generation_pb2.GenerateChunk):
            return chunk_from_message(message, request_id).chunk
        raise Unavailable("the verifier ended the stream without saying why")

    def _bind(self, session: str, pair: Pair) -> None:
        """Let the session's next request meet the same pair; nobody waits for it."""
        if session:
            task = asyncio.create_task(self._sessions.place(session, _placement(pair)))
            self._binding.add(task)
            task.add_done_callback(self._binding.discard)


async def _measurements(stream: GenerateStream) -> list[tuple[str, str]]:
    """What the verifier measured; nothing if it does not say so soon."""
    try:
        trailers = await asyncio.wait_for(stream.trailing_metadata(), TRAILER_SECONDS)
    except TimeoutError:
        return []
    return [(key, str(value)) for key, value in trailers if key == ROUND_TRIP_KEY]


def _demand(call: GenerateCall, last: Placement | None) -> RequestDemand:
    request = call.request
    return RequestDemand(
        model=call.model,
        num_slots=len(request.prompt_ids) + request.sampling.max_tokens,
        wants_drafter=call.drafter != NO_DRAFTER,
        last=last,
        session=request.session,
        blocks=block_hashes(request.prompt_ids),
    )


def _placement(pair: Pair) -> Placement:
    return Placement(pair.verifier.incarnation, pair.drafter.incarnation if pair.drafter else "")


def _as_eyas_error(error: grpc.aio.AioRpcError) -> EyasError:
    """A call cancelled by a verifier that stops may be tried elsewhere."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the verifier cancelled the call")
    if error.code() is grpc.StatusCode.UNAVAILABLE and "ping timeout" in (error.details() or ""):
        return Unavailable("the verifier gave no sign of life; it hangs, or the network between is broken")
    return status_error(error)


def _this_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
