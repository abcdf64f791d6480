"""The acceptance rule `rejection`, for trees whose nodes were sampled from the drafter's distribution.

Speculative sampling (Leviathan et al. 2023; for siblings SpecInfer, Miao et al. 2024, section 4.3). With target p and draft
q, a drafted token t is accepted if r < min(1, p(t) / q(t)), r uniform; else p becomes norm(max(0, p - q)), without
replacement q loses t, and the next sibling is tried. When all siblings are rejected, the token is drawn from what is left of
p.

The output has the target's distribution, if each tree reports truly which distribution its nodes were sampled from. Siblings
are tried in the order in which they were drawn. r is a function of (seed, position, order among siblings) and the bonus draw
takes the noise of its position, so that a request repeats exactly under the same drafts. All arithmetic is float64.

Legend: N drawn rows of a step, V vocabulary, F nodes with children, C children of the largest family, K tokens of the widest
draft distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.device.transfer import upload
from eyas.kernels.arguments import Draws
from eyas.kernels.noise import uniform_noise
from eyas.kernels.probabilities import draw_tokens, target_probs
from eyas.protocol.tree import DraftProbs, DraftTree
from eyas.sampling.acceptance import LogitRows


@dataclass(frozen=True)
class SiblingVerdicts:
    """Decisions on the children of sampled trees.

    Attributes:
        trees: by the drawn row of the root.
        cells: int64 [F, C + 1] on the device, one row for each node with children, tree after tree: 1 for each child that
            is accepted once it is reached, else 0; then the token that follows if no child is.
    """

    trees: Mapping[int, DraftTree]
    cells: Tensor

    @property
    def parents(self) -> list[int]:
        """The drawn row of each node with children."""
        return [start + node for start, tree in self.trees.items() for node in tree.families]

    @property
    def children(self) -> list[list[int]]:
        """The drawn rows of the children of each of `parents`, in order."""
        return [[start + child for child in own] for start, tree in self.trees.items() for own in tree.families.values()]


def rejection_sample(batch: Sequence[LogitRows], logits: Tensor, draws: Draws) -> SiblingVerdicts:
    """Decide on the nodes of all sampled trees of a step, without waiting for the device.

    Args:
        logits: float32 [N, V] of the drawn rows.
        draws: of the same rows.
    """
    trees: dict[int, DraftTree] = {}
    row = 0
    for rows in batch:
        if rows.tree is not None and rows.tree.sampled is not None and rows.tree.families:
            trees[row] = rows.tree
        row += rows.num_drawn
    verdicts = SiblingVerdicts(trees, torch.zeros(0, 1, dtype=torch.int64, device=logits.device))
    if not trees:
        return verdicts
    parents = verdicts.parents
    draws = draws.taken(parents)
    probs = target_probs(logits[upload(parents, logits.device)], draws).double()
    chances, residual = accept_probs(probs, Families.of(list(trees.values()), logits.device))
    orders = torch.arange(chances.shape[1], device=logits.device)
    uniform = uniform_noise([key.seed for key in draws.keys], draws.positions.tolist(), orders)
    return SiblingVerdicts(trees, torch.cat([(uniform < chances).long(), draw_tokens(residual, draws)[:, None]], 1))


@dataclass(frozen=True)
class Families:
    """The nodes with children of a step's trees, padded to one shape.

    Attributes:
        ids, probs: the draft distributions, normalised, [F, K]; probs are 0 in the padding.
        cells: which of F * K are no padding.
        places: index of each child's token in its distribution, [F, C].
        real: which children exist [F, C].
        replacement: whether the siblings were drawn with replacement [F, 1].
    """

    ids: Tensor
    probs: Tensor
    cells: Tensor
    places: Tensor
    real: Tensor
    replacement: Tensor

    @classmethod
    def of(cls, trees: Sequence[DraftTree], device: torch.device) -> Families:
        """Return the families of each tree in turn, in the order of `DraftTree.families`; at least one."""
        drawn = [(tree, tree.sampled, node) for tree in trees if tree.sampled is not None for node in tree.families]
        drafts = [sampled.draft_probs[node] for _, sampled, node in drawn]
        places = [_places(draft, tree, node) for draft, (tree, _, node) in zip(drafts, drawn, strict=True)]
        ids, probs = (_padded([getattr(draft, name) for draft in drafts]) for name in ("ids", "probs"))
        real = _padded([[1] * len(family) for family in places]) > 0
        return cls(
            ids=upload(ids.astype(np.int64), device),
            probs=upload(probs / probs.sum(1, keepdims=True), device),
            cells=upload(np.flatnonzero(probs), device),
            places=upload(_padded(places).astype(np.int64), device),
            real=upload(real, device),
            replacement=upload(np.array([[sampled.replacement] for _, sampled, _ in drawn]), device),
        )


class SiblingProbs(NamedTuple):
    """Probabilities of the children of sampled trees.

    Attributes:
        chances: probability that each child is accepted once it is reached [F, C]; 0 where there is no child.
        residual: weights of the next token when all children are rejected, not normalised [F, V].
    """

    chances: Tensor
    residual: Tensor


def accept_probs(target: Tensor, families: Families) -> SiblingProbs:
    """Return how likely each sibling is accepted, and what the next token is drawn from if none is.

    target: the target's probabilities at the families' parents, float64 [F, V], not necessarily normalised.
    `kept` are the target's weights at the draft's tokens and `mass` is their sum together with those outside, so that p is
    kept / mass, and tokens outside the draft distribution keep their target weight throughout.
    """
    kept = target.gather(1, families.ids) * (families.probs > 0)
    mass = target.sum(1, keepdim=True)
    outside = (mass - kept.sum(1, keepdim=True)).clamp(min=0)
    draft, chances = families.probs, []
    for place, real in zip(families.places.T[:, :, None], families.real.T[:, :, None], strict=True):
        left = (kept - mass * draft).clamp(min=0)
        left_mass = left.sum(1, keepdim=True) + outside
        chance = kept.gather(1, place) / (mass * draft.gather(1, place))
        chances.append(torch.where(real, chance.clamp(max=1), 0.0))
        some = real & (left_mass > 0)  # else p equals q up to rounding and stays: no token of probability 0 is drawn
        kept, mass = torch.where(some, left, kept), torch.where(some, left_mass, mass)
        without = draft.scatter(1, place, 0.0)
        without = without / without.sum(1, keepdim=True)
        draft = torch.where(real & ~families.replacement, without, draft)
    residual = target.clone()
    rows = torch.arange(len(target), device=target.device)[:, None]
    cells = (rows * target.shape[1] + families.ids).flatten()[families.cells]
    residual.view(-1)[cells] = kept.flatten()[families.cells]
    return SiblingProbs(torch.cat(chances, 1), residual)


def _places(draft: DraftProbs, tree: DraftTree, node: int) -> list[int]:
    index = {token: place for place, token in enumerate(draft.ids)}
    return [index[tree.tokens[child]] for child in tree.families[node]]


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the rows of float64, filled up with 0."""
    width = max(len(row) for row in rows)
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)
