"""How many replicas a pool should have: demand over time in, a number out that does not flutter. Knows no Ray.

Demand is counted in replicas: 2.5 would fill two and a half of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas.config.checks import above_zero, at_least, require


@dataclass(frozen=True)
class Damping:
    """Bounds of how full replicas may be, and how long a wish must last before it is granted, in seconds.

    A pool grows when it is fuller than `high` and shrinks when it is emptier than `low`, to as many replicas as makes it
    `target` full; in between it stays. up_seconds: how long it must have been too full. down_seconds: how long too empty,
    and how long after its last change at least.
    """

    low: float = 0.5
    target: float = 0.7
    high: float = 0.85
    up_seconds: float = 5.0
    down_seconds: float = 120.0

    def __post_init__(self) -> None:
        above_zero(low=self.low)
        require(
            self.low <= self.target <= self.high,
            f"low {self.low}, target {self.target} and high {self.high} must not decrease in this order",
        )
        at_least(0, up_seconds=self.up_seconds, down_seconds=self.down_seconds)


@dataclass(frozen=True)
class Wish:
    """A pool that wants another size since `since`. size: the closest to its present one that it has wanted meanwhile."""

    size: int
    since: float


@dataclass(frozen=True)
class Verdict:
    """The size that a pool should have now, and what to remember for the next time."""

    size: int
    wish: Wish | None = None


def wanted(demand: float, size: int, damping: Damping) -> int:
    """The size for a demand, at least 1: the present one between the bounds, else what meets the target."""
    fitting = max(1, math.ceil(demand / damping.target))
    if demand > damping.high * size:
        return max(fitting, size)
    return min(fitting, size) if demand < damping.low * size else size


def damped(demand: float, size: int, wish: Wish | None, changed: float | None, now: float, damping: Damping) -> Verdict:
    """The size to have at `now`, in seconds, when a wish has lasted. wish: what was remembered. changed: when the size last
    changed, if it ever did."""
    want = wanted(demand, size, damping)
    if want == size:
        return Verdict(size)
    grows = want > size
    if wish is None or (wish.size > size) != grows:
        wish = Wish(want, now)
    else:
        wish = Wish(min(wish.size, want) if grows else max(wish.size, want), wish.since)
    if now - wish.since < (damping.up_seconds if grows else damping.down_seconds):
        return Verdict(size, wish)
    if not grows and changed is not None and now - changed < damping.down_seconds:
        return Verdict(size, wish)
    return Verdict(wish.size)
