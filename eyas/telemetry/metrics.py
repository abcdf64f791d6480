"""Every metric of Eyas by name, and how a metric becomes one of prometheus_client. docs/telemetry.md shows the list."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Metric:
    """Definition of one metric.

    Args:
        name: OpenTelemetry name; `family` is the Prometheus name.
        unit: "s", "1", or the counted thing in braces, such as "{token}".
        labels: OpenTelemetry attribute names; Prometheus gets underscores for the dots.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """Prometheus name, without the suffix _total of a counter's samples."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")

    @property
    def label_names(self) -> list[str]:
        """Prometheus names of the labels."""
        return [label.replace(".", "_") for label in self.labels]


@dataclass(frozen=True)
class MetricSample:
    """The present value of a counter or gauge. labels: one value for each label of the metric."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """Register a counter."""
    assert metric.kind == "counter"
    return Counter(metric.family, metric.text, metric.label_names, registry=registry)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    """Register a gauge."""
    assert metric.kind == "gauge"
    return Gauge(metric.family, metric.text, metric.label_names, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """Register a histogram with the metric's buckets."""
    assert metric.kind == "histogram"
    return Histogram(metric.family, metric.text, metric.label_names, registry=registry, buckets=metric.buckets)


class ScrapeCollector(Collector):
    """Counters and gauges that are computed at each scrape, and cost nothing between scrapes.

    read: returns the samples; the scraping thread calls it.
    """

    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Iterable[MetricSample]]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterator[Family]:
        """Yield the families without samples."""
        return map(_family, self._metrics)

    def collect(self) -> Iterator[Family]:
        """Yield the families with their samples."""
        samples = sorted(self._read(), key=lambda sample: sample.metric.name)
        for _, group in itertools.groupby(samples, key=lambda sample: sample.metric.name):
            first, *others = group
            family = _family(first.metric)
            for sample in (first, *others):
                family.add_metric(sample.labels, float(sample.value))
            yield family


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.family, metric.text, labels=metric.label_names)


# Bucket bounds in seconds. Tokens here take milliseconds; the buckets of the GenAI conventions begin at 10 ms.
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
_QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Bucket bounds of the GenAI and HTTP semantic conventions.
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_REQUEST_SECONDS = tuple(0.01 * 2**i for i in range(14))
_HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKENS = tuple(float(4**i) for i in range(14))
_ACCEPTANCE_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_VLLM = ("model_name",)
_DRAFTER = ("drafter",)

SERVICE_INFO = Metric("eyas.service.info", "gauge", "1", "Always 1; the labels name the service.", ("service", "version"))

# Router
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration", "histogram", "s", "Time from a request's arrival to its end.",
    (*_GEN_AI, "error.type"), _REQUEST_SECONDS,
)  # fmt: skip
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token", "histogram", "s", "Time from a request's arrival to its first token.",
    _GEN_AI, _FIRST_TOKEN_SECONDS,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token", "histogram", "s", "Mean time per token of a request after its first chunk.",
    _GEN_AI, _TOKEN_SECONDS,
)  # fmt: skip
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage", "histogram", "{token}", "Input or output tokens of a request.",
    (*_GEN_AI, "gen_ai.token.type"), _TOKENS,
)  # fmt: skip
HTTP_REQUEST_DURATION = Metric(
    "http.server.request.duration", "histogram", "s", "Time from an HTTP request to the end of its response.",
    ("http.request.method", "http.route", "http.response.status_code"), _HTTP_SECONDS,
)  # fmt: skip
ROUTER_REQUESTS = Metric(
    "eyas.router.requests", "counter", "{request}", "Finished requests, by gRPC status.", ("model", "status")
)
ROUTER_ACTIVE_REQUESTS = Metric("eyas.router.active_requests", "gauge", "{request}", "Requests in progress.")
ROUTER_UPSTREAM_REQUESTS = Metric(
    "eyas.router.upstream_requests", "counter", "{request}", "Finished calls to verifiers, by gRPC status.", ("status",)
)
ROUTER_UPSTREAM_RETRIES = Metric(
    "eyas.router.upstream_retries", "counter", "{request}", "Calls to another verifier after one failed."
)
ROUTER_WITHOUT_DRAFTER = Metric(
    "eyas.router.upstream_requests_without_drafter", "counter", "{request}",
    "Calls to verifiers that should have a drafter, but none was available.",
)  # fmt: skip
ROUTER_WORKERS = Metric("eyas.router.workers", "gauge", "{worker}", "Live workers, by role.", ("role",))
ROUTER_ACCEPTANCE_LENGTH = Metric(
    "eyas.router.acceptance_length", "histogram", "{token}", "Tokens per verify step (tau) of requests with drafts.",
    buckets=_ACCEPTANCE_LENGTHS,
)  # fmt: skip

ROUTER = (
    REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, TOKEN_USAGE, HTTP_REQUEST_DURATION,
    ROUTER_REQUESTS, ROUTER_ACTIVE_REQUESTS, ROUTER_UPSTREAM_REQUESTS, ROUTER_UPSTREAM_RETRIES, ROUTER_WITHOUT_DRAFTER,
    ROUTER_WORKERS, ROUTER_ACCEPTANCE_LENGTH,
)  # fmt: skip

# Verifier
VLLM_DRAFTS = Metric("vllm:spec_decode_num_drafts", "counter", "{draft}", "Verified draft trees.", _VLLM)
VLLM_DRAFT_TOKENS = Metric("vllm:spec_decode_num_draft_tokens", "counter", "{token}", "Verified draft tokens.", _VLLM)
VLLM_ACCEPTED_TOKENS = Metric("vllm:spec_decode_num_accepted_tokens", "counter", "{token}", "Accepted draft tokens.", _VLLM)
VLLM_ACCEPTED_TOKENS_PER_POS = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "{token}",
    "Accepted draft tokens, by depth in the tree from 0.", (*_VLLM, "position"),
)  # fmt: skip
VLLM_RUNNING = Metric("vllm:num_requests_running", "gauge", "{request}", "Requests in the engine's batch.", _VLLM)
VLLM_WAITING = Metric("vllm:num_requests_waiting", "gauge", "{request}", "Requests in the engine's queue.", _VLLM)
VLLM_KV_CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc", "gauge", "1", "Share of the KV cache that running requests use, 0 to 1.", _VLLM
)
VERIFIER_REQUESTS = Metric(
    "eyas.verifier.requests", "counter", "{request}", "Finished requests, by gRPC status.", ("status",)
)
VERIFIER_REJECTED_REQUESTS = Metric(
    "eyas.verifier.rejected_requests", "counter", "{request}", "Requests rejected before their first chunk, by gRPC status.",
    ("status",),
)  # fmt: skip
VERIFIER_QUEUE_DURATION = Metric(
    "eyas.verifier.queue.duration", "histogram", "s", "Time from a request's arrival to its first step.",
    buckets=_QUEUE_SECONDS,
)  # fmt: skip
VERIFIER_PREFILL_DURATION = Metric(
    "eyas.verifier.prefill.duration", "histogram", "s", "Time from a request's first step to its first token.",
    buckets=_QUEUE_SECONDS,
)  # fmt: skip
VERIFIER_STEP_DURATION = Metric(
    "eyas.verifier.step.duration", "histogram", "s", "Time of a step's forward pass, sampling and acceptance.",
    buckets=_STEP_SECONDS,
)  # fmt: skip
VERIFIER_DRAFT_WAIT_DURATION = Metric(
    "eyas.verifier.draft_wait.duration", "histogram", "s", "Time that a step waits for draft trees.", buckets=_STEP_SECONDS
)
VERIFIER_VERIFY_STEPS = Metric(
    "eyas.verifier.verify_steps", "counter", "{step}", "Verify steps of sequences: with a draft tree, or plain.", ("kind",)
)
VERIFIER_VERIFY_STEP_TOKENS = Metric(
    "eyas.verifier.verify_step_tokens", "counter", "{token}", "Tokens that verify steps emit."
)
VERIFIER_BATCHED_TOKENS = Metric(
    "eyas.verifier.batched_tokens", "counter", "{token}", "Rows of forward passes: prompt tokens and tree nodes."
)
VERIFIER_PROMPT_TOKENS = Metric("eyas.verifier.prompt_tokens", "counter", "{token}", "Prompt tokens of started requests.")
VERIFIER_CACHED_PROMPT_TOKENS = Metric(
    "eyas.verifier.cached_prompt_tokens", "counter", "{token}", "Prompt tokens found in the prefix cache."
)
VERIFIER_GENERATED_TOKENS = Metric("eyas.verifier.generated_tokens", "counter", "{token}", "Emitted tokens.")
VERIFIER_PREEMPTIONS = Metric("eyas.verifier.preemptions", "counter", "{request}", "Preempted requests.")
VERIFIER_KV_CACHE_TOKENS = Metric(
    "eyas.verifier.kv_cache_tokens", "gauge", "{token}",
    "KV cache slots: used by running requests, free, or needed by queued requests.", ("state",),
)  # fmt: skip
VERIFIER_PREFIX_CACHE_TOKENS = Metric(
    "eyas.verifier.prefix_cache_tokens", "gauge", "{token}", "KV cache slots that the prefix cache owns."
)
DRAFT_CLIENT_REQUESTS = Metric(
    "eyas.draft_client.requests", "counter", "{request}", "Requests to a drafter: answered in time, or late.",
    (*_DRAFTER, "outcome"),
)  # fmt: skip
DRAFT_CLIENT_DRAFTED_TOKENS = Metric(
    "eyas.draft_client.drafted_tokens", "counter", "{token}", "Verified draft tokens of a drafter.", _DRAFTER
)
DRAFT_CLIENT_ACCEPTED_TOKENS = Metric(
    "eyas.draft_client.accepted_tokens", "counter", "{token}", "Accepted draft tokens of a drafter.", _DRAFTER
)
DRAFT_CLIENT_SESSIONS = Metric(
    "eyas.draft_client.sessions", "gauge", "{session}", "Sessions assigned to a drafter.", _DRAFTER
)
DRAFT_CLIENT_CONNECTED = Metric(
    "eyas.draft_client.connected", "gauge", "1", "1 while the stream to a drafter is open.", _DRAFTER
)
DRAFT_CLIENT_CIRCUIT_BREAKER = Metric(
    "eyas.draft_client.circuit_breaker", "gauge", "1", "1 for the present state of a drafter's circuit breaker.",
    (*_DRAFTER, "state"),
)  # fmt: skip
DRAFT_CLIENT_ROUND_TRIP = Metric(
    "eyas.draft_client.round_trip.duration", "histogram", "s", "Time from a request to a drafter to its reply.",
    buckets=_STEP_SECONDS,
)  # fmt: skip

VERIFIER = (
    VLLM_DRAFTS, VLLM_DRAFT_TOKENS, VLLM_ACCEPTED_TOKENS, VLLM_ACCEPTED_TOKENS_PER_POS, VLLM_RUNNING, VLLM_WAITING,
    VLLM_KV_CACHE_USAGE, VERIFIER_REQUESTS, VERIFIER_REJECTED_REQUESTS, VERIFIER_QUEUE_DURATION, VERIFIER_PREFILL_DURATION,
    VERIFIER_STEP_DURATION, VERIFIER_DRAFT_WAIT_DURATION, VERIFIER_VERIFY_STEPS, VERIFIER_VERIFY_STEP_TOKENS,
    VERIFIER_BATCHED_TOKENS, VERIFIER_PROMPT_TOKENS, VERIFIER_CACHED_PROMPT_TOKENS, VERIFIER_GENERATED_TOKENS,
    VERIFIER_PREEMPTIONS, VERIFIER_KV_CACHE_TOKENS, VERIFIER_PREFIX_CACHE_TOKENS, DRAFT_CLIENT_REQUESTS,
    DRAFT_CLIENT_DRAFTED_TOKENS, DRAFT_CLIENT_ACCEPTED_TOKENS, DRAFT_CLIENT_SESSIONS, DRAFT_CLIENT_CONNECTED,
    DRAFT_CLIENT_CIRCUIT_BREAKER, DRAFT_CLIENT_ROUND_TRIP,
)  # fmt: skip

# Draft service
DRAFT_SESSIONS = Metric("eyas.draft.sessions", "gauge", "{session}", "Sessions that the drafter keeps.")
DRAFT_WAITING_REQUESTS = Metric("eyas.draft.waiting_requests", "gauge", "{request}", "Requests in the drafter's queue.")
DRAFT_STEP_DURATION = Metric(
    "eyas.draft.step.duration", "histogram", "s", "Time of one drafting step over its whole batch of sessions.",
    buckets=_STEP_SECONDS,
)  # fmt: skip
DRAFT_REPLY_DURATION = Metric(
    "eyas.draft.reply.duration", "histogram", "s", "Time from a verifier's request to its reply, queue included.",
    buckets=_STEP_SECONDS,
)  # fmt: skip
DRAFT_COMMITS = Metric(
    "eyas.draft.commits", "counter", "{commit}", "Commits, by outcome: tree, no_tree, resync or dropped.", ("outcome",)
)
DRAFT_DRAFTED_TOKENS = Metric("eyas.draft.drafted_tokens", "counter", "{token}", "Draft tokens, verified or not.")

DRAFT = (
    DRAFT_SESSIONS, DRAFT_WAITING_REQUESTS, DRAFT_STEP_DURATION, DRAFT_REPLY_DURATION, DRAFT_COMMITS, DRAFT_DRAFTED_TOKENS,
)  # fmt: skip

ALL_METRICS = (SERVICE_INFO, *ROUTER, *VERIFIER, *DRAFT)
