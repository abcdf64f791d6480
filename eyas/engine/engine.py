"""The engine: continuous batching of requests over one target, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import torch

from eyas.api.request import Chunk, Request
from eyas.api.validation import check_engine_request, check_request
from eyas.config import EngineConfig
from eyas.device.memory import out_of_memory_text
from eyas.engine.budget.base import CostTimer, DraftBudget, FixedDraftBudget, NextStep
from eyas.engine.draft_manager import DraftManager
from eyas.engine.grammar_manager import GrammarManager
from eyas.engine.runner import ModelRunner, drawn_rows, step_segments
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Chunks, DraftReply, ScheduledSequence
from eyas.grammar.compiler import GrammarCompiler, OutputMatchers
from eyas.kernels.choice import tree_kernels
from eyas.models.target import TargetModel
from eyas.sampling.acceptance import Details, DrawnRows, StepOutputs
from eyas.sampling.logit_rules import LogitRules, TokenMasks
from eyas.sampling.verify import verify

FOR_STEP = (
    "lower engine.gpu_memory_utilization or engine.max_kv_tokens, or engine.max_num_seqs, engine.max_verify_tokens or "
    "engine.max_prefill_tokens"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine.

    Attributes:
        free_kv_tokens: token slots that no running request holds; cached prefixes may fill them, and are evicted when
            needed.
        num_kv_tokens: all token slots.
        cached_kv_tokens: those that the prefix cache owns.
        queued_kv_tokens: slots that the queued requests need until they end.
        tree_nodes: most nodes of the trees requested last, the root included; 1 if no trees were requested.
        max_num_seqs: most sequences in a step.
        step_seconds: seconds since the present step began; 0 between steps.
        num_prompt_tokens: prompt tokens of all requests admitted so far.
        num_cached_tokens: those that were in the prefix cache.
    """

    num_running: int
    num_waiting: int
    free_kv_tokens: int
    num_kv_tokens: int = 0
    cached_kv_tokens: int = 0
    queued_kv_tokens: int = 0
    tree_nodes: int = 1
    max_num_seqs: int = 0
    step_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StepReport:
    """One step in numbers.

    Attributes:
        wait: seconds until the drafts were there.
        verify: seconds from there to the last chunk, 0 without work.
        num_rows: of the forward pass.
        began: ids of the requests that left the queue.
        preempted: of those that went back to it.
        ended: of those that ended.
    """

    wait: float = 0.0
    verify: float = 0.0
    num_rows: int = 0
    began: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class Engine:
    """Requests in, chunks out. Not safe for use from several threads.

    Its parts are public: `scheduler`, `draft_manager`, `runner`, `budget` and `grammars`.

    Args:
        max_model_len: most tokens of prompt and output together.
        budget: sizes of draft trees, always the largest by default.
        clock: the present time in seconds.
        cost_clock: what the budget measures costs with, `clock` by default.
        whitespace_pattern: of JSON, as in StructuredOutputs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        draft_manager: DraftManager,
        runner: ModelRunner,
        max_model_len: int,
        budget: DraftBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cost_clock: Callable[[], float] | None = None,
        whitespace_pattern: str = EngineConfig.json_whitespace_pattern,
    ) -> None:
        tree_kernels()  # loaded before the first step
        self._clock, self._costs = clock, CostTimer(cost_clock or clock)
        self.budget = budget or FixedDraftBudget()
        self.scheduler = scheduler
        self.draft_manager = draft_manager
        self.runner = runner
        target = runner.target
        self._rules = LogitRules(target.eos_ids)
        self.grammars = GrammarManager(target.eos_ids, target.vocab_size)
        draft_manager.use_path_masks(self.grammars.path_masks)
        self._tree_sizes: dict[str, int] = {}
        self._compiler = GrammarCompiler(target.name_or_path, target.vocab_size, target.eos_ids, whitespace_pattern)
        self.max_model_len = max_model_len
        self.report = StepReport()

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> Seq[Chunk]:
        """Advance every running request by one forward pass. Returns new tokens, and final chunks of requests that ended.

        The chunks are made when the first is read: read them in `meanwhile` of the next step if there is one.

        meanwhile: work of the host that the step does not need. It is called while the device runs the pass, and again at
            most where the device has no memory for all of the step.
        """
        self.report = StepReport()
        cancelled = self.scheduler.reap()
        if cancelled:
            self._release([chunk.request_id for chunk in cancelled])

        self._costs.begin()
        began = self._clock()
        with self._costs.timed("draft"):
            drafts = self._collected()
        collected = self._clock()

        batch = self.scheduler.schedule(drafts)
        verified = 0.0
        if batch:
            chunks, outputs = self._run(batch, drafts, cancelled, meanwhile)
            verified = self._clock() - collected
            self.budget.observe(batch, outputs, self._costs.step())
        else:
            meanwhile()
            chunks = Chunks(cancelled)
        if not (batch and self.has_work):
            self._costs.pause()
        num_rows = sum([len(scheduled.slots) for scheduled in batch])
        admitted, preempted = tuple(self.scheduler.admitted), tuple(self.scheduler.preempted)
        self.report = StepReport(collected - began, verified, num_rows, admitted, preempted, tuple(chunks.ended))

        with self._costs.timed("draft"):
            self._request_drafts()
        return chunks

    def _collected(self) -> list[DraftReply]:
        """Wait for the trees of the step, and leave out what grammars forbid and what costs more than it yields."""
        drafts = self.draft_manager.collect()
        if self.grammars.outputs:
            drafts = self.grammars.prune(drafts, self._tree_sizes)
        return self._pruned(drafts) if drafts else drafts

    def _run(
        self,
        batch: Seq[ScheduledSequence],
        drafts: Seq[DraftReply],
        cancelled: Seq[Chunk],
        meanwhile: Callable[[], object],
    ) -> tuple[Chunks, StepOutputs]:
        """Run the pass of a step and commit its tokens. Returns their chunks after `cancelled`, and what the pass gave."""
        needs_samples = self.draft_manager.needs.samples  # which a drafter that connects meanwhile changes
        with self._costs.timed("pass"):
            outputs = self._verified(batch, meanwhile, needs_samples)
        edited = None  # requests with other trees than the drafter's, to which samples mean nothing
        if needs_samples:
            edited = {reply.sequence.request.id for reply in drafts if reply.is_edited}
        committed = self.scheduler.commit(batch, outputs, edited)
        if committed.ended:
            self._release(committed.ended)
        chunks = replace(committed, last=[*cancelled, *committed.last]) if cancelled else committed
        return chunks, outputs

    def _verified(
        self,
        batch: Seq[ScheduledSequence],
        meanwhile: Callable[[], object],
        needs_samples: bool,
        wait_for_masks: Callable[[], TokenMasks] | None = None,
    ) -> StepOutputs:
        """Run a pass and draw its tokens. Without memory for that, each half of the batch gets a pass of its own; a request
        that has not enough memory alone ends with an error, and no other does.

        wait_for_masks: as the grammars give it, for a batch that this one is a part of. A grammar's state is not for two
        threads, so masks are not computed again.
        """
        if wait_for_masks is None:
            outputs = self.grammars.outputs
            wait_for_masks = self.grammars.start([each.logit_rows for each in batch]) if outputs else TokenMasks
        try:
            draws_on_ranks = self.runner.target.shared_vocabulary is not None
            rows = drawn_rows(batch)
            output = self.runner.forward(step_segments(batch, rows, draws_on_ranks))
            are_alone = _want_tokens_alone(batch, rows) and all(output.is_drawn)
            logit_rows = () if are_alone else [each.logit_rows for each in batch]
            return verify(logit_rows, rows, output, self._rules, wait_for_masks, meanwhile, needs_samples)
        except torch.OutOfMemoryError as error:
            num_rows = sum([len(scheduled.slots) for scheduled in batch])
            problem = f"no memory for a step of {num_rows} rows"
            reason = out_of_memory_text(problem, self.runner.target.device, FOR_STEP, error)
        torch.cuda.empty_cache()  # outside of `except`, where the error still holds the pass's tensors
        if len(batch) == 1:
            log.error("request %s ends: %s", batch[0].sequence.request.id, reason)
            meanwhile()
            return StepOutputs.empty(1, {0: Details(error=reason)})
        log.warning("%s. It is run in halves", reason, extra={"rate_limited": True})
        middle = len(batch) // 2
        first = self._verified(batch[:middle], meanwhile, needs_samples, wait_for_masks)
        return StepOutputs.joined(first, self._verified(batch[middle:], lambda: None, needs_samples, wait_for_masks))

    def load_grammars(self) -> None:
        """Load what structured outputs need, before the first request does. What prevents it is an error of that request."""
        wait([self._compiler.load()])

    def follow(self, request: Request) -> Future[OutputMatchers]:
        """Compile the grammar of a request with structured_outputs, and follow the output that it brings along.

        Safe for use from any thread. Raises as `submit`, also in the future.
        """
        check_request(request, self.vocab_size, self.max_model_len)
        structured, has_drafts = request.sampling.structured_outputs, self.draft_manager.drafts(request)
        assert structured is not None, "checked"
        output = request.prompt_ids[len(request.prompt_ids) - request.num_emitted :]
        return self._compiler.matchers(structured, output, has_drafts, request.tenant)

    def submit(self, request: Request, matchers: OutputMatchers | None = None) -> None:
        """Queue one completion, as `SamplingParams.completions` gives it.

        matchers: of its structured_outputs, as `follow` gives them; None waits for them here.
        Raises InvalidRequest if it can never be served, Overloaded if the queue is full.
        """
        target = self.runner.target
        check_request(request, target.vocab_size, self.max_model_len)
        check_engine_request(request, target.vocab_size, target.eos_ids)
        if request.sampling.structured_outputs is not None:
            matchers = matchers or self.follow(request).result()
        self.scheduler.add(request)
        if matchers is not None:
            self.grammars.add(request, matchers)

    def cancel(self, request_id: str) -> None:
        """End a request; the next step yields its final chunk and frees everything. Unknown ids are ignored."""
        self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return bool(self.scheduler.sequences)

    @property
    def waiting(self) -> set[str]:
        """Return the requests that wait in the queue, whom no step has touched."""
        return {sequence.request.id for sequence in self.scheduler.waiting}

    @property
    def can_overlap(self) -> bool:
        """Return whether the next step waits for a device, not for a draft service; a drafter in this
        process works first.
        """
        return self.has_work and self.runner.runs_beside_host and not self.draft_manager.is_awaited

    @property
    def load(self) -> EngineLoad:
        cache = self.scheduler.cache
        return EngineLoad(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            free_kv_tokens=cache.num_available,
            num_kv_tokens=self.scheduler.config.max_kv_tokens,
            cached_kv_tokens=cache.num_cached,
            queued_kv_tokens=self.scheduler.waiting.num_tokens,
            tree_nodes=self.budget.num_nodes,
            max_num_seqs=self.scheduler.config.max_num_seqs,
            num_prompt_tokens=self.scheduler.num_prompt_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
        )

    @property
    def target(self) -> TargetModel:
        """The model that it runs; of several ranks, the shard of rank 0."""
        return self.runner.target

    @property
    def vocab_size(self) -> int:
        return self.runner.target.vocab_size

    def check(self) -> None:
        """Assert the integrity of slots, owners and cached prefixes. Valid between steps."""
        self.scheduler.check()

    def _request_drafts(self) -> None:
        """Have the next step's trees drafted, as large as the budget allows."""
        running = self.scheduler.running
        ready = self.draft_manager.ready(running)
        decoding = [sequence for sequence in ready if not sequence.prefilling]
        num_plain = sum([not sequence.prefilling for sequence in running]) - len(decoding)
        prefilling = [len(s.tokens) - s.computed for s in running if s.prefilling]
        num_prompt_rows = min(sum(prefilling), self.scheduler.config.max_prefill_tokens)
        num_context_tokens = sum([sequence.computed for sequence in running])
        step = NextStep(len(prefilling), num_prompt_rows, num_context_tokens, self.draft_manager.missing(decoding))
        names = [sequence.request.id for sequence in decoding]
        sizes = self.budget.choose(names, self.scheduler.max_tree_nodes, num_plain, step)
        if self.budget.num_nodes == 1 and not (
            prefilling and self.budget.takes_prompts and self.draft_manager.takes_prompts
        ):
            return  # no request drafts
        budgets = self.scheduler.tree_budgets(ready, sizes)
        pairs = list(zip(ready, budgets, strict=True))
        ruled = [s for s, budget in pairs if not s.request.wants_tokens_alone and budget.wants_tree]
        known = {s.request.id: self._rules.known_biases(s.request, s.tokens) for s in ruled}
        biases, masks = {name: found for name, found in known.items() if found}, dict[str, bytes]()
        if self.grammars.outputs:
            self._tree_sizes = {s.request.id: budget.max_nodes for s, budget in pairs}
            masks = self.grammars.root_masks({s.request.id: s.tokens for s in ruled})
        self.draft_manager.request(ready, budgets, masks, biases, self.budget.lookups_alone)

    def _pruned(self, drafts: list[DraftReply]) -> list[DraftReply]:
        """Return the replies without the nodes that cost more than they yield.

        Sampled trees stay whole, because whether a node is verified must not depend on its token. So do trees of a drafter
        that needs the target's samples at all of their nodes.
        """
        if self.draft_manager.needs.samples:
            return drafts
        found = [(i, reply.tree) for i, reply in enumerate(drafts) if reply.tree is not None and not reply.tree.sampled]
        num_decoding = sum([not sequence.prefilling for sequence in self.scheduler.running])
        pruned = self.budget.prune([tree for _, tree in found], max(num_decoding - len(found), 0))
        for (i, whole), tree in zip(found, pruned, strict=True):
            if tree is not whole:
                drafts[i] = drafts[i]._replace(tree=tree)
        return drafts

    def _release(self, request_ids: Seq[str]) -> None:
        """Free what requests that have ended hold outside the scheduler."""
        self._rules.release(request_ids)
        if self.grammars.outputs:
            self.grammars.release(request_ids)
        self.draft_manager.release(request_ids)


def _want_tokens_alone(batch: Seq[ScheduledSequence], rows: DrawnRows) -> bool:
    """Return whether all trees are deterministic, and their requests want nothing but tokens."""
    if rows.trees is not None and any(rows.trees.nodes.sampled):
        return False
    special = [
        scheduled
        for scheduled in batch
        if not (request := scheduled.sequence.request).wants_tokens_alone
        or (scheduled.tree is None and request.sampling.prompt_logprobs is not None)
    ]
    return not special
