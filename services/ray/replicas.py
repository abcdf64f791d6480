"""Verifiers and draft services as Serve deployments: each replica runs the service on a free port of its node.

No request goes through Serve's handles: routers and verifiers find these services by their leases and dial them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import prometheus_client
from ray.util import get_node_ip_address

from eyas.config import DraftConfig, VerifierConfig
from eyas.errors import RequestFailed
from eyas.services.lifecycle import ServiceRunner
from eyas.services.ray.autoscaling import DraftUsageReader, Stats, read_verifier_usage
from eyas.services.ray.config import ConfigT, EnvironmentConfig, on_node
from eyas.telemetry.logging import configure_logging

log = logging.getLogger(__name__)


def on_this_node(config: ConfigT, environment: EnvironmentConfig) -> ConfigT:
    """Configure the logs of a replica and return its settings. Raises ConfigError as `on_node` does."""
    configure_logging(config.telemetry.log_format)
    return on_node(config, environment, get_node_ip_address())


class WorkerReplica:
    """Service as a task of a Serve replica's event loop, with its ServiceRunner."""

    _read_usage: Callable[[], Stats]

    async def start(self, run: Callable[[ServiceRunner], Coroutine[Any, Any, None]]) -> None:
        """Return once the service is ready. Raises its error if it ends before."""
        self._stop, self._is_ready = asyncio.Event(), asyncio.Event()
        self._service = asyncio.create_task(run(self), name="service")
        ready = asyncio.create_task(self._is_ready.wait())
        await asyncio.wait([self._service, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.check_health()

    @contextmanager
    def stop_requested(self) -> Iterator[asyncio.Event]:
        yield self._stop

    def ready(self, address: str) -> None:
        self._is_ready.set()
        log.info("serving on %s", address)

    def check_health(self) -> None:
        """Raises the service's error, or RequestFailed, if it has ended by itself; Serve then replaces the replica."""
        if self._service.done() and not self._stop.is_set():
            self._service.result()
            raise RequestFailed("the service has ended; see the replica's log for the cause")

    def record_autoscaling_stats(self) -> Stats:
        """Return what Serve passes to the pool's policy."""
        return self._read_usage()

    async def stop(self) -> None:
        """Deregister, finish running calls, end."""
        self._stop.set()
        await self._service


class Verifier(WorkerReplica):
    """A verifier."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: VerifierConfig, environment: EnvironmentConfig
    ) -> None:
        """Load the target and register. Raises what the service raises, which Serve shows."""
        from eyas.services.verifier.__main__ import run

        await self.start(partial(run, on_this_node(config, environment)))
        name, max_num_seqs = config.served_model_name, config.engine.max_num_seqs
        self._read_usage = partial(read_verifier_usage, prometheus_client.REGISTRY, name, max_num_seqs)

    __del__ = WorkerReplica.stop  # Serve awaits it


class Draft(WorkerReplica):
    """A draft service."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: DraftConfig, environment: EnvironmentConfig, draft_timeout_s: float
    ) -> None:
        """Load the drafters and register. draft_timeout_s: of the verifiers. Raises what the service raises."""
        from eyas.services.draft.__main__ import run

        await self.start(partial(run, on_this_node(config, environment)))
        self._read_usage = DraftUsageReader(prometheus_client.REGISTRY, draft_timeout_s).read

    __del__ = WorkerReplica.stop  # Serve awaits it
