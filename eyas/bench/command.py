"""`eyas bench`: options in, report files out. Loads torch only once a benchmark starts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress

from eyas.bench.settings import MethodSpec, MethodsSettings, OfflineSettings
from eyas.config import DraftBudgetPolicy, Dtype, TreeConfig
from eyas.errors import ConfigError, EyasError

# Drawing takes time away from what is measured.
REFRESHES_PER_SECOND = 1

bench = typer.Typer(add_completion=False, no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure, and write a dated report."""


@bench.command()
def offline(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft: Annotated[str, typer.Option(help="Folder or hub id of a draft head; without one, plain decoding only.")] = "",
    drafter: Annotated[str, typer.Option(help="Drafting method; eagle3 if only a draft head is given.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with token_ids or text; random tokens if left out.")
    ] = None,
    batch: Annotated[list[int], typer.Option(help="Prompts decoded at once; may be repeated.")] = [1, 8],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit for each prompt.")] = 96,
    groups: Annotated[int, typer.Option(help="Fewest batches to measure; there are always enough for all prompts.")] = 5,
    rows: Annotated[list[int], typer.Option(help="Rows of a verify step; may be repeated.")] = [1, 8, 16, 32, 64],  # noqa: B006
    nodes: Annotated[int, typer.Option(help="Most nodes of a draft tree, the root included.")] = TreeConfig.num_draft_tokens,
    depth: Annotated[int, typer.Option(help="Levels below the root.")] = TreeConfig.num_steps,
    width: Annotated[int, typer.Option(help="Frontier of a level.")] = TreeConfig.top_k,
    budget: Annotated[str, typer.Option(help="fixed: always the largest trees; adaptive: as large as pays.")] = "fixed",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its choice.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Compare plain decoding, speculative decoding and transformers' generate in this process, batch by batch in turn."""
    try:
        tree = TreeConfig(nodes, depth, width)
        settings = OfflineSettings(
            target, draft, drafter, prompts, tuple(batch), tuple(temperature), max_tokens, groups, tuple(rows), tree,
            cast(DraftBudgetPolicy, budget), cast(Dtype, dtype), device, threads,
        )  # fmt: skip
        _offline(settings, out)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@bench.command()
def methods(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    prompts: Annotated[Path, typer.Option(help="JSON Lines with token_ids, text or turns, and a category or task.")],
    method: Annotated[list[str], typer.Option(help="NAME or NAME=HEAD, such as eagle3=FOLDER; may be repeated.")],
    num_prompts: Annotated[int, typer.Option(help="Prompts to decode, as many of each task as possible.")] = 20,
    temperature: Annotated[list[float], typer.Option(help="May be repeated.")] = [0.0, 0.6, 1.0],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit for each prompt.")] = 96,
    nodes: Annotated[int, typer.Option(help="Most nodes of a draft tree, the root included.")] = TreeConfig.num_draft_tokens,
    depth: Annotated[int, typer.Option(help="Levels below the root.")] = TreeConfig.num_steps,
    width: Annotated[int, typer.Option(help="Frontier of a level.")] = TreeConfig.top_k,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its choice.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Decode the same prompts with every method, one after the other, and draw who is how fast."""
    try:
        specs = tuple(map(MethodSpec.parse, method))
        settings = MethodsSettings(
            target, specs, prompts, num_prompts, tuple(temperature), max_tokens, TreeConfig(nodes, depth, width),
            cast(Dtype, dtype), device, threads,
        )  # fmt: skip
        _methods(settings, out)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _methods(settings: MethodsSettings, out: Path) -> None:
    from eyas.bench.methods import draw, measure
    from eyas.bench.report import Report
    from eyas.models.checkpoint import resolve_placement

    settings = resolve_placement(settings, settings.target)
    with Progress(console=Console(stderr=True), refresh_per_second=REFRESHES_PER_SECOND) as progress:
        results = measure(settings, progress)
    command = shlex.join(["eyas", *sys.argv[1:]])
    page = Report.here("methods", command, settings.device, settings, results, results.tables()).write(out)
    print(page.read_text(encoding="utf-8"))
    print(f"written to {page} and {page.with_suffix('.json')}")
    try:
        draw(results.scores, page.with_suffix(".png"))
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"drawn as {page.with_suffix('.png')}")


def _offline(settings: OfflineSettings, out: Path) -> None:
    from eyas.bench.offline import measure
    from eyas.bench.report import Report
    from eyas.models.checkpoint import resolve_placement

    settings = resolve_placement(settings, settings.target)
    with Progress(console=Console(stderr=True), refresh_per_second=REFRESHES_PER_SECOND) as progress:
        results = measure(settings, progress)
    command = shlex.join(["eyas", *sys.argv[1:]])
    page = Report.here("offline", command, settings.device, settings, results, results.tables()).write(out)
    print(page.read_text(encoding="utf-8"))
    print(f"written to {page} and {page.with_suffix('.json')}")
