"""Two drafters at once: commits to both, their trees merged into one by score. Knows not what they are.

Either side may forget a session by itself. The union then refuses from where that side stands, and the other is told only
what it has not been told yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eyas.commit import Refusal
from eyas.config import TreeConfig, UnionConfig
from eyas.drafters.base import Draft, DraftContext, DrafterNeeds, LocalDrafter
from eyas.drafters.union.merging import merge_trees
from eyas.errors import ConfigError
from eyas.tree import DraftTree


@dataclass
class _Session:
    """have, drafts: committed length and last answer of each side."""

    epoch: int
    have: list[int]
    drafts: list[Draft]


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
        if first.needs.samples or second.needs.samples:
            raise ConfigError(
                "a drafter that learns from the samples at all nodes of its tree, such as lookahead, cannot be in a union, "
                "where nodes give way to those of the other; use it alone"
            )
        self._sides = (first, second)
        self._tree = tree
        self._config = config
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    @property
    def needs(self) -> DrafterNeeds:
        first, second = (side.needs for side in self._sides)
        return first if first.features else second

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
        told = [_rest(row.context, row.session.have[k], side.needs) for row in behind]
        drafts = side.propose(told) if told else []
        for row, draft in zip(behind, drafts, strict=True):
            row.session.have[k] = draft.have if isinstance(draft, Refusal) else row.context.committed
            row.session.drafts[k] = draft

    def _merge(self, rows: Sequence[_Row]) -> list[DraftTree]:
        """What the sides of each session have to say, as one tree."""
        budgets = [row.context.budget for row in rows]
        cut = [replace(budget, max_nodes=min(budget.max_nodes, self._tree.nodes)) for budget in budgets]
        roots = [row.context.tokens[-1] for row in rows]
        return merge_trees(roots, [_trees(row) for row in rows], cut, self._config.floor)

    def _forget(self, busy: set[str]) -> None:
        surplus = len(self._sessions) - self._config.num_sessions
        idle = [key for key in self._sessions if key not in busy] if surplus > 0 else []
        self.release(idle[: max(surplus, 0)])


def _trees(row: _Row) -> list[DraftTree]:
    """Of the sides that have got as far as the context."""
    answers = zip(row.session.have, row.session.drafts, strict=True)
    return [draft for have, draft in answers if have == row.context.committed and isinstance(draft, DraftTree)]


def _refusal(row: _Row) -> Refusal:
    return Refusal(row.context.session, row.context.epoch, min(row.session.have))


def _rest(context: DraftContext, have: int, needs: DrafterNeeds) -> DraftContext:
    """What a side with committed length `have`, not below the context's base, is still to be told."""
    features = context.features[max(have - 1, 0) - max(context.base - 1, 0) :] if context.features is not None else None
    return replace(
        context, base=have, tokens=context.tokens[have - context.base :], features=features if needs.features else None
    )
