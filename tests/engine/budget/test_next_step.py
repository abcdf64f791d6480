"""What the adaptive budget makes of prompts in the next step, and of sequences that the drafter lacks tokens of."""

import random
from collections.abc import Mapping
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from eyas.engine.draft_budget import AdaptiveDraftBudget
from eyas.engine.draft_costs import Candidate, CostModel, DraftCosts, NextStep, StepTimes, TreeSize
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.request import Request
from eyas.sampling.acceptance import Accepted, VerifyOutput
from eyas.tree import DraftTree
from tests.engine.budget.simulation import CHAINS, NODES, Simulation

KNEE = 64.0  # rows up to which a pass of `roofline_budget` takes a second
BATCH = 8
NAMES = [f"{number}" for number in range(BATCH)]


class Roofline(Simulation):
    """Passes that take a second up to KNEE rows."""

    def budget(self, remote: bool = False) -> AdaptiveDraftBudget:
        sizes = (1.0, KNEE, 16 * KNEE)
        first, level = (CostModel(sizes, [seconds] * 3, rate=0.5) for seconds in (self.draft, 0.0))
        return AdaptiveDraftBudget(CHAINS, CostModel(sizes, (1.0, 1.0, 16.0), rate=0.1), DraftCosts(first, level, 1))


def trained(draft: float = 0.05) -> AdaptiveDraftBudget:
    """A budget that has drafted for BATCH sequences."""
    simulation = Roofline(draft=draft, batch=BATCH)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    return budget


def drafting(sizes: Mapping[str, TreeSize]) -> list[str]:
    return [name for name, size in sizes.items() if size.depth]


def test_rows_of_prompts_leave_no_room_for_trees() -> None:
    budget = trained()
    assert len(drafting(budget.choose(NAMES, NODES))) == BATCH
    with_prompts = budget.choose(NAMES, NODES, 0, NextStep(BATCH, int(8 * KNEE)))
    assert sum(size.nodes - 1 for size in with_prompts.values()) < BATCH * (NODES - 1)
    assert len(drafting(budget.choose(NAMES, NODES))) == BATCH, "as soon as there are no prompts"


def test_trees_beside_prompts_leave_a_debt_too() -> None:
    """One of eight sequences has a tree beside 512 rows of a prompt, and no node of it is accepted."""
    budget = trained()
    budget._free_s, before = 0.0, budget._debt_s
    budget._sizes = dict.fromkeys(NAMES, TreeSize(1, 0)) | {"0": TreeSize(NODES, NODES - 1)}
    slots = np.zeros(1000, np.int64)
    sequences = [Sequence(Request(name, (1,)), QueueKey(0.0, 0), [1], slots) for name in [*NAMES, "prompt"]]
    trees = [DraftTree.chain(range(NODES)), *[DraftTree.chain((1,))] * (BATCH - 1), None]
    rows = [NODES, *[1] * (BATCH - 1), int(8 * KNEE)]
    batch = [ScheduledSequence(s, np.arange(n), 1, tree) for s, n, tree in zip(sequences, rows, trees, strict=True)]
    outputs = [*[VerifyOutput(Accepted((0,), (5,)))] * BATCH, VerifyOutput(None)]
    verify_s = budget._verify.seconds(sum(rows))
    lost_s = verify_s - budget._verify.seconds(sum(rows) - NODES + 1) + 0.05
    budget.observe(batch, outputs, StepTimes(0.05, verify_s, None))
    assert budget._debt_s - before == pytest.approx(lost_s, rel=0.05)


def test_prompts_of_the_next_step_forgive_no_debt() -> None:
    budget = trained()
    budget._debt_s, budget._debt_rows = 0.5, BATCH
    budget.choose(NAMES, NODES, 0, NextStep(BATCH, int(8 * KNEE)))
    assert budget._debt_s == 0.5


def test_a_choice_of_long_ago_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = trained()
    budget.choose(NAMES, NODES, 0, NextStep(1, 100))
    budget._num_steps += 10 * AdaptiveDraftBudget.MAX_PLAIN_STEPS
    nodes = Mock(wraps=budget._recent.nodes)
    monkeypatch.setattr(budget._recent, "nodes", nodes)
    budget.choose(NAMES, NODES, 0, NextStep(1, 100))
    assert nodes.call_count == 1


def test_the_choices_with_and_without_prompts_are_both_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = trained()
    nodes = Mock(wraps=budget._recent.nodes)
    monkeypatch.setattr(budget._recent, "nodes", nodes)
    for length in (0, 100, 0, 120, 0, 90):
        budget.choose(NAMES, NODES, 0, NextStep(1 if length else 0, length))
    assert nodes.call_count <= 3


def test_a_slight_gain_is_no_reason_to_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catching up takes .01 seconds a token, and trees save .5 in all: more than 25 tokens are not worth it."""
    budget = trained()
    monkeypatch.setattr(AdaptiveDraftBudget, "_catch_up_token_s", 0.01)
    lacking = {name: Candidate(length=10 * number, num_left=50, num_missed=0) for number, name in enumerate(NAMES)}
    budget._sizes, budget._begun = dict.fromkeys(NAMES, TreeSize(1, 0)), set()
    plan = budget._plan._replace(saved_s=0.01, rate=0.0) if budget._plan else None
    assert plan is not None
    budget._step = NextStep(candidates=lambda: lacking)
    assert budget._worth_drafting(NAMES, plan, BATCH) == ["0", "1", "2"]


def test_few_rows_of_prompts_leave_trees_as_they_are() -> None:
    budget = trained()
    assert budget.choose(NAMES, NODES) == budget.choose(NAMES, NODES, 0, NextStep(0, 1))


def test_trees_are_pruned_by_what_nodes_cost_beside_prompts() -> None:
    budget = trained()
    likely = [DraftTree.chain(range(NODES))] * BATCH
    budget.choose(NAMES, NODES)
    alone = budget.prune(likely)
    budget.choose(NAMES, NODES, 0, NextStep(BATCH, int(8 * KNEE)))
    beside = budget.prune(likely)
    assert sum(map(len, beside)) < sum(map(len, alone))


def late_step(num_left: int, num_missed: int = 50) -> NextStep:
    """All sequences have `num_left` tokens left, and the drafter lacks `num_missed` of each."""
    candidate = Candidate(1000, num_left, num_missed)
    return NextStep(candidates=lambda: dict.fromkeys(NAMES, candidate))


def stopped_for_a_while(token_s: float) -> AdaptiveDraftBudget:
    """A budget whose sequences had no trees in the last step, and that knows what a token costs to catch up with."""
    budget = trained()
    budget.choose(NAMES, NODES, 0, late_step(1000))
    budget._sizes = dict.fromkeys(NAMES, TreeSize(1, 0))
    budget._catch_up[:] = token_s, 1.0
    return budget


@pytest.mark.parametrize(("num_left", "expected"), [(2, 0), (5000, BATCH)])
def test_catching_up_is_worth_it_if_enough_tokens_are_left(num_left: int, expected: int) -> None:
    budget = stopped_for_a_while(token_s=0.1)
    assert len(drafting(budget.choose(NAMES, NODES, 0, late_step(num_left)))) == expected


def test_sequences_that_draft_go_on_to_their_end() -> None:
    budget = trained()
    budget._catch_up[:] = 1e6, 1.0
    for _ in range(3):
        assert len(drafting(budget.choose(NAMES, NODES, 0, late_step(1)))) == BATCH


def test_those_with_enough_left_draft_without_the_others() -> None:
    budget = stopped_for_a_while(token_s=0.1)
    few, many = Candidate(1000, 2, 50), Candidate(1000, 5000, 50)
    step = NextStep(candidates=lambda: {name: many if int(name) < 5 else few for name in NAMES})
    assert drafting(budget.choose(NAMES, NODES, 0, step)) == NAMES[:5]


def test_a_catch_up_that_seemed_dear_is_tried_some_time() -> None:
    budget = stopped_for_a_while(token_s=1.0)
    steps = 0
    while not drafting(budget.choose(NAMES, NODES, 0, late_step(100))):
        steps += 1
        assert steps < 1000
    assert steps > 10


def test_catching_up_is_measured_and_no_cost_of_other_rounds() -> None:
    """One sequence in nine is new in each round, with 100 tokens that take a millisecond each."""
    simulation = Roofline(draft=0.05, batch=BATCH)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    for number in range(60):
        names = [*NAMES, f"new {number}"]
        candidates = dict.fromkeys(names, Candidate(100, 5000, 1))
        sizes = budget.choose(names, NODES, 0, NextStep(candidates=partial(dict, candidates)))
        batch, outputs = simulation._step(dict(sizes), random.Random(number))
        budget.observe(batch, outputs, StepTimes(0.05 + 0.001 * 100, 1.0))
    assert budget._catch_up_token_s == pytest.approx(0.001, rel=0.2)
    assert budget._draft.at(BATCH, TreeSize(NODES, NODES - 1)) == pytest.approx(0.05, rel=0.3)


def test_candidates_are_made_only_for_late_sequences() -> None:
    calls = 0

    def candidates() -> dict[str, Candidate]:
        nonlocal calls
        calls += 1
        return dict.fromkeys(NAMES, Candidate(1000, 500, 2))

    budget = trained()
    step = NextStep(candidates=candidates)
    for _ in range(20):
        budget.choose(NAMES, NODES, 0, step)
    assert calls == 0


def test_others_keep_their_trees_beside_scouts() -> None:
    simulation = Simulation(row=0.03, draft=0.1, batch=32)
    budget = simulation.budget()
    simulation.sizes(budget, 40)
    seen: set[int] = set()
    for _ in range(200):
        sizes = budget.choose([f"{number}" for number in range(32)], NODES)
        assert len(drafting(sizes)) == 32
        seen.add(len(set(sizes.values())))
    assert seen == {1, 2}


def test_load_that_rises_and_falls_loses_little() -> None:
    """Against the best fixed size of each load."""
    simulation = Simulation(row=0.02, draft=0.1, right=0.85)
    budget, batches = simulation.budget(), [1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1] * 3
    simulation.sizes(budget, 50)
    spent = least = 0.0
    for batch in batches:
        per_token = simulation.resized(batch).seconds_per_token(budget, 10)
        spent += simulation.tokens * per_token
        least += simulation.tokens * min(map(simulation.expected_seconds_per_token, range(1, NODES + 1)))
    assert spent < 1.12 * least
