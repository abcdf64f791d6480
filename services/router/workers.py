"""The workers as this router meets them: leases from the registry, one channel each, and what this router learned itself.

Knows no requests beyond their number.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from eyas.rpc.channel import open_channel
from services.registry import Lease, Registry
from services.router.placement import Fleet, Pair


class Workers:
    """Live workers and the way to them. A failed verifier is avoided for `suspicion` seconds.

    reachable: the verifiers that were connected at the last refresh.
    """

    def __init__(self, registry: Registry, suspicion: float) -> None:
        self._registry = registry
        self._suspicion = suspicion
        self._suspected_until: dict[str, float] = {}
        self._in_flight: Counter[str] = Counter()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.reachable: tuple[Lease, ...] = ()

    def fleet(self) -> Fleet:
        """What is known now."""
        now = time.monotonic()
        self._suspected_until = {name: until for name, until in self._suspected_until.items() if until > now}
        return Fleet(
            verifiers=self._registry.known("verifier"),
            drafters=self._registry.known("draft"),
            in_flight=self._in_flight,
            suspects=frozenset(self._suspected_until),
        )

    def channel(self, worker: Lease) -> grpc.aio.Channel:
        """The channel to a worker, kept open between requests."""
        if worker.incarnation not in self._channels:
            self._channels[worker.incarnation] = open_channel(worker.address)
        return self._channels[worker.incarnation]

    def suspect(self, worker: Lease) -> None:
        """Avoid a worker that has just failed a request."""
        self._suspected_until[worker.incarnation] = time.monotonic() + self._suspicion

    @contextmanager
    def busy(self, pair: Pair) -> Iterator[None]:
        """Count a request on both workers of a pair while it runs."""
        names = [worker.incarnation for worker in (pair.verifier, pair.drafter) if worker]
        self._in_flight.update(names)
        try:
            yield
        finally:
            self._in_flight.subtract(names)
            self._in_flight = +self._in_flight

    async def refresh(self) -> bool:
        """Dial the verifiers that are not connected, hang up on those that are gone; whether one can be reached."""
        verifiers = self._registry.known("verifier")
        gone = set(self._channels) - {verifier.incarnation for verifier in verifiers} - set(self._in_flight)
        await asyncio.gather(*(self._channels.pop(name).close(None) for name in gone))
        ready = grpc.ChannelConnectivity.READY
        self.reachable = tuple(v for v in verifiers if self.channel(v).get_state(try_to_connect=True) is ready)
        return bool(self.reachable)

    async def close(self) -> None:
        """Hang up on all."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))
        self._channels.clear()
