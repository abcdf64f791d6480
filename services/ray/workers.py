"""Verifiers and drafters as Serve deployments: the services as they are, on a free port of the node.

No request goes through Serve's handles here: routers and verifiers find these services by their leases and dial them.
"""

from __future__ import annotations

import prometheus_client
from ray.util import get_node_ip_address

from eyas.config import DraftConfig, VerifierConfig
from eyas.telemetry.logs import configure_logging
from services.ray.config import EnvironmentConfig, on_node
from services.ray.hosting import Hosted
from services.ray.signals import DraftSignals, Signals, Stats, VerifierSignals


class Worker:
    """A service in a replica, as Serve wants to see it. Its constructor starts the service."""

    _hosted: Hosted
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


class Verifier(Worker):
    """A verifier."""

    async def __init__(self, config: VerifierConfig, names: EnvironmentConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the target and be present. Raises what the service raises, which Serve shows."""
        from services.verifier.__main__ import run

        configure_logging(config.telemetry.log_format)
        here = on_node(config, names, get_node_ip_address())
        self._hosted = Hosted()
        await self._hosted.start(lambda host: run(here, host))
        self._signals = VerifierSignals(prometheus_client.REGISTRY, config.model, config.engine.max_running)


class Draft(Worker):
    """A draft service."""

    async def __init__(self, config: DraftConfig, names: EnvironmentConfig, patience: float) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the drafters and be present. patience: how long verifiers wait for drafts, in seconds. Raises what the
        service raises, which Serve shows."""
        from services.draft.__main__ import run

        configure_logging(config.telemetry.log_format)
        here = on_node(config, names, get_node_ip_address())
        self._hosted = Hosted()
        await self._hosted.start(lambda host: run(here, host))
        self._signals = DraftSignals(prometheus_client.REGISTRY, patience)
