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
from eyas.telemetry import metrics as catalog
from eyas.telemetry.logging import About, request_log
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, gauge, histogram
from eyas.telemetry.setup import Telemetry
from eyas.telemetry.tracing import Attributes, context_of, exemplar, trace_of

# What a client makes up must not become a label.
NO_ROUTE = "none"
_BUG = 500

Count = Callable[[str, int], None]


class HttpAnswers:
    """ASGI middleware, outermost of all. routes: of the application, as they are when something is asked. count: told the
    route and the status of every answer that has begun."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], count: Count) -> None:
        self._app = app
        self._routes = routes
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, begun = self._route(scope), False

        async def told(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception:
            if not begun:  # answered further out
                self._count(route, _BUG)
            raise

    def _route(self, scope: Scope) -> str:
        found = (route.path for route in self._routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
        return next(found, NO_ROUTE)


PROVIDER = "eyas"


@dataclass
class RequestSpan:
    """A request on its way through the router."""

    call: GenerateCall
    span: Span
    about: About
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
                "eyas.rounds": sum(one.num_verify_steps for one in stats),
                "eyas.accepted_tokens": sum(one.num_accepted for one in stats),
            }
        )
        if self.texts is not None:
            self.span.set_attributes({"eyas.prompt": str(self.prompt), "eyas.answer": "".join(self.texts)})

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
        self._duration = histogram(catalog.REQUEST_DURATION, registry)
        self._first_token = histogram(catalog.FIRST_TOKEN, registry)
        self._per_token = histogram(catalog.PER_TOKEN, registry)
        self._usage = histogram(catalog.TOKEN_USAGE, registry)
        self._requests = counter(catalog.ROUTER_REQUESTS, registry)
        self._http = counter(catalog.ROUTER_HTTP, registry)
        self._running = gauge(catalog.ROUTER_RUNNING, registry)
        self._attempts = counter(catalog.ROUTER_ATTEMPTS, registry)
        self._retries = counter(catalog.ROUTER_RETRIES, registry)
        self._undrafted = counter(catalog.ROUTER_UNDRAFTED, registry)
        self._tau = histogram(catalog.ROUTER_TAU, registry)

    def watch(self, known: Callable[[Role], Sequence[object]]) -> None:
        """Tell of the workers of each role, as they are known whenever somebody looks; asked from another thread."""

        def read() -> list[MetricSample]:
            return [MetricSample(catalog.ROUTER_WORKERS, len(known(role)), (role,)) for role in get_args(Role)]

        self._telemetry.registry.register(ScrapeCollector([catalog.ROUTER_WORKERS], read))

    def http_answer(self, route: str, status: int) -> None:
        """Count an answer of the HTTP door. route: one of its own."""
        self._http.labels(route, str(status)).inc()

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
        told: Attributes = {"server.address": pair.verifier.address, "eyas.drafter": drafter, "eyas.attempt": number}
        span = self._tracer.start_span("attempt", context_of(call.trace), SpanKind.CLIENT, told)
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
