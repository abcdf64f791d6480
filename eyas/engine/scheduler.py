"""Decides which sequences run, how many rows each gets in a step, and what is kept and emitted afterwards. Integers only."""

from __future__ import annotations

import bisect
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

import numpy as np

from eyas.cache.prefix_cache import PrefixCache, Slots
from eyas.config import EngineConfig, TreeConfig
from eyas.draft_protocol import TreeBudget
from eyas.engine.sequence import DraftReply, QueueKey, ScheduledSequence, Sequence
from eyas.errors import InvalidRequest, Overloaded
from eyas.request import Chunk, FinishReason, Request, TokenLogprob, VerifyStep
from eyas.sampling.acceptance import Accepted, VerifyOutput
from eyas.tree import DraftTree

# Tokens that an admitted sequence should be able to grow by: with fewer it would be preempted at once.
GROWTH = 16
# Bounds of the time after which a refused client is asked to try again, in seconds.
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
# Admissions that the queue's speed is measured over.
_NUM_ADMISSIONS = 32

_key = attrgetter("key")


class Scheduler:
    """Admits requests in the order of their keys, when there are slots for what they need soon.

    A key is the time of arrival, moved ahead by priority. It never changes, so that among equal priorities the first comes
    first, and a request that waits long enough is ahead of every newcomer of higher priority.

    A running sequence is preempted for a waiting one with a smaller key, if that is sure to make room for it. When slots run
    out, cached prefixes are evicted first, then trees are left out, and then the last sequence is preempted: it waits and is
    recomputed.

    waiting, running: in the order of their keys. sequences: all of them, by request id. admitted, preempted: ids of requests
    that left the queue, or went back to it, in the latest step.
    """

    def __init__(
        self, config: EngineConfig, tree: TreeConfig, eos_ids: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """config: its max_kv_tokens must be set. clock: the present time in seconds."""
        assert config.max_kv_tokens > 0, "the slots must have been counted"
        self.config = config
        self._tree = tree
        self._eos_ids = eos_ids
        self._clock = clock
        self.cache = PrefixCache(config.max_kv_tokens)
        self._max_cacheable = sys.maxsize if config.prefix_cache else 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.sequences: dict[str, Sequence] = {}
        self._numbers = itertools.count()
        self._admission_times: deque[float] = deque(maxlen=_NUM_ADMISSIONS)
        self._cancelled: dict[str, None] = {}
        self._step_slots: Slots = self.cache.no_slots
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. Those that may start with the next step do not count towards max_queued_requests.

        Raises InvalidRequest if it can never fit, Overloaded, with a time to try again, if the queue is full.
        """
        need = len(request.prompt_ids) + request.sampling.max_tokens
        if need > self.config.max_kv_tokens:
            raise InvalidRequest(
                f"the request needs {need} token slots (prompt {len(request.prompt_ids)} + max_tokens "
                f"{request.sampling.max_tokens}), but the engine has {self.config.max_kv_tokens}"
            )
        if request.id in self.sequences:
            raise InvalidRequest(f"request id {request.id!r} is already running; ids must be unique")
        num_open = self.config.max_num_seqs - len(self.running)
        if len(self.waiting) >= self.config.max_queued_requests + num_open:
            seconds = self._retry_after()
            raise Overloaded(f"{len(self.waiting)} requests are waiting already; try again in {seconds:.1f} s", seconds)
        due = self._clock() - request.priority * self.config.priority_aging_s
        sequence = Sequence(request, QueueKey(due, next(self._numbers)), list(request.prompt_ids))
        self.sequences[request.id] = sequence
        self._queue(sequence)

    def cancel(self, request_id: str) -> None:
        """Mark a request; its slots are free after `reap`. Unknown ids are ignored: it may just have finished."""
        if request_id in self.sequences:
            self._cancelled[request_id] = None

    def reap(self) -> list[Chunk]:
        """Drop cancelled requests; one final chunk each."""
        cancelled, self._cancelled = self._cancelled, {}
        for request_id in cancelled:
            self._drop(self.sequences[request_id])
        return [Chunk(request_id, finish_reason="cancelled") for request_id in cancelled]

    def schedule(self, drafts: Iterable[DraftReply]) -> tuple[ScheduledSequence, ...]:
        """Admit what fits, then give every running sequence its rows: the nodes of its tree, or a share of the prefill
        budget.

        drafts: the drafter's replies; a sequence without a tree decodes plainly.
        """
        if len(self._step_slots):  # of a step that failed before its commit
            self.cache.free(self._step_slots)
            self._step_slots = self.cache.no_slots
        self.admitted, self.preempted = [], []
        trees: dict[str, DraftTree] = {}
        for reply in drafts:
            reply.sequence.drafted, reply.sequence.epoch = reply.drafted, reply.epoch
            if reply.tree is not None:
                trees[reply.sequence.request.id] = reply.tree
        self._admit()
        while self.cache.num_available < len(self.running):
            self._preempt_last()
        allocations = allocate_rows(self.running, trees, self.config.max_prefill_tokens, self.cache.num_available)
        self._step_slots = self.cache.take(sum(num_rows for _, num_rows, _ in allocations))
        ends = itertools.accumulate(num_rows for _, num_rows, _ in allocations)
        return tuple(
            ScheduledSequence(sequence, self._step_slots[end - num_rows : end], sequence.computed, tree)
            for (sequence, num_rows, tree), end in zip(allocations, ends, strict=True)
        )

    def commit(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput]) -> list[Chunk]:
        """Keep the slots of accepted paths, free the rest, and emit; one chunk per sequence that drew a token."""
        self._keep_slots(batch, outputs)
        chunks = []
        for scheduled, output in zip(batch, outputs, strict=True):
            sequence = scheduled.sequence
            sequence.samples = output.samples if scheduled.tree is not None else ()
            if output.prompt_logprobs:
                sequence.prompt_logprobs[scheduled.first :] = output.prompt_logprobs
            if output.error:
                self._drop(sequence, keeps=False)
                chunks.append(Chunk(sequence.request.id, finish_reason="error", message=output.error))
            elif output.accepted is not None:
                chunks.append(self._emit(scheduled, output.accepted, output.logprobs))
        return chunks

    def tree_budget(self, sequence: Sequence, nodes: int = sys.maxsize) -> TreeBudget:
        """The largest tree that a sequence can use in the next step, of `nodes` at most; one node inside a prompt."""
        depth = 0 if sequence.prefilling else min(self._tree.num_steps, sequence.num_remaining - 1)
        most = min(nodes, self.max_tree_nodes)
        return TreeBudget(most, depth) if depth > 0 and most > 1 else TreeBudget(1, 0)

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes of a tree in the next step; the more sequences run, the fewer."""
        share = self.config.max_verify_tokens // max(len(self.running), 1)
        return max(min(self._tree.num_draft_tokens, share), 1)

    def check(self) -> None:
        """Assert that every slot is free, cached, or owned by exactly one running sequence. Valid between steps."""
        prefixes = [s.prefix for s in self.running if s.prefix is not None]
        assert len(prefixes) == len(self.running), "a running sequence holds no prefix"
        self.cache.check([*(s.own_slots for s in self.running), self._step_slots], prefixes)
        assert len(self.sequences) == len(self.running) + len(self.waiting)

    def _admit(self) -> None:
        nodes = self._tree.num_draft_tokens
        reserved = sum(slots_needed(s, nodes) for s in self.running) if self.waiting else 0
        while self.waiting:
            sequence = self.waiting[0]
            prefix = self.cache.find(sequence.cacheable)
            need = slots_needed(sequence, nodes) - len(prefix.slots)
            if len(self.running) < self.config.max_num_seqs and reserved + need <= self.cache.num_available:
                reserved += need
                self._admission_times.append(self._clock())
                del self.waiting[0]
                sequence.begin(prefix)
                self.admitted.append(sequence.request.id)
                bisect.insort(self.running, sequence, key=_key)
                continue
            self.cache.release(prefix, prefix.node.used)
            if not preempts_last(self.running, sequence, nodes, self.config):
                return
            reserved -= slots_needed(self.running[-1], nodes)
            self._preempt_last()

    def _preempt_last(self) -> None:
        """Queue the last running sequence again. What it has computed stays in the cache until it is evicted."""
        self.num_preemptions += 1
        sequence = self.running.pop()
        self.preempted.append(sequence.request.id)
        sequence.share(self.cache, self._max_cacheable)
        sequence.leave(self.cache, self._clock())
        sequence.drafted, sequence.epoch, sequence.samples = 0, sequence.epoch + 1, ()
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Queue a sequence, at the place of its key. None of a prompt is cacheable while all of its logits are needed."""
        needs_all = sequence.request.sampling.prompt_logprobs is not None and sequence.num_emitted == 0
        tokens = [] if needs_all else sequence.tokens[:-1][: self._max_cacheable]
        sequence.cacheable = np.array(tokens, dtype=np.int64)
        bisect.insort(self.waiting, sequence, key=_key)

    def _retry_after(self) -> float:
        """Mean seconds between the latest admissions, within bounds."""
        if not self._admission_times:
            return 1.0
        pace = (self._clock() - self._admission_times[0]) / len(self._admission_times)
        return min(max(pace, MIN_RETRY_S), MAX_RETRY_S)

    def _keep_slots(self, batch: Seq[ScheduledSequence], outputs: Seq[VerifyOutput]) -> None:
        """Give each sequence the slots of its accepted rows, and free all others of the step at once."""
        rows: list[int] = []
        ends: list[int] = []
        start = 0
        for scheduled, output in zip(batch, outputs, strict=True):
            accepted = output.accepted if scheduled.tree is not None else None
            rows += [start + row for row in (accepted.path if accepted else range(len(scheduled.slots)))]
            ends.append(len(rows))
            start += len(scheduled.slots)
        kept = self._step_slots[rows]
        rejected = np.ones(len(self._step_slots), dtype=np.bool_)
        rejected[rows] = False
        self.cache.free(self._step_slots[rejected])
        self._step_slots = self.cache.no_slots
        for scheduled, first, end in zip(batch, [0, *ends], ends, strict=False):
            scheduled.sequence.extend(kept[first:end])

    def _emit(self, scheduled: ScheduledSequence, accepted: Accepted, logprobs: tuple[TokenLogprob, ...]) -> Chunk:
        sequence, tree = scheduled.sequence, scheduled.tree
        if tree is None:
            sequence.share(self.cache, self._max_cacheable)
        num_cached, prompt_logprobs = 0, list[TokenLogprob]()
        if sequence.num_emitted == 0:
            num_cached = sequence.num_cached or 0
            if sequence.request.sampling.prompt_logprobs is not None:  # the first token has none
                prompt_logprobs = [TokenLogprob(sequence.tokens[0], None), *sequence.prompt_logprobs]
        tokens, reason = cut_at_end(sequence, accepted.tokens, self._eos_ids)
        sequence.tokens.extend(tokens)
        sequence.prefilling = False
        num_drafted = min(len(tokens), len(accepted.tokens) - 1)
        if reason is not None:
            self._drop(sequence)
        return Chunk(
            sequence.request.id,
            tokens,
            is_draft_token=(True,) * num_drafted + (False,) * (len(tokens) - num_drafted),
            verify_step=VerifyStep(tree.num_drafted, tree.depth, num_drafted, tree.grown_ahead) if tree else None,
            finish_reason=reason,
            logprobs=logprobs[: len(tokens)],
            prompt_logprobs=tuple(prompt_logprobs),
            num_cached=num_cached,
        )

    def _drop(self, sequence: Sequence, keeps: bool = True) -> None:
        """Forget a request. What it has computed stays in the cache if `keeps`, for longer if it belongs to a session."""
        del self.sequences[sequence.request.id]
        queue = self.waiting if sequence.prefix is None else self.running
        found = queue.pop(bisect.bisect_left(queue, sequence.key, key=_key))
        assert found is sequence, "a sequence is not where its key says"
        if sequence.prefix is None:
            return
        if keeps:
            sequence.share(self.cache, self._max_cacheable)
        ttl = self.config.session_cache_ttl_s if sequence.request.session else 0.0
        sequence.leave(self.cache, self._clock() + ttl if keeps else sequence.prefix.node.used)


def slots_needed(sequence: Sequence, nodes: int) -> int:
    """Slots that a sequence needs soon: for its tokens without KV, and for trees of `nodes`, or some growth.

    Never more than it needs to its end, so that a sequence alone always fits.
    """
    return min(len(sequence.tokens) + max(nodes, GROWTH), len(sequence.slots)) - sequence.computed


def preempts_last(running: Seq[Sequence], sequence: Sequence, nodes: int, config: EngineConfig) -> bool:
    """Whether the last running sequence is preempted for a waiting one.

    It is if its key is larger, and the waiting one is sure to be admitted once all running ones with larger keys have left.
    Keys do not change, so that no sequence is preempted twice for the same one.
    """
    ahead = running[: bisect.bisect_left(running, sequence.key, key=_key)]
    if len(ahead) >= min(len(running), config.max_num_seqs):
        return False
    held = sum(s.computed + slots_needed(s, nodes) for s in ahead)
    return held + slots_needed(sequence, nodes) <= config.max_kv_tokens


def allocate_rows(
    running: Seq[Sequence], trees: Mapping[str, DraftTree], prompt_rows: int, num_slots: int
) -> list[tuple[Sequence, int, DraftTree | None]]:
    """Share the rows of a step among the running sequences, in the order of their keys: the number of rows and the tree of
    each that gets some. The tree is None for prompt rows.

    Every decoding sequence gets a row, however long the prompts are. The rest goes to trees, by request id, and to prompts,
    up to `prompt_rows`. num_slots: free slots, at least one per sequence.
    """
    spare = num_slots - len(running)
    allocations = []
    for sequence in running:
        tree = None
        if sequence.prefilling:
            num_rows = min(len(sequence.tokens) - sequence.computed, prompt_rows, spare + 1)
            prompt_rows -= num_rows
        else:
            tree = trees.get(sequence.request.id)
            if tree is None or len(tree.tokens) > spare + 1:
                tree = DraftTree.root_only(sequence.tokens[-1])
            num_rows = len(tree.tokens)
        if num_rows:
            spare -= num_rows - 1
            allocations.append((sequence, num_rows, tree))
    return allocations


def cut_at_end(
    sequence: Sequence, tokens: tuple[int, ...], eos_ids: frozenset[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to the first stop token, that one included, or up to the sequence's length limit; and why the sequence
    ends with them, None if it goes on."""
    end_ids = sequence.request.sampling.end_ids(eos_ids)
    tokens = tokens[: sequence.num_remaining]
    for index, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: index + 1], "stop"
    return tokens, "length" if len(tokens) == sequence.num_remaining else None
