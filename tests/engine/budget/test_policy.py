"""The size of draft trees under made-up costs: it follows what nodes cost and what they give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.draft_budget import LEARNING_SHARE, AdaptiveDraftBudget
from tests.engine.budget.simulation import NODES, World, usual


def test_free_rows_give_the_whole_tree_and_costly_rows_none() -> None:
    for row, expected in ((0.0, NODES), (10.0, 1)):
        world = World(row=row)
        chosen = world.run(AdaptiveDraftBudget(NODES), 400)[-128:]
        assert usual(chosen) == expected
        assert len([nodes for nodes in chosen if nodes != expected]) <= 5, "but for what serves to learn"


def test_a_slow_drafter_is_skipped_until_it_is_fast_again() -> None:
    world = World(draft=20.0)
    budget = AdaptiveDraftBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) == 1
    world.draft = 0.1
    assert usual(world.run(budget, 2000)[-100:]) == NODES


def test_catch_up_work_is_not_counted_as_draft_cost() -> None:
    world = World(row=10.0)
    budget = AdaptiveDraftBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) == 1
    world.row, world.behind = 0.01, 0.2
    assert usual(world.run(budget, 6000)[-100:]) > 4


def test_a_silent_drafter_is_not_awaited_until_it_answers_again() -> None:
    world = World(draft=0.2, row=0.01)
    budget = AdaptiveDraftBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) > 4
    world.available = False
    assert usual(world.run(budget, 600)[-100:]) == 1
    world.available = True
    assert usual(world.run(budget, 2000)[-100:]) > 4


@settings(max_examples=20)
@given(
    st.floats(0, 0.5), st.floats(0, 3), st.floats(0.05, 0.95), st.sampled_from([1, 4, 16]), st.integers(0, 9)
)  # fmt: skip
def test_speculation_costs_no_more_than_it_saves(row: float, draft: float, right: float, batch: int, seed: int) -> None:
    world = World(row=row, draft=draft, right=right, batch=batch)
    budget = AdaptiveDraftBudget(NODES)
    world.run(budget, 100, seed)
    world.now, world.tokens = 0.0, 0
    world.run(budget, 256, seed + 1)
    plain = world.fixed + world.row * batch
    assert world.now / world.tokens <= (1.05 + LEARNING_SHARE) * plain / batch


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_the_size_that_is_chosen_is_about_the_best(row: float, batch: int) -> None:
    world = World(row=row, draft=0.2, batch=batch)
    chosen = usual(world.run(AdaptiveDraftBudget(NODES), 300)[-100:])
    best = max(world.tokens_per_second(nodes) for nodes in range(1, NODES + 1))
    assert world.tokens_per_second(chosen) > 0.93 * best


def test_a_tree_pays_for_itself_among_others_that_have_none() -> None:
    """A step is shared by all of them, its rows are not the tree's alone."""
    lone, among = World(row=0.1, draft=0.1), World(row=0.1, draft=0.1, others=15)
    large, small = (usual(world.run(AdaptiveDraftBudget(NODES), 600)[-200:]) for world in (lone, among))
    assert small <= 4 < large
    best = max(among.tokens_per_second(nodes) for nodes in range(1, NODES + 1))
    assert among.tokens_per_second(small) > 0.98 * best


def test_a_larger_size_is_tried_beside_the_best_known_one() -> None:
    world = World(row=0.01, batch=8)
    budget = AdaptiveDraftBudget(NODES)
    assert usual(world.run(budget, 100, most=4)) == 4
    assert usual(world.run(budget, 6, most=NODES)) == 4
    assert usual(world.run(budget, 100, most=NODES)[-50:]) > 4


def test_more_sequences_have_smaller_trees_where_rows_cost() -> None:
    sizes = []
    for batch in (1, 4, 16, 64):
        world = World(row=0.1, batch=batch)
        sizes.append(usual(world.run(AdaptiveDraftBudget(NODES), 400)[-100:]))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > 4, sizes[-1]) == (True, 1)


def test_chosen_trees_fit_the_row_limit_of_a_step() -> None:
    world = World()
    budget = AdaptiveDraftBudget(NODES)
    assert set(world.run(budget, 100, most=3)) <= {1, 2, 3}
    assert set(world.run(budget, 10, most=1)) == {1}
    assert usual(world.run(budget, 100)[-50:]) == NODES, "what was never asked for is tried"


def test_a_pause_of_the_machine_is_no_cost_of_rows() -> None:
    world = World(row=0.001)
    budget = AdaptiveDraftBudget(NODES)
    world.run(budget, 200)
    world.fixed = 500.0
    world.run(budget, 1)
    world.fixed = 1.0
    assert usual(world.run(budget, 20)) == NODES
