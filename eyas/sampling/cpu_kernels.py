"""Ranking on the CPU, compiled with numba, and what other kernels share (docs/decisions/0038-compiled-cpu.md).

Arrays are contiguous. Legend: N rows, V vocabulary, k candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

LOG2_E = np.float32(1.4426950408889634)
# Bounds of the argument of `exp`: beyond them 2 to that power is no normal float32.
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.0)
# Added to a float32 and taken away again, it leaves the nearest whole number.
ROUNDER = np.float32(12582912.0)
# Scores whose highest is compared at once.
BLOCK = 64
# File that a process locks while it compiles, in the folder of the results.
LOCK = ".kernels.lock"

log = logging.getLogger(__name__)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"}, inline="always")
def exp(x):
    """e to the power of x <= HIGHEST, to 2 units in the last place; e to LOWEST below that. Cephes' polynomial."""
    x = x if x > LOWEST else LOWEST
    whole = (x * LOG2_E + ROUNDER) - ROUNDER
    r = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * (r * r) + r + np.float32(1.0)
    return y * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def highest_of(x):
    """The highest of x [n], which may hold infinities."""
    highest = x[0]
    for i in range(len(x)):
        highest = max(highest, x[i])
    return highest


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def sum_of(x):
    """The sum of x [n]."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def top_k(scores, values, ids):
    """The k highest of each row of scores [N, V], best first, the lowest id on a tie: to values and ids [N, k]."""
    k, width = ids.shape[1], scores.shape[1]
    assert k <= width, "fewer scores than candidates"
    for n in range(scores.shape[0]):
        row, best, where, count = scores[n], values[n], ids[n], 0
        for start in range(0, width, BLOCK):
            block = row[start : start + BLOCK]
            if count == k and not highest_of(block) > best[k - 1]:
                continue
            for i in range(len(block)):
                score = block[i]
                if count == k and not score > best[k - 1]:
                    continue
                place = count if count < k else k - 1
                count = min(count + 1, k)
                while place and score > best[place - 1]:
                    best[place], where[place] = best[place - 1], where[place - 1]
                    place -= 1
                best[place], where[place] = score, start + i


def compile_all(kernels: Mapping[Any, tuple[Any, ...]]) -> None:
    """Compile kernels for arguments of these types, or load what an earlier process compiled.

    Processes that start together take turns, so that one compiles and the others load.
    """
    folder = next(iter(kernels))._cache.cache_path  # None where numba finds no folder that it may write to
    with ExitStack() as stack:
        if folder:
            lock = stack.enter_context(Path(folder, LOCK).open("w"))
            with suppress(ImportError):  # of what Windows does not have
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder or not any(Path(folder).glob("*.nbi")):
            log.info("compiling kernels for this processor, about 10 s")
        for kernel, types in kernels.items():
            kernel.compile(types)
