"""How long drafting rounds take: seconds in, a summary out."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 1024
CIRCUITS = ("closed", "half-open", "open")


@dataclass(frozen=True)
class RoundTimes:
    """One session's part of a drafting round, in seconds. round_trip: there and back, with `draft` in between."""

    drafter: str
    round_trip: float
    draft: float


@dataclass(frozen=True)
class LinkState:
    """One link now, and its counts since its start. circuit: one of CIRCUITS."""

    address: str
    up: bool
    circuit: str
    num_sessions: int
    num_answered: int
    num_lost: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class LinkStats:
    """The answered rounds of one link over its last WINDOW ones, in seconds; lost ones are counted since its start."""

    address: str
    num_answered: int
    num_lost: int
    mean: float
    p50: float
    p99: float


class RoundTrips:
    """Round trips of one link, there and back with the drafting in between."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.num_answered = 0
        self.num_lost = 0

    def answered(self, seconds: float) -> None:
        """Count a round whose answers came in time."""
        self._recent.append(seconds)
        self.num_answered += 1

    def lost(self) -> None:
        """Count a round whose answers came late or never."""
        self.num_lost += 1

    def summary(self, address: str) -> LinkStats:
        """All zeros before the first answer. May be called from any thread."""
        recent = sorted(self._recent.copy()) or [0.0]
        mean = sum(recent) / len(recent)
        return LinkStats(address, self.num_answered, self.num_lost, mean, _quantile(recent, 0.5), _quantile(recent, 0.99))


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
