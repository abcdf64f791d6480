"""Products on the CPU, and how threads share them (docs/decisions/0038-compiled-cpu.md).

Weights are float16, float32 or integers of 8 bits, rows are float32. numba compiles no loop so that a tile of sums stays in
registers. So `_Tile` emits the tile itself: each step loads a row of some blocks of the weight, converts it, and adds its
products with one number of each row.

    sums of 16 rows, 1 block    [16 x 16]  +=  rows[:, k] times weight[block, k]        k = 0, 1, ... K - 1
    sums of 1 row, 8 blocks     [1 x 128]

Each sum is taken in the order of k by fused multiply-adds, whatever the tile: a row's result does not depend on the other
rows.

Threads that run one kernel share its phases: each takes the next part that no other has taken, and waits at the end of the
phase until all parts are finished. A thread that comes late, or that the system does not run, delays the others by the one
part that it holds. A phase has two counters, on cache lines of their own: parts that are taken, and parts that are finished.
If a thread fails, it sets all counters to FAILED: no part is left, and nothing is waited for.

Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eyas.arrays import Ints
from eyas.kernels.arguments import BLOCK_OUTPUTS, BYTES, FLOATS, GROUP_INPUTS, HALVES, SCALE_INPUTS
from eyas.kernels.cpu.compiling import kernel

# Blocks of a tile by its rows. Its sums, and what they are made of, fit into the registers.
BLOCKS_OF_512_BITS = {16: 1, 12: 2, 8: 3, 7: 3, 6: 4, 5: 4, 4: 4, 3: 4, 2: 8, 1: 8}
BLOCKS_OF_256_BITS = {6: 1, 5: 1, 4: 1, 3: 1, 2: 2, 1: 4}
# Bytes of a weight that all rows are multiplied by before the next ones.
GROUP_BYTES = 2**18
# How many inputs ahead a block is fetched, or a later block behind its end.
INPUTS_AHEAD = 128
# Inputs after which rows lie in the same sets of the cache, and how many floats apart they are then laid.
ALIASED, PADDING = 512, 16
# Numbers of a phase in an array of counters, and where the second counter is.
PHASE_SIZE, FINISHED = 16, 8
# Looks at a counter before a waiting thread leaves its core to others.
MAX_LOOKS = 1000
# Counter of a pass that failed; above any number of parts, with room for more.
FAILED = 1 << 62

_INT, _FLOAT, _HALF = ir.IntType(64), ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, BLOCK_OUTPUTS), ir.VectorType(_HALF, BLOCK_OUTPUTS)
_BYTES = ir.VectorType(ir.IntType(8), BLOCK_OUTPUTS)


@kernel()
def num_blocks_of(count):
    """Return the number of blocks that hold `count` outputs."""
    return (count + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS


@kernel(error_model="numpy")
def multiply_weight(left, address, stored, out):
    """Multiply rows left [R, K] by the transposed weight [N, K], to out [R, N]; N is a multiple of BLOCK_OUTPUTS.

    Args:
        address: of the weight as `packed_weights.in_blocks` lays it out, [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS].
        stored: FLOATS, HALVES or BYTES; of BYTES, SCALE_INPUTS rows of scales follow each GROUP_INPUTS rows of a block.
    """
    multiply_blocks(left, address, stored, out, 0, out.shape[1] // BLOCK_OUTPUTS)


@kernel(error_model="numpy")
def multiply_blocks(left, address, stored, out, first_block, end_block):
    """Write the columns of `multiply_weight` that are made of some blocks of the weight."""
    num_rows, num_inputs = left.shape
    itemsize = 4 if stored == FLOATS else 2 if stored == HALVES else 1
    rows, group = _spread_rows(left), max(GROUP_BYTES // (itemsize * BLOCK_OUTPUTS * num_inputs), 8)
    for start in range(first_block, end_block, group):
        first, count = 0, min(group, end_block - start)
        while first < num_rows:
            if stored == HALVES:
                first += _take_halves(rows, first, num_rows - first, num_inputs, address, start, count, out)
            elif stored == BYTES:
                first += _take_bytes(rows, first, num_rows - first, num_inputs, address, start, count, out)
            else:
                first += _take_floats(rows, first, num_rows - first, num_inputs, address, start, count, out)


@kernel(error_model="numpy")
def _spread_rows(left):
    """Return the rows, apart from each other in the sets of the cache."""
    num_rows, num_inputs = left.shape
    rows = left
    if num_inputs % ALIASED == 0 and num_rows > 4:
        rows = np.empty((num_rows, num_inputs + PADDING), np.float32)
        for r in range(num_rows):
            for k in range(num_inputs):
                rows[r, k] = left[r, k]
    return rows


class _Tile:
    """Emitter of the code of tiles: rows with `width` floats between them, a right side, and outputs with `size` between
    them.

    right: address of the right side in blocks of LOADED, [N / BLOCK_OUTPUTS, K, BLOCK_OUTPUTS].
    """

    LOADED: Any = _HALVES
    # Rows from which on a tile fetches ahead, see `prefetch`.
    FETCHING_ROWS = 2
    BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS = BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS

    def __init__(self, builder: Any, rows: Any, width: Any, right: Any, num_inputs: Any, out: Any, size: Any) -> None:
        self.builder, self.rows, self.width, self.right = builder, rows, width, right
        self.num_inputs, self.out, self.size = num_inputs, out, size
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{BLOCK_OUTPUTS}f32")

    @classmethod
    def take(cls, typing, rows, first, num_left, num_inputs, right, start, count, out):
        """Return an intrinsic that multiplies rows from `first` on by `count` blocks from `start` on. It returns how many
        rows it
        takes: a tile's."""
        signature = types.int64(rows, first, num_left, num_inputs, right, start, count, out)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, first, num_left, num_inputs, right, start, count, out = arguments
            left, found = (context.make_array(signature.args[i])(context, builder, a) for i, a in ((0, rows), (7, out)))
            width, size = (cgutils.unpack_tuple(builder, each.shape, 2)[1] for each in (left, found))
            tile = cls(
                builder, builder.gep(left.data, [builder.mul(first, width)]), width, right, num_inputs,
                builder.gep(found.data, [builder.mul(first, size)]), size,
            )  # fmt: skip
            taken, done = cgutils.alloca_once(builder, _INT), builder.append_basic_block("done")
            has_512_bits = llvm.get_host_cpu_features().get("avx512f", False)
            for num_rows, num_blocks in (cls.BLOCKS_OF_512_BITS if has_512_bits else cls.BLOCKS_OF_256_BITS).items():
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
        b, at = self.builder, self._at
        rows = [at(self.rows, b.mul(self.width, _INT(r))) for r in range(num_rows)]
        blocks = self.blocks([b.add(block, _INT(n)) for n in range(num_blocks)])
        entry, loop, end = b.block, b.append_basic_block("k"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        k, sums = b.phi(_INT), [[b.phi(_FLOATS) for _ in blocks] for _ in rows]
        vectors = self.vectors(blocks, k)
        if num_rows >= self.FETCHING_ROWS:
            self.prefetch(blocks, k)
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

    def blocks(self, numbers: list[Any]) -> list[Any]:
        """Return what `vectors` takes of blocks: here pointers to their first vectors."""
        b, vectors = self.builder, self.builder.inttoptr(self.right, self.LOADED.as_pointer())
        return [self._at(vectors, b.mul(self.num_inputs, number)) for number in numbers]

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
        b, byte, word = self.builder, ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
        ahead = b.add(k, _INT(INPUTS_AHEAD))
        if len(blocks) > 1:  # behind a block's end lies the next one of this tile, so look behind the last of them
            others = b.mul(self.num_inputs, _INT(len(blocks) - 1))
            ahead = b.select(b.icmp_signed("<", ahead, self.num_inputs), ahead, b.add(ahead, others))
        for block in blocks:
            place = b.bitcast(self._at(block, self.row(ahead)), byte)
            b.call(fetch, [place, word(0), word(1), word(1)])  # to read, no nearer than L2, data

    def _at(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [offset])

    def _loaded(self, pointer: Any) -> Any:
        """Return a vector in float32."""
        vector = self.builder.load(pointer)
        vector.align = 2 if self.LOADED is _HALVES else 4
        return self.builder.fpext(vector, _FLOATS) if self.LOADED is _HALVES else vector

    def _spread(self, number: Any) -> Any:
        """Return a number in all places of a vector."""
        nothing, first = ir.Constant(_FLOATS, ir.Undefined), ir.IntType(32)(0)
        mask = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK_OUTPUTS), [0] * BLOCK_OUTPUTS)
        return self.builder.shuffle_vector(self.builder.insert_element(nothing, number, first), nothing, mask)


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


class _KeyTile(_WeightTile):
    """Keys in blocks of float32: few of them."""

    BLOCKS_OF_512_BITS, BLOCKS_OF_256_BITS = {16: 1, 8: 2, 4: 4, 2: 4, 1: 4}, {4: 1, 2: 2, 1: 4}

    def prefetch(self, blocks: list[Any], k: Any) -> None:
        """Prefetch nothing: transposed keys are in the cache, and values lie anywhere."""


class _PlacesTile(_KeyTile):
    """A right side whose rows [N] lie anywhere. right: address of their addresses [K]."""

    def blocks(self, numbers: list[Any]) -> list[Any]:
        return numbers

    def vectors(self, blocks: list[Any], k: Any) -> list[Any]:
        b = self.builder
        row = b.inttoptr(b.load(self._at(b.inttoptr(self.right, _INT.as_pointer()), k)), _FLOATS.as_pointer())
        return [self._loaded(self._at(row, number)) for number in blocks]


_take_halves, _take_floats, _take_bytes, _take_keys, _take_places = (
    intrinsic(kind.take) for kind in (_Tile, _WeightTile, _ByteTile, _KeyTile, _PlacesTile)
)


@kernel(error_model="numpy")
def multiply_keys(queries, keys, scores, first_block, end_block):
    """Multiply queries [Q, D] by transposed keys, to columns of scores [Q, N] from first_block to end_block.

    keys: address of the keys as `transpose_keys` writes them, block 0 first. In the order of D.
    """
    first = 0
    while first < len(queries):
        left = len(queries) - first
        first += _take_keys(
            queries, first, left, queries.shape[1], keys, first_block, end_block - first_block, scores
        )  # fmt: skip


@kernel(error_model="numpy")
def sum_values(weights, num_keys, places, out):
    """Write the sums of values, by weights [Q, N], to out [Q, D]. places: addresses of the values; the
    first num_keys count.
    """
    first = 0
    while first < len(weights):
        left, blocks = len(weights) - first, out.shape[1] // BLOCK_OUTPUTS
        first += _take_places(weights, first, left, num_keys, places.ctypes.data, 0, blocks, out)


@intrinsic
def transpose_keys(typing, places, first, offset, out):
    """Write BLOCK_OUTPUTS numbers from `offset` on of as many keys, columns of a block: [BLOCK_OUTPUTS, BLOCK_OUTPUTS].

    Args:
        places: addresses of keys, from `first` on.
        out: address of the block's row `offset`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places, first, offset, out = arguments
        b, data = builder, context.make_array(signature.args[0])(context, builder, places).data
        rows = []
        for i in range(BLOCK_OUTPUTS):
            row = b.inttoptr(b.load(b.gep(data, [b.add(first, _INT(i))])), _FLOAT.as_pointer())
            vector = b.load(b.bitcast(b.gep(row, [offset]), _FLOATS.as_pointer()))
            vector.align = 4
            rows.append(vector)
        for half in (8, 4, 2, 1):  # swap the off-diagonal quarters of all squares of 2 x half rows
            upper = [BLOCK_OUTPUTS + c - half if c & half else c for c in range(BLOCK_OUTPUTS)]
            lower = [BLOCK_OUTPUTS + c if c & half else c + half for c in range(BLOCK_OUTPUTS)]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), BLOCK_OUTPUTS), mask) for mask in (upper, lower)]
            for i in range(BLOCK_OUTPUTS):
                if not i & half:
                    pair = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (b.shuffle_vector(*pair, mask) for mask in masks)
        block = b.inttoptr(out, _FLOATS.as_pointer())
        for i, vector in enumerate(rows):
            b.store(vector, b.gep(block, [_INT(i)])).align = 4
        return context.get_dummy_value()

    return types.none(places, first, offset, out), generate


@intrinsic
def _add_one(typing, counters, index):
    """Add 1 to counters[index], in one order for all threads. Returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", builder.gep(array.data, [arguments[1]]), _INT(1), "seq_cst")

    return types.int64(counters, index), generate


@intrinsic
def _read(typing, counters, index):
    """Return counters[index] as the other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return types.int64(counters, index), generate


@intrinsic
def _pause(typing):
    """Return the hint to an x86 processor that a loop waits for a number in memory; nothing on others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if llvm.get_process_triple().startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _leave_core(typing):
    """Let another thread run on this core, where the system has a call for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if hasattr(os, "sched_yield"):
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@kernel()
def next_part(tickets, phase):
    """Return the next part of a phase that no thread has taken; the parts are numbered from 0."""
    return _add_one(tickets, PHASE_SIZE * phase)


@kernel()
def finish_part(tickets, phase):
    """Count a part as finished. Returns how many are."""
    return _add_one(tickets, PHASE_SIZE * phase + FINISHED) + 1


@kernel()
def wait_for_parts(tickets, phase, count):
    """Return once `count` parts are finished."""
    looks = 0
    while _read(tickets, PHASE_SIZE * phase + FINISHED) < count:
        looks += 1
        if looks < MAX_LOOKS:
            _pause()
        else:
            _leave_core()


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


class _Call:
    """A kernel that threads run together. error: of the first thread that failed."""

    def __init__(self, kernel: Callable[..., object], arguments: tuple[object, ...], tickets: Ints) -> None:
        self._kernel, self._arguments, self._tickets = kernel, arguments, tickets
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it in this thread, too. If that fails, the other threads stop at the end of their parts."""
        try:
            self._kernel(*self._arguments)
        except BaseException as error:
            self.error = self.error or error
            self._tickets.fill(FAILED)


Calls: TypeAlias = SimpleQueue[_Call | None]


class Helpers:
    """Threads that run kernels together with the thread that asks. They end when this object is dropped."""

    def __init__(self, count: int) -> None:
        self.num_threads = 1 + count
        self._queues: list[tuple[Calls, threading.Lock]] = []  # a helper holds its lock while it runs a call
        for _ in range(count):
            queue: Calls = SimpleQueue()
            is_running = threading.Lock()
            threading.Thread(target=_help, args=(queue, is_running), name="layers", daemon=True).start()
            weakref.finalize(self, queue.put, None)
            self._queues.append((queue, is_running))

    def run(self, kernel: Callable[..., object], *arguments: object, tickets: Ints) -> None:
        """Run kernel(*arguments, tickets, num_threads), whose work the threads share. tickets: counters, all zero.

        A helper that comes too late finds nothing to do. A call that its helper has not begun makes room for the next one:
        one that never comes keeps no memory. Raises what the kernel raises in any thread, once no other one works on it.
        """
        call = _Call(kernel, (*arguments, tickets, self.num_threads), tickets)
        for queue, _ in self._queues:
            if not queue.empty():
                with suppress(Empty):
                    queue.get_nowait()
            queue.put(call)
        call.run()
        if call.error is not None:
            for _, is_running in self._queues:
                with is_running:
                    pass
            try:
                raise call.error
            finally:
                del call  # the error's traceback holds this frame, and so the arguments


def _help(queue: Calls, is_running: threading.Lock) -> None:
    while (call := queue.get()) is not None:
        with is_running:
            call.run()
        del call  # not kept until the next one
