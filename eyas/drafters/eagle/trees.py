"""Trees of an EAGLE head: states of roots and slots of their prefixes in, draft trees out. Keeps no session.

Legend: S sessions, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.config import AheadConfig, EagleConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.calibration import NoiseScale
from eyas.drafters.captured.prefix import tight_prefix
from eyas.drafters.captured.trees import CapturedTrees, Grower, Roots
from eyas.drafters.eagle.expansion import EagleExpansion
from eyas.drafters.expand import Candidates, Expansion, Growth, grow, select
from eyas.drafters.ranking import Ranker, Scorer
from eyas.drafters.sampled import FilteredDraft, draw_chains
from eyas.drafters.static import StaticTree, grow_static
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.eagle import EagleHead
from eyas.tree import DraftTree


class EagleTrees:
    """Grows trees of one shape. Of every method, slots are those of each session's pairs, and states [S, H] lie behind their
    last ones."""

    def __init__(
        self,
        head: EagleHead,
        pools: SlotPools,
        tree: TreeConfig,
        config: EagleConfig,
        scale: NoiseScale,
        plan: StaticTree | None,
        capture: Capture | None,
    ) -> None:
        """plan: the tree of every round, of the size of `tree`; None grows dynamic ones. capture: how to capture whole
        trees; None launches them."""
        self._head, self._pools, self._tree, self._config, self._scale, self._plan = head, pools, tree, config, scale, plan
        self._captured = CapturedTrees(self._grower(), config, capture) if capture else None

    def warm_up(self) -> None:
        """Capture what the first rounds need, where trees are captured."""
        if self._captured:
            self._captured.warm_up()

    def grow(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor) -> list[DraftTree]:
        """Deterministic trees."""
        replayed = self._captured.grow(contexts, slots, states, self._scale) if self._captured else None
        if replayed:
            return replayed.trees
        shape = self._shape(contexts, self._width)
        ranker = Ranker(contexts, self._config, shape.depth, self._head.draft_ids, self._scale, self._scale.grid)
        candidates = self._candidates(self._expand(slots, states, ranker, shape), shape.depth)
        self._scale.watch(contexts, candidates, ranker, self._head.draft_ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.nodes)) for c in contexts]
        return select(candidates, [c.tokens[-1] for c in contexts], budgets, self._head.draft_ids)

    def draw(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor) -> list[DraftTree]:
        """Chains drawn from the head's own law."""
        shape, draft_ids = self._shape(contexts, width=1), self._head.draft_ids
        expansion = self._expand(slots, states, FilteredDraft(contexts, draft_ids.device), shape)
        return draw_chains(expansion, contexts, shape, self._config.law_tokens, draft_ids)

    def ahead(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, config: AheadConfig) -> Growth:
        """Trees that can be grown on, with one level recorded. They teach the scale nothing."""
        shape = TreeConfig(depth=config.levels, width=config.rows)
        ranker = Ranker(contexts, self._config, shape.depth, self._head.draft_ids, self._scale)
        return Growth(self._expand(slots, states, ranker, shape), config.rows, config.children)

    def _grower(self) -> Grower[Expansion]:
        head, tree, shape = self._head, self._tree, replace(self._tree, width=self._width)

        def expand(roots: Roots, scorer: Scorer) -> Expansion:
            return EagleExpansion(head, scorer, self._pools, roots.prefix, roots.states, shape)

        def grow_candidates(expansion: Expansion) -> Candidates:
            return self._candidates(expansion, tree.depth)

        dtype, num_slots = head.embedding.dtype, self._pools.scratch
        longest = min(head.context_length, num_slots)
        return Grower(
            expand, grow_candidates, tree, head.config.hidden, dtype, head.draft_ids, self._pools.scratch, num_slots, longest
        )

    def _candidates(self, expansion: Expansion, depth: int) -> Candidates:
        if self._plan:
            return grow_static(expansion, self._plan, depth)
        return grow(expansion, replace(self._tree, depth=depth))

    def _expand(self, slots: Sequence[Slots], states: Tensor, scorer: Scorer, shape: TreeConfig) -> Expansion:
        prefix = tight_prefix(slots, states.device)
        return EagleExpansion(self._head, scorer, self._pools, prefix, states, shape)

    def _shape(self, contexts: Sequence[DraftContext], width: int) -> TreeConfig:
        return TreeConfig(self._tree.nodes, min(self._tree.depth, max(c.budget.max_depth for c in contexts)), width)

    @property
    def _width(self) -> int:
        """Most nodes that are expanded at a level."""
        return self._plan.most_expanded if self._plan else self._tree.width
