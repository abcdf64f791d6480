"""The drafters of one verifier as one Drafter: each session is assigned to one draft service."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from eyas.api.request import VerifyStep
from eyas.config import DraftClientConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending
from eyas.protocol.commit import Proposal
from eyas.rpc.channel import Peers
from eyas.rpc.messages import DraftClientStatus, TargetInfo
from eyas.services.verifier.draft_client import DraftTiming, PendingDrafts, RemoteDrafter

log = logging.getLogger(__name__)


@dataclass
class _Assignment:
    """A session's drafter; None until there is one. is_known: the drafter may hold the session, so it must be released."""

    drafter: RemoteDrafter | None
    is_known: bool = False


@dataclass
class _History:
    """A session's last request for trees: the drafter, and how long it took; no timing if an answer was missing."""

    drafter: RemoteDrafter | None = None
    timing: DraftTiming | None = None


class DraftPool:
    """Drafter over many RemoteDrafters. A session without a drafter gets None and decodes plainly.

    A session's life: `assign`; then `request` and `release` by the engine, if it takes the session; and `unassign`, before
    or after `release`. `request` belongs to the engine's thread; the other methods may be called from any thread.

    Args:
        needs, proposal, target, peers: see RemoteDrafter.
    """

    def __init__(
        self,
        config: DraftClientConfig,
        needs: DrafterNeeds,
        proposal: Proposal = "deterministic",
        target: TargetInfo | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._needs, self._without_samples = needs, replace(needs, samples=False)
        self.can_sample = proposal == "sampled"
        self.timeout_s = config.draft_timeout_s
        self._connect = partial(RemoteDrafter, needs=needs, config=config, proposal=proposal, target=target, peers=peers)
        self._lock = threading.Lock()
        self._drafters: dict[str, RemoteDrafter] = {}
        self._assignments: dict[str, _Assignment] = {}
        self._histories: dict[str, _History] = {}
        self._traceparent: Callable[[str], str] | None = None

    @property
    def needs(self) -> DrafterNeeds:
        """See Drafter. Samples are needed only while a connected drafter needs them: trees with them stay whole."""
        is_needed = any(drafter.needs_samples for drafter in list(self._drafters.values()))
        return self._needs if is_needed else self._without_samples

    @property
    def has_lookups(self) -> bool:
        """See Drafter; true while all connected drafters have some."""
        connected = [drafter for drafter in list(self._drafters.values()) if drafter.connected]
        return bool(connected) and all(drafter.has_lookups for drafter in connected)

    def assign(self, session: str, address: str) -> None:
        """Let the drafter at host:port draft for a session; dials it if it is new.

        With an empty address the session waits for `rebalance` to find it a drafter.
        """
        with self._lock:
            self._assignments[session] = _Assignment(self._drafter_at(address) if address else None)
            self._histories[session] = _History()

    def unassign(self, session: str) -> None:
        """Undo `assign`; a session that the engine has taken keeps its drafter until `release`."""
        with self._lock:
            self._histories.pop(session, None)
            assignment = self._assignments.get(session)
            if assignment is not None and not assignment.is_known:
                self._drop_session(session)

    def rebalance(self, live: Sequence[str]) -> None:
        """Move sessions whose drafter is missing, or neither available nor live, to the live drafter with the fewest.

        The new drafter answers the next commit with a resync and gets all tokens. Connections to drafters that are not
        live, are down and serve no session end.
        """
        with self._lock:
            backing_off = {address for address, drafter in self._drafters.items() if drafter.breaker.backing_off}
            usable = [address for address in live if address not in backing_off]
            num_sessions = self._count_sessions()
            for session, assignment in list(self._assignments.items()) if usable else ():
                current = assignment.drafter
                if current and (current.can_draft(session) or current.address in usable):
                    continue
                address = min(usable, key=num_sessions.__getitem__)
                num_sessions[address] += 1
                self._drop_session(session)
                self._assignments[session] = _Assignment(self._drafter_at(address))
            for drafter in list(self._drafters.values()):
                if drafter.address not in live:
                    self._close_if_unused(drafter)

    def can_draft(self, session: str) -> bool:
        """Return whether the session has a drafter that is available now."""
        assignment = self._assignments.get(session)
        return assignment is not None and assignment.drafter is not None and assignment.drafter.can_draft(session)

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """Ask all drafters at once; draft_timeout_s starts when the answers are collected."""
        if (traceparent := self._traceparent) is not None:
            contexts = [c._replace(traceparent=traceparent(c.session)) if c.budget.wants_tree else c for c in contexts]
        rows: dict[RemoteDrafter, list[int]] = {}
        with self._lock:
            for i, context in enumerate(contexts):
                assignment = self._assignments.get(context.session)
                if assignment and assignment.drafter:
                    assignment.is_known = True
                    rows.setdefault(assignment.drafter, []).append(i)
        pending = {drafter: drafter.send([contexts[i] for i in mine]) for drafter, mine in rows.items()}
        return partial(self._collect, contexts, rows, pending)

    def release(self, sessions: Sequence[str]) -> None:
        """See Drafter."""
        with self._lock:
            for session in sessions:
                self._drop_session(session)

    def reject(self, sessions: Sequence[str]) -> None:
        """Count one failed request for each drafter of these sessions."""
        with self._lock:
            rejected: dict[RemoteDrafter, list[str]] = {}
            for session in sessions:
                assignment = self._assignments.get(session)
                if assignment and assignment.drafter:
                    rejected.setdefault(assignment.drafter, []).append(session)
        for drafter, mine in rejected.items():
            drafter.reject(mine)

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            for drafter in self._drafters.values():
                drafter.close()

    @property
    def status(self) -> tuple[DraftClientStatus, ...]:
        """The connections to all draft services."""
        with self._lock:
            num_sessions = self._count_sessions()
            return tuple(drafter.status(num_sessions[address]) for address, drafter in self._drafters.items())

    def trace_with(self, traceparent: Callable[[str], str]) -> None:
        """Send a trace context with every request for a tree. traceparent: gives that of a session; empty for none."""
        self._traceparent = traceparent

    def count_verified(self, session: str, step: VerifyStep) -> tuple[DraftTiming | None, str]:
        """Count the outcome of a session's last tree. Return how long it took, None if answers were missing; and its method,
        also of one that was prepared ahead, empty without one.
        """
        history = self._histories.get(session)
        if history is None or history.drafter is None:
            return None, ""
        history.drafter.num_drafted += step.drafted
        history.drafter.num_accepted += step.accepted
        return history.timing, history.drafter.method

    def _collect(
        self,
        contexts: Sequence[DraftContext],
        rows: Mapping[RemoteDrafter, Sequence[int]],
        pending: Mapping[RemoteDrafter, PendingDrafts],
    ) -> list[Draft]:
        drafts: list[Draft] = [None] * len(contexts)
        deadline = time.monotonic() + self.timeout_s
        for drafter, sent in pending.items():
            for i, draft in zip(rows[drafter], drafter.collect(sent, deadline), strict=True):
                drafts[i] = draft
                history = self._histories.get(contexts[i].session)
                if history and contexts[i].budget.wants_tree:
                    history.drafter, history.timing = drafter, sent.timing
            if sent.awaited and drafter.connected:
                self._warn_of_late_trees(drafter)
        return drafts

    def _warn_of_late_trees(self, drafter: RemoteDrafter) -> None:
        message = (  # a kind of message for each drafter
            f"{drafter.address}: %d of %d requests for trees were late or lost, and their steps decode plainly; raise "
            "draft_client.draft_timeout_s (%g), draft smaller trees, or give the drafter more of the machine"
        )
        num_requests = drafter.num_answered + drafter.num_lost
        log.warning(message, drafter.num_lost, num_requests, self.timeout_s, extra={"rate_limited": True})

    # Below: with the lock held.

    def _count_sessions(self) -> Counter[str]:
        return Counter(each.drafter.address for each in self._assignments.values() if each.drafter)

    def _drafter_at(self, address: str) -> RemoteDrafter:
        if address not in self._drafters:
            self._drafters[address] = self._connect(address)
        return self._drafters[address]

    def _drop_session(self, session: str) -> None:
        """Forget an assignment, and stop dialling its drafter if that is down and has no other session."""
        assignment = self._assignments.pop(session, None)
        if assignment is None or assignment.drafter is None:
            return
        if assignment.is_known:
            assignment.drafter.release([session])
        self._close_if_unused(assignment.drafter)

    def _close_if_unused(self, drafter: RemoteDrafter) -> None:
        if not drafter.connected and all(each.drafter is not drafter for each in self._assignments.values()):
            drafter.close()
            self._drafters.pop(drafter.address, None)
