"""Products by the matrix units of Intel's processors, AMX (docs/decisions/0050-half-weights.md).

A unit multiplies tiles, registers of up to 16 rows of 64 bytes:

    sums [16 rows x 16 outputs]  +=  numbers [16 rows x 32 inputs]  times  weights [32 inputs x 16 outputs]

in about the time in which a vector unit multiplies one of the rows. So 16 rows cost what one costs. Rows and weights are
bfloat16, in pairs of inputs; sums are float32. Each is taken in the order of the inputs, whatever tiles are multiplied
together: a row's result does not depend on the other rows.

Legend: R rows, K inputs, a multiple of STEP_INPUTS, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eyas.device.processor import has_matrix_units
from eyas.kernels.arguments import BLOCK_OUTPUTS, STEP_INPUTS
from eyas.kernels.cpu.compiling import compiles_for, kernel

FEATURES = "amx-tile", "amx-bf16"
# Whether kernels use the units. numba keeps it in what it compiles, so it is asked once.
HAS_UNITS = compiles_for(*FEATURES) and has_matrix_units()
# Rows of a tile, bytes of one of them, and of a whole tile of weights.
TILE_ROWS = 16
ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * ROW_BYTES
# Blocks that are multiplied together by few rows, so that a product does not wait for the sum before it.
BLOCKS_TOGETHER = 4
# Tiles of a weight that are fetched ahead.
TILES_AHEAD = 3

_BYTE = ir.IntType(8)
_WORD = ir.IntType(32)
_POINTER = _BYTE.as_pointer()


def _instruction(name: str) -> Callable[..., Any]:
    """Return what emits an instruction of the units. Its operands are literals, which name tiles; an address; other numbers.

    A processor without them gets none, and nothing stores weights for it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tiles = [_BYTE(kind.literal_value) for kind in signature.args if isinstance(kind, types.IntegerLiteral)]
        address, numbers = arguments[len(tiles) : len(tiles) + 1], arguments[len(tiles) + 1 :]
        operands = [*tiles, *(builder.inttoptr(place, _POINTER) for place in address), *numbers]
        if compiles_for(*FEATURES):
            kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)
        return context.get_dummy_value()

    return generate


def fetch(builder: Any, pointer: Any) -> None:
    """Emit a hint that the cache line at a pointer is read soon, no nearer than L2."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _WORD, _WORD, _WORD])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(prefetch, [builder.bitcast(pointer, _POINTER), _WORD(0), _WORD(1), _WORD(1)])  # to read, L2, data


@intrinsic
def _configure(typing, address):
    """Set how many rows and bytes each tile has: 64 bytes at an address, as Intel describes them for LDTILECFG."""
    return types.none(address), _instruction("ldtilecfg")


@intrinsic
def _release(typing):
    """Give the tiles up, so that the system need not keep them when it stops this thread."""
    return types.none(), _instruction("tilerelease")


@intrinsic(prefer_literal=True)
def _clear(typing, tile):
    """Fill a tile with zeros."""
    return types.none(tile), _instruction("tilezero")


@intrinsic(prefer_literal=True)
def _load(typing, tile, address, stride):
    """Read a tile from an address. stride: bytes between its rows."""
    return types.none(tile, types.int64, types.int64), _instruction("tileloadd64")


@intrinsic(prefer_literal=True)
def _store(typing, tile, address, stride):
    """Write a tile to an address. stride: bytes between its rows."""
    return types.none(tile, types.int64, types.int64), _instruction("tilestored64")


@intrinsic(prefer_literal=True)
def _multiply(typing, sums, numbers, weights):
    """Add the products of a tile of numbers and a tile of weights to a tile of sums."""
    return types.none(sums, numbers, weights), _instruction("tdpbf16ps")


@intrinsic
def _fetch_tile(typing, address):
    """Hint that the tile at an address is read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], _POINTER)
        for line in range(TILE_ROWS):
            fetch(builder, builder.gep(first, [ir.IntType(64)(line * ROW_BYTES)]))
        return context.get_dummy_value()

    return types.none(address), generate


@kernel(error_model="numpy")
def _lines(num_bytes):
    """Return memory aligned to a line of the cache: a tile's row across two lines takes twice as long to read."""
    memory = np.empty(num_bytes + ROW_BYTES, np.uint8)
    first = -memory.ctypes.data % ROW_BYTES
    return memory[first : first + num_bytes]


@kernel(error_model="numpy")
def pair_rows(left):
    """Return rows [R, K] rounded to bfloat16, as tiles: flat [R / TILE_ROWS, K / STEP_INPUTS, TILE_ROWS, STEP_INPUTS], the
    last part with the rows that are left; as words.
    """
    num_rows, num_inputs = left.shape
    packed = _lines(2 * num_rows * num_inputs).view(np.uint16)
    for first in range(0, num_rows, TILE_ROWS):
        end = min(first + TILE_ROWS, num_rows)
        part = packed[first * num_inputs : end * num_inputs].reshape(-1, end - first, STEP_INPUTS)
        for row in range(first, end):
            bits = left[row].view(np.uint32).reshape(-1, STEP_INPUTS)
            for step in range(len(bits)):
                for i in range(STEP_INPUTS):
                    part[step, row - first, i] = _rounded(bits[step, i])
    return packed.view(np.float32)


@kernel(error_model="numpy")
def _rounded(bits):
    """Return a float32 number's bits as those of the nearest bfloat16 number; of two that are as near, the even one.
    Numbers below the smallest normal one become 0, as in the units.
    """
    if bits & np.uint32(0x7F800000) == 0:
        return np.uint16(0)
    is_number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + rounding if is_number else bits | np.uint32(0x400000)) >> np.uint32(16))


@kernel(error_model="numpy")
def multiply_pairs(rows, num_rows, num_inputs, address, out, first_block, end_block):
    """Write columns of the product of rows and a transposed weight [N, K] to out [R, N].

    Args:
        rows: as `pair_rows` returns them.
        address: of the weight, tiles [N / BLOCK_OUTPUTS, K / STEP_INPUTS, STEP_INPUTS / 2, BLOCK_OUTPUTS, 2].
        first_block, end_block: which blocks of BLOCK_OUTPUTS columns.
    """
    num_steps = num_inputs // STEP_INPUTS
    shape = np.zeros(ROW_BYTES, np.uint8)
    first = 0
    while first < num_rows:
        count = num_rows - first
        if count >= 2 * TILE_ROWS:
            count = 2 * TILE_ROWS
            _set_rows(shape, TILE_ROWS)
            block = _multiply_parts(rows, first, num_steps, address, out, first_block, end_block)
        else:
            count = min(count, TILE_ROWS)
            _set_rows(shape, count)
            block = _multiply_part(rows, first, count, num_steps, address, out, first_block, end_block)
        for start in range(first, first + count, TILE_ROWS):
            _multiply_rest(rows, start, min(count, TILE_ROWS), num_steps, address, out, block, end_block)
        first += count
    _release()


@kernel(error_model="numpy")
def _set_rows(shape, count):
    """Configure the tiles: of sums 0 to 3 and of numbers 4 with `count` rows, the others with all."""
    shape[0] = 1  # the only palette that there is
    shape[16:32].view(np.uint16)[:] = ROW_BYTES
    shape[48:53] = count
    shape[53:56] = TILE_ROWS
    _configure(shape.ctypes.data)


@kernel(error_model="numpy")
def _fetch_tiles(tile, num_blocks, block_bytes, step, num_steps):
    """Fetch the tiles of blocks that follow in some steps."""
    # after a block's end comes the next one of these, so look after the last of them
    ahead = tile + TILES_AHEAD * TILE_BYTES + (0 if step + TILES_AHEAD < num_steps else (num_blocks - 1) * block_bytes)
    for n in range(num_blocks):
        _fetch_tile(ahead + n * block_bytes)


@kernel(error_model="numpy")
def _multiply_part(rows, first, count, num_steps, address, out, block, end_block):
    """Multiply `count` rows, at most a tile's, by BLOCKS_TOGETHER blocks at a time. Returns the first block that is left."""
    left = rows.ctypes.data + first * num_steps * ROW_BYTES
    column = out[first:].ctypes.data
    row_bytes = out.shape[1] * 4
    block_bytes = num_steps * TILE_BYTES
    while block + BLOCKS_TOGETHER <= end_block:
        start = address + block * block_bytes
        _clear(0)
        _clear(1)
        _clear(2)
        _clear(3)
        for step in range(num_steps):
            tile = start + step * TILE_BYTES
            if first == 0:  # later rows find the weights in the cache
                _fetch_tiles(tile, BLOCKS_TOGETHER, block_bytes, step, num_steps)
            _load(4, left + step * count * ROW_BYTES, ROW_BYTES)
            _load(5, tile, ROW_BYTES)
            _multiply(0, 4, 5)
            _load(5, tile + block_bytes, ROW_BYTES)
            _multiply(1, 4, 5)
            _load(5, tile + 2 * block_bytes, ROW_BYTES)
            _multiply(2, 4, 5)
            _load(5, tile + 3 * block_bytes, ROW_BYTES)
            _multiply(3, 4, 5)
        place = column + block * ROW_BYTES
        _store(0, place, row_bytes)
        _store(1, place + ROW_BYTES, row_bytes)
        _store(2, place + 2 * ROW_BYTES, row_bytes)
        _store(3, place + 3 * ROW_BYTES, row_bytes)
        block += BLOCKS_TOGETHER
    return block


@kernel(error_model="numpy")
def _multiply_parts(rows, first, num_steps, address, out, block, end_block):
    """Multiply two tiles of rows by two blocks at a time. Returns the first block that is left."""
    left = rows.ctypes.data + first * num_steps * ROW_BYTES
    lower = left + num_steps * TILE_BYTES
    column = out[first:].ctypes.data
    row_bytes = out.shape[1] * 4
    block_bytes = num_steps * TILE_BYTES
    while block + 2 <= end_block:
        start = address + block * block_bytes
        _clear(0)
        _clear(1)
        _clear(2)
        _clear(3)
        for step in range(num_steps):
            offset = step * TILE_BYTES
            if first == 0:  # later rows find the weights in the cache
                _fetch_tiles(start + offset, 2, block_bytes, step, num_steps)
            _load(4, left + offset, ROW_BYTES)
            _load(5, start + offset, ROW_BYTES)
            _multiply(0, 4, 5)
            _load(6, start + block_bytes + offset, ROW_BYTES)
            _multiply(1, 4, 6)
            _load(4, lower + offset, ROW_BYTES)
            _multiply(2, 4, 5)
            _multiply(3, 4, 6)
        place = column + block * ROW_BYTES
        _store(0, place, row_bytes)
        _store(1, place + ROW_BYTES, row_bytes)
        _store(2, place + TILE_ROWS * row_bytes, row_bytes)
        _store(3, place + TILE_ROWS * row_bytes + ROW_BYTES, row_bytes)
        block += 2
    return block


@kernel(error_model="numpy")
def _multiply_rest(rows, first, count, num_steps, address, out, block, end_block):
    """Multiply `count` rows, at most a tile's, by one block at a time."""
    left = rows.ctypes.data + first * num_steps * ROW_BYTES
    for rest in range(block, end_block):
        _clear(0)
        for step in range(num_steps):
            _load(4, left + step * count * ROW_BYTES, ROW_BYTES)
            _load(5, address + (rest * num_steps + step) * TILE_BYTES, ROW_BYTES)
            _multiply(0, 4, 5)
        _store(0, out[first:].ctypes.data + rest * BLOCK_OUTPUTS * 4, out.shape[1] * 4)
