"""Base of the drafters that run a network: EAGLE, Medusa, Hydra and small draft models.

A call to `propose` runs one pass over all new positions, then one per tree level for all sessions together. Deterministic
trees come from captured CUDA graphs where possible; the plain path beside them gives the same trees.
Legend: S sessions, H width of a state.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools, Ints, Reals
from eyas.cache.kv_cache import KVCache, KVShape
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, TreeConfig
from eyas.device.transfer import download, moved, upload
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, PathMasks, within, without_banned
from eyas.drafters.emulated import EmulatedExpansion
from eyas.drafters.sessions import KVLedger, KVSession, StateT, num_features
from eyas.drafters.trees.cuda_graphs import ChainGraphs, ExtendGraphs, ExtendPass, RoundPlace, TreeGraphs, TreeSpec
from eyas.drafters.trees.growth import (
    Expansion,
    StaticTree,
    chain_trees,
    draw_chains,
    grow_dynamic,
    grow_static,
    select_nodes,
    trees_from_columns,
)
from eyas.drafters.trees.rows import GroupLevels, GrowthShape, Roots, RowLayout, SlotLevels, SlotRows, TreeSlots
from eyas.drafters.trees.rules import RuledExpansion
from eyas.drafters.trees.scoring import chain_scorer, chain_words, filtered_probs_of, make_scorer
from eyas.emulation.costs import PassKind
from eyas.emulation.device import emulated_device
from eyas.errors import ConfigError
from eyas.kernels.by_device import MAX_SORTED, rank
from eyas.kernels.probabilities import filtering
from eyas.models.backends.attention_metadata import pack_with_metadata, tight_shape
from eyas.models.backends.cuda import tiling_on, why_no_kernel_for
from eyas.models.backends.cuda_graphs import Capture, padded_size
from eyas.models.inputs import PackedInputs, Segment, Segments, pack
from eyas.protocol.commit import ResyncRequired
from eyas.protocol.tree import DraftTree

log = logging.getLogger(__name__)

# New tokens in a pass from which sessions that have to catch up wait for the next pass: its memory has a bound.
MAX_NEW_TOKENS = 8192


class NeuralDrafter(LocalDrafter, Generic[StateT]):
    """Drafter that admits commits, runs new positions (`_extend`), and grows or draws trees from the resulting states
    (`_expand`).

    Attributes:
        device: the emulated one whose times passes take, if `drafting.emulated_device` names one.
        EXTEND_PASS, EXPAND_PASS: the kinds of pass that `_extend` and `_expand` run, for an emulated device.
    """

    EXTEND_PASS: PassKind = "draft_round"
    EXPAND_PASS: PassKind | None = None

    def __init__(
        self,
        config: DraftingConfig,
        tree: TreeConfig,
        static_tree: StaticTree | None,
        draft_ids: Tensor,
        sessions: KVLedger[StateT],
    ) -> None:
        """Set up trees. static_tree: the shape of every tree, with `tree` as its size; None grows dynamic trees.

        draft_ids maps draft vocabulary ids to the target's.
        """
        self._config = config
        self.tree = tree
        self._static_tree = static_tree
        self.draft_ids = draft_ids
        self.sessions = sessions
        self._max_expanded = static_tree.max_expanded if static_tree else tree.top_k  # nodes of a level, at most
        self._slots: TreeSlots | None = None
        self._max_grown = padded_size(config.cuda_graph_max_batch)  # sessions whose trees grow together
        self._tree_slots: Ints | None = None  # of their rows, [sessions, rows]; None if each session has slots of its own
        self.graphs: TreeGraphs | None = None
        self.chain_graphs: ChainGraphs | None = None
        self._extend_graphs: ExtendGraphs | None = None
        self._path_masks: PathMasks | None = None
        self._dtype = torch.float32
        self._feature_size = 0
        name = config.emulated_device
        self.device = emulated_device(name, draft_ids.device) if name else None

    def _use_slots(
        self,
        slots: TreeSlots | None,
        capture: Capture | None,
        state_size: int,
        dtype: torch.dtype,
        extend: ExtendPass | None = None,
        feature_size: int = 0,
    ) -> None:
        """Let the rows of trees lie in slots, for the attention kernel; and capture rounds by `capture`.

        Args:
            slots: None for the plain attention, whose rounds are not captured.
            state_size, dtype: of a state.
            extend: runs new rows; None if this is not captured.
            feature_size: of their features, which have this dtype too; 0 for a drafter without.
        """
        self._dtype, self._feature_size = dtype, feature_size
        self._slots = slots
        if slots is None or capture is None:
            return
        tree = replace(self.tree, top_k=self._max_expanded)
        spec = TreeSpec(self._expand, self._rows_run, tree, self._static_tree, self.draft_ids)
        place = RoundPlace(slots, state_size, dtype, capture)
        self.graphs = TreeGraphs(spec, self._config, place)
        if extend:  # a commit brings an accepted path and the target's own token
            self._extend_graphs = ExtendGraphs(extend, place, feature_size, self.tree.num_steps + 1)
        self.chain_graphs = ChainGraphs(replace(spec, tree=replace(self.tree, top_k=1)), self._config, place)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=self._feature_size > 0, feature_size=self._feature_size)

    @property
    def can_sample(self) -> bool:
        return True

    def use_path_masks(self, path_masks: PathMasks) -> None:
        self._path_masks = path_masks

    @torch.inference_mode()
    def warm_up(self) -> None:
        rank(torch.zeros(1, MAX_SORTED + 1, device=self.draft_ids.device), 1)  # compiled at its first call on a CPU
        if self.graphs and self.chain_graphs:
            self.graphs.warm_up()
            self.chain_graphs.warm_up()
        if self._extend_graphs:
            self._extend_graphs.warm_up()

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts, ready = self._admit(contexts)
        if not ready:
            return drafts
        found = [self._extend_on_device(part) for part in split_contexts([contexts[i] for i in ready])]
        states = torch.cat(found) if len(found) > 1 else found[0]
        for i in ready:
            drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
        rows = {i: row for row, i in enumerate(i for i in ready if self._has_state(contexts[i]))}
        most = self._max_grown
        for proposal, make_trees in (("deterministic", self._grow), ("sampled", self._draw)):
            chosen = [i for i in rows if contexts[i].budget.wants_tree and contexts[i].proposal == proposal]
            for part in (chosen[start : start + most] for start in range(0, len(chosen), most)):
                part_states = states[upload([rows[i] for i in part], states.device)]
                for i, tree in zip(part, make_trees([contexts[i] for i in part], part_states), strict=True):
                    drafts[i] = tree
        return drafts

    @property
    def busy_s(self) -> float:
        return self.device.remaining_s if self.device else 0.0

    def release(self, sessions: Sequence[str]) -> None:
        self.sessions.release(sessions)

    def is_cached(self, session: str) -> bool:
        """Return whether the session has cached tokens: it was not evicted, and is not dormant."""
        known = self.sessions.get(session)
        return known is not None and len(known.slots) > 0

    def _claim(self, session: KVSession[StateT], context: DraftContext, busy: Collection[str]) -> bool:
        """Claim the slots that a commit takes, one for each feature. Returns whether it can be run, and a tree be grown."""
        count = num_features(context)
        return self.sessions.claim(session, count, 0, busy) and count > 0

    @abstractmethod
    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Run the new positions of all contexts.

        Returns the state [S, H] that trees grow from, of each context with `_has_state`.
        """

    @abstractmethod
    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        """Start to grow trees of at most `shape.num_steps` levels, `shape.top_k` nodes being expanded at each."""

    def _features(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Return the new features of all contexts on the drafter's device [R, H]."""
        features = torch.cat([context.features for context in contexts if context.features is not None])
        return moved(features, self.draft_ids.device, self._dtype)

    def _extend_on_device(self, contexts: Sequence[DraftContext]) -> Tensor:
        if self.device is None:
            return self._extend(contexts)
        num_rows = sum(len(context.tokens) for context in contexts)
        num_cached = sum(map(len, self._prefix_slots(contexts)))
        return self.device.run(self.EXTEND_PASS, num_rows, num_cached, lambda: self._extend(contexts))

    def _expand_on_device(self, roots: Roots, shape: GrowthShape) -> Expansion:
        if self.device is None:
            return self._expand(roots, shape)
        assert isinstance(roots.rows, GroupLevels), "an emulated device captures nothing"
        num_cached = int(roots.rows.lengths.sum())
        if self.EXPAND_PASS is None:
            expansion = self._expand(roots, shape)
        else:
            num_rows = len(roots.tokens) * shape.num_steps
            expansion = self.device.run(self.EXPAND_PASS, num_rows, num_cached, lambda: self._expand(roots, shape))
        return EmulatedExpansion(expansion, self.device, num_cached)

    def _run_new(self, contexts: Sequence[DraftContext], features: Tensor, run: ExtendPass, attends: bool = False) -> Tensor:
        """Run the new features of each session by `run`, from a captured graph if one holds them.

        attends: whether all rows attend to their prefixes, and not only the last ones.
        """
        counts = [num_features(context) for context in contexts]
        slots = [self.sessions[context.session].slots for context in contexts]
        rows = [new_rows(c, own, n, attends) for c, own, n in zip(contexts, slots, counts, strict=True)]
        last = [last_row(own) for own in slots]
        found = self._extend_graphs.extend(rows, last, features) if self._extend_graphs else None
        return run(features, self._pack(rows), self._pack(last)) if found is None else found

    def _pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Return segments for the attention kernel if it runs, otherwise for the plain attention."""
        device = self.draft_ids.device
        if self._slots is None:
            return pack(segments, device)
        segments = Segments.of(segments)
        shape = tight_shape(segments, self._slots.trees.tiling)
        return pack_with_metadata(segments, shape, self._slots.spare, device)

    def _has_state(self, context: DraftContext) -> bool:
        """Return whether `_extend` returns a state for the context."""
        return True

    def _rows_run(self, expansion: Expansion) -> Tensor | None:
        """Return tokens and parents of the rows that a tree ran through the network, int64 [S, 2, rows];
        None if not needed.
        """
        return None

    def _keep_rows(self, contexts: Sequence[DraftContext], rows: Ints, top_k: int) -> None:
        """Keep the output of `_rows_run` for the next commit."""

    def _admit(self, contexts: Sequence[DraftContext]) -> tuple[list[Draft], list[int]]:
        """Return the answers to contexts that are not run, None for the others; and the places of these."""
        busy, drafts = {context.session for context in contexts}, list[Draft]()
        for context in contexts:
            session = self.sessions.follow(context)
            if isinstance(session, ResyncRequired):
                drafts.append(session)
            else:
                drafts.append(None if self._claim(session, context, busy) else DraftTree.root_only(context.tokens[-1]))
        return drafts, [i for i, draft in enumerate(drafts) if draft is None]

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> Sequence[DraftTree]:
        """Grow deterministic trees."""
        if self.graphs and not any(context.allowed for context in contexts):
            slots, scratch = self._prefix_slots(contexts), self._scratch(contexts)
            trees, rows_run = self.graphs.grow(contexts, slots, states, scratch)
            self._keep_rows(contexts, rows_run, self.tree.top_k)
            return [without_banned(tree, context) for tree, context in zip(trees, contexts, strict=True)]
        shape = self._shape(contexts, self._max_expanded)
        scorer = make_scorer(contexts, self._config, shape.num_steps, self.draft_ids)
        expansion = self._expand_on_device(self._roots(contexts, states), shape)
        ruled = self._ruled(expansion, contexts)
        if self._static_tree:
            candidates = grow_static(ruled, scorer, self._static_tree, shape.num_steps)
        else:
            candidates = grow_dynamic(ruled, scorer, shape)
        rows = self._rows_run(_computing(expansion))
        columns = select_nodes(candidates, [within(c.budget, self.tree) for c in contexts], self.draft_ids)
        return trees_from_columns(self._to_host(columns, rows, contexts, shape.top_k), [c.tokens[-1] for c in contexts])

    def _draw(self, contexts: Sequence[DraftContext], states: Tensor) -> Sequence[DraftTree]:
        """Draw sampled chains."""
        if self.chain_graphs and not any(context.allowed or context.logit_biases for context in contexts):
            slots, scratch = self._prefix_slots(contexts), self._scratch(contexts)
            chains, rows_run = self.chain_graphs.draw(contexts, slots, states, scratch)
            self._keep_rows(contexts, rows_run, 1)
            return chains
        shape = self._shape(contexts, top_k=1)
        words, device = chain_words(contexts), self.draft_ids.device
        probs = filtered_probs_of(filtering([context.noise for context in contexts]), len(contexts), device)
        expansion = self._expand_on_device(self._roots(contexts, states, is_chain=True), shape)
        ruled, scorer = self._ruled(expansion, contexts), chain_scorer(upload(words, device), probs)
        drawn = draw_chains(ruled, scorer, shape.num_steps, self._config.proposal_top_k, self.draft_ids)
        found = self._to_host(drawn, self._rows_run(_computing(expansion)), contexts, 1)
        return chain_trees(found.tolist(), contexts, self.tree.num_draft_tokens)

    def _ruled(self, expansion: Expansion, contexts: Sequence[DraftContext]) -> Expansion:
        """Return the expansion with the biases and within the grammars of the sessions."""
        if not any(context.allowed or context.logit_biases for context in contexts):
            return expansion
        return RuledExpansion(expansion, contexts, self.draft_ids, self._path_masks)

    def _to_host(self, columns: Tensor, rows: Tensor | None, contexts: Sequence[DraftContext], top_k: int) -> Reals:
        """Return `columns` as an array. Copies the rows to keep together with them, so that the host waits once."""
        if rows is None:
            return columns.cpu().numpy()
        found, kept = download(columns, rows)
        self._keep_rows(contexts, kept.astype(np.int64), top_k)
        return found

    def _roots(self, contexts: Sequence[DraftContext], states: Tensor, is_chain: bool = False) -> Roots:
        device, prefixes, scratch = states.device, self._prefix_slots(contexts), self._scratch(contexts)
        tokens = upload([context.tokens[-1] for context in contexts], device)
        if self._slots is None:
            return Roots(states, tokens, GroupLevels(prefixes, scratch, self.sessions.context_length, device))
        layout, count = self._slots.chains if is_chain else self._slots.trees, len(contexts)
        words = layout.build_words(prefixes, [own[: layout.num_rows] for own in scratch], count)
        return Roots(states, tokens, SlotLevels(SlotRows(layout, upload(words, device), count)))

    def _scratch(self, contexts: Sequence[DraftContext]) -> Sequence[Slots]:
        """Return slots for the rows of each session's tree."""
        if self._tree_slots is not None:
            return list(self._tree_slots[: len(contexts)])
        return [self.sessions[context.session].scratch for context in contexts]

    def _prefix_slots(self, contexts: Sequence[DraftContext]) -> list[Slots]:
        """Return the slots that the rows of each session's tree attend to."""
        return [self.sessions[context.session].slots for context in contexts]

    def _shape(self, contexts: Sequence[DraftContext], top_k: int) -> GrowthShape:
        """Return the largest shape within the contexts' budgets. A tree of n drafted nodes expands n at most of a level,
        unless its shape is fixed or a level has slots for `top_k` rows.
        """
        num_steps = min(self.tree.num_steps, max(context.budget.max_depth for context in contexts))
        if self._static_tree or (self._slots and self._slots.trees.has_levels):
            return GrowthShape(num_steps, top_k)
        num_drafted = max(context.budget.max_nodes for context in contexts) - 1
        return GrowthShape(num_steps, max(min(top_k, num_drafted), 1))


def check_tree(tree: TreeConfig, drafter: str, vocab_size: int) -> None:
    """Raises ConfigError for trees without levels, or wider than the draft vocabulary."""
    if tree.num_steps < 1 or tree.top_k > vocab_size:
        raise ConfigError(
            f"tree.num_steps {tree.num_steps} and tree.top_k {tree.top_k}: {drafter} needs num_steps of at least 1 and "
            f"top_k of at most its vocabulary, {vocab_size}"
        )


def _computing(expansion: Expansion) -> Expansion:
    """Return the expansion that computes the logits."""
    return expansion.expansion if isinstance(expansion, EmulatedExpansion) else expansion


def plan_tree_slots(
    kv: KVCache,
    shapes: Sequence[KVShape],
    num_heads: int,
    max_model_len: int,
    widths: Sequence[int],
    max_batch: int,
    capture: Capture | None,
    visible: Bools | None = None,
) -> TreeSlots | None:
    """Return slots for trees whose passes have `widths` rows; None if the attention kernel cannot serve them.

    The kernel runs on CUDA. On a CPU it runs in Triton's interpreter, if `capture` is given. It attends to no latents.

    Args:
        shapes: of the layers of `kv`, which are attended to by `num_heads` heads.
        visible: see RowLayout.
    """
    device, dtype = kv.keys[0].device, kv.keys[0].dtype
    if (device.type != "cuda" and capture is None) or any(shape.is_latent for shape in shapes):
        return None
    num_kv_heads = min(shape.num_heads for shape in shapes)
    heads_per_kv = num_heads // num_kv_heads
    if reason := why_no_kernel_for(max(shape.width for shape in shapes), heads_per_kv, dtype):
        log.warning("%s: drafts run without the attention kernel and without CUDA graphs", reason)
        return None
    tiling = replace(tiling_on(device, dtype, heads_per_kv, num_kv_heads), longest=max_model_len)
    trees = RowLayout(tuple(width for width in widths if width), tiling, max_model_len, device, visible)
    chains = trees if visible is not None else replace(trees, widths=(1,) * len(widths))
    return TreeSlots(trees, chains, padded_size(max_batch), kv.scratch)


def new_rows(context: DraftContext, slots: Slots, count: int, attends: bool) -> Segment:
    """Return the last `count` cached rows of a session with the last tokens of its commit, as causal rows over all of them.

    attends: whether they see what is before them.
    """
    tokens = np.array(context.tokens[len(context.tokens) - count :])
    start, last = len(slots) - count, np.array([count - 1])
    prefix, visible = (slots[:start], None) if attends else (slots[:0], np.zeros((count, 0), dtype=np.bool_))
    return Segment(tokens, np.arange(start, len(slots)), slots[start:], prefix, visible, last)


def last_row(slots: Slots) -> Segment:
    """Return the last cached row of a session, which sees all of them."""
    place = np.array([len(slots) - 1])
    return Segment(place, place, slots[-1:], slots[:-1], None, np.zeros(1, dtype=np.int64))


def split_contexts(contexts: Sequence[DraftContext]) -> list[list[DraftContext]]:
    """Split contexts for passes of at most MAX_NEW_TOKENS new tokens, or of one context, in order."""
    parts, count = [list[DraftContext]()], 0
    for context in contexts:
        if parts[-1] and count + len(context.tokens) > MAX_NEW_TOKENS:
            parts.append([])
            count = 0
        parts[-1].append(context)
        count += len(context.tokens)
    return parts
