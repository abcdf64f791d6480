"""The workers as this router meets them: who is live, one channel each, and what this router learned itself.

Knows no requests beyond their number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from eyas.config import EjectionConfig, PlacementConfig
from eyas.rpc.certificates import Pem
from eyas.rpc.messages import Lease
from eyas.rpc.peers import Peers
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub
from services.background import stop
from services.discovery.base import Discovery
from services.router.fleet.ejections import Ejections
from services.router.fleet.memory import SentBlocks
from services.router.placement import Demand, Fleet, Pair, pick

PROBE_SECONDS = 2.0

_READY = grpc.ChannelConnectivity.READY

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Open:
    """An open channel and what it was opened with."""

    channel: grpc.aio.Channel
    identity: Pem


class Workers:
    """Live workers and the way to them. zone: the router's own, may be empty. peers: how workers are dialled.

    reachable: the verifiers that were connected at the last `refresh`, but for those that are avoided because they fail or
    are stuck; ready: whether there was one.
    """

    def __init__(
        self,
        discovery: Discovery,
        placement: PlacementConfig | None = None,
        ejection: EjectionConfig | None = None,
        zone: str = "",
        peers: Peers | None = None,
    ) -> None:
        self._discovery = discovery
        self._placement = placement or PlacementConfig()
        self._ejection = ejection or EjectionConfig()
        self._ejections = Ejections(self._ejection)
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

    def choose(self, demand: Demand) -> Pair | None:
        """The pair for a request, as the settings weigh it; None if no live verifier can serve it."""
        return pick(self.fleet(), demand, self._placement)

    def channel(self, worker: Lease) -> grpc.aio.Channel:
        """The channel to a worker, kept open between requests."""
        if worker.incarnation not in self._channels:
            identity = self._peers.identity
            self._channels[worker.incarnation] = _Open(self._peers.open_channel(worker.address), identity)
        return self._channels[worker.incarnation].channel

    def accepted(self, pair: Pair, demand: Demand) -> None:
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
        return verifier.load.step_seconds > self._ejection.stuck_seconds

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
