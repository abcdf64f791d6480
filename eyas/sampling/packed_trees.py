"""Draft trees of a step as arrays: their checks, and what their nodes see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.kernels.choice import tree_kernels
from eyas.protocol.tree import Bools, DraftTree, DraftTrees, Ints

TreeWords = npt.NDArray[np.uint64]


class PackedTrees(NamedTuple):
    """The nodes of several trees, one tree after the other, [R].

    Attributes:
        nodes: the nodes themselves.
        above: packed row of each node's parent [R].
        roots: packed row of each node's root [R].
        depths: distance of each node from its root [R].
        words: which nodes of its own tree each node sees, as bits [R, W], the first node in the lowest bit.
    """

    nodes: DraftTrees
    above: Ints
    roots: Ints
    depths: Ints
    words: TreeWords

    @property
    def visible(self) -> Bools:
        """The rows of each `DraftTree.ancestor_mask`, with 64 W columns for all trees, [R, 64 W]."""
        return np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)


class TreeLimits(NamedTuple):
    """Limits of several trees, as `DraftTree.validate` takes them: each list has an entry for each tree."""

    roots: Sequence[int]
    max_nodes: Sequence[int]
    max_depths: Sequence[int]
    vocab_size: int


def pack_trees(trees: Sequence[DraftTree]) -> PackedTrees:
    """Pack at least one tree."""
    nodes = DraftTrees.of(trees)
    return PackedTrees(nodes, *tree_kernels().layout(nodes.counts, nodes.parents))


def are_valid_trees(trees: Sequence[DraftTree], limits: TreeLimits) -> bool:
    """Return whether trees that may come from an untrusted drafter are deterministic and valid.

    `DraftTree.validate` is the plain way, which also says what is wrong.
    """
    if not trees:
        return False
    nodes, bounds = DraftTrees.of(trees), np.array(limits[:3], dtype=np.int64)
    if any(nodes.sampled):
        return False
    return bool(tree_kernels().are_valid(nodes.counts, nodes.tokens, nodes.parents, bounds, limits.vocab_size))


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return `counts` consecutive numbers from each of `firsts`, one range after the other."""
    found: Ints = tree_kernels().ranges(firsts, counts)
    return found
