"""The workers of a router: which are live and healthy, and one channel to each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import grpc.aio

from eyas.config import OutlierDetectionConfig, RouterConfig
from eyas.rpc.channel import Metadata, Peers
from eyas.rpc.identity import Pem
from eyas.rpc.messages import Lease
from eyas.services.discovery.base import Discovery, cancel_task
from eyas.services.router.dispatch.routing import Pair, RoutingRequest, WorkerSnapshot, pick
from eyas.services.router.dispatch.upstream import VerifierFeed
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub

MAX_SENT_BLOCKS = 8192
PROBE_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 1.0

_READY = grpc.ChannelConnectivity.READY

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerConnection:
    """An open channel, the certificates that it was opened with, and the feed of the worker's chunks."""

    channel: grpc.aio.Channel
    identity: Pem
    feed: VerifierFeed

    async def close(self) -> None:
        await self.feed.close()
        await self.channel.close(None)


class WorkerPool:
    """The live workers and the channels to them.

    Args:
        config: holds the weights of `pick`, and the router's own zone.
        peers: how workers are dialled. reachable: the verifiers that were connected and healthy at the last `refresh`.
    """

    def __init__(self, discovery: Discovery, config: RouterConfig, peers: Peers) -> None:
        self._discovery = discovery
        self._config = config
        self._outliers = OutlierDetector(config.outlier_detection)
        self._peers = peers
        self._sent_blocks = SentBlocks()
        self._in_flight: Counter[str] = Counter()
        self._counted: dict[str, tuple[Lease, int]] = {}  # the last leases, and own requests when they came
        self._cancels: dict[str, list[Callable[[], object]]] = {}
        self._connections: dict[str, WorkerConnection] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._usable: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self.reachable: tuple[Lease, ...] = ()

    def snapshot(self) -> WorkerSnapshot:
        """Return what is known of the workers now."""
        verifiers, drafters = self._discovery.known("verifier"), self._discovery.known("draft")
        stuck = frozenset(verifier.incarnation for verifier in verifiers if self._is_stuck(verifier))
        for lease in (*verifiers, *drafters):
            name, (last, _) = lease.incarnation, self._counted.get(lease.incarnation, (None, 0))
            if last is not lease:
                self._counted[name] = lease, self._in_flight[name]
        return WorkerSnapshot(
            verifiers=verifiers,
            drafters=drafters,
            in_flight=self._in_flight,
            counted={name: number for name, (_, number) in self._counted.items()},
            unhealthy=self._outliers.ejected | stuck,
            sent_blocks=self._sent_blocks.by_worker,
            zone=self._config.server.zone,
        )

    def pick(self, request: RoutingRequest) -> Pair | None:
        """Return the pair for a request; None if no live verifier can serve it."""
        return pick(self.snapshot(), request, self._config.routing)

    def pick_again(self, request: RoutingRequest) -> Pair | None:
        """Return the pair for a request that all its verifiers have failed: one of them that can be called now, if any."""
        verifiers = self._discovery.known("verifier")
        unusable = frozenset(verifier.incarnation for verifier in verifiers if not self._is_usable(verifier))
        return self.pick(replace(request, excluded=request.excluded | unusable))

    async def wait_for(self, find: Callable[[], ResultT | None], timeout_s: float) -> ResultT | None:
        """Return the first result of `find` that is not None; None after `timeout_s`.

        find: called now, when verifiers join, leave or become usable, at `notify`, and every POLL_INTERVAL_S.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while (found := find()) is None and (remaining_s := deadline - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining_s, POLL_INTERVAL_S)):
                    await self._changed.wait()
        return found

    def notify(self) -> None:
        """Let every `wait_for` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def connection(self, worker: Lease) -> WorkerConnection:
        """Return the connection to a worker; it stays open between requests."""
        if worker.incarnation not in self._connections:
            identity = self._peers.identity
            channel = self._peers.open_channel(worker.address)
            self._connections[worker.incarnation] = WorkerConnection(channel, identity, VerifierFeed(channel, self._peers))
        return self._connections[worker.incarnation]

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call to a worker."""
        return self._peers.metadata

    def record_success(self, pair: Pair, request: RoutingRequest) -> None:
        """Note that a verifier sent its first chunk: it is healthy, and it has the prompt cached."""
        self._outliers.record_success(pair.verifier.incarnation)
        self._sent_blocks.add(pair.verifier.incarnation, request.block_hashes)

    def record_failure(self, worker: Lease) -> None:
        """Note that a worker failed a request; after too many failures in a row it is ejected."""
        self._outliers.record_failure(worker.incarnation)

    @contextmanager
    def in_flight(self, pair: Pair, cancel: Callable[[], object]) -> Iterator[None]:
        """Count a request on both workers of a pair while it runs. cancel: called if the verifier is stuck."""
        names = [worker.incarnation for worker in (pair.verifier, pair.drafter) if worker]
        self._in_flight.update(names)
        cancels = self._cancels.setdefault(pair.verifier.incarnation, [])
        cancels.append(cancel)
        try:
            yield
        finally:
            cancels.remove(cancel)
            self._in_flight.subtract(names)
            self._in_flight = +self._in_flight

    async def refresh(self) -> None:
        """Connect to new verifiers, close unused channels, cancel the requests of stuck verifiers, start due probes."""
        verifiers = {verifier.incarnation: verifier for verifier in self._discovery.known("verifier")}
        unused = (set(self._connections) - set(verifiers) | self._outdated()) - set(self._in_flight)
        await asyncio.gather(*(self._connections.pop(name).close() for name in unused))
        kept = set(verifiers) | set(self._in_flight)
        live = kept | {drafter.incarnation for drafter in self._discovery.known("draft")}
        self._counted = {name: counted for name, counted in self._counted.items() if name in live}
        self._outliers.retain(kept)
        self._sent_blocks.retain(kept)
        self._cancels = {name: cancels for name, cancels in self._cancels.items() if name in kept}
        for verifier in filter(self._is_stuck, verifiers.values()):
            if cancels := list(self._cancels.get(verifier.incarnation, ())):
                reason = "verifier %s has been in one step for %.0f s", verifier.address, verifier.load.step_seconds
                log.warning(*reason, extra={"rate_limited": True})
            for cancel in cancels:  # the requests are retried on another verifier
                cancel()
        usable = {name: self._is_usable(verifier) for name, verifier in verifiers.items()}
        if usable != self._usable:
            self._usable = usable
            self.notify()
        ejected = self._outliers.ejected
        self.reachable = tuple(verifier for name, verifier in verifiers.items() if usable[name] and name not in ejected)
        for name in self._outliers.due_probes:
            if name in verifiers and name not in self._probes:
                self._probes[name] = asyncio.create_task(self._probe(verifiers[name]), name="probe")

    async def close(self) -> None:
        """Stop the probes and close all channels."""
        await asyncio.gather(*map(cancel_task, list(self._probes.values())))
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        self._connections.clear()

    def _outdated(self) -> set[str]:
        """Return the workers whose connection is lost and whose certificates have been renewed since it was opened."""
        identity = self._peers.identity
        lost = {name for name, kept in self._connections.items() if kept.channel.get_state() is not _READY}
        return {name for name in lost if self._connections[name].identity is not identity}

    def _is_usable(self, verifier: Lease) -> bool:
        """Return whether there is a connection, and the verifier is not stuck; try to connect if there is none."""
        state = self.connection(verifier).channel.get_state(try_to_connect=True)
        return state is _READY and not self._is_stuck(verifier)

    def _is_stuck(self, verifier: Lease) -> bool:
        return verifier.load.step_seconds > self._config.outlier_detection.stuck_step_timeout_s

    async def _probe(self, worker: Lease) -> None:
        """Ask an ejected worker for its status; the answer of another incarnation at its address does not count."""
        answered = False
        try:
            stub = WorkerStub(self.connection(worker).channel)
            status = await stub.Status(worker_pb2.StatusRequest(), timeout=PROBE_TIMEOUT_S, metadata=self.metadata)
            answered = status.incarnation == worker.incarnation
        except grpc.aio.AioRpcError as error:
            log.info("verifier %s stays ejected: %s", worker.address, error.details(), extra={"rate_limited": True})
        finally:
            del self._probes[worker.incarnation]
        self._outliers.record_probe(worker.incarnation, answered)


@dataclass
class _Outlier:
    """Failures of a worker.

    Attributes:
        num_failures: in a row, since the last ejection.
        probe_at: when the probe is due; None while not ejected.
    """

    num_failures: int = 0
    num_ejections: int = 0
    probe_at: float | None = None


class OutlierDetector:
    """Detector that ejects workers that fail too often in a row, each time for longer.

    When an ejection is over, the worker must answer a probe before it gets requests. Only a request that it serves
    clears its record. clock: the present time in seconds.
    """

    def __init__(self, config: OutlierDetectionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._outliers: dict[str, _Outlier] = {}

    @property
    def ejected(self) -> frozenset[str]:
        """The incarnations that are ejected now."""
        return frozenset(name for name, outlier in self._outliers.items() if outlier.probe_at is not None)

    @property
    def due_probes(self) -> list[str]:
        """The ejected incarnations whose probe is due."""
        now = self._clock()
        return [name for name, outlier in self._outliers.items() if outlier.probe_at is not None and outlier.probe_at <= now]

    def record_failure(self, name: str) -> None:
        """Count a failed request; eject the worker after too many in a row."""
        outlier = self._outliers.setdefault(name, _Outlier())
        outlier.num_failures += 1
        if outlier.num_failures >= self._config.consecutive_failures and outlier.probe_at is None:
            self._eject(outlier)

    def record_success(self, name: str) -> None:
        """Clear a worker's record: it has served a request."""
        self._outliers.pop(name, None)

    def record_probe(self, name: str, answered: bool) -> None:
        """End an ejection if the due probe was answered; else eject the worker for longer."""
        outlier = self._outliers.get(name)
        if outlier is None:
            return
        if answered:
            outlier.probe_at = None
        else:
            self._eject(outlier)

    def retain(self, names: Iterable[str]) -> None:
        """Drop the records of all other workers."""
        self._outliers = {name: self._outliers[name] for name in names if name in self._outliers}

    def _eject(self, outlier: _Outlier) -> None:
        seconds = min(self._config.base_ejection_time_s * 2**outlier.num_ejections, self._config.max_ejection_time_s)
        outlier.probe_at = self._clock() + seconds
        outlier.num_ejections = min(outlier.num_ejections + 1, 32)
        outlier.num_failures = 0


class SentBlocks:
    """Hashes of the token blocks sent to each worker most recently; its lease may not announce them yet.

    by_worker: the hashes, by incarnation, oldest first.
    """

    def __init__(self, limit: int = MAX_SENT_BLOCKS) -> None:
        self._limit = limit
        self.by_worker: dict[str, OrderedDict[int, None]] = {}

    def add(self, incarnation: str, block_hashes: Sequence[int]) -> None:
        """Remember a prompt's blocks; its last blocks are evicted before its first."""
        sent = self.by_worker.setdefault(incarnation, OrderedDict())
        for block in reversed(block_hashes):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._limit:
            sent.popitem(last=False)

    def retain(self, incarnations: Iterable[str]) -> None:
        """Drop the blocks of all other workers."""
        self.by_worker = {name: self.by_worker[name] for name in incarnations if name in self.by_worker}
