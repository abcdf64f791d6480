"""Drafting ahead while the cache is full: sessions that are evicted leave nothing behind."""

import numpy as np
import pytest
import torch

from eyas.cache.prefix_cache import SlotAllocator
from eyas.config import DraftingConfig
from eyas.drafters.ahead import grown_tree
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.ahead.grown_tree import GrownTree
from eyas.drafters.eagle import EagleDrafter
from eyas.models.heads.eagle import load_head
from eyas.protocol.commit import ResyncRequired
from tests.drafters.ahead.test_draft_ahead import AHEAD, SHAPE, going_on, last_of, likeliest, session, work


def test_sessions_that_were_evicted_are_not_drafted_ahead(tiny_target: str, tiny_head: str) -> None:
    config = DraftingConfig(20, ranking_temperature=1)
    drafter = DraftAheadDrafter(EagleDrafter(load_head(tiny_head, tiny_target), SHAPE, config, num_grown_slots=64), AHEAD)
    last_of(drafter, [session("a", 15)])
    assert drafter.draft_ahead()
    last_of(drafter, [other := session("b", 16)])
    work(drafter)
    assert [prepared.session for prepared in drafter.take_prepared()][-1:] == ["b"]
    (found,) = last_of(drafter, [going_on(other, [47])])
    assert found.num_drafted


def test_evicted_sessions_keep_no_slots_of_trees_ahead(tiny_target: str, tiny_head: str) -> None:
    """Nor a share of those of other sessions. The next commit is answered with a ResyncRequired."""
    config = DraftingConfig(48, ranking_temperature=1)
    drafter = DraftAheadDrafter(EagleDrafter(load_head(tiny_head, tiny_target), SHAPE, config, num_grown_slots=256), AHEAD)
    held = drafter.ahead.grown
    (tree,) = last_of(drafter, [first := session("a", 15)])
    work(drafter)
    assert list(held) == ["a"]
    last_of(drafter, [session("b", 40)])
    assert "a" not in held, "b's commit has evicted a"
    assert drafter.ahead.pool.num_free == 256 - len(held["b"].tree.slots)
    work(drafter)
    assert list(held) == ["b"]
    (answer,) = drafter.propose([going_on(first, likeliest(tree))])
    assert answer == ResyncRequired("a", 0, 0)


def test_rows_that_find_no_memory_take_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise these slots were lost: no tree and no pass has them."""
    free = SlotAllocator(8)
    tree = GrownTree(1, torch.zeros(4), np.array([2, 3]), np.array([-0.1, -2.0]), free)

    def refuse(*args: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(grown_tree, "upload", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            tree.take_rows(tree.useful(2, 6, 9)[0])
    assert free.num_free == 8
    assert tree.take_rows(tree.useful(2, 6, 9)[0]) is not None
