"""Cuts a round of commits into messages of bounded size: contexts in, lists of wire commits out. Knows no gRPC.

How long drafting rounds take: seconds in, a summary out.

Keeps one stream to a draft service open: requests in, replies out, reopened by itself when it breaks.

Knows no rounds. A thread of its own reads; whoever sends never blocks.

One draft service as a Drafter: contexts in, its trees out, or None for what did not come in time. Never raises.

The engine's thread sends and collects; the link's thread delivers. A lost round is harmless: the drafter refuses what
does not continue its state, and the engine resends from what the refusal says.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import SimpleQueue

import grpc
import torch
from pybreaker import STATE_OPEN, CircuitBreaker, CircuitBreakerError

from eyas.config import DraftClientConfig
from eyas.draft_protocol import Commit, Proposal, ResyncRequired, TensorBytes, TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending
from eyas.errors import ConfigError, EyasError
from eyas.request import VerifyStep as VerifyRound
from eyas.rpc import convert
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DrafterInfo, DraftRequest, DraftResponse, SessionTree, TargetInfo
from eyas.rpc.server import status_error
from eyas.tensors import tensor_to_bytes
from eyas.tree import DraftTree
from eyas.v1 import draft_pb2, draft_pb2_grpc

_BOOKKEEPING = TreeBudget(max_nodes=1, max_depth=0)


def pack(contexts: Sequence[DraftContext], max_tokens: int) -> list[list[Commit[TensorBytes]]]:
    """Messages to send in order. Each holds at most `max_tokens` new tokens, and a session at most once.

    A longer commit is cut; only its last piece keeps the budget, the samples and the trace.
    """
    messages: list[list[Commit[TensorBytes]]] = []
    room: list[int] = []
    for context in _on_host(contexts):
        earliest = 0
        for piece in _pieces(context, max_tokens):
            size = len(piece.tokens)
            index = next((i for i in range(earliest, len(room)) if room[i] >= size), len(room))
            if index == len(room):
                messages.append([])
                room.append(max_tokens)
            messages[index].append(piece)
            room[index] -= size
            earliest = index + 1
    return messages


def _on_host(contexts: Sequence[DraftContext]) -> list[DraftContext]:
    """The same with their features on the host, all in one copy."""
    features = [context.features for context in contexts if context.features is not None]
    if not features:
        return list(contexts)
    parts = iter(torch.split(torch.cat(features).cpu(), [len(part) for part in features]))
    return [context if context.features is None else replace(context, features=next(parts)) for context in contexts]


def _pieces(context: DraftContext, max_tokens: int) -> Iterator[Commit[TensorBytes]]:
    """A cut at token i leaves the features before it to the left: those of the positions up to the left root's."""
    origin = max(context.start_position - 1, 0)
    for start in range(0, len(context.tokens), max_tokens):
        tokens = context.tokens[start : start + max_tokens]
        base, last = context.start_position + start, start + max_tokens >= len(context.tokens)
        features = None
        if context.features is not None:
            rows = context.features[max(base - 1, 0) - origin : base + len(tokens) - 1 - origin]
            features = tensor_to_bytes(rows)
        yield Commit(
            session=context.session,
            epoch=context.epoch,
            start_position=base,
            tokens=tokens,
            features=features,
            noise=context.noise,
            budget=context.budget if last else _BOOKKEEPING,
            samples=context.samples if last else (),
            proposal=context.proposal,
            traceparent=context.traceparent if last else "",
        )


WINDOW = 1024
CIRCUITS = ("closed", "half-open", "open")


@dataclass(frozen=True)
class RoundTimes:
    """One session's part of a drafting round, in seconds. round_trip: there and back, with `draft` in between."""

    drafter: str
    round_trip: float
    draft: float


@dataclass(frozen=True)
class DraftClientState:
    """One link now, and its counts since its start. circuit: one of CIRCUITS."""

    address: str
    up: bool
    circuit: str
    num_sessions: int
    num_answered: int
    num_lost: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class DraftClientStats:
    """The answered rounds of one link over its last WINDOW ones, in seconds; lost ones are counted since its start."""

    address: str
    num_answered: int
    num_lost: int
    mean: float
    p50: float
    p99: float


class RoundTrips:
    """Round trips of one link, there and back with the drafting in between."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.num_answered = 0
        self.num_lost = 0

    def answered(self, seconds: float) -> None:
        """Count a round whose answers came in time."""
        self._recent.append(seconds)
        self.num_answered += 1

    def lost(self) -> None:
        """Count a round whose answers came late or never."""
        self.num_lost += 1

    def summary(self, address: str) -> DraftClientStats:
        """All zeros before the first answer. May be called from any thread."""
        recent = sorted(self._recent.copy()) or [0.0]
        mean = sum(recent) / len(recent)
        return DraftClientStats(
            address, self.num_answered, self.num_lost, mean, _quantile(recent, 0.5), _quantile(recent, 0.99)
        )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 2.0
_RETRY_SECONDS = 0.1
# A peer that is further behind in taking messages is as good as down.
_MAX_UNSENT = 256


@dataclass(frozen=True, eq=False)
class Stream:
    """One open stream. What is sent on a stream that has broken meanwhile is lost."""

    info: DrafterInfo
    outbox: SimpleQueue[draft_pb2.SpeculateRequest | None] = field(default_factory=SimpleQueue)

    def send(self, request: DraftRequest) -> None:
        """Queue a request. May be called from any thread."""
        self.outbox.put(convert.draft_request_to_proto(request))

    @property
    def congested(self) -> bool:
        return self.outbox.qsize() > _MAX_UNSENT


class DraftConnection:
    """The stream to one address. `deliver` and `broken` are called from the link's thread.

    verified: what the drafter must fit; None takes whichever is there, if there is only one.
    """

    def __init__(
        self,
        address: str,
        needs: DrafterNeeds,
        proposal: Proposal,
        verified: TargetInfo | None,
        peers: Peers,
        deliver: Callable[[DraftResponse], None],
        broken: Callable[[], None],
    ) -> None:
        self.stream: Stream | None = None
        self._address = address
        self._needs = needs
        self._proposal = proposal
        self._verified = verified
        self._deliver = deliver
        self._broken = broken
        self._peers = peers
        self._identity = peers.identity
        self._channel = peers.open_sync_channel(address)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"link {address}", daemon=True).start()

    def close(self) -> None:
        """End the stream for good."""
        self._closed.set()
        self._channel.close()

    # Below: the link's own thread only.

    def _run(self) -> None:
        last_problem = ""
        while not self._closed.is_set():
            try:
                self._renew()
                last_problem = self._attempt(draft_pb2_grpc.DraftStub(self._channel), last_problem)
            except Exception:
                if not self._closed.is_set():  # grpc refuses calls on a channel that was closed with a ValueError
                    log.exception("the link to %s failed; trying again", self._address)
            self._closed.wait(_RETRY_SECONDS)

    def _renew(self) -> None:
        """Dial anew once what the channel was opened with has been replaced."""
        if self._identity is self._peers.identity:
            return
        self._channel.close()
        self._identity, self._channel = self._peers.identity, self._peers.open_sync_channel(self._address)
        if self._closed.is_set():
            self._channel.close()

    def _attempt(self, stub: draft_pb2_grpc.DraftStub, last_problem: str) -> str:
        """Talk until the stream breaks; gives back what was wrong."""
        try:
            info = self._describe(stub)
            last_problem = ""
            self._converse(stub, info)
        except grpc.RpcError as error:
            return self._report(status_error(error), last_problem)
        except ConfigError as error:
            return self._report(error, last_problem)
        return last_problem

    def _report(self, error: EyasError, last_problem: str) -> str:
        """Log a problem unless it is the same as before; gives back what to compare the next one with."""
        problem = type(error).__name__
        if problem != last_problem and not self._closed.is_set():
            log.warning("no drafts from %s for now: %s", self._address, error)
        return problem

    def _describe(self, stub: draft_pb2_grpc.DraftStub) -> DrafterInfo:
        verified = self._verified
        request = draft_pb2.DescribeRequest(target=convert.target_info_to_proto(verified) if verified else None)
        info = convert.drafter_info_from_proto(stub.Describe(request, timeout=_DESCRIBE_SECONDS, wait_for_ready=True))
        if verified and not verified.is_drafted_by(info.model):
            raise ConfigError(f"drafter {info.method} is for {info.model}, which is not {verified}")
        lacking = DrafterNeeds(
            info.needs_features and not self._needs.features, info.needs_samples and not self._needs.samples
        )
        if lacking.features or lacking.samples:
            raise ConfigError(f"drafter {info.method} needs what this verifier does not collect: {lacking}")
        if self._proposal == "sampled" and not info.can_sample:
            raise ConfigError(
                f"drafter {info.method} cannot draw trees from its own law, as engine.acceptance rejection needs"
            )
        return info

    def _converse(self, stub: draft_pb2_grpc.DraftStub, info: DrafterInfo) -> None:
        stream = Stream(info)
        stream.send(DraftRequest(0, target=self._verified))
        call = stub.Speculate(iter(stream.outbox.get, None))
        log.info("drafts come from %s (%s)", self._address, info.method)
        self.stream = stream
        try:
            for message in call:
                self._deliver(convert.draft_response_from_proto(message))
        finally:
            self.stream = None
            stream.outbox.put(None)
            self._broken()


@dataclass
class PendingRound:
    """What was sent in one step of the engine and what has come back. stream is None where nothing was sent.

    steps: messages with a tree to come. drafts: the answers so far, in the order of the contexts.
    answered_at: when the last of them came. seconds: how long all answers took; None before, and where some were lost.
    draft_seconds: of it, how long was drafted.
    """

    contexts: Sequence[DraftContext]
    drafts: list[Draft]
    stream: Stream | None = None
    steps: set[int] = field(default_factory=set)
    replies: list[DraftResponse] = field(default_factory=list)
    guard: ExitStack = field(default_factory=ExitStack)
    sent_at: float = 0.0
    answered_at: float | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0


# A drafter that goes on failing is tried again after this many seconds at the latest, unless its `reset` is longer.
MAX_REST = 10.0


class _LostRound(Exception):
    """Tells the circuit breaker of answers that did not come in time."""


class RemoteDrafter:
    """A link to one draft service. `needs` is what contexts will carry, `proposal` the most that they will ask for; a
    drafter that needs more or can do less stays unused. verified: see DraftConnection. peers: how it is dialled."""

    def __init__(
        self,
        address: str,
        needs: DrafterNeeds,
        config: DraftClientConfig,
        proposal: Proposal = "deterministic",
        verified: TargetInfo | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.address = address
        self.needs = needs
        self.can_sample = proposal == "sampled"
        self._config = config
        self._breaker = CircuitBreaker(config.breaker_max_failures, config.breaker_reset_s, throw_new_error_on_trip=False)
        self._trips = RoundTrips()
        self._steps = count(1)
        self._changed = threading.Condition()
        self._round: PendingRound | None = None
        self._rest = config.breaker_reset_s
        self._resting_until = 0.0
        self._num_drafted = 0
        self._num_accepted = 0
        self._link = DraftConnection(address, needs, proposal, verified, peers or Peers(), self._deliver, self._wake)

    @property
    def up(self) -> bool:
        """Whether the stream is open."""
        return self._link.stream is not None

    @property
    def stats(self) -> DraftClientStats:
        """Round trips so far."""
        return self._trips.summary(self.address)

    def state(self, num_sessions: int) -> DraftClientState:
        """The link now. num_sessions: how many it drafts for."""
        return DraftClientState(
            self.address,
            self.up,
            self._breaker.current_state,
            num_sessions,
            self._trips.num_answered,
            self._trips.num_lost,
            self._num_drafted,
            self._num_accepted,
        )

    def verified(self, round_: VerifyRound) -> None:
        """Count what became of one of its trees."""
        self._num_drafted += round_.drafted
        self._num_accepted += round_.accepted

    @property
    def resting(self) -> bool:
        """Whether the drafter was given up a moment ago."""
        return time.monotonic() < self._resting_until

    def can_draft(self, session: str) -> bool:
        """Whether the stream is open and the drafter not given up; the same for every session."""
        return self.up and not self.resting

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """Send now; the answers are waited for when they are collected, up to the configured deadline."""
        return partial(self._answers, self.send(contexts))

    def _answers(self, round_: PendingRound) -> list[Draft]:
        return self.collect(round_, time.monotonic() + self._config.draft_timeout_s)

    def send(self, contexts: Sequence[DraftContext]) -> PendingRound:
        """Send the commits of one step without waiting; hand the Round to `collect` before the next `send`.

        Commits that want no tree count as answered once sent: if they get lost, the next one is refused.
        """
        round_ = PendingRound(contexts, [None] * len(contexts))
        stream, wanted = self._link.stream, any(context.budget.wants_tree for context in contexts)
        if stream is None or stream.congested or not self._admitted(round_, wanted):
            return round_
        round_.stream, round_.sent_at = stream, time.perf_counter()
        for i, context in enumerate(contexts):
            if not context.budget.wants_tree:
                round_.drafts[i] = DraftTree.root_only(context.tokens[-1])
        if not stream.info.needs_features:
            contexts = [replace(context, features=None) for context in contexts]
        if not stream.info.needs_samples:
            contexts = [replace(context, samples=()) for context in contexts]
        requests = [DraftRequest(next(self._steps), tuple(c)) for c in pack(contexts, self._config.max_message_tokens)]
        round_.steps = {r.step for r in requests if any(commit.budget.wants_tree for commit in r.commits)}
        with self._changed:
            self._round = round_
        for request in requests:
            stream.send(request)
        return round_

    def collect(self, round_: PendingRound, deadline: float) -> list[Draft]:
        """The answers that arrive before `deadline` (of time.monotonic), None for the others."""
        if round_.stream is None:
            return round_.drafts
        try:
            with round_.guard:
                self._wait(round_, deadline)
        except _LostRound:
            self._trips.lost()
            if self._breaker.current_state == STATE_OPEN:
                self._give_up()
        with self._changed:
            self._round = None
        _sort_in(round_)
        return round_.drafts

    def release(self, sessions: Sequence[str]) -> None:
        """Let the drafter forget sessions. May be called from any thread."""
        if stream := self._link.stream:
            stream.send(DraftRequest(next(self._steps), ended_sessions=tuple(sessions)))

    def close(self) -> None:
        """End the stream; every later round is answered with None."""
        self._link.close()

    def _admitted(self, round_: PendingRound, wanted: bool) -> bool:
        """Whether the circuit breaker lets a round through; only rounds with a tree to wait for may test a bad link."""
        if not wanted:
            return self._breaker.current_state != STATE_OPEN
        try:
            round_.guard.enter_context(self._breaker.calling())
        except CircuitBreakerError:
            return False
        return True

    def _give_up(self) -> None:
        """Leave the drafter alone, twice as long as the last time if no round has been answered since."""
        self._breaker.reset_timeout = self._rest
        self._resting_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, max(MAX_REST, self._config.breaker_reset_s))

    def _wait(self, round_: PendingRound, deadline: float) -> None:
        with self._changed:
            timeout = max(deadline - time.monotonic(), 0)
            self._changed.wait_for(lambda: not round_.steps or self._link.stream is not round_.stream, timeout)
            if round_.steps:
                raise _LostRound
        if round_.answered_at is None:  # no tree was asked for
            return
        round_.seconds = round_.answered_at - round_.sent_at
        round_.draft_seconds = max(reply.draft_ms for reply in round_.replies) / 1000
        self._trips.answered(round_.seconds)
        self._rest = self._config.breaker_reset_s

    # Below: the link's thread only.

    def _deliver(self, reply: DraftResponse) -> None:
        with self._changed:
            if self._round is not None and reply.step in self._round.steps:
                self._round.replies.append(reply)
                self._round.steps.discard(reply.step)
                if not self._round.steps:
                    self._round.answered_at = time.perf_counter()
                self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()


def _sort_in(round_: PendingRound) -> None:
    """Put replies where their contexts stand; stale, duplicate and unknown ones are dropped.

    Whether a tree is well-formed is for the engine to judge, as with any drafter.
    """
    indices = {context.session: i for i, context in enumerate(round_.contexts) if context.budget.wants_tree}
    for reply in round_.replies:
        answers: list[SessionTree | ResyncRequired] = [*reply.trees, *reply.resyncs]
        for answer in answers:
            index = indices.get(answer.session)
            if index is not None and round_.drafts[index] is None and answer.epoch == round_.contexts[index].epoch:
                round_.drafts[index] = _draft(answer, round_.contexts[index])


def _draft(answer: SessionTree | ResyncRequired, context: DraftContext) -> Draft:
    if isinstance(answer, ResyncRequired):
        return answer
    return answer.tree if answer.committed_length == context.committed_length else None
