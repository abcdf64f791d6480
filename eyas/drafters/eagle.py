"""EAGLE drafters of all generations (Li et al. 2024, 2025): committed tokens and features in, draft trees out.

Pair i of a session joins feature i with token i + 1, at draft position i. Draft KV is cached for pairs with true features
only: what a tree adds is dropped with it, and accepted positions are run again once their true features are known.
Legend: S sessions, W frontier rows, R rows of the level above, L prefix length, J key-value heads, D head width, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext, DrafterNeeds
from eyas.drafters.grown_tree import GrownRows
from eyas.drafters.neural import NeuralDrafter, attend_slots, cache_and_attend, layer_slots, plan_tree_slots
from eyas.drafters.scoring import Scorer, Scores, make_scorer, rank_children
from eyas.drafters.sessions import KVLedger, KVSession, make_kv_cache, no_slots, num_features
from eyas.drafters.tree_growth import Expansion, IndependentExpansion, LevelCosts, StaticTree, ddtree_shape
from eyas.drafters.tree_rows import PaddedPrefix, Roots, SlotLevels, SlotRows
from eyas.errors import ConfigError
from eyas.models.attention import masked_attention
from eyas.models.cuda.graphs import Capture
from eyas.models.emulation import on_host
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.layers import Projected, take_rows
from eyas.models.inputs import PackedInputs
from eyas.sampling.sampler import Ranked
from eyas.tensors import Bools, moved, upload


class EagleDrafter(NeuralDrafter[Tensor]):
    """EAGLE-1 with a static tree, EAGLE-2 and EAGLE-3 with dynamic ones, P-EAGLE with all levels in one pass.

    A session's state [H] is that of its last pair.
    """

    def __init__(
        self,
        head: EagleHead,
        tree: TreeConfig,
        config: DraftingConfig,
        static_tree: StaticTree | None = None,
        capture: Capture | None = None,
    ) -> None:
        """static_tree: the shape of every tree, in place of `tree`. capture: how to capture whole trees as CUDA graphs.

        Raises ConfigError for a tree that the head cannot grow.
        """
        c = head.config
        tree = static_tree.shape if static_tree else tree
        tree = ddtree_shape(tree, c.draft_vocab_size) if c.kind == "peagle" else tree
        if tree.num_steps < 1 or tree.top_k > c.draft_vocab_size:
            raise ConfigError(
                f"tree.num_steps {tree.num_steps} and tree.top_k {tree.top_k}: an EAGLE drafter needs num_steps of at least "
                f"1 and top_k of at most its draft vocabulary, {c.draft_vocab_size}"
            )
        shapes, dtype, device = [(c.num_kv_heads, c.head_dim)] * c.num_layers, head.embedding.dtype, head.embedding.device
        self._head = head
        plan = partial(plan_tree_slots, c, dtype, device, head.max_model_len, max_batch=config.cuda_graph_max_batch)
        slots = plan(self._widths(tree, static_tree), capture=capture, visible=self._visible(tree))
        num_slots = slots.num_slots if slots else 0
        self._kv = make_kv_cache(config, shapes, dtype, device, num_tree_slots=num_slots)
        first = self._kv.scratch - num_slots
        super().__init__(config, tree, static_tree, head.draft_ids, KVLedger(first, head.max_model_len))
        self._level_costs = LevelCosts() if c.kind != "peagle" else None
        slots = slots and replace(slots, first=first, spare=self._kv.scratch)
        self._use_slots(slots, capture, c.hidden, dtype, self._run_pairs, c.hidden)

    def _widths(self, tree: TreeConfig, static_tree: StaticTree | None) -> Sequence[int]:
        """Rows of a tree in each pass."""
        if static_tree:
            return [len(level.expanded) for level in static_tree.levels[:-1]]
        levels = tree.num_steps - 1
        return [levels] if self._head.config.kind == "peagle" else [tree.top_k] * levels

    def _visible(self, tree: TreeConfig) -> Bools | None:
        """Which rows of P-EAGLE's only pass see each other."""
        return np.tri(tree.num_steps - 1, dtype=np.bool_) if self._head.config.kind == "peagle" else None

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._head.config.hidden)

    def can_grow(self, session: str) -> bool:
        """Whether the session has all that a tree grows from."""
        known = self.sessions.get(session)
        return known is not None and known.state is not None and len(known.slots) > 0

    @torch.inference_mode()
    def root_candidates(self, contexts: Sequence[DraftContext], num_candidates: int) -> tuple[Tensor, Ranked]:
        """Of sessions that can grow, the states [S, H] behind their last commits, and the best next tokens [S, C]."""
        states = [self.sessions[context.session].state for context in contexts]
        stacked = torch.stack([state for state in states if state is not None])
        return stacked, self._best_next(contexts, stacked, num_candidates)

    def _best_next(self, contexts: Sequence[DraftContext], states: Tensor, num_candidates: int) -> Ranked:
        """The best next tokens [S, C] by the states [S, H] behind the contexts' last tokens."""
        scorer = make_scorer(contexts, self.ranking, 1, self.draft_ids)
        best = rank_children(scorer(self._head.raw_logits(states[:, None]), 0), num_candidates)
        return Ranked(*(column[:, 0] for column in best))

    @torch.inference_mode()
    def run_rows(
        self, contexts: Sequence[DraftContext], rows: Sequence[GrownRows], num_candidates: int
    ) -> tuple[Tensor, Ranked]:
        """Run rows of trees below the sessions' last commits, of any depths, in one pass.

        Returns:
            Their states [S, R, H] and best children [S, R, C], draft ids; undefined beyond a session's own rows.
        """
        device, most, prefixes = self.draft_ids.device, max(len(own.tokens) for own in rows), self._prefix_slots(contexts)
        padded = [own.padded(most) for own in rows]
        tokens = upload(np.stack([own.tokens for own in padded]), device)
        depths = upload(np.stack([own.depths for own in padded]), device)
        visible = upload(np.stack([own.visible for own in padded]), device)
        features = torch.stack([on_host(own.features) for own in padded])
        cached = PaddedPrefix.of(prefixes, [no_slots()] * len(prefixes), device)

        def run() -> tuple[Tensor, Ranked]:
            buffer = BufferAttention(self._head, self._kv, cached, TreeConfig(num_steps=2, top_k=most))
            own = buffer.rows(visible, depths)
            states = self._head.run(features.flatten(0, 1), tokens.flatten(), own.positions, own.attend)
            # each row is scored as a session whose last commit ends there: the noise depends on the position alone
            placed = [(context, int(depth)) for context, own in zip(contexts, padded, strict=True) for depth in own.depths]
            ends = [replace(context, start_position=context.start_position + depth) for context, depth in placed]
            best = self._best_next(ends, states, num_candidates)
            return states.view(*tokens.shape, -1), Ranked(*(column.view(*tokens.shape, -1) for column in best))

        if self.device is None:
            return run()
        states, best = self.device.run("draft_level", tokens.numel(), sum(map(len, prefixes)), run)
        return states, Ranked(*map(self.device.on_device, best))

    def _claim(self, session: KVSession[Tensor], context: DraftContext, busy: Collection[str]) -> bool:
        count = num_features(context)
        return self.sessions.claim(session, count, 0, busy) and count > 0

    def _expand(self, roots: Roots, scorer: Scorer, shape: TreeConfig) -> Expansion:
        if self._head.config.kind == "peagle":
            levels = self.tree.num_steps if isinstance(roots.cached, SlotRows) else shape.num_steps
            rows = EagleExpansion(self._head, scorer, self._kv, roots, TreeConfig(num_steps=2, top_k=levels))
            return IndependentExpansion(rows.parallel_logits(levels), scorer)
        return EagleExpansion(self._head, scorer, self._kv, roots, shape)

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of all new pairs. The last layer runs only the last pair of each session.

        Returns the state [S, H] behind each session's last pair.
        """
        features = torch.cat([context.features for context in contexts if context.features is not None])
        features = moved(features, self.draft_ids.device, self._head.embedding.dtype)
        states = self._run_new(contexts, features, self._run_pairs, self._head.config.num_layers > 1)
        for context, state in zip(contexts, states, strict=True):
            self.sessions[context.session].state = state
        return states

    def _run_pairs(self, features: Tensor, pairs: PackedInputs, last: PackedInputs) -> Tensor:
        """An ExtendPass."""
        head, slots, ends = self._head, pairs.slots, pairs.logits_indices
        to_slots = partial(layer_slots, self._kv, pairs)
        rows = head.project(features, pairs.tokens, pairs.positions, to_slots)
        deepest = head.config.num_layers - 1
        for layer in range(deepest):
            attended = cache_and_attend(self._kv, layer, rows, slots, rows.query, pairs)
            rows = head.project_next(layer + 1, head.finish(attended, rows.residual, layer), pairs.positions, to_slots)
        attended = cache_and_attend(self._kv, deepest, rows, slots, rows.query[ends], last)
        return head.finish(attended, rows.residual[ends])


class EagleExpansion:
    """Implements Expansion. A row attends to the prefix, to its ancestors and to itself."""

    def __init__(self, head: EagleHead, scorer: Scorer, kv: KVCache, roots: Roots, shape: TreeConfig) -> None:
        """shape: number of levels, and the most rows of a level."""
        self._head, self._scorer, self._states = head, scorer, roots.states[:, None]
        cached = roots.cached
        self._kv = kv
        self._rows: SlotLevels | BufferAttention = (
            SlotLevels(cached) if isinstance(cached, SlotRows) else BufferAttention(head, kv, cached, shape)
        )

    def first(self) -> Scores:
        return self._scorer(self._head.raw_logits(self._states), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Scores:
        self._rows = self._rows.level(level, parents)
        if isinstance(self._rows, SlotLevels):
            packed = self._rows.packed
            slots = partial(layer_slots, self._kv, packed)
            rows = self._head.project_level(self._states, parents, tokens, packed.positions, slots)
            states = self._head.run_layers(rows, packed.positions, partial(attend_slots, self._kv, packed), slots)
            self._states = states.view(*tokens.shape, -1)
        else:
            self._states = self._run(take_rows(self._states, parents), self._head.draft_ids[tokens])
        return self._scorer(self._head.raw_logits(self._states), level)

    def parallel_logits(self, num_steps: int) -> Tensor:
        """Logits [S, num_steps, D] of P-EAGLE: of the last pair, and of mask rows behind it, which see those before.

        There must be room for num_steps rows.
        """
        head, count = self._head, num_steps - 1
        assert head.mask_feature is not None
        assert head.config.mask_token_id is not None
        if not count:
            return head.raw_logits(self._states)
        tokens = torch.full((len(self._states), count), head.config.mask_token_id, device=self._states.device)
        self._rows = self._rows.all_at_once() if isinstance(self._rows, SlotLevels) else self._rows.chain(count)
        features = head.mask_feature.expand(len(tokens), count, -1)
        return head.raw_logits(torch.cat([self._states, self._run(features, tokens)], 1))

    def _run(self, features: Tensor, tokens: Tensor) -> Tensor:
        """States [S, W, H] of the newest rows: features [S, W, H], the target's token ids [S, W]."""
        rows = self._rows
        attend, positions = (
            (partial(attend_slots, self._kv, rows.packed), rows.packed.positions)
            if isinstance(rows, SlotLevels)
            else (rows.attend, rows.positions)
        )
        states = self._head.run(features.flatten(0, 1), tokens.flatten(), positions, attend)
        return states.view(*tokens.shape, -1)


class BufferAttention:
    """The rows of trees without the kernel. Keys and values of the rows follow a copy of the prefix in each layer:

        [ prefix, L cells | padding masked ] [ level 1, W rows ] [ level 2, W rows ] ...

    positions: of the newest rows, [S * W].
    """

    positions: Tensor

    def __init__(self, head: EagleHead, kv: KVCache, cached: PaddedPrefix, shape: TreeConfig) -> None:
        """shape: number of levels, and the most rows of a level."""
        self._config, self._max_model_len = head.config, head.max_model_len
        index, lengths, dtype = cached.slots, cached.lengths, kv.keys[0].dtype
        sessions, self._length = index.shape
        self._end = self._length
        self._root = lengths[:, None] - 1
        room = shape.top_k * (shape.num_steps - 1)
        self._keys, self._values = ([_buffer(p, index, room) for p in pool] for pool in (kv.keys, kv.values))
        hidden = torch.arange(self._length, device=index.device) >= lengths[:, None]
        self._folded = head.config.num_heads // head.config.num_kv_heads
        shape_of_bias = (sessions, self._folded, shape.top_k, self._length + room)
        self._bias = torch.zeros(shape_of_bias, device=index.device, dtype=dtype)
        self._bias[..., : self._length].masked_fill_(hidden[:, None, None], float("-inf"))
        self._seen = torch.zeros(sessions, shape.top_k, 0, dtype=torch.bool, device=index.device)

    def level(self, level: int, parents: Tensor) -> BufferAttention:
        """With the rows of the next level, from 1. parents: row of each one's parent in the level above, [S, W]."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        seen = torch.cat([take_rows(self._seen, parents), own], dim=2)
        return self._with(seen, (self._root + level).expand_as(parents))

    def rows(self, visible: Tensor, depths: Tensor) -> BufferAttention:
        """With rows of any depths from 1, [S, W], that see each other as `visible` says [S, W, W]."""
        return self._with(visible, self._root + depths)

    def chain(self, count: int) -> BufferAttention:
        """With `count` rows behind the root; each sees those before it."""
        ahead = torch.arange(1, count + 1, device=self._root.device)
        seen = torch.ones(count, count, dtype=torch.bool, device=ahead.device).tril()
        return self._with(seen.expand(len(self._root), -1, -1), self._root + ahead)

    def _with(self, seen: Tensor, positions: Tensor) -> BufferAttention:
        found = copy(self)
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        found._seen, found.positions = seen, positions.clamp(max=self._max_model_len - 1).flatten()
        found._end += seen.shape[1]
        found._bias[..., : seen.shape[1], self._length : found._end].zero_().masked_fill_(~seen[:, None], float("-inf"))
        return found

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Store keys and values of the newest rows, then attend from them; [S * W, heads, d]."""
        c, sessions = self._config, len(self._root)
        width, (keys, values) = rows.key.shape[0] // sessions, (self._keys[layer], self._values[layer])
        keys[:, :, self._end - width : self._end] = rows.key.view(sessions, width, -1, c.head_dim).transpose(1, 2)
        values[:, :, self._end - width : self._end] = rows.value.view(sessions, width, -1, c.head_dim).transpose(1, 2)
        query = rows.query.view(sessions, width, c.num_kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
        attended = masked_attention(
            query.reshape(sessions, c.num_kv_heads, -1, c.head_dim),
            keys[:, :, : self._end],
            values[:, :, : self._end],
            self._bias[..., :width, : self._end].reshape(sessions, 1, self._folded * width, self._end),
            c.head_dim**-0.5,
        )
        attended = attended.view(sessions, c.num_kv_heads, -1, width, c.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(sessions * width, c.num_heads, c.head_dim)


def _buffer(pool: Tensor, index: Tensor, room: int) -> Tensor:
    """Copy the pool's rows at index [S, L] and append `room` empty cells: [S, J, L + room, D]."""
    rows = pool[index].transpose(1, 2)
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], room, rows.shape[3])], dim=2)
