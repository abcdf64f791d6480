"""Calls in threads, each with a limit of processor time.

The limit counts the work of a call, not how long the machine was busy with something else. A call cannot be stopped: a late
one keeps its thread until it ends, and another thread takes its place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar

ResultT = TypeVar("ResultT")
Params = ParamSpec("Params")

# How often a wait looks at the clock of a call that is not done after its limit.
_POLL_SECONDS = 0.02
# Guards the size of new threads' stacks, a setting of the whole interpreter.
_STACK_SIZE = threading.Lock()


class Call(Future[ResultT], Generic[ResultT]):
    """A call that waits for a thread, runs or is done. is_late: whether it took too long."""

    def __init__(self, function: Callable[[], ResultT]) -> None:
        super().__init__()
        self.is_late = False
        self._function = function
        self._clock: int | None = None
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Processor time so far, 0 before it runs; wall time where the system has no clock of a single thread."""
        if self._started is None:
            return 0.0
        now = time.monotonic() if self._clock is None else time.clock_gettime(self._clock)
        return now - self._started

    def run(self) -> None:
        """Call the function, in the present thread."""
        if not self.set_running_or_notify_cancel():
            return
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._started = time.monotonic() if self._clock is None else time.clock_gettime(self._clock)
        try:
            result = self._function()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class BoundedCalls:
    """A few threads that run calls, first come first served. Safe for use from any thread.

    Args:
        stack_size: bytes of each thread's stack; 0: the system's size.
    """

    def __init__(self, num_threads: int, name: str, stack_size: int = 0) -> None:
        self._num_threads, self._name = num_threads, name
        self._stack_size = stack_size
        self._lock = threading.Lock()
        self._calls: deque[Call[object]] = deque()
        self._threads = self._new_threads()

    def submit(self, function: Callable[Params, ResultT], *args: Params.args, **kwargs: Params.kwargs) -> Call[ResultT]:
        """Run the function as soon as a thread is free."""
        call = Call(partial(function, *args, **kwargs))
        with self._lock:
            self._calls.append(call)  # type: ignore[arg-type]
            self._run_first_soon()
        return call

    def result(self, call: Call[ResultT], seconds: float) -> ResultT:
        """Wait for a call. Raises TimeoutError once it has taken that much processor time."""
        timeout = seconds
        while True:
            try:
                return call.result(timeout)
            except TimeoutError:
                if call.done():
                    return call.result()
                if call.seconds > seconds:
                    self._replace_thread(call)
                    raise
                timeout = _POLL_SECONDS

    def _replace_thread(self, late: Call[ResultT]) -> None:
        """Leave the threads to what runs in them, and run what waits in new ones."""
        with self._lock:
            if late.is_late:
                return
            late.is_late = True
            try:
                late_ones, self._threads = self._threads, self._new_threads()
            except RuntimeError:  # there are no more: what waits runs after the late call
                return
            late_ones.shutdown(wait=False)
            for _ in range(len(self._calls)):
                self._run_first_soon()

    def _run_first_soon(self) -> None:
        self._threads.submit(_run_first, self._calls)

    def _new_threads(self) -> ThreadPoolExecutor:
        """Return threads, all started if their stacks have a size: none may start later, with a stack of another size."""
        threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
        if not self._stack_size:
            return threads
        all_started = threading.Event()
        with _STACK_SIZE:
            before = threading.stack_size(self._stack_size)
            try:
                for _ in range(self._num_threads):
                    threads.submit(all_started.wait)  # no thread is idle, so each starts another one
            except RuntimeError:  # the system has no more, or the interpreter exits
                threads.shutdown(wait=False)
                raise
            finally:
                threading.stack_size(before)
                all_started.set()
        return threads


def _run_first(calls: deque[Call[object]]) -> None:
    """Run the first call that waits; none if another thread was faster."""
    try:
        call = calls.popleft()
    except IndexError:
        return
    call.run()
