"""Trees of modules for multi-token prediction equal those of transformers' layer over whole sequences."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.eagle import MAX_SHARING_SESSIONS, EagleDrafter
from eyas.models.heads.eagle_config import HeadWiring, Output
from eyas.models.heads.mtp import load_mtp_head
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.naive_eagle import Node, best_tree
from tests.support.naive_mtp import NaiveMtp
from tests.support.tiny_mtp import FAMILIES, HIDDEN, write_mtp

SHAPE = TreeConfig(num_draft_tokens=14, num_steps=4, top_k=3)
GREEDY = NoiseKey(0)
NOISES = [GREEDY, NoiseKey(9, 0.8), NoiseKey(2**64 - 1, 1.2, top_k=9, top_p=0.9)]
DAILY = ("glm4_moe", "mellum")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mtp")
    return {family: write_mtp(folder / family, family) for family in FAMILIES}


def session(seed: int, length: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 48, (length,), generator=generator).tolist()
    return tokens, torch.randn(length - 1, HIDDEN, generator=generator)


def commit(name: str, tokens: list[int], features: torch.Tensor, base: int, end: int, noise: NoiseKey) -> Commit:
    budget = TreeBudget(14, 4)
    return Commit(name, 0, base, tuple(tokens[base:end]), features[max(base - 1, 0) : end - 1], noise, budget)


def make(folder: str, output: Output = "normed") -> EagleDrafter:
    head = load_mtp_head(folder, folder, wiring=HeadWiring((FINAL_NORM_OUTPUT,), output=output))
    return EagleDrafter(head, SHAPE, DraftingConfig(ranking_temperature=1.0))


def assert_same(tree: object, nodes: list[Node], root: int) -> None:
    assert isinstance(tree, DraftTree)
    assert tree.tokens == (root, *(node.token for node in nodes))
    assert list(tree.depths[1:]) == [node.depth for node in nodes]
    torch.testing.assert_close(
        torch.tensor(tree.log_probs[1:]), torch.tensor([n.score for n in nodes]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in FAMILIES]
)
@pytest.mark.parametrize("output", ["normed", "state"])
def test_trees_equal_those_of_whole_sequences(family: str, output: Output, folders: dict[str, str]) -> None:
    """Of a batch with noise of their own, over several commits, longer than a sliding window."""
    drafter, plain = make(folders[family], output), NaiveMtp(folders[family], family, output)
    sessions = {f"s{i}": (*session(i, 18 + 5 * i), NOISES[i]) for i in range(3)}
    for ends in ((4, 9, 1), (15, 22, 27), (18, 23, 28)):
        before = [drafter.sessions.get(name) for name in sessions]
        bases = [known.committed_length if known else 0 for known in before]
        contexts = [
            commit(name, tokens, features, base, end, noise)
            for (name, (tokens, features, noise)), base, end in zip(sessions.items(), bases, ends, strict=True)
        ]
        trees = drafter.propose(contexts)
        for (tokens, features, noise), tree, end in zip(sessions.values(), trees, ends, strict=True):
            if end > 1:
                nodes = plain.candidates(tokens[:end], features[: end - 1], noise, SHAPE)
                assert_same(tree, best_tree(nodes, 13), tokens[end - 1])
    drafter.sessions.check()


def test_more_sessions_than_share_slots_get_their_own_trees(folders: dict[str, str]) -> None:
    sessions = [session(seed, 12) for seed in range(MAX_SHARING_SESSIONS + 2)]
    contexts = [commit(f"{i}", tokens, features, 0, 12, GREEDY) for i, (tokens, features) in enumerate(sessions)]
    together = make(folders["llama"]).propose(contexts)
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
