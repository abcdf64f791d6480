"""Two drafters at once: both get every commit, and their trees are merged into one by score.

Either side may drop a session by itself. ResyncRequired then asks for the commits that this side lacks; the other side gets
only what it does not have yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from eyas.config import CombinedConfig, TreeConfig
from eyas.drafters.base import (
    NO_WORK,
    Draft,
    DraftContext,
    DrafterNeeds,
    DraftWork,
    LocalDrafter,
    PathMasks,
    limits_of,
    within,
)
from eyas.drafters.sessions import Session, SessionLedger
from eyas.kernels.choice import tree_kernels
from eyas.protocol.commit import NO_TREE, ResyncRequired, TreeBudget
from eyas.protocol.tree import DraftTree, DraftTrees, PreparedTree


@dataclass
class _CombinedSession(Session):
    """A session. Both sides have at least `committed_length` of its tokens.

    Attributes:
        context: its latest commit.
        lengths, drafts: committed length and last answer of each side.
        tree: the last merged one.
        places: for each side that needs samples, the merged nodes that correspond to the nodes of its (pruned) tree.
    """

    context: DraftContext = field(init=False)
    lengths: list[int] = field(default_factory=lambda: [0, 0])
    drafts: list[Draft] = field(default_factory=lambda: [None, None])
    tree: DraftTree | None = None
    places: list[list[int]] = field(default_factory=lambda: [[], []])

    @property
    def is_complete(self) -> bool:
        """Return whether all sides that are asked have all of the commit."""
        return self.committed_length == self.context.committed_length

    @property
    def trees(self) -> list[DraftTree]:
        """The sides' trees for the commit."""
        return [tree for side in range(len(self.drafts)) if (tree := self.tree_of(side)) is not None]

    def with_sources(self, merged: DraftTree) -> DraftTree:
        """Return the merged tree with `DraftTree.sources`."""
        sources = [0] * len(merged)
        for side in range(len(self.drafts)):
            if (tree := self.tree_of(side)) is not None:
                for place in _places(tree, merged).values():
                    sources[place] |= 1 << side
        return merged.with_sources([0, *sources[1:]])

    def tree_of(self, side: int) -> DraftTree | None:
        """Return a side's tree for the commit, if it has one. A side may be ahead of it, while the other one is sent the
        session again in pieces.
        """
        draft = self.drafts[side] if self.lengths[side] == self.context.committed_length else None
        return draft if isinstance(draft, DraftTree) else None

    def missing(self, side: int, needs: DrafterNeeds, takes_prepared: bool) -> DraftContext:
        """Return the part of the commit that a side lacks; the side has at least what lies before the commit.

        takes_prepared: see LocalDrafter. Other sides draft nothing for a session that has its tree.

        Samples are those at the side's nodes, if the last merged tree was verified and the side's tree is part of it.
        """
        context, length, features = self.context, self.lengths[side], None
        budget = NO_TREE if context.has_tree and not takes_prepared else context.budget
        samples: tuple[int, ...] = ()
        if needs.features and context.features is not None:
            features = context.features[max(length - 1, 0) - max(context.start_position - 1, 0) :]
        if self.tree and len(context.samples) == len(self.tree) and length == context.start_position:
            samples = tuple(context.samples[place] for place in self.places[side])
        tokens = context.tokens[length - context.start_position :]
        return context._replace(start_position=length, tokens=tokens, features=features, samples=samples, budget=budget)


class CombinedDrafter(LocalDrafter):
    """Two drafters whose trees are merged."""

    def __init__(self, first: LocalDrafter, second: LocalDrafter, tree: TreeConfig, config: CombinedConfig) -> None:
        """Combine drafters; at most one of them needs features."""
        self.sides = (first, second)
        self._side_needs = first.needs, second.needs
        self._tree = tree
        self._config = config
        self._lookups = [k for k in range(2) if self.sides[k].work == NO_WORK]
        self._sessions = SessionLedger(_CombinedSession)

    @property
    def takes_prepared(self) -> bool:
        return any(side.takes_prepared for side in self.sides)

    @property
    def needs(self) -> DrafterNeeds:
        first, second = self._side_needs
        return replace(first if first.features else second, samples=first.samples or second.samples)

    @property
    def work(self) -> DraftWork:
        return self.sides[0].work + self.sides[1].work

    @property
    def has_lookups(self) -> bool:
        return len(self._lookups) == 1

    def use_path_masks(self, path_masks: PathMasks) -> None:
        for side in self.sides:
            side.use_path_masks(path_masks)

    def warm_up(self) -> None:
        for side in self.sides:
            side.warm_up()
        tree_kernels()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.release([context.session for context in contexts if self._sessions.starts_epoch(context)])
        for context in contexts:  # after lookups alone, a commit begins where the network is
            known = self._sessions.get(context.session)
            if known and context.start_position in known.lengths:
                known.committed_length = context.start_position
        followed = [self._sessions.follow(context) for context in contexts]
        sessions: list[_CombinedSession] = []
        for context, session in zip(contexts, followed, strict=True):
            if isinstance(session, _CombinedSession):
                session.context = context
                sessions.append(session)
        for side in range(len(self.sides)):
            self._propose(side, sessions)
        for session in sessions:
            asked = self._lookups if session.context.lookups_alone else range(len(self.sides))
            session.committed_length = min(session.lengths[side] for side in asked)
        self._evict({context.session for context in contexts})
        complete = [session for session in sessions if session.is_complete]
        self._merge([session for session in complete if not session.context.has_tree])
        for session in complete:
            if session.context.has_tree:  # it is not this drafter's: no samples belong to its nodes
                session.tree = None
        return [_answer(session) for session in followed]

    def release(self, sessions: Sequence[str]) -> None:
        self._sessions.release(sessions)
        for side in self.sides:
            side.release(sessions)

    @property
    def busy_s(self) -> float:
        return max(side.busy_s for side in self.sides)

    def draft_ahead(self) -> bool:
        more = [side.draft_ahead() for side in self.sides]
        return any(more)

    def take_prepared(self) -> list[PreparedTree]:
        return [tree for side in self.sides for tree in side.take_prepared()]

    def _propose(self, k: int, sessions: Sequence[_CombinedSession]) -> None:
        """Send one side the parts of the commits that it does not have, and keep its answers."""
        side = self.sides[k]
        behind = [
            session
            for session in sessions
            if (k in self._lookups or not session.context.lookups_alone)
            # one that lacks more than this commit is sent all of it first
            and session.context.start_position <= session.lengths[k] < session.context.committed_length
        ]
        contexts = [session.missing(k, self._side_needs[k], side.takes_prepared) for session in behind]
        drafts = side.propose(contexts) if behind else []
        for session, draft in zip(behind, drafts, strict=True):
            length = draft.committed_length if isinstance(draft, ResyncRequired) else session.context.committed_length
            session.lengths[k], session.drafts[k] = length, draft

    def _merge(self, sessions: Sequence[_CombinedSession]) -> None:
        """Merge the trees of each session."""
        budgets = [within(session.context.budget, self._tree) for session in sessions]
        roots = [session.context.tokens[-1] for session in sessions]
        merged = merge_trees(roots, [session.trees for session in sessions], budgets, self._config.min_share)
        for session, tree in zip(sessions, merged, strict=True):
            session.tree = session.with_sources(tree) if session.context.wants_sources else tree
            for k, needs in enumerate(self._side_needs):
                if needs.samples:
                    self._prune(k, session, tree)

    def _prune(self, k: int, session: _CombinedSession, merged: DraftTree) -> None:
        """Prune one side's tree to its merged nodes, and keep their places in the merged tree."""
        draft, context, found = session.drafts[k], session.context, dict[int, int]()
        is_current = context.budget.wants_tree and session.lengths[k] == context.committed_length
        if is_current and isinstance(draft, DraftTree):
            found = _places(draft, merged)
            session.drafts[k] = draft.pruned(list(found))
            self.sides[k].prune(context.session, list(found))
        session.places[k] = list(found.values())

    def _evict(self, busy: set[str]) -> None:
        surplus = len(self._sessions) - self._config.max_sessions
        if surplus > 0:
            self.release(list(islice(self._sessions.idle(busy), surplus)))


def _answer(session: _CombinedSession | ResyncRequired) -> Draft:
    if isinstance(session, ResyncRequired):
        return session
    if session.is_complete:
        return session.tree or DraftTree.root_only(session.context.tokens[-1])
    return ResyncRequired(session.context.session, session.epoch, session.committed_length)


def _places(tree: DraftTree, merged: DraftTree) -> dict[int, int]:
    """Return, for each node of `tree` that is in `merged`, its number there."""
    places = {0: 0}
    for node in range(1, len(tree)):
        above = places.get(tree.parents[node])
        place = None if above is None else merged.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    return places


def merge_trees(
    roots: Sequence[int], trees: Sequence[Sequence[DraftTree]], budgets: Sequence[TreeBudget], min_share: float
) -> DraftTrees:
    """Merge each session's trees into one of their best nodes. Equal nodes count once, with their better score; ties go to
    the earlier node.

    min_share: share of a merged tree's drafted nodes that is reserved for each tree, if it has that many.
    """
    if not any(trees):
        return DraftTrees.root_only(roots)
    limits, depths = limits_of(budgets)
    found, counts = list(chain.from_iterable(trees)), np.array([len(own) for own in trees])
    order = sorted(range(len(found)), key=lambda place: id(found[place].trees))  # so that arrays are taken at once
    nodes = DraftTrees.of([found[place] for place in order]).taken(np.argsort(order).tolist())
    most, columns = int(limits.max()), (nodes.tokens, nodes.parents, nodes.log_probs)
    cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float64)
    tree_kernels().merge(counts, nodes.counts, *columns, limits, depths, min_share, cells, scores)
    made = DraftTrees.below(roots, cells[0, :, :-1], cells[1, :, :-1], scores, cells[0, :, -1])
    return replace(made, grown_ahead=np.array([any(tree.grown_ahead for tree in own) for own in trees]))
