"""Random passes for tests of attention, and attention written out: one query at a time, in float64."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from eyas.models.inputs import Segment, Segments
from eyas.protocol.tree import DraftTree


@dataclass(frozen=True)
class Heads:
    """Query heads, key-value heads, their width, that of values if it is another, and the sink of the first query head."""

    query: int
    kv: int
    width: int
    value_width: int = 0
    sink: float | None = None

    @property
    def sinks(self) -> Tensor | None:
        """Of each query head, one smaller than that before it."""
        return None if self.sink is None else self.sink - torch.arange(self.query) / 2


@dataclass(frozen=True)
class RandomKV:
    keys: Tensor
    values: Tensor


def make_kv_cache(num_slots: int, heads: Heads, seed: int, dtype: torch.dtype) -> RandomKV:
    """Noise in float64 that `dtype` can hold; the last slot is for padding and must never be read."""
    generator = torch.Generator().manual_seed(seed)
    widths = heads.width, heads.value_width or heads.width
    keys, values = (torch.randn(num_slots + 1, heads.kv, w, generator=generator).to(dtype).double() for w in widths)
    keys[-1] = values[-1] = float("nan")
    return RandomKV(keys, values)


@st.composite
def passes(draw: st.DrawFn, max_segments: int = 4, max_rows: int = 12, max_prefix: int = 40) -> Segments:
    """Trees and prompt chunks over prefixes of any length, in scattered slots."""
    seed = draw(st.integers(0, 2**16))
    sizes = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(1, max_rows), st.integers(0, max_prefix)), min_size=1, max_size=max_segments
        )
    )
    return make_pass(sizes, seed)


def make_pass(sizes: list[tuple[bool, int, int]], seed: int = 0) -> Segments:
    """Segments of (is it a tree, rows, prefix length); tokens are below 48. Slots 0 up to `num_slots`, shuffled."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_slots(sizes))
    segments = []
    for is_tree, count, length in sizes:
        tokens = rng.integers(3, 48, count)
        own, prefix, slots = slots[:count], slots[count : count + length], slots[count + length :]
        if is_tree:
            parents = (0, *(int(rng.integers(node)) for node in range(1, count)))
            tree = DraftTree.of(tuple(tokens.tolist()), parents, (0.0,) * count)
            positions, visible, wanted = length + np.array(tree.depths), tree.ancestor_mask(), np.arange(count)
        else:
            positions, visible, wanted = length + np.arange(count), None, np.array([count - 1])
        segments.append(Segment(tokens, positions, own, prefix, visible, wanted))
    return Segments.of(segments)


def behind_others(segment: Segment, count: int) -> Segment:
    """The rows of a tree behind the first `count`, which have been run before."""
    assert segment.visible is not None
    tokens, positions, slots = (x[count:] for x in (segment.tokens, segment.positions, segment.slots))
    wanted = np.arange(len(tokens))
    return Segment(tokens, positions, slots, segment.prefix, segment.visible[count:], wanted, None, segment.slots[:count])


def num_slots(sizes: list[tuple[bool, int, int]]) -> int:
    """Number of slots that a pass of these sizes needs."""
    return sum(count + length for _, count, length in sizes)


def naive(
    query: Tensor,
    kv_cache: RandomKV,
    segments: Segments,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of query [R, H, D], float64, row by row and head by head. A sink is one more score, dropped behind the
    softmax.
    """
    out, row = query.new_zeros(*query.shape[:2], kv_cache.values.shape[2]), 0
    group = query.shape[1] // kv_cache.keys.shape[1]
    for segment in segments:
        length = len(segment.prefix)
        visible = np.tri(len(segment.tokens), dtype=bool) if segment.visible is None else segment.visible
        for i in range(len(segment.tokens)):
            seen = [(slot, at) for at, slot in enumerate(segment.prefix)]
            seen += [(segment.others[j], length + j) for j in np.flatnonzero(visible[i][: len(segment.others)])]
            seen += [(segment.slots[j], segment.positions[j]) for j in np.flatnonzero(visible[i][len(segment.others) :])]
            slots = [int(slot) for slot, at in seen if window is None or segment.positions[i] - at < window]
            for head in range(query.shape[1]):
                scores = kv_cache.keys[slots, head // group] @ query[row, head] * scaling
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, None].to(scores)])
                out[row, head] = torch.softmax(scores, 0)[: len(slots)] @ kv_cache.values[slots, head // group]
            row += 1
    return out


def scaling_of(heads: Heads) -> float:
    """The usual scale of scores."""
    return 1 / math.sqrt(heads.width)
