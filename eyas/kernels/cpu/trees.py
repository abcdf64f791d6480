"""Draft trees on the host, compiled with numba: of a step, of a `GrownTree`, and of two drafters as one.

`eyas.kernels.plain.trees` has the same functions in NumPy, except `tree_words`, for which `words_of_all` of
`eyas.models.backends.attention_metadata` stands in. Arrays are contiguous. Legend: B trees, R nodes of all of them;
E expanded nodes and C candidates of each in a `GrownTree`; S sessions, T trees of two drafters, K nodes.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import boolean, float64, int32, int64

from eyas.kernels.cpu.compiling import compile_all, kernel


@kernel(error_model="numpy")
def are_valid(counts, tokens, parents, bounds, vocab_size):
    """Check that nodes keep to the limits and come after their parents. bounds: roots, most nodes, most levels [3, B]."""
    depths, start = np.empty(counts.max(), np.int64), 0
    for b in range(len(counts)):
        if counts[b] > bounds[1, b] or tokens[start] != bounds[0, b] or parents[start] != 0:
            return False
        depths[0] = 0
        for node in range(counts[b]):
            token, parent = tokens[start + node], parents[start + node]
            # A parent comes before its children; the root is its own parent.
            if token < 0 or token >= vocab_size or parent < 0 or parent >= max(node, 1):
                return False
            if node:
                depths[node] = depths[parent] + 1
            if depths[node] > bounds[2, b]:
                return False
        start += counts[b]
    return True


@kernel(error_model="numpy")
def layout(counts, parents):
    """Return `above`, `roots`, `depths` and `words` of PackedTrees. A node sees what its parent sees, and itself."""
    num_rows, width = len(parents), (counts.max() + 63) // 64
    above, roots, depths = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), np.zeros(num_rows, np.int64)
    words, start = np.zeros((num_rows, width), np.uint64), 0
    for b in range(len(counts)):
        for node in range(counts[b]):
            row, parent = start + node, start + parents[start + node]
            above[row], roots[row] = parent, start
            if node:
                depths[row] = depths[parent] + 1
                for w in range(width):
                    words[row, w] = words[parent, w]
            # Bit `node` of a row of words says that the row sees the node: its ancestors' bits and its own.
            words[row, node >> 6] |= np.uint64(1) << np.uint64(node & 63)
        start += counts[b]
    return above, roots, depths, words


@kernel(error_model="numpy")
def accepted_rows(counts, tokens, above, samples):
    """Return the rows of the accepted paths of all trees, and where each path ends among these. Children stand behind their
    parent.
    """
    rows, ends = np.empty(len(tokens), np.int64), np.empty(len(counts), np.int64)
    found, start = 0, 0
    for b in range(len(counts)):
        last = start
        rows[found] = last
        found += 1
        for row in range(start + 1, start + counts[b]):
            # One walk down the rows finds the path, as children come after their parent: the first child of the last
            # accepted node with the token that the target drew there is the next one.
            if above[row] == last and tokens[row] == samples[last]:
                last = row
                rows[found] = row
                found += 1
        ends[b] = found
        start += counts[b]
    return rows[:found].copy(), ends


@kernel(error_model="numpy")
def ranges(firsts, counts):
    """Return `counts` consecutive numbers from each of `firsts`, one range after the other."""
    numbers, at = np.empty(counts.sum(), np.int64), 0
    for b in range(len(counts)):
        for i in range(counts[b]):
            numbers[at] = firsts[b] + i
            at += 1
    return numbers


@kernel(error_model="numpy")
def tree_words(tokens, positions, slots, counts, seen, lengths, prefixes, sizes):
    """Return the words of a pass over trees, see eyas.models.backends.attention_metadata.

    Args:
        tokens, positions, slots: of the nodes [R].
        seen: `words` of PackedTrees as int32 [R, 2 W].
        lengths, prefixes: of each tree's prefix, and where it begins [B].
        sizes: rows with padding, rows aligned, rows of a tile, tiles, words of each, padding's slot.
    """
    num_rows, line, tile_rows, tile_words, scratch = sizes[0], sizes[1], sizes[2], sizes[4], sizes[5]
    # Layout of the words: tokens, positions, slots and rows of logits [line] each, then tiles, then masks.
    masks, num_masks = 4 * line + tile_words * sizes[3], 0
    num_tiles = (num_rows - len(tokens) + tile_rows - 1) // tile_rows
    for b in range(len(counts)):
        num_masks += counts[b] * ((counts[b] + 31) // 32)
        num_tiles += (counts[b] + tile_rows - 1) // tile_rows
    if num_tiles > sizes[3]:
        raise ValueError("the trees have more tiles than the pass")
    words = np.zeros(masks + num_masks, np.int32)
    for row in range(len(tokens)):
        words[row], words[line + row] = tokens[row], positions[row]
        words[2 * line + row], words[3 * line + row] = slots[row], row
    for row in range(len(tokens), line):
        words[2 * line + row] = scratch
    start, at, tile = 0, masks, 4 * line
    for b in range(len(counts)):
        stride = (counts[b] + 31) // 32
        for first in range(0, counts[b], tile_rows):
            count = min(tile_rows, counts[b] - first)
            # Of a tile: its first row and rows; the tree's first row and the words of a mask; length and place of the
            # prefix; place of the tile's first mask, and how many of the tree's nodes its rows may see.
            words[tile], words[tile + 1], words[tile + 2], words[tile + 3] = start + first, count, start, stride
            words[tile + 4], words[tile + 5] = lengths[b], prefixes[b]
            words[tile + 6], words[tile + 7] = at + first * stride, first + count
            tile += tile_words
        for row in range(start, start + counts[b]):
            for w in range(stride):
                words[at] = seen[row, w]
                at += 1
        start += counts[b]
    for first in range(start, num_rows, tile_rows):  # padding, which sees nothing
        words[tile], words[tile + 1] = first, min(tile_rows, num_rows - first)
        tile += tile_words
    return words


@kernel(error_model="numpy")
def rank_nodes(tokens, parents, candidates, scores, cumulative, expanded):
    """Find the places of a tree's nodes among the candidates of their parents, see `GrownTree`.

    tokens, parents [E], candidates, scores [E, C]. To cumulative [E] go the nodes' scores, minus infinity for one that is no
    candidate; to expanded [E * C] the number of each candidate's node, else 0.
    """
    width = candidates.shape[1]
    cumulative[0] = 0.0
    expanded[:] = 0
    for node in range(1, len(tokens)):
        above = parents[node]
        cumulative[node] = -np.inf
        for place in range(width):
            if candidates[above, place] == tokens[node]:
                cumulative[node] = scores[above, place] + cumulative[above]
                expanded[above * width + place] = node
                break


@kernel(error_model="numpy")
def _sift(worths, places, num):
    """Move the first entry of a heap down to where it belongs. On top is the least worth, of equal ones the last place."""
    worth, place, hole = worths[0], places[0], 0
    # Sift down: move the smaller child up until the hole fits the entry.
    while 2 * hole + 1 < num:
        child = 2 * hole + 1
        if child + 1 < num:
            left, right = worths[child], worths[child + 1]
            child += right < left or (right == left and places[child + 1] > places[child])
        if worth < worths[child] or (worth == worths[child] and place > places[child]):
            break
        worths[hole], places[hole] = worths[child], places[child]
        hole = child
    worths[hole], places[hole] = worth, place


@kernel(error_model="numpy")
def best_rows(expanded, scores, cumulative, depths, is_exact, max_depth, least, repair, places, worths):
    """Write the most useful candidates of a tree, see `GrownTree.useful`, to places and worths [R], the best first.

    Returns how many there are.

    Args:
        least: new nodes must have more.
        repair: added to the worth of nodes that are outdated.
    """
    width, room, num = scores.shape[1], len(places), 0
    for node in range(len(depths)):
        has_room = depths[node] < max_depth - 1
        for place in range(width):
            number, worth = expanded[node * width + place], cumulative[node] + scores[node, place]
            # A candidate that is a node already is of use if its parent is exact and it is not: the pass repairs it.
            if number:
                if is_exact[number] or not is_exact[node]:
                    continue
                worth += repair
            elif not has_room or not worth > least:
                continue
            if not worth > -np.inf or (num == room and worth <= worths[0]):
                continue
            # The heap has the worst of the best on top, which a better candidate replaces.
            if num == room:  # in place of the worst
                worths[0], places[0] = worth, node * width + place
                _sift(worths, places, num)
                continue
            hole, num = num, num + 1
            while hole and worth <= worths[(hole - 1) // 2]:  # places grow: of equal ones, this one is the worst
                worths[hole], places[hole] = worths[(hole - 1) // 2], places[(hole - 1) // 2]
                hole = (hole - 1) // 2
            worths[hole], places[hole] = worth, node * width + place
    # Heap sort: the worst goes to the end, place by place, so that the best comes first.
    for end in range(num - 1, 0, -1):
        worth, place = worths[end], places[end]
        worths[end], places[end] = worths[0], places[0]
        worths[0], places[0] = worth, place
        _sift(worths, places, end)
    return num


@kernel(error_model="numpy")
def mark_above(nodes, parents, seen):
    """Mark of each row the node above it, [R], and all nodes above that except the root: to seen [R, E], all False."""
    for row in range(len(nodes)):
        node = nodes[row]
        while node:
            seen[row, node] = True
            node = parents[node]


@kernel(error_model="numpy")
def take_best(scores, num, limit, is_taken):
    """Mark the `limit` highest of the first scores that are finite, the earlier ones on a tie."""
    is_taken[:num] = False
    for _ in range(limit):
        best = -1
        for i in range(num):
            if not is_taken[i] and np.isfinite(scores[i]) and (best < 0 or scores[i] > scores[best]):
                best = i
        if best < 0:
            break
        is_taken[best] = True


@kernel(error_model="numpy")
def _find_firsts(tokens, parents, values, starts, num, firsts, levels, better):
    """Find, for each node of a session's trees, the first one with the same path, its level, and its score, at most its
    parent's.
    """
    tree = 0
    for i in range(num):
        if tree + 1 < len(starts) and i == starts[tree + 1]:
            tree += 1
        if i == starts[tree]:
            firsts[i], levels[i], better[i] = 0, 0, values[i]
            continue
        parent = starts[tree] + parents[i]
        value = values[i] if values[i] > -np.inf else -np.inf  # NaN too
        levels[i], better[i] = levels[parent] + 1, min(value, better[parent])
        first = i
        # Two nodes are the same if their tokens are and the first ones of their parents are.
        for j in range(1, i):
            if firsts[j] == j and levels[j] == levels[i] and tokens[j] == tokens[i]:
                owner = 0
                while owner + 1 < len(starts) and starts[owner + 1] <= j:
                    owner += 1
                if firsts[starts[owner] + parents[j]] == firsts[parent]:
                    first = j
                    break
        firsts[i] = first


@kernel(error_model="numpy")
def _choose(scores, is_reserved, limit, ranked, is_taken):
    """Mark the `limit` best nodes, all reserved ones before any other.

    Args:
        ranked, is_taken: room to work in.
    """
    num, left = len(scores), limit
    is_chosen = np.zeros(num, np.bool_)
    for turn in range(2):  # the reserved ones first
        for i in range(num):
            ranked[i] = scores[i] if is_reserved[i] == (turn == 0) else -np.inf
        take_best(ranked, num, left, is_taken)
        for i in range(num):
            is_chosen[i] |= is_taken[i]
            left -= is_taken[i]
    return is_chosen


@kernel(error_model="numpy")
def merge(counts, sizes, tokens, parents, values, limits, depths, min_share, cells, out):
    """Write the best nodes of each session's trees, see `eyas.drafters.combined`; outputs as of `drafting.grow_trees`.

    Args:
        counts: trees of each session [S].
        sizes: nodes of each tree [T].
    """
    tree = begin = 0
    for s in range(len(limits)):
        starts = np.zeros(counts[s] + 1, np.int64)
        for t in range(counts[s]):
            starts[t + 1] = starts[t] + sizes[tree + t]
        num = starts[-1]
        nodes, above, own = tokens[begin : begin + num], parents[begin : begin + num], values[begin : begin + num]
        firsts, levels, scores = np.empty(num, np.int64), np.empty(num, np.int64), np.empty(num, np.float64)
        _find_firsts(nodes, above, own, starts[:-1], num, firsts, levels, scores)
        ranked, is_taken, is_reserved = np.empty(num, np.float64), np.empty(num, np.bool_), np.zeros(num, np.bool_)
        better, share = np.full(num, -np.inf), math.floor(min_share * limits[s])
        for t in range(counts[s]):
            first, end = starts[t], starts[t + 1]
            ranked[:] = -np.inf
            for i in range(first, end):
                if 0 < levels[i] <= depths[s]:
                    # By the first node with the same path, so that ties go to the node that came first in any tree.
                    ranked[firsts[i]] = max(ranked[firsts[i]], scores[i])
                    better[firsts[i]] = max(better[firsts[i]], scores[i])
            # Each tree first takes its share of the nodes, whatever the other tree's scores are.
            take_best(ranked, num, share, is_taken)
            is_reserved |= is_taken
        is_chosen = _choose(better, is_reserved, limits[s], ranked, is_taken)
        numbers, count, t = np.zeros(num, np.int64), 0, 0
        for i in range(num):
            if i == starts[t + 1]:
                t += 1
            # A node stands for all nodes with its path: its parent's number is that of the parent's first one.
            if is_chosen[i]:
                cells[0, s, count], cells[1, s, count] = nodes[i], numbers[firsts[starts[t] + above[i]]]
                out[s, count] = better[i]
                count += 1
                numbers[i] = count
        cells[0, s, -1] = count
        tree += counts[s]
        begin += num


@cache
def compile_kernels() -> None:
    """Compile the kernels for trees, once for each installation; other processes and later ones load the result."""
    ids, words, reals, table = int64[::1], int64[:, ::1], float64[::1], float64[:, ::1]
    compile_all(
        {
            are_valid: (ids, ids, ids, words, int64),
            layout: (ids, ids),
            accepted_rows: (ids, ids, ids, ids),
            ranges: (ids, ids),
            tree_words: (ids, ids, ids, ids, int32[:, ::1], ids, ids, ids),
            rank_nodes: (ids, ids, words, table, reals, ids),
            best_rows: (*(ids, table, reals, ids, boolean[::1], int64), *(float64, float64, ids, reals)),
            mark_above: (ids, ids, boolean[:, ::1]),
            merge: (*(ids, ids, ids, ids, reals), *(ids, ids, float64, int64[:, :, ::1], table)),
        }
    )
