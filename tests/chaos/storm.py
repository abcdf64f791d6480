"""The storm: clients ask without a pause while everything around the router breaks, and every answer is checked.

It reports what the clients saw and what the services kept. `python -m tests.chaos` runs it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub
from tests.chaos.answers import Answer, plain_answers
from tests.chaos.faults import LONGEST_S, FaultLog, Injector
from tests.chaos.fleet import (
    HOST,
    MAX_KV_TOKENS,
    VOCAB_SIZE,
    Fleet,
    FleetSettings,
    Member,
    build_fleet,
    running,
    write_models,
)
from tests.chaos.traffic import Clients, Counts

WARM_UP_S = 0.5
IDLE_TIMEOUT_S = 30.0
SAMPLE_INTERVAL_S = 2.0
LAG_INTERVAL_S = 0.05
MIN_MEMORY_SAMPLES = 10
# Memory that a service may take in the second half of a storm, in MiB, and per hour in a long one.
MAX_GROWTH, MAX_SLOPE = 16.0, 8.0


@dataclass(frozen=True)
class StormSettings:
    """A storm. It ends after `minutes`, or once all wanted kills have happened if some are wanted.

    num_clients: requests that run at once. num_answers: distinct requests, of up to most_tokens tokens each.
    num_drafter_loops: how many drafters are killed side by side. longest_fault_s: seconds of any fault at most.
    """

    minutes: float = 2.0
    seed: int = 0
    verifier_kills: int | None = None
    drafter_kills: int | None = None
    num_clients: int = 10
    num_answers: int = 64
    most_tokens: int = 200
    num_drafter_loops: int = 6
    longest_fault_s: float = LONGEST_S
    fleet: FleetSettings = field(default_factory=FleetSettings)


@dataclass(frozen=True)
class GapOfFault:
    """The waits of clients that one kind of fault caused. p50, p99 and longest are over its occurrences, in seconds."""

    fault: str
    num: int
    p50_s: float
    p99_s: float
    longest_s: float


@dataclass(frozen=True)
class MemoryUse:
    """Anonymous memory of a service that was never killed, in MiB. slope: in MiB per hour, over the second half.

    growth: what the slope adds in that half. uncertainty: twice its standard error, in MiB per hour.
    """

    service: str
    first: float
    last: float
    slope: float
    growth: float
    uncertainty: float

    @property
    def grows(self) -> bool:
        """Whether it grows faster than MAX_SLOPE for certain, by more than caches that still fill."""
        return self.growth > MAX_GROWTH and self.slope - self.uncertainty > MAX_SLOPE


@dataclass(frozen=True)
class StormResult:
    """What a storm did and found. num_wrong, num_lost, num_doubled: tokens or characters. failures: of requests, by status.

    num_blamed: distinct requests that were refused because two kills came while each was tried.
    notes: the first failures and mismatches.
    unreturned_slots: KV cache slots and sessions that workers still hold when all clients have gone. p99_lag_s: how late the
    clients and proxies themselves were, in which no service had a part.
    """

    seconds: float
    num_requests: int
    num_cancelled: int
    num_tokens: int
    num_characters: int
    num_wrong: int
    num_lost: int
    num_doubled: int
    failures: dict[str, int]
    num_blamed: int
    num_verifier_kills: int
    num_drafter_kills: int
    num_crashes: int
    unreturned_slots: int
    p99_gap_s: float
    p99_lag_s: float
    longest_unexplained_gap_s: float
    gaps: tuple[GapOfFault, ...]
    memory: tuple[MemoryUse, ...]
    notes: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def is_clean(self) -> bool:
        """Whether no token, request, service or slot was lost."""
        mismatch = self.num_wrong or self.num_lost or self.num_doubled
        return not (mismatch or self.num_failed or self.num_crashes or self.unreturned_slots)


OnProgress = Callable[[float, Counts, Injector], object]


def storm(settings: StormSettings, folder: Path, on_progress: OnProgress = lambda *now: None) -> StormResult:
    """Run a storm in a folder, where the services write their logs."""
    models = write_models(folder)
    answers = plain_answers(models[0], VOCAB_SIZE, settings.num_answers, settings.most_tokens, settings.seed)
    fleet = build_fleet(settings.fleet, folder, models, settings.seed)
    return asyncio.run(_Storm(settings, fleet, answers, on_progress).run())


class _Storm:
    """One storm in an event loop."""

    def __init__(self, settings: StormSettings, fleet: Fleet, answers: Sequence[Answer], on_progress: OnProgress) -> None:
        self._settings = settings
        self._fleet = fleet
        self._on_progress = on_progress
        self._answers = answers
        self._injector = Injector(
            fleet, settings.seed, settings.verifier_kills, settings.drafter_kills, settings.longest_fault_s
        )
        self._memory: dict[Member, list[tuple[float, float]]] = {}
        self._stop = asyncio.Event()
        self._lags = array("f")

    async def run(self) -> StormResult:
        fleet, settings = self._fleet, self._settings
        async with running(fleet):
            clients = Clients(
                f"{HOST}:{fleet.router.port}", f"http://{HOST}:{fleet.http_port}", self._answers, settings.seed
            )
            try:
                await asyncio.sleep(WARM_UP_S)
                asking = [clients.keep_asking(self._stop, self._injector.log.blame) for _ in range(settings.num_clients)]
                async with asyncio.TaskGroup() as group:
                    for ask in asking:
                        group.create_task(ask)
                    started = time.monotonic()
                    await self._break(clients.counts, started)
                    self._stop.set()
                seconds = time.monotonic() - started
                unreturned = await self._unreturned_slots()
            finally:
                await clients.close()
        return self._result(clients.counts, seconds, unreturned)

    async def _break(self, counts: Counts, started: float) -> None:
        """Inject faults until the end; meanwhile watch crashes and memory."""
        breaking = asyncio.create_task(self._injector.run(self._settings.num_drafter_loops))
        watching = asyncio.create_task(self._watch_lag())
        try:
            while not self._is_over(started):
                await asyncio.wait([breaking], timeout=SAMPLE_INTERVAL_S)
                if breaking.done():
                    breaking.result()
                await self._fleet.restart_crashed()
                self._sample_memory(started)
                self._injector.log.settle()
                self._on_progress(time.monotonic() - started, counts, self._injector)
        finally:
            watching.cancel()
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)

    async def _watch_lag(self) -> None:
        """Measure how late this event loop is, on which clients and proxies run."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lags.append(time.monotonic() - before - LAG_INTERVAL_S)

    def _is_over(self, started: float) -> bool:
        if self._settings.verifier_kills is None and self._settings.drafter_kills is None:
            return time.monotonic() - started >= 60 * self._settings.minutes
        return self._injector.done

    def _sample_memory(self, started: float) -> None:
        for member in self._fleet.members[1:]:
            self._memory.setdefault(member, []).append((time.monotonic() - started, member.memory))

    async def _unreturned_slots(self) -> int:
        """Slots and sessions that workers hold IDLE_TIMEOUT_S after the last request, by their own account."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while (held := sum([await self._held(member) for member in self._workers()])) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return held

    def _workers(self) -> list[Member]:
        return [*self._fleet.verifiers, *self._fleet.drafters]

    async def _held(self, member: Member) -> int:
        peers, request = self._fleet.peers, worker_pb2.StatusRequest()
        async with peers.open_channel(f"{HOST}:{member.port}") as channel:
            status = await WorkerStub(channel).Status(request, timeout=10, wait_for_ready=True, metadata=peers.metadata)
        load = status.load
        unfree = MAX_KV_TOKENS - load.free_kv_tokens if member.kind == "verifier" else 0
        return load.num_running + load.num_waiting + unfree

    def _result(self, counts: Counts, seconds: float, unreturned: int) -> StormResult:
        injector, log = self._injector, self._injector.log
        log.settle(-1.0)
        return StormResult(
            seconds=seconds,
            num_requests=counts.num_requests,
            num_cancelled=counts.num_cancelled,
            num_tokens=counts.num_tokens,
            num_characters=counts.num_characters,
            num_wrong=counts.mismatch.num_wrong,
            num_lost=counts.mismatch.num_lost,
            num_doubled=counts.mismatch.num_doubled,
            failures=dict(counts.failures),
            num_blamed=len(counts.blamed),
            num_verifier_kills=injector.verifier_kills.done,
            num_drafter_kills=injector.drafter_kills.done,
            num_crashes=sum(member.num_crashes for member in self._fleet.members),
            unreturned_slots=unreturned,
            p99_gap_s=float(np.percentile(counts.gaps, 99)),
            p99_lag_s=float(np.percentile(self._lags, 99)),
            longest_unexplained_gap_s=log.longest_unexplained_gap_s,
            gaps=tuple(_gaps(log)),
            memory=tuple(_memory_use(self._memory)),
            notes=tuple(counts.notes),
        )


def _gaps(log: FaultLog) -> list[GapOfFault]:
    found = []
    for kind, gaps in sorted(log.gaps.items()):
        p50, p99 = np.percentile(gaps, (50, 99))
        found.append(GapOfFault(kind, len(gaps), float(p50), float(p99), max(gaps)))
    return found


def _memory_use(samples: dict[Member, list[tuple[float, float]]]) -> list[MemoryUse]:
    """Of the members that were never killed, if they were sampled long enough."""
    uses = []
    for member, points in samples.items():
        if member.num_starts > 1 or len(points) < MIN_MEMORY_SAMPLES:
            continue
        uses.append(memory_use(member.name, points))
    return uses


def memory_use(service: str, points: Sequence[tuple[float, float]]) -> MemoryUse:
    """Sum up samples of (seconds, MiB), at least MIN_MEMORY_SAMPLES."""
    times, sizes = np.array(points[len(points) // 2 :]).T
    slope, start = np.polyfit(times, sizes, 1)
    residuals, spread = sizes - (slope * times + start), times - times.mean()
    error = np.sqrt((residuals**2).sum() / (len(times) - 2) / (spread**2).sum())
    growth = slope * (times[-1] - times[0])
    return MemoryUse(service, points[0][1], points[-1][1], float(slope * 3600), float(growth), float(2 * error * 3600))
