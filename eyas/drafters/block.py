"""Drafters with one-pass block heads: DFlash, DFlash2 and DSpark. One backbone pass drafts all levels of a tree.

Keys and values of context features are cached once per token and layer; block rows are dropped after each round. The anchor
is the last committed token. It has no feature yet: a session of n + 1 tokens has n slots, and its anchor is at position n.
With a Markov head or a selector, a node's children depend on its level and its token: trees are path-conditional. Otherwise
they depend on the level alone, and trees are those of DDTree (2604.12989).
Legend: S sessions, W frontier rows, G levels, B rows of a block, L prefix length, d head width, H draft hidden, D draft
vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.cache.kv_cache import KVCache, KVShape
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.base import DraftContext, DraftWork, within
from eyas.drafters.neural import NeuralDrafter, check_tree, plan_tree_slots
from eyas.drafters.sessions import KVLedger, make_kv_cache, num_features
from eyas.drafters.trees.cpu_growth import CompiledGrowth
from eyas.drafters.trees.growth import Expansion, IndependentExpansion, ddtree_shape
from eyas.drafters.trees.rows import GrowthShape, Roots
from eyas.drafters.trees.scoring import unmasked_words
from eyas.kernels.arguments import NO_SLOTS, Projected
from eyas.models.backends.cuda_graphs import Capture, padded_size
from eyas.models.backends.packed_weights import PackedLinear, has_kernel
from eyas.models.heads.block import BlockHead
from eyas.models.heads.compiled import CompiledBackbone
from eyas.models.heads.slots import cache_and_attend
from eyas.models.inputs import PackedInputs, Segment
from eyas.protocol.tree import DraftTree

# Of a Markov head whose biases a kernel of the CPU computes: it reads all weights for each session and level.
MAX_KERNEL_WEIGHTS = 2**22


class BlockDrafter(NeuralDrafter[None]):
    """Trees of block heads. Sessions have no state besides their slots.

    Raises ConfigError for a tree that the head cannot grow.

    Args:
        capture: how to capture whole trees, backbone included, as CUDA graphs.
    """

    EXTEND_PASS, EXPAND_PASS = "draft_extend", "draft_round"

    def __init__(
        self,
        head: BlockHead,
        tree: TreeConfig,
        config: DraftingConfig,
        capture: Capture | None = None,
    ) -> None:
        c = head.config
        check_tree(tree, "a block drafter", c.draft_vocab_size)
        tree = replace(tree, num_steps=min(tree.num_steps, c.num_drafted))
        tree = ddtree_shape(tree, c.draft_vocab_size) if head.is_independent else tree
        shapes, device = [KVShape(c.num_kv_heads, c.head_dim, c.head_dim)] * c.num_layers, head.draft_ids.device
        self._head, dtype = head, head.embed_tokens.weight.dtype
        whole, batch = np.ones((c.block_size, c.block_size), dtype=np.bool_), config.cuda_graph_max_batch
        num_tree_slots = padded_size(batch) * c.block_size
        self._kv = make_kv_cache(config, shapes, dtype, device, num_tree_slots=num_tree_slots)
        slots = plan_tree_slots(self._kv, shapes, c.num_heads, head.max_model_len, [c.block_size], batch, capture, whole)
        first = self._kv.scratch - num_tree_slots
        ledger: KVLedger[None] = KVLedger(first, head.max_model_len)
        super().__init__(config, tree, None, head.draft_ids, ledger)
        self._tree_slots = np.arange(first, self._kv.scratch).reshape(-1, c.block_size)
        self._use_slots(slots, capture, 0, dtype, self._cache_context, c.hidden)
        self._compiled = None if slots or config.emulated_device else head.compiled
        self._growth = self._compiled_growth() if self._compiled else None

    def _compiled_growth(self) -> CompiledGrowth | None:
        """Return what grows trees on the CPU in one kernel: for heads whose levels are known at once, but
        for a Markov head.
        """
        head, markov = self._head, self._head.markov_head
        if head.is_independent:
            return CompiledGrowth(head.draft_ids)
        if markov is None or markov.kind != "vanilla":
            return None
        layer = markov.markov_w2
        if not isinstance(layer, PackedLinear) or not has_kernel(layer):
            return None
        if layer.in_features * layer.out_features > MAX_KERNEL_WEIGHTS:
            return None
        return CompiledGrowth(head.draft_ids, markov.markov_w1.weight, layer.product)

    @property
    def work(self) -> DraftWork:
        """One pass, whose context is projected only."""
        return DraftWork(1, self._head.config.num_layers)

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of all new features in every layer. Trees grow from tokens alone: the states are empty."""
        features = self._features(contexts)
        if self._compiled is None:
            return self._run_new(contexts, features, self._cache_context)
        all_slots, counts = self._prefix_slots(contexts), [num_features(context) for context in contexts]
        positions = [np.arange(len(own) - n, len(own)) for own, n in zip(all_slots, counts, strict=True)]
        slots = [own[len(own) - n :] for own, n in zip(all_slots, counts, strict=True)]
        self._compiled.cache_context(features, np.concatenate(positions), np.concatenate(slots), self._kv)
        return features.new_empty(len(contexts), 0)

    def _cache_context(self, features: Tensor, rows: PackedInputs, last: PackedInputs) -> Tensor:
        """Return an ExtendPass."""
        for layer, (keys, values) in enumerate(zip(self._kv.keys, self._kv.values, strict=True)):
            projected = self._head.project_context(layer, features, rows.positions)
            keys.index_copy_(0, rows.slots, projected.key)
            values.index_copy_(0, rows.slots, projected.value)
        return features.new_empty(len(rows.logits_indices), 0)

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> Sequence[DraftTree]:
        """Grow deterministic trees; in one kernel on the CPU, where nothing but noise changes the head's logits."""
        words = unmasked_words(contexts, self._config) if self._growth else None
        if not self._compiled or not self._growth or words is None:
            return super()._grow(contexts, states)
        tokens, shape = [context.tokens[-1] for context in contexts], self._shape(contexts, self._max_expanded)
        blocks = self._compiled_states(self._compiled, tokens, self._prefix_slots(contexts))
        logits = self._head.backbone_logits(blocks[:, : shape.num_steps].contiguous())
        budgets = [within(context.budget, self.tree) for context in contexts]
        return self._growth.trees(logits, tokens, words, budgets, shape.top_k)

    def _compiled_states(self, compiled: CompiledBackbone, tokens: Sequence[int], prefixes: Sequence[Slots]) -> Tensor:
        """Compute `block_states` by the kernels of the CPU.

        Args:
            tokens: the target's ids of the roots.
            prefixes: slots of each session.
        """
        head = self._head
        size = head.config.block_size
        visible, ahead = np.ones((size, size), np.bool_), np.arange(size)
        positions = [np.minimum(len(own) + ahead, head.max_model_len - 1) for own in prefixes]
        blocks = [
            Segment(ahead, places, NO_SLOTS, own, visible, NO_SLOTS) for places, own in zip(positions, prefixes, strict=True)
        ]
        embedded = F.embedding(head.block_tokens(torch.tensor(tokens)).flatten(), head.embed_tokens.weight)
        states = compiled.run(embedded, blocks, self._kv)
        return head.drafted_rows(states.view(len(tokens), size, -1))

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        states = block_states(self._head, self._kv, roots)[:, : shape.num_steps]
        if self._head.is_independent:
            return IndependentExpansion(self._head.backbone_logits(states))
        return ConditionalExpansion(self._head, states, roots.tokens)


def block_states(head: BlockHead, kv: KVCache, roots: Roots) -> Tensor:
    """Return one pass of the blocks behind all sessions' prefixes: normed states of the rows that
    propose tokens, [S, G, H].
    """
    tokens, rows = head.block_tokens(roots.tokens), roots.rows
    whole = rows.all_at_once(tokens).packed
    causal = rows.all_at_once(tokens, is_causal=True).packed if head.config.causal_windows else whole

    def attend(layer: int, own: Projected) -> Tensor:
        window = head.config.windows[layer]
        packed = whole if window is None else causal
        return cache_and_attend(kv, layer, own, packed.slots, own.query, packed, window)

    states = head.run(tokens.flatten(), whole.positions, attend)
    return head.drafted_rows(states.view(*tokens.shape, -1))


class ConditionalExpansion:
    """Expansion of block heads with a Markov head or selector. The logits of a level's children are the block's at this
    level, corrected for the node's token.

    A level costs products with the Markov head's rank; only its recurrent kind keeps memory [S, W, r] along paths.

    Args:
        states: normed, one of each level, [S, G, H].
        roots: the target's token ids, int64 [S].
    """

    def __init__(self, head: BlockHead, states: Tensor, roots: Tensor) -> None:
        self._head, self._states, self._roots = head, states, roots
        self._logits = head.backbone_logits(states)
        self._memory = head.initial_state(len(roots), 1)

    def first(self) -> Tensor:
        return self._step(0, self._roots[:, None])

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        self._memory = self._memory.gather(1, parents[:, :, None].expand(-1, -1, self._memory.shape[2]))
        return self._step(level, self._head.draft_ids[tokens])

    def _step(self, level: int, previous: Tensor) -> Tensor:
        """Return logits [S, W, D] below nodes with the tokens `previous` [S, W]."""
        logits, states = (x[:, level : level + 1] for x in (self._logits, self._states))
        logits, self._memory = self._head.step(logits, states, previous, self._memory)
        return logits
