"""Trees of EAGLE-1 (static) and EAGLE-2 (dynamic) equal those of the obvious implementation, node by node, ties included."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import MC_SIM_7B_63, DraftConfig, DraftingConfig, Eagle1Config, MethodsConfig, load
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.errors import ConfigError
from eyas.protocol.commit import NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.trees.test_eagle_trees import NOISES, SHAPE, assert_same, commit, session
from tests.support.naive_eagle import NaiveEagle1, Node, best_tree
from tests.support.tiny import write_eagle1_head, write_target

PATHS = ((0,), (1,), (2,), (0, 0), (0, 3), (2, 1), (0, 3, 0), (0, 3, 1), (2, 1, 0), (2, 1, 0, 0))
TREES = {"the published": MC_SIM_7B_63, "a lopsided": PATHS, "a flat": ((0,), (4,), (2,)), "a chain": ((0,), (0, 0))}


def make(name: str, target: str, head: str, paths: tuple[tuple[int, ...], ...] = MC_SIM_7B_63) -> LocalDrafter:
    methods = MethodsConfig(eagle1=Eagle1Config(paths))
    return DraftHead(head, name).build_drafter(
        target, "float32", "cpu", SHAPE, DraftingConfig(512, ranking_temperature=1), methods
    )


def naive(target: str, head: str) -> NaiveEagle1:
    weights = load_file(Path(target, "model.safetensors"))
    tensors = load_file(Path(head, "model.safetensors"))
    return NaiveEagle1(tensors, weights["model.embed_tokens.weight"], weights["lm_head.weight"], heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target whose lm_head has every row four times, so that four tokens always tie, and an EAGLE-1 head for it."""
    target = write_target(tmp_path_factory.mktemp("tied"))
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:12].repeat(4, 1)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target), str(write_eagle1_head(tmp_path_factory.mktemp("tied") / "head"))


def propose(
    drafter: LocalDrafter, noise: NoiseKey, budget: TreeBudget
) -> list[tuple[tuple[list[int], torch.Tensor], DraftTree]]:
    sessions = [session(i, 4 + 5 * i) for i in range(4)]
    contexts = [commit(f"{i}", t, f, 0, len(t), noise, budget) for i, (t, f) in enumerate(sessions)]
    return [(s, d) for s, d in zip(sessions, drafter.propose(contexts), strict=True) if isinstance(d, DraftTree)]


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
def test_dynamic_trees_of_a_batch_equal_the_naive_ones(noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    head = f"{tiny_head}/eagle1"
    for (tokens, features), tree in propose(make("eagle2", tiny_target, head), noise, TreeBudget(14, 4)):
        expected = best_tree(naive(tiny_target, head).candidates(tokens, features, noise, SHAPE), 13)
        assert_same(tree, expected, tokens[-1])


@pytest.mark.parametrize("paths", TREES.values(), ids=TREES)
@pytest.mark.parametrize("noise", NOISES[:2], ids=["greedy", "noise"])
def test_static_trees_of_a_batch_equal_the_naive_ones(
    noise: NoiseKey, paths: tuple[tuple[int, ...], ...], tiny_target: str, tiny_head: str
) -> None:
    head = f"{tiny_head}/eagle1"
    for (tokens, features), tree in propose(make("eagle1", tiny_target, head, paths), noise, TreeBudget(60, 9)):
        assert_same(tree, naive(tiny_target, head).static_nodes(tokens, features, noise, paths), tokens[-1])


def test_ties_go_to_the_lowest_token(tied: tuple[str, str]) -> None:
    target, head = tied
    for (tokens, features), tree in propose(make("eagle1", target, head), NoiseKey(0), TreeBudget(60, 9)):
        nodes = naive(target, head).static_nodes(tokens, features, NoiseKey(0), MC_SIM_7B_63)
        assert_same(tree, nodes, tokens[-1])
        assert [token % 12 for token in tree.tokens[1:5]] == [tree.tokens[1]] * 4, "the four children of the root are tied"
    for (tokens, features), tree in propose(make("eagle2", target, head), NoiseKey(0), TreeBudget(14, 4)):
        expected = best_tree(naive(target, head).candidates(tokens, features, NoiseKey(0), SHAPE), 13)
        assert_same(tree, expected, tokens[-1])


@pytest.mark.parametrize(("nodes", "depth"), [(26, 5), (12, 5), (40, 2), (2, 1), (3, 5)])
def test_a_small_budget_keeps_the_best_of_the_static_tree(nodes: int, depth: int, tiny_target: str, tiny_head: str) -> None:
    head = f"{tiny_head}/eagle1"
    for (tokens, features), tree in propose(make("eagle1", tiny_target, head), NoiseKey(0), TreeBudget(nodes, depth)):
        whole: list[Node] = naive(tiny_target, head).static_nodes(tokens, features, NoiseKey(0), MC_SIM_7B_63)
        expected = best_tree([node for node in whole if node.depth <= depth], nodes - 1)
        assert_same(tree, expected, tokens[-1])


@pytest.mark.parametrize("paths", [(), ((0,), (0,)), ((0,), (1, 0)), ((0,), (-1,))])
def test_paths_that_make_no_tree_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="tree_choices"):
        Eagle1Config(paths)


def test_paths_are_read_from_settings() -> None:
    config = load(
        DraftConfig, None, ["served_model_name=m", "model=t", "draft_model=h", "methods.eagle1.tree_choices=[[0],[1],[0,2]]"]
    )
    assert config.methods.eagle1.tree_choices == ((0,), (1,), (0, 2))
