"""A metric as a value, and how it becomes a metric of prometheus_client. Knows no metric by name.

Every metric of Eyas by name. Knows no values; docs/telemetry.md shows this list.
"""

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
class MetricSample:
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


class ScrapeCollector(Collector):
    """Metrics that cost nothing until somebody looks: `read` is called at each scrape, from the scraper's thread."""

    def __init__(self, metrics: Sequence[Metric], read: Callable[[], Iterable[MetricSample]]) -> None:
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


# Seconds. Tokens come within milliseconds here, where the buckets of the GenAI conventions begin at 10 ms.
_PER_TOKEN = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROUND = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
_WAIT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# As the GenAI conventions name them.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_REQUEST = tuple(0.01 * 2**i for i in range(14))
_TOKENS = tuple(float(4**i) for i in range(14))
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

SERVICE_INFO = Metric("eyas.service.info", "gauge", "1", "Always 1: which service this is.", ("service", "version"))

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration", "histogram", "s", "From a request's arrival to its end.",
    (*_GEN_AI, "error.type"), _REQUEST,
)  # fmt: skip
FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token", "histogram", "s", "From a request's arrival to its first token.",
    _GEN_AI, _FIRST_TOKEN,
)  # fmt: skip
PER_TOKEN = Metric(
    "gen_ai.server.time_per_output_token", "histogram", "s", "Mean time per token of a request after its first chunk.",
    _GEN_AI, _PER_TOKEN,
)  # fmt: skip
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage", "histogram", "{token}", "Tokens of a request.",
    (*_GEN_AI, "gen_ai.token.type"), _TOKENS,
)  # fmt: skip
ROUTER_REQUESTS = Metric(
    "eyas.router.requests", "counter", "{request}", "Requests that have ended, by gRPC status.", ("model", "status")
)
ROUTER_HTTP = Metric(
    "eyas.router.http.answers", "counter", "{answer}", "Answers of the HTTP door, those without a key among them.",
    ("http.route", "http.response.status_code"),
)  # fmt: skip
ROUTER_RUNNING = Metric("eyas.router.requests.running", "gauge", "{request}", "Requests that have not ended.")
ROUTER_ATTEMPTS = Metric(
    "eyas.router.attempts", "counter", "{attempt}", "Calls of verifiers that have ended, by gRPC status.", ("status",)
)
ROUTER_RETRIES = Metric("eyas.router.retries", "counter", "{attempt}", "Calls of another verifier after one that failed.")
ROUTER_UNDRAFTED = Metric(
    "eyas.router.pairs_without_drafter", "counter", "{attempt}", "Calls that were to be drafted for and found no drafter."
)
ROUTER_WORKERS = Metric("eyas.router.workers", "gauge", "{worker}", "Live workers that this router knows.", ("role",))
ROUTER_TAU = Metric(
    "eyas.router.acceptance_length", "histogram", "{token}", "Tokens per verify step (tau) of drafted requests.",
    buckets=_LENGTHS,
)  # fmt: skip

ROUTER = (
    REQUEST_DURATION, FIRST_TOKEN, PER_TOKEN, TOKEN_USAGE, ROUTER_REQUESTS, ROUTER_HTTP, ROUTER_RUNNING, ROUTER_ATTEMPTS,
    ROUTER_RETRIES, ROUTER_UNDRAFTED, ROUTER_WORKERS, ROUTER_TAU,
)  # fmt: skip

_VLLM = ("model_name",)

VLLM_DRAFTS = Metric("vllm:spec_decode_num_drafts", "counter", "{draft}", "Draft trees that were verified.", _VLLM)
VLLM_DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens", "counter", "{token}", "Drafted tokens that were verified.", _VLLM
)
VLLM_ACCEPTED = Metric(
    "vllm:spec_decode_num_accepted_tokens", "counter", "{token}", "Drafted tokens that were accepted.", _VLLM
)
VLLM_ACCEPTED_AT = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "{token}",
    "Drafted tokens that were accepted, by depth in the tree from 0.", (*_VLLM, "position"),
)  # fmt: skip
VLLM_RUNNING = Metric("vllm:num_requests_running", "gauge", "{request}", "Requests in the engine's steps.", _VLLM)
VLLM_WAITING = Metric("vllm:num_requests_waiting", "gauge", "{request}", "Requests in the engine's queue.", _VLLM)
VLLM_CACHE = Metric("vllm:kv_cache_usage_perc", "gauge", "1", "Share of the slots that running requests hold.", _VLLM)

VERIFIER_REQUESTS = Metric(
    "eyas.verifier.requests", "counter", "{request}", "Requests that have ended, by gRPC status.", ("status",)
)
VERIFIER_REFUSALS = Metric(
    "eyas.verifier.refusals", "counter", "{request}", "Requests refused before their first chunk, by gRPC status.",
    ("status",),
)  # fmt: skip
VERIFIER_QUEUE = Metric(
    "eyas.verifier.queue.duration", "histogram", "s", "From a request's arrival to its first step.", buckets=_WAIT
)
VERIFIER_PREFILL = Metric(
    "eyas.verifier.prefill.duration", "histogram", "s", "From a request's first step to its first token.", buckets=_WAIT
)
VERIFIER_STEP = Metric(
    "eyas.verifier.step.duration", "histogram", "s", "Forward pass, draws and acceptance of a step.", buckets=_ROUND
)
VERIFIER_WAIT = Metric(
    "eyas.verifier.draft_wait.duration", "histogram", "s", "How long a step waited for draft trees.", buckets=_ROUND
)
VERIFIER_ROUNDS = Metric(
    "eyas.verifier.rounds", "counter", "{round}", "Verify steps of sequences, with a tree or without.", ("kind",)
)
VERIFIER_ROUND_TOKENS = Metric("eyas.verifier.round_tokens", "counter", "{token}", "Tokens that verify steps emitted.")
VERIFIER_ROWS = Metric("eyas.verifier.rows", "counter", "{row}", "Rows of forward passes: prompt tokens and tree nodes.")
VERIFIER_PROMPT = Metric("eyas.verifier.prompt_tokens", "counter", "{token}", "Prompt tokens of requests that have begun.")
VERIFIER_CACHED = Metric(
    "eyas.verifier.cached_prompt_tokens", "counter", "{token}", "Prompt tokens that the prefix cache spared."
)
VERIFIER_GENERATED = Metric("eyas.verifier.generated_tokens", "counter", "{token}", "Tokens emitted.")
VERIFIER_PREEMPTIONS = Metric("eyas.verifier.preemptions", "counter", "{request}", "Running requests queued again.")
VERIFIER_SLOTS = Metric(
    "eyas.verifier.slots",
    "gauge",
    "{slot}",
    "Token slots: used by running requests, free for others, or asked for by queued ones.",
    ("state",),
)
VERIFIER_CACHED_SLOTS = Metric("eyas.verifier.cached_slots", "gauge", "{slot}", "Token slots that the prefix cache owns.")

_LINK = ("drafter",)
LINK_ROUNDS = Metric(
    "eyas.link.rounds", "counter", "{round}", "Drafting rounds of a drafter: answered in time, or late.",
    (*_LINK, "outcome"),
)  # fmt: skip
LINK_DRAFTED = Metric("eyas.link.drafted_tokens", "counter", "{token}", "Tokens of a drafter that were verified.", _LINK)
LINK_ACCEPTED = Metric("eyas.link.accepted_tokens", "counter", "{token}", "Tokens of a drafter that were accepted.", _LINK)
LINK_SESSIONS = Metric("eyas.link.sessions", "gauge", "{session}", "Sessions that a drafter drafts for.", _LINK)
LINK_UP = Metric("eyas.link.up", "gauge", "1", "Whether the stream to a drafter is open.", _LINK)
LINK_CIRCUIT = Metric(
    "eyas.link.circuit", "gauge", "1", "1 for the state of a drafter's circuit breaker.", (*_LINK, "state")
)
LINK_TRIP = Metric(
    "eyas.link.round_trip.duration", "histogram", "s", "From asking a drafter to its answer, drafting included.",
    buckets=_ROUND,
)  # fmt: skip

VERIFIER = (
    VLLM_DRAFTS, VLLM_DRAFT_TOKENS, VLLM_ACCEPTED, VLLM_ACCEPTED_AT, VLLM_RUNNING, VLLM_WAITING, VLLM_CACHE,
    VERIFIER_REQUESTS, VERIFIER_REFUSALS, VERIFIER_QUEUE, VERIFIER_PREFILL, VERIFIER_STEP, VERIFIER_WAIT,
    VERIFIER_ROUNDS, VERIFIER_ROUND_TOKENS, VERIFIER_ROWS, VERIFIER_PROMPT, VERIFIER_CACHED, VERIFIER_GENERATED,
    VERIFIER_PREEMPTIONS, VERIFIER_SLOTS, VERIFIER_CACHED_SLOTS,
    LINK_ROUNDS, LINK_DRAFTED, LINK_ACCEPTED, LINK_SESSIONS, LINK_UP, LINK_CIRCUIT, LINK_TRIP,
)  # fmt: skip

DRAFT_SESSIONS = Metric("eyas.draft.sessions", "gauge", "{session}", "Sessions that the drafter knows.")
DRAFT_WAITING = Metric("eyas.draft.requests.waiting", "gauge", "{request}", "Requests that the drafter has not seen yet.")
DRAFT_ROUND = Metric(
    "eyas.draft.round.duration", "histogram", "s", "How long a round took the drafter, for all its sessions.",
    buckets=_ROUND,
)  # fmt: skip
DRAFT_ANSWER = Metric(
    "eyas.draft.answer.duration", "histogram", "s", "From a verifier's request to the answers to its commits.",
    buckets=_ROUND,
)  # fmt: skip
DRAFT_COMMITS = Metric(
    "eyas.draft.commits", "counter", "{commit}", "Commits by what became of them: tree, bookkept, refused, unanswered.",
    ("outcome",),
)  # fmt: skip
DRAFT_NODES = Metric("eyas.draft.nodes", "counter", "{token}", "Drafted tokens, whether they are verified or not.")

DRAFT = (DRAFT_SESSIONS, DRAFT_WAITING, DRAFT_ROUND, DRAFT_ANSWER, DRAFT_COMMITS, DRAFT_NODES)
