"""Where the time of an engine's step goes: given an engine, gives back the laps of its steps.

The marks are put around the engine's parts from outside and taken away again; the engine does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eyas.bench.report import Spread
from eyas.bench.results import StageTimes
from eyas.engine.engine import Engine
from eyas.engine.sequence import Work

STAGES = ("drafts", "schedule", "inputs", "forward", "sample", "commit", "ask")


@dataclass
class Step:
    """One step. laps: seconds of each stage; they add up to the step."""

    laps: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    num_sequences: int = 0
    prefills: bool = False

    @property
    def seconds(self) -> float:
        return sum(self.laps.values())


class StageClock:
    """Every moment of a step belongs to the stage whose end is marked next."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.steps: list[Step] = []
        self._now = now
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self.steps.append(Step())
        self._last = self._now()

    def end(self, stage: str) -> None:
        """A stage ends; all the time since the last mark was its."""
        moment = self._now()
        self.steps[-1].laps[stage] += moment - self._last
        self._last = moment

    def scheduled(self, works: Sequence[Work]) -> None:
        """Scheduling ends with this work."""
        self.steps[-1].num_sequences = len(works)
        self.steps[-1].prefills = any(work.tree is None for work in works)
        self.end("schedule")


@contextmanager
def watched(engine: Engine, now: Callable[[], float]) -> Iterator[StageClock]:
    """Measure the stages of every step within the block. Waiting for the device at each mark makes steps a bit slower."""
    clock = StageClock(now)
    scheduler, drafting, runner = engine._scheduler, engine._drafting, engine._runner
    with (
        _marked(engine, "step", before=clock.start, after=lambda _: clock.end("ask")),
        _marked(drafting, "collect", before=lambda: clock.end("schedule"), after=lambda _: clock.end("drafts")),
        _marked(scheduler, "schedule", after=clock.scheduled),
        _marked(runner.passes, "forward", before=lambda: clock.end("inputs")),
        _marked(runner, "forward", after=lambda _: clock.end("forward")),
        _marked(scheduler, "commit", before=lambda: clock.end("sample")),
        _marked(drafting, "ask", before=lambda: clock.end("commit")),
    ):
        yield clock


def summarise(steps: Sequence[Step], waited: Sequence[str]) -> StageTimes:
    """The decode steps with the most sequences, in numbers; at least one step must be without prefill.

    waited: stages that are not the host's own work between forward passes.
    """
    decoding = [step for step in steps if not step.prefills]
    most = max(step.num_sequences for step in decoding)
    full = [step for step in decoding if step.num_sequences == most]
    total = sum(step.seconds for step in full)
    return StageTimes(
        num_steps=len(full),
        num_sequences=most,
        step_ms=Spread.of([1e3 * step.seconds for step in full]),
        stages_ms={stage: 1e3 * median(step.laps[stage] for step in full) for stage in STAGES},
        host_share=sum(step.laps[stage] for step in full for stage in STAGES if stage not in waited) / total,
    )


def _nothing(*_: object) -> None:
    pass


@contextmanager
def _marked(
    part: object, method: str, before: Callable[[], object] = _nothing, after: Callable[[Any], object] = _nothing
) -> Iterator[None]:
    """Call `before` ahead of a method of this one object, and `after` with its result."""
    inner = getattr(part, method)

    def outer(*args: Any) -> Any:
        before()
        result = inner(*args)
        after(result)
        return result

    setattr(part, method, outer)
    try:
        yield
    finally:
        delattr(part, method)
