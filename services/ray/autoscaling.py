"""How many replicas a pool should have: demand over time in, a number out that does not flutter. Knows no Ray.

Demand is counted in replicas: 2.5 would fill two and a half of them.

How much a replica is asked to do: what it tells of itself in, a demand out. Knows no Ray.

Demand is counted in replicas: 1 is one that is just full.

Serve's autoscaling policies: what its controller knows of a pool in, a number of replicas out.

Serve sets the bounds, and calls a policy about ten times a second. Its own delays are set to zero: Damping has better ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, Protocol, TypeVar

from ray.serve.config import AutoscalingContext

from eyas.config.loader import above_zero, at_least, require


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


# A late drafter wants at most one more like it at a time: how late it is says little about how many are missing.
_MOST = 2.0


@dataclass(frozen=True)
class VerifierUse:
    """A verifier now. used_slots, queued_slots: of running and of queued requests; num_slots: all there are.

    num_requests: running and queued. max_running: most requests in a step.
    """

    used_slots: float
    queued_slots: float
    num_slots: float
    num_requests: float
    max_running: float

    @property
    def demand(self) -> float:
        """By slots or by requests, whichever is scarcer."""
        by_slots = (self.used_slots + self.queued_slots) / self.num_slots if self.num_slots else 0.0
        return max(by_slots, self.num_requests / self.max_running)


@dataclass(frozen=True)
class DraftUse:
    """A drafter of late. occupancy: share of the time that it drafted; with several drafters on a device, their sum.
    answers, late: a second; late are those that no verifier waited for."""

    occupancy: float
    answers: float
    late: float

    def demand(self, late_share: float) -> float:
        """By occupancy, or by the share of late answers where `late_share` is a full drafter's."""
        by_lateness = self.late / self.answers / late_share if self.answers else 0.0
        return max(min(self.occupancy, _MOST), min(by_lateness, _MOST))


State = dict[str, Any]
UseT = TypeVar("UseT", VerifierUse, DraftUse)


class Point(Protocol):
    """What a replica told at a time, in seconds."""

    timestamp: float
    value: float


class VerifierPolicy:
    """By the slots and requests of the verifiers. window: signals are means over so many seconds. settings: of a Damping."""

    def __init__(self, window: float, **settings: float) -> None:
        self._window = window
        self._damping = Damping(**settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, State]:
        """The number of replicas, and what Serve is to remember."""
        uses = _uses(context, VerifierUse, self._window)
        return decided(context, [use.demand if use else self._damping.target for use in uses], self._damping)


class DraftPolicy:
    """By the occupancy and lateness of the drafters. late_share: as in DraftPoolConfig; the rest as in VerifierPolicy."""

    def __init__(self, window: float, late_share: float, **settings: float) -> None:
        self._window = window
        self._late_share = late_share
        self._damping = Damping(**settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, State]:
        """The number of replicas, and what Serve is to remember."""
        uses = _uses(context, DraftUse, self._window)
        demands = [use.demand(self._late_share) if use else self._damping.target for use in uses]
        return decided(context, demands, self._damping)


class RouterPolicy:
    """By the requests in the routers and in Serve's queues before them, which Serve averages itself. requests: what one
    router carries. settings: of a Damping."""

    def __init__(self, requests: int, **settings: float) -> None:
        self._requests = requests
        self._damping = Damping(**settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, State]:
        """The number of replicas, and what Serve is to remember."""
        return decided(context, [context.total_num_requests / self._requests], self._damping)


def decided(context: AutoscalingContext, demands: Sequence[float], damping: Damping) -> tuple[int, State]:
    """The number of replicas for demands at this time, and what Serve is to hand back at the next."""
    size, changes = context.target_num_replicas, (context.last_scale_up_time, context.last_scale_down_time)
    changed = max((at for at in changes if at is not None), default=None)
    kept = context.policy_state or {}
    wish = Wish(kept["size"], kept["since"]) if "size" in kept else None
    verdict = damped(sum(demands), size, wish, changed, context.current_time or 0.0, damping)
    state: State = {"size": verdict.wish.size, "since": verdict.wish.since} if verdict.wish else {}
    return verdict.size, state


def _uses(context: AutoscalingContext, kind: type[UseT], window: float) -> list[UseT | None]:
    """What each running replica has told of late; None for one that has told nothing yet, which is thought to be well used
    rather than idle."""
    raw, names = context.raw_metrics or {}, [field.name for field in fields(kind)]
    told = [[raw.get(name, {}).get(replica, ()) for name in names] for replica in context.running_replicas]
    means = [[_mean(points, window) for points in series] if all(series) else None for series in told]
    return [None if values is None else kind(*values) for values in means]


def _mean(points: Sequence[Point], window: float) -> float:
    """Of the last `window` seconds; by the replica's clock, not ours."""
    return fmean(point.value for point in points if point.timestamp >= points[-1].timestamp - window)
