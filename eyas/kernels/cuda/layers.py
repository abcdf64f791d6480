"""Triton kernels of a layer's work between its products: the functions of `eyas.kernels.plain.layers` for CUDA, with the
same arguments.

Sums are float32. Norms and gates are rounded where transformers rounds, rotary embedding once. Launches depend on
shapes only, so a graph can capture them. Legend as in eyas.models.layers.fused; N is the number of rows that a norm sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import UNSCALED, KVScales, LayerSlots, NormWeight, Projected

if TYPE_CHECKING:
    from eyas.models.layers.experts import ExpertOutputs
    from eyas.models.layers.norms import HeadLayout, RMSNorm

RUNS_EXPERTS = True
GATE_BLOCK = 1024
# Rows of a tile of `linear` for narrow types, and outputs from which on its tiles are wide.
PRODUCT_ROWS = 64
WIDE_OUTPUTS = 8192


def add_norm(
    hidden: Tensor, delta: Tensor | ExpertOutputs, norm: RMSNorm | NormWeight, delta_norm: RMSNorm | None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the residual sum and its norm: one launch. Outputs of experts are summed in it."""
    outputs, shares, dense, mixed = (delta, None, None, None) if isinstance(delta, Tensor) else delta
    (own, beside), inner, width = mixed or (norm, norm), delta_norm or norm, hidden.shape[-1]
    state, normed = outputs.new_empty(hidden.shape), outputs.new_empty(hidden.shape)
    block = triton.next_power_of_2(width)
    with on_device_of(hidden):
        _add_norm[(hidden.numel() // width,)](
            *(hidden, outputs, shares, dense, state, normed, norm.weight, inner.weight, own.weight, beside.weight),
            *(norm.weight if factor is None else factor, norm.eps, inner.eps, own.eps),
            WIDTH=width, ADDS_ONE=norm.adds_one, HAS_INNER=delta_norm is not None, HAS_FACTOR=factor is not None,
            TOP_K=0 if shares is None else shares.shape[1], HAS_DENSE=dense is not None, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return state, normed


def rms_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Tensor:
    """Return the root-mean-square norm over the last dimension of rows, weight [C]: one launch."""
    x = x.contiguous()
    width, normed = x.shape[-1], torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with on_device_of(x):
        _norm[(x.numel() // width,)](
            *(x, normed, weight, eps), WIDTH=width, ADDS_ONE=adds_one, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return normed


def norm_rows(x: Tensor, norm: RMSNorm) -> Tensor:
    """Return the norm of rows [1, R, C]: one launch."""
    return rms_norm(x, norm.weight, norm.eps, norm.adds_one)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of rows [R, C], and its norm: one launch."""
    return add_norm(hidden.contiguous(), delta, NormWeight(weight, eps), None)


def rotary_tables(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, R, D] at positions [1, R] in the type of x, as transformers' module has them: one launch."""
    prefix = f"{layer_type}_" if layer_type else ""
    frequencies, rows = getattr(module, f"{prefix}inv_freq"), position_ids.shape[-1]
    cos, sin = torch.empty((2, 1, rows, 2 * len(frequencies)), dtype=x.dtype, device=x.device)
    with on_device_of(x):
        _rotary_tables[(rows,)](
            *(position_ids.contiguous(), frequencies, cos, sin, float(getattr(module, f"{prefix}attention_scaling"))),
            HALF=len(frequencies), BLOCK=triton.next_power_of_2(len(frequencies)), num_warps=1,
        )  # fmt: skip
    return cos, sin


def pair_inputs(
    states: Tensor, parents: Tensor, tokens: Tensor, draft_ids: Tensor, embedding: Tensor, norms: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the first layer of an EAGLE-3 head sees of the rows of a level: one launch."""
    (_, above, width), rows = states.shape, tokens.numel()
    inputs = torch.empty((rows, 2 * width), dtype=states.dtype, device=states.device)
    taken = torch.empty((rows, width), dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(width)
    with on_device_of(states):
        _pair_inputs[(rows,)](
            *(states.contiguous(), parents, tokens, draft_ids, embedding, *norms, inputs, taken, eps),
            ABOVE=above, PER_SESSION=tokens.shape[1], WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return inputs, taken


def rotate_and_store(
    qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor | None,
    scales: KVScales = UNSCALED,
) -> Tensor:  # fmt: skip
    """Rotate and write to the cache: one launch.

    Args:
        rotary: cos and sin [1, R, D].
        slots: without them row r writes to slot r.
    """
    (rows, _, width), (cos, sin), norms = qkv.shape, rotary, heads.norms
    query = torch.empty((rows, heads.num_heads, width), dtype=qkv.dtype, device=qkv.device)
    with on_device_of(qkv):
        _rotate_and_store[(rows, heads.num_heads + 2 * heads.num_kv_heads)](
            *(qkv, query, keys, values, qkv if slots is None else slots, cos, sin, norms.weight if norms else qkv),
            norms.eps if norms else 0.0, scales.key, scales.value,
            NUM_HEADS=heads.num_heads, NUM_KV=heads.num_kv_heads, SOURCE_HEADS=qkv.shape[1], WIDTH=width,
            ROTARY_STRIDE=cos.stride(-2), HAS_SLOTS=slots is not None, NORMED_HEADS=len(norms.weight) if norms else 0,
            ADDS_ONE=norms is not None and norms.adds_one, BLOCK=triton.next_power_of_2(width),
            MOST=0.0 if keys.dtype == qkv.dtype else torch.finfo(keys.dtype).max, num_warps=1,
        )  # fmt: skip
    return query


def project(qkv: Tensor, heads: HeadLayout, rotary: Tensor, residual: Tensor, slots: LayerSlots | None) -> Projected:
    """Rotate queries and keys of qkv [R, H + 2 J, D]; keys and values go to `slots` at once, if there are some."""
    tables = rotary[:, 0], rotary[:, 1]
    if slots:
        query = rotate_and_store(qkv, heads, tables, slots.keys, slots.values, slots.slots)
        return Projected(query, slots.keys, slots.values, residual, is_cached=True)
    key, value = qkv.new_empty((2, len(qkv), heads.num_kv_heads, heads.width))
    return Projected(rotate_and_store(qkv, heads, tables, key, value, None), key, value, residual)


def project_parts(
    parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float, heads: HeadLayout | None, rotary: Tensor,
    residual: Tensor,
) -> Projected:  # fmt: skip
    """Norm and rotate by the norms that `heads` has laid out: one launch."""
    assert heads, "the head is not served"
    return project(torch.cat(list(parts), -1).view(len(residual), -1, heads.width), heads, rotary, residual, None)


def gate(gate_up: Tensor, activation: str, ups: Tensor | None = None) -> Tensor:
    """Return the activated gates times the values after them: one launch."""
    gates, ups = gate_up.chunk(2, -1) if ups is None else (gate_up, ups)
    width, out = gates.shape[-1], torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    with on_device_of(gates):
        _gate[(out.numel() // width, triton.cdiv(width, GATE_BLOCK))](
            *(gates, ups, out), GATE_STRIDE=gates.stride(-2), UP_STRIDE=ups.stride(-2), WIDTH=width,
            IS_SILU=activation == "silu", BLOCK=GATE_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def convolve(rows: Tensor, base: Tensor, deltas: Tensor, side: int, block_rows: int) -> Tensor:
    """Causal convolutions over blocks of rows [R, C]: one launch."""
    (num_rows, width), (_, _, taps, groups), out = rows.shape, deltas.shape, torch.empty_like(rows)
    with on_device_of(rows):
        _convolve[(num_rows, triton.cdiv(width, GATE_BLOCK))](
            *(rows.contiguous(), base, deltas.contiguous(), out), SIDE=side, BLOCK_ROWS=block_rows, TAPS=taps, WIDTH=width,
            GROUPS=groups, BLOCK=GATE_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Return x [..., K] times weight [N, K] plus bias [N], in one launch: [..., N] of `dtype`, summed in float32.

    Tiles depend on the weight alone and nothing is summed across programs. So a row gets the same bits in any batch, which
    libraries do not promise: they choose kernels by the number of rows.

    Args:
        out: the result.
        scales: of a weight with 8 bits, float32 [N]; it is converted to the type of x while it is read.
    """
    (outputs, inputs), rows = weight.shape, x.numel() // weight.shape[1]
    out = torch.empty((*x.shape[:-1], outputs), dtype=dtype, device=x.device) if out is None else out
    block_n, block_k = (128, 64) if outputs >= WIDE_OUTPUTS else (32, 128)
    block_m = PRODUCT_ROWS
    if x.dtype == torch.float32:  # without matrix units
        block_m, block_n, block_k = 16, 64, 32
    with on_device_of(x):
        _product[(triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))](
            *(x.contiguous(), weight.contiguous(), bias, scales, out, rows, inputs, outputs),
            HAS_BIAS=bias is not None, HAS_SCALES=scales is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=4, num_stages=4 if x.dtype != torch.float32 else 2, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor) -> Tensor:
    """Return x [..., K] times a weight of 8 bits with its scales, plus bias: one launch."""
    return linear(x, weight, bias, x.dtype, scales=scales)


@triton.jit
def _convolve(
    rows, base, deltas, out,
    SIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept, acc = d < WIDTH, tl.zeros([BLOCK], tl.float32)
    dtype = out.dtype.element_ty
    for tap in tl.static_range(TAPS):
        there = kept & (row % BLOCK_ROWS >= tap)  # else it is of another block
        x = tl.load(rows + (row - tap) * WIDTH + d, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(base + tap * WIDTH + d, mask=kept, other=0.0).to(tl.float32)
        delta = tl.load(deltas + ((row * 2 + SIDE) * TAPS + tap) * GROUPS + d // (WIDTH // GROUPS), mask=kept, other=0.0)
        weight = (weight + delta.to(tl.float32)).to(dtype).to(tl.float32)
        acc += (x * weight).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + d, acc.to(dtype), mask=kept)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _product(
    x, weight, bias, scales, out, rows, inputs, outputs,
    HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x += row[:, None] * inputs + k[None, :]
    weight += column[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, inputs, BLOCK_K):
        inside = (at + k < inputs)[None, :]
        a = tl.load(x + at, mask=(row < rows)[:, None] & inside, other=0.0)
        b = tl.load(weight + at, mask=(column < outputs)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b.to(a.dtype)), acc, input_precision="ieee")
    if HAS_SCALES:
        acc *= tl.load(scales + column, mask=column < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    kept = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + column[None, :], acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _add_norm(
    hidden, delta, shares, dense, state, normed, weight, inner, own, beside, factor, eps, inner_eps, own_eps,
    WIDTH: tl.constexpr, ADDS_ONE: tl.constexpr, HAS_INNER: tl.constexpr, HAS_FACTOR: tl.constexpr, TOP_K: tl.constexpr,
    HAS_DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add and norm one row.

    Args:
        TOP_K: of its experts, whose outputs are delta; 0 if delta is a row.
        HAS_DENSE: an MLP is beside them.
    """
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, kept = row * WIDTH + d, d < WIDTH
    y = weighted_row(delta, shares, row, d, kept, WIDTH, TOP_K) if TOP_K else tl.load(delta + at, mask=kept, other=0.0)
    if HAS_DENSE:
        y = normed_row(y, tl.load(own + d, mask=kept, other=0.0), own_eps, WIDTH, ADDS_ONE)
        z = tl.load(dense + at, mask=kept, other=0.0)
        z = normed_row(z, tl.load(beside + d, mask=kept, other=0.0), own_eps, WIDTH, ADDS_ONE)
        y = (y.to(tl.float32) + z.to(tl.float32)).to(y.dtype)
    if HAS_INNER:
        y = normed_row(y, tl.load(inner + d, mask=kept, other=0.0), inner_eps, WIDTH, ADDS_ONE)
    x = tl.load(hidden + at, mask=kept, other=0.0)
    x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    if HAS_FACTOR:
        x = (x.to(tl.float32) * tl.load(factor).to(tl.float32)).to(x.dtype)
    tl.store(state + at, x, mask=kept)
    tl.store(normed + at, normed_row(x, tl.load(weight + d, mask=kept, other=0.0), eps, WIDTH, ADDS_ONE), mask=kept)


@triton.jit
def weighted_row(outputs, shares, row, d, kept, WIDTH: tl.constexpr, TOP_K: tl.constexpr):
    """Return the sum of the outputs [R, K, C] of a row's experts by their shares [R, K]."""
    acc = tl.zeros(d.shape, tl.float32)
    for k in range(TOP_K):
        y = tl.load(outputs + (row * TOP_K + k) * WIDTH + d, mask=kept, other=0.0)
        share = tl.load(shares + row * TOP_K + k)
        part = y.to(tl.float32) * share.to(tl.float32)
        if share.dtype == y.dtype:  # then the product is rounded
            part = part.to(y.dtype).to(tl.float32)
        acc += part
    return acc.to(outputs.dtype.element_ty)


@triton.jit
def _norm(x, normed, weight, eps, WIDTH: tl.constexpr, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    at, kept = tl.program_id(0).to(tl.int64) * WIDTH + d, d < WIDTH
    row, weights = tl.load(x + at, mask=kept, other=0.0), tl.load(weight + d, mask=kept, other=0.0)
    tl.store(normed + at, normed_row(row, weights, eps, WIDTH, ADDS_ONE), mask=kept)


@triton.jit
def _rotary_tables(positions, frequencies, cos, sin, scaling, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, kept = row * 2 * HALF + d, d < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d, mask=kept, other=0.0).to(tl.float32)
    c, s = (tl.cos(angle) * scaling).to(cos.dtype.element_ty), (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    tl.store(cos + at, c, mask=kept)
    tl.store(cos + at + HALF, c, mask=kept)
    tl.store(sin + at, s, mask=kept)
    tl.store(sin + at + HALF, s, mask=kept)


@triton.jit
def _pair_inputs(
    states, parents, tokens, draft_ids, embedding, token_norm, state_norm, inputs, taken, eps,
    ABOVE: tl.constexpr, PER_SESSION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kept, place = d < WIDTH, row // PER_SESSION * ABOVE
    if ABOVE > 1:
        place += tl.load(parents + row)
    x = tl.load(states + place * WIDTH + d, mask=kept, other=0.0)
    y = tl.load(embedding + tl.load(draft_ids + tl.load(tokens + row)) * WIDTH + d, mask=kept, other=0.0)
    x_weight = tl.load(state_norm + d, mask=kept, other=0.0)
    y_weight = tl.load(token_norm + d, mask=kept, other=0.0)
    tl.store(taken + row * WIDTH + d, x, mask=kept)
    tl.store(inputs + row * 2 * WIDTH + d, normed_row(y, y_weight, eps, WIDTH, False), mask=kept)
    tl.store(inputs + row * 2 * WIDTH + WIDTH + d, normed_row(x, x_weight, eps, WIDTH, False), mask=kept)


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr, ADDS_ONE: tl.constexpr):
    """Return one row divided by its root mean square, times its weight."""
    return _scaled(x, _inverse_root(x, eps, WIDTH), weight, ADDS_ONE)


@triton.jit
def _rotate_and_store(
    qkv, query, keys, values, slots, cos, sin, norms, eps, key_scale, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, SOURCE_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROTARY_STRIDE: tl.constexpr, HAS_SLOTS: tl.constexpr, NORMED_HEADS: tl.constexpr, ADDS_ONE: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Rotate and store one head of one row.

    Args:
        MOST: the largest number of a narrow cache; 0 for the type of qkv.
        SOURCE_HEADS: of a row of qkv, in which values may be missing.
        NORMED_HEADS: how many of the heads are normed.
    """
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    kept, left = d < WIDTH, d < WIDTH // 2
    own = head
    if SOURCE_HEADS < NUM_HEADS + 2 * NUM_KV:  # values are keys before their norm
        own = tl.where(head >= SOURCE_HEADS, head - NUM_KV, head)
    source = qkv + (row * SOURCE_HEADS + own) * WIDTH
    slot = (tl.load(slots + row).to(tl.int64) if HAS_SLOTS else row) * NUM_KV
    x = tl.load(source + d, mask=kept, other=0.0)
    if head >= NUM_HEADS + NUM_KV:
        if NORMED_HEADS > NUM_HEADS + NUM_KV:
            x = normed_row(x, tl.load(norms + head * WIDTH + d, mask=kept, other=0.0), eps, WIDTH, ADDS_ONE)
        tl.store(values + (slot + head - NUM_HEADS - NUM_KV) * WIDTH + d, _narrow(x, value_scale, values, MOST), mask=kept)
    else:
        partner = tl.where(left, d + WIDTH // 2, d - WIDTH // 2)
        y = tl.load(source + partner, mask=kept, other=0.0)
        if NORMED_HEADS > 0:
            root = _inverse_root(x, eps, WIDTH)
            x = _scaled(x, root, tl.load(norms + head * WIDTH + d, mask=kept, other=0.0), ADDS_ONE)
            y = _scaled(y, root, tl.load(norms + head * WIDTH + partner, mask=kept, other=0.0), ADDS_ONE)
        c = tl.load(cos + row * ROTARY_STRIDE + d, mask=kept, other=0.0).to(tl.float32)
        s = tl.load(sin + row * ROTARY_STRIDE + d, mask=kept, other=0.0).to(tl.float32)
        turned = x.to(tl.float32) * c + tl.where(left, -y.to(tl.float32), y.to(tl.float32)) * s
        if head < NUM_HEADS:
            tl.store(query + (row * NUM_HEADS + head) * WIDTH + d, turned.to(x.dtype), mask=kept)
        else:
            key = _narrow(turned.to(x.dtype), key_scale, keys, MOST)
            tl.store(keys + (slot + head - NUM_HEADS) * WIDTH + d, key, mask=kept)


@triton.jit
def _narrow(x, scale, pool, MOST: tl.constexpr):
    """Round x as a cache of 8 bits does; NaN stays."""
    if MOST > 0:
        y = tl.div_rn(x.to(tl.float32), tl.full([x.shape[0]], 1.0, tl.float32) * scale)
        y = tl.where(y > MOST, MOST, tl.where(y < -MOST, -MOST, y))
        return y.to(pool.dtype.element_ty)
    else:
        return x


@triton.jit
def _inverse_root(x, eps, WIDTH: tl.constexpr):
    """Return the inverse of a row's root mean square."""
    y = x.to(tl.float32)
    return tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)


@triton.jit
def _scaled(x, root, weight, ADDS_ONE: tl.constexpr):
    y = x.to(tl.float32) * root
    if ADDS_ONE:
        return (y * (1.0 + weight.to(tl.float32))).to(x.dtype)
    return (y.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _gate(
    gates, ups, out,
    GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, WIDTH: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = d < WIDTH
    gates_here = tl.load(gates + row * GATE_STRIDE + d, mask=kept, other=0.0)
    ups_here = tl.load(ups + row * UP_STRIDE + d, mask=kept, other=0.0)
    tl.store(out + row * WIDTH + d, activated(gates_here, ups_here, gates_here.dtype, IS_SILU), mask=kept)


@triton.jit
def activated(gates, ups, dtype, IS_SILU: tl.constexpr):
    """Return activated gates times values, both rounded to `dtype`."""
    x = gates.to(dtype).to(tl.float32)
    # gelu: 1 + tanh(z) is 2 sigmoid(2 z)
    z = x if IS_SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    x = (x * tl.sigmoid(tl.maximum(z, -80.0))).to(dtype).to(tl.float32)
    return (x * ups.to(dtype).to(tl.float32)).to(dtype)
