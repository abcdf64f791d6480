"""`python -m tests.chaos`: a storm of faults, then an overload; writes a dated report."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from eyas.bench.report import Report, Table, number
from eyas.progress import progress
from tests.chaos import overload
from tests.chaos.answers import plain_answers
from tests.chaos.faults import Injector
from tests.chaos.fleet import VOCAB_SIZE, build_fleet, write_models
from tests.chaos.overload import LoadLevel, OverloadResult, OverloadSettings
from tests.chaos.storm import MAX_GROWTH, MAX_SLOPE, StormResult, StormSettings, storm
from tests.chaos.traffic import Counts
from tests.support.memory import FEW_PRODUCTS

# What the project promises.
MAX_GAP_S, MIN_GOODPUT_RATIO = 2.0, 0.9
# A request is refused if it has lost two verifiers, which two kills within a second or two can cause as well.
KILLS_PER_BLAMED = 10
VERIFIER_DEATH = "verifier kill -9"


@dataclass(frozen=True)
class ChaosResult:
    """The storm, and the overload after it if one was asked for."""

    storm: StormResult
    overload: OverloadResult | None

    def broken_promises(self) -> list[str]:
        """What did not hold, in words."""
        found, storm = [], self.storm
        promises = {
            "tokens wrong": storm.num_wrong,
            "tokens lost": storm.num_lost,
            "tokens doubled": storm.num_doubled,
            "requests failed while a verifier was left": storm.num_failed,
            "services ended by themselves": storm.num_crashes,
            "slots and sessions not given back": storm.unreturned_slots,
        }
        if storm.num_blamed > storm.num_verifier_kills // KILLS_PER_BLAMED:
            found.append(f"{storm.num_blamed} requests blamed for {storm.num_verifier_kills} kills of verifiers")
        found += [f"{count} {name}" for name, count in promises.items() if count]
        found += [
            f"a gap of {gap.longest_s:.1f} s after {gap.fault}, above {MAX_GAP_S} s"
            for gap in storm.gaps
            if gap.fault == VERIFIER_DEATH and gap.longest_s > MAX_GAP_S
        ]
        found += [
            f"{use.service} takes {use.slope:.0f} MiB more per hour, above {MAX_SLOPE:g}"
            for use in storm.memory
            if use.grows
        ]
        if self.overload is not None:
            if self.overload.ratio < MIN_GOODPUT_RATIO:
                found.append(f"goodput at ten times the load is {self.overload.ratio:.0%} of the peak")
            if num_wrong := sum(level.num_wrong for level in (*self.overload.levels, self.overload.overloaded)):
                found.append(f"{num_wrong} wrong answers under overload")
        return found


def main(
    minutes: Annotated[float, typer.Option(help="Length of the storm, unless kills are asked for.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Draws the models' requests, the faults and their order.")] = 0,
    verifier_kills: Annotated[int | None, typer.Option(help="Go on until this number of verifiers was killed.")] = None,
    drafter_kills: Annotated[int | None, typer.Option(help="Go on until this number of drafters was killed.")] = None,
    clients: Annotated[int, typer.Option(help="Requests that run at once.")] = 10,
    overload_s: Annotated[float, typer.Option(help="Seconds of each level of load after the storm; 0 skips them.")] = 10.0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Break everything around a router on loopback, and check every answer. Exits with 1 if a promise did not hold."""
    os.environ |= FEW_PRODUCTS | {"OMP_NUM_THREADS": "1"}  # read by the fork server
    torch.set_num_threads(1)
    logging.getLogger("eyas").setLevel(logging.ERROR)  # Redis is away again and again
    settings = StormSettings(minutes, seed, verifier_kills, drafter_kills, clients)
    with progress() as shown:

        def update(seconds: float, counts: Counts, injector: Injector) -> None:
            killed = injector.verifier_kills.done, injector.drafter_kills.done
            wrong = counts.mismatch
            note = f"{counts.num_requests} requests, {counts.num_tokens} tokens; {wrong.num_wrong} tokens wrong, "
            note += f"{wrong.num_lost} lost, {wrong.num_doubled} doubled, "
            note += f"failed {counts.failures.total()}; killed {killed[0]} verifiers and {killed[1]} drafters; seconds"
            shown.show(note, seconds, 60 * minutes if verifier_kills is drafter_kills is None else 0.0)

        stormed = storm(settings, logs := Path(tempfile.mkdtemp(prefix="eyas-chaos-")), update)
    load = OverloadSettings(overload_s, seed=seed)
    result = ChaosResult(stormed, run_overload(load) if overload_s else None)
    tables = [promises_table(result), storm_table(stormed), gaps_table(stormed), memory_table(stormed)]
    if result.overload is not None:
        tables.append(overload_table(result.overload, load))
    page = Report.here("chaos", "python -m tests.chaos", "cpu", {"storm": settings, "overload": load}, result, tables).write(
        out
    )
    print(page.read_text(encoding="utf-8"))
    if stormed.is_clean:
        shutil.rmtree(logs)
    else:
        print(*stormed.notes[:20], f"the logs are in {logs}", sep="\n")
    print(f"written to {page} and {page.with_suffix('.json')}")
    if broken := result.broken_promises():
        print("did not hold:", "; ".join(broken), file=sys.stderr)
        raise typer.Exit(1)


def run_overload(settings: OverloadSettings) -> OverloadResult:
    """The overload, with a fleet of its own."""
    with tempfile.TemporaryDirectory(prefix="eyas-overload-") as folder:
        models = write_models(Path(folder))
        answers = overload.short(plain_answers(models[0], VOCAB_SIZE, 32, 80, settings.seed), 40)
        fleet = build_fleet(overload.FLEET, Path(folder), models, settings.seed)
        return asyncio.run(overload.overload(fleet, answers, settings))


def promises_table(result: ChaosResult) -> Table:
    """What was promised, and whether it held."""
    storm = result.storm
    gap_s = max((gap.longest_s for gap in storm.gaps if gap.fault == VERIFIER_DEATH), default=0.0)
    rows = [
        ("tokens wrong, lost, doubled", "0, 0, 0", f"{storm.num_wrong}, {storm.num_lost}, {storm.num_doubled}"),
        ("requests failed while a verifier was left", "0", f"{storm.num_failed}"),
        (
            "requests blamed for kills of verifiers",
            f"one per {KILLS_PER_BLAMED} kills",
            f"{storm.num_blamed} of {storm.num_verifier_kills}",
        ),
        ("longest gap after a verifier's death", f"re-prefill + {MAX_GAP_S:g} s", f"{gap_s:.2f} s"),
        ("slots and sessions not given back", "0", f"{storm.unreturned_slots}"),
        ("services that ended by themselves", "0", f"{storm.num_crashes}"),
        (
            "growth of memory in the second half",
            f"{MAX_GROWTH:g} MiB, or {MAX_SLOPE:g} MiB per hour",
            ", ".join(use.service for use in storm.memory if use.grows) or f"all {len(storm.memory)} services below",
        ),
    ]
    if result.overload is not None:
        rows.append(
            ("goodput at ten times the load", f">= {MIN_GOODPUT_RATIO:.0%} of the peak", f"{result.overload.ratio:.0%}")
        )
    return Table("Promises", ("promise", "bound", "measured"), tuple(rows))


def storm_table(result: StormResult) -> Table:
    """What happened."""
    rows = {
        "seconds": number(result.seconds),
        "requests": f"{result.num_requests}",
        "cancelled by the client": f"{result.num_cancelled}",
        "tokens compared, over gRPC": f"{result.num_tokens}",
        "characters compared, over HTTP": f"{result.num_characters}",
        "failures by status": ", ".join(f"{status} {num}" for status, num in result.failures.items()) or "none",
        "verifiers killed": f"{result.num_verifier_kills}",
        "drafters killed": f"{result.num_drafter_kills}",
        "gap between chunks, p99": f"{result.p99_gap_s:.3f} s",
        "lag of the clients themselves, p99": f"{result.p99_lag_s:.3f} s",
        "longest gap without a fault": f"{result.longest_unexplained_gap_s:.3f} s",
    }
    note = "At every moment at least one verifier had a published lease, no fault, and 1 s behind it in this state."
    return Table("Storm", ("", ""), tuple(rows.items()), note)


def gaps_table(result: StormResult) -> Table:
    """The waits by fault."""
    rows = [(g.fault, f"{g.num}", f"{g.p50_s:.2f}", f"{g.p99_s:.2f}", f"{g.longest_s:.2f}") for g in result.gaps]
    note = (
        "The longest wait of any client for the next chunk, per fault, in seconds; waits below 0.05 s count as none. A wait "
        "during several faults counts for the verifier's, else for the first."
    )
    return Table("Gaps by fault", ("fault", "times", "p50", "p99", "longest"), tuple(rows), note)


def memory_table(result: StormResult) -> Table:
    """Memory of what was never killed."""
    rows = [
        (
            use.service,
            f"{use.first:.0f}",
            f"{use.last:.0f}",
            f"{use.growth:+.1f}",
            f"{use.slope:+.1f} ± {use.uncertainty:.1f}",
            "grows" if use.grows else "held",
        )
        for use in result.memory
    ]
    note = (
        "Anonymous memory in MiB of services that were never killed. Growth and slope, in MiB per hour, are over the second "
        f"half. A service grows if both are above their bounds, {MAX_GROWTH:g} MiB and {MAX_SLOPE:g} MiB per hour, the "
        "slope by more than twice its standard error."
    )
    return Table("Memory", ("service", "first", "last", "growth", "slope", "verdict"), tuple(rows), note)


def overload_table(result: OverloadResult, settings: OverloadSettings) -> Table:
    """Goodput by load."""
    rows = [_level_row(level) for level in (*result.levels, result.overloaded)]
    columns = (
        "requests/s",
        "sent",
        "good",
        "refused",
        "late",
        "other failures",
        "wrong",
        "goodput, tokens/s",
        "refusal p99, s",
    )
    note = (
        f"Open loop. Goodput: tokens of complete answers within {settings.deadline_s:g} s. Each connection to a drafter is "
        f"late by {1000 * settings.delay_s:g} ms, so that steps take time without taking processors. The last row offers "
        "ten times the load of the best one."
    )
    return Table("Overload", columns, tuple(rows), note)


def _level_row(level: LoadLevel) -> tuple[str, ...]:
    counts = (level.num_requests, level.num_good, level.num_refused, level.num_late)
    other = ", ".join(f"{status} {num}" for status, num in level.other_failures.items()) or "none"
    ends = (other, f"{level.num_wrong}", number(level.goodput), f"{level.p99_refusal_s:.3f}")
    return (number(level.requests_per_s), *map(str, counts), *ends)


if __name__ == "__main__":
    typer.run(main)
