"""Measures the processor time that a router takes for each token of each client, while clients read streams.

The verifier computes nothing: at the beat of a step it sends every call a chunk. Routers of several checkouts take turns.
Writes a dated report: `python -m benchmarks.scripts.streaming_work`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import typer
from grpc_health.v1 import health_pb2_grpc

from eyas.api.outputs import TextChunk, Totals
from eyas.api.request import Chunk, Request, SamplingParams, VerifyStep
from eyas.bench.report import Report, Spread, Table, number
from eyas.config import ServerConfig
from eyas.errors import EyasError, RequestFailed, Unavailable
from eyas.progress import Progress, progress
from eyas.rpc.channel import Peers, open_channel, open_sync_channel
from eyas.rpc.convert import generate_call_from_proto, generate_call_to_proto
from eyas.rpc.messages import GenerateCall, Load, ModelInfo
from eyas.rpc.server import GENERATION_SERVICE
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration, worker_server
from eyas.services.local.cluster import POLL_INTERVAL_S, STOP_TIMEOUT_S, Child, ServiceSettings, free_port, is_serving
from eyas.services.verifier.chunk_feeds import ChunkFeeds
from eyas.v1 import generation_pb2
from eyas.v1.generation_pb2_grpc import (
    GenerationServicer,
    GenerationStub,
    add_ChunkFeedServicer_to_server,
    add_GenerationServicer_to_server,
)

Api = Literal["chat", "completions", "gRPC"]
APIS: tuple[Api, ...] = get_args(Api)
MODEL = ModelInfo("demo", "target", 4096, 131_072)
TOKENIZER = "models/demo/target"
START_TIMEOUT_S = 60.0
PROMPT = "def add(left, right):\n"


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        chunk_tokens: tokens of a chunk; 1 is plain decoding.
        step_ms: time between two chunks of a stream; 0 sends them as fast as they are taken.
    """

    checkouts: tuple[str, ...]
    apis: tuple[Api, ...]
    clients: tuple[int, ...]
    num_tokens: int
    chunk_tokens: int
    step_ms: float
    repeats: int


@dataclass(frozen=True)
class StreamingWork:
    """Processor time of one router for one number of clients.

    Attributes:
        us: microseconds of the router's process for a token of a client.
        chunks: messages or events for a token of a client.
        verifier_us: as `us`, of the process that plays the verifier.
        tokens_per_s: of all clients, while all processes share the machine.
    """

    checkout: str
    api: Api
    num_clients: int
    us: Spread
    chunks: float
    verifier_us: float
    tokens_per_s: float


@dataclass(frozen=True)
class PacedVerifier(GenerationServicer):
    """Verifier whose calls all get their next chunk at once, at each multiple of `step_s`."""

    chunk_tokens: int
    step_s: float
    feeds: ChunkFeeds = field(default_factory=ChunkFeeds)
    steps: dict[float, asyncio.Event] = field(default_factory=dict)

    async def _step(self, due: float) -> None:
        """Wait for the end of a step. All its calls go on in one turn of the event loop, as those of an engine do."""
        if due not in self.steps:
            self.steps[due] = asyncio.Event()
            delay_s = max(due * self.step_s - time.monotonic(), 0.0)
            asyncio.get_running_loop().call_later(delay_s, lambda: self.steps.pop(due).set())
        await self.steps[due].wait()

    async def Generate(self, message: generation_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        call = generate_call_from_proto(message)
        num_prompt, num_output = len(call.request.prompt_ids), call.request.sampling.max_tokens
        tokens = np.random.default_rng(num_prompt).integers(300, MODEL.vocab_size - 96, num_output).tolist()
        due = self.step_s and time.monotonic() // self.step_s
        with self.feeds.call(call, context) as write:
            for start in range(0, num_output, self.chunk_tokens):
                due += 1
                await self._step(due)
                ids = tuple(tokens[start : start + self.chunk_tokens])
                is_last = start + len(ids) == num_output
                marks = (*(True for _ in ids[1:]), False)
                step = VerifyStep(8, 3, len(ids) - 1) if len(ids) > 1 else None
                chunk = Chunk("", ids, marks, step, "length" if is_last else None)
                await write(TextChunk(chunk, totals=Totals(num_prompt, num_output) if is_last else None))


@dataclass(frozen=True)
class Router:
    """The router of a checkout, as a process."""

    checkout: str
    process: Child
    http: str

    @property
    def pid(self) -> int:
        return self.process.process.pid


class Run(NamedTuple):
    """One run's part of StreamingWork."""

    us: float
    chunks: float
    verifier_us: float
    tokens_per_s: float


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, its ended threads' too, from the clock that Linux has for every process."""
    return time.clock_gettime((~pid << 3) | 2)


def main(
    checkout: Annotated[list[Path], typer.Option(help="Folder of a checkout; may be repeated.")] = [Path()],  # noqa: B006
    api: Annotated[list[str] | None, typer.Option(help="chat, completions or gRPC; may be repeated; default all.")] = None,
    clients: Annotated[list[int], typer.Option(help="Clients at once; may be repeated.")] = [1, 4, 8, 32],  # noqa: B006
    num_tokens: Annotated[int, typer.Option(help="Tokens that a client reads in a run.")] = 100,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 1,
    step_ms: Annotated[float, typer.Option(help="Time between two chunks of a stream; 0 sends without a pause.")] = 25.0,
    repeats: Annotated[int, typer.Option(help="Runs of each case.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure routers while clients read streams."""
    names = tuple(str(folder.resolve()) for folder in checkout)
    settings = Settings(names, tuple(api or APIS), tuple(clients), num_tokens, chunk_tokens, step_ms, repeats)  # type: ignore[arg-type]
    with progress() as shown:
        found = asyncio.run(measure(settings, shown))
    program = "python -m benchmarks.scripts.streaming_work"
    Report.here("streaming-work", program, "cpu", settings, found, [table(found)]).publish(out)


async def measure(settings: Settings, shown: Progress) -> list[StreamingWork]:
    """Measure all cases; the routers take turns in each."""
    found = list[StreamingWork]()
    with ExitStack() as stack:
        servicer = PacedVerifier(settings.chunk_tokens, settings.step_ms / 1e3)
        verifier, connection = stack.enter_context(child_process(serve_verifier, servicer))
        address = connection.recv()
        routers = [stack.enter_context(running_router(name, address)) for name in settings.checkouts]
        for api, num_clients in shown.track(list(product(settings.apis, settings.clients)), "cases"):
            runs: dict[str, list[Run]] = {router.checkout: [] for router in routers}
            for repeat in range(1 + settings.repeats):
                for router in routers if repeat % 2 else routers[::-1]:
                    run = await measure_run(router, verifier, api, num_clients, settings.num_tokens)
                    runs[router.checkout] += [run] if repeat else []  # the first warms up
            found += [summary(name, api, num_clients, own) for name, own in runs.items()]
    return found


def summary(checkout: str, api: Api, num_clients: int, runs: Sequence[Run]) -> StreamingWork:
    """Return the result of the runs of a case."""
    chunks, verifier_us, rate = (
        fmean(getattr(run, name) for run in runs) for name in ("chunks", "verifier_us", "tokens_per_s")
    )
    return StreamingWork(checkout, api, num_clients, Spread.of([run.us for run in runs]), chunks, verifier_us, rate)


async def measure_run(router: Router, verifier: int, api: Api, num_clients: int, num_tokens: int) -> Run:
    """Let clients read a stream each, all at once. verifier: its process."""
    num_all = num_clients * num_tokens
    pids = router.pid, verifier
    before = [cpu_seconds(pid) for pid in pids]
    started = time.perf_counter()
    if api == "gRPC":
        async with open_channel(router.process.address) as channel:
            stub = GenerationStub(channel)
            counts = await asyncio.gather(*(read_messages(stub, num_tokens) for _ in range(num_clients)))
    else:
        counts = await asyncio.gather(*(count_events(router, api, num_tokens) for _ in range(num_clients)))
    seconds = time.perf_counter() - started
    own, others = (1e6 * (cpu_seconds(pid) - was) / num_all for pid, was in zip(pids, before, strict=True))
    return Run(own, sum(counts) / num_all, others, num_all / seconds)


async def read_messages(stub: GenerationStub, num_tokens: int) -> int:
    """Read the stream of a call, and return the number of its messages."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    call = stub.Generate(generate_call_to_proto(GenerateCall(Request("", (), sampling), prompt_text=PROMPT)))
    lengths = [len(message.token_ids) async for message in call]  # type: ignore[attr-defined]
    check(sum(lengths) == num_tokens, f"a stream of {sum(lengths)} tokens, not {num_tokens}")
    return len(lengths)


async def count_events(router: Router, api: Api, num_tokens: int) -> int:
    """Read a stream of an HTTP route, and return the number of its events with tokens."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if api == "chat" else {"prompt": PROMPT}
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    events = await read_events(router.http, path, {**prompt, "model": "demo", "max_tokens": num_tokens, "temperature": 0.0})
    check(events[-1]["usage"]["completion_tokens"] == num_tokens, f"another number of tokens: {events[-1]}")
    return len(events) - 1


async def read_events(address: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask for a stream, and return its events once it has ended; the last has the usage. Raises RequestFailed.

    A client of few lines, because it shares the machine with what it measures.
    """
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        + data
    )
    answer = await reader.read()
    writer.close()
    check(b"data: [DONE]" in answer, f"a stream without an end: {answer[-500:]!r}")
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]


def check(holds: bool, otherwise: str) -> None:
    """Raises RequestFailed for an answer that is not as expected."""
    if not holds:
        raise RequestFailed(f"a router answered with {otherwise}")


@contextmanager
def child_process(run: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """Call `run(connection, *arguments)` in a process that ends with the context; yields its id and the connection."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, *arguments), daemon=True)
    process.start()
    there.close()  # so that the pipe ends with the process
    try:
        yield process.pid or 0, here
    finally:
        process.terminate()
        process.join()


def serve_verifier(connection: Connection, servicer: PacedVerifier) -> None:
    """Run a verifier that computes nothing."""
    asyncio.run(_serve(connection, servicer))


async def _serve(connection: Connection, servicer: PacedVerifier) -> None:
    """Serve as a verifier of MODEL that is not in a registry; send its address."""
    peers = Peers()
    server = worker_server(ServerConfig(), peers)
    add_GenerationServicer_to_server(servicer, server.aio)
    add_ChunkFeedServicer_to_server(servicer.feeds, server.aio)
    registration = WorkerRegistration(server, None, AnnouncedWorker("verifier", MODEL, lambda: Load(0, 0, 100_000, 4096)))
    address = await server.start([GENERATION_SERVICE])
    await registration.register(address)
    connection.send(address)
    await asyncio.Event().wait()


@contextmanager
def running_router(checkout: str, verifier: str) -> Iterator[Router]:
    """Run the router of a checkout with the configuration that users have. Raises Unavailable if it does not start."""
    http = f"127.0.0.1:{free_port()}"
    address = f"127.0.0.1:{free_port()}"
    model = json.dumps([{"name": "demo", "tokenizer": str(Path(TOKENIZER).resolve())}])
    service = ServiceSettings("router").add(
        f"models={model}", f"server.port={address.rpartition(':')[2]}", f"http.port={http.rpartition(':')[2]}",
        "registry.url=''", "discovery.kind=static", f"discovery.verifiers=['{verifier}']",
        "ready_without_verifiers=false",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="eyas-streaming-") as folder:
        own = {"PYTHONPATH": checkout}
        process = Child("router", address, service.command(), Path(folder) / "log", Path(folder), environment=own)
        try:
            wait_until_serving(process)
            yield Router(checkout, process, http)
        finally:
            process.process.terminate()
            process.wait_or_kill(time.monotonic() + STOP_TIMEOUT_S)


def wait_until_serving(router: Child) -> None:
    """Return once a router reaches its verifier. Raises Unavailable if it ends, or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with open_sync_channel(router.address) as channel:
        while not is_serving(health_pb2_grpc.HealthStub(channel), GENERATION_SERVICE):
            router.check()
            if time.monotonic() > deadline:
                raise Unavailable(f"the router is not ready; its log ends with {router.last_log_lines(3)}")
            time.sleep(POLL_INTERVAL_S)


def table(found: Sequence[StreamingWork]) -> Table:
    """Return the table of the report."""
    columns = ("route", "clients", "checkout", "router, us", "events", "verifier, us", "tokens a second")
    rows = tuple(
        (
            work.api,
            f"{work.num_clients}",
            Path(work.checkout).name,
            f"{work.us}",
            number(work.chunks),
            number(work.verifier_us),
            number(work.tokens_per_s),
        )
        for work in found
    )
    note = (
        "Processor time of the router's process, all threads, for a token of a client, its request included: median and "
        "range. Events: messages or events with tokens, for a token. The verifier computes nothing; all its calls get their "
        "next chunk at once. Tokens a second of all clients, while clients, router and verifier share the machine."
    )
    return Table("Router", columns, rows, note)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (EyasError, EOFError) as error:
        sys.exit(f"error: {error}")
