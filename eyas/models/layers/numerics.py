"""Numerics that must not depend on what shares a forward pass: rotary tables, the output head, batch-invariant passes.

Legend: R rows, H query heads, J key-value heads, D head width, S slots, K keys, C hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.kernels.arguments import AttentionRule
from eyas.models.backends.packed_weights import HALF_DTYPES
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.layers.attention import attend

# Numbers of an unpacked weight on the CPU that are converted to float32 at a time.
CHUNK_ELEMENTS = 1 << 20
# Settings of models that scale or cap logits behind the output head.
LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def pin_rotary(model: nn.Module, max_model_len: int) -> None:
    """Fix every rotary table that transformers would change with the longest row of a forward pass.

    Keys stay in their slots while a sequence grows, so one table must serve them all. `longrope` gets its long table if
    max_model_len, in tokens, exceeds the original context, else the short one. `dynamic` gets the table for
    max_position_embeddings, the longest context. Other kinds do not depend on the length.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pinned(module, kinds, None, max_model_len)  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            pinned = {layer: _pinned(module, kind, layer, max_model_len) for layer, kind in kinds.items()}
            module.rope_type = pinned  # type: ignore[assignment]


def _pinned(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> str:
    """Return the kind to set, under which transformers leaves the table as it is."""
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        table = getattr(module, name)
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, table.device, seq_len=max_model_len, **options)
        table.copy_(frequencies)
    return "default" if kind == "longrope" or "dynamic" in kind else kind


class Float32Head(nn.Linear):
    """A linear layer over weights of any float dtype whose products are summed and returned in float32.

    bfloat16 rounds a logit near 20 to steps of 0.125: ties become common, and a later upcast does not undo them.
    """

    destination: Tensor | None = None  # of `logits_into`

    def forward(self, rows: Tensor) -> Tensor:
        """Map hidden rows [..., C] to logits float32 [..., V]."""
        return float32_linear(rows, self.weight, self.bias, self.destination)


def use_float32_head(model: Any) -> None:
    """Let the model's output head return float32. Only its arithmetic changes: the module, its hooks and tied weights stay.

    A head that is not a plain linear layer (a quantised one) keeps its own arithmetic, and a packed one has float32's.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.dtype in HALF_DTYPES:
        head.__class__ = Float32Head


@contextmanager
def logits_into(model: Any, destination: Tensor | None) -> Iterator[None]:
    """Let a Float32Head write, inside the context, its logits [N, V] to the first rows of
    `destination`, float32 [most, V].
    """
    head = model.get_output_embeddings()
    if not isinstance(head, Float32Head):
        yield
        return
    head.destination = destination
    try:
        yield
    finally:
        head.destination = None


def keeps_logits(model: Any) -> bool:
    """Return whether logits of the model are what a Float32Head wrote: nothing scales or caps them in memory of its own."""
    config = model.config.get_text_config()
    is_scaled = any(getattr(config, name, None) not in (None, False) for name in LOGIT_SCALES)
    return isinstance(model.get_output_embeddings(), Float32Head) and not is_scaled


def float32_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, destination: Tensor | None = None) -> Tensor:
    """Return rows [..., C] times weight [V, C] plus bias [V], products of the given dtype summed in float32.

    destination: float32 [most, V], whose first rows get the result.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    into = None if destination is None else destination[: len(flat)]
    if flat.device.type == "cpu":
        parts = torch.split(weight, max(1, CHUNK_ELEMENTS // weight.shape[1]))
        out = torch.cat([F.linear(flat.float(), part.float()) for part in parts], dim=-1, out=into)
    else:
        out = torch.mm(flat, weight.T, out_dtype=torch.float32, out=into)
    out = out if bias is None else out.add_(bias.float())
    return out.view(*rows.shape[:-1], len(weight))


def batch_invariant_attend(query: Tensor, keys: Tensor, values: Tensor, packed: PackedInputs, rule: AttentionRule) -> Tensor:
    """Run `attention.attend` in float64, rounded once: query [R, H, D], keys and values [S, J, D].

    The order in which keys are summed changes a result by 1e-16 of its size. float32 and narrower types show that with a
    chance of about one in 2**29.
    """
    return attend(query.double(), keys, values, packed, rule).to(query.dtype)


def fixed_size_blocks(segment: Segment, rows: int, scratch: int) -> Iterator[Segment]:
    """Cut a causal segment into blocks of exactly `rows` rows, or fill a tree up to `rows` rows.

    Filling rows repeat the first row, see the prefix and themselves, are seen by no other row, and use slot `scratch`.
    """
    if segment.visible is not None:
        assert len(segment.tokens) <= rows, f"a tree of {len(segment.tokens)} nodes in passes of {rows} rows"
        yield _filled(segment, rows, scratch)
        return
    for start in range(0, len(segment.tokens), rows):
        yield _filled(segment.part(start, start + rows), rows, scratch)


def _filled(segment: Segment, rows: int, scratch: int) -> Segment:
    count = len(segment.tokens)
    more = (0, rows - count)
    visible = np.eye(rows, dtype=np.bool_)
    visible[:count, :count] = np.tri(count, dtype=np.bool_) if segment.visible is None else segment.visible
    return segment._replace(
        tokens=np.pad(segment.tokens, more, constant_values=segment.tokens[0]),
        positions=np.pad(segment.positions, more, constant_values=segment.positions[0]),
        slots=np.pad(segment.slots, more, constant_values=scratch),
        visible=visible,
    )
