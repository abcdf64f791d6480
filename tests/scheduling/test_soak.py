"""A short soak; `make soak` runs it in full."""

import pytest

from tests.scheduling.soak import MOST_GROWTH, soak


@pytest.mark.slow
def test_soak_with_cancellations_leaks_no_slots_and_no_memory(tiny_target: str, tiny_head: str) -> None:
    soak(300, tiny_target, tiny_head)  # fills caches and allocators, so that the peak shows what leaks
    found = soak(300, tiny_target, tiny_head)
    assert found.num_finished + found.num_cancelled == 300
    assert found.num_cancelled > 10
    assert found.num_preemptions > 0
    assert found.num_owned == found.num_draft_slots == 0
    assert found.growth <= MOST_GROWTH
