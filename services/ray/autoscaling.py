"""Autoscaling of the pools: what replicas report to Serve, the demand in it, and the number of replicas that it takes.

Demand is counted in replicas: 2.5 fills two and a half of them. Serve sets the bounds and calls a policy about ten times a
second. Its own delays are set to zero: ScalingConfig has others.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry

from eyas.config.checks import above_zero, at_least, require
from eyas.telemetry import metrics

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

PolicyState = dict[str, Any]
Stats = dict[str, float]

# Most demand of one late drafter: how late it is says little about how many more are needed.
_MAX_DRAFTER_DEMAND = 2.0


@dataclass(frozen=True)
class ScalingConfig:
    """Rules by which a pool changes its size.

    A pool grows when its utilization is above `high` and shrinks when it is below `low`, to the size that brings it to
    `target`.

    Attributes:
        upscale_delay_s: how long utilization must have been too high.
        downscale_delay_s: how long too low, and the least time since the last change.
    """

    low: float = 0.5
    target: float = 0.7
    high: float = 0.85
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0

    def __post_init__(self) -> None:
        above_zero(low=self.low)
        require(
            self.low <= self.target <= self.high,
            f"low {self.low}, target {self.target} and high {self.high} must not decrease in this order",
        )
        at_least(0, upscale_delay_s=self.upscale_delay_s, downscale_delay_s=self.downscale_delay_s)


@dataclass(frozen=True)
class PendingChange:
    """A change of size that has been due since `since`. size: the one closest to the present size in that time."""

    size: int
    since: float


def desired_size(demand: float, size: int, config: ScalingConfig) -> int:
    """Return the size for a demand, at least 1: the present one between the bounds, else the one that meets the target."""
    fitting = max(1, math.ceil(demand / config.target))
    if demand > config.high * size:
        return max(fitting, size)
    return min(fitting, size) if demand < config.low * size else size


def decide_size(
    demand: float, size: int, pending: PendingChange | None, changed: float | None, now: float, config: ScalingConfig
) -> tuple[int, PendingChange | None]:
    """Return the size to have at `now`, in seconds, and the change that still waits for its delay.

    Args:
        pending: From the last decision.
        changed: Time of the last change of size; None if there was none.
    """
    desired = desired_size(demand, size, config)
    if desired == size:
        return size, None
    grows = desired > size
    if pending is None or (pending.size > size) != grows:
        pending = PendingChange(desired, now)
    else:
        pending = PendingChange(min(pending.size, desired) if grows else max(pending.size, desired), pending.since)
    if now - pending.since < (config.upscale_delay_s if grows else config.downscale_delay_s):
        return size, pending
    if not grows and changed is not None and now - changed < config.downscale_delay_s:
        return size, pending
    return pending.size, None


@dataclass(frozen=True)
class VerifierUsage:
    """A verifier now.

    Attributes:
        used_kv_tokens, queued_kv_tokens: of running and queued requests.
        num_requests: both together.
    """

    used_kv_tokens: float
    queued_kv_tokens: float
    num_kv_tokens: float
    num_requests: float
    max_num_seqs: float

    @property
    def demand(self) -> float:
        """Return the demand by KV cache or by requests, whichever is scarcer."""
        kv_tokens = self.used_kv_tokens + self.queued_kv_tokens
        by_kv_cache = kv_tokens / self.num_kv_tokens if self.num_kv_tokens else 0.0
        return max(by_kv_cache, self.num_requests / self.max_num_seqs)


@dataclass(frozen=True)
class DraftUsage:
    """A drafter since its last report.

    Attributes:
        occupancy: share of the time that it drafted; the sum over the drafters of a device.
        replies, late: per second; late replies come after the verifiers' draft_timeout_s.
    """

    occupancy: float
    replies: float
    late: float

    def demand(self, max_late_ratio: float) -> float:
        """Return the demand by occupancy or by late replies, whichever is higher. max_late_ratio: share of them at which a
        drafter is full.
        """
        by_lateness = self.late / self.replies / max_late_ratio if self.replies else 0.0
        return max(min(self.occupancy, _MAX_DRAFTER_DEMAND), min(by_lateness, _MAX_DRAFTER_DEMAND))


def read_verifier_usage(registry: CollectorRegistry, model: str, max_num_seqs: int) -> Stats:
    """Return the fields of this process's VerifierUsage, from its metrics. model: the served name."""
    name = metrics.VERIFIER_KV_CACHE_TOKENS.family
    used, free, queued = (_sample(registry, name, {"state": state}) for state in ("used", "free", "queued"))
    families = (metrics.VLLM_RUNNING.family, metrics.VLLM_WAITING.family)
    num_requests = sum(_sample(registry, family, {"model_name": model}) for family in families)
    return asdict(VerifierUsage(used, queued, used + free, num_requests, max_num_seqs))


class DraftUsageReader:
    """Reader of the DraftUsage of this process since the last read from its metrics.

    timeout_s: the verifiers' draft_timeout_s. Replies count as late from the largest bucket bound on that is within it.
    """

    def __init__(self, registry: CollectorRegistry, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        bounds = metrics.DRAFT_REPLY_DURATION.buckets
        self._registry = registry
        self._bound = bounds[max(bisect_right(bounds, timeout_s) - 1, 0)]
        self._clock = clock
        self._last = self._counts()

    def read(self) -> Stats:
        """Return the fields of a DraftUsage."""
        last, self._last = self._last, self._counts()
        seconds, *counts = (now - before for now, before in zip(self._last, last, strict=True))
        return asdict(DraftUsage(*(count / max(seconds, 1e-9) for count in counts)))

    def _counts(self) -> list[float]:
        """Return the time, and since the start of the process the seconds of drafting, the replies and the late ones."""
        family = metrics.DRAFT_REPLY_DURATION.family
        in_time = _sample(self._registry, f"{family}_bucket", {"le": str(self._bound)})
        replies = _sample(self._registry, f"{family}_count", {})
        busy = _sample(self._registry, f"{metrics.DRAFT_STEP_DURATION.family}_sum", {})
        return [self._clock(), busy, replies, max(replies - in_time, 0.0)]


def _sample(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float:
    """Return the value of a sample; 0 before its first."""
    return registry.get_sample_value(name, labels) or 0.0


UsageT = TypeVar("UsageT", VerifierUsage, DraftUsage)


class _Policy(ABC):
    """A policy of Serve. look_back_period_s: reports are averaged over it. scaling: the fields of a ScalingConfig."""

    def __init__(self, look_back_period_s: float, **scaling: float) -> None:
        self._look_back_period_s = look_back_period_s
        self._config = ScalingConfig(**scaling)

    @abstractmethod
    def _demand(self, context: AutoscalingContext) -> float:
        """Return the demand of the whole pool, in replicas."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, PolicyState]:
        """Return the number of replicas, and the state that Serve passes to the next call."""
        size, changes = context.target_num_replicas, (context.last_scale_up_time, context.last_scale_down_time)
        changed = max((at for at in changes if at is not None), default=None)
        state = context.policy_state or {}
        pending = PendingChange(state["size"], state["since"]) if "size" in state else None
        now = context.current_time or 0.0
        size, pending = decide_size(self._demand(context), size, pending, changed, now, self._config)
        return size, asdict(pending) if pending else {}

    def _recent(self, context: AutoscalingContext, kind: type[UsageT]) -> list[UsageT | None]:
        """Return the mean usage of each running replica; None without a report, which counts as well used
        rather than idle.
        """
        raw, names = context.raw_metrics or {}, [field.name for field in fields(kind)]
        reported = [[raw.get(name, {}).get(replica, ()) for name in names] for replica in context.running_replicas]
        return [kind(*map(self._mean, series)) if all(series) else None for series in reported]

    def _mean(self, reports: Sequence[Any]) -> float:
        """Return the mean value of the last seconds, by the replica's clock."""
        start = reports[-1].timestamp - self._look_back_period_s
        return fmean(report.value for report in reports if report.timestamp >= start)


class VerifierPolicy(_Policy):
    """Policy that scales by the KV cache and the requests of the verifiers."""

    def _demand(self, context: AutoscalingContext) -> float:
        return sum(usage.demand if usage else self._config.target for usage in self._recent(context, VerifierUsage))


class DraftPolicy(_Policy):
    """Policy that scales by the occupancy and lateness of the drafters. max_late_ratio: see DraftPoolConfig."""

    def __init__(self, max_late_ratio: float, **common: float) -> None:
        super().__init__(**common)
        self._max_late_ratio = max_late_ratio

    def _demand(self, context: AutoscalingContext) -> float:
        usages = self._recent(context, DraftUsage)
        return sum(usage.demand(self._max_late_ratio) if usage else self._config.target for usage in usages)


class RouterPolicy(_Policy):
    """Policy that scales by the requests in the routers and in Serve's queues before them, which Serve averages itself.

    max_requests: of one full router.
    """

    def __init__(self, max_requests: int, **common: float) -> None:
        super().__init__(**common)
        self._max_requests = max_requests

    def _demand(self, context: AutoscalingContext) -> float:
        return context.total_num_requests / self._max_requests
