"""The contracts of discovery: what a service asks for live workers, and where their endpoints come from.

Also the background tasks that services share.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from eyas.rpc.messages import Lease, Role

_CANCEL_RETRY_S = 0.1

log = logging.getLogger(__name__)


class Discovery(Protocol):
    """The live workers. A Registry is one."""

    async def watch(self, *roles: Role) -> None:
        """Begin to look for workers of these roles. Raises ConfigError for settings that cannot work."""
        ...

    def known(self, role: Role) -> tuple[Lease, ...]:
        """Return the live workers of a watched role, ordered by address; each incarnation once."""
        ...

    def has_synced(self, role: Role) -> bool:
        """Return whether the live workers of a watched role have been read by now; there may be none."""
        ...

    @property
    def outage(self) -> str:
        """Return why the source of workers does not answer; empty while it does. Names no address: clients may read it."""
        ...

    async def close(self) -> None:
        """Stop looking."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Address at which a worker may be.

    Attributes:
        identity: separates the worker from an earlier one at the same address, such as a pod's UID; may be empty.
        zone: where it runs; may be empty.
    """

    address: str
    identity: str = ""
    zone: str = ""


OnEndpoints = Callable[[Iterable[Endpoint]], None]


class EndpointSource(ABC):
    """Source of endpoints; the workers there may be dead. Constructed with a DiscoveryConfig."""

    async def open(self) -> None:  # noqa: B027 - optional
        """Prepare before `follow`, if there is something to prepare. Raises ConfigError for settings that cannot work."""

    @abstractmethod
    async def follow(self, role: Role, on_endpoints: OnEndpoints) -> None:
        """Call `on_endpoints` with all endpoints of a role, now and after every change, until cancelled.

        While the source cannot be read, the last list stays valid.
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Release what `open` took; called once, after every `follow` has ended."""


async def repeat(interval_s: float, step: Callable[[], Awaitable[object]], delay_s: float = 0.0) -> None:
    """Run `step` after `delay_s`, and again `interval_s` after each run, until cancelled. Exceptions are logged."""
    await asyncio.sleep(delay_s)
    while True:
        try:
            await step()
        except Exception:
            log.exception("a background step failed; trying again", extra={"rate_limited": True})
        await asyncio.sleep(interval_s)


async def cancel_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task until it has ended: a connection that is being lost may swallow a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_RETRY_S)
