"""Grows draft trees for many sessions at once, dynamic, of a fixed shape or sampled, and selects their best nodes.

Dynamic trees are those of EAGLE-2 (Li et al. 2024, section 4); fixed shapes those of EAGLE (Li et al. 2024) and Medusa
(Cai et al. 2024). Candidates are numbered level by level from 1; 0 is the root. Scores are cumulative float32
log-probabilities. Legend: S sessions, W nodes expanded at a level, D draft vocabulary, P candidates, N nodes selected.

    top_k 2, num_steps 2:         root                 tokens   [a  b  c  d  e  f]
                                 /    \\                parents  [0  0  1  1  2  2]
                               a=1    b=2              ends     (2, 6)
                              /  \\    /  \\
                            c=3 d=4 e=5 f=6
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Reals
from eyas.config import TreeChoices, TreeConfig
from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext, limits_of
from eyas.drafters.trees.rows import GrowthShape
from eyas.drafters.trees.scoring import Scorer
from eyas.kernels.arguments import Ranked
from eyas.kernels.by_device import drafting_kernels, rank
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftProbs, DraftTree, DraftTrees, SampledProposal


class Expansion(Protocol):
    """A draft model in the middle of growing trees."""

    def first(self) -> Tensor:
        """Return logits [S, 1, D] of the root's children, in any float type."""
        ...

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """Run the frontier of `level` (from 1).

        Replaces what the expansion holds and changes nothing of it in place: copies of the expansion hold it too.

        Args:
            parents: row of each node's parent within the frontier before it, [S, W].
            tokens: draft vocabulary ids, [S, W].

        Returns:
            Logits [S, W, D] of its children; or [S, 1, D] if they are the same below all of the frontier.
        """
        ...


class IndependentExpansion:
    """Expansion where a level's logits do not depend on the path: Medusa, DFlash, P-EAGLE.

    All levels were computed at once, and one row of logits serves all nodes of a level.

    Args:
        logits: float32 [S, L, D], one row for the children of each level.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def first(self) -> Tensor:
        return self._logits[:, :1]

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._logits[:, level : level + 1]


def ddtree_shape(tree: TreeConfig, draft_vocab_size: int) -> TreeConfig:
    """Return the shape in which growing by levels finds the best tree of independent levels (DDTree, 2604.12989).

    As wide as the tree has nodes: a level costs no pass, and no node outside these can be among the best.
    """
    return replace(tree, top_k=max(1, min(tree.num_draft_tokens - 1, draft_vocab_size)))


@dataclass(frozen=True)
class Candidates:
    """Every child of every expanded node.

    ends[i] is the number of candidates up to and including level i + 1.

    Attributes:
        tokens: draft vocabulary ids.
        parents: candidate numbers; all [S, P].
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    ends: tuple[int, ...]


class TreeGrowth:
    """Dynamic trees that grow level by level.

    The `top_k` best nodes of a level are expanded, and `num_candidates` children of each are recorded.
    """

    def __init__(self, expansion: Expansion, scorer: Scorer, top_k: int, num_candidates: int) -> None:
        self.expansion, self._scorer = expansion, scorer
        self._top_k = top_k
        self._num_candidates = num_candidates
        best = Ranked(*(column[:, 0] for column in scorer(expansion.first(), 0).best(num_candidates)))
        self._tokens, self._scores, self._parents = [best.ids], [best.scores], [torch.zeros_like(best.ids)]
        self._ends = [num_candidates]

    @property
    def num_levels(self) -> int:
        """Levels recorded so far."""
        return len(self._ends)

    def step(self) -> None:
        """Expand the last level."""
        scores, before = self._scores[-1], self._ends[-1] - self._scores[-1].shape[1]
        frontier = drafting_kernels(scores).find_frontier(
            scores, self._tokens[-1], self._top_k, self._num_candidates, before, self.num_levels > 1
        )
        children = self.expansion.next(self.num_levels, frontier.rows, frontier.tokens)
        best = self._scorer(children, self.num_levels).best(self._num_candidates, frontier.scores)
        # best.ids [S, 1, C] if one row of scores serves all nodes, else [S, top_k, C]; recorded [S, top_k * C].
        self._tokens.append(best.ids.expand(-1, self._top_k, -1).flatten(1))
        self._scores.append(best.scores.flatten(1))
        self._parents.append(frontier.parents)
        self._ends.append(self._ends[-1] + self._top_k * self._num_candidates)

    def stepped(self) -> TreeGrowth:
        """Return the growth with one level more. This one stays as it is, but for memory in which both keep rows."""
        grown = copy(self)
        grown.expansion = copy(self.expansion)
        grown._tokens, grown._scores, grown._parents = list(self._tokens), list(self._scores), list(self._parents)
        grown._ends = list(self._ends)
        grown.step()
        return grown

    @property
    def candidates(self) -> Candidates:
        """Return what is recorded so far."""
        tokens, parents, scores = (torch.cat(x, 1) for x in (self._tokens, self._parents, self._scores))
        return Candidates(tokens, parents, scores, tuple(self._ends))


def grow_dynamic(expansion: Expansion, scorer: Scorer, shape: GrowthShape) -> Candidates:
    """Expand the `top_k` best nodes of each level, `num_steps` levels deep, and record `top_k` children of each."""
    growth = TreeGrowth(expansion, scorer, shape.top_k, shape.top_k)
    while growth.num_levels < shape.num_steps:
        growth.step()
    return growth.candidates


@dataclass(frozen=True)
class _Level:
    """The nodes of a level of a static tree, in order. All tensors are int64.

    Attributes:
        max_children: most children of a node above.
        rows: row of each node's parent among the expanded nodes of the level above.
        ranks: its rank among the parent's children.
        parents: candidate number of the parent.
        expanded: candidate numbers of the nodes that have children.
        expanded_rows: the rows of those nodes' parents.
    """

    max_children: int
    rows: Tensor
    ranks: Tensor
    parents: Tensor
    expanded: Tensor
    expanded_rows: Tensor


class StaticTree:
    """A fixed shape. A node is named by its path: the ranks by score of the nodes on the way to it, among their siblings.

    paths: of all nodes but the root, in any order; every prefix of a path must be among them.
    """

    def __init__(self, paths: TreeChoices, device: torch.device) -> None:
        # Paths by length, then by ranks: numbers are those of the candidates, and parents come first.
        numbers = {path: number for number, path in enumerate(sorted({(), *paths}, key=lambda path: (len(path), path)))}
        inner = {path[:-1] for path in numbers if path}
        num_steps, top_k = max(map(len, numbers)), 1 + max(path[-1] for path in numbers if path)
        self.shape = TreeConfig(len(numbers), num_steps, top_k)
        self.levels: list[_Level] = []
        above: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(1, num_steps + 1):
            nodes = [path for path in numbers if len(path) == depth]
            expanded = [path for path in nodes if path in inner]
            columns = (
                [above[path[:-1]] for path in nodes],
                [path[-1] for path in nodes],
                [numbers[path[:-1]] for path in nodes],
                [numbers[path] for path in expanded],
                [above[path[:-1]] for path in expanded],
            )
            max_children = 1 + max(path[-1] for path in nodes)
            self.levels.append(_Level(max_children, *(upload(column, device) for column in columns)))
            above = {path: row for row, path in enumerate(expanded)}

    @property
    def max_expanded(self) -> int:
        """Most expanded nodes of a level below the root, at least 1."""
        return max(1, *(len(level.expanded) for level in self.levels))


def grow_static(expansion: Expansion, scorer: Scorer, tree: StaticTree, num_steps: int) -> Candidates:
    """Return the first `num_steps` levels of `tree`: its nodes are the candidates."""
    levels, num_rows = tree.levels[:num_steps], 1
    best = scorer(expansion.first(), 0).best(levels[0].max_children)
    sessions, device = len(best.ids), best.ids.device
    tokens = torch.zeros(sessions, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(sessions, 1, device=device)
    for i, level in enumerate(levels):
        if i:
            above = levels[i - 1]
            num_rows = len(above.expanded)
            logits = expansion.next(i, above.expanded_rows.expand(sessions, -1), tokens[:, above.expanded])
            best = scorer(logits, i).best(level.max_children)
        best = Ranked(*(column.expand(-1, num_rows, -1) for column in best))
        # best [S, expanded nodes, max_children]; a node takes its rank among its parent's children.
        tokens = torch.cat([tokens, best.ids[:, level.rows, level.ranks]], 1)
        scores = torch.cat([scores, best.scores[:, level.rows, level.ranks] + scores[:, level.parents]], 1)
    parents = torch.cat([level.parents for level in levels]).expand(sessions, -1)
    return Candidates(tokens[:, 1:], parents, scores[:, 1:], tuple(accumulate(len(level.parents) for level in levels)))


def select_nodes(candidates: Candidates, budgets: Sequence[TreeBudget], target_ids: Tensor) -> Tensor:
    """Run `select_columns` within one budget per session. target_ids maps draft vocabulary ids to the target's."""
    max_drafted = max(budget.max_nodes for budget in budgets) - 1
    limits, depths = upload(np.stack(limits_of(budgets)), candidates.scores.device)
    return select_columns(candidates, limits, depths, max_drafted, target_ids)


def select_columns(candidates: Candidates, limits: Tensor, depths: Tensor, max_drafted: int, target_ids: Tensor) -> Tensor:
    """Select each session's best `limits` candidates within `depths` levels, both int64 [S].

    Ties go to the lower candidate number, hence to the shallower node. As scores never grow along a path, a selected node's
    parent is selected too. The output's size depends on nothing that a tensor holds.

    Returns:
        Float64 [5, S, N], N at most `max_drafted`, see `trees_from_columns`: whether a cell is filled, its token, the node
        number of its parent, whether that parent is selected, its score.
    """
    parents, num_cells = candidates.parents, min(max_drafted, candidates.scores.shape[1])
    level = _levels(candidates.ends, parents.device)
    # Levels beyond a session's depth cannot be chosen.
    scores = candidates.scores.masked_fill(level >= depths[:, None], float("-inf"))
    order = rank(scores, num_cells)
    dropped = (torch.arange(num_cells, device=scores.device) >= limits[:, None]) | torch.isinf(order.scores)
    # Cells beyond the limit get the number P, behind all candidates, and so sort to the end.
    chosen = torch.where(dropped, scores.shape[1], order.ids).sort(dim=1).values
    cells = chosen.clamp(max=scores.shape[1] - 1)
    kept = parents.gather(1, cells)
    # A parent's node number is its place among the chosen candidates, from 1. Example: chosen [0 2 5], parent of 5 is
    # candidate number 3, that is 2: place 1, node 2.
    places = torch.where(kept > 0, torch.searchsorted(chosen, kept - 1) + 1, 0)
    found = chosen.gather(1, (places - 1).clamp(0, num_cells - 1)) + 1
    closed = (kept == 0) | (found == kept) | (chosen == scores.shape[1])
    columns = (chosen < scores.shape[1], target_ids[candidates.tokens.gather(1, cells)], places, closed)
    return torch.stack([column.double() for column in (*columns, scores.gather(1, cells))])


def _levels(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the level of each candidate, from 0, int64 [P]."""
    sizes = [end - start for start, end in pairwise(ends)]
    if len(set(sizes)) == 1:  # dynamic trees, whose levels are equal but for the first
        return (torch.arange(ends[-1], device=device) + (sizes[0] - ends[0])) // sizes[0]
    spans = enumerate(pairwise((0, *ends)))
    return torch.cat([torch.full((end - start,), i, dtype=torch.int64, device=device) for i, (start, end) in spans])


def trees_from_columns(columns: Reals, roots: Sequence[int]) -> DraftTrees:
    """Return the trees of the output of `select_columns`, copied to the host."""
    is_filled, tokens, parents, is_closed, scores = columns
    assert is_closed.all(), "a node was selected without its parent"
    return DraftTrees.below(roots, tokens, parents, scores, is_filled.sum(axis=1).astype(np.int64))


def draw_chains(expansion: Expansion, scorer: Scorer, num_steps: int, proposal_top_k: int, target_ids: Tensor) -> Tensor:
    """Draw one chain of L levels per session, for verification by rejection sampling.

    Probabilities of a level are cut to the likeliest C tokens; C is `proposal_top_k` or the draft vocabulary's size. A token
    is drawn by an exponential race over (seed, position, token id), with a seed that the target never uses.

    Args:
        scorer: of `chain_scorer`.
        target_ids: maps draft vocabulary ids to the target's.

    Returns:
        Float64 [S, L, 2 C + 1]: at each level C token ids, their C probabilities, and the place of the drawn one.
    """
    scores, count = scorer(expansion.first(), 0), min(proposal_top_k, len(target_ids))
    sessions, device = len(scores.logits), target_ids.device
    # Of C tokens, their C probabilities, and the place of the drawn one among them.
    drawn = torch.empty(sessions, num_steps, 2 * count + 1, dtype=torch.float64, device=device)
    root = torch.zeros(sessions, 1, dtype=torch.int64, device=device)
    for level in range(1, num_steps):
        tokens = scores.draw(target_ids, drawn)
        scores = scorer(expansion.next(level, root, tokens), level)
    scores.draw(target_ids, drawn)
    return drawn


def chain_trees(
    drawn: Sequence[Sequence[Sequence[float]]], contexts: Sequence[DraftContext], num_draft_tokens: int
) -> list[DraftTree]:
    """Return the output of `draw_chains` on the host as trees, cut to the contexts' budgets and to
    `num_draft_tokens` nodes.
    """
    lengths = [min(c.budget.max_depth, min(c.budget.max_nodes, num_draft_tokens) - 1) for c in contexts]
    return [_chain(c.tokens[-1], rows[:length]) for c, rows, length in zip(contexts, drawn, lengths, strict=True)]


def _chain(root: int, rows: Sequence[Sequence[float]]) -> DraftTree:
    """Return the chain down to the first level without probabilities, where the logits were no numbers."""
    size = len(rows[0]) // 2 if rows else 0
    rows = list(takewhile(lambda row: row[size + int(row[-1])] > 0, rows))
    if not rows:
        return DraftTree.root_only(root)
    levels = [_draft_probs(row[:size], row[size:-1]) for row in rows]
    tokens = [int(row[int(row[-1])]) for row in rows]
    probs = [row[size + int(row[-1])] / math.fsum(level.probs) for row, level in zip(rows, levels, strict=True)]
    log_probs = accumulate((math.log(prob) for prob in probs), initial=0.0)
    return DraftTree.chain([root, *tokens], list(log_probs), SampledProposal(dict(enumerate(levels))))


def _draft_probs(ids: Sequence[float], probs: Sequence[float]) -> DraftProbs:
    possible = [(int(token), prob) for token, prob in zip(ids, probs, strict=True) if prob > 0]
    return DraftProbs(tuple(token for token, _ in possible), tuple(prob for _, prob in possible))
