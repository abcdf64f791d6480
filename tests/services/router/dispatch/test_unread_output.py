"""Output that a client has not read: how much the router holds, and how it counts."""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from eyas.api.outputs import TextChunk
from eyas.api.request import Chunk, TokenLogprob
from eyas.rpc.messages import GenerateCall
from eyas.services.router.auth.keys import Access, ApiKey, hash_of
from eyas.services.router.auth.quota import KeyLimits, Quota
from eyas.services.router.dispatch.generation import (
    MAX_READY_BYTES,
    GenerationService,
    ReadyQueue,
    ready_chunks,
)
from eyas.services.router.dispatch.upstream import Take
from eyas.services.router.models import RouterModel
from eyas.services.router.telemetry import RouterTelemetry
from tests.support.services.http_router import TOKENIZER
from tests.support.services.scripted_verifier import CALL, PROMPT, REST
from tests.support.services.spans import Spans

NUM_TURNS = 50  # of the event loop, in which all runs that can
LARGE = TextChunk(Chunk("r", (1,), (False,), logprobs=(TokenLogprob(1, -1.0, (1,) * 20, (-1.0,) * 20),) * 100))


class Upstream:
    """A verifier's side that has a token in each turn of the event loop."""

    async def run(self, call: GenerateCall, context: object, take: Take) -> None:
        for number, token in enumerate(REST, 1):
            await asyncio.sleep(0)
            is_last = number == len(REST)
            take(Chunk(call.request.id, (token,), (False,), finish_reason="length" if is_last else None))


async def turn() -> None:
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


def service(spans: Spans) -> GenerationService:
    upstream: Any = Upstream()
    workers: Any = None  # only for the choice of a model
    return GenerationService([RouterModel("demo", TOKENIZER)], workers, upstream, 60.0, RouterTelemetry(spans.telemetry))


@pytest.mark.parametrize(("chunk", "most"), [(TextChunk(Chunk("r", (1,), (False,))), 64), (LARGE, 2)])
async def test_a_stream_holds_few_steps_for_a_slow_client(chunk: TextChunk, most: int) -> None:
    num_put = 0

    async def work(queue: ReadyQueue) -> None:
        nonlocal num_put
        for _ in range(130):
            await queue.wait_for_room()
            queue.add(chunk)
            num_put += 1

    chunks = ready_chunks(work, set())
    num_read = len(await anext(chunks))
    assert num_read == most
    assert most == 64 or (most - 1) * chunk.chunk.num_bytes < MAX_READY_BYTES <= most * chunk.chunk.num_bytes
    await turn()
    assert num_put == 2 * most
    async for ready in chunks:
        num_read += len(ready)
    assert num_read == 130


@pytest.mark.parametrize("reads_all", [False, True])
async def test_a_client_that_leaves_unread_output_counts(reads_all: bool) -> None:
    """It counts as one that has left, and pays for what was generated."""
    spans, quota = Spans(), Quota(KeyLimits(tokens_per_minute=1000), lambda: 0.0)
    access = Access(ApiKey("a", hash_of("k")), quota)
    call = GenerateCall(CALL.request, model="demo")
    chunks = access.meter(partial(service(spans).stream, [call]), [call], nullcontext())
    first = await anext(chunks)
    await turn()
    assert len(first) < len(REST) <= 64
    if reads_all:
        assert len(first) + sum([len(ready) async for ready in chunks]) == len(REST)
    await chunks.aclose()
    status = "OK" if reads_all else "CANCELLED"
    assert spans.value("eyas_router_requests_total", model="demo", status=status) == 1
    assert quota.tokens.available == 1000 - len(PROMPT) - len(REST)
