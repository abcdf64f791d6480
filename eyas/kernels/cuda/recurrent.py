"""Convolutions, and the recurrence of gated delta nets and Mamba-2, over the nodes of draft trees as Triton kernels.

A program of the recurrence has some columns of values of one head in one segment. It writes the state before the segment's
rows to where the pass writes it, with what the last tree left in the stash, and computes the rows in blocks. Behind each
block of a prompt it moves that state on; a block of a tree reads the updates of earlier blocks: the program wrote their
columns itself. `kernels.plain.recurrent` has the formulas. Queries and keys get length 1 by factors of their products.

Products are float32 without tf32 and go over channels in parts, as all of their numbers do not fit into registers; sums of
gates are float64.

Legend: R rows, J heads of keys, H heads of values, K and V widths of keys and values, N rows of a block, C channels and W
width of a convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import BLOCK_ROWS, BLOCK_WORDS, LENGTH_EPSILON, SEGMENT_WORDS, RecurrentInputs

if TYPE_CHECKING:
    from eyas.cache.state_pools import LayerStates
    from eyas.models.recurrent_rows import RecurrentRows

# Channels of keys that are multiplied at once, and columns of values of a program.
BLOCK_K, BLOCK_V = 16, 32
# Channels of a program of the convolution.
BLOCK_C = 1024


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, pools: LayerStates, rows: RecurrentRows) -> Tensor:
    """Return what `plain.recurrent.convolve` returns, in one launch; sums are float32."""
    inputs = _of_rows(inputs)
    num_rows, channels = inputs.shape
    windows = rows.windows(weight.shape[1])
    ends, into = windows.marks or (windows.ends, rows.write)
    num_marks = 0 if windows.marks is None else ends.numel()
    nodes, places = rows.stashed or (rows.read, rows.read)
    num_nodes = 0 if rows.stashed is None else len(nodes)
    pending = rows.read if rows.pending is None else rows.pending[0]
    out = torch.empty((num_rows, channels), dtype=inputs.dtype, device=inputs.device)
    num_programs = num_rows + windows.ends.numel() + num_marks + num_nodes
    with on_device_of(out):
        _convolve_paths[(num_programs, triton.cdiv(channels, BLOCK_C))](
            *(inputs, weight.contiguous(), bias, out, pools.columns, pools.inputs, rows.read, rows.write, windows.columns),
            *(windows.rows, windows.ends, ends, into, pending, nodes, places, num_rows, windows.ends.numel(), num_marks),
            *(pending.shape[-1], inputs.stride(0)),
            CHANNELS=channels, WIDTH=weight.shape[1], HAS_BIAS=bias is not None, BLOCK=BLOCK_C, num_warps=4,
        )  # fmt: skip
    return out


def scan(inputs: RecurrentInputs, pools: LayerStates, rows: RecurrentRows) -> Tensor:
    """Return what `plain.recurrent.scan` returns, in one launch. Gates are of heads."""
    num_rows, heads, value_width = inputs.values.shape
    key_heads, key_width = inputs.keys.shape[1:]
    device = inputs.values.device
    tables = rows.tables
    out, updates = (torch.empty(inputs.values.shape, device=device) for _ in range(2))
    sums = torch.empty((num_rows, heads), dtype=torch.float64, device=device)
    spare = torch.empty((tables.num_spare, *pools.states.shape[1:]), device=device)
    given = [_of_rows(x) for x in inputs[:5]]
    # Left to itself the compiler takes fewer registers and spills; three programs of narrow rows share a processor.
    most = 168 if inputs.values.dtype.itemsize < 4 else 255
    with on_device_of(out):
        _scan[(triton.cdiv(value_width, BLOCK_V), heads, len(rows.read))](
            *(*given, out, updates, sums, pools.states, spare, pools.keys, pools.updates, pools.sums),
            *tables[:4],
            *(x.stride(0) for x in given),
            key_width**-0.5 if inputs.is_delta else 1.0,
            HEADS=heads, SHARED=heads // key_heads, KEY=key_width, VALUE=value_width, IS_DELTA=inputs.is_delta,
            SEGMENT_WORDS=SEGMENT_WORDS, BLOCK_WORDS=BLOCK_WORDS, EPSILON=LENGTH_EPSILON, BLOCK_N=BLOCK_ROWS,
            BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4, num_stages=1, maxnreg=most,
        )  # fmt: skip
    return out


def _of_rows(x: Tensor) -> Tensor:
    """Return numbers of rows [R, ...] that lie next to each other within a row."""
    return x if x[0].is_contiguous() else x.contiguous()


@triton.jit(do_not_specialize=["num_rows", "num_ends", "num_marks", "num_pending"])
def _convolve_paths(
    inputs, weight, bias, out, columns, stash, reads, writes, latest, windows, ends, mark_ends, mark_rows, pending, nodes,
    places, num_rows, num_ends, num_marks, num_pending, stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a row, or copy an input: to the columns of a segment or a mark, or to the stash."""
    PAST: tl.constexpr = WIDTH - 1
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_c = c < CHANNELS
    row = tl.program_id(0).to(tl.int64)
    if row < num_rows:
        found = tl.zeros([BLOCK], tl.float32)
        for column in tl.static_range(WIDTH):
            index = tl.load(windows + row * WIDTH + column)
            place = _input(
                index, inputs, columns, stash, reads, latest, pending, num_ends, num_pending, stride, CHANNELS, PAST
            )
            factor = tl.load(weight + c * WIDTH + column, mask=has_c, other=0.0).to(tl.float32)
            found += tl.load(place + c, mask=has_c, other=0.0).to(tl.float32) * factor
        if HAS_BIAS:
            found += tl.load(bias + c, mask=has_c, other=0.0).to(tl.float32)
        tl.store(out + row * CHANNELS + c, found.to(out.dtype.element_ty), mask=has_c)
    else:
        copy = row - num_rows
        if copy < num_ends:
            index = tl.load(ends + copy)
            into = columns + (tl.load(writes + copy // PAST) * PAST + copy % PAST) * CHANNELS
        elif copy < num_ends + num_marks:
            index = tl.load(mark_ends + copy - num_ends)
            mark = copy - num_ends
            into = columns + (tl.load(mark_rows + mark // PAST) * PAST + mark % PAST) * CHANNELS
        else:
            node = copy - num_ends - num_marks
            index = num_ends + tl.load(nodes + node)
            into = stash + tl.load(places + node) * CHANNELS
        place = _input(index, inputs, columns, stash, reads, latest, pending, num_ends, num_pending, stride, CHANNELS, PAST)
        tl.store(into + c, tl.load(place + c, mask=has_c, other=0.0), mask=has_c)


@triton.jit
def _input(
    index, inputs, columns, stash, reads, latest, pending, num_columns, num_pending, stride,
    CHANNELS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Return where an input of a pass begins: PAST columns of each segment come first, see `Windows`."""
    place = inputs + (index - num_columns) * stride
    if index < num_columns:
        segment = index // PAST
        column = tl.load(latest + index)
        place = columns + (tl.load(reads + segment) * PAST + column) * CHANNELS
        if column >= PAST:
            place = stash + tl.load(pending + segment * num_pending + column - PAST) * CHANNELS
    return place


@triton.jit
def _scan(
    queries, keys, values, gates, betas, out, updates, sums, states, spare, stash_keys, stash_updates, stash_sums,
    segments, blocks, pending, visible, query_stride, key_stride, value_stride, gate_stride, beta_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, IS_DELTA: tl.constexpr,
    SEGMENT_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_v = v < VALUE
    segments += tl.program_id(2) * SEGMENT_WORDS
    first = tl.load(segments + 2)
    stash = tl.load(segments + 8)
    stays = tl.load(segments + 10) > 0
    # From here on pointers are to what a row has of this head, and to columns of its state.
    queries += head // SHARED * KEY
    keys += head // SHARED * KEY
    stash_keys += head * KEY
    at_value = head * VALUE + v[None, :]
    at_state = head * KEY * VALUE + v[None, :]
    write = tl.load(segments + 5)
    state = states + write * HEADS * KEY * VALUE + at_state
    if write < 0:
        state = spare - (write + 1) * HEADS * KEY * VALUE + at_state
    _start(
        states + tl.load(segments + 4) * HEADS * KEY * VALUE + at_state, state, stash_keys, stash_updates + at_value,
        stash_sums + head, pending + tl.load(segments + 6), tl.load(segments + 7), has_v, HEADS, KEY, VALUE, BLOCK_K,
    )  # fmt: skip
    tl.debug_barrier()
    for block in range(tl.load(segments), tl.load(segments + 1)):
        start = tl.load(blocks + block * BLOCK_WORDS)
        end = tl.load(blocks + block * BLOCK_WORDS + 1)
        row = start + tl.arange(0, BLOCK_N)
        live = row < end
        is_value = live[:, None] & has_v[None, :]
        found, update, total, size = _block(
            queries, keys, values + at_value, gates + head, betas + head, updates + at_value, sums + head, state, visible,
            tl.load(segments + 9), first, tl.load(segments + 3), tl.where(stays, first, start), start, end, has_v,
            query_stride, key_stride, value_stride, gate_stride, beta_stride, scale, HEADS, KEY, VALUE, IS_DELTA, EPSILON,
            BLOCK_N, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        tl.store(out + row[:, None] * HEADS * VALUE + at_value, found, mask=is_value)
        key_rows = keys + row[:, None] * key_stride
        if stash >= 0:
            place = stash + row - first
            is_first = live & (tl.program_id(0) == 0)
            tl.store(stash_updates + place[:, None] * HEADS * VALUE + at_value, update, mask=is_value)
            tl.store(stash_sums + place * HEADS + head, total.to(tl.float32), mask=is_first)
            _store_keys(stash_keys + place[:, None] * HEADS * KEY, key_rows, size, is_first, KEY, BLOCK_K)
        if stays:
            tl.store(updates + row[:, None] * HEADS * VALUE + at_value, update, mask=is_value)
            tl.store(sums + row * HEADS + head, total, mask=live)
        else:
            mark = tl.load(blocks + block * BLOCK_WORDS + 2)
            marked = states + mark * HEADS * KEY * VALUE + at_state
            _move(state, marked, mark >= 0, key_rows, size, update, total, row, end, has_v, KEY, VALUE, BLOCK_K)
        tl.debug_barrier()


@triton.jit
def _block(
    queries, keys, values, gates, betas, updates, sums, state, visible, mask_at, first, count, begin, start, end, has_v,
    query_stride, key_stride, value_stride, gate_stride, beta_stride, scale,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, IS_DELTA: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return outputs and updates of a block's rows [N, V], their sums of gates and the factors of their keys [N].

    begin: the first row of earlier blocks that its rows see.
    """
    n = tl.arange(0, BLOCK_N)
    row = start + n
    live = row < end
    total = _path_sums(gates, gate_stride, visible, mask_at, first, count, row, begin, start, end, BLOCK_N)
    queries += row[:, None] * query_stride
    own = keys + row[:, None] * key_stride
    mixed, found, among, known = _products(
        queries, own, own, state, live, live, has_v, KEY, VALUE, True, IS_DELTA, BLOCK_N, BLOCK_K, BLOCK_V
    )
    query_size = _sizes(queries, live, KEY, IS_DELTA, EPSILON, BLOCK_N, BLOCK_K) * scale
    size = _sizes(own, live, KEY, IS_DELTA, EPSILON, BLOCK_N, BLOCK_K)
    factor = tl.exp(total.to(tl.float32))
    found *= (query_size * factor)[:, None]
    is_value = live[:, None] & has_v[None, :]
    update = tl.load(values + row[:, None] * value_stride, mask=is_value, other=0.0).to(tl.float32)
    if IS_DELTA:
        update -= known * (size * factor)[:, None]
    for at in range(begin, start, BLOCK_N):
        other = at + n
        others = keys + other[:, None] * key_stride
        above, _, beside, _ = _products(
            queries, own, others, state, live, other < end, has_v, KEY, VALUE, False, IS_DELTA, BLOCK_N, BLOCK_K, BLOCK_V
        )
        left = _decays(total, tl.load(sums + other * HEADS), _seen(visible, mask_at, first, count, row, other, end))
        left *= _sizes(others, other < end, KEY, IS_DELTA, EPSILON, BLOCK_N, BLOCK_K)[None, :]
        added = tl.load(updates + other[:, None] * HEADS * VALUE, mask=has_v[None, :], other=0.0)
        found = tl.dot(above * left * query_size[:, None], added, found, input_precision="ieee")
        if IS_DELTA:
            update -= tl.dot(beside * left * size[:, None], added, input_precision="ieee")
    beta = tl.load(betas + row * beta_stride, mask=live, other=0.0).to(tl.float32)
    update *= beta[:, None]
    left = _decays(total, total, _seen(visible, mask_at, first, count, row, row, end)) * size[None, :]
    if IS_DELTA:
        among = tl.where(n[:, None] > n[None, :], among * left * (beta * size)[:, None], 0.0)
        update = _substitute(update, among, n, (end - start).to(tl.int32))
    found = tl.dot(mixed * left * query_size[:, None], update, found, input_precision="ieee")
    return found, update, total, size


@triton.jit
def _products(
    queries, keys, others, state, live, is_other, has_v, KEY: tl.constexpr, VALUE: tl.constexpr,
    HAS_STATE: tl.constexpr, IS_DELTA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the products of queries with other rows' keys [N, N] and with the state [N, V], and the same of keys."""
    by_query, by_key = tl.zeros([BLOCK_N, BLOCK_N], tl.float32), tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    from_query, from_key = tl.zeros([BLOCK_N, BLOCK_V], tl.float32), tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for channel in range(0, KEY, BLOCK_K):
        k = channel + tl.arange(0, BLOCK_K)
        has_k = k < KEY
        query = tl.load(queries + k[None, :], mask=live[:, None] & has_k[None, :], other=0.0).to(tl.float32)
        other = tl.load(others + k[None, :], mask=is_other[:, None] & has_k[None, :], other=0.0).to(tl.float32)
        by_query = tl.dot(query, tl.trans(other), by_query, input_precision="ieee")
        if IS_DELTA:
            key = tl.load(keys + k[None, :], mask=live[:, None] & has_k[None, :], other=0.0).to(tl.float32)
            by_key = tl.dot(key, tl.trans(other), by_key, input_precision="ieee")
        if HAS_STATE:
            part = tl.load(state + k[:, None] * VALUE, mask=has_k[:, None] & has_v[None, :], other=0.0)
            from_query = tl.dot(query, part, from_query, input_precision="ieee")
            if IS_DELTA:
                from_key = tl.dot(key, part, from_key, input_precision="ieee")
    return by_query, from_query, by_key, from_key


@triton.jit
def _path_sums(gates, stride, visible, mask_at, first, count, row, begin, start, end, BLOCK_N: tl.constexpr):
    """Return the sums of gates over the path to each row of a block [N], from the rows of a segment's blocks up to it."""
    total = tl.zeros([BLOCK_N], tl.float64)
    for at in range(begin, start + 1, BLOCK_N):
        other = at + tl.arange(0, BLOCK_N)
        gate = tl.load(gates + other * stride, mask=other < end, other=0.0).to(tl.float64)
        total += tl.sum(tl.where(_seen(visible, mask_at, first, count, row, other, end), gate[None, :], 0.0), 1)
    return total


@triton.jit
def _substitute(update, mixed, n, count):
    """Return d of (1 + M) d = update for a strictly lower triangular M [N, N].

    A row is known when all before it are, and is then taken from those behind it. A series in powers of M, which would be
    products alone, loses all digits where keys are alike: its terms grow as binomial coefficients.
    """
    for done in range(count - 1):
        known = tl.sum(tl.where(n[:, None] == done, update, 0.0), 0)
        update -= tl.sum(tl.where(n[None, :] == done, mixed, 0.0), 1)[:, None] * known[None, :]
    return update


@triton.jit
def _store_keys(stash, keys, size, live, KEY: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write the keys of rows, multiplied by their sizes, to their rows of the stash."""
    for channel in range(0, KEY, BLOCK_K):
        k = channel + tl.arange(0, BLOCK_K)
        is_key = live[:, None] & (k < KEY)[None, :]
        key = tl.load(keys + k[None, :], mask=is_key, other=0.0).to(tl.float32)
        tl.store(stash + k[None, :], key * size[:, None], mask=is_key)


@triton.jit
def _move(
    state, marked, is_marked, keys, size, update, total, row, end, has_v,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Move a state on behind the rows of a block, and write it to `marked` too."""
    live = row < end
    last = tl.sum(tl.where(row == end - 1, total, 0.0), 0)
    decay = tl.exp(last.to(tl.float32))
    share = tl.exp(tl.where(live, (last - total).to(tl.float32), float("-inf"))) * size
    for channel in range(0, KEY, BLOCK_K):
        k = channel + tl.arange(0, BLOCK_K)
        is_state = (k < KEY)[:, None] & has_v[None, :]
        key = tl.load(keys + k[None, :], mask=live[:, None] & (k < KEY)[None, :], other=0.0).to(tl.float32)
        part = tl.load(state + k[:, None] * VALUE, mask=is_state, other=0.0) * decay
        part = tl.dot(tl.trans(key * share[:, None]), update, part, input_precision="ieee")
        tl.store(state + k[:, None] * VALUE, part, mask=is_state)
        tl.store(marked + k[:, None] * VALUE, part, mask=is_state & is_marked)


@triton.jit
def _sizes(
    x, live, KEY: tl.constexpr, IS_DELTA: tl.constexpr, EPSILON: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return what queries or keys of rows are multiplied by [N]."""
    squares = tl.zeros([BLOCK_N], tl.float32)
    if IS_DELTA:
        for channel in range(0, KEY, BLOCK_K):
            k = channel + tl.arange(0, BLOCK_K)
            part = tl.load(x + k[None, :], mask=live[:, None] & (k < KEY)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(part * part, 1)
        squares = tl.rsqrt(squares + EPSILON)
    else:
        squares += 1.0
    return squares


@triton.jit
def _seen(visible, mask_at, first, count, row, other, end):
    """Return which of other rows lie on the path to each row [N, N]."""
    live = (row < end)[:, None] & (other < end)[None, :]
    at = mask_at + (row - first)[:, None] * count + (other - first)[None, :]
    on_path = tl.load(visible + at, mask=live & (mask_at >= 0), other=0).to(tl.int1)
    return live & tl.where(mask_at >= 0, on_path, row[:, None] >= other[None, :])


@triton.jit
def _decays(totals, others, seen):
    """Return exp of the differences of sums where rows are seen, else 0: [N, N]."""
    return tl.exp(tl.where(seen, (totals[:, None] - others[None, :]).to(tl.float32), float("-inf")))


@triton.jit
def _start(
    before, state, stash_keys, stash_updates, stash_sums, pending, count, has_v,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the state before a segment's rows, behind an accepted path of the last tree."""
    BLOCK: tl.constexpr = 16
    p = tl.arange(0, BLOCK)
    last = tl.zeros([], tl.float32)
    if count > 0:
        last = tl.load(stash_sums + tl.load(pending + count - 1) * HEADS)
    for channel in range(0, KEY, BLOCK_K):
        k = channel + tl.arange(0, BLOCK_K)
        is_state = (k < KEY)[:, None] & has_v[None, :]
        part = tl.load(before + k[:, None] * VALUE, mask=is_state, other=0.0) * tl.exp(last)
        for start in range(0, count, BLOCK):
            live = start + p < count
            place = tl.load(pending + start + p, mask=live, other=0)
            share = tl.exp(last - tl.load(stash_sums + place * HEADS, mask=live, other=float("inf")))
            is_key, is_value = live[None, :] & (k < KEY)[:, None], live[:, None] & has_v[None, :]
            key = tl.load(stash_keys + place[None, :] * HEADS * KEY + k[:, None], mask=is_key, other=0.0)
            update = tl.load(stash_updates + place[:, None] * HEADS * VALUE, mask=is_value, other=0.0)
            part = tl.dot(key * share[None, :], update, part, input_precision="ieee")
        tl.store(state + k[:, None] * VALUE, part, mask=is_state)
