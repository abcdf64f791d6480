"""What `eyas bench methods` measures: options in, checked settings and prompts by task out.

What `eyas bench methods` finds: runs in, rows and tables out. Knows no models and no clock.

Decodes prompts with every method in turn: settings in, scores out. One prompt goes every way before the next one.

The bar chart of `eyas bench methods`: scores in, a picture out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress

from eyas.bench.report import Spread, Table, number
from eyas.bench.results import GENERATE, PLAIN, Agreement, Run
from eyas.bench.settings import MethodSpec, MethodsSettings, TaskPrompt, load_tasks
from eyas.bench.timing import Contender, EngineContender, GenerateContender, now
from eyas.config import DraftingConfig, EngineConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.registry import build_drafter, build_fuser, find_method
from eyas.engine.build import assemble_engine
from eyas.errors import ConfigError
from eyas.models.target import TargetModel, load_target
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
        rounds = _stats(runs).num_verify_steps
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


WARM_UP_TOKENS = 16
OWN_NOISE = DraftingConfig(shared_noise=False)


class TimedDrafter(LocalDrafter):
    """A drafter whose time is counted."""

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
    """A way to decode, and the drafter in it."""

    contender: Contender
    drafter: TimedDrafter | None = None


def measure(settings: MethodsSettings, progress: Progress) -> MethodsResults:
    """Everything that the settings ask for. Raises EyasError for models and prompts that cannot be used."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {settings.device}, but torch {torch.__version__} finds no CUDA device here")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loading = progress.add_task("loading models", total=None)
    prompts = load_tasks(settings)
    room = max(len(prompt.token_ids) for prompt in prompts) + settings.max_tokens + settings.tree.num_draft_tokens + 64
    target = load_target(settings.target, settings.dtype, settings.device)
    ways: dict[str, TimedMethod] = {PLAIN: TimedMethod(_engine(settings, target, None, room))}
    for spec in settings.methods:
        ways[spec.name] = _way(settings, target, spec, DraftingConfig(), room)
    shared = [spec for spec in settings.methods if _shares_noise(settings, spec)]
    own = {spec.name: _way(settings, target, spec, OWN_NOISE, room) for spec in shared}
    generate = TimedMethod(GenerateContender(settings.target, settings.dtype, target.device))
    progress.update(loading, total=1, completed=1)
    scores: list[MethodScore] = []
    for temperature in settings.temperatures:
        named = ways | ({GENERATE: generate} if temperature == 0 else {})
        runs = _runs(settings, named, prompts, temperature, progress, f"temperature {temperature:g}")
        label = f"temperature {temperature:g}, without shared noise"
        quiet = _runs(settings, own, prompts, temperature, progress, label) if own and temperature > 0 else {}
        for name, its in runs.items():
            scores.append(MethodScore.of(name, temperature, its, runs[PLAIN], quiet.get(name, ())))
    return MethodsResults(torch.get_num_threads(), tuple(scores))


def _shares_noise(settings: MethodsSettings, spec: MethodSpec) -> bool:
    """Whether there is shared noise that the method could do without."""
    return find_method(spec.name).has_probs and max(settings.temperatures) > 0


def _way(settings: MethodsSettings, target: TargetModel, spec: MethodSpec, eagle: DraftingConfig, room: int) -> TimedMethod:
    made = build_drafter(spec.name, settings.target, spec.head, settings.dtype, settings.device, settings.tree, eagle)
    drafter = TimedDrafter(made, target.device)
    return TimedMethod(_engine(settings, target, drafter, room, spec), drafter)


def _engine(
    settings: MethodsSettings,
    target: TargetModel,
    drafter: TimedDrafter | None,
    room: int,
    spec: MethodSpec | None = None,
) -> EngineContender:
    """An engine of its own over the same weights, with the taps that its drafter's features want."""
    fuser = build_fuser(spec.name, spec.head, settings.target, settings.dtype, settings.device) if spec else None
    tapped = TargetModel(target.model, fuser.aux_hidden_state_layers if fuser else ())
    config = EngineConfig(max_kv_tokens=room, max_num_seqs=1, prefix_cache=False)
    return EngineContender(assemble_engine(tapped, fuser, config, settings.tree, drafter), target.device)


def _runs(
    settings: MethodsSettings,
    ways: Mapping[str, TimedMethod],
    prompts: Sequence[TaskPrompt],
    temperature: float,
    progress: Progress,
    label: str,
) -> dict[str, list[TimedRun]]:
    sampling = settings.sampling(temperature)
    runs: dict[str, list[TimedRun]] = {name: [] for name in ways}
    for way in ways.values():
        way.contender.run([prompts[0].token_ids], replace(sampling, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens)))
    for index, prompt in enumerate(progress.track(prompts, description=label)):
        names = list(ways)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            drafter = ways[name].drafter
            before = drafter.seconds if drafter else 0.0
            run = ways[name].contender.run([prompt.token_ids], sampling)
            runs[name].append(TimedRun(prompt.task, run, drafter.seconds - before if drafter else 0.0))
    return runs


INCHES_PER_METHOD = 0.9


def draw(scores: Sequence[MethodScore], path: Path) -> None:
    """One group of bars per method, a bar per temperature: above the speedup over plain decoding, below tau, where a line
    across a bar is tau without shared noise.

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
        its = [score for score in scores if score.temperature == temperature]
        places = [methods.index(score.method) + (offset - (len(temperatures) - 1) / 2) * width for score in its]
        above.bar(places, [s.overall.speedup.median for s in its], width, label=f"temperature {temperature:g}")
        taus = [score.overall.tau or 0.0 for score in its]
        below.bar_label(below.bar(places, taus, width), [f"{tau:.1f}" if tau else "" for tau in taus], fontsize=7)
        own = [(p, s.own_noise_tau) for p, s in zip(places, its, strict=True) if s.own_noise_tau is not None]
        below.hlines([tau for _, tau in own], [p - width / 2 for p, _ in own], [p + width / 2 for p, _ in own], "black")
    above.axhline(1.0, color="black", linewidth=0.8)
    above.set_ylabel("speedup over plain decoding")
    above.legend()
    below.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    below.set_ylabel("tokens per verify step (tau)")
    below.set_title("Lines across bars: without shared noise", fontsize=9)
    figure.savefig(path, dpi=150)
