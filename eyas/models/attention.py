"""Attention of packed, ragged rows over slot-indexed KV, registered with transformers. Knows no sequences.

Legend: R packed rows, H query heads, J key-value heads, D head width, S slots; B, Q, K as in eyas.models.inputs.
Each row sees its whole prefix and, of the rows of its own step, those that its mask allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.inputs import Group, PackedInputs

ATTENTION_NAME = "eyas"


class KVTensors(Protocol):
    """Where keys and values live: per layer one tensor [S, J, D]."""

    @property
    def keys(self) -> Sequence[Tensor]: ...

    @property
    def values(self) -> Sequence[Tensor]: ...


def register_attention() -> None:
    """Make `attn_implementation="eyas"` known to transformers. Registering twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: PackedInputs,
    pools: KVTensors,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer: query [1, H, R, D], key and value [1, J, R, D].

    Stores the new keys and values in their slots, then attends. Returns [1, R, H, D].
    Raises CheckpointError for attention features that it does not have.
    """
    if others.get("s_aux") is not None:
        raise CheckpointError(f"{type(module).__name__} uses attention sinks, which Eyas does not support yet")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values, slots = pools.keys[layer], pools.values[layer], packed.slots
    keys.index_copy_(0, slots, key[0].transpose(0, 1))
    values.index_copy_(0, slots, value[0].transpose(0, 1))
    group = packed.alone
    if group is not None and packed.attend is None:
        visible = group.open and sliding_window is None
        bias = None if visible else packed.bias(0, sliding_window, query.dtype, query.shape[1] // keys.shape[1])
        return _attend_alone(query, keys, values, group, bias, scaling, softcap), None
    attend_rows = packed.attend or attend
    out = attend_rows(query[0].transpose(0, 1), keys, values, packed, scaling, sliding_window, softcap)
    return out[None], None


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: PackedInputs,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of query [R, H, D] over pools [S, J, D]; [R, H, D]. Loops over groups of segments, never over segments.

    Inputs with tables go to the Triton kernel, a function of the same signature.
    """
    if packed.tables is not None:
        from eyas.models.cuda import kernel

        return kernel.attend(query, keys, values, packed, scaling, window, softcap)
    out = torch.empty_like(query)
    for index, group in enumerate(packed.groups):
        bias = packed.bias(index, window, query.dtype, query.shape[1] // keys.shape[1])
        attended = _attend_group(query, keys, values, group, bias, scaling, softcap)
        if group.whole:
            return attended
        rows = group.rows.flatten()
        if group.cells is not None:
            attended, rows = attended.index_select(0, group.cells), rows.index_select(0, group.cells)
        out.index_copy_(0, rows, attended)
    return out


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, bias: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of the group's cells, [B * Q, H, D]: heads that share keys and values are folded into the rows."""
    (batch, cells), (num_heads, width), num_kv = group.shape, query.shape[1:], keys.shape[1]
    q = query if group.whole else query.index_select(0, group.rows.flatten())
    q = q.view(batch, cells, num_kv, num_heads // num_kv, width).permute(0, 2, 3, 1, 4).reshape(batch, num_kv, -1, width)
    k, v = (_gather(pool, group).view(batch, -1, num_kv, width).transpose(1, 2) for pool in (keys, values))
    o = masked_attention(q, k, v, bias, scaling, softcap)
    o = o.view(batch, num_kv, num_heads // num_kv, cells, width).permute(0, 3, 1, 2, 4)
    return o.reshape(batch * cells, num_heads, width)


def _attend_alone(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, bias: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """The case of one sequence, [1, H, R, D] to [1, R, H, D], with no copy that it does not need."""
    shape = query.shape
    q = query.reshape(1, keys.shape[1], -1, shape[3])
    k, v = _gather(keys, group)[None].transpose(1, 2), _gather(values, group)[None].transpose(1, 2)
    return masked_attention(q, k, v, bias, scaling, softcap).view(shape).transpose(1, 2)


def _gather(pool: Tensor, group: Group) -> Tensor:
    """The pool's rows at the group's keys, [B * K, J, D]."""
    return pool[group.run[0] : group.run[1]] if group.run else pool.index_select(0, group.keys.flatten())


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """softmax(q k^T * scaling + bias) v over the last two dimensions; scores are soft-capped before the bias if asked."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scaling / softcap))
    return torch.softmax(scores if bias is None else scores + bias, dim=-1).to(v.dtype) @ v
