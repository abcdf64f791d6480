"""`python -m tests.fuzz`: malformed messages over every gRPC method and HTTP route; writes a dated report."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from eyas.bench.report import Report, Table, number
from tests.fuzz.servers import running_services
from tests.fuzz.storm import REST_S, WARM_UP_SHARE, FuzzResult, FuzzSettings, storm
from tests.support.memory import FEW_PRODUCTS

MAX_GROWTH_MIB = 16.0  # as in the storm of faults
LINE_INTERVAL = 2


def broken_promises(result: FuzzResult) -> list[str]:
    """What did not hold, in words."""
    found = [f"{finding.what}: {finding.status} ({finding.details})" for finding in result.findings]
    if result.num_wrong:
        found.append(f"{result.num_wrong} of {result.num_probes} valid requests had other tokens than plain decoding")
    found += [f"an unexpected exception in a log: {line}" for line in sorted(set(result.tracebacks))]
    found += [
        f"{role} still holds {count} requests, sequences or sessions" for role, count in result.unreturned.items() if count
    ]
    grown = {role: result.growth(role) for role in result.at_rest}
    return found + [f"{role} grew by {mib:.1f} MiB" for role, mib in grown.items() if mib > MAX_GROWTH_MIB]


def main(
    messages: Annotated[int, typer.Option(help="How many malformed messages.")] = 20_000,
    at_once: Annotated[int, typer.Option(help="How many calls run at once.")] = 48,
    seed: Annotated[int, typer.Option(help="Draws every message.")] = 0,
    only: Annotated[
        str, typer.Option(help="Only methods and routes whose name contains this, as the report has them.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results"),
) -> None:
    """Send malformed messages to a router, a verifier and a draft service. Exits with 1 if a promise did not hold.

    Ctrl-C ends it early, with a report of what was sent.
    """
    os.environ |= FEW_PRODUCTS  # read by the services
    settings = FuzzSettings(messages, at_once, seed, only)
    columns = (TextColumn("messages"), BarColumn(), TextColumn("{task.completed}; {task.fields[note]}"), TimeElapsedColumn())
    folder = Path(tempfile.mkdtemp(prefix="eyas-fuzz-"))
    with (
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
        running_services(folder) as services,
    ):
        task = progress.add_task("messages", total=messages, note="")

        def update(result: FuzzResult) -> None:
            memory = ", ".join(f"{role} {samples[-1][1]:.0f} MiB" for role, samples in result.memory.items())
            note = f"{result.num_findings} findings, {result.num_wrong} of {result.num_probes} answers wrong; {memory}"
            progress.update(task, completed=result.num_messages, note=note)
            if progress.disable and len(result.memory["router"]) % LINE_INTERVAL == 0:
                print(f"{result.num_messages} messages; {note}", *result.findings, sep="\n", file=sys.stderr, flush=True)

        result = asyncio.run(storm(services, settings, update))
    tables = [promises_table(result), *answers_tables(result), *memory_tables(result)]
    Report.here("fuzz", "python -m tests.fuzz", "cpu", settings, result, tables).publish(out)
    if broken := broken_promises(result):
        print("did not hold:", *broken, f"the logs are in {folder}", sep="\n  ", file=sys.stderr)
        raise typer.Exit(1)
    shutil.rmtree(folder)


def promises_table(result: FuzzResult) -> Table:
    """What was promised, and whether it held."""
    growth = max((result.growth(role) for role in result.at_rest), default=None)
    rows = (
        ("malformed messages", "", f"{result.num_messages} in {number(result.seconds)} s"),
        ("crashes", "0", "0"),
        ("UNKNOWN, INTERNAL, 5xx or no answer", "0", f"{result.num_findings}"),
        ("unexpected exceptions in the logs", "0", f"{len(result.tracebacks)}"),
        ("valid requests with wrong tokens", "0", f"{result.num_wrong} of {result.num_probes}"),
        ("requests, sequences and sessions left behind", "0", f"{sum(result.unreturned.values())}"),
        (
            f"growth of memory at rest after {WARM_UP_SHARE:.0%} of the messages",
            f"<= {MAX_GROWTH_MIB:g} MiB",
            "not judged" if growth is None else f"{growth:.1f} MiB",
        ),
        ("longest standstill of the client itself", "", f"{result.standstill:.1f} s"),
        ("bytes of log per message", "", f"{result.log_bytes / max(1, result.num_messages):.1f}"),
    )
    note = f"The valid requests ran between the malformed messages; their trees had {result.num_drafted} draft tokens."
    return Table("Promises", ("promise", "bound", "measured"), rows, note)


def answers_tables(result: FuzzResult) -> list[Table]:
    """The answers by method and route."""
    rows = [
        (what, f"{counter.total()}", ", ".join(f"{status} {count}" for status, count in counter.most_common()))
        for what, counter in sorted(result.counts.items())
    ]
    note = (
        "A message is valid but for one to three changed fields, or bytes that are no message. OK: the change does no "
        "harm, or a stream went on without what was malformed. HTTP/2 frames are damaged below gRPC; its library answers."
    )
    return [Table("Answers", ("method or route", "messages", "answers"), tuple(rows), note)]


def memory_tables(result: FuzzResult) -> list[Table]:
    """Memory of the services, under load and at rest."""
    num_samples = min(len(samples) for samples in result.memory.values())
    places = [num_samples * part // 8 for part in range(8)]
    rows = [
        (role, *(f"{samples[place][1]:.0f}" for place in places), f"{samples[-1][1]:.0f}", f"{result.slope(role):+.1f}")
        for role, samples in result.memory.items()
    ]
    note = (
        "Anonymous memory in MiB at equal distances from the first message to the last, and the slope of the second half "
        "for 100,000 messages, by least squares. It holds what was freed and has not yet gone back to the system."
    )
    loaded = Table("Memory", ("service", *(f"{part}/8" for part in range(8)), "8/8", "slope"), tuple(rows), note)
    if not result.at_rest:
        return [loaded]
    counts = [f"{count:,}" for count, _ in next(iter(result.at_rest.values()))]
    rested = tuple((role, *(f"{mib:.0f}" for _, mib in samples)) for role, samples in result.at_rest.items())
    note = f"Anonymous memory in MiB by number of messages, when nothing was sent for {REST_S:g} s."
    return [loaded, Table("Memory at rest", ("service", *counts), rested, note)]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
