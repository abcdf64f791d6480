"""What noise keys ask of a law: keys in, filters on a device out, and which rows they concern. Knows no logits.

From logits to the law that tokens are drawn from: temperature and filters; and exact ranking. Knows no request.

Legend: N rows, V vocabulary, k candidates. Softmax and comparisons are float32; ties go to the lowest id.

Draws one token per row of logits: logits and noise keys in, token ids out. Knows no sequences.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.request import NoiseKey
from eyas.sampling.noise import exponential_noise
from eyas.tensors import upload


def filters_of(keys: Sequence[NoiseKey], device: torch.device) -> Filters:
    """One row for each key."""
    asked = np.array([(key.temperature, key.top_k, key.top_p, key.min_p) for key in keys], dtype=np.float64)
    temperature, top_k, top_p, min_p = upload(asked, device).unbind(1)
    return Filters(temperature.float(), top_k.long(), top_p.float(), min_p.float())


def filtering(keys: Sequence[NoiseKey]) -> list[int]:
    """The rows that top-k or top-p do something to."""
    return [row for row, key in enumerate(keys) if key.top_k > 0 or key.top_p < 1]


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


def filtered_probs(logits: Tensor, filters: Filters, rows: Tensor) -> Tensor:
    """Probabilities [N, V] after temperature, top-k, top-p and min-p, in that order; top-p sees the law that top-k left.

    logits float32 [N, V]. The likeliest token is always kept. Filtered rows are not renormalised: a race does not need it.
    rows: int64, those that top-k or top-p do something to; to look for them would be to wait for the device.
    """
    law, top_k, top_p = _tempered(logits, filters.temperature), filters.top_k, filters.top_p
    if len(rows) > 0:
        law[rows] = _filter(law[rows], top_k[rows], top_p[rows])
    return _above(law, filters.min_p)


def filtered_probs_no_sync(logits: Tensor, filters: Filters) -> Tensor:
    """`filtered_probs` for a device that nobody waits for: which rows are filtered is not looked at, all are sorted."""
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


def exponential_race(noise: Tensor, law: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class Draw:
    """Who draws a row: the request's noise key and the absolute position of the token being drawn."""

    key: NoiseKey
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row, int64 [N]; logits float32 [N, V]. V where logits are NaN. Does not wait for the device.

    Temperature 0 takes the likeliest token. Above it, argmin noise/law: noise depends on (seed, position, token) alone.
    """
    random = [row for row, draw in enumerate(draws) if draw.key.temperature > 0]
    if random and len(random) == len(draws):
        return _race(logits, draws)
    tokens = greedy(logits)
    if random:
        rows = upload(random, logits.device)
        tokens[rows] = _race(logits[rows], [draws[row] for row in random])
    return tokens


def target_probs(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The law float32 [N, V] that each row's token is drawn from, not normalised; every filter has been applied."""
    keys = [draw.key for draw in draws]
    return filtered_probs(logits, filters_of(keys, logits.device), upload(filtering(keys), logits.device))


def draw_tokens(law: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row of a law [N, V], not necessarily normalised; int64 [N]. V where the law holds NaN."""
    streams: dict[tuple[int, int], int] = {}
    rows = [streams.setdefault((d.key.seed, d.position), len(streams)) for d in draws]
    vocabulary = torch.arange(law.shape[-1], device=law.device)
    noise = exponential_noise([seed for seed, _ in streams], [position for _, position in streams], vocabulary)
    return exponential_race(noise.index_select(0, upload(rows, law.device)), law)


def _race(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return draw_tokens(target_probs(logits, draws), draws)
