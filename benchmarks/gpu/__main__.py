"""`make gpu`: everything that a first GPU has to show, in one run of at most 25 minutes, as one dated report.

Beside the report it writes cost tables, one JSON file for each target and head, that emulation and planning read.
A stage that fails is reported with its error, and the others still run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.gpu import drafts, end_to_end, kernels, steps
from benchmarks.gpu.measuring import Part, Scale, full_scale, measure_rates
from eyas.bench.report import Report, Table

PROGRAM = "python -m benchmarks.gpu"
RESULTS = Path("benchmarks/results")
STAGES = ("tests", "kernels", "drafts", "steps", "end-to-end")


@dataclass(frozen=True)
class Settings:
    """What was asked for. minutes: no stage begins after them."""

    stages: tuple[str, ...]
    minutes: float
    scale: Scale


app = typer.Typer(add_completion=False)


@app.command()
def main(
    stage: Annotated[list[str], typer.Option(help=f"Only these of {', '.join(STAGES)}; may be repeated.")] = list(STAGES),  # noqa: B006
    minutes: Annotated[float, typer.Option(help="No stage begins later.")] = 25.0,
    out: Annotated[Path, typer.Option(help="Folder of the report and the cost tables.")] = RESULTS,
) -> None:
    """Test, then measure kernels, draft rounds, verify steps and the widened demo on this machine's GPU."""
    unknown = [name for name in stage if name not in STAGES]
    if unknown:
        raise typer.BadParameter(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        print("error: no CUDA device here; `make gpu` measures a GPU, see `nvidia-smi`", file=sys.stderr)
        raise typer.Exit(1)
    run(torch.device("cuda"), Settings(tuple(stage), minutes, full_scale()), out)


def run(device: torch.device, settings: Settings, out: Path) -> Path:
    """Run the stages, write the report also if a stage fails or Ctrl-C ends the run, and return the path of its page."""
    parts: dict[str, Part] = {}
    deadline = time.monotonic() + 60 * settings.minutes
    try:
        with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
            whole = progress.add_task("make gpu", total=len(settings.stages))
            for name, work in _stages(device, settings, deadline, progress).items():
                parts[name] = _run_stage(work, deadline)
                progress.advance(whole)
    finally:
        page = _publish(device, settings, parts, out)
    return page


def _stages(
    device: torch.device, settings: Settings, deadline: float, progress: Progress
) -> Mapping[str, Callable[[], Part]]:
    scale = settings.scale
    rates = measure_rates(device, scale)
    works: dict[str, Callable[[], Part]] = {
        "tests": lambda: run_tests(deadline - time.monotonic()),
        "kernels": lambda: kernels.measure(device, scale, rates),
        "drafts": lambda: drafts.measure(device, scale, rates),
        "steps": lambda: steps.measure(device, scale, rates),
        "end-to-end": lambda: end_to_end.measure(device, scale, progress),
    }
    return {name: works[name] for name in settings.stages}


def _run_stage(work: Callable[[], Part], deadline: float) -> Part:
    if time.monotonic() > deadline:
        return Part(error="not begun: the time was up")
    try:
        return work()
    except Exception as error:  # a GPU that has never run Eyas may refuse anything; the other stages are worth having
        traceback.print_exc()
        return Part(error=f"{type(error).__name__}: {error}")


def run_tests(seconds: float) -> Part:
    """tests/gpu in a process of its own, and its last lines."""
    if importlib.util.find_spec("pytest") is None:
        return Part(error="pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
    lines = done.stdout.strip().splitlines()
    failed = tuple((line,) for line in lines if line.startswith(("FAILED", "ERROR")))
    outcome = (lines[-1] if lines else "no output",)
    error = f"tests/gpu exited with {done.returncode}" if done.returncode else ""
    return Part([Table("tests/gpu", ("outcome",), (*failed, outcome))], {"output": lines[-40:]}, error=error)


def _publish(device: torch.device, settings: Settings, parts: Mapping[str, Part], out: Path) -> Path:
    """Write report, cost tables and picture."""
    stages = [(name, part.error or "done") for name, part in parts.items()]
    stages += [(name, "not reached") for name in settings.stages if name not in parts]
    tables = [Table("Stages", ("stage", "outcome"), tuple(stages)), *(t for part in parts.values() for t in part.tables)]
    results = {name: part.results for name, part in parts.items()}
    facts = {"stages": settings.stages, "minutes": settings.minutes, "repeats": settings.scale.repeats}
    page = Report.here("gpu", PROGRAM, str(device), facts, results, tables).publish(out)
    for costs in (costs for part in parts.values() for costs in part.costs):
        file = page.with_name(f"{page.stem}-{costs.model.partition(',')[0]}.costs.json")
        costs.write(file)
        print(f"cost table: {file}")
    measured = parts["steps"].results if "steps" in parts else None
    if measured and steps.draw_roofline(measured, page.with_suffix(".png")):
        print(f"drawn as {page.with_suffix('.png')}")
    elif measured:
        print("no picture: it needs matplotlib")
    return page


if __name__ == "__main__":
    app()
