"""SampledProposal chains from a draft law, for verification by rejection sampling: draft logits in, chains and their laws out.

A level's law has the request's temperature and filters and is cut to its likeliest tokens; the draw is an exponential race
by (seed, position, token id), the seed being one that the target never uses.
Legend: S sessions, R rows of each, L levels, D draft vocabulary, K tokens of a law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from eyas.config import TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.scoring import law_where
from eyas.drafters.tree_growth import Expansion
from eyas.sampling.noise import exponential_noise
from eyas.sampling.sampler import Filters, exponential_race, filtering, filters_of, rank
from eyas.tree import DraftProbs, DraftTree, SampledProposal


class FilteredDraft:
    """Scores children by the probabilities that each session's own temperature and filters leave of the draft law."""

    def __init__(self, contexts: Sequence[DraftContext], device: torch.device) -> None:
        keys = [context.noise for context in contexts]
        self._filters = filters_of(keys, device)
        self._law = law_where(filtering(keys), len(keys), device)

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """Probabilities, not normalised, of the children of nodes at any level; float32 [S, R, D] in and out."""
        filters = Filters(*(setting.repeat_interleave(logits.shape[1]) for setting in self._filters))
        return self._law(logits.flatten(0, 1), filters).view_as(logits)


def draw_chains(
    expansion: Expansion, contexts: Sequence[DraftContext], shape: TreeConfig, proposal_top_k: int, target_ids: Tensor
) -> list[DraftTree]:
    """One chain per context, as long as `shape` and its budget allow. One copy to the host."""
    return chains(draw(expansion, contexts, shape, proposal_top_k, target_ids).tolist(), contexts, shape)


def draw(
    expansion: Expansion, contexts: Sequence[DraftContext], shape: TreeConfig, proposal_top_k: int, target_ids: Tensor
) -> Tensor:
    """Chains of `shape.depth` levels; the expansion scores by probabilities. Float64 [S, L, 2 K + 1]: token ids, their
    probabilities, and the place of the drawn one.

    proposal_top_k: most tokens of a level's law. target_ids maps draft vocabulary ids to the target's.
    """
    levels = shape.num_steps
    seeds = [context.noise.seed for context in contexts for _ in range(levels)]
    positions = [context.committed_length + level for context in contexts for level in range(levels)]
    noise = exponential_noise(seeds, positions, target_ids).view(len(contexts), levels, -1)
    law, laws, places = expansion.first(), [], []
    for level in range(levels):
        kept = rank(law[:, 0], min(proposal_top_k, law.shape[-1]))
        place = exponential_race(noise[:, level].gather(1, kept.ids), kept.scores).clamp(max=kept.ids.shape[1] - 1)[:, None]
        laws.append(kept)
        places.append(place)
        if level + 1 < levels:
            law = expansion.next(level + 1, torch.zeros_like(place), kept.ids.gather(1, place))
    ids = torch.stack([target_ids[law.ids] for law in laws], 1).double()
    probs = torch.stack([law.scores for law in laws], 1).double()
    return torch.cat([ids, probs, torch.cat(places, 1)[:, :, None].double()], 2)


def chains(
    drawn: Sequence[Sequence[Sequence[float]]], contexts: Sequence[DraftContext], shape: TreeConfig
) -> list[DraftTree]:
    """Of what `draw` gave, as much as `shape` and the budgets allow."""
    lengths = [min(c.budget.max_depth, min(c.budget.max_nodes, shape.num_draft_tokens) - 1) for c in contexts]
    return [_chain(c.tokens[-1], rows[:length]) for c, rows, length in zip(contexts, drawn, lengths, strict=True)]


def _chain(root: int, rows: Sequence[Sequence[float]]) -> DraftTree:
    if not rows:
        return DraftTree.root_only(root)
    size = len(rows[0]) // 2
    laws = [_law(row[:size], row[size:-1]) for row in rows]
    tokens = [int(row[int(row[-1])]) for row in rows]
    chances = [row[size + int(row[-1])] / math.fsum(law.probs) for row, law in zip(rows, laws, strict=True)]
    log_probs = accumulate((math.log(chance) for chance in chances), initial=0.0)
    chain = DraftTree.chain([root, *tokens])
    return DraftTree(chain.tokens, chain.parents, tuple(log_probs), sampled=SampledProposal(dict(enumerate(laws))))


def _law(ids: Sequence[float], probs: Sequence[float]) -> DraftProbs:
    possible = [(int(token), prob) for token, prob in zip(ids, probs, strict=True) if prob > 0]
    return DraftProbs(tuple(token for token, _ in possible), tuple(prob for _, prob in possible))
