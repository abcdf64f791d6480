"""Attention of draft heads over keys and values in slots of a KV cache."""

from __future__ import annotations

from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.kernels.arguments import AttentionRule, LayerSlots, Projected
from eyas.models.inputs import PackedInputs
from eyas.models.layers.attention import attend


def cache_and_attend(
    kv: KVCache,
    layer: int,
    rows: Projected,
    slots: Tensor,
    query: Tensor,
    packed: PackedInputs,
    window: int | None = None,
) -> Tensor:
    """Write keys and values of a layer's `rows` to `slots`, then attend from `query` to what `packed` names."""
    keys, values = kv.keys[layer], kv.values[layer]
    if not rows.is_cached:
        keys.index_copy_(0, slots, rows.key)
        values.index_copy_(0, slots, rows.value)
    return attend(query, keys, values, packed, AttentionRule(query.shape[-1] ** -0.5, window))


def layer_slots(kv: KVCache, packed: PackedInputs, layer: int) -> LayerSlots:
    """Return where the keys and values of a pass belong in a layer."""
    return LayerSlots(kv.keys[layer], kv.values[layer], packed.slots)


def attend_slots(kv: KVCache, packed: PackedInputs, layer: int, rows: Projected) -> Tensor:
    """Write keys and values of a layer's `rows` to the slots of a pass, then attend from all of them."""
    return cache_and_attend(kv, layer, rows, packed.slots, rows.query, packed)
