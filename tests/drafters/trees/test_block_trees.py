"""Trees and chains of one-pass heads equal those of the obvious implementation; block rows leave nothing behind."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.api.request import SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.host import has_numba
from eyas.drafters.base import LocalDrafter
from eyas.drafters.block import BlockDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.trees.cpu_growth import CompiledGrowth
from eyas.drafters.trees.growth import IndependentExpansion, ddtree_shape, grow_dynamic, select_nodes, trees_from_columns
from eyas.drafters.trees.rows import GrowthShape
from eyas.drafters.trees.scoring import noise_words
from eyas.errors import ConfigError
from eyas.models.backends.packed_weights import PackedProduct
from eyas.models.heads.block import load_block_head, serve
from eyas.protocol.commit import NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.trees.naive_block import NaiveBlock, NaivePEagle
from tests.drafters.trees.test_eagle_trees import GREEDY, NOISES, assert_same, commit, session
from tests.support import reference
from tests.support.corpora import paths_of
from tests.support.given_scores import given_scores
from tests.support.naive_eagle import NaiveEagle, best_tree
from tests.support.tiny_block import KINDS, tiny_block_head, tiny_peagle_head

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
ALL = (*KINDS, "peagle")
MARGINALS = ("dflash", "dflash-window", "peagle")


def make(kind: str, target: str, head: str, **drafting: object) -> LocalDrafter:
    folder = tiny_peagle_head(head) if kind == "peagle" else tiny_block_head(kind, target)
    config = DraftingConfig(**{"ranking_temperature": 1.0, **drafting})  # type: ignore[arg-type]
    return DraftHead(folder, kind.partition("-")[0]).build_drafter(target, "float32", "cpu", SHAPE, config)


def naive(kind: str, target: str, head: str) -> NaiveEagle:
    own = load_file(Path(target, "model.safetensors"))
    embedding, lm_head = own["model.embed_tokens.weight"], own.get("lm_head.weight", own["model.embed_tokens.weight"])
    if kind == "peagle":
        return NaivePEagle(load_file(Path(tiny_peagle_head(head), "model.safetensors")), embedding, 4, 2, layers=2)
    folder = tiny_block_head(kind, target)
    return NaiveBlock(KINDS[kind], load_file(Path(folder, "model.safetensors")), embedding, lm_head)


def naive_shape(kind: str) -> TreeConfig:
    """As wide as there are nodes where levels are independent."""
    return replace(SHAPE, top_k=13) if kind in MARGINALS else SHAPE


@pytest.mark.parametrize("noise", NOISES, ids=["greedy", "noise", "filters"])
@pytest.mark.parametrize("kind", ALL)
def test_trees_of_a_batch_equal_the_naive_ones(kind: str, noise: NoiseKey, tiny_target: str, tiny_head: str) -> None:
    drafter, plain = make(kind, tiny_target, tiny_head), naive(kind, tiny_target, tiny_head)
    sessions = [session(i, 4 + 5 * i) for i in range(3)]
    contexts = [commit(f"{i}", t, f, 0, len(t), noise, TreeBudget(14, 4)) for i, (t, f) in enumerate(sessions)]
    for (tokens, features), tree in zip(sessions, drafter.propose(contexts), strict=True):
        assert isinstance(tree, DraftTree)
        assert_same(tree, best_tree(plain.candidates(tokens, features, noise, naive_shape(kind)), 13), tokens[-1])


@pytest.mark.parametrize("kind", ["dspark", "dflash", "peagle"])
def test_rounds_and_chunks_keep_no_block_rows(kind: str, tiny_target: str, tiny_head: str) -> None:
    drafter, plain = make(kind, tiny_target, tiny_head, max_kv_tokens=64), naive(kind, tiny_target, tiny_head)
    tokens, features = session(1, 30)
    base = 0
    for end, nodes in ((9, 1), (14, 1), (15, 14), (19, 3), (30, 8)):
        (tree,) = drafter.propose([commit("a", tokens, features, base, end, GREEDY, TreeBudget(nodes, 4))])
        assert isinstance(tree, DraftTree)
        found = plain.candidates(tokens[:end], features[: end - 1], GREEDY, naive_shape(kind))
        assert_same(tree, best_tree(found, nodes - 1), tokens[end - 1])
        sessions = drafter.sessions  # type: ignore[attr-defined]
        assert sessions.num_free == 64 - (end - 1), "a slot for each feature, none for the block"
        sessions.check()
        base = end


@pytest.mark.parametrize(
    "noise", [NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=5, top_p=0.9)], ids=["whole", "filtered"]
)
@pytest.mark.parametrize("kind", ALL)
def test_chains_state_the_probabilities_they_are_drawn_from(
    kind: str, noise: NoiseKey, tiny_target: str, tiny_head: str
) -> None:
    drafter, plain = make(kind, tiny_target, tiny_head, proposal_top_k=48), naive(kind, tiny_target, tiny_head)
    tokens, features = session(5, 12)
    (tree,) = drafter.propose([commit("a", tokens, features, 0, 12, noise, TreeBudget(14, 4))._replace(proposal="sampled")])
    assert isinstance(tree, DraftTree)
    assert tree.sampled is not None
    assert tree.num_drafted == 4
    plain.num_context = len(features)  # type: ignore[attr-defined]
    pairs = list(zip(features, tokens[1:], strict=True))
    params = SamplingParams(temperature=noise.temperature, top_k=noise.top_k, top_p=noise.top_p)
    for node, token in enumerate(tree.tokens[1:]):
        probs = reference.target_probs(plain.logits(plain.state(pairs)), params)
        stated = dict(zip(tree.sampled.draft_probs[node].ids, tree.sampled.draft_probs[node].probs, strict=True))
        expected = {plain.ids[i]: prob for i, prob in enumerate(probs) if prob > 0}
        assert stated == pytest.approx(expected, rel=1e-3, abs=1e-6)
        pairs.append((features[0], token))


def test_independent_levels_give_the_best_tree_of_all() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    shape = TreeConfig(num_draft_tokens=9, num_steps=3, top_k=2)
    expansion = IndependentExpansion(torch.log_softmax(logits, -1))
    wide = ddtree_shape(shape, 5)
    candidates = grow_dynamic(expansion, given_scores, GrowthShape(wide.num_steps, wide.top_k))
    trees = trees_from_columns(select_nodes(candidates, [TreeBudget(9, 3)] * 2, torch.arange(5)).numpy(), [7, 7])
    for probs, tree in zip(torch.log_softmax(logits, -1).tolist(), trees, strict=True):
        paths = [(a,) for a in range(5)] + [(a, b) for a in range(5) for b in range(5)]
        paths += [(*path, c) for path in paths[5:] for c in range(5)]
        best = sorted((math.fsum(probs[i][t] for i, t in enumerate(path)) for path in paths), reverse=True)[:8]
        assert sorted(tree.log_probs[1:], reverse=True) == pytest.approx(best, abs=1e-5)


@pytest.mark.skipif(not has_numba(), reason="kernels of the CPU need numba")
@pytest.mark.parametrize("layout", ["float32", "float16", "scaled float16"])
def test_trees_of_a_markov_head_are_best_by_hand_in_every_layout(layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    embedding, weight = torch.randn(50, 5, generator=generator), torch.randn(37, 5, generator=generator)
    logits = torch.randn(1, 2, 37, generator=generator)
    weight = weight if layout == "float32" else weight.half().float()
    if layout == "scaled float16":
        embedding, weight = embedding * 2**20, weight / 2**20
    product = PackedProduct(weight)
    if not product.weight.in_blocks or (layout != "float32" and not product.weight.is_half):
        pytest.skip(f"weights are not laid out as {layout} for kernels here")
    assert (product.weight.is_half, product.scale > 1) == (layout != "float32", layout == "scaled float16")
    growth = CompiledGrowth(torch.arange(13, 50), embedding, product)
    words = noise_words([], DraftingConfig(), 1)
    (tree,) = growth.trees(logits, [7], words, [TreeBudget(5, 2)], 2)

    def children(level: int, token: int) -> list[tuple[float, int]]:
        scores = torch.log_softmax(logits[0, level] + weight @ embedding[token], -1)
        return [(float(scores[i]), 13 + int(i)) for i in scores.topk(2).indices]

    first = children(0, 7)
    paths = {(token,): score for score, token in first}
    paths |= {(above, token): score + own for own, above in first for score, token in children(1, above)}
    expected = dict(sorted(paths.items(), key=lambda item: -item[1])[:4])
    assert paths_of(tree) == pytest.approx(expected, abs=1e-4)


def test_a_block_is_no_deeper_than_its_head(tiny_target: str) -> None:
    head = serve(load_block_head(tiny_block_head("dspark", tiny_target), tiny_target))
    drafter = BlockDrafter(head, replace(SHAPE, num_steps=9), DraftingConfig())
    assert drafter.tree.num_steps == head.config.num_drafted == 4


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_small_trees_have_as_many_nodes_as_configured(num_nodes: int, tiny_target: str) -> None:
    head = serve(load_block_head(tiny_block_head("dspark", tiny_target), tiny_target))
    drafter = BlockDrafter(head, replace(SHAPE, num_draft_tokens=num_nodes), DraftingConfig())
    tokens, features = session(1, 9)
    (tree,) = drafter.propose([commit("a", tokens, features, 0, 9, GREEDY, TreeBudget(14, 4))])
    assert isinstance(tree, DraftTree)
    assert len(tree) == num_nodes


def test_sessions_near_the_end_of_the_context_get_trees(tiny_target: str, tiny_head: str) -> None:
    drafter = make("dspark", tiny_target, tiny_head)
    tokens, features = session(1, 256)
    (tree,) = drafter.propose([commit("a", tokens, features, 0, 255, GREEDY, TreeBudget(14, 1))])
    assert isinstance(tree, DraftTree)
    assert tree.num_drafted


def test_a_tree_without_levels_is_refused(tiny_target: str) -> None:
    head = serve(load_block_head(tiny_block_head("dspark", tiny_target), tiny_target))
    with pytest.raises(ConfigError, match="a block drafter needs num_steps of at least 1"):
        BlockDrafter(head, replace(SHAPE, num_steps=0), DraftingConfig())
