"""Grows trees of a fixed shape (EAGLE, Li et al. 2024; Medusa, Cai et al. 2024) for many sessions at once.

Legend: S sessions, P candidates. A node is named by its path: of each node on the way to it, the rank by score among its
siblings. Nodes are numbered level by level from 1; 0 is the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from eyas.config import TreePaths
from eyas.drafters.expand import Candidates, Expansion
from eyas.models.sampling.law import Ranked, rank
from eyas.models.tensors import upload


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
