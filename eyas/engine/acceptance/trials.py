"""Holds the trials of a step's sampled trees: logits and who draws them in, verdicts out, and of these accepted tokens.

A trial takes a uniform number of its own by (seed, position, rank among siblings), and the token after the last rejection
the noise of its position: a request says the same again under the same drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.acceptance.match import Accepted
from eyas.engine.acceptance.rejection import Families, accept_drawn, weigh
from eyas.engine.sampling.draws import Draw, run_race, target_law
from eyas.engine.sequence import Work
from eyas.models.sampling.noise import uniform_noise
from eyas.models.tensors import upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class Trials:
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


def hold(works: Sequence[Work], logits: Tensor, draws: Sequence[Draw]) -> Trials:
    """logits float32 [N, V] and draws [N] are those of all works. Does not wait for the device."""
    trees: dict[int, DraftTree] = {}
    row = 0
    for work in works:
        if work.tree is not None and work.tree.sampled is not None and work.tree.families:
            trees[row] = work.tree
        row += len(work.drawn)
    trials = Trials(trees, torch.zeros(0, 1, dtype=torch.int64, device=logits.device))
    if not trees:
        return trials
    parents = trials.families
    return Trials(trees, _verdicts(logits[upload(parents, logits.device)], [draws[row] for row in parents], trees.values()))


def _verdicts(logits: Tensor, draws: Sequence[Draw], trees: Iterable[DraftTree]) -> Tensor:
    trial = weigh(target_law(logits, draws).double(), Families.of(list(trees), logits.device))
    ranks = torch.arange(trial.chances.shape[1], device=logits.device)
    uniform = uniform_noise([draw.key.seed for draw in draws], [draw.position for draw in draws], ranks)
    return torch.cat([(uniform < trial.chances).long(), run_race(trial.rest, draws)[:, None]], 1)


def _walk(tree: DraftTree, verdicts: Iterator[Sequence[int]], tokens: Sequence[int]) -> Accepted:
    passed, drawn = [False] * len(tree), list(tokens)
    for (node, children), (*outcomes, token) in zip(tree.families.items(), verdicts, strict=False):
        drawn[node] = token
        for child, outcome in zip(children, outcomes, strict=False):
            passed[child] = outcome == 1
    return accept_drawn(tree, passed, drawn)
