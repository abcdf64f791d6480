"""The engine's side of drafting: sequences in, valid trees out. A drafter without an answer is a sequence without a tree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from eyas.config import AcceptanceRule
from eyas.draft_protocol import Commit, Proposal, ResyncRequired, TreeBudget
from eyas.drafters.base import Draft, DraftContext, Drafter, Pending
from eyas.engine.runner import ModelRunner
from eyas.engine.sequence import Sequence
from eyas.errors import ConfigError, InvalidTree
from eyas.request import NoiseKey, Request
from eyas.sampling.noise import draft_seed
from eyas.tree import DraftTree

log = logging.getLogger(__name__)


class DraftManager:
    """Tells the drafter what was committed, and keeps account of what each session's drafter is believed to have.

    It asks at the end of a step and collects at the start of the next, so that the drafter works while chunks go out.
    """

    def __init__(self, drafter: Drafter | None, runner: ModelRunner, rule: AcceptanceRule) -> None:
        """Raises ConfigError for a drafter that cannot propose what the acceptance rule takes."""
        if rule == "rejection" and drafter is not None and not drafter.can_sample:
            raise ConfigError(
                f"engine.acceptance is rejection, but {type(drafter).__name__} cannot draw trees from its own law; set "
                "engine.acceptance to match, or take a drafter that can"
            )
        self._drafter = drafter
        self._rule = rule
        self._runner = runner
        self._asked: list[Sequence] = []
        self._contexts: list[DraftContext] = []
        self._pending: Pending = list
        self._ended: list[str] = []

    def listening(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those of which there is something new that their drafter would hear, in order; only these can be asked for."""
        drafter = self._drafter
        if drafter is None:
            return []
        return [s for s in sequences if _has_news(s) and drafter.can_draft(s.request.id)]

    def ask(self, sequences: Iterable[Sequence], budget: Callable[[Sequence], TreeBudget]) -> None:
        """Commit what is new of each of the `listening` sequences and ask for its next tree, within its budget. Of one whose
        prompt is done and that may have no tree, the drafter hears once it may."""
        drafter = self._drafter
        if drafter is None:
            return
        news = [(s, budget(s)) for s in sequences]
        told = [(s, its) for s, its in news if its.wants_tree or s.prefilling]
        asked, contexts = [s for s, _ in told], [self._context(s, its, drafter) for s, its in told]
        if contexts:
            self._pending = drafter.request(contexts)
            self._asked, self._contexts = asked, contexts

    def collect(self) -> dict[str, DraftTree]:
        """Wait for the answers; the valid trees by request id."""
        asked, contexts, pending = self._asked, self._contexts, self._pending
        self._asked, self._contexts, self._pending = [], [], list
        answers = zip(asked, contexts, pending(), strict=True)
        trees = {s.request.id: self._account(s, context, draft) for s, context, draft in answers}
        self.release([])
        return {request_id: tree for request_id, tree in trees.items() if tree is not None}

    def release(self, request_ids: Seq[str]) -> None:
        """Let the drafter forget requests that have ended, as soon as it has answered what it was asked of them."""
        if self._drafter is None:
            return
        self._ended += request_ids
        if self._ended and not self._asked:
            ended, self._ended = self._ended, []
            self._drafter.release(ended)

    def _context(self, sequence: Sequence, budget: TreeBudget, drafter: Drafter) -> DraftContext:
        base, key = sequence.drafted, noise_key(sequence.request)
        proposal: Proposal = "sampled" if self._rule == "rejection" and key.temperature > 0 else "deterministic"
        return Commit(
            session=sequence.request.id,
            epoch=sequence.epoch,
            start_position=base,
            tokens=tuple(sequence.tokens[base : sequence.known]),
            features=self._runner.features(sequence.slots[max(base - 1, 0) :]) if drafter.needs.features else None,
            noise=key if proposal == "deterministic" else replace(key, seed=draft_seed(key.seed)),
            budget=budget,
            samples=sequence.samples if drafter.needs.samples and proposal == "deterministic" else (),
            proposal=proposal,
        )

    def _account(self, sequence: Sequence, context: DraftContext, draft: Draft) -> DraftTree | None:
        if draft is None:
            return None
        if isinstance(draft, ResyncRequired):
            _rewind(sequence, draft.committed_length)
            return None
        sequence.drafted = context.committed_length
        try:
            vocab_size = self._runner.target.vocab_size
            draft.validate(context.tokens[-1], vocab_size, context.budget.max_nodes, context.budget.max_depth)
            _check_proposal(draft, context.proposal)
        except InvalidTree as error:
            log.warning("dropped a draft tree for %s: %s", sequence.request.id, error)
            return None
        return draft if context.budget.wants_tree else None


def _check_proposal(tree: DraftTree, proposal: Proposal) -> None:
    """Raises InvalidTree for a tree that was proposed in another way than it was asked for; a lone root was not at all."""
    if tree.num_drafted and (tree.sampled is not None) != (proposal == "sampled"):
        came = "deterministic" if tree.sampled is None else "sampled"
        raise InvalidTree(f"a {came} proposal where a {proposal} one was asked for")


def _has_news(sequence: Sequence) -> bool:
    """Whether there is something to tell that can still be of use."""
    return sequence.computed > 0 and sequence.known > sequence.drafted and sequence.num_remaining > 1


def noise_key(request: Request) -> NoiseKey:
    """What the request's draws depend on. Its seed must have been fixed."""
    sampling = request.sampling
    assert sampling.seed is not None, "a request enters the engine with a seed"
    return NoiseKey(sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _rewind(sequence: Sequence, have: int) -> None:
    """Resend from what the drafter has; from nothing, in a new epoch, if that cannot be."""
    if 0 <= have <= sequence.known:
        sequence.drafted = have
    else:
        sequence.drafted, sequence.epoch = 0, sequence.epoch + 1
