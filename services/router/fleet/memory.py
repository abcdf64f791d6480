"""What one router remembers of its own: which token blocks it sent where, where sessions ran. Bounded; knows no network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence

from services.registry import Placement, Registry

SENT_BLOCKS = 8192
NUM_SESSIONS = 65536


class SentBlocks:
    """Hashes of the blocks sent to each worker, those sent last. It stands in for what the worker has not told yet."""

    def __init__(self, limit: int = SENT_BLOCKS) -> None:
        self._limit = limit
        self._sent: dict[str, OrderedDict[int, None]] = {}

    @property
    def by_worker(self) -> Mapping[str, Container[int]]:
        """The hashes, by incarnation."""
        return self._sent

    def add(self, incarnation: str, blocks: Sequence[int]) -> None:
        """Remember a prompt; the end of one is forgotten before its beginning."""
        sent = self._sent.setdefault(incarnation, OrderedDict())
        for block in reversed(blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._limit:
            sent.popitem(last=False)

    def keep(self, incarnations: Iterable[str]) -> None:
        """Forget all other workers."""
        self._sent = {name: self._sent[name] for name in incarnations if name in self._sent}


class Sessions:
    """Where sessions ran last: by the registry that all routers share, else by this router's own memory.

    registry: None where there is none; whoever opened it closes it.
    """

    def __init__(self, registry: Registry | None, limit: int = NUM_SESSIONS) -> None:
        self._registry = registry
        self._limit = limit
        self._own: OrderedDict[str, Placement] = OrderedDict()

    async def placement(self, session: str) -> Placement | None:
        """The session's last pair, or None if nobody knows."""
        shared = await self._registry.placement(session) if self._registry else None
        return shared or self._own.get(session)

    async def place(self, session: str, placement: Placement) -> None:
        """Remember a session's pair."""
        self._own[session] = placement
        self._own.move_to_end(session)
        while len(self._own) > self._limit:
            self._own.popitem(last=False)
        if self._registry:
            await self._registry.place(session, placement)
