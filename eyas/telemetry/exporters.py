"""Telemetry of one service from start to end: tracer, metrics registry and Prometheus endpoint."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from eyas import __version__
from eyas.config import TelemetryConfig
from eyas.errors import ConfigError
from eyas.telemetry.metrics import SERVICE_INFO, gauge
from eyas.telemetry.tracing import tracing

log = logging.getLogger(__name__)

_OPENMETRICS = "application/openmetrics-text"
# Variables of OpenTelemetry that ask for what no service does.
_PUSHES = re.compile(r"OTEL_(METRICS|LOGS)_EXPORTER|OTEL_EXPORTER_OTLP_(METRICS|LOGS)_ENDPOINT").fullmatch


def exposition(accept: str, registry: CollectorRegistry) -> tuple[str, bytes]:
    """Return content type and body of a /metrics response: OpenMetrics with exemplars if the Accept header asks for it.

    prometheus_client would write vllm_ for vllm: in OpenMetrics; here names stay as they are.
    """
    if _OPENMETRICS in accept:
        body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return f"{_OPENMETRICS}; version=1.0.0; charset=utf-8", body
    return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)


@contextmanager
def serving_metrics(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve GET /metrics on a thread. Yields the port; port 0 takes a free one. Raises ConfigError if it is in use."""
    try:
        server = ThreadingHTTPServer((host, port), partial(_MetricsHandler, registry))
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}; set telemetry.metrics_port") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics endpoint", daemon=True)
    thread.start()
    log.info("metrics are served on http://%s:%d/metrics", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _MetricsHandler(BaseHTTPRequestHandler):
    """One request of a scraper."""

    timeout = 10

    def __init__(self, registry: CollectorRegistry, *connection: object) -> None:
        self._registry = registry
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        content_type, body = exposition(self.headers.get("Accept", ""), self._registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Log nothing: scrapes come every few seconds."""


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
    """Serve metrics and export spans until the body ends.

    Args:
        service: "router", "verifier" or "draft".
        registry: the exported registry. The service's metrics live in a registry of their own, registered in this one.

    Raises:
        ConfigError: a port in use, or bad OTEL_* values.
    """
    if unused := [name for name, value in os.environ.items() if _PUSHES(name) and value not in ("", "none", "prometheus")]:
        log.warning("%s has no effect: metrics are scraped at telemetry.metrics_port, logs go to stderr", ", ".join(unused))
    own = CollectorRegistry()
    gauge(SERVICE_INFO, own).labels(service, __version__).set(1)
    with ExitStack() as stack:
        registry.register(own)
        stack.callback(registry.unregister, own)
        tracer = stack.enter_context(tracing(service))
        if config.metrics_port is not None:
            stack.enter_context(serving_metrics(config.metrics_host, config.metrics_port, registry))
        yield Telemetry(config, tracer, own)
