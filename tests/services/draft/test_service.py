"""The draft service as anyone with a stub sees it."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType

import grpc
import pytest

from eyas.config import DraftConfig, DraftQueueConfig, RegistryConfig, ServerConfig
from eyas.drafters.base import DraftContext
from eyas.errors import RequestFailed
from eyas.protocol.commit import NO_TREE, Commit, ResyncRequired, TensorBytes
from eyas.protocol.tree import DraftTree
from eyas.rpc import convert
from eyas.rpc.channel import open_channel, open_sync_channel
from eyas.rpc.messages import DraftRequest, DraftResponse, Load
from eyas.services.draft import servicer as servicer_module
from eyas.services.draft import worker as worker_module
from eyas.services.draft.__main__ import serve_drafters
from eyas.services.draft.worker import DraftWorker
from eyas.services.local.cluster import free_port
from eyas.v1 import draft_pb2, draft_pb2_grpc
from tests.support.services.toy_drafting import INFO, ToyDrafter, context, eventually, packed, serving

TOKENS = tuple(range(10, 40))


@pytest.fixture
def drafter() -> ToyDrafter:
    return ToyDrafter()


@pytest.fixture
def stub(drafter: ToyDrafter) -> Iterator[draft_pb2_grpc.DraftStub]:
    with serving(drafter) as address, open_sync_channel(address) as channel:
        yield draft_pb2_grpc.DraftStub(channel)


def converse(stub: draft_pb2_grpc.DraftStub, *steps: Sequence[Commit[TensorBytes]]) -> list[DraftResponse]:
    """All replies to a stream that sends `steps` and ends."""
    requests = [convert.draft_request_to_proto(DraftRequest(n, tuple(step))) for n, step in enumerate(steps, 1)]
    return [convert.draft_response_from_proto(reply) for reply in stub.Speculate(iter(requests))]


def roots(reply: DraftResponse) -> dict[str, int]:
    return {tree.session: tree.tree.tokens[0] for tree in reply.trees}


def test_every_request_with_a_commit_gets_one_reply_in_order(stub: draft_pb2_grpc.DraftStub) -> None:
    steps = [
        [packed(context("a", TOKENS[:5])), packed(context("b", TOKENS[:3], budget=NO_TREE))],
        [],
        [packed(context("a", TOKENS[:6], base=5, budget=NO_TREE))],
        [packed(context("a", TOKENS[:7], base=6))],
    ]
    replies = converse(stub, *steps)
    assert [(reply.step, roots(reply)) for reply in replies] == [(1, {"a": 14}), (3, {}), (4, {"a": 16})]
    assert replies[0].trees[0].committed_length == 5


def test_describe_says_what_the_drafter_is(stub: draft_pb2_grpc.DraftStub) -> None:
    assert convert.drafter_info_from_proto(stub.Describe(draft_pb2.DescribeRequest())) == INFO


def test_older_epochs_are_dropped_and_newer_ones_start_empty(stub: draft_pb2_grpc.DraftStub) -> None:
    replies = converse(
        stub,
        [packed(context("a", TOKENS[:5], epoch=3))],
        [packed(context("a", TOKENS[:6], base=5, epoch=2))],
        [packed(context("a", TOKENS[:6], base=5, epoch=4))],
        [packed(context("a", TOKENS[:6], epoch=4))],
    )
    assert [roots(reply) for reply in replies] == [{"a": 14}, {}, {}, {"a": 15}]
    assert [reply.resyncs for reply in replies] == [(), (), (ResyncRequired("a", 4, 0),), ()]


GOOD = packed(context("a", TOKENS[:5]))
NARROW = TensorBytes("float32", (4, 2), bytes(32))


@pytest.mark.parametrize(
    "bad",
    [
        GOOD._replace(start_position=-1),
        GOOD._replace(tokens=()),
        GOOD._replace(tokens=(1, 2, 3, 4, 100)),
        GOOD._replace(samples=(-1,)),
        GOOD._replace(features=None),
        GOOD._replace(features=NARROW),
        GOOD._replace(features=TensorBytes("float32", (4, 4), b"short")),
        GOOD._replace(features=TensorBytes("object", (4, 4), bytes(64))),
        GOOD._replace(noise=replace(GOOD.noise, temperature=float("nan"))),
        GOOD._replace(noise=replace(GOOD.noise, temperature=3.5e38)),
    ],
)
def test_a_malformed_commit_harms_no_other_session(stub: draft_pb2_grpc.DraftStub, bad: Commit[TensorBytes]) -> None:
    other = packed(context("b", TOKENS[:3]))
    replies = converse(stub, [bad, other], [GOOD])
    assert [roots(reply) for reply in replies] == [{"b": 12}, {"a": 14}]


@pytest.mark.parametrize("bad", [[GOOD, GOOD], [GOOD._replace(session="a" * 1000)]], ids=["twice", "long"])
def test_a_bad_name_of_a_session_ends_its_own_stream_only(
    stub: draft_pb2_grpc.DraftStub, bad: Sequence[Commit[TensorBytes]]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        converse(stub, bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert roots(converse(stub, [GOOD])[0]) == {"a": 14}


def test_a_drafter_that_fails_costs_trees_and_nothing_else() -> None:
    trouble = iter([RuntimeError("out of memory")])

    def fail_once() -> None:
        for error in trouble:
            raise error

    with serving(ToyDrafter(before=fail_once)) as address, open_sync_channel(address) as channel:
        replies = converse(draft_pb2_grpc.DraftStub(channel), [GOOD], [GOOD])
    assert [roots(reply) for reply in replies] == [{}, {"a": 14}]


def test_waiting_requests_merge_into_a_call_once_per_session() -> None:
    drafter = Recorder()
    worker = DraftWorker(drafter, INFO)
    replies: list[DraftResponse | None] = []
    one, other = worker.open(replies.append), worker.open(replies.append)
    worker.submit(one, DraftRequest(1, (GOOD,)))
    worker.submit(other, DraftRequest(1, (GOOD,)))
    worker.submit(one, DraftRequest(2, (packed(context("a", TOKENS[:6], base=5)),)))
    worker.close(one)
    with worker:
        eventually(lambda: None in replies)
    assert drafter.batches == [["0/a", "1/a"], ["0/a"]]
    assert [reply.step for reply in replies if reply] == [1, 1, 2]
    assert worker.load().num_running == 1


async def test_a_drafter_that_breaks_for_good_ends_its_service(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(ToyDrafter):
        def release(self, sessions: Sequence[str]) -> None:
            raise ZeroDivisionError("a drafter that breaks its contract")

    port = free_port()
    registry, server = RegistryConfig("redis://127.0.0.1:1/0"), ServerConfig(port=port, graceful_shutdown_timeout_s=60)
    config = DraftConfig("toy", "", "", "suffix", server=server, registry=registry)
    service = asyncio.create_task(serve_drafters(config, [(Breaking(), INFO)]))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        request = convert.draft_request_to_proto(DraftRequest(1, (GOOD,)))
        stream, other = stub.Speculate(wait_for_ready=True), stub.Speculate(wait_for_ready=True)
        for call in (other, stream):
            await call.write(request)
            assert roots(convert.draft_response_from_proto(await call.read())) == {"a": 14}
        stream.cancel()
        with pytest.raises(RequestFailed, match="the drafter broke"):
            await asyncio.wait_for(service, 30)
    assert "ZeroDivisionError" in caplog.text


LIMITS = DraftQueueConfig(max_sessions=3, max_pending_tokens=100, max_batch_size=4, max_batch_tokens=50)


class Recorder(ToyDrafter):
    """Notes the sessions of each batch, without their streams' numbers if there is one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | ResyncRequired | None]:
        self.batches.append([context.session for context in contexts])
        return super().propose(contexts)


def commits(*names: str, length: int = 5) -> tuple[Commit[TensorBytes], ...]:
    return tuple(packed(context(name, TOKENS[:length])) for name in names)


def refused(reply: DraftResponse | None) -> dict[str, str]:
    return {refusal.session: refusal.reason for refusal in reply.refusals} if reply else {}


def test_batches_take_from_all_streams_in_turn() -> None:
    drafter, replies = Recorder(), list[tuple[str, DraftResponse | None]]()
    worker = DraftWorker(drafter, INFO, queue=replace(LIMITS, max_sessions=100, max_pending_tokens=1000))
    hog = worker.open(lambda reply: replies.append(("hog", reply)))
    other = worker.open(lambda reply: replies.append(("other", reply)))
    worker.submit(hog, DraftRequest(1, commits(*(f"h{i}" for i in range(20)))))
    worker.submit(other, DraftRequest(1, commits("a", "b", "c")))
    with worker:
        eventually(lambda: len(replies) == 2)
    assert drafter.batches[:2] == [["0/h0", "1/a", "0/h1", "1/b"], ["0/h2", "1/c", "0/h3", "0/h4"]]
    assert max(map(len, drafter.batches)) == 4
    assert [name for name, _ in replies] == ["other", "hog"]
    assert [len(reply.trees) for _, reply in replies if reply] == [3, 20]


@pytest.mark.parametrize("num_streams", [2, 3, 5])
def test_streams_with_long_queues_get_equal_shares(num_streams: int) -> None:
    """At any time; four places in a batch do not divide by three or five."""
    drafter, replies = Recorder(), list[DraftResponse | None]()
    worker = DraftWorker(drafter, INFO, queue=replace(LIMITS, max_sessions=40, max_pending_tokens=1000))
    for _ in range(num_streams):
        worker.submit(worker.open(replies.append), DraftRequest(1, commits(*(f"{i}" for i in range(40)), length=1)))
    with worker:
        eventually(lambda: len(replies) == num_streams)
    served: Counter[str] = Counter()
    for batch in drafter.batches:
        served.update(name.partition("/")[0] for name in batch)
        assert max(served.values()) - min(served[f"{number}"] for number in range(num_streams)) <= 1
    assert set(served.values()) == {40}


def test_a_burst_delays_another_verifier_by_one_batch_at_most() -> None:
    """However many commits the burst has; its commits that wait are not before the other's."""
    drafter, replies = Recorder(), list[DraftResponse | None]()
    worker = DraftWorker(drafter, INFO, queue=replace(LIMITS, max_sessions=200, max_pending_tokens=1000))
    burst, other = worker.open(replies.append), worker.open(replies.append)
    worker.submit(burst, DraftRequest(1, commits(*(f"b{i}" for i in range(200)), length=1)))
    lengths = iter(range(1, 20))

    def ask() -> None:
        """The other verifier commits again as soon as it has its tree."""
        if (length := next(lengths, None)) is not None:
            base = length - 1
            worker.submit(other, DraftRequest(length, (packed(context("a", TOKENS[:length], base=base)),)))

    other.deliver = lambda reply: ask() if reply else None
    ask()
    with worker:
        eventually(lambda: any(replies))
    turns = [number for number, batch in enumerate(drafter.batches) if "1/a" in batch]
    assert turns == list(range(19))


def test_a_batch_is_shared_by_tokens_not_by_commits() -> None:
    drafter, replies = Recorder(), list[DraftResponse | None]()
    worker = DraftWorker(drafter, INFO, queue=LIMITS)
    hog, other = worker.open(replies.append), worker.open(replies.append)
    worker.submit(hog, DraftRequest(1, commits("h", "i", "j", length=30)))
    worker.submit(other, DraftRequest(1, commits("a", "b", "c", length=2)))
    with worker:
        eventually(lambda: len(replies) == 2)
    assert drafter.batches == [["0/h", "1/a", "1/b", "1/c"], ["0/i", "0/j"]]


def test_more_streams_than_a_batch_takes_are_all_served() -> None:
    drafter, replies = Recorder(), list[DraftResponse | None]()
    worker = DraftWorker(drafter, INFO, queue=LIMITS)
    for number in range(6):
        worker.submit(worker.open(replies.append), DraftRequest(1, commits("a", "b")))
        assert worker.load().num_waiting == number + 1
    with worker:
        eventually(lambda: len(replies) == 6)
    assert drafter.batches[:2] == [["0/a", "1/a", "2/a", "3/a"], ["4/a", "5/a", "0/b", "1/b"]]


def test_sessions_beyond_the_limit_are_refused_until_others_end() -> None:
    replies: list[DraftResponse | None] = []
    with DraftWorker(ToyDrafter(), INFO, queue=LIMITS) as worker:
        stream = worker.open(replies.append)
        worker.submit(stream, DraftRequest(1, commits("a", "b", "c", "d")))
        eventually(lambda: len(replies) == 1)
        assert refused(replies[0]) == {"d": "too_many_sessions"}
        assert replies[0] is not None
        assert sorted(roots(replies[0])) == ["a", "b", "c"]
        worker.submit(stream, DraftRequest(2, commits("d"), ended_sessions=("a", "unknown")))
        eventually(lambda: len(replies) == 2)
        assert replies[1] is not None
        assert (roots(replies[1]), refused(replies[1])) == ({"d": 14}, {})


def test_tokens_beyond_the_queue_are_refused_at_once() -> None:
    replies: list[DraftResponse | None] = []
    worker = DraftWorker(ToyDrafter(), INFO, queue=LIMITS)
    stream = worker.open(replies.append)
    worker.submit(stream, DraftRequest(1, commits("a", "b", "c", length=30)))
    worker.submit(stream, DraftRequest(2, commits("a", length=30)))
    assert [refused(reply) for reply in replies] == [{"a": "overloaded"}]
    with worker:
        eventually(lambda: len(replies) == 2)
        worker.submit(stream, DraftRequest(3, commits("a", length=30)))
        eventually(lambda: len(replies) == 3)
    assert [reply.step for reply in replies if reply] == [2, 1, 3]


@pytest.mark.parametrize("field", ["tokens", "samples", "features"])
def test_malformed_commits_fill_the_queue_too(field: str) -> None:
    large = TensorBytes("float32", (1, 1), bytes(4 * INFO.feature_size * 100))
    changes = {"tokens": {"tokens": ()}, "samples": {"samples": (0,) * 100}, "features": {"features": large}}
    replies: list[DraftResponse | None] = []
    worker = DraftWorker(ToyDrafter(), INFO, queue=LIMITS)
    stream = worker.open(replies.append)
    for step in range(LIMITS.max_pending_tokens + 1):
        worker.submit(stream, DraftRequest(step, (commits("a")[0]._replace(**changes[field]),)))
    assert refused(replies[-1]) == {"a": "overloaded"}
    with worker:
        eventually(lambda: stream.num_pending == 0)


def test_a_context_longer_than_the_models_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    info = replace(INFO, model=replace(INFO.model, max_model_len=8))
    replies: list[DraftResponse | None] = []
    with DraftWorker(ToyDrafter(), info) as worker:
        worker.submit(worker.open(replies.append), DraftRequest(1, commits("a", "b", length=9) + commits("c", length=8)))
        eventually(lambda: len(replies) == 1)
    assert refused(replies[0]) == {"a": "context_too_long", "b": "context_too_long"}
    assert "refused 2 commits of stream 0: longer than the model's context of 8 tokens" in caplog.text


def test_trees_that_come_too_late_are_not_drafted() -> None:
    drafter, replies = Recorder(), list[DraftResponse | None]()
    worker = DraftWorker(drafter, INFO)
    stream = worker.open(replies.append)
    note = packed(context("b", TOKENS[:5], budget=NO_TREE))
    worker.submit(stream, DraftRequest(1, (*commits("a"), note), timeout_s=0.001))
    worker.submit(stream, DraftRequest(2, commits("a", length=7), timeout_s=60))
    time.sleep(0.002)
    with worker:
        eventually(lambda: len(replies) == 2)
    assert drafter.batches == [["0/b", "0/a"]]
    assert [roots(reply) for reply in replies if reply] == [{}, {"a": 16}]


def test_a_stream_that_breaks_leaves_no_work(drafter: ToyDrafter) -> None:
    replies: list[DraftResponse | None] = []
    worker = DraftWorker(drafter, INFO)
    stream = worker.open(replies.append)
    worker.submit(stream, DraftRequest(1, commits("a")))
    worker.close(stream, abandon=True)
    with worker:
        eventually(lambda: replies == [None])
    assert not drafter.sessions
    assert worker.load() == Load()


def test_a_request_with_too_many_commits_ends_its_stream() -> None:
    with serving(ToyDrafter(), queue=LIMITS) as address, open_sync_channel(address) as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        with pytest.raises(grpc.RpcError, match=r"a request of 4 commits; send at most 3 \(queue.max_sessions\)") as caught:
            converse(stub, commits("a", "b", "c", "d"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert roots(converse(stub, commits("a"))[0]) == {"a": 14}


def test_the_cost_of_a_request_does_not_grow_with_their_number() -> None:
    def lines(number: int) -> int:
        """Lines of the worker that run for `number` requests."""
        count, replies = 0, list[DraftResponse | None]()

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., object]:
            nonlocal count
            count += frame.f_code.co_filename == worker_module.__file__
            return trace

        worker = DraftWorker(ToyDrafter(), INFO, queue=DraftQueueConfig(max_batch_size=32))
        stream = worker.open(replies.append)
        for step in range(number):
            worker.submit(stream, DraftRequest(step, commits(f"{step}", length=1)))
        threading.settrace(trace)
        try:
            with worker:
                eventually(lambda: len(replies) == number, 60)
        finally:
            threading.settrace(None)  # type: ignore[arg-type]
        return count

    assert lines(512) < 12 * lines(64)


def test_a_verifier_that_reads_no_replies_loses_its_stream(
    stub: draft_pb2_grpc.DraftStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer_module, "MAX_UNREAD", -1)
    with pytest.raises(grpc.RpcError, match="0 replies are not read") as caught:
        converse(stub, [GOOD])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
