"""The verifier's line every ten seconds under load: requests, tokens per second, acceptance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from eyas.engine.engine import EngineLoad
from eyas.telemetry import metrics
from eyas.telemetry.metrics import Metric

INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class LoadLog:
    """Log of what a verifier's metrics have counted, every INTERVAL_S seconds. It says nothing while nothing is done."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._since = clock()
        self._counted = self._counts()

    def _counts(self) -> Counter[str]:
        """Return the present values of the counters, by name, over all their labels."""
        counts = Counter[str]()
        for sample in (sample for family in self._registry.collect() for sample in family.samples):
            if sample.name.endswith("_total"):
                counts[sample.name] += round(sample.value)
        return counts

    def line(self, load: EngineLoad) -> str:
        """Return what was done since the last call; empty if nothing was. load: the engine's now."""
        seconds = max(self._clock() - self._since, 1e-9)
        before = self._counted
        self._since = self._clock()
        self._counted = self._counts()

        def new(metric: Metric) -> int:
            name = f"{metric.family}_total"
            return self._counted[name] - before[name]

        num_ended = new(metrics.VERIFIER_REQUESTS) - new(metrics.VERIFIER_REJECTED_REQUESTS)
        num_tokens = new(metrics.VERIFIER_GENERATED_TOKENS)
        if not (num_tokens or num_ended or load.num_running or load.num_waiting):
            return ""
        text = f"{num_ended} requests done, {load.num_running} running, {load.num_waiting} waiting; "
        text += f"{num_tokens / seconds:.1f} tokens/s"
        num_steps = new(metrics.VERIFIER_VERIFY_STEPS)
        # Counters are read one by one, so some of a step may come without the others.
        if (num_drafted := new(metrics.VLLM_DRAFT_TOKENS)) and num_steps:
            tau = new(metrics.VERIFIER_VERIFY_STEP_TOKENS) / num_steps
            share = new(metrics.VLLM_ACCEPTED_TOKENS) / num_drafted
            text += f", tau {tau:.2f}, {share:.0%} of the drafted tokens accepted"
        return text

    async def run(self, load: Callable[[], EngineLoad]) -> None:
        """Log until cancelled. load: the engine's present load."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if line := self.line(load()):
                log.info("load: %s", line)
