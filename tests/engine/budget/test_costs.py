"""The estimates of the adaptive budget: tables of measured times, and how often nodes are accepted."""

import math
from collections.abc import Sequence

import pytest

from eyas.engine.draft_costs import NO_TREE, CostModel, DraftCosts, RecentTrees, SurvivalModel, TreeSize
from eyas.protocol.tree import DraftTree


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


def test_a_bend_between_two_sizes_is_found() -> None:
    table = CostModel((1, 64, 256), (1.0, 1.0, 3.0), rate=0.3)
    for _ in range(50):
        for size in (64, 120, 150, 256):
            table.observe(size, max(size, 150) / 150)
    assert table.at([64, 120, 150]).tolist() == pytest.approx([1, 1, 1], abs=0.03)
    assert table.at(203) == pytest.approx(203 / 150, rel=0.03)
    assert len(table.sizes) <= 6


def test_an_empty_table_takes_the_first_measurement() -> None:
    table = CostModel((), (), rate=0.5)
    assert table.at([1, 5]).tolist() == [0, 0]
    table.observe(3, 7.0)
    assert table.at([1, 5]).tolist() == [7, 7]


def costs(first: Sequence[float], level: Sequence[float]) -> DraftCosts:
    return DraftCosts(CostModel((1, 4), first, rate=1.0), CostModel((8, 32), level, rate=1.0), top_k=8)


def test_rounds_cost_by_their_levels_and_the_rows_of_these() -> None:
    table = costs((1.0, 2.0), (3.0, 5.0))
    assert table.at(1, TreeSize(9, 1)) == 1
    assert table.at(4, TreeSize(24, 5)) == 2 + 4 * 5
    assert table.at(4, TreeSize(3, 2)) == 2 + 3
    assert table.at(4, NO_TREE) == 0


def test_what_a_round_takes_changes_the_costs_of_others() -> None:
    table = costs((1.0, 1.0), (1.0, 1.0))
    for _ in range(20):
        table.observe(4, TreeSize(9, 3), 6.0)
    assert table.at(4, TreeSize(9, 3)) == pytest.approx(6, rel=0.05)
    assert 3 < table.at(1, TreeSize(9, 3)) < 6


@pytest.mark.parametrize(("first", "level"), [(2.0, 0.05), (1.0, 1.0)])
def test_rounds_of_two_depths_show_what_a_level_costs(first: float, level: float) -> None:
    """Of a one-pass head and of EAGLE, whose drafter could not be timed."""
    table = DraftCosts(CostModel((), (), rate=0.5), CostModel((), (), rate=0.5), top_k=8)
    for depth in (14, 14, 14, 14, 3, 3, 3, 3, 3, 3, 14, 3):
        table.observe(1, TreeSize(16, depth), first + (depth - 1) * level)
    for depth in (2, 5, 8, 15):
        assert table.at(1, TreeSize(16, depth)) == pytest.approx(first + (depth - 1) * level, rel=0.35)


def test_empty_draft_tables_take_the_first_measurement() -> None:
    table = DraftCosts(CostModel((), (), rate=0.5), CostModel((), (), rate=0.5), top_k=8)
    assert table.at(2, TreeSize(24, 4)) == 0
    table.observe(2, TreeSize(24, 4), 8.0)
    assert (table.at(2, TreeSize(24, 4)), table.at(64, TreeSize(2, 1))) == pytest.approx((8, 16 / 3))


def test_recent_trees_say_what_sizes_would_be_accepted() -> None:
    recent, survival = RecentTrees(), SurvivalModel()
    tree = DraftTree((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    recent.observe(DraftTree.chain((0, 5)), 2)
    recent.observe(tree, 4)
    recent.observe(tree, 4)
    assert recent.known_size == 0, "too few"
    chances, weights, depths, places = recent.nodes(survival, 4)
    own = survival.survival([tree])[0]
    assert chances.tolist() == [own[2], own[2], own[3], own[3], own[1], own[1]]
    assert weights.sum() == pytest.approx(3)
    assert (depths.tolist(), places.tolist()) == ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3])


def test_survival_node_by_node_equals_that_level_by_level() -> None:
    model, few = (
        SurvivalModel(),
        [DraftTree((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0)), DraftTree.chain((1, 2, 3))],
    )
    model.observe(few, [(0, 2), (0, 1, 2)])
    many = few * (SurvivalModel.FEW_NODES // 4)
    for one, other in zip(many, model.survival(many), strict=True):
        assert model.survival([one])[0].tolist() == pytest.approx(other.tolist())


def test_a_drafter_apart_is_known_by_its_fastest_first_rounds() -> None:
    table = DraftCosts(CostModel((), (), rate=0.5), CostModel((), (), rate=0.5), top_k=8)
    for seconds in (60.0, 13.0, 5.0, 8.0):
        table.observe(1, TreeSize(16, 5), seconds)
    assert table.at(1, TreeSize(16, 5)) == pytest.approx(5)


def test_sizes_timed_at_start_alone_follow_those_of_steps() -> None:
    """At start nothing else ran: what steps take longer, they take longer for all sizes, until those are measured too."""
    table = CostModel((1.0, 4.0, 16.0), (1.0, 2.0, 4.0), rate=0.1)
    for _ in range(60):
        table.observe(16, 8.0)
    assert table.seconds(1) == pytest.approx(2, rel=0.05)
    for _ in range(60):
        table.observe(1, 1.5)
        table.observe(16, 8.0)
    assert table.seconds(1) == pytest.approx(1.5, rel=0.1)
    assert table.seconds(16) == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize("size", [16, 17])
def test_a_step_measures_the_next_size_of_the_table(size: int) -> None:
    """So what another size takes longer counts less there: 17 rows measure the 16 of the table."""
    table = CostModel((1.0, 4.0, 16.0), (1.0, 2.0, 4.0), rate=0.5)
    for _ in range(9):
        table.observe(size, 8.0)
    before = table.seconds(1), table.seconds(16)
    table.observe(1, 2 * before[0])
    far, near = math.log(table.seconds(16) / before[1]), math.log(table.seconds(1) / before[0])
    assert far == pytest.approx(CostModel.FAR_WEIGHT * near)
