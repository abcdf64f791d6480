"""The thread that owns an Engine: requests in, chunks out, from one event loop. Knows no gRPC.

Submits and cancels wait in an inbox and are applied between steps; the thread sleeps while there is nothing to do. The
chunks of a step cross to the event loop in one call. A step that raises fails the requests of that moment only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Self

from eyas.engine.engine import Engine, StepReport
from eyas.errors import RequestFailed, Unavailable
from eyas.request import Chunk, Request
from eyas.rpc.messages import Load

ANNOUNCED_BLOCKS = 1024
ANNOUNCE_SECONDS = 1.0

log = logging.getLogger(__name__)

Stepped = Callable[[StepReport, Sequence[Chunk]], None]

FAILED = "a step of the engine failed; the verifier's log says why"


def _nothing(report: StepReport, chunks: Sequence[Chunk]) -> None:
    """For those who want to hear of no step."""


class AsyncEngine:
    """Runs an engine for the event loop that enters it: `async with AsyncEngine(engine) as loop`.

    Should the engine fail with nothing to blame it on, the body is cancelled and RequestFailed raised in its place; should
    it lose what it computes with, Unavailable.
    """

    def __init__(self, engine: Engine, stepped: Stepped = _nothing) -> None:
        """stepped: told of every step, on the engine's thread."""
        self._engine = engine
        self._stepped = stepped
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._live: set[str] = set()
        self._streams: dict[str, asyncio.Queue[Chunk | Unavailable]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._running = True
        self._broken = False
        self._lost: Unavailable | None = None
        self._verdicts: set[Future[None]] = set()
        self.engine_load = engine.load
        self._load = _load(engine)
        self._began: float | None = None
        self.prefixes: frozenset[int] = frozenset()
        self._announce_at: float | None = None

    @property
    def load(self) -> Load:
        """How busy the engine was after its last step, and for how long it has been in one now."""
        began = self._began
        return self._load if began is None else replace(self._load, step_seconds=time.monotonic() - began)

    async def __aenter__(self) -> Self:
        self._event_loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        self._thread.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._lost is not None and self._owner is not None:
            self._owner.uncancel()
            raise self._lost  # the thread may be caught in a step for ever
        self._post(self._stop)
        await asyncio.to_thread(self._thread.join)
        if self._broken and self._owner is not None:
            self._owner.uncancel()
            raise RequestFailed("the engine broke; the log has the traceback")

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request up to the one with a finish reason; its id must be unique among running requests.

        Leaving the generator early cancels the request before the next step. Raises what `Engine.submit` raises, and
        Unavailable at any moment.
        """
        if self._lost is not None:
            raise self._lost
        stream = self._streams[request.id] = asyncio.Queue()
        verdict: Future[None] = Future()
        self._post(partial(self._submit, request, verdict))
        try:
            await self._heard(verdict)
            finish = None
            while finish is None:
                chunk = await stream.get()
                if isinstance(chunk, Unavailable):
                    raise chunk
                finish = chunk.finish_reason
                yield chunk
        finally:
            del self._streams[request.id]
            self._post(partial(self._cancel, request.id))

    async def _heard(self, verdict: Future[None]) -> None:
        """Wait for the engine's thread to take or refuse a request."""
        self._verdicts.add(verdict)
        try:
            await asyncio.wrap_future(verdict)
        except asyncio.CancelledError:
            raise self._lost or asyncio.CancelledError from None
        finally:
            self._verdicts.discard(verdict)

    def lose(self, reason: str) -> None:
        """Fail every request, now and from now on, and end the body. May be called from any thread."""
        self._event_loop.call_soon_threadsafe(self._lose, Unavailable(reason))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if stream := self._streams.get(chunk.request_id):
                stream.put_nowait(chunk)

    def _lose(self, error: Unavailable) -> None:
        self._lost = error
        for stream in self._streams.values():
            stream.put_nowait(error)
        for verdict in self._verdicts:
            verdict.cancel()
        if self._owner is not None:
            self._owner.cancel()

    def _break(self) -> None:
        self._broken = True
        if self._owner is not None:
            self._owner.cancel()

    # Below: the engine's thread only.

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        except Exception:
            log.exception("the engine is broken")
            self._event_loop.call_soon_threadsafe(self._break)

    def _turn(self) -> None:
        for command in self._commands():
            command()
        if self._running and self._engine.has_work:
            self._began = time.monotonic()
            chunks = self._step()
            self._began = None
            self._announce_at = self._announce_at or time.monotonic() + ANNOUNCE_SECONDS
            self._live.difference_update(chunk.request_id for chunk in chunks if chunk.finish_reason)
            self._stepped(self._engine.report, chunks)  # before those who wait may end their requests
            self._event_loop.call_soon_threadsafe(self._deliver, chunks)
        self.engine_load = self._engine.load
        self._load = _load(self._engine)
        if self._announce_at is not None and time.monotonic() >= self._announce_at:
            self.prefixes, self._announce_at = frozenset(self._engine.cached_blocks(ANNOUNCED_BLOCKS)), None

    def _commands(self) -> list[Callable[[], None]]:
        with self._wake:
            patience = max(self._announce_at - time.monotonic(), 0.0) if self._announce_at is not None else None
            self._wake.wait_for(lambda: self._inbox or self._engine.has_work, patience)
            commands, self._inbox = self._inbox, []
        return commands

    def _step(self) -> list[Chunk]:
        try:
            return self._engine.step()
        except Exception:
            if not self._live:
                raise
            log.exception("a step failed, and with it %d requests", len(self._live))
            return self._fail_all()

    def _fail_all(self) -> list[Chunk]:
        """Every live request ends with an error, and leaves the engine at its next step."""
        for request_id in self._live:
            self._engine.cancel(request_id)
        return [Chunk(request_id, finish_reason="error", message=FAILED) for request_id in self._live]

    def _submit(self, request: Request, verdict: Future[None]) -> None:
        if not verdict.set_running_or_notify_cancel():
            return
        try:
            self._engine.submit(request)
        except Exception as error:
            verdict.set_exception(error)
        else:
            self._live.add(request.id)
            verdict.set_result(None)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._engine.cancel(request_id)

    def _stop(self) -> None:
        self._running = False


def _load(engine: Engine) -> Load:
    load = engine.load
    return Load(load.num_running, load.num_waiting, load.free_kv_tokens, engine.max_running)
