"""Watches whether the router has workers to serve with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from eyas.rpc.server import GENERATION_SERVICE
from eyas.services.discovery.base import Discovery, cancel_task, repeat
from eyas.services.discovery.redis_registry import Registry
from eyas.services.router.dispatch.workers import WorkerPool


@dataclass
class ReadinessMonitor:
    """Monitor that reports whether the router takes requests, and whether it can serve them; checks every `interval_s`
    seconds.

    A router becomes ready once it reaches a verifier, or knows that there is none, and stays so until it stops. Clients
    then get 503 with Retry-After from a router without verifiers, instead of a closed port. Only its Generation service is
    NOT_SERVING meanwhile.

    Attributes:
        set_serving: see RpcServer.
        registry: holds the sessions; None without one.
        needs_verifier: it is not ready before it has reached a first verifier, as one that is started together with its
            only verifier.
        reason: why the router takes no requests; empty while it does.
    """

    set_serving: Callable[..., Awaitable[None]]
    discovery: Discovery
    workers: WorkerPool
    interval_s: float
    registry: Registry | None = None
    needs_verifier: bool = False
    reason: str = field(default="the router is starting", init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def outage(self) -> str:
        """Return why no request can be served now; empty if one can."""
        return self.reason or ("" if self.workers.reachable else "no verifier can be reached")

    @property
    def warning(self) -> str:
        """Return what is wrong although requests are served; empty if nothing is."""
        found = self.discovery.outage or (self.registry.outage if self.registry else "")
        return f"{found}; the last known workers serve" if found else ""

    async def register(self, address: str) -> None:
        """Start to discover workers and to check the verifiers."""
        await self.discovery.watch("verifier", "draft")
        if self.registry is not None:
            await self.registry.watch()
        self._task = asyncio.create_task(repeat(self.interval_s, self._check), name="readiness")

    async def deregister(self) -> None:
        """Answer NOT_SERVING from now on; running requests go on."""
        await cancel_task(self._task)
        self.reason = "the router is stopping"
        await self.set_serving(False)

    async def _check(self) -> None:
        await self.workers.refresh()
        if self.reason and not self.discovery.has_synced("verifier"):
            outage = self.discovery.outage
            self.reason = "the discovery of verifiers has not answered yet" + (f": {outage}" if outage else "")
        elif self.reason:
            is_ready = self.workers.reachable or not (self.needs_verifier or self.discovery.known("verifier"))
            self.reason = "" if is_ready else "no verifier can be reached"
        unavailable = (GENERATION_SERVICE,) if self.outage else ()
        await self.set_serving(not self.reason, *unavailable)
