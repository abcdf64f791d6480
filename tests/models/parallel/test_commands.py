"""What rank 0 sends the other ranks: nothing is lost on the way, and prefixes travel once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.models.cuda.backend import BackendKind, BackendPlan
from eyas.models.cuda.graphs import CaptureLimits
from eyas.models.inputs import Segment
from eyas.models.rank_commands import KEPT_PASSES, CommandDecoder, CommandEncoder, InitKVCache
from eyas.models.tensor_parallel import Shard, SharedVocabulary
from eyas.request import NoiseKey

PLAN = BackendPlan(BackendKind.GRAPHS, CaptureLimits(1, 2, 3))


def make_segment(rng: np.random.Generator, rows: int, prefix: np.ndarray, masked: bool) -> Segment:
    visible = rng.random((rows, rows)) < 0.5 if masked else None
    key = NoiseKey(int(rng.integers(0, 2**64, dtype=np.uint64)), float(rng.random())) if masked else None
    return Segment(*rng.integers(0, 2**31, (3, rows)), prefix, visible, rng.integers(0, rows, rows // 2), key)


def send(encoder: CommandEncoder, decoder: CommandDecoder, segments: list[Segment]) -> int:
    """Check that the segments arrive as they were; return the bytes of the message."""
    message = encoder.encode(segments)
    command = decoder.decode(message)
    assert isinstance(command, list)
    for ours, theirs in zip(segments, command, strict=True):
        for name, value in ours._asdict().items():
            np.testing.assert_array_equal(value, getattr(theirs, name))
            assert (value is None) == (getattr(theirs, name) is None)
    return len(message)


@given(st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9), st.booleans()), max_size=4)), st.integers(0, 2**32))
def test_commands_survive_the_wire(passes: list[list[tuple[int, int, bool]]], seed: int) -> None:
    rng, encoder, decoder = np.random.default_rng(seed), CommandEncoder(), CommandDecoder()
    for sizes in passes:
        # few slots, so that prefixes share ends, continue one another, and differ in the middle
        send(encoder, decoder, [make_segment(rng, n, rng.integers(0, 4, length), masked) for n, length, masked in sizes])
    for other in (InitKVCache(7, PLAN), None):
        assert decoder.decode(encoder.encode(other)) == other


def test_ranks_exchange_at_most_64_kb_to_draw_for_64_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command and answer of a step of 64 trees of 16 nodes, each request with a seed."""
    rng, encoder, sizes = np.random.default_rng(0), CommandEncoder(), list[int]()
    monkeypatch.setattr("torch.distributed.gather", lambda own, parts: sizes.append(own.nbytes))
    rows, visible = np.arange(16), np.ones((16, 16), np.bool_)
    prefixes = [index * 4000 + rng.permutation(4000) for index in range(64)]
    for step in range(2):
        segments = [
            Segment(rows, rows + 4000, rows + 2**20, np.append(prefix, np.arange(step)), visible, rows, NoiseKey(seed, 1.0))
            for seed, prefix in enumerate(prefixes)
        ]
        command = len(encoder.encode(segments))
    SharedVocabulary(Shard(1, 2), 64).collect(segments, torch.zeros(1024, 32))
    assert sizes == [12 * 1024]
    assert command + sizes[0] <= 40_000


def test_a_step_of_64_trees_sends_at_most_64_kb() -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    slots = [index * 10000 + rng.permutation(10000) for index in range(64)]
    lengths = rng.integers(1000, 9000, 64)
    sizes = []
    for _ in range(4):
        works = [make_segment(rng, 16, own[:length], True) for own, length in zip(slots, lengths, strict=True)]
        sizes.append(send(encoder, decoder, works))
        lengths += rng.integers(1, 6, 64)
    assert sizes[0] > 1e6
    assert max(sizes[1:]) < 25_000


def test_a_prefix_that_the_cache_has_replaced_is_sent_from_there() -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    prefix = np.arange(1000)
    whole = send(encoder, decoder, [make_segment(rng, 1, prefix, False)])
    prefix[:64] += 5000  # the slots of a cached prefix take the place of the sequence's own
    again = send(encoder, decoder, [make_segment(rng, 1, np.append(prefix, 1000), False)])
    last = send(encoder, decoder, [make_segment(rng, 1, np.append(prefix, [1000, 1001]), False)])
    assert whole == pytest.approx(again, abs=16)
    assert last < 60


@pytest.mark.parametrize(("passed", "is_known"), [(KEPT_PASSES - 1, True), (KEPT_PASSES, False)])
def test_a_waiting_sequence_is_remembered_for_some_passes(passed: int, is_known: bool) -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    waiting, other = np.arange(1000), np.arange(2000, 3000)
    send(encoder, decoder, [make_segment(rng, 1, waiting, False), make_segment(rng, 1, other, False)])
    for step in range(passed):
        assert send(encoder, decoder, [make_segment(rng, 1, np.append(other, np.arange(step)), False)]) < 200
    assert (send(encoder, decoder, [make_segment(rng, 1, waiting, False)]) < 60) == is_known


def test_a_new_kv_cache_forgets_all_prefixes() -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    segments = [make_segment(rng, 1, np.arange(1000), False)]
    first = send(encoder, decoder, segments)
    assert decoder.decode(encoder.encode(InitKVCache(7, PLAN))) == InitKVCache(7, PLAN)
    assert send(encoder, decoder, segments) == first
