"""Counts what the HTTP door answers, refusals before any request among them. Knows routes and statuses, no bodies.

One request as the router sees it pass: calls and chunks in, numbers and the attributes of its span out.

What the router tells of its requests: their beginning, chunks and end in; metrics, spans and log lines out.

Knows requests by their numbers; prompts and answers only where the settings ask for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

import grpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.rpc.messages import NO_DRAFTER, GenerateCall, Role, TextChunk
from eyas.rpc.server import status_of
from eyas.services.router.routing import Pair
from eyas.telemetry import metrics
from eyas.telemetry.logging import LogContext, request_log
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, gauge, histogram
from eyas.telemetry.setup import Telemetry
from eyas.telemetry.tracing import Attributes, context_of, exemplar, trace_of

# Methods that may become a label; OpenTelemetry calls every other one _OTHER.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class HttpMetrics:
    """ASGI middleware, outermost of all, that measures HTTP requests, rejected ones included.

    Args:
        routes: the application's routes, read at each request.
        observe: called with method, route, status and seconds at the end of a response; route is "" for an unknown path.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], observe: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._routes = routes
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, started, status = self._route(scope), time.perf_counter(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = status or 500  # an outer middleware sends this response
            raise
        finally:
            if status:
                method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
                self._observe(method, route, status, time.perf_counter() - started)

    def _route(self, scope: Scope) -> str:
        found = (route.path for route in self._routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
        return next(found, "")


PROVIDER = "eyas"


@dataclass
class RequestSpan:
    """A request on its way through the router."""

    call: GenerateCall
    span: Span
    about: LogContext
    operation: str
    started: float
    model: str = ""
    first_token_at: float = 0.0
    num_first: int = 0
    num_output: int = 0
    failed: bool = False
    finals: list[TextChunk] = field(default_factory=list)
    texts: list[str] | None = None
    asked_text: str | None = None

    def prepared(self, call: GenerateCall) -> GenerateCall:
        """Take the call as it is sent on; gives it back with this request's trace."""
        self.model, self.call = call.model, replace(call, trace=trace_of(self.span) or call.trace)
        self.about.request_id = call.request.id
        return self.call

    def saw(self, chunk: TextChunk) -> None:
        """Count a chunk for the client."""
        num_tokens = len(chunk.chunk.token_ids)
        if num_tokens and not self.first_token_at:
            self.first_token_at, self.num_first = time.perf_counter(), num_tokens
        self.num_output += num_tokens
        if chunk.totals is not None:
            self.finals.append(chunk)
            self.failed |= chunk.chunk.finish_reason == "error"
        if self.texts is not None:
            self.texts.append(chunk.text)

    @property
    def labels(self) -> tuple[str, ...]:
        """Operation, provider and model, as the GenAI metrics want them."""
        return self.operation, PROVIDER, self.model

    def describe(self) -> None:
        """Give the span the attributes of the GenAI conventions, and what speculation did."""
        if not self.span.is_recording():
            return
        request, sampling = self.call.request, self.call.request.sampling
        self.span.update_name(f"{self.operation} {self.model}".rstrip())
        self.span.set_attributes(
            {
                "gen_ai.operation.name": self.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self.model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.conversation.id": request.session,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "gen_ai.usage.output_tokens": self.num_output,
                "gen_ai.response.finish_reasons": [str(final.chunk.finish_reason) for final in self.finals],
                "eyas.request.id": request.id,
            }
        )
        totals = [final.totals for final in self.finals if final.totals]
        stats = [one.stats for one in totals if one.stats]
        self.span.set_attributes(
            {
                "gen_ai.usage.cache_read.input_tokens": sum(one.num_cached_tokens for one in totals),
                "eyas.verify_steps": sum(one.num_verify_steps for one in stats),
                "eyas.accepted_tokens": sum(one.num_accepted for one in stats),
            }
        )
        if self.texts is not None:
            self.span.set_attributes({"eyas.prompt": str(self.prompt), "eyas.completion": "".join(self.texts)})

    @property
    def prompt(self) -> object:
        """What was asked: the text, or the token ids where it came as such."""
        return self.asked_text if self.asked_text is not None else list(self.call.request.prompt_ids)


log = logging.getLogger(__name__)


class RouterTelemetry:
    """One for all requests of a router, whichever door they come through."""

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
        self._attempts = counter(metrics.ROUTER_UPSTREAM_REQUESTS, registry)
        self._retries = counter(metrics.ROUTER_UPSTREAM_RETRIES, registry)
        self._undrafted = counter(metrics.ROUTER_WITHOUT_DRAFTER, registry)
        self._tau = histogram(metrics.ROUTER_ACCEPTANCE_LENGTH, registry)

    def watch(self, known: Callable[[Role], Sequence[object]]) -> None:
        """Tell of the workers of each role, as they are known whenever somebody looks; asked from another thread."""

        def read() -> list[MetricSample]:
            return [MetricSample(metrics.ROUTER_WORKERS, len(known(role)), (role,)) for role in get_args(Role)]

        self._telemetry.registry.register(ScrapeCollector([metrics.ROUTER_WORKERS], read))

    def http_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response of the HTTP server. route: the path template, "" for an unknown path."""
        self._http.labels(method, route, str(status)).observe(seconds)

    @contextmanager
    def request(self, call: GenerateCall, operation: str = "text_completion") -> Iterator[RequestSpan]:
        """A request from its arrival, in the trace that the call came with, to its end, which the body's way of ending
        tells. operation: as the GenAI conventions name it."""
        span = self._tracer.start_span(operation, context_of(call.trace), SpanKind.SERVER)
        with request_log(call.request.id, span) as about:
            observed = RequestSpan(call, span, about, operation, time.perf_counter(), asked_text=call.prompt_text)
            observed.texts = [] if self._telemetry.config.log_prompts else None
            status = grpc.StatusCode.INTERNAL
            self._running.inc()
            try:
                yield observed
                status = grpc.StatusCode.INTERNAL if observed.failed else grpc.StatusCode.OK
            except BaseException as error:
                status = _status(error)
                raise
            finally:
                self._running.dec()
                self._ended(observed, status, time.perf_counter())

    @contextmanager
    def attempt(self, call: GenerateCall, pair: Pair, number: int) -> Iterator[GenerateCall]:
        """One verifier's part of a request, after `number` that failed it. Gives the call in the attempt's trace."""
        drafter = pair.drafter.address if pair.drafter else ""
        told: Attributes = {"server.address": pair.verifier.address, "eyas.drafter": drafter, "eyas.retry_count": number}
        span = self._tracer.start_span("upstream_request", context_of(call.trace), SpanKind.CLIENT, told)
        if number:
            self._retries.inc()
        if not drafter and call.drafter != NO_DRAFTER:
            self._undrafted.inc()
        status = grpc.StatusCode.OK
        try:
            yield replace(call, trace=trace_of(span) or call.trace)
        except BaseException as error:
            status = _status(error)
            raise
        finally:
            self._attempts.labels(status.name).inc()
            _end(span, status)

    def _ended(self, observed: RequestSpan, status: grpc.StatusCode, now: float) -> None:
        self._requests.labels(observed.model, status.name).inc()
        failure = "" if status is grpc.StatusCode.OK else status.name
        shown = exemplar(observed.span)
        self._duration.labels(*observed.labels, failure).observe(now - observed.started, shown)
        self._count_tokens(observed, now, shown)
        observed.describe()
        _end(observed.span, status)
        self._log(observed, status, now)

    def _count_tokens(self, observed: RequestSpan, now: float, shown: dict[str, str] | None) -> None:
        if not observed.first_token_at:
            return
        self._first_token.labels(*observed.labels).observe(observed.first_token_at - observed.started, shown)
        if rest := observed.num_output - observed.num_first:
            self._per_token.labels(*observed.labels).observe((now - observed.first_token_at) / rest, shown)
        self._usage.labels(*observed.labels, "input").observe(len(observed.call.request.prompt_ids))
        self._usage.labels(*observed.labels, "output").observe(observed.num_output)
        for stats in (final.totals.stats for final in observed.finals if final.totals):
            if stats is not None and stats.num_drafted:
                self._tau.observe(stats.acceptance_length)

    def _log(self, observed: RequestSpan, status: grpc.StatusCode, now: float) -> None:
        seconds, call = now - observed.started, observed.call
        told: dict[str, object] = {"status": status.name, "num_output": observed.num_output, "seconds": round(seconds, 4)}
        message = "request %s: %s, %d tokens in %.3f s"
        values = [call.request.id, status.name, observed.num_output, seconds]
        if observed.texts is not None:
            told |= {"prompt": observed.prompt, "answer": "".join(observed.texts)}
            message, values = message + ": %r -> %r", [*values, observed.prompt, told["answer"]]
        log.info(message, *values, extra=told)


def _status(error: BaseException) -> grpc.StatusCode:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED
    return status_of(error)


def _end(span: Span, status: grpc.StatusCode) -> None:
    if status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        span.set_status(Status(StatusCode.ERROR, status.name))
        span.set_attribute("error.type", status.name)
    span.end()
