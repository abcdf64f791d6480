"""The growth of draft trees on the CPU, compiled with numba (docs/decisions/0038-compiled-cpu.md).

`grow_trees` grows whole trees where all levels are known at once, with or without the bias of a Markov head. Arrays are
contiguous. Legend: S sessions, R rows, L levels, D draft vocabulary, r rank of the Markov head, k children, P candidates,
N nodes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, float64, int64, types

from eyas.kernels.arguments import BLOCK_OUTPUTS, FLOATS
from eyas.kernels.cpu.compiling import compile_all, kernel
from eyas.kernels.cpu.products import multiply_weight, num_blocks_of
from eyas.kernels.cpu.sampling import BLOCK, best_of, filters_of, kept_logits_of, real_word, shared_noise, shifted_scores

NO_NOISE, NO_EMBEDDING = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.float32)


class MarkovBias(NamedTuple):
    """Bias that a vanilla Markov head adds to a level's logits: a weight times an embedding of the token before.

    Attributes:
        embedding: [V, r], or [0, 0] without a head.
        address, stored: of the weight [D, r], see `multiply_weight`.
        unscale: what its products are multiplied by.
    """

    embedding: npt.NDArray[np.float32] = NO_EMBEDDING
    address: int = 0
    stored: int = FLOATS
    unscale: float = 1.0


@kernel(error_model="numpy")
def _find_expanded(scores, first, count, limit, maxima, best, places, frontier):
    """Write the nodes of the last level to expand, best first, to `frontier` [k]; returns how many.

    A node whose score is not above that of `limit` candidates has no child among the best.
    """
    # A child scores below its parent. So a node below the limit-th best candidate has no child in the tree.
    least = -np.float32(np.inf)
    if count >= limit:
        best_of(scores[:count], maxima, best[:limit], places[:limit])
        least = best[limit - 1]
    num = min(len(frontier), count - first)
    best_of(scores[first:count], maxima, best[:num], frontier[:num])
    width = 0
    # `best` is sorted: the nodes to expand are a prefix.
    while width < num and best[width] > least:
        frontier[width] += first
        width += 1
    return width


@kernel(error_model="numpy")
def _add_children(child_scores, child_tokens, log_sum, above, parent, count, scores, tokens, parents):
    """Record children [k] of a node with the score `above` as candidates. Returns how many candidates there are now."""
    for c in range(len(child_scores)):
        # A log-probability below a node: logit - log sum exp, plus the node's own log-probability.
        scores[count + c], tokens[count + c] = child_scores[c] - log_sum + above, child_tokens[c]
        parents[count + c] = parent
    return count + len(child_scores)


@kernel(error_model="numpy")
def _grow_tree(logits, markov, root, draft_ids, noise, by, filters, limit, depth, k, scores, tokens, parents):
    """Record candidates of one session, level by level: scores, draft ids and parents [P]. Returns how many there are."""
    size, rank = logits.shape[1], markov.embedding.shape[1]
    filled = num_blocks_of(size) * BLOCK_OUTPUTS
    row, weights, kept = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty((max(size, len(scores)) + BLOCK - 1) // BLOCK, np.float32)
    best, places = np.empty(max(limit, k), np.float32), np.empty(max(limit, k), np.int64)
    latents, biased = np.empty((k, rank), np.float32), np.empty((k, filled if rank else 0), np.float32)
    child_scores, child_tokens, log_sum = np.empty(k, np.float32), np.empty(k, np.int64), np.float32(0.0)
    count, first, width, frontier = 0, 0, 1, np.zeros(k, np.int64)  # first: of the last level's candidates
    for level in range(depth):
        if level:
            width = _find_expanded(scores, first, count, limit, maxima, best, places, frontier)
        # The Markov bias of a node is its token's embedding [r] times the weight [r, D]; all nodes of a level at once.
        if rank and width:
            for w in range(width):
                latents[w] = markov.embedding[draft_ids[tokens[frontier[w]]] if level else root]
            multiply_weight(latents[:width], markov.address, markov.stored, biased[:width])
            for w in range(width):
                for i in range(size):
                    biased[w, i] = biased[w, i] * np.float32(markov.unscale) + logits[level, i]
        first, own = count, noise[level] if len(noise) else weights[:0]
        for w in range(width):
            if rank or w == 0:  # without a Markov head the scores are the same below all nodes
                own_logits = kept_logits_of(biased[w][:size] if rank else logits[level], filters, kept, maxima)
                log_sum = shifted_scores(own_logits, own, by, row, weights)
                best_of(row, maxima, child_scores, child_tokens)
            # Candidates have numbers from 1; 0 is the root.
            above, parent = (scores[frontier[w]], frontier[w] + 1) if level else (np.float32(0.0), 0)
            count = _add_children(child_scores, child_tokens, log_sum, above, parent, count, scores, tokens, parents)
        if not width:
            break
    return count


@kernel(error_model="numpy")
def _select(limit, count, draft_ids, scores, tokens, parents, out_tokens, out_parents, out_scores):
    """Select the best `limit` of a session's first `count` candidates [P], in their order. Outputs [N]: see `grow_trees`."""
    num, node, numbers = min(limit, count), 0, np.zeros(count + 1, np.int64)
    best, places = np.empty(num, np.float32), np.empty(num, np.int64)
    best_of(scores[:count], np.empty((count + BLOCK - 1) // BLOCK, np.float32), best, places)
    # numbers[c + 1] is 1 for a chosen candidate, then its node. Candidates are in the order of levels, so a
    # parent has its number before its children look it up.
    for n in range(num):
        numbers[places[n] + 1] = 0 if np.isinf(best[n]) else 1
    for c in range(count):
        if numbers[c + 1]:
            out_scores[node], out_tokens[node] = scores[c], draft_ids[tokens[c]]
            out_parents[node] = numbers[parents[c]]
            node += 1
            numbers[c + 1] = node
    out_tokens[-1] = node


@kernel(error_model="numpy")
def grow_level(logits, level, noise, words, limits, depths, widths, frontiers, counts, scores, tokens, parents):
    """Record the children of all frontiers, and find the frontiers of the next level.

    Args:
        logits: of the nodes in the frontiers, session by session, float32 [R, D].
        noise, words, limits, depths: see `grow_trees`.
        widths, frontiers: of each session the number of its nodes, and these as candidates [S], [S, k]; of a level below the
            root. Replaced by those of the next one.
        counts: candidates of each session so far [S].
        scores, tokens, parents: of all candidates [S, P], parents by number from 1.
    """
    size, k, room, row = logits.shape[1], frontiers.shape[1], scores.shape[1], 0
    values, weights, kept = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty((max(size, room) + BLOCK - 1) // BLOCK, np.float32)
    best, places = np.empty(max(room, k), np.float32), np.empty(max(room, k), np.int64)
    child_scores, child_tokens = np.empty(k, np.float32), np.empty(k, np.int64)
    for s in range(len(widths)):
        # by: inverse of the ranking temperature, which is word 5 of the session.
        first, own, by = counts[s], noise[s, level] if len(noise) else weights[:0], np.float32(1.0) / real_word(words, 5, s)
        filters = filters_of(words, s)
        for w in range(widths[s]):
            above, parent = (scores[s, frontiers[s, w]], frontiers[s, w] + 1) if level else (np.float32(0.0), 0)
            log_sum = shifted_scores(kept_logits_of(logits[row], filters, kept, maxima), own, by, values, weights)
            best_of(values, maxima, child_scores, child_tokens)
            counts[s] = _add_children(
                child_scores, child_tokens, log_sum, above, parent, counts[s], scores[s], tokens[s], parents[s]
            )  # fmt: skip
            row += 1
        is_last = level + 1 >= depths[s] or not limits[s] or not widths[s]
        limit = min(limits[s], room)
        widths[s] = 0 if is_last else _find_expanded(scores[s], first, counts[s], limit, maxima, best, places, frontiers[s])


@kernel(error_model="numpy")
def select_trees(limits, counts, draft_ids, all_scores, all_tokens, all_parents, cells, scores):
    """Select the best candidates of each session, see `grow_level`; the outputs are those of `grow_trees`."""
    for s in range(len(limits)):
        own = all_scores[s], all_tokens[s], all_parents[s]
        _select(limits[s], counts[s], draft_ids, *own, cells[0, s], cells[1, s], scores[s])


@kernel(error_model="numpy")
def grow_trees(logits, markov, roots, draft_ids, noise, words, limits, depths, k, cells, scores):
    """Grow dynamic trees and select their best nodes, as `grow_dynamic` and `select_nodes` of
    `eyas.drafters.trees.growth` do.

    Args:
        logits: of all levels, without biases, float32 [S, L, D].
        markov: a MarkovBias; without a head the default.
        roots: the target's ids, int64 [S].
        draft_ids: the target's ids, int64 [D].
        noise, words: see `shared_noise`; noise is empty for none.
        limits, depths: most drafted nodes and levels, int64 [S].
        k: nodes that are expanded at a level, and children of a node.
        cells: to these go the target's ids and the parents of the drafted nodes, int64 [2, S, N], and their number [S] to
            cells[0, :, N - 1].
        scores: to these go their scores, float32 [S, N - 1].
    """
    # Level 0 has k candidates, each further one k nodes with k children.
    room = k + max(logits.shape[1] - 1, 0) * k * k
    all_scores, all_tokens = np.empty(room, np.float32), np.empty(room, np.int64)
    all_parents = np.empty(room, np.int64)
    for s in range(len(roots)):
        own, by = noise[s] if len(noise) else NO_NOISE_ROWS, np.float32(1.0) / real_word(words, 5, s)
        count = _grow_tree(
            logits[s], markov, roots[s], draft_ids, own, by, filters_of(words, s), limits[s], depths[s], k,
            all_scores, all_tokens, all_parents,
        )  # fmt: skip
        found = all_scores, all_tokens, all_parents
        _select(limits[s], count, draft_ids, *found, cells[0, s], cells[1, s], scores[s])


NO_NOISE_ROWS = np.zeros((0, 0), np.float32)


@cache
def compile_kernels() -> None:
    """Compile the kernels of growth, once for each installation; other processes and later ones load the result."""
    rows, cube, ids, words = float32[:, ::1], float32[:, :, ::1], int64[::1], int64[:, ::1]
    markov = types.NamedTuple([rows, int64, int64, float64], MarkovBias)
    compile_all(
        {
            shared_noise: (words, ids, cube),
            grow_trees: (cube, markov, ids, ids, cube, words, ids, ids, int64, int64[:, :, ::1], rows),
        }
    )
