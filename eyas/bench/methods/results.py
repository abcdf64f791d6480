"""What `eyas bench methods` finds: runs in, rows and tables out. Knows no models and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.bench.report import Spread, Table, number
from eyas.bench.results import Agreement, Run
from eyas.request import GenerationStats


@dataclass(frozen=True)
class TimedRun:
    """One prompt decoded one way. draft_seconds: spent in the drafter."""

    task: str
    run: Run
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class TaskScore:
    """A method on the prompts of a task. speedup: of each prompt over plain decoding; tau: acceptance length."""

    task: str
    speedup: Spread
    tau: float | None


@dataclass(frozen=True)
class MethodScore:
    """A method at a temperature. own_noise_tau: acceptance length without shared noise, where the method has a law of its
    own and the temperature is above 0. draft_ms: mean time of a draft round. identical: outputs against plain decoding's.
    seconds, own_noise_seconds: all that decoding took with and without shared noise."""

    method: str
    temperature: float
    tokens_per_second: Spread
    overall: TaskScore
    tasks: tuple[TaskScore, ...]
    draft_ms: float | None
    identical: Agreement
    own_noise_tau: float | None = None
    seconds: float = 0.0
    own_noise_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        method: str,
        temperature: float,
        runs: Sequence[TimedRun],
        plain: Sequence[TimedRun],
        own_noise: Sequence[TimedRun] = (),
    ) -> MethodScore:
        """runs: over the same prompts in the same order as `plain` and `own_noise`."""
        names = dict.fromkeys(run.task for run in runs)
        rounds = _stats(runs).num_rounds
        seconds = sum(run.draft_seconds for run in runs)
        return cls(
            method=method,
            temperature=temperature,
            tokens_per_second=Spread.of([timed.run.tokens_per_second for timed in runs]),
            overall=_score("all", runs, plain),
            tasks=tuple(_score(name, *(_only(name, some) for some in (runs, plain))) for name in names),
            draft_ms=1e3 * seconds / rounds if seconds and rounds else None,
            identical=Agreement.between([timed.run for timed in runs], [timed.run for timed in plain]),
            own_noise_tau=_tau(own_noise) if own_noise else None,
            seconds=_seconds(runs),
            own_noise_seconds=_seconds(own_noise),
        )


@dataclass(frozen=True)
class MethodsResults:
    """All that one run finds. num_threads: of torch."""

    num_threads: int
    scores: tuple[MethodScore, ...]

    def tables(self) -> list[Table]:
        """What people read: one table per temperature."""
        temperatures = dict.fromkeys(score.temperature for score in self.scores)
        return [_table(t, [score for score in self.scores if score.temperature == t]) for t in temperatures]


def _table(temperature: float, scores: Sequence[MethodScore]) -> Table:
    tasks = [task.task for task in scores[0].tasks] if len(scores[0].tasks) > 1 else []
    columns = ["method", "speedup", "tau", *(f"{task}: speedup / tau" for task in tasks)]
    columns += ["ms per draft round", "tokens/s", "identical"]
    if temperature > 0:
        columns.insert(3, "tau without shared noise")
    note = (
        "Batch 1. Speedup over plain decoding of the same prompt in the same run: median (smallest-largest) over prompts. "
        "tau: mean tokens per verify step, bonus included. Identical: outputs that equal plain decoding's token for token. "
        f"This took {sum(score.seconds for score in scores):.0f} s of decoding"
    )
    without = sum(score.own_noise_seconds for score in scores)
    note += f", and the same without shared noise {without:.0f} s." if without else "."
    return Table(f"Temperature {temperature:g}", tuple(columns), tuple(_row(s, tasks) for s in scores), note)


def _row(score: MethodScore, tasks: Sequence[str]) -> tuple[str, ...]:
    cells = [score.method, f"{score.overall.speedup}", _text(score.overall.tau)]
    if score.temperature > 0:
        cells.append(_text(score.own_noise_tau))
    cells += [f"{number(task.speedup.median)} / {_text(task.tau)}" for task in score.tasks if tasks]
    draft = "" if score.draft_ms is None else number(score.draft_ms)
    return (*cells, draft, f"{score.tokens_per_second}", f"{score.identical}")


def _score(task: str, runs: Sequence[TimedRun], plain: Sequence[TimedRun]) -> TaskScore:
    pairs = zip(runs, plain, strict=True)
    return TaskScore(task, Spread.of([a.run.tokens_per_second / b.run.tokens_per_second for a, b in pairs]), _tau(runs))


def _only(task: str, runs: Sequence[TimedRun]) -> list[TimedRun]:
    return [run for run in runs if run.task == task]


def _stats(runs: Sequence[TimedRun]) -> GenerationStats:
    stats = GenerationStats()
    for timed in runs:
        stats.merge(timed.run.stats)
    return stats


def _tau(runs: Sequence[TimedRun]) -> float | None:
    stats = _stats(runs)
    return stats.acceptance_length if stats.num_drafted else None


def _seconds(runs: Sequence[TimedRun]) -> float:
    return sum(timed.run.seconds for timed in runs)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
