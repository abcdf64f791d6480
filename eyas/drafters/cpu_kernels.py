"""The growth of draft trees on the CPU, compiled with numba (docs/decisions/0038-compiled-cpu.md).

`best_children`, `find_frontier` and `shared_noise` are those of `eyas.drafters.tree_kernels` for a level at a time.
`grow_trees` grows whole trees where all levels are known at once, with or without the bias of a Markov head. Arrays are
contiguous. Legend: S sessions, R rows of a session, L levels, D draft vocabulary, r rank of the Markov head, k children, P
candidates, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numba import float32, int64, njit
from torch import Tensor

from eyas.draft_protocol import TreeBudget
from eyas.models.cpu_kernels import multiply
from eyas.sampling.cpu_kernels import BLOCK, best_of, compile_all, exp, highest_of, ln, row_key, sum_of, uniform
from eyas.tensors import Floats, Ints
from eyas.tree import DraftTree

# Draft tokens whose biases are computed at a time.
COLUMNS = 256
NO_NOISE = np.zeros((0, 0, 0), np.float32)
NO_BIASES, NO_EMBEDDING = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.float32)


class CompiledGrowth:
    """Dynamic trees of heads that know all levels at once, and of a vanilla Markov head on top of them."""

    def __init__(self, draft_ids: Tensor, embedding: Tensor | None = None, weight: Tensor | None = None) -> None:
        """draft_ids: the target's ids, int64 [D]. embedding, weight: of the Markov head, [V, r] and [D, r]."""
        compile_kernels()
        self._draft_ids = draft_ids.numpy()
        self._embedding, self._weight = NO_EMBEDDING, NO_BIASES
        if embedding is not None and weight is not None:
            self._embedding, self._weight = embedding.detach().contiguous().numpy(), _in_blocks(weight.detach().numpy())

    def trees(
        self, logits: Tensor, roots: Sequence[int], words: Ints, has_noise: bool, budgets: Sequence[TreeBudget], top_k: int
    ) -> list[DraftTree]:
        """The trees of `grow_dynamic` and `select_nodes` in `eyas.drafters.tree_growth`.

        logits: of all levels, float32 [S, L, D]. roots: the target's ids. words: see `eyas.drafters.scoring.noise_words`.
        has_noise: whether a session shares its noise.
        """
        values = logits.contiguous().numpy()
        noise = np.empty(values.shape, np.float32) if has_noise else NO_NOISE
        if has_noise:
            shared_noise(words, self._draft_ids, noise)
        limits, depths = np.array([(b.max_nodes - 1, min(b.max_depth, values.shape[1])) for b in budgets]).T.copy()
        most = int(limits.max())
        cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float32)
        grow_trees(
            values, self._embedding, self._weight, np.array(roots), self._draft_ids, noise, words, limits, depths, top_k,
            cells, scores,
        )  # fmt: skip
        (tokens, parents), found = cells.tolist(), scores.tolist()
        return [
            DraftTree((root, *own[:n]), (0, *above[:n]), (0.0, *own_scores[:n]))
            for root, own, above, own_scores in zip(roots, tokens, parents, found, strict=True)
            for n in own[most:]
        ]


def _in_blocks(weight: Floats) -> Floats:
    """A weight [D, r] as the kernels read it: [D / COLUMNS, r, COLUMNS], padded with zeros."""
    size, rank = weight.shape
    padded = np.zeros((-(-size // COLUMNS) * COLUMNS, rank), np.float32)
    padded[:size] = weight
    return np.ascontiguousarray(padded.reshape(-1, COLUMNS, rank).transpose(0, 2, 1))


@njit(cache=True, nogil=True, inline="always")
def _real(words, row, session):
    """A float32 among the output of `eyas.drafters.scoring.noise_words`."""
    return np.float32(np.int64(words[row, session]).view(np.float64))


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def shared_noise(words, draft_ids, noise):
    """What the target's draws add to the logits, to noise [S, L, D]; 0 in sessions at temperature 0.

    words: see `eyas.drafters.scoring.noise_words`. draft_ids: the target's ids, int64 [D].
    """
    uniforms = np.empty(len(draft_ids), np.float64)
    for s in range(noise.shape[0]):
        temperature = _real(words, 4, s)
        for level in range(noise.shape[1]):
            row = noise[s, level]
            if temperature == 0:
                row[:] = np.float32(0.0)
                continue
            key = row_key(words[0, s], words[1, s] + level)
            for i in range(len(row)):
                uniforms[i] = uniform(key, draft_ids[i])
            for i in range(len(row)):
                # log1p in float32: the rounding of 1 - v is made up for by v / (1 - (1 - v))
                v, rest = np.float32(uniforms[i]), np.float32(1.0 - uniforms[i])
                lost = np.float32(1.0) - rest
                exponential = -ln(rest) * (v / lost) if lost > 0 else v
                row[i] = -ln(exponential) * temperature


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _score(logits, noise, by, scores, weights):
    """Logits [D] with noise [D], if there is some, times `by`, to scores; returns the logarithm of the sum of their
    exponentials. What is no number is never drafted. weights: scratch [D]."""
    for i in range(len(logits)):
        scores[i] = logits[i] if logits[i] < np.inf else -np.float32(np.inf)
    if len(noise):
        for i in range(len(logits)):
            scores[i] += noise[i]
    for i in range(len(logits)):
        scores[i] *= by
    top = highest_of(scores)
    if np.isinf(top):
        return np.float32(0.0)
    for i in range(len(logits)):
        weights[i] = exp(scores[i] - top)
    return top + ln(sum_of(weights))


@njit(cache=True, nogil=True, error_model="numpy")
def best_children(logits, words, noise, level, above, scores, ids):
    """The best children of nodes, best first, ties by lowest id: to scores and ids [S, R, k].

    logits: float32 [S, R, D]. words: see `shared_noise`. noise: [S, L, D], empty for none. above: scores [S, R] of the
    nodes, added to their children's.
    """
    size = logits.shape[2]
    row, weights = np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    for s in range(logits.shape[0]):
        by = np.float32(1.0) / _real(words, 5, s)
        own = noise[s, level] if len(noise) else weights[:0]
        for r in range(logits.shape[1]):
            log_sum = _score(logits[s, r], own, by, row, weights)
            best_of(row, maxima, scores[s, r], ids[s, r])
            for c in range(ids.shape[2]):
                scores[s, r, c] += above[s, r] - log_sum


@njit(cache=True, nogil=True, error_model="numpy")
def find_frontier(scores, tokens, num_children, before, has_parents, best, chosen, rows, parents):
    """As `eyas.drafters.tree_growth.find_frontier`, of scores and tokens [S, P], to arrays [S, W] and parents [S, W k]."""
    places = np.empty(best.shape[1], np.int64)
    maxima = np.empty((scores.shape[1] + BLOCK - 1) // BLOCK, np.float32)
    for s in range(scores.shape[0]):
        best_of(scores[s], maxima, best[s], places)
        for w in range(len(places)):
            place = places[w]
            chosen[s, w], rows[s, w] = tokens[s, place], place // num_children if has_parents else 0
            for c in range(num_children):
                parents[s, w * num_children + c] = before + 1 + place


@njit(cache=True, nogil=True, error_model="numpy")
def _add_biases(latents, weight, logits, biased):
    """Logits [D] with the biases of latents [R, r] by the weight of `_in_blocks`, to biased [R, D]."""
    block = np.empty((len(latents), COLUMNS), np.float32)
    for b in range(len(weight)):
        start, width = b * COLUMNS, min(COLUMNS, len(logits) - b * COLUMNS)
        block[:] = np.float32(0.0)
        multiply(latents, weight[b], block, 0, COLUMNS)
        for r in range(len(latents)):
            for i in range(width):
                biased[r, start + i] = block[r, i] + logits[start + i]


@njit(cache=True, nogil=True, error_model="numpy")
def _find_expanded(scores, first, count, limit, maxima, best, places, frontier):
    """The nodes of the last level to expand, best first, to `frontier` [k]; returns how many.

    A node whose score is not above that of `limit` candidates has no child among the best.
    """
    least = -np.float32(np.inf)
    if count >= limit:
        best_of(scores[:count], maxima, best[:limit], places[:limit])
        least = best[limit - 1]
    num = min(len(frontier), count - first)
    best_of(scores[first:count], maxima, best[:num], frontier[:num])
    width = 0
    while width < num and best[width] > least:
        frontier[width] += first
        width += 1
    return width


@njit(cache=True, nogil=True, error_model="numpy")
def _grow_tree(logits, embedding, weight, root, draft_ids, noise, by, limit, depth, k, scores, tokens, parents):
    """Record candidates of one session, level by level: scores, draft ids and parents [P]. Returns how many there are."""
    size, rank = logits.shape[1], embedding.shape[1]
    row, weights = np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty((max(size, len(scores)) + BLOCK - 1) // BLOCK, np.float32)
    best, places = np.empty(max(limit, k), np.float32), np.empty(max(limit, k), np.int64)
    latents, biased = np.empty((k, rank), np.float32), np.empty((k, size if rank else 0), np.float32)
    child_scores, child_tokens, log_sum = np.empty(k, np.float32), np.empty(k, np.int64), np.float32(0.0)
    count, first, width, frontier = 0, 0, 1, np.zeros(k, np.int64)  # first: of the last level's candidates
    for level in range(depth):
        if level:
            width = _find_expanded(scores, first, count, limit, maxima, best, places, frontier)
        if rank and width:
            for w in range(width):
                latents[w] = embedding[draft_ids[tokens[frontier[w]]] if level else root]
            _add_biases(latents[:width], weight, logits[level], biased[:width])
        first, own = count, noise[level] if len(noise) else weights[:0]
        for w in range(width):
            if rank or w == 0:  # without a Markov head the scores are the same below all nodes
                log_sum = _score(biased[w] if rank else logits[level], own, by, row, weights)
                best_of(row, maxima, child_scores, child_tokens)
            above, parent = (scores[frontier[w]], frontier[w] + 1) if level else (np.float32(0.0), 0)
            for c in range(k):
                scores[count], tokens[count] = child_scores[c] - log_sum + above, child_tokens[c]
                parents[count] = parent
                count += 1
        if not width:
            break
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def grow_trees(logits, embedding, weight, roots, draft_ids, noise, words, limits, depths, k, cells, scores):
    """Grow dynamic trees and select their best nodes, as `grow_dynamic` and `select_nodes` of
    `eyas.drafters.tree_growth` do.

    Args:
        logits: of all levels, without biases, float32 [S, L, D].
        embedding, weight: of a vanilla Markov head, [V, r] and as `_in_blocks` gives it; empty without one.
        roots: the target's ids, int64 [S].
        draft_ids: the target's ids, int64 [D].
        noise, words: see `best_children`.
        limits, depths: most drafted nodes and levels, int64 [S].
        k: nodes that are expanded at a level, and children of a node.
        cells: to these go the target's ids and the parents of the drafted nodes, int64 [2, S, N], and their number [S] to
            cells[0, :, N - 1].
        scores: to these go their scores, float32 [S, N - 1].
    """
    room = k + max(logits.shape[1] - 1, 0) * k * k
    all_scores, all_tokens = np.empty(room, np.float32), np.empty(room, np.int64)
    all_parents, numbers = np.empty(room, np.int64), np.empty(room + 1, np.int64)
    most = scores.shape[1]
    best, places = np.empty(most, np.float32), np.empty(most, np.int64)
    maxima = np.empty((room + BLOCK - 1) // BLOCK, np.float32)
    for s in range(len(roots)):
        own, by = noise[s] if len(noise) else NO_NOISE_ROWS, np.float32(1.0) / _real(words, 5, s)
        count = _grow_tree(
            logits[s], embedding, weight, roots[s], draft_ids, own, by, limits[s], depths[s], k,
            all_scores, all_tokens, all_parents,
        )  # fmt: skip
        num = min(limits[s], count)
        best_of(all_scores[:count], maxima, best[:num], places[:num])
        numbers[: count + 1] = 0
        for n in range(num):
            numbers[places[n] + 1] = 0 if np.isinf(best[n]) else 1
        node = 0
        for c in range(count):
            if numbers[c + 1]:
                scores[s, node], cells[0, s, node] = all_scores[c], draft_ids[all_tokens[c]]
                cells[1, s, node] = numbers[all_parents[c]]
                node += 1
                numbers[c + 1] = node
        cells[0, s, most] = node


NO_NOISE_ROWS = np.zeros((0, 0), np.float32)


@cache
def compile_kernels() -> None:
    """Compile the kernels of growth, once for each installation; other processes and later ones load the result."""
    rows, cube, ids, words = float32[:, ::1], float32[:, :, ::1], int64[::1], int64[:, ::1]
    compile_all(
        {
            shared_noise: (words, ids, cube),
            grow_trees: (cube, rows, cube, ids, ids, cube, words, ids, ids, int64, int64[:, :, ::1], rows),
        }
    )
