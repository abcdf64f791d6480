"""Amounts and slots that callers share fairly, so that none can hold all of them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import TypeAlias

# The names that a call counts for, such as a key and an address.
Callers: TypeAlias = tuple[str, ...]


class FairLimit:
    """An amount that callers share: each may hold as much as it leaves free. For one event loop.

    Alone, a caller gets half. Those that want all of it get a half, a quarter and so on while the ones before hold theirs,
    and equal parts once they have given some back. Source: Choudhury and Hahne 1998, Dynamic Queue Length Thresholds for
    Shared-Memory Packet Switches, with alpha = 1.

    Args:
        total: the whole amount.
        least: what a caller may hold in any case, while it is there.
    """

    def __init__(self, total: int, least: int) -> None:
        self.num_held = 0
        self._total = total
        self._least = least
        self._held: Counter[str] = Counter()

    @property
    def num_free(self) -> int:
        """The part that is not held."""
        return self._total - self.num_held

    @property
    def most(self) -> int:
        """Return what a caller may hold while no other holds anything."""
        return max(self._least, self._total // 2)

    def fits(self, callers: Callers, amount: int) -> bool:
        """Return whether all of these names may hold an amount more."""
        most = max(self._least, self.num_free - amount)
        return amount <= self.num_free and all(self._held[name] + amount <= most for name in callers)

    def take(self, callers: Callers, amount: int) -> None:
        """Count an amount for all of these names; a negative one gives it back."""
        self.num_held += amount
        for name in callers:
            self._held[name] += amount
            if not self._held[name]:
                del self._held[name]


class FairSlots:
    """Slots that callers share as a `FairLimit`. Those that wait are granted one each in turn. For one event loop."""

    def __init__(self, total: int) -> None:
        self._limit = FairLimit(total, 1)
        self._waiting: OrderedDict[Callers, dict[asyncio.Future[None], None]] = OrderedDict()

    @property
    def num_free(self) -> int:
        """The slots that are not held."""
        return self._limit.num_free

    @property
    def waiting(self) -> Collection[Callers]:
        """The callers that wait, the next one first."""
        return self._waiting.keys()

    def num_waiting(self, callers: Callers) -> int:
        """Return how many slots these callers wait for."""
        return len(self._waiting.get(callers, ()))

    async def take(self, callers: Callers, on_wait: Callable[[], object] = lambda: None) -> None:
        """Take a slot once it is the turn of these callers. on_wait: called if they have to wait."""
        if callers not in self._waiting and self._limit.fits(callers, 1):
            self._limit.take(callers, 1)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(callers, {})[granted] = None
        on_wait()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._remove(callers, granted)
            else:
                self.give(callers)
            raise

    def give(self, callers: Callers) -> None:
        """Give a slot back, and grant those that are free to callers in turn."""
        self._limit.take(callers, -1)
        for others, lane in list(self._waiting.items()):
            if not self._limit.num_free:
                break
            granted = next((one for one in lane if not one.done()), None)
            if granted and self._limit.fits(others, 1):
                self._limit.take(others, 1)
                granted.set_result(None)
                self._waiting.move_to_end(others)
                self._remove(others, granted)

    def _remove(self, callers: Callers, granted: asyncio.Future[None]) -> None:
        lane = self._waiting[callers]
        del lane[granted]
        if not lane:
            del self._waiting[callers]
