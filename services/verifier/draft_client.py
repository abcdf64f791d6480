"""The verifier's client of one draft service: commits go out, draft trees come back.

The engine's thread sends and collects; a thread of the connection dials and reads. A lost message needs no repair: the
drafter answers the next commit with a ResyncRequired, and the engine sends again from there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue

import grpc

from eyas.config import DraftClientConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending, PreparedTrees
from eyas.errors import ConfigError, InvalidTree
from eyas.protocol.commit import NO_TREE, Proposal, RefusalReason, ResyncRequired
from eyas.protocol.tree import DraftTree, PreparedTree
from eyas.rpc import convert
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DraftClientStatus, DrafterInfo, DraftRequest, DraftResponse, SessionTree, TargetInfo
from eyas.rpc.status import status_error
from eyas.sampling.acceptance import are_valid_trees
from eyas.services.verifier.breaker import CircuitBreaker
from eyas.services.verifier.commits import split_commits
from eyas.v1 import draft_pb2, draft_pb2_grpc

_DESCRIBE_TIMEOUT_S = 2.0
_RECONNECT_S = 0.1
# A drafter with more unsent messages than this counts as down.
_MAX_UNSENT = 256
# A step waits for missing trees if they are at least this share of its trees, as waiting keeps the drafter from all others.
# It also waits for a session that had no tree in MAX_UNPREPARED steps.
WAITED_SHARE, MAX_UNPREPARED = 0.5, 32
# How long a refused session decodes without drafts. A session never gets shorter.
_REFUSED_S: dict[RefusalReason, float] = {"too_many_sessions": 10.0, "context_too_long": math.inf}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftTiming:
    """Times of one answered request for trees, in seconds. round_trip includes draft, the drafter's own time.

    drafter: its address.
    """

    drafter: str
    round_trip: float
    draft: float


@dataclass
class PendingDrafts:
    """Requests of one engine step to a draft service, and the answers so far.

    Attributes:
        drafts: one answer per context, in order.
        stream: where the commits went; None if nothing was sent.
        awaited: step numbers of the messages that ask for trees and have no reply yet.
        answered_at: when the last reply arrived.
        draft_seconds: how long the drafter worked.
        is_refused: whether the drafter had too much to do for some of the commits.
        released: sessions that have ended since.
        timing: set by `collect` once every tree has arrived.
    """

    contexts: Sequence[DraftContext]
    drafts: list[Draft]
    stream: Stream | None = None
    awaited: set[int] = field(default_factory=set)
    sent_at: float = 0.0
    answered_at: float = 0.0
    draft_seconds: float = 0.0
    is_refused: bool = False
    released: set[str] = field(default_factory=set)
    timing: DraftTiming | None = None

    @property
    def has_answers(self) -> bool:
        """Return whether any context that wants a tree has an answer."""
        answers = zip(self.contexts, self.drafts, strict=True)
        return any(draft is not None for context, draft in answers if context.budget.wants_tree)

    def fill_in(self, reply: DraftResponse) -> None:
        """Put the answers of a reply where their contexts stand; answers to other commits are dropped.

        The engine validates the trees, as it does for every drafter.
        """
        rows = {context.session: i for i, context in enumerate(self.contexts) if context.budget.wants_tree}
        answers: list[SessionTree | ResyncRequired] = [*reply.trees, *reply.resyncs]
        for answer in answers:
            row = rows.get(answer.session)
            if row is None or self.drafts[row] is not None or answer.epoch != self.contexts[row].epoch:
                continue
            if isinstance(answer, ResyncRequired):
                self.drafts[row] = answer
            elif answer.committed_length == self.contexts[row].committed_length:
                self.drafts[row] = answer.tree


class RemoteDrafter:
    """Drafter by one draft service. A drafter that does not fit what the verifier offers stays unused.

    A thread keeps a stream open: it dials, reads, and dials again after every failure.

    Args:
        needs: what contexts will carry.
        proposal: the most that contexts will ask for.
        target: what the drafter must fit; None takes the service's only drafter.
        peers: how to dial.

    Attributes:
        method: of the newest stream; empty before the first.
        num_answered, num_lost: requests for trees so far.
        num_drafted, num_accepted: tokens, counted by who verifies them.
    """

    def __init__(
        self,
        address: str,
        needs: DrafterNeeds,
        config: DraftClientConfig,
        proposal: Proposal = "deterministic",
        target: TargetInfo | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.address = address
        self.needs = needs
        self.can_sample = proposal == "sampled"
        self.breaker = CircuitBreaker(config.breaker_max_failures, config.breaker_reset_s)
        self.config = config
        self._target = target
        self._steps = count(1)
        self._changed = threading.Condition()
        self._pending: PendingDrafts | None = None
        self.prepared, self._num_missed = PreparedTrees(), dict[str, int]()  # the latter: a session's steps without a tree
        self._refused: dict[str, float] = {}  # by session: when it may ask again, by time.monotonic(); `_changed` guards it
        self.num_answered = self.num_lost = self.num_drafted = self.num_accepted = 0
        self._stream: Stream | None = None
        self.method = ""  # this and what follows are facts of the drafter that was connected last
        self.needs_samples = self.has_lookups = False
        self._peers = peers or Peers()
        self._identity = self._peers.identity
        self._channel = self._peers.open_sync_channel(address)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"drafter {address}", daemon=True).start()

    @property
    def connected(self) -> bool:
        """Return whether the stream is open."""
        return self._stream is not None

    def status(self, num_sessions: int) -> DraftClientStatus:
        """Return what the verifier announces of this connection. num_sessions: those that are assigned to it."""
        counts = num_sessions, self.num_answered, self.num_lost, self.num_drafted, self.num_accepted
        return DraftClientStatus(self.address, self.method, self.connected, self.breaker.state, *counts)

    def can_draft(self, session: str) -> bool:
        """Return whether the stream is open, the circuit breaker is not backing off, and the session is not refused."""
        with self._changed:
            refused_until = self._refused.get(session, 0.0)
        return self._stream is not None and not self.breaker.backing_off and refused_until <= time.monotonic()

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """See Drafter."""
        return partial(self.collect, self.send(contexts))

    def send(self, contexts: Sequence[DraftContext]) -> PendingDrafts:
        """Send the commits of one step without waiting. Collect the result before the next `send`.

        A commit that wants no tree is answered once it is sent: if it gets lost, the next one is answered with a resync.
        """
        pending = PendingDrafts(contexts, [None] * len(contexts))
        stream, wants_trees = self._stream, any(context.budget.wants_tree for context in contexts)
        if stream is None or stream.outbox.qsize() > _MAX_UNSENT or not self.breaker.admits(wants_trees):
            return pending
        if not stream.info.has_lookups and any(context.lookups_alone for context in contexts):  # it has just been replaced
            return pending
        pending.stream, pending.sent_at = stream, time.perf_counter()
        contexts = self._use_prepared(contexts, pending)
        if not stream.info.needs_features:
            contexts = [context._replace(features=None) for context in contexts]
        if not stream.info.needs_samples:
            contexts = [context._replace(samples=()) for context in contexts]
        messages = split_commits(contexts, self.config.max_message_tokens)
        timeout_s = self.config.draft_timeout_s
        requests = [DraftRequest(next(self._steps), tuple(commits), timeout_s=timeout_s) for commits in messages]
        pending.awaited = {r.step for r in requests if any(c.budget.wants_tree and not c.has_tree for c in r.commits)}
        with self._changed:
            self._pending = pending
        for request in requests:
            stream.send(request)
        return pending

    def _use_prepared(self, contexts: Sequence[DraftContext], pending: PendingDrafts) -> list[DraftContext]:
        """Answer commits that want no tree, those whose tree is prepared, and those that the step does not wait for.

        Returns the contexts to send. A commit that is not waited for says that it has a tree, within a budget of a root.
        """
        sent = list(contexts)
        with self._changed:
            for i, context in enumerate(contexts):
                self._num_missed.setdefault(context.session, 0)
                if not context.budget.wants_tree:
                    pending.drafts[i] = DraftTree.root_only(context.tokens[-1])
                elif tree := self.prepared.take(context):
                    pending.drafts[i], sent[i] = tree, context._replace(has_tree=True)
                    self._num_missed[context.session] = 0
            wanting = [i for i, context in enumerate(contexts) if context.budget.wants_tree]
            missing = [i for i in wanting if pending.drafts[i] is None]
            waits = len(missing) >= WAITED_SHARE * len(wanting)
            for i in missing:
                if contexts[i].proposal == "sampled":  # always waited for: under rejection sampling the text depends on it
                    continue
                session = contexts[i].session
                self._num_missed[session] = 0 if waits else (self._num_missed[session] + 1) % MAX_UNPREPARED
                if self._num_missed[session]:
                    pending.drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
                    sent[i] = contexts[i]._replace(has_tree=True, budget=NO_TREE)
        return sent

    def collect(self, pending: PendingDrafts, deadline: float | None = None) -> list[Draft]:
        """Wait for the answers until `deadline` of time.monotonic(), by default draft_timeout_s from now.

        Answers that did not arrive are None.
        """
        if pending.stream is None:
            return pending.drafts
        with self._changed:
            timeout = self.config.draft_timeout_s if deadline is None else max(deadline - time.monotonic(), 0)
            self._changed.wait_for(lambda: not pending.awaited or self._stream is not pending.stream, timeout)
            self._pending = None
        if pending.awaited or (pending.is_refused and not pending.has_answers):
            self.num_lost += 1
            self.breaker.failed()
        elif pending.answered_at:
            self.num_answered += 1
            self.breaker.succeeded()
            pending.timing = DraftTiming(self.address, pending.answered_at - pending.sent_at, pending.draft_seconds)
        return pending.drafts

    def release(self, sessions: Sequence[str]) -> None:
        """Let the drafter drop sessions. May be called from any thread."""
        with self._changed:
            self.prepared.drop(sessions)
            for session in sessions:
                self._refused.pop(session, None)
                self._num_missed.pop(session, None)
            if self._pending is not None:
                self._pending.released.update(sessions)
        if stream := self._stream:
            stream.send(DraftRequest(next(self._steps), ended_sessions=tuple(sessions)))

    def reject(self, sessions: Sequence[str]) -> None:
        """Count the last answered request as failed: some of its answers are invalid."""
        self.breaker.rejected()

    def close(self) -> None:
        """End the stream for good; every later answer is None."""
        self._closed.set()
        self._channel.close()

    # Below: the connection's thread only.

    def _run(self) -> None:
        last_problem = ""
        while not self._closed.is_set():
            try:
                self._renew_channel()
                stub = draft_pb2_grpc.DraftStub(self._channel)
                info = self._describe(stub)
                last_problem = ""
                self._read_replies(stub, info)
            except (grpc.RpcError, ConfigError) as raised:
                error = raised if isinstance(raised, ConfigError) else status_error(raised)
                problem = type(error).__name__
                if problem != last_problem and not self._closed.is_set():
                    log.warning("no drafts from %s for now: %s", self.address, error, extra={"rate_limited": True})
                last_problem = problem
            except Exception:
                if not self._closed.is_set():  # gRPC raises ValueError for a call on a closed channel
                    log.exception("the connection to %s failed; trying again", self.address, extra={"rate_limited": True})
            self._closed.wait(_RECONNECT_S)

    def _renew_channel(self) -> None:
        """Open another channel if the certificates of the present one have been replaced."""
        if self._identity is self._peers.identity:
            return
        self._channel.close()
        self._identity, self._channel = self._peers.identity, self._peers.open_sync_channel(self.address)
        if self._closed.is_set():
            self._channel.close()

    def _describe(self, stub: draft_pb2_grpc.DraftStub) -> DrafterInfo:
        """Return the drafter there. Raises ConfigError if it does not fit this verifier."""
        target = self._target
        request = draft_pb2.DescribeRequest(target=convert.target_info_to_proto(target) if target else None)
        info = convert.drafter_info_from_proto(
            stub.Describe(request, _DESCRIBE_TIMEOUT_S, self._peers.metadata, wait_for_ready=True)
        )
        if target and not target.is_drafted_by(info.model):
            raise ConfigError(f"drafter {info.method} is for {info.model}, which is not {target}")
        missing = DrafterNeeds(
            info.needs_features and not self.needs.features, info.needs_samples and not self.needs.samples
        )
        if missing.features or missing.samples:
            raise ConfigError(f"drafter {info.method} needs what this verifier does not collect: {missing}")
        if self.can_sample and not info.can_sample:
            raise ConfigError(
                f"drafter {info.method} cannot sample trees from its own distribution, which engine.acceptance "
                "rejection needs; use another method, or acceptance match"
            )
        return info

    def _read_replies(self, stub: draft_pb2_grpc.DraftStub, info: DrafterInfo) -> None:
        """Open the stream and hand over its replies until it ends."""
        stream = Stream(info)
        stream.send(DraftRequest(0, target=self._target))
        call = stub.Speculate(iter(stream.outbox.get, None), metadata=self._peers.metadata)
        log.info("drafts come from %s (%s)", self.address, info.method, extra={"rate_limited": True})
        self.method = info.method
        self.needs_samples = info.needs_samples
        self.has_lookups = info.has_lookups
        self._stream = stream
        with self._changed:
            self._refused.clear()
        try:
            for message in call:
                self.receive(convert.draft_response_from_proto(message))
        finally:
            stream.outbox.put(None)
            with self._changed:
                self._stream = None
                self.prepared.drop(self._num_missed)
                self._changed.notify()

    def receive(self, reply: DraftResponse) -> None:
        """Take the reply of a step that `collect` still waits for; drop late and duplicate ones, except for refusals.

        A reply counts as one failure of the drafter if any of its prepared trees is invalid. The others are kept.
        """
        prepared = [each for each in reply.prepared if self._is_valid(each)]
        with self._changed:
            if len(prepared) < len(reply.prepared):
                self.breaker.failed()
            for each in prepared:
                if each.session in self._num_missed:
                    self.prepared.put(each)
            pending = self._pending
            if pending is None:
                return
            if reply.refusals:
                self._note_refusals(pending, reply)
            if reply.step not in pending.awaited:
                return
            pending.fill_in(reply)
            pending.draft_seconds = max(pending.draft_seconds, reply.draft_ms / 1000)
            pending.answered_at = time.perf_counter()
            pending.awaited.discard(reply.step)
            self._changed.notify()

    def _is_valid(self, prepared: PreparedTree) -> bool:
        """Return whether a prepared tree may be kept."""
        stream = self._stream
        assert stream is not None, "replies come from an open stream"
        root, most, vocab_size = int(prepared.tree.alone.tokens[0]), PreparedTree.MAX_NODES, stream.info.model.vocab_size
        if are_valid_trees([prepared.tree], [(root, most, most)], vocab_size):
            return True
        try:
            prepared.tree.validate(root, vocab_size, most, most)
        except InvalidTree as error:
            log.warning("dropped a prepared tree for %s: %s", prepared.session, error, extra={"rate_limited": True})
            return False
        return True

    def _note_refusals(self, pending: PendingDrafts, reply: DraftResponse) -> None:
        known = {context.session for context in pending.contexts} - pending.released
        for refusal in reply.refusals:
            if refusal.reason == "overloaded":
                pending.is_refused = True
            elif refusal.session in known:
                self._refused[refusal.session] = time.monotonic() + _REFUSED_S[refusal.reason]
        reason = reply.refusals[0].reason
        message = "drafter %s refused %d sessions, which decode plainly: %s"
        log.warning(message, self.address, len(reply.refusals), reason, extra={"rate_limited": True})


@dataclass(frozen=True, eq=False)
class Stream:
    """One open stream to a drafter. Messages sent after it broke are lost."""

    info: DrafterInfo
    outbox: SimpleQueue[draft_pb2.SpeculateRequest | None] = field(default_factory=SimpleQueue)

    def send(self, request: DraftRequest) -> None:
        """Queue a request. May be called from any thread."""
        self.outbox.put(convert.draft_request_to_proto(request))
