"""The thread that runs a drafter: commits of many streams go in, batches of them are drafted, answers go out.

Each stream has a bounded queue. A batch takes commits from all queues, always from the stream with the fewest tokens in it,
so that no verifier waits for another's queue. The drafter knows a session by stream and name.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from eyas.api.validation import MAX_REQUEST_ID_LENGTH
from eyas.config import DraftQueueConfig
from eyas.drafters.base import Draft, DraftContext, LocalDrafter
from eyas.errors import InvalidRequest
from eyas.protocol.commit import Commit, Refusal, RefusalReason, TensorBytes
from eyas.protocol.tree import PreparedTree
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, Load
from eyas.services.draft.streams import Deliver, DraftJob, DraftRow, DraftStream, JobBatch, admit
from eyas.services.draft.telemetry import DraftTelemetry

log = logging.getLogger(__name__)

# Verifiers name sessions by the ids of requests, and a number.
MAX_SESSION_LENGTH = 2 * MAX_REQUEST_ID_LENGTH


class DraftWorker:
    """Thread that runs a drafter: `with DraftWorker(drafter, info) as worker`. Public methods may be called from any thread.

    Args:
        on_break: called from the worker's thread if the drafter breaks for good; after that, streams are only closed.
        queue: limits of each stream and of a batch.
    """

    def __init__(
        self,
        drafter: LocalDrafter,
        info: DrafterInfo,
        on_break: Callable[[], object] = lambda: None,
        telemetry: DraftTelemetry | None = None,
        queue: DraftQueueConfig | None = None,
    ) -> None:
        self._telemetry = telemetry or DraftTelemetry()
        self._drafter = drafter
        self.info = info
        self.limits = queue or DraftQueueConfig()
        self._on_break = on_break
        self._numbers = itertools.count()
        self._streams: dict[int, DraftStream] = {}
        self._waiting: list[DraftStream] = []  # streams with something to do, the least recently served first
        self._wake = threading.Condition()
        self._running = True
        self.broken = False
        self._drafts_ahead = True  # until that fails
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._wake:
            self._running = False
            self._wake.notify()
        self._thread.join()

    def load(self) -> Load:
        """Return the sessions that the drafter holds, and the requests in the queues."""
        streams = list(self._streams.values())
        num_sessions = sum(len(stream.epochs) for stream in streams)
        return Load(num_running=num_sessions, num_waiting=sum(len(stream.jobs) for stream in streams))

    def open(self, deliver: Deliver) -> DraftStream:
        """Return a new stream; `deliver` gets one reply for each request with commits, and None at the end.

        Replies are in order, except that requests without an accepted commit are answered at once.
        """
        stream = DraftStream(next(self._numbers), deliver, self.info.feature_size)
        self._streams[stream.number] = stream
        return stream

    def submit(self, stream: DraftStream, request: DraftRequest) -> None:
        """Queue a request; its releases come before its commits.

        Commits beyond the stream's limits or the model's context are refused in the reply. Raises InvalidRequest if the
        request names a session twice, or by more than MAX_SESSION_LENGTH characters.
        """
        names = {commit.session for commit in request.commits}
        if len(names) < len(request.commits):
            raise InvalidRequest(f"step {request.step} names a session twice; send one commit per session and step")
        if (length := max(map(len, names), default=0)) > MAX_SESSION_LENGTH:
            raise InvalidRequest(f"the name of a session has {length} characters; send at most {MAX_SESSION_LENGTH}")
        with self._wake:
            if self.broken or stream.closing:
                return
            job = stream.admit(request, self.limits, self.info.model.max_model_len)
            if job.ended or job.commits:
                self._wait(stream)
                stream.jobs.append(job)
        if job.refusals:
            self._report(stream, job.refusals)
            if not job.replies:
                job.deliver()

    def close(self, stream: DraftStream, abandon: bool = False) -> None:
        """Release the sessions of a stream, after everything that it has queued. abandon: drop its queue."""
        with self._wake:
            if abandon:
                stream.jobs.clear()
            stream.closing = True
            if self.broken:
                stream.deliver(None)
            elif stream.number in self._streams:
                self._wait(stream)

    def _wait(self, stream: DraftStream) -> None:
        if not stream.waiting:
            stream.waiting = True
            self._waiting.append(stream)
        self._wake.notify()

    def _report(self, stream: DraftStream, refusals: Sequence[Refusal]) -> None:
        reasons = Counter(refusal.reason for refusal in refusals)
        self._telemetry.skipped("refused", len(refusals))
        for reason, number in reasons.items():
            message, limit = _REASONS[reason]
            values = vars(self.limits) | {"max_model_len": self.info.model.max_model_len}
            message = f"refused %d commits of stream %d: {message}"
            log.warning(message, number, stream.number, values[limit], extra={"rate_limited": True})

    # Below: the worker's thread only.

    def _run(self) -> None:
        batch = JobBatch()
        try:
            while self._next(batch := JobBatch()):
                self._serve(batch)
        except Exception:
            log.exception("the drafter is broken")
            with self._wake:
                self.broken = True
                for stream in {*batch.closed, *self._waiting}:
                    if stream.closing:
                        stream.deliver(None)
            self._on_break()

    def _next(self, batch: JobBatch) -> bool:
        """Fill a batch from the queues. Returns whether there is one; False once the worker stops."""
        while not self._waiting and self._running and self._draft_ahead():
            if busy_s := self._drafter.busy_s:
                with self._wake:
                    self._wake.wait_for(lambda: self._waiting or not self._running, busy_s)
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or not self._running)
            if self._running:
                self._waiting = batch.fill(self._waiting, self.limits)
            return self._running

    def _serve(self, batch: JobBatch) -> None:
        for stream in batch.closed:
            batch.released += map(stream.qualified, stream.epochs)
            stream.epochs.clear()
            self._streams.pop(stream.number, None)
        if batch.released:
            self._drafter.release(batch.released)
        rows = [row for job, commit in batch.taken if (row := self._row(job, commit))]
        contexts, drafts, started = [row.context for row in rows], list[Draft](), time.time_ns()
        if contexts:
            drafts = list(self._propose(contexts))
        ended = time.time_ns()
        for row, draft in zip(rows, drafts, strict=True):
            row.job.add(row, draft)
        for job in batch.jobs:
            job.draft_ms += (ended - started) / 1e6
        done = [job for job in batch.jobs if job.replies and not job.commits]
        for job in done:
            job.deliver()
        for stream in batch.closed:
            stream.deliver(None)
        if contexts:
            self._telemetry.drafted(contexts, drafts, started, ended)
        if batch.num_stale:
            self._telemetry.skipped("stale", batch.num_stale)
        self._telemetry.answered([time.perf_counter() - job.queued for job in done])

    def _row(self, job: DraftJob, commit: Commit[TensorBytes]) -> DraftRow | None:
        """Return the row of a commit. None for a malformed or outdated commit: it gets no answer and affects no other."""
        stream, name = job.stream, job.stream.qualified(commit.session)
        try:
            context = admit(commit, name, self.info)
        except InvalidRequest as error:
            log.warning("dropped a commit of session %s: %s", name, error, extra={"rate_limited": True})
            return None
        epoch = stream.epochs.get(commit.session, commit.epoch)
        if commit.epoch < epoch:
            return None
        if commit.epoch > epoch:
            self._drafter.release([name])
        stream.epochs[commit.session] = commit.epoch
        return DraftRow(job, commit.session, context)

    def _draft_ahead(self) -> bool:
        """Do one step of work in advance. Returns whether there is more; after a failure never again."""
        if not self._drafts_ahead:
            return False
        try:
            more = self._drafter.draft_ahead()
            if prepared := self._drafter.take_prepared():
                self._deliver(prepared)
            return more
        except Exception:
            names = [stream.qualified(name) for stream in list(self._streams.values()) for name in stream.epochs]
            log.exception("drafting ahead failed, and stops until a restart; %d sessions start again", len(names))
            self._drafts_ahead = False
            self._drafter.release(names)
            return False

    def _deliver(self, prepared: Sequence[PreparedTree]) -> None:
        """Send prepared trees to the streams of their sessions, in responses of step 0."""
        by_stream: dict[int, list[PreparedTree]] = {}
        for each in prepared:
            number, _, session = each.session.partition("/")
            by_stream.setdefault(int(number), []).append(replace(each, session=session))
        for stream_number, trees in by_stream.items():
            if stream := self._streams.get(stream_number):
                stream.deliver(DraftResponse(0, prepared=tuple(trees)))

    def _propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        try:
            return self._drafter.propose(contexts)
        except Exception:
            message = "the drafter failed; %d sessions get no trees and start again"
            log.exception(message, len(contexts), extra={"rate_limited": True})
            self._drafter.release([context.session for context in contexts])
            return [None] * len(contexts)


# What the log says of each, with the limit of that name.
_REASONS: dict[RefusalReason, tuple[str, str]] = {
    "context_too_long": ("longer than the model's context of %d tokens", "max_model_len"),
    "overloaded": ("more than queue.max_pending_tokens %d wait already; add drafters", "max_pending_tokens"),
    "too_many_sessions": ("the stream has queue.max_sessions %d already; raise it, or add drafters", "max_sessions"),
}
