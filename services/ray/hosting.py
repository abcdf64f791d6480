"""A service inside a replica: started, looked after and stopped on the replica's own event loop. Knows no Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from eyas.errors import RequestFailed
from services.lifecycle import Host

log = logging.getLogger(__name__)


class Hosted:
    """Implements Host. Construct and use it on one event loop. address: where the service listens, once it does."""

    def __init__(self) -> None:
        self.address = ""
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._service: asyncio.Task[None] | None = None

    @contextmanager
    def stopping(self) -> Iterator[asyncio.Event]:
        yield self._stop

    def entered(self, address: str) -> None:
        self.address = address
        self._ready.set()
        log.info("serving on %s", address)

    async def start(self, run: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
        """Return once the service is ready. Raises what it raised if it ended instead."""
        self._service = asyncio.create_task(run(self), name="service")
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([self._service, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.check()

    def check(self) -> None:
        """Raises what the service raised, or RequestFailed, if it has ended by itself."""
        if self._service is not None and self._service.done() and not self._stop.is_set():
            self._service.result()
            raise RequestFailed("the service has ended; the replica's log says why")

    async def stop(self) -> None:
        """Let the service drain, and return at its end."""
        self._stop.set()
        if self._service is not None:
            await self._service
