"""Who tells: the service, its version and its instance, for metrics and for everything that is exported.

Spans and what joins them over processes: the OTEL_* environment in, a tracer out; W3C trace context to metadata and back.

Without an endpoint to export to there is no SDK and every span is a no-op. Sets nothing global.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.trace import NoOpTracer, Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eyas.errors import ConfigError


def package_version() -> str:
    """The installed version of Eyas; "unknown" in a checkout that is not installed."""
    try:
        return version("eyas")
    except PackageNotFoundError:
        return "unknown"


def resource(service: str) -> Resource:
    """Who exports: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before what Eyas says of itself."""
    own = {"service.name": f"eyas-{service}", "service.version": package_version(), "service.instance.id": uuid.uuid4().hex}
    return Resource.create(Resource(own).merge(OTELResourceDetector().detect()).attributes)


Trace: TypeAlias = tuple[tuple[str, str], ...]
Attributes: TypeAlias = Mapping[str, str | bool | int | float]

_KEYS = ("traceparent", "tracestate")
_PROTOCOLS = ("", "grpc")


class Tracing:
    """The tracer of one process, and where its spans go."""

    def __init__(self, service: str) -> None:
        """Raises ConfigError for OTEL_* values that cannot be followed."""
        self.tracer: Tracer = NoOpTracer()
        self._close = bool
        if exports("TRACES"):
            self._start(service)

    def close(self) -> None:
        """Send what is left."""
        self._close()

    def _start(self, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from eyas.telemetry.tracing import resource

        provider = TracerProvider(resource=resource(service), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = provider.get_tracer("eyas")
        self._close = provider.shutdown  # type: ignore[assignment]


def exports(signal: str) -> bool:
    """Whether the environment asks for OTLP export of a signal: TRACES or METRICS.

    It does by an endpoint, or by naming the exporter. Raises ConfigError for an exporter or a protocol that is not there.
    """
    asked = os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip()
    if asked not in ("", "otlp", "none"):
        raise ConfigError(f"OTEL_{signal}_EXPORTER is {asked!r}; set otlp or none (Prometheus has telemetry.metrics_port)")
    if asked == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    wanted = asked == "otlp" or any(os.environ.get(name) for name in names)
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", general)
    if wanted and protocol not in _PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; Eyas speaks grpc, to port 4317 of a collector")
    return wanted


def trace_pairs(headers: Iterable[tuple[str, str | bytes]]) -> Trace:
    """The trace context among the headers of a call, or among gRPC metadata."""
    return tuple((key.lower(), str(value)) for key, value in headers if key.lower() in _KEYS)


def trace_of(span: Span) -> Trace:
    """The trace context that lets another process continue a span; empty where there is none."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span, Context()))
    return tuple(carrier.items())


def context_of(trace: Trace) -> Context:
    """The context whose span a trace context names; an empty one if it names none."""
    return TraceContextTextMapPropagator().extract(dict(trace), Context())


def below(span: Span) -> Context:
    """The context for the children of a span."""
    return set_span_in_context(span, Context())


def exemplar(span: Span) -> dict[str, str] | None:
    """What a histogram tells of the trace behind a value; None for a span that nobody keeps."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
