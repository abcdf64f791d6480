"""Trees of several drafters in, for each session one tree of the best nodes of all out. Knows not who grew them.

All nodes of all sessions are arrays: there is no loop over nodes. Legend: K nodes, S sessions, T trees, D depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from eyas.commit import Budget
from eyas.drafters.forest import Forest, Ints, Reals, best
from eyas.tree import DraftTree


@dataclass(frozen=True)
class _Nodes:
    """The nodes [K] of one tree after the other, those of a session one after the other; sessions: of each tree [T].

    depths: 0 for roots. firsts: the first node with the same path in the same session, often the node itself. scores: of a
    node's own tree, never above its parent's, so that the best nodes of a tree are a tree.
    """

    sessions: Ints
    trees: Ints
    depths: Ints
    parents: Ints
    tokens: Ints
    firsts: Ints
    scores: Reals


def merge_trees(
    roots: Sequence[int], trees: Sequence[Sequence[DraftTree]], budgets: Sequence[Budget], floor: float
) -> list[DraftTree]:
    """For each session one tree of the best nodes of all of its trees, of equal ones the earlier; what several have counts
    once, with its better score.

    floor: share of the guesses that each tree has for certain, if it has so many; those of a session sum to 1 at most.
    """
    if not any(trees):
        return [DraftTree.root_only(root) for root in roots]
    room = np.array([max(budget.max_nodes - 1, 0) for budget in budgets])
    deepest = np.array([budget.max_depth for budget in budgets])
    nodes = _nodes(trees)
    sessions = nodes.sessions[nodes.trees]
    guesses = np.flatnonzero((nodes.depths > 0) & (nodes.depths <= deepest[sessions]))
    firsts, scores = nodes.firsts[guesses], nodes.scores[guesses]
    certain = np.zeros(len(sessions), np.bool_)
    share = np.floor(floor * room).astype(np.int64)[nodes.sessions]
    certain[firsts[best(nodes.trees[guesses], share, firsts, -scores)]] = True
    better = np.full(len(sessions), -np.inf)
    np.maximum.at(better, firsts, scores)
    merged = guesses[firsts == guesses]
    chosen = np.zeros(len(sessions), np.bool_)
    chosen[merged[best(sessions[merged], room, -better[merged], ~certain[merged])]] = True
    above = np.where(nodes.depths == 1, -1, nodes.firsts[nodes.parents])
    made = Forest(sessions, above, nodes.tokens, better).trees(chosen, roots)
    ahead = [any(tree.grown_ahead for tree in own) for own in trees]
    return [replace(tree, grown_ahead=grown) if grown else tree for tree, grown in zip(made, ahead, strict=True)]


def _nodes(trees: Sequence[Sequence[DraftTree]]) -> _Nodes:
    all_trees = list(chain.from_iterable(trees))
    sizes = np.array([len(tree) for tree in all_trees])
    of_trees, count = np.repeat(np.arange(len(sizes)), sizes), int(sizes.sum())
    starts = (np.cumsum(sizes) - sizes)[of_trees]
    tokens = np.fromiter(chain.from_iterable(tree.tokens for tree in all_trees), np.int64, count)
    parents = np.fromiter(chain.from_iterable(tree.parents for tree in all_trees), np.int64, count) + starts
    scores = np.fromiter(chain.from_iterable(tree.log_probs for tree in all_trees), np.float64, count)
    sessions = np.repeat(np.arange(len(trees)), [len(own) for own in trees])
    lineage = _lineage(parents)
    depths = (lineage[1:] != lineage[:-1]).sum(0)
    firsts = _firsts(tokens[lineage], sessions[of_trees] * (len(lineage) + 1) + depths)
    return _Nodes(sessions, of_trees, depths, parents, tokens, firsts, scores[lineage].min(0))


def _lineage(parents: Ints) -> Ints:
    """Each node, its parent, the parent of that, and so on until all are roots; [D + 1, K]."""
    rows = [np.arange(len(parents))]
    while ((above := parents[rows[-1]]) != rows[-1]).any():
        rows.append(above)
    return np.stack(rows)


def _firsts(tokens: Ints, kinds: Ints) -> Ints:
    """The first node of the same kind [K], which is a depth of a session, with the same tokens [D + 1, K] above it."""
    order = np.lexsort((*tokens, kinds))
    differs = (tokens[:, order[1:]] != tokens[:, order[:-1]]).any(0) | (kinds[order[1:]] != kinds[order[:-1]])
    groups = np.cumsum(np.append(True, differs)) - 1
    firsts = np.empty(len(order), np.int64)
    firsts[order] = order[np.flatnonzero(np.append(True, differs))][groups]
    return firsts
