"""The drafter of all EAGLE heads: committed tokens and features in, draft trees out.

Pair i of a session joins feature i with token i+1 at draft position i. Draft KV is kept in slots for pairs of true
features only; what a tree adds is thrown away with it, and accepted positions are computed anew from true features.
Legend: S sessions, H draft hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import SlotAllocator, Slots
from eyas.commit import Budget, Refusal
from eyas.config import AheadConfig, EagleConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.calibration import noise_scale
from eyas.drafters.eagle.trees import EagleTrees
from eyas.drafters.expand import Growth
from eyas.drafters.static import StaticTree
from eyas.errors import ConfigError
from eyas.models.attention import attend
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle.layer import Projected
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.tensors import moved, upload
from eyas.tree import DraftTree


@dataclass
class _Session:
    """committed: tokens known; slots: one per pair, committed - 1 of them, or none if the session did not fit: then it is
    dormant, until there is ample room. state: the head's [H] behind the last pair, if it was computed."""

    epoch: int
    committed: int
    slots: Slots
    dormant: bool = False
    state: Tensor | None = None


class EagleDrafter(LocalDrafter):
    """EAGLE in this process, of any generation. Not safe for use from several threads."""

    def __init__(
        self,
        head: EagleHead,
        tree: TreeConfig,
        config: EagleConfig,
        plan: StaticTree | None = None,
        capture: Capture | None = None,
    ) -> None:
        """plan: the tree of every round, in place of a dynamic one. capture: how to capture whole trees; None launches them.
        Raises ConfigError for a tree that the head cannot grow."""
        if plan is not None:
            tree = TreeConfig(plan.num_nodes, plan.depth, plan.width)
        if tree.depth < 1 or tree.width > head.config.draft_vocab_size:
            raise ConfigError(
                f"tree.depth {tree.depth} and tree.width {tree.width}: an EAGLE drafter needs a depth of at least 1 and a "
                f"width of at most its draft vocabulary, {head.config.draft_vocab_size}"
            )
        self._head = head
        self._tree = tree
        c = head.config
        self._pools = SlotPools(
            config.num_slots, [(c.num_kv_heads, c.head_dim)] * c.num_layers, 0, head.embedding.dtype, head.embedding.device
        )
        self._allocator = SlotAllocator(config.num_slots)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
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

    def release(self, sessions: Sequence[str]) -> None:
        self._scale.forget(sessions)
        for key in sessions:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._allocator.free(session.slots)

    @property
    def draft_ids(self) -> Tensor:
        """The target's ids of the draft vocabulary's."""
        return self._head.draft_ids

    def within(self, budget: Budget) -> Budget:
        """A verifier's budget, cut to the size of this drafter's trees."""
        return Budget(min(budget.max_nodes, self._tree.nodes), min(budget.max_depth, self._tree.depth))

    def can_grow(self, session: str) -> bool:
        """Whether the session has all that trees grow from."""
        known = self._sessions.get(session)
        return known is not None and known.state is not None and len(known.slots) > 0

    @torch.inference_mode()
    def growth(self, contexts: Sequence[DraftContext], config: AheadConfig) -> Growth:
        """Trees of sessions that can grow, from their last commits on, with one level recorded."""
        known = [self._sessions[context.session].state for context in contexts]
        states = torch.stack([state for state in known if state is not None])
        return self._trees.ahead(contexts, self._slots(contexts), states, config)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._allocator.check_owners([session.slots for session in self._sessions.values()])

    @property
    def num_free_slots(self) -> int:
        return self._allocator.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and has slots for its new pairs; else the answer to give."""
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = _Session(context.epoch, 0, np.zeros(0, dtype=np.int64))
            self._sessions[context.session] = session
        if session.committed != context.base:
            return Refusal(context.session, context.epoch, session.committed)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._allocator.num_free >= 2 * context.committed:
            session.committed, session.dormant = 0, False
            return Refusal(context.session, context.epoch, 0)
        session.committed = context.committed
        count = _num_pairs(context)
        fits = context.committed <= self._head.context_length and not session.dormant and self._make_room(count, busy)
        if not fits:
            self._put_to_sleep(session)
        if not fits or not count:
            return DraftTree.root_only(context.tokens[-1])
        session.slots = np.concatenate([session.slots, self._allocator.take(count)])
        return None

    def _make_room(self, count: int, busy: set[str]) -> bool:
        """Forget the sessions unused for longest, but not those of this call, until `count` slots are free; none if even
        all of them would not do."""
        idle = [key for key in self._sessions if key not in busy]
        if self._allocator.num_free + sum(len(self._sessions[key].slots) for key in idle) < count:
            return False
        while self._allocator.num_free < count and idle:
            self.release([idle.pop(0)])
        return self._allocator.num_free >= count

    def _put_to_sleep(self, session: _Session) -> None:
        """A session that does not fit is followed without KV: it gets no trees, and costs nothing."""
        self._allocator.free(session.slots)
        session.slots, session.dormant, session.state = session.slots[:0], True, None

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Store keys and values of all new pairs; the state [S, H] behind each session's last pair.

        Of the last layer only the last rows are needed, of those before it all.
        """
        head, device = self._head, self._head.embedding.device
        slots = self._slots(contexts)
        counts = [_num_pairs(c) for c in contexts]
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


def _num_pairs(context: DraftContext) -> int:
    """New pairs that a context completes: the very first token has no feature before it."""
    return len(context.tokens) - (1 if context.base == 0 else 0)


def _pairs(slots: Slots, count: int) -> Segment:
    """The last `count` pairs of a session, as rows over all of them."""
    places = np.arange(len(slots) - count, len(slots))
    return Segment(places, places, slots[-count:], slots[:-count], None, np.zeros(1, dtype=np.int64))
