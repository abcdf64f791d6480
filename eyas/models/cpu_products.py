"""Products of float32 rows with float16 weights on the CPU, in LLVM's vectors (docs/decisions/0038-compiled-cpu.md).

numba compiles no loop so that a tile of sums stays in registers. So `_take_rows` emits the tile itself: each step loads a
row of some blocks of the weight, converts it, and adds its products with one number of each row.

    sums of 16 rows, 1 block    [16 x 16]  +=  rows[:, k] times weight[block, k]        k = 0, 1, ... K - 1
    sums of 1 row, 8 blocks     [1 x 128]

Each sum is taken in the order of k by fused multiply-adds, whatever the tile: a row's result does not depend on the other
rows. Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eyas.models.cpu import BLOCK_OUTPUTS
from eyas.sampling.cpu_kernels import kernel

# Blocks of a tile by its rows. Its sums, and what they are made of, fit into the registers.
BLOCKS_OF_512_BITS = {16: 1, 12: 2, 8: 3, 7: 3, 6: 4, 5: 4, 4: 4, 3: 4, 2: 8, 1: 8}
BLOCKS_OF_256_BITS = {6: 1, 5: 1, 4: 1, 3: 1, 2: 2, 1: 4}
# Bytes of a weight that all rows are multiplied by before the next ones.
GROUP_BYTES = 2**18
# Inputs after which rows lie in the same sets of the cache, and how many floats apart they are then laid.
ALIASED, PADDING = 512, 16

_INT, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, BLOCK_OUTPUTS), ir.VectorType(_HALF, BLOCK_OUTPUTS)


@kernel(error_model="numpy")
def multiply_halves(left, address, out):
    """Rows left [R, K] times the transposed weight [N, K], to out [R, N]; N is a multiple of BLOCK_OUTPUTS.

    address: of the weight as `eyas.models.cpu.in_blocks` lays it out, float16 [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS].
    """
    num_rows, num_inputs = left.shape
    num_blocks, rows = out.shape[1] // BLOCK_OUTPUTS, left
    if num_inputs % ALIASED == 0 and num_rows > 4:
        rows = np.empty((num_rows, num_inputs + PADDING), np.float32)
        for r in range(num_rows):
            for k in range(num_inputs):
                rows[r, k] = left[r, k]
    group = max(GROUP_BYTES // (2 * BLOCK_OUTPUTS * num_inputs), 8)
    for start in range(0, num_blocks, group):
        first, count = 0, min(group, num_blocks - start)
        while first < num_rows:
            first += _take_rows(rows, first, num_rows - first, num_inputs, address, start, count, out)


@intrinsic
def _take_rows(typing, rows, first, num_left, num_inputs, address, start, count, out):
    """Multiply rows from `first` on by `count` blocks of the weight from `start` on. Returns how many rows: a tile's."""
    signature = types.int64(rows, first, num_left, num_inputs, address, start, count, out)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, first, num_left, num_inputs, address, start, count, out = arguments
        left, found = (context.make_array(signature.args[i])(context, builder, a) for i, a in ((0, rows), (7, out)))
        width, size = (cgutils.unpack_tuple(builder, each.shape, 2)[1] for each in (left, found))
        skipped = builder.mul(builder.mul(start, num_inputs), _INT(BLOCK_OUTPUTS))
        tile = _Tile(
            builder, builder.gep(left.data, [builder.mul(first, width)]), width,
            builder.gep(builder.inttoptr(address, _HALF.as_pointer()), [skipped]), num_inputs,
            builder.gep(found.data, [builder.add(builder.mul(first, size), builder.mul(start, _INT(BLOCK_OUTPUTS)))]), size,
        )  # fmt: skip
        has_512_bits = llvm.get_host_cpu_features().get("avx512f", False)
        taken, done = cgutils.alloca_once(builder, _INT), builder.append_basic_block("done")
        for num_rows, num_blocks in (BLOCKS_OF_512_BITS if has_512_bits else BLOCKS_OF_256_BITS).items():
            with builder.if_then(builder.icmp_signed(">=", num_left, _INT(num_rows))):
                tile.emit_all(num_rows, num_blocks, count)
                builder.store(_INT(num_rows), taken)
                builder.branch(done)
                builder.position_at_end(builder.append_basic_block("unused"))
        builder.branch(done)
        builder.position_at_end(done)
        return builder.load(taken)

    return signature, generate


class _Tile:
    """Emits the code of tiles: rows with `width` floats between them, a weight, and outputs with `size` between them."""

    def __init__(self, builder: Any, rows: Any, width: Any, weight: Any, num_inputs: Any, out: Any, size: Any) -> None:
        self.builder, self.rows, self.width, self.weight = builder, rows, width, weight
        self.num_inputs, self.out, self.size = num_inputs, out, size
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{BLOCK_OUTPUTS}f32")

    def emit_all(self, num_rows: int, num_blocks: int, count: Any) -> None:
        """The products of rows with `count` blocks, `num_blocks` at a time, and then one at a time."""
        b = self.builder
        whole = b.mul(b.sdiv(count, _INT(num_blocks)), _INT(num_blocks))
        with cgutils.for_range_slice(b, _INT(0), whole, _INT(num_blocks), _INT) as (block, _):
            self.emit(num_rows, num_blocks, block)
        if num_blocks > 1:
            with cgutils.for_range_slice(b, whole, count, _INT(1), _INT) as (block, _):
                self.emit(num_rows, 1, block)

    def emit(self, num_rows: int, num_blocks: int, block: Any) -> None:
        """The products of rows with blocks from `block` on."""
        b, at = self.builder, self._at
        step = b.mul(self.num_inputs, _INT(BLOCK_OUTPUTS))
        rows = [at(self.rows, b.mul(self.width, _INT(r))) for r in range(num_rows)]
        weights = [at(self.weight, b.mul(step, b.add(block, _INT(n)))) for n in range(num_blocks)]
        entry, loop, end = b.block, b.append_basic_block("k"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        k, sums = b.phi(_INT), [[b.phi(_FLOATS) for _ in weights] for _ in rows]
        vectors = [self._converted(at(weight, b.mul(k, _INT(BLOCK_OUTPUTS)))) for weight in weights]
        numbers = (self._spread(b.load(at(row, k))) for row in rows)
        added = [
            [b.call(self.fma, [number, vector, total]) for vector, total in zip(vectors, totals, strict=True)]
            for number, totals in zip(numbers, sums, strict=True)
        ]
        following = b.add(k, _INT(1))
        for phi, first, later in [(k, _INT(0), following)] + [
            (total, ir.Constant(_FLOATS, [0.0] * BLOCK_OUTPUTS), new)
            for totals, news in zip(sums, added, strict=True)
            for total, new in zip(totals, news, strict=True)
        ]:
            phi.add_incoming(first, entry)
            phi.add_incoming(later, loop)
        b.cbranch(b.icmp_signed("<", following, self.num_inputs), loop, end)
        b.position_at_end(end)
        for r, totals in enumerate(added):
            for n, total in enumerate(totals):
                place = b.add(b.mul(self.size, _INT(r)), b.mul(b.add(block, _INT(n)), _INT(BLOCK_OUTPUTS)))
                b.store(total, b.bitcast(at(self.out, place), _FLOATS.as_pointer())).align = 4

    def _at(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [offset])

    def _converted(self, pointer: Any) -> Any:
        """A row of a block in float32."""
        halves = self.builder.load(self.builder.bitcast(pointer, _HALVES.as_pointer()))
        halves.align = 2
        return self.builder.fpext(halves, _FLOATS)

    def _spread(self, number: Any) -> Any:
        """A number in all places of a vector."""
        nothing, first = ir.Constant(_FLOATS, ir.Undefined), ir.IntType(32)(0)
        mask = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK_OUTPUTS), [0] * BLOCK_OUTPUTS)
        return self.builder.shuffle_vector(self.builder.insert_element(nothing, number, first), nothing, mask)
