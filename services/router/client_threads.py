"""Threads for the work that clients' texts cause, such as parsing, rendering and encoding. Callers share them fairly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from eyas.errors import Overloaded
from eyas.rpc.fair_share import FairSlots

ResultT = TypeVar("ResultT")
Params = ParamSpec("Params")

# Calls of one caller that may wait; a request has one at a time.
MAX_WAITING = 4096


class ClientThreads:
    """A few threads that no caller can hold all of. Each caller has a queue of its own, and the queues take turns.

    A caller is an API key, or an address where there are no keys. For one event loop.

    Args:
        num_threads: 0 takes one for each core, from 2 to 4.
    """

    def __init__(self, num_threads: int = 0) -> None:
        num_threads = num_threads or min(4, max(2, os.cpu_count() or 1))
        self._slots = FairSlots(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="client-text")

    async def run(
        self, caller: str, function: Callable[Params, ResultT], *args: Params.args, **kwargs: Params.kwargs
    ) -> ResultT:
        """Call the function in a thread once it is the caller's turn. Raises Overloaded if too many calls of it wait.

        A thread cannot be stopped. So a call that is not awaited any more counts until it ends.
        """
        if self._slots.num_waiting((caller,)) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests of this key or address wait to be read; send fewer at once", 1.0)
        await self._slots.take((caller,))
        loop, context = asyncio.get_running_loop(), copy_context()

        def give(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._slots.give, (caller,))

        call = self._threads.submit(partial(context.run, function, *args, **kwargs))
        call.add_done_callback(give)
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """Drop the calls that have not begun; the threads end with those that have."""
        self._threads.shutdown(wait=False, cancel_futures=True)
