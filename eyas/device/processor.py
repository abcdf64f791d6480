"""Reads from the system which instructions this processor has."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

PROCESSORS = Path("/proc/cpuinfo")
# Of each half precision, the words for processors that multiply it many times as fast as float32. Vector units
# (avx512_bf16, avx512_fp16, asimdhp) are at most twice as fast, which gains nothing over float32 passes (decision 0050).
HALF_UNITS = {"bfloat16": {"amx_bf16", "bf16"}, "float16": {"amx_fp16"}}
# Units that pay in training, whose products have many rows: twice as fast is enough there.
TRAINING_UNITS = HALF_UNITS["bfloat16"] | {"avx512_bf16"}
# Linux's call arch_prctl on x86-64, its request for a state of the processor, and the state of AMX's tiles.
ARCH_PRCTL = 158
REQUEST_STATE = 0x1023
TILES = 18


@cache
def is_intel() -> bool:
    """Return whether this processor is of Intel."""
    return "GenuineIntel" in _words()


@cache
def converts_halves() -> bool:
    """Return whether this processor converts half-precision floats in its vector units."""
    return {"avx2", "f16c", "fma"} <= _words()


@cache
def multiplies_halves(dtype: str) -> bool:
    """Return whether the processor has matrix units for a half precision, see HALF_UNITS."""
    return bool(HALF_UNITS.get(dtype, set()) & _words())


@cache
def trains_in_bfloat16() -> bool:
    """Return whether large products in bfloat16 take half of the time that they take in float32, or less."""
    return bool(TRAINING_UNITS & _words())


@cache
def multiplies_and_adds() -> bool:
    """Return whether one instruction multiplies and adds, so that sums in the order of inputs take no longer than a
    library's.
    """
    return platform.machine() in ("aarch64", "arm64") or {"avx2", "fma"} <= _words()


@cache
def adds_products_of_bytes() -> bool:
    """Return whether one instruction adds four products of bytes to each of 16 integers."""
    return {"avx512f", "avx512_vnni"} <= _words()


@cache
def has_matrix_units() -> bool:
    """Return whether this processor multiplies tiles of bfloat16 numbers, and Linux lets this process do so from now on."""
    if not {"amx_tile", "amx_bf16"} <= _words() or platform.system() != "Linux":
        return False
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILES)
    return refused == 0


def _words() -> set[str]:
    return set(PROCESSORS.read_text().split()) if PROCESSORS.exists() else set()
