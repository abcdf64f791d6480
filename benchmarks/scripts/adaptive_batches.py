"""Measures tree sizes by `engine.draft_budget` against plain decoding, by batch size, on emulated GPUs in virtual time.

Acceptance is real, passes take the times of a table, host work takes none, and no machine is too busy. Bounds say what any
choice of nodes could reach with the same trees and times. Writes a dated report and a picture:
`python -m benchmarks.scripts.adaptive_batches`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer

from eyas.api.request import GenerationStats, Request, SamplingParams
from eyas.bench.report import Report, Table, number
from eyas.bench.results import Run, total_stats
from eyas.bench.settings import MethodSpec, MethodsSettings, Prompt, load_tasks
from eyas.config import DraftBudgetPolicy, DraftingConfig, EngineConfig, TreeConfig
from eyas.drafters.block import BlockDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.drafters.neural import NeuralDrafter
from eyas.emulation.costs import DeviceCosts
from eyas.emulation.device import EmulatedDevice, VirtualClock
from eyas.engine.budget.base import FixedDraftBudget, StepTimes
from eyas.engine.budget.costs import SurvivalModel
from eyas.engine.build import assemble_engine
from eyas.engine.engine import Engine
from eyas.engine.sequence import ScheduledSequence
from eyas.errors import EyasError
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.loading import load_target
from eyas.models.target import TargetModel
from eyas.progress import Progress, progress
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import StepOutputs

POLICIES: tuple[DraftBudgetPolicy | None, ...] = (None, "fixed", "adaptive")
# Published speedups by batch, of other models on other machines: SGLang with EAGLE-3, and vLLM with adaptive DSpark.
PUBLISHED = {"SGLang, EAGLE-3": {2: 1.81, 64: 1.38}, "vLLM, adaptive DSpark": {4: 2.37, 16: 2.07, 64: 1.74, 256: 1.5}}


@dataclass(frozen=True)
class Rate:
    """Rate of a policy.

    Attributes:
        policy: "plain", "fixed" or "adaptive".
        relative: to plain decoding.
        steady: tokens per second of steps without prompts that nine of ten places are taken in.
    """

    batch: int
    temperature: float
    policy: str
    tokens_per_s: float
    relative: float
    steady: float
    tau: float
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Bound:
    """The most tokens per second of steps without prompts, relative to plain ones, with the trees of one run.

    Attributes:
        context: tokens of each sequence, in the mean of the run.
        plain: tokens per second.
        ranked: with nodes in the order of their survival, and the best depth and number of them.
        known: with accepted nodes alone.
        rows, tau: of a sequence in a ranked step.
    """

    batch: int
    temperature: float
    context: float
    plain: float
    ranked: float
    known: float
    depth: int
    rows: float
    tau: float


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        verifier, drafter: cost tables.
    """

    model: str
    draft_model: str
    verifier: str
    drafter: str
    max_tokens: int
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_fixed: int


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "models/demo/target",
    draft_model: Annotated[str, typer.Option(help="Draft head.")] = "models/demo/eagle3-full",
    prompts: Annotated[Path, typer.Option(help="JSON Lines.")] = Path("models/demo/prompts.jsonl"),
    verifier: Annotated[str, typer.Option(help="Cost table of the target.")] = "llama-3.1-8b@h200",
    drafter: Annotated[str, typer.Option(help="Cost table of the drafter.")] = "eagle3-8b@h200",
    batch: Annotated[list[int], typer.Option(help="May be repeated.")] = [1, 4, 16, 64, 256],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 1.0],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 48,
    max_fixed: Annotated[int, typer.Option(help="Largest batch with the largest trees: these take long to compute.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Measure plain decoding, the largest trees and adaptive trees at each batch size."""
    batches, temperatures = tuple(batch), tuple(temperature)
    settings = Settings(model, draft_model, verifier, drafter, max_tokens, batches, temperatures, max_fixed)
    bench = Bench(settings, prompts)
    with progress() as shown:
        rates = bench.rates(shown)
        bounds = bench.bounds()
    program = "python -m benchmarks.scripts.adaptive_batches"
    rows = [replace(rate, outputs=()) for rate in rates]
    tables = [table(rates), bounds_table(bounds)]
    page = Report.here("adaptive-batches", program, "cpu", settings, [*rows, *bounds], tables).publish(out)
    draw(rates, page.with_suffix(".png"))


class RecordingBudget(FixedDraftBudget):
    """The largest trees always; keeps the trees of all steps with the paths that were accepted."""

    def __init__(self) -> None:
        self.found: list[tuple[DraftTree, tuple[int, ...]]] = []

    def observe(self, batch: Sequence[ScheduledSequence], outputs: StepOutputs, times: StepTimes) -> None:
        self.found += [
            (scheduled.tree, output.accepted.path)
            for scheduled, output in zip(batch, outputs, strict=True)
            if scheduled.tree is not None and output.accepted is not None and scheduled.tree.num_drafted
        ]


class Bench:
    """Engines of one target and one head on emulated devices."""

    BOUND_SEQUENCES = 20  # that the trees of a bound come from

    def __init__(self, settings: Settings, file: Path) -> None:
        """Raises ConfigError, CheckpointError."""
        self._settings = settings
        self._head = DraftHead(settings.draft_model)
        tasks = MethodsSettings(
            model=settings.model, methods=(MethodSpec(self._head.method),), prompts=file, num_prompts=10**6
        )
        self._prompts = [task.token_ids for task in load_tasks(tasks)]
        fuser = self._head.build_fuser(settings.model, "float32", "cpu")
        assert fuser is not None
        self._fuser: FeatureFuser = fuser
        self._target: TargetModel = load_target(settings.model, "float32", "cpu", fuser.aux_hidden_state_layers)
        self._tree = self._head.resolve_tree(TreeConfig())
        self._is_block = isinstance(self._drafter(DraftingConfig()), BlockDrafter)

    def rates(self, progress: Progress) -> list[Rate]:
        """Return every policy at every batch and temperature."""
        s, rates = self._settings, list[Rate]()
        for temperature, batch in progress.track(list(itertools.product(s.temperatures, s.batches)), "batches"):
            plain, prompts = 0.0, self.prompts(batch)
            for policy in POLICIES:
                if policy == "fixed" and batch > s.max_fixed:
                    continue
                run, steady = self._run(policy, prompts, temperature)
                rate, tau = run.tokens_per_second, total_stats([run]).acceptance_length or 1.0
                plain = plain or rate
                rates.append(Rate(batch, temperature, policy or "plain", rate, rate / plain, steady, tau, run.outputs))
        return rates

    def prompts(self, count: int) -> list[Prompt]:
        """Return the prompts of the file in turn."""
        return [self._prompts[i % len(self._prompts)] for i in range(count)]

    def _run(self, policy: DraftBudgetPolicy | None, prompts: Sequence[Prompt], temperature: float) -> tuple[Run, float]:
        """Return a run, and its tokens per second while the batch is full and has no prompts."""
        engine, clock = self._engine(policy, prompts)
        outputs, stats, began, steady = [()] * len(prompts), GenerationStats(), clock(), [0.0, 0.0]
        sampling = SamplingParams(self._settings.max_tokens, temperature, ignore_eos=True)
        for place, prompt in enumerate(prompts):
            engine.submit(Request(f"{place}", prompt, replace(sampling, seed=place)))
        while engine.has_work:
            running, step_began, before = engine.scheduler.running, clock(), sum(map(len, outputs))
            is_steady = len(running) >= 0.9 * len(prompts) and not any(sequence.prefilling for sequence in running)
            for chunk in engine.step():
                outputs[int(chunk.request_id)] += chunk.token_ids
                stats.add(chunk)
            if is_steady:
                steady = [steady[0] + sum(map(len, outputs)) - before, steady[1] + clock() - step_began]
        return Run(clock() - began, tuple(outputs), stats), steady[0] / steady[1] if steady[1] else 0.0

    def _engine(self, policy: DraftBudgetPolicy | None, prompts: Sequence[Prompt]) -> tuple[Engine, VirtualClock]:
        s, clock, drafter = self._settings, VirtualClock(), None
        config = EngineConfig(
            max_kv_tokens=len(prompts) * (max(map(len, prompts)) + s.max_tokens + self._tree.num_draft_tokens),
            max_num_seqs=len(prompts),
            prefix_cache=False,
            draft_budget=policy or "fixed",
            emulated_device=s.verifier,
        )
        if policy:
            drafter = self._drafter(DraftingConfig(emulated_device=s.drafter))
            drafter.device = EmulatedDevice(DeviceCosts.read(s.drafter), clock)
        own = self._target.with_features(self._fuser.aux_hidden_state_layers)
        return assemble_engine(own, self._fuser, config, self._tree, drafter, clock=clock), clock

    def _drafter(self, drafting: DraftingConfig) -> NeuralDrafter[Any]:
        drafter = self._head.build_drafter(self._settings.model, "float32", "cpu", self._tree, drafting)
        assert isinstance(drafter, NeuralDrafter)
        return drafter

    def bounds(self) -> list[Bound]:
        """Return the bounds of every batch and temperature, with the trees of one run of a few sequences."""
        s, bounds = self._settings, list[Bound]()
        for temperature in s.temperatures:
            prompts, budget = self.prompts(self.BOUND_SEQUENCES), RecordingBudget()
            engine, _ = self._engine("fixed", prompts)
            engine.budget = budget
            for index, prompt in enumerate(prompts):
                engine.submit(
                    Request(f"{index}", prompt, SamplingParams(s.max_tokens, temperature, seed=index, ignore_eos=True))
                )
            while engine.has_work:
                engine.step()
            context = fmean(map(len, prompts)) + s.max_tokens / 2
            bounds += [self._bound(budget.found, batch, temperature, context) for batch in s.batches]
        return bounds

    def _bound(
        self, found: Sequence[tuple[DraftTree, tuple[int, ...]]], batch: int, temperature: float, context: float
    ) -> Bound:
        verify, draft = DeviceCosts.read(self._settings.verifier), DeviceCosts.read(self._settings.drafter)
        trees, survival = [tree for tree, _ in found], SurvivalModel()
        survival.observe(trees, [path for _, path in found])
        chances = np.concatenate([own[1:] for own in survival.survival(trees)])
        depths = np.concatenate([tree.depths[1:] for tree in trees])
        accepted = np.concatenate([np.isin(np.arange(1, len(tree)), path) for tree, path in found])

        def step_s(rows: float, depth: int, tau: float) -> float:
            """Return seconds of a step with `rows` rows and `tau` tokens of each sequence, and trees of `depth` levels."""
            seconds = verify.seconds("verify", batch * rows, batch * context)
            if depth:
                new = depth if self._is_block else tau
                seconds += draft.seconds("draft_round", batch * new, batch * context)
                seconds += (depth - 1) * draft.seconds("draft_level", batch * self._tree.top_k, batch * context)
            return seconds

        plain = batch / step_s(1, 0, 1)
        best = {"ranked": (plain, 0, 1.0, 1.0), "known": (plain, 0, 1.0, 1.0)}
        for depth in range(1, self._tree.num_steps + 1):
            within = depths <= depth
            for name, order in (("ranked", np.argsort(-chances[within], kind="stable")), ("known", None)):
                right = accepted[within][order] if order is not None else np.ones(int(accepted[within].sum()))
                gained = np.cumsum(right) / len(trees)
                for count in range(0, len(right), max(len(right) // 400, 1)):
                    rows, tau = 1 + (count + 1) / len(trees), 1 + float(gained[count])
                    best[name] = max(best[name], (batch * tau / step_s(rows, depth, tau), depth, rows, tau))
        rate, depth, rows, tau = best["ranked"]
        return Bound(batch, temperature, context, plain, rate / plain, best["known"][0] / plain, depth, rows, tau)


def table(rates: Sequence[Rate]) -> Table:
    """Return the table of the report."""
    plain = {(rate.temperature, rate.batch): rate for rate in rates if rate.policy == "plain"}
    rows = []
    for r in rates:
        base = plain[r.temperature, r.batch]
        num_equal = sum(a == b for a, b in zip(r.outputs, base.outputs, strict=True))
        rows.append((
            f"{r.temperature:g}", f"{r.batch}", r.policy, number(r.tokens_per_s), f"{r.relative:.3f}",
            f"{r.steady / (base.steady or 1.0):.2f}", f"{r.tau:.2f}", f"{num_equal} of {len(r.outputs)}",
        ))  # fmt: skip
    note = (
        "Tokens per emulated second of a batch decoded to its end, prefill included, and relative to plain decoding. "
        "steady: the same of steps without prompts that nine of ten places are taken in. tau: tokens per verify step. as "
        "plain: outputs equal to plain decoding."
    )
    columns = ("temperature", "batch", "policy", "tokens/s", "relative", "steady", "tau", "as plain")
    return Table("Rates", columns, tuple(rows), note)


def bounds_table(bounds: Sequence[Bound]) -> Table:
    """Return the table of the bounds."""
    rows = tuple(
        (
            f"{b.temperature:g}", f"{b.batch}", f"{b.context:.0f}", number(b.plain),
            f"{b.ranked:.2f}", f"{b.known:.2f}", f"{b.depth}",
            f"{b.rows:.2f}", f"{b.tau:.2f}",
        )
        for b in bounds
    )  # fmt: skip
    note = (
        "Of steps without prompts, by arithmetic: the most over plain decoding, with the whole trees of one run. ranked: "
        "nodes in the order of how likely nodes with their scores were accepted in this run; the best depth and number of "
        "them, and tokens of such a step. known: accepted nodes alone are verified."
    )
    columns = ("temperature", "batch", "context", "plain tokens/s", "ranked", "known", "depth", "rows", "tau")
    return Table("Bounds", columns, rows, note)


def draw(rates: Sequence[Rate], file: Path) -> None:
    """Rates over plain decoding by batch, beside published ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for temperature in sorted({rate.temperature for rate in rates}):
        for policy, style in (("adaptive", "o-"), ("fixed", "s:")):
            own = [rate for rate in rates if (rate.temperature, rate.policy) == (temperature, policy)]
            label = f"Eyas, {policy}, temperature {temperature:g}"
            axes.plot([rate.batch for rate in own], [rate.relative for rate in own], style, label=label)
    for name, points in PUBLISHED.items():
        axes.plot(list(points), list(points.values()), "x--", color="0.5" if "vLLM" in name else "0.7", label=name)
    axes.axhline(1, color="0.8", zorder=0)
    axes.set(xscale="log", xlabel="sequences at a time", ylabel="rate over plain decoding", ylim=(0, None))
    batches = sorted({rate.batch for rate in rates})
    axes.set_xticks(batches, [f"{batch}" for batch in batches])
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        typer.run(main)
    except EyasError as error:
        sys.exit(f"error: {error}")
