"""Trees of modules for multi-token prediction equal trees by transformers' layer over whole sequences."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters import neural
from eyas.drafters.mtp import MtpDrafter
from eyas.models.heads.eagle_config import HeadWiring, Output
from eyas.models.heads.mtp import load_mtp_head
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.drafters.trees.test_eagle_trees import assert_same, session
from tests.support.naive_eagle import best_tree
from tests.support.naive_mtp import NaiveMtp
from tests.support.tiers import nightly, tiered
from tests.support.tiny_mtp import FAMILIES, HIDDEN, LAYERS, MtpFolders, write_mtp

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
GREEDY = NoiseKey(0)
NOISES = [GREEDY, NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=9, top_p=0.9)]
DAILY = ("glm4_moe", "deepseek_v3", "mellum")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return MtpFolders(tmp_path_factory.mktemp("mtp"))


def commit(name: str, tokens: list[int], features: torch.Tensor, base: int, end: int, noise: NoiseKey) -> Commit:
    budget = TreeBudget(14, 4)
    return Commit(name, 0, base, tuple(tokens[base:end]), features[max(base - 1, 0) : end - 1], noise, budget)


def make(folder: str, output: Output = "normed", max_batch: int = 64) -> MtpDrafter:
    head = load_mtp_head(folder, folder, wiring=HeadWiring((FINAL_NORM_OUTPUT,), output=output))
    return MtpDrafter(head, SHAPE, DraftingConfig(ranking_temperature=1.0, cuda_graph_max_batch=max_batch))


def assert_rounds(drafter: MtpDrafter, plain: NaiveMtp) -> None:
    """Trees of a batch with noise of their own, over several commits, longer than a sliding window."""
    sessions = {f"s{i}": (*session(i, 18 + 5 * i), NOISES[i]) for i in range(3)}
    for ends in ((4, 9, 1), (5, 22, 2), (15, 23, 27), (18, 23, 28)):
        before = [drafter.sessions.get(name) for name in sessions]
        bases = [known.committed_length if known else 0 for known in before]
        contexts = [
            commit(name, tokens, features, base, end, noise)
            for (name, (tokens, features, noise)), base, end in zip(sessions.items(), bases, ends, strict=True)
            if end > base
        ]
        trees = {each.session: tree for each, tree in zip(contexts, drafter.propose(contexts), strict=True)}
        for (name, (tokens, features, noise)), end in zip(sessions.items(), ends, strict=True):
            if name in trees and end > len(plain.parts):
                nodes = plain.candidates(tokens[:end], features[: end - 1], noise, SHAPE)
                assert_same(trees[name], best_tree(nodes, 13), tokens[end - 1])
            elif name in trees:
                assert trees[name] == DraftTree.root_only(tokens[end - 1])
    drafter.sessions.check()


@pytest.mark.parametrize("family", tiered(FAMILIES, DAILY))
@pytest.mark.parametrize("output", ["normed", nightly("state")])
def test_trees_equal_those_of_whole_sequences(family: str, output: Output, folders: dict[str, str]) -> None:
    assert_rounds(make(folders[family], output), NaiveMtp(folders[family], family, output))


@pytest.mark.parametrize(("family", "count"), [("glm4_moe", 3), nightly("exaone_moe", 2), nightly("ernie4_5_moe", 1)])
def test_module_k_predicts_the_token_at_depth_k(family: str, count: int, tmp_path: Path) -> None:
    """And the last module those below, by its own states."""
    folder = write_mtp(tmp_path / "target", family, count=count)
    drafter = make(folder)
    assert drafter.work.passes == {3: 7, 2: 5, 1: 4}[count]
    assert_rounds(drafter, NaiveMtp(folder, family, count=count))


def test_a_part_of_short_sessions_alone_gets_no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of fewer pairs than modules have no state yet, in a pass of their own."""
    folder = write_mtp(tmp_path / "target", "glm4_moe", count=2)
    long, short = (commit(f"{n}", *session(n, n), 0, n, GREEDY) for n in (12, 2))
    (alone,) = make(folder).propose([long])
    monkeypatch.setattr(neural, "MAX_NEW_TOKENS", 4)
    assert make(folder).propose([long, short]) == [alone, DraftTree.root_only(short.tokens[-1])]


def test_more_sessions_than_grow_together_get_their_own_trees(folders: dict[str, str]) -> None:
    sessions = [session(seed, 12) for seed in range(10)]
    contexts = [commit(f"{i}", tokens, features, 0, 12, GREEDY) for i, (tokens, features) in enumerate(sessions)]
    together = make(folders["llama"], max_batch=8).propose(contexts)
    alone = [make(folders["llama"]).propose([context])[0] for context in contexts[-3:]]
    for tree, own in zip(together[-3:], alone, strict=True):
        assert isinstance(tree, DraftTree)
        assert isinstance(own, DraftTree)
        assert (tree.tokens, tree.parents) == (own.tokens, own.parents)


@pytest.mark.parametrize("mistake", ["order", "embedding norm", "hidden norm", "final norm"])
def test_a_wrong_order_or_norm_gives_other_trees(mistake: str, folders: dict[str, str], tmp_path: Path) -> None:
    """The comparison above would see a projection that reads its halves in the other order, and each norm that is wrong."""
    family = FAMILIES["glm4_moe"]
    folder = write_mtp(tmp_path / "wrong", "glm4_moe")
    tensors = load_file(Path(folder, "model.safetensors"))
    projection, *norms = family.names
    if mistake == "order":
        tensors[projection] = tensors[projection].roll(HIDDEN, 1)
    else:
        name = norms[["embedding norm", "hidden norm", "final norm"].index(mistake)]
        tensors[name] = torch.ones(HIDDEN)
    save_file(tensors, Path(folder, "model.safetensors"))
    tokens, features = session(1, 20)
    plain = NaiveMtp(folders["glm4_moe"], "glm4_moe")
    nodes = best_tree(plain.candidates(tokens, features, GREEDY, SHAPE), 13)
    context = commit("a", tokens, features, 0, 20, GREEDY)
    right, wrong = (make(each).propose([context])[0] for each in (folders["glm4_moe"], folder))
    assert_same(right, nodes, tokens[-1])
    with pytest.raises(AssertionError):
        assert_same(wrong, nodes, tokens[-1])


@pytest.mark.parametrize(("family", "count"), [("glm4_moe", 1), ("glm4_moe", 3), ("mellum", 1)])
def test_chains_equal_those_of_transformers(family: str, count: int, tmp_path: Path) -> None:
    """Of its own MtpModel, which runs each module once."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers has no MtpModel, or one for fewer families")
    from transformers.cache_utils import MtpCache

    folder = write_mtp(tmp_path / family, family, count=count)
    tokens = torch.arange(5, 29)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if family == "glm4_moe":  # which names modules as the published sizes do
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.[{LAYERS}-9]\."]
    drafts = modeling.MtpModel.from_pretrained(model).eval()
    with torch.no_grad():
        states = model.model(tokens[None], use_cache=False).last_hidden_state[:, :-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        places = torch.arange(1, len(tokens))
        chain, logits, _ = drafts(tokens[None, 1:], states, None, places[None], cache)
    shape = TreeConfig(count + 1, count, 1)
    drafter = MtpDrafter(load_mtp_head(folder, folder), shape, DraftingConfig(ranking_temperature=1.0))
    budget = TreeBudget(count + 1, count)
    (tree,) = drafter.propose([Commit("a", 0, 0, tuple(tokens.tolist()), states[0], GREEDY, budget)])
    assert isinstance(tree, DraftTree)
    assert list(tree.tokens[1:]) == chain[0].tolist()
    expected = torch.log_softmax(logits[0], -1).amax(-1).cumsum(0)
    assert tree.log_probs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
