"""Scored nodes of a trie in, the best of each session within its budget out, as trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eyas.commit import Budget
from eyas.drafters.forest import Forest, best
from eyas.drafters.lookup.matches import Floats, Trie
from eyas.tree import DraftTree


def select(trie: Trie, scores: Floats, roots: Sequence[int], budgets: Sequence[Budget]) -> list[DraftTree]:
    """Of each session's nodes the best `max_nodes - 1` within `max_depth`, by cumulative scores [K] in float32.

    Ties go to the shallower node, then to the lower tokens: with scores that never grow along a path, a chosen node's parent
    is chosen too. The same as `eyas.drafters.expand.select`, where nothing is on a device.
    """
    limits, depths = np.array([(budget.max_nodes - 1, budget.max_depth) for budget in budgets]).T
    rounded = scores.astype(np.float32)
    places = np.flatnonzero((trie.depths < depths[trie.sessions]) & np.isfinite(rounded))
    chosen = np.zeros(len(scores), np.bool_)
    chosen[places[best(trie.sessions[places], limits, -rounded[places])]] = True
    return Forest(trie.sessions, trie.parents, trie.tokens, rounded.astype(np.float64)).trees(chosen, roots)
