"""The draft service uses the time between two commits, and survives what goes wrong in it."""

from collections.abc import Sequence

import pytest

from eyas.config import DraftAheadConfig, DraftingConfig
from eyas.drafters.ahead.drafter import DraftAheadDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, ModelInfo
from eyas.services.draft.worker import DraftWorker
from tests.drafters.ahead.test_draft_ahead import SHAPE, going_on, outcome, session
from tests.support.services.toy_drafting import INFO, ToyDrafter, context, eventually, packed


def test_trees_grown_between_two_commits_are_answered_and_marked(tiny_target: str, tiny_head: str) -> None:
    eagle = DraftingConfig(
        max_kv_tokens=2048, draft_ahead=DraftAheadConfig(top_k=24, num_candidates=24, num_steps=6, mode="always")
    )
    drafter = DraftHead(tiny_head, "eagle3").build_drafter(tiny_target, "float32", "cpu", SHAPE, eagle)
    assert isinstance(drafter, DraftAheadDrafter)
    info = DrafterInfo(ModelInfo("tiny", "f", 48, 256), "eagle3", True, False, 32, True)
    first, replies, idle, prepared = session("a", 9), list[DraftResponse](), list[int](), list[DraftResponse]()
    work = drafter.draft_ahead
    drafter.draft_ahead = lambda: work() or bool(idle.append(len(replies)))  # type: ignore[method-assign]
    with DraftWorker(drafter, info) as worker:
        stream = worker.open(lambda reply: (replies if reply.step else prepared).append(reply) if reply else None)
        worker.submit(stream, DraftRequest(1, (packed(first),)))
        eventually(lambda: 1 in idle)
        assert not replies[0].trees[0].tree.grown_ahead
        worker.submit(stream, DraftRequest(2, (packed(going_on(first, outcome(replies[0].trees[0].tree))),)))
        eventually(lambda: len(replies) == 2)
    assert replies[1].trees[0].tree.grown_ahead
    assert prepared[0].prepared[0].session == "a"
    assert prepared[0].prepared[0].committed_length == 9


def test_drafting_ahead_that_fails_stops_and_drafting_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ToyDrafter):
        def __init__(self) -> None:
            super().__init__()
            self.released = list[str]()

        def draft_ahead(self) -> bool:
            if self.sessions:
                raise RuntimeError("out of memory")
            return False

        def release(self, sessions: Sequence[str]) -> None:
            self.released += sessions
            super().release(sessions)

    drafter = Failing()
    replies = list[DraftResponse]()
    tokens = tuple(range(10, 20))
    commits = [context("a", tokens[:7], base=5), context("a", tokens[:7]), context("a", tokens[:9], base=7)]
    with DraftWorker(drafter, INFO) as worker:
        stream = worker.open(lambda reply: replies.append(reply) if reply else None)
        worker.submit(stream, DraftRequest(1, (packed(context("a", tokens[:5])),)))
        eventually(lambda: replies and not drafter.sessions)
        for step, commit in enumerate(commits, 2):
            worker.submit(stream, DraftRequest(step, (packed(commit),)))
            eventually(lambda step=step: len(replies) == step)
    assert [(len(reply.trees), len(reply.resyncs)) for reply in replies] == [(1, 0), (0, 1), (1, 0), (1, 0)]
    assert drafter.released == ["0/a"]
    assert [record.getMessage() for record in caplog.records] == [
        "drafting ahead failed, and stops until a restart; 1 sessions start again"
    ]
    assert not worker.broken
