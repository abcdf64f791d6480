"""Pins rotary tables: a model in, the same model out, whose table no longer depends on the rows that share a pass."""

from __future__ import annotations

from typing import Any

from torch import nn


def pin_rotary(model: nn.Module, context_length: int) -> None:
    """Fix every table that transformers would change with the longest row of a forward pass.

    Keys stay in their slots while a sequence grows, so one table must serve them all: of `longrope` the long one if the
    context, in tokens, exceeds the original one, else the short one; of `dynamic` the one up to max_position_embeddings,
    which is as far as a context goes. Other kinds do not depend on the length.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pinned(module, kinds, None, context_length)  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            pinned = {layer: _pinned(module, kind, layer, context_length) for layer, kind in kinds.items()}
            module.rope_type = pinned  # type: ignore[assignment]


def _pinned(module: Any, kind: str, layer_type: str | None, context_length: int) -> str:
    """The kind that is left; its table stays as it is from now on."""
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        table = getattr(module, name)
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, table.device, seq_len=context_length, **options)
        table.copy_(frequencies)
    return "default" if kind == "longrope" or "dynamic" in kind else kind
