"""How Prometheus gets the metrics: a registry in, an HTTP endpoint out. Knows no metric.

Prometheus metrics to OTLP: a registry in, its metrics in OpenTelemetry's terms out, again and again.

Metrics are kept once, by prometheus_client, whose names may hold colons. Knows them by the catalog.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample

from eyas.errors import ConfigError
from eyas.telemetry import metrics as catalog
from eyas.telemetry import metrics as own
from eyas.telemetry.tracing import package_version, resource

log = logging.getLogger(__name__)

_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True)
class Exposition:
    """All metrics as the body of an HTTP answer."""

    content_type: str
    body: bytes


def exposition(accept: str, registry: CollectorRegistry) -> Exposition:
    """The metrics for a client that sends this Accept header: OpenMetrics, with exemplars, for those who know it.

    Names go out as they are: prometheus_client by itself writes vllm_ for vllm: in OpenMetrics.
    """
    if _OPENMETRICS in accept:
        body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Exposition(f"{_OPENMETRICS}; version=1.0.0; charset=utf-8", body)
    return Exposition(CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))


@contextmanager
def serving_metrics(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Answer GET /metrics on a thread; gives the port, a free one for 0. Raises ConfigError for a port that is taken."""
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
        """The metrics, at /metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        answer = exposition(self.headers.get("Accept", ""), self._registry)
        self.send_response(200)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Say nothing: scrapes come every few seconds."""


_CUMULATIVE = AggregationTemporality.CUMULATIVE
_INTERVAL_MS = "60000"


class MetricPusher:
    """A thread that exports a registry every OTEL_METRIC_EXPORT_INTERVAL ms (60,000), and once more when it is closed."""

    def __init__(self, service: str, registry: prometheus_client.CollectorRegistry) -> None:
        self._resource = resource(service)
        self._registry = registry
        self._exporter = OTLPMetricExporter()
        self._closed = threading.Event()
        self._started = time.time_ns()
        self._seconds = int(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", _INTERVAL_MS)) / 1000
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export what is left."""
        self._closed.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            found = list(converted(self._registry.collect(), self._started, time.time_ns()))
            scope = ScopeMetrics(InstrumentationScope("eyas", package_version()), found, "")
            self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))
        except Exception:
            log.exception("the metrics could not be exported; trying again")


def converted(families: Iterable[Family], started: int, now: int) -> Iterator[Metric]:
    """Families in OpenTelemetry's terms; started, now: ns since the epoch. Those that the catalog lacks keep their names."""
    for family in families:
        metric = _KNOWN.get(family.name)
        name, unit = (metric.name, metric.unit) if metric else (family.name, family.unit)
        labels = dict(zip(metric.label_names, metric.labels, strict=True)) if metric else {}
        points = _points(family, labels, started, now)
        if points is not None:
            yield Metric(name, family.documentation, unit, points)


_SPECS = (catalog.SERVICE_INFO, *catalog.ROUTER, *catalog.VERIFIER, *catalog.DRAFT)
_KNOWN: Mapping[str, own.Metric] = {metric.family: metric for metric in _SPECS}


def _points(family: Family, labels: Mapping[str, str], started: int, now: int) -> Sum | Gauge | Histogram | None:
    if family.type == "histogram":
        groups = _by_labels(s for s in family.samples if not s.name.endswith("_created"))
        found = [_histogram(_renamed(key, labels), samples, started, now) for key, samples in groups]
        return Histogram(found, _CUMULATIVE)
    if family.type not in ("counter", "gauge"):
        return None
    wanted = family.name + ("_total" if family.type == "counter" else "")
    points = [
        NumberDataPoint(_renamed(sample.labels.items(), labels), started, now, sample.value)
        for sample in family.samples
        if sample.name == wanted
    ]
    return Sum(points, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)


def _renamed(pairs: Iterable[tuple[str, str]], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(key, key): value for key, value in pairs if value}


def _by_labels(samples: Iterable[Sample]) -> list[tuple[tuple[tuple[str, str], ...], list[Sample]]]:
    """Samples that differ in nothing but their bucket, together."""

    def key(sample: Sample) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))

    return [(labels, list(group)) for labels, group in itertools.groupby(sorted(samples, key=key), key)]


def _histogram(labels: Mapping[str, str], samples: Sequence[Sample], started: int, now: int) -> HistogramDataPoint:
    buckets = sorted((float(s.labels["le"]), s) for s in samples if s.name.endswith("_bucket"))
    counts = [int(sample.value) for _, sample in buckets]
    total = next(s.value for s in samples if s.name.endswith("_sum"))
    return HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=started,
        time_unix_nano=now,
        count=counts[-1],
        sum=total,
        bucket_counts=[count - before for before, count in itertools.pairwise([0, *counts])],
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        min=None,  # type: ignore[arg-type]  # not known; left out of the message
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(sample) for _, sample in buckets if sample.exemplar],
    )


def _exemplar(sample: Sample) -> Exemplar:
    told = sample.exemplar
    assert told is not None
    span_id, trace_id = int(told.labels["span_id"], 16), int(told.labels["trace_id"], 16)
    return Exemplar({}, told.value, int(float(told.timestamp or 0) * 1e9), span_id, trace_id)
