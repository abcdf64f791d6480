"""`eyas bench`: measure decoding and write a dated report. Torch is imported when a benchmark starts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eyas.bench.settings import MethodSpec, MethodsSettings, OfflineSettings
from eyas.cli import options
from eyas.config import DraftBudgetPolicy, Dtype, TreeConfig
from eyas.config.checks import at_least
from eyas.emulation.costs import DeviceCosts
from eyas.errors import ConfigError
from eyas.progress import Progress, progress

if TYPE_CHECKING:
    from eyas.bench.serve import RequestTimes

# Tokens of each prompt in a quick run.
QUICK_TOKENS = 48

Model = Annotated[str, typer.Option(help="Folder or hub id of the target model.")]
NumPrompts = Annotated[int, typer.Option(help="Prompts to decode, spread evenly over the tasks; 0 takes all.")]
Temperatures = Annotated[list[float], typer.Option(help="Temperature of sampling, 0 for greedy; may be repeated.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt.")]
NumDraftTokens = Annotated[int, typer.Option(help="Most nodes of a draft tree, the root included.")]
NumSteps = Annotated[int, typer.Option(help="Levels of a draft tree; 0 takes those of the method.")]
TopK = Annotated[int, typer.Option(help="Nodes that each level of a draft tree expands.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch, for all that is measured; 0 takes what `LLM` takes.")]
Out = Annotated[Path, typer.Option(help="Folder of the report.")]
LocalTable = Annotated[str, typer.Option(help="Cost table of the drafter on a verifier's device; presets find their own.")]
RESULTS = Path("benchmarks/results")

bench = typer.Typer(add_completion=False, no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure speed and acceptance length; write a dated report."""


@bench.command()
def offline(
    model: Model,
    draft_model: Annotated[str, typer.Option(help="Folder or hub id of a draft head; plain decoding only without it.")] = "",
    method: Annotated[str, typer.Option(help="Drafting method; by default the one that the draft model is for.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with token_ids or text; random tokens by default.")
    ] = None,
    num_prompts: NumPrompts = 0,
    batch: Annotated[list[int], typer.Option(help="Prompts decoded at once; may be repeated.")] = [1, 8],  # noqa: B006
    temperature: Temperatures = [0.0],  # noqa: B006
    max_tokens: MaxTokens = 96,
    groups: Annotated[int, typer.Option(help="Fewest batches to measure; every prompt is used at least once.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first impression: the first --batch, 3 prompts, 48 tokens, 3 batches.")
    ] = False,
    num_draft_tokens: NumDraftTokens = TreeConfig.num_draft_tokens,
    num_steps: NumSteps = TreeConfig.num_steps,
    top_k: TopK = TreeConfig.top_k,
    draft_budget: Annotated[
        str, typer.Option(help="auto: trees as large as they pay, possibly none; fixed: always the largest.")
    ] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: Threads = 0,
    out: Out = RESULTS,
) -> None:
    """Compare plain decoding, speculative decoding and transformers' generate in this process."""
    settings = OfflineSettings(
        model=model,
        draft_model=draft_model,
        method=method,
        prompts=prompts,
        num_prompts=num_prompts,
        batches=tuple(batch),
        temperatures=tuple(temperature),
        max_tokens=max_tokens,
        num_groups=groups,
        tree=TreeConfig(num_draft_tokens, num_steps, top_k),
        draft_budget=cast(DraftBudgetPolicy, draft_budget),
        dtype=cast(Dtype, dtype),
        device=device,
        threads=threads,
    )
    if quick:
        few = min(max_tokens, QUICK_TOKENS)
        settings = replace(settings, num_prompts=3, batches=settings.batches[:1], max_tokens=few, num_groups=1, max_groups=3)
    _announce(model)
    from eyas.bench.offline import measure

    _report("offline", settings, measure, out)


@bench.command("serve")
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of a server of OpenAI's API.")],
    model: Annotated[str, typer.Option(help="Name of the model; by default the first that the server lists.")] = "",
    endpoint: Annotated[str, typer.Option(help="Which API gets the prompts: completions or chat.")] = "completions",
    num_prompts: Annotated[int, typer.Option(help="How many requests to send.")] = 100,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, at random moments; 0 sends each as soon as --concurrency allows.")
    ] = 0.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Most requests at once; 0 sets no limit. By default 16, or no limit with a rate.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines or a JSON list with prompt, text, turns, messages or conversations.")
    ] = None,
    dataset: Annotated[str, typer.Option(help="Data set of the hub with such rows, by its id.")] = "",
    input_tokens: Annotated[int, typer.Option(help="About how many tokens a random prompt has.")] = 256,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="Randomness of sampling; 0 takes the likeliest token.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for --max-tokens tokens, also past the end; not every server can.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="LATENCY:MS", help="What a good request keeps, such as ttft:200; also itl, tpot, e2e."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts and arrivals.")] = 0,
    api_key: options.ApiKey = "",
    out: Annotated[Path | None, typer.Option(help="Folder of a dated report in JSON; none is written by default.")] = None,
) -> None:
    """Put load on a server and measure latencies, throughput, goodput, and acceptance where the server gives it."""
    from eyas.bench.serve import Endpoint, ServeSettings, read_goodput, run_load

    settings = ServeSettings(
        url=url,
        model=model,
        endpoint=cast(Endpoint, endpoint),
        num_prompts=num_prompts,
        request_rate=request_rate,
        concurrency=concurrency,
        prompts=prompts,
        dataset=dataset,
        input_tokens=input_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        goodput=read_goodput(goodput or ()),
        seed=seed,
    )
    from eyas.bench.report import Report

    with progress() as shown:
        results = asyncio.run(run_load(settings, api_key, _shown_rate(shown, num_prompts)))
    if out:
        Report.here("serve", "eyas", "cpu", settings, results, results.tables()).publish(out)
    else:
        print("\n\n".join(table.markdown() for table in results.tables()))


def _shown_rate(shown: Progress, num_requests: int) -> Callable[[RequestTimes], None]:
    """Show how many requests are done and how fast; return what to call with each request that has ended."""
    num_done, num_tokens, began = 0, 0, time.monotonic()
    shown.show("requests", 0, num_requests)

    def on_done(times: RequestTimes) -> None:
        nonlocal num_done, num_tokens
        num_done, num_tokens = num_done + 1, num_tokens + times.num_output_tokens
        rate = num_tokens / max(time.monotonic() - began, 1e-9)
        shown.show(f"{rate:.0f} output tokens/s, requests", num_done, num_requests)

    return on_done


@bench.command()
def methods(
    model: Model,
    prompts: Annotated[Path, typer.Option(help="JSON Lines with token_ids, text or turns, and a category or task.")],
    method: Annotated[list[str], typer.Option(help="NAME or NAME=DRAFT_MODEL, such as eagle3=FOLDER; may be repeated.")],
    num_prompts: Annotated[int, typer.Option(help="Prompts to decode, spread evenly over the tasks.")] = 20,
    assistant: Annotated[
        str, typer.Option(help="Small model for transformers' assisted generation, beside the methods.")
    ] = "",
    draft_budget: Annotated[str, typer.Option(help="fixed trees, adaptive, or auto as serving has it.")] = "fixed",
    processor_time: Annotated[bool, typer.Option(help="Count the processor's seconds, for busy machines.")] = False,
    generates: Annotated[
        bool, typer.Option("--generate/--no-generate", help="Also measure transformers' generate and its prompt lookup.")
    ] = True,
    temperature: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    max_tokens: MaxTokens = 96,
    num_draft_tokens: NumDraftTokens = TreeConfig.num_draft_tokens,
    num_steps: NumSteps = TreeConfig.num_steps,
    top_k: TopK = TreeConfig.top_k,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "",
    device: options.Device = "auto",
    threads: Threads = 0,
    out: Out = RESULTS,
) -> None:
    """Decode the same prompts with each method in turn; write a table and a bar chart."""
    settings = MethodsSettings(
        model=model,
        methods=tuple(map(MethodSpec.parse, method)),
        prompts=prompts,
        num_prompts=num_prompts,
        assistant=assistant,
        draft_budget=cast(DraftBudgetPolicy, draft_budget),
        processor_time=processor_time,
        generates=generates,
        temperatures=tuple(temperature),
        max_tokens=max_tokens,
        tree=TreeConfig(num_draft_tokens, num_steps, top_k),
        dtype=cast(Dtype, dtype),
        quantization=quantization,
        device=device,
        threads=threads,
    )
    _announce(model)
    from eyas.bench.methods import draw, measure

    results, page = _report("methods", settings, measure, out)
    try:
        draw(results.scores, page.with_suffix(".png"))
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"drawn as {page.with_suffix('.png')}")


def plan(
    tau: Annotated[float, typer.Option(help="Tokens of a verify step, as `eyas bench offline` measures it.")],
    verifier: Annotated[str, typer.Option(help="Cost table of a verifier, see docs/split.md.")] = "llama-3.1-8b@h100",
    drafter: Annotated[str, typer.Option(help="Cost table of a drafter.")] = "eagle3-8b@l4",
    local: LocalTable = "",
    ready: Annotated[float, typer.Option(help="Share of steps whose tree, grown ahead, comes before the commit.")] = 0.0,
    batch: Annotated[list[int], typer.Option(help="Sequences of a verifier; may be repeated.")] = [1, 8, 64],  # noqa: B006
    verifiers: Annotated[int, typer.Option(help="Verifiers that share the drafter.")] = 1,
    num_draft_tokens: NumDraftTokens = TreeConfig.num_draft_tokens,
    num_steps: Annotated[int, typer.Option(help="Levels of a draft tree.")] = 5,
    top_k: TopK = TreeConfig.top_k,
    context: Annotated[int, typer.Option(help="Cached tokens of each sequence.")] = 512,
    trip_ms: Annotated[float, typer.Option(help="A round trip between verifier and drafter, without drafting.")] = 0.0,
    host_ms: Annotated[float, typer.Option(help="Work of the verifier's host in each step.")] = 0.0,
    verifier_price: Annotated[
        float | None, typer.Option(help="Dollars an hour of a verifier; a preset has its own.")
    ] = None,
    drafter_price: Annotated[float | None, typer.Option(help="Dollars an hour of a drafter; a preset has its own.")] = None,
) -> None:
    """Estimate each mode: plain, drafting on the verifier's device, on another one, and there in advance."""
    from eyas.bench.plan import PlanSettings, plan_table

    settings = PlanSettings(
        verifier=_priced(DeviceCosts.read(verifier), verifier_price),
        drafter=_priced(DeviceCosts.read(drafter), drafter_price),
        local=DeviceCosts.read(local or _on_same_gpu(verifier, drafter)),
        tau=tau,
        ready=ready,
        num_nodes=num_draft_tokens,
        num_levels=num_steps,
        top_k=top_k,
        num_verifiers=verifiers,
        context=context,
        trip_s=trip_ms / 1e3,
        host_s=host_ms / 1e3,
    )
    at_least(1, batch=min(batch))
    print(plan_table(settings, batch).markdown())


def _priced(costs: DeviceCosts, dollars_h: float | None) -> DeviceCosts:
    """Return a cost table at another price."""
    return costs if dollars_h is None else replace(costs, dollars_h=dollars_h)


def _on_same_gpu(verifier: str, drafter: str) -> str:
    """Return the preset of the drafter's model on the verifier's GPU. Raises ConfigError unless both are presets."""
    if any("@" not in name or name.endswith(".json") for name in (verifier, drafter)):
        raise ConfigError(
            f"what {drafter} costs on the device of {verifier} is unknown, as both are not presets; give it as --local"
        )
    return f"{drafter.partition('@')[0]}@{verifier.partition('@')[2]}"


def _announce(model: str) -> None:
    """Say what comes, before the imports that take seconds."""
    print(f"loading torch and {model}; results come as they are known, the whole report at the end", file=sys.stderr)


def _report(name: str, settings: Any, measure: Callable[[Any, Progress], Any], out: Path) -> tuple[Any, Path]:
    """Measure, write the report, print it; return the results and the report's page."""
    import torch

    from eyas.bench.report import Report
    from eyas.models.placement import resolve_placement

    device, dtype = resolve_placement(settings.device, settings.dtype, settings.model)
    settings = replace(settings, device=device, dtype=dtype)
    with progress() as shown:
        results = measure(settings, shown)
    settings = replace(settings, threads=torch.get_num_threads())
    return results, Report.here(name, "eyas", device, settings, results, results.tables()).publish(out)
