"""What the router tells of its requests: their beginning, chunks and end in; metrics, spans and log lines out.

Knows requests by their numbers; prompts and answers only where the settings ask for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import grpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from eyas.rpc.messages import NO_DRAFTER, GenerateCall, Role
from eyas.rpc.server import status_of
from eyas.telemetry import catalog
from eyas.telemetry.logs import request_log
from eyas.telemetry.metrics import Reading, Scraped, counter, gauge, histogram
from eyas.telemetry.process import Telemetry
from eyas.telemetry.tracing import Attributes, context_of, exemplar, trace_of
from services.router.placement import Pair
from services.router.telemetry.observed import Observed

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

        def read() -> list[Reading]:
            return [Reading(catalog.ROUTER_WORKERS, len(known(role)), (role,)) for role in get_args(Role)]

        self._telemetry.registry.register(Scraped([catalog.ROUTER_WORKERS], read))

    def http_answer(self, route: str, status: int) -> None:
        """Count an answer of the HTTP door. route: one of its own."""
        self._http.labels(route, str(status)).inc()

    @contextmanager
    def request(self, call: GenerateCall, operation: str = "text_completion") -> Iterator[Observed]:
        """A request from its arrival, in the trace that the call came with, to its end, which the body's way of ending
        tells. operation: as the GenAI conventions name it."""
        span = self._tracer.start_span(operation, context_of(call.trace), SpanKind.SERVER)
        with request_log(call.request.id, span) as about:
            observed = Observed(call, span, about, operation, time.perf_counter(), asked_text=call.prompt_text)
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

    def _ended(self, observed: Observed, status: grpc.StatusCode, now: float) -> None:
        self._requests.labels(observed.model, status.name).inc()
        failure = "" if status is grpc.StatusCode.OK else status.name
        shown = exemplar(observed.span)
        self._duration.labels(*observed.labels, failure).observe(now - observed.started, shown)
        self._count_tokens(observed, now, shown)
        observed.describe()
        _end(observed.span, status)
        self._log(observed, status, now)

    def _count_tokens(self, observed: Observed, now: float, shown: dict[str, str] | None) -> None:
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

    def _log(self, observed: Observed, status: grpc.StatusCode, now: float) -> None:
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
