"""Draws and ranks rows of tensors by the kernels that numba compiled, and does the rest as `kernels.plain.sampling`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.kernels.arguments import MAX_KERNEL_K, MIN_TEMPERATURE, Draws, Ranked, has_filters
from eyas.kernels.cpu import sampling as kernels
from eyas.kernels.plain import sampling as plain
from eyas.kernels.plain.sampling import best_of_races, kept_logits, masses_from, race
from eyas.protocol.commit import NoiseKey

__all__ = ["best_of_races", "draw_rows", "kept_logits", "masses_from", "race", "top_k", "warm_up"]


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token of each row of logits [N, V], see SamplingKernels; those with filters in operations of torch."""
    keys = draws.keys
    tokens = torch.empty(len(draws), dtype=torch.int64)
    seeds = draws.by_row([key.seed for key in keys], np.uint64).view(np.int64)
    heats = [max(key.temperature, MIN_TEMPERATURE) if key.temperature > 0 else 0.0 for key in keys]
    kernels.draw_rows(logits.contiguous().numpy(), seeds, draws.positions, draws.by_row(heats, np.float32), tokens.numpy())
    filtered = np.flatnonzero(draws.by_row(list(map(has_filters, keys)), np.bool_)).tolist()
    if filtered:
        plain.draw_some(logits, draws, filtered, tokens)
    return tokens


def top_k(scores: Tensor, k: int) -> Ranked:
    """Rank each row of scores [..., V], see SamplingKernels."""
    # The kernel neither knows NaN, which ranks first, nor many candidates.
    if not 0 < k <= min(MAX_KERNEL_K, scores.shape[-1]) or np.isnan(scores.numpy().sum()):
        return plain.top_k(scores, k)
    shape = (*scores.shape[:-1], k)
    best = Ranked(torch.empty(shape), torch.empty(shape, dtype=torch.int64))
    rows = scores.contiguous().view(-1, scores.shape[-1]).numpy()
    kernels.top_k(rows, best.scores.view(-1, k).numpy(), best.ids.view(-1, k).numpy())
    return best


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Load or compile the kernel of `draw_rows`."""
    draw_rows(torch.zeros(2, vocab_size), Draws([NoiseKey(0), NoiseKey(0, 1.0)], [0, 0]))
