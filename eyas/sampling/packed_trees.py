"""Draft trees of a step as arrays: their checks, what their nodes see, and the rule `match` over all of them.

Kernels compiled with numba do this in a tenth of the time; where numba is not installed, NumPy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.device.host import has_numba
from eyas.protocol.tree import Bools, DraftTree, DraftTrees, Ints

TreeWords = npt.NDArray[np.uint64]


@cache
def kernels() -> Any:
    """Return the compiled kernels, which are loaded once; None where there is no numba."""
    if not has_numba():
        return None
    from eyas.kernels.cpu import trees as cpu_kernels

    cpu_kernels.compile_kernels()
    return cpu_kernels


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
    return PackedTrees(nodes, *(kernels() or PlainKernels).layout(nodes.counts, nodes.parents))


def are_valid_trees(trees: Sequence[DraftTree], limits: TreeLimits) -> bool:
    """Return whether trees that may come from an untrusted drafter are deterministic and valid.

    `DraftTree.validate` is the plain way, which also says what is wrong.
    """
    if not trees:
        return False
    nodes, bounds = DraftTrees.of(trees), np.array(limits[:3], dtype=np.int64)
    if any(nodes.sampled):
        return False
    kernel = (kernels() or PlainKernels).are_valid
    return bool(kernel(nodes.counts, nodes.tokens, nodes.parents, bounds, limits.vocab_size))


def accepted_rows(trees: PackedTrees, names: Ints, wanted: Ints) -> tuple[Ints, Ints]:
    """Walk down every tree as long as a node has a child that is wanted there.

    By the rule `match` a node's name is its token, and wanted is what the target has drawn. By the rule `rejection` a node's
    name is its row, and wanted is the row of the child that is accepted.

    Args:
        trees: the nodes [R].
        names: of each node [R].
        wanted: name of the child that goes on from each node; the first child with it does [R].

    Returns:
        Rows of all accepted paths, one path after the other [A], and where the path of each tree ends among these [B].
    """
    rows, ends = (kernels() or PlainKernels).accepted_rows(trees.nodes.counts, names, trees.above, wanted)
    return rows, ends


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return `counts` consecutive numbers from each of `firsts`, one range after the other."""
    found: Ints = (kernels() or PlainKernels).ranges(firsts, counts)
    return found


class NodeLayout(NamedTuple):
    """The fields of PackedTrees that follow from the parents."""

    above: Ints
    roots: Ints
    depths: Ints
    words: TreeWords


class PlainKernels:
    """Kernels of `eyas.kernels.cpu.sampling` in NumPy."""

    @staticmethod
    def are_valid(counts: Ints, tokens: Ints, parents: Ints, bounds: Ints, vocab_size: int) -> bool:
        """Check that nodes keep to the limits and come after their parents. bounds: the lists of TreeLimits [3, B]."""
        firsts, (roots, max_nodes, max_depths) = counts.cumsum() - counts, bounds
        own = np.arange(len(tokens)) - np.repeat(firsts, counts)
        is_valid = (counts <= max_nodes).all() and (tokens[firsts] == roots).all()
        is_valid &= tokens.min() >= 0 and tokens.max() < vocab_size
        is_valid &= parents.min() >= 0 and bool((parents < np.maximum(own, 1)).all())
        if not is_valid:
            return False
        depths = PlainKernels.layout(counts, parents).depths
        return bool((np.maximum.reduceat(depths, firsts) <= max_depths).all())

    @staticmethod
    def layout(counts: Ints, parents: Ints) -> NodeLayout:
        """Return `above`, `roots`, `depths` and `words` of PackedTrees.

        In each turn a node sees what the node sees that lies twice as far above it, and adds that one's depth to its own.
        Example of a chain of four: node 3 sees itself; then also node 2; then also what node 1 sees, that is 1 and 0.
        """
        roots = np.repeat(counts.cumsum() - counts, counts)
        rows = np.arange(len(roots))
        own = rows - roots
        above = further = parents + roots
        words = np.zeros((len(rows), -(-int(counts.max()) // 64)), dtype="<u8")
        words[rows, own >> 6] = np.left_shift(np.uint64(1), (own & 63).astype(np.uint64))
        depths = np.minimum(own, 1)
        while True:
            words |= words.take(further, axis=0)
            if not (further != roots).any():
                return NodeLayout(above, roots, depths, words)
            depths += depths[further]
            further = further[further]

    @staticmethod
    def accepted_rows(counts: Ints, tokens: Ints, above: Ints, samples: Ints) -> tuple[Ints, Ints]:
        """See `accepted_rows`. In each turn those rows pass whose parent has passed in the turn before."""
        guessed = np.flatnonzero(samples[above] == tokens)
        guessed = guessed[above[guessed] < guessed]  # no root
        firsts = guessed[np.unique(above[guessed], return_index=True)[1]]
        passed = np.zeros(len(samples), dtype=np.bool_)
        level = counts.cumsum() - counts
        while len(level):
            passed[level] = True
            level = firsts[passed[above[firsts]] & ~passed[firsts]]
        rows = np.flatnonzero(passed)
        return rows, np.searchsorted(rows, counts.cumsum())

    @staticmethod
    def ranges(firsts: Ints, counts: Ints) -> Ints:
        """See `ranges`."""
        return np.repeat(firsts - counts.cumsum() + counts, counts) + np.arange(int(counts.sum()))
