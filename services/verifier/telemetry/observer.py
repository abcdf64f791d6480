"""What the verifier tells: steps of its engine and ends of its requests in; metrics and spans out.

The engine's thread only notes numbers; spans are made of them where a request ends. Knows no prompts and no tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
from opentelemetry.trace import SpanKind

from eyas.engine.engine import Load, StepReport
from eyas.request import Chunk, GenerationStats, Request
from eyas.rpc.server import status_of
from eyas.telemetry import catalog
from eyas.telemetry.logs import request_log
from eyas.telemetry.metrics import Reading, Scraped, counter, histogram
from eyas.telemetry.process import Telemetry
from eyas.telemetry.tracing import Trace, context_of, exemplar
from services.verifier.pool import DraftPool
from services.verifier.telemetry.links import LINKS, link_readings
from services.verifier.telemetry.tracks import Track

_LOAD = (
    catalog.VLLM_RUNNING,
    catalog.VLLM_WAITING,
    catalog.VLLM_CACHE,
    catalog.VERIFIER_SLOTS,
    catalog.VERIFIER_CACHED_SLOTS,
)


class VerifierTelemetry:
    """One for an engine and its drafters. model: the name that it serves. `stepped` belongs to the engine's thread."""

    def __init__(self, telemetry: Telemetry | None = None, model: str = "", pool: DraftPool | None = None) -> None:
        self._telemetry = telemetry = telemetry or Telemetry()
        self._model = model
        self._pool = pool
        self._tracks: dict[str, Track] = {}
        registry = telemetry.registry
        self._requests = counter(catalog.VERIFIER_REQUESTS, registry)
        self._refusals = counter(catalog.VERIFIER_REFUSALS, registry)
        self._queue = histogram(catalog.VERIFIER_QUEUE, registry)
        self._prefill = histogram(catalog.VERIFIER_PREFILL, registry)
        self._step = histogram(catalog.VERIFIER_STEP, registry)
        self._wait = histogram(catalog.VERIFIER_WAIT, registry)
        self._trip = histogram(catalog.LINK_TRIP, registry)
        rounds = counter(catalog.VERIFIER_ROUNDS, registry)
        self._tree_rounds, self._plain_rounds = rounds.labels("tree"), rounds.labels("plain")
        self._round_tokens = counter(catalog.VERIFIER_ROUND_TOKENS, registry)
        self._rows = counter(catalog.VERIFIER_ROWS, registry)
        self._prompt = counter(catalog.VERIFIER_PROMPT, registry)
        self._cached = counter(catalog.VERIFIER_CACHED, registry)
        self._generated = counter(catalog.VERIFIER_GENERATED, registry)
        self._preemptions = counter(catalog.VERIFIER_PREEMPTIONS, registry)
        self._drafts = counter(catalog.VLLM_DRAFTS, registry).labels(model)
        self._draft_tokens = counter(catalog.VLLM_DRAFT_TOKENS, registry).labels(model)
        self._accepted = counter(catalog.VLLM_ACCEPTED, registry).labels(model)
        self._accepted_at = counter(catalog.VLLM_ACCEPTED_AT, registry)
        self._accepted_at.labels(model, "0")
        self._refusals.labels(grpc.StatusCode.RESOURCE_EXHAUSTED.name)  # so that the first one shows as a rise
        if pool is not None:
            pool.trace_by(self.traceparent)
            registry.register(Scraped(LINKS, lambda: link_readings(pool.links)))

    def watch(self, load: Callable[[], Load]) -> None:
        """Tell of the engine's load, as it is whenever somebody looks."""
        self._telemetry.registry.register(Scraped(_LOAD, lambda: _load_readings(load(), self._model)))

    @contextmanager
    def request(self, request: Request, trace: Trace) -> Iterator[None]:
        """A request, by the id that the engine knows, from its arrival in the caller's trace to its end, which the body's
        way of ending tells."""
        tracer = self._telemetry.tracer
        told = {"eyas.request.id": request.id, "gen_ai.request.model": self._model}
        span = tracer.start_span("serve", context_of(trace), SpanKind.SERVER, told)
        track = self._tracks[request.id] = Track(tracer, span, self._telemetry.config.round_span_ratio)
        status = grpc.StatusCode.OK
        with request_log(request.id, span):
            try:
                yield
            except BaseException as error:
                cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
                status = grpc.StatusCode.CANCELLED if cancelled else status_of(error)
                raise
            finally:
                del self._tracks[request.id]
                self._ended(track, len(request.prompt_ids), status)

    def traceparent(self, session: str) -> str:
        """The trace context of a session's next round, where that is to be traced; else empty."""
        track = self._tracks.get(session)
        return track.next_round() if track is not None and track.traced else ""

    def stepped(self, report: StepReport, chunks: Sequence[Chunk]) -> None:
        """Note what a step did."""
        now = time.time_ns()
        stats, num_generated = GenerationStats(), 0
        for request_id in report.began:
            if track := self._tracks.get(request_id):
                track.began(now - int((report.wait + report.verify) * 1e9))
        for request_id in report.preempted:
            if track := self._tracks.get(request_id):
                track.preempted(now)
        for chunk in chunks:
            num_generated += len(chunk.token_ids)
            stats.add(chunk)
            self._note(now, report, chunk)
        if report.num_rows:
            self._count(report, stats, num_generated)

    def _note(self, now: int, report: StepReport, chunk: Chunk) -> None:
        times = None
        if self._pool is not None and chunk.round is not None and chunk.round.drafted:
            times = self._pool.verified(chunk.request_id, chunk.round)
            if times is not None:
                self._trip.observe(times.round_trip)
        if track := self._tracks.get(chunk.request_id):
            track.saw(now, report, chunk, times)

    def _count(self, report: StepReport, stats: GenerationStats, num_generated: int) -> None:
        self._step.observe(report.verify)
        self._rows.inc(report.num_rows)
        self._generated.inc(num_generated)
        if report.preempted:
            self._preemptions.inc(len(report.preempted))
        if not stats.num_rounds:
            return
        self._wait.observe(report.wait)
        num_drafts = stats.offered_by_depth[0] if stats.offered_by_depth else 0
        self._round_tokens.inc(stats.num_emitted)
        self._plain_rounds.inc(stats.num_rounds - num_drafts)
        if num_drafts:
            self._tree_rounds.inc(num_drafts)
            self._drafts.inc(num_drafts)
            self._draft_tokens.inc(stats.num_drafted)
            self._accepted.inc(stats.num_accepted)
            for depth, number in enumerate(stats.accepted_by_depth):
                self._accepted_at.labels(self._model, str(depth)).inc(number)

    def _ended(self, track: Track, num_prompt: int, status: grpc.StatusCode) -> None:
        if track.failed:
            status = grpc.StatusCode.INTERNAL
        self._requests.labels(status.name).inc()
        shown = exemplar(track.span)
        if track.queue_seconds is not None:
            self._queue.observe(track.queue_seconds, shown)
        elif status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            self._refusals.labels(status.name).inc()
        if track.prefill_seconds is not None:
            self._prefill.observe(track.prefill_seconds, shown)
            self._prompt.inc(num_prompt)
            self._cached.inc(track.num_cached)
        track.end(status)


def _load_readings(load: Load, model: str) -> list[Reading]:
    used = load.num_slots - load.free_slots
    return [
        Reading(catalog.VLLM_RUNNING, load.num_running, (model,)),
        Reading(catalog.VLLM_WAITING, load.num_waiting, (model,)),
        Reading(catalog.VLLM_CACHE, used / load.num_slots if load.num_slots else 0.0, (model,)),
        Reading(catalog.VERIFIER_SLOTS, used, ("used",)),
        Reading(catalog.VERIFIER_SLOTS, load.free_slots, ("free",)),
        Reading(catalog.VERIFIER_SLOTS, load.queued_slots, ("queued",)),
        Reading(catalog.VERIFIER_CACHED_SLOTS, load.cached_slots),
    ]
