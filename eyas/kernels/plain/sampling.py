"""Draws and ranks rows of logits in operations of torch.

Legend: N rows, V vocabulary, P tokens of a part of it. Softmax and comparisons are float32; ties go to the lowest id.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.device.transfer import upload
from eyas.kernels.arguments import MASS_BITS, MIN_TEMPERATURE, Draws, Kept, Ranked, Scale
from eyas.kernels.noise import exponential_noise
from eyas.kernels.probabilities import draw_tokens, greedy, ids_or_nan, target_probs


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token of each row of logits [N, V], see SamplingKernels."""
    random = _random_rows(draws)
    if random and len(random) == len(draws):
        return draw_tokens(target_probs(logits, draws), draws)
    tokens = greedy(logits)
    if random:
        drawn, places = draws.taken(random), upload(random, logits.device)
        tokens[places] = draw_tokens(target_probs(logits[places], drawn), drawn)
    return tokens


def race(logits: Tensor, draws: Draws, first_id: int, vocab_size: int) -> Tensor:
    """Find the winner of each row in a part of the vocabulary, see SamplingKernels."""
    top, scores = logits.amax(-1), -logits
    random = _random_rows(draws)
    if random:
        rows, drawn = upload(random, logits.device), draws.taken(random)
        base = top[rows].masked_fill(top[rows] == -torch.inf, 0.0)[:, None]
        weights = torch.exp((logits[rows] - base) / temperatures_of(drawn, logits.device)[:, None])
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        noise = exponential_noise([key.seed for key in drawn.keys_of_rows], drawn.positions.tolist(), ids)
        scores[rows] = noise / weights
    best, ids = scores.min(-1)
    ids = ids_or_nan(best, ids + first_id, vocab_size)
    return torch.stack([top.view(torch.int32), best.view(torch.int32), ids.int()])


def _random_rows(draws: Draws) -> list[int]:
    """Return the rows with temperatures above 0."""
    rows: list[int] = np.flatnonzero(draws.by_row([key.temperature > 0 for key in draws.keys], np.bool_)).tolist()
    return rows


def temperatures_of(draws: Draws, device: torch.device) -> Tensor:
    """Return the temperature of each row's draw [N], above 0."""
    return upload(draws.by_row([max(key.temperature, MIN_TEMPERATURE) for key in draws.keys], np.float32), device)


def masses_from(logits: Tensor, scale: Scale, low: Tensor, shift: int, borders: range) -> Tensor:
    """Sum the mass from each border on, see SamplingKernels."""
    places = (ordered_bits(logits).long() - low[:, None]) >> shift
    places.clamp_(borders.start - 1, borders.stop - 1).sub_(borders.start - 1)
    masses = torch.zeros(len(logits), len(borders) + 1, dtype=torch.int64, device=logits.device)
    masses.scatter_add_(1, places, _masses(_weights(logits, scale)))
    return masses.flip(1).cumsum(1).flip(1)[:, 1:].contiguous()


def kept_logits(logits: Tensor, scale: Scale, kept: Kept) -> Tensor:
    """Leave out the tokens that are not kept, see SamplingKernels."""
    bits, weights = ordered_bits(logits), _weights(logits, scale)
    is_last = bits == kept.last[:, None]
    before = kept.before[:, None] + (is_last.cumsum(1) - 1) * _masses(weights)
    is_kept = (bits > kept.last[:, None]) | (is_last & (before < kept.wanted[:, None]))
    return logits.masked_fill((logits < torch.inf) & ~(is_kept & (weights >= kept.min_p[:, None])), -torch.inf)


def _weights(logits: Tensor, scale: Scale) -> Tensor:
    numbers = logits.masked_fill(~(logits < torch.inf), -torch.inf)
    return torch.exp((numbers - scale.largest[:, None]) / scale.temperature[:, None])


def _masses(weights: Tensor) -> Tensor:
    return (weights * 2.0**MASS_BITS).long()


def top_k(scores: Tensor, k: int) -> Ranked:
    """Rank each row of scores [..., V], see SamplingKernels.

    torch.topk leaves the order of ties open, so it gets integers that hold score and id at once. They are made in place,
    because allocation dominates with many rows.
    """
    last = 0xFFFFFFFF - torch.arange(scores.shape[-1], device=scores.device)
    keys = ordered_bits(scores).long().bitwise_left_shift_(32).bitwise_or_(last)
    chosen = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return Ranked(scores.gather(-1, chosen), chosen)


def ordered_bits(scores: Tensor) -> Tensor:
    """Return int32 numbers in the order of floats [...]; zeros are equal. NaN is above or below all numbers."""
    bits = (scores + 0.0).contiguous().view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Prepare nothing: operations of torch are ready."""
