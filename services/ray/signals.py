"""What a replica tells Serve for its pool's policy: the service's own metrics in, a few numbers out. Knows no policy."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from eyas.services.ray.autoscaling import DraftUse, VerifierUse
from eyas.telemetry import metrics
from eyas.telemetry.metrics import Metric

Stats = dict[str, float]


class Signals(Protocol):
    """What a service tells."""

    def read(self) -> Stats:
        """Numbers by name, as they are now."""
        ...


@dataclass(frozen=True)
class VerifierSignals:
    """A verifier's, read from its metrics."""

    registry: CollectorRegistry
    model: str
    max_running: int

    def read(self) -> Stats:
        """The fields of a VerifierUse."""
        used, free, queued = (self._slots(state) for state in ("used", "free", "queued"))
        num_requests = sum(self._requests(metric) for metric in (metrics.VLLM_RUNNING, metrics.VLLM_WAITING))
        return asdict(VerifierUse(used, queued, used + free, num_requests, self.max_running))

    def _slots(self, state: str) -> float:
        return _value(self.registry, metrics.VERIFIER_KV_CACHE_TOKENS.family, {"state": state})

    def _requests(self, metric: Metric) -> float:
        return _value(self.registry, metric.family, {"model_name": self.model})


@dataclass(frozen=True)
class _Counts:
    """A drafter's counters since its start, at a time in seconds. busy: seconds of drafting."""

    at: float
    busy: float
    answers: float
    late: float


class DraftSignals:
    """A drafter's, since the last look. patience: how long verifiers wait for an answer, in seconds."""

    def __init__(self, registry: CollectorRegistry, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        bounds = metrics.DRAFT_REPLY_DURATION.buckets
        self._registry = registry
        self._in_time = bounds[max(bisect_right(bounds, patience) - 1, 0)]
        self._clock = clock
        self._last = self._counts()

    def read(self) -> Stats:
        """The fields of a DraftUse. Answers count as late from the largest bound of the metric's buckets on that is within
        the verifiers' patience."""
        last, now = self._last, self._counts()
        self._last = now
        seconds = max(now.at - last.at, 1e-9)
        busy, answers, late = now.busy - last.busy, now.answers - last.answers, now.late - last.late
        return asdict(DraftUse(busy / seconds, answers / seconds, late / seconds))

    def _counts(self) -> _Counts:
        answer = metrics.DRAFT_REPLY_DURATION.family
        in_time = _value(self._registry, f"{answer}_bucket", {"le": str(self._in_time)})
        answers = _value(self._registry, f"{answer}_count", {})
        busy = _value(self._registry, f"{metrics.DRAFT_STEP_DURATION.family}_sum", {})
        return _Counts(self._clock(), busy, answers, max(answers - in_time, 0.0))


def _value(registry: CollectorRegistry, sample: str, labels: dict[str, str]) -> float:
    """0 for what has not been told yet."""
    return registry.get_sample_value(sample, labels) or 0.0
