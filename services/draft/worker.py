"""The thread that runs a drafter: commits of many streams go in, one `propose` for all of them, answers go out.

The drafter knows a session by stream and name, so that the sessions of two verifiers never mix.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from eyas.draft_protocol import Commit, ResyncRequired, TensorBytes
from eyas.drafters.base import Draft, DraftContext, LocalDrafter
from eyas.errors import InvalidRequest
from eyas.request import SamplingParams
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, Load, SessionTree
from eyas.services.draft.telemetry import DraftTelemetry
from eyas.tensors import tensor_from_bytes
from eyas.tree import DraftTree
from eyas.validation import check_sampling

log = logging.getLogger(__name__)

Deliver = Callable[[DraftResponse | None], None]


class DraftWorker:
    """Runs a drafter: `with DraftWorker(drafter, info) as worker`. Public methods may be called from any thread.

    on_break: called from the worker's thread if the drafter breaks for good; after that, streams are only closed.
    """

    def __init__(
        self,
        drafter: LocalDrafter,
        info: DrafterInfo,
        on_break: Callable[[], object] = bool,
        telemetry: DraftTelemetry | None = None,
    ) -> None:
        self._telemetry = telemetry or DraftTelemetry()
        self._drafter = drafter
        self.info = info
        self._on_break = on_break
        self._numbers = itertools.count()
        self._jobs: list[_Job] = []
        self._wake = threading.Condition()
        self._running = True
        self.broken = False
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._epochs: dict[str, int] = {}  # of every session that the drafter holds, by its qualified name

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        with self._wake:
            self._running = False
            self._wake.notify()
        self._thread.join()

    def load(self) -> Load:
        """The sessions that the drafter holds, and the requests in the queue."""
        return Load(num_running=len(self._epochs), num_waiting=len(self._jobs))

    def open(self, deliver: Deliver) -> DraftStream:
        """A new stream; `deliver` gets one reply for each request with commits, in order, and None at the end."""
        return DraftStream(next(self._numbers), deliver)

    def submit(self, stream: DraftStream, request: DraftRequest) -> None:
        """Queue a request; its releases come before its commits. Raises InvalidRequest if it names a session twice."""
        if len({commit.session for commit in request.commits}) < len(request.commits):
            raise InvalidRequest(f"step {request.step} names a session twice; send one commit per session and step")
        self._queue(_Job(stream, request))

    def close(self, stream: DraftStream) -> None:
        """Release the sessions of a stream, after everything that it has queued."""
        self._queue(_Job(stream, None))

    def _queue(self, job: _Job) -> None:
        with self._wake:
            if self.broken:
                _dismiss([job])
                return
            self._jobs.append(job)
            self._wake.notify()

    # Below: the worker's thread only.

    def _run(self) -> None:
        jobs: list[_Job] = []
        try:
            while jobs := self._next_jobs():
                self._serve(jobs)
        except Exception:
            log.exception("the drafter is broken")
            with self._wake:
                self.broken = True
                _dismiss([*jobs, *self._jobs])
            self._on_break()

    def _serve(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._release(job)
        rows = [row for job in jobs for row in self._usable_rows(job)]
        contexts, drafts, started = [row.context for row in rows], list[Draft](), time.time_ns()
        if contexts:
            drafts = list(self._propose(contexts))
        ended = time.time_ns()
        for job in jobs:
            answers = [pair for pair in zip(rows, drafts, strict=True) if pair[0].job is job]
            _answer(job, answers, (ended - started) / 1e6)
        if contexts:
            self._telemetry.drafted(contexts, drafts, started, ended)
            self._telemetry.answered([time.perf_counter() - job.queued for job in jobs if job.request])

    def _next_jobs(self) -> list[_Job]:
        """The queued jobs up to the first that touches a session again; empty once the worker stops."""
        while not self._jobs and self._running and self._draft_ahead():
            pass
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or not self._running)
            if not self._running:
                return []
            jobs: list[_Job] = []
            touched: set[str] = set()
            for job in self._jobs:
                if touched & job.touched or (job.request is None and jobs):
                    break
                touched |= job.touched
                jobs.append(job)
            del self._jobs[: len(jobs)]
        return jobs

    def _release(self, job: _Job) -> None:
        if job.request is None:
            ended = [name for name in self._epochs if name.startswith(job.stream.qualified(""))]
        else:
            ended = [job.stream.qualified(session) for session in job.request.ended_sessions]
        if known := [name for name in ended if self._epochs.pop(name, None) is not None]:
            self._drafter.release(known)

    def _usable_rows(self, job: _Job) -> Iterator[_Row]:
        """The usable commits of a job. A malformed or outdated commit gets no answer and affects no other."""
        for commit in job.request.commits if job.request else ():
            name = job.stream.qualified(commit.session)
            try:
                context = admit(commit, name, self.info)
            except InvalidRequest as error:
                log.warning("dropped a commit of session %s: %s", name, error, extra={"rate_limited": True})
                continue
            epoch = self._epochs.get(name, commit.epoch)
            if commit.epoch < epoch:
                continue
            if commit.epoch > epoch:
                self._drafter.release([name])
            self._epochs[name] = commit.epoch
            yield _Row(job, commit.session, context)

    def _draft_ahead(self) -> bool:
        try:
            return self._drafter.draft_ahead()
        except Exception:
            log.exception("the drafter failed while drafting ahead; %d sessions start again", len(self._epochs))
            self._drafter.release(list(self._epochs))
            return False

    def _propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        try:
            return self._drafter.propose(contexts)
        except Exception:
            log.exception("the drafter failed; %d sessions get no trees and start again", len(contexts))
            self._drafter.release([context.session for context in contexts])
            return [None] * len(contexts)


@dataclass(frozen=True)
class DraftStream:
    """One verifier's stream. The worker's thread calls `deliver`."""

    number: int
    deliver: Deliver

    def qualified(self, session: str) -> str:
        """The drafter's name for a session of this stream."""
        return f"{self.number}/{session}"


@dataclass(frozen=True)
class _Job:
    """A queued request of a stream; request None ends the stream. queued: time.perf_counter() on arrival."""

    stream: DraftStream
    request: DraftRequest | None
    queued: float = field(default_factory=time.perf_counter)

    @property
    def touched(self) -> set[str]:
        """Qualified names of the sessions that may not be in another job of the same `propose`."""
        if self.request is None:
            return set()
        names = (*self.request.ended_sessions, *(commit.session for commit in self.request.commits))
        return set(map(self.stream.qualified, names))


@dataclass(frozen=True)
class _Row:
    """A usable commit. session: its name on the job's stream; the context has the qualified name."""

    job: _Job
    session: str
    context: DraftContext


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
    for token in (*commit.tokens, *commit.samples):
        if not 0 <= token < info.model.vocab_size:
            raise InvalidRequest(f"token {token} lies outside [0, {info.model.vocab_size})")
    check_sampling(SamplingParams(**vars(commit.noise)))
    features = _features(commit, info) if info.needs_features else None
    return Commit(**{**vars(commit), "session": session, "features": features})


def _features(commit: Commit[TensorBytes], info: DrafterInfo) -> Tensor:
    shape = (commit.committed_length - 1 - max(commit.start_position - 1, 0), info.feature_size)
    if commit.features is None or commit.features.shape != shape:
        given = list(commit.features.shape) if commit.features else "none"
        raise InvalidRequest(
            f"features are {given}; length {commit.start_position} to {commit.committed_length} needs {list(shape)}"
        )
    return tensor_from_bytes(commit.features)


def _dismiss(jobs: Sequence[_Job]) -> None:
    """Close the streams that asked for it; answer nothing else."""
    for job in jobs:
        if job.request is None:
            job.stream.deliver(None)


def _answer(job: _Job, answers: Sequence[tuple[_Row, Draft]], draft_ms: float) -> None:
    """Deliver the trees and resyncs of a job; a request without commits gets no reply."""
    if job.request is None:
        job.stream.deliver(None)
    elif job.request.commits:
        trees = tuple(
            SessionTree(row.session, row.context.epoch, row.context.committed_length, draft)
            for row, draft in answers
            if isinstance(draft, DraftTree) and row.context.budget.wants_tree
        )
        resyncs = tuple(
            ResyncRequired(row.session, row.context.epoch, draft.committed_length)
            for row, draft in answers
            if isinstance(draft, ResyncRequired)
        )
        job.stream.deliver(DraftResponse(job.request.step, trees, resyncs, draft_ms))
