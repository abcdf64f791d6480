"""The draft head in the middle of growing trees: states of roots in, scored children of each level out.

Legend: S sessions, W frontier rows, R rows of the level above, L prefix length, J key-value heads, D head width.

Trees of an EAGLE head: states of roots and slots of their prefixes in, draft trees out. Keeps no session.

Legend: S sessions, H draft hidden.

The drafter of all EAGLE heads: committed tokens and features in, draft trees out.

Pair i of a session joins feature i with token i+1 at draft position i. Draft KV is kept in slots for pairs of true
features only; what a tree adds is thrown away with it, and accepted positions are computed anew from true features.
Legend: S sessions, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftAheadConfig, DraftingConfig, TreeConfig
from eyas.draft_protocol import ResyncRequired, TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.cuda_graphs import Grower, PaddedPrefix, Roots, TreeGraphs, tight_prefix
from eyas.drafters.sampled_chains import FilteredDraft, draw_chains
from eyas.drafters.scoring import NoiseScale, Ranker, Scorer, noise_scale
from eyas.drafters.sessions import SlotSessions, count_slots, num_features
from eyas.drafters.tree_growth import Candidates, Expansion, Growth, StaticTree, grow, grow_static, select
from eyas.errors import ConfigError
from eyas.models.attention import attend, masked_attention
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.eagle import EagleHead, Projected
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.tensors import moved, upload
from eyas.tree import DraftTree


class EagleExpansion:
    """Implements Expansion: the prefix's keys and values, followed by those of the tree rows.

    shape: levels, and the most rows that `next` is asked for at each.
    """

    def __init__(
        self, head: EagleHead, scorer: Scorer, pools: KVCache, prefix: PaddedPrefix, states: Tensor, shape: TreeConfig
    ) -> None:
        self._head, self._scorer = head, scorer
        self._states = states[:, None]
        index, lengths = prefix.index, prefix.lengths
        sessions, self._length = index.shape
        self._end = self._length
        self._positions = lengths[:, None] - 1
        room = shape.top_k * (shape.num_steps - 1)
        self._keys, self._values = ([_buffer(p, index, room) for p in pool] for pool in (pools.keys, pools.values))
        hidden = torch.arange(self._length, device=states.device) >= lengths[:, None]
        self._folded = head.config.num_heads // head.config.num_kv_heads
        shape_of_bias = (sessions, self._folded, shape.top_k, self._length + room)
        self._bias = torch.zeros(shape_of_bias, device=states.device, dtype=states.dtype)
        self._bias[..., : self._length].masked_fill_(hidden[:, None, None], float("-inf"))
        self._seen = torch.zeros(sessions, shape.top_k, 0, dtype=torch.bool, device=states.device)

    def first(self) -> Tensor:
        return self._scorer.scores(self._head.logits(self._states), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        head, (sessions, width) = self._head, tokens.shape
        above = _rows(self._states, parents)
        # a session near the end of its context is expanded with the others; its budget cuts what lies beyond
        positions = (self._positions + level).clamp(max=head.context_length - 1).expand_as(tokens).flatten()
        self._end += width
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        self._seen = torch.cat([_rows(self._seen, parents), own], dim=2)
        self._bias[..., :width, self._length : self._end].zero_().masked_fill_(~self._seen[:, None], float("-inf"))
        states = head.run(above.flatten(0, 1), head.draft_ids[tokens].flatten(), positions, self._attend)
        self._states = states.view(sessions, width, -1)
        return self._scorer.scores(head.logits(self._states), level)

    def _attend(self, layer: int, rows: Projected) -> Tensor:
        """The level's rows over the prefix and the tree rows above them; their own keys and values are added first."""
        c, sessions = self._head.config, self._states.shape[0]
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
    """The pool's rows at index [S, L], and room behind them: [S, J, L + room, D]."""
    rows = pool[index].transpose(1, 2)
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], room, rows.shape[3])], dim=2)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[s, rows[s]] for every session; x [S, R, ...], rows [S, W]. A single row serves all."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2])) if x.shape[1] > 1 else x.expand(-1, rows.shape[1], -1)


class EagleTrees:
    """Grows trees of one shape. Of every method, slots are those of each session's pairs, and states [S, H] lie behind their
    last ones."""

    def __init__(
        self,
        head: EagleHead,
        pools: KVCache,
        tree: TreeConfig,
        config: DraftingConfig,
        scale: NoiseScale,
        plan: StaticTree | None,
        capture: Capture | None,
    ) -> None:
        """plan: the tree of every round, of the size of `tree`; None grows dynamic ones. capture: how to capture whole
        trees; None launches them."""
        self._head, self._pools, self._tree, self._config, self._scale, self._plan = head, pools, tree, config, scale, plan
        self._captured = TreeGraphs(self._grower(), config, capture) if capture else None

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
        ranker = Ranker(contexts, self._config, shape.num_steps, self._head.draft_ids, self._scale, self._scale.grid)
        candidates = self._candidates(self._expand(slots, states, ranker, shape), shape.num_steps)
        self._scale.watch(contexts, candidates, ranker, self._head.draft_ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.num_draft_tokens)) for c in contexts]
        return select(candidates, [c.tokens[-1] for c in contexts], budgets, self._head.draft_ids)

    def draw(self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor) -> list[DraftTree]:
        """Chains drawn from the head's own law."""
        shape, draft_ids = self._shape(contexts, width=1), self._head.draft_ids
        expansion = self._expand(slots, states, FilteredDraft(contexts, draft_ids.device), shape)
        return draw_chains(expansion, contexts, shape, self._config.proposal_top_k, draft_ids)

    def ahead(
        self, contexts: Sequence[DraftContext], slots: Sequence[Slots], states: Tensor, config: DraftAheadConfig
    ) -> Growth:
        """Trees that can be grown on, with one level recorded. They teach the scale nothing."""
        shape = TreeConfig(num_steps=config.num_steps, top_k=config.top_k)
        ranker = Ranker(contexts, self._config, shape.num_steps, self._head.draft_ids, self._scale)
        return Growth(self._expand(slots, states, ranker, shape), config.top_k, config.num_candidates)

    def _grower(self) -> Grower[Expansion]:
        head, tree, shape = self._head, self._tree, replace(self._tree, top_k=self._width)

        def expand(roots: Roots, scorer: Scorer) -> Expansion:
            return EagleExpansion(head, scorer, self._pools, roots.prefix, roots.states, shape)

        def grow_candidates(expansion: Expansion) -> Candidates:
            return self._candidates(expansion, tree.num_steps)

        dtype, num_slots = head.embedding.dtype, self._pools.scratch
        longest = min(head.context_length, num_slots)
        return Grower(
            expand, grow_candidates, tree, head.config.hidden, dtype, head.draft_ids, self._pools.scratch, num_slots, longest
        )

    def _candidates(self, expansion: Expansion, depth: int) -> Candidates:
        if self._plan:
            return grow_static(expansion, self._plan, depth)
        return grow(expansion, replace(self._tree, num_steps=depth))

    def _expand(self, slots: Sequence[Slots], states: Tensor, scorer: Scorer, shape: TreeConfig) -> Expansion:
        prefix = tight_prefix(slots, states.device)
        return EagleExpansion(self._head, scorer, self._pools, prefix, states, shape)

    def _shape(self, contexts: Sequence[DraftContext], width: int) -> TreeConfig:
        return TreeConfig(
            self._tree.num_draft_tokens, min(self._tree.num_steps, max(c.budget.max_depth for c in contexts)), width
        )

    @property
    def _width(self) -> int:
        """Most nodes that are expanded at a level."""
        return self._plan.most_expanded if self._plan else self._tree.top_k


class EagleDrafter(LocalDrafter):
    """EAGLE in this process, of any generation. Not safe for use from several threads."""

    def __init__(
        self,
        head: EagleHead,
        tree: TreeConfig,
        config: DraftingConfig,
        plan: StaticTree | None = None,
        capture: Capture | None = None,
    ) -> None:
        """plan: the tree of every round, in place of a dynamic one. capture: how to capture whole trees; None launches them.
        Raises ConfigError for a tree that the head cannot grow."""
        if plan is not None:
            tree = TreeConfig(plan.num_nodes, plan.depth, plan.width)
        if tree.num_steps < 1 or tree.top_k > head.config.draft_vocab_size:
            raise ConfigError(
                f"tree.num_steps {tree.num_steps} and tree.top_k {tree.top_k}: an EAGLE drafter needs a depth of at least 1 and a "
                f"width of at most its draft vocabulary, {head.config.draft_vocab_size}"
            )
        self._head = head
        self._tree = tree
        c = head.config
        shapes, dtype, device = [(c.num_kv_heads, c.head_dim)] * c.num_layers, head.embedding.dtype, head.embedding.device
        num_slots = count_slots(config, shapes, dtype, device)
        self._pools = KVCache(num_slots, shapes, 0, dtype, device)
        self._sessions: SlotSessions[Tensor] = SlotSessions(num_slots, head.context_length)
        self._scale = noise_scale(config)
        self._trees = EagleTrees(head, self._pools, tree, config, self._scale, plan, capture)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._head.config.hidden)

    @property
    def can_sample(self) -> bool:
        return True

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See Drafter. One forward over all new pairs, then one per tree level for all sessions together."""
        self._scale.learn(contexts)
        busy = {context.session for context in contexts}
        drafts: list[Draft] = [self._admit(context, busy) for context in contexts]
        ready = [i for i, draft in enumerate(drafts) if draft is None]
        if ready:
            states = self._extend([contexts[i] for i in ready])
            for i in ready:
                drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
            for i, state in zip(ready, states, strict=True):
                self._sessions[contexts[i].session].state = state
            trees = self._trees
            fill_in_trees(
                drafts,
                contexts,
                ready,
                states,
                lambda asked, of: trees.grow(asked, self._slots(asked), of),
                lambda asked, of: trees.draw(asked, self._slots(asked), of),
            )
        return drafts

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._trees.warm_up()

    def release(self, sessions: Sequence[str]) -> None:
        self._scale.forget(sessions)
        self._sessions.release(sessions)

    @property
    def draft_ids(self) -> Tensor:
        """The target's ids of the draft vocabulary's."""
        return self._head.draft_ids

    def within(self, budget: TreeBudget) -> TreeBudget:
        """A verifier's budget, cut to the size of this drafter's trees."""
        return TreeBudget(min(budget.max_nodes, self._tree.num_draft_tokens), min(budget.max_depth, self._tree.num_steps))

    def can_grow(self, session: str) -> bool:
        """Whether the session has all that trees grow from."""
        known = self._sessions.get(session)
        return known is not None and known.state is not None and len(known.slots) > 0

    @torch.inference_mode()
    def growth(self, contexts: Sequence[DraftContext], config: DraftAheadConfig) -> Growth:
        """Trees of sessions that can grow, from their last commits on, with one level recorded."""
        known = [self._sessions[context.session].state for context in contexts]
        states = torch.stack([state for state in known if state is not None])
        return self._trees.ahead(contexts, self._slots(contexts), states, config)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._sessions.check()

    @property
    def num_free_slots(self) -> int:
        return self._sessions.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and brings pairs that have slots now; else the answer to give."""
        session = self._sessions.follow(context)
        if isinstance(session, ResyncRequired):
            return session
        fits = self._sessions.claim(session, num_features(context), 0, busy)
        return None if fits and session.num_new else DraftTree.root_only(context.tokens[-1])

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Store keys and values of all new pairs; the state [S, H] behind each session's last pair.

        Of the last layer only the last rows are needed, of those before it all.
        """
        head, device = self._head, self._head.embedding.device
        slots = self._slots(contexts)
        counts = [num_features(c) for c in contexts]
        new = np.concatenate([s[len(s) - n :] for s, n in zip(slots, counts, strict=True)])
        places = np.concatenate([np.arange(len(s) - n, len(s)) for s, n in zip(slots, counts, strict=True)])
        tokens = np.array([t for c, n in zip(contexts, counts, strict=True) for t in c.tokens[len(c.tokens) - n :]])
        features = moved(torch.cat([c.features for c in contexts if c.features is not None]), device, head.embedding.dtype)
        index, positions, ids, last = (upload(ints, device) for ints in (new, places, tokens, np.cumsum(counts) - 1))
        rows = head.project(features, ids, positions)
        deepest = head.config.num_layers - 1
        if deepest:
            packed = pack([_pairs(s, n) for s, n in zip(slots, counts, strict=True)], device)
            for layer in range(deepest):
                states = head.finish(self._attend(layer, rows, index, rows.query, packed), rows.residual, layer)
                rows = head.deepen(layer + 1, states, positions)
        packed = pack([_pairs(s, 1) for s in slots], device)
        return head.finish(self._attend(deepest, rows, index, rows.query[last], packed), rows.residual[last])

    def _attend(self, layer: int, rows: Projected, slots: Tensor, query: Tensor, packed: PackedInputs) -> Tensor:
        """Attention of `query` over all pairs known, once keys and values of `rows` are in their slots."""
        keys, values = self._pools.keys[layer], self._pools.values[layer]
        keys.index_copy_(0, slots, rows.key)
        values.index_copy_(0, slots, rows.value)
        return attend(query, keys, values, packed, self._head.config.head_dim**-0.5)

    def _slots(self, contexts: Sequence[DraftContext]) -> list[Slots]:
        return [self._sessions[context.session].slots for context in contexts]


def _pairs(slots: Slots, count: int) -> Segment:
    """The last `count` pairs of a session, as rows over all of them."""
    places = np.arange(len(slots) - count, len(slots))
    return Segment(places, places, slots[-count:], slots[:-count], None, np.zeros(1, dtype=np.int64))
