"""Connections have the event loop in turns, so that many at once hold neither it nor the requests of other addresses."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

# Requests that begin in one round of the event loop. Each takes some 0.5 ms before it is refused or has to wait.
STARTS_PER_ROUND = 8


class Turns:
    """Queue that starts what waits for its turn: a few in each round of the event loop, one of each address after the other.

    num_dropping: connections whose bytes are dropped; they share the reads of such bytes.
    """

    def __init__(self) -> None:
        self.num_dropping = 0
        self._waiting: OrderedDict[str, deque[Callable[[], object]]] = OrderedDict()
        self._is_running = False

    def add(self, address: str, start: Callable[[], object]) -> None:
        """Call `start` when it is the turn of an address."""
        self._waiting.setdefault(address, deque()).append(start)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            for _ in range(STARTS_PER_ROUND):
                if not self._waiting:
                    break
                address, starts = self._waiting.popitem(last=False)
                start = starts.popleft()
                if starts:
                    self._waiting[address] = starts
                start()
        finally:
            self._is_running = bool(self._waiting)
            if self._is_running:
                asyncio.get_running_loop().call_soon(self._run)
