"""The drafter of all EAGLE heads: committed tokens and features in, draft trees out.

Pair i of a session joins feature i with token i+1 at draft position i. Draft KV is kept in slots for pairs of true
features only; what a tree adds is thrown away with it, and accepted positions are computed anew from true features.
Legend: S sessions, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.commit import Budget, Refusal
from eyas.config import AheadConfig, EagleConfig, TreeConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.calibration import noise_scale
from eyas.drafters.eagle.trees import EagleTrees
from eyas.drafters.expand import Growth
from eyas.drafters.slots.sessions import SlotSessions, num_features
from eyas.drafters.slots.sizing import count_slots
from eyas.drafters.static import StaticTree
from eyas.errors import ConfigError
from eyas.models.attention import attend
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.eagle import EagleHead
from eyas.models.heads.eagle.layer import Projected
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.tensors import moved, upload
from eyas.tree import DraftTree


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
        shapes, dtype, device = [(c.num_kv_heads, c.head_dim)] * c.num_layers, head.embedding.dtype, head.embedding.device
        num_slots = count_slots(config, shapes, dtype, device)
        self._pools = SlotPools(num_slots, shapes, 0, dtype, device)
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
        self._sessions.check()

    @property
    def num_free_slots(self) -> int:
        return self._sessions.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and brings pairs that have slots now; else the answer to give."""
        session = self._sessions.follow(context)
        if isinstance(session, Refusal):
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
