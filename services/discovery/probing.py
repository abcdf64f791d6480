"""Live workers by probing: every endpoint of a source is watched, asked for its state, and left when it fails.

Another kind of discovery is a file with an EndpointSource, two lines in `build_discovery`, and its name in DiscoveryKind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import DiscoveryConfig
from eyas.errors import InvalidRequest
from eyas.rpc.channel import Peers
from eyas.rpc.convert import leases_from_proto
from eyas.rpc.messages import Lease, Role
from eyas.services.discovery.base import Discovery, Endpoint, EndpointSource, OnEndpoints, cancel_task, repeat
from eyas.services.discovery.redis_registry import Registry
from eyas.v1 import worker_pb2
from eyas.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)


class ProbedDiscovery:
    """Discovery that probes every endpoint of a source."""

    def __init__(self, source: EndpointSource, config: DiscoveryConfig, peers: Peers) -> None:
        self._source = source
        self._peers = peers
        self._config = config
        self._probes: dict[Role, dict[Endpoint, WorkerProbe]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self, *roles: Role) -> None:
        """Begin to follow and probe the endpoints of these roles."""
        await self._source.open()
        for role in roles:
            self._start(self._source.follow(role, partial(self._on_endpoints, role)))

    def known(self, role: Role) -> tuple[Lease, ...]:
        """Return the workers that answered recently and report SERVING."""
        leases = [lease for probe in tuple(self._probes.get(role, {}).values()) for lease in probe.leases]
        live = {lease.incarnation: lease for lease in sorted(leases, key=lambda lease: lease.address, reverse=True)}
        return tuple(sorted(live.values(), key=lambda lease: lease.address))

    def has_synced(self, role: Role) -> bool:
        """Return whether the source has listed the role's endpoints, and each of them has answered or failed."""
        return role in self._probes and all(probe.has_result for probe in self._probes[role].values())

    @property
    def outage(self) -> str:
        """Empty: endpoints that cannot be listed stay as they were, and each is probed."""
        return ""

    async def close(self) -> None:
        """End all probes and close the source."""
        await asyncio.gather(*map(cancel_task, self._tasks))
        await self._source.close()

    def _on_endpoints(self, role: Role, endpoints: Iterable[Endpoint]) -> None:
        """Probe new endpoints; end the probes of those that are gone or belong to another worker now."""
        probes, fresh = self._probes.setdefault(role, {}), set(endpoints)
        for endpoint in probes.keys() - fresh:
            probes.pop(endpoint).task.cancel()
        for endpoint in fresh - probes.keys():
            probes[endpoint] = probe = WorkerProbe(role, endpoint, self._config, self._peers)
            probe.task = self._start(probe.run())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class WorkerProbe:
    """Watch over one endpoint while `run` runs: its health as a stream, its state by repeated calls.

    Attributes:
        peers: how to dial.
        task: what runs `run`.
    """

    task: asyncio.Task[None]

    def __init__(self, role: Role, endpoint: Endpoint, config: DiscoveryConfig, peers: Peers) -> None:
        self._role = role
        self._endpoint = endpoint
        self._config = config
        self._peers = peers
        self._state: tuple[Lease, ...] = ()
        self._answered_at = 0.0
        self._serving: bool | None = None
        self._problem = ""

    @property
    def has_result(self) -> bool:
        """Return whether the process there has answered with its state and its health, or could not be asked."""
        return bool(self._problem or (self._answered_at and self._serving is not None))

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The workers of the process there; empty unless it answers and serves."""
        return self._state if self._serving else ()

    async def run(self) -> None:
        """Watch until cancelled. After a certificate renewal, dial again once the old connection is lost."""
        while True:
            identity = self._peers.identity
            async with self._peers.open_channel(self._endpoint.address) as channel:
                steps = (partial(self._watch, channel), partial(self._ask, channel))
                tasks = [asyncio.create_task(repeat(self._config.probe_interval_s, step)) for step in steps]
                try:
                    while self._peers.identity is identity or channel.get_state() is grpc.ChannelConnectivity.READY:
                        await asyncio.sleep(self._config.probe_interval_s)
                finally:
                    await asyncio.gather(*map(cancel_task, tasks))

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Follow the worker's health until the stream ends."""
        try:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                self._serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            log.debug("%s: cannot watch its health: %s", self._endpoint.address, error.details())
            self._serving = self._serving or False

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        """Ask for the worker's state. Leave it at once if it is not there, and after `stale_after_s` if it is slow."""
        try:
            answer = await WorkerStub(channel).Status(
                worker_pb2.StatusRequest(), timeout=self._config.probe_timeout_s, metadata=self._peers.metadata
            )
            self._update(leases_from_proto(answer, self._endpoint.address))
        except InvalidRequest as error:
            self._leave(str(error))
        except grpc.aio.AioRpcError as error:
            late = time.monotonic() - self._answered_at > self._config.stale_after_s
            if late or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._leave(f"{error.code().name}: {error.details()}")

    def _update(self, state: Sequence[Lease]) -> None:
        if any(lease.role != self._role for lease in state):
            self._leave(f"it is a {state[0].role} service, where a {self._role} service was expected")
            return
        self._state = tuple(replace(lease, zone=lease.zone or self._endpoint.zone) for lease in state)
        self._answered_at = time.monotonic()
        self._problem = ""

    def _leave(self, reason: str) -> None:
        """Count the worker as gone; log each reason once."""
        if reason != self._problem:
            message = "no live %s service at %s: %s"
            log.warning(message, self._role, self._endpoint.address, reason, extra={"rate_limited": True})
        self._problem = reason
        self._state = ()


class StaticEndpoints(EndpointSource):
    """The addresses in the settings."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._addresses: dict[Role, tuple[str, ...]] = {"verifier": config.verifiers, "draft": config.drafters}

    async def follow(self, role: Role, on_endpoints: OnEndpoints) -> None:
        """Report the list once; it never changes."""
        on_endpoints(map(Endpoint, self._addresses[role]))


def build_discovery(config: DiscoveryConfig, registry: Registry | None, peers: Peers | None = None) -> Discovery:
    """Return the live workers.

    Args:
        registry: Where leases are; needed for the kind "redis".
        peers: How other kinds dial the endpoints that they probe.
    """
    if config.kind == "redis":
        assert registry is not None, "leases are kept in a registry"
        return registry
    source: EndpointSource = StaticEndpoints(config)
    if config.kind == "kubernetes":
        from eyas.services.discovery.kubernetes import KubernetesEndpoints

        source = KubernetesEndpoints(config)
    return ProbedDiscovery(source, config, peers or Peers())
