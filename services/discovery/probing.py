"""Endpoints from a fixed list. Knows nothing of who is alive.

One endpoint under watch: given an address, gives back the leases of the live workers there. Knows no other.

Its health is watched, so that a worker that stops is left at once; its state is asked for again and again, so that one that
only looks alive is left as well.

Live workers out of endpoints that may be dead: every endpoint is probed. Knows neither where endpoints come from nor what
is done with workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import DiscoveryConfig
from eyas.errors import InvalidRequest
from eyas.rpc.channel import Peers
from eyas.rpc.convert import leases_from_proto
from eyas.rpc.messages import Lease, Role
from eyas.services.discovery.base import Endpoint, Endpoints, Tell
from eyas.services.tasks import forever, stop
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub


class StaticEndpoints:
    """Implements Endpoints by the addresses in the settings."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._addresses: dict[Role, tuple[str, ...]] = {"verifier": config.verifiers, "draft": config.drafters}

    async def open(self) -> None:
        """Nothing to do."""

    async def follow(self, role: Role, tell: Tell) -> None:
        """Tell the list once; it never changes."""
        tell(map(Endpoint, self._addresses[role]))

    async def close(self) -> None:
        """Nothing to do."""


log = logging.getLogger(__name__)


class WorkerProbe:
    """Watches an endpoint while `run` runs. peers: how it is dialled. changed: called whenever `leases` may be others."""

    def __init__(
        self, role: Role, endpoint: Endpoint, config: DiscoveryConfig, peers: Peers, changed: Callable[[], None]
    ) -> None:
        self._role = role
        self._endpoint = endpoint
        self._config = config
        self._peers = peers
        self._changed = changed
        self._state: tuple[Lease, ...] = ()
        self._answered_at = 0.0
        self._serving = False
        self._complaint = ""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The workers of the process there, if it is live and serving."""
        return self._state if self._serving else ()

    async def run(self) -> None:
        """Watch until cancelled; dials anew when a lost connection was opened with certificates that have been renewed."""
        while True:
            identity = self._peers.identity
            async with self._peers.open_channel(self._endpoint.address) as channel:
                steps = (partial(self._watch, channel), partial(self._ask, channel))
                tasks = [asyncio.create_task(forever(self._config.probe_interval_s, step)) for step in steps]
                try:
                    while self._peers.identity is identity or channel.get_state() is grpc.ChannelConnectivity.READY:
                        await asyncio.sleep(self._config.probe_interval_s)
                finally:
                    await asyncio.gather(*map(stop, tasks))

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Follow what the worker says of its health, until it says no more."""
        try:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                self._serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                self._changed()
        except grpc.aio.AioRpcError as error:
            log.debug("%s: its health cannot be watched: %s", self._endpoint.address, error.details())

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        """Ask for the worker's state. One that is not there is left at once, one that is slow after a while."""
        try:
            answer = await WorkerStub(channel).Status(worker_pb2.StatusRequest(), timeout=self._config.probe_timeout_s)
            self._hear(leases_from_proto(answer, self._endpoint.address))
        except InvalidRequest as error:
            self._leave(str(error))
        except grpc.aio.AioRpcError as error:
            late = time.monotonic() - self._answered_at > self._config.stale_after_s
            if late or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._leave(f"{error.code().name}: {error.details()}")

    def _hear(self, state: Sequence[Lease]) -> None:
        if any(lease.role != self._role for lease in state):
            self._leave(f"it is a {state[0].role} service, where a {self._role} service was expected")
            return
        self._state = tuple(replace(lease, zone=lease.zone or self._endpoint.zone) for lease in state)
        self._answered_at = time.monotonic()
        self._complaint = ""
        self._changed()

    def _leave(self, reason: str) -> None:
        """Count the worker as gone; the log says so once."""
        if reason != self._complaint:
            log.warning("no live %s service at %s: %s", self._role, self._endpoint.address, reason)
        self._complaint = reason
        self._state = ()
        self._changed()


class ProbedDiscovery:
    """Implements Discovery over a source of endpoints."""

    def __init__(self, endpoints: Endpoints, config: DiscoveryConfig, peers: Peers) -> None:
        self._endpoints = endpoints
        self._peers = peers
        self._config = config
        self._following: list[asyncio.Task[None]] = []
        self._probes: dict[Role, dict[Endpoint, WorkerProbe]] = {}
        self._probing: dict[WorkerProbe, asyncio.Task[None]] = {}
        self._known: dict[Role, tuple[Lease, ...]] = {}

    async def watch(self, *roles: Role) -> None:
        """Begin to follow the endpoints of these roles, and to probe them."""
        await self._endpoints.open()
        for role in roles:
            follow = self._endpoints.follow(role, partial(self._tell, role))
            self._following.append(asyncio.create_task(follow, name=f"{role} endpoints"))

    def known(self, role: Role) -> tuple[Lease, ...]:
        """Those that answered a moment ago and say that they serve."""
        return self._known.get(role, ())

    async def close(self) -> None:
        """End all probes."""
        tasks = [*self._following, *self._probing.values()]
        await asyncio.gather(*map(stop, tasks))
        await self._endpoints.close()

    def _tell(self, role: Role, endpoints: Iterable[Endpoint]) -> None:
        """Probe what is new. What is gone, or is another worker at the same address, is forgotten at once."""
        old, fresh = self._probes.get(role, {}), dict.fromkeys(endpoints)
        for endpoint, probe in old.items():
            if endpoint not in fresh:
                self._end(probe)
        changed = partial(self._refresh, role)
        missing = [endpoint for endpoint in fresh if endpoint not in old]
        new = {endpoint: WorkerProbe(role, endpoint, self._config, self._peers, changed) for endpoint in missing}
        self._probes[role] = probes = {endpoint: new.get(endpoint) or old[endpoint] for endpoint in fresh}
        for probe in probes.values():
            if probe not in self._probing:
                self._probing[probe] = asyncio.create_task(probe.run(), name="probe")
        self._refresh(role)

    def _end(self, probe: WorkerProbe) -> None:
        task = self._probing[probe]
        task.cancel()
        task.add_done_callback(lambda _: self._probing.pop(probe, None))

    def _refresh(self, role: Role) -> None:
        leases = [lease for probe in self._probes[role].values() for lease in probe.leases]
        live = {lease.incarnation: lease for lease in sorted(leases, key=lambda lease: lease.address, reverse=True)}
        self._known[role] = tuple(sorted(live.values(), key=lambda lease: lease.address))
