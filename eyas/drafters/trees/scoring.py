"""Scores of children: draft logits in, log-scores out, with the noise of the target's own draw.

The target emits argmax l + T g, where T is the temperature and the Gumbel noise g is known from (seed, position, token). A
drafter that knows g ranks children by log softmax((d + T g) / r). If its logits d differ from l by Gumbel noise of scale r,
these are the probabilities that the target emits each child. The ranking temperature r is therefore the scale of the
drafter's own errors, and at T = 0 likely children count more than their draft probabilities say. The ranking changes what is
proposed, never what is emitted. Legend: S sessions, L levels, R rows per session, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Ints
from eyas.config import DraftingConfig
from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext
from eyas.kernels.arguments import ProbsFunction, Ranked
from eyas.kernels.by_device import drafting_kernels
from eyas.kernels.probabilities import Filters, filtered_probs

# "plain": no session shares its noise; "noised": some do; "filtered": some of these have filters too.
ScorerKind = Literal["plain", "noised", "filtered"]

NUM_NOISE_WORDS = 8
# Default of the ranking temperature for requests up to HIGH_TEMPERATURE, and above it.
RANKING_TEMPERATURE = 0.6
HIGH_RANKING_TEMPERATURE = 0.8
HIGH_TEMPERATURE = 0.8


@dataclass(frozen=True)
class LevelLogits:
    """Logits of a level's children, with what ranks them or draws one of them.

    Attributes:
        logits: of the draft model, [S, R, D]; of the ends of chains [S, 1, D].
        words: the output of `noise_words`, of chains that of `chain_words`.
        noise: of all levels, float32 [S, L, D], if there is some.
        level: 0 is the root's.
        probs: applies temperature and filters to logits; None if no session has filters.
    """

    logits: Tensor
    words: Tensor
    noise: Tensor | None
    level: int
    probs: ProbsFunction | None

    def best(self, k: int, above: Tensor | None = None) -> Ranked:
        """Return the k best children of each node, [S, R, k], see `rank`.

        above: scores of the nodes [S, W], added to their children's.
        """
        best_children, inputs = drafting_kernels(self.logits).best_children, (self.words, self.noise, self.level, k)
        if above is not None and above.shape[1] != self.logits.shape[1]:  # one row of logits for all nodes
            best = best_children(self.logits, *inputs, None, self.probs)
            return Ranked(best.scores + above[:, :, None], best.ids)
        return best_children(self.logits, *inputs, above, self.probs)

    def draw(self, draft_ids: Tensor, drawn: Tensor) -> Tensor:
        """Write one level of chains to `drawn`, see `draw_chains`. Returns the drawn draft ids, int64 [S, 1].

        draft_ids maps draft vocabulary ids to the target's.
        """
        assert self.probs is not None, "a chain's scorer has it"
        draw_children = drafting_kernels(self.logits).draw_children
        return draw_children(self.logits, self.words, self.level, draft_ids, drawn, self.probs)


# Takes the logits [S, R, D] of the children of nodes at a level (0 is the root).
Scorer = Callable[[Tensor, int], LevelLogits]


def perturbed_scorer(words: Tensor, levels: int, draft_ids: Tensor, kind: ScorerKind, probs: ProbsFunction) -> Scorer:
    """Return scores under each session's ranking temperature and, where it is shared, the noise of the target's own draw.

    CUDA graphs capture it: its sizes depend on nothing that a tensor holds, and it copies nothing to the device.

    Args:
        words: the output of `noise_words` on the device.
        probs: applies temperature and filters to logits, for "filtered".
    """
    noise = None if kind == "plain" else drafting_kernels(draft_ids).shared_noise(words, draft_ids, levels)
    used = probs if kind == "filtered" else None
    return lambda logits, level: LevelLogits(logits, words, noise, level, used)


def chain_scorer(words: Tensor, probs: ProbsFunction) -> Scorer:
    """Return what `draw_chains` draws from: logits under each session's temperature and filters.

    Args:
        words: the output of `chain_words` on the device.
        probs: applies temperature and filters to logits.
    """
    return lambda logits, level: LevelLogits(logits, words, None, level, probs)


def make_scorer(contexts: Sequence[DraftContext], config: DraftingConfig, levels: int, draft_ids: Tensor) -> Scorer:
    """Return the scorer of one round of deterministic trees. draft_ids maps draft vocabulary ids to the target's."""
    words, device = noise_words(contexts, config, len(contexts)), draft_ids.device
    filtered = np.flatnonzero((words[3] > 0) | (words[6].view(np.float64) < 1))
    probs = filtered_probs_of(filtered, len(contexts), device)
    return perturbed_scorer(upload(words, device), levels, draft_ids, scorer_kind(words), probs)


def noise_words(contexts: Sequence[DraftContext], config: DraftingConfig, num_rows: int) -> Ints:
    """Return what the scores of each session depend on besides logits, int64 [NUM_NOISE_WORDS, num_rows].

    The rows are seed, committed length, whether noise is shared, and top-k; then as bits of float64 temperature, ranking
    temperature, top-p and min-p. Without shared noise, as beyond the contexts, the temperature is 0, and no filters apply.
    """
    ints, reals = np.zeros((4, num_rows), np.uint64), np.ones((4, num_rows))
    reals[[0, 3]] = 0.0
    for row, context in enumerate(contexts):
        key = context.noise
        default = RANKING_TEMPERATURE if key.temperature <= HIGH_TEMPERATURE else HIGH_RANKING_TEMPERATURE
        if key.temperature > 0 and not config.shared_noise:  # the drafter cannot know what is drawn
            default = 1.0
        reals[1, row] = config.ranking_temperature or default
        if config.shared_noise and key.temperature > 0:
            ints[:, row] = key.seed, context.committed_length, 1, key.top_k
            reals[[0, 2, 3], row] = key.temperature, key.top_p, key.min_p
    return np.concatenate([ints, reals.view(np.uint64)]).view(np.int64)


def unmasked_words(contexts: Sequence[DraftContext], config: DraftingConfig) -> Ints | None:
    """Return `noise_words` where nothing else changes the logits; None for sessions with masks or biases."""
    is_masked = any(context.allowed or context.logit_biases for context in contexts)
    return None if is_masked else noise_words(contexts, config, len(contexts))


def chain_words(contexts: Sequence[DraftContext]) -> Ints:
    """Return what the drawn tokens of sampled chains depend on besides logits, in the rows of `noise_words`."""
    keys = [context.noise for context in contexts]
    ints = [(key.seed, c.committed_length, 1, key.top_k) for key, c in zip(keys, contexts, strict=True)]
    reals = [(key.temperature, 1.0, key.top_p, key.min_p) for key in keys]
    return np.concatenate([np.array(ints, np.uint64), np.array(reals).view(np.uint64)], 1).T.copy().view(np.int64)


def scorer_kind(words: Ints) -> ScorerKind:
    """Return which scorer the output of `noise_words` needs."""
    top_p, min_p = words[6:].view(np.float64)
    if not words[2].any():
        return "plain"
    return "filtered" if ((words[3] > 0) | (top_p < 1) | (min_p > 0)).any() else "noised"


def filtered_probs_of(filtered: Sequence[int] | Ints, num_sessions: int, device: torch.device) -> ProbsFunction:
    """Return `filtered_probs` for logits [S * R, D], where only the sessions `filtered` have top-k or top-p."""
    sessions = upload(filtered, device)

    def probs(logits: Tensor, filters: Filters) -> Tensor:
        num_rows = len(logits) // num_sessions
        # Rows of a session stand together: row r of session s is s * R + r.
        rows = sessions[:, None] * num_rows + torch.arange(num_rows, device=device)
        return filtered_probs(logits, filters, rows.flatten())

    return probs
