"""Merges trees node by node, the obvious way: the reference for the array code."""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree


@dataclass
class Node:
    """score: the better one of the trees that have it."""

    parent: int
    token: int
    score: float


def naive_merge(root: int, trees: Sequence[DraftTree], budget: TreeBudget, floor: float) -> DraftTree:
    """The best nodes of all trees, with a minimum share for each tree."""
    nodes = [Node(0, root, 0.0)]
    places: dict[tuple[int, int], int] = {}
    capacity = max(budget.max_nodes - 1, 0) if budget.max_depth > 0 else 0
    kept: set[int] = set()
    for tree in trees:
        own = _add(nodes, places, tree, budget.max_depth)
        kept.update(sorted(own, key=lambda node: (-own[node], node))[: int(floor * capacity)])
    for node in sorted(range(1, len(nodes)), key=lambda node: (-nodes[node].score, node)):
        if len(kept) < capacity:
            kept.add(node)
    order = [0, *sorted(kept)]
    return DraftTree.of(
        tokens=tuple(nodes[node].token for node in order),
        parents=tuple(order.index(nodes[node].parent) for node in order),
        log_probs=tuple(nodes[node].score for node in order),
        grown_ahead=any(tree.grown_ahead for tree in trees),
    )


def _add(nodes: list[Node], places: dict[tuple[int, int], int], tree: DraftTree, max_depth: int) -> dict[int, float]:
    """The tree's nodes among all, each with its score in this tree, which never exceeds its parent's."""
    where, own = {0: 0}, {0: 0.0}
    for node in range(1, len(tree)):
        if tree.depths[node] <= max_depth:
            parent, token = where[tree.parents[node]], tree.tokens[node]
            place = places.setdefault((parent, token), len(nodes))
            own[place] = min(tree.log_probs[node], own[parent])
            if place == len(nodes):
                nodes.append(Node(parent, token, own[place]))
            nodes[place].score = max(nodes[place].score, own[place])
            where[node] = place
    del own[0]
    return own
