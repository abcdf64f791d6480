"""Operations of torch between the products of layers, with the signatures of `eyas.kernels.cuda.layers`.

Legend: S sessions, W rows of a level, R rows, C hidden width, H query heads, J key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.arguments import UNSCALED, KVScales, LayerSlots, Projected

if TYPE_CHECKING:
    from eyas.models.layers.norms import HeadLayout, RMSNorm

# Whether experts run here; else transformers' modules compute them.
RUNS_EXPERTS = False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last dimension, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of rows [R, C], and its norm."""
    state = hidden + delta
    return state, rms_norm(state, weight, eps)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Return the rotary embedding of x [R, heads, D]; rotary [R, 2, D]."""
    cos, sin = rotary[:, :, None].unbind(1)
    left, right = x.chunk(2, -1)
    # (left, right) -> (left cos - right sin, right cos + left sin)
    return x * cos + torch.cat([-right, left], -1) * sin


def project(qkv: Tensor, heads: HeadLayout, rotary: Tensor, residual: Tensor, slots: LayerSlots | None) -> Projected:
    """Rotate queries and keys of qkv [R, H + 2 J, D]; rotary [R, 2, D]. slots: where a kernel may write keys and values."""
    num_rotated = heads.num_heads + heads.num_kv_heads
    rotated = rotate(qkv[:, :num_rotated], rotary)
    return Projected(rotated[:, : heads.num_heads], rotated[:, heads.num_heads :], qkv[:, num_rotated:], residual)


def project_parts(
    parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float, heads: HeadLayout | None, rotary: Tensor,
    residual: Tensor,
) -> Projected:  # fmt: skip
    """Norm and rotate queries, if there are some, and keys, which have products of their own: parts [R, heads * D].

    Args:
        parts: the last one holds values.
        weights: of the norms of all others [D].
        heads: with the same norms laid out by head, for the kernel.
    """
    *turned, value = (part.view(len(part), -1, len(weights[0])) for part in parts)
    rows = [rotate(rms_norm(part, weight, eps), rotary) for part, weight in zip(turned, weights, strict=True)]
    return Projected(rows[0] if len(rows) > 1 else rows[0][:0], rows[-1], value, residual)


def gate(gate_up: Tensor, activation: str, ups: Tensor | None = None) -> Tensor:
    """Return the activated gates times the values after them: [..., 2 I] to [..., I]. ups: the values [..., I], if they are
    apart.
    """
    gates, ups = gate_up.chunk(2, -1) if ups is None else (gate_up, ups)
    activated = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return activated * ups if activated.requires_grad else activated.mul_(ups)


def convolve(rows: Tensor, base: Tensor, deltas: Tensor, side: int, block_rows: int) -> Tensor:
    """Causal convolutions over blocks of rows [R, C], as `BlockConvolution`.

    Args:
        base: [taps, C].
        deltas: of both sides, [R, 2, taps, groups]; `side` chooses.
    """
    taps, width = base.shape
    kernel = base + deltas[:, side].repeat_interleave(width // deltas.shape[3], -1)  # [R, taps, C]
    # Zeros before the block's first row [R / B, B + taps - 1, C]: no tap reaches into the block before.
    blocks = F.pad(rows.view(-1, block_rows, width), (0, 0, taps - 1, 0))
    shifted = blocks.unfold(1, taps, 1).flip(-1).flatten(0, 1)  # [R, C, taps], tap 0 first
    return (shifted * kernel.transpose(1, 2)).sum(-1)


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor) -> Tensor:
    """Return x [..., K] times a weight of 8 bits [N, K] with its scales, float32 [N], plus bias [N]."""
    # The scale is applied to the sum: (x (W / s)) s = x W.
    out = F.linear(x.float(), weight.float()) * scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[s, rows[s]] for every session; x [S, R, ...], rows [S, W]. With R = 1 the single row is used for all."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2])) if x.shape[1] > 1 else x.expand(-1, rows.shape[1], -1)


def pair_inputs(
    states: Tensor, parents: Tensor, tokens: Tensor, draft_ids: Tensor, embedding: Tensor, norms: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the first layer of an EAGLE-3 head sees of the rows of a level.

    Args:
        states: [S, R, C] of the rows above.
        parents: rows among these, int64 [S, W].
        tokens: draft ids, int64 [S, W].
        norms: weights for the embeddings and for the states.

    Returns:
        The two normed side by side, embeddings first [S * W, 2 C]; and the states as they are [S * W, C].
    """
    taken = take_rows(states, parents).flatten(0, 1)
    embedded = F.embedding(draft_ids[tokens].flatten(), embedding)
    rows = zip((embedded, taken), norms, strict=True)
    return torch.cat([rms_norm(x, weight, eps) for x, weight in rows], -1), taken


def norm_rows(x: Tensor, norm: RMSNorm) -> Tensor:
    """Return the norm of rows [1, R, C]."""
    return norm(x)


def add_norm(
    hidden: Tensor, delta: Tensor, norm: RMSNorm, delta_norm: RMSNorm | None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual sum and its norm: hidden, delta [1, R, C]; delta_norm is applied to delta first. May overwrite
    delta.

    factor: what the sum is multiplied by, [1].
    """
    state = hidden + delta_norm(delta) if delta_norm else delta.add_(hidden)
    if factor is not None:
        state.mul_(factor)
    return state, norm(state)


def rotate_and_store(
    qkv: Tensor,
    heads: HeadLayout,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Rotate queries and keys of qkv [R, H + 2 J, D], write keys and values [S, J, D] to their slots, return queries.

    With qkv [R, H + J, D] values are the keys as they are before norm and rotation. Returns [R, H, D].

    Args:
        rotary: cos and sin [1, R, D].
        scales: of keys and values of 8 bits.
    """
    num_rotated = heads.num_heads + heads.num_kv_heads
    if qkv.shape[1] < num_rotated + heads.num_kv_heads:
        qkv = torch.cat([qkv, qkv[:, heads.num_heads :]], 1)
    num_normed = len(heads.norms.weight) if heads.norms else 0
    normed = heads.norms(qkv[:, :num_normed]) if heads.norms else qkv
    x, values_source = normed[:, :num_rotated], normed if num_normed > num_rotated else qkv
    (cos, sin), half = (table[0, :, None] for table in rotary), heads.width // 2
    # (left, right) -> (left cos - right sin, right cos + left sin)
    turned = torch.addcmul(x * cos, x.roll(half, -1), torch.cat([-sin[..., :half], sin[..., half:]], -1))
    if heads.num_kv_heads:
        store_rows(keys, slots, turned[:, heads.num_heads :], scales.key)
        store_rows(values, slots, values_source[:, num_rotated:], scales.value)
    return turned[:, : heads.num_heads]


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    """Write keys or values [R, J, D] to their slots of [S, J, D]: divided by `scale` and rounded, if the pool has 8 bits."""
    if pool.dtype == rows.dtype:
        pool.index_copy_(0, slots, rows)
        return
    most = torch.finfo(pool.dtype).max
    narrow = (rows.float() / scale).clamp(-most, most).to(pool.dtype)
    pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))
