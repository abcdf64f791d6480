"""Scored nodes of many sessions in, the best of each within its budget out, as trees. Knows not what scored them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eyas.commit import Budget
from eyas.drafters.lookup.matches import Floats, Ints, Trie
from eyas.tree import DraftTree


def select(trie: Trie, scores: Floats, roots: Sequence[int], budgets: Sequence[Budget]) -> list[DraftTree]:
    """Of each session's nodes the best `max_nodes - 1` within `max_depth`, by cumulative scores [K] in float32.

    Ties go to the shallower node, then to the lower tokens: with scores that never grow along a path, a chosen node's parent
    is chosen too. The same as `eyas.drafters.expand.select`, where nothing is on a device.
    """
    limits, depths = np.array([(budget.max_nodes - 1, budget.max_depth) for budget in budgets]).T
    values = scores.astype(np.float32)
    places = np.flatnonzero((trie.depths < depths[trie.sessions]) & np.isfinite(values))
    order = places[np.lexsort((-values[places], trie.sessions[places]))]
    sessions = trie.sessions[order]
    kept = np.zeros(len(values), np.bool_)
    kept[order[np.arange(len(order)) - np.searchsorted(sessions, sessions) < limits[sessions]]] = True
    chosen = np.flatnonzero(kept)
    chosen = chosen[np.argsort(trie.sessions[chosen], kind="stable")]
    ends = np.searchsorted(trie.sessions[chosen], np.arange(len(roots) + 1))
    parents = _numbers(trie, chosen, ends)
    tokens, log_probs = trie.tokens[chosen].tolist(), values[chosen].tolist()
    return [
        DraftTree((root, *tokens[start:end]), (0, *parents[start:end]), (0.0, *log_probs[start:end]))
        for root, start, end in zip(roots, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def _numbers(trie: Trie, chosen: Ints, ends: Ints) -> list[int]:
    """Of each chosen node the number of its parent in its session's tree."""
    numbers = np.zeros(len(trie.tokens) + 1, np.int64)
    numbers[chosen] = np.arange(len(chosen)) - ends[trie.sessions[chosen]] + 1
    parents = np.maximum(trie.parents[chosen], -1)
    assert ((parents < 0) | (numbers[parents] > 0)).all(), "a node was chosen without its parent"
    found: list[int] = numbers[parents].tolist()
    return found
