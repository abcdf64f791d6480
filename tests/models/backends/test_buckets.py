"""The sizes that passes are padded to."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.api.request import Request, SamplingParams
from eyas.engine.runner import drawn_rows, step_segments
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.models.backends.attention_metadata import (
    Tiling,
    bucket_shape,
    build_words,
    max_words,
    pack_with_metadata,
    tight_shape,
    with_prompts,
    words_of_all,
)
from eyas.models.backends.cuda import tiling_on
from eyas.models.backends.cuda_graphs import MAX_UNUSED_LOGITS, choose_bucket, row_buckets
from eyas.models.inputs import Segment, Segments, pack
from eyas.protocol.tree import DraftTree
from tests.support.devices.random_passes import make_pass, passes
from tests.support.strategies import trees


def test_buckets_are_few_and_end_with_the_most() -> None:
    assert row_buckets(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert row_buckets(64)[-2:] == (48, 64)
    assert row_buckets(1) == (1,)


@given(most=st.integers(1, 5000))
def test_padding_costs_at_most_half_of_a_pass(most: int) -> None:
    buckets = row_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets):
        assert larger <= 1.5 * (smaller + 1) or larger <= 16


@given(most=st.integers(1, 300), rows=st.integers(1, 400))
def test_a_pass_takes_the_smallest_bucket_that_holds_it(most: int, rows: int) -> None:
    buckets = row_buckets(most)
    chosen = choose_bucket(buckets, rows, rows)
    assert chosen == min((b for b in buckets if b >= rows), default=None)


def test_long_prompts_are_not_padded_to_an_all_logits_graph() -> None:
    buckets = row_buckets(1024)
    assert choose_bucket(buckets, 512, 1) is None
    assert choose_bucket(buckets, MAX_UNUSED_LOGITS, 1) == MAX_UNUSED_LOGITS
    assert choose_bucket(buckets, 512, 300) == 512


@given(segments=passes(max_segments=6, max_rows=50), spare=st.integers(0, 40), heads=st.integers(1, 8))
def test_a_bucket_has_room_for_any_pass_of_its_rows(segments: Segments, spare: int, heads: int) -> None:
    rows, tiling = sum(len(s.tokens) for s in segments), Tiling(heads, 2, 16)
    bucket = bucket_shape(rows + spare, 6, tiling)
    words = build_words(segments, bucket, scratch=0)
    assert len(words) <= max_words(bucket) + sum(len(s.prefix) for s in segments)
    assert tight_shape(segments, tiling).rows == rows


def segments_of(batch: Seq[ScheduledSequence], draws_on_ranks: bool = False) -> Seq[Segment]:
    return step_segments(batch, drawn_rows(batch), draws_on_ranks)


def alone(scheduled: ScheduledSequence, draws_on_ranks: bool) -> Segment:
    """The nodes of a tree as a segment of their own."""
    sequence, tree, rows = scheduled.sequence, scheduled.tree, np.arange(len(scheduled.slots))
    assert tree is not None
    return Segment(
        tokens=np.array(tree.tokens),
        positions=scheduled.first + np.array(tree.depths),
        slots=scheduled.slots,
        prefix=sequence.slots[: scheduled.first],
        visible=tree.ancestor_mask(),
        logits_indices=rows,
        noise_key=sequence.request.noise_key if draws_on_ranks else None,
        table=sequence.table,
    )


def scheduled(tree: DraftTree, number: int) -> ScheduledSequence:
    """A tree behind a prefix of some length, in slots of its own."""
    prompt, slots = tuple(range(3, 5 + 7 * number)), np.arange(100 * number, 100 * (number + 1))
    sequence = Sequence(Request(f"{number}", prompt, SamplingParams(seed=0)), QueueKey(0.0, number), list(prompt), slots)
    sequence.computed = len(prompt) - 1
    return ScheduledSequence(sequence, slots[::-1][: len(tree)], sequence.computed, tree)


def test_a_library_attends_for_long_prompts_at_the_end() -> None:
    """Not for trees, short prompts, prompts before other rows, and not in deterministic mode."""
    tiling = Tiling(4, 8, 132, library_rows=30)
    trees, long, short = make_pass([(True, 16, 40)] * 3), make_pass([(False, 100, 9)]), make_pass([(False, 29, 0)])

    def prompts(made: Seq[Segment], tiling: Tiling = tiling) -> tuple[int, list[int]]:
        """Rows before the prompts, and rows of each."""
        segments = Segments.of(made)
        packed = pack_with_metadata(segments, tight_shape(segments, tiling), 9, torch.device("cpu"))
        packed = with_prompts(packed, segments, tiling)
        before = packed.before_prompts and packed.before_prompts.metadata
        return before.shape.rows if before else 0, [group.shape[1] for group in packed.prompts]

    assert prompts(long) == (0, [100])
    assert prompts([*trees, *short, *long, *long]) == (48 + 29, [100, 100])
    whole_trees = segments_of([scheduled(DraftTree.chain(range(60)), number) for number in range(2)])
    for segments in (trees, short, [*long, *trees], whole_trees):
        assert prompts(segments) == (0, [])
    for other in (replace(tiling, library_rows=0), replace(tiling, fixed_part=1024)):
        assert prompts(long, other) == (0, [])


def test_copies_for_a_library_have_few_sizes() -> None:
    """Each chunk of a prompt has more keys. With a size for each, the allocator would keep memory for all of them."""
    tiling = Tiling(4, 8, 132, library_rows=30)
    lengths = range(40, 4000, 40)
    sizes = set[int]()
    for length in lengths:
        segments = Segments.of(make_pass([(False, 40, length - 40)]))
        packed = pack_with_metadata(segments, tight_shape(segments, tiling), 9, torch.device("cpu"))
        (prompt,) = with_prompts(packed, segments, tiling).prompts
        padded = prompt.keys.shape[1]
        assert prompt.num_keys == length <= padded <= 1.25 * length
        sizes.add(padded)
    assert len(sizes) < 30


@pytest.mark.parametrize(("capability", "dtype", "is_served"), [
    ((7, 5), torch.float16, False), ((8, 0), torch.bfloat16, True), ((9, 0), torch.float32, False),
])  # fmt: skip
def test_a_library_serves_gpus_with_flash_attention(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, is_served: bool
) -> None:
    """On others torch would make a table of all scores."""
    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert (tiling_on(torch.device("cuda"), dtype, 4, 8).library_rows > 0) == is_served


def test_more_tiles_than_a_pass_has_are_no_words() -> None:
    batch = [scheduled(DraftTree.chain(range(40)), number) for number in range(2)]
    ours = segments_of(batch)
    assert isinstance(ours, Segments)
    shape = tight_shape(ours, Tiling(2, 2, 16))
    for build in (build_words, words_of_all):
        with pytest.raises(ValueError, match=r"tiles|broadcast|shape"):
            build(ours, replace(shape, tiles=shape.tiles - 1), 0, kept_prefixes=np.zeros(2, np.int64))


@settings(max_examples=50)
@given(st.lists(trees(max_nodes=40), min_size=1, max_size=5), st.booleans())
def test_trees_kept_as_arrays_pack_as_segments_do(found: list[DraftTree], draws_on_ranks: bool) -> None:
    """Each way has its own words, for masks and for parts at fixed positions, and its own inputs of a plain pass."""
    batch = [scheduled(tree, number) for number, tree in enumerate(found)]
    plain, ours = Segments.of([alone(each, draws_on_ranks) for each in batch]), segments_of(batch, draws_on_ranks)
    assert isinstance(ours, Segments)
    for tiling in (Tiling(2, 2, 16), Tiling(2, 2, 16, fixed_part=16, longest=64)):
        shape = tight_shape(plain, tiling)
        assert tight_shape(ours, tiling) == shape
        assert np.array_equal(build_words(ours, shape, 0), build_words(plain, shape, 0))
        kept = 1000 * np.arange(len(found))
        for padded in (shape, bucket_shape(shape.rows + 9, 6, tiling)):
            words = build_words(ours, padded, 3, kept_prefixes=kept)
            assert np.array_equal(words, words_of_all(plain, padded, 3, kept_prefixes=kept))
    for one, other in zip(plain, ours, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one[:-1], other[:-1], strict=True))
        assert one.noise_key == other.noise_key
    one, other = pack(plain, torch.device("cpu")), pack(ours, torch.device("cpu"))
    for name in ("tokens", "positions", "slots", "logits_indices"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert all(torch.equal(a.mask, b.mask) for a, b in zip(one.groups, other.groups, strict=True))
