"""The size of draft trees under made-up costs: it follows what nodes cost and what they yield."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.draft_budget import AdaptiveDraftBudget
from eyas.engine.draft_costs import CostModel, DraftCosts, StepTimes, SurvivalModel, TreeSize
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.request import Request
from eyas.sampling.acceptance import VerifyOutput
from eyas.tree import DraftTree, SampledProposal
from tests.engine.budget.simulation import CHAINS, NODES, Simulation, usual
from tests.strategies import trees

RETRY_SHARE = AdaptiveDraftBudget.RETRY_SHARE


@pytest.mark.parametrize(("row", "expected"), [(0.0, NODES), (10.0, 1)])
def test_free_rows_give_whole_trees_and_costly_rows_none(row: float, expected: int) -> None:
    simulation = Simulation(row=row)
    assert set(simulation.sizes(simulation.budget(), 200)) == {expected}


def test_a_choice_of_no_trees_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(1.0, 0.25, 0.2, batch=1)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 200)) > 1
    nodes = Mock(wraps=budget._recent.nodes)
    monkeypatch.setattr(budget._recent, "nodes", nodes)
    assert usual(simulation.resized(64).sizes(budget, 600)) == 1
    assert nodes.call_count < 2 * 600 / AdaptiveDraftBudget.MAX_PLAIN_STEPS


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
def test_a_slow_drafter_is_left_out_and_retried(remote: bool) -> None:
    simulation = Simulation(draft=0.1 if not remote else 20.0)
    budget = simulation.budget(remote)
    simulation.draft = 20.0
    assert usual(simulation.sizes(budget, 300)[-100:]) == 1
    simulation.draft = 0.1
    assert usual(simulation.sizes(budget, 4000)[-100:]) == NODES


@pytest.mark.parametrize(("batch", "fixed", "row", "right"), [(64, 1.0, 1 / 32, 0.7), (256, 0.2, 1 / 40, 0.6)])
def test_long_contexts_do_not_make_rows_seem_costly(batch: int, fixed: float, row: float, right: float) -> None:
    """Contexts take ten seconds of a step, and no node adds to these."""
    simulation = Simulation(fixed, row, 0.2, right, batch, context=500, context_token=10 / 500 / batch)
    best = min(simulation.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert simulation.seconds_per_token(simulation.budget(), 100) < 1.03 * best


def test_catching_up_is_not_a_cost_of_every_draft() -> None:
    simulation = Simulation(row=0.01, draft=20.0)
    budget = simulation.budget(remote=True)
    assert usual(simulation.sizes(budget, 300)[-100:]) == 1
    simulation.draft, simulation.behind = 0.1, 0.2
    assert usual(simulation.sizes(budget, 3000)[-100:]) > 4


def test_a_silent_drafter_is_left_out_and_found_when_it_is_back() -> None:
    simulation = Simulation(draft=0.2, row=0.01)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 300)[-100:]) > 4
    simulation.available = False
    assert usual(simulation.sizes(budget, 600)[-100:]) == 1
    simulation.available = True
    assert usual(simulation.sizes(budget, 2000)[-100:]) > 4


def test_a_drafter_that_is_silent_at_first_is_found_later() -> None:
    simulation = Simulation(draft=0.2, row=0.01, available=False)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 100)[-50:]) == 1
    simulation.available = True
    assert usual(simulation.sizes(budget, 2000)[-100:]) > 4


@pytest.mark.parametrize("has_output", [False, True])
def test_a_step_may_lack_all_sequences_that_have_drafted(has_output: bool) -> None:
    simulation = Simulation(draft=0.2, row=0.01)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    tree = DraftTree.chain((1, 2))
    sequence = Sequence(Request("0" if has_output else "another", (1,)), QueueKey(0.0, 0), [1], np.zeros(0, np.int64))
    batch = [ScheduledSequence(sequence, np.arange(2), 1, tree)]
    budget.observe(batch, [VerifyOutput(None, error="NaN")], StepTimes(0.2, 1.0))
    assert usual(simulation.sizes(budget, 100)) > 4


def test_useless_drafts_are_retried_when_they_become_useful() -> None:
    simulation = Simulation(row=0.2, draft=0.2, right=0.02)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 300)[-100:]) == 1
    simulation.right = 0.95
    assert usual(simulation.sizes(budget, 1000)[-100:]) > 4


@settings(max_examples=10)
@given(
    st.floats(0, 0.5), st.floats(0, 3), st.floats(0.05, 0.95), st.sampled_from([1, 4, 16]), st.integers(0, 9)
)  # fmt: skip
def test_speculation_costs_little_more_than_it_yields(row: float, draft: float, right: float, batch: int, seed: int) -> None:
    simulation = Simulation(row=row, draft=draft, right=right, batch=batch)
    budget = simulation.budget()
    simulation.sizes(budget, 100, seed)
    plain = simulation.expected_seconds_per_token(1)
    assert simulation.seconds_per_token(budget, 256, seed + 1) <= (1.05 + RETRY_SHARE) * plain


@pytest.mark.parametrize("draft", [5.0, 50.0])
def test_retries_take_a_bounded_share_of_all_time(draft: float) -> None:
    simulation = Simulation(draft=draft, right=0.3)
    budget = simulation.budget(remote=True)
    simulation.sizes(budget, 100)
    assert simulation.seconds_per_token(budget, 8000) < (1 + 3 * RETRY_SHARE) * simulation.fixed


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_the_chosen_size_is_about_the_best(row: float, batch: int) -> None:
    simulation = Simulation(row=row, draft=0.2, batch=batch)
    chosen = usual(simulation.sizes(simulation.budget(), 300)[-100:])
    best = min(simulation.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert best > 0.88 * simulation.expected_seconds_per_token(chosen), "what yields less than FIRST_MARGIN is not begun"


def test_a_tree_pays_for_its_rows_alone_among_others_without() -> None:
    lone, among = Simulation(row=0.1, draft=0.1), Simulation(row=0.1, draft=0.1, others=15)
    large, small = (usual(each.sizes(each.budget(), 600)[-200:]) for each in (lone, among))
    assert small <= 5 < large
    best = min(among.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert best > 0.98 * among.expected_seconds_per_token(small)


def test_more_sequences_have_smaller_trees_where_rows_cost() -> None:
    sizes = []
    for batch in (1, 4, 16, 64):
        simulation = Simulation(row=0.1, batch=batch)
        sizes.append(usual(simulation.sizes(simulation.budget(), 200)[-100:]))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > 4, sizes[-1]) == (True, 1)


def test_load_that_comes_and_goes_stops_no_drafting() -> None:
    simulation = Simulation(row=0.01, draft=0.1)
    budget = simulation.budget()
    simulation.sizes(budget, 50)
    for batch, most in ((16, 4), (64, 2), (16, 4), (4, NODES), (1, NODES)):
        sizes = simulation.resized(batch).sizes(budget, 30, most=most)
        assert sum(size == 1 for size in sizes) <= 3, batch
    assert usual(sizes) > 4


def test_a_debt_of_many_sequences_stops_no_few_ones() -> None:
    simulation = Simulation(row=0.01, draft=0.1)
    budget = simulation.budget()
    simulation.sizes(budget, 50)
    simulation.resized(64).row = 1.0  # the tables do not know it yet
    simulation.sizes(budget, 40)
    simulation.row = 0.01
    budget._verify = simulation.budget()._verify
    sizes = simulation.resized(1).sizes(budget, 30)
    assert sum(size == 1 for size in sizes) <= 3


def test_all_sequences_draft_after_a_step_of_scouts() -> None:
    simulation = Simulation(row=0.01, draft=0.1, batch=32)
    assert [size > 1 for size in simulation.sizes(simulation.budget(), 20)] == [False] + [True] * 20


def test_scouts_are_as_many_as_cost_little_more_than_one() -> None:
    budget = Simulation(batch=64).budget()
    names = [f"{i}" for i in range(64)]
    assert sum(size.depth > 0 for size in budget.choose(names, NODES).values()) == 8
    budget, sizes, costs = Simulation(batch=64).budget(), (1, 4, 64), [0.1, 0.2, 0.3]
    budget._draft = DraftCosts(CostModel(sizes, costs, 0.5), CostModel(sizes, costs, 0.5), 1)
    chosen = budget.choose(names, NODES)
    assert [name for name in names if chosen[name].depth] == ["0"]


def test_no_tree_is_larger_than_a_step_allows() -> None:
    simulation = Simulation()
    budget = simulation.budget()
    assert set(simulation.sizes(budget, 100, most=3)) <= {1, 2, 3}
    assert set(simulation.sizes(budget, 10, most=1)) == {1}
    assert usual(simulation.sizes(budget, 100)[-50:]) == NODES, "what was never requested is tried"


def test_a_pause_of_the_machine_is_not_a_cost_of_rows() -> None:
    simulation = Simulation(row=0.001)
    budget = simulation.budget()
    simulation.sizes(budget, 200)
    simulation.fixed = 500.0
    simulation.sizes(budget, 1)
    simulation.fixed = 1.0
    assert usual(simulation.sizes(budget, 20)) == NODES


def trained_budget(row: float, step: float = 1.0) -> AdaptiveDraftBudget:
    """A budget whose rows cost `row`, beside `step` seconds of a step."""
    sizes = (1, 4, 16, 64, 256)
    verify = CostModel(sizes, [step + row * rows for rows in sizes], rate=0.1)
    free = CostModel(sizes, [0.0] * len(sizes), rate=0.5)
    return AdaptiveDraftBudget(CHAINS, verify, DraftCosts(free, free, 1))


@pytest.mark.parametrize("batch", [1, 8])
def test_what_a_drafter_without_drafts_costs_is_looked_up_seldom(batch: int) -> None:
    """A choice of no trees holds for a while, for one sequence and for several."""
    budget = trained_budget(0.1)
    for _ in range(16):
        budget._recent.observe(DraftTree.root_only(1), NODES)
    plans = [budget._planned(batch, NODES, 0) for _ in range(20)]
    assert plans[0].size.nodes == 1
    assert all(plan is plans[0] for plan in plans)


LIKELY = DraftTree((1, 2, 3, 4, 5), (0, 0, 1, 2, 0), (0.0, -0.02, -0.05, -0.06, -4.5))
UNLIKELY = DraftTree((1, 2, 3), (0, 0, 1), (0.0, -3.5, -3.6))


def test_nodes_that_cost_more_than_they_yield_are_left_out() -> None:
    assert trained_budget(0.0).prune([LIKELY, UNLIKELY]) == [LIKELY, UNLIKELY]
    assert trained_budget(0.1).prune([LIKELY, UNLIKELY]) == [LIKELY.pruned([0, 1, 2, 3]), UNLIKELY.pruned([0])]
    assert trained_budget(10.0).prune([LIKELY, UNLIKELY], 5) == [LIKELY.pruned([0]), UNLIKELY.pruned([0])]
    assert trained_budget(0.1).prune([]) == []


@settings(max_examples=30)
@given(st.lists(trees(), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 3))
def test_no_other_number_of_nodes_yields_more(drafted: list[DraftTree], row: float, num_plain: int) -> None:
    budget, model = trained_budget(row), SurvivalModel()
    nodes = sorted((chance for own in model.survival(drafted) for chance in own[1:]), reverse=True)
    pruned = budget.prune(drafted, num_plain)
    for tree in pruned:
        tree.validate(tree.tokens[0], 10**6, 10**3, 10**3)
    num_kept, base = sum(tree.num_drafted for tree in pruned), num_plain + len(drafted)
    rates = [(base + sum(nodes[:k])) / (1 + row * (base + k)) for k in range(len(nodes) + 1)]
    assert rates[num_kept] == pytest.approx(max(rates))


def test_survival_follows_what_was_verified() -> None:
    model = SurvivalModel()
    (claimed,) = model.survival([LIKELY])
    assert claimed[1:4] == pytest.approx([0.95] * 3, abs=0.05)
    for _ in range(100):
        model.forget()
        model.observe([LIKELY, UNLIKELY], [(0,), (0,)])
    likely, unlikely = model.survival([LIKELY, UNLIKELY])
    assert (likely[1:] < 0.2).all()
    assert (np.diff(unlikely) <= 0).all()


def test_survival_is_learned_below_accepted_parents_alone() -> None:
    model, tree = SurvivalModel(), DraftTree.chain(range(4))
    for step in range(300):
        model.forget()
        model.observe([tree], [(0, 1) if step % 2 else (0,)])
    (survival,) = model.survival([tree])
    assert survival.tolist() == pytest.approx([1, 1 / 3, 1 / 9, 1 / 27], abs=0.08)


@pytest.mark.parametrize("ended", ["right", "draft"], ids=["bad text", "slow drafter"])
@pytest.mark.parametrize("seed", range(2))
def test_one_bad_stretch_stops_drafting_for_two_requests_at_most(ended: str, seed: int) -> None:
    """Two of 128 tokens. What such stretches cost stays bounded too."""
    simulation = Simulation(row=0.05, draft=0.5)
    budget, usually = simulation.budget(), getattr(simulation, ended)
    simulation.sizes(budget, 300, seed)
    setattr(simulation, ended, {"right": 0.0, "draft": 10.0}[ended])
    assert usual(simulation.sizes(budget, 80, seed)[-20:]) == 1
    setattr(simulation, ended, usually)
    assert usual(simulation.sizes(budget, 280, seed)[-24:]) > 4


def test_bad_stretches_that_come_back_cost_little() -> None:
    """Twenty good steps in two hundred: drafting begins too late each time, and may lose less from stop to stop."""
    simulation = Simulation(row=0.05, draft=0.5)
    budget = simulation.budget()
    for part in range(20):
        simulation.right = 0.9 if part % 2 else 0.0
        simulation.sizes(budget, 20 if part % 2 else 180, part)
    assert simulation.now / simulation.tokens <= simulation.expected_seconds_per_token(1) / 0.98


def test_a_drafter_that_starts_slowly_is_not_given_up() -> None:
    """The first trees of a drafter apart take as long as 25 plain steps: it loads, or gets the prompt."""
    simulation = Simulation(fixed=0.01, draft=0.25)
    budget = simulation.budget(remote=True)
    simulation.sizes(budget, 3)
    simulation.draft = 0.002
    assert usual(simulation.sizes(budget, 150)[-20:]) == NODES


def test_a_long_time_between_steps_hides_no_cost() -> None:
    """The first rounds of a drafter apart end while chunks go out, and it seems to cost nothing."""
    simulation = Simulation(draft=1.5, row=0.05, gap=0.1)
    budget = simulation.budget(remote=True)
    simulation.sizes(budget, 20)
    known = budget._draft.at(1, TreeSize(NODES, NODES - 1))
    simulation.gap = 1.4
    simulation.sizes(budget, 10)
    assert known == pytest.approx(1.4, rel=0.1)
    assert budget._draft.at(1, TreeSize(NODES, NODES - 1)) == pytest.approx(known, rel=0.4)


@pytest.mark.parametrize("seed", range(3))
def test_what_single_trees_yield_is_estimated_without_bias(seed: int) -> None:
    """It is far from the mean, and is seen in one step of four."""
    simulation = Simulation(row=0.02, draft=0.1)
    budget, found = simulation.budget(), []
    for part in range(10):
        simulation.sizes(budget, 100, 100 * seed + part)
        found.append(budget._survival.survival([DraftTree.chain(range(NODES))])[0].sum())
    assert np.mean(found) == pytest.approx(sum(0.8**depth for depth in range(NODES)), rel=0.07)


@pytest.mark.parametrize("seed", range(3))
def test_trials_cost_less_than_two_percent(seed: int) -> None:
    simulation = Simulation(fixed=0.003, row=0.0002, draft=0.0096)
    budget = simulation.budget()
    simulation.sizes(budget, 1000, seed)
    assert simulation.seconds_per_token(budget, 2000, seed + 10) < simulation.expected_seconds_per_token(1) / 0.98


def test_trials_that_go_on_failing_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, found = Simulation(fixed=0.003, row=0.0002, draft=0.0096), list[list[int]]()
    for seed in range(2):
        budget, other = simulation.budget(), simulation.budget()
        monkeypatch.setattr(other, "FAILED_SHARE", 1.0)
        found.append([sum(n > 1 for n in simulation.sizes(each, 8000, seed)[2000:]) for each in (budget, other)])
    rare, usual_count = map(sum, zip(*found, strict=True))
    assert 0 < rare < 0.6 * usual_count, found
    better = replace(simulation, draft=0.001, right=0.9)
    assert usual(better.sizes(budget, 2000)[-100:]) == NODES, "they are found when they pay"


def test_few_sequences_keep_the_largest_trees() -> None:
    simulation = Simulation(row=0.24, draft=0.2)
    best = min(range(1, NODES), key=simulation.expected_seconds_per_token)
    share = simulation.expected_seconds_per_token(best) / simulation.expected_seconds_per_token(NODES)
    assert 0.92 < share < 0.965
    assert usual(simulation.sizes(simulation.budget(), 300)[100:]) == NODES


@pytest.mark.parametrize("kind", ["small", "ending"])
def test_trees_that_requests_keep_small_say_little_of_others(kind: str) -> None:
    """Neither a request that asks for small trees nor the last tree before `max_tokens`."""
    simulation = Simulation(row=0.1, draft=1.5, right=0.9, batch=8)
    assert usual(simulation.sizes(simulation.budget(), 200)[-100:]) == NODES
    setattr(simulation, kind, 5)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 200)[-100:]) == NODES
    whole = [tree for tree, most in budget._recent._trees if most == NODES]
    assert len(whole) >= budget._recent.MIN_TREES
    assert {len(tree) for tree in whole} == {NODES}


def test_requests_that_all_ask_for_small_trees_get_them() -> None:
    simulation = Simulation(row=0.01, draft=0.1, batch=4, small=4)
    assert usual(simulation.sizes(simulation.budget(), 100)) == 2


@pytest.mark.parametrize(("right", "sampled_right"), [(0.9, 0.3), (0.3, 0.9)])
def test_drawn_nodes_are_estimated_apart_from_ranked_ones(right: float, sampled_right: float) -> None:
    """The rule `rejection` accepts by the ratio of two probabilities, `match` only what the target has drawn."""
    simulation = Simulation(row=0.01, right=right, batch=8, sampled=4, sampled_right=sampled_right)
    budget, chain = simulation.budget(), DraftTree.chain(range(4))
    simulation.sizes(budget, 150)
    ranked, drawn = budget._survival.survival([chain, replace(chain, sampled=SampledProposal({}))])
    assert ranked.tolist() == pytest.approx([right**depth for depth in range(4)], abs=0.1)
    assert drawn.tolist() == pytest.approx([sampled_right**depth for depth in range(4)], abs=0.1)


def test_the_least_of_the_first_times_between_steps_counts() -> None:
    budget, sequence = Simulation().budget(), Sequence(Request("0", (1,)), QueueKey(0.0, 0), [1], np.zeros(0, np.int64))
    batch, outputs = [ScheduledSequence(sequence, np.arange(1), 1, DraftTree.chain((1,)))], [VerifyOutput(None, error="NaN")]
    for between_s in (8.0, 9.0, 0.5, 7.0):
        budget.observe(batch, outputs, StepTimes(0.0, 1.0, between_s, 0.25))
    assert budget._step_s(1) == pytest.approx(1.0 + 0.5 + 0.25)


def test_host_work_in_a_step_hides_no_draft() -> None:
    """Commits and schedules come after the trees: while they last, the engine waits for no draft."""
    budget = Simulation(draft=0.5).budget(remote=True)
    budget._observe_others(0.1, 0.2)
    assert budget._with_hidden(0.5, 0.1, 0.0) == 0.5
    assert budget._with_hidden(0.5, 0.3, 0.0) == pytest.approx(0.7)


def test_time_between_plain_steps_pays_a_debt_too() -> None:
    budget, sequence = Simulation().budget(), Sequence(Request("0", (1,)), QueueKey(0.0, 0), [1], np.zeros(0, np.int64))
    batch, outputs = [ScheduledSequence(sequence, np.arange(1), 1, DraftTree.chain((1,)))], [VerifyOutput(None, error="NaN")]
    budget._debt_s = 1.0
    budget.observe(batch, outputs, StepTimes(0.0, 1.0, 2.0, 3.0))
    assert budget._debt_s == pytest.approx(1.0 - RETRY_SHARE * (1.0 + 2.0 + 3.0))


def test_a_step_of_scouts_ends_no_drafting() -> None:
    """A choice after a step of scouts needs what going on needs, not what beginning needs."""
    simulation = Simulation(row=0.013, draft=0.2, right=0.6, batch=16)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    assert budget._plan is not None
    budget._keep(budget._plan._replace(size=TreeSize(4, 3), made_at=-1000))
    budget._sizes = dict.fromkeys([f"{number}" for number in range(16)], TreeSize(1, 0))
    budget.MARGIN, budget.FIRST_MARGIN = 0.0, 9.0  # type: ignore[misc]
    assert budget._planned(16, NODES, 0).size.depth


def test_few_sequences_are_learned_from_in_one_step_of_four() -> None:
    """While they gain. What drafts lose is learned at once."""
    simulation = Simulation(row=0.01, draft=0.1, right=0.9)
    budget = simulation.budget()
    simulation.sizes(budget, 40)
    assert num_learned(simulation, budget, 20) == 5
    simulation.right, budget._debt_s = 0.0, 10.0
    assert num_learned(simulation, budget, 10) == 10


def num_learned(simulation: Simulation, budget: AdaptiveDraftBudget, steps: int) -> int:
    """Trees that are learned from in the next steps."""
    before = DraftTree.chain(range(NODES))
    budget._recent._trees.extend([(before, NODES)] * budget._recent.NUM_TREES)
    simulation.sizes(budget, steps)
    return sum(tree is not before for tree, _ in budget._recent._trees)
