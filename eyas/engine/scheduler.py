"""Decides who does how much in a step, and what becomes of accepted tokens. Integers only; knows no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from eyas.cache.slots import SlotAllocator, Slots
from eyas.commit import Budget
from eyas.config import EngineConfig, TreeConfig
from eyas.engine.acceptance.match import Accepted
from eyas.engine.sequence import Sequence, Work
from eyas.errors import InvalidRequest, Overloaded
from eyas.request import Chunk, FinishReason, Request, Round
from eyas.tree import DraftTree


class Scheduler:
    """First come, first served. A request is admitted when all the slots that it may ever need are free, so that a
    running sequence never waits for slots."""

    def __init__(self, config: EngineConfig, tree: TreeConfig, eos_ids: frozenset[int]) -> None:
        self._config = config
        self._tree = tree
        self._eos_ids = eos_ids
        self._allocator = SlotAllocator(config.num_slots)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._promised = 0
        self._lent: list[Slots] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never fit, Overloaded if the queue is full."""
        need = self._need(request)
        if need > self._config.num_slots:
            raise InvalidRequest(
                f"the request needs {need} token slots (prompt {len(request.prompt_ids)} + max_tokens "
                f"{request.sampling.max_tokens} + tree {self._tree.nodes}), but the engine has {self._config.num_slots}"
            )
        if request.id in self._by_id:
            raise InvalidRequest(f"request id {request.id!r} is already running; ids must be unique")
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again later")
        sequence = Sequence.start(request)
        self._by_id[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Mark a request; its slots are free after `reap`. Unknown ids are ignored: it may just have finished."""
        if request_id in self._by_id:
            self._by_id[request_id].cancelled = True

    def reap(self) -> list[Chunk]:
        """Drop cancelled requests; one final chunk each."""
        cancelled = [s for s in self._by_id.values() if s.cancelled]
        for sequence in cancelled:
            self._drop(sequence)
        return [Chunk(s.request.id, finish_reason="cancelled") for s in cancelled]

    def schedule(self, trees: Mapping[str, DraftTree]) -> tuple[Work, ...]:
        """Admit what fits, then give every running sequence its rows: the nodes of its tree, or a share of the prefill
        budget. trees: by request id; a sequence without one decodes plainly."""
        for slots in self._lent:  # of a step that failed before its commit
            self._allocator.free(slots)
        self._admit()
        works = tuple(self._works(trees))
        self._lent = [work.slots for work in works]
        return works

    def budget(self, sequence: Sequence) -> Budget:
        """The largest tree that a sequence could use at the next step; one node while its prompt is not done."""
        depth = 0 if sequence.prefilling else min(self._tree.depth, sequence.num_remaining - 1)
        return Budget(self._tree.nodes if depth > 0 else 1, depth)

    def commit(self, works: Seq[Work], accepted: Seq[Accepted | None]) -> list[Chunk]:
        """Keep the slots of accepted paths, free the rest, and emit; one chunk per sequence that drew a token."""
        chunks = []
        self._lent = []
        for work, outcome in zip(works, accepted, strict=True):
            path = outcome.path if work.tree is not None and outcome is not None else range(len(work.slots))
            self._keep(work, np.fromiter(path, dtype=np.int64))
            if outcome is not None:
                chunks.append(self._emit(work, outcome))
        return chunks

    @property
    def running(self) -> Seq[Sequence]:
        """Admitted sequences, in order of admission."""
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Slots that no running request may come to need."""
        return self._config.num_slots - self._promised

    def check(self) -> None:
        """Assert that every slot is free or owned by exactly one running sequence. Valid between steps."""
        self._allocator.check_owners([s.slots for s in self._running] + self._lent)
        assert self._promised == sum(self._need(s.request) for s in self._running)
        assert set(self._by_id.values()) == {*self._running, *self._waiting}

    def _need(self, request: Request) -> int:
        return len(request.prompt_ids) + request.sampling.max_tokens + self._tree.nodes

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_running:
            need = self._need(self._waiting[0].request)
            if self._promised + need > self._config.num_slots:
                return
            self._promised += need
            self._running.append(self._waiting.popleft())

    def _works(self, trees: Mapping[str, DraftTree]) -> Iterator[Work]:
        budget = self._config.step_tokens
        for sequence in self._running:
            if not sequence.prefilling:
                tree = trees.get(sequence.request.id) or DraftTree.root_only(sequence.tokens[-1])
                yield Work(sequence, self._allocator.take(len(tree)), sequence.computed, tree)
            elif budget > 0:
                count = min(len(sequence.tokens) - sequence.computed, budget)
                budget -= count
                yield Work(sequence, self._allocator.take(count), sequence.computed)

    def _keep(self, work: Work, path: Slots) -> None:
        kept = work.slots[path]
        rejected = np.ones(len(work.slots), dtype=np.bool_)
        rejected[path] = False
        self._allocator.free(work.slots[rejected])
        work.sequence.slots = np.concatenate([work.sequence.slots, kept])
        work.sequence.computed += len(kept)

    def _emit(self, work: Work, outcome: Accepted) -> Chunk:
        sequence, tree = work.sequence, work.tree
        if sequence.failure:
            self._drop(sequence)
            return Chunk(sequence.request.id, finish_reason="error", message=sequence.failure)
        tokens = self._trim(sequence, outcome.tokens)
        reason = self._finish_reason(sequence, tokens)
        sequence.tokens.extend(tokens)
        foreseen = tuple(i < len(outcome.tokens) - 1 for i in range(len(tokens)))
        step = Round(tree.num_drafted, tree.depth, sum(foreseen), tree.grown_ahead) if tree is not None else None
        if reason is not None:
            self._drop(sequence)
        return Chunk(sequence.request.id, tokens, foreseen, step, reason)

    def _trim(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Up to the first stop token, that one included; a stop comes before the length."""
        for index, token in enumerate(tokens[: sequence.num_remaining]):
            if self._stops(sequence, token):
                return tokens[: index + 1]
        return tokens[: sequence.num_remaining]

    def _stops(self, sequence: Sequence, token: int) -> bool:
        sampling = sequence.request.sampling
        return token in sampling.stop_token_ids or (token in self._eos_ids and not sampling.ignore_eos)

    def _finish_reason(self, sequence: Sequence, tokens: tuple[int, ...]) -> FinishReason | None:
        if self._stops(sequence, tokens[-1]):
            return "stop"
        return "length" if len(tokens) == sequence.num_remaining else None

    def _drop(self, sequence: Sequence) -> None:
        del self._by_id[sequence.request.id]
        if sequence in self._running:
            self._running.remove(sequence)
            self._promised -= self._need(sequence.request)
            self._allocator.free(sequence.slots)
            sequence.slots = sequence.slots[:0]
        else:
            self._waiting.remove(sequence)
