"""The levels of trees that an EAGLE head grows on the CPU, between its layers (docs/decisions/0038-compiled-cpu.md).

Legend: S sessions, R rows of a level, C head hidden, D draft vocabulary, V target vocabulary, d head width, M layers, P
prefix slots of all sessions, L levels, k nodes of a level that are expanded, N nodes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import boolean, float32, float64, int64, types

from eyas.arrays import Bools, Floats, Ints
from eyas.kernels.arguments import RowKeys
from eyas.kernels.cpu.compiling import compile_all, kernel
from eyas.kernels.cpu.drafting import grow_level, select_trees
from eyas.kernels.cpu.layers import pair_inputs


class EagleWeights(NamedTuple):
    """What an EAGLE head makes the inputs of its layers from.

    Attributes:
        embedding: [V, C].
        draft_ids: the target's ids [D].
        cos, sin: by position [., d].
        state_norm, token_norm: factors of the norms of features and embeddings [C]; [0] in EAGLE-1, which has none.
        eps: of these two.
        norms_residual: whether the residual begins with the normed features.
    """

    embedding: Floats
    draft_ids: Ints
    cos: Floats
    sin: Floats
    state_norm: Floats
    token_norm: Floats
    eps: float
    norms_residual: bool


class EagleTrees(NamedTuple):
    """Trees that grow.

    Attributes:
        noise, words, limits, depths, widths, frontiers, counts, scores, tokens, parents: see `grow_level`.
        starts: of each session's rows among those of the last level [S].
        num_run: rows of each session's tree before the level [S].
        seen: which of these each row of the last level sees [S, k, .].
        prefix, prefix_ends: slots of sessions, one after the other [P], and where each ends [S].
        tree_slots: for the rows of each tree [., k * (L - 1)].
    """

    noise: Floats
    words: Ints
    limits: Ints
    depths: Ints
    widths: Ints
    frontiers: Ints
    counts: Ints
    scores: Floats
    tokens: Ints
    parents: Ints
    starts: Ints
    num_run: Ints
    seen: Bools
    prefix: Ints
    prefix_ends: Ints
    tree_slots: Ints


@kernel(error_model="numpy")
def _pair(head, states, sources, tokens):
    """Return embeddings and features of rows side by side [R, 2 C], and the residual [R, C]. EAGLE-1 norms none of them.

    sources: of the states [., C] above them [R].
    """
    count = len(sources)
    width = states.shape[1]
    inputs = np.empty((count, 2 * width), np.float32)
    residual = np.empty((count, width), np.float32)
    if len(head.token_norm):
        pair_inputs(states, sources, head.embedding, tokens, head.state_norm, head.token_norm, head.eps, inputs, residual)
        if head.norms_residual:
            residual[:] = inputs[:, width:]
        return inputs, residual
    for r in range(count):
        inputs[r, :width] = head.embedding[tokens[r]]
        inputs[r, width:] = states[sources[r]]
    return inputs, residual


@kernel(error_model="numpy")
def _see(growth, parents, level, last):
    """Return the slots of a level's rows, and their RowKeys: each sees its prefix, its ancestors and itself.

    Args:
        growth: an EagleTrees.
        parents: of the rows, by number among their session's rows of the level above [R].
        last: the highest position.
    """
    widths, counts, seen = growth.widths, growth.num_run, growth.seen
    num_busy = np.count_nonzero(widths)
    starts, ends, found_ends, masked = np.empty((4, num_busy), np.int64)
    slots, positions = np.empty((2, widths.sum()), np.int64)
    found = np.empty(len(growth.prefix) + counts.sum(), np.int64)
    visible = np.zeros((widths * (counts + widths)).sum(), np.bool_)
    above = np.empty((seen.shape[1], seen.shape[2]), np.bool_)
    b = row = size = cell = first = 0
    for s in range(len(widths)):
        width = widths[s]
        count = counts[s]
        length = growth.prefix_ends[s] - first
        if width:
            found[size : size + length] = growth.prefix[first : first + length]
            found[size + length : size + length + count] = growth.tree_slots[s, :count]
            size += length + count
            above[:] = seen[s]
            for w in range(width):
                own = visible[cell : cell + count + width]
                own[:count] = above[parents[row + w], :count]
                own[count + w] = True
                seen[s, w, : count + width] = own
                cell += count + width
                slots[row + w] = growth.tree_slots[s, count + w]
                positions[row + w] = min(length + level, last)
            starts[b] = row
            row += width
            ends[b] = row
            found_ends[b] = size
            masked[b] = count
            counts[s] += width
            b += 1
        first = growth.prefix_ends[s]
    return slots, RowKeys(starts, ends, found[:size], found_ends, np.zeros(num_busy, np.bool_), masked, visible, positions)


@kernel(error_model="numpy")
def grow_eagle_level(head, growth, level, logits, states):
    """Record the children of all frontiers, and find the rows of the next level.

    Args:
        head: an EagleWeights.
        growth: an EagleTrees; what it says of this level is replaced by the next one.
        logits: of the frontiers' nodes, session by session [R, D].
        states: of the same nodes, as the next level reads them [R, C].

    Returns:
        Of the rows: embeddings and features side by side [R, 2 C], residual [R, C], cos and sin [R, d], slots and RowKeys.
        There are none behind the last level.
    """
    sessions, k = growth.frontiers.shape
    firsts = growth.counts.copy()  # of the candidates that are added now
    grow_level(
        logits, level, growth.noise, growth.words, growth.limits, growth.depths, growth.widths, growth.frontiers,
        growth.counts, growth.scores, growth.tokens, growth.parents,
    )  # fmt: skip
    sources, above, tokens = np.empty((3, growth.widths.sum()), np.int64)
    row = 0
    for s in range(sessions):
        begin = row
        for w in range(growth.widths[s]):  # k candidates are children of a node
            candidate = growth.frontiers[s, w]
            above[row] = (candidate - firsts[s]) // k
            sources[row] = growth.starts[s] + above[row]
            tokens[row] = head.draft_ids[growth.tokens[s, candidate]]
            row += 1
        growth.starts[s] = begin
    slots, keys = _see(growth, above, level, len(head.cos) - 1)
    inputs, residual = _pair(head, states, sources, tokens)
    return inputs, residual, head.cos[keys.positions], head.sin[keys.positions], slots, keys


@kernel(error_model="numpy")
def select_eagle_trees(head, growth, cells, scores):
    """Select the best candidates of each session; the outputs are those of `grow_trees`."""
    candidates = growth.scores, growth.tokens, growth.parents
    select_trees(growth.limits, growth.counts, head.draft_ids, *candidates, cells, scores)


@cache
def compile_kernels() -> None:
    """Compile the kernels, once for each installation; other processes and later ones load the result."""
    row, rows, ids, words = float32[::1], float32[:, ::1], int64[::1], int64[:, ::1]
    head = types.NamedTuple([rows, ids, rows, rows, row, row, float64, boolean], EagleWeights)
    level = float32[:, :, ::1], words, ids, ids, ids, words, ids, rows, words, words
    growth = types.NamedTuple([*level, ids, ids, boolean[:, :, ::1], ids, ids, words], EagleTrees)
    compile_all(
        {
            grow_eagle_level: (head, growth, int64, rows, rows),
            select_eagle_trees: (head, growth, int64[:, :, ::1], rows),
        }
    )
