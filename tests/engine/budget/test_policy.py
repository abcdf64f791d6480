"""The size of draft trees under made-up costs: it follows what nodes cost and what they give. No time is measured."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.acceptance.match import Accepted
from eyas.engine.budget.lessons import LEARNERS, LEARNING_SHARE, OF_REQUESTS, Lessons
from eyas.engine.budget.policy import AdaptiveBudget
from eyas.engine.sequence import Place, Sequence, Work
from eyas.request import Request
from eyas.tree import DraftTree

NODES = 8


@dataclass
class World:
    """Steps of `batch` requests. A step costs `fixed`, `row` for each node, and `draft` where trees were asked for, with
    `behind` for each step that a drafter so asked was not told of; its chains go on being right with probability `right`.
    available: whether the drafter answers. others: requests beside them that can have no tree."""

    fixed: float = 1.0
    row: float = 0.0
    draft: float = 0.0
    right: float = 0.8
    batch: int = 1
    available: bool = True
    behind: float = 0.0
    others: int = 0
    num_untold: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    tokens: int = 0

    def step(self, sizes: dict[str, int], rng: random.Random) -> tuple[list[Work], list[Accepted | None]]:
        """What the engine would have to say of a step with trees of these sizes."""
        works, accepted = [], list[Accepted | None]()
        for name, size in sizes.items():
            tree = DraftTree.chain(range(size if self.available else 1))
            length = next((n for n in range(tree.num_drafted) if rng.random() >= self.right), tree.num_drafted)
            path = tuple(range(length + 1))
            works.append(Work(Sequence.start(Request(name, (1,)), Place(0.0, 0)), np.arange(len(tree)), 1, tree))
            accepted.append(Accepted(path, path))
            self.tokens += len(path)
        return works, accepted

    def wait(self, sizes: dict[str, int]) -> float:
        """For the drafter, which is told of those that have trees alone."""
        self.num_untold.update(sizes.keys())
        asked = [name for name, size in sizes.items() if size > 1]
        behind = max((self.num_untold.pop(name) - 1 for name in asked), default=0)
        return self.draft + self.behind * behind if asked else 0.0

    def sizes(self, budget: AdaptiveBudget, steps: int, seed: int = 0, most: int = NODES) -> list[dict[str, int]]:
        """The sizes that were chosen, step by step."""
        rng, names = random.Random(seed), [f"{number}" for number in range(self.batch)]
        treeless = {f"other {number}": 1 for number in range(self.others)}
        chosen = [budget.choose(names, most, self.others)]
        for _ in range(steps):
            wait = self.wait(chosen[-1])
            budget.drafted(wait)
            works, accepted = self.step(chosen[-1] | treeless, rng)
            verify = self.fixed + self.row * sum(len(work.slots) for work in works)
            budget.verified(works, accepted, verify)
            self.now += wait + verify
            chosen.append(budget.choose(names, most, self.others))
        return chosen

    def run(self, budget: AdaptiveBudget, steps: int, seed: int = 0, most: int = NODES) -> list[int]:
        """The size that most requests had, step by step."""
        return [usual(list(sizes.values())) for sizes in self.sizes(budget, steps, seed, most)]

    def tokens_per_second(self, nodes: int) -> float:
        """What it would be in the long run with trees of one size."""
        expected = sum(self.right**depth for depth in range(nodes))
        draft = self.draft if nodes > 1 else 0.0
        rows = self.others + self.batch * nodes
        return (self.others + self.batch * expected) / (self.fixed + self.row * rows + draft)


def usual(chosen: list[int]) -> int:
    """The size that is chosen most of the time."""
    return max(set(chosen), key=chosen.count)


def test_free_rows_give_the_whole_tree_and_dear_ones_none() -> None:
    for row, expected in ((0.0, NODES), (10.0, 1)):
        world = World(row=row)
        chosen = world.run(AdaptiveBudget(NODES), 400)[-128:]
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
    world.run(budget, 256, seed + 1)
    plain = world.fixed + world.row * batch
    assert world.now / world.tokens <= (1.05 + LEARNING_SHARE) * plain / batch


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_the_size_that_is_chosen_is_about_the_best(row: float, batch: int) -> None:
    world = World(row=row, draft=0.2, batch=batch)
    chosen = usual(world.run(AdaptiveBudget(NODES), 300)[-100:])
    best = max(world.tokens_per_second(nodes) for nodes in range(1, NODES + 1))
    assert world.tokens_per_second(chosen) > 0.93 * best


def test_a_tree_pays_for_itself_among_others_that_have_none() -> None:
    """A step is shared by all of them, its rows are not the tree's alone."""
    lone, among = World(row=0.1, draft=0.1), World(row=0.1, draft=0.1, others=15)
    large, small = (usual(world.run(AdaptiveBudget(NODES), 600)[-200:]) for world in (lone, among))
    assert small <= 4 < large
    best = max(among.tokens_per_second(nodes) for nodes in range(1, NODES + 1))
    assert among.tokens_per_second(small) > 0.98 * best


def test_what_lessons_lose_among_others_that_have_no_trees_is_bounded_too() -> None:
    world = World(row=1.0, draft=5.0, batch=2, others=30)
    budget = AdaptiveBudget(NODES)
    world.sizes(budget, 100)
    world.now, world.tokens = 0.0, 0
    world.sizes(budget, 1000)
    assert world.now / world.tokens < (1 + LEARNING_SHARE) * (world.fixed + world.row * 32) / 32


def test_learning_among_many_requests_takes_few_of_them_and_little_time() -> None:
    world = World(row=1.0, draft=5.0, batch=64)
    budget = AdaptiveBudget(NODES)
    first = world.sizes(budget, 40)
    assert max(sum(size > 1 for size in sizes.values()) for sizes in first) == 64 * max(LEARNERS) / OF_REQUESTS
    world.now, world.tokens = 0.0, 0
    world.sizes(budget, 1000)
    assert world.now / world.tokens < (1 + LEARNING_SHARE) * (world.fixed + world.row * 64) / 64


def test_prompts_that_keep_coming_do_not_bring_lesson_after_lesson() -> None:
    world, rng = World(row=10.0, batch=4), random.Random(0)
    budget = AdaptiveBudget(NODES)
    world.sizes(budget, 400)
    assert any(max(world.sizes(budget, 1)[-1].values()) > 1 for _ in range(2000)), "no lesson begins"
    chosen = []
    for _ in range(40):
        chosen.append(budget.choose([f"{number}" for number in range(4)], NODES))
        works, accepted = world.step(chosen[-1], rng)
        prompt = Work(Sequence.start(Request("new", (1, 2)), Place(0.0, 9)), np.arange(2), 0, None)
        budget.drafted(0.0)
        budget.verified([*works, prompt], [*accepted, None], 50.0)
    assert sum(max(sizes.values()) > 1 for sizes in chosen) <= len(LEARNERS)


def test_a_round_of_lessons_that_nobody_could_count_is_followed_by_as_long_a_pause_as_the_one_before() -> None:
    lessons, names = Lessons(), ["a"]
    taken = []
    for _ in range(400):
        taken.append(bool(lessons.sizes(names, NODES, True)))
        if not taken[-1] or sum(taken) <= len(LEARNERS):  # prompts come whenever a lesson does, but for the first round
            lessons.account(1.0, 0.0 if taken[-1] else 1.0)
    pause = len(LEARNERS) / LEARNING_SHARE
    assert len(LEARNERS) < sum(taken) <= len(LEARNERS) * (1 + 400 / pause)


def test_those_that_serve_to_learn_have_trees_beside_others_that_have_smaller_ones() -> None:
    world = World(row=0.06, batch=4)
    chosen = world.sizes(AdaptiveBudget(NODES), 400)[-200:]
    common = usual([size for sizes in chosen for size in sizes.values()])
    assert 1 < common < NODES
    assert {"0": NODES, "1": common, "2": common, "3": common} in chosen


def test_a_larger_size_is_tried_beside_the_best_known_one() -> None:
    world = World(row=0.01, batch=8)
    budget = AdaptiveBudget(NODES)
    assert usual(world.run(budget, 100, most=4)) == 4
    assert usual(world.run(budget, 6, most=NODES)) == 4
    assert usual(world.run(budget, 100, most=NODES)[-50:]) > 4


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
