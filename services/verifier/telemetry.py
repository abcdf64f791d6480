"""What is known of a verifier's drafters, as metrics. Given the links' states; knows no requests.

The way of one request through the verifier: moments and rounds in, its spans out. Knows no gRPC and no engine.

While the request runs, moments and rounds are noted as numbers; only rounds that are traced by themselves have spans then.

What the verifier tells: steps of its engine and ends of its requests in; metrics and spans out.

The engine's thread only notes numbers; spans are made of them where a request ends. Knows no prompts and no tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from eyas.engine.engine import EngineLoad, StepReport
from eyas.request import Chunk, GenerationStats, Request, VerifyStep
from eyas.rpc.server import status_of
from eyas.services.verifier.draft_client import CIRCUITS, DraftClientState, RoundTimes
from eyas.services.verifier.draft_pool import DraftPool
from eyas.telemetry import metrics
from eyas.telemetry.logging import request_log
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, histogram
from eyas.telemetry.setup import Telemetry
from eyas.telemetry.tracing import Attributes, Trace, child_context, context_of, exemplar, trace_of

LINKS = (
    metrics.DRAFT_CLIENT_REQUESTS,
    metrics.DRAFT_CLIENT_DRAFTED_TOKENS,
    metrics.DRAFT_CLIENT_ACCEPTED_TOKENS,
    metrics.DRAFT_CLIENT_SESSIONS,
    metrics.DRAFT_CLIENT_CONNECTED,
    metrics.DRAFT_CLIENT_CIRCUIT_BREAKER,
)


def link_readings(links: Iterable[DraftClientState]) -> Iterator[MetricSample]:
    """The present values of all links."""
    for link in links:
        yield MetricSample(metrics.DRAFT_CLIENT_REQUESTS, link.num_answered, (link.address, "answered"))
        yield MetricSample(metrics.DRAFT_CLIENT_REQUESTS, link.num_lost, (link.address, "late"))
        yield MetricSample(metrics.DRAFT_CLIENT_DRAFTED_TOKENS, link.num_drafted, (link.address,))
        yield MetricSample(metrics.DRAFT_CLIENT_ACCEPTED_TOKENS, link.num_accepted, (link.address,))
        yield MetricSample(metrics.DRAFT_CLIENT_SESSIONS, link.num_sessions, (link.address,))
        yield MetricSample(metrics.DRAFT_CLIENT_CONNECTED, link.up, (link.address,))
        for circuit in CIRCUITS:
            yield MetricSample(metrics.DRAFT_CLIENT_CIRCUIT_BREAKER, circuit == link.circuit, (link.address, circuit))


# As many as the SDK keeps of a span by itself; of more rounds the last ones are told.
MAX_EVENTS = 128


@dataclass(frozen=True)
class _Step:
    """A round as it was noted. at: ns since the epoch."""

    at: int
    round: VerifyStep
    report: StepReport
    times: RoundTimes | None

    def attributes(self) -> Attributes:
        """As an event tells it, times in ms."""
        told: dict[str, int | float] = {
            "drafted_tokens": self.round.drafted,
            "accepted_tokens": self.round.accepted,
            "draft_wait_ms": self.report.wait * 1e3,
            "verify_ms": self.report.verify * 1e3,
        }
        if self.times is not None:
            told["draft_ms"] = self.times.draft * 1e3
            told["round_trip_ms"] = self.times.round_trip * 1e3
        return told


class RequestTrace:
    """One request. span: of its whole stay. ratio: share of its rounds that get spans of their own, its first among them.

    The engine's thread notes, whoever began it ends it.
    """

    def __init__(self, tracer: Tracer, span: Span, ratio: float) -> None:
        self.span = span
        self.traced = span.is_recording()
        self.num_cached = 0
        self.failed = False
        self._tracer = tracer
        self._ratio = ratio
        self._due = 1.0 - ratio
        self._arrived = time.time_ns()
        self._began = 0
        self._first = 0
        self._last = 0
        self._preemptions: deque[int] = deque(maxlen=MAX_EVENTS)
        self._steps: deque[_Step] = deque(maxlen=MAX_EVENTS)
        self._num_rounds = 0
        self._decode: Span | None = None
        self._round: Span | None = None
        self._asked: Span | None = None
        self._ending = threading.Lock()
        self._over = False

    @property
    def queue_seconds(self) -> float | None:
        """How long the request waited for its first step; None if that did not come."""
        return max(self._began - self._arrived, 0) / 1e9 if self._began else None

    @property
    def prefill_seconds(self) -> float | None:
        """From its first step to its first token; None if that did not come."""
        return (self._first - self._began) / 1e9 if self._first else None

    def began(self, now: int) -> None:
        """Its first step began; later ones count nothing."""
        self._began = self._began or now

    def preempted(self, now: int) -> None:
        """It went back to the queue."""
        self._preemptions.append(now)

    def saw(self, now: int, report: StepReport, chunk: Chunk, times: RoundTimes | None) -> None:
        """Note a chunk."""
        self._last = now
        if chunk.finish_reason == "error":
            self.failed = True
        if not self._first and chunk.token_ids:
            self._first, self.num_cached = now, chunk.num_cached
            if self.traced:
                self._decode = self._tracer.start_span("decode", child_context(self.span), start_time=now)
        elif self.traced and chunk.verify_step is not None:
            self._num_rounds += 1
            step = _Step(now, chunk.verify_step, report, times)
            self._steps.append(step)
            with self._ending:
                self._end_round(now, step)
                self._round, self._asked = self._asked, None  # the step has asked for the next tree already

    def next_round(self) -> str:
        """The trace context of the round that is about to be drafted; empty for one without a span of its own."""
        if self._decode is None or not self._ratio:
            return ""
        self._due += self._ratio
        if self._due < 1.0:
            return ""
        self._due -= 1.0
        with self._ending:
            if self._over:
                return ""
            self._asked = self._tracer.start_span("verify_step", child_context(self._decode))
            return dict(trace_of(self._asked)).get("traceparent", "")

    def end(self, status: grpc.StatusCode) -> None:
        """Make the spans and end them."""
        if self.traced:
            now = self._last or time.time_ns()
            with self._ending:
                self._over = True
                self._end_round(now, None)
                self._round, self._asked = self._asked, None
                self._end_round(now, None)
            self._begin_and_end("queue", self._arrived, self._began or now)
            if self._began:
                self._begin_and_end("prefill", self._began, self._first or now)
            if self._decode is not None:
                self._tell_rounds(self._decode)
                self._decode.end(now)
        if status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            self.span.set_status(Status(StatusCode.ERROR, status.name))
            self.span.set_attribute("error.type", status.name)
        self.span.end()

    def _begin_and_end(self, name: str, begin: int, end: int) -> None:
        self._tracer.start_span(name, child_context(self.span), start_time=begin).end(max(begin, end))

    def _tell_rounds(self, decode: Span) -> None:
        room = MAX_EVENTS - len(self._preemptions)
        for at in self._preemptions:
            decode.add_event("preempted", timestamp=at)
        for step in list(self._steps)[len(self._steps) - min(room, len(self._steps)) :]:
            decode.add_event("verify_step", step.attributes(), step.at)
        decode.set_attribute("eyas.verify_steps", self._num_rounds)
        decode.set_attribute("eyas.preemptions", len(self._preemptions))

    def _end_round(self, now: int, step: _Step | None) -> None:
        span, self._round = self._round, None
        if span is not None:
            span.set_attributes(step.attributes() if step else {})
            if step is not None and step.times is not None:
                span.set_attribute("drafter", step.times.drafter)
            span.end(now)


_LOAD = (
    metrics.VLLM_RUNNING,
    metrics.VLLM_WAITING,
    metrics.VLLM_KV_CACHE_USAGE,
    metrics.VERIFIER_KV_CACHE_TOKENS,
    metrics.VERIFIER_PREFIX_CACHE_TOKENS,
)


class VerifierTelemetry:
    """One for an engine and its drafters. model: the name that it serves. `stepped` belongs to the engine's thread."""

    def __init__(self, telemetry: Telemetry | None = None, model: str = "", pool: DraftPool | None = None) -> None:
        self._telemetry = telemetry = telemetry or Telemetry()
        self._model = model
        self._pool = pool
        self._tracks: dict[str, RequestTrace] = {}
        registry = telemetry.registry
        self._requests = counter(metrics.VERIFIER_REQUESTS, registry)
        self._refusals = counter(metrics.VERIFIER_REJECTED_REQUESTS, registry)
        self._queue = histogram(metrics.VERIFIER_QUEUE_DURATION, registry)
        self._prefill = histogram(metrics.VERIFIER_PREFILL_DURATION, registry)
        self._step = histogram(metrics.VERIFIER_STEP_DURATION, registry)
        self._wait = histogram(metrics.VERIFIER_DRAFT_WAIT_DURATION, registry)
        self._trip = histogram(metrics.DRAFT_CLIENT_ROUND_TRIP, registry)
        rounds = counter(metrics.VERIFIER_VERIFY_STEPS, registry)
        self._tree_rounds, self._plain_rounds = rounds.labels("tree"), rounds.labels("plain")
        self._round_tokens = counter(metrics.VERIFIER_VERIFY_STEP_TOKENS, registry)
        self._rows = counter(metrics.VERIFIER_BATCHED_TOKENS, registry)
        self._prompt = counter(metrics.VERIFIER_PROMPT_TOKENS, registry)
        self._cached = counter(metrics.VERIFIER_CACHED_PROMPT_TOKENS, registry)
        self._generated = counter(metrics.VERIFIER_GENERATED_TOKENS, registry)
        self._preemptions = counter(metrics.VERIFIER_PREEMPTIONS, registry)
        self._drafts = counter(metrics.VLLM_DRAFTS, registry).labels(model)
        self._draft_tokens = counter(metrics.VLLM_DRAFT_TOKENS, registry).labels(model)
        self._accepted = counter(metrics.VLLM_ACCEPTED_TOKENS, registry).labels(model)
        self._accepted_at = counter(metrics.VLLM_ACCEPTED_TOKENS_PER_POS, registry)
        self._accepted_at.labels(model, "0")
        self._refusals.labels(grpc.StatusCode.RESOURCE_EXHAUSTED.name)  # so that the first one shows as a rise
        if pool is not None:
            pool.trace_by(self.traceparent)
            registry.register(ScrapeCollector(LINKS, lambda: link_readings(pool.links)))

    def watch(self, load: Callable[[], EngineLoad]) -> None:
        """Tell of the engine's load, as it is whenever somebody looks."""
        self._telemetry.registry.register(ScrapeCollector(_LOAD, lambda: _load_readings(load(), self._model)))

    @contextmanager
    def request(self, request: Request, trace: Trace) -> Iterator[None]:
        """A request, by the id that the engine knows, from its arrival in the caller's trace to its end, which the body's
        way of ending tells."""
        tracer = self._telemetry.tracer
        told = {"eyas.request.id": request.id, "gen_ai.request.model": self._model}
        span = tracer.start_span("serve", context_of(trace), SpanKind.SERVER, told)
        track = self._tracks[request.id] = RequestTrace(tracer, span, self._telemetry.config.step_span_ratio)
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
        if self._pool is not None and chunk.verify_step is not None and chunk.verify_step.drafted:
            times = self._pool.verified(chunk.request_id, chunk.verify_step)
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
        if not stats.num_verify_steps:
            return
        self._wait.observe(report.wait)
        num_drafts = stats.offered_by_depth[0] if stats.offered_by_depth else 0
        self._round_tokens.inc(stats.num_emitted)
        self._plain_rounds.inc(stats.num_verify_steps - num_drafts)
        if num_drafts:
            self._tree_rounds.inc(num_drafts)
            self._drafts.inc(num_drafts)
            self._draft_tokens.inc(stats.num_drafted)
            self._accepted.inc(stats.num_accepted)
            for depth, number in enumerate(stats.accepted_by_depth):
                self._accepted_at.labels(self._model, str(depth)).inc(number)

    def _ended(self, track: RequestTrace, num_prompt: int, status: grpc.StatusCode) -> None:
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


def _load_readings(load: EngineLoad, model: str) -> list[MetricSample]:
    used = load.num_kv_tokens - load.free_kv_tokens
    return [
        MetricSample(metrics.VLLM_RUNNING, load.num_running, (model,)),
        MetricSample(metrics.VLLM_WAITING, load.num_waiting, (model,)),
        MetricSample(metrics.VLLM_KV_CACHE_USAGE, used / load.num_kv_tokens if load.num_kv_tokens else 0.0, (model,)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, used, ("used",)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, load.free_kv_tokens, ("free",)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, load.queued_kv_tokens, ("queued",)),
        MetricSample(metrics.VERIFIER_PREFIX_CACHE_TOKENS, load.cached_kv_tokens),
    ]
