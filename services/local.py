"""The demo model on this machine, from a checkout: `up` serves it, `demo` measures plain against speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.client import ScreenPrinter
from eyas.errors import ConfigError, EyasError, RequestFailed
from eyas.request import Request, SamplingParams
from eyas.rpc.channel import open_sync_channel
from eyas.rpc.messages import GenerateCall
from eyas.services.cluster import (
    CONFIG_TYPES,
    START_TIMEOUT_S,
    Cluster,
    ServiceSettings,
    assign,
    free_port,
    is_free,
    running_cluster,
)
from eyas.services.demo import DemoClient, DemoComparison, Prompt, read_prompts
from eyas.services.serve import (
    GRPC_PORT,
    HTTP_PORT,
    AssignmentsOption,
    exit_on_error,
    spinner,
    wait_until_ready,
    watch_until_interrupted,
)

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples" / "configs" / "local"
PROMPTS = ROOT / "models" / "demo" / "prompts.jsonl"
TEMPERATURES = (0.0, 0.8)
SEED = 2024
NUM_SHOWN_TOKENS = 64
CURL = """-H 'Content-Type: application/json' -d '{"model": "demo", "prompt": "def main():", "max_tokens": 32}'"""


def up(
    port: Annotated[int, typer.Option(help="gRPC port of the router; another is taken if it is in use.")] = GRPC_PORT,
    http_port: Annotated[int, typer.Option(help="HTTP port of the router; another is taken if it is in use.")] = HTTP_PORT,
    assignments: AssignmentsOption = None,
) -> None:
    """Serve the demo model until Ctrl-C."""
    console = Console(highlight=False, soft_wrap=True)
    port, http_port = (each if is_free(each) else free_port() for each in (port, http_port))
    with exit_on_error(console), running_demo(port, assignments or (), http_port) as cluster:
        wait_until_ready(console, cluster, START_TIMEOUT_S)
        address = cluster.router.address
        announcement = f"""
The router listens on {address}, and for HTTP on {cluster.http}.
In another terminal:

  .venv/bin/eyas generate "def main():" --address {address}
  curl {cluster.http}/v1/completions {CURL}

Logs are in {cluster.router.log.parent}.
Ctrl-C stops everything."""
        watch_until_interrupted(console, cluster, announcement)


def demo(
    num_prompts: Annotated[int, typer.Option(help="Prompts to measure.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 96,
    assignments: AssignmentsOption = None,
) -> None:
    """Show drafting at work, then measure it against plain decoding on the same prompts."""
    console = Console(highlight=False, soft_wrap=True)
    with exit_on_error(console), running_demo(free_port(), assignments or ()) as cluster:
        wait_until_ready(console, cluster, START_TIMEOUT_S)
        prompts = read_prompts(PROMPTS)
        with open_sync_channel(cluster.router.address) as channel, _name_dead_service(cluster):
            client = DemoClient(channel)
            with spinner(console) as progress:
                progress.add_task("waiting for the first draft tree", total=None)
                client.warm_up(prompts[0])
            _show(console, client, prompts)
            prompts = prompts[:num_prompts]
            comparisons = [_measure(console, client, prompts, _sampling(t, max_tokens)) for t in TEMPERATURES]
        console.print(_table(comparisons))
        if differences := [line for comparison in comparisons for line in comparison.differences()]:
            raise RequestFailed("speculative output differs from plain output:\n" + "\n".join(differences))


@contextmanager
def running_demo(port: int, assignments: Sequence[str] = (), http_port: int | None = None) -> Iterator[Cluster]:
    """The cluster of examples/configs/local. port, http_port: of the router; assignments: service.key=value settings.

    Raises ConfigError outside a checkout and for settings that a service would refuse.
    """
    if not CONFIGS.is_dir():
        raise ConfigError(f"{CONFIGS} does not exist; run the demo from a checkout, or any model with `eyas serve`")
    services = [ServiceSettings(name, CONFIGS / f"{name}.yaml") for name in CONFIG_TYPES]
    with running_cluster(assign(services, assignments), port, http_port, folder=ROOT) as cluster:
        yield cluster


@contextmanager
def _name_dead_service(cluster: Cluster) -> Iterator[None]:
    """When a call fails because a process has ended, raise that process's error instead."""
    try:
        yield
    except EyasError:
        cluster.check()
        raise


def _sampling(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=SEED, ignore_eos=True)


def _show(console: Console, client: DemoClient, prompts: list[Prompt]) -> None:
    """Stream a few continuations, draft tokens in another style than the tokens of the target."""
    for prompt, temperature in zip(prompts, TEMPERATURES, strict=False):
        console.rule(f"{prompt.source} at temperature {temperature}", align="left", style="dim")
        console.print(Text(prompt.text, style="dim"), end="")
        printer = ScreenPrinter(console)
        call = GenerateCall(Request("", (), _sampling(temperature, NUM_SHOWN_TOKENS)), prompt_text=prompt.text)
        for chunk in client.stream(call):
            printer.add(chunk)


def _measure(console: Console, client: DemoClient, prompts: list[Prompt], sampling: SamplingParams) -> DemoComparison:
    comparison = DemoComparison(sampling, prompts)
    started = time.monotonic()
    with spinner(console) as progress:
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
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="The demo model on this machine.")
    app.command()(up)
    app.command()(demo)
    app()


if __name__ == "__main__":
    main()
