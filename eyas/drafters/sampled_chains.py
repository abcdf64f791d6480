"""Sampled chains for verification by rejection sampling: draft logits in, chains and their draft probabilities out.

The probabilities of a level have the request's temperature and filters and are cut to the likeliest K tokens. A token is
drawn from them by an exponential race over (seed, position, token id), with a seed that the target never uses.
Legend: S sessions, R rows of each, L levels, D draft vocabulary, K tokens with a probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from eyas.drafters.base import DraftContext
from eyas.drafters.scoring import filtered_probs_of
from eyas.drafters.tree_growth import Expansion
from eyas.sampling.noise import exponential_noise
from eyas.sampling.sampler import Filters, exponential_race, filtering, filters_of, rank
from eyas.tree import DraftProbs, DraftTree, SampledProposal


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


def draw_chains(
    expansion: Expansion, contexts: Sequence[DraftContext], num_steps: int, proposal_top_k: int, target_ids: Tensor
) -> Tensor:
    """Draw one chain of `num_steps` levels per context, from an expansion that scores by probabilities.

    proposal_top_k: K. target_ids maps draft vocabulary ids to the target's.
    Returns float64 [S, L, 2 K + 1]: at each level K token ids, their K probabilities, and the place of the drawn one.
    """
    seeds = [context.noise.seed for context in contexts for _ in range(num_steps)]
    positions = [context.committed_length + level for context in contexts for level in range(num_steps)]
    noise_SLD = exponential_noise(seeds, positions, target_ids).view(len(contexts), num_steps, -1)
    scores, levels, places = expansion.first(), [], []
    for level in range(num_steps):
        kept = rank(scores[:, 0], min(proposal_top_k, scores.shape[-1]))
        winner = exponential_race(noise_SLD[:, level].gather(1, kept.ids), kept.scores)
        place = winner.clamp(max=kept.ids.shape[1] - 1)[:, None]
        levels.append(kept)
        places.append(place)
        if level + 1 < num_steps:
            scores = expansion.next(level + 1, torch.zeros_like(place), kept.ids.gather(1, place))
    ids = torch.stack([target_ids[kept.ids] for kept in levels], 1).double()
    probs = torch.stack([kept.scores for kept in levels], 1).double()
    return torch.cat([ids, probs, torch.cat(places, 1)[:, :, None].double()], 2)


def chain_trees(
    drawn: Sequence[Sequence[Sequence[float]]], contexts: Sequence[DraftContext], num_draft_tokens: int
) -> list[DraftTree]:
    """The output of `draw_chains` on the host as trees, cut to the contexts' budgets and to `num_draft_tokens` nodes."""
    lengths = [min(c.budget.max_depth, min(c.budget.max_nodes, num_draft_tokens) - 1) for c in contexts]
    return [_chain(c.tokens[-1], rows[:length]) for c, rows, length in zip(contexts, drawn, lengths, strict=True)]


def _chain(root: int, rows: Sequence[Sequence[float]]) -> DraftTree:
    if not rows:
        return DraftTree.root_only(root)
    size = len(rows[0]) // 2
    levels = [_draft_probs(row[:size], row[size:-1]) for row in rows]
    tokens = [int(row[int(row[-1])]) for row in rows]
    probs = [row[size + int(row[-1])] / math.fsum(level.probs) for row, level in zip(rows, levels, strict=True)]
    log_probs = accumulate((math.log(prob) for prob in probs), initial=0.0)
    chain = DraftTree.chain([root, *tokens])
    return DraftTree(chain.tokens, chain.parents, tuple(log_probs), sampled=SampledProposal(dict(enumerate(levels))))


def _draft_probs(ids: Sequence[float], probs: Sequence[float]) -> DraftProbs:
    possible = [(int(token), prob) for token, prob in zip(ids, probs, strict=True) if prob > 0]
    return DraftProbs(tuple(token for token, _ in possible), tuple(prob for _, prob in possible))
