"""The acceptance rule `rejection`: trees drawn from the drafter's law and the target's law in, accepted tokens out.

Speculative sampling (Leviathan et al. 2023; with siblings, SpecInfer, Miao et al. 2024): lossless in law, if each tree says
truly which law its nodes were drawn from. All arithmetic is float64; nothing here draws.
Legend: N rows, V vocabulary, F nodes with children, C children of the largest family, K tokens of the widest draft law.

Holds the trials of a step's sampled trees: logits and who draws them in, verdicts out, and of these accepted tokens.

A trial takes a uniform number of its own by (seed, position, rank among siblings), and the token after the last rejection
the noise of its position: a request says the same again under the same drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.engine.sequence import ScheduledSequence
from eyas.sampling.acceptance import Accepted
from eyas.sampling.noise import uniform_noise
from eyas.sampling.sampler import Draw, draw_tokens, target_probs
from eyas.tensors import upload
from eyas.tree import DraftProbs, DraftTree


@dataclass(frozen=True)
class SiblingTrial:
    """What the draws of a step are weighed by.

    chances: float64 [F, C]; that of each child to be accepted once its elder siblings were not; 0 where there is no child.
    rest: float64 [F, V], not normalised; the law of the next token once all children were not accepted.
    """

    chances: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Families:
    """The nodes with children of a step's trees, padded to one shape.

    ids, probs: the draft laws, normalised, [F, K]; probs are 0 in the padding. cells: which of F * K are no padding.
    places: where in its law each child stands, [F, C]; real: which children there are; replacement: of each family [F, 1].
    """

    ids: Tensor
    probs: Tensor
    cells: Tensor
    places: Tensor
    real: Tensor
    replacement: Tensor

    @classmethod
    def of(cls, trees: Sequence[DraftTree], device: torch.device) -> Families:
        """Those of each tree in turn, in the order of `DraftTree.families`. There must be at least one."""
        drawn = [(tree, tree.sampled, node) for tree in trees if tree.sampled is not None for node in tree.families]
        laws = [sampled.draft_probs[node] for _, sampled, node in drawn]
        places = [_places(law, tree, node) for law, (tree, _, node) in zip(laws, drawn, strict=True)]
        ids, probs = (_padded([getattr(law, name) for law in laws]) for name in ("ids", "probs"))
        real = _padded([[1] * len(family) for family in places]) > 0
        return cls(
            ids=upload(ids.astype(np.int64), device),
            probs=upload(probs / probs.sum(1, keepdims=True), device),
            cells=upload(np.flatnonzero(probs), device),
            places=upload(_padded(places).astype(np.int64), device),
            real=upload(real, device),
            replacement=upload(np.array([[sampled.replacement] for _, sampled, _ in drawn]), device),
        )


def accept_probs(law: Tensor, families: Families) -> SiblingTrial:
    """Chances and rests under the target's law at the families' parents; law float64 [F, V], not necessarily normalised.

    A child t is accepted with min(1, g(t)/q(t)), else g becomes what is left of max(0, g - q), and without replacement q
    loses t. g is kept up to a factor, `mass`, so that tokens outside the draft law keep their target weight throughout.
    """
    kept = law.gather(1, families.ids) * (families.probs > 0)
    mass = law.sum(1, keepdim=True)
    outside = (mass - kept.sum(1, keepdim=True)).clamp(min=0)
    draft, chances = families.probs, []
    for place, real in zip(families.places.T[:, :, None], families.real.T[:, :, None], strict=True):
        left = (kept - mass * draft).clamp(min=0)
        left_mass = left.sum(1, keepdim=True) + outside
        chance = kept.gather(1, place) / (mass * draft.gather(1, place))
        chances.append(torch.where(real, chance.clamp(max=1), 0.0))
        some = real & (left_mass > 0)  # else g is q but for rounding, and stays: no token of probability 0 comes out
        kept, mass = torch.where(some, left, kept), torch.where(some, left_mass, mass)
        without = draft.scatter(1, place, 0.0)
        without = without / without.sum(1, keepdim=True)
        draft = torch.where(real & ~families.replacement, without, draft)
    rest = law.clone()
    rows = torch.arange(len(law), device=law.device)[:, None]
    cells = (rows * law.shape[1] + families.ids).flatten()[families.cells]
    rest.view(-1)[cells] = kept.flatten()[families.cells]
    return SiblingTrial(torch.cat(chances, 1), rest)


def accept_drawn(tree: DraftTree, passed: Sequence[bool], drawn: Sequence[int]) -> Accepted:
    """Walk down to the eldest child that passed its trial, while there is one.

    passed[i]: whether node i is accepted once it is reached and its elder siblings were not. drawn[i]: the token that
    follows node i when none of its children is accepted.
    """
    node, path = 0, [0]
    while accepted := [child for child in tree.families.get(node, ()) if passed[child]]:
        node = accepted[0]
        path.append(node)
    return Accepted(tuple(path), (*(tree.tokens[n] for n in path[1:]), drawn[node]))


def _places(law: DraftProbs, tree: DraftTree, node: int) -> list[int]:
    index = {token: place for place, token in enumerate(law.ids)}
    return [index[tree.tokens[child]] for child in tree.families[node]]


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rows of float64, filled up with 0."""
    width = max(len(row) for row in rows)
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)


@dataclass(frozen=True)
class RejectionResult:
    """Those of the works whose tree was drawn from its drafter's law. trees: by the row of the root, of all drawn rows.

    verdicts: int64 [F, C + 1] on the device, one row for each node with children, tree after tree: whether each child passed
    its trial, as 0 or 1, then the token if none is accepted.
    """

    trees: Mapping[int, DraftTree]
    verdicts: Tensor

    @property
    def families(self) -> list[int]:
        """Of each row of verdicts, the drawn row of the node."""
        return [start + node for start, tree in self.trees.items() for node in tree.families]

    def accepted(self, verdicts: Sequence[Sequence[int]], tokens: Sequence[int]) -> dict[int, Accepted]:
        """Outcomes by the row of the root, once verdicts and the target's own samples are on the host."""
        rows = iter(verdicts)
        return {start: _walk(tree, rows, tokens[start : start + len(tree)]) for start, tree in self.trees.items()}


def rejection_sample(works: Sequence[ScheduledSequence], logits: Tensor, draws: Sequence[Draw]) -> RejectionResult:
    """logits float32 [N, V] and draws [N] are those of all works. Does not wait for the device."""
    trees: dict[int, DraftTree] = {}
    row = 0
    for work in works:
        if work.tree is not None and work.tree.sampled is not None and work.tree.families:
            trees[row] = work.tree
        row += len(work.drawn)
    trials = RejectionResult(trees, torch.zeros(0, 1, dtype=torch.int64, device=logits.device))
    if not trees:
        return trials
    parents = trials.families
    return RejectionResult(
        trees, _verdicts(logits[upload(parents, logits.device)], [draws[row] for row in parents], trees.values())
    )


def _verdicts(logits: Tensor, draws: Sequence[Draw], trees: Iterable[DraftTree]) -> Tensor:
    trial = accept_probs(target_probs(logits, draws).double(), Families.of(list(trees), logits.device))
    ranks = torch.arange(trial.chances.shape[1], device=logits.device)
    uniform = uniform_noise([draw.key.seed for draw in draws], [draw.position for draw in draws], ranks)
    return torch.cat([(uniform < trial.chances).long(), draw_tokens(trial.rest, draws)[:, None]], 1)


def _walk(tree: DraftTree, verdicts: Iterator[Sequence[int]], tokens: Sequence[int]) -> Accepted:
    passed, drawn = [False] * len(tree), list(tokens)
    for (node, children), (*outcomes, token) in zip(tree.families.items(), verdicts, strict=False):
        drawn[node] = token
        for child, outcome in zip(children, outcomes, strict=False):
            passed[child] = outcome == 1
    return accept_drawn(tree, passed, drawn)
