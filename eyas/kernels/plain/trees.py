"""Draft trees on the host in NumPy: the functions of `eyas.kernels.cpu.trees`, for installations without numba.

Arguments and legend as there; D depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.arrays import Bools, Ints, Reals


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


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return `counts` consecutive numbers from each of `firsts`, one range after the other."""
    return np.repeat(firsts - counts.cumsum() + counts, counts) + np.arange(int(counts.sum()))


def rank_nodes(tokens: Ints, parents: Ints, candidates: Ints, scores: Reals, cumulative: Reals, expanded: Ints) -> None:
    """Find the places of a tree's nodes among the candidates of their parents, see `GrownTree`."""
    above = candidates[parents] == tokens[:, None]
    above[0] = False
    places = above.argmax(1)
    is_known = above[np.arange(len(places)), places]
    cumulative[:] = np.where(is_known, scores[parents, places], -np.inf)
    cumulative[0] = 0.0
    for node, parent in enumerate(parents.tolist()[1:], 1):  # parents come before children
        cumulative[node] += cumulative[parent]
    expanded[:] = 0
    known = np.flatnonzero(is_known)
    expanded[parents[known] * candidates.shape[1] + places[known]] = known


def best_rows(
    expanded: Ints, scores: Reals, cumulative: Reals, depths: Ints, is_exact: Bools, max_depth: int, least: float,
    repair: float, places: Ints, worths: Reals,
) -> int:  # fmt: skip
    """Write the most useful candidates of a tree, see `GrownTree.useful`, the best first. Returns how many there are."""
    number, sums = expanded.reshape(scores.shape), cumulative[:, None] + scores
    is_new = (number == 0) & (depths < max_depth - 1)[:, None] & (sums > least)
    is_outdated = (number > 0) & ~is_exact[number] & is_exact[:, None]
    worth = np.where(is_new, sums, np.where(is_outdated, sums + repair, -np.inf)).ravel()
    chosen = best_places(worth, len(places))
    places[: len(chosen)], worths[: len(chosen)] = chosen, worth[chosen]
    return len(chosen)


def best_places(scores: Reals, count: int) -> Ints:
    """Return places of the `count` best finite scores, the best first; of equal ones the first."""
    places = np.flatnonzero(scores > -np.inf)
    # np.partition leaves the count-th best at -count: only scores as high as that are sorted.
    if len(places) > count:
        places = places[np.flatnonzero(scores[places] >= np.partition(scores[places], -count)[-count])]
    return places[np.argsort(-scores[places], kind="stable")[:count]]


def mark_above(nodes: Ints, parents: Ints, seen: Bools) -> None:
    """Mark of each row the node above it, and all nodes above that except the root."""
    while nodes.any():
        seen[np.arange(len(nodes)), nodes] = True
        nodes = parents[nodes]
    seen[:, 0] = False


def merge(
    counts: Ints, sizes: Ints, tokens: Ints, parents: Ints, values: Reals, limits: Ints, depths: Ints, min_share: float,
    cells: Ints, out: Reals,
) -> None:  # fmt: skip
    """Write the best nodes of each session's trees, see `eyas.drafters.combined`."""
    owners, trees = np.repeat(np.arange(len(counts)), counts), np.repeat(np.arange(len(sizes)), sizes)
    sessions, above = owners[trees], parents + (sizes.cumsum() - sizes)[trees]
    lineage = _lineage(above)
    levels = (lineage[1:] != lineage[:-1]).sum(0)
    firsts = _firsts(tokens[lineage], sessions * (len(lineage) + 1) + levels)  # the first node with the same path
    scores = values[lineage].min(0)  # at most the parent's, so that the best nodes of a tree are a tree
    drafted = np.flatnonzero((levels > 0) & (levels <= depths[sessions]) & np.isfinite(scores))
    # Each tree first takes its share of the nodes, whatever the other tree's scores are.
    share, is_reserved = np.floor(min_share * limits).astype(np.int64)[owners], np.zeros(len(tokens), np.bool_)
    own = firsts[drafted]
    is_reserved[own[first_of_groups(trees[drafted], share, own, -scores[drafted])]] = True
    better = np.full(len(tokens), -np.inf)
    np.maximum.at(better, own, scores[drafted])
    merged = drafted[own == drafted]
    best = first_of_groups(sessions[merged], limits, -better[merged], ~is_reserved[merged])
    chosen = np.sort(merged[best])
    # Node numbers within each session, from 1; roots keep 0. A node's parent is the first node with the parent's path.
    ends, numbers = np.searchsorted(sessions[chosen], np.arange(len(counts) + 1)), np.zeros(len(tokens), np.int64)
    numbers[chosen] = np.arange(len(chosen)) - ends[sessions[chosen]] + 1
    at = sessions[chosen], numbers[chosen] - 1
    cells[0][at], cells[1][at] = tokens[chosen], numbers[firsts[above[chosen]]]
    out[at] = better[chosen]
    cells[0, :, -1] = np.diff(ends)


def first_of_groups(groups: Ints, limits: Ints, *keys: npt.NDArray[np.generic]) -> Ints:
    """Return places of the limits[g] first nodes of each group g in the order of the keys; the last key counts most.

    Ties go to the earlier place. Example: groups [0, 0, 1, 0], limits [2, 1], key [3, 1, 5, 2] give places [1, 3, 2].
    """
    order = np.lexsort((*keys, groups))
    grouped = groups[order]
    # The rank of each place within its sorted group.
    found: Ints = order[np.arange(len(order)) - np.searchsorted(grouped, grouped) < limits[grouped]]
    return found


def _lineage(parents: Ints) -> Ints:
    """Return each node, its parent, the parent of that, and so on until all are roots, [D + 1, K]."""
    rows = [np.arange(len(parents))]
    while ((above := parents[rows[-1]]) != rows[-1]).any():
        rows.append(above)
    return np.stack(rows)


def _firsts(tokens: Ints, kinds: Ints) -> Ints:
    """Return, for each node, the first one of the same kind with the same lineage.

    Args:
        kinds: a number for each depth of each session [K].
        tokens: of the node and of its ancestors [D + 1, K].
    """
    order = np.lexsort((*tokens, kinds))
    differs = (tokens[:, order[1:]] != tokens[:, order[:-1]]).any(0) | (kinds[order[1:]] != kinds[order[:-1]])
    groups = np.cumsum(np.append(True, differs)) - 1
    firsts = np.empty(len(order), np.int64)
    firsts[order] = order[np.flatnonzero(np.append(True, differs))][groups]
    return firsts
