"""The streams of verifiers to a drafter: their queues, batches of what waits in them, and checks of commits."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from eyas.api.request import SamplingParams
from eyas.config import DraftQueueConfig
from eyas.device.transfer import tensor_from_bytes
from eyas.drafters.base import Draft, DraftContext
from eyas.errors import InvalidRequest
from eyas.protocol.commit import Commit, NoiseKey, Refusal, RefusalReason, ResyncRequired, TensorBytes
from eyas.protocol.tree import DraftTree
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, SessionTree

Deliver = Callable[[DraftResponse | None], None]


@dataclass(eq=False)
class DraftStream:
    """One verifier's stream and its queue. The worker's thread calls `deliver`.

    Attributes:
        feature_size: Of the drafter; 0 if it takes no features.
        sessions: Admitted ones that have not ended.
        epochs: By session, of those that the drafter holds.
        num_pending: Sizes of the queued commits, in tokens.
        waiting: Whether the worker has it in its list.
    """

    number: int
    deliver: Deliver
    feature_size: int
    jobs: deque[DraftJob] = field(default_factory=deque)
    sessions: set[str] = field(default_factory=set)
    epochs: dict[str, int] = field(default_factory=dict)
    num_pending: int = 0
    closing: bool = False
    waiting: bool = False

    def qualified(self, session: str) -> str:
        """Return the drafter's name for a session of this stream."""
        return f"{self.number}/{session}"

    def size(self, commit: Commit[TensorBytes]) -> int:
        """Return the tokens that a commit counts for in the queue: at least one, and as many as its samples and features
        would need.
        """
        num_bytes = len(commit.features.data) if commit.features else 0
        return max(len(commit.tokens), len(commit.samples), num_bytes // (4 * max(self.feature_size, 1)), 1)

    def admit(self, request: DraftRequest, limits: DraftQueueConfig, max_model_len: int) -> DraftJob:
        """Return the request as a job of the commits within the limits, and refusals of the others."""
        ended = tuple(name for name in dict.fromkeys(request.ended_sessions) if name in self.sessions)
        self.sessions.difference_update(ended)
        job = DraftJob(self, request.step, ended, request.timeout_s)
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
class DraftJob:
    """A queued request.

    Attributes:
        ended: Sessions to release before its commits.
        queued: time.perf_counter() on arrival.
        timeout_s: How long its trees are of use; 0 without a limit.
        replies: Whether its last commit makes the reply.
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

    def add(self, row: DraftRow, draft: Draft) -> None:
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
class DraftRow:
    """A usable commit. session: its name on the job's stream; the context has the qualified name."""

    job: DraftJob
    session: str
    context: DraftContext


@dataclass
class JobBatch:
    """Next work of the drafter: release sessions, then draft for the taken commits, each session at most once.

    Attributes:
        closed: Streams that end.
        jobs: Those with a taken or stale commit.
        num_stale: Commits whose trees come too late.
        touched: The sessions that each stream has in the batch.
        shares: Its tokens in it.
    """

    taken: list[tuple[DraftJob, Commit[TensorBytes]]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    closed: list[DraftStream] = field(default_factory=list)
    jobs: dict[DraftJob, None] = field(default_factory=dict)
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

    Raises InvalidRequest for lengths, token ids, features or noise that no drafter could use, and for what this one cannot
    do.
    """
    if commit.proposal == "sampled" and not info.can_sample:
        raise InvalidRequest(f"drafter {info.method} cannot sample trees; ask for a deterministic proposal")
    if commit.lookups_alone and not info.has_lookups:
        raise InvalidRequest(f"drafter {info.method} has no lookups next to a network; leave out lookups_alone")
    if commit.start_position < 0 or not commit.tokens:
        raise InvalidRequest(
            f"commit of {len(commit.tokens)} tokens at length {commit.start_position}; send at least one, from 0 on"
        )
    for token in (*commit.tokens, *commit.samples, *(bias.token for bias in commit.logit_biases)):
        if not 0 <= token < info.model.vocab_size:
            raise InvalidRequest(f"token {token} lies outside [0, {info.model.vocab_size})")
    if len(commit.allowed) not in (0, size := -(-info.model.vocab_size // 8)):
        raise InvalidRequest(f"allowed_tokens has {len(commit.allowed)} bytes; send none, or {size} for the vocabulary")
    for bias in commit.logit_biases:
        if math.isnan(bias.bias) or bias.bias == math.inf:
            raise InvalidRequest(f"the bias of token {bias.token} is {bias.bias}; it must be a number, or minus infinity")
    _check_noise(commit.noise)
    features = None
    if info.needs_features and not commit.lookups_alone:
        shape = (commit.committed_length - 1 - max(commit.start_position - 1, 0), info.feature_size)
        if commit.features is None or commit.features.shape != shape:
            given = list(commit.features.shape) if commit.features else "none"
            raise InvalidRequest(
                f"features are {given}; length {commit.start_position} to {commit.committed_length} needs {list(shape)}"
            )
        features = tensor_from_bytes(commit.features)
    return Commit(**{**commit._asdict(), "session": session, "features": features})


@lru_cache(1024)
def _check_noise(noise: NoiseKey) -> None:
    """Raises InvalidRequest for values out of range. All commits of a session have the same."""
    SamplingParams(**vars(noise))
