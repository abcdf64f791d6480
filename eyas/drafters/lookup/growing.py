"""A draft tree that grows node by node: guesses in, the tree out. Knows not where they come from."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.tree import DraftTree


class GrowingTree:
    """Nodes are numbered as in the tree that comes of it."""

    def __init__(self, root: int, max_depth: int) -> None:
        self._max_depth = max_depth
        self._tokens = [root]
        self._parents = [0]
        self._depths = [0]
        self._scores = [0.0]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, score: float, max_nodes: int) -> int | None:
        """The child of `parent` that guesses `token`, new or not; None where there may be no more. score: of the step to a
        new node."""
        node = self._children.get((parent, token))
        if node is None and len(self) < max_nodes and self._depths[parent] < self._max_depth:
            self._children[parent, token] = node = len(self)
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
            self._scores.append(self._scores[parent] + score)
        return node

    def add_path(self, tokens: Sequence[int], score: float, max_nodes: int) -> None:
        """A path from the root, as far as it may go; each step costs `score`."""
        node: int | None = 0
        for token in tokens:
            if node is not None:
                node = self.add(node, token, score, max_nodes)

    def finish(self) -> DraftTree:
        """The tree of all nodes so far."""
        return DraftTree(tuple(self._tokens), tuple(self._parents), tuple(self._scores))
