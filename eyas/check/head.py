"""`eyas check head`: options in, a table of readings and an exit status out. Loads torch only once the check starts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.models.heads.eagle.probe import Finding


def head(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft: Annotated[str, typer.Option(help="Folder or hub id of an EAGLE head.")],
    drafter: Annotated[str, typer.Option(help="eagle1, eagle2 or eagle3.")] = "eagle3",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its choice.")] = 0,
    write: Annotated[bool, typer.Option("--write", help="Record what works in the head's config.json.")] = False,
) -> None:
    """Try out how a draft head is to be read; exit status 1 if it guesses no better than chance in any way."""
    from eyas.check.wiring import check_wiring, record

    try:
        finding = check_wiring(target, draft, drafter, dtype, device, threads)
        Console().print(_table(finding))
        print(finding)
        finding.require(draft)
        if write:
            print(f"written to {record(draft, finding.best.reading)}")
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _table(finding: Finding) -> Table:
    table = Table("taps", "residual", "output", "first guess", "second guess", "accepted", "")
    for trial in finding.trials:
        reading = trial.reading
        notes = [note for note, holds in (("config", trial is finding.trials[0]), ("best", trial is finding.best)) if holds]
        table.add_row(
            ", ".join(map(str, reading.taps)), "normed" if reading.norm_before_residual else "plain", reading.output,
            *(f"{100 * share:.1f} %" for share in (trial.first, trial.second, trial.accepted)), ", ".join(notes),
        )  # fmt: skip
    return table
