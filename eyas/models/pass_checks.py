"""Checks by small passes that a loaded target computes what Eyas relies on: attention, rows of their own, finite logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.states import START, StateStep
from eyas.config.target_limits import quantisation
from eyas.errors import CheckpointError
from eyas.models.backends.packed_weights import MergedLinearPart, PackedEmbedding, PackedLinear
from eyas.models.checkpoint import explained, is_finite, shortened
from eyas.models.inputs import Segment
from eyas.models.target import TargetModel

# Where the tokens of the check of rows begin, one attempt after another.
FIRST_TOKENS = range(1, 73, 9)


def check_attention(target: TargetModel) -> Tensor:
    """Return logits of a small pass over two sequences [2, V].

    Raises CheckpointError unless every layer stores its keys through our attention and only asked rows get logits. An
    architecture that ignores arguments which it does not know would give wrong results without an error.
    """
    name = type(target.model).__name__
    kv_cache = target.new_kv_cache(4)
    logits = _logits(target, kv_cache, [_sequence(1, 2, 0), _sequence(2, 2, 2)], last_only=True)
    if len(logits) != 2 or not all(bool(keys.any()) for keys in kv_cache.keys if keys.numel()):
        raise CheckpointError(f"{name} does not use transformers' attention interface in every layer; Eyas cannot serve it")
    _check_finite(target, logits)
    return logits


def check_rows(target: TargetModel) -> None:
    """Raises CheckpointError if rows depend on others outside attention and known recurrent layers, as in pooling.

    A router may be so near a tie that rounding sends a row to another expert. That is chance, and not so with other tokens,
    while layers that mix rows do it with all: each row must pass once.
    """
    moved = torch.ones(7, dtype=torch.bool, device=target.device)
    for token in FIRST_TOKENS:
        moved &= _moved_rows(target, token)
        if not target.on_any_rank(bool(moved.any())):
            return
    raise CheckpointError(
        f"{type(target.model).__name__} mixes rows outside attention, as pooling and unknown recurrences do. To serve it, "
        "Eyas would need their functions over a draft tree; take another model"
    )


def _moved_rows(target: TargetModel, token: int) -> Tensor:
    """Return which rows' logits change with the sequence before theirs, or with how much of theirs a pass runs, bool [7]."""
    kv_cache = target.new_kv_cache(9)
    own, first, second = (_sequence(token + 3 * which, 3, 3 * which) for which in range(3))
    own = own._replace(states=StateStep(START, 1, marks=((2, 2),)))
    # the first two tokens of the last are in their slots, and the state behind them in row 2
    packs = ([first, own], [second, own], [first, own.part(2, 3)._replace(states=StateStep(2, 1))])
    # Logits that are no numbers are not this check's.
    found = [torch.nan_to_num(_logits(target, kv_cache, pack), 0.0, 0.0, 0.0) for pack in packs]
    whole, beside, decoded = found[0], found[1][3:], found[2]
    same_shape, other_shape = (tolerance * whole.abs().max() for tolerance in _row_tolerances(target))
    stays = [(beside - whole[3:]).abs().amax(1) <= same_shape, (decoded - whole[[0, 1, 2, 5]]).abs().amax(1) <= other_shape]
    return ~torch.cat(stays)


def _row_tolerances(target: TargetModel) -> tuple[float, float]:
    """Return how far logits of a row may move, relative to the largest: in passes of one shape, and of several.

    In passes of one shape, products sum a row in the same order whatever other rows hold; two roundings of bfloat16 are left
    to devices that add in any order. Experts get other numbers of rows even then. Another shape may round every sum
    otherwise, which in deep models of 16 bits comes to a few hundredths. Quantised layers may take one scale for the
    activations of all rows.
    """
    if quantisation(target.model.config):
        return 0.1, 0.1
    if target.dtype == torch.float32:
        return 1e-3, 1e-3
    return (0.05 if target.is_mixture_of_experts else 2**-7), 0.05


def _sequence(token: int, count: int, slot: int) -> Segment:
    """Return the first rows of a sequence, whose tokens and slots count up from `token` and `slot`."""
    rows = np.arange(count)
    return Segment(rows + token, rows, rows + slot, np.zeros(0, dtype=np.int64), None, rows)


def _logits(target: TargetModel, kv_cache: KVCache, segments: list[Segment], last_only: bool = False) -> Tensor:
    """Return logits of all rows of a pass, or of the last of each segment [N, V]."""
    if last_only:
        segments = [segment._replace(logits_indices=segment.logits_indices[-1:]) for segment in segments]
    segments = [segment._replace(tokens=segment.tokens % target.vocab_size) for segment in segments]
    with explained(f"{type(target.model).__name__} does not work with packed rows over token slots"):
        return target.forward(target.pack(segments), kv_cache).logits


def tolerance_of(target: TargetModel) -> float:
    """Return how far logits may differ by rounding, relative to the largest."""
    return 1e-3 if target.dtype == torch.float32 else 0.1


def _check_finite(target: TargetModel, logits: Tensor) -> None:
    """Raises CheckpointError for logits that are NaN or infinite, with the weights that are."""
    if is_finite(logits):
        return
    wrong = [name for name, weight in target.model.named_parameters() if not is_finite(weight)]
    wrong += [
        f"{name}.weight"
        for name, module in target.model.named_modules()
        if isinstance(module, PackedLinear | MergedLinearPart | PackedEmbedding) and not is_finite(module.weight)
    ]
    what = f"{shortened(wrong)} hold NaN or infinity" if wrong else "its layers compute NaN or infinity"
    raise CheckpointError(f"{target.name_or_path!r} as {target.dtype}: {what}; take undamaged weights, or another dtype")
