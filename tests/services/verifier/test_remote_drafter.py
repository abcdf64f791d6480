"""A draft service as the verifier sees it, over real sockets."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from eyas.config import DraftClientConfig, DraftQueueConfig
from eyas.protocol.commit import NO_TREE, Refusal, ResyncRequired
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse
from eyas.services.draft.streams import DraftStream
from eyas.services.draft.worker import DraftWorker
from eyas.services.verifier.breaker import CircuitBreaker
from eyas.services.verifier.draft_client import RemoteDrafter
from tests.support.services.toy_drafting import INFO, NEEDS, PATIENT, ToyDrafter, connect, context, eventually, serving

TOKENS = tuple(range(10, 40))


@pytest.fixture
def drafter() -> ToyDrafter:
    return ToyDrafter()


@pytest.fixture
def address(drafter: ToyDrafter) -> Iterator[str]:
    with serving(drafter) as address:
        yield address


def test_a_commit_without_a_tree_reaches_the_drafter(address: str, drafter: ToyDrafter) -> None:
    with connect(address) as remote:
        assert remote.request([context("a", TOKENS[:5], budget=NO_TREE)])() == [DraftTree.root_only(14)]
        assert remote.request([context("a", TOKENS[:6], base=5)])() == [DraftTree.chain([15, 16, 17, 18])]
        assert list(drafter.sessions.values()) == [list(TOKENS[:6])]


def test_two_verifiers_may_use_the_same_session_name(address: str) -> None:
    with connect(address) as one, connect(address) as other:
        assert one.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
        assert other.request([context("a", TOKENS[5:8])])() == [DraftTree.chain([17, 18, 19, 20])]
        assert one.request([context("a", TOKENS[:6], base=5)])() == [DraftTree.chain([15, 16, 17, 18])]


def test_closing_a_draft_client_releases_only_its_sessions(address: str, drafter: ToyDrafter) -> None:
    with connect(address) as one:
        one.request([context("a", TOKENS[:5])])()
        with connect(address) as other:
            other.request([context("a", TOKENS[:7])])()
        eventually(lambda: list(drafter.sessions.values()) == [list(TOKENS[:5])])


def test_late_trees_are_dropped_and_an_open_breaker_is_free() -> None:
    gate = threading.Event()
    config = DraftClientConfig(draft_timeout_s=0.05, breaker_max_failures=2, breaker_reset_s=0.3)
    with serving(ToyDrafter(before=gate.wait)) as address, connect(address, config) as remote:
        try:
            for length in (5, 6):
                assert remote.request([context("a", TOKENS[:length])])() == [None]
            assert remote.num_lost == 2
            started = time.monotonic()
            for _ in range(50):
                assert remote.request([context("a", TOKENS[:7]), context("b", TOKENS[:3], budget=NO_TREE)])() == [None, None]
            assert remote.num_lost == 2 or time.monotonic() - started > config.breaker_reset_s
        finally:
            remote.config = PATIENT  # the drafter answers from now on, however slowly
            gate.set()
        eventually(lambda: remote.request([context("a", TOKENS[:8])])() != [None])
        tree = DraftTree.chain([17, 18, 19, 20])
        eventually(lambda: remote.request([context("a", TOKENS[:8], base=5)])() == [tree])


def test_a_killed_drafter_costs_drafts_only_and_is_resynced() -> None:
    with serving(ToyDrafter()) as address:
        remote = RemoteDrafter(address, NEEDS, replace(PATIENT, breaker_reset_s=0.05))
        eventually(lambda: remote.connected)
        remote.request([context("a", TOKENS[:5])])()
    with closing(remote):
        eventually(lambda: not remote.connected)
        assert remote.request([context("a", TOKENS[:7], base=5), context("b", TOKENS[:3], budget=NO_TREE)])() == [None, None]
        with serving(ToyDrafter(), port=int(address.rpartition(":")[2])):
            eventually(lambda: remote.connected)
            assert remote.request([context("a", TOKENS[:9], base=5)])() == [ResyncRequired("a", 0, 0)]
            assert remote.request([context("a", TOKENS[:9])])() == [DraftTree.chain([18, 19, 20, 21])]


def test_a_stream_that_breaks_during_a_step_ends_the_wait() -> None:
    reached, gate = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        gate.wait()

    with serving(ToyDrafter(before=block)) as address, connect(address) as remote:
        round_ = remote.send([context("a", TOKENS[:5])])
        assert reached.wait(60)
        remote.close()
        gate.set()
        assert remote.collect(round_, time.monotonic() + 60) == [None]


def test_breaker_reset_doubles_per_failure_until_a_success() -> None:
    gate = threading.Event()
    config = DraftClientConfig(draft_timeout_s=0.01, breaker_max_failures=1, breaker_reset_s=0.01)
    with serving(ToyDrafter(before=gate.wait)) as address, connect(address, config) as remote:
        try:
            started = time.monotonic()
            eventually(lambda: remote.request([context("a", TOKENS[:5])])() == [None] and remote.num_lost == 6)
            assert time.monotonic() - started >= 0.01 * (1 + 2 + 4 + 8 + 16)
        finally:
            remote.config = PATIENT
            gate.set()
        eventually(lambda: remote.request([context("b", TOKENS[:3])])() != [None])
        assert not remote.breaker.backing_off
        assert remote.can_draft("b")


def test_an_invalid_answer_undoes_no_earlier_failure() -> None:
    breaker = CircuitBreaker(max_failures=3, reset_s=60)
    breaker.succeeded()
    for _ in range(3):  # one message of a request got no answer in time, another one an invalid tree
        breaker.failed()
        breaker.rejected()
    assert breaker.state == "open"


def test_a_drafter_that_needs_missing_features_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    info = replace(INFO, needs_samples=True)
    with serving(ToyDrafter(), info) as address, closing(RemoteDrafter(address, NEEDS, PATIENT)) as remote:
        eventually(lambda: "does not collect" in caplog.text)
        assert remote.request([context("a", TOKENS[:5])])() == [None]


def test_features_are_not_sent_to_a_drafter_without_features(address: str) -> None:
    class Featureless(ToyDrafter):
        def propose(self, contexts):  # type: ignore[no-untyped-def]
            assert all(context.features is None for context in contexts)
            return [DraftTree.root_only(context.tokens[-1]) for context in contexts]

    info: DrafterInfo = replace(INFO, needs_features=False, feature_size=0)
    with serving(Featureless(), info) as plain, connect(plain) as remote:
        assert remote.request([context("a", TOKENS[:5])])() == [DraftTree.root_only(14)]


def test_a_refused_session_decodes_plainly_and_others_go_on() -> None:
    info = replace(INFO, model=replace(INFO.model, max_model_len=8))
    with serving(ToyDrafter(), info, queue=DraftQueueConfig(max_sessions=2)) as address, connect(address) as remote:
        for name, length in (("a", 5), ("b", 9), ("c", 5), ("d", 5)):
            has_tree = remote.request([context(name, TOKENS[:length])])() != [None]
            assert has_tree == remote.can_draft(name) == (name in "ac")
        remote.release(["a", "d"])
        assert remote.can_draft("d")
        assert remote.request([context("d", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
        assert remote.breaker.state == "closed"
        assert not remote.can_draft("b")


def test_a_refusal_that_comes_after_its_session_is_forgotten(address: str) -> None:
    with connect(address) as remote:
        pending = remote.send([context("a", TOKENS[:5])])
        remote.release(["a"])
        remote.receive(DraftResponse(0, refusals=(Refusal("a", 0, "too_many_sessions"),)))
        assert remote.can_draft("a")
        remote.collect(pending)


def test_a_drafter_with_too_much_to_do_opens_the_breaker() -> None:
    config = replace(PATIENT, breaker_max_failures=2, breaker_reset_s=60)
    with serving(ToyDrafter(), queue=DraftQueueConfig(max_pending_tokens=4)) as address, connect(address, config) as remote:
        assert remote.request([context("a", TOKENS[:4])])() == [DraftTree.chain([13, 14, 15, 16])]
        for _ in range(2):
            assert remote.request([context("b", TOKENS[:5])])() == [None]
        assert (remote.breaker.state, remote.num_lost, remote.can_draft("b")) == ("open", 2, False)


def test_a_request_says_how_long_its_trees_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service does with it: `test_trees_that_come_too_late_are_not_drafted`."""
    timeouts, submit = list[float | None](), DraftWorker.submit

    def recorded(worker: DraftWorker, stream: DraftStream, request: DraftRequest) -> None:
        timeouts.extend([request.timeout_s] if request.commits else [])
        submit(worker, stream, request)

    monkeypatch.setattr(DraftWorker, "submit", recorded)
    with serving(ToyDrafter()) as address, connect(address, replace(PATIENT, draft_timeout_s=12.5)) as remote:
        assert remote.request([context("a", TOKENS[:5])])() == [DraftTree.chain([14, 15, 16, 17])]
    assert timeouts == [12.5]
