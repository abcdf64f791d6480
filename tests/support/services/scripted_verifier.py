"""A verifier that emits a fixed list of tokens by absolute position, and waits, stalls or fails as its script says.

It stands for a process outside the router. It continues where the prompt ends, whatever the prompt's length.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Chunk, Request, SamplingParams, TokenLogprob, VerifyStep
from eyas.config import RegistryConfig, RetryConfig, RouterConfig, ServerConfig
from eyas.errors import UnknownDrafter
from eyas.rpc.channel import Peers, open_channel
from eyas.rpc.convert import generate_call_from_proto, generate_call_to_proto, text_chunk_from_proto
from eyas.rpc.messages import ERROR_KEY, PARAM_KEY, RETRY_KEY, GenerateCall, Load, ModelInfo, Role
from eyas.rpc.server import RpcServer
from eyas.services.discovery.redis_registry import Registry
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration, worker_server
from eyas.services.router.auth.keys import ApiKeys
from eyas.services.router.dispatch.dispatcher import Dispatcher, SessionMap
from eyas.services.router.dispatch.generation import MAX_READY, GenerationService
from eyas.services.router.dispatch.readiness import ReadinessMonitor
from eyas.services.router.dispatch.upstream import UpstreamCall
from eyas.services.router.dispatch.workers import WorkerPool
from eyas.services.router.grpc_server import RouterServicer
from eyas.services.router.models import RouterModel
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.verifier.chunk_feeds import ChunkFeeds
from eyas.text.tokenizer import Tokenizer, load_tokenizer
from eyas.v1.generation_pb2_grpc import (
    GenerationServicer,
    GenerationStub,
    add_ChunkFeedServicer_to_server,
    add_GenerationServicer_to_server,
)

DEMO = "models/demo/target"
MODEL = ModelInfo("demo", "target", 4096, 2048, "head")
CHUNK_TOKENS = 3
LEASE_S = 60.0  # no lease runs out while a busy machine does not beat
# A request whose verifiers all fail ends soon; one without a verifier waits, as on a machine that does not keep up.
RETRY = RetryConfig(max_attempts=4, budget_s=20.0, initial_backoff_s=0.01, max_backoff_s=0.05)

TEXT = "def add(left, right):\n    return left + right\n\n\nclass Eagle:\n    def fly(self):\n        pass\n"
TOKENS = load_tokenizer(DEMO).encode(TEXT)
PROMPT = TOKENS[:4]
REST = TOKENS[4:]
PROMPT_TEXT = load_tokenizer(DEMO).decode(PROMPT)
CALL = GenerateCall(Request("r", PROMPT, SamplingParams(len(REST), temperature=0.0)))


@dataclass
class Received:
    """Tokens of a call. is_slow: their reader leaves what the feed has."""

    is_slow: bool = False
    tokens: list[int] = field(default_factory=list)

    def call(self, deadline_s: float = 60.0, vocab_size: int = 10, request: Request = CALL.request) -> UpstreamCall:
        """Return a call whose chunks come here. deadline_s: from now on."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        return UpstreamCall(request, deadline, vocab_size, self.add, self.wait_for_room)

    def add(self, chunk: Chunk) -> bool:
        self.tokens += chunk.token_ids
        return self.is_slow and len(self.tokens) >= MAX_READY

    async def wait_for_room(self) -> None:
        await asyncio.sleep(0.001 * self.is_slow)


def request_with(**changes: object) -> GenerateCall:
    """Return CALL with other fields of its request."""
    return replace(CALL, request=replace(CALL.request, **changes))  # type: ignore[arg-type]


def call_with(**changes: object) -> GenerateCall:
    """Return CALL with other sampling parameters."""
    return request_with(sampling=replace(CALL.request.sampling, **changes))  # type: ignore[arg-type]


@dataclass
class Script:
    """What a verifier does. stalls_after: chunks before it sends no more.

    fails_after: chunks before it aborts; from then on it aborts every call at once, until fails_after is None again.
    breaks_after: chunks before a step of its engine fails, which ends the call with an error chunk.
    knows_drafters: whether it accepts the drafter that a call names.
    gate: awaited before the first chunk, like a place in the queue. pushback: the retry delay it sends, in ms.
    param: the parameter that it says is wrong.
    Every token has log-probability -0.5, and the token after it in the vocabulary has -2.
    """

    tokens: Sequence[int]
    fails_after: int | None = None
    stalls_after: int | None = None
    breaks_after: int | None = None
    gate: asyncio.Event | None = None
    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    pushback: int | None = None
    param: str = ""
    calls: list[GenerateCall] = field(default_factory=list)
    num_cancelled: int = 0
    knows_drafters: bool = True
    has_failed: bool = False

    def fails_at(self, number: int) -> bool:
        """Whether it aborts in place of this chunk of a call."""
        self.has_failed = self.fails_after is not None and (self.has_failed or number == self.fails_after)
        return self.has_failed


class ScriptedVerifier(GenerationServicer):
    """Generation by a script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.feeds = ChunkFeeds()

    async def Generate(self, message: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        call = generate_call_from_proto(message)
        self._script.calls.append(call)
        if call.drafter and not self._script.knows_drafters:
            raise UnknownDrafter(f"drafter {call.drafter} is not known")
        try:
            if self._script.gate:
                await self._script.gate.wait()
            with self.feeds.call(call, context) as write:
                await self._emit(call, context, write)
        except asyncio.CancelledError:
            self._script.num_cancelled += 1
            raise

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def _emit(self, call: GenerateCall, context: Any, write: Callable[[TextChunk], Awaitable[None]]) -> None:
        first = len(call.request.prompt_ids)
        last = min(first + call.request.sampling.max_tokens, len(self._script.tokens))
        for number, at in enumerate(range(first, last, CHUNK_TOKENS)):
            if self._script.fails_at(number):
                hint = () if self._script.pushback is None else ((RETRY_KEY, str(self._script.pushback)),)
                named = ((PARAM_KEY, self._script.param),) if self._script.param else ()
                await context.abort(self._script.status, "scripted failure", (*hint, *named, (ERROR_KEY, "scripted")))
            if number == self._script.stalls_after:
                await asyncio.sleep(600)
            if number == self._script.breaks_after:
                broken = Chunk("", finish_reason="error", message="scripted step failure")
                await write(TextChunk(broken, totals=Totals(first, 0)))
                return
            chunk = replace(self._chunk(at, min(at + CHUNK_TOKENS, last), last), num_cached=0 if number else first - 1)
            totals = Totals(first, last - first) if chunk.finish_reason else None
            await write(TextChunk(with_logprobs(call, chunk), totals=totals))
            await asyncio.sleep(0.002)

    def _chunk(self, start: int, end: int, last: int) -> Chunk:
        tokens = tuple(self._script.tokens[start:end])
        is_draft_token = (*(True for _ in tokens[1:]), False)
        return Chunk("", tokens, is_draft_token, VerifyStep(8, 2, len(tokens) - 1), "length" if end == last else None)


def with_logprobs(call: GenerateCall, chunk: Chunk) -> Chunk:
    """Return the chunk with the log-probabilities that the call requests."""
    sampling = call.request.sampling
    if sampling.logprobs is not None:
        chunk = replace(chunk, logprobs=tuple(map(logprob, chunk.token_ids)))
    if sampling.prompt_logprobs is not None and chunk.num_cached:
        first, *rest = call.request.prompt_ids
        chunk = replace(chunk, prompt_logprobs=(TokenLogprob(first, None), *map(logprob, rest)))
    return chunk


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, (token, token + 1), (-0.5, -2.0))


@asynccontextmanager
async def worker(
    url: str,
    script: Script,
    role: Role = "verifier",
    model: ModelInfo = MODEL,
    free_kv_tokens: int = 10_000,
    peers: Peers | None = None,
    servicer: type[ScriptedVerifier] = ScriptedVerifier,
) -> AsyncIterator[str]:
    """Run a scripted worker with a lease; yields its address. The router only names drafters, and never calls them."""
    peers = peers or Peers()
    server = worker_server(ServerConfig(), peers)
    verifier = servicer(script)
    add_GenerationServicer_to_server(verifier, server.aio)
    add_ChunkFeedServicer_to_server(verifier.feeds, server.aio)
    server.before_stop(verifier.feeds.close)
    registry = Registry(RegistryConfig(url, LEASE_S, 0.05), peers.token)
    registration = WorkerRegistration(server, registry, AnnouncedWorker(role, model, lambda: Load(0, 0, free_kv_tokens)))
    address = await server.start([])
    await registration.register(address)
    try:
        yield address
    finally:
        await registration.deregister()
        await server.stop(0)


@asynccontextmanager
async def router(
    url: str,
    stall_timeout_s: float = 20.0,
    request_timeout_s: float = 30.0,
    tokenizer: Tokenizer | None = None,
    peers: Peers | None = None,
    retry: RetryConfig = RETRY,
    keys: ApiKeys | None = None,
) -> AsyncIterator[str]:
    """Run a real router for the model "demo"; yields its address."""
    peers = peers or Peers()
    server, registry = RpcServer(ServerConfig()), Registry(RegistryConfig(url, LEASE_S, 0.05), peers.token)
    workers = WorkerPool(registry, RouterConfig(()), peers)
    models = [RouterModel("demo", tokenizer or load_tokenizer(DEMO))]
    telemetry = RouterTelemetry()
    dispatcher = Dispatcher(workers, SessionMap(registry), stall_timeout_s, telemetry, retry)
    service = GenerationService(models, workers, dispatcher, request_timeout_s, telemetry)
    add_GenerationServicer_to_server(RouterServicer(service, keys or ApiKeys()), server.aio)
    readiness = ReadinessMonitor(server.set_serving, registry, workers, 0.02)
    address = await server.start(["eyas.v1.Generation"])
    await readiness.register(address)
    try:
        yield address
    finally:
        await readiness.deregister()
        await server.stop(0)
        await workers.close()
        await registry.close()


async def send(address: str, call: GenerateCall, timeout: float = 30.0) -> list[TextChunk]:
    """Return all chunks of a call."""
    async with open_channel(address) as channel:
        responses = GenerationStub(channel).Generate(generate_call_to_proto(call), timeout=timeout)
        return [text_chunk_from_proto(message) async for message in responses]


def tokens_of(chunks: list[TextChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.chunk.token_ids)


async def failure(address: str, call: GenerateCall, timeout: float = 30.0) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await send(address, call, timeout)
    return raised.value.code(), raised.value.details() or ""


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for a condition, a minute at most."""
    async with asyncio.timeout(60):
        while not (await holds if isinstance(holds := condition(), Awaitable) else holds):
            await asyncio.sleep(0.005)
