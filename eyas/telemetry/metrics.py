"""A metric as a value, and how it becomes a metric of prometheus_client. Knows no metric by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Metric:
    """One metric. name: as OpenTelemetry writes it; `family` is what Prometheus calls it.

    unit: "s", "1", or what is counted in braces. labels: as OpenTelemetry writes them, with dots that Prometheus makes
    underscores. buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """Name of the family that Prometheus sees; a counter's samples end in _total besides."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")

    @property
    def label_names(self) -> list[str]:
        return [label.replace(".", "_") for label in self.labels]


@dataclass(frozen=True)
class Reading:
    """The present value of a counter or gauge. labels: one value for each of the metric's."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """A counter that begins at 0."""
    assert metric.kind == "counter"
    return Counter(metric.family, metric.text, metric.label_names, registry=registry)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    """A gauge that begins at 0."""
    assert metric.kind == "gauge"
    return Gauge(metric.family, metric.text, metric.label_names, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram with the metric's own buckets."""
    assert metric.kind == "histogram"
    return Histogram(metric.family, metric.text, metric.label_names, registry=registry, buckets=metric.buckets)


class Scraped(Collector):
    """Metrics that cost nothing until somebody looks: `read` is called at each scrape, from the scraper's thread."""

    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Iterable[Reading]]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterator[Family]:
        """The families without their values."""
        return map(_family, self._metrics)

    def collect(self) -> Iterator[Family]:
        """The families with their values."""
        by_name = sorted(self._read(), key=lambda reading: reading.metric.name)
        for _, group in itertools.groupby(by_name, key=lambda reading: reading.metric.name):
            readings = list(group)
            family = _family(readings[0].metric)
            for reading in readings:
                family.add_metric(reading.labels, float(reading.value))
            yield family


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.family, metric.text, labels=metric.label_names)
