"""The commands `eyas check head`, `eyas check equality` and `eyas drafters`. They import torch only when they run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from eyas.bench.settings import OfflineSettings
from eyas.cli import options
from eyas.cli.bench import MaxTokens, Model, NumDraftTokens, NumPrompts, NumSteps, Threads
from eyas.config import EngineConfig, TreeConfig
from eyas.config.engine import KVCacheDtype
from eyas.errors import CheckpointError, ConfigError, EyasError
from eyas.progress import progress

if TYPE_CHECKING:
    from eyas.bench.equality import EqualityReport
    from eyas.models.heads.eagle_config import HeadWiring
    from eyas.models.heads.validation import WiringReport

check = typer.Typer(add_completion=False, no_args_is_help=True)


@check.callback()
def _check() -> None:
    """Check a model and its draft head before serving them."""


@check.command()
def head(
    model: Model,
    draft_model: Annotated[
        str, typer.Option(help="Folder or hub id of an EAGLE or block head; by default the model's own MTP module.")
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help="eagle1, eagle2, eagle3, peagle, mtp, dspark, dflash or dflash2; by default what the head is for."
        ),
    ] = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: Threads = 0,
    write: Annotated[bool, typer.Option("--write", help="Record the best wiring in the head's config.json.")] = False,
) -> None:
    """Find the wiring of a draft head. Exit status 1 if it guesses no better than chance with any wiring."""
    with progress() as shown:
        shown.show("importing torch")
        from eyas.device.placement import use_threads
        from eyas.drafters.draft_head import DraftHead
        from eyas.models.loading import load_target
        from eyas.models.placement import pass_dtype, resolve_placement

        device, dtype = resolve_placement(device, dtype, model)
        passes = pass_dtype(model, dtype, device, EngineConfig(), threads)
        use_threads(threads, (device, passes))
        head = DraftHead(draft_model, method, model, has_default=True)
        method = head.method
        checked = draft_model or model
        shown.show(f"loading {model}")
        report = None
        if head.drafts:
            target = load_target(model, dtype, device, passes=passes)
            shown.show("trying the wirings of the head")
            report = head.validate(target, model, passes, device)
    if report is None:
        raise ConfigError(
            f"method {method!r} has no head to check; take an EAGLE or block method, or a model with an MTP module"
        )
    Console().print(_wiring_table(report))
    print(report)
    report.require(checked)
    if write:
        print(f"written to {_write_wiring(checked, report.best.wiring)}")


def _write_wiring(draft_model: str, wiring: HeadWiring) -> Path:
    """Record a wiring in the head's config.json, where every loader of Eyas reads it; the path of the file.

    Raises CheckpointError for a hub id: its files are shared, and a new download would drop the record.
    """
    from eyas.models.checkpoint import WIRING_KEY, Checkpoint

    if not Path(draft_model).is_dir():
        raise CheckpointError(f"{draft_model!r} is not a local folder; copy the head into one, and run the check on that")
    file = Path(draft_model, "config.json")
    file.write_text(json.dumps({**Checkpoint(draft_model).config, WIRING_KEY: asdict(wiring)}, indent=1) + "\n")
    return file


def _wiring_table(report: WiringReport) -> Table:
    own = ("anchor's row",) if report.is_block else ("residual", "output")
    table = Table("hidden states", *own, "first guess", "second guess", "accepted", "")
    for score in report.scores:
        wiring, notes = score.wiring, {"config": score is report.scores[0], "best": score is report.best}
        table.add_row(
            ", ".join(map(str, wiring.aux_hidden_state_layers)),
            *(
                ["predicts" if wiring.sample_from_anchor else "predicts nothing"]
                if report.is_block
                else ["normed" if wiring.norm_before_residual else "plain", wiring.output]
            ),
            *(f"{share:.1%}" for share in (score.first, score.second, score.accepted)),
            ", ".join(note for note, holds in notes.items() if holds),
        )
    return table


@check.command()
def equality(
    model: Model,
    draft_model: Annotated[
        str, typer.Option(help="Folder or hub id of a draft model; without one, trees are made of the plain output.")
    ] = "",
    method: Annotated[str, typer.Option(help="Drafting method; by default the one that the draft model is for.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with token_ids or text; random tokens if left out.")
    ] = None,
    num_prompts: NumPrompts = 0,
    dtype: options.Dtype = "auto",
    temperature: Annotated[float, typer.Option(help="Randomness of sampling; 0 takes the likeliest token.")] = 0.0,
    device: options.Device = "auto",
    max_tokens: MaxTokens = 96,
    num_draft_tokens: NumDraftTokens = TreeConfig.num_draft_tokens,
    num_steps: NumSteps = TreeConfig.num_steps,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Use deterministic mode for both.")] = False,
    kv_cache_dtype: Annotated[str, typer.Option(help="Type of keys and values: auto, fp8, fp8_e4m3 or fp8_e5m2.")] = "auto",
    threads: Threads = 0,
) -> None:
    """Compare plain with speculative decoding. Exit status 1 if rounding cannot explain a difference."""
    try:
        with progress() as shown:
            shown.show("importing torch")
            from eyas.bench.equality import compare
            from eyas.models.placement import resolve_placement

        device, dtype = resolve_placement(device, dtype, model)
        settings = OfflineSettings(
            model, draft_model, method, prompts, num_prompts, batches=(8,), temperatures=(temperature,),
            max_tokens=max_tokens, tree=TreeConfig(num_draft_tokens, num_steps), dtype=dtype, device=device, threads=threads,
        )  # fmt: skip
        modes = EngineConfig(deterministic=deterministic, kv_cache_dtype=cast(KVCacheDtype, kv_cache_dtype))
        with progress() as shown:
            report = compare(settings, modes, shown)
    except (EyasError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    Console().print(_equality_table(report))
    print(report)
    if not report.holds:
        raise typer.Exit(1)


def _equality_table(report: EqualityReport) -> Table:
    table = Table("prompt", "tokens", "result", "at", "plain", "spec.", "top gap", "gap", "margin")
    for index, comparison in enumerate(report.comparisons):
        row, found = [f"{index}", f"{comparison.num_tokens}"], comparison.divergence
        if found is None:
            table.add_row(*row, "equal")
            continue
        tokens = (f"{found.position}", f"{found.plain}", f"{found.speculative}")
        gaps = (f"{gap:.2g}" for gap in (found.top_gap, found.token_gap, found.margin))
        table.add_row(*row, "rounding" if found.explained else "DIFFERS", *tokens, *gaps)
    return table


def drafters() -> None:
    """List the drafting methods: what each needs, and what its `draft_model` is."""
    from eyas.config.drafting import METHOD_FACTS

    table = Table("method", "needs", "draft_model")
    for name, facts in METHOD_FACTS.items():
        table.add_row(name, ", ".join(facts.needs) or "tokens alone", facts.head or facts.optional_head or "none")
    Console().print(table)
