"""How the router says that it is ready: as long as it can reach a verifier. Knows no requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from eyas.services.discovery.base import Discovery
from eyas.services.discovery.registry import Registry
from eyas.services.router.workers import WorkerPool

log = logging.getLogger(__name__)


class Health(Protocol):
    """Who answers health checks."""

    async def set_serving(self, serving: bool) -> None:
        """What to answer from now on."""
        ...


@dataclass
class RouterRegistration:
    """SERVING while at least one verifier can be reached; looks every `interval` seconds. registry: that of the sessions.

    reason: why it is not ready; empty while it is.
    """

    server: Health
    discovery: Discovery
    workers: WorkerPool
    interval: float
    registry: Registry | None = None
    reason: str = field(default="the router is starting", init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def enter(self, address: str) -> None:
        """Begin to look for workers, and to follow the verifiers."""
        await self.discovery.watch("verifier", "draft")
        if self.registry is not None:
            await self.registry.watch()
        self._task = asyncio.create_task(self._follow(), name="readiness")

    async def leave(self) -> None:
        """Answer NOT_SERVING whatever the verifiers do; running requests go on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.reason = "the router is stopping"
        await self.server.set_serving(False)

    async def _follow(self) -> None:
        while True:
            try:
                await self.workers.refresh()
                self.reason = "" if self.workers.ready else "no verifier can be reached"
                await self.server.set_serving(self.workers.ready)
            except Exception:
                log.exception("a look at the verifiers failed; trying again")
            await asyncio.sleep(self.interval)
