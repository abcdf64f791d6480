"""Measures tree sizes by `engine.draft_budget` against plain decoding, by batch size, on emulated GPUs in virtual time.

Acceptance is real, passes take the times of a table, host work takes none, and no machine is too busy. Writes a dated
report and a picture: `python -m benchmarks.scripts.adaptive_batches`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from eyas.bench.report import Report, Table, number
from eyas.bench.results import total_stats
from eyas.bench.settings import MethodSpec, MethodsSettings, groups, load_tasks
from eyas.bench.timing import EngineContender
from eyas.config import DraftBudgetPolicy, DraftingConfig, EngineConfig, TreeConfig
from eyas.config.device_costs import DeviceCosts
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.registry import build_drafter, build_fuser, default_method, resolve_tree
from eyas.engine.build import assemble_engine
from eyas.errors import EyasError
from eyas.models.emulation import EmulatedDevice, VirtualClock
from eyas.models.target import load_target

POLICIES: tuple[DraftBudgetPolicy | None, ...] = (None, "fixed", "adaptive")
# Published speedups by batch, of other models on other machines: SGLang with EAGLE-3, and vLLM with adaptive DSpark.
PUBLISHED = {"SGLang, EAGLE-3": {2: 1.81, 64: 1.38}, "vLLM, adaptive DSpark": {4: 2.37, 16: 2.07, 64: 1.74, 256: 1.5}}


@dataclass(frozen=True)
class Rate:
    """policy: "plain", "fixed" or "adaptive". relative: to plain decoding."""

    batch: int
    temperature: float
    policy: str
    tokens_per_s: float
    relative: float
    tau: float
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Settings:
    """verifier, drafter: cost tables."""

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
    settings = Settings(model, draft_model, verifier, drafter, max_tokens, tuple(batch), tuple(temperature), max_fixed)
    try:
        with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
            rates = measure(settings, prompts, progress)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    program = "python -m benchmarks.scripts.adaptive_batches"
    rows = [replace(rate, outputs=()) for rate in rates]
    page = Report.here("adaptive-batches", program, "cpu", settings, rows, [table(rates)]).publish(out)
    draw(rates, page.with_suffix(".png"))


def measure(settings: Settings, file: Path, progress: Progress) -> list[Rate]:
    """Every policy at every batch and temperature."""
    method = default_method("", settings.draft_model)
    tasks = MethodsSettings(model=settings.model, methods=(MethodSpec(method),), prompts=file, num_prompts=10**6)
    prompts = [task.token_ids for task in load_tasks(tasks)]
    fuser = build_fuser(method, settings.draft_model, settings.model, "float32", "cpu")
    assert fuser is not None
    target = load_target(settings.model, "float32", "cpu", fuser.aux_hidden_state_layers)
    cells = [(temperature, batch) for temperature in settings.temperatures for batch in settings.batches]
    rates: list[Rate] = []
    for temperature, batch in progress.track(cells, description="batches"):
        (group, *_) = groups(prompts, batch, 1)
        plain = 0.0
        for policy in POLICIES:
            if policy == "fixed" and batch > settings.max_fixed:
                continue
            clock = VirtualClock()
            tree = resolve_tree(TreeConfig(), method, settings.draft_model)
            longest = max(map(len, group)) + settings.max_tokens + tree.num_draft_tokens
            config = EngineConfig(
                max_kv_tokens=batch * longest,
                max_num_seqs=batch,
                prefix_cache=False,
                draft_budget=policy or "fixed",
                emulated_device=settings.verifier,
            )
            drafter = None
            if policy:
                args = settings.model, settings.draft_model, "float32", "cpu", tree, DraftingConfig()
                drafter = build_drafter(method, *args)
                assert isinstance(drafter, NeuralDrafter)
                drafter.emulate(EmulatedDevice(DeviceCosts.read(settings.drafter), clock))
            own = target.with_features(fuser.aux_hidden_state_layers)
            engine = assemble_engine(own, fuser, config, tree, drafter, clock=clock)
            contender = EngineContender(engine, target.device)
            contender.now = clock
            sampling = replace(tasks.sampling(temperature), max_tokens=settings.max_tokens)
            run = contender.run(group, sampling)
            plain = plain or run.tokens_per_second
            tau = total_stats([run]).acceptance_length or 1.0
            name = policy or "plain"
            rates.append(
                Rate(batch, temperature, name, run.tokens_per_second, run.tokens_per_second / plain, tau, run.outputs)
            )
    return rates


def table(rates: Sequence[Rate]) -> Table:
    """The table of the report."""
    plain = {(rate.temperature, rate.batch): rate for rate in rates if rate.policy == "plain"}
    rows = tuple(
        (
            f"{rate.temperature:g}",
            f"{rate.batch}",
            rate.policy,
            number(rate.tokens_per_s),
            f"{rate.relative:.2f}",
            f"{rate.tau:.2f}",
            f"{sum(a == b for a, b in zip(rate.outputs, plain[rate.temperature, rate.batch].outputs, strict=True))}",
        )
        for rate in rates
    )
    note = (
        "Tokens per emulated second of a batch decoded to its end, prefill included; relative to plain decoding; tokens per "
        "verify step; outputs equal to plain decoding."
    )
    return Table("Rates", ("temperature", "batch", "policy", "tokens/s", "relative", "tau", "as plain"), rows, note)


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
    typer.run(main)
