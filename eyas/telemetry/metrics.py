"""Every metric of Eyas by name, and how a metric becomes one of prometheus_client. docs/telemetry.md shows the list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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
        labels: names of Prometheus, or OpenTelemetry's with dots, for which Prometheus gets underscores.
        buckets: upper bounds of a histogram.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
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

    def __init__(self, read: Callable[[], Iterable[MetricSample]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        """Return the families with their samples."""
        families: dict[Metric, Family] = {}
        for sample in self._read():
            metric = sample.metric
            if metric not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric] = kind(metric.family, metric.text, labels=metric.label_names)
            families[metric].add_metric(sample.labels, float(sample.value))
        return families.values()


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

_counter, _gauge, _histogram = (partial(Metric, kind) for kind in ("counter", "gauge", "histogram"))


def _seconds(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Metric:
    return _histogram(name, "s", text, labels, buckets)


SERVICE_INFO = _gauge("eyas.service.info", "1", "Always 1; the labels name the service.", ("service", "version"))

# Router
REQUEST_DURATION = _seconds(
    "gen_ai.server.request.duration", "Time from a request's arrival to its end.", _REQUEST_SECONDS, (*_GEN_AI, "error.type")
)
TIME_TO_FIRST_TOKEN = _seconds(
    "gen_ai.server.time_to_first_token", "Time from a request's arrival to its first token.", _FIRST_TOKEN_SECONDS, _GEN_AI
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "gen_ai.server.time_per_output_token", "Mean time per token of a request after its first chunk.", _TOKEN_SECONDS, _GEN_AI
)
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage", "{token}", "Input or output tokens of a request.", (*_GEN_AI, "gen_ai.token.type"), _TOKENS
)
HTTP_REQUEST_DURATION = _seconds(
    "http.server.request.duration",
    "Time from an HTTP request to the end of its response.",
    _HTTP_SECONDS,
    ("http.request.method", "http.route", "http.response.status_code"),
)
ROUTER_REQUESTS = _counter("eyas.router.requests", "{request}", "Finished requests, by gRPC status.", ("model", "status"))
ROUTER_ACTIVE_REQUESTS = _gauge("eyas.router.active_requests", "{request}", "Requests in progress.")
ROUTER_WAITING_REQUESTS = _gauge(
    "eyas.router.waiting_requests", "{request}", "Requests that wait for a verifier, because none can take them now."
)
ROUTER_UPSTREAM_REQUESTS = _counter(
    "eyas.router.upstream_requests", "{request}", "Finished calls to verifiers, by gRPC status.", ("status",)
)
ROUTER_UPSTREAM_RETRIES = _counter("eyas.router.upstream_retries", "{request}", "Calls to verifiers after one failed.")
ROUTER_WITHOUT_DRAFTER = _counter(
    "eyas.router.upstream_requests_without_drafter",
    "{request}",
    "Calls to verifiers that should have a drafter, but none was available.",
)
ROUTER_WORKERS = _gauge("eyas.router.workers", "{worker}", "Live workers, by role.", ("role",))
ROUTER_ACCEPTANCE_LENGTH = _histogram(
    "eyas.router.acceptance_length",
    "{token}",
    "Tokens per verify step (tau) of requests with drafts.",
    (),
    _ACCEPTANCE_LENGTHS,
)


# Verifier
VLLM_DRAFTS = _counter("vllm:spec_decode_num_drafts", "{draft}", "Verified draft trees.", _VLLM)
VLLM_DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens", "{token}", "Verified draft tokens.", _VLLM)
VLLM_ACCEPTED_TOKENS = _counter("vllm:spec_decode_num_accepted_tokens", "{token}", "Accepted draft tokens.", _VLLM)
VLLM_ACCEPTED_TOKENS_PER_POS = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "{token}",
    "Accepted draft tokens, by depth in the tree from 0.",
    (*_VLLM, "position"),
)
VLLM_RUNNING = _gauge("vllm:num_requests_running", "{request}", "Requests in the engine's batch.", _VLLM)
VLLM_WAITING = _gauge("vllm:num_requests_waiting", "{request}", "Requests in the engine's queue.", _VLLM)
VLLM_KV_CACHE_USAGE = _gauge(
    "vllm:kv_cache_usage_perc", "1", "Share of the KV cache that running requests use, 0 to 1.", _VLLM
)
VERIFIER_REQUESTS = _counter("eyas.verifier.requests", "{request}", "Finished requests, by gRPC status.", ("status",))
VERIFIER_REJECTED_REQUESTS = _counter(
    "eyas.verifier.rejected_requests",
    "{request}",
    "Requests rejected before their first chunk, by gRPC status.",
    ("status",),
)
VERIFIER_QUEUE_DURATION = _seconds(
    "eyas.verifier.queue.duration", "Time from a request's arrival to its first step.", _QUEUE_SECONDS
)
VERIFIER_PREFILL_DURATION = _seconds(
    "eyas.verifier.prefill.duration", "Time from a request's first step to its first token.", _QUEUE_SECONDS
)
VERIFIER_STEP_DURATION = _seconds(
    "eyas.verifier.step.duration", "Time of a step's forward pass, sampling and acceptance.", _STEP_SECONDS
)
VERIFIER_STEP_AGE = _gauge(
    "eyas.verifier.step_age", "s", "Time since the present step began; 0 between steps. It grows while a step is stuck."
)
VERIFIER_DRAFT_WAIT_DURATION = _seconds(
    "eyas.verifier.draft_wait.duration", "Time that a step waits for draft trees.", _STEP_SECONDS
)
VERIFIER_VERIFY_STEPS = _counter(
    "eyas.verifier.verify_steps", "{step}", "Verify steps of sequences: with a draft tree, or plain.", ("kind",)
)
VERIFIER_VERIFY_STEP_TOKENS = _counter("eyas.verifier.verify_step_tokens", "{token}", "Tokens that verify steps emit.")
VERIFIER_BATCHED_TOKENS = _counter(
    "eyas.verifier.batched_tokens", "{token}", "Rows of forward passes: prompt tokens and tree nodes."
)
VERIFIER_PROMPT_TOKENS = _counter("eyas.verifier.prompt_tokens", "{token}", "Prompt tokens of started requests.")
VERIFIER_CACHED_PROMPT_TOKENS = _counter(
    "eyas.verifier.cached_prompt_tokens", "{token}", "Prompt tokens found in the prefix cache."
)
VERIFIER_GENERATED_TOKENS = _counter("eyas.verifier.generated_tokens", "{token}", "Emitted tokens.")
VERIFIER_PREEMPTIONS = _counter("eyas.verifier.preemptions", "{request}", "Preempted requests.")
VERIFIER_KV_CACHE_TOKENS = _gauge(
    "eyas.verifier.kv_cache_tokens",
    "{token}",
    "KV cache slots: used by running requests, free, or needed by queued requests.",
    ("state",),
)
VERIFIER_PREFIX_CACHE_TOKENS = _gauge(
    "eyas.verifier.prefix_cache_tokens", "{token}", "KV cache slots that the prefix cache owns."
)
DRAFT_CLIENT_REQUESTS = _counter(
    "eyas.draft_client.requests", "{request}", "Requests to a drafter: answered in time, or late.", (*_DRAFTER, "outcome")
)
DRAFT_CLIENT_DRAFTED_TOKENS = _counter(
    "eyas.draft_client.drafted_tokens", "{token}", "Verified draft tokens of a drafter.", _DRAFTER
)
DRAFT_CLIENT_ACCEPTED_TOKENS = _counter(
    "eyas.draft_client.accepted_tokens", "{token}", "Accepted draft tokens of a drafter.", _DRAFTER
)
DRAFT_CLIENT_SESSIONS = _gauge("eyas.draft_client.sessions", "{session}", "Sessions assigned to a drafter.", _DRAFTER)
DRAFT_CLIENT_CONNECTED = _gauge("eyas.draft_client.connected", "1", "1 while the stream to a drafter is open.", _DRAFTER)
DRAFT_CLIENT_CIRCUIT_BREAKER = _gauge(
    "eyas.draft_client.circuit_breaker", "1", "1 for the present state of a drafter's circuit breaker.", (*_DRAFTER, "state")
)
DRAFT_CLIENT_ROUND_TRIP = _seconds(
    "eyas.draft_client.round_trip.duration", "Time from a request to a drafter to its reply.", _STEP_SECONDS
)


# Draft service
DRAFT_SESSIONS = _gauge("eyas.draft.sessions", "{session}", "Sessions that the drafter keeps.")
DRAFT_WAITING_REQUESTS = _gauge("eyas.draft.waiting_requests", "{request}", "Requests in the drafter's queue.")
DRAFT_STEP_DURATION = _seconds(
    "eyas.draft.step.duration", "Time of one drafting step over its whole batch of sessions.", _STEP_SECONDS
)
DRAFT_REPLY_DURATION = _seconds(
    "eyas.draft.reply.duration", "Time from a verifier's request to its reply, queue included.", _STEP_SECONDS
)
DRAFT_COMMITS = _counter(
    "eyas.draft.commits", "{commit}", "Commits, by outcome: tree, no_tree, resync, dropped, refused or stale.", ("outcome",)
)
DRAFT_DRAFTED_TOKENS = _counter("eyas.draft.drafted_tokens", "{token}", "Draft tokens, verified or not.")
DRAFT_NEW_TOKENS = _counter("eyas.draft.new_tokens", "{token}", "Committed tokens taken in; those of moved sessions again.")


ALL_METRICS = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
