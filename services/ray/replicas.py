"""A service inside a replica: started, looked after and stopped on the replica's own event loop. Knows no Serve.

Verifiers and drafters as Serve deployments: the services as they are, on a free port of the node.

No request goes through Serve's handles here: routers and verifiers find these services by their leases and dial them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import prometheus_client
from ray.util import get_node_ip_address

from eyas.config import DraftConfig, VerifierConfig
from eyas.errors import RequestFailed
from eyas.services.lifecycle import ServiceRunner
from eyas.services.ray.config import EnvironmentConfig, on_node
from eyas.services.ray.signals import DraftSignals, Signals, Stats, VerifierSignals
from eyas.telemetry.logging import configure_logging

log = logging.getLogger(__name__)


class HostedService:
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

    async def start(self, run: Callable[[ServiceRunner], Coroutine[Any, Any, None]]) -> None:
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


class WorkerReplica:
    """A service in a replica, as Serve wants to see it. Its constructor starts the service."""

    _hosted: HostedService
    _signals: Signals

    def check_health(self) -> None:
        """Raises if the service has ended; Serve then replaces the replica."""
        self._hosted.check()

    def record_autoscaling_stats(self) -> Stats:
        """What Serve hands to the pool's policy."""
        return self._signals.read()

    async def __del__(self) -> None:
        """Serve awaits it: withdraw the leases, finish what runs, leave."""
        await self._hosted.stop()


class Verifier(WorkerReplica):
    """A verifier."""

    async def __init__(self, config: VerifierConfig, names: EnvironmentConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the target and be present. Raises what the service raises, which Serve shows."""
        from eyas.services.verifier.__main__ import run

        configure_logging(config.telemetry.log_format)
        here = on_node(config, names, get_node_ip_address())
        self._hosted = HostedService()
        await self._hosted.start(lambda host: run(here, host))
        self._signals = VerifierSignals(prometheus_client.REGISTRY, config.served_model_name, config.engine.max_num_seqs)


class Draft(WorkerReplica):
    """A draft service."""

    async def __init__(self, config: DraftConfig, names: EnvironmentConfig, patience: float) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the drafters and be present. patience: how long verifiers wait for drafts, in seconds. Raises what the
        service raises, which Serve shows."""
        from eyas.services.draft.__main__ import run

        configure_logging(config.telemetry.log_format)
        here = on_node(config, names, get_node_ip_address())
        self._hosted = HostedService()
        await self._hosted.start(lambda host: run(here, host))
        self._signals = DraftSignals(prometheus_client.REGISTRY, patience)
