"""A pruned budget drafts the largest trees, and verifies the nodes that are worth their rows."""

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from eyas.config import TreeConfig
from eyas.drafters.base import DrafterNeeds
from eyas.engine.draft_costs import CostModel, PrunedDraftBudget, StepTimes, TreeSize
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.request import Request, SamplingParams
from eyas.sampling.acceptance import Accepted, VerifyOutput
from eyas.tree import DraftTree
from tests import reference
from tests.engine.budget.simulation import DEFAULTS, SLOTS
from tests.engine.drafters import KnowingDrafter, RandomDrafter
from tests.tiny import build_engine, fixed_config

NODES = 16
RIGHT = 0.8  # of a node whose parent is accepted


def chain(num_nodes: int) -> DraftTree:
    nodes = range(num_nodes)
    return DraftTree(tuple(nodes), tuple(max(i - 1, 0) for i in nodes), tuple(-0.22 * i for i in nodes))


def verified_nodes(row_s: float, fixed_s: float = 1.0, draft_s: float = 1.0, steps: int = 200) -> float:
    """Mean nodes of the last trees, if a pass takes `fixed_s` and `row_s` for each row."""
    sizes, rng = (1, 4, 16, 64), random.Random(1)
    budget = PrunedDraftBudget(CostModel(sizes, [fixed_s + row_s * rows for rows in sizes], rate=0.1))
    found = []
    for _ in range(steps):
        assert budget.choose(["a"], NODES) == {"a": TreeSize(NODES, NODES)}
        (tree,) = budget.prune([chain(NODES)])
        found.append(len(tree))
        num_accepted = next((i for i in range(tree.num_drafted) if rng.random() > RIGHT), tree.num_drafted)
        sequence = Sequence(Request("a", (1,), DEFAULTS), QueueKey(0.0, 0), [1], SLOTS)
        scheduled = ScheduledSequence(sequence, np.arange(len(tree)), 1, tree)
        path = tuple(range(num_accepted + 1))
        output = VerifyOutput(Accepted(path, path))
        budget.observe([scheduled], [output], StepTimes(draft_s, fixed_s + row_s * len(tree), 0.0))
    return sum(found[-100:]) / 100


def test_cheap_rows_are_all_verified() -> None:
    assert verified_nodes(0.0) == NODES


def test_the_dearer_a_row_the_fewer_are_verified() -> None:
    sizes = [verified_nodes(row_s) for row_s in (0.01, 0.1, 0.3, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert NODES >= sizes[0] > sizes[1] > sizes[2] > sizes[3] >= 1


def test_the_number_of_nodes_is_the_best_for_chains() -> None:
    """Rate of a chain of n drafted nodes: (1 + p + ... + p ** n) / (fixed + draft + row * (1 + n))."""
    row_s = 0.15
    rates = {n: sum(RIGHT**i for i in range(n + 1)) / (2.0 + row_s * (1 + n)) for n in range(NODES)}
    best = max(rates, key=rates.__getitem__)
    assert verified_nodes(row_s) == pytest.approx(best + 1, abs=2)


class Unsampled(RandomDrafter):
    """Needs no samples: trees whose samples a drafter needs are not pruned."""

    needs = DrafterNeeds()


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_pruned_trees_change_no_token(temperature: float, is_right: bool, tiny_target: str) -> None:
    tree, sampling = TreeConfig(12, 4, 4), SamplingParams(24, temperature=temperature, seed=4, ignore_eos=True)
    config = fixed_config(max_kv_tokens=512, draft_budget="pruned")
    requests = [Request(f"{i}", (9, 8, 7 + i), sampling) for i in range(3)]
    expected = {r.id: reference.generate(tiny_target, list(r.prompt_ids), sampling) for r in requests}
    outcomes = {request.id: [*request.prompt_ids, *expected[request.id]] for request in requests}
    drafter = KnowingDrafter(outcomes, 48) if is_right else Unsampled(48)
    engine = build_engine(tiny_target, None, "float32", "cpu", config, tree, drafter)
    budget = WatchedBudget(CostModel([1, 64], [0.01, 0.64], rate=0.0))  # rows are dear on any machine
    engine._budget, emitted = budget, {request.id: list[int]() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for chunk in engine.step():
            emitted[chunk.request_id] += chunk.token_ids
    engine.check()
    assert emitted == expected
    assert 0 < budget.num_kept < budget.num_drafted


class WatchedBudget(PrunedDraftBudget):
    """Counts the nodes that came and those that are verified."""

    num_drafted = num_kept = 0

    def prune(self, trees: Seq[DraftTree], num_plain: int = 0) -> list[DraftTree]:
        kept = super().prune(trees, num_plain)
        self.num_drafted += sum(tree.num_drafted for tree in trees)
        self.num_kept += sum(tree.num_drafted for tree in kept)
        return kept
