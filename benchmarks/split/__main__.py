"""Measures a verifier and a drafter apart: `python -m benchmarks.split` writes a dated report and a timeline.

Plain decoding, serial drafting and drafting ahead take turns on the verifiers; each kind of drafting has a draft service.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, cast

import typer

from benchmarks.split.results import (
    MODES,
    Decoded,
    Mode,
    Shares,
    SplitResult,
    SplitResults,
    SplitSettings,
    agreement,
    result,
    with_references,
)
from benchmarks.split.services import Split, read_log, running_split, warm_up
from benchmarks.split.timeline import Timeline, draw, typical
from eyas.bench.report import Report
from eyas.bench.settings import MethodSpec, Prompt, groups, load_tasks
from eyas.bench.timing import rotated
from eyas.cli.bench import RESULTS
from eyas.config import DraftAheadConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.emulation.costs import DeviceCosts
from eyas.errors import EyasError
from eyas.progress import Progress, progress


def measure(settings: SplitSettings, progress: Progress) -> tuple[SplitResults, list[Timeline]]:
    """Measure every temperature, batch, delay and number of verifiers. Raises EyasError."""
    method = DraftHead(settings.draft_model, settings.methods[0].name).method
    costs = {name: DeviceCosts.read(getattr(settings, name)).scaled(settings.scale) for name in ("verifier", "drafter")}
    prompts = [task.token_ids for task in load_tasks(settings)]
    results: list[SplitResult] = []
    timelines: list[Timeline] = []
    axes = settings.temperatures, settings.batches, settings.delays, settings.verifiers
    firsts = tuple(axis[0] for axis in axes[1:])
    progress.show("starting the services")
    with running_split(settings, costs, method) as split:
        warm_up(split, prompts[0])
        for temperature, batch, delay, verifiers in itertools.product(*axes):
            for proxy in split.proxies.values():
                proxy.delay_s = delay * costs["verifier"].seconds("verify", 1)
            runs = run_modes(split, settings, groups(prompts, batch, 1), temperature, verifiers, progress)
            cell = temperature, batch, delay
            found = [summary(split, mode, cell, own) for mode, own in runs.items()]
            plain = [group for own in runs.get("plain", []) for group in own]
            agreed = [agreement([group for own in runs[r.mode] for group in own], plain) if plain else "" for r in found]
            results += with_references([replace(r, identical=text) for r, text in zip(found, agreed, strict=True)])
            if (batch, delay, verifiers) == firsts:
                timelines += timelines_of(split, {mode: own[0] for mode, own in runs.items()}, temperature)
    return SplitResults(tuple(results), costs["verifier"], costs["drafter"], settings.tree), timelines


def run_modes(
    split: Split,
    settings: SplitSettings,
    batches: Sequence[Sequence[Prompt]],
    temperature: float,
    verifiers: int,
    progress: Progress,
) -> dict[Mode, list[list[list[Decoded]]]]:
    """Decode every group of prompts in every mode, by verifier. One verifier alone has all modes of a group in turn."""
    runs: dict[Mode, list[list[list[Decoded]]]] = {mode: [[] for _ in range(verifiers)] for mode in settings.modes}
    sampling, label = settings.sampling(temperature), f"temperature {temperature:g}, batch {len(batches[0])}"
    few = replace(sampling, max_tokens=settings.plain_tokens or settings.max_tokens)
    parts = [[group] for group in batches] if verifiers == 1 else [batches]
    for index, part in enumerate(progress.track(parts, f"{label}, {verifiers} verifiers")):
        for mode in rotated(list(settings.modes), index):
            found = split.decode_on_all(cast(Mode, mode), part, few if mode == "plain" else sampling, verifiers)
            for own, more in zip(runs[cast(Mode, mode)], found, strict=True):
                own += more
            split.check()
    return runs


def summary(
    split: Split, mode: Mode, cell: tuple[float, int, float], found: Sequence[Sequence[Sequence[Decoded]]]
) -> SplitResult:
    """Return the result of a mode, with the passes that its devices have logged. found: groups by verifier."""
    drafter = read_log(split.logs[mode]) if mode in split.logs else []
    shares, seconds = list[Shares](), list[float]()
    for log, own in zip(split.verifier_logs, found, strict=False):
        verifier = read_log(log)
        for group in own:
            started, ended = min(r.started for r in group), max(r.ended for r in group)
            shares.append(Shares.between(started, ended, verifier, drafter))
            seconds += [r.ended - r.began for r in verifier if started <= r.launched <= ended]
    mean = Shares(*(fmean(getattr(each, name) for each in shares) for name in ("verifier", "drafter", "late")))
    return result(mode, *cell, [group for own in found for group in own], mean, fmean(seconds), len(found))


def timelines_of(split: Split, runs: Mapping[Mode, list[list[Decoded]]], temperature: float) -> list[Timeline]:
    """Return the rounds of a typical request of each mode with drafts."""
    verifier = read_log(split.verifier_logs[0])
    return [
        Timeline.of(
            f"{mode}, temperature {temperature:g}",
            typical([r for group in runs[mode] for r in group]),
            verifier,
            read_log(log),
        )
        for mode, log in split.logs.items()
    ]


def split(
    model: Annotated[str, typer.Option(help="Folder or hub id of the target model.")],
    draft_model: Annotated[str, typer.Option(help="Folder or hub id of a draft head.")],
    prompts: Annotated[Path, typer.Option(help="JSON Lines with token_ids, text or turns.")],
    method: Annotated[str, typer.Option(help="Drafting method; by default the one that the draft model is for.")] = "",
    verifier: Annotated[str, typer.Option(help="Cost table of the verifier's device, see docs/split.md.")] = "60ms",
    drafter: Annotated[str, typer.Option(help="Cost table of the drafter's device.")] = "6ms",
    scale: Annotated[float, typer.Option(help="All times are multiplied by it; a busy machine needs more.")] = 1.0,
    delay: Annotated[list[float], typer.Option(help="Delay of each way, in verify passes; may be repeated.")] = [0.0],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Prompts decoded at once; may be repeated.")] = [1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="Temperature, 0 for greedy; may be repeated.")] = [0.0, 1.0],  # noqa: B006
    verifiers: Annotated[list[int], typer.Option(help="Verifiers that share the draft service; may be repeated.")] = [1],  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="plain, serial and ahead; may be repeated.")] = list(MODES),  # noqa: B006
    num_prompts: Annotated[int, typer.Option(help="How many prompts to decode.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64,
    plain_tokens: Annotated[int, typer.Option(help="Tokens for each prompt in plain decoding; 0 takes --max-tokens.")] = 0,
    num_draft_tokens: Annotated[int, typer.Option(help="Most nodes of a draft tree.")] = TreeConfig.num_draft_tokens,
    num_steps: Annotated[int, typer.Option(help="Levels of a draft tree; 0 takes those of the method.")] = 0,
    top_k: Annotated[int, typer.Option(help="Nodes that each level expands.")] = TreeConfig.top_k,
    ahead_top_k: Annotated[int, typer.Option(help="Rows of a session in a pass ahead, or blocks.")] = 64,
    ahead_steps: Annotated[int, typer.Option(help="Deepest level that drafting ahead grows.")] = DraftAheadConfig.num_steps,
    threads: Annotated[int, typer.Option(help="CPU threads of each service.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = RESULTS,
) -> None:
    """Measure verifiers and draft service as processes on emulated devices; write a table and a timeline."""
    settings = SplitSettings(
        model=model,
        methods=(MethodSpec(method, draft_model),),
        prompts=prompts,
        num_prompts=num_prompts,
        draft_model=draft_model,
        verifier=verifier,
        drafter=drafter,
        scale=scale,
        batches=tuple(batch),
        delays=tuple(delay),
        verifiers=tuple(verifiers),
        modes=cast(tuple[Mode, ...], tuple(mode)),
        ahead=DraftAheadConfig(top_k=ahead_top_k, num_steps=ahead_steps, mode="always"),
        plain_tokens=plain_tokens,
        max_tokens=max_tokens,
        temperatures=tuple(temperature),
        tree=TreeConfig(num_draft_tokens, num_steps, top_k),
        dtype="float32",
        device="cpu",
        threads=threads,
    )
    head = DraftHead(draft_model, method)
    settings = replace(settings, methods=(MethodSpec(head.method),), tree=head.resolve_tree(settings.tree))
    with progress() as shown:
        results, timelines = measure(settings, shown)
    page = Report.here("split", "eyas", "cpu", settings, results, results.tables()).publish(out)
    draw(timelines, (page.with_suffix(".png"), page.with_suffix(".svg")))
    print(f"drawn as {page.with_suffix('.png')} and .svg")


if __name__ == "__main__":
    try:
        typer.run(split)
    except (EyasError, OSError) as error:
        sys.exit(f"error: {error}")
