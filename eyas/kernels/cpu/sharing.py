"""Lets threads share a kernel's work on the CPU (docs/decisions/0038-compiled-cpu.md).

Threads that run one kernel share its phases: each takes the next part that no other has taken, and waits at the end of the
phase until all parts are finished. A thread that comes late, or that the system does not run, delays the others by the one
part that it holds. A phase has two counters, on cache lines of their own: parts that are taken, and parts that are finished.
If a thread fails, it sets all counters to FAILED: no part is left, and nothing is waited for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eyas.arrays import Ints
from eyas.kernels.cpu.compiling import kernel

# Numbers of a phase in an array of counters, and where the second counter is.
PHASE_SIZE, FINISHED = 16, 8
# Looks at a counter before a waiting thread leaves its core to others.
MAX_LOOKS = 1000
# Counter of a pass that failed; above any number of parts, with room for more.
FAILED = 1 << 62


@intrinsic
def _add_one(typing, counters, index):
    """Add 1 to counters[index], in one order for all threads. Returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", builder.gep(array.data, [arguments[1]]), ir.IntType(64)(1), "seq_cst")

    return types.int64(counters, index), generate


@intrinsic
def _read(typing, counters, index):
    """Return counters[index] as the other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return types.int64(counters, index), generate


@intrinsic
def _pause(typing):
    """Return the hint to an x86 processor that a loop waits for a number in memory; nothing on others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if llvm.get_process_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _leave_core(typing):
    """Let another thread run on this core, where the system has a call for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if hasattr(os, "sched_yield"):
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@kernel()
def next_part(tickets, phase):
    """Return the next part of a phase that no thread has taken; the parts are numbered from 0."""
    return _add_one(tickets, PHASE_SIZE * phase)


@kernel()
def finish_part(tickets, phase):
    """Count a part as finished. Returns how many are."""
    return _add_one(tickets, PHASE_SIZE * phase + FINISHED) + 1


@kernel()
def wait_for_parts(tickets, phase, count):
    """Return once `count` parts are finished."""
    looks = 0
    while _read(tickets, PHASE_SIZE * phase + FINISHED) < count:
        looks += 1
        if looks < MAX_LOOKS:
            _pause()
        else:
            _leave_core()


class _Call:
    """A kernel that threads run together. error: of the first thread that failed."""

    def __init__(self, kernel: Callable[..., object], arguments: tuple[object, ...], tickets: Ints) -> None:
        self._kernel, self._arguments, self._tickets = kernel, arguments, tickets
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it in this thread, too. If that fails, the other threads stop at the end of their parts."""
        try:
            self._kernel(*self._arguments)
        except BaseException as error:
            self.error = self.error or error
            self._tickets.fill(FAILED)


Calls: TypeAlias = SimpleQueue[_Call | None]


class Helpers:
    """Threads that run kernels together with the thread that asks. They end when this object is dropped."""

    def __init__(self, count: int) -> None:
        self.num_threads = 1 + count
        self._queues: list[tuple[Calls, threading.Lock]] = []  # a helper holds its lock while it runs a call
        for _ in range(count):
            queue: Calls = SimpleQueue()
            is_running = threading.Lock()
            threading.Thread(target=_help, args=(queue, is_running), name="layers", daemon=True).start()
            weakref.finalize(self, queue.put, None)
            self._queues.append((queue, is_running))

    def run(self, kernel: Callable[..., object], *arguments: object, tickets: Ints) -> None:
        """Run kernel(*arguments, tickets, num_threads), whose work the threads share. tickets: counters, all zero.

        A helper that comes too late finds nothing to do. A call that its helper has not begun makes room for the next one:
        one that never comes keeps no memory. Raises what the kernel raises in any thread, once no other one works on it.
        """
        call = _Call(kernel, (*arguments, tickets, self.num_threads), tickets)
        for queue, _ in self._queues:
            if not queue.empty():
                with suppress(Empty):
                    queue.get_nowait()
            queue.put(call)
        call.run()
        if call.error is not None:
            for _, is_running in self._queues:
                with is_running:
                    pass
            try:
                raise call.error
            finally:
                del call  # the error's traceback holds this frame, and so the arguments


def _help(queue: Calls, is_running: threading.Lock) -> None:
    while (call := queue.get()) is not None:
        with is_running:
            call.run()
        del call  # not kept until the next one
