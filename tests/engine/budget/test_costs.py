"""The estimates of the adaptive budget: tables of measured times, and how often nodes are accepted."""

import numpy as np
import pytest

from eyas.engine.budget.costs import CostModel, DraftCosts, RecentTrees, SurvivalModel
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree


def test_a_table_is_interpolated_and_extrapolated() -> None:
    table = CostModel((1, 4, 8), (2.0, 5.0, 5.0))
    assert table.at([1, 2, 4, 6, 20]).tolist() == [2, 3, 5, 5, 5]
    assert CostModel((1, 4), (1.0, 4.0)).at(10) == pytest.approx(10)
    assert [table.seconds(size) for size in (1, 2, 6, 20)] == [2, 3, 5, 5]


def test_a_table_of_one_size_knows_no_other_seconds() -> None:
    assert CostModel((4,), (3.0,)).at([1, 4, 99]).tolist() == [3, 3, 3]


def test_seconds_never_fall_with_size() -> None:
    assert CostModel((1, 4, 16), (3.0, 2.0, 4.0)).at([1, 4, 16]).tolist() == [3, 3, 4]


def test_a_machine_that_slows_down_does_so_for_all_sizes() -> None:
    table = CostModel((1, 64), (1.0, 4.0))
    for _ in range(100):
        table.observe(1, 2.0)
    assert table.at([1, 64]).tolist() == pytest.approx([2, 8], rel=0.01)


def test_a_pause_moves_a_table_little() -> None:
    table = CostModel((1, 64), (1.0, 4.0))
    for seconds in (*[1.0] * 20, 1000.0):
        table.observe(1, seconds)
    assert table.seconds(1) == pytest.approx(1 + 2 * CostModel.RATE)


def costs(first: tuple[float, float], level: tuple[float, float]) -> DraftCosts:
    return DraftCosts(CostModel((1, 4), first), CostModel((8, 32), level), top_k=8)


def test_rounds_cost_by_their_levels_and_the_rows_of_these() -> None:
    table = costs((1.0, 2.0), (3.0, 5.0))
    assert table.at(1, 9, 1) == 1
    assert table.at(4, [24, 3], [5, 2]).tolist() == [2 + 4 * 5, 2 + 3]


def test_what_a_round_takes_changes_the_costs_of_others() -> None:
    table = costs((1.0, 1.0), (1.0, 1.0))
    for _ in range(40):
        table.observe(4, TreeBudget(9, 3), 6.0)
    assert table.at(4, 9, 3) == pytest.approx(6, rel=0.05)
    assert table.at(1, 9, 5) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(("first", "level"), [(2.0, 0.05), (1.0, 1.0)])
def test_each_depth_has_the_mean_of_its_own_rounds(first: float, level: float) -> None:
    """Of a one-pass head and of EAGLE, whose drafter could not be timed; those between are interpolated."""
    table = DraftCosts(None, None, top_k=8)
    for depth in (14, 14, 14, 14, 3, 3, 3, 3, 3, 3, 14, 3):
        table.observe(1, TreeBudget(16, depth), first + (depth - 1) * level)
    for depth in (3, 14):
        assert table.at(1, 16, depth) == pytest.approx(first + (depth - 1) * level, rel=0.05)
    assert table.at(1, 16, 8) == pytest.approx(first + 7 * level, rel=0.35)


def test_a_drafter_elsewhere_is_known_by_its_fastest_rounds() -> None:
    table = DraftCosts(None, None, top_k=8)
    assert table.at(1, 16, 5) == 0, "nothing is known"
    for seconds in (60.0, 13.0, 5.0, 8.0):
        table.observe(1, TreeBudget(16, 5), seconds)
    assert table.at(1, 16, 5) == pytest.approx(5)


def test_recent_trees_say_what_sizes_would_be_accepted() -> None:
    recent, survival = RecentTrees(), SurvivalModel()
    tree = DraftTree.of((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    recent.observe(DraftTree.chain((0, 5)), 2)
    for _ in range(4):
        recent.observe(tree, 4)
    assert recent.known_size == 4
    sizes = [TreeBudget(4, 2), TreeBudget(3, 2), TreeBudget(4, 1), TreeBudget(2, 1)]
    found = recent.yields(survival, 4, sizes, cuts=False)
    assert found is not None
    own = survival.survival([tree])[0]
    assert found[0][:, -1].tolist() == pytest.approx([3, 2, 2, 1])
    assert found[1][:, -1].tolist() == pytest.approx([own[1:].sum(), own[2] + own[3], own[1] + own[2], own[2]])


def test_cuts_leave_out_the_unlikeliest_nodes() -> None:
    recent, survival = RecentTrees(), SurvivalModel()
    recent.observe(DraftTree.of((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0)), 4)
    rows, accepted = recent.yields(survival, 4, [TreeBudget(4, 2)], cuts=True) or (np.zeros(0), np.zeros(0))
    assert rows.tolist() == [[1, 2, 3]]
    assert (np.diff(accepted, 2) < 0).all(), "the likeliest first"


def test_trees_without_drafted_nodes_yield_nothing() -> None:
    recent = RecentTrees()
    assert recent.known_size == 0
    recent.observe(DraftTree.root_only(3), 4)
    assert recent.yields(SurvivalModel(), 4, [TreeBudget(4, 2)], cuts=True) is None
