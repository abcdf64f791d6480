"""`eyas serve MODEL`: a router, a verifier, a draft service and a private Redis on this machine, as one process tree."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from eyas.config.loader import MAX_PORT
from eyas.config.router import ReasoningParser, ToolCallParser
from eyas.errors import ConfigError, EyasError
from eyas.process import num_cores
from eyas.services.cluster import Child, Cluster, ServiceSettings, assign, is_free, running_cluster
from eyas.tokenizer import check_source

HTTP_PORT = 8000
GRPC_PORT = 50050
REPORT_INTERVAL_S = 30.0
MAX_STATUS_CHARS = 100

AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SERVICE.KEY=VALUE", help="Setting of a service, such as verifier.engine.max_num_seqs=64."
    ),
]


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of the target model.")],
    draft_model: Annotated[str, typer.Option(help="Folder or hub id of the draft head or draft model.")] = "",
    method: Annotated[
        str, typer.Option(help="Drafting method (see `eyas drafters`); by default the one that the draft model is for.")
    ] = "",
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most nodes of a draft tree, the root included.")] = None,
    num_steps: Annotated[int | None, typer.Option(help="Levels of a draft tree; by default those of the method.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Nodes that each level of a draft tree expands.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    served_model_name: Annotated[str, typer.Option(help="Name that requests give; MODEL by default.")] = "",
    chat_template: Annotated[str, typer.Option(help="File with a Jinja chat template, for a model without one.")] = "",
    tool_call_parser: Annotated[
        str, typer.Option(help=f"How MODEL writes tool calls: {', '.join(get_args(ToolCallParser))}.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help=f"How MODEL writes reasoning: {', '.join(get_args(ReasoningParser))}.")
    ] = "auto",
    generation_config: Annotated[
        str,
        typer.Option(help="Sampling defaults: auto takes those of generation_config.json; vllm or none takes none."),
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address that the router listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Port of the OpenAI-compatible HTTP API; 0 takes a free one.")
    ] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(min=1, max=MAX_PORT, help="Port of the gRPC API.")] = GRPC_PORT,
    assignments: AssignmentsOption = None,
) -> None:
    """Serve MODEL on this machine until Ctrl-C: a router, a verifier and Redis, and a draft service if there is a method.

    `eyas serve router`, `eyas serve verifier` and `eyas serve draft` run one service from a config file.
    """
    console = Console(highlight=False, soft_wrap=True)
    tree = {"tree.num_draft_tokens": num_draft_tokens, "tree.num_steps": num_steps, "tree.top_k": top_k}
    with exit_on_error(console):
        for source in filter(None, (model, draft_model)):
            check_source(source)
        settings = {"dtype": dtype, "device": device, **tree}
        chats = {"chat_template": chat_template, "tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
        services = plan(model, draft_model, method, served_model_name, settings, chats, generation_config)
        if port == grpc_port:
            raise ConfigError(f"--port and --grpc-port are both {port}; choose two ports")
        for option, number in (("--port", port), ("--grpc-port", grpc_port)):
            if not is_free(number):
                raise ConfigError(f"port {number} is in use; choose another with {option}")
        with running_cluster(assign(services, assignments or ()), grpc_port, port, host) as cluster:
            wait_until_ready(console, cluster)
            name = served_model_name or model
            page = f"playground: {cluster.playground}, " if cluster.playground else ""
            announcement = f"Serving {name} at {cluster.http} ({page}gRPC: {host}:{grpc_port}); Ctrl-C stops it"
            watch_until_interrupted(console, cluster, announcement)


def plan(
    model: str,
    draft_model: str,
    method: str,
    name: str,
    settings: Mapping[str, str | int | None],
    chats: Mapping[str, str] | None = None,
    generation_config: str = "auto",
) -> list[ServiceSettings]:
    """The services that serve a model; without a method and a draft model there is no draft service.

    settings: further settings of verifier and draft service; None keeps the default. chats: of the router's model.
    On the CPU, verifier and draft service share the cores, unless OMP_NUM_THREADS is set.
    """
    name, method = name or model, method or ("" if draft_model else "none")
    shared = {"served_model_name": name, "model": model, "draft_model": draft_model, "method": method, **settings}
    worker = tuple(_assignment(key, value) for key, value in shared.items() if value is not None)
    served = {"name": name, "tokenizer": model, **(chats or {})}
    router = ServiceSettings("router", assignments=(_assignment("models", [served]),))
    verifier = ServiceSettings("verifier", assignments=(*worker, _assignment("generation_config", generation_config)))
    if method == "none":
        return [verifier, router]
    draft = ServiceSettings("draft", assignments=worker)
    if not str(settings.get("device")).startswith("cuda") and "OMP_NUM_THREADS" not in os.environ:
        draft_threads, verifier_threads = share_cores(num_cores())
        draft, verifier = draft.add(f"threads={draft_threads}"), verifier.add(f"threads={verifier_threads}")
    return [draft, verifier, router]


def share_cores(num_cores: int) -> tuple[int, int]:
    """CPU threads of draft service and verifier: a quarter and the rest, at least one each.

    With torch's default, one thread per core each, both wait for each other's threads and become slow.
    """
    draft = max(1, num_cores // 4)
    return draft, max(1, num_cores - draft)


def _assignment(key: str, value: Any) -> str:
    """A setting whose value is read as YAML; JSON is YAML."""
    return f"{key}={json.dumps(value)}"


@contextmanager
def exit_on_error(console: Console) -> Iterator[None]:
    """Turn an EyasError into one reason on stderr and exit status 1, and a signal into status 130.

    A script's background job gets SIGINT ignored, and nohup has SIGHUP ignored. Only the second is meant to last.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


def wait_until_ready(console: Console, cluster: Cluster, timeout_s: float = math.inf) -> None:
    """Return once all services answer SERVING; show which one is loading, and the last line of its log.

    Output that is no terminal gets a line every REPORT_INTERVAL_S seconds.
    """
    started = reported = time.monotonic()
    for child in cluster.services:
        with spinner(console) as progress:
            task = progress.add_task("", total=None)

            def report(child: Child = child, progress: Progress = progress, task: TaskID = task) -> None:
                nonlocal reported
                line = "".join(child.last_log_lines(1)).strip()[:MAX_STATUS_CHARS]
                progress.update(task, description=f"starting the {child.name} service: {escape(line)}")
                if not console.is_terminal and time.monotonic() - reported > REPORT_INTERVAL_S:
                    reported = time.monotonic()
                    console.print(f"starting the {child.name} service, {reported - started:.0f} s: {line}", markup=False)

            cluster.wait(child, timeout_s, report)
        console.print(f"[green]ready[/] {child.name} on {child.address} after {time.monotonic() - started:.1f} s")


def watch_until_interrupted(console: Console, cluster: Cluster, announcement: str) -> None:
    """Print the announcement, then block until Ctrl-C or SIGTERM.

    Raises Unavailable if a process ends, other than the draft service.
    """
    with suppress(KeyboardInterrupt):
        console.print(announcement, markup=False)
        cluster.watch(lambda reason: console.print(f"{reason}\nstarting it again; plain decoding goes on", markup=False))
    console.print("stopping; running requests may finish, another Ctrl-C ends them")


def spinner(console: Console) -> Progress:
    """Progress of steps whose length is unknown; nothing on output that is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
