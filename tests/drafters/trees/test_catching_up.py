"""Sessions that lack many tokens are caught up in passes of a bounded size, with the same trees."""

from collections.abc import Sequence

import pytest
import torch

from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters import neural
from eyas.drafters.base import Draft, DraftContext
from eyas.drafters.draft_head import DraftHead
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from eyas.protocol.tree import DraftTree
from tests.support.tiny import DEMO

TREE = TreeConfig(8, 3, 4)
LENGTHS = (9, 1, 4, 6, 2)


def contexts(width: int) -> list[DraftContext]:
    """First commits of sessions; the second wants no tree."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = tuple(range(50 * number + 10, 50 * number + 10 + length))
        features = torch.randn(length - 1, width, generator=generator) if width else None
        budget = TreeBudget(1, 0) if number == 1 else TreeBudget(TREE.num_draft_tokens, TREE.num_steps)
        made.append(Commit(f"{number}", 0, 0, tokens, features, NoiseKey(0), budget))
    return made


def proposed(method: str, head: str) -> Sequence[Draft]:
    drafter = DraftHead(str(DEMO / head), method).build_drafter(
        str(DEMO / "target"), "float32", "cpu", TREE, DraftingConfig()
    )
    return drafter.propose(contexts(drafter.needs.feature_size))


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("eagle3", "eagle3"),
        ("eagle2", "eagle1"),
        ("dspark", "dspark"),
        ("medusa", "medusa"),
        ("hydra", "hydra"),
        ("sps", "small"),
    ],
)
def test_trees_are_the_same_in_small_passes(method: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proposed(method, head)
    monkeypatch.setattr(neural, "MAX_NEW_TOKENS", 6)
    parts = proposed(method, head)
    for one, other in zip(whole, parts, strict=True):
        assert isinstance(one, DraftTree)
        assert isinstance(other, DraftTree)
        assert (one.tokens, one.parents) == (other.tokens, other.parents)


def test_passes_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural, "MAX_NEW_TOKENS", 6)
    parts = neural.split_contexts(contexts(0))
    assert [[len(context.tokens) for context in part] for part in parts] == [[9], [1, 4], [6], [2]]
