"""The engine's thread: what it promises to those who wait in an event loop, on the demo target."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from eyas.api.request import Chunk, Request, SamplingParams
from eyas.cache.kv_cache import KVCache
from eyas.config import ServerConfig, TreeConfig, VerifierConfig
from eyas.device.transfer import download
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending
from eyas.emulation.costs import flat
from eyas.emulation.device import VirtualClock
from eyas.engine.async_engine import AsyncEngine
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine, StepReport
from eyas.errors import Overloaded, RequestFailed, Unavailable, WorkerLost
from eyas.models.inputs import PackedInputs
from eyas.models.loading import load_target
from eyas.models.target import TargetModel, TargetOutput
from eyas.rpc.channel import open_channel
from eyas.rpc.messages import ModelInfo
from eyas.rpc.server import LIVE, RpcServer
from eyas.sampling import verify
from eyas.services.discovery.base import cancel_task
from eyas.services.lifecycle import AnnouncedWorker, WorkerRegistration
from eyas.services.verifier.__main__ import watch_steps
from eyas.services.verifier.servicer import announced_load
from tests.support.runs import moved, tokens_of
from tests.support.services.scripted_verifier import until
from tests.support.tiny import fixed_config

PROMPT = (0, 282, 659, 276)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target("models/demo/target", "float32", "cpu", ())


def engine_of(target: TargetModel, are_broken: Iterable[bool] = (), **limits: int) -> Engine:
    """are_broken: of each step from the first on, whether it breaks."""
    config = fixed_config(max_kv_tokens=1024, max_queued_requests=4, **limits)
    engine = assemble_engine(target, None, config, TreeConfig(num_steps=5), None)
    step, is_broken = engine.step, iter(are_broken)

    def failing(meanwhile: Callable[[], None]) -> list[Chunk]:
        if next(is_broken, False):
            raise ZeroDivisionError("a step that breaks")
        return step(meanwhile)

    engine.step = failing  # type: ignore[method-assign]
    return engine


def request_of(request_id: str, max_tokens: int = 12) -> Request:
    return Request(request_id, PROMPT, SamplingParams(max_tokens, temperature=0.8, seed=7, ignore_eos=True))


async def collect(loop: AsyncEngine, request: Request) -> list[Chunk]:
    return [chunk async for chunk in loop.generate(request)]


@asynccontextmanager
async def running(engine: Engine, **options: Any) -> AsyncIterator[AsyncEngine]:
    """The loop of an engine, which must be whole and empty at the end."""
    async with AsyncEngine(engine, **options) as loop, asyncio.timeout(60):
        free = loop.load.free_kv_tokens
        yield loop
        await until(lambda: loop.load.free_kv_tokens == free)
    engine.check()
    assert not engine.has_work


async def test_output_that_is_not_read_is_bounded(target: TargetModel) -> None:
    """A slow reader gets what was kept, then Overloaded; a request that continues from there gives the rest."""
    engine, unbounded = engine_of(target), partial(running, engine_of(target))
    request = replace(request_of("slow"), sampling=SamplingParams(48, temperature=0.8, seed=7, ignore_eos=True, logprobs=5))

    async with unbounded() as loop:
        whole = tokens_of(await collect(loop, replace(request, id="whole")))
    async with running(engine, max_unread_bytes=2**15) as loop:
        kept: list[Chunk] = []

        async def read_late() -> None:
            async for chunk in loop.generate(request):
                kept.append(chunk)
                if len(kept) == 1:
                    await until(lambda: not engine.has_work)

        with pytest.raises(Overloaded, match="read too slowly"):
            await read_late()
    assert sum(chunk.num_bytes for chunk in kept[1:]) <= 2**14
    tokens = tokens_of(kept)
    assert tokens == whole[: len(tokens)]
    assert 1 < len(tokens) < len(whole)
    async with unbounded() as loop:
        assert tokens + tokens_of(await collect(loop, moved(replace(request, id="rest"), tokens))) == whole


async def test_a_cancelled_request_ends_with_the_next_step(target: TargetModel) -> None:
    engine = engine_of(target)
    step, reached, cancelled = engine.step, threading.Event(), threading.Event()
    steps: list[list[Chunk]] = []

    def watched(meanwhile: Callable[[], None]) -> list[Chunk]:
        if len(steps) == 3:
            reached.set()
            assert cancelled.wait(30)
        steps.append(step(meanwhile))
        return steps[-1]

    engine.step = watched  # type: ignore[method-assign]

    async with running(engine) as loop:
        async with aclosing(loop.generate(request_of("left", 900))) as chunks:
            await anext(chunks)
            await until(reached.is_set)
        cancelled.set()
        await until(lambda: loop.load.num_running == 0)
    reasons = [chunk.finish_reason for chunks in steps for chunk in chunks]
    assert reasons == [None, None, None, None, "cancelled"], "the step that had begun, and no other"


async def test_a_step_that_fails_spares_the_requests_that_wait(target: TargetModel) -> None:
    async with running(engine_of(target, [False, True], max_num_seqs=1)) as loop:
        first, second = await asyncio.gather(collect(loop, request_of("a")), collect(loop, request_of("b")))
    assert first[-1].finish_reason == "error"
    assert second[-1].finish_reason == "length"


async def test_a_step_that_fails_ends_the_requests_that_end_within_it(target: TargetModel) -> None:
    engine = engine_of(target)
    requested = engine.budget.choose

    def failing(names: Sequence[str], *step: Any) -> Any:
        if not engine.scheduler.sequences:
            raise ZeroDivisionError("after the last request has ended")
        return requested(names, *step)

    engine.budget.choose = failing  # type: ignore[method-assign]
    async with running(engine) as loop:
        chunks = await collect(loop, request_of("a"))
    assert chunks[-1].finish_reason == "error"


async def test_a_step_that_fails_fails_its_requests_and_no_later_one(
    target: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with running(engine_of(target, [True])) as loop:
            chunks = await collect(loop, request_of("unlucky"))
            assert (chunks[-1].finish_reason, "see the verifier's log" in chunks[-1].message) == ("error", True)
            assert len(tokens_of(await collect(loop, request_of("lucky")))) == 12
    assert "ZeroDivisionError" in caplog.text


async def test_an_engine_that_cannot_recover_ends_its_owner(target: TargetModel, caplog: pytest.LogCaptureFixture) -> None:
    async def own() -> None:
        async with AsyncEngine(engine_of(target, repeat(True))) as loop:
            chunks = await collect(loop, request_of("unlucky"))
            assert chunks[-1].finish_reason == "error"
            await asyncio.sleep(60)

    with pytest.raises(RequestFailed, match="engine broke"):
        await own()
    assert "the engine is broken" in caplog.text


@pytest.mark.parametrize("has_service", [False, True])
async def test_chunks_are_sent_while_something_else_works(
    has_service: bool, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the launch of a pass and its results, or between the request for drafts and their arrival."""
    flat("test", verify=10.0).write(tmp_path / "costs.json")
    config, events = fixed_config(max_kv_tokens=1024, emulated_device=str(tmp_path / "costs.json")), list[str]()
    drafter = EmptyService(events) if has_service else None
    engine = assemble_engine(target, None, config, TreeConfig(num_steps=5), drafter, clock=VirtualClock())
    forward = engine.runner.backend.forward

    def noted_forward(packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        events.append("pass")
        return forward(packed, kv_cache)

    def noted_download(*tensors: Tensor) -> list[npt.NDArray[np.float64]]:
        found = download(*tensors)
        events.append("results")
        return found

    def sent(report: StepReport, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        events.append("sent")
        return chunks

    engine.runner.backend.forward = noted_forward  # type: ignore[method-assign]
    monkeypatch.setattr(verify, "download", noted_download)

    async with running(engine, on_step=sent) as loop:
        assert len(tokens_of(await collect(loop, request_of("one", 4)))) == 4
    step = ["pass", "results", "asked", "sent", "answered"]
    beside_service = [*step * 2, "pass", "results", "pass", "sent", "results", "sent"]  # the last token is not drafted for
    beside_pass = ["pass", "results", *["pass", "sent", "results"] * 3, "sent"]
    assert events == (beside_service if has_service else beside_pass)


@pytest.mark.parametrize("failing_at", [2, 3])
async def test_no_request_waits_for_chunks_that_telemetry_failed_on(
    failing_at: int, target: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails while the next pass runs: one request has ended in the step before, or neither has."""
    flat("test", verify=10.0).write(tmp_path / "costs.json")
    config = fixed_config(max_kv_tokens=1024, emulated_device=str(tmp_path / "costs.json"))
    engine = assemble_engine(target, None, config, TreeConfig(num_steps=5), None, clock=VirtualClock())
    num_reports = count(1)

    def failing(report: StepReport, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        if next(num_reports) == failing_at:
            raise ZeroDivisionError("telemetry that fails")
        return chunks

    async with running(engine, on_step=failing) as loop:
        requests = request_of("short", 3), request_of("long", 12)
        chunks = [chunk async for chunk in loop.generate(*requests)]
        reasons = {chunk.request_id: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
        assert reasons == {"short": "length" if failing_at == 3 else "error", "long": "error"}
    assert "ZeroDivisionError" in caplog.text


class EmptyService:
    """Implements Drafter: a draft service with nothing to propose. events: what is asked and answered."""

    needs, can_sample = DrafterNeeds(), False

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def can_draft(self, session: str) -> bool:
        return True

    def release(self, sessions: Sequence[str]) -> None:
        pass

    def reject(self, sessions: Sequence[str]) -> None:
        pass

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        self._events.append("asked")

        def collect() -> list[Draft]:
            self._events.append("answered")
            return [None] * len(contexts)

        return collect


def stuck_engine(target: TargetModel) -> tuple[Engine, threading.Event]:
    """An engine whose steps wait for the event."""
    engine, may_go_on = engine_of(target), threading.Event()
    step = engine.step

    def waiting(meanwhile: Callable[[], None]) -> list[Chunk]:
        assert may_go_on.wait(60)
        return step(meanwhile)

    engine.step = waiting  # type: ignore[method-assign]
    return engine, may_go_on


def join_engines() -> None:
    """Wait for the threads that `fail` left in a step."""
    for thread in [thread for thread in threading.enumerate() if thread.name == "engine"]:
        thread.join(60)
        assert not thread.is_alive()


@asynccontextmanager
async def watched(
    loop: AsyncEngine, **limits: float
) -> AsyncIterator[tuple[Callable[[str], Awaitable[bool]], WorkerRegistration]]:
    """A server whose health follows the engine's steps; gives whether a service is SERVING, and the registration."""
    server, model = RpcServer(ServerConfig()), ModelInfo("demo", "f", 10, 10)
    registration = WorkerRegistration(server, None, AnnouncedWorker("verifier", model, lambda: announced_load(loop.load)))
    address = await server.start([])
    await registration.register(address)
    config = VerifierConfig("demo", "models/demo/target", **limits)  # type: ignore[arg-type]
    watchdog = asyncio.create_task(watch_steps(loop, registration, config, loop.fail))
    async with open_channel(address) as channel:

        async def is_serving(service: str) -> bool:
            answer: Any = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        try:
            yield is_serving, registration
        finally:
            await cancel_task(watchdog)
            await server.stop(0)


async def test_a_stuck_step_is_not_serving_until_it_ends(target: TargetModel, caplog: pytest.LogCaptureFixture) -> None:
    engine, may_go_on = stuck_engine(target)

    async with running(engine) as loop:
        async with watched(loop, stuck_step_timeout_s=0.05) as (is_serving, registration):
            assert await is_serving("")
            request = asyncio.create_task(collect(loop, request_of("r")))
            while await is_serving(""):
                await asyncio.sleep(0.01)
            assert await is_serving(LIVE), "a supervisor does not end it yet"
            assert "assert may_go_on.wait(60)" in caplog.text, "the log says where the step is"
            for stuck, kind in ((request, WorkerLost), (collect(loop, request_of("new")), Unavailable)):
                with pytest.raises(Unavailable, match="a step has not ended") as raised:
                    await stuck
                assert type(raised.value) is kind, "the new one cannot be the reason"
            may_go_on.set()
            while not await is_serving(""):
                await asyncio.sleep(0.01)
            await registration.deregister()
            await registration.set_serving(True)
            assert not await is_serving(""), "a stopping service stays NOT_SERVING"
        assert len(tokens_of(await collect(loop, request_of("later")))) == 12


async def test_a_step_that_never_ends_ends_its_owner(target: TargetModel) -> None:
    engine, may_go_on = stuck_engine(target)

    async def own() -> None:
        async with AsyncEngine(engine) as loop, watched(loop, stuck_step_timeout_s=0.05, stuck_step_exit_timeout_s=0.1):
            with pytest.raises(Unavailable, match="a step has not ended"):
                await collect(loop, request_of("r"))
            await asyncio.sleep(60)

    try:
        with pytest.raises(Unavailable, match="a step has not ended"):
            await own()
    finally:
        may_go_on.set()
        join_engines()
