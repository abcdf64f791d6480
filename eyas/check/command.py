"""How a draft head is to be read: folders of target and head in, what a probe found out; writes it down if asked.

Knows no screen.

`eyas check head`: options in, a table of readings and an exit status out. Loads torch only once the check starts.

`eyas check`: options in, a table and an exit status out. Loads torch only once a check starts.

`eyas drafters`: nothing in, a table of the drafting methods out. Loads torch only once it is asked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eyas.bench.settings import OfflineSettings
from eyas.config import Dtype, TreeConfig
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.check.equality import Equality
    from eyas.models.heads.eagle_validation import WiringReport


def head(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft: Annotated[str, typer.Option(help="Folder or hub id of an EAGLE head.")],
    drafter: Annotated[str, typer.Option(help="eagle1, eagle2 or eagle3.")] = "eagle3",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its choice.")] = 0,
    write: Annotated[bool, typer.Option("--write", help="Record what works in the head's config.json.")] = False,
) -> None:
    """Try out how a draft head is to be read; exit status 1 if it guesses no better than chance in any way."""
    from eyas.check.head import check_wiring, record

    try:
        finding = check_wiring(target, draft, drafter, dtype, device, threads)
        Console().print(_table(finding))
        print(finding)
        finding.require(draft)
        if write:
            print(f"written to {record(draft, finding.best.wiring)}")
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _table(finding: WiringReport) -> Table:
    table = Table("taps", "residual", "output", "first guess", "second guess", "accepted", "")
    for trial in finding.scores:
        reading = trial.wiring
        notes = [note for note, holds in (("config", trial is finding.scores[0]), ("best", trial is finding.best)) if holds]
        table.add_row(
            ", ".join(map(str, reading.aux_hidden_state_layers)), "normed" if reading.norm_before_residual else "plain", reading.output,
            *(f"{100 * share:.1f} %" for share in (trial.first, trial.second, trial.accepted)), ", ".join(notes),
        )  # fmt: skip
    return table


check = typer.Typer(add_completion=False, no_args_is_help=True)
check.command()(head)


@check.callback()
def _check() -> None:
    """Check what Eyas claims, on your own models."""


@check.command()
def equality(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft: Annotated[
        str, typer.Option(help="Folder or hub id of a draft head; without one, trees are made of the plain output.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="Drafting method; eagle3 if only a draft head is given.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with token_ids or text; random tokens if left out.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit for each prompt.")] = 96,
    nodes: Annotated[int, typer.Option(help="Most nodes of a draft tree, the root included.")] = TreeConfig.num_draft_tokens,
    depth: Annotated[int, typer.Option(help="Levels below the root.")] = TreeConfig.num_steps,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Run both ways in deterministic mode.")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its choice.")] = 0,
) -> None:
    """Decode plainly and speculatively, and explain the first token that differs; exit status 1 if one cannot be."""
    try:
        tree = TreeConfig(nodes, depth)
        settings = OfflineSettings(
            target, draft, drafter, prompts, (8,), (temperature,), max_tokens, tree=tree, dtype=cast(Dtype, dtype),
            device=device, threads=threads,
        )  # fmt: skip
        result = _compare(settings, deterministic)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    Console().print(_command_table(result))
    print(_verdict(result))
    if not result.holds:
        raise typer.Exit(1)


def _compare(settings: OfflineSettings, deterministic: bool) -> Equality:
    from eyas.check.equality import compare
    from eyas.models.checkpoint import resolve_placement

    settings = resolve_placement(settings, settings.target)
    with Progress(console=Console(stderr=True)) as progress:
        return compare(settings, deterministic, progress)


def _command_table(result: Equality) -> Table:
    table = Table("prompt", "tokens", "result", "at", "plain", "spec.", "gap", "apart", "margin")
    for index, comparison in enumerate(result.comparisons):
        found = comparison.divergence
        if found is None:
            table.add_row(f"{index}", f"{comparison.num_tokens}", "equal")
            continue
        verdict = "rounding" if found.explained else "DIFFERS"
        places = (f"{found.position}", f"{found.plain}", f"{found.speculative}")
        numbers = (f"{number:.2g}" for number in (found.gap, found.apart, found.margin))
        table.add_row(f"{index}", f"{comparison.num_tokens}", verdict, *places, *numbers)
    return table


def _verdict(result: Equality) -> str:
    total = len(result.comparisons)
    equal = sum(comparison.divergence is None for comparison in result.comparisons)
    wrong = sum(not comparison.holds for comparison in result.comparisons)
    return (
        f"{equal} of {total} equal, {total - equal - wrong} explained by rounding, {wrong} not explained; "
        f"tau {result.stats.acceptance_length:.2f}"
    )


def drafters() -> None:
    """List the drafting methods: what each needs, and what its `draft_model` is."""
    from eyas.drafters.registry import METHODS

    table = Table("method", "needs", "draft_model")
    for name, method in METHODS.items():
        table.add_row(name, ", ".join(method.needs) or "tokens alone", method.head or method.optional_head or "none")
    Console().print(table)
