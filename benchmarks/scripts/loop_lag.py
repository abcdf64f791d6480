"""Measures how long a body of one client keeps a router's event loop from other requests.

The router runs in a process of its own, with a task that notes how late it is; a verifier that computes nothing runs in
another one. Writes a dated report: `python -m benchmarks.scripts.loop_lag`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import httpx
import numpy as np
import typer

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Chunk, TokenLogprob, VerifyStep
from eyas.bench.report import Report, Table, number
from eyas.config import DiscoveryConfig, HttpConfig, RegistryConfig, RouterConfig, ServedModel, ServerConfig
from eyas.errors import Unavailable
from eyas.progress import Progress, progress
from eyas.rpc.channel import Peers, open_channel
from eyas.rpc.convert import text_chunk_to_proto
from eyas.rpc.messages import Load, ModelInfo
from eyas.rpc.server import GENERATION_SERVICE
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration, worker_server
from eyas.services.local.cluster import free_port
from eyas.services.router.__main__ import run
from eyas.v1 import generation_pb2, types_pb2
from eyas.v1.generation_pb2_grpc import (
    GenerationServicer,
    GenerationStub,
    add_ChunkFeedServicer_to_server,
    add_GenerationServicer_to_server,
)

MODEL = ModelInfo("demo", "target", 4096, 131_072)
TOKENIZER = "models/demo/target"
NUM_TOKENS, CHUNK_TOKENS = 16, 4
PROBE_INTERVAL_S = 0.002
LIVE_INTERVAL_S = 0.02
SETTLE_S = 0.3
LEAVE_AFTER_S = 0.3
START_SECONDS = 30.0
MAX_LIVE_S = 0.1

PROMPT = [5, 6, 7, 8]
COMMON: dict[str, Any] = {"model": "demo", "max_tokens": NUM_TOKENS, "temperature": 0.0}
BIASES = {str(token): 1.0 for token in range(1000)}
HTTP_BODIES: dict[str, dict[str, Any]] = {
    "1,000 prompts of ids": {"prompt": [PROMPT] * 1000},
    "1,000 prompts of text": {"prompt": ["def add(left, right):\n"] * 1000},
    "1,000 prompts, as a stream": {"prompt": [PROMPT] * 1000, "stream": True},
    "1,000 prompts, 1,000 biases": {"prompt": [PROMPT] * 1000, "logit_bias": BIASES},
    "1,000 prompts, 1,024 bad words": {"prompt": [PROMPT] * 1000, "bad_words": [f"word {i}" for i in range(512)]},
    "1,000 prompts of 250 ids": {"prompt": [[*range(5, 255)]] * 1000},
    "8 prompts, n = 128": {"prompt": [PROMPT] * 8, "n": 128, "temperature": 1.0},
    "1,000 prompts, 20 log-probabilities": {"prompt": [PROMPT] * 1000, "logprobs": 20},
    "a prompt of 30,000 ids with log-probabilities": {"prompt": [1000] * 30_000, "prompt_logprobs": 20},
    "30,000 ids with log-probabilities, as a stream": {"prompt": [1000] * 30_000, "prompt_logprobs": 20, "stream": True},
    "30,000 ids with echo": {"prompt": [1000] * 30_000, "echo": True, "logprobs": 5},
    "300,000 stop strings": {"prompt": PROMPT, "stop": ["s"] * 300_000},
    "600,000 biases": {"prompt": PROMPT, "logit_bias": {str(token): 1 for token in range(600_000)}},
    "15 MB of ids": {"prompt": [1000] * 2_500_000},
    "15 MB of text": {"prompt": "def add(left, right): " * 700_000},
}
TURN = {"role": "user", "content": "def add(left, right): "}
BLOCKS = [{"type": "text", "text": "a"}] * 3000
# Of the other routes, by the case's name, which begins with its path.
OTHER_BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses, 4,000 items": {"input": [TURN] * 4000, "max_output_tokens": NUM_TOKENS},
    "/v1/responses, 15 MB of text": {"input": "def add(left, right): " * 700_000},
    "/v1/messages, 4,000 messages": {"messages": [TURN] * 4000, "max_tokens": NUM_TOKENS},
    "/v1/messages, 3,000 blocks, as a stream": {
        "messages": [{"role": "user", "content": BLOCKS}], "max_tokens": NUM_TOKENS, "stream": True,
    },
    "/v1/messages/count_tokens, 4,000 messages": {"messages": [TURN] * 4000},
    "/tokenize, 400 kB of text": {"prompt": "def add(left, right): " * 18_000, "return_token_strs": True},
    "/tokenize, 15 MB of text": {"prompt": "def add(left, right): " * 700_000},
    "/detokenize, 250,000 ids": {"tokens": [1000] * 250_000},
}  # fmt: skip
LEAVING = "1,000 prompts, the client leaves"
Sampling = types_pb2.SamplingParams


def grpc_messages() -> dict[str, generation_pb2.GenerateRequest]:
    """Return the messages of the gRPC cases, by name."""
    biases = [types_pb2.LogitBias(token_id=token, bias=1.0) for token in range(600_000)]
    prompt = types_pb2.TokenIds(ids=PROMPT)

    def message(**fields: Any) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(model="demo", **({"tokens": prompt} | fields))

    return {
        "gRPC, n = 128": message(sampling=Sampling(max_tokens=NUM_TOKENS, n=128)),
        "gRPC, 300,000 stop strings": message(sampling=Sampling(max_tokens=NUM_TOKENS, stop=["s"] * 300_000)),
        "gRPC, 600,000 biases": message(sampling=Sampling(max_tokens=NUM_TOKENS, logit_bias=biases)),
        "gRPC, 7 million ids": message(tokens=types_pb2.TokenIds(ids=[1000] * 7_000_000)),
    }


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        repeats: of each body, one after the other.
    """

    repeats: int
    probe_interval_s: float = PROBE_INTERVAL_S
    output_tokens: int = NUM_TOKENS


@dataclass(frozen=True)
class Lag:
    """Effect of one body on the router, in ms; the worst of all repeats but for `seconds`, which is their mean.

    Attributes:
        lag: lateness of a timer in the router's event loop.
        cpu: CPU time of the router's process between two timers.
        live: GET /live of another client, which shares the machine's processors with all processes.
        status: how the body ended.
    """

    body: str
    status: str
    seconds: float
    lag: float
    lag_p99: float
    cpu: float
    live: float


@dataclass(frozen=True)
class Tick:
    """One firing of the router's timer: when, by time.monotonic(), how late, and the CPU time since the one before."""

    at: float
    lag_s: float
    cpu_s: float


def main(
    repeats: Annotated[int, typer.Option(help="How often each body is sent.")] = 3,
    only: Annotated[str, typer.Option(help="Part of the names of bodies; empty sends all.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Send large bodies to a router, one at a time, and measure its event loop and GET /live meanwhile."""
    with progress() as shown:
        lags = asyncio.run(measure(repeats, only, shown))
    program = "python -m benchmarks.scripts.loop_lag"
    Report.here("loop-lag", program, "cpu", Settings(repeats), lags, [table(lags)]).publish(out)


async def measure(repeats: int, only: str, progress: Progress) -> list[Lag]:
    """Measure all bodies on one router."""
    lags = []
    with child(serve_verifier, InstantVerifier()) as (address, _), child(_router, address) as (ports, router):
        async with httpx.AsyncClient(base_url=f"http://{ports[0]}", timeout=120) as http, open_channel(ports[1]) as channel:
            cases = {name: case for name, case in _cases(http, channel) if only in name}
            for name, send in progress.track(cases.items(), "bodies"):
                lags.append(await _measure(name, send, repeats, str(http.base_url), router))
    return lags


Send = Callable[[], Awaitable[str]]


def _cases(http: httpx.AsyncClient, channel: grpc.aio.Channel) -> Iterator[tuple[str, Send]]:
    async def post(data: bytes, path: str = "/v1/completions") -> str:
        answer = await http.post(path, content=data, headers={"Content-Type": "application/json"})
        return f"{answer.status_code}"

    async def leave(data: bytes) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(post(data), LEAVE_AFTER_S)
        return "left"

    async def generate(message: generation_pb2.GenerateRequest) -> str:
        try:
            async for _ in GenerationStub(channel).Generate(message, timeout=120):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    for name, changes in HTTP_BODIES.items():
        data = json.dumps(COMMON | changes).encode()
        yield name, lambda data=data: post(data)  # type: ignore[misc]
    for name, body in OTHER_BODIES.items():
        data, path = json.dumps({"model": "demo"} | body).encode(), name.partition(",")[0]
        yield name, lambda data=data, path=path: post(data, path)  # type: ignore[misc]
    data = json.dumps(COMMON | HTTP_BODIES["1,000 prompts of ids"]).encode()
    yield LEAVING, lambda: leave(data)
    for name, message in grpc_messages().items():
        yield name, lambda message=message: generate(message)  # type: ignore[misc]


async def _measure(name: str, send: Send, repeats: int, base: str, router: Connection) -> Lag:
    lives: list[float] = []
    spans, status = [], ""
    watching = asyncio.create_task(_watch_live(base, lives))
    try:
        for _ in range(repeats):
            started = time.monotonic()
            status = await send()
            spans.append((started, time.monotonic()))
            await asyncio.sleep(SETTLE_S)
    finally:
        watching.cancel()
    router.send("ticks")
    ticks: list[Tick] = await asyncio.to_thread(router.recv)
    ticks = [tick for tick in ticks if any(began <= tick.at <= ended + SETTLE_S for began, ended in spans)]
    late = 1e3 * np.array([tick.lag_s for tick in ticks])
    seconds = float(np.mean([ended - began for began, ended in spans]))
    cpu = 1e3 * max(tick.cpu_s for tick in ticks)
    return Lag(name, status, seconds, float(late.max()), float(np.percentile(late, 99)), cpu, 1e3 * max(lives))


async def _watch_live(base: str, lives: list[float]) -> None:
    async with httpx.AsyncClient(base_url=base, timeout=60) as http:
        while True:
            started = time.monotonic()
            await http.get("/live")
            lives.append(time.monotonic() - started)
            await asyncio.sleep(LIVE_INTERVAL_S)


def table(lags: Sequence[Lag]) -> Table:
    """Return the table of the report."""
    rows = [
        (lag.body, lag.status, number(lag.seconds), *map(number, (lag.lag, lag.lag_p99, lag.cpu, lag.live))) for lag in lags
    ]
    note = (
        f"Lag: lateness of a timer of {1e3 * PROBE_INTERVAL_S:g} ms in the router's event loop, worst and p99. CPU: most "
        "CPU time of the router's process between two timers. /live: slowest answer to another client, while this process "
        f"and the verifier's share the processors. All in ms but the body's own duration; /live should stay below "
        f"{1e3 * MAX_LIVE_S:g} ms."
    )
    return Table("Event loop", ("body", "status", "seconds", "lag", "lag p99", "CPU", "/live"), tuple(rows), note)


# Below: the other processes.


@contextmanager
def child(serve: Callable[..., Awaitable[None]], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Run `serve(connection, *arguments)` in another process; yields the first value that it sends, and the connection."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(serve, there, *arguments), daemon=True)
    process.start()
    try:
        if not here.poll(START_SECONDS):
            raise Unavailable(f"a process did not start within {START_SECONDS:.0f} s")
        yield here.recv(), here
    finally:
        process.terminate()
        process.join()


def _run(serve: Callable[..., Any], connection: Connection, *arguments: Any) -> None:
    asyncio.run(serve(connection, *arguments))


async def _router(connection: Connection, verifier: str) -> None:
    """Serve with the configuration that users have, and note the lateness of the event loop."""
    http_port, grpc_port = free_port(), free_port()
    config = RouterConfig(
        (ServedModel("demo", TOKENIZER),),
        server=ServerConfig(port=grpc_port),
        http=HttpConfig(port=http_port),
        registry=RegistryConfig(url=""),
        discovery=DiscoveryConfig("static", (verifier,), probe_interval_s=0.2),
    )
    probe = LoopProbe()
    probe.start()
    asyncio.get_running_loop().add_reader(connection.fileno(), lambda: connection.send(probe.take(connection.recv())))
    serving = asyncio.create_task(run(config))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}") as http:
        async for is_healthy in _health(http):
            if is_healthy:
                break
    connection.send((f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"))
    await serving


async def _health(http: httpx.AsyncClient) -> AsyncIterator[bool]:
    while True:
        try:
            yield (await http.get("/health")).status_code == 200
        except httpx.TransportError:
            yield False
        await asyncio.sleep(0.05)


class LoopProbe:
    """A timer of the running event loop that notes how late it fires."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks: list[Tick] = []
        self._due = self._cpu_s = 0.0

    def start(self) -> None:
        """Set the timer."""
        self._due = self._loop.time() + PROBE_INTERVAL_S
        self._cpu_s = time.process_time()
        self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        now = time.monotonic()
        self._ticks.append(Tick(now, now - self._due, time.process_time() - self._cpu_s))
        self.start()

    def take(self, request: object) -> list[Tick]:
        """Return the ticks since the last call."""
        ticks, self._ticks = self._ticks, []
        return ticks


class InstantVerifier(GenerationServicer):
    """Verifier that continues every prompt with the same token, a few at a time."""

    async def Generate(self, message: generation_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        num_prompt, num_output = len(message.tokens.ids), message.sampling.max_tokens
        for end in range(CHUNK_TOKENS, num_output + 1, CHUNK_TOKENS):
            is_last = end + CHUNK_TOKENS > num_output
            tokens, marks = (9,) * CHUNK_TOKENS, (True,) * (CHUNK_TOKENS - 1) + (False,)
            chunk = Chunk("", tokens, marks, VerifyStep(8, 3, CHUNK_TOKENS - 1), "length" if is_last else None)
            chunk = with_logprobs(message, chunk, is_first=end == CHUNK_TOKENS)
            totals = Totals(num_prompt, num_output) if is_last else None
            await context.write(text_chunk_to_proto(TextChunk(chunk, totals=totals)))
            await asyncio.sleep(0.01)


def with_logprobs(message: generation_pb2.GenerateRequest, chunk: Chunk, is_first: bool) -> Chunk:
    """Return the chunk with the log-probabilities that the message asks for, all alike."""
    sampling = message.sampling

    def logprob(num_top: int) -> TokenLogprob:
        return TokenLogprob(9, -0.5, tuple(range(num_top)), (-1.0,) * num_top)

    if sampling.HasField("logprobs"):
        chunk = replace(chunk, logprobs=(logprob(sampling.logprobs),) * len(chunk.token_ids))
    if is_first and sampling.HasField("prompt_logprobs"):
        others = (logprob(sampling.prompt_logprobs),) * (len(message.tokens.ids) - 1)
        chunk = replace(chunk, prompt_logprobs=(TokenLogprob(message.tokens.ids[0], None), *others))
    return chunk


async def serve_verifier(connection: Connection, servicer: GenerationServicer) -> None:
    """Serve as a verifier of MODEL that is not in a registry; send its address."""
    peers = Peers()
    server = worker_server(ServerConfig(), peers)
    add_GenerationServicer_to_server(servicer, server.aio)
    if feeds := getattr(servicer, "feeds", None):
        add_ChunkFeedServicer_to_server(feeds, server.aio)
    registration = WorkerRegistration(server, None, AnnouncedWorker("verifier", MODEL, lambda: Load(0, 0, 100_000, 4096)))
    address = await server.start([GENERATION_SERVICE])
    await registration.register(address)
    connection.send(address)
    await asyncio.Event().wait()


if __name__ == "__main__":
    typer.run(main)
