"""The engine's side of drafting: sends what was committed to the drafter and collects valid trees."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from eyas.config import AcceptanceRule
from eyas.draft_protocol import Commit, KnownLogitBias, ResyncRequired, TreeBudget, changed
from eyas.drafters.base import Draft, DraftContext, Drafter, LocalDrafter, PathMasks, Pending
from eyas.engine.runner import ModelRunner
from eyas.engine.sequence import DraftReply, Sequence
from eyas.errors import ConfigError, InvalidTree
from eyas.request import NoiseKey, Request
from eyas.sampling.noise import draft_seed
from eyas.tree import DraftTree

# What contexts are copied from, see `changed`.
NO_COMMIT: DraftContext = Commit("", 0, 0, (), None, NoiseKey(0), TreeBudget(1, 0))

log = logging.getLogger(__name__)


class DraftManager:
    """Requests drafts at the end of a step and collects them at the start of the next, so that the drafter works meanwhile.

    A sequence without an answer has no tree: a failed drafter is no error.
    """

    def __init__(self, drafter: Drafter | None, runner: ModelRunner, rule: AcceptanceRule) -> None:
        """Raises ConfigError for a drafter that cannot propose what the acceptance rule takes."""
        if rule == "rejection" and drafter is not None and not drafter.can_sample:
            raise ConfigError(
                f"engine.acceptance is rejection, but {type(drafter).__name__} cannot sample trees from its own "
                "distribution; set engine.acceptance to match, or use a drafter that can"
            )
        self._drafter = drafter
        self._rule = rule
        self._runner = runner
        self._requested: list[Sequence] = []
        self._contexts: list[DraftContext] = []
        self._pending: Pending = list
        self._ended: list[str] = []
        self._rejected: list[str] = []  # sessions with invalid answers

    def use_path_masks(self, path_masks: PathMasks) -> None:
        """Let a drafter in this process prune its trees by grammars while they grow."""
        if isinstance(self._drafter, LocalDrafter):
            self._drafter.use_path_masks(path_masks)

    @property
    def needs_samples(self) -> bool:
        """Whether the drafter needs the target's samples at every node of its trees."""
        return self._drafter is not None and self._drafter.needs.samples

    @property
    def is_awaited(self) -> bool:
        """Whether a drafter elsewhere works on answers; one in this process begins when they are collected."""
        return bool(self._requested) and not isinstance(self._drafter, LocalDrafter)

    def drafts(self, request: Request) -> bool:
        """Whether a request gets draft trees."""
        return self._drafter is not None and request.num_draft_tokens != 1

    def ready(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that `request` may be called for: they have new tokens, and their drafter can draft now."""
        drafter = self._drafter
        if drafter is None:
            return []
        return [
            s
            for s in sequences
            if s.request.num_draft_tokens != 1 and _has_new_tokens(s) and drafter.can_draft(s.request.id)
        ]

    def request(
        self,
        sequences: Iterable[Sequence],
        budgets: Mapping[str, TreeBudget],
        allowed: Mapping[str, bytes],
        logit_biases: Mapping[str, tuple[KnownLogitBias, ...]],
    ) -> None:
        """Commit the new tokens of `ready` sequences and request the next tree of each, within its budget.

        A decoding sequence without a tree budget is not sent to the drafter until it has one.

        budgets: by request id. allowed, logit_biases: by request id, see Commit; absent where there are none.
        """
        drafter = self._drafter
        if drafter is None:
            return
        requested = [s for s in sequences if budgets[s.request.id].wants_tree or s.prefilling]
        if requested:
            features = self._features(requested) if drafter.needs.features else repeat(None)
            samples = self.needs_samples
            contexts = [
                self._context(s, budgets[s.request.id], rows, s.samples if samples else ())
                for s, rows in zip(requested, features, strict=False)
            ]
            for i, sequence in enumerate(requested if allowed or logit_biases else ()):
                masks, biases = allowed.get(sequence.request.id, b""), logit_biases.get(sequence.request.id, ())
                contexts[i] = changed(contexts[i], allowed=masks, logit_biases=biases)
            self._pending = drafter.request(contexts)  # if it raises, nothing is pending
            self._contexts, self._requested = contexts, requested

    def collect(self) -> list[DraftReply]:
        """Wait for the answers to `request`."""
        requested, contexts, pending = self._requested, self._contexts, self._pending
        self._requested, self._contexts, self._pending = [], [], list
        answers = list(zip(requested, contexts, pending(), strict=True))
        replies = [self._reply(sequence, context, draft) for sequence, context, draft in answers]
        if self._drafter is not None and self._rejected:
            self._drafter.reject(self._rejected)
            self._rejected = []
        if self._ended:
            self.release([])
        return replies

    def release(self, request_ids: Seq[str]) -> None:
        """Let the drafter forget requests that have ended, once no answer is pending."""
        if self._drafter is None:
            return
        self._ended += request_ids
        if self._ended and not self._requested:
            ended, self._ended = self._ended, []
            self._drafter.release(ended)

    def _features(self, sequences: Seq[Sequence]) -> list[Tensor | None]:
        """The features that the drafter lacks of each sequence, all gathered at once."""
        slots = [sequence.slots[max(sequence.drafted - 1, 0) : sequence.computed] for sequence in sequences]
        return list(torch.split(self._runner.features(np.concatenate(slots)), [len(own) for own in slots]))

    def _context(
        self, sequence: Sequence, budget: TreeBudget, features: Tensor | None, samples: tuple[int, ...]
    ) -> DraftContext:
        request, start = sequence.request, sequence.drafted
        context = changed(
            NO_COMMIT,
            session=request.id,
            epoch=sequence.epoch,
            start_position=start,
            tokens=tuple(sequence.tokens[start : sequence.num_draftable]),
            features=features,
            noise=request.noise_key,
            budget=budget,
            samples=samples,
            wants_sources=request.return_verify_steps,
            tenant_key=request.tenant_key,
        )
        if self._rule == "rejection" and request.noise_key.temperature > 0:
            noise = replace(context.noise, seed=draft_seed(context.noise.seed))
            return changed(context, noise=noise, samples=(), proposal="sampled")
        return context

    def _reply(self, sequence: Sequence, context: DraftContext, draft: Draft) -> DraftReply:
        if draft is None:
            return DraftReply(sequence, None, sequence.drafted, sequence.epoch)
        if isinstance(draft, ResyncRequired):
            if 0 <= draft.committed_length <= sequence.num_draftable:
                return DraftReply(sequence, None, draft.committed_length, sequence.epoch)
            self._rejected.append(context.session)
            return DraftReply(sequence, None, 0, sequence.epoch + 1)
        tree = draft if self._is_valid(draft, context) and context.budget.wants_tree else None
        return DraftReply(sequence, tree, context.committed_length, sequence.epoch)

    def _is_valid(self, tree: DraftTree, context: DraftContext) -> bool:
        try:
            vocab_size = self._runner.target.vocab_size
            tree.validate(context.tokens[-1], vocab_size, context.budget.max_nodes, context.budget.max_depth)
            if (tree.sampled is not None) != (context.proposal == "sampled") and tree.num_drafted:
                kind = "deterministic" if tree.sampled is None else "sampled"
                raise InvalidTree(f"a {kind} proposal where a {context.proposal} one was requested")
        except InvalidTree as error:
            log.warning("dropped a draft tree for %s: %s", context.session, error, extra={"rate_limited": True})
            self._rejected.append(context.session)
            return False
        return True


def _has_new_tokens(sequence: Sequence) -> bool:
    """Whether the drafter lacks tokens, and the sequence has room for a drafted one."""
    return sequence.computed > 0 and sequence.num_draftable > sequence.drafted and sequence.num_remaining > 1
