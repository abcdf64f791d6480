"""Choose the verifier and the drafter of a request: filter, score, pick. Pure functions of one `WorkerSnapshot`.

To add a routing signal, add its weight to `RoutingConfig` and its term to `_verifier_score`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b

from eyas.config import RoutingConfig
from eyas.rpc.messages import Lease, TargetInfo
from eyas.services.discovery.redis_registry import Placement

_NO_BLOCKS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RoutingRequest:
    """The properties of a request that decide where it runs.

    Attributes:
        num_tokens: prompt and output together.
        last: where the session's last request ran, if known.
        excluded: incarnations that have failed this request.
        target_fingerprint: pin of the verifier that began it, or empty.
        wants_drafter: False for plain decoding.
        session: may be empty.
        block_hashes: of the prompt's token blocks, in order.
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

    @property
    def placement(self) -> Placement:
        """The incarnations of both."""
        return Placement(self.verifier.incarnation, self.drafter.incarnation if self.drafter else "")


@dataclass(frozen=True)
class WorkerSnapshot:
    """Knowledge of a router about the live workers at one moment.

    Attributes:
        in_flight: this router's own requests by incarnation.
        counted: how many there were when the lease came.
        unhealthy: incarnations that are ejected or stuck.
        sent_blocks: by incarnation, hashes of the token blocks that this router sent there.
        zone: the router's own; may be empty.
    """

    verifiers: Sequence[Lease]
    drafters: Sequence[Lease]
    in_flight: Mapping[str, int]
    unhealthy: frozenset[str] = frozenset()
    sent_blocks: Mapping[str, Container[int]] = field(default_factory=dict)
    zone: str = ""
    counted: Mapping[str, int] = field(default_factory=dict)

    def num_requests(self, worker: Lease, scale: float = 1.0) -> float:
        """Return the requests on a worker: by its lease, and what this router has sent and seen end since.

        scale: how many times as much all routers together have done since.
        """
        own = self.in_flight.get(worker.incarnation, 0)
        leased = worker.load.num_running + worker.load.num_waiting
        return max(leased + scale * (own - self.counted.get(worker.incarnation, 0)), own)

    def num_routers(self, workers: Sequence[Lease]) -> float:
        """Return how many routers like this one would send all requests that the leases of the workers count."""
        leased = sum(worker.load.num_running + worker.load.num_waiting for worker in workers)
        own = sum(self.counted.get(worker.incarnation, 0) for worker in workers)
        return max(leased / max(own, 1), 1.0)


def pick(workers: WorkerSnapshot, request: RoutingRequest, config: RoutingConfig) -> Pair | None:
    """Return the best verifier and the best drafter for it; None if no verifier can serve the request.

    Unhealthy workers come last, and workers at their load bound come before them: affinity never overloads a worker.
    """
    verifiers = _candidates(workers, eligible_verifiers(workers, request), config)
    hashed = _hashed_verifier(request, verifiers, config)

    @cache
    def drafters(target: TargetInfo) -> _Candidates:
        wanted = workers.drafters if request.wants_drafter else ()
        return _candidates(workers, [drafter for drafter in wanted if target.is_drafted_by(drafter.model)], config)

    def verifier_score(verifier: Lease) -> float:
        affinity = config.drafter_weight * drafters(verifier.model.target).idleness
        affinity += config.hash_weight * (verifier is hashed)
        return affinity + _verifier_score(workers, request, config, verifier, verifiers.expected[verifier.incarnation])

    verifier = verifiers.best(verifier_score)
    if verifier is None:
        return None
    fitting, last = drafters(verifier.model.target), request.last.drafter if request.last else ""

    def drafter_score(drafter: Lease) -> float:
        score = -config.load_weight * fitting.expected[drafter.incarnation]
        score += config.session_weight * (drafter.incarnation == last)
        return score + config.zone_weight * (drafter.zone == verifier.zone != "")

    return Pair(verifier, fitting.best(drafter_score))


def eligible_verifiers(workers: WorkerSnapshot, request: RoutingRequest) -> list[Lease]:
    """Return the verifiers that can serve the request."""
    return [
        verifier
        for verifier in workers.verifiers
        if verifier.model.name == request.model
        and request.num_tokens <= verifier.model.max_model_len
        and verifier.incarnation not in request.excluded
        and verifier.model.continues(request.target_fingerprint)
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
class _Candidates:
    """Workers that can serve a request.

    Attributes:
        utilization: requests as a share of the load bound, by incarnation; 1 is full.
        expected: the same if other routers have done since the leases what this one has. All routers see the same leases,
            and would all take the worker that was idle.
    """

    leases: Sequence[Lease]
    unhealthy: frozenset[str]
    utilization: Mapping[str, float]
    expected: Mapping[str, float]

    @cached_property
    def idleness(self) -> float:
        """1 if a healthy worker is idle, 0 if there is none or all are full."""
        healthy = [share for name, share in self.expected.items() if name not in self.unhealthy]
        return 1 - min([*healthy, 1.0])

    def best(self, score: Callable[[Lease], float]) -> Lease | None:
        """Return the worker with the highest score among the healthy ones below their bound, if there are any."""

        def rank(worker: Lease) -> tuple[object, ...]:
            """Return the sort key of a worker: the least is picked, and what comes first decides first."""
            name, free = worker.incarnation, worker.load.free_kv_tokens
            return name in self.unhealthy, self.utilization[name] >= 1, -score(worker), -free, name

        return min(self.leases, key=rank, default=None)


def _candidates(snapshot: WorkerSnapshot, workers: Sequence[Lease], config: RoutingConfig) -> _Candidates:
    """Bound every worker's requests by a multiple of the mean, in proportion to the workers' sizes.

    At least one worker is then always below its bound. The mean is that of the healthy workers, with one more request.
    Source: Mirrokni, Thorup and Zadimoghaddam 2018, consistent hashing with bounded loads, section 2.
    """
    healthy = [worker for worker in workers if worker.incarnation not in snapshot.unhealthy] or workers
    sizes = [worker.load.max_num_seqs for worker in healthy]
    total_size = sum(sizes) if all(sizes) else 0
    total_requests = sum(map(snapshot.num_requests, healthy)) + 1
    utilization, expected = dict[str, float](), dict[str, float]()
    num_routers = snapshot.num_routers(workers)
    for worker in workers:
        share = worker.load.max_num_seqs / total_size if total_size else 1 / len(healthy)
        bound = max(config.min_bound, math.ceil(config.load_factor * total_requests * share))
        utilization[worker.incarnation] = snapshot.num_requests(worker) / bound
        expected[worker.incarnation] = snapshot.num_requests(worker, num_routers) / bound
    return _Candidates(workers, snapshot.unhealthy, utilization, expected)


def rendezvous_weight(key: str, incarnation: str) -> bytes:
    """Return a worker's weight for a key; the key belongs to the worker with the greatest weight.

    When a worker joins or leaves, only the keys that belong to it move. Thaler and Ravishankar 1998, section 3.
    """
    return blake2b(f"{key}\0{incarnation}".encode(), digest_size=8).digest()


def _hashed_verifier(request: RoutingRequest, verifiers: _Candidates, config: RoutingConfig) -> Lease | None:
    """Return the verifier that the session's hash selects; None if the session returns to its last verifier."""
    below_bound = [verifier for verifier in verifiers.leases if verifiers.utilization[verifier.incarnation] < 1]
    last = request.last.verifier if request.last and config.session_weight > config.hash_weight else ""
    if not request.session or not config.hash_weight or any(verifier.incarnation == last for verifier in below_bound):
        return None
    return max(below_bound, key=lambda verifier: rendezvous_weight(request.session, verifier.incarnation), default=None)


def _verifier_score(
    workers: WorkerSnapshot, request: RoutingRequest, config: RoutingConfig, verifier: Lease, utilization: float
) -> float:
    """Return how well a verifier suits the request; each term is a share in [0, 1] times its weight."""
    last, num_waiting = request.last.verifier if request.last else "", verifier.load.num_waiting
    return (
        config.session_weight * (verifier.incarnation == last)
        + config.prefix_weight * prefix_match_ratio(workers, request, verifier)
        + config.zone_weight * (verifier.zone == workers.zone != "")
        - config.load_weight * utilization
        - config.queue_weight * num_waiting / (num_waiting + 1)
        - config.kv_weight * max(request.num_tokens - verifier.load.free_kv_tokens, 0) / request.num_tokens
    )
