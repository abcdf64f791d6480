"""How a service with several drafters says that it is ready: one lease each, on one address. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.lifecycle import Presence


@dataclass(frozen=True)
class Presences:
    """Several presences as one."""

    parts: Sequence[Presence]

    async def enter(self, address: str) -> None:
        """All in turn."""
        for part in self.parts:
            await part.enter(address)

    async def leave(self) -> None:
        """All in turn, those that have not entered too."""
        for part in self.parts:
            await part.leave()
