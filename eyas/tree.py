"""Draft trees: given tokens and parents, gives back depths, masks and children.

Knows no model, no torch and no network. Node 0 is the root: the last committed token. Every other node is a guess for
the token after its parent. A tree of one node is ordinary decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eyas.errors import InvalidTree


@dataclass(frozen=True)
class DraftTree:
    """A tree of guesses below the last committed token.

    tokens: token id of each node; tokens[0] is the root.
    parents: index of each node's parent, always smaller than the node's own; the root is its own parent.
    log_probs: cumulative score of each node under the drafter; 0.0 at the root. Only ever used to rank.
    grown_ahead: whether the tree was grown before its root was known.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    grown_ahead: bool = False

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """The tree of plain decoding."""
        return cls((token,), (0,), (0.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A single path; tokens[0] is the root."""
        return cls(tuple(tokens), tuple(max(i - 1, 0) for i in range(len(tokens))), (0.0,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Number of guesses, the root excluded."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """For each node, token id -> child node. Of siblings with the same token the first counts."""
        children: tuple[dict[int, int], ...] = tuple({} for _ in self.tokens)
        for node in range(1, len(self)):
            children[self.parents[node]].setdefault(self.tokens[node], node)
        return children

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that guesses `token`, or None."""
        return self.children[node].get(token)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """mask[i, j] is true where node j lies on the path from the root to node i, i itself included; [N, N]."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def validate(self, root: int, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """Range-check a tree that may come from an untrusted drafter.

        root: the token that must stand at node 0; max_nodes counts the root.
        Raises InvalidTree saying which rule is broken.
        """
        if not len(self.tokens) == len(self.parents) == len(self.log_probs):
            raise InvalidTree(f"{len(self.tokens)} tokens, {len(self.parents)} parents, {len(self.log_probs)} scores")
        if not 1 <= len(self) <= max_nodes:
            raise InvalidTree(f"{len(self)} nodes where 1 to {max_nodes} are allowed")
        if self.tokens[0] != root or self.parents[0] != 0:
            raise InvalidTree(f"root is token {self.tokens[0]} with parent {self.parents[0]}, expected {root} and 0")
        for node in range(1, len(self)):
            if not 0 <= self.parents[node] < node:
                raise InvalidTree(f"node {node} has parent {self.parents[node]}, which does not come before it")
            if not 0 <= self.tokens[node] < vocab_size:
                raise InvalidTree(f"node {node} has token {self.tokens[node]}, outside [0, {vocab_size})")
        if self.depth > max_depth:
            raise InvalidTree(f"depth {self.depth} where {max_depth} is allowed")
