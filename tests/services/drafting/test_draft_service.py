"""The draft service as anyone with a stub sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc
import pytest

from eyas.config import DraftConfig, RegistryConfig, ServerConfig
from eyas.draft_protocol import Commit, ResyncRequired, TensorBytes
from eyas.drafters.base import DraftContext
from eyas.errors import RequestFailed
from eyas.rpc import convert
from eyas.rpc.channel import open_channel, open_sync_channel
from eyas.rpc.messages import DraftRequest, DraftResponse
from eyas.services.draft.__main__ import serve_drafters
from eyas.services.draft.worker import DraftWorker
from eyas.tensors import tensor_to_bytes
from eyas.tree import DraftTree
from eyas.v1 import draft_pb2, draft_pb2_grpc
from tests.services.drafting.toy_drafting import BOOKKEEPING, INFO, ToyDrafter, context, eventually, serving
from tests.services.redis_server import free_port

TOKENS = tuple(range(10, 40))


@pytest.fixture
def drafter() -> ToyDrafter:
    return ToyDrafter()


@pytest.fixture
def stub(drafter: ToyDrafter) -> Iterator[draft_pb2_grpc.DraftStub]:
    with serving(drafter) as address, open_sync_channel(address) as channel:
        yield draft_pb2_grpc.DraftStub(channel)


def packed(context: DraftContext) -> Commit[TensorBytes]:
    features = None if context.features is None else tensor_to_bytes(context.features)
    return Commit(
        context.session,
        context.epoch,
        context.start_position,
        context.tokens,
        features,
        context.noise,
        context.budget,
        context.samples,
    )


def converse(stub: draft_pb2_grpc.DraftStub, *steps: Sequence[Commit[TensorBytes]]) -> list[DraftResponse]:
    """All replies to a stream that sends `steps` and ends."""
    requests = [convert.draft_request_to_proto(DraftRequest(n, tuple(step))) for n, step in enumerate(steps, 1)]
    return [convert.draft_response_from_proto(reply) for reply in stub.Speculate(iter(requests))]


def roots(reply: DraftResponse) -> dict[str, int]:
    return {tree.session: tree.tree.tokens[0] for tree in reply.trees}


def test_every_request_with_a_commit_gets_one_reply_in_order(stub: draft_pb2_grpc.DraftStub) -> None:
    steps = [
        [packed(context("a", TOKENS[:5])), packed(context("b", TOKENS[:3], budget=BOOKKEEPING))],
        [],
        [packed(context("a", TOKENS[:6], base=5, budget=BOOKKEEPING))],
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
        replace(GOOD, start_position=-1),
        replace(GOOD, tokens=()),
        replace(GOOD, tokens=(1, 2, 3, 4, 100)),
        replace(GOOD, samples=(-1,)),
        replace(GOOD, features=None),
        replace(GOOD, features=NARROW),
        replace(GOOD, features=TensorBytes("float32", (4, 4), b"short")),
        replace(GOOD, features=TensorBytes("object", (4, 4), bytes(64))),
        replace(GOOD, noise=replace(GOOD.noise, temperature=float("nan"))),
    ],
)
def test_a_malformed_commit_harms_no_other_session(stub: draft_pb2_grpc.DraftStub, bad: Commit[TensorBytes]) -> None:
    other = packed(context("b", TOKENS[:3]))
    replies = converse(stub, [bad, other], [GOOD])
    assert [roots(reply) for reply in replies] == [{"b": 12}, {"a": 14}]


def test_a_session_named_twice_ends_its_own_stream_only(stub: draft_pb2_grpc.DraftStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        converse(stub, [GOOD, GOOD])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert roots(converse(stub, [GOOD])[0]) == {"a": 14}


def test_a_stream_that_ends_releases_its_sessions(stub: draft_pb2_grpc.DraftStub, drafter: ToyDrafter) -> None:
    converse(stub, [GOOD, packed(context("b", TOKENS[:3]))])
    eventually(lambda: not drafter.sessions)


def test_a_drafter_that_fails_costs_trees_and_nothing_else() -> None:
    trouble = iter([RuntimeError("out of memory")])

    def fail_once() -> None:
        for error in trouble:
            raise error

    with serving(ToyDrafter(before=fail_once)) as address, open_sync_channel(address) as channel:
        replies = converse(draft_pb2_grpc.DraftStub(channel), [GOOD], [GOOD])
    assert [roots(reply) for reply in replies] == [{}, {"a": 14}]


def test_waiting_requests_merge_into_a_call_once_per_session() -> None:
    calls: list[list[str]] = []

    class Recorder(ToyDrafter):
        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | ResyncRequired | None]:
            calls.append([context.session for context in contexts])
            return super().propose(contexts)

    worker = DraftWorker(Recorder(), INFO)
    replies: list[DraftResponse | None] = []
    one, other = worker.open(replies.append), worker.open(replies.append)
    worker.submit(one, DraftRequest(1, (GOOD,)))
    worker.submit(other, DraftRequest(1, (GOOD,)))
    worker.submit(one, DraftRequest(2, (packed(context("a", TOKENS[:6], base=5)),)))
    worker.close(one)
    with worker:
        eventually(lambda: None in replies)
    assert calls == [["0/a", "1/a"], ["0/a"]]
    assert [reply.step for reply in replies if reply] == [1, 1, 2]
    assert worker.load().num_running == 1


def test_a_drafter_that_breaks_for_good_ends_its_service(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(ToyDrafter):
        def release(self, sessions: Sequence[str]) -> None:
            raise ZeroDivisionError("a drafter that breaks its contract")

    async def body() -> None:
        port = free_port()
        registry, server = RegistryConfig("redis://127.0.0.1:1/0"), ServerConfig(port=port, graceful_shutdown_timeout_s=60)
        config = DraftConfig("toy", "", "", server=server, registry=registry)
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

    asyncio.run(body())
    assert "ZeroDivisionError" in caplog.text
