"""What the draft service tells: rounds of its drafter in, metrics and spans out. Knows no tokens and no streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.trace import SpanKind

from eyas.draft_protocol import ResyncRequired
from eyas.drafters.base import Draft, DraftContext
from eyas.telemetry import metrics as catalog
from eyas.telemetry.metrics import MetricSample, ScrapeCollector, counter, histogram
from eyas.telemetry.setup import Telemetry
from eyas.telemetry.tracing import context_of
from eyas.tree import DraftTree

_LOAD = (catalog.DRAFT_SESSIONS, catalog.DRAFT_WAITING)


class DraftTelemetry:
    """One for a drafter. `drafted` belongs to the thread that owns it."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        telemetry = telemetry or Telemetry()
        self._tracer, self._registry = telemetry.tracer, telemetry.registry
        self._round = histogram(catalog.DRAFT_ROUND, self._registry)
        self._answer = histogram(catalog.DRAFT_ANSWER, self._registry)
        commits = counter(catalog.DRAFT_COMMITS, self._registry)
        self._outcomes = {name: commits.labels(name) for name in ("tree", "bookkept", "refused", "unanswered")}
        self._nodes = counter(catalog.DRAFT_NODES, self._registry)

    def watch(self, num_sessions: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Tell of the drafter's load, as it is whenever somebody looks."""

        def read() -> list[MetricSample]:
            return [MetricSample(catalog.DRAFT_SESSIONS, num_sessions()), MetricSample(catalog.DRAFT_WAITING, num_waiting())]

        self._registry.register(ScrapeCollector(_LOAD, read))

    def drafted(self, contexts: Sequence[DraftContext], drafts: Sequence[Draft], started: int, ended: int) -> None:
        """Note one round: what was asked and what was answered, from `started` to `ended` in ns since the epoch."""
        self._round.observe((ended - started) / 1e9)
        num_nodes = 0
        for context, draft in zip(contexts, drafts, strict=True):
            outcome = _outcome(context, draft)
            self._outcomes[outcome].inc()
            num_nodes += draft.num_drafted if isinstance(draft, DraftTree) else 0
            if context.traceparent:
                self._trace(context, draft, outcome, len(contexts), (started, ended))
        if num_nodes:
            self._nodes.inc(num_nodes)

    def answered(self, waits: Sequence[float]) -> None:
        """Note how long requests waited for their answers, each from when it came, in seconds."""
        for seconds in waits:
            self._answer.observe(seconds)

    def _trace(self, context: DraftContext, draft: Draft, outcome: str, num_sessions: int, when: tuple[int, int]) -> None:
        """The session's round goes on here."""
        told: dict[str, str | bool | int] = {
            "outcome": outcome,
            "sessions": num_sessions,
            "new_tokens": len(context.tokens),
        }
        if isinstance(draft, DraftTree):
            told |= {"nodes": draft.num_drafted, "depth": draft.depth, "grown_ahead": draft.grown_ahead}
        parent = context_of((("traceparent", context.traceparent),))
        self._tracer.start_span("draft", parent, SpanKind.SERVER, told, start_time=when[0]).end(when[1])


def _outcome(context: DraftContext, draft: Draft) -> str:
    if isinstance(draft, ResyncRequired):
        return "refused"
    if draft is None:
        return "unanswered"
    return "tree" if context.budget.wants_tree else "bookkept"
