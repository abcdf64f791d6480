"""The estimates of the adaptive budget: tables of measured times, and how often nodes are accepted."""

import pytest

from eyas.engine.draft_budget import AcceptanceModel, CostModel
from eyas.tree import DraftTree


def test_a_table_is_interpolated_and_extrapolated() -> None:
    table = CostModel((1, 4, 8), (2.0, 5.0, 5.0), rate=0.1)
    assert table.at([1, 2, 4, 6, 20]).tolist() == [2, 3, 5, 5, 5]
    assert CostModel((1, 4), (1.0, 4.0), rate=0.1).at(10) == pytest.approx(10)


def test_seconds_never_fall_with_size() -> None:
    table = CostModel((1, 4, 16), (3.0, 2.0, 4.0), rate=0.5)
    assert table.at([1, 4]).tolist() == [3, 3]
    for _ in range(50):
        table.observe(1, 9.0)
    assert table.at(16) >= table.at(4) >= table.at(1) == pytest.approx(9)


def test_a_table_follows_what_is_measured() -> None:
    table = CostModel((1, 4, 16), (1.0, 1.0, 1.0), rate=0.1)
    for _ in range(300):
        for size in (1, 4, 16):
            table.observe(size, 2 + 3 * size)
    assert table.at([1, 4, 16]).tolist() == pytest.approx([5, 14, 50], rel=0.2)


def test_a_machine_that_slows_down_does_so_for_all_sizes() -> None:
    table = CostModel((1, 64), (1.0, 4.0), rate=0.1)
    for _ in range(100):
        table.observe(1, 2.0)
    assert table.at(1) == pytest.approx(2, rel=0.01)
    assert 5 < table.at(64) < 8


def test_an_empty_table_takes_the_first_measurement() -> None:
    table = CostModel((), (), rate=0.5)
    assert table.at([1, 5]).tolist() == [0, 0]
    table.observe(3, 7.0)
    assert table.at([1, 5]).tolist() == [7, 7]


def test_acceptance_is_counted_by_the_rank_of_a_score() -> None:
    acceptance = AcceptanceModel(4)
    tree = DraftTree((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    for _ in range(2000):
        acceptance.forget()
        acceptance.observe(4, tree, (0, 2, 3))
    assert acceptance.tokens(4).tolist() == pytest.approx([1, 2, 3, 3], abs=0.1)
    for _ in range(2000):
        acceptance.forget()
        acceptance.observe(4, DraftTree.chain((0, 5)), (0,))
    assert acceptance.rows(4).tolist() == pytest.approx([1, 2, 2, 2], abs=0.1)


def test_acceptance_falls_back_to_the_prior_when_not_drafted() -> None:
    acceptance = AcceptanceModel(3)
    prior = acceptance.tokens(3).tolist()
    for _ in range(20):
        acceptance.observe(3, DraftTree.chain((0, 5, 6)), (0,))
    assert acceptance.tokens(3)[2] < 1.3
    for _ in range(500):
        acceptance.forget()
    assert acceptance.tokens(3).tolist() == pytest.approx(prior, rel=0.01)
