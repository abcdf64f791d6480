"""The engine's side of drafting: works in, one valid tree each out. A failed drafter is a root-only tree, no error."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from eyas.commit import Budget, Commit, Refusal
from eyas.drafters.base import Draft, DraftContext, Drafter
from eyas.engine.runner import ModelRunner
from eyas.engine.sequence import Batch, Sequence, Work
from eyas.errors import InvalidTree
from eyas.request import NoiseKey, Request
from eyas.tree import DraftTree

log = logging.getLogger(__name__)


class Drafting:
    """Tells the drafter what was committed, and keeps account of what each session's drafter is believed to have."""

    def __init__(self, drafter: Drafter | None, runner: ModelRunner) -> None:
        self._drafter = drafter
        self._runner = runner

    def propose(self, batch: Batch) -> list[DraftTree]:
        """One tree per work: the drafter's where it gave a valid one, else the root alone."""
        trees = [DraftTree.root_only(work.sequence.tokens[work.sequence.computed]) for work in batch.works]
        told = [i for i, work in enumerate(batch.works) if work.sequence.known > work.sequence.drafted and work.first > 0]
        if self._drafter is None or not told:
            return trees
        contexts = [self._context(batch.works[i], self._drafter) for i in told]
        for i, context, draft in zip(told, contexts, self._drafter.propose(contexts), strict=True):
            tree = self._account(batch.works[i], context, draft)
            if tree is not None and not batch.works[i].prefill:
                trees[i] = tree
        return trees

    def release(self, request_ids: Seq[str]) -> None:
        """Let the drafter forget requests that have ended."""
        if self._drafter is not None and request_ids:
            self._drafter.release(request_ids)

    def _context(self, work: Work, drafter: Drafter) -> DraftContext:
        sequence, base = work.sequence, work.sequence.drafted
        return Commit(
            session=sequence.request.id,
            epoch=sequence.epoch,
            base=base,
            tokens=tuple(sequence.tokens[base : sequence.known]),
            features=self._runner.features(sequence.slots[max(base - 1, 0) :]) if drafter.needs.features else None,
            noise=noise_key(sequence.request),
            budget=Budget(work.max_nodes, work.max_depth),
            samples=sequence.samples if drafter.needs.samples else (),
        )

    def _account(self, work: Work, context: DraftContext, draft: Draft) -> DraftTree | None:
        sequence = work.sequence
        if draft is None:
            return None
        if isinstance(draft, Refusal):
            _rewind(sequence, draft.have)
            return None
        sequence.drafted = sequence.known
        try:
            vocab_size = self._runner.target.vocab_size
            draft.validate(context.tokens[-1], vocab_size, context.budget.max_nodes, context.budget.max_depth)
        except InvalidTree as error:
            log.warning("dropped a draft tree for %s: %s", sequence.request.id, error)
            return None
        return draft


def noise_key(request: Request) -> NoiseKey:
    """What the request's draws depend on. Its seed must have been fixed."""
    sampling = request.sampling
    assert sampling.seed is not None, "a request enters the engine with a seed"
    return NoiseKey(sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p)


def _rewind(sequence: Sequence, have: int) -> None:
    """Resend from what the drafter has; from nothing, in a new epoch, if that cannot be."""
    if 0 <= have <= sequence.known:
        sequence.drafted = have
    else:
        sequence.drafted, sequence.epoch = 0, sequence.epoch + 1
