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
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.draft_protocol import TreeBudget
from eyas.drafters.base import DraftContext, DrafterNeeds, DraftWork, within
from eyas.drafters.neural import (
    EmulatedExpansion,
    NeuralDrafter,
    cache_and_attend,
    masked_expansion,
    plan_tree_slots,
)
from eyas.drafters.scoring import Scorer, Scores, biased_scorer, make_scorer, noise_words, rank_children, scorer_kind
from eyas.drafters.sessions import KVLedger, KVSession, make_kv_cache, no_slots, num_features
from eyas.drafters.tree_growth import (
    Expansion,
    IndependentExpansion,
    Reals,
    ddtree_shape,
    grow_dynamic,
    limits_of,
    select_nodes,
    trees_from_columns,
    trees_of_cells,
)
from eyas.drafters.tree_rows import PaddedPrefix, Roots, SlotLevels, SlotRows
from eyas.errors import ConfigError
from eyas.models.attention import masked_attention
from eyas.models.cpu import PackedLinear, PackedProduct, has_kernel
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.block import BlockHead
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.layers import Projected
from eyas.models.inputs import PackedInputs, Segment
from eyas.tensors import Bools, Ints, download, moved, runs_compiled, upload
from eyas.tree import DraftTree

# Of a Markov head whose biases a kernel of the CPU computes: it reads all weights for each session and level.
MAX_KERNEL_WEIGHTS = 2**22
# Sessions of one pass of drafting ahead. Rows that it may have at least on a GPU, where they lie in slots.
MAX_SESSIONS_AHEAD = 64
MIN_ROWS_AHEAD = 4096


class BlockDrafter(NeuralDrafter[None]):
    """Trees of block heads. Sessions have no state besides their slots."""

    EXTEND_PASS, EXPAND_PASS = "draft_extend", "draft_round"

    def __init__(
        self,
        head: BlockHead,
        tree: TreeConfig,
        config: DraftingConfig,
        capture: Capture | None = None,
        is_ahead: bool = False,
    ) -> None:
        """capture: how to capture whole trees, backbone included, as CUDA graphs. is_ahead: whether `states_behind` may be
        called.

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
        largest = tree.num_draft_tokens * (1 + c.block_size) + c.block_size
        self._num_ahead_slots = max(MIN_ROWS_AHEAD, largest) if slots and is_ahead and not c.conv_kernel else 0
        num_slots = num_tree_slots + self._num_ahead_slots
        self._kv = make_kv_cache(config, shapes, self._dtype, device, num_tree_slots=num_slots)
        first = self._kv.scratch - num_slots
        ledger: KVLedger[None] = KVLedger(first, head.max_model_len)
        super().__init__(config, tree, None, head.draft_ids, ledger)
        slots = slots and replace(slots, first=first, spare=self._kv.scratch)
        self._use_slots(slots, capture, 0, self._dtype, self._cache_context, c.hidden)
        self._growth = self._compiled_growth()

    def _compiled_growth(self) -> CompiledGrowth | None:
        """What grows trees on the CPU in one kernel: for heads whose levels are known at once, but for a Markov head."""
        head, markov = self._head, self._head.markov_head
        if head.compiled is None or self._slots is not None or not runs_compiled(head.draft_ids.device):
            return None
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

    @torch.inference_mode()
    def warm_up(self) -> None:
        super().warm_up()
        if self._growth and self._is_compiled():  # compiled at its first call
            c, words = self._head.config, noise_words([], self.ranking, 1)
            blocks = compiled_states(self._head, self._kv, [0], [np.zeros(1, np.int64)])
            compiled, place = self._head.compiled, np.array([self._kv.scratch])
            if compiled is not None:
                compiled.cache_context(blocks[0, :1].contiguous(), place * 0, place, self._kv)
            logits = self._head.backbone_logits(blocks.contiguous())
            for has_noise in (False, True):
                self._growth.trees(logits, [0], words, has_noise, [TreeBudget(2, c.num_drafted)], self._max_expanded)

    def _is_compiled(self) -> bool:
        """Whether the kernels of the CPU run: on no emulated device, and not on several threads."""
        return self._head.compiled is not None and not self.device and runs_compiled(self.draft_ids.device)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._head.config.hidden)

    @property
    def work(self) -> DraftWork:
        """One pass, whose context is projected only."""
        return DraftWork(1, self._head.config.num_layers)

    def _claim(self, session: KVSession[None], context: DraftContext, busy: Collection[str]) -> bool:
        count = num_features(context)
        return self.sessions.claim(session, count, 0, busy) and count > 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of all new features in every layer. Trees grow from tokens alone: the states are empty."""
        features = torch.cat([context.features for context in contexts if context.features is not None])
        features = moved(features, self.draft_ids.device, self._dtype)
        compiled = self._head.compiled
        if compiled is None or not self._is_compiled():
            return self._run_new(contexts, features, self._cache_context)
        all_slots, counts = self._prefix_slots(contexts), [num_features(context) for context in contexts]
        positions = [np.arange(len(own) - n, len(own)) for own, n in zip(all_slots, counts, strict=True)]
        slots = [own[len(own) - n :] for own, n in zip(all_slots, counts, strict=True)]
        compiled.cache_context(features, np.concatenate(positions), np.concatenate(slots), self._kv)
        return features.new_empty(len(contexts), 0)

    def _cache_context(self, features: Tensor, rows: PackedInputs, last: PackedInputs) -> Tensor:
        """An ExtendPass."""
        for layer, (keys, values) in enumerate(zip(self._kv.keys, self._kv.values, strict=True)):
            projected = self._head.project_context(layer, features, rows.positions)
            keys.index_copy_(0, rows.slots, projected.key)
            values.index_copy_(0, rows.slots, projected.value)
        return features.new_empty(len(rows.logits_indices), 0)

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        """Deterministic trees; in one kernel on the CPU, where nothing but noise changes the head's logits."""
        is_ruled = any(context.allowed or context.logit_biases for context in contexts)
        if self._growth is None or not self._is_compiled() or is_ruled:
            return super()._grow(contexts, states)
        words = noise_words(contexts, self.ranking, len(contexts))
        if (kind := scorer_kind(words)) == "filtered":
            return super()._grow(contexts, states)
        tokens, shape = [context.tokens[-1] for context in contexts], self._shape(contexts, self._max_expanded)
        blocks = compiled_states(self._head, self._kv, tokens, self._prefix_slots(contexts))
        logits = self._head.backbone_logits(blocks[:, : shape.num_steps].contiguous())
        budgets = [within(context.budget, self.tree) for context in contexts]
        return self._growth.trees(logits, tokens, words, kind == "noised", budgets, shape.top_k)

    def first_together(self, trees: Sequence[DraftTree], num_nodes: int) -> int:
        """How many of these trees, from the first, one pass of `states_behind` can take, with `num_nodes` nodes of each."""
        trees = trees[:MAX_SESSIONS_AHEAD]
        if not self._num_ahead_slots:
            return len(trees)
        size = self._head.config.block_size
        rows = np.cumsum([len(tree) + (1 + min(num_nodes, len(tree))) * size for tree in trees])
        return int(np.searchsorted(rows, self._num_ahead_slots, side="right"))

    def can_grow(self, session: str) -> bool:
        """Whether the session has what blocks grow from."""
        return self.is_cached(session)

    @property
    def can_draft_ahead(self) -> bool:
        """Whether `states_behind` can run: convolutions take rows of whole blocks only."""
        return not self._head.config.conv_kernel

    @torch.inference_mode()
    def states_behind(
        self, contexts: Sequence[DraftContext], trees: Sequence[DraftTree], nodes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run blocks behind nodes of trees, before it is known which of them are accepted, in one pass.

        trees: below the sessions' last commits. nodes: of each tree.

        Returns:
            The normed states [S, G, H] behind the last commits, which propose the nodes of the trees; and for each session
            those behind its nodes [number of nodes, G, H]. These propose the tokens after the next one behind a node.
        """
        head, prefixes, where = self._head, self._prefix_slots(contexts), self.draft_ids.device
        rows = [_rows_ahead(tree, own, head.config) for tree, own in zip(trees, nodes, strict=True)]
        attention = self._blocks_ahead(rows, prefixes)
        tokens = upload(np.concatenate([own.tokens for own in rows]), where)

        def run() -> Tensor:
            return head.run(tokens, attention.positions, attention.attend)

        num_cached, device = sum(map(len, prefixes)), self.device
        states = device.on_device(device.run("draft_round", len(tokens), num_cached, run)) if device else run()
        parts = zip(torch.split(states, [len(own.tokens) for own in rows]), trees, strict=True)
        blocks = [own[len(tree) :].view(-1, head.config.block_size, own.shape[1]) for own, tree in parts]
        behind = [own[1:, head.config.block_size - head.config.num_drafted :] for own in blocks]
        return head.drafted_rows(torch.stack([own[0] for own in blocks])), behind

    def _blocks_ahead(self, rows: Sequence[RowsAhead], prefixes: Sequence[Slots]) -> SlotBlocks | BlocksApart:
        """Attention of the rows of sessions, one after the other: with the kernel in slots that all passes share."""
        head, where, ends = self._head, self.draft_ids.device, np.cumsum([len(own.tokens) for own in rows])
        if not self._num_ahead_slots:
            parts = list[CopiedBlocks]()
            for own, prefix in zip(rows, prefixes, strict=True):
                cached, visible = PaddedPrefix.of([prefix], [no_slots()], where), upload(own.visible[None], where)
                parts.append(CopiedBlocks(head, self._kv, cached, upload(len(prefix) + own.depths[None], where), visible))
            return BlocksApart(parts)
        first = self._kv.scratch - self._num_ahead_slots
        assert ends[-1] <= self._num_ahead_slots, "more rows than slots"
        segments, causal = list[Segment](), list[Segment]()
        for own, prefix, end in zip(rows, prefixes, ends.tolist(), strict=True):
            positions, none = np.minimum(len(prefix) + own.depths, head.max_model_len - 1), no_slots()
            slots = first + np.arange(end - len(own.tokens), end)
            segments.append(Segment(own.tokens, positions, slots, prefix, own.visible, none))
            before = own.visible & (own.depths[:, None] >= own.depths)
            causal.append(segments[-1]._replace(visible=before))
        windowed = head.config.causal_windows and any(head.config.windows)
        whole = self._pack(segments, sees_later=True)
        return SlotBlocks(head, self._kv, whole, self._pack(causal, sees_later=True) if windowed else whole)

    @torch.inference_mode()
    def next_tokens(self, contexts: Sequence[DraftContext], states: Tensor, count: int) -> tuple[Ints, Reals]:
        """The `count` likeliest tokens after the last ones of contexts, by states [S, 1, H]; and their log-probabilities."""
        scorer = make_scorer(contexts, self.ranking, 1, self.draft_ids)
        roots = upload([context.tokens[-1] for context in contexts], states.device)
        best = rank_children(self._expansion(states, roots, scorer).first(), min(count, len(self.draft_ids)))
        ids, scores = download(self.draft_ids[best.ids[:, 0]], best.scores[:, 0])
        return ids.astype(np.int64), scores

    @torch.inference_mode()
    def grow_behind(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        """Trees below the last tokens of contexts from `states_behind` of the nodes before them, [S, G, H]."""
        for context in contexts:
            self.ranking.observe(context)
        shape = self._shape(contexts, self._max_expanded)
        scorer = biased_scorer(
            make_scorer(contexts, self.ranking, shape.num_steps, self.draft_ids), contexts, self.draft_ids
        )
        scorer = self._masked(scorer, contexts)
        roots = upload([context.tokens[-1] for context in contexts], states.device)
        expansion = self._expansion(states[:, : shape.num_steps], roots, scorer)
        expansion = EmulatedExpansion(expansion, self.device, 0) if self.device else expansion
        budgets = [within(context.budget, self.tree) for context in contexts]
        columns = select_nodes(grow_dynamic(masked_expansion(expansion, scorer), shape), budgets, self.draft_ids)
        trees = trees_from_columns(columns.cpu().numpy(), [context.tokens[-1] for context in contexts])
        for context, tree in zip(contexts, trees, strict=True):
            self.ranking.proposed(context, tree)
        return trees

    def _expand(self, roots: Roots, scorer: Scorer, shape: TreeConfig) -> Expansion:
        return self._expansion(block_states(self._head, self._kv, roots)[:, : shape.num_steps], roots.tokens, scorer)

    def _expansion(self, states: Tensor, roots: Tensor, scorer: Scorer) -> Expansion:
        if self._head.is_independent:
            return IndependentExpansion(self._head.backbone_logits(states), scorer)
        return ConditionalExpansion(self._head, scorer, states, roots)


def block_states(head: BlockHead, kv: KVCache, roots: Roots) -> Tensor:
    """One pass of the blocks behind all sessions' prefixes: normed states of the rows that propose tokens, [S, G, H]."""
    cached = roots.cached
    ahead = torch.arange(head.config.block_size, device=roots.tokens.device)
    rows: SlotBlocks | CopiedBlocks
    if isinstance(cached, SlotRows):
        blocks = SlotLevels(cached)
        whole = blocks.all_at_once().packed
        causal = blocks.all_at_once(cached.layout.own_causal).packed if head.config.causal_windows else whole
        rows = SlotBlocks(head, kv, whole, causal)
    else:
        rows = CopiedBlocks(head, kv, cached, cached.lengths[:, None] + ahead)
    states = head.run(head.block_tokens(roots.tokens).flatten(), rows.positions, rows.attend)
    return head.drafted_rows(states.view(len(roots.tokens), head.config.block_size, -1))


def compiled_states(head: BlockHead, kv: KVCache, tokens: Sequence[int], prefixes: Sequence[Slots]) -> Tensor:
    """`block_states` by the kernels of the CPU. tokens: the target's ids of the roots. prefixes: slots of each session."""
    size, none = head.config.block_size, no_slots()
    visible, ahead = np.ones((size, size), np.bool_), np.arange(size)
    blocks = [
        Segment(ahead, np.minimum(len(own) + ahead, head.max_model_len - 1), none, own, visible, none) for own in prefixes
    ]
    assert head.compiled is not None, "the head is not prepared for the kernels"
    embedded = F.embedding(head.block_tokens(torch.tensor(tokens)).flatten(), head.embed_tokens.weight)
    states = head.compiled.run(embedded, blocks, kv)
    return head.drafted_rows(states.view(len(tokens), size, -1))


class SlotBlocks:
    """The rows of blocks for the attention kernel. Rows have slots of the KV cache, and no prefix is copied."""

    def __init__(self, head: BlockHead, kv: KVCache, whole: PackedInputs, causal: PackedInputs) -> None:
        """whole: the pass. causal: the same for layers with a window, in which a head may not see rows behind."""
        self._config, self._kv = head.config, kv
        self._packed = {window: whole if window is None else causal for window in set(head.config.windows)}
        self.positions = whole.positions

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Attend from rows [R, heads, d] to the prefixes and the rows that they see."""
        window = self._config.windows[layer]
        packed = self._packed[window]
        return cache_and_attend(self._kv, layer, rows, packed.slots, rows.query, packed, window)


class RowsAhead(NamedTuple):
    """Rows of one session: tokens [R], positions behind the prefix [R], and which rows see which [R, R]."""

    tokens: Ints
    depths: Ints
    visible: Bools


def _rows_ahead(tree: DraftTree, nodes: Sequence[int], c: BlockHeadConfig) -> RowsAhead:
    """The rows of blocks behind nodes of a tree.

    Rows are those of the tree, whose true features are missing; then the block of the root as in any round; then for each of
    `nodes` a block of mask tokens, which sees the node's path and itself.

        tree  root -- a -- b     rows  root a b | root m m | m m m | m m m     the last blocks stand behind a and b
    """
    size, mask = c.block_size, tree.ancestor_mask()
    num_rows = len(tree) + (1 + len(nodes)) * size
    tokens, depths, visible = (
        np.full(num_rows, c.mask_token_id),
        np.zeros(num_rows, np.int64),
        np.zeros((num_rows,) * 2, np.bool_),
    )
    tokens[: len(tree)], depths[: len(tree)], visible[: len(tree), : len(tree)] = tree.tokens, tree.depths, mask
    first = slice(len(tree), len(tree) + size)
    tokens[first.start], depths[first], visible[first, first] = tree.tokens[0], np.arange(size), True
    for start, node in zip(range(first.stop, num_rows, size), nodes, strict=True):
        own = slice(start, start + size)
        depths[own] = tree.depths[node] + 1 + np.arange(size)
        visible[own, : len(tree)], visible[own, own] = mask[node], True
    return RowsAhead(tokens, depths, visible)


class BlocksApart:
    """The rows of sessions one after the other without the kernel: each session reads its own prefix alone."""

    def __init__(self, sessions: Sequence[CopiedBlocks]) -> None:
        self._sessions, self.positions = sessions, torch.cat([own.positions for own in sessions])

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """See SlotBlocks."""
        counts = [len(own.positions) for own in self._sessions]
        parts = zip(*(torch.split(x, counts) for x in (rows.query, rows.key, rows.value, rows.residual)), strict=True)
        return torch.cat([own.attend(layer, Projected(*part)) for own, part in zip(self._sessions, parts, strict=True)])


class CopiedBlocks:
    """The rows of blocks without the kernel. In each layer keys and values are

    [ prefix, L cells | padding masked ] [ own rows, R of each session ]
    """

    def __init__(
        self, head: BlockHead, kv: KVCache, cached: PaddedPrefix, own: Tensor, visible: Tensor | None = None
    ) -> None:
        """own: positions of the rows, int64 [S, R]. visible: which of them see which, [S, R, R]; None if all do."""
        c, lengths = head.config, cached.lengths
        self._config, self._kv, self._index, self._num_rows = c, kv, cached.slots, own.shape[1]
        cells = torch.arange(self._index.shape[1], device=lengths.device).expand(len(lengths), -1)
        self._behind = own[:, :, None] - torch.cat([cells, own], 1)[:, None]
        filled = (cells < lengths[:, None])[:, None].expand(-1, self._num_rows, -1)
        visible = torch.ones_like(self._behind[:, :, : self._num_rows], dtype=torch.bool) if visible is None else visible
        self._filled = torch.cat([filled, visible], 2)
        self._biases = {window: self._bias(window, kv.keys[0].dtype) for window in set(c.windows)}
        # sessions near the end of their context are expanded with the others; their budget cuts what lies beyond
        self.positions = own.clamp(max=head.max_model_len - 1).flatten()

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [S, 1, heads per key-value head * R, L + R]; see `eyas.models.heads.block.block_masks`."""
        seen = self._filled
        if window is not None:
            seen = seen & (self._behind < window)
            seen = seen & (self._behind >= 0) if self._config.causal_windows else seen
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return bias.repeat(1, self._config.num_heads // self._config.num_kv_heads, 1)[:, None]

    def attend(self, layer: int, rows: Projected) -> Tensor:
        """Attend from the rows [S * R, heads, d] to the prefixes and the rows that they see."""
        c, sessions, count = self._config, len(self._index), self._num_rows
        pools = (self._kv.keys[layer], rows.key), (self._kv.values[layer], rows.value)
        keys, values = (
            torch.cat([pool[self._index], own.view(sessions, count, *own.shape[1:])], 1).transpose(1, 2)
            for pool, own in pools
        )
        query = rows.query.view(sessions, count, c.num_kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)
        folded = query.reshape(sessions, c.num_kv_heads, -1, c.head_dim)
        attended = masked_attention(folded, keys, values, self._biases[c.windows[layer]], c.head_dim**-0.5)
        attended = attended.view(sessions, c.num_kv_heads, -1, count, c.head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(sessions * count, c.num_heads, c.head_dim)


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


class CompiledGrowth:
    """Dynamic trees of heads that know all levels at once, and of a vanilla Markov head on top of them."""

    def __init__(self, draft_ids: Tensor, embedding: Tensor | None = None, product: PackedProduct | None = None) -> None:
        """draft_ids: the target's ids, int64 [D]. embedding [V, r] and product, to [D], are of the Markov head."""
        from eyas.drafters import cpu_kernels

        cpu_kernels.compile_kernels()
        self._kernels, self._draft_ids = cpu_kernels, draft_ids.numpy()
        self._product, self._markov = product, cpu_kernels.MarkovBias()  # the former owns the weight
        if embedding is not None and product is not None:
            rows, weight = embedding.detach().contiguous().numpy(), product.weight
            self._markov = cpu_kernels.MarkovBias(rows, weight.layout.data_ptr(), weight.is_half, 1.0 / product.scale)

    def trees(
        self, logits: Tensor, roots: Sequence[int], words: Ints, has_noise: bool, budgets: Sequence[TreeBudget], top_k: int
    ) -> list[DraftTree]:
        """The trees of `grow_dynamic` and `select_nodes` in `eyas.drafters.tree_growth`.

        logits: of all levels, float32 [S, L, D]. roots: the target's ids. words: see `eyas.drafters.scoring.noise_words`.
        has_noise: whether a session shares its noise.
        """
        values, kernels = logits.contiguous().numpy(), self._kernels
        noise = np.empty(values.shape, np.float32) if has_noise else kernels.NO_NOISE
        if has_noise:
            kernels.shared_noise(words, self._draft_ids, noise)
        limits, depths = limits_of(budgets)
        depths, most = np.minimum(depths, values.shape[1]), int(limits.max())
        cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float32)
        kernels.grow_trees(
            values, self._markov, np.array(roots), self._draft_ids, noise, words, limits, depths, top_k,
            cells, scores,
        )  # fmt: skip
        return trees_of_cells(roots, cells, scores)
