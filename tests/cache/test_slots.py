"""Properties of the slot allocator under any trace of takes and returns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache.prefix_cache import SlotAllocator, Slots


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_any_trace_keeps_every_slot_free_or_owned_once(trace: list[tuple[bool, int]]) -> None:
    allocator, owners = SlotAllocator(32), list[Slots]()
    for taking, amount in trace:
        if taking and amount <= allocator.num_free:
            owners.append(allocator.take(amount))
        elif owners:
            allocator.free(owners.pop(amount % len(owners)))
        allocator.check_owners(owners)
    for slots in owners:
        allocator.free(slots)
    assert allocator.num_free == 32


def test_returning_a_slot_twice_is_caught() -> None:
    allocator = SlotAllocator(4)
    slots = allocator.take(2)
    allocator.free(slots)
    with pytest.raises(AssertionError, match="without being owned"):
        allocator.free(slots)


def test_taking_more_than_is_free_is_caught() -> None:
    with pytest.raises(AssertionError, match="5 slots asked for, 4 free"):
        SlotAllocator(4).take(5)


def test_an_unknown_owner_is_caught() -> None:
    allocator = SlotAllocator(4)
    allocator.take(1)
    with pytest.raises(AssertionError, match="no owner"):
        allocator.check_owners([])
    with pytest.raises(AssertionError, match="two owners"):
        allocator.check_owners([np.array([0, 0])])
