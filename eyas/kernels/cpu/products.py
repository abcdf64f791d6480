"""Products on the CPU (docs/decisions/0038-compiled-cpu.md).

Weights are float16, float32 or integers of 8 bits, rows are float32. numba compiles no loop so that a tile of sums stays in
registers. So `_Tile` emits the tile itself: each step loads a row of some blocks of the weight, converts it, and adds its
products with one number of each row.

    sums of 16 rows, 1 block    [16 x 16]  +=  rows[:, k] times weight[block, k]        k = 0, 1, ... K - 1
    sums of 1 row, 8 blocks     [1 x 128]

Each sum is taken in the order of k by fused multiply-adds, whatever the tile: a row's result does not depend on the other
rows. `_DotTile` rounds rows to 8 bits as well, and adds four products of integers by one instruction. `_PairTile` does what
`matrix_units` does, in the same order.

Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eyas.kernels.arguments import (
    BLOCK_OUTPUTS,
    BYTES,
    DOTS,
    FLOATS,
    GROUP_INPUTS,
    HALVES,
    PAIRS,
    QUAD_INPUTS,
    SCALE_INPUTS,
    STEP_INPUTS,
)
from eyas.kernels.cpu.compiling import compiles_for, kernel
from eyas.kernels.cpu.matrix_units import HAS_UNITS, TILE_ROWS, fetch, multiply_pairs, pair_rows
from eyas.kernels.cpu.sharing import finish_part, next_part, wait_for_parts

# Blocks of a tile by its rows. Its sums, and what they are made of, fit into the registers.
BLOCKS_OF_512_BITS = {16: 1, 12: 2, 8: 3, 7: 3, 6: 4, 5: 4, 4: 4, 3: 4, 2: 8, 1: 8}
BLOCKS_OF_256_BITS = {6: 1, 5: 1, 4: 1, 3: 1, 2: 2, 1: 4}
DOT_BLOCKS = {16: 1, 12: 1, 10: 1, 8: 2, 7: 2, 6: 2, 5: 2, 4: 2, 3: 3, 2: 4, 1: 8}
# Bytes of a weight that all rows are multiplied by before the next ones.
GROUP_BYTES = 2**18
# These blocks are a multiple of it, so that tiles of several blocks leave few.
GROUP_BLOCKS = 8
# Rows up to which vectors multiply by a weight for matrix units, and blocks of their tiles.
MOST_VECTOR_ROWS = 2
PAIR_BLOCKS_OF_512_BITS = {2: 4, 1: 8}
PAIR_BLOCKS_OF_256_BITS = {1: 2}
# How many inputs ahead a block is fetched, or a later block behind its end.
INPUTS_AHEAD = 128
# How many keys or values ahead one is fetched.
PLACES_AHEAD = 32
# Values that all tiles of queries take before the next ones.
VALUES_AT_A_TIME = 32
# Rows whose numbers lie side by side for a tile, as `pair_rows` has them, too.
PART_ROWS = TILE_ROWS
# Words of a group of a rounded row, and the size below which all of a group becomes 0: quotients by it are finite.
ROW_WORDS, SMALLEST_SIZE = GROUP_INPUTS // QUAD_INPUTS + 2, float(np.finfo(np.float32).tiny) * 128

_INT, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, BLOCK_OUTPUTS), ir.VectorType(_HALF, BLOCK_OUTPUTS)
_BYTES = ir.VectorType(ir.IntType(8), BLOCK_OUTPUTS)
_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, BLOCK_OUTPUTS)


@kernel()
def num_blocks_of(count):
    """Return the number of blocks that hold `count` outputs."""
    return (count + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS


@kernel(error_model="numpy")
def multiply_weight(left, address, stored, out):
    """Multiply rows left [R, K] by the transposed weight [N, K], to out [R, N]; N is a multiple of BLOCK_OUTPUTS.

    Args:
        address: of the weight as `packed_weights.in_blocks` lays it out, [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS]; for PAIRS
            see `multiply_pairs`.
        stored: FLOATS, HALVES, BYTES, DOTS or PAIRS; of integers, SCALE_INPUTS rows of scales follow each GROUP_INPUTS
            rows of a block.
    """
    multiply_blocks(left, address, stored, out, 0, out.shape[1] // BLOCK_OUTPUTS)


@kernel(error_model="numpy")
def multiply_blocks(left, address, stored, out, first_block, end_block):
    """Write the columns of `multiply_weight` that are made of some blocks of the weight."""
    num_rows, num_inputs = left.shape
    itemsize = 4 if stored == FLOATS else 2 if stored in (HALVES, PAIRS) else 1
    group = max(GROUP_BYTES // (itemsize * BLOCK_OUTPUTS * num_inputs) // GROUP_BLOCKS * GROUP_BLOCKS, GROUP_BLOCKS)
    if stored == PAIRS:
        _multiply_pairs(left, address, out, first_block, end_block, group)
        return
    rows = _rounded_rows(left) if stored == DOTS else pack_rows(left)
    num_groups = _num_groups(num_inputs)
    for start in range(first_block, end_block, group):
        first, count = 0, min(group, end_block - start)
        while first < num_rows:
            if stored == HALVES:
                first += _take_halves(rows, first, num_inputs, address, start, count, out)
            elif stored == FLOATS:
                first += _take_floats(rows, first, num_inputs, address, start, count, out)
            elif stored == BYTES:
                first += _take_bytes(rows, first, num_inputs, address, start, count, out)
            else:
                first += _take_dots(rows, first, num_groups, address, start, count, out)


@kernel(error_model="numpy")
def _multiply_pairs(left, address, out, first_block, end_block, group):
    """Run `multiply_blocks` for a weight of PAIRS, `group` blocks at a time: by matrix units; by vectors, with equal
    results, where there are none and for few rows, with which units only wait for memory.
    """
    num_rows, num_inputs = left.shape
    rows = pair_rows(left)
    for start in range(first_block, end_block, group):
        end = min(start + group, end_block)
        first = 0
        if HAS_UNITS and num_rows > MOST_VECTOR_ROWS:
            multiply_pairs(rows, num_rows, num_inputs, address, out, start, end)
            first = num_rows
        while first < num_rows:
            first += _take_pairs(rows, first, num_inputs // STEP_INPUTS, address, start, end - start, out)


@kernel(error_model="numpy")
def pack_rows(left):
    """Return rows [R, K] flat, with the numbers of PART_ROWS rows side by side: [R / PART_ROWS, K, PART_ROWS], the
    last part with the rows that are left. Tiles read them so from one address, and no two rows from the same cache sets.
    """
    num_rows, num_inputs = left.shape
    packed = np.empty(num_rows * num_inputs, np.float32)
    for first in range(0, num_rows, PART_ROWS):
        end = min(first + PART_ROWS, num_rows)
        packed[first * num_inputs : end * num_inputs].reshape(num_inputs, end - first)[:] = left[first:end].T
    return packed


@kernel(error_model="numpy")
def _num_groups(num_inputs):
    """Return how many groups of inputs share scales."""
    return (num_inputs + GROUP_INPUTS - 1) // GROUP_INPUTS


@kernel(error_model="numpy")
def _rounded_rows(left):
    """Return rows [R, K] as integers of 8 bits, the largest of a group as 127: words of 4 bytes as `pack_rows` lays out G
    * ROW_WORDS numbers.

    A group has its integers, QUAD_INPUTS in a word; what to add to a sum of their products as weights are stored with 128
    added; and the float32 scale. A group with a number that is none has no finite scale.
    """
    num_rows, num_inputs = left.shape
    num_groups = _num_groups(num_inputs)
    words = np.empty(num_rows * num_groups * ROW_WORDS, np.float32)
    row = np.zeros(num_groups * GROUP_INPUTS, np.float32)
    for r in range(num_rows):
        row[:num_inputs] = left[r]
        part = r // PART_ROWS * PART_ROWS
        width = min(num_rows - part, PART_ROWS)
        word = (part * num_groups + r - part) * ROW_WORDS
        for group in range(num_groups):
            _round_group(row, group * GROUP_INPUTS, words, word)
            word += width * ROW_WORDS
    return words


@intrinsic
def _round_group(typing, row, start, words, word):
    """Write a group of row [K], from `start` on, as `_rounded_rows` describes it, to ROW_WORDS words from `word` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, words = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2))
        b, out = builder, builder.bitcast(builder.gep(words, [arguments[3]]), _WORD.as_pointer())

        def call(name: str, result: Any, argument: Any) -> Any:
            kind = ir.FunctionType(result, [argument.type])
            return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}"), [argument])

        def spread(number: Any) -> Any:
            first = b.insert_element(_FLOATS(ir.Undefined), number, _WORD(0))
            return b.shuffle_vector(first, first, _WORDS([0] * GROUP_INPUTS))

        numbers = b.load(b.bitcast(b.gep(row, [arguments[1]]), _FLOATS.as_pointer()), align=4)
        # sizes of floats are in the order of their bits
        sizes = b.and_(b.bitcast(numbers, _WORDS), _WORDS([0x7FFFFFFF] * GROUP_INPUTS))
        size = b.bitcast(call("vector.reduce.umax.v16i32", _WORD, sizes), _FLOAT)
        is_normal = b.fcmp_ordered(">", size, _FLOAT(SMALLEST_SIZE))
        by = b.select(is_normal, b.fdiv(_FLOAT(127.0), size), _FLOAT(0.0))
        integers = b.fptosi(call("rint.v16f32", _FLOATS, b.fmul(numbers, spread(by))), _WORDS)
        total = call("vector.reduce.add.v16i32", _WORD, integers)
        b.store(b.trunc(integers, _BYTES), b.bitcast(out, _BYTES.as_pointer()), align=4)
        b.store(b.mul(total, _WORD(-128)), b.gep(out, [_INT(ROW_WORDS - 2)]))
        scale = b.bitcast(b.gep(out, [_INT(ROW_WORDS - 1)]), _FLOAT.as_pointer())
        b.store(b.fdiv(size, _FLOAT(127.0)), scale)
        return context.get_dummy_value()

    return types.none(row, start, words, word), generate


class _Tile:
    """Emitter of the code of tiles: rows as `pack_rows` lays them out, `width` of them side by side, a right side, and
    outputs with `size` between them.

    right: address of the right side in blocks of LOADED, [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS].
    """

    LOADED: Any = _HALVES
    # Numbers of a row in a step.
    NUMBERS = 1
    # Rows from which on a tile fetches ahead, see `prefetch`.
    FETCHING_ROWS = 2
    # Inputs of a loop's step that are fetched ahead, and cache lines of one.
    STEPS_AHEAD, STEP_LINES = INPUTS_AHEAD, 1
    BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS = BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS

    def __init__(self, builder: Any, rows: Any, width: Any, right: Any, num_inputs: Any, out: Any, size: Any) -> None:
        self.builder, self.rows, self.width, self.right = builder, rows, width, right
        self.num_inputs, self.out, self.size = num_inputs, out, size
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{BLOCK_OUTPUTS}f32")

    @classmethod
    def take(cls, typing, rows, first, num_inputs, right, start, count, out):
        """Return an intrinsic that multiplies rows from `first` on by `count` blocks from `start` on. It returns how many
        rows it takes: a tile's.
        """
        signature = types.int64(rows, first, num_inputs, right, start, count, out)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, first, num_inputs, right, start, count, out = arguments
            left, found = (context.make_array(signature.args[i])(context, builder, a) for i, a in ((0, rows), (6, out)))
            num_rows, size = cgutils.unpack_tuple(builder, found.shape, 2)
            # of the part of packed rows that holds the first one
            part = builder.and_(first, _INT(-PART_ROWS))
            row = builder.sub(first, part)
            width = builder.sub(num_rows, part)
            width = builder.select(builder.icmp_signed("<", width, _INT(PART_ROWS)), width, _INT(PART_ROWS))
            num_left = builder.sub(width, row)
            place = builder.mul(_INT(cls.NUMBERS), builder.add(builder.mul(part, num_inputs), row))
            tile = cls(
                builder, builder.gep(left.data, [place]), width, right, num_inputs,
                builder.gep(found.data, [builder.mul(first, size)]), size,
            )  # fmt: skip
            taken, done = cgutils.alloca_once(builder, _INT), builder.append_basic_block("done")
            tiles = cls.BLOCKS_OF_512_BITS if compiles_for("avx512f") else cls.BLOCKS_OF_256_BITS
            for num_rows, num_blocks in tiles.items():
                with builder.if_then(builder.icmp_signed(">=", num_left, _INT(num_rows))):
                    tile.emit_all(num_rows, num_blocks, start, builder.add(start, count))
                    builder.store(_INT(num_rows), taken)
                    builder.branch(done)
                    builder.position_at_end(builder.append_basic_block("unused"))
            builder.branch(done)
            builder.position_at_end(done)
            return builder.load(taken)

        return signature, generate

    def emit_all(self, num_rows: int, num_blocks: int, start: Any, end: Any) -> None:
        """Emit the products of rows with blocks from `start` to `end`, `num_blocks` at a time, and then one at a time."""
        b, size = self.builder, _INT(num_blocks)
        whole = b.add(start, b.mul(b.sdiv(b.sub(end, start), size), size))
        with cgutils.for_range_slice(b, start, whole, size, _INT) as (block, _):
            self.emit(num_rows, num_blocks, block)
        if num_blocks > 1:
            with cgutils.for_range_slice(b, whole, end, _INT(1), _INT) as (block, _):
                self.emit(num_rows, 1, block)

    def emit(self, num_rows: int, num_blocks: int, block: Any) -> None:
        """Emit the products of rows with blocks from `block` on."""
        b = self.builder
        blocks = self.blocks([b.add(block, _INT(n)) for n in range(num_blocks)])
        places = [[self._place(row, b.add(block, _INT(n))) for n in range(num_blocks)] for row in range(num_rows)]
        firsts = [[self.first(place) for place in row] for row in places]
        entry, loop, end = b.block, b.append_basic_block("k"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        k, sums = b.phi(_INT), [[b.phi(_FLOATS) for _ in blocks] for _ in range(num_rows)]
        if num_rows >= self.FETCHING_ROWS:
            self.prefetch(blocks, k)
        added = self.added(blocks, k, sums)
        following = b.add(k, _INT(1))
        for phi, first, later in [(k, _INT(0), following)] + [
            (total, begun, new)
            for row in zip(sums, firsts, added, strict=True)
            for total, begun, new in zip(*row, strict=True)
        ]:
            phi.add_incoming(first, entry)
            phi.add_incoming(later, b.block)
        b.cbranch(b.icmp_signed("<", following, self.num_inputs), loop, end)
        b.position_at_end(end)
        for row, totals in zip(places, added, strict=True):
            for place, total in zip(row, totals, strict=True):
                b.store(total, place).align = 4

    def first(self, place: Any) -> Any:
        """Return the sums of a row and block before the first input. place: where they go in the end."""
        return ir.Constant(_FLOATS, [0.0] * BLOCK_OUTPUTS)

    def number(self, k: Any, row: int, index: int = 0) -> Any:
        """Return one of a row's numbers of step k, in all places of a vector."""
        b = self.builder
        step = b.mul(self.width, b.mul(k, _INT(self.NUMBERS)))
        return self._spread(b.load(self._at(self.rows, b.add(step, _INT(row * self.NUMBERS + index)))))

    def added(self, blocks: list[Any], k: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """Return sums by row and block, with the products of input k added."""
        vectors = self.vectors(blocks, k)
        numbers = (self.number(k, row) for row in range(len(sums)))
        return [
            [self.builder.call(self.fma, [number, vector, total]) for vector, total in zip(vectors, totals, strict=True)]
            for number, totals in zip(numbers, sums, strict=True)
        ]

    def blocks(self, numbers: list[Any]) -> list[Any]:
        """Return what `vectors` takes of blocks: here pointers to their first vectors."""
        b, vectors = self.builder, self.builder.inttoptr(self.right, self.LOADED.as_pointer())
        return [self._at(vectors, b.mul(self.row(self.num_inputs), number)) for number in numbers]

    def row(self, k: Any) -> Any:
        """Return the row of a block that holds input k."""
        return k

    def vectors(self, blocks: list[Any], k: Any) -> list[Any]:
        """Return the weights of input k in float32."""
        return [self._loaded(self._at(block, k)) for block in blocks]

    def prefetch(self, blocks: list[Any], k: Any) -> None:
        """Fetch what is read soon, so that memory works while rows are multiplied by what is there.

        A single row of floats waits for memory anyway, and the processor's own prefetching serves it better.
        """
        b = self.builder
        ahead = self.row(self.ahead(blocks, k))
        for block in blocks:
            for line in range(self.STEP_LINES):
                fetch(b, self._at(block, b.add(ahead, _INT(line))))

    def ahead(self, blocks: list[Any], k: Any) -> Any:
        """Return the step of blocks that is fetched at step k."""
        b = self.builder
        ahead = b.add(k, _INT(self.STEPS_AHEAD))
        if len(blocks) == 1:
            return ahead
        # after a block's end comes the next one of this tile, so look after the last of them
        others = b.mul(self.num_inputs, _INT(len(blocks) - 1))
        return b.select(b.icmp_signed("<", ahead, self.num_inputs), ahead, b.add(ahead, others))

    def _at(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [offset])

    def _place(self, row: int, block: Any) -> Any:
        """Return a pointer to a row's outputs of a block."""
        b = self.builder
        place = b.add(b.mul(self.size, _INT(row)), b.mul(block, _INT(BLOCK_OUTPUTS)))
        return b.bitcast(self._at(self.out, place), _FLOATS.as_pointer())

    def _loaded(self, pointer: Any) -> Any:
        """Return a vector in float32."""
        vector = self.builder.load(pointer)
        vector.align = 2 if self.LOADED is _HALVES else 4
        return self.builder.fpext(vector, _FLOATS) if self.LOADED is _HALVES else vector

    def _spread(self, number: Any) -> Any:
        """Return a number in all places of a vector."""
        nothing = ir.VectorType(number.type, BLOCK_OUTPUTS)(ir.Undefined)
        mask = _WORDS([0] * BLOCK_OUTPUTS)
        return self.builder.shuffle_vector(self.builder.insert_element(nothing, number, _WORD(0)), nothing, mask)


class _WeightTile(_Tile):
    """A weight in blocks of float32."""

    LOADED = _FLOATS


class _ByteTile(_Tile):
    """A weight in blocks of 8-bit integers. GROUP_INPUTS rows of a block are followed by their scales: float32
    [BLOCK_OUTPUTS].

    Integers are multiplied by their scales before rows are, so that sums equal the float32 weight's, bit for bit.
    """

    LOADED = _BYTES
    FETCHING_ROWS = 1

    def blocks(self, numbers: list[Any]) -> list[Any]:
        b, vectors = self.builder, self.builder.inttoptr(self.right, self.LOADED.as_pointer())
        num_groups = b.sdiv(b.add(self.num_inputs, _INT(GROUP_INPUTS - 1)), _INT(GROUP_INPUTS))
        size = b.mul(num_groups, _INT(GROUP_INPUTS + SCALE_INPUTS))
        return [self._at(vectors, b.mul(size, number)) for number in numbers]

    def row(self, k: Any) -> Any:
        b = self.builder
        return b.add(k, b.mul(b.udiv(k, _INT(GROUP_INPUTS)), _INT(SCALE_INPUTS)))

    def vectors(self, blocks: list[Any], k: Any) -> list[Any]:
        b, row, found = self.builder, self.row(k), []
        scales = b.add(b.sub(row, b.and_(k, _INT(GROUP_INPUTS - 1))), _INT(GROUP_INPUTS))  # behind the rows of k's group
        for block in blocks:
            scale = b.load(b.bitcast(self._at(block, scales), _FLOATS.as_pointer()))
            scale.align = 4
            found.append(b.fmul(self._loaded(self._at(block, row)), scale))
        return found

    def _loaded(self, pointer: Any) -> Any:
        vector = self.builder.load(pointer)
        vector.align = 1
        return self.builder.sitofp(vector, _FLOATS)


class _DotTile(_Tile):
    """A weight in blocks of 8-bit integers with 128 added: words of QUAD_INPUTS inputs by output. Rows are `_rounded_rows`.

    A step takes a group of inputs: its products are added as integers, and times both scales to the float32 sum.
    """

    LOADED = _WORDS
    NUMBERS = ROW_WORDS
    FETCHING_ROWS = 1
    BLOCKS_OF_512_BITS = DOT_BLOCKS
    STEPS_AHEAD, STEP_LINES = 2 * INPUTS_AHEAD // GROUP_INPUTS, (GROUP_INPUTS + SCALE_INPUTS) // QUAD_INPUTS

    def row(self, k: Any) -> Any:
        return self.builder.mul(k, _INT(self.STEP_LINES))

    def added(self, blocks: list[Any], k: Any, sums: list[list[Any]]) -> list[list[Any]]:
        b = self.builder
        firsts = [self._at(block, self.row(k)) for block in blocks]
        lines = [[self._loaded(self._at(first, _INT(i))) for i in range(self.STEP_LINES)] for first in firsts]
        found: list[list[Any]] = []
        for row, totals in enumerate(sums):
            *words, scale = (self.number(k, row, i) for i in range(ROW_WORDS))
            *quads, offset = (b.bitcast(word, _WORDS) for word in words)
            found.append([])
            for (*weights, scales), total in zip(lines, totals, strict=True):
                products = offset
                for numbers, quad in zip(weights, quads, strict=True):
                    products = self._dot(products, numbers, quad)
                scaled = b.fmul(b.sitofp(products, _FLOATS), b.bitcast(scales, _FLOATS))
                found[-1].append(b.call(self.fma, [scaled, scale, total]))
        return found

    def _dot(self, total: Any, weights: Any, numbers: Any) -> Any:
        """Add the products of unsigned bytes of weights with signed ones of numbers to the words of a total."""
        b = self.builder
        if compiles_for("avx512vnni"):
            kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
            name = "llvm.x86.avx512.vpdpbusd.512"
            return b.call(cgutils.get_or_insert_function(b.module, kind, name), [total, weights, numbers])
        for shift in (24, 16, 8, 0):
            number = b.ashr(b.shl(numbers, self._words(shift)), self._words(24))
            weight = b.and_(b.lshr(weights, self._words(24 - shift)), self._words(255))
            total = b.add(total, b.mul(weight, number))
        return total

    def _words(self, number: int) -> Any:
        return _WORDS([number] * BLOCK_OUTPUTS)


class _PairTile(_Tile):
    """A weight in tiles of bfloat16 pairs, as `multiply_pairs` reads them. Rows are those of `pair_rows`.

    A step takes STEP_INPUTS inputs, and adds the products of even and of odd ones apart, as the units do. But the units take
    numbers below the smallest normal one as 0.
    """

    LOADED = _WORDS
    NUMBERS = STEP_LINES = STEP_INPUTS // 2
    BLOCKS_OF_512_BITS = PAIR_BLOCKS_OF_512_BITS
    BLOCKS_OF_256_BITS = PAIR_BLOCKS_OF_256_BITS
    STEPS_AHEAD = INPUTS_AHEAD // STEP_INPUTS

    def row(self, k: Any) -> Any:
        return self.builder.mul(k, _INT(self.STEP_LINES))

    def prefetch(self, blocks: list[Any], k: Any) -> None:
        """Prefetch nothing: `added` does."""

    def number(self, k: Any, row: int, index: Any = 0) -> Any:
        """Return a pair of a row's inputs of step k in all places."""
        b = self.builder
        step = b.mul(self.width, b.mul(k, _INT(self.NUMBERS)))
        place = b.add(step, b.add(_INT(row * self.NUMBERS), index))
        return b.bitcast(self._spread(b.load(self._at(self.rows, place))), _WORDS)

    def added(self, blocks: list[Any], k: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """Return sums by row and block, with the products of a step added, in a loop over its pairs."""
        b = self.builder
        zero = ir.Constant(_FLOATS, [0.0] * BLOCK_OUTPUTS)
        ahead = self.row(self.ahead(blocks, k))
        entry, loop, end = b.block, b.append_basic_block("pair"), b.append_basic_block("pairs")
        b.branch(loop)
        b.position_at_end(loop)
        pair = b.phi(_INT)
        apart = [[(b.phi(_FLOATS), b.phi(_FLOATS)) for _ in blocks] for _ in sums]
        for block in blocks:
            fetch(b, self._at(block, b.add(ahead, pair)))
        weights = [self._halves(self._loaded(self._at(block, b.add(self.row(k), pair)))) for block in blocks]
        found: list[list[Any]] = []
        for row, totals in enumerate(apart):
            numbers = self._halves(self.number(k, row, pair))
            found.append([])
            for weight, halves in zip(weights, totals, strict=True):
                added = [b.call(self.fma, each) for each in zip(numbers, weight, halves, strict=True)]
                for phi, new in zip(halves, added, strict=True):
                    phi.add_incoming(zero, entry)
                    phi.add_incoming(new, loop)
                found[-1].append(added)
        following = b.add(pair, _INT(1))
        pair.add_incoming(_INT(0), entry)
        pair.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, _INT(self.STEP_LINES)), loop, end)
        b.position_at_end(end)
        return [
            [b.fadd(total, b.fadd(*halves)) for total, halves in zip(totals, own, strict=True)]
            for totals, own in zip(sums, found, strict=True)
        ]

    def _halves(self, words: Any) -> tuple[Any, Any]:
        """Return the two bfloat16 numbers of words in float32."""
        b = self.builder
        even = b.shl(words, _WORDS([16] * BLOCK_OUTPUTS))
        odd = b.and_(words, _WORDS([0xFFFF0000] * BLOCK_OUTPUTS))
        return b.bitcast(even, _FLOATS), b.bitcast(odd, _FLOATS)


class _KeyTile(_WeightTile):
    """Keys in blocks of float32: few of them."""

    BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS = {16: 1, 8: 2, 4: 4, 2: 4, 1: 4}, {4: 1, 2: 2, 1: 4}

    def prefetch(self, blocks: list[Any], k: Any) -> None:
        """Prefetch nothing: `transpose_keys` has just written them."""


class _ValueTile(_KeyTile):
    """Values, rows [N] that lie anywhere, whose products are added to the outputs. right: address of their addresses
    [K + PLACES_AHEAD].
    """

    FETCHING_ROWS = 1

    def blocks(self, numbers: list[Any]) -> list[Any]:
        return numbers

    def first(self, place: Any) -> Any:
        return self._loaded(place)

    def vectors(self, blocks: list[Any], k: Any) -> list[Any]:
        return [self._loaded(self._at(self._value(k), number)) for number in blocks]

    def prefetch(self, blocks: list[Any], k: Any) -> None:
        value = self._value(self.builder.add(k, _INT(PLACES_AHEAD)))
        for number in blocks:
            fetch(self.builder, self._at(value, number))

    def _value(self, k: Any) -> Any:
        b = self.builder
        return b.inttoptr(b.load(self._at(b.inttoptr(self.right, _INT.as_pointer()), k)), _FLOATS.as_pointer())


_take_halves, _take_floats, _take_bytes, _take_dots, _take_pairs, _take_keys, _take_values = (
    intrinsic(kind.take) for kind in (_Tile, _WeightTile, _ByteTile, _DotTile, _PairTile, _KeyTile, _ValueTile)
)


@kernel(error_model="numpy")
def multiply_keys(queries, width, keys, scores, first_block, end_block):
    """Multiply queries [Q, D] by transposed keys, to columns of scores [Q, N] from first_block to end_block.

    Args:
        queries: as `pack_rows` lays them out.
        width: D, in whose order products are added.
        keys: address of the keys as `transpose_keys` writes them, block 0 first.
    """
    first = 0
    while first < len(scores):
        first += _take_keys(queries, first, width, keys, first_block, end_block - first_block, scores)


@kernel(error_model="numpy")
def sum_values(weights, num_keys, places, out):
    """Write the sums of values, by weights [Q, N], to out [Q, D]. places: addresses of the values [num_keys +
    PLACES_AHEAD]; the first num_keys count.

    All tiles take some values, which lie in the cache then, before the next ones:

        out of 16 queries, 1 block    [16 x 16]  +=  weights[:, k] times values[k, block]    k = 0, 1, ... 31
        the next block, ... the next 16 queries, ... and then the same from k = 32 on
    """
    out[:] = np.float32(0.0)
    for start in range(0, num_keys, VALUES_AT_A_TIME):
        count = min(VALUES_AT_A_TIME, num_keys - start)
        packed = pack_rows(weights[:, start : start + count])
        first = 0
        while first < len(weights):
            place = places[start:].ctypes.data
            first += _take_values(packed, first, count, place, 0, out.shape[1] // BLOCK_OUTPUTS, out)


@intrinsic
def transpose_keys(typing, places, first, offset, out):
    """Write BLOCK_OUTPUTS numbers from `offset` on of as many keys, columns of a block: [BLOCK_OUTPUTS, BLOCK_OUTPUTS].

    Args:
        places: addresses of keys, from `first` on; those PLACES_AHEAD behind them are fetched.
        out: address of the block's row `offset`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places, first, offset, out = arguments
        b, data = builder, context.make_array(signature.args[0])(context, builder, places).data
        rows = []
        for i in range(BLOCK_OUTPUTS):
            row, later = (
                b.gep(b.inttoptr(b.load(b.gep(data, [b.add(first, _INT(n))])), _FLOAT.as_pointer()), [offset])
                for n in (i, i + PLACES_AHEAD)
            )
            vector = b.load(b.bitcast(row, _FLOATS.as_pointer()))
            vector.align = 4
            rows.append(vector)
            fetch(b, later)
        for half in (8, 4, 2, 1):  # swap the off-diagonal quarters of all squares of 2 x half rows
            upper = [BLOCK_OUTPUTS + c - half if c & half else c for c in range(BLOCK_OUTPUTS)]
            lower = [BLOCK_OUTPUTS + c if c & half else c + half for c in range(BLOCK_OUTPUTS)]
            masks = [_WORDS(mask) for mask in (upper, lower)]
            for i in range(BLOCK_OUTPUTS):
                if not i & half:
                    pair = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (b.shuffle_vector(*pair, mask) for mask in masks)
        block = b.inttoptr(out, _FLOATS.as_pointer())
        for i, vector in enumerate(rows):
            b.store(vector, b.gep(block, [_INT(i)])).align = 4
        return context.get_dummy_value()

    return types.none(places, first, offset, out), generate


@kernel(error_model="numpy")
def multiply_shared(left, address, stored, out, tickets, phase, num_parts):
    """Run `multiply_weight` by all threads that call it. Returns whether this one has finished the last part."""
    num_blocks, is_last = out.shape[1] // BLOCK_OUTPUTS, False
    part = next_part(tickets, phase)
    while part < num_parts:
        first, end = num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts
        multiply_blocks(left, address, stored, out, first, end)
        is_last = finish_part(tickets, phase) == num_parts
        part = next_part(tickets, phase)
    return is_last


@kernel(error_model="numpy")
def multiply_together(left, address, stored, out, tickets, num_parts):
    """Run `multiply_weight` by all threads that call it; each returns when all of it is done."""
    multiply_shared(left, address, stored, out, tickets, 0, num_parts)
    wait_for_parts(tickets, 0, num_parts)
