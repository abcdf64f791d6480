"""The order in which requests are admitted: by priority, then fairly among tenants."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from eyas.engine.sequence import QueueKey, Sequence

# One admission in this many ignores priorities, so that a flood of urgent requests starves no others.
RESERVED_SHARE = 4
# Service that a tenant is charged for a prompt token that is computed, and for an output token.
PROMPT_COST, OUTPUT_COST = 1, 2
# Entries of removed sequences that a tenant's heaps may hold beside as many as wait.
SPARE_ENTRIES = 64

by_key = attrgetter("key")


@dataclass(eq=False)
class _TenantQueue:
    """The waiting sequences of a tenant with their keys, and two heaps of them, by key and by number.

    A sequence that is removed stays in a heap until it is at the top: that always waits.
    """

    keys: dict[Sequence, QueueKey] = field(default_factory=dict)
    by_key: list[tuple[QueueKey, Sequence]] = field(default_factory=list)
    by_number: list[tuple[int, QueueKey, Sequence]] = field(default_factory=list)


class WaitingQueue:
    """Waiting sequences, and the service that each tenant has had.

    Among equal priorities the least served tenant goes first, and within a tenant the smallest key. So a tenant with a
    thousand requests delays another by about one of them. A tenant without a waiting request starts level with the least
    served one that has some: service cannot be saved up. Of one tenant alone, requests go in the order of their keys.
    Source: Sheng et al. 2024, Fairness in Serving Large Language Models, algorithm 2 (virtual token counter).

    served: by tenant, tokens weighted by PROMPT_COST and OUTPUT_COST. active: by tenant, number of its requests that wait
    or run. num_tokens: slots that the waiting ones need until they end.
    """

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.num_tokens = 0
        self._queues: dict[str, _TenantQueue] = {}
        self.active: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(queue.keys) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(queue.keys for queue in self._queues.values())

    def is_over_share(self, tenant: str, limit: int) -> bool:
        """Return whether a tenant has its share of `limit` places or more."""
        num_waiting = len(self._queues[tenant].keys) if tenant in self._queues else 0
        return num_waiting >= limit // len(self._queues.keys() | {tenant})

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence at the place of its key. One that was never admitted is a new request of its tenant.

        None of a prompt is cacheable while all of its logits are needed.
        """
        tenant = sequence.request.tenant
        if sequence.num_cached is None:
            if tenant not in self._queues:
                others = self._queues or self.active.keys() - {tenant}
                least = min((self.served[other] for other in others), default=0)
                self.served[tenant] = max(self.served[tenant], least)
            self.active[tenant] += 1
        needs_all = sequence.request.sampling.prompt_logprobs is not None and sequence.num_emitted == 0
        sequence.cacheable = np.array([] if needs_all else sequence.tokens[:-1], dtype=np.int64)
        if tenant not in self._queues:
            self._queues[tenant] = _TenantQueue()
        queue, key = self._queues[tenant], sequence.key
        queue.keys[sequence] = key
        heapq.heappush(queue.by_key, (key, sequence))
        heapq.heappush(queue.by_number, (key.number, key, sequence))
        self.num_tokens += len(sequence.slots)

    def leave(self, tenant: str) -> None:
        """End the count of a request. Service is forgotten when no requests are left."""
        self.active[tenant] -= 1
        if not self.active[tenant]:
            del self.active[tenant]
        if not self.active:
            self.served.clear()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is queued. Heaps are made again once most of their entries are removed ones."""
        queue = self._queues[sequence.request.tenant]
        del queue.keys[sequence]
        self.num_tokens -= len(sequence.slots)
        if not queue.keys:
            del self._queues[sequence.request.tenant]
            return
        if max(len(queue.by_key), len(queue.by_number)) > 2 * len(queue.keys) + SPARE_ENTRIES:
            queue.by_key = sorted((key, waiting) for waiting, key in queue.keys.items())
            queue.by_number = sorted((key.number, key, waiting) for waiting, key in queue.keys.items())
        while queue.keys.get(queue.by_key[0][-1]) != queue.by_key[0][0]:
            heapq.heappop(queue.by_key)
        while queue.keys.get(queue.by_number[0][-1]) != queue.by_number[0][1]:
            heapq.heappop(queue.by_number)

    def next(self, num_admitted: int) -> tuple[Sequence, Sequence]:
        """Return the most urgent sequence, among equals that of the least served tenant; and the one to admit next.

        They are the same, but every RESERVED_SHARE-th admission takes the oldest of the least served tenant, and every
        RESERVED_SHARE-th of these the oldest of all. So no request starves, whatever priorities and tenants do.
        """
        heads = [queue.by_key[0][-1] for queue in self._queues.values()]
        *_, first = min((-head.request.priority, self.served[head.request.tenant], head.key, head) for head in heads)
        if num_admitted % RESERVED_SHARE < RESERVED_SHARE - 1:
            return first, first
        if num_admitted // RESERVED_SHARE % RESERVED_SHARE == RESERVED_SHARE - 1:
            return first, min(queue.by_number[0] for queue in self._queues.values())[-1]
        *_, least = min((self.served[head.request.tenant], head.key, head.request.tenant) for head in heads)
        return first, self._queues[least].by_number[0][-1]
