"""Choose the verifier and the drafter of a request: filter, score, pick. Pure functions of one `WorkerSnapshot`.

To add a routing signal, add its weight to `RoutingConfig` and its term to `_verifier_score`.
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

_NO_BLOCKS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RoutingRequest:
    """The properties of a request that decide where it runs.

    num_tokens: prompt and output together. last: where the session's last request ran, if known.
    excluded: incarnations that have failed this request. target_fingerprint: of the target that began it; empty until then.
    wants_drafter: False for plain decoding. session: may be empty. block_hashes: of the prompt's token blocks, in order.
    """

    model: str
    num_tokens: int
    wants_drafter: bool = True
    last: Placement | None = None
    excluded: frozenset[str] = frozenset()
    target_fingerprint: str = ""
    session: str = ""
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A verifier and its drafter; the drafter is None if no live drafter fits."""

    verifier: Lease
    drafter: Lease | None = None


@dataclass(frozen=True)
class WorkerSnapshot:
    """What a router knows of the live workers at one moment.

    in_flight: this router's own requests by incarnation, more recent than the leases. unhealthy: incarnations that are
    ejected or stuck. sent_blocks: by incarnation, hashes of the token blocks that this router sent there.
    zone: the router's own; may be empty.
    """

    verifiers: Sequence[Lease]
    drafters: Sequence[Lease]
    in_flight: Mapping[str, int]
    unhealthy: frozenset[str] = frozenset()
    sent_blocks: Mapping[str, Container[int]] = field(default_factory=dict)
    zone: str = ""

    def num_requests(self, worker: Lease) -> int:
        """Requests on a worker, by its lease or by this router's own count, whichever is greater."""
        return max(worker.load.num_running + worker.load.num_waiting, self.in_flight.get(worker.incarnation, 0))


class WorkerRank(NamedTuple):
    """Sort key of a worker; the least is picked, and earlier fields decide first. cost: the negative score."""

    is_unhealthy: bool
    is_at_bound: bool
    cost: float
    negative_free_kv_tokens: int
    incarnation: str


def pick(workers: WorkerSnapshot, request: RoutingRequest, config: RoutingConfig) -> Pair | None:
    """Return the best verifier and the best drafter for it; None if no verifier can serve the request.

    Unhealthy workers come last, and workers at their load bound come before them: affinity never overloads a worker.
    """
    verifiers = eligible_verifiers(workers, request)
    if not verifiers:
        return None
    bound = load_bound(workers, verifiers, config)
    drafters = _DrafterRanking(workers, request, config)
    hashed = _hashed_verifier(request, [verifier for verifier in verifiers if bound.has_capacity(verifier)], config)

    def rank(verifier: Lease) -> WorkerRank:
        idleness = drafters.idleness(verifier)
        score = _verifier_score(
            workers, request, config, verifier, bound.utilization(verifier), idleness, verifier is hashed
        )
        return _rank(workers, bound, verifier, score)

    verifier = min(verifiers, key=rank)
    return Pair(verifier, drafters.best(verifier))


def eligible_verifiers(workers: WorkerSnapshot, request: RoutingRequest) -> list[Lease]:
    """Return the verifiers that can serve the request."""
    return [
        verifier
        for verifier in workers.verifiers
        if verifier.model.name == request.model
        and request.num_tokens <= verifier.model.max_model_len
        and verifier.incarnation not in request.excluded
        and (not request.target_fingerprint or verifier.model.fingerprint == request.target_fingerprint)
    ]


def prefix_match_ratio(workers: WorkerSnapshot, request: RoutingRequest, verifier: Lease) -> float:
    """Return the share of the prompt's blocks that the verifier has cached, by its lease or by what this router sent it."""
    if not request.block_hashes:
        return 0.0
    sent = workers.sent_blocks.get(verifier.incarnation, _NO_BLOCKS)
    cached = bisect_left(
        request.block_hashes, True, key=lambda block: block not in verifier.prefix_hashes and block not in sent
    )
    return cached / len(request.block_hashes)


@dataclass(frozen=True)
class LoadBound:
    """Requests on each worker and the most that it may have, by incarnation."""

    num_requests: Mapping[str, int]
    max_requests: Mapping[str, int]

    def has_capacity(self, worker: Lease) -> bool:
        """Return whether one more request keeps the worker within its bound."""
        return self.num_requests[worker.incarnation] < self.max_requests[worker.incarnation]

    def utilization(self, worker: Lease) -> float:
        """Return the worker's requests as a share of its bound."""
        return self.num_requests[worker.incarnation] / self.max_requests[worker.incarnation]


def load_bound(snapshot: WorkerSnapshot, workers: Sequence[Lease], config: RoutingConfig) -> LoadBound:
    """Bound every worker's requests by a multiple of the mean, in proportion to the workers' sizes.

    At least one worker is then always below its bound. The mean is that of the healthy workers, with one more request.
    Source: Mirrokni, Thorup and Zadimoghaddam 2018, consistent hashing with bounded loads, section 2.
    """
    healthy = [worker for worker in workers if worker.incarnation not in snapshot.unhealthy] or workers
    num_requests = {worker.incarnation: snapshot.num_requests(worker) for worker in workers}
    sizes = [worker.load.max_num_seqs for worker in healthy]
    total_size = sum(sizes) if all(sizes) else 0
    total_requests = sum(num_requests[worker.incarnation] for worker in healthy) + 1
    max_requests: dict[str, int] = {}
    for worker in workers:
        share = worker.load.max_num_seqs / total_size if total_size else 1 / len(healthy)
        max_requests[worker.incarnation] = max(config.min_bound, math.ceil(config.load_factor * total_requests * share))
    return LoadBound(num_requests, max_requests)


def rendezvous_weight(key: str, incarnation: str) -> bytes:
    """Return a worker's weight for a key; the key belongs to the worker with the greatest weight.

    When a worker joins or leaves, only the keys that belong to it move. Thaler and Ravishankar 1998, section 3.
    """
    return blake2b(f"{key}\0{incarnation}".encode(), digest_size=8).digest()


def _hashed_verifier(request: RoutingRequest, verifiers: Sequence[Lease], config: RoutingConfig) -> Lease | None:
    """Return the verifier that the session's hash selects; None if the session returns to its last verifier."""
    last = request.last.verifier if request.last and config.session_weight > config.hash_weight else ""
    if not request.session or not config.hash_weight or any(verifier.incarnation == last for verifier in verifiers):
        return None
    return max(verifiers, key=lambda verifier: rendezvous_weight(request.session, verifier.incarnation), default=None)


def _verifier_score(
    workers: WorkerSnapshot,
    request: RoutingRequest,
    config: RoutingConfig,
    verifier: Lease,
    utilization: float,
    drafter_idleness: float,
    is_hashed: bool,
) -> float:
    """Return how well a verifier suits the request; each term is a share in [0, 1] times its weight."""
    score = (
        config.prefix_weight * prefix_match_ratio(workers, request, verifier)
        - config.load_weight * utilization
        + config.drafter_weight * drafter_idleness
    )
    if request.last is not None and request.last.verifier == verifier.incarnation:
        score += config.session_weight
    if is_hashed:
        score += config.hash_weight
    if workers.zone and workers.zone == verifier.zone:
        score += config.zone_weight
    num_waiting, missing_tokens = verifier.load.num_waiting, request.num_tokens - verifier.load.free_kv_tokens
    if num_waiting:
        score -= config.queue_weight * num_waiting / (num_waiting + 1)
    if missing_tokens > 0:
        score -= config.kv_weight * missing_tokens / request.num_tokens
    return score


@dataclass(frozen=True)
class _Drafters:
    """The drafters that fit one target. idleness: see `_DrafterRanking.idleness`."""

    leases: Sequence[Lease]
    bound: LoadBound
    idleness: float


class _DrafterRanking:
    """Ranks the drafters of each target; verifiers of the same target share one `_Drafters`."""

    def __init__(self, workers: WorkerSnapshot, request: RoutingRequest, config: RoutingConfig) -> None:
        self._workers = workers
        self._request = request
        self._config = config
        self._by_target: dict[tuple[str, str], _Drafters] = {}

    def idleness(self, verifier: Lease) -> float:
        """Return 1 if a fitting drafter is idle, 0 if there is none or all are at their bound."""
        return self._drafters(verifier).idleness

    def best(self, verifier: Lease) -> Lease | None:
        """Return the best drafter for a request on this verifier, if any fits."""
        drafters = self._drafters(verifier)

        def rank(drafter: Lease) -> WorkerRank:
            score = self._score(drafter, verifier, drafters.bound.utilization(drafter))
            return _rank(self._workers, drafters.bound, drafter, score)

        return min(drafters.leases, key=rank, default=None)

    def _drafters(self, verifier: Lease) -> _Drafters:
        key = (verifier.model.fingerprint, verifier.model.features_fingerprint)
        if key not in self._by_target:
            wanted = self._workers.drafters if self._request.wants_drafter else ()
            fitting = [drafter for drafter in wanted if verifier.model.is_drafted_by(drafter.model)]
            bound = load_bound(self._workers, fitting, self._config)
            healthy = [drafter for drafter in fitting if drafter.incarnation not in self._workers.unhealthy]
            idleness = 1 - min((min(bound.utilization(drafter), 1.0) for drafter in healthy), default=1.0)
            self._by_target[key] = _Drafters(fitting, bound, idleness)
        return self._by_target[key]

    def _score(self, drafter: Lease, verifier: Lease, utilization: float) -> float:
        score = -self._config.load_weight * utilization
        if self._request.last is not None and self._request.last.drafter == drafter.incarnation:
            score += self._config.session_weight
        if drafter.zone and drafter.zone == verifier.zone:
            score += self._config.zone_weight
        return score


def _rank(workers: WorkerSnapshot, bound: LoadBound, worker: Lease, score: float) -> WorkerRank:
    is_unhealthy, is_at_bound = worker.incarnation in workers.unhealthy, not bound.has_capacity(worker)
    return WorkerRank(is_unhealthy, is_at_bound, -score, -worker.load.free_kv_tokens, worker.incarnation)
