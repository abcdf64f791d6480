"""`eyas bench methods`: decode the same prompts with every method in turn, then score, tabulate and draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress

from eyas.bench.report import Spread, Table, number
from eyas.bench.results import GENERATE, PLAIN, Agreement, Run
from eyas.bench.settings import MethodSpec, MethodsSettings, TaskPrompt, load_tasks
from eyas.bench.timing import Contender, EngineContender, GenerateContender, now, rotated
from eyas.config import DraftingConfig, EngineConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.registry import build_drafter, build_fuser, find_method
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models.target import TargetModel, load_target
from eyas.request import GenerationStats

WARM_UP_TOKENS = 16
INCHES_PER_METHOD = 0.9
UNSHARED_NOISE = DraftingConfig(shared_noise=False)


@dataclass(frozen=True)
class TimedRun:
    """One prompt decoded by one contender. draft_seconds: time in the drafter."""

    task: str
    run: Run
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class TaskScore:
    """A method on the prompts of a task. speedup: over plain decoding, by prompt; tau: acceptance length."""

    task: str
    speedup: Spread
    tau: float | None


@dataclass(frozen=True)
class MethodScore:
    """A method at a temperature.

    draft_ms: mean time that the drafter takes in a verify step.
    identical: outputs that equal those of plain decoding.
    unshared_noise_tau: acceptance length without shared noise, for methods with draft probabilities at temperatures above 0.
    seconds, unshared_noise_seconds: decoding time with and without shared noise.
    """

    method: str
    temperature: float
    tokens_per_second: Spread
    overall: TaskScore
    tasks: tuple[TaskScore, ...]
    draft_ms: float | None
    identical: Agreement
    unshared_noise_tau: float | None = None
    seconds: float = 0.0
    unshared_noise_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        method: str,
        temperature: float,
        runs: Sequence[TimedRun],
        plain: Sequence[TimedRun],
        unshared_noise: Sequence[TimedRun] = (),
    ) -> MethodScore:
        """Score runs over the same prompts, in the same order, as `plain` and `unshared_noise`."""
        names = dict.fromkeys(run.task for run in runs)
        steps = _stats(runs).num_verify_steps
        seconds = sum(run.draft_seconds for run in runs)
        return cls(
            method=method,
            temperature=temperature,
            tokens_per_second=Spread.of([timed.run.tokens_per_second for timed in runs]),
            overall=_score("all", runs, plain),
            tasks=tuple(_score(name, _only(name, runs), _only(name, plain)) for name in names),
            draft_ms=1e3 * seconds / steps if seconds and steps else None,
            identical=Agreement.between([timed.run for timed in runs], [timed.run for timed in plain]),
            unshared_noise_tau=_tau(unshared_noise) if unshared_noise else None,
            seconds=_seconds(runs),
            unshared_noise_seconds=_seconds(unshared_noise),
        )


@dataclass(frozen=True)
class MethodsResults:
    """The scores of all methods at all temperatures. num_threads: CPU threads of torch."""

    num_threads: int
    scores: tuple[MethodScore, ...]

    def tables(self) -> list[Table]:
        """One table per temperature."""
        temperatures = dict.fromkeys(score.temperature for score in self.scores)
        return [_table(t, [score for score in self.scores if score.temperature == t]) for t in temperatures]


class TimedDrafter(LocalDrafter):
    """A drafter that adds up the seconds spent in it."""

    def __init__(self, drafter: LocalDrafter, device: torch.device) -> None:
        self._drafter = drafter
        self._device = device
        self.seconds = 0.0

    @property
    def needs(self) -> DrafterNeeds:
        return self._drafter.needs

    @property
    def can_sample(self) -> bool:
        return self._drafter.can_sample

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        started = now(self._device)
        drafts = self._drafter.propose(contexts)
        self.seconds += now(self._device) - started
        return drafts

    def release(self, sessions: Sequence[str]) -> None:
        self._drafter.release(sessions)


@dataclass(frozen=True)
class TimedMethod:
    """A contender and its drafter; plain decoding and `generate` have none."""

    contender: Contender
    drafter: TimedDrafter | None = None


def measure(settings: MethodsSettings, progress: Progress) -> MethodsResults:
    """Run every method on every prompt. Raises EyasError for models and prompts that cannot be used."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loading = progress.add_task("loading models", total=None)
    prompts = load_tasks(settings)
    max_kv_tokens = (
        max(len(prompt.token_ids) for prompt in prompts) + settings.max_tokens + settings.tree.num_draft_tokens + 64
    )
    target = load_target(settings.model, settings.dtype, settings.device)
    timed: dict[str, TimedMethod] = {PLAIN: TimedMethod(_engine(settings, target, None, max_kv_tokens))}
    for spec in settings.methods:
        timed[spec.name] = _timed_method(settings, target, spec, DraftingConfig(), max_kv_tokens)
    shared = [spec for spec in settings.methods if _shares_noise(settings, spec)]
    unshared = {spec.name: _timed_method(settings, target, spec, UNSHARED_NOISE, max_kv_tokens) for spec in shared}
    generate = TimedMethod(GenerateContender(settings.model, settings.dtype, target.device))
    progress.update(loading, total=1, completed=1)
    scores: list[MethodScore] = []
    for temperature in settings.temperatures:
        contenders = timed | ({GENERATE: generate} if temperature == 0 else {})
        runs = _runs(settings, contenders, prompts, temperature, progress, f"temperature {temperature:g}")
        label = f"temperature {temperature:g}, without shared noise"
        unshared_runs = (
            _runs(settings, unshared, prompts, temperature, progress, label) if unshared and temperature > 0 else {}
        )
        for name, own in runs.items():
            scores.append(MethodScore.of(name, temperature, own, runs[PLAIN], unshared_runs.get(name, ())))
    return MethodsResults(torch.get_num_threads(), tuple(scores))


def _shares_noise(settings: MethodsSettings, spec: MethodSpec) -> bool:
    """Whether shared noise affects the method at any of the temperatures."""
    return find_method(spec.name).has_probs and max(settings.temperatures) > 0


def _timed_method(
    settings: MethodsSettings, target: TargetModel, spec: MethodSpec, drafting: DraftingConfig, max_kv_tokens: int
) -> TimedMethod:
    made = build_drafter(
        spec.name, settings.model, spec.draft_model, settings.dtype, settings.device, settings.tree, drafting
    )
    drafter = TimedDrafter(made, target.device)
    return TimedMethod(_engine(settings, target, drafter, max_kv_tokens, spec), drafter)


def _engine(
    settings: MethodsSettings,
    target: TargetModel,
    drafter: TimedDrafter | None,
    max_kv_tokens: int,
    spec: MethodSpec | None = None,
) -> EngineContender:
    """Build an engine over the shared weights that collects the features its drafter needs."""
    fuser = build_fuser(spec.name, spec.draft_model, settings.model, settings.dtype, settings.device) if spec else None
    own_target = TargetModel(target.model, fuser.aux_hidden_state_layers if fuser else ())
    config = EngineConfig(max_kv_tokens=max_kv_tokens, max_num_seqs=1, prefix_cache=False)
    return EngineContender(assemble_engine(own_target, fuser, config, settings.tree, drafter), target.device)


def _runs(
    settings: MethodsSettings,
    methods: Mapping[str, TimedMethod],
    prompts: Sequence[TaskPrompt],
    temperature: float,
    progress: Progress,
    label: str,
) -> dict[str, list[TimedRun]]:
    """Decode every prompt with every method before the next prompt; a different method starts each time."""
    sampling = settings.sampling(temperature)
    runs: dict[str, list[TimedRun]] = {name: [] for name in methods}
    for method in methods.values():
        method.contender.run([prompts[0].token_ids], replace(sampling, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens)))
    for index, prompt in enumerate(progress.track(prompts, description=label)):
        for name in rotated(list(methods), index):
            drafter = methods[name].drafter
            before = drafter.seconds if drafter else 0.0
            run = methods[name].contender.run([prompt.token_ids], sampling)
            runs[name].append(TimedRun(prompt.task, run, drafter.seconds - before if drafter else 0.0))
    return runs


def draw(scores: Sequence[MethodScore], path: Path) -> None:
    """Draw a group of bars per method and a bar per temperature: the speedup above, tau below.

    A line across a bar marks tau without shared noise.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the chart needs matplotlib; install it with: pip install 'eyas[bench]'") from error
    methods = list(dict.fromkeys(score.method for score in scores))
    temperatures = list(dict.fromkeys(score.temperature for score in scores))
    width = 0.8 / len(temperatures)
    figure = Figure(figsize=(2 + INCHES_PER_METHOD * len(methods), 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for offset, temperature in enumerate(temperatures):
        chosen = [score for score in scores if score.temperature == temperature]
        places = [methods.index(score.method) + (offset - (len(temperatures) - 1) / 2) * width for score in chosen]
        above.bar(places, [s.overall.speedup.median for s in chosen], width, label=f"temperature {temperature:g}")
        taus = [score.overall.tau or 0.0 for score in chosen]
        below.bar_label(below.bar(places, taus, width), [f"{tau:.1f}" if tau else "" for tau in taus], fontsize=7)
        marks = [(p, s.unshared_noise_tau) for p, s in zip(places, chosen, strict=True) if s.unshared_noise_tau is not None]
        below.hlines(
            [tau for _, tau in marks], [p - width / 2 for p, _ in marks], [p + width / 2 for p, _ in marks], "black"
        )
    above.axhline(1.0, color="black", linewidth=0.8)
    above.set_ylabel("speedup over plain decoding")
    above.legend()
    below.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    below.set_ylabel("tokens per verify step (tau)")
    below.set_title("Lines across bars: without shared noise", fontsize=9)
    figure.savefig(path, dpi=150)


def _table(temperature: float, scores: Sequence[MethodScore]) -> Table:
    tasks = [task.task for task in scores[0].tasks] if len(scores[0].tasks) > 1 else []
    columns = ["method", "speedup", "tau", *(f"{task}: speedup / tau" for task in tasks)]
    columns += ["draft ms per step", "tokens/s", "identical"]
    if temperature > 0:
        columns.insert(3, "tau without shared noise")
    note = (
        "Batch 1. Speedup over plain decoding of the same prompt in the same run: median (smallest-largest) over prompts. "
        "tau: mean tokens per verify step, bonus included. Identical: outputs that equal plain decoding's token for token. "
        f"This took {sum(score.seconds for score in scores):.0f} s of decoding"
    )
    without = sum(score.unshared_noise_seconds for score in scores)
    note += f", and the same without shared noise {without:.0f} s." if without else "."
    return Table(f"Temperature {temperature:g}", tuple(columns), tuple(_row(s, tasks) for s in scores), note)


def _row(score: MethodScore, tasks: Sequence[str]) -> tuple[str, ...]:
    cells = [score.method, f"{score.overall.speedup}", _text(score.overall.tau)]
    if score.temperature > 0:
        cells.append(_text(score.unshared_noise_tau))
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
