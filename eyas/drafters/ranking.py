"""How a drafter scores children: draft logits in, log-scores out, perturbed by the noise of the target's own draw.

The target emits argmin e/p, with e known from (seed, position, token). A drafter that knows e ranks children by
log softmax((log q / T - log e) / s), the law of its own draw under that noise, instead of log q. It changes what is
proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas.config import EagleConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.calibration import FixedScale, NoiseScale
from eyas.models.sampling.law import Filters, filtered_law
from eyas.models.sampling.noise import exponential_noise


class Scorer(Protocol):
    """Scores children."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        ...


class Ranker:
    """Scores of one propose call. At temperature 0, or without shared noise, plain log-softmax."""

    def __init__(
        self,
        contexts: Sequence[DraftContext],
        config: EagleConfig,
        levels: int,
        draft_ids: Tensor,
        scale: NoiseScale | None = None,
        grid: Sequence[float] = (),
    ) -> None:
        """scale: the s in use, where it is found while serving; else the configured one, or 1 where that is 0. grid: values
        of s for which the laws are measured as well, in `normalisers`."""
        device = draft_ids.device
        scale = scale or FixedScale(config.noise_scale or 1.0)
        self.normalisers: list[Tensor] = []
        shared = [config.shared_noise and c.noise.temperature > 0 for c in contexts]
        self._plain = not any(shared)
        if self._plain:
            return
        keys = [context.noise for context in contexts]
        known = torch.tensor(shared, device=device)
        ones = torch.ones(len(contexts), device=device)
        self._temperature = torch.where(known, torch.tensor([k.temperature for k in keys], device=device), ones)
        self._scale = torch.where(known, torch.tensor([scale.value(k.temperature) for k in keys], device=device), ones)
        self._grid = grid
        self._top_k = torch.where(known, torch.tensor([k.top_k for k in keys], device=device), 0)
        self._top_p = torch.where(known, torch.tensor([k.top_p for k in keys], device=device), ones)
        self._min_p = torch.where(known, torch.tensor([k.min_p for k in keys], device=device), 0.0 * ones)
        self._filtered = any(s and (k.top_k > 0 or k.top_p < 1 or k.min_p > 0) for s, k in zip(shared, keys, strict=True))
        seeds = [context.noise.seed for context in contexts for _ in range(levels)]
        positions = [context.committed + level for context in contexts for level in range(levels)]
        gumbel = exponential_noise(seeds, positions, draft_ids).log_().neg_().view(len(contexts), levels, -1)
        self._gumbel = gumbel * known[:, None, None]

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Log-scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        if self._plain:
            return torch.log_softmax(logits, dim=-1)
        if self._filtered:
            params = (self._temperature, self._top_k, self._top_p, self._min_p)
            filters = Filters(*(p.repeat_interleave(logits.shape[1]) for p in params))
            law = filtered_law(logits.flatten(0, 1), filters).view_as(logits).log()
        else:
            law = logits / self._temperature[:, None, None]
        perturbed = law + self._gumbel[:, None, level]
        if self._grid:
            self.normalisers.append(torch.stack([torch.logsumexp(perturbed / s, dim=-1) for s in self._grid], dim=-1))
        return torch.log_softmax(perturbed / self._scale[:, None, None], dim=-1)
