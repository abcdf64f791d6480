"""The engine: requests in, chunks out, one step at a time. Knows no network, and not which drafter it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from eyas.engine.draft_budget import DraftBudget, FixedDraftBudget
from eyas.engine.draft_manager import DraftManager
from eyas.engine.runner import ModelRunner
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import ScheduledSequence
from eyas.engine.verification import accept_batch
from eyas.request import Chunk, Request
from eyas.sampling.logprobs import attached
from eyas.sampling.penalties import LogitRules
from eyas.validation import check_fit, check_ready, check_request


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is. free_kv_tokens: token slots that no running request holds; cached prefixes may fill
    them, and give way at need. num_kv_tokens: all of them. cached_kv_tokens: those that the prefix cache owns.
    queued_kv_tokens: what the queued requests need to their ends.

    tree_nodes: what most of the trees last asked for may have, the root included; 1 where none would have paid.
    """

    num_running: int
    num_waiting: int
    free_kv_tokens: int
    num_kv_tokens: int = 0
    cached_kv_tokens: int = 0
    queued_kv_tokens: int = 0
    tree_nodes: int = 1


@dataclass(frozen=True)
class StepReport:
    """One step in numbers, in seconds. wait: for the drafter's answers. verify: from there to the last chunk, zero without
    work. num_rows: of the forward pass. began: ids of the requests that left the queue, preempted: of those sent back."""

    wait: float = 0.0
    verify: float = 0.0
    num_rows: int = 0
    began: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


class Engine:
    """Continuous batching of requests over one target. Not safe for use from several threads."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: DraftManager,
        runner: ModelRunner,
        context_length: int,
        budget: DraftBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """budget: how large trees may be; as large as the scheduler allows if left out. clock: in seconds."""
        self._clock = clock
        self._budget = budget or FixedDraftBudget()
        self._scheduler = scheduler
        self._drafting = drafting
        self._runner = runner
        self._rules = LogitRules(runner.target.eos_ids)
        self.max_model_len = context_length
        self.report = StepReport()

    def step(self) -> list[Chunk]:
        """Advance every running request by one forward pass; new tokens, and final chunks of those that ended."""
        self.report = StepReport()
        chunks = self.reap()
        started = self._clock()
        trees = self._drafting.collect()
        collected = self._clock()
        self._budget.drafted(collected - started)
        works, verify = self._scheduler.schedule(trees), 0.0
        if works:
            logits = self._runner.forward(works)
            outcomes = accept_batch(works, logits, self._rules)
            committed = self._scheduler.commit(works, outcomes.accepted)
            self._release([chunk.request_id for chunk in committed if chunk.finish_reason])
            chunks += attached(committed, outcomes.told)
            verify = self._clock() - collected
            self._budget.verified(works, outcomes.accepted, verify)
        self.report = self._reported(works, collected - started, verify)
        self._ask()
        return chunks

    def submit(self, request: Request) -> None:
        """Queue a request as `SamplingParams.completions` splits it. Raises InvalidRequest if it can never be served,
        Overloaded if the queue is full."""
        check_request(request)
        check_fit(request, self.vocab_size, self.max_model_len)
        check_ready(request, self.vocab_size, self._runner.target.eos_ids)
        self._scheduler.add(request)

    def reap(self) -> list[Chunk]:
        """Drop cancelled requests and free all that they hold; one final chunk each. `step` begins with it."""
        chunks = self._scheduler.reap()
        self._release([chunk.request_id for chunk in chunks])
        return chunks

    def cancel(self, request_id: str) -> None:
        """End a request; the next step yields its final chunk and frees everything. Unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    def _ask(self) -> None:
        """Have the next step's trees drafted, as large as they may be."""
        running = self._scheduler.running
        listening = self._drafting.listening(running)
        decoding = [sequence.request.id for sequence in listening if not sequence.prefilling]
        num_plain = sum(not sequence.prefilling for sequence in running) - len(decoding)
        sizes = self._budget.choose(decoding, self._scheduler.most_nodes, num_plain)
        self._drafting.ask(listening, lambda s: self._scheduler.budget(s, sizes.get(s.request.id, 1)))

    def _reported(self, works: Seq[ScheduledSequence], wait: float, verify: float) -> StepReport:
        began, preempted = self._scheduler.moves
        num_rows = sum(len(work.slots) for work in works)
        return StepReport(wait, verify, num_rows, tuple(began), tuple(preempted))

    def _release(self, request_ids: Seq[str]) -> None:
        self._rules.release(request_ids)
        self._drafting.release(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            free_kv_tokens=self._scheduler.num_free,
            num_kv_tokens=self._scheduler.num_slots,
            cached_kv_tokens=self._scheduler.num_cached,
            queued_kv_tokens=self._scheduler.waiting.num_slots,
            tree_nodes=self._budget.num_nodes,
        )

    @property
    def max_running(self) -> int:
        """Most sequences in a step."""
        return self._scheduler.max_running

    def cached_blocks(self, limit: int) -> list[int]:
        """Hashes of at most `limit` blocks of the prefix cache, the most useful ones; see eyas.prefixes."""
        return self._scheduler.cached_blocks(limit)

    @property
    def vocab_size(self) -> int:
        return self._runner.target.vocab_size

    def check(self) -> None:
        """Assert the integrity of slots, owners and cached prefixes. Valid between steps."""
        self._scheduler.check()
