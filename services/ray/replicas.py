"""Verifiers and draft services as Serve deployments: each replica runs the service on a free port of its node.

No request goes through Serve's handles: routers and verifiers find these services by their leases and dial them.
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
from eyas.services.ray.autoscaling import DraftUsageReader, Stats, VerifierUsageReader
from eyas.services.ray.config import ConfigT, EnvironmentConfig, on_node
from eyas.telemetry.logging import configure_logging

log = logging.getLogger(__name__)


class HostedService:
    """Implements ServiceRunner: runs a service as a task of the replica's event loop.

    address: where the service listens, once it is ready.
    """

    def __init__(self) -> None:
        self.address = ""
        self._stop = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._service: asyncio.Task[None] | None = None

    @contextmanager
    def stop_requested(self) -> Iterator[asyncio.Event]:
        yield self._stop

    def ready(self, address: str) -> None:
        self.address = address
        self._is_ready.set()
        log.info("serving on %s", address)

    async def start(self, run: Callable[[ServiceRunner], Coroutine[Any, Any, None]]) -> None:
        """Return once the service is ready. Raises its error if it ends before."""
        self._service = asyncio.create_task(run(self), name="service")
        ready = asyncio.create_task(self._is_ready.wait())
        await asyncio.wait([self._service, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.check()

    def check(self) -> None:
        """Raises the service's error, or RequestFailed, if it has ended by itself."""
        if self._service is not None and self._service.done() and not self._stop.is_set():
            self._service.result()
            raise RequestFailed("the service has ended; see the replica's log for the cause")

    async def stop(self) -> None:
        """Let the service drain; return at its end."""
        self._stop.set()
        if self._service is not None:
            await self._service


class WorkerReplica:
    """A Serve replica that runs a service; its constructor starts the service."""

    _hosted: HostedService
    _usage: VerifierUsageReader | DraftUsageReader

    def check_health(self) -> None:
        """Raises if the service has ended; Serve then replaces the replica."""
        self._hosted.check()

    def record_autoscaling_stats(self) -> Stats:
        """What Serve passes to the pool's policy."""
        return self._usage.read()

    async def __del__(self) -> None:
        """Serve awaits it: deregister, finish running calls, end."""
        await self._hosted.stop()

    async def _start(
        self,
        run: Callable[[ConfigT, ServiceRunner], Coroutine[Any, Any, None]],
        config: ConfigT,
        environment: EnvironmentConfig,
    ) -> None:
        configure_logging(config.telemetry.log_format)
        here = on_node(config, environment, get_node_ip_address())
        self._hosted = HostedService()
        await self._hosted.start(lambda runner: run(here, runner))


class Verifier(WorkerReplica):
    """A verifier."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: VerifierConfig, environment: EnvironmentConfig
    ) -> None:
        """Load the target and register. Raises what the service raises, which Serve shows."""
        from eyas.services.verifier.__main__ import run

        await self._start(run, config, environment)
        self._usage = VerifierUsageReader(prometheus_client.REGISTRY, config.served_model_name, config.engine.max_num_seqs)


class Draft(WorkerReplica):
    """A draft service."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: DraftConfig, environment: EnvironmentConfig, draft_timeout_s: float
    ) -> None:
        """Load the drafters and register. draft_timeout_s: of the verifiers. Raises what the service raises."""
        from eyas.services.draft.__main__ import run

        await self._start(run, config, environment)
        self._usage = DraftUsageReader(prometheus_client.REGISTRY, draft_timeout_s)
