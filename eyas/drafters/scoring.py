"""How a drafter scores children: draft logits in, log-scores out, perturbed by the noise of the target's own draw.

The target emits argmin e / p, where e is known from (seed, position, token). A drafter that knows e ranks children by
log softmax((log q / T - log e) / s), the distribution of its own draw under that noise, instead of log q. This changes
what is proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.config import DraftingConfig
from eyas.drafters.base import DraftContext
from eyas.sampling.noise import exponential_noise_at, signed
from eyas.sampling.sampler import Filters, filtered_probs, filtering, filters_of
from eyas.tensors import Ints, upload

# "plain": no session shares its noise; "noised": some do; "filtered": some of these have filters too.
ScorerKind = Literal["plain", "noised", "filtered"]
ProbsFunction = Callable[[Tensor, Filters], Tensor]

NUM_NOISE_WORDS = 8


class Scorer(Protocol):
    """Scores the children of tree nodes."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Scores of the children of nodes at `level` (0 is the root); float32 [S, R, D] in and out."""
        ...


class PlainScorer:
    """Plain log-softmax."""

    def scores(self, logits: Tensor, level: int) -> Tensor:
        return torch.log_softmax(logits, dim=-1)


class PerturbedScorer:
    """Scores under the noise of the target's own draw.

    probs: applies temperature and filters to logits; None if no session has filters.
    CUDA graphs capture it: its sizes depend on nothing that a tensor holds, and it copies nothing to the device.
    """

    def __init__(self, noise: NoiseTensors, levels: int, draft_ids: Tensor, probs: ProbsFunction | None) -> None:
        self._noise, self._probs = noise, probs
        positions_SL = noise.committed_length[:, None] + torch.arange(levels, device=draft_ids.device)
        seeds_SL = noise.seed[:, None].expand_as(positions_SL)
        exponentials = exponential_noise_at(seeds_SL.flatten(), positions_SL.flatten(), draft_ids)
        self._gumbel_SLD = exponentials.log_().neg_().view(*positions_SL.shape, -1) * noise.shared[:, None, None]

    def scores(self, logits: Tensor, level: int) -> Tensor:
        noise = self._noise
        if self._probs is None:
            log_probs = logits / noise.temperature[:, None, None]
        else:
            columns = (noise.temperature, noise.top_k, noise.top_p, noise.min_p)
            filters = Filters(*(column.repeat_interleave(logits.shape[1]) for column in columns))
            log_probs = self._probs(logits.flatten(0, 1), filters).view_as(logits).log()
        perturbed = log_probs + self._gumbel_SLD[:, None, level]
        return torch.log_softmax(perturbed / noise.scale[:, None, None], dim=-1)


class ProbsScorer:
    """Scores children by their draft probabilities under each session's temperature and filters."""

    def __init__(self, contexts: Sequence[DraftContext], device: torch.device) -> None:
        keys = [context.noise for context in contexts]
        self._filters = filters_of(keys, device)
        self._probs = filtered_probs_of(filtering(keys), len(keys), device)

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Unnormalised probabilities of the children of nodes at any level; float32 [S, R, D] in and out."""
        filters = Filters(*(setting.repeat_interleave(logits.shape[1]) for setting in self._filters))
        return self._probs(logits.flatten(0, 1), filters).view_as(logits)


def make_scorer(contexts: Sequence[DraftContext], config: DraftingConfig, levels: int, draft_ids: Tensor) -> Scorer:
    """The scorer of one round of deterministic trees: plain if no session has both shared noise and a temperature above 0.

    draft_ids maps draft vocabulary ids to the target's.
    """
    words = noise_words(contexts, config, len(contexts))
    kind = scorer_kind(words)
    if kind == "plain":
        return PlainScorer()
    device = draft_ids.device
    probs = None
    if kind == "filtered":
        probs = filtered_probs_of(np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1)), len(contexts), device)
    return PerturbedScorer(noise_tensors(upload(words, device)), levels, draft_ids, probs)


@dataclass(frozen=True)
class NoiseTensors:
    """What the scores of each session depend on besides logits, all [S].

    seed, committed_length and top_k are int64, the others float32. shared: 1 where noise is shared, else 0; rows with 0 have
    no filters, and temperature and scale 1.
    """

    seed: Tensor
    committed_length: Tensor
    shared: Tensor
    top_k: Tensor
    temperature: Tensor
    scale: Tensor
    top_p: Tensor
    min_p: Tensor


def noise_words(contexts: Sequence[DraftContext], config: DraftingConfig, num_rows: int) -> Ints:
    """NoiseTensors as int64 [NUM_NOISE_WORDS, num_rows], the last four as bits of float64.

    Rows beyond the contexts share no noise.
    """
    ints, reals = np.zeros((4, num_rows), dtype=np.int64), np.ones((4, num_rows))
    reals[3] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        if config.shared_noise and key.temperature > 0:
            ints[:, row] = signed(key.seed), context.committed_length, 1, key.top_k
            reals[:, row] = key.temperature, config.noise_scale, key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.int64)])


def noise_tensors(words: Tensor) -> NoiseTensors:
    """The inverse of `noise_words`, on any device."""
    seed, committed_length, shared, top_k = words[:4]
    temperature, scale, top_p, min_p = words[4:].contiguous().view(torch.float64).float()
    return NoiseTensors(seed, committed_length, shared.float(), top_k, temperature, scale, top_p, min_p)


def scorer_kind(words: Ints) -> ScorerKind:
    """Which scorer the output of `noise_words` needs."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def filtered_probs_of(filtered: Sequence[int] | Ints, num_sessions: int, device: torch.device) -> ProbsFunction:
    """`filtered_probs` for logits [S * R, D], where only the sessions `filtered` have top-k or top-p."""
    sessions = upload(filtered, device)

    def probs(logits: Tensor, filters: Filters) -> Tensor:
        num_rows = len(logits) // num_sessions
        rows = sessions[:, None] * num_rows + torch.arange(num_rows, device=device)
        return filtered_probs(logits, filters, rows.flatten())

    return probs
