"""The size of draft trees under made-up costs: it follows what nodes cost and what they give. No time is measured."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.acceptance.match import Accepted
from eyas.engine.budget.cost import Line
from eyas.engine.budget.gain import Gains
from eyas.engine.budget.policy import PROBE_INTERVAL, AdaptiveBudget
from eyas.engine.sequence import Place, Sequence, Work
from eyas.request import Request
from eyas.tree import DraftTree

NODES = 8


@dataclass
class World:
    """Steps of `batch` sequences. A step costs `fixed`, `row` for each node, and `draft` where trees were asked for, with
    `behind` for each step that the drafter was not told of; its chain goes on being right with probability `right`.
    available: whether the drafter answers."""

    fixed: float = 1.0
    row: float = 0.0
    draft: float = 0.0
    right: float = 0.8
    batch: int = 1
    available: bool = True
    behind: float = 0.0
    num_untold: int = 0
    now: float = 0.0
    tokens: int = 0

    def step(self, nodes: int, rng: random.Random) -> tuple[list[Work], list[Accepted | None]]:
        """What the engine would have to say of a step with trees of so many nodes."""
        sequence = Sequence.start(Request("a", (1,)), Place(0.0, 0))
        tree = DraftTree.chain(range(nodes if self.available else 1))
        works, accepted = [], list[Accepted | None]()
        for _ in range(self.batch):
            length = next((n for n in range(tree.num_drafted) if rng.random() >= self.right), tree.num_drafted)
            path = tuple(range(length + 1))
            works.append(Work(sequence, np.arange(len(tree)), 1, tree))
            accepted.append(Accepted(path, path))
            self.tokens += len(path)
        return works, accepted

    def run(self, budget: AdaptiveBudget, steps: int, seed: int = 0, most: int = NODES) -> list[int]:
        """The sizes that were chosen."""
        rng, chosen = random.Random(seed), [budget.choose(self.batch, most)]
        for _ in range(steps):
            self.num_untold += 1
            wait = 0.0
            if chosen[-1] > 1:
                wait = self.draft + self.behind * (self.num_untold - 1)
                self.num_untold = 0
            budget.drafted(wait)
            works, accepted = self.step(chosen[-1], rng)
            verify = self.fixed + self.row * sum(len(work.slots) for work in works)
            budget.verified(works, accepted, verify)
            self.now += wait + verify
            chosen.append(budget.choose(self.batch, most))
        return chosen

    def tokens_per_second(self, nodes: int) -> float:
        """What it would be in the long run with trees of one size."""
        expected = sum(self.right**depth for depth in range(nodes))
        draft = self.draft if nodes > 1 else 0.0
        return self.batch * expected / (self.fixed + self.row * self.batch * nodes + draft)


def usual(chosen: list[int]) -> int:
    """The size that is chosen most of the time."""
    return max(set(chosen), key=chosen.count)


def test_free_rows_give_the_whole_tree_and_dear_ones_none() -> None:
    for row, expected in ((0.0, NODES), (10.0, 1)):
        world = World(row=row)
        chosen = world.run(AdaptiveBudget(NODES), 400)[-4 * PROBE_INTERVAL :]
        assert usual(chosen) == expected
        assert len([nodes for nodes in chosen if nodes != expected]) <= 5, "but for what serves to learn"


def test_a_slow_drafter_is_not_asked_and_is_asked_again_once_it_is_fast() -> None:
    world = World(draft=20.0)
    budget = AdaptiveBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) == 1
    world.draft = 0.1
    assert usual(world.run(budget, 2000)[-100:]) == NODES


def test_what_a_drafter_has_to_catch_up_on_is_no_cost_of_each_draft() -> None:
    world = World(row=10.0)
    budget = AdaptiveBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) == 1
    world.row, world.behind = 0.01, 0.2
    assert usual(world.run(budget, 1000)[-100:]) > 4


def test_a_drafter_that_answers_no_more_is_not_waited_for_and_is_found_when_it_is_back() -> None:
    world = World(draft=0.2, row=0.01)
    budget = AdaptiveBudget(NODES)
    assert usual(world.run(budget, 300)[-100:]) > 4
    world.available = False
    assert usual(world.run(budget, 600)[-100:]) == 1
    world.available = True
    assert usual(world.run(budget, 2000)[-100:]) > 4


@settings(max_examples=20)
@given(
    st.floats(0, 0.5), st.floats(0, 3), st.floats(0.05, 0.95), st.sampled_from([1, 4, 16]), st.integers(0, 9)
)  # fmt: skip
def test_speculation_costs_no_more_than_it_gives_but_for_what_serves_to_learn(
    row: float, draft: float, right: float, batch: int, seed: int
) -> None:
    world = World(row=row, draft=draft, right=right, batch=batch)
    budget = AdaptiveBudget(NODES)
    world.run(budget, 100, seed)
    world.now, world.tokens = 0.0, 0
    world.run(budget, 8 * PROBE_INTERVAL, seed + 1)
    plain = world.fixed + world.row * batch
    learning = (world.fixed + world.row * batch * NODES + world.draft) / plain / PROBE_INTERVAL
    assert world.now / world.tokens <= (1.05 + learning) * plain / batch


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_the_size_that_is_chosen_is_about_the_best(row: float, batch: int) -> None:
    world = World(row=row, draft=0.2, batch=batch)
    chosen = usual(world.run(AdaptiveBudget(NODES), 300)[-100:])
    best = max(world.tokens_per_second(nodes) for nodes in range(1, NODES + 1))
    assert world.tokens_per_second(chosen) > 0.93 * best


def test_more_sequences_have_smaller_trees_where_rows_cost() -> None:
    sizes = []
    for batch in (1, 4, 16, 64):
        world = World(row=0.1, batch=batch)
        sizes.append(usual(world.run(AdaptiveBudget(NODES), 400)[-100:]))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > 4, sizes[-1]) == (True, 1)


def test_no_more_is_chosen_than_a_step_has_room_for() -> None:
    world = World()
    budget = AdaptiveBudget(NODES)
    assert set(world.run(budget, 100, most=3)) <= {1, 2, 3}
    assert set(world.run(budget, 10, most=1)) == {1}
    assert usual(world.run(budget, 100)[-50:]) == NODES, "what was never asked for is tried"


def test_a_pause_of_the_machine_is_no_cost_of_rows() -> None:
    world = World(row=0.001)
    budget = AdaptiveBudget(NODES)
    world.run(budget, 200)
    world.fixed = 500.0
    world.run(budget, 1)
    world.fixed = 1.0
    assert usual(world.run(budget, 20)) == NODES


@pytest.mark.parametrize("line", [lambda x: 2 + 3 * x, lambda x: 4.0, lambda x: 0.5 * x])
def test_a_line_is_found_again(line: Callable[[float], float]) -> None:
    fitted = Line(0.99)
    for size in (1, 4, 4, 9, 2) * 5:
        fitted.add(size, line(size))
    assert [fitted.at(size) for size in (1, 6, 20)] == pytest.approx([line(1), line(6), line(20)])


def test_a_line_never_falls_and_never_goes_below_zero() -> None:
    fitted = Line(0.9)
    for size, seconds in ((1, 9.0), (5, 1.0)) * 5:
        fitted.add(size, seconds)
    assert fitted.at(1) == fitted.at(5) > 0
    steep = Line(0.9)
    for size, seconds in ((4, 0.1), (5, 3.0)) * 5:
        steep.add(size, seconds)
    assert 0 < steep.at(0.1) < steep.at(4)


def test_gains_are_counted_by_the_rank_of_a_nodes_score() -> None:
    gains = Gains(4)
    tree = DraftTree((0, 5, 6, 7), (0, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    gains.add(4, tree, (0, 2, 3))
    assert gains.tokens(4).tolist() == [1, 2, 3, 3]
    gains.add(4, DraftTree.chain((0, 5)), (0,))
    assert gains.tokens(4).tolist() == pytest.approx([1, 1.5, 2, 2], abs=0.02)
    assert gains.rows(4).tolist() == pytest.approx([1, 2, 2.5, 3], abs=0.02)
