"""What the budget knows of a step: lines through measured times, and counts of what nodes were worth."""

from collections.abc import Callable

import pytest

from eyas.engine.draft_budget import AcceptanceModel, CostModel
from eyas.tree import DraftTree


@pytest.mark.parametrize("line", [lambda x: 2 + 3 * x, lambda x: 4.0, lambda x: 0.5 * x])
def test_a_line_is_found_again(line: Callable[[float], float]) -> None:
    fitted = CostModel(0.99)
    for size in (1, 4, 4, 9, 2) * 5:
        fitted.add(size, line(size))
    assert [fitted.at(size) for size in (1, 6, 20)] == pytest.approx([line(1), line(6), line(20)])


def test_a_line_never_falls_and_never_goes_below_zero() -> None:
    fitted = CostModel(0.9)
    for size, seconds in ((1, 9.0), (5, 1.0)) * 5:
        fitted.add(size, seconds)
    assert fitted.at(1) == fitted.at(5) > 0
    steep = CostModel(0.9)
    for size, seconds in ((4, 0.1), (5, 3.0)) * 5:
        steep.add(size, seconds)
    assert 0 < steep.at(0.1) < steep.at(4)


def test_a_slope_outlasts_sizes_that_do_not_differ() -> None:
    fitted = CostModel(0.9)
    for size, seconds in ((1, 3.0), (5, 7.0), *[(1, 3.0)] * 1000, *[(1, 4.0)] * 100):
        fitted.add(size, seconds)
    assert fitted.sloped
    assert [fitted.at(size) for size in (1, 5)] == pytest.approx([4, 8], rel=0.01)


def test_gains_are_counted_by_the_rank_of_a_nodes_score() -> None:
    gains = AcceptanceModel(4)
    tree = DraftTree((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    gains.add(4, tree, (0, 2, 3))
    assert gains.tokens(4).tolist() == [1, 2, 3, 3]
    gains.add(4, DraftTree.chain((0, 5)), (0,))
    assert gains.tokens(4).tolist() == pytest.approx([1, 1.5, 2, 2], abs=0.02)
    assert gains.rows(4).tolist() == pytest.approx([1, 2, 2.5, 3], abs=0.02)
