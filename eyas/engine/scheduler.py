"""Decides who does how much in a step, and what becomes of accepted tokens. Integers only; knows no tensors."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from eyas.cache.prefix import PrefixCache
from eyas.cache.slots import Slots
from eyas.commit import Budget
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.acceptance.match import Accepted
from eyas.engine.admission import Waiting, gives_way, insert, remove, share_out, slots_needed
from eyas.engine.sequence import Sequence, Work
from eyas.engine.stopping import finish_reason, trim
from eyas.errors import InvalidRequest
from eyas.request import Chunk, Request, Round
from eyas.tree import DraftTree


class Scheduler:
    """A request is admitted, in order of place, when there are slots for what it needs soon; who runs behind its place gives
    way to it, if that helps. Should slots run out all the same, cached prefixes give way first, then trees, and then the
    last in line. Who gives way waits and is computed anew.

    config: num_slots must be set. clock: the present time in seconds. waiting: the queue, for others to look at.
    """

    def __init__(
        self, config: EngineConfig, tree: TreeConfig, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert config.num_slots > 0, "the slots must have been counted"
        self._config = config
        self._tree = tree
        self._eos_ids = eos_ids
        self._clock = clock
        self._cache = PrefixCache(config.num_slots)
        self.waiting = Waiting(config, clock)
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._cancelled: list[Sequence] = []
        self._lent: Slots = self._cache.no_slots
        self._cacheable = sys.maxsize if config.prefix_cache else 0
        self._began: list[str] = []
        self._preempted: list[str] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never fit, Overloaded if the queue is full."""
        need = len(request.prompt_ids) + request.sampling.max_tokens
        if need > self._config.num_slots:
            raise InvalidRequest(
                f"the request needs {need} token slots (prompt {len(request.prompt_ids)} + max_tokens "
                f"{request.sampling.max_tokens}), but the engine has {self._config.num_slots}"
            )
        if request.id in self._by_id:
            raise InvalidRequest(f"request id {request.id!r} is already running; ids must be unique")
        num_open = self._config.max_running - len(self._running)
        self._by_id[request.id] = self.waiting.add(request, num_open)

    def cancel(self, request_id: str) -> None:
        """Mark a request; its slots are free after `reap`. Unknown ids are ignored: it may just have finished."""
        sequence = self._by_id.get(request_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelled.append(sequence)

    def reap(self) -> list[Chunk]:
        """Drop cancelled requests; one final chunk each."""
        cancelled, self._cancelled = [s for s in self._cancelled if s.request.id in self._by_id], []
        for sequence in cancelled:
            self._drop(sequence)
        return [Chunk(s.request.id, finish_reason="cancelled") for s in cancelled]

    def schedule(self, trees: Mapping[str, DraftTree]) -> tuple[Work, ...]:
        """Admit what fits, then give every running sequence its rows: the nodes of its tree, or a share of the prefill
        budget. trees: by request id; a sequence without one decodes plainly."""
        self._cache.free(self._lent)  # of a step that failed before its commit
        self._lent = self._cache.no_slots
        self._began, self._preempted = [], []
        self._admit()
        while self._cache.num_available < len(self._running):
            self._preempt()
        shares = share_out(self._running, trees, self._config.step_tokens, self._cache.num_available)
        self._lent = self._cache.take(sum(share.num_rows for share in shares))
        ends = itertools.accumulate(share.num_rows for share in shares)
        return tuple(
            Work(share.sequence, self._lent[end - share.num_rows : end], share.sequence.computed, share.tree)
            for share, end in zip(shares, ends, strict=True)
        )

    def budget(self, sequence: Sequence, nodes: int = sys.maxsize) -> Budget:
        """The largest tree that a sequence could use at the next step, of `nodes` at most; one node while its prompt is not
        done."""
        depth = 0 if sequence.prefilling else min(self._tree.depth, sequence.num_remaining - 1)
        most = min(nodes, self.most_nodes)
        return Budget(most, depth) if depth > 0 and most > 1 else Budget(1, 0)

    @property
    def most_nodes(self) -> int:
        """Of a tree at the next step; the more sequences run, the fewer."""
        return max(min(self._tree.nodes, self._config.step_rows // max(len(self._running), 1)), 1)

    def commit(self, works: Seq[Work], accepted: Seq[Accepted | None]) -> list[Chunk]:
        """Keep the slots of accepted paths, free the rest, and emit; one chunk per sequence that drew a token."""
        self._keep(works, accepted)
        return [self._emit(work, outcome) for work, outcome in zip(works, accepted, strict=True) if outcome is not None]

    @property
    def running(self) -> Seq[Sequence]:
        """Admitted sequences, in order of place."""
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def max_running(self) -> int:
        return self._config.max_running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free(self) -> int:
        """Slots that no running request owns or shares."""
        return self._cache.num_available

    @property
    def num_cached(self) -> int:
        """Slots that the prefix cache owns."""
        return self._cache.num_cached

    @property
    def num_slots(self) -> int:
        return self._config.num_slots

    @property
    def moves(self) -> tuple[Seq[str], Seq[str]]:
        """Ids of the requests that the last `schedule` let run, and of those that it sent back."""
        return self._began, self._preempted

    def cached_blocks(self, limit: int) -> list[int]:
        """Hashes of at most `limit` blocks of the prefix cache; see eyas.prefixes."""
        return self._cache.blocks(limit)

    def check(self) -> None:
        """Assert that every slot is free, cached, or owned by exactly one running sequence. Valid between steps."""
        prefixes = [s.prefix for s in self._running if s.prefix is not None]
        assert len(prefixes) == len(self._running), "a running sequence holds no prefix"
        self._cache.check([*(s.own_slots for s in self._running), self._lent], prefixes)
        assert len(self._by_id) == len(self._running) + len(self.waiting)

    def _admit(self) -> None:
        nodes = self._tree.nodes
        reserved = sum(slots_needed(s, nodes) for s in self._running) if self.waiting else 0
        while self.waiting:
            sequence = self.waiting.first
            prefix = self._cache.find(sequence.cacheable[: self._cacheable])
            need = slots_needed(sequence, nodes) - len(prefix)
            if len(self._running) < self._config.max_running and reserved + need <= self._cache.num_available:
                reserved += need
                self.waiting.admit().begin(prefix)
                self._began.append(sequence.request.id)
                insert(self._running, sequence)
                continue
            self._cache.release(prefix, prefix.node.used)
            if not gives_way(self._running, sequence, nodes, self._config):
                return
            reserved -= slots_needed(self._running[-1], nodes)
            self._preempt()

    def _preempt(self) -> None:
        """Queue the last in line again. What it has computed stays in the cache, until somebody needs the room."""
        self.num_preemptions += 1
        sequence = self._running.pop()
        self._preempted.append(sequence.request.id)
        sequence.leave(self._cache, self._cacheable, self._clock())
        sequence.start_over()
        self.waiting.put_back(sequence)

    def _keep(self, works: Seq[Work], accepted: Seq[Accepted | None]) -> None:
        """Settle all slots of the step at once."""
        rows: list[int] = []
        ends: list[int] = []
        start = 0
        for work, outcome in zip(works, accepted, strict=True):
            path = outcome.path if work.tree is not None and outcome is not None else range(len(work.slots))
            rows += [start + row for row in path]
            ends.append(len(rows))
            start += len(work.slots)
        kept = self._lent[rows]
        rejected = np.ones(len(self._lent), dtype=np.bool_)
        rejected[rows] = False
        self._cache.free(self._lent[rejected])
        self._lent = self._cache.no_slots
        for work, first, end in zip(works, [0, *ends], ends, strict=False):
            work.sequence.extend(kept[first:end])

    def _emit(self, work: Work, outcome: Accepted) -> Chunk:
        sequence, tree = work.sequence, work.tree
        if sequence.failure:
            del self._by_id[sequence.request.id]
            remove(self._running, sequence)
            sequence.discard(self._cache)
            return Chunk(sequence.request.id, finish_reason="error", message=sequence.failure)
        if tree is None:
            sequence.share(self._cache, self._cacheable)
        first = sequence.num_emitted == 0
        tokens = trim(sequence, outcome.tokens, self._eos_ids)
        reason = finish_reason(sequence, tokens, self._eos_ids)
        sequence.tokens.extend(tokens)
        num_foreseen = min(len(tokens), len(outcome.tokens) - 1)
        foreseen = (True,) * num_foreseen + (False,) * (len(tokens) - num_foreseen)
        step = Round(tree.num_drafted, tree.depth, num_foreseen, tree.grown_ahead) if tree is not None else None
        if reason is not None:
            self._drop(sequence)
        num_cached = sequence.num_cached or 0 if first else 0
        return Chunk(sequence.request.id, tokens, foreseen, step, reason, num_cached=num_cached)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a request. What it has computed stays in the cache; that of a session is kept for its next turn."""
        del self._by_id[sequence.request.id]
        if sequence.prefix is None:
            self.waiting.remove(sequence)
            return
        remove(self._running, sequence)
        kept = self._config.session_seconds if sequence.request.session else 0.0
        sequence.leave(self._cache, self._cacheable, self._clock() + kept)
