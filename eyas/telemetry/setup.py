"""Telemetry of one process from start to end: settings and the environment in, a tracer and a registry for its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import prometheus_client
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from eyas.config import TelemetryConfig
from eyas.telemetry.exporters import serving_metrics
from eyas.telemetry.metrics import SERVICE_INFO, gauge
from eyas.telemetry.tracing import Tracing, exports, package_version


@dataclass(frozen=True)
class Telemetry:
    """What the parts of a service tell through. As it stands it keeps its numbers to itself and traces nothing."""

    config: TelemetryConfig = field(default_factory=TelemetryConfig)
    tracer: Tracer = field(default_factory=NoOpTracer)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)


@contextmanager
def telemetry(
    config: TelemetryConfig, service: str, registry: CollectorRegistry = prometheus_client.REGISTRY
) -> Iterator[Telemetry]:
    """Serve metrics, and export metrics and spans, until the end; then send what is left.

    service: router, verifier or draft. registry: what is served; its metrics live in one of its own, which leaves with it.
    Raises ConfigError for a port that is taken and for OTEL_* values that cannot be
    followed.
    """
    own = CollectorRegistry()
    gauge(SERVICE_INFO, own).labels(service, package_version()).set(1)
    with ExitStack() as stack:
        registry.register(own)
        stack.callback(registry.unregister, own)
        tracing = Tracing(service)
        stack.callback(tracing.close)
        if exports("METRICS"):
            from eyas.telemetry.exporters import MetricPusher

            stack.callback(MetricPusher(service, registry).close)
        if config.metrics_port is not None:
            stack.enter_context(serving_metrics(config.metrics_host, config.metrics_port, registry))
        yield Telemetry(config, tracing.tracer, own)
