"""A pair of drafters gives trees of both, of the lookups alone, or none, whichever yields most. No time is measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from eyas.config import DraftingConfig, EngineConfig
from eyas.drafters.base import Draft, DraftContext
from eyas.drafters.draft_head import DraftHead
from eyas.engine.budget.base import DECODE_ONLY, DraftBudget, FixedDraftBudget, NextStep
from eyas.engine.budget.pair import PairDraftBudget
from eyas.engine.build import assemble_engine
from eyas.engine.sequence import ScheduledSequence
from eyas.protocol.commit import ResyncRequired, TreeBudget
from eyas.sampling.acceptance import StepOutputs
from tests.engine.budget.simulation import Simulation
from tests.engine.budget.test_adaptive_engine import REQUESTS, TREE, expected, outputs_of, run, shared_target
from tests.support.tiers import nightly

__all__ = ["expected"]


@dataclass
class Pair(Simulation):
    """Steps of a pair. `draft` and `right` are of trees of both; those of the lookups alone take no time to draft.

    right_alone: how likely a node of lookups alone is accepted. alone: steps in which they drafted alone.
    """

    right_alone: float = 0.0
    alone: int = 0

    def pair(self) -> PairDraftBudget:
        return PairDraftBudget(self.budget(), self.lookups.budget())

    @property
    def lookups(self) -> Simulation:
        """Steps of the lookups, if these were the only drafter."""
        return Simulation(self.fixed, self.row, 0.0, self.right_alone, self.batch)

    def take_step(
        self, budget: DraftBudget, sizes: dict[str, TreeBudget], rng: random.Random
    ) -> tuple[list[ScheduledSequence], StepOutputs]:
        if not budget.lookups_alone:
            return super().take_step(budget, sizes, rng)
        self.alone += budget.num_nodes > 1
        lookups = self.lookups
        found = lookups.take_step(budget, sizes, rng)
        self.tokens += lookups.tokens
        return found

    def wait_s(self, sizes: dict[str, TreeBudget]) -> float:
        return 0.0 if self._budget.lookups_alone else super().wait_s(sizes)

    def sizes(self, budget: DraftBudget, steps: int, seed: int = 0, most: int = 8) -> list[int]:
        self._budget = budget
        return super().sizes(budget, steps, seed, most)


@pytest.mark.parametrize("batch", [1, nightly(8)])
def test_a_head_that_does_not_pay_takes_no_lookups_along(batch: int) -> None:
    pair = Pair(row=0.02, draft=1.5, right=0.7, batch=batch, right_alone=0.6)
    budget = pair.pair()
    pair.seconds_per_token(budget, 100)
    best = min(pair.lookups.expected_seconds_per_token(nodes) for nodes in range(1, 9))
    assert pair.seconds_per_token(budget, 600) < 1.06 * best
    assert budget.lookups_alone


@pytest.mark.parametrize("batch", [nightly(1), 8])
@pytest.mark.parametrize(("right_alone", "most_alone"), [(0.0, 12), (0.4, 120)])
def test_a_head_that_pays_drafts_next_to_its_lookups(batch: int, right_alone: float, most_alone: int) -> None:
    pair = Pair(row=0.02, draft=0.2, right=0.8, batch=batch, right_alone=right_alone)
    budget = pair.pair()
    pair.seconds_per_token(budget, 100)
    pair.alone = 0
    best = min(pair.expected_seconds_per_token(nodes) for nodes in range(2, 9))
    assert pair.seconds_per_token(budget, 600) < 1.06 * best
    assert pair.alone <= most_alone
    assert not budget.lookups_alone


@pytest.mark.parametrize("batch", [1, nightly(8), nightly(64)])
def test_a_pair_that_never_pays_costs_three_percent_at_most(batch: int) -> None:
    pair = Pair(row=0.1, draft=1.0, right=0.1, batch=batch, right_alone=0.05)
    assert pair.seconds_per_token(pair.pair(), 1000) < 1.03 * pair.lookups.expected_seconds_per_token(1)


def test_a_head_has_to_beat_its_lookups_where_these_pay() -> None:
    """Trees of both yield more than plain decoding, but less than lookups alone, which single steps show."""
    pair = Pair(row=0.0, draft=1.5, right=0.9, right_alone=0.85)
    budget = pair.pair()
    pair.seconds_per_token(budget, 300)
    pair.alone = 0
    pair.seconds_per_token(budget, 400)
    assert pair.alone > 350


@pytest.mark.parametrize("batch", [nightly(1), 8])
def test_a_head_that_pays_later_takes_over_from_lookups(batch: int) -> None:
    pair = Pair(row=0.02, draft=1.5, right=0.3, batch=batch, right_alone=0.5)
    budget = pair.pair()
    pair.seconds_per_token(budget, 400)
    assert budget.lookups_alone
    pair.draft = 0.2
    pair.right = 0.9
    pair.seconds_per_token(budget, 1200)
    assert not budget.lookups_alone
    assert pair.seconds_per_token(budget, 100) < 1.06 * min(pair.expected_seconds_per_token(nodes) for nodes in range(2, 9))


def test_a_drafter_that_is_no_pair_is_never_asked_for_lookups() -> None:
    """It may be replaced by a pair, which then drafts by its lookups alone where these are better."""
    pair = Pair(row=0.0, draft=1.5, right=0.9, right_alone=0.85)
    is_pair = False
    budget = PairDraftBudget(pair.budget(), pair.lookups.budget(), lambda: is_pair)
    pair.seconds_per_token(budget, 300)
    assert not pair.alone
    assert not budget.lookups_alone
    is_pair = True
    pair.seconds_per_token(budget, 300)
    assert budget.lookups_alone


def test_prompts_go_to_both_while_trees_of_both_pay() -> None:
    pair = Pair(row=0.02, draft=0.2, right=0.8)
    budget = pair.pair()
    pair.seconds_per_token(budget, 100)
    budget.choose([], 8, 0, NextStep(1, 100))
    assert budget.takes_prompts
    assert not budget.lookups_alone


class Alternating(FixedDraftBudget):
    """Asks the lookups alone in four of seven steps."""

    num_steps = 0

    def choose(
        self,
        decoding: list[str],
        most: int,
        num_plain: int = 0,
        step: NextStep = DECODE_ONLY,  # type: ignore[override]
    ) -> dict[str, TreeBudget]:
        self.num_steps += 1
        self.lookups_alone = self.num_steps % 7 < 4
        return super().choose(decoding, most, num_plain, step)


def test_outputs_are_equal_without_the_head(tiny_target: str, tiny_head: str, expected: dict[str, list[int]]) -> None:
    """The head catches up with what lookups alone have drafted for, and nothing is sent twice."""
    head = DraftHead(tiny_head, "eagle3+prompt_lookup")
    fuser = head.build_fuser(tiny_target, "float32", "cpu")
    assert fuser is not None
    drafter = head.build_drafter(tiny_target, "float32", "cpu", TREE, DraftingConfig(max_kv_tokens=512))
    answers = list[Draft]()
    propose = drafter.propose

    def watched(contexts: Sequence[DraftContext]) -> list[Draft]:
        found = propose(contexts)
        answers.extend(found)
        return found

    drafter.propose = watched  # type: ignore[method-assign]
    target = shared_target(tiny_target, fuser.aux_hidden_state_layers)
    for policy in ("fixed", "adaptive"):
        config = EngineConfig(max_kv_tokens=512, draft_budget=policy)  # type: ignore[arg-type]
        engine = assemble_engine(target, fuser, config, TREE, drafter)
        if policy == "fixed":
            engine.budget = Alternating()
        else:
            assert isinstance(engine.budget, PairDraftBudget)
        assert outputs_of(run(engine, REQUESTS)) == expected
    assert answers
    assert not [answer for answer in answers if isinstance(answer, ResyncRequired)]
