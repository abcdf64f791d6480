"""Follows two journeys through Eyas and lists the functions and files that they cross: how much a reader has to know.

`make count` prints them, and `tests/repo` lets them only fall.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from prometheus_client import REGISTRY

import eyas
from eyas import LLM, SamplingParams
from eyas.config import (
    DiscoveryConfig,
    DraftClientConfig,
    DraftConfig,
    EngineConfig,
    HttpConfig,
    RegistryConfig,
    RouterConfig,
    ServedModel,
    ServerConfig,
    VerifierConfig,
)
from eyas.services.local.cluster import free_port

MODEL = "models/demo/target"
DRAFT_MODEL = "models/demo/eagle3"
PACKAGE = Path(eyas.__file__).parent
PROMPT = [7, 8, 9]
NUM_TOKENS = 4
# Events of a stream that come before the followed ones, and followed ones: a step without a draft is among them.
NUM_WARM_UP, NUM_FOLLOWED = 8, 12
# Seconds between probes and heartbeats.
RARELY_S = 1000.0
INNER = re.compile(r"(\.<locals>|\.<(genexpr|lambda|\w+comp)>)+$")


@dataclass
class Journey:
    """Functions that ran, as (file, qualified name) in the order of their first calls."""

    crossed: dict[tuple[str, str], None] = field(default_factory=dict)

    @property
    def functions(self) -> list[str]:
        """Return the names of the functions, with their files."""
        return [f"{file}: {name}" for file, name in self.crossed]

    @property
    def files(self) -> dict[str, int]:
        """The number of functions in each file, in the order of the first calls."""
        return dict(Counter(file for file, _ in self.crossed))


@contextmanager
def profiled() -> Iterator[Callable[[Journey | None], None]]:
    """Yield a function that takes a journey to record in, or None. Threads started inside are followed as well.

    Lambdas, comprehensions and generator expressions count for the function that they stand in.
    """
    journey: Journey | None = None

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if journey is not None and event == "call" and code.co_filename.startswith(str(PACKAGE)):
            file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            journey.crossed.setdefault((file, INNER.sub("", code.co_qualname)))

    def record(new: Journey | None) -> None:
        nonlocal journey
        journey = new
        sys.setprofile(profile if new else None)

    threading.setprofile(profile)
    try:
        yield record
    finally:
        record(None)
        threading.setprofile(None)


def generate_journey() -> Journey:
    """Follow `LLM.generate` of four tokens with a drafter."""
    llm, journey = LLM(MODEL, DRAFT_MODEL, device="cpu", validate_head="never"), Journey()
    with profiled() as record:
        record(journey)
        llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    return journey


def step_journey() -> Journey:
    """Follow steady steps of one stream through router, verifier and draft service, which all run in this process."""
    return asyncio.run(_follow_steps())


async def _follow_steps() -> Journey:
    journey = Journey()
    with profiled() as record:
        async with _serving() as http_port, _events(http_port) as events:
            count = 0
            async for _ in events:
                count += 1
                if count == NUM_WARM_UP:
                    record(journey)
                if count == NUM_WARM_UP + NUM_FOLLOWED:
                    record(None)
            assert count > NUM_WARM_UP + NUM_FOLLOWED, "the stream ended before the journey"
    return journey


@dataclass
class _Runner:
    """A ServiceRunner that a coroutine stops."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def stop_requested(self) -> Iterator[asyncio.Event]:
        yield self.stop

    def ready(self, address: str) -> None:
        self.is_ready.set()


@asynccontextmanager
async def _serving() -> AsyncIterator[int]:
    """Run the three services as tasks, without timers that would cross a step. Yields the port of the HTTP API."""
    from eyas.services.draft.__main__ import run as run_draft
    from eyas.services.router.__main__ import run as run_router
    from eyas.services.verifier.__main__ import run as run_verifier

    draft_port, verifier_port, grpc_port, http_port = (free_port() for _ in range(4))
    workers = {"verifiers": (f"127.0.0.1:{verifier_port}",), "drafters": (f"127.0.0.1:{draft_port}",)}
    long = {
        "probe_interval_s": RARELY_S,
        "probe_timeout_s": 60.0,
        "stale_after_s": 3 * RARELY_S,
    }  # the first probe must answer
    discovery = DiscoveryConfig("static", **workers, **long)
    shared: dict[str, Any] = {
        "discovery": discovery,
        "registry": RegistryConfig(ttl_s=3 * RARELY_S, heartbeat_interval_s=RARELY_S),
    }
    served = {"served_model_name": "demo", "model": MODEL, "draft_model": DRAFT_MODEL, "device": "cpu", "threads": 1}
    draft = DraftConfig(server=ServerConfig(port=draft_port), **served, **shared)
    verifier = VerifierConfig(
        engine=EngineConfig(max_num_seqs=4, max_kv_tokens=4096, draft_budget="fixed"),
        server=ServerConfig(port=verifier_port),
        draft_client=DraftClientConfig(draft_timeout_s=60.0),  # no draft is late
        validate_head="never",
        **served,
        **shared,
    )
    router = RouterConfig(
        models=(ServedModel(name="demo", tokenizer=MODEL),),
        server=ServerConfig(port=grpc_port),
        http=HttpConfig(port=http_port),
        **shared,
    )
    # a process has one service elsewhere, and its registry exports each metric once
    with patch.object(REGISTRY, "register"), patch.object(REGISTRY, "unregister"):
        async with _running(partial(run_draft, draft)), _running(partial(run_verifier, verifier)):
            task = asyncio.create_task(run_router(router))
            follower = asyncio.current_task()
            end_follower = partial(_cancel, follower)
            task.add_done_callback(end_follower)
            try:
                yield http_port
            finally:
                task.remove_done_callback(end_follower)
                task.cancel()
                await asyncio.wait({task})


def _cancel(follower: asyncio.Task[Any] | None, router: asyncio.Task[None]) -> None:
    """End the task that follows a journey, because the router has ended before."""
    assert follower is not None
    follower.cancel(f"the router has ended: {router}")


@asynccontextmanager
async def _running(run: Callable[[_Runner], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run a service as a task: ready once the context is entered, stopped at its end."""
    runner = _Runner()
    task = asyncio.create_task(run(runner))
    ready = asyncio.create_task(runner.is_ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task
    try:
        yield
    finally:
        runner.stop.set()
        await task


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a port as soon as it is open."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _events(port: int) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the events of a stream, once one before has found the verifier and its drafter."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 160, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    request = f"{head}\r\nConnection: close\r\n\r\n".encode() + content
    num_answered = 0
    while num_answered < 2:
        reader, writer = await _connect(port)
        writer.write(request)
        if b" 200 " in await reader.readline():
            num_answered += 1
        if num_answered < 2:
            await reader.read()
            writer.close()
            await asyncio.sleep(0.2)
    try:
        yield (line async for line in reader if line.startswith(b"data: {"))
    finally:
        writer.close()
