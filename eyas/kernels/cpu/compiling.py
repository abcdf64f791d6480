"""Compiles the kernels of the CPU with numba, once for each processor (docs/decisions/0038-compiled-cpu.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.codegen import get_host_cpu_features

# File that a process locks while it compiles, in the folder of the results.
LOCK = ".kernels.lock"

log = logging.getLogger(__name__)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function with these options of numba.

    The result is kept for later processes, unless numba finds no folder that it may write to: an installation that is read
    only, for a user without a home.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, **options)(function)

    return compiled


def compiles_for(*features: str) -> bool:
    """Return whether numba compiles for processors with these features: those of this one, unless its settings say less."""
    found = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return {f"+{feature}" for feature in features} <= set(found.split(","))


def compile_all(kernels: Mapping[Any, tuple[Any, ...]]) -> None:
    """Compile kernels for arguments of these types, or load what an earlier process compiled.

    Processes that start together take turns, so that one compiles and the others load.
    """
    first = next(iter(kernels))
    folder = first._cache.cache_path  # None where numba finds no folder that it may write to
    name = first.py_func.__module__.rpartition(".")[2]
    with ExitStack() as stack:
        if folder:
            lock = stack.enter_context(Path(folder, LOCK).open("w"))
            with suppress(ImportError):  # of what Windows does not have
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder or not any(Path(folder).glob(f"{name}.*.nbi")):
            log.info("compiling kernels for this processor, up to a minute")
        for kernel, types in kernels.items():
            kernel.compile(types)
