"""Tokens' probabilities under temperature and filters, and draws from them, in operations that every device has.

Legend: N rows, V vocabulary. Softmax and comparisons are float32; ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.device.transfer import upload
from eyas.kernels.arguments import MASS_BITS, MIN_TEMPERATURE, Draws
from eyas.kernels.noise import exponential_noise
from eyas.protocol.commit import NoiseKey


class Filters(NamedTuple):
    """Filters of each row of logits. temperature float32 [N], taken as MIN_TEMPERATURE below that; top_k int64 [N], 0 keeps
    all; top_p float32 [N]; min_p float32 [N].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def filters_of(keys: Sequence[NoiseKey], device: torch.device) -> Filters:
    """Return the filters of each key, one row each."""
    values = np.array([(key.temperature, key.top_k, key.top_p, key.min_p) for key in keys], dtype=np.float64)
    temperature, top_k, top_p, min_p = upload(values, device).unbind(1)
    return Filters(temperature.float(), top_k.long(), top_p.float(), min_p.float())


def filtering(keys: Sequence[NoiseKey]) -> list[int]:
    """Return the rows that have top-k or top-p."""
    return [row for row, key in enumerate(keys) if key.top_k > 0 or key.top_p < 1]


def target_probs(logits: Tensor, draws: Draws) -> Tensor:
    """Return probabilities float32 [N, V] that each row's token is drawn from, not normalised; every filter has been
    applied.
    """
    keys = draws.keys_of_rows
    return filtered_probs(logits, filters_of(keys, logits.device), upload(filtering(keys), logits.device))


def filtered_probs(logits: Tensor, filters: Filters, rows: Tensor | None = None) -> Tensor:
    """Return probabilities [N, V] after temperature, top-k, top-p and min-p, in that order; top-p looks at what top-k left.

    The likeliest token is always kept. Filtered rows are not renormalised: `exponential_race` does not need it.

    Args:
        logits: float32 [N, V].
        rows: int64, those that have top-k or top-p; finding them here would wait for the device. None sorts all, as in a
            CUDA graph, where the host does not know them.
    """
    probs, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    if rows is None:
        has_filter = (top_k > 0) | (top_p < 1)
        probs = torch.where(has_filter[:, None], _filter(logits, probs, top_k, top_p), probs)
    elif len(rows) > 0:
        probs[rows] = _filter(logits[rows], probs[rows], top_k[rows], top_p[rows])
    return _drop_below(probs, filters.min_p)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(shifted / temperature.clamp(min=MIN_TEMPERATURE)[:, None], dim=-1)


def _drop_below(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs.masked_fill_(probs < min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)


def _filter(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ordered, ranks = probs.gather(-1, ids), torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0.0)
    masses = (ordered * 2.0**MASS_BITS).long()
    reached = masses.cumsum(-1)
    wanted = (top_p.double() * reached[:, -1].double()).ceil().long()
    ordered = ordered.masked_fill((reached - masses >= wanted[:, None]) & (ranks > 0), 0.0)
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)


def draw_tokens(probs: Tensor, draws: Draws) -> Tensor:
    """Return one token id per row of probabilities [N, V], not necessarily normalised; int64 [N].

    V where a row holds NaN.
    """
    streams: dict[tuple[int, int], int] = {}
    pairs = zip(draws.keys_of_rows, draws.positions.tolist(), strict=True)
    rows = [streams.setdefault((key.seed, position), len(streams)) for key, position in pairs]
    vocabulary = torch.arange(probs.shape[-1], device=probs.device)
    noise = exponential_noise([seed for seed, _ in streams], [position for _, position in streams], vocabulary)
    return exponential_race(noise.index_select(0, upload(rows, probs.device)), probs)


def exponential_race(noise: Tensor, probs: Tensor) -> Tensor:
    """Return argmin noise / probs of each row, the lowest id on a tie; both [N, V], probs not necessarily normalised.

    V where a row holds NaN.
    """
    return ids_or_nan(*(noise / probs).min(-1), probs.shape[-1])


def greedy(logits: Tensor) -> Tensor:
    """Return the argmax of each row, the lowest id on a tie; logits [N, V]. V where a row holds NaN."""
    return ids_or_nan(*logits.max(-1), logits.shape[-1])


def ids_or_nan(best: Tensor, ids: Tensor, otherwise: int) -> Tensor:
    """Return ids where `best` is a number; torch takes the first of equals, and NaN before all numbers."""
    return ids.masked_fill_(best.isnan(), otherwise)
