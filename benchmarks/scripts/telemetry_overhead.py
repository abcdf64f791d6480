"""The cost of telemetry: the demo models decode once, then the hooks of verifier and router get every step many times.

Counts processor time, the exporting thread's too. Writes a dated report: `python -m benchmarks.scripts.telemetry_overhead`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

from eyas.api.outputs import TextChunk
from eyas.api.request import Chunk, Request, SamplingParams
from eyas.bench.report import Report, Table, number
from eyas.config import DraftingConfig, EngineConfig, TelemetryConfig, TreeConfig
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine, load_model
from eyas.engine.engine import StepReport
from eyas.rpc.messages import GenerateCall
from eyas.services.local.compare import read_prompts
from eyas.services.router.telemetry import RouterTelemetry
from eyas.services.verifier.telemetry import VerifierTelemetry
from eyas.telemetry.exporters import Telemetry

MODELS = Path("models/demo")
TREE = TreeConfig(num_draft_tokens=8, num_steps=4, top_k=2)
NUM_TOKENS = 96
# Telemetry is far cheaper than decoding, and the clock is coarse.
REPEATS = 20

ReportedStep = tuple[StepReport, list[Chunk]]


@dataclass(frozen=True)
class Steps:
    """Work of an engine for some requests at once. seconds: of processor time, a step."""

    requests: Sequence[Request]
    reported: Sequence[ReportedStep]
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Cost of telemetry, in microseconds of processor time a step: on the engine's thread, which the step waits for, and in
    all.

    Attributes:
        share, share_in_all: of the step's own time.
    """

    batch: int
    tracing: str
    engine: float
    in_all: float
    share: float
    share_in_all: float


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Attributes:
        num_tokens: of each request.
    """

    tree_nodes: int = TREE.num_draft_tokens
    num_tokens: int = NUM_TOKENS
    repeats: int = REPEATS


class Encoding(SpanExporter):
    """Work of an OTLP exporter without sending."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode spans and drop the bytes."""
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def main(out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("benchmarks/results")) -> None:
    """Measure what metrics and traces cost a verify step of the demo models."""
    torch.set_num_threads(1)
    costs = [cost for batch in (1, 8, 16) for cost in measure(decode(batch, NUM_TOKENS), REPEATS)]
    program = "python -m benchmarks.scripts.telemetry_overhead"
    Report.here("telemetry-overhead", program, "cpu", Settings(), costs, [table(costs)]).publish(out)


def decode(batch: int, num_tokens: int) -> Steps:
    """Run this number of requests at once until they finish."""
    target, head = str(MODELS / "target"), DraftHead(str(MODELS / "eagle3"))
    drafter = head.build_drafter(target, "float32", "cpu", TREE, DraftingConfig())
    fuser = head.build_fuser(target, "float32", "cpu")
    config = EngineConfig(max_kv_tokens=16384, draft_budget="fixed")
    engine = assemble_engine(load_model(target, fuser, "float32", "cpu", config), fuser, config, TREE, drafter)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
    prompts = read_prompts(MODELS / "prompts.jsonl")[:batch]
    requests = [Request(f"request-{i}", prompt.token_ids, sampling) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    reported, started = [], time.process_time()
    while engine.has_work:
        chunks = engine.step()
        reported.append((engine.report, chunks))
    return Steps(requests, reported, (time.process_time() - started) / len(reported))


def measure(steps: Steps, repeats: int) -> list[Cost]:
    """Report the same steps without an exporter, with every request traced, and with every verify step traced."""

    costs = [_cost(steps, "metrics only", Telemetry(), repeats)]
    for name, config in (
        ("every request", TelemetryConfig()),
        ("every round", TelemetryConfig(step_span_ratio=1.0)),
    ):
        provider = TracerProvider(sampler=DEFAULT_ON, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(Encoding()))
        costs.append(_cost(steps, name, Telemetry(config, provider.get_tracer("eyas")), repeats, provider.shutdown))
    return costs


def _cost(steps: Steps, name: str, telemetry: Telemetry, repeats: int, flush: Callable[[], object] = bool) -> Cost:
    verifier, router = VerifierTelemetry(telemetry, "demo"), RouterTelemetry(telemetry)
    started = time.process_time()
    engine = sum(_report(steps, verifier, router) for _ in range(repeats))
    flush()
    num_steps = repeats * len(steps.reported)
    engine, in_all = engine / num_steps, (time.process_time() - started) / num_steps
    return Cost(len(steps.requests), name, engine * 1e6, in_all * 1e6, engine / steps.seconds, in_all / steps.seconds)


def _report(steps: Steps, verifier: VerifierTelemetry, router: RouterTelemetry) -> float:
    """Run everything but the work itself for these requests; return its seconds on the engine's thread."""
    engine = 0.0
    with ExitStack() as stack:
        seen = {}
        for request in steps.requests:
            observed = stack.enter_context(router.request(GenerateCall(request)))
            seen[request.id] = observed
            call = observed.set_call(GenerateCall(request, model="demo"))
            stack.enter_context(verifier.request(request, call.trace))
        for report, chunks in steps.reported:
            started = time.thread_time()
            for chunk in chunks:
                verifier.traceparent(chunk.request_id)
            verifier.on_step(report, chunks)
            engine += time.thread_time() - started
            for chunk in chunks:
                seen[chunk.request_id].add(TextChunk(chunk))
    return engine


def table(costs: Sequence[Cost]) -> Table:
    """Return the table of the report."""
    rows = [
        (
            f"{c.batch}",
            c.tracing,
            number(c.engine),
            f"{100 * c.share:.2f} %",
            number(c.in_all),
            f"{100 * c.share_in_all:.2f} %",
        )
        for c in costs
    ]
    note = (
        "Processor time that telling of a step takes, in us and as a share of the step's own (drafting included): on the "
        "engine's thread, which the next step waits for; and in all, with the router, the ends of requests and the "
        "exporting thread. Metrics are always on. `every request` is OpenTelemetry's default sampling; spans are encoded "
        "as OTLP and thrown away."
    )
    columns = ("requests at once", "traced", "engine's thread", "of a step", "in all", "of a step")
    return Table("Telling", columns, tuple(rows), note)


if __name__ == "__main__":
    typer.run(main)
