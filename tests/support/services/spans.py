"""Telemetry whose spans a test can look at."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eyas.config import TelemetryConfig
from eyas.telemetry.exporters import Telemetry

TRACE = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)


class Spans:
    """Telemetry that keeps its spans for the test."""

    def __init__(self, config: TelemetryConfig | None = None) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.telemetry = Telemetry(config or TelemetryConfig(), provider.get_tracer("test"))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._kept.get_finished_spans() if span.name == name]

    def value(self, name: str, **labels: str) -> float | None:
        return self.telemetry.registry.get_sample_value(name, labels)
