"""Many draft services as the one Drafter of a verifier: who drafts for which session, though drafters come, hang and go."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from eyas.engine.draft_manager import DraftManager
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree
from eyas.services.verifier.draft_pool import DraftPool
from tests.support.services.toy_drafting import INFO, NEEDS, PATIENT, ToyDrafter, context, eventually, serving

TOKENS = tuple(range(10, 40))


def test_the_pool_sends_each_session_to_its_own_drafter() -> None:
    one, other = ToyDrafter(), ToyDrafter()
    with serving(one) as first, serving(other) as second, closing(DraftPool(PATIENT, NEEDS)) as pool:
        for session, address in (("a", first), ("b", second), ("c", first)):
            pool.assign(session, address)
        contexts = [context(session, TOKENS[:5]) for session in "abcd"]
        eventually(lambda: None not in pool.request(contexts)()[:3])
        assert pool.request([context("d", TOKENS[:5])])() == [None]
        assert [len(one.sessions), len(other.sessions)] == [2, 1]
        pool.release(["a", "b", "d"])
        eventually(lambda: [len(one.sessions), len(other.sessions)] == [1, 0])
        for session in "abc":
            pool.unassign(session)
        assert pool.request([context("a", TOKENS[:6], base=5)])() == [None]


def test_a_drafter_that_is_gone_is_not_dialled_for_ever() -> None:
    with closing(DraftPool(PATIENT, NEEDS)) as pool:
        with serving(ToyDrafter()) as address:
            pass
        pool.assign("a", address)
        assert pool.request([context("a", TOKENS[:5])])() == [None]
        assert len(pool.status) == 1
        pool.release(["a"])
        assert pool.status == ()


def test_an_unused_drafter_that_disappears_is_removed() -> None:
    """Every restart of a pod is another address: none may leave a thread and a metric behind."""
    with closing(DraftPool(PATIENT, NEEDS)) as pool:
        with serving(ToyDrafter()) as address:
            pool.assign("a", address)
            eventually(lambda: pool.can_draft("a"))
            pool.request([context("a", TOKENS[:5])])()
            pool.release(["a"])
            pool.unassign("a")
            pool.rebalance([])
            assert len(pool.status) == 1, "it is only missing from the list"
        eventually(lambda: not pool.status[0].connected)
        pool.rebalance([address])
        assert len(pool.status) == 1, "it may come back"
        pool.rebalance([])
        assert pool.status == ()


def test_sessions_of_a_drafter_that_is_gone_move_to_a_live_one() -> None:
    other = ToyDrafter()
    with closing(DraftPool(PATIENT, NEEDS)) as pool, serving(other) as second:
        with serving(ToyDrafter()) as first:
            pool.assign("a", first)
            eventually(lambda: pool.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])])
            pool.rebalance([second])
            assert pool.request([context("a", TOKENS[:6], base=5)])() == [DraftTree.chain([15, 16, 17, 18])]
        eventually(lambda: pool.request([context("a", TOKENS[:7], base=6)])() == [None])
        pool.rebalance([first])
        pool.rebalance([])
        assert pool.request([context("a", TOKENS[:7], base=6)])() == [None]
        pool.rebalance([second])
        eventually(lambda: pool.request([context("a", TOKENS[:7], base=6)])() == [ResyncRequired("a", 0, 0)])
        assert pool.request([context("a", TOKENS[:7])])() == [DraftTree.chain([16, 17, 18, 19])]
        assert len(other.sessions) == 1


def test_a_session_without_a_drafter_gets_the_first_that_appears() -> None:
    drafter = ToyDrafter()
    with closing(DraftPool(PATIENT, NEEDS)) as pool:
        pool.assign("a", "")
        assert not pool.can_draft("a")
        assert pool.request([context("a", TOKENS[:5])])() == [None]
        pool.rebalance([])
        with serving(drafter) as address:
            pool.rebalance([address])
            eventually(lambda: pool.can_draft("a"))
            assert not pool.can_draft("plain on purpose")
            assert pool.request([context("a", TOKENS[:6])])() == [DraftTree.chain([15, 16, 17, 18])]
            pool.release(["a"])
            eventually(lambda: not drafter.sessions)
        pool.assign("b", "")
        pool.unassign("b")
        pool.rebalance([address])
        assert not pool.can_draft("b")


def test_a_hanging_drafter_costs_few_steps_and_its_sessions_move(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    config = replace(PATIENT, breaker_max_failures=2, breaker_reset_s=60)
    hanging = ToyDrafter(before=gate.wait)
    with closing(DraftPool(config, NEEDS)) as pool, serving(ToyDrafter()) as good, serving(hanging) as hung:
        try:
            pool.assign("a", hung)
            pool.assign("b", good)
            eventually(lambda: pool.can_draft("a") and pool.can_draft("b"))
            pool.timeout_s, num_requests = 0.2, 0
            while pool.can_draft("a"):
                assert pool.request([context("a", TOKENS[:5])])() == [None]
                num_requests += 1
            assert num_requests == config.breaker_max_failures
            late = [record for record in caplog.records if "late or lost" in record.message]
            assert [vars(record)["rate_limited"] for record in late] == [True] * num_requests
            assert f"{hung}: 2 of 2 requests for trees were late or lost" in late[-1].message
            assert "raise draft_client.draft_timeout_s (0.2)" in late[-1].message
            pool.timeout_s = PATIENT.draft_timeout_s
            pool.rebalance([hung])
            assert not pool.can_draft("a"), "there is no other"
            pool.rebalance([hung, good])
            assert pool.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
            pool.assign("c", "")
            pool.rebalance([hung, good])
            assert pool.can_draft("c"), "paired with the good one"
        finally:
            gate.set()


def test_samples_are_needed_only_for_drafters_that_need_them() -> None:
    """Trees whose samples a drafter needs are not pruned; most drafters need none. An engine sees it as drafters connect."""
    needs = replace(NEEDS, samples=True)
    sampling = replace(INFO, needs_samples=True)
    with (
        serving(ToyDrafter()) as first,
        serving(ToyDrafter(), sampling) as second,
        closing(DraftPool(PATIENT, needs)) as pool,
    ):
        manager = DraftManager(pool, runner=None, rule="match")  # type: ignore[arg-type]  # nothing is run
        assert pool.needs == manager.needs == NEEDS
        pool.assign("a", first)
        eventually(lambda: pool.can_draft("a"))
        assert pool.needs == manager.needs == NEEDS
        pool.assign("b", second)
        eventually(lambda: pool.can_draft("b"))
        assert pool.needs == manager.needs == needs
