"""Where a sequence ends: accepted tokens in, those that are emitted and the reason out. Integers only.

Who waits, in which order, what each needs to begin, and how the rows of a step are shared out. Integers only; knows no
tensors.

A request's place is the time of its arrival, moved ahead by what its priority is worth. It never changes, so that of equal
priority the first comes first, and whoever waits long enough is ahead of every newcomer, however urgent.

Decides who does how much in a step, and what becomes of accepted tokens. Integers only; knows no tensors.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from eyas.cache.prefix_cache import PrefixCache, Slots
from eyas.config import EngineConfig, TreeConfig
from eyas.draft_protocol import TreeBudget
from eyas.engine.sequence import QueueKey, ScheduledSequence, Sequence
from eyas.errors import InvalidRequest, Overloaded
from eyas.request import Chunk, FinishReason, Request, VerifyStep
from eyas.sampling.acceptance import Accepted
from eyas.tree import DraftTree


def trim(sequence: Sequence, tokens: tuple[int, ...], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Up to the first stop token, that one included; a stop comes before the length."""
    for index, token in enumerate(tokens[: sequence.num_remaining]):
        if _stops(sequence, token, eos_ids):
            return tokens[: index + 1]
    return tokens[: sequence.num_remaining]


def finish_reason(sequence: Sequence, tokens: tuple[int, ...], eos_ids: frozenset[int]) -> FinishReason | None:
    """Why the sequence ends with trimmed `tokens`; None if it goes on."""
    if _stops(sequence, tokens[-1], eos_ids):
        return "stop"
    return "length" if len(tokens) == sequence.num_remaining else None


def _stops(sequence: Sequence, token: int, eos_ids: frozenset[int]) -> bool:
    sampling = sequence.request.sampling
    return token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)


# Tokens that an admitted sequence should be able to grow by before slots run out: less would preempt it at once.
GROWTH = 16
# The shortest and the longest time after which a refused client is told to try again, in seconds.
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 60.0
_PACE = 32

_place = attrgetter("place")


def slots_needed(sequence: Sequence, nodes: int) -> int:
    """Slots that a sequence needs soon: for its tokens without KV, and for trees of `nodes`, or some growth.

    Never more than it needs to its end, so that a sequence alone always fits.
    """
    return len(sequence.tokens) - sequence.computed + min(sequence.num_remaining, max(nodes, GROWTH))


class RowAllocation(NamedTuple):
    """A sequence's part of a step: so many rows of its prompt, or a tree."""

    sequence: Sequence
    num_rows: int
    tree: DraftTree | None


def allocate_rows(
    running: Seq[Sequence], trees: Mapping[str, DraftTree], prompt_rows: int, num_slots: int
) -> list[RowAllocation]:
    """Rows for the running sequences, in order of place, as many as there are slots; there must be one for each.

    Every sequence that decodes gets a row, whatever the prompts ask for. What is left goes to trees, by request id, and to
    prompts, up to `prompt_rows`.
    """
    spare = num_slots - len(running)
    shares = []
    for sequence in running:
        tree = None
        if sequence.prefilling:
            num_rows = min(len(sequence.tokens) - sequence.computed, prompt_rows, spare + 1)
            prompt_rows -= num_rows
        else:
            tree = trees.get(sequence.request.id)
            if tree is None or len(tree) > spare + 1:
                tree = DraftTree.root_only(sequence.tokens[-1])
            num_rows = len(tree)
        if num_rows:
            spare -= num_rows - 1
            shares.append(RowAllocation(sequence, num_rows, tree))
    return shares


def insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Keep a list in order of place."""
    bisect.insort(sequences, sequence, key=_place)


def gives_way(running: Seq[Sequence], sequence: Sequence, nodes: int, config: EngineConfig) -> bool:
    """Whether the last in line runs behind the place of a waiting sequence, and that one is certain to be admitted once all
    such have left: nobody gives way in vain. Places do not change, so that nobody gives way twice to the same."""
    ahead = running[: bisect.bisect_left(running, sequence.place, key=_place)]
    if len(ahead) >= min(len(running), config.max_num_seqs):
        return False
    held = sum(s.computed + slots_needed(s, nodes) for s in ahead)
    return held + slots_needed(sequence, nodes) <= config.max_kv_tokens


def remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a list in order of place."""
    index = bisect.bisect_left(sequences, sequence.place, key=_place)
    assert sequences[index] is sequence, "a sequence is not where its place says"
    del sequences[index]


class WaitingQueue:
    """The bounded queue of requests, in order of place. clock: the present time in seconds.

    num_slots: what the requests need together to their ends.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._queue: list[Sequence] = []
        self.num_slots = 0
        self._num_arrived = 0
        self._admitted: deque[float] = deque(maxlen=_PACE)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> Sequence:
        """Whose turn it is."""
        return self._queue[0]

    def add(self, request: Request, num_open: int) -> Sequence:
        """Queue a new request. num_open: how many of the queue may start with the next step; they do not count.

        Raises Overloaded, with a time to try again, if the queue is full.
        """
        if len(self._queue) >= self._config.max_queued_requests + num_open:
            seconds = self._retry_after()
            raise Overloaded(f"{len(self._queue)} requests are waiting already; try again in {seconds:.1f} s", seconds)
        due = self._clock() - request.priority * self._config.priority_aging_s
        sequence = Sequence.start(request, QueueKey(due, self._num_arrived))
        self._num_arrived += 1
        self.put_back(sequence)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that has run already; its place puts it before all that came later."""
        self.num_slots += sequence.num_slots
        insert(self._queue, sequence)

    def admit(self) -> Sequence:
        """Take out the first."""
        self._admitted.append(self._clock())
        sequence = self._queue.pop(0)
        self.num_slots -= sequence.num_slots
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is to wait no longer."""
        remove(self._queue, sequence)
        self.num_slots -= sequence.num_slots

    def _retry_after(self) -> float:
        """How often the queue got shorter of late."""
        if not self._admitted:
            return 1.0
        pace = (self._clock() - self._admitted[0]) / len(self._admitted)
        return min(max(pace, SHORTEST_RETRY), LONGEST_RETRY)


class Scheduler:
    """A request is admitted, in order of place, when there are slots for what it needs soon; who runs behind its place gives
    way to it, if that helps. Should slots run out all the same, cached prefixes give way first, then trees, and then the
    last in line. Who gives way waits and is computed anew.

    config: num_slots must be set. clock: the present time in seconds. waiting: the queue, for others to look at.
    """

    def __init__(
        self, config: EngineConfig, tree: TreeConfig, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert config.max_kv_tokens > 0, "the slots must have been counted"
        self._config = config
        self._tree = tree
        self._eos_ids = eos_ids
        self._clock = clock
        self._cache = PrefixCache(config.max_kv_tokens)
        self.waiting = WaitingQueue(config, clock)
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
        if need > self._config.max_kv_tokens:
            raise InvalidRequest(
                f"the request needs {need} token slots (prompt {len(request.prompt_ids)} + max_tokens "
                f"{request.sampling.max_tokens}), but the engine has {self._config.max_kv_tokens}"
            )
        if request.id in self._by_id:
            raise InvalidRequest(f"request id {request.id!r} is already running; ids must be unique")
        num_open = self._config.max_num_seqs - len(self._running)
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

    def schedule(self, trees: Mapping[str, DraftTree]) -> tuple[ScheduledSequence, ...]:
        """Admit what fits, then give every running sequence its rows: the nodes of its tree, or a share of the prefill
        budget. trees: by request id; a sequence without one decodes plainly."""
        self._cache.free(self._lent)  # of a step that failed before its commit
        self._lent = self._cache.no_slots
        self._began, self._preempted = [], []
        self._admit()
        while self._cache.num_available < len(self._running):
            self._preempt()
        shares = allocate_rows(self._running, trees, self._config.max_prefill_tokens, self._cache.num_available)
        self._lent = self._cache.take(sum(share.num_rows for share in shares))
        ends = itertools.accumulate(share.num_rows for share in shares)
        return tuple(
            ScheduledSequence(share.sequence, self._lent[end - share.num_rows : end], share.sequence.computed, share.tree)
            for share, end in zip(shares, ends, strict=True)
        )

    def budget(self, sequence: Sequence, nodes: int = sys.maxsize) -> TreeBudget:
        """The largest tree that a sequence could use at the next step, of `nodes` at most; one node while its prompt is not
        done."""
        depth = 0 if sequence.prefilling else min(self._tree.num_steps, sequence.num_remaining - 1)
        most = min(nodes, self.most_nodes)
        return TreeBudget(most, depth) if depth > 0 and most > 1 else TreeBudget(1, 0)

    @property
    def most_nodes(self) -> int:
        """Of a tree at the next step; the more sequences run, the fewer."""
        return max(min(self._tree.num_draft_tokens, self._config.max_verify_tokens // max(len(self._running), 1)), 1)

    def commit(self, works: Seq[ScheduledSequence], accepted: Seq[Accepted | None]) -> list[Chunk]:
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
        return self._config.max_num_seqs

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
        return self._config.max_kv_tokens

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
        nodes = self._tree.num_draft_tokens
        reserved = sum(slots_needed(s, nodes) for s in self._running) if self.waiting else 0
        while self.waiting:
            sequence = self.waiting.first
            prefix = self._cache.find(sequence.cacheable[: self._cacheable])
            need = slots_needed(sequence, nodes) - len(prefix)
            if len(self._running) < self._config.max_num_seqs and reserved + need <= self._cache.num_available:
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

    def _keep(self, works: Seq[ScheduledSequence], accepted: Seq[Accepted | None]) -> None:
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

    def _emit(self, work: ScheduledSequence, outcome: Accepted) -> Chunk:
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
        is_draft_token = (True,) * num_foreseen + (False,) * (len(tokens) - num_foreseen)
        step = VerifyStep(tree.num_drafted, tree.depth, num_foreseen, tree.grown_ahead) if tree is not None else None
        if reason is not None:
            self._drop(sequence)
        num_cached = sequence.num_cached or 0 if first else 0
        return Chunk(sequence.request.id, tokens, is_draft_token, step, reason, num_cached=num_cached)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a request. What it has computed stays in the cache; that of a session is kept for its next turn."""
        del self._by_id[sequence.request.id]
        if sequence.prefix is None:
            self.waiting.remove(sequence)
            return
        remove(self._running, sequence)
        kept = self._config.session_cache_ttl_s if sequence.request.session else 0.0
        sequence.leave(self._cache, self._cacheable, self._clock() + kept)
