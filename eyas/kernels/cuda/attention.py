"""Tree attention as a Triton kernel: `eyas.models.layers.attention.attend` for inputs with AttentionMetadata.

Flash-decoding (Dao et al., 2023): each program takes one tile of rows, one key-value head and one part of the keys; a
second kernel combines the parts, if there can be several. A long prefix has more parts than a short one, whose other
programs end at once. Heads that share keys are rows of one matrix product. Only keys of the segment's own rows are masked.
A prefix that segments share is read by tiles with rows of several of them, and their results are combined with the others.

Deterministic mode has kernels of its own. They take the keys of a row by position, in blocks and parts that begin at fixed
positions, and their matrix products have one shape. So a row gets the same bits alone, in a batch, in a tree and in a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.arguments import LONG_PART, AttentionRule

if TYPE_CHECKING:
    from eyas.models.inputs import MetadataShape, PackedInputs

# Registers that a thread may take in float32 and with wide heads: ptxas, left to choose, takes too few, and values spill.
MOST_REGISTERS = 255
# The widest heads whose results for 64 rows fit into registers.
NARROW_HEAD = 256
# Blocks on their way: one of keys is multiplied, the next is loaded, and the slots of the one behind that.
NUM_STAGES = 3
# Numbers of a program of `_combine` from which on it has 8 warps: with 4, sm_100 spills registers.
SPREAD = 4096


def attend(query: Tensor, keys: Tensor, values: Tensor, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Return the attention of query [R, H, D] over contiguous keys and values [S, J, D]; [R, H, D], zero for padding rows.

    Sums in float32. Never waits for the device. Launches depend on shapes only, so a graph can capture them. Values may have
    another width than keys.
    """
    meta = packed.metadata
    assert meta is not None, "the kernel reads metadata"
    (rows, num_heads, _), (_, num_kv, value_width), shape = query.shape, values.shape, meta.shape
    if shape.fixed_part:
        return attend_by_position(query, keys, values, packed, rule)
    is_whole = shape.num_results == 1  # then the only part is the result
    out = torch.empty((rows, num_heads, value_width), dtype=query.dtype, device=query.device)
    partials = sums = out
    if not is_whole:
        partials = query.new_empty((shape.num_results, rows, num_heads, value_width), dtype=torch.float32)
        sums = query.new_empty((shape.num_results, rows, num_heads), dtype=torch.float32)
    sinks = rule.sinks
    pieces, constants = _constants(query, values, shape, rule)
    _attend_parts[(shape.tiles, num_kv * pieces, shape.splits)](
        *(query.contiguous(), keys, values, partials, sums, sinks if is_whole else None, meta.words, meta.masks, meta.tiles),
        *(meta.slots, meta.positions, meta.key_positions, float(rule.scaling), rows, shape.splits, shape.even_splits),
        LONG_PART=LONG_PART,
        IS_WHOLE=is_whole,
        HAS_SINKS=is_whole and sinks is not None,
        BLOCK_N=keys_per_block(query) // (2 if _would_spill(query, keys) else 1),
        **constants,
    )
    if is_whole:
        return out
    block_s = triton.next_power_of_2(shape.num_results)
    block_d = _block_width(value_width)
    _combine[(rows, num_heads)](
        partials, sums, sinks, out, rows, shape.num_results, NUM_HEADS=num_heads, WIDTH=value_width,
        HAS_SINKS=sinks is not None, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=8 if block_s * block_d >= SPREAD else 4,
    )  # fmt: skip
    return out


def attend_by_position(query: Tensor, keys: Tensor, values: Tensor, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Run `attend` for parts at fixed positions. Rows lie at the length of the prefix and their depth."""
    meta = packed.metadata
    assert meta is not None
    (rows, num_heads, _), (_, num_kv, width), shape = query.shape, values.shape, meta.shape
    partials = query.new_empty((shape.part_rows, num_heads, width), dtype=torch.float32)
    sums = query.new_empty((shape.part_rows, num_heads), dtype=torch.float32)
    out = query.new_empty((rows, num_heads, width))
    # without fused operations, which the compiler would choose by what is around them
    pieces, constants = _constants(query, values, shape, rule)
    _attend_fixed_parts[(shape.tiles, num_kv * pieces)](
        *(query.contiguous(), keys, values, partials, sums, meta.words, meta.masks, meta.tiles),
        *(meta.slots, meta.positions),
        float(rule.scaling),
        BLOCK_N=max(16, keys_per_block(query) // 2),  # with more, sm_100 spills
        enable_fp_fusion=False,
        **constants,
    )
    block_r = triton.next_power_of_2(shape.tile_rows)
    block_d = min(_block_width(width), NARROW_HEAD)
    _combine_in_order[(shape.tiles, num_heads, triton.cdiv(width, block_d))](
        *(partials, sums, rule.sinks, out, meta.tiles),
        NUM_HEADS=num_heads, WIDTH=width, HAS_SINKS=rule.sinks is not None, BLOCK_R=block_r, BLOCK_D=block_d,
        enable_fp_fusion=False, num_warps=max(4, block_r * block_d // 2048),
    )  # fmt: skip
    return out


def _constants(
    query: Tensor, values: Tensor, shape: MetadataShape, rule: AttentionRule
) -> tuple[int, dict[str, int | float | None]]:
    """Return the pieces of a tile, and what both kernels of parts are compiled for, by the shape and type of query
    [R, H, D] and the shape of values [S, J, D].
    """
    num_kv, value_width = values.shape[1:]
    width, group = query.shape[2], query.shape[1] // num_kv
    is_wide = _block_width(width) > NARROW_HEAD
    rows = min(shape.tile_rows, max(1, _most_product_rows(query) // group))
    pieces, block_m = -(-shape.tile_rows // rows), max(16, triton.next_power_of_2(rows * group))
    return pieces, {
        "PIECES": pieces,
        "ROWS": rows,
        "NUM_KV": num_kv,
        "GROUP": group,
        "WIDTH": width,
        "V_WIDTH": value_width,
        "WINDOW": rule.window or 0,
        "SOFTCAP": float(rule.softcap or 0),
        "BLOCK_M": block_m,
        "BLOCK_D": _block_width(width),
        "BLOCK_V": _block_width(value_width),
        "num_warps": 4 if _row_bytes(query) <= 256 and block_m <= 64 else 8,
        "num_stages": NUM_STAGES,
        "maxnreg": MOST_REGISTERS if query.dtype == torch.float32 or is_wide else None,
    }


def _most_product_rows(query: Tensor) -> int:
    """Return rows of query heads that fit into registers. Tiles with more are cut into pieces, each read by a program."""
    if query.dtype == torch.float32:
        return 16
    return 64 if _block_width(query.shape[2]) <= NARROW_HEAD else 32


def _block_width(width: int) -> int:
    """Return the elements of a head that a program holds; those behind its width are zero."""
    return max(16, int(triton.next_power_of_2(width)))


def _row_bytes(query: Tensor) -> int:
    return _block_width(query.shape[2]) * query.element_size()


def keys_per_block(query: Tensor) -> int:
    """Return the keys that a program holds at a time, so that two stages of keys and values fit into shared memory."""
    return 64 if _row_bytes(query) <= 256 else 32 if _row_bytes(query) <= 512 else 16


def _would_spill(query: Tensor, keys: Tensor) -> bool:
    """Return whether registers spill with whole blocks of keys: 128 wide where no heads share keys, or where keys are
    converted.

    query [R, H, D], keys [S, J, D]. GPUs without numbers of 8 bits convert `float8_e5m2` in registers, and spill 64 wide too
    where many heads share keys.
    """
    group, is_converted = query.shape[1] // keys.shape[1], keys.dtype == torch.float8_e5m2
    if _row_bytes(query) <= 128:
        return is_converted and group >= 8
    return _row_bytes(query) <= 256 and (is_converted or group == 1)


@triton.jit(
    do_not_specialize=["rows", "splits", "even_splits"],
    do_not_specialize_on_alignment=["words", "masks", "tiles", "slots", "positions", "key_positions"],
)
def _attend_parts(
    query, keys, values, partials, sums, sinks, words, masks, tiles, slots, positions, key_positions, scaling, rows,
    splits, even_splits, PIECES: tl.constexpr, ROWS: tl.constexpr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    LONG_PART: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    tile, head, split = tiles + 10 * tl.program_id(0), tl.program_id(1) // PIECES, tl.program_id(2)
    skipped = tl.program_id(1) % PIECES * ROWS
    first, count, own, stride = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    first, count = first + skipped, tl.minimum(count - skipped, ROWS)
    if count <= 0:
        return
    length, prefix, masks = tl.load(tile + 4), words + tl.load(tile + 5), masks + tl.load(tile + 6) + skipped * stride
    m, d, n, v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    live, row = m // GROUP < count, first + m // GROUP
    position = tl.load(positions + row, mask=live, other=2147483647)
    last = length + tl.load(tile + 7)
    lowest, result = tl.load(tile + 8), split + tl.load(tile + 9)
    if WINDOW:
        lowest = tl.maximum(lowest, tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1, 0), length))
    part = tl.maximum(tl.cdiv(last - lowest, splits), tl.minimum(tl.cdiv(last - lowest, even_splits), LONG_PART))
    part = tl.cdiv(part, BLOCK_N) * BLOCK_N
    begin, end = lowest + split * part, tl.minimum(lowest + (split + 1) * part, last)
    cell = row.to(tl.int64) * (NUM_KV * GROUP) + head * GROUP + m % GROUP
    kept, stored = live[:, None] & (d < WIDTH)[None, :], live[:, None] & (v < V_WIDTH)[None, :]
    if begin >= end:
        if IS_WHOLE:
            tl.store(partials + cell[:, None] * V_WIDTH + v[None, :], 0.0, mask=stored)
        else:
            tl.store(sums + result.to(tl.int64) * rows * (NUM_KV * GROUP) + cell, float("-inf"), mask=live)
        return
    q = tl.load(query + cell[:, None] * WIDTH + d[None, :], mask=kept, other=0.0)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(begin, tl.minimum(end, length), BLOCK_N):
        inside = at + n < tl.minimum(end, length)
        place = (tl.load(prefix + at + n, mask=inside, other=0).to(tl.int64) * NUM_KV + head) * WIDTH
        visible = inside[None, :] & (position[:, None] - (at + n)[None, :] < WINDOW if WINDOW else True)
        top, total, acc = _fold(q, keys, values, place, inside, visible, top, total, acc, scaling, WIDTH, V_WIDTH, SOFTCAP)
    start = tl.maximum(begin, length) - length
    for at in range(start // 32 * 32, end - length, BLOCK_N):
        inside = (at + n >= start) & (at + n < end - length)
        place = (tl.load(slots + own + at + n, mask=inside, other=0).to(tl.int64) * NUM_KV + head) * WIDTH
        word = masks + m // GROUP * stride + at // 32
        bits = tl.load(word, mask=live, other=0)[:, None]
        if BLOCK_N > 32:  # 64, two words; with `inside` here and not below sm_80 spills no register
            more = tl.load(word + 1, mask=live & (at + 32 < end - length), other=0)[:, None]
            bits = tl.where(inside[None, :], tl.where((n < 32)[None, :], bits, more), 0)
        visible = ((bits >> ((at + n) % 32)[None, :]) & 1 == 1) & (True if BLOCK_N > 32 else inside[None, :])
        if WINDOW:
            there = tl.load(key_positions + own + at + n, mask=inside, other=0)
            visible = visible & (position[:, None] - there[None, :] < WINDOW)
        top, total, acc = _fold(q, keys, values, place, inside, visible, top, total, acc, scaling, WIDTH, V_WIDTH, SOFTCAP)
    out, some = result.to(tl.int64) * rows * (NUM_KV * GROUP) + cell, tl.where(total == 0, 1.0, total)  # no key seen
    if not IS_WHOLE:
        tl.store(sums + out, top + tl.log2(some), mask=live)
    some = _with_sink(some, top, sinks, head * GROUP + m % GROUP, HAS_SINKS)
    mean = (acc / some[:, None]).to(partials.dtype.element_ty)
    tl.store(partials + out[:, None] * V_WIDTH + v[None, :], mean, mask=stored)


@triton.jit
def _with_sink(some, top, sinks, head, HAS_SINKS: tl.constexpr):
    """Return the sum of a softmax over keys, relative to 2 ** top, with the head's sink; infinity where no key is seen."""
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        some = some * (1 + tl.exp2(sink - top - tl.log2(some)))
    return some


@triton.jit
def _fold(
    q, keys, values, place, inside, visible, top, total, acc, scaling,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add one block of keys, at `place` in the KV cache, to a running softmax. NaN stays NaN, in its own row."""
    d = tl.arange(0, q.shape[1])
    at, kept = place[:, None] + d[None, :], inside[:, None] & (d < WIDTH)[None, :]
    k = tl.load(keys + at, mask=kept, other=0.0)
    if V_WIDTH != WIDTH:
        e = tl.arange(0, acc.shape[1])
        at, kept = (place // WIDTH * V_WIDTH)[:, None] + e[None, :], inside[:, None] & (e < V_WIDTH)[None, :]
    v = tl.load(values + at, mask=kept, other=0.0)
    k, v = k.to(q.dtype), v.to(q.dtype)  # from 8 bits
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if SOFTCAP > 0:
        scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
    scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine(
    partials, sums, sinks, out, rows, splits,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row and head, weighted by their sums. Empty parts weigh nothing. A sink counts once."""
    cell = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = s.to(tl.int64) * rows * NUM_HEADS + cell
    part = tl.load(sums + at, mask=s < splits, other=float("-inf"))
    top = tl.max(part, 0)
    weights = tl.exp2(part - tl.where(top == float("-inf"), 0.0, top))
    kept = (part != float("-inf"))[:, None] & (d < WIDTH)[None, :]
    values = tl.load(partials + at[:, None] * WIDTH + d[None, :], mask=kept, other=0.0)
    total = tl.sum(weights, 0)
    some = tl.where(total == 0, 1.0, total)
    some = _with_sink(some, top, sinks, tl.program_id(1), HAS_SINKS)
    mean = tl.sum(values * weights[:, None], 0) / some
    tl.store(out + cell * WIDTH + d, mean.to(out.dtype.element_ty), mask=d < WIDTH)


@triton.jit(do_not_specialize_on_alignment=["words", "masks", "tiles", "slots", "positions"])
def _attend_fixed_parts(
    query, keys, values, partials, sums, words, masks, tiles, slots, positions, scaling,
    PIECES: tl.constexpr, ROWS: tl.constexpr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend one part of a tile. Blocks within the prefix are the same for all rows. Behind it each row of a tree has its
    own path, so that blocks there are taken once for each row, and rows without that path keep what they have.
    """
    tile, head = tiles + 12 * tl.program_id(0), tl.program_id(1) // PIECES
    skipped = tl.program_id(1) % PIECES * ROWS
    first, count, own, lanes = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    first, count = first + skipped, tl.minimum(count - skipped, ROWS)
    lanes = tl.minimum(lanes, tl.maximum(count, 1))
    length, prefix = tl.load(tile + 4), words + tl.load(tile + 5)
    depths = tl.load(tile + 7)
    paths = masks + tl.load(tile + 6) + skipped * depths
    begin, end, place = tl.load(tile + 8), tl.load(tile + 9), tl.load(tile + 10) + skipped
    if (begin >= end) | (count <= 0):
        return
    m, d, n, v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    live, row = m // GROUP < count, first + m // GROUP
    position = tl.load(positions + row, mask=live, other=2147483647)
    cell = row.to(tl.int64) * (NUM_KV * GROUP) + head * GROUP + m % GROUP
    kept, stored = live[:, None] & (d < WIDTH)[None, :], live[:, None] & (v < V_WIDTH)[None, :]
    q = tl.load(query + cell[:, None] * WIDTH + d[None, :], mask=kept, other=0.0)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if WINDOW:  # blocks that no row sees change nothing
        begin = tl.maximum(begin, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    shared = tl.minimum(end, length // BLOCK_N * BLOCK_N)
    for at in range(begin, shared, BLOCK_N):
        where = (tl.load(prefix + at + n).to(tl.int64) * NUM_KV + head) * WIDTH
        visible = live[:, None] & (position[:, None] - (at + n)[None, :] < WINDOW if WINDOW else True)
        top, total, acc = _fold(q, keys, values, where, n >= 0, visible, top, total, acc, scaling, WIDTH, V_WIDTH, SOFTCAP)
    for at in range(tl.maximum(begin, shared), end, BLOCK_N):
        for lane in range(lanes):
            depth = at + n - length
            is_own, inside = depth >= 0, at + n < end
            node = tl.load(paths + lane * depths + depth, mask=is_own & (depth < depths), other=0)
            node = tl.where(depths > 0, node, depth)
            slot = tl.load(slots + own + node, mask=is_own & inside, other=0)
            slot = tl.where(is_own, slot, tl.load(prefix + at + n, mask=inside & (depth < 0), other=0))
            mine = live & ((lanes == 1) | (m // GROUP == lane))
            visible = mine[:, None] & inside[None, :] & ((at + n)[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (position[:, None] - (at + n)[None, :] < WINDOW)
            where = (slot.to(tl.int64) * NUM_KV + head) * WIDTH
            top, total, sum_of_all = _fold(
                q, keys, values, where, inside, visible, top, total, acc, scaling, WIDTH, V_WIDTH, SOFTCAP
            )
            acc = tl.where(mine[:, None], sum_of_all, acc)
    out = (place + m // GROUP).to(tl.int64) * (NUM_KV * GROUP) + head * GROUP + m % GROUP
    some = tl.where(total == 0, 1.0, total)
    tl.store(sums + out, tl.where(total == 0, float("-inf"), top + tl.log2(some)), mask=live)
    tl.store(partials + out[:, None] * V_WIDTH + v[None, :], acc / some[:, None], mask=stored)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _combine_in_order(
    partials, sums, sinks, out, tiles,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a tile's rows and one head, one after the other. Empty parts change nothing; padding rows get
    zeros. A sink counts once.
    """
    tile, head = tiles + 12 * tl.program_id(0), tl.program_id(1)
    first, count, place, parts = tl.load(tile), tl.load(tile + 1), tl.load(tile + 10), tl.load(tile + 11)
    if parts < 0:
        return
    r, d = tl.arange(0, BLOCK_R), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    live, kept = r < count, (r < count)[:, None] & (d < WIDTH)[None, :]
    top, total = tl.full([BLOCK_R], float("-inf"), tl.float32), tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for part in range(parts):
        at = (place + part * count + r).to(tl.int64) * NUM_HEADS + head
        more = tl.load(sums + at, mask=live, other=float("-inf"))
        mean = tl.load(partials + at[:, None] * WIDTH + d[None, :], mask=kept, other=0.0)
        higher = tl.maximum(top, more)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(top - base), tl.exp2(more - base)
        acc = acc * shrink[:, None] + mean * weight[:, None]
        top, total = higher, total * shrink + weight
    some = tl.where(total == 0, 1.0, total)
    some = _with_sink(some, top, sinks, tl.program_id(1), HAS_SINKS)
    mean = acc / some[:, None]
    where = ((first + r).to(tl.int64) * NUM_HEADS + head)[:, None] * WIDTH + d[None, :]
    tl.store(out + where, mean.to(out.dtype.element_ty), mask=kept)
