"""Steps that serve to learn: how many requests they take, what they may lose, when they come."""

import random

import numpy as np
import pytest

from eyas.engine.draft_budget import LEARNERS, LEARNING_SHARE, OF_REQUESTS, AdaptiveDraftBudget, Exploration
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.request import Request
from tests.engine.budget.simulation import NODES, World, usual


def test_exploration_loss_is_bounded_beside_treeless_requests() -> None:
    world = World(row=1.0, draft=5.0, batch=2, others=30)
    budget = AdaptiveDraftBudget(NODES)
    world.sizes(budget, 100)
    world.now, world.tokens = 0.0, 0
    world.sizes(budget, 1000)
    assert world.now / world.tokens < (1 + LEARNING_SHARE) * (world.fixed + world.row * 32) / 32


@pytest.mark.parametrize("draft", [5.0, 50.0])
def test_exploration_loss_is_bounded_in_the_long_run(draft: float) -> None:
    world = World(draft=draft)
    budget = AdaptiveDraftBudget(NODES)
    world.sizes(budget, 100)
    world.now, world.tokens = 0.0, 0
    world.sizes(budget, 20000)
    assert world.now / world.tokens < (1 + 1.2 * LEARNING_SHARE) * world.fixed


def test_exploration_uses_few_requests_and_little_time() -> None:
    world = World(row=1.0, draft=5.0, batch=64)
    budget = AdaptiveDraftBudget(NODES)
    first = world.sizes(budget, 40)
    assert max(sum(size > 1 for size in sizes.values()) for sizes in first) == 64 * max(LEARNERS) / OF_REQUESTS
    world.now, world.tokens = 0.0, 0
    world.sizes(budget, 1000)
    assert world.now / world.tokens < (1 + LEARNING_SHARE) * (world.fixed + world.row * 64) / 64


def test_arriving_prompts_do_not_cause_repeated_exploration() -> None:
    world, rng = World(row=10.0, batch=4), random.Random(0)
    budget = AdaptiveDraftBudget(NODES)
    world.sizes(budget, 400)
    assert any(max(world.sizes(budget, 1)[-1].values()) > 1 for _ in range(2000)), "no lesson begins"
    chosen = []
    for _ in range(40):
        chosen.append(budget.choose([f"{number}" for number in range(4)], NODES))
        works, accepted = world.step(chosen[-1], rng)
        prompt = ScheduledSequence(Sequence.start(Request("new", (1, 2)), QueueKey(0.0, 9)), np.arange(2), 0, None)
        budget.drafted(0.0)
        budget.verified([*works, prompt], [*accepted, None], 50.0)
    assert sum(max(sizes.values()) > 1 for sizes in chosen) <= len(LEARNERS)


def test_an_uncounted_exploration_keeps_the_length_of_the_pause() -> None:
    lessons, names = Exploration(), ["a"]
    taken = []
    for _ in range(400):
        taken.append(bool(lessons.sizes(names, NODES, True)))
        if not taken[-1] or sum(taken) <= len(LEARNERS):  # prompts come whenever a lesson does, but for the first round
            lessons.account(1.0, 0.0 if taken[-1] else 1.0)
    pause = len(LEARNERS) / LEARNING_SHARE
    assert len(LEARNERS) < sum(taken) <= len(LEARNERS) * (1 + 400 / pause)


def test_exploring_requests_get_larger_trees_than_others() -> None:
    world = World(row=0.06, batch=4)
    chosen = world.sizes(AdaptiveDraftBudget(NODES), 400)[-200:]
    common = usual([size for sizes in chosen for size in sizes.values()])
    assert 1 < common < NODES
    assert {"0": NODES, "1": common, "2": common, "3": common} in chosen
