"""Passes of one shape: a segment in, blocks of equal rows out, and attention that does not feel the order of its keys.

Legend: R rows, H query heads, J key-value heads, D head width, S slots, K keys.

The output head in float32: a model in, the same model out, whose logits are no longer rounded to its dtype.

Legend: N rows, H hidden width, V vocabulary.

Pins rotary tables: a model in, the same model out, whose table no longer depends on the rows that share a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.inputs import PackedInputs, Segment
from eyas.tensors import Bools, Ints


def blocks(segment: Segment, rows: int, spare: int) -> Iterator[Segment]:
    """Cut causal rows into blocks of `rows`, and fill the last one, or a tree, up to `rows`.

    Rows that fill repeat the first row, see the prefix and themselves, are seen by none, and live in slot `spare`.
    """
    if segment.visible is not None:
        assert len(segment.tokens) <= rows, f"a tree of {len(segment.tokens)} nodes in passes of {rows} rows"
        yield _filled(segment, segment.visible, rows, spare)
        return
    for start in range(0, len(segment.tokens), rows):
        part = _part(segment, start, start + rows)
        yield _filled(part, np.tri(len(part.tokens), dtype=np.bool_), rows, spare)


def _part(segment: Segment, start: int, end: int) -> Segment:
    inside = segment.logits_indices[(segment.logits_indices >= start) & (segment.logits_indices < end)]
    return Segment(
        tokens=segment.tokens[start:end],
        positions=segment.positions[start:end],
        slots=segment.slots[start:end],
        prefix=np.concatenate([segment.prefix, segment.slots[:start]]),
        visible=None,
        logits_indices=inside - start,
    )


def _filled(segment: Segment, visible: Bools, rows: int, spare: int) -> Segment:
    count = len(segment.tokens)
    seen = np.eye(rows, dtype=np.bool_)
    seen[:count, :count] = visible
    return Segment(
        tokens=_fill(segment.tokens, rows, int(segment.tokens[0])),
        positions=_fill(segment.positions, rows, int(segment.positions[0])),
        slots=_fill(segment.slots, rows, spare),
        prefix=segment.prefix,
        visible=seen,
        logits_indices=segment.logits_indices,
    )


def _fill(values: Ints, rows: int, value: int) -> Ints:
    return np.concatenate([values, np.full(rows - len(values), value, dtype=np.int64)])


def batch_invariant_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: PackedInputs,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`eyas.models.attention.attend` of one segment, in float64 and rounded once, query [R, H, D] over pools [S, J, D].

    The order in which keys are summed moves a result by 1e-16 of itself, which float32 and narrower types do not show
    but with a chance of about one in 2**29.
    """
    (group,), num_kv = packed.groups, keys.shape[1]
    slots = group.keys[0]
    bias = packed.bias(0, window, torch.float64, 1)
    q = query.double().view(len(query), num_kv, -1, query.shape[-1]).permute(1, 2, 0, 3)
    k, v = (pool.index_select(0, slots).double().transpose(0, 1)[:, None] for pool in (keys, values))
    scores = q @ k.transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    out = torch.softmax(scores if bias is None else scores + bias[0], dim=-1) @ v
    return out.permute(2, 0, 1, 3).reshape_as(query).to(query.dtype)


CHUNK_ELEMENTS = 1 << 20
HALVES = (torch.bfloat16, torch.float16)


class Float32Head(nn.Linear):
    """A linear layer over weights of any float dtype whose products are summed and returned in float32.

    In bfloat16 a logit near 20 is rounded to steps of 0.125: ties become common, and upcasting afterwards mends nothing.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Hidden rows [..., H] to logits float32 [..., V]."""
        return float32_linear(rows, self.weight, self.bias)


def widen_head(model: Any) -> None:
    """Let the model's output head return float32. Only its arithmetic changes: the module, its hooks and tied weights stay.

    A head that is not a plain linear layer (a quantised one) keeps its own arithmetic.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.dtype in HALVES:
        head.__class__ = Float32Head


def float32_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., H] times weight [V, H] plus bias [V], products of the given dtype summed in float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = torch.mm(flat, weight.T, out_dtype=torch.float32) if flat.is_cuda else chunked_linear(flat, weight)
    out = out if bias is None else out + bias.float()
    return out.view(*rows.shape[:-1], len(weight))


def chunked_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [N, H] times weight [V, H] in float32; the weight is widened in chunks of the vocabulary."""
    size = max(1, CHUNK_ELEMENTS // weight.shape[1])
    return torch.cat([F.linear(rows.float(), part.float()) for part in torch.split(weight, size)], dim=-1)


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
