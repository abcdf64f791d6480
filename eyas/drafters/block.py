"""Drafters with one-pass block heads: DFlash, DFlash2 and DSpark. One backbone pass drafts all levels of a tree.

Keys and values of context features are cached once per token and layer; block rows are dropped after each round. The anchor
is the last committed token. It has no feature yet: a session of n + 1 tokens has n slots, and its anchor is at position n.
With a Markov head or a selector, a node's children depend on its level and its token: trees are path-conditional. Otherwise
they depend on the level alone, and trees are those of DDTree (2604.12989).
Legend: S sessions, W frontier rows, G levels, B rows of a block, L prefix length, d head width, H draft hidden, D draft
vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext, DrafterNeeds
from eyas.drafters.neural import NeuralDrafter, cache_and_attend, plan_tree_slots
from eyas.drafters.scoring import Scorer, Scores
from eyas.drafters.sessions import KVLedger, KVSession, make_kv_cache, num_features
from eyas.drafters.tree_growth import Expansion, IndependentExpansion, ddtree_shape
from eyas.drafters.tree_rows import PaddedPrefix, Roots, SlotLevels, SlotRows
from eyas.errors import ConfigError
from eyas.models.attention import masked_attention
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.block import BlockHead
from eyas.models.heads.layers import Projected
from eyas.models.inputs import PackedInputs
from eyas.tensors import moved


class BlockDrafter(NeuralDrafter[None]):
    """Trees of block heads. Sessions have no state besides their slots."""

    EXTEND_PASS, EXPAND_PASS = "draft_extend", "draft_round"

    def __init__(self, head: BlockHead, tree: TreeConfig, config: DraftingConfig, capture: Capture | None = None) -> None:
        """capture: how to capture whole trees, backbone included, as CUDA graphs.

        Raises ConfigError for a tree that the head cannot grow.
        """
        c = head.config
        if tree.num_steps < 1 or tree.top_k > c.draft_vocab_size:
            raise ConfigError(
                f"tree.num_steps {tree.num_steps} and tree.top_k {tree.top_k}: a block drafter needs num_steps of at least "
                f"1 and top_k of at most its draft vocabulary, {c.draft_vocab_size}"
            )
        tree = replace(tree, num_steps=min(tree.num_steps, c.num_drafted))
        tree = ddtree_shape(tree, c.draft_vocab_size) if head.is_independent else tree
        shapes, device = [(c.num_kv_heads, c.head_dim)] * c.num_layers, head.draft_ids.device
        self._head, self._dtype = head, head.embed_tokens.weight.dtype
        whole, batch = np.ones((c.block_size, c.block_size), dtype=np.bool_), config.cuda_graph_max_batch
        slots = plan_tree_slots(c, self._dtype, device, head.max_model_len, [c.block_size], batch, capture, whole)
        num_tree_slots = slots.num_slots if slots else 0
        self._kv = make_kv_cache(config, shapes, self._dtype, device, num_tree_slots=num_tree_slots)
        ledger: KVLedger[None] = KVLedger(self._kv.scratch - num_tree_slots, head.max_model_len)
        super().__init__(config, tree, None, head.draft_ids, ledger)
        slots = slots and replace(slots, first=self._kv.scratch - num_tree_slots, spare=self._kv.scratch)
        self._use_slots(slots, capture, 0, self._dtype, self._cache_context, c.hidden)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._head.config.hidden)

    def _claim(self, session: KVSession[None], context: DraftContext, busy: Collection[str]) -> bool:
        count = num_features(context)
        return self.sessions.claim(session, count, 0, busy) and count > 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of all new features in every layer. Trees grow from tokens alone: the states are empty."""
        features = torch.cat([context.features for context in contexts if context.features is not None])
        features = moved(features, self.draft_ids.device, self._dtype)
        return self._run_new(contexts, features, self._cache_context)

    def _cache_context(self, features: Tensor, rows: PackedInputs, last: PackedInputs) -> Tensor:
        """An ExtendPass."""
        for layer, (keys, values) in enumerate(zip(self._kv.keys, self._kv.values, strict=True)):
            projected = self._head.project_context(layer, features, rows.positions)
            keys.index_copy_(0, rows.slots, projected.key)
            values.index_copy_(0, rows.slots, projected.value)
        return features.new_empty(len(rows.logits_indices), 0)

    def _expand(self, roots: Roots, scorer: Scorer, shape: TreeConfig) -> Expansion:
        states = block_states(self._head, self._kv, roots)[:, : shape.num_steps]
        if self._head.is_independent:
            return IndependentExpansion(self._head.backbone_logits(states), scorer)
        return ConditionalExpansion(self._head, scorer, states, roots.tokens)


def block_states(head: BlockHead, kv: KVCache, roots: Roots) -> Tensor:
    """One pass of the blocks behind all sessions' prefixes: normed states of the rows that propose tokens, [S, G, H]."""
    cached = roots.cached
    rows = SlotBlocks(head, kv, cached) if isinstance(cached, SlotRows) else CopiedBlocks(head, kv, cached)
    states = head.run(head.block_tokens(roots.tokens).flatten(), rows.positions, rows.attend)
    return head.drafted_rows(states.view(len(roots.tokens), head.config.block_size, -1))


class SlotBlocks:
    """The rows of blocks for the attention kernel. Rows have slots of the KV cache, and no prefix is copied."""

    def __init__(self, head: BlockHead, kv: KVCache, rows: SlotRows) -> None:
        self._config, self._kv, blocks = head.config, kv, SlotLevels(rows)
        whole = blocks.all_at_once().packed
        windowed = blocks.all_at_once(rows.layout.own_causal).packed if head.config.causal_windows else whole
        self._packed = {window: whole if window is None else windowed for window in set(head.config.windows)}
        self.positions = whole.positions

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Attend from the block rows [S * B, heads, d] to the prefixes and their own blocks."""
        window = self._config.windows[layer]
        packed = self._packed[window]
        return cache_and_attend(self._kv, layer, rows, packed.slots, rows.query, packed, window)


class CopiedBlocks:
    """The rows of blocks without the kernel. In each layer keys and values are

    [ prefix, L cells | padding masked ] [ block, B rows ]
    """

    def __init__(self, head: BlockHead, kv: KVCache, cached: PaddedPrefix) -> None:
        c, lengths = head.config, cached.lengths
        self._config, self._kv, self._index = c, kv, cached.slots
        ahead = torch.arange(c.block_size, device=lengths.device)
        cells = torch.arange(self._index.shape[1], device=lengths.device).expand(len(lengths), -1)
        own = lengths[:, None] + ahead
        self._behind = own[:, :, None] - torch.cat([cells, own], 1)[:, None]
        filled = cells < lengths[:, None]
        self._filled = torch.cat([filled, torch.ones_like(own, dtype=torch.bool)], 1)[:, None].expand_as(self._behind)
        self._biases = {window: self._bias(window, kv.keys[0].dtype) for window in set(c.windows)}
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        self.positions = own.clamp(max=head.max_model_len - 1).flatten()

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [S, 1, heads per key-value head * B, L + B]; see `eyas.models.heads.block.block_mask`."""
        seen = self._filled
        if window is not None:
            seen = seen & (self._behind < window)
            seen = seen & (self._behind >= 0) if self._config.causal_windows else seen
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return bias.repeat(1, self._config.num_heads // self._config.num_kv_heads, 1)[:, None]

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Attend from the block rows [S * B, heads, d] to the prefixes and their own blocks."""
        c, sessions = self._config, len(self._index)
        pools = (self._kv.keys[layer], rows.key), (self._kv.values[layer], rows.value)
        keys, values = (
            torch.cat([pool[self._index], own.view(sessions, c.block_size, *own.shape[1:])], 1).transpose(1, 2)
            for pool, own in pools
        )
        query = rows.query.view(sessions, c.block_size, c.num_kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
        folded = query.reshape(sessions, c.num_kv_heads, -1, c.head_dim)
        attended = masked_attention(folded, keys, values, self._biases[c.windows[layer]], c.head_dim**-0.5)
        attended = attended.view(sessions, c.num_kv_heads, -1, c.block_size, c.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(sessions * c.block_size, c.num_heads, c.head_dim)


class ConditionalExpansion:
    """Implements Expansion. The logits of a level's children are the block's at this level, corrected for the node's token.

    A level costs products with the Markov head's rank; only its recurrent kind keeps memory [S, W, r] along paths.
    """

    def __init__(self, head: BlockHead, scorer: Scorer, states: Tensor, roots: Tensor) -> None:
        """states: normed, one of each level, [S, G, H]. roots: the target's token ids, int64 [S]."""
        self._head, self._scorer, self._states, self._roots = head, scorer, states, roots
        self._logits = head.backbone_logits(states)
        self._memory = head.initial_state(len(roots), 1)

    def first(self) -> Scores:
        return self._score(0, self._roots[:, None])

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Scores:
        self._memory = self._memory.gather(1, parents[:, :, None].expand(-1, -1, self._memory.shape[2]))
        return self._score(level, self._head.draft_ids[tokens])

    def _score(self, level: int, previous: Tensor) -> Scores:
        """Scores [S, W, D] below nodes with the tokens `previous` [S, W]."""
        logits, states = (x[:, level : level + 1] for x in (self._logits, self._states))
        logits, self._memory = self._head.step(logits, states, previous, self._memory)
        return self._scorer(logits, level)
