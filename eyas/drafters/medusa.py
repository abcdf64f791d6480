"""Which nodes a static tree has where nobody names them: sizes in, rank paths out. Knows no heads.

What heads start from: the new features of each session in, one state of each out.

Legend: S sessions, R new features of all of them, H hidden.

Medusa and Hydra heads in the middle of growing trees: states in, scored children of each level out.

Legend: S sessions, W frontier rows, R rows of the level above, H hidden, D draft vocabulary.

The drafters of Medusa and Hydra: committed tokens and final states in, static or dynamic draft trees out.

Legend: S sessions, H hidden.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, MedusaConfig, TreeConfig, TreePaths
from eyas.draft_protocol import ResyncRequired
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter, fill_in_trees
from eyas.drafters.cuda_graphs import Grower, Roots, TreeGraphs
from eyas.drafters.sampled_chains import FilteredDraft, draw_chains
from eyas.drafters.scoring import Ranker, Scorer, noise_scale
from eyas.drafters.sessions import SlotSessions, count_slots, no_slots, num_features
from eyas.drafters.tree_growth import Candidates, Expansion, StaticTree, grow, grow_static, select
from eyas.errors import ConfigError
from eyas.models.attention import attend
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.hydra import HydraHead, PrefixLayer
from eyas.models.heads.medusa import MedusaHead
from eyas.models.inputs import Segment, pack
from eyas.tensors import moved, upload
from eyas.tree import DraftTree

# Of the chance that a child is the right one: it falls as (rank + 1) ** -DECAY, and is KNOWN for all children together.
DECAY = 1.6
KNOWN = 0.9


def likely_paths(tree: TreeConfig) -> TreePaths:
    """The `nodes - 1` likeliest paths of at most `depth` ranks below `width`, best first, if the chance of a child
    depends on its rank alone."""
    chances = [(rank + 1.0) ** -DECAY for rank in range(tree.top_k)]
    costs = [-math.log(KNOWN * chance / math.fsum(chances)) for chance in chances]
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while waiting and len(paths) < tree.num_draft_tokens:
        cost, length, path = heapq.heappop(waiting)
        paths.append(path)
        if length < tree.num_steps:
            for rank, further in enumerate(costs):
                heapq.heappush(waiting, (cost + further, length + 1, (*path, rank)))
    return tuple(paths[1:])


class States(Protocol):
    """Reads features."""

    @property
    def slots_per_feature(self) -> int:
        """How many slots of a session a feature takes from then on, 1 or none."""
        ...

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        """The state [S, H] behind each session's last feature; features [R, H], session after session, each of which
        brings at least one."""
        ...


class LastFeatures:
    """The last features themselves."""

    slots_per_feature = 0

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        return features[_ends(contexts, features.device)]


class PrefixStates:
    """What the prefix layer of Hydra's prefix-mlp makes of all features of a session; keys and values stay in its slots."""

    slots_per_feature = 1

    def __init__(self, layer: PrefixLayer, num_slots: int) -> None:
        s, weight = layer.sizes, layer.out
        self._layer = layer
        self._pools = KVCache(num_slots, [(s.num_kv_heads, s.head_dim)], 0, weight.dtype, weight.device)

    def read(self, features: Tensor, contexts: Sequence[DraftContext], slots: Sequence[Slots]) -> Tensor:
        layer, (keys,), (values,) = self._layer, self._pools.keys, self._pools.values
        counts = [num_features(context) for context in contexts]
        new = np.concatenate([own[-count:] for own, count in zip(slots, counts, strict=True)])
        places = np.concatenate([np.arange(len(own) - n, len(own)) for own, n in zip(slots, counts, strict=True)])
        rows = layer.project(features, upload(places, keys.device))
        index = upload(new, keys.device)
        keys.index_copy_(0, index, rows.key)
        values.index_copy_(0, index, rows.value)
        last = _ends(contexts, keys.device)
        packed = pack([_last_row(own) for own in slots], keys.device)
        attended = attend(rows.query[last], keys, values, packed, layer.sizes.head_dim**-0.5)
        return layer.finish(attended, rows.residual[last])


def _ends(contexts: Sequence[DraftContext], device: torch.device) -> Tensor:
    """Row of each session's last feature, [S]."""
    return upload(np.cumsum([num_features(context) for context in contexts]) - 1, device)


def _last_row(slots: Slots) -> Segment:
    last = np.array([len(slots) - 1])
    return Segment(last, last, slots[-1:], slots[:-1], None, np.zeros(1, dtype=np.int64))


class MedusaExpansion:
    """Implements Expansion. What head i guesses is the same below every node: all is computed at once, and one row scores
    all nodes of a level."""

    def __init__(self, head: MedusaHead, scorer: Scorer, states: Tensor, depth: int) -> None:
        self._logits = head.logits(states, depth)
        self._scorer = scorer

    def first(self) -> Tensor:
        return self._score(0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._score(level)

    def _score(self, level: int) -> Tensor:
        return self._scorer.scores(self._logits[:, level : level + 1], level)


class HydraExpansion:
    """Implements Expansion. A row is the state and the embeddings of the path below it, one more at each level."""

    def __init__(self, head: HydraHead, scorer: Scorer, states: Tensor, roots: Tensor) -> None:
        """roots: the target's ids, int64 [S]."""
        self._head, self._scorer = head, scorer
        self._rows = torch.cat([states, F.embedding(roots, head.embedding)], -1)[:, None]

    def first(self) -> Tensor:
        return self._scorer.scores(self._head.logits(self._rows, 0), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._rows.gather(1, parents[:, :, None].expand(-1, -1, self._rows.shape[2]))
        embedded = F.embedding(self._head.draft_ids[tokens], self._head.embedding)
        self._rows = torch.cat([above, embedded], -1)
        return self._scorer.scores(self._head.logits(self._rows, level), level)


Grow = Callable[[Expansion, int], Candidates]


@dataclass(frozen=True)
class Heads:
    """What the drafter needs of its heads. expand: from states [S, H], roots int64 [S], a scorer and the levels asked for.
    states: what they start from. draft_ids maps draft vocabulary ids to the target's; weights lie beside it."""

    hidden: int
    draft_ids: Tensor
    dtype: torch.dtype
    states: States
    expand: Callable[[Tensor, Tensor, Scorer, int], Expansion]


class MultiHeadDrafter(LocalDrafter):
    """Medusa or Hydra in this process. Not safe for use from several threads.

    tree: its shape, of no more levels than there are heads. grow: makes candidates of so many levels. capture: how to
    capture whole trees; None launches them.
    """

    def __init__(
        self,
        heads: Heads,
        sessions: SlotSessions[None],
        tree: TreeConfig,
        grow: Grow,
        config: DraftingConfig,
        capture: Capture | None = None,
    ) -> None:
        self._heads, self._sessions, self._tree, self._grow_candidates, self._config = heads, sessions, tree, grow, config
        self._scale = noise_scale(config)
        self._captured = TreeGraphs(self._grower(), config, capture) if capture else None

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._heads.hidden)

    @property
    def can_sample(self) -> bool:
        return True

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See Drafter. One pass over all new features, then one per tree level for all sessions together."""
        self._scale.learn(contexts)
        busy = {context.session for context in contexts}
        drafts = [self._admit(context, busy) for context in contexts]
        ready = [i for i, draft in enumerate(drafts) if draft is None]
        if ready:
            states = self._read([contexts[i] for i in ready])
            for i in ready:
                drafts[i] = DraftTree.root_only(contexts[i].tokens[-1])
            fill_in_trees(drafts, contexts, ready, states, self._grow, self._draw)
        return drafts

    @torch.inference_mode()
    def warm_up(self) -> None:
        if self._captured:
            self._captured.warm_up()

    def release(self, sessions: Sequence[str]) -> None:
        self._scale.forget(sessions)
        self._sessions.release(sessions)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._sessions.check()

    @property
    def num_free_slots(self) -> int:
        return self._sessions.num_free

    def _admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session and brings features, with slots if they need any; else the answer."""
        session = self._sessions.follow(context)
        if isinstance(session, ResyncRequired):
            return session
        count = num_features(context)
        fits = self._sessions.claim(session, count * self._heads.states.slots_per_feature, 0, busy)
        return None if fits and count else DraftTree.root_only(context.tokens[-1])

    def _read(self, contexts: Sequence[DraftContext]) -> Tensor:
        features = torch.cat([context.features for context in contexts if context.features is not None])
        slots = [self._sessions[context.session].slots for context in contexts]
        features = moved(features, self._heads.draft_ids.device, self._heads.dtype)
        return self._heads.states.read(features, contexts, slots)

    def _grow(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        slots = [no_slots()] * len(contexts)
        replayed = self._captured.grow(contexts, slots, states, self._scale) if self._captured else None
        if replayed:
            return replayed.trees
        depth, ids = self._depth(contexts), self._heads.draft_ids
        ranker = Ranker(contexts, self._config, depth, ids, self._scale, self._scale.grid)
        candidates = self._grow_candidates(self._expand(contexts, states, ranker, depth), depth)
        self._scale.watch(contexts, candidates, ranker, ids)
        budgets = [replace(c.budget, max_nodes=min(c.budget.max_nodes, self._tree.num_draft_tokens)) for c in contexts]
        return select(candidates, [c.tokens[-1] for c in contexts], budgets, ids)

    def _grower(self) -> Grower[Expansion]:
        heads, tree = self._heads, self._tree

        def expand(roots: Roots, scorer: Scorer) -> Expansion:
            return heads.expand(roots.states, roots.tokens, scorer, tree.num_steps)

        def grow_candidates(expansion: Expansion) -> Candidates:
            return self._grow_candidates(expansion, tree.num_steps)

        return Grower(expand, grow_candidates, tree, heads.hidden, heads.dtype, heads.draft_ids)

    def _draw(self, contexts: Sequence[DraftContext], states: Tensor) -> list[DraftTree]:
        depth, ids = self._depth(contexts), self._heads.draft_ids
        expansion = self._expand(contexts, states, FilteredDraft(contexts, ids.device), depth)
        return draw_chains(expansion, contexts, replace(self._tree, num_steps=depth), self._config.proposal_top_k, ids)

    def _depth(self, contexts: Sequence[DraftContext]) -> int:
        return min(self._tree.num_steps, max(context.budget.max_depth for context in contexts))

    def _expand(self, contexts: Sequence[DraftContext], states: Tensor, scorer: Scorer, depth: int) -> Expansion:
        roots = upload([context.tokens[-1] for context in contexts], states.device)
        return self._heads.expand(states, roots, scorer, depth)


def medusa_drafter(
    head: MedusaHead, tree: TreeConfig, config: DraftingConfig, offsets: MedusaConfig, capture: Capture | None = None
) -> MultiHeadDrafter:
    """Raises ConfigError for a tree that the heads cannot grow."""

    def expand(states: Tensor, roots: Tensor, scorer: Scorer, depth: int) -> Expansion:
        return MedusaExpansion(head, scorer, states, depth)

    heads = Heads(head.hidden, head.draft_ids, head.outputs.dtype, LastFeatures(), expand)
    shape, grow_candidates = _growing(heads, head.num_heads, tree, offsets)
    return MultiHeadDrafter(heads, SlotSessions(0, sys.maxsize), shape, grow_candidates, config, capture)


def hydra_drafter(
    head: HydraHead, tree: TreeConfig, config: DraftingConfig, offsets: MedusaConfig, capture: Capture | None = None
) -> MultiHeadDrafter:
    """Raises ConfigError for a tree that the heads cannot grow."""

    def expand(states: Tensor, roots: Tensor, scorer: Scorer, depth: int) -> Expansion:
        return HydraExpansion(head, scorer, states, roots)

    states: States = LastFeatures()
    sessions: SlotSessions[None] = SlotSessions(0, sys.maxsize)
    if head.prefix:
        sizes, weight = head.prefix.sizes, head.prefix.out
        num_slots = count_slots(config, [(sizes.num_kv_heads, sizes.head_dim)], weight.dtype, weight.device)
        states, sessions = PrefixStates(head.prefix, num_slots), SlotSessions(num_slots, sizes.context_length)
    heads = Heads(head.hidden, head.draft_ids, head.embedding.dtype, states, expand)
    shape, grow_candidates = _growing(heads, head.num_heads, tree, offsets)
    return MultiHeadDrafter(heads, sessions, shape, grow_candidates, config, capture)


def _growing(heads: Heads, num_heads: int, tree: TreeConfig, offsets: MedusaConfig) -> tuple[TreeConfig, Grow]:
    """The shape of the trees, and what makes their candidates."""
    if tree.num_draft_tokens < 2 or tree.num_steps < 1:
        raise ConfigError(
            f"tree.num_draft_tokens {tree.num_draft_tokens} and tree.num_steps {tree.num_steps} leave no room for a guess; take 2 and 1 or more"
        )
    shape = replace(tree, num_steps=min(tree.num_steps, num_heads))
    if offsets.shape == "dynamic":
        return _checked(shape, heads), lambda expansion, depth: grow(expansion, replace(shape, num_steps=depth))
    plan = StaticTree(offsets.paths or likely_paths(shape))
    if plan.depth > num_heads:
        raise ConfigError(f"methods.medusa.paths reach {plan.depth} levels deep, but there are {num_heads} heads")
    shape = TreeConfig(plan.num_nodes, plan.depth, plan.width)
    return _checked(shape, heads), lambda expansion, depth: grow_static(expansion, plan, depth)


def _checked(shape: TreeConfig, heads: Heads) -> TreeConfig:
    if shape.top_k > len(heads.draft_ids):
        raise ConfigError(f"a tree of width {shape.top_k} needs as many draft tokens; there are {len(heads.draft_ids)}")
    return shape
