"""`eyas serve MODEL`: a router, a verifier, a draft service and a private Redis on this machine, as one process tree."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import try_to_load_from_cache
from rich.console import Console

from eyas.cli import options
from eyas.cli.options import Setting
from eyas.config import VerifierConfig
from eyas.config.checks import MAX_PORT
from eyas.config.drafting import NO_DRAFTS
from eyas.config.file_values import check_source
from eyas.config.gguf_files import local_folder
from eyas.config.mtp_layouts import WEIGHTS_FILE, default_method
from eyas.device.host import PHASE_PREFIX, num_cores
from eyas.errors import ConfigError, EyasError
from eyas.progress import Progress
from eyas.services.lifecycle import SERVING_PREFIX
from eyas.services.local.cluster import Cluster, ServiceSettings, assign, free_port, is_free, running_cluster
from eyas.services.local.demo import ROOT, demo_services, ignore_kills, kill_drafter_on_signal, warm_up, with_kills
from eyas.text.tokenizer import fetch_file

HTTP_PORT = 8000
GRPC_PORT = 50050
# The environment variable with the keys of --api-key: a command line would show them.
KEYS_VARIABLE = "EYAS_SERVED_API_KEYS"
# Options of `eyas serve --demo` without MODEL; the others describe a model.
DEMO_OPTIONS = ("demo", "config", "api_key", "host", "port", "grpc_port", "log_requests", "assignments")

AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SERVICE.KEY=VALUE", help="Setting of a service, such as verifier.engine.max_queued_requests=64."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder or hub id of the target model.", autocompletion=lambda: ["router", "verifier", "draft"]
    ),
]
Names = Annotated[
    list[str] | None, typer.Option(help="Name that requests give; MODEL by default. Further ones are aliases.")
]
Keys = Annotated[
    list[str] | None, typer.Option(envvar="EYAS_API_KEY", help="API key that requests must send; may be repeated.")
]
Host = Annotated[str, typer.Option(help="Address that the router listens on.")]
Port = Annotated[int, typer.Option(min=0, max=MAX_PORT, help="Port of the OpenAI-compatible HTTP API; 0 takes a free one.")]
GrpcPort = Annotated[int, typer.Option(min=1, max=MAX_PORT, help="Port of the gRPC API.")]
Demo = Annotated[
    bool,
    typer.Option(
        "--demo",
        help="Let the playground kill the draft service, to see that no token is lost. Without MODEL, serve the demo model "
        "of a checkout with its best settings.",
    ),
]
LogRequests = Annotated[bool, typer.Option("--log-requests", help="Print a line for each request that ends.")]


def serve(
    context: typer.Context,
    model: Model = "",
    config: options.ConfigFile = None,
    draft_model: options.DraftModel = "",
    method: options.Method = "",
    num_draft_tokens: options.NumDraftTokens = None,
    num_steps: options.NumSteps = None,
    top_k: options.TopK = None,
    draft_placement: options.DraftsAt = "auto",
    validate_head: options.ValidateHead = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    served_model_name: Names = None,
    tokenizer: options.TokenizerOf = "",
    chat_template: options.Template = "",
    tool_call_parser: options.ToolParser = "auto",
    reasoning_parser: options.ThinkingParser = "auto",
    special_tokens_in_content: options.SpecialTokens = "token",
    generation_config: options.SamplingDefaults = "auto",
    api_key: Keys = None,
    host: Host = "127.0.0.1",
    port: Port = HTTP_PORT,
    grpc_port: GrpcPort = GRPC_PORT,
    log_requests: LogRequests = False,
    demo: Demo = False,
    assignments: AssignmentsOption = None,
) -> None:
    """Serve MODEL on this machine until Ctrl-C: a router, a verifier and Redis, and a draft service for methods with a head.

    `eyas serve router`, `eyas serve verifier` and `eyas serve draft` run one service from a config file.
    """
    console = Console(highlight=False, soft_wrap=True)
    with exit_on_error(console):
        services = _planned_services(context)
        if demo:
            port, grpc_port = (number if is_free(number) else free_port() for number in (port, grpc_port))
            ignore_kills()
        _check_ports(port, grpc_port)
        names = served_model_name or [model or "demo"]
        with running_cluster(services, grpc_port, port, host, None if model else ROOT) as cluster:
            wait_until_ready(console, cluster)
            if not model:
                with suppress(EyasError):  # whose keys may be in a file
                    warm_up(cluster["router"].address, (api_key or [""])[0])
            if demo:
                kill_drafter_on_signal(cluster)
            page = f"playground: {cluster.playground}, " if cluster.playground else ""
            announcement = f"Serving {', '.join(names)} at {cluster.http} ({page}gRPC: {host}:{grpc_port}); Ctrl-C stops it"
            watch_until_interrupted(console, cluster, announcement, log_requests)


def _planned_services(context: typer.Context) -> list[ServiceSettings]:
    """Return the services that the options of `eyas serve` ask for. Raises ConfigError for options that do not fit."""
    given = context.params
    services = plan_of_options(context) if given["model"] else _demo_services(context)
    services = with_kills(services, given["host"]) if given["demo"] else services
    return with_keys(services, given["api_key"] or ())


def plan_of_options(context: typer.Context) -> list[ServiceSettings]:
    """Return the services that serve the MODEL of a command with the options of `eyas serve`. Raises ConfigError."""
    given = context.params
    model = given["model"]
    draft_model = given["draft_model"]
    for source in filter(None, (model, draft_model)):
        check_source(source)
    return plan(model, draft_model, given["method"], given["served_model_name"] or (), options.asked_settings(context))


def _demo_services(context: typer.Context) -> list[ServiceSettings]:
    """Return the services of the demo model. Raises ConfigError without --demo, and for options of another model."""
    if not context.params["demo"]:
        raise ConfigError("name the MODEL to serve, or try the demo model of a checkout: eyas serve --demo")
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in DEMO_OPTIONS and source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} needs a MODEL: --demo alone serves the demo model with its best settings; "
                "name a MODEL, or change one setting with --set"
            )
    return _with_settings(demo_services(), options.direct_settings(context))


def _check_ports(port: int, grpc_port: int) -> None:
    """Raise ConfigError for ports that the router cannot have."""
    if port == grpc_port:
        raise ConfigError(f"--port and --grpc-port are both {port}; choose two ports")
    for option, number in (("--port", port), ("--grpc-port", grpc_port)):
        if not is_free(number):
            raise ConfigError(f"port {number} is in use; choose another with {option}")


def plan(
    model: str,
    draft_model: str = "",
    method: str = "",
    names: Sequence[str] = (),
    settings: Sequence[Setting] = (),
) -> list[ServiceSettings]:
    """Return the services that serve a model, with their settings.

    There is a draft service if there is a method, a draft model or a module of the model's own for multi-token prediction,
    and the verifier does not draft itself. On the CPU, both share the cores, unless OMP_NUM_THREADS is set.

    Raises ConfigError for settings that are not valid, or of a service that is not started.

    Args:
        names: of the model in requests; the first one is in responses.
        settings: later ones win.
    """
    name, *aliases = names or [model]
    shared = {"served_model_name": name, "model": model, "draft_model": draft_model, "method": method}
    config = _load_verifier(ServiceSettings("verifier", assignments=_assignments(shared)), settings)
    if not (config.method or config.draft_model):
        has_default = config.engine.tensor_parallel_size == 1 and not _names_head(settings)
        shared["method"] = _default_method(model) if has_default else NO_DRAFTS
    worker = _assignments(shared)
    served = {"name": name, "tokenizer": model, "aliases": aliases}
    services = [
        ServiceSettings("verifier", assignments=worker),
        ServiceSettings("router", assignments=(_assignment("models", [served]),)),
    ]
    if _needs_draft_service(services[0], settings):
        services.insert(0, ServiceSettings("draft", assignments=worker))
        device = next((each.text for each in reversed(settings) if each.text.startswith("draft.device=")), "")
        if "cuda" not in device and "OMP_NUM_THREADS" not in os.environ:
            draft_threads, verifier_threads = share_cores(num_cores())
            shares = (f"draft.threads={draft_threads}", f"verifier.threads={verifier_threads}")
            settings = [*map(Setting, shares), *settings]
    started = {service.name for service in services}
    return _with_settings(services, [each for each in settings if each.service in started or not each.is_option])


def _assignments(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_assignment(key, value) for key, value in values.items())


def _names_head(settings: Sequence[Setting]) -> bool:
    """Return whether a setting of the draft service names a method or a draft model."""
    return not {each.text.partition("=")[0] for each in settings}.isdisjoint({"draft.method", "draft.draft_model"})


def _default_method(model: str) -> str:
    """Return the method of `default_method`. Weights without an index count if they are on this machine.

    Raises CheckpointError for a model that is neither a folder nor a hub id, and if the hub fails.
    """

    def find_file(name: str) -> Path | None:
        if name != WEIGHTS_FILE or local_folder(model):
            return fetch_file(model, name)
        found = try_to_load_from_cache(model, name)  # its download belongs to the services
        return Path(found) if isinstance(found, str) else None

    return default_method(model, find_file)


def _with_settings(services: Sequence[ServiceSettings], settings: Sequence[Setting]) -> list[ServiceSettings]:
    """Return the services with these settings. Raises ConfigError for a service that is not among them."""
    origins = {each.text.partition("=")[0]: each.origin for each in settings}
    return assign(services, [each.text for each in settings], origins)


def _needs_draft_service(verifier: ServiceSettings, settings: Sequence[Setting]) -> bool:
    """Return whether a verifier, with those of the settings that are its own, takes drafts from a draft service."""
    config = _load_verifier(verifier, settings)
    return config.method != NO_DRAFTS and not config.drafts_itself


def _load_verifier(verifier: ServiceSettings, settings: Sequence[Setting]) -> VerifierConfig:
    (verifier,) = _with_settings([verifier], [each for each in settings if each.service == "verifier"])
    config = verifier.load()
    assert isinstance(config, VerifierConfig)
    return config


def with_keys(services: Sequence[ServiceSettings], keys: Sequence[str]) -> list[ServiceSettings]:
    """Return the services with a router that requires one of the keys, if there are any. They are passed by environment."""
    if not keys:
        return list(services)
    if wrong := [key for key in keys if not key.strip() or "," in key]:
        raise ConfigError(f"--api-key has {len(wrong)} keys that are empty or hold a comma; give others")
    given = {KEYS_VARIABLE: ",".join(keys)}
    routers = {
        each.name: replace(each, environment={**each.environment, **given}).add(f"api_keys.env={KEYS_VARIABLE}")
        for each in services
    }
    return [routers[each.name] if each.name == "router" else each for each in services]


def share_cores(num_cores: int) -> tuple[int, int]:
    """CPU threads of draft service and verifier: a quarter and the rest, at least one each.

    With torch's default, one thread per core each, both wait for each other's threads and become slow.
    """
    draft = max(1, num_cores // 4)
    return draft, max(1, num_cores - draft)


def _assignment(key: str, value: Any) -> str:
    """Return a setting whose value is read as YAML; JSON is YAML."""
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
    """Return once all services answer SERVING; show what each one does: loading, checking, compiling, ready."""
    started = time.monotonic()
    phases = {child.name: "starting" for child in cluster.services}
    console.print(f"logs: {cluster.logs}", markup=False)
    with Progress(console) as shown:

        def report() -> None:
            before = dict(phases)
            for child in cluster.services:
                if phases[child.name] != "ready":
                    phases[child.name] = phase(child.new_messages()) or phases[child.name]
            text = ", ".join(f"{name}: {now}" for name, now in phases.items())
            shown.show(text, at_once=phases != before)

        for child in cluster.services:
            cluster.wait(child, timeout_s, report)
            phases[child.name] = "ready"
            console.print(f"[green]ready[/] {child.name} on {child.address} after {time.monotonic() - started:.1f} s")


def phase(messages: Sequence[str]) -> str:
    """Return the last phase of a start that log messages name; empty if they name none."""
    phases = [message.removeprefix(PHASE_PREFIX) for message in messages if message.startswith(PHASE_PREFIX)]
    return phases[-1] if phases else ""


def watch_until_interrupted(console: Console, cluster: Cluster, announcement: str, log_requests: bool = False) -> None:
    """Print the announcement, and what the verifier says of its load, until Ctrl-C or SIGTERM.

    log_requests: also print a line for each request. Raises Unavailable if a process ends, other than the draft service.
    """
    shown = {"verifier": "load: ", **({"router": "request "} if log_requests else {})}
    drafters = [child for child in cluster.services if child.name == "draft"]
    for drafter in drafters:
        drafter.new_messages()  # of its first start

    def show_activity() -> None:
        for drafter in drafters:
            if any(message.startswith(SERVING_PREFIX) for message in drafter.new_messages()):
                console.print(
                    f"{time.strftime('%H:%M:%S')} draft (process {drafter.process.pid}) is ready again", markup=False
                )
        for name, prefix in shown.items():
            for message in cluster[name].new_messages():
                if message.startswith(prefix):
                    console.print(f"{time.strftime('%H:%M:%S')} {message.removeprefix('load: ')}", markup=False)

    with suppress(KeyboardInterrupt):
        console.print(announcement, markup=False)
        cluster.watch(partial(say_restart, console), show_activity)
    console.print("stopping; running requests may finish, another Ctrl-C ends them")


def say_restart(console: Console, reason: str) -> None:
    """Say that the draft service is started again, and why."""
    console.print(f"{reason}\nstarting it again; plain decoding goes on", markup=False)
