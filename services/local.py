"""All services on this machine: `up` keeps them running, `demo` shows and measures them. Stops what it has started."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from eyas.client import ScreenPrinter
from eyas.errors import EyasError, RequestFailed
from eyas.request import Request, SamplingParams
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import GenerateCall
from eyas.services.cluster import ROOT, Cluster, free_port, is_free, running_cluster
from eyas.services.demo import DemoClient, DemoComparison, Prompt, read_prompts

ROUTER_PORT = 50050
HTTP_PORT = 8000
PROMPTS = ROOT / "models" / "demo" / "prompts.jsonl"
TEMPERATURES = (0.0, 0.8)
SEED = 2024
SHOWN_TOKENS = 64
CURL = """-H 'Content-Type: application/json' -d '{"model": "demo", "prompt": "def main():", "max_tokens": 32}'"""

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="service.key=value, such as draft.tree.num_draft_tokens=32; may be repeated."),
]


def up(
    port: Annotated[int, typer.Option(help="The router's port; another is taken when it is in use.")] = ROUTER_PORT,
    http_port: Annotated[int, typer.Option(help="Its port for HTTP; another is taken when it is in use.")] = HTTP_PORT,
    settings: Settings = None,
) -> None:
    """Keep a router, a verifier, a draft service and Redis running until Ctrl-C."""
    console = Console(highlight=False, soft_wrap=True)
    with _reported(console), _ready(console, _or_free(port), settings, _or_free(http_port)) as cluster:
        address = cluster.router.address
        console.print(f"\nThe router listens on [bold]{address}[/], and for HTTP on [bold]{cluster.http}[/].")
        console.print("In another terminal:\n")
        console.print(f'  .venv/bin/eyas generate "def main():" --address {address}')
        console.print(f"  curl {cluster.http}/v1/completions {CURL}\n", markup=False)
        console.print(f"Logs are in {cluster.router.log.parent}.")
        with suppress(KeyboardInterrupt):
            console.print("Ctrl-C stops everything.")
            cluster.watch()


def demo(
    num_prompts: Annotated[int, typer.Option(help="Prompts to measure.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 96,
    settings: Settings = None,
) -> None:
    """Show drafting at work, then measure it against plain decoding on the same prompts."""
    console = Console(highlight=False, soft_wrap=True)
    with _reported(console), _ready(console, free_port(), settings) as cluster:
        prompts = read_prompts(PROMPTS)
        with open_sync_channel(cluster.router.address) as channel, _blamed(cluster):
            client = DemoClient(channel)
            with _progress(console) as progress:
                progress.add_task("waiting for the first draft tree", total=None)
                client.warm_up(prompts[0])
            _show(console, client, prompts)
            prompts = prompts[:num_prompts]
            comparisons = [_measure(console, client, prompts, _sampling(t, max_tokens)) for t in TEMPERATURES]
        console.print(_table(comparisons))
        if differences := [line for comparison in comparisons for line in comparison.differences()]:
            raise RequestFailed("speculative output differs from plain output:\n" + "\n".join(differences))


@contextmanager
def _reported(console: Console) -> Iterator[None]:
    """Errors in one place: one reason on stderr and status 1; a signal ends with 130, after the cleaning up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        yield
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


@contextmanager
def _ready(console: Console, port: int, settings: list[str] | None, http_port: int | None = None) -> Iterator[Cluster]:
    """A cluster whose services all answer SERVING, started with the progress shown."""
    with running_cluster(port, settings or (), http_port) as cluster:
        started = time.monotonic()
        with _progress(console) as progress:
            for child in cluster.services:
                task = progress.add_task(f"starting the {child.name} service", total=None)
                cluster.wait(child)
                progress.remove_task(task)
                console.print(f"[green]ready[/] {child.name} on {child.address} after {time.monotonic() - started:.1f} s")
        yield cluster


def _or_free(port: int) -> int:
    return port if is_free(port) else free_port()


@contextmanager
def _blamed(cluster: Cluster) -> Iterator[None]:
    """When a call fails because a process has ended, says that instead, with the end of its log."""
    try:
        yield
    except EyasError:
        cluster.check()
        raise


def _progress(console: Console) -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True)


def _sampling(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=SEED, ignore_eos=True)


def _show(console: Console, client: DemoClient, prompts: list[Prompt]) -> None:
    """Stream a few continuations, what the drafter foresaw in another style than what the target added."""
    for prompt, temperature in zip(prompts, TEMPERATURES, strict=False):
        console.rule(f"{prompt.source} at temperature {temperature}", align="left", style="dim")
        console.print(Text(prompt.text, style="dim"), end="")
        printer = ScreenPrinter(console)
        call = GenerateCall(Request("", (), _sampling(temperature, SHOWN_TOKENS)), prompt_text=prompt.text)
        for chunk in client.stream(call):
            printer.add(chunk)


def _measure(console: Console, client: DemoClient, prompts: list[Prompt], sampling: SamplingParams) -> DemoComparison:
    comparison = DemoComparison(sampling, prompts)
    started = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("", total=len(prompts))
        what = f"temperature {sampling.temperature}: {len(prompts)} prompts, plain and speculative"
        for done in range(len(prompts)):
            progress.update(task, description=f"{what}, {done} done")
            client.compare(comparison, prompts[done])
    console.print(f"[green]done[/] {what} in {time.monotonic() - started:.1f} s")
    return comparison


def _table(comparisons: list[DemoComparison]) -> Table:
    table = Table(title="Plain and speculative decoding, one request at a time, as a client of the router sees it")
    table.add_column("")
    for comparison in comparisons:
        table.add_column(f"temperature {comparison.sampling.temperature}", justify="right")
    rows: list[tuple[str, Callable[[DemoComparison], str]]] = [
        ("plain, tokens/s", lambda c: f"{c.speed('plain'):.0f}"),
        ("speculative, tokens/s", lambda c: f"{c.speed('speculative'):.0f}"),
        ("speedup", lambda c: f"{c.speed('speculative') / c.speed('plain'):.2f}x"),
        ("mean acceptance length (tau)", lambda c: f"{c.stats.acceptance_length:.2f}"),
        ("accepted at depth 1, 2, ...", lambda c: " ".join(f"{share:.0%}" for share in c.stats.acceptance_by_depth)),
        ("verifier-drafter round trip", lambda c: f"mean {c.round_trip:.2f} ms"),
        ("outputs identical", lambda c: "no" if c.differences() else f"yes, {len(c.prompts)} of {len(c.prompts)}"),
    ]
    for label, value in rows:
        table.add_row(label, *map(value, comparisons))
    return table


def main() -> None:
    """Run the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="All services on this machine.")
    app.command()(up)
    app.command()(demo)
    app()


if __name__ == "__main__":
    main()
