"""The kernels of recurrent layers equal their plain forms: outputs, states, marks and stash.

Where there is no GPU they run in triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.arrays import NO_ROWS, Ints
from eyas.cache.state_pools import LayerStates
from eyas.cache.states import START, StateStep
from eyas.kernels.arguments import BLOCK_ROWS, RecurrentInputs
from eyas.kernels.plain import recurrent as plain
from eyas.models.inputs import Segment
from eyas.models.recurrent_rows import RecurrentRows

pytest.importorskip("triton", reason="triton is not installed")

from eyas.kernels.cuda import recurrent as kernel
from tests.support.tiers import nightly, tiered

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, BF16 = torch.float32, torch.bfloat16
SCRATCH, NUM_STASHED = 20, 400


class Sizes(NamedTuple):
    """Heads and widths of a layer."""

    key_heads: int
    heads: int
    key: int
    value: int


class Layer:
    """Random rows and pools of a layer with the segments of a pass. Row START of the pools is zero."""

    def __init__(self, sizes: Sizes, segments: Sequence[Segment], is_delta: bool, dtype: torch.dtype, slow: float = 1.0):
        self._generator = torch.Generator().manual_seed(0)
        self.rows = RecurrentRows(segments, SCRATCH, DEVICE)
        count = sum(len(s.tokens) for s in segments)
        key_heads, heads, key, value = sizes
        # As from a convolution: queries, keys and values lie next to each other in a row.
        mixed = self._randn(count, 2 * key_heads * key + heads * value).to(dtype)
        parts = mixed.split([key_heads * key, key_heads * key, heads * value], -1)
        queries, keys, values = (x.unflatten(-1, (-1, width)) for x, width in zip(parts, (key, key, value), strict=True))
        gates = -slow * self._randn(count, heads).abs()
        betas = torch.sigmoid(self._randn(count, heads)).to(dtype)
        self.inputs = RecurrentInputs(queries, keys, values, gates, betas, is_delta)
        states = self._randn(SCRATCH + 1, heads, key, value)
        states[START] = 0
        stash = (self._randn(NUM_STASHED, heads, key) / key**0.5, self._randn(NUM_STASHED, heads, value))
        sums = -slow * torch.arange(NUM_STASHED, device=DEVICE)[:, None] * torch.rand(heads, generator=self._generator)
        self.pools = LayerStates(states, states[:0], *stash, sums, states[:0])

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(DEVICE)

    def check(self, tolerance: float = 1e-5) -> None:
        """Fail where kernel and plain form differ."""
        names = "states", "keys", "updates", "sums"
        both = [replace(self.pools, **{name: getattr(self.pools, name).clone() for name in names}) for _ in "12"]
        with torch.inference_mode():
            expected, found = (way.scan(self.inputs, own, self.rows) for way, own in zip((plain, kernel), both, strict=True))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for name in names:
            right, ours = (getattr(own, name) for own in both)
            # Segments without a sequence leave anything in the last row.
            ends = (SCRATCH,) if name == "states" else (NUM_STASHED,)
            torch.testing.assert_close(ours[: ends[0]], right[: ends[0]], rtol=tolerance, atol=tolerance, msg=name)
            if name == "states":
                assert not torch.equal(right, self.pools.states), "nothing was written"


def segment(count: int, states: StateStep | None, parents: Ints | None = None) -> Segment:
    """A chain, or a tree whose rows have these parents; that of the root is -1."""
    rows = np.arange(count)
    visible = None
    if parents is not None:
        visible = np.eye(count, dtype=np.bool_)
        for row in rows[1:]:
            visible[row] |= visible[parents[row]]
    return Segment(rows, rows, rows, rows[:0], visible, rows, states=states)


def bushy(count: int, seed: int = 0) -> Ints:
    """Parents of a random tree: siblings at each depth."""
    generator = np.random.default_rng(seed)
    return np.array([-1, *(int(generator.integers(max(0, row - 6), row)) for row in range(1, count))])


NARROW = Sizes(2, 4, 8, 8)
ROOT = np.array([-1])


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("count", tiered((1, 16, 17, 63, 64, 65), (1, 17, 64)))
def test_chains_equal_the_plain_form(count: int, is_delta: bool) -> None:
    """Each from a state and from the first token, with states kept inside."""
    marks = ((1, 12), (count // 2, 13), (count, 14)) if count > 2 else ()
    segments = [segment(count, StateStep(3, 4, marks=marks)), segment(count, StateStep(START, 5))]
    Layer(NARROW, segments, is_delta, torch.float32).check()


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("count", tiered((2, 16, 32, 33, 64, 100), (2, 33, 100)))
def test_trees_equal_the_plain_form(count: int, is_delta: bool) -> None:
    """Behind an accepted path of the last tree, which spans several blocks of the stash, and behind none."""
    pending = 200 + np.array([0, 1, 2, 5, 8, *range(20, 60, 2)])
    segments = [
        segment(count, StateStep(3, 4, pending, stash=0), bushy(count)),
        segment(count, StateStep(5, 6, stash=count), bushy(count, seed=1)),
    ]
    Layer(NARROW, segments, is_delta, torch.float32, slow=0.1).check()


@pytest.mark.parametrize("is_delta", [True, False])
def test_segments_of_unlike_sizes_equal_the_plain_form(is_delta: bool) -> None:
    """A lone root behind a path, a prompt, a tree in a chain's shape, a deep chain, trees without sequences."""
    segments = [
        segment(1, StateStep(3, 4, np.array([200]))),
        segment(70, StateStep(START, 5, marks=((40, 12),))),
        segment(9, StateStep(6, 7, np.array([201, 203]), stash=0)),
        segment(33, StateStep(8, 9, stash=9), bushy(33)),
        segment(3, None, np.array([-1, 0, 0])),
        segment(2, None),
        segment(1, StateStep(3, 10, stash=42), ROOT),
    ]
    Layer(NARROW, segments, is_delta, torch.float32).check()


@pytest.mark.parametrize(("sizes", "dtype", "is_delta"), [  # all pairs
    (Sizes(1, 1, 8, 8), F32, True), (Sizes(4, 4, 24, 40), F32, False), nightly(Sizes(1, 3, 128, 128), F32, False),
    nightly(Sizes(2, 4, 128, 64), F32, True), nightly(Sizes(1, 1, 8, 8), BF16, False), (Sizes(4, 4, 24, 40), BF16, True),
    nightly(Sizes(1, 3, 128, 128), BF16, True), (Sizes(2, 4, 128, 64), BF16, False),
])  # fmt: skip
def test_any_heads_widths_and_types_equal_the_plain_form(sizes: Sizes, dtype: torch.dtype, is_delta: bool) -> None:
    segments = [segment(11, StateStep(3, 4, 200 + np.arange(3), stash=0), bushy(11)), segment(40, StateStep(START, 5))]
    Layer(sizes, segments, is_delta, dtype).check()


@pytest.mark.parametrize("count", [64, BLOCK_ROWS])
def test_equal_keys_lose_no_digits(count: int) -> None:
    """A series of products would cancel to nothing here: its terms grow as binomial coefficients."""
    layer = Layer(NARROW, [segment(count, StateStep(3, 4)), segment(count, StateStep(5, 6, stash=0))], True, torch.float32)
    keys = layer.inputs.keys[:1].expand_as(layer.inputs.keys)
    betas = torch.ones_like(layer.inputs.betas)
    layer.inputs = layer.inputs._replace(keys=keys, gates=0 * layer.inputs.gates, betas=betas)
    layer.check(1e-4)


def test_large_gates_lose_no_digits_of_later_rows() -> None:
    """A row that forgets all comes first; sums in float32 would leave the others' gates three digits."""
    segments = [segment(64, StateStep(3, 4)), segment(30, StateStep(5, 6, stash=0), bushy(30))]
    layer = Layer(NARROW, segments, True, torch.float32)
    layer.inputs.gates[:] *= 1e-3
    layer.inputs.gates[[0, 64]] = -5e4
    layer.check()


@pytest.mark.parametrize(("width", "dtype", "has_pending"), [  # all pairs
    (2, F32, True), (3, F32, False), (4, F32, True), (2, BF16, False), (3, BF16, True), (4, BF16, False),
])  # fmt: skip
def test_convolutions_equal_the_plain_form(width: int, dtype: torch.dtype, has_pending: bool) -> None:
    """Rows of a wider tensor; trees behind short and long accepted paths, prompts with marks, rows without a sequence."""
    segments = [
        segment(1, StateStep(3, 4, 200 + np.arange(1) if has_pending else NO_ROWS)),
        segment(70, StateStep(START, 5, marks=((1, 12), (40, 13)))),
        segment(9, StateStep(6, 7, np.array([201, 203, 204, 209, 220]) if has_pending else NO_ROWS, stash=0), bushy(9)),
        segment(3, None, np.array([-1, 0, 0])),
    ]
    rows = RecurrentRows(segments, SCRATCH, DEVICE)
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias, columns, stash = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype)
        for shape in ((83, 40), (24, width), (24,), (SCRATCH + 1, width - 1, 24), (NUM_STASHED, 24))
    )
    for used in (bias, None):
        found = list[tuple[Tensor, ...]]()
        for way in (plain, kernel):
            pools = LayerStates(*[columns[:0]] * 6)
            pools = replace(pools, columns=columns.clone(), inputs=stash.clone())
            out = way.convolve(inputs[:, 8:32], weight, used, pools, rows)
            found.append((out, pools.columns[:SCRATCH], pools.inputs))
        tolerance = 1e-5 if dtype == torch.float32 else 0.04
        for right, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, right, rtol=tolerance, atol=tolerance)
        assert not torch.equal(found[0][1], columns[:SCRATCH]), "no column was written"


def test_a_wrong_mask_shows() -> None:
    parents = bushy(33)
    layer = Layer(NARROW, [segment(33, StateStep(3, 4, stash=0), parents)], True, torch.float32)
    other = segment(33, StateStep(3, 4, stash=0), np.where(np.arange(33) == 32, 0, parents))
    layer.rows.tables = RecurrentRows([other], SCRATCH, DEVICE).tables
    with pytest.raises(AssertionError):
        layer.check()
