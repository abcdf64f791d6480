"""The tree of one session that grows from round to round while the target verifies, see `eyas.drafters.draft_ahead`.

Expanded nodes are numbered from the root, 0; parents come before their children. A candidate is a child of an expanded node;
some candidates are expanded themselves. Legend: E expanded nodes, C candidates of each, R rows of a pass, H hidden.

    expanded    root 0 -- a 1 -- b 2         candidates of 0: a d e,  of 1: b f g,  of 2: h i j
    rows        a (behind the state of root), b (behind that of a), and the best of d e f g h i j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.draft_protocol import TreeBudget
from eyas.drafters.tree_growth import Reals
from eyas.tensors import Bools, Ints, upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class GrownRows:
    """Rows of a tree of one session: target token ids [R], depths from 1 [R], the states before them [R, H].

    visible: which rows see each other [R, R].
    """

    tokens: Ints
    depths: Ints
    features: Tensor
    visible: Bools

    def padded(self, count: int) -> GrownRows:
        """The same with `count` rows. A row of padding sees itself."""
        tokens, depths, visible = np.zeros(count, np.int64), np.ones(count, np.int64), np.eye(count, dtype=np.bool_)
        own = slice(len(self.tokens))
        tokens[own], depths[own], visible[own, own] = self.tokens, self.depths, self.visible
        return GrownRows(tokens, depths, F.pad(self.features, (0, 0, 0, count - len(self.tokens))), visible)


class GrownTree:
    """A tree as far as its nodes were run through the network.

    States of nodes are predicted, and all but the root's become better with every pass: it runs them again behind the latest
    states of their parents (Jacobi iteration).

    tokens, parents, depths: of the expanded nodes, target token ids [E]. states [E, H]. candidates: token ids [E, C].
    scores: their log-probabilities given their parents [E, C].
    """

    def __init__(self, token: int, state: Tensor, candidates: Ints, scores: Reals) -> None:
        """token: of the root. state [H]; candidates, scores [C]: of the root."""
        self.tokens, self.parents, self.depths = np.array([token]), np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.states = state[None]
        self.candidates, self.scores = candidates[None], scores[None]
        self._rank()

    def _rank(self) -> None:
        """Find where the expanded nodes stand among the candidates, and their cumulative scores."""
        above = self.candidates[self.parents] == self.tokens[:, None]
        above[0] = False
        places = above.argmax(1)
        is_known = above[np.arange(len(places)), places]
        own = np.where(is_known, self.scores[self.parents, places], -np.inf)
        own[0] = 0.0
        self.cumulative = own.copy()
        for depth in range(1, int(self.depths[-1]) + 1):
            level = self.depths == depth
            self.cumulative[level] += self.cumulative[self.parents[level]]
        width = self.candidates.shape[1]
        self.expanded = np.zeros(self.candidates.size, np.int64)  # by candidate: its number if it is expanded, else 0
        known = np.flatnonzero(is_known)
        self.expanded[self.parents[known] * width + places[known]] = known

    def best(self, root: int, count: int, max_depth: int) -> Ints:
        """The best candidates below an expanded node, as parent * C + place; parents come before their children."""
        inside = self._within(root) & (self.depths - self.depths[root] < max_depth)
        scores = np.where(inside[:, None], self.cumulative[:, None] + self.scores, -np.inf).ravel()
        chosen = np.argsort(-scores, kind="stable")[:count]
        chosen = chosen[np.isfinite(scores[chosen])]
        return chosen[np.argsort(self.depths[chosen // self.scores.shape[1]], kind="stable")]

    def _within(self, root: int) -> Bools:
        """Which expanded nodes are `root`, or stand below it [E]."""
        inside = np.zeros(len(self.tokens), np.bool_)
        inside[root] = True
        for node in range(root + 1, len(inside)):
            inside[node] = inside[self.parents[node]]
        return inside

    def _parents_among(self, chosen: Ints, root: int) -> tuple[Ints, Ints]:
        """Of candidates from `best` the nodes above, and the numbers of these in the tree of root and candidates."""
        above, numbers = chosen // self.scores.shape[1], np.zeros(len(self.tokens), np.int64)
        numbers[self.expanded[chosen]] = np.arange(1, len(chosen) + 1)
        numbers[root] = 0
        return above, numbers[above]

    def find(self, path: Sequence[int]) -> int | None:
        """The expanded node at the end of a path of tokens below the root."""
        node, width = 0, self.candidates.shape[1]
        for token in path:
            places = np.flatnonzero(self.candidates[node] == token)
            node = int(self.expanded[node * width + places[0]]) if len(places) else 0
            if not node:
                return None
        return node

    def below(self, path: Sequence[int], budget: TreeBudget) -> DraftTree | None:
        """The tree below the end of a path of tokens, within `budget`; None if that is not expanded."""
        root = self.find(path)
        chosen = np.zeros(0, np.int64) if root is None else self.best(root, budget.max_nodes - 1, budget.max_depth)
        if not len(chosen):
            return None
        assert root is not None
        above, parents = self._parents_among(chosen, root)
        scores = self.cumulative[above] + self.scores.ravel()[chosen] - self.cumulative[root]
        return DraftTree(
            (int(self.tokens[root]), *self.candidates.ravel()[chosen].tolist()),
            (0, *parents.tolist()),
            (0.0, *np.minimum(scores, 0.0).tolist()),
            grown_ahead=True,
        )

    def move_root(self, root: int) -> None:
        """Keep only what stands below an expanded node, which becomes the root."""
        nodes, numbers = np.flatnonzero(self._within(root)), np.zeros(len(self.tokens), np.int64)
        numbers[nodes] = np.arange(len(nodes))
        self.tokens, self.parents = self.tokens[nodes], numbers[self.parents[nodes]]
        self.parents[0] = 0
        self.depths = self.depths[nodes] - self.depths[root]
        self.states, self.candidates, self.scores = self.states[nodes], self.candidates[nodes], self.scores[nodes]
        self._rank()

    def set_root(self, state: Tensor, candidates: Ints, scores: Reals) -> None:
        """Replace the predicted state of the root by the true one."""
        self.states = torch.cat([state[None], self.states[1:]])
        self.candidates[0], self.scores[0] = candidates, scores
        self._rank()

    def next_rows(self, count: int, max_depth: int) -> tuple[GrownRows, Ints]:
        """The `count` best candidates above `max_depth` levels, as rows of a pass, with the numbers of their parents then.

        The nodes that are expanded so far and are not among them will be given up.
        """
        chosen = self.best(0, count, max_depth - 1)
        above, parents = self._parents_among(chosen, 0)
        visible = np.eye(len(chosen), dtype=np.bool_)
        for row, parent in enumerate(parents):
            if parent:
                visible[row] |= visible[parent - 1]
        features = self.states[upload(above, self.states.device)]
        return GrownRows(self.candidates.ravel()[chosen], self.depths[above] + 1, features, visible), parents

    def apply(self, rows: GrownRows, parents: Ints, states: Tensor, candidates: Ints, scores: Reals) -> None:
        """Take the results of a pass over `next_rows`: states [R, H], candidates and scores [R, C]."""
        self.tokens = np.concatenate([self.tokens[:1], rows.tokens])
        self.parents = np.concatenate([self.parents[:1], parents])
        self.depths = np.concatenate([self.depths[:1], rows.depths])
        self.states = torch.cat([self.states[:1], states])
        self.candidates = np.concatenate([self.candidates[:1], candidates])
        self.scores = np.concatenate([self.scores[:1], scores])
        self._rank()
