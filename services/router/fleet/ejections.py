"""Which workers are avoided because they failed: outcomes of requests and of probes in, names out. Knows no network.

A worker that has failed often enough is ejected, each time for longer. When its time is over it must answer a probe before
it gets requests again; only a request that it serves clears its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eyas.config import EjectionConfig


@dataclass
class _Record:
    """num_failures: in a row, since it was last ejected. until: when its probe is due; None while it is not ejected."""

    num_failures: int = 0
    num_ejections: int = 0
    until: float | None = None


class Ejections:
    """Failures by incarnation. clock: the present time in seconds."""

    def __init__(self, config: EjectionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._records: dict[str, _Record] = {}

    @property
    def ejected(self) -> frozenset[str]:
        """Those that are to be avoided now."""
        return frozenset(name for name, record in self._records.items() if record.until is not None)

    @property
    def due(self) -> list[str]:
        """The ejected ones that are to be probed now."""
        now = self._clock()
        return [name for name, record in self._records.items() if record.until is not None and record.until <= now]

    def failed(self, name: str) -> None:
        """A request failed there."""
        record = self._records.setdefault(name, _Record())
        record.num_failures += 1
        if record.num_failures >= self._config.failures and record.until is None:
            self._eject(record)

    def served(self, name: str) -> None:
        """A request was taken there: all is forgiven."""
        self._records.pop(name, None)

    def probed(self, name: str, answered: bool) -> None:
        """The outcome of a due probe: back to work, or out for longer."""
        record = self._records.get(name)
        if record is None:
            return
        if answered:
            record.until = None
        else:
            self._eject(record)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        self._records = {name: self._records[name] for name in names if name in self._records}

    def _eject(self, record: _Record) -> None:
        seconds = min(self._config.seconds * 2**record.num_ejections, self._config.longest)
        record.until = self._clock() + seconds
        record.num_ejections = min(record.num_ejections + 1, 32)
        record.num_failures = 0
