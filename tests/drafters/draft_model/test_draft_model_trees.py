"""Trees of a small draft model equal those of the obvious implementation, and nothing is run through it twice."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eyas.config import DraftingConfig, DraftModelConfig, TreeConfig
from eyas.drafters.draft_model import ModelDrafter
from eyas.errors import ConfigError
from eyas.models.inputs import PackedInputs
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.draft_model import naive_draft_model
from tests.drafters.test_memory import pools_of
from tests.drafters.trees.test_eagle_trees import assert_same
from tests.support.devices.emulated_graphs import checked_capture
from tests.support.families import FAMILIES, config_of, write_model
from tests.support.naive_eagle import best_tree
from tests.support.tiers import nightly
from tests.support.tiny import write_small

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
WHOLE = TreeBudget(14, 4)
GREEDY = NoiseKey(0)
NOISES = [GREEDY, NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=9, top_p=0.9)]


@pytest.fixture(scope="module")
def small(tiny_target: str) -> str:
    return write_small(tiny_target)


def make(small: str, max_kv_tokens: int = 2048, chunk_tokens: int = 512, shape: TreeConfig = SHAPE) -> ModelDrafter:
    return ModelDrafter(
        load_target(small), shape, DraftingConfig(max_kv_tokens, ranking_temperature=1), DraftModelConfig(chunk_tokens)
    )


def tokens_of(seed: int, length: int) -> list[int]:
    return torch.randint(3, 48, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def commit(name: str, tokens: Sequence[int], base: int, noise: NoiseKey = GREEDY, budget: TreeBudget = WHOLE) -> Commit:
    """tokens: all that is committed; those from `base` on are new."""
    return Commit(name, 0, base, tuple(tokens[base:]), None, noise, budget)


def tree_of(drafter: ModelDrafter, context: Commit) -> DraftTree:
    (draft,) = drafter.propose([context])
    assert isinstance(draft, DraftTree)
    drafter.sessions.check()
    return draft


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
def test_trees_of_a_batch_equal_the_naive_ones(noise: NoiseKey, small: str) -> None:
    drafter, sessions = make(small), {f"s{i}": tokens_of(i, 2 + 5 * i) for i in range(4)}
    drafts = drafter.propose([commit(name, tokens, 0, noise) for name, tokens in sessions.items()])
    for tokens, tree in zip(sessions.values(), drafts, strict=True):
        assert isinstance(tree, DraftTree)
        assert_same(tree, best_tree(naive_draft_model.candidates(small, tokens, noise, SHAPE), 13), tokens[-1])
    drafter.sessions.check()


def test_a_tree_after_any_accepted_path_equals_the_naive_tree(small: str) -> None:
    """Accepted: nothing, inner nodes or a leaf; the bonus token in the tree or not."""
    for node in range(6):
        drafter, tokens = make(small), tokens_of(3, 9)
        tree = tree_of(drafter, commit("a", tokens, 0))
        more = [*tokens, *(tree.tokens[step] for step in tree.path(node)[1:]), 5]
        assert_same(
            tree_of(drafter, commit("a", more, 9)),
            best_tree(naive_draft_model.candidates(small, more, GREEDY, SHAPE), 13),
            5,
        )


@pytest.mark.parametrize("family", ["gemma-2", nightly("gpt-2"), nightly("qwen-3-moe")])
def test_models_with_windows_softcaps_or_own_positions_can_draft(family: str, tmp_path: Path) -> None:
    """This holds near the end of the context too, where positions of unused tree rows run out."""
    kind, settings = FAMILIES[family]
    short = {"max_position_embeddings": 64} | ({"n_positions": 64} if kind == "gpt2" else {})
    model, tokens = load_target(write_model(tmp_path, config_of(kind, **settings | short))), tokens_of(4, 64)
    assert model.max_model_len == 64
    drafters = [ModelDrafter(model, SHAPE, DraftingConfig(2048, ranking_temperature=1), DraftModelConfig())]
    if not model.is_mixture_of_experts:
        drafters.append(
            ModelDrafter(model, SHAPE, DraftingConfig(2048, ranking_temperature=1), DraftModelConfig(), checked_capture)
        )
    for base, end in ((0, 30), (30, 31)):
        nodes = best_tree(naive_draft_model.candidates(str(tmp_path), tokens[:end], GREEDY, SHAPE), 13)
        for drafter in drafters:
            assert_same(tree_of(drafter, commit("a", tokens[:end], base)), nodes, tokens[end - 1])
    for drafter in drafters:
        assert len(tree_of(drafter, commit("end", tokens, 0, budget=TreeBudget(3, 1)))) == 3


class Counting(TargetModel):
    """Records the number of rows of each forward pass."""

    def __init__(self, model: TargetModel) -> None:
        super().__init__(model.model)
        self.rows: list[int] = []

    def forward(self, packed: PackedInputs, pools):  # type: ignore[no-untyped-def]
        self.rows.append(len(packed.tokens))
        return super().forward(packed, pools)


def test_accepted_tokens_are_not_run_again(small: str) -> None:
    model = Counting(load_target(small))
    drafter, tokens = (
        ModelDrafter(model, SHAPE, DraftingConfig(512, ranking_temperature=1), DraftModelConfig()),
        tokens_of(3, 9),
    )
    tree = tree_of(drafter, commit("a", tokens, 0))
    assert model.rows == [9, 3, 3, 3], "the prompt, then each level that has children"
    inner = next(n for n in range(len(tree)) if tree.depths[n] == 3)
    model.rows.clear()
    tree_of(drafter, commit("a", [*tokens, *(tree.tokens[step] for step in tree.path(inner)[1:]), 47], 9))
    assert model.rows == [1, 3, 3, 3], "the bonus token alone is new"


def test_slots_of_a_tree_return_but_for_the_accepted_ones(small: str) -> None:
    drafter, tokens = make(small, max_kv_tokens=100), tokens_of(3, 9)
    tree = tree_of(drafter, commit("a", tokens, 0))
    assert drafter.sessions.num_free == 100 - 9 - 9
    more = [*tokens, tree.tokens[1], 47]
    assert tree_of(drafter, commit("a", more, 9, budget=TreeBudget(1, 0))) == DraftTree.root_only(47)
    assert drafter.sessions.num_free == 100 - 11
    drafter.release(["a"])
    assert drafter.sessions.num_free == 100


def test_numbers_of_a_session_that_are_none_reach_no_other(small: str) -> None:
    """Shorter prefixes are padded beside longer ones."""
    drafter = make(small)
    drafter.propose([commit("spoilt", tokens_of(1, 9), 0)])
    for pool in pools_of(drafter):
        pool[drafter.sessions["spoilt"].slots] = float("nan")
    contexts = [commit("short", tokens_of(2, 3), 0), commit("long", tokens_of(3, 30), 0)]
    drafts = drafter.propose([*contexts, commit("spoilt", [*tokens_of(1, 9), 5], 9)])
    assert drafts[:2] == make(small).propose(contexts)


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_prefill_in_chunks_changes_no_tree(chunk_tokens: int, small: str) -> None:
    contexts = [commit(f"s{i}", tokens_of(i, 5 + 9 * i), 0, NOISES[i % 3]) for i in range(4)]
    contexts.append(commit("followed", tokens_of(9, 20), 0, budget=TreeBudget(1, 0)))
    whole = make(small).propose(contexts)
    cut = make(small, chunk_tokens=chunk_tokens).propose(contexts)
    for one, other in zip(whole, cut, strict=True):
        assert isinstance(one, DraftTree)
        assert isinstance(other, DraftTree)
        assert (one.tokens, one.parents) == (other.tokens, other.parents)


def test_one_level_is_drafted_without_running_any_row_of_a_tree(small: str) -> None:
    drafter, tokens = make(small, shape=TreeConfig(8, 1, 3)), tokens_of(1, 9)
    assert len(tree_of(drafter, commit("a", tokens, 0))) == 4
    assert len(tree_of(drafter, commit("a", [*tokens, 7], 9, NoiseKey(3, 0.7)))) == 4


def test_a_tree_that_the_model_cannot_grow_is_refused(small: str) -> None:
    for shape in (TreeConfig(8, 0, 3), TreeConfig(8, 2, 49)):
        with pytest.raises(ConfigError, match="a small draft model needs num_steps of at least 1"):
            make(small, shape=shape)
    rows = SHAPE.top_k * (SHAPE.num_steps - 1)
    with pytest.raises(
        ConfigError, match=rf"drafting.max_kv_tokens {rows} cannot hold a token and the {rows} rows of one tree"
    ):
        make(small, max_kv_tokens=rows)
    assert tree_of(make(small, max_kv_tokens=rows + 1), commit("a", [5], 0)).num_drafted


def test_a_session_beyond_max_model_len_gets_no_trees(small: str) -> None:
    drafter, tokens = make(small), tokens_of(1, 258)
    assert len(tree_of(drafter, commit("a", tokens[:256], 0))) > 1
    assert tree_of(drafter, commit("a", tokens[:257], 256)) == DraftTree.root_only(tokens[256])
    assert drafter.sessions.num_free == 2048


def test_trees_of_idle_sessions_are_evicted_before_tokens(small: str) -> None:
    drafter, tokens = make(small, max_kv_tokens=60), tokens_of(1, 20)
    tree_of(drafter, commit("idle", tokens[:10], 0))
    tree_of(drafter, commit("busy", tokens[:17], 0))  # 2 * 9 of trees, 27 of tokens
    tree_of(drafter, commit("third", tokens[:10], 0, budget=TreeBudget(1, 0)))
    tree_of(drafter, commit("fourth", tokens[:10], 0, budget=TreeBudget(1, 0)))
    assert len(tree_of(drafter, commit("idle", tokens[:11], 10))) > 1, "it is still known"
