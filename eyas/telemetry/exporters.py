"""Telemetry of one service from start to end: tracer, metrics registry, Prometheus endpoint and OTLP export.

prometheus_client keeps the metrics, because its names may hold colons. Before each OTLP export they are converted.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample

from eyas import __version__
from eyas.config import TelemetryConfig
from eyas.errors import ConfigError
from eyas.telemetry.metrics import ALL_METRICS, SERVICE_INFO, gauge
from eyas.telemetry.tracing import exports, resource, tracing

log = logging.getLogger(__name__)

_OPENMETRICS = "application/openmetrics-text"
_CUMULATIVE = otlp.AggregationTemporality.CUMULATIVE
_DEFAULT_INTERVAL_MS = "60000"
_METRIC_OF_FAMILY = {metric.family: metric for metric in ALL_METRICS}


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


class MetricPusher:
    """Thread that exports a registry over OTLP every OTEL_METRIC_EXPORT_INTERVAL ms (60,000), and at `close`."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._resource = resource(service)
        self._registry = registry
        self._exporter = OTLPMetricExporter()
        self._closed = threading.Event()
        self._started_ns = time.time_ns()
        self._interval_s = int(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", _DEFAULT_INTERVAL_MS)) / 1000
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export a last time and stop."""
        self._closed.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            metrics = list(to_otlp(self._registry.collect(), self._started_ns, time.time_ns()))
            scope = otlp.ScopeMetrics(InstrumentationScope("eyas", __version__), metrics, "")
            self._exporter.export(otlp.MetricsData([otlp.ResourceMetrics(self._resource, [scope], "")]))
        except Exception:
            log.exception("metrics could not be exported; the next interval tries again")


def to_otlp(families: Iterable[PrometheusMetric], started_ns: int, now_ns: int) -> Iterator[otlp.Metric]:
    """Convert Prometheus families. Metrics of Eyas get their OpenTelemetry names; others keep the name of the family."""
    for family in families:
        metric = _METRIC_OF_FAMILY.get(family.name)
        name, unit = (metric.name, metric.unit) if metric else (family.name, family.unit)
        labels = metric.attribute_names if metric else {}
        data = _data(family, labels, started_ns, now_ns)
        if data is not None:
            yield otlp.Metric(name, family.documentation, unit, data)


def _data(
    family: PrometheusMetric, labels: Mapping[str, str], started_ns: int, now_ns: int
) -> otlp.Sum | otlp.Gauge | otlp.Histogram | None:
    if family.type == "histogram":
        groups: defaultdict[tuple[tuple[str, str], ...], list[Sample]] = defaultdict(list)
        for sample in family.samples:  # those of one histogram differ only in their bucket
            groups[tuple((name, value) for name, value in sample.labels.items() if name != "le")].append(sample)
        points = [_histogram_point(_renamed(key, labels), group, started_ns, now_ns) for key, group in groups.items()]
        return otlp.Histogram(points, _CUMULATIVE)
    if family.type not in ("counter", "gauge"):
        return None
    name = family.name + ("_total" if family.type == "counter" else "")
    numbers = [
        otlp.NumberDataPoint(_renamed(sample.labels.items(), labels), started_ns, now_ns, sample.value)
        for sample in family.samples
        if sample.name == name
    ]
    return otlp.Sum(numbers, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else otlp.Gauge(numbers)


def _renamed(pairs: Iterable[tuple[str, str]], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(key, key): value for key, value in pairs if value}


def _histogram_point(
    labels: Mapping[str, str], samples: Sequence[Sample], started_ns: int, now_ns: int
) -> otlp.HistogramDataPoint:
    buckets = sorted((float(s.labels["le"]), s) for s in samples if s.name.endswith("_bucket"))
    counts = [int(sample.value) for _, sample in buckets]
    return otlp.HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=started_ns,
        time_unix_nano=now_ns,
        count=counts[-1],
        sum=next(s.value for s in samples if s.name.endswith("_sum")),
        bucket_counts=[count - before for before, count in itertools.pairwise([0, *counts])],
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=None,  # type: ignore[arg-type]  # unknown; left out of the message
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(sample) for _, sample in buckets if sample.exemplar],
    )


def _exemplar(sample: Sample) -> Exemplar:
    exemplar = sample.exemplar
    assert exemplar is not None
    span_id, trace_id = int(exemplar.labels["span_id"], 16), int(exemplar.labels["trace_id"], 16)
    return Exemplar({}, exemplar.value, int(float(exemplar.timestamp or 0) * 1e9), span_id, trace_id)


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
    gauge(SERVICE_INFO, own).labels(service, __version__).set(1)
    with ExitStack() as stack:
        registry.register(own)
        stack.callback(registry.unregister, own)
        tracer = stack.enter_context(tracing(service))
        if exports("METRICS"):
            stack.callback(MetricPusher(service, registry).close)
        if config.metrics_port is not None:
            stack.enter_context(serving_metrics(config.metrics_host, config.metrics_port, registry))
        yield Telemetry(config, tracer, own)
