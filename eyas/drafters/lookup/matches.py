"""Continuations of many sessions in, merged into one trie of nodes per session. Knows not where they were found.

All nodes of all sessions are arrays: there is no loop over nodes. Legend: M matches, D depth, K nodes, F families.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Matches:
    """What followed a context elsewhere.

    sessions [M]: of one session the best match first. tokens [M, D], ids from 0. lengths [M]: how many tokens of a row
    count, at most D. weights [M]: of one match in the choice between the children of a node.
    """

    sessions: Ints
    tokens: Ints
    lengths: Ints
    weights: Floats


@dataclass(frozen=True)
class Trie:
    """Nodes of all sessions [K], level by level, in a level by session and by the tokens of their paths: siblings, which are
    a family, stand together.

    depths: levels above a node's own, 0 below the root; parents: nodes of this trie, below 0 for the root; tokens: token
    ids; weights: of all matches through a node; matches: the best one of them; families: of each node its family [K];
    starts: the first node of each family [F].
    """

    sessions: Ints
    depths: Ints
    parents: Ints
    tokens: Ints
    weights: Floats
    matches: Ints
    families: Ints
    starts: Ints

    def total(self, values: Floats) -> Floats:
        """Sum of values [K] over each node's family [K]."""
        return _sums(self.families, values)[self.families]

    def log_shares(self) -> Floats:
        """Log of each node's share in the weight of its family."""
        shares: Floats = np.log(self.weights) - np.log(self.total(self.weights))
        return shares

    def along_paths(self, steps: Floats) -> Floats:
        """Sums of steps [K] from the root to each node."""
        sums = steps.copy()
        bounds = np.flatnonzero(np.diff(self.depths, prepend=-1, append=-1))
        for start, end in pairwise(bounds[1:]):
            sums[start:end] += sums[self.parents[start:end]]
        return sums


def merge(matches: Matches) -> Trie:
    """Give matches that begin alike one node for what they share."""
    count, depth = matches.tokens.shape
    counted_MD = np.arange(depth) < matches.lengths[:, None]
    tokens_MD = np.where(counted_MD, matches.tokens, -1)
    order = np.lexsort((*tokens_MD.T[::-1], matches.sessions))
    sessions, tokens_MD = matches.sessions[order], tokens_MD[order]
    differs_MD = np.ones((count, depth), np.bool_)
    differs_MD[1:] = tokens_MD[1:] != tokens_MD[:-1]
    differs_MD[1:, 0] |= sessions[1:] != sessions[:-1]
    new_DM = (np.logical_or.accumulate(differs_MD, axis=1) & counted_MD[order]).T
    numbers_DM = np.cumsum(new_DM).reshape(depth, count) - 1
    depths, rows = np.nonzero(new_DM)
    parents = np.where(depths > 0, numbers_DM[depths - 1, rows], -1 - sessions[rows])
    first = np.diff(parents, prepend=parents[:1] - 1) != 0
    levels, through = np.nonzero(counted_MD.T)
    nodes = numbers_DM[levels, np.argsort(order)[through]]
    best = np.empty(len(rows), np.int64)
    best[nodes[::-1]] = through[::-1]  # of several the last one stays, which is the lowest
    return Trie(
        sessions=sessions[rows],
        depths=depths,
        parents=parents,
        tokens=tokens_MD[rows, depths],
        weights=_sums(nodes, matches.weights[through]),
        matches=best,
        families=np.cumsum(first) - 1,
        starts=np.flatnonzero(first),
    )


def _sums(groups: Ints, values: Floats) -> Floats:
    """Sum of the values of each group."""
    return np.bincount(groups, values).astype(np.float64)
