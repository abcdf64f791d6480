"""What draft nodes have been worth: trees and accepted paths in, expected tokens and rows of smaller trees out.

A node's rank is its place in its tree by score, the root's 0: a drafter with a smaller budget leaves out the last ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eyas.tree import DraftTree

# What a tree still weighs after the next one that was asked for as large, and how many make a mean.
FORGETTING = 0.98
FEWEST_TREES = 8

Floats = npt.NDArray[np.float64]


class Gains:
    """Counts by rank, exponentially forgotten: how often a node was asked for, came, and was accepted."""

    def __init__(self, most_nodes: int) -> None:
        self._asked: Floats = np.zeros(most_nodes)
        self._came: Floats = np.zeros(most_nodes)
        self._accepted: Floats = np.zeros(most_nodes)

    def add(self, num_asked: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Count a tree that was asked for with `num_asked` nodes, and the nodes of it that were accepted, the root first."""
        for counts in (self._asked, self._came, self._accepted):
            counts[:num_asked] *= FORGETTING
        self._asked[:num_asked] += 1
        self._came[: len(tree)] += 1
        if len(path) > 1:
            ranks = np.argsort(np.argsort(-np.array(tree.log_probs), kind="stable"))
            self._accepted[ranks[list(path)]] += 1

    def known(self, most: int) -> int:
        """The largest size, up to `most`, of which enough trees have been asked for; 1 if there is none."""
        return max(int(np.count_nonzero(self._asked[:most] >= FEWEST_TREES)), 1)

    def tokens(self, nodes: int) -> Floats:
        """Expected tokens of a verify step, bonus included, with trees of 1 up to `nodes` nodes; all must be known."""
        return 1 + np.cumsum(np.append(0.0, self._accepted[1:nodes] / self._asked[1:nodes]))

    def rows(self, nodes: int) -> Floats:
        """Expected nodes of trees for which 1 up to `nodes` were asked: a drafter may have less to say."""
        return 1 + np.cumsum(np.append(0.0, self._came[1:nodes] / self._asked[1:nodes]))
