"""The thread that runs a drafter: commits of many streams go in, batches of them are drafted, answers go out.

Each stream has a bounded queue. A batch takes commits from all queues, always from the stream with the fewest tokens in it,
so that no verifier waits for another's queue. The drafter knows a session by stream and name.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from torch import Tensor

from eyas.api.request import SamplingParams
from eyas.api.validation import MAX_REQUEST_ID_LENGTH
from eyas.config import DraftQueueConfig
from eyas.device.transfer import tensor_from_bytes
from eyas.drafters.base import Draft, DraftContext, LocalDrafter
from eyas.errors import InvalidRequest
from eyas.protocol.commit import Commit, NoiseKey, Refusal, RefusalReason, ResyncRequired, TensorBytes
from eyas.protocol.tree import DraftTree, PreparedTree
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, Load, SessionTree
from eyas.services.draft.telemetry import DraftTelemetry

log = logging.getLogger(__name__)

# Verifiers name sessions by the ids of requests, and a number.
MAX_SESSION_LENGTH = 2 * MAX_REQUEST_ID_LENGTH

Deliver = Callable[[DraftResponse | None], None]


class DraftWorker:
    """Runs a drafter: `with DraftWorker(drafter, info) as worker`. Public methods may be called from any thread.

    on_break: called from the worker's thread if the drafter breaks for good; after that, streams are only closed.
    queue: limits of each stream and of a batch.
    """

    def __init__(
        self,
        drafter: LocalDrafter,
        info: DrafterInfo,
        on_break: Callable[[], object] = bool,
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
        """The sessions that the drafter holds, and the requests in the queues."""
        streams = list(self._streams.values())
        num_sessions = sum(len(stream.epochs) for stream in streams)
        return Load(num_running=num_sessions, num_waiting=sum(len(stream.jobs) for stream in streams))

    def open(self, deliver: Deliver) -> DraftStream:
        """A new stream; `deliver` gets one reply for each request with commits, and None at the end.

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
            message = f"refused %d commits of stream %d: {_REASONS[reason]}"
            values = vars(self.limits) | {"max_model_len": self.info.model.max_model_len}
            log.warning(message, number, stream.number, values[_LIMITS[reason]], extra={"rate_limited": True})

    # Below: the worker's thread only.

    def _run(self) -> None:
        batch = _Batch()
        try:
            while self._next(batch := _Batch()):
                self._serve(batch)
        except Exception:
            log.exception("the drafter is broken")
            with self._wake:
                self.broken = True
                for stream in {*batch.closed, *self._waiting}:
                    if stream.closing:
                        stream.deliver(None)
            self._on_break()

    def _next(self, batch: _Batch) -> bool:
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

    def _serve(self, batch: _Batch) -> None:
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
        done = batch.finish((ended - started) / 1e6)
        for job in done:
            job.deliver()
        for stream in batch.closed:
            stream.deliver(None)
        if contexts:
            self._telemetry.drafted(contexts, drafts, started, ended)
        if batch.num_stale:
            self._telemetry.skipped("stale", batch.num_stale)
        self._telemetry.answered([time.perf_counter() - job.queued for job in done])

    def _row(self, job: _Job, commit: Commit[TensorBytes]) -> _Row | None:
        """The row of a commit. None for a malformed or outdated commit: it gets no answer and affects no other."""
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
        return _Row(job, commit.session, context)

    def _draft_ahead(self) -> bool:
        try:
            more = self._drafter.draft_ahead()
            self._deliver(self._drafter.take_prepared())
            return more
        except Exception:
            names = [stream.qualified(name) for stream in list(self._streams.values()) for name in stream.epochs]
            message = "the drafter failed while drafting ahead; %d sessions start again"
            log.exception(message, len(names), extra={"rate_limited": True})
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


_REASONS: dict[RefusalReason, str] = {
    "context_too_long": "longer than the model's context of %d tokens",
    "overloaded": "more than queue.max_pending_tokens %d wait already; the drafter is too slow for its verifiers",
    "too_many_sessions": "the stream has queue.max_sessions %d already; raise it, or add drafters",
}
_LIMITS: dict[RefusalReason, str] = {
    "context_too_long": "max_model_len",
    "overloaded": "max_pending_tokens",
    "too_many_sessions": "max_sessions",
}


@dataclass(eq=False)
class DraftStream:
    """One verifier's stream and its queue. The worker's thread calls `deliver`.

    feature_size: of the drafter; 0 if it takes no features. sessions: admitted ones that have not ended.
    epochs: by session, of those that the drafter holds. num_pending: sizes of the queued commits, in tokens.
    waiting: whether the worker has it in its list.
    """

    number: int
    deliver: Deliver
    feature_size: int
    jobs: deque[_Job] = field(default_factory=deque)
    sessions: set[str] = field(default_factory=set)
    epochs: dict[str, int] = field(default_factory=dict)
    num_pending: int = 0
    closing: bool = False
    waiting: bool = False

    def qualified(self, session: str) -> str:
        """The drafter's name for a session of this stream."""
        return f"{self.number}/{session}"

    def size(self, commit: Commit[TensorBytes]) -> int:
        """Tokens that a commit counts for in the queue: at least one, and as many as its samples and features would need."""
        num_bytes = len(commit.features.data) if commit.features else 0
        return max(len(commit.tokens), len(commit.samples), num_bytes // (4 * max(self.feature_size, 1)), 1)

    def admit(self, request: DraftRequest, limits: DraftQueueConfig, max_model_len: int) -> _Job:
        """The request as a job of the commits within the limits, and refusals of the others."""
        ended = tuple(name for name in dict.fromkeys(request.ended_sessions) if name in self.sessions)
        self.sessions.difference_update(ended)
        job = _Job(self, request.step, ended, request.timeout_s)
        for commit in request.commits:
            reason: RefusalReason | None = None
            size = self.size(commit)
            if commit.committed_length > max_model_len:
                reason = "context_too_long"
            elif self.num_pending + size > limits.max_pending_tokens:
                reason = "overloaded"
            elif commit.session not in self.sessions and len(self.sessions) >= limits.max_sessions:
                reason = "too_many_sessions"
            if reason:
                job.refusals.append(Refusal(commit.session, commit.epoch, reason))
                continue
            self.sessions.add(commit.session)
            self.num_pending += size
            job.commits.append(commit)
        job.replies = bool(job.commits)
        return job


@dataclass(eq=False)
class _Job:
    """A queued request. ended: sessions to release before its commits. queued: time.perf_counter() on arrival.

    timeout_s: how long its trees are of use; 0 without a limit. replies: whether its last commit makes the reply.
    """

    stream: DraftStream
    step: int
    ended: tuple[str, ...]
    timeout_s: float
    queued: float = field(default_factory=time.perf_counter)
    commits: deque[Commit[TensorBytes]] = field(default_factory=deque)
    trees: list[SessionTree] = field(default_factory=list)
    resyncs: list[ResyncRequired] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    draft_ms: float = 0.0
    replies: bool = False

    def add(self, row: _Row, draft: Draft) -> None:
        """Keep the answer to one of the commits."""
        if isinstance(draft, DraftTree) and row.context.budget.wants_tree and not row.context.has_tree:
            self.trees.append(SessionTree(row.session, row.context.epoch, row.context.committed_length, draft))
        elif isinstance(draft, ResyncRequired):
            self.resyncs.append(ResyncRequired(row.session, row.context.epoch, draft.committed_length))

    def deliver(self) -> None:
        """Send the answers."""
        reply = DraftResponse(self.step, tuple(self.trees), tuple(self.resyncs), self.draft_ms, tuple(self.refusals))
        self.stream.deliver(reply)


@dataclass(frozen=True)
class _Row:
    """A usable commit. session: its name on the job's stream; the context has the qualified name."""

    job: _Job
    session: str
    context: DraftContext


@dataclass
class _Batch:
    """What the drafter does next: release sessions, then draft for the taken commits, each session at most once.

    closed: streams that end. jobs: those with a taken or stale commit. num_stale: commits whose trees come too late.
    touched: the sessions that each stream has in the batch; shares: its tokens in it.
    """

    taken: list[tuple[_Job, Commit[TensorBytes]]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    closed: list[DraftStream] = field(default_factory=list)
    jobs: dict[_Job, None] = field(default_factory=dict)
    touched: dict[DraftStream, set[str]] = field(default_factory=dict)
    shares: dict[DraftStream, int] = field(default_factory=dict)
    num_stale: int = 0

    def fill(self, waiting: Sequence[DraftStream], limits: DraftQueueConfig) -> list[DraftStream]:
        """Take commits until the batch is full. Returns the streams that still wait, in the order of the next turn.

        Those with the fewest tokens in this batch begin the next one. So no stream has what is left over twice in a row.
        """
        self.touched, self.shares = {stream: set() for stream in waiting}, dict.fromkeys(waiting, 0)
        turns, num_tokens, now = [(0, place) for place in range(len(waiting))], 0, time.perf_counter()
        while turns and len(self.taken) < limits.max_batch_size and num_tokens < limits.max_batch_tokens:
            own, place = heapq.heappop(turns)
            if size := self._take(waiting[place], now):
                self.shares[waiting[place]] += size
                num_tokens += size
                heapq.heappush(turns, (own + size, place))
        for stream in waiting:
            if stream.closing and not stream.jobs and not self.touched[stream]:
                self.closed.append(stream)
        for stream in waiting:
            stream.waiting = bool(stream.jobs) or (stream.closing and bool(self.touched[stream]))
        return sorted((stream for stream in waiting if stream.waiting), key=self.shares.__getitem__)

    def finish(self, draft_ms: float) -> list[_Job]:
        """Add the time of the batch to its jobs; return those that are to be answered."""
        for job in self.jobs:
            job.draft_ms += draft_ms
        return [job for job in self.jobs if job.replies and not job.commits]

    def _take(self, stream: DraftStream, now: float) -> int:
        """Take the stream's next commit; returns its tokens. 0: there is none, or its session has to wait for this batch."""
        touched = self.touched[stream]
        while stream.jobs:
            job = stream.jobs[0]
            if not touched.isdisjoint(job.ended):
                return 0
            self.released += [stream.qualified(name) for name in job.ended if stream.epochs.pop(name, None) is not None]
            job.ended = ()
            if not job.commits:
                stream.jobs.popleft()
                continue
            commit = job.commits[0]
            if commit.session in touched:
                return 0
            job.commits.popleft()
            if not job.commits:
                stream.jobs.popleft()
            self.jobs[job] = None
            stream.num_pending -= stream.size(commit)
            awaited = commit.budget.wants_tree and not commit.has_tree
            if job.timeout_s and awaited and now - job.queued > job.timeout_s:
                self.num_stale += 1  # the verifier sends these tokens again with its next commit
                continue
            touched.add(commit.session)
            self.taken.append((job, commit))
            return max(len(commit.tokens), 1)
        return 0


def admit(commit: Commit[TensorBytes], session: str, info: DrafterInfo) -> DraftContext:
    """Validate a commit and turn it into a context named `session` for the drafter that `info` describes.

    Raises InvalidRequest for lengths, token ids, features or noise that no drafter could use, and for a proposal that this
    one cannot make.
    """
    if commit.proposal == "sampled" and not info.can_sample:
        raise InvalidRequest(f"drafter {info.method} cannot sample trees; ask for a deterministic proposal")
    if commit.start_position < 0 or not commit.tokens:
        raise InvalidRequest(
            f"commit of {len(commit.tokens)} tokens at length {commit.start_position}; send at least one, from 0 on"
        )
    for token in (*commit.tokens, *commit.samples, *(bias.token for bias in commit.logit_biases)):
        if not 0 <= token < info.model.vocab_size:
            raise InvalidRequest(f"token {token} lies outside [0, {info.model.vocab_size})")
    if len(commit.allowed) not in (0, size := -(-info.model.vocab_size // 8)):
        raise InvalidRequest(f"allowed_tokens has {len(commit.allowed)} bytes; send none, or {size} for the vocabulary")
    if not 0 <= commit.budget.tokens_per_s < math.inf:
        raise InvalidRequest(f"tokens_per_second is {commit.budget.tokens_per_s}; it must be a number from 0")
    for bias in commit.logit_biases:
        if math.isnan(bias.bias) or bias.bias == math.inf:
            raise InvalidRequest(f"the bias of token {bias.token} is {bias.bias}; it must be a number, or minus infinity")
    _check_noise(commit.noise)
    features = _features(commit, info) if info.needs_features else None
    return Commit(**{**vars(commit), "session": session, "features": features})


@lru_cache(1024)
def _check_noise(noise: NoiseKey) -> None:
    """Raises InvalidRequest for values out of range. All commits of a session have the same."""
    SamplingParams(**vars(noise))


def _features(commit: Commit[TensorBytes], info: DrafterInfo) -> Tensor:
    shape = (commit.committed_length - 1 - max(commit.start_position - 1, 0), info.feature_size)
    if commit.features is None or commit.features.shape != shape:
        given = list(commit.features.shape) if commit.features else "none"
        raise InvalidRequest(
            f"features are {given}; length {commit.start_position} to {commit.committed_length} needs {list(shape)}"
        )
    return tensor_from_bytes(commit.features)
