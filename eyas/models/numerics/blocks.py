"""Passes of one shape: a segment in, blocks of equal rows out, and attention that does not feel the order of its keys.

Legend: R rows, H query heads, J key-value heads, D head width, S slots, K keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from eyas.models.inputs import Bools, Ints, PackedInputs, Segment


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
    inside = segment.wanted[(segment.wanted >= start) & (segment.wanted < end)]
    return Segment(
        tokens=segment.tokens[start:end],
        positions=segment.positions[start:end],
        slots=segment.slots[start:end],
        prefix=np.concatenate([segment.prefix, segment.slots[:start]]),
        visible=None,
        wanted=inside - start,
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
        wanted=segment.wanted,
    )


def _fill(values: Ints, rows: int, value: int) -> Ints:
    return np.concatenate([values, np.full(rows - len(values), value, dtype=np.int64)])


def exact_attend(
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
