"""Decides which sequences run, how many rows each gets in a step, and what is kept and emitted afterwards. Integers only."""

from __future__ import annotations

import bisect
import itertools
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from eyas.api.request import Chunk, FinishReason, Request, TokenLogprob
from eyas.arrays import Ints
from eyas.cache.prefix_cache import CachedPrefix, PrefixCache, Slots
from eyas.cache.states import StateRows, StateStep
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.recurrent_states import SequenceStates
from eyas.engine.sequence import Chunks, DraftReply, Emitted, QueueKey, ScheduledSequence, Sequence
from eyas.engine.waiting_queue import OUTPUT_COST, PROMPT_COST, WaitingQueue, by_key
from eyas.errors import InvalidRequest, Overloaded
from eyas.protocol.commit import NO_TREE, TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees
from eyas.sampling.acceptance import StepOutputs

# Tokens that an admitted sequence should be able to grow by: with fewer it would be preempted at once.
GROWTH = 16
# Bounds of the time after which a refused client is asked to try again, in seconds.
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
# Admissions that the queue's speed is measured over.
_NUM_ADMISSIONS = 32


class Scheduler:
    """Scheduler that admits requests in the order of `WaitingQueue`, when there are slots for what they need soon.

    A key is the time of arrival, moved ahead by priority. Among a tenant's requests of equal priority the first comes first,
    and a request that waits long enough is ahead of every newcomer of higher priority.

    A running sequence is preempted for a more urgent one, and for one of a tenant that has less service and fewer running
    sequences, if that is sure to make room. When slots run out, cached prefixes are evicted first, then trees are left out,
    and then a sequence is preempted, see `last_in_turn`: it waits and is recomputed.

    running: in the order of their keys. sequences: all of them, by request id. admitted, preempted: ids of requests that
    left the queue, or went back to it, in the latest step. num_prompt_tokens: of all requests admitted so far.
    num_cached_tokens: those of them that were in the prefix cache.

    Args:
        config: its max_kv_tokens must be set.
        clock: the present time in seconds.
        states: rows for the states of recurrent layers, if the target has some.
    """

    def __init__(
        self,
        config: EngineConfig,
        tree: TreeConfig,
        eos_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
        states: StateRows | None = None,
    ) -> None:
        assert config.max_kv_tokens > 0, "the slots must have been counted"
        self.config = config
        self._tree = tree
        self._eos_ids = eos_ids
        self._clock = clock
        self.cache = PrefixCache(config.max_kv_tokens, states)
        self._max_cacheable = sys.maxsize if config.prefix_cache else 0
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.sequences: dict[str, Sequence] = {}
        self._numbers = itertools.count()
        self._num_admitted = 0
        self._admission_times: deque[float] = deque(maxlen=_NUM_ADMISSIONS)
        self._cancelled: dict[str, None] = {}
        self._step_slots: Slots = self.cache.no_slots
        self._num_steps = 0
        self._num_stashed = 0
        self._turns: dict[str, int] = {}
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request. Those that may start with the next step do not count towards max_queued_requests.

        Raises InvalidRequest if it can never fit, Overloaded, with a time to try again, if the queue is full and the tenant
        has its share of it.
        """
        need = len(request.prompt_ids) + request.sampling.max_tokens
        if need > self.config.max_kv_tokens:
            raise InvalidRequest(
                f"the request needs {need} token slots (prompt {len(request.prompt_ids)} + max_tokens "
                f"{request.sampling.max_tokens}), but the engine has {self.config.max_kv_tokens}"
            )
        if request.id in self.sequences:
            raise InvalidRequest(f"request id {request.id!r} is already running; ids must be unique")
        limit = self.config.max_queued_requests + self.config.max_num_seqs
        if len(self.sequences) >= limit and self.waiting.is_over_share(request.tenant, limit - len(self.running)):
            seconds = self._retry_after()
            raise Overloaded(f"{len(self.waiting)} requests are waiting already; try again in {seconds:.1f} s", seconds)
        due = self._clock() - request.priority * self.config.priority_aging_s
        slots = np.empty(need, dtype=np.int64)
        sequence = Sequence(request, QueueKey(due, next(self._numbers)), list(request.prompt_ids), slots)
        self.sequences[request.id] = sequence
        self.waiting.add(sequence)

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
            self._preempt(last_in_turn(self.running, self.running))
        running: Seq[Sequence] = self.running
        if len(self.waiting.active) > 1 and len({s.request.tenant for s in running}) > 1:
            running = in_turns(running, self._turns)
        allocations = allocate_rows(running, trees, self.config.max_prefill_tokens, self.cache.num_available)
        self._num_steps += 1
        self._num_stashed = 0
        turns = {sequence.request.tenant: self._num_steps for sequence, _, tree in allocations if tree is None}
        self._turns = {t: n for t, n in self._turns.items() if t in self.waiting.active} | turns
        slots = self._step_slots = self.cache.take(sum([num_rows for _, num_rows, _ in allocations]))
        scheduled, start = list[ScheduledSequence](), 0
        for sequence, num_rows, tree in allocations:
            own = slots[start : start + num_rows]
            states = self._state_step(sequence, num_rows, tree) if sequence.states is not None else None
            scheduled.append(ScheduledSequence(sequence, own, sequence.computed, tree, states))
            start += num_rows
        return tuple(scheduled)

    def commit(self, batch: Seq[ScheduledSequence], outputs: StepOutputs, edited: Collection[str] | None = None) -> Chunks:
        """Keep the slots of accepted paths, free the rest, and emit; one chunk per sequence that drew a token.

        Args:
            batch: the sequences of the step.
            outputs: what it gives them.
            edited: ids of requests whose trees are not the drafter's; None if no drafter needs the samples.
        """
        if self.cache.states is not None:
            self._advance_states(batch, outputs)
        kept, ends = self._keep_slots(batch, outputs)
        tokens = outputs.tokens.tolist()
        failed, emitted = list[Chunk](), list[Emitted]()
        start = first = 0
        for number, (scheduled, end, last) in enumerate(zip(batch, ends.tolist(), outputs.ends.tolist(), strict=True)):
            sequence, request = scheduled.sequence, scheduled.sequence.request
            sequence.extend(kept[start:end])
            details, own = outputs.details.get(number), tuple(tokens[first:last])
            start, first = end, last
            if edited is not None:
                is_known = scheduled.tree is not None and request.id not in edited
                sequence.samples = outputs[number].samples if is_known else ()
            if details and details.prompt_logprobs:
                sequence.prompt_logprobs[scheduled.first :] = details.prompt_logprobs
            if details and details.error:
                self._drop(sequence, keeps=False)
                is_invalid = details.is_invalid
                failed.append(Chunk(request.id, finish_reason="error", message=details.error, is_invalid=is_invalid))
            elif own:
                given = self._first_values(sequence) if scheduled.tree is None else ()
                emitted.append(Emitted(number, *self._append(sequence, own), *given))
        return Chunks(failed, batch, outputs, emitted)

    def tree_budgets(self, sequences: Seq[Sequence], sizes: Mapping[str, TreeBudget]) -> list[TreeBudget]:
        """Return the largest tree that each sequence can use in the next step.

        Inside a prompt that is a lone root. The last token that a sequence may emit is no drafted one.

        sizes: most nodes and levels by request id; a lone root for the others.
        """
        budgets = list[TreeBudget]()
        most_levels = self._tree.num_steps
        made = dict[tuple[int, int], TreeBudget]()  # most sequences share one
        for sequence in sequences:
            nodes, depth = sizes.get(sequence.request.id, NO_TREE)
            if sequence.request.num_draft_tokens:
                nodes = min(nodes, sequence.request.num_draft_tokens)
            depth = min(depth, most_levels, len(sequence.slots) - len(sequence.tokens) - 1)
            if sequence.prefilling or nodes == 1 or depth <= 0:
                nodes, depth = NO_TREE
            if (nodes, depth) not in made:
                made[nodes, depth] = TreeBudget(nodes, depth)
            budgets.append(made[nodes, depth])
        return budgets

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes of a tree in the next step; the more sequences run, the fewer."""
        share = self.config.max_verify_tokens // max(len(self.running), 1)
        return max(min(self._tree.num_draft_tokens, share), 1)

    def check(self) -> None:
        """Assert that every slot is free, cached, or owned by exactly one running sequence. Valid between steps."""
        prefixes = [s.prefix for s in self.running if s.prefix is not None]
        assert len(prefixes) == len(self.running), "a running sequence holds no prefix"
        states = [row for s in self.running if s.states is not None for row in s.states.held]
        self.cache.check([*(s.own_slots for s in self.running), self._step_slots], prefixes, states)
        assert len(self.sequences) == len(self.running) + len(self.waiting)

    def _state_step(self, sequence: Sequence, num_rows: int, tree: DraftTree | None) -> StateStep:
        """Return what recurrent layers read and write for the rows of a sequence in the step."""
        assert sequence.states is not None
        if tree is None:
            return sequence.states.prompt_step(sequence.computed, num_rows)
        if num_rows == 1:
            return sequence.states.tree_step(-1)
        start = self._num_stashed
        self._num_stashed += num_rows
        # One half of the stash has the nodes of the last step, which this one reads.
        half = stash_rows(self.config, self._tree)
        assert self._num_stashed <= half, f"{self._num_stashed} nodes of trees in a step, of {half}"
        return sequence.states.tree_step(start + half * (self._num_steps % 2))

    def _advance_states(self, batch: Seq[ScheduledSequence], outputs: StepOutputs) -> None:
        """Let the states of recurrent layers follow what a step keeps."""
        first = 0
        for scheduled, last in zip(batch, outputs.ends.tolist(), strict=True):
            states, step, is_tree = scheduled.sequence.states, scheduled.states, len(scheduled.slots) > 1
            assert states is not None
            assert step is not None
            if scheduled.tree is not None and is_tree:
                states.advance(scheduled.first, step.stash + outputs.nodes[first:last])
            else:
                states.advance(scheduled.first + len(scheduled.slots))
            first = last

    def _admit(self) -> None:
        """Let sequences run in the order of the queue while there are slots; preempt others for the most urgent one."""
        if len(self.running) == len(self.sequences):
            return
        nodes, only_first = self._tree.num_draft_tokens, False
        reserved = sum(slots_needed(s, nodes) for s in self.running)
        while len(self.running) < len(self.sequences):
            first, sequence = self.waiting.next(self._num_admitted)
            sequence = first if only_first else sequence
            prefix = self.cache.find(sequence.cacheable, sequence.request.cache_salt, to_resume=True)
            need = reserved + slots_needed(sequence, nodes) - len(prefix.slots)
            if len(self.running) < self.config.max_num_seqs and need <= self.cache.num_available:
                self._start(sequence, prefix, sequence is first)
                reserved += slots_needed(sequence, nodes)
                only_first = False
                continue
            self.cache.release(prefix, prefix.node.used)
            victims = preemptable(self.running, first, self.waiting.served)
            if not makes_room(self.running, victims, first, nodes, self.config):
                return
            if sequence is first:
                victim = last_in_turn(victims, self.running)
                reserved -= slots_needed(victim, nodes)
                self._preempt(victim)
            only_first = True

    def _start(self, sequence: Sequence, prefix: CachedPrefix, is_first: bool) -> None:
        """Let a waiting sequence run after a cached prefix. One that goes before a more urgent one is not preempted for it
        either."""
        self.waiting.remove(sequence)
        if not is_first:
            sequence.key = QueueKey(-math.inf, sequence.key.number)
        sequence.prefix, sequence.computed = prefix, len(prefix.slots)
        if self.cache.states is not None:
            num_prompt = len(sequence.request.prompt_ids)
            sequence.states = SequenceStates(self.cache, prefix, num_prompt, self._max_cacheable)
        sequence.slots[: sequence.computed], sequence.table = prefix.slots, (sequence.key.number, sequence.table[1] + 1)
        num_uncached = len(sequence.tokens) - sequence.computed
        sequence.prefilling = num_uncached > 1 or len(sequence.tokens) == len(sequence.request.prompt_ids)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.computed
            self.waiting.served[sequence.request.tenant] += PROMPT_COST * num_uncached
            self.num_prompt_tokens += len(sequence.tokens)
            self.num_cached_tokens += sequence.computed
        bisect.insort(self.running, sequence, key=by_key)
        self.admitted.append(sequence.request.id)
        self._num_admitted += 1
        self._admission_times.append(self._clock())

    def _preempt(self, sequence: Sequence) -> None:
        """Queue a running sequence again. What it has computed stays in the cache until it is evicted."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self.preempted.append(sequence.request.id)
        sequence.share(self.cache, self._max_cacheable)
        sequence.leave(self.cache, self._clock())
        sequence.drafted, sequence.epoch, sequence.samples = 0, sequence.epoch + 1, ()
        self.waiting.add(sequence)

    def _retry_after(self) -> float:
        """Return the mean seconds between the latest admissions, within bounds."""
        if not self._admission_times:
            return 1.0
        pace = (self._clock() - self._admission_times[0]) / len(self._admission_times)
        return min(max(pace, MIN_RETRY_S), MAX_RETRY_S)

    def _keep_slots(self, batch: Seq[ScheduledSequence], outputs: StepOutputs) -> tuple[Slots, Ints]:
        """Return the slots that a step keeps, all of a prompt and a path of a tree, and where the slots of each sequence end
        among these. All others are freed at once.
        """
        slots, self._step_slots = self._step_slots, self.cache.no_slots
        counts = np.array([len(scheduled.slots) for scheduled in batch], np.int64)
        starts = counts.cumsum() - counts
        lengths = outputs.ends.copy()
        lengths[1:] -= outputs.ends[:-1]
        is_kept = np.zeros(len(slots), np.bool_)
        is_kept[np.repeat(starts, lengths) + outputs.nodes] = True
        for number, scheduled in enumerate(batch):
            if scheduled.tree is None:
                lengths[number] = counts[number]
                is_kept[starts[number] : starts[number] + counts[number]] = True
        self.cache.free(slots[~is_kept])
        kept: Slots = slots[is_kept]  # nodes of a path are in order
        return kept, lengths.cumsum()

    def _first_values(self, sequence: Sequence) -> tuple[tuple[TokenLogprob, ...], int]:
        """Share a prompt that is computed. Return the log-probabilities of its tokens, and how many of them were
        cached.
        """
        sequence.share(self.cache, self._max_cacheable)
        if sequence.num_emitted:
            return (), 0
        sampling = sequence.request.sampling
        sequence.end_ids = sampling.end_ids(self._eos_ids)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.prompt_logprobs is not None:  # the first token has none
            prompt_logprobs = (TokenLogprob(sequence.tokens[0], None), *sequence.prompt_logprobs)
        return prompt_logprobs, sequence.num_cached or 0

    def _append(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Emit accepted tokens up to the sequence's end: these, and why it ends with them; None if it goes on."""
        reason: FinishReason | None = None
        num_remaining = len(sequence.slots) - len(sequence.tokens)
        if len(tokens) >= num_remaining:
            tokens, reason = tokens[:num_remaining], "length"
        if not sequence.end_ids.isdisjoint(tokens):
            index = next(index for index, token in enumerate(tokens) if token in sequence.end_ids)
            tokens, reason = tokens[: index + 1], "stop"
        sequence.tokens.extend(tokens)
        self.waiting.served[sequence.request.tenant] += OUTPUT_COST * len(tokens)
        sequence.prefilling = False
        if reason is not None:
            self._drop(sequence)
        return tokens, reason

    def _drop(self, sequence: Sequence, keeps: bool = True) -> None:
        """Forget a request. What it has computed stays in the cache if `keeps`, for longer if it belongs to a session."""
        del self.sequences[sequence.request.id]
        self.waiting.leave(sequence.request.tenant)
        if sequence.prefix is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if keeps:
            sequence.share(self.cache, self._max_cacheable)
        ttl = self.config.session_cache_ttl_s if sequence.request.session else 0.0
        sequence.leave(self.cache, self._clock() + ttl if keeps else sequence.prefix.node.used, keeps)


def stash_rows(config: EngineConfig, tree: TreeConfig) -> int:
    """Return the most nodes of trees in a step, which recurrent layers stash. A lone root is none."""
    return min(config.max_verify_tokens, tree.num_draft_tokens * config.max_num_seqs)


def slots_needed(sequence: Sequence, nodes: int) -> int:
    """Return the slots that a sequence needs soon: for its tokens without KV, and for trees of `nodes`, or some growth.

    Never more than it needs to its end, so that a sequence alone always fits.
    """
    return min(len(sequence.tokens) + max(nodes, GROWTH), len(sequence.slots)) - sequence.computed


def preemptable(running: Seq[Sequence], sequence: Sequence, served: Mapping[str, int]) -> list[Sequence]:
    """Return the running sequences that may be preempted for a waiting one, in the order of their keys.

    These are less urgent ones that arrived later. If nothing runs of the waiting one's tenant, these are also all but the
    first sequence of every tenant with more service.
    """
    tenant, priority = sequence.request.tenant, sequence.request.priority
    num_running = Counter(s.request.tenant for s in running)
    spare = {name: num - 1 for name, num in num_running.items() if served[tenant] < served[name]}
    found = []
    for other in reversed(running):
        name = other.request.tenant
        if not num_running[tenant] and spare.get(name, 0) > 0 and other.request.priority <= priority:
            spare[name] -= 1
            found.append(other)
        elif other.request.priority < priority and other.key > sequence.key:
            found.append(other)
    return found[::-1]


def makes_room(running: Seq[Sequence], victims: Seq[Sequence], sequence: Sequence, nodes: int, config: EngineConfig) -> bool:
    """Return whether a waiting sequence is sure to be admitted once all `victims` have left."""
    if len(running) - len(victims) >= min(len(running), config.max_num_seqs):
        return False
    kept = set(running).difference(victims)
    held = sum(s.computed + slots_needed(s, nodes) for s in kept)
    return held + slots_needed(sequence, nodes) <= config.max_kv_tokens


def last_in_turn(candidates: Seq[Sequence], running: Seq[Sequence]) -> Sequence:
    """Return the sequence to preempt first: of each tenant its last; among them the least urgent, of the tenant that runs
    most.

    candidates: in the order of their keys.
    """
    num_running = Counter(s.request.tenant for s in running)
    last = {s.request.tenant: s for s in candidates}
    return max(last.values(), key=lambda s: (-s.request.priority, num_running[s.request.tenant], s.key))


def in_turns(running: Seq[Sequence], turns: Mapping[str, int]) -> Seq[Sequence]:
    """Return the sequences of several tenants in the order in which they get rows: among equal priorities, tenants take
    turns with their prompts. turns: number of the last step with prompt rows of each tenant.
    """
    num_prompts: Counter[str] = Counter()
    order = {}
    for sequence in running:
        tenant = sequence.request.tenant
        order[sequence] = (-sequence.request.priority, num_prompts[tenant], turns.get(tenant, 0), sequence.key)
        num_prompts[tenant] += sequence.prefilling
    return sorted(running, key=order.__getitem__)


def allocate_rows(
    running: Seq[Sequence], trees: Mapping[str, DraftTree], prompt_rows: int, num_slots: int
) -> list[tuple[Sequence, int, DraftTree | None]]:
    """Share the rows of a step among the running sequences, in their order: the number of rows and the tree of each that
    gets some. The tree is None for prompt rows.

    Every decoding sequence gets a row, however long the prompts are. The rest goes to trees, by request id, and to prompts,
    up to `prompt_rows`. num_slots: free slots, at least one per sequence.
    """
    spare = num_slots - len(running)
    allocations = list[tuple[Sequence, int, DraftTree | None]]()
    lone_roots = iter(DraftTrees.root_only([s.tokens[-1] for s in running if not (s.prefilling or s.request.id in trees)]))
    for sequence in running:
        if sequence.prefilling:
            num_rows = min(len(sequence.tokens) - sequence.computed, prompt_rows, spare + 1)
            prompt_rows -= num_rows
            tree = None
        else:
            tree = trees.get(sequence.request.id)
            if tree is None:
                tree = next(lone_roots)
            if tree.num_nodes > spare + 1:
                tree = DraftTree.root_only(sequence.tokens[-1])
            num_rows = tree.num_nodes
        if num_rows:
            spare -= num_rows - 1
            allocations.append((sequence, num_rows, tree))
    return allocations
