"""The host's cores, numba, and the freed memory that this process keeps where malloc is glibc's.

Between two steps a process that computes on the CPU keeps what it frees, and a service gives it back from time to time.
By default every thread has a heap of its own, and large blocks go back to the kernel at once, which clears them again.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from eyas.errors import install_command

# Microseconds of processor time that the control group may use in a period, or "max"; and the period.
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# Parameters of mallopt(3), from malloc.h, and the largest values that two of them take.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER_TRIM, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 32 << 20

# What a process does until it is ready. compiling: kernels and graphs, also to time them. checking: the draft head.
StartPhase = Literal["loading", "checking", "compiling"]
# What the log lines about phases begin with.
PHASE_PREFIX = "start: "

log = logging.getLogger(__name__)


def report_phase(phase: StartPhase) -> None:
    """Log what a process does until it is ready. `eyas serve` reads it there."""
    log.info("%s%s", PHASE_PREFIX, phase)


@cache
def has_numba() -> bool:
    """Return whether kernels of the CPU can be compiled. A numba that cannot be imported counts for none."""
    if find_spec("numba") is None:
        return False
    try:
        importlib.import_module("numba")
    except Exception as error:  # with another NumPy than it knows, say: numba raises several kinds
        remedy = f"run: {install_command('cpu')}"
        log.warning("numba cannot be imported, so the CPU runs without compiled kernels; %s (%s)", remedy, error)
        return False
    return True


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def num_cores() -> int:
    """Return the CPU cores that this process may use: those that it may run on, but no more than the
    quota of its container.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # there is none, or it is "max"
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def keep_freed_memory() -> None:
    """Keep memory up to the peak, until `trim_heaps`.

    Each layer of a pass over many sequences takes and frees megabytes. Where they go back to the kernel, a layer with 64
    sequences takes 2,500 page faults, more time than all other work on them.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def share_heaps() -> None:
    """Let all threads share two heaps, so that what one frees serves the others. glibc alone has eight heaps a core."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def trim_heaps() -> None:
    """Return freed memory to the system, also what lies between used blocks.

    What `keep_freed_memory` kept goes too; the next step takes it again.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
