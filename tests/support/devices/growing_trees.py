"""Steps of trees whose prefixes grow, and how many calls a function takes."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from eyas.models.inputs import SegmentRows, Segments
from eyas.protocol.commit import NoiseKey
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import pack_trees

Out = TypeVar("Out")


def batch_of_trees(prefixes: list[np.ndarray], nodes: int = 16, version: int = 0) -> Segments:
    """A tree behind each prefix, its nodes in slots of their own."""
    tree = DraftTree.of(tuple(range(nodes)), (0, *range(nodes - 1)), (0.0,) * nodes)
    packed = pack_trees([tree] * len(prefixes))
    positions = packed.depths + np.repeat([len(prefix) for prefix in prefixes], nodes)
    keys, tables = [NoiseKey(n, 1.0) for n in range(len(prefixes))], [(n, version) for n in range(len(prefixes))]
    rows = np.arange(len(positions))
    arrays = SegmentRows(packed.nodes.tokens, positions, 2**24 + rows, rows, packed.nodes.counts)
    return Segments(arrays, prefixes, keys, tables, [None] * len(prefixes), packed)


def grown_steps(context: int, poison: bool = False, sequences: int = 64) -> Iterator[Segments]:
    """Four steps of trees whose prefixes grow by a few slots. poison: only the last slot of the known ones is right."""
    rng = np.random.default_rng(0)
    memory, length = [rng.integers(0, 2**24, context + 100) for _ in range(sequences)], context
    for step in range(4):
        yield batch_of_trees([own[:length] for own in memory])
        for number, own in enumerate(memory if poison else ()):
            own[: length - 1] = -1 - 4 * number - step
        length += 5


def counted(run: Callable[[], Out]) -> tuple[Out, int]:
    """What a function returns, and the calls of Python and of C that it takes."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        found = run()
    finally:
        sys.setprofile(None)
    return found, calls["call"] + calls["c_call"]
