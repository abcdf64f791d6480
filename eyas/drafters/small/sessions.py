"""Which slots of a small model's KV belong to which session: commits in, slots or refusals out. Integers only.

Keys and values of a token depend on the tokens before it alone: what a tree computed for accepted tokens is kept.
Legend: L levels of a tree that were run through the model, W rows of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.cache.slots import SlotAllocator, Slots
from eyas.commit import Refusal
from eyas.drafters.base import Draft, DraftContext
from eyas.models.inputs import Ints
from eyas.tree import DraftTree


def no_slots() -> Slots:
    """What a session without KV holds."""
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class TreeRows:
    """What the last tree ran through the model, [L, W] each: tokens, rows of their parents in the level above, slots."""

    tokens: Ints
    parents: Ints
    slots: Slots

    def path(self, tokens: Sequence[int]) -> Slots:
        """Slots of the rows that lead from the root along `tokens`, as far as there are any."""
        row, found = 0, []
        for level, token in enumerate(tokens[: len(self.tokens)]):
            (rows,) = np.nonzero((self.tokens[level] == token) & (self.parents[level] == row))
            if not len(rows):
                break
            row = int(rows[0])
            found.append(self.slots[level, row])
        return np.array(found, dtype=np.int64)


@dataclass
class SmallSession:
    """committed: tokens known; slots: one per token, or none if the session did not fit: then it is dormant, until there is
    ample room. num_new: of these, how many are still to be run. scratch: slots for rows of a tree; rows: who has them."""

    epoch: int
    committed: int = 0
    num_new: int = 0
    slots: Slots = field(default_factory=no_slots)
    scratch: Slots = field(default_factory=no_slots)
    rows: TreeRows | None = None
    dormant: bool = False


class SmallSessions:
    """Sessions and their slots. When slots run out, trees of idle sessions give way first, then the session unused for
    longest is forgotten."""

    def __init__(self, num_slots: int, context_length: int) -> None:
        self._allocator = SlotAllocator(num_slots)
        self._context_length = context_length
        self._sessions: OrderedDict[str, SmallSession] = OrderedDict()

    def __getitem__(self, key: str) -> SmallSession:
        return self._sessions[key]

    def admit(self, context: DraftContext, num_scratch: int, busy: set[str]) -> Draft:
        """None if the context continues its session and has slots, `num_scratch` for its tree among them; else the answer.

        busy: sessions of the same call, which nobody may forget.
        """
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = SmallSession(context.epoch)
        if session.committed != context.base:
            return Refusal(context.session, context.epoch, session.committed)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._allocator.num_free >= 2 * context.committed + num_scratch:
            session.committed, session.dormant = 0, False
            return Refusal(context.session, context.epoch, 0)
        self._keep_accepted(session, context.tokens)
        session.committed = context.committed
        num_new = context.committed - len(session.slots)
        fits = context.committed <= self._context_length and not session.dormant
        if not fits or not self._make_room(num_new + num_scratch, busy):
            self._put_to_sleep(session)
            return DraftTree.root_only(context.tokens[-1])
        session.num_new = num_new
        session.slots = np.concatenate([session.slots, self._allocator.take(num_new)])
        session.scratch = self._allocator.take(num_scratch)
        return None

    def release(self, keys: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._allocator.free(session.slots)
                self._allocator.free(session.scratch)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        sessions = self._sessions.values()
        self._allocator.check_owners([slots for session in sessions for slots in (session.slots, session.scratch)])

    @property
    def num_free(self) -> int:
        """Slots that no session has."""
        return self._allocator.num_free

    def _keep_accepted(self, session: SmallSession, tokens: Sequence[int]) -> None:
        """Move the slots of accepted rows from the tree to the session. The last token is run anew for its logits."""
        if session.rows is not None:
            accepted = session.rows.path(tokens[:-1])
            session.slots = np.concatenate([session.slots, accepted])
            session.scratch = np.setdiff1d(session.scratch, accepted, assume_unique=True)
        self._drop_tree(session)

    def _drop_tree(self, session: SmallSession) -> None:
        self._allocator.free(session.scratch)
        session.scratch, session.rows = no_slots(), None

    def _make_room(self, count: int, busy: set[str]) -> bool:
        """Free slots until there are `count`, of sessions that are not busy; none if even all of them would not do."""
        idle = [key for key in self._sessions if key not in busy]
        held = sum(len(self[key].slots) + len(self[key].scratch) for key in idle)
        if self._allocator.num_free + held < count:
            return False
        for key in idle:
            if self._allocator.num_free < count:
                self._drop_tree(self[key])
        for key in idle:
            if self._allocator.num_free < count:
                self.release([key])
        return self._allocator.num_free >= count

    def _put_to_sleep(self, session: SmallSession) -> None:
        """A session that does not fit is followed without KV: it gets no trees, and costs nothing."""
        self._drop_tree(session)
        self._allocator.free(session.slots)
        session.slots, session.num_new, session.dormant = no_slots(), 0, True
