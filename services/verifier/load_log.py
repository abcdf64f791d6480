"""The verifier's line every ten seconds under load: requests, tokens per second, acceptance."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from eyas.api.request import GenerationStats
from eyas.engine.engine import EngineLoad, StepReport

INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class LoadLog:
    """Counts what steps yield, and logs it every INTERVAL_S seconds. It says nothing while nothing is done.

    The engine's thread calls `add`, the event loop runs `run`; the lock guards the counts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._since, self._num_tokens, self._num_ended, self._stats = self._clock(), 0, 0, GenerationStats()

    def add(self, report: StepReport, stats: GenerationStats, num_tokens: int) -> None:
        """Count a step.

        Args:
            stats: of its verify steps.
            num_tokens: that it yielded.
        """
        with self._lock:
            self._num_tokens += num_tokens
            self._num_ended += len(report.ended)
            self._stats.merge(stats)

    def line(self, load: EngineLoad) -> str:
        """Return what was done since the last call; empty if nothing was. load: the engine's now."""
        with self._lock:
            seconds = max(self._clock() - self._since, 1e-9)
            num_tokens, num_ended, stats = self._num_tokens, self._num_ended, self._stats
            self._begin()
        if not (num_tokens or num_ended or load.num_running or load.num_waiting):
            return ""
        text = f"{num_ended} requests done, {load.num_running} running, {load.num_waiting} waiting; "
        text += f"{num_tokens / seconds:.1f} tokens/s"
        if stats.num_drafted:
            share = stats.num_accepted / stats.num_drafted
            text += f", tau {stats.acceptance_length:.2f}, {share:.0%} of the drafted tokens accepted"
        return text

    async def run(self, load: Callable[[], EngineLoad]) -> None:
        """Log until cancelled. load: the engine's present load."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if line := self.line(load()):
                log.info("load: %s", line)
