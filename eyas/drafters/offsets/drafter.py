"""The drafters of Medusa and Hydra: committed tokens and final states in, static or dynamic draft trees out.

Legend: S sessions, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.commit import Refusal
from eyas.config import EagleConfig, OffsetsConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.calibration import noise_scale
from eyas.drafters.captured.trees import CapturedTrees, Grower, Roots
from eyas.drafters.expand import Candidates, Expansion, grow, select
from eyas.drafters.offsets.expansions import HydraExpansion, MedusaExpansion
from eyas.drafters.offsets.paths import likely_paths
from eyas.drafters.offsets.states import LastFeatures, PrefixStates, States
from eyas.drafters.ranking import Ranker, Scorer
from eyas.drafters.sampled import FilteredDraft, draw_chains
from eyas.drafters.slots.sessions import SlotSessions, no_slots, num_features
from eyas.drafters.slots.sizing import count_slots
from eyas.drafters.static import StaticTree, grow_static
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.offsets.hydra import HydraHead
from eyas.models.heads.offsets.medusa import MedusaHead
from eyas.models.tensors import moved, upload
from eyas.tree import DraftTree

Grow = Callable[[Expansion, int], Candidates]


@dataclass(frozen=True)
class Heads:
    """What the drafter needs of its heads. expand: from states [S, H], roots int64 [S], a scorer and the levels asked for.
    states: what they start from. draft_ids maps draft vocabulary ids to the target's; weights lie beside it."""

    hidden: int
    draft_ids: Tensor
    dtype: torch.dtype
    states: States
    expand: Callable[[Tensor, Tensor, Scorer, int], Expansion]


class OffsetDrafter(LocalDrafter):
    """Medusa or Hydra in this process. Not safe for use from several threads.

    tree: its shape, of no more levels than there are heads. grow: makes candidates of so many levels. capture: how to
    capture whole trees; None launches them.
    """

    def __init__(
        self,
        heads: Heads,
        sessions: SlotSessions[None],
        tree: TreeConfig,
        grow: Grow,
        config: EagleConfig,
        capture: Capture | None = None,
    ) -> None:
        self._heads, self._sessions, self._tree, self._grow_candidates, self._config = heads, sessions, tree, grow, config
        self._scale = noise_scale(config)
        self._captured = CapturedTrees(self._grower(), config, capture) if capture else None

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._heads.hidden)

    @property
    def can_sample(self) -> bool:
        return True

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See Drafter. One pass over all new features, then one per tree level for all sessions together."""
        self._scale.learn(contexts)
        busy = {context.session for context in contexts}
        drafts = [self._admit(context, busy) for context in contexts]
        ready = [i for i, draft in enumerate(drafts) if draft is None]
        if ready:
            states = self._read([contexts[i] for i in ready])
            for i in ready:
                drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
            fill_in_trees(drafts, contexts, ready, states, self._grow, self._draw)
        return drafts

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._captured:
            self._captured.warm_up()

    def release(self, sessions: Sequence[str]) -> None:
        self._scale.forget(sessions)
        self._sessions.release(sessions)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._sessions.check()

    @property
    def num_free_slots(self) -> int:
        return self._sessions.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and brings features, with slots if they need any; else the answer."""
        session = self._sessions.follow(context)
        if isinstance(session, Refusal):
            return session
        count = num_features(context)
        fits = self._sessions.claim(session, count * self._heads.states.slots_per_feature, 0, busy)
        return None if fits and count else DraftTree.root_only(context.tokens[-1])

    def _read(self, contexts: Sequence[DraftContext]) -> Tensor:
        features = torch.cat([context.features for context in contexts if context.features is not None])
        slots = [self._sessions[context.session].slots for context in contexts]
        features = moved(features, self._heads.draft_ids.device, self._heads.dtype)
        return self._heads.states.read(features, contexts, slots)

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        slots = [no_slots()] * len(contexts)
        replayed = self._captured.grow(contexts, slots, states, self._scale) if self._captured else None
        if replayed:
            return replayed.trees
        depth, ids = self._depth(contexts), self._heads.draft_ids
        ranker = Ranker(contexts, self._config, depth, ids, self._scale, self._scale.grid)
        candidates = self._grow_candidates(self._expand(contexts, states, ranker, depth), depth)
        self._scale.watch(contexts, candidates, ranker, ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.nodes)) for c in contexts]
        return select(candidates, [c.tokens[-1] for c in contexts], budgets, ids)

    def _grower(self) -> Grower[Expansion]:
        heads, tree = self._heads, self._tree

        def expand(roots: Roots, scorer: Scorer) -> Expansion:
            return heads.expand(roots.states, roots.tokens, scorer, tree.depth)

        def grow_candidates(expansion: Expansion) -> Candidates:
            return self._grow_candidates(expansion, tree.depth)

        return Grower(expand, grow_candidates, tree, heads.hidden, heads.dtype, heads.draft_ids)

    def _draw(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        depth, ids = self._depth(contexts), self._heads.draft_ids
        expansion = self._expand(contexts, states, FilteredDraft(contexts, ids.device), depth)
        return draw_chains(expansion, contexts, replace(self._tree, depth=depth), self._config.law_tokens, ids)

    def _depth(self, contexts: Sequence[DraftContext]) -> int:
        return min(self._tree.depth, max(context.budget.max_depth for context in contexts))

    def _expand(self, contexts: Sequence[DraftContext], states: Tensor, scorer: Scorer, depth: int) -> Expansion:
        roots = upload([context.tokens[-1] for context in contexts], states.device)
        return self._heads.expand(states, roots, scorer, depth)


def medusa_drafter(
    head: MedusaHead, tree: TreeConfig, config: EagleConfig, offsets: OffsetsConfig, capture: Capture | None = None
) -> OffsetDrafter:
    """Raises ConfigError for a tree that the heads cannot grow."""

    def expand(states: Tensor, roots: Tensor, scorer: Scorer, depth: int) -> Expansion:
        return MedusaExpansion(head, scorer, states, depth)

    heads = Heads(head.hidden, head.draft_ids, head.outputs.dtype, LastFeatures(), expand)
    shape, grow_candidates = _growing(heads, head.num_heads, tree, offsets)
    return OffsetDrafter(heads, SlotSessions(0, sys.maxsize), shape, grow_candidates, config, capture)


def hydra_drafter(
    head: HydraHead, tree: TreeConfig, config: EagleConfig, offsets: OffsetsConfig, capture: Capture | None = None
) -> OffsetDrafter:
    """Raises ConfigError for a tree that the heads cannot grow."""

    def expand(states: Tensor, roots: Tensor, scorer: Scorer, depth: int) -> Expansion:
        return HydraExpansion(head, scorer, states, roots)

    states: States = LastFeatures()
    sessions: SlotSessions[None] = SlotSessions(0, sys.maxsize)
    if head.prefix:
        sizes, weight = head.prefix.sizes, head.prefix.out
        num_slots = count_slots(config, [(sizes.num_kv_heads, sizes.head_dim)], weight.dtype, weight.device)
        states, sessions = PrefixStates(head.prefix, num_slots), SlotSessions(num_slots, sizes.context_length)
    heads = Heads(head.hidden, head.draft_ids, head.embedding.dtype, states, expand)
    shape, grow_candidates = _growing(heads, head.num_heads, tree, offsets)
    return OffsetDrafter(heads, sessions, shape, grow_candidates, config, capture)


def _growing(heads: Heads, num_heads: int, tree: TreeConfig, offsets: OffsetsConfig) -> tuple[TreeConfig, Grow]:
    """The shape of the trees, and what makes their candidates."""
    if tree.nodes < 2 or tree.depth < 1:
        raise ConfigError(
            f"tree.nodes {tree.nodes} and tree.depth {tree.depth} leave no room for a guess; take 2 and 1 or more"
        )
    shape = replace(tree, depth=min(tree.depth, num_heads))
    if offsets.shape == "dynamic":
        return _checked(shape, heads), lambda expansion, depth: grow(expansion, replace(shape, depth=depth))
    plan = StaticTree(offsets.paths or likely_paths(shape))
    if plan.depth > num_heads:
        raise ConfigError(f"methods.offsets.paths reach {plan.depth} levels deep, but there are {num_heads} heads")
    shape = TreeConfig(plan.num_nodes, plan.depth, plan.width)
    return _checked(shape, heads), lambda expansion, depth: grow_static(expansion, plan, depth)


def _checked(shape: TreeConfig, heads: Heads) -> TreeConfig:
    if shape.width > len(heads.draft_ids):
        raise ConfigError(f"a tree of width {shape.width} needs as many draft tokens; there are {len(heads.draft_ids)}")
    return shape
