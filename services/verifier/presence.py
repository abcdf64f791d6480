"""How a verifier says that it is ready, and how it learns which drafters are. Knows no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.rpc.messages import Lease
from services.discovery.base import Discovery
from services.lifecycle import Presence

log = logging.getLogger(__name__)


@dataclass
class VerifierPresence:
    """A worker's presence, beside which `follow` is told the live drafters' leases every `interval` seconds."""

    worker: Presence
    discovery: Discovery
    follow: Callable[[tuple[Lease, ...]], None]
    interval: float
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def enter(self, address: str) -> None:
        """Be present, and begin to look for drafters."""
        await self.worker.enter(address)
        await self.discovery.watch("draft")
        self._task = asyncio.create_task(self._follow(), name="drafters")

    async def leave(self) -> None:
        """Follow no longer, and be gone; running requests keep their drafters."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.worker.leave()
        await self.discovery.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            try:
                self.follow(self.discovery.known("draft"))
            except Exception:
                log.exception("a look at the drafters failed; trying again")
