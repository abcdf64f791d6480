"""Live workers out of endpoints that may be dead: every endpoint is probed. Knows neither where endpoints come from nor what
is done with workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from eyas.config import DiscoveryConfig
from eyas.rpc.messages import Lease, Role
from eyas.rpc.peers import Peers
from services.background import stop
from services.discovery.base import Endpoint, Endpoints
from services.discovery.probe import Probe


class ProbedDiscovery:
    """Implements Discovery over a source of endpoints."""

    def __init__(self, endpoints: Endpoints, config: DiscoveryConfig, peers: Peers) -> None:
        self._endpoints = endpoints
        self._peers = peers
        self._config = config
        self._following: list[asyncio.Task[None]] = []
        self._probes: dict[Role, dict[Endpoint, Probe]] = {}
        self._probing: dict[Probe, asyncio.Task[None]] = {}
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
        new = {endpoint: Probe(role, endpoint, self._config, self._peers, changed) for endpoint in missing}
        self._probes[role] = probes = {endpoint: new.get(endpoint) or old[endpoint] for endpoint in fresh}
        for probe in probes.values():
            if probe not in self._probing:
                self._probing[probe] = asyncio.create_task(probe.run(), name="probe")
        self._refresh(role)

    def _end(self, probe: Probe) -> None:
        task = self._probing[probe]
        task.cancel()
        task.add_done_callback(lambda _: self._probing.pop(probe, None))

    def _refresh(self, role: Role) -> None:
        leases = [lease for probe in self._probes[role].values() for lease in probe.leases]
        live = {lease.incarnation: lease for lease in sorted(leases, key=lambda lease: lease.address, reverse=True)}
        self._known[role] = tuple(sorted(live.values(), key=lambda lease: lease.address))
