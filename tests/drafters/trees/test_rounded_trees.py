"""Heads whose weights are rounded to 8 bits on a CPU: how a session's commits arrive changes no bit of its trees."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext, LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.kernels.arguments import BYTES, DOTS
from eyas.models.backends import cpu
from eyas.models.backends.packed_weights import packed_weight
from eyas.models.heads.block import load_block_head, serve
from eyas.models.heads.eagle import load_head
from eyas.protocol.commit import NO_TREE, Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.tiny import DEMO

pytest.importorskip("numba", reason="numba is not installed")

TREE = TreeConfig(12, 4, 4)
NOISE = NoiseKey(5, 0.9)
# Together more than a pass runs as a whole, and less.
LENGTHS = (60, 33, 5)


def commits(number: int, length: int, width: int, size: int) -> list[DraftContext]:
    """The commits of a session, of at most `size` tokens; the last one wants a tree."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 1000, (length,), generator=generator).tolist()
    features = torch.randn(length - 1, width, generator=generator)
    made = []
    for start in range(0, length, size):
        end = min(start + size, length)
        budget = TreeBudget(TREE.num_draft_tokens, TREE.num_steps) if end == length else NO_TREE
        own = features[max(start - 1, 0) : end - 1]
        made.append(Commit(f"{number}", 0, start, tuple(tokens[start:end]), own, NOISE, budget))
    return made


def build(method: str, head: str, quantization: Any) -> LocalDrafter:
    drafting = DraftingConfig(max_kv_tokens=512, quantization=quantization)
    return DraftHead(str(DEMO / head), method).build_drafter(str(DEMO / "target"), "float32", "cpu", TREE, drafting)


@pytest.mark.parametrize("rounds_rows", [True, False], ids=["dots", "floats"])
def test_linear_layers_of_a_head_are_integers(rounds_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to their numbers; also those of a block head's context. EAGLE-1 has an `fc` more, with a bias."""
    monkeypatch.setattr(cpu, "adds_products_of_bytes", lambda: rounds_rows)
    target = str(DEMO / "target")
    stored = DOTS if rounds_rows else BYTES
    heads = [
        [load_head(str(DEMO / folder), target, kind=kind, quantization=bits) for bits in ("", "int8")]
        for folder, kind in (("eagle3", "eagle3"), ("eagle1", "eagle"))
    ]
    heads += [[serve(load_block_head(str(DEMO / "dspark"), target), bits) for bits in ("", "int8")]]
    for plain, narrow in heads:
        assert narrow.compiled is not None
        own = [(name, weight) for name, part in narrow.named_modules() if (weight := packed_weight(part))]
        assert len(own) >= 5
        for name, weight in own:
            assert weight.stored == stored
            exact = plain.get_submodule(name).weight
            assert (narrow.get_submodule(name).weight - exact).norm() < 0.01 * exact.norm()


def facts(trees: Sequence[Any]) -> list[tuple[Any, ...]]:
    assert all(isinstance(tree, DraftTree) and tree.num_drafted > 1 for tree in trees)
    return [(list(tree.tokens), list(tree.parents), list(tree.log_probs)) for tree in trees]


@pytest.mark.parametrize(("quantization", "rounds_rows"), [("", True), ("int8", True), ("int8", False)])
@pytest.mark.parametrize(("method", "head"), [("eagle3", "eagle3"), ("eagle2", "eagle1"), ("dspark", "dspark")])
def test_trees_of_sessions_together_and_in_parts_are_equal(
    method: str, head: str, quantization: str, rounds_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "adds_products_of_bytes", lambda: rounds_rows)
    whole = build(method, head, quantization)
    parts = build(method, head, quantization)
    width = whole.needs.feature_size
    together = whole.propose([commits(number, length, width, length)[0] for number, length in enumerate(LENGTHS)])
    alone = []
    for number, length in enumerate(LENGTHS):
        for commit in commits(number, length, width, 7):
            (tree,) = parts.propose([commit])
        alone.append(tree)
    assert facts(together) == facts(alone)
