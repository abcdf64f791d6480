"""Which token slots belong to which session of a drafter: commits in, slots or refusals out. Knows no tensors, no heads.

The one book of all drafters that cache something for each session. A drafter may keep a state of its own beside the slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from eyas.cache.slots import SlotAllocator, Slots
from eyas.commit import Refusal
from eyas.drafters.base import DraftContext

StateT = TypeVar("StateT")


def no_slots() -> Slots:
    """What a session that caches nothing holds."""
    return np.zeros(0, dtype=np.int64)


@dataclass
class Session(Generic[StateT]):
    """committed: tokens known. slots: of what is cached of them, in order; scratch: for the rows of a tree. A session that
    did not fit has neither: then it is dormant, until there is ample room, and for good if it is longer than a session may
    be. num_new: slots that it was given last. state: what the drafter keeps; it goes with the slots or the scratch that it
    is about."""

    epoch: int
    committed: int = 0
    slots: Slots = field(default_factory=no_slots)
    scratch: Slots = field(default_factory=no_slots)
    num_new: int = 0
    state: StateT | None = None
    dormant: bool = False


class SlotSessions(Generic[StateT]):
    """Sessions and their slots. When slots run out, trees of idle sessions give way first, then the session unused for
    longest is forgotten."""

    def __init__(self, num_slots: int, context_length: int, most_scratch: int = 0) -> None:
        """context_length: tokens of the longest session that gets slots. most_scratch: slots of the largest tree."""
        self._allocator = SlotAllocator(num_slots)
        self._context_length = context_length
        self._most_scratch = most_scratch
        self._sessions: OrderedDict[str, Session[StateT]] = OrderedDict()

    def __getitem__(self, key: str) -> Session[StateT]:
        return self._sessions[key]

    def get(self, key: str) -> Session[StateT] | None:
        """A session, if it is known."""
        return self._sessions.get(key)

    def follow(self, context: DraftContext) -> Session[StateT] | Refusal:
        """The session that the context continues, now with its tokens; or a refusal where it continues none, or one that
        has slept and for which there is room now."""
        session = self._sessions.get(context.session)
        if session is None or session.epoch != context.epoch:
            self.release([context.session])
            session = self._sessions[context.session] = Session(context.epoch)
        if session.committed != context.base:
            return Refusal(context.session, context.epoch, session.committed)
        self._sessions.move_to_end(context.session)
        if session.dormant and self._has_ample_room(context.committed):
            session.committed, session.dormant = 0, False
            return Refusal(context.session, context.epoch, 0)
        session.committed = context.committed
        return session

    def claim(self, session: Session[StateT], count: int, num_scratch: int, busy: set[str]) -> bool:
        """Give a session `count` more slots, and others for a tree. Where they do not fit it is followed without any: it
        gets no trees, and costs nothing.

        busy: keys of the sessions of the same call, which nobody may forget.
        """
        fits = session.committed <= self._context_length and not session.dormant
        if not fits or not self._make_room(count + num_scratch, busy):
            self._drop_tree(session)
            self._allocator.free(session.slots)
            session.slots, session.num_new, session.state, session.dormant = no_slots(), 0, None, True
            return False
        session.slots = np.concatenate([session.slots, self._allocator.take(count)])
        session.scratch, session.num_new = self._allocator.take(num_scratch), count
        return True

    def keep(self, session: Session[StateT], accepted: Slots) -> None:
        """Move `accepted` from the scratch to the slots of a session; the rest of its tree goes."""
        session.slots = np.concatenate([session.slots, accepted])
        self._allocator.free(np.setdiff1d(session.scratch, accepted, assume_unique=True))
        session.scratch, session.state = no_slots(), None

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

    def _has_ample_room(self, committed: int) -> bool:
        """Whether a session of so many tokens, told again from the start, would get slots."""
        return committed <= self._context_length and self._allocator.num_free >= 2 * committed + self._most_scratch

    def _drop_tree(self, session: Session[StateT]) -> None:
        if len(session.scratch):
            self._allocator.free(session.scratch)
            session.scratch, session.state = no_slots(), None

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


def num_features(context: DraftContext) -> int:
    """Pairs of a feature and the token behind it that a context completes: the very first token has no feature before it."""
    return len(context.tokens) - (1 if context.base == 0 else 0)
