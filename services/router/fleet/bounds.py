"""How much each of several workers may have before the others come first: bounded loads. Knows no requests.

The bound is a multiple of the mean, in proportion to the workers' sizes, so that one of them always has room. Mirrokni,
Thorup and Zadimoghaddam 2018 (consistent hashing with bounded loads), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.config import PlacementConfig
from eyas.rpc.messages import Lease


@dataclass(frozen=True)
class Room:
    """The workers' requests and bounds, by incarnation."""

    busy: Mapping[str, int]
    bounds: Mapping[str, int]

    def has(self, worker: Lease) -> bool:
        """Whether one more request keeps the worker within its bound."""
        return self.busy[worker.incarnation] < self.bounds[worker.incarnation]

    def share(self, worker: Lease) -> float:
        """The worker's requests as a share of its bound."""
        return self.busy[worker.incarnation] / self.bounds[worker.incarnation]


def room_among(workers: Sequence[Lease], able: Sequence[Lease], busy: Mapping[str, int], config: PlacementConfig) -> Room:
    """The room of `workers`, were all requests and one more shared among the `able` ones, which may not be empty."""
    sizes = [worker.load.max_running for worker in able]
    total, num_busy = (sum(sizes) if all(sizes) else 0), sum(busy[worker.incarnation] for worker in able) + 1
    bounds: dict[str, int] = {}
    for worker in workers:
        portion = worker.load.max_running / total if total else 1 / len(able)
        bounds[worker.incarnation] = max(config.least_bound, math.ceil(config.bound * num_busy * portion))
    return Room(busy, bounds)
