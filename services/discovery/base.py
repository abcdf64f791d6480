"""The contracts of discovery: what services are told of workers, and what is known of where workers may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from eyas.rpc.messages import Lease, Role


class Discovery(Protocol):
    """The live workers. A Registry is one."""

    async def watch(self, *roles: Role) -> None:
        """Begin to look for workers of these roles. Raises ConfigError where nothing can be found that way."""
        ...

    def known(self, role: Role) -> tuple[Lease, ...]:
        """The workers of a watched role that are live, by address; each incarnation once."""
        ...

    async def close(self) -> None:
        """Look no longer."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Where a worker may be. identity: what tells it from an earlier one at the same address, such as a pod's UID; may be
    empty. zone: may be empty."""

    address: str
    identity: str = ""
    zone: str = ""


Tell = Callable[[Iterable[Endpoint]], None]


class Endpoints(Protocol):
    """A source of endpoints, which need not be alive."""

    async def open(self) -> None:
        """Called once before `follow`. Raises ConfigError for a setting that cannot work."""
        ...

    async def follow(self, role: Role, tell: Tell) -> None:
        """Tell all endpoints of a role, and again after every change, until cancelled. What was told last holds while the
        source is away."""
        ...

    async def close(self) -> None:
        """Called once, after every `follow` has ended."""
        ...
