"""How a drafter scores children: draft logits in, log-scores out, perturbed by the noise of the target's own draw.

The target emits argmin e/p, with e known from (seed, position, token). A drafter that knows e ranks children by
log softmax((log q / T - log e) / s), the law of its own draw under that noise, instead of log q. It changes what is
proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.config import EagleConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.calibration import FixedScale, NoiseScale
from eyas.models.inputs import Ints
from eyas.models.sampling.law import Filters, filtered_law
from eyas.models.sampling.noise import exponential_noise_at, signed
from eyas.models.tensors import upload

# "plain": no session shares its noise; "filtered": some of those that do filter their law too.
Kind = Literal["plain", "noised", "filtered"]
Law = Callable[[Tensor, Filters], Tensor]

NUM_NOISE_WORDS = 8


class Scorer(Protocol):
    """Scores children."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        ...


@dataclass(frozen=True)
class NoiseRows:
    """What a session's scores depend on besides logits, all [S]: int64 seeds, committed and top_k, float32 the others.

    known: 1 where noise is shared, else 0; such rows have no filters, and temperature and scale 1.
    """

    seeds: Tensor
    committed: Tensor
    known: Tensor
    top_k: Tensor
    temperature: Tensor
    scale: Tensor
    top_p: Tensor
    min_p: Tensor


def noise_words(contexts: Sequence[DraftContext], config: EagleConfig, scale: NoiseScale, rows: int) -> Ints:
    """NoiseRows as [NUM_NOISE_WORDS, rows], the last four as bits of float64; rows behind the contexts share no noise."""
    ints, reals = np.zeros((4, rows), dtype=np.int64), np.ones((4, rows))
    reals[3] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        if config.shared_noise and key.temperature > 0:
            ints[:, row] = signed(key.seed), context.committed, 1, key.top_k
            reals[:, row] = key.temperature, scale.value(key.temperature), key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.int64)])


def noise_rows(words: Tensor) -> NoiseRows:
    """What `noise_words` wrote, from wherever it was copied to."""
    seeds, committed, known, top_k = words[:4]
    temperature, scale, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    return NoiseRows(seeds, committed, known.float(), top_k, temperature, scale, top_p, min_p)


def kind_of(words: Ints) -> Kind:
    """What `noise_words` asks of a scorer."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def _filtering(words: Ints) -> list[int]:
    """Sessions whose top-k or top-p does something."""
    return np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1)).tolist()


def law_where(filtering: Sequence[int], num_sessions: int, device: torch.device) -> Law:
    """`filtered_law` of the rows of sessions, as many of each, where only the `filtering` ones have top-k or top-p."""
    sessions = upload(filtering, device)

    def law(logits: Tensor, filters: Filters) -> Tensor:
        each = len(logits) // num_sessions
        rows = sessions[:, None] * each + torch.arange(each, device=device)
        return filtered_law(logits, filters, rows.flatten())

    return law


class PlainScorer:
    """Plain log-softmax."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """See Scorer."""
        return torch.log_softmax(logits, dim=-1)


class PerturbedScorer:
    """Scores under the noise of the target's own draw. law: filters logits; None where no session has filters.

    grid: values of s for which the laws are measured as well, in `normalisers`. Its sizes depend on nothing that a tensor
    holds, and it copies nothing to the device.
    """

    def __init__(self, rows: NoiseRows, levels: int, draft_ids: Tensor, law: Law | None, grid: Sequence[float] = ()) -> None:
        self._rows, self._law, self._grid = rows, law, grid
        self.normalisers: list[Tensor] = []
        positions = rows.committed[:, None] + torch.arange(levels, device=draft_ids.device)
        seeds = rows.seeds[:, None].expand_as(positions)
        noise = exponential_noise_at(seeds.flatten(), positions.flatten(), draft_ids)
        self._gumbel = noise.log_().neg_().view(*positions.shape, -1) * rows.known[:, None, None]

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """See Scorer."""
        rows = self._rows
        if self._law is None:
            law = logits / rows.temperature[:, None, None]
        else:
            columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
            filters = Filters(*(column.repeat_interleave(logits.shape[1]) for column in columns))
            law = self._law(logits.flatten(0, 1), filters).view_as(logits).log()
        perturbed = law + self._gumbel[:, None, level]
        if self._grid:
            self.normalisers.append(torch.stack([torch.logsumexp(perturbed / s, dim=-1) for s in self._grid], dim=-1))
        return torch.log_softmax(perturbed / rows.scale[:, None, None], dim=-1)


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
        words = noise_words(contexts, config, scale or FixedScale(config.noise_scale or 1.0), len(contexts))
        kind = kind_of(words)
        self.normalisers: Sequence[Tensor] = ()
        if kind == "plain":
            self._scorer: Scorer = PlainScorer()
            return
        device = draft_ids.device
        law = law_where(_filtering(words), len(contexts), device) if kind == "filtered" else None
        perturbed = PerturbedScorer(noise_rows(upload(words, device)), levels, draft_ids, law, grid)
        self._scorer, self.normalisers = perturbed, perturbed.normalisers

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Log-scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        return self._scorer.scores(logits, level)
