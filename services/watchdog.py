"""Ends a process whose interpreter does not run any more: held by native code, or by a call that blocks the event loop.

A small process watches, because a thread here could wait for the interpreter's lock itself. It imports nothing of Eyas:
this file is its program too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

# Parts of the timeout from one beat, or one look, to the next, and the most seconds of it.
_BEATS_PER_TIMEOUT = 10
_MAX_INTERVAL_S = 1.0
# The stacks are written in that time, then nothing but SIGKILL is left.
_DUMP_S = 5.0


class Watchdog:
    """Beats of this process's event loop, and the process that ends this one when they stay away for `timeout_s`.

    Start it once the process serves: before, loading and compiling may keep the event loop for long. SIGALRM ends the
    process then; its handler writes the stacks of all threads to stderr and needs no lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        if os.getpid() == 1:
            _exit_at_alarm()
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        self._start()
        self._timer = loop.call_soon(self._beat)

    def stop(self) -> None:
        """End the watch."""
        self._timer.cancel()
        self._end()
        faulthandler.unregister(signal.SIGALRM)

    def _start(self) -> None:
        reader, self._beats = os.pipe()
        os.set_blocking(self._beats, False)
        command = [sys.executable, "-I", "-S", __file__, str(reader), str(os.getpid()), str(self._timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[reader], process_group=0)
        os.close(reader)

    def _end(self) -> None:
        os.close(self._beats)
        self._process.kill()  # a forked child may keep the pipe open
        self._process.wait()

    def _beat(self) -> None:
        try:
            os.write(self._beats, b".")
        except BlockingIOError:  # somebody has stopped the other process
            pass
        except BrokenPipeError:
            _report("ERROR watchdog: the process that watches this one has ended; starting another\n")
            self._end()
            self._start()
        self._timer = self._loop.call_later(_interval_s(self._timeout_s), self._beat)


def _exit_at_alarm() -> None:
    """Let the C library end this process at SIGALRM.

    The first process of a container has no default action for signals, and is immune to SIGKILL from inside.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGALRM, ctypes.cast(library._exit, ctypes.c_void_p))


def _interval_s(timeout_s: float) -> float:
    return min(timeout_s / _BEATS_PER_TIMEOUT, _MAX_INTERVAL_S)


def _watch(beats: int, pid: int, timeout_s: float) -> None:
    """Wait until the beats end with the process, or stay away for `timeout_s`; then end it.

    Time in which the process is stopped, or traced by a debugger, does not count, nor does a pause of the whole machine.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service that was asked to stop still drains
    interval_s, silent_s, looked_at = _interval_s(timeout_s), 0.0, time.monotonic()
    while silent_s < timeout_s:
        if os.getppid() != pid:  # another process may have its number by now
            return
        has_beats = bool(select.select([beats], [], [], interval_s)[0])
        if has_beats and not os.read(beats, 4096):
            return
        now = time.monotonic()
        silent_s = 0.0 if has_beats or _is_stopped(pid) else silent_s + min(now - looked_at, 2 * interval_s)
        looked_at = now
    _report(
        f"CRITICAL watchdog: the interpreter of process {pid} has not run its event loop for {timeout_s:g} s: native code "
        "holds its lock, or a call blocks the loop. The process ends by SIGALRM; the stacks of its threads follow\n"
    )
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGALRM)
        if not select.select([beats], [], [], _DUMP_S)[0]:  # readable once the process and its end of the pipe are gone
            os.kill(pid, signal.SIGKILL)


def _report(line: str) -> None:
    """Write a line to stderr, unless its disk is full or its reader does not keep up: neither may keep the process alive."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, line.encode())


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process. Only Linux says so."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(") ")[2][:1] in ("T", "t")
    except OSError:
        return False


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
