"""The recurrence of gated delta nets and Mamba-2 over the nodes of draft trees, as a Triton kernel.

A program has some columns of values of one head in one segment, and their state in registers. It adds what the last tree
left in the stash, then computes the rows in blocks: the state moves on behind each block of a prompt, while blocks of a tree
read the updates of earlier blocks, of which the program itself wrote its columns. `kernels.plain.recurrent` has the formulas.
Products are float32 without tf32, sums of gates float64. Launches depend on shapes only.

Legend: R rows, J heads of keys, H heads of values, K and V widths of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import BLOCK_WORDS, LENGTH_EPSILON, SEGMENT_WORDS, RecurrentInputs

if TYPE_CHECKING:
    from eyas.cache.state_pools import LayerStates
    from eyas.models.recurrent_rows import RecurrentRows

BLOCK_V = 32  # columns of values of a program


def scan(inputs: RecurrentInputs, pools: LayerStates, rows: RecurrentRows) -> Tensor:
    """Return what `plain.recurrent.scan` returns, in one launch. Gates are of heads."""
    (num_rows, heads, value_width), (key_heads, key_width) = inputs.values.shape, inputs.keys.shape[1:]
    device, tables = inputs.values.device, rows.tables
    out, updates = (torch.empty(inputs.values.shape, device=device) for _ in range(2))
    sums = torch.empty((num_rows, heads), dtype=torch.float64, device=device)
    given = [_of_rows(x) for x in inputs[:5]]
    with on_device_of(out):
        _scan[(triton.cdiv(value_width, BLOCK_V), heads, len(rows.read))](
            *(*given, out, updates, sums, pools.states, pools.keys, pools.updates, pools.sums),
            *tables[:4],
            *(x.stride(0) for x in given),
            key_width**-0.5 if inputs.is_delta else 1.0,
            HEADS=heads, SHARED=heads // key_heads, KEY=key_width, VALUE=value_width, IS_DELTA=inputs.is_delta,
            SEGMENT_WORDS=SEGMENT_WORDS, BLOCK_WORDS=BLOCK_WORDS, EPSILON=LENGTH_EPSILON, BLOCK_N=tables.block_rows,
            BLOCK_K=max(16, triton.next_power_of_2(key_width)), BLOCK_V=BLOCK_V, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def _of_rows(x: Tensor) -> Tensor:
    """Return numbers of rows [R, ...] that lie next to each other within a row."""
    return x if x[0].is_contiguous() else x.contiguous()


@triton.jit
def _scan(
    queries, keys, values, gates, betas, out, updates, sums, states, stash_keys, stash_updates, stash_sums,
    segments, blocks, pending, visible, query_stride, key_stride, value_stride, gate_stride, beta_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, IS_DELTA: tl.constexpr,
    SEGMENT_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, v, k = tl.program_id(1), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    n, has_v = tl.arange(0, BLOCK_N), v < VALUE
    segments += tl.program_id(2) * SEGMENT_WORDS
    first, count = tl.load(segments + 2), tl.load(segments + 3)
    stash, mask_at, stays = tl.load(segments + 8), tl.load(segments + 9), tl.load(segments + 10) > 0
    # Pointers to what a row has of this head.
    queries, keys = queries + head // SHARED * KEY, keys + head // SHARED * KEY
    values, gates, betas = values + head * VALUE, gates + head, betas + head
    out, updates, sums = out + head * VALUE, updates + head * VALUE, sums + head
    stash_keys, stash_updates, stash_sums = stash_keys + head * KEY, stash_updates + head * VALUE, stash_sums + head
    in_state = (head * KEY + k[:, None]) * VALUE + v[None, :]
    is_state = (k < KEY)[:, None] & has_v[None, :]
    state = tl.load(states + tl.load(segments + 4) * HEADS * KEY * VALUE + in_state, mask=is_state, other=0.0)
    state = _add_pending(
        state, stash_keys, stash_updates, stash_sums, pending + tl.load(segments + 6), tl.load(segments + 7), k, v, has_v,
        HEADS, KEY, VALUE,
    )  # fmt: skip
    for block in range(tl.load(segments), tl.load(segments + 1)):
        start, end = tl.load(blocks + block * BLOCK_WORDS), tl.load(blocks + block * BLOCK_WORDS + 1)
        row, begin = start + n, tl.where(stays, first, start)
        live = row < end
        query = _vectors(queries, row, live, query_stride, k, KEY, IS_DELTA, EPSILON) * scale
        key = _vectors(keys, row, live, key_stride, k, KEY, IS_DELTA, EPSILON)
        beta = tl.load(betas + row * beta_stride, mask=live, other=0.0).to(tl.float32)
        is_value = live[:, None] & has_v[None, :]
        update = tl.load(values + row[:, None] * value_stride + v[None, :], mask=is_value, other=0.0).to(tl.float32)
        # The gates of a path add up over the blocks of a tree.
        total = tl.zeros([BLOCK_N], tl.float64)
        for before in range(begin, start + 1, BLOCK_N):
            other = before + n
            gate = tl.load(gates + other * gate_stride, mask=other < end, other=0.0).to(tl.float64)
            seen = _seen(visible, mask_at, first, count, row, other, end)
            total += tl.sum(tl.where(seen, gate[None, :], 0.0), 1)
        factor = tl.exp(total.to(tl.float32))[:, None]
        found = tl.dot(query, state, input_precision="ieee") * factor
        if IS_DELTA:
            update -= tl.dot(key, state, input_precision="ieee") * factor
        for before in range(begin, start, BLOCK_N):
            other, more = before + n, tl.full([BLOCK_N], True, tl.int1)
            key_before = _vectors(keys, other, more, key_stride, k, KEY, IS_DELTA, EPSILON)
            left = _decays(total, tl.load(sums + other * HEADS), _seen(visible, mask_at, first, count, row, other, end))
            added = tl.load(updates + other[:, None] * HEADS * VALUE + v[None, :], mask=has_v[None, :], other=0.0)
            mixed = tl.dot(query, tl.trans(key_before), input_precision="ieee") * left
            found = tl.dot(mixed, added, found, input_precision="ieee")
            if IS_DELTA:
                mixed = tl.dot(key, tl.trans(key_before), input_precision="ieee") * left
                update -= tl.dot(mixed, added, input_precision="ieee")
        update *= beta[:, None]
        left = _decays(total, total, _seen(visible, mask_at, first, count, row, row, end))
        if IS_DELTA:
            mixed = tl.dot(key, tl.trans(key), input_precision="ieee") * left * beta[:, None]
            mixed = tl.where(n[:, None] > n[None, :], mixed, 0.0)
            # Forward substitution: a row is known when all before it are, and is then taken from those behind it.
            for done in range(0, (end - start - 1).to(tl.int32)):
                known = tl.sum(tl.where(n[:, None] == done, update, 0.0), 0)
                update -= tl.sum(tl.where(n[None, :] == done, mixed, 0.0), 1)[:, None] * known[None, :]
        mixed = tl.dot(query, tl.trans(key), input_precision="ieee") * left
        found = tl.dot(mixed, update, found, input_precision="ieee")
        at = row[:, None] * HEADS * VALUE + v[None, :]
        tl.store(out + at, found, mask=is_value)
        if stash >= 0:
            place = stash + row - first
            tl.store(stash_updates + place[:, None] * HEADS * VALUE + v[None, :], update, mask=is_value)
            is_first = live & (tl.program_id(0) == 0)
            tl.store(stash_sums + place * HEADS, total.to(tl.float32), mask=is_first)
            own = place[:, None] * HEADS * KEY + k[None, :]
            tl.store(stash_keys + own, key, mask=is_first[:, None] & (k < KEY)[None, :])
        if stays:
            tl.store(updates + at, update, mask=is_value)
            tl.store(sums + row * HEADS, total, mask=live)
            tl.debug_barrier()
        else:
            last = tl.sum(tl.where(row == end - 1, total, 0.0), 0)
            left_of = tl.exp(tl.where(live, (last - total).to(tl.float32), float("-inf")))
            moved = tl.dot(tl.trans(key * left_of[:, None]), update, input_precision="ieee")
            state = state * tl.exp(last.to(tl.float32)) + moved
            mark = tl.load(blocks + block * BLOCK_WORDS + 2)
            tl.store(states + mark * HEADS * KEY * VALUE + in_state, state, mask=is_state & (mark >= 0))
    tl.store(states + tl.load(segments + 5) * HEADS * KEY * VALUE + in_state, state, mask=is_state)


@triton.jit
def _vectors(x, row, live, stride, k, KEY: tl.constexpr, IS_DELTA: tl.constexpr, EPSILON: tl.constexpr):
    """Return queries or keys of rows [N, K], by the delta rule of length 1."""
    found = tl.load(x + row[:, None] * stride + k[None, :], mask=live[:, None] & (k < KEY)[None, :], other=0.0)
    found = found.to(tl.float32)
    if IS_DELTA:
        found *= tl.rsqrt(tl.sum(found * found, 1) + EPSILON)[:, None]
    return found


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
def _add_pending(
    state, stash_keys, stash_updates, stash_sums, pending, count, k, v, has_v,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Return the state behind an accepted path."""
    BLOCK: tl.constexpr = 16
    if count > 0:
        last, p = tl.load(stash_sums + tl.load(pending + count - 1) * HEADS), tl.arange(0, BLOCK)
        state *= tl.exp(last)
        for start in range(0, count, BLOCK):
            live = start + p < count
            place = tl.load(pending + start + p, mask=live, other=0)
            left = tl.exp(last - tl.load(stash_sums + place * HEADS, mask=live, other=float("inf")))
            key = tl.load(
                stash_keys + place[None, :] * HEADS * KEY + k[:, None], mask=live[None, :] & (k < KEY)[:, None], other=0.0
            )
            update = tl.load(
                stash_updates + place[:, None] * HEADS * VALUE + v[None, :], mask=live[:, None] & has_v[None, :], other=0.0
            )
            state = tl.dot(key * left[None, :], update, state, input_precision="ieee")
    return state
