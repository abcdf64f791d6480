"""Lays weights out for the CPU's products (docs/decisions/0038-compiled-cpu.md).

`eyas.models.backends.packed_weights` calls the kernel, and lays weights out plainly for libraries.
Legend: N outputs, K inputs, B blocks of BLOCK_OUTPUTS outputs.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int8

from eyas.kernels.arguments import BLOCK_OUTPUTS, GROUP_INPUTS
from eyas.kernels.cpu.compiling import compile_all, kernel

# Largest integer of 8 bits that a weight becomes, and inputs that share a scale in many formats.
LARGEST_BYTE, FORMAT_INPUTS = 127, 32
# Of weights that are rounded; a smaller one is no normal number.
SMALLEST_SCALE = np.finfo(np.float32).tiny


@kernel(error_model="numpy")
def narrow_groups(weight, is_exact, out, scales):
    """Write a weight as blocks of 8-bit integers with a scale for each GROUP_INPUTS inputs of an output.

    Returns False, with `out` unfinished, if that changes a number and is_exact is set, and for numbers that are not finite.

    Args:
        weight: float32 [N, K], N at most B * BLOCK_OUTPUTS.
        is_exact: whether integers times scales must be the same numbers, else the nearest ones of LARGEST_BYTE steps.
        out: groups [B, G, (GROUP_INPUTS + SCALE_INPUTS) * BLOCK_OUTPUTS], each integers by input, and then scales. Zeros
            fill the last ones up.
        scales: the same memory as float32.
    """
    num_outputs = len(weight)
    first_scale = GROUP_INPUTS * BLOCK_OUTPUTS // 4
    for block in range(out.shape[0]):
        for group in range(out.shape[1]):
            out[block, group] = 0
            start = group * GROUP_INPUTS
            for output in range(min(BLOCK_OUTPUTS, num_outputs - block * BLOCK_OUTPUTS)):
                row = weight[block * BLOCK_OUTPUTS + output]
                numbers = row[start : start + GROUP_INPUTS]
                scale = np.float32(0.0)
                largest = _largest(numbers)
                if largest == np.inf:
                    return False
                if is_exact and largest > 0:
                    around = start // FORMAT_INPUTS * FORMAT_INPUTS
                    scale = _exact_scale(numbers, largest, _largest(row[around : around + FORMAT_INPUTS]))
                    if scale == 0:
                        return False
                elif largest > 0:
                    # No denormal number: its quotients would be no bytes.
                    scale = max(largest / np.float32(LARGEST_BYTE), SMALLEST_SCALE)
                    if scale * np.float32(LARGEST_BYTE) == np.inf:
                        return False
                scales[block, group, first_scale + output] = scale
                if scale > 0:
                    for i in range(len(numbers)):
                        out[block, group, i * BLOCK_OUTPUTS + output] = np.int8(np.rint(numbers[i] / scale))
    return True


@kernel(error_model="numpy")
def _exact_scale(numbers, largest, largest_around):
    """Return a scale by which numbers are integers up to LARGEST_BYTE, bit for bit; 0 if there is none.

    Quantised weights that were unpacked have one, if their format has no minima: Q4_0, Q5_0, Q6_K and Q8_0 of GGUF. The
    largest number is k times its scale, and if k is below 64, twice k times half the scale: so k from 64 on are tried.

    Args:
        largest: size of the largest of them.
        largest_around: size of the largest of those that share a scale in many formats.
    """
    for k in (LARGEST_BYTE, 64):
        if _has_scale(numbers, largest_around / np.float32(k)):
            return largest_around / np.float32(k)
    for k in range(LARGEST_BYTE, 63, -1):
        if _has_scale(numbers, largest / np.float32(k)):
            return largest / np.float32(k)
    return np.float32(0.0)


@kernel(error_model="numpy")
def _has_scale(numbers, scale):
    """Return whether numbers are integers up to LARGEST_BYTE times a scale."""
    misses = 0
    for i in range(len(numbers)):
        integer = np.rint(numbers[i] / scale)
        misses += integer * scale != numbers[i] or abs(integer) > LARGEST_BYTE
    return misses == 0


@kernel(error_model="numpy")
def _largest(numbers):
    """Return the size of the largest number; infinity if one is no number."""
    largest = np.float32(0.0)
    for i in range(len(numbers)):
        if np.isnan(numbers[i]):
            return np.float32(np.inf)
        largest = max(largest, abs(numbers[i]))
    return largest


def compile_kernels() -> None:
    """Compile the kernels of packing, once for each installation; other processes and later ones load the result."""
    compile_all({narrow_groups: (float32[:, ::1], boolean, int8[:, :, ::1], float32[:, :, ::1])})
