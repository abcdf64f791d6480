"""The thread that runs an Engine, and the async interface to it: requests go in, chunks come out.

Submissions and cancellations wait in an inbox and are applied between steps; the thread sleeps while there is no work.
The chunks of a step reach the event loop in one call, while a draft service works or the device runs the next pass. A step
that raises fails all requests but those that wait in the queue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from eyas.api.request import Chunk, Request
from eyas.engine.engine import Engine, EngineLoad, StepReport
from eyas.errors import EyasError, InvalidRequest, Overloaded, RequestFailed, Unavailable, WorkerLost
from eyas.grammar.compiler import OutputMatchers

# How many cached blocks a verifier announces to routers, and how long after a step at the latest.
ANNOUNCED_BLOCKS = 1024
ANNOUNCE_SECONDS = 1.0
# Most requests that the log names when a step fails.
MAX_NAMED = 8

STEP_FAILED = "a step of the engine failed; see the verifier's log for the cause"

log = logging.getLogger(__name__)

OnStep = Callable[[StepReport, Sequence[Chunk]], Sequence[Chunk]]


@dataclass
class UnreadBudget:
    """The bytes of chunks that are not read yet, of all readers. Each may hold as many as all of them leave free."""

    max_bytes: float = math.inf
    num_bytes: int = 0

    def allows(self, num_held: int, num_bytes: int) -> bool:
        """Return whether a reader that holds `num_held` bytes may hold more."""
        return num_held + num_bytes <= self.max_bytes - self.num_bytes


@dataclass
class _Unread:
    """The chunks of a stream that its reader has not taken. is_cut: no further ones are kept."""

    queue: asyncio.Queue[Chunk | Exception] = field(default_factory=asyncio.Queue)
    num_bytes: int = 0
    is_cut: bool = False


class AsyncEngine:
    """Runner of an engine for the event loop that enters it: `async with AsyncEngine(engine) as async_engine`.

    When the engine cannot go on, the body is cancelled and the error raised in its place: RequestFailed for an engine that
    broke, Unavailable after `fail`.

    Args:
        on_step: called after every step, on the engine's thread, with its chunks; returns the chunks to deliver.
        max_unread_bytes: of the chunks that are not read yet, of all streams together.

    Attributes:
        unread: counts them, and those that wait to be read after they have left their stream.
    """

    def __init__(self, engine: Engine, on_step: OnStep | None = None, max_unread_bytes: float = math.inf) -> None:
        self._load = engine.load
        self.prefix_hashes: frozenset[int] = frozenset()
        self._engine = engine
        self._on_step = on_step
        self._step_started: float | None = None
        self._announce_at: float | None = None
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._running = True
        self._unsent: tuple[StepReport, Sequence[Chunk]] | None = None
        self._live: set[str] = set()
        self._streams: dict[str, _Unread] = {}
        self.unread = UnreadBudget(max_unread_bytes)
        self._owner: asyncio.Task[object] | None = None
        self._error: EyasError | None = None
        self._suspended: EyasError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def load(self) -> EngineLoad:
        """The engine's load after its last step, and how long the present step has taken."""
        load, started = self._load, self._step_started
        return load if started is None else replace(load, step_seconds=time.monotonic() - started)

    @property
    def stack(self) -> str:
        """Return where the engine's thread is now, as a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame))

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._error is None:
            await asyncio.to_thread(self.stop)
        if self._error is not None:  # the thread is not joined: it may hang in a step
            if self._owner is not None:
                self._owner.uncancel()
            raise self._error

    def start(self) -> None:
        """Start the engine's thread for the running event loop; the streams of another loop must have ended.

        Without `async with`, an engine that cannot go on fails its streams and cancels nothing.
        """
        self._event_loop = asyncio.get_running_loop()
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the engine's thread after the present step."""
        self._post(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    async def generate(self, *requests: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one or more requests, each up to its finish reason; ids must be unique among running requests.

        A request with structured_outputs is submitted once its grammar is compiled, and the output that it brings along is
        followed. Leaving the generator early cancels the requests before the next step. Raises what `Engine.submit` raises,
        InvalidRequest for constraints that leave no token, and Unavailable or RequestFailed when the engine fails.
        Overloaded ends a stream that is read too slowly: it may hold as many bytes as all streams leave free.
        """
        matchers = await self._followed(requests)
        if error := self._error or self._suspended:
            raise error
        stream = _Unread()
        for request in requests:
            self._streams[request.id] = stream
            self._post(partial(self._submit, request, matchers.get(request.id), stream))
        try:
            num_running = len(requests)
            while num_running:
                chunk = await stream.queue.get()
                if isinstance(chunk, Exception):
                    raise chunk
                self._count_unread(stream, -chunk.num_bytes)
                num_running -= chunk.finish_reason is not None
                if chunk.is_invalid:
                    raise InvalidRequest(chunk.message)
                yield chunk
        finally:
            self._count_unread(stream, -stream.num_bytes)
            for request in requests:
                del self._streams[request.id]
                self.cancel(request.id)

    async def _followed(self, requests: Sequence[Request]) -> dict[str, OutputMatchers]:
        """Return matchers by request id, made in threads of their own: neither the event loop nor a step waits for them."""
        structured = [request for request in requests if request.sampling.structured_outputs is not None]

        async def followed(request: Request) -> OutputMatchers:
            return await asyncio.wrap_future(self._engine.follow(request))

        matchers = await asyncio.gather(*map(followed, structured))
        return {request.id: own for request, own in zip(structured, matchers, strict=True)}

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, which yields its final chunk. Unknown ids are ignored."""
        self._post(partial(self._cancel, request_id))

    def fail(self, reason: str) -> None:
        """Fail every request with Unavailable, now and from now on, and end the body. May be called from any thread."""
        self._call_soon(self._fail, Unavailable(reason))

    def suspend(self, reason: str) -> None:
        """Fail every request, now and until `resume`, so that routers move them. In the event loop only.

        Each of those that are here may be the reason, so they end with WorkerLost, and new ones with Unavailable.
        """
        self._suspended = Unavailable(reason)
        for stream in self._streams.values():
            stream.queue.put_nowait(WorkerLost(reason))

    def resume(self) -> None:
        """Accept requests again."""
        self._suspended = None

    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the event loop, from any thread. A step that ends after `fail` may find the loop closed."""
        with suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(call, *args)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None or stream.is_cut:
                continue
            num_bytes = chunk.num_bytes
            if stream.num_bytes and not self.unread.allows(stream.num_bytes, num_bytes):
                stream.is_cut = True
                stream.queue.put_nowait(Overloaded("the output is read too slowly; the rest has to be generated again", 0.1))
                self.cancel(chunk.request_id)
            else:
                self._count_unread(stream, num_bytes)
                stream.queue.put_nowait(chunk)

    def _count_unread(self, stream: _Unread, num_bytes: int) -> None:
        stream.num_bytes += num_bytes
        self.unread.num_bytes += num_bytes

    def _fail(self, error: EyasError) -> None:
        self._error = error
        for stream in self._streams.values():
            stream.queue.put_nowait(error)
        self._post(self._stop)  # for a step that ends after all
        if self._owner is not None:
            self._owner.cancel()

    # Below: the engine's thread only.

    def _run(self) -> None:
        try:
            while self._running:
                self._run_once()
            self._send()
        except Exception:
            log.exception("the engine is broken")
            error = RequestFailed("the engine broke; the log has the traceback")
            self._call_soon(self._fail, error)

    def _run_once(self) -> None:
        """Apply the waiting commands and run one step."""
        for command in self._wait_for_commands():
            command()
        if self._running and self._engine.has_work:
            self._step_started = time.monotonic()
            chunks = self._step()
            self._step_started = None
            self._announce_at = self._announce_at or time.monotonic() + ANNOUNCE_SECONDS
            self._live.difference_update(self._engine.report.ended)
            self._unsent = self._engine.report, chunks
            if not self._engine.can_overlap:
                self._send()
        self._load = self._engine.load
        if self._announce_at is not None and time.monotonic() >= self._announce_at:
            self.prefix_hashes = frozenset(self._engine.scheduler.cache.cached_blocks(ANNOUNCED_BLOCKS))
            self._announce_at = None

    def _wait_for_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            timeout = max(self._announce_at - time.monotonic(), 0.0) if self._announce_at is not None else None
            self._wake.wait_for(lambda: self._inbox or self._engine.has_work, timeout)
            commands, self._inbox = self._inbox, []
        return commands

    def _send(self) -> None:
        """Hand over the chunks of the last step: at once if the next wait is a drafter's, else while the next pass runs."""
        if self._unsent is not None:
            (report, chunks), self._unsent = self._unsent, None
            try:
                if self._on_step is not None:
                    chunks = self._on_step(report, chunks)  # before the chunks can end their requests
            finally:  # an error ends the requests that run, and these may have ended
                self._call_soon(self._deliver, chunks)

    def _step(self) -> Sequence[Chunk]:
        """Run one step. If it raises, the running requests, or else the waiting ones, leave with an error chunk."""
        try:
            return self._engine.step(self._send)
        except Exception:
            self._send()
            if not self._live:
                raise
            failed = self._live - self._engine.waiting or self._live  # some may have ended within the step
            self._live = self._live - failed
            names = ", ".join(itertools.islice(sorted(failed), MAX_NAMED))
            message = "a step failed, and with it %d requests: %s"
            log.exception(message, len(failed), names, extra={"rate_limited": True})
            for request_id in failed:
                self._engine.cancel(request_id)
            return [Chunk(request_id, finish_reason="error", message=STEP_FAILED) for request_id in failed]

    def _submit(self, request: Request, matchers: OutputMatchers | None, stream: _Unread) -> None:
        try:
            self._engine.submit(request, matchers)
            self._live.add(request.id)
        except Exception as error:
            self._call_soon(stream.queue.put_nowait, error)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._engine.cancel(request_id)

    def _stop(self) -> None:
        self._running = False
