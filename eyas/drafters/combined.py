"""Trees of several drafters in, for each session one tree of the best nodes of all out. Knows not who grew them.

All nodes of all sessions are arrays: there is no loop over nodes. Legend: K nodes, S sessions, T trees, D depth.

Two drafters at once: commits to both, their trees merged into one by score. Knows not what they are.

Either side may forget a session by itself. The union then refuses from where that side stands, and the other is told only
what it has not been told yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from eyas.config import CombinedConfig, TreeConfig
from eyas.draft_protocol import ResyncRequired, TreeBudget
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.tree_growth import Forest, Ints, Reals, best
from eyas.errors import ConfigError
from eyas.tree import DraftTree


@dataclass(frozen=True)
class _Nodes:
    """The nodes [K] of one tree after the other, those of a session one after the other; sessions: of each tree [T].

    depths: 0 for roots. firsts: the first node with the same path in the same session, often the node itself. scores: of a
    node's own tree, never above its parent's, so that the best nodes of a tree are a tree.
    """

    sessions: Ints
    trees: Ints
    depths: Ints
    parents: Ints
    tokens: Ints
    firsts: Ints
    scores: Reals


def merge_trees(
    roots: Sequence[int], trees: Sequence[Sequence[DraftTree]], budgets: Sequence[TreeBudget], floor: float
) -> list[DraftTree]:
    """For each session one tree of the best nodes of all of its trees, of equal ones the earlier; what several have counts
    once, with its better score.

    floor: share of the guesses that each tree has for certain, if it has so many; those of a session sum to 1 at most.
    """
    if not any(trees):
        return [DraftTree.root_only(root) for root in roots]
    room = np.array([max(budget.max_nodes - 1, 0) for budget in budgets])
    deepest = np.array([budget.max_depth for budget in budgets])
    nodes = _nodes(trees)
    sessions = nodes.sessions[nodes.trees]
    guesses = np.flatnonzero((nodes.depths > 0) & (nodes.depths <= deepest[sessions]))
    firsts, scores = nodes.firsts[guesses], nodes.scores[guesses]
    certain = np.zeros(len(sessions), np.bool_)
    share = np.floor(floor * room).astype(np.int64)[nodes.sessions]
    certain[firsts[best(nodes.trees[guesses], share, firsts, -scores)]] = True
    better = np.full(len(sessions), -np.inf)
    np.maximum.at(better, firsts, scores)
    merged = guesses[firsts == guesses]
    chosen = np.zeros(len(sessions), np.bool_)
    chosen[merged[best(sessions[merged], room, -better[merged], ~certain[merged])]] = True
    above = np.where(nodes.depths == 1, -1, nodes.firsts[nodes.parents])
    made = Forest(sessions, above, nodes.tokens, better).trees(chosen, roots)
    ahead = [any(tree.grown_ahead for tree in own) for own in trees]
    return [replace(tree, grown_ahead=grown) if grown else tree for tree, grown in zip(made, ahead, strict=True)]


def _nodes(trees: Sequence[Sequence[DraftTree]]) -> _Nodes:
    all_trees = list(chain.from_iterable(trees))
    sizes = np.array([len(tree) for tree in all_trees])
    of_trees, count = np.repeat(np.arange(len(sizes)), sizes), int(sizes.sum())
    starts = (np.cumsum(sizes) - sizes)[of_trees]
    tokens = np.fromiter(chain.from_iterable(tree.tokens for tree in all_trees), np.int64, count)
    parents = np.fromiter(chain.from_iterable(tree.parents for tree in all_trees), np.int64, count) + starts
    scores = np.fromiter(chain.from_iterable(tree.log_probs for tree in all_trees), np.float64, count)
    sessions = np.repeat(np.arange(len(trees)), [len(own) for own in trees])
    lineage = _lineage(parents)
    depths = (lineage[1:] != lineage[:-1]).sum(0)
    firsts = _firsts(tokens[lineage], sessions[of_trees] * (len(lineage) + 1) + depths)
    return _Nodes(sessions, of_trees, depths, parents, tokens, firsts, scores[lineage].min(0))


def _lineage(parents: Ints) -> Ints:
    """Each node, its parent, the parent of that, and so on until all are roots; [D + 1, K]."""
    rows = [np.arange(len(parents))]
    while ((above := parents[rows[-1]]) != rows[-1]).any():
        rows.append(above)
    return np.stack(rows)


def _firsts(tokens: Ints, kinds: Ints) -> Ints:
    """The first node of the same kind [K], which is a depth of a session, with the same tokens [D + 1, K] above it."""
    order = np.lexsort((*tokens, kinds))
    differs = (tokens[:, order[1:]] != tokens[:, order[:-1]]).any(0) | (kinds[order[1:]] != kinds[order[:-1]])
    groups = np.cumsum(np.append(True, differs)) - 1
    firsts = np.empty(len(order), np.int64)
    firsts[order] = order[np.flatnonzero(np.append(True, differs))][groups]
    return firsts


@dataclass
class _CombinedSession:
    """have, drafts: committed length and last answer of each side. tree: the last one of the union. places: of the nodes of
    each side's tree that are in it, where they are; only for sides that learn from samples."""

    epoch: int
    have: list[int]
    drafts: list[Draft]
    tree: DraftTree | None = None
    places: list[list[int]] = field(default_factory=lambda: [[], []])

    def samples(self, k: int, context: DraftContext) -> tuple[int, ...]:
        """Those at the nodes of side k, if the last tree was verified and that side's is part of it."""
        fits = self.tree is not None and len(context.samples) == len(self.tree) and self.have[k] == context.start_position
        return tuple(context.samples[place] for place in self.places[k]) if fits else ()


@dataclass
class _Row:
    """fits: whether both sides have what the context brings; one may have more, when the other is told again in pieces."""

    context: DraftContext
    session: _CombinedSession
    fits: bool = False


class CombinedDrafter(LocalDrafter):
    """Not safe for use from several threads."""

    def __init__(self, first: LocalDrafter, second: LocalDrafter, tree: TreeConfig, config: CombinedConfig) -> None:
        """Raises ConfigError for drafters that cannot share a tree."""
        if first.needs.features and second.needs.features:
            raise ConfigError("both drafters of a union need features; only one of them can be fed")
        self._sides = (first, second)
        self._tree = tree
        self._config = config
        self._sessions: OrderedDict[str, _CombinedSession] = OrderedDict()

    @property
    def needs(self) -> DrafterNeeds:
        first, second = (side.needs for side in self._sides)
        return replace(first if first.features else second, samples=first.samples or second.samples)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        rows = [_Row(context, self._session(context)) for context in contexts]
        fitting = [row for row in rows if row.context.start_position == min(row.session.have)]
        for k in range(len(self._sides)):
            self._ask(k, fitting)
        for row in fitting:
            row.fits = row.context.committed_length == min(row.session.have)
        self._forget({context.session for context in contexts})
        merged = iter(self._merge([row for row in rows if row.fits]))
        return [next(merged) if row.fits else _refusal(row) for row in rows]

    def warm_up(self) -> None:
        for side in self._sides:
            side.warm_up()

    def draft_ahead(self) -> bool:
        more = [side.draft_ahead() for side in self._sides]
        return any(more)

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self._sessions.pop(key, None)
        for side in self._sides:
            side.release(sessions)

    def _session(self, context: DraftContext) -> _CombinedSession:
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = _CombinedSession(context.epoch, [0, 0], [None, None])
        self._sessions.move_to_end(context.session)
        return session

    def _ask(self, k: int, rows: Sequence[_Row]) -> None:
        """Tell one side what it does not know yet, and note its answers."""
        side = self._sides[k]
        behind = [row for row in rows if row.session.have[k] < row.context.committed_length]
        told = [_rest(row.context, row.session.have[k], side.needs, row.session.samples(k, row.context)) for row in behind]
        drafts = side.propose(told) if told else []
        for row, draft in zip(behind, drafts, strict=True):
            row.session.have[k] = (
                draft.committed_length if isinstance(draft, ResyncRequired) else row.context.committed_length
            )
            row.session.drafts[k] = draft

    def _merge(self, rows: Sequence[_Row]) -> list[DraftTree]:
        """What the sides of each session have to say, as one tree."""
        budgets = [row.context.budget for row in rows]
        cut = [replace(budget, max_nodes=min(budget.max_nodes, self._tree.num_draft_tokens)) for budget in budgets]
        roots = [row.context.tokens[-1] for row in rows]
        merged = merge_trees(roots, [_trees(row) for row in rows], cut, self._config.min_share)
        for row, tree in zip(rows, merged, strict=True):
            row.session.tree = tree
            for k, side in enumerate(self._sides):
                if side.needs.samples:
                    self._prune(k, row, tree)
        return merged

    def _prune(self, k: int, row: _Row, merged: DraftTree) -> None:
        """Tell a side which nodes of its tree are left, and note where they are."""
        draft, session, found = row.session.drafts[k], row.session, dict[int, int]()
        asked = row.context.budget.wants_tree and session.have[k] == row.context.committed_length
        if asked and isinstance(draft, DraftTree):
            found = _places(draft, merged)
            session.drafts[k] = draft.pruned(list(found))
            self._sides[k].prune(row.context.session, list(found))
        session.places[k] = list(found.values())

    def _forget(self, busy: set[str]) -> None:
        surplus = len(self._sessions) - self._config.max_sessions
        idle = [key for key in self._sessions if key not in busy] if surplus > 0 else []
        self.release(idle[: max(surplus, 0)])


def _trees(row: _Row) -> list[DraftTree]:
    """Of the sides that have got as far as the context."""
    answers = zip(row.session.have, row.session.drafts, strict=True)
    return [draft for have, draft in answers if have == row.context.committed_length and isinstance(draft, DraftTree)]


def _places(tree: DraftTree, merged: DraftTree) -> dict[int, int]:
    """Of each node of `tree` that is in `merged`, which holds all of its paths as far as it has them, the node there."""
    places = {0: 0}
    for node in range(1, len(tree)):
        above = places.get(tree.parents[node])
        place = None if above is None else merged.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    return places


def _refusal(row: _Row) -> ResyncRequired:
    return ResyncRequired(row.context.session, row.context.epoch, min(row.session.have))


def _rest(context: DraftContext, have: int, needs: DrafterNeeds, samples: tuple[int, ...]) -> DraftContext:
    """What a side with committed length `have`, not below the context's base, is still to be told."""
    features = (
        context.features[max(have - 1, 0) - max(context.start_position - 1, 0) :] if context.features is not None else None
    )
    told = replace(context, start_position=have, tokens=context.tokens[have - context.start_position :], samples=samples)
    return replace(told, features=features if needs.features else None)
