"""The sizes that passes are padded to."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eyas.models.cuda.graphs import MAX_UNUSED_LOGITS, choose_bucket, row_buckets
from eyas.models.cuda.metadata import Tiling, bucket_shape, build_words, max_words, tight_shape
from eyas.models.inputs import Segment
from tests.models.cuda.random_passes import passes


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
def test_a_bucket_has_room_for_any_pass_of_its_rows(segments: list[Segment], spare: int, heads: int) -> None:
    rows, tiling = sum(len(s.tokens) for s in segments), Tiling(heads, 2, 16)
    bucket = bucket_shape(rows + spare, 6, tiling)
    words = build_words(segments, bucket, scratch=0)
    assert len(words) <= max_words(bucket) + sum(len(s.prefix) for s in segments)
    assert tight_shape(segments, tiling).rows == rows
