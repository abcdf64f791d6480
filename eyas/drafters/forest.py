"""Nodes of many sessions as arrays, without a device: which are best, and trees of those. Knows not what scored them.

Legend: K nodes, S sessions, N nodes chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
