"""Mixtures of experts as Triton kernels: routing, which lists the pairs of rows and experts, and their products.

Each tile holds pairs of one expert, so that its weights are read once for all of them; the tile finds its expert by the
number of pairs of each. Tiles have one size and nothing is summed across programs: a row gets the same bits in any batch.
Results are rounded where transformers rounds. Weights may have 8 bits, with a scale for each block: then rows keep their
type, while transformers rounds them to 8 bits. Launches depend on shapes only, so a graph can capture them.

Legend: R rows, E experts, K experts of a row, P = R K pairs, C hidden width, I inner width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import SCALED_TILE, Routing
from eyas.kernels.cuda.layers import activated, normed_row, weighted_row

if TYPE_CHECKING:
    from eyas.models.layers.experts import ExpertNorms, RoutedExperts
    from eyas.models.layers.norms import RMSNorm

PAIRS_PER_TILE = 32
ROUTE_TILE = 8192  # logits that a program which routes compares at once


def add_norms(norms: ExpertNorms, hidden: Tensor, delta: Tensor, norm: RMSNorm, delta_norm: RMSNorm) -> tuple[Tensor, ...]:
    """Return the residual sum and its norm, as `layers.add_norm`, and what router and experts of Gemma 4 see of it: one
    launch.
    """
    width, found = hidden.shape[-1], tuple(torch.empty_like(hidden) for _ in range(4))
    block = triton.next_power_of_2(width)
    with on_device_of(hidden):
        _add_norms[(hidden.numel() // width,)](
            *(hidden, delta, *found, norm.weight, delta_norm.weight, norms.router_scale),
            *(norms.inputs.weight, norms.router_factor, norm.eps, delta_norm.eps, norms.inputs.eps),
            WIDTH=width, ADDS_ONE=norm.adds_one, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return found


def route(logits: Tensor, routed: RoutedExperts) -> Routing:
    """Return the best experts of rows by logits [R, E], in one launch."""
    (rows, num_experts), device = logits.shape, logits.device
    dtype = logits.dtype if routed.rounds_weights else torch.float32
    shares = torch.empty((rows, routed.top_k), dtype=dtype, device=device)
    pairs = torch.empty((num_experts, rows), dtype=torch.int32, device=device)
    counts, block_e = torch.empty(num_experts, dtype=torch.int32, device=device), triton.next_power_of_2(num_experts)
    with on_device_of(logits):
        _route[(num_experts + rows,)](
            *(logits, shares, logits if routed.scales is None else routed.scales, pairs, counts, rows),
            NUM_EXPERTS=num_experts, TOP_K=routed.top_k, NORMALISES=routed.normalises, HAS_SCALES=routed.scales is not None,
            BLOCK_E=block_e, BLOCK_R=ROUTE_TILE // block_e, num_warps=8,
        )  # fmt: skip
    return Routing(shares, pairs, counts)


def expert_outputs(x: Tensor, routing: Routing, routed: RoutedExperts) -> Tensor:
    """Return the outputs of the chosen experts for rows x [R, C], each by itself: [R, K, C], in two launches."""
    (num_experts, hidden, inner), rows, num_pairs = routed.down.shape, len(x), routing.shares.numel()
    gated, out = x.new_empty((num_pairs, inner)), x.new_empty((*routing.shares.shape, hidden))
    tiles = min(num_pairs, num_pairs // PAIRS_PER_TILE + num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "TOP_K": routed.top_k, "HIDDEN": hidden, "INNER": inner}
    sizes |= {"BLOCK_E": triton.next_power_of_2(num_experts), "BLOCK_M": PAIRS_PER_TILE}
    is_wide = x.dtype == torch.float32  # without matrix units
    block_n, block_k, stages = (32, 32, 2) if is_wide else (SCALED_TILE, SCALED_TILE, 3)
    options = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4, "num_stages": stages, "enable_fp_fusion": False}
    lists, held = (routing.pairs, routing.counts, rows), routed.weight_scales
    gate_up_scales, down_scales, (scale_n, scale_k) = held or (None, None, (0, 0))
    sizes |= {"SCALE_N": scale_n, "SCALE_K": scale_k}
    with on_device_of(x):
        _gate_up[(tiles, triton.cdiv(inner, block_n))](
            *(x.contiguous(), routed.gate_up, gate_up_scales, *lists, gated), IS_SILU=routed.activation == "silu",
            **sizes, **options,
        )  # fmt: skip
        _down[(tiles, triton.cdiv(hidden, block_n))](gated, routed.down, down_scales, *lists, out, **sizes, **options)
    return out


def combine(outputs: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of the experts' outputs [R, K, C] by their shares: [R, C], in one launch."""
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


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits, shares, scales, pairs, counts, rows,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISES: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one expert, or the shares of one row. Neither needs to wait for the other: both come from the ranks
    of logits.
    """
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        _list_pairs(logits, pairs, counts, rows, program, NUM_EXPERTS, TOP_K, BLOCK_E, BLOCK_R)
    else:
        row = (program - NUM_EXPERTS).to(tl.int64)
        _share_row(logits, shares, scales, row, NUM_EXPERTS, TOP_K, NORMALISES, HAS_SCALES, BLOCK_E, BLOCK_R)


@triton.jit
def _rank(own, expert, logits, experts):
    """Return how many logits of a row come before its own: higher ones, and equal ones of earlier experts. NaN is the
    lowest.

    A row is along the last dimension.
    """
    own, logits = tl.where(own == own, own, float("-inf")), tl.where(logits == logits, logits, float("-inf"))
    return tl.sum(((logits > own) | ((logits == own) & (experts < expert))).to(tl.int32), 1)


@triton.jit
def _list_pairs(
    logits, pairs, counts, rows, expert,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """List the rows that choose an expert, one after the other, as row * K + k for the k-th of their experts."""
    e, count = tl.arange(0, BLOCK_E), tl.zeros([], tl.int32)
    for at in range(0, rows, BLOCK_R):
        row = at + tl.arange(0, BLOCK_R)
        there, start = row < rows, logits + row.to(tl.int64) * NUM_EXPERTS
        known = there[:, None] & (e < NUM_EXPERTS)[None, :]
        x = tl.load(start[:, None] + e[None, :], mask=known, other=float("-inf")).to(tl.float32)
        own = tl.load(start + expert, mask=there, other=float("-inf")).to(tl.float32)
        k = _rank(own[:, None], expert, x, e[None, :])
        chosen = (there & (k < TOP_K)).to(tl.int32)
        place = expert.to(tl.int64) * rows + count + tl.cumsum(chosen, 0) - 1
        tl.store(pairs + place, row * TOP_K + k, mask=chosen > 0)
        count += tl.sum(chosen, 0)
    tl.store(counts + expert, count)


@triton.jit
def _share_row(
    logits, shares, scales, row,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISES: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities of the experts that a row chooses."""
    logits += row * NUM_EXPERTS
    e, k = tl.arange(0, BLOCK_E), tl.zeros([BLOCK_E], tl.int32)
    x = tl.load(logits + e, mask=e < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    for at in range(0, NUM_EXPERTS, BLOCK_R):
        other = at + tl.arange(0, BLOCK_R)
        y = tl.load(logits + other, mask=other < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
        k += _rank(x[:, None], e[:, None], y[None, :], other[None, :])
    probs = tl.exp(x - tl.max(x, 0))
    probs = probs / tl.sum(probs, 0)
    if NORMALISES:
        probs = probs / tl.sum(tl.where(k < TOP_K, probs, 0.0), 0)
    if HAS_SCALES:
        probs = probs * tl.load(scales + e, mask=e < NUM_EXPERTS, other=0.0).to(tl.float32)
    tl.store(shares + row * TOP_K + k, probs.to(shares.dtype.element_ty), mask=k < TOP_K)


@triton.jit
def _tile_of(pairs, counts, rows, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a program's tile, its pairs, and which of these are there. Tiles behind all others have no
    expert.
    """
    tile, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(count, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    own = e == expert
    place = (tile - tl.sum(tl.where(own, ends - tiles, 0), 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = place < tl.sum(tl.where(own, count, 0), 0)
    return expert, tl.load(pairs + expert.to(tl.int64) * rows + place, mask=live, other=0).to(tl.int64), live


@triton.jit
def _add_product(acc, a, b, scales, at, SCALE_K: tl.constexpr):
    """Return acc + a b^T of columns from `at` on. SCALE_K: columns of a scale, if b has 8 bits; else 0."""
    if SCALE_K:
        scale = tl.load(scales + at // SCALE_K).to(tl.float32)
        acc += tl.dot(a, tl.trans(b.to(a.dtype)), input_precision="ieee") * scale
    else:
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x, weight, scales, pairs, counts, rows, out,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, IS_SILU: tl.constexpr,
    SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute gates and values of an expert's rows, and their product [P, I]."""
    expert, pair, live = _tile_of(pairs, counts, rows, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    column, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x += (pair // TOP_K)[:, None] * HIDDEN + k[None, :]
    weight += expert.to(tl.int64) * 2 * INNER * HIDDEN + column[:, None] * HIDDEN + k[None, :]
    gates, ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_scales = scales
    if SCALE_K:
        scales += (expert * 2 * (INNER // SCALE_N) + tl.program_id(1) * BLOCK_N // SCALE_N) * tl.cdiv(HIDDEN, SCALE_K)
        up_scales = scales + INNER // SCALE_N * tl.cdiv(HIDDEN, SCALE_K)
    for at in range(0, HIDDEN, BLOCK_K):
        inside = (at + k < HIDDEN)[None, :]
        a = tl.load(x + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(weight + at, mask=(column < INNER)[:, None] & inside, other=0.0)
        c = tl.load(weight + INNER * HIDDEN + at, mask=(column < INNER)[:, None] & inside, other=0.0)
        gates, ups = _add_product(gates, a, b, scales, at, SCALE_K), _add_product(ups, a, c, up_scales, at, SCALE_K)
    kept = live[:, None] & (column < INNER)[None, :]
    found = activated(gates, ups, out.dtype.element_ty, IS_SILU)
    tl.store(out + pair[:, None] * INNER + column[None, :], found, mask=kept)


@triton.jit(do_not_specialize=["rows"])
def _down(
    x, weight, scales, pairs, counts, rows, out,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the second product of an expert's rows [P, C]."""
    expert, pair, live = _tile_of(pairs, counts, rows, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    column, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x += pair[:, None] * INNER + k[None, :]
    weight += expert.to(tl.int64) * HIDDEN * INNER + column[:, None] * INNER + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SCALE_K:
        scales += (expert * tl.cdiv(HIDDEN, SCALE_N) + tl.program_id(1) * BLOCK_N // SCALE_N) * tl.cdiv(INNER, SCALE_K)
    for at in range(0, INNER, BLOCK_K):
        inside = (at + k < INNER)[None, :]
        a = tl.load(x + at, mask=live[:, None] & inside, other=0.0)
        b = tl.load(weight + at, mask=(column < HIDDEN)[:, None] & inside, other=0.0)
        acc = _add_product(acc, a, b, scales, at, SCALE_K)
    kept = live[:, None] & (column < HIDDEN)[None, :]
    tl.store(out + pair[:, None] * HIDDEN + column[None, :], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _combine_experts(outputs, shares, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept = d < WIDTH
    tl.store(out + row * WIDTH + d, weighted_row(outputs, shares, row, d, kept, WIDTH, TOP_K), mask=kept)
