"""Plain attention and the kernel equal attention written out, for any trees, chunks and lengths.

Where there is no GPU the kernel runs in triton's interpreter.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cache.kv_cache import SlotMemory
from eyas.kernels.arguments import AttentionRule
from eyas.models.backends import attention_metadata as metadata
from eyas.models.backends.attention_metadata import Tiling, bucket_shape, pack_with_metadata, tight_shape, with_prompts
from eyas.models.inputs import PackedInputs, Segments, pack
from eyas.models.layers import attention
from tests.support.devices.random_passes import (
    Heads,
    behind_others,
    make_kv_cache,
    make_pass,
    naive,
    num_slots,
    passes,
    scaling_of,
)
from tests.support.tiers import nightly

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = st.sampled_from([Heads(4, 2, 16), Heads(3, 1, 8, 8, 0.0), Heads(2, 2, 24, 16), Heads(14, 2, 16, 20, 3.0)])
WINDOWS = st.sampled_from([None, 1, 5, 30])
SOFTCAPS = st.sampled_from([None, 2.0])

Packing = Callable[[Segments, Heads, int], PackedInputs]


def plainly(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
    return pack(segments, DEVICE)


def tightly(segments: Segments, heads: Heads, scratch: int, processors: int = 6) -> PackedInputs:
    shape = tight_shape(segments, Tiling(heads.query // heads.kv, heads.kv, processors))
    return pack_with_metadata(segments, shape, scratch, DEVICE)


def padded(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
    rows = sum(len(s.tokens) for s in segments)
    shape = bucket_shape(rows + 7, len(segments) + 2, Tiling(heads.query // heads.kv, heads.kv, 6))
    return pack_with_metadata(segments, shape, scratch, DEVICE)


def by_position(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
    """Parts of 64 keys at fixed positions."""
    tiling = Tiling(heads.query // heads.kv, heads.kv, 6, max_rows=16, fixed_part=64)
    return pack_with_metadata(segments, tight_shape(segments, tiling), scratch, DEVICE)


def kept(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
    """By position, and prefixes in a memory that already has a part of them."""
    tiling = Tiling(heads.query // heads.kv, heads.kv, 6, max_rows=16, fixed_part=64)
    memory, kept = SlotMemory(8, 200, DEVICE), [s._replace(table=(n, 0)) for n, s in enumerate(segments)]
    before = [s._replace(prefix=s.prefix[: len(s.prefix) // 2]) for s in reversed(kept)]
    for each in map(Segments.of, (before, kept)):
        packed = pack_with_metadata(each, tight_shape(each, tiling), scratch, DEVICE, memory=memory)
    return packed


def check(
    packing: Packing,
    segments: Segments,
    heads: Heads,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
    kv_dtype: torch.dtype | None = None,
) -> None:
    size = sum(len(s.tokens) + len(s.prefix) + len(s.others) for s in segments)
    rows = sum(len(s.tokens) for s in segments)
    kv_cache = make_kv_cache(size, heads, seed=size, dtype=kv_dtype or dtype)
    packed = packing(segments, heads, size)
    query = torch.randn(len(packed.tokens), heads.query, heads.width, generator=torch.Generator().manual_seed(1))
    # Rounded before both computations, so that the reference sees the same numbers.
    query, keys, values = (
        query.to(DEVICE, dtype),
        *(x.to(DEVICE, kv_dtype or dtype) for x in (kv_cache.keys, kv_cache.values)),
    )
    sinks = None if heads.sinks is None else heads.sinks.to(DEVICE)
    rule = AttentionRule(scaling_of(heads), window, softcap, sinks)
    expected = naive(query[:rows].cpu().double(), kv_cache, segments, *rule)
    got = attention.attend(query, keys, values, packed, rule).cpu().double()
    torch.testing.assert_close(got[:rows], expected, atol=tolerance, rtol=tolerance)
    assert not got[rows:].any(), "padding rows attend to nothing"


@pytest.mark.parametrize("packing", [plainly, tightly, nightly(padded)])
@settings(max_examples=6)
@given(segments=passes(), heads=HEADS, window=WINDOWS, softcap=SOFTCAPS)
def test_attention_equals_its_definition(
    packing: Packing, segments: Segments, heads: Heads, window: int | None, softcap: float | None
) -> None:
    check(packing, segments, heads, window, softcap)


@pytest.mark.parametrize("packing", [plainly, by_position])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16, 16, 2.0), Heads(4, 1, 24, 16, 2.0)])
def test_sinks_and_narrow_values_equal_the_definition(packing: Packing, heads: Heads) -> None:
    check(packing, make_pass([(True, 9, 60), (False, 30, 50), (True, 1, 0)]), heads, 33)


@pytest.mark.parametrize("processors", [1, 6])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16, 16, 2.0), Heads(4, 1, 24, 16, 2.0)])
def test_a_sink_counts_once_however_keys_are_cut(processors: int, heads: Heads) -> None:
    """Most rows have several parts, or one."""

    def cut(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
        shape = tight_shape(segments, Tiling(heads.query // heads.kv, heads.kv, processors, longest=100))
        assert (shape.splits == 1) == (processors == 1)
        return pack_with_metadata(segments, shape, scratch, DEVICE)

    check(cut, make_pass([(True, 7, 90), (False, 3, 0)]), heads)


SIZES = [(True, 40, 150), (False, 1, 70), (False, 70, 5), (True, 1, 0)]


@pytest.mark.parametrize(("packing", "window"), [(plainly, None), (plainly, 33), (tightly, None), nightly(padded, 33)])
def test_long_segments_span_tiles_blocks_and_mask_words(packing: Packing, window: int | None) -> None:
    check(packing, make_pass(SIZES), Heads(4, 1, 16), window)


@pytest.mark.parametrize("packing", [plainly, nightly(tightly), padded])
def test_rows_of_a_tree_see_nodes_that_were_run_before(packing: Packing) -> None:
    """Beside them trees without such nodes, single rows behind some, and more nodes than a mask word has bits."""
    segments = make_pass([(True, 50, 70), (True, 9, 20), (False, 5, 3), (True, 80, 1), (True, 6, 200)])
    behind = [behind_others(s, count) if count else s for s, count in zip(segments, (20, 0, 0, 45, 5), strict=True)]
    check(packing, Segments.of(behind), Heads(4, 2, 16))
    check(packing, Segments.of([behind_others(make_pass([(True, 50, 70)])[0], 20)]), Heads(4, 1, 16))


@pytest.mark.parametrize("packing", [by_position, kept])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, 2.0)])
def test_keys_by_position_equal_the_definition(packing: Packing, window: int | None, softcap: float | None) -> None:
    """Trees and chunks that begin within a block and go on into the next part."""
    check(packing, make_pass([(True, 9, 60), (False, 30, 50), (True, 1, 0)]), Heads(4, 2, 16), window, softcap)


def test_long_prefixes_have_more_parts_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.kernels.cuda.attention.LONG_PART", 64)
    sizes, heads = [(True, 3, 300), (True, 3, 20), (False, 5, 70)], Heads(4, 2, 16)
    segments = make_pass(sizes)

    def full(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
        packed = tightly(segments, heads, scratch, processors=1)
        assert packed.metadata is not None
        assert packed.metadata.shape.even_splits == 1 < packed.metadata.shape.splits
        return packed

    check(full, segments, heads)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 2.0)])
def test_a_shared_prefix_is_read_for_several_segments(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six sessions behind one prefix of 90 slots and parts of their own, and two others before and behind them."""
    monkeypatch.setattr(metadata, "SHARED_KEYS", 20)
    monkeypatch.setattr(metadata, "SPARED_KEYS", 1)
    alone, *group, last = make_pass([(True, 3, 100), *[(True, 1 + n % 2, 95 + n) for n in range(6)], (False, 2, 3)])
    group = [s._replace(prefix=np.concatenate([group[0].prefix[:90], s.prefix[90:]])) for s in group]
    segments, heads = Segments.of([alone, *group, last]), Heads(4, 2, 16)
    tiling = Tiling(2, 2, 6, max_rows=16)
    runs = metadata.shared_runs(segments, tiling)
    assert [run.length for run in runs] == [0, 90, 0]

    def shared(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
        return pack_with_metadata(segments, tight_shape(segments, tiling, runs), scratch, DEVICE, runs)

    check(shared, segments, heads, window, softcap)


@pytest.mark.parametrize(
    ("fixed_part", "window", "max_rows"), [(0, 33, 8), nightly(0, None, 64), nightly(64, None, 8), (64, 33, 64)]
)
def test_tiles_with_more_rows_than_a_program_are_cut(fixed_part: int, window: int | None, max_rows: int) -> None:
    """Tiles are planned for layers with fewer query heads for each key-value head, 2 here, and hold 4 or 32 rows."""
    tiling = Tiling(2, 2, 6, max_rows=max_rows, fixed_part=fixed_part)

    def planned_for_others(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
        return pack_with_metadata(segments, tight_shape(segments, tiling), scratch, DEVICE)

    segments = make_pass([(True, 11, 60), (False, 30, 50), (True, 1, 0), (False, 1, 9)])
    check(planned_for_others, segments, Heads(8, 1, 16), window)


NEEDS_GPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="triton's interpreter cannot multiply bfloat16")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)])
@pytest.mark.parametrize("packing", [tightly, by_position])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), nightly(Heads(2, 1, 128)), nightly(Heads(1, 1, 256)), Heads(8, 1, 512)])
def test_half_precision_sums_in_float32(dtype: torch.dtype, heads: Heads, packing: Packing) -> None:
    tolerance = 4 * torch.finfo(dtype).eps
    check(packing, make_pass([(True, 7, 80), (False, 20, 3)]), heads, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("sizes", [
    [(True, 7, 60), (False, 1, 9), (False, 90, 41), (False, 33, 0)],
    nightly([(True, 9, 30), (False, 70, 3)]),
    nightly([(False, 200, 70)]),
])  # fmt: skip
@pytest.mark.parametrize(("heads", "window", "kv_dtype"), [
    (Heads(4, 1, 16), None, None), (Heads(14, 2, 16), None, torch.float8_e4m3fn), (Heads(4, 1, 16), 33, None),
    (Heads(4, 2, 16, 16, 2.0), None, None),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(ttention|backend|kernel)")  # of torch, that CPUs have no fused kernel for it
def test_prompts_by_a_library_equal_the_definition(
    heads: Heads, sizes: list[tuple[bool, int, int]], window: int | None, kv_dtype: torch.dtype | None
) -> None:
    """After trees and plain rows, which the kernel keeps; with windows and sinks it keeps all rows."""

    def by_library(segments: Segments, heads: Heads, scratch: int) -> PackedInputs:
        tiling = Tiling(heads.query // heads.kv, heads.kv, 6, library_rows=30)
        packed = with_prompts(tightly(segments, heads, scratch), segments, tiling)
        assert len(packed.prompts) == sum(not is_tree and rows >= 30 for is_tree, rows, _ in sizes)
        return packed

    tolerance = 4 * torch.finfo(torch.float16).eps
    check(by_library, make_pass(sizes), heads, window, None, torch.float16, tolerance, kv_dtype)


@pytest.mark.parametrize("packing", [plainly, tightly, by_position])
def test_nan_reaches_only_the_rows_that_attend_to_it(packing: Packing) -> None:
    heads, sizes = Heads(4, 2, 16), [(True, 2, 9), (False, 2, 14), (True, 3, 11)]
    segments = make_pass(sizes)
    kv_cache = make_kv_cache(num_slots(sizes), heads, 0, torch.float32)
    query = torch.randn(7, heads.query, heads.width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for bad, own in enumerate([[0, 1], [2, 3], [4, 5, 6]]):
        keys, values = kv_cache.keys.float(), kv_cache.values.float()
        seen = [*segments[bad].prefix, *segments[bad].slots]
        keys[seen] = values[seen] = float("nan")
        packed = packing(segments, heads, num_slots(sizes))
        got = attention.attend(query, keys.to(DEVICE), values.to(DEVICE), packed, AttentionRule(scaling_of(heads)))
        assert got[[row for row in range(7) if row not in own]].isfinite().all()
        assert got[own].isnan().all()
