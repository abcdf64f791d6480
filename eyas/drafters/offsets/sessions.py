"""Which slots belong to which session of a drafter: commits in, slots or refusals out. Integers only; knows no heads.

Feature i of a session belongs to its token i; the very last token has none yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.cache.slots import SlotAllocator, Slots
from eyas.commit import Refusal
from eyas.drafters.base import Draft, DraftContext
from eyas.tree import DraftTree

NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)


@dataclass
class Session:
    """committed: tokens known. slots: of its features, in order; none if the session did not fit: then it is dormant, until
    there is ample room."""

    epoch: int
    committed: int = 0
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    dormant: bool = False


class SlotSessions:
    """Sessions and their slots; the session unused for longest is forgotten when slots run out.

    num_slots: 0 for a drafter that keeps nothing of a feature once it has drafted: then no session lacks room.
    """

    def __init__(self, num_slots: int, context_length: int) -> None:
        self._context_length = context_length
        self._allocator = SlotAllocator(num_slots)
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __getitem__(self, key: str) -> Session:
        return self._sessions[key]

    def admit(self, context: DraftContext, busy: set[str]) -> Draft:
        """None if the context continues its session, has a feature and slots for all its new ones; else the answer to give.

        busy: sessions of the same call, which nobody may forget.
        """
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = Session(context.epoch)
        if session.committed != context.base:
            return Refusal(context.session, context.epoch, session.committed)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._allocator.num_free >= 2 * context.committed:
            session.committed, session.dormant = 0, False
            return Refusal(context.session, context.epoch, 0)
        session.committed = context.committed
        count = num_features(context)
        wanted = count if self._allocator.num_slots else 0
        fits = context.committed <= self._context_length and not session.dormant and self._make_room(wanted, busy)
        if not fits:
            self._put_to_sleep(session)
        if not fits or not count:
            return DraftTree.root_only(context.tokens[-1])
        session.slots = np.concatenate([session.slots, self._allocator.take(wanted)])
        return None

    def release(self, keys: Sequence[str]) -> None:
        """Forget sessions; unknown ones are ignored."""
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._allocator.free(session.slots)

    def check(self) -> None:
        """Assert the integrity of slots and owners."""
        self._allocator.check_owners([session.slots for session in self._sessions.values()])

    @property
    def num_free(self) -> int:
        """Slots that no session has."""
        return self._allocator.num_free

    def _make_room(self, count: int, busy: set[str]) -> bool:
        """Forget the sessions unused for longest, but not busy ones, until `count` slots are free; none if even all of them
        would not do."""
        idle = [key for key in self._sessions if key not in busy]
        if self._allocator.num_free + sum(len(self._sessions[key].slots) for key in idle) < count:
            return False
        while self._allocator.num_free < count and idle:
            self.release([idle.pop(0)])
        return self._allocator.num_free >= count

    def _put_to_sleep(self, session: Session) -> None:
        """A session that does not fit is followed without slots: it gets no trees, and costs nothing."""
        self._allocator.free(session.slots)
        session.slots, session.dormant = NO_SLOTS, True


def num_features(context: DraftContext) -> int:
    """Features that a context brings."""
    return len(context.tokens) - (1 if context.base == 0 else 0)
