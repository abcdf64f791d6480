"""Draft trees on the host in NumPy: the functions of `eyas.kernels.cpu.trees`, for installations without numba.

Arguments and legend as there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.arrays import Ints


class NodeLayout(NamedTuple):
    """The fields of PackedTrees that follow from the parents."""

    above: Ints
    roots: Ints
    depths: Ints
    words: npt.NDArray[np.uint64]


def are_valid(counts: Ints, tokens: Ints, parents: Ints, bounds: Ints, vocab_size: int) -> bool:
    """Check that nodes keep to the limits and come after their parents. bounds: roots, most nodes, most levels [3, B]."""
    firsts, (roots, max_nodes, max_depths) = counts.cumsum() - counts, bounds
    own = np.arange(len(tokens)) - np.repeat(firsts, counts)
    is_valid = (counts <= max_nodes).all() and (tokens[firsts] == roots).all()
    is_valid &= tokens.min() >= 0 and tokens.max() < vocab_size
    is_valid &= parents.min() >= 0 and bool((parents < np.maximum(own, 1)).all())
    return bool(is_valid) and bool((np.maximum.reduceat(layout(counts, parents).depths, firsts) <= max_depths).all())


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


def accepted_rows(counts: Ints, tokens: Ints, above: Ints, samples: Ints) -> tuple[Ints, Ints]:
    """Return the rows of the accepted paths of all trees, and where each path ends among these.

    In each turn those rows pass whose parent has passed in the turn before.
    """
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
