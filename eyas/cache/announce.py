"""What a prefix cache tells others of itself: a radix tree in, hashes of its token blocks out, the most useful ones first.

Integers only; knows no network.
"""

from __future__ import annotations

import heapq
import itertools
import math

from eyas.cache.radix import Node, RadixTree
from eyas.prefixes import BLOCK_TOKENS, BlockHasher


def cached_blocks(tree: RadixTree, limit: int) -> list[int]:
    """Hashes of at most `limit` blocks of the tree: what is held, then what was of use last. No block without those before
    it; work is proportional to `limit`, whatever the tree's size."""
    found: list[int] = []
    numbers = itertools.count()
    heap: list[tuple[float, int, Node, BlockHasher]] = []

    def offer(node: Node, hasher: BlockHasher) -> None:
        for child in node.children.values():
            heapq.heappush(heap, (-math.inf if child.holders else -child.used, next(numbers), child, hasher))

    offer(tree.root, BlockHasher())
    while heap and len(found) < limit:
        _, _, node, above = heapq.heappop(heap)
        hasher = above.copy()
        found += hasher.update(node.tokens[: (limit - len(found)) * BLOCK_TOKENS].tolist())
        offer(node, hasher)
    return found
