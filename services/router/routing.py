"""How much each of several workers may have before the others come first: bounded loads. Knows no requests.

The bound is a multiple of the mean, in proportion to the workers' sizes, so that one of them always has room. Mirrokni,
Thorup and Zadimoghaddam 2018 (consistent hashing with bounded loads), section 2.

Which verifier and which drafter a request goes to: filter -> score -> pick. Knows no network and no text.

Every stage is a pure function of what was last known of the fleet.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from eyas.config import RoutingConfig
from eyas.rpc.messages import Lease
from eyas.services.discovery.registry import Placement


@dataclass(frozen=True)
class LoadBound:
    """The workers' requests and bounds, by incarnation."""

    busy: Mapping[str, int]
    bounds: Mapping[str, int]

    def has(self, worker: Lease) -> bool:
        """Whether one more request keeps the worker within its bound."""
        return self.busy[worker.incarnation] < self.bounds[worker.incarnation]

    def share(self, worker: Lease) -> float:
        """The worker's requests as a share of its bound."""
        return self.busy[worker.incarnation] / self.bounds[worker.incarnation]


def load_bound(workers: Sequence[Lease], able: Sequence[Lease], busy: Mapping[str, int], config: RoutingConfig) -> LoadBound:
    """The room of `workers`, were all requests and one more shared among the `able` ones, which may not be empty."""
    sizes = [worker.load.max_num_seqs for worker in able]
    total, num_busy = (sum(sizes) if all(sizes) else 0), sum(busy[worker.incarnation] for worker in able) + 1
    bounds: dict[str, int] = {}
    for worker in workers:
        portion = worker.load.max_num_seqs / total if total else 1 / len(able)
        bounds[worker.incarnation] = max(config.min_bound, math.ceil(config.load_factor * num_busy * portion))
    return LoadBound(busy, bounds)


NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RequestDemand:
    """What a request needs of its verifier.

    num_slots: tokens of prompt and output together. last: where the session's last request ran, if it had one.
    excluded: incarnations that have failed this request. fingerprint: the target that began it; empty until one has.
    wants_drafter: false asks for plain decoding. session: may be empty. blocks: hashes of the prompt's blocks.
    """

    model: str
    num_slots: int
    wants_drafter: bool = True
    last: Placement | None = None
    excluded: frozenset[str] = frozenset()
    fingerprint: str = ""
    session: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A verifier and the drafter it is to use; None where no live drafter fits."""

    verifier: Lease
    drafter: Lease | None = None


@dataclass(frozen=True)
class Fleet:
    """What is known of the workers. in_flight: this router's own requests by incarnation, fresher than any lease.

    suspects: incarnations that failed a moment ago. sent: by incarnation, hashes of the blocks that this router sent there.
    zone: the router's own; may be empty.
    """

    verifiers: Sequence[Lease]
    drafters: Sequence[Lease]
    in_flight: Mapping[str, int]
    suspects: frozenset[str] = frozenset()
    sent: Mapping[str, Container[int]] = field(default_factory=dict)
    zone: str = ""

    def busy(self, worker: Lease) -> int:
        """Requests there, as far as anybody has told."""
        return max(worker.load.num_running + worker.load.num_waiting, self.in_flight.get(worker.incarnation, 0))


class PairScore(NamedTuple):
    """The least one is picked; earlier fields decide first."""

    suspect: bool
    full: bool
    cost: float
    taken_slots: int
    incarnation: str


def pick(fleet: Fleet, demand: RequestDemand, config: RoutingConfig) -> Pair | None:
    """The verifier with the best score, and the drafter that suits it best; None if no verifier can serve the request.

    Suspects come last, and workers at their bound come before them only: no affinity overloads a worker.
    """
    verifiers = fitting(fleet, demand)
    if not verifiers:
        return None
    room = _room(fleet, verifiers, config)
    drafting = _DrafterRanking(fleet, demand, config)
    home = _home(demand, [verifier for verifier in verifiers if room.has(verifier)], config)

    def rank(verifier: Lease) -> PairScore:
        drafter = drafting.idleness(verifier)
        value = _score(fleet, demand, config, verifier, room.share(verifier), drafter, verifier is home)
        suspect, full = verifier.incarnation in fleet.suspects, not room.has(verifier)
        return PairScore(suspect, full, -value, -verifier.load.free_kv_tokens, verifier.incarnation)

    verifier = min(verifiers, key=rank)
    return Pair(verifier, drafting.best(verifier))


def fitting(fleet: Fleet, demand: RequestDemand) -> list[Lease]:
    """Filter: every verifier that can serve the request."""
    return [
        verifier
        for verifier in fleet.verifiers
        if verifier.model.name == demand.model
        and demand.num_slots <= verifier.model.max_model_len
        and verifier.incarnation not in demand.excluded
        and (not demand.fingerprint or verifier.model.fingerprint == demand.fingerprint)
    ]


def cached_share(fleet: Fleet, demand: RequestDemand, verifier: Lease) -> float:
    """The share of the prompt's blocks that the verifier has, as it says itself or as this router remembers."""
    if not demand.blocks:
        return 0.0
    sent = fleet.sent.get(verifier.incarnation, NOTHING)
    known = bisect_left(demand.blocks, True, key=lambda block: block not in verifier.prefix_hashes and block not in sent)
    return known / len(demand.blocks)


def hash_weight(key: str, incarnation: str) -> bytes:
    """Rendezvous hashing: of all workers the one with the greatest weight is the key's. Should a worker come or go, only the
    keys move that are or were its own. Thaler and Ravishankar 1998, section 3."""
    return blake2b(f"{key}\0{incarnation}".encode(), digest_size=8).digest()


def _room(fleet: Fleet, workers: Sequence[Lease], config: RoutingConfig) -> LoadBound:
    able = [worker for worker in workers if worker.incarnation not in fleet.suspects] or workers
    return load_bound(workers, able, {worker.incarnation: fleet.busy(worker) for worker in workers}, config)


def _score(
    fleet: Fleet, demand: RequestDemand, config: RoutingConfig, verifier: Lease, load: float, drafter: float, home: bool
) -> float:
    """How good a verifier is for the request; each term is a share in [0, 1] times its weight."""
    value = (
        config.prefix_weight * cached_share(fleet, demand, verifier)
        - config.load_weight * load
        + config.drafter_weight * drafter
    )
    if demand.last is not None and demand.last.verifier == verifier.incarnation:
        value += config.session_weight
    if home:
        value += config.hash_weight
    if fleet.zone and fleet.zone == verifier.zone:
        value += config.zone_weight
    waiting, missing = verifier.load.num_waiting, demand.num_slots - verifier.load.free_kv_tokens
    if waiting:
        value -= config.queue_weight * waiting / (waiting + 1)
    if missing > 0:
        value -= config.kv_weight * missing / demand.num_slots
    return value


def _home(demand: RequestDemand, verifiers: Sequence[Lease], config: RoutingConfig) -> Lease | None:
    """Where a hash points a session that will not return to its last verifier."""
    last = demand.last.verifier if demand.last and config.session_weight > config.hash_weight else ""
    if not demand.session or not config.hash_weight or any(verifier.incarnation == last for verifier in verifiers):
        return None
    return max(verifiers, key=lambda verifier: hash_weight(demand.session, verifier.incarnation), default=None)


class _DrafterRanking:
    """The drafters that fit each target, found once for all verifiers of one."""

    def __init__(self, fleet: Fleet, demand: RequestDemand, config: RoutingConfig) -> None:
        self._fleet = fleet
        self._demand = demand
        self._config = config
        self._fits: dict[tuple[str, str], list[Lease]] = {}
        self._rooms: dict[tuple[str, str], LoadBound] = {}
        self._idleness: dict[tuple[str, str], float] = {}

    def idleness(self, verifier: Lease) -> float:
        """1 where a fitting drafter does nothing, 0 where there is none or all are at their bound."""
        return self._idleness[self._found(verifier)]

    def best(self, verifier: Lease) -> Lease | None:
        """The drafter for a request on this verifier, if any fits."""
        key = self._found(verifier)
        return min(self._fits[key], key=lambda drafter: self._rank(drafter, verifier, self._rooms[key]), default=None)

    def _found(self, verifier: Lease) -> tuple[str, str]:
        key = (verifier.model.fingerprint, verifier.model.head_fingerprint)
        if key not in self._fits:
            wanted = self._fleet.drafters if self._demand.wants_drafter else ()
            fits = self._fits[key] = [drafter for drafter in wanted if verifier.model.is_drafted_by(drafter.model)]
            room = self._rooms[key] = _room(self._fleet, fits, self._config)
            live = [drafter for drafter in fits if drafter.incarnation not in self._fleet.suspects]
            self._idleness[key] = 1 - min((min(room.share(drafter), 1.0) for drafter in live), default=1.0)
        return key

    def _rank(self, drafter: Lease, verifier: Lease, room: LoadBound) -> PairScore:
        last, config = self._demand.last, self._config
        value = -config.load_weight * room.share(drafter)
        if last is not None and last.drafter == drafter.incarnation:
            value += config.session_weight
        if drafter.zone and drafter.zone == verifier.zone:
            value += config.zone_weight
        suspect = drafter.incarnation in self._fleet.suspects
        return PairScore(suspect, not room.has(drafter), -value, -drafter.load.free_kv_tokens, drafter.incarnation)
