"""Telemetry of one service from start to end: its tracer, its metrics registry and their exporters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import prometheus_client
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from eyas.config import TelemetryConfig
from eyas.telemetry.exporters import MetricPusher, serving_metrics
from eyas.telemetry.metrics import SERVICE_INFO, gauge
from eyas.telemetry.tracing import exports, package_version, tracing


@dataclass(frozen=True)
class Telemetry:
    """Tracer and metrics registry of a service. The defaults export nothing."""

    config: TelemetryConfig = field(default_factory=TelemetryConfig)
    tracer: Tracer = field(default_factory=NoOpTracer)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)


@contextmanager
def telemetry(
    config: TelemetryConfig, service: str, registry: CollectorRegistry = prometheus_client.REGISTRY
) -> Iterator[Telemetry]:
    """Serve and export metrics and spans until the body ends.

    Args:
        service: "router", "verifier" or "draft".
        registry: the exported registry. The service's metrics live in a registry of their own, registered in this one.

    Raises:
        ConfigError: a port in use, or bad OTEL_* values.
    """
    own = CollectorRegistry()
    gauge(SERVICE_INFO, own).labels(service, package_version()).set(1)
    with ExitStack() as stack:
        registry.register(own)
        stack.callback(registry.unregister, own)
        tracer = stack.enter_context(tracing(service))
        if exports("METRICS"):
            stack.callback(MetricPusher(service, registry).close)
        if config.metrics_port is not None:
            stack.enter_context(serving_metrics(config.metrics_host, config.metrics_port, registry))
        yield Telemetry(config, tracer, own)
