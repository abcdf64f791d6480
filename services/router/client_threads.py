"""Threads for the work that clients' texts cause, such as parsing, rendering and encoding. Callers share them fairly."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from eyas.errors import Overloaded
from eyas.rpc.admission import FairLimit

ResultT = TypeVar("ResultT")
Params = ParamSpec("Params")

# Calls of one caller that may wait; a request has one at a time.
MAX_WAITING = 4096


class ClientThreads:
    """A few threads that no caller can hold all of. Each caller has a queue of its own, and the queues take turns.

    A caller is an API key, or an address where there are no keys. For one event loop.
    """

    def __init__(self, num_threads: int = 0) -> None:
        """num_threads: 0 takes one for each core, from 2 to 4."""
        num_threads = num_threads or min(4, max(2, os.cpu_count() or 1))
        self._limit = FairLimit(num_threads, 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="client-text")
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(
        self, caller: str, function: Callable[Params, ResultT], *args: Params.args, **kwargs: Params.kwargs
    ) -> ResultT:
        """Call the function in a thread once it is the caller's turn. Raises Overloaded if too many calls of it wait.

        A thread cannot be stopped. So a call that is not awaited any more counts until it ends.
        """
        if caller in self._waiting or not self._limit.fits((caller,), 1):
            await self._wait(caller)
        else:
            self._limit.take((caller,), 1)
        loop, context = asyncio.get_running_loop(), copy_context()

        def give(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._give, caller)

        call = self._threads.submit(partial(context.run, function, *args, **kwargs))
        call.add_done_callback(give)
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """Drop the calls that have not begun; the threads end with those that have."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, caller: str) -> None:
        queue = self._waiting.setdefault(caller, deque())
        if len(queue) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests of this key or address wait to be read; send fewer at once", 1.0)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._give(caller)
            raise

    def _give(self, caller: str) -> None:
        """Give a thread back, and grant those that are free to callers in turn."""
        self._limit.take((caller,), -1)
        for other in list(self._waiting):
            queue = self._waiting[other]
            while queue and queue[0].done():  # its client has left
                queue.popleft()
            if queue and self._limit.fits((other,), 1):
                self._limit.take((other,), 1)
                queue.popleft().set_result(None)
                self._waiting.move_to_end(other)
            if not queue:
                del self._waiting[other]
