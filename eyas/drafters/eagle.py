"""EAGLE-1, EAGLE-2 and EAGLE-3 (Li et al. 2024, 2025): committed tokens and features in, draft trees out.

Pair i of a session joins feature i with token i + 1, at draft position i. Draft KV is cached for pairs with true features
only: what a tree adds is dropped with it, and accepted positions are run again once their true features are known.
Legend: S sessions, W frontier rows, R rows of the level above, L prefix length, J key-value heads, D head width, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints
from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext, DraftWork, within
from eyas.drafters.neural import NeuralDrafter, check_tree, last_row, new_rows, plan_tree_slots
from eyas.drafters.sessions import KVLedger, make_kv_cache, num_features
from eyas.drafters.trees.cpu_growth import EagleGrowth
from eyas.drafters.trees.growth import Expansion, StaticTree
from eyas.drafters.trees.rows import FoundRows, GrownRows, GrowthShape, Roots
from eyas.drafters.trees.scoring import make_scorer, unmasked_words
from eyas.emulation.device import on_host
from eyas.kernels.arguments import Ranked
from eyas.models.backends.cuda_graphs import Capture, padded_size
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.mtp import MtpHead
from eyas.models.heads.slots import attend_slots, layer_slots
from eyas.models.inputs import PackedInputs, Segment
from eyas.protocol.tree import DraftTree

# New pairs up to which one kernel of the CPU runs all of them through the last layer: weights take most of its time.
MAX_WHOLE_PAIRS = 24


class EagleDrafter(NeuralDrafter[Tensor]):
    """EAGLE-1 with a static tree, EAGLE-2 and EAGLE-3 with dynamic ones; also base of drafters with modules for MTP.

    A session's state [H] is that of its last pair. first_grown_slot: of those for nodes of trees that grow ahead.

    Raises ConfigError for a tree that the head cannot grow.

    Args:
        static_tree: the shape of every tree, in place of `tree`.
        capture: how to capture whole trees as CUDA graphs.
        num_grown_slots: for nodes of trees that grow ahead, beside the slots of `config`.
    """

    def __init__(
        self,
        head: EagleHead | MtpHead,
        tree: TreeConfig,
        config: DraftingConfig,
        static_tree: StaticTree | None = None,
        capture: Capture | None = None,
        num_grown_slots: int = 0,
    ) -> None:
        c = head.config
        tree = static_tree.shape if static_tree else tree
        check_tree(tree, "an EAGLE drafter", c.draft_vocab_size)
        shapes = head.kv_shapes
        dtype, device = head.dtype, head.draft_ids.device
        self._head = head
        widths, batch = self._widths(tree, static_tree), config.cuda_graph_max_batch
        num_tree_slots = padded_size(batch) * sum(widths)
        self._kv = make_kv_cache(config, shapes, dtype, device, num_tree_slots=num_tree_slots + num_grown_slots)
        slots = None
        if head.num_modules == 1:
            slots = plan_tree_slots(
                self._kv, shapes, head.num_heads, head.max_model_len, widths, batch, capture, self._visible(tree)
            )
        compiled = None if slots or static_tree or config.emulated_device else head.compiled
        self.num_grown_slots, self.first_grown_slot = num_grown_slots, self._kv.scratch - num_grown_slots
        first = self.first_grown_slot - num_tree_slots
        super().__init__(config, tree, static_tree, head.draft_ids, KVLedger(first, head.max_model_len))
        self._tree_slots = np.arange(first, self.first_grown_slot).reshape(padded_size(batch), -1)
        self._use_slots(slots, capture, c.hidden, dtype, self._run_pairs, c.hidden)
        self._compiled = compiled
        self._growth = EagleGrowth(compiled, self._kv, self._tree_slots) if compiled and compiled.has_stack else None
        self._run_segments = partial(compiled.run, kv=self._kv) if compiled else self._run_packed

    def _widths(self, tree: TreeConfig, static_tree: StaticTree | None) -> Sequence[int]:
        """Return the rows of a tree in each pass."""
        if static_tree:
            return [len(level.expanded) for level in static_tree.levels[:-1]]
        return [tree.top_k] * (tree.num_steps - 1)

    def _visible(self, tree: TreeConfig) -> Bools | None:
        """Return which rows of a tree see each other, [R, R]; None where each sees its ancestors."""
        return None

    @property
    def work(self) -> DraftWork:
        """The new pairs and the levels below."""
        passes = self._num_passes
        return DraftWork(passes, passes * self._head.config.num_layers)

    @property
    def _num_passes(self) -> int:
        """Return how many passes a tree takes."""
        return self.tree.num_steps

    def can_grow(self, session: str) -> bool:
        """Return whether the session has all that a tree grows from."""
        return self.is_cached(session) and self.sessions[session].state is not None

    @torch.inference_mode()
    def root_candidates(self, contexts: Sequence[DraftContext], num_candidates: int) -> tuple[Tensor, Ranked]:
        """Return, for sessions that can grow, the states [S, H] after their last commits, and the best next
        tokens [S, C].
        """
        states = [self.sessions[context.session].state for context in contexts]
        stacked = torch.stack([state for state in states if state is not None])
        return stacked, self._best_next(contexts, stacked, num_candidates)

    def _best_next(self, contexts: Sequence[DraftContext], states: Tensor, num_candidates: int) -> Ranked:
        """Return the best next tokens [S, C] by the states [S, H] behind the contexts' last tokens."""
        scorer = make_scorer(contexts, self._config, 1, self.draft_ids)
        best = scorer(self._head.raw_logits(states[:, None]), 0).best(num_candidates)
        return Ranked(*(column[:, 0] for column in best))

    @torch.inference_mode()
    def run_rows(self, contexts: Sequence[DraftContext], rows: Sequence[GrownRows], num_candidates: int) -> FoundRows:
        """Run rows of trees below the sessions' last commits, of any depths, in one pass."""
        prefixes = self._prefix_slots(contexts)
        segments = [self._segment(*each) for each in zip(rows, prefixes, strict=True)]
        features = torch.cat([on_host(own.features) for own in rows])

        def run() -> tuple[Tensor, Ranked]:
            states = self._run_segments(features, segments)
            # each row is scored as a session whose last commit ends there: the noise depends on the position alone
            ends = [end for context, own in zip(contexts, rows, strict=True) for end in _ends(context, own.depths)]
            return states, self._best_next(ends, states, num_candidates)

        if self.device is None:
            return FoundRows(*run())
        states, best = self.device.run("draft_level", len(features), sum(map(len, prefixes)), run)
        return FoundRows(states, Ranked(*map(self.device.on_device, best)))

    def _segment(self, rows: GrownRows, prefix: Slots) -> Segment:
        """Return the rows of a tree that grows."""
        positions = np.minimum(len(prefix) - 1 + rows.depths, self._head.max_model_len - 1)
        slots, others = self.first_grown_slot + rows.slots, self.first_grown_slot + rows.others
        return Segment(rows.tokens, positions, slots, prefix, rows.visible, np.arange(0), None, others)

    def _run_packed(self, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return states [R, H] of rows in slots, through all layers."""
        return self._head.run_slots(features, self._pack(segments), self._kv)

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> Sequence[DraftTree]:
        """Grow deterministic trees; by the kernels of the CPU, where nothing but noise changes the head's logits."""
        words = unmasked_words(contexts, self._config) if self._growth else None
        if self._growth is None or words is None:
            return super()._grow(contexts, states)
        tokens, shape = [context.tokens[-1] for context in contexts], self._shape(contexts, self._max_expanded)
        budgets = [within(context.budget, self.tree) for context in contexts]
        return self._growth.trees(states, tokens, words, budgets, shape, self._prefix_slots(contexts))

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        assert isinstance(self._head, EagleHead), "other heads expand rows themselves"
        return EagleExpansion(self._head, self._kv, roots)

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of all new pairs. The last layer may run only the last pair of each session.

        Returns the state [S, H] behind each session's last pair.
        """
        features = self._features(contexts)
        counts = list(map(num_features, contexts))
        if self._compiled:
            all_slots = self._prefix_slots(contexts)
            pairs = [new_rows(c, own, n, attends=True) for c, own, n in zip(contexts, all_slots, counts, strict=True)]
            if sum(counts) > MAX_WHOLE_PAIRS:
                states = self._compiled.run(features, pairs, self._kv, list(map(last_row, all_slots)))
            else:
                states = self._run_segments(features, pairs)[upload(np.cumsum(counts) - 1, features.device)]
        else:
            attends = isinstance(self._head, MtpHead) or self._head.config.num_layers > 1
            states = self._run_new(contexts, features, self._run_pairs, attends)
        for context, state in zip(contexts, states, strict=True):
            self.sessions[context.session].state = state
        return states

    def _run_pairs(self, features: Tensor, pairs: PackedInputs, last: PackedInputs) -> Tensor:
        """Return an ExtendPass."""
        return self._head.run_pairs(features, pairs, last, self._kv)


def _ends(context: DraftContext, depths: Ints) -> Iterator[DraftContext]:
    """Return the session as if its last commit ended `depths` tokens later."""
    ends = {depth: context._replace(start_position=context.start_position + depth) for depth in set(depths.tolist())}
    return (ends[depth] for depth in depths.tolist())


class EagleExpansion:
    """Expansion by an EAGLE head. A row attends to the prefix, to its ancestors and to itself."""

    def __init__(self, head: EagleHead, kv: KVCache, roots: Roots) -> None:
        self._head, self._kv, self._states = head, kv, roots.states[:, None]
        self._rows = roots.rows

    def first(self) -> Tensor:
        return self._head.raw_logits(self._states)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        self._rows = self._rows.level(level, parents, tokens)
        packed = self._rows.packed
        slots = partial(layer_slots, self._kv, packed)
        rows = self._head.project_level(self._states, parents, tokens, packed.positions, slots)
        states = self._head.run_layers(rows, packed.positions, partial(attend_slots, self._kv, packed), slots)
        self._states = states.view(*tokens.shape, -1)
        return self._head.raw_logits(self._states)
