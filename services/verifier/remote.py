"""One draft service as a Drafter: contexts in, its trees out, or None for what did not come in time. Never raises.

The engine's thread sends and collects; the link's thread delivers. A lost round is harmless: the drafter refuses what
does not continue its state, and the engine resends from what the refusal says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from pybreaker import STATE_OPEN, CircuitBreaker, CircuitBreakerError

from eyas.commit import Proposal, Refusal
from eyas.config import DraftLinkConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending
from eyas.request import Round as VerifyRound
from eyas.rpc.messages import DraftReply, DraftRequest, SessionTree, Verified
from eyas.rpc.peers import Peers
from eyas.tree import DraftTree
from services.verifier.link import DraftLink, Stream
from services.verifier.packing import pack
from services.verifier.timing import LinkState, LinkStats, RoundTrips


@dataclass
class Round:
    """What was sent in one step of the engine and what has come back. stream is None where nothing was sent.

    steps: messages with a tree to come. drafts: the answers so far, in the order of the contexts.
    answered_at: when the last of them came. seconds: how long all answers took; None before, and where some were lost.
    draft_seconds: of it, how long was drafted.
    """

    contexts: Sequence[DraftContext]
    drafts: list[Draft]
    stream: Stream | None = None
    steps: set[int] = field(default_factory=set)
    replies: list[DraftReply] = field(default_factory=list)
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
    drafter that needs more or can do less stays unused. verified: see DraftLink. peers: how it is dialled."""

    def __init__(
        self,
        address: str,
        needs: DrafterNeeds,
        config: DraftLinkConfig,
        proposal: Proposal = "deterministic",
        verified: Verified | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.address = address
        self.needs = needs
        self.can_sample = proposal == "sampled"
        self._config = config
        self._breaker = CircuitBreaker(config.max_failures, config.reset, throw_new_error_on_trip=False)
        self._trips = RoundTrips()
        self._steps = count(1)
        self._changed = threading.Condition()
        self._round: Round | None = None
        self._rest = config.reset
        self._resting_until = 0.0
        self._num_drafted = 0
        self._num_accepted = 0
        self._link = DraftLink(address, needs, proposal, verified, peers or Peers(), self._deliver, self._wake)

    @property
    def up(self) -> bool:
        """Whether the stream is open."""
        return self._link.stream is not None

    @property
    def stats(self) -> LinkStats:
        """Round trips so far."""
        return self._trips.summary(self.address)

    def state(self, num_sessions: int) -> LinkState:
        """The link now. num_sessions: how many it drafts for."""
        return LinkState(
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

    def listens(self, session: str) -> bool:
        """Whether the stream is open and the drafter not given up; the same for every session."""
        return self.up and not self.resting

    def ask(self, contexts: Sequence[DraftContext]) -> Pending:
        """Send now; the answers are waited for when they are collected, up to the configured deadline."""
        return partial(self._answers, self.send(contexts))

    def _answers(self, round_: Round) -> list[Draft]:
        return self.collect(round_, time.monotonic() + self._config.deadline)

    def send(self, contexts: Sequence[DraftContext]) -> Round:
        """Send the commits of one step without waiting; hand the Round to `collect` before the next `send`.

        Commits that want no tree count as answered once sent: if they get lost, the next one is refused.
        """
        round_ = Round(contexts, [None] * len(contexts))
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
        requests = [DraftRequest(next(self._steps), tuple(c)) for c in pack(contexts, self._config.chunk_tokens)]
        round_.steps = {r.step for r in requests if any(commit.budget.wants_tree for commit in r.commits)}
        with self._changed:
            self._round = round_
        for request in requests:
            stream.send(request)
        return round_

    def collect(self, round_: Round, deadline: float) -> list[Draft]:
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
            stream.send(DraftRequest(next(self._steps), released=tuple(sessions)))

    def close(self) -> None:
        """End the stream; every later round is answered with None."""
        self._link.close()

    def _admitted(self, round_: Round, wanted: bool) -> bool:
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
        self._rest = min(2 * self._rest, max(MAX_REST, self._config.reset))

    def _wait(self, round_: Round, deadline: float) -> None:
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
        self._rest = self._config.reset

    # Below: the link's thread only.

    def _deliver(self, reply: DraftReply) -> None:
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


def _sort_in(round_: Round) -> None:
    """Put replies where their contexts stand; stale, duplicate and unknown ones are dropped.

    Whether a tree is well-formed is for the engine to judge, as with any drafter.
    """
    indices = {context.session: i for i, context in enumerate(round_.contexts) if context.budget.wants_tree}
    for reply in round_.replies:
        answers: list[SessionTree | Refusal] = [*reply.trees, *reply.refusals]
        for answer in answers:
            index = indices.get(answer.session)
            if index is not None and round_.drafts[index] is None and answer.epoch == round_.contexts[index].epoch:
                round_.drafts[index] = _draft(answer, round_.contexts[index])


def _draft(answer: SessionTree | Refusal, context: DraftContext) -> Draft:
    if isinstance(answer, Refusal):
        return answer
    return answer.tree if answer.committed == context.committed else None
