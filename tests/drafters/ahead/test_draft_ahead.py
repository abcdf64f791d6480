"""Drafting ahead: trees grown before the root is known are cut at the committed path and leave no trace in later trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.ahead.eagle import NUM_GROWN_SLOTS
from eyas.drafters.ahead.grown_tree import GrownTree
from eyas.drafters.base import LocalDrafter, PreparedTrees
from eyas.drafters.block import BlockDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.emulation.costs import flat
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.kernels.by_device import MAX_SORTED
from eyas.models.heads.eagle import load_head
from eyas.protocol.commit import Commit, NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.corpora import paths_of
from tests.support.tiny import write_head, write_target
from tests.support.tiny_block import tiny_block_head

SHAPE = TreeConfig(num_draft_tokens=8, num_steps=3, top_k=3)
AHEAD = DraftAheadConfig(top_k=24, num_candidates=24, num_steps=7, mode="always")
BUDGET = TreeBudget(8, 3)
NOISES = [NoiseKey(0), NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=9, top_p=0.9)]


def make(target: str, head: str, emulated: str = "") -> EagleDrafter:
    shape, config = replace(SHAPE, top_k=8), DraftingConfig(2048, ranking_temperature=1, emulated_device=emulated)
    return EagleDrafter(load_head(head, target), shape, config, num_grown_slots=NUM_GROWN_SLOTS)


def session(name: str, length: int, noise: NoiseKey = NOISES[0]) -> Commit[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = tuple(torch.randint(3, 48, (length,), generator=generator).tolist())
    return Commit(name, 0, 0, tokens, torch.randn(length - 1, 32, generator=generator), noise, BUDGET)


def going_on(last: Commit[torch.Tensor], tokens: Sequence[int]) -> Commit[torch.Tensor]:
    """The commit after `last` that brings `tokens`."""
    features = torch.randn(len(tokens), 32, generator=torch.Generator().manual_seed(last.committed_length))
    return last._replace(start_position=last.committed_length, tokens=tuple(tokens), features=features)


def work(drafter: DraftAheadDrafter) -> None:
    while drafter.draft_ahead():
        pass


def outcome(tree: DraftTree) -> list[int]:
    """The tokens below the root on the path to the tree's last node."""
    return list([*paths_of(tree)][-1])


def likeliest(tree: DraftTree) -> list[int]:
    return [tree.tokens[tree.log_probs.index(max(tree.log_probs[1:]))]]


def naive_below(tree: GrownTree, path: Sequence[int], budget: TreeBudget) -> list[tuple[tuple[int, ...], float]]:
    """Candidates below the path's end as (path from there, score), the best ones."""
    places: dict[tuple[int, ...], int] = {(): 0}
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for node in range(len(tree.tokens)):
        own = next((steps for steps, number in places.items() if number == node), None)
        if own is None:
            continue  # no longer a candidate of its parent
        for token, score in zip(tree.candidates[node].tolist(), tree.scores[node].tolist(), strict=True):
            found[*own, token] = found[own] + score
        for child in range(1, len(tree.tokens)):
            if tree.parents[child] == node and (*own, int(tree.tokens[child])) in found:
                places[*own, int(tree.tokens[child])] = child
    below = [
        (steps[len(path) :], score - found[tuple(path)])
        for steps, score in found.items()
        if steps[: len(path)] == tuple(path) and 0 < len(steps) - len(path) <= budget.max_depth
    ]
    return sorted(sorted(below, key=lambda node: -node[1])[: budget.max_nodes - 1])


def random_pass(tree: GrownTree, rng: np.random.Generator, num_rows: int) -> None:
    rows = tree.take_rows(tree.useful(num_rows, 6, 60)[0])
    if rows is None:
        return
    size = len(rows.tokens), tree.candidates.shape[1]
    candidates = np.stack([rng.permutation(9)[: size[1]] for _ in range(size[0])])
    tree.apply(rows, torch.zeros(size[0], 4), candidates, -rng.exponential(1.0, size), 60)


@pytest.mark.parametrize("budget", [TreeBudget(5, 2), TreeBudget(9, 4), TreeBudget(200, 9)])
def test_a_cut_holds_the_best_descendants_of_the_committed_path(budget: TreeBudget) -> None:
    rng, checked = np.random.default_rng(5), 0
    free = SlotAllocator(90)
    tree = GrownTree(1, torch.zeros(4), rng.permutation(9)[:5], -rng.exponential(1.0, 5), free)
    for number in range(8):
        random_pass(tree, rng, 20)
        for node in range(len(tree.tokens)):
            path, above = list[int](), node
            while above:
                path.insert(0, int(tree.tokens[above]))
                above = int(tree.parents[above])
            if tree.find(path) != node:
                continue  # no longer a candidate
            found = tree.below(path, budget)
            assert found is not None
            found.validate(([1, *path])[-1], 9, budget.max_nodes, budget.max_depth)
            expected = naive_below(tree, path, budget)
            assert sorted(paths_of(found)) == [steps for steps, _ in expected]
            assert paths_of(found) == pytest.approx(dict(expected))
            checked += 1
        if number % 4 == 3:
            tree.move_root(1)
            tree.tokens[0] = 1
            tree.set_root(torch.zeros(4), rng.permutation(9)[:5], -rng.exponential(1.0, 5))
        free.check_owners([tree.slots])
        assert len(tree.tokens) == len(tree.slots) + 1 <= 60
    assert checked > 50


def test_a_full_tree_takes_better_nodes_in_place_of_worse() -> None:
    """Chains of nodes: the root's best child is worth less than what is found below it later."""
    free = SlotAllocator(8)
    tree = GrownTree(1, torch.zeros(4), np.array([2, 3, 4]), np.array([-0.1, -2.0, -3.0]), free)
    scores = {2: [-0.1, -5.0, -6.0], 5: [-0.1, -0.2, -9.0]}
    for _ in range(4):
        if rows := tree.take_rows(tree.useful(3, 6, 4)[0]):
            found = np.array([scores.get(int(token), [-4.0, -5.0, -6.0]) for token in rows.tokens])
            candidates = np.array([[5, 6, 7]] * len(rows.tokens))
            tree.apply(rows, torch.zeros(len(rows.tokens), 4), candidates, found, 4)
            free.check_owners([tree.slots])
    assert tree.find([3]) is None
    assert tree.find([2, 5, 5])
    tree.release()
    free.check_owners([])


def test_rows_wait_for_slots() -> None:
    free = SlotAllocator(2)
    trees = [GrownTree(1, torch.zeros(4), np.array([2, 3]), np.array([-0.1, -2.0]), free) for _ in range(2)]
    rows = [tree.take_rows(tree.useful(2, 6, 9)[0]) for tree in trees]
    assert rows[0] is not None
    assert len(rows[0].slots) == 2
    assert rows[1] is None
    trees[0].give_up(rows[0])
    assert trees[1].take_rows(trees[1].useful(2, 6, 9)[0]) is not None


@pytest.mark.parametrize("noise", NOISES)
def test_outcomes_in_the_grown_tree_are_answered_from_it(noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    first = [session("a", 9, noise), session("b", 20, noise)]
    trees = drafter.propose(first)
    work(drafter)
    contexts = [going_on(last, outcome(tree)) for last, tree in zip(first, trees, strict=True)]  # type: ignore[arg-type]
    for context, tree in zip(contexts, drafter.propose(contexts), strict=True):
        assert isinstance(tree, DraftTree)
        assert tree.grown_ahead
        assert tree.num_drafted > 0
        tree.validate(context.tokens[-1], 48, BUDGET.max_nodes, BUDGET.max_depth)


def assert_equal_trees(found: DraftTree | None, expected: DraftTree) -> None:
    assert found is not None
    assert paths_of(found) == pytest.approx(paths_of(expected), abs=1e-4)


@pytest.mark.parametrize(("noise", "is_compiled"), [(NOISES[0], True), (NOISES[1], True), (NOISES[0], False)])
def test_grown_trees_become_those_of_true_features(
    noise: NoiseKey, is_compiled: bool, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After passes enough, whether a commit was foreseen or not, with and without time between commits."""
    if not is_compiled:
        monkeypatch.setattr("eyas.models.heads.eagle.runs_compiled", lambda device: False)
    drafter, plain = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD), make(tiny_target, tiny_head)
    first = [session("a", 9, noise), session("b", 20, noise)]
    trees = last_of(drafter, first)
    expected = last_of(plain, first)
    for number in range(5):
        if number != 3:
            work(drafter)
            for context, tree in zip(first, expected, strict=True):
                assert_equal_trees(drafter.ahead.trees([context], [()])[0], tree)
        first = [going_on(last, likeliest(tree)) for last, tree in zip(first, expected, strict=True)]
        if number == 2:  # a commit that was not foreseen
            first[1] = first[1]._replace(tokens=(47,))
        trees, expected = last_of(drafter, first), last_of(plain, first)
        assert trees[0].grown_ahead or number > 2
        assert trees[1].grown_ahead or number > 1


def test_a_miss_gets_a_tree_of_true_features(tiny_target: str, tiny_head: str) -> None:
    ahead = replace(AHEAD, miss_steps=3)
    drafter, plain = DraftAheadDrafter(make(tiny_target, tiny_head), ahead), make(tiny_target, tiny_head)
    first = session("a", 9)
    (tree,) = last_of(drafter, [first])
    assert_equal_trees(tree, last_of(plain, [first])[0])
    for is_idle in (True, False):
        if is_idle:
            work(drafter)
        unknown = next(token for token in range(48) if token not in plain.draft_ids)
        first = going_on(first, [unknown])
        (late,), (expected,) = last_of(drafter, [first]), last_of(plain, [first])
        assert not late.grown_ahead
        assert_equal_trees(late, expected)


def test_commits_with_prepared_trees_keep_the_session_in_step(tiny_target: str, tiny_head: str) -> None:
    drafter, plain = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD), make(tiny_target, tiny_head)
    first, store = session("a", 9), PreparedTrees()
    trees = [last_of(each, [first])[0] for each in (drafter, plain)]
    unknown = next(token for token in range(48) if token not in plain.draft_ids)
    for number in range(3):
        work(drafter)
        for prepared in drafter.take_prepared():
            store.put(prepared)
        first = going_on(first, likeliest(trees[1]))
        cut = store.take(first)
        assert cut is not None
        assert cut.grown_ahead
        assert cut.num_drafted == BUDGET.max_nodes - 1
        cut.validate(first.tokens[-1], 48, BUDGET.max_nodes, BUDGET.max_depth)
        if number == 2:  # the drafter does not foresee any longer what it has sent
            first = first._replace(tokens=(unknown,))
        last_of(drafter, [first._replace(has_tree=True)])
        trees = [trees[0], *last_of(plain, [first])]
    assert not drafter.sessions["a"].backlog
    first = going_on(first, [unknown])
    assert_equal_trees(last_of(drafter, [first])[0], last_of(plain, [first])[0])


def test_gaps_epochs_and_releases_match_the_wrapped_drafter(tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    first = session("a", 9)
    tree = drafter.propose([first])[0]
    work(drafter)
    hit = going_on(first, outcome(tree))  # type: ignore[arg-type]
    assert drafter.propose([hit])[0].grown_ahead  # type: ignore[union-attr]
    assert drafter.propose([hit._replace(start_position=hit.start_position + 40)]) == [ResyncRequired("a", 0, 9)]
    assert isinstance(drafter.propose([hit])[0], DraftTree), "a resend from there is taken"
    work(drafter)
    assert drafter.propose([hit._replace(epoch=1)]) == [ResyncRequired("a", 1, 0)]
    drafter.release(["a"])
    assert drafter.propose([hit]) == [ResyncRequired("a", 0, 0)]
    assert not drafter.draft_ahead()


def test_filtered_tokens_take_no_node_of_a_pruned_tree(tiny_target: str, tiny_head: str) -> None:
    """As in a tree that is grown on demand."""
    noise = NoiseKey(3, 1.0, top_k=1)
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    first = session("a", 9, noise)
    (tree,) = drafter.propose([first])
    assert isinstance(tree, DraftTree)
    work(drafter)
    (ahead,) = drafter.propose([going_on(first, [tree.tokens[1]])])
    assert isinstance(ahead, DraftTree)
    assert ahead.grown_ahead
    assert np.isfinite(ahead.log_probs).all()
    assert ahead.num_drafted == ahead.depth == SHAPE.num_steps, "a chain, one token at each node being left"


@pytest.mark.parametrize("vocab_size", [48, 2 * MAX_SORTED])
def test_a_hit_does_not_wait_for_the_level_that_grows(vocab_size: int, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size)
    head = write_head(tmp_path / "head", vocab_size, vocab_size - 24)
    eagle, clock = make(str(target), str(head), "1ms"), VirtualClock()
    eagle.device = EmulatedDevice(flat("slow", draft_level=1e6), clock)
    drafter, first = DraftAheadDrafter(eagle, AHEAD), session("a", 9)
    (tree,) = drafter.propose([first])
    assert drafter.draft_ahead()
    assert drafter.busy_s > 0
    before = clock.now
    (ahead,) = drafter.propose([going_on(first, likeliest(tree)[:1])])  # type: ignore[arg-type]
    assert isinstance(ahead, DraftTree)
    assert ahead.grown_ahead
    assert clock.now == before


def test_a_session_whose_trees_are_drawn_is_not_grown_ahead(tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    (drawn,) = drafter.propose([session("a", 9, NOISES[1])._replace(proposal="sampled")])
    assert isinstance(drawn, DraftTree)
    assert drawn.num_drafted
    assert not drafter.draft_ahead()


def test_sampled_chains_ask_for_the_masks_of_grammars(tiny_target: str, tiny_head: str) -> None:
    asked: list[str] = []
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)

    def path_masks(paths: Mapping[str, object]) -> Callable[[], dict[str, list[None]]]:
        asked.extend(paths)
        return dict

    drafter.use_path_masks(path_masks)
    drafter.propose([session("a", 9, NOISES[1])._replace(proposal="sampled", allowed=b"\xff" * 6)])
    assert asked == ["a"] * (SHAPE.num_steps - 1)


def test_a_combined_drafter_drafts_ahead_like_its_parts(tiny_target: str, tiny_head: str) -> None:
    eagle = DraftingConfig(2048, ranking_temperature=1, draft_ahead=AHEAD)
    combined = DraftHead(tiny_head, "eagle3+prompt_lookup").build_drafter(tiny_target, "float32", "cpu", SHAPE, eagle)
    first = session("a", 9)
    combined.propose([first])
    for _ in range(AHEAD.num_steps):
        assert combined.draft_ahead()
    while combined.draft_ahead():
        pass
    (alone,) = make(tiny_target, tiny_head).propose([first])
    (ahead,) = combined.propose([going_on(first, likeliest(alone))])  # type: ignore[arg-type]
    assert isinstance(ahead, DraftTree)
    assert ahead.grown_ahead


def test_a_sampled_proposal_is_never_taken_from_a_grown_tree(tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    first = session("a", 9, NOISES[1])
    tree = drafter.propose([first])[0]
    work(drafter)
    (drawn,) = drafter.propose([going_on(first, outcome(tree))._replace(proposal="sampled")])  # type: ignore[arg-type]
    assert isinstance(drawn, DraftTree)
    assert drawn.sampled is not None
    assert not drawn.grown_ahead


def test_a_node_has_no_more_children_than_the_head_knows(tiny_target: str, tiny_head: str) -> None:
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), replace(AHEAD, num_candidates=4000))
    assert drafter.propose([session("a", 9, NOISES[1])])
    assert drafter.ahead.grown["a"].tree.candidates.shape[1] == len(drafter.drafter.draft_ids)


def last_of(drafter: LocalDrafter, contexts: Sequence[Commit[torch.Tensor]]) -> list[DraftTree]:
    trees = drafter.propose(contexts)
    assert all(isinstance(tree, DraftTree) for tree in trees)
    return trees  # type: ignore[return-value]


def test_trees_are_prepared_after_a_commit_that_wanted_none(tiny_target: str, tiny_head: str) -> None:
    """A verifier that did not wait decodes one token plainly; the next commit wants a tree again."""
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), AHEAD)
    first = session("a", 9)
    (tree,) = last_of(drafter, [first])
    work(drafter)
    drafter.take_prepared()
    last_of(drafter, [going_on(first, likeliest(tree))._replace(has_tree=True, budget=TreeBudget(1, 0))])
    work(drafter)
    (prepared,) = drafter.take_prepared()
    assert len(prepared.tree) > BUDGET.max_nodes + 1


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_one_pass_heads_draft_nothing_ahead(kind: str, tiny_target: str) -> None:
    drafting = DraftingConfig(2048, draft_ahead=AHEAD)
    folder = tiny_block_head(kind, tiny_target)
    assert isinstance(DraftHead(folder, kind).build_drafter(tiny_target, "float32", "cpu", SHAPE, drafting), BlockDrafter)


@pytest.mark.parametrize("miss_steps", [1, 2, 3])
def test_a_missed_commit_gets_as_many_passes_as_configured(
    miss_steps: int, tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, run = list[int](), EagleDrafter.run_rows
    monkeypatch.setattr(EagleDrafter, "run_rows", lambda *args: passes.append(1) or run(*args))
    drafter = DraftAheadDrafter(make(tiny_target, tiny_head), replace(AHEAD, miss_steps=miss_steps))
    last_of(drafter, [session("a", 9)])
    assert len(passes) == miss_steps - 1, "the pass of the commit makes the first level"
