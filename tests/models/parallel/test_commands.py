"""What rank 0 sends the other ranks: nothing is lost on the way, and prefixes travel once."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache.slot_tables import TableId
from eyas.models.backends.base import BackendKind, BackendPlan
from eyas.models.backends.cuda_graphs import CaptureLimits
from eyas.models.inputs import Segment, Segments
from eyas.models.parallel.commands import CommandDecoder, CommandEncoder, InitKVCache
from eyas.models.parallel.shards import Shard, SharedVocabulary
from eyas.protocol.commit import NoiseKey
from tests.support.devices.growing_trees import batch_of_trees, counted, grown_steps

PLAN = BackendPlan(BackendKind.GRAPHS, CaptureLimits(1, 2, 3))


def make_segment(
    rng: np.random.Generator, rows: int, prefix: np.ndarray, masked: bool, table: TableId | None = None
) -> Segment:
    visible = rng.random((rows, rows)) < 0.5 if masked else None
    seed, top_k = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**16))
    nucleus = rng.random(2).tolist() if seed % 2 else ()
    key = NoiseKey(seed, float(rng.random()), top_k, *nucleus) if masked else None
    wanted = rng.integers(0, rows, rows // 2)
    return Segment(*rng.integers(0, 2**31, (3, rows)), prefix, visible, wanted, key, table=table)


def ints_of(segment: Segment) -> object:
    """What recurrent layers read and write."""
    return segment.states and [
        each if name != "pending" else each.tolist() for name, each in segment.states._asdict().items()
    ]


def send(encoder: CommandEncoder, decoder: CommandDecoder, segments: list[Segment] | Segments) -> int:
    """Check that the segments arrive as they were; return the bytes of the message."""
    message = encoder.encode(segments)
    command = decoder.decode(message)
    assert isinstance(command, list)
    for ours, theirs in zip(segments, command, strict=True):
        assert ints_of(ours) == ints_of(theirs)
        for name, value in ours._asdict().items():
            if name in ("table", "states"):
                continue
            np.testing.assert_array_equal(value, getattr(theirs, name))
            assert (value is None) == (getattr(theirs, name) is None)
    return len(message)


class GrowingTables:
    """Slot tables as a scheduler has them: they grow, are cut, and get an id of their own when slots are replaced."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._tables = rng, dict[int, tuple[int, np.ndarray]]()

    def segment(self, number: int, rows: int, grown: int, masked: bool, is_replaced: bool) -> Segment:
        version, slots = self._tables.get(number, (0, np.zeros(0, np.int64)))
        if is_replaced:
            version, slots = version + 1, self._rng.integers(0, 9, len(slots))
        slots = np.append(slots, self._rng.integers(0, 9, grown))
        self._tables[number] = version, slots
        return make_segment(self._rng, rows, slots, masked, (number, version) if number else None)


SIZES = st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 9), st.booleans(), st.booleans())


@given(st.lists(st.lists(SIZES, max_size=4, unique_by=lambda size: size[0])), st.integers(0, 2**32))
def test_commands_survive_the_wire(passes: list[list[tuple[int, int, int, bool, bool]]], seed: int) -> None:
    """Tables grow, leave for some passes, and are replaced; table 0 has no id. Few rows, so that some are forgotten."""
    rng, encoder, decoder = np.random.default_rng(seed), CommandEncoder(), CommandDecoder()
    tables = GrowingTables(rng)
    for sizes in passes:
        send(encoder, decoder, [tables.segment(*size) for size in sizes])
    for other in (InitKVCache(7, PLAN), None):
        assert decoder.decode(encoder.encode(other)) == other


def test_a_step_costs_as_much_at_32k_of_context_as_at_1k() -> None:
    """The same bytes and the same calls, of Python and of C. Kept slots may be anything: they are not read again."""
    found = []
    for context in (1 << 10, 1 << 15):
        encoder, counts, plain = CommandEncoder(), list[tuple[int, int]](), CommandEncoder()
        for poisoned, right in zip(grown_steps(context, poison=True), grown_steps(context), strict=True):
            message, num_calls = counted(partial(encoder.encode, poisoned))
            assert message == plain.encode(right), "an old slot was read"
            counts.append((len(message), num_calls))
        found.append(counts[1:])
    assert found[0] == found[1]
    assert max(size for size, _ in found[0]) <= 23_000, found
    assert max(calls for _, calls in found[0]) <= 600, found


def test_a_rank_receives_new_slots_without_copying_the_others() -> None:
    encoder, decoder = CommandEncoder(), CommandDecoder()
    starts = []
    for segments in grown_steps(1 << 15):
        command = decoder.decode(encoder.encode(segments))
        assert isinstance(command, list)
        starts.append([segment.prefix.ctypes.data for segment in command])
        np.testing.assert_array_equal(command[3].prefix, segments.prefixes[3])
    assert starts[0] == starts[1] == starts[3]


def test_packed_trees_travel_as_their_segments_do() -> None:
    segments = batch_of_trees([np.arange(9), np.arange(20, 50)], nodes=70)
    assert CommandEncoder().encode(segments) == CommandEncoder().encode(list(segments))
    send(CommandEncoder(), CommandDecoder(), segments)


def test_ranks_exchange_at_most_64_kb_to_draw_for_64_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command and answer of a step of 64 trees of 16 nodes, each request with a seed."""
    encoder, sizes = CommandEncoder(), list[int]()
    monkeypatch.setattr("torch.distributed.gather", lambda own, parts: sizes.append(own.nbytes))
    for segments in grown_steps(4000):
        command = len(encoder.encode(segments))
    SharedVocabulary(Shard(1, 2), 64).collect(segments, torch.zeros(1024, 32))
    assert sizes == [12 * 1024]
    assert command + sizes[0] <= 36_000


@pytest.mark.parametrize(("top_k", "width"), [(20, 20), (50, 32)])
def test_ranks_send_their_likeliest_tokens_for_top_k(top_k: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bytes for each of k tokens or of all that a rank has; a step of 64 sequences stays below 64 kB with top-k 50."""
    sizes = list[int]()
    monkeypatch.setattr("torch.distributed.gather", lambda own, parts: sizes.append(own.nbytes))
    rows = np.arange(64)
    keys = [NoiseKey(3, 0.7, top_k, 0.9), NoiseKey(4, 0.7), NoiseKey(5, 0.0, top_k)]
    segments = [Segment(*np.array([rows] * 3), rows[:0], None, rows, key) for key in keys]
    SharedVocabulary(Shard(1, 2), 64).collect(segments, torch.randn(3 * 64, 32))
    assert sizes == [12 * 2 * 64, 8 * width * 64]
    assert sum(sizes) <= 64_000


def test_replaced_slots_are_sent_again() -> None:
    """As after a preemption, and where the slots of a cached prefix take the place of the sequence's own."""
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    prefix = np.arange(1000)
    whole = send(encoder, decoder, [make_segment(rng, 1, prefix, False, (5, 0))])
    prefix[:64] += 5000
    again = send(encoder, decoder, [make_segment(rng, 1, np.append(prefix, 1000), False, (5, 1))])
    last = send(encoder, decoder, [make_segment(rng, 1, np.append(prefix, [1000, 1001]), False, (5, 1))])
    assert whole == pytest.approx(again, abs=16)
    assert last < 60


def test_a_step_that_is_run_again_with_fewer_slots_is_right() -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    for length in (1000, 1008, 1003, 1004):  # slots behind those that are kept differ each time
        prefix = np.append(np.arange(1000), rng.integers(0, 2**20, length - 1000))
        send(encoder, decoder, [make_segment(rng, 1, prefix[:1000], False, (5, 0))])
        send(encoder, decoder, [make_segment(rng, 1, prefix, False, (5, 0))])


def test_tables_beyond_the_rows_forget_the_one_used_longest_ago() -> None:
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    decoder.decode(encoder.encode(InitKVCache(7, PLAN)))
    assert PLAN.limits.segments == 2
    segments = [make_segment(rng, 1, 1000 * number + np.arange(1000), False, (number, 0)) for number in range(3)]
    assert min(send(encoder, decoder, [segments[number]]) for number in range(2)) > 4000
    assert send(encoder, decoder, [segments[0]]) < 60
    assert send(encoder, decoder, [segments[2]]) > 4000
    assert send(encoder, decoder, [segments[0]]) < 60
    assert send(encoder, decoder, [segments[1]]) > 4000
    assert send(encoder, decoder, segments) > 4000  # more at once than there were rows
    assert send(encoder, decoder, segments) < 200


def test_a_new_kv_cache_forgets_all_prefixes() -> None:
    """So a rank that begins with it, after others, follows."""
    rng, encoder, decoder = np.random.default_rng(0), CommandEncoder(), CommandDecoder()
    segments = [make_segment(rng, 1, np.arange(1000), False, (1, 0))]
    first = send(encoder, decoder, segments)
    later = CommandDecoder()
    message = encoder.encode(InitKVCache(7, PLAN))
    assert [each.decode(message) for each in (decoder, later)] == [InitKVCache(7, PLAN)] * 2
    assert send(encoder, later, segments) == first


def test_a_rank_names_its_tables_for_its_device() -> None:
    """The name stays while slots are only added."""
    rng, encoder, decoder, names = np.random.default_rng(0), CommandEncoder(), CommandDecoder(), []
    for length, version in ((10, 0), (12, 0), (12, 0), (11, 0), (15, 0), (20, 1)):
        command = decoder.decode(encoder.encode([make_segment(rng, 1, np.arange(length), False, (3, version))]))
        assert isinstance(command, list)
        names.append(command[0].table)
    assert names[0] == names[1] == names[2]
    assert len(set(names)) == 3
