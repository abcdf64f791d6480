"""Routers that see the same leases spread their requests: a simulation of many routers with the real routing."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from eyas.config import RouterConfig
from eyas.rpc.channel import Peers
from eyas.rpc.messages import Lease, Load, ModelInfo, Role
from eyas.services.router.dispatch.routing import RoutingRequest
from eyas.services.router.dispatch.workers import WorkerPool

MODEL = ModelInfo("demo", "target", 4096, 2048, "head")
NUM_WORKERS, BUSY, DURATION_S, HEARTBEAT_S, WARM_S, END_S = 8, 8.0, 2.0, 1.0, 4.0, 16.0


@dataclass
class Leases:
    """The workers as one router has read them last; stands for its discovery."""

    known_leases: dict[str, Lease] = field(default_factory=dict)

    def known(self, role: Role) -> tuple[Lease, ...]:
        return tuple(lease for lease in self.known_leases.values() if lease.role == role)


class Simulation:
    """Routers and workers on a clock of their own. Heartbeats and reads have random phases, requests random lengths."""

    def __init__(self, num_routers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now, self.numbers = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.running: Counter[str] = Counter()
        self.published = {lease.incarnation: lease for role in ("verifier", "draft") for lease in leases(role)}
        self.known = [Leases(dict(self.published)) for _ in range(num_routers)]
        self.pools = [WorkerPool(known, RouterConfig(()), Peers()) for known in self.known]  # type: ignore[arg-type]
        self.peaks: dict[Role, list[float]] = {"verifier": [], "draft": []}
        for name in self.published:
            self.at(self.rng.uniform(0, HEARTBEAT_S), self.beat, name)
        for number in range(num_routers):
            self.at(self.rng.uniform(0, HEARTBEAT_S), self.read, number)
        self.at(0.0, self.arrive)
        while self.now < END_S:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def at(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.numbers), lambda: call(*args)))

    def beat(self, name: str) -> None:
        """Publish a worker's load."""
        lease = self.published[name]
        self.published[name] = replace(lease, load=replace(lease.load, num_running=self.running[name]))
        self.at(HEARTBEAT_S, self.beat, name)

    def read(self, number: int) -> None:
        """Let a router read all leases."""
        self.known[number].known_leases = dict(self.published)
        self.pools[number].snapshot()
        self.at(HEARTBEAT_S, self.read, number)

    def arrive(self) -> None:
        """Send a request through a random router."""
        pool, stack = self.rng.choice(self.pools), ExitStack()
        pair = pool.pick(RoutingRequest("demo", 100))
        assert pair is not None
        assert pair.drafter is not None
        stack.enter_context(pool.in_flight(pair, bool))
        names = pair.verifier.incarnation, pair.drafter.incarnation
        self.running.update(names)
        stack.callback(self.running.subtract, names)
        self.at(self.rng.expovariate(1 / DURATION_S), stack.close)
        self.at(self.rng.expovariate(BUSY * NUM_WORKERS / DURATION_S), self.arrive)
        for role, peaks in self.peaks.items():
            loads = [self.running[lease.incarnation] for lease in leases(role)]
            if self.now > WARM_S:
                peaks.append(max(loads) * len(loads) / sum(loads))

    def peak(self, role: Role) -> float:
        """Mean over time of the busiest worker's load, as a multiple of the mean load."""
        return sum(self.peaks[role]) / len(self.peaks[role])


def leases(role: Role) -> list[Lease]:
    size = 64 if role == "verifier" else 0
    load = Load(0, 0, 10**6, max_num_seqs=size)
    return [Lease(role, f"{role}-{number}:1", f"{role}-{number}", MODEL, load) for number in range(NUM_WORKERS)]


@pytest.mark.parametrize(("num_routers", "most"), [(1, 1.25), (5, 1.5), (20, 1.8)])
def test_no_worker_is_far_busier_than_the_mean(num_routers: int, most: float) -> None:
    found = [Simulation(num_routers, seed) for seed in range(2)]
    for role in ("verifier", "draft"):
        assert sum(simulation.peak(role) for simulation in found) / len(found) < most
