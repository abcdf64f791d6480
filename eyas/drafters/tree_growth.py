"""Nodes of many sessions as arrays, without a device: which are best, and trees of those. Knows not what scored them.

Legend: K nodes, S sessions, N nodes chosen.

Grows dynamic draft trees (EAGLE-2, Li et al. 2024, section 4) for many sessions at once. Knows no sessions' state.

Legend: S sessions, W width, R rows per session, H hidden, D draft vocabulary, P candidates, N nodes.
Candidates are numbered level by level from 1; 0 is the root. Scores are cumulative float32 log-probabilities.

Grows trees of a fixed shape (EAGLE, Li et al. 2024; Medusa, Cai et al. 2024) for many sessions at once.

Legend: S sessions, P candidates. A node is named by its path: of each node on the way to it, the rank by score among its
siblings. Nodes are numbered level by level from 1; 0 is the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.config import TreeConfig, TreePaths
from eyas.draft_protocol import TreeBudget
from eyas.sampling.sampler import Ranked, rank
from eyas.tensors import upload
from eyas.tree import DraftTree

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Forest:
    """Guesses of many sessions [K], of one session parents before children.

    parents: places in here, below 0 for the session's root. scores: cumulative.
    """

    sessions: Ints
    parents: Ints
    tokens: Ints
    scores: Reals

    def trees(self, chosen: npt.NDArray[np.bool_], roots: Sequence[int]) -> list[DraftTree]:
        """For each of the S sessions the tree of its chosen [K] nodes below its root, in their order here."""
        places = np.flatnonzero(chosen)
        places = places[np.argsort(self.sessions[places], kind="stable")]
        sessions = self.sessions[places]
        ends = np.searchsorted(sessions, np.arange(len(roots) + 1))
        numbers = np.zeros(len(chosen) + 1, np.int64)
        numbers[places] = np.arange(len(places)) - ends[sessions] + 1
        above = np.maximum(self.parents[places], -1)
        assert ((above < 0) | (numbers[above] > 0)).all(), "a node was chosen without its parent"
        tokens, parents, scores = self.tokens[places].tolist(), numbers[above].tolist(), self.scores[places].tolist()
        return [
            DraftTree((root, *tokens[start:end]), (0, *parents[start:end]), (0.0, *scores[start:end]))
            for root, start, end in zip(roots, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]


def best(groups: Ints, limits: Ints, *keys: npt.NDArray[np.generic]) -> Ints:
    """Places of the limits[g] first nodes of each group g when ordered by the keys, the last of which counts most; ties go
    to the earlier place."""
    order = np.lexsort((*keys, groups))
    grouped = groups[order]
    found: Ints = order[np.arange(len(order)) - np.searchsorted(grouped, grouped) < limits[grouped]]
    return found


class Expansion(Protocol):
    """A draft model in the middle of growing trees."""

    def first(self) -> Tensor:
        """Scores float32 [S, 1, D] of the root's children."""
        ...

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        """Run the frontier of `level` (from 1) and score its children, float32 [S, W, D]; or [S, 1, D], if they are the same
        below all of it.

        parents [S, W]: row of each node's parent within the frontier before it; tokens [S, W]: draft vocabulary ids.
        """
        ...


@dataclass(frozen=True)
class Candidates:
    """Every child of every expanded node. tokens: draft vocabulary ids; parents: candidate numbers; all [S, P].

    ends[i] is the number of candidates up to and including level i + 1.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    ends: tuple[int, ...]


class Growth:
    """Trees that grow level by level: the `width` best nodes of a level are expanded, `children` of each are recorded."""

    def __init__(self, expansion: Expansion, width: int, children: int) -> None:
        self._expansion = expansion
        self._width = width
        self._children = children
        best = rank(expansion.first()[:, 0], children)
        self._tokens, self._scores, self._parents = [best.ids], [best.scores], [torch.zeros_like(best.ids)]
        self._rows, self._ends = torch.zeros_like(best.ids)[:, :width], [children]

    @property
    def levels(self) -> int:
        """Levels recorded so far."""
        return len(self._ends)

    def step(self) -> None:
        """Expand the last level."""
        frontier = rank(self._scores[-1], self._width)
        last = self._ends[-1] - self._scores[-1].shape[1]
        if self.levels > 1:
            self._rows = frontier.ids // self._children
        chosen = self._tokens[-1].gather(1, frontier.ids)
        ranked = rank(self._expansion.next(self.levels, self._rows, chosen), self._children)
        best = Ranked(*(column.expand(-1, self._width, -1) for column in ranked))
        self._tokens.append(best.ids.flatten(1))
        self._scores.append((best.scores + frontier.scores[:, :, None]).flatten(1))
        self._parents.append((last + 1 + frontier.ids).repeat_interleave(self._children, dim=1))
        self._ends.append(self._ends[-1] + self._width * self._children)

    @property
    def candidates(self) -> Candidates:
        """What is recorded so far."""
        tokens, parents, scores = (torch.cat(x, 1) for x in (self._tokens, self._parents, self._scores))
        return Candidates(tokens, parents, scores, tuple(self._ends))


def grow(expansion: Expansion, shape: TreeConfig) -> Candidates:
    """Expand the `width` best nodes of each level, `depth` levels deep; all width**2 children of a level are recorded."""
    growth = Growth(expansion, shape.top_k, shape.top_k)
    for _ in range(1, shape.num_steps):
        growth.step()
    return growth.candidates


def select(
    candidates: Candidates, roots: Sequence[int], budgets: Sequence[TreeBudget], target_ids: Tensor
) -> list[DraftTree]:
    """Re-rank globally: of each session's candidates the best `max_nodes - 1` within `max_depth` become its tree.

    Ties go to the lower candidate number, hence to the shallower: with scores that never grow along a path, a chosen
    node's parent is chosen too. target_ids maps draft vocabulary ids to the target's. One copy to the host.
    """
    return trees(chosen(candidates, budgets, target_ids).tolist(), roots)


def chosen(candidates: Candidates, budgets: Sequence[TreeBudget], target_ids: Tensor) -> Tensor:
    """`select` as far as it goes without the host: the columns of `trees`."""
    most = max(budget.max_nodes for budget in budgets) - 1
    limits, depths = upload(np.array([(b.max_nodes - 1, b.max_depth) for b in budgets]).T, candidates.scores.device)
    return choose(candidates, limits, depths, most, target_ids)


def choose(candidates: Candidates, limits: Tensor, depths: Tensor, most: int, target_ids: Tensor) -> Tensor:
    """The columns of `trees`, float64 [5, S, up to `most`]: for each session the best `limits` within `depths`, both [S].

    Its sizes depend on nothing that a tensor holds.
    """
    parents, most = candidates.parents, min(most, candidates.scores.shape[1])
    spans = pairwise((0, *candidates.ends))
    level = torch.cat([parents.new_full((end - start,), i) for i, (start, end) in enumerate(spans)])
    scores = candidates.scores.masked_fill(level >= depths[:, None], float("-inf"))
    order = rank(scores, most)
    dropped = (torch.arange(most, device=scores.device) >= limits[:, None]) | torch.isinf(order.scores)
    chosen = torch.where(dropped, scores.shape[1], order.ids).sort(dim=1).values
    cells = chosen.clamp(max=scores.shape[1] - 1)
    kept = parents.gather(1, cells)
    places = torch.where(kept > 0, torch.searchsorted(chosen, kept - 1) + 1, 0)
    found = chosen.gather(1, (places - 1).clamp(0, most - 1)) + 1
    closed = (kept == 0) | (found == kept) | (chosen == scores.shape[1])
    columns = (chosen < scores.shape[1], target_ids[candidates.tokens.gather(1, cells)], places, closed)
    return torch.stack([column.double() for column in (*columns, scores.gather(1, cells))])


def trees(columns: Sequence[Sequence[list[float]]], roots: Sequence[int]) -> list[DraftTree]:
    """Of the columns that `choose` makes: whether a cell is real, token, parent, whether that is there, score."""
    return [_tree(roots[row], *(column[row] for column in columns)) for row in range(len(roots))]


def _tree(
    root: int, real: list[float], tokens: list[float], parents: list[float], closed: list[float], scores: list[float]
) -> DraftTree:
    assert all(closed), "a node was chosen without its parent"
    count = int(sum(real))
    return DraftTree(
        tokens=(root, *(int(token) for token in tokens[:count])),
        parents=(0, *(int(parent) for parent in parents[:count])),
        log_probs=(0.0, *scores[:count]),
    )


@dataclass(frozen=True)
class _Level:
    """The nodes of a level, in order: row of the parent among the expanded nodes above, rank, number of the parent.

    expanded: numbers of those that have children themselves; expanded_rows: of these, the rows of their parents.
    """

    rows: list[int]
    ranks: list[int]
    parents: list[int]
    expanded: list[int]
    expanded_rows: list[int]

    def on(self, device: torch.device) -> _Places:
        """The same on a device."""
        columns = (self.rows, self.ranks, self.parents, self.expanded, self.expanded_rows)
        return _Places(*(upload(column, device) for column in columns))


@dataclass(frozen=True)
class _Places:
    """A _Level's columns as tensors."""

    rows: Tensor
    ranks: Tensor
    parents: Tensor
    expanded: Tensor
    expanded_rows: Tensor


class StaticTree:
    """A shape, ready to be grown. paths: of all nodes but the root, each with the one to its parent among them."""

    def __init__(self, paths: TreePaths) -> None:
        numbers = {path: number for number, path in enumerate(sorted({(), *paths}, key=lambda path: (len(path), path)))}
        inner = {path[:-1] for path in numbers if path}
        self.num_nodes = len(numbers)
        self.depth = max(map(len, numbers))
        self.width = 1 + max(path[-1] for path in numbers if path)
        self.levels: list[_Level] = []
        self._places: dict[torch.device, list[_Places]] = {}
        above: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(1, self.depth + 1):
            nodes = [path for path in numbers if len(path) == depth]
            expanded = [path for path in nodes if path in inner]
            self.levels.append(
                _Level(
                    rows=[above[path[:-1]] for path in nodes],
                    ranks=[path[-1] for path in nodes],
                    parents=[numbers[path[:-1]] for path in nodes],
                    expanded=[numbers[path] for path in expanded],
                    expanded_rows=[above[path[:-1]] for path in expanded],
                )
            )
            above = {path: row for row, path in enumerate(expanded)}

    def places(self, device: torch.device) -> list[_Places]:
        """All levels on a device, copied there once."""
        if device not in self._places:
            self._places[device] = [level.on(device) for level in self.levels]
        return self._places[device]

    @property
    def most_expanded(self) -> int:
        """Most nodes with children of a level below the root, at least 1."""
        return max(1, *(len(level.expanded) for level in self.levels))


def grow_static(expansion: Expansion, tree: StaticTree, depth: int) -> Candidates:
    """The first `depth` levels of `tree`, filled with the children that its paths name: all of them are candidates."""
    scored = expansion.first()
    sessions, device = len(scored), scored.device
    tokens = torch.zeros(sessions, 1, dtype=torch.int64, device=device)
    scores, places = torch.zeros(sessions, 1, device=device), tree.places(device)[:depth]
    for above, (level, at) in enumerate(zip(tree.levels, places, strict=False)):
        if above:
            frontier = places[above - 1]
            rows = frontier.expanded_rows.expand(sessions, -1)
            scored = expansion.next(above, rows, tokens[:, frontier.expanded])
        ranked, width = rank(scored, max(level.ranks) + 1), max(level.rows) + 1
        best = Ranked(*(column.expand(-1, width, -1) for column in ranked))
        tokens = torch.cat([tokens, best.ids[:, at.rows, at.ranks]], 1)
        scores = torch.cat([scores, best.scores[:, at.rows, at.ranks] + scores[:, at.parents]], 1)
    numbers = torch.cat([at.parents for at in places]).expand(sessions, -1)
    ends = tuple(accumulate(len(level.parents) for level in tree.levels[:depth]))
    return Candidates(tokens[:, 1:], numbers, scores[:, 1:], ends)
