"""Lays weights out for the CPU's products (docs/decisions/0038-compiled-cpu.md).

`eyas.models.backends.packed_weights` calls the kernel, and lays weights out plainly for libraries.
Legend: N outputs, K inputs, B blocks of BLOCK_OUTPUTS outputs.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint16, uint32

from eyas.kernels.arguments import BLOCK_OUTPUTS
from eyas.kernels.cpu.compiling import compile_all, kernel

# Exponent fields of 1.0 in float32 and in float16, and the first of float16 that means no number.
BIAS, HALF_BIAS, HALF_END = 127, 15, 31
# Bits of float32's fraction, and how many of them float16 lacks.
FRACTION, DROPPED = 23, 13


@kernel(error_model="numpy")
def narrow_blocks(bits, exponent, out):
    """Write a weight times 2**exponent as blocks of float16.

    Returns False, with `out` unfinished, if that changes a number.

    Args:
        bits: of float32 numbers as uint32, or of bfloat16 as uint16 [N, K], N at most B * BLOCK_OUTPUTS.
        out: bits of float16 [B, K, BLOCK_OUTPUTS]. Zeros fill the last block up.
    """
    num_outputs, num_inputs = bits.shape
    narrow = np.zeros((BLOCK_OUTPUTS, num_inputs), np.uint16)
    for block in range(out.shape[0]):
        first = block * BLOCK_OUTPUTS
        filled = min(BLOCK_OUTPUTS, num_outputs - first)
        narrow[filled:] = 0
        for output in range(filled):
            if not _narrow(bits[first + output], exponent, narrow[output]):
                return False
        for k in range(num_inputs):
            for output in range(BLOCK_OUTPUTS):
                out[block, k, output] = narrow[output, k]
    return True


@kernel(error_model="numpy")
def _narrow(bits, exponent, out):
    """Write numbers times 2**exponent as float16 [K]. Returns whether they stay the same numbers.

    Below 2**-14 float16 has no implied bit and units of 2**-24: there the fraction moves further down. No branch in the
    loop, so that it is compiled to vector instructions.
    """
    shift, raise_by = np.uint32(32 - 8 * bits.itemsize), np.int32(exponent - BIAS + HALF_BIAS)
    changed = np.uint32(0)
    for k in range(len(bits)):
        wide = np.uint32(bits[k]) << shift  # bfloat16 is the upper half of float32
        size = wide & np.uint32(0x7FFFFFFF)
        stored = np.int32(size >> np.uint32(FRACTION))
        raised = np.int32(stored > 0) * np.int32(stored + raise_by)
        fraction = np.uint32((size & np.uint32(0x7FFFFF)) | (np.uint32(stored > 0) << np.uint32(FRACTION)))
        dropped = np.uint32(min(max(np.int32(DROPPED + 1 - raised), np.int32(DROPPED)), np.int32(FRACTION + 1)))
        kept = np.uint32(fraction >> dropped)
        lifted = np.uint32(max(np.int32(raised - 1), np.int32(0)))
        out[k] = np.uint16(((wide >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(kept + (lifted << np.uint32(10))))
        changed |= np.uint32(kept << dropped) ^ fraction
        changed |= np.uint32((raised >= HALF_END) | ((stored == 0) & (size != 0)))
    return changed == 0


def compile_kernels() -> None:
    """Compile the kernels of packing, once for each installation; other processes and later ones load the result."""
    compile_all({narrow_blocks: (uint16[:, ::1], int64, uint16[:, :, ::1])})
    narrow_blocks.compile((uint32[:, ::1], int64, uint16[:, :, ::1]))
