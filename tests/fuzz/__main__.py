"""`python -m tests.fuzz`: malformed messages over every gRPC method and HTTP route; writes a dated report."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eyas.bench.report import Report, Table, number
from eyas.progress import progress
from tests.fuzz.servers import running_services
from tests.fuzz.storm import FuzzResult, FuzzSettings, storm


def broken_promises(result: FuzzResult) -> list[str]:
    """What did not hold, in words."""
    found = [f"{finding.what}: {finding.status} ({finding.details})" for finding in result.findings]
    if result.num_wrong:
        found.append(f"{result.num_wrong} of {result.num_probes} valid requests had other tokens than plain decoding")
    found += [f"an unexpected exception in a log: {line}" for line in sorted(set(result.tracebacks))]
    return found + [
        f"{role} still holds {count} requests, sequences or sessions" for role, count in result.unreturned.items() if count
    ]


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
    settings = FuzzSettings(messages, at_once, seed, only)
    folder = Path(tempfile.mkdtemp(prefix="eyas-fuzz-"))
    with progress() as shown, running_services(folder) as services:

        def update(result: FuzzResult) -> None:
            note = f"{result.num_findings} findings, {result.num_wrong} of {result.num_probes} answers wrong; messages"
            shown.show(note, result.num_messages, messages)

        result = asyncio.run(storm(services, settings, update))
    tables = [promises_table(result), answers_table(result)]
    Report.here("fuzz", "python -m tests.fuzz", "cpu", settings, result, tables).publish(out)
    if broken := broken_promises(result):
        print("did not hold:", *broken, f"the logs are in {folder}", sep="\n  ", file=sys.stderr)
        raise typer.Exit(1)
    shutil.rmtree(folder)


def promises_table(result: FuzzResult) -> Table:
    """What was promised, and whether it held."""
    rows = (
        ("malformed messages", "", f"{result.num_messages} in {number(result.seconds)} s"),
        ("crashes", "0", "0"),
        ("UNKNOWN, INTERNAL, 5xx or no answer", "0", f"{result.num_findings}"),
        ("unexpected exceptions in the logs", "0", f"{len(result.tracebacks)}"),
        ("valid requests with wrong tokens", "0", f"{result.num_wrong} of {result.num_probes}"),
        ("requests, sequences and sessions left behind", "0", f"{sum(result.unreturned.values())}"),
        ("longest standstill of the client itself", "", f"{result.standstill:.1f} s"),
        ("bytes of log per message", "", f"{result.log_bytes / max(1, result.num_messages):.1f}"),
    )
    note = f"The valid requests ran between the malformed messages; their trees had {result.num_drafted} draft tokens."
    return Table("Promises", ("promise", "bound", "measured"), rows, note)


def answers_table(result: FuzzResult) -> Table:
    """The answers by method and route."""
    rows = [
        (what, f"{counter.total()}", ", ".join(f"{status} {count}" for status, count in counter.most_common()))
        for what, counter in sorted(result.counts.items())
    ]
    note = (
        "A message is valid but for one to three changed fields, or bytes that are no message. OK: the change does no "
        "harm, or a stream went on without what was malformed."
    )
    return Table("Answers", ("method or route", "messages", "answers"), tuple(rows), note)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
