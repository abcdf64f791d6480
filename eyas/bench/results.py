"""The results of `eyas bench offline`, and the tables that show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eyas.api.request import GenerationStats
from eyas.bench.report import Spread, Table, number

PLAIN, SPECULATIVE, GENERATE, ASSISTED = "plain", "speculative", "generate", "assisted generate"
LOOKUP = "generate, prompt lookup"
PAIRS = {
    f"{a} / {b}": (a, b)
    for a, b in ((SPECULATIVE, PLAIN), *((name, base) for base in (GENERATE, LOOKUP) for name in (PLAIN, SPECULATIVE)))
}


@dataclass(frozen=True)
class Run:
    """One batch decoded to the end.

    Attributes:
        seconds: from the first submission to the last token.
        draft_seconds: in the drafter.
    """

    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    stats: GenerationStats
    draft_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def total_stats(runs: Iterable[Run]) -> GenerationStats:
    """Return the statistics of all runs together."""
    stats = GenerationStats()
    for run in runs:
        stats.merge(run.stats)
    return stats


@dataclass(frozen=True)
class StageTimes:
    """Decode steps with the most sequences. host_share: share of a step outside the forward pass and the drafter."""

    num_steps: int
    num_sequences: int
    step_ms: Spread
    stages_ms: Mapping[str, float]
    host_share: float


@dataclass(frozen=True)
class Agreement:
    """Number of outputs that are equal token for token, and the first position at which another differs; None if all are
    equal.
    """

    num_identical: int
    num_outputs: int
    first_difference: int | None

    @classmethod
    def between(cls, left: Sequence[Run], right: Sequence[Run]) -> Agreement:
        """Compare runs over the same batches."""
        runs = zip(left, right, strict=True)
        pairs = [pair for one, other in runs for pair in zip(one.outputs, other.outputs, strict=True)]
        differing = [first_difference(a, b) for a, b in pairs if a != b]
        return cls(len(pairs) - len(differing), len(pairs), min(differing, default=None))

    def __str__(self) -> str:
        where = "" if self.first_difference is None else f", else from token {self.first_difference}"
        return f"{self.num_identical} of {self.num_outputs}{where}"


@dataclass(frozen=True)
class SpeedComparison:
    """The same batches decoded by every contender. The mappings are by contender, or by "contender / contender".

    Attributes:
        tau: acceptance length.
        acceptance_by_depth: see GenerationStats; None and empty without a drafter.
    """

    temperature: float
    batch: int
    num_groups: int
    tokens_per_second: Mapping[str, Spread]
    ratios: Mapping[str, Spread]
    identical: Mapping[str, Agreement]
    tau: float | None
    acceptance_by_depth: tuple[float, ...]
    stages: Mapping[str, StageTimes]

    @classmethod
    def of(
        cls, temperature: float, batch: int, runs: Mapping[str, Sequence[Run]], stages: Mapping[str, StageTimes]
    ) -> SpeedComparison:
        """Compare the runs of each contender over the same batches in the same order."""
        stats = total_stats(runs.get(SPECULATIVE, ()))
        pairs = {name: (runs[a], runs[b]) for name, (a, b) in PAIRS.items() if a in runs and b in runs}
        return cls(
            temperature=temperature,
            batch=batch,
            num_groups=len(runs[PLAIN]),
            tokens_per_second={name: Spread.of([run.tokens_per_second for run in own]) for name, own in runs.items()},
            ratios={
                name: Spread.of([a.tokens_per_second / b.tokens_per_second for a, b in zip(left, right, strict=True)])
                for name, (left, right) in pairs.items()
            },
            identical={name: Agreement.between(left, right) for name, (left, right) in pairs.items()},
            tau=stats.acceptance_length if SPECULATIVE in runs else None,
            acceptance_by_depth=tuple(stats.acceptance_by_depth),
            stages=stages,
        )

    def __str__(self) -> str:
        """Return the comparison in a line, for those who wait for the report."""
        speeds = [f"{name} {speed} tokens/s" for name, speed in self.tokens_per_second.items()]
        if self.tau is not None:
            ratio = self.ratios[f"{SPECULATIVE} / {PLAIN}"]
            speeds.append(f"{SPECULATIVE} / {PLAIN} {ratio}, tau {self.tau:.2f}")
            if ratio.median < 1:
                speeds.append(f"drafts of this method cost more than the {self.tau:.2f} tokens a step save here")
        return f"temperature {self.temperature:g}, batch {self.batch}: {', '.join(speeds)}"


@dataclass(frozen=True)
class OfflineResults:
    """Everything that `eyas bench offline` measures."""

    comparisons: Sequence[SpeedComparison]

    def tables(self) -> list[Table]:
        """Return the tables of the report; empty ones are left out."""
        tables = [part(self.comparisons) for part in (_speed, _agreement, _acceptance, _stages)]
        return [table for table in tables if table.rows]


def _speed(comparisons: Sequence[SpeedComparison]) -> Table:
    names = (PLAIN, SPECULATIVE, GENERATE, LOOKUP)
    rows = [
        (
            *_cell(c),
            *(_text(c.tokens_per_second.get(name)) for name in names),
            *(_text(c.ratios.get(name)) for name in PAIRS),
        )
        for c in comparisons
    ]
    note = (
        "Output tokens a second over whole batches, prefill included: median (smallest-largest). Each batch is decoded by "
        "every contender before the next one, and ratios are taken batch by batch. "
        "The spread comes from the prompts and the machine. "
        f"{LOOKUP}: `generate` of transformers with `prompt_lookup_num_tokens`; it takes batches of one only."
    )
    return Table("Speed", ("temperature", "batch", *names, *PAIRS), tuple(rows), note)


def _agreement(comparisons: Sequence[SpeedComparison]) -> Table:
    rows = tuple((*_cell(c), *(_text(c.identical.get(name)) for name in PAIRS)) for c in comparisons)
    return Table("Identical outputs", ("temperature", "batch", *PAIRS), rows, "Token for token.")


def _acceptance(comparisons: Sequence[SpeedComparison]) -> Table:
    drafted = [c for c in comparisons if c.tau is not None]
    depth = max((len(c.acceptance_by_depth) for c in drafted), default=0)
    rows = [
        (*_cell(c), f"{c.tau:.2f}", *(f"{share:.0%}" for share in c.acceptance_by_depth))
        + ("",) * (depth - len(c.acceptance_by_depth))
        for c in drafted
    ]
    note = (
        "tau: mean tokens per verify step, bonus included. Depth d: of the steps whose tree reached it, the share that "
        "accepted d drafted tokens or more."
    )
    columns = ("temperature", "batch", "tau", *(f"depth {d + 1}" for d in range(depth)))
    return Table("Acceptance", columns, tuple(rows), note)


def _stages(comparisons: Sequence[SpeedComparison]) -> Table:
    timed = [(c, name, times) for c in comparisons for name, times in c.stages.items()]
    stages = tuple(timed[0][2].stages_ms) if timed else ()
    rows = tuple(
        (
            *_cell(c),
            name,
            f"{t.num_steps}",
            *(number(t.stages_ms[stage]) for stage in stages),
            f"{t.step_ms}",
            f"{t.host_share:.0%}",
        )
        for c, name, t in timed
    )
    note = (
        "Median ms of decode steps at full batch. drafts: the wait for trees; inputs: packing rows; request: sending the "
        "drafter what was committed; host: share of the step outside the forward pass and the drafter. Measured "
        "separately from the speeds above, with a wait for the device after each stage."
    )
    return Table("Stages of a step", ("temperature", "batch", "contender", "steps", *stages, "step", "host"), rows, note)


def _cell(comparison: SpeedComparison) -> tuple[str, ...]:
    return (f"{comparison.temperature:g}", f"{comparison.batch}")


def _text(value: object) -> str:
    return "" if value is None else f"{value}"


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the first position at which two different sequences differ; one may be the beginning of the other."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
