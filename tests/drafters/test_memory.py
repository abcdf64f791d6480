"""A drafter's KV cache stays within its settings, and the error for a limit that is too small names a sufficient one."""

import logging
import re

import pytest
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.config import DraftConfig, DraftingConfig, TreeConfig, load
from eyas.drafters.base import DraftContext, LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.sessions import DEFAULT_SLOTS, KVLedger, KVSession
from eyas.errors import ConfigError
from eyas.protocol.commit import Commit, NoiseKey, TreeBudget
from tests.support.tiny_block import tiny_block_head
from tests.support.tiny_medusa_hydra import tiny_heads

TREE = TreeConfig(8, 3, 2)
METHODS = ("eagle2", "eagle3", "dspark", "hydra", "sps")


def drafter_of(method: str, target: str, head: str, config: DraftingConfig) -> LocalDrafter:
    heads = {
        "eagle2": f"{head}/eagle1", "eagle3": head, "hydra": tiny_heads("hydra-prefix", head), "sps": target,
        "dspark": tiny_block_head("dspark", target),
    }  # fmt: skip
    return DraftHead(heads[method], method).build_drafter(target, "float32", "cpu", TREE, config)


def pools_of(drafter: object) -> list[Tensor]:
    """All keys and values of the drafter."""
    kv: KVCache = drafter._kv  # type: ignore[attr-defined]
    return [*kv.keys, *kv.values]


@pytest.mark.parametrize("method", METHODS)
def test_slots_fill_the_memory_that_they_are_given(
    method: str, tiny_target: str, tiny_head: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eyas.drafters")
    drafter = drafter_of(method, tiny_target, tiny_head, DraftingConfig(kv_cache_memory="0.5MiB"))
    num_slots = drafter.sessions.num_free + 1  # type: ignore[attr-defined]
    taken = sum(pool[:num_slots].nbytes for pool in pools_of(drafter))
    assert 2**19 - taken / num_slots < taken <= 2**19
    rows_of_tree = {"dspark": 4, "hydra": 0, "sps": 0}.get(method, TREE.top_k * (TREE.num_steps - 1))
    assert {len(pool) - num_slots for pool in pools_of(drafter)} == {64 * rows_of_tree}
    assert f"draft KV: {drafter.sessions.num_free} tokens, 0.5 MiB on cpu" in caplog.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_that_is_too_small_names_a_sufficient_one(method: str, tiny_target: str, tiny_head: str) -> None:
    with pytest.raises(ConfigError, match=r"drafting\.kv_cache_memory 0KiB cannot hold a token.* give at least") as caught:
        drafter_of(method, tiny_target, tiny_head, DraftingConfig(kv_cache_memory="0KiB"))
    needed = re.search(r"drafting\.kv_cache_memory (\d+KiB)$", str(caught.value))
    assert needed is not None
    drafter_of(method, tiny_target, tiny_head, DraftingConfig(kv_cache_memory=needed[1]))


def test_a_limit_is_a_number_of_slots_or_a_size_and_not_both(tiny_target: str, tiny_head: str) -> None:
    assert DraftingConfig(kv_cache_memory="1.5 GiB").num_bytes == 3 * 2**29
    settings = ["served_model_name=m", "model=t", "draft_model=h", "drafting.kv_cache_memory=2KiB"]
    assert load(DraftConfig, None, settings).drafting.num_bytes == 2048
    for size in ("2GB", "much", "-1MiB", "2"):
        with pytest.raises(ConfigError, match=rf"memory is '{size}'; it must be a size such as 512MiB"):
            DraftingConfig(kv_cache_memory=size)
    with pytest.raises(ConfigError, match=r"max_kv_tokens is 5 and .*memory 1MiB; leave one of them out"):
        DraftingConfig(max_kv_tokens=5, kv_cache_memory="1MiB")
    drafter = drafter_of("eagle3", tiny_target, tiny_head, DraftingConfig())
    assert drafter.sessions.num_free == DEFAULT_SLOTS  # type: ignore[attr-defined]


class Busy(list[str]):
    """Keys that may not be evicted; counts how often one is looked up."""

    num_lookups = 0

    def __contains__(self, key: object) -> bool:
        self.num_lookups += 1
        return super().__contains__(key)


@pytest.mark.parametrize("num_sessions", [10, 1000])
def test_a_claim_costs_the_same_beside_many_sessions(num_sessions: int) -> None:
    ledger: KVLedger[None] = KVLedger(4 * num_sessions, context_length=100)
    noise, budget, busy = NoiseKey(7), TreeBudget(4, 3), Busy()
    for number in range(2 * num_sessions):  # the second half evicts the first
        commit: DraftContext = Commit(f"{number}", 0, 0, (1, 2, 3, 4), None, noise, budget)
        busy[:] = [commit.session]
        session = ledger.follow(commit)
        assert isinstance(session, KVSession)
        assert ledger.claim(session, 4, 0, busy)
    assert len(ledger) == num_sessions
    assert busy.num_lookups <= 2 * num_sessions
    ledger.check()
