"""A tree that grows from round to round, as far as its nodes were run through the network.

Expanded nodes are numbered from the root, 0; parents come before their children. A candidate is a child of an expanded node;
some candidates are expanded themselves. The keys and values of expanded nodes stay in slots of the KV cache, so a pass runs
only nodes that are new, or outdated. Legend: E expanded nodes, C candidates of each, R rows of a pass, H hidden.

    expanded    root 0 -- a 1 -- b 2         candidates of 0: a d e,  of 1: b f g,  of 2: h i j
    rows        the best of d e f g h i j; a once the root's state is new, then b
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints, Reals
from eyas.cache.prefix_cache import SlotAllocator
from eyas.device.transfer import upload
from eyas.drafters.trees.rows import GrownRows
from eyas.kernels.choice import tree_kernels
from eyas.kernels.plain.trees import best_places
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree

# A node that was run behind an older state of its parent is worth this share of a new one: most of what it says still holds.
REPAIR_SHARE = 0.1


class GrownTree:
    """A tree as far as its nodes were run through the network.

    States of nodes are predicted. When the root gets the state behind true features, all others are outdated: each becomes
    exact, as in a fresh tree, when it is run again behind an exact parent.

    tokens, parents, depths: of the expanded nodes, target token ids [E]. states [E, H]. slots: of their keys and values, but
    for the root's [E - 1]. is_exact [E]. candidates: token ids [E, C]. scores: their log-probabilities given their parents
    [E, C].

    Args:
        token: of the root. state [H].
        candidates, scores [C]: of the root.
        free: where slots come from, for all trees.
    """

    def __init__(self, token: int, state: Tensor, candidates: Ints, scores: Reals, free: SlotAllocator) -> None:
        self.tokens, self.parents, self.depths = np.array([token]), np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.states, self.slots, self.is_exact = state[None], np.zeros(0, np.int64), np.ones(1, np.bool_)
        self.candidates, self.scores = candidates[None], scores[None]
        self.pool = free
        self._rank()

    def _rank(self) -> None:
        """Find where the expanded nodes stand among the candidates, and their cumulative scores."""
        self.cumulative, self.expanded = np.empty(len(self.tokens)), np.empty(self.scores.size, np.int64)
        places = self.tokens, self.parents, self.candidates, self.scores
        tree_kernels().rank_nodes(*places, self.cumulative, self.expanded)

    def best(self, root: int, count: int, max_depth: int) -> Ints:
        """Return the best candidates below an expanded node, as parent * C + place; parents come before their children."""
        inside = self._within(root) & (self.depths - self.depths[root] < max_depth)
        scores = np.where(inside[:, None], self.cumulative[:, None] + self.scores, -np.inf).ravel()
        chosen = best_places(scores, count)
        return chosen[np.argsort(self.depths[chosen // self.scores.shape[1]], kind="stable")]

    def _within(self, root: int) -> Bools:
        """Return which expanded nodes are `root`, or stand below it [E]."""
        inside = np.full(len(self.tokens), not root)
        if not root:
            return inside
        inside[root] = True
        for depth in range(int(self.depths[root]) + 1, int(self.depths.max()) + 1):
            level = np.flatnonzero(self.depths == depth)
            inside[level] = inside[self.parents[level]]
        return inside

    def _parents_among(self, chosen: Ints, root: int) -> tuple[Ints, Ints]:
        """Return, for candidates from `best`, the nodes above, and the numbers of these in the tree of root
        and candidates.
        """
        above, numbers = chosen // self.scores.shape[1], np.zeros(len(self.tokens), np.int64)
        numbers[self.expanded[chosen]] = np.arange(1, len(chosen) + 1)
        numbers[root] = 0
        return above, numbers[above]

    def find(self, path: Sequence[int]) -> int | None:
        """Return the expanded node at the end of a path of tokens below the root."""
        node, width = 0, self.candidates.shape[1]
        for token in path:
            places = np.flatnonzero(self.candidates[node] == token)
            node = int(self.expanded[node * width + places[0]]) if len(places) else 0
            if not node:
                return None
        return node

    def below(self, path: Sequence[int], budget: TreeBudget, grown_ahead: bool = True) -> DraftTree | None:
        """Return the tree below the end of a path of tokens, within `budget`; None if that is not expanded."""
        root = self.find(path)
        chosen = np.zeros(0, np.int64) if root is None else self.best(root, budget.max_nodes - 1, budget.max_depth)
        if not len(chosen):
            return None
        assert root is not None
        above, parents = self._parents_among(chosen, root)
        scores = self.cumulative[above] + self.scores.ravel()[chosen] - self.cumulative[root]
        tokens = np.append(self.tokens[root], self.candidates.ravel()[chosen])
        rounded = np.append(0.0, np.minimum(scores, 0.0)).astype(np.float32)
        return DraftTree.of(tokens, np.append(0, parents), rounded, grown_ahead)

    def move_root(self, root: int) -> None:
        """Keep only what stands below an expanded node, which becomes the root."""
        depth = self.depths[root]
        self._keep(self._within(root))
        self.depths = self.depths - depth
        self.is_exact[:] = False
        self._rank()

    def set_root(self, state: Tensor, candidates: Ints, scores: Reals) -> None:
        """Replace the predicted state of the root by the true one, unless it has that already."""
        if self.is_exact[0]:
            return
        self.states = torch.cat([state[None], self.states[1:]])
        self.candidates[0], self.scores[0] = candidates, scores
        self.is_exact[:] = False
        self.is_exact[0] = True
        self._rank()
        self._keep(self.cumulative > -np.inf)

    def release(self) -> None:
        """Give the slots back: the tree is no longer used."""
        self.pool.free(self.slots)

    def give_up(self, rows: GrownRows) -> None:
        """Give back what rows took whose results are not wanted."""
        self.pool.free(rows.slots[rows.nodes >= len(self.tokens)])

    def useful(self, count: int, max_depth: int, max_nodes: int) -> tuple[Ints, Reals]:
        """Return the most useful candidates of a pass, as parent * C + place, `count` at most; and the logarithms of their
        worth.

        New nodes stand above `max_depth` levels. A tree of max_nodes takes better ones in place of its worst.
        """
        least = self.cumulative.min() if len(self.tokens) >= max_nodes else -np.inf
        places, worths = np.empty(count, np.int64), np.empty(count)
        own = self.expanded, self.scores, self.cumulative, self.depths, self.is_exact
        num = tree_kernels().best_rows(*own, max_depth, least, math.log(REPAIR_SHARE), places, worths)
        return places[:num], worths[:num]

    def take_rows(self, chosen: Ints) -> GrownRows | None:
        """Return the rows of some of the candidates that are `useful`. New nodes take slots, as long as there are some."""
        width, exact = self.candidates.shape[1], self.is_exact
        nodes = self.expanded[chosen]
        kept = (nodes > 0) | (np.cumsum(nodes == 0) <= self.pool.num_free)
        chosen, nodes = chosen[kept], nodes[kept]
        if not len(chosen):
            return None
        parents, is_added = chosen // width, nodes == 0
        num_added = int(is_added.sum())
        nodes[is_added] = len(self.tokens) + np.arange(num_added)
        features = self.states[upload(parents, self.states.device)]  # before slots are taken: it may find no memory
        slots = np.empty(len(nodes), np.int64)
        slots[is_added], slots[~is_added] = self.pool.take(num_added), self.slots[nodes[~is_added] - 1]
        seen = np.zeros((len(nodes), len(self.tokens)), np.bool_)
        tree_kernels().mark_above(parents, self.parents, seen)
        others = np.flatnonzero(seen[:, 1:].any(0)) + 1
        visible = np.concatenate([seen[:, others], np.eye(len(nodes), dtype=np.bool_)], 1)
        return GrownRows(
            self.candidates.ravel()[chosen], self.depths[parents] + 1, features, slots, nodes, parents, exact[parents],
            self.slots[others - 1], visible,
        )  # fmt: skip

    def apply(self, rows: GrownRows, states: Tensor, candidates: Ints, scores: Reals, max_nodes: int) -> None:
        """Take the results of a pass over `take_rows`: states [R, H], candidates and scores [R, C]; keep the best nodes."""
        added = rows.nodes >= len(self.tokens)
        again = rows.nodes[~added]
        self.tokens = np.concatenate([self.tokens, rows.tokens[added]])
        self.parents = np.concatenate([self.parents, rows.parents[added]])
        self.depths = np.concatenate([self.depths, rows.depths[added]])
        self.slots = np.concatenate([self.slots, rows.slots[added]])
        self.is_exact = np.concatenate([self.is_exact, rows.is_exact[added]])
        self.candidates = np.concatenate([self.candidates, candidates[added]])
        self.scores = np.concatenate([self.scores, scores[added]])
        self.candidates[again], self.scores[again], self.is_exact[again] = candidates[~added], scores[~added], True
        order, own = np.arange(len(self.tokens)), len(self.states) + np.arange(len(added))
        order[again], order[len(self.states) :] = own[~added], own[added]
        self.states = torch.cat([self.states, states])
        self._rank()
        kept = np.zeros(len(order), np.bool_)
        kept[best_places(self.cumulative, max_nodes)] = True
        self._keep(kept, order)

    def _keep(self, kept: Bools, order: Ints | None = None) -> None:
        """Keep some nodes, [E]: with each the nodes above it, but for those above a new root.

        order: where their states are now, [E]; in the order of the nodes, if it is None.
        """
        if order is not None:
            self.states = self.states[upload(order[kept], self.states.device)]
        if kept.all():
            return
        nodes, numbers = np.flatnonzero(kept), np.zeros(len(self.tokens), np.int64)
        numbers[nodes] = np.arange(len(nodes))
        self.pool.free(self.slots[~kept[1:]] if kept[0] else np.append(self.slots[~kept[1:]], self.slots[nodes[0] - 1]))
        self.slots = self.slots[nodes[1:] - 1]
        self.tokens, self.parents, self.depths = self.tokens[nodes], numbers[self.parents[nodes]], self.depths[nodes]
        self.parents[0] = 0
        if order is None:
            self.states = self.states[upload(nodes, self.states.device)]
        self.is_exact, self.candidates, self.scores = self.is_exact[nodes], self.candidates[nodes], self.scores[nodes]
        self._rank()
