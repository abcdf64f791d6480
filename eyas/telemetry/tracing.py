"""Spans and W3C trace context. The OTEL_* environment configures the export; without an endpoint spans are no-ops.

Nothing global is set.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.trace import NoOpTracer, Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eyas import __version__
from eyas.errors import ConfigError

# Trace context as gRPC metadata: traceparent and tracestate.
Trace: TypeAlias = tuple[tuple[str, str], ...]
# W3C: at least 512 characters of a tracestate are passed on.
TRACE_HEADERS, MAX_TRACE_LENGTH = ("traceparent", "tracestate"), 512
_PRINTABLE = re.compile(r"[ -~]*").fullmatch
Attributes: TypeAlias = Mapping[str, str | bool | int | float]


@contextmanager
def tracing(service: str) -> Iterator[Tracer]:
    """Yield the process's tracer; at the end export the remaining spans. Raises ConfigError for bad OTEL_* values."""
    if not exports_traces():
        yield NoOpTracer()
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer("eyas")
    finally:
        provider.shutdown()


def exports_traces() -> bool:
    """Return whether the environment asks for OTLP export of traces.

    An endpoint asks for it, or the exporter "otlp". Raises ConfigError for an exporter or protocol that is not supported.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}; set otlp or none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    enabled = exporter == "otlp" or any(os.environ.get(name) for name in endpoints)
    default = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", default)
    if enabled and protocol not in ("", "grpc"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; set grpc and port 4317 of the collector")
    return enabled


def resource(service: str) -> Resource:
    """Return the exporting resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override Eyas's attributes."""
    own = {"service.name": f"eyas-{service}", "service.version": __version__, "service.instance.id": uuid.uuid4().hex}
    return Resource.create(Resource(own).merge(OTELResourceDetector().detect()).attributes)


def trace_pairs(headers: Iterable[tuple[str, str | bytes]]) -> Trace:
    """Return the trace context among HTTP headers or gRPC metadata, without values that gRPC refuses to send on.

    Of a header that comes again only the first counts: a client could fill the metadata of the calls to verifiers.
    """
    found = dict[str, str]()
    for key, value in headers:
        name, text = key.lower(), str(value)
        if name in TRACE_HEADERS and len(text) <= MAX_TRACE_LENGTH and _PRINTABLE(text):
            found.setdefault(name, text)
    return tuple(found.items())


def trace_of(span: Span) -> Trace:
    """Return the trace context under which another process continues a span; empty for a no-op span."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span, Context()))
    return tuple(carrier.items())


def context_of(trace: Trace) -> Context:
    """Return the context of the span that a trace context names; an empty one if it names none."""
    return TraceContextTextMapPropagator().extract(dict(trace), Context())


def child_context(span: Span) -> Context:
    """Return the context for child spans of a span."""
    return set_span_in_context(span, Context())


def end_span(span: Span, status: str) -> None:
    """End a span. status: the name of a gRPC status; every other one than OK and CANCELLED marks the span as failed."""
    if status not in ("OK", "CANCELLED"):
        span.set_status(Status(StatusCode.ERROR, status))
        span.set_attribute("error.type", status)
    span.end()


def exemplar(span: Span) -> dict[str, str] | None:
    """Return the labels of a histogram exemplar; None for a span that is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
