"""Serve's autoscaling policies: what its controller knows of a pool in, a number of replicas out.

Serve sets the bounds, and calls a policy about ten times a second. Its own delays are set to zero: Damping has better ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any, Protocol, TypeVar

from ray.serve.config import AutoscalingContext

from services.ray.damping import Damping, Wish, damped
from services.ray.demand import DraftUse, VerifierUse

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
