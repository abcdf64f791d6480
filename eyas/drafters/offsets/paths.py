"""Which nodes a static tree has where nobody names them: sizes in, rank paths out. Knows no heads."""

from __future__ import annotations

import heapq
import math

from eyas.config import TreeConfig, TreePaths

# Of the chance that a child is the right one: it falls as (rank + 1) ** -DECAY, and is KNOWN for all children together.
DECAY = 1.6
KNOWN = 0.9


def likely_paths(tree: TreeConfig) -> TreePaths:
    """The `nodes - 1` likeliest paths of at most `depth` ranks below `width`, best first, if the chance of a child
    depends on its rank alone."""
    chances = [(rank + 1.0) ** -DECAY for rank in range(tree.width)]
    costs = [-math.log(KNOWN * chance / math.fsum(chances)) for chance in chances]
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while waiting and len(paths) < tree.nodes:
        cost, length, path = heapq.heappop(waiting)
        paths.append(path)
        if length < tree.depth:
            for rank, further in enumerate(costs):
                heapq.heappush(waiting, (cost + further, length + 1, (*path, rank)))
    return tuple(paths[1:])
