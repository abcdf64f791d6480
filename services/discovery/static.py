"""Endpoints from a fixed list. Knows nothing of who is alive."""

from __future__ import annotations

from eyas.config import DiscoveryConfig
from eyas.rpc.messages import Role
from services.discovery.base import Endpoint, Tell


class StaticEndpoints:
    """Implements Endpoints by the addresses in the settings."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._addresses: dict[Role, tuple[str, ...]] = {"verifier": config.verifiers, "draft": config.drafters}

    async def open(self) -> None:
        """Nothing to do."""

    async def follow(self, role: Role, tell: Tell) -> None:
        """Tell the list once; it never changes."""
        tell(map(Endpoint, self._addresses[role]))

    async def close(self) -> None:
        """Nothing to do."""
