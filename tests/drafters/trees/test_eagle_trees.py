"""Trees of the EAGLE-3 drafter equal those of the obvious implementation, node by node, ties included."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.trees.growth import Candidates, grow_dynamic, select_nodes, trees_from_columns
from eyas.drafters.trees.rows import GrowthShape
from eyas.drafters.trees.scoring import noise_words
from eyas.errors import ConfigError
from eyas.models.heads.eagle import load_head
from eyas.protocol.commit import Commit, NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.given_scores import given_scores
from tests.support.naive_eagle import NaiveEagle, best_tree
from tests.support.tiny import write_head, write_target

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
GROWTH = GrowthShape(SHAPE.num_steps, SHAPE.top_k)
GREEDY = NoiseKey(0)


def session(seed: int, length: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 48, (length,), generator=generator).tolist()
    return tokens, torch.randn(length - 1, 32, generator=generator)


def commit(
    name: str, tokens: list[int], features: torch.Tensor, base: int, end: int, noise: NoiseKey, budget: TreeBudget
) -> Commit:
    return Commit(name, 0, base, tuple(tokens[base:end]), features[max(base - 1, 0) : end - 1], noise, budget)


def naive(target: str, head: str) -> NaiveEagle:
    embedding = load_file(Path(target, "model.safetensors"))["model.embed_tokens.weight"]
    return NaiveEagle(load_file(Path(head, "model.safetensors")), embedding, heads=4, kv_heads=2)


def make(target: str, head: str, ranking_temperature: float = 1.0, **drafting: object) -> EagleDrafter:
    config = DraftingConfig(ranking_temperature=ranking_temperature, **drafting)  # type: ignore[arg-type]
    return EagleDrafter(load_head(head, target), SHAPE, config)


def assert_same(tree: DraftTree, naive_nodes: list, root: int) -> None:
    assert tree.tokens == (root, *(node.token for node in naive_nodes))
    assert list(tree.depths[1:]) == [node.depth for node in naive_nodes]
    torch.testing.assert_close(
        torch.tensor(tree.log_probs[1:]), torch.tensor([n.score for n in naive_nodes]), atol=1e-4, rtol=1e-4
    )


NOISES = [GREEDY, NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=9, top_p=0.9)]


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_trees_of_a_batch_equal_the_naive_ones(noise: NoiseKey, scale: float, tiny_target: str, tiny_head: str) -> None:
    drafter, plain = make(tiny_target, tiny_head, ranking_temperature=scale), naive(tiny_target, tiny_head)
    sessions = {f"s{i}": session(i, 4 + 5 * i) for i in range(4)}
    contexts = [commit(n, t, f, 0, len(t), noise, TreeBudget(14, 4)) for n, (t, f) in sessions.items()]
    for (tokens, features), tree in zip(sessions.values(), drafter.propose(contexts), strict=True):
        assert isinstance(tree, DraftTree)
        assert_same(tree, best_tree(plain.candidates(tokens, features, noise, SHAPE, scale), 13), tokens[-1])
    drafter.sessions.check()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_kernels_grow_the_trees_of_the_plain_path(
    kind: Literal["eagle", "eagle3"], tiny_target: str, tiny_head: str
) -> None:
    """Of more sessions than grow at a time, with budgets and noise of their own, over several commits."""
    kernels = pytest.importorskip("eyas.kernels.cpu.eagle_trees", reason="numba is not installed")
    head = load_head(tiny_head if kind == "eagle3" else f"{tiny_head}/eagle1", tiny_target, kind=kind)
    assert head.compiled
    sessions = [session(seed, 24) for seed in range(18)]
    drafts = []
    budgets = [TreeBudget(14, 4), TreeBudget(5, 1), TreeBudget(2, 3), TreeBudget(9, 2), TreeBudget(1, 0)]
    for compiled in (head.compiled, None):
        head.compiled = compiled
        drafter = EagleDrafter(head, SHAPE, DraftingConfig(ranking_temperature=0.8, cuda_graph_max_batch=16))
        for base, end in ((0, 1), (1, 16), (16, 18), (18, 24)):
            drafts += drafter.propose(
                [
                    commit(f"{i}", tokens, features, base, end, NOISES[i // 2 % 2], budgets[i % 5])
                    for i, (tokens, features) in enumerate(sessions)
                ]
            )
    trees = [draft for draft in drafts if isinstance(draft, DraftTree)]
    assert len(trees) == len(drafts)
    half = len(trees) // 2
    for tree, plain in zip(trees[:half], trees[half:], strict=True):
        assert (tree.tokens, tree.parents) == (plain.tokens, plain.parents)
        assert tree.log_probs == pytest.approx(plain.log_probs, abs=1e-4)
    assert len(kernels.grow_eagle_level.signatures) == 1, "compiled while serving"


def test_heads_of_odd_sizes_grow_the_same_trees(tmp_path: Path) -> None:
    """Their rows fill no blocks of the kernels' weights, so that torch grows what the kernels run."""
    target, folder = str(write_target(tmp_path / "target", hidden=40)), str(write_head(tmp_path / "head", hidden=40))
    head = load_head(folder, target)
    if head.compiled:
        assert not head.compiled.has_stack
    tokens = session(1, 12)[0]
    features = torch.randn(11, 40, generator=torch.Generator().manual_seed(1))
    (tree,) = EagleDrafter(head, SHAPE, DraftingConfig(ranking_temperature=1.0)).propose(
        [commit("a", tokens, features, 0, 12, NOISES[1], TreeBudget(14, 4))]
    )
    assert isinstance(tree, DraftTree)
    expected = naive(target, folder).candidates(tokens, features, NOISES[1], SHAPE)
    assert_same(tree, best_tree(expected, 13), tokens[-1])


@pytest.mark.parametrize("nodes", [2, 3])
def test_narrow_rounds_find_the_best_nodes_of_wide_ones(nodes: int, tiny_target: str, tiny_head: str) -> None:
    drafter, plain = make(tiny_target, tiny_head), naive(tiny_target, tiny_head)
    tokens, features = session(1, 9)
    for noise in NOISES[:2]:
        (tree,) = drafter.propose([commit(f"{noise.seed}", tokens, features, 0, 9, noise, TreeBudget(nodes, 4))])
        assert isinstance(tree, DraftTree)
        assert_same(tree, best_tree(plain.candidates(tokens, features, noise, SHAPE), nodes - 1), tokens[-1])


def test_without_shared_noise_the_temperature_changes_nothing(tiny_target: str, tiny_head: str) -> None:
    tokens, features = session(1, 9)
    trees = [
        make(tiny_target, tiny_head, shared_noise=False).propose(
            [commit("a", tokens, features, 0, 9, noise, TreeBudget(14, 4))]
        )
        for noise in NOISES
    ]
    assert trees[0] == trees[1] == trees[2]


def test_depth_and_nodes_stay_within_each_sessions_budget(tiny_target: str, tiny_head: str) -> None:
    drafter = make(tiny_target, tiny_head)
    tokens, features = session(4, 8)
    budgets = [TreeBudget(14, 4), TreeBudget(5, 1), TreeBudget(2, 3), TreeBudget(40, 9)]
    trees = drafter.propose([commit(f"{i}", tokens, features, 0, 8, GREEDY, b) for i, b in enumerate(budgets)])
    for tree, budget in zip(trees, budgets, strict=True):
        assert isinstance(tree, DraftTree)
        tree.validate(tokens[-1], 48, budget.max_nodes, budget.max_depth)
    assert [len(tree) for tree in trees if isinstance(tree, DraftTree)] == [14, 4, 2, 14]


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
def test_logits_that_are_no_numbers_are_not_drafted(noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    """One token of the draft vocabulary is broken; the others are drafted as if it were not there."""
    trees, (tokens, features) = [], session(1, 12)
    for broken in (torch.nan, torch.inf, -torch.inf):
        head = load_head(tiny_head, tiny_target)
        intact, drafter = head.logits, EagleDrafter(head, SHAPE, DraftingConfig(ranking_temperature=1.0))
        best = int(intact(torch.ones(1, 32)).argmax())
        fill = torch.zeros(24, dtype=torch.bool).index_fill_(0, torch.tensor(best), True)
        head.logits = lambda states, x=broken, f=intact, m=fill: f(states).masked_fill(m, x)  # type: ignore[method-assign]
        trees += drafter.propose([commit("a", tokens, features, 0, 12, noise, TreeBudget(14, 4))])
    assert trees[0] == trees[1] == trees[2]
    assert isinstance(trees[0], DraftTree)
    assert trees[0].num_drafted > 5


class _Tied:
    """An expansion whose children all have probability 1, so that every score ties."""

    def first(self) -> torch.Tensor:
        return torch.zeros(1, 1, 6)

    def next(self, level: int, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 3, 6)


@given(st.integers(2, 22))
def test_ties_never_orphan_a_node(nodes: int) -> None:
    columns = select_nodes(grow_dynamic(_Tied(), given_scores, GROWTH), [TreeBudget(nodes, 4)], torch.arange(6))
    (tree,) = trees_from_columns(columns.numpy(), [7])
    tree.validate(7, 8, nodes, 4)
    assert len(tree) == min(nodes, 31)
    assert list(tree.depths) == sorted(tree.depths), "of tied nodes the shallowest are taken"


@given(st.integers(0, 10**6), st.integers(2, 20), st.integers(0, 4))
def test_selection_is_closed_under_parents_for_coarse_scores(seed: int, nodes: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    class Coarse(_Tied):
        def first(self) -> torch.Tensor:
            return -torch.randint(0, 3, (1, 1, 6), generator=generator).float()

        def next(self, level: int, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return -torch.randint(0, 3, (1, 3, 6), generator=generator).float()

    candidates: Candidates = grow_dynamic(Coarse(), given_scores, GROWTH)
    columns = select_nodes(candidates, [TreeBudget(nodes, depth)], torch.arange(6))
    (tree,) = trees_from_columns(columns.numpy(), [7])
    tree.validate(7, 8, nodes, depth)
    order = sorted(range(candidates.scores.shape[1]), key=lambda i: (-candidates.scores[0, i].item(), i))
    reach = candidates.ends[depth - 1] if depth else 0
    expected = sorted([i for i in order if i < reach][: nodes - 1])
    assert tree.tokens[1:] == tuple(candidates.tokens[0, expected].tolist())


def test_a_session_that_cannot_fit_is_followed_without_trees(tiny_target: str, tiny_head: str) -> None:
    drafter = make(tiny_target, tiny_head, max_kv_tokens=10)
    tokens, features = session(1, 30)
    assert drafter.propose([commit("a", tokens, features, 0, 8, GREEDY, TreeBudget(14, 4))]) != [
        DraftTree.root_only(tokens[7])
    ]
    for base, end in ((8, 20), (20, 21)):
        answer = drafter.propose([commit("a", tokens, features, base, end, GREEDY, TreeBudget(14, 4))])
        assert answer == [DraftTree.root_only(tokens[end - 1])]
    assert drafter.sessions.num_free == 10


def test_a_dormant_session_resumes_when_slots_are_free(tiny_target: str, tiny_head: str) -> None:
    drafter = make(tiny_target, tiny_head, max_kv_tokens=44)
    tokens, features = session(1, 30)
    crowd = [commit(name, tokens, features, 0, 20, GREEDY, TreeBudget(14, 4)) for name in ("a", "c", "b")]
    assert [isinstance(draft, DraftTree) and len(draft) > 1 for draft in drafter.propose(crowd)] == [True, True, False]
    drafter.release(["a", "c"])
    assert drafter.propose([commit("b", tokens, features, 20, 21, GREEDY, TreeBudget(14, 4))]) == [ResyncRequired("b", 0, 0)]
    drafter.sessions.check()


def test_a_session_beyond_the_head_context_gets_no_new_request(tiny_target: str, tiny_head: str) -> None:
    """Free slots alone do not resume it: it would be resent whole every other round without ever getting a tree."""
    drafter = make(tiny_target, tiny_head, max_kv_tokens=1024)
    tokens, features = session(1, 260)
    assert len(drafter.propose([commit("a", tokens, features, 0, 250, GREEDY, TreeBudget(14, 4))])[0]) > 1  # type: ignore[arg-type]
    for end in (258, 259, 260):
        base = 250 if end == 258 else end - 1
        answer = drafter.propose([commit("a", tokens, features, base, end, GREEDY, TreeBudget(14, 4))])
        assert answer == [DraftTree.root_only(tokens[end - 1])]
    assert drafter.sessions.num_free == 1024


def test_a_session_that_can_never_fit_drives_out_no_other(tiny_target: str, tiny_head: str) -> None:
    drafter = make(tiny_target, tiny_head, max_kv_tokens=25)
    tokens, features = session(1, 40)
    for name in ("x", "y"):
        drafter.propose([commit(name, tokens, features, 0, 10, GREEDY, TreeBudget(14, 4))])
    drafter.propose([commit("huge", tokens, features, 0, 40, GREEDY, TreeBudget(14, 4))])
    for name in ("x", "y"):
        (draft,) = drafter.propose([commit(name, tokens, features, 10, 11, GREEDY, TreeBudget(14, 4))])
        assert isinstance(draft, DraftTree)
        assert len(draft) > 1


def test_the_least_recently_used_session_is_evicted_and_reported(tiny_target: str, tiny_head: str) -> None:
    drafter = make(tiny_target, tiny_head, max_kv_tokens=25)
    tokens, features = session(1, 12)
    for name in ("old", "new"):
        drafter.propose([commit(name, tokens, features, 0, 10, GREEDY, TreeBudget(14, 4))])
    drafter.propose([commit("old", tokens, features, 10, 11, GREEDY, TreeBudget(14, 4))])
    drafter.propose([commit("third", tokens, features, 0, 9, GREEDY, TreeBudget(14, 4))])
    assert drafter.propose([commit("new", tokens, features, 10, 11, GREEDY, TreeBudget(14, 4))]) == [
        ResyncRequired("new", 0, 0)
    ]
    assert isinstance(drafter.propose([commit("old", tokens, features, 11, 12, GREEDY, TreeBudget(14, 4))])[0], DraftTree)
    drafter.sessions.check()


def test_an_unknown_drafter_lists_the_known_ones(tiny_target: str, tiny_head: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown drafter 'eagle9'; known: .*eagle3"):
        DraftHead(tiny_head, "eagle9").build_drafter(tiny_target, "float32", "cpu", SHAPE, DraftingConfig())


def test_the_default_ranking_temperature_depends_on_the_request() -> None:
    def of(key: NoiseKey, **drafting: object) -> float:
        context = Commit("a", 0, 0, (5, 6), None, key, TreeBudget(2, 1))
        words = noise_words([context], DraftingConfig(**drafting), 1)  # type: ignore[arg-type]
        return float(words.view("float64")[5, 0])

    assert [of(NoiseKey(0, temperature)) for temperature in (0.0, 0.6, 0.8, 1.0)] == [0.6, 0.6, 0.6, 0.8]
    assert of(GREEDY, shared_noise=False) == 0.6
    assert of(NoiseKey(0, 0.6), shared_noise=False) == 1, "the drafter cannot know what is drawn"
    assert [of(key, ranking_temperature=2) for key in (GREEDY, NoiseKey(0, 1.0))] == [2, 2]
