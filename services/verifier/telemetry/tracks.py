"""The way of one request through the verifier: moments and rounds in, its spans out. Knows no gRPC and no engine.

While the request runs, moments and rounds are noted as numbers; only rounds that are traced by themselves have spans then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import grpc
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from eyas.engine.engine import StepReport
from eyas.request import Chunk, Round
from eyas.telemetry.tracing import Attributes, below, trace_of
from services.verifier.timing import RoundTimes

# As many as the SDK keeps of a span by itself; of more rounds the last ones are told.
MAX_EVENTS = 128


@dataclass(frozen=True)
class _Step:
    """A round as it was noted. at: ns since the epoch."""

    at: int
    round: Round
    report: StepReport
    times: RoundTimes | None

    def attributes(self) -> Attributes:
        """As an event tells it, times in ms."""
        told: dict[str, int | float] = {
            "nodes": self.round.drafted,
            "accepted": self.round.accepted,
            "wait_ms": self.report.wait * 1e3,
            "verify_ms": self.report.verify * 1e3,
        }
        if self.times is not None:
            told["draft_ms"] = self.times.draft * 1e3
            told["round_trip_ms"] = self.times.round_trip * 1e3
        return told


class Track:
    """One request. span: of its whole stay. ratio: share of its rounds that get spans of their own, its first among them.

    The engine's thread notes, whoever began it ends it.
    """

    def __init__(self, tracer: Tracer, span: Span, ratio: float) -> None:
        self.span = span
        self.traced = span.is_recording()
        self.num_cached = 0
        self.failed = False
        self._tracer = tracer
        self._ratio = ratio
        self._due = 1.0 - ratio
        self._arrived = time.time_ns()
        self._began = 0
        self._first = 0
        self._last = 0
        self._preemptions: deque[int] = deque(maxlen=MAX_EVENTS)
        self._steps: deque[_Step] = deque(maxlen=MAX_EVENTS)
        self._num_rounds = 0
        self._decode: Span | None = None
        self._round: Span | None = None
        self._asked: Span | None = None
        self._ending = threading.Lock()
        self._over = False

    @property
    def queue_seconds(self) -> float | None:
        """How long the request waited for its first step; None if that did not come."""
        return max(self._began - self._arrived, 0) / 1e9 if self._began else None

    @property
    def prefill_seconds(self) -> float | None:
        """From its first step to its first token; None if that did not come."""
        return (self._first - self._began) / 1e9 if self._first else None

    def began(self, now: int) -> None:
        """Its first step began; later ones count nothing."""
        self._began = self._began or now

    def preempted(self, now: int) -> None:
        """It went back to the queue."""
        self._preemptions.append(now)

    def saw(self, now: int, report: StepReport, chunk: Chunk, times: RoundTimes | None) -> None:
        """Note a chunk."""
        self._last = now
        if chunk.finish_reason == "error":
            self.failed = True
        if not self._first and chunk.token_ids:
            self._first, self.num_cached = now, chunk.num_cached
            if self.traced:
                self._decode = self._tracer.start_span("decode", below(self.span), start_time=now)
        elif self.traced and chunk.round is not None:
            self._num_rounds += 1
            step = _Step(now, chunk.round, report, times)
            self._steps.append(step)
            with self._ending:
                self._end_round(now, step)
                self._round, self._asked = self._asked, None  # the step has asked for the next tree already

    def next_round(self) -> str:
        """The trace context of the round that is about to be drafted; empty for one without a span of its own."""
        if self._decode is None or not self._ratio:
            return ""
        self._due += self._ratio
        if self._due < 1.0:
            return ""
        self._due -= 1.0
        with self._ending:
            if self._over:
                return ""
            self._asked = self._tracer.start_span("round", below(self._decode))
            return dict(trace_of(self._asked)).get("traceparent", "")

    def end(self, status: grpc.StatusCode) -> None:
        """Make the spans and end them."""
        if self.traced:
            now = self._last or time.time_ns()
            with self._ending:
                self._over = True
                self._end_round(now, None)
                self._round, self._asked = self._asked, None
                self._end_round(now, None)
            self._begin_and_end("queue", self._arrived, self._began or now)
            if self._began:
                self._begin_and_end("prefill", self._began, self._first or now)
            if self._decode is not None:
                self._tell_rounds(self._decode)
                self._decode.end(now)
        if status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            self.span.set_status(Status(StatusCode.ERROR, status.name))
            self.span.set_attribute("error.type", status.name)
        self.span.end()

    def _begin_and_end(self, name: str, begin: int, end: int) -> None:
        self._tracer.start_span(name, below(self.span), start_time=begin).end(max(begin, end))

    def _tell_rounds(self, decode: Span) -> None:
        room = MAX_EVENTS - len(self._preemptions)
        for at in self._preemptions:
            decode.add_event("preempted", timestamp=at)
        for step in list(self._steps)[len(self._steps) - min(room, len(self._steps)) :]:
            decode.add_event("round", step.attributes(), step.at)
        decode.set_attribute("eyas.rounds", self._num_rounds)
        decode.set_attribute("eyas.preemptions", len(self._preemptions))

    def _end_round(self, now: int, step: _Step | None) -> None:
        span, self._round = self._round, None
        if span is not None:
            span.set_attributes(step.attributes() if step else {})
            if step is not None and step.times is not None:
                span.set_attribute("drafter", step.times.drafter)
            span.end(now)
