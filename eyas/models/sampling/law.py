"""From logits to the law that tokens are drawn from: temperature and filters; and exact ranking. Knows no request.

Legend: N rows, V vocabulary, k candidates. Softmax and comparisons are float32; ties go to the lowest id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-6
FEW = 256


class Ranked(NamedTuple):
    """The k highest scores of each row, best first, and where they stood."""

    scores: Tensor
    ids: Tensor


class Filters(NamedTuple):
    """What is done to each row of logits. temperature float32 [N], taken as MIN_TEMPERATURE below that; top_k int64 [N],
    0 keeps all; top_p float32 [N]; min_p float32 [N]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def filtered_law(logits: Tensor, filters: Filters, rows: Tensor) -> Tensor:
    """Probabilities [N, V] after temperature, top-k, top-p and min-p, in that order; top-p sees the law that top-k left.

    logits float32 [N, V]. The likeliest token is always kept. Filtered rows are not renormalised: a race does not need it.
    rows: int64, those that top-k or top-p do something to; to look for them would be to wait for the device.
    """
    law, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    if len(rows) > 0:
        law[rows] = _filter(law[rows], top_k[rows], top_p[rows])
    return _above(law, filters.min_p)


def filtered_law_unseen(logits: Tensor, filters: Filters) -> Tensor:
    """`filtered_law` for a device that nobody waits for: which rows are filtered is not looked at, all are sorted."""
    law, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    wanted = (top_k > 0) | (top_p < 1)
    return _above(torch.where(wanted[:, None], _filter(law, top_k, top_p), law), filters.min_p)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(shifted / temperature.clamp(min=MIN_TEMPERATURE)[:, None], dim=-1)


def _above(law: Tensor, min_p: Tensor) -> Tensor:
    return law.masked_fill_(law < min_p[:, None] * law.amax(-1, keepdim=True), 0.0)


def _filter(law: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, ids = torch.sort(law, dim=-1, descending=True, stable=True)
    ranks = torch.arange(law.shape[-1], device=law.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0.0)
    before = ordered.cumsum(-1) - ordered
    beyond = before >= top_p[:, None] * ordered.sum(-1, keepdim=True)
    ordered = ordered.masked_fill(beyond & (ranks > 0), 0.0)
    return torch.zeros_like(law).scatter_(-1, ids, ordered)


def race(noise: Tensor, law: Tensor) -> Tensor:
    """argmin noise/law of each row, the lowest id on a tie; noise and law [N, V], law not necessarily normalised. V where a
    row holds NaN."""
    return _numbered(*(noise / law).min(-1), law.shape[-1])


def greedy(logits: Tensor) -> Tensor:
    """argmax of each row, the lowest id on a tie; logits [N, V]. V where a row holds NaN."""
    return _numbered(*logits.max(-1), logits.shape[-1])


def _numbered(best: Tensor, ids: Tensor, otherwise: int) -> Tensor:
    """ids where `best` is a number; torch gives the first of equals, and NaN before all numbers."""
    return ids.masked_fill_(best.isnan(), otherwise)


def rank(scores: Tensor, k: int) -> Ranked:
    """The k highest of each row of float32 scores [..., V], best first, exact ties ordered by lowest id.

    torch.topk leaves the order of ties open, so it is given integers that hold score and id at once, made in place: of many
    rows, allocation is what takes the time. Few scores are sorted.
    """
    if scores.shape[-1] <= FEW:
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        return Ranked(ordered.values[..., :k], ordered.indices[..., :k])
    bits = (scores + 0.0).contiguous().view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # now the integers are in the order of the floats
    last = 0xFFFFFFFF - torch.arange(scores.shape[-1], device=scores.device)
    keys = bits.long().bitwise_left_shift_(32).bitwise_or_(last)
    chosen = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return Ranked(scores.gather(-1, chosen), chosen)
