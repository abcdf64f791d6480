"""`eyas bench methods`: decode the same prompts with every method in turn, then score, tabulate and draw them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from eyas.bench.report import Spread, Table, number
from eyas.bench.results import ASSISTED, GENERATE, LOOKUP, PLAIN, Agreement, Run, total_stats
from eyas.bench.settings import MethodSpec, MethodsSettings, load_tasks
from eyas.bench.timing import Contender, EngineContender, GenerateContender, Seconds, run_in_turn
from eyas.config import DraftingConfig, EngineConfig
from eyas.config.checks import require
from eyas.config.engine import INT8
from eyas.device.placement import use_threads
from eyas.drafters.base import NO_WORK, DraftWork
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine, load_model
from eyas.errors import MissingPackage
from eyas.models.placement import pass_dtype
from eyas.models.target import TargetModel
from eyas.progress import Progress

INCHES_PER_METHOD = 0.9
# Time of a drafter's layer over that of a verify pass, in the comparison of methods whose speeds here say little about GPUs.
LAYER_COST = 0.1
PER_VERIFY_TIME = "tokens per verify time"
OVER_LOOKUP = "over generate with prompt lookup"


@dataclass(frozen=True)
class TaskScore:
    """A method on the prompts of a task.

    Attributes:
        speedup: over plain decoding, by prompt.
        tau: acceptance length.
    """

    task: str
    speedup: Spread
    tau: float | None

    @classmethod
    def of(cls, task: str, pairs: Sequence[tuple[Run, Run]]) -> TaskScore:
        """Score runs, each beside the run of plain decoding over the same prompt."""
        ratios = [run.tokens_per_second / plain.tokens_per_second for run, plain in pairs]
        return cls(task, Spread.of(ratios), _tau([run for run, _ in pairs]))


@dataclass(frozen=True)
class MethodScore:
    """A method at a temperature.

    Attributes:
        draft_ms: mean time that the drafter takes in a verify step.
        identical: outputs that equal those of plain decoding.
        work: passes of the drafter's network for a tree.
        rows: mean rows of a verify step, the root included.
        over_lookup: speedup over `generate` of transformers with prompt lookup, by prompt; None where that did not run.
        seconds: decoding time of the method.
    """

    method: str
    temperature: float
    tokens_per_second: Spread
    overall: TaskScore
    tasks: tuple[TaskScore, ...]
    draft_ms: float | None
    identical: Agreement
    work: DraftWork = NO_WORK
    rows: float = 1.0
    over_lookup: Spread | None = None
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        method: str,
        temperature: float,
        tasks: Sequence[str],
        runs: Sequence[Run],
        plain: Sequence[Run],
        work: DraftWork = NO_WORK,
        lookup: Sequence[Run] = (),
    ) -> MethodScore:
        """Score runs over the same prompts, in the same order, as `tasks`, `plain` and `lookup`."""
        over_lookup = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, lookup, strict=False)]
        stats = total_stats(runs)
        steps = stats.num_verify_steps
        draft_seconds = sum(run.draft_seconds for run in runs)
        pairs = {
            task: [(run, other) for name, run, other in zip(tasks, runs, plain, strict=True) if name == task]
            for task in tasks
        }
        return cls(
            method=method,
            temperature=temperature,
            tokens_per_second=Spread.of([run.tokens_per_second for run in runs]),
            overall=TaskScore.of("all", list(zip(runs, plain, strict=True))),
            tasks=tuple(TaskScore.of(task, own) for task, own in pairs.items()),
            draft_ms=1e3 * draft_seconds / steps if draft_seconds and steps else None,
            identical=Agreement.between(runs, plain),
            work=work,
            rows=1 + stats.num_drafted / steps if steps else 1.0,
            over_lookup=Spread.of(over_lookup) if over_lookup else None,
            seconds=sum(run.seconds for run in runs),
        )


@dataclass(frozen=True)
class MethodsResults:
    """The scores of all methods at all temperatures."""

    scores: tuple[MethodScore, ...]

    def tables(self) -> list[Table]:
        """Two tables per temperature: speeds, and what a drafted token costs."""
        temperatures = dict.fromkeys(score.temperature for score in self.scores)
        at = [[score for score in self.scores if score.temperature == t] for t in temperatures]
        tables = [table for scores in at for table in (_table(scores), _costs(scores))]
        return [table for table in tables if table.rows]


def measure(settings: MethodsSettings, progress: Progress) -> MethodsResults:
    """Run every method on every prompt. Raises EyasError for models and prompts that cannot be used."""
    engine = EngineConfig(quantization=settings.quantization)
    passes = pass_dtype(settings.model, settings.dtype, settings.device, engine, settings.threads)
    use_threads(settings.threads, (settings.device, passes))
    progress.show("loading models")
    prompts = load_tasks(settings)
    tasks, batches = [prompt.task for prompt in prompts], [[prompt.token_ids] for prompt in prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    max_kv_tokens = longest + settings.max_tokens + settings.tree.num_draft_tokens + 64
    target = load_model(settings.model, None, settings.dtype, settings.device, engine)
    build = partial(_contender, settings, target, max_kv_tokens)
    timed = {PLAIN: build()} | {spec.name: build(spec) for spec in settings.methods}
    greedy = _generate_contenders(settings, target.device)
    scores: list[MethodScore] = []
    for temperature in settings.temperatures:
        sampling, label = settings.sampling(temperature), f"temperature {temperature:g}"
        contenders: dict[str, Contender] = {**timed, **(greedy if temperature == 0 else {})}
        runs = run_in_turn(contenders, batches, sampling, progress, label)
        for name, own in runs.items():
            found = contenders[name]
            work = found.work if isinstance(found, EngineContender) else NO_WORK
            scores.append(MethodScore.of(name, temperature, tasks, own, runs[PLAIN], work, runs.get(LOOKUP, ())))
            whole = scores[-1].overall
            progress.print(f"{label}: {name} {whole.speedup} x" + (f", tau {whole.tau:.2f}" if whole.tau else ""))
    return MethodsResults(tuple(scores))


def _contender(
    settings: MethodsSettings,
    target: TargetModel,
    max_kv_tokens: int,
    spec: MethodSpec | None = None,
) -> EngineContender:
    """Build an engine over the shared weights that collects the features its drafter needs; plain without a method."""
    model, dtype, device, tree = settings.model, str(target.dtype).removeprefix("torch."), settings.device, settings.tree
    fuser, drafter = None, None
    if spec is not None:
        head = DraftHead(spec.draft_model, spec.name, model)
        fuser = head.build_fuser(model, dtype, device)
        one = DraftingConfig(cuda_graph_max_batch=1)  # more graphs would take long to capture
        drafting = head.resolve_drafting(one, model, dtype, device, settings.quantization == INT8)
        drafter = head.build_drafter(model, dtype, device, tree, drafting)
        tree = head.resolve_tree(tree)
    own_target = target.with_features(fuser.aux_hidden_state_layers if fuser else ())
    budget = settings.draft_budget
    config = EngineConfig(
        max_kv_tokens=max_kv_tokens, max_num_seqs=1, prefix_cache=False, draft_budget=budget,
        quantization=settings.quantization,
    )  # fmt: skip
    engine = assemble_engine(own_target, fuser, config, tree, drafter)
    return EngineContender(engine, target.device, drafter, _clock(settings, target.device))


def _generate_contenders(settings: MethodsSettings, device: torch.device) -> dict[str, Contender]:
    """Return transformers' `generate`, with its prompt lookup and the settings' assistant, if it is to be measured."""
    if not settings.generates:
        return {}
    generate = GenerateContender(settings.model, settings.dtype, device, _clock(settings, device))
    found: dict[str, Contender] = {GENERATE: generate, LOOKUP: generate.with_lookup()}
    return found | ({ASSISTED: generate.assisted(settings.assistant)} if settings.assistant else {})


def _clock(settings: MethodsSettings, device: torch.device) -> Seconds | None:
    """Return the clock of the settings; None for the usual one. Raises ConfigError for processor time on a GPU."""
    require(
        not settings.processor_time or device.type == "cpu",
        f"processor_time is true, but the device is {device}, whose work no processor's clock shows; leave it out",
    )
    return time.process_time if settings.processor_time else None


def draw(scores: Sequence[MethodScore], path: Path) -> None:
    """Draw a group of bars per method and a bar per temperature: the speedup above, tau below.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("the chart", "matplotlib", "bench") from error
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
    above.axhline(1.0, color="black", linewidth=0.8)
    above.set_ylabel("speedup over plain decoding")
    above.legend()
    below.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    below.set_ylabel("tokens per verify step (tau)")
    figure.savefig(path, dpi=150)


def _table(scores: Sequence[MethodScore]) -> Table:
    temperature = scores[0].temperature
    tasks = [task.task for task in scores[0].tasks] if len(scores[0].tasks) > 1 else []
    columns = ["method", "speedup", "tau", *(f"{task}: speedup / tau" for task in tasks)]
    columns += ["draft ms per step", "tokens/s", "identical"]
    has_lookup = any(score.over_lookup for score in scores)
    if has_lookup:
        columns.insert(2, OVER_LOOKUP)
    note = (
        "Batch 1. Speedup over plain decoding of the same prompt in the same run: median (smallest-largest) over prompts. "
        "tau: mean tokens per verify step, bonus included. Identical: outputs that equal plain decoding's token for token. "
        f"This took {sum(score.seconds for score in scores):.0f} s of decoding."
    )
    return Table(f"Temperature {temperature:g}", tuple(columns), tuple(_row(s, tasks, has_lookup) for s in scores), note)


def _costs(scores: Sequence[MethodScore]) -> Table:
    """Return what the drafted tokens of each method cost the verifier and the drafter."""
    costs = ("rows", "tau per row", "draft passes", "layers", "tau per draft pass", PER_VERIFY_TIME)
    columns = ("method", *costs, "tau")
    rows = tuple(
        (
            s.method,
            f"{s.rows:.1f}",
            _text(s.overall.tau / s.rows),
            f"{s.work.passes or ''}",
            f"{s.work.layers or ''}",
            _text(s.overall.tau / s.work.passes) if s.work.passes else "",
            _text(s.overall.tau / (1 + LAYER_COST * s.work.layers)),
            _text(s.overall.tau),
        )
        for s in scores
        if s.overall.tau is not None
    )
    note = (
        "rows: mean rows of a verify step, the root included. draft passes: forward passes of the drafter for a tree, one "
        "after another, and the layers in them; all heads of Medusa count as one layer, each of Hydra as one. "
        f"{PER_VERIFY_TIME}: tau / (1 + {LAYER_COST:g} layers), the tokens in the time of a verify pass if a layer of the "
        "drafter takes a tenth of it and lookups take none."
    )
    return Table(f"Temperature {scores[0].temperature:g}: what drafts cost", columns, rows, note)


def _row(score: MethodScore, tasks: Sequence[str], has_lookup: bool) -> tuple[str, ...]:
    cells = [score.method, f"{score.overall.speedup}"]
    cells += [f"{score.over_lookup or ''}"] if has_lookup else []
    cells.append(_text(score.overall.tau))
    cells += [f"{number(task.speedup.median)} / {_text(task.tau)}" for task in score.tasks if tasks]
    draft = "" if score.draft_ms is None else number(score.draft_ms)
    return (*cells, draft, f"{score.tokens_per_second}", f"{score.identical}")


def _tau(runs: Sequence[Run]) -> float | None:
    stats = total_stats(runs)
    return stats.acceptance_length if stats.num_drafted else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
