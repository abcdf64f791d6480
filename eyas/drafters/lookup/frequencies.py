"""Frequencies as a draft law: a trie's levels in, log-shares of siblings out, perturbed by the noise of the target's draw.

The formula is that of `eyas.drafters.ranking`, over the children that were found. Legend: R parents, C children of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.config import EagleConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.lookup.matches import Floats, Ints, Level, log_shares
from eyas.models.sampling.keys import filtering, filters_of
from eyas.models.sampling.law import filtered_law
from eyas.models.sampling.noise import exponential_noise
from eyas.models.tensors import upload


class Frequencies:
    """Shares of one propose call. At temperature 0, or without shared noise, plain ones.

    The s of the noise is the configured one; 1 where that is to be found while serving, which takes a law over all tokens.
    """

    def __init__(self, contexts: Sequence[DraftContext], config: EagleConfig) -> None:
        self._contexts = contexts
        self._noise_scale = config.noise_scale or 1.0
        self._shared = np.array([config.shared_noise and c.noise.temperature > 0 for c in contexts])

    def log_shares(self, level: Level) -> Floats:
        """Log-shares [K] of a level's nodes among their siblings."""
        plain = log_shares(level)
        if not self._shared.any():
            return plain
        first, rows = np.unique(level.parents, return_index=True, return_inverse=True)[1:]
        columns = np.arange(len(rows)) - first[rows]
        noisy = self._perturbed(level, rows, columns, level.sessions[first])[rows, columns]
        return np.where(self._shared[level.sessions], noisy, plain)

    def _perturbed(self, level: Level, rows: Ints, columns: Ints, sessions: Ints) -> Floats:
        """[R, C] by parent and child; sessions [R]."""
        logits = np.full((len(sessions), int(columns.max()) + 1), -np.inf, np.float32)
        logits[rows, columns] = np.log(level.weights)
        ids = np.zeros(logits.shape, np.int64)
        ids[rows, columns] = level.tokens
        contexts = [self._contexts[session] for session in sessions]
        keys = [context.noise for context in contexts]
        cpu = torch.device("cpu")
        law = filtered_law(torch.from_numpy(logits), filters_of(keys, cpu), upload(filtering(keys), cpu)).log()
        positions = [context.committed + level.depth for context in contexts]
        gumbel = -exponential_noise([key.seed for key in keys], positions, torch.from_numpy(ids)).log()
        return torch.log_softmax((law + gumbel) / self._noise_scale, dim=-1).double().numpy()
