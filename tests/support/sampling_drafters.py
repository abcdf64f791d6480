"""Drafters that sample their trees, and some that misreport how they sampled."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.device.transfer import upload
from eyas.drafters.base import Draft, DraftContext, LocalDrafter
from eyas.kernels.noise import exponential_noise
from eyas.kernels.probabilities import filtered_probs, filtering, filters_of
from eyas.protocol.tree import DraftProbs, DraftTree, SampledProposal
from tests.support import reference
from tests.support.bad_drafters import DrafterAround, StatelessDrafter


class BigramDrafter(StatelessDrafter):
    """Draws widths[d] children below each node of depth d, given only the token before; cut to the likeliest tokens."""

    can_sample = True

    def __init__(self, logits: Tensor, widths: Sequence[int], replacement: bool = False, proposal_top_k: int = 12) -> None:
        self._logits, self._widths, self._replacement, self._proposal_top_k = logits, widths, replacement, proposal_top_k

    def draft(self, context: DraftContext) -> Draft:
        tree, sampled_from = DraftTree.root_only(context.tokens[-1]), {}
        for node in range(context.budget.max_nodes):
            if node == len(tree) or tree.depths[node] == min(len(self._widths), context.budget.max_depth):
                break
            width = self._widths[tree.depths[node]]
            if len(tree) + width > context.budget.max_nodes:
                break
            sampled_from[node] = self._probs(tree.tokens[node], context)
            position = context.committed_length + tree.depths[node]
            siblings = self._siblings(sampled_from[node], width, context.noise.seed, position)
            tokens, parents = (*tree.tokens, *siblings), (*tree.parents, *[node] * len(siblings))
            tree = DraftTree.of(tokens, parents, (0.0,) * len(tokens))
        return tree.with_sampled(SampledProposal(sampled_from, self._replacement)) if sampled_from else tree

    def _probs(self, token: int, context: DraftContext) -> DraftProbs:
        keys, cpu = [context.noise], torch.device("cpu")
        (row,) = filtered_probs(self._logits[token][None], filters_of(keys, cpu), upload(filtering(keys), cpu))
        kept = [token for token in row.argsort(descending=True).tolist()[: self._proposal_top_k] if row[token] > 0]
        return DraftProbs(tuple(kept), tuple(row[kept].tolist()))

    def _siblings(self, probs: DraftProbs, width: int, seed: int, position: int) -> list[int]:
        """Without replacement: the tokens with the smallest noise / prob. With replacement: the smallest of each lane."""
        seeds = [(seed + lane) % 2**64 for lane in range(width)]
        times = exponential_noise(seeds, [position] * width, torch.tensor(probs.ids)) / torch.tensor(probs.probs)
        places = times.argmin(1).tolist() if self._replacement else times[0].argsort()[:width].tolist()
        return [probs.ids[place] for place in places]


@functools.cache
def bigram_logits(target: str) -> Tensor:
    """Logits of the target after each single token, [V, V]."""
    with torch.inference_mode():
        return reference.load_reference(target)(input_ids=torch.arange(48)[:, None]).logits[:, -1].clone()


class Disguised(DrafterAround):
    """Returns the trees of another drafter with another claim of how they were drawn."""

    can_sample = True

    def __init__(self, drafter: LocalDrafter, sampled: SampledProposal | None) -> None:
        super().__init__(drafter)
        self._sampled = sampled

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        return [draft.with_sampled(self._sampled) if isinstance(draft, DraftTree) else draft for draft in drafts]
