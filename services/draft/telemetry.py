"""Metrics and spans of the draft service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from opentelemetry.trace import SpanKind

from eyas.drafters.base import Draft, DraftContext
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import Load
from eyas.telemetry import metrics
from eyas.telemetry.exporters import Telemetry
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, histogram
from eyas.telemetry.tracing import context_of


class DraftTelemetry:
    """Telemetry of all drafters of a process. The workers' threads call `drafted` and `answered`."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        telemetry = telemetry or Telemetry()
        self._tracer, self._registry = telemetry.tracer, telemetry.registry
        self._step = histogram(metrics.DRAFT_STEP_DURATION, self._registry)
        self._reply = histogram(metrics.DRAFT_REPLY_DURATION, self._registry)
        commits = counter(metrics.DRAFT_COMMITS, self._registry)
        self._outcomes = {
            name: commits.labels(name) for name in ("tree", "no_tree", "resync", "dropped", "refused", "stale")
        }
        self._nodes = counter(metrics.DRAFT_DRAFTED_TOKENS, self._registry)
        self._new_tokens = counter(metrics.DRAFT_NEW_TOKENS, self._registry)

    def watch(self, loads: Callable[[], Sequence[Load]]) -> None:
        """Export the summed loads of the drafters, read at every scrape."""

        def read() -> Iterator[MetricSample]:
            now = loads()
            yield MetricSample(metrics.DRAFT_SESSIONS, sum(load.num_running for load in now))
            yield MetricSample(metrics.DRAFT_WAITING_REQUESTS, sum(load.num_waiting for load in now))

        self._registry.register(ScrapeCollector(read))

    def drafted(self, contexts: Sequence[DraftContext], drafts: Sequence[Draft], started: int, ended: int) -> None:
        """Record one `propose`, from `started` to `ended` in ns since the epoch."""
        self._step.observe((ended - started) / 1e9)
        num_nodes = num_tokens = 0
        for context, draft in zip(contexts, drafts, strict=True):
            outcome = "resync" if isinstance(draft, ResyncRequired) else "dropped"
            if isinstance(draft, DraftTree):
                outcome = "tree" if context.budget.wants_tree else "no_tree"
            self._outcomes[outcome].inc()
            if isinstance(draft, DraftTree):
                num_nodes += draft.num_drafted
                num_tokens += len(context.tokens)
            if context.traceparent:
                self._trace(context, draft, outcome, len(contexts), (started, ended))
        if num_tokens:
            self._nodes.inc(num_nodes)
            self._new_tokens.inc(num_tokens)

    def skipped(self, outcome: str, number: int) -> None:
        """Count commits that no batch takes: "refused" on arrival, or "stale" in the queue."""
        self._outcomes[outcome].inc(number)

    def answered(self, waits: Sequence[float]) -> None:
        """Record the seconds from the arrival of each request to its reply."""
        for seconds in waits:
            self._reply.observe(seconds)

    def _trace(self, context: DraftContext, draft: Draft, outcome: str, num_sessions: int, when: tuple[int, int]) -> None:
        """Continue the trace of the session's verify step."""
        attributes: dict[str, str | bool | int] = {
            "eyas.outcome": outcome,
            "eyas.sessions": num_sessions,
            "eyas.new_tokens": len(context.tokens),
        }
        if isinstance(draft, DraftTree):
            attributes |= {
                "eyas.drafted_tokens": draft.num_drafted,
                "eyas.depth": draft.depth,
                "eyas.grown_ahead": draft.grown_ahead,
            }
        parent = context_of((("traceparent", context.traceparent),))
        self._tracer.start_span("draft", parent, SpanKind.SERVER, attributes, start_time=when[0]).end(when[1])
