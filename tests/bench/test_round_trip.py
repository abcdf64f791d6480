"""The round trip of the wire can be measured: a draft service in another process answers every round."""

import multiprocessing

import pytest

from benchmarks.scripts.round_trip import SMALL, measure, table
from eyas.progress import Progress


@pytest.mark.nightly
def test_every_round_brings_a_tree_back() -> None:
    with Progress() as progress:
        trip = measure(SMALL[1], 5, progress)
    assert 0 < trip.p50 <= trip.p90 <= trip.p99
    assert table([trip]).rows[0][:2] == ("8", "5 x 256 float32")
    assert not multiprocessing.active_children()
