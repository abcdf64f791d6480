"""Which workers are avoided because they failed: outcomes of requests and of probes in, names out. Knows no network.

A worker that has failed often enough is ejected, each time for longer. When its time is over it must answer a probe before
it gets requests again; only a request that it serves clears its name.

What one router remembers of its own: which token blocks it sent where, where sessions ran. Bounded; knows no network.

The workers as this router meets them: who is live, one channel each, and what this router learned itself.

Knows no requests beyond their number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from eyas.config import OutlierDetectionConfig, RoutingConfig
from eyas.rpc.channel import Peers, Pem
from eyas.rpc.messages import Lease
from eyas.services.discovery.base import Discovery
from eyas.services.discovery.registry import Placement, Registry
from eyas.services.router.routing import Fleet, Pair, RequestDemand, pick
from eyas.services.tasks import stop
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub


@dataclass
class _Record:
    """num_failures: in a row, since it was last ejected. until: when its probe is due; None while it is not ejected."""

    num_failures: int = 0
    num_ejections: int = 0
    until: float | None = None


class OutlierDetector:
    """Failures by incarnation. clock: the present time in seconds."""

    def __init__(self, config: OutlierDetectionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._records: dict[str, _Record] = {}

    @property
    def ejected(self) -> frozenset[str]:
        """Those that are to be avoided now."""
        return frozenset(name for name, record in self._records.items() if record.until is not None)

    @property
    def due(self) -> list[str]:
        """The ejected ones that are to be probed now."""
        now = self._clock()
        return [name for name, record in self._records.items() if record.until is not None and record.until <= now]

    def failed(self, name: str) -> None:
        """A request failed there."""
        record = self._records.setdefault(name, _Record())
        record.num_failures += 1
        if record.num_failures >= self._config.consecutive_failures and record.until is None:
            self._eject(record)

    def served(self, name: str) -> None:
        """A request was taken there: all is forgiven."""
        self._records.pop(name, None)

    def probed(self, name: str, answered: bool) -> None:
        """The outcome of a due probe: back to work, or out for longer."""
        record = self._records.get(name)
        if record is None:
            return
        if answered:
            record.until = None
        else:
            self._eject(record)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        self._records = {name: self._records[name] for name in names if name in self._records}

    def _eject(self, record: _Record) -> None:
        seconds = min(self._config.base_ejection_time_s * 2**record.num_ejections, self._config.max_ejection_time_s)
        record.until = self._clock() + seconds
        record.num_ejections = min(record.num_ejections + 1, 32)
        record.num_failures = 0


SENT_BLOCKS = 8192
NUM_SESSIONS = 65536


class SentBlocks:
    """Hashes of the blocks sent to each worker, those sent last. It stands in for what the worker has not told yet."""

    def __init__(self, limit: int = SENT_BLOCKS) -> None:
        self._limit = limit
        self._sent: dict[str, OrderedDict[int, None]] = {}

    @property
    def by_worker(self) -> Mapping[str, Container[int]]:
        """The hashes, by incarnation."""
        return self._sent

    def add(self, incarnation: str, blocks: Sequence[int]) -> None:
        """Remember a prompt; the end of one is forgotten before its beginning."""
        sent = self._sent.setdefault(incarnation, OrderedDict())
        for block in reversed(blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._limit:
            sent.popitem(last=False)

    def keep(self, incarnations: Iterable[str]) -> None:
        """Forget all other workers."""
        self._sent = {name: self._sent[name] for name in incarnations if name in self._sent}


class SessionMap:
    """Where sessions ran last: by the registry that all routers share, else by this router's own memory.

    registry: None where there is none; whoever opened it closes it.
    """

    def __init__(self, registry: Registry | None, limit: int = NUM_SESSIONS) -> None:
        self._registry = registry
        self._limit = limit
        self._own: OrderedDict[str, Placement] = OrderedDict()

    async def placement(self, session: str) -> Placement | None:
        """The session's last pair, or None if nobody knows."""
        shared = await self._registry.placement(session) if self._registry else None
        return shared or self._own.get(session)

    async def place(self, session: str, placement: Placement) -> None:
        """Remember a session's pair."""
        self._own[session] = placement
        self._own.move_to_end(session)
        while len(self._own) > self._limit:
            self._own.popitem(last=False)
        if self._registry:
            await self._registry.place(session, placement)


PROBE_SECONDS = 2.0

_READY = grpc.ChannelConnectivity.READY

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Open:
    """An open channel and what it was opened with."""

    channel: grpc.aio.Channel
    identity: Pem


class WorkerPool:
    """Live workers and the way to them. zone: the router's own, may be empty. peers: how workers are dialled.

    reachable: the verifiers that were connected at the last `refresh`, but for those that are avoided because they fail or
    are stuck; ready: whether there was one.
    """

    def __init__(
        self,
        discovery: Discovery,
        placement: RoutingConfig | None = None,
        ejection: OutlierDetectionConfig | None = None,
        zone: str = "",
        peers: Peers | None = None,
    ) -> None:
        self._discovery = discovery
        self._placement = placement or RoutingConfig()
        self._ejection = ejection or OutlierDetectionConfig()
        self._ejections = OutlierDetector(self._ejection)
        self._zone = zone
        self._peers = peers or Peers()
        self._sent = SentBlocks()
        self._in_flight: Counter[str] = Counter()
        self._calls: dict[str, list[Callable[[], object]]] = {}
        self._channels: dict[str, _Open] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self.ready = False
        self.reachable: tuple[Lease, ...] = ()

    def fleet(self) -> Fleet:
        """What is known now."""
        verifiers = self._discovery.known("verifier")
        stuck = frozenset(verifier.incarnation for verifier in verifiers if self._is_stuck(verifier))
        return Fleet(
            verifiers=verifiers,
            drafters=self._discovery.known("draft"),
            in_flight=self._in_flight,
            suspects=self._ejections.ejected | stuck,
            sent=self._sent.by_worker,
            zone=self._zone,
        )

    def choose(self, demand: RequestDemand) -> Pair | None:
        """The pair for a request, as the settings weigh it; None if no live verifier can serve it."""
        return pick(self.fleet(), demand, self._placement)

    def channel(self, worker: Lease) -> grpc.aio.Channel:
        """The channel to a worker, kept open between requests."""
        if worker.incarnation not in self._channels:
            identity = self._peers.identity
            self._channels[worker.incarnation] = _Open(self._peers.open_channel(worker.address), identity)
        return self._channels[worker.incarnation].channel

    def accepted(self, pair: Pair, demand: RequestDemand) -> None:
        """A verifier has begun to answer: it is well, and has the prompt."""
        self._ejections.served(pair.verifier.incarnation)
        self._sent.add(pair.verifier.incarnation, demand.blocks)

    def suspect(self, worker: Lease) -> None:
        """A worker has just failed a request: avoid it once it has done so too often."""
        self._ejections.failed(worker.incarnation)

    @contextmanager
    def busy(self, pair: Pair, cancel: Callable[[], object]) -> Iterator[None]:
        """Count a request on both workers of a pair while it runs. cancel: ends it should the verifier get stuck."""
        names = [worker.incarnation for worker in (pair.verifier, pair.drafter) if worker]
        self._in_flight.update(names)
        calls = self._calls.setdefault(pair.verifier.incarnation, [])
        calls.append(cancel)
        try:
            yield
        finally:
            calls.remove(cancel)
            self._in_flight.subtract(names)
            self._in_flight = +self._in_flight

    async def refresh(self) -> None:
        """Dial the verifiers that are not connected, hang up on those that are gone, give up on those that are stuck, probe
        those whose ejection is over."""
        verifiers = {verifier.incarnation: verifier for verifier in self._discovery.known("verifier")}
        gone = (set(self._channels) - set(verifiers) | self._outdated()) - set(self._in_flight)
        await asyncio.gather(*(self._channels.pop(name).channel.close(None) for name in gone))
        kept = set(verifiers) | set(self._in_flight)
        self._ejections.keep(kept)
        self._sent.keep(kept)
        self._calls = {name: calls for name, calls in self._calls.items() if name in kept}
        for verifier in filter(self._is_stuck, verifiers.values()):
            self._give_up(verifier)
        connected = [v for v in verifiers.values() if self.channel(v).get_state(try_to_connect=True) is _READY]
        avoided = self.fleet().suspects
        self.reachable = tuple(verifier for verifier in connected if verifier.incarnation not in avoided)
        self.ready = bool(self.reachable)
        for name in self._ejections.due:
            if name in verifiers and name not in self._probing:
                self._probing[name] = asyncio.create_task(self._probe(verifiers[name]), name="probe")

    async def close(self) -> None:
        """Hang up on all."""
        await asyncio.gather(*map(stop, list(self._probing.values())))
        await asyncio.gather(*(kept.channel.close(None) for kept in self._channels.values()))
        self._channels.clear()

    def _outdated(self) -> set[str]:
        """Whose channel has lost its connection, and was opened with certificates that have been renewed since."""
        identity = self._peers.identity
        lost = {name for name, kept in self._channels.items() if kept.channel.get_state() is not _READY}
        return {name for name in lost if self._channels[name].identity is not identity}

    def _is_stuck(self, verifier: Lease) -> bool:
        return verifier.load.step_seconds > self._ejection.stuck_step_timeout_s

    def _give_up(self, verifier: Lease) -> None:
        """Let the requests of a stuck verifier go on elsewhere."""
        calls = self._calls.get(verifier.incarnation, ())
        if calls:
            log.warning("verifier %s has been in one step for %.0f s", verifier.address, verifier.load.step_seconds)
        for cancel in list(calls):
            cancel()

    async def _probe(self, worker: Lease) -> None:
        """Ask a worker who it is; another one at its address is no answer."""
        answered = False
        try:
            status = await WorkerStub(self.channel(worker)).Status(worker_pb2.StatusRequest(), timeout=PROBE_SECONDS)
            answered = status.incarnation == worker.incarnation
        except grpc.aio.AioRpcError as error:
            log.info("verifier %s stays ejected: %s", worker.address, error.details())
        finally:
            del self._probing[worker.incarnation]
        self._ejections.probed(worker.incarnation, answered)
