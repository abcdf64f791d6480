"""Metrics, spans and log lines of a router: one `RequestSpan` for each request, counters for what happens around it.

Prompts and completions appear only if `telemetry.log_prompts` is set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPMethod
from typing import get_args

import grpc
from opentelemetry.trace import Span, SpanKind
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.api.outputs import TextChunk
from eyas.api.request import Request
from eyas.rpc.messages import NO_DRAFTER, GenerateCall, Role
from eyas.rpc.status import status_of
from eyas.services.router.dispatch.routing import Pair
from eyas.telemetry import metrics
from eyas.telemetry.exporters import Telemetry
from eyas.telemetry.logging import LogContext, request_log
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, gauge, histogram
from eyas.telemetry.tracing import Attributes, context_of, end_span, exemplar, trace_of

PROVIDER = "eyas"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A client's request before it is read.

    Attributes:
        request_id: the client's, or a new one.
        trace: W3C trace context of the caller.
        at: when it arrived, by time.perf_counter(); 0 where it is not known.
    """

    request_id: str
    trace: tuple[tuple[str, str], ...] = ()
    at: float = 0.0


@dataclass
class RequestSpan:
    """The span and the numbers of one request.

    Attributes:
        operation: its name in the GenAI conventions.
        call: None of a request that was rejected before it became one.
    """

    arrival: Arrival
    span: Span
    log_context: LogContext
    operation: str
    started_at: float
    call: GenerateCall | None = None
    model: str = ""
    first_token_at: float = 0.0
    num_first_tokens: int = 0
    num_output_tokens: int = 0
    failed: bool = False
    last_chunks: list[TextChunk] = field(default_factory=list)
    texts: list[str] | None = None
    prompt_text: str | None = None

    def set_call(self, call: GenerateCall) -> GenerateCall:
        """Take the call as the router sends it on; return it with this request's trace."""
        self.model, self.call = call.model, replace(call, trace=trace_of(self.span) or call.trace)
        self.log_context.request_id = call.request.id
        return self.call

    def add(self, chunk: TextChunk) -> None:
        """Count a chunk for the client."""
        num_tokens = len(chunk.chunk.token_ids)
        if num_tokens and not self.first_token_at:
            self.first_token_at, self.num_first_tokens = time.perf_counter(), num_tokens
        self.num_output_tokens += num_tokens
        if chunk.totals is not None:
            self.last_chunks.append(chunk)
            self.failed |= chunk.chunk.finish_reason == "error"
        if self.texts is not None:
            self.texts.append(chunk.text)

    @property
    def labels(self) -> tuple[str, ...]:
        """Operation, provider and model: the labels of the GenAI metrics."""
        return self.operation, PROVIDER, self.model

    @property
    def request_id(self) -> str:
        """The id of the call, which may be one that the router gave it."""
        return self.call.request.id if self.call else self.arrival.request_id

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt, as far as they are known."""
        return self.call.request.prompt_ids if self.call else ()

    @property
    def prompt(self) -> object:
        """The prompt's text, or its token ids if it has no text."""
        return self.prompt_text if self.prompt_text is not None else list(self.prompt_ids)

    def set_attributes(self) -> None:
        """Set the span's attributes: the GenAI conventions', and the numbers of speculation."""
        if not self.span.is_recording():
            return
        totals = [last.totals for last in self.last_chunks if last.totals]
        stats = [total.stats for total in totals if total.stats]
        self.span.update_name(f"{self.operation} {self.model}".rstrip())
        if self.call:
            self.span.set_attributes(_asked(self.call.request))
        self.span.set_attributes(
            {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": len(self.prompt_ids),
                "gen_ai.usage.output_tokens": self.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": sum(total.num_cached_tokens for total in totals),
                "gen_ai.response.finish_reasons": [str(last.chunk.finish_reason) for last in self.last_chunks],
                "eyas.request.id": self.request_id,
                "eyas.verify_steps": sum(stat.num_verify_steps for stat in stats),
                "eyas.accepted_tokens": sum(stat.num_accepted for stat in stats),
            }
        )
        if self.texts is not None:
            self.span.set_attributes({"eyas.prompt": str(self.prompt), "eyas.completion": "".join(self.texts)})


def _asked(request: Request) -> Attributes:
    """Return the attributes of a request's own settings."""
    sampling = request.sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        **({"gen_ai.conversation.id": request.session} if request.session else {}),
        **({"gen_ai.request.choice.count": sampling.n} if sampling.n > 1 else {}),  # the conventions leave out 1
    }


class RouterTelemetry:
    """The metrics and traces of one router, for requests of both listeners."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry = telemetry or Telemetry()
        self._tracer, registry = telemetry.tracer, telemetry.registry
        self._duration = histogram(metrics.REQUEST_DURATION, registry)
        self._first_token = histogram(metrics.TIME_TO_FIRST_TOKEN, registry)
        self._per_token = histogram(metrics.TIME_PER_OUTPUT_TOKEN, registry)
        self._usage = histogram(metrics.TOKEN_USAGE, registry)
        self._requests = counter(metrics.ROUTER_REQUESTS, registry)
        self._http = histogram(metrics.HTTP_REQUEST_DURATION, registry)
        self._running = gauge(metrics.ROUTER_ACTIVE_REQUESTS, registry)
        self._waiting = gauge(metrics.ROUTER_WAITING_REQUESTS, registry)
        self._upstream_requests = counter(metrics.ROUTER_UPSTREAM_REQUESTS, registry)
        self._retries = counter(metrics.ROUTER_UPSTREAM_RETRIES, registry)
        self._undrafted = counter(metrics.ROUTER_WITHOUT_DRAFTER, registry)
        self._tau = histogram(metrics.ROUTER_ACCEPTANCE_LENGTH, registry)

    def watch(self, known: Callable[[Role], Sequence[object]]) -> None:
        """Export the number of known workers of each role. known: called at every scrape, from another thread."""

        def read() -> list[MetricSample]:
            return [MetricSample(metrics.ROUTER_WORKERS, len(known(role)), (role,)) for role in get_args(Role)]

        self._telemetry.registry.register(ScrapeCollector(read))

    def waiting(self) -> AbstractContextManager[None]:
        """Count a completion as waiting for a verifier while the body runs."""
        return self._waiting.track_inprogress()

    def http_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Measure an HTTP response. route: the path of a route, "" for an unknown path, never a path of the client's."""
        self._http.labels(method, route, str(status)).observe(seconds)

    @contextmanager
    def request(self, call: GenerateCall, operation: str = "text_completion") -> Iterator[RequestSpan]:
        """Trace a request from its arrival to its end, in the trace of the call; an error of the body sets its status."""
        with self.arrived(Arrival(call.request.id, call.trace, call.arrived_at), operation) as traced:
            traced.call, traced.prompt_text = call, call.prompt_text
            yield traced

    @contextmanager
    def arrived(self, arrival: Arrival, operation: str) -> Iterator[RequestSpan]:
        """Trace a request that is no call yet, as `request` does."""
        now = time.perf_counter()
        arrived_at = arrival.at or now
        arrived_ns = time.time_ns() - int((now - arrived_at) * 1e9)
        span = self._tracer.start_span(operation, context_of(arrival.trace), SpanKind.SERVER, start_time=arrived_ns)
        with request_log(arrival.request_id, span) as context:
            traced = RequestSpan(arrival, span, context, operation, arrived_at)
            traced.texts = [] if self._telemetry.config.log_prompts else None
            status = grpc.StatusCode.INTERNAL
            self._running.inc()
            try:
                yield traced
                status = grpc.StatusCode.INTERNAL if traced.failed else grpc.StatusCode.OK
            except BaseException as error:
                status = status_of(error)
                raise
            finally:
                self._running.dec()
                self._end_request(traced, status, time.perf_counter())

    @contextmanager
    def upstream_request(self, call: GenerateCall, pair: Pair, num_failed: int) -> Iterator[GenerateCall]:
        """Trace one verifier's part of a request. num_failed: verifiers that failed it before. Yields the call to send."""
        drafter = pair.drafter.address if pair.drafter else ""
        host, _, port = pair.verifier.address.rpartition(":")
        attributes: Attributes = {
            "server.address": host,
            **({"server.port": int(port)} if port.isdigit() else {}),
            "eyas.retry_count": num_failed,
            **({"eyas.drafter": drafter} if drafter else {}),
        }
        span = self._tracer.start_span("upstream_request", context_of(call.trace), SpanKind.CLIENT, attributes)
        if num_failed:
            self._retries.inc()
        if not drafter and call.drafter != NO_DRAFTER and pair.verifier.model.features_fingerprint:
            self._undrafted.inc()
        status = grpc.StatusCode.OK
        try:
            yield replace(call, trace=trace_of(span) or call.trace)
        except BaseException as error:
            status = status_of(error)
            raise
        finally:
            self._upstream_requests.labels(status.name).inc()
            end_span(span, status.name)

    def _end_request(self, traced: RequestSpan, status: grpc.StatusCode, now: float) -> None:
        self._requests.labels(traced.model, status.name).inc()
        error_type = "" if status is grpc.StatusCode.OK else status.name
        trace = exemplar(traced.span)
        self._duration.labels(*traced.labels, error_type).observe(now - traced.started_at, trace)
        self._count_tokens(traced, now, trace)
        traced.set_attributes()
        end_span(traced.span, status.name)
        self._log(traced, status, now - traced.started_at)

    def _count_tokens(self, traced: RequestSpan, now: float, trace: dict[str, str] | None) -> None:
        if not traced.first_token_at:
            return
        self._first_token.labels(*traced.labels).observe(traced.first_token_at - traced.started_at, trace)
        if num_later_tokens := traced.num_output_tokens - traced.num_first_tokens:
            self._per_token.labels(*traced.labels).observe((now - traced.first_token_at) / num_later_tokens, trace)
        self._usage.labels(*traced.labels, "input").observe(len(traced.prompt_ids))
        self._usage.labels(*traced.labels, "output").observe(traced.num_output_tokens)
        for stats in (last.totals.stats for last in traced.last_chunks if last.totals):
            if stats is not None and stats.num_drafted:
                self._tau.observe(stats.acceptance_length)

    def _log(self, traced: RequestSpan, status: grpc.StatusCode, seconds: float) -> None:
        message = "request %s: %s, %d tokens in %.3f s"
        values = [traced.request_id, status.name, traced.num_output_tokens, seconds]
        extra: dict[str, object] = {
            "status": status.name,
            "num_output": traced.num_output_tokens,
            "seconds": round(seconds, 4),
        }
        if traced.texts is not None:
            extra |= {"prompt": traced.prompt, "completion": "".join(traced.texts)}
            message, values = message + ": %r -> %r", [*values, traced.prompt, extra["completion"]]
        log.info(message, *values, extra=extra)


class HttpMetrics:
    """The outermost ASGI middleware: measures every HTTP request, also those that other middleware rejects.

    telemetry: its `http_response` is called at the end of each response.
    """

    def __init__(self, app: ASGIApp, telemetry: RouterTelemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        routes = (route for route in scope["app"].routes if isinstance(route, Route))
        matching = (route.path for route in routes if route.matches(scope)[0] != Match.NONE)
        path, started_at, status = next(matching, ""), time.perf_counter(), 0

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except Exception:
            status = status or 500  # an outer middleware sends this response
            raise
        finally:
            if status:
                method = scope["method"] if scope["method"] in HTTPMethod.__members__ else "_OTHER"  # OpenTelemetry's name
                self._telemetry.http_response(method, path, status, time.perf_counter() - started_at)
