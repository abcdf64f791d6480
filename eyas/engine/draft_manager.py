"""The engine's side of drafting: sends what was committed to the drafter and collects valid trees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eyas.api.request import Request
from eyas.config import AcceptanceRule
from eyas.drafters.base import DraftContext, Drafter, DrafterNeeds, LocalDrafter, PathMasks, Pending
from eyas.engine.runner import ModelRunner
from eyas.engine.sequence import DraftReply, Sequence
from eyas.errors import ConfigError, InvalidTree
from eyas.kernels.noise import draft_seed
from eyas.protocol.commit import NO_TREE, Commit, KnownLogitBias, NoiseKey, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree
from eyas.sampling.acceptance import are_valid_trees

# What contexts are copied from.
NO_COMMIT: DraftContext = Commit("", 0, 0, (), None, NoiseKey(0), NO_TREE)

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class DraftManager:
    """Requests drafts at the end of a step and collects them at the start of the next, so that the drafter works meanwhile.

    A sequence without an answer has no tree: a failed drafter is no error. Sequences whose step it failed get no more trees,
    as what it has of them may be what it fails on.
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
        self._failed: set[str] = set()  # requests that go on without drafts
        self._has_failed = False
        self._templates: dict[str, DraftContext] = {}  # by request id, what all contexts of a session have
        self._lacking: dict[str, int] = {}  # by request id, committed length of a network whose lookups drafted alone since

    def use_path_masks(self, path_masks: PathMasks) -> None:
        """Let a drafter in this process prune its trees by grammars while they grow."""
        if isinstance(self._drafter, LocalDrafter):
            self._drafter.use_path_masks(path_masks)

    @property
    def needs(self) -> DrafterNeeds:
        """Return what the drafter needs now: a pool of drafters elsewhere needs what those that are connected do."""
        return DrafterNeeds() if self._drafter is None else self._drafter.needs

    @property
    def is_awaited(self) -> bool:
        """Return whether a drafter elsewhere works on answers; one in this process begins when they are collected."""
        return bool(self._requested) and not isinstance(self._drafter, LocalDrafter)

    @property
    def takes_prompts(self) -> bool:
        """Return whether prompts go to the drafter before trees are wanted: to one elsewhere, and to one on a GPU.

        One that shares a CPU with the target would take its time from it.
        """
        is_local = isinstance(self._drafter, LocalDrafter)
        return self._drafter is not None and not (is_local and not self._runner.runs_beside_host)

    def drafts(self, request: Request) -> bool:
        """Return whether a request gets draft trees."""
        return self._drafter is not None and request.num_draft_tokens != 1

    def ready(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that `request` may be called for: they have new tokens, and their drafter can draft now."""
        drafter = self._drafter
        if drafter is None:
            return []
        return [
            sequence
            for sequence in sequences
            if sequence.can_draft
            and sequence.request.num_draft_tokens != 1
            and sequence.request.id not in self._failed
            and drafter.can_draft(sequence.request.id)
        ]

    def missing(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return how many tokens of each sequence the drafter lacks, of a pair its network."""
        lacking = self._lacking
        return [s.computed + 1 - min(s.drafted, lacking.get(s.request.id, s.drafted)) for s in sequences]

    def request(
        self,
        sequences: Seq[Sequence],
        budgets: Seq[TreeBudget],
        allowed: Mapping[str, bytes],
        logit_biases: Mapping[str, tuple[KnownLogitBias, ...]],
        lookups_alone: bool = False,
    ) -> None:
        """Commit the new tokens of `ready` sequences and request the next tree of each, within its budget.

        A decoding sequence without a tree budget is not sent to the drafter until it has one.

        Args:
            budgets: of each sequence.
            allowed, logit_biases: by request id, see Commit; absent where there are none.
            lookups_alone: see Commit.
        """
        wanted = [(s, budget) for s, budget in zip(sequences, budgets, strict=True) if s.prefilling or budget.wants_tree]
        if self._drafter is not None and wanted:
            # Where it fails, nothing is pending, so that the next step decodes plainly.
            call = partial(self._request, self._drafter, wanted, allowed, logit_biases, lookups_alone)
            self._guarded(call, [sequence for sequence, _ in wanted])

    def _request(
        self,
        drafter: Drafter,
        wanted: Seq[tuple[Sequence, TreeBudget]],
        allowed: Mapping[str, bytes],
        logit_biases: Mapping[str, tuple[KnownLogitBias, ...]],
        lookups_alone: bool,
    ) -> None:
        needs = drafter.needs
        requested = [sequence for sequence, _ in wanted]
        lacking = {} if lookups_alone else self._lacking
        starts = [min(s.drafted, lacking.get(s.request.id, s.drafted)) for s in requested]
        features: Iterable[Tensor | None] = repeat(None)
        if needs.features and not lookups_alone:  # what the drafter lacks, all gathered at once
            slots = [s.slots[max(start - 1, 0) : s.computed] for s, start in zip(requested, starts, strict=True)]
            features = torch.split(self._runner.features(np.concatenate(slots)), [len(own) for own in slots])
        contexts = list[DraftContext]()
        for (sequence, budget), start, rows in zip(wanted, starts, features, strict=False):
            name = sequence.request.id
            template = self._template(sequence.request)
            takes_samples = needs.samples and template.proposal == "deterministic"
            context = template._replace(
                epoch=sequence.epoch,
                start_position=start,
                tokens=tuple(sequence.tokens[start : sequence.computed + 1]),
                features=rows,
                budget=budget,
                samples=sequence.samples if takes_samples else (),
                allowed=allowed.get(name, b""),
                logit_biases=logit_biases.get(name, ()),
                lookups_alone=lookups_alone,
            )
            contexts.append(context)
            if lookups_alone:
                self._lacking[name] = min(self._lacking.get(name, start), start)
        self._pending = drafter.request(contexts)  # if it raises, nothing is pending
        self._contexts, self._requested = contexts, requested

    def _guarded(self, call: Callable[[], Result], sequences: Seq[Sequence] = ()) -> Result | None:
        """Return what a call of the drafter returns; None if it fails. Lack of memory passes, so that it is tried again."""
        try:
            return call()
        except torch.OutOfMemoryError:
            pass
        except Exception as error:
            failed = [sequence.request.id for sequence in sequences]
            message = "a call of the drafter has failed; %d requests go on without drafts: %s: %s"
            cause = None if self._has_failed else error  # its traceback, once
            extra = {"rate_limited": True}
            log.error(message, len(failed), type(error).__name__, error, exc_info=cause, extra=extra)
            self._has_failed = True
            self._failed.update(failed)
            self._ended += failed
            return None
        torch.cuda.empty_cache()  # outside of `except`, where the error still holds the drafter's tensors
        log.warning(
            "no memory to draft for %d requests; this step goes without drafts: lower engine.gpu_memory_utilization, "
            "drafting.max_kv_tokens or engine.max_num_seqs",
            len(sequences),
            extra={"rate_limited": True},
        )
        return None

    def collect(self) -> list[DraftReply]:
        """Wait for the answers to `request`."""
        requested, contexts, pending = self._requested, self._contexts, self._pending
        self._requested, self._contexts, self._pending = [], [], list
        replies = self._guarded(partial(self._replies, requested, contexts, pending), requested)
        if replies is None:  # what the drafter has of them is unknown
            replies = [DraftReply(sequence, None, 0, sequence.epoch + 1) for sequence in requested]
        if self._drafter is not None and self._rejected:
            rejected, self._rejected = self._rejected, []
            self._guarded(partial(self._drafter.reject, rejected))
        if self._ended:
            self.release([])
        return replies

    def _replies(self, requested: Seq[Sequence], contexts: Seq[DraftContext], pending: Pending) -> list[DraftReply]:
        """Wait for the answers, and check the trees among them: at once, or one by one if not all are usual and valid."""
        drafts = pending()
        are_valid = False
        pairs = zip(contexts, drafts, strict=True)
        found = [(context, draft) for context, draft in pairs if isinstance(draft, DraftTree)]
        if found and all(context.proposal == "deterministic" for context, _ in found):
            limits = [(context.tokens[-1], *context.budget) for context, _ in found]
            are_valid = are_valid_trees([tree for _, tree in found], limits, self._runner.target.vocab_size)
        replies = list[DraftReply]()
        for sequence, context, draft in zip(requested, contexts, drafts, strict=True):
            tree, drafted, epoch = None, sequence.drafted, sequence.epoch
            if isinstance(draft, DraftTree):
                is_usable = (are_valid or self._is_valid(draft, context)) and context.budget.wants_tree
                tree, drafted = draft if is_usable else None, context.committed_length
            elif isinstance(draft, ResyncRequired):
                drafted = draft.committed_length
                if not 0 <= drafted <= sequence.num_draftable:
                    self._rejected.append(context.session)
                    drafted, epoch = 0, epoch + 1
            if draft is not None and not context.lookups_alone:
                self._lacking.pop(context.session, None)
            replies.append(DraftReply(sequence, tree, drafted, epoch))
        return replies

    def release(self, request_ids: Seq[str]) -> None:
        """Let the drafter forget requests that have ended, once no answer is pending."""
        if self._drafter is None:
            return
        self._ended += request_ids
        self._failed.difference_update(request_ids)
        for request_id in request_ids:
            self._templates.pop(request_id, None)
            self._lacking.pop(request_id, None)
        if self._ended and not self._requested:
            ended, self._ended = self._ended, []
            self._guarded(partial(self._drafter.release, ended))

    def _template(self, request: Request) -> DraftContext:
        """Return what all contexts of a request share."""
        template = self._templates.get(request.id)
        if template is None:
            noise, proposal = request.noise_key, NO_COMMIT.proposal
            if self._rule == "rejection" and noise.temperature > 0:
                noise, proposal = replace(noise, seed=draft_seed(noise.seed)), "sampled"
            template = self._templates[request.id] = NO_COMMIT._replace(
                session=request.id,
                noise=noise,
                proposal=proposal,
                wants_sources=request.return_verify_steps,
                tenant_key=request.tenant_key,
            )
        return template

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
