"""Attention over keys and values in token slots, registered with transformers as the attention of every target layer.

Each row sees its whole prefix and, among the rows of its own pass, those that its mask allows. Legend: R packed rows,
H query heads, J key-value heads, D head width, S slots; B, Q, K as in eyas.models.inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.cache.kv_cache import KVCache, load_rows
from eyas.device.transfer import on_device_of
from eyas.kernels.arguments import AttentionRule
from eyas.kernels.plain.layers import store_rows
from eyas.models.inputs import PackedInputs, PaddedGroup
from eyas.models.layers.latent import MOST_ABSORBED_ROWS, LatentProjection, latent_projection

ATTENTION_NAME = "eyas"
# The widest heads of torch's fused attention on GPUs.
LIBRARY_WIDTH = 256
# Scores that are computed at a time where a softmax has sinks or a softcap.
MOST_SCORES = 1 << 26

# Attribute of an attention module whose window is in its mask, which we do not take; see `set_windows`.
WINDOW = "window_of_mask"


def register_attention() -> None:
    """Make `attn_implementation="eyas"` known to transformers. Registering twice is harmless."""
    import_transformers()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def set_windows(model: nn.Module, windows: Mapping[int, int | None]) -> None:
    """Give attention the windows, in tokens, of these layers, whatever their modules say. None: it sees all tokens."""
    for module in model.modules() if windows else ():
        layer: Any = getattr(module, "layer_idx", None)
        if layer in windows:
            setattr(module, WINDOW, windows[layer])


def kv_sources(config: Any) -> list[int]:
    """Return the layer whose keys and values each layer reads; empty if each has its own.

    In Gemma 4 the last layers read those of the last layer of their type that has its own. Mistral Large 4 names them.
    """
    text = config.get_text_config()
    if named := getattr(text, "kv_source_layers", None):
        return list(named) if list(named) != list(range(len(named))) else []
    modes, types = getattr(text, "kv_sharing_modes", None), getattr(text, "layer_types", None)
    if modes is None or types is None or "reuse" not in modes:
        return []
    own = {kind: layer for layer, (kind, mode) in enumerate(zip(types, modes, strict=True)) if mode == "store"}
    return [own[kind] if mode == "reuse" else layer for layer, (kind, mode) in enumerate(zip(types, modes, strict=True))]


def import_transformers() -> None:
    """Import transformers' models for the first time without warnings of torchao, whose kernels need not load here."""
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    were_disabled = [logger.disabled for logger in noisy]
    try:
        for logger in noisy:
            logger.disabled = True
        from transformers import AttentionInterface  # noqa: F401
    finally:
        for logger, was_disabled in zip(noisy, were_disabled, strict=True):
            logger.disabled = was_disabled


def slot_attention(  # noqa: PLR0913  # the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: PackedInputs,
    kv_cache: KVCache,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer: query [1, H, R, D], key and value [1, J, R, D]. transformers calls it in every attention layer.

    Stores the new keys and values in their slots first. Returns [1, R, H, D]. s_aux: the sinks of a layer that has some.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    scales = kv_cache.scales[layer]
    latent = latent_projection(module)
    store_rows(kv_cache.keys[layer], packed.slots, key[0].transpose(0, 1), scales.key)
    rule = AttentionRule(scaling, getattr(module, WINDOW, sliding_window), softcap, s_aux)
    rows = query[0].transpose(0, 1)
    if latent is None:
        store_rows(kv_cache.values[layer], packed.slots, value[0].transpose(0, 1), scales.value)
        out = attend_layer(rows, kv_cache, layer, packed, rule)
    else:
        out = _attend_latents(latent, rows, kv_cache, layer, packed, rule)
    return out[None].contiguous(), None  # as transformers' own; layers view it, or would copy it themselves


def _attend_latents(
    latent: LatentProjection, query: Tensor, kv_cache: KVCache, layer: int, packed: PackedInputs, rule: AttentionRule
) -> Tensor:
    """Return the attention of query [R, H, N + P] over the latents of a layer, [R, H, V]. Long segments expand the keys and
    values of their heads.
    """
    is_plain = packed.attend is None and packed.metadata is None and rule.softcap is None and rule.sinks is None
    if not is_plain or all(group.shape[1] <= MOST_ABSORBED_ROWS for group in packed.groups):
        return latent.values_of(attend_layer(latent.absorb(query), kv_cache, layer, packed, rule))
    keys, values, scale = kv_cache.keys[layer], kv_cache.values[layer], kv_cache.scales[layer].key

    def attend_group(index: int, group: PaddedGroup, cells: Tensor) -> Tensor:
        batch, num_cells = group.shape
        if num_cells <= MOST_ABSORBED_ROWS:
            bias = packed.bias(index, rule.window, query.dtype, query.shape[1])
            scaled = rule._replace(scaling=rule.scaling * scale)
            found = _attend_group(latent.absorb(cells), keys, values, group, bias, scaled)
            return latent.values_of(found if scale == 1 else found * scale)
        latents = _gather(keys, group, query.dtype).view(batch, -1, keys.shape[2])
        bias = packed.bias(index, rule.window, query.dtype, 1)
        segments = zip(torch.split(cells, num_cells), latents if scale == 1 else latents * scale, strict=True)
        masks = [None] * batch if bias is None else bias
        parts = [latent.attend_expanded(*each, mask, rule.scaling) for each, mask in zip(segments, masks, strict=True)]
        return parts[0] if batch == 1 else torch.cat(parts)

    return _over_groups(query, packed, latent.widths[1], attend_group)


def attend_layer(query: Tensor, kv_cache: KVCache, layer: int, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Run a pass's own attention, or else `attend`, over a layer of the KV cache, once keys and values are in their slots.
    Attention is linear in the scales of keys, within, and values, behind.
    """
    keys, values, scales = kv_cache.keys[layer], kv_cache.values[layer], kv_cache.scales[layer]
    if scales.key != 1:
        rule = rule._replace(scaling=rule.scaling * scales.key)
    out = (packed.attend or attend)(query, keys, values, packed, rule)
    return out if scales.value == 1 else out * scales.value


def attend(query: Tensor, keys: Tensor, values: Tensor, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Return the attention of query [R, H, D] over keys and values of all slots [S, J, D]; [R, H, D]. Loops over groups
    only. Inputs with metadata go to the Triton kernel, a function with the same signature.
    """
    is_plain = rule.window is None and rule.softcap is None and rule.sinks is None
    if packed.prompts and is_plain and query.shape[2] == values.shape[2] <= LIBRARY_WIDTH:
        return _attend_by_library(query, keys, values, packed, rule)
    if packed.metadata is not None:
        from eyas.kernels.cuda import attention as kernel

        with on_device_of(query):
            return kernel.attend(query, keys, values, packed, rule)

    def attend_group(index: int, group: PaddedGroup, cells: Tensor) -> Tensor:
        bias = packed.bias(index, rule.window, query.dtype, query.shape[1] // keys.shape[1])
        return _attend_group(cells, keys, values, group, bias, rule)

    return _over_groups(query, packed, values.shape[2], attend_group)


def _attend_by_library(query: Tensor, keys: Tensor, values: Tensor, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Run `attend` for a pass that ends with long prompts, for these by torch's causal attention over copies of their keys
    and values. The rule says nothing but a scaling.
    """
    from torch.nn.attention.bias import causal_lower_right  # this import takes 1.5 s, as it brings torch's compiler

    out = torch.empty_like(query)
    before = packed.before_prompts
    start = 0 if before is None or before.metadata is None else before.metadata.shape.rows
    if before is not None:
        out[:start] = attend(query[:start], keys, values, before, rule)
    for group in packed.prompts:
        end = start + group.shape[1]
        q = query[start:end].transpose(0, 1)[None]  # [1, H, R, D]
        gathered = _gather_both(keys, values, group, query.dtype)
        k, v = (rows[None, : group.num_keys].transpose(1, 2) for rows in gathered)  # [1, J, K, D]
        causal = causal_lower_right(end - start, k.shape[2])  # the last row sees all keys
        attended = F.scaled_dot_product_attention(q, k, v, causal, scale=rule.scaling, enable_gqa=True)
        out[start:end] = attended[0].transpose(0, 1)
        start = end
        del q, k, v, gathered, attended  # before the next prompt's are copied
    return out


def _over_groups(
    query: Tensor, packed: PackedInputs, width: int, attend_group: Callable[[int, PaddedGroup, Tensor], Tensor]
) -> Tensor:
    """Return what the groups of a pass attend to, [R, H, width].

    attend_group: attends from the cells of a group, by its number, as [B * Q, H, width].
    """
    if packed.groups and packed.groups[0].covers_pass:
        return attend_group(0, packed.groups[0], query)
    out = query.new_empty(*query.shape[:2], width)
    for index, group in enumerate(packed.groups):
        rows = group.rows.flatten()
        attended = attend_group(index, group, query.index_select(0, rows))
        # Cells of padding are dropped before the rest goes to its packed rows.
        if group.filled_cells is not None:
            attended, rows = attended.index_select(0, group.filled_cells), rows.index_select(0, group.filled_cells)
        out.index_copy_(0, rows, attended)
    return out


def _attend_group(
    cells: Tensor, keys: Tensor, values: Tensor, group: PaddedGroup, bias: Tensor | None, rule: AttentionRule
) -> Tensor:
    """Return the attention of the group's cells [B * Q, H, D], in their shape: heads that share keys and values are
    folded into the rows.
    """
    (batch, count), (num_heads, width), num_kv = group.shape, cells.shape[1:], keys.shape[1]
    # [B * Q, H, D] to [B, J, (H / J) * Q, D]: query heads that share keys and values become rows of one head.
    q = cells.view(batch, count, num_kv, num_heads // num_kv, width).permute(0, 2, 3, 1, 4).reshape(batch, num_kv, -1, width)
    k, v = (rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2) for rows in _gather_both(keys, values, group, q.dtype))
    sinks = rule.sinks
    if sinks is not None:  # of heads that are folded into the rows, [J, (H / J) * Q, 1]
        sinks = sinks.float().repeat_interleave(count).view(num_kv, -1, 1)
    o = masked_attention(q, k, v, bias, rule.scaling, rule.softcap, sinks)
    # And back: [B, J, (H / J) * Q, D] to [B * Q, H, D].
    o = o.view(batch, num_kv, num_heads // num_kv, count, -1).permute(0, 3, 1, 2, 4)
    return o.reshape(batch * count, num_heads, -1)


def _gather_both(keys: Tensor, values: Tensor, group: PaddedGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values of the group's keys; once, if values are the first numbers of keys."""
    found = _gather(keys, group, dtype)
    width = values.shape[2]
    if width < keys.shape[2] and values.data_ptr() == keys.data_ptr():
        return found, found[..., :width]
    return found, _gather(values, group, dtype)


def _gather(slots: Tensor, group: PaddedGroup, dtype: torch.dtype) -> Tensor:
    """Return keys or values [S, J, D] of the group's keys, [B * K, J, D] of `dtype`."""
    if group.slot_range:
        return slots[slice(*group.slot_range)].to(dtype)
    return load_rows(slots, group.keys.flatten(), dtype)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(q k^T * scaling + bias) v over the last two dimensions; scores are soft-capped before the bias if
    asked.

    sinks: of each row, [..., rows, 1]: the softmax has one more score, without a value.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    most = max(1, MOST_SCORES // (q[..., 0, 0].numel() * k.shape[-2]))
    if q.shape[-2] > most:  # no table of all scores
        rows = [[None] * -(-q.shape[-2] // most) if x is None else torch.split(x, most, -2) for x in (q, bias, sinks)]
        parts = zip(*rows, strict=True)
        return torch.cat([masked_attention(each, k, v, own, scaling, softcap, sink) for each, own, sink in parts], -2)
    scores = q @ k.transpose(-1, -2)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    # cap * tanh(s * scaling / cap) is s * scaling for small scores, and never above the cap.
    scores = scores * scaling if softcap is None else softcap * torch.tanh(scores * (scaling / softcap))
    scores = scores if bias is None else scores + bias
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:  # what keys have of the softmax: sum / (sum + exp(sink)) = sigmoid(log(sum) - sink)
        weights = weights * torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sinks)
    return weights.to(v.dtype) @ v
