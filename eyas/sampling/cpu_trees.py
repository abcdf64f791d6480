"""Draft trees of a step on the host, compiled with numba; `eyas.sampling.packed_trees` has the plain way of each kernel.

Also the words of a pass over them, in the layout of eyas.models.cuda.metadata. Legend: B trees, R nodes of all of them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import int64

from eyas.sampling.cpu_kernels import compile_all, kernel


@kernel(error_model="numpy")
def are_valid(counts, tokens, parents, bounds, vocab_size):
    """Whether nodes keep to the limits and come after their parents. bounds: the lists of TreeLimits [3, B]."""
    depths, start = np.empty(counts.max(), np.int64), 0
    for b in range(len(counts)):
        if counts[b] > bounds[1, b] or tokens[start] != bounds[0, b] or parents[start] != 0:
            return False
        depths[0] = 0
        for node in range(counts[b]):
            token, parent = tokens[start + node], parents[start + node]
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
    """`above`, `roots`, `depths` and `words` of PackedTrees. A node sees what its parent sees, and itself."""
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
            words[row, node >> 6] |= np.uint64(1) << np.uint64(node & 63)
        start += counts[b]
    return above, roots, depths, words


@kernel(error_model="numpy")
def accepted_rows(counts, tokens, above, samples):
    """Rows of the accepted paths of all trees, and where each path ends among these. Children stand behind their parent."""
    rows, ends = np.empty(len(tokens), np.int64), np.empty(len(counts), np.int64)
    found, start = 0, 0
    for b in range(len(counts)):
        last = start
        rows[found] = last
        found += 1
        for row in range(start + 1, start + counts[b]):
            if above[row] == last and tokens[row] == samples[last]:
                last = row
                rows[found] = row
                found += 1
        ends[b] = found
        start += counts[b]
    return rows[:found].copy(), ends


@cache
def compile_kernels() -> None:
    """Compile these kernels, once for each installation; other processes and later ones load the result."""
    ids, words = int64[::1], int64[:, ::1]
    compile_all(
        {
            are_valid: (ids, ids, ids, words, int64),
            layout: (ids, ids),
            accepted_rows: (ids, ids, ids, ids),
        }
    )
