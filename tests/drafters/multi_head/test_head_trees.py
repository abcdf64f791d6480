"""Trees of Medusa and Hydra equal those of the obvious implementation, path by path."""

import math

import pytest
import torch

from eyas.config import DraftingConfig, MedusaConfig, MethodsConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.multi_head import MultiHeadDrafter, likely_paths
from eyas.errors import ConfigError
from eyas.protocol.commit import NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.multi_head.naive_heads import NaiveHeads
from tests.drafters.trees.test_eagle_trees import commit, session
from tests.support.corpora import paths_of
from tests.support.tiny_medusa_hydra import KINDS, tiny_heads

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=3, top_k=4)
GREEDY = NoiseKey(0)
NOISES = [GREEDY, NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=3, top_p=0.9)]
OWN_PATHS = ((2,), (0,), (0, 1), (0, 1, 5), (2, 0), (2, 3), (0, 1, 0))


def make(kind: str, target: str, beside: str, medusa: MedusaConfig | None = None, **eagle: object) -> MultiHeadDrafter:
    methods = MethodsConfig(medusa=medusa or MedusaConfig())
    eagle_config = DraftingConfig(**{"max_kv_tokens": 512, "ranking_temperature": 1.0, **eagle})  # type: ignore[arg-type]
    name, heads = kind.split("-")[0], tiny_heads(kind, beside)
    drafter = DraftHead(heads, name).build_drafter(target, "float32", "cpu", SHAPE, eagle_config, methods)
    assert isinstance(drafter, MultiHeadDrafter)
    return drafter


def assert_same(tree: object, expected: dict[tuple[int, ...], float]) -> None:
    assert isinstance(tree, DraftTree)
    assert list(paths_of(tree)) == list(expected)
    assert list(paths_of(tree).values()) == pytest.approx(list(expected.values()), abs=1e-4)


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
@pytest.mark.parametrize("paths", [(), OWN_PATHS], ids=["likely", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_static_trees_of_a_batch_equal_the_naive_ones(
    kind: str, paths: tuple[tuple[int, ...], ...], noise: NoiseKey, tiny_target: str, tiny_head: str
) -> None:
    drafter = make(kind, tiny_target, tiny_head, MedusaConfig(tree_choices=paths))
    plain, sessions = NaiveHeads(kind, tiny_target), [session(i, 3 + 5 * i) for i in range(4)]
    contexts = [commit(f"{i}", t, f, 0, len(t), noise, TreeBudget(20, 5)) for i, (t, f) in enumerate(sessions)]
    for (tokens, features), tree in zip(sessions, drafter.propose(contexts), strict=True):
        assert_same(tree, plain.static(tokens, features, noise, list(paths or likely_paths(SHAPE))))
    drafter.sessions.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_budget_keeps_the_best_of_the_tree(kind: str, tiny_target: str, tiny_head: str) -> None:
    drafter, (tokens, features) = make(kind, tiny_target, tiny_head), session(4, 8)
    budgets = [TreeBudget(20, 5), TreeBudget(6, 3), TreeBudget(20, 1), TreeBudget(2, 2)]
    contexts = [commit(f"{i}", tokens, features, 0, 8, GREEDY, budget) for i, budget in enumerate(budgets)]
    trees = [tree for tree in drafter.propose(contexts) if isinstance(tree, DraftTree)]
    for tree, budget in zip(trees, budgets, strict=True):
        tree.validate(tokens[-1], 48, budget.max_nodes, budget.max_depth)
    whole, six, shallow, single = map(paths_of, trees)
    assert sorted(six.values()) == sorted(whole.values())[-5:]
    assert shallow == {path: score for path, score in whole.items() if len(path) == 1}
    assert list(single.values()) == [max(whole.values())]


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_trees_hold_the_best_of_all_candidates(kind: str, noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    drafter = make(kind, tiny_target, tiny_head, MedusaConfig("dynamic"))
    plain, (tokens, features) = NaiveHeads(kind, tiny_target), session(3, 12)
    expanded: list[tuple[int, ...]] = [()]
    every: list[tuple[int, ...]] = []
    for _ in range(SHAPE.num_steps):
        level = [(*path, rank) for path in expanded for rank in range(SHAPE.top_k)]
        every += level
        guesses = plain.guesses(tokens, features, noise, every)
        expanded = sorted(level, key=lambda path: -guesses[path].score)[: SHAPE.top_k]
    possible = {guess.path: guess.score for guess in guesses.values() if guess.score > -math.inf}
    (tree,) = drafter.propose([commit("a", tokens, features, 0, 12, noise, TreeBudget(20, 5))])
    assert isinstance(tree, DraftTree)
    assert sorted(paths_of(tree).values()) == pytest.approx(
        sorted(possible.values())[1 - SHAPE.num_draft_tokens :], abs=1e-4
    )
    assert paths_of(tree).keys() <= possible.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_sampled_from_the_head_probs(kind: str, tiny_target: str, tiny_head: str) -> None:
    noise = NOISES[2]
    drafter, plain = make(kind, tiny_target, tiny_head, proposal_top_k=7), NaiveHeads(kind, tiny_target)
    sessions = [session(i, 4 + 5 * i) for i in range(3)]
    contexts = [commit(f"{i}", t, f, 0, len(t), noise, TreeBudget(14, 4)) for i, (t, f) in enumerate(sessions)]
    trees = drafter.propose([context._replace(proposal="sampled") for context in contexts])
    for (tokens, features), tree in zip(sessions, trees, strict=True):
        assert isinstance(tree, DraftTree)
        assert tree.sampled is not None
        assert tree.depths == (0, 1, 2, 3)
        state = plain.state(features)
        for node in range(3):
            logits = plain.logits(state, tokens[-1], tree.tokens[1 : node + 1])
            scores = torch.softmax(logits / noise.temperature, -1)
            stated = tree.sampled.draft_probs[node]
            assert stated.ids == tuple(scores.topk(len(stated.ids)).indices.tolist())
            assert stated.probs == pytest.approx([float(scores[token]) for token in stated.ids], rel=1e-4)


def test_generated_paths_form_a_tree_of_the_requested_size() -> None:
    for nodes, depth, width in ((2, 1, 1), (24, 4, 8), (64, 4, 10), (6, 5, 1)):
        paths = likely_paths(TreeConfig(nodes, depth, width))
        MedusaConfig(tree_choices=paths)
        assert len(paths) == nodes - 1
        assert max(map(len, paths)) <= depth
        assert max(max(path) for path in paths) < width
    assert likely_paths(TreeConfig(99, 2, 3)) == likely_paths(TreeConfig(13, 2, 3)), "three children, nine grandchildren"


def test_trees_that_the_heads_cannot_grow_are_refused(tiny_target: str, tiny_head: str) -> None:
    deep = MedusaConfig(tree_choices=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    for medusa, complaint in (
        (deep, "4 levels deep, but there are 3 heads"),
        (MedusaConfig(tree_choices=((48,),)), "width 49 needs as many draft tokens; there are 48"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make("medusa", tiny_target, tiny_head, medusa)
    for paths, complaint in ((((0, 0),), "without its parent"), (((0,), (0,)), "1 of them distinct"), (((-1,),), "below 0")):
        with pytest.raises(ConfigError, match=complaint):
            MedusaConfig(tree_choices=paths)
    with pytest.raises(ConfigError, match="shape is 'round'"):
        MedusaConfig("round")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no room for a guess"):
        DraftHead(tiny_heads("medusa", tiny_head), "medusa").build_drafter(
            tiny_target, "float32", "cpu", TreeConfig(1, 3, 3), DraftingConfig()
        )
