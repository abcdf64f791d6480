"""Holds the trials of a step's sampled trees: logits and who draws them in, accepted tokens out.

A trial takes a uniform number of its own by (seed, position, rank among siblings), and the token after the last rejection
the noise of its position: a request says the same again under the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.acceptance.match import Accepted
from eyas.engine.acceptance.rejection import Families, accept_drawn, weigh
from eyas.engine.sampling.draws import Draw, run_race, target_law
from eyas.engine.sequence import Work
from eyas.models.sampling.noise import uniform_noise
from eyas.models.tensors import upload
from eyas.tree import DraftTree


def accept_sampled(
    works: Sequence[Work], logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]
) -> dict[str, Accepted]:
    """Outcomes by request id, for the works whose tree was drawn from its drafter's law.

    logits float32 [N, V], draws [N] and the target's own samples [N] are those of all works. Waits for the device once.
    """
    starts: dict[str, int] = {}
    trees: dict[str, DraftTree] = {}
    row = 0
    for work in works:
        if work.tree is not None and work.tree.sampled is not None and work.tree.families:
            starts[work.sequence.request.id], trees[work.sequence.request.id] = row, work.tree
        row += len(work.drawn)
    if not trees:
        return {}
    parents = [starts[name] + node for name, tree in trees.items() for node in tree.families]
    verdicts = iter(
        _hold(logits[upload(parents, logits.device)], [draws[parent] for parent in parents], list(trees.values()))
    )
    return {
        name: _walk(tree, [next(verdicts) for _ in tree.families], tokens[starts[name] :][: len(tree)])
        for name, tree in trees.items()
    }


def _hold(logits: Tensor, draws: Sequence[Draw], trees: Sequence[DraftTree]) -> list[list[int]]:
    """Of each node with children: whether each child passed its trial, as 0 or 1, then the token if none is accepted."""
    trial = weigh(target_law(logits, draws).double(), Families.of(trees, logits.device))
    ranks = torch.arange(trial.chances.shape[1], device=logits.device)
    uniform = uniform_noise([draw.key.seed for draw in draws], [draw.position for draw in draws], ranks)
    return torch.cat([(uniform < trial.chances).long(), run_race(trial.rest, draws)[:, None]], 1).tolist()


def _walk(tree: DraftTree, verdicts: Sequence[list[int]], tokens: Sequence[int]) -> Accepted:
    passed, drawn = [False] * len(tree), list(tokens)
    for (node, children), (*outcomes, token) in zip(tree.families.items(), verdicts, strict=True):
        drawn[node] = token
        for child, outcome in zip(children, outcomes, strict=False):
            passed[child] = outcome == 1
    return accept_drawn(tree, passed, drawn)
