"""Which verifier and which drafter a request goes to: filter -> score -> pick, in ints. Knows no network and no text.

Every stage is a pure function of what was last known of the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.registry import Lease, Placement


@dataclass(frozen=True)
class Demand:
    """What a request needs of its verifier.

    num_slots: tokens of prompt and output together. last: where the session's last request ran, if it had one.
    excluded: incarnations that have failed this request. fingerprint: the target that began it; empty until one has.
    wants_drafter: false asks for plain decoding.
    """

    model: str
    num_slots: int
    wants_drafter: bool = True
    last: Placement | None = None
    excluded: frozenset[str] = frozenset()
    fingerprint: str = ""


@dataclass(frozen=True)
class Pair:
    """A verifier and the drafter it is to use; None where no live drafter fits."""

    verifier: Lease
    drafter: Lease | None = None


@dataclass(frozen=True)
class Fleet:
    """What is known of the workers. in_flight: this router's own requests by incarnation, fresher than any lease.

    suspects: incarnations that failed a request a moment ago.
    """

    verifiers: Sequence[Lease]
    drafters: Sequence[Lease]
    in_flight: Mapping[str, int]
    suspects: frozenset[str] = frozenset()


@dataclass(frozen=True, order=True)
class Score:
    """Smaller is better; earlier fields weigh more."""

    suspect: int
    away_from_session: int
    missing_slots: int
    busy: int
    without_drafter: int
    drafter_away_from_session: int
    drafter_busy: int
    taken_slots: int


def candidates(fleet: Fleet, demand: Demand) -> list[Pair]:
    """Filter: every pair that can serve the request; a verifier without a fitting drafter stands alone."""
    pairs: list[Pair] = []
    for verifier in fleet.verifiers:
        if verifier.model.name != demand.model or verifier.incarnation in demand.excluded:
            continue
        if demand.num_slots > verifier.model.context_length:
            continue
        if demand.fingerprint and verifier.model.fingerprint != demand.fingerprint:
            continue
        drafters = [d for d in fleet.drafters if demand.wants_drafter and verifier.model.is_drafted_by(d.model)]
        pairs += [Pair(verifier, drafter) for drafter in drafters] or [Pair(verifier)]
    return pairs


def score(fleet: Fleet, demand: Demand, pair: Pair) -> Score:
    """How far a pair is from ideal for the request."""
    verifier, drafter, last = pair.verifier, pair.drafter, demand.last
    return Score(
        suspect=int(verifier.incarnation in fleet.suspects),
        away_from_session=int(last is not None and last.verifier != verifier.incarnation),
        missing_slots=max(0, demand.num_slots - verifier.load.free_slots),
        busy=_busy(fleet, verifier),
        without_drafter=int(drafter is None),
        drafter_away_from_session=int(last is not None and drafter is not None and last.drafter != drafter.incarnation),
        drafter_busy=_busy(fleet, drafter) if drafter else 0,
        taken_slots=-verifier.load.free_slots,
    )


def pick(fleet: Fleet, demand: Demand, pairs: Sequence[Pair]) -> Pair | None:
    """The pair with the best score, of equals the first; None if there is none."""
    return min(pairs, key=lambda pair: score(fleet, demand, pair), default=None)


def _busy(fleet: Fleet, worker: Lease) -> int:
    return max(worker.load.num_running + worker.load.num_waiting, fleet.in_flight.get(worker.incarnation, 0))
