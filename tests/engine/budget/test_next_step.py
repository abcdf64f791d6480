"""What the adaptive budget makes of prompts in the next step, and of sequences that the drafter lacks tokens of."""

from collections.abc import Mapping

from eyas.engine.budget.adaptive import AdaptiveDraftBudget
from eyas.engine.budget.base import NextStep
from eyas.engine.budget.costs import CostModel, DraftCosts
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree
from tests.engine.budget.simulation import CHAINS, NODES, Simulation

KNEE = 64.0  # rows up to which a pass of `roofline_budget` takes a second
BATCH = 8
NAMES = [f"{number}" for number in range(BATCH)]


class Roofline(Simulation):
    """Passes that take a second up to KNEE rows."""

    def budget(self, remote: bool = False) -> AdaptiveDraftBudget:
        sizes = (1.0, KNEE, 16 * KNEE)
        first, level = (CostModel(sizes, [seconds] * 3) for seconds in (self.draft, 0.0))
        return AdaptiveDraftBudget(CHAINS, CostModel(sizes, (1.0, 1.0, 16.0)), DraftCosts(first, level, 1))


def trained(draft: float = 0.05) -> AdaptiveDraftBudget:
    """A budget that has drafted for BATCH sequences."""
    simulation = Roofline(draft=draft, batch=BATCH)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    return budget


def drafting(sizes: Mapping[str, TreeBudget]) -> list[str]:
    return [name for name, size in sizes.items() if size.max_depth]


def test_a_step_with_prompts_does_not_end_drafting() -> None:
    budget = trained()
    assert len(drafting(budget.choose(NAMES, NODES))) == BATCH
    budget.choose(NAMES, NODES, 0, NextStep(BATCH, int(64 * KNEE)))
    assert len(drafting(budget.choose(NAMES, NODES))) == BATCH


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


def test_others_keep_their_trees_beside_scouts() -> None:
    simulation = Simulation(row=0.03, draft=0.1, batch=32)
    budget = simulation.budget()
    simulation.sizes(budget, 40)
    seen: set[int] = set()
    for _ in range(200):
        sizes = budget.choose([f"{number}" for number in range(32)], NODES)
        assert len(drafting(sizes)) == 32
        seen.add(len(set(sizes.values())))
    assert seen <= {1, 2}


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
