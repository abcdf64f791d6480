"""Metrics and spans of a verifier: its engine's steps, its requests, its drafters.

While a request runs, the engine's thread records times and counts; its spans are made when it ends. Only a sampled share of
verify steps, which are traced across the draft service, have spans earlier.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import grpc
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer

from eyas.api.request import Chunk, GenerationStats, Request, VerifyStep
from eyas.engine.engine import EngineLoad, StepReport
from eyas.rpc.status import status_of
from eyas.services.verifier.breaker import CIRCUIT_STATES
from eyas.services.verifier.draft_client import DraftTiming
from eyas.services.verifier.draft_pool import DraftPool
from eyas.telemetry import metrics
from eyas.telemetry.exporters import Telemetry
from eyas.telemetry.logging import request_log
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, histogram
from eyas.telemetry.tracing import Attributes, Trace, child_context, context_of, end_span, exemplar, trace_of

# Most events of a span, as in the SDK; earlier verify steps are dropped.
MAX_EVENTS = 128


class VerifierTelemetry:
    """Telemetry of one engine and its drafters. The engine's thread calls `on_step`.

    Args:
        model: the served name.
        own_method: of a drafter in the verifier; empty if draft services draft.
    """

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        model: str = "",
        pool: DraftPool | None = None,
        own_method: str = "",
    ) -> None:
        self._own_method = own_method
        self._telemetry = telemetry = telemetry or Telemetry()
        self._model = model
        self._pool = pool
        self._traces: dict[str, RequestTrace] = {}
        registry = telemetry.registry
        self._requests = counter(metrics.VERIFIER_REQUESTS, registry)
        self._rejected = counter(metrics.VERIFIER_REJECTED_REQUESTS, registry)
        self._queue = histogram(metrics.VERIFIER_QUEUE_DURATION, registry)
        self._prefill = histogram(metrics.VERIFIER_PREFILL_DURATION, registry)
        self._step = histogram(metrics.VERIFIER_STEP_DURATION, registry)
        self._wait = histogram(metrics.VERIFIER_DRAFT_WAIT_DURATION, registry)
        self._round_trip = histogram(metrics.DRAFT_CLIENT_ROUND_TRIP, registry)
        steps = counter(metrics.VERIFIER_VERIFY_STEPS, registry)
        self._tree_steps, self._plain_steps = steps.labels("tree"), steps.labels("plain")
        self._step_tokens = counter(metrics.VERIFIER_VERIFY_STEP_TOKENS, registry)
        self._batched = counter(metrics.VERIFIER_BATCHED_TOKENS, registry)
        self._prompt = counter(metrics.VERIFIER_PROMPT_TOKENS, registry)
        self._cached = counter(metrics.VERIFIER_CACHED_PROMPT_TOKENS, registry)
        self._generated = counter(metrics.VERIFIER_GENERATED_TOKENS, registry)
        self._preemptions = counter(metrics.VERIFIER_PREEMPTIONS, registry)
        self._drafts = counter(metrics.VLLM_DRAFTS, registry).labels(model)
        self._draft_tokens = counter(metrics.VLLM_DRAFT_TOKENS, registry).labels(model)
        self._accepted = counter(metrics.VLLM_ACCEPTED_TOKENS, registry).labels(model)
        self._accepted_at = counter(metrics.VLLM_ACCEPTED_TOKENS_PER_POS, registry)
        self._accepted_at.labels(model, "0")
        self._rejected.labels(grpc.StatusCode.RESOURCE_EXHAUSTED.name)  # exported as 0 before the first one
        if pool is not None:
            if not isinstance(telemetry.tracer, NoOpTracer):
                pool.trace_with(self.traceparent)
            registry.register(ScrapeCollector(lambda: _draft_client_samples(pool)))

    def watch(self, load: Callable[[], EngineLoad]) -> None:
        """Export the engine's load, read at every scrape."""
        self._telemetry.registry.register(ScrapeCollector(lambda: _load_samples(load(), self._model)))

    @contextmanager
    def request(self, request: Request, trace: Trace) -> Iterator[None]:
        """Trace and count a request while the body runs; an exception of the body gives its status.

        Args:
            request: with the id that the engine knows.
            trace: trace context of the caller.
        """
        tracer = self._telemetry.tracer
        attributes = {"eyas.request.id": request.id, "gen_ai.request.model": self._model}
        span = tracer.start_span("serve", context_of(trace), SpanKind.SERVER, attributes)
        own = self._traces[request.id] = RequestTrace(tracer, span, self._telemetry.config.step_span_ratio)
        status = grpc.StatusCode.OK
        with request_log(request.id, span):
            try:
                yield
            except BaseException as error:
                status = status_of(error)
                raise
            finally:
                del self._traces[request.id]
                self._record_end(own, len(request.prompt_ids), status)

    def traceparent(self, session: str) -> str:
        """Return the trace context of a session's next verify step; empty if that is not sampled."""
        trace = self._traces.get(session)
        return trace.next_step() if trace is not None and trace.traced else ""

    def on_step(self, report: StepReport, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Record a step and its chunks. Returns the chunks, with method and times in the details that requests ask for."""
        now = time.time_ns()
        stats, num_generated, reported = GenerationStats(), 0, list[Chunk]()
        for request_id in report.began:
            if trace := self._traces.get(request_id):
                trace.began(now - int((report.wait + report.verify) * 1e9))
        for request_id in report.preempted:
            if trace := self._traces.get(request_id):
                trace.preempted(now)
        for chunk in chunks:
            num_generated += len(chunk.token_ids)
            stats.add(chunk)
            timing, method = None, self._own_method
            if self._pool is not None and chunk.verify_step is not None and chunk.verify_step.drafted:
                timing, method = self._pool.count_verified(chunk.request_id, chunk.verify_step)
            if timing is not None:
                self._round_trip.observe(timing.round_trip)
            if trace := self._traces.get(chunk.request_id):
                trace.record(now, report, chunk, timing)
            has_details = chunk.verify_step is not None and chunk.verify_step.details is not None
            reported.append(_with_times(chunk, report, timing, method) if has_details else chunk)
        if report.num_rows:
            self._record_step(report, stats, num_generated)
        return reported

    def _record_step(self, report: StepReport, stats: GenerationStats, num_generated: int) -> None:
        self._step.observe(report.verify)
        self._batched.inc(report.num_rows)
        self._generated.inc(num_generated)
        if report.preempted:
            self._preemptions.inc(len(report.preempted))
        if not stats.num_verify_steps:
            return
        self._wait.observe(report.wait)
        num_drafts = stats.offered_by_depth[0] if stats.offered_by_depth else 0
        self._step_tokens.inc(stats.num_emitted)
        self._plain_steps.inc(stats.num_verify_steps - num_drafts)
        if num_drafts:
            self._tree_steps.inc(num_drafts)
            self._drafts.inc(num_drafts)
            self._draft_tokens.inc(stats.num_drafted)
            self._accepted.inc(stats.num_accepted)
            for depth, number in enumerate(stats.accepted_by_depth):
                self._accepted_at.labels(self._model, str(depth)).inc(number)

    def _record_end(self, trace: RequestTrace, num_prompt: int, status: grpc.StatusCode) -> None:
        if trace.failed:
            status = grpc.StatusCode.INTERNAL
        self._requests.labels(status.name).inc()
        sample = exemplar(trace.span)
        if trace.queue_seconds is not None:
            self._queue.observe(trace.queue_seconds, sample)
        elif status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            self._rejected.labels(status.name).inc()
        if trace.prefill_seconds is not None:
            self._prefill.observe(trace.prefill_seconds, sample)
            self._prompt.inc(num_prompt)
            self._cached.inc(trace.num_cached)
        trace.end(status)


def _load_samples(load: EngineLoad, model: str) -> list[MetricSample]:
    used = load.num_kv_tokens - load.free_kv_tokens
    return [
        MetricSample(metrics.VLLM_RUNNING, load.num_running, (model,)),
        MetricSample(metrics.VLLM_WAITING, load.num_waiting, (model,)),
        MetricSample(metrics.VLLM_KV_CACHE_USAGE, used / load.num_kv_tokens if load.num_kv_tokens else 0.0, (model,)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, used, ("used",)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, load.free_kv_tokens, ("free",)),
        MetricSample(metrics.VERIFIER_KV_CACHE_TOKENS, load.queued_kv_tokens, ("queued",)),
        MetricSample(metrics.VERIFIER_PREFIX_CACHE_TOKENS, load.cached_kv_tokens),
        MetricSample(metrics.VERIFIER_STEP_AGE, load.step_seconds),
    ]


def _draft_client_samples(pool: DraftPool) -> Iterator[MetricSample]:
    for status in pool.status:
        label = (status.address,)
        yield MetricSample(metrics.DRAFT_CLIENT_REQUESTS, status.num_answered, (*label, "answered"))
        yield MetricSample(metrics.DRAFT_CLIENT_REQUESTS, status.num_lost, (*label, "late"))
        yield MetricSample(metrics.DRAFT_CLIENT_DRAFTED_TOKENS, status.num_drafted, label)
        yield MetricSample(metrics.DRAFT_CLIENT_ACCEPTED_TOKENS, status.num_accepted, label)
        yield MetricSample(metrics.DRAFT_CLIENT_SESSIONS, status.num_sessions, label)
        yield MetricSample(metrics.DRAFT_CLIENT_CONNECTED, status.connected, label)
        for circuit in CIRCUIT_STATES:
            yield MetricSample(metrics.DRAFT_CLIENT_CIRCUIT_BREAKER, circuit == status.circuit, (*label, circuit))


class RequestTrace:
    """The times of one request, and its spans.

    Args:
        span: of the whole request.
        ratio: share of verify steps with spans of their own; the first is always one of them. The engine's thread records;
            the request's task calls `end`.
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
        self._steps: deque[tuple[int, Attributes]] = deque(maxlen=MAX_EVENTS)
        self._num_steps = 0
        self._decode: Span | None = None
        self._current: Span | None = None
        self._next: Span | None = None
        self._lock = threading.Lock()
        self._ended = False

    @property
    def queue_seconds(self) -> float | None:
        """Return the time from arrival to the first step; None if there was none."""
        return max(self._began - self._arrived, 0) / 1e9 if self._began else None

    @property
    def prefill_seconds(self) -> float | None:
        """Return the time from the first step to the first token; None if there was none."""
        return (self._first - self._began) / 1e9 if self._first else None

    def began(self, now: int) -> None:
        """Record the start of the first step; ignore later ones."""
        self._began = self._began or now

    def preempted(self, now: int) -> None:
        """Record that the request went back to the queue."""
        self._preemptions.append(now)

    def record(self, now: int, report: StepReport, chunk: Chunk, timing: DraftTiming | None) -> None:
        """Record a chunk."""
        self._last = now
        if chunk.finish_reason == "error":
            self.failed = True
        if not self._first and chunk.token_ids:
            self._first, self.num_cached = now, chunk.num_cached
            if self.traced:
                self._decode = self._tracer.start_span("decode", child_context(self.span), start_time=now)
        elif self.traced and chunk.verify_step is not None:
            self._num_steps += 1
            attributes = _step_attributes(chunk.verify_step, report, timing)
            self._steps.append((now, attributes))
            with self._lock:
                if self._current is not None:
                    self._current.set_attributes({**attributes, "eyas.drafter": timing.drafter} if timing else attributes)
                    self._current.end(now)
                self._current, self._next = self._next, None  # the engine has requested the next tree already

    def next_step(self) -> str:
        """Return the trace context of the verify step that is drafted next; empty if it gets no span of its own."""
        if self._decode is None or not self._ratio:
            return ""
        self._due += self._ratio
        if self._due < 1.0:
            return ""
        self._due -= 1.0
        with self._lock:
            if self._ended:
                return ""
            self._next = self._tracer.start_span("verify_step", child_context(self._decode))
            return dict(trace_of(self._next)).get("traceparent", "")

    def end(self, status: grpc.StatusCode) -> None:
        """Create the remaining spans and end all."""
        if self.traced:
            now = self._last or time.time_ns()
            with self._lock:
                self._ended = True
                for step in filter(None, (self._current, self._next)):
                    step.end(now)
            self._add_span("queue", self._arrived, self._began or now)
            if self._began:
                self._add_span("prefill", self._began, self._first or now)
            if self._decode is not None:
                self._add_events(self._decode)
                self._decode.end(now)
        end_span(self.span, status.name)

    def _add_span(self, name: str, begin: int, end: int) -> None:
        self._tracer.start_span(name, child_context(self.span), start_time=begin).end(max(begin, end))

    def _add_events(self, decode: Span) -> None:
        num_steps = min(MAX_EVENTS - len(self._preemptions), len(self._steps))
        for at in self._preemptions:
            decode.add_event("preempted", timestamp=at)
        for at, attributes in list(self._steps)[len(self._steps) - num_steps :]:
            decode.add_event("verify_step", attributes, at)
        decode.set_attribute("eyas.verify_steps", self._num_steps)
        decode.set_attribute("eyas.preemptions", len(self._preemptions))


def _with_times(chunk: Chunk, report: StepReport, timing: DraftTiming | None, method: str) -> Chunk:
    step = chunk.verify_step
    assert step is not None
    assert step.details is not None
    wait_ms, verify_ms = report.wait * 1e3, report.verify * 1e3
    details = replace(step.details, wait_ms=wait_ms, verify_ms=verify_ms, num_rows=report.num_rows)
    if timing is not None:
        draft_ms, round_trip_ms = timing.draft * 1e3, timing.round_trip * 1e3
        details = replace(details, method=method, draft_ms=draft_ms, round_trip_ms=round_trip_ms)
    elif method and step.drafted:  # a drafter in this process, whose drafting is the wait, or a tree that was prepared ahead
        details = replace(details, method=method, draft_ms=wait_ms)
    return replace(chunk, verify_step=replace(step, details=details))


def _step_attributes(step: VerifyStep, report: StepReport, timing: DraftTiming | None) -> Attributes:
    """Return the attributes of a verify step's event or span; times in ms."""
    attributes: dict[str, str | bool | int | float] = {
        "eyas.drafted_tokens": step.drafted,
        "eyas.accepted_tokens": step.accepted,
        "eyas.draft_wait_ms": report.wait * 1e3,
        "eyas.verify_ms": report.verify * 1e3,
    }
    if timing is not None:
        attributes |= {"eyas.draft_ms": timing.draft * 1e3, "eyas.round_trip_ms": timing.round_trip * 1e3}
    return attributes
