"""The drafters of one verifier as one Drafter: each session goes to the draft service that it was paired with."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from eyas.config import DraftClientConfig
from eyas.draft_protocol import Proposal
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, Pending
from eyas.request import VerifyStep as VerifyRound
from eyas.rpc.channel import Peers
from eyas.rpc.messages import TargetInfo
from eyas.services.verifier.draft_client import (
    DraftClientState,
    DraftClientStats,
    PendingRound,
    RemoteDrafter,
    RoundTimes,
)


@dataclass
class _Pair:
    """A session's drafter; None until one is there. told: whether the drafter may know the session, so that it must be told
    of its end."""

    link: RemoteDrafter | None
    told: bool = False


@dataclass
class _Timing:
    """A session's answered rounds. link, last: who was asked last, and what its answer took; None if it did not come."""

    num_verify_steps: int = 0
    seconds: float = 0.0
    link: RemoteDrafter | None = None
    last: RoundTimes | None = None


class DraftPool:
    """Implements Drafter over many RemoteDrafters. Sessions without a pair get None: they decode plainly.

    `ask` and `release` belong to the engine's thread; the rest may be called from any. A session's life: `pair`, then
    `ask` and at last `release` where the engine takes it, then `unpair` (the last two in any order).
    """

    def __init__(
        self,
        config: DraftClientConfig,
        needs: DrafterNeeds,
        proposal: Proposal = "deterministic",
        verified: TargetInfo | None = None,
        peers: Peers | None = None,
    ) -> None:
        """needs, proposal, verified, peers: see RemoteDrafter."""
        self._config = config
        self._needs = needs
        self._proposal = proposal
        self._verified = verified
        self._peers = peers or Peers()
        self._lock = threading.Lock()
        self._links: dict[str, RemoteDrafter] = {}
        self._pairs: dict[str, _Pair] = {}
        self._timings: dict[str, _Timing] = {}
        self._traceparent: Callable[[str], str] = _untraced

    def trace_by(self, traceparent: Callable[[str], str]) -> None:
        """Ask for the trace context of each session's next round, and send it along; empty for one that is not traced."""
        self._traceparent = traceparent

    @property
    def needs(self) -> DrafterNeeds:
        return self._needs

    @property
    def can_sample(self) -> bool:
        return self._proposal == "sampled"

    @property
    def stats(self) -> list[DraftClientStats]:
        """Round trips of every link."""
        with self._lock:
            return [link.stats for link in self._links.values()]

    @property
    def links(self) -> list[DraftClientState]:
        """Every link now."""
        with self._lock:
            sessions = Counter(pair.link.address for pair in self._pairs.values() if pair.link)
            return [link.state(sessions[address]) for address, link in self._links.items()]

    def verified(self, session: str, round_: VerifyRound) -> RoundTimes | None:
        """Count what became of a session's last tree; what that took, None where its drafter's answers were not complete."""
        timing = self._timings.get(session)
        if timing is None or timing.link is None:
            return None
        timing.link.verified(round_)
        return timing.last

    def pair(self, session: str, address: str) -> None:
        """Let the drafter at host:port draft for a session from now on; dials it if it is new.

        With an empty address the session waits for `rehome` to find it a drafter.
        """
        with self._lock:
            self._pairs[session] = _Pair(self._dial(address) if address else None)
            self._timings[session] = _Timing()

    def rehome(self, live: Sequence[str]) -> None:
        """Sessions without a drafter, or whose drafter is gone from the `live` addresses or given up, move to the live one
        with the fewest sessions. It refuses their next commit and is told everything. Links to drafters that are gone, and
        that nobody uses, end."""
        with self._lock:
            usable = [address for address in live if not self._is_resting(address)]
            sessions = Counter(pair.link.address for pair in self._pairs.values() if pair.link)
            for session, pair in list(self._pairs.items()) if usable else ():
                if pair.link and (pair.link.can_draft(session) or pair.link.address in usable):
                    continue
                address = min(usable, key=sessions.__getitem__)
                sessions[address] += 1
                self._part(session)
                self._pairs[session] = _Pair(self._dial(address))
            for link in list(self._links.values()):
                if link.address not in live:
                    self._drop(link)

    def mean_round_trip(self, session: str) -> float | None:
        """Mean seconds of the session's answered rounds; None if there was none, or after `unpair`."""
        timing = self._timings.get(session)
        return timing.seconds / timing.num_verify_steps if timing and timing.num_verify_steps else None

    def unpair(self, session: str) -> None:
        """The other end of `pair`; a session that the engine has taken keeps its drafter until `release`."""
        with self._lock:
            self._timings.pop(session, None)
            pair = self._pairs.get(session)
            if pair is not None and not pair.told:
                self._part(session)

    def can_draft(self, session: str) -> bool:
        """Whether the session has a drafter that can be told of it now."""
        pair = self._pairs.get(session)
        return pair is not None and pair.link is not None and pair.link.can_draft(session)

    def request(self, contexts: Sequence[DraftContext]) -> Pending:
        """One round with all drafters at once, under one deadline from when it is collected."""
        contexts = [self._traced(context) for context in contexts]
        indices = self._by_link(contexts)
        rounds = {link: link.send([contexts[i] for i in mine]) for link, mine in indices.items()}
        return partial(self._collect, contexts, indices, rounds)

    def release(self, sessions: Sequence[str]) -> None:
        with self._lock:
            for session in sessions:
                self._part(session)

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            for link in self._links.values():
                link.close()

    def _collect(
        self,
        contexts: Sequence[DraftContext],
        indices: Mapping[RemoteDrafter, Sequence[int]],
        rounds: Mapping[RemoteDrafter, PendingRound],
    ) -> list[Draft]:
        drafts: list[Draft] = [None] * len(contexts)
        deadline = time.monotonic() + self._config.draft_timeout_s
        for link, round_ in rounds.items():
            for i, draft in zip(indices[link], link.collect(round_, deadline), strict=True):
                drafts[i] = draft
                timing = self._timings.get(contexts[i].session)
                if timing and contexts[i].budget.wants_tree:
                    _note(timing, link, round_)
        return drafts

    def _traced(self, context: DraftContext) -> DraftContext:
        traceparent = self._traceparent(context.session) if context.budget.wants_tree else ""
        return replace(context, traceparent=traceparent) if traceparent else context

    def _is_resting(self, address: str) -> bool:
        return address in self._links and self._links[address].resting

    def _dial(self, address: str) -> RemoteDrafter:
        if address not in self._links:
            self._links[address] = RemoteDrafter(
                address, self._needs, self._config, self._proposal, self._verified, self._peers
            )
        return self._links[address]

    def _by_link(self, contexts: Sequence[DraftContext]) -> dict[RemoteDrafter, list[int]]:
        indices: dict[RemoteDrafter, list[int]] = {}
        with self._lock:
            for i, context in enumerate(contexts):
                pair = self._pairs.get(context.session)
                if pair and pair.link:
                    pair.told = True
                    indices.setdefault(pair.link, []).append(i)
        return indices

    def _part(self, session: str) -> None:
        """Drop a pair, and with its last pair a link that is down: a drafter that is gone is not dialled for ever. One that
        goes later, `rehome` drops."""
        pair = self._pairs.pop(session, None)
        if pair is None or pair.link is None:
            return
        if pair.told:
            pair.link.release([session])
        self._drop(pair.link)

    def _drop(self, link: RemoteDrafter) -> None:
        """End a link that is down and has no pair."""
        if not link.up and all(pair.link is not link for pair in self._pairs.values()):
            link.close()
            self._links.pop(link.address, None)


def _note(timing: _Timing, link: RemoteDrafter, round_: PendingRound) -> None:
    timing.link, timing.last = link, None
    if round_.seconds is not None:
        timing.num_verify_steps += 1
        timing.seconds += round_.seconds
        timing.last = RoundTimes(link.address, round_.seconds, round_.draft_seconds)


def _untraced(session: str) -> str:
    return ""
