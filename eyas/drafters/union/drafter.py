"""Two drafters at once: commits to both, their trees merged into one by score. Knows not what they are.

Either side may forget a session by itself. The union then refuses from where that side stands, and the other is told only
what it has not been told yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from eyas.commit import Refusal
from eyas.config import TreeConfig, UnionConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.union.merging import merge_trees
from eyas.errors import ConfigError
from eyas.tree import DraftTree


@dataclass
class _Session:
    """have, drafts: committed length and last answer of each side. tree: the last one of the union. places: of the nodes of
    each side's tree that are in it, where they are; only for sides that learn from samples."""

    epoch: int
    have: list[int]
    drafts: list[Draft]
    tree: DraftTree | None = None
    places: list[list[int]] = field(default_factory=lambda: [[], []])

    def samples(self, k: int, context: DraftContext) -> tuple[int, ...]:
        """Those at the nodes of side k, if the last tree was verified and that side's is part of it."""
        fits = self.tree is not None and len(context.samples) == len(self.tree) and self.have[k] == context.base
        return tuple(context.samples[place] for place in self.places[k]) if fits else ()


@dataclass
class _Row:
    """fits: whether both sides have what the context brings; one may have more, when the other is told again in pieces."""

    context: DraftContext
    session: _Session
    fits: bool = False


class UnionDrafter(LocalDrafter):
    """Not safe for use from several threads."""

    def __init__(self, first: LocalDrafter, second: LocalDrafter, tree: TreeConfig, config: UnionConfig) -> None:
        """Raises ConfigError for drafters that cannot share a tree."""
        if first.needs.features and second.needs.features:
            raise ConfigError("both drafters of a union need features; only one of them can be fed")
        self._sides = (first, second)
        self._tree = tree
        self._config = config
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    @property
    def needs(self) -> DrafterNeeds:
        first, second = (side.needs for side in self._sides)
        return replace(first if first.features else second, samples=first.samples or second.samples)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        rows = [_Row(context, self._session(context)) for context in contexts]
        fitting = [row for row in rows if row.context.base == min(row.session.have)]
        for k in range(len(self._sides)):
            self._ask(k, fitting)
        for row in fitting:
            row.fits = row.context.committed == min(row.session.have)
        self._forget({context.session for context in contexts})
        merged = iter(self._merge([row for row in rows if row.fits]))
        return [next(merged) if row.fits else _refusal(row) for row in rows]

    def warm_up(self) -> None:
        for side in self._sides:
            side.warm_up()

    def work_ahead(self) -> bool:
        more = [side.work_ahead() for side in self._sides]
        return any(more)

    def release(self, sessions: Sequence[str]) -> None:
        for key in sessions:
            self._sessions.pop(key, None)
        for side in self._sides:
            side.release(sessions)

    def _session(self, context: DraftContext) -> _Session:
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = _Session(context.epoch, [0, 0], [None, None])
        self._sessions.move_to_end(context.session)
        return session

    def _ask(self, k: int, rows: Sequence[_Row]) -> None:
        """Tell one side what it does not know yet, and note its answers."""
        side = self._sides[k]
        behind = [row for row in rows if row.session.have[k] < row.context.committed]
        told = [_rest(row.context, row.session.have[k], side.needs, row.session.samples(k, row.context)) for row in behind]
        drafts = side.propose(told) if told else []
        for row, draft in zip(behind, drafts, strict=True):
            row.session.have[k] = draft.have if isinstance(draft, Refusal) else row.context.committed
            row.session.drafts[k] = draft

    def _merge(self, rows: Sequence[_Row]) -> list[DraftTree]:
        """What the sides of each session have to say, as one tree."""
        budgets = [row.context.budget for row in rows]
        cut = [replace(budget, max_nodes=min(budget.max_nodes, self._tree.nodes)) for budget in budgets]
        roots = [row.context.tokens[-1] for row in rows]
        merged = merge_trees(roots, [_trees(row) for row in rows], cut, self._config.floor)
        for row, tree in zip(rows, merged, strict=True):
            row.session.tree = tree
            for k, side in enumerate(self._sides):
                if side.needs.samples:
                    self._prune(k, row, tree)
        return merged

    def _prune(self, k: int, row: _Row, merged: DraftTree) -> None:
        """Tell a side which nodes of its tree are left, and note where they are."""
        draft, session, found = row.session.drafts[k], row.session, dict[int, int]()
        asked = row.context.budget.wants_tree and session.have[k] == row.context.committed
        if asked and isinstance(draft, DraftTree):
            found = _places(draft, merged)
            session.drafts[k] = draft.pruned(list(found))
            self._sides[k].prune(row.context.session, list(found))
        session.places[k] = list(found.values())

    def _forget(self, busy: set[str]) -> None:
        surplus = len(self._sessions) - self._config.num_sessions
        idle = [key for key in self._sessions if key not in busy] if surplus > 0 else []
        self.release(idle[: max(surplus, 0)])


def _trees(row: _Row) -> list[DraftTree]:
    """Of the sides that have got as far as the context."""
    answers = zip(row.session.have, row.session.drafts, strict=True)
    return [draft for have, draft in answers if have == row.context.committed and isinstance(draft, DraftTree)]


def _places(tree: DraftTree, merged: DraftTree) -> dict[int, int]:
    """Of each node of `tree` that is in `merged`, which holds all of its paths as far as it has them, the node there."""
    places = {0: 0}
    for node in range(1, len(tree)):
        above = places.get(tree.parents[node])
        place = None if above is None else merged.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    return places


def _refusal(row: _Row) -> Refusal:
    return Refusal(row.context.session, row.context.epoch, min(row.session.have))


def _rest(context: DraftContext, have: int, needs: DrafterNeeds, samples: tuple[int, ...]) -> DraftContext:
    """What a side with committed length `have`, not below the context's base, is still to be told."""
    features = context.features[max(have - 1, 0) - max(context.base - 1, 0) :] if context.features is not None else None
    told = replace(context, base=have, tokens=context.tokens[have - context.base :], samples=samples)
    return replace(told, features=features if needs.features else None)
