"""The draft trees of a step on the host, compiled with numba.

`eyas.kernels.plain.trees` has the same functions in NumPy, except `tree_words`, for which `words_of_all` of
`eyas.models.backends.attention_metadata` stands in. Arrays are contiguous. Legend: B trees, R nodes of all of them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import int32, int64

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


@cache
def compile_kernels() -> None:
    """Compile the kernels for trees, once for each installation; other processes and later ones load the result."""
    ids = int64[::1]
    compile_all(
        {
            are_valid: (ids, ids, ids, int64[:, ::1], int64),
            layout: (ids, ids),
            accepted_rows: (ids, ids, ids, ids),
            tree_words: (ids, ids, ids, ids, int32[:, ::1], ids, ids, ids),
        }
    )
