"""The size of draft trees under made-up costs: it follows what nodes cost and what they yield."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.api.request import Request
from eyas.engine.budget.account import GainAccount
from eyas.engine.budget.adaptive import AdaptiveDraftBudget, Choice
from eyas.engine.budget.base import NextStep, StepTimes
from eyas.engine.budget.costs import CostModel, DraftCosts, SurvivalModel
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTree, SampledProposal
from eyas.sampling.acceptance import Details, StepOutputs
from tests.engine.budget.simulation import CHAINS, NODES, Simulation, usual
from tests.support.strategies import trees
from tests.support.tiers import nightly

SHARE = GainAccount.TRY_SHARE


@pytest.mark.parametrize(("row", "expected"), [(0.0, NODES), (10.0, 1)])
def test_free_rows_give_whole_trees_and_costly_rows_none(row: float, expected: int) -> None:
    simulation = Simulation(row=row)
    assert usual(simulation.sizes(simulation.budget(), 200)) == expected


@pytest.mark.parametrize(("batch", "fixed", "row", "right"), [(64, 1.0, 1 / 32, 0.7), nightly(256, 0.2, 1 / 40, 0.6)])
def test_long_contexts_do_not_make_rows_seem_costly(batch: int, fixed: float, row: float, right: float) -> None:
    """Contexts take ten seconds of a step, and no node adds to these."""
    simulation = Simulation(fixed, row, 0.2, right, batch, context=500, context_token=10 / 500 / batch)
    best = min(simulation.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert simulation.seconds_per_token(simulation.budget(), 100) < 1.03 * best


def test_catching_up_is_not_a_cost_of_every_draft() -> None:
    simulation = Simulation(row=0.01, draft=20.0)
    budget = simulation.budget(remote=True)
    assert usual(simulation.sizes(budget, 300)[-100:]) == 1
    simulation.draft, simulation.behind = 0.1, 0.01
    assert usual(simulation.sizes(budget, 1500)[-100:]) > 4


@pytest.mark.parametrize(("quick", "most"), [(30, 8), (900, 1)])
def test_a_try_drafts_where_the_drafter_lacks_little(quick: int, most: int) -> None:
    """It takes half a plain step, or a single sequence."""
    budget = Simulation(draft=0.1, behind=0.001).budget()
    names = [f"{number}" for number in range(16)]
    sizes = budget.choose(names, NODES, 0, NextStep(missing=[1000] * 8 + [quick] * 8))
    drafting = [name for name, size in sizes.items() if size.max_depth]
    assert 1 <= len(drafting) <= most
    assert set(drafting) <= set(names[8:])


def test_drafting_begins_for_as_many_as_a_step_has_time_for() -> None:
    """All lack 508 tokens, 500 more than a step commits, and a plain step of 1.16 seconds is enough for two of them."""
    simulation = Simulation(draft=0.1, row=0.01, right=0.9, batch=16, behind=0.001)
    budget = simulation.budget()
    simulation.sizes(budget, 50)
    names = [f"{number}" for number in range(16)]
    lacking = dict.fromkeys(names, 508)
    begun = []
    for _ in range(8):
        sizes = budget.choose(names, NODES, 0, NextStep(missing=list(lacking.values())))
        drafting = [name for name, size in sizes.items() if size.max_depth]
        begun.append(len(drafting))
        lacking |= dict.fromkeys(drafting, 0)
    assert begun == [2, 4, 6, 8, 10, 12, 14, 16]


def test_those_that_take_long_to_catch_up_with_draft_in_turn() -> None:
    """Four lack ten plain steps each, and four others draft already."""
    simulation = Simulation(draft=0.1, row=0.01, right=0.9, batch=8, behind=0.001)
    budget = simulation.budget()
    simulation.sizes(budget, 50)
    names = [f"{number}" for number in range(8)]
    lacking = dict.fromkeys(names, 0) | dict.fromkeys(names[4:], 11600)
    begun = []
    for step in range(60):
        sizes = budget.choose(names, NODES, 0, NextStep(missing=list(lacking.values())))
        drafting = [name for name, size in sizes.items() if size.max_depth]
        assert set(names[:4]) <= set(drafting)
        begun += [step for name in drafting if lacking[name]]
        lacking |= dict.fromkeys(drafting, 0)
    assert len(begun) == 4
    assert all(6 <= later - earlier <= 14 for earlier, later in itertools.pairwise(begun))


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
    budget.observe(batch, StepOutputs.empty(1, {0: Details(error="NaN")}), StepTimes(0.2, 1.0))
    assert usual(simulation.sizes(budget, 100)) > 4


@pytest.mark.parametrize("draft", [5.0, nightly(50.0)])
def test_retries_take_a_bounded_share_of_all_time(draft: float) -> None:
    simulation = Simulation(draft=draft, right=0.3)
    budget = simulation.budget(remote=True)
    simulation.sizes(budget, 100)
    assert simulation.seconds_per_token(budget, 8000) < (1 + 3 * SHARE) * simulation.fixed


@pytest.mark.parametrize(("row", "batch"), [(0.02, 1), nightly(0.1, 4), nightly(0.02, 16), nightly(0.3, 1), (0.3, 16)])
def test_what_is_verified_is_about_the_best(row: float, batch: int) -> None:
    simulation = Simulation(row=row, draft=0.2, batch=batch)
    budget = simulation.budget()
    simulation.sizes(budget, 100)
    best = min(simulation.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert best > 0.85 * simulation.seconds_per_token(budget, 300), "what yields less than MARGIN is not begun"


def test_a_tree_pays_for_its_rows_alone_among_others_without() -> None:
    among = Simulation(row=0.1, draft=0.1, others=15)
    budget = among.budget()
    among.sizes(budget, 300)
    best = min(among.expected_seconds_per_token(nodes) for nodes in range(1, NODES + 1))
    assert best > 0.98 * among.seconds_per_token(budget, 300)


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


def test_all_sequences_draft_after_a_step_of_scouts() -> None:
    simulation = Simulation(row=0.01, draft=0.1, batch=32)
    assert [size > 1 for size in simulation.sizes(simulation.budget(), 20)] == [False] + [True] * 20


@pytest.mark.parametrize(("draft", "count"), [(0.1, 8), (0.6, 1)])
def test_as_many_sequences_try_as_cost_half_a_step_at_most(draft: float, count: int) -> None:
    sizes = Simulation(draft=draft, batch=64).budget().choose([f"{i}" for i in range(64)], NODES)
    assert sum(size.max_depth > 0 for size in sizes.values()) == count


def test_no_tree_is_larger_than_a_step_allows() -> None:
    simulation = Simulation()
    budget = simulation.budget()
    assert set(simulation.sizes(budget, 100, most=3)) <= {1, 2, 3}
    assert set(simulation.sizes(budget, 10, most=1)) == {1}
    assert usual(simulation.sizes(budget, 100)[-50:]) == NODES, "what was never requested is tried"


def trained_budget(row: float, step: float = 1.0) -> AdaptiveDraftBudget:
    """A budget whose rows cost `row`, beside `step` seconds of a step."""
    sizes = (1, 4, 16, 64, 256)
    verify = CostModel(sizes, [step + row * rows for rows in sizes])
    free = CostModel(sizes, [0.0] * len(sizes))
    budget = AdaptiveDraftBudget(CHAINS, verify, DraftCosts(free, free, 1))
    budget._account.start()
    budget._choice = Choice(TreeBudget(NODES, NODES - 1), rate=1.0)
    return budget


LIKELY = DraftTree.of((1, 2, 3, 4, 5), (0, 0, 1, 2, 0), (0.0, -0.02, -0.05, -0.06, -4.5))
UNLIKELY = DraftTree.of((1, 2, 3), (0, 0, 1), (0.0, -3.5, -3.6))


def test_nodes_that_cost_more_than_they_yield_are_left_out() -> None:
    """A second is worth a token here."""
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
    rate = max(1.0, base / (1 + row * base))
    gains = [sum(nodes[:k]) - rate * row * k for k in range(len(nodes) + 1)]
    assert gains[num_kept] == pytest.approx(max(gains))


def test_survival_follows_what_was_verified() -> None:
    model = SurvivalModel()
    for _ in range(9):
        model.observe([LIKELY, UNLIKELY], [(0, 1, 2, 3), (0, 1)])
    (claimed,) = model.survival([LIKELY])
    assert claimed[1:4] == pytest.approx([0.95] * 3, abs=0.05)
    for _ in range(100):
        model.observe([LIKELY, UNLIKELY], [(0,), (0,)])
    likely, unlikely = model.survival([LIKELY, UNLIKELY])
    assert (likely[1:] < 0.2).all()
    assert (np.diff(unlikely) <= 0).all()


def test_survival_is_learned_below_accepted_parents_alone() -> None:
    model, tree = SurvivalModel(), DraftTree.chain(range(4))
    for step in range(300):
        model.observe([tree], [(0, 1) if step % 2 else (0,)])
    (survival,) = model.survival([tree])
    assert survival.tolist() == pytest.approx([1, 1 / 3, 1 / 9, 1 / 27], abs=0.08)


@pytest.mark.parametrize("ended", ["right", "draft"], ids=["bad text", "slow drafter"])
@pytest.mark.parametrize("seed", [0, nightly(1)])
def test_a_bad_stretch_stops_drafting_for_four_requests_at_most(ended: str, seed: int) -> None:
    """Four of 128 tokens. What such stretches cost stays bounded too."""
    simulation = Simulation(row=0.05, draft=0.5)
    budget, usually = simulation.budget(), getattr(simulation, ended)
    simulation.sizes(budget, 300, seed)
    setattr(simulation, ended, {"right": 0.0, "draft": 10.0}[ended])
    assert usual(simulation.sizes(budget, 80, seed)[-20:]) == 1
    setattr(simulation, ended, usually)
    assert usual(simulation.sizes(budget, 560, seed)[-24:]) > 4


def test_bad_stretches_that_come_back_cost_little() -> None:
    """Twenty good steps in two hundred: drafting begins too late each time, and may lose less from stop to stop."""
    simulation = Simulation(row=0.05, draft=0.5)
    budget = simulation.budget()
    for part in range(20):
        simulation.right = 0.9 if part % 2 else 0.0
        simulation.sizes(budget, 20 if part % 2 else 180, part)
    assert simulation.now / simulation.tokens <= simulation.expected_seconds_per_token(1) / 0.98


@pytest.mark.parametrize("seed", [0, nightly(1), nightly(2), nightly(3)])
def test_answers_that_begin_badly_and_repeat_later_gain(seed: int) -> None:
    """Good text pays for what trees lose in bad text, so that it is found again. A round takes two plain steps."""
    simulation = Simulation(row=0.06, draft=2.6, gap=0.2, phases=((24, 0.5), (104, 0.97)))
    budget = simulation.budget(remote=True)
    simulation.sizes(budget, 1200, seed)
    assert 1.4 * simulation.seconds_per_token(budget, 1200, seed) <= simulation.fixed + simulation.row + 0.2


@pytest.mark.parametrize("seed", [0, nightly(1), nightly(2)])
def test_what_single_trees_yield_is_estimated_without_bias(seed: int) -> None:
    """It is far from the mean, and is seen in one step of four."""
    simulation = Simulation(row=0.02, draft=0.1)
    budget, found = simulation.budget(), []
    for part in range(10):
        simulation.sizes(budget, 100, 100 * seed + part)
        found.append(budget._survival.survival([DraftTree.chain(range(NODES))])[0].sum())
    assert np.mean(found) == pytest.approx(sum(0.8**depth for depth in range(NODES)), rel=0.07)


@pytest.mark.parametrize("kind", ["small", "ending"])
def test_trees_that_requests_keep_small_say_little_of_others(kind: str) -> None:
    """Neither a request that asks for small trees nor the last tree before `max_tokens`."""
    simulation = Simulation(row=0.05, draft=0.5, right=0.9, batch=8)
    assert usual(simulation.sizes(simulation.budget(), 200)[-100:]) == NODES
    setattr(simulation, kind, 5)
    budget = simulation.budget()
    assert usual(simulation.sizes(budget, 200)[-100:]) > 4
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
    ranked, drawn = budget._survival.survival([chain, chain.with_sampled(SampledProposal({}))])
    assert ranked.tolist() == pytest.approx([right**depth for depth in range(4)], abs=0.1)
    assert drawn.tolist() == pytest.approx([sampled_right**depth for depth in range(4)], abs=0.1)


def test_the_least_of_the_first_other_seconds_counts() -> None:
    budget, sequence = Simulation().budget(), Sequence(Request("0", (1,)), QueueKey(0.0, 0), [1], np.zeros(0, np.int64))
    batch = [ScheduledSequence(sequence, np.arange(1), 1, DraftTree.chain((1,)))]
    outputs = StepOutputs.empty(1, {0: Details(error="NaN")})
    for other_s in (8.0, 9.0, 0.5, 7.0):
        budget.observe(batch, outputs, StepTimes(0.0, 1.0, other_s))
    assert budget._step_s(1) == pytest.approx(1.0 + 0.5)


def all_costs() -> Iterator[Any]:
    """Chances, costs and batches: all of them nightly, and daily each two values of different factors together."""
    factors = (0.0, 0.3, 0.8, 0.97), (0.0, 0.05, 0.3), (0.05, 1.0, 4.0), (0.0, 0.02), (1, 8)
    for places in itertools.product(*(range(len(values)) for values in factors)):
        right, row, draft, behind, batch = places
        is_daily = (draft, behind, batch) == ((right + row) % 3, (right + row) % 2, (right // 2 + row) % 2)
        values = [own[place] for own, place in zip(factors, places, strict=True)]
        yield pytest.param(*values) if is_daily else nightly(*values)


@pytest.mark.parametrize(("right", "row", "draft", "behind", "batch"), [*all_costs()])
def test_trees_are_never_slower_than_plain_decoding(
    right: float, row: float, draft: float, behind: float, batch: int
) -> None:
    """By more than their credit of a few first steps and of 2 % of the time."""
    simulation = Simulation(row=row, draft=draft, right=right, batch=batch, behind=behind)
    budget, plain = simulation.budget(), simulation.expected_seconds_per_token(1)
    simulation.sizes(budget, 40)
    assert simulation.seconds_per_token(budget, 600, seed=1) <= plain / 0.965


@pytest.mark.parametrize(("host", "pays"), [(0.6, False), (0.1, True)])
def test_the_host_work_of_trees_is_a_cost_of_theirs(host: float, pays: bool) -> None:
    """A tree yields 1.43 tokens here, and a step without one takes 1.2 s."""
    simulation = Simulation(right=0.3, gap=0.2, host=host)
    budget = simulation.budget()
    budget.choose([], NODES)
    budget.observe([], StepOutputs.empty(0), StepTimes(0.0, simulation.fixed, 0.2))  # as of a prompt
    simulation.sizes(budget, 100)
    seconds_per_token = simulation.seconds_per_token(budget, 600)
    assert seconds_per_token <= (1.01 * (1.2 + host) / 1.43 if pays else 1.02 * 1.2)


@pytest.mark.parametrize("per_sequence", [nightly(0.01), 0.05])
def test_host_work_of_more_sequences_is_no_cost_of_trees(per_sequence: float) -> None:
    """While all steps have trees, nothing shows what steps without take at a load that comes or goes."""
    simulation = Simulation(row=0.002, draft=0.05, right=0.4, gap=per_sequence)
    budget = simulation.budget()
    budget.choose([], NODES)
    budget.observe([], StepOutputs.empty(0), StepTimes(0.0, simulation.fixed, per_sequence))  # as of a prompt
    for batch in (1, 64, 1, 64):
        simulation.gap = per_sequence * batch
        sizes = simulation.resized(batch).sizes(budget, 200)
        assert sizes.count(1) <= 20


def test_a_useless_drafter_stops_within_few_steps() -> None:
    """Little is lost at first, and a tree more."""
    simulation = Simulation(row=0.3, draft=1.0, right=0.0, batch=8)
    simulation.sizes(simulation.budget(), 64)
    plain = simulation.fixed + simulation.row * simulation.batch
    assert simulation.now <= (64 + 1 + 4.0) * plain + simulation.draft + simulation.row * 8 * NODES


def test_a_first_claim_is_believed_in_part_until_it_comes_true() -> None:
    """Scores of lookups only rank. A few nodes that are rejected lower what all other scores claim."""
    model, chain = SurvivalModel(), DraftTree.chain(range(4))
    first = model.survival([UNLIKELY, chain])
    model.observe([chain] * 4, [(0,)] * 4)
    assert model.survival([UNLIKELY])[0][1] < 0.8 * first[0][1]
    assert first[1][1] < 0.8, "it claims nearly 1"


def test_a_change_of_mind_is_logged_in_words(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(row=0.05, draft=0.5)
    budget = simulation.budget()
    with caplog.at_level(logging.INFO):
        simulation.sizes(budget, 100)
        simulation.right = 0.0
        simulation.sizes(budget, 60)
    on, off = caplog.messages[0], caplog.messages[1]
    assert on.startswith("drafts for 1 sequences, whose steps would take")
    assert "are on: they yield" in on
    assert "are off; will try again in" in off
    assert len(caplog.messages) < 8
