"""A verifier that answers with malformed chunks ends no router, and no request with an error of the router's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import (
    DiscoveryConfig,
    OutlierDetectionConfig,
    RegistryConfig,
    RetryConfig,
    RouterConfig,
    ServedModel,
    ServerConfig,
)
from eyas.rpc.admission import Admission
from eyas.rpc.channel import open_channel
from eyas.rpc.convert import generate_call_to_proto
from eyas.rpc.messages import Load
from eyas.rpc.server import GENERATION_SERVICE, RpcServer
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.router.__main__ import build_router
from eyas.services.router.auth.keys import ApiKeys
from eyas.v1.generation_pb2 import Finish, GenerateChunk, GenerateRequest, TokenLogprob, VerifyStep
from eyas.v1.generation_pb2_grpc import GenerationStub, add_GenerationServicer_to_server
from tests.fuzz.messages import malformed
from tests.support.services.scripted_verifier import DEMO, MODEL, call_with

if TYPE_CHECKING:
    from eyas.v1.generation_pb2_grpc import GenerationAsyncStub

RETRY = RetryConfig(max_attempts=2, budget_s=0.2, cooldown_s=0.01, initial_backoff_s=0.001, max_backoff_s=0.002)
GOOD = GenerateChunk(
    token_ids=[5, 6, 7], is_draft_token=[True, True, False], verify_step=VerifyStep(drafted=8, depth=2, accepted=2), seed=7,
    num_cached_tokens=3, logprobs=[TokenLogprob(token=5, logprob=-0.5, top_ids=[5, 6], top_logprobs=[-0.5, -2])] * 3,
)  # fmt: skip
LAST = GenerateChunk(
    token_ids=[8], is_draft_token=[False], finish=Finish(reason="length", num_output_tokens=4),
    logprobs=[TokenLogprob(token=8, logprob=-1)],
)  # fmt: skip
REQUEST = generate_call_to_proto(call_with(logprobs=1))
EXAMPLES = [GOOD.SerializeToString(), LAST.SerializeToString()]


@asynccontextmanager
async def router(chunks: Sequence[bytes]) -> AsyncIterator[GenerationAsyncStub]:
    """A router whose only verifier answers every call with the present content of `chunks`."""

    async def generate(request: bytes, context: Any) -> None:
        for chunk in chunks:
            await context.write(chunk)

    verifier, server = RpcServer(ServerConfig()), RpcServer(ServerConfig())
    handler = grpc.unary_stream_rpc_method_handler(generate, bytes)
    verifier.aio.add_registered_method_handlers("eyas.v1.Generation", {"Generate": handler})
    worker = AnnouncedWorker("verifier", MODEL, lambda: Load(0, 0, 10_000))
    registration = WorkerRegistration(verifier, None, worker)
    address = await verifier.start([])
    await registration.register(address)
    config = RouterConfig(
        (ServedModel(MODEL.name, str(DEMO)),),
        discovery=DiscoveryConfig("static", (address,), probe_interval_s=0.02),
        registry=RegistryConfig(url=""),
        retry=RETRY,
        outlier_detection=OutlierDetectionConfig(consecutive_failures=10**9),
    )
    try:
        async with build_router(config, server.set_serving, ApiKeys(), Admission(config.limits)) as app:
            add_GenerationServicer_to_server(app.grpc, server.aio)
            address = await server.start([GENERATION_SERVICE])
            await app.readiness.register(address)
            async with open_channel(address) as channel:
                yield GenerationStub(channel)
            await app.readiness.deregister()
            await server.stop(0)
    finally:
        await registration.deregister()
        await verifier.stop(0)


async def status(stub: GenerationAsyncStub, request: GenerateRequest = REQUEST) -> tuple[grpc.StatusCode, str]:
    """How a valid request ends, and why."""
    call = stub.Generate(request, timeout=30)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (GenerateChunk(token_ids=range(16), is_draft_token=[False] * 16), "no end after the last token"),
        (GenerateChunk(finish=Finish(reason="cancelled")), "an end that this router did not ask for"),
    ],
)
async def test_a_chunk_that_ends_nothing_is_a_failure_of_the_verifier(chunk: GenerateChunk, fault: str) -> None:
    async with router([chunk.SerializeToString()]) as stub:
        code, details = await status(stub, generate_call_to_proto(call_with(max_tokens=16)))
        assert code is grpc.StatusCode.UNAVAILABLE, details
        assert details.endswith(f"an invalid chunk: {fault}")


def test_malformed_chunks_are_a_failure_of_the_verifier(caplog: pytest.LogCaptureFixture) -> None:
    chunks = list(EXAMPLES)
    with asyncio.Runner() as runner:
        serving = router(chunks)
        stub = runner.run(serving.__aenter__())
        try:
            assert runner.run(status(stub)) == (grpc.StatusCode.OK, "")

            @given(st.lists(malformed(EXAMPLES, GenerateChunk.DESCRIPTOR), min_size=1, max_size=3))
            def check(drawn: list[bytes]) -> None:
                chunks[:] = [*drawn, EXAMPLES[1]]
                code, details = runner.run(status(stub))
                assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE), (code, details)

            check()
        finally:
            runner.run(serving.__aexit__(None, None, None))
    assert [record.getMessage() for record in caplog.records if record.exc_info and record.name.startswith("eyas")] == []
