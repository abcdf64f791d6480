"""Mixtures of experts as Triton kernels: routing, the pairs of rows and experts in order, and their products.

Each tile holds pairs of one expert, so that its weights are read once for all of them; the tile finds its expert by the
number of pairs of each. Tiles have one size and nothing is summed across programs: a row gets the same bits in any batch.
Results are rounded where transformers rounds. Launches depend on shapes only, so a graph can capture them.

Legend: R rows, E experts, K experts of a row, P = R K pairs, C hidden width, I inner width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.models.cuda.layer_kernels import normed_row, weighted_row
from eyas.tensors import on_device_of

if TYPE_CHECKING:
    from eyas.models.experts import ExpertNorms, RoutedExperts
    from eyas.models.fused import RMSNorm

PAIRS_PER_TILE = 32
ORDER_BLOCK = 1024


def add_norms(norms: ExpertNorms, hidden: Tensor, delta: Tensor, norm: RMSNorm, delta_norm: RMSNorm) -> tuple[Tensor, ...]:
    """The residual sum and its norm, as `fused.add_norm`, and what router and experts of Gemma 4 see of it: one launch."""
    width, found = hidden.shape[-1], tuple(torch.empty_like(hidden) for _ in range(4))
    block = triton.next_power_of_2(width)
    with on_device_of(hidden):
        _add_norms[(hidden.numel() // width,)](
            *(hidden, delta, *found, norm.weight, delta_norm.weight, norms.router_scale),
            *(norms.inputs.weight, norms.router_factor, norm.eps, delta_norm.eps, norms.inputs.eps),
            WIDTH=width, ADDS_ONE=norm.adds_one, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return found


def route(logits: Tensor, routed: RoutedExperts) -> tuple[Tensor, Tensor]:
    """The best experts of rows by logits [R, E], and their shares: weights and ids [R, K], int32, in one launch."""
    rows, count = logits.shape
    dtype = logits.dtype if routed.rounds_weights else torch.float32
    weights = torch.empty((rows, routed.top_k), dtype=dtype, device=logits.device)
    chosen = torch.empty((rows, routed.top_k), dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        _route[(rows,)](
            *(logits, weights, chosen, logits if routed.scales is None else routed.scales),
            NUM_EXPERTS=count, TOP_K=routed.top_k, NORMALISES=routed.normalises, HAS_SCALES=routed.scales is not None,
            BLOCK_E=triton.next_power_of_2(count), BLOCK_K=triton.next_power_of_2(routed.top_k), num_warps=1,
        )  # fmt: skip
    return weights, chosen


def expert_outputs(x: Tensor, chosen: Tensor, routed: RoutedExperts) -> Tensor:
    """Outputs of the chosen experts [R, K] for rows x [R, C], each by itself: [R, K, C], in three launches."""
    (num_experts, hidden, inner), pairs = routed.down.shape, chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    gated, out = x.new_empty((pairs, inner)), x.new_empty((*chosen.shape, hidden))
    tiles = min(pairs, pairs // PAIRS_PER_TILE + num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "TOP_K": routed.top_k, "HIDDEN": hidden, "INNER": inner}
    sizes |= {"BLOCK_E": triton.next_power_of_2(num_experts), "BLOCK_M": PAIRS_PER_TILE}
    is_wide = x.dtype == torch.float32  # without matrix units
    block_n, block_k, stages = (32, 32, 2) if is_wide else (64, 64, 3)
    options = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4, "num_stages": stages, "enable_fp_fusion": False}
    with on_device_of(x):
        _order[(num_experts + 1,)](chosen, order, offsets, pairs, BLOCK=ORDER_BLOCK, num_warps=4)
        _gate_up[(tiles, triton.cdiv(inner, block_n))](
            x.contiguous(), routed.gate_up, order, offsets, gated, IS_SILU=routed.activation == "silu", **sizes, **options
        )
        _down[(tiles, triton.cdiv(hidden, block_n))](gated, routed.down, order, offsets, out, **sizes, **options)
    return out


def combine(outputs: Tensor, shares: Tensor) -> Tensor:
    """The sum of the experts' outputs [R, K, C] by their shares: [R, C], in one launch."""
    (rows, top_k, width), out = outputs.shape, outputs.new_empty((outputs.shape[0], outputs.shape[2]))
    block = triton.next_power_of_2(width)
    with on_device_of(outputs):
        _combine_experts[(rows,)](
            *(outputs, shares, out), TOP_K=top_k, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return out


@triton.jit
def _add_norms(
    hidden, delta, state, normed, to_router, to_experts, weight, inner, router_scale, expert_weight, router_factor, eps,
    inner_eps, expert_eps,
    WIDTH: tl.constexpr, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    at, kept = tl.program_id(0).to(tl.int64) * WIDTH + d, d < WIDTH
    x, y = tl.load(hidden + at, mask=kept, other=0.0), tl.load(delta + at, mask=kept, other=0.0)
    y = normed_row(y, tl.load(inner + d, mask=kept, other=0.0), inner_eps, WIDTH, ADDS_ONE)
    x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(state + at, x, mask=kept)
    tl.store(normed + at, normed_row(x, tl.load(weight + d, mask=kept, other=0.0), eps, WIDTH, ADDS_ONE), mask=kept)
    own = tl.load(expert_weight + d, mask=kept, other=0.0)
    tl.store(to_experts + at, normed_row(x, own, expert_eps, WIDTH, ADDS_ONE), mask=kept)
    scaled = normed_row(x, tl.load(router_scale + d, mask=kept, other=0.0), expert_eps, WIDTH, False)
    tl.store(to_router + at, (scaled.to(tl.float32) * router_factor).to(x.dtype), mask=kept)


@triton.jit
def _route(
    logits, weights, chosen, scales,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISES: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row. Of equal probabilities the first expert is taken."""
    row, e, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    x = tl.load(logits + row * NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    probs = tl.exp(x - tl.max(x, 0))
    left = tl.where(e < NUM_EXPERTS, probs / tl.sum(probs, 0), -1.0)
    ids, picked = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for turn in range(TOP_K):
        best = tl.max(left, 0)
        place = tl.minimum(tl.min(tl.where(left == best, e, BLOCK_E), 0), NUM_EXPERTS - 1)  # NaN has no place
        ids, picked = tl.where(k == turn, place, ids), tl.where(k == turn, best, picked)
        left = tl.where(e == place, -2.0, left)
    if NORMALISES:
        picked = picked / tl.sum(picked, 0)
    if HAS_SCALES:
        picked = picked * tl.load(scales + ids, mask=k < TOP_K, other=0.0).to(tl.float32)
    tl.store(weights + row * TOP_K + k, picked.to(weights.dtype.element_ty), mask=k < TOP_K)
    tl.store(chosen + row * TOP_K + k, ids, mask=k < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _order(chosen, order, offsets, pairs, BLOCK: tl.constexpr):
    """The pairs of one expert, behind those of the experts before it; by row."""
    expert, n, before = tl.program_id(0), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    for at in range(0, pairs, BLOCK):
        ids = tl.load(chosen + at + n, mask=at + n < pairs, other=2147483647)
        before += (ids < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(offsets + expert, place)
    for at in range(0, pairs, BLOCK):
        mine = tl.load(chosen + at + n, mask=at + n < pairs, other=2147483647) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at + n, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _tile_of(offsets, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a program's tile, the places of its pairs, and which of these are its own. Tiles behind all others have
    no expert."""
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    start = tl.load(offsets + e, mask=e < NUM_EXPERTS, other=0)
    end = tl.load(offsets + e + 1, mask=e < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(end - start, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    own = e == expert
    place = tl.sum(tl.where(own, start + (tile - ends + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    return expert, place, place < tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def _gate_up(
    x, weight, order, offsets, out,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, IS_SILU: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gates and values of an expert's rows, and their product: pairs in order [P, I]."""
    expert, place, live = _tile_of(offsets, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    column, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = (tl.load(order + place, mask=live, other=0) // TOP_K).to(tl.int64)
    x += row[:, None] * HIDDEN + k[None, :]
    weight += expert.to(tl.int64) * 2 * INNER * HIDDEN + column[:, None] * HIDDEN + k[None, :]
    gates, ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, HIDDEN, BLOCK_K):
        inside = (at + k < HIDDEN)[None, :]
        a = tl.load(x + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(weight + at, mask=(column < INNER)[:, None] & inside, other=0.0)
        c = tl.load(weight + INNER * HIDDEN + at, mask=(column < INNER)[:, None] & inside, other=0.0)
        gates = tl.dot(a, tl.trans(b), gates, input_precision="ieee")
        ups = tl.dot(a, tl.trans(c), ups, input_precision="ieee")
    dtype = out.dtype.element_ty
    gates, ups = gates.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
    # gelu: 1 + tanh(z) is 2 sigmoid(2 z)
    z = gates if IS_SILU else 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    gates = (gates * tl.sigmoid(tl.maximum(z, -80.0))).to(dtype).to(tl.float32)
    kept = live[:, None] & (column < INNER)[None, :]
    tl.store(out + place.to(tl.int64)[:, None] * INNER + column[None, :], (gates * ups).to(dtype), mask=kept)


@triton.jit
def _down(
    x, weight, order, offsets, out,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The second product of an expert's rows, each to the place of its pair [P, C]."""
    expert, place, live = _tile_of(offsets, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    column, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x += place.to(tl.int64)[:, None] * INNER + k[None, :]
    weight += expert.to(tl.int64) * HIDDEN * INNER + column[:, None] * INNER + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, INNER, BLOCK_K):
        inside = (at + k < INNER)[None, :]
        a = tl.load(x + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(weight + at, mask=(column < HIDDEN)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    kept = live[:, None] & (column < HIDDEN)[None, :]
    tl.store(out + pair[:, None] * HIDDEN + column[None, :], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _combine_experts(outputs, shares, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept = d < WIDTH
    tl.store(out + row * WIDTH + d, weighted_row(outputs, shares, row, d, kept, WIDTH, TOP_K), mask=kept)
